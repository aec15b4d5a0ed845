"""The policy head, an LM head fused with the loss: log-probability, entropy and loss of sampled tokens without ever
holding all logits.

From a token's hidden state the head computes z = hidden @ weight.T / temperature, one logit per entry of the
vocabulary, and p = softmax(z). Training needs two numbers per token, and gradients through them:

    logp    = z[target] - ln sum exp(z)        dlogp/dz    = onehot(target) - p
    entropy = -sum p ln p                      dentropy/dz = -p (ln p + entropy)

`linear_logprob` returns the two, for any use. Its backward computes the logits again, so it needs four matrix products
in all. `fused_policy_loss` also gets the loss, a function of the two, and computes the gradient while it holds the
logits: a block of logits -> logp and entropy of its rows -> the loss and, by autograd, its gradients with respect to
these vectors -> the gradient of the logits, which overwrites them -> the matrix products for hidden and weight. It
needs three products in all, two if the head is frozen, and only the first for rows without gradient. This module does
not depend on which loss it is.

The computation on a block of logits is implemented twice: in plain torch (_PlainHead), which is the definition and runs
on a CPU, and in Triton kernels with one program per row (_TritonHead). Nothing uses atomics or chooses its launch
configuration at run time, so results are reproducible bit for bit. Sums are fp32, also those of 16-bit inputs.

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
except ImportError:  # a CPU does not need it
    triton = None

CPU_BLOCK_ELEMENTS = 1 << 23  # logits held at a time on a CPU: 32 MiB of fp32
CPU_TILE_ELEMENTS = 1 << 19  # logits of a tile: few enough to stay in the CPU's cache between operations
GPU_BLOCK_ROWS = 2048  # on a GPU, where each block reads the whole weight: 1.16 GiB of fp32 logits at V = 152,064
GPU_TILE_COLUMNS = 16384
MASKED_LOGIT = -1e30  # the logit of a banned id: its exp is exactly 0, and 0 * -1e30 is 0, where 0 * -inf would be NaN
KERNELS = ("auto", "triton", "torch")


def is_triton_interpreter() -> bool:
    """Return whether Triton kernels run in its interpreter, on a CPU (TRITON_INTERPRET=1 before its first import)."""
    return triton is not None and triton.knobs.runtime.interpret


def resolve_kernel(choice: str, device: torch.device) -> str:
    """Return the implementation that --kernel auto|triton|torch means on this device. Called once, at start-up."""
    if choice == "auto":
        return "triton" if device.type == "cuda" and triton is not None else "torch"
    if choice == "triton":
        need(triton is not None, "--kernel triton: triton is not installed; pip install triton, or use --kernel torch")
        need(
            device.type == "cuda" or is_triton_interpreter(),
            f"--kernel triton needs a GPU, but the device is {device.type}; use "
            "--kernel torch (or, for tests, TRITON_INTERPRET=1: thousands of times slower)",
        )
    return choice


# ----------------------------------------------------------------------------------------------------------------------
# The two entry points


def linear_logprob(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, temperature=1.0, banned=None, kernel="auto"
) -> tuple[Tensor, Tensor]:
    """Return the log-probability (nats) of each target under softmax(hidden @ weight.T / temperature), and the entropy.

    hidden_TH (T, H) and weight_VH (V, H) share a dtype; targets_T (T,) is int64 in [0, V). `banned` holds token ids
    that the sampler never produces (vision placeholders, padding rows of the vocabulary): their probability is exactly
    zero, as it is in the rollout engine. The results are logp_T and entropy_T, both (T,) fp32 and differentiable in
    hidden and weight. T may be 0. 16-bit inputs are multiplied and summed in fp32. Gradients have the inputs' dtype,
    but the weight's is summed in fp32.
    """
    _check("linear_logprob", hidden_TH, weight_VH, targets_T, temperature)
    kernel = resolve_kernel(kernel, hidden_TH.device)
    return _LinearLogprob.apply(hidden_TH, weight_VH, targets_T, temperature, banned, kernel)


def fused_policy_loss(
    hidden_KH: Tensor, weight_VH: Tensor, targets_K: Tensor, loss, tokens, temperature=1.0, banned=None, kernel="auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of K tokens, differentiable in hidden and weight, and without gradient their logp_K and
    entropy_K.

    `loss` is a grpo.PolicyLoss or any other callable: loss(logp_R, entropy_R, tokens_R) returns a tuple whose first
    item is the weighted loss of each row. If loss.per_token is true, a row's loss depends only on that row. If not, the
    loss is called with whole rollouts: all rows of a rollout are here and contiguous, and tokens.rollout is the index
    of each row's rollout. `tokens` holds the loss's other inputs, one row per token, on hidden's device: it is a
    packing.TokenBatch, or any object whose slices are rows.
    The other parameters are those of linear_logprob. The gradient is computed in the forward pass, so call backward at
    most once.
    """
    _check("fused_policy_loss", hidden_KH, weight_VH, targets_K, temperature)
    kernel = resolve_kernel(kernel, hidden_KH.device)
    if not torch.is_grad_enabled():  # inside the autograd function this is not visible
        hidden_KH, weight_VH = hidden_KH.detach(), weight_VH.detach()
    return _FusedPolicyLoss.apply(hidden_KH, weight_VH, targets_K, loss, tokens, temperature, banned, kernel)


