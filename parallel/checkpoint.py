"""Checkpoints of a run (OUT/checkpoints/step_000100/{trainer.json, *.safetensors}): writing, verifying, reading.

Each process has its own safetensors files with weights and optimizer state, written and read by
torch.distributed.checkpoint; nothing in a checkpoint is a pickle. trainer.json is written last, so a folder that has it
is complete. It holds the state that the next step depends on, the size and CRC-32 of every other file, and its own
CRC-32. Only folders named `step_` plus digits count: `.step_*` is being written or deleted, and --resume has found
`damaged_step_*` to be damaged.
"""

import errno
import json
import math
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata

from errors import (
    DISK_FULL_ERRNOS,
    NOT_WRITABLE_ERRNOS,
    UserError,
    as_user_error,
    nearest_existing,
    need,
    report_write_errors,
)
from layers.lora import add_lora, find_lora_layers, read_adapter
from model import ModelConfig, Policy, load_config, load_hf, weight_files
from parallel.loading import NONFINITE_MESSAGE, build_meta_model, find_nonfinite, match_parameters, read_parameter
from parallel.sharding import FullParameters, reshard
from settings import RENAMED, build_config
from utils import gather, print0

# The models in a checkpoint by name ("policy", "critic", ...), each with its optimizer if it has one
CheckpointModels = dict[str, tuple[Policy, torch.optim.Optimizer | None]]
SHARD_OVERHEAD_BYTES = 512  # header bytes of each tensor in each process's file, a little overestimated
FILE_BYTES = 2**24  # approximate max file size: torch holds a whole file in memory several times to write it


def run_on_rank0(function: Callable[[], Any]) -> Any:
    """Call `function` on rank 0 only. Return its result on all ranks; raise its UserError or OSError on all ranks."""
    outcome = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except (UserError, OSError) as error:
            outcome[1] = error
    result, error = gather(outcome)[0]
    if error is not None:
        raise error
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Finding checkpoints


