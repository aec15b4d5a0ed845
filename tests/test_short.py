"""Every script of benchmarks/ and runs/ still runs, with --short.   pytest tests/test_short.py"""

import os
import shutil
import sys
from pathlib import Path

import pytest
from warm import run_command

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "runs").glob("*.sh")])
ELSEWHERE = {"faults.py": "test_faults.py", "gpu.py": "test_gpu_bench.py", "learning.py": "test_learning.py"}
DEMOS = {"look_closer.sh": "seed0", "tasks.sh": "shapes/seed0", "demo_seeds.sh": "demo_seed0"}  # where its demo is
MORE = {"vs_trl.py": ["--only", "speed"]}  # of its other part see test_vs_trl.py


def run(script: Path, out: Path) -> str:
    python = [sys.executable] if script.suffix == ".py" else ["bash"]
    flags = [] if script.name == "size.py" else ["--short", *MORE.get(script.name, [])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "OUT": str(out), "PYTHON": sys.executable}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = run_command([*python, script, *flags], env=env, timeout=500)
    logs = "".join(log.read_text()[-2000:] for log in sorted(out.rglob("*.log")))
    assert done.returncode == 0, f"{script.name}: {done.stdout[-2000:]}{done.stderr[-3000:]}{logs}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.name not in {*ELSEWHERE, *DEMOS}], ids=lambda s: s.name)
def test_it_runs(script, tmp_path):
    assert run(script, tmp_path).strip()


@pytest.mark.slow
def test_the_scripts_of_demos_run(tmp_path):
    """The demo itself is run once: the others find it where they would have made it."""
    for name, place in DEMOS.items():
        out = tmp_path / name
        if name != "look_closer.sh":
            shutil.copytree(tmp_path / "look_closer.sh" / "seed0", out / place)
        assert "seed" in run(ROOT / "runs" / name, out)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_tests_run_the_others(name):
    text = (ROOT / "tests" / ELSEWHERE[name]).read_text()
    assert f'"benchmarks/{name}"' in text and '"--short"' in text and (ROOT / "benchmarks" / name).exists()
