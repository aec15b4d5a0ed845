"""The threads and the event loop in which environments run. A thread that hangs is replaced. The file name begins with
_ because it is not an environment."""

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

MAX_THREADS = 32
ENV_EXCEPTIONS = BaseException  # no failure of an environment ends the run, which is why even SystemExit is caught


@dataclass(eq=False)
class ThreadJob:
    """A function to run in a thread of a ThreadPool."""

    run: Callable[[], None]
    abandoned: bool = False


class ThreadPool:
    """A pool of at most `size` daemon threads, which end with the process. A thread that hangs is replaced."""

    def __init__(self, size: int):
        self.startable = size  # number of threads that may still be started
        self.jobs: queue.SimpleQueue[ThreadJob] = queue.SimpleQueue()
        self.lock = threading.Lock()

    def submit(self, run: Callable[[], None]) -> ThreadJob:
        """Queue a function, and start another thread if the pool may have more."""
        job = ThreadJob(run)
        self.jobs.put(job)
        self._start()
        return job

    def abandon(self, job: ThreadJob) -> None:
        """Replace the thread of a job that hangs. The old thread ends if the job ever returns."""
        job.abandoned = True
        self._start(replaced=1)

    def _start(self, replaced: int = 0) -> None:
        with self.lock:
            self.startable += replaced
            if self.startable:
                self.startable -= 1
                threading.Thread(target=self._work, daemon=True, name="environment").start()

    def _work(self) -> None:
        while True:
            job = self.jobs.get()
            job.run()
            if job.abandoned:
                return


ENV_POOL = ThreadPool(MAX_THREADS)
CLOSE_POOL = ThreadPool(4)  # for `close` of environments, which may hang: episodes do not wait for it
LOCK = threading.Lock()


@functools.cache
def start_event_loop() -> asyncio.AbstractEventLoop:
    """Start an event loop in a daemon thread, once per process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="environments").start()
    return loop


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that all environments share, and start it if necessary."""
    with LOCK:
        return start_event_loop()


async def to_coroutine(awaitable: Awaitable) -> Any:
    """Await an awaitable of an environment. Exceptions that would end the event loop become a RuntimeError."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"raised {error!r}") from error


def close_environment(env: Any, label: str) -> None:
    """Call the `close` of an environment, plain or async, if it has one, without waiting for it. `label` names the
    environment in messages."""

    def close() -> None:
        try:
            result = env.close()
            if inspect.isawaitable(result):
                asyncio.run_coroutine_threadsafe(to_coroutine(result), event_loop())
        except ENV_EXCEPTIONS as error:
            print(f"{label}: close raised {describe_error(error)}", file=sys.stderr)

    if hasattr(env, "close"):
        CLOSE_POOL.submit(close)
