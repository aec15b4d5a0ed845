r"""Rewards: functions (response text, example) -> named numbers, e.g. {"accuracy": 1.0, "format": 1.0, "reward": 1.0}.

A task is a file in tasks/. Its reward grades the rows whose `data_source` is its name. To add a task, add a file with

    @register("chess")
    def chess(response: str, example: Example, finish_reason: str) -> dict[str, float]:
        return {"accuracy": ..., "reward": ...}

`--reward [TASK=]FILE.py:FUNCTION` replaces it (rewards/functions.py). A reward takes (response, example), or, to grade
a whole batch and return a list, (responses, examples). It may also take finish_reason (finish_reasons for a batch),
step and stage as arguments, and it may be async. It returns a number, or named numbers with their total under "reward";
"images" may hold one number per image. rewards/grade.py calls rewards, by default in worker processes.
"""

import importlib
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from numbers import Real
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple

from errors import UserError, describe_error, need, printable, users_traceback
from settings import flag_field, never

MAX_ANSWER_CHARS = 1000  # a longer box is rejected, because it is not a final answer
MAX_REWARD = 1e6  # larger rewards overflow in the fp32 computations that use them
NUMBER_TYPES = Real | Decimal
MAX_PARTS = 100  # max named numbers of a reward: each becomes a metric and a column of the reports
# built-in metrics are called reward/<name>, so parts of a reward cannot have these names
RESERVED_NAMES = ("mean", "zero_std_frac", "unpenalised", "overlong", "errors", "timeouts")

# --- settings ------------------------------------------------------------------------------------------------------


def names_no_file(option: Any) -> bool:
    """Return whether a --judge option names neither a file nor an environment variable whose content would be sent."""
    return str(option).partition("=")[0] not in ("template", "key_env")


@dataclass(frozen=True)
class RewardConfig:
    """Reward"""

    reward: tuple[str, ...] = flag_field((), "reward functions that replace those of the tasks, for all rows or for "
                                         "one task; docs/rewards.md", metavar="[TASK=]FILE.py:FUNCTION", from_run=never)
    reward_errors: str = flag_field("drop", "responses whose reward fails: drop them, give reward zero, or stop the "
                                    "run", choices=("drop", "zero", "stop"))
    reward_timeout: float = flag_field(30.0, "seconds per reward call; not enforced with --reward-workers 0", above=0)
    reward_workers: int = flag_field(2, "reward worker processes per rank; 0: run rewards in the training process",
                                     least=0)
    curriculum: str | None = flag_field(None, "TOML or JSON file of curriculum stages; none: no curriculum (default: "
                                        "the task's own, if any); docs/curriculum.md", metavar="FILE",
                                        from_run=lambda file: file == "none" or Path(str(file)).is_file())
    judge_url: str | None = flag_field(None, "base URL of an OpenAI-compatible server whose model scores responses",
                                       metavar="URL", from_run=never)
    judge: tuple[str, ...] = flag_field((), "judge options: model, template, weight, tasks, calls, ...; docs/judge.md",
                                        metavar="KEY=VALUE", from_run=names_no_file, part_of="judge_url")


@dataclass(frozen=True)
class CurriculumStage:
    """A stage of a curriculum. `options` are keyed by task; each reward gets the ones of its task."""

    name: str = ""
    number: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardContext:
    """The point of the run at which a response is graded. Rewards can take `step` and `stage` as arguments."""

    batch: int = 0  # position of the batch of prompts in the data; several batches may be graded at the same time
    step: int | None = None  # step of the run
    stage: CurriculumStage = CurriculumStage()


# --- tasks --------------------------------------------------------------------------------------------------------

# (truth, grade) -> whether the truth itself, given as the answer, counts as fully correct. `grade(answer)` returns the
# named rewards of the response `\boxed{answer}`.
AnswerableCheck = Callable[[str, Callable[[str], dict[str, float]]], bool]


