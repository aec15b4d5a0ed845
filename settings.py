"""Settings: frozen dataclasses, one a group of flags.

@dataclass(frozen=True)
class OptimConfig:
    \"""Optimizer\"""                                     # the group's title in --help

    lr: float = setting(1e-6, "peak learning rate", above=0)

parser = Parser(__doc__)
add_settings(parser, OptimConfig)
given = vars(parser.parse_args(argv))                 # only what the command line says
config = read_settings(OptimConfig, preset | given)   # what is given wins over a preset, both over the defaults
"""

import argparse
import json
import math
import operator
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from errors import UserError, as_user_error, nearest, need

REQUIRED = MISSING  # as a setting's default: there is none, it has to be given
BOUNDS = {"least": ("at least", operator.ge), "above": ("above", operator.gt), "most": ("at most", operator.le)}
METAVARS = {int: "N", float: "X"}
RENAMED = {  # settings that had other names before; CHANGELOG.md
    "epochs": "update_epochs", "sample_rounds": "max_gen_batches", "tis_mask": "ratio_mask", "track": "report_to",
    "grad_checkpointing": "gradient_checkpointing", "watch": "plot_runs",
}  # fmt: skip
T = TypeVar("T")


def always(value: Any) -> bool:
    return True


def never(value: Any) -> bool:
    return False


def plain_pair(pair: Any) -> bool:
    """Return whether the value of a KEY=VALUE is a number, true or false, and so names no code, file or server."""
    return bool(re.fullmatch(r"\w+=(true|false|[-+.0-9e]+)", str(pair)))


def flag_field(
    default: Any,
    help: str,
    choices: Sequence[str] = (),
    metavar: str = "",
    positional: bool = False,
    from_run: Callable[[Any], bool] = always,
    part_of: str = "",
    key: bool = False,
    **bounds: float,
) -> Any:
    """A dataclass field that is a flag too: an int, float, str or bool, one of these | None, or a tuple[str, ...].
    `bounds`: least, above, most. `from_run` says whether a value (of a tuple: each item) may be taken from a
    run's folder, which may be a stranger's; see load_run_settings. `part_of` is the setting without which this one has
    no effect. A `key` has no flag of its own but is one of --algo-args KEY=VALUE: for what few change."""
    metadata = {
        "help": help, "choices": choices, "metavar": metavar, "positional": positional, "bounds": bounds,
        "from_run": from_run, "part_of": part_of, "key": key,
    }  # fmt: skip
    return field(default=default, kw_only=True, metadata=metadata)


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def format_flag(name: str, value: Any) -> str:
    """Return a setting as it is typed: the flag and its value or values."""
    return shlex.join([flag_name(name), *map(str, value if isinstance(value, list | tuple) else [value])])


def typed(f: Field, value: Any) -> str:
    """Return a setting as it is typed: `--lr 1e-6`, or `--algo-args gamma=1` if it is a key."""
    return f"--algo-args {f.name}={value}" if f.metadata["key"] else format_flag(f.name, value)


def parse_key(f: Field, hint: Any, text: str) -> Any:
    """Return the value of a key: "default" takes back what a resumed run has."""
    kind, _, may_be_none = parse_type_hint(hint)
    if text == "default":
        return f.default
    if text == "none" and may_be_none:
        return None
    with as_user_error(ValueError, f"{typed(f, text)}: must be of type {kind.__name__}"):
        return kind(text)


