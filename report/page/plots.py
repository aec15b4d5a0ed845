"""Curves of runs, with matplotlib, which only these need: panels for a page, curves.png, and several runs over each
other. Figures are matplotlib's objects alone: no backend is chosen, nothing global is changed."""

import importlib.util
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from errors import need, refusing, writing
from report.files import read_rows
from report.summary import metric_of
from settings import flag_of

POINTS = 300  # of a curve; where there are more steps each point is the mean of some that follow each other
SMOOTH = 25  # a running mean is over so many parts of a run
COLOURS = ("#1f5fa8", "#d9822b", "#2e9e5b", "#8e5bb5", "#c0392b", "#17a2b8", "#8c6d46", "#d16ba5", "#7f8c9b", "#a5b53a")
BLUE, ORANGE, RED, GREY = COLOURS[0], COLOURS[1], COLOURS[4], "#8b95a5"
TIMES = "rollout reward pack logprobs update sync eval".split()  # the order of a step; others come after these
OF_NO_GROUP = {"seed", "out", "resume", "keep", "save_every", "keep_best", "track", "timeout_minutes", "grace_seconds"}
# no named rewards, or of another scale
COUNTS = {"reward/errors", "reward/timeouts", "reward/constant_groups", "reward/mean", "reward/km"}

Series = tuple[list[float], list[float]]  # steps, and a value at each


class Line(NamedTuple):
    """A metric in a panel. With `several` it has a panel of this title where several runs are drawn (--watch)."""

    metric: str
    label: str
    several: str = ""
    colour: str = BLUE
    width: float = 1.8
    style: str = "-"
    raw: bool = False  # also the measured values, paler
    right: bool = False  # on the axis of shares


class Panel(NamedTuple):
    """What belongs together; `note` says what is healthy, and what to think otherwise."""

    title: str
    unit: str = ""
    lines: Sequence[Line] = ()
    note: str = ""
    scale: str = "linear"  # or log, or auto: log if the values differ much
    right: str = ""  # what the axis of shares, on the right, is of
    parts: str = ""  # the prefix of more metrics that are drawn, whatever their names are
    draw: Callable[..., None] | None = None  # if it is no lines: (axes, rows, panel), bound to `axes` by `panels`


class Curve(NamedTuple):
    title: str
    image: str  # an <svg> tag of ours
    note: str


def series(rows: Iterable[Mapping[str, Any]], name: str, positive: bool = False) -> Series:
    """Return a metric at the steps that have it, or with `positive` at those where it is above 0."""
    found = [row for row in rows if row.get(name) is not None and (row[name] > 0 or not positive)]
    return [row["step"] for row in found], [row[name] for row in found]


