"""Sampling ahead (--async-steps K): later batches of prompts are sampled while the trainer computes.

The batch that a step needs and the K batches after it are sampled at the same time, each in a thread. Steps use batches
in the order of the data, not in the order in which they finish. A checkpoint only has a position in the data, so a
resumed run samples unfinished batches again.

No token is older than K syncs when it is trained. Let batch j <= K after the one that step s needs be started in step
s. Each step uses at least one batch, so this batch is trained in step s + j at the latest, and there are j syncs in
between. This holds if its responses begin with the newest weights; groups where they do not are dropped and sampled
again.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain, count

import torch

from packing import TrainBatch
from rollout import (
    Batches,
    Engine,
    EngineWrapper,
    Prompt,
    PromptBatch,
    Rollout,
    RolloutCallback,
    RolloutCounter,
    SamplingParams,
)
from utils import Meter, run_in_thread


class Ahead(EngineWrapper):
    """An engine whose `generate` starts to sample the batch that a step needs and the batches after it, and waits for
    the first. Prompts that are not a PromptBatch (those of an evaluation) are sampled directly."""

    def __init__(self, engine: Engine, batches: Batches):
        super().__init__(engine)
        self.batches = batches
        self.max_age = batches.cfg.servers.async_steps  # max syncs since a token was sampled; also max batches ahead
        self.pending: dict[int, tuple[RolloutCounter, Future]] = {}  # position in the data -> batch being sampled
        self.progress = RolloutCounter()
        self.trained_version = 0  # weights version from which the age of the step's tokens is counted
        self.meter = Meter()
        self.last_report = time.monotonic()

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, on_rollout: RolloutCallback | None = None
    ) -> list[Rollout]:
        """Start to sample `prompts` and the next K batches, unless they are being sampled, and return the rollouts of
        `prompts` once they are finished."""
        if not isinstance(prompts, PromptBatch):
            return self.engine.generate(prompts, n, sampling, on_rollout)
        for batch in (prompts, *self._draw_ahead(prompts.position)):
            if batch.position not in self.pending:
                counter = RolloutCounter(on_rollout if batch.context else None)  # None: its step is not known yet
                work = partial(self.engine.generate, batch, n, batch.sampling, counter.add)
                self.pending[batch.position] = counter, run_in_thread(work, f"batch {batch.position}")
        if "async/queue" not in self.meter.totals:  # the step's first batch
            self.trained_version = self.engine.weights_version
            counters, futures = zip(*self.pending.values(), strict=True)
            self.meter.add_mean("async/queue", sum(future.done() for future in futures))
            self.meter.sum("async/in_flight", sum(n * len(prompts) - counter.rollouts for counter in counters))
        self.progress, future = self.pending.pop(prompts.position)
        start = time.monotonic()
        rollouts = future.result()
        for prompt in prompts:
            for each in filter(None, (prompt, prompt.noised)):
                each.context = prompts.context
        self._resample_stale(rollouts, prompts.position, n, on_rollout)
        self.meter.sum("waited", time.monotonic() - start)
        return rollouts

    def _draw_ahead(self, position: int) -> list[PromptBatch]:
        """Draw those of the next K batches that are not drawn yet. Each is meant for the step that trains on it if
        every step uses one batch; this step must be in the current curriculum stage and not after the last step."""
        batches, current_step, drawn = self.batches, self.batches.state.step, []
        stage_index = batches.curriculum.stage_index
        for ahead in range(1, self.max_age + 1):
            step = current_step + ahead
            is_needed = step < batches.cfg.run.steps and stage_index(step) == stage_index(current_step)
            if is_needed and position + ahead not in batches.prepared:
                # with --max-gen-batches above 1 a step may use several batches, so the step is not known yet
                step_known = batches.cfg.algo.max_gen_batches == 1
                drawn.append(batches.draw(step, position + ahead, step_known=step_known))
        return drawn

    def _resample_stale(
        self, rollouts: list[Rollout], position: int, n: int, on_rollout: RolloutCallback | None
    ) -> None:
        """Replace groups that have a token older than K syncs by new ones, sampled with the newest weights."""
        for attempt in count(1):
            oldest = self.engine.weights_version - self.max_age
            versions = {  # index of a group's first rollout -> weights versions of the group's tokens
                i: list(chain.from_iterable(r.versions for r in rollouts[i : i + n]))
                for i in range(0, len(rollouts), n)
            }
            stale = [i for i in versions if min(versions[i], default=oldest) < oldest]
            self.meter.sum("async/dropped_groups", len(stale))
            self.meter.sum("async/dropped_tokens", sum(len(versions[i]) for i in stale))
            if not stale:
                return
            prompts = [rollouts[i].prompt for i in stale]
            resampled = self.engine.generate(prompts, n, self.batches.sampling(position, attempt), on_rollout)
            for k, i in enumerate(stale):
                rollouts[i : i + n] = resampled[k * n : (k + 1) * n]

    def step_metrics(self, batch: TrainBatch) -> dict[str, float]:
        """Return the async/* metrics (docs/metrics.md) since the last call, for a step that trained on this batch."""
        meter, self.meter = self.meter, Meter()
        now, last_report = time.monotonic(), self.last_report
        self.last_report = now
        meter.add_mean("async/trainer_idle", meter.totals.pop("waited") / (now - last_report))
        versions_N = torch.tensor(list(chain.from_iterable(r.versions for r in batch.rollouts)), dtype=torch.float64)
        ages = (self.trained_version - versions_N)[batch.tokens.weights > 0]
        meter.add_mean("async/staleness", ages.sum(), len(ages))
        meter.max("async/staleness_max", ages.max() if len(ages) else 0)
        for r in batch.rollouts:
            meter.add_mean("async/mixed", len(set(r.versions)) > 1)
        for name, value in self.engine.metrics().items():
            meter.add_mean(f"async/{name}", value)
        all_ranks = replace(self.batches.ctx, tp=1)  # tensor-parallel ranks train together, but each one samples
        return meter.reduce(all_ranks)
