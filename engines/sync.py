"""How weights travel from the trainer to servers: by broadcast (gloo on CPUs, NCCL on GPUs), through a folder, or as an
adapter alone.

Nothing here knows the engine: a Sender brings weights to some servers and returns which of them failed, and why. Rank 0
of the trainer is rank 0 of the transfer's process group, the servers' workers are the other ranks; engines/worker.py is
their end in a server of vLLM's.
"""

import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import distributed_c10d

from engines.client import Calls, ServerClient, ServerUnavailable, collect_errors
from engines.common import iter_buckets
from errors import need, report_write_errors
from rollout import GetWeights
from utils import NamedTensors, run_in_thread

BUCKET_BYTES = 512 << 20  # sent at once
Clients = Sequence[ServerClient]
FailedServers = dict[str, str]  # URL of a server -> why it failed


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


@dataclass
class Sender:
    """A way to bring weights to servers (--sync). All ranks call `collect`, rank 0 alone the rest. `timeout`: seconds
    that a server may take for an answer. `save_adapter(folder)`, collective, writes the policy's adapter."""

    method: str  # --sync, as resolved
    calls: Calls
    timeout: float
    folder: Path  # which all servers see, with --sync disk and adapter
    save_adapter: Callable[[Path], None] | None = None
    clients: Clients = ()  # servers that `open` has connected with
    n_calls = n_bytes = 0  # of the last update

    def collect(self, weights: GetWeights, whole: bool, label: str) -> NamedTensors:
        """Return the tensors of an update: all (`whole`), or what is trained. All ranks iterate over them together."""
        return weights(not whole)

    def connect_senders(self, clients: Clients) -> FailedServers:
        """Connect with these servers instead of those before. Return which failed. They get all weights next."""
        self.clients = clients
        return self.connect()

    def connect(self) -> FailedServers:
        return {}

    def close(self) -> None:
        """Drop the connection, after a failure too."""

    def sync_weights(self, tensors: NamedTensors, whole: bool, label: str) -> FailedServers:
        """Bring tensors to the servers, which have stopped sampling, and give these weights their label."""
        self.n_calls = self.n_bytes = 0
        failed = self.each(lambda client: client.start_weight_update())
        for bucket in () if failed else iter_buckets(tensors, BUCKET_BYTES):
            failed = self.send_bucket(bucket, whole)
            self.n_calls += 1
            self.n_bytes += sum(tensor.nbytes for _, tensor in bucket)
            if failed:
                break
        return failed or self.finish(whole, lambda client: client.end_update(label))

    def send_bucket(self, bucket: list[tuple[str, torch.Tensor]], whole: bool) -> FailedServers:
        raise NotImplementedError

    def each(self, call: Callable[[Any], Coroutine]) -> FailedServers:
        """Call all servers at once. Return which failed."""
        return self.calls.each(self.clients, call)[1]

    def finish(self, whole: bool, name_weights: Callable[[Any], Coroutine]) -> FailedServers:
        """Name the weights that servers have now; of all weights, compare what they hold. Raise UserError if servers
        that were sent the same hold different weights."""
        failed = self.each(name_weights)
        if failed or not whole:
            return failed
        sums, failed = self.calls.each(self.clients, lambda client: client.checksums())
        for one, other in combinations([client for client in self.clients if client.url in sums], 2):
            a, b = sums[one.url], sums[other.url]
            if a.keys() == b.keys() and one.workers == other.workers:  # else their parameters are laid out differently
                differ = sorted(name for name in a if a[name] != b[name])
                need(not differ, f"--servers {one.url} and {other.url} hold other weights after the same were sent, "
                     f"first in {differ[:1]}; they must run one version with the same settings")
        return failed


def make_sender(how: str, kind: str, *more: Any) -> Sender:
    """Return the sender of --sync for servers of one kind. With NCCL, servers of vLLM's take vLLM's own transfer,
    SGLang's a torch process group. `more`: the other fields of a Sender."""
    kinds = {"disk": DiskSender, "adapter": AdapterSender}
    own = how == "nccl" and kind == "vllm"
    return (VLLMSender if own else kinds.get(how, GroupSender))(how, *more)


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


