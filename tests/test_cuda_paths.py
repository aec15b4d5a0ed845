"""Tests of the CUDA code on a GPU that does not exist (tests/null_gpu).   make test-cuda-paths

Needs torch's build for CUDA, gcc and nm. This process has no GPU; every test starts children that have a null GPU. Its
kernels do nothing; the CPU computes the values (null_gpu/values.py), except those of large tensors if a limit is set.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
sys.path.append(str(ROOT / "tests"))
import gpu  # noqa: E402
from null_gpu.build import HERE as NULL_GPU  # noqa: E402
from null_gpu.build import environment  # noqa: E402

pytestmark = pytest.mark.cuda_paths
MORE_RUNS = {
    "float32": "--attn flex --kernel triton --dtype float32",
    "Qwen2-VL": "--attn flex --family qwen2_vl",
    "Qwen3-VL MoE": "--attn flex --family qwen3_vl_moe",
    "Qwen3.5 MoE": "--attn flex --family qwen3_5_moe",
    "tower's LoRA": "--attn flex --lora-rank 4 --train-vision tower",
    "checkpointed MoE": "--attn flex --gradient-checkpointing --family qwen3_vl_moe",
    "offloaded reference": "--attn flex --algo ppo --algo-args critic=separate --kl-coef 0.1 --offload reference",
}
# the runs in CI: flex and flash attention, fp32 and bf16, and a separate critic
QUICK = ("float32", "flash, triton", "PPO, separate critic")


@pytest.fixture(scope="session")
def null_gpu() -> dict[str, str]:
    """Return the environment of a process on the null GPU, with values."""
    if torch.version.cuda is None:
        pytest.skip("this is a CPU build of torch; run make test-cuda-paths, which installs the build for CUDA")
    assert environment()["LD_PRELOAD"], "the null GPU is not built; run python tests/null_gpu/build.py"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k != "TRITON_INTERPRET"}
    return inherited | environment() | {"PYTHONPATH": str(ROOT / "tests/null_gpu/site")}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Return a folder with toys of all families, images and a reward."""
    folder = tmp_path_factory.mktemp("toys")
    gpu.make_toys(folder, *"qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe".split())
    return folder


def run(env: dict[str, str], *command) -> str:
    """Run Python with these arguments; return what it printed."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-4000:]}"
    return done.stdout


def train(env: dict[str, str], folder: Path, out: Path, flags: str) -> list[dict]:
    """Run train.py once for each part of the flags, written as in gpu.RUNS; return its rows of metrics."""
    family, flags = gpu.split_family(flags)
    for part in flags.split(" / "):
        words = f"{gpu.BASE} --reward-workers 0 {part}".split()
        run(env, ROOT / "train.py", *gpu.toy_data(folder, family), "--out", out, *words)
    return [row for row in gpu.read_rows(out / "metrics.jsonl") if "policy/grad_norm" in row]


RUNS = gpu.RUNS | MORE_RUNS


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in RUNS])
def test_training_is_as_on_a_cpu(null_gpu, folder, tmp_path, name):
    """In fp32 the first step has the same samples and metrics on GPU and CPU. In bf16 it cannot be compared: rounding,
    which differs between CPUs, changes samples. But there too, trainer and engine give samples the same probabilities.
    """
    rows = train(null_gpu, folder, tmp_path / "gpu", RUNS[name])
    assert len(rows) == 3 and all(0 < row["policy/grad_norm"] < 100 for row in rows)
    assert all(row["mismatch/max_abs_logprob_diff"] < 0.1 for row in rows)
    first_flags = RUNS[name].partition(" / ")[0].replace("flash", "flex")  # flash has no fp32
    first_step = f"{first_flags} --dtype float32 --steps 1"
    [gpu_row] = train(null_gpu, folder, tmp_path / "gpu, fp32", first_step)
    cpu_flags = re.sub(r"--offload \w+", "", first_step.replace("flex", "sdpa").replace("triton", "torch"))
    [cpu_row] = train(os.environ | {"CUDA_VISIBLE_DEVICES": ""}, folder, tmp_path / "cpu", cpu_flags)
    for metric in ("policy/grad_norm", "policy/entropy", "response/tokens", "reward/mean"):
        assert gpu_row[metric] == pytest.approx(cpu_row[metric], rel=1e-3), metric


@pytest.mark.slow
def test_evaluation_and_merging(null_gpu, folder, tmp_path):
    """A run with LoRA adapters is evaluated against a baseline, then merged."""
    train(null_gpu, folder, tmp_path / "run", RUNS["LoRA with KL"])
    toy, reward = folder / "qwen2_5_vl", f"{folder / 'reward.py'}:score"
    flags = ["--data", folder / "train.parquet", "--limit", 4, "--rollout", "hf", "--reward", reward]
    run(null_gpu, ROOT / "eval.py", tmp_path / "run", *flags, "--out", tmp_path / "eval", "--baseline", toy)
    summary = json.loads((tmp_path / "eval/eval.json").read_text())
    assert summary["n"] == 4 and summary["baselines"][0]["n"] == 4
    run(null_gpu, ROOT / "merge_lora.py", tmp_path / "run", "--out", tmp_path / "merged")
    assert (tmp_path / "merged/model.safetensors").stat().st_size > 100_000


@pytest.mark.slow
def test_episodes(null_gpu, folder, tmp_path):
    flags = "--attn flex --env look_closer --max-turns 2 --max-prompt-tokens 300 --micro-tokens 1600"
    rows = train(null_gpu, folder, tmp_path / "run", flags)
    assert len(rows) == 3 and all(row["policy/grad_norm"] > 0 for row in rows)


def test_attention_compiles_twice_for_all_lengths(null_gpu):
    """It compiles with and without gradients, and again if adapters leave the first layer's keys without gradients."""
    limited = null_gpu | {"NULL_GPU_VALUES_MIB": "16"}
    counts = json.loads(run(limited, NULL_GPU / "check_graphs.py").splitlines()[-1])
    assert counts["graphs"][0] <= 2 and max(counts["graphs"]) <= 3 and counts["with LoRA"] <= max(counts["graphs"]) + 1
    # At 65,536 tokens: 2.4 GiB, of which 1 GiB are repeated key heads and their gradients. A mask of tokens by tokens
    # would take 40 GiB.
    assert counts["GiB"] < 3


