"""What the documents promise about the repository.   pytest tests/test_house.py"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_train import ROOT, flags, rows, run, write_parquet

import train

SCRIPTS = sorted(p.name for p in ROOT.glob("*.py"))
README = (ROOT / "README.md").read_text()


def imports(name):
    tree = ast.parse((ROOT / name).read_text())
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
    return {f"{n}.py" for n in names} & set(SCRIPTS)


def test_readme_maps_every_script():
    missing = [name for name in SCRIPTS if f"`{name}`" not in README]
    assert not missing and len(SCRIPTS) >= 11
    assert len(README.splitlines()) <= 250


def test_imports_run_one_way():
    top = {"train.py", "eval.py", "merge_lora.py", "demo.py"}
    middle = {"prepare_data.py", "rollout.py", "reward.py", "grpo.py", "model.py", "sharding.py"}
    for name in middle | {"kernels.py", "utils.py"}:
        # demo is imported where `prepare_data.py shapes` draws, and model where --inspect counts tokens
        allowed = {"demo.py", "model.py"} if name == "prepare_data.py" else set()
        assert not imports(name) & top - allowed, name
    for name in ("grpo.py", "reward.py", "kernels.py"):
        assert not imports(name) & {"model.py", "sharding.py", "rollout.py"}
    assert "sharding.py" not in imports("model.py") | imports("rollout.py")
    assert not imports("errors.py") and imports("kernels.py") == imports("utils.py") == {"errors.py"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_importing_a_script_does_nothing(name, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.dont_write_bytecode = True; import {name[:-3]}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "" and not list(tmp_path.iterdir()), done.stderr


def test_every_flag_of_train_has_help_and_is_used():
    source = (ROOT / "train.py").read_text()
    named = re.findall(r'add_argument\(\s*"--([a-z-]+)"', source)
    assert len(named) == len(set(named)) >= 35
    for flag in named:
        name = flag.replace("-", "_")
        assert re.search(rf"args\.{name}\b(?! *=[^=])", source), f"--{flag} is never read"
    with pytest.raises(SystemExit):
        train.parse_args(["--help"])


def test_every_metric_is_documented(toys, tmp_path):
    from demo import shapes_rows

    data = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0))
    common = flags(toys["qwen2_5_vl"], data, tmp_path / "run", "--eval-data", data, "--steps", 1)
    run([sys.executable, "train.py", *common[:6], *common[8:]])  # with the task's own reward
    more = "--algo ppo --critic separate --kl-coef 0.1 --sample-rounds 2 --target-kl 1 --truncated penalise".split()
    run([sys.executable, "train.py", *flags(toys["qwen2_5_vl"], data, tmp_path / "more", "--steps", 1, *more)])
    keys = {key for name in ("run", "more") for row in rows(tmp_path / name) for key in row}
    documented = set(re.findall(r"`([a-z_]+(?:/[a-zA-Z_*<>@]+)*)`", (ROOT / "docs" / "metrics.md").read_text()))
    patterns = [re.escape(d).replace(r"\*", r"[^/]+").replace(r"<type>", r"[^/]+") for d in documented]
    missing = sorted(k for k in keys if not any(re.fullmatch(p, k) for p in patterns))
    assert not missing and len(keys) > 35


def test_no_large_or_binary_weight_files_are_tracked():
    if (ROOT / ".git").exists():
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    else:  # an unpacked archive
        tracked = [str(p.relative_to(ROOT)) for folder in ("tests", "assets", "runs", "benchmarks") for p in (ROOT / folder).rglob("*")]
        tracked += SCRIPTS
    assert "train.py" in tracked
    for name in tracked:
        path = Path(ROOT / name)
        assert not path.exists() or path.stat().st_size < 1_000_000, name
        assert path.suffix not in (".safetensors", ".parquet", ".pt", ".bin"), name
