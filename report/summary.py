"""What came of a run, from the rows of its metrics.jsonl, so that a run that was cut off and went on says the same."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

LAST = 100  # steps


class Best(NamedTuple):
    step: int
    accuracy: float


def best_evaluation(rows: Sequence[Mapping[str, float | None]]) -> Best | None:
    """Of equal ones the earliest. Step 0 is --model itself."""
    found = [Best(row["step"], row["eval/accuracy"]) for row in rows if row.get("eval/accuracy") is not None]
    return max(found, key=lambda best: best.accuracy, default=None)


def run_summary(out: Path, rows: Sequence[Mapping[str, float | None]]) -> dict:
    """OUT/summary.json: what was not measured is left out. `seconds` are of the steps and of evaluations, set-ups left
    out; `episodes` are responses, or with --env episodes, that were sampled."""
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    summary = {
        "steps": max((row["step"] for row in rows), default=0),
        "episodes": total(rows, "rollout/responses"),
        "tokens": total(rows, "rollout/tokens"),
        "seconds": sum(row.get("time/step") or row.get("time/eval") or 0.0 for row in rows),
    }
    if rewards:
        summary[f"reward_last_{LAST}"] = fmean(rewards[-LAST:])
    if best := best_evaluation(rows):
        folder = out / "checkpoints" / f"step_{best.step:06d}"
        kept = str(folder) if (folder / "trainer.json").is_file() else None
        summary["best"] = {"accuracy": best.accuracy, "step": best.step, "checkpoint": kept}
    return summary


def total(rows: Sequence[Mapping[str, float | None]], name: str) -> int:
    return int(sum(row.get(name) or 0 for row in rows))