@pytest.mark.slow
def test_kernels_compile_and_launch_at_the_shapes_of_models(null_gpu):
    limited = null_gpu | {"NULL_GPU_VALUES_MIB": "16"}
    memory = json.loads(run(limited, NULL_GPU / "check_kernels.py").splitlines()[-1])
    assert {"_statistics_kernel", "_gradient_kernel"} <= memory.keys() and all(memory.values())
    assert all(0 < n_bytes <= 232_448 for kernel in memory.values() for n_bytes in kernel)


def test_memory_is_allocated_in_segments_that_grow(null_gpu):
    code = "import utils, torch, ctypes; utils.setup_distributed(); x = torch.zeros(1000, device='cuda'); "
    code += "pinned = ctypes.CDLL(None).null_gpu_pinned_bytes; pinned.restype = ctypes.c_size_t; before = pinned(); "
    code += "y = torch.empty(600 << 20, dtype=torch.uint8, pin_memory=True); "
    code += "print([s['is_expandable'] for s in torch.cuda.memory._snapshot()['segments']], pinned() - before >> 20)"
    assert run(null_gpu, "-c", code).splitlines()[-1] == "[True] 600"
    configured = null_gpu | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
    assert run(configured, "-c", code).splitlines()[-1].startswith("[False]")


def test_pinned_memory_is_as_large_as_its_tensor(null_gpu):
    """torch caches freed blocks by the next power of two, and reuses any of them without comparing sizes."""
    code = "import utils, torch, ctypes; utils.setup_distributed(); pinned = ctypes.CDLL(None).null_gpu_pinned_bytes; "
    code += "pinned.restype = ctypes.c_size_t; torch.zeros(1, device='cuda')\n"
    code += "for mib in (5, 70, 600):\n"
    code += "    torch.empty(mib << 20, dtype=torch.uint8, pin_memory=True)\n"  # freed at once
    code += "    before, x = pinned(), torch.empty(mib + mib // 3 << 20, dtype=torch.uint8, pin_memory=True)\n"
    code += "    print(mib, max(before, pinned()) >> 20 >= mib + mib // 3)"
    assert run(null_gpu, "-c", code).splitlines()[-3:] == ["5 True", "70 True", "600 True"]


@pytest.mark.slow
def test_a_micro_batch_waits_for_the_gpu_three_times_at_most(null_gpu, tmp_path):
    """gpu.py counts the waits. Values have a limit; without one the plain policy head runs, which waits more often."""
    limited = null_gpu | {"NULL_GPU_VALUES_MIB": "16"}
    run(limited, ROOT / "benchmarks/gpu.py", "--only", "waits", "--json", tmp_path / "gpu.json")
    [part] = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert part["status"] == "ok" and len(part["rows"]) == 3
    for row in part["rows"]:
        assert 0 < row["a micro-batch"] <= 3 and re.search(r"\w+\.py:\d+ \d", row["most often"]), row


@pytest.mark.slow
def test_all_parts_of_the_gpu_benchmark_run(null_gpu, tmp_path):
    """All parts of gpu.py run with tiny shapes, except the one that is tested above."""
    parts = [part.name for part in gpu.PARTS if part.name != "waits"]
    out = tmp_path / "gpu.json"
    run(null_gpu, ROOT / "benchmarks/gpu.py", "--short", "--minutes", 55, "--only", ",".join(parts), "--json", out)
    data = json.loads(out.read_text())
    assert data["machine"]["memory_gib"] > 79 and [part["status"] for part in data["parts"]] == ["ok"] * len(parts)
    rows = {row["case"]: row for part in data["parts"] for row in part["rows"]}
    assert {"train.py", "resumed", "eval.py", "merge_lora.py", "LoRA with KL", "ours fused loss"} < rows.keys()
    for case in ("train.py", "resumed", "7B LoRA shared prefix", "7B LoRA packed, compiled"):
        assert rows[case]["peak GiB"] > 0 and 0 < rows[case]["grad norm"] < 100, case
    memory = rows[gpu.TOY_MEMORY]
    assert 0 < memory["at rest, GiB"] < memory["peak, GiB"] <= memory["reserved, GiB"]
    assert rows["toy, hf"]["GiB"] > 0
