"""The comparison of two LaTeX strings by math-verify, limited to TIMEOUT_S for any input.

sympy can spend hours in one C call without noticing a Python signal, so it runs only in processes that are killed when
they exceed a time limit: the reward workers (rewards/pool.py), or a separate process if a reward is called elsewhere.
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
MAX_LATE_COMPARISONS = 7  # after this many timeouts in a batch no further comparison of that batch is made
# Importing sympy takes half a second from a local disk, but far longer from a busy network disk.
CHILD_STARTUP_TIMEOUT_S = 120.0
MEMORY = 4 << 30  # bytes of address space that a comparison may add to its process (Linux)
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, SyntaxError,
            TypeError, ValueError)  # exceptions of sympy for text that a policy wrote


def same_latex(prediction: str, truth: str) -> bool:
    """Return whether math-verify considers two LaTeX strings equal. If it times out or fails, count that and return
    False."""
    state = COUNTING.get(Counting())
    question = (prediction, truth)
    if question in state.late:
        return False
    if len(state.late) >= MAX_LATE_COMPARISONS:
        count("cas_budget")
        return False
    if state.limit is None:
        return compare_in_own_process(question, state)
    if "math_verify" not in sys.modules:
        with state.time_limit(CHILD_STARTUP_TIMEOUT_S):
            importlib.import_module("math_verify")
    try:
        return compare_latex(*question)
    except FAILURES:
        count("cas_crash")
        return False


def compare_in_own_process(question: tuple[str, str], state: Counting) -> bool:
    """Return whether a (prediction, truth) pair is equal, as compared by a separate process for math-verify."""
    prediction, truth = question
    item = RewardInput(prediction, SimpleNamespace(ground_truth=truth, uid=""), "")
    call = RewardCall(time.monotonic_ns(), KEY, [item])  # a new batch id: the pool remembers no timeouts for it
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
    """Compare a response with the ground truth: the reward function that `compare_in_own_process` calls."""
    return same_latex(response, example.ground_truth)


@cache
def own_pool(pid: int) -> WorkerPool:
    """Return the pool of the process `pid`. It is cached by pid because a forked process must not share it."""
    return WorkerPool(1, WorkerConfig([KEY], None, False, CHILD_STARTUP_TIMEOUT_S))


# --- in a process that can be killed -------------------------------------------------------------------------------


@lru_cache(4096)  # responses of a group often repeat an answer
def compare_latex(prediction: str, truth: str) -> bool:
    """Return whether math-verify considers two LaTeX strings equal, within the limits of time and memory."""
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    count("cas")
    with COUNTING.get().time_limit(TIMEOUT_S, (prediction, truth)), limited_memory():
        # math-verify's own timeouts are off: they use SIGALRM, which does not interrupt a loop in C.
        texts = [f"${text.strip().strip('$')}$" for text in (prediction, truth)]
        answer, expected = (parse(text, [LatexExtractionConfig()], parsing_timeout=None) for text in texts)
        parsable = bool(answer and expected) and has_value(answer[0])
        return parsable and verify(expected, answer, float_rounding=12, timeout_seconds=None)


@contextmanager
def limited_memory() -> Iterator[None]:
    """Limit the address space inside the `with` block to what the process uses now plus MEMORY bytes (Linux)."""
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def has_value(expression: object) -> bool:
    """Return whether a sympy expression contains no division by zero and no logarithm of zero: sympy simplifies
    48 + 0 * 0^{-1} to 48."""
    import sympy

    if not isinstance(expression, sympy.Basic):
        return True
    poles = [power.base for power in expression.atoms(sympy.Pow) if power.exp.could_extract_minus_sign()]
    poles += [log.args[0] for log in expression.atoms(sympy.log)]
    infinite = expression.has(sympy.zoo, sympy.nan, sympy.oo, -sympy.oo)
    return not infinite and not any(pole.equals(0) for pole in poles)