def full_marks(truth: str, grade: Callable[[str], dict[str, float]]) -> bool:
    """Return whether the truth, given as the answer, has accuracy 1. A reward without "accuracy" only has to run."""
    return grade(truth).get("accuracy", 1.0) == 1.0


class Task(NamedTuple):
    name: str
    reward: Callable
    answerable: AnswerableCheck
    instruction: str  # text for prompts that describes the form of the answer; `--instruction NAME` appends it


TASKS: dict[str, Task] = {}  # by the task's name and by its aliases


def register(*names: str, answerable: AnswerableCheck = full_marks,
             instruction: str = "") -> Callable[[Callable], Callable]:
    """Decorate a function to make it the reward of the task `names[0]`. The other names are aliases of the task.

    The default `instruction` is the INSTRUCTION of the function's file.
    """

    def add(reward: Callable) -> Callable:
        for name in names:
            if name in TASKS:
                raise ValueError(f"task {name!r} has the reward {TASKS[name].reward.__name__} already; rename yours")
            text = instruction or reward.__globals__.get("INSTRUCTION", "")
            TASKS[name] = Task(names[0], reward, answerable, text)
        return reward

    return add


@cache
def load_tasks() -> None:
    """Import every file of tasks/ and envs/, which registers the rewards in it."""
    for folder in ("tasks", "envs"):
        for file in sorted(Path(__file__).with_name(folder).glob("[!_]*.py")):
            try:
                importlib.import_module(f"{folder}.{file.stem}")
            except ModuleNotFoundError as error:  # the file imports a task that a fork has deleted
                if not (error.name or "").startswith("tasks."):
                    raise


def find_tasks() -> dict[str, ModuleType]:
    """Return the modules of tasks/ and envs/ by the task names that they register. Such a module may define

    toy(n, split, seed) -> generated rows, dicts keyed by column;   rows(cfg: ToyConfig) -> RawRows read from files;
    DEFAULTS, its own values of settings;   INSTRUCTION, the text that `--instruction NAME` appends (see `register`).
    """
    load_tasks()
    return {name: sys.modules[TASKS[name].reward.__module__] for name in sorted(TASKS)}


def task_name(data_source: str) -> str:
    """Return the task of a data source, in lower case, without owner and with aliases resolved: `hiyouga/geometry3k`,
    `Geometry3K` and `geo3k` -> `geo3k`."""
    load_tasks()
    name = data_source.strip().lower().rsplit("/", 1)[-1]
    return TASKS[name].name if name in TASKS else name


def find_task(example: Any) -> Task:
    """Return the task of a row. Raise UserError if the task is unknown or the row's truth is not a string."""
    name = task_name(example.data_source)
    need(isinstance(example.ground_truth, str),
         f"row {example.uid!r}: ground_truth is {short_repr(example.ground_truth)}; it must be a string, or JSON text "
         "for a structured truth")
    if name not in TASKS:
        known_tasks = ", ".join(sorted({task.name for task in TASKS.values()}))
        raise UserError(
            f"no reward for data_source {example.data_source!r} (task {name!r}); known tasks: {known_tasks}. Name the "
            "task with --data-source, or pass your own reward with --reward FILE.py:FUNCTION"
        )
    return TASKS[name]


# --- shared by tasks: the box -------------------------------------------------------------------------------------

BOX_PATTERN = re.compile(r"\\(?:boxed|fbox)\s*\{")
SPECIAL_TOKEN_PATTERN = re.compile(r"<\|[^<>|]{1,64}\|>")  # like `<|im_start|>`; engines keep these in the text


def closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the one just before `start`, or None if the text ends first."""
    depth = 1
    for brace in re.compile("[{}]").finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def extract_boxed(response: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` (or `\boxed {...}`, `\fbox{...}`), or None if it is missing.

    If the last box is not closed, the response was cut off while it changed its answer, so an earlier box does not
    count. Escaped braces count like others. Both are as in verl and mathruler. A missing box adds 1 to "no_box".
    """
    boxes = list(BOX_PATTERN.finditer(response))
    end = closing_brace(response, boxes[-1].end()) if boxes else None
    if end is None:
        count("no_box")
        return None
    return response[boxes[-1].end() : end]


