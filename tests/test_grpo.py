"""Tests of token weights, of the responses that count, and of settings that are refused.   pytest tests/test_grpo.py"""

import math
import re
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
import packing
from errors import UserError
from grpo import Algorithm
from settings import build_config, format_setting

# Loss weights --------------------------------------------------------------------------------------------------------

RESPONSES = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=9)


@settings(max_examples=30, deadline=None)
@given(RESPONSES)
def test_token_weights_add_up(responses):
    """Counted responses share the total weight; the others have weight 0 and are in no total."""
    lengths, counted = zip(*responses, strict=True)
    used = [n for n, c in responses if c]
    for aggregation in grpo.LOSS_AGGREGATIONS:
        weights = grpo.token_weights(lengths, counted, aggregation, 50)
        assert all(w == 0 for w, c in zip(weights, counted, strict=True) if not c)
        total = sum(n * w for n, w in zip(lengths, weights, strict=True))
        if used:
            assert math.isclose(total, sum(used) / (50 * len(used)) if aggregation == "const" else 1.0)


@settings(max_examples=30, deadline=None)
@given(RESPONSES, RESPONSES, st.sampled_from(grpo.LOSS_AGGREGATIONS))
def test_token_weights_do_not_depend_on_the_number_of_ranks(first, second, aggregation):
    """Totals are over all ranks, so each of two ranks computes the weights that a single process would."""
    n_tokens, counted = zip(*first, *second, strict=True)
    if not any(counted):
        return
    totals = []
    whole = grpo.token_weights(n_tokens, counted, aggregation, 50, lambda mine: totals.append(mine) or mine)
    shares = []
    for responses in (first, second):
        n_tokens, counted = zip(*responses, strict=True)
        shares += grpo.token_weights(n_tokens, counted, aggregation, 50, lambda mine: totals.append(mine) or totals[0])
    assert shares == whole
    assert {name: totals[1][name] + totals[2][name] for name in totals[0]} == totals[0]


# Mismatch of engine and trainer --------------------------------------------------------------------------------------


def test_importance_weights_token_by_token():
    generator = torch.Generator().manual_seed(0)
    trainer = (-3 * torch.rand(200, generator=generator)).requires_grad_()
    engine = trainer.detach() + 0.5 * torch.randn(200, generator=generator)
    weight, capped = grpo.truncated_importance_weight(trainer, engine, 1.3)
    assert not weight.requires_grad
    for i in range(200):
        ratio = math.exp(trainer[i].item() - engine[i].item())
        assert weight[i].item() == pytest.approx(min(ratio, 1.3), rel=1e-5) and bool(capped[i]) == (ratio > 1.3)
    assert 0 < capped.sum() < 200


def test_responses_are_kept_or_masked_as_a_whole():
    generator = torch.Generator().manual_seed(1)
    rollout = torch.randint(0, 9, (120,), generator=generator) * 3  # tokens of responses are interleaved
    trainer = torch.randn(120, generator=generator)
    engine = trainer + 0.6 * torch.randn(120, generator=generator)
    keep = grpo.geometric_mean_mask(trainer, engine, rollout, 0.8, 1.2)
    for s in set(rollout.tolist()):
        pairs = [(a, b) for a, b, c in zip(trainer.tolist(), engine.tolist(), rollout.tolist(), strict=True) if c == s]
        ratios = [math.exp(a - b) for a, b in pairs]
        expected = 0.8 <= math.prod(ratios) ** (1 / len(ratios)) <= 1.2
        assert keep[rollout == s].tolist() == [expected] * len(ratios)
    assert 0 < keep.sum() < 120
    assert grpo.geometric_mean_mask(trainer[:0], engine[:0], rollout[:0], 0.8, 1.2).shape == (0,)


@pytest.mark.parametrize("norm_std", ["group", "batch", "none"])
@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_a_failed_reward_does_not_affect_the_other_advantages(method, norm_std):
    generator = torch.Generator().manual_seed(0)
    rewards_PG = torch.randint(0, 5, (6, 4), generator=generator) / 4
    graded_PG = torch.rand(6, 4, generator=generator) > 0.3
    graded_PG[0], graded_PG[1], graded_PG[2] = True, False, torch.tensor([False, True, False, False])
    rewards_PG[3] = torch.tensor([0.1, 0.1, 0.1, 0.7])
    graded_PG[3] = torch.tensor([True, True, True, False])  # the graded rewards are equal
    alone = []  # each group alone, without the failed rewards
    for reward_G, graded_G in zip(rewards_PG, graded_PG, strict=True):
        few = graded_G.sum() < 2
        alone.append(torch.zeros(1) if few else grpo.group_advantages(reward_G[graded_G][None], method, "none")[0])
    expected = torch.zeros(6, 4, dtype=torch.float64)
    for p, difference_G in enumerate(alone):
        expected[p, graded_PG[p]] = difference_G.double() if graded_PG[p].any() else torch.zeros(0).double()
        if norm_std == "group" and graded_PG[p].sum() > 1:
            expected[p] /= rewards_PG[p, graded_PG[p]].double().std() + 1e-6
    if norm_std == "batch":
        expected /= expected[graded_PG].std()
    failed_PG = rewards_PG.masked_fill(~graded_PG, math.nan)
    ours = grpo.group_advantages(failed_PG, method, norm_std, graded_PG=graded_PG)
    assert torch.allclose(ours, expected, atol=1e-12) and (ours[~graded_PG] == 0).all() and (ours[:4][1:] == 0).all()
    assert grpo.constant_groups(failed_PG, graded_PG)[:, 0].tolist()[1:4] == [True, True, True]


