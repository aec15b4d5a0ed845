"""eval.py --grader: our implementation of the published rules of EasyR1 and verl, and the page's table about them.

pytest tests/test_graders.py"""

import json
import re
import subprocess
import sys

import pytest
from conftest import cpu_limit
from test_train import ROOT, write_parquet

import errors
import eval as E
from errors import UserError
from tasks import _published
from tasks.geometry import same_answer, toy
from tasks.shapes import shapes_rows

sys.path.append(str(ROOT / "benchmarks"))
import graders  # noqa: E402

SURVEY = graders.read_lines(ROOT / "tests/data/reward_cases.jsonl")
ANSWERS = graders.read_lines(graders.ANSWERS)


@pytest.mark.parametrize("row", SURVEY, ids=lambda row: row["prediction"])
def test_verdicts_are_those_that_the_survey_recorded(row):
    """mathruler hangs on two of the cases; there ours rejects the answer, and its format is right."""
    verl = _published.published_reward("verl", row["response"], row["ground_truth"])
    hangs = row["verl_geo3k_score"] == "HANG"
    assert verl["accuracy"] == (0 if hangs else row["mathruler"])
    assert verl["reward"] == pytest.approx(0.1 if hangs else row["verl_geo3k_score"])


@pytest.mark.parametrize("grader", graders.GRADERS[1:])
def test_rewards_are_those_that_their_code_returned(grader):
    """The stored rewards come from their code; null means that it was still running after 25 seconds."""
    for row in ANSWERS:
        expected = 0.1 if row[grader] is None else row[grader]
        reward = _published.published_reward(grader, row["response"], row["truth"])["reward"]
        assert reward == pytest.approx(expected), row
    hanging = [row["response"].partition("{")[2] for row in ANSWERS if row[grader] is None]
    assert hanging == ["7**7**7**7/7}", "9999999!}"]


@pytest.mark.parametrize("table", "SPELLING WORDS GROUPS LATEX_SIGNS LAST PARSABLE".split())
def test_every_rule_is_needed_for_the_verdicts(table, monkeypatch):
    """The pairs have the verdicts of MathRuler 0.1.0. Without any one rule, a stored verdict would change."""
    pairs = json.loads((ROOT / "tests/data/mathruler_pairs.json").read_text())
    pairs += [[row["response"], row["truth"], row["verl"] > 0.5] for row in ANSWERS if row["verl"] is not None]

    def all_equal():
        for answer, truth, verdict in pairs:
            response = answer if "<" in answer else f"\\boxed{{{answer}}}"
            if _published.published_reward("verl", response, truth)["accuracy"] != verdict:
                return False
        return True

    assert all_equal()
    lines = getattr(_published, table).strip().splitlines()
    for line in lines:
        monkeypatch.setattr(_published, table, "\n".join(other for other in lines if other != line))
        assert not all_equal(), line


def test_the_stored_answers_have_a_label_and_a_reason():
    assert len(ANSWERS) == 200 and {row["right"] for row in ANSWERS} == {0, 1}
    assert all(row["why"] and len(row["why"]) < 50 for row in ANSWERS)
    assert len({(row["response"], row["truth"]) for row in ANSWERS}) == 200
    survey = [(row["response"], row["ground_truth"]) for row in SURVEY]
    assert [(row["response"], row["truth"]) for row in ANSWERS[: graders.SURVEY]] == survey
    labels = [row.get("human_should_accept", answer["right"]) for row, answer in zip(SURVEY, ANSWERS, strict=False)]
    assert labels == [row["right"] for row in ANSWERS[: graders.SURVEY]]
    assert graders.ANSWERS.stat().st_size < 100_000


