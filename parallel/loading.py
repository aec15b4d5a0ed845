"""A model's files into shards, each process reading its own part of each tensor; and a model's folder out of a
model."""

import itertools
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForImageTextToText as AutoModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from errors import UserError, as_user_error, check_writable, need, report_write_errors
from layers.attention import register_attention
from model import Policy, attach_family, find_family, load_config, load_hf, weight_files
from parallel.sharding import local_shard
from report.progress import iter_with_progress
from utils import gather, print0

FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes of weights, as safetensors calls them
MAX_WEIGHT = 1e20  # of a weight: products with 1e38 overflow
NONFINITE_MESSAGE = f"holds NaN, an infinity, or a value above {MAX_WEIGHT:.0e}"


def build_meta_model(path: str, dtype: torch.dtype = torch.float32, paths: tuple[str, ...] = ()) -> nn.Module:
    """The model of a folder or hub id without its weights: they are on the meta device until load_sharded. Only a
    model whose files hold weights in ways that load_sharded does not know comes with them, each process reading all
    of it."""
    config = load_config(path, paths)
    family = find_family(config, path, paths)
    register_attention()
    with register_module_parameter_registration_hook(to_meta_parameter):
        hf = AutoModel.from_config(config, dtype=dtype, attn_implementation="planned")
    strange = [converter for converter in weight_converters(hf) if not is_supported_converter(converter)]
    if strange:
        patterns = ", ".join(strange[0].source_patterns)
        print0(f"{path}: its files hold {patterns} in a form that only transformers reads; each process does, whole")
        return load_hf(path, dtype, paths)
    return attach_family(hf, family)


def to_meta_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Parameters without memory; buffers, such as rotary frequencies, are no part of a checkpoint and are made for
    real."""
    return parameter if parameter.is_meta else nn.Parameter(parameter.to("meta"), parameter.requires_grad)


# ----------------------------------------------------------------------------------------------------------------------
# What the files hold


def weight_converters(hf: nn.Module) -> list[WeightConverter]:
    """What transformers does, beyond renaming, to the tensors of this model's files."""
    return [transform for transform in get_model_conversion_mapping(hf) if isinstance(transform, WeightConverter)]


def is_supported_converter(converter: WeightConverter) -> bool:
    """Experts of a mixture: in one tensor whose last two axes may be the other way round, or in one or two tensors
    each."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    if steps == [("Transpose", None)]:
        transpose = converter.operations[0]
        return {transpose.dim0, transpose.dim1} == {1, 2} and transpose.check_dims
    return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


@contextmanager
def open_safetensors(file: Path) -> Iterator[safe_open]:
    """A safetensors file, of which no tensor is read yet; its header must agree with itself and with the file's
    size."""
    broken = f"{file}: truncated, damaged or no safetensors file; fetch it again"
    with as_user_error((SafetensorError, OSError), broken), safe_open(file, "pt") as tensors:
        yield tensors


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, and what it is of a parameter: all of it, or some rows of one of its experts."""

    file: Path
    key: str
    dtype: str
    shape: list[int]
    transposed: bool = False  # the file has the last two axes the other way round
    expert: int | None = None
    row: int = 0  # of the expert's, the first that is here


def iter_tensor_headers(files: list[Path]) -> Iterator[StoredTensor]:
    """By their headers; no tensor is read."""
    for file in files:
        with open_safetensors(file) as tensors:
            for key in tensors.keys():
                header = tensors.get_slice(key)
                yield StoredTensor(file, key, header.get_dtype(), header.get_shape())


def match_parameters(hf: nn.Module, path: str, shapes: dict[str, list[int]]) -> dict[str, list[StoredTensor]]:
    """For each parameter, by name and shape, the tensors that it is made of. All files are checked; a UserError
    names what is damaged, missing or of another shape."""
    converters = weight_converters(hf)
    known = dict(hf.state_dict())
    renamings = [transform for transform in get_model_conversion_mapping(hf) if isinstance(transform, WeightRenaming)]
    found: dict[str, list[StoredTensor]] = {name: [] for name in shapes}
    left = {name: math.prod(shape) for name, shape in shapes.items()}  # numbers of it that are still to be found
    unused = []
    for stored in iter_tensor_headers(weight_files(path)):
        name, pattern = rename_source_key(stored.key, renamings, converters, hf.base_model_prefix, known)
        if name in shapes:
            found[name].append(match_tensor(stored, name, shapes[name], pattern, converters))
            left[name] -= math.prod(stored.shape)
        elif name not in known:
            unused.append(stored.key)
    if unused:
        print0(f"{path}: {len(unused)} tensors that the model has no place for are not read: {', '.join(unused[:3])}")
    missing = [name for name, n in left.items() if n > 0]
    need(not missing, f"--model {path!r}: {len(missing)} tensors are missing or cut: {missing[:3]}; fetch it again")
    return found


