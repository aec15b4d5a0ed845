"""Runs that are asked to end, and ranks that stop answering: everything is saved, or it is said who is to blame.

Interrupt   SIGTERM (schedulers), SIGINT (Ctrl-C), SIGHUP, SIGUSR1 (Slurm's --signal) and SIGXCPU end a run between
            two stages of a step, on all ranks at once, with a checkpoint. A step that has not reached its update is
            dropped, as if it had not begun.
Watch       every rank tells the others every few seconds that it lives and how far it is. One that falls silent, or
            stays behind while the others wait for it, is named, and the run ends: torchrun --max-restarts can go on.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from errors import Interrupted, need
from parallel.nodes import check_restart_support
from utils import DistContext, StepTimer, die_with_parent, setup_distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
RESUME_HINT = "--resume auto goes on from the newest checkpoint"
BY_ITSELF = f"{RESUME_HINT} (torchrun --max-restarts does so by itself)"


def start_processes(cfg: Any, tp: int) -> "tuple[DistContext, SignalHandler, StepTimer]":
    """Join the other processes, and watch for signals and for ranks that stop answering. `cfg` is resume.RunConfig."""
    check_restart_support()
    ctx = setup_distributed(cfg.timeout_minutes + 1, tp)  # the watch, which names who is late, comes first
    interrupt = SignalHandler(cfg.grace_seconds)
    timer = StepTimer(interrupt.check)
    Watchdog(ctx, timer, cfg.timeout_minutes)
    return ctx, interrupt, timer


def print_once(text: str) -> None:
    """Print once for all ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_error(text)