def server_ranks(clients: Clients) -> tuple[dict[str, int], int]:
    """Return the first rank of each server's workers, by URL, and the number of all ranks. The trainer has rank 0."""
    *first, world = accumulate((client.workers for client in clients), initial=1)
    return dict(zip([client.url for client in clients], first, strict=True)), world


class GroupSender(Sender):
    """Weights by broadcast in a torch process group of this process and all workers of the servers, over gloo or NCCL.

    If one member fails, all others wait for it. They do so for `wait_seconds`, a quarter of `timeout`, so that they can
    still say so, and only those to blame are left out."""

    group: dist.ProcessGroup | None = None

    @property
    def wait_seconds(self) -> float:
        return max(self.timeout / 4, min(self.timeout, 5.0))

    def connect(self) -> FailedServers:
        self.close()
        ranks, world = server_ranks(self.clients)
        where = {"address": local_address(self.clients), "port": free_port(), "world": world}
        where |= {"name": f"trainer-{os.urandom(8).hex()}", "seconds": self.wait_seconds}
        theirs = {client.url: self.calls.start(client.init_weight_transfer(self.method, where, ranks[client.url]))
                  for client in self.clients}  # fmt: skip
        ours = run_in_thread(partial(join_process_group, self.method, rank=0, **where), "transfer")
        failed = self.wait_for_members(theirs, ours)
        self.group = None if failed else ours.result()
        return failed

    def close(self) -> None:
        if self.group is not None:  # in a thread: it may wait for servers that are gone
            run_in_thread(partial(dist.destroy_process_group, self.group), "transfer")
        self.group = None

    def send_bucket(self, bucket: list[tuple[str, torch.Tensor]], whole: bool) -> FailedServers:
        """Tell each server what comes. It receives while this process sends."""
        metas = [tensor_meta(name, tensor) for name, tensor in bucket]
        crc = [tensor_checksum(tensor) for _, tensor in bucket] if whole else None
        theirs = {client.url: self.calls.start(client.update(metas, crc)) for client in self.clients}
        ours = run_in_thread(
            partial(broadcast_tensors, self.group, self.method, [tensor for _, tensor in bucket]), "transfer"
        )
        return self.wait_for_members(theirs, ours)

    def wait_for_members(self, theirs: dict[str, Future], ours: Future) -> FailedServers:
        """Wait until the servers' parts and this process's part of a collective are over. If any failed, return which
        servers are to blame: those that say nothing or are gone, else those that failed before that time was
        over."""
        parts = (ours, *theirs.values())
        end = time.monotonic() + self.wait_seconds
        wait(parts, self.wait_seconds, FIRST_EXCEPTION)
        left = end - time.monotonic()
        first = collect_errors(theirs) if left > 0 else {}
        wait(parts, max(left, 0.0) + self.wait_seconds / 2)  # those that wait in vain may say so
        errors = collect_errors(theirs)
        why = ours.exception() if ours.done() else "it is not over"
        silent = {url: "no answer while weights came" for url, future in theirs.items() if not future.done()}
        if not errors and not silent and why is None:
            return {}
        alive = self.calls.run_all([client.alive() for client in self.clients])
        gone = [client.url for client, answers in zip(self.clients, alive, strict=True) if not answers]
        guilty = silent | {url: errors[url] for url in gone if url in errors} or first or errors
        return guilty or dict.fromkeys(theirs, f"the transfer group broke (does another run use it?): {why}")


