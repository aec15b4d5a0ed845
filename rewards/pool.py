"""Processes that grade, as the trainer sees them, each with a thread that hands out calls and receives their results.

Plain subprocesses: `spawn` of multiprocessing would import train.py, and so torch, again; `fork` is not safe with
torch's, gloo's and CUDA's threads. A process that is late, or dies, is killed with all that it has started, and
replaced: the call that it was at has failed, its others are repeated. Where several were under way (async functions)
each of them is repeated alone, so that the guilty one is found. A process that was late within math-verify has not
failed: the call is repeated, and knows that this comparison is wrong. A process dies with its trainer, however that
ends, also within a call that never returns to Python.
"""

import asyncio
import atexit
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from struct import pack
from typing import Any

from reward import Counting, RewardOutcome
from rewards.call import (
    MAX_CONCURRENT_CALLS,
    REWARD_EXCEPTIONS,
    RewardCall,
    WorkerConfig,
    call_function,
    call_function_async,
    fail_call,
    fail_timed_out,
)
from rewards.functions import RewardFunction, get_function

STARTUP_TIMEOUT_S = 300.0  # importing a user's file may load a model
ASYNC_GRACE_S = 5.0  # an async function that is late is stopped by its own process; one that blocks it, by ours
JUDGE_GRACE_S = 1e6  # a judge keeps its own time limits
MAX_CHUNK = 32  # calls that are handed to a process at a time
CHUNK_SECONDS = 0.05  # seconds that they should take, so that slow ones are spread over the processes
SEND_TIMEOUT_S = 10  # after this long a process that does not read, or does not finish a message, is given up
MAX_LATE_CALLS = 256  # late questions for math-verify that are remembered

Result = tuple[list[RewardOutcome], Counter[str]]  # of a call: an outcome for each item, and what was counted


@dataclass(eq=False)
class PoolJob:
    """A call that somebody waits for."""

    number: int
    call: RewardCall
    future: Future[Result] = field(default_factory=Future)
    counts: Counter[str] = field(default_factory=Counter)  # of earlier tries
    suspect: bool = False  # was under way, with others, in a process that died: to be repeated alone


