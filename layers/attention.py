"""Attention of a packed micro-batch: each token sees its prefix and itself.

`register_attention` makes it transformers' attention "planned": a forward that is given a `plan` calls it in each layer
as plan(layer, query, key, value, scale); any other forward gets transformers' own sdpa. Vision towers use
"planned_flash": one call attends in all images, or in all windows of Qwen2.5-VL's tower.
"""

import functools
import importlib.util
import inspect
from itertools import chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from errors import need
from utils import copy_together

ATTENTION_BACKENDS = ("sdpa", "flex", "flash")


def resolve_attention(choice: str, device: torch.device) -> str:
    """Turn --attn auto|sdpa|flex|flash into the back end of the run; called once, at start-up."""
    if choice == "auto":
        return "flex" if device.type == "cuda" else "sdpa"
    trains = choice == "sdpa" or device.type == "cuda"
    need(trains, f"--attn {choice} trains on CUDA only, and there is no CUDA device; use --attn sdpa")
    return choice


class PackedAttention:
    """How the tokens of one packing.MicroBatch attend, prepared once for all layers.

    sdpa   torch's own, run by run against its prefix: no masked pair is computed. For the CPU.
    flex   torch's flex_attention with a block mask: blocks without a visible pair are skipped. Compiled on a GPU.
    flash  variable-length flash attention over whole sequences; only where no prefix is shared.

    `pieces` are lengths: the packed tokens are cut wherever a run starts or another run leaves it, so that the prefix
    of a run is a list of whole pieces. `prefixes` has, for each run, the pieces from the first token of its sequence to
    its own end, and how many of them are its own."""

    def __init__(self, backend: str, micro: Any):
        self.backend = backend
        cuts: set[int] = set()
        for start, stop, before in micro.segments:
            cuts |= {start, stop, before + 1}
        bounds = sorted(cuts)
        self.pieces = [b - a for a, b in pairwise(bounds)]
        piece_at = {a: i for i, a in enumerate(bounds)}
        prefix_to: dict[int, list[int]] = {-1: []}  # last position of a piece -> the pieces that lead through it
        self.prefixes: list[tuple[list[int], int]] = []
        for start, stop, before in micro.segments:
            own = range(piece_at[start], piece_at[stop])
            for p in own:
                prefix_to[bounds[p + 1] - 1] = [*prefix_to[before], *range(own[0], p + 1)]
            self.prefixes.append(([*prefix_to[before], *own], len(own)))
        if backend == "sdpa":
            self.causal: dict[tuple[int, int], Tensor] = {}
        elif backend == "flex":
            self.mask, self.padded = block_mask(micro.subtree_end_T)
        else:
            assert all(before < 0 for _, _, before in micro.segments), "a shared prefix needs --attn flex or sdpa"
            self.longest = max(self.pieces)
            [self.cu_seqlens] = copy_together([torch.tensor(bounds, dtype=torch.int32)], micro.subtree_end_T.device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query (1, heads, T, d), key and value (1, key heads, T, d) -> (1, heads, T, d)."""
        if self.backend == "sdpa":
            return self._by_segments(query, key, value, scale)
        if self.backend == "flex":
            n = query.shape[2]
            padded = (F.pad(x, (0, 0, 0, self.padded - n)) for x in (query, key, value))
            return _flex(query.device.type)(*padded, block_mask=self.mask, scale=scale, enable_gqa=True)[:, :, :n]
        rows = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # (T, heads, d)
        return _varlen(*rows, self.cu_seqlens, self.longest, scale).transpose(0, 1)[None]

    def _by_segments(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # split and cat rather than slices, whose backward would fill a tensor of all T tokens for each
        queries, keys, values = (x.split(self.pieces, dim=2) for x in (query, key, value))
        groups = query.shape[1] // key.shape[1]
        out = []
        for prefix, own in self.prefixes:
            q = torch.cat([queries[i] for i in prefix[-own:]], dim=2)
            k = repeat_kv(torch.cat([keys[i] for i in prefix], dim=2), groups)
            v = repeat_kv(torch.cat([values[i] for i in prefix], dim=2), groups)
            mask = self._prefix_mask(q.shape[2], k.shape[2], q.device)
            out.append(F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale))
        return torch.cat(out, dim=2)

    def _prefix_mask(self, rows: int, columns: int, device: torch.device) -> Tensor | None:
        """The mask of a run after its prefix: all of that, and the run up to each token. None: there is no prefix."""
        if rows == columns:
            return None
        if (rows, columns) not in self.causal:
            whole = torch.ones(rows, columns, dtype=torch.bool, device=device)
            self.causal[rows, columns] = whole.tril_(columns - rows)
        return self.causal[rows, columns]


BLOCK = 128  # tokens on a side of a block of flex_attention's mask


def block_mask(end_T: Tensor) -> tuple[Any, int]:
    """Return flex_attention's mask, and the length it is for: whole blocks, whose padding sees only itself.

    There is always padding, and there are always two blocks or more: F.pad then makes a contiguous copy, and one
    compiled graph serves all lengths. The mask is built from each block's ends, in O((T / 128)^2); create_block_mask
    would need O(T^2) memory, 40 GiB at 65,536 tokens.
    """
    from torch.nn.attention.flex_attention import BlockMask

    n, device = len(end_T), end_T.device
    blocks = max(2, n // BLOCK + 1)
    ends = torch.cat([end_T, torch.arange(n + 1, blocks * BLOCK + 1, device=device)])

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < ends[k])

    first_Q = torch.arange(0, blocks * BLOCK, BLOCK, device=device)[:, None]  # query of each block of rows
    least_K, most_K = ends.view(blocks, BLOCK).aminmax(dim=1)
    below_QK = first_Q > first_Q.T
    full_QK = below_QK & (least_K >= first_Q + BLOCK)
    partial_QK = ((below_QK & (most_K > first_Q)) | (first_Q == first_Q.T)) & ~full_QK
    lists = chain.from_iterable(map(_block_lists, (partial_QK, full_QK)))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=sees), blocks * BLOCK


def _block_lists(visible_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries sees, (1, 1, Q), and their numbers first, (1, 1, Q, K)."""
    numbers_QK = visible_QK.int().argsort(dim=1, descending=True, stable=True)
    return visible_QK.sum(dim=1, dtype=torch.int32)[None, None], numbers_QK.int()[None, None]


@functools.cache
def _flex(device_type: str):
    from torch.nn.attention.flex_attention import flex_attention

    if device_type != "cuda":  # on the CPU it has no backward; uncompiled it still lets the tests compare values
        return flex_attention
    # Past the limit dynamo falls back to eager, which makes the whole score matrix: fail instead. There are two graphs,
    # with and without gradients, and more where an adapter leaves some of query, key and value without them.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=True)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float, causal: bool = True
) -> Tensor:
    lengths = (cu_seqlens, cu_seqlens, longest, longest)
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(query, key, value, *lengths, softmax_scale=scale, causal=causal)
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters  # torch 2.11 has a window, 2.12 grouped heads too
    options: dict[str, Any] = {"is_causal": causal}
    if "is_causal" not in parameters:
        options = {"window_size": (-1, 0 if causal else -1)}
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return varlen_attn(query, key, value, *lengths, scale=scale, **options)


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, plan=None, **kwargs):
    """What transformers calls in each layer, by the name "planned"."""
    if plan is None:
        plain = {"dropout": dropout, "scaling": scaling, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **plain)
    return plan(module.layer_idx, query, key, value, scaling).transpose(1, 2).contiguous(), None


def _takes_varlen(query: Tensor) -> bool:
    """Return whether the kernels of variable-length attention can run: they need a GPU and 16-bit numbers."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _tower_attention(
    module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **kwargs
):
    """Compute a vision tower's attention, (1, heads, patches, d) -> (1, patches, heads, d): a patch sees the patches of
    its image, or of its window. transformers passes all patches in one call because "flash" is in the name."""
    if _takes_varlen(query):
        rows = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        return _varlen(*rows, cu_seq_lens_q, int(max_length_q), scaling, causal=False)[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    sequences = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    plain = {"attention_mask": None, "scaling": scaling, "is_causal": False}
    return torch.cat([sdpa_attention_forward(module, *qkv, **plain)[0] for qkv in sequences], dim=1), None


def register_attention() -> None:
    transformers.AttentionInterface.register("planned_flash", _tower_attention)
    transformers.AttentionInterface.register("planned", _attention)
    transformers.AttentionMaskInterface.register("planned", sdpa_mask)  # for forwards without a plan
