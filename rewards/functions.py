"""Reward functions and how they are called; those of the user's are --reward [TASK=]FILE.py:FUNCTION."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import reward
from errors import ErrorContext, UserError, nearest_path, need
from reward import task_name


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and how it is called, by its signature."""

    call: Callable
    batch: bool  # once, with all responses of a batch of prompts
    asynchronous: bool
    optional_args: tuple[str, ...]  # by name

    @classmethod
    def from_callable(cls, function: Callable, name: str) -> "RewardFunction":
        """Read the signature of a function; `name` is for messages. Raise UserError if it cannot be called so."""
        try:
            signature = inspect.signature(function)
            names = list(signature.parameters)
            batch = names[:1] == ["responses"]
            known = ("finish_reasons" if batch else "finish_reason", "step", "stage")
            all_names = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
            takes = tuple(name for name in known if all_names or name in names)
            signature.bind(None, None, **dict.fromkeys(takes))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{name} must take (response, example) or (responses, examples), and what else it wants by name, "
                f"finish_reason (finish_reasons), step, stage: {error}"
            ) from error
        by_class = getattr(type(function), "__call__", None)  # noqa: B004  of an object that is called
        return cls(function, batch, any(map(inspect.iscoroutinefunction, (function, by_class))), takes)


def get_function(key: str, functions: Mapping[str, RewardFunction]) -> RewardFunction:
    """Return the function of a key, which is FILE.py:FUNCTION or the name of a task."""
    return functions[key] if key in functions else task_function(reward.TASKS[key].reward)


@cache
def task_function(function: Callable) -> RewardFunction:
    return RewardFunction.from_callable(function, f"a task's reward, {function.__name__},")


def load_reward_functions(specs: Sequence[str]) -> tuple[dict[str, str], dict[str, RewardFunction]]:
    """Load what --reward names. Return task -> FILE.py:FUNCTION, where "" is all tasks that are not named, and the
    functions by FILE.py:FUNCTION."""
    by_task: dict[str, str] = {}
    functions: dict[str, RewardFunction] = {}
    for spec in specs:
        task, rest = split_spec(spec)
        task = task_name(task)
        rows = f"of the task {task!r}" if task else "of all tasks"
        need(task not in by_task, f"--reward {spec!r}: there is another one {rows}, {by_task.get(task)}; drop one")
        by_task[task] = split_spec(absolute_spec(spec))[1]  # processes that grade may start when the folder has changed
        functions[by_task[task]] = load_reward_function(rest)
    return by_task, functions


def split_spec(spec: str) -> tuple[str, str]:
    """Return the task ("" if none is named) and FILE.py:FUNCTION."""
    task, equals, rest = spec.partition("=")
    return (task, rest) if equals and not Path(spec.rpartition(":")[0]).exists() else ("", spec)


def absolute_spec(spec: str) -> str:
    """Return --reward with an absolute path, if its file exists."""
    task, rest = split_spec(spec)
    path, _, name = rest.rpartition(":")
    return f"{task}{'=' if task else ''}{Path(path).resolve()}:{name}" if Path(path).is_file() else spec


def absolute_judge_option(pair: str) -> str:
    """Return an option of --judge with an absolute path, if it names a file that exists."""
    key, _, value = pair.partition("=")
    return f"{key}={Path(value).resolve()}" if key == "template" and Path(value).is_file() else pair


def absolute_files(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return --reward, --judge and --env with absolute paths of the files that are there."""
    return {
        "reward": tuple(map(absolute_spec, settings["reward"])),
        "judge": tuple(map(absolute_judge_option, settings["judge"])),
        "env": settings["env"] and absolute_spec(settings["env"]),
    }


def import_file(path: str, flag: str) -> ModuleType:
    """Import a file of the user's; `flag` is for messages."""
    need(Path(path).is_file(), f"{flag}: there is no file {path!r} (looked from {os.getcwd()}){nearest_path(path)}")
    module_spec = importlib.util.spec_from_file_location(f"custom_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look a module up by its name
    if (folder := str(Path(path).resolve().parent)) not in sys.path:
        sys.path.append(folder)  # last, and kept: a function may import when it is called
    with ErrorContext(f"raised on importing {flag}; our own and installed modules come before its neighbours"):
        module_spec.loader.exec_module(module)
    return module


def load_reward_function(spec: str) -> RewardFunction:
    """Load FILE.py:FUNCTION. Raise UserError if the file or the function is missing or cannot be called as a reward; an
    error inside the file is the user's and passes through.

    The file may import its neighbours, except ones named like our own modules or installed ones, which come first.
    """
    path, _, name = spec.rpartition(":")
    need(path.endswith(".py") and name, f"--reward {spec!r}: expected FILE.py:FUNCTION, e.g. my_reward.py:score")
    module = import_file(path, f"--reward {spec!r}")
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        state = "is not a function" if hasattr(module, name) else "does not exist"
        raise UserError(f"--reward {spec!r}: {name} {state} in {path}; it has: {', '.join(functions) or 'none'}")
    return RewardFunction.from_callable(function, f"--reward {spec!r}: {name}")
