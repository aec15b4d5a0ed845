"""How far a long part of a step is: on a terminal a bar under the step's own, elsewhere a line a minute."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch.distributed as dist
from tqdm import tqdm

REFRESH_SECONDS = 0.5  # of a bar; what is shorter shows none
LINE_EVERY_SECONDS = 60.0  # where there is no terminal
T = TypeVar("T")


class Progress:
    """`with Progress("responses", 80) as progress:` and in it `progress.add()`; or `count` returns how far it is, and
    `tokens` how many tokens that are. A thread of rank 0 shows it, so that it also moves (and tells the time) where the
    main thread waits."""

    def __init__(
        self, what: str, total: int, count: Callable[[], float] | None = None, tokens: Callable[[], int] = lambda: 0
    ):
        self.what = what
        self.total = total
        self.done = 0
        self.count = count or (lambda: self.done)
        self.tokens = tokens
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def add(self) -> None:
        self.done += 1

    def __enter__(self) -> "Progress":
        self.began = time.time()
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()

    def _show(self) -> None:
        terminal, bar = sys.stderr.isatty(), None
        while not self.over.wait(REFRESH_SECONDS if terminal else LINE_EVERY_SECONDS):
            done, tokens = min(self.count(), self.total), self.tokens()
            said = f", {tokens:,} tokens" if tokens else ""
            if not terminal:
                seconds = tqdm.format_interval(time.time() - self.began)
                tqdm.write(f"  {self.what}: {done:,.0f} of {self.total:,}{said} after {seconds}")
                continue
            shape = "{desc} {n:.0f}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
            if bar is None:
                bar = tqdm(total=self.total, desc=f"  {self.what}", leave=False, dynamic_ncols=True, bar_format=shape)
            bar.start_t, bar.n = self.began, done
            bar.set_postfix_str(said.removeprefix(", "))
        if bar is not None:
            bar.close()


def iter_with_progress(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, with their progress shown."""
    with Progress(what, len(items)) as progress:
        for item in items:
            yield item
            progress.add()


def sampling(counter: Callable[[], Any], total: int, what: str = "responses") -> Progress:
    """Return the progress of sampling: finished rollouts and their tokens, as a rollout.RolloutCounter has them."""
    return Progress(what, total, lambda: counter().rollouts, lambda: counter().tokens)


def logprob_progress(batch: Any) -> Progress:
    """Of the log-probabilities and values before an update: tokens of a packing.Batch that have theirs."""
    tokens = batch.tokens

    def count() -> int:
        columns = [column for column in (tokens.old_logps, tokens.values, tokens.ref_logps) if column is not None]
        return int((~columns[0].isnan()).sum()) if columns else 0

    return Progress("log-probabilities", sum(len(micro.token_index_K) for micro in chain(*batch.minibatches)), count)


def update_progress(batch: Any, passes: int, meter: Any) -> Progress:
    """Return the progress of an update: trained tokens of a packing.Batch, which `meter` counts per micro-batch."""
    rows = (micro.token_index_K for micro in chain(*batch.minibatches))
    total = passes * sum(int((batch.tokens.weights[of] > 0).sum()) for of in rows)
    return Progress("trained tokens", total, lambda: meter.totals.get("update/tokens", 0.0))
