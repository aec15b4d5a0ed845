"""Tests of tasks/digits.py: which digits belong to which split, what is asked about them, and how it is graded."""

import io
import random
import sys
from types import SimpleNamespace

import pytest
from conftest import cpu_limit
from PIL import Image

from errors import UserError
from prepare_data import DataFormatConfig, main, parse_args, read_examples
from rewards.grade import check_tasks, grade
from tasks import digits


def example(truth: str, question: str) -> SimpleNamespace:
    messages = [{"role": "user", "content": f"<image>{digits.INSTRUCTION} {question}"}]
    return SimpleNamespace(data_source="digits", ground_truth=truth, extra={}, uid="row-7", messages=messages)


def pixels(image: Image.Image) -> bytes:
    return image.convert("L").tobytes()


def test_the_splits_share_no_digit():
    train, test = digits.load_handwritten_digits(False), digits.load_handwritten_digits(True)
    assert len(train) + len(test) == 1797 and 300 < len(test) < 420
    assert not {pixels(image) for image, _ in train} & {pixels(image) for image, _ in test}
    for labelled in (train, test):
        assert {digit for _, digit in labelled} == set(range(10))
        for image, digit in labelled[:50]:
            ink, paper = image.getextrema()
            assert image.size == (24, 24) and ink < 64 and paper == 255, digit


def test_images_of_the_splits_share_no_digit(monkeypatch):
    pasted, paste = set(), Image.Image.paste

    def recording_paste(self, digit, *args):
        pasted.add(pixels(digit))
        paste(self, digit, *args)

    monkeypatch.setattr(Image.Image, "paste", recording_paste)
    used = {}
    for split in ("warm", "train", "test"):
        assert len({row["images"][0]["bytes"] for row in digits.toy(400, split, 0)}) == 400
        used[split] = set(pasted)
        pasted.clear()
    assert not used["test"] & (used["train"] | used["warm"])
    assert used["test"] <= {pixels(image) for image, _ in digits.load_handwritten_digits(True)}
    assert len(used["test"]) > 300 and len(used["train"]) > 600


def test_questions_and_answers_agree(monkeypatch):
    """Compute each truth again from the digits in the image."""
    source = digits.load_handwritten_digits(False)
    drawn = []
    monkeypatch.setattr(digits, "load_handwritten_digits", lambda test: source)
    sample = random.Random.sample

    def recording_sample(self, population, k):
        chosen = sample(self, population, k)
        if population is source:
            drawn.append([digit for _, digit in chosen])
        return chosen

    monkeypatch.setattr(random.Random, "sample", recording_sample)
    scenes = digits.scenes("train", 3)
    for _ in range(300):
        [image], questions = next(scenes)
        values = drawn[-1]
        start = "<image>Answer in \\boxed{}. "
        assert all(prompt.startswith(start) for _, prompt, _, _ in questions)
        assert all(reply.endswith(f"</think>\\boxed{{{truth}}}") for _, _, reply, truth in questions)
        (count, exists, largest, total) = ((kind, prompt[len(start) :], truth) for kind, prompt, _, truth in questions)
        assert Image.open(io.BytesIO(image)).size == (56, 56) and 1 <= len(values) <= 4
        assert count == ("count", "How many digits are there?", str(len(values)))
        assert largest[2] == str(max(values)) and total[2] == str(sum(values))
        assert exists[2] == ("yes" if int(exists[1][len("Is there a ")]) in values else "no")


