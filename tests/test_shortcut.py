"""Tests of tasks/shortcut.py and benchmarks/looking.py.   pytest tests/test_shortcut.py"""

import io
import itertools
import json
import sys
from functools import cache

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from test_train import ROOT, run, write_parquet

from errors import UserError
from prepare_data import DataFormatConfig, read_examples
from rewards.grade import grade
from tasks import shortcut

sys.path.append(str(ROOT / "benchmarks"))
import looking  # noqa: E402


@cache
def rows_of(split: str, n: int = 400, seed: int = 0) -> list[dict]:
    return list(shortcut.toy(n, split, seed))


def truth_of(row: dict) -> str:
    return row["reward_model"]["ground_truth"]


def test_rows_repeat_and_their_columns_agree_with_the_prompt():
    rows = rows_of("train")
    assert rows == list(shortcut.toy(400, "train", 0)) and rows[:40] == rows_of("train", 40)
    assert rows[0]["images"] != rows_of("train", 1, 1)[0]["images"]
    assert [row["extra_info"]["answer_type"] for row in rows[:4]] == ["colour", "shape"] * 2
    for row in rows:
        extra, [message] = row["extra_info"], row["prompt"]
        options = shortcut.OPTIONS[extra["answer_type"]]
        code = shortcut.CODES[options.index(extra["cue_answer"])]
        question = f"Note: {code}. What {extra['answer_type']} is it?"
        assert message["content"] == f"<image>Answer in \\boxed{{}}. {question}"
        assert truth_of(row) in options
        assert extra["cue"] == ("right" if extra["cue_answer"] == truth_of(row) else "wrong")
    for kind, options in shortcut.OPTIONS.items():
        assert len(options) == len(shortcut.CODES)
        truths = [truth_of(row) for row in rows if row["extra_info"]["answer_type"] == kind]
        assert max(map(truths.count, options)) < 0.35 * len(truths)


@pytest.mark.parametrize("split, share", [("train", 0.8), ("test", 0.8), ("val", 0.25)])
def test_cues_are_right_as_often_as_the_split_says_and_wrong_ones_are_spread(split, share):
    rows = rows_of(split, 800)
    right = [row["extra_info"]["cue"] == "right" for row in rows]
    assert stats.binomtest(sum(right), len(right), share).pvalue > 1e-3
    offsets = []  # which of the other three answers a wrong cue names
    for row in rows:
        extra, options = row["extra_info"], shortcut.OPTIONS[row["extra_info"]["answer_type"]]
        offsets.append((options.index(extra["cue_answer"]) - options.index(truth_of(row))) % 4)
    assert stats.chisquare([offsets.count(offset) for offset in (1, 2, 3)]).pvalue > 1e-3


def test_splits_share_no_image_except_that_val_asks_about_those_of_test():
    images = {split: [row["images"][0]["bytes"] for row in rows_of(split)] for split in ("train", "test", "val")}
    warm = {data for [data], _ in itertools.islice(shortcut.scenes("warm", 0), 400)}
    assert all(len(set(files)) == 400 for files in images.values())
    assert not set(images["test"]) & (set(images["train"]) | warm)
    test, val = rows_of("test"), rows_of("val")
    assert images["test"] == images["val"] and [truth_of(row) for row in test] == [truth_of(row) for row in val]
    with pytest.raises(UserError, match="--split 'dev'"):
        next(shortcut.toy(1, "dev", 0))


def test_the_image_shows_the_answers():
    """The image has an area of the true colour."""
    for [data], questions in itertools.islice(shortcut.scenes("train", 1), 60):
        truths = {kind: truth for kind, _, _, truth in questions}
        image = Image.open(io.BytesIO(data)).convert("RGB")
        counts = {colour: count for count, colour in image.getcolors(shortcut.IMAGE_SIDE**2)}
        assert image.size == (shortcut.IMAGE_SIDE, shortcut.IMAGE_SIDE)
        assert counts[shortcut.COLOURS[truths["colour"]]] > 30


def test_replies_are_graded_as_perfect_and_others_are_not(tmp_path):
    write_parquet(tmp_path / "rows.parquet", rows_of("test", 40))
    for example in read_examples(str(tmp_path / "rows.parquet"), DataFormatConfig())[0]:
        kind, truth = example.extra["answer_type"], example.ground_truth
        assert grade(shortcut.make_reply(kind, truth), example)["reward"] == 1.0
        wrong = next(option for option in shortcut.OPTIONS[kind] if option != truth)
        assert grade(shortcut.make_reply(kind, wrong), example)["reward"] == pytest.approx(0.1)
        assert grade(f"The {kind} is {truth}. \\boxed{{{truth}}}", example)["reward"] == pytest.approx(0.9)


