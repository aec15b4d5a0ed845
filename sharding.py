"""The model over processes: FSDP2 and tensor parallelism, loading into shards, gathering, optimizer. Checkpoints: parallel/checkpoint.py.

A policy is built without weights (meta_hf), sharded (shard) and filled (load_sharded): no process ever holds all of it.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils import get_total_norm
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import cached_file

from errors import UserError, check_writable, writing
from model import (
    Attrs,
    Lora,
    Policy,
    find_family,
    load_config,
    load_hf,
    lora_layers,
    prepare,
    register_attention,
)
from utils import print0

# ----------------------------------------------------------------------------------------------------------------------
# FSDP2 and tensor parallelism

# Tensor parallelism (arXiv:1909.08053, section 3): of a group of processes each computes some heads and some units of the MLP
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # linear layers of which each process has some outputs
ROWS = ("o_proj", "down_proj")  # and some inputs: what they give is summed over the group
HEAD_NORMS = ("q_norm", "k_norm")  # one weight for all heads, of which each process has some


def check_tp(config: transformers.PreTrainedConfig, tp: int) -> None:
    """ValueError where the language model does not divide into tp parts."""
    text = config.get_text_config()
    for name, what in (("num_key_value_heads", "key-value heads"), ("intermediate_size", "units of an MLP")):
        n = getattr(text, name, None) or tp
        if n % tp:
            raise UserError(f"--tp {tp}: the model's {n} {what} do not divide into so many parts; use a divisor of {n}")


def divisible(module: nn.Module) -> bool:
    """Is this an attention layer or an MLP of layers that we know how to divide?"""
    names = {name.split(".")[0] for name, _ in module.named_parameters()}
    return bool(names & {*ROWS}) and names <= {*COLUMNS, *ROWS, *HEAD_NORMS}


PARTS = {  # of which parameters, of such a layer, a process has some rows or columns; the rest it has whole
    **dict.fromkeys(COLUMNS, {"weight": Shard(0), "bias": Shard(0), "lora_B": Shard(0)}),
    **dict.fromkeys(ROWS, {"weight": Shard(1), "lora_A": Shard(1)}),
    **dict.fromkeys(HEAD_NORMS, {}),
}


def divide(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give each process of a one-dimensional mesh its part of an attention layer or an MLP, in place. Parameters become DTensors,
    so that FSDP and checkpoints know what they are parts of; the forward sees plain tensors, since operations on DTensors cost
    a dispatch in Python each, and more for every new length of a micro-batch. What goes in and comes out is whole, and the
    same on all processes: one sum of activations over them in the forward, one in the backward."""
    group, n = mesh.get_group(), mesh.size()
    layers = {name: layer for name, layer in module.named_children() if name in PARTS}
    for kind, layer in layers.items():
        for name, parameter in list(layer.named_parameters(recurse=False)):
            # every process has read or drawn the same, so each takes its part without asking
            part = distribute_tensor(parameter.detach(), mesh, [PARTS[kind].get(name, Replicate())], src_data_rank=None)
            layer.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
        if kind in ROWS:
            layer.register_forward_hook(lambda _, inputs, output: _SumOutputs.apply(output, group))
    forward = module.forward

    def of_parts(*args, **kwargs):
        held = {layer: dict(layer._parameters) for layer in layers.values()}
        for kind, layer in layers.items():
            for name, parameter in held[layer].items():
                if parameter is not None:
                    # what is held whole has met a part of the heads or units only: its gradients are still to be summed
                    local = parameter.to_local(grad_placements=None if name in PARTS[kind] else [Partial()])
                    layer._parameters[name] = local / n if kind in ROWS and name == "bias" else local  # the outputs are summed
        try:
            if args:
                return forward(_SumGradients.apply(args[0], group), *args[1:], **kwargs)
            return forward(**kwargs | {"hidden_states": _SumGradients.apply(kwargs["hidden_states"], group)})
        finally:
            for layer, parameters in held.items():
                layer._parameters.update(parameters)

    module.forward = of_parts


