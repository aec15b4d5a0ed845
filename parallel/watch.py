"""Runs that are asked to end, and ranks that stop answering: everything is saved, or it is said who is to blame.

Interrupt   SIGTERM (schedulers), SIGINT (Ctrl-C), SIGHUP, SIGUSR1 (Slurm's --signal) and SIGXCPU end a run between
            two stages of a step, on all ranks at once, with a checkpoint. A step that has not reached its update is
            dropped, as if it had not begun.
Watch       every rank tells the others every few seconds that it lives and how far it is. One that falls silent, or
            stays behind while the others wait for it, is named, and the run ends: torchrun --max-restarts can go on.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from errors import Interrupted, need
from parallel.nodes import check_restarts
from utils import Context, Stages, dist_setup, end_with_parent

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
GO_ON = "--resume auto goes on from the newest checkpoint"


def start_processes(cfg: Any, tp: int) -> "tuple[Context, Interrupt, Stages]":
    """Join the other processes, and watch for signals and for ranks that stop answering. `cfg` is resume.RunConfig."""
    check_restarts()
    ctx = dist_setup(cfg.timeout_minutes + 1, tp)  # the watch, which names who is late, comes first
    interrupt = Interrupt(cfg.grace_seconds)
    timer = Stages(interrupt.check)
    Watch(ctx, timer, cfg.timeout_minutes)
    return ctx, interrupt, timer


def later(seconds: float, do: Callable, *args) -> threading.Timer:
    """Do it then, in a thread, unless the timer is cancelled before or the process ends."""
    timer = threading.Timer(seconds, do, args)
    timer.daemon = True
    timer.start()
    return timer


def say(text: str) -> None:
    """Print once for all ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_error(text)


