"""Python runs this file at the start of every process that has this folder on PYTHONPATH. It makes operations on the
null GPU compute values (see ../values.py).

NULL_GPU_VALUES_MIB: values of operations on more memory than this, in MiB, are not computed (default: inf, compute
all).
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class _Hooks(importlib.abc.MetaPathFinder):
    """An import hook that changes modules just after they are imported."""

    def __init__(self):
        self.hooks = {"torch": "install", "layers.attention": "compile_attention"}
        self.hooks |= {"triton.runtime.interpreter": "interpret_in_place", "vllm": "add_vllm_kernels"}
        self.hooks |= {"vllm.utils.system_utils": "find_null_gpu"}
        if os.environ["NULL_GPU_VALUES_MIB"] == "inf":
            self.hooks |= {"layers.attention": "replace_attention", "kernels": "replace_kernels"}

    def find_spec(self, name, path=None, target=None):
        hook = self.hooks.pop(name, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(name)
        self.hooks[name] = hook  # transformers looks for these packages without importing them
        if spec is None:  # vLLM is not installed
            return None
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            getattr(_values(), hook)(*[module][: name != "torch"])

        spec.loader.exec_module = load_and_change
        return spec


def _values():
    file = Path(__file__).parent.parent / "values.py"
    if "null_gpu_values" not in sys.modules:
        spec = importlib.util.spec_from_file_location("null_gpu_values", file)
        sys.modules["null_gpu_values"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["null_gpu_values"])
    return sys.modules["null_gpu_values"]


os.environ.setdefault("NULL_GPU_VALUES_MIB", "inf")
sys.meta_path.insert(0, _Hooks())
