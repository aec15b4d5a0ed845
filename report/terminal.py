"""The terminal's table with one line per training step, and the throughput metrics in it: tokens/s and MFU."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tqdm import tqdm

from report.summary import Rows, evaluation_metric, evaluations

MAX_BARS, BAR_WIDTH = 12, 60  # evaluations, characters


def throughput_metrics(metrics: Mapping[str, float], world: int, peak: float | None) -> dict[str, float]:
    """Return tokens/s and MFU of a step, each only if it can be computed. `peak`: FLOP/s of a process's device."""
    throughput = {}
    # with --async-steps the servers sample during the whole step
    seconds = metrics.get("time/step" if "async/staleness" in metrics else "time/rollout")
    if seconds and "rollout/tokens" in metrics:
        throughput["perf/tokens_per_second"] = metrics["rollout/tokens"] / seconds
    seconds = metrics.get("time/step", 0.0) - metrics.get("time/eval", 0.0)
    if seconds and "rollout/prompt_tokens" in metrics:
        tokens = metrics["rollout/prompt_tokens"] + metrics["rollout/tokens"]
        throughput["perf/tokens_per_second_per_gpu"] = tokens / seconds / world
    if peak and metrics.get("time/update") and metrics.get("update/flops"):
        throughput["perf/mfu"] = metrics["update/flops"] / world / metrics["time/update"] / peak
    return throughput


class Column(NamedTuple):
    """A column of the table. `places`: max decimal places; `optional`: shown from the first step that has it."""

    head: str
    metric: str
    width: int
    places: int
    meaning: str
    optional: bool = False


COLUMNS = (  # with five-digit steps and the remaining time a line is 100 characters wide
    Column("reward", "reward/mean", 6, 3, "mean reward"),
    Column("same", "reward/zero_std_frac", 4, 2, "fraction of prompts whose samples all got the same reward"),
    Column("turn", "episode/turns", 4, 2, "turns per episode", optional=True),
    Column("fail", "episode/ended_by/error", 4, 2, "fraction of episodes that failed", optional=True),
    Column("len", "response/tokens", 5, 1, "tokens per response"),
    Column("gnorm", "policy/grad_norm", 6, 3, "gradient norm before clipping"),
    Column("ent", "policy/entropy", 5, 3, "entropy in nats per token"),
    Column("tok/s", "perf/tokens_per_second", 5, 0, "sampled tokens per second"),
    Column("mfu", "perf/mfu", 4, 2, "model FLOPs utilization", optional=True),
    Column("secs", "time/step", 5, 1, "seconds since the last step"),
    Column("roll", "time/rollout", 5, 1, "seconds of rollout"),
    Column("rew", "time/reward", 4, 1, "seconds of waiting for rewards"),
    Column("upd", "time/update", 5, 1, "seconds of the update"),
)


def visible_columns(m: Mapping[str, float], printed: Sequence[Column] = ()) -> list[Column]:
    """Return the columns to print for the metrics of a step: those of the `printed` header, and those that are new."""
    return [c for c in COLUMNS if not c.optional or c.metric in m or c in printed]


def header_line(steps: int, columns: Sequence[Column]) -> str:
    """Return the header of the table, which names the columns."""
    names = " ".join(c.head.rjust(c.width) for c in columns)
    return f"{'step':<{6 + 2 * len(str(steps))}} {names} {'eta':>8}"


def legend(columns: Sequence[Column]) -> str:
    """Return the meanings of the columns, in lines of at most 100 characters."""
    meanings = [f"{c.head}: {c.meaning}" for c in columns]
    return textwrap.fill(f"columns: {'; '.join(meanings)}; eta: time left", 100, subsequent_indent="  ")


def step_line(step: int, steps: int, columns: Sequence[Column], m: Mapping[str, float], eta: float) -> str:
    """Return the line of a step, at most 100 characters wide, with "-" for metrics that were not measured."""
    numbers = " ".join(format_fixed_width(m.get(c.metric), c.width, c.places) for c in columns)
    remaining = tqdm.format_interval(eta) if eta < 360_000 else f"{eta / 86400:.1f}d"
    return f"step {step:>{len(str(steps))}}/{steps} {numbers} {remaining:>8}"


def evaluation_bars(rows: Rows) -> str:
    """Return the first and the newest evaluations of a run as a bar chart, one line per evaluation."""
    metric, scores = evaluation_metric(rows), evaluations(rows)
    scores = scores[:1] + scores[1:][-MAX_BARS:]
    top = max([1.0, *(score[metric] for score in scores)])
    bars = ["#" * round(BAR_WIDTH * max(0.0, score[metric]) / top) for score in scores]
    lines = zip(scores, bars, strict=True)
    return "\n".join(f"  step {score['step']:>5}  {metric} {score[metric]:6.3f} {bar}" for score, bar in lines)


def format_fixed_width(x: float | None, width: int, places: int) -> str:
    """Return a number in `width` characters, with up to `places` decimal places if they fit. Large numbers are written
    as 12.3k or 1e9, and None as "-"."""
    if x is None:
        return "-".rjust(width)
    texts = [f"{x:.{n}f}" for n in range(places, -1, -1)]
    texts += [f"{x / 1e3:.1f}k", f"{x / 1e3:.0f}k", f"{x:.0e}".replace("e+0", "e"), f"{x:.0e}".replace("e+", "e")]
    return next((text for text in texts if len(text) <= width), texts[-1]).rjust(width)
