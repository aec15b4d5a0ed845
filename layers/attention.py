"""Attention of a packed micro-batch: each token sees its prefix and itself.

`register_attention` registers it with transformers as "planned". A forward pass with a `plan` calls it in each layer as
plan(layer, query, key, value, scale); any other forward pass uses transformers' own sdpa. Vision towers use
"planned_flash": one call computes the attention of all images, or of all windows in Qwen2.5-VL's tower.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from itertools import chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from errors import need
from utils import copy_together

ATTENTION_BACKENDS = ("sdpa", "flex", "flash")


def resolve_attention(choice: str, device: torch.device) -> str:
    """Return the backend that --attn auto|sdpa|flex|flash means on this device. Called once, at start-up."""
    if choice == "auto":
        return "flex" if device.type == "cuda" else "sdpa"
    can_train = choice == "sdpa" or device.type == "cuda"
    need(can_train, f"--attn {choice} trains on CUDA only, but there is no CUDA device; use --attn sdpa")
    return choice


class PackedAttention:
    """The attention of one packing.MicroBatch, prepared once for all layers.

    sdpa   torch's own attention, for each segment and its prefix: no masked pair is computed. For the CPU.
    flex   torch's flex_attention with a block mask: blocks without a visible pair are skipped. Compiled on a GPU.
    flash  variable-length flash attention over whole sequences; only if no prefix is shared.

    `pieces` are lengths: the packed tokens are cut wherever a segment starts or a later one splits off, so that the
    prefix of a segment is a list of whole pieces. `prefixes` has, for each segment, the pieces from the first token of
    its sequence to the segment's end, and how many of them are the segment's own."""

    def __init__(self, backend: str, micro: Any):
        self.backend = backend
        self.micro = micro
        cuts: set[int] = set()
        for start, stop, previous in micro.segments:
            cuts |= {start, stop, previous + 1}
        bounds = sorted(cuts)
        self.pieces = [b - a for a, b in pairwise(bounds)]
        piece_at = {a: i for i, a in enumerate(bounds)}
        prefix_to: dict[int, list[int]] = {-1: []}  # last position of a piece -> the pieces from the start up to it
        self.prefixes: list[tuple[list[int], int]] = []
        for start, stop, previous in micro.segments:
            own = range(piece_at[start], piece_at[stop])
            for p in own:
                prefix_to[bounds[p + 1] - 1] = [*prefix_to[previous], *range(own[0], p + 1)]
            self.prefixes.append(([*prefix_to[previous], *own], len(own)))
        if backend == "sdpa":
            self.causal: dict[tuple[int, int], Tensor] = {}
        elif backend == "flex":
            self.mask, self.padded = block_mask(micro.subtree_end_T)
        else:
            assert all(previous < 0 for _, _, previous in micro.segments), "a shared prefix needs --attn flex or sdpa"
            self.longest = max(self.pieces)
            [self.cu_seqlens] = copy_together([torch.tensor(bounds, dtype=torch.int32)], micro.subtree_end_T.device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Compute the attention of a layer, and return it in the shape of the query: (1, heads, T, d).

        Key and value are (1, key heads, T, d).
        """
        if self.backend == "sdpa":
            return self._by_segments(query, key, value, scale)
        if self.backend == "flex":
            n, repeats = query.shape[2], query.shape[1] // key.shape[1]
            query, key, value = (F.pad(x, (0, 0, 0, self.padded - n)) for x in (query, key, value))
            # flex_attention gets one key head per query head. With fewer key heads, its backward pass is 3 times slower
            # on an H200: one thread block goes through the queries of all heads that share a key head, and the keys of
            # a shared prompt have the most queries.
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
            return _flex(query.device.type)(query, key, value, block_mask=self.mask, scale=scale)[:, :, :n]
        rows = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # (T, heads, d)
        return _varlen(*rows, self.cu_seqlens, self.longest, scale).transpose(0, 1)[None]

    def _by_segments(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # split and cat instead of slices: the backward pass of each slice would fill a tensor of all T tokens
        queries, keys, values = (x.split(self.pieces, dim=2) for x in (query, key, value))
        repeats = query.shape[1] // key.shape[1]
        out = []
        for prefix, own in self.prefixes:
            q = torch.cat([queries[i] for i in prefix[-own:]], dim=2)
            k = repeat_kv(torch.cat([keys[i] for i in prefix], dim=2), repeats)
            v = repeat_kv(torch.cat([values[i] for i in prefix], dim=2), repeats)
            mask = self._prefix_mask(q.shape[2], k.shape[2], q.device)
            out.append(F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale))
        return torch.cat(out, dim=2)

    def _prefix_mask(self, rows: int, columns: int, device: torch.device) -> Tensor | None:
        """Return the mask of a segment after its prefix: each token sees the whole prefix, and the segment up to
        itself. Return None for a segment without a prefix."""
        if rows == columns:
            return None
        if (rows, columns) not in self.causal:
            ones = torch.ones(rows, columns, dtype=torch.bool, device=device)
            self.causal[rows, columns] = ones.tril_(columns - rows)
        return self.causal[rows, columns]


