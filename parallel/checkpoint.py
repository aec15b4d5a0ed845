"""Checkpoints of a run: OUT/checkpoints/step_000100/{trainer.json, *.safetensors}, written, verified and read.

Weights and optimizer state are safetensors files of each process, written and read by torch.distributed.checkpoint;
nothing in a checkpoint is a pickle. trainer.json is written last, so a folder that has it is complete; it holds what
the next step depends on, the size and CRC-32 of every other file, and its own CRC-32. Only folders called `step_` and
digits count: `.step_*` is being written or deleted, `damaged_step_*` was passed over by --resume.
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
from model import ModelConfig, Policy, load_config, load_hf
from parallel.loading import NONFINITE_MESSAGE, build_meta_model, find_nonfinite, match_parameters, read_parameter
from parallel.sharding import FullParameters, reshard
from settings import RENAMED, build_config
from utils import gather, print0

# "policy", and the other models that a checkpoint holds, each with its optimizer if it has one
CheckpointModels = dict[str, tuple[Policy, torch.optim.Optimizer | None]]
SHARD_OVERHEAD_BYTES = 512  # bytes of each tensor in the header of each process's file, a little overestimated
FILE_BYTES = 2**24  # of a process's file: torch holds a whole file in memory, several times, before it writes it


def run_on_rank0(do: Callable[[], Any]) -> Any:
    """What rank 0 does to files, once: its result, or what went wrong with them, on all ranks."""
    done = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            done[0] = do()
        except (UserError, OSError) as error:
            done[1] = error
    result, error = gather(done)[0]
    if error is not None:
        raise error
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Which checkpoints there are


def checkpoint_step(checkpoint: Path) -> int | None:
    """By the folder's name, which nobody else's has: step_backup is none."""
    match = re.fullmatch(r"step_([0-9]+)", checkpoint.name)
    return int(match[1]) if match else None


def list_checkpoints(path: Path) -> list[Path]:
    """Those of a run, oldest first; of a checkpoint, itself."""
    if (path / "trainer.json").is_file():
        return [path]
    found = [f.parent for f in path.glob("checkpoints/step_*/trainer.json") if checkpoint_step(f.parent) is not None]
    return sorted(found, key=lambda path: (checkpoint_step(path), path.name))


def read_json(file: Path, remedy: str = "") -> dict:
    with as_user_error((OSError, ValueError, RecursionError), f"{file}: missing, empty, cut short or damaged{remedy}"):
        found = json.loads(file.read_text())
    need(isinstance(found, dict), f"{file}: damaged: it holds no JSON object{remedy}")
    return found


def to_text_with_crc(trainer: dict) -> str:
    """The text of trainer.json, with the checksum of the rest of it at its end."""
    return json.dumps(trainer | {"crc32": f"{zlib.crc32(json.dumps(trainer).encode()):08x}"}) + "\n"


def read_trainer_state(checkpoint: Path) -> dict:
    """What trainer.json holds; a UserError if that is not what was written."""
    file = checkpoint / "trainer.json"
    trainer = read_json(file)
    rest = {key: value for key, value in trainer.items() if key != "crc32"}
    need(
        file.read_text() == to_text_with_crc(rest), f"{file}: damaged: its checksum is not the one it was written with"
    )
    step = trainer.get("step")
    need(isinstance(step, int) and checkpoint_step(checkpoint) in (None, step),
         f"{file}: of step {step}, but the folder's name says another; rename it back")
    return rest


def read_run_args(checkpoint: Path) -> dict:
    """The arguments of a checkpoint's run; none where there is no run.json around it."""
    file = Path(os.path.abspath(checkpoint)).parent.parent / "run.json"  # `checkpoints` may be a link
    remedy = "; remove it, and --resume goes on with the flags that are given"
    if not file.is_file():
        return {}
    args = read_json(file, remedy).get("args")
    need(isinstance(args, dict), f"{file}: damaged: it holds no args{remedy}")
    return {RENAMED.get(name, name): value for name, value in args.items()}


