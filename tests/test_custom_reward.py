"""Tests of user-defined rewards: how they are called, what they may return, and how failures are handled."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import complete
from test_train import TORCHRUN, flags, rows, run, write_parquet

ROOT = Path(__file__).resolve().parent.parent
import reward  # noqa: E402
from grpo import Algorithm  # noqa: E402
from reward import CurriculumStage, RewardConfig, RewardContext  # noqa: E402
from rewards import functions  # noqa: E402
from rewards.grade import Grader, grade, make_rollout_stub  # noqa: E402
from rollout import Rollout, assign_rewards  # noqa: E402

CODE = """
import functools, math
def number(response, example): return len(response)
def parts(response, example): return {"short": 1, "reward": 0.5}
def no_total(response, example): return {"short": 1}
def nan(response, example): return {"short": float("nan"), "reward": 1.0}
def inf(response, example): return math.inf
def text(response, example): return "1.0"
def nothing_returned(response, example): pass
def three(response, example, other): return 1.0
def three_with_default(response, example, other=2): return other
def swapped(responses, example): return [1.0] * len(responses)
def raises(response, example): return int(example.ground_truth) + int(response)
async def waits(response, example): return len(response)
async def waits_for_all(responses, examples): return [len(r) for r in responses]
def all_of_them(responses, examples): return [len(responses)] * len(examples)
def too_few(responses, examples): return [1.0]
def some(responses, examples): return [1.0 if r != "bad" else math.nan for r in responses]
def with_context(response, example, stage, finish_reason, step):
    cut = finish_reason == "length"
    return {"step": step, "number": stage.number, "cut": cut, "reward": stage.options.get("x", -1)}
def batch_with_context(responses, examples, step, finish_reasons, stage):
    return [with_context(r, e, stage, f, step) for r, e, f in zip(responses, examples, finish_reasons)]
def any_context(response, example, **context): return {**{k: len(str(v)) for k, v in context.items()}, "reward": 1}
def by_image(response, example): return {"images": [len(response), 1.0][:len(response)]}
def by_image_total(response, example): return {"images": [1, 2], "reward": 7, "x": 1}
class Callable:
    async def __call__(self, response, example, step): return step
    def method(self, response, example): return 2.0
