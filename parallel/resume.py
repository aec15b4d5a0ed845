"""Where a run starts, and what it saves: which checkpoint, which settings, and what is said on the way."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from errors import UserError, need
from parallel.checkpoint import (
    check_room,
    complete_checkpoints,
    intact,
    on_rank0,
    read_trainer,
    run_args,
    save_checkpoint,
)
from report.log import read_rows
from settings import flag_of

# Other weights would be trained: a checkpoint does not fit a run where these differ
OF_THE_WEIGHTS = ("train_vision", "lora_targets")
OF_ADAPTERS = ("model", "lora_alpha")


def resumed_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the run that --resume continues, by their flags' names; none where there is nothing to resume."""
    resume, out = given.get("resume", "no"), given.get("out")
    if resume == "no":
        return {}
    path = Path(resume if resume != "auto" else out or ".")
    checkpoints = [path] if (path / "trainer.json").is_file() else complete_checkpoints(path)
    if checkpoints:
        before = run_args(checkpoints[-1]) or {}
        return {name: value for name, value in before.items() if name != "resume"}
    need(resume == "auto", f"--resume {resume}: neither 'no' nor 'auto' nor a complete checkpoint (with trainer.json) "
         "nor a run that has one")
    absent = [name for name in ("model", "data", "out", "steps") if name not in given]
    need(not absent, f"--resume auto: --out {out} has no checkpoint to go on from, and a new run needs --{absent[0]}")
    return {}


def holds_run(out: Path) -> bool:
    """Is there anything that a new run would destroy? One that ended before its first step leaves nothing."""
    return bool(complete_checkpoints(out)) or any(row["step"] > 0 for row in read_rows(out / "metrics.jsonl"))


def find_start(out: Path, resume: str, settings: Mapping[str, Any], parts: list[str]) -> Path | None:
    """The checkpoint to continue from, if any. `parts` is what it must hold besides the policy's weights."""
    newest = on_rank0(lambda: (complete_checkpoints(out) or [None])[-1])
    if resume == "no":
        if on_rank0(lambda: holds_run(out)):
            held = f" (newest checkpoint {newest.name})" if newest else ""
            raise UserError(f"--out {out} already holds a run{held}; continue it with --resume auto, or choose another "
                            "directory")
        return None
    given = None if resume == "auto" or Path(resume).resolve() == out.resolve() else intact(Path(resume))
    if given is None or newest is None or newest.resolve() != given.resolve():
        newest = intact(out, set_aside=True)
    given = given or newest
    if given is None:
        return None
    held = read_trainer(given).get("parts", [])
    if held != parts:
        shown = ("adv", "critic", "ref_every", "lora_rank")
        flags = ", ".join(f"{flag_of(name)} {settings[name]}" for name in shown)
        raise UserError(f"--resume {given}: it holds {held or 'the policy alone'}, but {flags} need "
                        f"{parts or 'the policy alone'}; keep the run's settings, or start a new one")
    before = run_args(given) or {}
    for name in OF_THE_WEIGHTS + (OF_ADAPTERS if settings["lora_rank"] else ()):
        if name in before and before[name] not in (settings[name], list(settings[name])):
            raise UserError(f"--resume {given}: other weights were trained there: {flag_of(name)} was {before[name]} "
                            f"and is {settings[name]}; keep it, or start a new run from what merge_lora.py exports")
    if newest is not None and newest.resolve() != given.resolve():
        raise UserError(f"--resume {resume} is not the newest checkpoint of --out {out}, which is {newest.name}; two "
                        f"histories must not mix: choose another --out, or delete the later checkpoints")
    return given


def changed_settings(out: Path, settings: Mapping[str, Any]) -> list[str]:
    """What differs from the settings that the run in --out was last started with."""
    file = out / "run.json"
    before = json.loads(file.read_text())["args"] if file.is_file() else {}
    now = json.loads(json.dumps(dict(settings)))  # as JSON has them
    changed = [name for name, value in now.items() if name != "resume" and name in before and before[name] != value]
    return [f"{flag_of(name)} {before[name]} -> {now[name]}" for name in changed]


class Saver:
    """Checkpoints of the last whole step, also where a later one has begun."""

    def __init__(self, cfg: Any, models: Any, start: Path | None, state: Any):
        self.out = Path(cfg.out)
        self.cfg = cfg
        self.models = models
        self.start = start  # the checkpoint that the run continues from
        self.begun_at = state.step
        self.saved = state.step
        self.state = state  # of the last whole step
        check_room(self.out, cfg.keep, models.saved)

    def save(self) -> Path | None:
        """A checkpoint, unless there is one; the newest."""
        if self.state.step > self.saved:
            position = asdict(self.state)
            save_checkpoint(self.out, position.pop("step"), self.models.saved, self.cfg.keep, position)
            self.saved = self.state.step
        return (complete_checkpoints(self.out) or [self.start])[-1]

    def after_step(self) -> None:
        if self.state.step % self.cfg.save_every == 0 or self.state.step == self.cfg.steps:
            self.save()

    def save_and_tell(self) -> str:
        """What is said when the run was asked to end."""
        step = self.state.step
        if not step:
            return "no step was finished, so there is nothing to save"
        if step == self.begun_at and not complete_checkpoints(self.out):  # --resume of another run
            return f"no step was finished since {self.start}; the same command goes on from it"
        newest = self.save()
        how = "the same command with --resume auto goes on"
        return f"stopped after step {step} of {self.cfg.steps}, saved in {newest}; {how}"