def resolve_model(path: str, flag: str = "MODEL") -> tuple[str, Path | None, dict]:
    """Return (base model, checkpoint or PEFT adapter or None, the run's arguments) of a model folder, hub id, run
    directory, checkpoint or adapter folder. `flag` is what errors call it."""
    given = Path(path)
    base, found, args = path, None, {}
    if (given / "adapter_config.json").is_file():
        base, found = read_json(given / "adapter_config.json").get("base_model_name_or_path") or "", given
    elif (given / "trainer.json").is_file() or (given / "run.json").is_file():
        checkpoints = list_checkpoints(given)
        need(checkpoints, f"{path!r} is a run without a complete checkpoint; train past --save-every first")
        found = checkpoints[-1]
        args = read_run_args(found)
        need(args, f"{path!r} is a checkpoint without its run: no run.json two folders above {found}")
        base = args.get("model", path)
    try:
        load_config(base, build_config(ModelConfig, args | {"model": base}).family_paths)
    except UserError as error:  # of a flag that train.py has
        raise UserError(str(error).replace("--model", flag, 1)) from error
    return base, found, args


# ----------------------------------------------------------------------------------------------------------------------
# Verifying


def file_checksum(file: Path) -> list:
    """[bytes, CRC-32] of a file: against bad disks and cut copies, as fast as it is read; no proof of who wrote it."""
    crc = size = 0
    with open(file, "rb") as f:
        while block := f.read(2**22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, f"{crc:08x}"]


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. Ranks share the reading, and all get the same answer."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrong = None
    try:
        written = read_trainer_state(checkpoint).get("files", {})
        strange = sorted({file.name for file in checkpoint.glob("*.safetensors")} - written.keys())
        need(not strange, f"{checkpoint}: {', '.join(strange)} is not of this checkpoint, but would be read; remove it")
        for name in sorted(written)[rank::world]:
            file = checkpoint / name
            need(Path(name).name == name and (file.is_file() or not file.exists()),
                 f"{file}: no file of the checkpoint's own")
            found = file_checksum(file)
            need(found == written[name], f"{file}: damaged: its size and checksum are {found}, not {written[name]}")
    except (UserError, OSError) as error:
        wrong = str(error)
    return next(filter(None, gather(wrong)), None)


def newest_intact_checkpoint(path: Path, set_aside: bool = False) -> Path | None:
    """The given checkpoint, verified; or a run directory's newest intact one, None if it has none. All ranks call it.

    Damaged ones that are newer are passed over, aloud; with `set_aside` they are also renamed, so that neither --keep
    nor a later start counts them."""
    found = run_on_rank0(lambda: list_checkpoints(path))
    for file in chain.from_iterable(checkpoint.iterdir() for checkpoint in found):
        need(file.name != ".metadata" and file.suffix != ".distcp",  # pickles
             f"{file}: written by a version before 2026-11-25, whose checkpoints are not read any more; "
             "CHANGELOG.md names the last commit that reads them")
    wrong: dict[Path, str] = {}
    for checkpoint in reversed(found):
        if not (reason := find_damage(checkpoint)):
            break
        wrong[checkpoint] = reason
    reasons = "; ".join(wrong.values())
    need(not found or len(wrong) < len(found), f"{path}: no intact checkpoint: {reasons}; restore these files")
    for damaged, reason in wrong.items():
        renamed = f". The folder is now called {run_on_rank0(partial(quarantine, damaged)).name}" if set_aside else ""
        print0(f"passed over: {reason}{renamed}")
    return checkpoint if found else None


