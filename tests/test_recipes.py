"""runs/recipe.sh and docs/recipes.md: flags, memory, the data sets' layouts, and the grading of their truths."""

import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import published_layouts
import pyarrow.parquet as pq
import pytest
from conftest import complete

import eval as evaluate
import prepare_data
import train
from parallel import plan
from reward import TASKS, load_tasks, unwrap_truth

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import gpu as gpu_bench  # noqa: E402

pytestmark = complete
SCRIPT = ROOT / "runs" / "recipe.sh"
NAMES = re.search('NAMES="(.*)"', SCRIPT.read_text())[1].split()
PAGE = (ROOT / "docs" / "recipes.md").read_text()
HARDWARE = (ROOT / "docs" / "hardware.md").read_text()


def dry_run(name: str, out: Path, *flags: str, steps: str = "data train eval") -> tuple[list[list[str]], str]:
    """Return the commands that a recipe prints with DRY=1, and all that it prints."""
    env = os.environ | {"DRY": "1", "OUT": str(out), "STEPS": steps}
    done = subprocess.run(["bash", SCRIPT, name, *flags], env=env, capture_output=True, text=True, check=True)
    return [shlex.split(line[2:]) for line in done.stdout.splitlines() if line.startswith("+ ")], done.stdout


def flags_of(commands: list[list[str]], script: str) -> list[list[str]]:
    return [words[words.index(script) + 1 :] for words in commands if script in words]


@pytest.mark.parametrize("name", NAMES)
def test_the_flags_of_a_recipe_are_valid(name, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "resolve_model", lambda path, flag="": (path, None, {}))  # needs the hub
    commands, output = dry_run(name, tmp_path, "--seed", "7")
    (training,), (evaluation,) = flags_of(commands, "train.py"), flags_of(commands, "eval.py")
    cfg = SimpleNamespace(**train.parse_args(training).to_flags())
    assert cfg.seed == 7 and cfg.gradient_checkpointing and cfg.micro_tokens == 8192
    assert evaluate.parse_args(evaluation).baseline == (cfg.model,)
    launch = next(words for words in commands if "train.py" in words)
    counts = [int(launch[launch.index(flag) + 1]) for flag in ("--nproc-per-node", "--nnodes") if flag in launch]
    processes = counts[0] * (counts[1:] or [1])[0] if counts else 1
    assert cfg.prompts_per_step % (processes * cfg.minibatches) == 0
    converted = [prepare_data.parse_args(words)[1].out for words in flags_of(commands, "prepare_data.py")]
    assert converted == [cfg.data, cfg.eval_data]
    row = output.split("from docs/hardware.md:\n")[1].splitlines()[1]  # after the table's header
    on_page = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")).split("|")
    assert row in HARDWARE and on_page[2].replace("2 x 8", "16").strip() == str(processes)
    assert [cell.strip() for cell in row.split("|")[2:4]] == on_page[3].strip().split("; ")


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_hours_and_price_of_the_plan(name, tmp_path, monkeypatch):
    (flags,) = flags_of(dry_run(name, tmp_path, steps="plan")[0], "train.py")
    size = re.search("[0-9]+B(-A[0-9]+B)?", flags[flags.index("--model") + 1])[0]
    gpu_bench.config_of(size).save_pretrained(tmp_path / size)
    printed = []
    monkeypatch.setattr("builtins.print", lambda *texts, **_: printed.extend(texts))
    flags = [*flags[1:], "--model", str(tmp_path / size)]
    plan.print_plan(flags, train.parse_args, train.check_config)
    text = "\n".join(map(str, printed))
    assert "GPU memory: fits" in text
    hours, usd = re.search(r"time: ([0-9.]+) hours; price: ([0-9.]+) USD", text).groups()
    on_page = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")).split("|")
    assert on_page[4].strip().removesuffix(" (too low)") == f"{float(hours):.1f}; {float(usd):.0f}"


def test_an_unknown_recipe_is_an_error():
    done = subprocess.run(["bash", SCRIPT, "geo4k"], capture_output=True, text=True)
    assert done.returncode == 1 and "geo4k; use one of: geo3k-3b" in done.stderr


