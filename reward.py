r"""What a reward is: (response text, example) -> named numbers, e.g. {"accuracy": 1.0, "format": 1.0, "reward": 1.0}.

A task is one file in tasks/; its reward is for the rows whose `data_source` names it. To add a task, add a file with

    @register("chess")
    def chess(response: str, example: Example, finish_reason: str) -> dict[str, float]:
        return {"accuracy": ..., "reward": ...}

`--reward [TASK=]FILE.py:FUNCTION` replaces it (rewards/functions.py). A reward takes (response, example), or
(responses, examples) and then returns a list, and by name what it wants of finish_reason(s), step and stage; it may be
async. It returns a number or named numbers with their total under "reward"; "images": one number per image.
rewards/grade.py calls rewards, in processes of their own.
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

MAX_ANSWER_CHARS = 1000  # a longer box is refused; it is no final answer
MAX_REWARD = 1e6  # a larger reward overflows what is computed from it in fp32
NUMBER_TYPES = Real | Decimal
MAX_PARTS = 100  # named numbers of a reward: each is a metric, and a column of the pages
# names of our own metrics reward/<name>
RESERVED_NAMES = ("mean", "zero_std_frac", "unpenalised", "overlong", "errors", "timeouts")

# --- settings ------------------------------------------------------------------------------------------------------


def names_no_file(option: Any) -> bool:
    """Return whether an option of --judge names neither a file nor an environment variable, whose content is sent."""
    return str(option).partition("=")[0] not in ("template", "key_env")


@dataclass(frozen=True)
class RewardConfig:
    """Reward"""

    reward: tuple[str, ...] = flag_field(
        (),
        "reward functions that replace the tasks' own, for all rows or one task's; docs/rewards.md",
        metavar="[TASK=]FILE.py:FUNCTION",
        from_run=never,
    )
    reward_errors: str = flag_field(
        "drop",
        "responses whose reward fails: drop them, give reward zero, or stop the run",
        choices=("drop", "zero", "stop"),
    )
    reward_timeout: float = flag_field(30.0, "seconds per reward call; not enforced with --reward-workers 0", above=0)
    reward_workers: int = flag_field(2, "reward worker processes per rank; 0: run rewards in the training process",
                                  least=0)
    curriculum: str | None = flag_field(
        None,
        "TOML or JSON file of curriculum stages, or none (default: the task's own, if any); docs/curriculum.md",
        metavar="FILE",
        from_run=lambda file: file == "none" or Path(str(file)).is_file(),
    )
    judge_url: str | None = flag_field(None, "base URL of an OpenAI-compatible server whose model scores responses",
                                    metavar="URL", from_run=never)
    judge: tuple[str, ...] = flag_field(
        (),
        "judge options, such as model, template, weight, tasks, calls; docs/judge.md",
        metavar="KEY=VALUE",
        from_run=names_no_file,
        part_of="judge_url",
    )


@dataclass(frozen=True)
class CurriculumStage:
    """A stage of a curriculum. `options` are by task; a reward gets its own task's."""

    name: str = ""
    number: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardContext:
    """When a response is graded: what a reward may ask for besides the response."""

    batch: int = 0  # which batch of prompts: its position in the data; batches may be graded at the same time
    step: int | None = None  # of the run
    stage: CurriculumStage = CurriculumStage()  # of the curriculum


# --- tasks --------------------------------------------------------------------------------------------------------

# Whether a truth, written as an answer, earns full marks; `earned(answer)` are the named rewards of `\boxed{answer}`.
AnswerableCheck = Callable[[str, Callable[[str], dict[str, float]]], bool]


def full_marks(truth: str, earned: Callable[[str], dict[str, float]]) -> bool:
    """Return whether the truth, given as the answer, has accuracy 1; a reward without "accuracy" only must not fail."""
    return earned(truth).get("accuracy", 1.0) == 1.0


class Task(NamedTuple):
    name: str
    reward: Callable
    answerable: AnswerableCheck
    instruction: str  # text for prompts, which says what an answer looks like; what `--instruction NAME` stands for


