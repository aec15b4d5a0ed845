"""Flags from dataclasses: help, what is given, what is refused.   pytest tests/test_settings.py"""

import json
from dataclasses import FrozenInstanceError, asdict, dataclass, fields

import pytest

from errors import UserError
from settings import REQUIRED, FlagParser, add_flags, build_config, flag_field


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer

    Of every trained weight."""

    model: str = flag_field(REQUIRED, "model folder or hub id")
    lr: float = flag_field(1e-6, "peak learning rate", above=0)
    warmup_steps: int = flag_field(0, "steps of linear warm-up", least=0)
    decay: float = flag_field(0.5, "share of 100% that is left", least=0, most=0.9)
    schedule: str = flag_field("constant", "after the warm-up; cosine ends at 0", choices=("constant", "cosine"))
    vision_lr: float | None = flag_field(None, "peak learning rate of the tower (default: --lr)", above=0)
    freeze: bool = flag_field(True, "keep the tower as it is")
    gradient_checkpointing: bool = flag_field(False, "recompute activations in the backward")
    targets: tuple[str, ...] = flag_field((), "linear layers to adapt", metavar="NAME")
    sizes: tuple[int, ...] = flag_field((), "of the layers", least=1)


@dataclass(frozen=True)
class RunConfig:
    """Run"""

    source: str = flag_field(REQUIRED, "a folder", positional=True)
    out: str = flag_field(REQUIRED, "run directory", metavar="DIR")
    seed: int = flag_field(0, "of sampling")


HELP = """\
usage: train.py [flags] --model MODEL SOURCE --out DIR

What the script does,
in two lines.

options:
  -h, --help            show this help message and exit

Optimizer:
  --model MODEL         model folder or hub id
  --lr X                peak learning rate (default: 1e-06)
  --warmup-steps N      steps of linear warm-up (default: 0)
  --decay X             share of 100% that is left (default: 0.5)
  --schedule {constant,cosine}
                        after the warm-up; cosine ends at 0 (default:
                        constant)
  --vision-lr X         peak learning rate of the tower (default: --lr)
  --freeze, --no-freeze
                        keep the tower as it is (default: on)
  --gradient-checkpointing, --no-gradient-checkpointing
                        recompute activations in the backward
  --targets NAME [NAME ...]
                        linear layers to adapt
  --sizes N [N ...]     of the layers

Run:
  SOURCE                a folder
  --out DIR             run directory
  --seed N              of sampling (default: 0)
"""


def parser(*groups):
    made = FlagParser("What the script does,\nin two lines.", prog="train.py")
    for group in groups:
        add_flags(made, group)
    return made


def parse(*argv, base=None):
    given = vars(parser(OptimConfig).parse_args(["--model", "m", *argv]))
    return build_config(OptimConfig, (base or {}) | given)


def refused(capsys, *argv, groups=(OptimConfig, RunConfig)):
    with pytest.raises(SystemExit) as stop:
        parser(*groups).parse_args(argv)
    told = capsys.readouterr()
    assert stop.value.code == 2 and told.out == "" and told.err.count("\n") == 1
    return told.err


def test_help_has_titles_defaults_and_choices(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert parser(OptimConfig, RunConfig).format_help() == HELP


@dataclass(frozen=True)
class Base:
    """Algorithm"""

    lam: float = flag_field(0.9, "decay", key=True)
    kl_in: str = flag_field("loss", "place of the KL", choices=("loss", "reward"), key=True)
    clip: float = flag_field(0.2, "clip range")


@dataclass(frozen=True)
class Derived(Base):
    """Algorithm"""

    size: int = flag_field(8, "samples")


def test_a_section_lists_its_keys_and_takes_in_a_base_of_the_same_title(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert parser(Derived).format_help().endswith("""
Algorithm:
  Keys of --algo-args:
    lam=VALUE: decay (default: 0.9)
    kl_in=loss|reward: place of the KL (default: loss)

  --size N              samples (default: 8)
  --clip X              clip range (default: 0.2)
  --algo-args KEY=VALUE [KEY=VALUE ...]
                        rarely changed settings, as KEY=VALUE; the keys are listed above
