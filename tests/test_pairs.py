"""Tests of tasks/pairs.py: statements about two images, and questions whose answer is one or more of the images."""

import io
import json
import random
from collections import Counter
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import cpu_limit
from PIL import Image

from errors import UserError
from prepare_data import ConvertConfig, ToyConfig, make_file, read_examples
from tasks import pairs

PROMPT = f"<image><image>Statement: The left image has two dogs. {pairs.INSTRUCTION}"


def row(truth, n=2, prompt=PROMPT):
    messages = [{"role": "user", "content": prompt}]
    return SimpleNamespace(ground_truth=truth, images=[b""] * n, uid="row-7", extra={}, messages=messages)


def named_images(text, n=2):
    """Return the numbers, from 1, of the images that a text names, or None."""
    indices = pairs.images_named(text, n)
    return None if indices is None else sorted(i + 1 for i in indices)


# --- questions about which image --------------------------------------------------------------------------------------

NAMES = {  # number of images -> answers -> images
    2: {
        "1 ; one ; the first ; the first image ; first ; 1st ; image 1 ; Image one ; A ; image A ; (a) ; left ; #1 ; "
        "the left one ; the left image ; the image on the left ; left side ; The first one. ; number 1 ; 1. ; **1** ; "
        "the left-hand image": [1],
        "2 ; the second image ; right ; the right one ; last ; B ; It is the second image. ; the answer is 2": [2],
        "both ; both images ; 1 and 2 ; 1, 2 ; left and right ; all ; the first and the second ; A and B": [1, 2],
        "none ; neither ; none of them ; neither image ; no one ; no images": [],
        "3 ; 0 ; third ; c ; middle ; 1 or 2 ; 1 2 ; 1/2 ; not 1 ; 1? ; left or right ; -1 ; 1.5 ; both or none ; "
        "1 1 ; maybe 1 ; ; . ; image ; which image ; 1 but not 2 ; 12 ; first second ; left 2 ; ١ ; １ ; ab ; "
        "the two ; these two ; only two ; exactly 2 ; there are two ; there is one ; two of them ; 2 in total ; "
        "two only ; a pair ; the couple ; it has 2 ; the only one ; "
        "1\u200b2 ; 1 and 3 ; both and 3 ; 1 and 1 ; 1e999 ; the first third ; none or 1 ; 9999": None,
    },
    3: {
        "middle ; the middle one ; center ; the central image ; 2 ; second ; B": [2],
        "right ; last ; third ; c ; 3rd": [3],
        "left": [1],
        "1 and 3": [1, 3],
        "all ; all three ; 1, 2 and 3": [1, 2, 3],
        "the second one": [2],
        "both ; all two ; 4 ; 2 images ; two images ; two of the images ; 3 photos ; two one": None,
    },
    4: {"leftmost ; first ; a": [1], "rightmost ; last ; 4 ; fourth ; d": [4],
        "left ; right ; middle ; 5 ; 4 images": None},
}  # fmt: skip
NAMED = [(n, answer.strip(), expected) for n, table in NAMES.items() for key, expected in table.items()
         for answer in key.split(" ; ")]  # fmt: skip


def test_words_of_the_question_may_surround_a_name():
    question = "<image><image>Which image shows a larger red dog? " + pairs.WHICH_INSTRUCTION
    for answer, expected in (
        ("Image 2 shows a larger red dog.", 1), ("It's image 2.", 1), ("The red dog on the right is larger.", 1),
        ("Image 2 does not show a larger red dog.", 0), ("Image 2 shows a smaller dog.", 0), ("2 is larger than 1", 0),
        ("The red dog is larger.", 0), ("Image 1 or image 2 shows a red dog.", 0), ("Image 1 shows a red dog.", 0),
    ):  # fmt: skip
        assert pairs.which_image(answer, row("2", prompt=question), "stop")["accuracy"] == expected, answer
    assert pairs.which_image("\\boxed{2}<|im_end|>\\boxed{2}", row("2"), "stop")["accuracy"] == 0


@pytest.mark.parametrize("answer", ["no one but 2", "no one or 1", "No one, 2", "no one knows", "no one except 1"])
def test_words_after_no_one_are_not_ignored(answer):
    assert pairs.which_image(f"\\boxed{{{answer}}}", row("none"), "stop")["accuracy"] == 0