@pytest.mark.parametrize(("arguments", "variables", "message"), [
    (["clevr-3b"], {"STEPS": "pretrain"}, "unknown step pretrain"),
    ([], {}, "no recipe given; use one of: geo3k-3b"),
    (["clevr-3b", "--out=x"], {}, "--out: the recipe sets it"),
    (["clevr-3b", "--model", "x"], {}, "--model: the recipe sets it"),
])  # fmt: skip
def test_mistakes_are_refused(arguments, variables, message, tmp_path):
    env = os.environ | {"DRY": "1", "OUT": str(tmp_path)} | variables
    done = subprocess.run(["bash", SCRIPT, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and message in done.stderr and "+ " not in done.stdout


def test_downloads_get_their_name_when_complete(tmp_path):
    commands, _ = dry_run("geoqa-3b", tmp_path, steps="data")
    (curl,) = [words for words in commands if words[0] == "curl"]
    target = curl[curl.index("-fLo") + 1]
    assert target.endswith(".part") and ["mv", target, target.removesuffix(".part")] in commands


def test_a_check_only_prints_with_dry_and_has_its_own_folder(tmp_path):
    commands, _ = dry_run("--short", tmp_path, "clevr-3b")
    assert not list(tmp_path.iterdir())
    assert ["python", "tests/published_layouts.py", str(tmp_path / "short/downloads"), "clevr"] in commands
    (training,) = flags_of(commands, "train.py")
    assert training[training.index("--data") + 1] == str(tmp_path / "short/clevr_train.parquet")


def test_a_continued_run_is_evaluated_again(tmp_path):
    for step in (60, 120):
        (tmp_path / f"clevr-3b/checkpoints/step_{step:06}").mkdir(parents=True)
        (flags,) = flags_of(dry_run("clevr-3b", tmp_path, steps="eval")[0], "eval.py")
        assert flags[flags.index("--out") + 1] == str(tmp_path / f"clevr-3b/eval_step_{step:06}")


def test_layouts_are_written_twice_and_only_those_named(tmp_path):
    for _ in range(2):
        published_layouts.write_all(tmp_path, ["geoqa"])
    assert {path.name for path in tmp_path.iterdir()} == {"geoqa", "Geo170K", "geoqa_test.jsonl"}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, list[dict]]:
    """File name -> rows, converted from the published layouts by the commands of the recipes."""
    out = tmp_path_factory.mktemp("recipes")
    published_layouts.write_all(out / "downloads")
    for name in {name.split("-")[0]: name for name in NAMES}.values():
        commands, _ = dry_run(name, out)
        assert not any(words[0] in ("hf", "curl", "tar") for words in commands)  # every download has its layout
        for words in commands:
            if words[1:3] == ["-m", "zipfile"]:
                zipfile.main(words[3:])
            elif words[0] == "mv":
                os.rename(*words[1:])
        for flags in flags_of(commands, "prepare_data.py"):
            prepare_data.main(prepare_data.parse_args(flags))
    return {file.stem: pq.read_table(file).to_pylist() for file in out.glob("*.parquet")}


def test_every_published_layout_is_read_completely(converted):
    assert len(converted) == 10 and all(len(rows) == 32 for rows in converted.values())
    for name, rows in converted.items():
        for row in rows:
            (message,) = row["prompt"]
            assert message["content"].count("<image>") == len(row["images"]) >= 1
            assert row["extra_info"]["split"] == name.split("_")[1]


def truths(rows: list[dict]) -> list[str]:
    return [row["reward_model"]["ground_truth"] for row in rows]


def test_truths_have_no_wrapping(converted):
    assert set(truths(converted["geo3k_train"])) == set(published_layouts.GEOMETRY)
    assert set(truths(converted["geoqa_train"])) == set(published_layouts.GEOQA) == set(truths(converted["geoqa_test"]))
    assert set(truths(converted["virl39k_train"])) == set(published_layouts.VIRL39K)
    assert set(truths(converted["clevr_train"])) == set(truths(converted["clevr_test"])) <= set("123456789")
    assert truths(converted["virl39k_test"])[1::2] == ["A"] * 16  # MathVista's choices


def test_other_columns_are_kept(converted):
    rows = converted["virl39k_train"]
    assert {len(row["images"]) for row in rows} == {1, 2}
    expected = {"PassRate_32BTrained": 0.5, "PassRate_7BBase": -1.0, "qid": "Processed-3", "source": "Processed"}
    assert expected.items() <= rows[3]["extra_info"].items()


@pytest.mark.parametrize(("task", "published", "right", "wrong"), [
    ("vqa", "<answer> 5 </answer>", ("5", "five", "5.0"), ("6", "5 or 6")),
    ("geo3k", "<answer> 145° </answer>", ("145°", "145", r"145^\circ"), ("144", "35")),
    ("geo3k", "<answer> 2√{3} </answer>", (r"2\sqrt{3}", "2√3", r"\sqrt{12}"), ("2", "3.46")),
    ("geo3k", "<answer> 5cm </answer>", ("5cm", "5", r"5\text{ cm}"), ("5m", "50")),
    ("geo3k", r"\boxed{B}", ("B", "(B)", r"\text{B}"), ("A", "A, B")),
    ("geo3k", r"\boxed{17^\circ}", ("17", "17°"), ("73°",)),
    ("geo3k", r"\boxed{\frac{3}{4}}", ("0.75", "3/4", r"\frac34"), ("4/3",)),
    ("geo3k", r"\boxed{x=3}", ("3", "x = 3"), ("-3",)),
    ("geo3k", r"\boxed{Yes}", ("Yes", "yes"), ("No",)),
    ("geo3k", r"\boxed{The lion}", ("The lion", "the lion"), ("the tiger",)),
    ("geo3k", r"<think>3 + 4 = 7</think> <answer>7</answer>", ("7",), ("3",)),
])  # fmt: skip
def test_published_truths_are_graded(task, published, right, wrong):
    load_tasks()
    example = SimpleNamespace(ground_truth=unwrap_truth(published), messages=[], extra={}, images=(), uid="0",
                              data_source=task)
    for answers, accuracy in ((right, 1.0), (wrong, 0.0)):
        for answer in answers:
            response = rf"<think>So it is.</think> \boxed{{{answer}}}"
            assert TASKS[task].reward(response, example, "stop")["accuracy"] == accuracy, answer
