"""Warnings that name a remedy, from the rows of metrics.jsonl. Each is said once, and again only after what it warned
of was over. The thresholds are rules of thumb that healthy runs of our tasks stay far away from."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

FLAT_STEPS = 5  # without a signal
WINDOW = 5  # measured values that a median is of: two odd steps are no trend
ENTROPY_LEFT = 0.1  # of what the run began with: less than that, and nearly all tokens are certain
SOLVED = 0.9  # mean reward part "accuracy" from which low entropy is what a learnt task looks like
LENGTH_LEFT = 0.25  # of the length that the run began with: reasoning is gone by then
LENGTH_MIN = 16.0  # tokens at the beginning: shorter answers have nothing to lose
TRUNCATED = 0.25  # share of responses that were cut: an eighth of a batch may be bad luck, a quarter is not
TRUNCATED_RISE = 0.15  # over the least that the run has had: where it was high from the start, it does not rise
MISMATCH = 5e-3  # nats, k3: bf16 engines are some 1e-3 away from their trainer
MISMATCH_RISE = 5.0  # times what the run began with

Row = Mapping[str, float | None]


class Warnings:
    """`feed` it each row in turn, also those of a run that goes on; it returns the lines that are to be said."""

    def __init__(self, out: Path, compared: bool = True):
        """`compared`: does the advantage compare the samples of a prompt? Else what differs between prompts teaches."""
        self.out = out
        self.compared = compared
        self.flat_steps = 0
        self.values: dict[str, list[float]] = {}  # the last WINDOW of each metric
        self.first: dict[str, float] = {}  # the median of the first WINDOW
        self.least: dict[str, float] = {}  # of all these medians
        self.said: set[str] = set()
        self.stale = False  # once a step trained on tokens of older weights: rollout/kl compares other weights then

    def feed(self, row: Row) -> list[str]:
        if "reward/constant_groups" not in row:  # an evaluation alone
            return []
        for name in ("policy/entropy", "response/tokens", "response/truncated", "rollout/kl", "reward/accuracy"):
            if row.get(name) is not None and math.isfinite(row[name]):
                self._take(name, row[name])
        checks: dict[str, Callable[[Row], str | None]] = {
            "flat": self._flat, "entropy": self._entropy, "length": self._length, "truncated": self._truncated,
            "mismatch": self._mismatch,
        }  # fmt: skip
        lines = []
        for kind, check in checks.items():
            line = check(row)
            if line and kind not in self.said:
                lines.append(f"warning: {line}")
            self.said = self.said | {kind} if line else self.said - {kind}
        return lines

    def _take(self, name: str, value: float) -> None:
        values = self.values[name] = [*self.values.get(name, []), value][-WINDOW:]
        if len(values) == WINDOW:
            self.first.setdefault(name, median(values))
            self.least[name] = min(self.least.get(name, median(values)), median(values))

    def _now(self, name: str) -> tuple[float, float, float] | None:
        """Medians of WINDOW: the last, the first, the least; None before there is one."""
        return (median(self.values[name]), self.first[name], self.least[name]) if name in self.first else None

    def _flat(self, row: Row) -> str | None:
        flat = row.get("reward/constant_groups") == 1 and (self.compared or not row.get("update/steps"))
        self.flat_steps = self.flat_steps + 1 if flat else 0
        if self.flat_steps < FLAT_STEPS:
            return None
        mean = f" (mean {row['reward/mean']:.3g})" if row.get("reward/mean") is not None else ""
        return (
            f"in the last {self.flat_steps} steps all samples of a prompt got the same reward{mean}, so rewards teach "
            f"nothing; look at the samples in {self.out / 'rollouts'}, at what the reward expects, and at --temperature"
        )

    def _entropy(self, row: Row) -> str | None:
        now, right = self._now("policy/entropy"), self._now("reward/accuracy")
        if not now or now[0] >= ENTROPY_LEFT * now[1] or (right and right[0] >= SOLVED):
            return None
        reached = f" at an accuracy of {right[0]:.2f}" if right else ""
        return (
            f"policy/entropy collapsed to {now[0]:.3g}, from {now[1]:.3g} at the beginning{reached}: hardly anything "
            "is left to explore; raise --clip-high (--algo dapo), --entropy-coef or --kl-coef, or lower --lr"
        )

    def _length(self, row: Row) -> str | None:
        now = self._now("response/tokens")
        if not now or now[1] < LENGTH_MIN or now[0] >= LENGTH_LEFT * now[1]:
            return None
        return (
            f"responses shrank to {now[0]:.3g} tokens, from {now[1]:.3g}: look in {self.out / 'rollouts'} whether the "
            "reward pays for saying less; mend it, or --kl-coef, --loss-agg token"
        )

    def _truncated(self, row: Row) -> str | None:
        now = self._now("response/truncated")
        if not now or now[0] < TRUNCATED or now[0] - now[2] < TRUNCATED_RISE:
            return None
        return (
            f"response/truncated rose to {now[0]:.2f}, from {now[2]:.2f}: answers are cut before they come; raise "
            "--max-new-tokens, or --truncated penalise (or mask)"
        )

    def _mismatch(self, row: Row) -> str | None:
        now = self._now("rollout/kl")
        self.stale = self.stale or row.get("async/staleness", 0) > 0
        if self.stale or not now or now[0] < MISMATCH or now[0] < MISMATCH_RISE * now[1]:
            return None
        return (
            f"rollout/kl grew to {now[0]:.3g} nats, from {now[1]:.3g}: engine and trainer drift apart; --algo-args "
            "tis_cap=2 tis_mask=0.5,2 bounds what it does, --dtype float32 or --rollout hf shows where it comes from"
        )
