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
from reward import Counting, Failure, Outcome, Stage, checked, load_tasks
from rewards.functions import Function, function_of, load_function

CAUGHT = (Exception, SystemExit, asyncio.CancelledError)  # a reward may fail in any way, and the run goes on
CONCURRENT = 64  # calls of an async function that wait together
JUDGE = "judge"


class Item(NamedTuple):
    """A response to grade. On its way to another process its example is a number."""

    response: str
    example: Any
    finish_reason: str


class Call(NamedTuple):
    round: int  # calls of the same round share examples, and know the same late questions for math-verify
    key: str  # FILE.py:FUNCTION, or the name of a task
    items: Sequence[Item]  # several of a batch function
    step: int | None = None
    stage: Stage = Stage()


# --- calling it -----------------------------------------------------------------------------------------------------


def arguments(function: Function, call: Call) -> tuple[tuple, dict[str, Any]]:
    responses, examples, reasons = map(list, zip(*call.items, strict=True))
    named = {"finish_reasons": reasons, "finish_reason": reasons[0], "step": call.step, "stage": call.stage}
    first = (responses, examples) if function.batch else (responses[0], examples[0])
    return first, {name: named[name] for name in function.takes}


def failed(items: Sequence[Item], error: BaseException) -> list[Outcome]:
    """Return a failure for each item, after a note on the error which these are."""
    uid, response = items[0].example.uid, items[0].response
    more = f" and {len(items) - 1} more" if len(items) > 1 else ""
    error.add_note(f"raised by the reward of row {uid!r} for the response {response[:200]!r}{more}")
    return [Failure.of(error, item.example.uid) for item in items]


def outcomes(function: Function, call: Call, result: Any) -> list[Outcome]:
    """Check what a call returned: one outcome for each item."""
    results = list(result) if function.batch else [result]
    if len(results) != len(call.items):
        uid = call.items[0].example.uid
        lengths = f"a list of {len(results)} for {len(call.items)} responses"
        raise UserError(f"row {uid!r} and others: the reward returned {lengths}; return one of each")
    return list(map(outcome, results, call.items))


def outcome(result: Any, item: Item) -> Outcome:
    try:
        return checked(result, item.example.uid, item.response, len(getattr(item.example, "images", ())))
    except CAUGHT as error:  # its numbers are the user's objects too
        return failed([item], error)[0]


def run(function: Function, call: Call) -> list[Outcome]:
    """Make a call. Failures are outcomes."""
    first, named = arguments(function, call)
    try:
        return outcomes(function, call, function.call(*first, **named))
    except CAUGHT as error:
        return failed(call.items, error)


async def run_async(function: Function, call: Call, limit: float | None) -> list[Outcome]:
    """Make a call of an async function, which may take `limit` seconds."""
    first, named = arguments(function, call)
    clock = asyncio.timeout(limit)
    try:
        async with clock:
            result = await function.call(*first, **named)
        return outcomes(function, call, result)
    except CAUGHT as error:
        return fail_late(call, limit) if clock.expired() else failed(call.items, error)


def fail_late(call: Call, limit: float) -> list[Outcome]:
    return fail(call, "timeouts", "time-out", f"the reward took longer than --reward-timeout {limit:g} s")


def fail(call: Call, kind: str, what: str, why: str, trace: str = "") -> list[Outcome]:
    """Return failures for all of a call, as nothing came of it."""
    return [Failure(kind, what, f"row {item.example.uid!r}: {why}", trace) for item in call.items]


# --- a process that makes calls -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What a process gets at its start."""

    keys: Sequence[str]  # FILE.py:FUNCTION, to be loaded
    make_judge: Callable[[], Any] | None
    asynchronous: bool
    limit: float  # seconds


def work(fd: int, parent: int) -> None:
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
    except CAUGHT as error:  # on importing the user's file, say
        with suppress(BrokenPipeError):  # nobody listens any more
            conn.send(("broken", users_traceback(error)))


class Worker:
    """What a process has for its calls: functions, the round's examples, and the connection to the trainer."""

    def __init__(self, conn: Connection, setup: Setup):
        self.conn = conn
        self.setup = setup
        self.functions = {key: load_function(key) for key in setup.keys}
        self.judge = setup.make_judge() if setup.make_judge else None
        if self.judge:
            self.functions[JUDGE] = Function(self.judge.score, batch=False, asynchronous=True, takes=())
        load_tasks()
        self.counted: Counter[str] = Counter()  # of the judge's counts
        self.examples: dict[int, Any] = {}
        self.round = -1
        with suppress(BrokenPipeError):  # then there will be nothing to receive either
            conn.send(("ready",))

    def receive(self) -> dict[int, Call]:
        """Return the calls of a message by their numbers, with their examples."""
        round, examples, self.late, calls = self.conn.recv()
        if round != self.round:
            self.round = round
            self.examples.clear()
        self.examples |= examples
        for number, call in calls.items():
            items = [item._replace(example=self.examples[item.example]) for item in call.items]
            calls[number] = call._replace(items=items)
        return calls

    def counting(self, number: int) -> Counting:
        """Return what a call counts in; it tells the trainer of time limits of its own, and (0) of their ends."""
        return Counting(set(self.late), lambda *limit: self.conn.send(("limit", number, *limit)))

    def send(self, number: int, results: Sequence[Outcome], counts: Counter[str]) -> None:
        counts = dict(counts)
        if self.judge:
            counts |= {f"judge/{name}": n - self.counted[name] for name, n in self.judge.counts.items()}
            self.counted = Counter(self.judge.counts)
        plain = [replace(o, error=None) if isinstance(o, Failure) else o for o in results]
        self.conn.send(("done", number, plain, counts))


def serve(worker: Worker) -> None:
    """Make one call after another."""
    while True:
        for number, call in worker.receive().items():
            with worker.counting(number) as counted:
                results = run(function_of(call.key, worker.functions), call)
            worker.send(number, results, counted.counts)


async def serve_together(conn: Connection, setup: Setup) -> None:
    """Begin each call as it comes."""
    worker = Worker(conn, setup)  # here: what a judge opens belongs to the loop
    closed = asyncio.Event()
    tasks: set[asyncio.Task] = set()  # the loop itself would let them go

    async def make(number: int, call: Call) -> None:
        limit = None if call.key == JUDGE else setup.limit
        with worker.counting(number) as counted:
            results = await run_async(function_of(call.key, worker.functions), call, limit)
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
