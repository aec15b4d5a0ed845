"""The policy head: log-probability, entropy and loss of sampled tokens without ever holding all logits.

Of a token's hidden state the head makes z = hidden @ weight.T / temperature, one logit per entry of the vocabulary, and
of these p = softmax(z). What training needs are two numbers a token, and gradients through them:

    logp    = z[target] - ln sum exp(z)        dlogp/dz    = onehot(target) - p
    entropy = -sum p ln p                      dentropy/dz = -p (ln p + entropy)

`linear_logprob` returns the two, for any use; its backward makes the logits once more: four matrix products in all.
`fused_policy_loss` is given the loss, a function of the two, and makes the gradient while the logits are there: a block
of logits -> logp and entropy of its rows -> the loss, and by autograd its gradients in these vectors -> the gradient of
the logits, in their place -> the products. Three in all, two where the head is frozen, and only the first for rows
without gradient. Nothing here knows which loss it is.

What happens to a block of logits is written twice: as plain torch (_PlainHead), which is the definition and what a CPU
runs, and as Triton kernels, a program per row (_TritonHead). Nothing uses atomics or picks its launch configuration at
run time, so results repeat bit for bit. Sums are fp32, also those of 16-bit inputs.

Axes: K tokens, H hidden size, V vocabulary; R rows (tokens) of a block, N of them with a gradient; C columns of a tile.
"""

from __future__ import annotations  # Triton's annotations must not be looked up where Triton is not installed

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from errors import need

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU needs none of it
    triton = None

CPU_BLOCK_ELEMENTS = 1 << 23  # logits held at a time on a CPU: 32 MiB of fp32
CPU_TILE_ELEMENTS = 1 << 19  # of these as many as stay in the cache from one operation to the next
GPU_BLOCK_ROWS = 2048  # on a GPU, where each block reads the whole weight: 1.16 GiB of fp32 logits at V = 152,064
GPU_TILE_COLUMNS = 16384
MASKED_LOGIT = -1e30  # the logit of a banned id: exp is exactly 0, and 0 * NEVER is 0, where -inf would make a NaN
KERNELS = ("auto", "triton", "torch")


def is_triton_interpreter() -> bool:
    """Whether Triton kernels run in its interpreter, on a CPU (TRITON_INTERPRET=1 before Triton is first imported)."""
    return triton is not None and triton.knobs.runtime.interpret


def resolve_kernel(choice: str, device: torch.device) -> str:
    """Turn --kernel auto|triton|torch into the implementation of the whole run; called once, at start-up."""
    if choice == "auto":
        return "triton" if device.type == "cuda" and triton is not None else "torch"
    if choice == "triton":
        need(triton is not None, "--kernel triton: triton is not installed; pip install triton, or use --kernel torch")
        need(
            device.type == "cuda" or is_triton_interpreter(),
            f"--kernel triton needs a GPU, and this is a {device.type}; use "
            "--kernel torch (or, for tests, TRITON_INTERPRET=1: thousands of times slower)",
        )
    return choice


# ----------------------------------------------------------------------------------------------------------------------
# The two entry points


def linear_logprob(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, temperature=1.0, banned=None, kernel="auto"
) -> tuple[Tensor, Tensor]:
    """Log-probability (nats) of each target under softmax(hidden @ weight.T / temperature), and the entropy.

    hidden_TH (T, H) and weight_VH (V, H) share a dtype; targets_T (T,) int64 in [0, V). `banned` holds token ids that
    the sampler can never produce (vision placeholders, padding rows of the vocabulary): their probability is exactly
    zero, as it is in the rollout engine. Returns logp_T and entropy_T, both (T,) fp32 and differentiable in hidden and
    weight. T may be 0. 16-bit inputs are multiplied and summed in fp32; their gradients have their dtype, but the
    weight's is summed in fp32.
    """
    _check("linear_logprob", hidden_TH, weight_VH, targets_T, temperature)
    kernel = resolve_kernel(kernel, hidden_TH.device)
    return _LinearLogprob.apply(hidden_TH, weight_VH, targets_T, temperature, banned, kernel)


