"""Flags from dataclasses: help, parsed values and errors.   pytest tests/test_settings.py"""

import json
import re
from dataclasses import FrozenInstanceError, asdict, dataclass, fields
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import grpo
import train
from errors import UserError
from settings import REQUIRED, FlagParser, add_flags, build_config, flag_field, load_config_file


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer

    For all trained weights."""

    model: str = flag_field(REQUIRED, "model folder or hub id")
    lr: float = flag_field(1e-6, "peak learning rate", above=0)
    warmup_steps: int = flag_field(0, "steps of linear warm-up", least=0)
    decay: float = flag_field(0.5, "share of 100% that is left", least=0, most=0.9)
    schedule: str = flag_field("constant", "after the warm-up; cosine ends at 0", choices=("constant", "cosine"))
    vision_lr: float | None = flag_field(None, "peak learning rate of the tower (default: --lr)", above=0)
    freeze: bool = flag_field(True, "keep the tower as it is")
    gradient_checkpointing: bool = flag_field(False, "recompute activations in the backward")
    targets: tuple[str, ...] = flag_field((), "linear layers to adapt", metavar="NAME")
    sizes: tuple[int, ...] = flag_field((), "layer sizes", least=1)


@dataclass(frozen=True)
class RunConfig:
    """Run"""

    source: str = flag_field(REQUIRED, "a folder", positional=True)
    out: str = flag_field(REQUIRED, "run directory", metavar="DIR")
    seed: int = flag_field(0, "random seed")


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
  --sizes N [N ...]     layer sizes

Run:
  SOURCE                a folder
  --out DIR             run directory
  --seed N              random seed (default: 0)
"""


def make_parser(*groups):
    flag_parser = FlagParser("What the script does,\nin two lines.", prog="train.py")
    for group in groups:
        add_flags(flag_parser, group)
    return flag_parser


def parse(*argv, base=None):
    flags = vars(make_parser(OptimConfig).parse_args(["--model", "m", *argv]))
    return build_config(OptimConfig, (base or {}) | flags)


