"""The shapes toy task: one question about a small drawing, answered in one word or number.

It needs the image: an answer is right only if the model looks (see `--ablate` in eval.py).
"""

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from PIL import Image, ImageDraw

from errors import need
from prepare_data import IMAGE_PLACEHOLDER
from reward import (
    BOX_PATTERN,
    MAX_ANSWER_CHARS,
    SPECIAL_TOKEN_PATTERN,
    accuracy_and_format_reward,
    extract_boxed,
    register,
)
from sources.images import encode_png
from sources.videos import Video, content_bytes, split_media

SIDE = 84  # pixels: 3 x 3 cells of 28, and a cell is one merged patch of a Qwen2-VL vision tower
CELL = 28
COLOURS = {"red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 210), "yellow": (240, 200, 30)}
SHAPES = ("circle", "square", "triangle", "star")
ANGLES = (30, 60, 90, 120, 150)
ANSWER_TYPES = ("count", "colour", "shape", "exists", "angle")
INSTRUCTION = r"Answer in \boxed{}."  # it precedes the question so that all questions about an image share it
MAX_DRAWS = 10_000  # drawings without a usable one, after which a task is refused instead of looping for ever
SPLIT_SEEDS = {"warm": 1, "train": 2, "test": 3}  # the splits draw from different random streams

# --- reward -------------------------------------------------------------------------------------------------------


def normalize_answer_text(text: str) -> str:
    """Return a text in lower case, without needless spaces, a final period, LaTeX's text commands and degree signs."""
    text = " ".join(text.casefold().replace("$", " ").split())  # first, as the patterns below are slow on many spaces
    text = re.sub(r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|it|rm|sf)|boldsymbol) ?\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\^? ?\{? ?\\(?:circ|degree) ?\}?|°|\bdegrees?\b", " ", text)
    return " ".join(text.split()).removesuffix(".").rstrip()


def has_only_box(response: str, boxed: str) -> bool:
    """Return whether a response is only the box with this content, optionally after `<think>...</think>`."""
    answer = response.strip()
    if answer.startswith("<think>"):
        answer = answer.partition("</think>")[2].strip()
    only_box = len(BOX_PATTERN.findall(response)) == 1 and BOX_PATTERN.fullmatch(answer.removesuffix(f"{boxed}}}"))
    return bool(only_box) and not SPECIAL_TOKEN_PATTERN.search(response)


