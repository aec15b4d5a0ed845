"""The digits task: a question about an image with one to four handwritten digits, which are real pen strokes.

The digits ship with scikit-learn (`load_digits`): the 1,797 of the test set of "Optical Recognition of Handwritten
Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, 1998, doi.org/10.24432/C50P49, CC BY 4.0), 8 by 8
pixels each, written by 13 people. A fifth of them is only in the test split: no digit is in both train and test.
"""

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Any

from PIL import Image

from errors import as_user_error
from prepare_data import IMAGE_PLACEHOLDER
from reward import register
from tasks.shapes import CELL, Scene, encode_png, make_boxed_response, make_exists_question, make_split_rng, toy_of
from tasks.vqa import answerable, vqa

INSTRUCTION = r"Answer in \boxed{}."
ANSWER_TYPES = ("count", "exists", "largest", "sum")
DIGITS = [str(n) for n in range(10)]
TEST_SHARE = 0.2
SIZE = 24  # pixels per side of a digit, in a cell of 28
CELLS = 4  # 2 by 2
DEMO = {"see_steps": 700, "habit_steps": 60, "images": 40, "questions": 1, "steps": 40}  # settings of demo.py


@register("digits", answerable=answerable)
def digits(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    """Grade as the vqa task does: numbers by value, yes and no by meaning; several answers are wrong."""
    return vqa(response, example, finish_reason)


@cache
def load_handwritten_digits(test: bool) -> list[tuple[Image.Image, int]]:
    """Return the digits of the test split, or all others, as (black on white image, value) pairs.

    The hash of a digit's pixels decides its split, so that equal digits are in the same split.
    """
    with as_user_error(ImportError, "the digits task needs scikit-learn; pip install -r requirements.txt"):
        from sklearn.datasets import load_digits
    dataset = load_digits()
    kept = []
    for pixels, digit in zip(dataset.images, dataset.target, strict=True):
        strokes = (255 - 255 * pixels / 16).astype("uint8")
        if (hashlib.sha256(strokes.tobytes()).digest()[0] < 256 * TEST_SHARE) == test:
            kept.append((Image.fromarray(strokes).resize((SIZE, SIZE), Image.Resampling.BICUBIC), int(digit)))
    return kept


def scenes(split: str, seed: int) -> Iterator[Scene]:
    """Yield endless images, whose digits are at random positions in separate cells, and the questions about them."""
    rng = make_split_rng("digits/", split, seed)
    source = load_handwritten_digits(split == "test")
    while True:
        image = Image.new("L", (2 * CELL, 2 * CELL), 255)
        # half of the warm start's images have a single digit, so that it learns to read digits first
        chosen = rng.sample(source, rng.choice((1, 1, 1, 1, 2, 2, 3, 4)) if split == "warm" else rng.randint(1, CELLS))
        for (digit, _), cell in zip(chosen, rng.sample(range(CELLS), len(chosen)), strict=True):
            x, y = (corner * CELL + rng.randint(0, CELL - SIZE) for corner in (cell % 2, cell // 2))
            image.paste(digit, (x, y))
        values = [value for _, value in chosen]
        absent = [digit for digit in DIGITS if int(digit) not in values]
        questions = [
            ("count", "How many digits are there?", str(len(values))),
            make_exists_question(rng, "Is there a {}?", str(rng.choice(values)), absent),
            ("largest", "What is the largest digit?", str(max(values))),
            ("sum", "What is the sum of the digits?", str(sum(values))),
        ]
        thought = " ".join(map(str, sorted(values)))
        prefix = f"{IMAGE_PLACEHOLDER}{INSTRUCTION}"  # it comes first so that all questions about an image share it
        yield (
            [encode_png(image)],
            [
                (kind, f"{prefix} {question}", make_boxed_response(truth, thought), truth)
                for kind, question, truth in questions
            ],
        )


toy = toy_of("digits", scenes, ANSWER_TYPES)
