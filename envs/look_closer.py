"""Look closer: the prompt shows images small, and a call shows a part of one larger. For rows of any task with images.

The observation for `<look>top left</look>` or `<look>0.1 0.2 0.6 0.7</look>` (left, top, right, bottom, as fractions)
is that part, cropped from the original image. A response without a call ends the episode.

The toy: four frames, one of them coloured, each around four patterns that are half black in every block of 4 by 4
pixels. The small view, a quarter as wide, shows uniform grey: the same bytes, whatever the patterns are.
"""

import math
import random
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from itertools import product
from typing import Any

from PIL import Image

from envs import Environment, Observation, append_instruction, need_number, parse_tool_call
from errors import UserError, need
from prepare_data import IMAGE_PLACEHOLDER, Example, decode_image
from reward import register
from sources.images import MAX_ASPECT
from tasks.shapes import COLOURS, Scene, encode_png, in_one_split, make_boxed_response, toy_of
from tasks.vqa import answerable, vqa


def make_instruction(scale: int) -> str:
    """Return the instruction for prompts. `scale`: see LookCloser."""
    box = " ".join(f"{scale * tenths / 10:g}" for tenths in (1, 2, 6, 7))
    return (
        f"Images are shown small. To see a part of one larger, write <look>top left</look>, or a box such as "
        f"<look>{box}</look> (left, top, right, bottom, from 0 to {scale}; <look>2: {box}</look> in the second image). "
        r"When you know the answer, state it in \boxed{}."
    )


INSTRUCTION = make_instruction(1)
LOOK_AGAIN = "Look again or answer."


