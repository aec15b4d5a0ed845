"""Packing of rollouts into micro-batches with shared prefixes, and load balancing across ranks and micro-batches.

A micro-batch contains each prompt and its images once, followed by the responses. Other common prefixes of responses,
such as equal first tokens or earlier turns, are shared in the same way. A token attends only to its prefix and itself,
so log-probabilities and gradients equal those of separate sequences.

Axes: N tokens that the policy sampled, in a step on this rank; T packed tokens in a micro-batch; K sampled tokens that
the micro-batch predicts. In the balancing functions: I items, B bins, D ways to divide a few items between two bins.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from errors import need
from utils import DistContext, Meter, copy_together

# ----------------------------------------------------------------------------------------------------------------------
# The records: columns that the loss reads, and the layout of micro-batches


@dataclass(eq=False, slots=True)
class TokenBatch:
    """A table with a row for each token that the policy sampled, in the order of the rollouts. Each column is (N,). A
    column that was not computed is None. Using such a column is an error, and so is using a name that is not listed
    here."""

    rollout: Tensor  # int64, index of the token's rollout in the batch
    rollout_logps: Tensor  # the engine's log-probabilities; this and all following columns are fp32
    n_images: Tensor  # number of images and videos of the rollout
    weights: Tensor | None = None  # weight of the token in the loss (grpo.token_weights); 0: not trained on
    old_logps: Tensor | None = None  # log-probabilities under the old policy (Algorithm.old_policy)
    ref_logps: Tensor | None = None  # log-probabilities under the reference policy
    view_logps: Tensor | None = None  # under the policy before the update, given a second view of the images
    teacher_logps: Tensor | None = None  # under the teacher
    chosen: Tensor | None = None  # 1 for tokens with the penalty of KL-Cov, else 0
    values: Tensor | None = None  # expected returns, computed before the update
    advantages: Tensor | None = None
    returns: Tensor | None = None
    logps: Tensor | None = None  # logps and entropies are those of the last forward pass of the update
    entropies: Tensor | None = None
    turn_rewards: Tensor | None = None  # episodes: the environment's reward of the turn that ends here, else 0
    tangents: Tensor | None = None  # (N, 3): constant, slope by logp, slope by entropy; for kernels.TangentLoss

    def columns(self) -> dict[str, Tensor]:
        """Return the columns that were computed, by name."""
        return {f.name: column for f in fields(self) if (column := getattr(self, f.name)) is not None}

    def __getitem__(self, rows: slice | Tensor) -> "TokenBatch":
        return TokenBatch(**{name: column[rows] for name, column in self.columns().items()})

    def __len__(self) -> int:
        return len(self.rollout)

    def fill(self, rows: Tensor, **columns: Tensor | None) -> None:
        """Set some rows of these columns. A column that does not exist yet is created with NaN in its other rows; a
        column passed as None is skipped."""
        for name, values in columns.items():
            if values is not None:
                if getattr(self, name) is None:
                    setattr(self, name, torch.full((len(self),), torch.nan))
                getattr(self, name)[rows] = values.float().cpu()

    def to(self, device: torch.device) -> "TokenBatch":
        columns = self.columns()
        return TokenBatch(**dict(zip(columns, copy_together(list(columns.values()), device), strict=True)))


def make_token_batch(rollouts: Sequence[Any], weights: Sequence[float] | None = None) -> TokenBatch:
    """Return the TokenBatch of rollouts. `weights` has one weight per rollout, which all its tokens get."""
    counts = torch.tensor([sum(r.response_mask) for r in rollouts], dtype=torch.long)
    n_images = torch.tensor([float(len(r.prompt.images) + len(r.images)) for r in rollouts])
    return TokenBatch(
        rollout=torch.arange(len(rollouts)).repeat_interleave(counts),
        rollout_logps=torch.tensor(list(chain.from_iterable(r.logprobs for r in rollouts)), dtype=torch.float32),
        n_images=n_images.repeat_interleave(counts),
        weights=None if weights is None else torch.tensor(weights, dtype=torch.float32).repeat_interleave(counts),
        turn_rewards=make_turn_rewards(rollouts) if any(r.turn_rewards for r in rollouts) else None,
    )


def make_turn_rewards(rollouts: Sequence[Any]) -> Tensor:
    """Return (N,): the environment's reward of each turn, at the last token that the policy sampled in the turn."""
    rewards_N = []
    for r in rollouts:
        remaining = iter(r.turn_rewards)
        neighbours = pairwise([*r.response_mask, False])
        rewards_N += [0.0 if next_sampled else next(remaining, 0.0) for sampled, next_sampled in neighbours if sampled]
    return torch.tensor(rewards_N, dtype=torch.float32)


