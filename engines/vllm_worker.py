"""What runs inside vLLM: the ban, and a server's end of a weight transfer.

`vllm serve --worker-extension-cls engines.vllm_worker.Extension` imports this file in every worker before the model
loads; then /init_weight_transfer_engine and what follows it speak to `Receiver`. Tested with vLLM 0.32.0.
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
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from engines.transfer import Meta, checksum, join, read_file
from engines.vllm_cpu import leave_weights_alone
from engines.vllm_weights import Loader
from utils import NamedTensors


class Ban(LogitsProcessor, LogitsProcessorV2):
    """A logits processor that takes placeholders and padding ids out of the softmax, as the trainer does. A logit_bias
    would not: it is finite, and so the probability is not exactly zero.

    It serves both of vLLM's model runners. V2, the default on a GPU, calls __init__(config, request states) and
    apply(logits, context); V1, the only one on a CPU, calls __init__(config, device, pin memory) and apply(logits).
    """

    def __init__(self, vllm_config, state, is_pin_memory=False):
        self.ids = vllm_config.additional_config["banned"]
        self.banned: torch.Tensor | None = None

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update) -> None:
        """Do nothing: the ban is the same for every request."""

    def apply(self, logits: torch.Tensor, ctx=None) -> torch.Tensor:
        if self.banned is None:  # V2 calls __init__ while weights load, and sleep level 2 discards what is made there
            self.banned = torch.tensor(self.ids, device=logits.device)
        return logits.index_fill_(1, self.banned, -torch.inf)


# ----------------------------------------------------------------------------------------------------------------------
# A server's end of a transfer


@dataclass
class Init(WeightTransferInitInfo):
    """`how`: gloo, nccl or disk; `info`: what that needs."""

    how: str
    info: dict = field(default_factory=dict)


@dataclass
class Update(WeightTransferUpdateInfo):
    """Tensors that the trainer broadcasts, in this order; or a file of them; or `check`: have all come that should?
    `crc`: of each tensor's bytes."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    crc: list[int] | None = None
    path: str | None = None
    check: bool = False


class Receiver(WeightTransferEngine):
    """Copies what comes into the live parameters. vLLM's own engines load layer by layer from scratch, which leaves
    garbage where a part of a fused module comes alone (an adapter on q and v), and a dead server where an update fails.
    A failed update leaves this one alive, with a mixture of weights: the trainer must not use it before the next."""

    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, info: Init) -> None:
        self.shutdown()
        self.loader = Loader(self.model, self.model_config.hf_config)
        self.whole = True  # what comes first must be all
        if info.how == "nccl":
            self.native = self._native(info.info)
        elif info.how == "gloo":
            parallel = self.parallel_config
            own = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self.group = join("gloo", rank=info.info["rank_offset"] + own, **info.info["group"])

    def _native(self, info: dict) -> WeightTransferEngine:
        """vLLM's own NCCL receiver, with our way to load."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        target = SimpleNamespace(load_weights=self.loader.load)
        engine = NCCLWeightTransferEngine(self.config, self.vllm_config, self.device, target)
        engine.init_transfer_engine(engine.parse_init_info(info))
        return engine

    def start_weight_update(self) -> None:
        self.loader.begin()

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def receive_weights(self, info: Update) -> None:
        if info.check:
            self.loader.finish(self.whole)
            self.whole = False
        elif info.path is not None:
            self.loader.load(read_file(info.path))
        elif self.native is not None:
            fields = {"names": info.names, "dtype_names": info.dtype_names, "shapes": info.shapes}
            self.native.receive_weights(self.native.parse_update_info(fields))
        else:
            metas = [Meta(*meta) for meta in zip(info.names, info.dtype_names, info.shapes, strict=True)]
            self.loader.load(self._broadcast(metas, info.crc))

    def _broadcast(self, metas: list[Meta], crc: list[int] | None) -> NamedTensors:
        """All of them are received before one is looked at: or those behind a bad one would hang the others."""
        received = []
        for meta in metas:
            tensor = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
            torch.distributed.broadcast(tensor, group=self.group, group_src=0)
            received.append((meta.name, tensor))
        for (name, tensor), sent in zip(received, crc or [], strict=False):
            if checksum(tensor) != sent:
                raise ValueError(f"{name} is not what was sent: its checksum differs")
        return [(name, tensor.to(self.device)) for name, tensor in received]

    def finish_weight_update(self) -> None:
        """Nothing: parameters were copied in place."""

    group = native = None

    def shutdown(self) -> None:
        if self.native is not None:
            self.native.shutdown()
        if self.group is not None:
            with suppress(RuntimeError, ValueError):  # the trainer may be gone already
                torch.distributed.destroy_process_group(self.group)
        self.group = self.native = None


class Extension:
    """What --worker-extension-cls names; importing this file is what matters."""


WeightTransferEngineFactory.register_engine("trainer", Receiver)
if not torch.cuda.is_available():
    leave_weights_alone()
