"""The algorithm: advantages, loss and packing, as pure functions. No model, no I/O, no process group.

Axes: P prompts of a step, G samples per prompt, T packed tokens of a micro-batch, K scored tokens (the ones the policy
produced).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# ----------------------------------------------------------------------------------------------------------------------
# Advantages


def group_advantages(rewards_PG: torch.Tensor, method: str = "grpo") -> torch.Tensor:
    """Advantage of each sample against the other samples of its prompt; (P, G) in, (P, G) float64 out.

    grpo      (r - mean) / (std + 1e-6), std with Bessel's correction     DeepSeekMath, arXiv:2402.03300, section 4.1
    dr_grpo   r - mean                                                    arXiv:2503.20783, section 3.2
    rloo      r - mean of the other G - 1                                 arXiv:2402.14740, equation 8

    A group whose rewards are all equal gets exactly 0. That is decided by comparing the rewards, because
    r - mean(r) of equal floats need not be 0 and dividing by a tiny std would blow it up.
    """
    if rewards_PG.ndim != 2:
        raise ValueError(f"group_advantages: rewards must be (P, G), got shape {tuple(rewards_PG.shape)}")
    n_samples = rewards_PG.shape[1]
    if n_samples < 2:
        raise ValueError(f"group_advantages: method {method!r} compares samples of one prompt, got G={n_samples}; use >= 2")
    if not torch.isfinite(rewards_PG).all():
        p, g = (~torch.isfinite(rewards_PG)).nonzero()[0].tolist()
        raise ValueError(f"group_advantages: reward of prompt {p}, sample {g} is {rewards_PG[p, g].item()}")
    r = rewards_PG.double()
    centred = r - r.mean(dim=1, keepdim=True)
    if method == "grpo":
        advantages = centred / (r.std(dim=1, keepdim=True) + 1e-6)
    elif method == "dr_grpo":
        advantages = centred
    elif method == "rloo":
        advantages = centred * (n_samples / (n_samples - 1))
    else:
        raise ValueError(f"group_advantages: unknown method {method!r}; known: {', '.join(ADVANTAGES)}")
    constant = r.amax(dim=1, keepdim=True) == r.amin(dim=1, keepdim=True)
    return advantages.masked_fill(constant, 0.0)


ADVANTAGES = ("grpo", "dr_grpo", "rloo")

# ----------------------------------------------------------------------------------------------------------------------
# Loss


def policy_loss(
    logp_K: torch.Tensor,
    old_logp_K: torch.Tensor,
    advantage_K: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate of each token: -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A).   PPO, arXiv:1707.06347

    Unequal bounds are DAPO's clip-higher (arXiv:2503.14476). With `dual_clip` c > 1 the loss of a token with A < 0 is
    at most -c * A (arXiv:1912.09729). All (K,); returns loss_K and per-token indicators "clipped" and "kl" (the k3
    estimate of KL(old || new), >= 0).
    """
    log_ratio = logp_K - old_logp_K
    ratio = log_ratio.exp()
    unclipped = -advantage_K * ratio
    clipped = -advantage_K * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss_K = torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        loss_K = torch.where(advantage_K < 0, torch.minimum(loss_K, -dual_clip * advantage_K), loss_K)
    with torch.no_grad():
        indicators = {"clipped": (clipped > unclipped).float(), "kl": ratio - 1 - log_ratio}
    return loss_K, indicators


LOSS_AGGREGATIONS = ("token", "seq", "const")


def token_weight(how: str, n_tokens: int, global_tokens: int, global_sequences: int, constant: int) -> float:
    """Weight of each scored token of a sequence with `n_tokens` of them, so that the loss is a plain weighted sum.

    token  1 / all tokens of the optimizer step              every token counts alike (DAPO)
    seq    1 / (sequences * tokens of this sequence)         every sequence counts alike (GRPO)
    const  1 / (sequences * constant)                        no length bias (Dr. GRPO); constant = --max-new-tokens

    The totals are over all ranks and micro-batches and known before the first backward, so neither the split into
    micro-batches nor the number of ranks changes the loss.
    """
    if how == "token":
        return 1.0 / global_tokens
    if how == "seq":
        return 1.0 / (global_sequences * n_tokens)
    if how == "const":
        return 1.0 / (global_sequences * constant)
    raise ValueError(f"--loss-agg {how!r}: known are {', '.join(LOSS_AGGREGATIONS)}")


