"""Small things every script needs: process group, seeds, timers, the run log, the rollout pages."""

import atexit
import fcntl
import hashlib
import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from errors import Interrupted, Note, UserError, writing


@dataclass(frozen=True)
class Context:
    """Where this process stands: under torchrun or alone, the same."""

    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0


def _store_of_restart() -> dict:
    """torchrun gives restarted processes the store of those before, in which they would find addresses of the dead (pytorch
    issue 135712): names of their own. Of several nodes each counts restarts for itself, so there torchrun has to be started with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
    env = os.environ
    attempt, one_node = env.get("TORCHELASTIC_RESTART_COUNT", "0"), env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]
    if attempt == "0" or not one_node or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    return {"store": dist.PrefixStore(f"restart{attempt}", store), "rank": int(env["RANK"]), "world_size": int(env["WORLD_SIZE"])}


def dist_setup(timeout_minutes: float = 30.0) -> Context:
    """Join the process group torchrun started, or make one of size 1, so that there is a single code path. What one rank waits
    for longer than that is an error."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cuda:nccl,cpu:gloo" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes), **_store_of_restart())
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return Context(dist.get_rank(), dist.get_world_size(), device)


RANK_HINT = ("This is rank {RANK} of {WORLD_SIZE}. If another rank ended before, its message says why, and this one only lost its "
             "connection. A training run goes on from its newest checkpoint with --resume auto.")


def run_script(main: Callable, parse_args: Callable) -> None:
    """Run a script's main as its process: a UserError becomes one line, anything else keeps its traceback."""
    code = 0
    try:
        with Note(RANK_HINT.format(**os.environ) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""):
            main(parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except Interrupted as stop:
        print0(stop, file=sys.stderr)
        code = 128 + stop.number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    atexit._run_exitfuncs()  # before the process group goes: vLLM takes its own groups down in one of them
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a gloo thread that still holds a tensor while the interpreter is being taken down aborts the process
    # (pytorch pull request 179291), and a run that is complete would be reported as failed - once in twenty, on a busy box.
    os._exit(code)


def print0(*args, **kwargs) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*args, **kwargs, flush=True)


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a name such as (seed, "sample", step, uid): randomness is a function of where it is used, so
    nothing about it has to be stored or restored."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Timers:
    """`with timers("rollout"):` adds up seconds per name; `pop()` returns them as time/* and starts afresh."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.stage, self.entered = "set-up", 0  # where the run is, and how often that has changed: what parallel/watch.py tells

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self.stage, self.entered = name, self.entered + 1
        yield
        self.stage, self.entered = f"what follows {name}", self.entered + 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def pop(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return {f"time/{name}": s for name, s in seconds.items()}


def all_sum(values: dict[str, float], alike: int = 1) -> dict[str, float]:
    """Sum of each entry over ranks, in float64 and rank order; a key that only some ranks have counts 0 elsewhere. Where so
    many neighbours hold `alike` values, those of the first count."""
    parts: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, values)
    parts = parts[::alike]
    return {key: sum(part.get(key, 0.0) for part in parts) for key in sorted({k for part in parts for k in part})}


def from_peers(items: list[list], group: dist.ProcessGroup | None) -> list[list]:
    """Lists of a group's processes, joined one by one in rank order, on each of them; what is this process's own stays the same
    objects. Without a group, its own."""
    if group is None:
        return items
    parts: list[list[list]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(parts, items, group=group)
    parts[dist.get_rank(group)] = items
    return [[item for theirs in lists for item in theirs] for lists in zip(*parts, strict=True)]


def gather_dicts(items: dict) -> dict:
    """The union of all ranks' dicts, on every rank; their keys are distinct."""
    parts: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, items)
    return {key: value for part in parts for key, value in part.items()}


def gather0(items: list) -> list:
    """Lists of all ranks joined in rank order on rank 0; empty elsewhere."""
    parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(items, parts)
    return [item for part in parts or [] for item in part]


# ----------------------------------------------------------------------------------------------------------------------
# The run directory


def lock_folder(out: Path, patience: float = 5.0) -> object:
    """Make `out` this process's own until it ends, however it ends; keep what is returned. UserError that names the holder.
    `patience` seconds are for one that is about to end: torchrun restarts a run as soon as its processes are killed."""
    with writing(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".lock", "a+")
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                file.seek(0)
                raise UserError(
                    f"--out {out}: another run writes there ({file.read().strip()}); wait for it, or choose another folder"
                ) from error
            time.sleep(0.2)
        except OSError as error:  # some network file systems have no locks
            print(f"--out {out} cannot be locked ({error.strerror}): take care that no other run writes there", file=sys.stderr)
            break
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that was cut off is none."""
    rows, lines = [], path.read_text().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line.endswith("\n") else []
        except ValueError as error:
            raise UserError(f"{path} line {number}: damaged ({error}); remove the line") from error
    return rows


def describe_run(args: dict) -> dict:
    """What a reader of a run directory needs to know to run it again."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, cwd=Path(__file__).parent)
    import transformers

    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "args": args,
        "git": git.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "") if git.returncode == 0 else "unknown",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, {os.cpu_count()} cores",
        "world": dist.get_world_size() if dist.is_initialized() else 1,
    }


def json_line(row: dict[str, float]) -> str:
    """JSON has no NaN and no infinity: they become null."""
    return json.dumps({key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}) + "\n"


class RunLog:
    """run.json and metrics.jsonl in the run directory, plus tensorboard/ when asked for. Only rank 0 writes."""

    def __init__(self, out: Path, args: dict, ctx: Context, start_step: int, tensorboard: bool):
        self.ctx, self.path, self.board = ctx, out / "metrics.jsonl", None
        if not ctx.main:
            return
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "run.json", json.dumps(describe_run(args), indent=2) + "\n")
        # A run that was cut off may have logged steps after its newest checkpoint; they are about to happen again.
        kept = [row for row in read_rows(self.path) if start_step and row["step"] <= start_step]
        write_text(self.path, "".join(map(json_line, kept)))
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(out / "tensorboard", purge_step=start_step + 1)

    def amend(self, metrics: dict[str, float]) -> None:
        """Add to the last row what the run was interrupted in."""
        if self.ctx.main:
            *rows, last = read_rows(self.path)
            write_text(self.path, "".join(map(json_line, [*rows, last | metrics])))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if not self.ctx.main:
            return
        with writing(self.path, "--out"), open(self.path, "a") as f:
            f.write(json_line({"step": step, **metrics}))
        if self.board:
            for key, value in metrics.items():
                self.board.add_scalar(key, value, step)

    def close(self) -> None:
        if self.board:
            self.board.close()


def write_text(path: Path, text: str) -> None:
    """Write through a temporary name, so that a reader (or a crash) never meets half a file."""
    with writing(path, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the name without the text
        os.replace(temporary, path)
