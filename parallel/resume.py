"""Starting and saving a run: the checkpoint and settings that it continues from, and when it saves checkpoints."""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass
from glob import glob
from pathlib import Path
from typing import Any

from errors import check_writable, nearest_path, need, plug_in
from parallel import checkpoint
from parallel.checkpoint import list_checkpoints, newest_intact_checkpoint, read_run_args, run_on_rank0
from report.run_files import read_rows
from report.summary import best_evaluation
from rewards.functions import absolute_files
from settings import REQUIRED, flag_field, flag_name, load_run_settings, never

# Settings that a resumed run must keep: the weights or the position in the data (counted in batches) depend on them
FIXED = ("model", "train_vision", "lora_targets", "prompts_per_step", "seed")


@dataclass(frozen=True)
class RunConfig:
    """Run"""

    steps: int = flag_field(REQUIRED, "total training steps, including those before a resume", least=1)
    out: str = flag_field(REQUIRED, "run directory for checkpoints, metrics, rollouts and the report", from_run=never)
    resume: str = flag_field(
        "no",
        "no, auto (newest intact checkpoint in --out, if any), or the path of a run or checkpoint. Flags "
        "not passed keep that run's values; those that name code, servers or secrets must be passed again: docs/data.md"
    )
    eval_every: int = flag_field(
        0, "steps between evaluations; 0: only before the first step and after the last one", least=0
    )
    eval_ablate: tuple[str, ...] = flag_field(
        (), "in every second evaluation, the first and the last, also evaluate with blank (white) images, shuffled "
        "images (those of other examples) or none (no images), and warn if the policy learns to answer without the "
        "image", choices=("blank", "shuffled", "none")
    )
    save_every: int = flag_field(50, "steps between checkpoints; the last step is always saved", least=1)
    keep: int = flag_field(2, "number of newest checkpoints to keep", least=1)
    keep_best: bool = flag_field(
        False, "also keep the best checkpoint by evaluation score, saved right after that evaluation"
    )
    report_to: tuple[str, ...] = flag_field((), "also log metrics and sample tables to tensorboard, wandb, or both",
                                        metavar="TRACKER", from_run=lambda name: name == "tensorboard")  # not wandb
    self_test: bool = flag_field(True, "before the first step, check that engine and trainer agree on real prompts")
    grace_seconds: float = flag_field(
        60.0, "after SIGTERM, Ctrl-C, ...: time limit to finish the current phase, save and exit, in seconds", above=0
    )
    timeout_minutes: float = flag_field(
        30.0, "end the run if one rank keeps the others waiting longer than this; the error names that rank", above=0
    )
    seed: int = flag_field(0, "random seed for data order, sampling and LoRA initialisation")
    config: str | None = flag_field(None, "settings as a TOML file or a run's run.json; flags override it",
                                    metavar="FILE")

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def check(self, eval_data: str | None) -> None:
        need(not self.eval_every or eval_data, f"--eval-every {self.eval_every} needs --eval-data")
        need(not self.eval_ablate or eval_data, "--eval-ablate needs --eval-data")
        need(not self.folder.is_file(), f"--out {self.out} is a file; give a directory")
        need(not self.keep_best or eval_data, "--keep-best needs --eval-data, and with it --eval-every")
        check_writable(self.folder, f"--out {self.out}")
        if self.report_to:
            plug_in("report.page.trackers", "--report-to").check_trackers(self.report_to)

    def ablations_at(self, step: int) -> tuple[str, ...]:
        """Return the ablations of the evaluation after this step."""
        due = not self.eval_every or step % (2 * self.eval_every) == 0 or step == self.steps
        return self.eval_ablate if due else ()

    @property
    def origin(self) -> str:
        """Return where the settings that were not passed as flags come from."""
        if self.config:
            return f"from --config {self.config}, or the default"
        if self.resume == "no" or (self.resume == "auto" and not (self.folder / "checkpoints").exists()):
            return "the default"
        return "from the run that is resumed"


