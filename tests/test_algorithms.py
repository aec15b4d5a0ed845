"""Advantages and losses against the published formulas in plain loops and float64.   pytest tests/test_algorithms.py"""

import itertools
import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from grpo import PolicyLoss, adapt_kl, gae, group_advantages, kl, overlong_penalty, policy_loss, resolve_preset, value_loss, whiten
from kernels import fused_policy_loss

# Advantages -----------------------------------------------------------------------------------------------------------


def published(rewards, method, norm_std):
    """Lists of lists in and out, as the papers have them."""
    differences = []
    for values in rewards:
        mean = statistics.fmean(values)
        for i, x in enumerate(values):
            others = [v for j, v in enumerate(values) if j != i]
            differences.append({"grpo": x - mean, "dr_grpo": x - mean, "reinforce++": x,
                                "rloo": x - statistics.fmean(others)}[method])
    size, spread = len(rewards[0]), statistics.stdev(differences)
    if norm_std == "batch":
        centre = statistics.fmean(differences) if method == "reinforce++" else 0.0
        differences = [(d - centre) / spread if spread > 1e-9 else 0.0 for d in differences]
    if norm_std == "group":
        differences = [d / (statistics.stdev(rewards[i // size]) + 1e-6) for i, d in enumerate(differences)]
    return [differences[i : i + size] for i in range(0, len(differences), size)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-12, 12).map(lambda x: x / 4), min_size=4, max_size=4), min_size=2, max_size=5), st.floats(-5, 5))
def test_advantages_equal_the_formulas_and_ignore_a_shift_of_a_group(rewards, shift):
    r = torch.tensor(rewards, dtype=torch.float64)
    moved = r.clone()
    moved[0] += shift  # of one group alone
    for method, norm_std in itertools.product((*grpo.GROUP_METHODS, "reinforce++"), (None, "group", "batch", "none")):
        got = group_advantages(r, method, norm_std)
        want = torch.tensor(published(rewards, method, norm_std or grpo.NORM_STD[method]), dtype=torch.float64)
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        if method in grpo.GROUP_METHODS and (r[0].amax() == r[0].amin()) == (moved[0].amax() == moved[0].amin()):
            torch.testing.assert_close(group_advantages(moved, method, norm_std), got, rtol=1e-6, atol=1e-6)


def test_ranks_that_share_their_moments_get_the_whole_steps_advantages():
    r = torch.rand(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for method in ("reinforce++", "grpo", "rloo"):
        difference = group_advantages(r, method, "none")
        moments = difference.mean().item(), difference.std().item()
        parts = [group_advantages(part, method, "batch", moments) for part in (r[:1], r[1:4], r[4:])]
        torch.testing.assert_close(torch.cat(parts), group_advantages(r, method, "batch"), rtol=1e-12, atol=1e-12)


def test_equal_rewards_give_exactly_zero():
    r = torch.tensor([[0.1] * 7, [0.7] * 7, [0.1] * 6 + [0.1 + 1e-9]])
    third = r[2:].double()
    third[0, -1] += 1e-9
    assert group_advantages(third).abs().max() > 0
    # the guard is needed: without it the mean of some equal rewards is not them, and the tiny std blows the rest up
    equal = torch.tensor([[x / 100] * 7 for x in range(100)], dtype=torch.float64)
    assert ((equal - equal.mean(1, keepdim=True)) / (equal.std(1, keepdim=True) + 1e-6)).abs().max() > 0
    for method, norm_std in itertools.product(grpo.GROUP_METHODS, ("group", "batch", "none")):
        assert group_advantages(equal, method, norm_std).abs().max() == 0
        assert group_advantages(r[:2], method, norm_std).abs().max() == 0
        mixed = group_advantages(torch.cat([equal[:3], torch.eye(2, 7, dtype=torch.float64)]), method, norm_std)
        assert mixed[:3].abs().max() == 0 and mixed[3:].abs().min() > 0
    for value in (0.1, 0.3, 1e6 + 0.1):  # a step whose rewards are all equal teaches REINFORCE++ nothing either
        assert group_advantages(torch.full((3, 7), value, dtype=torch.float64), "reinforce++").abs().max() == 0


@pytest.mark.parametrize("rewards,method,match", [
    (torch.zeros(3, 1), "grpo", "G=1"), (torch.zeros(3, 1), "rloo", "G=1"), (torch.zeros(3), "grpo", "shape"),
    (torch.tensor([[0.0, float("nan")]]), "grpo", "prompt 0, sample 1 is nan"),
    (torch.tensor([[0.0], [float("inf")]]), "reinforce++", "prompt 1, sample 0 is inf"),
    (torch.zeros(1, 2), "magic", "known: grpo, dr_grpo, rloo, reinforce"),
    (torch.zeros(1, 2), "gae", "unknown method 'gae'"),
])
def test_bad_rewards_are_refused(rewards, method, match):
    with pytest.raises(ValueError, match=match):
        group_advantages(rewards, method)


def test_one_sample_is_enough_for_reinforce_plus_plus():
    got = group_advantages(torch.tensor([[1.0], [0.0]]), "reinforce++").flatten()
    assert got.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    with pytest.raises(ValueError, match="norm_std 'all'"):
        group_advantages(torch.zeros(1, 2), "grpo", "all")


def test_whitening_centres_and_scales():
    x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    w = whiten(x, x.mean().item(), x.std().item())
    assert abs(w.mean()) < 1e-12 and abs(w.std() - 1) < 1e-12
    assert whiten(torch.full((3,), 0.1), 0.1, 1e-17).tolist() == [0, 0, 0] and whiten(x[:1], 1.0, math.nan).tolist() == [0]


# GAE ------------------------------------------------------------------------------------------------------------------


def slow_gae(rewards, values, mask, gamma, lam):
    """The double sum of equation 16, over the tokens under the mask."""
    where = [t for t, m in enumerate(mask) if m]
    advantages = [0.0] * len(mask)
    for i, t in enumerate(where):
        for n, u in enumerate(where[i:]):
            following = values[where[i + n + 1]] if i + n + 1 < len(where) else 0.0
            advantages[t] += (gamma * lam) ** n * (rewards[u] + gamma * following - values[u])
    return advantages, [a + values[t] if mask[t] else 0.0 for t, a in enumerate(advantages)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**6))
def test_gae_equals_a_double_loop_and_passes_over_masked_tokens(n, gamma, lam, seed):
    rng = random.Random(seed)
    rows = [([rng.gauss(0, 1) for _ in range(n)], [rng.gauss(0, 1) for _ in range(n)], [rng.random() < 0.7 for _ in range(n)])
            for _ in range(3)]
    rewards, values, mask = (torch.tensor([row[i] for row in rows]) for i in range(3))
    got = gae(rewards, values, mask, gamma, lam)
    for b in range(3):
        want = slow_gae(rewards[b].tolist(), values[b].tolist(), rows[b][2], gamma, lam)
        for ours, exact in zip(got, want, strict=True):
            assert ours.dtype == torch.float64
            torch.testing.assert_close(ours[b], torch.tensor(exact, dtype=torch.float64), rtol=1e-9, atol=1e-9)
        one = gae(rewards[b], values[b], mask[b], gamma, lam)  # a single response, without a batch axis
        assert torch.equal(one[0], got[0][b]) and torch.equal(one[1], got[1][b])


def test_gae_known_cases():
    rewards, values, mask = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.25, 0.5]), torch.ones(3)
    assert gae(rewards, values, mask, 1.0, 1.0)[1].tolist() == [1, 1, 1]  # Monte Carlo
    assert gae(rewards, values, mask, 1.0, 0.0)[0].tolist() == [-0.25, 0.25, 0.5]  # one-step errors
    assert gae(rewards, 0 * values, mask, 0.5, 1.0)[0].tolist() == [0.25, 0.5, 1.0]  # discounted rewards-to-go
    assert gae(torch.tensor([0.0, 1.0, 9.0]), torch.zeros(3), torch.tensor([1, 1, 0]), 0.5, 1.0)[0].tolist() == [0.5, 1.0, 0.0]
    with pytest.raises(ValueError, match="must agree"):
        gae(rewards, values[:2], mask, 1.0, 1.0)


