"""Where a run starts, and what it saves: which checkpoint, which settings, and what is said on the way."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, dataclass
from glob import glob
from pathlib import Path
from typing import Any

from errors import check_writable, nearest_path, need, plug_in
from parallel import checkpoint
from parallel.checkpoint import list_checkpoints, newest_intact_checkpoint, read_run_args, run_on_rank0
from report.files import read_rows
from report.summary import best_evaluation
from rewards.functions import absolute_files
from settings import REQUIRED, flag_field, flag_name, load_run_settings, never

# A checkpoint does not fit a run where these differ: its weights, or its position in the data (counted in batches)
FIXED = ("model", "train_vision", "lora_targets", "prompts_per_step")


@dataclass(frozen=True)
class RunConfig:
    """Run"""

    steps: int = flag_field(REQUIRED, "training steps in all; a resumed run counts its earlier ones", least=1)
    out: str = flag_field(REQUIRED, "run directory for checkpoints, metrics, rollouts and the report", from_run=never)
    resume: str = flag_field(
        "no",
        "no; auto (newest intact checkpoint in --out, if any); or a run or checkpoint. Flags "
        "not passed keep that run's values; those that name code, servers or secrets must be passed "
        "again: docs/data.md",
    )
    eval_every: int = flag_field(0, "steps between evaluations; 0: only before the first and after the last", least=0)
    save_every: int = flag_field(50, "steps between checkpoints; the last step is always saved", least=1)
    keep: int = flag_field(2, "number of newest checkpoints to keep", least=1)
    keep_best: bool = flag_field(False, "also keep the checkpoint with the best evaluation, saved right after it")
    report_to: tuple[str, ...] = flag_field((), "log metrics and sample tables also to tensorboard, wandb, or both",
                                     metavar="TRACKER", from_run=lambda name: name == "tensorboard")  # wandb: a server
    self_test: bool = flag_field(True, "before the first step, check that engine and trainer agree on real prompts")
    grace_seconds: float = flag_field(60.0, "seconds to save a checkpoint and exit after SIGTERM, Ctrl-C, ...", above=0)
    timeout_minutes: float = flag_field(
        30.0, "stop, and name the rank, if the other ranks wait for it longer than this", above=0
    )
    seed: int = flag_field(0, "random seed of data order, sampling and LoRA initialisation")

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def check(self, eval_data: str | None) -> None:
        need(not self.eval_every or eval_data, f"--eval-every {self.eval_every} needs --eval-data")
        need(not self.folder.is_file(), f"--out {self.out} is a file; give a directory")
        need(not self.keep_best or eval_data, "--keep-best needs --eval-data, and with it --eval-every")
        check_writable(self.folder, "--out")
        if self.report_to:
            plug_in("report.page.trackers", "--report-to").check_trackers(self.report_to)

    @property
    def origin(self) -> str:
        """Return where the settings that were not given come from."""
        if self.resume == "no" or (self.resume == "auto" and not (self.folder / "checkpoints").exists()):
            return "the default"
        return "from the run that is resumed"


def load_resumed_settings(known: Iterable[Field], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the run that --resume continues, by their flags' names; none where there is nothing to
    resume."""
    resume, out = given.get("resume", "no"), given.get("out")
    if resume == "no":
        return {}
    path = Path(resume if resume != "auto" else out or ".")
    checkpoints = list_checkpoints(path)
    if checkpoints or (resume == "auto" and (path / "run.json").is_file()):  # or it ended before its first checkpoint
        run = read_run_args(checkpoints[-1] if checkpoints else path / "checkpoints" / "none")
        return load_run_settings(known, run, given, path)
    need(resume == "auto", f"--resume {resume}: expected no, auto, a complete checkpoint or a run that has one"
         + nearest_path(path))
    missing = " ".join(flag_name(name) for name in ("model", "data", "out", "steps") if name not in given)
    need(not missing, f"--resume auto: there is no checkpoint in --out {out}, and a new run needs {missing}")
    return {}


def absolute_path(path: str | None) -> str | None:
    """Of what is there, also in a comma list or by a glob; anything else (a hub id) stays as it is."""
    parts = (path or "").split(",")
    found = [str(Path(part).absolute()) if Path(part).exists() or glob(part) else part for part in parts]
    return ",".join(found) if path else path


