"""vLLM's CUDA wheel on a GPU that does not exist (tests/null_gpu).   make test-vllm-cuda

One child starts the engine that a GPU gets by default, and takes it through the steps of a run: sampling, syncs, sleep
(null_gpu/check_vllm.py). The values that these tests need are right: null_gpu/vllm_kernels.py says what is replaced and
what is not covered.
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
def found(tmp_path_factory) -> dict:
    """Return what the child prints. It sees only the last of four GPUs, as a server or a rank may."""
    if torch.version.cuda is None:
        pytest.skip("this is a CPU build of torch; run make test-vllm-cuda, which installs the build for CUDA")
    assert environment()["LD_PRELOAD"], "the null GPU is not built; run python tests/null_gpu/build.py"
    folder = tmp_path_factory.mktemp("toy")
    demo.make_model(folder / "qwen2_5_vl", "qwen2_5_vl", vocab=640)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | environment()
    env |= {"PYTHONPATH": f"{NULL_GPU / 'site'}:{ROOT}:{ROOT / 'tests'}", "VLLM_CACHE_ROOT": str(folder / "cache")}
    env |= {"NULL_GPU_GIB": "1", "NULL_GPU_COUNT": "4", "CUDA_VISIBLE_DEVICES": "3", "TRITON_INTERPRET": "1"}
    command = [sys.executable, NULL_GPU / "check_vllm.py", folder / "qwen2_5_vl"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_the_engine_is_the_one_that_a_gpu_gets(found):
    """It is Model Runner V2, on the only visible GPU, and only the attention schedule is garbage."""
    assert found["v2"] == [True, "vllm.v1.worker.gpu.model_runner"]
    assert found["device"] == ["cuda:0", 1]
    assert found["garbage"] == ["_vllm_fa3_C::get_scheduler_metadata"]


def test_rollouts_have_the_trainers_log_probabilities(found):
    """They do before and after each sleep and sync, in bfloat16. (On the CPU, in fp32, the tolerance is 1e-5.)"""
    assert [(uid, len(tokens), n, why) for uid, tokens, n, why in found["rollouts"]] == [
        (uid, 8, 8, "length") for uid in ("one", "none", "two") for _ in range(2)
    ]
    assert len({tuple(tokens) for _, tokens, _, _ in found["rollouts"]}) == 6
    assert len(found["gaps"]) == 4 and max(found["gaps"]) < 0.03


def test_the_ban_runs(found):
    assert found["bans"] >= 8 and found["banned"] == 0


def test_weights_reach_the_live_model(found):
    assert found["sync"]["sync/calls"] == 1 and found["sync"]["sync/bytes"] > 2 * MIB
    of_first, of_second = found["differing"]
    assert of_first == 0 and of_second > 30


def test_sleep_at_level_1(found):
    """It frees what asleep_bytes returns, keeps the weights, and a sync during sleep wakes only the weights."""
    level = found["level 1"]
    assert level["awake"] - level["asleep"] >= level["asleep_bytes"] > 500 * MIB
    assert level["asleep"] < 100 * MIB and level["woken"] >= level["awake"] - 16 * MIB
    assert level["asleep_bytes woken"] == 0
    assert found["again"] == found["rollouts"]
    assert level["asleep"] + 2 * MIB <= level["synced"] < level["asleep"] + 100 * MIB and level["differing"] == 0


def test_sleep_at_level_2(found):
    """It loses the weights, refuses a sync that lacks one, and after a whole sync samples as before."""
    level = found["level 2"]
    assert level["asleep"] < 100 * MIB and level["asleep_bytes"] > 500 * MIB
    assert level["lost"] == level["of"] > 30 and "1 parameters were not sent" in level["refused"]
    assert level["synced"] < level["asleep"] + 100 * MIB and level["differing"] == 0
    assert level["rollouts"] == found["rollouts"] and level["woken"] >= found["level 1"]["awake"] - 16 * MIB