@pytest.mark.parametrize("algo", ["grpo", "dr_grpo", "rloo", "reinforce++"])
def test_advantages_of_a_step_leave_out_failed_rewards(algo):
    chosen = Algorithm(algo=algo, **grpo.PRESETS[algo], group_size=3)
    rewards_PG = torch.tensor([[1.0, 0.0, math.nan], [math.nan, 0.25, 1.0]], dtype=torch.float64)
    counted = [True, True, False, False, True, True]

    def adv(rewards_PG, rollout, counted):
        tokens = packing.TokenBatch(rollout, torch.zeros(len(rollout)), torch.zeros(len(rollout)))
        return grpo.compute_advantages(rewards_PG, rewards_PG, tokens, torch.tensor(counted), chosen, 0.0)[0]

    ours = adv(rewards_PG, torch.arange(6).repeat_interleave(2), counted)
    without = adv(torch.tensor([[1.0, 0.0], [0.25, 1.0]]).double(), torch.arange(4).repeat_interleave(2), [True] * 4)
    trained = torch.tensor(counted).repeat_interleave(2)
    assert torch.allclose(ours[trained], without, atol=1e-12) and ours.isfinite().all()
    reasons = ["stop" if c else "error" for c in counted]
    assert grpo.has_gradient(rewards_PG, reasons, chosen) == ([True] * 6 if chosen.kl_in_reward else counted)


def test_custom_methods_get_the_responses_that_they_need(monkeypatch):
    """A per-token estimator may give equal rewards an advantage; a loss may have a gradient without an advantage."""
    rewards_PG, reasons = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.5] * 4]), ["stop"] * 8
    monkeypatch.setitem(
        grpo.ADVANTAGES, "steps", grpo.AdvantageEstimator(grpo.subtract_group_mean, "none", per_token=True)
    )
    monkeypatch.setitem(grpo.LOSSES, "anchored", grpo.LossFunction(grpo.ppo_clip, zero_without_advantage=False))
    by_step, anchored = Algorithm(adv="steps", group_size=4), Algorithm(loss="anchored", group_size=4)
    assert (
        grpo.has_gradient(rewards_PG, reasons, by_step)
        == grpo.has_gradient(rewards_PG, reasons, anchored)
        == [True] * 8
    )
    assert grpo.has_gradient(rewards_PG, reasons, Algorithm(group_size=4)) == [True] * 4 + [False] * 4
    with pytest.raises(UserError, match="--algo-args norm_std=group needs .*; --adv steps does not;"):
        Algorithm(adv="steps", norm_std="group").check()


# Settings ------------------------------------------------------------------------------------------------------------

