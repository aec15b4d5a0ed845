"""The result of a run, computed from the rows of its metrics.jsonl, so that a resumed run has the same summary as an
uninterrupted one."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Rows = Sequence[Mapping[str, float | None]]
LAST_EPISODES = 100  # in the final reward

ABLATIONS = {  # value of --ablate -> what the model sees instead of the images and videos
    "blank": "white images of the same size",
    "shuffled": "images of other examples",
    "none": "no images at all",
    "first_frame": "videos of their first frame alone",
    "middle_frame": "videos of their middle frame alone",
    "permuted": "videos with their frames in random order",
    "reversed": "videos played backwards",
    "reversed_answer": "reversed videos, graded by reversed_answer",
}
# the rows of a table of ablations; own_videos: only examples with videos, from which the drops of other frames are
SEEN = {"own": "the original images", "own_videos": "the original videos"} | ABLATIONS

TAKEN_AWAY = {  # what an ablation takes away, if it is not the image
    "first_frame": "more than one frame",
    "middle_frame": "more than one frame",
    "permuted": "the order of the frames",
    "reversed": "the order of the frames",
}


def evaluation_metric(rows: Rows) -> str:
    """Return the metric by which a run's evaluations are compared: accuracy, or reward if the task has no accuracy."""
    return "accuracy" if any("eval/accuracy" in row for row in rows) else "reward"


def evaluations(rows: Rows) -> list[dict[str, float]]:
    """Return the metric and the step of each evaluation. Step 0 is --model itself."""
    metric = evaluation_metric(rows)
    return scores(rows, f"eval/{metric}", metric)


def scores(rows: Rows, name: str, metric: str) -> list[dict[str, float]]:
    """Return the values of a metric, as `metric`, each with its step."""
    return [{metric: row[name], "step": row["step"]} for row in rows if row.get(name) is not None]


def best_evaluation(rows: Rows) -> dict[str, float]:
    """Return the best evaluation, the earliest of equal ones, or {} if there is none."""
    return max(evaluations(rows), key=lambda score: score[evaluation_metric(rows)], default={})


def run_summary(out: Path, rows: Rows) -> dict:
    """Return the contents of OUT/summary.json without values that were not measured. `seconds` is the time of steps and
    evaluations, without set-up; `total_episodes` is the number of sampled responses, or of episodes with --env. `best`
    is the best evaluation: of equal ones the earliest with a checkpoint, else the earliest."""
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
        equal = [score | {"checkpoint": saved_checkpoint(out, score["step"])} for score in evaluations(rows)
                 if score | {"step": best["step"]} == best]  # fmt: skip
        best = next((score for score in equal if score["checkpoint"]), equal[0])
        summary |= {"final_evaluation": evaluations(rows)[-1], "best": best}
    return summary


def saved_checkpoint(out: Path, step: int) -> str | None:
    """Return the folder of a step's checkpoint, or None if it is not saved."""
    folder = out / "checkpoints" / f"step_{step:06d}"
    return str(folder) if (folder / "trainer.json").is_file() else None


def final_reward(rows: Rows) -> float | None:
    """Return the mean reward of the last LAST_EPISODES episodes. A step that is only partly among them counts with its
    mean reward."""
    total = counted = 0.0
    for row in reversed(rows):
        if row.get("reward/mean") is not None:
            n = min(row.get("rollout/responses") or 0, LAST_EPISODES - counted)
            total, counted = total + n * row["reward/mean"], counted + n
    return total / counted if counted else None


def sum_metric(rows: Sequence[Mapping[str, float | None]], name: str) -> int:
    """Return the sum of a metric over all rows."""
    return int(sum(row.get(name) or 0 for row in rows))
