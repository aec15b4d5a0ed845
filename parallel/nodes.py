"""Several machines train one model: is it the same run on all of them?"""

import hashlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from errors import need
from rollout import Examples
from settings import flag_of
from utils import Context

PATHS = ("model", "data", "eval_data", "curriculum")  # may lie elsewhere on each node


def check_restarts() -> None:
    """Before processes join. Of several nodes each counts restarts for itself, and restarted processes would meet the
    addresses of the dead in torchrun's store (utils._rendezvous)."""
    env = os.environ
    several = env.get("LOCAL_WORLD_SIZE") != env.get("WORLD_SIZE")
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    told = f"torchrun --max-restarts {restarts} on several nodes: restarted processes would not find each other"
    need(not (several and shared and restarts != "0"),
         f"{told}; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on each node (runs/multinode.sh does)")


def check_settings(settings: Mapping[str, Any], ctx: Context) -> None:
    """Every node was started with the same flags."""
    places, theirs = zip(*ctx.gather((socket.gethostname(), dict(settings))), strict=True)
    for rank, other in enumerate(theirs):
        for name in theirs[0].keys() - set(PATHS):
            told = f"{flag_of(name)} is {theirs[0][name]} on rank 0 ({places[0]}), {other[name]} on rank {rank}"
            need(other[name] == theirs[0][name], f"{told} ({places[rank]}); start the same command on every node")


def check_shared(out: Path, data: Mapping[str, Examples], ctx: Context, patience: float = 60.0) -> None:
    """Every rank sees what rank 0 writes, and has read the same data. `patience` seconds are for network file systems,
    which remember for a while that a file was not there."""
    mark = out / f".seen_{ctx.gather(time.time_ns())[0]}"
    if ctx.main:
        mark.touch()
    ctx.gather(None)
    deadline = time.monotonic() + patience
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    seen = ctx.gather((mark.exists(), socket.gethostname(), [digest(examples) for examples in data.values()]))
    if ctx.main:
        mark.unlink()
    _, main, ours = seen[0]
    for rank, (found, place, theirs) in enumerate(seen):
        need(found, f"--out {out}: rank {rank} ({place}) does not see what rank 0 ({main}) writes there; give a folder "
                    "on a file system that all nodes share")
        for flag, mine, other in zip(data, ours, theirs, strict=True):
            need(mine == other, f"{flag}: rank {rank} ({place}) has read other rows than rank 0 ({main}); give every "
                                "node the same file")


def digest(examples: Examples) -> str:
    """Of what was read; of images their number of tokens."""
    rows = [(e.uid, e.data_source, e.messages, e.ground_truth) for e in examples]
    return hashlib.sha256(repr((rows, examples.lengths)).encode()).hexdigest()
