"""Checkpoints of a run: OUT/checkpoints/step_000100/{trainer.json, .metadata, *.distcp}, written, verified and read.

Weights and optimizer state are torch.distributed.checkpoint's files, one of each process. trainer.json is written last,
so a folder that has it is complete; it holds what the next step depends on, size and CRC-32 of every other file, and
its own. Only names of `step_` and digits count: `.step_*` is being written or deleted, `damaged_step_*` has been passed
over by --resume.
"""

import errno
import itertools
import json
import os
import pathlib
import pickle
import re
import shutil
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType

from errors import FULL, UserError, existing, free_bytes, writing
from layers.lora import add_lora, lora_layers, merge_lora, read_adapter
from model import ModelConfig, Policy, load_config, load_hf
from parallel.loading import BAD, find_bad
from parallel.sharding import reshard
from settings import read_settings
from utils import print0

T = TypeVar("T")
# "policy", and the other models that a checkpoint holds, each with its optimizer if it has one
Models = dict[str, tuple[Policy, torch.optim.Optimizer | None]]
OVERHEAD = 2048  # bytes on disk of each process's part of a tensor, on top of its values


def on_rank0(do: Callable[[], T]) -> T:
    """What rank 0 does to files, once: its result, or what went wrong with them, on all ranks."""
    done = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            done[0] = do()
        except (UserError, OSError) as error:
            done[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(done)
    if done[1] is not None:
        raise done[1]
    return done[0]


# ----------------------------------------------------------------------------------------------------------------------
# Which checkpoints there are


def step_of(checkpoint: Path) -> int | None:
    """By the folder's name, which nobody else's has: step_backup is none."""
    match = re.fullmatch(r"step_([0-9]+)", checkpoint.name)
    return int(match[1]) if match else None


def complete_checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    found = [path for path in (out / "checkpoints").glob("step_*") if step_of(path) is not None]
    complete = [path for path in found if (path / "trainer.json").is_file()]
    return sorted(complete, key=lambda path: (step_of(path), path.name))


def read_json(file: Path) -> dict:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: empty, cut short or damaged ({error})") from error
    if not isinstance(found, dict):
        raise UserError(f"{file}: damaged: it holds no JSON object")
    return found


def sealed(trainer: dict) -> str:
    """The text of trainer.json, with the checksum of the rest of it at its end."""
    return json.dumps(trainer | {"crc32": f"{zlib.crc32(json.dumps(trainer).encode()):08x}"}) + "\n"


def read_trainer(checkpoint: Path) -> dict:
    """What trainer.json holds; a UserError if that is not what was written."""
    file = checkpoint / "trainer.json"
    trainer = read_json(file)
    rest = {key: value for key, value in trainer.items() if key != "crc32"}
    if {"files", "crc32"} & trainer.keys() and file.read_text() != sealed(rest):
        raise UserError(f"{file}: damaged: its checksum is not the one it was written with")
    if not isinstance(trainer.get("step"), int) or step_of(checkpoint) not in (None, trainer["step"]):
        raise UserError(
            f"{file}: it is of step {trainer.get('step')}, but the folder's name says another; rename it back"
        )
    return rest


def run_args(checkpoint: Path) -> dict | None:
    """The arguments of a checkpoint's run; None where there is no run.json around it."""
    file = checkpoint.resolve().parent.parent / "run.json"
    if not file.is_file():
        return None
    remedy = "It holds the run's flags: remove it, and --resume goes on with those that are given"
    try:
        args = read_json(file).get("args")
    except UserError as error:
        raise UserError(f"{error}. {remedy}") from error
    if not isinstance(args, dict):
        raise UserError(f"{file}: damaged: it holds no args. {remedy}")
    if "freeze_vision" in args:
        raise UserError(
            f"{file}: of a run of an earlier version, whose settings had other names (--freeze-vision, for one); go on "
            f"with that version, or start a new run from what its merge_lora.py exports"
        )
    return args


def model_config(args: dict) -> ModelConfig:
    """The model of a run, by its settings as run.json has them."""
    return read_settings(ModelConfig, args)


def find_checkpoint(path: str) -> tuple[Path, dict] | None:
    """For a run directory or one of its checkpoints: (checkpoint, the run's arguments). None for anything else."""
    given = Path(path)
    if (given / "trainer.json").is_file():
        checkpoint = given
    elif (given / "run.json").is_file():
        complete = complete_checkpoints(given)
        if not complete:
            raise UserError(f"{path!r} is a run without a complete checkpoint; train past --save-every first")
        checkpoint = complete[-1]
    else:
        return None
    args = run_args(checkpoint)
    if args is None:
        raise UserError(
            f"{path!r} is a checkpoint without its run: no {checkpoint.resolve().parent.parent / 'run.json'}"
        )
    return checkpoint, args


# ----------------------------------------------------------------------------------------------------------------------
# Verifying


def checksum(file: Path) -> list:
    """[bytes, CRC-32] of a file: against bad disks and cut copies, as fast as it is read; no proof of who wrote it."""
    crc = size = 0
    with open(file, "rb") as f:
        while block := f.read(2**22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, f"{crc:08x}"]


def differs(file: Path, written: list) -> str | None:
    try:
        found = checksum(file)
    except OSError as error:
        return f"{file}: cannot be read ({error.strerror})"
    if found[0] != written[0]:
        return f"{file}: {found[0]} bytes, where {written[0]} were written"
    return None if found == written else f"{file}: damaged: its checksum is not the one it was written with"


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. Ranks share the reading, and all get the same answer."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        files = read_trainer(checkpoint).get("files")
        if files is None:
            print0(f"{checkpoint} was written without checksums, by an earlier version; it cannot be verified")
        mine = sorted(files or {})[rank::world]
        wrong = next(filter(None, (differs(checkpoint / name, files[name]) for name in mine)), None)
    except UserError as error:
        wrong = str(error)
    found = [wrong] * world
    if dist.is_initialized():
        dist.all_gather_object(found, wrong)
    return next(filter(None, found), None)


def intact(path: Path, set_aside: bool = False) -> Path | None:
    """The given checkpoint, verified; or a run directory's newest intact one, None if it has none. All ranks call it.

    Damaged ones that are newer are passed over, aloud; with `set_aside` they are also renamed, so that neither --keep
    nor a later start counts them."""
    found = on_rank0(lambda: [path] if (path / "trainer.json").is_file() else complete_checkpoints(path))
    wrong: dict[Path, str] = {}
    for checkpoint in reversed(found):
        reason = damage(checkpoint)
        if reason is None:
            break
        wrong[checkpoint] = reason
    if found and len(wrong) == len(found):
        raise UserError(
            f"{path}: no intact checkpoint: {'; '.join(wrong.values())}. Restore these files, or use another"
        )
    names = on_rank0(lambda: [put_aside(checkpoint).name for checkpoint in wrong]) if set_aside else []
    for i, reason in enumerate(wrong.values()):
        print0(f"passed over: {reason}" + (f". The folder is now called {names[i]}" if set_aside else ""))
    return checkpoint if found else None


def put_aside(checkpoint: Path) -> Path:
    names = (f"damaged_{checkpoint.name}" + (f"_{i}" if i > 1 else "") for i in itertools.count(1))
    target = next(path for path in map(checkpoint.with_name, names) if not path.exists())
    with writing(checkpoint, f"--resume: {checkpoint} is damaged"):
        return checkpoint.rename(target)


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def _state(models: Models) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, by reference: name -> tensor, the policy's names without a prefix. Of a model with
    adapters it is those alone; --model has the rest. The optimizer's settings follow from the flags."""
    found = {}
    for model_name, (model, optimizer) in models.items():
        prefix = "" if model_name == "policy" else f"{model_name}."
        adapted = bool(lora_layers(model))
        reshard(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or not adapted:
                found[f"{prefix}model.{name}"] = parameter.detach()
            states = optimizer.state.get(parameter, {}) if optimizer else {}
            found |= {f"{prefix}optimizer.state.{name}.{key}": tensor for key, tensor in states.items()}
    return found


def _find_bad(state: dict[str, torch.Tensor]) -> str | None:
    """The first weight that no forward survives, or optimizer state that is not finite; on all ranks."""
    of_optimizers = {name: tensor for name, tensor in state.items() if "optimizer" in name.split(".")[:2]}
    weights = {name: tensor for name, tensor in state.items() if name not in of_optimizers}
    return find_bad(weights) or find_bad(of_optimizers, torch.finfo(torch.float32).max)


class _Writer(FileSystemWriter):
    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # torch's zip writer, closing a file that could not be written, hides why
            hidden: BaseException | None = error
            while hidden is not None and not isinstance(hidden, OSError):
                hidden = hidden.__context__
            if hidden is None:
                raise
            raise hidden from None


def sync(path: Path) -> None:
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


def _remove_leftovers(folder: Path, step: int) -> None:
    """Of processes that were killed while they wrote, or (without a trainer.json) while they deleted."""
    for path in folder.glob("step_*"):
        number = step_of(path)
        if number is not None and number < step and path.is_dir() and not (path / "trainer.json").exists():
            print0(f"removing {path}: incomplete, it has no trainer.json")
            _discard(path)
    for path in folder.glob(".step_*"):
        shutil.rmtree(path)


def _bytes_of(state: dict[str, torch.Tensor]) -> int:
    """What it takes on disk, a little overestimated."""
    return sum(tensor.numel() * tensor.element_size() + OVERHEAD * dist.get_world_size() for tensor in state.values())


def _fits(needed: int, folder: Path) -> bool:
    disk = shutil.disk_usage(existing(folder))
    return needed <= disk.free or disk.total == 0  # 0: a file system that does not say


def check_room(out: Path, keep: int, models: Models) -> None:
    """Before the first step rather than at the first checkpoint: UserError if the disk cannot hold one more; a
    warning if it cannot hold `keep` and the one being written."""
    needed = _bytes_of(_state(models))
    free, missing = free_bytes(out), max(1, keep + 1 - len(complete_checkpoints(out)))
    if not _fits(needed, out):
        raise UserError(
            f"--out {out}: disk full: a checkpoint needs {needed} bytes, {free} are free; free some, or choose "
            f"another folder"
        )
    if free < needed * missing:
        print0(
            f"--out {out}: {free / 2**30:.3g} GiB are free; --keep {keep} checkpoints and the one being written need "
            f"{needed * missing / 2**30:.3g} more"
        )


def save_checkpoint(out: Path, step: int, models: Models, keep: int, position: dict | None = None) -> None:
    """Models, optimizers and position, sharded. Written under a temporary name and renamed when complete, so that a
    killed run never leaves half a checkpoint behind under a good name; then all but the newest `keep` are removed. What
    could not be continued from (a weight that is NaN) is not written, and nothing is removed for it.

    `position` is what else the next step depends on. Random state is not stored because there is none: every draw is
    seeded from (seed, purpose, step, ...).
    """
    final = out / "checkpoints" / f"step_{step:06d}"
    temporary, rank = final.with_name("." + final.name), dist.get_rank()
    state = _state(models)
    needed = _bytes_of(state)
    bad = _find_bad(state)
    if bad:
        good = on_rank0(lambda: complete_checkpoints(out))
        remedy = f"Continue from {good[-1]} with --resume auto" if good else "There is no earlier one: start again"
        raise UserError(
            f"--out {out}: after step {step} {bad} {BAD}; no checkpoint was written. {remedy}, with a lower --lr or "
            f"--max-grad-norm"
        )

    def disk_full() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        earlier = complete_checkpoints(out)
        older = f"{earlier[-1].name} is intact: go on with --resume auto" if earlier else "there is no earlier one"
        raise UserError(
            f"--out {out}: disk full: the checkpoint of step {step} needs {needed} bytes, "
            f"{free_bytes(final.parent)} are free. Free some; {older}"
        )

    def prepare() -> None:
        with writing(out, f"--out {out}"):
            final.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(final.parent, step)
            if not _fits(needed, final.parent):
                disk_full()
            temporary.mkdir()

    def finish() -> None:
        files[".metadata"] = checksum(temporary / ".metadata")
        trainer = {"step": step, "world": dist.get_world_size(), "parts": contents(models), **(position or {})}
        (temporary / "trainer.json").write_text(sealed(trainer | {"files": dict(sorted(files.items()))}))
        sync(temporary / "trainer.json")
        sync(temporary)
        if final.exists():
            _discard(final)
        os.rename(temporary, final)
        sync(final.parent)
        for old in complete_checkpoints(out)[:-keep]:
            if old != final:
                _discard(old)

    on_rank0(prepare)
    try:
        with _one_error():
            dcp.save(state, storage_writer=_Writer(temporary))
        everyone: list[dict] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, {file.name: checksum(file) for file in temporary.glob(f"__{rank}_*")})
        files = dict(itertools.chain.from_iterable(theirs.items() for theirs in everyone))
        on_rank0(finish)
    except OSError as error:
        if error.errno in FULL:  # the same on all ranks
            on_rank0(disk_full)
        with writing(out, f"--out {out}"):
            raise
    finally:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def contents(models: Models) -> list[str]:
    """What a checkpoint holds other than the policy itself, for --resume to compare."""
    policy, _ = models["policy"]
    ranks = {f"lora_rank_{layer.lora_A.shape[0]}" for layer in lora_layers(policy).values()}
    heads = {"value_head"} if hasattr(policy, "value_head") else set()
    return sorted((models.keys() - {"policy"}) | ranks | heads)


@contextmanager
def _one_error() -> Iterator[None]:
    """What some ranks met, the same on all of them; or, of what says nothing to a user, all with their tracebacks."""
    try:
        yield
    except CheckpointException as failure:
        told = [error for error, _ in failure.failures.values() if isinstance(error, UserError | OSError)]
        raise (told[0] if told else failure) from failure


# ----------------------------------------------------------------------------------------------------------------------
# Reading


# All that a checkpoint's .metadata may name: torch's records of tensors, and what they are made of. It is a pickle,
# which calls what it names: anything else could be any program.
TYPES = [value for value in vars(metadata).values() if isinstance(value, type)]
RECORDS = [cls for cls in TYPES if cls.__module__ == metadata.__name__] + [_StorageInfo, OrderedDict]
ALLOWED = {(cls.__module__, cls.__qualname__): cls for cls in RECORDS}
ALLOWED |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
ALLOWED |= {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): torch.serialization._get_layout}
for _module in ("pathlib", "pathlib._local"):
    ALLOWED |= dict.fromkeys([(_module, "PosixPath"), (_module, "WindowsPath")], pathlib.PurePath)


