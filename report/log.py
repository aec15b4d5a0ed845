"""The log of a run: run.json, metrics.jsonl, report.html, curves.png and more in the run directory, one line per step
and warnings on the terminal, and trackers."""

import importlib.util
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from errors import UserError, plug_in, printable, report_write_errors
from grpo import ADVANTAGES
from prepare_data import Example
from report.gpus import peak_flops
from report.records import select_records
from report.run_files import json_line, read_rows, write_records, write_rows, write_text
from report.run_warnings import RunWarnings
from report.samples import format_sample_lines, gather_samples
from report.summary import run_summary
from report.terminal import (
    Column,
    evaluation_bars,
    header_line,
    legend,
    step_line,
    throughput_metrics,
    visible_columns,
)
from report.writer import ReportPage, Writer, find_drawing
from rollout import ResetFn
from settings import REQUIRED, format_setting, may_come_from_folder
from utils import DistContext, Meter, print0

HEADER_EVERY = 20  # steps between header lines of the step table
LOG_SAMPLES_EVERY = 10  # steps between printed and stored rollouts
REDRAW_SECONDS = 60.0  # between redraws of report.html and curves.png, except at evaluations
WAIT_PER_REDRAW = 20  # min wait between redraws, as a multiple of the time that the last one took
MAX_SKIPPED = 10  # skipped updates in a row after which the run stops


def run_git(command: str) -> str:
    """Return the output of a git command in the code's folder; "" if that is not a repository or git is missing."""
    folder = Path(__file__).parent
    return subprocess.run(f"git {command}", shell=True, cwd=folder, capture_output=True, text=True).stdout.strip()


def describe_run(cfg: Any, ctx: DistContext) -> dict:
    """Return the contents of run.json: what is needed to repeat the run."""
    cpu = f"{platform.machine()}, {os.cpu_count()} cores"
    return {
        "command": hide_secrets(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "args": cfg.to_flags(),
        "changed_settings": changed_settings(cfg),
        "git": (run_git("rev-parse HEAD") or "unknown") + ("-dirty" if run_git("status --porcelain -uno") else ""),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers)} | {"python": platform.python_version()},
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "world": ctx.world,
    }


def hide_secrets(text: str) -> str:
    """Return a command line without the values of KEY=VALUE arguments whose key ends as a secret's does."""
    return re.sub(r"(\w*(?:key|token|secret|password)=)\S+", r"\1...", text, flags=re.IGNORECASE)


def changed_settings(cfg: Any) -> list[str]:
    """Return the settings that differ from their defaults, those set by --algo too, as typed on a command line.
    Settings without a default, such as --model, and those whose default is `auto` are left out."""
    settings = [(f, getattr(section, f.name)) for section in vars(cfg).values() for f in fields(section)]
    return [hide_secrets(format_setting(f, value)) for f, value in settings
            if value != f.default and f.default not in (REQUIRED, "auto") and f.name != "config"]  # fmt: skip


