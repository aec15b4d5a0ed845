"""The algorithms: advantages, losses and packing, as pure functions. No model, no I/O, no process group.

Axes: P prompts of a step, G samples per prompt, T packed tokens of a micro-batch, K scored tokens (the ones the policy
produced).
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
import torch

from errors import UserError

# ----------------------------------------------------------------------------------------------------------------------
# Advantages

GROUP_METHODS = ("grpo", "dr_grpo", "rloo")  # compare the samples of one prompt, so they need two
ADVANTAGES = (*GROUP_METHODS, "reinforce++", "gae")
NORM_STD = {"grpo": "group", "dr_grpo": "none", "rloo": "none", "reinforce++": "batch", "gae": "batch"}  # as published


def group_advantages(
    rewards_PG: torch.Tensor, method: str = "grpo", norm_std: str | None = None, moments: tuple[float, float] | None = None
) -> torch.Tensor:
    """Advantage of each sample from the rewards alone; (P, G) in, (P, G) float64 out.

    grpo          (r - mean) / (std + 1e-6), std with Bessel's correction     DeepSeekMath, arXiv:2402.03300, section 4.1
    dr_grpo       r - mean                                                    arXiv:2503.20783, section 3.2
    rloo          r - mean of the other G - 1                                 arXiv:2402.14740, equation 8
    reinforce++   (r - batch mean) / batch std; no group needed               arXiv:2501.03262, section 3

    `norm_std` overrides what the difference is divided by: the group's std of rewards ("group"), the std of the
    differences of all samples of the step ("batch": with method grpo this is REINFORCE++ with baseline), or nothing
    ("none"). `moments` are the (mean, std) of the differences over all ranks, where this one holds only a part.

    A group whose rewards are all equal gets exactly 0 from a group method. That is decided by comparing the rewards,
    because r - mean(r) of equal floats need not be 0 and dividing by a tiny std would blow it up.
    """
    if rewards_PG.ndim != 2:
        raise ValueError(f"group_advantages: rewards must be (P, G), got shape {tuple(rewards_PG.shape)}")
    if method not in (*GROUP_METHODS, "reinforce++"):
        raise ValueError(f"group_advantages: unknown method {method!r}; known: {', '.join((*GROUP_METHODS, 'reinforce++'))}")
    n_samples, by_group = rewards_PG.shape[1], method in GROUP_METHODS
    if by_group and n_samples < 2:
        raise ValueError(f"group_advantages: method {method!r} compares samples of one prompt, got G={n_samples}; use >= 2")
    if not torch.isfinite(rewards_PG).all():
        p, g = (~torch.isfinite(rewards_PG)).nonzero()[0].tolist()
        raise ValueError(f"group_advantages: reward of prompt {p}, sample {g} is {rewards_PG[p, g].item()}")
    norm_std = NORM_STD[method] if norm_std is None else norm_std
    r = rewards_PG.double()
    difference = r - r.mean(dim=1, keepdim=True) if by_group else r
    if method == "rloo":
        difference = difference * (n_samples / (n_samples - 1))
    if norm_std == "group":
        difference = difference / (r.std(dim=1, keepdim=True) + 1e-6)
    elif norm_std == "batch":
        mean, std = (difference.mean().item(), difference.std().item()) if moments is None else moments
        # A group method's differences have mean 0 as they are; subtracting its rounding error would give constant groups one
        difference = whiten(difference, 0.0 if by_group else mean, std)
    elif norm_std != "none":
        raise ValueError(f"group_advantages: unknown norm_std {norm_std!r}; known: group, batch, none")
    if by_group:
        difference = difference.masked_fill(r.amax(dim=1, keepdim=True) == r.amin(dim=1, keepdim=True), 0.0)
    return difference


def whiten(x: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    """(x - mean) / std; all zero where std is no more than the rounding of the mean: nothing differs, so nothing is learnt."""
    if not std > 1e-9 * max(1.0, abs(mean)):
        return torch.zeros_like(x)
    return (x - mean) / std


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates and returns of tokens; all (..., T), float64 out.      arXiv:1506.02438, equation 16

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = sum_l (gamma lam)^l delta_{t+l},   return_t = A_t + V_t

    rewards[t] is what token t earned, values[t] the expectation before it. Tokens outside the mask (padding, what an
    environment wrote) are passed over: the token before them continues at the next one in the mask. They get 0. After
    the last token comes nothing: V = 0. With values 0 and lam 1 these are plain discounted rewards-to-go.
    """
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(f"gae: rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask {tuple(mask.shape)} must agree")
    rewards, values, mask = rewards.double(), values.double(), mask.bool()
    advantages = torch.zeros_like(values)
    next_value, next_advantage = (torch.zeros_like(values[..., 0]) for _ in range(2))
    for t in reversed(range(rewards.shape[-1])):
        delta = rewards[..., t] + gamma * next_value - values[..., t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[..., t], advantage, next_advantage)
        next_value = torch.where(mask[..., t], values[..., t], next_value)
        advantages[..., t] = torch.where(mask[..., t], advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft penalty of a long response, in [-1, 0]: 0 up to max_length - buffer tokens, then linearly down to -1 at
    max_length.                                                                             arXiv:2503.14476, equation 13
    """
    return min(0.0, max(-1.0, (max_length - buffer - length) / buffer))


# ----------------------------------------------------------------------------------------------------------------------
# Distance to a reference policy

KL_KINDS = ("k1", "k2", "k3", "abs")


def kl(logp: torch.Tensor, ref_logp: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate of KL(policy || reference) from each sampled token; any shape.     Schulman 2020, joschu.net/blog/kl-approx.html

    With d = logp - ref_logp:   k1  d     k2  d^2 / 2     k3  exp(-d) - 1 + d     abs  |d|

    k1 and k3 are unbiased as values, k3 is never negative and varies less. As a term of the loss it is the gradient that
    counts: k2's is unbiased on policy, k3's is GRPO's choice, k1's is 0 on average, so k1 belongs into the reward.
    """
    d = logp - ref_logp
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    if kind == "k3":
        return (-d).exp() - 1 + d
    if kind == "abs":
        return d.abs()
    raise ValueError(f"kl: unknown kind {kind!r}; known: {', '.join(KL_KINDS)}")


def adapt_kl(coef: float, measured: float, target: float, samples: int, horizon: float) -> float:
    """The KL coefficient after a step of so many samples, moved towards the one that keeps the KL at its target:
    coef * (1 + clip(measured / target - 1, -0.2, 0.2) * samples / horizon).                arXiv:1909.08593, section 2.2
    """
    error = min(0.2, max(-0.2, measured / target - 1))
    return coef * (1 + error * samples / horizon)


# ----------------------------------------------------------------------------------------------------------------------
# Loss

LOSSES = ("clip", "gspo", "cispo", "sapo", "reinforce")


def policy_loss(
    logp_K: torch.Tensor,
    old_logp_K: torch.Tensor,
    advantage_K: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kind: str = "clip",
    sequence_K: torch.Tensor | None = None,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of each token, all (K,), with ratio = exp(logp - old_logp) and sg = no gradient:

    clip        -min(ratio A, clip(ratio, 1 - low, 1 + high) A)       PPO, arXiv:1707.06347, eq. 7; unequal bounds are DAPO's
                                                                      clip-higher, arXiv:2503.14476, eq. 10
    gspo        the same with one ratio for a whole response, exp(mean of its logp - old_logp)   arXiv:2507.18071, eq. 5 and 7
    cispo       -sg(clip(ratio, 1 - low, 1 + high)) A logp            MiniMax-M1, arXiv:2506.13585, eq. 4 and 5; low 1 = no bound
    sapo        -(4 / tau) sigmoid(tau (ratio - 1)) A                 arXiv:2511.20347, section 3; tau_positive where A > 0
    reinforce   -A logp                                               Williams 1992; right on policy only

    With `dual_clip` c > 1 the loss of a clip or gspo token with A < 0 is at most -c A (arXiv:1912.09729). gspo needs
    `sequence_K`, integers that tell neighbouring responses apart. Returns loss_K and per-token indicators "clipped" and
    "kl" (the k3 estimate of KL(old || new), >= 0).
    """
    log_ratio = logp_K - old_logp_K
    ratio = log_ratio.exp()
    with torch.no_grad():
        indicators = {"clipped": torch.zeros_like(ratio), "kl": ratio - 1 - log_ratio}
    if kind == "gspo":
        assert sequence_K is not None, "gspo needs to know which tokens make a response"
        _, index_K, count = sequence_K.unique_consecutive(return_inverse=True, return_counts=True)
        ratio = (torch.zeros_like(log_ratio[: len(count)]).index_add(0, index_K, log_ratio) / count).exp()[index_K]
    if kind in ("clip", "gspo"):
        unclipped = -advantage_K * ratio
        clipped = -advantage_K * ratio.clamp(1 - clip_low, 1 + clip_high)
        loss_K = torch.maximum(unclipped, clipped)
        if dual_clip is not None:
            loss_K = torch.where(advantage_K < 0, torch.minimum(loss_K, -dual_clip * advantage_K), loss_K)
        indicators["clipped"] = (clipped > unclipped).to(ratio.dtype)
    elif kind == "cispo":
        weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
        loss_K = -weight * advantage_K * logp_K
        indicators["clipped"] = (weight != ratio).to(ratio.dtype)
    elif kind == "sapo":
        tau = torch.full_like(advantage_K, tau_negative).masked_fill(advantage_K > 0, tau_positive)
        loss_K = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage_K
    elif kind == "reinforce":
        loss_K = -advantage_K * logp_K
    else:
        raise ValueError(f"policy_loss: unknown kind {kind!r}; known: {', '.join(LOSSES)}")
    return loss_K, indicators


def importance_weight(trainer_logp_K: torch.Tensor, engine_logp_K: torch.Tensor, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight of a token that was sampled from the engine's distribution and is trained on under the trainer's: the ratio of
    the two, truncated at `cap`. Returns weight_K, without gradient, and capped_K bool.

    Engine and trainer round differently, so even "on-policy" samples come from a slightly different policy. The cap bounds
    the variance, at the price of a bias on the few tokens that it meets.     Ionides 2008, Truncated importance sampling
    """
    ratio = (trainer_logp_K - engine_logp_K).detach().exp()
    return ratio.clamp(max=cap), ratio > cap


def keep_sequences(
    trainer_logp_K: torch.Tensor, engine_logp_K: torch.Tensor, sequence_K: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """keep_K bool: does the geometric mean of trainer / engine over the token's sequence lie in [low, high]? sequence_K
    numbers the sequences. One garbled sequence (an engine's fault, say) would otherwise move the whole update."""
    _, index_K = sequence_K.unique(return_inverse=True)
    gap_K = (trainer_logp_K - engine_logp_K).detach().double()
    n = int(index_K.max()) + 1 if len(index_K) else 0
    total = gap_K.new_zeros(n).index_add_(0, index_K, gap_K)
    count = gap_K.new_zeros(n).index_add_(0, index_K, torch.ones_like(gap_K))
    mean = (total / count).exp()
    return ((mean >= low) & (mean <= high))[index_K]


@dataclass(frozen=True)
class PolicyLoss:
    """What the update minimises, as the policy head evaluates it: block by block, where log-probabilities are at hand.

    weight (tis policy_loss + kl_coef kl(logp, ref_logp) - entropy_coef entropy)

    Called with logp_K and entropy_K of scored tokens and `values`, each (K,): advantage and weight; old_logp unless the
    data is on policy, where the old policy is the current one; ref_logp with a `kl`; engine_logp with tis_cap, which caps
    the weight tis (see importance_weight), and tis_mask, outside of which sequences do not count (see keep_sequences);
    trainer_logp, what these two compare with the engine, if that is not old_logp (dropout is on in the update only);
    sequence. Returns the weighted loss of each token, whose plain sum is the loss, and indicators: policy_loss's, "capped"
    and "kept". `per_token`: no token's loss depends on another token, so blocks may end anywhere; otherwise they hold whole
    sequences, told apart by values["sequence"].
    """

    kind: str = "clip"  # one of LOSSES
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: str | None = None  # one of KL_KINDS: the estimate of the KL term in the loss
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    tis_cap: float | None = None
    tis_mask: tuple[float, float] | None = None

    @property
    def per_token(self) -> bool:
        return self.kind != "gspo" and self.tis_mask is None

    def __call__(
        self, logp_K: torch.Tensor, entropy_K: torch.Tensor, values: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        old_logp_K, weight_K = values.get("old_logp", logp_K.detach()), values["weight"]
        loss_K, indicators = policy_loss(
            logp_K, old_logp_K, values["advantage"], self.clip_low, self.clip_high, self.dual_clip,
            self.kind, values.get("sequence"), self.sapo_tau_positive, self.sapo_tau_negative,
        )
        trainer_logp_K = values.get("trainer_logp", old_logp_K)
        if self.tis_cap is not None:
            tis_K, indicators["capped"] = importance_weight(trainer_logp_K, values["engine_logp"], self.tis_cap)
            loss_K = loss_K * tis_K
        if self.tis_mask is not None:
            indicators["kept"] = keep_sequences(trainer_logp_K, values["engine_logp"], values["sequence"], *self.tis_mask)
            weight_K = weight_K * indicators["kept"]
        if self.kl is not None:
            loss_K = loss_K + self.kl_coef * kl(logp_K, values["ref_logp"], self.kl)
        if self.entropy_coef:
            loss_K = loss_K - self.entropy_coef * entropy_K
        return weight_K * loss_K, indicators


def value_loss(
    value_K: torch.Tensor, old_value_K: torch.Tensor, return_K: torch.Tensor, clip: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of each value; with `clip` the larger of that and of the value kept within `clip` of its old
    one. All (K,); returns loss_K and which tokens were clipped.        OpenAI baselines' ppo2; see arXiv:2005.12729, section 3
    """
    loss_K = (value_K - return_K) ** 2
    if clip is None:
        return loss_K / 2, torch.zeros_like(value_K)
    near_K = old_value_K + (value_K - old_value_K).clamp(-clip, clip)
    clipped_K = (near_K - return_K) ** 2
    return torch.maximum(loss_K, clipped_K) / 2, (clipped_K > loss_K).to(value_K.dtype).detach()


# ----------------------------------------------------------------------------------------------------------------------
# Algorithms: names for settings of train.py's knobs

GRPO: dict[str, Any] = {
    "adv": "grpo", "norm_std": None, "loss": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "loss_agg": "token",
    "truncated": "keep", "sample_rounds": 1, "kl": "k3", "kl_in": "loss", "kl_coef": 0.0, "entropy_coef": 0.0,
    "epochs": 1, "minibatches": 1,
}
PRESETS: dict[str, dict[str, Any]] = {  # what differs from grpo
    "grpo": {},
    "dr_grpo": {"adv": "dr_grpo", "loss_agg": "const"},
    "dapo": {"clip_high": 0.28, "sample_rounds": 10, "truncated": "penalise"},
    "gspo": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "loss_agg": "seq"},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},  # ratios up to 5, as in ScaleRL, arXiv:2510.13786
    "sapo": {"loss": "sapo", "loss_agg": "seq"},
    "rloo": {"adv": "rloo", "loss": "reinforce", "loss_agg": "const"},
    "reinforce++": {"adv": "reinforce++", "kl": "k1", "kl_in": "reward", "kl_coef": 1e-3},  # the coefficient is our choice
    "ppo": {"adv": "gae", "epochs": 4, "entropy_coef": 0.01},
}


def resolve_preset(algo: str, given: dict[str, Any]) -> dict[str, Any]:
    """All knobs of an algorithm: the one given if it is not None, else the preset's, else GRPO's."""
    knobs = {name: default if given.get(name) is None else given[name] for name, default in (GRPO | PRESETS[algo]).items()}
    if knobs["norm_std"] is None:
        knobs["norm_std"] = NORM_STD[knobs["adv"]]
    return knobs


# ----------------------------------------------------------------------------------------------------------------------
# What a token weighs

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
    raise UserError(f"--loss-agg {how!r}: known are {', '.join(LOSS_AGGREGATIONS)}")


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
    images: Sequence[Any] = ()  # in the order of their tokens; each has `key` and `n_tokens` (and `grid_thw`, see pack)

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
    values: dict[str, torch.Tensor]  # each (K,) float32; "sequence" (K,) int64 numbers the samples, ascending
    samples: InitVar[Sequence[Sample]] = ()  # by that number; no field, because FSDP looks for tensors in all fields, at every forward

    def __post_init__(self, samples: Sequence[Sample]):
        self.samples = samples

    @property
    def n_tokens(self) -> int:
        return self.ids_T.shape[0]

    def put(self, name: str, column_K: torch.Tensor) -> None:
        """Add a column, and give each sample its part of it."""
        self.values[name] = column_K
        for sample, part in zip(self.samples, column_K.split([sum(s.scored) for s in self.samples]), strict=True):
            sample.values[name] = part.tolist()

    def take(self, name: str) -> None:
        """Add a column that the samples have been given."""
        self.values[name] = torch.tensor([x for sample in self.samples for x in sample.values[name]], dtype=torch.float32)

    def to(self, device: torch.device) -> "Micro":
        values = {name: value.to(device) for name, value in self.values.items()}
        ids, end, src, target = (t.to(device) for t in (self.ids_T, self.end_T, self.src_K, self.target_K))
        return Micro(ids, end, self.runs, self.images, src, target, values, self.samples)


def dense_mask(end_T: torch.Tensor) -> torch.Tensor:
    """The attention mask of a forest, (T, T) bool, [query, key]: the definition that the back ends are tested against."""
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
    sequence: list[int] = []
    path: list[int] = []  # positions of the last sample's inputs
    last = -1
    order = sorted(range(len(samples)), key=lambda i: (samples[i].uid, identities[i]))
    for n, i in enumerate(order):
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
                sequence.append(n)
        for name, column in sample.values.items():
            values.setdefault(name, []).extend(column)
        last = i
    for position in path:
        end[position] = len(ids)
    ids_T, end_T, src_K, target_K, sequence_K = (torch.tensor(x, dtype=torch.long) for x in (ids, end, src, target, sequence))
    columns = {name: torch.tensor(column, dtype=torch.float32) for name, column in values.items()}
    return Micro(ids_T, end_T, runs, images, src_K, target_K, columns | {"sequence": sequence_K}, [samples[i] for i in order])


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
            raise UserError(
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


def _cost_of_tree(tree: Sequence[Sample], rates: tuple[float, ...]) -> float:
    """FLOPs of a tree, its branches taken to part at the end of the prompt."""
    prompt = tree[0].scored.index(True)
    patches = [math.prod(image.grid_thw) for image in tree[0].images]
    return tree_flops(rates, prompt, patches, [s.n_inputs - prompt for s in tree], [sum(s.scored) for s in tree])


def pack(
    samples: Sequence[Sample], max_tokens: int, image_token: int, rates: tuple[float, ...] | None = None,
    count: Callable[[int], int] = lambda needed: needed,
) -> list[Micro]:
    """Samples to micro-batches of at most max_tokens tokens, a tree per uid. Every sample lands in exactly one.

    They are as few as best-fit decreasing needs, or `count(needed)` if that is more and there are trees enough: the
    largest number over all ranks, say. Balanced in FLOPs if `rates` (see flop_rates) are given, else in tokens.
    ValueError for a sample that cannot fit alone, and for pictures that disagree with their tokens.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.uid, []).append(sample)
    trees = [tree for group in groups.values() for tree in split_tree(group, max_tokens, image_token)]
    sizes = [size for _, size in trees]
    size_N, free_N = np.array(sizes, dtype=float), np.zeros(len(sizes))
    order, needed = np.argsort(-size_N, kind="stable"), 0
    while best_fit(order, free_N, needed, 0.0, size_N, max_tokens) is None:
        needed = max(needed + 1, -(-sum(sizes) // max_tokens))
    k = min(max(count(needed), needed), len(trees))
    costs = sizes if rates is None else [_cost_of_tree(tree, rates) for tree, _ in trees]
    bins = balance(costs, k, sizes=sizes, max_size=max_tokens) if k else []
    return [plant([sample for i in chosen for sample in trees[i][0]], image_token) for chosen in bins]


# ----------------------------------------------------------------------------------------------------------------------
# Balancing. N items, k bins; bin_N[i] is the bin of item i


def balance(
    costs: Sequence[float], k: int, cap: float | None = None, sizes: Sequence[int] | None = None, max_size: int | None = None
) -> list[list[int]]:
    """Partition the indices of `costs` into k bins so that the largest total cost is small. Every index is in one bin,
    a bin's indices ascend, and bins are empty only where there are fewer items than bins. Deterministic.

    `cap` bounds a bin's cost and `max_size` its total of `sizes` (say tokens, where costs are FLOPs). Neither is ever
    exceeded: ValueError for an item that exceeds one alone, and where no partition is found. The search is a heuristic,
    so within a few percent of the bounds it can miss one that exists.

    Longest first (Graham 1969), and multifit (Coffman, Garey and Johnson 1978) where bins are few items deep; then `refine`.
    """
    cost_N = np.asarray(costs, dtype=np.float64)
    size_N = np.zeros(len(cost_N)) if sizes is None else np.asarray(sizes, dtype=np.float64)
    if k < 1 or len(size_N) != len(cost_N) or (sizes is None) != (max_size is None):
        raise ValueError(f"balance: need k >= 1, and sizes for all {len(cost_N)} costs if and only if there is a max_size; got "
                         f"k={k}, {'no' if sizes is None else len(size_N)} sizes, max_size={max_size}")
    limit, room = math.inf if cap is None else cap, math.inf if max_size is None else max_size
    for what, x_N, most, name in (("cost", cost_N, limit, "cap"), ("size", size_N, room, "max_size")):
        for i in np.flatnonzero(~(np.isfinite(x_N) & (x_N >= 0))).tolist():
            raise ValueError(f"balance: {what} of item {i} is {x_N[i]:.12g}; it must be finite and >= 0")
        for i in np.flatnonzero(x_N > most).tolist():
            raise ValueError(f"balance: item {i} alone has {what} {x_N[i]:.12g}, over {name} {most:.12g}; raise {name} or leave it out")
    target = max(cost_N.max(initial=0.0), cost_N.sum() / k) * (1 + 1e-5)

    def top(x_N: np.ndarray, bin_N: np.ndarray) -> float:
        return np.bincount(bin_N, x_N, minlength=k).max()

    starts = (
        lambda: longest_first(cost_N, k, size_N, room),
        lambda: multifit(cost_N, k, size_N, room),
        # The rest only look for any partition within the bounds.
        lambda: refine(size_N, longest_first(size_N, k), k, target=room),
        lambda: best_fit(np.argsort(-size_N, kind="stable"), cost_N, k, limit, size_N, room),
    )
    best, best_top = None, math.inf
    for n, start in enumerate(starts):
        if best is not None and (best_top <= target or len(cost_N) > 6 * k or n > 1):
            break
        bin_N = start()
        if bin_N is not None and top(size_N, bin_N) <= room:
            bin_N = refine(cost_N, bin_N, k, target, size_N, room)
            if top(cost_N, bin_N) <= limit and top(cost_N, bin_N) < best_top:
                best, best_top = bin_N, top(cost_N, bin_N)
    if best is None:
        raise ValueError(f"balance: found no way to put {len(cost_N)} items of total cost {cost_N.sum():.12g} and size {size_N.sum():.12g} "
                         f"into {k} bins of cost <= {limit:.12g} and size <= {room:.12g}; use more bins or raise the bound")
    bins: list[list[int]] = [[] for _ in range(k)]
    for i, b in enumerate(best.tolist()):
        bins[b].append(i)
    # The search may leave a bin empty. An item alone is within every bound, and the bin that it leaves gets lighter.
    for empty in (b for b in bins if not b):
        rich = max((b for b in bins if len(b) > 1), key=lambda b: cost_N[b].sum(), default=None)
        if rich is None:  # fewer items than bins
            break
        empty.append(rich.pop(int(cost_N[rich].argmin())))
    return bins


def longest_first(cost_N: np.ndarray, k: int, size_N: np.ndarray | None = None, room: float = math.inf) -> np.ndarray | None:
    """The costliest item first, each to the least loaded bin that has room for it; None where none has."""
    bin_N, used, cost = np.empty(len(cost_N), dtype=np.int64), [0.0] * k, cost_N.tolist()
    size = [0.0] * len(cost) if size_N is None else size_N.tolist()
    heap = [(0.0, b) for b in range(k)]
    for i in np.argsort(-cost_N, kind="stable").tolist():
        full = []
        while heap and used[heap[0][1]] + size[i] > room:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, b = heap[0]
        heapq.heapreplace(heap, (load + cost[i], b))
        bin_N[i] = b
        used[b] += size[i]
        for entry in full:
            heapq.heappush(heap, entry)
    return bin_N


def best_fit(order: np.ndarray, cost_N: np.ndarray, k: int, cap: float, size_N: np.ndarray, room: float) -> np.ndarray | None:
    """Items in `order`, each to the bin that it fills best without exceeding `cap` or `room`; None where one fits nowhere."""
    bin_N, cost, size = np.empty(len(cost_N), dtype=np.int64), cost_N.tolist(), size_N.tolist()
    left = [(cap, room, b) for b in range(k)]  # ascending: what each bin has left
    for i in order.tolist():
        j = bisect_left(left, (cost[i],))
        while j < k and left[j][1] < size[i]:
            j += 1
        if j == k:
            return None
        cost_left, size_left, b = left.pop(j)
        insort(left, (cost_left - cost[i], size_left - size[i], b))
        bin_N[i] = b
    return bin_N


def multifit(cost_N: np.ndarray, k: int, size_N: np.ndarray, room: float, steps: int = 10) -> np.ndarray | None:
    """Bisect for the smallest cap at which best fit of the costliest first succeeds."""
    order, low = np.argsort(-cost_N, kind="stable"), max(cost_N.max(initial=0.0), cost_N.sum() / k)
    best, high = None, 2 * low  # without sizes, best fit succeeds at twice the lower bound
    for step in range(steps):
        cap = high if step == 0 else (low + high) / 2
        bin_N = best_fit(order, cost_N, k, cap, size_N, room)
        if bin_N is not None:
            best, high = bin_N, np.bincount(bin_N, cost_N, minlength=k).max()
        elif step == 0:
            break
        else:
            low = cap
    return best


def refine(
    cost_N: np.ndarray, bin_N: np.ndarray, k: int, target: float, size_N: np.ndarray | None = None, room: float = math.inf
) -> np.ndarray:
    """Lower the largest bin until it is at most `target`, or nothing helps any more, or the work is spent (tens of ms).

    A round pairs the heaviest bins with lighter ones. Each pair swaps the items whose difference comes closest to half
    of its gap, if that narrows it, all pairs at once. A bin is a row of cells, and some are empty: swapping with an empty
    cell is a move. First one cell against one, then, as long as bins are few cells deep, two against two.
    """
    count = np.bincount(bin_N, minlength=k)
    by_bin = np.argsort(bin_N, kind="stable")
    width = count.max(initial=0) + 2
    cells = np.full((k, width), len(cost_N))  # item of each cell; N: empty
    cells[bin_N[by_bin], np.arange(len(cost_N)) - np.repeat(count.cumsum() - count, count)] = by_bin
    cost = np.append(cost_N, 0.0)
    size = None if size_N is None or room == math.inf else np.append(size_N, 0.0)
    load = cost[cells].sum(1)
    work = 2 << 20
    for choice in (np.arange(width)[:, None], np.stack(np.triu_indices(width, 1), 1)):  # (C, 1), then (C, 2) columns
        pairs = min(k // 2, (1 << 16) // len(choice) ** 2)
        if len(choice) <= width:
            pairs = min(k // 2, max(pairs, 1))
        stale, best = 0, load.max(initial=0.0)
        while pairs and best > target and stale < 24 and work > 0:
            order = np.argsort(load, kind="stable")
            heavy = order[::-1][:pairs]
            light = np.roll(order[: k - pairs], -stale * pairs)[:pairs]
            half = (load[heavy] - load[light]) / 2
            miss = cost[cells[heavy]][:, choice].sum(2)[:, :, None] - cost[cells[light]][:, choice].sum(2)[:, None, :]
            miss -= half[:, None, None]
            np.abs(miss, out=miss)
            if size is not None:
                moved = size[cells[heavy]][:, choice].sum(2)[:, :, None] - size[cells[light]][:, choice].sum(2)[:, None, :]
                low, high = size[cells[heavy]].sum(1) - room, room - size[cells[light]].sum(1)
                miss[(moved < low[:, None, None]) | (moved > high[:, None, None])] = math.inf
            miss = miss.reshape(pairs, -1)
            pick = miss.argmin(1)
            good = miss[np.arange(pairs), pick] < half * (1 - 1e-9)
            heavy, light, pick = heavy[good], light[good], pick[good]
            give, take = choice[pick // len(choice)], choice[pick % len(choice)]
            given, taken = cells[heavy[:, None], give], cells[light[:, None], take]
            cells[heavy[:, None], give], cells[light[:, None], take] = taken, given
            load[heavy], load[light] = cost[cells[heavy]].sum(1), cost[cells[light]].sum(1)
            work -= miss.size
            stale = 0 if load.max() < best else stale + 1
            best = min(best, load.max())
    bin_N = np.empty_like(bin_N)
    rows, columns = np.nonzero(cells < len(cost_N))
    bin_N[cells[rows, columns]] = rows
    return bin_N


# ----------------------------------------------------------------------------------------------------------------------
# What a sequence costs: forward FLOPs, 2 per multiply-add


def _mlp_width(text: Any, layer: int) -> int:
    """Multiplications of a layer's MLP per token and unit of the hidden size: of a mixture, the router and the experts chosen."""
    experts = getattr(text, "num_experts", 0)
    if not experts or layer in (getattr(text, "mlp_only_layers", None) or ()) or (layer + 1) % getattr(text, "decoder_sparse_step", 1):
        return 3 * text.intermediate_size
    shared = getattr(text, "shared_expert_intermediate_size", 0)
    return experts + 3 * text.num_experts_per_tok * text.moe_intermediate_size + (3 * shared + 1 if shared else 0)


def flop_rates(config: Any) -> tuple[float, ...]:
    """FLOPs per language token, per attention pair of it, per scored token, per patch and per attention pair of the
    vision tower with its share of pictures seen whole; then that of windows, and the patches of a window.

    For transformers' configs of Qwen2-VL, Qwen2.5-VL (gated MLP, windows), Qwen3-VL (deepstack), Qwen3.5 (layers that
    recur) and their mixtures of experts, of which those count that a token passes. Norms, activations,
    rotary embeddings and softmax are left out: they multiply no matrices.
    """
    t, v = config.text_config, config.vision_config
    heads, kinds = t.num_attention_heads, getattr(t, "layer_types", None) or ["full_attention"] * t.num_hidden_layers
    head_dim = getattr(t, "head_dim", None) or t.hidden_size // heads
    recurrent = kinds.count("linear_attention")
    queries = 3 if hasattr(t, "linear_num_key_heads") else 2  # Qwen3.5 gates the heads' outputs
    matrices = (len(kinds) - recurrent) * t.hidden_size * head_dim * (queries * heads + 2 * t.num_key_value_heads)
    if recurrent:
        keys, values = t.linear_num_key_heads * t.linear_key_head_dim, t.linear_num_value_heads * t.linear_value_head_dim
        linear = t.hidden_size * (2 * keys + 3 * values + 2 * t.linear_num_value_heads) + (2 * keys + values) * t.linear_conv_kernel_dim
        # chunks of 64 tokens: two products of keys and one of values within, three with the matrix, and two triangular systems
        k, w = t.linear_key_head_dim, t.linear_value_head_dim
        matrices += recurrent * (linear + t.linear_num_value_heads * (3 * k * w + 64 * (2 * k + w) + 32 * (k + w)))
    for layer in range(len(kinds)):
        matrices += t.hidden_size * _mlp_width(t, layer)
    width = getattr(v, "embed_dim", v.hidden_size)  # Qwen2-VL alone calls its output hidden_size
    inner = v.intermediate_size if hasattr(v, "intermediate_size") else int(width * v.mlp_ratio)
    windows = hasattr(v, "fullatt_block_indexes")
    whole = len(set(v.fullatt_block_indexes)) if windows else v.depth
    block = 4 * width * width + (3 if windows else 2) * width * inner
    merged = width * v.spatial_merge_size**2
    mergers = 1 + len(getattr(v, "deepstack_visual_indexes", ()))
    merger = mergers * merged * (merged + getattr(v, "out_hidden_size", v.hidden_size)) / v.spatial_merge_size**2
    patch = v.in_channels * v.temporal_patch_size * v.patch_size**2 * width + v.depth * block + merger
    side = v.window_size // v.patch_size // v.spatial_merge_size * v.spatial_merge_size if windows else 0
    return (
        2.0 * matrices, 4.0 * (len(kinds) - recurrent) * heads * head_dim, 2.0 * t.hidden_size * t.vocab_size,
        2.0 * patch, 4.0 * whole * width, 4.0 * (v.depth - whole) * width, side**2,
    )


def tree_flops(
    config: Any, prompt_tokens: int, image_patches: Sequence[int], branches: Sequence[int], scored: Sequence[int],
    *, train_vision: bool = False,
) -> float:
    """Forward FLOPs of a prompt with its pictures, counted once, and of its branches. `prompt_tokens` include the image
    tokens; a branch of b tokens attends to the prompt and itself; the head runs on the sum of `scored` tokens.

    Balancing wants what an update costs, which is three forwards (one, and two for the backward) except for a frozen
    tower: unless `train_vision`, the tower counts a third. Leave out pictures whose features are at hand. Windows are
    taken as full, so pictures whose sides are not whole windows count slightly too much. For many calls pass
    `flop_rates(config)` in place of the config.
    """
    rates = config if isinstance(config, tuple) else flop_rates(config)
    token, pair, head, patch, whole_pair, window_pair, window = rates
    pairs = prompt_tokens * (prompt_tokens + 1) / 2 + sum(b * prompt_tokens + b * (b + 1) / 2 for b in branches)
    vision = sum(p * (patch + whole_pair * p + window_pair * min(p, window)) for p in image_patches)
    return token * (prompt_tokens + sum(branches)) + pair * pairs + head * sum(scored) + vision / (1 if train_vision else 3)


def sequence_flops(
    config: Any, text_tokens: int, image_patches: Sequence[int], response_tokens: int, *, train_vision: bool = False
) -> float:
    """`tree_flops` of one sequence: text_tokens are all of its language tokens, response_tokens those that are scored."""
    return tree_flops(config, text_tokens, image_patches, (), (response_tokens,), train_vision=train_vision)