def write_error(text: str) -> None:
    """Print on stderr in one call, so that no other output comes between; nobody may be there to read it."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


class Interrupt(threading.Thread):
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
        self.timer: threading.Timer | None = None
        self.parent = os.getppid()
        self.pipe, heard = os.pipe()
        os.set_blocking(heard, False)
        signal.set_wakeup_fd(heard, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # instead of what it would do; the thread does the rest
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()  # a torchrun that is killed cannot end its processes
        self.start()

    def arm(self, save: Callable[[], str], after: Callable[[], None] = lambda: None) -> None:
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

    def agreed(self) -> int:
        """The signal that any rank got, on all ranks, or 0."""
        number = torch.tensor(self.number)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def check(self) -> None:
        """On all ranks at once: go on, or save and raise Interrupted."""
        if number := self.agreed():
            text = f"{signal.Signals(number).name}: {self.save()}"
            if self.timer:
                self.timer.cancel()
            if not self.number:
                self.number, self.since = number, time.monotonic()
                self._tell_torchrun()
            left = self.grace - (time.monotonic() - self.since)
            rest = later(max(0.0, left), self._leave, number, text)
            self.after()
            rest.cancel()
            raise Interrupted(number, text)

    def _tell_torchrun(self) -> None:
        """Of a node that the signal has not reached: with --max-restarts it would start the run again, and wait for the
        others."""
        if os.environ.get("LOCAL_RANK") == "0" and "TORCHELASTIC_RUN_ID" in os.environ:
            if os.getppid() == self.parent:  # else it has ended, and this process is another's child now
                os.kill(self.parent, signal.SIGTERM)

    def run(self) -> None:
        while True:
            number = os.read(self.pipe, 1)[0]
            if number in SIGNALS:
                self.heard(number)

    def heard(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.save is None:
            self._leave(number, f"{name} during the set-up: nothing was trained yet, so there is nothing to save")
        if not self.number:
            self.number, self.since = number, time.monotonic()
            late = f"{name}: not saved within --grace-seconds {self.grace:g}; {GO_ON}"
            self.timer = later(self.grace, self._leave, number, late)
            say(f"{name}: saving after this stage of the step, within --grace-seconds {self.grace:g}")
        elif number == signal.SIGINT and time.monotonic() - self.since > 1:  # once more, and not the same key press
            self._leave(number, f"{name} again: not saved; {GO_ON}")

    def _leave(self, number: int, text: str) -> None:
        say(text)
        os._exit(128 + number)


@dataclass
class Heard:
    """Of a rank: its last word and when it came; how many stages it has entered, and since when it is in the last."""

    came: float
    since: float
    word: str = ""
    entered: int = 0


class Watch(threading.Thread):
    """A thread of each rank, with a connection of its own to the run's store, so that it speaks while the rank
    computes or waits."""

    def __init__(self, ctx: Context, timers: Stages, minutes: float):
        super().__init__(daemon=True)
        self.ctx, self.timers, self.limit = ctx, timers, 60.0 * minutes
        self.period = min(5.0, self.limit / 10)
        self.words = [""] * ctx.world  # of all ranks, as last heard
        self.left = False  # because a connection was lost
        if ctx.world > 1:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            own = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=max(1.0, self.limit)))
            # of these processes, not of those that torchrun may have restarted them after
            self.store = dist.PrefixStore(f"watch/{ctx.gather(time.time_ns())[0]}", own)
            self.store.set(f"rank{ctx.rank}", self._word(0))
            dist.barrier()  # every rank has spoken once
            self.start()
            sys.excepthook = self._after_error

    def _word(self, beat: int | str) -> str:
        beat = "left" if self.left else beat
        return f"{beat}|{self.timers.entered}|{self.timers.stage}|{socket.gethostname()} process {os.getpid()}"

    def run(self) -> None:
        """An exchange every few seconds. A store that is gone may raise, or never answer: then nothing stops the
        alarm."""
        keys, now = [f"rank{rank}" for rank in range(self.ctx.world)], time.monotonic()
        heard = [Heard(came=now, since=now) for _ in keys]
        alarm, beat = self._alarm(), 0
        try:
            while True:
                time.sleep(self.period)
                beat += 1
                try:
                    self.store.set(keys[self.ctx.rank], self._word(beat))
                    words = self.store.multi_get(keys)
                except RuntimeError:  # of the network
                    continue
                alarm.cancel()
                alarm = self._alarm()
                self.words = [word.decode() for word in words]
                self._judge(heard, self.words)
        finally:
            alarm.cancel()

    def _holder(self) -> str:
        return "or torchrun next to it" if "TORCHELASTIC_RUN_ID" in os.environ else "which holds the run's store"

    def _alarm(self) -> threading.Timer:
        seconds = self.limit + self.period
        return later(seconds, self._end, 0, f"has not answered for {seconds / 60:.3g} minutes", self._holder())

    def _judge(self, heard: list[Heard], words: list[str]) -> None:
        """Brings `heard` up to date, or ends the run."""
        now = time.monotonic()
        for rank, word in zip(heard, words, strict=True):
            if word != rank.word:
                rank.word, rank.came = word, now
            entered = int(word.split("|")[1])
            if entered != rank.entered:
                rank.entered, rank.since = entered, now
        for number, rank in enumerate(heard):
            _, _, stage, where = rank.word.split("|")
            # Those that wait for it have gone further, and got no further since; its own stage may have begun long
            # before
            ahead = [other.since for other in heard if other.entered > rank.entered]
            silent, behind = now - rank.came, now - max([rank.since, *ahead])
            if silent > self.limit:
                self._end(number, f"has not answered for {silent / 60:.3g} minutes (last heard of in {stage})", where)
            if behind > self.limit and ahead:
                self._end(number, f"is still in {stage} after {behind / 60:.3g} minutes, and the others wait", where)

    def _after_error(self, kind: type, error: BaseException, trace: TracebackType | None) -> None:
        """A lost connection says nothing of who was lost: those are that fall silent from now on."""
        sys.__excepthook__(kind, error, trace)
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            time.sleep(1.5 * self.period)  # for the last words of those that were lost
            before = self.words
            time.sleep(2 * self.period)
            lost = [(rank, word) for rank, word in enumerate(self.words) if word == before[rank] and word[:4] != "left"]
            if len(lost) == self.ctx.world:  # nothing was heard of anyone
                lost = [(0, self._holder())]
            else:  # whom this one's end surprises is to blame those before
                self.left = True
                self.store.set(f"rank{self.ctx.rank}", self._word(0))
            told = ", ".join(f"rank {rank} ({word.rsplit('|', 1)[-1]}) is gone" for rank, word in lost)
            if told:
                write_error(f"error: {told}; {GO_ON} (torchrun --max-restarts does so by itself)")

    def _end(self, rank: int, what: str, where: str) -> None:
        told = f"error: rank {rank} ({where}) {what}; over --timeout-minutes {self.limit / 60:g}. The run ends here"
        write_error(f"{told}; {GO_ON} (torchrun --max-restarts does so by itself)")
        os._exit(1)
