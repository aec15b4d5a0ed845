"""One call of a reward function, in whichever process: what it is given, and what comes of it."""

import asyncio
import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from numbers import Real
from statistics import fmean
from typing import Any, NamedTuple

import reward
from errors import Note, UserError, describe_error, printable, users_traceback
from reward import HELPERS, Later, Stage

MAX_REWARD = 1e6  # a larger reward overflows what is computed from it in fp32
MAX_PARTS = 100  # named numbers of a reward: each is a metric, and a column of the pages
# names of our own metrics reward/<name>
RESERVED_NAMES = ("mean", "constant_groups", "unpenalised", "overlong", "errors", "timeouts")
CAUGHT = (Exception, SystemExit, asyncio.CancelledError)  # a reward may fail in any way, and the run goes on
CONCURRENT = 64  # calls of an async function that wait together


@dataclass(frozen=True)
class Function:
    """A reward function and how it is called, by its signature."""

    call: Callable
    batch: bool  # once, with all responses of a round
    asynchronous: bool
    takes: tuple[str, ...]  # by name

    @classmethod
    def of(cls, function: Callable, told: str) -> "Function":
        """UserError if it cannot be called so."""
        try:
            signature = inspect.signature(function)
            names = list(signature.parameters)
            batch = names[:1] == ["responses"]
            known = ("finish_reasons" if batch else "finish_reason", "step", "stage")
            all_names = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
            takes = tuple(name for name in known if all_names or name in names)
            signature.bind(None, None, **dict.fromkeys(takes))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{told} must take (response, example) or (responses, examples), and what else it wants by name, "
                f"finish_reason (finish_reasons), step, stage: {error}"
            ) from error
        by_class = getattr(type(function), "__call__", None)  # noqa: B004  of an object that is called
        asynchronous = any(map(inspect.iscoroutinefunction, (function, by_class)))
        return cls(function, batch, asynchronous, takes)


class Item(NamedTuple):
    """A response to grade. On its way to another process its example is a number."""

    response: str
    example: Any
    finish_reason: str


@dataclass(frozen=True)
class Call:
    number: int
    round: int
    key: str  # FILE.py:FUNCTION, or the name of a task
    items: Sequence[Item]  # several of a batch function
    step: int | None
    stage: Stage


class RewardFailed(Exception):
    """A reward that failed in another process, with its traceback there."""


@dataclass(frozen=True)
class Failure:
    """Of a reward, in place of its numbers."""

    kind: str  # "errors" or "timeouts", as in metrics
    what: str  # the type of exception, or what happened
    line: str
    trace: str = ""
    users: bool = False  # a UserError, told in a line
    error: BaseException | None = None  # in this process alone

    @classmethod
    def of(cls, error: BaseException, item: Item) -> "Failure":
        users = isinstance(error, UserError)
        line = f"row {item.example.uid!r}: the reward raised {describe_error(error)}"
        if users:
            line = printable(str(error).strip().partition("\n")[0])
        trace = "" if users or getattr(error, "in_a_line", False) else users_traceback(error)
        return cls("errors", type(error).__name__, line, trace, users, error)

    @classmethod
    def late(cls, item: Item, seconds: float) -> "Failure":
        line = f"row {item.example.uid!r}: the reward took longer than --reward-timeout {seconds:g} s"
        return cls("timeouts", "time-out", line)

    def exception(self) -> BaseException:
        return self.error or (UserError(self.line) if self.users else RewardFailed(f"{self.line}\n{self.trace}"))


Outcome = dict[str, float] | Failure


# --- what a reward returns ------------------------------------------------------------------------------------------


def checked(result: Any, uid: str, response: str, n_images: int = 0) -> dict[str, float]:
    """A number, or a dict of numbers with the total under "reward", as a dict of floats of at most MAX_REWARD. One
    number per image under "images" becomes image_1, ...; where there is no total, their mean is it."""
    rewards = dict(result) if isinstance(result, dict) else {"reward": result}
    if len(rewards) > MAX_PARTS:
        raise UserError(f"row {uid!r}: the reward returned {len(rewards)} parts; return at most {MAX_PARTS}")
    if "images" in rewards:
        parts = list(rewards.pop("images"))
        if len(parts) != n_images:
            told = f"row {uid!r}: the reward returned {len(parts)} numbers under 'images'"
            raise UserError(f"{told} for {n_images} images; return one of each")
        rewards |= {f"image_{i}": part for i, part in enumerate(parts, 1)}
        if "reward" not in rewards and parts and None not in (numbers := list(map(as_number, parts))):
            rewards["reward"] = fmean(numbers)
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
    return {printable(name): as_number(value) for name, value in rewards.items()}


def as_number(value: Any) -> float | None:
    """Any kind of real number of at most MAX_REWARD as a float, also numpy's and torch's scalars; else None."""
    number = value.item() if getattr(value, "shape", None) == () else value
    known = isinstance(number, Real | Decimal) and not (isinstance(number, Decimal) and number.is_nan())
    return float(number) if known and abs(number) <= MAX_REWARD else None


def short(value: Any) -> str:
    """A `repr` that fits on a line; that of a very long integer is an error."""
    huge = isinstance(value, int) and value.bit_length() > 256
    return f"an integer of {value.bit_length()} bits" if huge else f"{reprlib.repr(value)} ({type(value).__name__})"


# --- calling it -----------------------------------------------------------------------------------------------------


