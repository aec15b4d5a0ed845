"""Rollouts to micro-batches: prompts shared by their responses, and work balanced over ranks and micro-batches.

A micro-batch holds each prompt with its images once, followed by its responses. Whatever else responses of a prompt
have in common, such as equal first tokens or earlier turns, is shared in the same way. A token attends to its prefix
and itself, nothing else, so log-probabilities and gradients are those of separate sequences.

Axes: N trained tokens of a step on this rank, T packed tokens of a micro-batch, K trained tokens among them; in balance
N items, B bins, D divisions of a few items between two bins.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from errors import need
from utils import DistContext, Meter, copy_together

# ----------------------------------------------------------------------------------------------------------------------
# The records: what the loss reads, and how it is laid out


@dataclass(eq=False, slots=True)
class TokenBatch:
    """One row for each token that the policy produced, (N,) each, rollout by rollout. A column that was not computed is
    None: to use it is an error, and so is a name that is not here."""

    rollout: Tensor  # int64, index of its rollout in the batch
    rollout_logps: Tensor  # the engine's log-probabilities; this and the rest fp32
    n_images: Tensor  # of the rollout
    weights: Tensor | None = None  # see grpo.token_weights; 0: not trained on
    old_logps: Tensor | None = None  # of what the ratio compares with: Algorithm.old_policy
    ref_logps: Tensor | None = None  # of the reference policy
    values: Tensor | None = None  # expected returns, under the weights before the update
    advantages: Tensor | None = None
    returns: Tensor | None = None
    logps: Tensor | None = None  # under the weights of the current update; so are entropies
    entropies: Tensor | None = None
    turn_rewards: Tensor | None = None  # of episodes: what an environment gave for the turn that ends here, else 0
    tangents: Tensor | None = None  # (N, 3): what kernels.TangentLoss reads

    def columns(self) -> dict[str, Tensor]:
        """Return those that were computed."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def __getitem__(self, rows: slice | Tensor) -> "TokenBatch":
        return TokenBatch(**{name: column[rows] for name, column in self.columns().items()})

    def __len__(self) -> int:
        return len(self.rollout)

    def fill(self, rows: Tensor, **columns: Tensor | None) -> None:
        """Set some rows of the given columns. A column that does not exist yet is created, with NaN in its other rows;
        a column given as None is skipped."""
        for name, values in columns.items():
            if values is not None:
                if getattr(self, name) is None:
                    setattr(self, name, torch.full((len(self),), torch.nan))
                getattr(self, name)[rows] = values.float().cpu()

    def to(self, device: torch.device) -> "TokenBatch":
        names, columns = zip(*self.columns().items(), strict=True)
        return TokenBatch(**dict(zip(names, copy_together(columns, device), strict=True)))


def make_token_batch(rollouts: Sequence[Any], weights: Sequence[float] | None = None) -> TokenBatch:
    """The tokens of rollouts, with the weight of each token of a rollout if given."""
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
    """(N,): of each turn its environment's reward, at the last token that the policy produced before it."""
    rewards_N = []
    for r in rollouts:
        rest = iter(r.turn_rewards)
        neighbours = pairwise([*r.response_mask, False])
        rewards_N += [0.0 if goes_on else next(rest, 0.0) for produced, goes_on in neighbours if produced]
    return torch.tensor(rewards_N, dtype=torch.float32)


@dataclass(eq=False)
class MicroBatch:
    """The layout of T tokens, depth first: a prompt, a response of it, the next response of it, the next prompt.

    The tokens that continue the one at k are positions k + 1 to end_T[k] - 1, so query q sees key k exactly if
    k <= q < end_T[k]: one integer per token holds the whole mask. Trained token j has id target_K[j], is predicted by
    the hidden state at source_K[j], and is row token_index_K[j] of the TokenBatch. Rows ascend, so the tokens of a
    rollout are contiguous, even if its turns are separate sequences.
    """

    ids_T: Tensor  # int64, as all here
    subtree_end_T: Tensor
    segments: list[tuple[int, int, int]]  # unbroken stretches: (start, stop, position of the token before it; -1: none)
    images: list[Any]  # in the order of their tokens in ids_T
    hidden_index_K: Tensor
    target_K: Tensor
    token_index_K: Tensor

    @property
    def n_tokens(self) -> int:
        return len(self.ids_T)

    def to(self, device: torch.device) -> "MicroBatch":
        columns = (self.ids_T, self.subtree_end_T, self.hidden_index_K, self.target_K, self.token_index_K)
        ids_T, end_T, *rest = copy_together(columns, device)
        return MicroBatch(ids_T, end_T, self.segments, self.images, *rest)