def checkpoint_step(checkpoint: Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None for any other name, such as step_backup."""
    match = re.fullmatch(r"step_([0-9]+)", checkpoint.name)
    return int(match[1]) if match else None


def list_checkpoints(path: Path) -> list[Path]:
    """Return the complete checkpoints of a run directory, oldest first. If `path` is a checkpoint, return it alone."""
    if (path / "trainer.json").is_file():
        return [path]
    complete = [f.parent for f in path.glob("checkpoints/step_*/trainer.json") if checkpoint_step(f.parent) is not None]
    return sorted(complete, key=lambda path: (checkpoint_step(path), path.name))


def read_json(file: Path, remedy: str = "") -> dict:
    """Return the JSON object that a file holds. Raise UserError, which ends with `remedy`, if it cannot be read."""
    with as_user_error((OSError, ValueError, RecursionError), f"{file}: missing, empty, cut short or damaged{remedy}"):
        content = json.loads(file.read_text())
    need(isinstance(content, dict), f"{file}: damaged: it is not a JSON object{remedy}")
    return content


def to_text_with_crc(trainer: dict) -> str:
    """Return the text of trainer.json; its last entry is the checksum of the other entries."""
    return json.dumps(trainer | {"crc32": f"{zlib.crc32(json.dumps(trainer).encode()):08x}"}) + "\n"


def read_trainer_state(checkpoint: Path) -> dict:
    """Return the content of trainer.json. Raise UserError if it is not what was written."""
    file = checkpoint / "trainer.json"
    trainer = read_json(file)
    state = {key: value for key, value in trainer.items() if key != "crc32"}
    need(
        file.read_text() == to_text_with_crc(state), f"{file}: damaged: its checksum is not the one it was written with"
    )
    step = trainer.get("step")
    need(isinstance(step, int) and checkpoint_step(checkpoint) in (None, step),
         f"{file}: it is of step {step}, but its folder is named after another step; rename the folder back")
    return state


def read_run_args(checkpoint: Path) -> dict:
    """Return the arguments of a checkpoint's run, or {} if the run directory has no run.json."""
    file = Path(os.path.abspath(checkpoint)).parent.parent / "run.json"  # `checkpoints` may be a link
    remedy = "; remove it, and --resume continues with the flags that you pass"
    if not file.is_file():
        return {}
    args = read_json(file, remedy).get("args")
    need(isinstance(args, dict), f"{file}: damaged: it has no args{remedy}")
    return {RENAMED.get(name, name): value for name, value in args.items()}


def resolve_model(path: str, flag: str = "MODEL") -> tuple[str, Path | None, dict]:
    """Return (base model, checkpoint or PEFT adapter or None, the run's arguments) of a model folder, hub id, run
    directory, checkpoint or adapter folder. Errors name `flag`."""
    folder = Path(path)
    base, checkpoint, args = path, None, {}
    if (folder / "adapter_config.json").is_file():
        base, checkpoint = read_json(folder / "adapter_config.json").get("base_model_name_or_path") or "", folder
    elif (folder / "trainer.json").is_file() or (folder / "run.json").is_file():
        checkpoints = list_checkpoints(folder)
        need(checkpoints, f"{path!r} is a run without a complete checkpoint; train past --save-every first")
        checkpoint = checkpoints[-1]
        args = read_run_args(checkpoint)
        need(args, f"{path!r} is a checkpoint without its run: no run.json two folders above {checkpoint}")
        base = args.get("model", path)
    try:
        load_config(base, build_config(ModelConfig, args | {"model": base}).family_paths)
    except UserError as error:  # it names --model, the flag of train.py
        message = str(error).replace("give a model", "give a run directory, checkpoint, adapter, model")
        raise UserError(message.replace("--model", flag, 1)) from error
    return base, checkpoint, args


# ----------------------------------------------------------------------------------------------------------------------
# Verifying


def file_checksum(file: Path) -> list:
    """Return [bytes, CRC-32] of a file. They reveal bad disks and truncated copies, but do not prove who wrote it."""
    crc = size = 0
    with open(file, "rb") as f:
        while block := f.read(2**22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, f"{crc:08x}"]


def base_checksum(model: str) -> str:
    """Return a checksum of the sizes of a model's weight files and of the first and last MiB of each. Reading them
    whole would take minutes for a large model."""
    crc = 0
    for path in weight_files(model):
        with open(path, "rb") as file:
            start, size = file.read(2**20), file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2**20))
            crc = zlib.crc32(b"%d" % size + start + file.read(), crc)
    return f"{crc:08x}"


def check_base(checkpoint: Path, model: str) -> None:
    """Raise UserError if a checkpoint holds adapters that were trained on other weights than those of `model`."""
    trained_on = read_trainer_state(checkpoint).get("base")
    need(trained_on in (None, base_checksum(model)),
         f"{checkpoint}: its adapters were trained on other weights than {model!r} has now; restore those, or start a "
         "new run")


def find_damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, or None. The ranks share the reading; all get the same result."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    damage = None
    try:
        checksums = read_trainer_state(checkpoint).get("files", {})
        extra = sorted({file.name for file in checkpoint.glob("*.safetensors")} - checksums.keys())
        need(not extra, f"{checkpoint}: {', '.join(extra)} is not part of this checkpoint but would be read; remove it")
        for name in sorted(checksums)[rank::world]:
            file = checkpoint / name
            need(Path(name).name == name and (file.is_file() or not file.exists()),
                 f"{file}: not a regular file inside the checkpoint's folder")
            actual = file_checksum(file)
            need(actual == checksums[name],
                 f"{file}: damaged: its size and checksum are {actual}, not {checksums[name]}")
    except (UserError, OSError) as error:
        damage = str(error)
    return next(filter(None, gather(damage)), None)


