"""Rollout servers as processes on this machine: the command that starts a server of each kind, and servers that stop
when the run ends (--serve)."""

import atexit
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import torch

from engines.sync import free_port
from engines.vllm_client import POLICY_MODEL_NAME
from errors import UserError, need, plug_in
from model import Processor
from utils import die_with_parent

START_MINUTES = 20  # time limit for a server to start
# prefixes of the variables that torchrun sets for its processes, and that a server must not inherit
TORCHRUN = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def server_command(
    engine: str, path: str, processor: Processor, dtype: torch.dtype, settings: dict[str, Any], host: str, port: int,
    lora_rank: int = 0
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a server and the environment variables to add. `settings`: max_model_len,
    limit_mm_per_prompt (launch.size_limits) and the arguments of --vllm."""
    if engine == "sglang":
        command, environment = sglang_command(path, dtype, settings)
    else:
        vllm = plug_in("engines.vllm", "--engine vllm")
        arguments = vllm.llm_arguments(path, processor, dtype, torch.cuda.is_available(), settings)
        command, environment = vllm_command(arguments, lora_rank)
    return [sys.executable, "-m", *command, "--host", host, "--port", str(port)], environment


# arguments that a server does not get as flags; all others of vllm.LLM are also flags of `vllm serve`
NON_FLAG_ARGS = ("model", "distributed_executor_backend", "enable_sleep_mode", "sleep_level")
VLLM_ARGS = (
    "--enable-scale-out --disable-uvicorn-access-log --worker-extension-cls engines.worker.WorkerExtension "
    f"--served-model-name {POLICY_MODEL_NAME}"
).split()
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of max_lora_rank that vLLM accepts


def vllm_command(arguments: dict[str, Any], lora_rank: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a vLLM server with these arguments (of vllm.llm_arguments), and the environment variables
    to add. With `lora_rank` the server accepts adapters (--sync adapter)."""
    root = str(Path(__file__).parent.parent)
    paths = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # enables the control endpoints
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))),
    }
    flags = {key: value for key, value in arguments.items() if key not in NON_FLAG_ARGS}
    flags["weight_transfer_config"] = {"backend": "trainer"}  # engines/worker.py
    if lora_rank:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        flags |= {"enable_lora": True, "max_lora_rank": min(r for r in LORA_RANKS if r >= lora_rank), "max_loras": 2}
    if not torch.cuda.is_available():
        environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return ["vllm.entrypoints.cli.main", "serve", arguments["model"], *VLLM_ARGS, *to_flags(flags)], environment


def to_flags(arguments: dict[str, Any]) -> list[str]:
    """Return arguments as command-line flags."""
    flags = []
    for key, value in arguments.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


SGLANG_ARGS = (
    "--skip-server-warmup --sampling-defaults openai --grammar-backend none --enable-multimodal "
    "--enable-custom-logit-processor"
).split()
CPU_ARGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph "
    "--disable-overlap-schedule --mem-fraction-static 0.05 --max-total-tokens 16384 --max-running-requests 64"
).split()
NO_RESIZE = {"image": {"size": {"shortest_edge": 1, "longest_edge": 1 << 40}}}  # images are already resized
CUDA_ARGS = ["--mem-fraction-static", "0.6"]


def sglang_command(path: str, dtype: torch.dtype, settings: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return the command of an SGLang server, and the environment variables to add. `settings`: max_model_len,
    limit_mm_per_prompt, tensor_parallel_size."""
    images, cuda = settings["limit_mm_per_prompt"]["image"], torch.cuda.is_available()
    flags = {
        "model_path": path,
        "dtype": str(dtype).removeprefix("torch."),
        "context_length": settings["max_model_len"],
        "limit_mm_data_per_request": {"image": images["count"] if images else 0, "video": 0},
        "mm_process_config": NO_RESIZE,
        "tp_size": settings.get("tensor_parallel_size", 1),
    }
    # a server started by torchrun's processes must not use torchrun's store for the weight transfer, and its
    # health check must not sample (see SGLangClient.health)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    if not cuda:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    return ["sglang.launch_server", *to_flags(flags), *SGLANG_ARGS, *(CUDA_ARGS if cuda else CPU_ARGS)], env


class LocalServers:
    """Server processes that end when this process ends, for whatever reason. Start them in the main thread, because the
    kernel kills them when the thread that started them ends."""

    def __init__(self) -> None:
        self.processes: dict[Path, subprocess.Popen] = {}  # log file -> server
        atexit.register(self.stop)

    def start(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        """Start a server. Write its output to `log`, and its command to a .txt file next to it."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN)}
        log.parent.mkdir(parents=True, exist_ok=True)
        log.with_suffix(".txt").write_text(shlex.join(command) + "\n")
        with log.open("w") as out:
            self.processes[log] = subprocess.Popen(
                command, env=inherited | environment, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=die_with_parent,
            )

    def wait_until_healthy(self, urls: Sequence[str]) -> None:
        """Wait until all servers answer. Raise UserError, with the last line of its log, if one does not."""
        end = time.monotonic() + 60 * START_MINUTES
        for url, (log, process) in zip(urls, self.processes.items(), strict=True):
            while not is_healthy(url):
                late = time.monotonic() > end
                if process.poll() is not None or late:
                    why = f"did not answer in {START_MINUTES} minutes" if late else f"exited with {process.returncode}"
                    raise UserError(f"--serve: the server {url} {why}; see its log {log}, which ends: {tail_log(log)}")
                time.sleep(0.5)

    def stop(self) -> None:
        """Terminate all servers. Kill those that are still running after 15 seconds."""
        for process in self.processes.values():
            process.terminate()
        end = time.monotonic() + 15.0
        for process in self.processes.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        self.processes.clear()


def is_healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


def tail_log(log: Path) -> str:
    """Return the last line of a log that mentions an error, or else its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return " ".join((errors or lines or ["nothing"])[-1].split())[-300:]


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as indices or UUIDs like those in CUDA_VISIBLE_DEVICES."""
    if not torch.cuda.is_available():
        return []
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.replace(" ", "").split(",") if names else list(map(str, range(torch.cuda.device_count())))


def launch_servers(
    n: int, path: str, processor: Processor, dtype: torch.dtype, settings: dict[str, Any], out: Path, lora_rank: int = 0
) -> list[str]:
    """Start n vLLM servers on this machine, on the visible GPUs after those of the trainer. Return their URLs."""
    servers, urls = LocalServers(), []
    first, tp = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), settings.get("tensor_parallel_size", 1)
    available = visible_gpus()
    n_gpus = first + n * tp
    need(not available or n_gpus <= len(available),
         f"--serve {n}: {first} trainer processes and {n} servers of {tp} GPUs need {n_gpus} GPUs, but there are "
         f"{len(available)}; start fewer processes or servers")
    for number in range(n):
        port = free_port()
        command, environment = server_command("vllm", path, processor, dtype, settings, "127.0.0.1", port, lora_rank)
        if gpus := available[first + number * tp : first + (number + 1) * tp]:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        servers.start(command, environment, out / "servers" / f"server{number}.log")
        urls.append(f"http://127.0.0.1:{port}")
    servers.wait_until_healthy(urls)
    return urls
