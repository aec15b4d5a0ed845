"""A step as a line of a table on the terminal, and what is derived for it: tokens a second, and how busy a GPU was."""

from collections.abc import Mapping
from typing import NamedTuple

from tqdm import tqdm

# Dense bf16 TFLOP/s without sparsity, as NVIDIA's datasheets have them; the first name that a device's contains counts
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
    """Of a device by torch's name of it; None: unknown."""
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in device), None)


def throughput_metrics(metrics: Mapping[str, float], world: int, device: str | None) -> dict[str, float]:
    """What follows from a step's metrics; nothing where it cannot be known. `device`: the name of each rank's GPU."""
    found = {}
    # with --async-steps sampling goes on all the time
    seconds = metrics.get("time/step" if "async/staleness" in metrics else "time/rollout")
    if seconds and "rollout/tokens" in metrics:
        found["perf/tokens_per_second"] = metrics["rollout/tokens"] / seconds
    peak = peak_flops(device) if device else None
    if peak and metrics.get("time/update") and metrics.get("update/flops"):
        found["perf/mfu"] = metrics["update/flops"] / world / metrics["time/update"] / peak
    return found


class Column(NamedTuple):
    """`places` after the point where there is room for them; an optional one is there if a step has its metric."""

    head: str
    metric: str
    width: int
    places: int
    optional: bool = False


COLUMNS = (  # 100 wide together with five-digit steps and the time that is left
    Column("reward", "reward/mean", 6, 3),
    Column("same", "reward/zero_std_frac", 4, 2),  # share of prompts whose samples all got the same reward
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
    return [c for c in COLUMNS if not c.optional or c.metric in m]


def header_line(steps: int, m: Mapping[str, float]) -> str:
    """Over the lines of steps."""
    names = " ".join(c.head.rjust(c.width) for c in visible_columns(m))
    return f"{'step':<{6 + 2 * len(str(steps))}} {names} {'eta':>8}"


def step_line(step: int, steps: int, m: Mapping[str, float], eta: float) -> str:
    """At most 100 wide; "-" where nothing was measured."""
    numbers = " ".join(format_fixed_width(m.get(c.metric), c.width, c.places) for c in visible_columns(m))
    left = tqdm.format_interval(eta) if eta < 360_000 else f"{eta / 86400:.1f}d"
    return f"step {step:>{len(str(steps))}}/{steps} {numbers} {left:>8}"


def format_fixed_width(x: float | None, width: int, places: int) -> str:
    """A number in so many columns, with as many places as fit; thousands as 12.3k, what is larger as 1e9."""
    if x is None:
        return "-".rjust(width)
    texts = [f"{x:.{n}f}" for n in range(places, -1, -1)]
    texts += [f"{x / 1e3:.1f}k", f"{x / 1e3:.0f}k", f"{x:.0e}".replace("e+0", "e"), f"{x:.0e}".replace("e+", "e")]
    return next((text for text in texts if len(text) <= width), texts[-1]).rjust(width)