def thinned(columns: Sequence[Sequence[float]], points: int = POINTS) -> tuple[list[float], ...]:
    """Return columns of equal length (steps, and values at each) with at most `points` rows: means of neighbours."""
    size = max(1, -(-len(columns[0]) // points))
    return tuple([fmean(x[i : i + size]) for i in range(0, len(x), size)] for x in columns)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and those around it, as many on both sides."""
    half = len(values) // SMOOTH // 2
    reach = (min(half, i, len(values) - 1 - i) for i in range(len(values)))
    return [fmean(values[i - k : i + k + 1]) for i, k in enumerate(reach)]


# ----------------------------------------------------------------------------------------------------------------------
# The panels of a run


def panels(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return the panels for which something was measured. `draw` of each puts it on axes."""
    measured = {name for row in rows for name, value in row.items() if value is not None}
    found = []
    for panel in PANELS:
        lines = [line for line in panel.lines if series(rows, line.metric, positive=panel.scale != "linear")[0]]
        if not lines:
            continue
        if panel.parts:
            names = sorted(n for n in measured - COUNTS if re.fullmatch(rf"{panel.parts}[^/=]+", n))
            colours = zip(names, COLOURS[1:] * len(names), strict=False)
            lines = [Line(n, plain_label(n.removeprefix(panel.parts)), "", c, 1.2) for n, c in colours] + lines
        draw = partial(panel.draw or draw_lines, rows=rows, panel=panel._replace(lines=lines))
        found.append(panel._replace(draw=draw))
    return found


def draw_lines(axes: Any, rows: Sequence[Mapping[str, Any]], panel: Panel) -> None:
    main = [value for line in panel.lines if not line.right for value in series(rows, line.metric)[1]]
    if panel.scale == "log" or (panel.scale == "auto" and is_wide(main)):
        axes.set_yscale("log")
    elif not panel.parts:
        axes.set_ylim(min(0.0, *main), (1.2 if panel.right else 1.05) * max(1e-9, *main))
    axes.set_ylabel(panel.unit, color=BLUE if panel.right else "black")
    other = share_axes(axes, panel.right) if panel.right else axes
    for line in panel.lines:
        draw_line(other if line.right else axes, rows, line)
    if panel.right:
        lines = [line for line in (*axes.lines, *other.lines) if not line.get_label().startswith("_")]
        other.legend(handles=lines, frameon=False, fontsize=7, ncols=4, loc="upper center")
    elif len(panel.lines) > 1 or panel.scale == "log":
        legend(axes)


def is_wide(values: Sequence[float]) -> bool:
    """Return whether values differ so much that a logarithmic axis shows them better."""
    positive = [x for x in values if x > 0]
    return bool(positive) and max(positive) > 30 * min(positive)


def share_axes(axes: Any, label: str) -> Any:
    """Return a second y axis, on the right, from 0 to 1, with room above for a legend."""
    other = dress(axes.twinx())
    other.set_ylabel(label, color=RED)
    other.set_ylim(0.0, 1.2)
    other.spines["right"].set_visible(True)
    other.grid(False)
    return other


def draw_line(axes: Any, rows: Sequence[Mapping[str, Any]], line: Line) -> None:
    """Draw the running mean of a metric. Few points are drawn as they are, with marks. A logarithmic axis shows only
    what is above 0."""
    steps, values = thinned(series(rows, line.metric, positive=axes.get_yscale() == "log"))
    if not steps:
        return
    if line.raw and len(steps) > SMOOTH:
        axes.plot(steps, values, color=line.colour, linewidth=0.7, alpha=0.3)
    mark = "o" if len(steps) < 8 else None
    axes.plot(steps, smoothed(values), color=line.colour, linestyle=line.style, linewidth=line.width, label=line.label,
              marker=mark, markersize=2.5)


def draw_evaluation(axes: Any, rows: Sequence[Mapping[str, Any]], panel: Panel) -> None:
    metric = metric_of(rows)
    axes.set_ylabel(metric)
    (steps, low), (_, high) = (series(rows, f"eval/{metric}_{end}") for end in ("low", "high"))
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.18, linewidth=0)
    steps, values = series(rows, f"eval/{metric}")
    axes.plot(steps, values, "o-", color=BLUE, markersize=3, linewidth=1.8)
    if 0 <= min(values) and max(values) <= 1:
        axes.set_ylim(-0.02, 1.02)


def draw_time(axes: Any, rows: Sequence[Mapping[str, Any]], panel: Panel) -> None:
    """Draw the seconds of a step, stacked; what no part accounts for is "other"."""
    rows = [row for row in rows if row.get("time/step") is not None]
    names = {name[5:] for name in chain.from_iterable(rows) if name.startswith("time/")} - {"step"}
    names = [name for name in dict.fromkeys(TIMES + sorted(names)) if name in names]
    layers = [[row.get(f"time/{name}") or 0.0 for row in rows] for name in names]
    layers.append([max(0.0, row["time/step"] - sum(parts)) for row, *parts in zip(rows, *layers, strict=True)])
    steps, *layers = thinned([[row["step"] for row in rows], *layers], 120)
    axes.stackplot(steps, *layers, labels=[*names, "other"], colors=[*COLOURS[: len(names)], GREY], linewidth=0)
    axes.set_ylabel(panel.unit)
    legend(axes, columns=2)


def plain_label(name: str) -> str:
    """Return a name so that matplotlib shows it literally: no formula, and in the legend even if it begins with _."""
    return re.sub("^_", " _", name).replace("$", r"\$")


def legend(axes: Any, columns: int = 1) -> None:
    axes.legend(frameon=False, fontsize=7, loc="best", ncols=columns, handlelength=1.4, labelspacing=0.25)


def dress(axes: Any) -> Any:
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=7.5)
    axes.set_xlabel("step", fontsize=8)
    axes.yaxis.label.set_size(8)
    axes.margins(x=0.01)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return axes


