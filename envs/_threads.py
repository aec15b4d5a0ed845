"""Where environments answer: in threads that may hang, or in one event loop. The name begins with _ because it is no
environment."""

import asyncio
import functools
import inspect
import queue
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from errors import describe_error

THREADS = 32
CAUGHT = BaseException  # an environment may fail in any way in its thread, and the run goes on


@dataclass(eq=False)
class Job:
    run: Callable[[], None]
    given_up: bool = False


class Threads:
    """Of a process, at most so many. They end with it; one that hangs is replaced."""

    def __init__(self, most: int):
        self.most = most
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.n_threads = 0
        self.n_jobs = 0  # in the queue or at work

    def submit(self, run: Callable[[], None]) -> Job:
        job = Job(run)
        with self.lock:
            self.n_jobs += 1
            self._grow()
        self.jobs.put(job)
        return job

    def _grow(self) -> None:
        if self.n_jobs > self.n_threads < self.most:
            self.n_threads += 1
            threading.Thread(target=self._work, daemon=True, name="environment").start()

    def give_up(self, job: Job) -> None:
        """Its thread counts no more, and ends should it ever come back."""
        with self.lock:
            job.given_up = True
            self.n_jobs -= 1
            self.n_threads -= 1
            self._grow()

    def _work(self) -> None:
        while True:
            job = self.jobs.get()
            job.run()
            with self.lock:
                if job.given_up:
                    return
                self.n_jobs -= 1


ANSWERING = Threads(THREADS)
CLOSING = Threads(4)  # for `close` of environments, which may hang: nobody waits for it
LOCK = threading.Lock()


@functools.cache
def started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="environments").start()
    return loop


def event_loop() -> asyncio.AbstractEventLoop:
    """The one of all environments."""
    with LOCK:
        return started_loop()


async def as_coroutine(awaitable: Awaitable) -> Any:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop
        raise RuntimeError(f"raised {error!r}") from error


def close(env: Any, told: str) -> None:
    """An environment may have a `close`, plain or async. Nobody waits for it."""

    def work() -> None:
        try:
            said = env.close()
            if inspect.isawaitable(said):
                asyncio.run_coroutine_threadsafe(as_coroutine(said), event_loop())
        except CAUGHT as error:
            print(f"{told}, close, raised {describe_error(error)}", file=sys.stderr)

    if hasattr(env, "close"):
        CLOSING.submit(work)
