"""Curves of runs, with matplotlib, which only these need: panels for a page, curves.png, and several runs over each
other. Figures are matplotlib's objects alone: no backend is chosen, nothing global is changed."""

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
GREY = "#8b95a5"
OF_NO_GROUP = {"seed", "out", "resume", "keep", "save_every", "keep_best", "track", "timeout_minutes", "grace_seconds"}
# no named rewards, or of another scale
COUNTS = {"reward/errors", "reward/timeouts", "reward/constant_groups", "reward/mean", "reward/km"}

Series = tuple[list[float], list[float]]  # steps, and a value at each


class Panel(NamedTuple):
    """What belongs together: `draw` puts it on axes; `note` says what is healthy, and what to think otherwise."""

    title: str
    note: str
    draw: Callable[[Any], None]


def series(rows: Iterable[Mapping[str, Any]], name: str) -> Series:
    """A metric at the steps that have it."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def thinned(curve: Series, points: int = POINTS) -> Series:
    """At most so many points: means of neighbours, in steps and values."""
    size = -(-len(curve[0]) // points)
    if size <= 1:
        return curve
    starts = range(0, len(curve[0]), size)
    return [fmean(curve[0][i : i + size]) for i in starts], [fmean(curve[1][i : i + size]) for i in starts]


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and those around it, as many on both sides."""
    half = len(values) // SMOOTH // 2
    reach = (min(half, i, len(values) - 1 - i) for i in range(len(values)))
    return [fmean(values[i - k : i + k + 1]) for i, k in enumerate(reach)]


# ----------------------------------------------------------------------------------------------------------------------
# The panels of a run


