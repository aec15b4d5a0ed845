"""Curves of runs, with matplotlib, which only these need: panels for a page, curves.png, and several runs over each
other. Figures are matplotlib's objects alone: no backend is chosen, nothing global is changed."""

import importlib.util
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from errors import as_user_error, need, report_write_errors
from report.files import read_rows
from settings import flag_name

MAX_CURVE_POINTS = 300  # of a curve; where there are more steps each point is the mean of some that follow each other
SMOOTH = 25  # a running mean is over so many parts of a run; with fewer points they are drawn as they are
IGNORED_SETTINGS = {"seed", "out", "resume", "keep", "save_every", "keep_best", "report_to", "timeout_minutes",
                    "grace_seconds"}  # fmt: skip
NO_PARTS = {"reward/errors", "reward/timeouts", "reward/km"}  # no named rewards, or of another scale

METADATA = "Creator Date Format Type".split()  # of an SVG file, which pages do not need

Rows = Sequence[Mapping[str, Any]]


class Panel(NamedTuple):
    """What belongs together; `note` says what is healthy, and what to think otherwise."""

    title: str
    unit: str
    metrics: Mapping[str, str]  # with their labels
    note: str
    parts: str = ""  # the prefix of more metrics that are drawn, whatever their names are
    log: bool = False  # on a logarithmic axis, if the values differ much


class Line(NamedTuple):
    """A curve with its label. `low` and `high` are the ends of a band around it, if it has one."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


class Curve(NamedTuple):
    title: str
    image: str  # an <svg> tag of ours
    note: str


PANELS = (  # of a run, in order; one is shown if any of its metrics was measured
    Panel("Reward", "", {"reward/mean": "mean", "reward/zero_std_frac": "groups of equal rewards (share)"},
          "Rises; the parts say what it is that rises. Flat with a share of equal rewards near 1: too hard, too "
          "easy, or the reward never matches.", parts="reward/"),
    Panel("Evaluation", "", {"eval/accuracy": "accuracy", "eval/reward": "reward"},
          "Rises. The band is the 95% interval: what moves within it may be chance. Falling while the reward rises: "
          "the reward is gamed, or training data is learnt by heart."),
    Panel("Entropy", "nats a token", {"policy/entropy": "entropy"},
          "Falls slowly. Near 0 while the task is not solved: nothing is left to explore; raise --clip-high or "
          "--entropy-coef, lower --lr. Rising without end: steps are too large."),
    Panel("KL", "nats", {"mismatch/kl": "engine", "policy/kl_ref": "reference", "policy/approx_kl": "before the update"},
          "To the engine: steady; below 1e-6 in fp32, some 1e-3 in bf16, more with --async-steps; growing: sync or "
          "engine are at fault, see tis_cap. To the reference: grows slowly; fast: --kl-coef. To before the "
          "update: below 0.1.", log=True),
    Panel("Response length", "tokens", {"response/tokens": "tokens"},
          "Grows or shrinks with what pays; a collapse is often a reward that is gamed."),
    Panel("Truncated", "share of responses", {"response/truncated": "truncated"},
          "Stays small; rising: raise --max-new-tokens, or --truncated penalise."),
    Panel("Gradient norm", "", {"policy/grad_norm": "gradient norm"},
          "Before clipping. Steady, with single peaks; always far above --max-grad-norm: the learning rate is what "
          "clipping leaves of it. Growing: lower --lr.", log=True),
    Panel("Staleness", "syncs", {"async/staleness": "mean", "async/staleness_max": "oldest"},
          "Of the tokens trained on, at most --async-steps."),
    Panel("Idle", "share of time", {"async/trainer_idle": "trainer", "async/servers_idle": "servers"},
          "The trainer without work: more servers; the servers: fewer, or more processes that train."),
    Panel("Time", "seconds", {"time/step": "step"},
          "The rollout takes most, with --async-steps what the trainer waits for it. Reward, pack and sync are "
          "small; else see docs/troubleshooting.md, slow steps.", parts="time/"),
)  # fmt: skip


def series(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return the steps that have a metric, and its values there."""
    found = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in found], [row[name] for row in found]


def measured_lines(panel: Panel, rows: Rows) -> list[Line]:
    """Return a panel's lines of a run, with the bands of metrics that have NAME_low and NAME_high."""
    labels = dict(panel.metrics)
    if panel.parts:
        parts = re.compile(rf"{panel.parts}[^/=]+")
        names = sorted(filter(parts.fullmatch, set(chain.from_iterable(rows)) - NO_PARTS))
        labels |= {name: name.removeprefix(panel.parts) for name in names if name not in labels}
    lines = []
    for name, label in labels.items():
        steps, values = series(rows, name)
        ends = [series(rows, f"{name}_{end}") for end in ("low", "high")]
        whole = all(where == steps for where, _ in ends)  # a part of a reward may have such a name too
        lines.append(Line(label, steps, values, *(bound for _, bound in ends if whole)))
    return [line for line in lines if line.steps]


