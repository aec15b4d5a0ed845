"""Start a rollout server with the settings that a training run needs.

python -m engines.serve --model Qwen/Qwen2.5-VL-7B-Instruct --data geo3k.parquet --max-new-tokens 2048 --port 8000

It uses these flags of train.py: --model, --data and --eval-data (for the longest prompt, and the number and size of
images), --max-new-tokens, --dtype, the pixel limits, --env, --vllm KEY=VALUE, --replay-experts; --lora-rank with --sync
adapter. Other flags of train.py are accepted, but have no effect. --print prints the command instead of running it.

The server's control endpoints (new weights, pause) have no password: anyone who can reach the port controls the policy.
"""

import importlib.util
import os
import shlex
import socket
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch

from engines.launch import SGLANG_REPLAY, RolloutServerConfig, check_videos, size_limits, vllm_settings
from engines.local import server_command
from errors import as_user_error, need
from model import ModelConfig, Processor, resolve_dtype
from prepare_data import DataConfig
from rollout import EnvConfig, RolloutConfig, identity, load_examples, make_env_factory
from settings import FlagParser, add_flags, build_config, check_given, flag_field
from utils import run_script


@dataclass(frozen=True)
class ServeCommandConfig:
    """Server"""

    engine: str = flag_field("vllm", "server software", choices=("vllm", "sglang"))
    host: str = flag_field("127.0.0.1", "address to listen on; with 0.0.0.0 other machines can connect")
    port: int = flag_field(8000, "HTTP port", least=1, most=65535)
    gpus: int = flag_field(1, "GPUs of the server, which split the model (tensor parallelism)", least=1)
    print: bool = flag_field(False, "print the command and exit")


CONFIG_SECTIONS = (ServeCommandConfig, ModelConfig, DataConfig, RolloutConfig, RolloutServerConfig, EnvConfig)


def parse_args(argv: list[str] | None = None) -> tuple[Any, ...]:
    parser = FlagParser(__doc__, prog="python -m engines.serve")
    for section in CONFIG_SECTIONS:
        add_flags(parser, section)
    args = vars(parser.parse_args(argv))
    check_given(args, *CONFIG_SECTIONS)
    return tuple(build_config(section, args) for section in CONFIG_SECTIONS)


def main(configs: tuple[Any, ...]) -> None:
    serve, model, data, rollout, servers, env = configs
    need(serve.print or importlib.util.find_spec(serve.engine) is not None,
         f"--engine {serve.engine} is not installed in {sys.prefix}; see docs/scale.md")
    settings = vllm_settings(rollout.vllm, "server" if serve.engine == "vllm" else serve.engine, 1)
    need("tensor_parallel_size" not in settings, "--vllm tensor_parallel_size: use --gpus instead")
    settings["tensor_parallel_size"] = serve.gpus
    if rollout.replay_experts:
        need(serve.engine == "vllm", SGLANG_REPLAY)
        settings["enable_return_routed_experts"] = True
    processor = Processor(model.model, model.min_pixels, model.max_pixels)
    environments = make_env_factory(env)
    reset_fn = environments.reset_example if environments else identity
    with redirect_stdout(sys.stderr):  # keep stdout for the command of --print
        paths = filter(None, (data.data, data.eval_data))
        sets = [load_examples(path, data, [processor], reset_fn=reset_fn) for path in paths]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = resolve_dtype(model.dtype, device)
    episode_limits = environments.episode_limits if environments else None
    settings |= size_limits(sets, processor, rollout.max_new_tokens, episode_limits)
    check_videos(serve.engine, sets, environments)
    lora_rank = model.lora_rank if servers.sync == "adapter" else 0
    command, environment = server_command(
        serve.engine, model.model, processor, dtype, settings, serve.host, serve.port, lora_rank)
    if serve.print:
        print(shlex.join([*(f"{key}={value}" for key, value in environment.items()), *command]))
        return
    message = f"--port {serve.port} at --host {serve.host} cannot be used; use another port"
    with socket.socket() as probe, as_user_error(OSError, message):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((serve.host, serve.port))
    os.execvpe(command[0], command, os.environ | environment)


if __name__ == "__main__":
    run_script(main, parse_args)
