"""Runs that are asked to end, and ranks that stop answering: everything is saved, or it is said who is to blame.

Interrupt   SIGTERM (schedulers), SIGINT (Ctrl-C), SIGHUP, SIGUSR1 (Slurm's --signal) and SIGXCPU end a run between two stages of a
            step, on all ranks at once, with a checkpoint. A step that has not reached its update is dropped, as if it had not begun.
Watch       every rank tells the others every few seconds that it lives and how far it is. One that falls silent, or stays behind
            while the others wait for it, is named, and the run ends: torchrun --max-restarts can go on.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from errors import Interrupted
from utils import Context, Timers

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)


class Interrupt(threading.Thread):
    """Remembers a signal until all ranks stand at the same place of the loop; `check` is that place.

    Until `arm`, while there is nothing to save, a signal ends the process at once. After that, `grace` seconds later at the
    latest: a stage that takes longer than that is lost with its step, not the checkpoints before it. A thread hears the signals,
    because Python handlers wait for the main thread, which may be waiting for another rank.
    """

    def __init__(self, grace: float):
        super().__init__(daemon=True)
        self.grace, self.number, self.since = grace, 0, 0.0
        self.save: Callable[[], str] | None = None
        self.timer: threading.Timer | None = None
        self.pipe, heard = os.pipe()
        os.set_blocking(heard, False)
        signal.set_wakeup_fd(heard, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # instead of what it would do; the thread does the rest
        self.start()

    def arm(self, save: Callable[[], str]) -> None:
        """`save` makes a checkpoint of the last whole step, on all ranks, and says how to go on from it."""
        self.save = save

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
        number = self.agreed()
        if number:
            text = f"{signal.Signals(number).name}: {self.save()}"
            if self.timer:
                self.timer.cancel()
            raise Interrupted(number, text)

    def run(self) -> None:
        while True:
            for number in os.read(self.pipe, 1):
                if number in SIGNALS:
                    self.heard(number)

    def heard(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.save is None:
            self._leave(number, f"{name} during the set-up: nothing was trained yet, so there is nothing to save")
        if not self.number:
            self.number, self.since = number, time.monotonic()
            late = f"{name}: not saved within --grace-seconds {self.grace:g}; --resume auto goes on from the newest checkpoint"
            self.timer = threading.Timer(self.grace, self._leave, (number, late))
            self.timer.daemon = True
            self.timer.start()
            self._say(f"{name}: saving after this stage of the step, within --grace-seconds {self.grace:g}")
        elif number == signal.SIGINT and time.monotonic() - self.since > 1:  # once more, and not the same key press
            self._leave(number, f"{name} again: not saved; --resume auto goes on from the newest checkpoint")

    @classmethod
    def _leave(cls, number: int, text: str) -> None:
        cls._say(text)
        os._exit(128 + number)

    @staticmethod
    def _say(text: str) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            os.write(2, f"{text}\n".encode())  # one call, so that no other output comes between


class Watch(threading.Thread):
    """A thread of each rank, with a connection of its own to the run's store, so that it speaks while the rank computes or waits."""

    def __init__(self, ctx: Context, timers: Timers, minutes: float):
        super().__init__(daemon=True)
        self.ctx, self.timers, self.limit = ctx, timers, 60.0 * minutes
        self.period = min(5.0, self.limit / 10)
        if ctx.world > 1 and minutes > 0:
            patience = timedelta(seconds=max(1.0, self.limit))
            own = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience)
            name = [f"watch/{time.time_ns()}"]  # of these processes, not of those that torchrun may have restarted them after
            dist.broadcast_object_list(name)
            self.store = dist.PrefixStore(name[0], own)
            self.store.set(self._key(ctx.rank), self._word(0))
            dist.barrier()  # every rank has spoken once
            self.start()

    @staticmethod
    def _key(rank: int) -> str:
        return f"rank{rank}"

    def _word(self, beat: int) -> str:
        return f"{beat}|{self.timers.entered}|{self.timers.stage}|{socket.gethostname()} process {os.getpid()}"

    def run(self) -> None:
        """An exchange every few seconds. A store that is gone may raise, or never answer: then nothing stops the alarm."""
        heard = [("", time.monotonic())] * self.ctx.world, [(0, time.monotonic())] * self.ctx.world
        alarm, beat = self._alarm(), 0
        try:
            while True:
                time.sleep(self.period)
                beat += 1
                try:
                    self.store.set(self._key(self.ctx.rank), self._word(beat))
                    words = [word.decode() for word in self.store.multi_get([self._key(r) for r in range(self.ctx.world)])]
                except RuntimeError:  # of the network
                    continue
                alarm.cancel()
                alarm = self._alarm()
                heard = self._judge(words, *heard)
        finally:
            alarm.cancel()

    def _alarm(self) -> threading.Timer:
        where = "or torchrun beside it" if "TORCHELASTIC_RUN_ID" in os.environ else "which holds the run's store"
        minutes = (self.limit + self.period) / 60
        alarm = threading.Timer(60 * minutes, self._end, (0, f"has not answered for {minutes:.3g} minutes", where))
        alarm.daemon = True
        alarm.start()
        return alarm

    def _judge(self, words: list[str], said: list[tuple[str, float]], moved: list[tuple[int, float]]) -> tuple[list, list]:
        """`said` is each rank's last word and when it came, `moved` how many stages it entered and since when. Both, brought up to
        date; or the end of the run."""
        now, ranks = time.monotonic(), range(len(words))
        stages = [int(word.split("|")[1]) for word in words]
        said = [old if old[0] == word else (word, now) for old, word in zip(said, words, strict=True)]
        moved = [old if old[0] == n else (n, now) for old, n in zip(moved, stages, strict=True)]
        for rank in ranks:
            _, _, stage, where = words[rank].split("|")
            # Those that wait for it have gone further, and got no further since; its own stage may have begun long before
            ahead = [moved[other][1] for other in ranks if stages[other] > stages[rank]]
            silent, behind = now - said[rank][1], now - max([moved[rank][1], *ahead])
            if silent > self.limit:
                self._end(rank, f"has not answered for {silent / 60:.3g} minutes (last heard of in {stage})", where)
            if behind > self.limit and ahead:
                self._end(rank, f"is still in {stage} after {behind / 60:.3g} minutes, and the others wait", where)
        return said, moved

    def _end(self, rank: int, what: str, where: str) -> None:
        text = (f"error: rank {rank} ({where}) {what}; over --timeout-minutes {self.limit / 60:g}. The run ends here; --resume auto "
                f"goes on from the newest checkpoint (torchrun --max-restarts does so by itself)\n")
        os.write(2, text.encode())
        os._exit(1)