def absolute_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that name files, as absolute paths: a run is continued and evaluated from any directory."""
    paths = ("model", "data", "eval_data", "image_root", "curriculum")
    return {name: absolute_path(settings[name]) for name in paths} | absolute_files(settings)


def contains_run(out: Path) -> bool:
    """Is there anything that a new run would destroy? One that ended before its first step leaves nothing."""
    return bool(list_checkpoints(out)) or any(row["step"] > 0 for row in read_rows(out / "metrics.jsonl"))


def find_resume_checkpoint(out: Path, resume: str, settings: Mapping[str, Any], parts: list[str]) -> Path | None:
    """The checkpoint to continue from, if any. `parts` is what it must hold besides the policy's weights."""
    newest = run_on_rank0(lambda: (list_checkpoints(out) or [None])[-1])
    if resume == "no":
        need(not run_on_rank0(lambda: contains_run(out)),
             f"--out {out} already holds a run; continue it with --resume auto, or choose another directory")
        return None
    given = (
        None if resume == "auto" or Path(resume).resolve() == out.resolve() else newest_intact_checkpoint(Path(resume))
    )
    if given is None or newest is None or newest.resolve() != given.resolve():
        newest = newest_intact_checkpoint(out, set_aside=True)
    start = given or newest
    if start is None:
        return None
    fixed = (*FIXED, *(["lora_alpha"] if settings["lora_rank"] else []))
    for name, (was, now) in diff_settings(read_run_args(start), settings).items():
        need(name not in fixed, f"--resume {start}: the checkpoint does not fit: {flag_name(name)} was {was} and is "
             f"{now}; keep it, or start from what merge_lora.py exports")
    held = checkpoint.read_trainer_state(start).get("parts", [])
    need(held == parts,
         f"--resume {start}: it holds {', '.join(held) or 'the policy alone'}; asked for is "
         f"{', '.join(parts) or 'the policy alone'}; keep --adv, --lora-rank, --train-vision and the --algo-args "
         "critic and ref_every")
    need(newest is None or newest.resolve() == start.resolve(),
         f"--resume {resume} is not the newest checkpoint of --out {out}: two histories must not mix; use {newest}")
    return start


def diff_settings(before: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, tuple]:
    """Settings that are not those of a run.json: what they were and are, as JSON has them."""
    now = json.loads(json.dumps(dict(settings)))
    return {name: (before[name], value) for name, value in now.items() if before.get(name, value) != value}


def format_setting_changes(out: Path, settings: Mapping[str, Any]) -> list[str]:
    """What differs from the settings that the run in --out was last started with."""
    file = out / "run.json"
    before = checkpoint.read_json(file).get("args", {}) if file.is_file() else {}
    changed = diff_settings(before | {"resume": settings["resume"]}, settings)
    return [f"{flag_name(name)} {was} -> {now}" for name, (was, now) in changed.items()]


class CheckpointSaver:
    """Checkpoints of the last whole step, also where a later one has begun."""

    def __init__(self, cfg: RunConfig, models: Any, start: Path | None, state: Any):
        self.out = cfg.folder
        self.cfg = cfg
        self.models = models
        self.start = start  # the checkpoint that the run continues from
        self.saved = state.step
        self.state = state  # of the last whole step
        checkpoint.check_disk_space(self.out, cfg.keep + cfg.keep_best, models.checkpointed)

    def reached(self, state: Any) -> Any:
        """Take over the state after a whole step, which a checkpoint from now on holds, and return it."""
        self.state = state
        return state

    def save(self) -> Path | None:
        """A checkpoint, unless there is one; the newest."""
        if self.state.step > self.saved:
            position = {"parts": self.models.checkpoint_parts} | asdict(self.state)
            best = self.best_eval_step() if self.cfg.keep_best else None
            checkpoint.save_checkpoint(
                self.out, self.state.step, self.models.checkpointed, self.cfg.keep, position, best
            )
            self.saved = self.state.step
        return (list_checkpoints(self.out) or [self.start])[-1]

    def best_eval_step(self) -> int | None:
        """Of the best evaluation so far, on all ranks. metrics.jsonl says so, and a run that goes on has it up to its
        checkpoint, so that it keeps what one that was not cut off would keep."""
        return run_on_rank0(lambda: best_evaluation(read_rows(self.out / "metrics.jsonl")).get("step"))

    def save_if_due(self) -> None:
        """Where a checkpoint is due. Of a step's evaluation the row is written by now."""
        step, every = self.state.step, self.cfg.eval_every
        due = step % self.cfg.save_every == 0 or step == self.cfg.steps
        if due or (self.cfg.keep_best and every and step % every == 0 and self.best_eval_step() == step):
            self.save()

    def save_and_describe(self) -> str:
        """What is said when the run was asked to end."""
        newest = self.save()
        if newest is None:
            return "no step was finished, so there is nothing to save"
        if newest == self.start:
            return f"no step was finished since {newest}; the same command goes on from it"
        done = f"stopped after step {self.state.step} of {self.cfg.steps}, saved in {newest}"
        return f"{done}; the same command with --resume auto goes on"
