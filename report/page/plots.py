"""Curves of runs: panels for a page, curves.png, and plots of several runs. Only this file uses matplotlib, and only
to draw PNG files: pages draw their curves without it. It creates Figure objects directly, without choosing a backend or
changing global state."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from errors import as_user_error, need, report_write_errors
from report.run_files import read_rows
from settings import flag_name

MAX_CURVE_POINTS = 300  # per curve; with more steps each point is the mean of several consecutive steps
SMOOTH = 25  # a running mean covers 1/25 of a run; curves with at most 25 points are not smoothed
IGNORED_SETTINGS = {"seed", "out", "resume", "keep", "save_every", "keep_best", "report_to", "timeout_minutes",
                    "grace_seconds"}  # fmt: skip
FAILURE_COUNTS = {"reward/errors", "reward/timeouts"}  # counts that are drawn only if there were any
NO_PARTS = FAILURE_COUNTS | {"reward/km"}  # not named rewards, or on another scale
# Prefixes of all metrics that a run logs (docs/metrics.md). Those with another prefix get a panel for it
LOGGED_PREFIXES = """accuracy async balance curriculum episode eval grader judge kl loss lr memory mismatch noisy perf
    policy progress response reward rollout sampling step sync time update value vision""".split()
MAX_LABEL_CHARS = 80  # in the legend of several runs

MetricRows = Sequence[Mapping[str, Any]]


class Panel(NamedTuple):
    """A plot of related metrics. `note` describes healthy values and the causes of others."""

    title: str
    unit: str
    metrics: Mapping[str, str]  # metric -> label
    note: str
    parts: str = ""  # prefix of further metrics to draw
    log: bool = False  # use a logarithmic axis if the values differ by more than a factor of 30


class Line(NamedTuple):
    """A curve with its label. `low` and `high` are the ends of a band around it, if it has one."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


class Curve(NamedTuple):
    """A panel as a page draws it. Coordinates are between 0 and 1, with y pointing down. `ticks` are (y, value) pairs.
    Each of `lines` is a tuple: label, newest value, steps and means (thinned), polyline of the means, polyline of their
    running mean, and a list of two polylines for the ends of the band, empty without a band."""

    panel: Panel
    lines: list[tuple]
    ticks: list[tuple[float, float]]