BLOCK = 128  # side of a block of flex_attention's mask, in tokens


def padded_length(n: int) -> int:
    """Return the number of tokens in the blocks of flex_attention for n tokens; see block_mask."""
    return max(2, n // BLOCK + 1) * BLOCK


def block_mask(end_T: Tensor) -> tuple[Any, int]:
    """Return flex_attention's mask and its length: a number of whole blocks, in which padding tokens see only
    themselves.

    There is always padding, and there are always two blocks or more, so that F.pad makes a contiguous copy and one
    compiled graph is used for all lengths. The mask is built from the ends in each block, in O((T / 128)^2);
    create_block_mask would need O(T^2) memory, 40 GiB at 65,536 tokens.
    """
    from torch.nn.attention.flex_attention import BlockMask

    n, device = len(end_T), end_T.device
    padded = padded_length(n)
    ends = torch.cat([end_T, torch.arange(n + 1, padded + 1, device=device)])

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < ends[k])

    first_Q = torch.arange(0, padded, BLOCK, device=device)[:, None]  # first query of each block of queries
    min_K, max_K = ends.view(-1, BLOCK).aminmax(dim=1)
    below_QK = first_Q > first_Q.T
    full_QK = below_QK & (min_K >= first_Q + BLOCK)
    partial_QK = ((below_QK & (max_K > first_Q)) | (first_Q == first_Q.T)) & ~full_QK
    lists = chain.from_iterable(map(_block_lists, (partial_QK, full_QK)))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=sees), padded


def _block_lists(visible_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks that each query block sees, (1, 1, Q), and the key blocks' indices, the visible
    ones first, (1, 1, Q, K)."""
    indices_QK = visible_QK.int().argsort(dim=1, descending=True, stable=True)
    return visible_QK.sum(dim=1, dtype=torch.int32)[None, None], indices_QK.int()[None, None]


@functools.cache
def _flex(device_type: str):
    """Return flex_attention, compiled on a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    # There are two graphs, with and without gradients, and more if an adapter leaves some of query, key and value
    # without gradients. On the CPU flex_attention has no backward pass; tests use it uncompiled to compare values.
    return _compile(flex_attention) if device_type == "cuda" else flex_attention


def _compile(function: Callable) -> Callable:
    """Return a compiled version of the function, which is not compiled again for other numbers of tokens."""
    # Past its limit of recompilations, dynamo would fall back to eager mode, in which flex_attention builds the whole
    # score matrix; raise an error instead.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=True)


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile language blocks in place, except for their attention, which runs as it does without `--compile`.

    All blocks share the compiled code. Blocks with linear attention are not compiled, because their loop over the
    pieces of a micro-batch would be compiled again for each micro-batch.
    """
    for block in blocks:
        if not any(hasattr(module, "conv_kernel_size") for module in block.modules()):
            block.forward = _compile(block.forward)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float, causal: bool = True
) -> Tensor:
    """Compute attention within each sequence, (T, heads, d) -> (T, heads, d), with flash_attn or torch's own kernel."""
    lengths = (cu_seqlens, cu_seqlens, longest, longest)
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(query, key, value, *lengths, softmax_scale=scale, causal=causal)
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters  # torch 2.11 has window_size, 2.12 also enable_gqa
    options: dict[str, Any] = {"is_causal": causal}
    if "is_causal" not in parameters:
        options = {"window_size": (-1, 0 if causal else -1)}
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True
    else:
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    return varlen_attn(query, key, value, *lengths, scale=scale, **options)


@torch.compiler.disable
def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, plan=None, **kwargs):
    """Compute the attention of a layer; transformers calls it by the name "planned"."""
    if plan is None:
        options = {"dropout": dropout, "scaling": scaling, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return plan(module.layer_idx, query, key, value, scaling).transpose(1, 2).contiguous(), None


def _supports_varlen(query: Tensor) -> bool:
    """Return whether the kernels of variable-length attention can run: they need a GPU and 16-bit numbers."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _tower_attention(
    module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **kwargs
):
    """Compute a vision tower's attention, (1, heads, patches, d) -> (1, patches, heads, d): a patch sees the patches of
    its image, or of its window. transformers passes all patches in one call because the name contains "flash"."""
    if _supports_varlen(query):
        rows = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        return _varlen(*rows, cu_seq_lens_q, int(max_length_q), scaling, causal=False)[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    sequences = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    options = {"attention_mask": None, "scaling": scaling, "is_causal": False}
    return torch.cat([sdpa_attention_forward(module, *qkv, **options)[0] for qkv in sequences], dim=1), None


def register_attention() -> None:
    """Register "planned" and "planned_flash" with transformers."""
    transformers.AttentionInterface.register("planned_flash", _tower_attention)
    transformers.AttentionInterface.register("planned", _attention)
    transformers.AttentionMaskInterface.register("planned", sdpa_mask)  # for forwards without a plan