def write_error(text: str) -> None:
    """Print on stderr in one call, so that no other output comes between; nobody may be there to read it."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


class SignalHandler(threading.Thread):
    """Remembers a signal until all ranks stand at the same place of the loop; `check` is that place.

    Until `arm`, while there is nothing to save, a signal ends the process at once. After that, `grace` seconds later at
    the latest: a stage that takes longer than that is lost with its step, not the checkpoints before it. A thread hears
    the signals, because Python handlers wait for the main thread, which may be waiting for another rank.
    """

    def __init__(self, grace: float):
        super().__init__(daemon=True)
        self.grace, self.number, self.since = grace, 0, 0.0
        self.save: Callable[[], str] | None = None
        self.after: Callable[[], None] | None = None
        self.parent = os.getppid()
        self.pipe, heard = os.pipe()
        os.set_blocking(heard, False)
        signal.set_wakeup_fd(heard, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # instead of what it would do; the thread does the rest
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()  # a torchrun that is killed cannot end its processes
        self.start()

    def enable_saving(self, save: Callable[[], str], after: Callable[[], None] = lambda: None) -> None:
        """`save` makes a checkpoint of the last whole step, on all ranks, and says how to go on from it; `after`
        finishes the rest, in what is left of the grace period."""
        self.save, self.after = save, after

    def give_up(self, why: str) -> None:
        """Print why, and end as after a signal, with a checkpoint. Raise UserError while there is nothing to save."""
        need(self.save is not None, why)
        print(why)
        os.kill(os.getpid(), signal.SIGTERM)

    def requested(self) -> bool:
        """Of this rank alone; what only it does may end early."""
        return self.number != 0

    def reduce_signal(self) -> int:
        """The signal that any rank got, on all ranks, or 0."""
        number = torch.tensor(self.number)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def check(self) -> None:
        """On all ranks at once: go on, or save and raise Interrupted."""
        if number := self.reduce_signal():
            elsewhere = not self.number
            if elsewhere:
                self._start_grace(number)
            self.last_words = f"{signal.Signals(number).name}: {self.save()}"
            if elsewhere:
                self._tell_torchrun()
            self.after()
            self.timer.cancel()
            raise Interrupted(number, self.last_words)

    def _start_grace(self, number: int) -> None:
        """Note the signal, and end the process when its grace period is over."""
        self.number, self.since = number, time.monotonic()
        self.last_words = (
            f"{signal.Signals(number).name}: not saved within --grace-seconds {self.grace:g}; {RESUME_HINT}"
        )
        self.timer = threading.Timer(self.grace, self._exit, [number])
        self.timer.daemon = True
        self.timer.start()

    def _tell_torchrun(self) -> None:
        """Of a node that the signal has not reached: with --max-restarts it would start the run again, and wait for the
        others."""
        first = os.environ.get("LOCAL_RANK") == "0" and "TORCHELASTIC_RUN_ID" in os.environ
        if first and os.getppid() == self.parent:  # else it has ended, and this process is another's child now
            os.kill(self.parent, signal.SIGTERM)

    def run(self) -> None:
        while True:
            number = os.read(self.pipe, 1)[0]
            if number in SIGNALS:
                self.handle(number)

    def handle(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.save is None:
            self._exit(number, f"{name} during the set-up: nothing was trained yet, so there is nothing to save")
        if not self.number:
            self._start_grace(number)
            print_once(f"{name}: saving after this stage of the step, within --grace-seconds {self.grace:g}")
        elif number == signal.SIGINT and time.monotonic() - self.since > 1:  # once more, and not the same key press
            self._exit(number, f"{name} again: not saved; {RESUME_HINT}")

    def _exit(self, number: int, text: str = "") -> None:
        print_once(text or self.last_words)
        os._exit(128 + number)


class Watchdog:
    """Two threads of each rank, with a connection of their own to the run's store, so that it speaks and listens while
    the rank computes or waits. A store that is gone may raise or never answer, so one of them only looks at the clock:
    to it all ranks then fall silent, and the first of them holds the store."""

    def __init__(self, ctx: DistContext, timers: StepTimer, minutes: float):
        self.ctx, self.timers, self.limit = ctx, timers, 60.0 * minutes
        self.period = min(5.0, self.limit / 10)
        # each rank's last word, [when, how many stages it has entered, in which it is, where it runs], ...
        self.words: list[list] = [["", 0, "set-up", "where is unknown"]] * ctx.world
        self.judged = self.words  # ... those that `judge` has seen, ...
        self.came = [time.monotonic()] * ctx.world  # ... when they changed, ...
        self.since = list(self.came)  # ... and since when each rank is in its stage
        self.left = False  # because a connection was lost
        if ctx.world > 1:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            own = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=max(1.0, self.limit)))
            # of these processes, not of those that torchrun may have restarted them after
            self.store = dist.PrefixStore(f"watch/{ctx.gather(time.time_ns())[0]}", own)
            self.speak()
            dist.barrier()  # every rank has spoken once
            for work in (self.exchange, self.judge):
                threading.Thread(target=self._repeat, args=[work], daemon=True).start()
            sys.excepthook = self._after_error

    def _repeat(self, work: Callable[[], None]) -> None:
        while True:
            time.sleep(self.period)
            work()

    def speak(self) -> None:
        where = f"{socket.gethostname()} process {os.getpid()}"
        word = ["left" if self.left else time.monotonic(), self.timers.phase_count, self.timers.current_phase, where]
        self.store.set(f"rank{self.ctx.rank}", json.dumps(word))

    def exchange(self) -> None:
        with suppress(RuntimeError):  # of the network
            self.speak()
            self.words = list(map(json.loads, self.store.multi_get([f"rank{rank}" for rank in range(self.ctx.world)])))

    def judge(self) -> None:
        """End the run if a rank has been silent, or kept the others waiting, for too long."""
        now, words = time.monotonic(), self.words
        for rank, (word, before) in enumerate(zip(words, self.judged, strict=True)):
            if word != before:
                self.came[rank] = now
            if word[1] != before[1]:
                self.since[rank] = now
        self.judged = words
        for rank, (_, entered, stage, where) in enumerate(words):
            # Those that wait for it have gone further, and got no further since; its own stage may have begun long
            # before
            ahead = [since for since, other in zip(self.since, words, strict=True) if other[1] > entered]
            silent, behind = now - self.came[rank], now - max([self.since[rank], *ahead])
            told = ""
            if silent > self.limit:
                told = f"has not answered for {silent / 60:.3g} minutes (last heard of in {stage})"
            elif behind > self.limit and ahead:
                told = f"is still in {stage} after {behind / 60:.3g} minutes, and the others wait"
            if told:
                told = f"error: rank {rank} ({where}) {told}; over --timeout-minutes {self.limit / 60:g}"
                write_error(f"{told}. The run ends here; {BY_ITSELF}")
                os._exit(1)

    def _after_error(self, kind: type, error: BaseException, trace: TracebackType | None) -> None:
        """A lost connection says nothing of who was lost: those are that fall silent from now on."""
        sys.__excepthook__(kind, error, trace)
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            time.sleep(1.5 * self.period)  # for the last words of those that were lost
            before = self.words
            time.sleep(2 * self.period)
            pairs = enumerate(zip(self.words, before, strict=True))
            lost = {rank: word[3] for rank, (word, old) in pairs if word == old and word[0] != "left"}
            if len(lost) == self.ctx.world:  # nothing was heard of anyone
                under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
                lost = {0: "or torchrun next to it" if under_torchrun else "which holds the run's store"}
            else:  # whom this one's end surprises is to blame those before
                self.left = True
                self.speak()
            told = ", ".join(f"rank {rank} ({where}) is gone" for rank, where in lost.items())
            if told:
                write_error(f"error: {told}; {BY_ITSELF}")
