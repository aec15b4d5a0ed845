"""Curriculum stages: the choice and order of examples, and the context of rewards.   pytest tests/test_curriculum.py"""

import json
import math
import random
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from test_train import flags, kill_after, rows, run, without_time, write_parquet

from errors import UserError
from prepare_data import Example
from reward import CurriculumStage, RewardConfig, RewardContext
from rewards.curriculum import read_stages, split_proportionally
from rewards.grade import Grader, make_rollout_stub
from rewards.order import load_last_stage, make_order, shuffled_batch
from tasks import geospot


def make_examples(n=40):
    """Return examples that alternate between two tasks, with a difficulty and an answer type."""
    result = []
    for i in range(n):
        extra = {"difficulty": (i * 7) % 10, "answer_type": "count" if i % 4 < 2 else "colour"}
        result.append(Example(f"u{i}", ("shapes", "hiyouga/geometry3k")[i % 2], [], [], "1", extra))
    return result


def make_curriculum(tmp_path, *stages, per_step=4, n=40, seed=0):
    file = tmp_path / "stages.json"
    file.write_text(json.dumps({"stages": list(stages)}))
    return make_order(str(file), make_examples(n), per_step, seed)


def uids(batch):
    return [example.uid for example in batch]


def test_without_a_file_batches_are_shuffled_and_rewards_get_no_stage(capsys):
    dataset = make_examples()
    plain = make_order(None, dataset, 4, seed=3)
    for step in range(25):
        assert uids(plain.select_batch(step, step, 0, {})) == [f"u{i}" for i in shuffled_batch(step, 40, 4, seed=3)]
    assert plain.current_stage(0) == load_last_stage(None, [])[1] == CurriculumStage() and plain.metrics(0, {}) == {}
    assert capsys.readouterr().out == ""
    assert plain.after_step({}, 0, 1, {"u1": 1.0}) == {}


def test_stages_filter_examples_and_depend_only_on_the_step(tmp_path, capsys):
    easy = {"name": "easy", "from": 0, "where": {"answer_type": "count", "difficulty": {"least": 2, "most": 5}}}
    task = {"name": "geo", "from": 10, "where": {"data_source": ["geo3k"]}, "reward": {"geo3k": {"strict": True}}}
    curriculum = make_curriculum(tmp_path, easy, task, {"from": 20})
    batches = {step: curriculum.select_batch(step, step, 0, {}) for step in range(30)}
    matching = {e.uid for e in make_examples() if e.extra["answer_type"] == "count" and 2 <= e.extra["difficulty"] <= 5}
    assert {e.uid for step in range(10) for e in batches[step]} == matching and len(matching) == 8
    assert {e.data_source for step in range(10, 20) for e in batches[step]} == {"hiyouga/geometry3k"}
    assert len({e.uid for step in range(20, 30) for e in batches[step]}) > 30
    resumed = make_curriculum(tmp_path, easy, task, {"from": 20})  # as after --resume
    for step in random.Random(0).sample(range(30), 30):
        assert uids(resumed.select_batch(step, step, 0, {})) == uids(batches[step])
    assert [curriculum.stage_index(step) for step in (0, 9, 10, 19, 20, 99)] == [0, 0, 1, 1, 2, 2]
    assert curriculum.current_stage(0) == CurriculumStage("easy", 0, {}) and (
        curriculum.current_stage(12) == CurriculumStage("geo", 1, {"geo3k": {"strict": True}})
    )
    output = capsys.readouterr().out
    assert output.count("\n") == 2 and "after 0 steps stage 1 of 3, easy: 8 of 40" in output
    curriculum.current_stage(13)
    assert capsys.readouterr().out == "" and curriculum.current_stage(10**6) == CurriculumStage("", 2, {})
    assert curriculum.metrics(12, {}) == {"curriculum/stage": 1.0}


def test_an_epoch_of_a_stage_has_each_of_its_examples_once(tmp_path):
    curriculum = make_curriculum(tmp_path, {"from": 0, "where": {"data_source": "shapes"}})
    for epoch in range(3):
        batches = [uids(curriculum.select_batch(step, step, 0, {})) for step in range(5 * epoch, 5 * epoch + 5)]
        assert len(set(chain(*batches))) == 20 == sum(map(len, batches))