def parse_error(capsys, *argv, groups=(OptimConfig, RunConfig)):
    with pytest.raises(SystemExit) as stop:
        make_parser(*groups).parse_args(argv)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_help_has_titles_defaults_and_choices(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert make_parser(OptimConfig, RunConfig).format_help() == HELP


@dataclass(frozen=True)
class Base:
    """Algorithm"""

    lam: float = flag_field(0.9, "decay", key=True)
    kl_in: str = flag_field("loss", "place of the KL", choices=("loss", "reward"), key=True)
    log_kl: bool = flag_field(False, "log the KL to the reference after each of the steps of a run", key=True)
    clip: float = flag_field(0.2, "clip range")


@dataclass(frozen=True)
class Derived(Base):
    """Algorithm"""

    size: int = flag_field(8, "samples")


def test_a_section_lists_its_keys_and_includes_a_base_class_of_the_same_title(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert make_parser(Derived).format_help().endswith("""
Algorithm:
  Keys of --algo-args:
    lam=VALUE: decay (default: 0.9)
    kl_in=loss|reward: place of the KL (default: loss)
    log_kl=true|false: log the KL to the reference after each of the steps of a
        run (default: off)

  --size N              samples (default: 8)
  --clip X              clip range (default: 0.2)
  --algo-args KEY=VALUE [KEY=VALUE ...]
                        rarely changed settings, as KEY=VALUE; the keys are listed above
""")


def test_only_flags_on_the_command_line_are_parsed_and_they_override():
    flags = vars(make_parser(OptimConfig).parse_args(["--lr", "1e-6", "--no-freeze", "--targets", "q", "v"]))
    assert flags == {"lr": 1e-6, "freeze": False, "targets": ["q", "v"]}  # also if it equals the default
    preset = {"model": "a", "lr": 1.0, "schedule": "cosine", "something_else": 5}
    settings = build_config(OptimConfig, preset | flags)
    assert settings == OptimConfig(model="a", lr=1e-6, schedule="cosine", freeze=False, targets=("q", "v"))
    with pytest.raises(FrozenInstanceError):
        settings.lr = 2.0


def test_lists_given_twice_are_joined_and_default_resets_them():
    assert parse("--targets", "a", "b", "--targets", "c").targets == ("a", "b", "c")
    assert build_config(OptimConfig, {"model": "m", "targets": ["default"]}).targets == ()


def test_types_follow_from_annotations():
    config = parse("--warmup-steps", "3", "--vision-lr", "2", "--gradient-checkpointing", "--sizes", "4", "5")
    assert config == OptimConfig(model="m", warmup_steps=3, vision_lr=2.0, gradient_checkpointing=True, sizes=(4, 5))
    types = [type(value) for value in asdict(config).values()]
    assert types == [str, float, int, float, str, float, bool, bool, tuple, tuple]
    assert parse() == OptimConfig(model="m") and parse().vision_lr is None and parse().targets == ()
    assert parse("--schedule=cosine").schedule == "cosine"
    stored = json.loads(json.dumps(asdict(config)))  # as run.json stores a run's settings
    assert build_config(OptimConfig, stored) == config
    assert build_config(OptimConfig, stored | {"vision_lr": None, "lr": 1}).vision_lr is None


@pytest.mark.parametrize("values,message", [
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
def test_errors_name_the_value_and_what_is_allowed(values, message):
    with pytest.raises(UserError) as error:
        build_config(OptimConfig, {"model": "m"} | values)
    assert str(error.value) == message


def test_bounds_are_part_of_the_setting():
    with pytest.raises(UserError, match="--decay 1.0: must be at least 0 and at most 0.9"):
        parse("--decay", "1")
    assert parse("--decay", "0").decay == 0.0 and {f.name for f in fields(OptimConfig)} >= {"decay"}


def test_missing_required_flags_are_named_unless_the_base_values_have_them():
    with pytest.raises(UserError, match="^--model is required: model folder or hub id$"):
        build_config(OptimConfig, vars(make_parser(OptimConfig).parse_args([])))
    assert build_config(OptimConfig, {"model": "m"}).model == "m"
    with pytest.raises(UserError, match="^--out is required"):
        build_config(RunConfig, vars(make_parser(RunConfig).parse_args(["folder"])))
    given = vars(make_parser(RunConfig).parse_args(["folder", "--out", "x"]))
    assert build_config(RunConfig, given) == RunConfig(source="folder", out="x")


def test_an_unknown_flag_is_the_only_error_and_gets_a_suggestion(capsys):
    assert parse_error(capsys, "--lern-rate", "3") == "error: unknown flag --lern-rate; see train.py --help\n"
    error = parse_error(capsys, "--lr", "x", "--modle=m", "--schedule", "no")
    assert error.startswith("error: unknown flag --modle (did you mean --model?)")
    assert error.endswith("; see train.py --help\n")
    assert "--no-freeze" in parse_error(capsys, "--no-freez")
    assert parse_error(capsys, "--zzzzzzzz") == "error: unknown flag --zzzzzzzz; see train.py --help\n"
    assert parse_error(capsys, "-lr", "3") == "error: unknown flag -lr; use --lr; see train.py --help\n"
    source = parse_error(capsys, "--source", "x")  # an argument that takes no flag
    assert source.startswith("error: unknown flag --source; pass the value without it: train.py SOURCE [flags]; see ")
    assert "--warmup" in parse_error(capsys, "--warmup", "1")  # not taken as short for --warmup-steps


@pytest.mark.parametrize("argv,remedy", [
    ("--epochs 3", "= 3 x rows / 16; {file} has 50 rows: --steps 9;"),
    ("--num-train-epochs=2 --prompts-per-step 8", "= 2 x rows / 8; {file} has 50 rows: --steps 12;"),
    ("--trainer.total_epochs 1.5 --prompts-per-step=10", "= 1.5 x rows / 10; {file} has 50 rows: --steps 8;"),
    ("trainer.total-epochs=1", "= 1 x rows / 16; {file} has 50 rows: --steps 3;"),
    ("--algo-args num_epochs=4", "= 4 x rows / 16; {file} has 50 rows: --steps 12;"),
    ("--Max_Epochs", "= N x rows / 16;"),
    ("--epochs 2 --data none.parquet", "= 2 x rows / 16;"),
    ("--epochs 2 --prompts-per-step 0", "= 2 x rows / 0;"),
    ("--max_steps 7", "; use --steps;"),
    ("trainer.total_training_steps=7", "; use --steps;"),
    ("--actor.ppo-epochs 2", "; use --update-epochs;"),
])  # fmt: skip
def test_lengths_of_runs_by_other_tools_names(argv, remedy, capsys, tmp_path):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": range(50)}), file)
    with pytest.raises(SystemExit):
        train.parse_args(["--model", "m", "--out", "o", "--data", str(file), *argv.split()])
    error = capsys.readouterr().err
    assert remedy.format(file=file) in error and ("--update-epochs" in error) == ("ppo" in argv)
    assert error.count("\n") == 1 and ("--steps" in error) != ("ppo" in argv)


@pytest.mark.parametrize("line,remedy", [
    ("epochs = 3", "epochs; for epochs of the data use --steps"),
    ("[trainer]\nmax-steps = 3", "max-steps; use --steps"),
])  # fmt: skip
def test_a_config_file_with_such_a_name_is_refused(line, remedy, tmp_path):
    (tmp_path / "c.toml").write_text(line)
    with pytest.raises(UserError, match=f"unknown setting {remedy}"):
        load_config_file(str(tmp_path / "c.toml"), fields(grpo.Algorithm))


def test_other_errors_are_one_line_too(capsys):
    assert "argument --lr: invalid float value: 'x'" in parse_error(capsys, "--lr", "x")
    assert "invalid choice: 'cos' (choose from 'constant', 'cosine')" in parse_error(capsys, "--schedule", "cos")
    assert "(did you mean cosine?)" in parse_error(capsys, "--schedule", "cosin")
    assert "--warmup-steps: expected one argument" in parse_error(capsys, "--warmup-steps")
    assert "required: SOURCE" in parse_error(capsys, "--lr", "1")
    assert "unrecognized arguments: left" in parse_error(capsys, "folder", "left")


def test_subcommands_have_their_own_flags(capsys):
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


# --- short help, and settings from a file --------------------------------------------------------------------------


def test_help_lists_essential_settings_and_help_all_lists_every_one(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")

    def help_text(*argv):
        p = FlagParser("First.\n\nSecond.\n\nThird.", prog="train.py", essential="model size")
        add_flags(p, OptimConfig)
        add_flags(p, Derived)
        with pytest.raises(SystemExit) as stop:
            p.parse_args(argv)
        assert stop.value.code == 0
        return capsys.readouterr().out

    short, full = help_text("--help"), help_text("-h", "all")
    assert short.startswith("usage: train.py [flags] --model MODEL\n\nFirst.\n\nSecond.\n\noptions:")
    assert re.findall("^  --[a-z-]+", short, re.M) == ["  --model", "  --size"] and "lam=" not in short
    with pytest.raises(SystemExit):
        FlagParser(prog="train.py", essential="model").parse_args(["--no-such-flag"])
    assert capsys.readouterr().err.endswith("; see train.py --help all\n")
    epilog = r"(\d+) more flags: train.py --help all. Questions and answers: docs/README.md\n$"
    hidden = int(re.search(epilog, short)[1])
    listed = re.findall("^  --[a-z-]+", full, re.M)
    assert len(listed) == 2 + hidden and "Third." in full and "lam=VALUE" in full


FILES = {
    "a.toml": 'lr = 2\nsizes = [1, 2]\n\n[data]\nvision-lr = 0.5\nfreeze = false\n',
    "run.json": json.dumps({"args": {"lr": 2.0, "sizes": [1, 2], "vision_lr": 0.5, "freeze": False, "model": "m",
                                     "decay": 0.5, "gone": 3, "grad_checkpointing": True}}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_config_file_sets_what_flags_do_not(name, tmp_path):
    file = tmp_path / name
    file.write_text(FILES[name])
    values = load_config_file(str(file), fields(OptimConfig))
    args = vars(make_parser(OptimConfig).parse_args(["--model", "x", "--lr", "3"]))
    settings = build_config(OptimConfig, values | args)
    assert settings == OptimConfig(model="x", lr=3.0, sizes=(1, 2), vision_lr=0.5, freeze=False,
                                   gradient_checkpointing=name == "run.json")


@pytest.mark.parametrize("name,text,message", [
    ("a.toml", "lern = 1", "unknown setting lern"),
    ("a.toml", "warmup-step = 1", r"unknown setting warmup-step \(did you mean warmup-steps\?\)"),
    ("a.toml", "lr = = 1", "expected a TOML file, with texts in quotes, or a run.json: Invalid value"),
    ("a.toml", None, r"no such file \(did you mean /.*/b.toml\?\)"),
    ("run.json", "{", "expected a TOML file, with texts in quotes, or a run.json: Expecting"),
    ("run.json", "[]", "expected a TOML file"),
    ("run.json", "{}", "expected a TOML file"),
    ("run.json", '{"args": 3}', "expected a TOML file"),
])  # fmt: skip
def test_a_damaged_config_file_is_named(name, text, message, tmp_path):
    file = tmp_path / name
    (tmp_path / "b.toml").write_text("")
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=f"--config {file}: {message}"):
        load_config_file(str(file), fields(OptimConfig))


def test_a_wrong_value_in_a_config_file_is_named(tmp_path):
    (tmp_path / "a.toml").write_text('lr = "high"\nmodel = "m"\n')
    with pytest.raises(UserError, match="--lr high: must be of type float"):
        build_config(OptimConfig, load_config_file(str(tmp_path / "a.toml"), fields(OptimConfig)))


def test_code_and_secrets_of_a_run_are_left_out_aloud(tmp_path, capsys):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"args": {"reward": ["x.py:f"], "out": "o", "steps": 3, "judge_url": "http://a",
                                         "resume": "auto", "config": "c.toml", "env": None}}))  # fmt: skip
    settings = list(chain.from_iterable(fields(f.type) for f in fields(train.Config)))
    assert load_config_file(str(file), settings) == {"steps": 3, "env": None}
    out = capsys.readouterr().out
    assert out.startswith(f"--config {file}: left out ") and out.count("\n") == 1
    assert all(flag in out for flag in ("--reward x.py:f", "--judge-url http://a")) and "--out" not in out


def test_a_setting_is_set_once_and_true_is_no_number(tmp_path):
    for text in ("lr = 1.0\n[optim]\nlr = 2.0", "warmup-steps = 1\nwarmup_steps = 2"):
        (tmp_path / "a.toml").write_text(text)
        with pytest.raises(UserError, match="is set twice"):
            load_config_file(str(tmp_path / "a.toml"), fields(OptimConfig))
    for name in ("lr", "warmup_steps"):
        with pytest.raises(UserError, match=rf"--{name.replace('_', '-')}.*: must be of type"):
            build_config(OptimConfig, {"model": "m", name: True})


def test_a_run_json_repeats_its_run_whatever_its_preset_says(tmp_path, monkeypatch):
    """Settings of the preset that the run had overridden, also with their defaults, are kept; --algo replaces them."""
    argv = "--model m --data d --out o --steps 2 --algo dapo --clip-high 0.2 --truncated keep".split()
    cfg = train.parse_args(argv)
    (tmp_path / "run.json").write_text(json.dumps({"args": cfg.to_flags()}))
    config = ["--config", str(tmp_path / "run.json"), "--out", "p"]
    assert train.parse_args(config).algo == cfg.algo != train.AlgorithmSettings(algo="dapo", **grpo.PRESETS["dapo"])
    assert train.parse_args([*config, "--algo", "dapo"]).algo == cfg.algo
    assert train.parse_args([*config, "--algo", "grpo"]).algo == train.AlgorithmSettings(algo="grpo")
    # the same for a run that is resumed
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "run.json").write_text(json.dumps({"args": cfg.to_flags()}))
    resumed = ["--out", str(tmp_path / "o"), "--resume", "auto"]
    assert train.parse_args(resumed).algo == train.parse_args([*resumed, "--algo", "dapo"]).algo == cfg.algo


def test_every_rank_leaves_out_the_code_of_a_run_json(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.json").write_text(json.dumps({"args": {"reward": ["x.py:f"], "steps": 3, "judge_url": "http://a",
                                                            "judge": ["model=x"]}}))  # fmt: skip
    settings = list(chain.from_iterable(fields(f.type) for f in fields(train.Config)))
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert load_config_file(str(tmp_path / "run.json"), settings) == {"steps": 3}
        assert ("left out" in capsys.readouterr().out) == (rank == "0")


