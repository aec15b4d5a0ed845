"""The rewards of a run: who grades which row, while others are still sampled, and what happens when a reward fails."""

import asyncio
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import reward
from errors import ErrorContext, UserError, need, plug_in
from reward import (
    Counting,
    CurriculumStage,
    RewardConfig,
    RewardContext,
    RewardFailure,
    RewardOutcome,
    Task,
    find_task,
    load_tasks,
    task_name,
)
from rewards.call import JUDGE, RewardCall, RewardInput, WorkerConfig, call_function, call_function_async
from rewards.functions import get_function, load_reward_functions, task_function
from rewards.pool import InProcessPool, Result, WorkerPool

MAX_PRINTED = 2000  # characters of a response


# --- one response ---------------------------------------------------------------------------------------------------


def grade(response: str, example: Any, *, finish_reason: str = "stop") -> dict[str, float]:
    """Return named rewards plus the total under "reward", by the example's task, without a time limit. Raise UserError
    for an unknown task, and what the reward raises, with the row.

    `example` has data_source, ground_truth, extra (dict) and uid; `finish_reason` is the engine's, `stop` or `length`.
    """
    function = task_function(find_task(example).reward)
    call = RewardCall(0, "", [RewardInput(response, example, finish_reason)])
    [result] = (
        asyncio.run(call_function_async(function, call, None))
        if function.asynchronous
        else call_function(function, call)
    )
    if isinstance(result, RewardFailure):
        raise result.exception()
    return result


class RolloutStub(SimpleNamespace):
    """As much of a Rollout as a reward needs."""

    __hash__ = object.__hash__


def make_rollout_stub(
    example: Any, text: str, finish_reason: str = "stop", context: RewardContext | None = None
) -> RolloutStub:
    """Return what a Grader takes in place of a Rollout."""
    prompt = SimpleNamespace(example=example, context=context)
    return RolloutStub(text=text, finish_reason=finish_reason, prompt=prompt, ended_by="response", is_episode=False)


# --- checks before a model loads ------------------------------------------------------------------------------------

FORM_PATTERNS = (r"\\boxed", "<think>", "JSON|coordinates")  # how instructions and prompts ask for a form of answer
COUNT_REASONS = {  # of counts
    "no_box": "its braces do not match",
    "bad_truth": "it says nothing",
    "unreadable": "it can be read neither as mathematics nor as plain words",
    "refused": "it is too long, too deep or too large",
    "cas_timeout": "math-verify took too long",
}


def check_tasks(
    examples: Iterable[Any], graded_elsewhere: Callable[[Any], bool] = lambda example: False
) -> dict[str, int]:
    """Return the number of rows of each task. Raise UserError if a row's truth, given as the answer, does not earn full
    marks, or if `score` raises it. Rows that their task's own reward does not grade are not checked.
    """
    rows = Counter()
    for example in examples:
        rows[task_name(example.data_source)] += 1
        if graded_elsewhere(example):
            continue
        task, truth = find_task(example), example.ground_truth
        with Counting() as counted:
            right = task.answerable(truth, lambda answer, row=example: grade(f"\\boxed{{{answer}}}", row))
        reasons = "".join(f"; {reason}" for name, reason in COUNT_REASONS.items() if counted.counts[name])
        row = f"row {example.uid!r}: nothing could equal the ground_truth {truth[:80]!r}, which itself as an answer"
        need(right, f"{row} does not earn full marks from {task.name!r}{reasons}; correct or remove the row")
    return dict(rows)


# --- the judge ------------------------------------------------------------------------------------------------------


def load_judge(cfg: RewardConfig, out: Path | None, rank: int, world: int) -> tuple[Any, Callable[[], Any] | None]:
    """Return the judge's options and how a process makes it; two None without --judge-url. What the judge said is kept
    under `out`; the ranks share its budget of calls."""
    need(cfg.judge_url or not cfg.judge, "--judge needs --judge-url")
    if not cfg.judge_url:
        return None, None
    judge = plug_in("rewards.judge", "--judge-url")
    options = judge.judge_options(cfg.judge)
    need(not options.calls or options.calls >= world, f"--judge calls={options.calls}: less than one for each process")
    options = judge.resolve_model_name(cfg.judge_url, options)
    kept = None if out is None else out / "judge" / f"rank_{rank}.jsonl"
    return options, partial(judge.Judge, cfg.judge_url, options, kept, world)


