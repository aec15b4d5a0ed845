"""What a token weighs, and which responses count.   pytest tests/test_grpo.py"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
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
