"""The policy head in plain torch and in Triton, compared with float64 definitions.   pytest tests/test_kernels.py

On a CPU the Triton kernels run in Triton's interpreter (see conftest.py); on a GPU they are compiled.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import grpo
import kernels
from grpo import Algorithm, PolicyLoss
from kernels import fused_policy_loss, linear_logprob, resolve_kernel
from packing import TokenBatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def in_double(tokens):
    """Return a TokenBatch with its floating-point columns in float64."""
    return TokenBatch(**{name: x.double() if x.is_floating_point() else x for name, x in tokens.columns().items()})


def reference(hidden, weight, targets, temperature, banned):
    """Return log-probabilities and entropies by their definitions, from all logits at once, in float64."""
    logits = hidden.double() @ weight.double().t() / temperature
    if banned is not None:
        keep = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
        keep[banned] = False
        logits = logits.masked_fill(~keep, -torch.inf)
    logp = logits.log_softmax(-1)
    p = logp.exp()
    entropy = -(p * logp.masked_fill(p == 0, 0.0)).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def case(n, h, v, scale=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=g) * scale / h**0.5
    weight = torch.randn(v, h, generator=g)
    targets = torch.randint(0, v - 5, (n,), generator=g)
    coefficients = torch.randn(2, n, generator=g)
    return tuple(x.to(DEVICE) for x in (hidden, weight, targets, *coefficients))


def close(got, want, tolerance=1e-5):
    """Assert that both are equal within `tolerance`, after scaling so that the largest wanted entry is at most 1."""
    size = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    torch.testing.assert_close(got.double() / size, want.double() / size, rtol=0, atol=tolerance)


def small_blocks(monkeypatch, rows, vocab):
    """Set the block size to `rows` rows, and the tile size to a third of the vocabulary, rounded down."""
    monkeypatch.setattr(kernels, "CPU_BLOCK_ELEMENTS", rows * vocab)
    monkeypatch.setattr(kernels, "CPU_TILE_ELEMENTS", rows * (vocab // 3))
    monkeypatch.setattr(kernels, "GPU_BLOCK_ROWS", rows)
    monkeypatch.setattr(kernels, "GPU_TILE_COLUMNS", vocab // 3)


# --- linear_logprob ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("n,h,v", [(1, 4, 7), (5, 16, 33), (40, 32, 1001), (0, 8, 50)])
@pytest.mark.parametrize("temperature,ban", [(1.0, False), (0.7, True)])
def test_values_and_gradients_equal_float64(kernel, n, h, v, temperature, ban, monkeypatch):
    small_blocks(monkeypatch, 7, v)  # several blocks, of which the last is smaller
    hidden, weight, targets, g1, g2 = case(n, h, v, scale=2.0)
    banned = torch.tensor([v - 1, v - 3], device=DEVICE) if ban else None
    results = []
    for exact in (False, True):
        dtype = torch.float64 if exact else torch.float32
        x, w = (t.detach().to(dtype, copy=True).requires_grad_() for t in (hidden, weight))
        logp, entropy = (
            reference(x, w, targets, temperature, banned)
            if exact
            else linear_logprob(x, w, targets, temperature, banned, kernel)
        )
        (logp @ g1.to(dtype) + entropy @ g2.to(dtype)).backward()
        results.append((logp.detach(), entropy.detach(), x.grad, w.grad))
    for ours, want in zip(*results, strict=True):
        close(ours, want)
    if ban and n:
        assert results[0][3][banned].abs().max() == 0  # tokens that cannot be sampled get no gradient


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_gradients_by_finite_differences(kernel):
    hidden, weight, targets, g1, g2 = case(4, 8, 11, scale=3.0)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()

    def loss(x, w):
        logp, entropy = reference(x, w, targets, 1.3, None)
        return logp @ g1.double() + entropy @ g2.double()

    logp, entropy = linear_logprob(hidden, weight, targets, 1.3, kernel=kernel)
    (logp @ g1 + entropy @ g2).backward()
    step = 1e-5
    for tensor, position in [(hidden, (1, 2)), (hidden, (3, 0)), (weight, (0, 1)), (weight, (10, 4))]:
        sides = []
        for sign in (1, -1):
            moved = tensor.detach().double().clone()
            moved[position] += sign * step
            sides.append(loss(*((moved, weight) if tensor is hidden else (hidden, moved))).item())
        assert abs((sides[0] - sides[1]) / (2 * step) - tensor.grad[position].item()) < 1e-5


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("shift", [-3000.0, 3000.0])
def test_rows_of_very_large_and_very_negative_logits(kernel, shift, monkeypatch):
    hidden, weight, targets, g1, g2 = case(6, 7, 40)
    hidden = torch.cat([hidden, torch.ones(6, 1, device=DEVICE)], dim=1).requires_grad_()
    weight = torch.cat([weight, torch.full((40, 1), shift, device=DEVICE)], dim=1)
    banned = torch.tensor([36], device=DEVICE)
    want = reference(hidden, weight, targets, 1.0, banned)
    ours = linear_logprob(hidden, weight, targets, 1.0, banned, kernel)
    for a, b in zip(ours, want, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a.double(), b, rtol=0, atol=5e-3)  # fp32 logits of 3000 have errors of 2e-4
    (ours[0] @ g1 + ours[1] @ g2).backward()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_rows_with_a_certain_token_have_no_entropy_and_no_gradient(kernel, monkeypatch):
    """One logit is 300 above all others, so its p is exactly 1 and all others underflow."""
    monkeypatch.setattr(kernels, "CPU_BLOCK_ELEMENTS", 49)  # less than a row; a block still has one row
    hidden = torch.zeros(3, 8, device=DEVICE)
    hidden[:, 0] = 300.0
    weight = torch.zeros(50, 8, device=DEVICE)
    weight[7, 0] = 1.0
    hidden.requires_grad_()
    targets = torch.tensor([7, 7, 3], device=DEVICE)
    head = kernels.HEAD_CLASSES[kernel](hidden, weight, targets, 1.0, None, (False, False))
    assert len(head.blocks()) == (3 if DEVICE.type == "cpu" else 1)
    logp, entropy = linear_logprob(hidden, weight, targets, kernel=kernel)
    assert logp.tolist() == pytest.approx([0.0, 0.0, -300.0]) and entropy.tolist() == [0.0, 0.0, 0.0]
    (logp[:2].sum() + entropy.sum()).backward()
    assert hidden.grad.abs().max() == 0


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_a_banned_target_has_no_probability(kernel, monkeypatch):
    small_blocks(monkeypatch, 3, 48)
    hidden, weight, targets, *_ = case(5, 8, 48)
    targets[[1, 4]] = torch.tensor([2, 47], device=DEVICE)
    banned = torch.cat([torch.arange(16, device=DEVICE), torch.tensor([47], device=DEVICE)])  # all of the first tile
    logp, entropy = linear_logprob(hidden, weight, targets, 1.0, banned, kernel)
    want = reference(hidden, weight, targets, 1.0, banned)
    assert (logp == -torch.inf).tolist() == (want[0] == -torch.inf).tolist() and logp[4] == logp[1] == -torch.inf
    close(logp.exp(), want[0].exp())
    close(entropy, want[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_gradients_overwrite_the_logits(dtype):
    """On a GPU with 16-bit inputs, dz overwrites the fp32 logits that it is computed from, in half of their memory."""
    hidden, weight, targets, g1, g2 = case(5, 4, 300)
    head = kernels._TritonHead(hidden.to(dtype), weight.to(dtype), targets, 0.9, None, (False, False))
    head.statistics(slice(0, 5))
    logits = head.z_RV.clone().double().requires_grad_()
    logp = (logits / 0.9).log_softmax(-1)
    (logp.gather(1, targets[:, None])[:, 0] @ g1.double() - (logp.exp() * logp).sum(-1) @ g2.double()).backward()
    live = torch.tensor([0, 4, 2], device=DEVICE)  # row 1 has no gradient, so row 4 takes its place
    ((columns, dz),) = head.logit_gradients(live, g1[live], g2[live])
    assert head.z_RV.stride() == (320, 1)  # aligned, and hardly wider than the vocabulary
    assert dz.data_ptr() == head.z_RV.data_ptr() and dz.dtype == dtype and dz.shape == (3, 300)
    assert range(300)[columns] == range(300)
    torch.testing.assert_close(dz, logits.grad[live].to(dtype), rtol=2**-7, atol=1e-6)


def test_live_rows_are_compacted_in_place():
    for pattern in range(2**6):
        live = torch.tensor([bool(pattern >> i & 1) for i in range(6)], device=DEVICE)
        source = kernels._compact(live).tolist()
        assert sorted(source) == live.nonzero()[:, 0].tolist()
        for place, row in enumerate(source):  # no row is read after it was overwritten
            assert row == place or row >= len(source)


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_a_frozen_weight_gets_no_gradient_and_runs_repeat_bitwise(kernel):
    hidden, weight, targets, g1, g2 = case(20, 8, 140)
    tokens = tokens_of(g1, g2.abs())
    runs = []
    for _ in range(2):
        x, y = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
        logp, entropy = linear_logprob(x, weight, targets, kernel=kernel)
        (logp @ g1 + entropy @ g2).backward()
        fused = fused_policy_loss(y, weight, targets, PolicyLoss(Algorithm(entropy_coef=0.1)), tokens, kernel=kernel)
        fused[0].backward()
        runs.append([logp, entropy, x.grad, y.grad, *fused])
    assert weight.grad is None and all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("large", [False, True])
def test_bfloat16_inputs_are_ten_times_closer_than_bfloat16_logits(large):
    """Compare values, and gradients before their rounding to bfloat16, which is the same for both."""
    hidden, weight, targets, g1, g2 = case(64, 128, 2000, scale=8.0 if large else 3.0)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    exact = reference(hidden, weight, targets, 1.0, None)
    ours = linear_logprob(hidden, weight, targets)
    logits = (hidden @ weight.t()).requires_grad_()
    logp = logits.log_softmax(-1)
    rough = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    for a, b, want in zip(ours, rough, exact, strict=True):
        assert (a.double() - want).abs().mean() * 10 < (b.double() - want).abs().mean()

    x, w = (t.double().requires_grad_() for t in (hidden, weight))
    (reference(x, w, targets, 1.0, None)[0] @ g1.double()).backward()
    y, v = (t.float().requires_grad_() for t in (hidden, weight))  # the same numbers; fp32 gradients are not rounded
    (linear_logprob(y, v, targets)[0] @ g1).backward()
    (rough[0].float() @ g1).backward()
    dz = logits.grad.double()
    for a, b, want in [(y.grad, dz @ weight.double(), x.grad), (v.grad, dz.t() @ hidden.double(), w.grad)]:
        assert (a.double() - want).norm() * 10 < (b - want).norm()
    y, v = (t.clone().requires_grad_() for t in (hidden, weight))
    (linear_logprob(y, v, targets)[0] @ g1).backward()
    for a, want in [(y.grad, x.grad), (v.grad, w.grad)]:
        assert a.dtype == torch.bfloat16
        if DEVICE.type == "cpu":  # rounded once, at the end; on a GPU also dz
            torch.testing.assert_close(a, want.bfloat16(), rtol=2**-7, atol=want.abs().max().item() * 1e-5)
        else:
            assert (a.double() - want).norm() < 0.01 * want.norm()


# --- fused_policy_loss ------------------------------------------------------------------------------------------------


def policy_loss_of(kl_coef=0.0, **settings):
    """Return a policy loss, off policy (update_epochs=2) by default."""
    return PolicyLoss(Algorithm(**{"update_epochs": 2, "kl_coef": kl_coef} | settings), kl_coef)


LOSSES = {
    "clip": policy_loss_of(clip_low=0.1, clip_high=0.15),
    "clip, dual": policy_loss_of(dual_clip=1.5),
    "clip, k1, entropy": policy_loss_of(kl="k1", kl_coef=0.3, entropy_coef=0.2),
    "cispo, k2": policy_loss_of(loss="cispo", clip_low=0.3, clip_high=0.2, kl="k2", kl_coef=0.5),
    "sapo, k3": policy_loss_of(loss="sapo", kl="k3", kl_coef=0.4),
    "reinforce, entropy": policy_loss_of(loss="reinforce", entropy_coef=-0.1),
    "clip, tis": policy_loss_of(kl="k3", kl_coef=0.3, tis_cap=1.1),
    "reinforce, tis mask": policy_loss_of(loss="reinforce", tis_cap=1.2, ratio_mask="0.9,1.15", entropy_coef=0.1),
    "gspo": policy_loss_of(loss="gspo", clip_low=0.05, clip_high=0.05, entropy_coef=0.1),
}


def tokens_of(advantages, weights=None, rollout=None, **columns):
    """Return a TokenBatch on the device."""
    n = len(advantages)
    rollout = torch.zeros(n, dtype=torch.long) if rollout is None else rollout
    weights = torch.ones(n) if weights is None else weights
    logps = columns.pop("rollout_logps", torch.zeros(n))
    tokens = TokenBatch(rollout, logps, torch.zeros(n), weights, advantages=advantages, **columns)
    return tokens.to(DEVICE)


def columns(logp, seed=1, lengths=(3, 9, 1, 2, 2, 17, 5)):
    """Return a TokenBatch of 39 tokens, in responses shorter and longer than a block of 7 rows. A third of the tokens
    have weight 0."""
    g = torch.Generator().manual_seed(seed)
    n = len(logp)
    weights = torch.rand(n, generator=g) * (torch.arange(n) % 3 > 0)
    rollout = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    advantages = torch.randn(n, generator=g)
    near = {}
    for name in ("old_logps", "ref_logps", "rollout_logps"):
        near[name] = logp.cpu().float() + 0.3 * torch.randn(n, generator=g)
    return tokens_of(advantages, weights, rollout, **near)


# Kernels do not depend on the loss. Triton's interpreter is slow, so Triton runs with only one loss of each kind:
# without and with gradients of the entropy, and losses that couple tokens, one of which leaves out responses.
EACH_LOSS = [("torch", name) for name in LOSSES]
EACH_LOSS += [("triton", name) for name in ("clip", "clip, k1, entropy", "reinforce, tis mask", "gspo")]


@pytest.mark.parametrize("kernel,name", EACH_LOSS)
@pytest.mark.parametrize("temperature,ban,on_policy", [(1.0, False, True), (0.7, True, False)])
def test_fused_loss_and_gradients_equal_float64(name, kernel, temperature, ban, on_policy, monkeypatch):
    loss, (n, v) = LOSSES[name], (39, 333)
    if on_policy:
        loss = replace(loss, algo=replace(loss.algo, update_epochs=1))
    small_blocks(monkeypatch, 7, v)
    hidden, weight, targets, *_ = case(n, 16, v, scale=2.0)
    banned = torch.tensor([v - 1, v - 3], device=DEVICE) if ban else None
    x, w = (t.double().requires_grad_() for t in (hidden, weight))
    logp, entropy = reference(x, w, targets, temperature, banned)
    tokens = columns(logp.detach())
    if on_policy:
        tokens.old_logps = None  # not used on policy
    exact = in_double(tokens)
    want = loss(logp, entropy, exact)[0].sum()
    (3.0 * want).backward()

    y, u = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total, got_logp, got_entropy = fused_policy_loss(y, u, targets, loss, tokens, temperature, banned, kernel)
    assert not got_logp.requires_grad and not got_entropy.requires_grad
    (3.0 * total).backward()
    for a, b in [(total, want), (got_logp, logp), (got_entropy, entropy), (y.grad, x.grad), (u.grad, w.grad)]:
        close(a.detach(), b.detach())
    frozen = hidden.clone().requires_grad_()
    (3.0 * fused_policy_loss(frozen, weight, targets, loss, tokens, temperature, banned, kernel)[0]).backward()
    assert torch.equal(frozen.grad, y.grad)
    with torch.no_grad():
        without_grad = fused_policy_loss(y, u, targets, loss, tokens, temperature, banned, kernel)
    close(without_grad[0], want.detach())


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_rows_without_gradient_are_left_out_of_the_products(kernel, monkeypatch):
    small_blocks(monkeypatch, 16, 198)
    hidden, weight, targets, advantage, _ = case(40, 8, 198)
    share = torch.ones(40, device=DEVICE)
    share[torch.tensor([0, 1, 5, 15, *range(16, 32), 38])] = 0.0
    rows = []
    product = kernels._matmul

    def counting_matmul(out, a, b, add=False):
        if add:  # only products for gradients add
            rows.append(len(b))
        product(out, a, b, add)

    monkeypatch.setattr(kernels, "_matmul", counting_matmul)
    weight.requires_grad_()
    results = []
    for keep in (slice(None), share > 0):
        x = hidden.clone().requires_grad_()
        tokens = tokens_of(advantage[keep], share[keep])
        fused_policy_loss(x[keep], weight, targets[keep], PolicyLoss(Algorithm()), tokens, kernel=kernel)[0].backward()
        results.append(x.grad)
        wide = [n for n in rows if n <= 16]  # rows from which the weight's gradient is computed
        assert sum(wide) == 19 * (3 if kernel == "torch" else 1) * (1 if keep == slice(None) else 2), rows
    assert 0 not in rows  # a block without such rows has no product at all
    close(*results)
    assert results[0][share == 0].abs().max() == 0


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("train_hidden,train_weight", [(True, True), (True, False), (False, True), (False, False)])
def test_frozen_inputs_cost_no_product(train_hidden, train_weight, kernel, monkeypatch):
    small_blocks(monkeypatch, 10, 60)
    hidden, weight, targets, advantage, _ = case(20, 8, 60)
    want = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    tokens = tokens_of(advantage)
    fused_policy_loss(*want, targets, PolicyLoss(Algorithm()), tokens, kernel=kernel)[0].backward()
    products = []
    product = kernels._matmul

    def counting_matmul(out, a, b, add=False):
        products.append(out.shape)
        product(out, a, b, add)

    monkeypatch.setattr(kernels, "_matmul", counting_matmul)
    x, w = hidden.clone().requires_grad_(train_hidden), weight.clone().requires_grad_(train_weight)
    total = fused_policy_loss(x, w, targets, PolicyLoss(Algorithm()), tokens, kernel=kernel)[0]
    tiles = 2 * (3 if kernel == "torch" else 1)  # blocks times tiles
    assert len(products) == tiles * (1 + train_hidden + train_weight)
    if train_hidden or train_weight:
        total.backward()
    for got, exact, trained in [(x, want[0], train_hidden), (w, want[1], train_weight)]:
        assert torch.equal(got.grad, exact.grad) if trained else got.grad is None


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_sixteen_bit_inputs_have_fp32_sums_and_sixteen_bit_gradients(kernel, monkeypatch):
    small_blocks(monkeypatch, 16, 500)
    hidden, weight, targets, advantage, _ = case(39, 64, 500, scale=3.0)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    x, w = (t.double().requires_grad_() for t in (hidden, weight))
    logp, entropy = reference(x, w, targets, 1.0, None)
    (-logp @ advantage.double()).backward()
    y, u = (t.clone().requires_grad_() for t in (hidden, weight))
    tokens = tokens_of(advantage)
    total, got_logp, got_entropy = fused_policy_loss(
        y, u, targets, PolicyLoss(Algorithm(loss="reinforce")), tokens, kernel=kernel
    )
    total.backward()
    assert total.dtype == got_logp.dtype == torch.float32
    close(got_logp, logp.detach())
    close(got_entropy, entropy.detach())
    rounding = 2**-9 if kernel == "torch" and DEVICE.type == "cpu" else 2**-7  # of the result, or also of dz
    for got, exact in [(y.grad, x.grad), (u.grad, w.grad)]:
        assert got.dtype == torch.bfloat16
        assert (got.double() - exact).norm() < rounding * exact.norm()


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_no_tokens_and_no_gradient(kernel):
    hidden, weight, targets, *_ = case(0, 8, 50)
    x = hidden.requires_grad_()
    total, logp, _ = fused_policy_loss(
        x, weight, targets, PolicyLoss(Algorithm()), tokens_of(torch.ones(0)), kernel=kernel
    )
    total.backward()
    assert total.item() == 0.0 and logp.shape == (0,) and x.grad.shape == (0, 8)
    hidden, weight, targets, *_ = case(6, 8, 50)
    x = hidden.requires_grad_()
    fused_policy_loss(x, weight, targets, PolicyLoss(Algorithm()), tokens_of(torch.zeros(6)), kernel=kernel)[
        0
    ].backward()
    assert x.grad.abs().max() == 0


# --- One definition of the loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel,name", EACH_LOSS)
def test_an_edited_policy_loss_trains_as_edited(name, kernel, monkeypatch):
    """Editing grpo.policy_loss is enough: ten times the loss gives ten times the gradient with every kernel."""
    loss = LOSSES[name]
    loss = PolicyLoss(replace(loss.algo, entropy_coef=0.0))  # without KL and entropy, which it does not compute
    hidden, weight, targets, *_ = case(39, 16, 333, scale=2.0)
    tokens = columns(reference(hidden, weight, targets, 1.0, None)[0])

    def edited(*args, **kwargs):
        loss_K, indicators = policy_loss(*args, **kwargs)
        return 10.0 * loss_K, indicators

    policy_loss = grpo.policy_loss
    results = []
    for definition in (policy_loss, edited):
        monkeypatch.setattr(grpo, "policy_loss", definition)
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        total = fused_policy_loss(x, w, targets, loss, tokens, kernel=kernel)[0]
        total.backward()
        results.append((total.detach(), x.grad, w.grad))
    for before, after in zip(*results, strict=True):
        assert before.abs().max() > 0
        torch.testing.assert_close(after, 10.0 * before, rtol=1e-4, atol=1e-5)  # of gradients up to 10


class Squared:
    """A per-token loss that kernels.py does not know."""

    per_token = True

    def __call__(self, logp_R: torch.Tensor, entropy_R: torch.Tensor, tokens: TokenBatch) -> tuple[torch.Tensor]:
        return (tokens.weights * ((logp_R - tokens.old_logps) ** 2 + 0.1 * logp_R * entropy_R),)


class SquaredMean:
    """A loss that couples the tokens of a sequence: the square of their mean."""

    per_token = False

    def __call__(self, logp_R: torch.Tensor, entropy_R: torch.Tensor, tokens: TokenBatch) -> tuple[torch.Tensor]:
        _, index_R, count = tokens.rollout.unique_consecutive(return_inverse=True, return_counts=True)
        sums = torch.zeros_like(logp_R[: len(count)]).index_add(0, index_R, logp_R - tokens.old_logps)
        return (tokens.weights * (sums / count)[index_R] ** 2,)


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("loss", [Squared(), SquaredMean()], ids=["squared", "squared mean"])
def test_a_new_loss_trains_under_every_kernel(loss, kernel, monkeypatch):
    small_blocks(monkeypatch, 7, 333)  # sequences shorter and longer than a block
    hidden, weight, targets, *_ = case(39, 16, 333, scale=2.0)
    banned = torch.tensor([330, 332], device=DEVICE)
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp, entropy = reference(x, w, targets, 0.7, banned)
    tokens = columns(logp.detach())
    exact = in_double(tokens)
    want = loss(logp, entropy, exact)[0].sum()
    want.backward()
    y, u = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total, *_ = fused_policy_loss(y, u, targets, loss, tokens, 0.7, banned, kernel)
    total.backward()
    for got, exactly in [(total.detach(), want.detach()), (y.grad, x.grad), (u.grad, w.grad)]:
        close(got, exactly)


def test_a_loss_that_couples_tokens_gets_as_many_whole_rollouts_as_fit_into_a_block():
    blocks = [slice(start, min(start + 7, 39)) for start in range(0, 39, 7)]
    groups = kernels._row_groups(SquaredMean(), columns(torch.zeros(39)), blocks)
    assert [(group.start, group.stop) for group in groups] == [(0, 3), (3, 12), (12, 17), (17, 34), (34, 39)]


def test_a_loss_that_couples_tokens_refuses_rollouts_whose_tokens_are_not_contiguous(monkeypatch):
    small_blocks(monkeypatch, 2, 50)
    hidden, weight, targets, *_ = case(4, 8, 50)
    tokens = tokens_of(torch.ones(4), rollout=torch.tensor([0, 1, 0, 1]))
    tokens.old_logps = torch.zeros(4)
    with pytest.raises(AssertionError, match="the rows of a rollout are not contiguous"):
        fused_policy_loss(hidden, weight, targets, SquaredMean(), tokens)


def test_a_loss_must_say_whether_it_couples_tokens():
    """per_token has no default, because a loss that couples tokens would be silently wrong on parts of a sequence."""
    hidden, weight, targets, *_ = case(3, 8, 50)
    with pytest.raises(AttributeError, match="per_token"):
        fused_policy_loss(hidden.requires_grad_(), weight, targets, lambda logp, *_: (logp,), tokens_of(torch.ones(3)))


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_a_second_backward_is_refused(kernel):
    hidden, weight, targets, *_ = case(3, 8, 50)
    hidden.requires_grad_()
    total = fused_policy_loss(
        hidden, weight, targets, PolicyLoss(Algorithm()), tokens_of(torch.ones(3)), kernel=kernel
    )[0]
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="second backward"):
        total.backward()


# --- Choice of the kernel, errors, compilation ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change,match",
    [
        (dict(weight_VH=torch.zeros(7, 5)), "\\(7, 5\\) torch.float32"),
        (dict(targets_T=torch.zeros(3, dtype=torch.long)), "\\(3,\\)"),
        (dict(weight_VH=torch.zeros(7, 4, dtype=torch.bfloat16)), "bfloat16"),
        (dict(temperature=0.0), "temperature 0.0"),
    ],
)
def test_bad_arguments_are_named(change, match):
    targets = torch.zeros(2, dtype=torch.long)
    good = dict(hidden_TH=torch.zeros(2, 4), weight_VH=torch.zeros(7, 4), targets_T=targets)
    with pytest.raises(ValueError, match=match):
        linear_logprob(**good | change)


def test_kernels_are_chosen_by_device_and_refused_where_they_cannot_run(monkeypatch):
    cpu = torch.device("cpu")
    assert resolve_kernel("auto", cpu) == "torch" and resolve_kernel("auto", torch.device("cuda")) == "triton"
    with pytest.raises(KeyError, match="cuda"):
        linear_logprob(*case(2, 4, 7)[:3], kernel="cuda")
    monkeypatch.setattr(kernels, "is_triton_interpreter", lambda: False)
    with pytest.raises(ValueError, match="--kernel triton needs a GPU"):
        resolve_kernel("triton", cpu)
    monkeypatch.setattr(kernels, "triton", None)
    assert resolve_kernel("auto", torch.device("cuda")) == "torch"
    with pytest.raises(ValueError, match="not installed"):
        resolve_kernel("triton", cpu)


COMPILE = """
import itertools, json, torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import kernels

types = dict(z="*fp32", dz="*bf16", targets="*i64", source_N="*i64", allowed="*u8", stride="i32", V="i32", scale="fp32",
             BLOCK="constexpr")
report = []
for kernel, vocab in itertools.product((kernels._statistics_kernel, kernels._gradient_kernel), (300, 9999)):
    targets = torch.zeros(1, dtype=torch.long)
    head = kernels._TritonHead(torch.zeros(1, 4), torch.zeros(vocab, 4), targets, 1.0, None, (False, False))
    known = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    source = ASTSource(kernel, known, {(kernel.arg_names.index("BLOCK"),): head.launch["BLOCK"]}, {})
    options = {"num_warps": head.launch["num_warps"], "num_stages": 3}
    built = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    report.append(len(built.asm["cubin"]))
print(json.dumps(report))
"""


def test_kernels_compile_for_hopper(tmp_path):
    """Compile to machine code, without a GPU, because Triton's interpreter accepts much that its compiler rejects."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(size > 1000 for size in json.loads(done.stdout.splitlines()[-1]))