@dataclass(eq=False)
class MicroBatch:
    """The layout of T packed tokens, depth first: a prompt, each of its responses in turn, then the next prompt.

    The tokens that continue the token at k are at positions k + 1 to subtree_end_T[k] - 1, so query q attends to key k
    if and only if k <= q < subtree_end_T[k]: one integer per token encodes the whole attention mask. Sampled token j of
    the K has id target_K[j], is predicted by the hidden state at position hidden_index_K[j], and is row
    token_index_K[j] of the TokenBatch. These rows ascend, so the tokens of a rollout are contiguous in K even if its
    turns are separate sequences.
    """

    ids_T: Tensor  # int64, like all tensors here except experts_T
    subtree_end_T: Tensor
    # contiguous pieces (start, stop, previous): tokens start to stop - 1, and the position of the token before them in
    # their sequence (-1: none). It is not start - 1 if they continue a shared prefix that is not directly before them
    segments: list[tuple[int, int, int]]
    images: list[Any]  # in the order of their tokens in ids_T
    hidden_index_K: Tensor
    target_K: Tensor
    token_index_K: Tensor
    # --replay-experts: the experts to use, (T, layers with experts, experts per token) int16; -1 or None: the model's
    # own choice
    experts_T: Tensor | None = None
    n_other_experts: int = 0  # tokens of sequences that get the experts of another sequence, which differ from theirs
    differing: list[Tensor] = field(default_factory=list)  # shares of experts that the model itself would not choose

    @property
    def n_tokens(self) -> int:
        return len(self.ids_T)

    def set_experts(self, routed: Sequence[tuple[list[int], np.ndarray]]) -> None:
        """Set the experts of each sequence's tokens, given as (positions, rows). A token that several sequences share
        gets the experts that the first of them has for it."""
        experts_T = np.full((self.n_tokens, *routed[0][1].shape[1:]), -1, np.int16)
        for positions, rows in reversed(routed):
            experts_T[positions] = rows
        self.n_other_experts = sum((experts_T[positions] != rows).any(axis=(1, 2)).sum() for positions, rows in routed)
        self.experts_T = torch.from_numpy(experts_T)

    def to(self, device: torch.device) -> "MicroBatch":
        columns = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        return replace(self, **dict(zip(columns, copy_together(list(columns.values()), device), strict=True)))


EMPTY_INDEX = torch.zeros(0, dtype=torch.long)
# One token and nothing to train, for ranks that need another micro-batch because collectives must match
DUMMY_MICRO_BATCH = MicroBatch(torch.tensor([0]), torch.tensor([1]), [(0, 1, -1)], [],
                               EMPTY_INDEX, EMPTY_INDEX, EMPTY_INDEX)


@dataclass(eq=False)
class TrainBatch:
    """The data that a step trains on, on this rank: whole groups, their tokens, and for each minibatch (one optimizer
    step) the micro-batches of the rollouts that can have a gradient."""

    rollouts: list[Any]
    tokens: TokenBatch
    minibatches: list[list[MicroBatch]]

    def rows(self, minibatch: int) -> Tensor:
        """Return the TokenBatch rows of a minibatch in ascending order, so that each rollout's rows are contiguous."""
        return torch.cat([EMPTY_INDEX, *(micro.token_index_K for micro in self.minibatches[minibatch])]).sort().values

    def splits_rollouts(self, minibatch: int) -> bool:
        """Return whether a rollout's tokens are in more than one micro-batch of a minibatch."""
        parts = [self.tokens.rollout[micro.token_index_K].unique() for micro in self.minibatches[minibatch]]
        return sum(map(len, parts)) > len(self.tokens.rollout[self.rows(minibatch)].unique())

    def uids(self, minibatch: int) -> list[str]:
        """Return the uids of the prompts that a minibatch trains on."""
        rollouts = self.tokens.rollout[self.rows(minibatch)].unique().tolist()
        return sorted({self.rollouts[i].prompt.uid for i in rollouts})


