"""Replayed experts (--replay-experts): the trainer computes each token with the experts that the engine chose for it.

In a mixture of experts, a router sends each token to its top k experts. Engine and trainer round differently, so for
some tokens they choose different experts, and the log-probabilities of these tokens differ by far more than rounding.
Rollout routing replay (R3, arXiv:2510.11370) takes the choice from the engine and the weights of the chosen experts
from the trainer's router: its softmax probabilities of these experts, divided by their sum. Gradients reach the router
through these weights.

The policy replays experts in the update and for its old log-probabilities. References, teachers, critics and second
views of the images choose their own: the engine's choice was made by another model or from other input. A token for
which the engine returned no experts gets the trainer's choice.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from errors import need

MIXTURES = ("qwen3_vl_moe", "qwen3_5_moe")  # model types whose routers choose as `_route` does


def check_replay(config: transformers.PreTrainedConfig) -> None:
    """Raise UserError if a model has no experts that can be replayed."""
    need(config.model_type in MIXTURES, f"--replay-experts: --model is of type {config.model_type!r}, but only "
         f"{' and '.join(MIXTURES)} have experts to replay; leave the flag out")


def expert_blocks(hf: nn.Module) -> dict[int, nn.Module]:
    """Return the blocks of the language model that have a mixture of experts, by layer. Their router is mlp.gate."""
    blocks = hf.get_submodule(f"{hf.family.language}.{hf.family.blocks}")
    return {layer: block for layer, block in enumerate(blocks) if hasattr(block.mlp, "gate")}


def start_replay(policy: nn.Module, engine: Any) -> None:
    """Make an engine return its experts, and a policy replay those of a micro-batch (MicroBatch.experts_T), in place.
    They come with its attention plan, so a block that is computed again in the backward pass gets the same ones."""
    blocks = expert_blocks(policy)
    engine.expert_layers = list(blocks)
    for i, block in enumerate(blocks.values()):
        block.mlp.gate.forward = partial(_route, i, block.mlp.gate, block.mlp.gate.forward)
        block.register_forward_pre_hook(
            lambda block, args, kwargs: vars(block.mlp.gate).update(plan=kwargs.get("plan")), with_kwargs=True)
    if hasattr(engine, "hf"):  # HFEngine; vLLM returns its experts if it was started to
        engine.last_experts = partial(last_experts, engine.hf)
        for block in expert_blocks(engine.hf).values():
            block.mlp.gate.register_forward_hook(lambda gate, args, output: vars(gate).update(chosen=output[2]))


def last_experts(hf: nn.Module, n: int) -> np.ndarray:
    """Return the experts of the last forward pass of n sequences, (n, tokens, layers, experts per token) uint16."""
    chosen = [block.mlp.gate.chosen for block in expert_blocks(hf).values()]
    return torch.stack(chosen, dim=1).unflatten(0, (n, -1)).cpu().numpy().astype(np.uint16)


def _route(i: int, router: nn.Module, forward: Callable, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Replace the forward of router i of a model: return its logits, the weights of each token's experts, and their
    ids."""
    logits, weights, own = forward(hidden)
    if router.plan is None or router.plan.micro.experts_T is None:
        return logits, weights, own
    given = router.plan.micro.experts_T[:, i].long()
    ids = torch.where(given < 0, own, given)
    router.plan.micro.differing.append((ids[:, :, None] != own[:, None]).all(dim=2).double().mean())
    chosen = logits.softmax(dim=-1, dtype=torch.float).gather(1, ids)
    return logits, (chosen / chosen.sum(dim=-1, keepdim=True)).to(weights.dtype), ids
