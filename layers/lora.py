"""LoRA (arXiv:2106.09685): a frozen matrix W is joined by a product of two small ones, W + alpha / rank * B A.

Reads and writes PEFT's adapter format.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from errors import as_user_error, need
from utils import derive_seed


@dataclass(frozen=True)
class LoraConfig:
    rank: int
    alpha: float
    targets: tuple[str, ...] = ()  # last names of linear layers of the language model's blocks (empty: the family's)
    vision: bool = False  # also the linear layers of the tower's blocks
    seed: int = 0


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Its own weight keeps its name, so checkpoints and engines need not know."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.off:
            return out
        return out + self.scale * F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))


def find_lora_layers(module: nn.Module) -> dict[str, LoraLinear]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


def find_linear_layers(hf: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in hf.named_modules() if isinstance(layer, nn.Linear)}


def add_adapter(layer: nn.Linear, scale: float, a: Tensor, b: Tensor) -> None:
    """Give a layer an adapter, in fp32 whatever the layer is in."""
    layer.__class__ = LoraLinear
    layer.scale, layer.off = scale, False
    device = "cpu" if layer.weight.is_meta else layer.weight.device
    layer.lora_A, layer.lora_B = (nn.Parameter(x.to(device, torch.float32, copy=True)) for x in (a, b))


def add_lora(hf: nn.Module, lora: LoraConfig) -> nn.Module:
    """Adapters for the chosen layers, in place. They start as nothing: B is 0. Every rank draws the same."""
    family = hf.family
    text, tower = f"{family.language}.{family.blocks}.", f"{family.vision}.{family.vision_blocks}."
    linear = find_linear_layers(hf)
    known = {name.rpartition(".")[2] for name in linear if name.startswith(text)}
    missing, there = " ".join(sorted(set(lora.targets) - known)), ", ".join(sorted(known))
    need(not missing, f"--lora-targets {missing}: no such linear layers; the language model's blocks have {there}")
    targets = lora.targets or family.lora_targets or known
    for name, layer in linear.items():
        if (name.startswith(text) and name.rpartition(".")[2] in targets) or (lora.vision and name.startswith(tower)):
            generator = torch.Generator().manual_seed(derive_seed(lora.seed, "lora", name))
            drawn = torch.rand(lora.rank, layer.in_features, generator=generator)
            a, b = (drawn * 2 - 1) * layer.in_features**-0.5, torch.zeros(layer.out_features, lora.rank)
            add_adapter(layer, lora.alpha / lora.rank, a, b)
    return hf


class AdapterFreePolicy:
    """The policy as it was before its adapters learnt: a reference without weights of its own."""

    def __init__(self, policy: nn.Module):
        self.policy = policy

    def __call__(self, *args):
        layers = find_lora_layers(self.policy).values()
        for layer in layers:
            layer.off = True
        try:
            return self.policy(*args)
        finally:
            for layer in layers:
                layer.off = False


@torch.no_grad()
def merge_lora(hf: nn.Module) -> nn.Module:
    """Adapters added into the weights that they adapt, in place; in fp32."""
    for layer in find_lora_layers(hf).values():
        layer.weight.copy_(layer.weight.float() + layer.scale * layer.lora_B.float() @ layer.lora_A.float())
        layer.__class__ = nn.Linear
        del layer.lora_A, layer.lora_B
    return hf


PEFT_PREFIX = "base_model.model."  # of a layer's name in PEFT's files
UNSUPPORTED_PEFT_KEYS = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "fan_in_fan_out",
    "lora_bias",
)  # not plain


def write_adapter(
    hf: nn.Module, base: str, folder: Path, gathered: Mapping[str, torch.Tensor] | None = None
) -> None:
    """adapter_config.json and adapter_model.safetensors, as PEFT writes them. `base` is the model's folder or hub
    id; `gathered` are the adapters' tensors by name, of a model that is sharded."""
    layers = find_lora_layers(hf)
    first = next(iter(layers.values()))
    rank = first.lora_A.shape[0]
    made = {"base_model_name_or_path": base, "r": rank, "lora_alpha": first.scale * rank, "lora_dropout": 0.0}
    plain = {"bias": "none", "fan_in_fan_out": False, "inference_mode": True, "use_rslora": False}
    names = list(layers)  # in full: the tower's MLPs may be called like the language model's
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", **made, **plain, "target_modules": names}
    adapters = gathered or {name: p.detach() for name, p in hf.named_parameters() if ".lora_" in name}
    tensors = {f"{PEFT_PREFIX}{name}.weight": p.float().contiguous() for name, p in adapters.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def read_adapter(hf: nn.Module, folder: Path, base: str) -> nn.Module:
    """A PEFT adapter put on the layers of its base, in place; UserError where it is another base's, or no plain
    LoRA."""
    config = json.loads((folder / "adapter_config.json").read_text())
    recorded = config.get("base_model_name_or_path") or ""
    same = Path(recorded).name == Path(base).name  # folders move, names stay
    need(same, f"{folder}: the adapter was made for {recorded!r}, not for {base!r}")
    kind = (
        config.get("peft_type"),
        config.get("bias", "none"),
        *(key for key in UNSUPPORTED_PEFT_KEYS if config.get(key)),
    )
    told = f"an adapter of kind {', '.join(map(str, kind))}: only plain LoRA is read; merge it with peft"
    need(kind == ("LORA", "none"), f"{folder}: {told}")
    path = folder / "adapter_model.safetensors"
    with as_user_error((OSError, SafetensorError), f"{path}: missing, truncated or no safetensors file"):
        tensors = load_file(path)
    linear, rank = find_linear_layers(hf), config.get("r")
    alpha = config.get("lora_alpha")
    sizes = isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)
    need(sizes, f"{folder}: adapter_config.json has r={rank!r} and lora_alpha={alpha!r}; correct them")
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    names = {key.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for key in tensors}
    shapes = {}
    for name in names & linear.keys():
        shapes[f"{PEFT_PREFIX}{name}.lora_A.weight"] = (rank, linear[name].in_features)
        shapes[f"{PEFT_PREFIX}{name}.lora_B.weight"] = (linear[name].out_features, rank)
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    for key in sorted(shapes | found):
        has, wants = found.get(key), shapes.get(key)
        need(has == wants, f"{folder}: the adapter does not fit {base!r}: {key} has shape {has}, and {wants} is needed")
    for name in sorted(names):
        add_adapter(linear[name], scale, *(tensors[f"{PEFT_PREFIX}{name}.lora_{x}.weight"] for x in "AB"))
    return hf