# Losses ---------------------------------------------------------------------------------------------------------------


def slow_losses(logp, old, advantage, sequence, loss, stopped=None):
    """Token losses from the papers' formulas in plain floats; `stopped` are the logp where no gradient flows."""
    out = []
    for t in range(len(logp)):
        a, low, high = advantage[t], 1 - loss.clip_low, 1 + loss.clip_high
        ratio = math.exp(logp[t] - old[t])
        if loss.kind == "gspo":
            mine = [u for u in range(len(logp)) if sequence[u] == sequence[t]]
            ratio = math.prod(math.exp(logp[u] - old[u]) for u in mine) ** (1 / len(mine))
        if loss.kind in ("clip", "gspo"):
            value = -min(ratio * a, min(max(ratio, low), high) * a)
            if loss.dual_clip is not None and a < 0:
                value = min(value, -loss.dual_clip * a)
        elif loss.kind == "cispo":
            constant = math.exp((stopped or logp)[t] - old[t])
            value = -min(max(constant, low), high) * a * logp[t]
        elif loss.kind == "sapo":
            tau = loss.sapo_tau_positive if a > 0 else loss.sapo_tau_negative
            value = -a * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
        else:
            value = -a * logp[t]
        out.append(value)
    return out


def slow_kl(logp, ref, kind):
    d = logp - ref
    return {"k1": d, "k2": 0.5 * d**2, "k3": math.exp(ref - logp) - (ref - logp) - 1, "abs": abs(d), None: 0.0}[kind]