EMPTY_INDEX = torch.zeros(0, dtype=torch.long)
DUMMY_MICRO_BATCH = MicroBatch(
    torch.tensor([0]), torch.tensor([1]), [(0, 1, -1)], [], EMPTY_INDEX, EMPTY_INDEX, EMPTY_INDEX
)  # trains nothing


@dataclass(eq=False)
class TrainBatch:
    """What a step trains on, on this rank: whole groups, their tokens, and for each minibatch (optimizer step of a
    pass) the layout of those that can have a gradient."""

    rollouts: list[Any]
    tokens: TokenBatch
    minibatches: list[list[MicroBatch]]

    def rows(self, minibatch: int) -> Tensor:
        """Return the rows of a minibatch's tokens, in ascending order, so that those of a rollout stand together."""
        return torch.cat([EMPTY_INDEX, *(micro.token_index_K for micro in self.minibatches[minibatch])]).sort().values

    def splits_rollouts(self, minibatch: int) -> bool:
        """Return whether several micro-batches of a minibatch have tokens of the same rollout."""
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
    """How micro-batches are made: of at most max_tokens tokens, balanced by `rates` (flop_rates; None: by tokens).
    Without `share` each response has a prompt of its own (--attn flash)."""

    max_tokens: int
    image_token: int
    rates: "FlopCosts | None" = None
    share: bool = True

    def pack(
        self, rollouts: Sequence[Any], chosen: Sequence[int] | None = None, agree: Callable[[int], int] = lambda n: n
    ) -> list[MicroBatch]:
        """Micro-batches of the chosen rollouts (default: all), each sequence in exactly one. Turns that are
        separate sequences may be in different ones.

        There are as few as best-fit decreasing needs, or `agree(needed)` of them: the largest number over all ranks, as
        collectives must match. Where there are fewer groups than that, the rest hold one token and train nothing.
        UserError for a response that cannot fit alone, ValueError for images that disagree with their tokens.
        """
        first_rows = list(accumulate((sum(r.response_mask) for r in rollouts), initial=0))
        groups: dict[Any, list[_PackedSequence]] = {}
        for i in range(len(rollouts)) if chosen is None else chosen:
            for turn in training_sequences(rollouts[i], first_rows[i]):
                key = rollouts[i].prompt.uid if self.share else (i, turn.first_row)
                groups.setdefault(key, []).append(_PackedSequence(rollouts[i], turn, key, self.image_token))
        units = list(chain.from_iterable(map(self._split, groups.values())))
        sizes = [size for _, size in units]
        wanted = agree(bins_needed(sizes, self.max_tokens))
        if not units:
            return [DUMMY_MICRO_BATCH] * wanted
        costs = sizes
        if self.rates is not None:
            costs = [sequences_flops(inputs[0].rollout.prompt, inputs, self.rates) for inputs, _ in units]
        micros = []
        for chosen_units in balance(costs, min(wanted, len(units)), sizes=sizes, max_size=self.max_tokens):
            micros.append(build_micro_batch(list(chain.from_iterable(units[i][0] for i in chosen_units))))
        return micros + [DUMMY_MICRO_BATCH] * (wanted - len(micros))

    def _split(self, group: list["_PackedSequence"]) -> list[tuple[list["_PackedSequence"], int]]:
        """Responses of a prompt in units of at most max_tokens tokens, with their sizes: a group over the budget
        repeats what it shares."""
        units: list[tuple[list[_PackedSequence], int]] = []
        before: tuple[int, ...] = ()
        for one in sorted(group, key=lambda one: one.ids):
            prompt = one.rollout.prompt
            need(len(one.ids) <= self.max_tokens,
                 f"prompt {prompt.uid!r} of {len(prompt.token_ids)} tokens and its response need {len(one.ids)}, over "
                 f"--micro-tokens {self.max_tokens}; raise it, or lower --max-new-tokens")
            new = len(one.ids) - common_prefix_length(before, one.ids)
            if units and units[-1][1] + new <= self.max_tokens:
                units[-1] = (units[-1][0] + [one], units[-1][1] + new)
            else:
                units.append(([one], len(one.ids)))
            before = one.ids
        return units


