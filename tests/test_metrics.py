"""Metrics of a step's rewards, by task, answer type and number of images.   pytest tests/test_metrics.py"""

from types import SimpleNamespace

import pytest
import torch

from prepare_data import Example
from report.metrics import rollout_metrics
from rollout import GroupPool, Prompt, Rollout, RolloutConfig
from train import parse_args
from utils import DistContext


def rollout(uid, source, kind, images, **rewards):
    example = Example(uid, source, [], [b""] * images, "1", {"answer_type": kind} if kind else {})
    prompt = Prompt(uid, [1], [None] * images, example, [1])
    failed = not rewards
    return Rollout(prompt, 0, [5], [True], [0.0], "error" if failed else "stop", "", rewards)


def make_pool(algo, rollouts):
    cfg = RolloutConfig(prompts_per_step=len(rollouts) // 2)
    pool = GroupPool(algo, cfg, 0, DistContext(0, 1, torch.device("cpu")))
    pool.add(rollouts, [r.rewards or None for r in rollouts])
    return pool


def test_rewards_are_reported_by_task_answer_type_and_number_of_images():
    algo = parse_args("--model m --data d --out o --steps 1 --group-size 2".split()).algo
    pool = make_pool(algo, [
        rollout("a", "me/Shapes", "count", 1, accuracy=1.0, reward=0.9), rollout("a", "me/Shapes", "count", 1),
        rollout("b", "shapes", "angle", 1, accuracy=0.0, reward=0.1),
        rollout("b", "shapes", "angle", 1, accuracy=1.0, reward=1.0),
        rollout("c", "caption", None, 2, cider=2.0, image_1=0.5, reward=0.4),
        rollout("c", "caption", None, 2, cider=4.0, image_1=1.0, reward=0.8),
    ])  # fmt: skip
    metrics = rollout_metrics(pool, {})
    expected = {
        "reward/mean": (0.9 + 0.1 + 1.0 + 0.4 + 0.8) / 5, "reward/accuracy": 2 / 3,
        "reward/shapes/accuracy": 2 / 3, "reward/shapes/reward": 2.0 / 3, "accuracy/shapes/type=count": 1.0,
        "accuracy/shapes/type=angle": 0.5, "reward/caption/cider": 3.0, "reward/caption/image_1": 0.75,
        "accuracy/images=1": 2 / 3, "accuracy/images=2": 0.6,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert not any(name.startswith("reward/caption/type") for name in metrics)
    assert pool.mean_accuracy == pytest.approx({"a": 1.0, "b": 0.5, "c": 0.6})


def test_a_group_whose_rewards_all_failed_has_no_metrics():
    algo = SimpleNamespace(group_size=2, max_gen_batches=1, truncated="keep", methods=[])
    pool = make_pool(algo, [rollout("a", "shapes", "count", 1), rollout("a", "shapes", "count", 1)])
    assert pool.mean_accuracy == {} and not any("shapes" in name for name in rollout_metrics(pool, {}))


def test_a_mean_of_no_values_is_left_out():
    algo = SimpleNamespace(group_size=2, max_gen_batches=1, truncated="keep", methods=[])
    pool = make_pool(algo, [rollout("a", "shapes", "count", 1), rollout("a", "shapes", "count", 1)])
    metrics = rollout_metrics(pool, {})
    assert "reward/mean" not in metrics and metrics["rollout/responses"] == metrics["rollout/tokens"] == 2
    assert metrics["response/truncated"] == 0 and metrics["reward/errors"] == 0  # metrics that are really 0 stay