def load_resumed_settings(settings: Iterable[Field], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the run that --resume continues, by flag name, or {} if there is nothing to resume. `args`
    are the flags that were passed."""
    resume, out = args.get("resume", "no"), args.get("out")
    if resume == "no":
        return {}
    path = Path(resume if resume != "auto" else out or ".")
    checkpoints = list_checkpoints(path)
    if checkpoints or (resume == "auto" and (path / "run.json").is_file()):  # it may have no checkpoint yet
        run = read_run_args(checkpoints[-1] if checkpoints else path / "checkpoints" / "none")
        return load_run_settings(settings, run, args, path)
    need(resume == "auto", f"--resume {resume}: {'' if path.exists() else 'there is no such folder; '}expected no, "
         f"auto, a complete checkpoint or a run that has one{nearest_path(path)}")
    missing = " ".join(flag_name(name) for name in ("model", "data", "out", "steps") if name not in args)
    need(not missing, f"--resume auto: there is no checkpoint in --out {out}, and a new run needs {missing}")
    return {}


def absolute_path(path: str | None) -> str | None:
    """Make existing paths absolute, without "..", also in a comma list or as a glob. Return anything else (a hub id)
    unchanged. Symlinks are kept, except those before "..": the parent of `link/..` is not that of the link."""

    def make_absolute(part: str) -> str:
        file = Path(part)
        if not (file.exists() or glob(part)):
            return part
        return str(file.parent.resolve() / file.name if ".." in file.parts else file.absolute())

    return ",".join(map(make_absolute, path.split(","))) if path else path


def absolute_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that name files, as absolute paths: a run can be resumed and evaluated from any directory."""
    paths = {"model", "data", "eval_data", "image_root", "curriculum", "teacher"} & settings.keys()
    return {name: absolute_path(settings[name]) for name in paths} | absolute_files(settings)


def contains_run(out: Path) -> bool:
    """Return whether `out` holds a run that a new one would destroy: one with a checkpoint or at least one step."""
    return bool(list_checkpoints(out)) or any(row["step"] > 0 for row in read_rows(out / "metrics.jsonl"))


def describe_data(examples: Sequence[Any]) -> str:
    """Return the number of rows and a checksum of their uids and truths in order, on which a position in the data
    depends. Uids alone do not tell: those of rows without an index are their numbers."""
    rows = [(e.uid, e.ground_truth) for e in examples]
    return f"{len(rows)} rows, checksum {zlib.crc32(str(rows).encode()):08x}"


def find_resume_checkpoint(out: Path, resume: str, settings: Mapping[str, Any], parts: list[str],
                           data: str) -> Path | None:
    """Return the checkpoint to continue from, or None for a new run. Raise UserError if it does not fit `settings` or
    the `data` (describe_data), does not hold exactly `parts` besides the policy's weights, or is not the newest one in
    an `out` that has any; or if `out` holds a run although `resume` is "no"."""
    newest = run_on_rank0(lambda: (list_checkpoints(out) or [None])[-1])
    if resume == "no":
        need(not run_on_rank0(lambda: contains_run(out)),
             f"--out {out} already holds a run; continue it with --resume auto, or choose another directory")
        return None
    requested = (
        None if resume == "auto" or Path(resume).resolve() == out.resolve() else newest_intact_checkpoint(Path(resume))
    )
    if requested is None or newest is None or newest.resolve() != requested.resolve():
        newest = newest_intact_checkpoint(out, set_aside=True)
    start = requested or newest
    if start is None:
        return None
    fixed = (*FIXED, *(["lora_alpha"] if settings["lora_rank"] else []))
    for name, (old, new) in diff_settings(read_run_args(start), settings).items():
        need(name not in fixed, f"--resume {start}: the checkpoint does not fit: {flag_name(name)} was {old} and is "
             f"{new}; keep it, or start a new run from an export of merge_lora.py")
    state = checkpoint.read_trainer_state(start)
    need(state["step"] <= settings["steps"], f"--steps {settings['steps']}: {start} has already done {state['step']}; "
         "--steps counts all steps of a run, so raise it")
    held = state.get("parts", [])
    need(held == parts,
         f"--resume {start}: it holds {', '.join(held) or 'the policy alone'}, but this run needs "
         f"{', '.join(parts) or 'the policy alone'}; keep --adv, --lora-rank, --train-vision and the --algo-args "
         "critic and ref_every")
    old = state.get("data", data)
    need(old == data, f"--resume {start}: --data had {old}, but now has {data}, so the run would repeat some rows and "
         "skip others; restore the data, or start a new run from an export of merge_lora.py")
    checkpoint.check_base(start, settings["model"])
    need(newest is None or newest.resolve() == start.resolve(),
         f"--resume {resume} is not the newest checkpoint in --out {out}, and a run directory holds one history; "
         f"resume {newest}, or choose another --out")
    return start


def diff_settings(old: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, tuple]:
    """Return the settings that differ from those of a run.json, `old`: name -> (old value, new value), as in JSON.
    Different paths to the same files are equal."""
    new = json.loads(json.dumps(dict(settings)))
    changed = {name: (old[name], value) for name, value in new.items() if old.get(name, value) != value}
    return {name: values for name, values in changed.items() if resolve_files(values[0]) != resolve_files(values[1])}


def resolve_files(value: Any) -> Any:
    """Return the files that a path, a glob or a comma-separated list of these names, or `value` if one is missing."""
    parts = value.split(",") if isinstance(value, str) else ()
    files = [sorted(Path(file).resolve() for file in glob(part)) for part in parts]
    return files if files and all(files) else (value,)


def format_setting_changes(out: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that have changed since the run in --out was last started, as text."""
    file = out / "run.json"
    last = checkpoint.read_json(file).get("args", {}) if file.is_file() else {}
    changes = diff_settings(last | {name: settings[name] for name in ("resume", "config")}, settings)
    return [f"{flag_name(name)} {old} -> {new}" for name, (old, new) in changes.items()]


class CheckpointSaver:
    """Saves checkpoints of the last whole step, even if the next step has already begun."""

    def __init__(self, cfg: RunConfig, models: Any, start: Path | None, state: Any, data: str):
        self.out = cfg.folder
        self.cfg = cfg
        self.models = models
        self.data = data  # of describe_data
        self.start = start  # the checkpoint that the run continues from
        self.saved = state.step  # the step of the last checkpoint
        self.state = state  # after the last whole step
        checkpoint.check_disk_space(self.out, cfg.keep + cfg.keep_best, models.checkpointed)

    def set_state(self, state: Any) -> Any:
        """Remember the state after a whole step, which the next checkpoint will hold, and return it."""
        self.state = state
        return state

    def save(self) -> Path | None:
        """Save a checkpoint of the last whole step unless there is one. Return the newest checkpoint, if any."""
        if self.state.step > self.saved:
            position = {"parts": self.models.checkpoint_parts, "base": self.models.base, "data": self.data}
            position |= asdict(self.state)
            best = self.best_eval_step() if self.cfg.keep_best else None
            checkpoint.save_checkpoint(
                self.out, self.state.step, self.models.checkpointed, self.cfg.keep, position, best
            )
            self.saved = self.state.step
        return (list_checkpoints(self.out) or [self.start])[-1]

    def best_eval_step(self) -> int | None:
        """Return the step of the best evaluation so far, on all ranks. It is read from metrics.jsonl, which a resumed
        run has up to its checkpoint, so that it keeps the same checkpoints as an uninterrupted run."""
        return run_on_rank0(lambda: best_evaluation(read_rows(self.out / "metrics.jsonl")).get("step"))

    def save_if_due(self) -> None:
        """Save a checkpoint if one is due. The row of the step's evaluation must have been written before."""
        step, every = self.state.step, self.cfg.eval_every
        due = step % self.cfg.save_every == 0 or step == self.cfg.steps
        if due or (self.cfg.keep_best and every and step % every == 0 and self.best_eval_step() == step):
            self.save()

    def save_and_describe(self) -> str:
        """Save a checkpoint because the run was asked to end, and return the message to print."""
        newest = self.save()
        if newest is None:
            return "no step was finished, so there is nothing to save"
        if newest == self.start:
            return f"no step was finished since {newest}; the same command continues from it"
        done = f"stopped after step {self.state.step} of {self.cfg.steps}, saved in {newest}"
        return f"{done}; the same command with --resume auto continues the run"