PANELS = (  # of a run, in order; one is shown if any of its lines was measured
    Panel("Reward", "", [
        Line("reward/mean", "mean", "Reward", width=2.0, raw=True),
        Line("reward/constant_groups", "groups of equal rewards (share)", "Share of groups of equal rewards",
             GREY, 1.0, "dotted")],
        "Rises; the parts say what it is that rises. Flat with a share of equal rewards near 1: too hard, too "
        "easy, or the reward never matches.", parts="reward/"),
    Panel("Evaluation", "", [
        Line("eval/accuracy", "", "Evaluation: accuracy"),
        Line("eval/reward", "", "Evaluation: reward")],
        "Rises. The band is the 95% interval: what moves within it may be chance. Falling while the reward rises: "
        "the reward is gamed, or training data is learnt by heart.", draw=draw_evaluation),
    Panel("Entropy", "nats a token", [Line("policy/entropy", "entropy", "Entropy (nats)", raw=True)],
        "Falls slowly. Near 0 while the task is not solved: nothing is left to explore; raise --clip-high or "
        "--entropy-coef, lower --lr. Rising without end: steps are too large."),
    Panel("KL", "nats", [
        Line("rollout/kl", "engine", "KL to the engine (nats)", COLOURS[0], raw=True),
        Line("policy/kl_ref", "reference", "KL to the reference (nats)", COLOURS[1], raw=True),
        Line("policy/kl_old", "policy before the update", "", COLOURS[2], raw=True)],
        "To the engine: steady; below 1e-6 in fp32, some 1e-3 in bf16, more with --async-steps; growing: sync or "
        "engine are at fault, see tis_cap. To the reference: grows slowly; fast: --kl-coef. To before the "
        "update: below 0.1.", "log"),
    Panel("Response length", "tokens", [
        Line("response/tokens", "tokens", "Response length (tokens)", raw=True),
        Line("response/truncated", "truncated (share)", "Share truncated", RED, 1.4, right=True)],
        "Grows or shrinks with what pays; a collapse is often a reward that is gamed. Truncated stays small; "
        "rising: raise --max-new-tokens, or --truncated penalise.", right="share truncated"),
    Panel("Gradient norm", "", [Line("policy/grad_norm", "gradient norm", "Gradient norm", raw=True)],
        "Before clipping. Steady, with single peaks; always far above --max-grad-norm: the learning rate is what "
        "clipping leaves of it. Growing: lower --lr.", "auto"),
    Panel("Staleness", "syncs", [
        Line("async/staleness", "mean", "Staleness (syncs)", raw=True),
        Line("async/staleness_max", "oldest", width=1.0, style="dotted"),
        Line("async/trainer_idle", "trainer idle", "", RED, 1.2, right=True),
        Line("async/servers_idle", "servers idle", "", ORANGE, 1.2, right=True)],
        "Of the tokens trained on, at most --async-steps. The trainer without work: more servers; the servers: "
        "fewer, or more processes that train.", right="share of time"),
    Panel("Time", "seconds", [Line("time/step", "step", "Seconds a step")],
        "The rollout takes most, with --async-steps what the trainer waits for it. Reward, pack and sync are "
        "small; else see docs/troubleshooting.md, slow steps.", draw=draw_time),
)  # fmt: skip


