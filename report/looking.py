"""Does the policy still use the images? Metrics of the evaluations with ablated images (--eval-ablate), and the rule by
which a run warns that it learns to answer without looking. Examples without images do not count.

The rule compares an evaluation with the first one, t0, on the same questions. If answers have a format, t0 is the first
evaluation in which nearly all have it: before, accuracy rises because answers become readable."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from report.evaluation import example_scores, with_images
from report.statistics import binomial_tail, bootstrap
from report.summary import Rows

FALSE_ALARMS = 0.01  # max probability of a false warning in a run, however many evaluations it has
FORMAT_READY = 0.95  # mean reward part "format" from which an evaluation can be t0
LEARNT_SHORTCUT = "During this run the policy has learnt to answer without looking."
MIN_GAIN = 0.05  # smallest rise of the accuracy with ablated images that matters


def error_level(k: int, sets: int = 1) -> float:
    """Return the significance level of the k-th comparison with t0 (k >= 1) of each of `sets` ablations. The levels of
    all k add up to FALSE_ALARMS, so this bounds the probability of any false alarm in a run (union bound), although its
    evaluations are correlated."""
    return FALSE_ALARMS / sets * 6 / (math.pi * k) ** 2


def learns_shortcut(start: np.ndarray, now: np.ndarray, prior: float, level: float) -> bool:
    """Return whether the policy has learnt since `start` to answer without the image. `start` and `now` are the scores
    (0 to 1) of the same n questions with their own images and with ablated ones, (2, n). All of these must hold:

    1. The ablated accuracy rose (exact one-sided sign test on the same questions).
    2. It is above `prior`, the accuracy of always giving the most frequent answers (exact binomial test): learning
       these does not count as a shortcut. Scores are summed and rounded down, which is conservative.
    3. It matters: it rose by MIN_GAIN, and by at least half as much as the accuracy with the own images (the 95%
       bootstrap interval of ablated gain - own gain / 2, over questions, lies above 0)."""
    clean, blind = now - start
    gained, lost, right = (blind > 0).sum(), (blind < 0).sum(), now[1].sum()
    return bool(
        blind.mean() >= MIN_GAIN
        and right > prior * len(blind)
        and binomial_tail(gained, gained + lost, 0.5) < level
        and binomial_tail(math.floor(right), len(blind), prior) < level
        and bootstrap(blind - clean / 2, ends=(-1.5, 1.5))[0] > 0
    )


def read_start(out: Path, rows: Rows, kind: str, records: Sequence[dict]) -> tuple[list[list[dict]], int]:
    """Return the records of t0 with own and with ablated images, and the number of evaluations with this ablation since
    then, t0 included. `rows` are those of metrics.jsonl; evaluations of other questions than those of `records` are
    skipped. If there is no t0 yet, return ([], 0)."""
    evaluations = [row for row in rows if f"eval/{kind}" in row]
    for i, row in enumerate(evaluations):
        formats = [row[name] for name in row if re.fullmatch("eval/rewards/(.+/)?format", name)]
        files = [out / "eval" / f"step_{row['step']:06d}{end}.jsonl" for end in ("", f"_{kind}")]
        if min(formats, default=1.0) >= FORMAT_READY and all(file.is_file() for file in files):
            start = [with_images(list(map(json.loads, file.read_text().splitlines()))) for file in files]
            if all(list(map(question, each)) == list(map(question, records)) for each in start):
                return start, len(evaluations) - i
    return [], 0


def question(record: dict) -> tuple[str, str]:
    return record["uid"], record["ground_truth"]


def is_formatted(record: dict) -> bool:
    return all(sample["rewards"].get("format", 1.0) >= FORMAT_READY for sample in record["samples"])


def looking_metrics(
    out: Path, rows: Rows, records: Sequence[dict], ablated: Mapping[str, Sequence[dict]], summary: Mapping
) -> dict[str, float]:
    """Return the metrics of docs/metrics.md that compare an evaluation with its ablations and with t0, over the
    examples with images. `summary` has their `reliance`, and `rows` are those of the earlier steps. Without an accuracy
    only scores and drops are returned."""
    metric, reliance = summary["metric"], summary["reliance"]
    metrics = with_ends("own", reliance["own"], metric)
    for kind in ablated:
        metrics |= with_ends(kind, reliance[kind], metric) | with_ends(f"drop_{kind}", reliance[kind], "drop")
    if (prior := reliance["constant"]) is None:
        return metrics
    metrics["prior"] = prior
    for kind, ablated_records in ablated.items():
        end = "" if kind == "blank" else f"_{kind}"
        if metrics["own_low"] > prior:
            metrics[f"visual_share{end}"] = metrics[f"drop_{kind}"] / (metrics["own"] - prior)
        now = [with_images(records), with_images(ablated_records)]
        start, k = read_start(out, rows, kind, now[0])
        # an ablated answer without the format at t0 may have been right: it says nothing about a rise
        comparable = [i for i, record in enumerate(start[1] if start else []) if is_formatted(record)]
        if comparable:
            before, after = (np.array([example_scores(group, metric) for group in groups])[:, comparable]
                             for groups in (start, now))  # fmt: skip
            clean, blind = after - before
            if bootstrap(clean, ends=(-1.0, 1.0))[0] > 0:
                metrics[f"blind_share{end}"] = float(blind.mean() / clean.mean())
            metrics["shortcut"] = learns_shortcut(before, after, prior, error_level(k, len(ablated))) + metrics.get(
                "shortcut", 0.0)
    return metrics


def with_ends(name: str, result: Mapping, key: str) -> dict[str, float]:
    """Return a value of a summary and the ends of its interval as metrics."""
    low, high = result[f"{key}_ci95"]
    return {name: result[key], f"{name}_low": low, f"{name}_high": high}