# --- a run ----------------------------------------------------------------------------------------------------------


# Of a response: by what grades it, in order, the results of a call and its place in them, once that was made
SubmittedCalls = dict[str, tuple[Future[Result], int] | None]


class Grader:
    """Grades the responses of a run: by the tasks' own rewards, the user's functions, and a judge. Making one says what
    is wrong with --reward and --judge.

    `submit` begins with a response, `collect` waits for those of a batch. Several batches may be graded at once, each
    response in the context of its prompt. `out` keeps what a judge said. Of episodes that are `played` environments
    reward the turns, and what is here the last response.

    `counts` are of the responses that were collected: those of `reward.Counting`, and with a slash, metrics:
    reward/errors and reward/timeouts, rewards that failed; judge/*, what the judge did. `failed` are the failures of
    the last `collect`, by place.
    """

    def __init__(
        self,
        cfg: RewardConfig | None = None,
        out: Path | None = None,
        rank: int = 0,
        world: int = 1,
        has_environment: bool = False,
    ):
        load_tasks()
        self.cfg = cfg or RewardConfig()
        self.has_environment = has_environment
        self.custom, self.functions = load_reward_functions(self.cfg.reward)
        self.judge, self.make_judge = load_judge(self.cfg, out, rank, world)
        self.here = InProcessPool(self.functions) if self.cfg.reward_workers == 0 else None
        self.pools: dict[str, WorkerPool] = {}  # by function; "" is the one that plain functions share
        self.lock = threading.Lock()  # batches that are sampled ahead are submitted by threads of their own
        self.submitted: WeakKeyDictionary[Any, SubmittedCalls] = WeakKeyDictionary()
        self.batch_id = 0  # how many batches were collected
        self.counts: Counter[str] = Counter()
        self.failed: dict[int, RewardFailure] = {}
        self.first: dict[str, Any] = {}  # a row of each task
        self.shown_kinds: set[tuple[str, str]] = set()  # of failures, printed in full
        self.shown_step: int | None = -1  # the last one with a line on failures
        self.rank = f"rank {rank}: " if world > 1 else ""
        self.worked = False  # has any response of any process been graded yet?

    def close(self) -> None:
        """End the processes. The next call starts new ones."""
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()
        if self.here:
            self.here.close()

    # who grades a row

    def uses_own_function(self, example: Any) -> str | None:
        """Return what grades a row, but for a judge: FILE.py:FUNCTION, or the name of its task."""
        task = task_name(example.data_source)
        return self.custom.get(task) or self.custom.get("") or (task if task in reward.TASKS else None)

    def keys(self, example: Any) -> list[str]:
        """Return what grades a row: its own reward, and the judge."""
        task = task_name(example.data_source)
        judged = self.judge and task in (list(map(task_name, self.judge.tasks)) or [task])
        return [key for key in (self.uses_own_function(example), JUDGE if judged else None) if key]

    def has_custom_grader(self, example: Any) -> bool:
        """Return whether something else than its task's own reward grades a row."""
        own = self.uses_own_function(example)
        return own in self.functions or (own is None and (self.has_environment or len(self.keys(example)) > 0))

    # before the run

    def check_examples(self, examples: Sequence[Any]) -> dict[str, int]:
        """Check the rows that their tasks' own rewards grade (`check_tasks`). Return the number of rows per task."""
        rows = check_tasks(examples, self.has_custom_grader)
        for example in examples:
            self.first.setdefault(task_name(example.data_source), example)
        return rows

    def unasked(self, examples: Iterable[Any]) -> Iterator[str]:
        """Yield a warning for each task whose own reward expects a form of answer that prompts do not ask for.

        Environments say in their own words what an answer looks like, so their prompts are not checked.
        """
        prompts: dict[Task, list[str]] = {}
        for example in examples:
            if not self.has_environment and not self.has_custom_grader(example):
                task, text = find_task(example), "\n".join(message["content"] for message in example.messages)
                if any(re.search(form, task.instruction) and not re.search(form, text) for form in FORM_PATTERNS):
                    prompts.setdefault(task, []).append(text)
        for task, texts in prompts.items():
            yield (
                f"prompts that do not ask for the form of answer that the reward of {task.name!r} expects: {len(texts)}"
                f". The first one ends in {texts[0][-80:]!r}; --instruction {task.name} adds: {task.instruction}"
            )

    def dry_run(
        self, main: bool = True, stages: Iterable[tuple[int, CurriculumStage]] = ((0, CurriculumStage()),)
    ) -> None:
        """Once all rows are checked: on `main`, grade two plausible responses to a row of each task in each stage (with
        its first step), so that a broken function or option stops the run before a model loads."""
        known = ", ".join(sorted(self.first))
        for task in self.custom:
            need(not task or task in self.first,
                 f"--reward {task}={self.custom[task]}: no row has the task {task!r}; there are {known}")
        with self.preserve_counts(), ErrorContext("this was the trial call before the run"):
            for step, stage in stages if main else ():
                for task, example in self.first.items():
                    own = self.uses_own_function(example)
                    reads = own is not None and "stage" in get_function(own, self.functions).optional_args
                    need(reads or task not in stage.options,
                         f"the curriculum has options for {task!r}, whose reward takes no `stage`; leave them out")
                    if own in self.functions or task in stage.options:
                        text = f"<think>A trial.</think> \\boxed{{{example.ground_truth}}}"
                        context = RewardContext(step=step, stage=stage)
                        trial = [make_rollout_stub(example, text, context=context) for _ in range(2)]
                        for response in trial:
                            self.submit(response, judged=False)
                        self.collect(trial, errors="stop")

    def check_worked(self, rollouts: Sequence[Any], gather: Callable[[Any], list[Any]]) -> None:
        """Raise UserError if all responses of the first batch, just collected, failed on all processes; called by all
        of them."""
        if not self.worked:
            lines = [failure.line for failure in self.failed.values()]
            lines += [r.failure_line for r in rollouts if r.ended_by == "error"]
            gathered = gather(lines if len(lines) == len(rollouts) else None)
            if None not in gathered:
                raise UserError(f"all of the first responses failed, as {sum(gathered, [])[0]}; correct that")
            self.worked = True

    # in the run

    def submit(self, rollout: Any, judged: bool = True) -> None:
        """Begin to grade a response; from any thread. Batch functions wait until all of a batch are there."""
        example = rollout.prompt.example
        keys = [key for key in self.keys(example) if key != JUDGE or judged]
        if not keys and not self.has_environment:
            find_task(example)  # says what is missing
        called = self.submitted[rollout] = dict.fromkeys(keys)
        for key in keys:
            if key == JUDGE or not get_function(key, self.functions).batch:
                self._call(key, [(rollout, called)])

    def collect(self, rollouts: Sequence[Any], errors: str | None = None) -> list[dict[str, float] | None]:
        """Return the rewards of a batch's responses in their order, once all are there; None for one that is to be
        dropped, as its reward failed. Raise what a reward raised if `errors` (default: --reward-errors) is "stop"."""
        errors = errors or self.cfg.reward_errors
        batches: dict[tuple, list[tuple[Any, SubmittedCalls]]] = {}
        calls: list[SubmittedCalls] = []
        for r in rollouts:
            if r.ended_by != "error" and r not in self.submitted:  # else its environment failed, and said so
                self.submit(r)
            calls.append(self.submitted.pop(r, {}))
            for key in [key for key, call in calls[-1].items() if call is None]:
                task, context = task_name(r.prompt.example.data_source), r.prompt.context or RewardContext()
                options = task if task in context.stage.options else ""
                batches.setdefault((key, options, context.step, id(context.stage)), []).append((r, calls[-1]))
        for (key, *_), members in batches.items():
            self._call(key, members)
        if self.here:
            self.here.run()
        futures = {future: None for called in calls for future, _ in called.values()}
        wait(futures)
        for future in futures:
            self.counts.update(future.result()[1])
        results = list(map(self._combine, rollouts, calls))
        self.batch_id += 1
        failed = {i: result for i, result in enumerate(results) if isinstance(result, RewardFailure)}
        if failed and errors == "stop":  # before self refers to the error, whose frames hold the run's objects
            raise next(iter(failed.values())).exception()
        self.failed = failed
        self._show_failures(rollouts, errors)
        of_failed = None if errors == "drop" else {"reward": 0.0}
        return [of_failed if i in self.failed else result or None for i, result in enumerate(results)]

    def pop_counts(self) -> Counter[str]:
        """Return the counts since the last time."""
        counts, self.counts = self.counts, Counter()
        return counts

    @contextmanager
    def preserve_counts(self) -> Iterator[None]:
        """Leave the counts as they were: what is collected inside is not trained on."""
        before = self.counts.copy()
        try:
            yield
        finally:
            self.counts = before

    def _call(self, key: str, members: Sequence[tuple[Any, SubmittedCalls]]) -> None:
        context = members[0][0].prompt.context or RewardContext()
        items = [RewardInput(r.text, r.prompt.example, r.finish_reason) for r, _ in members]
        stage = context.stage
        if stage.options:
            stage = replace(stage, options=stage.options.get(task_name(items[0].example.data_source), {}))
        future = self._pool(key).submit(RewardCall(self.batch_id, key, items, context.step, stage))
        for place, (_, called) in enumerate(members):
            called[key] = (future, place)

    def _pool(self, key: str) -> WorkerPool | InProcessPool:
        """Return where a function is called: in this process, or in processes that all plain functions share; each
        async function, and a judge, has one of its own."""
        alone = key == JUDGE or get_function(key, self.functions).asynchronous
        if self.here and key != JUDGE:
            return self.here
        place = key if alone else ""
        with self.lock:
            if place not in self.pools:
                keys = [k for k, f in self.functions.items() if (k == key if alone else not f.asynchronous)]
                setup = WorkerConfig(keys, self.make_judge if key == JUDGE else None, alone, self.cfg.reward_timeout)
                self.pools[place] = WorkerPool(1 if alone else self.cfg.reward_workers, setup)
            return self.pools[place]

    def _combine(self, rollout: Any, called: SubmittedCalls) -> RewardOutcome:
        """Return the rewards of a response. With a judge: its score, and the total of the two. Of an episode the last
        response is graded, and what its environment gave for each turn is added."""
        if rollout.ended_by == "error":
            return {} if rollout.finish_reason == "error" else {"reward": 0.0}
        parts: dict[str, float] = {}
        for key, (future, place) in called.items():
            outcome = future.result()[0][place]
            if isinstance(outcome, RewardFailure):
                return outcome
            if key == JUDGE:
                score, weight = outcome["reward"], self.judge.weight
                outcome = {"judge": score, "reward": (1 - weight) * parts.get("reward", score) + weight * score}
            parts |= outcome
        if not rollout.is_episode:
            return parts
        turns = sum(rollout.turn_rewards)
        total = rollout.discount * parts.get("reward", 0.0) + turns
        return rollout.env_rewards | parts | {"environment": turns, "reward": total}

    def _show_failures(self, rollouts: Sequence[Any], errors: str) -> None:
        """Count what failed; print the first of each kind in full, then at most a line a step."""
        failed = list(self.failed.items())
        self.counts.update(f"reward/{failure.kind}" for _, failure in failed)
        for i, failure in failed:
            if (failure.kind, failure.what) not in self.shown_kinds:
                self.shown_kinds.add((failure.kind, failure.what))
                self._print(f"{failure.line}; for the response {rollouts[i].text[:MAX_PRINTED]!r}\n{failure.trace}"
                          f"The first failure of its kind; with --reward-errors {errors} the run goes on")
        if not failed:
            return
        step = (rollouts[0].prompt.context or RewardContext()).step
        if step != self.shown_step:
            self.shown_step = step
            kinds = Counter(failure.what for _, failure in failed).most_common(3)
            kinds = ", ".join(f"{n} {what}" for what, n in kinds)
            text = f"{len(failed)} of {len(rollouts)} rewards failed ({kinds}), as {failed[0][1].line}"
            if len(failed) == len(rollouts):
                text += "\nwarning: ALL of them failed: nothing can be learnt from these responses"
            self._print(text)

    def _print(self, text: str) -> None:
        print(f"{self.rank}{text}", file=sys.stderr)
