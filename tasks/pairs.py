r"""Tasks with several images: whether a statement about them is true (NLVR2), and which image a question asks for.

`nlvr2` is graded like a visual question: true, yes and correct mean the same. An answer of `which` names an image by
its number, an ordinal, a letter or its position. Images are in a row from left to right, so left and right are the
first and the last of two or three images; of more images only leftmost and rightmost are clear. A truth may also be
`both`, `all` or `none`.
"""

import random
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from errors import need
from prepare_data import IMAGE_PLACEHOLDER, RawRow, ToyConfig
from reward import accuracy_and_format_reward, register, unwrap_truth
from tasks._tables import any_rows, files_below, first_nonempty, make_row
from tasks.shapes import (
    COLOURS,
    SHAPES,
    Scene,
    belongs_to_split,
    draw_shape,
    encode_png,
    has_only_box,
    make_boxed_response,
    make_split_rng,
    toy_of,
)
from tasks.vqa import CHOICE_LETTERS, FILLER, SCALES, clean, extract_answer, is_known, known_words, number_at, vqa

INSTRUCTION = r"Is the statement about the images true or false? Answer in \boxed{}."
WHICH_INSTRUCTION = r"Answer with the number of the image in \boxed{}."

# --- reward -----------------------------------------------------------------------------------------------------------

ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
ALL_WORDS, NONE_WORDS = ("all", "both", "every", "each"), ("none", "neither", "no", "nothing")
MEANINGLESS = FILLER | {"images", "photos", "figure", "side", "hand", "answer"}
NAME_WORDS = {*ALL_WORDS, *NONE_WORDS, "one"}
ARTICLE = re.compile(r"(?<!image )\ba (?=(?!and\b)[a-z]{3})")  # not the A of `image A`, which is a name
COUNTED = r"([a-z0-9]+) (?:(?:of (?:the|these) )?(?:images|photos|pictures|figures)|of (?:them|these)|in total|only)\b|"
COUNTED += r"\b(?:the|these|those|only|just|exactly|of|there(?:'s| is| are)|has|have|see|shows?|a|its|my) ([a-z0-9]+)\b"
COUNTED = re.compile(rf"(?=\b(?:{COUNTED}))")  # phrases that say how many (`the two`), not which image
WORD_PATTERN = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
IMAGE_CHARS = re.compile(r"[a-z0-9 .,:;'()\[\]#*\"]*")  # characters that an answer may contain


