"""Start-up code that lets SGLang serve on a CPU without its compiled kernels.

SGLang's CPU kernels are not on PyPI; the `sgl_kernel` next to this file replaces them. PyPI's torchvision is built for
CUDA; tests/vllm_env/sitecustomize.py, which is run from here, works around that. With this folder on PYTHONPATH, every
Python process runs this file before anything else, including the processes that SGLang starts.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).parents[1] / "vllm_env" / "sitecustomize.py"
_torchvision = importlib.util.spec_from_file_location("_torchvision", _path)
sys.modules["_torchvision"] = importlib.util.module_from_spec(_torchvision)
_torchvision.loader.exec_module(sys.modules["_torchvision"])


class _OperatorInstaller(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "sglang":
            sys.meta_path.remove(self)
            import sgl_kernel
            import torch

            torch.ops.sgl_kernel = sgl_kernel.Operators()
        return None


sys.meta_path.insert(0, _OperatorInstaller())
