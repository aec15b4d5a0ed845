"""Small utilities that every script needs: process groups, metrics, seeds, timers."""

import atexit
import ctypes
import hashlib
import json
import locale
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from errors import ErrorContext, Interrupted, UserError, keep_printing, printable

# Options of torch's memory allocators, unless the user sets them. Expandable segments leave fewer gaps between tensors
# of changing sizes: without recomputation, a 7B model on 8 GPUs reserves 76 GiB for a peak of 72, not 85. Blocks of
# pinned host memory above 64 MiB are not rounded up to powers of two, which would double the memory that a sleeping
# engine keeps there. Such blocks must not be cached for reuse either: torch 2.13 would give a freed block of 65 MiB to
# a tensor of 128 MiB.
ALLOC_CONF = "expandable_segments:True"
if torch.__version__ >= (2, 13):  # older versions reject unknown options
    ALLOC_CONF += ",pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64"

NamedTensors = Iterable[tuple[str, torch.Tensor]]  # with Hugging Face names


@dataclass(frozen=True)
class DistContext:
    """The rank and device of this process, and its collectives with the others; the same with and without torchrun.
    Every `tp` neighbouring processes form a tensor-parallel process group and train on the same data, so there are
    world / tp data ranks."""

    rank: int
    world: int
    device: torch.device
    tp: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.rank // self.tp

    @property
    def data_world(self) -> int:
        return self.world // self.tp

    def gather(self, item: Any) -> list[Any]:
        """Return every process's item, in rank order, on all processes."""
        return gather(item)

    def gather_to_main(self, items: list) -> list:
        """Return the lists of all data ranks, joined in rank order, on rank 0, and an empty list elsewhere."""
        gathered = [None] * self.world if self.is_main else None
        dist.gather_object(items if self.rank % self.tp == 0 else [], gathered)
        return list(chain.from_iterable(gathered or []))

    def exchange(self, items: Sequence[Any]) -> list[Any]:
        """Send items[r] to process r, for each r; return the items sent to this process, in rank order."""
        if self.world == 1:
            return list(items)
        pickled = [pickle.dumps(item, 5) for item in items]
        sizes = self.gather([len(data) for data in pickled])
        received_sizes = [row[self.rank] for row in sizes]
        received = torch.empty(sum(received_sizes), dtype=torch.uint8)
        packed = torch.frombuffer(bytearray(b"".join(pickled)), dtype=torch.uint8)
        dist.all_to_all_single(received, packed, received_sizes, sizes[self.rank])
        return [pickle.loads(part.numpy()) for part in received.split(received_sizes)]

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Return the sum of each entry over data ranks, in float64 and rank order. A rank that lacks a key counts 0."""
        return sum_dicts(self.gather(values)[:: self.tp])

    def max(self, value: int) -> int:
        """Return the largest value of all processes."""
        return max(self.gather(value))

    def mean_and_std(self, x: torch.Tensor) -> tuple[float, float]:
        """Return mean and standard deviation (Bessel's correction) of the entries of all data ranks, in float64."""
        x = x.double()
        total = self.sum({"n": float(x.numel()), "sum": x.sum().item()})
        mean = total["sum"] / max(1.0, total["n"])
        squares = self.sum({"squares": ((x - mean) ** 2).sum().item()})["squares"]
        return mean, math.sqrt(squares / (total["n"] - 1)) if total["n"] > 1 else 0.0


def gather(item: Any) -> list[Any]:
    """Return every process's item, in rank order, on all processes; without a process group, only this one's."""
    items = [item] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(items) > 1:
        dist.all_gather_object(items, item)
    return items


def sum_dicts(items: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the sum of each entry over dictionaries; one that lacks a key counts 0."""
    names = sorted(set(chain.from_iterable(items)))
    return {name: sum(item.get(name, 0.0) for item in items) for name in names}


def copy_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy CPU tensors to a device: to a GPU in one transfer from pinned memory that does not block the host."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    sizes = [-(-part.numel() // 8) * 8 for part in parts]  # multiples of 8 bytes: every part is aligned
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, slot in zip(parts, packed.split(sizes), strict=True):
        slot[: part.numel()] = part
    slots = packed.to(device, non_blocking=True).split(sizes)
    moved = (slot[: part.numel()].view(t.dtype) for slot, part, t in zip(slots, parts, tensors, strict=True))
    return [part.view(tensor.shape) for part, tensor in zip(moved, tensors, strict=True)]


class Meter:
    """The metrics of a step on this process, reduced over data ranks once, when they are reported. `totals` are summed,
    and divided by their count if they have one; of `values` the largest is reported. A metric that was not measured is
    left out."""

    def __init__(self):
        # Tensors stay on their device until `reduce`, because reading one makes the host wait
        self.totals: dict[str, float | torch.Tensor] = defaultdict(float)
        self.counts: dict[str, float | torch.Tensor] = defaultdict(float)
        self.values: dict[str, float] = {}

    def add_mean(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float = 1) -> None:
        """Add to a metric that is a mean: `total` is the sum of `count` values."""
        self.sum(name, total)
        self.counts[name] += torch.as_tensor(count, dtype=torch.float64)

    def sum(self, name: str, value: torch.Tensor | float) -> None:
        """Add to a metric that is a sum."""
        self.totals[name] += torch.as_tensor(value, dtype=torch.float64)

    def max(self, name: str, value: torch.Tensor | float) -> None:
        """Update a metric that is a maximum."""
        self.values[name] = max(self.values.get(name, -math.inf), float(value))

    def set_replicated(self, name: str, value: float) -> None:
        """Set a metric that is the same on all ranks."""
        self.values[name] = float(value)

    def count_replicated(self, name: str, n: int = 1) -> None:
        """Add to a count that is the same on all ranks."""
        self.values[name] = self.values.get(name, 0.0) + n

    def reduce(self, ctx: DistContext) -> dict[str, float]:
        """Return the metrics, reduced over the data ranks, on all of them."""
        local = ({name: float(x) for name, x in items.items()} for items in (self.totals, self.counts, self.values))
        totals, counts, values = zip(*ctx.gather(tuple(local))[:: ctx.tp], strict=True)
        counts = sum_dicts(counts)
        metrics = {name: max(rank[name] for rank in values if name in rank) for name in sorted(set(chain(*values)))}
        for name, total in sum_dicts(totals).items():
            if counts.get(name) != 0:
                metrics[name] = total / counts.get(name, 1.0)
        return metrics


def _rendezvous() -> dict:
    """Return the arguments of init_process_group that let this process find the others, if torchrun has started any.
    Processes that torchrun restarts get the store of the ones before them, with addresses of dead processes (pytorch
    issue 135712), so they use keys with a prefix. With several nodes, each node counts its restarts separately, so
    torchrun has to be started with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
    env = os.environ
    if "RANK" not in env:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    attempt, one_node = env.get("TORCHELASTIC_RESTART_COUNT", "0"), env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]
    if attempt == "0" or not one_node or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    prefixed = dist.PrefixStore(f"restart{attempt}", store)
    return {"store": prefixed, "rank": int(env["RANK"]), "world_size": int(env["WORLD_SIZE"])}


def setup_distributed(timeout_minutes: float = 30.0, tp: int = 1) -> DistContext:
    """Join the process group that torchrun started, or make one of size 1, so that there is a single code path. A
    collective that a rank waits for longer than `timeout_minutes` fails."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the variable's older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", ALLOC_CONF)
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "cuda:nccl,cpu:gloo"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes), **_rendezvous())
    return DistContext(dist.get_rank(), dist.get_world_size(), device, tp)


RANK_HINT = (
    "This is rank {RANK} of {WORLD_SIZE}. If another rank ended before, read its message: this rank only lost its "
    "connection. To continue a training run from its newest checkpoint, use --resume auto."
)


def run_script(main: Callable, parse_args: Callable) -> None:
    """Run a script's main function, then end the process. A UserError is printed as one line; any other exception keeps
    its traceback."""
    use_utf8()
    keep_printing()
    code = 0
    try:
        with ErrorContext(RANK_HINT.format(**os.environ) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""):
            main(parse_args())
    except UserError as error:
        code = print_error_once("error: " + printable(error, 100_000, keep="\n"))
    except Interrupted as stop:
        print0(stop, file=sys.stderr)
        code = 128 + stop.signal_number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130  # 128 + SIGINT
    atexit._run_exitfuncs()  # before the process group is destroyed: in one of them vLLM destroys its own groups
    if dist.is_initialized():
        dist.destroy_process_group()
    if sys.stdout:
        sys.stdout.flush()
    # Not sys.exit: a gloo thread that still holds a tensor while the interpreter shuts down aborts the process (pytorch
    # pull request 179291), so that one complete run in twenty would be reported as failed
    os._exit(code)


def use_utf8() -> None:
    """Restart this process in Python's UTF-8 mode if its locale has another encoding, which text files would get."""
    if locale.getpreferredencoding(False).lower() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONUTF8": "1"})


def print_error_once(text: str) -> int:
    """Print an error, and write it to the file that torchrun shows at the end of its report. Return the exit code: 0 if
    another process of this torchrun has already printed the same error, so that torchrun reports only that process."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": text, "extraInfo": {"timestamp": int(time.time())}}
        try:
            Path(file).write_text(json.dumps({"message": message}))
            (Path(file).parent.parent / hashlib.sha256(text.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return 0
        except OSError:  # such as a full disk
            pass
    print(text, file=sys.stderr)
    return 1


def die_with_parent() -> None:
    """Make Linux send this process SIGTERM when the thread that started it ends (PR_SET_PDEATHSIG). Elsewhere, do
    nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def run_in_thread(work: Callable[[], Any], name: str) -> Future:
    """Start `work` in a daemon thread and return a Future of its result or exception. Unlike the threads of a pool, it
    does not keep the process from ending."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # future.result() raises it again
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def print0(*args, **kwargs) -> None:
    """Print on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*args, **kwargs)


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed from a name such as (seed, "sample", step, uid). Random numbers depend only on their name,
    so no state of a generator has to be saved or restored."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class StepTimer:
    """Timers of the phases of a step: `with timer("rollout"):` adds up seconds per name, and `pop_metrics()` returns
    them as time/* and resets them. At the start of a phase it calls `check`, which may raise, so that a run that was
    asked to stop does so between phases."""

    def __init__(self, check: Callable[[], None] = lambda: None):
        self.check = check
        self.seconds: dict[str, float] = {}
        self.current_phase = "set-up"  # parallel/watchdog.py sends this and the number of changes to the other ranks
        self.phase_count = 0

    @contextmanager
    def __call__(self, name: str, interruptible: bool = True, timed: bool = True) -> Iterator[None]:
        if interruptible:
            self.check()
        start = time.perf_counter()
        self._enter(name)
        yield
        self._enter(f"the code after {name}")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if timed:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _enter(self, name: str) -> None:
        self.current_phase = name
        self.phase_count += 1

    def pop_metrics(self) -> dict[str, float]:
        """Return the seconds of each phase as time/* and reset them."""
        seconds, self.seconds = self.seconds, {}
        return {f"time/{name}": s for name, s in seconds.items()}
