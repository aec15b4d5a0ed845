"""WeightLoader: loads weights, by Hugging Face names, into a live vLLM model, in the trainer's process or a server."""

from collections.abc import Iterator
from itertools import chain

import torch
import transformers

from utils import NamedTensors

EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # in one tensor


class WeightLoader:
    """Copies weights, by Hugging Face names, into a live vLLM model, in any number of `load` calls per update.

    vLLM silently drops some names that it does not know, so `load` checks every name first. `finish_update` raises if
    a full update left out a parameter.
    """

    def __init__(self, model: torch.nn.Module, config: transformers.PreTrainedConfig):
        self.model = model
        self.names = parameter_names(config)
        self.start_update()

    def start_update(self) -> None:
        """Forget which parameters the last update sent."""
        self.sent: set[str] = set()
        self.filled: set[str] = set()  # vLLM's parameters that were loaded

    def load(self, named_tensors: NamedTensors) -> None:
        """Load some tensors of an update. Raise ValueError for a name that the model does not have."""
        bucket = list(named_tensors)
        self.sent |= {name for name, _ in bucket}
        if unknown := sorted(self.sent - self.names):
            raise ValueError(f"load_weights: the engine has no parameter {unknown[0]!r}")
        self.filled |= self.model.load_weights(list(chain.from_iterable(map(split_experts, bucket))))

    def finish_update(self, full: bool) -> None:
        """Raise ValueError if a full update has left out a parameter."""
        assert self.sent, "load_weights: no tensor was given; the engine would keep its stale weights"
        missing = sorted(self.names - self.sent) or sorted(dict(self.model.named_parameters()).keys() - self.filled)
        if full and missing:
            raise ValueError(f"load_weights: {len(missing)} parameters were not sent, the first is {missing[0]!r}")


def parameter_names(config: transformers.PreTrainedConfig) -> set[str]:
    """Return the names of a model's parameters in transformers, under which the trainer sends them. No weights are
    loaded."""
    with torch.device("meta"):
        hf = transformers.AutoModelForImageTextToText.from_config(config)
    return {name for name, _ in hf.named_parameters()}


def split_experts(named_tensor: tuple[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the experts of a layer, which transformers stores in one tensor (experts, outputs, inputs), as separate
    tensors. vLLM reads separate experts for every family, but reads one tensor of experts transposed for some."""
    name, tensor = named_tensor
    layer, _, suffix = name.rpartition(".experts.")
    if suffix not in EXPERT_PARTS:
        yield name, tensor
        return
    for i, expert in enumerate(tensor):
        for projection, part in zip(EXPERT_PARTS[suffix], expert.chunk(len(EXPERT_PARTS[suffix])), strict=True):
            yield f"{layer}.experts.{i}.{projection}.weight", part
