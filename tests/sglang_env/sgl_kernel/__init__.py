"""Stands in for SGLang's kernels: every name is there, and says which one it is when it is called.

What SGLang computes on a CPU with --attention-backend torch_native and --sampling-backend pytorch is plain torch.
"""

from collections.abc import Callable

__version__ = "0.0.0"

# Operators that SGLang looks for, and does without
OPTIONAL = {"fused_qk_norm_cpu", "fused_qk_norm_rope_cpu"}


def missing(name: str) -> Callable:
    def wanted(*args, **more):
        raise NotImplementedError(f"SGLang wants {name}, of which tests/sglang_env has no more than the name")

    wanted.__name__ = wanted.__qualname__ = name
    return wanted


def __getattr__(name: str) -> Callable:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(f"sgl_kernel.{name}")


class Operators:
    """torch.ops.sgl_kernel, with those for CPUs: of any other SGLang looks whether it is there."""

    def __getattr__(self, name: str) -> Callable:
        if not name.endswith("_cpu") or name in OPTIONAL:
            raise AttributeError(name)
        return missing(f"torch.ops.sgl_kernel.{name}")
