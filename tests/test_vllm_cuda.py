"""vLLM's CUDA wheel on a GPU that does not exist (tests/null_gpu).   make test-vllm-cuda

One child process (null_gpu/check_vllm.py) starts the engine that a GPU gets by default, and runs the steps of training:
sampling, syncs, sleep. The values that these tests check are correct; null_gpu/vllm_kernels.py says which kernels are
replaced and what is not covered.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from null_gpu.build import HERE as NULL_GPU  # noqa: E402
from null_gpu.build import environment  # noqa: E402

import demo  # noqa: E402

pytestmark = pytest.mark.vllm_cuda
ROOT = Path(__file__).parent.parent
MIB = 2**20


@pytest.fixture(scope="session")
def results(tmp_path_factory) -> dict:
    """Return the results that the child prints. It sees only the last of four GPUs, as a server or a rank may."""
    if torch.version.cuda is None:
        pytest.skip("this is a CPU build of torch; run make test-vllm-cuda, which installs the build for CUDA")
    assert environment()["LD_PRELOAD"], "the null GPU is not built; run python tests/null_gpu/build.py"
    folder = tmp_path_factory.mktemp("toy")
    demo.make_model(folder / "qwen2_5_vl", "qwen2_5_vl", vocab=640)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | environment()
    env |= {"PYTHONPATH": f"{NULL_GPU / 'site'}:{ROOT}:{ROOT / 'tests'}", "VLLM_CACHE_ROOT": str(folder / "cache")}
    env |= {"NULL_GPU_GIB": "1", "NULL_GPU_COUNT": "4", "CUDA_VISIBLE_DEVICES": "3", "TRITON_INTERPRET": "1"}
    command = [sys.executable, NULL_GPU / "check_vllm.py", folder / "qwen2_5_vl"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_the_engine_is_the_default_for_a_gpu(results):
    """Model Runner V2 runs on the only visible GPU, and only the attention schedule is garbage."""
    assert results["v2"] == [True, "vllm.v1.worker.gpu.model_runner"]
    assert results["device"] == ["cuda:0", 1]
    assert results["garbage"] == ["_vllm_fa3_C::get_scheduler_metadata"]


def test_rollouts_have_the_trainers_log_probabilities(results):
    """This holds before and after each sleep and sync, in bfloat16. (On the CPU, in fp32, the tolerance is 1e-5.)"""
    assert [(uid, len(tokens), n, reason) for uid, tokens, n, reason in results["rollouts"]] == [
        (uid, 8, 8, "length") for uid in ("one", "none", "two") for _ in range(2)
    ]
    assert len({tuple(tokens) for _, tokens, _, _ in results["rollouts"]}) == 6
    assert len(results["gaps"]) == 4 and max(results["gaps"]) < 0.03


def test_the_ban_runs_and_no_banned_token_is_sampled(results):
    assert results["bans"] >= 8 and results["banned"] == 0


def test_weights_reach_the_live_model(results):
    assert results["sync"]["sync/calls"] == 1 and results["sync"]["sync/bytes"] > 2 * MIB
    of_first, of_second = results["differing"]
    assert of_first == 0 and of_second > 30


def test_sleep_at_level_1(results):
    """Sleep frees what asleep_bytes returns and keeps the weights; a sync during sleep wakes only the weights."""
    level = results["level 1"]
    assert level["awake"] - level["asleep"] >= level["asleep_bytes"] > 500 * MIB
    assert level["asleep"] < 100 * MIB and level["woken"] >= level["awake"] - 16 * MIB
    assert level["asleep_bytes woken"] == 0
    assert results["again"] == results["rollouts"]
    assert level["asleep"] + 2 * MIB <= level["synced"] < level["asleep"] + 100 * MIB and level["differing"] == 0


def test_sleep_at_level_2(results):
    """Sleep loses the weights. A sync that lacks one is refused; after a full sync the engine samples as before."""
    level = results["level 2"]
    assert level["asleep"] < 100 * MIB and level["asleep_bytes"] > 500 * MIB
    assert level["lost"] == level["of"] > 30 and "1 parameters were not sent" in level["refused"]
    assert level["synced"] < level["asleep"] + 100 * MIB and level["differing"] == 0
    assert level["rollouts"] == results["rollouts"] and level["woken"] >= results["level 1"]["awake"] - 16 * MIB