def newest_intact_checkpoint(path: Path, set_aside: bool = False) -> Path | None:
    """Return the newest intact checkpoint of a run directory, or None if it has no checkpoint. If `path` is a
    checkpoint, verify and return it. All ranks must call it. Raise UserError if all checkpoints are damaged.

    Newer checkpoints that are damaged are skipped, with a printed line for each. With `set_aside` they are also
    renamed, so that neither --keep nor a later start counts them."""
    checkpoints = run_on_rank0(lambda: list_checkpoints(path))
    for file in chain.from_iterable(checkpoint.iterdir() for checkpoint in checkpoints):
        need(file.name != ".metadata" and file.suffix != ".distcp",  # both hold pickles
             f"{file}: written by a version before 2026-11-25, whose checkpoints can no longer be read; "
             "CHANGELOG.md names the last commit that reads them")
    damage: dict[Path, str] = {}
    for checkpoint in reversed(checkpoints):
        if not (reason := find_damage(checkpoint)):
            break
        damage[checkpoint] = reason
    reasons = "; ".join(damage.values())
    need(not checkpoints or len(damage) < len(checkpoints),
         f"{path}: no intact checkpoint: {reasons}; restore these files")
    for damaged, reason in damage.items():
        renamed = f". The folder is now called {run_on_rank0(partial(quarantine, damaged)).name}" if set_aside else ""
        print0(f"skipped: {reason}{renamed}")
    return checkpoint if checkpoints else None