TASKS: dict[str, Task] = {}  # by name, and by other names


def register(
    *names: str, answerable: AnswerableCheck = full_marks, instruction: str = ""
) -> Callable[[Callable], Callable]:
    """Decorator: make a function the reward of the task `names[0]`; data sources of the other names count as it.

    The default `instruction` is INSTRUCTION of the function's file.
    """

    def add(reward: Callable) -> Callable:
        for name in names:
            if name in TASKS:
                raise ValueError(f"task {name!r} has the reward {TASKS[name].reward.__name__}; choose another name")
            text = instruction or reward.__globals__.get("INSTRUCTION", "")
            TASKS[name] = Task(names[0], reward, answerable, text)
        return reward

    return add


@cache
def load_tasks() -> None:
    """Import every file of tasks/ and envs/, which registers what is in it."""
    for folder in ("tasks", "envs"):
        for file in sorted(Path(__file__).with_name(folder).glob("[!_]*.py")):
            try:
                importlib.import_module(f"{folder}.{file.stem}")
            except ModuleNotFoundError as error:  # builds on a task that a fork has deleted
                if not (error.name or "").startswith("tasks."):
                    raise


def find_tasks() -> dict[str, ModuleType]:
    """The files of tasks/ and envs/ by the names that they register. Such a file may have

    toy(n, split, seed) -> rows, dicts by column;   rows(cfg: TaskConfig) -> Raws, of files;
    DEFAULTS, settings of its own;   INSTRUCTION, what `--instruction` with one of its names stands for (`register`).
    """
    load_tasks()
    return {name: sys.modules[TASKS[name].reward.__module__] for name in sorted(TASKS)}


def task_name(data_source: str) -> str:
    """`hiyouga/geometry3k`, `Geometry3K` and `geo3k` -> `geo3k`: lower case, no owner, other names resolved."""
    load_tasks()
    name = data_source.strip().lower().rsplit("/", 1)[-1]
    return TASKS[name].name if name in TASKS else name


def find_task(example: Any) -> Task:
    """The task of a row. Raises UserError if it is unknown or the row's truth is no text."""
    name = task_name(example.data_source)
    need(
        isinstance(example.ground_truth, str),
        f"row {example.uid!r}: ground_truth is {short_repr(example.ground_truth)}; it must be a string, or JSON text for a "
        "structured truth",
    )
    if name not in TASKS:
        known = ", ".join(sorted({task.name for task in TASKS.values()}))
        raise UserError(
            f"row {example.uid!r}: no reward for data_source {example.data_source!r} (task {name!r}); known tasks: "
            f"{known}. Name the task with --data-source, or give your own with --reward FILE.py:FUNCTION"
        )
    return TASKS[name]


# --- what tasks share: the box ------------------------------------------------------------------------------------

BOX_PATTERN = re.compile(r"\\(?:boxed|fbox)\s*\{")
SPECIAL_TOKEN_PATTERN = re.compile(r"<\|[^<>|]{1,64}\|>")  # as `<|im_start|>`: kept visible by the engines, no text


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
    boxes = list(BOX_PATTERN.finditer(response))
    end = closing_brace(response, boxes[-1].end()) if boxes else None
    if end is None:
        count("no_box")
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
    box = BOX_PATTERN.match(text)
    if box and closing_brace(text, box.end()) == len(text) - 1 and text[box.end() : -1].strip():
        return unwrap_truth(text[box.end() : -1].strip())
    if found := WRAPPED.fullmatch(text):
        return unwrap_truth(found[found.lastindex].strip())
    return truth


def accuracy_and_format_reward(accuracy: float, form: float) -> dict[str, float]:
    """The two and their total, with verl's geo3k weights."""
    return {"accuracy": float(accuracy), "format": float(form), "reward": 0.9 * accuracy + 0.1 * form}


# --- counts of a call ---------------------------------------------------------------------------------------------


