"""Reads a model's files into a sharded model, each process its own part of each tensor; writes a model to a folder."""

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
from model import Policy, attach_family, check_head, find_family, load_config, load_hf, weight_files
from parallel.sharding import local_shard
from report.progress import iter_with_progress
from utils import gather, print0

FLOATS = ("F64", "F32", "F16", "BF16")  # the dtypes that weights may have, in safetensors' names
MAX_WEIGHT = 1e20  # largest absolute value of a weight: products with 1e38 overflow
NONFINITE_MESSAGE = f"holds NaN, an infinity, or a value above {MAX_WEIGHT:.0e}"


def build_meta_model(path: str, dtype: torch.dtype = torch.float32, paths: tuple[str, ...] = ()) -> nn.Module:
    """Return the model of a folder or hub id without weights: they are on the meta device until load_sharded reads
    them. If the files hold weights in a form that load_sharded does not support, each process reads the whole model
    here."""
    config = load_config(path, paths)
    family = find_family(config, path, paths)
    register_attention()
    with register_module_parameter_registration_hook(to_meta_parameter):
        hf = AutoModel.from_config(config, dtype=dtype, attn_implementation="planned")
    unsupported = [converter for converter in weight_converters(hf) if not is_supported_converter(converter)]
    if unsupported:
        patterns = ", ".join(unsupported[0].source_patterns)
        print0(f"{path}: only transformers can read {patterns} in its files, so each process reads the whole model")
        return load_hf(path, dtype, paths)
    return attach_family(hf, family)


def to_meta_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter on the meta device, without memory. Buffers, such as rotary frequencies, are not in the
    model's files, so they are created on a real device."""
    return parameter if parameter.is_meta else nn.Parameter(parameter.to("meta"), parameter.requires_grad)


# ----------------------------------------------------------------------------------------------------------------------
# Finding a parameter in the files


def weight_converters(hf: nn.Module) -> list[WeightConverter]:
    """Return the conversions, other than renaming, that transformers applies to the tensors of this model's files."""
    return [transform for transform in get_model_conversion_mapping(hf) if isinstance(transform, WeightConverter)]


