"""The side of weight sync that runs in the workers of a vLLM server.

`vllm serve --worker-extension-cls engines.worker.WorkerExtension` imports this file in every worker before the model
loads. /init_weight_transfer_engine and the later requests then call WeightReceiver. Tested with vLLM 0.32.0.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from engines.sync import join_process_group, read_safetensors, tensor_checksum
from engines.vllm_cpu import disable_weight_packing
from engines.vllm_weights import WeightLoader
from utils import NamedTensors


@dataclass
class TransferInitInfo(WeightTransferInitInfo):
    """How weights will be sent. `how`: gloo, nccl or disk; `info`: the arguments of that method."""

    how: str
    info: dict = field(default_factory=dict)


@dataclass
class TransferUpdateInfo(WeightTransferUpdateInfo):
    """A message of a weight update: tensors that the trainer broadcasts in this order, or the path of a file with
    tensors, or `check`, which fails if tensors are missing. `crc`: checksum of each tensor."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    crc: list[int] | None = None
    path: str | None = None
    check: bool = False


class WeightReceiver(WeightTransferEngine):
    """Copies received tensors into the live parameters.

    vLLM's own engines load every layer from scratch. They leave garbage if only a part of a fused module is sent (an
    adapter on q and v), and a failed update kills the server. With this engine the server survives, but with a mixture
    of old and new weights: do not sample from it before the next update."""

    init_info_cls, update_info_cls = TransferInitInfo, TransferUpdateInfo

    def init_transfer_engine(self, info: TransferInitInfo) -> None:
        """Close the current connection, if any, and connect to the trainer by the method of `info`."""
        self.shutdown()
        self.loader = WeightLoader(self.model, self.model_config.hf_config)
        self.full = True  # the first update must have all weights
        if info.how == "nccl":
            self.native = self._make_native(info.info)
        elif info.how == "gloo":
            parallel = self.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self.group = join_process_group("gloo", rank=info.info["rank_offset"] + rank, **info.info["group"])

    def _make_native(self, info: dict) -> WeightTransferEngine:
        """Return vLLM's own NCCL receiver, which loads with our WeightLoader."""
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
        """Receive or read the tensors of `info` and load them, or check that the update is complete."""
        if info.check:
            self.loader.finish_update(self.full)
            self.full = False
        elif info.path is not None:
            self.loader.load(read_safetensors(info.path))
        elif self.native is not None:
            fields = {"names": info.names, "dtype_names": info.dtype_names, "shapes": info.shapes}
            self.native.receive_weights(self.native.parse_update_info(fields))
        else:
            self.loader.load(self._broadcast(info))

    def _broadcast(self, info: TransferUpdateInfo) -> NamedTensors:
        """Receive all tensors, and only then compare checksums: if one member stopped early, the others would hang."""
        received = []
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            torch.distributed.broadcast(tensor, group=self.group, group_src=0)
            received.append((name, tensor))
        for (name, tensor), sent in zip(received, info.crc or [], strict=False):
            if tensor_checksum(tensor) != sent:
                raise ValueError(f"{name}: the received tensor's checksum differs from the sent one's")
        return [(name, tensor.to(self.device)) for name, tensor in received]

    def finish_weight_update(self) -> None:
        """Do nothing: parameters were copied in place."""

    group = native = None

    def shutdown(self) -> None:
        if self.native is not None:
            self.native.shutdown()
        if self.group is not None:
            with suppress(RuntimeError, ValueError):  # the trainer may have exited
                torch.distributed.destroy_process_group(self.group)
        self.group = self.native = None


class WorkerExtension:
    """An empty class for --worker-extension-cls to name, so that vLLM imports this file."""


WeightTransferEngineFactory.register_engine("trainer", WeightReceiver)
if not torch.cuda.is_available():
    disable_weight_packing()
