"""A vLLM logits processor that bans token ids, for vLLM in the trainer's process and in servers. Tested with vLLM
0.32.0."""

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2


class BannedTokensProcessor(LogitsProcessor, LogitsProcessorV2):
    """A logits processor that removes placeholder and padding ids from the softmax, as the trainer does. A logit_bias
    is finite, so it would leave them a nonzero probability.

    It works with both of vLLM's model runners. V2, the default on a GPU, calls __init__(config, request states) and
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
        """Set the logits of banned ids to -inf, in place."""
        if self.banned is None:  # V2 calls __init__ while weights load, and sleep level 2 discards its tensors
            self.banned = torch.tensor(self.ids, device=logits.device)
        return logits.index_fill_(1, self.banned, -torch.inf)
