"""Curves of a run, with matplotlib, which only these need."""

from pathlib import Path

from report.log import read_rows


def draw_curve(run: Path, blank: float, out: Path) -> None:
    """Accuracy on unseen images and training reward over the steps of a run. `blank`: accuracy on blank images."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_rows(run / "metrics.jsonl")
    evals = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    rewards = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    figure, axes = plt.subplots(figsize=(7.2, 3.8), dpi=120)
    axes.plot(*zip(*rewards, strict=True), color="#9db4d3", linewidth=1, label="reward of the step's samples")
    axes.plot(
        *zip(*evals, strict=True), "o-", color="#1f5fa8", ms=4, linewidth=2, label="greedy accuracy, unseen images"
    )
    axes.axhline(blank, color="#c0392b", linestyle="--", linewidth=1.2, label="the same model, blank images")
    axes.set(xlabel="RL step", ylim=(0, 1.02), xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.tight_layout()
    figure.savefig(out)
