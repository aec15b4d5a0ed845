"""The motion task: a question about a short video, for which no single frame is enough.

`direction`: which way does a square move? `order`: which of two lights comes first? The frames are the same either way,
so only their order tells. `count`: in how many frames is a light on? The order of the frames does not matter, so
`count` shows whether a model uses all frames, and the other two whether it uses their order.
"""

import random
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageDraw

from reward import register
from sources.content import VIDEO_PLACEHOLDER
from sources.images import encode_png
from sources.videos import Video
from tasks.shapes import INSTRUCTION, Scene, in_one_split, make_boxed_response, toy_of
from tasks.vqa import answerable, vqa

ANSWER_TYPES = ("direction", "order", "count")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
OPPOSITES = {"left": "right", "right": "left", "up": "down", "down": "up"}
FRAME_SIDE = 56  # pixels of a frame: 2 x 2 tokens of a Qwen2-VL vision tower
SQUARE = 12  # pixels per side
FPS = 2.0
# Frames of the first and the second light. Frame 3, which middle_frame shows, is as often the first as the second
ORDER_FRAMES = ((1, 2), (1, 3), (2, 4), (3, 4))
# settings of demo.py
DEMO = {"see_steps": 900, "habit_steps": 200, "images": 24, "questions": 1, "steps": 40, "train_vision": "all",
        "ablate": ("blank", "first_frame", "middle_frame", "permuted", "reversed", "reversed_answer")}  # fmt: skip


@register("motion", answerable=answerable)
def motion(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    """Grade as the vqa task does: numbers by value, words by themselves; several answers are wrong."""
    return vqa(response, example, finish_reason)


def draw_squares(background: int, light: int, squares: list[tuple[float, float]]) -> bytes:
    """Return a frame with squares at these (left, top) corners, as a PNG."""
    image = Image.new("RGB", (FRAME_SIDE, FRAME_SIDE), (background,) * 3)
    for x, y in squares:
        ImageDraw.Draw(image).rectangle((x, y, x + SQUARE - 1, y + SQUARE - 1), fill=(light,) * 3)
    return encode_png(image)


def random_corner(rng: random.Random) -> tuple[float, float]:
    return rng.randrange(FRAME_SIDE - SQUARE + 1), rng.randrange(FRAME_SIDE - SQUARE + 1)


def draw_direction(rng: random.Random) -> tuple[list[list], str]:
    """Return the squares of four frames, and where the square moves. The same positions occur in
    either direction."""
    answer = rng.choice(list(DIRECTIONS))
    step, (across, down) = rng.randint(4, 7), DIRECTIONS[answer]
    along, aside = rng.randrange(FRAME_SIDE - SQUARE - 3 * step + 1), rng.randrange(FRAME_SIDE - SQUARE + 1)
    x, y = (along, aside) if across else (aside, along)
    frames = [[(x + i * step * abs(across), y + i * step * abs(down))] for i in range(4)]
    return frames if across + down > 0 else frames[::-1], answer


def draw_order(rng: random.Random) -> tuple[list[list], str]:
    """Return the squares of six frames, in two of which a light is on, and the side of the first one. First and last
    frame are dark."""
    answer = rng.choice(("left", "right"))
    corners = {"left": (rng.randint(2, 10), rng.randint(2, 42)), "right": (rng.randint(34, 42), rng.randint(2, 42))}
    frames: list[list] = [[] for _ in range(6)]
    first, second = rng.choice(ORDER_FRAMES)
    frames[first], frames[second] = [corners[answer]], [corners[OPPOSITES[answer]]]
    return frames, answer


def draw_count(rng: random.Random) -> tuple[list[list], str]:
    """Return the squares of eight frames, in one to four of which a light is on, and their number. In any other order
    they could have been drawn as well."""
    n, corner = rng.randint(1, 4), random_corner(rng)
    lit = rng.sample(range(8), n)
    return [[corner] if i in lit else [] for i in range(8)], str(n)


DRAWINGS = {
    "direction": (draw_direction, "Which way does the square move?"),
    "order": (draw_order, "Which light comes first?"),
    "count": (draw_count, "In how many frames is the light on?"),
}


@in_one_split("motion/")
def scenes(rng: random.Random) -> Scene:
    """Draw a video of a random kind with its question."""
    kind = rng.choice(ANSWER_TYPES)
    draw, question = DRAWINGS[kind]
    squares, answer = draw(rng)
    background, light = rng.randint(0, 60), rng.randint(190, 255)
    video = Video(tuple(draw_squares(background, light, places) for places in squares), FPS)
    return [video], [(kind, f"{VIDEO_PLACEHOLDER}{INSTRUCTION} {question}", make_boxed_response(answer), answer)]


def toy(n: int, split: str, seed: int) -> Iterator[dict]:
    """Yield toy rows. `reversed_answer` is the answer if the video is played backwards."""
    for row in toy_of("motion", scenes, ANSWER_TYPES)(n, split, seed):
        truth = row["reward_model"]["ground_truth"]
        row["extra_info"]["reversed_answer"] = OPPOSITES.get(truth, truth)
        yield row
