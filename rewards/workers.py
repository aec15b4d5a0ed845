"""Processes that grade. Plain subprocesses of this file: `spawn` of multiprocessing would import train.py, and so
torch, again; `fork` is not safe with torch's, gloo's and CUDA's threads.

A thread of the trainer's hands calls out and hears of their results. A process that is late, or ends, is ended with all
that it has started, and replaced: the call that it was at has failed, the others are asked again. Where several were
being waited for (async functions) each of them is asked again alone, so that the guilty one is found. A process dies
with its trainer, however that ends, also within a call that never returns to Python.
"""

import asyncio
import atexit
import faulthandler
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from struct import pack
from typing import Any

from errors import keep_printing, users_traceback
from reward import HELPERS, grader_stats, load_tasks
from rewards.calls import CAUGHT, Call, Failure, Function, Item, Outcome, function_of, run, run_async
from rewards.custom import load_function

JUDGE = "judge"
START_S = 300.0  # importing a user's file may load a model
GRACE_S = 5.0  # an async function that is late is stopped by its own process; one that blocks it, by ours
CHUNK_S = 0.05  # of work is handed to a process at a time
MAX_CHUNK = 32  # calls
SEND_S = 10  # after this long a process that does not read, or does not finish a message, is given up

# --- the trainer's side -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What a process is told at its start."""

    keys: Sequence[str]  # FILE.py:FUNCTION, to be loaded
    make_judge: Callable[[], Any] | None
    asynchronous: bool
    limit: float  # seconds


