"""The policy head: log-probability, entropy and loss of sampled tokens without ever holding all logits.

`linear_logprob` serves any loss and forms the logits once more in its backward: four matrix products in all.
`fused_policy_loss` knows the loss, so it forms the gradient while the logits are there: three products, two where the
head is frozen, and none but the first for rows without gradient.

Both walk over the rows in blocks and share one buffer for the logits of a block. What happens there is written twice: as
plain torch (_PlainBlock), which is the definition and what a CPU runs, and as Triton row kernels (_TritonBlock). A third
kernel, _score_kernel, makes the products itself and never stores a logit. Nothing uses atomics or picks its launch
configuration at run time, so results repeat bit for bit.

Axes: K tokens to score, H hidden size, V vocabulary; R rows of one block.
"""

from __future__ import annotations  # Triton's annotations must not be looked up where Triton is not installed

import math
from collections.abc import Callable

import torch

from errors import UserError

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # a CPU needs none of it
    triton = None

CPU_BLOCK_ELEMENTS = 1 << 23  # logits held at a time on a CPU: 32 MiB of fp32
CPU_TILE_ELEMENTS = 1 << 19  # of these as many as stay in the cache from one operation to the next
GPU_BLOCK_ROWS = 2048  # on a GPU, where each block reads the whole weight: 1.16 GiB of fp32 logits at V = 152,064
GPU_TILE_COLUMNS = 16384
KERNELS = ("auto", "triton", "torch")


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU (TRITON_INTERPRET=1 before Triton is first imported)."""
    return triton is not None and triton.knobs.runtime.interpret


def resolve_kernel(choice: str, device: torch.device) -> str:
    """Turn --kernel auto|triton|torch into the implementation of the whole run; called once, at start-up."""
    if choice not in KERNELS:
        raise UserError(f"--kernel {choice!r}: known are {', '.join(KERNELS)}")
    if choice == "auto":
        return "triton" if device.type == "cuda" and triton is not None else "torch"
    if choice == "triton" and triton is None:
        raise UserError("--kernel triton: the triton package is not installed; pip install triton, or use --kernel torch")
    if choice == "triton" and device.type != "cuda" and not interpreted():
        raise UserError(f"--kernel triton needs a GPU, and this is a {device.type}; use --kernel torch (or set TRITON_INTERPRET=1, "
                         "which runs the kernels in Triton's interpreter: for tests, thousands of times slower)")
    return choice


# ----------------------------------------------------------------------------------------------------------------------
# The two entry points


def linear_logprob(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float = 1.0,
    banned: torch.Tensor | None = None,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability (nats) of each target under softmax(hidden @ weight.T / temperature), and the entropy.

    hidden_TH (T, H) and weight_VH (V, H) share a dtype; targets_T (T,) int64 in [0, V). `banned` holds token ids that
    the sampler can never produce (vision placeholders, padding rows of the vocabulary): their probability is exactly
    zero, as it is in the rollout engine. Returns logp_T and entropy_T, both (T,) fp32 and differentiable in hidden and
    weight. T may be 0. 16-bit inputs are multiplied and summed in fp32; their gradients have their dtype, but the
    weight's is summed in fp32.
    """
    _check("linear_logprob", hidden_TH, weight_VH, targets_T, temperature)
    return _LinearLogprob.apply(hidden_TH, weight_VH, targets_T, temperature, banned, resolve_kernel(kernel, hidden_TH.device))


