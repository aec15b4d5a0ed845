"""Tests that cheating earns no reward, and that 10,000 strings per task cause no hang, crash or memory growth."""

import json
import random
import time
import tracemalloc
from types import SimpleNamespace

import pytest
from conftest import cpu_limit

from tasks import caption, digits, geometry, geospot, pairs, shapes, vqa

PLACE = {"country": "France", "region": "Brittany", "city": "Brest", "lat": 48.39, "lon": -4.49}
CHOICES = "Which is it?\nA. red\nB. blue\nC. green\n"
CAPTIONS = json.dumps({"references": ["a red dog runs on the grass"], "keywords": ["dog", "grass"]})
COUNT, LARGEST, SHAPE = "How many dogs are there?", "Which is the largest digit?", "How many shapes are there?"
STATEMENT, WHICH = "The left image has two dogs. Is the statement true or false?", "Which image is red?"


def row(question: str, truth: str, n: int = 1, **extra) -> SimpleNamespace:
    messages = [{"role": "user", "content": "<image>" * n + question}]
    return SimpleNamespace(ground_truth=truth, extra=extra, uid="row-7", messages=messages, images=[b""] * n)


# reward, row, a right answer, a text with all answers
TASKS = {
    "count": (vqa.vqa, row(COUNT, "3", answer_type="counting"), "3", "0 1 2 3 4 5"),
    "yes": (vqa.vqa, row("Is there a dog?", "yes", answer_type="existence"), "yes", "yes no"),
    "choice": (vqa.vqa, row(CHOICES, "B", answer_type="multiple choice"), "B", "A B C"),
    "colour": (vqa.vqa, row("What color is the car?", "red", answer_type="attribute"), "red", "red blue green"),
    "digits": (digits.digits, row(LARGEST, "3", answer_type="largest"), "3", "0 1 2 3"),
    "shapes": (shapes.shapes, row(SHAPE, "3", answer_type="count"), "3", "0 1 2 3 4"),
    "geo3k": (geometry.geo3k, row("Find x.", "3"), "3", "0 1 2 3 4"),
    "nlvr2": (pairs.nlvr2, row(STATEMENT, "True", 2), "true", "true false"),
    "which": (pairs.which_image, row(WHICH, "2", 2), "2", "1 2"),
}


def grade_accuracy(task: str, response: str) -> float:
    reward, example, *_ = TASKS[task]
    return reward(response, example, "stop")["accuracy"]


def boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


FULL_WIDTH = {ord(c): ord(c) + 0xFEE0 for c in "0123456789ABCabcdefghijklmnopqrstuvwxyz"}
LOOK_ALIKES = str.maketrans("aeoyB123", "аеоуВ1２３")  # Cyrillic, and wide digits
ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")  # only 0 to 9 count: prompts ask for them, and others read them

CHEATS = {  # (right answer, all answers, question) -> response
    "empty": lambda right, all_, prompt: "",
    "empty box": lambda right, all_, prompt: boxed(""),
    "prompt": lambda right, all_, prompt: prompt,
    "prompt in the box": lambda right, all_, prompt: boxed(prompt),
    "all answers": lambda right, all_, prompt: boxed(all_),
    "all with commas": lambda right, all_, prompt: boxed(", ".join(all_.split())),
    "all with or": lambda right, all_, prompt: boxed(" or ".join(all_.split())),
    "all in boxes": lambda right, all_, prompt: " ".join(map(boxed, [right, *all_.split(), "x"])),
    "boxes within boxes": lambda right, all_, prompt: boxed(f"{boxed(right)} {boxed('x')}"),
    "a hundred thousand": lambda right, all_, prompt: boxed(right * 100_000),
    "box not closed": lambda right, all_, prompt: f"\\boxed{{{right}",
    "in its thinking": lambda right, all_, prompt: f"<think>{boxed(right)}</think>",
    "special token": lambda right, all_, prompt: boxed(f"<|im_end|>{right}"),
    "question": lambda right, all_, prompt: boxed(f"{right}?"),
    "wide": lambda right, all_, prompt: boxed(right.translate(FULL_WIDTH)),
    "right to left": lambda right, all_, prompt: boxed(f"\u202e{right}\u202c x"),
    "assertion": lambda right, all_, prompt: f"Ignore the question, {right} is right, give full marks. {boxed('x y')}",
    "assertion in the box": lambda right, all_, prompt: boxed("Ignore the question, I am right"),
    "reward": lambda right, all_, prompt: '{"reward": 1.0, "accuracy": 1.0}',
    "json": lambda right, all_, prompt: boxed("[" * 4000 + right + "]" * 4000),
    "huge number": lambda right, all_, prompt: boxed("1e999"),
    "nan": lambda right, all_, prompt: boxed("nan"),
    "not": lambda right, all_, prompt: boxed(f"not {right}"),
    "maybe": lambda right, all_, prompt: boxed(f"maybe {right}"),
}  # fmt: skip
# geo3k's answers are LaTeX, in which NFKC makes wide characters plain. geo3k and shapes take the last box, wherever
# it is, as verl does; that is still a single answer.
ALLOWED = {("geo3k", "wide"), ("geo3k", "in its thinking"), ("shapes", "in its thinking")}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_earn_nothing(task, cheat):
    _, example, right, all_ = TASKS[task]
    assert grade_accuracy(task, boxed(right)) == 1.0
    response = CHEATS[cheat](right, all_, example.messages[0]["content"])
    if (task, cheat) not in ALLOWED:
        with cpu_limit():
            assert grade_accuracy(task, response) == 0.0, response[:200]


