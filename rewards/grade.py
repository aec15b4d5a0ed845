"""Grading the responses of a run: the choice of reward for each row, calls while others are still sampled, failures."""

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
from errors import ErrorContext, UserError, as_user_error, need, plug_in
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
    unwrap_truth,
)
from rewards.call import JUDGE, RewardCall, RewardInput, WorkerConfig, call_function, call_function_async
from rewards.functions import get_function, load_reward_functions, task_function
from rewards.pool import InProcessPool, Result, WorkerPool
from sources.cells import check_letter

MAX_PRINTED = 2000  # characters of a response


# --- one response ---------------------------------------------------------------------------------------------------


def grade(response: str, example: Any, *, finish_reason: str = "stop") -> dict[str, float]:
    """Return the named rewards of a response by the example's task, with their total under "reward". There is no time
    limit. Raise UserError for an unknown task; errors of the reward pass through, with a note that names the row.

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
    """A stand-in for a Rollout with the attributes that a Grader reads."""

    __hash__ = object.__hash__


def make_rollout_stub(
    example: Any, text: str, finish_reason: str = "stop", context: RewardContext | None = None
) -> RolloutStub:
    """Return a stand-in for the Rollout of a single response, which a Grader can grade."""
    prompt = SimpleNamespace(example=example, context=context)
    return RolloutStub(text=text, finish_reason=finish_reason, prompt=prompt, ended_by="response", is_episode=False)


# --- checks before a model loads ------------------------------------------------------------------------------------

# Forms in which rewards commonly expect an answer
ANSWER_FORMS = ("<think>A trial.</think> \\boxed{{{}}}", "{}", "Answer: {0}\n<answer>{0}</answer>")
# Patterns by which instructions and prompts ask for a form of answer
FORM_PATTERNS = (r"\\boxed", "<think>", "JSON|coordinates")
COUNT_REASONS = {  # count of a failed check -> what is wrong with the ground truth
    "no_box": "its braces do not match",
    "bad_truth": "it holds no answer",
    "sentence": "it is a sentence, and its answer alone would be wrong",
    "unreadable": "it is neither mathematics nor plain words",
    "refused": "it is too long, too deep or too large",
    "cas_timeout": "math-verify took too long",
}


def check_tasks(
    examples: Iterable[Any], graded_elsewhere: Callable[[Any], bool] = lambda example: False
) -> dict[str, int]:
    """Return the number of rows of each task. Raise UserError if a row's truth, given as the answer, does not earn full
    marks, or if the reward raises it. Rows for which `graded_elsewhere` is true are counted but not checked.
    """
    rows = Counter()
    for example in examples:
        rows[task_name(example.data_source)] += 1
        if graded_elsewhere(example):
            continue
        task, truth = find_task(example), example.ground_truth
        with as_user_error(UserError, f"row {example.uid!r}"):
            check_letter(example)
        with Counting() as counting:
            right = unwrap_truth(truth) == truth and task.answerable(
                truth, lambda answer, row=example: grade(f"\\boxed{{{answer}}}", row))
        reasons = "".join(f"; {reason}" for name, reason in COUNT_REASONS.items() if counting.counts[name])
        row = f"row {example.uid!r}: the ground_truth {truth[:80]!r}, given as the answer,"
        need(right, f"{row} does not earn full marks from {task.name!r}{reasons}; correct or remove the row")
    return dict(rows)


# --- the judge ------------------------------------------------------------------------------------------------------


def load_judge(cfg: RewardConfig, out: Path | None, rank: int, world: int) -> tuple[Any, Callable[[], Any] | None]:
    """Return the judge's options and a function that makes the judge in a worker process; (None, None) without
    --judge-url. The judge's scores are cached under `out`; the ranks share its budget of calls."""
    need(cfg.judge_url or not cfg.judge, "--judge needs --judge-url")
    if not cfg.judge_url:
        return None, None
    judge = plug_in("rewards.judge", "--judge-url")
    options = judge.judge_options(cfg.judge)
    need(not options.calls or options.calls >= world,
         f"--judge calls={options.calls} is less than one call for each of {world} processes; raise it")
    options = judge.resolve_model_name(cfg.judge_url, options)
    cache = None if out is None else out / "judge" / f"rank_{rank}.jsonl"
    return options, partial(judge.Judge, cfg.judge_url, options, cache, world)


