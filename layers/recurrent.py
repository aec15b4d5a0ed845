"""Linear-attention layers (gated delta nets): for packed micro-batches, and for decoding in the HF engine."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from layers.attention import PackedAttention


@dataclass(eq=False)
class RecurrentState:
    """The state of a linear-attention layer after some tokens: the inputs that its convolution still needs, (B,
    channels, width - 1), and its matrix, (B, heads, key dim, value dim). It replaces the cache of transformers' layer,
    but is never written in place, so that several segments can continue from one state, with gradients through it."""

    width: int  # of the convolution
    conv: Tensor | None = None
    matrix: Tensor | None = None
    record_past = True  # makes transformers concatenate old and new inputs, which has a gradient, for one token too

    def select_rows(self, rows: Tensor) -> "RecurrentState":
        """Return the states of these rows of the batch."""
        return replace(self, conv=self.conv[rows], matrix=self.matrix[rows])

    def update_rows(self, rows: Tensor, new: "RecurrentState") -> None:
        """Replace the states of these rows of the batch."""
        self.conv = self.conv.index_copy(0, rows, new.conv)
        self.matrix = self.matrix.index_copy(0, rows, new.matrix)

    # The interface of transformers' Cache: layers by index, and states by index within a layer
    layers = property(lambda self: self)
    conv_states = property(lambda self: [self.conv])
    recurrent_states = property(lambda self: [self.matrix])

    def __getitem__(self, layer: int) -> "RecurrentState":
        return self

    def has_previous_state(self, *_, **__) -> bool:
        return self.matrix is not None

    def update_conv_state(self, new: Tensor, *_, **__) -> Tensor:
        if self.conv is None:  # zeros before the first tokens, so that all states have the same size
            self.conv = new.new_zeros(*new.shape[:2], self.width - 1)
        joined = torch.cat([self.conv, new], dim=2)
        self.conv = joined[:, :, joined.shape[2] - self.width + 1 :]
        return joined

    def update_recurrent_state(self, matrix: Tensor, *_, **__) -> Tensor:
        self.matrix = matrix
        return matrix


def run_segments(plan: PackedAttention, layer: Callable, hidden: Tensor, width: int) -> Tensor:
    """Apply a recurrent layer to a micro-batch, (1, T, H) -> (1, T, H). Each piece continues from the state after the
    previous piece of its sequence, so a shared prefix is computed once. The time depends on the number of pieces, not
    on their lengths."""
    previous_piece = {}
    for prefix, _ in plan.prefixes:
        previous_piece |= {piece: previous for previous, piece in pairwise([-1, *prefix])}
    states = {-1: RecurrentState(width)}
    out = []
    for i, piece in enumerate(hidden.split(plan.pieces, dim=1)):  # depth first, so the previous piece's state exists
        states[i] = replace(states[previous_piece[i]])
        out.append(layer(piece, cache_params=states[i]))
    return torch.cat(out, dim=1)


def _forward(module, forward, hidden_states, cache_params=None, attention_mask=None, plan=None, **kwargs):
    """Replace the forward of transformers' gated delta net: with a plan it runs over a micro-batch, in HFEngine it uses
    the engine's states, and in any other forward pass it calls the original."""
    if isinstance(plan, PackedAttention):
        return run_segments(plan, forward, hidden_states, module.conv_kernel_size)
    cache = cache_params if plan is None else plan
    if hasattr(cache, "recurrent"):  # the cache is one of engines/hf.py
        state = cache.recurrent.setdefault(module.layer_idx, RecurrentState(module.conv_kernel_size))
        mask = attention_mask if plan is None else None
        return forward(hidden_states, cache_params=state, attention_mask=mask)
    return forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)


def patch_recurrent_layers(language_model: nn.Module) -> None:
    """Let plans reach the recurrent layers, in place. Attention layers get them through "planned"."""
    for module in language_model.modules():
        if hasattr(module, "conv_kernel_size") and hasattr(module, "layer_idx"):
            module.forward = functools.partial(_forward, module, module.forward)