def quarantine(checkpoint: Path) -> Path:
    target = checkpoint.with_name(f"damaged_{checkpoint.name}")
    while target.exists():
        target = target.with_name(f"{target.name}_2")
    with report_write_errors(checkpoint, f"--resume: {checkpoint} is damaged"):
        return checkpoint.rename(target)


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def _state_dict(models: CheckpointModels) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds, by reference: name -> tensor, the policy's names without a prefix. A model with
    adapters is represented by them alone; --model has the rest. The optimizer's settings follow from the flags."""
    found = {}
    for model_name, (model, optimizer) in models.items():
        prefix = "" if model_name == "policy" else f"{model_name}."
        adapted = bool(find_lora_layers(model))
        reshard(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or not adapted:
                found[f"{prefix}model.{name}"] = parameter.detach()
            states = optimizer.state.get(parameter, {}) if optimizer else {}
            found |= {f"{prefix}optimizer.state.{name}.{key}": tensor for key, tensor in states.items()}
    others = [name for name, value in found.items() if not isinstance(value, torch.Tensor)]
    if others:  # torch would write files that nothing can read
        raise TypeError(f"a checkpoint holds tensors only, but {others} are none")
    return found


def fsync_path(path: Path) -> None:
    """To the disk, for a power cut may come: a file's content, or which names a folder holds."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot, for folders
            raise
    finally:
        os.close(handle)


def _discard(checkpoint: Path) -> None:
    """A deletion that is interrupted leaves a name that does not count, and that the next save removes."""
    trash = checkpoint.with_name(f".{checkpoint.name}.old")
    os.rename(checkpoint, trash)
    shutil.rmtree(trash)


def _file_numbers(state: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return which of each process's files a tensor goes to, so that none is much larger than FILE_BYTES."""
    ends = accumulate(tensor.nbytes for tensor in state.values())
    return {name: 1 + end // (FILE_BYTES * dist.get_world_size()) for name, end in zip(state, ends, strict=True)}


def _disk_space(out: Path, state: dict[str, torch.Tensor]) -> tuple[int, float]:
    """(bytes that a checkpoint takes, a little overestimated; bytes that are free)"""
    values = sum(tensor.nbytes for tensor in state.values())
    disk = shutil.disk_usage(nearest_existing(out))
    free = disk.free if disk.total else math.inf  # 0: a file system that does not say
    return values + SHARD_OVERHEAD_BYTES * len(state) * dist.get_world_size(), free


def check_disk_space(out: Path, keep: int, models: CheckpointModels) -> None:
    """Before the first step rather than at the first checkpoint: UserError if the disk cannot hold one more; a
    warning if it cannot hold `keep` and the one being written."""
    needed, free = _disk_space(out, _state_dict(models))
    need(needed <= free, f"--out {out}: disk full: a checkpoint needs {needed} bytes, {free} are free; free some")
    more = needed * max(1, keep + 1 - len(list_checkpoints(out)))
    if free < more:
        print0(f"--out {out}: {free / 2**30:.3g} GiB are free; --keep {keep} checkpoints need {more / 2**30:.3g} more")


def save_checkpoint(
    out: Path, step: int, models: CheckpointModels, keep: int, position: dict | None = None, best: int | None = None
) -> None:
    """Models, optimizers and position, sharded. Written under a temporary name and renamed when complete, so that a
    killed run never leaves half a checkpoint behind under a good name; then all but the newest `keep` and that of the
    step `best` are removed. What could not be continued from (a weight that is NaN) is not written, and nothing is
    removed for it.

    `position` is what else the next step depends on. Random state is not stored because there is none: every draw is
    seeded from (seed, purpose, step, ...).
    """
    final = out / "checkpoints" / f"step_{step:06d}"
    temporary = final.with_name("." + final.name)
    state = _state_dict(models)

    def remedy() -> str:
        earlier = list_checkpoints(out)
        return f"go on from {earlier[-1]} with --resume auto" if earlier else "there is no earlier one: start again"

    if bad := find_nonfinite(state):
        raise UserError(
            f"--out {out}: after step {step} {bad} {NONFINITE_MESSAGE}; no checkpoint was written; {run_on_rank0(remedy)}, "
            "with a lower --lr or --max-grad-norm"
        )

    def prepare() -> None:
        final.parent.mkdir(parents=True, exist_ok=True)
        for leftover in final.parent.glob(".step_*"):  # of a process that was killed while it wrote or deleted
            shutil.rmtree(leftover)
        needed, free = _disk_space(out, state)
        if needed > free:
            raise OSError(errno.ENOSPC, "", temporary)
        temporary.mkdir()

    def finish() -> None:
        files = dict(sorted(chain.from_iterable(parts)))
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
            out, f"--out {out}: the checkpoint of step {step} needs {_disk_space(out, state)[0]} bytes", remedy()
        ):
            raise error

    try:
        run_on_rank0(prepare)
        numbers = _file_numbers(state)
        with _same_error_on_all_ranks():
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(temporary), numbers, save_distributed=True))
        mine = [(file.name, file_checksum(file)) for file in temporary.glob(f"shard-{dist.get_rank() + 1:05d}-*")]
        parts = gather(mine)
        run_on_rank0(finish)
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS + NOT_WRITABLE_ERRNOS:  # the same on all ranks
            run_on_rank0(partial(fail, error))
        raise
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _same_error_on_all_ranks() -> Iterator[None]:
    """Raise the OSError that some rank met on all of them; any other exception with the tracebacks of all ranks."""
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
    """torch's reader, but that it reads the headers of a checkpoint's files once, not again for every load."""

    def __init__(self, checkpoint: Path):
        super().__init__(str(checkpoint))
        broken = (SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError)
        with as_user_error(
            broken, f"{checkpoint}: its safetensors files are damaged or forged; use another checkpoint"
        ):
            self.metadata = super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self.metadata


