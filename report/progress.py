"""Progress of long phases of a step: on a terminal a bar below the bar of steps, elsewhere one line per minute."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch.distributed as dist
from tqdm import tqdm

REFRESH_SECONDS = 0.5  # between updates of a bar; shorter phases show none
LINE_EVERY_SECONDS = 60.0  # without a terminal
ItemT = TypeVar("ItemT")


class Progress:
    """Progress of a phase: `with Progress("responses", 80) as progress:`, then `progress.add()` for each item. Instead
    of calling `add`, pass `count`, which returns the number of items done; `tokens` returns the number of tokens so
    far. A thread of rank 0 prints it, so that bar and clock also move while the main thread waits."""

    def __init__(
        self, label: str, total: int, count: Callable[[], float] | None = None, tokens: Callable[[], int] = lambda: 0
    ):
        self.label = label
        self.total = total
        self.done = 0
        self.count = count or (lambda: self.done)
        self.tokens = tokens
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
            done, tokens = min(self.count(), self.total), self.tokens()
            suffix = f", {tokens:,} tokens" if tokens else ""
            if not terminal:
                seconds = tqdm.format_interval(time.time() - self.started)
                tqdm.write(f"  {self.label}: {done:,.0f} of {self.total:,}{suffix} after {seconds}")
                continue
            layout = "{desc} {n:.0f}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
            if bar is None:
                bar = tqdm(total=self.total, desc=f"  {self.label}", leave=False, dynamic_ncols=True, bar_format=layout)
            bar.start_t, bar.n = self.started, done
            bar.set_postfix_str(suffix.removeprefix(", "))
        if bar is not None:
            bar.close()


def iter_with_progress(items: Sequence[ItemT], label: str) -> Iterator[ItemT]:
    """Yield the items and show the progress."""
    with Progress(label, len(items)) as progress:
        for item in items:
            yield item
            progress.add()


def sampling(counter: Callable[[], Any], total: int, label: str = "responses") -> Progress:
    """Return the progress of sampling: finished rollouts and their tokens, from a rollout.RolloutCounter."""
    return Progress(label, total, lambda: counter().rollouts, lambda: counter().tokens)


def logprob_progress(batch: Any) -> Progress:
    """Return the progress of the log-probabilities and values before an update, in tokens of a packing.TrainBatch."""
    tokens = batch.tokens

    def count() -> int:
        columns = [column for column in (tokens.old_logps, tokens.values, tokens.ref_logps) if column is not None]
        return int((~columns[0].isnan()).sum()) if columns else 0

    return Progress("log-probabilities", sum(len(micro.token_index_K) for micro in chain(*batch.minibatches)), count)


def update_progress(batch: Any, passes: int, meter: Any) -> Progress:
    """Return the progress of an update, in trained tokens of a packing.TrainBatch; `meter` counts them."""
    rows = (micro.token_index_K for micro in chain(*batch.minibatches))
    total = passes * sum(int((batch.tokens.weights[token_index_K] > 0).sum()) for token_index_K in rows)
    return Progress("trained tokens", total, lambda: meter.totals.get("update/tokens", 0.0))