def fused_policy_loss(
    hidden_KH: Tensor, weight_VH: Tensor, targets_K: Tensor, loss, tokens, temperature=1.0, banned=None, kernel="auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of K tokens, differentiable in hidden and weight; and, without gradient, their logp_K and entropy_K.

    `loss` is a grpo.PolicyLoss or any other callable: loss(logp_R, entropy_R, tokens_R) returns the weighted loss of
    each row, first of what it returns. If loss.per_token is true, a row's loss depends on that row alone. If not, the
    loss is called with whole rollouts: all rows of a rollout are here and contiguous, and tokens.rollout says which
    rollout a row belongs to. `tokens` holds what else the loss reads, a row per token, on hidden's device: a
    packing.TokenBatch, or anything that a slice gives rows of.
    The rest is as for linear_logprob. The gradient is made in the forward: call backward at most once.
    """
    _check("fused_policy_loss", hidden_KH, weight_VH, targets_K, temperature)
    kernel = resolve_kernel(kernel, hidden_KH.device)
    if not torch.is_grad_enabled():  # the function below could not tell
        hidden_KH, weight_VH = hidden_KH.detach(), weight_VH.detach()
    return _FusedPolicyLoss.apply(hidden_KH, weight_VH, targets_K, loss, tokens, temperature, banned, kernel)


def _check(name: str, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> None:
    agree = weight.shape[1:] == hidden.shape[1:] and targets.shape == hidden.shape[:1] and hidden.dtype == weight.dtype
    if not (agree and temperature > 0):
        got = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (hidden, weight, targets))
        raise ValueError(f"{name}: got hidden, weight and targets {got}, temperature {temperature}; need (K, H) and "
                         "(V, H) of one dtype, (K,), and a number above 0")


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_KH, weight_VH, targets_K, temperature, banned, kernel):
        ctx.save_for_backward(hidden_KH, weight_VH, targets_K)
        ctx.options = kernel, temperature, banned
        head = HEAD_CLASSES[kernel](hidden_KH, weight_VH, targets_K, temperature, banned, (False, False))
        logp_K, entropy_K = hidden_KH.new_empty((2, len(targets_K)), dtype=torch.float32)
        for rows in head.blocks():
            logp_K[rows], entropy_K[rows] = head.statistics(rows)
        return logp_K, entropy_K

    @staticmethod
    def backward(ctx, grad_logp_K, grad_entropy_K):
        kernel, *options = ctx.options
        head = HEAD_CLASSES[kernel](*ctx.saved_tensors, *options, ctx.needs_input_grad[:2])
        for rows in head.blocks():
            head.statistics(rows)
            head.add_gradients(rows, grad_logp_K[rows], grad_entropy_K[rows])
        return head.grad_hidden_KH, head.grad_weight_VH, None, None, None, None  # autograd casts to the inputs' dtype


class _FusedPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_KH, weight_VH, targets_K, loss, tokens, temperature, banned, kernel):
        head = HEAD_CLASSES[kernel](hidden_KH, weight_VH, targets_K, temperature, banned, ctx.needs_input_grad[:2])
        logp_K, entropy_K = hidden_KH.new_empty((2, len(targets_K)), dtype=torch.float32)
        total = hidden_KH.new_zeros((), dtype=torch.float32)
        for group in _row_groups(loss, tokens, head.blocks()):
            blocks = head.blocks(group.start, group.stop)
            for rows in blocks:
                logp_K[rows], entropy_K[rows] = head.statistics(rows)
            value, grad_logp, grad_entropy = loss_and_gradients(loss, logp_K[group], entropy_K[group], tokens[group])
            total += value
            for rows in blocks:
                if len(blocks) > 1:  # a sequence longer than a block: its logits were not kept
                    head.statistics(rows)
                inside = slice(rows.start - group.start, rows.stop - group.start)
                head.add_gradients(rows, grad_logp[inside], grad_entropy[inside])
        ctx.gradients = [head.grad_hidden_KH, head.grad_weight_VH]  # and not the head, whose logits would stay
        ctx.mark_non_differentiable(logp_K, entropy_K)
        return total, logp_K, entropy_K

    @staticmethod
    def backward(ctx, grad_total, *_):
        assert ctx.gradients is not None, "fused_policy_loss hands out its gradient once: this is a second backward"
        gradients = [gradient if gradient is None else gradient.mul_(grad_total) for gradient in ctx.gradients]
        ctx.gradients = None  # autograd makes a copy of what someone else holds too
        return *gradients, None, None, None, None, None, None


def _row_groups(loss: Callable, tokens: Any, blocks: list[slice]) -> list[slice]:
    """Return the slices of rows whose losses are evaluated together: the blocks; or, if the loss couples the tokens of
    a rollout, as many whole rollouts as fit into a block, or one rollout that is longer than a block."""
    if loss.per_token or len(blocks) < 2:
        return blocks
    groups = []
    for start, stop in itertools.pairwise(rollout_bounds(tokens.rollout)):
        if groups and stop - groups[-1].start <= blocks[0].stop:
            start = groups.pop().start
        groups.append(slice(start, stop))
    return groups


def rollout_bounds(rollout_K: Tensor) -> list[int]:
    """Return the row where each rollout begins, and the number of rows."""
    rollouts, counts = rollout_K.unique_consecutive(return_counts=True)
    assert len(rollouts) == len(rollouts.unique()), "the rows of a rollout do not stand together"
    return [0, *counts.cumsum(0).tolist()]


class TangentLoss:
    """The tangent of another loss at given log-probabilities and entropies: a sum over tokens with the same value and
    gradients there. It lets a loss that couples tokens train on micro-batches that hold parts of rollouts."""

    per_token = True

    def __call__(self, logp_R: Tensor, entropy_R: Tensor, tokens_R: Any) -> tuple[Tensor]:
        constant_R, logp_slope_R, entropy_slope_R = tokens_R.tangents.unbind(1)
        return (constant_R + logp_slope_R * logp_R + entropy_slope_R * entropy_R,)


def loss_and_gradients(loss: Callable, logp_R: Tensor, entropy_R: Tensor, tokens_R: Any) -> tuple[Tensor, ...]:
    """Return the loss of some rows and its gradients with respect to their logp and entropy, a number per row each."""
    with torch.enable_grad():
        inputs = logp_R.detach().requires_grad_(), entropy_R.detach().requires_grad_()
        total = loss(*inputs, tokens_R)[0].sum()
        grad_logp_R, grad_entropy_R = torch.autograd.grad(total, inputs, materialize_grads=True)
    return total.detach(), grad_logp_R, grad_entropy_R


# ----------------------------------------------------------------------------------------------------------------------
# What the two implementations share


class _Head:
    """The inputs of one call, the logits of one block of rows, and the gradients added up so far.

    An implementation has three methods, which work on a buffer of fp32 logits:

    allocate()                                              makes the buffer, for `block_rows` rows
    statistics(rows) -> logp_R, entropy_R                   fills it with the logits of these rows
    logit_gradients(source_N, grad_logp_N, grad_entropy_N)  overwrites them by the gradient dz of
        grad_logp . logp + grad_entropy . entropy in the logits before the temperature; yields (columns, dz_NC) tile by
        tile. Only the block's rows source_N have a gradient, and they move to its first N places.
    """

    def __init__(self, hidden_KH, weight_VH, targets_K, temperature, banned, wanted: tuple[bool, bool]):
        """`wanted` says whether hidden and weight need a gradient; the rest is as for linear_logprob."""
        self.hidden_KH, self.weight_VH, self.targets_K = hidden_KH, weight_VH, targets_K
        self.scale, self.vocab = 1.0 / temperature, len(weight_VH)
        self.banned = targets_K[:0] if banned is None else banned
        most = GPU_BLOCK_ROWS if hidden_KH.is_cuda else max(1, CPU_BLOCK_ELEMENTS // self.vocab)
        self.block_rows = min(max(len(targets_K), 1), most)
        self.grad_hidden_KH = torch.zeros_like(hidden_KH) if wanted[0] else None
        self.grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if wanted[1] else None
        self.allocate()

    def blocks(self, start: int = 0, stop: int | None = None) -> list[slice]:
        stop = len(self.targets_K) if stop is None else stop
        return [slice(i, min(i + self.block_rows, stop)) for i in range(start, stop, self.block_rows)]

    def add_gradients(self, rows: slice, grad_logp_R: Tensor, grad_entropy_R: Tensor) -> None:
        """Add the gradients of grad_logp . logp + grad_entropy . entropy in hidden and weight, for the rows whose
        logits are in the buffer. Those without one are left out of the products."""
        source_N = _compact((grad_logp_R != 0) | (grad_entropy_R != 0))
        if len(source_N) == 0 or (self.grad_hidden_KH is None and self.grad_weight_VH is None):
            return
        hidden_NH = self.hidden_KH[rows][source_N]
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        for columns, dz_NC in self.logit_gradients(source_N, grad_logp_R[source_N], grad_entropy_R[source_N]):
            if self.grad_hidden_KH is not None:
                _matmul(grad_hidden_NH, dz_NC, self.weight_VH[columns], add=True)
            if self.grad_weight_VH is not None:
                _matmul(self.grad_weight_VH[columns], dz_NC.t(), hidden_NH, add=True)
        if self.grad_hidden_KH is not None:
            self.grad_hidden_KH[rows].index_copy_(0, source_N, grad_hidden_NH.to(hidden_NH.dtype))


def _compact(live_R: Tensor) -> Tensor:
    """source_N: which row goes into each of the first N places, where N rows are live. A live row stays where it is,
    and those from behind take the places of dead ones: so most stay, and none is read after it was overwritten."""
    live_N = live_R.nonzero()[:, 0]  # the host waits for N here, and nowhere else
    n = len(live_N)
    dead_N = ~live_R[:n]
    later_N = n - dead_N.sum() + dead_N.cumsum(0) - 1  # the live rows from N on are as many as the dead rows before N
    return torch.where(dead_N, live_N[later_N.clamp(min=0)], torch.arange(n, device=live_R.device))


def _matmul(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> None:
    """out = a @ b or, with `add`, out += a @ b. out is fp32, and so are the sums, also of 16-bit factors."""
    if not out.is_cuda:  # it would sum 16-bit products in 16 bits
        a, b = a.float(), b.float()
    options = {} if b.dtype == torch.float32 else {"out_dtype": torch.float32}
    if add:
        torch.addmm(out, a.to(b.dtype), b, out=out, **options)
    else:
        torch.mm(a.to(b.dtype), b, out=out, **options)


# ----------------------------------------------------------------------------------------------------------------------
# A block of logits: the definition, in plain torch


@dataclass
class _Tile:
    """Some columns of the vocabulary, and the block's logits there: without gaps, so that they stay in the cache."""

    columns: slice
    z_RC: Tensor  # the logits, then e = exp(z - shift), which is the softmax but for a factor, then dz
    banned: Tensor  # ids, counted from the first column
    shift_R1: Tensor | None = None


class _PlainHead(_Head):
    def allocate(self) -> None:
        most = GPU_TILE_COLUMNS if self.hidden_KH.is_cuda else max(1, CPU_TILE_ELEMENTS // self.block_rows)
        width = min(self.vocab, most)
        buffer = self.hidden_KH.new_empty(self.block_rows * self.vocab, dtype=torch.float32)  # small ones cost time
        self.tiles = []
        for start in range(0, self.vocab, width):
            stop = min(start + width, self.vocab)
            inside = (self.banned >= start) & (self.banned < stop)
            z_RC = buffer[self.block_rows * start : self.block_rows * stop].view(self.block_rows, -1)
            self.tiles.append(_Tile(slice(start, stop), z_RC, self.banned[inside] - start))
        self.scratch_RC = torch.empty_like(self.tiles[0].z_RC)

    def statistics(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Running over the tiles: top = max z, total = sum exp(z - top), weighted = sum exp(z - top) (z - top)."""
        hidden_RH, self.targets_R = self.hidden_KH[rows], self.targets_K[rows]
        n = len(hidden_RH)
        top = hidden_RH.new_full((n, 1), MASKED_LOGIT, dtype=torch.float32)
        target_z, total, weighted = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)
        for tile in self.tiles:
            z = tile.z_RC[:n]
            _matmul(z, hidden_RH, self.weight_VH[tile.columns].t())
            if self.scale != 1.0:
                z *= self.scale
            z[:, tile.banned] = MASKED_LOGIT
            row, column = self._targets_in(tile)
            target_z[row, 0] = z[row, column]
            tile.shift_R1 = torch.maximum(top, z.amax(dim=1, keepdim=True))
            fall = top - tile.shift_R1
            decay = fall.exp()
            d = torch.sub(z, tile.shift_R1, out=self.scratch_RC[:n, : z.shape[1]])
            e = torch.exp(d, out=z)
            weighted = (weighted + fall * total) * decay + torch.linalg.vecdot(e, d)[:, None]
            total = total * decay + e.sum(dim=1, keepdim=True)
            top = tile.shift_R1
        log_total = total.log()
        self.lse_R1 = top + log_total
        self.entropy_R1 = log_total - weighted / total  # of shifted logits: no cancellation, however large they are
        logp_R1 = (target_z - top - log_total).masked_fill(target_z == MASKED_LOGIT, -torch.inf)
        return logp_R1[:, 0], self.entropy_R1[:, 0]

    def _targets_in(self, tile: _Tile) -> tuple[Tensor, Tensor]:
        """Rows whose target is in the tile, and its column there."""
        row = ((self.targets_R >= tile.columns.start) & (self.targets_R < tile.columns.stop)).nonzero()[:, 0]
        return row, self.targets_R[row] - tile.columns.start

    def logit_gradients(self, source_N, grad_logp_N, grad_entropy_N) -> Iterator[tuple[slice, Tensor]]:
        n = len(source_N)
        moved = (source_N >= n).nonzero()[:, 0]
        self.targets_R = self.targets_R[source_N]
        lse, entropy = self.lse_R1[source_N], self.entropy_R1[source_N]
        g_logp, g_entropy = grad_logp_N[:, None] * self.scale, grad_entropy_N[:, None] * self.scale
        with_entropy = bool(grad_entropy_N.any())
        for tile in self.tiles:
            tile.z_RC[moved] = tile.z_RC[source_N[moved]]
            dz = tile.z_RC[:n]
            factor = (tile.shift_R1[source_N] - lse).exp()  # e times this is p
            if with_entropy:
                dz *= factor
                ln_p = torch.log(dz, out=self.scratch_RC[:n, : dz.shape[1]])
                ln_p.clamp_(min=-200.0)  # finite, so that p ln p is 0 where p is
                ln_p += entropy
                ln_p *= -g_entropy
                ln_p -= g_logp
                dz *= ln_p
            else:
                dz *= -g_logp * factor
            row, column = self._targets_in(tile)
            dz[row, column] += g_logp[row, 0]
            yield tile.columns, dz


# ----------------------------------------------------------------------------------------------------------------------
# A block of logits: its Triton twin. Inside, logits are in units of ln 2, since a GPU has exp2

LOG2E = math.log2(math.e)
_jit = triton.jit if triton is not None else lambda function: function


@_jit
def _load_logits(z_row, columns, V, scale, allowed):
    z = tl.load(z_row + columns, mask=columns < V, other=0.0) * scale
    return tl.where(tl.load(allowed + columns, mask=columns < V, other=0) != 0, z, -1e30)  # NEVER


@_jit
def _statistics_kernel(z, stride, V, scale, targets, allowed, lse_R, entropy_R, logp_R, BLOCK: tl.constexpr):
    """In one pass over a row: lse, log2 of the sum of exponentials; logp and entropy in nats. Running over its logits:
    top = max z, total = sum 2^(z - top), weighted = sum 2^(z - top) (z - top)."""
    row = tl.program_id(0).to(tl.int64)
    z_row = z + row * stride
    top, total, weighted = -1e30, 0.0, 0.0
    for start in range(0, V, BLOCK):
        logits = _load_logits(z_row, start + tl.arange(0, BLOCK), V, scale, allowed)
        new = tl.maximum(top, tl.max(logits, 0))
        fall = top - new
        decay = tl.exp2(fall)
        d = logits - new
        e = tl.exp2(d)
        weighted = (weighted + fall * total) * decay + tl.sum(e * d, 0)
        total = total * decay + tl.sum(e, 0)
        top = new
    log_total = tl.log2(total)
    target = tl.load(targets + row)
    target_z = tl.where(tl.load(allowed + target) != 0, tl.load(z_row + target) * scale, -float("inf"))
    ln2 = 0.6931471805599453
    tl.store(lse_R + row, top + log_total)
    tl.store(logp_R + row, (target_z - top - log_total) * ln2)
    tl.store(entropy_R + row, (log_total - weighted / total) * ln2)


@_jit
def _gradient_kernel(
    z, stride, V, scale, targets, allowed, lse_R, entropy_R, source_N, g_logp_N, g_entropy_N, dz, BLOCK: tl.constexpr
):
    """The gradient of a source row's logits, into row n: fp32 over fp32, or 16 bits wide in the first half of the row.
    No other program reads row n: unless it is its own source, it is a row that was left out."""
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(source_N + n)
    lse, entropy, target = tl.load(lse_R + row), tl.load(entropy_R + row), tl.load(targets + row)
    g_logp, g_entropy = tl.load(g_logp_N + n), tl.load(g_entropy_N + n)
    dz_row = dz + n * stride * (32 // dz.dtype.element_ty.primitive_bitwidth)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        log2_p = _load_logits(z + row * stride, columns, V, scale, allowed) - lse
        ln_p = log2_p * 0.6931471805599453
        gradient = -tl.exp2(log2_p) * (g_logp + g_entropy * (ln_p + entropy))
        gradient += tl.where(columns == target, g_logp, 0.0)
        tl.debug_barrier()  # no warp may overwrite what another has yet to read
        tl.store(dz_row + columns, gradient.to(dz.dtype.element_ty), mask=columns < V)


class _TritonHead(_Head):
    def allocate(self) -> None:
        width = -(-self.vocab // 64) * 64  # rows must start aligned
        buffer = self.hidden_KH.new_empty((self.block_rows, width), dtype=torch.float32)
        self.z_RV = buffer[:, : self.vocab]
        self.dz_RV = buffer.view(self.hidden_KH.dtype)[:, : self.vocab]  # its rows begin where those of z do
        self.allowed_V = torch.ones(self.vocab, dtype=torch.uint8, device=self.banned.device)
        self.allowed_V[self.banned] = 0
        block = min(4096, triton.next_power_of_2(self.vocab))
        self.launch = {"BLOCK": block, "num_warps": 8 if block == 4096 else 4}

    def statistics(self, rows: slice) -> tuple[Tensor, Tensor]:
        z_RV, targets_R = self.z_RV[: rows.stop - rows.start], self.targets_K[rows]
        _matmul(z_RV, self.hidden_KH[rows], self.weight_VH.t())
        lse_R, entropy_R, logp_R = z_RV.new_empty((3, len(z_RV)))
        read = z_RV, z_RV.stride(0), self.vocab, self.scale * LOG2E, targets_R, self.allowed_V
        self.of_block = *read, lse_R, entropy_R  # what both kernels are given first
        _statistics_kernel[(len(z_RV),)](*self.of_block, logp_R, **self.launch)
        return logp_R, entropy_R

    def logit_gradients(self, source_N, grad_logp_N, grad_entropy_N) -> Iterator[tuple[slice, Tensor]]:
        n, dz_RV = len(source_N), self.dz_RV
        gradients = source_N, grad_logp_N * self.scale, grad_entropy_N * self.scale
        _gradient_kernel[(n,)](*self.of_block, *gradients, dz_RV, **self.launch)
        yield slice(self.vocab), dz_RV[:n]


HEAD_CLASSES = {"torch": _PlainHead, "triton": _TritonHead}