# What comes of bytes that flipped, or were forged
BROKEN = (pickle.PickleError, ValueError, TypeError, LookupError, AttributeError, EOFError, OverflowError, MemoryError)


class _Unpickler(pickle._Unpickler):
    """Python's own, because the one in C cannot be kept from giving new attributes to a class (opcode BUILD)."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        if type(self.stack[-2]) not in RECORDS:
            raise pickle.UnpicklingError(f"it changes {self.stack[-2]!r}, no record of a checkpoint")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, no part of a checkpoint: not run")
        return ALLOWED[module, name]


def read_metadata(checkpoint: Path) -> metadata.Metadata:
    """Which tensors a checkpoint holds, and where in its files."""
    file = checkpoint / ".metadata"
    try:
        with open(file, "rb") as f:
            found = _Unpickler(f).load()
        ends = [(info.relative_path, info.offset + info.length) for info in found.storage_data.values()]
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file; the checkpoint is not complete") from error
    except BROKEN as error:
        raise UserError(
            f"{file}: {error} ({type(error).__name__}): forged or damaged; do not use this checkpoint"
        ) from error
    for name, end in ends:
        if Path(name).name != name:
            raise UserError(f"{file}: it names {name!r}, outside the checkpoint: forged; do not use it")
        if not (checkpoint / name).is_file() or (checkpoint / name).stat().st_size < end:
            raise UserError(f"{checkpoint / name}: missing or cut short; restore it, or use another checkpoint")
    return found


class _Reader(FileSystemReader):
    """torch's read_metadata is pickle.load, and what is no tensor it reads with torch.load(weights_only=False)."""

    def __init__(self, checkpoint: Path):
        super().__init__(checkpoint)
        self.metadata, self.reading = read_metadata(checkpoint), checkpoint

    def read_metadata(self) -> metadata.Metadata:
        return self.metadata

    def _slice_file(self, file, info):
        self.reading = self.path / info.relative_path
        return super()._slice_file(file, info)

    def read_data(self, plan, planner):
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise UserError(
                    f"{self.path / '.metadata'}: {item.dest_index.fqn} is no tensor there, but an object that "
                    f"runs what it likes when read: forged; do not use this checkpoint"
                )
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:  # of torch.load(weights_only=True)
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise UserError(
                f"{self.reading}: it names {named[1] if named else '?'}, no part of a tensor: not run; forged or "
                f"damaged; do not use this checkpoint"
            ) from error


