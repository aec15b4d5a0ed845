"""Curves of a run, with matplotlib, which only these need."""

from pathlib import Path

from report.log import read_rows


def draw_curve(run: Path, blank: float, out: Path, task: str, metric: str) -> None:
    """Accuracy on unseen images and training reward over the steps of a run. `blank`: accuracy on blank images.

    `metric`: what the task has for it, accuracy or reward.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_rows(run / "metrics.jsonl")
    evals = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    rewards = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    figure, axes = plt.subplots(figsize=(7.2, 3.8), dpi=120)
    axes.plot(*zip(*rewards, strict=True), color="#9db4d3", linewidth=1, label="reward of the step's samples")
    label = f"greedy {metric}, unseen images"
    axes.plot(*zip(*evals, strict=True), "o-", color="#1f5fa8", ms=4, linewidth=2, label=label)
    axes.axhline(blank, color="#c0392b", linestyle="--", linewidth=1.2, label="the same model, blank images")
    lowest = min(0, blank, *(value for _, value in evals + rewards))  # a reward may be negative
    axes.set(title=task, xlabel="RL step", ylim=(lowest, 1.02), xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.tight_layout()
    figure.savefig(out)


def run_curves(rows):
    return []


def watch(runs, out):
    pass