class TrainSequence(NamedTuple):
    """A sequence and what the policy produced of it."""

    tokens: list[int]
    trained: list[int]  # positions
    images: list[Any]
    first_row: int  # of the TokenBatch


def training_sequences(rollout: Any, first_row: int = 0) -> list[TrainSequence]:
    """The sequences that a rollout is trained as: one; or one for each turn of an episode in which the chat template
    has rewritten what was said before."""
    images = rollout.prompt.images + rollout.images
    if not rollout.separate_turns:
        start = len(rollout.prompt.token_ids)
        trained = [start + t for t, produced in enumerate(rollout.response_mask) if produced]
        sampled = TrainSequence(rollout.prompt.token_ids + list(rollout.response), trained, images, first_row)
        return [sampled] if trained else []  # an episode whose environment failed at once has none
    turns = []
    for ids, n_sampled, n_images in rollout.separate_turns:
        trained = list(range(len(ids) - n_sampled, len(ids)))
        turns.append(TrainSequence(ids, trained, images[:n_images], first_row))
        first_row += n_sampled
    return turns


class _PackedSequence:
    """A sequence of a rollout as packing sees it; those of a `group` share what they have in common. `ids` are the
    tokens that are inputs, each image token replaced by a negative number for its image, so that sequences share a
    token only if all before it is the same, images included. The last trained token is a target and never an input, and
    what follows it predicts nothing."""

    def __init__(self, rollout: Any, sampled: TrainSequence, group: Any, image_token: int):
        self.rollout = rollout
        self.group = group
        self.tokens, self.trained, self.images, self.first_row = sampled
        uid = rollout.prompt.uid
        assert self.trained and self.trained[0] > 0, f"response of {uid!r}: no token after the first is trained"
        ids = self.tokens[: self.trained[-1]]
        n_tokens = [image.n_tokens for image in self.images]
        misfit = f"response of {uid!r}: {ids.count(image_token)} image tokens, where its images have {n_tokens}"
        if ids.count(image_token) != sum(n_tokens):
            raise ValueError(f"{misfit}; was a placeholder sampled?")
        self.image_starts = []
        for image in self.images:
            start = ids.index(image_token)
            number = -1 - int.from_bytes(hashlib.sha1(image.key.encode()).digest()[:7])
            ids[start : start + image.n_tokens] = [number] * image.n_tokens
            self.image_starts.append(start)
        if image_token in ids:
            raise ValueError(f"{misfit}, but not image by image in unbroken stretches")
        self.ids = tuple(ids)


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning, by bisection: slices compare at C speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def build_micro_batch(inputs: Sequence[_PackedSequence]) -> MicroBatch:
    """One MicroBatch, each token that several responses of a group share only once.

    Sorted, a response shares with all before it just what it shares with the last one: the tokens beyond the common
    beginning are appended, the others are where the last response has them.
    """
    ids, end = [], []
    runs, images = [], []
    source, target, rows = [], [], []
    path: list[int] = []  # positions of the last response's inputs
    last: _PackedSequence | None = None
    for one in sorted(inputs, key=lambda one: (one.group, one.ids)):
        shared = common_prefix_length(last.ids, one.ids) if last is not None and last.group == one.group else 0
        for position in path[shared:]:  # what is not shared ends here
            end[position] = len(ids)
        new = one.tokens[shared : len(one.ids)]
        positions = range(len(ids), len(ids) + len(new))
        if new:
            runs.append((positions.start, positions.stop, path[shared - 1] if shared else -1))
        starts = zip(one.images, one.image_starts, strict=True)
        images += [image for image, start in starts if start >= shared]
        path = [*path[:shared], *positions]
        ids += new
        end += [0] * len(new)
        source += [path[t - 1] for t in one.trained]
        target += [one.tokens[t] for t in one.trained]
        rows += range(one.first_row, one.first_row + len(one.trained))
        last = one
    for position in path:
        end[position] = len(ids)
    ids_T, end_T, *columns = (torch.tensor(x, dtype=torch.long) for x in (ids, end, source, target, rows))
    by_row = columns[-1].argsort()
    return MicroBatch(ids_T, end_T, runs, images, *(column[by_row] for column in columns))


