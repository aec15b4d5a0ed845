"""Advantages, loss and packing against slow references.   pytest tests/test_grpo.py"""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from grpo import Branch, Tree, group_advantages, pack, plant, policy_loss, token_weight

# Advantages -----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4), min_size=1, max_size=5), st.floats(-5, 5))
def test_advantages_equal_the_formulas_and_ignore_a_shift(rewards, shift):
    r = torch.tensor(rewards, dtype=torch.float64)
    for method in grpo.ADVANTAGES:
        got = group_advantages(r, method)
        assert got.dtype == torch.float64
        for row, values in zip(got.tolist(), r.tolist(), strict=True):
            mean = statistics.fmean(values)
            for i, (advantage, x) in enumerate(zip(row, values, strict=True)):
                others = [v for j, v in enumerate(values) if j != i]
                want = {"grpo": (x - mean) / (statistics.stdev(values) + 1e-6), "dr_grpo": x - mean,
                        "rloo": x - statistics.fmean(others)}[method]
                assert math.isclose(advantage, want, abs_tol=1e-9)
    wide = (r.amax(1) - r.amin(1)) > 1e-3  # closer rewards can become equal when shifted
    torch.testing.assert_close(group_advantages(r + shift)[wide], group_advantages(r)[wide], rtol=1e-6, atol=1e-6)


def test_equal_rewards_give_exactly_zero():
    r = torch.tensor([[0.1] * 7, [0.7] * 7, [0.1] * 6 + [0.1 + 1e-9]])
    third = r[2:].double()
    third[0, -1] += 1e-9
    assert group_advantages(r[:2]).abs().max() == 0
    assert group_advantages(third).abs().max() > 0
    # the guard is needed: the mean of seven 0.1 is not 0.1
    assert (r[:1].double() - r[:1].double().mean()).abs().max() > 0 or r.double().mean() != 0.1


@pytest.mark.parametrize("rewards,match", [
    (torch.zeros(3, 1), "G=1"), (torch.zeros(3), "shape"), (torch.tensor([[0.0, float("nan")]]), "prompt 0, sample 1"),
])
def test_bad_rewards_are_refused(rewards, match):
    with pytest.raises(ValueError, match=match):
        group_advantages(rewards)


def test_unknown_method_lists_the_known():
    with pytest.raises(ValueError, match="grpo, dr_grpo, rloo"):
        group_advantages(torch.zeros(1, 2), "magic")


# Loss -----------------------------------------------------------------------------------------------------------------


def slow_loss(logp, old, advantage, low, high, dual):
    ratio = math.exp(logp - old)
    loss = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


@pytest.mark.parametrize("dual", [None, 3.0])
def test_loss_and_gradient_equal_the_definition(dual):
    rng = random.Random(0)
    logp = [rng.uniform(-3, 0) for _ in range(200)]
    old = [x + rng.uniform(-1.6, 1.6) for x in logp]
    advantage = [rng.choice([-1.5, -0.3, 0.0, 0.4, 2.0]) for _ in logp]
    x = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    loss, indicators = policy_loss(x, torch.tensor(old).double(), torch.tensor(advantage).double(), 0.2, 0.28, dual)
    loss.sum().backward()
    step, n_clipped = 1e-6, 0
    for i in range(len(logp)):
        def at(value, i=i):
            return slow_loss(value, torch.tensor(old)[i].item(), torch.tensor(advantage)[i].item(), 0.2, 0.28, dual)

        assert abs(at(logp[i]) - loss[i].item()) < 1e-9
        assert abs((at(logp[i] + step) - at(logp[i] - step)) / (2 * step) - x.grad[i].item()) < 1e-6
        n_clipped += bool(indicators["clipped"][i])
        assert indicators["kl"][i] >= 0
    assert 20 < n_clipped < 180  # both sides were exercised


def test_on_policy_gradient_is_minus_the_advantage():
    logp = torch.tensor([-0.5, -1.0], requires_grad=True)
    policy_loss(logp, logp.detach(), torch.tensor([2.0, -1.0]))[0].sum().backward()
    assert logp.grad.tolist() == [-2.0, 1.0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9))
def test_token_weights_add_up(lengths):
    total, n = sum(lengths), len(lengths)
    sums = {how: sum(k * token_weight(how, k, total, n, 50) for k in lengths) for how in grpo.LOSS_AGGREGATIONS}
    assert math.isclose(sums["token"], 1.0) and math.isclose(sums["seq"], 1.0)
    assert math.isclose(sums["const"], total / (50 * n))
    with pytest.raises(ValueError, match="--loss-agg 'mean'"):
        token_weight("mean", 1, 1, 1, 1)


# Packing --------------------------------------------------------------------------------------------------------------


def forest(draw_sizes, seed=0):
    rng, trees, tag = random.Random(seed), [], 1000
    for i, (prompt, branches) in enumerate(draw_sizes):
        made = []
        for size in branches:
            tokens = list(range(tag, tag + size))
            tag += size
            scored = [rng.random() < 0.7 for _ in tokens]
            scored[rng.randrange(size)] = True
            made.append(Branch(tokens, scored, {"id": [float(t) for t, s in zip(tokens, scored, strict=True) if s]}))
        trees.append(Tree(f"p{i}", list(range(prompt)), [f"img{i}"], made))
    return trees


sizes = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 15), min_size=1, max_size=6)), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(26, 80), st.integers(0, 9))
def test_packing_keeps_every_token_once_within_the_cap(shape, cap, seed):
    trees = forest(shape, seed)
    micros = pack(trees, cap)
    want = sorted(t for tree in trees for b in tree.branches for t, s in zip(b.tokens, b.scored, strict=True) if s)
    assert sorted(t for m in micros for t in m.target_K.tolist()) == want
    for m in micros:
        assert m.n_tokens <= cap
        assert m.values["id"].tolist() == [float(t) for t in m.target_K.tolist()]  # values stay with their tokens
        assert len(m.images) == sum(p == -1 for p in m.parent_N)
        previous = m.ids_T[m.src_K]
        for before, target in zip(previous.tolist(), m.target_K.tolist(), strict=True):
            # branches count up by one; a branch's first token is predicted by the last of its prompt
            assert before == target - 1 or before < 1000


@settings(max_examples=40, deadline=None)
@given(sizes)
def test_mask_follows_the_tree(shape):
    m = plant(forest(shape))
    mask, node, parent = m.mask_TT(), m.node_T.tolist(), m.parent_N

    def sees(query, key):
        if key > query:
            return False
        at = node[query]
        while at != -1:
            if at == node[key]:
                return True
            at = parent[at]
        return False

    for q in range(m.n_tokens):
        assert mask[q].tolist() == [sees(q, k) for k in range(m.n_tokens)]


def test_deeper_trees_see_all_their_ancestors():
    m = plant(forest([(2, [3])]))
    m.parent_N = [-1, 0, 1, 0]
    assert m.ancestors().int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]


def test_shared_prompt_is_computed_once_and_last_token_never():
    tree = Tree("a", [1, 2, 3], [], [Branch([7, 8], [True, True], {}), Branch([9], [True], {})])
    m = plant([tree])
    assert m.ids_T.tolist() == [1, 2, 3, 7] and m.src_K.tolist() == [2, 3, 2] and m.target_K.tolist() == [7, 8, 9]


def test_too_long_for_the_budget_names_prompt_and_lengths():
    with pytest.raises(ValueError, match=r"'p0' with 10 tokens and a response of 14 need 24 tokens, over --micro-tokens 20"):
        tree = Tree("p0", list(range(10)), [], [Branch(list(range(15)), [True] * 15, {})])
        pack([tree], 20)