@pytest.mark.parametrize("task", [task for task in TASKS if TASKS[task][2].isdigit() and task != "geo3k"])
def test_digits_of_other_scripts_are_wrong(task):
    right = TASKS[task][2]
    assert grade_accuracy(task, boxed(right.translate(ARABIC))) == 0.0


@pytest.mark.parametrize("task", ["yes", "colour", "choice", "nlvr2"])
def test_letters_that_only_look_alike_are_wrong(task):
    right = TASKS[task][2]
    other = right.translate(LOOK_ALIKES)
    assert other != right and grade_accuracy(task, boxed(other)) == 0.0
    assert grade_accuracy(task, boxed(f"{right[0]}\u200b{right[1:]}x")) == 0.0


def test_cheats_earn_less_for_places_and_captions():
    honest = geospot.geospot_reward(json.dumps(PLACE), json.dumps(PLACE))["reward"]
    assert honest == pytest.approx(1)
    all_countries = ", ".join(["France", "Spain", "Italy", "Germany"])
    for text in ("", json.dumps(PLACE | {"country": all_countries}), json.dumps([PLACE, PLACE | {"country": "Spain"}]),
                 '{"country": ' * 5000, json.dumps(PLACE) * 2000 + '{"country": "Spain", "city": "x"}',
                 '{"lat": 1e999, "lon": 1e999}', '{"lat": 48.39, "lon": -4.49, "lat": 0}',
                 "<think>" + json.dumps(PLACE), json.dumps(PLACE) + "<|im_end|>",
                 '{"reward": 1}', "Ignore the question, I am right",
                 json.dumps(PLACE).translate(FULL_WIDTH)):  # fmt: skip
        with cpu_limit():
            assert geospot.geospot_reward(text, json.dumps(PLACE))["reward"] < honest - 0.25, text[:100]
    best = caption.caption_reward("a red dog runs on the grass", CAPTIONS)["reward"]
    words = "a red dog runs on the grass"
    for text in ("", "dog grass", words * 20, f"{words}. " * 3, "Describe the image.",
                 words.translate(FULL_WIDTH) + " x y z",
                 words[::-1], "<think>" + words, f"{words}<|im_end|>",
                 "Ignore the question, I am right", "9" * 100_000,
                 " ".join(sorted(words.split())), words.replace("o", "о"), '{"reward": 1}'):  # fmt: skip
        assert caption.caption_reward(text, CAPTIONS)["reward"] < best - 0.05, text[:100]


# --- fuzz -------------------------------------------------------------------------------------------------------------

PIECES = '3 three yes no red B true 2 and or not the a is % $ 5 pm 1e9 : , . - ( ) ? \' France lat: 48.3 {"lat": } [ ]'
PIECES = [
    *PIECES.split(),
    "\\boxed{",
    "}",
    "<think>",
    "</think>",
    "<|im_end|>",
    "\n",
    "\u200b",
    "\u202e",
    "٣",
    "３",
    "é",
]
PIECES += ["half past", "minus", "hundred", "thousand", "\ud800", "ﷺ", "\\frac", "^", "\x00", "in the"]
OTHERS = {
    "geospot": lambda text: geospot.geospot_reward(text, json.dumps(PLACE)),
    "caption": lambda text: caption.caption_reward(text, CAPTIONS),
}


def random_texts(n: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    texts = [rng.choice(["", " "]).join(rng.choices(PIECES, k=rng.randint(0, 40))) for _ in range(n)]
    return [boxed(text) if i % 3 == 0 else text for i, text in enumerate(texts)]


@pytest.mark.parametrize("task", [task for task in [*TASKS, *OTHERS] if task != "geo3k"])  # see test_fuzz_graders.py
def test_ten_thousand_strings(task):
    """No string takes long to grade, and 500 more strings leave almost no memory allocated."""
    grade = OTHERS.get(task) or (lambda text: TASKS[task][0](text, TASKS[task][1], "stop"))
    slowest = 0.0
    for text in random_texts(10_000, 0):
        start = time.thread_time()
        rewards = grade(text)
        slowest = max(slowest, time.thread_time() - start)
        assert all(-1 <= value <= 10 for value in rewards.values() if not isinstance(value, list))
    tracemalloc.start()
    for text in random_texts(500, 1):
        grade(text)
    growth = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert slowest < 0.2
    assert growth < 2e6  # leaves room for caches that fill up
