"""Intervals, tests and votes, compared with scipy and enumeration.   pytest tests/test_statistics.py"""

import itertools
import math
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from report import statistics as S


@pytest.mark.parametrize("n", [1, 2, 9, 60, 601])
def test_wilson_intervals_equal_scipys(n):
    for right in {0, 1, n // 3, n // 2, n - 1, n}:
        theirs = stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
        assert S.wilson_interval(right, n) == pytest.approx((theirs.low, theirs.high), abs=1e-6)
    assert S.wilson_interval(0, n)[0] == 0 and S.wilson_interval(n, n)[1] == 1


def test_an_interval_contains_its_proportion():
    """This includes the ends: for 80 of 80, rounding once put 2e-16 between the bound and the proportion."""
    for n in range(1, 300):
        for right in {0, 1, n // 2, n - 1, n}:
            low, high = S.wilson_interval(right, n)
            assert 0 <= low <= right / n <= high <= 1


def test_intervals_of_means_of_samples_cover_the_truth():
    """95% intervals cover the truth in more than 93% of trials if scores are means of 4 samples and the examples differ
    in difficulty."""
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(400):
        success_rates = rng.beta(0.5, 0.5, 50)
        low, high = S.confidence_interval((rng.binomial(4, success_rates) / 4).tolist())
        covered.append(low <= 0.5 <= high)
    assert fmean(covered) > 0.93


def test_bootstrap_intervals_equal_scipys():
    rng = np.random.default_rng(1)
    for values in (rng.normal(3, 2, 200), rng.integers(-1, 2, 300).astype(float), rng.exponential(size=40)):
        theirs = stats.bootstrap(
            (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(2)
        ).confidence_interval
        spread = theirs.high - theirs.low
        assert S.bootstrap(values.tolist()) == pytest.approx((theirs.low, theirs.high), abs=0.03 * spread)


def test_bootstrap_of_few_values_agrees_with_all_resamples():
    values = [0.0, 1.0, 5.0, 5.5]
    means = [fmean(drawn) for drawn in itertools.product(values, repeat=4)]
    low, high = np.quantile(means, (0.025, 0.975))
    assert S.bootstrap(values) == pytest.approx((low, high), abs=0.26)  # one step between neighbouring means


def test_bootstrap_over_tasks_resamples_each_task_separately():
    rng = np.random.default_rng(3)
    tasks = [rng.normal(mean, 1, n).tolist() for mean, n in ((0, 400), (10, 25), (-5, 100))]
    # the statistic is the mean of the tasks' means, which are independent
    spread = math.sqrt(sum(np.var(task) / len(task) for task in tasks)) / 3
    middle = fmean(map(fmean, tasks))
    expected = (middle - 1.96 * spread, middle + 1.96 * spread)
    assert S.bootstrap(*tasks) == pytest.approx(expected, abs=0.1 * spread)


def test_bootstrap_in_chunks_is_the_same(monkeypatch):
    values = np.random.default_rng(4).normal(size=50).tolist()
    whole = S.bootstrap(values)
    monkeypatch.setattr(S, "CHUNK_SIZE", 2500)
    assert S.bootstrap(values) == S.bootstrap(values, seed=0) == pytest.approx(whole, rel=1e-12)
    assert S.bootstrap(values, seed=1) != pytest.approx(whole, rel=1e-6)
    assert S.bootstrap([3.0] * 5) == (3.0, 3.0)


@pytest.mark.parametrize(
    "scores, proportions", [([0, 1], True), ([0.5], True), ([-0.5, 1.0], False), ([0, 1.5], False)]
)
def test_scores_from_0_to_1_are_proportions(scores, proportions):
    assert S.score_bounds(scores) == ((0.0, 1.0) if proportions else ())
    assert S.confidence_interval(scores) == (
        S.wilson_interval(sum(scores), len(scores)) if proportions else S.bootstrap(scores)
    )


@pytest.mark.parametrize("n,gained,lost", [(100, 0.02, 0.0), (100, 0.02, 0.01), (20, 0.1, 0.0), (20, 0.9, 0.0),
                                           (100, 0.1, 0.05)])
def test_intervals_of_differences_cover_the_truth_even_if_nothing_was_lost(n, gained, lost):
    rng = np.random.default_rng(5)
    covered = []
    for _ in range(100):
        gaps = rng.choice([1.0, -1.0, 0.0], n, p=[gained, lost, 1 - gained - lost])
        low, high = S.bootstrap(gaps.tolist(), ends=(-1.0, 1.0))
        covered.append(low <= gained - lost <= high)
    assert fmean(covered) >= 0.91


def test_few_examples_prove_nothing():
    low, high = S.bootstrap([1.0] * 3, ends=(-1.0, 1.0))  # 3 gained of 3
    assert low < 0 and high == 1.0
    low, high = S.bootstrap([1.0] * 10, [1.0] * 10, ends=(0.0, 1.0))  # all right in two tasks
    assert 0.7 < low < 0.95 and high == 1.0


@pytest.mark.parametrize("n", [1, 3, 6])
def test_pass_at_k_is_the_share_of_successful_choices(n):
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        samples = [True] * right + [False] * (n - right)
        hits = [any(chosen) for chosen in itertools.combinations(samples, k)]
        assert S.pass_at_k(n, right, k) == pytest.approx(fmean(hits))


def test_mcnemar_p_values_equal_scipys():
    for gained, lost in [(1, 0), (5, 1), (3, 3), (0, 8), (40, 21), (700, 500)]:
        theirs = stats.binomtest(gained, gained + lost, 0.5).pvalue
        assert S.mcnemar_p_value(gained, lost) == S.mcnemar_p_value(lost, gained) == pytest.approx(theirs)
    assert S.mcnemar_p_value(0, 0) == 1.0
    assert 0 < S.mcnemar_p_value(100_700, 99_300) < 0.01  # fast enough for large counts


EQUAL = "3= 3.0 ;1,000=1000;A=a.;$x + 1$=x+1;3\\,cm=3cm;-0=0;.5=0.50;1,234,567.0=1234567;1e3=1000"
DIFFERENT = "3=4;0=1;x=y;1.5=15;=0;1,2=12;30,00=3000;1_000=1000;10000000000000001=10000000000000000;1e400=inf;1/2=0.5"


@pytest.mark.parametrize("pair", EQUAL.split(";"))
def test_answers_that_are_equal(pair):
    a, b = pair.split("=")
    assert S.normalize_answer(a) == S.normalize_answer(b)


@pytest.mark.parametrize("pair", DIFFERENT.split(";"))
def test_answers_that_differ(pair):
    a, b = pair.split("=")
    assert S.normalize_answer(a) != S.normalize_answer(b)


@pytest.mark.parametrize("answers,scores,expected", [
    (["a", "a", "b"], [1, 1, 0], 1.0),
    (["a", "b", "b"], [1, 0, 0], 0.0),
    (["a", "b"], [1, 0], 0.5),  # a tie
    (["a", "b", "c", "c", "a"], [1, 0, 0, 0, 1], 0.5),
    ([None, None, "a"], [0, 0, 1], 1.0),  # no answer is no vote
    ([None, None], [0, 0], 0.0),
    (["a", "a"], [1, 0], 0.5),  # equal answers with different scores, as when the format is graded too
])
def test_majority_vote_score(answers, scores, expected):
    answers = [answer and f"{answer}!" for answer in answers]  # so that equal answers are not the same object
    assert S.majority_vote_score(answers, scores) == expected
