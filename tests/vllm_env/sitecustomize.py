"""An import hook with which torchvision from PyPI, built for CUDA, can be imported with a CPU build of torch.

vLLM imports torchvision, whose Python code needs two operators that its CUDA library would define. Declaring their
schemas is enough, because nothing in this project calls them. With this folder on PYTHONPATH, every Python process runs
this file first, including the processes in which vLLM inspects models, and its workers.
"""

import importlib.abc
import sys


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _Declare.library = library  # keep a reference: deleting the library removes the declarations
        return None


sys.meta_path.insert(0, _Declare())
