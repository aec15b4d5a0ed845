"""T-GRPO: permuted frames, the bonus, and what is trained on.   pytest tests/test_temporal.py"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import grpo
import train
from algorithms.temporal import give_bonus
from errors import UserError
from prepare_data import Example
from report.metrics import rollout_metrics
from rollout import GroupPool, make_prompts, start_rollouts
from sources.images import encode_png
from sources.videos import Video

SEED = 3


def parse(words):
    return train.parse_args(f"--model m --data d --out o --rollout hf --steps 2 --group-size 6 {words}".split())


def video_example(side):
    frames = [encode_png(Image.new("RGB", (side, side), (20 * i,) * 3)) for i in range(6)]
    messages = [{"role": "user", "content": "<video>Where?"}]
    return Example("v", "motion", messages, [], "left", {}, [Video(tuple(frames), 2.0)])


@pytest.mark.parametrize("family, side", [("qwen2_5_vl", 56), ("qwen3_vl", 64)])
def test_the_last_samples_see_the_same_frames_in_another_order(family, side, loaded):
    """The prompt's tokens, and with them the times, stay; so do the pixels of each frame."""
    [prompt] = make_prompts([video_example(side)], loaded[family][1])
    cfg = parse("--algo t_grpo")
    [changed] = grpo.change_prompts([prompt], cfg.algo, SEED, 0, 2)
    rollouts = start_rollouts([changed], 6)
    assert [bool(r.prompt.view_of) for r in rollouts] == [False] * 4 + [True] * 2
    own, permuted = prompt.images[0], rollouts[5].prompt.images[0]
    assert rollouts[5].prompt.token_ids == prompt.token_ids and permuted.grid_thw == own.grid_thw
    shades = [frame[0, 0, 0] for frame in permuted.frames]
    assert sorted(shades) == [frame[0, 0, 0] for frame in own.frames] and shades != sorted(shades)
    by_slice = torch.cat([part.pixel_values() for part in permuted.slices])
    torch.testing.assert_close(permuted.pixel_values(), by_slice, rtol=0, atol=1e-6)  # in tensors of another shape
    assert not permuted.keep and permuted.key != own.key
    [later] = grpo.change_prompts([prompt], cfg.algo, SEED, 1, 2)
    assert [frame[0, 0, 0] for frame in later.noised.images[0].frames] != shades
    assert np.array_equal(own.frames, prompt.images[0].frames)


def graded_group(loaded, cfg, ctx, accuracies):
    """Return the group of a prompt after the pool has taken it, with these accuracies."""
    [prompt] = make_prompts([video_example(56)], loaded["qwen2_5_vl"][1])
    rollouts = start_rollouts(grpo.change_prompts([prompt], cfg.algo, SEED, 0, 2), 6)
    for r, accuracy in zip(rollouts, accuracies, strict=True):
        r.response, r.response_mask, r.logprobs = [30, 31], [True, True], [-1.0, -2.0]
        r.rewards = {} if accuracy is None else {"reward": 0.9 * accuracy + 0.1, "accuracy": accuracy}
    pool = GroupPool(cfg.algo, replace(cfg.rollout, prompts_per_step=1), 0, ctx)
    pool.add(rollouts, [r.rewards for r in rollouts])
    return rollouts


@pytest.mark.parametrize("accuracies, earned", [
    ((1, 1, 0, 0, 0, 0), True),
    ((1, 0, 0, 0, 1, 0), False),  # 0.25 < 0.8 * 0.5
    ((1, 1, 0, 0, 1, 0), True),  # the code's rule: equal accuracies earn it too
    ((1, 1, 0, 0, None, None), False),  # nothing to compare with
    ((None, 1, 0, 0, 0, 1), False),  # 1/3 < 0.4
])  # fmt: skip
def test_right_answers_get_the_bonus_if_the_order_helps(accuracies, earned, loaded, ctx):
    cfg = parse("--algo t_grpo")
    group = graded_group(loaded, cfg, ctx, accuracies)
    changed = give_bonus(group, cfg.algo)
    for r, accuracy in zip(changed[:4], accuracies, strict=False):
        if accuracy is None:
            assert not r.rewards
        else:
            assert r.reward == pytest.approx(0.9 * accuracy + 0.1 + 0.3 * (earned and accuracy > 0))
    assert all(r.finish_reason == "unselected" and math.isnan(r.reward) for r in changed[4:])
    assert [r.reward for r in group if r.rewards] == [0.9 * a + 0.1 for a in accuracies if a is not None]  # unchanged


def test_text_and_images_stay_as_they_are(loaded, ctx):
    [prompt] = make_prompts([replace(video_example(56), videos=[], messages=[{"role": "user", "content": "Hi"}])],
                            loaded["qwen2_5_vl"][1])
    cfg = parse("--algo t_grpo")
    assert grpo.change_prompts([prompt], cfg.algo, SEED, 0, 2) == [prompt]
    group = start_rollouts([prompt], 6)
    for r in group:
        r.rewards = {"reward": 1.0, "accuracy": 1.0}
    assert [r.reward for r in give_bonus(group, cfg.algo)] == [1.0] * 6


@pytest.mark.parametrize("words, message", [
    ("--algo-args temporal_samples=0.05", "permutes the frames of 0 per group"),
    ("--algo-args temporal_samples=0.9", "permutes the frames of 5 per group"),
    ("--algo-args noise_level=500", "cannot be combined with noise_level; remove"),
    ("--algo-args reward_weights=accuracy=1", "cannot be combined with reward_weights"),
    ("--algo-args train_samples=2", "cannot be combined with train_samples"),
])  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        parse(f"--algo t_grpo {words}").algo.check()


@pytest.mark.parametrize("accuracies, signal", [
    ((0, 0, 0, 0, 1, 0), False), ((1, 1, 1, 1, 0, 0), False), ((1, 0, 0, 0, 1, 1), True),
])  # fmt: skip
def test_only_samples_that_are_trained_make_a_signal(accuracies, signal, loaded, ctx):
    """Dynamic sampling must not stop at groups whose permuted samples alone differ."""
    cfg = parse("--algo t_grpo --max-gen-batches 3")
    [prompt] = make_prompts([video_example(56)], loaded["qwen2_5_vl"][1])
    rollouts = start_rollouts(grpo.change_prompts([prompt], cfg.algo, SEED, 0, 2), 6)
    for r, accuracy in zip(rollouts, accuracies, strict=True):
        r.response, r.response_mask, r.logprobs = [30, 31], [True, True], [-1.0, -2.0]
        r.rewards = {"reward": float(accuracy), "accuracy": float(accuracy)}
    pool = GroupPool(cfg.algo, replace(cfg.rollout, prompts_per_step=1), 0, ctx)
    pool.add(rollouts, [r.rewards for r in rollouts])
    assert list(pool.has_signal.values()) == [signal]
    assert rollout_metrics(pool, {})["reward/zero_std_frac"] == (not signal)