class WorkerProcess:
    """A process that makes calls, and what it was sent."""

    def __init__(self, setup: WorkerConfig):
        ours, theirs = socket.socketpair()
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, limit, pack("ll", SEND_TIMEOUT_S, 0))
        root = str(Path(__file__).resolve().parent.parent)
        code = f"import sys; sys.path[0] = {root!r}; from rewards.call import reward_worker_main; reward_worker_main(*map(int, sys.argv[1:]))"
        with theirs:  # a session of its own: Ctrl-C is for the trainer
            command, fds = [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())], [theirs.fileno()]
            self.popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True)
        self.conn = Connection(ours.detach())
        self.conn.send(setup)
        self.poll = select.poll()
        self.poll.register(self.conn, select.POLLIN)
        self.ready = False
        self.jobs: dict[int, PoolJob] = {}  # under way, in order
        self.question: tuple[int, Any] | None = None  # a call's number, and what it has just asked math-verify
        self.sent: set[int] = set()  # examples that it has, by id
        self.batch_id = -1
        self.heard = time.monotonic()  # when it was last given calls, or answered
        self.deadline = self.heard + STARTUP_TIMEOUT_S

    def is_late(self) -> bool:
        """Wait until it sends something or dies. Return whether the deadline came first."""
        while True:
            left = self.deadline - time.monotonic()  # a call that is handed out meanwhile moves it
            if self.poll.poll(max(0.0, 1000 * left)):
                return False
            if left <= 0:
                return True

    def send_result(self, jobs: Sequence[PoolJob], late: Sequence[Any]) -> None:
        """Hand out calls of a round. An example is sent once a round, however many responses it has."""
        self.jobs |= {job.number: job for job in jobs}
        examples: dict[int, Any] = {}
        calls = {}
        if jobs[0].call.batch_id != self.batch_id:
            self.batch_id = jobs[0].call.batch_id
            self.sent.clear()
        for job in jobs:
            items = [item._replace(example=id(item.example)) for item in job.call.items]
            new = {id(item.example): item.example for item in job.call.items if id(item.example) not in self.sent}
            self.sent |= new.keys()
            examples |= new
            calls[job.number] = job.call._replace(items=items)
        self.conn.send((self.batch_id, examples, late, calls))

    def kill(self, patience: float) -> str:
        """Return how it ended: by itself within `patience` seconds, or killed now; with it all that it has started."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(patience)
        code = self.popen.poll()
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.conn.close()
        if code is None:
            return "by breaking its connection to the trainer"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class WorkerPool:
    """Up to `size` processes that call the same functions, async ones CONCURRENT at a time. They start with the first
    calls and are kept."""

    def __init__(self, size: int, setup: WorkerConfig):
        self.size = size
        self.setup = setup
        self.limit = setup.limit + (ASYNC_GRACE_S if setup.asynchronous else 0.0)
        if setup.make_judge:
            self.limit = JUDGE_GRACE_S
        self.numbers = itertools.count()  # of calls
        self.waiting: deque[PoolJob] = deque()
        self.threads: list[threading.Thread] = []
        self.processes: list[WorkerProcess] = []  # at most one of each thread
        self.late: deque[tuple[int, Any]] = deque(maxlen=MAX_LATE_CALLS)  # round, question for math-verify
        self.changed = threading.Condition()
        self.closed = False
        self.seconds_per_call = CHUNK_SECONDS  # seconds a call, lately
        self.failing: set[threading.Thread] = set()  # whose process did not start, since one did
        self.logged_late_stack = False  # where the first late call was
        self.pid = os.getpid()
        atexit.register(self.close)

    def submit(self, call: RewardCall) -> Future[Result]:
        """Begin a call."""
        job = PoolJob(next(self.numbers), call)
        with self.changed:
            self.waiting.append(job)
            if not self.threads:
                for _ in range(self.size):
                    self.threads.append(threading.Thread(target=self._run, name="rewards", daemon=True))
                    self.threads[-1].start()
            for process in self.processes if self.setup.asynchronous else ():
                if process.jobs:  # its thread does not look at what waits
                    self._dispatch(process)
            self.changed.notify()
        return job.future

    def close(self) -> None:
        """End the processes and their threads. Those that are idle may tidy up for a second."""
        if self.pid != os.getpid():  # a forked copy of the process that they belong to
            return
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            for process in self.processes:
                if process.jobs or not process.ready:
                    process.popen.kill()
        for thread in list(self.threads):
            thread.join(10.0)

    # what follows runs in the threads

    def _run(self) -> None:
        """Keep a process, and hand it calls."""
        process = None
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.waiting or self.closed)
                    if self.closed:
                        break
                while process and process.poll.poll(0):  # it died, or its reward has forked and answers twice
                    process = self._receive(process)
                process = process or self._start()
                if process:
                    with self.changed:
                        self._dispatch(process)
                while process and process.jobs:
                    process = self._receive(process)
        except BaseException as error:
            failure = RuntimeError("the thread that talks to --reward-workers failed")
            failure.__cause__ = error
            with self.changed:
                for job in [*self.waiting, *(process.jobs.values() if process else ())]:
                    job.future.set_exception(failure)
                self.waiting.clear()
        finally:
            with self.changed:
                self.threads.remove(threading.current_thread())
            if process:
                process.conn.close()  # it ends when it has tidied up
                process.kill(1.0)
                self.processes.remove(process)

    def _start(self) -> WorkerProcess | None:
        """Start a process. If no thread can start one, all that waits has failed."""
        process = WorkerProcess(self.setup)
        self.processes.append(process)
        trace = ""
        with suppress(*REWARD_EXCEPTIONS):  # it died
            if not process.is_late():
                kind, *more = process.conn.recv()
                process.ready = kind == "ready"
                trace = "".join(more)
        if process.ready:
            with self.changed:
                self.failing.clear()
            return process
        how = process.kill(1.0)
        with self.changed:
            self.processes.remove(process)
            self.failing.add(threading.current_thread())
            self.changed.notify_all()  # the others try, too
            while self.waiting and self.failing.issuperset(self.threads):
                job = self.waiting.popleft()
                why = f"no process for rewards could start: {how}"
                job.future.set_result((fail_call(job.call, "errors", "no process", why, trace), job.counts))
        return None

    def _dispatch(self, process: WorkerProcess) -> None:
        """Hand out calls of a round that wait to a process that has room."""
        if not self.waiting or any(job.suspect for job in process.jobs.values()):
            return
        if self.waiting[0].suspect:
            room = 0 if process.jobs else 1
        elif self.setup.asynchronous:
            room = MAX_CONCURRENT_CALLS - len(process.jobs)
        else:  # more at a time, as each message costs a wait, but not all to the first
            room = min(
                MAX_CHUNK, max(1, int(CHUNK_SECONDS / self.seconds_per_call)), -(-len(self.waiting) // (2 * self.size))
            )
        round = self.waiting[0].call.batch_id
        of_round = itertools.takewhile(lambda job: job.call.batch_id == round, self.waiting)
        jobs = list(itertools.islice(of_round, room))
        for _ in jobs:
            self.waiting.popleft()
        if jobs:
            process.heard = time.monotonic()
            process.deadline = process.heard + self.limit
            try:
                process.send_result(jobs, [question for when, question in self.late if when == round])
            except OSError:  # it is dead, or does not read
                process.popen.kill()

    def _receive(self, process: WorkerProcess) -> WorkerProcess | None:
        """Wait for a message of a process. Return it, or None if it died or had to be killed."""
        try:
            if process.is_late():
                return self._handle_death(process, late=True)
            kind, number, *content = process.conn.recv()
        except REWARD_EXCEPTIONS:  # it ended, or a reward wrote into descriptors that are not its own
            return self._handle_death(process, late=False)
        with self.changed:
            if kind == "limit":
                seconds, question = content
                process.question = (number, question) if question else None
                process.deadline = time.monotonic() + (seconds or self.limit)
                return process
            now = time.monotonic()
            self.seconds_per_call += 0.1 * (max(now - process.heard, 1e-5) - self.seconds_per_call)
            process.heard, process.deadline = now, now + self.limit
            job = process.jobs.pop(number, None)  # a reward that forked answers twice
            if self.setup.asynchronous:
                self._dispatch(process)
        if job:
            outcomes, counts = content
            job.counts.update(counts)
            job.future.set_result((outcomes, job.counts))
        return process

    def _handle_death(self, process: WorkerProcess, late: bool) -> None:
        """Kill a process that is late, or end one that died, and decide about its calls."""
        asked = process.jobs.get(process.question[0]) if process.question else None
        if late and not asked and not self.logged_late_stack:
            self.logged_late_stack = True
            print("a reward is late; where it is:", file=sys.stderr)
            process.popen.send_signal(signal.SIGUSR2)  # faulthandler writes it, whatever holds the interpreter
            time.sleep(0.2)
        how = process.kill(0.0 if late else 1.0)
        with self.changed:
            self.processes.remove(process)
            jobs = list(process.jobs.values())
            if asked:  # the answer that math-verify looked at is wrong: no failure
                asked.counts.update(["cas", "cas_timeout" if late else "cas_crash"])
                self.late.append((asked.call.batch_id, process.question[1]))
            guilty = jobs[:1] if not asked and (len(jobs) == 1 or not self.setup.asynchronous) else []
            again = jobs[len(guilty) :]
            for job in again:
                job.suspect = not guilty and not asked
            self.waiting.extendleft(reversed(again))
            self.changed.notify_all()  # this thread's next process may not start
        for job in guilty:
            results = fail_call(job.call, "errors", "ended process", f"the reward ended its process, {how}")
            results = fail_timed_out(job.call, self.setup.limit) if late else results
            job.future.set_result((results, job.counts))


class InProcessPool:
    """Makes calls in this process, when `run` is called and without time limits: for debuggers."""

    def __init__(self, functions: Mapping[str, RewardFunction]):
        self.functions = functions
        self.waiting: deque[tuple[RewardCall, Future[Result]]] = deque()
        self.runner = asyncio.Runner()  # kept: what an async function opens belongs to its loop

    def submit(self, call: RewardCall) -> Future[Result]:
        self.waiting.append((call, Future()))
        return self.waiting[-1][1]

    def run(self) -> None:
        """Make all calls that were submitted, one after the other."""
        late: set[Any] = set()
        while self.waiting:
            call, future = self.waiting.popleft()
            function = get_function(call.key, self.functions)
            with Counting(late) as counted:
                if function.asynchronous:
                    outcomes = self.runner.run(call_function_async(function, call, None), context=copy_context())
                else:
                    outcomes = call_function(function, call)
            future.set_result((outcomes, counted.counts))

    def close(self) -> None:
        self.runner.close()