class RunLog:
    """Writes run.json, metrics.jsonl, samples, curves and the report, and logs to trackers and the terminal. Only rank
    0 writes."""

    def __init__(self, cfg: Any, ctx: DistContext, checkpoint: Path | None, start: int):
        self.out = Path(cfg.run.out)
        self.path = self.out / "metrics.jsonl"
        self.title = "/".join(self.out.absolute().parts[-2:])
        self.cfg = cfg
        self.ctx = ctx
        self.checkpoint = checkpoint  # the checkpoint from which the run resumes, saved after step `start`
        self.start = start
        self.page_content: ReportPage | None = None
        self.outdated = True  # are there rows that report.html and curves.png do not show yet?
        self.drawn_at, self.draw_seconds = -math.inf, 0.0  # when they were last drawn, and how long it took
        self.columns: list[Column] = []  # of the printed header
        self.writer = Writer()
        self.report_seconds = 0.0  # spent on reports by this process since the last row
        if not ctx.is_main:
            return
        self.run_info = describe_run(cfg, ctx)
        if start == 0:
            self._write_run_json()
        # An interrupted run may have logged steps after its newest checkpoint; these steps are repeated.
        rows = [row for row in read_rows(self.path) if start and row["step"] <= start]
        write_rows(self.path, rows)
        (self.out / "summary.json").unlink(missing_ok=True)  # it describes the run before the resume
        self.warnings = RunWarnings(self.out, ADVANTAGES[cfg.algo.adv].grouped)
        for row in rows:
            self.warnings.update(row)
        self.page = find_drawing("page")
        if self.page and not importlib.util.find_spec("matplotlib"):
            tqdm.write("matplotlib is not installed, so curves.png is not drawn; pip install matplotlib")
        self.trackers = None
        if cfg.run.report_to:
            trackers = plug_in("report.page.trackers", "--report-to")
            self.trackers = trackers.Trackers(cfg.run.report_to, self.out, self.run_info, start)
        self.bar = tqdm(total=cfg.run.steps, initial=start, unit="step", disable=None, dynamic_ncols=True)
        self.peak = peak_flops(torch.cuda.get_device_name() if ctx.device.type == "cuda" else None)
        self.started = self.step_started = time.perf_counter()

    def log_header(self, models: Any, n_examples: int, changed: Sequence[str]) -> None:
        """Print the model, the batch sizes, the algorithm and, for a resumed run, the `changed` settings."""
        model, algo, per_step = self.cfg.model, self.cfg.algo, self.cfg.rollout.prompts_per_step
        total = sum(p.numel() for p in models.policy.parameters()) / 1e6
        trained = sum(p.numel() for p in models.policy.parameters() if p.requires_grad) / 1e6
        print0(
            f"{model.model}: {total:.2f} M parameters, {trained:.2f} M trainable, {models.dtype} on {self.ctx.world} x "
            f"{self.ctx.device.type}, attention {model.attn}, kernel {model.kernel}, rollouts by "
            f"{self.cfg.rollout.rollout}\n{per_step} prompts x {algo.group_size} samples per step, "
            f"{n_examples // per_step} steps per epoch ({n_examples % per_step} examples left over in each), "
            f"updates per step: {algo.update_epochs * algo.minibatches}\nsettings that differ from their defaults "
            f"(set by flags or by --algo): {', '.join(changed_settings(self.cfg)) or 'none'}"
        )
        if self.checkpoint:
            print0(f"resumed from {self.checkpoint} after step {self.start}")
        elif self.cfg.run.resume == "auto":
            print0(f"no checkpoint in {self.out}: starting from --model")
        for change in changed:
            print0(f"changed setting: {change}")
        if self.ctx.is_main and self.page:
            print(f"report: {self.out / 'report.html'} and curves.png, redrawn during the run")

    def log_extra_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation made before the first step, or repeated after an interruption. If the last row is that of
        `step`, the metrics are added to it; otherwise they get a row of their own."""
        if self.ctx.is_main and metrics:
            rows = read_rows(self.path)
            if rows and rows[-1]["step"] == step:
                seconds = rows[-1].get("time/step", 0.0) + metrics.get("time/eval", 0.0)
                write_rows(self.path, [*rows[:-1], rows[-1] | metrics | {"time/step": seconds}])
                if self.trackers:
                    self.trackers.log(step, metrics)
            else:
                self._write(step, metrics)
            for line in (evaluation_bars(read_rows(self.path)), *self.warnings.update({"step": step, **metrics})):
                tqdm.write(line)
            self._write_report()
            self.started = self.step_started = time.perf_counter()
            self.bar.start_t, self.report_seconds = time.time(), 0.0

    def save_evaluation(
        self, step: int, records: Sequence[dict], summary: dict, examples: Sequence[Example], reset_fn: ResetFn,
        ablated: Mapping[str, Sequence[dict]],
    ) -> None:  # fmt: skip
        """Write the summary and all records of an evaluation, and those with ablated images, to OUT/eval, and set the
        content of the next report."""
        path = self.out / "eval" / f"step_{step:06d}.json"
        write_text(path, json.dumps(summary, indent=2) + "\n")
        write_records(path.with_suffix(".jsonl"), records)
        for kind, group in ablated.items():
            write_records(path.with_name(f"{path.stem}_{kind}.jsonl"), group)
        uids = {record["uid"] for record in select_records(records, summary)}
        by_uid = {example.uid: reset_fn(example) for example in examples if example.uid in uids}
        self.page_content = ReportPage(f"{self.title}: evaluation at step {step}", records, by_uid, summary=summary)

    def report(self, step: int, batch: Any, metrics: dict[str, float]) -> None:
        """Print and store samples and draw curves once a step is saved; collective. A failure is only a warning."""
        started = time.perf_counter()
        if step % LOG_SAMPLES_EVERY == 0 or step in (self.start + 1, self.cfg.run.steps):
            records, examples = gather_samples(batch, self.ctx)
            if self.ctx.is_main:
                self.writer.attempt(partial(self._show_samples, step, records, examples, metrics))
        due = started - self.drawn_at > max(REDRAW_SECONDS, WAIT_PER_REDRAW * self.draw_seconds)
        if self.ctx.is_main and (due or "eval/n" in metrics or step == self.start + 1):
            self._write_report()
        self.report_seconds += time.perf_counter() - started

    def _show_samples(self, step: int, records: list[dict], examples: dict, metrics: dict[str, float]) -> None:
        tqdm.write("\n".join(format_sample_lines(records, examples)))
        stem = self.out / "rollouts" / f"step_{step:06d}"
        write_records(stem.with_suffix(".jsonl"), records)
        content = ReportPage(f"{self.title}: rollouts of step {step}", records, examples, facts=metrics)
        if self.page:
            self.writer.write(self.page.write_pages, stem.with_suffix(".html"), content)
        if self.trackers:
            self.trackers.samples(step, records, examples)
        if not (self.cfg.data.eval_data and self.page_content):  # a resumed run has no evaluation yet
            self.page_content = content

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the row of a step, and print its line and any warnings."""
        if not self.ctx.is_main:
            return
        now = time.perf_counter()
        metrics = numbers_only(metrics) | {"time/step": now - self.step_started}
        metrics |= {"time/report": self.report_seconds} if self.report_seconds else {}
        self.step_started, self.report_seconds = now, 0.0
        metrics |= throughput_metrics(metrics, self.ctx.world, self.peak)
        if self.start and step == self.start + 1:
            self._write_run_json()
        self._write(step, metrics)
        eta = (now - self.started) / (step - self.start) * (self.cfg.run.steps - step)
        printed, self.columns = self.columns, visible_columns(metrics, self.columns)
        if self.columns != printed:
            tqdm.write(legend(self.columns))
        if self.columns != printed or (step - self.start - 1) % HEADER_EVERY == 0:
            tqdm.write(header_line(self.cfg.run.steps, self.columns))
        self.bar.update()
        warnings = self.warnings.update({"step": step, **metrics})
        for line in (step_line(step, self.cfg.run.steps, self.columns, metrics, eta), *warnings):
            tqdm.write(line)
        if "eval/n" in metrics:
            tqdm.write(evaluation_bars(read_rows(self.path)))

    def _write_run_json(self) -> None:
        """Write run.json. A resumed run does so only after its first step, so that a failed start leaves the old
        settings there."""
        write_text(self.out / "run.json", json.dumps(self.run_info, indent=2) + "\n")

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        with report_write_errors(self.path, "--out"), open(self.path, "a") as f:
            f.write(json_line({"step": step, **metrics}))
        self.outdated = True
        if self.trackers:
            self.trackers.log(step, metrics)

    def _write_report(self) -> None:
        """Draw report.html and curves.png again, if there are new rows."""
        if self.page and self.outdated:
            self.outdated, started = False, time.perf_counter()
            self.writer.write(self.page.write_run_page, self.out, self.page_content)
            self.drawn_at = time.perf_counter()
            self.draw_seconds = self.drawn_at - started

    def finish(self) -> None:
        """Write the report and summary.json and close the trackers, also if the run stops before its last step."""
        if self.ctx.is_main:
            self._write_report()
            if self.trackers:
                self.trackers.close()
            self.summary = run_summary(self.out, read_rows(self.path))
            write_text(self.out / "summary.json", json.dumps(self.summary, indent=2) + "\n")
            self.writer.finish([*self.writer.running])

    def close(self) -> None:
        """Finish a run that has made its last step, and print its result."""
        if not self.ctx.is_main:
            return
        self.bar.close()
        self.finish()
        message = f"done: {self.cfg.run.steps} steps, newest checkpoint in {self.out / 'checkpoints'}"
        if best := self.summary.get("best"):
            kept = "not saved; see --keep-best" if best["step"] else "before training"
            kept = Path(best["checkpoint"]).name if best["checkpoint"] else kept
            message += f"; best evaluation {next(iter(best.values())):.3f} at step {best['step']} ({kept})"
        if self.start >= self.cfg.run.steps:
            message = (
                f"nothing to do: {self.checkpoint} is from step {self.start} and --steps is {self.cfg.run.steps}; "
                "raise --steps to continue"
            )
        print(message)
        data = self.cfg.data.eval_data or "TEST.parquet"
        if self.page:
            print(f"report: {self.out / 'report.html'}")
        script = Path(sys.argv[0]).with_name("eval.py")
        code = [(f, getattr(section, f.name)) for section in (self.cfg.reward, self.cfg.env) for f in fields(section)]
        code = [format_setting(f, value) for f, value in code if value and not may_come_from_folder(f, value)]
        print(f"evaluate: python {script} {self.out} --data {data} --out {self.out / 'eval'}", *code)