def case(n=60, seed=0, spread=0.8):
    """logp, old, ref, advantage, weight, entropy, sequence as lists; responses of 1 to 7 tokens."""
    rng = random.Random(seed)
    logp = [rng.uniform(-3, 0) for _ in range(n)]
    sequence, number = [], 0
    while len(sequence) < n:
        sequence += [number] * rng.randint(1, 7)
        number += 1
    sequence = sequence[:n]
    by_sequence = [rng.choice([-1.5, -0.3, 0.0, 0.4, 2.0]) for _ in range(number)]
    return {
        "logp": logp, "old_logp": [x + rng.uniform(-spread, spread) for x in logp], "ref_logp": [x + rng.uniform(-1, 1) for x in logp],
        "advantage": [by_sequence[s] for s in sequence], "weight": [rng.uniform(0.1, 1) for _ in range(n)],
        "entropy": [rng.uniform(0, 2) for _ in range(n)], "sequence": sequence,
    }


LOSSES = [
    PolicyLoss(), PolicyLoss(clip_high=0.28), PolicyLoss(dual_clip=1.3),
    PolicyLoss("gspo", 0.05, 0.1), PolicyLoss("gspo", 0.05, 0.1, dual_clip=1.1), PolicyLoss("cispo", 1.0, 0.4),
    PolicyLoss("cispo", 0.3, 0.2), PolicyLoss("sapo"), PolicyLoss("sapo", sapo_tau_positive=2.0, sapo_tau_negative=3.0),
    PolicyLoss("reinforce"),
    *(PolicyLoss(kl=kind, kl_coef=0.3) for kind in grpo.KL_KINDS),
    PolicyLoss("gspo", 0.05, 0.1, kl="k3", kl_coef=0.2, entropy_coef=0.1), PolicyLoss("sapo", entropy_coef=0.05),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_loss_and_gradient_equal_the_definition(loss):
    c = case()
    tensors = {k: torch.tensor(v) if k == "sequence" else torch.tensor(v, dtype=torch.float64) for k, v in c.items()}
    logp, entropy = tensors.pop("logp").requires_grad_(), tensors.pop("entropy").requires_grad_()

    def total(at, entropy_at):
        tokens = slow_losses(at, c["old_logp"], c["advantage"], c["sequence"], loss, stopped=c["logp"])
        return [w * (x + loss.kl_coef * slow_kl(p, r, loss.kl) - loss.entropy_coef * h)
                for w, x, p, r, h in zip(c["weight"], tokens, at, c["ref_logp"], entropy_at, strict=True)]

    loss_K, indicators = loss(logp, entropy, tensors)
    torch.testing.assert_close(loss_K.detach(), torch.tensor(total(c["logp"], c["entropy"]), dtype=torch.float64), rtol=1e-12, atol=1e-12)
    loss_K.sum().backward()
    step = 1e-6
    for i in range(len(c["logp"])):
        sides = []
        for sign in (1, -1):
            moved = list(c["logp"])
            moved[i] += sign * step
            sides.append(sum(total(moved, c["entropy"])))
        assert abs((sides[0] - sides[1]) / (2 * step) - logp.grad[i].item()) < 1e-6
        expected = -loss.entropy_coef * c["weight"][i]
        assert (0.0 if entropy.grad is None else entropy.grad[i].item()) == pytest.approx(expected, abs=1e-15)
    clipped = indicators["clipped"].sum()
    assert 5 < clipped < 55 if loss.kind in ("clip", "gspo", "cispo") else clipped == 0  # both sides were exercised
    assert (indicators["kl"] >= 0).all()


def test_on_policy_every_loss_has_the_policy_gradient():
    """At ratio 1 all are the same algorithm: the gradient is -A (gspo: the response's mean of it, here the same)."""
    c = case()
    advantage, sequence = torch.tensor(c["advantage"], dtype=torch.float64), torch.tensor(c["sequence"])
    for kind in grpo.LOSSES:
        logp = torch.tensor(c["logp"], dtype=torch.float64, requires_grad=True)
        values = {"advantage": advantage, "weight": torch.ones_like(advantage), "sequence": sequence}
        PolicyLoss(kind, 0.2, 0.2)(logp, torch.zeros_like(logp), values)[0].sum().backward()
        torch.testing.assert_close(logp.grad, -advantage, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_advantage_zero_has_exactly_no_gradient_without_kl_and_entropy(loss):
    c = case() | {"advantage": [0.0] * 60}
    tensors = {k: torch.tensor(v) for k, v in c.items()}
    logp, entropy = tensors.pop("logp").requires_grad_(), tensors.pop("entropy").requires_grad_()
    loss(logp, entropy, tensors)[0].sum().backward()
    if loss.kl is None and not loss.entropy_coef:
        assert logp.grad.abs().max() == 0 and (entropy.grad is None or entropy.grad.abs().max() == 0)
    else:
        assert logp.grad.abs().max() > 0 or entropy.grad.abs().max() > 0


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_policy_head_evaluates_every_loss_in_any_blocks(loss, monkeypatch):
    """Gradients through fused_policy_loss equal those of plain autograd in float64, whole sequences or not in a block."""
    import kernels

    c, vocab, g = case(), 40, torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(60, 8, generator=g), torch.randn(vocab, 8, generator=g) / 3
    targets = torch.randint(vocab, (60,), generator=g)
    values = {k: torch.tensor(v) for k, v in c.items() if k not in ("logp", "entropy")}
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1).gather(1, targets[:, None])[:, 0]
    for name in ("old_logp", "ref_logp"):
        values[name] = (exact + torch.tensor(c[name]) - torch.tensor(c["logp"])).float()
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = (x @ w.t()).log_softmax(-1)
    entropy = -(logits * logits.exp()).sum(-1)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in values.items()}
    want = loss(logits.gather(1, targets[:, None])[:, 0], entropy, wide)[0].sum()
    want.backward()
    for block_rows in (4, 60):
        monkeypatch.setattr(kernels, "CPU_BLOCK_ELEMENTS", block_rows * vocab)
        a, b = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        total, *_ = fused_policy_loss(a, b, targets, loss, values)
        total.backward()
        torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.grad.double(), x.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(b.grad.double(), w.grad, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_sum_does_not_depend_on_how_sequences_are_split(loss):
    c = case()
    tensors = {k: torch.tensor(v) if k == "sequence" else torch.tensor(v, dtype=torch.float64) for k, v in c.items()}
    logp, entropy = tensors.pop("logp"), tensors.pop("entropy")
    whole = loss(logp, entropy, tensors)[0]
    ends = [i for i in range(1, 60) if c["sequence"][i] != c["sequence"][i - 1]]
    parts = [slice(a, b) for a, b in itertools.pairwise([0, ends[3], ends[4], ends[-1], 60])]
    split = torch.cat([loss(logp[p], entropy[p], {k: v[p] for k, v in tensors.items()})[0] for p in parts])
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert whole.abs().sum() > 1


def test_gspo_weighs_a_response_as_a_whole():
    """Equation 5 for one response of three tokens: the mean over tokens of s A is s A, and each token pushes alike."""
    logp = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -1.8, -0.5], dtype=torch.float64)
    loss, _ = policy_loss(logp, old, torch.full((3,), 2.0).double(), 0.5, 0.5, kind="gspo", sequence_K=torch.tensor([4, 4, 4]))
    (loss / 3).sum().backward()
    s = math.exp((0.1 - 0.2 + 0.0) / 3)
    assert loss.tolist() == pytest.approx([-2 * s] * 3) and logp.grad.tolist() == pytest.approx([-2 * s / 3] * 3)


