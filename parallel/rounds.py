"""Rounds of sampling: a batch of prompts at a position of the data each, as many of them at once as steps may wait for.

With --async-steps K the round that a step needs and the K after it are sampled together, each in a thread, while the
trainer computes; steps take them in the order of the data, whichever is finished first. A checkpoint holds a position
alone: what was being sampled is sampled again. With K = 0 a round is sampled when it is asked for, in the main thread.

No token is older than K syncs when it is trained: a round that is begun in step s at j <= K beyond what s needs is
trained in step s + j at the latest, as each step takes one round or more, and there are s + j - s syncs in between.
That holds if a response begins with the newest weights; groups where it does not are dropped and sampled again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from packing import Batch
from prepare_data import Example
from report.progress import Progress
from reward import RewardContext
from rewards.grade import Grader
from rollout import Engine, Prompt, Rollout, Sampling
from utils import Context, Meter, derive_seed, in_thread


@dataclass(eq=False)
class Round:
    """This process's share of a batch: who grades it, and `sampled`, which gives its rollouts once they are there."""

    context: RewardContext | None  # None until the step that trains on it is known
    progress: Progress
    sampled: Callable[[], list[Rollout]] = list
    done: Callable[[], bool] = bool
    rollouts: list[Rollout] = field(default_factory=list)  # whole groups


class Rounds:
    """`take` gives the round at a position, and begins those that are to be sampled meanwhile. `play` samples, with
    `engine`; `prompts_of` makes examples into prompts. `cfg` is train.Config."""

    def __init__(
        self,
        cfg: Any,
        play: Any,
        engine: Engine,
        prompts_of: Callable[[Sequence[Example]], list[Prompt]],
        grader: Grader,
        curriculum: Any,
        ctx: Context,
    ):
        self.cfg = cfg
        self.ahead = cfg.servers.async_steps
        self.play = play
        self.engine = engine
        self.prompts_of = prompts_of
        self.grader = grader
        self.curriculum = curriculum
        self.ctx = ctx
        self.begun: dict[int, Round] = {}  # by position
        self.drawn: dict[int, list[str]] = {}  # uids of this step's rounds and of those begun ahead, by position
        self.meter = Meter()
        self.since = time.monotonic()

    def take(self, state: Any, position: int) -> Round:
        """What the step of `state` needs now. A round that is begun ahead is for the step that will train on it if each
        takes one: not across the border of a curriculum's stage, nor after the last step."""
        stage_of = self.curriculum.number
        for ahead in range(self.ahead + 1):
            step = state.step + ahead
            wanted = step < self.cfg.run.steps and stage_of(step) == stage_of(state.step)
            if wanted and position + ahead not in self.begun:
                # With --sample-rounds a step may take several batches, so the step of one sampled ahead is unknown yet
                known = ahead == 0 or self.cfg.algo.sample_rounds == 1
                self.begun[position + ahead] = self._begin(state, step, position + ahead, known)
        if position == state.position:
            self._measure()
        round = self.begun.pop(position)
        round.context = round.context or self._context(state.step, position)
        start = time.monotonic()
        with round.progress:
            round.rollouts = round.sampled()
            for r in round.rollouts:
                r.prompt.context = round.context
            self._renew(round, position)
        self.meter.sum("waited", time.monotonic() - start)
        return round

    def sampling(self, position: int, again: int = 0) -> Sampling:
        """The randomness of a sample is a function of (seed, position), its prompt and its place in the group."""
        seed = derive_seed(self.cfg.run.seed, "sample", position, *([again] if again else []))
        return Sampling(self.cfg.rollout.max_new_tokens, self.cfg.rollout.temperature, seed=seed)

    def _context(self, step: int, position: int) -> RewardContext:
        return RewardContext(position, step, self.curriculum.stage(step))

    def _begin(self, state: Any, step: int, position: int, known: bool) -> Round:
        self.drawn = {at: uids for at, uids in self.drawn.items() if at >= state.position}
        ahead = set(chain.from_iterable(self.drawn.values())) if self.ahead else None
        batch = self.curriculum.batch(step, state.position, position - state.position, state.curriculum, ahead)
        self.drawn[position] = [example.uid for example in batch]
        own = batch[self.ctx.rank :: self.ctx.world]
        context = self._context(step, position) if known else None
        progress = Progress("responses", len(own) * self.cfg.algo.group_size)
        round = Round(context, progress)
        on_rollout = progress.counting(context and self.grader.submit)

        def prompts() -> list[Prompt]:
            made = self.prompts_of(own)
            for prompt in made:
                prompt.context = context
            return made

        def sample() -> list[Rollout]:
            return self._generate(prompts(), self.sampling(position), on_rollout)

        if not self.ahead:
            return replace(round, sampled=sample)
        future = in_thread(sample, f"round {position}")
        return replace(round, sampled=future.result, done=future.done)

    def _generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_rollout: Callable[[Rollout], None]
    ) -> list[Rollout]:
        return self.play.generate(prompts, self.cfg.algo.group_size, sampling, on_rollout)

    def _renew(self, round: Round, position: int) -> None:
        """Groups with a token that is too old are dropped and sampled again, under the newest weights."""
        size, again = self.cfg.algo.group_size, 0
        while stale := [i for i in range(0, len(round.rollouts), size) if self._stale(round.rollouts[i : i + size])]:
            again += 1
            prompts = [round.rollouts[i].prompt for i in stale]
            rollouts = self._generate(prompts, self.sampling(position, again), self.grader.submit)
            for n, i in enumerate(stale):
                self.meter.sum("async/dropped_groups", 1)
                self.meter.sum("async/dropped_tokens", sum(len(r.versions) for r in round.rollouts[i : i + size]))
                round.rollouts[i : i + size] = rollouts[n * size : (n + 1) * size]

    def _stale(self, group: Sequence[Rollout]) -> bool:
        now = self.engine.version
        return now - min(chain.from_iterable(r.versions for r in group), default=now) > self.ahead

    # --- what is measured ---

    def _measure(self) -> None:
        """As a step begins."""
        self.version = self.engine.version  # which it trains on
        rounds = self.begun.values()
        self.meter.add("async/queue", sum(round.done() for round in rounds))
        self.meter.sum("async/in_flight", sum(round.progress.total - round.progress.done for round in rounds))

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Of a step that trained on this batch: over all processes, since the last call; docs/metrics.md."""
        meter, self.meter = self.meter, Meter()
        now, since = time.monotonic(), self.since
        self.since = now
        if not self.ahead:
            return {}
        meter.sum("async/dropped_groups", 0)
        meter.sum("async/dropped_tokens", 0)
        meter.add("async/trainer_idle", meter.totals.pop("waited") / (now - since))
        versions_N = torch.tensor(list(chain.from_iterable(r.versions for r in batch.rollouts)), dtype=torch.float64)
        ages = (self.version - versions_N)[batch.tokens.weights > 0]
        meter.add("async/staleness", ages.sum(), len(ages))
        meter.max("async/staleness_max", ages.max() if len(ages) else 0)
        for r in batch.rollouts:
            meter.add("async/mixed", len(set(r.versions)) > 1)
        for name, value in self.engine.metrics().items():
            meter.add(f"async/{name}", value)
        return meter.reduce(replace(self.ctx, tp=1))
