"""Settings: frozen dataclasses, one per section of flags.

@dataclass(frozen=True)
class OptimConfig:
    \"""Optimizer\"""                                     # the section's title in --help

    lr: float = flag_field(1e-6, "peak learning rate", above=0)

parser = FlagParser(__doc__)
add_flags(parser, OptimConfig)
args = vars(parser.parse_args(argv))                  # only the flags on the command line
config = build_config(OptimConfig, preset | args)     # flags override the preset, and both override the defaults
"""

import argparse
import json
import math
import operator
import os
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from errors import UserError, as_user_error, nearest, nearest_path, need, printable

REQUIRED = MISSING  # the default of a setting that must be given
BOUNDS = {"least": ("at least", operator.ge), "above": ("above", operator.gt), "most": ("at most", operator.le)}
METAVARS = {int: "N", float: "X"}
RENAMED = {  # former names of settings, and their present names; see CHANGELOG.md
    "epochs": "update_epochs", "sample_rounds": "max_gen_batches", "tis_mask": "ratio_mask", "track": "report_to",
    "grad_checkpointing": "gradient_checkpointing", "watch": "plot_runs"}  # fmt: skip
# Names that other tools give to the length of a run, written with _ -> what to use here
OTHER_NAMES = {
    "steps_for_epochs": "epoch epochs n_epochs num_epochs max_epochs total_epochs train_epochs training_epochs "
                        "num_train_epochs max_train_epochs total_train_epochs num_training_epochs "
                        "total_training_epochs",
    "steps": "step max_step max_steps n_steps num_steps total_steps train_steps training_steps max_train_steps "
             "num_train_steps total_train_steps num_training_steps total_training_steps max_training_steps",
    "update_epochs": "ppo_epochs num_iterations",
}  # fmt: skip
HERE_NAMES = {name: here for here, names in OTHER_NAMES.items() for name in names.split()}
ELSEWHERE = "; docs/glossary.md has the names of TRL, verl and EasyR1; the flags of --plan work only with it"
T = TypeVar("T")


def always(value: Any) -> bool:
    return True


def never(value: Any) -> bool:
    return False


def is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plain_pair(pair: Any) -> bool:
    """Return whether a KEY=VALUE has a number, true or false as its value, so that it names no code, file or server."""
    return bool(re.fullmatch(r"\w+=(true|false|[-+.0-9e]+)", str(pair)))


def flag_field(default: Any, help: str, choices: Sequence[str] = (), metavar: str = "", positional: bool = False,
               from_run: Callable[[Any], bool] = always, part_of: str = "", key: bool = False, **bounds: float) -> Any:
    """Return a dataclass field that is also a flag. Its type is int, float, str or bool, one of these with `| None`, or
    `tuple[str, ...]`. `bounds` are least (>=), above (>) and most (<=). `from_run` returns whether a value (of a tuple:
    each item) may be read from a run's folder, which may come from a stranger; see load_run_settings. `part_of` names
    the setting without which this one has no effect. With `key`, the setting has no flag of its own, because few users
    change it: it is passed as --algo-args KEY=VALUE."""
    metadata = {"help": help, "choices": choices, "metavar": metavar, "positional": positional, "bounds": bounds,
                "from_run": from_run, "part_of": part_of, "key": key}  # fmt: skip
    return field(default=default, kw_only=True, metadata=metadata)


def flag_name(name: str) -> str:
    """Return the flag of a setting: --max-turns for max_turns."""
    return "--" + name.replace("_", "-")


def find_other_name(name: str, args: Sequence[str] = (), per_step: int | str = "--prompts-per-step") -> str:
    """Return the remedy for a name of another tool, such as --num-train-epochs or trainer.total_epochs, or "" if it is
    unknown. For epochs of the data it has the number of steps if `args` has a parquet file as --data. `per_step` is
    the default of --prompts-per-step."""
    here = HERE_NAMES.get(name.lower().replace("-", "_").strip("_").rpartition(".")[2], "")
    if here != "steps_for_epochs":
        return here and f"; use {flag_name(here)}"
    given = dict(pairwise(" ".join(args).replace("=", " ").split()))
    epochs, per_step = given.get(name, "N"), given.get("--prompts-per-step", per_step)
    remedy = f"; for epochs of the data use --steps = {epochs} x rows / {per_step}"
    with suppress(OSError, ValueError, ArithmeticError):
        import pyarrow.parquet as pq  # imported here because reward workers import this file

        rows = pq.read_metadata(given.get("--data", "")).num_rows
        remedy += f"; {given['--data']} has {rows} rows"
        remedy += f": --steps {math.ceil(float(epochs) * (rows // int(per_step)))}"
    return remedy