def test_unknown_names_are_refused():
    one = torch.zeros(1)
    for call, match in ((lambda: policy_loss(one, one, one, kind="magic"), "known: clip, gspo, cispo, sapo, reinforce"),
                        (lambda: kl(one, one, "k4"), "known: k1, k2, k3, abs")):
        with pytest.raises(ValueError, match=match):
            call()


# KL, values, penalties ------------------------------------------------------------------------------------------------


def test_kl_estimators_equal_their_formulas_and_are_unbiased_where_they_should_be():
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = (p.exp() * (p - q)).sum()
    for kind in grpo.KL_KINDS:
        for a, b, got in zip(p.tolist(), q.tolist(), kl(p, q, kind).tolist(), strict=True):
            assert got == pytest.approx(slow_kl(a, b, kind), abs=1e-14)
        mean = (p.exp() * kl(p, q, kind)).sum()  # over the policy's own samples
        assert abs(mean - exact) < 1e-12 if kind in ("k1", "k3") else abs(mean - exact) > 1e-3
    # As a loss on policy: k2's expected gradient is that of the KL itself, k1's is nothing
    logits = p.clone().requires_grad_()
    logp = logits.log_softmax(0)
    true = torch.autograd.grad((logp.exp() * (logp - q)).sum(), logits, retain_graph=True)[0]
    for kind, expected in (("k2", true), ("k1", torch.zeros(5))):
        got = torch.autograd.grad((logp.detach().exp() * kl(logp, q, kind)).sum(), logits, retain_graph=True)[0]
        torch.testing.assert_close(got, expected.double(), rtol=1e-9, atol=1e-12)