def broadcast_tensors(group: dist.ProcessGroup, backend: str, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        there = tensor.cpu() if backend == "gloo" else tensor
        dist.broadcast(there.contiguous(), group=group, group_src=0)


@contextmanager
def temporary_folder(folder: Path, what: str) -> Iterator[Path]:
    """A folder that servers read from, removed afterwards."""
    try:
        with report_write_errors(folder.parent, what):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class DiskSender(Sender):
    """Weights through a folder that all servers see, as safetensors files."""

    def connect(self) -> FailedServers:
        return self.each(lambda client: client.init_weight_transfer("disk", None, 0))

    def send_bucket(self, bucket: list[tuple[str, torch.Tensor]], whole: bool) -> FailedServers:
        # under a new name each: a network file system may still show the content of an older file
        with temporary_folder(self.folder / os.urandom(8).hex(), "--sync disk") as where:
            where.mkdir(parents=True)
            file = where / "weights.safetensors"
            save_file({name: tensor.cpu().contiguous() for name, tensor in bucket}, file)
            return self.each(lambda client: client.update_from_disk(file))


class AdapterSender(Sender):
    """The adapter alone, in PEFT's format. The weights below it are --model's, which the servers were started with."""

    def collect(self, weights: GetWeights, whole: bool, label: str) -> NamedTensors:
        """Write the adapter, on all ranks together. There are no tensors to send."""
        with report_write_errors(self.folder, "--sync adapter"):
            self.save_adapter(self.folder / label)
        return ()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def send(self, tensors: NamedTensors, whole: bool, label: str) -> FailedServers:
        with temporary_folder(self.folder / label, "--sync adapter") as where:
            self.n_calls, self.n_bytes = 1, sum(file.stat().st_size for file in where.iterdir())
            return self.each(lambda client: client.load_adapter(str(where), label))


class VLLMSender(Sender):
    """The trainer's end of vLLM's own NCCL transfer, packed. vLLM reads the weights from this object (WeightSource)
    and speaks to all servers through it (VLLMWeightSyncClient)."""

    native: Any = None

    def connect(self) -> FailedServers:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        def start() -> None:
            self.close()
            info = NCCLTrainerInitInfo(local_address(self.clients), free_port(), server_ranks(self.clients)[1], rank=0)
            self.native = WeightTransferTrainerFactory.trainer_init(info, client=self, source=self)

        return self.attempt(start)

    def close(self) -> None:
        if self.native is not None:
            self.native.shutdown()
        self.native = None

    def collect(self, weights: GetWeights, whole: bool, label: str) -> NamedTensors:
        tensors = weights(not whole)
        self.metadata = tensors.shapes  # vLLM calls it for names, dtypes and shapes; it gathers nothing
        return tensors

    def send(self, tensors: NamedTensors, whole: bool, label: str) -> FailedServers:
        self.n_calls, self.n_bytes, self.tensors = 1, 0, tensors
        return self.attempt(self.native.send_weights) or self.finish(
            whole, lambda client: client.set_weights_label(label)
        )

    def attempt(self, work: Callable[[], None]) -> FailedServers:
        """Do a part of the transfer, in which all servers fail together unless some said why."""
        self.failed: FailedServers = {}
        try:
            work()
        except (RuntimeError, ServerUnavailable) as error:
            everywhere = dict.fromkeys([client.url for client in self.clients], f"the transfer broke: {error}")
            self.failed = everywhere | self.failed
        return self.failed

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors:
            self.n_bytes += tensor.nbytes
            yield name, tensor

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        ranks, _ = server_ranks(self.clients)
        info = {url: init_info | {"rank_offset": rank} for url, rank in ranks.items()}
        self._all(lambda client: client.start_transfer({"how": "nccl", "info": info[client.url]}))

    def start_weight_update(self) -> None:
        self._all(lambda client: client.start_weight_update())

    def update_weights(self, update_info: dict) -> None:
        self._all(lambda client: client.send_update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all(lambda client: client.end_update(weight_version))

    def _all(self, call: Callable[[Any], Coroutine]) -> None:
        """Call all servers. vLLM's end must hear of a failure, or it would broadcast to nobody."""
        self.failed |= self.each(call)
        if self.failed:
            raise RuntimeError("; ".join(f"{url}: {why}" for url, why in self.failed.items()))
