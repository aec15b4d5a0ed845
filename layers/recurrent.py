"""Linear-attention layers (gated delta nets): over a packed micro-batch, and in the engine's decoding."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from layers.attention import PackedAttention


@dataclass(eq=False)
class RecurrentState:
    """What a linear-attention layer keeps of the tokens before: inputs that its convolution still sees, (B, channels,
    width - 1), and its matrix, (B, heads, key dim, value dim). For transformers' layer it stands for the cache; unlike
    that one, nothing is written in place: several runs go on from one state, and gradients go back through it."""

    width: int  # of the convolution
    conv: Tensor | None = None
    matrix: Tensor | None = None
    record_past = True  # transformers then joins kept inputs to new ones, which has a gradient, for one token too

    def select_rows(self, rows: Tensor) -> "RecurrentState":
        return replace(self, conv=self.conv[rows], matrix=self.matrix[rows])

    def update_rows(self, rows: Tensor, new: "RecurrentState") -> None:
        """The states of these rows are now new ones."""
        self.conv = self.conv.index_copy(0, rows, new.conv)
        self.matrix = self.matrix.index_copy(0, rows, new.matrix)

    # What transformers' Cache has: layers by number, and states by number within a layer
    layers = property(lambda self: self)
    conv_states = property(lambda self: [self.conv])
    recurrent_states = property(lambda self: [self.matrix])

    def __getitem__(self, layer: int) -> "RecurrentState":
        return self

    def has_previous_state(self, *_, **__) -> bool:
        return self.matrix is not None

    def update_conv_state(self, new: Tensor, *_, **__) -> Tensor:
        if self.conv is None:  # the first tokens begin with zeros, so that all states are of one size
            self.conv = new.new_zeros(*new.shape[:2], self.width - 1)
        joined = torch.cat([self.conv, new], dim=2)
        self.conv = joined[:, :, joined.shape[2] - self.width + 1 :]
        return joined

    def update_recurrent_state(self, matrix: Tensor, *_, **__) -> Tensor:
        self.matrix = matrix
        return matrix


def run_segments(plan: PackedAttention, layer: Callable, hidden: Tensor, width: int) -> Tensor:
    """A recurrent layer over a micro-batch, (1, T, H) -> (1, T, H): each piece goes on from the state after the piece
    before it in its sequence, so a shared prefix is computed once. The pieces' number, not their length, costs time."""
    before = {}
    for prefix, _ in plan.prefixes:
        before |= {piece: previous for previous, piece in pairwise([-1, *prefix])}
    states = {-1: RecurrentState(width)}
    out = []
    for i, piece in enumerate(hidden.split(plan.pieces, dim=1)):  # depth first: what comes before a piece is there
        states[i] = replace(states[before[i]])
        out.append(layer(piece, cache_params=states[i]))
    return torch.cat(out, dim=1)


def _forward(module, forward, hidden_states, cache_params=None, attention_mask=None, plan=None, **kwargs):
    """In place of the forward of transformers' gated delta net: over a micro-batch by the plan, in HFEngine by the
    engine's own states, and in any other forward as it was."""
    if isinstance(plan, PackedAttention):
        return run_segments(plan, forward, hidden_states, module.conv_kernel_size)
    cache = cache_params if plan is None else plan
    if hasattr(cache, "recurrent"):  # of engines/hf.py
        state = cache.recurrent.setdefault(module.layer_idx, RecurrentState(module.conv_kernel_size))
        mask = attention_mask if plan is None else None
        return forward(hidden_states, cache_params=state, attention_mask=mask)
    return forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)


def patch_recurrent_layers(language_model: nn.Module) -> None:
    """Let plans reach the recurrent layers; attention layers have "planned" for that."""
    for module in language_model.modules():
        if hasattr(module, "conv_kernel_size") and hasattr(module, "layer_idx"):
            module.forward = functools.partial(_forward, module, module.forward)
