"""Tests for a GPU: compiled kernels against float64, packed attention against the dense mask, and bf16 ratios.

    pytest -m gpu tests/test_gpu.py                          # on a CUDA machine; on others all tests are skipped
    GPU_TESTS_ON_CPU=1 pytest -m gpu tests/test_gpu.py       # a few tiny cases, in Triton's interpreter

tests/test_kernels.py, test_model.py and test_update.py test the same code on a CPU, in more detail.
"""

import os
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from conftest import dense_mask, written
from parity_worker import make_prompts, make_rollouts
from test_kernels import LOSSES, columns, in_double, reference, tokens_of

import grpo
import kernels
import train
from grpo import Algorithm, PolicyLoss
from kernels import fused_policy_loss, linear_logprob
from layers.attention import PackedAttention
from model import Policy, load_hf
from packing import MicroBatch, Packer, TokenBatch, TrainBatch, make_token_batch
from parallel.models import Models
from parallel.sharding import apply_fsdp
from rollout import Rollout
from utils import DistContext, Meter, setup_distributed

GPU = torch.cuda.is_available()
TOY = not GPU and os.environ.get("GPU_TESTS_ON_CPU") == "1"
DEVICE = torch.device("cuda" if GPU else "cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU and not TOY, reason="no CUDA device")]
needs_gpu = pytest.mark.skipif(not GPU, reason="no CUDA device, and the code has no CPU version")
# Triton in bf16 needs a GPU, as a CPU has no 16-bit product with an fp32 result
PATHS = [
    (k, t)
    for k in ("triton", "torch")
    for t in (torch.float32, torch.bfloat16)
    if GPU or (k, t) != ("triton", torch.bfloat16)
]
# Error limits, for fp32 sums in another order, and for gradients that are rounded to 8 bits twice (the logits' and
# their own)
VALUE, GRADIENT = 1e-4, {torch.float32: 1e-5, torch.bfloat16: 1e-2}
ATTENTION = {torch.float32: 5e-5, torch.bfloat16: 2e-2}  # probabilities are rounded too; tf32 would be 3e-4


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `want`, or infinity if anything is not finite."""
    error = ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


def draw_inputs(n: int, h: int, v: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return hidden, weight, targets and two coefficients per row; logits have a standard deviation of 3."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(n, h, generator=g), torch.randn(v, h, generator=g) * 3 / h**0.5
    targets, coefficients = torch.randint(0, v - 5, (n,), generator=g), torch.randn(2, n, generator=g) / n
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), targets.to(DEVICE), *coefficients.to(DEVICE)


# --- The policy head ------------------------------------------------------------------------------------------------

# (rows, hidden size, vocabulary, rows per block): incomplete last blocks everywhere; a row stride that bulk copies do
# not support (hidden size 100 in bf16, which uses cuBLAS and the row kernel); a single row; a vocabulary like Qwen's
SHAPES = [(300, 896, 5003, 128), (77, 100, 1999, 64), (1, 64, 333, 2048), (40, 256, 151936, 32)]
SHAPES = [(9, 16, 77, 4)] if TOY else SHAPES


@pytest.mark.parametrize("kernel,dtype", PATHS)
@pytest.mark.parametrize("n,h,v,rows", SHAPES)
def test_log_probabilities_and_gradients_equal_float64(n, h, v, rows, kernel, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "GPU_BLOCK_ROWS", rows)
    hidden, weight, targets, g_logp, g_entropy = draw_inputs(n, h, v, dtype)
    banned = torch.tensor([v - 1, v - 3], device=DEVICE)
    x, w = (t.double().requires_grad_() for t in (hidden, weight))
    want = reference(x, w, targets, 0.7, banned)
    (want[0] @ g_logp.double() + want[1] @ g_entropy.double()).backward()
    y, u = (t.clone().requires_grad_() for t in (hidden, weight))
    got = linear_logprob(y, u, targets, 0.7, banned, kernel)
    (got[0] @ g_logp + got[1] @ g_entropy).backward()
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32 and (a.double() - b).abs().max() < VALUE
    assert relative_error(y.grad, x.grad) < GRADIENT[dtype] and relative_error(u.grad, w.grad) < GRADIENT[dtype]
    assert u.grad[banned].abs().max() == 0
    frozen = hidden.clone().requires_grad_()
    got = linear_logprob(frozen, weight, targets, 0.7, banned, kernel)
    (got[0] @ g_logp + got[1] @ g_entropy).backward()
    assert torch.equal(frozen.grad, y.grad) and weight.grad is None


@pytest.mark.parametrize("kernel,dtype", PATHS)
@pytest.mark.parametrize("name", ["clip, dual", "gspo"] if TOY else list(LOSSES))
def test_every_loss_and_its_gradients_equal_float64(name, kernel, dtype, monkeypatch):
    """39 off-policy tokens, in blocks of 16, with banned ids; a third of the tokens have weight 0."""
    monkeypatch.setattr(kernels, "GPU_BLOCK_ROWS", 16)
    loss, v = LOSSES[name], 77 if TOY else 5003
    hidden, weight, targets, *_ = draw_inputs(39, 16 if TOY else 256, v, dtype, seed=1)
    banned = torch.tensor([v - 1, v - 3], device=DEVICE)
    x, w = (t.double().requires_grad_() for t in (hidden, weight))
    logp, entropy = reference(x, w, targets, 1.3, banned)
    tokens = columns(logp.detach())
    exact = in_double(tokens)
    want = loss(logp, entropy, exact)[0].sum()
    want.backward()
    y, u = (t.clone().requires_grad_() for t in (hidden, weight))
    total, got_logp, got_entropy = fused_policy_loss(y, u, targets, loss, tokens, 1.3, banned, kernel)
    total.backward()
    assert abs(total.item() - want.item()) < VALUE * max(1.0, abs(want.item()))
    assert (got_logp - logp).abs().max() < VALUE and (got_entropy - entropy).abs().max() < VALUE
    assert relative_error(y.grad, x.grad) < GRADIENT[dtype] and relative_error(u.grad, w.grad) < GRADIENT[dtype]
    still = (x.grad == 0).all(1)  # exactly zero, not only nearly: tokens with weight 0, or clipped
    assert still.any() and (y.grad[still] == 0).all()
    frozen = hidden.clone().requires_grad_()
    fused_policy_loss(frozen, weight, targets, loss, tokens, 1.3, banned, kernel)[0].backward()
    assert torch.equal(frozen.grad, y.grad) and weight.grad is None


@pytest.mark.parametrize("kernel", ["triton", "torch"])
def test_nothing_to_learn_gives_zeros(kernel):
    hidden, weight, targets, *_ = draw_inputs(20, 64, 333, torch.bfloat16 if GPU else torch.float32)
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    total = fused_policy_loss(x, w, targets, PolicyLoss(Algorithm()), tokens_of(torch.zeros(20)), kernel=kernel)[0]
    total.backward()
    assert total.item() == 0 and x.grad.abs().max() == 0 and w.grad.abs().max() == 0


# --- Attention of packed micro-batches ------------------------------------------------------------------------------

# (prompt length, response lengths) of each group. A response of 1 token is only a target, one of 2 is a run of 1 token
GROUPS = [
    [(1, [1]), (3, [2, 1, 7])],
    [(64, [65])],  # a whole block
    [(300, [2, 1, 130, 517]), (1, [1, 2]), (129, [64, 64]), (17, [2] * 5)],
    [(700, [1000, 200, 1, 2, 433])],
    [(5, [3]), (2, [2, 2])],  # small again: one compiled kernel serves all sizes
]
GROUPS = GROUPS[:2] if TOY else GROUPS
HEADS = [(4, 2, 32)] if TOY else [(4, 4, 64), (4, 2, 32), (16, 2, 128)]


def pack_groups(groups: list[tuple[int, list[int]]], share: bool) -> MicroBatch:
    rng = torch.Generator().manual_seed(0)
    rollouts = []
    for uid, (prompt, responses) in enumerate(groups):
        prompt_ids = torch.randint(0, 100, (prompt,), generator=rng).tolist()
        for i, n in enumerate(responses):  # the first token makes responses differ
            response = [100 + i] + torch.randint(0, 100, (n - 1,), generator=rng).tolist()
            rollouts.append(written(str(uid), prompt_ids, response))
    [micro] = Packer(10**6, image_token=-1, share=share).pack(rollouts)
    return micro


def make_toy_rollouts(processor, group_size: int) -> list[Rollout]:
    return make_rollouts(make_prompts([f"p{i}" for i in range(6)], processor), group_size)


def exact_attention(q, k, v, end_T, scale):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~dense_mask(end_T), -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("heads,kv_heads,dim", HEADS)
@pytest.mark.parametrize(
    "backend,dtype",
    [
        ("flex", torch.float32),
        ("flex", torch.bfloat16),
        ("sdpa", torch.bfloat16),
        pytest.param("flash", torch.bfloat16, marks=needs_gpu),
    ],
)
def test_attention_and_its_gradients_equal_the_dense_mask(backend, dtype, heads, kv_heads, dim):
    g = torch.Generator().manual_seed(2)
    for groups in GROUPS:
        micro = pack_groups(groups, share=backend != "flash").to(DEVICE)
        n, scale = micro.n_tokens, dim**-0.5
        q, k, v, up = (
            torch.randn(1, count, n, dim, generator=g).to(DEVICE, dtype) for count in (heads, kv_heads, kv_heads, heads)
        )
        want = exact_attention(*(exact := [x.double().requires_grad_() for x in (q, k, v)]), micro.subtree_end_T, scale)
        want.backward(up.double())
        backward = GPU or backend == "sdpa"  # flex has no backward on a CPU
        got = PackedAttention(backend, micro)(
            0, *(ours := [x.clone().requires_grad_(backward) for x in (q, k, v)]), scale
        )
        assert relative_error(got, want) < ATTENTION[dtype] and got.shape == q.shape, (groups, "values")
        if backward:
            got.backward(up)
            for name, a, b in zip("qkv", ours, exact, strict=True):
                if b.grad.norm() > 1e-9:  # the query of a lone token has no gradient
                    assert relative_error(a.grad, b.grad) < ATTENTION[dtype], (groups, name)


@needs_gpu
@pytest.mark.parametrize(
    "family,attn,dtype",
    [
        ("qwen2_5_vl", "flex", torch.float32),
        ("qwen3_vl", "flex", torch.float32),
        ("qwen3_5", "flex", torch.float32),
        ("qwen2_5_vl", "flex", torch.bfloat16),
        ("qwen2_5_vl", "flash", torch.bfloat16),
        ("qwen3_vl_moe", "flash", torch.bfloat16),
    ],
)
def test_whole_models_agree_with_run_by_run_attention(family, attn, dtype, toys, loaded):
    """Compare log-probabilities and gradients of a toy model, with images."""
    processor, results = loaded[family][1], []
    rollouts = make_toy_rollouts(processor, 3)
    [micro] = Packer(10**6, processor.image_token_id, share=attn != "flash").pack(rollouts)
    for back_end in ("sdpa", attn):
        policy = Policy(load_hf(str(toys[family]), dtype), processor, "all", back_end).to(DEVICE)
        out = policy(micro)
        (out.logp_K.mean() + out.entropy_K.mean()).backward()
        gradients = [p.grad.flatten().float() for p in policy.parameters() if p.grad is not None]
        results.append((out.logp_K.detach(), torch.cat(gradients)))
    (want, want_gradient), (got, got_gradient) = results
    bound = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.1, 0.1)}[dtype]
    assert (got - want).abs().max() < bound[0] and relative_error(got_gradient, want_gradient) < bound[1]


# --- bf16 through FSDP2 ---------------------------------------------------------------------------------------------

# for each call of a loss: dtypes of its columns, largest |logp - old_logp|
CALLS: list[tuple[set[torch.dtype], float]] = []


@dataclass(frozen=True)
class RecordingLoss(PolicyLoss):
    def __call__(self, logp_K, entropy_K, tokens: TokenBatch):
        dtypes = {logp_K.dtype}
        dtypes.update(column.dtype for column in tokens.columns().values() if column.is_floating_point())
        CALLS.append((dtypes, (logp_K.detach() - tokens.old_logps).abs().max().item()))
        return super().__call__(logp_K, entropy_K, tokens)


@pytest.fixture(scope="module")
def context():
    created = not dist.is_initialized()
    yield setup_distributed() if created else DistContext(0, 1, DEVICE)
    if created:
        dist.destroy_process_group()


RATIO = 1e-4 if GPU else 1e-6  # nats; a GPU scores and trains with different kernels, which sum in different orders


@pytest.mark.parametrize("kind", ["clip", "gspo", "cispo", "sapo"])
@pytest.mark.parametrize(
    "attn,kernel", [("flex", "triton"), ("flex", "torch"), ("flash", "triton")] if GPU else [("sdpa", "torch")]
)
def test_bf16_ratios_are_one_on_policy(attn, kernel, kind, toys, loaded, context):
    """Log-probabilities before the update equal those in the update, so the loss is that of ratio 1."""
    processor = loaded["qwen2_5_vl"][1]
    policy = Policy(load_hf(str(toys["qwen2_5_vl"])), processor, attention=attn, kernel=kernel).train()
    apply_fsdp(policy, DEVICE, torch.bfloat16)
    flags = f"--model - --data - --out - --steps 1 --group-size 4 --attn {attn} --micro-tokens 300 --update-epochs 2 "
    flags += f"--loss {kind}"
    cfg = train.parse_args([*flags.split(), "--clip-low", "3e-4", "--clip-high", "4e-4"])
    rollouts = make_toy_rollouts(processor, 4)
    weights = grpo.token_weights([len(r.response) for r in rollouts], [True] * len(rollouts), "token", 0)
    micros = Packer(300, processor.image_token_id, share=attn != "flash").pack(rollouts)
    batch = TrainBatch(rollouts, make_token_batch(rollouts, weights), [micros])
    train.compute_logprobs_and_values(batch, Models(policy, None), cfg)
    train.set_advantages(batch, cfg.algo, 0.0, context, Meter())
    loss = (RecordingLoss if kind == "gspo" else PolicyLoss)(cfg.algo)
    worst = 0.0
    CALLS.clear()
    for micro in micros:
        tokens = batch.tokens[micro.token_index_K].to(DEVICE)
        out = policy(micro, 1.0, loss, tokens)
        out.loss.backward()
        worst = max(worst, (out.logp_K - tokens.old_logps).abs().max().item())
        advantage, weight = tokens.advantages.double(), tokens.weights.double()
        want = -advantage
        if kind == "cispo":
            want = -advantage * out.logp_K.double()
        if kind == "sapo":
            want = -advantage * 2 / torch.where(advantage > 0, 1.0, 1.05)
        bound = RATIO * 2 * (weight * advantage.abs()).sum() + 1e-6
        assert abs(out.loss.item() - (weight * want).sum()) < bound, "the loss is not that of ratio 1"
    assert len(micros) > 1 and worst <= RATIO, f"largest |logp - old_logp| {worst:.1e}"
    assert all(dtypes == {torch.float32} and gap <= RATIO for dtypes, gap in CALLS) and bool(CALLS) == (kind == "gspo")
    gradients = [p.grad.to_local() for p in policy.parameters() if p.grad is not None]
    assert gradients and all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients)
    print(f"{attn} {kernel} {kind}: largest |log ratio| {worst:.1e}")
