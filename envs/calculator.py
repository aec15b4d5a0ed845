"""A calculator for rows of any task: the observation for `<calc>12*(3+4)</calc>` is 84.

A response without a call ends the episode. The policy's text is never run as Python: the parser that grades geometry
evaluates it, to 80 digits, within its limits on length, depth and magnitude.

The toy: an image shows two numbers of two digits, to be multiplied or added. The policy reads them, and the environment
calculates.
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
SIGNIFICANT_DIGITS = 12  # digits of a value in an observation
PLAIN_NUMBER = re.compile(r"[\s$]*[-+\u2212]?[0-9][0-9,\s]*(\.[0-9]+)?[\s$]*\.?")


@register("calculator", answerable=answerable)
def calculator(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    """Return 0.9 * accuracy + 0.1 * format of the last response. Accuracy compares answers as geometry does; format
    asks for a box. If the truth is a number, the answer must be one too, because an expression was not calculated."""
    boxed = extract_boxed(response)
    is_value = boxed is not None and (PLAIN_NUMBER.fullmatch(boxed) or not PLAIN_NUMBER.fullmatch(example.ground_truth))
    accuracy = is_value and same_answer(boxed, example.ground_truth)
    return accuracy_and_format_reward(accuracy, boxed is not None and has_only_box(response, boxed))


# --- arithmetic ---------------------------------------------------------------------------------------------------


def calculate(text: str) -> str:
    """Return the value of an expression, rounded to SIGNIFICANT_DIGITS, or a message on what is wrong with it. The
    message repeats nothing of the text."""
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
    """The environment of `--env calculator`. `cost` is subtracted from the reward for each call."""

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
ENV = {"max_turns": 2}  # settings of demo.py
DEMO = {"see_steps": 450, "habit_steps": 30, "images": 24, "questions": 2, "steps": 25, "eval_every": 5}
# The seven strokes of a digit, clockwise from the top, then the middle one: (left, top, right, bottom) in its cell
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
    """Draw a number of two digits in a row of cells, in the grey value `ink`."""
    for column, digit in enumerate(f"{number:02}"):
        for stroke in SEGMENTS_OF_DIGIT[int(digit)]:
            left, top, right, bottom = STROKES[int(stroke)]
            box = (column * CELL + left, row * CELL + top, column * CELL + right, row * CELL + bottom)
            draw.rectangle(box, fill=(ink,) * 3)


def read_number(image: Image.Image, row: int) -> int:
    """Return the number that `draw_number` drew: a stroke is there if its middle is dark."""
    digits = ""
    for column in range(2):
        middles = [((left + right) // 2, (top + bottom) // 2) for left, top, right, bottom in STROKES]
        shades = [image.getpixel((column * CELL + x, row * CELL + y))[0] for x, y in middles]
        digits += str(SEGMENTS_OF_DIGIT.index("".join(str(i) for i, shade in enumerate(shades) if shade < 128)))
    return int(digits)


@in_one_split("calculator/")
def scenes(rng: random.Random) -> Scene:
    """Draw a scene: two numbers, one above the other."""
    top, bottom = (rng.randint(12, 99) for _ in range(2))
    image = Image.new("RGB", (2 * CELL, 2 * CELL), tuple(rng.randint(215, 255) for _ in range(3)))
    for row, number in enumerate((top, bottom)):
        draw_number(ImageDraw.Draw(image), number, row, rng.randint(0, 60))
    truths = {"product": str(top * bottom), "sum": str(top + bottom)}
    start = f"{IMAGE_PLACEHOLDER}{TOY_INSTRUCTION}"
    questions = [
        (name, f"{start} {QUESTIONS[name][0]}", make_boxed_response(truth), truth) for name, truth in truths.items()
    ]
    return [encode_png(image)], questions


toy = toy_of("calculator", scenes, tuple(QUESTIONS))


def expert(example: Example, responses: Sequence[str], observations: Sequence[str]) -> str:
    """Return the perfect next response to a toy: first a call with the numbers in the image, then the value."""
    if observations:
        return make_boxed_response(observations[-1])
    image = decode_image(example.images[0])
    [sign] = [sign for question, sign in QUESTIONS.values() if question in example.messages[-1]["content"]]
    return f"<calc>{read_number(image, 0)}{sign}{read_number(image, 1)}</calc>"
