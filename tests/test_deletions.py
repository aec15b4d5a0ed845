"""What a fork may delete: a copy without it trains and evaluates, and a flag that needs it is refused by name.

pytest tests/test_deletions.py"""

import shutil
import subprocess
import sys

import pytest
from test_train import ROOT, flags, write_parquet

from errors import UserError, in_copy, plug_in
from tasks.shapes import shapes_rows

SERVERS = [f"engines/{name}.py" for name in "server client vllm_client sglang_client sync worker local serve".split()]
VLLM = [f"engines/{name}.py" for name in "vllm vllm_cpu vllm_weights vllm_ban".split()]
TASKS = [f"tasks/{path.name}" for path in (ROOT / "tasks").glob("*.py") if path.stem not in ("__init__", "shapes")]

# What is deleted, and flags that need it with the file that is then named
DELETIONS = {
    "envs": (["envs"], {"--env calculator": "envs/_load"}),
    "servers": (SERVERS, {"--rollout server --servers http://127.0.0.1:1": "engines/server"}),
    "vllm": (VLLM, {"--rollout vllm": "engines/vllm"}),
    "judge": (["rewards/judge.py", "rewards/judge.txt"], {"--judge-url http://127.0.0.1:1": "rewards/judge"}),
    "curriculum": (["rewards/curriculum.py"], {"--curriculum stages.toml": "rewards/curriculum"}),
    "pages": (["report/page"], {"--track tensorboard": "report/page/trackers"}),
    "tasks": (TASKS, {"--env calculator": "--env calculator builds on a file"}),
    "tensor parallelism": (["parallel/tensor_parallel.py"], {}),
    "sampling ahead": (["engines/ahead.py"], {}),
    "sources": ([f"sources/{name}.py" for name in ("fetch", "remote", "text", "look")], {}),
}
EVERYTHING = [name for names, _ in DELETIONS.values() for name in names] + ["engines/common.py"]


def copy_without(names, folder):
    """A copy of the product, what is named deleted."""
    skipped = (".*", "runs", "benchmarks", "tests", "docs", "assets", "demo", "out", "__pycache__")
    copy = shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(*skipped))
    for name in names:
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=name.endswith(".txt"))
    return copy


def check(names, refused, toys, tmp_path):
    copy, out = copy_without(names, tmp_path), tmp_path / "run"
    data = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0))

    def run(*command):
        command = [sys.executable, *map(str, command)]
        return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600)

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
    watched = run("eval.py", "--watch", tmp_path / "run", "--out", tmp_path / "curves")
    assert "--watch: report/page/plots.py is not in this copy; leave the flag out" in watched.stderr


@pytest.mark.slow
@pytest.mark.parametrize("what", DELETIONS)
def test_a_copy_without_it_trains_and_evaluates(what, toys, tmp_path):
    train, evaluated, run = check(*DELETIONS[what], toys, tmp_path)
    if what == "pages":
        check_no_pages(train, evaluated, run, tmp_path)
    if what == "tensor parallelism":
        code = "from parallel.sharding import ParallelConfig; ParallelConfig(tp=2).check(2, None)"
        assert "--tp 2: parallel/tensor_parallel.py is not in this copy; leave the flag out" in run("-c", code).stderr


def test_a_copy_without_all_of_it_trains_and_evaluates(toys, tmp_path):
    refused = {flag: file for _, flags in DELETIONS.values() for flag, file in flags.items()}
    refused["--env calculator"] = "envs/_load"
    picked = ["--env calculator", "--rollout vllm"]  # one that is asked for at once, and one that comes late
    check_no_pages(*check(EVERYTHING, {flag: refused[flag] for flag in picked}, toys, tmp_path), tmp_path)


def test_what_can_be_deleted_is_imported_by_name():
    assert in_copy("engines.hf") and not in_copy("report.nothing.plots")
    assert plug_in("engines.hf", "--rollout hf").__name__ == "engines.hf"
    with pytest.raises(UserError, match="--flag: report/nothing/plots.py is not in this copy; leave the flag out"):
        plug_in("report.nothing.plots", "--flag")