""")


def test_only_what_is_given_is_parsed_and_it_wins():
    given = vars(parser(OptimConfig).parse_args(["--lr", "1e-6", "--no-freeze", "--targets", "q", "v"]))
    assert given == {"lr": 1e-6, "freeze": False, "targets": ["q", "v"]}  # also where it equals the default
    preset = {"model": "a", "lr": 1.0, "schedule": "cosine", "something_else": 5}
    settings = build_config(OptimConfig, preset | given)
    assert settings == OptimConfig(model="a", lr=1e-6, schedule="cosine", freeze=False, targets=("q", "v"))
    with pytest.raises(FrozenInstanceError):
        settings.lr = 2.0


def test_a_list_that_is_given_twice_adds_up_and_default_takes_it_back():
    assert parse("--targets", "a", "b", "--targets", "c").targets == ("a", "b", "c")
    assert build_config(OptimConfig, {"model": "m", "targets": ["default"]}).targets == ()


def test_types_follow_from_annotations():
    some = parse("--warmup-steps", "3", "--vision-lr", "2", "--gradient-checkpointing", "--sizes", "4", "5")
    assert some == OptimConfig(model="m", warmup_steps=3, vision_lr=2.0, gradient_checkpointing=True, sizes=(4, 5))
    types = [type(value) for value in asdict(some).values()]
    assert types == [str, float, int, float, str, float, bool, bool, tuple, tuple]
    assert parse() == OptimConfig(model="m") and parse().vision_lr is None and parse().targets == ()
    assert parse("--schedule=cosine").schedule == "cosine"
    again = json.loads(json.dumps(asdict(some)))  # a run's settings, as run.json has them
    assert build_config(OptimConfig, again) == some
    assert build_config(OptimConfig, again | {"vision_lr": None, "lr": 1}).vision_lr is None


@pytest.mark.parametrize("values,told", [
    ({"lr": -1.0}, "--lr -1.0: must be above 0"),
    ({"lr": 0}, "--lr 0: must be above 0"),
    ({"lr": float("nan")}, "--lr nan: must be above 0"),
    ({"vision_lr": 0.0}, "--vision-lr 0.0: must be above 0"),
    ({"warmup_steps": -1}, "--warmup-steps -1: must be at least 0"),
    ({"decay": 1.0}, "--decay 1.0: must be at least 0 and at most 0.9"),
    ({"sizes": (3, 0)}, "--sizes 0: must be at least 1"),
    ({"schedule": "cos"}, "--schedule cos: must be one of constant, cosine"),
    ({"schedule": None}, "--schedule None: must be of type str"),
    ({"lr": "1e-3"}, "--lr 1e-3: must be of type float"),
    ({"warmup_steps": 0.5}, "--warmup-steps 0.5: must be of type int"),
    ({"sizes": 3}, "--sizes 3: must be a list"),
    ({"model": None}, "--model None: must be of type str"),
])
def test_what_a_setting_must_not_be_is_named(values, told):
    with pytest.raises(UserError) as error:
        build_config(OptimConfig, {"model": "m"} | values)
    assert str(error.value) == told


def test_bounds_are_part_of_the_setting():
    with pytest.raises(UserError, match="--decay 1.0: must be at least 0 and at most 0.9"):
        parse("--decay", "1")
    assert parse("--decay", "0").decay == 0.0 and {f.name for f in fields(OptimConfig)} >= {"decay"}


def test_what_is_required_is_named_unless_a_base_has_it():
    with pytest.raises(UserError, match="^--model is required: model folder or hub id$"):
        build_config(OptimConfig, vars(parser(OptimConfig).parse_args([])))
    assert build_config(OptimConfig, {"model": "m"}).model == "m"
    with pytest.raises(UserError, match="^--out is required"):
        build_config(RunConfig, vars(parser(RunConfig).parse_args(["folder"])))
    given = vars(parser(RunConfig).parse_args(["folder", "--out", "x"]))
    assert build_config(RunConfig, given) == RunConfig(source="folder", out="x")


def test_an_unknown_flag_comes_first_and_alone_with_the_nearest(capsys):
    assert refused(capsys, "--lern-rate", "3") == "error: unknown flag --lern-rate; see train.py --help\n"
    told = refused(capsys, "--lr", "x", "--modle=m", "--schedule", "no")
    assert told.startswith("error: unknown flag --modle (did you mean --model?)")
    assert told.endswith("; see train.py --help\n")
    assert "--no-freeze" in refused(capsys, "--no-freez")
    assert refused(capsys, "--zzzzzzzz") == "error: unknown flag --zzzzzzzz; see train.py --help\n"
    assert "--warmup" in refused(capsys, "--warmup", "1")  # not taken as short for --warmup-steps


def test_other_mistakes_are_one_line_too(capsys):
    assert "argument --lr: invalid float value: 'x'" in refused(capsys, "--lr", "x")
    assert "invalid choice: 'cos' (choose from 'constant', 'cosine')" in refused(capsys, "--schedule", "cos")
    assert "--warmup-steps: expected one argument" in refused(capsys, "--warmup-steps")
    assert "required: SOURCE" in refused(capsys, "--lr", "1")
    assert "unrecognized arguments: left" in refused(capsys, "folder", "left")


def test_commands_of_a_script_have_flags_of_their_own(capsys):
    top = FlagParser("Two commands.", prog="demo.py")
    commands = top.add_subparsers(dest="command", required=True)
    add_flags(commands.add_parser("model"), OptimConfig)
    add_flags(commands.add_parser("run"), RunConfig)
    assert vars(top.parse_args(["run", "x", "--seed", "3"])) == {"command": "run", "source": "x", "seed": 3}
    with pytest.raises(SystemExit):
        top.parse_args(["run", "x", "--lr", "3"])
    assert capsys.readouterr().err == "error: unknown flag --lr; see demo.py run --help\n"
    with pytest.raises(SystemExit):
        top.parse_args(["model", "--lrr", "3"])
    assert capsys.readouterr().err.startswith("error: unknown flag --lrr (did you mean --lr?)")


def test_a_value_may_look_like_a_flag():
    assert parse("--schedule", "cosine", "--targets", "-- why", "v").targets == ("-- why", "v")
    assert parse("--vision-lr", "1e-3").vision_lr == 1e-3
    with pytest.raises(UserError, match="--lr -1.0: must be above 0"):
        parse("--lr", "-1")
