"""The policy head: log-probabilities and entropy of sampled tokens without ever holding all logits.

`linear_logprob` is the plain-torch definition and what the CPU runs. It walks over the rows in cache-sized blocks,
forms each block of logits once in the forward and once more in the backward, and updates it in place.

Axes: T tokens to score, H hidden size, V vocabulary.
"""

import torch

BLOCK_ELEMENTS = 1 << 21  # logits held at a time on a CPU (8 MB in fp32): a block must not fall out of the cache
GPU_BLOCK_ROWS = 1024  # rows at a time on a GPU, where each block reads the whole weight and adds to its whole gradient


def resolve_kernel(choice: str, device: torch.device) -> str:
    """Turn --kernel auto|torch into the implementation used for the whole run; called once, at start-up."""
    if choice not in ("auto", "torch"):
        raise ValueError(f"--kernel {choice!r}: known kernels are 'auto' and 'torch'")
    return f"torch (plain definition, {device.type})"


def _row_blocks(hidden_TH: torch.Tensor, weight_VH: torch.Tensor) -> range:
    rows = GPU_BLOCK_ROWS if hidden_TH.is_cuda else max(1, BLOCK_ELEMENTS // weight_VH.shape[0])
    return range(0, hidden_TH.shape[0], rows)


def _block_logits(hidden: torch.Tensor, weight: torch.Tensor, inv_temperature: float, banned: torch.Tensor | None):
    """Scaled logits of one block of rows, in fp32, shifted so that each row's maximum is 0."""
    z = (hidden @ weight.t()).float()
    if inv_temperature != 1.0:
        z *= inv_temperature
    if banned is not None:
        z[:, banned] = -torch.inf
    z -= z.amax(dim=1, keepdim=True)
    return z


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, targets_T, temperature, banned):
        n = hidden_TH.shape[0]
        logp_T = hidden_TH.new_empty(n, dtype=torch.float32)
        entropy_T = hidden_TH.new_empty(n, dtype=torch.float32)
        blocks = _row_blocks(hidden_TH, weight_VH)
        for start in blocks:
            rows = slice(start, start + blocks.step)
            z = _block_logits(hidden_TH[rows], weight_VH, 1.0 / temperature, banned)
            target_z = z.gather(1, targets_T[rows, None]).squeeze(1)
            p = z.exp()
            log_sum = p.sum(dim=1).log()
            if banned is not None:
                z[:, banned] = 0.0  # 0 * -inf would be NaN; a banned id contributes nothing
            logp_T[rows] = target_z - log_sum
            # H = ln S - sum(p z) / S with shifted z: no cancellation, however large the logits are
            entropy_T[rows] = log_sum - p.mul_(z).sum(dim=1) / log_sum.exp()
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, entropy_T)
        ctx.temperature, ctx.banned = temperature, banned
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx, grad_logp_T, grad_entropy_T):
        hidden_TH, weight_VH, targets_T, entropy_T = ctx.saved_tensors
        inv_temperature = 1.0 / ctx.temperature
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_TH) if need_hidden else None
        # accumulated over blocks, so in fp32 whatever the weight's dtype
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if need_weight else None
        with_entropy = bool(grad_entropy_T.any())
        blocks = _row_blocks(hidden_TH, weight_VH)
        for start in blocks:
            rows = slice(start, start + blocks.step)
            z = _block_logits(hidden_TH[rows], weight_VH, inv_temperature, ctx.banned)
            log_sum = z.exp().sum(dim=1, keepdim=True).log_()
            z -= log_sum  # now log p
            p = z.exp()
            g = grad_logp_T[rows, None]
            if with_entropy:
                if ctx.banned is not None:
                    z[:, ctx.banned] = 0.0
                # dH/dz = -p (ln p + H), and dlogp/dz = onehot - p
                z += entropy_T[rows, None]
                z *= grad_entropy_T[rows, None]
                z += g
                dz = p.mul_(z).neg_()
            else:
                dz = p.mul_(-g)
            dz.scatter_add_(1, targets_T[rows, None], g)
            dz *= inv_temperature
            dz = dz.to(hidden_TH.dtype)
            if need_hidden:
                torch.mm(dz, weight_VH, out=grad_hidden[rows])
            if need_weight:
                if grad_weight.dtype == dz.dtype:
                    grad_weight.addmm_(dz.t(), hidden_TH[rows])
                else:
                    grad_weight += dz.t() @ hidden_TH[rows]
        return grad_hidden, grad_weight.to(weight_VH.dtype) if need_weight else None, None, None, None


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
    if hidden_TH.ndim != 2 or weight_VH.ndim != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise ValueError(f"linear_logprob: hidden {tuple(hidden_TH.shape)} and weight {tuple(weight_VH.shape)} disagree")
    if targets_T.shape != hidden_TH.shape[:1]:
        raise ValueError(f"linear_logprob: {tuple(targets_T.shape)} targets for {tuple(hidden_TH.shape[:1])} rows")
    if hidden_TH.dtype != weight_VH.dtype:
        raise ValueError(f"linear_logprob: hidden is {hidden_TH.dtype}, weight is {weight_VH.dtype}; cast one of them")
    if not temperature > 0:
        raise ValueError(f"linear_logprob: temperature must be > 0, got {temperature}")
    return _LinearLogprob.apply(hidden_TH, weight_VH, targets_T, temperature, banned)