@register("look_closer", answerable=answerable)
def look_closer(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    """Return the reward of the last response, graded as a visual question."""
    return vqa(response, example, finish_reason)


# --- calls --------------------------------------------------------------------------------------------------------

Box = tuple[Fraction | int, ...]  # left, top, right, bottom, from 0 to 1
MAX_CALL_CHARS = 200
HALF = Fraction(1, 2)
FIRST_HALF, SECOND_HALF, FULL_RANGE, MIDDLE_HALF = (0, HALF), (HALF, 1), (0, 1), (HALF / 2, 3 * HALF / 2)
REGION_WORDS = {"left": ("across", FIRST_HALF), "right": ("across", SECOND_HALF),
                "top": ("down", FIRST_HALF), "upper": ("down", FIRST_HALF),
                "bottom": ("down", SECOND_HALF), "lower": ("down", SECOND_HALF)}  # fmt: skip
REGION_WORDS |= dict.fromkeys(("centre", "center", "middle"), ("centre", MIDDLE_HALF))
FILLER_WORDS = "the of image quadrant corner half part side".split()
NUMBER_PATTERN = re.compile(r"([+-]?(?:[0-9]{1,9}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}))(%?)")
NO_PLACE = (
    "There is no such place. Name a quadrant such as top left, or a box of four numbers: left, top, right, bottom."
)


def named_box(text: str) -> Box:
    """Return the box of a text such as `top left`, `the right half` or `centre`. Raise UserError if it names no part of
    an image; the message is an observation for the policy."""
    words = [word for word in re.split("[ _-]+", text) if word not in FILLER_WORDS]
    ranges = dict(REGION_WORDS.get(word, ("unknown", FULL_RANGE)) for word in words)
    once = len(ranges) == len(words) or "centre" in ranges  # `middle center` is fine
    need(1 <= len(words) <= 2 and once and "unknown" not in ranges, NO_PLACE)
    default = ranges.get("centre", FULL_RANGE)  # for a direction that is not named; in `centre left` the middle half
    (left, right), (top, bottom) = ranges.get("across", default), ranges.get("down", default)
    return left, top, right, bottom


def read_box(text: str, scale: int) -> Box:
    """Return the box that a call names; `scale` is the coordinate of the right and lower edges. The box is clipped to
    the image. Raise UserError if it is invalid; the message is an observation for the policy and repeats nothing of the
    text."""
    need(len(text) <= MAX_CALL_CHARS, f"That is too long. {NO_PLACE}")
    text = " ".join(text.lower().split())
    if not re.search("[0-9]", text):
        return named_box(text)
    numbers = [NUMBER_PATTERN.fullmatch(item) for item in re.split("[ ,;]+", text.strip("()[]{} "))]
    need(all(numbers) and len(numbers) == 4, NO_PLACE)
    edges = [Fraction(number[1]) / (100 if number[2] else scale) for number in numbers]
    left, top, right, bottom = (min(max(edge, 0), 1) for edge in edges)
    need(left < right and top < bottom, f"That box is empty: left < right and top < bottom, from 0 to {scale}.")
    return left, top, right, bottom


def read_call(text: str, images: int, scale: int) -> tuple[int, Box]:
    """Return (index of the image, box in it) for a call such as `top left` or `2: top left`. `images` is the number of
    images."""
    number, _, box = (text[: MAX_CALL_CHARS + 1] if ":" in text else f"1:{text}").rpartition(":")
    number = number.lower().replace("image", "").strip()
    need(re.fullmatch("[0-9]{1,4}", number) and 1 <= int(number) <= images,
         f"There is no such image; there are {images}, from 1.")
    return int(number) - 1, read_box(box, scale)


def crop_image(image: Image.Image, box: Box) -> Image.Image:
    """Return all pixels that a box covers at least in part. Raise UserError if they are too narrow for any model; the
    message is an observation for the policy."""
    (left, top, right, bottom), (width, height) = box, image.size
    edges = int(left * width), int(top * height), math.ceil(right * width), math.ceil(bottom * height)
    part = image.crop(edges)
    need(max(part.size) < MAX_ASPECT * min(part.size), "That box is too thin; ask for a wider one.")
    return part


def downscale(image: Image.Image, longest: int) -> Image.Image:
    """Return an image with sides of at most `longest` pixels, by averaging; a smaller image is returned unchanged."""
    longer_side = max(image.size)
    size = tuple(-(-side * longest // longer_side) for side in image.size)  # rounded up: no thinner than before
    return image if longer_side <= longest else image.resize(size, Image.Resampling.BOX)


decode_image_cached = lru_cache(8)(decode_image)  # the samples of a group crop the same images


# --- environment --------------------------------------------------------------------------------------------------


class LookCloser(Environment):
    """The environment of `--env look_closer`. `view`, `crop`: longest side in pixels of images in the prompt, and of
    parts; `scale`: coordinate of the right and lower edges in boxes, such as 1000; `cost`: subtracted from the reward
    for each call."""

    def __init__(self, view: int = 448, crop: int = 448, scale: int = 1, cost: float = 0.0):
        for name, value in {"view": view, "crop": crop, "scale": scale}.items():
            need(type(value) is int and value > 0, f"--env-settings {name}={value}: give a whole number above 0")
        need_number("cost", cost, 1)
        self.view, self.crop, self.scale, self.cost = view, crop, scale, cost
        self.images: Sequence[bytes] = ()

    def reset(self, example: Example) -> tuple[list[dict[str, str]], list[Image.Image]]:
        need(len(example.images) > 0, f"row {example.uid!r} has no image, which --env look_closer needs; remove it")
        self.images = example.images
        views = [downscale(decode_image_cached(data), self.view) for data in example.images]
        return append_instruction(example.messages, make_instruction(self.scale), "<look>"), views

    def step(self, response: str) -> Observation:
        try:
            call = parse_tool_call(response, "look")
            if call is None:
                return Observation(done=True)
            index, box = read_call(call, len(self.images), self.scale)
            part = crop_image(decode_image_cached(self.images[index]), box)
        except UserError as error:
            return Observation(f"{error} {LOOK_AGAIN}", reward=-self.cost)
        return Observation(f"{IMAGE_PLACEHOLDER}{LOOK_AGAIN}", [downscale(part, self.crop)], reward=-self.cost)


# --- toy ----------------------------------------------------------------------------------------------------------

WIDTH = 2  # width of a stripe in pixels; the small view averages blocks of 4 by 4 pixels
PATTERN_CELL = 14 * WIDTH  # side of a pattern's cell in pixels; a quadrant has four, in reading order
FRAME = 4 * WIDTH  # width of a frame in pixels
PATTERNS = ("rows", "columns", "diagonals", "checks")
QUADRANTS = ("top left", "top right", "bottom left", "bottom right")
TOY_INSTRUCTION = r"<look>top left</look> shows a part. Answer in \boxed{}."
QUESTION = "What is in the coloured frame?"
FRAME_GREY = (128, 128, 128)  # colour of the other frames
USUAL = {"patterns": make_boxed_response("rows rows rows rows")}
ENV = {"max_turns": 2, "env_settings": ("view=28", "crop=56")}  # settings of demo.py
DEMO = {"see_steps": 150, "habit_steps": 40, "images": 32, "lazy": 0.9, "steps": 25, "eval_every": 5}


@cache
def pattern_mask(pattern: str) -> Image.Image:
    """Return the mask of a pattern's black pixels: half of each block of 2 by 2 WIDTHs."""
    mask = Image.new("1", (PATTERN_CELL - FRAME,) * 2)
    for x, y in product(range(mask.width), repeat=2):
        squares = WIDTH * (x // WIDTH + y // WIDTH)
        along = {"rows": y, "columns": x, "diagonals": x + y, "checks": squares}[pattern]
        mask.putpixel((x, y), along % (2 * WIDTH) < WIDTH)
    return mask


def draw_frame(rng: random.Random, colour: tuple[int, int, int], patterns: Sequence[str]) -> Image.Image:
    """Draw a quadrant: four patterns, all with the same dark and light colour, in a frame."""
    image = Image.new("RGB", (2 * PATTERN_CELL, 2 * PATTERN_CELL), colour)
    dark, light = (rng.randint(0, 40),) * 3, (rng.randint(215, 255),) * 3
    for i, pattern in enumerate(patterns):
        left, top = (PATTERN_CELL if second else FRAME for second in (i % 2, i // 2))
        image.paste(light, (left, top, left + PATTERN_CELL - FRAME, top + PATTERN_CELL - FRAME))
        image.paste(dark, (left, top), pattern_mask(pattern))
    return image


@in_one_split("look_closer/")
def scenes(rng: random.Random) -> Scene:
    """Draw a scene: four frames, one of them coloured."""
    image, coloured = Image.new("RGB", (4 * PATTERN_CELL, 4 * PATTERN_CELL)), rng.randrange(4)
    frames = [rng.choices(PATTERNS, k=4) for _ in range(4)]
    for i, patterns in enumerate(frames):
        colour = COLOURS[rng.choice(list(COLOURS))] if i == coloured else FRAME_GREY
        image.paste(draw_frame(rng, colour, patterns), (2 * PATTERN_CELL * (i % 2), 2 * PATTERN_CELL * (i // 2)))
    truth = " ".join(frames[coloured])
    return [encode_png(image)], [
        ("patterns", f"{IMAGE_PLACEHOLDER}{TOY_INSTRUCTION} {QUESTION}", make_boxed_response(truth), truth)
    ]


toy = toy_of("look_closer", scenes, ["patterns"])


def expert(example: Example, responses: Sequence[str], observations: Sequence[Mapping[str, str] | str]) -> str:
    """Return the perfect next response to a toy: first a call for the coloured frame, then the answer."""
    if responses:
        return make_boxed_response(example.ground_truth)
    image = decode_image_cached(example.images[0])
    colours = [image.getpixel((2 * PATTERN_CELL * (i % 2), 2 * PATTERN_CELL * (i // 2))) for i in range(4)]
    [quadrant] = [name for name, colour in zip(QUADRANTS, colours, strict=True) if colour != FRAME_GREY]
    return f"<look>{quadrant}</look>"
