"""Weights by Hugging Face names into a live model of vLLM's, in the trainer's process or in a server."""

from collections.abc import Iterator
from itertools import chain

import torch
import transformers

from utils import NamedTensors

EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # what their tensors hold


class WeightLoader:
    """Copies weights, by Hugging Face names, into a live model, in as many calls of `load` as one likes.

    vLLM drops some names that it does not know without a word, so each is looked up first; `finish` says what a set
    that should have been whole left out.
    """

    def __init__(self, model: torch.nn.Module, config: transformers.PreTrainedConfig):
        self.model = model
        self.names = parameter_names(config)
        self.start_update()

    def start_update(self) -> None:
        self.sent: set[str] = set()
        self.filled: set[str] = set()  # vLLM's parameters

    def load(self, named_tensors: NamedTensors) -> None:
        bucket = list(named_tensors)
        self.sent |= {name for name, _ in bucket}
        if unknown := sorted(self.sent - self.names):
            raise ValueError(f"load_weights: the engine has no parameter {unknown[0]!r}")
        self.filled |= self.model.load_weights(list(chain.from_iterable(map(split_experts, bucket))))

    def finish_update(self, whole: bool) -> None:
        assert self.sent, "load_weights: no tensor was given; the engine would go on with stale weights"
        missing = sorted(self.names - self.sent) or sorted(dict(self.model.named_parameters()).keys() - self.filled)
        if whole and missing:
            raise ValueError(f"load_weights: {len(missing)} parameters were not sent, the first is {missing[0]!r}")


def parameter_names(config: transformers.PreTrainedConfig) -> set[str]:
    """Of a model's parameters in transformers, which is how a trainer sends them; no weight is loaded."""
    with torch.device("meta"):
        hf = transformers.AutoModelForImageTextToText.from_config(config)
    return {name for name, _ in hf.named_parameters()}


def split_experts(named_tensor: tuple[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts of a layer, which transformers has in one tensor (experts, outputs, inputs), each under a name of its
    own: vLLM reads those for every family, but experts in one tensor for some families the other way round."""
    name, tensor = named_tensor
    layer, _, kind = name.rpartition(".experts.")
    if kind not in EXPERT_PARTS:
        yield name, tensor
        return
    for i, expert in enumerate(tensor):
        for projection, part in zip(EXPERT_PARTS[kind], expert.chunk(len(EXPERT_PARTS[kind])), strict=True):
            yield f"{layer}.experts.{i}.{projection}.weight", part