def match_tensor(
    stored: StoredTensor, name: str, want: list[int], pattern: str | None, converters: list[WeightConverter]
) -> StoredTensor:
    """Where a tensor of a file belongs in its parameter, of shape `want`; UserError if it does not fit there. The
    pattern is that of the converter that its name matches."""
    told = f"{stored.file}: {stored.key}"
    need(stored.dtype in FLOATS, f"{told} is of dtype {stored.dtype}, not {', '.join(FLOATS)}: quantised weights")
    shape = stored.shape
    if shape == want:
        return stored
    if pattern and "*" in pattern:
        patterns = next(converter.source_patterns for converter in converters if pattern in converter.source_patterns)
        expert = int(re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), stored.key)[1])
        if expert < want[0] and shape == [want[1] // len(patterns), *want[2:]]:
            return replace(stored, expert=expert, row=patterns.index(pattern) * shape[0])
    elif pattern and shape == [want[0], *want[:0:-1]]:
        return replace(stored, transposed=True)
    raise UserError(f"{told} has shape {shape}, the config asks {want} of {name}: not its files, or damaged ones")


# ----------------------------------------------------------------------------------------------------------------------
# Reading


@torch.no_grad()
def load_sharded(policy: Policy, path: str) -> None:
    """Fill a policy that was built by meta_hf and sharded: each process reads its own part of each tensor. All files
    are checked before a byte is read into the model."""
    hf = policy.hf
    waiting = {name: list(p.shape) for name, p in hf.named_parameters() if p.is_meta}
    found = match_parameters(hf, path, waiting) if waiting else {}
    tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    device = policy.banned.device if not policy.offloaded else torch.device("cpu")
    policy._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    if tied:  # each module has got a tensor of its own
        hf.get_output_embeddings()._parameters["weight"] = hf.get_input_embeddings()._parameters["weight"]
    for name, p in iter_with_progress(list(hf.named_parameters()), "loading parameters"):
        if name in found:
            _, offset = compute_local_shape_and_global_offset(waiting[name], p.device_mesh, p.placements)
            read_parameter(found[name], p.to_local(), offset)
    bad = find_nonfinite(dict(hf.named_parameters()))
    files = ", ".join(dict.fromkeys(str(stored.file) for stored in found.get(bad, []))) or path
    need(not bad, f"--model {path!r}: {bad} of {files} {NONFINITE_MESSAGE}: damaged, or of a training that diverged")


def read_parameter(parts: list[StoredTensor], local: torch.Tensor, offset: Sequence[int]) -> None:
    """Read a process's part of a parameter, which begins at `offset` of the whole, from the tensors it is made of.
    Files are opened for each parameter: what was read stays in a process's memory as long as they are open."""
    for file, stored_there in itertools.groupby(parts, key=lambda stored: stored.file):
        with open_safetensors(file) as tensors:
            for stored in stored_there:
                read_shard(stored, tensors, local, offset)


def read_shard(stored: StoredTensor, tensors: safe_open, local: torch.Tensor, offset: Sequence[int]) -> None:
    """Into a process's part of a parameter, which begins at `offset` of the whole: what the file's tensor has of it."""
    if stored.transposed:
        local, offset = local.transpose(1, 2), (offset[0], offset[2], offset[1])
    if stored.expert is not None:
        if not 0 <= stored.expert - offset[0] < len(local):
            return
        expert = local[stored.expert - offset[0]]  # whole: a mixture is sharded by experts, and never divided
        local, offset = expert[stored.row : stored.row + stored.shape[0]], (0,) * expert.ndim
    if local.numel():
        rows = tuple(slice(start, start + n) for start, n in zip(offset, local.shape, strict=True))
        local.copy_(tensors.get_slice(stored.key)[rows])


@torch.no_grad()
def find_nonfinite(tensors: dict[str, torch.Tensor]) -> str | None:
    """The first tensor with a value that is NaN or above LARGEST, or above fp32's largest in an optimizer's state,
    whichever rank holds it; the same answer on all of them."""
    names, first = list(tensors), len(tensors)
    for i, (name, tensor) in enumerate(tensors.items()):
        values = local_shard(tensor)
        largest = torch.finfo(torch.float32).max if "optimizer.state." in name else MAX_WEIGHT
        # the norm is the largest absolute value, or NaN where there is one
        if values.numel() and not torch.linalg.vector_norm(values, math.inf).item() <= largest:
            first = i
            break
    first = min(gather(first))
    return names[first] if first < len(names) else None


# ----------------------------------------------------------------------------------------------------------------------
# Writing a folder


def save_hf(hf: nn.Module, folder: Path) -> None:
    """The model's folder, as transformers writes it but for experts: it reads them either way round, but writes them
    as it holds them. The hub has, and vLLM reads, those of some families with inputs before outputs."""
    for config in filter(None, (hf.config, *(getattr(hf.config, name) for name in hf.config.sub_configs))):
        config.dtype = hf.dtype  # transformers leaves the inner ones as they were read
    hf.save_pretrained(folder)
    transposes = [
        converter for converter in weight_converters(hf) if type(converter.operations[0]).__name__ == "Transpose"
    ]
    names = tuple(itertools.chain.from_iterable(converter.source_patterns for converter in transposes))
    for file in folder.glob("*.safetensors") if names else ():
        tensors = load_file(file)
        for name in filter(lambda name: name.endswith(names), tensors):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})


def check_output_is_new(out: Path) -> None:
    """Before any work: a UserError where whole_folder would fail."""
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise UserError(f"--out {out} is a file, or is not empty; choose another folder or remove it")
    check_writable(out.parent, f"--out {out}")


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which is called `out` once all is in it: neither an error nor a full disk leaves half of
    one."""
    with report_write_errors(out, f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
            folder = Path(temporary) / out.name
            yield folder
            for file in folder.glob("*.safetensors"):  # written for their owner's eyes alone, unlike all others
                shutil.copymode(next(folder.glob("*config.json")), file)
            folder.rename(out)
