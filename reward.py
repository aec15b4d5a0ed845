r"""Rewards: (response text, example) -> named rewards, e.g. {"accuracy": 1.0, "format": 1.0, "reward": 1.0}.

A task is one file in tasks/; its reward is for the rows whose `data_source` names it. To add a task, add a file with

    @register("chess")
    def chess(response: str, example: Example, finish_reason: str) -> dict[str, float]:
        return {"accuracy": ..., "reward": ...}

`--reward [TASK=]FILE.py:FUNCTION` replaces it (rewards/custom.py). A reward takes (response, example), or
(responses, examples) and then returns a list, and by name what it wants of finish_reason(s), step and stage; it may be
async. It returns a number or named numbers with their total under "reward"; "images": one number per image.
"""

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from errors import Note, UserError, need
from settings import never, setting

MAX_ANSWER_CHARS = 1000  # a longer box is refused; it is no final answer
# Counts since the start or the last `.clear()`:
# graded, answers compared; cas, those sent to math-verify;
# of wrong answers: no_box, no complete box; bad_truth, the truth holds no answer; unreadable, no such expression;
# refused, too long, deep or large; cas_timeout, math-verify was late; cas_crash, it died; cas_budget, no time was left;
# with a slash, metrics: reward/errors and reward/timeouts, rewards that failed; judge/*, what the judge did.
grader_stats: Counter[str] = Counter()

# --- settings ------------------------------------------------------------------------------------------------------


def names_no_file(option: Any) -> bool:
    """Return whether an option of --judge names neither a file nor an environment variable, whose content is sent."""
    return str(option).partition("=")[0] not in ("template", "key_env")


@dataclass(frozen=True)
class RewardConfig:
    """Reward"""

    reward: tuple[str, ...] = setting((), "instead of the tasks' own, for all rows or one task's: docs/rewards.md",
                                      metavar="[TASK=]FILE.py:FUNCTION", from_run=never)
    reward_errors: str = setting("drop", "a reward that fails: leave the response out, give it 0, or end the run",
                                 choices=("drop", "zero", "stop"))
    reward_timeout: float = setting(30.0, "seconds that one call of a reward may take", above=0)
    reward_workers: int = setting(2, "processes that grade, of each rank; 0: this one, without time limits", least=0)
    curriculum: str | None = setting(None, "TOML or JSON file of curriculum stages; none: train without stages "
                                     "(default: the task's own, if any); docs/curriculum.md", metavar="FILE",
                                     from_run=lambda file: file == "none" or Path(str(file)).is_file())
    judge_url: str | None = setting(None, "OpenAI-compatible server with a model that judges", metavar="URL",
                                    from_run=never)
    judge: tuple[str, ...] = setting((), "model, template, weight, tasks, calls; docs/judge.md", metavar="KEY=VALUE",
                                     from_run=names_no_file, part_of="judge_url")


@dataclass(frozen=True)
class Stage:
    """Of a curriculum. `options` are by task; a reward gets its own task's."""

    name: str = ""
    number: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardContext:
    """When a response is graded: what a reward may ask for besides the response."""

    batch: int = 0  # which batch of prompts: its position in the data; batches may be graded at the same time
    step: int | None = None  # of the run
    stage: Stage = Stage()  # of the curriculum


# --- tasks --------------------------------------------------------------------------------------------------------

# Whether a truth, written as an answer, earns full marks; `earned(answer)` are the named rewards of `\boxed{answer}`.
Answerable = Callable[[str, Callable[[str], dict[str, float]]], bool]


def full_marks(truth: str, earned: Callable[[str], dict[str, float]]) -> bool:
    """Return whether the truth, given as the answer, has accuracy 1; a reward without "accuracy" only must not fail."""
    return earned(truth).get("accuracy", 1.0) == 1.0


class Task(NamedTuple):
    name: str
    reward: Callable
    answerable: Answerable
    instruction: str  # text for prompts, which says what an answer looks like; what `--instruction NAME` stands for


TASKS: dict[str, Task] = {}  # by name, and by other names


def register(*names: str, answerable: Answerable = full_marks, instruction: str = "") -> Callable[[Callable], Callable]:
    """Decorator: make a function the reward of the task `names[0]`; data sources of the other names count as it.

    The default `instruction` is INSTRUCTION of the function's file. A function that raises `Later` is called again.
    """

    def add(reward: Callable) -> Callable:
        for name in names:
            if name in TASKS:
                taken = TASKS[name].reward.__name__
                raise ValueError(f"task {name!r} already has the reward {taken}; choose another name")
            text = instruction or reward.__globals__.get("INSTRUCTION", "")
            TASKS[name] = Task(names[0], reward, answerable, text)
        return reward

    return add