def function_of(key: str, functions: Mapping[str, Function]) -> Function:
    return functions[key] if key in functions else of_task(reward.TASKS[key].reward)


@cache
def of_task(function: Callable) -> Function:
    return Function.of(function, f"a task's reward, {function.__name__},")


def arguments(function: Function, call: Call) -> tuple[tuple, dict[str, Any]]:
    responses, examples, reasons = map(list, zip(*call.items, strict=True))
    named = {"finish_reasons": reasons, "finish_reason": reasons[0], "step": call.step, "stage": call.stage}
    first = (responses, examples) if function.batch else (responses[0], examples[0])
    return first, {name: named[name] for name in function.takes}


def noted(items: Sequence[Item]) -> Note:
    uid, response = items[0].example.uid, items[0].response
    more = f" and {len(items) - 1} more" if len(items) > 1 else ""
    return Note(f"raised by the reward of row {uid!r} for the response {response[:200]!r}{more}")


def outcomes(function: Function, call: Call, result: Any) -> list[Outcome]:
    """What a call returned, checked: one for each item."""
    if not function.batch:
        return [outcome(result, call.items[0])]
    results = list(result)
    if len(results) != len(call.items):
        uid = call.items[0].example.uid
        told = f"row {uid!r} and others: the reward returned a list of {len(results)} for {len(call.items)} responses"
        raise UserError(f"{told}; return one of each")
    return list(map(outcome, results, call.items))


def outcome(result: Any, item: Item) -> Outcome:
    try:
        with noted([item]):
            return checked(result, item.example.uid, item.response, len(getattr(item.example, "images", ())))
    except CAUGHT as error:  # its numbers are the user's objects too
        return Failure.of(error, item)


def run(function: Function, call: Call) -> list[Outcome]:
    """Call it. `Later` passes through: it is no failure."""
    first, named = arguments(function, call)
    try:
        with noted(call.items):
            return outcomes(function, call, function.call(*first, **named))
    except Later:
        raise
    except CAUGHT as error:
        return [Failure.of(error, item) for item in call.items]


async def run_async(function: Function, call: Call, limit: float | None) -> list[Outcome]:
    first, named = arguments(function, call)
    clock = asyncio.timeout(limit)
    try:
        with noted(call.items):
            async with clock:
                result = await function.call(*first, **named)
            return outcomes(function, call, result)
    except CAUGHT as error:
        if clock.expired():
            return [Failure.late(item, limit) for item in call.items]
        return [Failure.of(error, item) for item in call.items]


def grade_one(own: Callable, response: str, example: Any, finish_reason: str) -> dict[str, float]:
    """One response at once, without a time limit; raises what the reward raises."""
    function = of_task(own)
    call = Call(0, 0, "", [Item(response, example, finish_reason)], None, Stage())
    [result] = asyncio.run(run_async(function, call, None)) if function.asynchronous else run(function, call)
    if isinstance(result, Failure):
        raise result.exception()
    return result


class Here:
    """Grades in this process, when all responses are there, without time limits: for debuggers."""

    def __init__(self, functions: Mapping[str, Function]):
        self.functions = functions
        self.calls: list[Call] = []
        self.open: set[int] = set()  # calls without an answer yet
        self.runner: asyncio.Runner | None = None  # kept: what an async function opens belongs to its loop

    def submit(self, call: Call) -> None:
        self.calls.append(call)
        self.open.add(call.number)

    def collect(self, numbers: Set[int]) -> dict[int, list[Outcome]]:
        """By the calls' numbers."""
        calls = [call for call in self.calls if call.number in numbers]
        self.calls = [call for call in self.calls if call.number not in numbers]  # other rounds'
        found = {call.number: function_of(call.key, self.functions) for call in calls}
        own = [c for c in calls if c.key not in self.functions and not found[c.number].asynchronous]
        users = [c for c in calls if c.key in self.functions and not found[c.number].asynchronous]
        rest = [c for c in calls if found[c.number].asynchronous]
        done = self._one_by_one(own, found, collect=True) | self._one_by_one(users, found, collect=False)
        done |= self._together(rest, found) if rest else {}
        self.open -= numbers
        return done

    def _one_by_one(
        self, calls: Sequence[Call], found: Mapping[int, Function], collect: bool
    ) -> dict[int, list[Outcome]]:
        """Answers that need a slow helper are put off and asked together, in as many rounds as an answer has questions
        that follow from each other; a function of the user's is called only once."""
        done = {}
        with ExitStack() as batches:
            for helper in HELPERS:
                batches.enter_context(helper.batch(collect))
            while calls:
                later = []
                for call in calls:
                    try:
                        done[call.number] = run(found[call.number], call)
                        self.open.discard(call.number)
                    except Later:
                        later.append(call)
                for helper in HELPERS:
                    helper.ask()
                calls = later
        return done

    def _together(self, calls: Sequence[Call], found: Mapping[int, Function]) -> dict[int, list[Outcome]]:
        async def all_of_them() -> list[list[Outcome]]:
            few = asyncio.Semaphore(CONCURRENT)

            async def one(call: Call) -> list[Outcome]:
                async with few:
                    return await run_async(found[call.number], call, None)

            return await asyncio.gather(*map(one, calls))

        self.runner = self.runner or asyncio.Runner()
        results = self.runner.run(all_of_them())
        return {call.number: result for call, result in zip(calls, results, strict=True)}

    def close(self) -> None:
        if self.runner:
            self.runner.close()
