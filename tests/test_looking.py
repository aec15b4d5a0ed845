"""Does the policy still use the image? The warning rule and the metrics of --eval-ablate.

pytest tests/test_looking.py
"""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from test_faults import left as signals_left  # noqa: F401  a fixture
from test_train import TORCHRUN, rows, run, without_time, write_parquet
from test_watching import quick  # noqa: F401  a fixture

import report.log
from report.evaluation import summarise, visual_reliance
from report.looking import FALSE_ALARMS, MIN_GAIN, error_level, learns_shortcut, looking_metrics, read_start
from report.page.plots import measured_panels
from report.run_warnings import RunWarnings
from report.statistics import binomial_tail
from tasks.shapes import shapes_rows

N = 400  # questions
EVALUATIONS = 20

# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 7, 400, 3000])
def test_binomial_tails_equal_scipys(n):
    for p in (0.02, 0.5, 0.97):
        for least in {0, n // 3, n // 2, n}:
            theirs = stats.binomtest(least, n, p, alternative="greater").pvalue if n else 1.0
            assert binomial_tail(least, n, p) == pytest.approx(theirs, rel=1e-9, abs=1e-300)


def test_the_levels_of_a_run_add_up_to_the_rate_of_false_alarms():
    levels = [error_level(k) for k in range(1, 100_000)]
    assert 0.99 * FALSE_ALARMS < sum(levels) < FALSE_ALARMS
    assert [round(level, 5) for level in (levels[0], levels[1], levels[9])] == [0.00608, 0.00152, 0.00006]
    assert error_level(3, sets=2) == levels[2] / 2


def rule_by_loops(start, now, prior, level):
    """Return the rule, with scipy's tests and a bootstrap that draws questions."""
    n = len(start[0])
    gained = sum(now[1][i] > start[1][i] for i in range(n))
    lost = sum(now[1][i] < start[1][i] for i in range(n))
    rose = gained + lost and stats.binomtest(gained, gained + lost, 0.5, alternative="greater").pvalue < level
    above = stats.binomtest(int(sum(now[1])), n, prior, alternative="greater").pvalue < level
    values = [now[1][i] - start[1][i] - (now[0][i] - start[0][i]) / 2 for i in range(n)] + [-1.5, 1.5]
    means = np.random.default_rng(5).choice(values, (4000, n + 2)).mean(axis=1)
    margin = np.quantile(means, 0.025)
    return bool(rose and above and (gained - lost) / n >= MIN_GAIN and margin > 0), margin


def test_the_rule_equals_loops():
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(150):
        n, p = rng.integers(20, 200), rng.uniform(0, 1, 4)
        start, now = (rng.random((2, n)) < p[:2, None]) * 1.0, (rng.random((2, n)) < p[2:, None]) * 1.0
        prior, level = rng.uniform(0.05, 0.9), rng.choice([0.05, 0.001])
        wanted, margin = rule_by_loops(start, now, prior, level)
        if abs(margin) > 0.01:  # else the draws of the two bootstraps decide
            assert learns_shortcut(start, now, prior, level) == wanted
            verdicts.append(wanted)
    assert 20 < sum(verdicts) < len(verdicts) - 20


def answers(rng, p_n, evaluations, persistence=0.5):
    """Return right (1) and wrong (0) answers to questions with constant probabilities, (evaluations, n). An answer is
    the previous one with probability `persistence`, so evaluations are correlated."""
    right = [rng.random(p_n.shape) < p_n]
    for _ in range(evaluations - 1):
        fresh = rng.random(p_n.shape) < p_n
        right.append(np.where(rng.random(p_n.shape) < persistence, right[-1], fresh))
    return np.array(right, dtype=np.float32)


def sign_test_alarms(blind):
    """Return whether condition 1 alone ever holds in each run: blind (evaluations, runs, n) -> (runs,)."""
    gained, lost = ((blind[1:] * (1 - blind[0])).sum(-1), (blind[0] * (1 - blind[1:])).sum(-1))
    levels = np.array([error_level(k) for k in range(1, len(blind))])[:, None]
    return (stats.binom.sf(gained - 1, gained + lost, 0.5) < levels).any(axis=0)


@pytest.mark.parametrize("accuracy", [0.1, 0.3, 0.5])
def test_runs_without_drift_are_rarely_warned(accuracy):
    """10,000 runs in all. The prior is near 0, so that condition 2 always holds."""
    rng = np.random.default_rng(round(10 * accuracy))
    n_runs, alone, together = 3334, 0, 0
    for _ in range(n_runs // 1667):
        p_n = np.clip(rng.beta(4 * accuracy, 4 * (1 - accuracy), (1667, N)), 0, 1)  # questions differ in difficulty
        blind = answers(rng, p_n, EVALUATIONS + 1)
        alarms = sign_test_alarms(blind)
        alone += alarms.sum()
        for i in np.flatnonzero(alarms):  # a warning needs condition 1
            own = answers(rng, np.full(N, 0.7), EVALUATIONS + 1)
            start = np.array([own[0], blind[0, i]])
            together += any(learns_shortcut(start, np.array([own[k], blind[k, i]]), 1e-9, error_level(k))
                            for k in range(1, EVALUATIONS + 1))  # fmt: skip
    print(f"blind accuracy {accuracy}: alarms {alone / n_runs:.4f} by condition 1, {together / n_runs:.4f} by all")
    assert alone <= 0.01 * n_runs and together <= alone


def simulate(blind_from, blind_to, own_from, own_to, prior, seed, correlated=True):
    """Return the first k at which a run is warned, or None. Accuracies change linearly."""
    rng = np.random.default_rng(seed)
    difficulty, other = rng.random((2, N))
    history = []
    for k in range(EVALUATIONS + 1):
        part = k / EVALUATIONS
        noise = rng.normal(0, 0.05, (2, N))
        blind = difficulty + noise[0] < blind_from + part * (blind_to - blind_from)
        own = (difficulty if correlated else other) + noise[1] < own_from + part * (own_to - own_from)
        history.append(np.array([own, blind], dtype=float))
    found = (k for k in range(1, len(history)) if learns_shortcut(history[0], history[k], prior, error_level(k)))
    return next(found, None)


def test_a_shortcut_is_found_and_other_runs_are_not_warned():
    found = [simulate(0.3, 0.6, 0.3, 0.7, prior=0.3, seed=s) for s in range(20)]
    assert all(found) and np.median(found) < 15
    # learns only the most frequent answers; learns to see and gains a little blind; hardly changes
    for case in [(0.1, 0.33, 0.1, 0.33, 0.33), (0.3, 0.45, 0.3, 0.95, 0.3), (0.3, 0.33, 0.3, 0.6, 0.3)]:
        assert sum(simulate(*case, seed=s) is not None for s in range(20)) <= 1, case


# --- history ----------------------------------------------------------------------------------------------------------


def make_records(right, form=1.0):
    """Return records of questions with the given accuracy; the most frequent answer is right for half of them."""
    return [{"index": i, "uid": f"q{i}", "task": "t", "answer_type": "all", "ground_truth": str(i % 2), "n_images": 1,
             "samples": [{"text": "", "finish_reason": "stop", "tokens": 1,
                          "rewards": {"accuracy": float(x), "format": form, "reward": float(x)}}]}
            for i, x in enumerate(right)]  # fmt: skip


class History:
    """Evaluations in a folder, written as a run writes them."""

    def __init__(self, out):
        self.out, self.rows = out, []

    def add(self, own, blind, step, form=1.0, kinds=("blank",)):
        """Add an evaluation and return its metrics."""
        records, ablated = make_records(own, form), {kind: make_records(blind, form) for kind in kinds}
        summary = summarise([r | {"groups": {}, "source": ""} for r in records])
        summary["reliance"] = visual_reliance(records, ablated, "accuracy")
        metrics = looking_metrics(self.out, self.rows, records, ablated, summary)
        report.log.RunLog.save_evaluation(self, step, records, summary, [], None, ablated)
        self.rows.append({"step": step, "eval/rewards/format": form} | {f"eval/{k}": v for k, v in metrics.items()})
        return metrics

    title = "run"


def some(fraction, n=200):
    return [i < fraction * n for i in range(n)]


def test_metrics_equal_their_definitions(tmp_path):
    history = History(tmp_path)
    first = history.add(some(0.5), some(0.4), 0)
    assert first["prior"] == 0.5 and first["own"] == 0.5 and first["blank"] == 0.4
    assert first["own_low"] < 0.5 < first["own_high"] and first["drop_blank"] == pytest.approx(0.1)
    assert first["drop_blank_low"] < 0.1 < first["drop_blank_high"]
    assert not {"visual_share", "blind_share", "shortcut"} & set(first)  # not above the prior; no earlier evaluation
    second = history.add(some(0.9), some(0.5), 10)
    assert second["visual_share"] == pytest.approx(0.4 / (0.9 - 0.5)) and second["shortcut"] == 0
    assert second["blind_share"] == pytest.approx(0.1 / 0.4)
    assert history.add(some(0.9), some(0.85), 20)["shortcut"] == 1
    both = History(tmp_path / "two").add(some(0.9), some(0.5), 0, kinds=("blank", "shuffled"))
    assert both["visual_share"] == both["visual_share_shuffled"] and both["drop_shuffled_low"] > 0
    [(_, lines)] = [item for item in measured_panels(history.rows) if item[0].title == "Looking"]
    assert [line.label for line in lines] == ["own images", "blank images", "most frequent answers"]
    assert [bool(line.low) for line in lines] == [True, True, False]


def test_the_first_evaluation_with_a_readable_format_is_the_start(tmp_path):
    history = History(tmp_path)
    history.add(some(0.0), some(0.0), 0, form=0.2)
    assert "shortcut" not in history.add(some(0.8), some(0.8), 10, form=0.97)  # answers have become readable
    assert history.add(some(0.8), some(0.8), 20, form=0.5)["shortcut"] == 0
    asked = make_records(some(0.0))
    start, k = read_start(tmp_path, history.rows, "blank", asked)
    assert k == 2 and [len(records) for records in start] == [200, 200]
    assert start == [make_records(some(0.8), 0.97)] * 2
    history.rows[1]["eval/rewards/other_task/format"] = 0.9
    assert read_start(tmp_path, history.rows, "blank", asked) == ([], 0)
    assert read_start(tmp_path, history.rows, "blank", asked[:1]) == ([], 0)  # --eval-data has changed
    asked[3] = asked[3] | {"ground_truth": "other"}
    del history.rows[1]["eval/rewards/other_task/format"]
    assert read_start(tmp_path, history.rows, "blank", asked) == ([], 0)  # other questions with the same uids
    asked = make_records(some(0.0))
    assert read_start(tmp_path, history.rows, "blank", asked)[1] == 2
    (tmp_path / "eval" / "step_000010_blank.jsonl").unlink()
    assert read_start(tmp_path, history.rows, "blank", asked) == ([], 0)


def test_only_comparable_questions_with_images_can_give_a_warning(tmp_path):
    """Text-only rows that are learnt are no shortcut, and neither is knowledge that was there before the format."""
    def evaluation(text_right, blind, formatted):
        records, ablated = make_records(some(0.9)), make_records(blind)
        for record, ready in zip(ablated, formatted, strict=True):
            record["samples"][0]["rewards"]["format"] = float(ready)
        for group in (records, ablated):
            group += [r | {"uid": f"text{i}", "n_images": 0} for i, r in enumerate(make_records(text_right))]
        return records, {"blank": ablated}

    def add(history, step, *args):
        records, ablated = evaluation(*args)
        summary = summarise([r | {"groups": {}, "source": ""} for r in records])
        summary["reliance"] = visual_reliance(records, ablated, "accuracy")
        metrics = looking_metrics(history.out, history.rows, records, ablated, summary)
        report.log.RunLog.save_evaluation(history, step, records, summary, [], None, ablated)
        history.rows.append({"step": step, "eval/rewards/format": 1.0} | {f"eval/{k}": v for k, v in metrics.items()})
        return metrics

    text, ready = History(tmp_path / "text"), some(1)
    add(text, 0, some(0.1), some(0.3), ready)
    metrics = add(text, 10, some(1), some(0.35), ready)
    assert metrics["shortcut"] == 0 and metrics["own"] == 0.9 and metrics["blank"] == 0.35
    form = History(tmp_path / "form")
    add(form, 0, some(0.1), some(0.6), some(0.6))
    assert add(form, 10, some(0.1), some(1), ready)["shortcut"] == 0
    assert form.rows[-1]["eval/blank"] == 1.0


def test_a_task_without_accuracy_has_only_drops(tmp_path):
    records, blank = ([{"uid": "a", "samples": [{"rewards": {"reward": x}}]}] for x in (3.0, 1.0))
    summary = {"metric": "reward", "reward": 3.0, "reward_ci95": (2.0, 4.0), "reliance": {
        "constant": None, "own": {"reward": 3.0, "reward_ci95": (2.0, 4.0)},
        "blank": {"reward": 1.0, "reward_ci95": (0.0, 2.0), "drop": 2.0, "drop_ci95": (1.0, 3.0)}}}
    metrics = looking_metrics(tmp_path, [], records, {"blank": blank}, summary)
    assert set(metrics) == {f"{x}{end}" for x in ("own", "blank", "drop_blank") for end in ("", "_low", "_high")}


def test_the_warning_is_given_once_until_its_condition_ends():
    step = {"reward/zero_std_frac": 0.1}
    scores = {"eval/own": 0.8, "eval/blank": 0.6, "eval/prior": 0.3}
    verdicts = {0: None, 2: 0.0, 4: 1.0, 6: 1.0, 8: 0.0, 10: 2.0}
    evaluated = {i: {"eval/shortcut": verdict} | scores for i, verdict in verdicts.items() if verdict is not None}
    history = [{"step": i} | (step if i else {}) | evaluated.get(i, {}) for i in range(13)]
    for stop in (13, 5, 7):  # a resumed run reads its earlier rows
        warnings = RunWarnings(Path("o"))
        printed = [(row["step"], line) for row in history[:stop] for line in warnings.update(row)]
        if stop < 13:
            resumed = RunWarnings(Path("o"))
            [resumed.update(row) for row in history[:stop]]
            printed += [(row["step"], line) for row in history[stop:] for line in resumed.update(row)]
        assert [i for i, _ in printed] == [4, 10]
    assert "evaluation at step 4: the policy has learnt to answer without looking" in printed[0][1]
    assert "With white images of the same size its accuracy has risen to 0.60 (own images 0.80, chance 0.30)" in (
        printed[0][1]) and "o/eval/step_000004_blank.jsonl" in printed[0][1]
    repeated = RunWarnings(Path("o"))  # an evaluation repeated at a resume has only its own metrics
    assert repeated.update({"step": 4, "eval/shortcut": 1.0} | scores) and not repeated.update({"step": 5} | step)


# --- runs -------------------------------------------------------------------------------------------------------------

REWARD = """def score(response, example):
    return {"accuracy": len(response) % 2, "reward": len(response) * 7919 % 5}
"""


@pytest.fixture
def start(quick, tmp_path):  # noqa: F811
    """Return a function that trains with evaluations of blank and shuffled images."""
    test = write_parquet(tmp_path / "test.parquet", shapes_rows(6, "test", 0))
    (tmp_path / "graded.py").write_text(REWARD)
    graded = ("--reward", f"{tmp_path}/graded.py:score", "--eval-data", test, "--eval-every", 1)
    return lambda *extra, **kwargs: quick(*graded, "--eval-ablate", "blank", "shuffled", *extra, **kwargs)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_writes_metrics_and_files_and_resumes_to_the_same(start, monkeypatch, capsys):
    monkeypatch.setattr(report.log, "find_drawing", lambda name: None)  # drawing takes most of the time
    whole = start("--steps", 5, out="whole")
    ablated = [row["step"] for row in rows(whole) if "eval/blank" in row]
    assert ablated == [row["step"] for row in rows(whole) if "eval/shuffled" in row] == [0, 2, 4, 5]
    assert [row["step"] for row in rows(whole) if "eval/accuracy" in row] == [0, 1, 2, 3, 4, 5]
    for row in rows(whole):
        if "eval/blank" in row:
            own, blank, shuffled = (lines(whole / "eval" / f"step_{row['step']:06d}{end}.jsonl")
                                    for end in ("", "_blank", "_shuffled"))
            means = [np.mean([r["samples"][0]["rewards"]["accuracy"] for r in x]) for x in (own, blank, shuffled)]
            assert [row["eval/own"], row["eval/blank"], row["eval/shuffled"]] == pytest.approx(means)
            assert row["eval/own"] == row["eval/accuracy"]
            assert row["eval/drop_blank"] == pytest.approx(means[0] - means[1])
            assert row["eval/drop_blank_low"] <= row["eval/drop_blank"] <= row["eval/drop_blank_high"]
            assert ("eval/shortcut" in row) == (row["step"] > 0)
    assert "The accuracy, 0.000, is not significantly" in capsys.readouterr().out
    assert "Looking" in [panel.title for panel, _ in measured_panels(rows(whole))]
    start("--steps", 3, "--save-every", 3, out="parts")
    start("--steps", 5, "--resume", "auto", out="parts")
    parts = {row["step"]: row for row in without_time(whole.parent / "parts")}
    wanted = {row["step"]: row for row in without_time(whole)}
    assert {step: row for step, row in parts.items() if step != 3} == {
        step: row for step, row in wanted.items() if step != 3}  # step 3 was the last one, so it had ablations too
    files = {p.name for p in (whole / "eval").glob("*_blank.jsonl")}
    assert files == {f"step_00000{i}_blank.jsonl" for i in (0, 2, 4, 5)}


def test_mistakes_are_named_before_a_model_loads(quick, start, tmp_path, capsys):  # noqa: F811
    text = []
    for row in shapes_rows(4, "test", 0):
        prompt = [m | {"content": m["content"].replace("<image>", "")} for m in row["prompt"]]
        text.append(row | {"prompt": prompt, "images": []})
    with pytest.raises(ValueError, match="--eval-ablate needs --eval-data"):
        quick("--eval-ablate", "blank")
    with pytest.raises(ValueError, match="--eval-ablate: no example of .*text.parquet has an image"):
        start("--eval-data", write_parquet(tmp_path / "text.parquet", text))
    with pytest.raises(ValueError, match="--eval-ablate: with --env only white images.* use --eval-ablate blank"):
        start("--env", "look_closer", "--max-prompt-tokens", 900)
    assert "loading " not in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_get_the_same_metrics_as_one(start, toys, tmp_path):
    one = start("--steps", 2, "--lr", 1e-12, out="one")
    argv = json.loads((one / "run.json").read_text())["args"]
    command = ["train.py", "--config", one / "run.json", "--out", tmp_path / "two", "--reward", *argv["reward"]]
    run([*TORCHRUN, 2, *command])
    for a, b in zip(rows(one), rows(tmp_path / "two"), strict=True):
        for name in a:
            if name.startswith("eval/"):
                assert b[name] == pytest.approx(a[name]), name
    for path in (one / "eval").glob("*.jsonl"):
        assert [r["uid"] for r in lines(path)] == [r["uid"] for r in lines(tmp_path / "two" / "eval" / path.name)]
