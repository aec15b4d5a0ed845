"""Handling of signals that end a run, and detection of ranks that no longer respond.

SignalHandler   SIGTERM (schedulers), SIGINT (Ctrl-C), SIGHUP, SIGUSR1 (Slurm's --signal) and SIGXCPU end a run between
                two phases of a step, on all ranks at once, with a checkpoint. A step that has not reached its update is
                dropped, as if it had not begun.
Watchdog        Every rank sends a heartbeat with its phase every few seconds. If a rank falls silent, or lags while the
                others wait for it, an error names it and the run ends, so that torchrun --max-restarts can restart it.
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
from parallel.node_checks import check_restart_support
from utils import DistContext, StepTimer, die_with_parent, setup_distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
RESUME_HINT = "continue from the newest checkpoint with --resume auto"
RESTART_HINT = f"{RESUME_HINT} (torchrun --max-restarts does so by itself)"


def start_processes(cfg: Any, tp: int) -> "tuple[DistContext, SignalHandler, StepTimer]":
    """Join the other processes, and start to handle signals and watch the ranks. `cfg` is resume.RunConfig."""
    check_restart_support()
    ctx = setup_distributed(cfg.timeout_minutes + 1, tp)  # later than the watchdog, which names the rank
    interrupt = SignalHandler(cfg.grace_seconds)
    timer = StepTimer(interrupt.check)
    Watchdog(ctx, timer, cfg.timeout_minutes)
    return ctx, interrupt, timer


def print_stderr0(text: str) -> None:
    """Print on stderr, on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_error(text)