def is_supported_converter(converter: WeightConverter) -> bool:
    """Return whether load_sharded supports a conversion: of a mixture's experts, stored as one tensor whose last two
    axes are swapped, or as one or two tensors per expert."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    if steps == [("Transpose", None)]:
        transpose = converter.operations[0]
        return {transpose.dim0, transpose.dim1} == {1, 2} and transpose.check_dims
    return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


@contextmanager
def open_safetensors(file: Path) -> Iterator[safe_open]:
    """Open a safetensors file without reading its tensors. Raise UserError if its header is inconsistent or does not
    match the file's size."""
    message = f"{file}: truncated, damaged or not a safetensors file; download it again"
    with as_user_error((SafetensorError, OSError), message), safe_open(file, "pt") as tensors:
        yield tensors


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file and the part of a parameter that it holds: all of it, or some rows of one expert."""

    file: Path
    key: str
    dtype: str
    shape: list[int]
    transposed: bool = False  # the file has the last two axes swapped
    expert: int | None = None
    row: int = 0  # first row of the expert that the tensor holds


def iter_tensor_headers(files: list[Path]) -> Iterator[StoredTensor]:
    """Yield the tensors of the files, read from their headers alone."""
    for file in files:
        with open_safetensors(file) as tensors:
            for key in tensors.keys():
                header = tensors.get_slice(key)
                yield StoredTensor(file, key, header.get_dtype(), header.get_shape())


def match_parameters(hf: nn.Module, path: str, shapes: dict[str, list[int]]) -> dict[str, list[StoredTensor]]:
    """Return for each parameter in `shapes` (name -> shape) the stored tensors that it consists of. All files are
    checked: raise UserError if a tensor is damaged, missing or has another shape."""
    converters = weight_converters(hf)
    state = dict(hf.state_dict())
    renamings = [transform for transform in get_model_conversion_mapping(hf) if isinstance(transform, WeightRenaming)]
    matches: dict[str, list[StoredTensor]] = {name: [] for name in shapes}
    left = {name: math.prod(shape) for name, shape in shapes.items()}  # number of elements not found yet
    unused = []
    for stored in iter_tensor_headers(weight_files(path)):
        name, pattern = rename_source_key(stored.key, renamings, converters, hf.base_model_prefix, state)
        if name in shapes:
            matches[name].append(match_tensor(stored, name, shapes[name], pattern, converters))
            left[name] -= math.prod(stored.shape)
        elif name not in state:
            unused.append(stored.key)
    if unused:
        print0(f"{path}: ignored {len(unused)} tensors that are not part of the model: {', '.join(unused[:3])}")
    missing = [name for name, n in left.items() if n > 0]
    need(not missing, f"--model {path!r}: {len(missing)} tensors are missing or cut: {missing[:3]}; download it again")
    return matches


def match_tensor(
    stored: StoredTensor, name: str, expected: list[int], pattern: str | None, converters: list[WeightConverter]
) -> StoredTensor:
    """Return `stored` with its position in its parameter, which has the shape `expected`. Raise UserError if it does
    not fit there. `pattern` is the converter's pattern that its name matches, if any."""
    tensor = f"{stored.file}: {stored.key}"
    need(stored.dtype in FLOATS,
         f"{tensor} is of dtype {stored.dtype}, not {', '.join(FLOATS)}: quantised weights are not supported")
    shape = stored.shape
    if shape == expected:
        return stored
    if pattern and "*" in pattern:
        patterns = next(converter.source_patterns for converter in converters if pattern in converter.source_patterns)
        expert = int(re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), stored.key)[1])
        if expert < expected[0] and shape == [expected[1] // len(patterns), *expected[2:]]:
            return replace(stored, expert=expert, row=patterns.index(pattern) * shape[0])
    elif pattern and shape == [expected[0], *expected[:0:-1]]:
        return replace(stored, transposed=True)
    raise UserError(f"{tensor} has shape {shape}, but {name} needs {expected} by the config: wrong or damaged files")


# ----------------------------------------------------------------------------------------------------------------------
# Reading


@torch.no_grad()
def load_sharded(policy: Policy, path: str) -> None:
    """Read the weights of a policy that was built by build_meta_model and sharded: each process reads its own part of
    each tensor. All files are checked before the first tensor is read."""
    hf = policy.hf
    shapes = {name: list(p.shape) for name, p in hf.named_parameters() if p.is_meta}
    stored = match_parameters(hf, path, shapes) if shapes else {}
    tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    if stored:  # benchmarks draw the weights
        check_head(path, tied)
    device = policy.banned.device if not policy.offloaded else torch.device("cpu")
    policy._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    if tied:  # _apply has given each module a separate tensor
        hf.get_output_embeddings()._parameters["weight"] = hf.get_input_embeddings()._parameters["weight"]
    for name, p in iter_with_progress(list(hf.named_parameters()), "loading parameters"):
        if name in stored:
            _, offset = compute_local_shape_and_global_offset(shapes[name], p.device_mesh, p.placements)
            read_parameter(stored[name], p.to_local(), offset)
    name = find_nonfinite(dict(hf.named_parameters()))
    files = ", ".join(dict.fromkeys(str(part.file) for part in stored.get(name, []))) or path
    need(not name, f"--model {path!r}: {name} of {files} {NONFINITE_MESSAGE}: it is damaged, or its training diverged")


def read_parameter(parts: list[StoredTensor], local: torch.Tensor, offset: Sequence[int]) -> None:
    """Read this process's part of a parameter, which begins at `offset` of the whole, from the stored tensors `parts`.
    Files are opened for each parameter, because what was read stays in memory as long as a file is open."""
    for file, file_parts in itertools.groupby(parts, key=lambda stored: stored.file):
        with open_safetensors(file) as tensors:
            for stored in file_parts:
                read_shard(stored, tensors, local, offset)


def read_shard(stored: StoredTensor, tensors: safe_open, local: torch.Tensor, offset: Sequence[int]) -> None:
    """Copy what `stored` holds of this process's part of a parameter, which begins at `offset` of the whole."""
    if stored.transposed:
        local, offset = local.transpose(1, 2), (offset[0], offset[2], offset[1])
    if stored.expert is not None:
        if not 0 <= stored.expert - offset[0] < len(local):
            return
        expert = local[stored.expert - offset[0]]  # whole, because a mixture is sharded by experts only
        local, offset = expert[stored.row : stored.row + stored.shape[0]], (0,) * expert.ndim
    if local.numel():
        rows = tuple(slice(start, start + n) for start, n in zip(offset, local.shape, strict=True))
        local.copy_(tensors.get_slice(stored.key)[rows])


@torch.no_grad()
def find_nonfinite(tensors: dict[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor with a value that is NaN or above MAX_WEIGHT (in an optimizer's state: above
    fp32's maximum), whichever rank holds it, or None. The result is the same on all ranks."""
    names, first = list(tensors), len(tensors)
    for i, (name, tensor) in enumerate(tensors.items()):
        values = local_shard(tensor)
        largest = torch.finfo(torch.float32).max if "optimizer.state." in name else MAX_WEIGHT
        # this norm is the largest absolute value, or NaN if any value is NaN
        if values.numel() and not torch.linalg.vector_norm(values, math.inf).item() <= largest:
            first = i
            break
    first = min(gather(first))
    return names[first] if first < len(names) else None


# ----------------------------------------------------------------------------------------------------------------------
# Writing a folder


def save_hf(hf: nn.Module, folder: Path) -> None:
    """Write a model's folder as transformers does, except for transposed experts. transformers reads them in either
    order but writes them as it holds them; for some families the hub has, and vLLM reads, inputs before outputs."""
    for config in filter(None, (hf.config, *(getattr(hf.config, name) for name in hf.config.sub_configs))):
        config.dtype = hf.dtype  # transformers does not update the inner configs
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
    """Raise UserError if atomic_folder could not write to `out`. Called before any work is done."""
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise UserError(f"--out {out} is a file or is not empty; choose another folder, or remove it")
    check_writable(out.parent, f"--out {out}")


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill. It is renamed to `out` at the end, so that neither an error nor a full disk
    leaves an incomplete folder."""
    with report_write_errors(out, f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
            folder = Path(temporary) / out.name
            yield folder
            for file in folder.glob("*.safetensors"):  # they are written readable by the owner only
                shutil.copymode(next(folder.glob("*config.json")), file)
            folder.rename(out)