@dataclass(eq=False)
class Worker:
    process: subprocess.Popen
    conn: Connection
    lifeline: int  # a pipe that the kernel closes when this process ends
    deadline: float
    ready: bool = False
    calls: dict[int, Call] = field(default_factory=dict)  # handed out, in order
    alone: bool = False  # its one call is a suspect
    sent: set[int] = field(default_factory=set)  # examples that it has, by id
    round: int = -1

    @classmethod
    def start(cls, setup: Setup) -> "Worker":
        ours, theirs = socket.socketpair()
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, limit, pack("ll", SEND_S, 0))
        held, lifeline = os.pipe()
        root = str(Path(__file__).resolve().parent.parent)
        code = f"import sys; sys.path[0] = {root!r}; from rewards.workers import work; work(*map(int, sys.argv[1:]))"
        fds = (theirs.fileno(), held)
        with theirs:  # a session of its own: Ctrl-C is for the trainer
            command = [sys.executable, "-c", code, *map(str, fds)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True)
        os.close(held)
        worker = cls(process, Connection(ours.detach()), lifeline, time.monotonic() + START_S)
        worker.conn.send(setup)
        return worker

    def hand(self, calls: Sequence[Call], limit: float) -> None:
        """An example is sent once a round, however many responses it has. Rounds may take turns: what is kept from
        message to message depends on the first call's alone, as in Desk.take."""
        examples: dict[int, Any] = {}
        numbered = []
        if calls[0].round != self.round:
            self.round = calls[0].round
            self.sent.clear()
        for call in calls:
            items = [Item(item.response, id(item.example), item.finish_reason) for item in call.items]
            new = {id(item.example): item.example for item in call.items if id(item.example) not in self.sent}
            self.sent |= new.keys()
            examples |= new
            numbered.append(replace(call, items=items))
        self.calls |= {call.number: call for call in calls}
        self.deadline = time.monotonic() + limit
        self.conn.send((examples, numbered))

    def end(self, late: bool = False) -> str:
        """How it ended, by itself or, if it is late, now; with it all that it has started."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.0 if late else 1.0)
        code = self.process.poll()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.conn.close()
        os.close(self.lifeline)
        if code is None:
            return "by breaking its connection to the trainer"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class Workers:
    """Up to `size` processes that call the same functions, each `concurrent` at a time. They start with the first call
    and are kept."""

    def __init__(self, size: int, setup: Setup, concurrent: int):
        self.size = size
        self.setup = setup
        self.concurrent = concurrent
        judging = setup.make_judge is not None  # a judge keeps its own time limits
        self.limit = float("inf") if judging else setup.limit + (GRACE_S if setup.asynchronous else 0.0)
        self.workers: list[Worker] = []
        self.waiting: deque[Call] = deque()
        self.suspects: deque[Call] = deque()  # of a process that ended with several: asked again alone
        self.done: dict[int, tuple[list[Outcome], Mapping[str, int]]] = {}  # with what they counted
        self.open: set[int] = set()
        self.pace = CHUNK_S  # seconds a call, lately
        self.changed = threading.Condition()
        self.bell, self.rope = os.pipe()
        os.set_blocking(self.bell, False)
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.shown = False  # where the first late call was
        atexit.register(self.close)

    def submit(self, call: Call) -> None:
        with self.changed:
            self.open.add(call.number)
            self.waiting.append(call)
            if self.thread is None:
                self.thread = threading.Thread(target=self._serve, name="rewards", daemon=True)
                self.thread.start()
        os.write(self.rope, b".")

    def collect(self, numbers: Set[int]) -> dict[int, list[Outcome]]:
        """By the calls' numbers, once these are done; other rounds may have calls of their own here."""
        with self.changed:
            while self.open & numbers and self.error is None:
                self.changed.wait(1.0)  # with a limit: Ctrl-C is heard in between
            if self.error is not None:
                raise RuntimeError("the thread that talks to --reward-workers failed") from self.error
            done = {number: self.done.pop(number) for number in self.done.keys() & numbers}
        for _, counts in done.values():  # in the thread that asks: a round's counts are of its own step
            grader_stats.update(counts)
        return {number: outcomes for number, (outcomes, _) in done.items()}

    def close(self) -> None:
        """End the thread and its processes. Those that are idle may tidy up for a second."""
        thread, self.thread = self.thread, None
        if thread is not None:
            os.write(self.rope, b"x")
            thread.join(10.0)
        for worker in self.workers:
            if not worker.calls:
                worker.conn.close()
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(1.0)
            worker.end()
        self.workers.clear()

    # what follows runs in the thread

    def _serve(self) -> None:
        try:
            while True:
                self._feed()
                until = min((w.deadline for w in self.workers if w.calls or not w.ready), default=float("inf"))
                left = until - time.monotonic()
                conns = {worker.conn: worker for worker in self.workers}
                for heard in wait([self.bell, *conns], None if left == float("inf") else max(0.0, left)):
                    if heard is self.bell:
                        if b"x" in os.read(self.bell, 1 << 16):
                            return
                    else:
                        self._hear(conns[heard])
                for worker in [w for w in self.workers if w.calls or not w.ready]:
                    if time.monotonic() > worker.deadline and not worker.conn.poll():
                        self._lose(worker, late=True)
        except BaseException as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _feed(self) -> None:
        """Hand out what waits to those that have room, and start more processes if none has."""
        with self.changed:
            idle = [w for w in self.workers if w.ready and len(w.calls) < self.concurrent]
            wanted = len(self.waiting) + len(self.suspects) - len(idle)
            starting = sum(not w.ready for w in self.workers)
            new = min(self.size - len(self.workers), wanted - starting)
        self.workers += [Worker.start(self.setup) for _ in range(new)]
        for worker in idle:
            if calls := self._take(worker):
                try:
                    worker.hand(calls, self.limit)
                except OSError:  # it is dead, or does not read
                    self._lose(worker, late=False)

    def _take(self, worker: Worker) -> list[Call]:
        with self.changed:
            if self.suspects or worker.alone:
                worker.alone = not worker.calls
                return [self.suspects.popleft()] if worker.alone else []
            room = self.concurrent - len(worker.calls)
            if self.concurrent == 1:  # more at a time, as each message costs a wait, but not all to the first
                room = min(MAX_CHUNK, max(1, int(CHUNK_S / self.pace)), -(-len(self.waiting) // self.size))
            return [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]

    def _hear(self, worker: Worker) -> None:
        try:
            kind, *told = worker.conn.recv()
        except CAUGHT:  # it ended, or a reward wrote into descriptors that are not its own
            self._lose(worker, late=False)
            return
        if kind == "ready":
            worker.ready = True
        elif kind == "broken":
            self._lose(worker, late=False, trace=told[0])
        elif kind == "wait":
            worker.deadline = time.monotonic() + self.limit + told[0]
        else:
            number, outcomes, counts, seconds = told
            self.pace += 0.1 * (max(seconds, 1e-5) - self.pace)
            worker.deadline = time.monotonic() + self.limit
            worker.calls.pop(number, None)  # a reward that forked answers twice
            worker.alone = worker.alone and bool(worker.calls)
            self._finish(number, outcomes, counts)

    def _finish(self, number: int, outcomes: list[Outcome], counts: Mapping[str, int]) -> None:
        with self.changed:
            if number in self.open:  # else it was asked in a round that was given up
                self.open.discard(number)
                self.done[number] = outcomes, counts
                self.changed.notify_all()

    def _fail(self, call: Call, kind: str, what: str, told: str, trace: str = "") -> None:
        uids = ", ".join(repr(item.example.uid) for item in call.items[:3])
        failure = Failure(kind, what, f"row {uids}: {told}", trace)
        self._finish(call.number, [failure] * len(call.items), {})

    def _lose(self, worker: Worker, late: bool, trace: str = "") -> None:
        """One that ended, or has to: what it was at has failed."""
        self.workers.remove(worker)
        if late and worker.ready and not self.shown:
            self.shown = True
            print("a reward is late; where it is:", file=sys.stderr)
            worker.process.send_signal(signal.SIGUSR2)  # faulthandler writes it, whatever holds the interpreter
            time.sleep(0.2)
        how = "late" if late else worker.end()
        if late:
            worker.end(late=True)
        with self.changed:
            calls = [call for call in worker.calls.values() if call.number in self.open]
            guilty = calls[:1] if self.concurrent == 1 or len(calls) == 1 else []
            if guilty or self.concurrent == 1:
                self.waiting.extendleft(reversed(calls[1:]))
            else:
                self.suspects.extend(calls)
            unasked = []
            if not worker.ready and not self.workers:
                unasked = [*self.suspects, *self.waiting]
                self.suspects.clear()
                self.waiting.clear()
        if late:
            limit = f"the reward took longer than --reward-timeout {self.setup.limit:g} s"
            for call in guilty:
                self._fail(call, "timeouts", "time-out", limit)
        else:
            for call in guilty:
                self._fail(call, "errors", "ended process", f"the reward ended its process, {how}")
        for call in unasked:
            self._fail(call, "errors", "no process", f"no process for rewards could start: {how}", trace)


# --- the process's side -------------------------------------------------------------------------------------------


def work(fd: int, lifeline: int) -> None:
    """Answers calls that come over the socket `fd`, until it closes."""
    die_with(lifeline)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU):
        signal.signal(number, lambda *_: None)  # whoever sends them to all processes of a run means the trainer
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    keep_printing()
    conn = Connection(fd)
    try:
        setup = conn.recv()
        asyncio.run(answer_together(conn, setup)) if setup.asynchronous else answer(Desk(conn, setup))
    except EOFError:
        pass  # the trainer needs no more
    except CAUGHT as error:  # on importing the user's file, say
        with suppress(BrokenPipeError):  # nobody listens any more
            conn.send(("broken", users_traceback(error)))


def die_with(lifeline: int) -> None:
    """The kernel ends this process when the pipe's other end closes, also while C code holds the interpreter."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO, not handled
    if select.select([lifeline], [], [], 0)[0]:
        os._exit(1)


class Desk:
    """What a process has for its calls: functions, the round's examples, and helpers with a time budget a round."""

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
        self.budgets = ExitStack()
        with suppress(BrokenPipeError):  # then there will be nothing to take either
            conn.send(("ready",))

    def take(self) -> list[Call]:
        """The calls of a message, with their examples."""
        examples, calls = self.conn.recv()
        if calls[0].round != self.round:
            self.round = calls[0].round
            self.examples.clear()
            self.budgets.close()
            for helper in HELPERS:
                self.budgets.enter_context(helper.batch(False, lambda seconds: self.conn.send(("wait", seconds))))
        self.examples |= examples
        whole = []
        for call in calls:
            items = [item._replace(example=self.examples[item.example]) for item in call.items]
            whole.append(replace(call, items=items))
        return whole

    def send(self, call: Call, outcomes: Sequence[Outcome], began: float) -> None:
        counts = dict(grader_stats)
        grader_stats.clear()
        if self.judge:
            counts |= {f"judge/{name}": n - self.counted[name] for name, n in self.judge.counts.items()}
            self.counted = Counter(self.judge.counts)
        told = [replace(o, error=None) if isinstance(o, Failure) else o for o in outcomes]
        self.conn.send(("done", call.number, told, counts, time.perf_counter() - began))


def answer(desk: Desk) -> None:
    """One call after another."""
    while True:
        for call in desk.take():
            began = time.perf_counter()
            desk.send(call, run(function_of(call.key, desk.functions), call), began)


async def answer_together(conn: Connection, setup: Setup) -> None:
    """Each call as it comes."""
    desk = Desk(conn, setup)  # here: what a judge opens belongs to the loop
    closed = asyncio.Event()
    tasks: set[asyncio.Task] = set()  # the loop itself would let them go

    async def one(call: Call) -> None:
        began = time.perf_counter()
        limit = None if call.key == JUDGE else setup.limit
        desk.send(call, await run_async(function_of(call.key, desk.functions), call, limit), began)

    def hear() -> None:
        try:
            for call in desk.take():
                task = asyncio.create_task(one(call))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (EOFError, OSError):
            closed.set()

    asyncio.get_running_loop().add_reader(conn.fileno(), hear)
    await closed.wait()
    if desk.judge:
        await desk.judge.close()
