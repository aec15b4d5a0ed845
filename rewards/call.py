"""One call of a reward function: what it is given, what comes of it, and the processes in which calls run."""

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

from errors import UserError, keep_printing, users_traceback
from reward import Counting, CurriculumStage, RewardFailure, RewardOutcome, load_tasks, validate_reward
from rewards.functions import RewardFunction, get_function, load_reward_function

REWARD_EXCEPTIONS = (Exception, SystemExit, asyncio.CancelledError)  # a reward may fail in any way, and the run goes on
MAX_CONCURRENT_CALLS = 64  # calls of an async function that wait together
JUDGE = "judge"


class RewardInput(NamedTuple):
    """A response to grade. On its way to another process its example is a number."""

    response: str
    example: Any
    finish_reason: str


class RewardCall(NamedTuple):
    batch_id: int  # calls of the same round share examples, and know the same late questions for math-verify
    key: str  # FILE.py:FUNCTION, or the name of a task
    items: Sequence[RewardInput]  # several of a batch function
    step: int | None = None
    stage: CurriculumStage = CurriculumStage()


# --- calling it -----------------------------------------------------------------------------------------------------


def build_arguments(function: RewardFunction, call: RewardCall) -> tuple[tuple, dict[str, Any]]:
    responses, examples, reasons = map(list, zip(*call.items, strict=True))
    named = {"finish_reasons": reasons, "finish_reason": reasons[0], "step": call.step, "stage": call.stage}
    first = (responses, examples) if function.batch else (responses[0], examples[0])
    return first, {name: named[name] for name in function.optional_args}


def to_failure(items: Sequence[RewardInput], error: BaseException) -> list[RewardOutcome]:
    """Return a failure for each item, after a note on the error which these are."""
    uid, response = items[0].example.uid, items[0].response
    more = f" and {len(items) - 1} more" if len(items) > 1 else ""
    error.add_note(f"raised by the reward of row {uid!r} for the response {response[:200]!r}{more}")
    return [RewardFailure.from_exception(error, item.example.uid) for item in items]


def to_outcomes(function: RewardFunction, call: RewardCall, result: Any) -> list[RewardOutcome]:
    """Check what a call returned: one outcome for each item."""
    results = list(result) if function.batch else [result]
    if len(results) != len(call.items):
        uid = call.items[0].example.uid
        lengths = f"a list of {len(results)} for {len(call.items)} responses"
        raise UserError(f"row {uid!r} and others: the reward returned {lengths}; return one of each")
    return list(map(to_outcome, results, call.items))


def to_outcome(result: Any, item: RewardInput) -> RewardOutcome:
    try:
        return validate_reward(result, item.example.uid, item.response, len(getattr(item.example, "images", ())))
    except REWARD_EXCEPTIONS as error:  # its numbers are the user's objects too
        return to_failure([item], error)[0]


def call_function(function: RewardFunction, call: RewardCall) -> list[RewardOutcome]:
    """Make a call. Failures are outcomes."""
    first, named = build_arguments(function, call)
    try:
        return to_outcomes(function, call, function.call(*first, **named))
    except REWARD_EXCEPTIONS as error:
        return to_failure(call.items, error)


async def call_function_async(function: RewardFunction, call: RewardCall, limit: float | None) -> list[RewardOutcome]:
    """Make a call of an async function, which may take `limit` seconds."""
    first, named = build_arguments(function, call)
    clock = asyncio.timeout(limit)
    try:
        async with clock:
            result = await function.call(*first, **named)
        return to_outcomes(function, call, result)
    except REWARD_EXCEPTIONS as error:
        return fail_late(call, limit) if clock.expired() else to_failure(call.items, error)


def fail_late(call: RewardCall, limit: float) -> list[RewardOutcome]:
    return fail_call(call, "timeouts", "time-out", f"the reward took longer than --reward-timeout {limit:g} s")


