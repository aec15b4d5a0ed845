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

MAX_THREADS = 32
ENV_EXCEPTIONS = BaseException  # an environment may fail in any way in its thread, and the run goes on


@dataclass(eq=False)
class ThreadJob:
    run: Callable[[], None]
    given_up: bool = False


class ThreadPool:
    """Of a process, at most so many. They end with it; one that hangs is replaced."""

    def __init__(self, most: int):
        self.missing = most  # threads that may still be started
        self.jobs: queue.SimpleQueue[ThreadJob] = queue.SimpleQueue()
        self.lock = threading.Lock()

    def submit(self, run: Callable[[], None]) -> ThreadJob:
        job = ThreadJob(run)
        self.jobs.put(job)
        self._start()
        return job

    def abandon(self, job: ThreadJob) -> None:
        """Replace its thread, which ends should it ever come back."""
        job.given_up = True
        self._start(replace=1)

    def _start(self, replace: int = 0) -> None:
        with self.lock:
            self.missing += replace
            if self.missing:
                self.missing -= 1
                threading.Thread(target=self._work, daemon=True, name="environment").start()

    def _work(self) -> None:
        while True:
            job = self.jobs.get()
            job.run()
            if job.given_up:
                return


ENV_POOL = ThreadPool(MAX_THREADS)
CLOSE_POOL = ThreadPool(4)  # for `close` of environments, which may hang: nobody waits for it
LOCK = threading.Lock()


@functools.cache
def start_event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="environments").start()
    return loop


def event_loop() -> asyncio.AbstractEventLoop:
    """The one of all environments."""
    with LOCK:
        return start_event_loop()


async def to_coroutine(awaitable: Awaitable) -> Any:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop
        raise RuntimeError(f"raised {error!r}") from error


def close_environment(env: Any, told: str) -> None:
    """An environment may have a `close`, plain or async. Nobody waits for it."""

    def work() -> None:
        try:
            said = env.close()
            if inspect.isawaitable(said):
                asyncio.run_coroutine_threadsafe(to_coroutine(said), event_loop())
        except ENV_EXCEPTIONS as error:
            print(f"{told}, close, raised {describe_error(error)}", file=sys.stderr)

    if hasattr(env, "close"):
        CLOSE_POOL.submit(work)