def run_curves(rows: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Return the panels of metrics.jsonl's rows for a page, each an <svg> whose letters are paths, so that it needs no
    font. Return [] if matplotlib is not installed."""
    curves: list[Curve] = []
    if not importlib.util.find_spec("matplotlib"):
        return curves
    for panel in panels(rows):
        figure = new_figure(4.9, 2.7)
        panel.draw(dress(figure.add_subplot()))
        figure.savefig(file := io.StringIO(), format="svg")
        svg = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
        svg = re.sub(r"\n\s*", "\n", svg[svg.index("<svg") :])
        curves.append(Curve(panel.title, svg, panel.note))
    return curves


def draw_grid(found: Sequence[Panel], file: Path, head: str = "", names: int = 0) -> None:
    """Three in a row, under a line of text if given, over the `names` of curves that all have in common. A file is
    written whole or not at all."""
    n_rows = max(1, -(-len(found) // 3))
    top = 0.7 if head else 0.4
    bottom = 0.6 + 0.2 * names
    figure = new_figure(15.0, 3.2 * n_rows + top + bottom - 0.7, top, bottom)
    figure.text(0.5, 1 - 0.1 / figure.get_figheight(), head, fontsize=9, ha="center", va="top")
    for place, panel in enumerate(found, 1):
        axes = dress(figure.add_subplot(n_rows, 3, place))
        panel.draw(axes)
        axes.set_title(panel.title, fontsize=10)
    if names:
        shared = figure.axes[0].get_legend_handles_labels()
        figure.legend(*shared, loc="lower left", fontsize=8, frameon=False)
    temporary = file.with_name(f".{file.name}.tmp")
    with writing(file, "--out"):
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, format="png", dpi=100)
        temporary.replace(file)


def new_figure(width: float, height: float, top: float = 0.1, bottom: float = 0.45) -> Any:
    """Inches; margins that are fixed, as those that matplotlib finds take as long as the drawing. Without pyplot, which
    would keep it and choose a backend for the whole process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left=0.8 / width, bottom=bottom / height, right=1 - 0.55 / width, top=1 - top / height,
                           wspace=0.28, hspace=0.36)
    return figure


# ----------------------------------------------------------------------------------------------------------------------
# Several runs


def watch(runs: Sequence[Path], out: Path) -> None:
    """Several runs over each other, in out/curves.png: those whose settings differ in the seed alone are one curve, the
    mean at the steps that all of them have, in a band from the lowest to the highest of them."""
    need(not (out / "run.json").exists(),
         f"--out {out} is a run, whose curves.png this would replace; choose another folder")
    rows_of, settings_of, seed_of = {}, {}, {}
    for run in dict.fromkeys(Path(run).resolve() for run in runs):
        file = run / "run.json"
        need(file.is_file(), f"--watch {run}: no run is there (no {file}); give directories that train.py wrote")
        rows_of[run] = read_rows(run / "metrics.jsonl")
        need(any(row["step"] > 0 for row in rows_of[run]), f"--watch {run}: the run has not finished a step yet")
        with refusing((ValueError, LookupError, TypeError, AttributeError), f"{file}: damaged; leave this run out"):
            args = json.loads(file.read_text())["args"]
            settings_of[run] = {name: str(value) for name, value in args.items() if name not in OF_NO_GROUP}
        seed_of[run] = args.get("seed")
    groups = grouped(settings_of, seed_of)
    lines = [(line, panel.scale != "linear") for panel in PANELS for line in panel.lines if line.several]
    found = [watched(line.metric, line.several, wide, groups, rows_of) for line, wide in lines]
    shown = [panel for panel in found if panel]
    need(shown, f"--watch {' '.join(map(str, runs))}: no metric that is drawn was ever a number; leave it out")
    seeds = max(map(len, groups.values())) > 1
    told = "line: mean of the runs that differ in the seed alone; band: the lowest to the highest of them"
    draw_grid(shown, out / "curves.png", told if seeds else "", len(groups))
    for name, members in groups.items():
        print(f"{name}: {', '.join(map(str, members))}")
    print(f"wrote {out / 'curves.png'}" + (f" ({told})" if seeds else ""))


