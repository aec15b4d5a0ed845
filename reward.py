r"""Rewards: (response text, example) -> named rewards, e.g. {"accuracy": 1.0, "format": 1.0, "reward": 1.0}.

A task is one file in tasks/; its reward is for the rows whose `data_source` names it. To add a task, add a file with

    @register("chess")
    def chess(response: str, example: Example, finish_reason: str) -> dict[str, float]:
        return {"accuracy": ..., "reward": ...}

`score` picks the reward by the example's `data_source`; `--reward FILE.py:FUNCTION` replaces it (`load_reward`).
"""

import importlib.util
import inspect
import os
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from errors import Note, UserError

MAX_REWARD = 1e6  # a larger reward overflows what is computed from it in fp32
MAX_ANSWER_CHARS = 1000  # a longer box is refused; it is no final answer
RESERVED_NAMES = ("mean", "constant_groups", "unpenalised", "overlong")  # names of our own metrics reward/<name>

# Counts since the start or the last `.clear()`: graded, answers compared; cas, sent to math-verify. The others count
# wrong answers: no_box, no complete box; bad_truth, the truth holds no answer; unreadable, no such expression; refused,
# too long, deep or large; of math-verify cas_timeout, late, cas_crash, it died, cas_budget, no time was left for it.
grader_stats: Counter[str] = Counter()

# --- tasks --------------------------------------------------------------------------------------------------------

Reward = Callable[[str, Any, str], dict[str, float]]  # (response, example, finish_reason) -> named rewards
Answerable = Callable[[str, dict[str, float]], bool]  # (truth, what `\boxed{truth}` earns): could any answer equal it?


@dataclass(frozen=True)
class Stage:
    """Of a curriculum (rewards/curriculum.py), as rewards are told."""

    name: str = ""
    number: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # of the task that is graded


class Task(NamedTuple):
    name: str
    reward: Reward
    answerable: Answerable


TASKS: dict[str, Task] = {}  # by name, and by other names


def register(*names: str, answerable: Answerable = lambda truth, rewards: True) -> Callable[[Reward], Reward]:
    """Decorator: make a function the reward of the task `names[0]`; data sources of the other names count as it.

    A function that raises `Later` inside `score_batch` is called again.
    """

    def add(reward: Reward) -> Reward:
        for name in names:
            if name in TASKS:
                taken = TASKS[name].reward.__name__
                raise ValueError(f"task {name!r} already has the reward {taken}; choose another name")
            TASKS[name] = Task(names[0], reward, answerable)
        return reward

    return add


@cache
def load_tasks() -> None:
    """Import every file of tasks/, which registers what is in it."""
    for file in sorted(Path(__file__).with_name("tasks").glob("[!_]*.py")):
        importlib.import_module(f"tasks.{file.stem}")


def task_name(data_source: str) -> str:
    """`hiyouga/geometry3k`, `Geometry3K` and `geo3k` -> `geo3k`: lower case, no owner, other names resolved."""
    load_tasks()
    name = data_source.strip().lower().rsplit("/", 1)[-1]
    return TASKS[name].name if name in TASKS else name


def find_task(example: Any) -> Task:
    """The task of a row. Raises UserError if it is unknown or the row's truth is no text."""
    name = task_name(example.data_source)
    if not isinstance(example.ground_truth, str):
        raise UserError(
            f"row {example.uid!r}: ground_truth is {example.ground_truth!r} ({type(example.ground_truth).__name__}); "
            "it must be a string, or JSON text for a structured truth"
        )
    if name not in TASKS:
        known = ", ".join(sorted({task.name for task in TASKS.values()}))
        raise UserError(
            f"row {example.uid!r}: no reward for data_source {example.data_source!r} (task {name!r}); known tasks: "
            f"{known}. Name the task with --data-source, or give your own with --reward FILE.py:FUNCTION"
        )
    return TASKS[name]


# --- what tasks share: the box ------------------------------------------------------------------------------------

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
SPECIAL_TOKEN = re.compile(r"<\|[^<>|]{1,64}\|>")  # as `<|im_start|>`: kept visible by the engines, no text


def closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one just before `start`; None if the text ends first."""
    depth = 1
    for brace in re.compile("[{}]").finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def extract_boxed(response: str) -> str | None:
    r"""Content of the last `\boxed{...}` (or `\boxed {...}`, `\fbox{...}`); None, and counted, if there is none.

    An unclosed last box means that the response was cut off while it was changing its answer, so an earlier box does
    not count (verl and mathruler decide the same). Braces are counted escaped or not, again as they do.
    """
    boxes = list(BOX.finditer(response))
    end = closing_brace(response, boxes[-1].end()) if boxes else None
    if end is None:
        grader_stats["no_box"] += 1
        return None
    return response[boxes[-1].end() : end]


def weighted(accuracy: float, form: float) -> dict[str, float]:
    """The two and their total, with verl's geo3k weights."""
    return {"accuracy": float(accuracy), "format": float(form), "reward": 0.9 * accuracy + 0.1 * form}


# --- scoring ------------------------------------------------------------------------------------------------------


def score(response: str, example: Any, *, finish_reason: str = "stop") -> dict[str, float]:
    """Named rewards plus the total under "reward", by the example's task. Raises UserError for an unknown task.

    `example` has data_source, ground_truth, extra (dict) and uid; `finish_reason` is the engine's, `stop` or `length`.
    """
    return call(find_task(example).reward, response, example, finish_reason)


def call(function: Callable, response: str, example: Any, *more: str) -> dict[str, float]:
    """A reward function's checked result; what it raises says for which response."""
    with Note(f"raised by the reward of row {example.uid!r} for the response {response[:200]!r}"):
        return checked(function(response, example, *more), example.uid, response)


def checked(result: Any, uid: str, response: str) -> dict[str, float]:
    """A number, or a dict of numbers with the total under "reward", as a dict of floats of at most MAX_REWARD."""
    rewards = result if isinstance(result, dict) else {"reward": result}
    if "reward" not in rewards:
        raise UserError(f"row {uid!r}: the reward returned {reprlib.repr(rewards)}; add a total as 'reward'")
    for name, value in rewards.items():
        if name in RESERVED_NAMES:
            raise UserError(f"row {uid!r}: reward part {name!r} has the name of a metric, reward/{name}; rename it")
        if as_number(value) is None:
            raise UserError(
                f"row {uid!r}: reward part {name!r} is {short(value)} for the response {response[:80]!r}; "
                f"return a finite number from -{MAX_REWARD:g} to {MAX_REWARD:g} (for a tensor: float(x))"
            )
    return {str(name): as_number(value) for name, value in rewards.items()}


def as_number(value: Any) -> float | None:
    """Any kind of real number of at most MAX_REWARD as a float, also numpy's and torch's scalars; else None."""
    number = value.item() if getattr(value, "shape", None) == () else value
    known = isinstance(number, Real | Decimal) and not (isinstance(number, Decimal) and number.is_nan())
    return float(number) if known and abs(number) <= MAX_REWARD else None


def short(value: Any) -> str:
    """A `repr` that fits on a line; that of a very long integer is an error."""
    huge = isinstance(value, int) and value.bit_length() > 256
    return f"an integer of {value.bit_length()} bits" if huge else f"{reprlib.repr(value)} ({type(value).__name__})"


class Later(Exception):
    """Of a reward inside `score_batch` that waits for a slow judge, so that all of a batch are asked together."""


# Slow judges, added by their own files: `batch(collect)`, a context with a time budget, in which questions are
# collected and raise `Later` if `collect`; `ask()`, which answers what was collected; `close()`, which ends processes.
JUDGES: list[Any] = []


def close() -> None:
    """End the processes of slow judges, if any run. The next answer that needs one starts it; exit calls this too."""
    for judge in JUDGES:
        judge.close()


def score_batch(
    responses: Sequence[str],
    examples: Sequence[Any],
    reward_fn: Callable = score,
    finish_reasons: Sequence[str] | None = None,
) -> list[dict[str, float]]:
    """Rewards of each response, in order; one example (and finish reason) per response, repeated within a group.

    One call after another, in this thread; answers that need a slow judge are put off and asked together, in as many
    rounds as an answer has questions that follow from each other. A custom function is called only once.
    """
    reasons = ["stop"] * len(responses) if finish_reasons is None else finish_reasons
    if not len(responses) == len(examples) == len(reasons):
        raise ValueError(
            f"{len(responses)} responses, {len(examples)} examples and {len(reasons)} finish reasons; give one of each"
        )
    load_tasks()
    rewards = [{}] * len(responses)
    todo = range(len(responses))
    with ExitStack() as batches:
        for judge in JUDGES:
            batches.enter_context(judge.batch(collect=reward_fn is score))
        while todo:
            later = []
            for i in todo:
                try:
                    rewards[i] = reward_fn(responses[i], examples[i], finish_reason=reasons[i])
                except Later:
                    later.append(i)
            for judge in JUDGES:
                judge.ask()
            todo = later
    return rewards


