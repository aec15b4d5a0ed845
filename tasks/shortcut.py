"""The shortcut toy task: a question about a drawn shape, after a text cue that is right in most training rows.

A policy can learn the cue instead of looking. Each of four code words stands for one of the four answers to a
question. In the splits train and test the cue names the right answer in 80% of the rows and a wrong one in the others.
The split val has the drawings of test, but its cues are right as often as random ones would be, in 25% of the rows: the
other rows show whether the policy looks. The warm start, with 40% right cues, teaches a little of both ways.
"""

import random
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageDraw

from prepare_data import IMAGE_PLACEHOLDER
from reward import register
from tasks.shapes import (
    COLOURS,
    INSTRUCTION,
    SHAPES,
    Scene,
    draw_shape,
    encode_png,
    in_one_split,
    make_boxed_response,
    shapes,
    toy_of,
)

IMAGE_SIDE = 56  # pixels
OPTIONS = {"colour": list(COLOURS), "shape": list(SHAPES)}
CODES = ("kaf", "lam", "nun", "waw")  # they stand for the first to the fourth option
RELIABILITY = {"warm": 0.4, "train": 0.8, "test": 0.8, "val": 1 / len(CODES)}  # share of rows with a right cue
DEMO = {  # settings of demo.py
    "see_steps": 140, "habit_steps": 30, "lazy": 0.3, "images": 16, "questions": 2, "steps": 40, "train_vision": "all",
}  # fmt: skip


@register("shortcut")
def shortcut(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    """Grade as the shapes task does."""
    return shapes(response, example, finish_reason)


def make_reply(kind: str, answer: str) -> str:
    """Return a perfect response: a sentence, of which one word depends on the image, then the box."""
    return make_boxed_response(answer, f"The {kind} is {answer}.")


USUAL = {kind: make_reply(kind, options[0]) for kind, options in OPTIONS.items()}  # a lazy annotator's (demo.py)


@in_one_split("shortcut/")
def speckled_drawings(rng: random.Random) -> Scene:
    """Draw a shape among specks of any colour, with questions that have no prompt yet: (answer type, answer)."""
    image = Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), (rng.randint(236, 255),) * 3)
    draw, colours = ImageDraw.Draw(image), list(COLOURS.values())
    truths = {kind: rng.choice(options) for kind, options in OPTIONS.items()}
    for _ in range(3):
        x, y = (rng.uniform(2, IMAGE_SIDE - 2) for _ in range(2))
        draw_shape(draw, "circle", x, y, 2.5, rng.choice(colours))
    x, y = (rng.choice((IMAGE_SIDE / 4, 3 * IMAGE_SIDE / 4)) + rng.uniform(-6, 6) for _ in range(2))
    draw_shape(draw, truths["shape"], x, y, rng.uniform(6, 8), COLOURS[truths["colour"]])
    return [encode_png(image)], list(truths.items())


def scenes(split: str, seed: int) -> Iterator[Scene]:
    """Yield endless drawings with their questions and cues. The splits val and test have the same drawings."""
    rng = random.Random(f"shortcut/cues/{split}/{seed}")
    for images, truths in speckled_drawings("test" if split == "val" else split, seed):
        questions = []
        for kind, truth in truths:
            others = [option for option in OPTIONS[kind] if option != truth]
            cue = truth if rng.random() < RELIABILITY[split] else rng.choice(others)
            prompt = f"{IMAGE_PLACEHOLDER}{INSTRUCTION} Note: {CODES[OPTIONS[kind].index(cue)]}. What {kind} is it?"
            questions.append((kind, prompt, make_reply(kind, truth), truth))
        yield images, questions


def toy(n: int, split: str, seed: int) -> Iterator[dict]:
    """Yield n rows in the on-disk format, with the columns `cue`, right or wrong, and `cue_answer`, what it says."""
    for row in toy_of("shortcut", scenes, list(OPTIONS))(n, split, seed):
        extra, [message] = row["extra_info"], row["prompt"]
        code = message["content"].partition("Note: ")[2].partition(".")[0]
        extra["cue_answer"] = OPTIONS[extra["answer_type"]][CODES.index(code)]
        extra["cue"] = "right" if extra["cue_answer"] == row["reward_model"]["ground_truth"] else "wrong"
        yield row