# ----------------------------------------------------------------------------------------------------------------------
# Packing: a micro-batch is a forest


@dataclass(eq=False)
class Sample:
    """One sequence with what the loss needs. `scored[t]` says whether the policy produced tokens[t]; each entry of
    `values` has one number per scored token, e.g. advantage, weight, old_logp. Samples of one uid share their common
    beginning: the prompt with its pictures, earlier turns, and whatever else they happen to have in common."""

    uid: str
    tokens: Sequence[int]
    scored: Sequence[bool]
    values: dict[str, Sequence[float]]
    images: Sequence[Any] = ()  # in the order of their tokens; each has `key` and `n_tokens`

    def __post_init__(self):
        last = max((t for t, s in enumerate(self.scored) if s), default=0)
        assert last > 0, f"sample of {self.uid!r}: no token after its first is scored; leave it out"
        # The last scored token is a target and never an input, and what follows it predicts nothing.
        self.n_inputs = last


@dataclass(eq=False)
class Micro:
    """A packed micro-batch: T tokens of a forest, laid out depth first.

    A token sees itself and its ancestors. Depth first, the descendants of the token at k are positions k+1 to
    end_T[k]-1, so query q sees key k exactly if k <= q < end_T[k]: one integer per token holds the whole mask. Scored
    token j has id target_K[j] and is predicted by the hidden state at src_K[j].
    """

    ids_T: torch.Tensor  # (T,) int64
    end_T: torch.Tensor  # (T,) int64
    runs: list[tuple[int, int]]  # unbroken stretches: (first position, position of the token before it, -1 at a root)
    images: list[Any]  # in the order of their tokens in ids_T
    src_K: torch.Tensor  # (K,) int64, position in T
    target_K: torch.Tensor  # (K,) int64, token ids
    values: dict[str, torch.Tensor]  # each (K,) float32

    @property
    def n_tokens(self) -> int:
        return self.ids_T.shape[0]

    def to(self, device: torch.device) -> "Micro":
        values = {name: value.to(device) for name, value in self.values.items()}
        ids, end, src, target = (t.to(device) for t in (self.ids_T, self.end_T, self.src_K, self.target_K))
        return Micro(ids, end, self.runs, self.images, src, target, values)


def dense_mask(end_T: torch.Tensor) -> torch.Tensor:
    """The attention mask of a forest, (T, T) bool, [query, key]."""
    position_T = torch.arange(len(end_T), device=end_T.device)
    return (position_T[None, :] <= position_T[:, None]) & (position_T[:, None] < end_T[None, :])


