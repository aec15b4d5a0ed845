"""The algorithm: advantages, loss and packing, as pure functions. No model, no I/O, no process group.

Axes: P prompts of a step, G samples per prompt, S sequences, T packed tokens of a micro-batch, N nodes of its forest,
K scored tokens (the ones the policy produced).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass
class Branch:
    """One response below a shared prompt. `tokens` continue the prompt; `scored[i]` says whether the policy made
    tokens[i]; `values` hold what the loss needs per scored token (equal lengths), e.g. advantage, weight, old_logp."""

    tokens: Sequence[int]
    scored: Sequence[bool]
    values: dict[str, Sequence[float]]
    images: Sequence[Any] = ()

    def __post_init__(self):
        last = max((i for i, s in enumerate(self.scored) if s), default=-1)
        assert last >= 0, "a branch without a scored token has no loss; leave it out"
        # The last scored token is a target and never an input, and what follows it predicts nothing:
        # neither has to be computed.
        self.inputs = list(self.tokens[:last])
        self.last = last


@dataclass
class Tree:
    """One prompt with its images, and its responses."""

    uid: str
    prompt: Sequence[int]
    images: Sequence[Any]
    branches: list[Branch]

    @property
    def size(self) -> int:
        return len(self.prompt) + sum(len(b.inputs) for b in self.branches)


@dataclass
class Micro:
    """A packed micro-batch: T tokens in N nodes. A token attends to the earlier tokens of its own node and to all of
    its ancestors' nodes. Scored token k has id target_K[k] and is predicted by the hidden state at src_K[k]."""

    ids_T: torch.Tensor  # (T,) int64
    node_T: torch.Tensor  # (T,) int64, index of the token's node
    parent_N: list[int]  # parent node, -1 for a root; parents come before their children
    images: list[Any]  # in the order of their tokens
    src_K: torch.Tensor  # (K,) int64, position in T
    target_K: torch.Tensor  # (K,) int64, token ids
    values: dict[str, torch.Tensor] = field(default_factory=dict)  # each (K,) float32

    @property
    def n_tokens(self) -> int:
        return self.ids_T.shape[0]

    def ancestors(self) -> torch.Tensor:
        """(N, N) bool: [i, j] is True when node j is node i or above it."""
        n = len(self.parent_N)
        above = torch.eye(n, dtype=torch.bool)
        for i, parent in enumerate(self.parent_N):
            if parent >= 0:
                above[i] |= above[parent]
        return above

    def mask_TT(self) -> torch.Tensor:
        """The dense attention mask, (T, T) bool, [query, key]."""
        node_T = self.node_T
        causal = torch.ones(self.n_tokens, self.n_tokens, dtype=torch.bool, device=node_T.device).tril_()
        return causal.logical_and_(self.ancestors().to(node_T.device)[node_T][:, node_T])

    def to(self, device: torch.device) -> "Micro":
        moved = {k: v.to(device) for k, v in self.values.items()}
        return Micro(self.ids_T.to(device), self.node_T.to(device), self.parent_N, self.images,
                     self.src_K.to(device), self.target_K.to(device), moved)


def plant(trees: Sequence[Tree]) -> Micro:
    """Lay trees out as one Micro: each prompt, then its branches, in order."""
    ids, node, parent, images, src, target = [], [], [], [], [], []
    values: dict[str, list[float]] = {}
    for tree in trees:
        trunk = len(parent)
        trunk_end = len(ids) + len(tree.prompt) - 1
        parent.append(-1)
        ids.extend(tree.prompt)
        node.extend([trunk] * len(tree.prompt))
        images.extend(tree.images)
        for branch in tree.branches:
            start = len(ids)
            if branch.inputs:
                node.extend([len(parent)] * len(branch.inputs))
                parent.append(trunk)
                ids.extend(branch.inputs)
                images.extend(branch.images)
            for i in range(branch.last + 1):
                if branch.scored[i]:
                    src.append(trunk_end if i == 0 else start + i - 1)
                    target.append(branch.tokens[i])
            for key, column in branch.values.items():
                values.setdefault(key, []).extend(column)
    long = torch.long
    return Micro(torch.tensor(ids, dtype=long), torch.tensor(node, dtype=long), parent, images,
                 torch.tensor(src, dtype=long), torch.tensor(target, dtype=long),
                 {k: torch.tensor(v, dtype=torch.float32) for k, v in values.items()})


def split_tree(tree: Tree, max_tokens: int) -> list[Tree]:
    """Cut a tree that exceeds the budget into trees with the same trunk, each within it."""
    parts, room = [], 0
    for branch in sorted(tree.branches, key=lambda b: -len(b.inputs)):
        need = len(branch.inputs)
        if len(tree.prompt) + need > max_tokens:
            raise ValueError(
                f"prompt {tree.uid!r} with {len(tree.prompt)} tokens and a response of {need} need "
                f"{len(tree.prompt) + need} tokens, over --micro-tokens {max_tokens}; raise --micro-tokens or lower "
                f"--max-prompt-tokens or --max-new-tokens"
            )
        if not parts or need > room:
            parts.append(Tree(tree.uid, tree.prompt, tree.images, []))
            room = max_tokens - len(tree.prompt)
        parts[-1].branches.append(branch)
        room -= need
    return parts


def pack(trees: Sequence[Tree], max_tokens: int) -> list[Micro]:
    """Trees to micro-batches of at most `max_tokens` tokens each: best-fit decreasing. Every branch lands in exactly
    one micro-batch. Raises ValueError for a prompt with a response that cannot fit alone."""
    pieces = [part for tree in trees if tree.branches for part in split_tree(tree, max_tokens)]
    bins: list[list[Tree]] = []
    rooms: list[int] = []
    for piece in sorted(pieces, key=lambda t: -t.size):
        fitting = [i for i, room in enumerate(rooms) if room >= piece.size]
        if fitting:
            best = min(fitting, key=lambda i: rooms[i])
        else:
            best = len(bins)
            bins.append([])
            rooms.append(max_tokens)
        bins[best].append(piece)
        rooms[best] -= piece.size
    return [plant(b) for b in bins]