PANELS = (  # in order; a panel is shown if any of its metrics was measured
    Panel("Reward", "", {"reward/mean": "mean", "reward/zero_std_frac": "groups with equal rewards (fraction)"},
          "Should rise; the named rewards show which part rises. If it is flat and the fraction of groups with equal "
          "rewards is near 1, the task is too hard or too easy, or the reward never matches.", parts="reward/"),
    Panel("Failed rewards", "responses of a step", {"reward/errors": "errors", "reward/timeouts": "timeouts"},
          "Should be 0. These responses were dropped or got the reward 0 (--reward-errors); the terminal shows why."),
    Panel("Evaluation", "", {"eval/accuracy": "accuracy", "eval/reward": "reward"},
          "Should rise. The band is the 95% interval; changes within it may be chance. If it falls while the reward "
          "rises, the policy exploits the reward or memorizes the training data."),
    Panel("Looking", "accuracy", {"eval/own": "own images", "eval/blank": "blank images",
                                  "eval/shuffled": "other examples' images", "eval/none": "no images",
                                  "eval/prior": "most frequent answers"},
          "The distance between own and blank images should grow: it is the part of the accuracy that depends on the "
          "image. If blank rises above the most frequent answers, the policy learns to answer without looking."),
    Panel("Entropy", "nats per token", {"policy/entropy": "entropy"},
          "Should fall slowly. If it is near 0 before the task is solved, the policy no longer explores: raise "
          "--clip-high or --entropy-coef, or lower --lr. If it keeps rising, the steps are too large."),
    Panel("KL", "nats", {"mismatch/kl": "engine", "policy/kl_ref": "reference", "policy/approx_kl": "old policy",
                         "policy/kl_teacher": "teacher"},
          "To the engine: should be steady, at most a few 1e-6 in fp32, about 1e-3 in bf16, more with --async-steps. "
          "If it grows, weight sync or engine is at fault; --algo-args tis_cap=2 limits the effect. To the reference: "
          "should grow slowly; if it grows fast, use --kl-coef. To the policy before the update: should be below 0.1.",
          log=True),
    Panel("Response length", "tokens", {"response/tokens": "tokens"},
          "Grows or shrinks depending on what the reward favours; a collapse is often reward hacking."),
    Panel("Truncated", "fraction of responses", {"response/truncated": "truncated"},
          "Should stay small. If it rises, raise --max-new-tokens or use --truncated penalise."),
    Panel("Gradient norm", "", {"policy/grad_norm": "gradient norm"},
          "Before clipping. Should be steady, with single peaks. If it is always far above --max-grad-norm, clipping "
          "determines the effective learning rate. If it grows, lower --lr.", log=True),
    Panel("Vision KL", "nats", {"vision/kl": "own images and second view"},
          "The mean log-ratio of what the policy says with the images and with their second view. If it falls towards "
          "0, the images matter less and less."),
    Panel("Learning rate", "", {"lr": "learning rate"}, "As set by --lr, --warmup-steps and --schedule."),
    Panel("Staleness", "syncs", {"async/staleness": "mean", "async/staleness_max": "oldest"},
          "Weight syncs between sampling and training of a token; at most --async-steps."),
    Panel("Idle", "fraction of time", {"async/trainer_idle": "trainer", "async/servers_idle": "servers"},
          "If the trainer is idle, add servers. If the servers are idle, use fewer, or more training processes."),
    Panel("Throughput", "tokens per second", {"perf/tokens_per_second": "sampled tokens"},
          "Should be steady, unless the response length changes."),
    Panel("MFU", "fraction of peak FLOPs", {"perf/mfu": "update"},
          "Of the update. On a GPU: if it is below 0.3, raise --micro-tokens, or train without "
          "--gradient-checkpointing. On a CPU: relative to a speed measured at the start, so it may exceed 1."),
    Panel("Time", "seconds", {"time/step": "step"},
          "The rollout should take most of a step (with --async-steps: the time that the trainer waits for it). "
          "Reward, pack and sync should be small; if not, see docs/troubleshooting.md, slow steps.", parts="time/"),
)  # fmt: skip


