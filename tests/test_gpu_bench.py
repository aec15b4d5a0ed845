"""benchmarks/gpu.py on a CPU: all parts run, and a part that fails hides no other.   pytest tests/test_gpu_bench.py"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import gpu  # noqa: E402
import memory  # noqa: E402

MACHINE = {"device": "H100", "versions": {"torch": "2.11.0"}}


def run(*flags) -> subprocess.CompletedProcess:
    """Run gpu.py as if the machine had no GPU."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "benchmarks/gpu.py", *map(str, flags)]
    env |= {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, env=env)


def bench(tmp_path, *flags, code=0) -> tuple[dict, str]:
    out = tmp_path / "gpu.json"
    done = run("--short", "--json", out, *flags)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text()), done.stdout.split("\n\n", 1)[1]


def make_parent(tmp_path, toy=True, machine=MACHINE) -> gpu.Parent:
    parent = gpu.Parent(SimpleNamespace(toy=toy, profile=None, broken=""), tmp_path)
    parent.report = gpu.Report(tmp_path / "gpu.json", toy, machine)
    return parent


def test_scripts_start_with_the_packages_of_the_bare_machine():
    """The bare GPU machine has only the packages of gpu.NEEDED; all others are imported where they are used."""
    hidden = "httpx2 math_verify latex2sympy2_extended sklearn pycountry matplotlib openai vllm".split()
    code = "from transformers import AutoModelForImageTextToText, AutoProcessor; "  # it needs httpx2 only here
    code += f"import sys; sys.modules |= dict.fromkeys({hidden}); sys.path.insert(0, {str(ROOT)!r}); "
    code += "import train, eval, demo, merge_lora, prepare_data; train.parse_args('--help'.split())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--model" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("version, known", [("2.11.0", False), ("2.13.0+cu130", True), ("2.14.1", True)])
def test_torch_gets_only_allocator_options_that_it_knows(version, known):
    """torch 2.11, which the bare machine has, ends every GPU process that gets an unknown allocator option."""
    code = f"import torch; torch.__version__ = type(torch.__version__)({version!r}); "
    code += "import utils; print(utils.ALLOC_CONF)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "expandable_segments:True" in done.stdout and ("pinned_max_round" in done.stdout) == known, done.stderr


def test_without_a_gpu_it_ends_with_a_one_line_error(tmp_path):
    done = run("--json", tmp_path / "gpu.json")
    assert done.returncode == 1 and not done.stdout and not any(tmp_path.iterdir())
    assert re.fullmatch(r"error: there is no GPU to measure \(no CUDA device, torch .*\); --short .*\n", done.stderr)


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path):
    data, markdown = bench(tmp_path, "--minutes", 25)  # enough beside other work
    status = {part["name"]: part["status"] for part in data["parts"]}
    rows = [row for part in data["parts"] for row in part["rows"]]
    bad = [(row["case"], row.get("tail", "")[-1500:]) for row in rows if "error" in row]
    assert status == {part.name: "ok" for part in gpu.PARTS} | dict.fromkeys(("memory", "waits"), "no CUDA"), bad
    assert data["machine"]["versions"]["torch"] and "no CUDA" in data["machine"]["device"]
    assert "--short" in data["command"]
    start, correct, head, update, _, sync, _ = (part["rows"] for part in data["parts"])
    assert [row["case"] for row in start] == ["random model", "prepare_data.py", "train.py", "resumed"]
    tests = [row for row in correct if "passed" in row]
    assert sum(row["passed"] for row in tests) > 10 and all(row["failed"] == 0 for row in tests)
    runs = [row for row in start + correct if "grad norm" in row]
    assert {row["case"] for row in runs} == {"train.py", "resumed", *gpu.SHORT_RUNS}
    assert all(row["grad norm"] > 0 and row["largest dlogp"] < 0.1 for row in runs)
    assert all(row["d weight"] < 1e-5 for row in head if "not here" not in row)
    assert "cut_cross_entropy" in head[-1]["not here"]
    shared, compiled, packed = update
    assert [row["case"] for row in update] == list(gpu.UPDATES[-1]), "the cases compute the same gradient in two ways"
    assert shared["grad norm"] == pytest.approx(packed["grad norm"], rel=0.01) == compiled["grad norm"]
    assert shared["computed tokens"] < packed["computed tokens"] and shared["tokens/s"] > 0
    assert sync[0]["GiB"] > 0 and sync[0]["s"] <= sync[0]["slowest, s"]
    assert all(f"{part['part']}. {part['title']}: " in markdown for part in data["parts"])
    assert "| 7B LoRA packed, compiled |" in markdown


