"""LoRA (arXiv:2106.09685): adapters that add a product of two small matrices to a frozen one, W + alpha / rank * B A.

Adapters are read and written in PEFT's format.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
HARMLESS_KEYS = set("""
peft_type peft_version task_type auto_mapping base_model_name_or_path revision inference_mode r lora_alpha lora_dropout
use_rslora init_lora_weights target_modules exclude_modules layers_to_transform layers_pattern megatron_core
qalora_group_size eva_config
""".split())
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


def rename_key(key: str, linear: Mapping[str, nn.Linear]) -> str:
    """Return a key of an adapter's file as the present versions of PEFT and transformers write it. Others lack the
    prefix, name the adapter (`.default.`), or name the module that holds a list of blocks in another way."""
    name, _, kind = key.removeprefix(PEFT_PREFIX).replace(".default.", ".").rpartition(".lora_")
    while name and name not in linear:
        ends = [layer for layer in linear if layer.endswith(f".{name}")]
        name = ends[0] if len(ends) == 1 else name.partition(".")[2] if re.search(r"\.\d+\.", name) else ""
    return f"{PEFT_PREFIX}{name}.lora_{kind}" if name else key


def is_target(name: str, config: Mapping) -> bool:
    """Return whether PEFT adapts a linear layer by the options of an adapter that select layers."""

    def matches(selected: str | list | None) -> bool:
        if isinstance(selected, str):
            return bool(re.fullmatch(selected, name))
        return any(name == part or name.endswith(f".{part}") for part in selected or ())

    targets, blocks = config.get("target_modules"), config.get("layers_to_transform")
    if blocks is not None:
        pattern = config.get("layers_pattern") or "[^.]+"
        pattern = "|".join(pattern) if isinstance(pattern, list) else pattern
        block = re.match(rf".*?\.(?:{pattern})\.(\d+)\.", name)
        if not block or int(block[1]) not in (blocks if isinstance(blocks, list) else [blocks]):
            return False
    is_all = targets == "all-linear" and not name.endswith("lm_head")
    return (is_all or targets != "all-linear" and matches(targets)) and not matches(config.get("exclude_modules"))


def read_adapter(hf: nn.Module, folder: Path, base: str) -> nn.Module:
    """Read a PEFT adapter into the layers of its base model, in place. Raise UserError if it was made for another base,
    is not plain LoRA, or lacks layers that it names."""
    config = json.loads((folder / "adapter_config.json").read_text())
    recorded = config.get("base_model_name_or_path") or ""
    is_same = Path(recorded).name == Path(base).name  # compare names only, because folders may have moved
    need(is_same, f"{folder}: the adapter was made for {recorded!r}, not for {base!r}")
    options = {key: value for key, value in config.items()
               if key not in HARMLESS_KEYS and value not in (None, False, "none", "", 0, [], {})}
    if config.get("init_lora_weights") not in UNCHANGED_BASE:
        options["init_lora_weights"] = config["init_lora_weights"]
    named = ", ".join(f"{key}={value!r:.60}" for key, value in options.items())
    need(config.get("peft_type") == "LORA" and not options,
         f"{folder}: only plain LoRA on an unchanged base is supported, but adapter_config.json has "
         f"{named or config.get('peft_type')}; merge the adapter with peft")
    path = folder / "adapter_model.safetensors"
    with as_user_error((OSError, SafetensorError), f"{path}: missing, truncated or not a safetensors file"):
        tensors = load_file(path)
    linear, rank = find_linear_layers(hf), config.get("r")
    alpha = config.get("lora_alpha")
    is_valid = isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)
    need(is_valid, f"{folder}: adapter_config.json has r={rank!r} and lora_alpha={alpha!r}; correct them")
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    renamed = {rename_key(key, linear): tensor for key, tensor in tensors.items()}
    tensors = renamed if len(renamed) == len(tensors) else tensors  # else some keys become equal
    names = {key.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for key in tensors}
    missing = sorted(name for name in linear.keys() - names if is_target(name, config))
    need(not missing, f"{folder}: the adapter has no tensors for {len(missing)} layers that its target_modules name, "
         f"such as {', '.join(missing[:1])}; save it again, or correct target_modules in adapter_config.json")
    expected_shapes = {}
    for name in names & linear.keys():
        expected_shapes[f"{PEFT_PREFIX}{name}.lora_A.weight"] = (rank, linear[name].in_features)
        expected_shapes[f"{PEFT_PREFIX}{name}.lora_B.weight"] = (linear[name].out_features, rank)
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    for key in sorted(expected_shapes | shapes):
        shape, expected = shapes.get(key), expected_shapes.get(key)
        need(expected, f"{folder}: the adapter does not fit {base!r}: it has the key {key}, but the keys of this model "
             f"are such as {PEFT_PREFIX}{next(iter(linear))}.lora_A.weight; save it with the present versions of "
             "transformers and peft")
        need(shape == expected, f"{folder}: the adapter does not fit {base!r}: {key} has shape {shape}, but must have "
             f"{expected}")
    for name in sorted(names):
        add_adapter(linear[name], scale, *(tensors[f"{PEFT_PREFIX}{name}.lora_{x}.weight"] for x in "AB"))
    return hf
