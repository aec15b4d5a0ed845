"""The policy head: log-probability, entropy and loss of sampled tokens without ever holding all logits.

`linear_logprob` and `fused_policy_loss` are plain torch here, which is both their definition and what the CPU runs. They
walk over the rows in cache-sized blocks and update each block of logits in place. `linear_logprob` forms the logits once
more in its backward (four matrix products in all); `fused_policy_loss` knows the loss, so it forms the gradient while
the logits are there (three, or two where the head is frozen).

Axes: K tokens to score, H hidden size, V vocabulary; R rows of one block.
"""

from collections.abc import Callable

import torch

BLOCK_ELEMENTS = 1 << 21  # logits held at a time on a CPU (8 MB in fp32): a block must not fall out of the cache
GPU_BLOCK_ROWS = 1024  # rows at a time on a GPU, where each block reads the whole weight and adds to its whole gradient


def resolve_kernel(choice: str, device: torch.device) -> str:
    """Turn --kernel auto|torch into the implementation used for the whole run; called once, at start-up."""
    if choice not in ("auto", "torch"):
        raise ValueError(f"--kernel {choice!r}: known kernels are 'auto' and 'torch'")
    return f"torch (plain definition, {device.type})"


# ----------------------------------------------------------------------------------------------------------------------
# One block of logits