def _load(state: dict[str, torch.Tensor], checkpoint: Path, **options) -> None:
    """Into the tensors themselves."""
    with _one_error():
        dcp.load(state, storage_reader=_Reader(checkpoint), **options)


def load_checkpoint(path: Path, models: Models) -> dict:
    """Restore models and optimizers in place, on any number of ranks; returns what trainer.json holds: step, ..."""
    state = _state(models)
    _load(state, path)
    bad = _find_bad(state)
    if bad:
        raise UserError(
            f"--resume {path}: {bad} {BAD}; remove this checkpoint, and --resume auto takes the one before it"
        )
    return read_trainer(path)


def locate(path: str) -> tuple[str, Path | None, dict]:
    """(base model, checkpoint or PEFT adapter or None, the run's arguments) of a model folder, hub id, run directory,
    checkpoint or adapter folder."""
    if (Path(path) / "adapter_config.json").is_file():
        base = read_json(Path(path) / "adapter_config.json").get("base_model_name_or_path") or ""
        load_config(base)
        return base, Path(path), {}
    checkpoint, args = find_checkpoint(path) or (None, {})
    base = args.get("model", path)
    load_config(base, model_config(args | {"model": base}).family_paths)
    return base, checkpoint, args


def load_trained(path: str, dtype: torch.dtype = torch.float32, merge: bool = True) -> nn.Module:
    """The Hugging Face model of a model folder, hub id, run directory, checkpoint or PEFT adapter, its adapters
    merged or not. Of a run directory it is the newest intact checkpoint's; `loaded_from` says which."""
    base, found, args = locate(path)
    found = intact(Path(path)) if found and args else found
    cfg = model_config(args | {"model": base})
    hf = load_hf(base, torch.float32 if found else dtype, cfg.family_paths)
    lora = cfg.lora(args.get("seed", 0))
    if found and not args:
        read_adapter(hf, found, base)
    elif found:
        if lora:
            add_lora(hf, lora)
        state = {f"model.hf.{name}": p.detach() for name, p in hf.named_parameters() if not lora or ".lora_" in name}
        with warnings.catch_warnings():  # that there is no process group is the intent
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            _load(state, found, no_dist=True)
    hf.loaded_from = found or base
    bad = find_bad(dict(hf.named_parameters()))
    if bad:
        adapted = ".lora_" in bad or not lora_layers(hf)  # else the base's own
        raise UserError(f"{found if found and adapted else base}: {bad} {BAD}: damaged, or of a training that diverged")
    return (merge_lora(hf) if merge else hf).to(dtype)
