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
from report.page import Curve
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


class Panel(NamedTuple):
    """What belongs together: `draw` puts it on axes; `note` says what is healthy, and what to think otherwise."""

    title: str
    note: str
    draw: Callable[[Any], None]


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
    """Return the panels for which something was measured."""
    measured = {name for row in rows for name, value in row.items() if value is not None}
    parts = sorted(n for n in measured - COUNTS if re.fullmatch(r"reward/[^/=]+", n))
    kls = {"rollout/kl": "engine", "policy/kl_ref": "reference", "policy/kl_old": "policy before the update"}
    kls = {name: label for name, label in kls.items() if series(rows, name, positive=True)[0]}
    norms = series(rows, "policy/grad_norm", positive=True)[1]

    def reward(axes: Any) -> None:
        for name, colour in zip(parts, COLOURS[1:] * len(parts), strict=False):
            draw_line(axes, rows, name, plain_label(name.removeprefix("reward/")), colour, 1.2)
        draw_line(axes, rows, "reward/mean", "mean", BLUE, 2.0, raw=True)
        draw_line(axes, rows, "reward/constant_groups", "groups of equal rewards (share)", GREY, 1.0, "dotted")
        legend(axes)

    def entropy(axes: Any) -> None:
        draw_alone(axes, rows, "policy/entropy")
        axes.set_ylabel("nats a token")

    def kl(axes: Any) -> None:
        axes.set_yscale("log")
        for (name, label), colour in zip(kls.items(), COLOURS, strict=False):
            draw_line(axes, rows, name, label, colour, 1.6, raw=True)
        axes.set_ylabel("nats")
        legend(axes)

    def length(axes: Any) -> None:
        draw_line(axes, rows, "response/tokens", "tokens", BLUE, 1.8, raw=True)
        axes.set_ylabel("tokens", color=BLUE)
        axes.set_ylim(bottom=0)
        draw_line(share_axes(axes, "share truncated"), rows, "response/truncated", "truncated (share)", RED, 1.4)

    def norm(axes: Any) -> None:
        if max(norms) > 30 * min(norms):
            axes.set_yscale("log")
        draw_alone(axes, rows, "policy/grad_norm")

    def staleness(axes: Any) -> None:
        other = share_axes(axes, "share of time")
        draw_line(other, rows, "async/trainer_idle", "trainer idle", RED, 1.2)
        draw_line(other, rows, "async/servers_idle", "servers idle", ORANGE, 1.2)
        draw_line(axes, rows, "async/staleness", "mean", BLUE, 1.8, raw=True)
        draw_line(axes, rows, "async/staleness_max", "oldest", BLUE, 1.0, "dotted")
        axes.set_ylabel("syncs", color=BLUE)
        axes.set_ylim(-0.02, 1.2 * max(1, *series(rows, "async/staleness_max")[1]))
        other.set_ylim(-0.02, 1.2)  # room for the legend
        axes.yaxis.get_major_locator().set_params(integer=True)
        (lines, labels), (others, told) = axes.get_legend_handles_labels(), other.get_legend_handles_labels()
        axes.legend(lines + others, labels + told, frameon=False, fontsize=7, ncols=4, loc="upper center")

    table = (  # title, whether it is shown, note, how it is drawn
        ("Reward", "reward/mean" in measured, "Rises; the parts say what it is that rises. Flat with a share of equal "
         "rewards near 1: too hard, too easy, or the reward never matches.", reward),
        ("Evaluation", f"eval/{metric_of(rows)}" in measured, "Rises. The band is the 95% interval: what moves within "
         "it may be chance. Falling while the reward rises: the reward is gamed, or training data is learnt by heart.",
         partial(draw_evaluation, rows=rows)),
        ("Entropy", "policy/entropy" in measured, "Falls slowly. Near 0 while the task is not solved: nothing is left "
         "to explore; raise --clip-high or --entropy-coef, lower --lr. Rising without end: steps are too large.",
         entropy),
        ("KL", kls, "To the engine: steady; below 1e-6 in fp32, some 1e-3 in bf16, more with --async-steps; growing: "
         "sync or engine are at fault, see tis_cap. To the reference: grows slowly; fast: --kl-coef. To before the "
         "update: below 0.1.", kl),
        ("Response length", "response/tokens" in measured, "Grows or shrinks with what pays; a collapse is often a "
         "reward that is gamed. Truncated stays small; rising: raise --max-new-tokens, or --truncated penalise.",
         length),
        ("Gradient norm", norms, "Before clipping. Steady, with single peaks; always far above --max-grad-norm: the "
         "learning rate is what clipping leaves of it. Growing: lower --lr.", norm),
        ("Staleness", "async/staleness" in measured, "Of the tokens trained on, at most --async-steps. The trainer "
         "without work: more servers; the servers: fewer, or more processes that train.", staleness),
        ("Time", "time/step" in measured, "The rollout takes most, with --async-steps what the trainer waits for it. "
         "Reward, pack and sync are small; else see docs/troubleshooting.md, slow steps.",
         partial(draw_time, rows=rows)),
    )  # fmt: skip
    return [Panel(title, note, draw) for title, shown, note, draw in table if shown]


