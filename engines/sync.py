"""How weights travel from the trainer to servers: by broadcast (gloo on CPUs, NCCL on GPUs), through a folder, or as an
adapter alone.

Nothing here knows the engine: `make_sender` returns functions that bring weights to some servers and return which of
them failed, and why. Rank 0 of the trainer is rank 0 of the transfer's process group, the servers' workers are the
other ranks; engines/worker.py is their end in a server of vLLM's.
"""

import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import distributed_c10d

from engines.client import Calls, ServerClient, ServerUnavailable
from engines.common import iter_buckets
from errors import UserError, need, writing
from rollout import Weights
from utils import NamedTensors, in_thread

BUCKET_BYTES = 512 << 20  # sent at once
Clients = Sequence[ServerClient]
Failed = dict[str, str]  # URL of a server -> why it failed


# ----------------------------------------------------------------------------------------------------------------------
# What both ends use


class TensorMeta(NamedTuple):
    name: str
    dtype: str  # as torch has it: float32
    shape: Sequence[int]


def tensor_meta(name: str, tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def join_process_group(
    backend: str, address: str, port: int, rank: int, world: int, name: str, seconds: float
) -> dist.ProcessGroup:
    """Join a process group next to the default one that each process may have. The names in the store are those that
    SGLang uses, too."""
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(address, port, world, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    named = dist.PrefixStore(name, store)
    group, _ = distributed_c10d._new_process_group_helper(
        world, rank, [], dist.Backend(backend), named, group_name=name, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


def read_safetensors(path: str | Path) -> NamedTensors:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  it is no dict
            yield name, file.get_tensor(name)


# ----------------------------------------------------------------------------------------------------------------------
# The trainer's end


class Sent(NamedTuple):
    """What became of an update."""

    failed: Failed
    calls: int = 0
    n_bytes: int = 0


class Sender(NamedTuple):
    """A way to bring weights to servers (--sync). All ranks call `collect`, rank 0 alone the rest.

    collect(weights, whole, label)             return the tensors of an update: all (`whole`), or what is trained. All
                                               ranks must iterate over all of them, together
    open(clients) -> link, failed              connect with servers that get all weights next
    send(link, clients, tensors, whole, label) bring the tensors to servers that have stopped sampling, and give these
                                               weights their label; iterates over all tensors, also if servers fail
    close(link)                                drop a connection, after a failure too
    """

    open: Callable[[Clients], tuple[Any, Failed]]
    send: Callable[[Any, Clients, NamedTensors, bool, str], Sent]
    close: Callable[[Any], None] = lambda link: None
    collect: Callable[[Weights, bool, str], NamedTensors] = lambda weights, whole, label: weights(not whole)


def make_sender(
    how: str,
    kind: str,
    calls: Calls,
    timeout: float,
    folder: Path,
    save_adapter: Callable[[Path], None] | None = None,
) -> Sender:
    """Return the sender of --sync for servers of one kind. With NCCL, servers of vLLM's take vLLM's own transfer,
    SGLang's a torch process group.

    If one member of a process group fails, all others wait for it. They do so for a quarter of `timeout`, what a server
    may take for an answer, so that they can still say so, and only those to blame are left out."""
    folder = folder.absolute()
    if how == "adapter":
        remove = partial(shutil.rmtree, folder, ignore_errors=True)
        return Sender(
            lambda clients: (None, {}),
            partial(send_adapter, calls, folder),
            lambda link: remove(),
            partial(collect_adapter, folder, save_adapter),
        )
    if how == "disk":
        return Sender(partial(open_disk, calls), partial(send_files, calls, folder))
    if how == "nccl" and kind == "vllm":
        return Sender(partial(open_vllm, calls), VLLMTransfer.send, close_vllm)
    patience = max(timeout / 4, min(timeout, 5.0))
    return Sender(
        partial(open_process_group, calls, how, patience),
        partial(broadcast, calls, how, patience),
        leave_process_group,
    )


def finish(
    calls: Calls, clients: Clients, whole: bool, name_weights: Callable[[ServerClient], Coroutine]
) -> Failed:
    """Name the weights that servers have now; of all weights, compare what they hold. Raise UserError if servers that
    were sent the same hold different weights."""
    _, failed = calls.each(clients, name_weights)
    if failed or not whole:
        return failed
    sums, failed = calls.each(clients, lambda client: client.checksums())
    held = [client for client in clients if client.url in sums]
    for other in held[1:]:
        first = held[0]
        a, b = sums[first.url], sums[other.url]
        differ = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
        same_layout = a.keys() == b.keys() and first.workers == other.workers
        need(not (differ and same_layout), f"--servers {first.url} and {other.url} hold other weights after the same "
             f"were sent, first in {differ[:1]}; they must run one version with the same settings")
    return failed


# --- by broadcast in a torch process group, over gloo or NCCL ---


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def local_address(clients: Clients) -> str:
    """Return this machine's address as servers see it: on the way to one of another machine, if there is any."""
    seen = []
    for host in {urlsplit(client.url).hostname for client in clients}:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            seen.append(probe.getsockname()[0])
    return min(seen, key=lambda address: (address.startswith("127."), address))


def ranks_of(clients: Clients) -> tuple[dict[str, int], int]:
    """Return the first rank of each server's workers, by URL, and the number of all ranks. The trainer has rank 0."""
    *first, world = accumulate((client.workers for client in clients), initial=1)
    return dict(zip([client.url for client in clients], first, strict=True)), world


def open_process_group(
    calls: Calls, backend: str, patience: float, clients: Clients
) -> tuple[dist.ProcessGroup | None, Failed]:
    """Make a process group of this process and all workers of the servers."""
    ranks, world = ranks_of(clients)
    where = {"address": local_address(clients), "port": free_port(), "world": world}
    where |= {"name": f"trainer-{os.urandom(8).hex()}", "seconds": patience}
    theirs = {client.url: calls.start(client.join(backend, where, ranks[client.url])) for client in clients}
    ours = in_thread(partial(join_process_group, backend, rank=0, **where), "transfer")
    failed = wait_for_members(calls, clients, theirs, ours, patience)
    return None if failed else ours.result(), failed


def leave_process_group(group: dist.ProcessGroup | None) -> None:
    if group is not None:  # in a thread: it may wait for servers that are gone
        in_thread(partial(dist.destroy_process_group, group), "transfer")


def wait_for_members(
    calls: Calls, clients: Clients, theirs: Mapping[str, Future], ours: Future, patience: float
) -> Failed:
    """Wait until the servers' parts and this process's part of a collective are over. If any failed, return which
    servers are to blame: those that say nothing or are gone, else those that failed before their patience was over."""
    parts = (ours, *theirs.values())
    end = time.monotonic() + patience
    wait(parts, patience, FIRST_EXCEPTION)
    left = end - time.monotonic()
    first = errors_of(theirs) if left > 0 else {}
    wait(parts, max(left, 0.0) + patience / 2)  # those that wait in vain may say so
    errors = errors_of(theirs)
    why = ours.exception() if ours.done() else "it is not over"
    silent = {url: "no answer while weights came" for url, future in theirs.items() if not future.done()}
    if not errors and not silent and why is None:
        return {}
    alive = calls.run_all([client.alive() for client in clients])
    gone = [client.url for client, answers in zip(clients, alive, strict=True) if not answers]
    guilty = silent | {url: errors[url] for url in gone if url in errors} or first or errors
    return guilty or dict.fromkeys(theirs, f"the transfer group broke (does another run use it?): {why}")


def errors_of(futures: Mapping[str, Future]) -> Failed:
    """Return what those that are over failed with."""
    errors = {}
    for url, future in futures.items():
        if error := future.done() and future.exception():
            if not isinstance(error, ServerUnavailable | UserError):
                raise error
            errors[url] = str(error)
    return errors


def broadcast(
    calls: Calls,
    backend: str,
    patience: float,
    group: dist.ProcessGroup,
    clients: Clients,
    tensors: NamedTensors,
    whole: bool,
    label: str,
) -> Sent:
    """Send tensors bucket by bucket: each server is told what comes, and receives while this process sends."""
    n_calls = n_bytes = 0
    _, failed = calls.each(clients, lambda client: client.begin_update())
    for bucket in iter_buckets(tensors, BUCKET_BYTES):
        if failed:
            continue
        metas = [tensor_meta(name, tensor) for name, tensor in bucket]
        crc = [tensor_checksum(tensor) for _, tensor in bucket] if whole else None
        theirs = {client.url: calls.start(client.update(metas, crc)) for client in clients}
        ours = in_thread(partial(broadcast_tensors, group, backend, [tensor for _, tensor in bucket]), "transfer")
        failed = wait_for_members(calls, clients, theirs, ours, patience)
        n_calls += 1
        n_bytes += sum(tensor.nbytes for _, tensor in bucket)
    failed = failed or finish(calls, clients, whole, lambda client: client.end_update(label))
    return Sent(failed, n_calls, n_bytes)


def broadcast_tensors(group: dist.ProcessGroup, backend: str, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        there = tensor.cpu() if backend == "gloo" else tensor
        dist.broadcast(there.contiguous(), group=group, group_src=0)


# --- through a folder that all servers see ---


@contextmanager
def temporary_folder(folder: Path, what: str) -> Iterator[Path]:
    """A folder that servers read from, removed afterwards."""
    try:
        with writing(folder.parent, what):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_disk(calls: Calls, clients: Clients) -> tuple[None, Failed]:
    return None, calls.each(clients, lambda client: client.join("disk", None, 0))[1]


def send_files(
    calls: Calls, folder: Path, link: None, clients: Clients, tensors: NamedTensors, whole: bool, label: str
) -> Sent:
    """Send tensors as safetensors files."""
    files, n_bytes = [], 0
    with temporary_folder(folder / label, "--sync disk") as where:
        where.mkdir(parents=True)
        for number, bucket in enumerate(iter_buckets(tensors, BUCKET_BYTES)):
            files.append(f"weights-{number:05d}.safetensors")
            save_file({name: tensor.cpu().contiguous() for name, tensor in bucket}, where / files[-1])
            n_bytes += sum(tensor.nbytes for _, tensor in bucket)

        async def load(client: ServerClient) -> None:
            await client.begin_update()
            await client.update_from_disk(str(where), files)

        _, failed = calls.each(clients, load)
    failed = failed or finish(calls, clients, whole, lambda client: client.end_update(label))
    return Sent(failed, len(files), n_bytes)


# --- the adapter alone, in PEFT's format; the weights below it are --model's, which the servers were started with ---


def collect_adapter(
    folder: Path, save_adapter: Callable[[Path], None], weights: Weights, whole: bool, label: str
) -> NamedTensors:
    """Write the adapter, on all ranks together. There are no tensors to send."""
    try:
        with writing(folder, "--sync adapter"):
            save_adapter(folder / label)
    except UserError:
        shutil.rmtree(folder / label, ignore_errors=True)
        raise
    return []


def send_adapter(
    calls: Calls, folder: Path, link: None, clients: Clients, tensors: NamedTensors, whole: bool, label: str
) -> Sent:
    with temporary_folder(folder / label, "--sync adapter") as where:
        n_bytes = sum(file.stat().st_size for file in where.iterdir())
        _, failed = calls.each(clients, lambda client: client.load_adapter(str(where), label))
    return Sent(failed, 1, n_bytes)


# --- by vLLM's own NCCL transfer ---


class VLLMTransfer:
    """The trainer's end of vLLM's own NCCL transfer, packed. vLLM reads the weights from this object (WeightSource)
    and speaks to all servers through it (VLLMWeightSyncClient)."""

    native: Any = None

    def __init__(self, calls: Calls, clients: Clients):
        self.calls = calls
        self.clients = clients
        self.failed: Failed = {}

    def connect(self) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(local_address(self.clients), free_port(), ranks_of(self.clients)[1], rank=0)
        self.native = WeightTransferTrainerFactory.trainer_init(info, client=self, source=self)

    def send(self, clients: Clients, tensors: NamedTensors, whole: bool, label: str) -> Sent:
        """`tensors` have `shapes()`, which gathers nothing."""
        self.n_bytes, self.shapes, self.tensors = 0, tensors.shapes, iter(tensors)
        self.attempt(self.native.send_weights)
        for _ in self.tensors:  # all ranks iterate together
            pass
        failed = self.failed or finish(self.calls, clients, whole, lambda client: client.name_weights(label))
        return Sent(failed, 1, self.n_bytes)

    def attempt(self, work: Callable[[], None]) -> None:
        """Do a part of the transfer, in which all servers fail together unless some said why."""
        self.failed = {}
        try:
            work()
        except (RuntimeError, ServerUnavailable) as error:
            everywhere = dict.fromkeys([client.url for client in self.clients], f"the transfer broke: {error}")
            self.failed = everywhere | self.failed

    def metadata(self) -> list[Any]:
        """Return names, dtypes and shapes of tensors that are not gathered yet."""
        return self.shapes()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors:
            self.n_bytes += tensor.nbytes
            yield name, tensor

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        ranks, _ = ranks_of(self.clients)
        info = {url: init_info | {"rank_offset": rank} for url, rank in ranks.items()}
        self._all(lambda client: client.start_transfer({"how": "nccl", "info": info[client.url]}))

    def start_weight_update(self) -> None:
        self._all(lambda client: client.begin_update())

    def update_weights(self, update_info: dict) -> None:
        self._all(lambda client: client.send_update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all(lambda client: client.end_update(weight_version))

    def _all(self, call: Callable[[Any], Coroutine]) -> None:
        """Call all servers. vLLM's end must hear of a failure, or it would broadcast to nobody."""
        _, failed = self.calls.each(self.clients, call)
        self.failed |= failed
        if self.failed:
            raise RuntimeError("; ".join(f"{url}: {why}" for url, why in self.failed.items()))


def open_vllm(calls: Calls, clients: Clients) -> tuple[VLLMTransfer, Failed]:
    transfer = VLLMTransfer(calls, clients)
    transfer.attempt(transfer.connect)
    return transfer, transfer.failed


def close_vllm(transfer: VLLMTransfer | None) -> None:
    if transfer is not None and transfer.native is not None:
        transfer.native.shutdown()