class _SumOutputs(torch.autograd.Function):
    """Over a group, in place; the gradient is the same on all of it already."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _SumGradients(torch.autograd.Function):
    """What is the same on all of a group goes different ways there, and comes back as gradients to be summed."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def shard(
    policy: Policy, device: torch.device, compute_dtype: torch.dtype, frozen: bool = False, offload: bool = False, replicate: int = 1,
    tp: int = 1,
) -> None:
    """Shard in place over all ranks, or (HSDP) over each of `replicate` groups of neighbours; always, also on one, so that
    there is a single code path.

    Each language block is a unit of its own, and each block of a tower that trains. Everything else - embeddings, head,
    norms, a frozen tower, whose cache makes ranks differ in when they need it - is one unit that stays gathered between
    forward and backward: tied weights stay tied, and a micro-batch without pictures skips no collective. What is `frozen`
    has no backward after which to let go of that unit, so it does so after the forward; with `offload` its shards wait in
    the memory of the CPU.

    With `tp` above 1 so many neighbours, policy.peers, get the same micro-batches, and divide attention and MLPs among them;
    those are units of their own, each part sharded over the processes that have the same part. What the peers compute alike
    is sharded over all processes as it is without them, and so has one copy, which cannot drift apart. Its gradient comes
    from each of the peers, so it is divided by their number.
    """
    policy._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    world, family = dist.get_world_size(), policy.hf.family
    replicas = {"replicate": replicate} if replicate > 1 else {}

    def mesh_of(**sizes: int) -> DeviceMesh:
        sizes = replicas | sizes
        return dist.init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    plain = {p.dtype for p in policy.parameters()} == {compute_dtype} == {torch.float32}
    # Gradients are reduced in fp32. Inputs stay as they are given: FSDP would round each float in them, the micro-batch's columns
    # and the rotary tables of a tower included, and then no ratio is 1 on policy.
    mixed = MixedPrecisionPolicy() if plain else MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    place = CPUOffloadPolicy() if offload and device.type == "cuda" else OffloadPolicy()
    policy.offloaded = isinstance(place, CPUOffloadPolicy)
    blocks = policy.hf.get_submodule(f"{family.language}.{family.blocks}")
    if len(blocks) == 0:
        raise ValueError("shard: the language model has no blocks")
    units: list[nn.Module] = list(blocks)
    if tp > 1:
        grid = mesh_of(shard=world // replicate // tp, tp=tp)
        policy.peers, over_data = grid.get_group("tp"), grid[(*replicas, "shard")]
        parts = [part for block in blocks for part in block.children()]
        if not any(map(divisible, parts)):
            names = ", ".join(dict.fromkeys(type(part).__name__ for part in parts))
            raise UserError(f"--tp {tp}: of {names}, none is made of {', '.join((*COLUMNS, *ROWS))}, which are what can be divided; use 1")
        for part in filter(divisible, parts):
            divide(part, grid["tp"])
            fully_shard(part, mesh=over_data, mp_policy=mixed, offload_policy=place).set_gradient_divide_factor(1.0)
        # mixtures of experts, recurrent layers; norms are too small to be units
        units = [part for part in parts if not divisible(part) and any(p.ndim > 1 for p in part.parameters())]
        for unit in units:  # FSDP warns of units that return a view; an operation on it in place would drop its hooks
            unit.register_forward_hook(lambda _, inputs, output: output.clone() if getattr(output, "_base", None) is not None else output)
    if not policy.vision_frozen:
        units += policy.visual[0].get_submodule(family.vision_blocks)
    everyone = mesh_of(shard=world // replicate)
    for unit in (*units, policy):
        reshard = {} if unit is not policy else {"reshard_after_forward": frozen}
        fully_shard(unit, mesh=everyone, mp_policy=mixed, offload_policy=place, **reshard).set_gradient_divide_factor(float(tp))
    # The loss is already divided by its global normaliser, so gradients are summed over ranks, not averaged. On gloo
    # both calls are needed, on every unit: the factor alone leaves the averaging to a reduce op that gloo lacks.
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(policy, "plain_logprobs")


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients so that their global L2 norm is at most max_norm; returns the norm before. It is the same number on
    all ranks, to the last bit, or else the copies of a replicated parameter would drift apart. (torch's own wants all
    parameters on one mesh, which tensor parallelism has not.)"""
    by_copies: dict[int, list[torch.Tensor]] = {}
    for parameter in model.parameters():
        gradient, copies = parameter.grad, 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
            gradient, copies = gradient.to_local(), math.prod(size for placement, size in sizes if placement.is_replicate())
        if gradient is not None:
            by_copies.setdefault(copies, []).append(gradient)
    square = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for copies, gradients in by_copies.items():
        square += get_total_norm(gradients).double() ** 2 / copies
    dist.all_reduce(square)
    norm = square.sqrt().item()
    factor = max_norm / (norm + 1e-6)
    if factor < 1:
        for gradient in (gradient for gradients in by_copies.values() for gradient in gradients):
            gradient.mul_(factor)
    return norm


def _placed(tensor: torch.Tensor) -> tuple | None:
    """How a tensor lies over processes: operations on lists of tensors want them alike."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


# ----------------------------------------------------------------------------------------------------------------------
# Loading into shards: no process ever holds the whole model


def meta_hf(path: str, dtype: torch.dtype = torch.float32, attrs: Attrs = None) -> nn.Module:
    """The model of a folder or hub id without its weights: they are on the meta device until load_sharded. Only a model whose
    files hold weights in ways that load_sharded does not know comes with them, each process reading all of it."""
    config = load_config(path, attrs)
    family = find_family(config, path, attrs)
    register_attention()
    with _parameters_on_meta():
        hf = getattr(transformers, family.model_class)._from_config(config, dtype=dtype, attn_implementation="planned")
    strange = [converter for converter in converters_of(hf) if not understood(converter)]
    if strange:
        print0(f"{path}: its files hold {', '.join(strange[0].source_patterns)} in a form that only transformers reads; each process does, "
               f"whole")
        return load_hf(path, dtype, attrs)
    return prepare(hf, family)


def converters_of(hf: nn.Module) -> list[WeightConverter]:
    """What transformers does, beyond renaming, to the tensors of this model's files."""
    return [transform for transform in get_model_conversion_mapping(hf) if isinstance(transform, WeightConverter)]


def understood(converter: WeightConverter) -> bool:
    """Experts of a mixture: in one tensor whose last two axes may be the other way round, or in one or two tensors each."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    if steps == [("Transpose", None)]:
        return {converter.operations[0].dim0, converter.operations[0].dim1} == {1, 2} and converter.operations[0].check_dims
    return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters without memory; buffers, such as rotary frequencies, are no part of a checkpoint and are made for real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def weight_files(path: str) -> list[Path]:
    """The safetensors files of a model folder or hub id; a ValueError for one that is missing."""

    def find(name: str) -> Path | None:
        if os.path.isdir(path):
            return Path(path) / name if (Path(path) / name).is_file() else None
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        return Path(found) if found else None

    index = find("model.safetensors.index.json")
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index else ["model.safetensors"]
    files = {name: find(name) for name in names}
    missing = [name for name, file in files.items() if file is None]
    if missing:
        raise UserError(f"--model {path!r}: no {missing[0]} there ({len(missing)} of {len(names)} files of weights are missing)")
    return list(files.values())


def tensors_of(file: Path) -> dict[str, tuple[torch.dtype, list[int], int]]:
    """name -> (dtype, shape, first byte) of a safetensors file, without reading a tensor; a ValueError that names a damaged one.

    The file is 8 bytes of header length, a JSON header, and the tensors.      huggingface.co/docs/safetensors, "Format"
    """
    size = file.stat().st_size
    with open(file, "rb") as f:
        start = 8 + int.from_bytes(f.read(8), "little")
        if size < 8 or start > size:
            raise UserError(f"{file}: truncated or no safetensors file: its header ends at byte {start} of {size}; fetch it again")
        try:
            header = json.loads(f.read(start - 8))
            header.pop("__metadata__", None)
            end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            found = {name: (SAFETENSORS_DTYPES[e["dtype"]], e["shape"], start + e["data_offsets"][0]) for name, e in header.items()}
            spans = [e["data_offsets"][1] - e["data_offsets"][0] for e in header.values()]
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{file}: its header is damaged ({type(e).__name__}: {e}); fetch it again") from e
    if end != size:
        raise UserError(f"{file}: {size} bytes, where its header speaks of {end}: truncated or damaged; fetch it again")
    for (name, (dtype, shape, _)), span in zip(found.items(), spans, strict=True):
        if math.prod(shape) * dtype.itemsize != span:
            raise UserError(f"{file}: {name} of shape {shape} has {span} bytes: the header is damaged; fetch it again")
    return found


SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READ_BYTES = 2**22  # read at once
LARGEST = 1e20  # of a weight: products with 1e38 overflow
BAD = f"holds NaN, an infinity, or a value above {LARGEST:.0e}"


@torch.no_grad()
def find_bad(tensors: dict[str, torch.Tensor], largest: float = LARGEST) -> str | None:
    """The first tensor with a value that is NaN or above `largest`, whichever rank holds it; the same answer on all of them."""
    names, first = list(tensors), torch.tensor(len(tensors))
    for i, tensor in enumerate(tensors.values()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # the largest absolute value, or NaN where there is one
        if local.numel() and local.is_floating_point() and not torch.linalg.vector_norm(local, math.inf).item() <= largest:
            first.fill_(i)
            break
    if dist.is_initialized():
        dist.all_reduce(first, dist.ReduceOp.MIN)
    return names[first] if first < len(names) else None


def save_hf(hf: nn.Module, folder: Path) -> None:
    """The model's folder, as transformers writes it but for experts: it reads them either way round, but writes them as it holds
    them. The hub has, and vLLM reads, those of some families with inputs before outputs."""
    for config in filter(None, (hf.config, *(getattr(hf.config, name) for name in hf.config.sub_configs))):
        config.dtype = hf.dtype  # transformers leaves the inner ones as they were read
    hf.save_pretrained(folder)
    turned = tuple(pattern for converter in converters_of(hf) for pattern in converter.source_patterns
                   if type(converter.operations[0]).__name__ == "Transpose")
    for file in folder.glob("*.safetensors") if turned else ():
        tensors = load_file(file)
        tensors |= {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items() if name.endswith(turned)}
        save_file(tensors, file, metadata={"format": "pt"})


def check_new_folder(out: Path) -> None:
    """Before any work: a UserError where whole_folder would fail."""
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise UserError(f"--out {out} is a file, or is not empty; choose another folder or remove it")
    check_writable(out.parent, f"--out {out}")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which is called `out` once all is in it: neither an error nor a full disk leaves half of one."""
    with writing(out, f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
            folder = Path(temporary) / out.name
            try:
                yield folder
            except SafetensorError as error:  # its own class also for what the system says
                number = re.search(r"os error (\d+)", str(error))
                if number is None:
                    raise
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            umask = os.umask(0)
            os.umask(umask)
            for file in folder.glob("*.safetensors"):  # written for their owner's eyes alone, unlike all others
                file.chmod(0o666 & ~umask)
            if out.exists():
                out.rmdir()
            folder.rename(out)


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, and where it belongs in a parameter."""

    file: Path
    dtype: torch.dtype
    first: int  # its first byte
    shape: list[int]  # as in the parameter, with as many axes
    at: list[int]  # where in the parameter it begins
    turned: bool = False  # the file has the last two axes the other way round


def find_stored(hf: nn.Module, path: str, shapes: dict[str, list[int]]) -> dict[str, list[Stored]]:
    """For each parameter, by name and shape, the tensors that it is made of. All files are checked; a ValueError names what is
    damaged, missing or of another shape."""
    files = {file: tensors_of(file) for file in weight_files(path)}
    converters, known = converters_of(hf), dict(hf.state_dict())
    renamings = [transform for transform in get_model_conversion_mapping(hf) if isinstance(transform, WeightRenaming)]
    patterns = {pattern: converter.source_patterns for converter in converters for pattern in converter.source_patterns}
    found: dict[str, list[Stored]] = {name: [] for name in shapes}
    unused = []
    for file, tensors in files.items():
        for key, (dtype, shape, first) in tensors.items():
            name, pattern = rename_source_key(key, renamings, converters, hf.base_model_prefix, known)
            if name not in shapes:
                unused += [] if name in known else [key]
                continue
            want, at, turned = shapes[name], [0] * len(shapes[name]), False
            if pattern is not None and "*" in pattern:  # one expert's, or a part of one's: the parts are of equal size
                at[0] = int(re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), key)[1])
                at[1] = patterns[pattern].index(pattern) * want[1] // len(patterns[pattern])
                shape = [1, *shape]
            elif pattern is not None and shape != want:
                shape, turned = [shape[0], *shape[:0:-1]], True
            if len(shape) != len(want) or any(start + n > limit for start, n, limit in zip(at, shape, want, strict=True)) or (
                    pattern is None and shape != want):
                raise UserError(f"{file}: {key} has shape {tensors[key][1]}, the config asks {want} of {name}: files of "
                                 f"another model, or damaged; fetch them again with their config.json")
            found[name].append(Stored(file, dtype, first, shape, at, turned))
    if unused:
        print0(f"{path}: {len(unused)} tensors that the model has no place for are not read: {', '.join(unused[:3])}")
    missing = [name for name, parts in found.items() if sum(math.prod(part.shape) for part in parts) < math.prod(shapes[name])]
    if missing:
        names = ", ".join(file.name for file in files)
        raise UserError(f"--model {path!r}: {len(missing)} tensors are in none of {names}, or not all of them: {', '.join(missing[:3])}; "
                         f"fetch it again")
    return found


def read_stored(stored: Stored, local: torch.Tensor, offset: Sequence[int]) -> None:
    """Into a process's part of a parameter, which begins at `offset` of the whole: what the file's tensor has of it."""
    starts = [max(o, a) for o, a in zip(offset, stored.at, strict=True)]
    stops = [min(o + n, a + m) for o, n, a, m in zip(offset, local.shape, stored.at, stored.shape, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return
    into, of = ([slice(start - b, stop - b) for start, stop, b in zip(starts, stops, base, strict=True)] for base in (offset, stored.at))
    row = math.prod(stored.shape[1:])
    in_file = stored.shape[:0:-1] if stored.turned else stored.shape[1:]
    step = max(1, READ_BYTES // (row * stored.dtype.itemsize))
    with open(stored.file, "rb") as f:
        f.seek(stored.first + of[0].start * row * stored.dtype.itemsize)
        for start in range(into[0].start, into[0].stop, step):
            rows = min(step, into[0].stop - start)
            f.readinto(buffer := bytearray(rows * row * stored.dtype.itemsize))
            read = torch.frombuffer(buffer, dtype=stored.dtype).view(rows, *in_file)
            read = read.transpose(1, 2) if stored.turned else read
            local[start : start + rows, *into[1:]].copy_(read[:, *of[1:]])


@torch.no_grad()
def load_sharded(policy: Policy, path: str) -> None:
    """Fill a policy that was built by meta_hf and sharded: each process reads its own rows of each tensor, and no others, and
    keeps its own columns of them. All files are checked before a byte is read into the model."""
    hf = policy.hf
    waiting = {name: list(p.shape) for name, p in hf.named_parameters() if p.is_meta}
    found = find_stored(hf, path, waiting) if waiting else {}
    tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    place = policy.banned.device if not policy.offloaded else torch.device("cpu")
    policy._apply(lambda tensor: torch.empty_like(tensor, device=place) if tensor.is_meta else tensor)
    if tied:  # each module has got a tensor of its own
        hf.get_output_embeddings()._parameters["weight"] = hf.get_input_embeddings()._parameters["weight"]
    for name, parameter in hf.named_parameters():
        if name in found:
            _, offset = compute_local_shape_and_global_offset(waiting[name], parameter.device_mesh, parameter.placements)
            for stored in found[name]:
                read_stored(stored, parameter.to_local(), offset)
    bad = find_bad(dict(hf.named_parameters()))
    if bad:
        files = ", ".join(dict.fromkeys(str(stored.file) for stored in found.get(bad, []))) or path
        raise UserError(f"--model {path!r}: {bad} of {files} {BAD}: damaged, or of a training that diverged; fetch it again")


def full_parameters(
    policy: Policy, trainable_only: bool = False, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) of each parameter of the model, gathered one at a time, cast to dtype before it
    travels; not of a value head, which no engine knows. Adapters come merged: with `trainable_only`, the layers that have
    one. All ranks must consume it together."""
    layers = lora_layers(policy.hf)
    for name, parameter in policy.named_parameters():
        name, layer = name.removeprefix("hf."), layers.get(name.removeprefix("hf.").removesuffix(".weight"))
        if name.startswith("value_head.") or ".lora_" in name or (trainable_only and layer is None and not parameter.requires_grad):
            continue
        if layer is None:
            yield name, full(parameter, dtype)
        else:
            tensor = full(parameter).float() + layer.scale * full(layer.lora_B) @ full(layer.lora_A)
            yield name, tensor.to(dtype or parameter.dtype)


def full(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Gathered from all ranks, without gradient, cast before it travels."""
    tensor = parameter.detach()
    tensor = tensor if dtype is None else tensor.to(dtype)
    if not isinstance(tensor, DTensor):
        return tensor
    for i in range(tensor.device_mesh.ndim):  # shards of a part of tensor parallelism to the part, then parts to the whole
        tensor = tensor.redistribute(placements=[Replicate() if j <= i else p for j, p in enumerate(tensor.placements)])
    return tensor.to_local()


@torch.no_grad()
def copy_weights(source: Policy, target: Policy) -> None:
    """Weights of one model into another, shard by shard; both are sharded alike. A value head is left out."""
    found = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if name.startswith("hf."):
            parameter.to_local().copy_(found[name].to_local())


@torch.no_grad()
def same_tower(a: Policy, b: Policy) -> bool:
    """Are the vision towers of two models, sharded alike, equal on all ranks? Then they can share a cache of features."""
    differ = torch.zeros((), dtype=torch.int32, device=a.banned.device)
    for p, q in zip(a.visual[0].parameters(), b.visual[0].parameters(), strict=True):
        differ |= not torch.equal(p.to_local().to(q.dtype), q.to_local().to(p.device))
    dist.all_reduce(differ, dist.ReduceOp.MAX)
    return not differ.item()


# ----------------------------------------------------------------------------------------------------------------------
# The optimizer, and what a run's arguments say of its model


def make_optimizer(
    policy: Policy, lr: float, weight_decay: float, head_lr: float | None = None, vision_lr: float | None = None
) -> torch.optim.AdamW:
    """AdamW over what is trained, its state in place from the start. Left to the first step, a checkpoint written before
    one (every update skipped, say) would have none, and could not be resumed. A value head and the vision tower are groups
    of their own, with learning rates of their own if `head_lr` and `vision_lr` are given."""
    groups: dict[tuple, list[torch.Tensor]] = {}
    for name, p in policy.named_parameters():
        if p.requires_grad:
            vision = name.startswith(f"hf.{policy.hf.family.vision}.")
            kind = "head" if name.startswith("value_head.") else "vision" if vision else "language"
            groups.setdefault((kind, _placed(p)), []).append(p)
    # fused: step by step, each operation on a sharded tensor costs a dispatch in Python
    by_kind = [{"params": parameters} for parameters in groups.values()]
    optimizer = torch.optim.AdamW(by_kind, lr=0.0, betas=(0.9, 0.999), weight_decay=weight_decay, fused=True)
    optimizer.kinds = [kind for kind, _ in groups]  # what each group holds
    for p in (p for parameters in groups.values() for p in parameters):
        p.grad = torch.zeros_like(p)
    optimizer.step()  # at learning rate 0
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        state["step"].zero_()
    set_learning_rate(optimizer, lr, head_lr, vision_lr)
    return optimizer


def set_learning_rate(
    optimizer: torch.optim.Optimizer, lr: float, head_lr: float | None = None, vision_lr: float | None = None
) -> None:
    rates = {"language": lr, "head": lr if head_lr is None else head_lr, "vision": lr if vision_lr is None else vision_lr}
    for group, kind in zip(optimizer.param_groups, optimizer.kinds, strict=True):
        group["lr"] = rates[kind]


def attrs_of(args: dict) -> Attrs:
    """(--vision-attr, --language-attr) of a run's arguments."""
    return args.get("vision_attr"), args.get("language_attr")


def lora_of(args: dict) -> Lora | None:
    """The adapters of a run, by its arguments."""
    if not args.get("lora_rank"):
        return None
    targets = tuple(args.get("lora_targets") or ())
    return Lora(args["lora_rank"], args["lora_alpha"], args["lora_dropout"], targets, args["lora_vision"], args["seed"])


def pixel_limits(args: dict) -> dict:
    return {key: args.get(key) for key in ("min_pixels", "max_pixels")}
