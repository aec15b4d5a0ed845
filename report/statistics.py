"""Intervals and tests of an evaluation.

Examples are what is drawn at random; the samples of one are not independent, so each example counts once, with the mean
of its samples.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from statistics import fmean

import numpy as np

RESAMPLES = 10_000
AT_A_TIME = 100  # of these; divides them


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """95% confidence interval of a proportion, or, wider than need be, of a mean of numbers from 0 to 1.   Wilson 1927

    Such a mean p has a variance of at most p (1 - p), that of a proportion."""
    z, p = 1.959964, successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(max(0.0, p * (1 - p)) / n + z * z / (4 * n * n))
    low, high = ((centre + end) / (1 + z * z / n) for end in (-half, half))
    return max(0.0, min(low, p)), min(1.0, max(high, p))  # holds p = 0 and p = 1 also after rounding


def bootstrap(*groups: Sequence[float], ends: Sequence[float] = (), seed: int = 0) -> tuple[float, float]:
    """95% percentile interval of a mean; of several groups, of the mean of their means, each resampled by itself.
    Efron 1979

    `ends`: the least and the largest that a value can be. Each group gets one more of both, since a rare value may be
    in none of so few examples: else 3 gained of 3 would be a difference of 1 for certain. For differences of
    proportions this is the adjustment of Bonett and Price 2012."""
    rng = np.random.default_rng(seed)
    means = []
    for values in groups:
        values = np.array([*values, *ends], dtype=np.float64)
        # n draws with replacement take each distinct value as often as a multinomial says: no draw need be made
        distinct, counts = np.unique(values, return_counts=True)
        share = counts / len(values)
        draws = (rng.multinomial(len(values), share, AT_A_TIME) for _ in range(RESAMPLES // AT_A_TIME))
        means.append(np.concatenate([drawn @ distinct for drawn in draws]) / len(values))
    low, high = np.quantile(np.mean(means, axis=0), (0.025, 0.975))
    return float(low), float(high)


def score_bounds(scores: Sequence[float]) -> tuple[float, ...]:
    """Between which scores lie, if they are proportions."""
    return (0.0, 1.0) if 0 <= min(scores) and max(scores) <= 1 else ()


def confidence_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Of the mean of scores, one of each example: Wilson's where they are from 0 to 1, else by bootstrap."""
    return wilson_interval(math.fsum(scores), len(scores)) if score_bounds(scores) else bootstrap(scores)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that one of k samples is right, from n >= k samples of which so many were: unbiased.

    arXiv:2107.03374, equation 1"""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def mcnemar_p_value(gained: int, lost: int) -> float:
    """Exact two-sided p value of so uneven a split by chance. With one sample of each example it is McNemar's test;
    where scores are means, or no proportions, the sign test, which is the same sum."""
    n = gained + lost
    logs = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * math.fsum(math.exp(log - n * math.log(2)) for log in logs))


def normalize_answer(text: str) -> str:
    """A form in which answers are counted: numbers by value, else without case, spaces, dollar signs and a last dot."""
    plain = re.sub(r"[\s$]|\\[,;!]", "", text).rstrip(".").casefold()
    if not re.fullmatch(r"[+-]?((\d+|\d{1,3}(,\d{3})+)(\.\d*)?|\.\d+)(e[+-]?\d{1,4})?", plain) or len(plain) > 25:
        return plain
    value = Decimal(plain.replace(",", ""))
    return str(value.normalize() if value else 0)


def majority_vote_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """The score of the most frequent answer; of several as frequent ones, their mean. None, no answer, is no vote;
    where nobody votes the score is 0.   arXiv:2203.11171

    Samples of one answer should have one score; if they have not, it is their mean."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, n in votes.items() if n == most]
    by_answer = {w: [s for a, s in zip(answers, scores, strict=True) if a == w] for w in winners}
    return fmean(map(fmean, by_answer.values()))