@pytest.mark.parametrize("n, answer, expected", NAMED)
def test_answers_that_name_images(n, answer, expected):
    if answer in ("all three", "all two"):
        expected = expected and None  # a count, which is refused
    assert named_images(answer, n) == expected


def test_each_image_is_graded_separately():
    assert pairs.which_image("\\boxed{2}", row("2"), "stop") == {
        "accuracy": 1.0, "format": 1.0, "reward": 1.0, "images": [1.0, 1.0],
    }  # fmt: skip
    assert pairs.which_image("\\boxed{1}", row("2"), "stop")["images"] == [0, 0]
    assert pairs.which_image("\\boxed{4}", row("2", 4), "stop")["images"] == [1, 0, 1, 0]
    assert pairs.which_image("\\boxed{both}", row("1"), "stop")["images"] == [1, 0]
    assert pairs.which_image("\\boxed{1 or 2}", row("2"), "stop") == {
        "accuracy": 0.0, "format": 1.0, "reward": pytest.approx(0.1), "images": [0.0, 0.0],
    }  # fmt: skip
    for answer in ("both", "none", "neither"):
        for truth in ("1", "2", "both", "none"):
            right = {"neither": "none"}.get(answer, answer) == truth
            assert pairs.which_image(f"\\boxed{{{answer}}}", row(truth), "stop")["accuracy"] == right


def test_a_truth_that_names_no_image_is_refused():
    with pytest.raises(UserError, match="row 'row-7': ground_truth '3' names none of its 2 images; write 1 to 2"):
        pairs.which_image("\\boxed{1}", row("3"), "stop")
    with pytest.raises(UserError, match="row 'row-7': ground_truth 'red' is neither True nor False"):
        pairs.nlvr2("\\boxed{1}", row("red"), "stop")


# --- statements -------------------------------------------------------------------------------------------------------

TRUE = ["true", "True.", "yes", "\\boxed{True}", "The statement is true.", "It is true", "correct", "Answer: true"]
FALSE = ["false", "False.", "no", "\\boxed{no}", "The statement is false.", "That's false", "incorrect"]
TRUE += ["The statement is correct.", "It is not false.", "Yes, it is true.", "Statement: true"]
FALSE += ["It is not true.", "The statement isn't correct.", "No, it is not true.", "untrue", "Statement: false"]
FALSE += ["not true", "\\boxed{not true}", "The statement is not true", "\\boxed{The statement is not true}"]
NEITHER = ["true or false", "true, false", "not sure", "", "\\boxed{}", "\\boxed{true} \\boxed{false}", "left", "dogs"]
NEITHER += ["No, it is correct.", "Yes, it is not true.", "It is not certain that it is true."]
NEITHER += ["is the statement true", "Is it false", "<|im_start|>\\boxed{true}", "\\boxed{false}<|im_end|>"]
NEITHER += ["The left image has two dogs.", "true and false", "maybe true", "true?", "yes and no", "tru", "ｔｒｕｅ"]


def test_statements():
    for answers, expected in ((TRUE, (1, 0)), (FALSE, (0, 1)), (NEITHER, (0, 0))):
        for answer in answers:
            earned = [pairs.nlvr2(answer, row(truth), "stop")["accuracy"] for truth in ("True", "False")]
            assert tuple(earned) == expected, answer


# --- data -------------------------------------------------------------------------------------------------------------


def encode_image(colour):
    buffer = io.BytesIO()
    Image.new("RGB", (30, 30), colour).save(buffer, format="PNG")
    return buffer.getvalue()


LEFT, RIGHT = encode_image((200, 0, 0)), encode_image((0, 0, 200))
NLVR2 = {"identifier": "dev-850-0-1", "sentence": "The left image is red.", "label": "True", "writer": "x"}


def convert(folder, file, **options):
    make_file("nlvr2", ToyConfig(input=(str(file),), out=str(folder / "out.parquet"), split="val", **options))
    return read_examples(folder / "out.parquet", ConvertConfig(out=""))[0]