def series(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return the steps that have a metric, and its values there."""
    measured = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in measured], [row[name] for row in measured]


def measured_lines(panel: Panel, rows: MetricRows) -> list[Line]:
    """Return the lines of a panel for one run, with a band if the metrics NAME_low and NAME_high exist."""
    labels = dict(panel.metrics)
    if panel.parts:
        parts = re.compile(rf"{panel.parts}[^/=]+")
        names = sorted(filter(parts.fullmatch, set(chain.from_iterable(rows)) - NO_PARTS))
        labels |= {name: name.removeprefix(panel.parts) for name in names if name not in labels}
    lines: dict[tuple, Line] = {}  # one for metrics with equal values, which would hide each other
    for name, label in labels.items():
        steps, values = series(rows, name)
        if name in FAILURE_COUNTS and not any(values):
            continue
        values = [round(x, 3) for x in values] if panel.unit == "seconds" else values
        ends = [series(rows, f"{name}_{end}") for end in ("low", "high")]
        is_band = all(end_steps == steps for end_steps, _ in ends)  # a named reward may have such a name too
        line = Line(label, steps, values, *(bound for _, bound in ends if is_band))
        key = (*steps, *values)
        lines[key] = lines[key]._replace(label=f"{lines[key].label} = {label}") if key in lines else line
    return [line for line in lines.values() if line.steps]


def own_panels(rows: MetricRows) -> list[Panel]:
    """Return a panel for each prefix of metrics that you added, such as my/ of row["my/metric"] in train.py."""
    metrics: dict[str, dict[str, str]] = defaultdict(dict)
    for name in sorted(set(chain.from_iterable(rows))):
        metrics[name.partition("/")[0]][name] = name
    return [Panel(prefix, "", metrics[prefix], "Added by you.") for prefix in metrics if prefix not in LOGGED_PREFIXES]


def measured_panels(rows: MetricRows) -> list[tuple[Panel, list[Line]]]:
    """Return the panels with at least one measured metric and their lines."""
    panels = [(panel, measured_lines(panel, rows)) for panel in (*PANELS, *own_panels(rows))]
    return [(panel, lines) for panel, lines in panels if lines]


# ----------------------------------------------------------------------------------------------------------------------
# Drawing


def thin_curve(columns: Sequence[Sequence[float]], points: int = MAX_CURVE_POINTS) -> list[list[float]]:
    """Return columns of equal length (steps and their values) as means of neighbours, with at most `points` rows."""
    size = max(1, -(-len(columns[0]) // points))
    return [[fmean(x[i : i + size]) for i in range(0, len(x), size)] for x in columns]


def smooth(values: Sequence[float]) -> list[float]:
    """Return a running mean: of each value and an equal number of neighbours on both sides."""
    half = len(values) // SMOOTH // 2
    reach = (min(half, i, len(values) - 1 - i) for i in range(len(values)))
    return [fmean(values[i - k : i + k + 1]) for i, k in enumerate(reach)]


def spans_decades(values: Iterable[float]) -> bool:
    """Return whether a logarithmic axis suits the values."""
    positive = [x for x in values if x > 0]
    return bool(positive) and max(positive) > 30 * min(positive)


def draw_lines(axes: Any, lines: Sequence[Line], log: bool = False, raw: bool = True) -> None:
    """Draw running means, and with `raw` also the measured values, in a paler colour. Curves of few points are drawn
    without smoothing and with markers. The first line is on top."""
    if log and spans_decades(chain.from_iterable(line.values for line in lines)):
        axes.set_yscale("log", nonpositive="mask")
    for i, line in reversed([*enumerate(lines)]):
        if not line.steps:
            continue
        colour = f"C{i % 10}"
        steps, values, *band = thin_curve([x for x in line[1:] if x])
        is_short = len(steps) <= SMOOTH
        if raw and not is_short:
            axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.25)
        # matplotlib hides labels that begin with _, and reads $ as math
        label = re.sub("^_", " _", line.label).replace("$", r"\$")
        size = 2.5 if len(steps) > 1 else 6
        axes.plot(steps, smooth(values), color=colour, label=label, marker="o" if is_short else None, markersize=size)
        if band:
            axes.fill_between(steps, *map(smooth, band), color=colour, alpha=0.18, linewidth=0)
    if axes.get_yscale() == "linear":
        low, high = min(0.0, axes.dataLim.y0), axes.dataLim.y1
        high += high == low
        margin = 0.03 * (high - low)  # a line at the border would be cut
        axes.set_ylim(low - margin, high + margin)


def axis_ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten, two to six from low to high; with `whole`, only integers."""
    power = 10.0 ** math.floor(math.log10((high - low) / 2))
    size = power * next(n for n in (1, 2, 5) if 5 * n * power >= high - low or n == 5)
    size = max(1.0, size) if whole else size
    return [n * size for n in range(math.ceil(low / size), math.floor(high / size + 1e-6) + 1)]


def run_curves(rows: MetricRows) -> list[Curve]:
    """Return the panels of a run's rows for a page. Their x axes end at the run's last step."""
    return [page_curve(panel, lines, max(1, rows[-1]["step"])) for panel, lines in measured_panels(rows)]


def page_curve(panel: Panel, lines: Sequence[Line], last: float) -> Curve:
    """Return a panel with lines up to step `last`."""
    columns = [thin_curve([x for x in line[1:] if x]) for line in lines]
    values = list(chain.from_iterable(x for _, *parts in columns for x in parts))
    log = panel.log and spans_decades(values)
    least = min((x for x in values if x > 0), default=1.0)  # on a logarithmic axis, 0 is drawn like this

    def scale(x: float) -> float:
        return math.log10(max(x, least)) if log else x

    low, high = min(map(scale, values if log else [0.0, *values])), max(map(scale, values))
    high += high == low
    ticks = axis_ticks(low, high, log)
    size = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    low, high = math.floor(low / size + 1e-6) * size, math.ceil(high / size - 1e-6) * size  # the axis ends at labels

    def points(steps: Sequence[float], line: Sequence[float]) -> str:
        xy = ((step / last, (high - scale(x)) / (high - low)) for step, x in zip(steps, line, strict=True))
        return " ".join(f"{x:.4f},{y:.4f}" for x, y in xy)

    drawn = []
    for line, (steps, means, *band) in zip(lines, columns, strict=True):
        smoothed = [points(steps, smooth(x)) for x in (means, *band)]
        drawn.append((line.label, line.values[-1], steps, means, points(steps, means), smoothed[0], smoothed[1:]))
    ticks = axis_ticks(low, high, log)
    return Curve(panel, drawn, [((high - x) / (high - low), 10.0**x if log else x) for x in ticks])


def draw_grid(panels: Sequence[tuple[Panel, Sequence[Line]]], file: Path, n_lines: int = 0) -> None:
    """Draw panels, up to three per row, and write the file atomically. If all panels have the same lines, `n_lines` is
    their number, and they share a legend. pyplot is not used, because it would keep the figure and choose a backend for
    the whole process."""
    from matplotlib.figure import Figure

    n_columns = min(3, len(panels))
    n_rows = -(-len(panels) // n_columns)
    width, bottom = 7.5 + 3.75 * (n_columns - 1), 0.45 + 0.2 * n_lines
    height = 3.2 * n_rows + bottom
    figure = Figure(figsize=(width, height))
    # fixed margins: computing them takes matplotlib as long as drawing
    figure.subplots_adjust(left=0.65 / width, right=1 - 0.1 / width, bottom=bottom / height, top=1 - 0.35 / height,
                           wspace=0.2, hspace=0.36)
    for position, (panel, lines) in enumerate(panels, 1):
        axes = figure.add_subplot(n_rows, n_columns, position)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", labelsize=7.5)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel(panel.unit, fontsize=8)
        axes.margins(x=0.01)
        axes.xaxis.get_major_locator().set_params(integer=True)
        draw_lines(axes, lines, panel.log, raw=not n_lines)
        if len(lines) > 1 and not n_lines:
            axes.legend(frameon=False, fontsize=7, handlelength=1.4, labelspacing=0.25, reverse=True)
    if n_lines:
        drawn = chain.from_iterable(axes.get_lines() for axes in figure.axes)
        shared = {(line.get_label(), line.get_color()): line for line in drawn if not line.get_label().startswith("_")}
        figure.legend(handles=shared.values(), loc="lower left", fontsize=8, frameon=False, reverse=True)
    temporary = file.with_name(f".{file.name}.tmp")
    with report_write_errors(file, "--out"):
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, format="png", dpi=100)
        temporary.replace(file)


# ----------------------------------------------------------------------------------------------------------------------
# Several runs, and the demo


def plot_runs(runs: Sequence[Path], out: Path) -> None:
    """Draw the curves of several runs in out/curves.png. Runs whose settings differ only in the seed become one curve:
    their mean at the steps that all of them have, in a band from the lowest to the highest."""
    need(not (out / "run.json").exists(),
         f"--out {out} is a run, and its curves.png would be replaced; choose another folder")
    rows_by_run, settings_by_run = {}, {}
    for run in dict.fromkeys(Path(run).resolve() for run in runs):
        file = run / "run.json"
        need(file.is_file(), f"--plot-runs {run} has no {file.name}; give run directories (the --out of train.py)")
        rows_by_run[run] = read_rows(run / "metrics.jsonl")
        need(any(row["step"] > 0 for row in rows_by_run[run]),
             f"--plot-runs {run}: the run has not finished a step yet; leave it out")
        with as_user_error(
            (ValueError, LookupError, TypeError, AttributeError), f"{file}: damaged; leave this run out"
        ):
            args = json.loads(file.read_text())["args"]
            settings_by_run[run] = {name: str(value) for name, value in args.items() if name not in IGNORED_SETTINGS}
    groups = group_by_settings(settings_by_run)
    panels = []
    for panel in (*PANELS, *own_panels(list(chain.from_iterable(rows_by_run.values())))):
        for metric, label in panel.metrics.items():
            lines = [mean_line(name, metric, [rows_by_run[run] for run in members]) for name, _, members in groups]
            title = panel.title if len(panel.metrics) == 1 else f"{panel.title}: {label}"
            if any(any(line.values) if metric in FAILURE_COUNTS else line.steps for line in lines):
                panels.append((panel._replace(title=title), lines))
    need(panels, f"--plot-runs {' '.join(map(str, runs))}: none of the plotted metrics has a value; choose other runs")
    draw_grid(panels, out / "curves.png", len(groups))
    for name, changes, members in groups:
        print(f"{name}: {', '.join(map(str, members))}" + (f"; {changes}" if changes not in name else ""))
    bands = any(len(members) > 1 for *_, members in groups)
    note = " (several seeds: their mean, in a band from the lowest to the highest)" if bands else ""
    print(f"wrote {out / 'curves.png'}{note}")


def group_by_settings(settings_by_run: Mapping[Path, Mapping[str, str]]) -> list[tuple[str, str, list[Path]]]:
    """Return the runs in groups with equal settings: (label for the legend, settings that differ between groups, runs).
    The label is these settings, with the last part of each path, after the first run's folder if they are too long or
    not unique."""
    groups: dict[tuple, list[Path]] = defaultdict(list)
    for run, settings in settings_by_run.items():
        groups[tuple(sorted(settings.items()))].append(run)
    distinct = [dict(key) for key in groups]
    names = sorted(set(chain.from_iterable(distinct)))
    differing = [name for name in names if len({settings.get(name) for settings in distinct}) > 1]
    changes_by_group = [" ".join(f"{flag_name(name)} {settings.get(name, '-')}" for name in differing)
                        for settings in distinct]  # fmt: skip
    short = [re.sub(r"[^\s,='\"\[]*/", "", changes) for changes in changes_by_group]
    labelled = []
    for label, changes, members in zip(short, changes_by_group, groups.values(), strict=True):
        label = label or members[0].name
        if len(label) > MAX_LABEL_CHARS or short.count(label) > 1:
            label = f"{Path(*members[0].parts[-2:])}: {label}"
            label = label if len(label) <= MAX_LABEL_CHARS else f"{label[:MAX_LABEL_CHARS]}…"
        labelled.append((f"{label} ({len(members)} runs)" if len(members) > 1 else label, changes, members))
    return labelled


def mean_line(label: str, metric: str, runs: Sequence[MetricRows]) -> Line:
    """Return the mean of a metric over runs, at the steps that all of them have, with a band from lowest to highest."""
    values_by_step = [dict(zip(*series(rows, metric), strict=True)) for rows in runs]
    shared = sorted(set.intersection(*map(set, values_by_step)))
    values = [[run[step] for run in values_by_step] for step in shared]
    band = [[end(step_values) for step_values in values] for end in (min, max)] if len(runs) > 1 else []
    return Line(label, shared, [fmean(step_values) for step_values in values], *band)


def draw_curve(run: Path, blank: float, out: Path, task: str, metric: str) -> None:
    """Draw the metric (accuracy or reward) on unseen images and the training reward over the steps of a run. `blank` is
    the metric on blank images after the last step, drawn as one point."""
    rows = read_rows(run / "metrics.jsonl")
    steps, values = series(rows, f"eval/{metric}")
    lines = [Line(f"greedy {metric}, unseen images", steps, values),
             Line("reward of the step's samples", *series(rows, "reward/mean")),
             Line(f"greedy {metric}, blank images, after RL", steps[-1:], [blank])]  # fmt: skip
    draw_grid([(Panel(task.replace("$", r"\$"), "", {}, ""), lines)], out)