def parse_pairs(flag: str, pairs: Iterable[str]) -> dict[str, Any]:
    """Return the KEY=VALUE ... of a flag: values as JSON, or text where they are none."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        need(equals, f"{flag} {pair}: give KEY=VALUE")
        values[key] = text
        with suppress(ValueError):
            values[key] = json.loads(text)
    return values


def parse_type_hint(hint: Any) -> tuple[type, bool, bool]:
    """(int, is it a tuple, may it be None) of `int`, `tuple[int, ...]` and `int | None`."""
    inner = get_args(hint)
    return inner[0] if inner else hint, get_origin(hint) is tuple, NoneType in inner


def help_with_default(f: Field) -> str:
    """With the default, unless there is none to speak of or the text has it."""
    text, shown = f.metadata["help"], f.default
    if shown in (REQUIRED, None, "", ()) or shown is False or "default" in text:
        return text
    return f"{text} (default: {'on' if shown is True else shown})"


class FlagParser(argparse.ArgumentParser):
    """Flags that have to be spelt out. A mistake is one line, and names the nearest flag; also after the name of a
    command, whose parser is another one of these."""

    def __init__(self, description: str | None = None, **more: Any):
        raw_text = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, allow_abbrev=False, formatter_class=raw_text, **more)
        self.keys: dict[str, tuple[Field, Any]] = {}  # of --algo-args: settings and their types

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        """Unknown flags come first: what else is wrong may follow from them."""
        flags = self._option_string_actions
        for word in sys.argv[1:] if args is None else args:
            flag = word.split("=")[0]
            unknown = flag.startswith("--") and flag != "--" and " " not in flag and flag not in flags
            if unknown and self._subparsers is None:
                name = flag.removeprefix("--").replace("-", "_")
                name = RENAMED.get(name, name)
                keyed = f"; use --algo-args {name}=VALUE" if name in self.keys else nearest(flag, flags)
                now = flag_name(name)
                self.error(f"{flag} is now called {now}" if now in flags else f"unknown flag {flag}{keyed}")
        parsed, rest = super().parse_known_args(args, namespace)
        for pair in vars(parsed).pop("algo_args", ()):
            key, equals, text = pair.partition("=")
            need(key in self.keys,
                 f"--algo-args {pair}: no such key{nearest(RENAMED.get(key, key), self.keys)}; known: "
                 f"{', '.join(self.keys)}")
            need(equals, f"--algo-args {pair}: give KEY=VALUE")
            setattr(parsed, key, parse_key(*self.keys[key], text))
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def optional_type(kind: type) -> Callable[[str], Any]:
    """Of a setting that may be None: "default" takes back what a resumed run has."""

    def parse(text: str) -> Any:
        return None if text == "default" else kind(text)

    parse.__name__ = kind.__name__  # what argparse calls it
    return parse


def add_flags(parser: FlagParser, cls: type) -> None:
    """Add a dataclass's settings, and those of each of its bases, as groups of flags. A setting that is not given is
    absent in what is parsed."""
    hints = get_type_hints(cls)
    for part in cls.__mro__[:-1]:
        group = parser.add_argument_group(part.__doc__.splitlines()[0])
        own = [f for f in fields(part) if f.name in part.__annotations__]
        if keys := {f.name: (f, hints[f.name]) for f in own if f.metadata["key"]}:
            parser.keys, shown = keys, f"{', '.join(keys)}; docs/algorithms.md"
            options = {"nargs": "+", "action": "extend", "default": argparse.SUPPRESS}
            group.add_argument("--algo-args", help=shown, metavar="KEY=VALUE", **options)
        for f in own:
            if f.name in keys:
                continue
            kind, many, may_be_none = parse_type_hint(hints[f.name])
            choices, positional = f.metadata["choices"], f.metadata["positional"]
            metavar = f.metadata["metavar"] or METAVARS.get(kind, f.name.rpartition("_")[2].upper())
            options = {"help": help_with_default(f).replace("%", "%%"), "default": argparse.SUPPRESS}
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["type"] = optional_type(kind) if may_be_none and not choices else kind
                options |= {"choices": choices} if choices else {"metavar": metavar}
            if many:  # one that is given twice adds up
                options |= {"nargs": "+", "action": "extend"}
            group.add_argument(f.name if positional else flag_name(f.name), **options)
            if f.default is REQUIRED:  # argparse's own usage would list every flag
                shown = metavar if positional else f"{flag_name(f.name)} {metavar}"
                parser.usage = f"{parser.usage or '%(prog)s [flags]'} {shown}"


@dataclass(frozen=True)
class PixelConfig:
    """Image sizes"""

    min_pixels: int | None = flag_field(None, "enlarge smaller images to this many pixels (default: the processor's "
                                     "value)", least=1)
    max_pixels: int | None = flag_field(
        None, "shrink larger images to this many pixels (default: the processor's value)", least=1
    )


def check_given(values: Mapping[str, object], *classes: type) -> None:
    """Raise UserError with every required setting of these dataclasses that `values` lacks."""
    missing = [f for cls in classes for f in fields(cls) if f.default is REQUIRED and f.name not in values]
    need(not missing, "; ".join(f"{flag_name(f.name)} is missing: {f.metadata['help']}" for f in missing))


def build_config(cls: type[T], values: Mapping[str, object]) -> T:
    """A dataclass of settings from values by name, checked; those of other groups may be among them. Lists, as argparse
    and JSON have them, become tuples."""
    hints, chosen = get_type_hints(cls), {}
    check_given(values, cls)
    for f in fields(cls):
        if f.name in values:
            value = values[f.name] if values[f.name] != ["default"] else ()  # takes back what a resumed run has
            chosen[f.name] = tuple(value) if isinstance(value, list) else value
            check_value(f, hints[f.name], chosen[f.name])
    return cls(**chosen)


def load_run_settings(
    known: Iterable[Field], run: Mapping[str, Any], given: Mapping[str, Any], where: object
) -> dict[str, Any]:
    """Return the `known` settings that a run's run.json has, as defaults of a command that was `given` others. Raise
    UserError if it has some that must not come from a folder (code, servers, names of secrets, missing files) and
    `given` lacks them; docs/data.md lists these."""
    kept, withheld = {}, []
    for f in known:
        if f.name in run and given.get(f.metadata["part_of"], "") is not None:
            kept[f.name] = value = run[f.name]
            items = value if isinstance(value, list) else [] if value is None else [value]
            withheld += [] if f.name in given or all(map(f.metadata["from_run"], items)) else [f]
    told = " ".join(typed(f, run[f.name]) for f in withheld)
    without = " ".join(f"{flag_name(f.name)} default" for f in withheld if f.default is not REQUIRED)
    need(not withheld, f"{where} was trained with {told}. Flags that name code, servers, secrets or missing files are "
         f"not taken from a folder; add {told}" + (f", or to do without it {without}" if without else ""))
    return kept


@contextmanager
def naming_origins(values: Mapping[str, Any], origin: str) -> Iterator[None]:
    """Add `origin` to each "--flag value" in the message of a UserError if the flag was not given."""
    try:
        yield
    except UserError as error:
        message, given = str(error), {word.partition("=")[0] for word in sys.argv}
        for name, value in values.items():
            if flag_name(name) not in given and name not in given:
                as_typed = rf"({flag_name(name)} |--[\w-]+ {name}=){re.escape(str(value))}(?!\w|\.\d)"
                message = re.sub(as_typed, rf"\g<0> ({origin})", message, count=1)
        raise UserError(message) from error


def check_value(f: Field, hint: type, value: object) -> None:
    """Is a value of the setting's type, one of its choices and within its bounds?"""
    kind, many, may_be_none = parse_type_hint(hint)
    if may_be_none and value is None:
        return
    choices, bounds = f.metadata["choices"], f.metadata["bounds"]
    need(isinstance(value, tuple) or not many, f"{typed(f, value)}: must be a list")
    for item in value if many else (value,):
        told = f"{typed(f, item)}: must be"
        need(isinstance(item, int | float if kind is float else kind), f"{told} of type {kind.__name__}")
        need(not choices or item in choices, f"{told} one of {', '.join(choices)}")
        within = " and ".join(f"{BOUNDS[name][0]} {bound}" for name, bound in bounds.items())
        need(all(BOUNDS[name][1](item, bound) for name, bound in bounds.items()), f"{told} {within}")
        need(not isinstance(item, float) or math.isfinite(item), f"{told} finite")
