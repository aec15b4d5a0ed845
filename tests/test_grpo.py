"""What a token weighs, and which responses count.   pytest tests/test_grpo.py"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
import packing
from errors import UserError

# Loss weights --------------------------------------------------------------------------------------------------------

RESPONSES = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=9)


@settings(max_examples=30, deadline=None)
@given(RESPONSES)
def test_token_weights_add_up(responses):
    """Those of what counts; the rest weighs nothing and is in no total."""
    lengths, counted = zip(*responses, strict=True)
    used = [n for n, c in responses if c]
    for how in grpo.LOSS_AGGREGATIONS:
        weights = grpo.token_weights(lengths, counted, how, 50)
        assert all(w == 0 for w, c in zip(weights, counted, strict=True) if not c)
        total = sum(n * w for n, w in zip(lengths, weights, strict=True))
        if used:
            assert math.isclose(total, sum(used) / (50 * len(used)) if how == "const" else 1.0)
    with pytest.raises(UserError, match="--loss-agg 'mean'"):
        grpo.token_weights([1], [True], "mean", 1)


@settings(max_examples=30, deadline=None)
@given(RESPONSES, RESPONSES, st.sampled_from(grpo.LOSS_AGGREGATIONS))
def test_token_weights_do_not_depend_on_the_number_of_ranks(one, other, how):
    """Totals are of all ranks, so that each of two computes its share of what one process does."""
    n_tokens, counted = zip(*one, *other, strict=True)
    if not any(counted):
        return
    totals = []
    whole = grpo.token_weights(n_tokens, counted, how, 50, lambda mine: totals.append(mine) or mine)
    shares = []
    for responses in (one, other):
        n_tokens, counted = zip(*responses, strict=True)
        shares += grpo.token_weights(n_tokens, counted, how, 50, lambda mine: totals.append(mine) or totals[0])
    assert shares == whole
    assert {name: totals[1][name] + totals[2][name] for name in totals[0]} == totals[0]


# Engine and trainer disagree -----------------------------------------------------------------------------------------


def test_importance_weights_token_by_token():
    generator = torch.Generator().manual_seed(0)
    trainer = (-3 * torch.rand(200, generator=generator)).requires_grad_()
    engine = trainer.detach() + 0.5 * torch.randn(200, generator=generator)
    weight, capped = grpo.importance_weight(trainer, engine, 1.3)
    assert not weight.requires_grad
    for i in range(200):
        ratio = math.exp(trainer[i].item() - engine[i].item())
        assert weight[i].item() == pytest.approx(min(ratio, 1.3), rel=1e-5) and bool(capped[i]) == (ratio > 1.3)
    assert 0 < capped.sum() < 200


def test_responses_are_kept_or_left_out_whole():
    generator = torch.Generator().manual_seed(1)
    rollout = torch.randint(0, 9, (120,), generator=generator) * 3  # interleaved
    trainer = torch.randn(120, generator=generator)
    engine = trainer + 0.6 * torch.randn(120, generator=generator)
    keep = grpo.keep_responses(trainer, engine, rollout, 0.8, 1.2)
    for s in set(rollout.tolist()):
        pairs = [(a, b) for a, b, c in zip(trainer.tolist(), engine.tolist(), rollout.tolist(), strict=True) if c == s]
        ratios = [math.exp(a - b) for a, b in pairs]
        expected = 0.8 <= math.prod(ratios) ** (1 / len(ratios)) <= 1.2
        assert keep[rollout == s].tolist() == [expected] * len(ratios)
    assert 0 < keep.sum() < 120
    assert grpo.keep_responses(trainer[:0], engine[:0], rollout[:0], 0.8, 1.2).shape == (0,)


@pytest.mark.parametrize("norm_std", ["group", "batch", "none"])
@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_a_reward_that_failed_leaves_the_others_what_they_are_without_it(method, norm_std):
    generator = torch.Generator().manual_seed(0)
    rewards_PG = torch.randint(0, 5, (6, 4), generator=generator) / 4
    graded_PG = torch.rand(6, 4, generator=generator) > 0.3
    graded_PG[0], graded_PG[1], graded_PG[2] = True, False, torch.tensor([False, True, False, False])
    rewards_PG[3] = torch.tensor([0.1, 0.1, 0.1, 0.7])
    graded_PG[3] = torch.tensor([True, True, True, False])  # the others are equal
    apart = []  # each group by itself, as if it had been smaller
    for reward_G, graded_G in zip(rewards_PG, graded_PG, strict=True):
        few = graded_G.sum() < 2
        apart.append(torch.zeros(1) if few else grpo.group_advantages(reward_G[graded_G][None], method, "none")[0])
    expected = torch.zeros(6, 4, dtype=torch.float64)
    for p, difference_G in enumerate(apart):
        expected[p, graded_PG[p]] = difference_G.double() if graded_PG[p].any() else torch.zeros(0).double()
        if norm_std == "group" and graded_PG[p].sum() > 1:
            expected[p] /= rewards_PG[p, graded_PG[p]].double().std() + 1e-6
    if norm_std == "batch":
        expected /= expected[graded_PG].std()
    failed_PG = rewards_PG.masked_fill(~graded_PG, math.nan)
    found = grpo.group_advantages(failed_PG, method, norm_std, graded_PG=graded_PG)
    assert torch.allclose(found, expected, atol=1e-12) and (found[~graded_PG] == 0).all() and (found[:4][1:] == 0).all()
    assert grpo.constant_groups(failed_PG, graded_PG)[:, 0].tolist()[1:4] == [True, True, True]


@pytest.mark.parametrize("algo", ["grpo", "dr_grpo", "rloo", "reinforce++"])
def test_advantages_of_a_step_leave_out_rewards_that_failed(algo):
    chosen = grpo.Algorithm(algo=algo, **grpo.PRESETS[algo], group_size=3)
    rewards_PG = torch.tensor([[1.0, 0.0, math.nan], [math.nan, 0.25, 1.0]], dtype=torch.float64)
    counted = [True, True, False, False, True, True]

    def of(rewards_PG, rollout, counted):
        tokens = packing.TokenBatch(rollout, torch.zeros(len(rollout)), torch.zeros(len(rollout)))
        return grpo.advantages(rewards_PG, rewards_PG, tokens, torch.tensor(counted), chosen, 0.0)[0]

    found = of(rewards_PG, torch.arange(6).repeat_interleave(2), counted)
    without = of(torch.tensor([[1.0, 0.0], [0.25, 1.0]]).double(), torch.arange(4).repeat_interleave(2), [True] * 4)
    trained = torch.tensor(counted).repeat_interleave(2)
    assert torch.allclose(found[trained], without, atol=1e-12) and found.isfinite().all()
    reasons = ["stop" if c else "error" for c in counted]
    assert grpo.may_train(rewards_PG, reasons, chosen) == ([True] * 6 if chosen.kl_in_reward else counted)


def test_what_a_users_method_needs_is_computed(monkeypatch):
    """An advantage per token is not 0 because a response earned 0; a loss may have a gradient without an advantage."""
    rewards_PG, reasons = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.5] * 4]), ["stop"] * 8
    monkeypatch.setitem(grpo.ADVANTAGES, "steps", grpo.Advantage(grpo.over_group_mean, "none", per_token=True))
    monkeypatch.setitem(grpo.LOSSES, "anchored", grpo.Loss(grpo.clip, by_advantage=False))
    by_step, anchored = grpo.Algorithm(adv="steps", group_size=4), grpo.Algorithm(loss="anchored", group_size=4)
    assert grpo.may_train(rewards_PG, reasons, by_step) == grpo.may_train(rewards_PG, reasons, anchored) == [True] * 8
    assert grpo.may_train(rewards_PG, reasons, grpo.Algorithm(group_size=4)) == [True] * 4 + [False] * 4
    with pytest.raises(UserError, match="--algo-args norm_std=group: --adv steps does not give each sample"):
        grpo.Algorithm(adv="steps", norm_std="group").check()