def numbers_only(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics as Python numbers. Print a warning for each that is not a number and leave it out: a line that
    somebody added to train.py must not end a run whose step is not saved yet. None is kept."""
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = value if isinstance(value, int | float | None) else float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            tqdm.write(f"warning: metric {name} is left out: {printable(repr(value), 80)} is not a number")
    return numbers


class SkippedUpdates:
    """Updates skipped because a gradient was not finite. They are reported once per step and stored in OUT/skipped with
    the uids of their batch; MAX_SKIPPED in a row stop the run. An update without any gradient counts neither as skipped
    nor as successful."""

    def __init__(self, out: Path, ctx: DistContext):
        self.out = out / "skipped"
        self.ctx = ctx
        self.in_a_row = 0
        self.this_step: list[dict] = []

    def after_update(self, norm: float, stepped: bool, loss: float, uids: list[str], meter: Meter) -> None:
        """Count an update. `norm` is the gradient norm, the same on all ranks; `loss` and `uids` are from this rank's
        part of the minibatch."""
        meter.count_replicated("update/steps", stepped)
        meter.count_replicated("update/empty", math.isfinite(norm) and not stepped)
        if stepped:
            self.in_a_row = 0
        self.count_if_skipped(norm, loss, uids, meter)

    def count_if_skipped(self, norm: float, loss: float, uids: list[str], meter: Meter) -> None:
        """Count an update as skipped if its gradient norm is not finite; otherwise count nothing."""
        meter.count_replicated("update/skipped", not math.isfinite(norm))
        if not math.isfinite(norm):
            self.in_a_row += 1
            self.this_step.append({"loss": loss, "norm": norm, "uids": uids})

    def report(self, step: int, save: Callable[[], Path | None]) -> None:
        """Report the skipped updates of a step; collective, as all ranks skip the same updates. After MAX_SKIPPED in a
        row, call `save` and raise UserError."""
        local, self.this_step = self.this_step, []
        updates = []  # numbers are text, as JSON has no NaN
        ranks = self.ctx.gather_to_main([local]) if local else []
        for parts in zip(*ranks, strict=True):
            loss = sum(part["loss"] for part in parts)
            uids = chain.from_iterable(part["uids"] for part in parts)
            updates.append({"loss": str(loss), "grad_norm": str(parts[0]["norm"]), "uids": sorted(set(uids))})
        if updates:
            path, last = self.out / f"step_{step:06d}.json", updates[-1]
            write_text(path, json.dumps({"step": step, "in_a_row": self.in_a_row, "updates": updates}, indent=2) + "\n")
            tqdm.write(
                f"warning: step {step} skipped {len(updates)} of its updates, {self.in_a_row} in a row (the run ends "
                f"at {MAX_SKIPPED}): loss {last['loss']}, gradient norm {last['grad_norm']}; prompts are in {path}. "
                "If this repeats, lower --lr"
            )
        if self.in_a_row >= MAX_SKIPPED:
            raise UserError(
                f"{self.in_a_row} updates in a row had a non-finite loss or gradient; their prompts are in {self.out}. "
                f"The newest checkpoint is {save()}; lower --lr or fix the reward, then continue with --resume auto"
            )