def _check(name: str, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> None:
    match = weight.shape[1:] == hidden.shape[1:] and targets.shape == hidden.shape[:1] and hidden.dtype == weight.dtype
    if not (match and temperature > 0):
        inputs = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (hidden, weight, targets))
        raise ValueError(f"{name}: got hidden, weight and targets {inputs}, temperature {temperature}; pass (K, H) and "
                         "(V, H) of the same dtype, (K,), and a temperature above 0")


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
        for part in _row_groups(loss, tokens, head.blocks()):
            blocks = head.blocks(part.start, part.stop)
            for rows in blocks:
                logp_K[rows], entropy_K[rows] = head.statistics(rows)
            value, grad_logp, grad_entropy = loss_and_gradients(loss, logp_K[part], entropy_K[part], tokens[part])
            total += value
            for rows in blocks:
                if len(blocks) > 1:  # a rollout longer than a block: its logits were not kept
                    head.statistics(rows)
                inside = slice(rows.start - part.start, rows.stop - part.start)
                head.add_gradients(rows, grad_logp[inside], grad_entropy[inside])
        ctx.gradients = [head.grad_hidden_KH, head.grad_weight_VH]  # not the head, which would keep its logits alive
        ctx.mark_non_differentiable(logp_K, entropy_K)
        return total, logp_K, entropy_K

    @staticmethod
    def backward(ctx, grad_total, *_):
        assert ctx.gradients is not None, "fused_policy_loss keeps its gradient once only: this is a second backward"
        gradients = [gradient if gradient is None else gradient.mul_(grad_total) for gradient in ctx.gradients]
        ctx.gradients = None  # autograd would copy tensors that are also referenced here
        return *gradients, None, None, None, None, None, None


def _row_groups(loss: Callable, tokens: Any, blocks: list[slice]) -> list[slice]:
    """Return the slices of rows whose losses are evaluated together: the blocks or, if the loss couples the tokens of a
    rollout, the most whole rollouts that fit into a block, or a single rollout that is longer than a block."""
    if loss.per_token or len(blocks) < 2:
        return blocks
    parts = []
    for start, stop in itertools.pairwise(rollout_bounds(tokens.rollout)):
        if parts and stop - parts[-1].start <= blocks[0].stop:
            start = parts.pop().start
        parts.append(slice(start, stop))
    return parts


def rollout_bounds(rollout_K: Tensor) -> list[int]:
    """Return the first row of each rollout, and then the number of rows."""
    rollouts, counts = rollout_K.unique_consecutive(return_counts=True)
    assert len(rollouts) == len(rollouts.unique()), "the rows of a rollout are not contiguous"
    return [0, *counts.cumsum(0).tolist()]


class TangentLoss:
    """The tangent of another loss at given log-probabilities and entropies: a sum over tokens with the same value and
    gradients at that point. With it, a loss that couples tokens can train on micro-batches with parts of rollouts."""

    per_token = True

    def __call__(self, logp_R: Tensor, entropy_R: Tensor, tokens_R: Any) -> tuple[Tensor]:
        constant_R, logp_slope_R, entropy_slope_R = tokens_R.tangents.unbind(1)
        return (constant_R + logp_slope_R * logp_R + entropy_slope_R * entropy_R,)


def loss_and_gradients(loss: Callable, logp_R: Tensor, entropy_R: Tensor, tokens_R: Any) -> tuple[Tensor, ...]:
    """Return the loss of some rows, and its gradients with respect to each row's logp and entropy."""
    with torch.enable_grad():
        inputs = logp_R.detach().requires_grad_(), entropy_R.detach().requires_grad_()
        total = loss(*inputs, tokens_R)[0].sum()
        grad_logp_R, grad_entropy_R = torch.autograd.grad(total, inputs, materialize_grads=True)
    return total.detach(), grad_logp_R, grad_entropy_R


# ----------------------------------------------------------------------------------------------------------------------
# The part that both implementations share


