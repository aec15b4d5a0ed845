"""Fixtures of several files: toy models, made once a session, pictures, and a process group of one."""

import os
import random
import re
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
from rollout import Prompt, Rollout  # noqa: E402
from utils import DistContext  # noqa: E402

torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]

# What a fork may delete (docs/deletions.md)
DELETABLE = {
    "envs": ["envs"],
    "servers": [f"engines/{name}.py" for name in
                "server client vllm_client sglang_client sync worker local serve".split()],
    "vllm": [f"engines/{name}.py" for name in "vllm vllm_cpu vllm_weights vllm_ban".split()],
    "judge": ["rewards/judge.py", "rewards/judge.txt"],
    "curriculum": ["rewards/curriculum.py"],
    "pages": ["report/page"],
    "tasks": [f"tasks/{name}.py" for name in
              "caption digits geometry geospot pairs vqa _math_verify _places _tables".split()],
    "tensor parallelism": ["parallel/tensor_parallel.py"],
    "sampling ahead": ["engines/ahead.py"],
    "sources": [f"sources/{name}.py" for name in ("fetch", "remote", "text", "inspect_rows")],
}
DELETED = [name for names in DELETABLE.values() for name in names if not (ROOT / name).exists()]
MISSING = re.compile(r"No module named '(?:engines|envs|parallel|report|rewards|sources|tasks)\b[^']*'"
                     r"|cannot import name '\w+' from '(?:tasks|sources)'|[\w/]+ is not in this copy")
complete = pytest.mark.skipif(bool(DELETED), reason="it uses what is deleted")  # where no message says so


def skip_if_missing(report):
    """Make the failure of a test that needs what a fork has deleted a skip."""
    found = DELETED and report.failed and MISSING.search(report.longreprtext)
    if found:
        report.outcome, report.longrepr = "skipped", (report.fspath, 0, f"Skipped: {found[0]}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return skip_if_missing((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return skip_if_missing((yield))


FAMILIES = tuple(M.FAMILIES)


def dense_mask(end_T: torch.Tensor) -> torch.Tensor:
    """The attention mask of a micro-batch, (T, T) bool, [query, key]: the definition that back ends are tested
    against."""
    position_T = torch.arange(len(end_T), device=end_T.device)
    return (position_T[None, :] <= position_T[:, None]) & (position_T[:, None] < end_T[None, :])


def written(uid, prompt_ids, response, images=()) -> Rollout:
    """Return a response that was written, not sampled."""
    n = len(response)
    prompt = Prompt(uid, list(prompt_ids), list(images), None, [])
    return Rollout(prompt, 0, list(response), [True] * n, [0.0] * n, "stop", "", versions=[0] * n)


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
    return {family: (M.load_hf(str(path)).eval(), M.Processor(str(path))) for family, path in toys.items()}


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
    yield DistContext(0, 1, torch.device("cpu"))
    if dist.is_initialized():
        dist.destroy_process_group()
