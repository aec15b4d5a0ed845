"""Weight sync from the trainer to servers: by broadcast (gloo on CPUs, NCCL on GPUs), through a folder, or the adapter
alone.

A Sender sends weights to some servers and returns which of them failed, and why; it does not depend on the engine.
Rank 0 of the trainer is rank 0 of the transfer's process group, and the servers' workers are its other ranks. In a vLLM
server, engines/worker.py receives the weights.
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

BUCKET_BYTES = 512 << 20  # sent at a time
Clients = Sequence[ServerClient]
FailedServers = dict[str, str]  # URL of a server that failed -> reason


# ----------------------------------------------------------------------------------------------------------------------
# Shared by the trainer and the servers


class TensorMeta(NamedTuple):
    """Name, dtype and shape of a tensor, which a server needs to receive it."""

    name: str
    dtype: str  # torch's name, such as float32
    shape: Sequence[int]


def tensor_meta(name: str, tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def join_process_group(
    backend: str, address: str, port: int, rank: int, world: int, name: str, seconds: float
) -> dist.ProcessGroup:
    """Create and return a process group that is independent of the process's default one. Its keys in the store have
    the names that SGLang uses, so that SGLang's workers can join it."""
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(address, port, world, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    prefixed = dist.PrefixStore(name, store)
    group, _ = distributed_c10d._new_process_group_helper(
        world, rank, [], dist.Backend(backend), prefixed, group_name=name, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


def read_safetensors(path: str | Path) -> NamedTensors:
    """Yield the tensors of a safetensors file with their names."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  file is not a dict
            yield name, file.get_tensor(name)


# ----------------------------------------------------------------------------------------------------------------------
# The trainer's side


@dataclass
class Sender:
    """Sends weights to servers, by one method of --sync. All ranks call `collect`, only rank 0 the other methods.

    `timeout`: seconds that a server may take to answer a request. `save_adapter(folder)` is a collective that writes
    the policy's adapter."""

    method: str  # --sync, with auto resolved
    calls: Calls
    timeout: float
    folder: Path  # for --sync disk and adapter; all servers must be able to read it
    save_adapter: Callable[[Path], None] | None = None
    clients: Clients = ()  # servers of the last connect_to
    n_calls = n_bytes = 0  # of the last update

    def collect(self, weights: GetWeights, full: bool, label: str) -> NamedTensors:
        """Return the tensors of an update: all weights (`full`), or the trained ones. All ranks iterate over them
        together."""
        return weights(not full)

    def connect_to(self, clients: Clients) -> FailedServers:
        """Connect to these servers in place of the current ones. Return which failed. Their next update must be a full
        one."""
        self.clients = clients
        return self.connect()

    def connect(self) -> FailedServers:
        """Connect to self.clients. Return which failed."""
        return {}

    def close(self) -> None:
        """Close the connection. This must also work after a failure."""

    def sync_weights(self, tensors: NamedTensors, full: bool, label: str) -> FailedServers:
        """Send tensors to the servers, which have stopped sampling, and set the label of the new weights."""
        self.n_calls = self.n_bytes = 0
        failed = self.each(lambda client: client.start_weight_update())
        for bucket in () if failed else iter_buckets(tensors, BUCKET_BYTES):
            failed = self.send_bucket(bucket, full)
            self.n_calls += 1
            self.n_bytes += sum(tensor.nbytes for _, tensor in bucket)
            if failed:
                break
        return failed or self.finish(full, lambda client: client.end_update(label))

    def send_bucket(self, bucket: list[tuple[str, torch.Tensor]], full: bool) -> FailedServers:
        """Send a part of the tensors of an update. Return which servers failed."""
        raise NotImplementedError

    def each(self, call: Callable[[Any], Coroutine]) -> FailedServers:
        """Run `call` for all servers at the same time. Return which failed."""
        return self.calls.each(self.clients, call)[1]

    def finish(self, full: bool, set_label: Callable[[Any], Coroutine]) -> FailedServers:
        """Set the label of the servers' new weights and, after a full update, compare checksums between servers. Return
        which servers failed. Raise UserError if servers that got the same tensors have different weights."""
        failed = self.each(set_label)
        if failed or not full:
            return failed
        sums, failed = self.calls.each(self.clients, lambda client: client.checksums())
        for left, right in combinations([client for client in self.clients if client.url in sums], 2):
            a, b = sums[left.url], sums[right.url]
            if a.keys() == b.keys() and left.workers == right.workers:  # else the layouts of their parameters differ
                differ = sorted(name for name in a if a[name] != b[name])
                need(not differ, f"--servers {left.url} and {right.url} have different weights after the same ones "
                     f"were sent, the first in {differ[:1]}; run them with the same version and settings")
        return failed


def make_sender(method: str, server_kind: str, *args: Any) -> Sender:
    """Return the sender for a method of --sync and servers of one kind. With nccl, vLLM servers use vLLM's own transfer
    and SGLang servers a torch process group. `args`: the other fields of Sender."""
    senders = {"disk": DiskSender, "adapter": AdapterSender}
    uses_vllm_transfer = method == "nccl" and server_kind == "vllm"
    return (VLLMSender if uses_vllm_transfer else senders.get(method, GroupSender))(method, *args)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def local_address(clients: Clients) -> str:
    """Return this machine's address on its route to the servers, preferably to one on another machine."""
    addresses = []
    for host in {urlsplit(client.url).hostname for client in clients}:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # UDP: sends nothing
            addresses.append(probe.getsockname()[0])
    return min(addresses, key=lambda address: (address.startswith("127."), address))


def server_ranks(clients: Clients) -> tuple[dict[str, int], int]:
    """Return the first rank of each server's workers, by URL, and the number of ranks. Rank 0 is the trainer."""
    *first_ranks, world = accumulate((client.workers for client in clients), initial=1)
    return dict(zip([client.url for client in clients], first_ranks, strict=True)), world


class GroupSender(Sender):
    """Broadcasts weights, over gloo or NCCL, in a torch process group of this process and all workers of the servers.

    If a member fails, all others wait for it. They wait for `wait_seconds`, a quarter of `timeout`, so that they can
    still report it and only the servers at fault are marked unavailable."""

    group: dist.ProcessGroup | None = None

    @property
    def wait_seconds(self) -> float:
        """Time limit of a collective, in seconds."""
        return max(self.timeout / 4, min(self.timeout, 5.0))

    def connect(self) -> FailedServers:
        self.close()
        ranks, world = server_ranks(self.clients)
        args = {"address": local_address(self.clients), "port": free_port(), "world": world}
        args |= {"name": f"trainer-{os.urandom(8).hex()}", "seconds": self.wait_seconds}
        joining = {client.url: self.calls.start(client.init_weight_transfer(self.method, args, ranks[client.url]))
                   for client in self.clients}  # fmt: skip
        local = run_in_thread(partial(join_process_group, self.method, rank=0, **args), "transfer")
        failed = self.wait_for_members(joining, local)
        self.group = None if failed else local.result()
        return failed

    def close(self) -> None:
        if self.group is not None:  # in a thread, because it may wait for servers that are down
            run_in_thread(partial(dist.destroy_process_group, self.group), "transfer")
        self.group = None

    def send_bucket(self, bucket: list[tuple[str, torch.Tensor]], full: bool) -> FailedServers:
        """Announce the tensors to each server, which receives them while this process broadcasts."""
        metas = [tensor_meta(name, tensor) for name, tensor in bucket]
        crc = [tensor_checksum(tensor) for _, tensor in bucket] if full else None
        receiving = {client.url: self.calls.start(client.update(metas, crc)) for client in self.clients}
        local = run_in_thread(
            partial(broadcast_tensors, self.group, self.method, [tensor for _, tensor in bucket]), "transfer"
        )
        return self.wait_for_members(receiving, local)

    def wait_for_members(self, remote: dict[str, Future], local: Future) -> FailedServers:
        """Wait for a collective: for the servers' futures and for this process's own. If it fails, return the servers
        at fault: those that do not answer or are down, or else those that failed before `wait_seconds` were over."""
        futures = (local, *remote.values())
        end = time.monotonic() + self.wait_seconds
        wait(futures, self.wait_seconds, FIRST_EXCEPTION)
        seconds_left = end - time.monotonic()
        early_errors = collect_errors(remote) if seconds_left > 0 else {}
        wait(futures, max(seconds_left, 0.0) + self.wait_seconds / 2)  # the others time out and report it
        errors = collect_errors(remote)
        why = local.exception() if local.done() else "it did not finish"
        silent = {url: "no answer during the weight sync" for url, future in remote.items() if not future.done()}
        if not errors and not silent and why is None:
            return {}
        alive = self.calls.run_all([client.alive() for client in self.clients])
        down = [client.url for client, is_alive in zip(self.clients, alive, strict=True) if not is_alive]
        at_fault = silent | {url: errors[url] for url in down if url in errors} or early_errors or errors
        return at_fault or dict.fromkeys(remote, f"the process group broke (does another run use the server?): {why}")


def broadcast_tensors(group: dist.ProcessGroup, backend: str, tensors: Sequence[torch.Tensor]) -> None:
    """Broadcast tensors from this process, which has rank 0, to the process group."""
    for tensor in tensors:
        source = tensor.cpu() if backend == "gloo" else tensor
        dist.broadcast(source.contiguous(), group=group, group_src=0)


@contextmanager
def temporary_folder(folder: Path, what: str) -> Iterator[Path]:
    """Yield a folder that servers read from, and remove it at the end. Raise UserError if it cannot be written."""
    try:
        with report_write_errors(folder.parent, what):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class DiskSender(Sender):
    """Sends weights as safetensors files in a folder that all servers can read."""

    def connect(self) -> FailedServers:
        return self.each(lambda client: client.init_weight_transfer("disk", None, 0))

    def send_bucket(self, bucket: list[tuple[str, torch.Tensor]], full: bool) -> FailedServers:
        # each file gets a new name, because a network file system may still show the content of an older file
        with temporary_folder(self.folder / os.urandom(8).hex(), "--sync disk") as folder:
            folder.mkdir(parents=True)
            file = folder / "weights.safetensors"
            save_file({name: tensor.cpu().contiguous() for name, tensor in bucket}, file)
            return self.each(lambda client: client.update_from_disk(file))


class AdapterSender(Sender):
    """Sends only the adapter, in PEFT's format. The servers were started with the base weights of --model."""

    def collect(self, weights: GetWeights, full: bool, label: str) -> NamedTensors:
        """Write the adapter, on all ranks together. Return no tensors, as servers read the files."""
        with report_write_errors(self.folder, "--sync adapter"):
            self.save_adapter(self.folder / label)
        return ()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def sync_weights(self, tensors: NamedTensors, full: bool, label: str) -> FailedServers:
        with temporary_folder(self.folder / label, "--sync adapter") as folder:
            self.n_calls, self.n_bytes = 1, sum(file.stat().st_size for file in folder.iterdir())
            return self.each(lambda client: client.load_adapter(str(folder), label))


class VLLMSender(Sender):
    """The trainer's side of vLLM's own packed NCCL transfer. vLLM reads the weights from this object (as a
    WeightSource) and calls all servers through it (as a VLLMWeightSyncClient)."""

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

    def collect(self, weights: GetWeights, full: bool, label: str) -> NamedTensors:
        tensors = weights(not full)
        self.metadata = tensors.shapes  # vLLM calls this for names, dtypes and shapes; it gathers no tensor
        return tensors

    def sync_weights(self, tensors: NamedTensors, full: bool, label: str) -> FailedServers:
        self.n_calls, self.n_bytes, self.tensors = 1, 0, tensors
        return self.attempt(self.native.send_weights) or self.finish(
            full, lambda client: client.set_weights_label(label)
        )

    def attempt(self, work: Callable[[], None]) -> FailedServers:
        """Run a part of the transfer. Return the servers that failed: all of them, if it raises. Servers that reported
        an error keep it as their reason."""
        self.failed: FailedServers = {}
        try:
            work()
        except (RuntimeError, ServerUnavailable) as error:
            all_failed = dict.fromkeys([client.url for client in self.clients], f"the transfer failed: {error}")
            self.failed = all_failed | self.failed
        return self.failed

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors:
            self.n_bytes += tensor.nbytes
            yield name, tensor

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        ranks, _ = server_ranks(self.clients)
        info = {url: init_info | {"rank_offset": rank} for url, rank in ranks.items()}
        self._call_all(lambda client: client.start_transfer({"how": "nccl", "info": info[client.url]}))

    def start_weight_update(self) -> None:
        self._call_all(lambda client: client.start_weight_update())

    def update_weights(self, update_info: dict) -> None:
        self._call_all(lambda client: client.send_update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call_all(lambda client: client.end_update(weight_version))

    def _call_all(self, call: Callable[[Any], Coroutine]) -> None:
        """Run `call` for all servers. Raise RuntimeError if one failed, because vLLM would otherwise start a broadcast
        that nobody receives."""
        self.failed |= self.each(call)
        if self.failed:
            raise RuntimeError("; ".join(f"{url}: {why}" for url, why in self.failed.items()))
