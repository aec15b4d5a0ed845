"""Ground truths: they are unwrapped, checked by the task's reward, and prompts ask for answers in their form."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import reward
from errors import UserError
from prepare_data import DataFormatConfig, main, parse_args, read_examples
from reward import RewardConfig, unwrap_truth
from rewards.grade import Grader, grade
from rollout import load_examples
from tasks import geometry, vqa

PLACE = json.dumps({"country": "France", "lat": 48.85, "lon": 2.35})
TRUTHS = {  # task -> ground truth, extra_info, number of images
    "geo3k": ("3", {}, 1),
    "vqa": ("red", {}, 1),
    "look_closer": ("red", {}, 1),
    "digits": ("3", {}, 1),
    "shapes": ("red", {"answer_type": "colour"}, 1),
    "shortcut": ("red", {"answer_type": "colour"}, 1),
    "nlvr2": ("True", {}, 2),
    "which": ("2", {}, 2),
    "geospot": (PLACE, {}, 1),
    "caption": ("a red dog on grass", {}, 1),
}
WRAPS = ["<answer> {} </answer>", "<think>It is 4 or \\boxed{{5}}.</think>\n<answer>{}</answer>", "\\boxed{{{}}}"]
WRAPS += ["${}$", " $\\boxed{{{}}}$", "<think>x</think> {}", "<Answer>\\( \\fbox {{{}}} \\)</Answer>\n", "\\[{}\\]"]


def png(colour="red") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (30, 30), colour).save(out, "PNG")
    return out.getvalue()


def row(task: str, truth: str, number: int = 0, prompt: str = "Which? Put it in \\boxed{}.") -> dict:
    _, extra, n = TRUTHS.get(task, ("", {}, 1))
    return {
        "data_source": task,
        "prompt": [{"role": "user", "content": "<image>" * n + prompt}],
        "images": [{"bytes": png()}] * n,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": number, **extra},
    }


def save(path, rows: list[dict]):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_truths_covers_every_task():
    reward.load_tasks()
    assert {task.name for task in reward.TASKS.values()} == set(TRUTHS)


@pytest.mark.parametrize("task", TRUTHS)
def test_wrapped_truths_are_unwrapped_for_every_task(task, tmp_path):
    """Truths are unwrapped both when a parquet file is read directly and when a file is prepared from it."""
    plain = TRUTHS[task][0]
    path = save(tmp_path / "theirs.parquet", [row(task, wrap.format(plain), i) for i, wrap in enumerate(WRAPS)])
    main(parse_args(["parquet", "--input", str(path), "--out", str(tmp_path / "ours.parquet")]))
    assert {r["ground_truth"] for r in pq.read_table(tmp_path / "ours.parquet")["reward_model"].to_pylist()} == {plain}
    for file in (path, tmp_path / "ours.parquet"):
        examples, bad = read_examples(file, DataFormatConfig(), check=Grader().check_examples)
        assert [e.ground_truth for e in examples] == [plain] * len(WRAPS) and not bad
        assert grade(f"<think>a</think> \\boxed{{{plain}}}", examples[0])["reward"] > 0.8


NOT_WRAPPED = ["3", " 3 ", "<answer>3</answer> or <answer>4</answer>", "\\boxed{3}, \\boxed{4}", "\\boxed{}", "$5",
               "$ $", "$5 and $6", "<answer> </answer>", "<think>3</think>", "<think>3", "\\boxed{3", "[2, 3)",
               '{"a": "$3$"}', "\\(3\\) or \\(4\\)", "a \\boxed{3}", "<answer>3<answer>",
               "I do not think the answer is 5", "wrong answer: try again"]  # fmt: skip


@pytest.mark.parametrize("truth", NOT_WRAPPED)
def test_a_truth_that_is_not_wrapped_as_a_whole_is_unchanged(truth):
    assert unwrap_truth(truth) == truth


@pytest.mark.parametrize("wrapped, truth", [
    ("Option C", "C"), ("The correct choice is (C).", "(C)"), ("Ans: B", "B"), ("Answer：B", "B"), ("答案：B", "B"),
    ("Final Answer\n5", "5"), ("The answer would be 5", "5"), ("2 + 3 = 5\n#### $5", "$5"),
])  # fmt: skip
def test_labels_before_a_truth_are_removed(wrapped, truth):
    assert unwrap_truth(wrapped) == truth


def test_converters_of_tasks_unwrap_truths_too(tmp_path):
    """The tasks' own converters also unwrap: they read choices, labels, answer types and captions before they build a
    row."""
    (tmp_path / "a.png").write_bytes(png())
    lines = [
        {"image": "a.png", "question": "Which?", "answer": "<answer>B</answer>", "choices": ["red", "blue"]},
        {"image": "a.png", "question": "Which?", "answer": ["\\boxed{red}", "red", "<answer>red</answer>"]},
    ]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pair = {"left_image": "a.png", "right_image": "a.png", "sentence": "Both are red.", "label": "\\boxed{True}"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    (tmp_path / "captions.jsonl").write_text(json.dumps({"image": "a.png", "caption": "<answer>a dog</answer>"}))
    save(tmp_path / "geo.parquet", [{"images": [{"bytes": png()}], "problem": "<image>x?", "answer": "$\\sqrt{2}$"}])
    examples = {}
    files = {"vqa": "qa.jsonl", "nlvr2": "pairs.jsonl", "caption": "captions.jsonl", "geo3k": "geo.parquet"}
    for task, name in files.items():
        main(parse_args([task, "--input", str(tmp_path / name), "--out", str(tmp_path / f"{task}.parquet")]))
        examples[task] = read_examples(tmp_path / f"{task}.parquet", DataFormatConfig())[0]
    assert [e.ground_truth for e in examples["vqa"]] == ["B", '["red", "red", "red"]']
    assert examples["nlvr2"][0].ground_truth == "True"
    assert json.loads(examples["caption"][0].ground_truth)["references"] == ["a dog"]
    assert (examples["geo3k"][0].ground_truth, examples["geo3k"][0].extra["answer_type"]) == ("\\sqrt{2}", "surd")


BAD = {  # task -> {ground truth that no answer can equal: part of the error}
    "geo3k": {"<answer> 3 <answer>": "", "The value is <b>3</b>": "neither mathematics nor plain words",
              "\\boxed{3}, \\boxed{4}": "", "see \\ref{fig:a} below": "", "\\frac{3": "braces do not match",
              "n/a": "holds no answer", "x" * 1500: "too long", "about 5": "a sentence", "Hence 5": "a sentence",
              "I do not think the answer is 5": "", "A, C": "letter A, C"},
    "vqa": {"There are two dogs.": "a sentence", "It is 5.": "a sentence", "x = 5": "a sentence",
            "Answer: B\nExplanation: two": "a sentence", "B. dog": "letter B", '["B"]': "letter B",
            "\\boxed{3}, \\boxed{4}": "", "\\boxed{red": "", "...": "", "word " * 300: "", '["\\\\boxed{}", "."]': ""},
    "look_closer": {"...": ""},
    "digits": {"\\boxed{}": ""},
    "shapes": {"°": "", "\\boxed{}": ""},
    "shortcut": {"°": ""},
    "nlvr2": {"maybe": "neither True nor False"},
    "which": {"7": "names none of its 2 images"},
    "geospot": {"Paris": "is not a JSON object", '{"country": ""}': "is not a JSON object"},
    "caption": {"...": "with a word in it", '{"references": []}': "with a word in it"},
}  # fmt: skip


@pytest.mark.parametrize("task", TRUTHS)
def test_a_truth_that_cannot_earn_full_marks_is_a_bad_row(task, tmp_path, capsys):
    """The error names its file, row, value and reason, both when it is read and when it is prepared. --bad-rows skip
    leaves it out."""
    for bad, reason in BAD[task].items():
        rows = [row(task, TRUTHS[task][0], 0), row(task, bad, 1)]
        path = save(tmp_path / "f.parquet", rows)
        with pytest.raises(UserError) as error:
            read_examples(path, DataFormatConfig(), check=Grader().check_examples)
        message = str(error.value)
        assert f"1 of 2 rows are bad (parquet rows count from 0):\n  {path} row 1: row '{task}/-/f/1': " in message
        assert repr(bad)[1:40] in message and reason in message
        prepare = ["parquet", "--input", str(path), "--out", str(tmp_path / "g.parquet")]
        with pytest.raises(UserError, match="f.parquet row 1: row "):
            main(parse_args(prepare))
        main(parse_args([*prepare, "--bad-rows", "skip"]))
        assert "wrote 1 row " in capsys.readouterr().out
        grader = Grader()
        examples, left_out = read_examples(path, DataFormatConfig(bad_rows="skip"), check=grader.check_examples)
        assert [e.extra["index"] for e in examples] == [0] and reason in left_out[0]
        assert grader.first[task] == examples[0]


def test_users_rewards_get_unchanged_truths(tmp_path):
    path = save(tmp_path / "f.parquet", [row("mine", "<answer>\\boxed{3}</answer>")])
    (tmp_path / "mine.py").write_text("def score(response, example): return float(example.ground_truth in response)")
    grader = Grader(RewardConfig(reward=(f"{tmp_path}/mine.py:score",), reward_workers=0))
    [example], _ = read_examples(path, DataFormatConfig(), check=grader.check_examples)
    assert example.ground_truth == "<answer>\\boxed{3}</answer>"
    # when a file is prepared, truths of tasks that are not built in are not checked
    main(parse_args(["parquet", "--input", str(path), "--out", str(tmp_path / "g.parquet")]))
    # a built-in task graded by a user's reward: unwrapped, as the built-in reward may grade the file too; not checked
    save(path, [row("geo3k", "<answer>see figure 1(</answer>")])
    [example], _ = read_examples(path, DataFormatConfig(), check=grader.check_examples)
    assert example.ground_truth == "see figure 1("


# --- warnings about prompts ---------------------------------------------------------------------------------------


def list_warnings(tmp_path, capsys, processor, rows, rewards=None, **data_settings) -> list[str]:
    from prepare_data import DataConfig

    path = str(save(tmp_path / "f.parquet", rows))
    load_examples(path, DataConfig(data=path, **data_settings), [processor], rewards or Grader())
    return [line for line in capsys.readouterr().out.splitlines() if "warning" in line]


def test_a_prompt_that_does_not_ask_for_the_answer_form_gives_a_warning(tmp_path, capsys, loaded):
    """Rows of EasyR1 and verl with --data-source vqa: the reward expects \\boxed{}, but prompts do not ask for it."""
    processor = loaded["qwen2_5_vl"][1]
    rows = [row("geo3k", "3", i, f"Find x in figure {i}.") for i in range(3)]
    [line] = list_warnings(tmp_path, capsys, processor, rows, data_source="vqa")
    assert line.startswith(f"warning: {tmp_path}/f.parquet: prompts that do not ask for the form of answer that the")
    assert "'vqa' expects: 3" in line and "Find x in figure 0.'; " in line
    assert line.endswith(f"--instruction vqa adds: {vqa.INSTRUCTION}")
    assert not list_warnings(tmp_path, capsys, processor, rows, data_source="vqa", instruction="vqa")
    boxed = [row("geo3k", "3", 3, "Find x. Put it in \\boxed{}.")]
    [line] = list_warnings(tmp_path, capsys, processor, rows[:1] + boxed, data_source="vqa")
    assert "expects: 1." in line
    [line] = list_warnings(tmp_path, capsys, processor, boxed)  # geo3k's format also expects <think>
    assert geometry.INSTRUCTION in line
    assert not list_warnings(tmp_path, capsys, processor, boxed, instruction="geo3k")
    assert not list_warnings(tmp_path, capsys, processor, rows, Grader(has_environment=True))  # the environment asks


def test_each_tasks_own_instruction_avoids_the_warning(tmp_path, capsys, loaded):
    reward.load_tasks()
    processor = loaded["qwen2_5_vl"][1]
    for task, (truth, _, _) in TRUTHS.items():
        rows = [row(task, truth, 0, "What is it?")]
        assert len(list_warnings(tmp_path, capsys, processor, rows)) == (task != "caption"), task
        assert not list_warnings(tmp_path, capsys, processor, rows, instruction=task), task
    assert reward.TASKS["which"].instruction != reward.TASKS["nlvr2"].instruction
    # prompts of toy data ask for the form in their own words
    for task in ("geo3k", "vqa", "digits", "shapes", "nlvr2", "geospot", "caption"):
        main(parse_args([task, "--toy", "--n", "6", "--out", str(tmp_path / "toy.parquet")]))
        assert not list(Grader().format_warnings(read_examples(tmp_path / "toy.parquet", DataFormatConfig())[0])), task


BOXES = ["10, 20, 30, 40", "[10 20 30 25]", "[10, 20, 10, 40]", "(1, 2, 3, 4)", "[0.5, 0.25]"]


@pytest.mark.parametrize("truth", BOXES)
def test_boxes_and_points_are_no_answers_of_several_people(truth):
    with pytest.raises(UserError, match="is a box or a point, which this task does not grade"):
        vqa.answerable(truth, dict)
