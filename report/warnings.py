"""Warnings that name a remedy, from the rows of metrics.jsonl. Each is said once, and again only after what it warned
of was over. The thresholds are rules of thumb that healthy runs of our tasks stay far away from."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

FLAT_STEPS = 5  # without a signal
WINDOW = 5  # measured values that a median is of: two odd steps are no trend
ENTROPY_LEFT = 0.1  # of what the run began with: less than that, and nearly all tokens are certain
SOLVED_ACCURACY = 0.9  # mean reward part "accuracy" from which low entropy is what a learnt task looks like
LENGTH_LEFT = 0.25  # of the length that the run began with: reasoning is gone by then
LENGTH_MIN = 16.0  # tokens at the beginning: shorter answers have nothing to lose
TRUNCATED = 0.25  # share of responses that were cut: an eighth of a batch may be bad luck, a quarter is not
TRUNCATED_RISE = 0.15  # over the least that the run has had: where it was high from the start, it does not rise
MISMATCH = 5e-3  # nats, k3: bf16 engines are some 1e-3 away from their trainer
MISMATCH_RISE = 5.0  # times what the run began with

WATCHED = ("policy/entropy", "reward/accuracy", "response/tokens", "response/truncated", "mismatch/kl")


class Medians(NamedTuple):
    """The first, the least and the last median of WINDOW values of a metric."""

    first: float
    least: float
    now: float


class RunWarnings:
    """`feed` it each row in turn, also those of a run that goes on; it returns the lines that are to be said."""

    def __init__(self, out: Path, compared: bool = True):
        """`compared`: does the advantage compare the samples of a prompt? Else what differs between prompts teaches."""
        self.out = out
        self.compared = compared
        self.flat_steps = 0
        self.values: dict[str, list[float]] = {name: [] for name in WATCHED}
        self.medians: dict[str, list[float]] = {name: [] for name in WATCHED}  # of WINDOW values each
        self.said: set[str] = set()
        self.stale = False  # once a step trained on tokens of older weights: mismatch/kl compares other weights then

    def update(self, row: Mapping[str, float | None]) -> list[str]:
        if "reward/zero_std_frac" not in row:  # an evaluation alone
            return []
        flat = row["reward/zero_std_frac"] == 1 and (self.compared or not row.get("update/steps"))
        self.flat_steps = self.flat_steps + 1 if flat else 0
        self.stale = self.stale or row.get("async/staleness", 0) > 0
        for name, values in self.values.items():
            if row.get(name) is not None and math.isfinite(row[name]):
                values.append(row[name])
                if len(values) >= WINDOW:
                    self.medians[name].append(median(values[-WINDOW:]))
        found = self._found(row)
        lines = [f"warning: {line}" for kind, line in found.items() if kind not in self.said]
        self.said = set(found)
        return lines

    def _found(self, row: Mapping[str, float | None]) -> dict[str, str]:
        """Return what is to be warned of at this step. What was measured too rarely is NaN, above and below nothing."""
        found = {}
        if self.flat_steps >= FLAT_STEPS:
            mean = f" (mean {row['reward/mean']:.3g})" if row.get("reward/mean") is not None else ""
            found["flat"] = (
                f"in the last {self.flat_steps} steps all samples of a prompt got the same reward{mean}, so rewards "
                f"teach nothing; look at the samples in {self.out / 'rollouts'}, at what the reward expects, and at "
                "--temperature"
            )
        entropy, right, length, truncated, kl = map(self._medians, WATCHED)
        if entropy.now < ENTROPY_LEFT * entropy.first and not right.now >= SOLVED_ACCURACY:
            reached = "" if math.isnan(right.now) else f" at an accuracy of {right.now:.2f}"
            found["entropy"] = (
                f"policy/entropy collapsed to {entropy.now:.3g}, from {entropy.first:.3g} at the beginning{reached}: "
                "hardly anything is left to explore; raise --clip-high (--algo dapo), --entropy-coef or --kl-coef, or "
                "lower --lr"
            )
        if length.first >= LENGTH_MIN and length.now < LENGTH_LEFT * length.first:
            found["length"] = (
                f"responses shrank to {length.now:.3g} tokens, from {length.first:.3g}: look in "
                f"{self.out / 'rollouts'} whether the reward pays for saying less; mend it, or --kl-coef, "
                "--loss-agg token"
            )
        if truncated.now >= max(TRUNCATED, truncated.least + TRUNCATED_RISE):
            found["truncated"] = (
                f"response/truncated rose to {truncated.now:.2f}, from {truncated.least:.2f}: answers are cut before "
                "they come; raise --max-new-tokens, or --truncated penalise (or mask)"
            )
        if not self.stale and kl.now >= max(MISMATCH, MISMATCH_RISE * kl.first):
            found["mismatch"] = (
                f"mismatch/kl grew to {kl.now:.3g} nats, from {kl.first:.3g}: engine and trainer drift apart; "
                "--algo-args tis_cap=2 ratio_mask=0.5,2 bounds what it does, --dtype float32 or --rollout hf shows where "
                "it comes from"
            )
        return found

    def _medians(self, name: str) -> Medians:
        of = self.medians[name]
        return Medians(of[0], min(of), of[-1]) if of else Medians(math.nan, math.nan, math.nan)