def format_flag(name: str, value: Any) -> str:
    """Return a flag with its value or values as it is typed on a command line."""
    if isinstance(value, bool):
        return flag_name(name if value else f"no_{name}")
    return shlex.join([flag_name(name), *map(str, value if isinstance(value, list | tuple) else [value])])


def format_setting(f: Field, value: Any) -> str:
    """Return a setting as it is typed on a command line: `--lr 1e-6`, or `--algo-args gamma=1` if it is a key."""
    return f"--algo-args {f.name}={value}" if f.metadata["key"] else format_flag(f.name, value)


def parse_key(f: Field, hint: Any, text: str) -> Any:
    """Return the value of a key: "default" discards a resumed run's value and restores the default."""
    value_type, _, may_be_none = parse_type_hint(hint)
    if text == "default":
        return f.default
    if text == "none" and may_be_none and text not in (f.metadata["choices"] or ()):
        return None
    parse = {"true": True, "false": False}.get if value_type is bool else value_type  # check_value refuses None
    text = text.lower() if value_type is bool else text
    with as_user_error(ValueError, f"{format_setting(f, text)}: must be of type {value_type.__name__}"):
        return parse(text)


def parse_pairs(flag: str, pairs: Iterable[str]) -> dict[str, Any]:
    """Return the KEY=VALUE arguments of a flag as a dict. A value is parsed as JSON if it is valid JSON, else kept as
    text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        need(equals, f"{flag} {pair}: give KEY=VALUE")
        values[key] = text
        with suppress(ValueError):
            values[key] = json.loads(text)
    return values


def parse_type_hint(hint: Any) -> tuple[type, bool, bool]:
    """Return the value's type, whether the hint is a tuple and whether it allows None: (int, False, True) for
    `int | None`, (int, True, False) for `tuple[int, ...]`."""
    inner = get_args(hint)
    return inner[0] if inner else hint, get_origin(hint) is tuple, NoneType in inner


def help_with_default(f: Field) -> str:
    """Return the help of a setting with its default, unless the text mentions it, or it is empty or off (which
    the help of a key shows)."""
    text, default = f.metadata["help"], f.default
    unset = default in (REQUIRED, None, "", ()) or default is False
    if "default" in text or (unset and not f.metadata["key"]):
        return text
    values = default if isinstance(default, tuple) else ("off" if unset else "on" if default is True else default,)
    return f"{text} (default: {' '.join(f'{x:.6g}' if isinstance(x, float) else str(x) for x in values)})"


class HelpAction(argparse.Action):
    """The flag --help. With essential flags, `--help all` lists the others too."""

    def __call__(self, parser: "FlagParser", namespace: argparse.Namespace, values: str | None, *_: object) -> None:
        if parser.essential and values != "all":
            parser.shorten_help()
        parser.print_help()
        parser.exit()


class FlagParser(argparse.ArgumentParser):
    """A parser of flags that cannot be abbreviated. An error is one line and suggests similar flags. Each
    subcommand has a parser of this class too. If `essential` names settings, --help lists only these."""

    def __init__(self, description: str | None = None, essential: str = "", **kwargs: Any):
        super().__init__(description=description, allow_abbrev=False, add_help=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self._negative_number_matcher = re.compile(r"-\d*\.?\d+(e[+-]?\d+)?$", re.IGNORECASE)  # argparse's lacks -1e-5
        self.keys: dict[str, tuple] = {}  # of --algo-args: name -> (Field, type)
        self.essential = essential.split()
        self.per_step: int | str = "--prompts-per-step"  # the default of that flag
        scope = {"nargs": "?", "metavar": "all", "help": "show the most important flags, or all"}
        self.add_argument("-h", "--help", action=HelpAction, dest=argparse.SUPPRESS, default=argparse.SUPPRESS,
                          **(scope if essential else {"nargs": 0, "help": "show this help message and exit"}))

    def shorten_help(self) -> None:
        """Reduce the help to the first two paragraphs of the description and the essential flags."""
        hidden = 0
        for group in self._action_groups:
            group.description = None
            for action in group._group_actions:
                if action.dest not in self.essential and not isinstance(action, HelpAction):
                    action.help, hidden = argparse.SUPPRESS, hidden + 1
        self.description = "\n\n".join((self.description or "").split("\n\n")[:2])
        self.epilog = f"{hidden} more flags: {self.prog} --help all. Questions and answers: docs/README.md"

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        """Report unknown flags first, because they may cause the other errors; then parse --algo-args too."""
        flags = self._option_string_actions
        args = sys.argv[1:] if args is None else args
        for argument in args:
            flag = argument.split("=")[0]
            other = "--steps" in flags and (flag.startswith("--") or "=" in argument) and flag not in flags
            if other and (remedy := find_other_name(flag, args, self.per_step)):
                self.error(f"unknown flag {flag}{remedy}")
            dashed = flag.startswith("--") or (flag.startswith("-") and f"-{flag}" in flags)
            unknown = dashed and flag != "--" and " " not in flag and flag not in flags
            if unknown and self._subparsers is None:
                name = flag.lstrip("-").replace("-", "_")
                name = RENAMED.get(name, name)
                if any(action.dest == name and not action.option_strings for action in self._actions):
                    self.error(f"unknown flag {flag}; pass the value without it: {self.prog} {name.upper()} [flags]")
                use = f"--algo-args {name}=VALUE" if name in self.keys else flag_name(name) * (flag_name(name) in flags)
                remedy = f"; use {use}" if use else nearest(flag, flags) or ELSEWHERE * bool(self.keys)
                self.error(f"unknown flag {flag}{remedy}")
        parsed, unparsed = super().parse_known_args(args, namespace)
        for pair in vars(parsed).pop("algo_args", ()):
            key, equals, text = pair.partition("=")
            need(flag_name(key) not in flags, f"--algo-args {pair}: it is a flag; pass {flag_name(key)} {text}")
            need(key in self.keys, f"--algo-args {pair}: no such key{nearest(RENAMED.get(key, key), self.keys)}; "
                 f"known: {', '.join(self.keys)}")
            need(equals, f"--algo-args {pair}: give KEY=VALUE")
            setattr(parsed, key, parse_key(*self.keys[key], text))
        return parsed, unparsed

    def error(self, message: str) -> NoReturn:
        if match := re.search(r"invalid choice: '(.+)' \(choose from (.+)\)", message):
            message += nearest(match[1], re.findall(r"[\w+-]+", match[2]))
        self.exit(2, f"error: {message}; see {self.prog} --help{' all' * bool(self.essential)}\n")


def optional_type(value_type: type) -> Callable[[str], Any]:
    """Return argparse's type of a setting that may be None: "default" means None, in place of a resumed run's value."""

    def parse(text: str) -> Any:
        return None if text == "default" else value_type(text)

    parse.__name__ = value_type.__name__  # argparse prints it in errors
    return parse


def add_flags(parser: FlagParser, cls: type) -> None:
    """Add the settings of a dataclass, and those of each of its bases, as sections of flags. Classes with the same
    title share a section. Flags that are not passed are absent from the parsed arguments."""
    hints, sections = get_type_hints(cls), {}
    for base in cls.__mro__[:-1]:
        title = base.__doc__.splitlines()[0]
        section = sections.setdefault(title, parser.add_argument_group(title))  # --help leaves out an empty one
        for f in fields(base):
            if f.name not in base.__annotations__:
                continue
            choices, positional, help_text = f.metadata["choices"], f.metadata["positional"], help_with_default(f)
            if f.metadata["key"]:
                parser.keys[f.name] = f, hints[f.name]
                values = "|".join(choices or ("true", "false") * (hints[f.name] is bool)) or "VALUE"
                line = textwrap.fill(f"  {f.name}={values}: {help_text}", 78, subsequent_indent=" " * 6)
                section.description = f"{section.description or 'Keys of --algo-args:'}\n{line}"
                continue
            value_type, is_tuple, may_be_none = parse_type_hint(hints[f.name])
            metavar = f.metadata["metavar"] or METAVARS.get(value_type, f.name.rpartition("_")[2].upper())
            options = {"help": help_text.replace("%", "%%"), "default": argparse.SUPPRESS}
            if value_type is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["type"] = optional_type(value_type) if may_be_none and not choices else value_type
                options |= {"choices": choices} if choices else {"metavar": metavar}
            if is_tuple:  # a repeated flag extends the list
                options |= {"nargs": "+", "action": "extend"}
            if f.name == "prompts_per_step":
                parser.per_step = f.default
            section.add_argument(f.name if positional else flag_name(f.name), **options)
            if f.default is REQUIRED:  # only these are in the usage line: argparse's default would list every flag
                usage = metavar if positional else f"{flag_name(f.name)} {metavar}"
                parser.usage = f"{parser.usage or '%(prog)s [flags]'} {usage}"
        if section.description and "--algo-args" not in parser._option_string_actions:
            section.add_argument("--algo-args", help="rarely changed settings, as KEY=VALUE; the keys are listed above",
                                 nargs="+", action="extend", default=argparse.SUPPRESS, metavar="KEY=VALUE")


@dataclass(frozen=True)
class PixelConfig:
    """Image sizes"""

    min_pixels: int | None = flag_field(None, "enlarge images with fewer than N pixels (width x height) to N (default: "
                                        "the processor's)", least=1)
    max_pixels: int | None = flag_field(None, "shrink images with more than N pixels (width x height) to N (default: "
                                        "the processor's)", least=1)


def check_given(values: Mapping[str, object], *classes: type) -> None:
    """Raise a UserError that lists every required setting of these dataclasses that `values` lacks."""
    missing = [f for cls in classes for f in fields(cls) if f.default is REQUIRED and f.name not in values]
    need(not missing, "; ".join(f"{flag_name(f.name)} is required: {f.metadata['help']}" for f in missing))


def build_config(cls: type[T], values: Mapping[str, object]) -> T:
    """Build a dataclass of settings from values by name, and check them. `values` may also have settings of other
    dataclasses. Lists, which come from argparse and JSON, become tuples."""
    hints, settings = get_type_hints(cls), {}
    check_given(values, cls)
    for f in fields(cls):
        if f.name in values:
            value = values[f.name] if values[f.name] != ["default"] else ()  # in place of a resumed run's value
            settings[f.name] = tuple(value) if isinstance(value, list) else value
            check_value(f, hints[f.name], settings[f.name])
    return cls(**settings)


def may_come_from_folder(f: Field, value: Any) -> bool:
    """Return whether a setting's value may be read from a run's folder, which may come from a stranger."""
    items = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return all(map(f.metadata["from_run"], items))


def load_run_settings(
    settings: Iterable[Field], run: Mapping[str, Any], args: Mapping[str, Any], folder: object
) -> dict[str, Any]:
    """Return the values of `settings` in `run`, a run's run.json, as defaults of a command with the arguments `args`.
    Raise UserError if `run` has some that must not come from a folder (code, servers, names of secrets, missing
    files; docs/data.md lists them) and `args` lacks them."""
    values, withheld = {}, []
    for f in settings:
        if f.name in run and args.get(f.metadata["part_of"], "") is not None:
            values[f.name] = run[f.name]
            withheld += [] if f.name in args or may_come_from_folder(f, run[f.name]) else [f]
    flags = " ".join(format_setting(f, run[f.name]) for f in withheld)
    resets = " ".join(f"{flag_name(f.name)} default" for f in withheld if f.default is not REQUIRED)
    need(not withheld, f"{folder} was trained with {flags}. Code, servers, secrets and missing files that a run's "
         f"folder names are not used; add {flags}" + (f", or return to the default with {resets}" if resets else ""))
    return values


def load_config_file(path: str, settings: Iterable[Field]) -> dict[str, Any]:
    """Return the settings of a TOML file, or all settings of a run's run.json, by name. Tables of a TOML file only
    group its settings. Settings of a run.json that must not come from a folder (see load_run_settings) are left out and
    printed. Raise UserError for unknown names and for settings that occur twice."""
    known = {f.name: f for f in settings if f.name not in ("config", "resume")}
    is_run = is_run_file(path)
    need(Path(path).exists(), f"--config {path}: no such file{nearest_path(path)}")
    with as_user_error((OSError, ValueError, LookupError, TypeError, RecursionError),
                       f"--config {path}: expected a TOML file, with texts in quotes, or a run.json"):
        text = Path(path).read_text(encoding="utf-8-sig")
        loaded = dict(json.loads(text)["args"] if is_run else tomllib.loads(text))
    values: dict[str, Any] = {}
    for table in (loaded, *(value for value in loaded.values() if isinstance(value, dict))):
        for key, value in table.items():
            name = RENAMED.get(key.replace("-", "_"), key.replace("-", "_"))
            if not isinstance(value, dict):
                other = find_other_name(key)  # but in a run.json, epochs is the former name of update_epochs
                hint = other or nearest(name, known).replace("_", "-")
                need(is_run or (name in known and not other),
                     printable(f"--config {path}: unknown setting {key}{hint}"))
                need(name not in values, f"--config {path}: {name} is set twice")
                values[name] = value
    if not is_run:
        return values
    values = {name: value for name, value in values.items() if name in known and name != "out"}
    withheld = {name for name, value in values.items() if not may_come_from_folder(known[name], value)}
    withheld |= {name for name in values if known[name].metadata["part_of"] in withheld and values[name]}
    if withheld and os.environ.get("RANK", "0") == "0":
        flags = " ".join(format_setting(known[name], values[name]) for name in sorted(withheld))
        print(printable(f"--config {path}: left out {flags}", 10_000))
    return {name: value for name, value in values.items() if name not in withheld}


def is_run_file(path: str) -> bool:
    """Return whether --config names a run.json, which has every setting of a run."""
    return path.lower().endswith(".json")


@contextmanager
def naming_origins(values: Mapping[str, Any], origin: str) -> Iterator[None]:
    """Add `origin` to each "--flag value" in the message of a UserError if the flag is not on the command line."""
    try:
        yield
    except UserError as error:
        message, flags_and_keys = str(error), {argument.partition("=")[0] for argument in sys.argv}
        for name, value in values.items():
            if flag_name(name) not in flags_and_keys and name not in flags_and_keys:
                pattern = rf"({flag_name(name)} |--[\w-]+ {name}=){re.escape(str(value))}(?!\w|\.\d)"
                message = re.sub(pattern, rf"\g<0> ({origin})", message, count=1)
        raise UserError(message) from error


def check_value(f: Field, hint: type, value: object) -> None:
    """Raise UserError unless a value is of the setting's type, one of its choices and within its bounds."""
    expected, is_tuple, may_be_none = parse_type_hint(hint)
    if may_be_none and value is None:
        return
    choices, bounds = f.metadata["choices"], f.metadata["bounds"]
    need(isinstance(value, tuple) or not is_tuple, f"{format_setting(f, value)}: must be a list")
    for item in value if is_tuple else (value,):
        must = f"{format_setting(f, item)}: must be"
        right_type = isinstance(item, int | float if expected is float else expected)
        need(right_type and isinstance(item, bool) == (expected is bool), f"{must} of type {expected.__name__}")
        need(not choices or item in choices, f"{must} one of {', '.join(choices)}")
        limits = " and ".join(f"{BOUNDS[name][0]} {bound}" for name, bound in bounds.items())
        need(all(BOUNDS[name][1](item, bound) for name, bound in bounds.items()), f"{must} {limits}")
        need(not isinstance(item, float) or math.isfinite(item), f"{must} finite")