WRAPPED = r"<think>.*?</think>(.*\S.*)|<answer>(?!\s*</)((?:(?!</?answer>).)+)</answer>|\$\$?([^$]*[^$\s][^$]*)\$\$?|"
# a text that ends with `#### 5`, `The answer is 5.`, `Answer: B` or `答案：B`, unless its beginning denies it, as `I do
# not think the answer is 5` does; bold; `Option C`
WRAPPED += r"(?![\[{])(?:.*\s)?####\s*([^\n#]*[^\s#])|\*\*([^*]+)\*\*|"
WRAPPED += r"(?![\[{]|.*\b(?:not|never|wrong|false|if|maybe|perhaps|might|unsure)\b|.*n't\b)(?:.*\s)?"
WRAPPED += r"(?:(?:the )?(?:final |correct |right )?(?:answer|option|choice)(?: (?:is|would be) ?:?|\s*[:：]\**|\s*\n)|"
WRAPPED += r"ans\.?\s*:|答案\s*[:：])\s*((?:[^.\n]|\.(?!\s|$))+)\.?|(?:option|choice) (\(?[A-Z]\)?)|"
WRAPPED += r"\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\]"
WRAPPED = re.compile(WRAPPED, re.DOTALL | re.IGNORECASE)


def unwrap_truth(truth: str) -> str:
    r"""Remove wrappers around a whole truth: thinking, `<answer>` tags, `\boxed{}`, `$...$`, `\(...\)`.

    A truth without a wrapper, or with an empty one, is returned unchanged.
    """
    text = truth.strip()
    box = BOX_PATTERN.match(text)
    if box and closing_brace(text, box.end()) == len(text) - 1 and text[box.end() : -1].strip():
        return unwrap_truth(text[box.end() : -1].strip())
    if match := WRAPPED.fullmatch(text):
        return unwrap_truth(match[match.lastindex].strip())
    return truth


def accuracy_and_format_reward(accuracy: float, form: float) -> dict[str, float]:
    """Return the two parts and their total, weighted as in verl's geo3k reward."""
    return {"accuracy": float(accuracy), "format": float(form), "reward": 0.9 * accuracy + 0.1 * form}


# --- counts of a call ---------------------------------------------------------------------------------------------


@dataclass
class Counting:
    """A context manager that collects counts of the reward calls made inside `with Counting() as counted`, and passes
    time limits to them. An outer Counting does not see the counts of an inner one.

    `counts`: graded, answers compared; cas, answers that math-verify compared. Reasons of wrong answers: no_box, no
    closed box; bad_truth, the truth has no answer; unreadable, not a valid expression; refused, too long, deep or
    large; cas_timeout, math-verify timed out; cas_crash, it failed; cas_budget, it timed out too often.
    """

    late: set[Any] = field(default_factory=set)  # questions on which math-verify timed out; they count as wrong
    limit: Callable[[float, Any], None] | None = None  # set in worker processes, which are killed when they time out
    counts: Counter[str] = field(default_factory=Counter)
    token: Token | None = None

    def __enter__(self) -> "Counting":
        self.token = COUNTING.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        COUNTING.reset(self.token)

    @contextmanager
    def time_limit(self, seconds: float, question: Any = None) -> Iterator[None]:
        """Give the code inside its own time limit. If it times out, the worker process is replaced. With a `question`
        the call is repeated with the question in `late`; without one the call fails."""
        self.limit(seconds, question)
        try:
            yield
        finally:
            self.limit(0.0, None)


COUNTING: ContextVar[Counting] = ContextVar("COUNTING")


