"""Sharding of a model over processes with FSDP2, its optimizer, and gathering of its weights.

A policy is built without weights (loading.build_meta_model), sharded (apply_fsdp) and filled (loading.load_sharded), so
that no process ever holds all of it.
"""

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from errors import need, plug_in
from layers.lora import find_lora_layers, write_adapter
from model import Policy
from settings import flag_field


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism"""

    replicate: int = flag_field(1, "HSDP: number of replicas; weights are sharded within each replica", least=1)
    tp: int = flag_field(1, "tensor-parallel size; consecutive ranks split each language block", least=1)
    offload: str = flag_field(
        "none",
        "what to keep in CPU memory (GPU runs): nothing, the reference, or all weights and optimizer state",
        choices=("none", "reference", "all"),
    )

    def check(self, world: int, model: transformers.PreTrainedConfig, compiled: bool = False) -> None:
        n = self.replicate * self.tp
        need(world % n == 0,
             f"--replicate {self.replicate} --tp {self.tp}: this takes {n} processes or a multiple of that, but "
             f"this run has {world}; change torchrun's --nproc-per-node, or lower one of the two flags")
        need(self.offload == "none" or torch.cuda.is_available(),
             f"--offload {self.offload}: there is no GPU whose memory it could save; leave the flag out")
        need(self.tp == 1 or not compiled,
             f"--tp {self.tp} --compile: each block would be compiled separately, which takes minutes; leave one of "
             "the two out")
        need(not compiled or torch.cuda.is_available() or shutil.which(os.environ.get("CXX", "g++")) is not None,
             "--compile: there is no C++ compiler on the PATH (g++, or the one set in $CXX); install one, or leave the "
             "flag out")
        if self.tp > 1:
            plug_in("parallel.tensor_parallel", f"--tp {self.tp}").check_tp(model, self.tp)


DEFAULT_PARALLEL = ParallelConfig()


class ParameterInfo(NamedTuple):
    """Name, dtype and full shape of a parameter that FullParameters yields."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def apply_fsdp(
    policy: Policy,
    device: torch.device,
    dtype: torch.dtype,
    cfg: ParallelConfig = DEFAULT_PARALLEL,
    frozen: bool = False,
) -> None:
    """Shard a policy in place over all ranks or, with HSDP, over the neighbouring ranks of each of `replicate`
    replicas; also on a single rank, so that there is one code path. The policy computes in `dtype`.

    Each language block is an FSDP unit, and each block of a trained vision tower. Everything else is one unit that
    stays gathered between forward and backward: embeddings, head, norms, and a frozen tower, whose cache makes ranks
    need it at different times. So tied weights stay tied, and a micro-batch without images skips no collective. A
    `frozen` policy has no backward after which this unit could be freed, so it is freed after the forward. With
    `offload` the shards are kept in CPU memory.

    With `tp` above 1, attention and MLPs are divided over process groups of `tp` neighbouring ranks
    (tensor_parallel.py). They are separate FSDP units, sharded over the processes that hold the same part. The rest is
    sharded over all processes, as without `tp`, so it has only one copy, which cannot drift apart. Each process of a
    tensor-parallel process group contributes to its gradient, so the gradient is divided by their number.
    """
    policy._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    offload = cfg.offload == "all" or (frozen and cfg.offload == "reference")
    policy.offloaded = offload and device.type == "cuda"
    # Gradients are reduced in fp32. Inputs are not cast: FSDP would round every float in them, including the tokens'
    # columns and a tower's rotary tables, and on-policy ratios would no longer be 1.
    precision = fsdp.MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    offloading = fsdp.CPUOffloadPolicy() if policy.offloaded else fsdp.OffloadPolicy()
    kwargs = {"mp_policy": precision, "offload_policy": offloading}

    family, n_shards = policy.hf.family, dist.get_world_size() // cfg.replicate
    blocks = policy.hf.get_submodule(f"{family.language}.{family.blocks}")
    units: list[nn.Module] = list(blocks)
    if cfg.tp > 1:
        mesh = _make_mesh(device, cfg.replicate, shard=n_shards // cfg.tp, tp=cfg.tp)
        tensor_parallel = plug_in("parallel.tensor_parallel", f"--tp {cfg.tp}")
        divided, units = tensor_parallel.parallelize_blocks(policy, blocks, mesh["tp"])
        for module in divided:
            fully_shard(module, mesh=mesh[mesh.mesh_dim_names[:-1]], **kwargs).set_gradient_divide_factor(1.0)
    if not policy.vision_frozen:
        units += policy.visual[0].get_submodule(family.vision_blocks)
    mesh = _make_mesh(device, cfg.replicate, shard=n_shards)
    # With a single shard, gathering weights only copies them. A second copy for the backward pass would take an eighth
    # of a micro-batch's time (RESULTS.md), so the first copy is kept, unless a flag asks to save memory.
    saves_memory = policy.offloaded or policy.hf.is_gradient_checkpointing or find_lora_layers(policy.hf)
    keep = n_shards == 1 and not (frozen or saves_memory)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=not keep, **kwargs).set_gradient_divide_factor(float(cfg.tp))
    fully_shard(policy, mesh=mesh, reshard_after_forward=frozen, **kwargs).set_gradient_divide_factor(float(cfg.tp))
    # The loss is already divided by its global normaliser, so gradients are summed over ranks, not averaged. gloo needs
    # both calls on every unit: with the factor alone FSDP averages with a reduce op that gloo lacks.
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    fsdp.register_fsdp_forward_method(policy, "unpacked_logprobs")