class _Head:
    """The inputs of one call, the logits of one block of rows, and the gradients accumulated so far.

    An implementation has three methods, which use a buffer of fp32 logits:

    allocate()                                              allocates the buffer, for `block_rows` rows
    statistics(rows) -> logp_R, entropy_R                   fills it with the logits of these rows
    logit_gradients(source_N, grad_logp_N, grad_entropy_N)  overwrites them with dz, the gradient of
        grad_logp . logp + grad_entropy . entropy with respect to the logits before the temperature, and yields
        (columns, dz_NC) tile by tile. Only the block's rows source_N have a gradient; they move to its first N rows.
    """

    def __init__(self, hidden_KH, weight_VH, targets_K, temperature, banned, needs_grad: tuple[bool, bool]):
        """Allocate the buffers. `needs_grad` holds whether hidden and weight need a gradient; the other parameters are
        those of linear_logprob."""
        self.hidden_KH, self.weight_VH, self.targets_K = hidden_KH, weight_VH, targets_K
        self.scale, self.vocab = 1.0 / temperature, len(weight_VH)
        self.banned = targets_K[:0] if banned is None else banned
        max_rows = GPU_BLOCK_ROWS if hidden_KH.is_cuda else max(1, CPU_BLOCK_ELEMENTS // self.vocab)
        self.block_rows = min(max(len(targets_K), 1), max_rows)
        self.grad_hidden_KH = torch.zeros_like(hidden_KH) if needs_grad[0] else None
        self.grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_grad[1] else None
        self.allocate()

    def blocks(self, start: int = 0, stop: int | None = None) -> list[slice]:
        """Return the slices of at most `block_rows` rows that cover the rows from start to stop."""
        stop = len(self.targets_K) if stop is None else stop
        return [slice(i, min(i + self.block_rows, stop)) for i in range(start, stop, self.block_rows)]

    def add_gradients(self, rows: slice, grad_logp_R: Tensor, grad_entropy_R: Tensor) -> None:
        """Add the gradients of grad_logp . logp + grad_entropy . entropy with respect to hidden and weight, for the
        rows whose logits are in the buffer. Rows without a gradient are left out of the matrix products."""
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
    """Return source_N, the index of the row to move to each of the first N rows, if N rows are live. Live rows among
    the first N stay, and later live rows replace the dead ones: so most rows stay, and none is read after it was
    overwritten."""
    live_N = live_R.nonzero()[:, 0]  # the only place where the host waits for the GPU, to learn N
    n = len(live_N)
    dead_N = ~live_R[:n]
    later_N = n - dead_N.sum() + dead_N.cumsum(0) - 1  # the number of live rows from N on is that of dead rows before N
    return torch.where(dead_N, live_N[later_N.clamp(min=0)], torch.arange(n, device=live_R.device))


def _matmul(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> None:
    """Compute out = a @ b or, with `add`, out += a @ b. out is fp32, and sums are too, even of 16-bit factors."""
    if not out.is_cuda:  # a CPU would sum 16-bit products in 16 bits
        a, b = a.float(), b.float()
    options = {} if b.dtype == torch.float32 else {"out_dtype": torch.float32}
    if add:
        torch.addmm(out, a.to(b.dtype), b, out=out, **options)
    else:
        torch.mm(a.to(b.dtype), b, out=out, **options)


# ----------------------------------------------------------------------------------------------------------------------
# The implementation in plain torch, which is the definition


@dataclass
class _Tile:
    """Some columns of the vocabulary and the block's logits in them, contiguous, so that they stay in the cache."""

    columns: slice
    z_RC: Tensor  # the logits, then e = exp(z - shift), which is the softmax up to a factor, then dz
    banned: Tensor  # ids, counted from the first column
    shift_R1: Tensor | None = None


class _PlainHead(_Head):
    def allocate(self) -> None:
        max_width = GPU_TILE_COLUMNS if self.hidden_KH.is_cuda else max(1, CPU_TILE_ELEMENTS // self.block_rows)
        width = min(self.vocab, max_width)
        # one buffer for all tiles, because many small allocations cost time
        buffer = self.hidden_KH.new_empty(self.block_rows * self.vocab, dtype=torch.float32)
        self.tiles = []
        for start in range(0, self.vocab, width):
            stop = min(start + width, self.vocab)
            inside = (self.banned >= start) & (self.banned < stop)
            z_RC = buffer[self.block_rows * start : self.block_rows * stop].view(self.block_rows, -1)
            self.tiles.append(_Tile(slice(start, stop), z_RC, self.banned[inside] - start))
        self.scratch_RC = torch.empty_like(self.tiles[0].z_RC)

    def statistics(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return logp and entropy of these rows. Over the tiles it updates top = max z, total = sum exp(z - top) and
        weighted = sum exp(z - top) (z - top)."""
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
            delta = top - tile.shift_R1
            decay = delta.exp()
            d = torch.sub(z, tile.shift_R1, out=self.scratch_RC[:n, : z.shape[1]])
            e = torch.exp(d, out=z)
            weighted = (weighted + delta * total) * decay + torch.linalg.vecdot(e, d)[:, None]
            total = total * decay + e.sum(dim=1, keepdim=True)
            top = tile.shift_R1
        log_total = total.log()
        self.lse_R1 = top + log_total
        self.entropy_R1 = log_total - weighted / total  # from shifted logits: no cancellation, even if they are large
        logp_R1 = (target_z - top - log_total).masked_fill(target_z == MASKED_LOGIT, -torch.inf)
        return logp_R1[:, 0], self.entropy_R1[:, 0]

    def _targets_in(self, tile: _Tile) -> tuple[Tensor, Tensor]:
        """Return the rows whose target is in the tile, and the targets' columns in it."""
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
                ln_p.clamp_(min=-200.0)  # finite, so that p ln p is 0 where p is 0
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
# The same in Triton. In the kernels, logits are in units of ln 2, because a GPU has exp2

LOG2E = math.log2(math.e)
_jit = triton.jit if triton is not None else lambda function: function


@_jit
def _load_logits(z_row, columns, V, scale, allowed):
    z = tl.load(z_row + columns, mask=columns < V, other=0.0) * scale
    return tl.where(tl.load(allowed + columns, mask=columns < V, other=0) != 0, z, -1e30)  # MASKED_LOGIT


@_jit
def _statistics_kernel(z, stride, V, scale, targets, allowed, lse_R, entropy_R, logp_R, BLOCK: tl.constexpr):
    """Compute in one pass over a row: lse, log2 of the sum of exponentials; logp and entropy in nats. Over the logits
    it updates top = max z, total = sum 2^(z - top) and weighted = sum 2^(z - top) (z - top)."""
    row = tl.program_id(0).to(tl.int64)
    z_row = z + row * stride
    top, total, weighted = -1e30, 0.0, 0.0
    for start in range(0, V, BLOCK):
        logits = _load_logits(z_row, start + tl.arange(0, BLOCK), V, scale, allowed)
        new = tl.maximum(top, tl.max(logits, 0))
        delta = top - new
        decay = tl.exp2(delta)
        d = logits - new
        e = tl.exp2(d)
        weighted = (weighted + delta * total) * decay + tl.sum(e * d, 0)
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
    """Write the gradient of a source row's logits into row n: fp32 over fp32, or 16 bits wide in the first half of the
    row. No other program reads row n: it is its own source, or else a row without a gradient."""
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
        tl.debug_barrier()  # no warp may overwrite logits that another warp has yet to read
        tl.store(dz_row + columns, gradient.to(dz.dtype.element_ty), mask=columns < V)


class _TritonHead(_Head):
    def allocate(self) -> None:
        width = -(-self.vocab // 64) * 64  # rows must start aligned
        buffer = self.hidden_KH.new_empty((self.block_rows, width), dtype=torch.float32)
        self.z_RV = buffer[:, : self.vocab]
        self.dz_RV = buffer.view(self.hidden_KH.dtype)[:, : self.vocab]  # its rows begin at those of z
        # an assignment, allowed_V[banned] = 0, would wait for the GPU
        self.allowed_V = self.banned.new_ones(self.vocab, dtype=torch.uint8).index_fill_(0, self.banned, 0)
        block = min(4096, triton.next_power_of_2(self.vocab))
        self.launch = {"BLOCK": block, "num_warps": 8 if block == 4096 else 4}

    def statistics(self, rows: slice) -> tuple[Tensor, Tensor]:
        z_RV, targets_R = self.z_RV[: rows.stop - rows.start], self.targets_K[rows]
        _matmul(z_RV, self.hidden_KH[rows], self.weight_VH.t())
        lse_R, entropy_R, logp_R = z_RV.new_empty((3, len(z_RV)))
        inputs = z_RV, z_RV.stride(0), self.vocab, self.scale * LOG2E, targets_R, self.allowed_V
        self.block_args = *inputs, lse_R, entropy_R  # the first arguments of both kernels
        _statistics_kernel[(len(z_RV),)](*self.block_args, logp_R, **self.launch)
        return logp_R, entropy_R

    def logit_gradients(self, source_N, grad_logp_N, grad_entropy_N) -> Iterator[tuple[slice, Tensor]]:
        n, dz_RV = len(source_N), self.dz_RV
        gradients = source_N, grad_logp_N * self.scale, grad_entropy_N * self.scale
        _gradient_kernel[(n,)](*self.block_args, *gradients, dz_RV, **self.launch)
        yield slice(self.vocab), dz_RV[:n]


HEAD_CLASSES = {"torch": _PlainHead, "triton": _TritonHead}
