"""Fixtures and helpers for several test files: toy models, which are made once a session, images, and a process group
with one process."""

import os
import random
import re
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

# The parts that a fork may delete, with their files (docs/deletions.md)
DELETABLE = {
    "algorithms": ["algorithms"],
    "envs": ["envs"],
    "servers": [f"engines/{name}.py" for name in
                "server client vllm_client sglang_client sync worker local serve".split()],
    "vllm": [f"engines/{name}.py" for name in "vllm vllm_cpu vllm_weights vllm_ban".split()],
    "judge": ["rewards/judge.py", "rewards/judge.txt"],
    "curriculum": ["rewards/curriculum.py"],
    "pages": ["report/page"],
    "tasks": [f"tasks/{name}.py" for name in
              "caption digits geometry geospot pairs shortcut vqa".split()] + [
              f"tasks/_{name}.py" for name in "math_verify places published tables".split()],
    "tensor parallelism": ["parallel/tensor_parallel.py"],
    "sampling ahead": ["engines/ahead.py"],
    "replayed experts": ["layers/experts.py"],
    "plan": ["parallel/plan.py"],
    "sources": [f"sources/{name}.py" for name in ("fetch", "remote", "text", "inspect_rows")],
}
DELETED = [name for names in DELETABLE.values() for name in names if not (ROOT / name).exists()]
FOLDERS = "algorithms|engines|envs|layers|parallel|report|rewards|sources|tasks"
MISSING = re.compile(rf"No module named '(?:{FOLDERS})\b[^']*'"
                     r"|cannot import name '\w+' from '(?:parallel|tasks|sources)'|[\w/]+ is not in this copy")
# for tests whose failure in such a fork does not match MISSING
complete = pytest.mark.skipif(bool(DELETED), reason="it uses what is deleted")


def skip_if_missing(report):
    """Turn a failure into a skip if the test failed because a fork deleted something that it needs."""
    missing = DELETED and report.failed and MISSING.search(report.longreprtext)
    if missing:
        report.outcome, report.longrepr = "skipped", (report.fspath, 0, f"Skipped: {missing[0]}")
    return report


def pytest_addoption(parser):
    parser.addoption("--slow-part", metavar="K/N", help="run only part K (from 0) of N equal parts of the slow tests")


def pytest_collection_modifyitems(config, items):
    """Leave out the slow tests of other parts than --slow-part. A test's part depends only on its name."""
    if part := config.getoption("--slow-part"):
        k, n = map(int, part.split("/"))
        assert 0 <= k < n, f"--slow-part {part}: K counts from 0"
        others = [item for item in items if "slow" in item.keywords and zlib.crc32(item.nodeid.encode()) % n != k]
        config.hook.pytest_deselected(items=others)
        dropped = set(others)
        items[:] = [item for item in items if item not in dropped]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return skip_if_missing((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return skip_if_missing((yield))


FAMILIES = tuple(M.FAMILIES)


def dense_mask(end_T: torch.Tensor) -> torch.Tensor:
    """Return the attention mask of a micro-batch, (T, T) bool, [query, key], by its definition. Attention back ends
    are compared with it."""
    position_T = torch.arange(len(end_T), device=end_T.device)
    return (position_T[None, :] <= position_T[:, None]) & (position_T[:, None] < end_T[None, :])


def written(uid, prompt_ids, response, images=()) -> Rollout:
    """Return a rollout with a given response, which was not sampled."""
    n = len(response)
    prompt = Prompt(uid, list(prompt_ids), list(images), None, [])
    return Rollout(prompt, 0, list(response), [True] * n, [0.0] * n, "stop", "", versions=[0] * n)


@contextmanager
def cpu_limit(seconds: float = 10.0) -> Iterator[None]:
    """Assert that a block takes less CPU time of this thread than `seconds`. Blocks take a hundredth of it, or a tenth
    of a larger limit, so only what hangs, or grows faster than its input, exceeds it: not a slow or busy machine."""
    start = time.thread_time()
    yield
    assert time.thread_time() - start < seconds


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until a condition is true; `seconds` only keep a failing test from hanging."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this never happened"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def toys(tmp_path_factory) -> dict[str, Path]:
    """family -> folder of a random toy model with a larger vocabulary than its tokenizer's, as Qwen has."""
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
    """The context of a single process, with a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistContext(0, 1, torch.device("cpu"))
    if dist.is_initialized():
        dist.destroy_process_group()