def _blocks(start: int, stop: int, hidden_KH: torch.Tensor, weight_VH: torch.Tensor) -> list[slice]:
    rows = GPU_BLOCK_ROWS if hidden_KH.is_cuda else max(1, BLOCK_ELEMENTS // weight_VH.shape[0])
    return [slice(i, min(i + rows, stop)) for i in range(start, stop, rows)]


def _shifted_logits(hidden_RH: torch.Tensor, weight_VH: torch.Tensor, temperature: float, banned: torch.Tensor | None):
    """Logits over the temperature, in fp32, shifted so that each row's maximum is 0; those of banned ids are -inf."""
    z = (hidden_RH @ weight_VH.t()).float()
    if temperature != 1.0:
        z *= 1.0 / temperature
    if banned is not None:
        z[:, banned] = -torch.inf
    z -= z.amax(dim=1, keepdim=True)
    return z


def _statistics(z_RV: torch.Tensor, target_R: torch.Tensor, banned: torch.Tensor | None):
    """logp and entropy of a block, and exp(z), from shifted logits, whose banned entries become 0."""
    target_z = z_RV.gather(1, target_R[:, None]).squeeze(1)
    p = z_RV.exp()
    total = p.sum(dim=1)
    if banned is not None:
        z_RV[:, banned] = 0.0  # 0 * -inf would be NaN; a banned id contributes nothing
    # H = ln S - sum(p z) / S with shifted z: no cancellation, however large the logits are
    expected_z = torch.linalg.vecdot(p, z_RV) / total
    log_total = total.log()
    return target_z - log_total, log_total - expected_z, p, total


def _logit_gradient(z_RV, p_RV, total_R, entropy_R, target_R, grad_logp_R, grad_entropy_R, temperature) -> torch.Tensor:
    """Gradient of g_logp . logp + g_entropy . H in the unscaled logits, in place of p. z is the shifted logits, p its exp:

    dlogp/dz = onehot - p/S        dH/dz = -p/S (ln(p/S) + H)
    """
    scale = 1.0 / temperature
    if bool(grad_entropy_R.any()):
        z_RV += (entropy_R - total_R.log())[:, None]
        z_RV *= (grad_entropy_R * (-scale / total_R))[:, None]
        z_RV -= (grad_logp_R * (scale / total_R))[:, None]
        p_RV *= z_RV
    else:
        p_RV *= (grad_logp_R * (-scale / total_R))[:, None]
    return p_RV.scatter_add_(1, target_R[:, None], (grad_logp_R * scale)[:, None])


class _Gradients:
    """Gradients of hidden and weight, block by block; the weight's is summed in fp32 whatever its dtype."""

    def __init__(self, hidden_KH: torch.Tensor, weight_VH: torch.Tensor, need_hidden: bool, need_weight: bool):
        self.inputs = hidden_KH, weight_VH
        self.hidden = torch.zeros_like(hidden_KH) if need_hidden else None
        self.weight = torch.zeros_like(weight_VH, dtype=torch.float32) if need_weight else None

    def add(self, rows: slice | torch.Tensor, dz_RV: torch.Tensor) -> None:
        hidden_KH, weight_VH = self.inputs
        dz_RV = dz_RV.to(hidden_KH.dtype)
        if self.hidden is not None:
            self.hidden[rows] = dz_RV @ weight_VH
        if self.weight is not None:
            if self.weight.dtype == dz_RV.dtype:
                self.weight.addmm_(dz_RV.t(), hidden_KH[rows])
            else:
                self.weight += dz_RV.t() @ hidden_KH[rows]

    def scaled(self, factor: torch.Tensor | None = None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Both, times a factor, in the dtypes of their inputs."""
        out = []
        for gradient, given in zip((self.hidden, self.weight), self.inputs, strict=True):
            if gradient is not None and factor is not None:
                gradient *= factor
            out.append(None if gradient is None else gradient.to(given.dtype))
        return tuple(out)


# ----------------------------------------------------------------------------------------------------------------------
# Log-probability and entropy, for any loss


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_KH, weight_VH, target_K, temperature, banned):
        logp_K, entropy_K = hidden_KH.new_empty((2, hidden_KH.shape[0]), dtype=torch.float32)
        for rows in _blocks(0, hidden_KH.shape[0], hidden_KH, weight_VH):
            z = _shifted_logits(hidden_KH[rows], weight_VH, temperature, banned)
            logp_K[rows], entropy_K[rows], _, _ = _statistics(z, target_K[rows], banned)
        ctx.save_for_backward(hidden_KH, weight_VH, target_K)
        ctx.temperature, ctx.banned = temperature, banned
        return logp_K, entropy_K

    @staticmethod
    def backward(ctx, grad_logp_K, grad_entropy_K):
        hidden_KH, weight_VH, target_K = ctx.saved_tensors
        gradients = _Gradients(hidden_KH, weight_VH, *ctx.needs_input_grad[:2])
        for rows in _blocks(0, hidden_KH.shape[0], hidden_KH, weight_VH):
            z = _shifted_logits(hidden_KH[rows], weight_VH, ctx.temperature, ctx.banned)
            _, entropy, p, total = _statistics(z, target_K[rows], ctx.banned)
            gradients.add(rows, _logit_gradient(
                z, p, total, entropy, target_K[rows], grad_logp_K[rows], grad_entropy_K[rows], ctx.temperature
            ))
        return *gradients.scaled(), None, None, None


def linear_logprob(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float = 1.0,
    banned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability (nats) of each target under softmax(hidden @ weight.T / temperature), and the entropy.

    hidden_TH (T, H) and weight_VH (V, H) share a dtype; targets_T (T,) int64 in [0, V). `banned` holds token ids that
    the sampler can never produce (vision placeholders, padding rows of the vocabulary): their probability is exactly
    zero, as it is in the rollout engine. Returns logp_T and entropy_T, both (T,) fp32 and differentiable in hidden and
    weight. T may be 0.
    """
    _check("linear_logprob", hidden_TH, weight_VH, targets_T, temperature)
    return _LinearLogprob.apply(hidden_TH, weight_VH, targets_T, temperature, banned)


def _check(name: str, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor, temperature: float) -> None:
    if hidden_TH.ndim != 2 or weight_VH.ndim != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise ValueError(f"{name}: hidden {tuple(hidden_TH.shape)} and weight {tuple(weight_VH.shape)} disagree")
    if targets_T.shape != hidden_TH.shape[:1]:
        raise ValueError(f"{name}: {tuple(targets_T.shape)} targets for {tuple(hidden_TH.shape[:1])} rows")
    if hidden_TH.dtype != weight_VH.dtype:
        raise ValueError(f"{name}: hidden is {hidden_TH.dtype}, weight is {weight_VH.dtype}; cast one of them")
    if not temperature > 0:
        raise ValueError(f"{name}: temperature must be > 0, got {temperature}")


# ----------------------------------------------------------------------------------------------------------------------
# The loss, evaluated where the logits are


def _groups(loss: Callable, values: dict[str, torch.Tensor], blocks: list[slice]) -> list[slice]:
    """Rows whose losses are evaluated together: a block; or, where the loss couples the tokens of a sequence, as many
    whole sequences as a block holds, or one sequence that is longer than that."""
    if loss.per_token or not blocks:
        return blocks
    sequence, rows = values["sequence"], blocks[0].stop
    ends = [*((sequence[1:] != sequence[:-1]).nonzero()[:, 0] + 1).tolist(), len(sequence)]
    groups, start = [], 0
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if following is None or following - start > rows:
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


class _FusedPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_KH, weight_VH, target_K, loss, values, temperature, banned):
        n = hidden_KH.shape[0]
        logp_K, entropy_K = hidden_KH.new_empty((2, n), dtype=torch.float32)
        total = hidden_KH.new_zeros((), dtype=torch.float32)
        gradients = _Gradients(hidden_KH, weight_VH, *ctx.needs_input_grad[:2])
        for group in _groups(loss, values, _blocks(0, n, hidden_KH, weight_VH)):
            blocks = _blocks(group.start, group.stop, hidden_KH, weight_VH)
            for rows in blocks:
                z = _shifted_logits(hidden_KH[rows], weight_VH, temperature, banned)
                logp_K[rows], entropy_K[rows], p, row_total = _statistics(z, target_K[rows], banned)
            part, g_logp, g_entropy = _loss_and_gradients(
                loss, logp_K[group], entropy_K[group], {name: v[group] for name, v in values.items()}
            )
            total += part
            if not any(ctx.needs_input_grad[:2]):
                continue
            for rows in blocks:
                inside = slice(rows.start - group.start, rows.stop - group.start)
                g, gh = g_logp[inside], g_entropy[inside]
                live = (g != 0) | (gh != 0)
                count = int(live.sum())
                if count == 0:
                    continue
                if len(blocks) > 1:  # a sequence longer than a block: its logits were not kept
                    z = _shifted_logits(hidden_KH[rows], weight_VH, temperature, banned)
                    _, _, p, row_total = _statistics(z, target_K[rows], banned)
                where, parts = rows, (z, p, row_total, entropy_K[rows], target_K[rows], g, gh)
                if count < len(live):  # rows without gradient are left out of both products
                    keep = live.nonzero()[:, 0]
                    where, parts = keep + rows.start, tuple(x[keep] for x in parts)
                gradients.add(where, _logit_gradient(*parts, temperature))
        ctx.gradients = gradients
        ctx.mark_non_differentiable(logp_K, entropy_K)
        return total, logp_K, entropy_K

    @staticmethod
    def backward(ctx, grad_total, *_):
        return *ctx.gradients.scaled(grad_total), None, None, None, None, None


def fused_policy_loss(
    hidden_KH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_K: torch.Tensor,
    loss: Callable,
    values: dict[str, torch.Tensor],
    temperature: float = 1.0,
    banned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of scored tokens, differentiable in hidden and weight; and, without gradient, their logp_K and entropy_K.

    `loss` is a grpo.PolicyLoss, or anything alike: called as loss(logp_R, entropy_R, values_R) it returns the weighted
    loss of each row first, and has a bool `per_token`. `values` are (K,) columns on hidden's device. The rest is as for
    linear_logprob. The gradient is formed in the forward, and only there: call backward at most once.
    """
    _check("fused_policy_loss", hidden_KH, weight_VH, targets_K, temperature)
    if not torch.is_grad_enabled():  # inside the function below it never is
        hidden_KH, weight_VH = hidden_KH.detach(), weight_VH.detach()
    return _FusedPolicyLoss.apply(hidden_KH, weight_VH, targets_K, loss, values, temperature, banned)