def test_adaptive_kl_coefficient():
    assert adapt_kl(0.1, 6.0, 6.0, 256, 10000) == 0.1
    assert adapt_kl(0.1, 6.6, 6.0, 100, 1000) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert adapt_kl(0.1, 60.0, 6.0, 100, 1000) == pytest.approx(0.1 * (1 + 0.2 * 0.1))  # bounded
    assert adapt_kl(0.1, 0.0, 6.0, 100, 1000) == pytest.approx(0.1 * (1 - 0.2 * 0.1))


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


def test_overlong_penalty():
    expected = {1: 0, 16: 0, 17: -0.25, 18: -0.5, 19: -0.75, 20: -1, 25: -1}
    assert {n: overlong_penalty(n, 20, 4) for n in expected} == expected
    for n in range(1, 30):  # the three cases as published, L_max 20 and L_cache 4
        assert overlong_penalty(n, 20, 4) == (0 if n <= 16 else (16 - n) / 4 if n <= 20 else -1)


# Presets --------------------------------------------------------------------------------------------------------------


def test_presets_resolve_and_what_is_given_wins():
    assert set(grpo.PRESETS) == {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce++", "ppo"}
    for algo, changes in grpo.PRESETS.items():
        knobs = resolve_preset(algo, {})
        assert knobs.keys() == grpo.GRPO.keys() and knobs["norm_std"] in ("group", "batch", "none")
        assert {k: v for k, v in knobs.items() if k in changes} == changes
    assert resolve_preset("ppo", {})["epochs"] == 4 and resolve_preset("ppo", {"epochs": 2})["epochs"] == 2
    assert resolve_preset("dr_grpo", {})["norm_std"] == "none"
    assert resolve_preset("dr_grpo", {"adv": "grpo"})["norm_std"] == "group"
    assert resolve_preset("reinforce++", {"kl_coef": 0.0})["kl_coef"] == 0  # 0 is a setting, not "not given"