def _make_mesh(device: torch.device, replicate: int, **sizes: int) -> DeviceMesh:
    """Return a device mesh with these dimensions, inside an outer one "replicate" if there are several replicas."""
    sizes = ({"replicate": replicate} if replicate > 1 else {}) | sizes
    return dist.init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def reshard(policy: Policy) -> None:
    """Free the weights that FSDP keeps gathered after a forward without a backward. They would not follow changes of
    the shards, and while they are gathered a parameter is not the one that the optimizer has."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients so that their global L2 norm is at most max_norm, and return the norm before. The norm is the
    same on all ranks, to the last bit, so that the copies of a replicated parameter do not drift apart. (torch's
    function needs all parameters on one mesh, which is not the case with tensor parallelism.)"""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    square = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for gradient in gradients:
        copies = 1
        if isinstance(gradient, DTensor):
            mesh = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
            copies = math.prod(size for placement, size in mesh if placement.is_replicate())
        square += torch.linalg.vector_norm(local_shard(gradient)).double() ** 2 / copies
    dist.all_reduce(square)
    norm = square.sqrt().item()
    factor = max_norm / (norm + 1e-6)
    if factor < 1:
        for gradient in gradients:
            local_shard(gradient).mul_(factor)
    return norm


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ----------------------------------------------------------------------------------------------------------------------
# Weights


class FullParameters:
    """An iterable over (Hugging Face name, full tensor) of a model's parameters, gathered one at a time and cast to
    `dtype` before the transfer. A value head is left out, because engines have none. Adapters are merged into their
    layers, which `trainable_only` includes. All ranks must iterate together."""

    def __init__(self, policy: Policy, trainable_only: bool = False, dtype: torch.dtype | None = None):
        self.dtype = dtype
        self.layers = find_lora_layers(policy.hf)
        self.chosen: dict[str, torch.Tensor] = {}
        for name, parameter in policy.hf.named_parameters():
            trained = parameter.requires_grad or name.removesuffix(".weight") in self.layers
            if ".lora_" not in name and (trained or not trainable_only):
                self.chosen[name] = parameter

    def shapes(self) -> list[ParameterInfo]:
        """Return what iteration would yield as names, dtypes and shapes, without gathering anything."""
        return [ParameterInfo(name, self.dtype or p.dtype, tuple(p.shape)) for name, p in self.chosen.items()]

    def whole(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a whole parameter, without its adapter."""
        return gather_full(self.chosen[name], dtype)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.chosen.items():
            layer = self.layers.get(name.removesuffix(".weight"))
            if layer is None:
                yield name, self.whole(name, self.dtype)
            else:
                tensor = self.whole(name).float() + layer.scale * gather_full(layer.lora_B) @ gather_full(layer.lora_A)
                yield name, tensor.to(self.dtype or parameter.dtype)


def save_adapter(policy: Policy, base: str, folder: Path) -> None:
    """Write a sharded policy's adapters as PEFT files, on rank 0; collective. `base` is the model they belong to."""
    gathered = {name: gather_full(p).cpu() for name, p in policy.hf.named_parameters() if ".lora_" in name}
    if dist.get_rank() == 0:
        write_adapter(policy.hf, base, folder, gathered)


def gather_full(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a parameter gathered from all ranks, without gradient, cast to `dtype` before the transfer."""
    tensor = parameter.detach().to(dtype or parameter.dtype)
    if isinstance(tensor, DTensor):
        for i in range(tensor.device_mesh.ndim):  # one dimension at a time: torch warns otherwise
            tensor = tensor.redistribute(placements=[Replicate()] * (i + 1) + list(tensor.placements[i + 1 :]))
    return local_shard(tensor)


@torch.no_grad()
def copy_weights(source: Policy, target: Policy) -> None:
    """Copy the weights of one model to another, shard by shard; both must be sharded in the same way. A value head is
    left out."""
    for target_weight, weight in zip(target.hf.parameters(), source.hf.parameters(), strict=True):
        target_weight.to_local().copy_(weight.to_local())


# ----------------------------------------------------------------------------------------------------------------------
# The optimizer


def make_optimizer(
    policy: Policy, lr: float, weight_decay: float, head_lr: float | None = None, vision_lr: float | None = None
) -> torch.optim.AdamW:
    """Return AdamW over the trained parameters, with its state created at once: a checkpoint written before the first
    optimizer step (because every update was skipped, for example) could not be resumed without it. A value head and the
    vision tower have separate parameter groups, whose learning rates are `head_lr` and `vision_lr` if given."""
    head_lr, vision_lr = (lr if rate is None else rate for rate in (head_lr, vision_lr))
    tower = f"hf.{policy.hf.family.vision}."
    groups: dict[tuple, list[nn.Parameter]] = {}
    for name, p in policy.named_parameters():
        if p.requires_grad:
            peak = head_lr if name.startswith("value_head.") else vision_lr if name.startswith(tower) else lr
            # operations on a list of tensors need all of them on the same mesh
            layout = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
            groups.setdefault((peak, layout), []).append(p)
    param_groups = [{"params": parameters, "lr": peak, "peak": peak} for (peak, _), parameters in groups.items()]
    # fused, because each single operation on a sharded tensor costs a dispatch in Python
    optimizer = torch.optim.AdamW(param_groups, betas=(0.9, 0.999), weight_decay=weight_decay, fused=True)
    _init_optim_state(optimizer)  # it takes a step with zero gradients, at learning rate 0
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer
