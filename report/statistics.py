"""Confidence intervals and significance tests for an evaluation.

The randomly drawn units are the examples. Samples of one example are not independent, so each example counts once, with
the mean of its samples.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from statistics import fmean

import numpy as np

RESAMPLES = 10_000
CHUNK_SIZE = 100  # resamples drawn at a time; divides RESAMPLES


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a proportion, or of a mean of numbers from 0 to 1.   Wilson 1927

    For such a mean p the interval is wider than necessary: its variance is at most p (1 - p), that of a proportion."""
    z, p = 1.959964, successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(max(0.0, p * (1 - p)) / n + z * z / (4 * n * n))
    low, high = ((centre + end) / (1 + z * z / n) for end in (-half, half))
    return max(0.0, min(low, p)), min(1.0, max(high, p))  # contains p = 0 and p = 1 also after rounding


def bootstrap(*groups: Sequence[float], ends: Sequence[float] = (), seed: int = 0) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of a mean. For several groups it is that of the mean of their means,
    and each group is resampled separately.   Efron 1979

    `ends`: the smallest and the largest possible value. Both are added to each group once, because few examples may
    contain no rare value: without them, 3 gained of 3 would be a certain difference of 1. For differences of
    proportions this is the adjustment of Bonett and Price 2012."""
    rng = np.random.default_rng(seed)
    means = []
    for values in groups:
        values = np.array([*values, *ends], dtype=np.float64)
        # in n draws with replacement the counts of the distinct values are multinomial, so only counts are drawn
        distinct, counts = np.unique(values, return_counts=True)
        probabilities = counts / len(values)
        draws = (rng.multinomial(len(values), probabilities, CHUNK_SIZE) for _ in range(RESAMPLES // CHUNK_SIZE))
        means.append(np.concatenate([drawn_counts @ distinct for drawn_counts in draws]) / len(values))
    low, high = np.quantile(np.mean(means, axis=0), (0.025, 0.975))
    return float(low), float(high)


def score_bounds(scores: Sequence[float]) -> tuple[float, ...]:
    """Return the bounds 0 and 1 if all scores lie between them, else nothing."""
    return (0.0, 1.0) if 0 <= min(scores) and max(scores) <= 1 else ()


def confidence_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of scores, one per example: Wilson's if all are from 0 to 1, else a
    bootstrap."""
    return wilson_interval(math.fsum(scores), len(scores)) if score_bounds(scores) else bootstrap(scores)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of k samples is right, given that `right` of
    n >= k samples were.

    arXiv:2107.03374, equation 1"""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def mcnemar_p_value(gained: int, lost: int) -> float:
    """Return the exact two-sided p value of a split at least this uneven. With one sample per example this is McNemar's
    test; if scores are means or not proportions, it is the sign test, which has the same formula."""
    return min(1.0, 2 * binomial_tail(max(gained, lost), gained + lost, 0.5))


def binomial_tail(least: int, n: int, p: float) -> float:
    """Return the exact probability of at least `least` successes in n trials with probability 0 < p < 1."""
    odds, all_fail = math.log(p / (1 - p)), math.lgamma(n + 1) + n * math.log1p(-p)
    logs = (all_fail + k * odds - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(least, n + 1))
    return min(1.0, math.fsum(map(math.exp, logs)))


def normalize_answer(text: str) -> str:
    """Return an answer in the form in which votes are counted: a number by its value, other text without case, spaces,
    dollar signs and a final dot."""
    plain = re.sub(r"[\s$]|\\[,;!]", "", text).rstrip(".").casefold()
    if not re.fullmatch(r"[+-]?((\d+|\d{1,3}(,\d{3})+)(\.\d*)?|\.\d+)(e[+-]?\d{1,4})?", plain) or len(plain) > 25:
        return plain
    value = Decimal(plain.replace(",", ""))
    return str(value.normalize() if value else 0)


def majority_vote_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """Return the score of the most frequent answer, or the mean score of several equally frequent ones. None is not a
    vote; without any vote the score is 0.   arXiv:2203.11171

    If samples with the same answer have different scores, their mean counts."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    max_votes = max(votes.values())
    winners = [answer for answer, n in votes.items() if n == max_votes]
    by_answer = {w: [s for a, s in zip(answers, scores, strict=True) if a == w] for w in winners}
    return fmean(map(fmean, by_answer.values()))