def test_the_image_shows_as_many_digits_as_counted():
    """The image shows as many digits as the answer says, each in its own cell and none cut off."""
    for row in digits.toy(40, "train", 1):
        if row["extra_info"]["answer_type"] == "count":
            image = Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("L")
            corners = [(28 * (i % 2), 28 * (i // 2)) for i in range(4)]
            cells = [image.crop((x, y, x + 28, y + 28)) for x, y in corners]
            assert sum(cell.getextrema()[0] < 64 for cell in cells) == int(row["reward_model"]["ground_truth"])


def test_toy_is_reproducible_and_no_answer_is_too_frequent():
    rows = list(digits.toy(400, "train", 0))
    assert rows == list(digits.toy(400, "train", 0)) and rows[:40] == list(digits.toy(40, "train", 0))
    assert rows[0]["images"] != next(digits.toy(1, "train", 1))["images"]
    assert [row["extra_info"]["answer_type"] for row in rows[:4]] == list(digits.ANSWER_TYPES)
    for kind, max_share in (("count", 0.4), ("exists", 0.65), ("largest", 0.4), ("sum", 0.2)):
        rows_of_kind = [row for row in rows if row["extra_info"]["answer_type"] == kind]
        answers = [row["reward_model"]["ground_truth"] for row in rows_of_kind]
        assert max(answers.count(a) for a in answers) <= max_share * len(answers)
    with pytest.raises(UserError, match="--split 'val': toys have warm, train, test"):
        next(digits.toy(1, "val", 0))


SUM, EXISTS = "What is the sum of the digits?", "Is there a 7?"


@pytest.mark.parametrize(
    "response, truth, question, reward_earned",
    [
        ("\\boxed{12}", "12", SUM, 1.0),
        ("<think>5 + 7</think> \\boxed{twelve}", "12", SUM, 1.0),
        ("12", "12", SUM, 0.9),
        ("The sum of the digits is 12.", "12", SUM, 0.9),
        ("\\boxed{yes}", "yes", EXISTS, 1.0),
        ("\\boxed{Yes, there is a 7.}", "yes", EXISTS, 1.0),
        ("\\boxed{no}", "no", EXISTS, 1.0),
        ("\\boxed{5 + 7}", "12", SUM, 0.1),
        ("\\boxed{5 + 7 = 12}", "12", SUM, 0.1),
        ("\\boxed{12 or 13}", "12", SUM, 0.1),
        ("\\boxed{12, 13}", "12", SUM, 0.1),
        ("\\boxed{11} \\boxed{12}", "12", SUM, 0.0),
        ("\\boxed{1 2}", "12", SUM, 0.1),
        ("\\boxed{0 1 2 3 4 5 6 7 8 9 10 11 12}", "12", SUM, 0.1),
        ("\\boxed{yes and no}", "no", EXISTS, 0.1),
        ("\\boxed{7}", "yes", EXISTS, 0.1),
        ("Is there a 7?", "yes", EXISTS, 0.0),
        ("\\boxed{", "12", SUM, 0.0),
        ("", "12", SUM, 0.0),
    ],
)
def test_reward(response, truth, question, reward_earned):
    assert grade(response, example(truth, question))["reward"] == pytest.approx(reward_earned)


def test_every_answer_is_right_only_for_itself():
    truths = [str(n) for n in range(37)]
    for truth in truths:
        right = [grade(f"\\boxed{{{answer}}}", example(truth, SUM))["accuracy"] for answer in truths]
        assert right == [float(answer == truth) for answer in truths]


def test_ten_thousand_strings():
    rng, rows = random.Random(0), [example("12", SUM), example("yes", EXISTS)]
    words = "1 12 2 twelve yes no \\boxed{ } + = , . <think> </think> digits sum 7 \x00 ² ٧ \n".split(" ")
    with cpu_limit(100):
        for i in range(10_000):
            text = rng.choice(["", " "]).join(rng.choices(words, k=rng.randint(0, 40)))
            assert grade(text, rows[i % 2])["accuracy"] in (0.0, 1.0)


def test_parquet_file_holds_valid_examples(tmp_path):
    out = tmp_path / "digits.parquet"
    main(parse_args(["digits", "--toy", "--n", "20", "--split", "test", "--out", str(out)]))
    examples, _ = read_examples(out, DataFormatConfig())
    assert check_tasks(examples) == {"digits": 20} and examples[0].uid == "digits-test-0-0"
    assert all(grade(f"\\boxed{{{e.ground_truth}}}", e)["reward"] == 1.0 for e in examples)
    question = "<image>Answer in \\boxed{}. How many digits are there?"
    assert examples[0].messages == [{"role": "user", "content": question}]
    assert examples[0].extra["answer_type"] == "count" and examples[0].extra["split"] == "test"


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits.load_handwritten_digits.cache_clear()
    with pytest.raises(UserError, match="the digits task needs scikit-learn; pip install -r requirements.txt"):
        next(digits.toy(1, "train", 0))
