"""Handwritten digits: one to four of them in an image, and a question about them. Real pen strokes.

The digits ship with scikit-learn (`load_digits`): the 1,797 of the test set of "Optical Recognition of Handwritten
Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, 1998, doi.org/10.24432/C50P49, CC BY 4.0), 8 by 8
pixels each, written by 13 people. A fifth of them is for the test split alone: no digit occurs in train and test.
"""

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Any

from PIL import Image

from errors import as_user_error
from prepare_data import IMAGE_PLACEHOLDER
from reward import register
from tasks.shapes import CELL, Scene, encode_png, make_boxed_response, make_exists_question, random_of, toy_of
from tasks.vqa import answerable, vqa

INSTRUCTION = r"Answer in \boxed{}."
ANSWER_TYPES = ("count", "exists", "largest", "sum")
DIGITS = [str(n) for n in range(10)]
TEST_SHARE = 0.2
SIZE = 24  # pixels of a digit, in a cell of 28
CELLS = 4  # 2 by 2
DEMO = {"see_steps": 700, "habit_steps": 60, "images": 40, "questions": 1, "steps": 40}  # of demo.py


@register("digits", answerable=answerable)
def digits(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    """As visual questions are graded: numbers by value, yes and no by meaning, several answers are wrong."""
    return vqa(response, example, finish_reason)


@cache
def load_handwritten_digits(test: bool) -> list[tuple[Image.Image, int]]:
    """The digits of the test split, or all others: (black on white, which digit). The hash of its pixels decides where
    a digit belongs, so that equal ones stay together."""
    with as_user_error(ImportError, "digits come with scikit-learn; pip install -r requirements.txt"):
        from sklearn.datasets import load_digits
    found = load_digits()
    kept = []
    for pixels, digit in zip(found.images, found.target, strict=True):
        strokes = (255 - 255 * pixels / 16).astype("uint8")
        if (hashlib.sha256(strokes.tobytes()).digest()[0] < 256 * TEST_SHARE) == test:
            kept.append((Image.fromarray(strokes).resize((SIZE, SIZE), Image.Resampling.BICUBIC), int(digit)))
    return kept


def scenes(split: str, seed: int) -> Iterator[Scene]:
    """Endless digits, each in a cell of its own, a little out of place."""
    rng = random_of("digits/", split, seed)
    source = load_handwritten_digits(split == "test")
    while True:
        image = Image.new("L", (2 * CELL, 2 * CELL), 255)
        # the warm start learns to read single digits first
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
        seen = " ".join(map(str, sorted(values)))
        start = f"{IMAGE_PLACEHOLDER}{INSTRUCTION}"  # first, so that all questions about an image share it
        yield (
            [encode_png(image)],
            [(kind, f"{start} {asked}", make_boxed_response(truth, seen), truth) for kind, asked, truth in questions],
        )


toy = toy_of("digits", scenes, ANSWER_TYPES)
