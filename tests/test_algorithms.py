"""Advantages and losses, compared with the published formulas in plain loops and float64.

pytest tests/test_algorithms.py
"""

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from conftest import written
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
import train
from errors import UserError
from grpo import (
    PolicyLoss,
    adapt_kl_coef,
    gae,
    group_advantages,
    kl,
    overlong_penalty,
    policy_loss,
    value_loss,
    whiten,
)
from kernels import fused_policy_loss
from packing import TokenBatch, make_token_batch
from train import AlgorithmSettings as Algorithm

GROUPED = ("grpo", "dr_grpo", "rloo")  # methods that compare the samples of a prompt

# Advantages -----------------------------------------------------------------------------------------------------------


def slow_group_advantages(rewards, method, norm_std):
    """Return advantages by the papers' formulas. Rewards and advantages are one list per group."""
    differences = []
    for values in rewards:
        mean = statistics.fmean(values)
        for i, x in enumerate(values):
            others = [v for j, v in enumerate(values) if j != i]
            differences.append(
                {"grpo": x - mean, "dr_grpo": x - mean, "reinforce++": x, "rloo": x - statistics.fmean(others)}[method]
            )
    size, spread = len(rewards[0]), statistics.stdev(differences)
    if norm_std == "batch":
        centre = statistics.fmean(differences) if method == "reinforce++" else 0.0
        differences = [(d - centre) / spread if spread > 1e-9 else 0.0 for d in differences]
    if norm_std == "group":
        differences = [d / (statistics.stdev(rewards[i // size]) + 1e-6) for i, d in enumerate(differences)]
    return [differences[i : i + size] for i in range(0, len(differences), size)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(-12, 12).map(lambda x: x / 4), min_size=4, max_size=4), min_size=2, max_size=5),
    st.floats(-5, 5),
)
def test_advantages_equal_the_formulas_and_ignore_a_shift_of_a_group(rewards, shift):
    r = torch.tensor(rewards, dtype=torch.float64)
    shifted = r.clone()
    shifted[0] += shift  # the rewards of one group only
    for method, norm_std in itertools.product((*GROUPED, "reinforce++"), (None, "group", "batch", "none")):
        got = group_advantages(r, method, norm_std)
        want = torch.tensor(
            slow_group_advantages(rewards, method, norm_std or grpo.ADVANTAGES[method].norm_std), dtype=torch.float64
        )
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        if method in GROUPED and (r[0].amax() == r[0].amin()) == (shifted[0].amax() == shifted[0].amin()):
            torch.testing.assert_close(group_advantages(shifted, method, norm_std), got, rtol=1e-6, atol=1e-6)


def test_an_estimator_that_returns_another_shape_is_named(monkeypatch):
    wrong = grpo.AdvantageEstimator(lambda rewards_PG: rewards_PG.mean(dim=1))
    monkeypatch.setitem(grpo.ADVANTAGES, "wrong", wrong)
    with pytest.raises(UserError, match=r"--adv wrong: <lambda> must return .* \(4, 4\), but returned \(4,\)"):
        grpo.group_advantages(torch.rand(4, 4), "wrong")


def test_ranks_that_share_their_moments_get_the_whole_steps_advantages():
    r = torch.rand(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for method in ("reinforce++", "grpo", "rloo"):
        difference = group_advantages(r, method, "none")
        moments = difference.mean().item(), difference.std().item()
        parts = [
            group_advantages(part, method, "batch", lambda _, known=moments: known) for part in (r[:1], r[1:4], r[4:])
        ]
        torch.testing.assert_close(torch.cat(parts), group_advantages(r, method, "batch"), rtol=1e-12, atol=1e-12)


def test_equal_rewards_give_exactly_zero():
    r = torch.tensor([[0.1] * 7, [0.7] * 7, [0.1] * 6 + [0.1 + 1e-9]])
    third = r[2:].double()
    third[0, -1] += 1e-9
    assert group_advantages(third).abs().max() > 0
    # the guard is needed: the mean of some equal rewards differs from them, and division by the tiny std magnifies this
    equal = torch.tensor([[x / 100] * 7 for x in range(100)], dtype=torch.float64)
    assert ((equal - equal.mean(1, keepdim=True)) / (equal.std(1, keepdim=True) + 1e-6)).abs().max() > 0
    for method, norm_std in itertools.product(GROUPED, ("group", "batch", "none")):
        assert group_advantages(equal, method, norm_std).abs().max() == 0
        assert group_advantages(r[:2], method, norm_std).abs().max() == 0
        mixed = group_advantages(torch.cat([equal[:3], torch.eye(2, 7, dtype=torch.float64)]), method, norm_std)
        assert mixed[:3].abs().max() == 0 and mixed[3:].abs().min() > 0
    for value in (0.1, 0.3, 1e6 + 0.1):  # REINFORCE++ gives zero too if all rewards of a step are equal
        assert group_advantages(torch.full((3, 7), value, dtype=torch.float64), "reinforce++").abs().max() == 0


@pytest.mark.parametrize(
    "rewards,method,match",
    [
        (torch.zeros(3, 1), "grpo", "G=1"),
        (torch.zeros(3, 1), "rloo", "G=1"),
        (torch.tensor([[0.0, float("nan")]]), "grpo", "prompt 0, sample 1 is nan"),
        (torch.tensor([[0.0], [float("inf")]]), "reinforce++", "prompt 1, sample 0 is inf"),
        (torch.zeros(1, 2), "magic", "choose one of dr_grpo, grpo, rloo, reinforce"),
        (torch.zeros(1, 2), "gae", "unknown method 'gae'"),
    ],
)
def test_bad_rewards_and_unknown_methods_are_refused(rewards, method, match):
    with pytest.raises(ValueError, match=match):
        group_advantages(rewards, method)


def test_one_sample_is_enough_for_reinforce_plus_plus():
    got = group_advantages(torch.tensor([[1.0], [0.0]]), "reinforce++").flatten()
    assert got.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


def test_whitening_centres_and_scales():
    x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    w = whiten(x, x.mean().item(), x.std().item())
    assert abs(w.mean()) < 1e-12 and abs(w.std() - 1) < 1e-12
    assert whiten(torch.full((3,), 0.1), 0.1, 1e-17).tolist() == [0, 0, 0] and whiten(
        x[:1], 1.0, math.nan
    ).tolist() == [0]


# GAE ------------------------------------------------------------------------------------------------------------------


def slow_gae(rewards, values, mask, gamma, lam):
    """Return advantages and returns from the double sum of equation 16, over the tokens in the mask."""
    positions = [t for t, m in enumerate(mask) if m]
    advantages = [0.0] * len(mask)
    for i, t in enumerate(positions):
        for n, u in enumerate(positions[i:]):
            following = values[positions[i + n + 1]] if i + n + 1 < len(positions) else 0.0
            advantages[t] += (gamma * lam) ** n * (rewards[u] + gamma * following - values[u])
    return advantages, [a + values[t] if mask[t] else 0.0 for t, a in enumerate(advantages)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**6))
def test_gae_equals_a_double_loop_and_skips_masked_tokens(n, gamma, lam, seed):
    rng = random.Random(seed)
    rows = [
        (
            [rng.gauss(0, 1) for _ in range(n)],
            [rng.gauss(0, 1) for _ in range(n)],
            [rng.random() < 0.7 for _ in range(n)],
        )
        for _ in range(3)
    ]
    rewards, values, mask = (torch.tensor([row[i] for row in rows]) for i in range(3))
    got = gae(rewards, values, mask, gamma, lam)
    for b in range(3):
        want = slow_gae(rewards[b].tolist(), values[b].tolist(), rows[b][2], gamma, lam)
        for ours, exact in zip(got, want, strict=True):
            assert ours.dtype == torch.float64
            torch.testing.assert_close(ours[b], torch.tensor(exact, dtype=torch.float64), rtol=1e-9, atol=1e-9)
        single = gae(rewards[b], values[b], mask[b], gamma, lam)  # a single response, without a batch axis
        batched = (got[0][b], got[1][b])  # its loops over a batch may be vectorized in another way
        torch.testing.assert_close(single, batched, rtol=1e-12, atol=1e-12)


def test_gae_refuses_columns_of_different_shapes():
    for shapes in ((3, 2, 3), (3, 3, 2), (2, 3, 3)):
        with pytest.raises(ValueError, match="must agree"):
            gae(*map(torch.ones, shapes), 1.0, 1.0)


# Losses ---------------------------------------------------------------------------------------------------------------


def slow_losses(logp, old, advantage, rollout, algo, stopped=None):
    """Return token losses by the papers' formulas in plain floats. `stopped` replaces logp where no gradient flows."""
    out = []
    for t in range(len(logp)):
        a, low, high = advantage[t], 1 - algo.clip_low, 1 + algo.clip_high
        ratio = math.exp(logp[t] - old[t])
        if algo.loss == "gspo":
            own = [u for u in range(len(logp)) if rollout[u] == rollout[t]]
            ratio = math.prod(math.exp(logp[u] - old[u]) for u in own) ** (1 / len(own))
        if algo.loss in ("clip", "gspo"):
            value = -min(ratio * a, min(max(ratio, low), high) * a)
            if algo.dual_clip is not None and a < 0:
                value = min(value, -algo.dual_clip * a)
        elif algo.loss == "cispo":
            constant = math.exp((stopped or logp)[t] - old[t])
            value = -min(max(constant, low), high) * a * logp[t]
        elif algo.loss == "sapo":
            tau = 1.0 if a > 0 else 1.05
            value = -a * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
        else:
            value = -a * logp[t]
        out.append(value)
    return out


def slow_kl(logp, ref, kind):
    d = logp - ref
    return {"k1": d, "k2": 0.5 * d**2, "k3": math.exp(ref - logp) - (ref - logp) - 1}[kind]


def slow_importance(old, engine, rollout, algo):
    """Return the factor of each token's loss that corrects for the engine's log-probabilities."""
    out = []
    for t in range(len(old)):
        factor = 1.0 if algo.tis_cap is None else min(math.exp(old[t] - engine[t]), algo.tis_cap)
        if algo.ratio_mask is not None:
            own = [u for u in range(len(old)) if rollout[u] == rollout[t]]
            mean = math.prod(math.exp(old[u] - engine[u]) for u in own) ** (1 / len(own))
            low, high = map(float, algo.ratio_mask.split(","))
            factor *= low <= mean <= high
        out.append(factor)
    return out


def make_columns(n=60, seed=0, spread=0.8):
    """Return logp, entropy and the columns of a TokenBatch as lists, for responses of 1 to 7 tokens."""
    rng = random.Random(seed)
    logp = [rng.uniform(-3, 0) for _ in range(n)]
    rollout, number = [], 0
    while len(rollout) < n:
        rollout += [number] * rng.randint(1, 7)
        number += 1
    rollout = rollout[:n]
    by_rollout = [rng.choice([-1.5, -0.3, 0.0, 0.4, 2.0]) for _ in range(number)]
    old_logps = [x + rng.uniform(-spread, spread) for x in logp]
    return {
        "logp": logp, "entropy": [rng.uniform(0, 2) for _ in range(n)], "rollout": rollout, "old_logps": old_logps,
        "ref_logps": [x + rng.uniform(-1, 1) for x in logp],
        "rollout_logps": [x + rng.gauss(0, 0.3) for x in old_logps],
        "advantages": [by_rollout[s] for s in rollout], "weights": [rng.uniform(0.1, 1) for _ in range(n)],
    }  # fmt: skip


def as_tensors(c, dtype=torch.float64):
    """Return logp and entropy, which require gradients, and the TokenBatch."""
    columns = {name: torch.tensor(x, dtype=dtype) for name, x in c.items() if name != "rollout"}
    logp, entropy = columns.pop("logp").requires_grad_(), columns.pop("entropy").requires_grad_()
    rollout = torch.tensor(c["rollout"])
    return logp, entropy, TokenBatch(rollout, n_images=torch.zeros(len(rollout)), **columns)


def make_loss(loss="clip", kl_coef=0.0, **settings):
    """Return a loss with two passes over the same rollouts, so that it is off policy."""
    return PolicyLoss(Algorithm(loss=loss, kl_coef=kl_coef, update_epochs=2, **settings), kl_coef)


def describe_loss(loss):
    return " ".join(f"{key}={value}" for key, value in vars(loss.algo).items() if value != getattr(Algorithm(), key))


LOSSES = [
    make_loss(), make_loss(clip_high=0.28), make_loss(dual_clip=1.3), make_loss("gspo", clip_low=0.05, clip_high=0.1),
    make_loss("gspo", clip_low=0.05, clip_high=0.1, dual_clip=1.1), make_loss("cispo", clip_low=1.0, clip_high=0.4),
    make_loss("cispo", clip_low=0.3, clip_high=0.2), make_loss("sapo"), make_loss("reinforce"),
    *(make_loss(kl=kind, kl_coef=0.3) for kind in grpo.KL_ESTIMATORS),
    make_loss("gspo", clip_low=0.05, clip_high=0.1, kl="k3", kl_coef=0.2, entropy_coef=0.1),
    make_loss("sapo", entropy_coef=0.05),
    make_loss(tis_cap=1.2),
    make_loss("gspo", clip_low=0.05, clip_high=0.1, tis_cap=1.1),
    make_loss("cispo", clip_low=0.3, clip_high=0.2, ratio_mask="0.9,1.2", entropy_coef=0.1),
    make_loss(kl="k3", kl_coef=0.2, tis_cap=1.3, ratio_mask="0.8,1.1"),
]  # fmt: skip
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=describe_loss)


@each_loss
def test_loss_and_gradient_equal_the_definition(loss):
    c = make_columns()
    algo = loss.algo
    logp, entropy, tokens = as_tensors(c)
    factors = slow_importance(c["old_logps"], c["rollout_logps"], c["rollout"], algo)
    kept = slow_importance(c["old_logps"], c["rollout_logps"], c["rollout"], Algorithm(ratio_mask=algo.ratio_mask))

    def total(at, entropy_at):
        losses = slow_losses(at, c["old_logps"], c["advantages"], c["rollout"], algo, stopped=c["logp"])
        out = []
        for t, x in enumerate(losses):
            penalty = loss.kl_coef * slow_kl(at[t], c["ref_logps"][t], algo.kl) - algo.entropy_coef * entropy_at[t]
            out.append(c["weights"][t] * (factors[t] * x + kept[t] * penalty))
        return out

    loss_K, indicators = loss(logp, entropy, tokens)
    exact = torch.tensor(total(c["logp"], c["entropy"]), dtype=torch.float64)
    torch.testing.assert_close(loss_K.detach(), exact, rtol=1e-12, atol=1e-12)
    loss_K.sum().backward()
    step = 1e-6
    for i in range(len(c["logp"])):
        sides = []
        for sign in (1, -1):
            shifted = list(c["logp"])
            shifted[i] += sign * step
            sides.append(sum(total(shifted, c["entropy"])))
        assert abs((sides[0] - sides[1]) / (2 * step) - logp.grad[i].item()) < 1e-6
        expected = -algo.entropy_coef * c["weights"][i] * kept[i]
        assert (0.0 if entropy.grad is None else entropy.grad[i].item()) == pytest.approx(expected, abs=1e-15)
    clipped = indicators["clipped"].sum()
    assert 5 < clipped < 55 if algo.loss in ("clip", "gspo", "cispo") else clipped == 0  # some, not all
    assert (indicators["kl"] >= 0).all()
    assert ("capped" in indicators) == (algo.tis_cap is not None) and ("kept" in indicators) == (
        algo.ratio_mask is not None
    )
    assert algo.ratio_mask is None or indicators["kept"].tolist() == [k > 0 for k in kept] and 0 < sum(kept) < 60


def test_on_policy_the_gradient_of_every_loss_is_the_policy_gradient():
    """At ratio 1 all losses have the gradient -A (gspo: its mean over the response, which is the same here)."""
    c = make_columns()
    for kind in grpo.LOSSES:
        logp, entropy, tokens = as_tensors(c)
        tokens.old_logps = None  # then the current log-probabilities are used
        tokens.weights = torch.ones_like(tokens.weights)
        PolicyLoss(Algorithm(loss=kind))(logp, entropy, tokens)[0].sum().backward()
        torch.testing.assert_close(logp.grad, -tokens.advantages, rtol=1e-12, atol=1e-12)


def test_off_policy_a_missing_column_is_an_error():
    logp, entropy, tokens = as_tensors(make_columns())
    for name in ("old_logps", "ref_logps", "advantages", "weights"):
        part = tokens[:]
        setattr(part, name, None)
        with pytest.raises(TypeError):
            make_loss(kl_coef=0.1)(logp, entropy, part)


@each_loss
def test_advantages_of_zero_give_zero_gradients_without_kl_and_entropy(loss):
    logp, entropy, tokens = as_tensors(make_columns() | {"advantages": [0.0] * 60}, torch.float32)
    loss(logp, entropy, tokens)[0].sum().backward()
    if not loss.kl_coef and not loss.algo.entropy_coef:
        assert logp.grad.abs().max() == 0 and (entropy.grad is None or entropy.grad.abs().max() == 0)
    else:
        assert logp.grad.abs().max() > 0 or entropy.grad.abs().max() > 0


@each_loss
def test_the_fused_policy_head_gives_the_same_loss_and_gradient_for_any_block_size(loss, monkeypatch):
    """Loss and gradients of fused_policy_loss equal those of autograd in float64, also if blocks divide responses."""
    import kernels

    c, vocab, g = make_columns(), 40, torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(60, 8, generator=g), torch.randn(vocab, 8, generator=g) / 3
    targets = torch.randint(vocab, (60,), generator=g)
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1).gather(1, targets[:, None])[:, 0]
    offset = exact - torch.tensor(c["logp"], dtype=torch.float64)
    for name in ("old_logps", "ref_logps", "rollout_logps"):
        c[name] = (torch.tensor(c[name], dtype=torch.float64) + offset).float().tolist()
    _, _, tokens = as_tensors(c, torch.float32)
    _, _, double_tokens = as_tensors(c)
    double_tokens.weights, double_tokens.advantages = tokens.weights.double(), tokens.advantages.double()
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = (x @ w.t()).log_softmax(-1)
    entropy = -(logits * logits.exp()).sum(-1)
    want = loss(logits.gather(1, targets[:, None])[:, 0], entropy, double_tokens)[0].sum()
    want.backward()
    for block_rows in (4, 60):
        monkeypatch.setattr(kernels, "CPU_BLOCK_ELEMENTS", block_rows * vocab)
        a, b = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        total, *_ = fused_policy_loss(a, b, targets, loss, tokens)
        total.backward()
        torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.grad.double(), x.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(b.grad.double(), w.grad, rtol=1e-4, atol=2e-5)