def test_presets_of_config_files_and_flags(tmp_path):
    (tmp_path / "a.toml").write_text('algo = "dapo"\nmodel = "m"\ndata = "d"\nout = "o"\nsteps = 2\n')
    config = ["--config", str(tmp_path / "a.toml")]
    cfg = train.parse_args(config)
    assert (cfg.algo.algo, cfg.algo.clip_high, cfg.run.steps) == ("dapo", grpo.PRESETS["dapo"]["clip_high"], 2)
    assert train.parse_args([*config, "--clip-high", "0.5"]).algo.clip_high == 0.5
    assert train.parse_args([*config, "--algo", "grpo"]).algo == train.AlgorithmSettings(algo="grpo")
    (tmp_path / "b.toml").write_text((tmp_path / "a.toml").read_text() + "clip-high = 0.25\n")
    assert train.parse_args(["--config", str(tmp_path / "b.toml"), "--algo", "gspo"]).algo.clip_high == 0.25
    with pytest.raises(UserError, match="--algo dappo.*: must be one of"):
        (tmp_path / "a.toml").write_text('algo = "dappo"\nmodel = "m"\ndata = "d"\nout = "o"\nsteps = 2\n')
        train.parse_args(config)


def test_none_is_a_choice_if_the_setting_has_it_among_its_choices():
    """norm_std=none means no division; it must not select the estimator's default, which is None."""
    flags = ["--model", "m", "--data", "d", "--out", "o", "--steps", "1", "--algo-args"]
    assert train.parse_args([*flags, "norm_std=none"]).algo.effective_norm_std == "none"
    assert train.parse_args([*flags, "norm_std=default"]).algo.effective_norm_std == "group"
    assert train.parse_args([*flags, "value_clip=none"]).algo.value_clip is None