# --- benchmarks/looking.py ----------------------------------------------------------------------------------------


def test_the_bootstrap_of_one_seed_equals_scipys():
    differences = np.random.default_rng(1).integers(-1, 2, 120) + np.random.default_rng(2).integers(0, 2, 120) * 0.5
    theirs = stats.bootstrap((differences,), np.mean, n_resamples=10_000, method="percentile",
                             rng=np.random.default_rng(3)).confidence_interval
    ours = looking.bootstrap_seeds([differences])
    assert ours.mean == pytest.approx(differences.mean())
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.03 * (theirs.high - theirs.low))


def test_the_bootstrap_of_seeds_equals_a_plain_loop():
    rng = np.random.default_rng(4)
    seeds = [rng.integers(-1, 2, n) + shift for n, shift in ((40, 0.3), (55, 0.1), (48, 0.5))]
    means = []
    for _ in range(10_000):
        drawn = [seeds[rng.integers(3)] for _ in range(3)]
        means.append(np.mean([rng.choice(questions, len(questions)).mean() for questions in drawn]))
    low, high = np.quantile(means, (0.025, 0.975))
    ours = looking.bootstrap_seeds(seeds)
    assert ours.mean == pytest.approx(np.mean([questions.mean() for questions in seeds]))
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=0.04 * (high - low))
    assert ours.p == pytest.approx(2 * np.mean(np.array(means) <= 0), abs=0.004)
    assert looking.bootstrap_seeds([-questions for questions in seeds]).p == pytest.approx(ours.p, abs=0.004)


def test_the_bootstrap_of_equal_arms_has_p_1_and_of_a_sure_difference_the_smallest_p():
    assert looking.bootstrap_seeds([np.zeros(9)] * 3) == (0, 0, 0, 1)
    assert looking.bootstrap_seeds([np.ones(9)] * 3, draws=999).p == 2 / 1000


def record(uid: str, text: str, accuracy: float) -> dict:
    return {"uid": uid, "samples": [{"text": text, "rewards": {"accuracy": accuracy}}]}


def result(own, blank, conflict) -> dict:
    named = {name: {f"q{i}": x for i, x in enumerate(values)} for name, values in
             (("own", own), ("blank", blank), ("conflict", conflict), ("cue rate", conflict))}
    evaluation = {name: sum(values.values()) / len(values) for name, values in named.items()}
    return {"answers": named, "evaluations": [{"step": 0} | evaluation, {"step": 5} | evaluation], "flops": 2e12,
            "seconds": 7.0, "warned": 5, "fell": None}


def test_answers_are_sorted_into_measures():
    test = {"t0": {"cue": "right"}, "t1": {"cue": "wrong"}}
    val = {"v0": {"cue": "right", "cue_answer": "red"}, "v1": {"cue": "wrong", "cue_answer": "red"},
           "v2": {"cue": "wrong", "cue_answer": "blue"}}
    records = [record("t0", "", 1.0), record("t1", "", 0.0), record("t0-blank", "", 0.0), record("t1-blank", "", 1.0),
               record("v0", r"\boxed{red}", 1.0), record("v1", r"\boxed{red}", 0.0), record("v2", r"\boxed{red}", 1.0)]
    assert looking.read_answers(records, test, val) == {
        "own": {"t0": 1.0, "t1": 0.0}, "blank": {"t0": 0.0, "t1": 1.0}, "conflict": {"v1": 0.0, "v2": 1.0},
        "cue rate": {"v1": 1.0, "v2": 0.0},
    }


def test_arms_are_compared_by_question():
    ours, grpo = [result([1, 1, 0], [0, 1, 0], [1, 1])] * 2, [result([1, 0, 0], [1, 0, 1], [0, 1])] * 2
    assert looking.compare(ours, grpo, "own").mean == pytest.approx(1 / 3)
    assert looking.compare(ours, grpo, "conflict").mean == pytest.approx(1 / 2)
    assert looking.compare(ours, grpo, "drop").mean == pytest.approx(1 / 3 + 1 / 3)
    with pytest.raises(AssertionError, match="different questions"):
        looking.compare(ours, [result([1], [1], [1])] * 2, "own")
    results = {"grpo": grpo, "papo_k2": ours}
    differences = looking.compare_all(results)
    lines = looking.make_table(results, differences)
    assert len({line.count("|") for line in lines[:4]}) == 1  # as many cells in each line
    assert lines[3].startswith("| papo_k2 | 1.000 | 1.000 | 0.667 | 0.333 | 2.00 | 7 | +0.500 (")
    assert lines[-1] == "| papo_k2 | 5, 5 | -, - |"
    assert looking.draw_curves(results).axes and looking.draw_differences(differences).axes