# ----------------------------------------------------------------------------------------------------------------------
# Packing


@dataclass(frozen=True)
class Packer:
    """A packer of rollouts into micro-batches of at most max_tokens tokens, balanced by their FLOPs. If `flop_costs` is
    None, they are balanced by tokens. Without `share` each response has its own copy of the prompt (--attn flash)."""

    max_tokens: int
    image_token: int  # token id
    flop_costs: "FlopCosts | None" = None
    share: bool = True

    def pack(self, rollouts: Sequence[Any], chosen: Sequence[int] | None = None,
             reduce_max: Callable[[int], int] = lambda n: n) -> list[MicroBatch]:
        """Return micro-batches of the chosen rollouts (default: all). Each sequence is in exactly one micro-batch, but
        turns that are separate sequences may be in different ones.

        The number of micro-batches comes from best-fit decreasing, raised by `reduce_max` to the maximum over ranks,
        because the collectives of the ranks must match. A rank with less to pack adds dummy ones of one token.
        Raise UserError for a response that does not fit on its own, ValueError if images do not match their tokens.
        """
        first_rows = list(accumulate((sum(r.response_mask) for r in rollouts), initial=0))
        groups: dict[Any, list[_PackedSequence]] = {}
        for i in range(len(rollouts)) if chosen is None else chosen:
            for turn in training_sequences(rollouts[i], first_rows[i]):
                key = rollouts[i].prompt.uid if self.share else (i, turn.first_row)
                groups.setdefault(key, []).append(_PackedSequence(rollouts[i], turn, key, self.image_token))
        chunks = list(chain.from_iterable(map(self._split, groups.values())))
        sizes = [size for _, size in chunks]
        n_micros = reduce_max(bins_needed(sizes, self.max_tokens))
        if not chunks:
            return [DUMMY_MICRO_BATCH] * n_micros
        costs = sizes
        if self.flop_costs is not None:
            costs = [sequences_flops(seqs[0].rollout.prompt, seqs, self.flop_costs) for seqs, _ in chunks]
        bins = balance(costs, min(n_micros, len(chunks)), sizes=sizes, max_size=self.max_tokens)
        micros = [build_micro_batch(list(chain.from_iterable(chunks[i][0] for i in members))) for members in bins]
        return micros + [DUMMY_MICRO_BATCH] * (n_micros - len(micros))

    def _split(self, group: list["_PackedSequence"]) -> list[tuple[list["_PackedSequence"], int]]:
        """Split the sequences of a group into chunks of at most max_tokens tokens, and return each chunk with its size
        in tokens. If there are several chunks, each has its own copy of the tokens that they share."""
        chunks: list[tuple[list[_PackedSequence], int]] = []
        prev_ids: tuple[int, ...] = ()
        for seq in sorted(group, key=lambda seq: seq.ids):
            prompt = seq.rollout.prompt
            need(len(seq.ids) <= self.max_tokens,
                 f"prompt {prompt.uid!r} of {len(prompt.token_ids)} tokens and its response need {len(seq.ids)}, more "
                 f"than --micro-tokens {self.max_tokens}; raise --micro-tokens, or lower --max-new-tokens")
            new = len(seq.ids) - common_prefix_length(prev_ids, seq.ids)
            if chunks and chunks[-1][1] + new <= self.max_tokens:
                chunks[-1] = (chunks[-1][0] + [seq], chunks[-1][1] + new)
            else:
                chunks.append(([seq], len(seq.ids)))
            prev_ids = seq.ids
        return chunks


class TrainSequence(NamedTuple):
    """A token sequence, the positions that the policy sampled, and its images."""

    tokens: list[int]
    trained: list[int]  # positions of the sampled tokens
    images: list[Any]
    first_row: int  # TokenBatch row of the first sampled token
    experts: Sequence[np.ndarray]  # those of the first tokens, as in Rollout