def test_a_case_that_crashes_or_hangs_is_a_row_and_the_other_parts_run(tmp_path):
    data, markdown = bench(tmp_path, "--only", "waits,3,update", "--break", "update:crash,waits:hang", code=1)
    status = {part["name"]: part["status"] for part in data["parts"]}
    assert list(status.items()) == [("head", "ok"), ("update", "3 of 3 failed"), ("waits", "1 of 1 failed")]
    assert all("exit code -6 (SIGABRT)" in row["error"] for row in data["parts"][1]["rows"])
    [row] = data["parts"][2]["rows"]
    assert "hung: stopped after 2 s" in row["error"] and "Current thread" in row["tail"], "the row shows where it hung"
    assert "- sdpa, error: hung" in markdown and "| ours fused loss |" in markdown
    assert "GiB" not in markdown and "nan" not in markdown, "there are no memory figures on a CPU"


def test_parts_are_chosen_by_name_or_number():
    names = [part.name for part in gpu.PARTS]
    assert names == "start correct head update memory sync waits".split(), "the most important parts come first"
    assert [part.name for part in gpu.choose("waits,1,head")] == ["start", "head", "waits"]
    assert [part.name for part in gpu.choose("")] == names
    with pytest.raises(SystemExit, match="--only speed: no such part; choose from 1 start, 2 correct"):
        gpu.choose("1,speed")
    assert sum(part.seconds for part in gpu.PARTS) < 14 * 60, "all parts fit into one call"


def test_a_part_gets_the_time_that_the_parts_before_it_left(tmp_path, monkeypatch):
    seconds = []
    parts = [gpu.Part(str(i), "", 100, lambda p, until: seconds.append(until - time.monotonic())) for i in range(3)]
    monkeypatch.setattr(gpu, "PARTS", tuple(parts))
    monkeypatch.setattr(gpu, "machine", lambda p: MACHINE | {"memory_gib": 80.0})
    args = SimpleNamespace(toy=False, profile=None, broken="", only="", minutes=6.0, json=tmp_path / "gpu.json")
    with pytest.raises(SystemExit, match=r"0 \(cut\), 1 \(cut\), 2 \(cut\)"):  # no part wrote a row
        gpu.main(args)
    assert seconds == pytest.approx([160, 260, 360], abs=5)
    args.only, args.minutes = "2", 1.0
    with pytest.raises(SystemExit):
        gpu.main(args)
    assert seconds[3] == pytest.approx(60, abs=5)
    args.only, args.minutes = "", 2.0  # less than the parts ask for: each gets its share
    with pytest.raises(SystemExit):
        gpu.main(args)
    assert seconds[4:] == pytest.approx([40, 60, 120], abs=5)


def test_parts_of_earlier_calls_are_kept_on_the_same_machine(tmp_path):
    def call(only: str, machine: dict = MACHINE) -> list[tuple[str, int]]:
        report = gpu.Report(tmp_path / "gpu.json", False, machine)
        report.keep_earlier(gpu.choose(only))
        for part in gpu.choose(only):
            report.begin(part)
            report.add({"case": "a", "s": float("nan")})
        data = json.loads((tmp_path / "gpu.json").read_text())
        return [(part["name"], len(part["rows"])) for part in data["parts"]]

    assert call("head,waits") == [("head", 1), ("waits", 1)]
    assert call("start,head") == [("start", 1), ("head", 1), ("waits", 1)]
    assert call("head", MACHINE | {"device": "H200"}) == [("head", 1)]
    assert len(json.loads((tmp_path / "gpu.json.old").read_text())["parts"]) == 3