def _load(state: dict[str, torch.Tensor], reader: _Reader) -> None:
    """Read a checkpoint's tensors into those of `state`."""
    with _same_error_on_all_ranks(), warnings.catch_warnings(action="ignore"):  # merge_lora.py has no process group
        dcp.load(state, storage_reader=reader)


def load_checkpoint(path: Path, models: CheckpointModels) -> dict:
    """Restore models and optimizers in place, on any number of ranks; returns what trainer.json holds: step, ..."""
    state = _state_dict(models)
    _load(state, _Reader(path))
    bad = find_nonfinite(state)
    need(
        not bad,
        f"--resume {path}: {bad} {NONFINITE_MESSAGE}; remove this checkpoint, and --resume auto takes the one before",
    )
    return read_trainer_state(path)


class TrainedWeights(FullParameters):
    """The weights of a model folder, hub id, run directory (its newest intact checkpoint), checkpoint or PEFT adapter.

    Iterate over it as over full_parameters of a sharded model. Each weight is read when its turn comes, in fp32, so a
    process holds one of them at a time. `hf` is the base model of `cfg` as `build` makes it, with adapters added;
    `hf.loaded_from` is the folder or hub id that was found.
    """

    def __init__(self, path: str, dtype: torch.dtype | None = None, build: Callable[..., nn.Module] = build_meta_model):
        base, found, args = resolve_model(path)
        found = newest_intact_checkpoint(Path(path)) if args else found
        self.cfg = build_config(ModelConfig, args | {"model": base})
        self.hf = build(base, paths=self.cfg.family_paths)
        self.hf.loaded_from = self.source = found or base
        if lora := self.cfg.lora(args.get("seed", 0)):
            add_lora(self.hf, lora)
        elif found and not args:
            read_adapter(self.hf, found, base)
        super().__init__(self, dtype=dtype)
        self.reader = _Reader(found) if args else None
        if adapters := {name: p.detach() for name, p in self.hf.named_parameters() if ".lora_" in name}:
            self._fill(adapters)
            self.reader, self.source = None, base  # the other weights are the base model's
        waiting = {name: list(p.shape) for name, p in self.chosen.items() if p.is_meta}
        self.stored = match_parameters(self.hf, base, waiting) if waiting and not self.reader else {}

    def _fill(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read tensors from the checkpoint, if there is one; raise UserError if they are not finite."""
        if self.reader:
            _load({f"model.hf.{name}": tensor for name, tensor in tensors.items()}, self.reader)
        bad = find_nonfinite(tensors)
        need(not bad, f"{self.source}: {bad} {NONFINITE_MESSAGE}: damaged, or of a training that diverged")

    def whole(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
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
