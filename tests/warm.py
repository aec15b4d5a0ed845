"""Run our scripts in processes forked from one that has imported torch and transformers. Each saves 6 s of CPU time.

None of our modules is imported before the fork, so a script behaves as in a process of its own."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENVIRON = dict(os.environ)  # libraries read it on import, so other environments need a new process
READ_LATER = ("PYTEST_CURRENT_TEST", "OUT", "PYTHON", "PATH", "SIGNAL_AT")  # these may differ
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([
    "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "numpy", "pyarrow.parquet",
    "PIL.Image", "tqdm", "safetensors.torch", "scipy.stats", "httpx2", "transformers.models.auto.processing_auto",
    "transformers.models.auto.modeling_auto", "transformers.modeling_utils", "transformers.processing_utils",
    "transformers.integrations.sdpa_attention", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl", "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
])  # fmt: skip


def run_command(command: list, cwd: Path = ROOT, env: dict | None = None, timeout: float = 1800, **kwargs):
    """Run a command as subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout) does,
    but in forked processes if possible. If one rank fails, the others are killed; torchrun would terminate them."""
    command, end = list(map(str, command)), time.monotonic() + timeout
    if kwargs or not can_fork(command, cwd, env):
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, **kwargs)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        with forked(command, cwd, env, *outputs) as processes:
            while (remaining := running(processes)) and not failed(processes) and time.monotonic() < end:
                wait([process.sentinel for process in remaining], max(0, end - time.monotonic()))
            code = failed(processes)
        texts = [path.read_text() if path.exists() else "" for path in outputs]
    if remaining and not code:
        raise subprocess.TimeoutExpired(command, timeout, *texts)
    return subprocess.CompletedProcess(command, code, *texts)


def running(processes: list[BaseProcess]) -> list[BaseProcess]:
    return [process for process in processes if process.exitcode is None]


def failed(processes: list[BaseProcess]) -> int:
    """Return the exit code of a process that failed, or 0."""
    return next((process.exitcode for process in processes if process.exitcode), 0)


def can_fork(command: list[str], cwd: Path = ROOT, env: dict[str, str] | None = None) -> bool:
    """Return whether a command runs a Python file, with or without torchrun, in the environment we started with."""
    differ = {name for name, _ in set((env or os.environ).items()) ^ set(ENVIRON.items())}
    script = command[len(TORCHRUN) + 1 :][:1] if command[: len(TORCHRUN)] == TORCHRUN else command[1:2]
    is_python_file = bool(script) and (cwd / script[0]).suffix == ".py"
    return is_python_file and command[0] == sys.executable and differ <= set(READ_LATER)


@contextmanager
def forked(command: list[str], cwd: Path, env: dict | None, stdout: Path, stderr: Path) -> Iterator[list[BaseProcess]]:
    """Start a command that can_fork accepts and yield its processes, one per rank. Kill those left at the end."""
    environs, argv = [dict(env or os.environ)], command[1:]
    if command[: len(TORCHRUN)] == TORCHRUN:
        world, argv = int(command[len(TORCHRUN)]), command[len(TORCHRUN) + 1 :]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
                  "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "GROUP_RANK": 0}  # fmt: skip
        rank_environs = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
        environs = [environs[0] | {name: str(value) for name, value in values.items()} for values in rank_environs]
    processes = [SERVER.Process(target=run_script, args=(argv, cwd, environ, stdout, stderr)) for environ in environs]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in running(processes):
            process.kill()
        for process in processes:
            process.join()


def run_script(argv: list[str], cwd: Path, environ: dict[str, str], stdout: Path, stderr: Path) -> None:
    """Run the script argv[0] in this process, as if the process had been started for it."""
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = argv
    for name in ("kernels", "errors"):  # transformers tries to import its hub's `kernels`, and finds our file
        sys.modules.pop(name, None)
    our_folders = (str(ROOT), str(ROOT / "tests"))
    sys.path[:] = [str((cwd / argv[0]).parent), *(path for path in sys.path if path not in our_folders)]
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