def test_where_ours_differs_from_the_label():
    """Two labels of the survey are marked as ambiguous there; ours does not read a sentence in the box."""
    records = graders.stored_records(ANSWERS)
    pairs = zip(ANSWERS, records, strict=True)
    wrong = {row["why"]: row.get("ambiguous", False) for row, r in pairs if graders.verdicts(r)["ours"] != row["right"]}
    assert wrong == {"another name": True, "not in lowest terms": True, "a sentence": False}


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "evaluation.md").read_text()
    records = graders.stored_records(ANSWERS)
    for grader in graders.GRADERS:
        cells = map(str, graders.agreement(ANSWERS, records, grader))
        assert f"| `{grader}` | {' | '.join(cells)} |" in page
    rows = re.findall(r"^\| (accept|reject) \|.*\| (\d+) \|$", page, re.M)
    for verdict, right in (("accept", 0), ("reject", 1)):  # answers with this label, of which only they say otherwise
        judged = [graders.verdicts(r) for row, r in zip(ANSWERS, records, strict=True) if row["right"] == right]
        n = sum(given["ours"] == right != given["verl"] for given in judged)
        assert sum(int(count) for what, count in rows if what == verdict) == n


HOSTILE = ["9**9**9**9", "9^9^9^9", "9999999!", "(" * 900, "{" * 900, "\\frac" * 200, "\\sqrt{" * 150 + "}" * 150,
           "1," * 499, "-" * 999, "\\text{ " * 140, "1 " * 499, "2^{2^{2^{2^{9}}}}", "x" * 999, "=" * 999, " " * 999,
           "1e9999", "nan", "inf", "1/0", "sqrt(-1)", "\\frac{1}{0}", "10^99", "(1,(2,3))", "[", "\\"]  # fmt: skip


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer[:20])
@pytest.mark.parametrize("truth", ["48", r"5 \sqrt { 3 }", "(2,3]", r"x \pi"])
def test_no_answer_hangs_or_raises(answer, truth):
    for grader in ("easyr1", "verl"):
        with cpu_limit():
            reward = _published.published_reward(grader, f"<think>a</think> \\boxed{{{answer}}}" + " " * 20_000, truth)
        assert reward["accuracy"] == 0


def test_ours_keeps_congruent_and_similar_apart():
    congruent, similar = r"\triangle ABC \cong \triangle DEF", r"\triangle ABC \sim \triangle DEF"
    assert same_answer(congruent, congruent) and same_answer("△ABC ≅ △DEF", congruent)
    assert not same_answer(congruent, similar) and not same_answer(similar, congruent)
    assert same_answer(r"5\sqrt{3} \cong 8.66", r"5\sqrt{3}")  # there it means approximately


def record(uid, text, truth, rewards):
    sample = {"text": text, "finish_reason": "stop", "tokens": 3, "rewards": rewards}
    return {"uid": uid, "ground_truth": truth, "answer_type": "a", "task": "geo3k", "source": "geo3k", "n_images": 1,
            "groups": {}, "samples": [sample]}  # fmt: skip


def test_responses_get_all_accuracies_and_disagreements_are_listed():
    right, wrong = {"accuracy": 1.0, "reward": 1.0}, {"accuracy": 0.0, "reward": 0.1}
    records = [record("same", "<think>a</think> \\boxed{48}", "48", dict(right)),
               record("rejected", "\\boxed{48°}", "48", dict(right)),
               record("accepted", "< think >a</ think > \\boxed{3 \\text{ or } 4}", "3", dict(wrong)),
               record("failed", "\\boxed{48}", "48", {"reward": 0.0})]  # fmt: skip
    assert _published.add_published_grades("verl", records) == {"accepts": ["accepted"], "rejects": ["rejected"]}
    differ = _published.add_published_grades("easyr1", records)
    summary = E.summarise(records, "accuracy") | {"graders_differ": {"easyr1": differ}}
    assert summary["accuracy"] == 0.5  # ours is not changed
    means = {name: result["mean"] for name, result in summary["rewards"].items()}
    assert means.pop("reward") == 0.525
    assert means == {"easyr1_accuracy": 0.75, "easyr1_score": pytest.approx((1 + 0 + 1 + 0.9) / 4),
                     "verl_accuracy": 0.75, "verl_score": pytest.approx((1 + 0 + 0.9 + 0.9) / 4)}  # fmt: skip
    low, high = summary["rewards"]["verl_accuracy"]["mean_ci95"]
    assert 0 < low < 0.75 < high < 1
    lines = "\n".join(E.format_summary(summary))
    assert "easyr1 accepts a response that ours rejects in 1 examples, and rejects one that ours accepts in 1" in lines
    assert "easyr1_accuracy  0.750 (" in lines


