"""What came of a run, from the rows of its metrics.jsonl, so that a run that was cut off and went on says the same."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Rows = Sequence[Mapping[str, float | None]]
LAST_STEPS = 100  # episodes

ABLATIONS = {  # --ablate: what the model sees instead of its images
    "blank": "white images of the same size",
    "shuffled": "images of other examples",
    "none": "no images at all",
}


def evaluation_metric(rows: Rows) -> str:
    """Return what a run's evaluations are compared by: accuracy, or reward if the task has no accuracy."""
    return "accuracy" if any("eval/accuracy" in row for row in rows) else "reward"


def evaluations(rows: Rows) -> list[dict[str, float]]:
    """Return the metric and the step of each evaluation. Step 0 is --model itself."""
    metric = evaluation_metric(rows)
    found = [{metric: row.get(f"eval/{metric}"), "step": row["step"]} for row in rows]
    return [scored for scored in found if scored[metric] is not None]


def best_evaluation(rows: Rows) -> dict[str, float]:
    """Return the best evaluation, of equal ones the earliest; {} if there is none."""
    return max(evaluations(rows), key=lambda scored: scored[evaluation_metric(rows)], default={})


def run_summary(out: Path, rows: Rows) -> dict:
    """Return what OUT/summary.json holds; what was not measured is left out. `seconds` are of steps and evaluations,
    without set-up; `total_episodes` counts sampled responses, or with --env episodes."""
    summary = {
        "total_steps": max((row["step"] for row in rows), default=0),
        "total_episodes": sum_metric(rows, "rollout/responses"),
        "tokens": sum_metric(rows, "rollout/tokens"),
        "seconds": sum(row.get("time/step") or row.get("time/eval") or 0.0 for row in rows),
        "metrics": str(out / "metrics.jsonl"),
    }
    if (reward := final_reward(rows)) is not None:
        summary["final_reward"] = reward
    if best := best_evaluation(rows):
        folder = out / "checkpoints" / f"step_{best['step']:06d}"
        kept = str(folder) if (folder / "trainer.json").is_file() else None
        summary |= {"final_evaluation": evaluations(rows)[-1], "best": best | {"checkpoint": kept}}
    return summary


def final_reward(rows: Rows) -> float | None:
    """Return the mean reward of the last LAST episodes. Of a step that is only partly among them, its mean counts."""
    earned = counted = 0.0
    for row in reversed(rows):
        if row.get("reward/mean") is not None:
            n = min(row.get("rollout/responses") or 0, LAST_STEPS - counted)
            earned, counted = earned + n * row["reward/mean"], counted + n
    return earned / counted if counted else None


def sum_metric(rows: Sequence[Mapping[str, float | None]], name: str) -> int:
    return int(sum(row.get(name) or 0 for row in rows))
