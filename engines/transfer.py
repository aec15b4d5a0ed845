"""How weights travel from the trainer to servers: by broadcast (gloo on CPUs, NCCL on GPUs), or through a folder.

Rank 0 of the trainer is rank 0 of the transfer group, the servers' workers are the others. What a server is told is in
engines/vllm_server.py and engines/sglang_server.py; of this file vLLM's workers use the first half.
"""

import shutil
import socket
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
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

from engines.vllm_weights import buckets
from engines.wire import Lost
from errors import UserError, need, writing
from utils import NamedTensors, in_thread


class Meta(NamedTuple):
    name: str
    dtype: str  # as torch has it: float32
    shape: Sequence[int]


def meta_of(name: str, tensor: torch.Tensor) -> Meta:
    return Meta(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def join(backend: str, address: str, port: int, rank: int, world: int, name: str, seconds: float) -> dist.ProcessGroup:
    """A group of processes that share no default group, apart from the one that each of them may have. The names in the
    store are those that SGLang uses, too."""
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(address, port, world, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    named = dist.PrefixStore(name, store)
    group, _ = distributed_c10d._new_process_group_helper(
        world, rank, [], dist.Backend(backend), named, group_name=name, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


def read_file(path: str | Path) -> NamedTensors:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  it is no dict
            yield name, file.get_tensor(name)


@contextmanager
def kept_while(folder: Path, what: str) -> Iterator[Path]:
    """A folder that servers read from, and that is gone afterwards."""
    try:
        with writing(folder.parent, what):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def master_address(servers: Sequence[Any]) -> str:
    """Of this machine, as servers see it: by the way to one that is on another machine, if any is."""
    seen = []
    for host in {urlsplit(server.url).hostname for server in servers}:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            seen.append(probe.getsockname()[0])
    return min(seen, key=lambda address: (address.startswith("127."), address))


# ----------------------------------------------------------------------------------------------------------------------
# The trainer's end


class Transfer:
    """One way to bring weights to servers. `engine` is the ServerEngine, whose event loop speaks to them.

    `send` is called on all processes of the trainer, because gathering shards is; rank 0 alone speaks. What goes
    wrong with a server is put into `failed`, url -> why; then nobody samples before all of it was done again.

    A way has two methods that `send` calls on rank 0: open() makes a new group of `servers`, and
    bring(tensors, label) brings them the tensors, and returns how many calls and bytes that took."""

    bucket_bytes = 512 << 20  # handed over at once

    def __init__(self, engine: Any, folder: Path):
        self.engine = engine
        self.folder = folder.absolute()
        self.members: list[str] = []  # urls of those that have all weights
        self.failed: dict[str, str] = {}
        self.groups = 0  # made so far: each has a name of its own

    def send(
        self, weights: Callable[[bool], NamedTensors], servers: Sequence[Any], whole: bool, label: str
    ) -> dict[str, float]:
        """Pause the servers, bring them all weights (`whole`) or what is trained, name them, go on."""
        self.failed = {}
        self.servers = servers
        self.whole = whole
        self.given = weights(not whole)
        tensors = iter(self.given)  # the one pass over it that all processes make together
        stats: dict[str, float] = {}
        if self.engine.ctx.main:
            self.members = []
            self.on_each(lambda server: server.pause(self.engine.in_flight))
            if whole and not self.failed:
                self.open()
            if not self.failed:
                calls, n_bytes = self.bring(tensors, label)
                stats = {"sync/calls": float(calls), "sync/bytes": float(n_bytes)}
            if whole and not self.failed:
                self.compare()
            if not self.failed:
                self.on_each(lambda server: server.resume())
            if self.failed:
                self.close()
            else:
                self.members = [server.url for server in servers]
        for _ in tensors:  # on other processes all of them; here those that nobody is left to take
            pass
        return stats

    def on_each(self, call: Callable[[Any], Coroutine]) -> dict[str, Any]:
        """Of the servers, at once; the answers of those that gave one, by url."""
        futures = {server.url: self.engine.start(call(server)) for server in self.servers}
        answers = {}
        for url, future in futures.items():
            try:
                answers[url] = future.result()
            except (Lost, UserError) as error:
                self.failed.setdefault(url, str(error))
        return answers

    def ranks(self) -> dict[Any, int]:
        """Return the first rank in the transfer group of each server's workers, and of None how many there are in all;
        the trainer has rank 0."""
        counts = [self.engine.workers[server.url] for server in self.servers]
        return dict(zip([*self.servers, None], accumulate(counts, initial=1), strict=True))

    def compare(self) -> None:
        """Servers that got the same must hold the same."""
        sums = self.on_each(lambda server: server.checksums())
        urls = list(sums)
        for url in urls[1:]:
            a, b = sums[urls[0]], sums[url]
            differ = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
            same_layout = a.keys() == b.keys() and self.engine.workers[url] == self.engine.workers[urls[0]]
            need(not (differ and same_layout), f"--servers {urls[0]} and {url} hold other weights after the same were "
                 f"sent, first in {differ[:1]}; they must run one version with the same settings")

    def close(self) -> None:
        """Leave the group, if there is one."""


class Group(Transfer):
    """By broadcast in a torch process group, over gloo or NCCL.

    Where one member fails, all others wait for it as long as the group has patience: a quarter of what a server may
    take for an answer, so that they can say so, and only those to blame are lost."""

    backend = "gloo"
    group: dist.ProcessGroup | None = None

    @property
    def patience(self) -> float:
        """Seconds that members wait for one another."""
        return max(self.engine.seconds / 4, min(self.engine.seconds, 5.0))

    def open(self) -> None:
        self.close()
        self.groups += 1
        ranks = self.ranks()
        joining = {
            "address": master_address(self.servers),
            "port": free_port(),
            "world": ranks[None],
            "name": f"{self.engine.run}-{self.groups}",
            "seconds": self.patience,
        }
        futures = [self.engine.start(server.join(self.backend, joining, ranks[server])) for server in self.servers]
        mine = in_thread(partial(join, self.backend, rank=0, **joining), "transfer")
        if self.wait(futures, mine):
            self.group = mine.result()

    def wait(self, futures: Sequence[Future], mine: Future) -> bool:
        """Until all are over, this process's part too. False if any failed; `failed` then has those to blame: who says
        nothing or is gone, else who failed before its patience was over."""
        asked = dict(zip(self.servers, futures, strict=True))
        parts = (mine, *futures)
        end = time.monotonic() + self.patience
        while not all(map(Future.done, parts)) and not any(part.done() and part.exception() for part in parts):
            time.sleep(0.002)
        first = self.errors(asked) if time.monotonic() < end else {}
        end = max(end, time.monotonic()) + self.patience / 2  # for those that wait in vain, to say so
        while not all(map(Future.done, parts)) and time.monotonic() < end:
            time.sleep(0.002)
        errors = self.errors(asked)
        why = mine.exception() if mine.done() else "it is not over"
        silent = {server.url: "no answer while weights came" for server, future in asked.items() if not future.done()}
        if not errors and not silent and why is None:
            return True
        alive = self.engine.wait_for([server.alive() for server in self.servers])
        gone = [server.url for server, answers in zip(self.servers, alive, strict=True) if not answers]
        guilty = silent | {url: errors[url] for url in gone if url in errors} or first or errors
        broke = f"the transfer group broke (does another run use it?): {why}"
        self.failed |= guilty or {server.url: broke for server in self.servers}
        return False

    def errors(self, asked: dict[Any, Future]) -> dict[str, str]:
        """What those that are over failed with, by url."""
        errors = {}
        for server, future in asked.items():
            if error := future.done() and future.exception():
                if not isinstance(error, Lost | UserError):
                    raise error
                errors[server.url] = str(error)
        return errors

    def bring(self, tensors: NamedTensors, label: str) -> tuple[int, int]:
        calls = n_bytes = 0
        self.on_each(lambda server: server.begin_update())
        for bucket in buckets(tensors, self.bucket_bytes):
            if self.failed:
                break
            metas = [meta_of(name, tensor) for name, tensor in bucket]
            crc = [checksum(tensor) for _, tensor in bucket] if self.whole else None
            futures = [self.engine.start(server.update(metas, crc)) for server in self.servers]
            mine = in_thread(partial(self.broadcast, [tensor for _, tensor in bucket]), "transfer")
            self.wait(futures, mine)
            calls += 1
            n_bytes += sum(tensor.nbytes for _, tensor in bucket)
        if not self.failed:
            self.on_each(lambda server: server.end_update(label))
        return calls, n_bytes

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            there = tensor.cpu() if self.backend == "gloo" else tensor
            dist.broadcast(there.contiguous(), group=self.group, group_src=0)

    def close(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            # it may wait for servers that are gone
            in_thread(partial(dist.destroy_process_group, group), "transfer")


class Disk(Transfer):
    """By safetensors files in a folder that all servers see."""

    def open(self) -> None:
        self.on_each(lambda server: server.join("disk", None, 0))

    def bring(self, tensors: NamedTensors, label: str) -> tuple[int, int]:
        files, n_bytes = [], 0
        with kept_while(self.folder / label, "--sync disk") as folder:
            folder.mkdir(parents=True)
            for number, bucket in enumerate(buckets(tensors, self.bucket_bytes)):
                files.append(f"weights-{number:05d}.safetensors")
                save_file({name: tensor.cpu().contiguous() for name, tensor in bucket}, folder / files[-1])
                n_bytes += sum(tensor.nbytes for _, tensor in bucket)

            async def load(server: Any) -> None:
                await server.begin_update()
                await server.update_from_disk(str(folder), files)
                await server.end_update(label)

            self.on_each(load)
        return len(files), n_bytes


class Native(Transfer):
    """By vLLM's own NCCL transfer, packed. Its trainer's end reads the weights from this object (WeightSource), and
    speaks to all servers through it (VLLMWeightSyncClient)."""

    native: Any = None

    def open(self) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self.close()
        info = NCCLTrainerInitInfo(master_address(self.servers), free_port(), self.ranks()[None], rank=0)
        self.native = WeightTransferTrainerFactory.trainer_init(info, client=self, source=self)

    def bring(self, tensors: NamedTensors, label: str) -> tuple[int, int]:
        self.tensors = tensors
        try:
            self.native.send_weights()
        except (RuntimeError, Lost) as error:
            self.failed = {server.url: f"the transfer broke: {error}" for server in self.servers} | self.failed
        if not self.failed:
            self.on_each(lambda server: server.name_weights(label))
        return 1, self.n_bytes

    def close(self) -> None:
        if self.native is not None:
            self.native.shutdown()
            self.native = None

    def metadata(self) -> list[Any]:
        """Names, dtypes and shapes, of nothing that is gathered yet."""
        self.n_bytes = 0
        return self.given.shapes()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors:
            self.n_bytes += tensor.nbytes
            yield name, tensor

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        ranks = self.ranks()
        info = {server: init_info | {"rank_offset": rank} for server, rank in ranks.items()}
        self._all(lambda server: server.start_transfer({"how": "nccl", "info": info[server]}))

    def start_weight_update(self) -> None:
        self._all(lambda server: server.begin_update())

    def update_weights(self, update_info: dict) -> None:
        self._all(lambda server: server.send_update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all(lambda server: server.end_update(weight_version))

    def _all(self, call: Callable[[Any], Coroutine]) -> None:
        """vLLM's end must hear of a failure, or it would broadcast to nobody."""
        self.on_each(call)
        if self.failed:
            raise RuntimeError("; ".join(f"{url}: {why}" for url, why in self.failed.items()))


class Adapter(Transfer):
    """The adapter alone, in PEFT's format, through a folder that all servers see; the weights below it are --model's,
    which the servers were started with. `save`, collective, writes it."""

    save: Callable[[Path], None]

    def send(
        self, weights: Callable[[bool], NamedTensors], servers: Sequence[Any], whole: bool, label: str
    ) -> dict[str, float]:
        self.failed = {}
        self.servers = servers
        if not self.engine.ctx.main:
            self.save(self.folder / label)
            return {}
        with kept_while(self.folder / label, "--sync adapter") as folder:
            self.save(folder)
            n_bytes = sum(file.stat().st_size for file in folder.iterdir())
            self.on_each(lambda server: server.pause(self.engine.in_flight))
            if not self.failed:
                self.on_each(lambda server: server.load_adapter(str(folder), label))
            if not self.failed:
                self.on_each(lambda server: server.resume())
        self.members = [] if self.failed else [server.url for server in servers]
        return {"sync/calls": 1.0, "sync/bytes": float(n_bytes)}


def make_transfer(
    how: str, engine: Any, folder: Path, save_adapter: Callable[[Path], None] | None = None
) -> Transfer:
    """Of --sync. With NCCL, vLLM's servers take vLLM's own way, SGLang's a torch process group."""
    kind = next(iter(engine.servers.values())).kind
    if how == "adapter":
        transfer = Adapter(engine, folder)
        transfer.save = save_adapter
        return transfer
    if how == "nccl" and kind == "vllm":
        return Native(engine, folder)
    transfer = {"gloo": Group, "nccl": Group, "disk": Disk}[how](engine, folder)
    transfer.backend = how
    return transfer
