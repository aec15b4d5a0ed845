"""benchmarks/gpu.py on a CPU: all of its parts run, and none can hide the others.   pytest tests/test_gpu_bench.py"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import gpu  # noqa: E402


def bench(tmp_path, *flags, code=0):
    out = tmp_path / "gpu.json"
    env = {
        key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")
    }  # its tests are no worker's of ours
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--short", "--json", out, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env=env,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text()), done.stdout.split("\n\n", 1)[1]


def test_scripts_start_with_the_packages_of_the_bare_machine():
    """A GPU that is lent has only gpu.NEEDED: what else a run may use is imported where it is used."""
    hidden = "httpx2 math_verify latex2sympy2_extended sklearn pycountry matplotlib latex2mathml openai vllm".split()
    code = "from transformers import AutoModelForImageTextToText, AutoProcessor; "  # its httpx2 is another httpx there
    code += f"import sys; sys.modules |= dict.fromkeys({hidden}); sys.path.insert(0, {str(ROOT)!r}); "
    code += "import train, eval, demo, merge_lora, prepare_data; train.parse_args('--help'.split())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--model" in done.stdout, done.stderr[-2000:]


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path):
    data, markdown = bench(tmp_path)
    status = {part["part"]: part["status"] for part in data["parts"]}
    errors = [
        (row["case"], row.get("tail", "")[-1500:]) for part in data["parts"] for row in part["rows"] if "error" in row
    ]
    assert status == {1: "ok", 2: "ok", 3: "ok", 4: "ok", 5: "no CUDA"}, errors
    assert (
        data["machine"]["versions"]["torch"] and "no CUDA" in data["machine"]["device"] and "--short" in data["command"]
    )
    tests, runs, head, update, syncs = (part["rows"] for part in data["parts"])
    assert sum(row["passed"] for row in tests) > 15 and all(row["failed"] == 0 for row in tests)
    assert {row["case"] for row in runs} == set(gpu.TOY_RUNS) and all(
        row["grad norm"] > 0 and row["largest dlogp"] < 0.1 for row in runs
    )
    assert (
        all(row["d weight"] < 1e-5 for row in head if "not here" not in row)
        and "cut_cross_entropy" in head[-1]["not here"]
    )
    for size in gpu.SIZES[4].values():  # three ways to the same gradient
        shared, packed, padded = ([row for row in update if row["case"] == case][0] for case in size)
        assert (
            packed["grad norm"]
            == pytest.approx(shared["grad norm"], rel=0.01)
            == pytest.approx(padded["grad norm"], rel=0.01)
        )
        assert (
            shared["computed tokens"] < packed["computed tokens"] < padded["computed tokens"] and shared["tokens/s"] > 0
        )
    assert (
        all(f"{part['part']}. {part['title']}: " in markdown for part in data["parts"])
        and "| 3B shared prefix |" in markdown
    )


def test_what_crashes_or_hangs_is_told_and_the_rest_goes_on(tmp_path):
    data, markdown = bench(tmp_path, "--only", "1,3,5", "--break", "1:crash,5:hang", code=1)
    status = {part["part"]: part["status"] for part in data["parts"]}
    assert status == {1: "2 of 2 failed", 3: "ok", 5: "1 of 1 failed"}
    assert all("exit code -6 (SIGABRT)" in row["error"] for row in data["parts"][0]["rows"])
    assert "hung: stopped after 2 s" in data["parts"][2]["rows"][0]["error"]
    assert "- sdpa: hung" in markdown and "| ours fused loss |" in markdown
    assert "GiB" not in markdown and "nan" not in markdown, "a CPU has no such figures"


def test_a_part_without_its_packages_fails_with_the_remedy(tmp_path, monkeypatch):
    report = gpu.Report(tmp_path / "gpu.json", True)
    parent = gpu.Parent(SimpleNamespace(toy=True, broken=""), report, tmp_path)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name == "pytest" else name)
    monkeypatch.setattr(parent, "run", lambda *_, **__: pytest.fail("started"))
    gpu.run_part(parent, 1, 60.0)
    part = report.data["parts"][0]
    assert part["status"] == "1 of 1 failed"
    remedy = "pip install -c requirements.txt -r requirements-dev.txt, or bring the wheels"
    assert part["rows"][0]["error"] == f"pytest missing: {remedy}"


def test_a_child_that_fails_is_told_with_its_last_error(tmp_path):
    parent = gpu.Parent(SimpleNamespace(toy=True, broken=""), gpu.Report(tmp_path / "gpu.json", True), tmp_path)
    for code, said in {
        "import nothing_here": "exit code 1: ModuleNotFoundError: No module named 'nothing_here'",
        "print('why', flush=True); raise SystemExit(4)": "exit code 4: why",
        "raise SystemExit(3)": "exit code 3",
    }.items():
        assert parent.run([sys.executable, "-c", code], time.monotonic() + 30)[0] == said


def test_too_little_memory_too_little_time_and_half_a_row(tmp_path, monkeypatch):
    """A child that runs out of memory is followed by one that saves some; what it had finished is kept. Time that is
    over cuts."""
    args = SimpleNamespace(toy=False, broken="")
    report = gpu.Report(tmp_path / "gpu.json", False)
    report.data["parts"].append({"part": 4, "rows": []})
    parent, seen = gpu.Parent(args, report, tmp_path), []
    parent.part = 4

    def run(command, until, watch):
        cases, level = command[command.index("--cases") + 1].split(";"), command[command.index("--level") + 1]
        seen.append((cases, level))
        lines = {0: [{"case": "a", "s": float("nan")}, {"oom": "out of memory", "level": 1}], 2: [{"case": "b"}]}[level]
        watch.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"case": "c"')
        return ("", "") if len(seen) > 5 else ("exit code 1", "the end")

    monkeypatch.setattr(parent, "run", run)
    parent.run_cases(["a", "b", "c"], time.monotonic() + 60)
    assert seen == [(["a", "b", "c"], 0), (["b", "c"], 2)]
    assert [row["case"] for row in report.data["parts"][0]["rows"]] == ["a", "b", "c"]
    assert report.data["parts"][0]["rows"][2] == {"case": "c", "error": "exit code 1", "tail": "the end"}
    parent.run_cases(["d"], time.monotonic() - 1)
    rows = json.loads((tmp_path / "gpu.json").read_text())["parts"][0]["rows"]
    assert rows[0] == {"case": "a", "s": None} and rows[3] == {"case": "d", "error": "cut: no time left"}