@register("nlvr2", "pairs")
def nlvr2(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    """Grade a visual question whose truth is True or False."""
    need(example.ground_truth.strip().lower() in ("true", "false"),
         f"row {example.uid!r}: ground_truth {example.ground_truth!r} is neither True nor False; correct or remove it")
    return vqa(response, example, finish_reason)


def parse_image_position(word: str, n: int) -> int | None:
    """Return the image, counted from 0, that one word names among n images, or None."""
    if word in ("left", "leftmost"):
        return 0 if n <= 3 or word == "leftmost" else None
    if word in ("right", "rightmost", "last"):
        return n - 1 if n <= 3 or word != "right" else None
    if word in ("middle", "center", "centre", "central"):
        return n // 2 if n % 2 else None
    word = re.sub("(?<=[0-9])(?:st|nd|rd|th)$", "", word)
    number = None if word in SCALES else number_at([word])  # `a pair` says how many
    if number:
        index = int(number[0]) - 1
    elif word in ORDINALS:
        index = ORDINALS.index(word)
    else:
        index = CHOICE_LETTERS.lower().find(word) if len(word) == 1 else -1
    return index if 0 <= index < n else None


def images_named(text: str, n: int, known: frozenset[str] = frozenset()) -> frozenset[int] | None:
    """Return which of n images a text names, counted from 0.

    Names are `2`, `the second image`, `image B`, `left`, `both`, `1 and 3`, `none`. Return None if the text contains no
    name, or anything besides names and the words `known` from the question: `1 or 2`, `not 1`, `1?`, `2 images`.
    """
    text = clean(text).replace("-hand", " hand").replace("-most", "most")
    says_count = any(word not in NONE_WORDS and number_at([word]) for word in chain(*COUNTED.findall(text)))
    if not IMAGE_CHARS.fullmatch(text) or says_count:  # `2 images` says how many
        return None
    words = [word for word in WORD_PATTERN.findall(ARTICLE.sub("", text)) if word not in MEANINGLESS]
    words = [
        word
        for word in words
        if not is_known(word, known) or parse_image_position(word, 10) is not None or word in NAME_WORDS
    ]
    if len(words) > 1 and words[-1] == "one" and words[-2] != "and" and not number_at(words[-2:-1]):  # `the second one`
        words.pop()
    if words == ["no", "one"] or words in ([word] for word in NONE_WORDS):
        return frozenset()
    names_all = bool(words) and words[0] in ALL_WORDS and (words[0] != "both" or n == 2)
    if names_all:
        words = words[1:] or [str(i + 1) for i in range(n)]
    indices = [parse_image_position(word, n) for word in words if word != "and"]
    is_list = names_all or " and " in text or "," in text  # `1 2` and `left 2` are two answers
    if not indices or None in indices or (len(indices) > 1 and not is_list):
        return None
    return frozenset(indices) if len(set(indices)) == (n if names_all else len(indices)) else None


@register("which", instruction=WHICH_INSTRUCTION)
def which_image(response: str, example: Any, finish_reason: str) -> dict[str, Any]:
    r"""Return accuracy, format, their weighted sum, 0.9 * accuracy + 0.1 * format, as "reward", and `images`.

    The format is that of visual questions. `images` has a 1 for each image on which answer and truth agree (both name
    it, or neither does), else 0; it is 0 for all images if the answer cannot be parsed. Raise UserError if the truth
    names no image.
    """
    n = len(example.images)
    truth = images_named(example.ground_truth, n)
    need(truth is not None,
         f"row {example.uid!r}: ground_truth {example.ground_truth!r} names none of its {n} images; write 1 to {n}, "
         "both, all or none")
    answer = extract_answer(response, finish_reason)
    question = "\n".join(m["content"] for m in example.messages if m["role"] == "user")
    known = known_words(question.replace(IMAGE_PLACEHOLDER, " ").replace(WHICH_INSTRUCTION, " "))
    named = images_named(answer or "", n, known)
    rewards = accuracy_and_format_reward(named == truth, answer is not None and has_only_box(response, answer))
    return rewards | {"images": [float(named is not None and (i in named) == (i in truth)) for i in range(n)]}


# --- data -------------------------------------------------------------------------------------------------------------

SIDES = (("left_image", "right_image"), ("left_url", "right_url"))


def rows(cfg: ToyConfig) -> Iterator[RawRow]:
    """Yield rows of NLVR2's JSON lines (identifier, sentence, label), or of CSV and parquet with the same columns.

    Images are in the columns left_image and right_image, or left_url and right_url, or in --image-key as a list; else
    they are NLVR2's files below --image-root, whose names follow from the identifier: `dev-850-0-img0.png` for
    `dev-850-0-1`. A row with a `question` and an `answer` instead of a sentence and a label asks which image.
    """
    return any_rows(cfg, SIDES[0] + SIDES[1], lambda record, root: pair_record(record, root, cfg))


def pair_record(record: dict, root: Path, cfg: ToyConfig) -> dict:
    """Return a row in the on-disk format that keeps its other columns."""
    statement = first_nonempty([record.get(cfg.prompt_key), record.get("sentence")])
    text = first_nonempty([statement, record.get("question")])
    truth = first_nonempty([record.get(name) for name in (cfg.answer_key, "label", "answer")])
    need(isinstance(text, str) and truth is not None,
         "no statement or question, or no truth: looked for columns sentence and label, question and answer")
    source, kind, question, instruction = "which", "which", text, WHICH_INSTRUCTION
    if statement is not None:
        source, kind, question, instruction = "nlvr2", "statement", f"Statement: {text}", INSTRUCTION
        truth = {"1": "True", "0": "False"}.get(str(truth).removesuffix(".0"), truth)
        need(unwrap_truth(str(truth)).lower() in ("true", "false"), f"label is {truth!r:.80}, expected True or False")
    stem = str(record.get("identifier", "")).rpartition("-")[0]
    names = [files_below(root, "*-img[0-9].png").get(f"{stem}-img{i}.png") for i in (0, 1)] if stem else []
    pairs = [[record.get(name) for name in side] for side in SIDES]
    images = next((pair for pair in [*pairs[:1], names, *pairs[1:]] if pair and None not in pair), None)
    images = first_nonempty([record.get(cfg.image_key), images])
    columns = f"columns {cfg.image_key}, left_image, right_image, left_url, right_url"
    need(images is not None, f"no images: looked for {columns}, and for {stem}-img0.png below {root}")
    question = IMAGE_PLACEHOLDER * (len(images) if isinstance(images, list) else 1) + question
    prompt = question if cfg.instruction or IMAGE_PLACEHOLDER in text else f"{question} {instruction}"
    used = (cfg.answer_key, "sentence", "question", "label", "answer", *chain(*SIDES))
    return make_row(source, record | {cfg.prompt_key: prompt, "answer_type": kind}, used, images, str(truth), cfg)


# --- drawn shapes -----------------------------------------------------------------------------------------------------

DEMO = {"see_steps": 500, "habit_steps": 60, "steps": 40}  # settings of demo.py
SMALL_SIDE = 56  # pixels per side; small, as several images take many tokens


def single_shape_drawings(rng: random.Random, split: str) -> Iterator[tuple[bytes, str]]:
    """Yield endless (PNG, colour) pairs of one split; each image shows one shape."""
    while True:
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        image = Image.new("RGB", (SMALL_SIDE, SMALL_SIDE), (rng.randint(236, 255),) * 3)
        x, y = (SMALL_SIDE / 2 + rng.uniform(-6, 6) for _ in range(2))
        draw_shape(ImageDraw.Draw(image), shape, x, y, rng.uniform(14, 20), COLOURS[colour])
        data = encode_png(image)
        if belongs_to_split(data, split):
            yield data, colour


def scenes(split: str, seed: int) -> Iterator[Scene]:
    """Yield endless groups of images in different colours, with a statement and a question.

    Eight of ten groups have two images, the others three or four.
    """
    rng = make_split_rng("pairs/", split, seed)
    source = single_shape_drawings(rng, split)
    while True:
        n = rng.choice([2] * 8 + [3, 4])
        by_colour: dict[str, bytes] = {}
        while len(by_colour) < n:
            image, colour = next(source)
            by_colour.setdefault(colour, image)
        colours, images = list(by_colour), list(by_colour.values())
        index = rng.randrange(n)
        others = [colour for colour in colours if colour != colours[index]]
        claim = colours[index] if rng.random() < 0.5 else rng.choice(others)  # the statement is true as often as false
        true = str(claim == colours[index])
        asked_index = rng.randrange(n)
        statement = f"{IMAGE_PLACEHOLDER * n}{INSTRUCTION} Statement: the {ORDINALS[index]} image is {claim}."
        question = f"{IMAGE_PLACEHOLDER * n}{WHICH_INSTRUCTION} Which image is {colours[asked_index]}?"
        thought = " ".join(colours)
        yield (
            images,
            [
                ("statement", statement, make_boxed_response(true.lower(), thought), true),
                ("which", question, make_boxed_response(str(asked_index + 1), thought), str(asked_index + 1)),
            ],
        )


def toy(n: int, split: str, seed: int) -> Iterator[dict]:
    """Yield n rows in the on-disk format: statements and questions in turn, about different images."""
    sources = {"statement": "nlvr2", "which": "which"}
    for row in toy_of("pairs", scenes, list(sources))(n, split, seed):
        yield row | {"data_source": sources[row["extra_info"]["answer_type"]]}
