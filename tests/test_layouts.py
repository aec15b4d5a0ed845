"""Datasets in the layouts of others, five rows of each.   pytest tests/test_layouts.py"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import prepare_data
import train
from errors import UserError
from prepare_data import DataConfig, DataFormatConfig, read_examples
from rewards.grade import check_tasks, grade
from tasks import vqa
from tasks.shapes import encode_png

COLOURS = ("red", "green", "blue", "black", "white", "yellow", "grey")
PNG = {colour: {"bytes": encode_png(Image.new("RGB", (30, 30), colour)), "path": None} for colour in COLOURS}


def table(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def prepare(source, *flags):
    prepare_data.main(prepare_data.parse_args([source, *map(str, flags)]))


def prepared(tmp_path, source, file, *flags):
    prepare(source, "--input", file, "--out", tmp_path / "out.parquet", *flags)
    examples, _ = read_examples(tmp_path / "out.parquet", DataFormatConfig())
    check_tasks(examples)
    return examples


def content(example):
    [message] = example.messages
    return message["content"].removesuffix(f"{vqa.INSTRUCTION}").rstrip()


def colours(example):
    return [next(c for c in COLOURS if PNG[c]["bytes"] == data) for data in example.images]


def is_right(example, response):
    return grade(rf"\boxed{{{response}}}", example)["accuracy"] == 1.0


def mmmu(tmp_path):
    """Its options are a list as Python prints it, its images have columns of their own, and its marks are numbered."""
    rows = [
        ("Which of <image 1> is it?", "['3 cm', \"Hooke's\", '5 cm']", "B", 1),
        ("<image 2> is before <image 1>?", "['yes', 'no']", "A", 2),
        ("Which belongs to <image 1>?", "['<image 3>', '<image 2>']", "A", 3),
        ("<image 1>\nHow many?", "[]", "12", 1),
        ("<image 1> or again <image 1>?", "['x', 'y']", "B", 1),
    ]
    return table(tmp_path / "mmmu.parquet", [
        {"id": f"validation_{i}", "question": question, "options": options, "answer": answer,
         "question_type": "open" if options == "[]" else "multiple-choice"}
        | {f"image_{k + 1}": PNG[COLOURS[k]] if k < n else None for k in range(7)}
        for i, (question, options, answer, n) in enumerate(rows)
    ])  # fmt: skip


MMMU_IMAGES = ",".join(f"image_{k}" for k in range(1, 8))


def test_mmmu(tmp_path):
    found = prepared(tmp_path, "vqa", mmmu(tmp_path), "--image-key", MMMU_IMAGES)
    assert content(found[0]) == "Which of <image> is it?\nA. 3 cm\nB. Hooke's\nC. 5 cm"
    assert [colours(e) for e in found] == [["red"], ["green", "red"], ["red", "blue", "green"], ["red"], ["red"] * 2]
    assert content(found[2]) == "Which belongs to <image>?\nA. <image>\nB. <image>"
    assert [e.ground_truth for e in found] == ["B", "A", "A", "12", "B"]
    assert is_right(found[0], "Hooke's") and is_right(found[3], "twelve") and not is_right(found[3], "A")
    with pytest.raises(UserError, match="no column 'image'; it has .*image_1.* Correct --image-key"):
        prepared(tmp_path, "vqa", tmp_path / "mmmu.parquet")
    with pytest.raises(UserError, match="row 1: <image 2> in the prompt, but the row has 1 images"):
        prepared(tmp_path, "vqa", tmp_path / "mmmu.parquet", "--image-key", "image_1")


def test_mathvision(tmp_path):
    questions = [("<image1>\nHow long?", ["A", "B", "C"], "C"), ("How many?<image1>", [], "14"),
                 ("Which?\n<image1>", ["4", "2", "8"], "B"), ("<image_1> Where?", [], "(2, 3)"),
                 ("No mark?", ["3", "5"], "A")]  # fmt: skip
    file = table(tmp_path / "m.parquet", [
        {"id": str(i), "question": question, "options": options, "image": f"images/{i}.jpg",
         "decoded_image": PNG["blue"], "answer": answer, "level": i}
        for i, (question, options, answer) in enumerate(questions)
    ])  # fmt: skip
    found = prepared(tmp_path, "vqa", file, "--image-key", "decoded_image")
    assert content(found[0]) == "<image>\nHow long?\nA. A\nB. B\nC. C" and content(found[1]) == "How many?<image>"
    assert content(found[2]) == "Which?\n<image>\nA. 4\nB. 2\nC. 8" and content(found[4]).startswith("<image>No mark?")
    assert [e.ground_truth for e in found] == ["C", "14", "B", "(2, 3)", "A"] and is_right(found[2], "2")


def scienceqa(answers, choices):
    return [
        {"image": PNG["green"], "question": f"Which {i}?", "choices": choices, "answer": answer, "task": "closed"}
        for i, answer in enumerate(answers)
    ]


def test_scienceqa(tmp_path):
    rows = scienceqa([0, 2, 1, 0, 2], ["West", "a magnet", "2 kg"])
    rows[3]["image"] = None
    found = prepared(tmp_path, "vqa", table(tmp_path / "s.parquet", rows))
    assert [e.ground_truth for e in found] == ["A", "C", "B", "A", "C"] and is_right(found[1], "2 kg")
    assert content(found[0]) == "<image>Which 0?\nA. West\nB. a magnet\nC. 2 kg" and content(found[3])[:5] == "Which"
    with pytest.raises(UserError, match="answer 1 names 2 of .* 1, 2; give the .* .its text is A, its place is B"):
        prepared(tmp_path, "vqa", table(tmp_path / "s.parquet", scienceqa([1], ["1", "2"])))
    with pytest.raises(UserError, match="answer 3 names 0 of the choices"):
        prepared(tmp_path, "vqa", table(tmp_path / "s.parquet", scienceqa([3], ["left", "right"])))


def test_nlvr2_with_labels_of_1_and_0(tmp_path):
    labels = [1, 0, "1", "0", True, 1.0, 0.0]
    rows = [{"sentence": f"It is {i}.", "label": label, "left_image": "a.png", "right_image": "b.png"}
            for i, label in enumerate(labels)]  # fmt: skip
    for name in ("a.png", "b.png"):
        Image.new("RGB", (30, 30)).save(tmp_path / name)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = prepared(tmp_path, "nlvr2", tmp_path / "pairs.jsonl")
    assert [e.ground_truth for e in found] == ["True", "False", "True", "False", "True", "True", "False"]
    assert is_right(found[1], "false") and not is_right(found[1], "true")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("source", ["jsonl", "vqa"])
def test_llavas_array_is_refused_with_the_remedy(tmp_path, source, indent):
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A bus."}]
    rows = [{"id": str(i), "image": f"coco/{i}.jpg", "conversations": turns} for i in range(5)]
    (tmp_path / "llava.json").write_text(json.dumps(rows, indent=indent))
    with pytest.raises(UserError, match=r"llava.json is one JSON array; write an object .* jq -c '.\[\]' .*llava.json"):
        prepared(tmp_path, source, tmp_path / "llava.json")


def test_r1_v(tmp_path):
    rows = [{"image": PNG["red"], "problem": "How many items?", "solution": f"<answer> {i} </answer>"}
            for i in range(5)]  # fmt: skip
    file = table(tmp_path / "r1v.parquet", rows)
    with pytest.raises(UserError, match="no column 'question'; it has image, problem, solution. Correct --prompt-key"):
        prepared(tmp_path, "vqa", file)
    found = prepared(tmp_path, "vqa", file, "--prompt-key", "problem", "--answer-key", "solution")
    assert content(found[2]) == "<image>How many items?" and "2" in found[2].ground_truth


# --- marks ------------------------------------------------------------------------------------------------------------


def test_marks_are_added_where_there_are_none_and_told_once(tmp_path, capsys):
    texts = ["Which?", "<image>Which?", "And which?", "Last <image>?"]
    rows = [{"prompt": [{"role": "system", "content": "Look."}, {"role": "user", "content": text}],
             "images": [PNG["red"]] * (2 if "<" not in text else 1), "data_source": "mine",
             "reward_model": {"style": "rule", "ground_truth": "x"}} for text in texts]  # fmt: skip
    examples, _ = read_examples(table(tmp_path / "a.parquet", rows), DataConfig(data=""))
    assert [e.messages[1]["content"] for e in examples] == [
        "<image><image>Which?", "<image>Which?", "<image><image>And which?", "Last <image>?"]  # fmt: skip
    assert all(e.messages[0]["content"] == "Look." and len(list(e.images)) for e in examples)
    assert capsys.readouterr().out == (
        "added <image> placeholders, one per image, at the start of 2 prompts that had images but no placeholders\n")
    rows[1]["images"] *= 2
    with pytest.raises(UserError, match="row 1: 1 <image> placeholders in the prompt but 2 images; write one") as error:
        read_examples(table(tmp_path / "a.parquet", rows), DataConfig(data=""))
    known = {f"--{name.replace('_', '-')}" for name in train.parse_args(
        ["--model", "m", "--data", "d", "--out", "o", "--steps", "1"]).to_flags()}  # fmt: skip
    assert {word.rstrip(",.;") for word in str(error.value).split() if word.startswith("--")} <= known


# --- training on files as they are ------------------------------------------------------------------------------------


def test_a_dataset_of_the_hub_is_read_as_it_is(tmp_path, capsys):
    rows = scienceqa([0, 2, 1, 0, 2], ["West", "a magnet", "2 kg"])
    file = table(tmp_path / "s.parquet", rows)
    found, _ = read_examples(file, DataConfig(data=str(file)))
    told = capsys.readouterr().out
    assert f"run prepare_data.py vqa --input {file} --out" in told and "at the start of 5 prompts" in told
    prepare("vqa", "--input", file, "--out", tmp_path / "out.parquet")
    want, _ = read_examples(tmp_path / "out.parquet", DataConfig(data=""))
    for one, other in zip(found, want, strict=True):
        assert list(one.images) == list(other.images) and other.extra == one.extra | {"uid": one.uid}
        for name in ("uid", "data_source", "messages", "ground_truth"):
            assert getattr(one, name) == getattr(other, name)
    with pytest.raises(UserError, match="no column 'prompt'; it has image, .* Correct --prompt-key"):
        read_examples(file, DataConfig(data="", data_source="which"))
    with pytest.raises(UserError, match="no column 'images'; it has .* Correct --image-key"):
        read_examples(file, DataConfig(data="", prompt_key="question"))


def test_urls_are_not_fetched_in_training(tmp_path):
    rows = [{"image": "http://127.0.0.1:9/a.png", "question": "What?", "answer": "x"}]
    with pytest.raises(UserError, match="training does not read from the network; run prepare_data.py first"):
        read_examples(table(tmp_path / "u.parquet", rows), DataConfig(data=""))


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_text_file_is_refused_with_the_command_that_converts_it(tmp_path, kind):
    (tmp_path / f"qa.{kind}").write_text("{}\n")
    with pytest.raises(UserError, match=rf"not a parquet file; run prepare_data.py {kind} --input .*qa.{kind} --out"):
        read_examples(tmp_path / f"qa.{kind}", DataConfig(data=""))
