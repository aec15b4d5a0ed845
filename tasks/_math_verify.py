"""Whether math-verify calls two LaTeX strings the same, within TIMEOUT_S whatever they are.

sympy can sit in one C call for hours without noticing a Python signal, so it runs in processes that are ended when they
are late: those that grade (rewards/pool.py), or one of its own where a reward is called elsewhere.
"""

import importlib
import logging
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from reward import COUNTING, Counting, RewardFailure, count
from rewards.call import RewardCall, RewardInput, WorkerConfig
from rewards.pool import WorkerPool

TIMEOUT_S = 3.0  # wall-clock seconds for one comparison
MAX_LATE_COMPARISONS = 7  # comparisons of a round that may be late; after them none is made
CHILD_STARTUP_TIMEOUT_S = (
    120.0  # importing sympy takes half a second from a local disk, far longer from a busy network one
)
MEMORY = 4 << 30  # bytes of address space that a comparison may take (Linux)
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, SyntaxError,
            TypeError, ValueError)  # what sympy raises for what a policy wrote


def same_latex(prediction: str, truth: str) -> bool:
    """Return whether math-verify calls two LaTeX strings the same; False, and counted, if it is late or fails."""
    state = COUNTING.get(Counting())
    question = (prediction, truth)
    if question in state.late:
        return False
    if len(state.late) >= MAX_LATE_COMPARISONS:
        count("cas_budget")
        return False
    if state.limit is None:
        return ask(question, state)
    if "math_verify" not in sys.modules:
        with state.time_limit(CHILD_STARTUP_TIMEOUT_S):
            importlib.import_module("math_verify")
    try:
        return compare_latex(*question)
    except FAILURES:
        count("cas_crash")
        return False


def ask(question: tuple[str, str], state: Counting) -> bool:
    """Compare in a process of math-verify's own."""
    prediction, truth = question
    item = RewardInput(prediction, SimpleNamespace(ground_truth=truth, uid=""), "")
    call = RewardCall(time.monotonic_ns(), KEY, [item])  # a round of its own: the pool remembers nothing
    [outcome], counts = own_pool(os.getpid()).submit(call).result()
    state.counts.update(counts)
    if counts["cas_timeout"]:
        state.late.add(question)
    if isinstance(outcome, RewardFailure):
        if outcome.what != "ended process":
            raise outcome.exception()
        count("cas_crash")
        return False
    return bool(outcome["reward"])


KEY = f"{Path(__file__).resolve()}:same_reward"


def same_reward(response: str, example: Any) -> float:
    """A reward, for the process of `ask`."""
    return same_latex(response, example.ground_truth)


@cache
def own_pool(pid: int) -> WorkerPool:
    """Return the one of this process: a forked copy must not share it."""
    return WorkerPool(1, WorkerConfig([KEY], None, False, CHILD_STARTUP_TIMEOUT_S))


# --- in a process that can be ended -------------------------------------------------------------------------------


@lru_cache(4096)  # a group repeats its answers
def compare_latex(prediction: str, truth: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    count("cas")
    with COUNTING.get().time_limit(TIMEOUT_S, (prediction, truth)), limited_memory():
        # math-verify's own timeouts are off: they use SIGALRM, and a C loop never sees them.
        texts = [f"${text.strip().strip('$')}$" for text in (prediction, truth)]
        answer, expected = (parse(text, [LatexExtractionConfig()], parsing_timeout=None) for text in texts)
        readable = bool(answer and expected) and has_value(answer[0])
        return readable and verify(expected, answer, float_rounding=12, timeout_seconds=None)


@contextmanager
def limited_memory() -> Iterator[None]:
    """Give what is done inside MEMORY bytes more than this process has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def has_value(expression: object) -> bool:
    """Return whether it holds no division by zero and no logarithm of it: sympy takes 48 + 0 * 0^{-1} for 48."""
    import sympy

    if not isinstance(expression, sympy.Basic):
        return True
    poles = [power.base for power in expression.atoms(sympy.Pow) if power.exp.could_extract_minus_sign()]
    poles += [log.args[0] for log in expression.atoms(sympy.log)]
    infinite = expression.has(sympy.zoo, sympy.nan, sympy.oo, -sympy.oo)
    return not infinite and not any(pole.equals(0) for pole in poles)