def grouped(
    settings_of: Mapping[Path, Mapping[str, str]], seed_of: Mapping[Path, object]
) -> dict[str, list[Path]]:
    """Runs of the same settings and different seeds, under the settings in which groups differ."""
    by_settings: dict[tuple, list[Path]] = defaultdict(list)
    for run, settings in settings_of.items():
        # files next to a run may be of its seed alone: the same, whatever its folder is called
        own = str(run.parent)
        by_settings[tuple(sorted((name, value.replace(own, "..")) for name, value in settings.items()))].append(run)
    for key, members in list(by_settings.items()):
        if len({seed_of.get(run) for run in members}) < len(members):  # no, they are others: of other data, say
            del by_settings[key]
            for run in members:
                of_run = settings_of[run] | {"seed": str(seed_of.get(run))}
                by_settings[tuple(sorted(of_run.items()))].append(run)
    kinds = [dict(key) for key in by_settings]
    names = sorted(set(chain.from_iterable(kinds)))
    differing = [name for name in names if len({kind.get(name) for kind in kinds}) > 1]
    found: dict[str, list[Path]] = {}
    for kind, members in zip(kinds, by_settings.values(), strict=True):
        named = " ".join(f"{flag_of(name)} {short(kind.get(name, '-'))}" for name in differing)
        named = named or (members[0].name if len(members) == 1 else "all seeds")
        named += f" ({len(members)} seeds)" if len(members) > 1 else ""
        # values that were shortened may be equal
        found[named if named not in found else f"{named} [{len(found) + 1}]"] = members
    return found


def short(value: str) -> str:
    """Of a path its end, which tells one from another."""
    return value if len(value) <= 40 else f"…{value[-39:]}"


def watched(
    metric: str, title: str, wide: bool, groups: Mapping[str, Sequence[Path]], rows_of: Mapping[Path, Sequence[dict]]
) -> Panel | None:
    """Return the panel of a metric, if any run has it; on a logarithmic axis if it is `wide` and all are above 0."""
    at = {run: dict(zip(*series(rows, metric), strict=True)) for run, rows in rows_of.items()}
    of = {name: [at[run] for run in runs if at[run]] for name, runs in groups.items()}
    if not any(of.values()):
        return None

    def draw(axes: Any) -> None:
        for (name, members), colour in zip(of.items(), COLOURS * len(of), strict=False):
            steps, *bands = list(zip(*band_of(members), strict=True)) or [()] * 4
            steps, mean, low, high = thinned([steps, *map(smoothed, bands)])
            axes.plot(steps, mean, color=colour, linewidth=1.6, label=plain_label(name))
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        some = [value for members in of.values() for member in members for value in member.values()]
        if wide and min(some) > 0 and is_wide(some):
            axes.set_yscale("log")

    return Panel(title, draw=draw)


def band_of(members: Sequence[Mapping[float, float]]) -> list[tuple[float, float, float, float]]:
    """(step, mean, lowest, highest) at each step that all members have."""
    shared = set.intersection(*map(set, members)) if members else set()
    at = {step: [member[step] for member in members] for step in sorted(shared)}
    return [(step, fmean(values), min(values), max(values)) for step, values in at.items()]


# ----------------------------------------------------------------------------------------------------------------------
# The demo


def draw_curve(run: Path, blank: float, out: Path, task: str, metric: str) -> None:
    """Draw the metric (accuracy or reward) on unseen images and the training reward over the steps of a run. `blank` is
    the metric on blank images."""
    rows = read_rows(run / "metrics.jsonl")
    evals, rewards = series(rows, f"eval/{metric}"), series(rows, "reward/mean")
    figure = new_figure(7.2, 3.8, top=0.3, bottom=0.5)
    axes = figure.add_subplot()
    axes.plot(*rewards, color="#9db4d3", linewidth=1, label="reward of the step's samples")
    axes.plot(*evals, "o-", color=BLUE, ms=4, linewidth=2, label=f"greedy {metric}, unseen images")
    axes.axhline(blank, color=RED, linestyle="--", linewidth=1.2, label="the same model, blank images")
    lowest = min(0, blank, *evals[1], *rewards[1])  # a reward may be negative
    axes.set(title=plain_label(task), xlabel="RL step", ylim=(lowest, 1.02), xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(out, dpi=120)
