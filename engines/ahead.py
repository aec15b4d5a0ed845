"""--async-steps K: batches of prompts that are sampled while the trainer computes.

The batch that a step needs and the K after it are sampled together, each in a thread. Steps take them in the order of
the data, whichever is finished first. A checkpoint holds a position alone: unfinished batches are sampled again.

No token is older than K syncs when it is trained. A batch begun in step s, j <= K after the one that s needs, is
trained in step s + j at the latest, as each step takes at least one batch, and there are j syncs in between. That holds
if a response begins with the newest weights; groups where it does not are dropped and sampled again.
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
    """An engine whose `generate` begins the batch that a step needs and those after it, and waits for the first.
    Prompts that are no PromptBatch, those of an evaluation, are sampled at once."""

    def __init__(self, engine: Engine, batches: Batches):
        super().__init__(engine)
        self.batches = batches
        self.max_age = batches.cfg.servers.async_steps  # syncs since a token was sampled, and batches ahead
        self.pending: dict[int, tuple[RolloutCounter, Future]] = {}  # by position
        self.finished = RolloutCounter()
        self.trained_version = 0  # of the weights that the step's tokens are compared with
        self.meter = Meter()
        self.since = time.monotonic()

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, on_rollout: RolloutCallback | None = None
    ) -> list[Rollout]:
        if not isinstance(prompts, PromptBatch):
            return self.engine.generate(prompts, n, sampling, on_rollout)
        for batch in (prompts, *self._draw_ahead(prompts.position)):
            if batch.position not in self.pending:
                counter = RolloutCounter(on_rollout if batch.context else None)  # else its step is not known yet
                work = partial(self.engine.generate, batch, n, batch.sampling, counter.add)
                self.pending[batch.position] = counter, run_in_thread(work, f"batch {batch.position}")
        if "async/queue" not in self.meter.totals:  # the step's first batch
            self.trained_version = self.engine.weights_version
            counters, futures = zip(*self.pending.values(), strict=True)
            self.meter.add_mean("async/queue", sum(future.done() for future in futures))
            self.meter.sum("async/in_flight", sum(n * len(prompts) - counter.rollouts for counter in counters))
        self.finished, future = self.pending.pop(prompts.position)
        start = time.monotonic()
        rollouts = future.result()
        for prompt in prompts:
            prompt.context = prompts.context
        self._resample_stale(rollouts, prompts.position, n, on_rollout)
        self.meter.sum("waited", time.monotonic() - start)
        return rollouts

    def _draw_ahead(self, position: int) -> list[PromptBatch]:
        """Draw those of the K batches after a position that were not drawn yet. Each is for the step that will train on
        it if every step takes one: of the same curriculum stage, and not after the last step."""
        batches, now, drawn = self.batches, self.batches.state.step, []
        stage_of = batches.curriculum.stage_index
        for ahead in range(1, self.max_age + 1):
            step = now + ahead
            wanted = step < batches.cfg.run.steps and stage_of(step) == stage_of(now)
            if wanted and position + ahead not in batches.drawn:
                # With --max-gen-batches a step may take several batches, so the step is not known yet
                known = batches.cfg.algo.max_gen_batches == 1
                drawn.append(batches.draw(step, position + ahead, step_known=known))
        return drawn

    def _resample_stale(
        self, rollouts: list[Rollout], position: int, n: int, on_rollout: RolloutCallback | None
    ) -> None:
        """Replace groups with a token that is too old by new ones, sampled with the newest weights."""
        for again in count(1):
            oldest = self.engine.weights_version - self.max_age
            versions = {  # of the tokens of each group, by the place of its first rollout
                i: list(chain.from_iterable(r.versions for r in rollouts[i : i + n]))
                for i in range(0, len(rollouts), n)
            }
            stale = [i for i in versions if min(versions[i], default=oldest) < oldest]
            self.meter.sum("async/dropped_groups", len(stale))
            self.meter.sum("async/dropped_tokens", sum(len(versions[i]) for i in stale))
            if not stale:
                return
            prompts = [rollouts[i].prompt for i in stale]
            renewed = self.engine.generate(prompts, n, self.batches.sampling(position, again), on_rollout)
            for k, i in enumerate(stale):
                rollouts[i : i + n] = renewed[k * n : (k + 1) * n]

    def step_metrics(self, batch: TrainBatch) -> dict[str, float]:
        """Return metrics of a step that trained on this batch, since the last call: docs/metrics.md."""
        meter, self.meter = self.meter, Meter()
        now, since = time.monotonic(), self.since
        self.since = now
        meter.add_mean("async/trainer_idle", meter.totals.pop("waited") / (now - since))
        versions_N = torch.tensor(list(chain.from_iterable(r.versions for r in batch.rollouts)), dtype=torch.float64)
        ages = (self.trained_version - versions_N)[batch.tokens.weights > 0]
        meter.add_mean("async/staleness", ages.sum(), len(ages))
        meter.max("async/staleness_max", ages.max() if len(ages) else 0)
        for r in batch.rollouts:
            meter.add_mean("async/mixed", len(set(r.versions)) > 1)
        for name, value in self.engine.metrics().items():
            meter.add_mean(f"async/{name}", value)
        everyone = replace(self.batches.ctx, tp=1)  # also where some train together, each process samples for itself
        return meter.reduce(everyone)