@cache
def load_tasks() -> None:
    """Import every file of tasks/ and envs/, which registers what is in it."""
    for folder in ("tasks", "envs"):
        for file in sorted(Path(__file__).with_name(folder).glob("[!_]*.py")):
            importlib.import_module(f"{folder}.{file.stem}")


def task_name(data_source: str) -> str:
    """`hiyouga/geometry3k`, `Geometry3K` and `geo3k` -> `geo3k`: lower case, no owner, other names resolved."""
    load_tasks()
    name = data_source.strip().lower().rsplit("/", 1)[-1]
    return TASKS[name].name if name in TASKS else name


def find_task(example: Any) -> Task:
    """The task of a row. Raises UserError if it is unknown or the row's truth is no text."""
    name = task_name(example.data_source)
    if not isinstance(example.ground_truth, str):
        raise UserError(
            f"row {example.uid!r}: ground_truth is {example.ground_truth!r} ({type(example.ground_truth).__name__}); "
            "it must be a string, or JSON text for a structured truth"
        )
    if name not in TASKS:
        known = ", ".join(sorted({task.name for task in TASKS.values()}))
        raise UserError(
            f"row {example.uid!r}: no reward for data_source {example.data_source!r} (task {name!r}); known tasks: "
            f"{known}. Name the task with --data-source, or give your own with --reward FILE.py:FUNCTION"
        )
    return TASKS[name]


# --- what tasks share: the box ------------------------------------------------------------------------------------

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
SPECIAL_TOKEN = re.compile(r"<\|[^<>|]{1,64}\|>")  # as `<|im_start|>`: kept visible by the engines, no text


def closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one just before `start`; None if the text ends first."""
    depth = 1
    for brace in re.compile("[{}]").finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def extract_boxed(response: str) -> str | None:
    r"""Content of the last `\boxed{...}` (or `\boxed {...}`, `\fbox{...}`); None, and counted, if there is none.

    An unclosed last box means that the response was cut off while it was changing its answer, so an earlier box does
    not count (verl and mathruler decide the same). Braces are counted escaped or not, again as they do.
    """
    boxes = list(BOX.finditer(response))
    end = closing_brace(response, boxes[-1].end()) if boxes else None
    if end is None:
        grader_stats["no_box"] += 1
        return None
    return response[boxes[-1].end() : end]


WRAPPED = r"<think>.*?</think>(.*\S.*)|<answer>(?!\s*</)((?:(?!</?answer>).)+)</answer>|\$\$?([^$]*[^$\s][^$]*)\$\$?|"
WRAPPED += r"\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\]"
WRAPPED = re.compile(WRAPPED, re.DOTALL | re.IGNORECASE)


def unwrap_truth(truth: str) -> str:
    r"""Return a truth without what wraps all of it: thinking, `<answer>` tags, `\boxed{}`, `$...$`, `\(...\)`.

    A truth that is not wrapped, or whose wrapping is empty, is returned unchanged.
    """
    text = truth.strip()
    box = BOX.match(text)
    if box and closing_brace(text, box.end()) == len(text) - 1 and text[box.end() : -1].strip():
        return unwrap_truth(text[box.end() : -1].strip())
    if found := WRAPPED.fullmatch(text):
        return unwrap_truth(found[found.lastindex].strip())
    return truth


def weighted(accuracy: float, form: float) -> dict[str, float]:
    """The two and their total, with verl's geo3k weights."""
    return {"accuracy": float(accuracy), "format": float(form), "reward": 0.9 * accuracy + 0.1 * form}


class Later(Exception):
    """A reward has put a question to a slow helper; call it again once the questions of all answers were asked."""


# Slow helpers of tasks, such as math-verify, added by their own files. Each has
# batch(collect, tell): a context with a time budget. In it a question that has no answer yet raises `Later` if
#     `collect`, else is asked at once; `tell(seconds)` says that work with a time limit of its own begins.
# ask(): answers all that was collected.      close(): ends its processes.
HELPERS: list[Any] = []


def close() -> None:
    """End the processes of slow helpers, if any run. The next answer that needs one starts it; exit calls this too."""
    for helper in HELPERS:
        helper.close()


