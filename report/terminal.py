"""The terminal's table with one line per training step, and the throughput metrics in it: tokens/s and MFU."""

from collections.abc import Mapping
from typing import NamedTuple

from tqdm import tqdm

# Dense bf16 TFLOP/s without sparsity, from NVIDIA's datasheets; the first name that is part of the device name counts
PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GH200": 989,
    "A100": 312,
    "L40S": 362,
    "B200": 2250,
    "RTX 4090": 165,
}


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s of a device, given its name in torch, or None if it is unknown."""
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in device), None)


def throughput_metrics(metrics: Mapping[str, float], world: int, device: str | None) -> dict[str, float]:
    """Return tokens/s and MFU of a step, each only if it can be computed. `device`: name of each rank's GPU, if any."""
    throughput = {}
    # with --async-steps the servers sample during the whole step
    seconds = metrics.get("time/step" if "async/staleness" in metrics else "time/rollout")
    if seconds and "rollout/tokens" in metrics:
        throughput["perf/tokens_per_second"] = metrics["rollout/tokens"] / seconds
    peak = peak_flops(device) if device else None
    if peak and metrics.get("time/update") and metrics.get("update/flops"):
        throughput["perf/mfu"] = metrics["update/flops"] / world / metrics["time/update"] / peak
    return throughput


class Column(NamedTuple):
    """A column of the table. `places`: max decimal places; `optional`: shown only if the step has the metric."""

    head: str
    metric: str
    width: int
    places: int
    optional: bool = False


COLUMNS = (  # with five-digit steps and the remaining time a line is 100 characters wide
    Column("reward", "reward/mean", 6, 3),
    Column("same", "reward/zero_std_frac", 4, 2),  # fraction of prompts whose samples all got the same reward
    Column("turn", "episode/turns", 4, 2, optional=True),
    Column("fail", "episode/ended_by/error", 4, 2, optional=True),
    Column("len", "response/tokens", 5, 1),
    Column("gnorm", "policy/grad_norm", 6, 3),
    Column("ent", "policy/entropy", 5, 3),
    Column("tok/s", "perf/tokens_per_second", 5, 0),
    Column("mfu", "perf/mfu", 4, 2, optional=True),
    Column("secs", "time/step", 5, 1),
    Column("roll", "time/rollout", 5, 1),
    Column("rew", "time/reward", 4, 1),
    Column("upd", "time/update", 5, 1),
)


def visible_columns(m: Mapping[str, float]) -> list[Column]:
    """Return the columns to print for the metrics of a step."""
    return [c for c in COLUMNS if not c.optional or c.metric in m]


def header_line(steps: int, m: Mapping[str, float]) -> str:
    """Return the header of the table, which names the columns."""
    names = " ".join(c.head.rjust(c.width) for c in visible_columns(m))
    return f"{'step':<{6 + 2 * len(str(steps))}} {names} {'eta':>8}"


def step_line(step: int, steps: int, m: Mapping[str, float], eta: float) -> str:
    """Return the line of a step, at most 100 characters wide, with "-" for metrics that were not measured."""
    numbers = " ".join(format_fixed_width(m.get(c.metric), c.width, c.places) for c in visible_columns(m))
    remaining = tqdm.format_interval(eta) if eta < 360_000 else f"{eta / 86400:.1f}d"
    return f"step {step:>{len(str(steps))}}/{steps} {numbers} {remaining:>8}"


def format_fixed_width(x: float | None, width: int, places: int) -> str:
    """Return a number in `width` characters, with up to `places` decimal places if they fit. Large numbers are written
    as 12.3k or 1e9, and None as "-"."""
    if x is None:
        return "-".rjust(width)
    texts = [f"{x:.{n}f}" for n in range(places, -1, -1)]
    texts += [f"{x / 1e3:.1f}k", f"{x / 1e3:.0f}k", f"{x:.0e}".replace("e+0", "e"), f"{x:.0e}".replace("e+", "e")]
    return next((text for text in texts if len(text) <= width), texts[-1]).rjust(width)