def share_axes(axes: Any, label: str) -> Any:
    """Return a second y axis, on the right, from 0 to 1."""
    other = dress(axes.twinx())
    other.set_ylabel(label, color=RED)
    other.set_ylim(-0.02, 1.02)
    other.spines["right"].set_visible(True)
    other.grid(False)
    return other


def draw_line(
    axes: Any, rows: Sequence[Mapping[str, Any]], name: str, label: str, colour: str, width: float, style: str = "-",
    raw: bool = False,
) -> None:  # fmt: skip
    """Draw the running mean of a metric; with `raw` the measured values too, paler. Few points are drawn as they are,
    with marks. A logarithmic axis shows only what is above 0."""
    steps, values = thinned(series(rows, name, positive=axes.get_yscale() == "log"))
    if not steps:
        return
    if raw and len(steps) > SMOOTH:
        axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3)
    mark = "o" if len(steps) < 8 else None
    axes.plot(steps, smoothed(values), color=colour, linestyle=style, linewidth=width, label=label, marker=mark,
              markersize=2.5)


def draw_alone(axes: Any, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    """Draw a metric that has a panel to itself; on a linear axis from 0, or below if it is negative."""
    draw_line(axes, rows, name, name, BLUE, 1.8, raw=True)
    if axes.get_yscale() == "linear":
        values = series(rows, name)[1]
        axes.set_ylim(min(0.0, *values), 1.05 * max(1e-9, *values))


def draw_evaluation(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    metric = f"eval/{metric_of(rows)}"
    (steps, low), (_, high) = (series(rows, f"{metric}_{end}") for end in ("low", "high"))
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.18, linewidth=0)
    steps, values = series(rows, metric)
    axes.plot(steps, values, "o-", color=BLUE, markersize=3, linewidth=1.8)
    axes.set_ylabel(metric_of(rows))
    if 0 <= min(values) and max(values) <= 1:
        axes.set_ylim(-0.02, 1.02)


def draw_time(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the seconds of a step, stacked; what no part accounts for is "other"."""
    rows = [row for row in rows if row.get("time/step") is not None]
    names = {name[5:] for name in chain.from_iterable(rows) if name.startswith("time/")} - {"step"}
    names = [name for name in dict.fromkeys(TIMES + sorted(names)) if name in names]
    layers = [[row.get(f"time/{name}") or 0.0 for row in rows] for name in names]
    layers.append([max(0.0, row["time/step"] - sum(parts)) for row, *parts in zip(rows, *layers, strict=True)])
    steps, *layers = thinned([[row["step"] for row in rows], *layers], 120)
    axes.stackplot(steps, *layers, labels=[*names, "other"], colors=[*COLOURS[: len(names)], GREY], linewidth=0)
    axes.set_ylabel("seconds")
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


WATCHED = {  # metric, the title of its panel
    "reward/mean": "Reward",
    "eval/accuracy": "Evaluation: accuracy",
    "eval/reward": "Evaluation: reward",
    "reward/constant_groups": "Share of groups of equal rewards",
    "policy/entropy": "Entropy (nats)",
    "rollout/kl": "KL to the engine (nats)",
    "async/staleness": "Staleness (syncs)",
    "policy/kl_ref": "KL to the reference (nats)",
    "response/tokens": "Response length (tokens)",
    "response/truncated": "Share truncated",
    "policy/grad_norm": "Gradient norm",
    "time/step": "Seconds a step",
}
LOGARITHMIC = {"rollout/kl", "policy/kl_ref", "policy/grad_norm"}


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
    found = [watched(name, title, groups, rows_of) for name, title in WATCHED.items()]
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
    metric: str, title: str, groups: Mapping[str, Sequence[Path]], rows_of: Mapping[Path, Sequence[dict]]
) -> Panel | None:
    """The panel of a metric, if any run has it."""
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
        if metric in LOGARITHMIC and min(some) > 0 and max(some) > 30 * min(some):
            axes.set_yscale("log")

    return Panel(title, "", draw)


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
