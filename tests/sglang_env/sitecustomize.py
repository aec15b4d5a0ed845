"""Lets SGLang serve on a CPU without its kernels, whose build for CPUs is not on PyPI: `sgl_kernel` next to this file
stands in. torchvision from PyPI is built against CUDA, too: tests/vllm_env has what helps. On PYTHONPATH this file is
run by every Python process before anything else, so also by those that SGLang starts.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).parents[1] / "vllm_env" / "sitecustomize.py"
_torchvision = importlib.util.spec_from_file_location("_torchvision", _path)
sys.modules["_torchvision"] = importlib.util.module_from_spec(_torchvision)
_torchvision.loader.exec_module(sys.modules["_torchvision"])


class _StandIn(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "sglang":
            sys.meta_path.remove(self)
            import sgl_kernel
            import torch

            torch.ops.sgl_kernel = sgl_kernel.Operators()
        return None


sys.meta_path.insert(0, _StandIn())
