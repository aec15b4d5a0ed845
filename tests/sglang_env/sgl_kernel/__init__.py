"""A stand-in for SGLang's kernels: every name exists, and raises an error with its name when it is called.

With --attention-backend torch_native and --sampling-backend pytorch, SGLang computes with plain torch on a CPU.
"""

from collections.abc import Callable

__version__ = "0.0.0"

# Operators that SGLang looks for but does not need
OPTIONAL = {"fused_qk_norm_cpu", "fused_qk_norm_rope_cpu"}


def make_stub(name: str) -> Callable:
    def raise_error(*args, **kwargs):
        raise NotImplementedError(f"SGLang called {name}, which tests/sglang_env does not implement")

    raise_error.__name__ = raise_error.__qualname__ = name
    return raise_error


def __getattr__(name: str) -> Callable:
    if name.startswith("__"):
        raise AttributeError(name)
    return make_stub(f"sgl_kernel.{name}")


class Operators:
    """A stand-in for torch.ops.sgl_kernel with its CPU operators; SGLang checks whether the others exist."""

    def __getattr__(self, name: str) -> Callable:
        if not name.endswith("_cpu") or name in OPTIONAL:
            raise AttributeError(name)
        return make_stub(f"torch.ops.sgl_kernel.{name}")
