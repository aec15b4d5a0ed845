"""A copy of the repository without report/page/: training and evaluation go on, and what needs it is refused by name.

pytest tests/test_report_deleted.py"""

import shutil
import subprocess
import sys

import pytest
from test_train import ROOT, flags, write_parquet

from errors import UserError, in_copy, plug_in
from tasks.shapes import shapes_rows


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository without report/page/."""
    copy = tmp_path_factory.mktemp("copy") / "copy"
    skipped = shutil.ignore_patterns(".*", "runs", "benchmarks", "tests", "assets", "demo", "__pycache__", "page")
    return shutil.copytree(ROOT, copy, ignore=skipped)


def test_a_copy_without_pages_trains_and_evaluates(copy, toys, tmp_path):
    data, out = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0)), tmp_path / "run"

    def run(*command):
        command = [sys.executable, *map(str, command)]
        return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600)

    train = ["train.py", *flags(toys["qwen2_5_vl"], data, out, "--steps", 2, "--no-self-test")]
    refused = run(*train, "--track", "tensorboard")
    told = "--track: report/page/trackers.py is not in this copy; leave the flag out"
    assert refused.returncode == 1 and told in refused.stderr and not (out / "metrics.jsonl").exists()
    done = run(*train, "--eval-data", data, "--eval-every", 2, "--save-every", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no pages and no curves are written: report/page/ is not in this copy") == 1
    names = {path.name for path in out.iterdir()}
    assert {"metrics.jsonl", "run.json", "summary.json", "rollouts", "eval"} <= names
    assert not {"report.html", "curves.png"} & names and {p.suffix for p in (out / "rollouts").iterdir()} == {".jsonl"}
    done = run("eval.py", out, "--out", tmp_path / "eval", "--limit", 4, "--reward", "default")
    assert done.returncode == 0, done.stderr
    assert "report/page/ is not in this copy" in done.stdout and "report.html" not in done.stdout
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == ["eval.json", "predictions.jsonl"]
    watched = run("eval.py", "--watch", out, "--out", tmp_path / "curves")
    assert "--watch: report/page/plots.py is not in this copy; leave the flag out" in watched.stderr


def test_what_can_be_deleted_is_imported_by_name():
    assert in_copy("report.page.plots") and not in_copy("report.nothing.plots")
    assert plug_in("report.page.plots", "--watch").__name__ == "report.page.plots"
    with pytest.raises(UserError, match="--flag: report/nothing/plots.py is not in this copy; leave the flag out"):
        plug_in("report.nothing.plots", "--flag")
