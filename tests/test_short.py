"""Every script of benchmarks/ and runs/ runs with --short.   pytest tests/test_short.py"""

import os
import shutil
import sys
from pathlib import Path

import pytest
from warm import run_command

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "runs").glob("*.sh")])
TESTED_ELSEWHERE = {"faults.py": "test_faults.py", "gpu.py": "test_gpu_bench.py", "learning.py": "test_learning.py",
                    "looking.py": "test_shortcut.py"}
DEMOS = {"look_closer.sh": "seed0", "tasks.sh": "shapes/seed0", "demo_seeds.sh": "demo_seed0",
         "distillation.sh": "demo"}  # folder of its demo
EXTRA_FLAGS = {"vs_trl.py": ["--only", "speed"]}  # test_vs_trl.py tests its other part


def run(script: Path, out: Path) -> str:
    python = [sys.executable] if script.suffix == ".py" else ["bash"]
    flags = [] if script.name == "size.py" else ["--short", *EXTRA_FLAGS.get(script.name, [])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "OUT": str(out), "PYTHON": sys.executable}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = run_command([*python, script, *flags], env=env, timeout=1800)
    logs = "".join(log.read_text()[-2000:] for log in sorted(out.rglob("*.log")))
    assert done.returncode == 0, f"{script.name}: {done.stdout[-2000:]}{done.stderr[-3000:]}{logs}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if s.name not in {*TESTED_ELSEWHERE, *DEMOS}], ids=lambda s: s.name
)
def test_script_runs_with_short(script, tmp_path):
    assert run(script, tmp_path).strip()


@pytest.mark.slow
def test_scripts_that_use_the_demo_run(tmp_path):
    """Only look_closer.sh runs the demo; the others find its copy where they would have run it."""
    for name, place in DEMOS.items():
        out = tmp_path / name
        if name != "look_closer.sh":
            shutil.copytree(tmp_path / "look_closer.sh" / "seed0", out / place)
        assert "seed" in run(ROOT / "runs" / name, out)


@pytest.mark.parametrize("name", TESTED_ELSEWHERE)
def test_the_remaining_scripts_have_their_own_tests(name):
    text = (ROOT / "tests" / TESTED_ELSEWHERE[name]).read_text()
    assert f'"benchmarks/{name}"' in text and '"--short"' in text and (ROOT / "benchmarks" / name).exists()
