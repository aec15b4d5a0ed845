"""Warnings about common training problems, each with a remedy, from the rows of metrics.jsonl. A warning is printed
once, and again only after its condition was false in between. The thresholds are rules of thumb; healthy runs of our
tasks stay far away from them."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from report.summary import ABLATIONS

FLAT_STEPS = 5  # steps in a row without a signal
WINDOW = 5  # measured values per median, so that two odd steps are not taken for a trend
ENTROPY_LEFT = 0.1  # fraction of the first entropy; below it nearly all tokens are certain
SOLVED_ACCURACY = 0.9  # mean reward part "accuracy" above which a low entropy is normal: the task is learnt
LENGTH_LEFT = 0.25  # fraction of the first response length; below it the reasoning is gone
LENGTH_MIN = 16.0  # first response length in tokens from which this is checked; shorter ones hold no reasoning
TRUNCATED = 0.25  # fraction of truncated responses: an eighth of a batch may be bad luck, a quarter is not
TRUNCATED_RISE = 0.15  # above the lowest fraction so far: a fraction that was high from the start is not warned of
MISMATCH = 5e-3  # nats, k3: the mismatch of a bf16 engine and its trainer is about 1e-3
MISMATCH_RISE = 5.0  # times the first mismatch

WATCHED = ("policy/entropy", "reward/accuracy", "response/tokens", "response/truncated", "mismatch/kl")


class Medians(NamedTuple):
    """The first, the lowest and the last median of WINDOW values of a metric."""

    first: float
    lowest: float
    last: float


class RunWarnings:
    """Checks the rows of a run in order, including the earlier rows of a resumed run: `update` returns new warnings."""

    def __init__(self, out: Path, compares_samples: bool = True):
        """`compares_samples`: does the advantage compare the samples of a prompt? If not, the policy also learns from
        differences between prompts."""
        self.out = out
        self.compares_samples = compares_samples
        self.flat_steps = 0
        self.values: dict[str, list[float]] = {name: [] for name in WATCHED}
        self.medians: dict[str, list[float]] = {name: [] for name in WATCHED}  # medians of WINDOW values
        self.active: set[str] = set()  # names of the warnings whose condition held at the last row
        self.shortcut: dict[str, float] = {}  # the last evaluation with ablated images, if the policy did not look
        self.stale = False  # has a step trained on tokens of older weights? mismatch/kl then compares different weights

    def update(self, row: Mapping[str, float | None]) -> list[str]:
        """Add a row and return the lines of warnings that are new."""
        if "eval/shortcut" in row:  # report/looking.py
            self.shortcut = dict(row) if row["eval/shortcut"] else {}
        if "reward/zero_std_frac" in row:  # a row that has only an evaluation has no such metric
            flat = row["reward/zero_std_frac"] == 1 and (self.compares_samples or not row.get("update/steps"))
            self.flat_steps = self.flat_steps + 1 if flat else 0
        self.stale = self.stale or row.get("async/staleness", 0) > 0
        for name, values in self.values.items():
            if row.get(name) is not None and math.isfinite(row[name]):
                values.append(row[name])
                if len(values) >= WINDOW:
                    self.medians[name].append(median(values[-WINDOW:]))
        warnings = self._check(row)
        lines = [f"warning: {line}" for name, line in warnings.items() if name not in self.active]
        self.active = set(warnings)
        return lines

    def _check(self, row: Mapping[str, float | None]) -> dict[str, str]:
        """Return the warnings whose condition holds at this step, by name. The median of a metric that was measured too
        rarely is NaN, for which no comparison is true."""
        warnings = {}
        if self.flat_steps >= FLAT_STEPS:
            mean = f" (mean {row['reward/mean']:.3g})" if row.get("reward/mean") is not None else ""
            warnings["flat"] = (
                f"in the last {self.flat_steps} steps all samples of a prompt got the same reward{mean}, so the policy "
                f"cannot learn; check the samples in {self.out / 'rollouts'}, what the reward expects, and "
                "--temperature"
            )
        if row.get("step") == 1 and row.get("response/truncated") == 1:
            warnings["endless"] = (
                "in step 1 every response was cut off at --max-new-tokens; raise it, or check the model's end tokens, "
                "which its generation_config.json and its tokenizer name"
            )
        entropy, accuracy, length, truncated, kl = map(self._medians, WATCHED)
        if entropy.last < ENTROPY_LEFT * entropy.first and not accuracy.last >= SOLVED_ACCURACY:
            reached = "" if math.isnan(accuracy.last) else f", at an accuracy of {accuracy.last:.2f}"
            warnings["entropy"] = (
                f"policy/entropy collapsed to {entropy.last:.3g}, from {entropy.first:.3g} at the beginning{reached}: "
                "the policy hardly explores any more; raise --clip-high (--algo dapo), --entropy-coef or --kl-coef, or "
                "lower --lr"
            )
        if length.first >= LENGTH_MIN and length.last < LENGTH_LEFT * length.first:
            warnings["length"] = (
                f"mean response length fell to {length.last:.3g} tokens, from {length.first:.3g}: check in "
                f"{self.out / 'rollouts'} whether the reward favours short responses; fix it, or try --kl-coef or "
                "--loss-agg token"
            )
        if truncated.last >= max(TRUNCATED, truncated.lowest + TRUNCATED_RISE):
            warnings["truncated"] = (
                f"response/truncated rose to {truncated.last:.2f}, from {truncated.lowest:.2f}: responses are cut off "
                "before they reach an answer; raise --max-new-tokens, or use --truncated penalise or mask"
            )
        if not self.stale and kl.last >= max(MISMATCH, MISMATCH_RISE * kl.first):
            warnings["mismatch"] = (
                f"mismatch/kl grew to {kl.last:.3g} nats, from {kl.first:.3g}: engine and trainer compute increasingly "
                "different log-probabilities; limit the effect with --algo-args tis_cap=2 ratio_mask=0.5,2, and look "
                "for the cause with --dtype float32 or --rollout hf"
            )
        if m := self.shortcut:
            kind = max((kind for kind in ABLATIONS if f"eval/{kind}" in m), key=lambda kind: m[f"eval/{kind}"])
            warnings["shortcut"] = (
                f"evaluation at step {m['step']}: the policy has learnt to answer without looking. With "
                f"{ABLATIONS[kind]} its accuracy has risen to {m[f'eval/{kind}']:.2f} (own images {m['eval/own']:.2f}, "
                f"chance {m['eval/prior']:.2f}). Find what gives the answers away, in the rows that are right in "
                f"{self.out}/eval/step_{m['step']:06d}_{kind}.jsonl, and remove it from the data"
            )
        return warnings

    def _medians(self, name: str) -> Medians:
        medians = self.medians[name]
        return Medians(medians[0], min(medians), medians[-1]) if medians else Medians(math.nan, math.nan, math.nan)
