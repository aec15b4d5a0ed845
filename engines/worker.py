"""A vLLM server's end of weight sync.

`vllm serve --worker-extension-cls engines.worker.Extension` imports this file in every worker before the model loads;
then /init_weight_transfer_engine and the requests after it speak to `Receiver`. Tested with vLLM 0.32.0.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from engines.sync import join_process_group, read_safetensors, tensor_checksum
from engines.vllm_cpu import disable_weight_packing
from engines.vllm_weights import WeightLoader
from utils import NamedTensors


@dataclass
class TransferInitInfo(WeightTransferInitInfo):
    """The start of a transfer. `how`: gloo, nccl or disk; `info`: what that needs."""

    how: str
    info: dict = field(default_factory=dict)


@dataclass
class TransferUpdateInfo(WeightTransferUpdateInfo):
    """An update: tensors that the trainer broadcasts, in this order; or a file of them; or `check`, which fails unless
    all that should come have come. `crc`: checksum of each tensor."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    crc: list[int] | None = None
    path: str | None = None
    check: bool = False


class WeightReceiver(WeightTransferEngine):
    """Copies received tensors into the live parameters. vLLM's own engines load layer by layer from scratch, which
    leaves garbage where a part of a fused module comes alone (an adapter on q and v), and a dead server if an update
    fails. With this one the server stays alive, with a mixture of weights: do not use it before the next update."""

    init_info_cls, update_info_cls = TransferInitInfo, TransferUpdateInfo

    def init_transfer_engine(self, info: TransferInitInfo) -> None:
        self.shutdown()
        self.loader = WeightLoader(self.model, self.model_config.hf_config)
        self.whole = True  # what comes first must be all
        if info.method == "nccl":
            self.native = self._native(info.info)
        elif info.method == "gloo":
            parallel = self.parallel_config
            own = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self.group = join_process_group("gloo", rank=info.info["rank_offset"] + own, **info.info["group"])

    def _native(self, info: dict) -> WeightTransferEngine:
        """vLLM's own NCCL receiver, with our way to load."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        target = SimpleNamespace(load_weights=self.loader.load)
        engine = NCCLWeightTransferEngine(self.config, self.vllm_config, self.device, target)
        engine.init_transfer_engine(engine.parse_init_info(info))
        return engine

    def start_weight_update(self) -> None:
        self.loader.start_update()

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def receive_weights(self, info: TransferUpdateInfo) -> None:
        if info.check:
            self.loader.finish_update(self.whole)
            self.whole = False
        elif info.path is not None:
            self.loader.load(read_safetensors(info.path))
        elif self.native is not None:
            fields = {"names": info.names, "dtype_names": info.dtype_names, "shapes": info.shapes}
            self.native.receive_weights(self.native.parse_update_info(fields))
        else:
            self.loader.load(self._broadcast(info))

    def _broadcast(self, info: TransferUpdateInfo) -> NamedTensors:
        """Receive all tensors, then compare checksums: after an early error the other members would hang."""
        received = []
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            torch.distributed.broadcast(tensor, group=self.group, group_src=0)
            received.append((name, tensor))
        for (name, tensor), sent in zip(received, info.crc or [], strict=False):
            if tensor_checksum(tensor) != sent:
                raise ValueError(f"{name} is not what was sent: its checksum differs")
        return [(name, tensor.to(self.device)) for name, tensor in received]

    def finish_weight_update(self) -> None:
        """Do nothing: parameters were copied in place."""

    group = native = None

    def shutdown(self) -> None:
        if self.native is not None:
            self.native.shutdown()
        if self.group is not None:
            with suppress(RuntimeError, ValueError):  # the trainer may be gone already
                torch.distributed.destroy_process_group(self.group)
        self.group = self.native = None


class WorkerExtension:
    """What --worker-extension-cls names; importing this file is what matters."""


WeightTransferEngineFactory.register_engine("trainer", WeightReceiver)
if not torch.cuda.is_available():
    disable_weight_packing()
