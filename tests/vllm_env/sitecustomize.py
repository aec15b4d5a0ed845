"""Lets torchvision from PyPI, which is built against CUDA, be imported beside a CPU build of torch.

vLLM imports torchvision, and torchvision's Python part wants two operators that its CUDA library would have defined.
Declaring their schemas is enough: nothing in this project calls them. On PYTHONPATH this file is run by every Python
process before anything else, so also by the ones that vLLM starts to look at models and by its workers.
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
            _Declare.library = library  # kept alive: the declarations go with it
        return None


sys.meta_path.insert(0, _Declare())
