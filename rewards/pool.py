"""The trainer's side of reward workers: each worker process has a thread that sends it calls and receives results.

Workers are plain subprocesses: `spawn` of multiprocessing would import train.py, and so torch, again; `fork` is not
safe with the threads of torch, gloo and CUDA. A worker that times out or dies is killed with its children and replaced.
Its current call fails; its queued calls are retried. If several calls were in flight (async functions), each of them is
retried alone, to find the one at fault. A worker that timed out or died within math-verify has not failed: its call is
retried, and that comparison counts as wrong. A worker dies with its trainer, however the trainer ends, even within a
call that never returns to Python.
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
ASYNC_GRACE_S = 5.0  # the worker itself cancels async calls that time out; after this much longer it is killed
JUDGE_GRACE_S = 1e6  # a judge enforces its own time limits
MAX_CHUNK = 32  # most calls in one message to a worker
CHUNK_SECONDS = 0.05  # seconds that the calls of a message should take, so that slow calls are spread over the workers
SEND_TIMEOUT_S = 10  # a worker that reads nothing, or does not finish a message, for this long is killed
MAX_LATE_CALLS = 256  # most math-verify questions that are remembered because they timed out

Result = tuple[list[RewardOutcome], Counter[str]]  # the result of a call: an outcome for each item, and the counts


@dataclass(eq=False)
class PoolJob:
    """A call and the future of its result."""

    number: int
    call: RewardCall
    future: Future[Result] = field(default_factory=Future)
    counts: Counter[str] = field(default_factory=Counter)  # counts of earlier tries
    suspect: bool = False  # was in flight, with others, in a worker that died: it is retried alone


class WorkerProcess:
    """A worker process, its connection, and the calls and examples that were sent to it."""

    def __init__(self, config: WorkerConfig):
        trainer_end, worker_end = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            trainer_end.setsockopt(socket.SOL_SOCKET, option, pack("ll", SEND_TIMEOUT_S, 0))
        root = str(Path(__file__).resolve().parent.parent)
        code = (f"import sys; sys.path[0] = {root!r}; from rewards.call import reward_worker_main; "
                "reward_worker_main(*map(int, sys.argv[1:]))")
        with worker_end:  # the worker gets its own session, because Ctrl-C is for the trainer
            fd = worker_end.fileno()
            command = [sys.executable, "-c", code, str(fd), str(os.getpid())]
            self.popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd], start_new_session=True)
        self.conn = Connection(trainer_end.detach())
        self.conn.send(config)
        self.poll = select.poll()
        self.poll.register(self.conn, select.POLLIN)
        self.ready = False
        self.jobs: dict[int, PoolJob] = {}  # in flight, in order
        self.question: tuple[int, Any] | None = None  # a call's number, and its current question to math-verify
        self.sent: set[int] = set()  # ids of the examples that the worker has
        self.batch_id = -1
        self.active_at = time.monotonic()  # when the worker was last sent calls, or sent a result
        self.deadline = self.active_at + STARTUP_TIMEOUT_S

    def wait_times_out(self) -> bool:
        """Wait until the worker sends something or dies. Return whether the deadline came first."""
        while True:
            left = self.deadline - time.monotonic()  # calls that are sent meanwhile move the deadline
            if self.poll.poll(max(0.0, 1000 * left)):
                return False
            if left <= 0:
                return True

    def send_calls(self, jobs: Sequence[PoolJob], timed_out: Sequence[Any]) -> None:
        """Send calls of a batch, and its questions to math-verify that timed out. An example is sent once per batch,
        however many responses it has."""
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
        self.conn.send((self.batch_id, examples, timed_out, calls))

    def kill(self, wait: float) -> str:
        """Give the worker `wait` seconds to end, then kill it with its children. Return how it ended, as text."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(wait)
        code = self.popen.poll()
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.conn.close()
        if code is None:
            return "by breaking its connection to the trainer"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class WorkerPool:
    """A pool of up to `size` worker processes that call the same functions. They start with the first calls and stay.
    A worker makes up to MAX_CONCURRENT_CALLS async calls at a time, other calls one by one."""

    def __init__(self, size: int, config: WorkerConfig):
        self.size = size
        self.config = config
        self.limit = config.limit + (ASYNC_GRACE_S if config.asynchronous else 0.0)
        if config.make_judge:
            self.limit = JUDGE_GRACE_S
        self.numbers = itertools.count()  # numbers of the calls
        self.waiting: deque[PoolJob] = deque()
        self.threads: list[threading.Thread] = []
        self.processes: list[WorkerProcess] = []  # at most one per thread
        self.timed_out: deque[tuple[int, Any]] = deque(maxlen=MAX_LATE_CALLS)  # (batch, question for math-verify)
        self.changed = threading.Condition()
        self.closed = False
        self.seconds_per_call = CHUNK_SECONDS  # moving average
        self.failing: set[threading.Thread] = set()  # threads whose worker failed to start since one last started
        self.logged_late_stack = False  # has the stack of the first call that timed out been printed?
        self.pid = os.getpid()
        atexit.register(self.close)

    def submit(self, call: RewardCall) -> Future[Result]:
        """Queue a call and return the future of its result."""
        job = PoolJob(next(self.numbers), call)
        with self.changed:
            self.waiting.append(job)
            if not self.threads:
                for _ in range(self.size):
                    self.threads.append(threading.Thread(target=self._run, name="rewards", daemon=True))
                    self.threads[-1].start()
            for process in self.processes if self.config.asynchronous else ():
                if process.jobs:  # its thread waits for a message and does not look at the queue
                    self._dispatch(process)
            self.changed.notify()
        return job.future

    def close(self) -> None:
        """End the workers and their threads. Idle workers get a second to clean up; the others are killed."""
        if self.pid != os.getpid():  # this is a forked copy of the process that the workers belong to
            return
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            for process in self.processes:
                if process.jobs or not process.ready:
                    process.popen.kill()
        for thread in list(self.threads):
            thread.join(10.0)

    # the methods below run in the threads

    def _run(self) -> None:
        """Start a worker, send it calls and receive their results, until the pool is closed."""
        process = None
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.waiting or self.closed)
                    if self.closed:
                        break
                while process and process.poll.poll(0):  # it died, or a reward that forked sent a second result
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
                process.conn.close()  # the worker cleans up and ends
                process.kill(1.0)
                self.processes.remove(process)

    def _start(self) -> WorkerProcess | None:
        """Start a worker. Return None if that fails; if it fails in every thread, all queued calls fail too."""
        process = WorkerProcess(self.config)
        self.processes.append(process)
        trace = ""
        with suppress(*REWARD_EXCEPTIONS):  # the worker died
            if not process.wait_times_out():
                message, *content = process.conn.recv()
                process.ready = message == "ready"
                trace = "".join(content)
        if process.ready:
            with self.changed:
                self.failing.clear()
            return process
        ending = process.kill(1.0)
        with self.changed:
            self.processes.remove(process)
            self.failing.add(threading.current_thread())
            self.changed.notify_all()  # the other threads try, too
            while self.waiting and self.failing.issuperset(self.threads):
                job = self.waiting.popleft()
                reason = f"no reward worker could start; the last one ended {ending}"
                job.future.set_result((fail_call(job.call, "errors", "no process", reason, trace), job.counts))
        return None

    def _dispatch(self, process: WorkerProcess) -> None:
        """Send queued calls of one batch to a worker, as many as it may be sent now."""
        if not self.waiting or any(job.suspect for job in process.jobs.values()):
            return
        if self.waiting[0].suspect:
            limit = 0 if process.jobs else 1
        elif self.config.asynchronous:
            limit = MAX_CONCURRENT_CALLS - len(process.jobs)
        else:  # several calls, because each message costs a round trip, but not all of them to the first worker
            limit = min(
                MAX_CHUNK, max(1, int(CHUNK_SECONDS / self.seconds_per_call)), -(-len(self.waiting) // (2 * self.size))
            )
        batch = self.waiting[0].call.batch_id
        in_batch = itertools.takewhile(lambda job: job.call.batch_id == batch, self.waiting)
        jobs = list(itertools.islice(in_batch, limit))
        for _ in jobs:
            self.waiting.popleft()
        if jobs:
            process.active_at = time.monotonic()
            process.deadline = process.active_at + self.limit
            try:
                process.send_calls(jobs, [question for batch_id, question in self.timed_out if batch_id == batch])
            except OSError:  # it is dead, or does not read
                process.popen.kill()

    def _receive(self, process: WorkerProcess) -> WorkerProcess | None:
        """Wait for a message of a worker. Return the worker, or None if it died or was killed."""
        try:
            if process.wait_times_out():
                return self._handle_death(process, timed_out=True)
            message, number, *content = process.conn.recv()
        except REWARD_EXCEPTIONS:  # it ended, or a reward wrote to the connection's file descriptor
            return self._handle_death(process, timed_out=False)
        with self.changed:
            if message == "limit":
                seconds, question = content
                process.question = (number, question) if question else None
                process.deadline = time.monotonic() + (seconds or self.limit)
                return process
            now = time.monotonic()
            self.seconds_per_call += 0.1 * (max(now - process.active_at, 1e-5) - self.seconds_per_call)
            process.active_at, process.deadline = now, now + self.limit
            job = process.jobs.pop(number, None)  # None: a reward that forked sent a second result
            if self.config.asynchronous:
                self._dispatch(process)
        if job:
            outcomes, counts = content
            job.counts.update(counts)
            job.future.set_result((outcomes, job.counts))
        return process

    def _handle_death(self, process: WorkerProcess, timed_out: bool) -> None:
        """Kill a worker that timed out or died, and fail or requeue its calls."""
        comparing = process.jobs.get(process.question[0]) if process.question else None
        if timed_out and not comparing and not self.logged_late_stack:
            self.logged_late_stack = True
            print("a reward timed out; its stack:", file=sys.stderr)
            process.popen.send_signal(signal.SIGUSR2)  # faulthandler prints it, whatever holds the interpreter
            time.sleep(0.2)
        ending = process.kill(0.0 if timed_out else 1.0)
        with self.changed:
            self.processes.remove(process)
            jobs = list(process.jobs.values())
            if comparing:  # it died within math-verify: the answer is wrong, and the call is retried
                comparing.counts.update(["cas", "cas_timeout" if timed_out else "cas_crash"])
                self.timed_out.append((comparing.call.batch_id, process.question[1]))
            failed = jobs[:1] if not comparing and (len(jobs) == 1 or not self.config.asynchronous) else []
            retried = jobs[len(failed) :]
            for job in retried:
                job.suspect = not failed and not comparing
            self.waiting.extendleft(reversed(retried))
            self.changed.notify_all()  # other threads take these calls if this one cannot start a new worker
        for job in failed:
            outcomes = fail_call(job.call, "errors", "ended process", f"the reward ended its worker process, {ending}")
            outcomes = fail_timed_out(job.call, self.config.limit) if timed_out else outcomes
            job.future.set_result((outcomes, job.counts))


class InProcessPool:
    """A stand-in for a WorkerPool that makes the calls in this process, for debuggers: when `run` is called, and
    without time limits."""

    def __init__(self, functions: Mapping[str, RewardFunction]):
        self.functions = functions
        self.waiting: deque[tuple[RewardCall, Future[Result]]] = deque()
        self.runner = asyncio.Runner()  # one for all calls: connections of async functions belong to its event loop

    def submit(self, call: RewardCall) -> Future[Result]:
        """Queue a call and return the future of its result."""
        self.waiting.append((call, Future()))
        return self.waiting[-1][1]

    def run(self) -> None:
        """Make all queued calls, one after the other."""
        timed_out: set[Any] = set()
        while self.waiting:
            call, future = self.waiting.popleft()
            function = get_function(call.key, self.functions)
            with Counting(timed_out) as counting:
                if function.asynchronous:
                    outcomes = self.runner.run(call_function_async(function, call, None), context=copy_context())
                else:
                    outcomes = call_function(function, call)
            future.set_result((outcomes, counting.counts))

    def close(self) -> None:
        self.runner.close()
