"""LoRA (arXiv:2106.09685): adapters that add a product of two small matrices to a frozen one, W + alpha / rank * B A.

Adapters are read and written in PEFT's format.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from errors import as_user_error, need
from utils import derive_seed


@dataclass(frozen=True)
class LoraConfig:
    """The rank, scale, layers and random seed of a model's adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()  # last names of linear layers of the language model's blocks (empty: the family's)
    vision: bool = False  # also the linear layers of the tower's blocks
    seed: int = 0


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Its own weight keeps its name, so checkpoints and engines need no changes."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.off:
            return out
        return out + self.scale * F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))


def find_lora_layers(module: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with an adapter, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


def find_linear_layers(hf: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers, by name."""
    return {name: layer for name, layer in hf.named_modules() if isinstance(layer, nn.Linear)}


def add_adapter(layer: nn.Linear, scale: float, a: Tensor, b: Tensor) -> None:
    """Add an adapter to a layer, in place; in fp32 whatever the layer's dtype."""
    layer.__class__ = LoraLinear
    layer.scale, layer.off = scale, False
    device = a.device if layer.weight.is_meta else layer.weight.device
    layer.lora_A, layer.lora_B = (nn.Parameter(x.to(device, torch.float32, copy=True)) for x in (a, b))


def add_lora(hf: nn.Module, lora: LoraConfig) -> nn.Module:
    """Add adapters to the chosen layers, in place. Initially they change nothing, because B is 0. Every rank draws the
    same values of A."""
    family = hf.family
    text, tower = f"{family.language}.{family.blocks}.", f"{family.vision}.{family.vision_blocks}."
    linear = find_linear_layers(hf)
    names = {name.rpartition(".")[2] for name in linear if name.startswith(text)}
    missing, known = " ".join(sorted(set(lora.targets) - names)), ", ".join(sorted(names))
    need(not missing, f"--lora-targets {missing}: no such linear layers; the language model's blocks have {known}")
    targets = lora.targets or family.lora_targets or names
    for name, layer in linear.items():
        if (name.startswith(text) and name.rpartition(".")[2] in targets) or (lora.vision and name.startswith(tower)):
            generator = torch.Generator().manual_seed(derive_seed(lora.seed, "lora", name))
            uniform = torch.rand(lora.rank, layer.in_features, generator=generator)
            a, b = (uniform * 2 - 1) * layer.in_features**-0.5, torch.zeros(layer.out_features, lora.rank)
            add_adapter(layer, lora.alpha / lora.rank, a, b)
    return hf


class AdapterFreePolicy:
    """A policy with its adapters switched off: a reference policy that needs no second set of weights."""

    def __init__(self, policy: nn.Module):
        self.policy = policy

    def __call__(self, micro, *args):
        layers = find_lora_layers(self.policy).values()
        for layer in layers:
            layer.off = True
        try:
            return self.policy(replace(micro, experts_T=None), *args)
        finally:
            for layer in layers:
                layer.off = False


@torch.no_grad()
def merge_lora(hf: nn.Module) -> nn.Module:
    """Add the adapters to the weights that they adapt, in place and in fp32, and remove them."""
    for layer in find_lora_layers(hf).values():
        layer.weight.copy_(layer.weight.float() + layer.scale * layer.lora_B.float() @ layer.lora_A.float())
        layer.__class__ = nn.Linear
        del layer.lora_A, layer.lora_B
    return hf


PEFT_PREFIX = "base_model.model."  # precedes a layer's name in PEFT's files
# Keys of adapter_config.json that do not change what the adapter computes, or that `read_adapter` reads. Any other one
# must have a value that means "off", so that options of later versions of PEFT are refused
LAYER_KEYS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
HARMLESS_KEYS = {*LAYER_KEYS, *"""
peft_type peft_version task_type auto_mapping base_model_name_or_path revision inference_mode r lora_alpha lora_dropout
use_rslora init_lora_weights megatron_core qalora_group_size eva_config runtime_config
""".split()}
UNCHANGED_BASE = (None, True, False, "gaussian", "eva", "orthogonal")  # init_lora_weights that keep the base's weights


def write_adapter(
    hf: nn.Module, base: str, folder: Path, gathered: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write adapter_config.json and adapter_model.safetensors in PEFT's format. `base` is the model's folder or hub
    id; `gathered` holds the adapters' tensors by name, if the model is sharded."""
    layers = find_lora_layers(hf)
    first = next(iter(layers.values()))
    rank = first.lora_A.shape[0]
    sizes = {"base_model_name_or_path": base, "r": rank, "lora_alpha": first.scale * rank, "lora_dropout": 0.0}
    options = {"bias": "none", "fan_in_fan_out": False, "inference_mode": True, "use_rslora": False}
    names = list(layers)  # full names, because the tower's MLPs may have the same last names as the language model's
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", **sizes, **options, "target_modules": names}
    adapters = gathered or {name: p.detach() for name, p in hf.named_parameters() if ".lora_" in name}
    tensors = {f"{PEFT_PREFIX}{name}.weight": p.float().contiguous() for name, p in adapters.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def is_target(name: str, config: Mapping) -> bool:
    """Return whether PEFT adapts the layer of this name, by the options of adapter_config.json that select layers."""
    targets, excluded, blocks, patterns = map(config.get, LAYER_KEYS)

    def matches(selected: str | list | None) -> bool:
        if isinstance(selected, str):
            return bool(re.fullmatch(selected, name))
        return any(f".{name}".endswith(f".{part}") for part in selected or ())

    if isinstance(targets, str) and targets.lower() == "all-linear":
        targets = "(?!lm_head).*"
    if not matches(targets) or matches(excluded):
        return False
    if isinstance(targets, str) or name in targets or blocks in (None, []):
        return True  # PEFT reads layers_to_transform only for a list of last names
    for pattern in [patterns] if isinstance(patterns, str) and patterns else patterns or ["[^.]*"]:
        if block := re.match(rf"(?:.*?\.)?{pattern}\.(\d+)\.", name):
            return int(block[1]) in (blocks if isinstance(blocks, list) else [blocks])
    return False


def read_adapter(hf: nn.Module, folder: Path, base: str) -> nn.Module:
    """Read a PEFT adapter into the layers of its base model, in place. Raise UserError if it was made for another base,
    is not plain LoRA, or lacks layers that it names."""
    config = json.loads((folder / "adapter_config.json").read_text())
    recorded = config.get("base_model_name_or_path") or ""
    is_same = Path(recorded).name == Path(base).name  # compare names only, because folders may have moved
    need(is_same, f"{folder}: the adapter was made for {recorded!r}, not for {base!r}")
    options = {key: value for key, value in config.items()
               if key not in HARMLESS_KEYS and value and value != "none"}
    if config.get("init_lora_weights") not in UNCHANGED_BASE:
        options["init_lora_weights"] = config["init_lora_weights"]
    named = ", ".join(f"{key}={value!r:.60}" for key, value in options.items())
    need(config.get("peft_type") == "LORA" and not options,
         f"{folder}: only plain LoRA on an unchanged base is supported, but adapter_config.json has "
         f"{named or config.get('peft_type')}; merge the adapter with peft")
    path = folder / "adapter_model.safetensors"
    with as_user_error((OSError, SafetensorError), f"{path}: missing, truncated or not a safetensors file"):
        tensors = load_file(path)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    is_valid = isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)
    need(is_valid, f"{folder}: adapter_config.json has r={rank!r} and lora_alpha={alpha!r}; correct them")
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    linear, found, prefixes, state = find_linear_layers(hf), {}, {}, dict(hf.state_dict())
    renamings = [step for step in get_model_conversion_mapping(hf) if isinstance(step, WeightRenaming)]
    for key, tensor in tensors.items():
        name, _, side = key.removeprefix(PEFT_PREFIX).rpartition(".lora_")
        present, side = name, re.fullmatch(r"([AB])\.(?:[^.]+\.)?weight", side)  # may name the adapter
        if name not in linear:  # older versions of transformers had other names
            present = rename_source_key(f"{name}.weight", renamings, [], hf.base_model_prefix, state)[0][:-7]
        need(side and present in linear, f"{folder}: the adapter does not fit {base!r}: it has the key {key}, but "
             f"this model's keys are such as {PEFT_PREFIX}{next(iter(linear))}.lora_A.weight; save it with the present "
             "versions of transformers and peft")
        need((present, side[1]) not in found, f"{folder}: it has the key {key}, but also another one of lora_{side[1]} "
             "of this layer; save one adapter alone")
        found[present, side[1]] = tensor
        same = -len(os.path.commonprefix([name[::-1], present[::-1]]))
        prefixes[present[:same]] = name[:same]
    names = {name for name, _ in found}
    older = {name: next((prefixes[new] + name.removeprefix(new) for new in sorted(prefixes, reverse=True)
                         if name.startswith(new)), name) for name in linear}  # fmt: skip
    with as_user_error(re.error, f"{folder}: adapter_config.json has an invalid pattern"):
        targets, older_targets = ({name for name in linear if is_target(rename(name), config)}
                                  for rename in (str, older.get))
    # the options name layers as the model does, or as the file
    targets = older_targets if older_targets == names else targets
    for problem, layers in {"has no tensors for": targets - names, "has tensors for": names - targets}.items():
        need(not layers, f"{folder}: the adapter {problem} {len(layers)} layers, such as {min(layers, default='')}, "
             f"unlike its target_modules in adapter_config.json; save it again, or correct them")
    for name in sorted(names):
        layer = linear[name]
        need(layer.weight is not hf.get_input_embeddings().weight, f"{folder}: it adapts {name}, which {base!r} ties "
             "to the embedding, so merging would change both; train it without this layer")
        for side, expected in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
            shape = tuple(found[name, side].shape) if (name, side) in found else None
            need(shape == expected, f"{folder}: the adapter does not fit {base!r}: lora_{side} of {name} has shape "
                 f"{shape}, but must have {expected}")
        add_adapter(layer, scale, found[name, "A"], found[name, "B"])
    return hf