@register("shapes")
def shapes(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    r"""Return accuracy, format and their weighted sum, 0.9 * accuracy + 0.1 * format, as "reward".

    The format is an optional `<think>...</think>`, then one box, and nothing else. Accuracy compares plain text, not
    values; an empty answer is never right. Special tokens are not removed, so they make an answer wrong. Raise
    UserError if `extra["answer_type"]` is missing or unknown.
    """
    kind = example.extra.get("answer_type")
    need(kind in ANSWER_TYPES,
         f"row {example.uid!r}: answer_type {kind!r} is not one of {', '.join(ANSWER_TYPES)}; write the file again "
         "with `python prepare_data.py shapes`")
    boxed = extract_boxed(response)
    if boxed is None:
        return accuracy_and_format_reward(0.0, 0.0)
    accuracy = (
        len(boxed) <= MAX_ANSWER_CHARS
        and normalize_answer_text(boxed) == normalize_answer_text(example.ground_truth) != ""
    )
    return accuracy_and_format_reward(accuracy, has_only_box(response, boxed))


# --- toy --------------------------------------------------------------------------------------------------------------

# An item of `scenes(split, seed)`: images and videos, and questions as (answer type, prompt as in the rows, perfect
# response, truth).
Scene = tuple[list[bytes | Video], list[tuple[str, ...]]]
Scenes = Callable[[str, int], Iterator[Scene]]  # arguments: split, seed
Toy = Callable[[int, str, int], Iterator[dict]]  # arguments: number of rows, split, seed


def make_boxed_response(answer: str, thought: str = "") -> str:
    """Return a response with the perfect format."""
    return (f"<think>{thought}</think>" if thought else "") + rf"\boxed{{{answer}}}"


DEMO = {  # settings of demo.py
    "see_steps": 380, "habit_steps": 90, "lazy": 0.65, "images": 16, "steps": 45, "eval_every": 9,
    "train_vision": "all",
}  # fmt: skip
USUAL = {"count": "2", "colour": "red", "shape": "circle", "exists": "yes", "angle": "90"}
USUAL = {kind: make_boxed_response(answer) for kind, answer in USUAL.items()}  # a lazy annotator's answers (demo.py)


# --- images -------------------------------------------------------------------------------------------------------


CORNERS = {  # corners of shapes with radius 1 around (0, 0)
    "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "triangle": ((0, -1), (1, 1), (-1, 1)),
    "star": [(r * math.sin(i * math.pi / 5), -r * math.cos(i * math.pi / 5)) for i, r in enumerate([1.15, 0.45] * 5)],
}


def draw_shape(draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, fill: tuple) -> None:
    """Draw a shape of radius `r` around (x, y)."""
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    else:
        draw.polygon([(x + r * across, y + r * down) for across, down in CORNERS[shape]], fill=fill)


def draw_shapes(draw: ImageDraw.ImageDraw, rng: random.Random, fill: tuple, shape: str, count: int) -> None:
    """Draw `count` equal shapes in different cells, with a little jitter in position and size."""
    for cell in rng.sample(range(9), count):
        x = (cell % 3 + 0.5) * CELL + rng.uniform(-2, 2)
        y = (cell // 3 + 0.5) * CELL + rng.uniform(-2, 2)
        draw_shape(draw, shape, x, y, rng.uniform(8.5, 10.5), fill)


def draw_angle(draw: ImageDraw.ImageDraw, rng: random.Random, colour: str, missing: int) -> None:
    """Draw a straight angle cut by a ray: its left part is painted, its right part is the missing angle."""
    x, y, r = SIDE / 2 + rng.uniform(-2, 2), 60 + rng.uniform(-2, 2), 36 + rng.uniform(-2, 2)
    draw.pieslice((x - r, y - r, x + r, y + r), 180, 360 - missing, fill=COLOURS[colour])
    draw.line((x - r, y, x + r, y), fill=(0, 0, 0), width=2)
    radians = math.radians(missing)
    draw.line((x, y, x + r * math.cos(radians), y - r * math.sin(radians)), fill=(0, 0, 0), width=2)


def belongs_to_split(data: bytes, split: str) -> bool:
    """Return whether an image may occur in a split: the hash of its bytes decides between test and all other splits."""
    return (hashlib.sha256(data).digest()[0] < 64) == (split == "test")


def make_exists_question(rng: random.Random, question: str, truth: str, options: list[str]) -> tuple[str, str, str]:
    """Return (answer type, question, answer); the answer is yes as often as no."""
    present = rng.random() < 0.5
    subject = truth if present else rng.choice([option for option in options if option != truth])
    return "exists", question.format(subject), "yes" if present else "no"


def in_one_split(name: str) -> Callable[[Callable[[random.Random], Scene]], Scenes]:
    """Return a decorator that turns a function that draws one scene into a task's `scenes(split, seed)`.

    The scenes are endless, and no image is in two splits. UserError is raised if MAX_DRAWS drawings in a row are in
    the other splits.
    """

    def make(draw: Callable[[random.Random], Scene]) -> Scenes:
        def scenes(split: str, seed: int) -> Iterator[Scene]:
            rng = make_split_rng(name, split, seed)
            while True:
                drawn = (draw(rng) for _ in range(MAX_DRAWS))
                scene = next((scene for scene in drawn if belongs_to_split(content_bytes(scene[0][0]), split)), None)
                need(scene, f"--split {split}: none of {MAX_DRAWS:,} drawings of {name!r} belongs to it; a hash of an "
                     "image's bytes decides its split, so draw more different images")
                yield scene

        return scenes

    return make


def make_split_rng(name: str, split: str, seed: int) -> random.Random:
    """Return the random number generator for the drawings of a split."""
    need(split in SPLIT_SEEDS, f"--split {split!r}: toys have {', '.join(SPLIT_SEEDS)}")
    return random.Random(f"{name}{SPLIT_SEEDS[split]}/{seed}")


@in_one_split("")
def drawings(rng: random.Random) -> Scene:
    """Draw shapes or an angle, with questions that have no prompt yet: (answer type, question, answer)."""
    colour, shape, count = rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.randint(1, 4)
    missing = rng.choice(ANGLES) if rng.random() < 0.2 else None
    image = Image.new("RGB", (SIDE, SIDE), (rng.randint(236, 255),) * 3)
    if missing:
        draw_angle(ImageDraw.Draw(image), rng, colour, missing)
        return [encode_png(image)], [("angle", "What is the missing angle?", str(missing))]
    draw_shapes(ImageDraw.Draw(image), rng, COLOURS[colour], shape, count)
    return [encode_png(image)], [
        ("count", "How many shapes are there?", str(count)),
        ("colour", "What colour are they?", colour),
        ("shape", "Which shape is it?", shape),
        make_exists_question(rng, "Is there a {} shape?", colour, list(COLOURS)),
        make_exists_question(rng, "Is there a {}?", shape, list(SHAPES)),
    ]


def scenes(split: str, seed: int) -> Iterator[Scene]:
    """Yield endless drawings with their questions; no image is in two splits."""
    for images, questions in drawings(split, seed):
        yield (
            images,
            [
                (kind, f"{IMAGE_PLACEHOLDER}{INSTRUCTION} {question}", make_boxed_response(truth), truth)
                for kind, question, truth in questions
            ],
        )


def check_question(question: tuple, task: str) -> tuple[str, str, str, str]:
    """Return a question of a scene; raise UserError if it does not have four values."""
    need(len(question) == 4, f"scenes of the task {task!r}: a question has {len(question)} values, expected 4: (answer "
         "type, prompt, a response that earns the full reward, truth)")
    return question


def alternate_types(
    n: int, source: Iterator[Scene], kinds: Sequence[str], task: str = ""
) -> Iterator[tuple[list[bytes | Video], str, str, str]]:
    """Yield n times (images and videos, answer type, prompt, truth): one question per scene, no scene twice, the types
    in turn.

    Raise UserError if the scenes run out: they end, or MAX_DRAWS of them, plus ten times as many as were different so
    far, have no new one with a question of the type that is due.
    """
    waiting: dict[str, list] = {kind: [] for kind in kinds}
    seen = set()
    for index in range(n):
        kind = kinds[index % len(kinds)]
        drawn = islice(source, MAX_DRAWS + 10 * len(seen))
        while not waiting[kind]:
            images, questions = next(drawn, ((), ()))
            need(images, f"--n {n}: the task {task!r} has enough images for only {index} rows of this split: after "
                 f"{len(seen):,} different ones no other was drawn that has a question of type {kind!r}; pass --n "
                 f"{index} (in a demo, lower `rows` of DEMO), or draw more images, with mixed types")
            if tuple(images) not in seen:
                seen.add(tuple(images))
                answer_type, prompt, _, truth = check_question(questions[len(seen) % len(questions)], task)
                waiting[answer_type].append((images, prompt, truth))
        images, prompt, truth = waiting[kind].pop(0)
        yield images, kind, prompt, truth


def toy_of(
    task: str, scenes: Scenes, kinds: Sequence[str], prompts: str = "prompt", images: str = "images", answers: str = ""
) -> Toy:
    """Return the function `toy(n, split, seed)` of a task that draws its images.

    It yields n rows in the on-disk format, chosen by `alternate_types`. `prompts`, `images` and `answers` are names of
    columns.
    """

    def toy(n: int, split: str, seed: int) -> Iterator[dict]:
        for index, (media, kind, prompt, truth) in enumerate(alternate_types(n, scenes(split, seed), kinds, task)):
            answer = {answers: truth} if answers else {"reward_model": {"style": "rule", "ground_truth": truth}}
            uid = f"{task}-{split}-{seed}-{index}"
            files, clips = split_media(media)
            videos = [{"frames": list(clip.frames), "fps": clip.fps} for clip in clips]
            yield answer | ({"videos": videos} if videos else {}) | {
                "data_source": task,
                prompts: [{"role": "user", "content": prompt}],
                images: [{"bytes": file, "path": None} for file in files],
                "extra_info": {"split": split, "index": index, "uid": uid, "answer_type": kind},
            }

    return toy


toy = shapes_rows = toy_of("shapes", scenes, ANSWER_TYPES)