def test_readmes_flags_and_the_memory_table_are_read():
    flags = gpu.readme_flags()
    assert flags[:2] == ["--model", "Qwen/Qwen2.5-VL-7B-Instruct"] and {"--steps", "--save-every"} < {*flags}
    for row in memory.ROWS:
        if row.name in gpu.MEMORY:
            computed = gpu.computed_memory(row.name)
            assert 0 < computed["at rest"] < computed["peak"] < computed["reserved"] < 80
    assert {*gpu.MEMORY} < {row.name for row in memory.ROWS} and memory.TOY.name == gpu.TOY_MEMORY


def test_each_gpu_test_is_selected_once():
    names = re.findall(r"^def (test_\w+)", (ROOT / "tests/test_gpu.py").read_text(), re.M)
    chosen = [words.split(" or ") for file, words in gpu.TESTS.values() if file == "tests/test_gpu.py"]
    for name in names:
        assert sum(any(word in name for word in words) for words in chosen) == 1, name
    assert len(names) >= 6


def test_a_part_without_its_packages_fails_with_the_command_to_install_them(tmp_path, monkeypatch):
    parent = make_parent(tmp_path)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name == "pytest" else name)
    monkeypatch.setattr(parent, "run", lambda *_, **__: pytest.fail("started"))
    gpu.run_part(parent, gpu.choose("correct")[0], 60.0)
    [part] = parent.report.data["parts"]
    assert part["status"] == "1 of 1 failed"
    remedy = "pip install -c requirements.txt -r requirements-dev.txt, or bring the wheels"
    assert part["rows"][0]["error"] == f"pytest missing: {remedy}"


def test_a_child_that_fails_is_reported_with_its_last_error(tmp_path):
    parent = make_parent(tmp_path)
    torchrun = "x.ChildFailedError: "
    for code, error in {
        "import nothing_here": "exit code 1: ModuleNotFoundError: No module named 'nothing_here'",
        "print('why', flush=True); raise SystemExit(4)": "exit code 4: why",
        f"print('error: --x: no', {torchrun!r}, sep='\\n', flush=True); exit(1)": "exit code 1: error: --x: no",
        "raise SystemExit(3)": "exit code 3",
    }.items():
        assert parent.run([sys.executable, "-c", code], time.monotonic() + 30)[0] == error


def test_rows_survive_running_out_of_memory_and_time_and_half_a_row_is_ignored(tmp_path, monkeypatch):
    """After a child runs out of memory, its finished rows are kept and another child runs the remaining cases in less
    memory. Cases for which no time is left are marked as cut."""
    parent, calls = make_parent(tmp_path, toy=False), []
    parent.part = "update"
    parent.report.begin(gpu.choose("update")[0])

    def run(command, until, watch):
        cases, level = command[command.index("--cases") + 1].split(";"), command[command.index("--level") + 1]
        calls.append((cases, level))
        lines = {0: [{"case": "a", "s": float("nan")}, {"oom": "out of memory", "level": 1}], 2: [{"case": "b"}]}[level]
        watch.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"case": "c"')
        return ("", "") if len(calls) > 5 else ("exit code 1", "the end")

    monkeypatch.setattr(parent, "run", run)
    parent.run_cases(["a", "b", "c"], time.monotonic() + 60)
    assert calls == [(["a", "b", "c"], 0), (["b", "c"], 2)]
    [part] = parent.report.data["parts"]
    assert [row["case"] for row in part["rows"]] == ["a", "b", "c"]
    assert part["rows"][2] == {"case": "c", "error": "exit code 1", "tail": "the end"}
    parent.run_cases(["d"], time.monotonic() - 1)
    rows = json.loads((tmp_path / "gpu.json").read_text())["parts"][0]["rows"]
    assert rows[0] == {"case": "a", "s": None} and rows[3] == {"case": "d", "error": "cut: no time left"}