def test_each_example_is_listed_once():
    several = record("some", "\\boxed{5}", "5", {"accuracy": 0.0, "reward": 0.0})
    several["samples"] += [{**several["samples"][0], "rewards": {"accuracy": 0.0, "reward": 0.0}},
                           {"text": "\\boxed{5°}", "rewards": {"accuracy": 1.0, "reward": 0.9}}]  # fmt: skip
    assert _published.add_published_grades("verl", [several]) == {"accepts": ["some"], "rejects": ["some"]}


def test_only_geometry3k_is_graded_without_a_warning(toys, tmp_path, ctx, monkeypatch, capsys):
    monkeypatch.setattr(E, "setup_distributed", lambda: ctx)
    data = write_parquet(tmp_path / "shapes.parquet", shapes_rows(2, "test", 0))
    command = f"{toys['qwen2_5_vl']} --data {data} --out {tmp_path / 'e'} --max-new-tokens 2 --rollout hf "
    E.main(E.parse_args([*command.split(), "--reward-workers", "0", "--grader", "verl"]))
    assert f"rules are for boxed answers to Geometry3K, but {data} has tasks shapes" in capsys.readouterr().out


def test_the_help_shows_a_plain_default(capsys):
    with pytest.raises(SystemExit):
        E.parse_args(["--help", "all"])
    assert re.search(r"always\s+included \(default: ours\)", capsys.readouterr().out)


def test_a_missing_file_of_predictions_is_a_short_error():
    command = [sys.executable, ROOT / "benchmarks/graders.py", "no.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "no.jsonl: no such file" in done.stderr and "Traceback" not in done.stderr


def test_eval_writes_all_accuracies(toys, tmp_path, ctx, monkeypatch, capsys):
    monkeypatch.setattr(E, "setup_distributed", lambda: ctx)
    data = write_parquet(tmp_path / "geo3k.parquet", list(toy(4, "test", 0)))
    command = f"{toys['qwen2_5_vl']} --data {data} --out {tmp_path / 'e'} --prompt-key problem --answer-key answer "
    command += "--max-new-tokens 2 --rollout hf --reward-workers 0 --grader ours easyr1 verl"
    E.main(E.parse_args(command.split()))
    result = json.loads((tmp_path / "e" / "eval.json").read_text())
    published = {"easyr1_accuracy", "easyr1_score", "verl_accuracy", "verl_score"}
    assert set(result["rewards"]) == published | {"format", "reward"}
    assert set(result["graders_differ"]) == {"easyr1", "verl"} and result["settings"]["grader"][0] == "ours"
    sample = graders.read_lines(tmp_path / "e" / "predictions.jsonl")[0]["samples"][0]
    assert set(sample["rewards"]) == published | {"accuracy", "format", "reward"}
    out = capsys.readouterr().out
    assert "warning: --grader" not in out
    assert "verl accepts a response that ours rejects in 0 examples, and rejects one that ours accepts in 0" in out


def test_a_copy_without_the_file_refuses_the_flag(toys, tmp_path, ctx, monkeypatch):
    monkeypatch.setattr(E, "setup_distributed", lambda: ctx)
    monkeypatch.setattr(errors, "in_copy", lambda module: module != "tasks._published")
    data = write_parquet(tmp_path / "shapes.parquet", shapes_rows(2, "test", 0))
    command = [str(toys["qwen2_5_vl"]), "--data", data, "--out", str(tmp_path / "e"), "--rollout", "hf"]
    with pytest.raises(UserError, match="--grader verl: tasks/_published.py is not in this copy; leave the flag out"):
        E.main(E.parse_args([*map(str, command), "--grader", "verl"]))