def rollouts_flops(rollouts: Sequence[Any], rates: "FlopCosts") -> float:
    """Forward FLOPs of the rollouts of one prompt."""
    return sequences_flops(rollouts[0].prompt, list(chain.from_iterable(map(training_sequences, rollouts))), rates)


def sequences_flops(prompt: Any, sequences: Sequence[Any], rates: "FlopCosts") -> float:
    """Of sequences that begin with a prompt and are taken to part at its end."""
    later = chain.from_iterable(one.images[len(prompt.images) :] for one in sequences)
    patches = [math.prod(image.grid_thw) for image in (*prompt.images, *later)]
    inputs = [one.trained[-1] - len(prompt.token_ids) for one in sequences]
    return group_flops(rates, len(prompt.token_ids), patches, inputs, sum(len(one.trained) for one in sequences))


# ----------------------------------------------------------------------------------------------------------------------
# Balance over ranks

def balance_across_ranks(
    groups: dict, chosen: Sequence[Any], minibatches: int, rates: "FlopCosts", ctx: DistContext, meter: Meter
) -> list[list[Any]]:
    """Send whole groups to the ranks that train on them, evened in FLOPs. Return this rank's rollouts of each
    minibatch; measure the heaviest rank's FLOPs over the mean, before and after.

    `groups` are those that this process sampled, by keys that order them over all processes. `chosen` are the keys of
    the groups to train on, from all processes. A group is sent with its prompt and images, only to its owners: one data
    rank, which is one process or all processes of a tensor-parallel group.
    """
    costs, sampled_by = {}, {}
    for rank, theirs in enumerate(ctx.gather({k: rollouts_flops(groups[k], rates) for k in chosen if k in groups})):
        costs |= theirs
        sampled_by |= dict.fromkeys(theirs, rank // ctx.tp)
    flops = [costs[key] for key in chosen]
    owner = assign_to_ranks(flops, minibatches, ctx.data_world)
    mine = {key: i % minibatches for i, key in enumerate(chosen) if owner[i] == ctx.data_rank}
    parcels: list[dict[Any, list[Any]]] = [{} for _ in range(ctx.world)]
    for key, data_rank in zip(chosen, owner, strict=True):
        for rank in range(data_rank * ctx.tp, (data_rank + 1) * ctx.tp):
            if key in groups:
                parcels[rank][key] = groups[key]
    groups = dict(chain.from_iterable(parcel.items() for parcel in ctx.exchange(parcels)))
    split: list[list[Any]] = [[] for _ in range(minibatches)]
    for key, number in mine.items():
        split[number] += groups[key]
    meter.set_replicated(
        "balance/sampled", load_imbalance(flops, [sampled_by[key] for key in chosen], minibatches, ctx.data_world)
    )
    meter.set_replicated("balance/trained", load_imbalance(flops, owner, minibatches, ctx.data_world))
    return split


def load_imbalance(costs: Sequence[float], rank_N: Sequence[int], minibatches: int, ranks: int) -> float:
    """The largest total of a rank, over the mean; each summed over minibatches, where ranks wait for each other."""
    cells = np.arange(len(costs)) % minibatches * ranks + np.array(rank_N)
    loads = np.bincount(cells, costs, minlength=ranks * minibatches).reshape(-1, ranks)
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


def assign_to_ranks(flops_N: list[float], minibatches: int, n_ranks: int) -> list[int]:
    """The rank of each group of a step, (N,); group i is of minibatch i % minibatches. Each minibatch is even over the
    ranks on its own: ranks wait for each other at its optimizer step, so what a later minibatch makes up for is lost
    already. No rank goes without a group of a minibatch that has one for each."""
    rank_N = [0] * len(flops_N)
    for minibatch in range(minibatches):
        for rank, chosen in enumerate(balance(flops_N[minibatch::minibatches], n_ranks)):
            for i in chosen:
                rank_N[minibatch + i * minibatches] = rank
    return rank_N


# ----------------------------------------------------------------------------------------------------------------------
# Balance: N items of known cost into B bins

# [n]: (D, n) of 0 and 1, every way to divide n items between two bins that leaves neither without any
TWO_WAY_SPLITS = [(np.arange(1, 2**n - 1)[:, None] >> np.arange(n)) % 2.0 for n in range(11)]


def balance(
    costs: list[float], k: int, cap: float | None = None, sizes: list[int] | None = None, max_size: int | None = None
) -> list[list[int]]:
    """Partition the indices of `costs` into k bins so that the largest total cost is small. Every index is in one bin,
    a bin's indices ascend, and bins are empty only where there are fewer items than bins. Deterministic.

    `cap` bounds a bin's cost and `max_size` its total of `sizes` (say tokens, where costs are FLOPs). Neither is ever
    exceeded: ValueError for an item that exceeds one alone, and where no partition is found. Without `cap` one is found
    wherever k >= bins_needed(sizes, max_size).

    Starts from longest first (Graham 1969) and, unless that ends even, from best fit of the largest; see `even_out`.
    """
    cap = np.inf if cap is None else cap
    room = np.inf if max_size is None else max_size
    cost_N = check_item_bounds("cost", costs, "cap", cap)
    size_N = check_item_bounds("size", [0] * len(costs) if sizes is None else sizes, "max_size", room)
    target = (1 + 5e-4) * max(cost_N.max(initial=0.0), cost_N.sum() / k)  # 5e-4 over what is possible at best will do
    best: tuple[float, list[list[int]]] = (np.inf, [])
    for load_N in (cost_N, -size_N):
        bin_N = best_fit(load_N, size_N, k, room) if best[0] > target else None
        if bin_N is not None:
            best = min(best, refine_balance(bin_N, cost_N, size_N, k, room, target))
    if not best[1] or best[0] > cap:
        items = f"{len(costs)} items of cost {cost_N.sum():.12g} and size {size_N.sum():.12g}"
        bounds = f"cost <= {cap} and size <= {room}"
        raise ValueError(f"balance: found no way to put {items} into {k} bins of {bounds}; use more bins or raise them")
    return best[1]


def bins_needed(sizes: Sequence[int], max_size: int) -> int:
    """How few bins of `max_size` hold items of these sizes, by best fit of the largest first."""
    size_N = check_item_bounds("size", sizes, "max_size", max_size)
    return len(np.unique(best_fit(-size_N, size_N, len(sizes), max_size)))


def check_item_bounds(what: str, values: Sequence[float], bound: str, limit: float) -> np.ndarray:
    for i, value in enumerate(values):
        if not (math.isfinite(value) and 0 <= value <= limit):
            raise ValueError(f"balance: item {i} has {what} {value:.12g}, not in 0 to {bound} {limit}; raise {bound}?")
    return np.asarray(values, dtype=np.float64)


def best_fit(load_N: np.ndarray, size_N: np.ndarray, k: int, max_size: float) -> np.ndarray | None:
    """bin_N: the items, the largest first, each in the bin of the least load that has room; None where none has. Loads
    that are costs spread the items over the bins, loads that are -sizes fill one bin after the other."""
    bin_N = np.zeros(len(load_N), dtype=int)
    load_B = np.zeros(k)
    size_B = np.zeros(k)
    for i in np.argsort(-np.abs(load_N), kind="stable"):
        bin_N[i] = np.where(size_B + size_N[i] <= max_size, load_B, np.inf).argmin()
        load_B[bin_N[i]] += load_N[i]
        size_B[bin_N[i]] += size_N[i]
    return bin_N if size_B.max(initial=0.0) <= max_size else None


def refine_balance(
    bin_N: np.ndarray, cost_N: np.ndarray, size_N: np.ndarray, k: int, max_size: float, target: float
) -> tuple[float, list[list[int]]]:
    """The heaviest load and the bins, after lowering loads for as long as that goes, at most some 0.1 s: two bins
    divide ten of their items anew, drawn at random, in the best of all ways. The heaviest and the lightest come first;
    after a failure the heaviest and the second lightest and so on, after all of these the second heaviest and each
    other."""
    for empty in np.flatnonzero(np.bincount(bin_N, minlength=k) == 0)[: len(bin_N)]:
        # Gets an item of the bin with the most: alone it is within every bound. No division leaves a bin empty again.
        bin_N[bin_N.tolist().index(np.bincount(bin_N).argmax())] = empty
    rng = np.random.default_rng(0)
    failures = 0
    for _ in range(2000):
        load_B = np.bincount(bin_N, cost_N, minlength=k)
        size_B = np.bincount(bin_N, size_N, minlength=k)
        if load_B.max() <= target or failures == max(100, 2 * k):
            break
        heavy, light = load_B.argsort(kind="stable")[[-1 - failures // k % k, failures % k]]
        some = rng.permutation(np.flatnonzero((bin_N == heavy) | (bin_N == light)))[:10]
        to_heavy_D = TWO_WAY_SPLITS[len(some)]
        moved_D = to_heavy_D - (bin_N[some] == heavy)
        top_D = np.maximum(load_B[heavy] + moved_D @ cost_N[some], load_B[light] - moved_D @ cost_N[some])
        size_D = np.maximum(size_B[heavy] + moved_D @ size_N[some], size_B[light] - moved_D @ size_N[some])
        top_D[size_D > max_size] = np.inf
        failures += 1
        if top_D.min(initial=np.inf) < max(load_B[heavy], load_B[light]) * (1 - 1e-9):
            bin_N[some] = np.where(to_heavy_D[top_D.argmin()], heavy, light)
            failures = 0
    return load_B.max(), [np.flatnonzero(bin_N == b).tolist() for b in range(k)]


# ----------------------------------------------------------------------------------------------------------------------
# What a group costs: forward FLOPs, 2 per multiply-add


class FlopCosts(NamedTuple):
    token: float  # a language token through all layers' matrices
    pair: float  # a token and one that it attends to
    trained_token: float  # a row of logits
    patch: float  # a patch through the vision tower's matrices
    image_pair: float  # two patches of an image, in the tower's layers that see it whole
    window_pair: float  # two patches of a window, in the others
    window: int  # patches of a window


def flop_rates(config: Any, vision: float = 1 / 3) -> FlopCosts:
    """For transformers' configs of Qwen2-VL, Qwen2.5-VL (gated MLP, windows), Qwen3-VL (deepstack), Qwen3.5 (recurrent
    layers) and their mixtures of experts, of which those count that a token passes. Norms, activations, rotary
    embeddings and softmax are left out: they multiply no matrices.

    Balance wants what an update costs, which is three forwards: one, and two for the backward. `vision` is the tower's
    share of that: 1 where it is trained, 1/3 where it is frozen, 0 where its features are cached.
    """
    text = config.text_config
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    per_head = 3 if hasattr(text, "linear_num_key_heads") else 2  # query and output, and Qwen3.5's gate of the output
    attention = text.hidden_size * head_dim * (per_head * heads + 2 * text.num_key_value_heads)
    n_full = len(kinds) - kinds.count("linear_attention")
    token = n_full * attention + sum(mlp_macs(text, layer) for layer in range(len(kinds)))
    if n_full < len(kinds):
        token += (len(kinds) - n_full) * linear_attention_macs(text)

    tower = config.vision_config
    width = getattr(tower, "embed_dim", tower.hidden_size)  # Qwen2-VL alone calls its output hidden_size
    inner = getattr(tower, "intermediate_size", None) or int(width * tower.mlp_ratio)
    has_windows = hasattr(tower, "fullatt_block_indexes")  # and with them a gated MLP
    n_whole = len(set(tower.fullatt_block_indexes)) if has_windows else tower.depth
    embedding = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2 * width
    block = 4 * width * width + (3 if has_windows else 2) * width * inner
    n_mergers = 1 + len(getattr(tower, "deepstack_visual_indexes", ()))
    merge = tower.spatial_merge_size
    merger = width * (width * merge**2 + getattr(tower, "out_hidden_size", tower.hidden_size))
    patch = embedding + tower.depth * block + n_mergers * merger
    side = tower.window_size // tower.patch_size // merge * merge if has_windows else 0
    text_rates = (2.0 * token, 4.0 * n_full * heads * head_dim, 2.0 * text.hidden_size * text.vocab_size)
    tower_rates = (2.0 * patch, 4.0 * n_whole * width, 4.0 * (tower.depth - n_whole) * width)
    return FlopCosts(*text_rates, *(vision * rate for rate in tower_rates), window=side**2)


def mlp_macs(text: Any, layer: int) -> int:
    """Of a token in a layer's MLP; in a mixture of experts in the router and the experts chosen."""
    n_experts = getattr(text, "num_experts", 0)
    every = getattr(text, "decoder_sparse_step", 1)
    if not n_experts or layer in (getattr(text, "mlp_only_layers", None) or ()) or (layer + 1) % every:
        return text.hidden_size * 3 * text.intermediate_size
    shared = getattr(text, "shared_expert_intermediate_size", 0)
    chosen = 3 * text.num_experts_per_tok * text.moe_intermediate_size
    return text.hidden_size * (n_experts + chosen + (3 * shared + 1 if shared else 0))


def linear_attention_macs(text: Any) -> int:
    """Of a token in a layer of linear attention, in chunks of 64 tokens: two products of keys and one of values within
    a chunk, three with the state, and two triangular systems."""
    key_dim = text.linear_key_head_dim
    value_dim = text.linear_value_head_dim
    n_values = text.linear_num_value_heads
    keys = text.linear_num_key_heads * key_dim
    values = n_values * value_dim
    projections = text.hidden_size * (2 * keys + 3 * values + 2 * n_values)
    convolution = (2 * keys + values) * text.linear_conv_kernel_dim
    chunk = 64 * (2 * key_dim + value_dim) + 32 * (key_dim + value_dim)
    return projections + convolution + n_values * (3 * key_dim * value_dim + chunk)


def group_flops(
    rates: "FlopCosts", prompt_tokens: int, image_patches: list[int], response_lengths: list[int], trained_tokens: int
) -> float:
    """Forward FLOPs of a prompt with its images, counted once, and of its responses. `prompt_tokens` include the image
    tokens; a response attends to the prompt and itself; the head runs on `trained_tokens` of them all. One sequence of
    n tokens is a prompt of n tokens without responses.

    Windows are taken as full, so images whose sides are not whole windows count slightly too much.
    """
    pairs = prompt_tokens * (prompt_tokens + 1) / 2
    pairs += sum(n * prompt_tokens + n * (n + 1) / 2 for n in response_lengths)
    text = rates.token * (prompt_tokens + sum(response_lengths)) + rates.pair * pairs
    vision = 0.0
    for n in image_patches:
        vision += n * (rates.patch + rates.image_pair * n + rates.window_pair * min(n, rates.window))
    return text + rates.trained_token * trained_tokens + vision