def test_the_original_layout_of_nlvr2(tmp_path):
    for i, data in enumerate((LEFT, RIGHT)):
        (tmp_path / f"dev-850-0-img{i}.png").write_bytes(data)
    (tmp_path / "dev.json").write_text("".join(json.dumps(line) + "\n" for line in (NLVR2, NLVR2 | {"label": "False"})))
    first, second = convert(tmp_path, tmp_path / "dev.json")
    assert list(first.images) == [LEFT, RIGHT] and (first.data_source, first.extra["writer"]) == ("nlvr2", "x")
    assert (first.ground_truth, second.ground_truth) == ("True", "False")
    content = first.messages[-1]["content"]
    assert content == f"<image><image>Statement: The left image is red. {pairs.INSTRUCTION}"
    assert pairs.nlvr2("\\boxed{yes}", first, "stop")["reward"] == 1.0


def test_columns_of_images(tmp_path):
    table = [NLVR2 | {"left_image": {"bytes": LEFT}, "right_image": {"bytes": RIGHT}, "label": True}]
    table += [{"question": "Which image is blue?", "answer": "right"}]
    table[1] |= {side: table[0][side] for side in ("left_image", "right_image")}
    for i, (line, truth, source) in enumerate(zip(table, ("True", "right"), ("nlvr2", "which"), strict=True)):
        pq.write_table(pa.Table.from_pylist([line]), tmp_path / f"{i}.parquet")
        (example,) = convert(tmp_path, tmp_path / f"{i}.parquet")
        assert list(example.images) == [LEFT, RIGHT]
        assert (example.ground_truth, example.data_source) == (truth, source)
    assert pairs.which_image("\\boxed{2}", example, "stop")["reward"] == 1.0


@pytest.mark.parametrize(
    "change, reason",
    [({"label": "maybe"}, "expected True or False"), ({"label": None}, "no truth"), ({}, "no images: looked for")],
)
def test_wrong_rows_are_refused_with_a_reason(tmp_path, change, reason):
    (tmp_path / "dev.json").write_text(json.dumps(NLVR2 | change))
    with pytest.raises(UserError, match=reason):
        convert(tmp_path, tmp_path / "dev.json")


# --- toy data and random texts ----------------------------------------------------------------------------------------


def test_toy_is_correct_deterministic_and_its_splits_share_no_image(tmp_path):
    train, test = ([*pairs.toy(60, split, 0)] for split in ("train", "test"))
    assert train == [*pairs.toy(60, "train", 0)]
    images_of_splits = [{image["bytes"] for line in lines for image in line["images"]} for lines in (train, test)]
    assert not images_of_splits[0] & images_of_splits[1]
    sizes = Counter(len(line["images"]) for line in train + test)
    assert sizes[2] > 60 and set(sizes) == {2, 3, 4}
    source = pairs.scenes("train", 1)
    truths = Counter()
    for _ in range(200):
        images, questions = next(source)
        for kind, prompt, reply, truth in questions:
            grade = {"statement": pairs.nlvr2, "which": pairs.which_image}[kind]
            assert grade(reply, row(truth, len(images), prompt), "stop")["reward"] == 1.0
            assert prompt.count("<image>") == len(images)
            truths[truth] += 1
            # an independent check: the named colour is in the pixels of the right image
            colour = next(word for word in prompt.rstrip("?.").split() if word in pairs.COLOURS)
            image_colours = [Image.open(io.BytesIO(image)).getcolors(10**6) for image in images]
            shows = [any(pixel == pairs.COLOURS[colour] for _, pixel in pixels) for pixels in image_colours]
            place = next((i for i, word in enumerate(pairs.ORDINALS) if f"the {word} image" in prompt), None)
            assert shows[place] == (truth == "True") if kind == "statement" else shows.index(True) + 1 == int(truth)
    assert 70 < truths["True"] < 130
    make_file("pairs", ToyConfig(toy=True, n=10, out=str(tmp_path / "out.parquet")))
    assert len(read_examples(tmp_path / "out.parquet", ConvertConfig(out=""))[0]) > 0


def test_ten_thousand_random_texts():
    rng = random.Random(0)
    pieces = "1 2 3 image left right both none first \\boxed{ } <think> </think> and or , <|im_end|> ② ١ not".split()
    with cpu_limit(100):
        for i in range(10_000):
            text = rng.choice(["", " "]).join(rng.choices(pieces, k=rng.randint(0, 20)))
            rewards = pairs.which_image(text, row("2", 2 + i % 3), "stop")
            assert len(rewards["images"]) == 2 + i % 3 and rewards["accuracy"] in (0.0, 1.0)
            pairs.nlvr2(text, row("True"), "stop")
