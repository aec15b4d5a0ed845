"""Progress of long phases of a step: on a terminal a bar below the bar of steps, elsewhere one line every 20 s."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from tqdm import tqdm

REFRESH_SECONDS = 0.5  # between updates of a bar; shorter phases show none
LINE_EVERY_SECONDS = 20.0  # without a terminal
ItemT = TypeVar("ItemT")


class Progress:
    """Progress of a phase: `with Progress("responses", 80) as progress:`, then `progress.add()` for each item. Instead
    of calling `add`, pass `count`, which returns the number of items done; `note` returns a text to append. A thread
    of rank 0 prints it, so that bar and clock also move while the main thread waits."""

    def __init__(
        self, label: str, total: int, count: Callable[[], float] | None = None, note: Callable[[], str] = lambda: ""
    ):
        self.label = label
        self.total = total
        self.done = 0
        self.count = count or (lambda: self.done)
        self.note = note
        self.finished = threading.Event()
        self.thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def add(self) -> None:
        """Count one more item as done."""
        self.done += 1

    def __enter__(self) -> "Progress":
        self.started = time.time()
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finished.set()
        if self.thread.is_alive():
            self.thread.join()

    def _show(self) -> None:
        terminal, bar = sys.stderr.isatty(), None
        while not self.finished.wait(REFRESH_SECONDS if terminal else LINE_EVERY_SECONDS):
            done, note = min(self.count(), self.total), self.note()
            suffix = f", {note}" if note else ""
            if not terminal:
                seconds = tqdm.format_interval(time.time() - self.started)
                tqdm.write(f"  {self.label}: {done:,.0f} of {self.total:,} after {seconds}{suffix}")
                continue
            layout = "{desc} {n:.0f}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
            if bar is None:
                bar = tqdm(total=self.total, desc=f"  {self.label}", leave=False, dynamic_ncols=True, bar_format=layout)
            bar.start_t, bar.n = self.started, done
            bar.set_postfix_str(note)
        if bar is not None:
            bar.close()


def iter_with_progress(
    items: Sequence[ItemT], label: str, note: Callable[[], str] = lambda: ""
) -> Iterator[ItemT]:
    """Yield the items and show the progress."""
    with Progress(label, len(items), note=note) as progress:
        for item in items:
            yield item
            progress.add()


def sampling(counter: Callable[[], Any], total: int, label: str = "responses") -> Progress:
    """Return the progress of sampling: finished rollouts and their tokens, from a rollout.RolloutCounter."""
    return Progress(label, total, lambda: counter().rollouts, lambda: f"{counter().tokens:,} tokens")