def panels(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Those for which something was measured."""
    names = set(chain.from_iterable(rows))
    parts = sorted(n for n in names - COUNTS if re.fullmatch(r"reward/[^/=]+", n))
    kls = {"rollout/kl": "engine", "policy/kl_ref": "reference", "policy/kl_old": "policy before the update"}
    kls = {name: label for name, label in kls.items() if any(value > 0 for value in series(rows, name)[1])}
    found = []

    def panel(title: str, needed: Iterable[str], note: str, draw: Callable[[Any], None]) -> None:
        if any(series(rows, name)[0] for name in needed):
            found.append(Panel(title, note, draw))

    def reward(axes: Any) -> None:
        for name, colour in zip(parts, COLOURS[1:] * len(parts), strict=False):
            draw_smooth(axes, series(rows, name), plain_label(name.removeprefix("reward/")), colour, 1.2)
        draw_smooth(axes, series(rows, "reward/mean"), "mean", COLOURS[0], 2.0, raw=True)
        constant = series(rows, "reward/constant_groups")
        draw_smooth(axes, constant, "groups of equal rewards (share)", GREY, 1.0, "dotted")
        legend(axes)

    def share_axes(axes: Any, label: str) -> Any:
        """On the right, from 0 to 1."""
        other = dress(axes.twinx())
        other.set_ylabel(label, color=COLOURS[4])
        other.set_ylim(-0.02, 1.02)
        other.spines["right"].set_visible(True)
        other.grid(False)
        return other

    def length(axes: Any) -> None:
        draw_smooth(axes, series(rows, "response/tokens"), "tokens", COLOURS[0], 1.8, raw=True)
        axes.set_ylabel("tokens", color=COLOURS[0])
        axes.set_ylim(bottom=0)
        other = share_axes(axes, "share truncated")
        draw_smooth(other, series(rows, "response/truncated"), "truncated (share)", COLOURS[4], 1.4)

    def staleness(axes: Any) -> None:
        other = share_axes(axes, "share of time")
        draw_smooth(other, series(rows, "async/trainer_idle"), "trainer idle", COLOURS[4], 1.2)
        draw_smooth(other, series(rows, "async/servers_idle"), "servers idle", COLOURS[1], 1.2)
        draw_smooth(axes, series(rows, "async/staleness"), "mean", COLOURS[0], 1.8, raw=True)
        draw_smooth(axes, series(rows, "async/staleness_max"), "oldest", COLOURS[0], 1.0, "dotted")
        axes.set_ylabel("syncs", color=COLOURS[0])
        axes.set_ylim(-0.02, 1.2 * max(1, *series(rows, "async/staleness_max")[1]))
        other.set_ylim(-0.02, 1.2)  # room for the legend
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.legend(*legend_of(axes, other), frameon=False, fontsize=7, ncols=4, loc="upper center")

    def kl(axes: Any) -> None:
        for (name, label), colour in zip(kls.items(), COLOURS, strict=False):
            draw_smooth(axes, positive(series(rows, name)), label, colour, 1.6, raw=True)
        axes.set_yscale("log")
        axes.set_ylabel("nats")
        legend(axes)

    def line(name: str, unit: str, log: bool = False) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            curve = positive(series(rows, name)) if log else series(rows, name)
            draw_smooth(axes, curve, name, COLOURS[0], 1.8, raw=True)
            axes.set_yscale("log" if log else "linear")
            axes.set_ylabel(unit)
            if not log:
                axes.set_ylim(min(0.0, *curve[1]), 1.05 * max(1e-9, *curve[1]))

        return draw

    norms = [x for x in series(rows, "policy/grad_norm")[1] if x > 0]
    panel("Reward", ["reward/mean"], "Rises; the parts say what it is that rises. Flat with a share of equal rewards "
          "near 1: too hard, too easy, or the reward never matches.", reward)
    panel("Evaluation", [f"eval/{metric_of(rows)}"], "Rises. The band is the 95% interval: what moves within it may "
          "be chance. Falling while the reward rises: the reward is gamed, or training data is learnt by heart.",
          lambda axes: draw_evaluation(axes, rows))
    panel("Entropy", ["policy/entropy"], "Falls slowly. Near 0 while the task is not solved: nothing is left to "
          "explore; raise --clip-high or --entropy-coef, lower --lr. Rising without end: steps are too large.",
          line("policy/entropy", "nats a token"))
    panel("KL", kls, "To the engine: steady; below 1e-6 in fp32, some 1e-3 in bf16, more with --async-steps; growing: "
          "sync or engine are at fault, see --tis-cap. To the reference: grows slowly; fast: --kl-coef. To before the "
          "update: below 0.1.", kl)
    panel("Response length", ["response/tokens"], "Grows or shrinks with what pays; a collapse is often a reward "
          "that is gamed. Truncated stays small; rising: raise --max-new-tokens, or --truncated penalise.", length)
    panel("Gradient norm", ["policy/grad_norm"] if norms else [], "Before clipping. Steady, with single peaks; always "
          "far above --max-grad-norm: the learning rate is what clipping leaves of it. Growing: lower --lr.",
          line("policy/grad_norm", "", log=bool(norms) and max(norms) > 30 * min(norms)))
    panel("Staleness", ["async/staleness"], "Of the tokens trained on, at most --async-steps. The trainer without "
          "work: more servers; the servers: fewer, or more processes that train.", staleness)
    panel("Time", ["time/step"], "The rollout takes most, with --async-steps what the trainer waits for it. Reward, "
          "pack and sync are small; else see docs/troubleshooting.md, slow steps.", lambda axes: draw_time(axes, rows))
    return found


def legend_of(*axes: Any) -> tuple[list, list]:
    """Lines and labels of several axes that share a legend."""
    found = [one.get_legend_handles_labels() for one in axes]
    return list(chain.from_iterable(lines for lines, _ in found)), list(chain.from_iterable(told for _, told in found))


def positive(curve: Series) -> Series:
    """What a logarithmic axis can show."""
    kept = [(step, value) for step, value in zip(*curve, strict=True) if value > 0]
    return [step for step, _ in kept], [value for _, value in kept]


def draw_smooth(
    axes: Any, curve: Series, label: str, colour: str, width: float, style: str = "-", raw: bool = False
) -> None:
    """A running mean; with `raw` what was measured too, paler. Few points are drawn as they are, with marks."""
    if not curve[0]:
        return
    steps, values = thinned(curve)
    few = len(steps) <= SMOOTH
    if raw and not few:
        axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3)
    mark = {"marker": "o", "markersize": 2.5} if few and len(steps) < 8 else {}
    axes.plot(steps, smoothed(values), color=colour, linestyle=style, linewidth=width, label=label, **mark)


def draw_evaluation(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    metric = f"eval/{metric_of(rows)}"
    steps, values = series(rows, metric)
    with_interval = [row for row in rows if row.get(f"{metric}_low") is not None]
    bounds = [series(with_interval, f"{metric}_{end}") for end in ("low", "high")]
    axes.fill_between(bounds[0][0], bounds[0][1], bounds[1][1], color=COLOURS[0], alpha=0.18, linewidth=0)
    axes.plot(steps, values, "o-", color=COLOURS[0], markersize=3, linewidth=1.8)
    axes.set_ylabel(metric_of(rows))
    if 0 <= min(values) and max(values) <= 1:
        axes.set_ylim(-0.02, 1.02)


def draw_time(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Seconds a step, stacked; what no part accounts for is "other"."""
    rows = [row for row in rows if row.get("time/step") is not None]
    names = sorted({name for name in chain.from_iterable(rows) if name.startswith("time/")} - {"time/step"})
    order = ["time/rollout", "time/reward", "time/pack", "time/logprobs", "time/update", "time/sync", "time/eval"]
    names = [n for n in order if n in names] + [n for n in names if n not in order]
    steps = [row["step"] for row in rows]
    layers = [[row.get(name) or 0.0 for row in rows] for name in names]
    layers.append([max(0.0, row["time/step"] - sum(parts)) for row, *parts in zip(rows, *layers, strict=True)])
    thin = [thinned((steps, layer), 120) for layer in layers]
    labels = [name.removeprefix("time/") for name in names] + ["other"]
    axes.stackplot(thin[0][0], *(values for _, values in thin), labels=labels, colors=[*COLOURS[: len(names)], GREY],
                   linewidth=0)
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
    """Of a metrics.jsonl's rows, for a page: each panel an <svg> whose letters are paths, so that it needs no font."""
    curves = []
    for panel in panels(rows):
        figure = new_figure(4.9, 2.7)
        panel.draw(dress(figure.add_subplot()))
        figure.savefig(file := io.StringIO(), format="svg")
        svg = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
        svg = re.sub(r"\n\s*", "\n", svg[svg.index("<svg") :])
        curves.append(Curve(panel.title, svg, panel.note))
    return curves


def draw_curves(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """curves.png: all panels of a run."""
    draw_grid(panels(rows), file)


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
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower left", fontsize=8, frameon=False)
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
    sides = {"left": 0.8 / width, "right": 1 - 0.55 / width, "wspace": 0.28, "hspace": 0.36}
    figure.subplots_adjust(top=1 - top / height, bottom=bottom / height, **sides)
    return figure


# ----------------------------------------------------------------------------------------------------------------------
# Several runs


WATCHED = (  # metric, the title of its panel
    ("reward/mean", "Reward"),
    ("eval/accuracy", "Evaluation: accuracy"),
    ("eval/reward", "Evaluation: reward"),
    ("reward/constant_groups", "Share of groups of equal rewards"),
    ("policy/entropy", "Entropy (nats)"),
    ("rollout/kl", "KL to the engine (nats)"),
    ("async/staleness", "Staleness (syncs)"),
    ("policy/kl_ref", "KL to the reference (nats)"),
    ("response/tokens", "Response length (tokens)"),
    ("response/truncated", "Share truncated"),
    ("policy/grad_norm", "Gradient norm"),
    ("time/step", "Seconds a step"),
)
LOGARITHMIC = {"rollout/kl", "policy/kl_ref", "policy/grad_norm"}


def watch(runs: Sequence[Path], out: Path) -> None:
    """Several runs over each other, in out/curves.png: those whose settings differ in the seed alone are one curve, the
    mean at the steps that all of them have, in a band from the lowest to the highest of them."""
    told = f"--out {out} is a run, whose curves.png this would replace; choose another folder"
    need(not (out / "run.json").exists(), told)
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
    found = [watched(name, title, groups, rows_of) for name, title in WATCHED]
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
    by_settings: dict[tuple, list[Path]] = {}
    for run, settings in settings_of.items():
        # files next to a run may be of its seed alone: the same, whatever its folder is called
        own = str(run.parent)
        key = tuple(sorted((name, value.replace(own, "..")) for name, value in settings.items()))
        by_settings.setdefault(key, []).append(run)
    for key, members in list(by_settings.items()):
        if len({seed_of.get(run) for run in members}) < len(members):  # no, they are others: of other data, say
            del by_settings[key]
            for run in members:
                of_run = settings_of[run] | {"seed": str(seed_of.get(run))}
                by_settings.setdefault(tuple(sorted(of_run.items())), []).append(run)
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
    of = {name: [at[run] for run in runs] for name, runs in groups.items()}
    if not any(map(any, of.values())):
        return None

    def draw(axes: Any) -> None:
        for (name, members), colour in zip(of.items(), COLOURS * len(of), strict=False):
            band = band_of([member for member in members if member])
            steps = [step for step, *_ in band]
            means, lowest, highest = ([row[i] for row in band] for i in (1, 2, 3))
            axes.plot(*thinned((steps, smoothed(means))), color=colour, linewidth=1.6, label=plain_label(name))
            thin = [thinned((steps, smoothed(values))) for values in (lowest, highest)]
            axes.fill_between(thin[0][0], thin[0][1], thin[1][1], color=colour, alpha=0.15, linewidth=0)
        some = list(chain.from_iterable(member.values() for member in chain.from_iterable(of.values())))
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
    label = f"greedy {metric}, unseen images"
    axes.plot(*evals, "o-", color="#1f5fa8", ms=4, linewidth=2, label=label)
    axes.axhline(blank, color="#c0392b", linestyle="--", linewidth=1.2, label="the same model, blank images")
    lowest = min(0, blank, *evals[1], *rewards[1])  # a reward may be negative
    axes.set(title=plain_label(task), xlabel="RL step", ylim=(lowest, 1.02), xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(out, dpi=120)
