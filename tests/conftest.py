"""Fixtures of several files: toy models, made once a session, pictures, and a process group of one."""

import os
import random
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined

from PIL import Image  # noqa: E402

import demo  # noqa: E402
import model as M  # noqa: E402
from errors import in_copy  # noqa: E402
from utils import Context  # noqa: E402

torch.set_num_threads(1)

# Tests of files that a fork may have deleted
TESTS_OF = {
    "envs._load": ("test_envs.py", "test_environments_page.py", "test_episodes.py"),
    "rewards.judge": ("test_judge.py",),
    "rewards.curriculum": ("test_curriculum.py",),
    "engines.server": ("test_server_engine.py", "test_servers.py", "test_sglang.py", "test_multinode.py"),
    "engines.vllm": (
        "test_server_engine.py", "test_servers.py", "test_sglang.py", "test_vllm.py", "test_vllm_requests.py"),
}
collect_ignore = [name for module, names in TESTS_OF.items() if not in_copy(module) for name in names]
FAMILIES = tuple(M.FAMILIES)


def dense_mask(end_T: torch.Tensor) -> torch.Tensor:
    """The attention mask of a micro-batch, (T, T) bool, [query, key]: the definition that back ends are tested
    against."""
    position_T = torch.arange(len(end_T), device=end_T.device)
    return (position_T[None, :] <= position_T[:, None]) & (position_T[:, None] < end_T[None, :])


@pytest.fixture(scope="session")
def toys(tmp_path_factory) -> dict[str, Path]:
    """family -> folder of a random toy model whose vocabulary is wider than its tokenizer, as Qwen's is."""
    root = tmp_path_factory.mktemp("toys")
    for family in FAMILIES:
        demo.make_model(root / family, family, seed=0, hidden=64, layers=2, vocab=448)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="session")
def loaded(toys):
    """family -> (hf model, processor)."""
    return {family: (M.load_hf(str(path)).eval(), M.load_processor(str(path))) for family, path in toys.items()}


@pytest.fixture
def picture():
    """picture(width, height, seed) -> a noisy RGB image."""

    def make(width: int, height: int, seed: int = 0) -> Image.Image:
        return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))

    return make


@pytest.fixture
def ctx():
    """The context of the only process, with its process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Context(0, 1, torch.device("cpu"))
    if dist.is_initialized():
        dist.destroy_process_group()