# --- grading ------------------------------------------------------------------------------------------------------


def score(response: str, example: Any, *, finish_reason: str = "stop") -> dict[str, float]:
    """Named rewards plus the total under "reward", by the example's task. Raises UserError for an unknown task, and
    what the reward raises, with the row.

    `example` has data_source, ground_truth, extra (dict) and uid; `finish_reason` is the engine's, `stop` or `length`.
    """
    from rewards.calls import grade_one

    return grade_one(find_task(example).reward, response, example, finish_reason)


def response_to(example: Any, text: str, finish_reason: str = "stop") -> SimpleNamespace:
    """As much of a Rollout as a reward needs."""
    prompt = SimpleNamespace(example=example)
    return SimpleNamespace(text=text, finish_reason=finish_reason, prompt=prompt, ended_by="response", is_episode=False)


class Rewards:
    """What grades the rows of a run: the tasks' own rewards, the user's functions, a judge. Loading it says what is
    wrong with --reward and --judge. `out` keeps what a judge said. Of episodes that are `played` environments reward
    the turns, and what is here the last response."""

    def __init__(
        self,
        cfg: RewardConfig | None = None,
        out: Path | None = None,
        rank: int = 0,
        world: int = 1,
        played: bool = False,
    ):
        from rewards.custom import load_functions
        from rewards.grading import Grading, Pools, load_judge

        self.cfg = cfg or RewardConfig()
        self.played = played
        self.custom, self.functions = load_functions(self.cfg.reward)
        self.judge = load_judge(self.cfg, out, rank, world)
        self.pools = Pools(self.cfg, self.functions, self.judge)
        self.grading = partial(Grading, self)
        self.first: dict[str, Any] = {}  # a row of each task
        self.told_kinds: set[tuple[str, str]] = set()  # of failures, told in full
        self.told_step: int | None = -1  # the last one with a line on failures
        self.rank = f"rank {rank}: " if world > 1 else ""
        self.worked = False  # has any response of any process been graded yet?
        self.under_way: dict[tuple, Any] = {}  # Grading, by batch and step
        self.failed: dict[int, Any] = {}  # Failure, by place in what was collected last

    def own(self, example: Any) -> str | None:
        """What grades a row, but for a judge: FILE.py:FUNCTION, or the name of its task."""
        task = task_name(example.data_source)
        return self.custom.get(task) or self.custom.get("") or (task if task in TASKS else None)

    def graders(self, example: Any) -> list[str]:
        """Of a row: its own, and the judge."""
        judged = self.judge is not None and self.judge.judges(task_name(example.data_source))
        return [key for key in (self.own(example), "judge" if judged else None) if key]

    def graded_elsewhere(self, example: Any) -> bool:
        """Is a row graded by something else than its task's own reward?"""
        own = self.own(example)
        return own in self.functions or (own is None and (self.played or len(self.graders(example)) > 0))

    def check(self, examples: Sequence[Any]) -> dict[str, int]:
        """Check the rows that their tasks' own rewards grade (`check_tasks`). Return the number of rows per task."""
        rows = check_tasks(examples, self.graded_elsewhere)
        for example in examples:
            self.first.setdefault(task_name(example.data_source), example)
        return rows

    def unasked(self, examples: Iterable[Any]) -> Iterator[str]:
        """Yield a warning for each task whose own reward expects a form of answer that prompts do not ask for.

        Environments say in their own words what an answer looks like, so their prompts are not checked.
        """
        prompts: dict[Task, list[str]] = {}
        for example in examples:
            if not self.played and not self.graded_elsewhere(example):
                task, text = find_task(example), "\n".join(message["content"] for message in example.messages)
                if any(re.search(form, task.instruction) and not re.search(form, text) for form in FORMS):
                    prompts.setdefault(task, []).append(text)
        for task, texts in prompts.items():
            yield (
                f"prompts that do not ask for the form of answer that the reward of {task.name!r} expects: {len(texts)}"
                f". The first one ends in {texts[0][-80:]!r}; --instruction {task.name} adds: {task.instruction}"
            )

    def try_out(self, main: bool = True, stages: Iterable[tuple[int, Stage]] = ((0, Stage()),)) -> None:
        """Once all rows are checked: on `main`, grade two plausible responses to a row of each task in each stage (with
        its first step), so that a broken function or option stops the run before a model loads."""
        from rewards.calls import function_of

        known = ", ".join(sorted(self.first))
        for task in self.custom:
            told = f"--reward {task}={self.custom[task]}: no row has the task {task!r}; there are {known}"
            need(not task or task in self.first, told)
        with uncounted(), Note("this was the trial call before the run"):
            for step, stage in stages if main else ():
                for task, example in self.first.items():
                    text = f"<think>A trial.</think> \\boxed{{{example.ground_truth}}}"
                    trial = [response_to(example, text), response_to(example, text)]
                    own = self.own(example)
                    told = f"the curriculum has options for {task!r}, whose reward takes no `stage`; leave them out"
                    reads = own is not None and "stage" in function_of(own, self.functions).takes
                    need(reads or task not in stage.options, told)
                    if own in self.functions or task in stage.options:
                        self.grading(step, stage, "stop", judged=False).results(trial)

    def submit(self, rollout: Any) -> None:
        """Begin to grade a rollout whose prompt has a `context`, in any order and from any thread."""
        self._grading(rollout.prompt.context).add(rollout)

    def collect(self, rollouts: Sequence[Any]) -> list[dict[str, float] | None]:
        """Wait for the rewards of a batch, in the order of its rollouts; None for one that is dropped, as its reward
        failed. What was not submitted yet is now."""
        if not rollouts:
            self.failed = {}
            return []
        context = rollouts[0].prompt.context
        grading = self._grading(context)
        del self.under_way[context.batch, context.step]
        results = grading.results(rollouts)  # may raise: then nothing that stays refers to the error and its frames
        self.failed = grading.failed
        return results

    def _grading(self, context: RewardContext) -> Any:
        key = context.batch, context.step
        if key not in self.under_way:
            self.under_way[key] = self.begin(context.step, context.stage)
        return self.under_way[key]

    def check_worked(self, rollouts: Sequence[Any], gather: Callable[[Any], list[Any]]) -> None:
        """Raise UserError if all responses of the first batch failed, on all processes; called by all of them, after
        `collect`."""
        if not self.worked:
            lines = [failure.line for failure in self.failed.values()]
            lines += [r.failure_line for r in rollouts if r.ended_by == "error"]
            told = gather(lines if len(lines) == len(rollouts) else None)
            if None not in told:
                raise UserError(f"all of the first responses failed, as {sum(told, [])[0]}; correct that")
            self.worked = True

    def begin(self, step: int | None = 0, stage: Stage = Stage()) -> Any:  # noqa: B008  it is frozen
        """The Grading of one round of responses; outside of a run, step None."""
        return self.grading(step, stage, self.cfg.reward_errors)


