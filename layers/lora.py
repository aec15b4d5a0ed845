"""LoRA (arXiv:2106.09685): a frozen matrix W is joined by a product of two small ones, W + alpha / rank * B A.

Reads and writes PEFT's adapter format.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from errors import UserError
from utils import derive_seed


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    targets: tuple[str, ...] = ()  # last names of linear layers of the language model's blocks (empty: the family's)
    vision: bool = False  # also the linear layers of the tower's blocks
    seed: int = 0


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Its own weight keeps its name, so checkpoints and engines need not know."""

    def adapt(self, rank: int, scale: float, seed: int = 0) -> None:
        self.scale = scale
        self.off = False
        device = "cpu" if self.weight.is_meta else self.weight.device
        drawn = torch.rand(rank, self.in_features, generator=torch.Generator().manual_seed(seed))
        a = (drawn * 2 - 1) * self.in_features**-0.5
        self.lora_A = nn.Parameter(a.to(device))  # fp32 whatever W is in; every rank draws the same
        # zeros: the adapter starts as nothing
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.off:
            return out
        return out + self.scale * F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))


def lora_layers(module: nn.Module) -> dict[str, LoraLinear]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


def add_lora(hf: nn.Module, lora: Lora) -> nn.Module:
    """Adapters for the chosen layers, in place."""
    family = hf.family
    text, tower = f"{family.language}.{family.blocks}.", f"{family.vision}.{family.vision_blocks}."
    linear = {name: layer for name, layer in hf.named_modules() if isinstance(layer, nn.Linear)}
    known = {name.rsplit(".", 1)[-1] for name in linear if name.startswith(text)}
    missing = set(lora.targets) - known
    if missing:
        raise UserError(f"--lora-targets {' '.join(sorted(missing))}: no such linear layers; the language model's "
                        "blocks have "
                         f"{', '.join(sorted(known))}")
    targets = set(lora.targets or family.lora_targets)
    for name, layer in linear.items():
        if (name.startswith(text) and name.rsplit(".", 1)[-1] in targets) or (lora.vision and name.startswith(tower)):
            layer.__class__ = LoraLinear
            layer.adapt(lora.rank, lora.alpha / lora.rank, derive_seed(lora.seed, "lora", name))
    return hf


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    layers = lora_layers(module).values()
    for layer in layers:
        layer.off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.off = False


class AdaptersOff:
    """The policy as it was before its adapters learnt: a reference without weights of its own."""

    def __init__(self, policy: nn.Module):
        self.policy = policy

    def __call__(self, *args):
        with without_adapters(self.policy):
            return self.policy(*args)


@torch.no_grad()
def merge_lora(hf: nn.Module) -> nn.Module:
    """Adapters added into the weights that they adapt, in place; in fp32."""
    for layer in lora_layers(hf).values():
        layer.weight.copy_(layer.weight.float() + layer.scale * layer.lora_B.float() @ layer.lora_A.float())
        layer.__class__ = nn.Linear
        del layer.lora_A, layer.lora_B
    return hf


def write_adapter(hf: nn.Module, base: str, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors, as PEFT writes them. `base` is the model's folder or hub
    id."""
    layers = lora_layers(hf)
    first = next(iter(layers.values()))
    rank = first.lora_A.shape[0]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
              "lora_alpha": first.scale * rank,
              "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "use_rslora": False,
              "target_modules": list(layers)}  # in full: the tower's MLPs may be called like the language model's
    tensors = {f"base_model.model.{name}.{ab}.weight": getattr(layer, ab).detach().float().contiguous()
               for name, layer in layers.items() for ab in ("lora_A", "lora_B")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


# PEFT's settings of what this is not
UNREAD = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "lora_bias")


def read_adapter(hf: nn.Module, folder: Path, base: str) -> nn.Module:
    """A PEFT adapter put on the layers of its base, in place; ValueError where it is another base's, or no plain
    LoRA."""
    config = json.loads((folder / "adapter_config.json").read_text())
    recorded = config.get("base_model_name_or_path") or ""
    if os.path.basename(recorded.rstrip("/")) != os.path.basename(base.rstrip("/")):  # folders move, names stay
        raise UserError(f"{folder}: the adapter was made for {recorded!r}, not for {base!r}")
    unread = [k for k in UNREAD if config.get(k)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or unread:
        raise UserError(f"{folder}: peft_type {config.get('peft_type')!r}, bias {config.get('bias')!r}"
                         f"{''.join(f', {k} {config[k]!r}' for k in unread)}: only plain LoRA is read; merge the "
                         "adapter with peft")
    tensors = read_safetensors(folder / "adapter_model.safetensors")
    linear = {name: layer for name, layer in hf.named_modules() if isinstance(layer, nn.Linear)}
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    names = {key.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for key in tensors}
    wanted = {f"base_model.model.{name}.{ab}.weight" for name in names for ab in ("lora_A", "lora_B")}
    if wanted != set(tensors) or not names <= linear.keys():
        odd = sorted([*(wanted ^ set(tensors)), *(names - linear.keys())])
        raise UserError(f"{folder}: the adapter does not fit {base!r}: no such linear layer, or half an adapter: "
                        f"{', '.join(odd[:3])}")
    for name in sorted(names):
        layer = linear[name]
        a, b = (tensors[f"base_model.model.{name}.{ab}.weight"] for ab in ("lora_A", "lora_B"))
        want = (config["r"], layer.in_features), (layer.out_features, config["r"])
        if (tuple(a.shape), tuple(b.shape)) != want:
            raise UserError(f"{folder}: the adapter does not fit {base!r}: {name} has A {tuple(a.shape)} and B "
                            f"{tuple(b.shape)}, where "
                             f"the base needs {want[0]} and {want[1]}")
        layer.__class__ = LoraLinear
        layer.adapt(config["r"], scale)
        layer.lora_A.data.copy_(a)
        layer.lora_B.data.copy_(b)
    return hf


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file; a ValueError that names it where it is missing, cut short or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as e:
        raise UserError(f"{path}: missing, truncated or no safetensors file ({e})") from e
