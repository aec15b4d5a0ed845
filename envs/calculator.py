"""A calculator: `<calc>12*(3+4)</calc>` is answered with 84. For rows of any task.

A response without a call ends the episode. Nothing here hands the policy's text to Python: it is read by the parser
that grades geometry, to 80 digits, under its limits on length, depth and magnitude.

The toy: two numbers of two digits in an image, to be multiplied or added; the policy reads, the environment reckons.
"""

import decimal
import random
import re
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw

from envs import Environment, Observation, append_instruction, need_number, parse_tool_call
from errors import UserError
from prepare_data import IMAGE_PLACEHOLDER, Example, decode_image
from reward import accuracy_and_format_reward, extract_boxed, register
from tasks.geometry import (
    CONTEXT,
    TEST_POINTS,
    ExpressionError,
    ExpressionParser,
    ExpressionTooLarge,
    answerable,
    normalise,
    same_answer,
)
from tasks.shapes import CELL, Scene, encode_png, has_only_box, in_one_split, make_boxed_response, toy_of

INSTRUCTION = (
    "You have a calculator: write <calc>12*(3+4)/sqrt(2)</calc>, and you will be told the value. When you know the "
    r"answer, state it in \boxed{}."
)
SIGNIFICANT_DIGITS = 12  # of a value that is told
PLAIN_NUMBER = re.compile(r"[\s$]*[-+\u2212]?[0-9][0-9,\s]*(\.[0-9]+)?[\s$]*\.?")


@register("calculator", answerable=answerable)
def calculator(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    """0.9 * accuracy + 0.1 * format of the last response: the value as geometry's answers are compared, and a box.
    Where the truth is a number the answer must be one too: an expression was not reckoned."""
    found = extract_boxed(response)
    reckoned = found is not None and (PLAIN_NUMBER.fullmatch(found) or not PLAIN_NUMBER.fullmatch(example.ground_truth))
    accuracy = reckoned and same_answer(found, example.ground_truth)
    return accuracy_and_format_reward(accuracy, found is not None and has_only_box(response, found))


# --- arithmetic ---------------------------------------------------------------------------------------------------


def calculate(text: str) -> str:
    """Return the value, rounded to DIGITS digits, or what is wrong, which repeats nothing of the text."""
    try:
        with decimal.localcontext(CONTEXT) as context:
            expression = ExpressionParser(normalise(text), TEST_POINTS[0])
            value = expression.sum()
            expression.expect("")
            if expression.letters:
                raise ExpressionError("letters")
            context.prec = SIGNIFICANT_DIGITS
            value = (+value).normalize()
        return f"{value:f}" if -SIGNIFICANT_DIGITS <= value.adjusted() < SIGNIFICANT_DIGITS else str(value)
    except (ExpressionTooLarge, decimal.Overflow, decimal.Underflow, RecursionError, MemoryError):
        return "That is too long or too large."
    except decimal.DecimalException:
        return "That has no value."
    except ExpressionError:
        return "That is no arithmetic: use numbers, + - * / ^ sqrt( ) and brackets."


# --- environment --------------------------------------------------------------------------------------------------


class Calculator(Environment):
    """cost: of a calculation, taken from the reward."""

    def __init__(self, cost: float = 0.0):
        need_number("cost", cost, 1)
        self.cost = cost

    def reset(self, example: Example) -> tuple[list[dict[str, str]], Sequence[bytes]]:
        return append_instruction(example.messages, INSTRUCTION, "<calc>"), example.images

    def step(self, response: str) -> Observation:
        try:
            call = parse_tool_call(response, "calc")
        except UserError as error:
            return Observation(str(error), reward=-self.cost)
        return Observation(done=True) if call is None else Observation(calculate(call), reward=-self.cost)


# --- toy ----------------------------------------------------------------------------------------------------------

TOY_INSTRUCTION = r"<calc>1+2</calc> tells. Answer in \boxed{}."
QUESTIONS = {"product": ("What is the top times the bottom?", "*"), "sum": ("What is the top plus the bottom?", "+")}
USUAL = {"product": make_boxed_response("2000"), "sum": make_boxed_response("100")}
ENV = {"max_turns": 2}  # of demo.py
DEMO = {"see_steps": 450, "habit_steps": 30, "images": 24, "questions": 2, "steps": 25, "eval_every": 5}
# The seven strokes of a digit, from the top, clockwise, then the middle one: (left, top, right, bottom) in its cell
STROKES = ((8, 4, 19, 6), (17, 4, 19, 14), (17, 14, 19, 23), (8, 21, 19, 23), (8, 14, 10, 23), (8, 4, 10, 14))
STROKES += ((8, 13, 19, 15),)
SEGMENTS_OF_DIGIT = (
    "012345",
    "12",
    "01346",
    "01236",
    "1256",
    "02356",
    "023456",
    "012",
    "0123456",
    "012356",
)  # of 0 to 9


def draw_number(draw: ImageDraw.ImageDraw, number: int, row: int, ink: int) -> None:
    for column, digit in enumerate(f"{number:02}"):
        for stroke in SEGMENTS_OF_DIGIT[int(digit)]:
            left, top, right, bottom = STROKES[int(stroke)]
            place = (column * CELL + left, row * CELL + top, column * CELL + right, row * CELL + bottom)
            draw.rectangle(place, fill=(ink,) * 3)


def read_number(image: Image.Image, row: int) -> int:
    """What `draw_number` drew: a stroke that is shown is dark half way along."""
    digits = ""
    for column in range(2):
        middles = [((left + right) // 2, (top + bottom) // 2) for left, top, right, bottom in STROKES]
        shades = [image.getpixel((column * CELL + x, row * CELL + y))[0] for x, y in middles]
        digits += str(SEGMENTS_OF_DIGIT.index("".join(str(i) for i, shade in enumerate(shades) if shade < 128)))
    return int(digits)


@in_one_split("calculator/")
def scenes(rng: random.Random) -> Scene:
    """Two numbers, one above the other."""
    top, bottom = (rng.randint(12, 99) for _ in range(2))
    image = Image.new("RGB", (2 * CELL, 2 * CELL), tuple(rng.randint(215, 255) for _ in range(3)))
    for row, number in enumerate((top, bottom)):
        draw_number(ImageDraw.Draw(image), number, row, rng.randint(0, 60))
    truths = {"product": str(top * bottom), "sum": str(top + bottom)}
    start = f"{IMAGE_PLACEHOLDER}{TOY_INSTRUCTION}"
    asked = [
        (kind, f"{start} {QUESTIONS[kind][0]}", make_boxed_response(truth), truth) for kind, truth in truths.items()
    ]
    return [encode_png(image)], asked


toy = toy_of("calculator", scenes, tuple(QUESTIONS))


def expert(example: Example, responses: Sequence[str], observations: Sequence[str]) -> str:
    """The perfect next response to a toy: reads the numbers, has them reckoned, and repeats the value."""
    if observations:
        return make_boxed_response(observations[-1])
    image = decode_image(example.images[0])
    [sign] = [sign for asked, sign in QUESTIONS.values() if asked in example.messages[-1]["content"]]
    return f"<calc>{read_number(image, 0)}{sign}{read_number(image, 1)}</calc>"