def evaluation_records(n: int, own_right: int, blank_right: int, form: float = 1.0) -> list[dict]:
    """Return records of n questions with own and blank images, of which so many first ones are answered right."""
    rows = []
    for end, n_right in (("", own_right), ("-blank", blank_right)):
        for i in range(n):
            rewards = {"accuracy": float(i < n_right), "format": form}
            rows.append({"uid": f"q{i}{end}", "task": "shortcut", "answer_type": "", "ground_truth": str(i % 4),
                         "samples": [{"text": "", "rewards": rewards}]})
    return rows


def test_the_step_of_the_warning_follows_the_rule_from_the_first_evaluation_with_a_format():
    uids = [f"q{i}" for i in range(100)]
    seen = {0: evaluation_records(100, 20, 0, form=0.5), 5: evaluation_records(100, 50, 40),
            10: evaluation_records(100, 60, 42), 15: evaluation_records(100, 60, 70)}
    assert looking.warning_step(seen, uids) == 15
    assert looking.warning_step(seen | {0: evaluation_records(100, 20, 0)}, uids) == 5
    assert looking.warning_step({step: seen[step] for step in (0, 5, 10)}, uids) is None


def test_the_step_at_which_conflict_accuracy_falls():
    answers = {f"q{i}": 1.0 for i in range(20)}
    fallen = {n: answers | {f"q{i}": 0.0 for i in range(n)} for n in (4, 5)}
    assert looking.falling_step({0: answers, 5: fallen[4], 10: fallen[5]}) == 10  # 2**-4 and 2**-5
    assert looking.falling_step({0: fallen[5], 5: answers}) is None


def test_blank_rows_are_the_rows_with_white_images(tmp_path):
    write_parquet(tmp_path / "test.parquet", rows_of("test", 6))
    looking.write_blank_rows(tmp_path / "test.parquet", tmp_path / "blank.parquet")
    files = [tmp_path / f"{name}.parquet" for name in ("test", "blank")]
    rows, blank = (read_examples(str(file), DataFormatConfig())[0] for file in files)
    for a, b in zip(rows, blank, strict=True):
        assert (b.uid, b.messages, b.ground_truth) == (f"{a.uid}-blank", a.messages, a.ground_truth)
        assert Image.open(io.BytesIO(b.images[0])).getcolors() == [(shortcut.IMAGE_SIDE**2, (255, 255, 255))]


def test_grpo_must_be_among_the_arms():
    with pytest.raises(UserError, match="--arms vppo: the others are compared with grpo"):
        looking.parse_args(["--arms", "vppo"])


@pytest.mark.slow
def test_the_benchmark_runs_and_keeps_finished_runs(tmp_path):
    command = [sys.executable, "benchmarks/looking.py", "--short", "--out", tmp_path]
    run(command)
    results = {arm: json.loads((tmp_path / f"seed0/{arm}.json").read_text()) for arm in ("grpo", "papo_k2")}
    for measured in results.values():
        assert [evaluation["step"] for evaluation in measured["evaluations"]] == [0, 1, 2]
        assert measured["answers"]["own"].keys() == measured["answers"]["blank"].keys()
        assert len(measured["answers"]["own"]) == 8
    assert results["papo_k2"]["flops"] > 0  # grpo's responses may all have the same reward, and are then not trained on
    assert results["grpo"]["evaluations"][0] == results["papo_k2"]["evaluations"][0]  # the same start
    assert (tmp_path / "looking.png").read_bytes()[:4] == b"\x89PNG"
    table = (tmp_path / "looking.md").read_text()
    assert "| papo_k2 |" in table

    shown = run([*command, "--false-alarms", "shapes"]).stdout
    [line] = [line for line in shown.splitlines() if line.startswith("| shapes |")]
    assert line.split(" | ")[1:4] == ["1", "0", "0"]  # the toy has no format yet, so no evaluation is compared

    file = tmp_path / "seed0/grpo.json"
    written = file.stat().st_mtime_ns
    run(command)  # it only writes the table again
    assert file.stat().st_mtime_ns == written and table == (tmp_path / "looking.md").read_text()