as_object, as_method = Callable(), Callable().method
part_of = functools.partial(three, other=1)
def blind(response, example): return 0.5
def swapped_truth(response, example): return float(example.ground_truth == "nothing" in response)
def form(response, example): return {"format": 1, "reward": float(response.startswith("<think>"))}
def fragile(response, example): return float(response.split("boxed{")[1] == "0")
def contains(response, example): return float(str(example.ground_truth) in response)
def word(response, example): return float(example.ground_truth in response.split())
def exact(response, example): return float(response == example.ground_truth)
def tagged(response, example): return float(f"<answer>{example.ground_truth}</answer>" in response)
def last_line(response, example): return float(response.splitlines()[0] == f"Answer: {example.ground_truth}")
def penalty(responses, examples): return [-float(e.ground_truth not in r) for r, e in zip(responses, examples)]
def by_stage(response, example, stage): return float(example.ground_truth in response)
async def awaited(response, example): return float(example.ground_truth in response)
async def blindly(response, example): return 1.0
value = 3
"""


def row(uid="row-7", source="mine", truth="3", images=()):
    return SimpleNamespace(data_source=source, ground_truth=truth, extra={}, uid=uid, images=list(images))


@pytest.fixture
def load(tmp_path):
    """Return load("mine=parts", "number", reward_workers=1), which returns a Grader, by default without workers."""
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    graders = []

    def make_grader(*specs, **options):
        paths = [re.sub(r"(\w+)$", rf"{path}:\1", spec) for spec in specs]
        graders.append(Grader(RewardConfig(reward=tuple(paths), **{"reward_workers": 0} | options)))
        return graders[-1]

    make_grader.path = path
    yield make_grader
    for grader in graders:
        grader.close()


def grade_texts(grader, *texts, example=None, **context):
    context = RewardContext(**context)
    return grader.collect([make_rollout_stub(example or row(), text, context=context) for text in texts])


# --- how they are called ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, expected",
    [
        ("number", [3, 0]), ("waits", [3, 0]), ("waits_for_all", [3, 0]), ("all_of_them", [2, 2]),
        ("three_with_default", [2, 2]), ("as_object", [5, 5]), ("as_method", [2, 2]), ("part_of", [1, 1]),
    ],
)
@pytest.mark.parametrize("count", [0, 1])
def test_functions_of_all_kinds(load, name, expected, count):
    assert grade_texts(load(name, reward_workers=count), "abc", "", step=5) == [{"reward": float(n)} for n in expected]


@pytest.mark.parametrize("name", ["with_context", "batch_with_context"])
def test_a_function_gets_the_arguments_that_it_names(load, name):
    """Of the options of a curriculum stage, it gets those of its own task."""
    context = RewardContext(step=4, stage=CurriculumStage("second", 1, {"a": {"x": 10}, "b": {"x": 20}}))
    cases = (("a", "stop"), ("me/B", "length"), ("c", "stop"))
    rewards = load(name).collect([make_rollout_stub(row(source=s), "abc", f, context) for s, f in cases])
    assert [r["reward"] for r in rewards] == [10, 20, -1] and [r["cut"] for r in rewards] == [0, 1, 0]
    assert {(r["step"], r["number"]) for r in rewards} == {(4, 1)}


def test_keyword_arguments_get_everything(load):
    assert grade_texts(load("any_context"), "a", step=1234)[0].keys() == {"finish_reason", "step", "stage", "reward"}


@complete
def test_tasks_have_their_own_functions_or_built_in_ones(load):
    grader = load("parts", "geo3k=number", "Some/Go=all_of_them")
    sources = ["chess", "hiyouga/geometry3k", "go", "go"]
    rewards = grader.collect([make_rollout_stub(row(source=s), "ab") for s in sources])
    assert [r["reward"] for r in rewards] == [0.5, 2, 2, 2]
    mixed = load("mine=number")
    examples = [row(source="mine"), row(source="geo3k"), row("c", "shapes", "red")]
    examples[2].extra["answer_type"] = "colour"
    assert mixed.check_examples(examples) == {"mine": 1, "geo3k": 1, "shapes": 1}
    rewards = mixed.collect([make_rollout_stub(e, f"\\boxed{{{e.ground_truth}}}") for e in examples])
    assert [r["reward"] for r in rewards] == [9, 0.9, 1]
    with pytest.raises(reward.UserError, match="no reward for data_source 'chess'"):
        mixed.check_examples([row(source="chess")])
    with pytest.raises(reward.UserError, match="does not earn full marks"):
        mixed.check_examples([row(source="geo3k", truth="")])
    # the built-in check does not apply to a user's function
    assert load("geo3k=number").check_examples([row(source="geo3k", truth="")]) == {"geo3k": 1}


def test_a_path_may_contain_an_equals_sign(load, tmp_path):
    folder = tmp_path / "a=b"
    folder.mkdir()
    (folder / "mine.py").write_text(CODE)
    assert functions.split_spec(f"{folder}/mine.py:number") == ("", f"{folder}/mine.py:number")
    assert functions.split_spec(f"geo3k={folder}/mine.py:number") == ("geo3k", f"{folder}/mine.py:number")


def test_paths_are_made_absolute(load, monkeypatch):
    monkeypatch.chdir(load.path.parent)
    assert functions.absolute_spec("geo3k=mine.py:number") == f"geo3k={load.path}:number"
    assert functions.absolute_spec("mine.py:number") == f"{load.path}:number"
    assert functions.absolute_spec("geo3k=other.py:number") == "geo3k=other.py:number"
    assert functions.absolute_judge_option("template=mine.py") == f"template={load.path}"
    assert [functions.absolute_judge_option(pair) for pair in ("template=x.txt", "model=a")] == [
        "template=x.txt",
        "model=a",
    ]


# --- invalid functions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "specs, message",
    [
        (["mine.py"], "FILE.py:FUNCTION"),
        (["mine:number"], "FILE.py:FUNCTION"),
        (["{dir}/other.py:number"], "there is no file.*other.py"),
        (["geo3k={dir}/other.py:number"], "there is no file.*other.py"),
        (["{dir}/mine.py:nothing"], "nothing does not exist.*number, parts"),
        (["{dir}/mine.py:value"], "value is not a function"),
        (["{dir}/mine.py:three"], r"three must take .response, example. or .responses, examples., .*'other'"),
        (["{dir}/mine.py:number", "{dir}/mine.py:parts"], "for all tasks, after .*mine.py:number; drop one"),
        pytest.param(
            ["geo3k={dir}/mine.py:number", "geometry3k={dir}/mine.py:parts"], "a second one for the task 'geo3k'",
            marks=complete,
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_once(load, specs, message):
    with pytest.raises(reward.UserError, match=message):
        Grader(RewardConfig(reward=tuple(spec.format(dir=load.path.parent) for spec in specs)))


@pytest.mark.parametrize("text, message", [("def score(response)\n", "SyntaxError"), ("import nowhere", "nowhere")])
def test_a_file_that_cannot_be_imported_is_refused_with_the_users_frames_alone(text, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(reward.UserError, match=f"(?s)--reward '.*mine.py:score': importing .*{message}") as caught:
        functions.load_reward_function(f"{tmp_path / 'mine.py'}:score")
    assert "functions.py" not in str(caught.value) and str(caught.value).count("mine.py") > 1


def test_settings_of_a_judge_need_a_judge():
    with pytest.raises(reward.UserError, match="--judge needs --judge-url"):
        Grader(RewardConfig(judge=("weight=0.5",)))


@pytest.mark.parametrize("count", [0, 1])
def test_each_function_is_tried_once_with_a_row_of_its_task(load, count):
    grader = load("number", "chess=raises", reward_workers=count)
    grader.check_examples([row("a", "go"), row("b", "chess", "four"), row("c", "chess", "5")])
    with pytest.raises(Exception, match="invalid literal for int") as caught:
        grader.dry_run()
    assert caught.value.__notes__[-1] == "this was the trial call before the run" and not grader.counts
    assert "'b'" in str(caught.value) + str(caught.value.__notes__) and grader.dry_run(main=False) is None
    for name, message in (("nan", "row 'b'.*is nan"), ("no_total", "row 'b'.*add a total"), ("text", "'1.0' .str"),
                          ("nothing_returned", "is None"), ("too_few", "a list of 1 for 2 responses; return one for"),
                          ("inf", "is inf")):
        grader = load(f"chess={name}", reward_workers=count)
        grader.check_examples([row("b", "chess")])
        with pytest.raises(reward.UserError, match=message):
            grader.dry_run()


BLIND = ("blind", "swapped_truth", "form", "fragile", "blindly", "number")
SEEING = ("contains", "word", "exact", "tagged", "last_line", "penalty", "by_stage", "awaited")


@pytest.mark.parametrize("name", BLIND + SEEING)
def test_a_function_that_does_not_tell_right_from_wrong_is_warned_of(name, load, capfd):
    """By the truths of two rows. A reward of the form or the length is no error."""
    grader = load(name, reward_workers=0)
    grader.check_examples([row("a", truth="3"), row("b", truth="3"), row("c", truth="7")])
    grader.dry_run()
    error = capfd.readouterr().err
    assert not grader.counts and "failure" not in error
    assert error.count("\n") == (name in BLIND)
    if name in BLIND:
        assert f":{name} gives " in error and "warning: --reward" in error
        assert "to the truth of row 'a', '3', and to the wrong answer '7', in each form" in error


@pytest.mark.parametrize("truth, warned", [
    ("3", True), ("yes", True), ("", False), (None, False), ('{"lat": 1}', False), ("[1, 2]", False),
])  # fmt: skip
def test_right_is_compared_with_wrong_for_plain_truths_only(truth, warned, load, capfd):
    """With a single truth the wrong answer is a question mark."""
    grader = load("blind", reward_workers=0)
    grader.check_examples([row("a", truth=truth), row("b", truth=truth)])
    grader.dry_run()
    assert ("and to the wrong answer '?'" in capfd.readouterr().err) == warned


def test_a_function_for_a_task_that_no_row_has_is_an_error(load):
    grader = load("go=number", "number")
    grader.check_examples([row(source="chess"), row(source="geo3k")])
    with pytest.raises(reward.UserError, match="--reward go=.*: no row has the task 'go'; tasks in the data: chess, g"):
        grader.dry_run()
    grader.check_examples([row(source="go")])
    grader.dry_run()


# --- what they may return --------------------------------------------------------------------------------------------


def test_a_function_may_return_a_number_for_each_image(load):
    example = row(images=[b"1", b"2"])
    assert grade_texts(load("by_image"), "abc", example=example) == [{"image_1": 3.0, "image_2": 1.0, "reward": 2.0}]
    total = {"image_1": 1.0, "image_2": 2.0, "reward": 7.0, "x": 1.0}
    assert grade_texts(load("by_image_total"), "abc", example=example) == [total]
    with pytest.raises(reward.UserError, match="row 'row-7': the reward returned 1 numbers under 'images' for 2 imag"):
        grade_texts(load("by_image", reward_errors="stop"), "a", example=example)
    with pytest.raises(reward.UserError, match="add a total"):
        grade_texts(load("by_image", reward_errors="stop"), "", example=row())


@pytest.mark.parametrize("count", [0, 1])
def test_a_bad_number_fails_one_response_and_a_wrong_length_the_whole_batch(load, capfd, count):
    grader = load("some", reward_workers=count)
    assert grade_texts(grader, "a", "bad", "b") == [{"reward": 1.0}, None, {"reward": 1.0}]
    assert grader.counts == {"reward/errors": 1}
    with pytest.raises(reward.UserError, match="row 'row-7' and others: it returned a list of 1 for 3 resp"):
        grade_texts(load("too_few", reward_workers=count, reward_errors="stop"), "a", "b", "c")
    capfd.readouterr()
    assert grade_texts(load("too_few", reward_workers=count), "a", "b") == [None, None]
    assert "2 of 2 rewards failed (2 invalid)" in capfd.readouterr().err
    assert grade_texts(load("swapped"), "a", "b") == [{"reward": 1.0}] * 2


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1])
def test_failures_are_counted_reported_and_handled_as_configured(load, capfd, count):
    texts = ["1", "x", "2", "y", "z"]
    for errors, replacement in (("drop", None), ("zero", {"reward": 0.0})):
        grader = load("raises", reward_errors=errors, reward_workers=count)
        for step in (0, 1):
            got = grade_texts(grader, *texts, step=step)
            assert got == [{"reward": 4.0}, replacement, {"reward": 5.0}, replacement, replacement]
            assert grader.pop_counts() == {"reward/errors": 3}
            stderr = capfd.readouterr().err
            line = "3 of 5 rewards failed (3 ValueError), for example row 'row-7': the reward raised ValueError: "
            assert stderr.count(line) == 1
            details = [stderr.count(text) for text in ("Traceback", "mine.py", "; for the response 'x'\n")]
            assert details == [int(step == 0)] * 3
            grade_texts(grader, *texts, step=step)  # a second batch of the same step
            grader.counts.clear()
            assert capfd.readouterr().err == ""
    with pytest.raises(Exception, match="invalid literal for int.*'x'") as caught:
        grade_texts(load("raises", reward_errors="stop", reward_workers=count), *texts)
    if count == 0:  # without workers, the original error, for a debugger
        assert type(caught.value) is ValueError and caught.traceback[-1].path == load.path
        assert caught.value.__notes__ == ["raised by the reward of row 'row-7' for the response 'x'"]
    else:
        assert 'mine.py", line ' in str(caught.value) and "row 'row-7'" in str(caught.value)


def test_if_all_rewards_of_a_batch_fail_there_is_a_loud_warning(load, capfd):
    assert grade_texts(load("raises"), "x", "y") == [None, None]
    assert "warning: ALL of them failed: nothing can be learnt from these responses" in capfd.readouterr().err


def test_built_in_rewards_fail_in_the_same_way(load, monkeypatch):
    monkeypatch.setattr(reward, "TASKS", dict(reward.TASKS))

    @reward.register("fragile")
    def fragile(response, example, step):
        return 1 / (len(response) - 1)

    assert grade_texts(load(), "a", "abc", example=row(source="fragile")) == [None, {"reward": 0.5}]
    with pytest.raises(ZeroDivisionError):
        grade("a", row(source="fragile"))


def test_a_dropped_response_counts_for_nothing():
    def assign(results, **algo):
        algo = Algorithm(**{"group_size": 4} | algo)
        rollouts = [Rollout(None, i % 4, [1] * 20, [True] * 20, [0.0] * 20, "stop", "") for i in range(len(results))]
        assign_rewards(rollouts, results, algo, 20)
        return rollouts, [algo.counts_in_loss(r.finish_reason) for r in rollouts]

    results = [{"reward": 1.0, "x": 1.0}, None, {"reward": 0.25, "x": 0.0}, {"reward": 0.1, "x": 0.0}, *[None] * 4,
               *[{"reward": 0.1}] * 3, None]
    rollouts, counts = assign(results)
    assert [r.reward for r in rollouts if r.rewards] == [1.0, 0.25, 0.1, 0.1, 0.1, 0.1]
    assert [math.isnan(r.reward) for r in rollouts] == [r is None for r in results] and rollouts[1].rewards == {}
    assert counts == [r is not None for r in results]
    assert [r.finish_reason == "error" for r in rollouts] == [r is None for r in results]
    rollouts, counts = assign(results, truncated="penalise")
    assert [r.task_reward for r in rollouts[:4] if r.rewards] == [1.0, 0.25, 0.1]
    assert [r.reward for r in rollouts[:4] if r.rewards] == [0.0, -0.75, -0.9] and rollouts[1].rewards == {}


# --- a judge ---------------------------------------------------------------------------------------------------------

STAND_IN = '''
import asyncio
from collections import Counter
from dataclasses import dataclass

class JudgeError(Exception): pass

@dataclass(frozen=True)
class JudgeOptions:
    model: str = ""
    tasks: tuple = ()
    weight: float = 1.0
    calls: int = 0

def judge_options(pairs):
    values = dict(pair.split("=") for pair in pairs)
    return JudgeOptions("", tuple(filter(None, values.get("tasks", "").split(","))),
                        float(values.get("weight", 1)), int(values.get("calls", 0)))

def resolve_model_name(url, options): return options

class Judge:
    def __init__(self, url, options, cache, world):
        self.counts = Counter(calls=0, failed=0)
        self.arguments = (url, options.calls, str(cache), world)

    async def score(self, response, example):
        self.counts["calls"] += 1
        await asyncio.sleep(0.01)
        if "bad" in response:
            self.counts["failed"] += 1
            raise JudgeError(f"no score: {self.arguments}")
        return len(response) / 10
'''


@pytest.mark.parametrize("count", [0, 1])
def test_a_judge_adds_its_score(load, tmp_path, monkeypatch, capfd, count):
    (tmp_path / "stand_in_judge.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    import stand_in_judge

    monkeypatch.setitem(sys.modules, "rewards.judge", stand_in_judge)

    def make_grader(*options, world=1):
        cfg = RewardConfig(reward=(f"mine={load.path}:parts",), judge_url="http://x", judge=options,
                           reward_workers=count)
        return Grader(cfg, tmp_path / "out", 0, world)

    grader = make_grader("weight=0.25", "tasks=mine,poem", "calls=5", world=2)
    data = [row(source="mine"), row(source="poem"), row(source="geo3k")]
    assert grader.check_examples(data) == {"mine": 1, "poem": 1, "geo3k": 1}
    grader.dry_run()
    rollouts = [make_rollout_stub(e, text) for e in data for text in ("\\boxed{3}", "bad")]
    got = grader.collect(rollouts)
    built_in = {"accuracy": 1.0, "format": 0.0, "reward": 0.9}
    assert got[0] == {"short": 1.0, "judge": 0.9, "reward": pytest.approx(0.75 * 0.5 + 0.25 * 0.9)}
    assert got[2] == {"judge": 0.9, "reward": 0.9} and got[4] == built_in and got[5]["reward"] == 0.0
    assert got[1] is None and got[3] is None  # the judge failed
    counts = {name: n for name, n in grader.counts.items() if "/" in name}
    assert counts == {"judge/calls": 4, "judge/failed": 2, "reward/errors": 2}
    message = f"no score: ('http://x', 5, '{tmp_path}/out/judge/rank_0.jsonl', 2)"
    assert message in capfd.readouterr().err
    grader.collect(rollouts[:1])
    assert grader.counts["judge/calls"] == 5
    grader.close()
    grader = make_grader()
    assert grader.collect(rollouts[:1])[0] == {"short": 1.0, "judge": 0.9, "reward": 0.9}
    with pytest.raises(reward.UserError, match="calls=1 is less than one call for each of"):
        make_grader("calls=1", world=2)
    with pytest.raises(reward.UserError, match="no reward for data_source 'chess'"):
        make_grader("tasks=poem").check_examples([row(source="chess")])
    grader.close()


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_continues_if_rewards_fail_or_hang_on_two_ranks(toys, tmp_path):
    """Failures depend on the response's text, so both ranks have some; the counts are sums over the ranks."""
    from tasks.shapes import shapes_rows

    data = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0))
    (tmp_path / "fails.py").write_text(
        "import os, time\n"
        "def score(response, example, step):\n"
        "    kind = sum(map(ord, response)) % 8\n"
        "    if step == 1: raise RuntimeError('all of them')\n"
        "    if kind == 0: raise ValueError(response)\n"
        "    if kind == 1 and example.uid.endswith('1'): time.sleep(100)\n"
        "    if kind == 2: return float('nan')\n"
        "    return kind / 8\n"
    )
    out = tmp_path / "out"
    more_flags = ["--reward", f"shapes={tmp_path}/fails.py:score", "--reward-timeout", 3, "--reward-workers", 2,
                  "--steps", 3, "--prompts-per-step", 4, "--group-size", 6, "--eval-data", data, "--no-self-test"]
    common = flags(toys["qwen2_5_vl"], data, out)
    done = run([*TORCHRUN, 2, "train.py", *common[:6], *common[8:], *more_flags])
    logged = rows(out)
    steps = [row for row in logged if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert steps[1]["reward/errors"] == 24 and "reward/mean" not in steps[1]
    assert steps[1]["update/steps"] == steps[1]["sync/bytes"] == 0 < steps[0]["sync/bytes"]  # no update, no weight sync
    assert steps[0]["reward/errors"] > 0 and steps[0]["reward/errors"] + steps[0]["reward/timeouts"] < 24
    assert steps[0]["update/steps"] == 1 and 0 < steps[0]["reward/mean"] < 1
    output = done.stdout + done.stderr
    assert "ALL of them failed" in output and "RuntimeError" in output and "rank 1: " in output
    evaluated = json.loads(next((out / "eval").glob("step_000003.json")).read_text())
    assert evaluated["failed"] > 0 and "failed rewards, counted as 0" in output


@pytest.mark.parametrize("errors", ["drop", "zero"])
def test_a_first_step_whose_rewards_all_fail_ends_the_run(errors, toys, tmp_path):
    """The function passes the trial call."""
    from tasks.shapes import shapes_rows

    data = write_parquet(tmp_path / "train.parquet", shapes_rows(4, "train", 0))
    (tmp_path / "fails.py").write_text(
        "def score(response, example):\n"
        "    if 'A trial' not in response: raise KeyError('text')\n"
        "    return 1.0\n"
    )
    more_flags = ["--reward", f"{tmp_path}/fails.py:score", "--reward-errors", errors, "--steps", 2, "--no-self-test"]
    done = run(
        [sys.executable, "train.py", *flags(toys["qwen2_5_vl"], data, tmp_path / "out", *more_flags)], check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "error: all responses of the first batch failed, such as row " in last, done.stderr
    assert "the reward raised KeyError: 'text'" in last and not (tmp_path / "out" / "checkpoints").exists()


# --- docs/rewards.md -------------------------------------------------------------------------------------------------


def test_the_examples_in_the_docs_work(tmp_path):
    """The Python blocks of docs/rewards.md run, and the flags and defaults that it names are right."""
    page = (ROOT / "docs" / "rewards.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_rewards.py").write_text("\n\n".join(blocks))
    names = re.findall(r"^(?:async )?def (\w+)\(response", "\n".join(blocks), re.MULTILINE)
    assert len(names) >= 4 and len(set(names)) == len(names)
    from PIL import Image

    example = row(truth="red")
    example.pil_images = [Image.new("RGB", (8, 8), "red")]
    for name in names:
        grader = Grader(RewardConfig(reward=(f"{tmp_path}/my_rewards.py:{name}",), reward_errors="stop"))
        grader.check_examples([example])
        grader.dry_run()
        good, bad = grade_texts(grader, "<think>a</think> \\boxed{red}", "blue" * 1000, example=example, step=0)
        assert good["reward"] > bad["reward"], name
        grader.close()
    for flag in re.findall(r"`(--reward[a-z-]*|--judge[a-z-]*)", page):
        assert flag.lstrip("-").replace("-", "_") in RewardConfig.__dataclass_fields__
    defaults = dict(re.findall(r"`--(reward-\w+)`[^`]*\(default (\d+)[;)]", page))
    assert defaults == {"reward-workers": f"{RewardConfig().reward_workers}",
                        "reward-timeout": f"{RewardConfig().reward_timeout:g}"}