@dataclass
class Counting:
    """What whoever calls rewards knows and learns about the calls inside `with Counting() as counted`, apart from their
    results. No other one further out sees what is counted.

    `counts`: graded, answers compared; cas, those that math-verify compared; of wrong answers: no_box, no complete box;
    bad_truth, the truth holds no answer; unreadable, no such expression; refused, too long, deep or large; cas_timeout,
    math-verify was late; cas_crash, it failed; cas_budget, it was late too often.
    """

    late: set[Any] = field(default_factory=set)  # questions for math-verify that were late: known to be wrong
    limit: Callable[[float, Any], None] | None = None  # of a process that is ended when it is late: see `time_limit`
    counts: Counter[str] = field(default_factory=Counter)
    token: Token | None = None

    def __enter__(self) -> "Counting":
        self.token = COUNTING.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        COUNTING.reset(self.token)

    @contextmanager
    def time_limit(self, seconds: float, question: Any = None) -> Iterator[None]:
        """Give what is done inside its own time limit. If it is late with a `question`, the process is replaced, and
        the call is repeated with the question in `late`; without one, the call has failed."""
        self.limit(seconds, question)
        try:
            yield
        finally:
            self.limit(0.0, None)


COUNTING: ContextVar[Counting] = ContextVar("COUNTING")


def count(name: str) -> None:
    """Add 1 to a count of the call that runs; without a `Counting` around it, do nothing."""
    if counting_now := COUNTING.get(None):
        counting_now.counts[name] += 1


# --- what a reward returns ----------------------------------------------------------------------------------------


def validate_reward(result: Any, uid: str, response: str, n_images: int = 0) -> dict[str, float]:
    """A number, or a dict of numbers with the total under "reward", as a dict of floats of at most MAX_REWARD. One
    number per image under "images" becomes image_1, ...; where there is no total, their mean is it."""
    rewards = dict(result) if isinstance(result, dict) else {"reward": result}
    need(len(rewards) <= MAX_PARTS,
         f"row {uid!r}: the reward returned {len(rewards)} parts; return at most {MAX_PARTS}")
    if "images" in rewards:
        parts = list(rewards.pop("images"))
        need(len(parts) == n_images,
             f"row {uid!r}: the reward returned {len(parts)} numbers under 'images' for {n_images} images; return one "
             "of each")
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
    """Any kind of real number of at most MAX_REWARD as a float, also numpy's and torch's scalars; else None."""
    number = value.item() if getattr(value, "shape", None) == () else value
    known = isinstance(number, NUMBER_TYPES) and not (isinstance(number, Decimal) and number.is_nan())
    return float(number) if known and abs(number) <= MAX_REWARD else None


def short_repr(value: Any) -> str:
    """A `repr` that fits on a line; that of a very long integer is an error."""
    huge = isinstance(value, int) and value.bit_length() > 256
    return f"an integer of {value.bit_length()} bits" if huge else f"{reprlib.repr(value)} ({type(value).__name__})"


class RemoteRewardError(Exception):
    """A reward that failed in another process, with its traceback there."""


@dataclass(frozen=True)
class RewardFailure:
    """A reward that failed, in place of its numbers."""

    kind: str  # "errors" or "timeouts", as in metrics
    what: str  # the type of exception, or what happened
    line: str
    trace: str = ""
    is_user_error: bool = False  # a UserError, told in a line
    error: BaseException | None = None  # in this process alone

    @classmethod
    def from_exception(cls, error: BaseException, uid: str) -> "RewardFailure":
        users = isinstance(error, UserError)
        line = f"row {uid!r}: the reward raised {describe_error(error)}"
        if users:
            line = printable(str(error).strip().partition("\n")[0])
        trace = "" if users or getattr(error, "in_a_line", False) else users_traceback(error)
        return cls("errors", type(error).__name__, line, trace, users, error)

    def exception(self) -> BaseException:
        return self.error or (
            UserError(self.line) if self.is_user_error else RemoteRewardError(f"{self.line}\n{self.trace}")
        )


RewardOutcome = dict[str, float] | RewardFailure
