"""Tests of datasets in other projects' layouts, with a few rows each.   pytest tests/test_layouts.py"""

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


def write_table(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def convert(source, *flags):
    prepare_data.main(prepare_data.parse_args([source, *map(str, flags)]))


def convert_and_read(tmp_path, source, file, *flags):
    convert(source, "--input", file, "--out", tmp_path / "out.parquet", *flags)
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


def write_mmmu(tmp_path):
    """Write rows in MMMU's layout: options as a printed Python list, a column per image, and numbered placeholders."""
    rows = [
        ("Which of <image 1> is it?", "['3 cm', \"Hooke's\", '5 cm']", "B", 1),
        ("<image 2> is before <image 1>?", "['yes', 'no']", "A", 2),
        ("Which belongs to <image 1>?", "['<image 3>', '<image 2>']", "A", 3),
        ("<image 1>\nHow many?", "[]", "12", 1),
        ("<image 1> or again <image 1>?", "['x', 'y']", "B", 1),
    ]
    return write_table(tmp_path / "mmmu.parquet", [
        {"id": f"validation_{i}", "question": question, "options": options, "answer": answer,
         "question_type": "open" if options == "[]" else "multiple-choice"}
        | {f"image_{k + 1}": PNG[COLOURS[k]] if k < n else None for k in range(7)}
        for i, (question, options, answer, n) in enumerate(rows)
    ])  # fmt: skip


MMMU_IMAGES = ",".join(f"image_{k}" for k in range(1, 8))


def test_mmmu(tmp_path):
    examples = convert_and_read(tmp_path, "vqa", write_mmmu(tmp_path), "--image-key", MMMU_IMAGES)
    assert content(examples[0]) == "Which of <image> is it?\nA. 3 cm\nB. Hooke's\nC. 5 cm"
    assert [colours(e) for e in examples] == [["red"], ["green", "red"], ["red", "blue", "green"], ["red"], ["red"] * 2]
    assert content(examples[2]) == "Which belongs to <image>?\nA. <image>\nB. <image>"
    assert [e.ground_truth for e in examples] == ["B", "A", "A", "12", "B"]
    assert is_right(examples[0], "Hooke's") and is_right(examples[3], "twelve") and not is_right(examples[3], "A")
    with pytest.raises(UserError, match="no column 'image'; it has .*image_1.* Correct --image-key"):
        convert_and_read(tmp_path, "vqa", tmp_path / "mmmu.parquet")
    with pytest.raises(UserError, match="row 1: <image 2> in the prompt, but the number of images in its row is 1"):
        convert_and_read(tmp_path, "vqa", tmp_path / "mmmu.parquet", "--image-key", "image_1")


def test_mathvision(tmp_path):
    questions = [("<image1>\nHow long?", ["A", "B", "C"], "C"), ("How many?<image1>", [], "14"),
                 ("Which?\n<image1>", ["4", "2", "8"], "B"), ("<image_1> Where?", [], "(2, 3)"),
                 ("No mark?", ["3", "5"], "A")]  # fmt: skip
    file = write_table(tmp_path / "m.parquet", [
        {"id": str(i), "question": question, "options": options, "image": f"images/{i}.jpg",
         "decoded_image": PNG["blue"], "answer": answer, "level": i}
        for i, (question, options, answer) in enumerate(questions)
    ])  # fmt: skip
    examples = convert_and_read(tmp_path, "vqa", file, "--image-key", "decoded_image")
    assert content(examples[0]) == "<image>\nHow long?\nA. A\nB. B\nC. C" and content(examples[1]) == "How many?<image>"
    assert content(examples[2]) == "Which?\n<image>\nA. 4\nB. 2\nC. 8" and (
        content(examples[4]).startswith("<image>No mark?")
    )
    assert [e.ground_truth for e in examples] == ["C", "14", "B", "(2, 3)", "A"] and is_right(examples[2], "2")


def scienceqa_rows(answers, choices):
    return [
        {"image": PNG["green"], "question": f"Which {i}?", "choices": choices, "answer": answer, "task": "closed"}
        for i, answer in enumerate(answers)
    ]


def test_scienceqa(tmp_path):
    rows = scienceqa_rows([0, 2, 1, 0, 2], ["West", "a magnet", "2 kg"])
    rows[3]["image"] = None
    with pytest.raises(UserError, match="row 3: no image, but other rows of the file have one"):
        convert_and_read(tmp_path, "vqa", write_table(tmp_path / "s.parquet", rows))
    examples = convert_and_read(tmp_path, "vqa", tmp_path / "s.parquet", "--bad-rows", "skip")
    assert [e.ground_truth for e in examples] == ["A", "C", "B", "C"] and is_right(examples[1], "2 kg")
    assert content(examples[0]) == "<image>Which 0?\nA. West\nB. a magnet\nC. 2 kg"
    for answers, choices in (([1], ["1", "2"]), ([1, 2, 1], ["a", "b", "c"])):
        with pytest.raises(UserError, match="integer answers may mean positions from 0.*no row shows which"):
            convert_and_read(tmp_path, "vqa", write_table(tmp_path / "s.parquet", scienceqa_rows(answers, choices)))
    for answers, truths in (([1, 2, 3], "ABC"), ([2, 1, 0], "CBA")):  # from 1, from 0
        file = write_table(tmp_path / "s.parquet", scienceqa_rows(answers, ["a", "b", "c"]))
        assert "".join(e.ground_truth for e in convert_and_read(tmp_path, "vqa", file, "--limit", 3)) == truths
    file = write_table(tmp_path / "s.parquet", scienceqa_rows([1, 0, 3], ["a", "b", "c"]))
    with pytest.raises(UserError, match="answers so far are positions from 0, but 3 for the choices a, b, c is not"):
        convert_and_read(tmp_path, "vqa", file, "--bad-rows", "skip")  # a skipped row would hide that all are shifted
    with pytest.raises(UserError, match="answer 3 names 0 of the choices"):
        convert_and_read(tmp_path, "vqa", write_table(tmp_path / "s.parquet", scienceqa_rows([3], ["left", "right"])))


def test_nlvr2_with_labels_of_1_and_0(tmp_path):
    labels = [1, 0, "1", "0", True, 1.0, 0.0]
    rows = [{"sentence": f"It is {i}.", "label": label, "left_image": "a.png", "right_image": "b.png"}
            for i, label in enumerate(labels)]  # fmt: skip
    for name in ("a.png", "b.png"):
        Image.new("RGB", (30, 30)).save(tmp_path / name)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = convert_and_read(tmp_path, "nlvr2", tmp_path / "pairs.jsonl")
    assert [e.ground_truth for e in examples] == ["True", "False", "True", "False", "True", "True", "False"]
    assert is_right(examples[1], "false") and not is_right(examples[1], "true")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("source", ["jsonl", "vqa"])
def test_llavas_json_array_is_refused_with_the_fix(tmp_path, source, indent):
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A bus."}]
    rows = [{"id": str(i), "image": f"coco/{i}.jpg", "conversations": turns} for i in range(5)]
    (tmp_path / "llava.json").write_text(json.dumps(rows, indent=indent))
    with pytest.raises(UserError, match=r"llava.json is one JSON array; write an object .* jq -c '.\[\]' .*llava.json"):
        convert_and_read(tmp_path, source, tmp_path / "llava.json")


def test_r1_v(tmp_path):
    rows = [{"image": PNG["red"], "problem": "How many items?", "solution": f"<answer> {i} </answer>"}
            for i in range(5)]  # fmt: skip
    file = write_table(tmp_path / "r1v.parquet", rows)
    with pytest.raises(UserError, match="no columns 'question', 'answer'; .* Correct --prompt-key, --answer-key$"):
        convert_and_read(tmp_path, "vqa", file)
    examples = convert_and_read(tmp_path, "vqa", file, "--prompt-key", "problem", "--answer-key", "solution")
    assert content(examples[2]) == "<image>How many items?" and "2" in examples[2].ground_truth


# --- image placeholders -----------------------------------------------------------------------------------------------


def test_placeholders_are_added_where_missing_and_reported_once(tmp_path, capsys):
    texts = ["Which?", "<image>Which?", "And which?", "Last <image>?"]
    rows = [{"prompt": [{"role": "system", "content": "Look."}, {"role": "user", "content": text}],
             "images": [PNG["red"]] * (2 if "<" not in text else 1), "data_source": "mine",
             "reward_model": {"style": "rule", "ground_truth": "x"}} for text in texts]  # fmt: skip
    examples, _ = read_examples(write_table(tmp_path / "a.parquet", rows), DataConfig(data=""))
    assert [e.messages[1]["content"] for e in examples] == [
        "<image><image>Which?", "<image>Which?", "<image><image>And which?", "Last <image>?"]  # fmt: skip
    assert all(e.messages[0]["content"] == "Look." and len(list(e.images)) for e in examples)
    plain = "4 of 4 rows have an image of a single colour\n"
    assert capsys.readouterr().out == (
        "2 of 4 rows had images or videos but no <image> or <video> placeholders; added at the start\n") + plain
    read_examples(write_table(tmp_path / "a.parquet", rows[::2]), DataConfig(data=""))
    assert capsys.readouterr().out == plain.replace("4", "2")  # no row has placeholders: that is the format of the file
    rows[1]["images"] *= 2
    with pytest.raises(UserError, match="row 1: <image> placeholders in the prompt: 1; images: 2; write one") as error:
        read_examples(write_table(tmp_path / "a.parquet", rows), DataConfig(data=""))
    known = {f"--{name.replace('_', '-')}" for name in train.parse_args(
        ["--model", "m", "--data", "d", "--out", "o", "--steps", "1"]).to_flags()}  # fmt: skip
    assert {word.rstrip(",.;") for word in str(error.value).split() if word.startswith("--")} <= known


# --- training on other files ------------------------------------------------------------------------------------


def test_a_hub_dataset_is_refused_with_the_command_that_converts_it(tmp_path):
    file = write_table(tmp_path / "s.parquet", scienceqa_rows([0], ["West"]))
    with pytest.raises(UserError, match="no columns 'prompt', .* Correct --prompt-key, .*; rows of image"):
        read_examples(file, DataConfig(data=""))
    with pytest.raises(UserError, match="no columns 'images', .* Correct --image-key.* prepare_data.py vqa"):
        read_examples(file, DataConfig(data="", prompt_key="question"))


def test_urls_are_not_fetched_in_training(tmp_path):
    rows = [{"images": ["http://127.0.0.1:9/a.png"], "prompt": "What?", "reward_model": {"ground_truth": "x"}}]
    with pytest.raises(UserError, match="training does not read from the network; run prepare_data.py first"):
        read_examples(write_table(tmp_path / "u.parquet", rows), DataConfig(data="", data_source="vqa"))


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_text_file_is_refused_with_the_command_that_converts_it(tmp_path, kind):
    (tmp_path / f"qa.{kind}").write_text("{}\n")
    with pytest.raises(UserError, match=rf"not a parquet file; .*SOURCE --input .*qa.{kind} --out .*, {kind} for"):
        read_examples(tmp_path / f"qa.{kind}", DataConfig(data=""))
