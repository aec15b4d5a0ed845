"""One round of responses: who grades what, while others are still sampled, and what is said of rewards that failed."""

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from errors import need
from reward import RewardConfig, Rewards, Stage, find_task, grader_stats, load_tasks, task_name
from rewards.calls import CONCURRENT, Call, Failure, Function, Here, Item, Outcome, function_of
from rewards.workers import JUDGE, Setup, Workers

NUMBERS = itertools.count()  # of calls and of rounds: none comes twice in a process
MAX_TOLD = 2000  # characters of a response


@dataclass(frozen=True)
class JudgeOf:
    """Which rows a judge grades, what its score weighs, and how a process makes it."""

    tasks: Sequence[str]
    weight: float
    make: Callable[[], Any]

    def judges(self, task: str) -> bool:
        return not self.tasks or task in self.tasks


def load_judge(cfg: RewardConfig, out: Path | None, rank: int, world: int) -> JudgeOf | None:
    """None without --judge-url. What it said is kept under `out`; the ranks share its budget of calls."""
    need(cfg.judge_url or not cfg.judge, "--judge needs --judge-url")
    if not cfg.judge_url:
        return None
    from rewards.judge import Judge, find_model, judge_options

    options = judge_options(cfg.judge)
    need(not options.calls or options.calls >= world, f"--judge calls={options.calls}: less than one for each process")
    options = find_model(cfg.judge_url, options)
    kept = None if out is None else out / "judge" / f"rank_{rank}.jsonl"
    make = partial(Judge, cfg.judge_url, options, kept, options.calls // world)
    return JudgeOf(list(map(task_name, options.tasks)), options.weight, make)


class Pools:
    """Where functions are called: in this process, or in worker processes that all plain functions share; each async
    function, and a judge, has one of its own."""

    def __init__(self, cfg: RewardConfig, functions: Mapping[str, Function], judge: JudgeOf | None):
        self.cfg = cfg
        self.functions = functions
        self.judge = judge
        self.pools: dict[str, Here | Workers] = {}  # by function; "" is the one that is shared
        self.lock = threading.Lock()  # rounds that are sampled ahead ask from threads of their own

    def of(self, key: str) -> Here | Workers:
        function = None if key == JUDGE else function_of(key, self.functions)
        if self.cfg.reward_workers == 0 and key != JUDGE:
            return self.pools.setdefault("", Here(self.functions))
        alone = key == JUDGE or function.asynchronous
        place = key if alone else ""
        with self.lock:
            if place not in self.pools:
                keys = [k for k, f in self.functions.items() if (k == key if alone else not f.asynchronous)]
                setup = Setup(keys, self.judge.make if key == JUDGE else None, alone, self.cfg.reward_timeout)
                self.pools[place] = Workers(1 if alone else self.cfg.reward_workers, setup, CONCURRENT if alone else 1)
            return self.pools[place]

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()


class Grading:
    """Rewards of the responses of one round. `add` begins with one, in any order; `results` waits for all."""

    def __init__(self, rewards: Rewards, step: int | None, stage: Stage, errors: str, judged: bool = True):
        self.rewards = rewards
        self.judged = judged
        self.step = step
        self.stage = stage
        self.errors = errors
        self.round = next(NUMBERS)
        self.asked: dict[int, tuple[Any, list[str]]] = {}  # id of a rollout -> itself (so that it stays), its graders
        self.where: dict[tuple[int, str], tuple[int, int]] = {}  # rollout, grader -> number of the call, place in it
        self.failed: dict[int, Failure] = {}  # by place in the rollouts
        load_tasks()

    def add(self, rollout: Any) -> None:
        """Batch functions wait until all are there."""
        example = rollout.prompt.example
        keys = [key for key in self.rewards.graders(example) if key != JUDGE or self.judged]
        if not keys and not self.rewards.played:
            find_task(example)  # says what is missing
        self.asked[id(rollout)] = (rollout, keys)
        for key in keys:
            if not self._batch(key):
                self._submit(key, [rollout])

    def results(self, rollouts: Sequence[Any]) -> list[dict[str, float] | None]:
        """In their order; None for one that is to be dropped, as its reward failed. Raises what a reward raised where
        errors are to end the run."""
        batches: dict[tuple, list[Any]] = {}
        for r in rollouts:
            if r.ended_by == "error":  # an environment's, which told of it
                continue
            if id(r) not in self.asked:
                self.add(r)
            for key in filter(self._batch, self.asked[id(r)][1]):
                task = task_name(r.prompt.example.data_source)
                batches.setdefault((key, task if task in self.stage.options else ""), []).append(r)
        for (key, _), members in batches.items():
            self._submit(key, members)
        done: dict[int, list[Outcome]] = {}
        numbers = {number for number, _ in self.where.values()}
        for pool in list(self.rewards.pools.pools.values()):
            done |= pool.collect(numbers)
        results = [self._total(r, done) for r in rollouts]
        self.failed = {i: result for i, result in enumerate(results) if isinstance(result, Failure)}
        if self.failed and self.errors == "stop":
            raise next(iter(self.failed.values())).exception()
        self._tell(rollouts)
        of_failed = None if self.errors == "drop" else {"reward": 0.0}
        return [of_failed if i in self.failed else result or None for i, result in enumerate(results)]

    def answered(self) -> int:
        """How many responses are graded by now; for another thread to ask, while `results` waits."""
        open = set().union(*(pool.open for pool in list(self.rewards.pools.pools.values())))
        waiting = {rollout for (rollout, _), (number, _) in list(self.where.items()) if number in open}
        return len(self.asked) - len(waiting)

    def _batch(self, key: str) -> bool:
        return key != JUDGE and function_of(key, self.rewards.functions).batch

    def _submit(self, key: str, members: Sequence[Any]) -> None:
        number = next(NUMBERS)
        self.where |= {(id(r), key): (number, place) for place, r in enumerate(members)}
        items = [Item(r.text, r.prompt.example, r.finish_reason) for r in members]
        options = self.stage.options.get(task_name(items[0].example.data_source), {})
        stage = replace(self.stage, options=options)
        self.rewards.pools.of(key).submit(Call(number, self.round, key, items, self.step, stage))

    def _total(self, rollout: Any, done: Mapping[int, list[Outcome]]) -> Outcome:
        """With a judge: its score, and the total of the two. Of an episode the last response is graded, and to that
        comes what its environment gave for each turn."""
        if rollout.ended_by == "error":
            return {} if rollout.finish_reason == "error" else {"reward": 0.0}
        _, keys = self.asked[id(rollout)]
        parts: dict[str, float] = {}
        for key in keys:
            number, place = self.where[id(rollout), key]
            outcome = done[number][place]
            if isinstance(outcome, Failure):
                return outcome
            if key == JUDGE:
                score, weight = outcome["reward"], self.rewards.judge.weight
                outcome = {"judge": score, "reward": (1 - weight) * parts.get("reward", score) + weight * score}
            parts |= outcome
        if not rollout.is_episode:
            return parts
        turns = sum(rollout.turn_rewards)
        total = rollout.discount * parts.get("reward", 0.0) + turns
        return rollout.earned | parts | {"environment": turns, "reward": total}

    def _tell(self, rollouts: Sequence[Any]) -> None:
        """Count what failed; print the first of each kind in full, then at most a line a step."""
        rewards, failed = self.rewards, self.failed
        grader_stats.update(f"reward/{failure.kind}" for failure in failed.values())
        for i, failure in failed.items():
            if (failure.kind, failure.what) not in rewards.told_kinds:
                rewards.told_kinds.add((failure.kind, failure.what))
                say(f"{rewards.rank}{failure.line}; for the response {rollouts[i].text[:MAX_TOLD]!r}\n{failure.trace}"
                    f"The first failure of its kind; with --reward-errors {self.errors} the run goes on")
        if failed and self.step != rewards.told_step:
            rewards.told_step = self.step
            kinds = Counter(failure.what for failure in failed.values())
            kinds = ", ".join(f"{n} {what}" for what, n in kinds.most_common(3))
            told = f"{len(failed)} of {len(rollouts)} rewards failed ({kinds}), as {next(iter(failed.values())).line}"
            if len(failed) == len(rollouts):
                told += "\nwarning: ALL of them failed: nothing can be learnt from these responses"
            say(f"{rewards.rank}{told}")


def say(text: str) -> None:
    print(text, file=sys.stderr)