# --- a function of the user's -------------------------------------------------------------------------------------


def load_reward(spec: str | None) -> Callable[..., dict[str, float]]:
    """`score` for None; for `path/to/file.py:function` a callable like `score` around the user's function.

    The function is `(response, example) -> number or dict with "reward"`. Raises UserError if the file or the
    function is missing or does not take two arguments; an error inside the file is the user's and passes through.
    The file may import its neighbours, except ones named like our own modules or installed ones, which come first.
    """
    if spec is None:
        return score
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name:
        raise UserError(f"--reward {spec!r}: expected FILE.py:FUNCTION, e.g. my_reward.py:score")
    if not Path(path).is_file():
        raise UserError(f"--reward {spec!r}: there is no file {path!r} (looked from {os.getcwd()})")
    module_spec = importlib.util.spec_from_file_location(f"custom_reward_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look a module up by its name
    if (folder := str(Path(path).resolve().parent)) not in sys.path:
        sys.path.append(folder)  # last, and kept: a function may import when it is called
    with Note(f"raised on importing --reward {spec!r}; our own and installed modules come before its neighbours"):
        module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        state = "is not a function" if hasattr(module, name) else "does not exist"
        raise UserError(f"--reward {spec!r}: {name} {state} in {path}; it has: {', '.join(functions) or 'none'}")
    try:
        inspect.signature(function).bind("", None)
    except TypeError as error:
        raise UserError(f"--reward {spec!r}: {name} must take (response, example): {error}") from error

    def custom(response: str, example: Any, *, finish_reason: str = "stop") -> dict[str, float]:
        return call(function, response, example)

    return custom


# --- checks before a model loads ----------------------------------------------------------------------------------


@contextmanager
def uncounted() -> Iterator[None]:
    """Leaves grader_stats as they were: what is graded inside is no response of the policy's."""
    before = grader_stats.copy()
    yield
    grader_stats.clear()
    grader_stats.update(before)


def try_reward(reward_fn: Callable, example: Any) -> None:
    """Call a custom reward once, with a plausible response, so that a broken one stops the run before a model loads."""
    if reward_fn is not score:
        with uncounted(), Note("this was the trial call before the run"):
            reward_fn(f"<think>A trial.</think> \\boxed{{{example.ground_truth}}}", example)


def check_tasks(examples: Iterable[Any], reward_fn: Callable = score) -> dict[str, int]:
    """Rows per task. Scores each truth as an answer to itself, so that bad data stops a run before a model loads.

    Raises UserError as `score` does, and for a truth that no answer could equal (empty, `°`, `None`, broken LaTeX).
    A custom reward is not called: only rows are counted.
    """
    rows = Counter()
    with uncounted():
        for example in examples:
            rows[task_name(example.data_source)] += 1
            truth = example.ground_truth
            if reward_fn is score and not find_task(example).answerable(truth, score(f"\\boxed{{{truth}}}", example)):
                raise UserError(
                    f"row {example.uid!r}: nothing could equal the ground_truth {truth[:80]!r}; "
                    "correct or remove the row"
                )
    return dict(rows)


def give_rewards(rollouts: Sequence[Any], reward_fn: Callable, algo: Any, max_new_tokens: int) -> None:
    """Fills r.rewards of each rollout with named numbers and their total, "reward". `algo` is a grpo.Algorithm."""
    from grpo import overlong_penalty  # here, so that rewards alone need no torch

    examples = [r.prompt.example for r in rollouts]
    scored = score_batch([r.text for r in rollouts], examples, reward_fn, [r.finish_reason for r in rollouts])
    for r, rewards in zip(rollouts, scored, strict=True):
        r.rewards = rewards
        if algo.truncated == "penalise":
            total = rewards["reward"]
            penalty = overlong_penalty(len(r.response), max_new_tokens, max(1, max_new_tokens // 5))  # DAPO's share
            r.rewards = rewards | {"unpenalised": total, "overlong": penalty, "reward": total + penalty}
