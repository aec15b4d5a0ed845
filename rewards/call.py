"""Single calls of reward functions: their arguments, their outcomes, and the worker processes that make them."""

import asyncio
import ctypes
import faulthandler
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from errors import UserError, as_user_error, keep_printing, users_traceback
from reward import Counting, CurriculumStage, RewardFailure, RewardOutcome, load_tasks, validate_reward
from rewards.functions import RewardFunction, get_function, load_reward_function

REWARD_EXCEPTIONS = (Exception, SystemExit, asyncio.CancelledError)  # no failure of a reward ends the run
MAX_CONCURRENT_CALLS = 64  # calls of an async function in flight at once
JUDGE = "judge"


class RewardInput(NamedTuple):
    """A response to grade. While it is sent to a worker process, `example` is the id of the example."""

    response: str
    example: Any
    finish_reason: str


class RewardCall(NamedTuple):
    """A call of a reward function, with the responses that it grades."""

    batch_id: int  # calls of the same batch share examples and the math-verify questions that timed out
    key: str  # FILE.py:FUNCTION, or the name of a task
    items: Sequence[RewardInput]  # several if it is a batch function
    step: int | None = None
    stage: CurriculumStage = CurriculumStage()


# --- calls ----------------------------------------------------------------------------------------------------------


def build_arguments(function: RewardFunction, call: RewardCall) -> tuple[tuple, dict[str, Any]]:
    """Return the positional and the keyword arguments of a call."""
    responses, examples, reasons = map(list, zip(*call.items, strict=True))
    optional = {"finish_reasons": reasons, "finish_reason": reasons[0], "step": call.step, "stage": call.stage}
    positional = (responses, examples) if function.batch else (responses[0], examples[0])
    return positional, {name: optional[name] for name in function.optional_args}


def to_failure(items: Sequence[RewardInput], error: BaseException) -> list[RewardOutcome]:
    """Return a failure for each item, and add a note to the error that names them."""
    uid, response = items[0].example.uid, items[0].response
    others = f" and {len(items) - 1} more" if len(items) > 1 else ""
    error.add_note(f"raised by the reward of row {uid!r} for the response {response[:200]!r}{others}")
    return [RewardFailure.from_exception(error, item.example.uid) for item in items]


def to_outcomes(function: RewardFunction, call: RewardCall, result: Any) -> list[RewardOutcome]:
    """Check what a call returned, and return one outcome for each item."""
    results = list(result) if function.batch else [result]
    origin = f"--reward {call.key}" if ":" in call.key else "the task's reward"
    if len(results) != len(call.items):
        uid = call.items[0].example.uid
        lengths = f"a list of {len(results)} for {len(call.items)} responses"
        raise UserError(f"{origin}: row {uid!r} and others: it returned {lengths}; return one for each response")
    return [to_outcome(result, item, origin) for result, item in zip(results, call.items, strict=True)]


def to_outcome(result: Any, item: RewardInput, origin: str) -> RewardOutcome:
    """Return the named rewards of an item, or a failure, which names their `origin`, if its result is invalid."""
    try:
        with as_user_error(UserError, origin):
            return validate_reward(result, item.example.uid, item.response, len(getattr(item.example, "images", ())))
    except REWARD_EXCEPTIONS as error:  # the numbers may be objects of the user's classes, whose methods can raise
        return to_failure([item], error)[0]


def call_function(function: RewardFunction, call: RewardCall) -> list[RewardOutcome]:
    """Make a call and return its outcomes. A failure is an outcome too."""
    args, kwargs = build_arguments(function, call)
    try:
        return to_outcomes(function, call, function.call(*args, **kwargs))
    except REWARD_EXCEPTIONS as error:
        return to_failure(call.items, error)


async def call_function_async(function: RewardFunction, call: RewardCall, limit: float | None) -> list[RewardOutcome]:
    """Call an async function and return the outcomes. The call times out after `limit` seconds (None: never)."""
    args, kwargs = build_arguments(function, call)
    timeout = asyncio.timeout(limit)
    try:
        async with timeout:
            result = await function.call(*args, **kwargs)
        return to_outcomes(function, call, result)
    except REWARD_EXCEPTIONS as error:
        return fail_timed_out(call, limit) if timeout.expired() else to_failure(call.items, error)


def fail_timed_out(call: RewardCall, limit: float) -> list[RewardOutcome]:
    """Return a failure for each item of a call that took longer than `limit` seconds."""
    return fail_call(call, "timeouts", "timeout", f"the reward took longer than --reward-timeout {limit:g} s")