def measured_panels(rows: Rows) -> list[tuple[Panel, list[Line]]]:
    """Return the panels for which something was measured; none if matplotlib is not installed."""
    if not importlib.util.find_spec("matplotlib"):
        return []
    found = [(panel, measured_lines(panel, rows)) for panel in PANELS]
    return [(panel, lines) for panel, lines in found if lines]


# ----------------------------------------------------------------------------------------------------------------------
# Drawing


def thin_curve(columns: Sequence[Sequence[float]], points: int = MAX_CURVE_POINTS) -> list[list[float]]:
    """Return columns of equal length (steps, and values at each) with at most `points` rows: means of neighbours."""
    size = max(1, -(-len(columns[0]) // points))
    return [[fmean(x[i : i + size]) for i in range(0, len(x), size)] for x in columns]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and those around it, as many on both sides."""
    half = len(values) // SMOOTH // 2
    reach = (min(half, i, len(values) - 1 - i) for i in range(len(values)))
    return [fmean(values[i - k : i + k + 1]) for i, k in enumerate(reach)]


def draw_lines(axes: Any, lines: Sequence[Line], log: bool = False, raw: bool = True) -> None:
    """Draw running means, with `raw` over the measured values, which are paler. Few points are drawn as they are, with
    marks. The first line is on top."""
    positive = [x for line in lines for x in line.values if x > 0]
    if log and positive and max(positive) > 30 * min(positive):
        axes.set_yscale("log", nonpositive="mask")
    for i, line in reversed([*enumerate(lines)]):
        if not line.steps:
            continue
        colour = f"C{i % 10}"
        steps, values, *band = thin_curve([x for x in line[1:] if x])
        few = len(steps) <= SMOOTH
        if raw and not few:
            axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.25)
        label = re.sub("^_", " _", line.label).replace("$", r"\$")  # literally: no formula, and not left out
        axes.plot(steps, smooth(values), color=colour, label=label, marker="o" if few else None, markersize=2.5)
        if band:
            axes.fill_between(steps, *map(smooth, band), color=colour, alpha=0.18, linewidth=0)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))


def add_axes(figure: Any, *place: int, title: str = "", unit: str = "") -> Any:
    axes = figure.add_subplot(*place)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=7.5)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    axes.margins(x=0.01)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return axes


def add_legend(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=7, handlelength=1.4, labelspacing=0.25, reverse=True)


def new_figure(width: float, height: float, bottom: float = 0.45) -> Any:
    """Return a figure, in inches, with fixed margins: those that matplotlib finds take as long as the drawing. pyplot
    would keep the figure, and choose a backend for the whole process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left=0.65 / width, right=1 - 0.1 / width, bottom=bottom / height, top=1 - 0.3 / height,
                           wspace=0.2, hspace=0.36)
    return figure


def run_curves(rows: Rows) -> list[Curve]:
    """Return the panels of metrics.jsonl's rows for a page, each an <svg> whose letters are paths, so that it needs no
    font."""
    curves = []
    for panel, lines in measured_panels(rows):
        figure = new_figure(4.9, 2.7)
        axes = add_axes(figure, unit=panel.unit)
        draw_lines(axes, lines, panel.log)
        if len(lines) > 1:
            add_legend(axes)
        figure.savefig(file := io.StringIO(), format="svg", metadata=dict.fromkeys(METADATA))
        svg = file.getvalue()
        curves.append(Curve(panel.title, svg[svg.index("<svg") :], panel.note))
    return curves


def draw_grid(found: Sequence[tuple[Panel, Sequence[Line]]], file: Path, names: int = 0) -> None:
    """Draw panels, three in a row. If all have the same lines, `names` is their number, and they share a legend. The
    file is written whole or not at all."""
    n_rows = -(-len(found) // 3)
    bottom = 0.45 + 0.2 * names
    figure = new_figure(15.0, 3.2 * n_rows + bottom, bottom)
    for place, (panel, lines) in enumerate(found, 1):
        axes = add_axes(figure, n_rows, 3, place, title=panel.title, unit=panel.unit)
        draw_lines(axes, lines, panel.log, raw=not names)
        if len(lines) > 1 and not names:
            add_legend(axes)
    if names:
        drawn = chain.from_iterable(axes.get_lines() for axes in figure.axes)
        shared = {line.get_label(): line for line in drawn if not line.get_label().startswith("_")}
        figure.legend(handles=shared.values(), loc="lower left", fontsize=8, frameon=False, reverse=True)
    temporary = file.with_name(f".{file.name}.tmp")
    with report_write_errors(file, "--out"):
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, format="png", dpi=100)
        temporary.replace(file)


# ----------------------------------------------------------------------------------------------------------------------
# Several runs, and the demo


def plot_runs(runs: Sequence[Path], out: Path) -> None:
    """Draw several runs over each other, in out/curves.png: those whose settings differ in the seed alone are one
    curve, the mean at the steps that all of them have, in a band from the lowest to the highest of them."""
    need(not (out / "run.json").exists(),
         f"--out {out} is a run, whose curves.png this would replace; choose another folder")
    rows_of, settings_of = {}, {}
    for run in dict.fromkeys(Path(run).resolve() for run in runs):
        file = run / "run.json"
        need(file.is_file(), f"--plot-runs {run}: no run is there (no {file}); give directories that train.py wrote")
        rows_of[run] = read_rows(run / "metrics.jsonl")
        need(any(row["step"] > 0 for row in rows_of[run]), f"--plot-runs {run}: the run has not finished a step yet")
        with as_user_error(
            (ValueError, LookupError, TypeError, AttributeError), f"{file}: damaged; leave this run out"
        ):
            args = json.loads(file.read_text())["args"]
            settings_of[run] = {name: str(value) for name, value in args.items() if name not in IGNORED_SETTINGS}
    groups = group_by_settings(settings_of)
    found = []
    for panel in PANELS:
        for metric, label in panel.metrics.items():
            lines = [mean_line(name, metric, [rows_of[run] for run in members]) for name, members in groups]
            title = panel.title if len(panel.metrics) == 1 else f"{panel.title}: {label}"
            if any(line.steps for line in lines):
                found.append((panel._replace(title=title), lines))
    need(found, f"--plot-runs {' '.join(map(str, runs))}: no metric that is drawn was ever a number; leave it out")
    draw_grid(found, out / "curves.png", len(groups))
    for name, members in groups:
        print(f"{name}: {', '.join(map(str, members))}")
    print(f"wrote {out / 'curves.png'} (of several seeds the mean, in a band from the lowest to the highest)")


def group_by_settings(settings_of: Mapping[Path, Mapping[str, str]]) -> list[tuple[str, list[Path]]]:
    """Return the runs of the same settings together, under the settings in which groups differ."""
    groups: dict[tuple, list[Path]] = defaultdict(list)
    for run, settings in settings_of.items():
        groups[tuple(sorted(settings.items()))].append(run)
    kinds = [dict(key) for key in groups]
    names = sorted(set(chain.from_iterable(kinds)))
    differing = [name for name in names if len({kind.get(name) for kind in kinds}) > 1]
    found = []
    for kind, members in zip(kinds, groups.values(), strict=True):
        # of a long path the end tells it from others
        label = " ".join(f"{flag_name(name)} {kind.get(name, '-')[-40:]}" for name in differing) or members[0].name
        found.append((f"{label} ({len(members)} runs)" if len(members) > 1 else label, members))
    return found


def mean_line(label: str, metric: str, runs: Sequence[Rows]) -> Line:
    """Return the mean of a metric over runs, at the steps that all of them have, in the band of its extremes."""
    at = [dict(zip(*series(rows, metric), strict=True)) for rows in runs]
    shared = sorted(set.intersection(*map(set, at)))
    values = [[of_run[step] for of_run in at] for step in shared]
    band = [[end(of_step) for of_step in values] for end in (min, max)] if len(runs) > 1 else []
    return Line(label, shared, [fmean(of_step) for of_step in values], *band)


def draw_curve(run: Path, blank: float, out: Path, task: str, metric: str) -> None:
    """Draw the metric (accuracy or reward) on unseen images and the training reward over the steps of a run. `blank` is
    the metric on blank images."""
    rows = read_rows(run / "metrics.jsonl")
    figure = new_figure(7.2, 3.8)
    axes = add_axes(figure, title=task.replace("$", r"\$"))
    axes.axhline(blank, color="#c0392b", linestyle="--", linewidth=1.2, label="the same model, blank images")
    draw_lines(axes, [Line(f"greedy {metric}, unseen images", *series(rows, f"eval/{metric}")),
                      Line("reward of the step's samples", *series(rows, "reward/mean"))])  # fmt: skip
    add_legend(axes)
    figure.savefig(out, dpi=120)
