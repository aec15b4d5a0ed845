"""Reward functions: their signatures, and loading the user's own, --reward [TASK=]FILE.py:FUNCTION."""

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
from errors import UserError, nearest_path, need, users_traceback
from reward import task_name


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and the way to call it, which its signature determines."""

    call: Callable
    batch: bool  # called once with all responses of a batch of prompts
    asynchronous: bool
    optional_args: tuple[str, ...]  # passed by name

    @classmethod
    def from_callable(cls, function: Callable, name: str) -> "RewardFunction":
        """Return the RewardFunction of a callable. `name` is for messages. Raise UserError if its signature is not
        that of a reward."""
        try:
            signature = inspect.signature(function)
            names = list(signature.parameters)
            batch = names[:1] == ["responses"]
            available = ("finish_reasons" if batch else "finish_reason", "step", "stage")
            takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
            optional_args = tuple(name for name in available if takes_any or name in names)
            signature.bind(None, None, **dict.fromkeys(optional_args))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{name} must take (response, example) or (responses, examples), and by name any of "
                f"finish_reason (finish_reasons), step, stage: {error}"
            ) from error
        method = getattr(type(function), "__call__", None)  # noqa: B004  the method, if it is a callable object
        return cls(function, batch, any(map(inspect.iscoroutinefunction, (function, method))), optional_args)


def get_function(key: str, functions: Mapping[str, RewardFunction]) -> RewardFunction:
    """Return the reward function for a key: FILE.py:FUNCTION or the name of a task."""
    return functions[key] if key in functions else task_function(reward.TASKS[key].reward)


@cache
def task_function(function: Callable) -> RewardFunction:
    """Return the RewardFunction of a task's own reward."""
    return RewardFunction.from_callable(function, f"a task's reward, {function.__name__},")


def load_reward_functions(specs: Sequence[str]) -> tuple[dict[str, str], dict[str, RewardFunction]]:
    """Load the functions of --reward. Return task -> FILE.py:FUNCTION, where the task "" stands for all tasks without
    an entry, and FILE.py:FUNCTION -> function. Raise UserError if a task has several."""
    by_task: dict[str, str] = {}
    functions: dict[str, RewardFunction] = {}
    for spec in specs:
        task, function_spec = split_spec(spec)
        task = task_name(task)
        tasks = f"the task {task!r}" if task else "all tasks"
        need(task not in by_task, f"--reward {spec!r}: a second one for {tasks}, after {by_task.get(task)}; drop one")
        by_task[task] = split_spec(absolute_spec(spec))[1]  # workers may start after the working directory has changed
        functions[by_task[task]] = load_reward_function(function_spec)
    return by_task, functions


def split_spec(spec: str) -> tuple[str, str]:
    """Split [TASK=]FILE.py:FUNCTION into the task ("" if none is named) and FILE.py:FUNCTION."""
    task, equals, function_spec = spec.partition("=")
    return (task, function_spec) if equals and not Path(spec.rpartition(":")[0]).exists() else ("", spec)


def absolute_spec(spec: str) -> str:
    """Return [TASK=]FILE.py:FUNCTION with an absolute path if the file exists, else unchanged."""
    task, function_spec = split_spec(spec)
    path, _, name = function_spec.rpartition(":")
    return f"{task}{'=' if task else ''}{Path(path).resolve()}:{name}" if Path(path).is_file() else spec


def absolute_judge_option(pair: str) -> str:
    """Return KEY=VALUE of --judge with an absolute path if it names a template file that exists, else unchanged."""
    key, _, value = pair.partition("=")
    return f"{key}={Path(value).resolve()}" if key == "template" and Path(value).is_file() else pair


def absolute_files(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return --reward, --judge and --env with absolute paths for the files that exist."""
    return {
        "reward": tuple(map(absolute_spec, settings["reward"])),
        "judge": tuple(map(absolute_judge_option, settings["judge"])),
        "env": settings["env"] and absolute_spec(settings["env"]),
    }


def import_file(path: str, flag: str) -> ModuleType:
    """Import a user's Python file. `flag` is for messages. Raise UserError if there is no such file, or with the
    traceback of the user's code if the import fails."""
    need(Path(path).is_file(), f"{flag}: there is no file {path!r} (seen from {os.getcwd()}){nearest_path(path)}")
    module_spec = importlib.util.spec_from_file_location(f"custom_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look a module up by its name
    if (folder := str(Path(path).resolve().parent)) not in sys.path:
        sys.path.append(folder)  # it stays there, because a function may import when it is called
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # users' code may raise anything
        raise UserError(
            f"{flag}: importing the file failed (modules of this repository and installed ones take precedence over "
            f"files in its folder):\n{users_traceback(error).rstrip()}"
        ) from error
    return module


def load_reward_function(spec: str) -> RewardFunction:
    """Load FILE.py:FUNCTION. Raise UserError if the file or the function is missing, or if the function cannot be
    called as a reward, or if importing the file fails.

    The file may import others in its folder, unless they are named like modules of this repository or installed ones,
    which take precedence.
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