def fail_call(call: RewardCall, kind: str, what: str, reason: str, trace: str = "") -> list[RewardOutcome]:
    """Return a failure for each item of a call that returned no result."""
    return [RewardFailure(kind, what, f"row {item.example.uid!r}: {reason}", trace) for item in call.items]


# --- a worker process -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerConfig:
    """The settings of a worker process, sent to it when it starts."""

    keys: Sequence[str]  # FILE.py:FUNCTION of each function to load
    make_judge: Callable[[], Any] | None
    asynchronous: bool
    limit: float  # seconds per call


def reward_worker_main(fd: int, parent: int) -> None:
    """Make the calls received over the socket `fd` until it closes. `parent` is the id of the process that started
    this one."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: the kernel kills this process when the thread that started it ends, even while C code runs
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl took effect
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU):
        signal.signal(number, lambda *_: None)  # sent to all processes of a run, they are meant for the trainer
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    keep_printing()
    conn = Connection(fd)
    try:
        config = conn.recv()
        asyncio.run(serve_concurrently(conn, config)) if config.asynchronous else serve(Worker(conn, config))
    except EOFError:
        pass  # the trainer has closed the connection
    except REWARD_EXCEPTIONS as error:  # for example when the user's file is imported
        with suppress(BrokenPipeError):  # the trainer has closed the connection
            conn.send(("broken", users_traceback(error)))


class Worker:
    """The state of a worker process: its functions, the batch's examples, and the connection to the trainer."""

    def __init__(self, conn: Connection, config: WorkerConfig):
        self.conn = conn
        self.config = config
        self.functions = {key: load_reward_function(key) for key in config.keys}
        self.judge = config.make_judge() if config.make_judge else None
        if self.judge:
            self.functions[JUDGE] = RewardFunction(self.judge.score, batch=False, asynchronous=True, optional_args=())
        load_tasks()
        self.reported: Counter[str] = Counter()  # the judge's counts when they were last sent
        self.examples: dict[int, Any] = {}
        self.batch_id = -1
        with suppress(BrokenPipeError):  # the next recv raises EOFError, which ends the process
            conn.send(("ready",))

    def receive(self) -> dict[int, RewardCall]:
        """Receive a message and return its calls by number, with the ids of examples replaced by the examples."""
        batch_id, examples, self.timed_out, calls = self.conn.recv()
        if batch_id != self.batch_id:
            self.batch_id = batch_id
            self.examples.clear()
        self.examples |= examples
        for number, call in calls.items():
            items = [item._replace(example=self.examples[item.example]) for item in call.items]
            calls[number] = call._replace(items=items)
        return calls

    def counting(self, number: int) -> Counting:
        """Return the Counting of a call. It reports the call's own time limits to the trainer, and 0 when one ends."""
        return Counting(set(self.timed_out), lambda *limit: self.conn.send(("limit", number, *limit)))

    def send(self, number: int, outcomes: Sequence[RewardOutcome], counts: Counter[str]) -> None:
        """Send the outcomes and counts of a call to the trainer, without exception objects, which may not pickle."""
        counts = dict(counts)
        if self.judge:
            counts |= {f"judge/{name}": n - self.reported[name] for name, n in self.judge.counts.items()}
            self.reported = Counter(self.judge.counts)
        plain = [replace(o, error=None) if isinstance(o, RewardFailure) else o for o in outcomes]
        self.conn.send(("done", number, plain, counts))


def serve(worker: Worker) -> None:
    """Make calls one after another."""
    while True:
        for number, call in worker.receive().items():
            with worker.counting(number) as counting:
                outcomes = call_function(get_function(call.key, worker.functions), call)
            worker.send(number, outcomes, counting.counts)


async def serve_concurrently(conn: Connection, config: WorkerConfig) -> None:
    """Start each call as soon as it is received."""
    worker = Worker(conn, config)  # made in the event loop, to which the judge's connections belong
    closed = asyncio.Event()
    tasks: set[asyncio.Task] = set()  # the event loop itself keeps only weak references to them

    async def make(number: int, call: RewardCall) -> None:
        limit = None if call.key == JUDGE else config.limit
        with worker.counting(number) as counting:
            outcomes = await call_function_async(get_function(call.key, worker.functions), call, limit)
        worker.send(number, outcomes, counting.counts)

    def receive() -> None:
        try:
            for number, call in worker.receive().items():
                task = asyncio.create_task(make(number, call))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (EOFError, OSError):
            closed.set()

    asyncio.get_running_loop().add_reader(conn.fileno(), receive)
    await closed.wait()