@pytest.mark.parametrize(("shares", "n"), [({"shapes": 3, "geo3k": 1}, (6, 2)), ({"shapes": 1, "geo3k": 1}, (4, 4))])
def test_a_mix_holds_in_each_batch(tmp_path, shares, n):
    curriculum = make_curriculum(tmp_path, {"from": 0, "mix": shares}, per_step=8)
    for step in range(20):
        count = Counter(e.data_source for e in curriculum.select_batch(step, step, 0, {}))
        assert (count["shapes"], count["hiyouga/geometry3k"]) == n


def test_shares_are_integers_and_add_up():
    for total in range(1, 50):
        for weights in ([1, 1, 1], [0.2, 0.5, 0.3], [5, 1], [1e-6, 1]):
            parts = split_proportionally(total, dict(enumerate(weights)))
            assert sum(parts.values()) == total
            exact = [total * w / sum(weights) for w in weights]
            assert all(abs(a - b) < 1 for a, b in zip(parts.values(), exact, strict=True))


def test_solved_examples_are_left_out_and_least_tried_ones_come_first(tmp_path):
    curriculum = make_curriculum(tmp_path, {"from": 0, "solved": {"least": 0.1, "most": 0.9}})
    state = {}
    accuracies = {f"u{i}": (0.0, 0.5, 1.0)[i % 3] for i in range(40)}
    tries = Counter()
    for step in range(40):
        batch = uids(curriculum.select_batch(step, step, 0, state))
        assert len(set(batch)) == 4
        tries.update(batch)
        state = curriculum.after_step(state, step, step + 1, {uid: accuracies[uid] for uid in batch})
        state = json.loads(json.dumps(state))  # as in a checkpoint
    learnable = {uid for uid, rate in accuracies.items() if rate == 0.5}
    assert {uid for uid in accuracies if tries[uid] == 1} == set(accuracies) - learnable  # tried once, then known
    assert max(tries[uid] for uid in learnable) - min(tries[uid] for uid in learnable) <= 1
    assert curriculum.metrics(0, state) == {"curriculum/stage": 0, "curriculum/tried": 40, "curriculum/solved": 0.4875}


def test_if_too_few_are_left_those_nearest_to_the_bounds_fill_the_batch(tmp_path):
    curriculum = make_curriculum(tmp_path, {"from": 0, "solved": {"most": 0.5}}, n=8)
    rates = {f"u{i}": [0.3 + 0.1 * i, 1] for i in range(8)}
    assert set(uids(curriculum.select_batch(0, 0, 0, {"rates": rates}))) == {"u0", "u1", "u2", "u3"}  # u3 has 0.6


def test_a_running_solve_rate_starts_as_a_mean_and_later_forgets(tmp_path):
    curriculum = make_curriculum(tmp_path, {"from": 0, "solved": {"most": 1}})
    state = {}
    for accuracy in (1.0, 0.0, 0.5):
        state = curriculum.after_step(state, 0, 1, {"u1": accuracy})
    assert state["rates"]["u1"] == [pytest.approx(0.5), 3]
    for _ in range(20):
        state = curriculum.after_step(state, 0, 1, {"u1": 1.0})
    assert state["rates"]["u1"][0] > 0.99 and state["rates"]["u1"][1] == 23


@pytest.mark.parametrize("stage", [{"solved": {"most": 0.9}}, {}])
def test_batches_of_a_step_are_disjoint(tmp_path, stage):
    curriculum = make_curriculum(tmp_path, {"from": 0}, {"from": 3, **stage})
    rates = {f"u{i}": [i / 40, 1] for i in range(40)}
    state, position = {"rates": rates}, 0
    for step, n_batches in enumerate((2, 1, 4, 3)):  # dynamic sampling: the position runs ahead of the step
        drawn = list(
            chain.from_iterable(
                uids(curriculum.select_batch(step, position, index, state)) for index in range(n_batches)
            )
        )
        assert len(set(drawn)) == len(drawn) == 4 * n_batches or step < 3
        position += n_batches
        state = curriculum.after_step(state, step, position, {}) | {"rates": rates}