@each_loss
def test_losses_do_not_depend_on_how_responses_are_divided_into_batches(loss):
    c = make_columns()
    logp, entropy, tokens = as_tensors(c)
    whole = loss(logp, entropy, tokens)[0]
    ends = [i for i in range(1, 60) if c["rollout"][i] != c["rollout"][i - 1]]
    parts = [slice(a, b) for a, b in itertools.pairwise([0, ends[3], ends[4], ends[-1], 60])]
    split = torch.cat([loss(logp[p], entropy[p], tokens[p])[0] for p in parts])
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert whole.abs().sum() > 1


def test_unknown_names_are_refused():
    x = torch.zeros(1)
    for call, match in ((lambda: policy_loss(x, x, x, kind="magic"), "one of clip, gspo, cispo, sapo, reinforce"),
                        (lambda: kl(x, x, "k4"), "choose one of k1, k2, k3")):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call()
    for register in (grpo.register_advantage("grpo", norm_std="none"), grpo.register_loss("clip")):
        with pytest.raises(AssertionError, match="is already registered"):
            register(abs)


# From rewards to advantages ------------------------------------------------------------------------------------------


def slow_advantages(rewards, tasks, counts, old, ref, counted, algo, kl_coef):
    """Return a list of advantages for each response, by the formulas above. `rewards` and `tasks` (task rewards) have
    one list per group, `old` and `ref` one list per response."""
    size = len(rewards[0])
    flat = list(itertools.chain.from_iterable(rewards))
    penalties = [[0.0] * n for n in counts]
    if algo.kl_in == "reward":
        penalties = [[kl_coef * slow_kl(a, b, algo.kl) for a, b in zip(*pair, strict=True)]
                     for pair in zip(old, ref, strict=True)]  # fmt: skip
    compared = [r for r, c in zip(flat, counted, strict=True) if c]  # if they are all equal, only penalties differ
    same = len(set(compared)) < 2
    if algo.adv in GROUPED:
        compared = [
            r if algo.max_gen_batches == 1 or len(set(t)) > 1 else [0.0] for r, t in zip(rewards, tasks, strict=True)
        ]
        same = all(len(set(group)) == 1 for group in compared)
        total = [r - sum(p) for r, p in zip(flat, penalties, strict=True)]
        groups = [total[i : i + size] for i in range(0, len(total), size)]
        if algo.effective_norm_std != "batch":
            by_group = slow_group_advantages(groups, algo.adv, algo.effective_norm_std)
        else:
            by_group = slow_group_advantages(groups, algo.adv, "none")
            dropped = [algo.max_gen_batches > 1 and len(set(t)) == 1 for t in tasks]
            by_group = [[0.0] * size if d or len(set(g)) == 1 else a for a, g, d in
                        zip(by_group, groups, dropped, strict=True)]  # fmt: skip
            std = statistics.stdev(itertools.chain.from_iterable(by_group))
            std = 1.0 if same and algo.kl_in == "reward" else std
            by_group = [[a / std if std > 1e-9 else 0.0 for a in g] for g in by_group]
        by_group = [[0.0] * size if len(set(g)) == 1 or algo.max_gen_batches > 1 and len(set(t)) == 1 else a
                    for a, g, t in zip(by_group, groups, tasks, strict=True)]  # fmt: skip
        return [[a] * n for a, n in zip(itertools.chain.from_iterable(by_group), counts, strict=True)]
    out = []
    for r, p in zip(flat, penalties, strict=True):
        earned = [-x for x in p[:-1]] + [r - p[-1]]
        out.append(slow_gae(earned, [0.0] * len(p), [True] * len(p), 1.0, 1.0)[0])
    if algo.effective_norm_std == "batch":
        used = list(itertools.chain.from_iterable(a for a, c in zip(out, counted, strict=True) if c))
        mean, std = statistics.fmean(used or [0.0]), statistics.stdev(used) if len(used) > 1 else 0.0
        std = 1.0 if same and algo.kl_in == "reward" else std
        out = [[(a - mean) / std if std > 1e-9 else 0.0 for a in response] for response in out]
    return out


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_compute_advantages_equals_the_formulas(data):
    """This covers group methods and REINFORCE++, KL in the reward or not, truncated responses and dynamic sampling."""
    n_prompts, size = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    adv = data.draw(st.sampled_from([*GROUPED, "reinforce++"]))
    kl_in = data.draw(st.sampled_from(["loss", "reward"]))
    norm_std = data.draw(st.sampled_from(["batch", "none"] + ["group"] * (adv in GROUPED and kl_in == "loss")))
    kl = data.draw(st.sampled_from(grpo.KL_ESTIMATORS))
    algo = Algorithm(adv=adv, norm_std=norm_std, group_size=size, kl_coef=0.1, kl=kl,
                     kl_in=kl_in, max_gen_batches=data.draw(st.sampled_from([1, 3])),
                     truncated=data.draw(st.sampled_from(["keep", "mask"])))  # fmt: skip
    choices = data.draw(st.sampled_from([[0.5], [0.0, 1.0], [0.1, 0.2, 0.7]]))
    tasks = [[rng.choice(choices) for _ in range(size)] for _ in range(n_prompts)]
    rewards = [[r + rng.choice([0.0, -0.25]) * (algo.max_gen_batches > 1) for r in group] for group in tasks]
    responses = [[1] * rng.randint(1, 6) for _ in range(n_prompts * size)]
    counts = [len(r) for r in responses]
    counted = [rng.random() < 0.8 or algo.truncated == "keep" for _ in counts]
    old, ref = ([[rng.uniform(-3, 0) for _ in r] for r in responses] for _ in range(2))
    tokens = make_token_batch([written("u", [1], r) for r in responses])
    tokens.old_logps, tokens.ref_logps = (torch.tensor(list(itertools.chain.from_iterable(x))) for x in (old, ref))
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (rewards, tasks)]
    got, returns = grpo.compute_advantages(*tensors, tokens, torch.tensor(counted), algo, 0.1)
    want = slow_advantages(rewards, tasks, counts, old, ref, counted, algo, 0.1)
    assert got.dtype == torch.float64 and (returns is None) == (adv in GROUPED)
    torch.testing.assert_close(
        got, torch.tensor(list(itertools.chain.from_iterable(want))).double(), rtol=1e-4, atol=1e-5
    )

    # responses that are not packed could not have had a gradient
    reasons = ["stop" if c else "length" for c in counted]
    packed = grpo.has_gradient(tensors[0], reasons, algo)
    without_kl = Algorithm(**vars(algo) | {"kl_coef": 0.0})
    packed_without_kl = grpo.has_gradient(tensors[0], reasons, without_kl)
    unpenalised, _ = grpo.compute_advantages(*tensors, tokens, torch.tensor(counted), without_kl, 0.0)
    has_advantage = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, tokens.rollout, unpenalised.abs()) > 0
    for i, count in enumerate(counted):
        assert packed[i] == count or kl_in == "reward"  # a KL loss trains all counted responses; a KL penalty needs all
        assert packed_without_kl[i] or not (count and has_advantage[i])
        assert not packed_without_kl[i] or count
    equal = [len(set(group)) == 1 for group in rewards]
    if adv in GROUPED:
        assert not any(packed_without_kl[i] and equal[i // size] for i in range(len(counts)))
    with_bonus = grpo.has_gradient(tensors[0], reasons, Algorithm(**vars(without_kl) | {"entropy_coef": 0.1}))
    assert with_bonus == counted


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("turns", [None, [0.0, -0.5, 0.0, 0.25, 2.0, 0.0, 0.0, 0.125, 0.0, 0.0, 0.5]])
def test_advantages_with_a_critic_are_gae_over_responses_of_any_length(turns, kl_coef):
    """A turn's reward is earned at its token, and the rest of the reward at the last token."""
    algo = Algorithm(adv="gae", group_size=2, gamma=0.9, lam=0.8, kl_coef=kl_coef, kl_in="reward")
    rewards = [[1.0, 0.0], [0.25, 0.5]]
    counts = [3, 1, 5, 2]
    counted = [True, True, False, True]
    tokens = make_token_batch([written("u", [1], [1] * n) for n in counts])
    values = torch.randn(sum(counts), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens.values, tokens.old_logps, tokens.ref_logps = values, -values.abs(), -0.5 * values.abs() - 0.1
    tokens.turn_rewards = None if turns is None else torch.tensor(turns)
    advantages, returns = [], []
    turn_rewards = torch.tensor(turns or [0.0] * sum(counts)).split(counts)
    for r, v, by_turn in zip(itertools.chain.from_iterable(rewards), values.split(counts), turn_rewards, strict=True):
        earned = [x - kl_coef * slow_kl(-abs(y), -0.5 * abs(y) - 0.1, "k3")
                  for x, y in zip(by_turn.tolist(), v.tolist(), strict=True)]  # fmt: skip
        earned[-1] += r - sum(by_turn.tolist())
        a, own_returns = slow_gae(earned, v.tolist(), [True] * len(v), 0.9, 0.8)
        advantages.append(a)
        returns += own_returns
    used = list(itertools.chain.from_iterable(a for a, c in zip(advantages, counted, strict=True) if c))
    mean, std = statistics.fmean(used), statistics.stdev(used)
    want = [(a - mean) / std for a in itertools.chain.from_iterable(advantages)]
    r = torch.tensor(rewards, dtype=torch.float64)
    got = grpo.compute_advantages(r, r, tokens, torch.tensor(counted), algo, kl_coef)
    torch.testing.assert_close(got[0], torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got[1], torch.tensor(returns, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert grpo.has_gradient(r, ["stop", "stop", "length", "stop"], algo) == [True] * 4  # all values are needed
    tokens.values = None
    with pytest.raises(AttributeError):
        grpo.compute_advantages(r, r, tokens, torch.tensor(counted), algo, 0.0)


# KL, values, penalties ------------------------------------------------------------------------------------------------


def test_kl_estimators_equal_their_formulas_and_k1_and_k3_are_unbiased():
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = (p.exp() * (p - q)).sum()
    for kind in grpo.KL_ESTIMATORS:
        for a, b, got in zip(p.tolist(), q.tolist(), kl(p, q, kind).tolist(), strict=True):
            assert got == pytest.approx(slow_kl(a, b, kind), abs=1e-14)
        mean = (p.exp() * kl(p, q, kind)).sum()  # over the policy's own samples
        assert abs(mean - exact) < 1e-12 if kind in ("k1", "k3") else abs(mean - exact) > 1e-3
    # As a loss on policy, k2 has the expected gradient of the KL itself, and k1 has none
    logits = p.clone().requires_grad_()
    logp = logits.log_softmax(0)
    true = torch.autograd.grad((logp.exp() * (logp - q)).sum(), logits, retain_graph=True)[0]
    for kind, expected in (("k2", true), ("k1", torch.zeros(5))):
        got = torch.autograd.grad((logp.detach().exp() * kl(logp, q, kind)).sum(), logits, retain_graph=True)[0]
        torch.testing.assert_close(got, expected.double(), rtol=1e-9, atol=1e-12)


def test_the_adaptive_kl_coefficient_follows_its_formula():
    assert adapt_kl_coef(0.1, 6.0, 6.0, 256, 10000) == 0.1
    assert adapt_kl_coef(0.1, 6.6, 6.0, 100, 1000) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert adapt_kl_coef(0.1, 60.0, 6.0, 100, 1000) == pytest.approx(0.1 * (1 + 0.2 * 0.1))  # bounded
    assert adapt_kl_coef(0.1, 0.0, 6.0, 100, 1000) == pytest.approx(0.1 * (1 - 0.2 * 0.1))


def test_rounding_errors_do_not_count_as_clipping():
    """In fp32, old + (value - old) may differ from value."""
    old = torch.linspace(-3, 3, 1000)
    value = old + 0.15 * torch.sin(37 * old)
    assert value_loss(value, old, value + 1e-6, 0.2)[1].sum() == 0
    assert value_loss(old + 0.3, old, old + 1.0, 0.2)[1].all()


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_and_gradient_equal_the_definition(clip):
    rng = random.Random(1)
    old, ret = [rng.gauss(0, 1) for _ in range(80)], [rng.gauss(0, 1) for _ in range(80)]
    value = [v + rng.gauss(0, 0.3) for v in old]

    def slow(v, o, r):
        if clip is None:
            return 0.5 * (v - r) ** 2
        return 0.5 * max((v - r) ** 2, (min(max(v, o - clip), o + clip) - r) ** 2)

    x = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    loss, clipped = value_loss(x, torch.tensor(old, dtype=torch.float64), torch.tensor(ret, dtype=torch.float64), clip)
    loss.sum().backward()
    for i, (v, o, r) in enumerate(zip(value, old, ret, strict=True)):
        assert loss[i].item() == pytest.approx(slow(v, o, r), abs=1e-12)
        assert abs((slow(v + 1e-6, o, r) - slow(v - 1e-6, o, r)) / 2e-6 - x.grad[i].item()) < 1e-6
    assert clipped.sum() == 0 if clip is None else 5 < clipped.sum() < 75


def test_the_overlong_penalty_equals_its_formula():
    for n in range(1, 30):  # the three cases as published, L_max 20 and L_cache 4
        assert overlong_penalty(n, 20) == (0 if n <= 16 else (16 - n) / 4 if n <= 20 else -1)


# Presets --------------------------------------------------------------------------------------------------------------


def parse_algorithm(*flags):
    return train.parse_args(["--model", "-", "--data", "-", "--out", "-", "--steps", "1", *flags]).algo


def test_presets_resolve_and_flags_override_them():
    core = {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce++", "ppo"}
    assert core < set(grpo.PRESETS)
    for name, changes in grpo.PRESETS.items():
        algo = parse_algorithm("--algo", name)
        if name == "opd":
            algo = replace(algo, teacher="t")
            changes = changes | {"teacher": "t"}
        assert vars(algo) == vars(Algorithm(algo=name, **changes)) and algo.effective_norm_std in grpo.NORM_STD
        algo.check()
    assert (
        parse_algorithm("--algo", "ppo").update_epochs == 4
        and parse_algorithm("--algo", "ppo", "--update-epochs", "2").update_epochs == 2
    )
    assert parse_algorithm("--algo", "dr_grpo").effective_norm_std == "none"
    assert parse_algorithm("--algo", "dr_grpo", "--adv", "grpo").effective_norm_std == "group"
    assert parse_algorithm("--algo", "reinforce++", "--kl-coef", "0").kl_coef == 0  # 0 is a setting, not "not given"