def write_error(text: str) -> None:
    """Print on stderr in one call, so that no other output is mixed in. Do nothing if stderr is closed."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


class SignalHandler(threading.Thread):
    """Remembers a signal until all ranks are at the same point of the loop, where they call `check`.

    Until `enable_saving`, while there is nothing to save, a signal ends the process at once. After that, the process
    ends at most `grace` seconds after the signal: if a phase takes longer, its step is lost, but not the checkpoints
    before it. A thread receives the signals, because Python handlers run in the main thread, which may be waiting for
    another rank.
    """

    def __init__(self, grace: float):
        super().__init__(daemon=True)
        self.grace, self.number, self.since = grace, 0, 0.0
        self.save: Callable[[], str] | None = None
        self.after: Callable[[], None] | None = None
        self.parent = os.getppid()
        self.pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # replaces the default action; the thread handles it
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()  # because a torchrun that is killed does not end its processes
        self.start()

    def enable_saving(self, save: Callable[[], str], after: Callable[[], None] = lambda: None) -> None:
        """Set the functions that a signal calls on all ranks: `save` saves a checkpoint of the last whole step and
        returns a message on how to continue; `after` finishes other work in the rest of the grace period."""
        self.save, self.after = save, after

    def give_up(self, reason: str) -> None:
        """Print the reason and end the run as after a signal, with a checkpoint. Raise UserError if there is nothing to
        save yet."""
        need(self.save is not None, reason)
        print(reason)
        os.kill(os.getpid(), signal.SIGTERM)

    def requested(self) -> bool:
        """Return whether this rank has received a signal. Work that only this rank does may then end early."""
        return self.number != 0

    def reduce_signal(self) -> int:
        """Return the signal that any rank has received, or 0, on all ranks. Collective."""
        number = torch.tensor(self.number)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def check(self) -> None:
        """Save and raise Interrupted if any rank has received a signal, else do nothing. Collective."""
        if number := self.reduce_signal():
            other_rank = not self.number
            if other_rank:
                self._start_grace(number)
            self.last_message = f"{signal.Signals(number).name}: {self.save()}"
            if other_rank:
                self._signal_torchrun()
            self.after()
            self.timer.cancel()
            raise Interrupted(number, self.last_message)

    def _start_grace(self, number: int) -> None:
        """Record the signal, and start a timer that ends the process when its grace period is over."""
        self.number, self.since = number, time.monotonic()
        self.last_message = (
            f"{signal.Signals(number).name}: not saved within --grace-seconds {self.grace:g}; {RESUME_HINT}"
        )
        self.timer = threading.Timer(self.grace, self._exit, [number])
        self.timer.daemon = True
        self.timer.start()

    def _signal_torchrun(self) -> None:
        """Send SIGTERM to this node's torchrun, because the signal did not reach this node. With --max-restarts it
        would start the run again and wait for the other nodes."""
        first = os.environ.get("LOCAL_RANK") == "0" and "TORCHELASTIC_RUN_ID" in os.environ
        if first and os.getppid() == self.parent:  # not if torchrun has ended: the parent is then another process
            os.kill(self.parent, signal.SIGTERM)

    def run(self) -> None:
        while True:
            number = os.read(self.pipe, 1)[0]
            if number in SIGNALS:
                self.handle(number)

    def handle(self, number: int) -> None:
        """Start the grace period, or end the process if there is nothing to save or Ctrl-C is pressed again."""
        name = signal.Signals(number).name
        if self.save is None:
            self._exit(number, f"{name} during the set-up: nothing was trained yet, so there is nothing to save")
        if not self.number:
            self._start_grace(number)
            print_stderr0(f"{name}: saving after the current phase of the step, within --grace-seconds {self.grace:g}")
        elif number == signal.SIGINT and time.monotonic() - self.since > 1:  # one key press may send two signals
            self._exit(number, f"{name} again: not saved; {RESUME_HINT}")

    def _exit(self, number: int, text: str = "") -> None:
        print_stderr0(text or self.last_message)
        os._exit(128 + number)


class Watchdog:
    """Two threads of each rank with a separate connection to the run's store, so that heartbeats are sent and received
    while the rank computes or waits. A lost store may raise or never answer, so one thread only compares times: to it
    all ranks then fall silent, and it names the first one, which holds the store."""

    def __init__(self, ctx: DistContext, timers: StepTimer, minutes: float):
        self.ctx, self.timers, self.limit = ctx, timers, 60.0 * minutes
        self.period = min(5.0, self.limit / 10)
        # of each rank the last heartbeat: [time, number of phases entered, current phase, host and process]
        self.heartbeats: list[list] = [["", 0, "set-up", "unknown host"]] * ctx.world
        self.checked = self.heartbeats  # those at the last check_ranks
        self.changed_at = [time.monotonic()] * ctx.world  # when each rank's heartbeat last changed
        self.phase_since = list(self.changed_at)  # when each rank entered its phase
        self.left = False  # whether this rank is ending because it lost a connection
        if ctx.world > 1:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=max(1.0, self.limit)))
            # the prefix excludes heartbeats from before torchrun restarted the processes
            self.store = dist.PrefixStore(f"watch/{ctx.gather(time.time_ns())[0]}", store)
            self.send_heartbeat()
            dist.barrier()  # every rank has sent a heartbeat
            for function in (self.exchange, self.check_ranks):
                threading.Thread(target=self._repeat, args=[function], daemon=True).start()
            sys.excepthook = self._after_error

    def _repeat(self, function: Callable[[], None]) -> None:
        while True:
            time.sleep(self.period)
            function()

    def send_heartbeat(self) -> None:
        location = f"{socket.gethostname()} process {os.getpid()}"
        beat = ["left" if self.left else time.monotonic(), self.timers.phase_count, self.timers.current_phase, location]
        self.store.set(f"rank{self.ctx.rank}", json.dumps(beat))

    def exchange(self) -> None:
        """Send this rank's heartbeat and receive those of all ranks."""
        with suppress(RuntimeError):  # errors of the network
            self.send_heartbeat()
            self.heartbeats = list(
                map(json.loads, self.store.multi_get([f"rank{rank}" for rank in range(self.ctx.world)]))
            )

    def check_ranks(self) -> None:
        """End the run if a rank has been silent, or has kept the others waiting, for too long."""
        now, heartbeats = time.monotonic(), self.heartbeats
        for rank, (beat, old) in enumerate(zip(heartbeats, self.checked, strict=True)):
            if beat != old:
                self.changed_at[rank] = now
            if beat[1] != old[1]:
                self.phase_since[rank] = now
        self.checked = heartbeats
        for rank, (_, entered, phase, location) in enumerate(heartbeats):
            # Ranks that wait for this one have entered more phases, and none since. This rank's own phase may have
            # begun long before they started to wait.
            ahead = [since for since, other in zip(self.phase_since, heartbeats, strict=True) if other[1] > entered]
            silent, behind = now - self.changed_at[rank], now - max([self.phase_since[rank], *ahead])
            problem = ""
            if silent > self.limit:
                problem = f"has not answered for {silent / 60:.3g} minutes (its last phase: {phase})"
            elif behind > self.limit and ahead:
                problem = f"is still in {phase} after {behind / 60:.3g} minutes while the other ranks wait"
            if problem:
                problem = f"error: rank {rank} ({location}) {problem} (--timeout-minutes {self.limit / 60:g})"
                write_error(f"{problem}; the run ends here; {RESTART_HINT}")
                os._exit(1)

    def _after_error(self, error_type: type, error: BaseException, trace: TracebackType | None) -> None:
        """Print an uncaught exception. If it is a lost connection, also name the ranks that are lost, which the error
        does not: those that fall silent from now on."""
        sys.__excepthook__(error_type, error, trace)
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            time.sleep(1.5 * self.period)  # until the last heartbeats of lost ranks have arrived
            before = self.heartbeats
            time.sleep(2 * self.period)
            pairs = enumerate(zip(self.heartbeats, before, strict=True))
            lost = {rank: beat[3] for rank, (beat, old) in pairs if beat == old and beat[0] != "left"}
            if len(lost) == self.ctx.world:  # no rank has sent a heartbeat, so the store is lost
                under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
                lost = {0: "or the torchrun next to it" if under_torchrun else "which holds the run's store"}
            else:  # ranks that lose their connection to this one must name the ranks that were lost before
                self.left = True
                self.send_heartbeat()
            names = ", ".join(f"rank {rank} ({location}) is gone" for rank, location in lost.items())
            if names:
                write_error(f"error: {names}; {RESTART_HINT}")