def fused_policy_loss(
    hidden_KH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_K: torch.Tensor,
    loss: Callable,
    values: dict[str, torch.Tensor],
    temperature: float = 1.0,
    banned: torch.Tensor | None = None,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of scored tokens, differentiable in hidden and weight; and, without gradient, their logp_K and entropy_K.

    `loss` is a grpo.PolicyLoss, or anything alike: called as loss(logp_R, entropy_R, values_R) it returns the weighted
    loss of each row first, and it has a bool `per_token`: unless set, it is given whole sequences, which
    values["sequence"] tells apart. `values` are (K,) columns on hidden's device. The rest is as for linear_logprob. The
    gradient is formed in the forward and handed out once: call backward at most once.
    """
    _check("fused_policy_loss", hidden_KH, weight_VH, targets_K, temperature)
    if not torch.is_grad_enabled():  # inside the function below it never is
        hidden_KH, weight_VH = hidden_KH.detach(), weight_VH.detach()
    kernel = resolve_kernel(kernel, hidden_KH.device)
    return _FusedPolicyLoss.apply(hidden_KH, weight_VH, targets_K, loss, values, temperature, banned, kernel)


def _check(name: str, hidden_KH: torch.Tensor, weight_VH: torch.Tensor, target_K: torch.Tensor, temperature: float) -> None:
    if hidden_KH.ndim != 2 or weight_VH.ndim != 2 or hidden_KH.shape[1] != weight_VH.shape[1]:
        raise ValueError(f"{name}: hidden {tuple(hidden_KH.shape)} and weight {tuple(weight_VH.shape)} disagree")
    if target_K.shape != hidden_KH.shape[:1]:
        raise ValueError(f"{name}: {tuple(target_K.shape)} targets for {tuple(hidden_KH.shape[:1])} rows")
    if hidden_KH.dtype != weight_VH.dtype:
        raise ValueError(f"{name}: hidden is {hidden_KH.dtype}, weight is {weight_VH.dtype}; cast one of them")
    if not temperature > 0:
        raise ValueError(f"{name}: temperature must be > 0, got {temperature}")


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_KH, weight_VH, target_K, temperature, banned, kernel):
        ctx.save_for_backward(hidden_KH, weight_VH, target_K)
        ctx.options = temperature, banned, kernel
        if kernel == "triton" and scorable(hidden_KH, weight_VH):
            return triton_score(hidden_KH, weight_VH, target_K, temperature, banned)
        head = _Head(hidden_KH, weight_VH, target_K, *ctx.options)
        logp_K, entropy_K = hidden_KH.new_empty((2, len(target_K)), dtype=torch.float32)
        for rows in head.blocks(0, len(target_K)):
            block = head.block(rows)
            logp_K[rows], entropy_K[rows] = block.logp_R, block.entropy_R
        return logp_K, entropy_K

    @staticmethod
    def backward(ctx, grad_logp_K, grad_entropy_K):
        head = _Head(*ctx.saved_tensors, *ctx.options)
        head.want_gradients(*ctx.needs_input_grad[:2])
        for rows in head.blocks(0, len(grad_logp_K)):
            head.block(rows).backward(grad_logp_K[rows], grad_entropy_K[rows])
        return *head.gradients(), None, None, None, None


class _FusedPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_KH, weight_VH, target_K, loss, values, temperature, banned, kernel):
        head = _Head(hidden_KH, weight_VH, target_K, temperature, banned, kernel)
        train = any(ctx.needs_input_grad[:2])
        if train:
            head.want_gradients(*ctx.needs_input_grad[:2])
        logp_K, entropy_K = hidden_KH.new_empty((2, len(target_K)), dtype=torch.float32)
        total = hidden_KH.new_zeros((), dtype=torch.float32)
        for group in _groups(loss, values, head.blocks(0, len(target_K))):
            blocks = head.blocks(group.start, group.stop)
            values_R = {name: column[group] for name, column in values.items()}
            if train and kernel == "triton" and inlined(loss, values):  # one kernel: statistics, loss and gradient
                block = _TritonBlock(head, group, loss, values_R)
                logp_K[group], entropy_K[group] = block.logp_R, block.entropy_R
                total += block.loss_R.sum()
                block.add_products(block.live_R)
                continue
            for rows in blocks:
                block = head.block(rows)
                logp_K[rows], entropy_K[rows] = block.logp_R, block.entropy_R
            part, g_logp, g_entropy = _loss_and_gradients(loss, logp_K[group], entropy_K[group], values_R)
            total += part
            for rows in blocks if train else ():
                if len(blocks) > 1:  # a sequence longer than a block: its logits were not kept
                    block = head.block(rows)
                inside = slice(rows.start - group.start, rows.stop - group.start)
                block.backward(g_logp[inside], g_entropy[inside])
        head.buffer = head.scratch = None  # only the gradients wait for the backward
        ctx.head = head
        ctx.mark_non_differentiable(logp_K, entropy_K)
        return total, logp_K, entropy_K

    @staticmethod
    def backward(ctx, grad_total, *_):
        return *ctx.head.gradients(grad_total), None, None, None, None, None, None


def _groups(loss: Callable, values: dict[str, torch.Tensor], blocks: list[slice]) -> list[slice]:
    """Rows whose losses are evaluated together: a block; or, where the loss couples the tokens of a sequence, as many
    whole sequences as a block holds, or one sequence that is longer than that."""
    if loss.per_token or len(blocks) < 2:
        return blocks
    sequence_K, rows = values["sequence"], blocks[0].stop
    ends = [*((sequence_K[1:] != sequence_K[:-1]).nonzero()[:, 0] + 1).tolist(), len(sequence_K)]
    groups, start = [], 0
    for end, following in zip(ends, [*ends[1:], math.inf], strict=True):
        if following - start > rows:
            groups.append(slice(start, end))
            start = end
    return groups


def _loss_and_gradients(loss: Callable, logp_R: torch.Tensor, entropy_R: torch.Tensor, values: dict[str, torch.Tensor]):
    """The loss of some rows, and its gradients in their logp and entropy: vectors, whatever the vocabulary."""
    with torch.enable_grad():
        logp_R, entropy_R = logp_R.detach().requires_grad_(), entropy_R.detach().requires_grad_()
        total = loss(logp_R, entropy_R, values)[0].sum()
        grads = torch.autograd.grad(total, (logp_R, entropy_R), allow_unused=True)
    return total.detach(), *(torch.zeros_like(logp_R) if g is None else g for g in grads)


class _Head:
    """The inputs of one call, the buffer that its blocks of logits share, and the gradients that they add up to."""

    def __init__(self, hidden_KH, weight_VH, target_K, temperature, banned, kernel):
        self.hidden_KH, self.weight_VH, self.target_K = hidden_KH, weight_VH, target_K
        self.scale, self.banned, self.kernel = 1.0 / temperature, banned, kernel
        n, vocab = len(target_K), len(weight_VH)
        self.rows = min(max(n, 1), GPU_BLOCK_ROWS if hidden_KH.is_cuda else max(1, CPU_BLOCK_ELEMENTS // vocab))
        if kernel == "triton":
            self.banned = None if banned is None else banned_mask(banned, vocab)
            width = -(-vocab // 64) * 64  # 16-bit gradients take the place of fp32 logits, and rows must start aligned
            self.buffer = hidden_KH.new_empty((self.rows, width), dtype=torch.float32)[:, :vocab]
        else:  # tile after tile, each without gaps
            columns = GPU_TILE_COLUMNS if hidden_KH.is_cuda else max(1, CPU_TILE_ELEMENTS // self.rows)
            self.tiles = [slice(i, min(i + columns, vocab)) for i in range(0, vocab, columns)]
            self.buffer = hidden_KH.new_empty(self.rows * vocab, dtype=torch.float32)
            self.scratch = hidden_KH.new_empty(self.rows * min(columns, vocab), dtype=torch.float32)
        self.grad_hidden = self.grad_weight = None

    def blocks(self, start: int, stop: int) -> list[slice]:
        return [slice(i, min(i + self.rows, stop)) for i in range(start, stop, self.rows)]

    def block(self, rows: slice) -> _PlainBlock | _TritonBlock:
        """Logits of some rows with their statistics. They live in the buffer: the next block ends this one."""
        return (_TritonBlock if self.kernel == "triton" else _PlainBlock)(self, rows)

    def want_gradients(self, hidden: bool, weight: bool) -> None:
        """Sums of many products are kept in fp32, whatever the inputs' dtype."""
        dtype = torch.float32 if self.kernel == "torch" else self.hidden_KH.dtype
        self.grad_hidden = torch.zeros_like(self.hidden_KH, dtype=dtype) if hidden else None
        self.grad_weight = torch.zeros_like(self.weight_VH, dtype=torch.float32) if weight else None

    def gradients(self, factor: torch.Tensor | None = None) -> list[torch.Tensor | None]:
        """Of hidden and weight, times a factor, in the dtypes of the inputs. They are handed over: a second reference
        would make autograd copy them."""
        out, pairs = [], [(self.grad_hidden, self.hidden_KH), (self.grad_weight, self.weight_VH)]
        self.grad_hidden = self.grad_weight = None
        while pairs:
            gradient, given = pairs.pop(0)
            if gradient is not None and factor is not None:
                scaled = gradient if gradient.dtype == given.dtype else torch.empty_like(given)
                gradient = torch.mul(gradient, factor, out=scaled)
            out.append(None if gradient is None else gradient.to(given.dtype))
        return out


def _add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a @ b with an fp32 out."""
    if a.dtype == torch.float32:
        out.addmm_(a, b)
    else:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)


def _close_ranks(live_R: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How n live rows become the first n: the places to fill, the live rows behind the n-th to fill them with, and the row
    that each place then holds. Only what moves is copied, and nothing is read after it was overwritten."""
    holes, movers = (~live_R[:n]).nonzero()[:, 0], n + live_R[n:].nonzero()[:, 0]
    return holes, movers, torch.arange(n, device=live_R.device).index_copy_(0, holes, movers)


# ----------------------------------------------------------------------------------------------------------------------
# A block of logits: the definition, in plain torch


class _PlainBlock:
    """Logits of some rows, made and used tile by tile of the vocabulary. What stays in the buffer is e = exp(z - shift)
    of the logits z over the temperature, with a shift for each row and tile: the softmax but for a factor."""

    def __init__(self, head: _Head, rows: slice):
        self.head, self.rows, self.target_R = head, rows, head.target_K[rows]
        n, hidden_RH, self.shifts = len(self.target_R), head.hidden_KH[rows], []
        self.exact = not hidden_RH.is_cuda and hidden_RH.dtype != torch.float32  # CPUs would sum 16-bit products in 16 bits
        if self.exact:
            hidden_RH = hidden_RH.float()
        if hidden_RH.dtype == torch.float32:
            hidden_RH = hidden_RH * head.scale
        top = hidden_RH.new_full((n, 1), -torch.inf, dtype=torch.float32)
        total, weighted, target_z = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)
        for tile in head.tiles:
            z, d = self._tile(tile), self._scratch(tile)
            if hidden_RH.dtype == torch.float32:
                torch.mm(hidden_RH, self._weight(tile).t(), out=z)
            else:
                torch.mm(hidden_RH, self._weight(tile).t(), out_dtype=torch.float32, out=z)
                z *= head.scale
            banned = self._banned(tile)
            if banned is not None:
                z[:, banned] = -torch.inf
            row, column = self._targets(tile)
            target_z[row, 0] = z[row, column]
            # Running top = max z, total = sum exp(z - top), weighted = sum exp(z - top) (z - top)
            new = torch.maximum(top, z.amax(dim=1, keepdim=True))
            shift = new.masked_fill(new == -torch.inf, 0.0)
            fall = (top - shift).clamp_(min=-200.0)  # where exp is 0 already; -inf times 0 would be NaN
            decay = fall.exp()
            torch.sub(z, shift, out=d)
            e = torch.exp(d, out=z)
            if banned is not None:
                d[:, banned] = 0.0
            weighted = (weighted + fall * total) * decay + torch.linalg.vecdot(e, d)[:, None]
            total, top = total * decay + e.sum(dim=1, keepdim=True), new
            self.shifts.append(shift)
        log_total = total.log()
        self.log_sum = top + log_total
        self.logp_R = (target_z - top - log_total)[:, 0]
        self.entropy_R = (log_total - weighted / total)[:, 0]  # of shifted logits: no cancellation, however large they are

    def _tile(self, tile: slice) -> torch.Tensor:
        n, columns = len(self.target_R), tile.stop - tile.start
        begin = self.head.rows * tile.start
        return self.head.buffer[begin : begin + n * columns].view(n, columns)

    def _scratch(self, tile: slice) -> torch.Tensor:
        n, columns = len(self.target_R), tile.stop - tile.start
        return self.head.scratch[: n * columns].view(n, columns)

    def _weight(self, tile: slice) -> torch.Tensor:
        return self.head.weight_VH[tile].float() if self.exact else self.head.weight_VH[tile]

    def _banned(self, tile: slice) -> torch.Tensor | None:
        if self.head.banned is None:
            return None
        inside = self.head.banned[(self.head.banned >= tile.start) & (self.head.banned < tile.stop)]
        return inside - tile.start if len(inside) else None

    def _targets(self, tile: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows whose target is in the tile, and its column there."""
        row = ((self.target_R >= tile.start) & (self.target_R < tile.stop)).nonzero()[:, 0]
        return row, self.target_R[row] - tile.start

    def backward(self, grad_logp_R: torch.Tensor, grad_entropy_R: torch.Tensor) -> None:
        """Add the gradients of g_logp . logp + g_entropy . H. Rows without one are left out of the products.

        dlogp/dz = onehot - p        dH/dz = -p (ln p + H)
        """
        head, live_R = self.head, (grad_logp_R != 0) | (grad_entropy_R != 0)
        n, order = int(live_R.sum()), None
        if n == 0 or (head.grad_hidden is None and head.grad_weight is None):
            return
        hidden_RH, log_sum, entropy = head.hidden_KH[self.rows], self.log_sum, self.entropy_R[:, None]
        g, gh = grad_logp_R[:, None] * head.scale, grad_entropy_R[:, None] * head.scale
        if n < len(live_R):
            holes, movers, order = _close_ranks(live_R, n)
            hidden_RH, log_sum, entropy, g, gh = (x[order] for x in (hidden_RH, log_sum, entropy, g, gh))
        if self.exact:
            hidden_RH = hidden_RH.float()
        with_entropy = bool((gh != 0).any())
        grad_hidden = None if head.grad_hidden is None else torch.zeros_like(hidden_RH, dtype=torch.float32)
        tiles = [self._tile(tile) for tile in head.tiles]
        if order is not None:
            self.target_R = self.target_R[order]
        for tile, dz, shift in zip(head.tiles, tiles, self.shifts, strict=True):
            if order is not None:
                dz[holes] = dz[movers]
                dz, shift = dz[:n], shift[order]
            factor = (shift - log_sum).exp_()  # e times this is p
            if with_entropy:
                dz *= factor
                ln_p = torch.log(dz, out=self._scratch(tile)).clamp_(min=-200.0)  # where p is 0, so is p ln p
                ln_p += entropy
                ln_p *= -gh
                ln_p -= g
                dz *= ln_p
            else:
                dz *= -g * factor
            row, column = self._targets(tile)
            dz[row, column] += g[row, 0]
            dz = dz.to(hidden_RH.dtype)
            if grad_hidden is not None:
                _add_product(grad_hidden, dz, self._weight(tile))
            if head.grad_weight is not None:
                _add_product(head.grad_weight[tile], dz.t(), hidden_RH)
        if grad_hidden is not None:
            places = head.grad_hidden[self.rows]
            places.copy_(grad_hidden) if order is None else places.index_copy_(0, order, grad_hidden)


# ----------------------------------------------------------------------------------------------------------------------
# A block of logits: Triton row kernels. Inside, logits are in units of log 2, since a GPU has exp2

LOG2E, LN2 = math.log2(math.e), math.log(2.0)
INLINED = ("clip", "cispo", "sapo", "reinforce")  # the kinds of grpo.PolicyLoss that _token_loss knows
_jit = triton.jit if triton is not None else lambda function: function


def banned_mask(banned: torch.Tensor, vocab: int) -> torch.Tensor:
    """(V,) uint8, 1 at banned ids."""
    return torch.zeros(vocab, dtype=torch.uint8, device=banned.device).index_fill_(0, banned, 1)


def inlined(loss: Callable, values: dict[str, torch.Tensor]) -> bool:
    """Whether _loss_kernel can evaluate this loss itself, on these columns."""
    return getattr(loss, "kind", None) in INLINED and loss.per_token and "trainer_logp" not in values


@_jit
def _load_logits(z_row, columns, V, scale, banned, BANNED: tl.constexpr):
    z = tl.load(z_row + columns, mask=columns < V, other=-float("inf")) * scale
    if BANNED:
        z = tl.where(tl.load(banned + columns, mask=columns < V, other=0) != 0, -float("inf"), z)
    return z


@_jit
def _fold(top, total, weighted, z, axis: tl.constexpr):
    """Add logits to running statistics: top = max z, total = sum 2^(z - top), weighted = sum 2^(z - top) (z - top).

    -inf adds nothing, and statistics of nothing have top -inf. Differences are floored where 2^x is already 0.
    """
    new = tl.maximum(top, tl.max(z, axis))
    shift = tl.where(new == -float("inf"), 0.0, new)
    fall = tl.maximum(top - shift, -200.0)
    decay = tl.exp2(fall)
    if axis == 1:
        d = tl.maximum(z - shift[:, None], -200.0)
    else:
        d = tl.maximum(z - shift, -200.0)
    e = tl.exp2(d)
    return new, total * decay + tl.sum(e, axis), (weighted + fall * total) * decay + tl.sum(e * d, axis)


@_jit
def _row_statistics(z_row, V, scale, target, banned, BANNED: tl.constexpr, BLOCK: tl.constexpr):
    """(top, log2 of the sum, logp in nats, entropy in nats) of one row, in one pass."""
    top, total, weighted = -float("inf"), 0.0, 0.0
    for start in range(0, V, BLOCK):
        z = _load_logits(z_row, start + tl.arange(0, BLOCK), V, scale, banned, BANNED)
        top, total, weighted = _fold(top, total, weighted, z, 0)
    log_total = tl.log2(total)
    target_z = tl.load(z_row + target) * scale
    if BANNED:
        target_z = tl.where(tl.load(banned + target) != 0, -float("inf"), target_z)
    ln2 = 0.6931471805599453
    return top, log_total, (target_z - top - log_total) * ln2, (log_total - weighted / total) * ln2


@_jit
def _row_gradient(
    z_row, dz_row, V, scale, top, log_total, entropy, target, grad_logp, grad_entropy, inv_temperature, banned,
    BANNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Overwrite a row of fp32 logits by their gradient, which may be 16 bits wide and then fills half of the row."""
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        log2_p = _load_logits(z_row, columns, V, scale, banned, BANNED) - top - log_total
        p = tl.exp2(log2_p)
        ln_p = tl.maximum(log2_p, -200.0) * 0.6931471805599453
        dz = -p * (grad_logp + grad_entropy * (ln_p + entropy)) + tl.where(columns == target, grad_logp, 0.0)
        tl.debug_barrier()  # no warp may overwrite what another has yet to read
        tl.store(dz_row + columns, (dz * inv_temperature).to(dz_row.dtype.element_ty), mask=columns < V)


@_jit
def _statistics_kernel(
    z, stride, V, scale, targets, banned, top_R, log_total_R, logp_R, entropy_R, BANNED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    top, log_total, logp, entropy = _row_statistics(
        z + row * stride, V, scale, tl.load(targets + row), banned, BANNED, BLOCK
    )
    tl.store(top_R + row, top)
    tl.store(log_total_R + row, log_total)
    tl.store(logp_R + row, logp)
    tl.store(entropy_R + row, entropy)


@_jit
def _gradient_kernel(
    z, stride, dz, dz_stride, V, scale, inv_temperature, targets, banned, top_R, log_total_R, entropy_R, grad_logp_R, grad_entropy_R,
    BANNED: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    grad_logp, grad_entropy = tl.load(grad_logp_R + row), tl.load(grad_entropy_R + row)
    if (grad_logp != 0.0) | (grad_entropy != 0.0):
        _row_gradient(
            z + row * stride, dz + row * dz_stride, V, scale, tl.load(top_R + row), tl.load(log_total_R + row),
            tl.load(entropy_R + row), tl.load(targets + row), grad_logp, grad_entropy, inv_temperature, banned, BANNED, BLOCK,
        )


@_jit
def _token_loss(
    logp, old_logp, ref_logp, tis, entropy, advantage, clip_low, clip_high, dual_clip, tau_positive, tau_negative, kl_coef, entropy_coef,
    KIND: tl.constexpr, DUAL: tl.constexpr, KL: tl.constexpr,
):
    """(loss, its derivatives in logp and entropy) of one token before weighting: grpo.PolicyLoss once more."""
    ratio = tl.exp(logp - old_logp)
    bounded = tl.minimum(tl.maximum(ratio, 1.0 - clip_low), 1.0 + clip_high)
    if KIND == "clip":
        unclipped, clipped = -advantage * ratio, -advantage * bounded
        loss = tl.maximum(unclipped, clipped)
        slope = tl.where(clipped > unclipped, 0.0, unclipped)
        if DUAL:
            bound = -dual_clip * advantage
            slope = tl.where((advantage < 0) & (loss > bound), 0.0, slope)
            loss = tl.where((advantage < 0) & (loss > bound), bound, loss)
    elif KIND == "cispo":
        loss, slope = -bounded * advantage * logp, -bounded * advantage
    elif KIND == "sapo":
        tau = tl.where(advantage > 0, tau_positive, tau_negative)
        gate = 1.0 / (1.0 + tl.exp(-tau * (ratio - 1.0)))
        loss, slope = -4.0 / tau * gate * advantage, -4.0 * gate * (1.0 - gate) * ratio * advantage
    else:
        tl.static_assert(KIND == "reinforce")
        loss, slope = -advantage * logp, -advantage
    loss, slope = tis * loss, tis * slope
    d = logp - ref_logp
    if KL == "k1":
        loss, slope = loss + kl_coef * d, slope + kl_coef
    elif KL == "k2":
        loss, slope = loss + kl_coef * d * d / 2.0, slope + kl_coef * d
    elif KL == "k3":
        loss, slope = loss + kl_coef * (tl.exp(-d) - 1.0 + d), slope + kl_coef * (1.0 - tl.exp(-d))
    elif KL == "abs":
        sign = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))
        loss, slope = loss + kl_coef * tl.abs(d), slope + kl_coef * sign
    return loss - entropy_coef * entropy, slope, -entropy_coef


@_jit
def _loss_kernel(
    z, stride, dz, dz_stride, V, scale, inv_temperature, targets, banned, advantage_R, weight_R, old_logp_R, ref_logp_R, engine_logp_R,
    logp_R, entropy_R, loss_R, live_R, clip_low, clip_high, dual_clip, tau_positive, tau_negative, kl_coef, entropy_coef, tis_cap,
    KIND: tl.constexpr, DUAL: tl.constexpr, KL: tl.constexpr, TIS: tl.constexpr, ON_POLICY: tl.constexpr, BANNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics, loss and gradient of one row per program, while the row is still in the cache."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    top, log_total, logp, entropy = _row_statistics(z + row * stride, V, scale, target, banned, BANNED, BLOCK)
    old_logp, ref_logp = logp, logp
    if not ON_POLICY:
        old_logp = tl.load(old_logp_R + row)
    if KL != "none":
        ref_logp = tl.load(ref_logp_R + row)
    tis = 1.0
    if TIS:
        tis = tl.minimum(tl.exp(old_logp - tl.load(engine_logp_R + row)), tis_cap)
    loss, grad_logp, grad_entropy = _token_loss(
        logp, old_logp, ref_logp, tis, entropy, tl.load(advantage_R + row), clip_low, clip_high, dual_clip, tau_positive, tau_negative,
        kl_coef, entropy_coef, KIND, DUAL, KL,
    )
    weight = tl.load(weight_R + row)
    grad_logp, grad_entropy = weight * grad_logp, weight * grad_entropy
    live = (grad_logp != 0.0) | (grad_entropy != 0.0)
    tl.store(logp_R + row, logp)
    tl.store(entropy_R + row, entropy)
    tl.store(loss_R + row, weight * loss)
    tl.store(live_R + row, live)
    if live:
        _row_gradient(
            z + row * stride, dz + row * dz_stride, V, scale, top, log_total, entropy, target, grad_logp, grad_entropy,
            inv_temperature, banned, BANNED, BLOCK,
        )


class _TritonBlock:
    """What _PlainBlock is, by the kernels above; with a loss, its gradient takes the place of the logits at once."""

    def __init__(self, head: _Head, rows: slice, loss: Callable | None = None, values: dict[str, torch.Tensor] | None = None):
        self.head, self.rows = head, rows
        hidden_RH, self.target_R = head.hidden_KH[rows], head.target_K[rows]
        self.n, self.vocab = n, vocab = len(hidden_RH), len(head.weight_VH)
        self.z_RV = z_RV = head.buffer[:n]
        if hidden_RH.dtype == torch.float32:
            torch.mm(hidden_RH, head.weight_VH.t(), out=z_RV)
        else:
            torch.mm(hidden_RH, head.weight_VH.t(), out_dtype=torch.float32, out=z_RV)
        self.logp_R, self.entropy_R, self.top_R, self.log_total_R = z_RV.new_empty((4, n))
        self.dz_RV = _narrowed(z_RV, hidden_RH.dtype)
        block = min(4096, triton.next_power_of_2(vocab))
        self.options = {"BANNED": head.banned is not None, "BLOCK": block, "num_warps": 8 if block == 4096 else 4}
        self.banned = self.target_R if head.banned is None else head.banned  # any pointer: it is not read
        if loss is None:
            _statistics_kernel[(n,)](
                z_RV, z_RV.stride(0), vocab, head.scale * LOG2E, self.target_R, self.banned,
                self.top_R, self.log_total_R, self.logp_R, self.entropy_R, **self.options,
            )
            return
        self.loss_R, self.live_R = z_RV.new_empty(n), z_RV.new_empty(n, dtype=torch.bool)
        advantage, weight = values["advantage"], values["weight"]  # the latter in place of columns that are not read
        _loss_kernel[(n,)](
            z_RV, z_RV.stride(0), self.dz_RV, self.dz_RV.stride(0), vocab, head.scale * LOG2E, head.scale, self.target_R, self.banned,
            advantage, weight, *(values.get(name, weight) for name in ("old_logp", "ref_logp", "engine_logp")),
            self.logp_R, self.entropy_R, self.loss_R, self.live_R, loss.clip_low, loss.clip_high, loss.dual_clip or 0.0,
            loss.sapo_tau_positive, loss.sapo_tau_negative, loss.kl_coef, loss.entropy_coef, loss.tis_cap or 0.0,
            KIND=loss.kind, DUAL=loss.dual_clip is not None, KL=loss.kl or "none", TIS=loss.tis_cap is not None,
            ON_POLICY="old_logp" not in values, **self.options,
        )

    def backward(self, grad_logp_R: torch.Tensor, grad_entropy_R: torch.Tensor) -> None:
        _gradient_kernel[(self.n,)](
            self.z_RV, self.z_RV.stride(0), self.dz_RV, self.dz_RV.stride(0), self.vocab, self.head.scale * LOG2E, self.head.scale,
            self.target_R, self.banned, self.top_R, self.log_total_R, self.entropy_R,
            grad_logp_R.contiguous(), grad_entropy_R.contiguous(), **self.options,
        )
        self.add_products((grad_logp_R != 0) | (grad_entropy_R != 0))

    def add_products(self, live_R: torch.Tensor) -> None:
        """Add what the gradient of the logits, now in their place, is worth. Rows that are not live hold no gradient."""
        head, hidden_RH, dz_RV, order = self.head, self.head.hidden_KH[self.rows], self.dz_RV, None
        n = int(live_R.sum())
        if n == 0:
            return
        if n < len(live_R):
            holes, movers, order = _close_ranks(live_R, n)
            dz_RV[holes] = dz_RV[movers]
            dz_RV, hidden_RH = dz_RV[:n], hidden_RH[order]
        if head.grad_hidden is not None and order is None:
            torch.mm(dz_RV, head.weight_VH, out=head.grad_hidden[self.rows])
        elif head.grad_hidden is not None:
            head.grad_hidden[self.rows].index_copy_(0, order, dz_RV @ head.weight_VH)
        if head.grad_weight is not None:
            _add_product(head.grad_weight, dz_RV.t(), hidden_RH)


def _narrowed(z_RV: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Room for a gradient of `dtype` in that of fp32 logits: each row begins where the row of logits does."""
    if dtype == torch.float32:
        return z_RV
    return z_RV.as_strided((z_RV.shape[0], z_RV.stride(0)), z_RV.stride()).view(dtype)[:, : z_RV.shape[1]]


# ----------------------------------------------------------------------------------------------------------------------
# Scoring without logits: the product and the statistics in one Triton kernel


@_jit
def _score_kernel(
    hidden, weight, targets, banned, parts, K, V, H, scale, splits, split_tiles,
    PROGRAMS: tl.constexpr, GROUP: tl.constexpr, BANNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """Each program takes (row block, vocabulary split) after (row block, vocabulary split), BM rows by split_tiles x BN ids.

    At any time the programs work on GROUP row blocks and a few splits, so that those rows stay in the L2 cache and the
    weight is read from memory only K / (GROUP * BM) times. parts (4, splits, K): top, total, weighted and target logit.
    """
    row_blocks = tl.cdiv(K, BM)
    for item in tl.range(tl.program_id(0), row_blocks * splits, PROGRAMS):
        first = item // (GROUP * splits) * GROUP
        height = tl.minimum(row_blocks - first, GROUP)
        split = (item - first * splits) // height
        row = (first + (item - first * splits) % height) * BM
        rows = row + tl.arange(0, BM)
        target = tl.load(targets + rows, mask=rows < K, other=-1).to(tl.int32)
        top = tl.full((BM,), -float("inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        weighted = tl.zeros((BM,), tl.float32)
        target_z = tl.full((BM,), -float("inf"), tl.float32)
        for column in range(split * split_tiles * BN, tl.minimum((split + 1) * split_tiles * BN, V), BN):
            product = tl.zeros((BM, BN), tl.float32)
            for k in range(0, H, BK):
                product = tl.dot(hidden.load([row, k]), weight.load([column, k]).T, product, input_precision="ieee")
            # Half the tile at a time: the whole of it and its exponentials would not fit the registers.
            low, high = product.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
            for half in tl.static_range(2):
                z = low if half == 0 else high
                begin = column + half * (BN // 2)
                columns = begin + tl.arange(0, BN // 2)
                keep = columns < V
                if BANNED:
                    keep = keep & (tl.load(banned + columns, mask=keep, other=1) == 0)
                z = tl.where(keep[None, :], z * scale, -float("inf"))
                top, total, weighted = _fold(top, total, weighted, z, 1)
                here = (target >= begin) & (target < begin + BN // 2)
                if tl.max(here.to(tl.int32), 0) > 0:  # few tiles hold a target
                    found = tl.sum(tl.where(columns[None, :] == target[:, None], z, 0.0), 1)
                    target_z = tl.where(here, found, target_z)
        at = parts + split.to(tl.int64) * K + rows
        size = splits.to(tl.int64) * K
        tl.store(at, top, mask=rows < K)
        tl.store(at + size, total, mask=rows < K)
        tl.store(at + 2 * size, weighted, mask=rows < K)
        tl.store(at + 3 * size, target_z, mask=rows < K)


def scorable(hidden_KH: torch.Tensor, weight_VH: torch.Tensor) -> bool:
    """Whether _score_kernel can read these: tensor descriptors want rows, and 16-byte steps between them."""
    return len(hidden_KH) > 0 and all(
        x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 for x in (hidden_KH, weight_VH)
    )


def triton_score(
    hidden_KH: torch.Tensor, weight_VH: torch.Tensor, target_K: torch.Tensor, temperature: float, banned: torch.Tensor | None,
    tile: tuple[int, int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logp_K and entropy_K by _score_kernel; `tile` is (BM, BN, BK)."""
    (n, hidden), vocab = hidden_KH.shape, len(weight_VH)
    wide = hidden_KH.element_size() == 2
    bm, bn, bk = tile or ((128, 256, 64) if wide else (64, 128, 32))
    programs = torch.cuda.get_device_properties(hidden_KH.device).multi_processor_count if hidden_KH.is_cuda else 3
    tiles = -(-vocab // bn)
    # Enough splits for every program to have work, and a quarter of the programs where that makes whole waves of a group.
    split_tiles = -(-tiles // min(tiles, max(programs // 4, -(-programs // -(-n // bm)))))
    splits = -(-tiles // split_tiles)
    parts = hidden_KH.new_empty((4, splits, n), dtype=torch.float32)
    mask = target_K if banned is None else banned_mask(banned, vocab)
    _score_kernel[(programs,)](
        TensorDescriptor(hidden_KH, list(hidden_KH.shape), list(hidden_KH.stride()), [bm, bk]),
        TensorDescriptor(weight_VH, list(weight_VH.shape), list(weight_VH.stride()), [bn, bk]),
        target_K, mask, parts, n, vocab, hidden, LOG2E / temperature, splits, split_tiles,
        PROGRAMS=programs, GROUP=32, BANNED=banned is not None, BM=bm, BN=bn, BK=bk, num_warps=8, num_stages=4 if wide else 2,
    )
    top_SK, total_SK, weighted_SK, target_SK = parts
    top = top_SK.amax(0)
    fall = (top_SK - top).clamp_(min=-200.0)
    decay = fall.exp2()
    weighted = ((weighted_SK + fall * total_SK) * decay).sum(0)
    total = (total_SK * decay).sum(0)
    log_total = total.log2()
    return (target_SK.amax(0) - top - log_total) * LN2, (log_total - weighted / total) * LN2