def training_sequences(rollout: Any, first_row: int = 0) -> list[TrainSequence]:
    """Return the sequences that a rollout is trained as: one per turn for an episode in which the chat template rewrote
    earlier turns, else one. If the policy sampled no token, return none."""
    images = rollout.prompt.images + rollout.images
    if not rollout.separate_turns:
        start = len(rollout.prompt.token_ids)
        trained = [start + t for t, sampled in enumerate(rollout.response_mask) if sampled]
        tokens = rollout.prompt.token_ids + list(rollout.response)
        sequence = TrainSequence(tokens, trained, images, first_row, rollout.experts)
        return [sequence] if trained else []  # no token was sampled if the environment failed at once
    turns = []
    for ids, n_sampled, n_images, experts in rollout.separate_turns:
        trained = list(range(len(ids) - n_sampled, len(ids)))
        turns.append(TrainSequence(ids, trained, images[:n_images], first_row, experts))
        first_row += n_sampled
    return turns


class _PackedSequence:
    """A sequence to be packed. Sequences of the same `group` share their common prefixes. `ids` are the input tokens,
    with image tokens replaced by a negative number that identifies the image, so that sequences share a token only if
    everything before it is equal, images included. The last sampled token is only a target, so `ids` end before it."""

    def __init__(self, rollout: Any, sequence: TrainSequence, group: Any, image_token: int):
        self.rollout = rollout
        self.group = group
        self.tokens, self.trained, images, self.first_row, self.experts = sequence
        self.images = [part for image in images for part in image.parts]
        uid = rollout.prompt.uid
        assert self.trained and self.trained[0] > 0, f"{uid!r}: first sampled token must not be first in the sequence"
        ids = self.tokens[: self.trained[-1]]
        n_tokens = [image.n_tokens for image in self.images]
        counts = f"response of {uid!r} has {ids.count(image_token)} image tokens, and its images need {n_tokens}"
        if ids.count(image_token) != sum(n_tokens):
            raise ValueError(f"{counts}; was a placeholder sampled?")
        self.image_starts = []
        for image in self.images:
            start = ids.index(image_token)
            image_id = -1 - int.from_bytes(hashlib.sha1(image.key.encode()).digest()[:7])
            ids[start : start + image.n_tokens] = [image_id] * image.n_tokens
            self.image_starts.append(start)
        if image_token in ids:
            raise ValueError(f"{counts}, but the tokens of an image are not contiguous")
        self.ids = tuple(ids)


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix. Bisection compares slices, which runs at C speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def build_micro_batch(sequences: Sequence[_PackedSequence]) -> MicroBatch:
    """Return a MicroBatch that contains tokens shared by several sequences of a group only once.

    In sorted order, the longest prefix that a sequence shares with any earlier one is the prefix that it shares with
    the previous one. Only the tokens after this prefix are appended; for the shared tokens it reuses the previous
    sequence's positions.
    """
    ids, end = [], []
    segments, images = [], []
    hidden_index, target, rows = [], [], []
    routed = []  # (positions of a sequence's input tokens, their experts)
    path: list[int] = []  # positions of the previous sequence's input tokens
    prev: _PackedSequence | None = None
    for seq in sorted(sequences, key=lambda seq: (seq.group, seq.ids)):
        shared = common_prefix_length(prev.ids, seq.ids) if prev is not None and prev.group == seq.group else 0
        for position in path[shared:]:  # the subtrees of tokens that this sequence does not share end here
            end[position] = len(ids)
        new = seq.tokens[shared : len(seq.ids)]
        positions = range(len(ids), len(ids) + len(new))
        if new:
            segments.append((positions.start, positions.stop, path[shared - 1] if shared else -1))
        starts = zip(seq.images, seq.image_starts, strict=True)
        images += [image for image, start in starts if start >= shared]
        path = [*path[:shared], *positions]
        if seq.experts:
            experts = np.concatenate(seq.experts).astype(np.int16)
            routed.append((path[: len(experts)], experts))
        ids += new
        end += [0] * len(new)
        hidden_index += [path[t - 1] for t in seq.trained]
        target += [seq.tokens[t] for t in seq.trained]
        rows += range(seq.first_row, seq.first_row + len(seq.trained))
        prev = seq
    for position in path:
        end[position] = len(ids)
    ids_T, end_T, *columns = (torch.tensor(x, dtype=torch.long) for x in (ids, end, hidden_index, target, rows))
    by_row = columns[-1].argsort()
    micro = MicroBatch(ids_T, end_T, segments, images, *(column[by_row] for column in columns))
    if routed:
        micro.set_experts(routed)
    return micro


