"""Parts that a fork may delete: a copy without them trains and evaluates, and flags that need them are refused.

pytest tests/test_deletions.py"""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import DELETABLE, complete
from test_train import ROOT, flags, write_parquet
from warm import run_command

from errors import UserError, in_copy, plug_in
from tasks.shapes import shapes_rows

pytestmark = complete  # DELETABLE does not describe a copy that lacks parts

# Flags that need a deleted part, with the file that the error names
REFUSED = {
    "algorithms": {},
    "envs": {"--env look_closer": "envs/_factory"},
    "servers": {"--rollout server --servers http://127.0.0.1:1": "engines/server"},
    "vllm": {"--rollout vllm": "engines/vllm"},
    "judge": {"--judge-url http://127.0.0.1:1": "rewards/judge"},
    "curriculum": {"--curriculum stages.toml": "rewards/curriculum"},
    "pages": {"--report-to tensorboard": "report/page/trackers"},
    "tasks": {"--env look_closer": "--env look_closer needs a file"},
    "tensor parallelism": {},
    "sampling ahead": {"--async-steps 1": "engines/ahead"},
    "replayed experts": {"--replay-experts": "layers/experts"},
    "plan": {"--plan": "parallel/plan"},
    "sources": {},
}
EVERYTHING = [name for names in DELETABLE.values() for name in names] + ["engines/common.py"]
NOT_COPIED = (".venv*", ".git", ".*_cache", "demo", "out", "__pycache__")


def copy_without(names, folder):
    """Copy the repository, without some files and folders."""
    copy = shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(*NOT_COPIED))
    for name in names:
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=name.endswith(".txt"))
    return copy


def check_copy(names, refused, toys, tmp_path):
    copy, out = copy_without(names, tmp_path), tmp_path / "run"
    data = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0))

    def run(*command):
        return run_command([sys.executable, *command], copy)

    train = ["train.py", *flags(toys["qwen2_5_vl"], data, out, "--steps", 2, "--no-self-test")]
    for flag, file in refused.items():
        done = run(*train, *flag.split())
        assert done.returncode == 1 and file in done.stderr and " is not in this copy" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and not (out / "metrics.jsonl").exists()
    done = run(*train, "--eval-data", data, "--eval-every", 2, "--save-every", 2)
    assert done.returncode == 0, done.stderr
    assert len((out / "metrics.jsonl").read_text().splitlines()) >= 2
    evaluated = run("eval.py", out, "--out", tmp_path / "eval", "--limit", 4, "--reward", "default")
    assert evaluated.returncode == 0 and (tmp_path / "eval" / "eval.json").exists(), evaluated.stderr
    return done.stdout, evaluated.stdout, run


def check_no_pages(train, evaluated, run, tmp_path):
    assert train.count("no pages and no curves are written: report/page/ is not in this copy") == 1
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "run.json", "summary.json", "rollouts", "eval"} <= files
    assert not {"report.html", "curves.png"} & files
    assert {path.suffix for path in (tmp_path / "run" / "rollouts").iterdir()} == {".jsonl"}
    assert "report/page/ is not in this copy" in evaluated and "report.html" not in evaluated
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == ["eval.json", "predictions.jsonl"]
    watched = run("eval.py", "--plot-runs", tmp_path / "run", "--out", tmp_path / "curves")
    assert "--plot-runs: report/page/plots.py is not in this copy; leave the flag out" in watched.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", DELETABLE)
def test_a_copy_without_one_part_trains_and_evaluates(part, toys, tmp_path):
    train, evaluated, run = check_copy(DELETABLE[part], REFUSED[part], toys, tmp_path)
    if part == "pages":
        check_no_pages(train, evaluated, run, tmp_path)
    if part == "tensor parallelism":
        code = "from parallel.sharding import ParallelConfig; ParallelConfig(tp=2).check(2, None)"
        assert "--tp 2: parallel/tensor_parallel.py is not in this copy; leave the flag out" in run("-c", code).stderr


@pytest.mark.slow
def test_a_copy_without_all_parts_trains_and_evaluates(toys, tmp_path):
    refused = REFUSED["envs"] | REFUSED["vllm"]  # a flag of the training loop, and one of the engine
    check_no_pages(*check_copy(EVERYTHING, refused, toys, tmp_path), tmp_path)


@pytest.mark.slow
def test_the_demo_and_the_remaining_tests_pass_without_all_parts(tmp_path):
    """EVERY=1 runs all remaining tests, a quarter of an hour on one core; the default is every fourth."""
    copy, out = copy_without(EVERYTHING, tmp_path), tmp_path / "demo"
    done = run_command([sys.executable, "demo.py", "run", "--short", "--out", out], copy, timeout=1800)
    assert done.returncode == 0 and (out / "summary.json").exists(), done.stderr[-3000:]
    selected = "not slow and not vllm and not sglang and not cuda_paths and not vllm_cuda"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--show-capture=no"]
    listed = subprocess.run([*command, "-m", selected, "--collect-only"], cwd=copy, capture_output=True, text=True)
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    every = int(os.environ.get("EVERY", 4))
    assert listed.returncode == 0 and len(names) > 1000, listed.stdout[-3000:]
    (tmp_path / "names").write_text("\n".join(names[::every]))
    command += ["--basetemp", tmp_path / "tests", f"@{tmp_path}/names"]
    tests = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert tests.returncode == 0, tests.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", tests.stdout)[-1]) > 800 / every


def test_deletable_modules_are_imported_by_name():
    assert in_copy("engines.hf") and not in_copy("report.nothing.plots")
    assert plug_in("engines.hf", "--rollout hf").__name__ == "engines.hf"
    with pytest.raises(UserError, match="--flag: report/nothing/plots.py is not in this copy; leave the flag out"):
        plug_in("report.nothing.plots", "--flag")