def test_toml_and_json_files_are_equivalent(tmp_path):
    toml = Path(tmp_path / "a.toml")
    toml.write_text('''[[stages]]
name = "easy"
from = 0
where.difficulty = { most = 3 }
mix = { shapes = 1, geo3k = 3 }
reward.geo3k = { strict = true }
[[stages]]
from = 7
''')
    stages = [
        {"name": "easy", "from": 0, "where": {"difficulty": {"most": 3}}, "mix": {"shapes": 1, "geo3k": 3}},
        {"from": 7},
    ]
    stages[0]["reward"] = {"geo3k": {"strict": True}}
    Path(tmp_path / "a.json").write_text(json.dumps({"stages": stages}))
    assert read_stages(str(toml)) == read_stages(str(tmp_path / "a.json"))


WRONG = {
    "no list": ({"stage": []}, "expected a list `stages`"),
    "empty": ({"stages": []}, "expected a list `stages`"),
    "not 0": ({"stages": [{"from": 5}]}, r"begin at steps \[5\]"),
    "twice": ({"stages": [{"from": 0}, {"from": 3}, {"from": 3}]}, r"steps \[0, 3, 3\]"),
    "no from": ({"stages": [{"name": "x"}]}, "give a table with `from`"),
    "unknown": ({"stages": [{"from": 0, "wher": {}}]}, "stage 1 has unknown keys: wher; known: name, from, where"),
    "bounds": ({"stages": [{"from": 0, "where": {"difficulty": {"min": 3}}}]}, "`least` and `most`"),
    "solved": ({"stages": [{"from": 0, "solved": {"most": "high"}}]}, "`least` and `most`"),
    "share": ({"stages": [{"from": 0, "mix": {"shapes": 0}}]}, "a share above 0"),
    "options": ({"stages": [{"from": 0, "reward": {"shapes": 3}}]}, "a table of options"),
    "column": ({"stages": [{"from": 0, "where": {"level": 3}}]}, "no example has a column 'level'"),
    "few": ({"stages": [{"from": 0, "where": {"difficulty": 99}}]}, "has 0 examples, but a batch needs 4"),
    "percent": ({"stages": [{"from": 0, "solved": {"least": 10, "most": 90}}]}, "shares from 0 to 1"),
    "turned": ({"stages": [{"from": 0, "solved": {"least": 0.9, "most": 0.1}}]}, "least below most"),
    "kind": ({"stages": [{"from": True}]}, "from is True, expected type int"),
    "infinite": ({"stages": [{"from": 0, "mix": {"shapes": math.inf}}]}, "a share above 0"),
    "no task": ({"stages": [{"from": 0, "mix": {"vqa": 1}}]}, "has 0 examples of task vqa"),
    "no row": ({"stages": [{"from": 0, "reward": {"vqa": {}}}]}, "reward of 'vqa', but no example has this task"),
    "small": ({"stages": [{"from": 0, "mix": {"shapes": 100, "geo3k": 1}}]}, "leaves no example of task geo3k"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_stage_is_refused(name, tmp_path):
    content, message = WRONG[name]
    file = tmp_path / "stages.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        make_order(str(file), make_examples(), 4, seed=0)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for name, text in (("a.toml", "[[stages"), ("a.json", "{"), ("a.json", "[" * 100_000)):
        Path(tmp_path / name).write_text(text)
        with pytest.raises(UserError, match="neither TOML nor JSON"):
            make_order(str(tmp_path / name), make_examples(), 4, seed=0)
    with pytest.raises(UserError, match="--curriculum .*none.toml"):
        make_order(str(tmp_path / "none.toml"), make_examples(), 4, seed=0)


STAGED = '''
def score(response, example, step, stage):
    """A different number for each response, and in each stage."""
    assert stage.options["number"] == stage.number == min(4, step // 2)
    return (len(response) * 7919 + sum(map(ord, example.uid))) % (5 + stage.number) / 4
'''


BY_SOLVE_RATE = pytest.param({"least": 0.05, "most": 0.95}, id="by solve rate", marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("solved", [pytest.param({}, id="by step"), BY_SOLVE_RATE])
def test_a_run_killed_in_a_stage_and_resumed_equals_an_uninterrupted_run(solved, toys, tmp_path):
    data = write_parquet(tmp_path / "train.parquet", geospot.toy(24, "train", 0))
    (tmp_path / "staged.py").write_text(STAGED)
    stages = []
    for number, stage in enumerate(geospot.CURRICULUM):
        options = {**stage["reward"]["geospot"], "number": number}
        stages.append({"name": stage["name"], "from": 2 * number, "solved": solved, "reward": {"geospot": options}})
    (tmp_path / "stages.json").write_text(json.dumps({"stages": stages}))
    extra = ["--steps", 10, "--save-every", 1, "--keep", 2, "--curriculum", tmp_path / "stages.json"]
    extra += ["--reward", f"geospot={tmp_path / 'staged.py'}:score", "--no-self-test"]
    command = {}
    for name in ("whole", "cut"):
        command[name] = [sys.executable, "train.py", *flags(toys["qwen2_5_vl"], data, tmp_path / name, *extra)]
    whole = run(command["whole"]).stdout
    lines = [f"after {2 * i} steps stage {i + 1} of 5, {stages[i]['name']}" for i in range(5)]
    assert [line in whole for line in lines] == [True] * 5
    kill_after(command["cut"], tmp_path / "cut", 7)  # steps 7 and 8 belong to stage 3
    assert len(rows(tmp_path / "cut")) < 10
    run([*command["cut"], "--resume", "auto"])
    assert without_time(tmp_path / "cut") == without_time(tmp_path / "whole")
    logged = rows(tmp_path / "whole")
    assert [row["curriculum/stage"] for row in logged] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    weights = []
    for name in ("whole", "cut"):
        run([sys.executable, "merge_lora.py", tmp_path / name, "--out", tmp_path / f"{name}-hf"])
        weights.append((tmp_path / f"{name}-hf" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


BY_STEP = "def score(response, example, step):\n    return float(step)\n"


@pytest.mark.slow
def test_an_evaluation_depends_on_the_weights_and_not_on_their_step(toys, tmp_path):
    """The reward depends on the step, and the task's own stages are switched off."""
    train, test = (write_parquet(tmp_path / name, geospot.toy(8, name, 0)) for name in ("train", "test"))
    (tmp_path / "by_step.py").write_text(BY_STEP)
    extra = ["--steps", 2, "--eval-every", 1, "--eval-data", test, "--save-every", 1, "--no-self-test"]
    extra += ["--reward", f"{tmp_path}/by_step.py:score", "--curriculum", "none"]
    out = tmp_path / "run"
    run([sys.executable, "train.py", *flags(toys["qwen2_5_vl"], train, out, *extra)])
    assert [row["eval/reward"] for row in rows(out)] == [2.0, 2.0, 2.0]
    assert [row["reward/mean"] for row in rows(out)[1:]] == [0.0, 1.0] and "curriculum/stage" not in rows(out)[1]
    done = run([sys.executable, "eval.py", out / "checkpoints" / "step_000001", "--out", tmp_path / "e", *extra[-4:-2]])
    assert json.loads((tmp_path / "e" / "eval.json").read_text())["reward"] == 2.0
    assert "--curriculum none" in done.stdout and "unlike the run" not in done.stdout


def test_geospot_trains_by_its_stages_and_is_evaluated_with_all_parts(tmp_path):
    truths = [row["reward_model"]["ground_truth"] for row in geospot.toy(4, "test", 0)]
    dataset = [Example("u", "geospot", [], [], truth, {}) for truth in truths]
    truth = json.loads(truths[0])
    text = json.dumps(truth | {"lat": truth["lat"] + 1})
    (tmp_path / "stages.toml").write_text("[[stages]]\nfrom = 0\nname = 'all'\n")

    def grade_at(stages, step, stage):
        response = make_rollout_stub(dataset[0], text, context=RewardContext(step=step, stage=stage))
        [rewards] = Grader(RewardConfig(reward_workers=0)).collect([response])
        return rewards["reward"]

    full = geospot.geospot_reward(text, truths[0])["reward"]
    for file in (None, "none", str(tmp_path / "stages.toml")):
        stages = make_order(file, dataset, 4, 0)
        trained = [grade_at(stages, step, stages.current_stage(step)) for step in (0, 100, 5000)]
        by_stage = [geospot.geospot_reward(text, truths[0], geospot.STAGES[i])["reward"] for i in (0, 1, 4)]
        assert trained == (by_stage if file is None else [full] * 3)  # the file turns no parts off
        assert {grade_at(stages, step, load_last_stage(file, dataset)[1]) for step in (0, 100, 5000)} == {full}
