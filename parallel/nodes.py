"""Several machines train one model: is it the same run on all of them?"""

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

# Seconds for network file systems, which remember for a while that a file was not there
WAIT_SECONDS = 60.0
PATH_SETTINGS = ("model", "data", "eval_data", "curriculum")  # may lie elsewhere on each node


def check_restart_support() -> None:
    """Before processes join. Of several nodes each counts restarts for itself, and restarted processes would meet the
    addresses of the dead in torchrun's store (utils._rendezvous)."""
    env = os.environ
    one_node = env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE")
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    need(one_node or restarts == "0" or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
         f"torchrun --max-restarts {restarts} on several nodes: restarted processes would not find each other; set "
         "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on each node (runs/multinode.sh does)")


def check_same_settings(settings: Mapping[str, Any], ctx: DistContext) -> None:
    """Every node was started with the same flags."""
    check_same({flag_name(name): value for name, value in settings.items() if name not in PATH_SETTINGS}, ctx)


def check_same(values: Mapping[str, Any], ctx: DistContext) -> None:
    places, everyone = zip(*ctx.gather((socket.gethostname(), dict(values))), strict=True)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            need(value == everyone[0][name],
                 f"{name} is {everyone[0][name]} on rank 0 ({places[0]}), {value} on rank {rank} ({places[rank]}); "
                 "start the same command on every node, with the same files")


def check_shared_storage(out: Path, data: Mapping[str, ExampleList], ctx: DistContext) -> None:
    """Every rank sees what rank 0 writes, and has read the same data."""
    mark = out / f".seen_{ctx.gather(time.time_ns())[0]}"
    if ctx.is_main:
        mark.touch()
    ctx.gather(None)
    deadline = time.monotonic() + WAIT_SECONDS
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    seen = ctx.gather((mark.exists(), socket.gethostname()))
    if ctx.is_main:
        mark.unlink()
    for rank, (found, place) in enumerate(seen):
        need(found, f"--out {out}: rank {rank} ({place}) does not see what rank 0 ({seen[0][1]}) writes there; give a "
                    "folder on a file system that all nodes share")
    check_same({f"SHA-256 of the rows of {flag}": hash_examples(examples) for flag, examples in data.items()}, ctx)


def hash_examples(examples: ExampleList) -> str:
    """Of what was read; of images their number of tokens."""
    rows = [(e.uid, e.data_source, e.messages, e.ground_truth) for e in examples]
    return hashlib.sha256(repr((rows, examples.lengths)).encode()).hexdigest()