# --- checks before a model loads ----------------------------------------------------------------------------------


@contextmanager
def uncounted() -> Iterator[None]:
    """Leaves grader_stats as they were: what is graded inside is no response of the policy's."""
    before = grader_stats.copy()
    yield
    grader_stats.clear()
    grader_stats.update(before)


FORMS = (r"\\boxed", "<think>", "JSON|coordinates")  # how instructions and prompts ask for a form of answer
REASONS = {  # of grader_stats
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
        with uncounted():
            grader_stats.clear()
            right = task.answerable(truth, lambda answer, row=example: score(f"\\boxed{{{answer}}}", row))
            reasons = "".join(f"; {reason}" for name, reason in REASONS.items() if grader_stats[name])
        told = f"row {example.uid!r}: nothing could equal the ground_truth {truth[:80]!r}, which itself as an answer"
        need(right, f"{told} does not earn full marks from {task.name!r}{reasons}; correct or remove the row")
    return dict(rows)


def give_rewards(
    rollouts: Sequence[Any], results: Sequence[dict[str, float] | None], algo: Any, max_new_tokens: int
) -> None:
    """Fills r.rewards of each rollout with named numbers and their total, "reward". `algo` is a grpo.Algorithm.

    One whose reward failed (None) has none, and ends in "error": nothing of it is trained on, and the others of its
    group are compared without it."""
    from grpo import overlong_penalty  # here, so that rewards alone need no torch

    for r, rewards in zip(rollouts, results, strict=True):
        r.finish_reason = "error" if rewards is None else r.finish_reason
        r.rewards = rewards or {}
        if algo.truncated == "penalise" and rewards:
            total = rewards["reward"]
            penalty = overlong_penalty(len(r.response), max_new_tokens, max(1, max_new_tokens // 5))  # DAPO's share
            r.rewards = rewards | {"unpenalised": total, "overlong": penalty, "reward": total + penalty}