def _identities(samples: Sequence[Sample], image_token: int) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Inputs with each image token replaced by a negative number for its picture, so that samples share a token only if
    all before it is the same, pictures included; and where in them the pictures start."""
    number: dict[str, int] = {}
    identities, starts = [], []
    for s in samples:
        tokens = list(s.tokens[: s.n_inputs])
        at, begins = 0, []
        for image in s.images:
            n = image.n_tokens
            at = tokens.index(image_token, at) if image_token in tokens[at:] else len(tokens)
            if tokens[at : at + n] != [image_token] * n:
                raise ValueError(f"sample of {s.uid!r}: picture {len(begins)} needs {n} image tokens at token {at} of {len(tokens)}, "
                                 f"found {tokens[at : at + n].count(image_token)}; prompt and pictures disagree")
            tokens[at : at + n] = [-1 - number.setdefault(image.key, len(number))] * n
            begins.append(at)
            at += n
        if image_token in tokens:
            raise ValueError(f"sample of {s.uid!r}: token {tokens.index(image_token)} of {len(tokens)} is an image token that none of "
                             f"its {len(s.images)} pictures accounts for; was a placeholder sampled?")
        identities.append(tuple(tokens))
        starts.append(begins)
    return identities, starts


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning, by bisection: slices compare at C speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def plant(samples: Sequence[Sample], image_token: int) -> Micro:
    """Lay samples out as one Micro, each token that several samples of a uid share only once.

    Sorted, a sample shares with all before it just what it shares with the last one, so the trie needs no nodes: the
    tokens beyond the common beginning are appended, the others are where the last sample has them.
    """
    identities, starts = _identities(samples, image_token)
    ids: list[int] = []
    end: list[int] = []
    runs, images, src, target = [], [], [], []
    values: dict[str, list[float]] = {}
    path: list[int] = []  # positions of the last sample's inputs
    last = -1
    for i in sorted(range(len(samples)), key=lambda i: (samples[i].uid, identities[i])):
        sample, tokens = samples[i], identities[i]
        shared = _common(identities[last], tokens) if last >= 0 and samples[last].uid == sample.uid else 0
        for position in path[shared:]:  # what is not shared ends here
            end[position] = len(ids)
        if shared < len(tokens):
            runs.append((len(ids), path[shared - 1] if shared else -1))
            images.extend(image for image, start in zip(sample.images, starts[i], strict=True) if start >= shared)
        path = path[:shared] + list(range(len(ids), len(ids) + len(tokens) - shared))
        ids.extend(sample.tokens[shared : len(tokens)])
        end.extend([0] * (len(tokens) - shared))
        for t, scored in enumerate(sample.scored):
            if scored:
                src.append(path[t - 1])
                target.append(sample.tokens[t])
        for name, column in sample.values.items():
            values.setdefault(name, []).extend(column)
        last = i
    for position in path:
        end[position] = len(ids)
    ids_T, end_T, src_K, target_K = (torch.tensor(x, dtype=torch.long) for x in (ids, end, src, target))
    return Micro(ids_T, end_T, runs, images, src_K, target_K, {k: torch.tensor(v, dtype=torch.float32) for k, v in values.items()})


def split_tree(samples: Sequence[Sample], max_tokens: int, image_token: int) -> list[tuple[list[Sample], int]]:
    """Samples of one uid as trees of at most max_tokens tokens, with their sizes; a tree over the budget is cut into
    trees that repeat what they share, never into a sample."""
    identities, _ = _identities(samples, image_token)
    parts: list[tuple[list[Sample], int]] = []
    last: tuple[int, ...] = ()
    for i in sorted(range(len(samples)), key=lambda i: identities[i]):
        tokens = identities[i]
        if len(tokens) > max_tokens:
            prompt = samples[i].scored.index(True)
            raise ValueError(
                f"prompt {samples[i].uid!r} of {prompt} tokens with a response of {len(samples[i].tokens) - prompt} needs {len(tokens)} "
                f"tokens, over --micro-tokens {max_tokens}; raise that, or lower --max-prompt-tokens or --max-new-tokens"
            )
        new = len(tokens) - _common(last, tokens)
        if parts and parts[-1][1] + new <= max_tokens:
            parts[-1] = (parts[-1][0] + [samples[i]], parts[-1][1] + new)
        else:
            parts.append(([samples[i]], len(tokens)))
        last = tokens
    return parts


def pack(samples: Sequence[Sample], max_tokens: int, image_token: int) -> list[Micro]:
    """Samples to micro-batches of at most max_tokens tokens: a tree per uid, best-fit decreasing. Every sample lands in
    exactly one. ValueError for a sample that cannot fit alone, and for pictures that disagree with their tokens."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.uid, []).append(sample)
    parts = [part for group in groups.values() for part in split_tree(group, max_tokens, image_token)]
    bins: list[list[Sample]] = []
    rooms: list[int] = []
    for part, size in sorted(parts, key=lambda p: -p[1]):
        fitting = [i for i, room in enumerate(rooms) if room >= size]
        best = min(fitting, key=lambda i: rooms[i], default=len(bins))
        if best == len(bins):
            bins.append([])
            rooms.append(max_tokens)
        bins[best].extend(part)
        rooms[best] -= size
    return [plant(b, image_token) for b in bins]
