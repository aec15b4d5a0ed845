"""CPU functions that compute the values of vLLM's CUDA kernels on the null GPU (values.py does so for torch's).

vLLM's CUDA wheel takes its default path for an H100 (Model Runner V2, FlashAttention 3 over a paged KV cache, fused
kernels), with every check, allocation and launch. Its kernels are of two kinds:

- Triton kernels (a step's inputs, slots of the KV cache, M-RoPE, sampling, log-probabilities) run in Triton's
  interpreter, in the tensors' own memory. TRITON_INTERPRET=1 asks for it; nothing is replaced.
- CUDA kernels do nothing. REPLACED has a CPU function for each of those that a Qwen2.5-VL in bfloat16 needs:
  _C.rms_norm, _C.fused_add_rms_norm, _C.silu_and_mul, _C_cache_ops.reshape_and_cache_flash and _vllm_fa3_C.fwd.
  _vllm_fa3_C.get_scheduler_metadata returns garbage, which only the attention kernel would read.

vLLM's find_loaded_library is replaced too (values.find_null_gpu). Sleep copies weights with the CUDA runtime that this
function finds in the process, and other packages load NVIDIA's runtime into the same process.

Not covered: CUDA graphs and torch.compile (the engine starts with enforce_eager), other families (experts and recurrent
layers have kernels of their own), quantization, and several GPUs: nothing is sent between them.
"""

import itertools
from typing import Any

import torch
from null_gpu_values import attend
from torch import Tensor
from torch.nn.functional import silu


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> None:
    y = x.float()
    out.copy_((y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual += x
    rms_norm(x, residual, weight, epsilon)


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(silu(gate) * up)


def reshape_and_cache(key, value, key_cache, value_cache, slots, dtype: str, key_scale, value_scale) -> None:
    used, size = slots >= 0, key_cache.shape[1]
    block, place = slots[used] // size, slots[used] % size
    key_cache[block, place] = key[: len(slots)][used]
    value_cache[block, place] = value[: len(slots)][used]


def flash_attention_3(q, k, v, *args: Any) -> tuple[Tensor, ...]:
    """Attend in each sequence of a batch. Keys and values are in a paged cache (with a table of blocks) or packed."""
    out, stops_q, stops_k, lengths, table = (args[i] for i in (3, 4, 5, 8, 11))
    scale, causal, window, softcap = args[20], args[21], args[22:24], args[24]
    assert window in ((-1, -1), (-1, 0)) and not softcap
    out = torch.zeros_like(q) if out is None else out
    for i, (start, stop) in enumerate(itertools.pairwise(stops_q.tolist())):
        if table is None:
            keys, values = (x[stops_k[i] : stops_k[i + 1]] for x in (k, v))
        else:
            blocks = table[i, : -(-int(lengths[i]) // k.shape[1])].long()
            keys, values = (x[blocks].flatten(0, 1)[: int(lengths[i])] for x in (k, v))
        n_q, n_k = stop - start, len(keys)
        mask = torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q) if causal else None
        sequence = (x.transpose(0, 1)[None] for x in (q[start:stop], keys, values))
        out[start:stop] = attend(*sequence, mask, False, scale)[0].transpose(0, 1)
    return out, *[torch.empty(0)] * 3


REPLACED = {
    "_C::rms_norm": rms_norm,
    "_C::fused_add_rms_norm": fused_add_rms_norm,
    "_C::silu_and_mul": silu_and_mul,
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache,
    "_vllm_fa3_C::fwd": flash_attention_3,
}
UNREAD = {"_vllm_fa3_C::get_scheduler_metadata"}
