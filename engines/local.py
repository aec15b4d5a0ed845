"""Rollout servers as processes of this machine: the command that starts one, and servers that end with a run."""

import atexit
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import torch

from engines.sglang_server import sglang_command
from engines.transfer import free_port
from engines.vllm import engine_arguments
from engines.vllm_server import vllm_command
from errors import UserError, need
from model import Processor
from utils import end_with_parent

# What torchrun tells its processes, of which a server is none
TORCHRUN = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def server_command(
    engine: str, path: str, processor: Processor, dtype: torch.dtype, settings: dict[str, Any], host: str, port: int,
    lora_rank: int = 0
) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a server. `settings`: max_model_len, limit_mm_per_prompt (choose.image_limits) and
    those of --vllm."""
    cuda = torch.cuda.is_available()
    if engine == "sglang":
        return sglang_command(path, processor, dtype, cuda, settings, host, port)
    return vllm_command(engine_arguments(path, processor, dtype, cuda, settings), host, port, lora_rank)


class LocalServers:
    """Servers that end with this process, however it ends. Start them in the main thread: the kernel takes them down
    with the thread that started them."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen] = []
        self.logs: list[Path] = []
        atexit.register(self.stop)

    def start(self, command: Sequence[str], environment: dict[str, str], log: Path, gpus: Sequence[str] = ()) -> None:
        """What it says goes to a file, its command to a .txt next to it. `gpus`: those that it may use."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN)}
        environment = own | environment
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.with_suffix(".txt").write_text(shlex.join(command) + "\n")
        with log.open("w") as out:
            process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=end_with_parent,
            )
        self.processes.append(process)
        self.logs.append(log)

    def wait(self, urls: Sequence[str], minutes: float = 20.0) -> None:
        """Until all of them answer. UserError, with the last words of one that does not."""
        end = time.monotonic() + 60 * minutes
        for url, process, log in zip(urls, self.processes, self.logs, strict=True):
            while not answers(url):
                late = time.monotonic() > end
                if process.poll() is not None or late:
                    why = f"did not answer within {minutes:g} minutes" if late else f"ended with {process.returncode}"
                    raise UserError(f"--serve: the server {url} {why}; it said: {last_words(log)} (all of it: {log})")
                time.sleep(0.5)

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + 15.0
        for process in self.processes:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        self.processes, self.logs = [], []


def answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


def last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return " ".join((errors or lines or ["nothing"])[-1].split())[-300:]


def visible_gpus() -> list[str]:
    """Return the names (numbers or UUIDs) of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    if not torch.cuda.is_available():
        return []
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.replace(" ", "").split(",") if names else list(map(str, range(torch.cuda.device_count())))


def serve_local(
    n: int, path: str, processor: Processor, dtype: torch.dtype, settings: dict[str, Any], out: Path, lora_rank: int = 0
) -> list[str]:
    """Start n vLLM servers on this machine, on the visible GPUs after the trainer's, and return their URLs."""
    servers, urls = LocalServers(), []
    first, tp = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), settings.get("tensor_parallel_size", 1)
    have = visible_gpus()
    wanted = first + n * tp
    told = f"--serve {n}: {first} trainer processes and {n} servers of {tp} GPUs need {wanted} GPUs"
    need(not have or wanted <= len(have), f"{told}, and there are {len(have)}; start fewer processes or servers")
    for number in range(n):
        port = free_port()
        gpus = have[first + number * tp : first + (number + 1) * tp]
        command, environment = server_command("vllm", path, processor, dtype, settings, "127.0.0.1", port, lora_rank)
        servers.start(command, environment, out / "servers" / f"server{number}.log", gpus)
        urls.append(f"http://127.0.0.1:{port}")
    servers.wait(urls)
    return urls