def rollouts_flops(rollouts: Sequence[Any], costs: "FlopCosts") -> float:
    """Return the FLOPs of a forward pass over the rollouts of one prompt."""
    return sequences_flops(rollouts[0].prompt, list(chain.from_iterable(map(training_sequences, rollouts))), costs)


def sequences_flops(prompt: Any, sequences: Sequence[Any], costs: "FlopCosts") -> float:
    """Return the FLOPs of a forward pass over sequences, assuming that they share the prompt and nothing after it."""
    later_images = chain.from_iterable(seq.images[len(prompt.images) :] for seq in sequences)
    grids = [image.grid_thw for image in (*prompt.images, *later_images)]
    patches = list(chain.from_iterable([h * w] * t for t, h, w in grids))  # of images and slices
    lengths = [seq.trained[-1] - len(prompt.token_ids) for seq in sequences]
    return group_flops(costs, len(prompt.token_ids), patches, lengths, sum(len(seq.trained) for seq in sequences))


# ----------------------------------------------------------------------------------------------------------------------
# Balance across ranks


def balance_across_ranks(
    groups: dict, chosen: Sequence[Any], minibatches: int, costs: "FlopCosts", ctx: DistContext, meter: Meter
) -> list[list[Any]]:
    """Move whole groups between ranks so that the ranks' FLOPs are even. Return this rank's rollouts of each minibatch,
    and record max / mean of the ranks' FLOPs, before (balance/sampled) and after (balance/trained).

    `groups` are the groups that this process sampled, by keys that order them over all processes. `chosen` are the keys
    of the groups to train on, from all processes. A group is sent with its prompt and images, and only to the data rank
    that trains on it, which is one process or all processes of a tensor-parallel process group.
    """
    by_key, sampled_by = {}, {}
    for rank, rank_flops in enumerate(ctx.gather({k: rollouts_flops(groups[k], costs) for k in chosen if k in groups})):
        by_key |= rank_flops
        sampled_by |= dict.fromkeys(rank_flops, rank // ctx.tp)
    flops = [by_key[key] for key in chosen]
    owner = assign_to_ranks(flops, minibatches, ctx.data_world)
    local = {key: i % minibatches for i, key in enumerate(chosen) if owner[i] == ctx.data_rank}
    parcels: list[dict[Any, list[Any]]] = [{} for _ in range(ctx.world)]
    for key, data_rank in zip(chosen, owner, strict=True):
        for rank in range(data_rank * ctx.tp, (data_rank + 1) * ctx.tp):
            if key in groups:
                parcels[rank][key] = groups[key]
    groups = dict(chain.from_iterable(parcel.items() for parcel in ctx.exchange(parcels)))
    split: list[list[Any]] = [[] for _ in range(minibatches)]
    for key, number in local.items():
        split[number] += groups[key]
    meter.set_replicated("balance/sampled", load_imbalance(flops, [sampled_by[key] for key in chosen], minibatches,
                                                           ctx.data_world))
    meter.set_replicated("balance/trained", load_imbalance(flops, owner, minibatches, ctx.data_world))
    return split


def load_imbalance(costs: Sequence[float], rank_I: Sequence[int], minibatches: int, ranks: int) -> float:
    """Return max / mean of the ranks' total costs; item i is on rank rank_I[i]. The maximum and the mean are taken per
    minibatch and then summed over minibatches, because ranks wait for each other at each minibatch."""
    cells = np.arange(len(costs)) % minibatches * ranks + np.array(rank_I)
    loads = np.bincount(cells, costs, minlength=ranks * minibatches).reshape(-1, ranks)
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


def assign_to_ranks(flops_I: list[float], minibatches: int, n_ranks: int) -> list[int]:
    """Return the rank of each group of a step, (I,). Group i belongs to minibatch i % minibatches. Each minibatch is
    balanced on its own: ranks wait for each other at every optimizer step, so a later minibatch cannot make up for lost
    time. Every rank gets at least one group of each minibatch that has at least as many groups as ranks."""
    rank_I = [0] * len(flops_I)
    for minibatch in range(minibatches):
        for rank, chosen in enumerate(balance(flops_I[minibatch::minibatches], n_ranks)):
            for i in chosen:
                rank_I[minibatch + i * minibatches] = rank
    return rank_I


# ----------------------------------------------------------------------------------------------------------------------
# Balance: I items of known cost into B bins

# TWO_WAY_SPLITS[n]: (D, n) of 0 and 1, every way to divide n items between two bins that leaves neither bin empty
TWO_WAY_SPLITS = [(np.arange(1, 2**n - 1)[:, None] >> np.arange(n)) % 2.0 for n in range(11)]


def balance(
    costs: list[float], k: int, cap: float | None = None, sizes: list[int] | None = None, max_size: int | None = None
) -> list[list[int]]:
    """Partition the indices of `costs` into k bins so that the largest total cost of a bin is small. Every index is in
    one bin, a bin's indices ascend, and bins are empty only if there are fewer items than bins. The result is
    deterministic.

    `cap` bounds the total cost of a bin, and `max_size` the sum of its `sizes` (such as tokens, if costs are FLOPs).
    Raise ValueError if an item exceeds a bound on its own, or if no partition within the bounds is found. Without
    `cap`, a partition is always found if k >= bins_needed(sizes, max_size).

    The search starts from longest processing time first (LPT, Graham 1969), refined by `refine_balance`. If the refined
    result is more than 0.05% above a lower bound of the largest cost, it also tries best-fit decreasing.
    """
    cap = np.inf if cap is None else cap
    max_size = np.inf if max_size is None else max_size
    cost_I = check_item_bounds("cost", costs, "cap", cap)
    size_I = check_item_bounds("size", [0] * len(costs) if sizes is None else sizes, "max_size", max_size)
    target = (1 + 5e-4) * max(cost_I.max(initial=0.0), cost_I.sum() / k)  # stop within 5e-4 of a lower bound
    best: tuple[float, list[list[int]]] = (np.inf, [])
    for load_I in (cost_I, -size_I):
        bin_I = best_fit(load_I, size_I, k, max_size) if best[0] > target else None
        if bin_I is not None:
            best = min(best, refine_balance(bin_I, cost_I, size_I, k, max_size, target))
    if not best[1] or best[0] > cap:
        items = f"{len(costs)} items of cost {cost_I.sum():.12g} and size {size_I.sum():.12g}"
        limit = f"cost <= {cap} and size <= {max_size}"
        raise ValueError(f"balance: found no way to put {items} in {k} bins of {limit}; use more bins or larger bounds")
    return best[1]


def bins_needed(sizes: Sequence[int], max_size: int) -> int:
    """Return the number of bins of `max_size` that best-fit decreasing needs for items of these sizes."""
    size_I = check_item_bounds("size", sizes, "max_size", max_size)
    return len(np.unique(best_fit(-size_I, size_I, len(sizes), max_size)))


def check_item_bounds(name: str, values: Sequence[float], bound: str, limit: float) -> np.ndarray:
    """Return the values as an array. Raise ValueError if a value is not finite or not between 0 and `limit`."""
    for i, value in enumerate(values):
        if not (math.isfinite(value) and 0 <= value <= limit):
            fix = f"; raise {bound}" if value > limit else ""
            raise ValueError(f"balance: item {i} has {name} {value:.12g}, but {name} must be finite and between 0 and "
                             f"{bound} {limit}{fix}")
    return np.asarray(values, dtype=np.float64)


def best_fit(load_I: np.ndarray, size_I: np.ndarray, k: int, max_size: float) -> np.ndarray | None:
    """Put each item, largest |load| first, into the bin with the smallest load among the bins with enough space. Return
    bin_I, or None if an item fits nowhere. With load_I = costs, the least loaded bin wins (LPT). With load_I = -sizes,
    the fullest bin that still has room wins (best-fit decreasing)."""
    bin_I = np.zeros(len(load_I), dtype=int)
    load_B = np.zeros(k)
    size_B = np.zeros(k)
    for i in np.argsort(-np.abs(load_I), kind="stable"):
        bin_I[i] = np.where(size_B + size_I[i] <= max_size, load_B, np.inf).argmin()
        load_B[bin_I[i]] += load_I[i]
        size_B[bin_I[i]] += size_I[i]
    return bin_I if size_B.max(initial=0.0) <= max_size else None


def refine_balance(
    bin_I: np.ndarray, cost_I: np.ndarray, size_I: np.ndarray, k: int, max_size: float, target: float
) -> tuple[float, list[list[int]]]:
    """Improve a partition by local search, for about 0.1 s at most. Return the largest load and the bins.

    Each iteration takes two bins and divides up to ten of their items, drawn at random, in the best possible way. The
    first pair is the heaviest and the lightest bin. After each iteration without improvement the heaviest bin is paired
    with the next lightest one. When it has been paired with all bins, the second heaviest is paired with all bins, and
    so on."""
    for empty in np.flatnonzero(np.bincount(bin_I, minlength=k) == 0)[: len(bin_I)]:
        # Fill an empty bin with an item of the bin with the most items; one item on its own is within every bound.
        # Later divisions never leave a bin empty.
        bin_I[bin_I.tolist().index(np.bincount(bin_I).argmax())] = empty
    rng = np.random.default_rng(0)
    failures = 0
    for _ in range(2000):
        load_B = np.bincount(bin_I, cost_I, minlength=k)
        size_B = np.bincount(bin_I, size_I, minlength=k)
        if load_B.max() <= target or failures == max(100, 2 * k):
            break
        heavy, light = load_B.argsort(kind="stable")[[-1 - failures // k % k, failures % k]]
        items = rng.permutation(np.flatnonzero((bin_I == heavy) | (bin_I == light)))[:10]
        to_heavy_D = TWO_WAY_SPLITS[len(items)]
        moved_D = to_heavy_D - (bin_I[items] == heavy)
        load_D = np.maximum(load_B[heavy] + moved_D @ cost_I[items], load_B[light] - moved_D @ cost_I[items])
        size_D = np.maximum(size_B[heavy] + moved_D @ size_I[items], size_B[light] - moved_D @ size_I[items])
        load_D[size_D > max_size] = np.inf
        failures += 1
        if load_D.min(initial=np.inf) < max(load_B[heavy], load_B[light]) * (1 - 1e-9):
            bin_I[items] = np.where(to_heavy_D[load_D.argmin()], heavy, light)
            failures = 0
    return load_B.max(), [np.flatnonzero(bin_I == b).tolist() for b in range(k)]


# ----------------------------------------------------------------------------------------------------------------------
# Cost of a group: FLOPs of a forward pass, 2 per multiply-add


class FlopCosts(NamedTuple):
    """FLOPs of the parts of a forward pass."""

    token: float  # per language token, in the matrix products of all layers
    pair: float  # per pair of a token and a token that it attends to, in the layers with full attention
    trained_token: float  # per row of logits
    patch: float  # per image patch, in the matrix products of the vision tower
    image_pair: float  # per pair of patches in an image or slice, in the tower's layers with full attention
    window_pair: float  # per pair of patches in a window, in the tower's layers with window attention
    window: int  # number of patches in a window


def flop_costs(config: Any, vision: float = 1 / 3) -> FlopCosts:
    """Return the costs of a model with this transformers config: Qwen2-VL, Qwen2.5-VL (gated MLP, windows), Qwen3-VL
    (deepstack), Qwen3.5 (recurrent layers) and their mixtures of experts, where only active experts count. Norms,
    activations, rotary embeddings and softmax are left out, because they are not matrix products.

    Balancing needs only relative costs. An update costs three forward passes (the backward pass costs two), but only
    one in a frozen tower, and none if the tower's features are cached. `vision` is the tower's cost relative to a
    trained tower: 1 if it is trained, 1/3 if it is frozen, 0 if its features are cached.
    """
    text = config.text_config
    layer_types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    per_head = 3 if hasattr(text, "linear_num_key_heads") else 2  # query, output and, in Qwen3.5, the output gate
    attention = text.hidden_size * head_dim * (per_head * heads + 2 * text.num_key_value_heads)
    n_full = len(layer_types) - layer_types.count("linear_attention")
    token = n_full * attention + sum(mlp_macs(text, layer) for layer in range(len(layer_types)))
    if n_full < len(layer_types):
        token += (len(layer_types) - n_full) * linear_attention_macs(text)

    tower = config.vision_config
    width = getattr(tower, "embed_dim", tower.hidden_size)  # only in Qwen2-VL hidden_size is the output size
    inner = getattr(tower, "intermediate_size", None) or int(width * tower.mlp_ratio)
    has_windows = hasattr(tower, "fullatt_block_indexes")  # such towers also have a gated MLP
    n_full_blocks = len(set(tower.fullatt_block_indexes)) if has_windows else tower.depth
    embedding = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2 * width
    block = 4 * width * width + (3 if has_windows else 2) * width * inner
    n_mergers = 1 + len(getattr(tower, "deepstack_visual_indexes", ()))
    merge = tower.spatial_merge_size
    merger = width * (width * merge**2 + getattr(tower, "out_hidden_size", tower.hidden_size))
    patch = embedding + tower.depth * block + n_mergers * merger
    side = tower.window_size // tower.patch_size // merge * merge if has_windows else 0
    text_costs = (2.0 * token, 4.0 * n_full * heads * head_dim, 2.0 * text.hidden_size * text.vocab_size)
    tower_costs = (2.0 * patch, 4.0 * n_full_blocks * width, 4.0 * (tower.depth - n_full_blocks) * width)
    return FlopCosts(*text_costs, *(vision * cost for cost in tower_costs), window=side**2)


def mlp_macs(text: Any, layer: int) -> int:
    """Return the multiply-adds per token in a layer's MLP, or in the router and the active experts of an MoE layer."""
    n_experts = getattr(text, "num_experts", 0)
    sparse_step = getattr(text, "decoder_sparse_step", 1)
    if not n_experts or layer in (getattr(text, "mlp_only_layers", None) or ()) or (layer + 1) % sparse_step:
        return text.hidden_size * 3 * text.intermediate_size
    shared = getattr(text, "shared_expert_intermediate_size", 0)
    active = 3 * text.num_experts_per_tok * text.moe_intermediate_size
    return text.hidden_size * (n_experts + active + (3 * shared + 1 if shared else 0))


def linear_attention_macs(text: Any) -> int:
    """Return the multiply-adds per token in a layer of linear attention with chunks of 64 tokens: two products of keys
    and one of values within a chunk, three products with the state, and two triangular systems."""
    key_dim = text.linear_key_head_dim
    value_dim = text.linear_value_head_dim
    n_value_heads = text.linear_num_value_heads
    keys = text.linear_num_key_heads * key_dim
    values = n_value_heads * value_dim
    projections = text.hidden_size * (2 * keys + 3 * values + 2 * n_value_heads)
    convolution = (2 * keys + values) * text.linear_conv_kernel_dim
    chunk = 64 * (2 * key_dim + value_dim) + 32 * (key_dim + value_dim)
    return projections + convolution + n_value_heads * (3 * key_dim * value_dim + chunk)


def group_flops(
    costs: "FlopCosts", prompt_tokens: int, image_patches: list[int], response_lengths: list[int], trained_tokens: int
) -> float:
    """Return the FLOPs of a forward pass over a prompt, its images and its responses; prompt and images are counted
    once. `prompt_tokens` includes the image tokens. A response attends to the prompt and itself. The language-model
    head computes logits for `trained_tokens` tokens in total. For a single sequence of n tokens, pass a prompt of n
    tokens without responses.

    Windows are assumed to be full, so images whose sides are not multiples of the window's side count slightly too
    much.
    """
    pairs = prompt_tokens * (prompt_tokens + 1) / 2
    pairs += sum(n * prompt_tokens + n * (n + 1) / 2 for n in response_lengths)
    text = costs.token * (prompt_tokens + sum(response_lengths)) + costs.pair * pairs
    vision = 0.0
    for n in image_patches:
        vision += n * (costs.patch + costs.image_pair * n + costs.window_pair * min(n, costs.window))
    return text + costs.trained_token * trained_tokens + vision