KL = {"kl_coef": 0.1, "kl_in": "reward"}
REFUSED = [  # refused settings, the message, and a change that makes them valid
    ({"group_size": 1}, "--group-size 1: --adv grpo compares samples of one prompt", {"adv": "reinforce++"}),
    ({"group_size": 1, "adv": "gae", "max_gen_batches": 2}, "--group-size 1: --max-gen-batches 2", {"group_size": 2}),
    ({"adv": "gae", "norm_std": "group"}, "norm_std=group needs .*; --adv gae does not;", {"norm_std": "batch"}),
    (KL, "kl_in=reward norm_std=group.*norm_std=batch or none", {"norm_std": "batch"}),
    ({"clip_low": 1.0}, "--clip-low 1.0: must be below 1, except with --loss cispo", {"loss": "cispo"}),
    ({"adv": "gae", "loss": "gspo"}, "--loss gspo couples the tokens of a response, but --adv gae", {"loss": "clip"}),
    ({"adv": "reinforce++", "loss": "gspo", **KL}, "has an advantage per token .with kl_in=reward", {"kl_in": "loss"}),
    ({"loss": "reinforce", "update_epochs": 2}, "--loss reinforce is only correct on policy .* --update-epochs 2 x",
     {"update_epochs": 1}),
    ({"loss": "reinforce", "minibatches": 2}, "settings are --update-epochs 1 x --minibatches 2", {"minibatches": 1}),
    ({"loss": "reinforce", "old_policy": "rollout"}, "and old_policy=rollout; use", {"old_policy": "trainer"}),
    ({"tis_cap": 2.0, "old_policy": "rollout"}, "tis_cap and ratio_mask would correct for", {"tis_cap": None}),
    ({"ratio_mask": "0.5,2", "old_policy": "rollout"}, "would correct for these a second", {"old_policy": "trainer"}),
    ({"kl_target": 0.1}, "--algo-args kl_target=0.1 adapts --kl-coef, but --kl-coef is 0", {"kl_coef": 0.1}),
    ({"ref_every": 5}, "--algo-args ref_every=5 updates the reference, but there is none", {"kl_coef": 0.1}),
    ({"critic_warmup_steps": 2}, "critic_warmup_steps=2: --adv grpo has no critic; use --adv gae", {"adv": "gae"}),
    ({"critic": "separate"}, "--algo-args critic=separate: --adv grpo has no critic; use --adv gae", {"adv": "gae"}),
    ({"kl_in": "reward"}, "kl_in=reward has no effect with --kl-coef 0.0", {"kl_in": "loss"}),
    ({"algo": "reinforce++", "adv": "reinforce++"}, "--algo-args kl_in=loss has no effect", {"kl_in": "reward"}),
    *(({"loss": loss, "dual_clip": 3.0}, f"dual_clip=3.0 has no effect on --loss {loss}", {"dual_clip": None})
      for loss in ("cispo", "sapo", "reinforce")),
    *(({"ratio_mask": mask}, f"--algo-args ratio_mask={mask}: give LOW,HIGH around 1", {"ratio_mask": "0,1.01"})
      for mask in ("2,3", "0.5,1", "1,2", "-0.1,2", "0.5", "low,high", "0.1,0.5,2")),
]  # fmt: skip


@pytest.mark.parametrize("settings,message,change", REFUSED, ids=lambda x: " ".join(x) if isinstance(x, dict) else "")
def test_settings_that_contradict_each_other_are_refused(settings, message, change):
    with pytest.raises(UserError, match=message):
        Algorithm(**settings).check()
    Algorithm(**settings | change).check()


def test_settings_and_methods_are_immutable():
    for instance, name in ((Algorithm(), "kl_coef"), (grpo.PolicyLoss(Algorithm()), "kl_coef"),
                           (grpo.LOSSES["clip"], "per_token"), (grpo.ADVANTAGES["grpo"], "norm_std")):  # fmt: skip
        with pytest.raises(FrozenInstanceError):
            setattr(instance, name, getattr(instance, name))


BOUNDS = {  # setting: allowed values (the smallest and largest, or all), and refused ones
    "group_size": ([1], [0]), "clip_low": ([1e-9, 1.0], [0.0, 1.01]), "clip_high": ([1e-9], [0.0]),
    "dual_clip": ([1.01, None], [1.0]), "tis_cap": ([1e-9, None], [0.0]), "max_gen_batches": ([1], [0]),
    "update_epochs": ([1], [0]), "minibatches": ([1], [0]),
    "entropy_coef": ([0.0, -0.1], [float("nan")]), "kl_coef": ([0.0], [-1e-9]),
    "kl_target": ([1e-9, None], [0.0]), "ref_every": ([0], [-1]), "critic_warmup_steps": ([0], [-1]),
    "gamma": ([0.0, 1.0], [-1e-9, 1.01]), "lam": ([0.0, 1.0], [-1e-9, 1.01]),
    "norm_std": ([None, *grpo.NORM_STD], ["all"]), "loss_agg": (grpo.LOSS_AGGREGATIONS, ["mean"]),
    "truncated": (["keep", "mask", "penalise"], ["drop"]), "old_policy": (["trainer", "rollout"], ["engine"]),
    "kl": (grpo.KL_ESTIMATORS, ["k4"]), "kl_in": (["loss", "reward"], ["advantage"]),
    "critic": (["head", "separate"], ["none"]), "adv": (grpo.ADVANTAGES, ["magic"]), "loss": (grpo.LOSSES, ["magic"]),
    "algo": (grpo.PRESETS, ["magic"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_a_setting_takes_only_allowed_values(name):
    allowed, beyond = BOUNDS[name]
    for value in allowed:
        assert getattr(build_config(Algorithm, {name: value}), name) == value
    for value in beyond:
        [setting] = [f for f in fields(Algorithm) if f.name == name]
        with pytest.raises(UserError, match=re.escape(f"{format_setting(setting, value)}: must be ")):
            build_config(Algorithm, {name: value})
