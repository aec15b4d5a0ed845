"""Checks that several machines train the same run: the same settings, the same data, and one shared --out."""

import hashlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from errors import need
from rollout import ExampleList
from settings import flag_name
from utils import DistContext

# Seconds to wait for a new file: network file systems cache for a while that it does not exist
WAIT_SECONDS = 60.0
PATH_SETTINGS = ("model", "data", "eval_data", "curriculum")  # paths, which may differ between nodes


def check_restart_support() -> None:
    """Raise UserError if torchrun would restart processes on several nodes and they could not join again: each node
    counts its own restarts, so they would read the addresses of dead processes from torchrun's store
    (utils._rendezvous). Called before the processes join."""
    env = os.environ
    one_node = env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE")
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    need(one_node or restarts == "0" or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
         f"torchrun --max-restarts {restarts} on several nodes: restarted processes would not find each other; set "
         "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on each node (runs/multinode.sh does)")


def check_same_settings(settings: Mapping[str, Any], ctx: DistContext) -> None:
    """Raise UserError unless every node was started with the same flags."""
    check_same({flag_name(name): value for name, value in settings.items() if name not in PATH_SETTINGS}, ctx)


def check_same(values: Mapping[str, Any], ctx: DistContext) -> None:
    """Raise UserError unless all ranks have the same values."""
    hosts, gathered = zip(*ctx.gather((socket.gethostname(), dict(values))), strict=True)
    for rank, rank_values in enumerate(gathered):
        for name, value in rank_values.items():
            need(value == gathered[0][name],
                 f"{name} is {gathered[0][name]} on rank 0 ({hosts[0]}), {value} on rank {rank} ({hosts[rank]}); "
                 "start the same command on every node, with the same files")


def check_shared_storage(out: Path, data: Mapping[str, ExampleList], ctx: DistContext) -> None:
    """Raise UserError unless every rank sees the files that rank 0 writes to `out` and has read the same data."""
    marker = out / f".seen_{ctx.gather(time.time_ns())[0]}"
    if ctx.is_main:
        marker.touch()
    ctx.gather(None)
    deadline = time.monotonic() + WAIT_SECONDS
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    seen = ctx.gather((marker.exists(), socket.gethostname()))
    if ctx.is_main:
        marker.unlink()
    for rank, (exists, host) in enumerate(seen):
        need(exists, f"--out {out}: rank {rank} ({host}) does not see what rank 0 ({seen[0][1]}) writes there; use a "
                     "folder on a file system that all nodes share")
    check_same({f"SHA-256 of the rows of {flag}": hash_examples(examples) for flag, examples in data.items()}, ctx)


def hash_examples(examples: ExampleList) -> str:
    """Return the SHA-256 of examples: ids, tasks, messages, truths and lengths. Images count by their length only."""
    rows = [(e.uid, e.data_source, e.messages, e.ground_truth) for e in examples]
    return hashlib.sha256(repr((rows, examples.lengths)).encode()).hexdigest()