def fail_call(call: RewardCall, kind: str, what: str, why: str, trace: str = "") -> list[RewardOutcome]:
    """Return failures for all of a call, as nothing came of it."""
    return [RewardFailure(kind, what, f"row {item.example.uid!r}: {why}", trace) for item in call.items]


# --- a process that makes calls -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerConfig:
    """What a process gets at its start."""

    keys: Sequence[str]  # FILE.py:FUNCTION, to be loaded
    make_judge: Callable[[], Any] | None
    asynchronous: bool
    limit: float  # seconds


def reward_worker_main(fd: int, parent: int) -> None:
    """Answer calls that come over the socket `fd`, until it closes. `parent`: the process that started this one."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: the kernel ends this process with the thread that started it, also while C code runs
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU):
        signal.signal(number, lambda *_: None)  # whoever sends them to all processes of a run means the trainer
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    keep_printing()
    conn = Connection(fd)
    try:
        setup = conn.recv()
        asyncio.run(serve_together(conn, setup)) if setup.asynchronous else serve(Worker(conn, setup))
    except EOFError:
        pass  # the trainer needs no more
    except REWARD_EXCEPTIONS as error:  # on importing the user's file, say
        with suppress(BrokenPipeError):  # nobody listens any more
            conn.send(("broken", users_traceback(error)))


class Worker:
    """What a process has for its calls: functions, the round's examples, and the connection to the trainer."""

    def __init__(self, conn: Connection, setup: WorkerConfig):
        self.conn = conn
        self.setup = setup
        self.functions = {key: load_reward_function(key) for key in setup.keys}
        self.judge = setup.make_judge() if setup.make_judge else None
        if self.judge:
            self.functions[JUDGE] = RewardFunction(self.judge.score, batch=False, asynchronous=True, optional_args=())
        load_tasks()
        self.counted: Counter[str] = Counter()  # of the judge's counts
        self.examples: dict[int, Any] = {}
        self.batch_id = -1
        with suppress(BrokenPipeError):  # then there will be nothing to receive either
            conn.send(("ready",))

    def receive(self) -> dict[int, RewardCall]:
        """Return the calls of a message by their numbers, with their examples."""
        round, examples, self.timed_out, calls = self.conn.recv()
        if round != self.batch_id:
            self.batch_id = round
            self.examples.clear()
        self.examples |= examples
        for number, call in calls.items():
            items = [item._replace(example=self.examples[item.example]) for item in call.items]
            calls[number] = call._replace(items=items)
        return calls

    def counting(self, number: int) -> Counting:
        """Return what a call counts in; it tells the trainer of time limits of its own, and (0) of their ends."""
        return Counting(set(self.timed_out), lambda *limit: self.conn.send(("limit", number, *limit)))

    def send(self, number: int, results: Sequence[RewardOutcome], counts: Counter[str]) -> None:
        counts = dict(counts)
        if self.judge:
            counts |= {f"judge/{name}": n - self.counted[name] for name, n in self.judge.counts.items()}
            self.counted = Counter(self.judge.counts)
        plain = [replace(o, error=None) if isinstance(o, RewardFailure) else o for o in results]
        self.conn.send(("done", number, plain, counts))


def serve(worker: Worker) -> None:
    """Make one call after another."""
    while True:
        for number, call in worker.receive().items():
            with worker.counting(number) as counted:
                results = call_function(get_function(call.key, worker.functions), call)
            worker.send(number, results, counted.counts)


async def serve_together(conn: Connection, setup: WorkerConfig) -> None:
    """Begin each call as it comes."""
    worker = Worker(conn, setup)  # here: what a judge opens belongs to the loop
    closed = asyncio.Event()
    tasks: set[asyncio.Task] = set()  # the loop itself would let them go

    async def make(number: int, call: RewardCall) -> None:
        limit = None if call.key == JUDGE else setup.limit
        with worker.counting(number) as counted:
            results = await call_function_async(get_function(call.key, worker.functions), call, limit)
        worker.send(number, results, counted.counts)

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