def count(name: str) -> None:
    """Add 1 to a count of the current reward call; do nothing outside of a `Counting`."""
    if counting := COUNTING.get(None):
        counting.counts[name] += 1


# --- the result of a reward ---------------------------------------------------------------------------------------


def validate_reward(result: Any, uid: str, response: str, n_images: int = 0) -> dict[str, float]:
    """Convert a reward's result, a number or a dict of numbers with the total under "reward", to a dict of floats. One
    number per image under "images" becomes image_1, ...; if there is no total, it is their mean. Raise UserError for a
    missing total, more than MAX_PARTS parts, a reserved name, or a number that is not finite or beyond MAX_REWARD."""
    rewards = dict(result) if isinstance(result, dict) else {"reward": result}
    need(len(rewards) <= MAX_PARTS,
         f"row {uid!r}: the reward returned {len(rewards)} parts; return at most {MAX_PARTS}")
    if "images" in rewards:
        parts = list(rewards.pop("images"))
        need(len(parts) == n_images,
             f"row {uid!r}: the reward returned {len(parts)} numbers under 'images' for {n_images} images; return one "
             "per image")
        rewards |= {f"image_{i}": part for i, part in enumerate(parts, 1)}
        if "reward" not in rewards and parts and None not in (numbers := list(map(as_number, parts))):
            rewards["reward"] = fmean(numbers)
    if "reward" not in rewards:
        raise UserError(f"row {uid!r}: the reward returned {reprlib.repr(rewards)}; add a total as 'reward'")
    numbers = {name: as_number(value) for name, value in rewards.items()}
    for name, number in numbers.items():
        if name in RESERVED_NAMES:
            raise UserError(f"row {uid!r}: reward part {name!r} has the name of a metric, reward/{name}; rename it")
        if number is None:
            raise UserError(
                f"row {uid!r}: reward part {name!r} is {short_repr(rewards[name])} for the response {response[:80]!r}; "
                f"return a finite number from -{MAX_REWARD:g} to {MAX_REWARD:g} (for a tensor: float(x))"
            )
    return {printable(name): number for name, number in numbers.items()}


def as_number(value: Any) -> float | None:
    """Return a real number up to MAX_REWARD, also a scalar of numpy or torch, as a float, or None for other values."""
    number = value.item() if getattr(value, "shape", None) == () else value
    is_real = isinstance(number, NUMBER_TYPES) and not (isinstance(number, Decimal) and number.is_nan())
    return float(number) if is_real and abs(number) <= MAX_REWARD else None


def short_repr(value: Any) -> str:
    """Return a `repr` that fits on a line. Very long integers are described, because Python refuses to print them."""
    is_huge = isinstance(value, int) and value.bit_length() > 256
    return f"an integer of {value.bit_length()} bits" if is_huge else f"{reprlib.repr(value)} ({type(value).__name__})"


@dataclass(frozen=True)
class RewardFailure:
    """The result of a reward call that failed, in place of its named rewards."""

    kind: str  # "errors" or "timeouts", as in the metrics
    what: str  # type of the exception, or a short description
    line: str  # the error message
    trace: str = ""  # the traceback; none for a UserError
    error: BaseException | None = None  # the exception, if it was raised in this process

    @classmethod
    def from_exception(cls, error: BaseException, uid: str) -> "RewardFailure":
        is_user_error = isinstance(error, UserError)
        line = f"row {uid!r}: the reward raised {describe_error(error)}"
        if is_user_error:
            line = printable(str(error).strip().partition("\n")[0])
        trace = "" if is_user_error or getattr(error, "in_a_line", False) else users_traceback(error)
        return cls("errors", "invalid" if type(error) is UserError else type(error).__name__, line, trace, error)

    def exception(self) -> BaseException:
        """Return the exception, or if it was raised in a worker process, a UserError with the traceback from there."""
        return self.error or UserError(f"{self.line}\n{self.trace}".strip())


RewardOutcome = dict[str, float] | RewardFailure