# --- a run ----------------------------------------------------------------------------------------------------------


# The calls that grade a response, by key, in the order in which they are combined: the future result of the call and
# the response's index in it, or None until the call is made
SubmittedCalls = dict[str, tuple[Future[Result], int] | None]


class Grader:
    """The grader of a run: it grades responses by the tasks' own rewards, the user's functions, and a judge. Making
    one raises UserError if --reward or --judge is invalid.

    `submit` starts to grade a response, `collect` waits for those of a batch. Several batches may be graded at once,
    each response in the context of its prompt. A judge's scores are cached under `out`. With `has_environment`,
    environments reward the turns of episodes, and the functions and judge of this class grade the last response.

    `counts` are of the responses that were collected: those of `reward.Counting`, and, with a slash, metrics:
    reward/errors and reward/timeouts, the rewards that failed; judge/*, the judge's own counts. `failed` holds the
    failures of the last `collect` by their index in the batch.
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
        self.in_process = InProcessPool(self.functions) if self.cfg.reward_workers == 0 else None
        self.pools: dict[str, WorkerPool] = {}  # by function; "" is the pool that plain functions share
        self.lock = threading.Lock()  # with --async-steps, batches are submitted from several threads
        self.submitted: WeakKeyDictionary[Any, SubmittedCalls] = WeakKeyDictionary()
        self.batch_id = 0  # number of batches collected so far
        self.counts: Counter[str] = Counter()
        self.failed: dict[int, RewardFailure] = {}
        self.first: dict[str, Any] = {}  # the first row of each task
        self.wrong: dict[str, str] = {}  # the first truth of each task that differs from that row's
        self.shown_kinds: set[tuple[str, str]] = set()  # kinds of failures that were printed in full
        self.shown_step: int | None = -1  # the last step for which a line on failures was printed
        self.rank = f"rank {rank}: " if world > 1 else ""
        self.worked = False  # has any response of any process been graded yet?

    def close(self) -> None:
        """End the worker processes. The next call starts new ones."""
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()
        if self.in_process:
            self.in_process.close()

    # the rewards of a row

    def function_key(self, example: Any) -> str | None:
        """Return the key of a row's reward function, FILE.py:FUNCTION or the name of its task; None if it has none."""
        task = task_name(example.data_source)
        return self.custom.get(task) or self.custom.get("") or (task if task in reward.TASKS else None)

    def keys(self, example: Any) -> list[str]:
        """Return the keys of all that grades a row: its reward function, and the judge."""
        task = task_name(example.data_source)
        judged = self.judge and task in (list(map(task_name, self.judge.tasks)) or [task])
        return [key for key in (self.function_key(example), JUDGE if judged else None) if key]

    def has_custom_grader(self, example: Any) -> bool:
        """Return whether a row is graded by something other than its task's own reward."""
        key = self.function_key(example)
        return key in self.functions or (key is None and (self.has_environment or len(self.keys(example)) > 0))

    # before the run

    def check_examples(self, examples: Sequence[Any]) -> dict[str, int]:
        """Check the rows that are graded by their tasks' own rewards (`check_tasks`). Return the number of rows per
        task."""
        rows = check_tasks(examples, self.has_custom_grader)
        for example in examples:
            task = task_name(example.data_source)
            if self.first.setdefault(task, example).ground_truth != example.ground_truth:
                self.wrong.setdefault(task, example.ground_truth)
        return rows

    def format_warnings(self, examples: Iterable[Any]) -> Iterator[str]:
        """Yield a warning for each task whose own reward expects a form of answer that prompts do not ask for.

        Prompts of environments are not checked, because environments add their own instructions.
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
        """Grade two plausible responses to a row of each task in each stage (with its first step), so that a broken
        function or option stops the run before a model loads. Warn if a user's function gives right and wrong answers
        the same reward. Only the `main` process grades. All rows must have been checked before
        (`check_examples`)."""
        tasks = ", ".join(sorted(self.first))
        for task in self.custom:
            need(not task or task in self.first,
                 f"--reward {task}={self.custom[task]}: no row has the task {task!r}; tasks in the data: {tasks}")
        with self.preserve_counts(), ErrorContext("this was the trial call before the run"):
            for step, stage in stages if main else ():
                for task, example in self.first.items():
                    key = self.function_key(example)
                    takes_stage = key is not None and "stage" in get_function(key, self.functions).optional_args
                    need(takes_stage or task not in stage.options,
                         f"the curriculum has options for {task!r}, but its reward has no parameter `stage`; add one, "
                         "or remove the options")
                    if key in self.functions or task in stage.options:
                        context = RewardContext(step=step, stage=stage)
                        text = ANSWER_FORMS[0].format(example.ground_truth)
                        trial = [make_rollout_stub(example, text, context=context) for _ in range(2)]
                        for response in trial:
                            self.submit(response, judged=False)
                        self.collect(trial, errors="stop")
                        self._warn_if_blind(task, example, context)

    def _warn_if_blind(self, task: str, example: Any, context: RewardContext) -> None:
        """Warn if a user's function gives the truth of a row and a wrong answer the same reward, in each form. It may
        do so where a judge or an environment grades too; structured truths have no common form."""
        truth, wrong = example.ground_truth, self.wrong.get(task, "?")
        if self.has_environment or not self.functions.keys() >= {*self.keys(example)} or str(truth or "")[:1] in "{[":
            return
        texts = (form.format(answer) for form in ANSWER_FORMS for answer in (truth, wrong))
        responses = [make_rollout_stub(example, text, context=context) for text in texts]
        rewards = [graded["reward"] for graded in self.collect(responses, errors="ignore")]
        if rewards[::2] == rewards[1::2]:
            self._print(f"warning: --reward {self.function_key(example)} gives {rewards[0]:g} to the truth of row "
                        f"{example.uid!r}, {truth!r}, and to the wrong answer {wrong!r}, in each form that was tried "
                        "(boxed, bare, after `Answer:`, in <answer>); if it should grade answers, check how it "
                        "finds them")

    def check_worked(self, rollouts: Sequence[Any], gather: Callable[[Any], list[Any]]) -> None:
        """Raise UserError if all responses of the first batch, just collected, failed on all processes. All processes
        must call it."""
        if not self.worked:
            lines = [failure.line for failure in self.failed.values()]
            lines += [r.failure_line for r in rollouts if r.ended_by == "error"]
            gathered = gather(lines if len(lines) == len(rollouts) else None)
            if None not in gathered:
                raise UserError(f"all responses of the first batch failed, such as {sum(gathered, [])[0]}; fix this")
            self.worked = True

    # in the run

    def submit(self, rollout: Any, judged: bool = True) -> None:
        """Start to grade a response. Any thread may call this. Batch functions are called later, by `collect`."""
        example = rollout.prompt.example
        keys = [key for key in self.keys(example) if key != JUDGE or judged]
        if not keys and not self.has_environment:
            find_task(example)  # raises UserError, as the task is unknown
        calls = self.submitted[rollout] = dict.fromkeys(keys)
        for key in keys:
            if key == JUDGE or not get_function(key, self.functions).batch:
                self._call(key, [(rollout, calls)])

    def collect(self, rollouts: Sequence[Any], errors: str | None = None) -> list[dict[str, float] | None]:
        """Wait for the rewards of a batch's responses and return them in order; None for a response that is dropped
        because its reward failed. Raise a reward's error if `errors` (default: --reward-errors) is "stop"; if it is
        "ignore", failed rewards are zero and not reported."""
        errors = errors or self.cfg.reward_errors
        batches: dict[tuple, list[tuple[Any, SubmittedCalls]]] = {}
        calls: list[SubmittedCalls] = []
        for r in rollouts:
            if r.ended_by != "error" and r not in self.submitted:  # "error": its environment failed
                self.submit(r)
            calls.append(self.submitted.pop(r, {}))
            for key in [key for key, call in calls[-1].items() if call is None]:
                task, context = task_name(r.prompt.example.data_source), r.prompt.context or RewardContext()
                options = task if task in context.stage.options else ""
                batches.setdefault((key, options, context.step, id(context.stage)), []).append((r, calls[-1]))
        for (key, *_), members in batches.items():
            self._call(key, members)
        if self.in_process:
            self.in_process.run()
        futures = {future: None for by_key in calls for future, _ in by_key.values()}
        wait(futures)
        for future in futures:
            self.counts.update(future.result()[1])
        results = list(map(self._combine, rollouts, calls))
        self.batch_id += 1
        failed = {i: result for i, result in enumerate(results) if isinstance(result, RewardFailure)}
        if failed and errors == "stop":  # before self.failed keeps the error, whose frames hold the run's objects
            raise next(iter(failed.values())).exception()
        self.failed = failed
        if errors != "ignore":
            self._show_failures(rollouts, errors)
        substitute = None if errors == "drop" else {"reward": 0.0}
        return [substitute if i in self.failed else result or None for i, result in enumerate(results)]

    def pop_counts(self) -> Counter[str]:
        """Return the counts since the last call, and reset them."""
        counts, self.counts = self.counts, Counter()
        return counts

    @contextmanager
    def preserve_counts(self) -> Iterator[None]:
        """Restore the counts at the end, for responses that are not trained on."""
        counts = self.counts.copy()
        try:
            yield
        finally:
            self.counts = counts

    def _call(self, key: str, members: Sequence[tuple[Any, SubmittedCalls]]) -> None:
        """Call a reward for some responses with the same context, and note the call with each of them."""
        context = members[0][0].prompt.context or RewardContext()
        items = [RewardInput(r.text, r.prompt.example, r.finish_reason) for r, _ in members]
        stage = context.stage
        if stage.options:
            stage = replace(stage, options=stage.options.get(task_name(items[0].example.data_source), {}))
        future = self._pool(key).submit(RewardCall(self.batch_id, key, items, context.step, stage))
        for index, (_, calls) in enumerate(members):
            calls[key] = (future, index)

    def _pool(self, key: str) -> WorkerPool | InProcessPool:
        """Return the pool that calls a function: this process, or a worker pool. All plain functions share one worker
        pool; each async function, and the judge, has a separate one with one process."""
        alone = key == JUDGE or get_function(key, self.functions).asynchronous
        if self.in_process and key != JUDGE:
            return self.in_process
        name = key if alone else ""
        with self.lock:
            if name not in self.pools:
                keys = [k for k, f in self.functions.items() if (k == key if alone else not f.asynchronous)]
                config = WorkerConfig(keys, self.make_judge if key == JUDGE else None, alone, self.cfg.reward_timeout)
                self.pools[name] = WorkerPool(1 if alone else self.cfg.reward_workers, config)
            return self.pools[name]

    def _combine(self, rollout: Any, calls: SubmittedCalls) -> RewardOutcome:
        """Return the rewards of a response. With a judge they include its score, and the total is the weighted sum of
        both. For an episode they are those of its last response plus its environment's rewards for the turns."""
        if rollout.ended_by == "error":
            return {} if rollout.finish_reason == "error" else {"reward": 0.0}
        parts: dict[str, float] = {}
        for key, (future, index) in calls.items():
            outcome = future.result()[0][index]
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
        """Count the failures. Print the first of each kind in full, and at most one line on all of them per step."""
        failed = list(self.failed.items())
        self.counts.update(f"reward/{failure.kind}" for _, failure in failed)
        for i, failure in failed:
            if (failure.kind, failure.what) not in self.shown_kinds:
                self.shown_kinds.add((failure.kind, failure.what))
                self._print(f"{failure.line}; for the response {rollouts[i].text[:MAX_PRINTED]!r}\n{failure.trace}"
                            f"This is the first failure of its kind; with --reward-errors {errors} the run continues")
        if not failed:
            return
        step = (rollouts[0].prompt.context or RewardContext()).step
        if step != self.shown_step:
            self.shown_step = step
            kinds = Counter(failure.what for _, failure in failed).most_common(3)
            kinds = ", ".join(f"{n} {what}" for what, n in kinds)
            text = f"{len(failed)} of {len(rollouts)} rewards failed ({kinds}), for example {failed[0][1].line}"
            if len(failed) == len(rollouts):
                text += "\nwarning: ALL of them failed: nothing can be learnt from these responses"
            self._print(text)

    def _print(self, text: str) -> None:
        print(f"{self.rank}{text}", file=sys.stderr)