def quarantine(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it no longer counts as one, and return its new path."""
    target = checkpoint.with_name(f"damaged_{checkpoint.name}")
    while target.exists():
        target = target.with_name(f"{target.name}_2")
    with report_write_errors(checkpoint, f"--resume: {checkpoint} is damaged and must be renamed"):
        return checkpoint.rename(target)


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def _state_dict(models: CheckpointModels) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by name, not copied; the policy's names have no prefix. Of a model with
    adapters only the trained parameters are stored; --model has the others. The optimizer's settings are not stored,
    because they follow from the flags."""
    tensors = {}
    for model_name, (model, optimizer) in models.items():
        prefix = "" if model_name == "policy" else f"{model_name}."
        adapted = bool(find_lora_layers(model))
        reshard(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or not adapted:
                tensors[f"{prefix}model.{name}"] = parameter.detach()
            states = optimizer.state.get(parameter, {}) if optimizer else {}
            tensors |= {f"{prefix}optimizer.state.{name}.{key}": tensor for key, tensor in states.items()}
    others = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if others:  # torch would write files that cannot be read
        raise TypeError(f"a checkpoint holds tensors only, but {others} are not tensors")
    return tensors


def fsync_path(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk, so that it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush a folder
            raise
    finally:
        os.close(handle)


def _discard(checkpoint: Path) -> None:
    """Delete a checkpoint. If this is interrupted, its name no longer counts; the next save removes it."""
    trash = checkpoint.with_name(f".{checkpoint.name}.old")
    os.rename(checkpoint, trash)
    shutil.rmtree(trash)


def _file_numbers(state: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return for each tensor the number of the file it goes to, so that no file is much larger than FILE_BYTES."""
    ends = accumulate(tensor.nbytes for tensor in state.values())
    return {name: 1 + end // (FILE_BYTES * dist.get_world_size()) for name, end in zip(state, ends, strict=True)}


def _disk_space(out: Path, state: dict[str, torch.Tensor]) -> tuple[int, float]:
    """Return (bytes that a checkpoint takes, a little overestimated; free bytes of the disk)."""
    values = sum(tensor.nbytes for tensor in state.values())
    disk = shutil.disk_usage(nearest_existing(out))
    free = disk.free if disk.total else math.inf  # 0: the file system does not report its size
    return values + SHARD_OVERHEAD_BYTES * len(state) * dist.get_world_size(), free


def check_disk_space(out: Path, keep: int, models: CheckpointModels) -> None:
    """Raise UserError if the disk cannot hold one more checkpoint; print a warning if it cannot hold `keep` and the one
    being written. Called before the first step, so that a run does not fail only at its first checkpoint."""
    needed, free = _disk_space(out, _state_dict(models))
    need(needed <= free, f"--out {out}: disk full: a checkpoint needs {needed / 1e9:.3g} GB, but only "
         f"{free / 1e9:.3g} GB are free; free disk space, or use another folder")
    missing = needed * max(1, keep + 1 - len(list_checkpoints(out)))
    if free < missing:
        print0(f"--out {out}: {free / 2**30:.3g} GiB are free, but --keep {keep} needs {missing / 2**30:.3g} GiB more")


def save_checkpoint(
    out: Path, step: int, models: CheckpointModels, keep: int, position: dict | None = None, best: int | None = None
) -> None:
    """Write a sharded checkpoint of models, optimizers and `position`, then delete old ones.

    It is written under a temporary name and renamed when complete, so that a killed run never leaves an incomplete
    checkpoint that looks complete. Then all checkpoints but the newest `keep` and that of step `best` are deleted. If a
    run could not continue from it (a weight is NaN), raise UserError, write nothing and delete nothing.

    `position` is the other state that the next step depends on. Random state is not stored because there is none:
    every draw is seeded from (seed, purpose, step, ...).
    """
    final = out / "checkpoints" / f"step_{step:06d}"
    temporary = final.with_name("." + final.name)
    state = _state_dict(models)

    def remedy() -> str:
        earlier = list_checkpoints(out)
        return f"continue from {earlier[-1]} with --resume auto" if earlier else "there is no earlier one: start again"

    if name := find_nonfinite(state):
        raise UserError(
            f"--out {out}: after step {step} {name} {NONFINITE_MESSAGE}; no checkpoint was written; "
            f"{run_on_rank0(remedy)}, with a lower --lr or --max-grad-norm"
        )

    def prepare() -> None:
        final.parent.mkdir(parents=True, exist_ok=True)
        for leftover in final.parent.glob(".step_*"):  # left by a process that was killed in a save or deletion
            shutil.rmtree(leftover)
        needed, free = _disk_space(out, state)
        if needed > free:
            raise OSError(errno.ENOSPC, "", temporary)
        temporary.mkdir()

    def finish() -> None:
        files = dict(sorted(chain.from_iterable(checksums)))
        trainer = {"step": step, "world": dist.get_world_size(), **(position or {}), "files": files}
        (temporary / "trainer.json").write_text(to_text_with_crc(trainer))
        fsync_path(temporary / "trainer.json")
        fsync_path(temporary)
        if final.exists():
            _discard(final)
        os.rename(temporary, final)
        fsync_path(final.parent)
        for old in list_checkpoints(out)[:-keep]:
            if old != final and checkpoint_step(old) != best:
                _discard(old)

    def fail(error: OSError) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        with report_write_errors(
            out, f"--out {out}: the checkpoint of step {step} needs {_disk_space(out, state)[0] / 1e9:.3g} GB", remedy()
        ):
            raise error

    try:
        run_on_rank0(prepare)
        numbers = _file_numbers(state)
        with _same_error_on_all_ranks():
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(temporary), numbers, save_distributed=True))
        local = [(file.name, file_checksum(file)) for file in temporary.glob(f"shard-{dist.get_rank() + 1:05d}-*")]
        checksums = gather(local)
        run_on_rank0(finish)
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS + NOT_WRITABLE_ERRNOS:  # all ranks have the same error
            run_on_rank0(partial(fail, error))
        raise
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _same_error_on_all_ranks() -> Iterator[None]:
    """Raise an OSError of any rank on all ranks. Other exceptions are raised with the tracebacks of all ranks."""
    try:
        yield
    except dcp.CheckpointException as failure:
        for error, _ in failure.failures.values():
            if isinstance(error, OSError):
                raise error from failure
        raise


# ----------------------------------------------------------------------------------------------------------------------
# Reading


class _Reader(HuggingFaceStorageReader):
    """torch's reader of checkpoints, changed to read the headers of the files once instead of for every load."""

    def __init__(self, checkpoint: Path):
        super().__init__(str(checkpoint))
        read_errors = (SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError)
        with as_user_error(
            read_errors, f"{checkpoint}: its safetensors files are damaged or forged; use another checkpoint"
        ):
            self.metadata = super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self.metadata


def _load(state: dict[str, torch.Tensor], reader: _Reader) -> None:
    """Read the tensors that `state` names from a checkpoint, in place."""
    with _same_error_on_all_ranks(), warnings.catch_warnings(action="ignore"):  # no process group in merge_lora.py
        dcp.load(state, storage_reader=reader)


def load_checkpoint(path: Path, models: CheckpointModels) -> dict:
    """Restore models and optimizers in place, on any number of ranks. Return the content of trainer.json: step, ..."""
    state = _state_dict(models)
    _load(state, _Reader(path))
    name = find_nonfinite(state)
    need(
        not name,
        f"--resume {path}: {name} {NONFINITE_MESSAGE}; remove this checkpoint, and --resume auto uses the one before",
    )
    return read_trainer_state(path)


class TrainedWeights(FullParameters):
    """The weights of a model folder, hub id, run directory (its newest intact checkpoint), checkpoint or PEFT adapter.

    Iterate over it like over FullParameters of a sharded model. Each weight is read when the iteration reaches it, in
    fp32, so a process holds one weight at a time. `hf` is the base model of `cfg` as `build` makes it, with adapters
    added; `hf.loaded_from` is the folder or hub id that the weights come from.
    """

    def __init__(self, path: str, dtype: torch.dtype | None = None, build: Callable[..., nn.Module] = build_meta_model):
        base, checkpoint, args = resolve_model(path)
        checkpoint = newest_intact_checkpoint(Path(path)) if args else checkpoint
        self.cfg = build_config(ModelConfig, args | {"model": base})
        self.hf = build(base, paths=self.cfg.family_paths)
        self.hf.loaded_from = self.source = checkpoint or base
        if lora := self.cfg.lora(args.get("seed", 0)):
            check_base(checkpoint, base)
            add_lora(self.hf, lora)
        elif checkpoint and not args:
            read_adapter(self.hf, checkpoint, base)
        super().__init__(self, dtype=dtype)
        self.reader = _Reader(checkpoint) if args else None
        if adapters := {name: p.detach() for name, p in self.hf.named_parameters() if ".lora_" in name}:
            self._fill(adapters)
            self.reader, self.source = None, base  # the other weights are the base model's
        shapes = {name: list(p.shape) for name, p in self.chosen.items() if p.is_meta}
        self.stored = match_parameters(self.hf, base, shapes) if shapes and not self.reader else {}

    def _fill(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read tensors from the checkpoint, if there is one. Raise UserError if a tensor is not finite."""
        if self.reader:
            _load({f"model.hf.{name}": tensor for name, tensor in tensors.items()}, self.reader)
        name = find_nonfinite(tensors)
        need(not name, f"{self.source}: {name} {NONFINITE_MESSAGE}: it is damaged, or its training diverged")

    def whole(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a whole parameter, without its adapter, read from its file."""
        parameter = self.chosen[name].detach()
        tensor = torch.empty(parameter.shape) if parameter.is_meta else parameter
        read_parameter(self.stored.get(name, []), tensor, (0,) * tensor.ndim)
        self._fill({name: tensor})
        return tensor.to(dtype or tensor.dtype)


def load_model_or_checkpoint(path: str) -> nn.Module:
    """Return the whole model that TrainedWeights reads, in fp32, with its adapters not merged."""
    weights = TrainedWeights(path, build=load_hf)
    for name in weights.chosen:
        weights.whole(name)  # in place
    return weights.hf
