"""The algorithms: settings, advantages and losses, as pure functions of tensors. No model, no I/O, no process group.

To add an advantage estimator, decorate a function with `@register_advantage("name", norm_std=...)`; for a loss use
`@register_loss("name")`. `--adv name` and `--loss name` then select it. `PRESETS` lists the settings of each --algo. A
method that needs more than one function, or settings of its own, is a file in algorithms/ with a `Method`.

Axes: P prompts, G samples per prompt, B responses, T tokens of a response that the policy sampled (padded to the
longest), N rows of a packing.TokenBatch, K any subset of these rows, such as those of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from errors import as_user_error, need
from settings import flag_field

# ----------------------------------------------------------------------------------------------------------------------
# Advantages: how much better a response is than expected


@dataclass(frozen=True)
class AdvantageEstimator:
    """An advantage estimator and its properties.

    `function` maps rewards (P, G) to advantages before normalisation (P, G). P is this rank's prompts; if rewards have
    failed, it is called per group, with (1, g) where g > 1, so it must not compare groups. The result is then divided
    by a std or whitened (`norm_std`).

    With `per_token`, `function` maps (rewards_BT, values_BT, mask_BT, algo) to advantages and returns, both (B, T).
    """

    function: Callable
    # default of --algo-args norm_std, as in the estimator's paper: group, batch or none (see group_advantages)
    norm_std: str = "group"
    grouped: bool = True  # compares the samples of a prompt, so equal rewards mean advantage 0
    per_token: bool = False
    needs_values: bool = False  # needs a critic


def register_in(table: dict[str, Any], entry_type: type, name: str, **properties: Any) -> Callable:
    """Decorate a function to register it in a table under a name, as an `entry_type` with these properties."""

    def add(function: Callable) -> Callable:
        assert name not in table, f"{entry_type.__name__} {name!r} is already registered; choose another name"
        table[name] = entry_type(function, **properties)
        return function

    return add


ADVANTAGES: dict[str, AdvantageEstimator] = {}  # by the name that --adv takes
register_advantage = partial(register_in, ADVANTAGES, AdvantageEstimator)


@register_advantage("grpo", norm_std="group")
@register_advantage("dr_grpo", norm_std="none")
def subtract_group_mean(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return r - mean of the group. For grpo this is then divided by the group's std (DeepSeekMath, arXiv:2402.03300,
    section 4.1; Bessel's correction and + 1e-6 as in verl and TRL). For dr_grpo it is not divided (arXiv:2503.20783,
    section 3.2)."""
    return rewards_PG - rewards_PG.mean(dim=1, keepdim=True)


@register_advantage("rloo", norm_std="none")
def leave_one_out(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return r - mean of the other G - 1 rewards of the group (arXiv:2402.14740, equation 8)."""
    n_samples = rewards_PG.shape[1]
    return subtract_group_mean(rewards_PG) * (n_samples / (n_samples - 1))


@register_advantage("reinforce++", norm_std="batch", grouped=False, per_token=True)
def reward_to_go(rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor, algo: "Algorithm"):
    """Return, for each token, the rewards minus KL penalties summed from that token to the end (arXiv:2501.03262,
    section 3). By default (norm_std "batch") these sums are then whitened over the step."""
    return gae(rewards_BT, torch.zeros_like(rewards_BT), mask_BT, gamma=1.0, lam=1.0)


@register_advantage("gae", norm_std="batch", grouped=False, per_token=True, needs_values=True)
def gae_estimator(rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor, algo: "Algorithm"):
    """Return `gae` with the settings' gamma and lam."""
    return gae(rewards_BT, values_BT, mask_BT, algo.gamma, algo.lam)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the generalised advantage estimate and the return of each token (arXiv:1506.02438, equation 16).

    delta_t = r_t + gamma * V_{t+1} - V_t,   A_t = sum_l (gamma * lam)^l * delta_{t+l},   return_t = A_t + V_t

    All tensors are (..., T); the results are float64. rewards[t] is the reward of token t, and values[t] is the
    expected return before token t. Tokens outside the mask (padding, observations) get 0 and are skipped, so t + 1 is
    the next token inside the mask. V is 0 after the last token. If all values are 0 and lam is 1, both results are the
    discounted rewards-to-go.
    """
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(f"gae: rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask "
                         f"{tuple(mask.shape)} must agree")
    rewards = rewards.double()
    values = values.double()
    mask = mask.bool()
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[..., 0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(rewards.shape[-1])):
        delta = rewards[..., t] + gamma * next_value - values[..., t]
        current = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[..., t], current, next_advantage)
        next_value = torch.where(mask[..., t], values[..., t], next_value)
        advantages[..., t] = torch.where(mask[..., t], current, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


MeanAndStd = Callable[[torch.Tensor], tuple[float, float]]


def mean_and_std(x: torch.Tensor) -> tuple[float, float]:
    """Return the mean and the standard deviation (Bessel's correction) of all entries, on this process only."""
    return x.mean().item() if len(x) else 0.0, x.std().item() if x.numel() > 1 else 0.0


def group_advantages(
    rewards_PG: torch.Tensor,
    method: str = "grpo",
    norm_std: str | None = None,
    moments: MeanAndStd = mean_and_std,
    graded_PG: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the advantage of each response from the rewards of its group; (P, G) in, (P, G) float64 out.

    `norm_std` selects how the estimator's differences, such as r - mean of the group, are normalised:
    "group"  divided by the std of the group's rewards
    "batch"  divided by the std of the differences over the step and all ranks; estimators that do not compare a group
             are also centred on the step's mean. With method grpo this is REINFORCE++ with baseline
    "none"   not at all
    None     the estimator's own default

    `moments` takes this rank's differences and returns their mean and std over all ranks. Responses outside `graded_PG`
    get 0; the others get what they would get in a group without these responses.

    If the estimator compares a group, a group whose rewards are all equal gets exactly 0. This is decided by comparing
    the rewards, because r - mean(r) of equal floats need not be 0, and dividing it by a tiny std would make it large.
    """
    estimators = {name: estimator for name, estimator in ADVANTAGES.items() if not estimator.needs_values}
    if method not in estimators:
        raise ValueError(f"group_advantages: unknown method {method!r}; choose one of {', '.join(estimators)}")
    estimator = estimators[method]
    if estimator.grouped and rewards_PG.shape[1] < 2:
        raise ValueError(f"group_advantages: method {method!r} compares samples of one prompt, but "
                         f"G={rewards_PG.shape[1]}; use at least 2")
    graded_PG = torch.ones_like(rewards_PG, dtype=torch.bool) if graded_PG is None else graded_PG
    not_finite = (graded_PG & ~torch.isfinite(rewards_PG)).nonzero()
    if len(not_finite):
        p, g = not_finite[0].tolist()
        raise ValueError(f"group_advantages: reward of prompt {p}, sample {g} is {rewards_PG[p, g].item()}")
    rewards = rewards_PG.double()
    # a per-token estimator is not called here (compute_advantages does): for responses of one token each it would
    # return the rewards unchanged
    difference = rewards if estimator.per_token else apply_to_graded(estimator.function, rewards, graded_PG)
    need(difference.shape == rewards.shape, f"--adv {method}: {estimator.function.__name__} must return a tensor of "
         f"the rewards' shape (P, G), {tuple(rewards.shape)}, but returned {tuple(difference.shape)}")
    if estimator.grouped:
        difference = difference.masked_fill(constant_groups(rewards, graded_PG), 0.0)
    norm_std = norm_std or estimator.norm_std
    if norm_std == "group":
        difference = difference / (apply_to_graded(group_std, rewards, graded_PG) + 1e-6)
    elif norm_std == "batch":
        mean, std = moments(difference[graded_PG])
        # differences within groups have mean 0; subtracting the mean's rounding error would give constant groups an
        # advantage
        difference = whiten(difference, 0.0 if estimator.grouped else mean, std)
    return difference.masked_fill(~graded_PG, 0.0)


def group_std(rewards_PG: torch.Tensor) -> torch.Tensor:
    return rewards_PG.std(dim=1, keepdim=True).expand_as(rewards_PG)


def apply_to_graded(function: Callable, rewards_PG: torch.Tensor, graded_PG: torch.Tensor) -> torch.Tensor:
    """Apply a function of groups to the graded responses of each group. Other responses get 0. If some response is
    not graded, all responses of groups with fewer than two graded ones get 0."""
    if graded_PG.all():
        return function(rewards_PG)
    out_PG = torch.zeros_like(rewards_PG)
    for p, graded_G in enumerate(graded_PG):
        if graded_G.sum() > 1:
            out_PG[p, graded_G] = function(rewards_PG[p : p + 1, graded_G])[0]
    return out_PG


def constant_groups(rewards_PG: torch.Tensor, graded_PG: torch.Tensor) -> torch.Tensor:
    """Return (P, 1) bool: groups whose graded rewards are all equal, so that comparing their samples has no signal."""
    highest = rewards_PG.masked_fill(~graded_PG, -torch.inf).amax(dim=1, keepdim=True)
    return highest <= rewards_PG.masked_fill(~graded_PG, torch.inf).amin(dim=1, keepdim=True)


def whiten(x: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    """Return (x - mean) / std, or zeros if std is only the rounding error of the mean: then all entries are equal."""
    if is_numerically_constant(mean, std):
        return torch.zeros_like(x)
    return (x - mean) / std


def is_numerically_constant(mean: float, std: float) -> bool:
    return not std > 1e-9 * max(1.0, abs(mean))


def compute_advantages(
    rewards_PG: torch.Tensor,
    task_rewards_PG: torch.Tensor,
    tokens: Any,
    counted_B: torch.Tensor,
    algo: "Algorithm",
    kl_coef: float,
    moments: MeanAndStd = mean_and_std,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the advantage of each token of `tokens` and, if the estimator is per token, its return; (N,) float64.

    `tokens` is the packing.TokenBatch of all responses of this rank, in whole groups, in the order of rewards_PG. Its
    column `values` is read only if the estimator needs values, and old_logps and ref_logps only with kl_in=reward.
    `task_rewards_PG` are the rewards before length penalties: with dynamic sampling, a group in which these are equal
    gets advantage 0. A failed reward is NaN in both arguments, and the rest of its group is compared without it.
    `counted_B` marks the responses in the loss; with norm_std "batch", per-token advantages are whitened with the mean
    and std of these responses' tokens only.
    """
    estimator = ADVANTAGES[algo.adv]
    counts = torch.bincount(tokens.rollout, minlength=rewards_PG.numel())
    penalties_N = torch.zeros(len(tokens.rollout), dtype=torch.float64)
    penalised = kl_coef > 0 and algo.kl_in == "reward"
    if penalised:
        penalties_N = kl_coef * kl(tokens.old_logps.double(), tokens.ref_logps.double(), algo.kl)
    graded_PG = ~rewards_PG.isnan()
    no_signal = torch.zeros_like(rewards_PG[:, :1], dtype=torch.bool)
    # groups with equal task rewards are there only to fill the step; a difference in length penalty must not give them
    # an advantage
    if algo.max_gen_batches > 1:
        no_signal = constant_groups(task_rewards_PG, graded_PG)
    if algo.effective_norm_std == "batch" and penalised and not estimator.needs_values:
        # if all rewards are equal, only the KL penalties differ, and dividing these by their own std would make them
        # large
        compared = rewards_PG.flatten()[counted_B]
        if estimator.grouped:
            compared = group_advantages(rewards_PG, algo.adv, "none", graded_PG=graded_PG).masked_fill(no_signal, 0.0)
        if is_numerically_constant(*moments(compared)):
            moments = with_unit_std(moments)

    if not estimator.per_token:  # one advantage per response; the sum of its KL penalties is subtracted from its reward
        penalties_B = sum_per_rollout(penalties_N, tokens.rollout, rewards_PG.numel())
        total_PG = (rewards_PG - penalties_B.view_as(rewards_PG)).masked_fill(no_signal, 0.0)
        advantages_PG = group_advantages(total_PG, algo.adv, algo.effective_norm_std, moments, graded_PG)
        return advantages_PG.masked_fill(no_signal, 0.0).flatten()[tokens.rollout], None

    # One advantage per token. The reward of an episode's turn is given at the last sampled token of the turn, the rest
    # of the reward at the last sampled token of the episode or response, and each token's KL penalty at that token
    mask_BT = torch.arange(int(counts.max()) if len(counts) else 1) < counts[:, None]
    rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    rewards_BT[mask_BT] = -penalties_N if tokens.turn_rewards is None else tokens.turn_rewards - penalties_N
    turns_B = 0.0 if tokens.turn_rewards is None else sum_per_rollout(tokens.turn_rewards, tokens.rollout, len(counts))
    rewards_BT[torch.arange(len(counts)), counts - 1] += rewards_PG.flatten().nan_to_num(0.0) - turns_B
    values_BT = torch.zeros_like(rewards_BT)
    if estimator.needs_values:
        values_BT[mask_BT] = tokens.values.double()
    advantages_BT, returns_BT = estimator.function(rewards_BT, values_BT, mask_BT, algo)
    if algo.effective_norm_std == "batch":
        advantages_BT = whiten(advantages_BT, *moments(advantages_BT[mask_BT & counted_B[:, None]]))
    return advantages_BT[mask_BT], returns_BT[mask_BT]


def sum_per_rollout(values_N: torch.Tensor, rollout_N: torch.Tensor, n_rollouts: int) -> torch.Tensor:
    """Return the sum of the values for each rollout, float64."""
    return torch.zeros(n_rollouts, dtype=torch.float64).index_add_(0, rollout_N, values_N.double())


def with_unit_std(moments: MeanAndStd) -> MeanAndStd:
    return lambda x: (moments(x)[0], 1.0)


def overlong_penalty(length: int, max_length: int) -> float:
    """Return DAPO's soft penalty for a long response, in [-1, 0]: 0 up to four fifths of max_length, then linearly down
    to -1 at max_length (arXiv:2503.14476, equation 13)."""
    buffer = max(1, max_length // 5)
    return min(0.0, max(-1.0, (max_length - buffer - length) / buffer))


# ----------------------------------------------------------------------------------------------------------------------
# Distance to a reference policy

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl(logp: torch.Tensor, ref_logp: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate KL(policy || reference) from each sampled token; any shape (Schulman 2020, joschu.net/blog/kl-approx).

    With d = logp - ref_logp:   k1  d     k2  d^2 / 2     k3  exp(-d) - 1 + d

    As estimates of the KL, k1 and k3 are unbiased; k3 is never negative and varies less. As a loss, what matters is the
    gradient on policy: k2's is unbiased; k3's is biased, but GRPO uses it; k1's is 0 in expectation, so use k1 only in
    the reward.
    """
    d = logp - ref_logp
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    if kind == "k3":
        return (-d).expm1() + d
    raise ValueError(f"kl: unknown kind {kind!r}; choose one of {', '.join(KL_ESTIMATORS)}")


def adapt_kl_coef(coef: float, measured: float, target: float, samples: int, horizon: float) -> float:
    """Return the KL coefficient after a step of `samples` samples, changed so that the KL moves towards its target:
    coef * (1 + clip(measured / target - 1, -0.2, 0.2) * samples / horizon) (arXiv:1909.08593, section 2.2)."""
    error = min(0.2, max(-0.2, measured / target - 1))
    return coef * (1 + error * samples / horizon)


# ----------------------------------------------------------------------------------------------------------------------
# Losses. Each is a function (logp_K, log_ratio_K, advantages_K, rollout_K, algo) -> (loss_K, clipped_K): the loss of
# each token, and a mask of the clipped tokens. In the docstrings A is the advantage, and ratio = exp(logp - old_logp)


@dataclass(frozen=True)
class LossFunction:
    function: Callable
    # False: a token's loss depends on other tokens of its rollout, so `function` must get whole rollouts
    per_token: bool = True
    # the gradient is 0 where the advantage is 0, so responses with advantage 0 are not packed
    zero_without_advantage: bool = True


LOSSES: dict[str, LossFunction] = {}  # by the name that --loss takes
register_loss = partial(register_in, LOSSES, LossFunction)


@register_loss("clip")
def ppo_clip(logp_K, log_ratio_K, advantages_K, rollout_K, algo):
    """Return -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) (PPO, arXiv:1707.06347, eq. 7).

    Unequal bounds are DAPO's clip-higher (arXiv:2503.14476, eq. 10). Where A < 0, a dual_clip above 1 limits the loss
    to at most dual_clip * |A| (arXiv:1912.09729)."""
    ratio_K = log_ratio_K.exp()
    unclipped_loss_K = -advantages_K * ratio_K
    clipped_loss_K = -advantages_K * ratio_K.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    loss_K = torch.maximum(unclipped_loss_K, clipped_loss_K)
    if algo.dual_clip is not None:
        loss_K = torch.where(advantages_K < 0, torch.minimum(loss_K, -algo.dual_clip * advantages_K), loss_K)
    return loss_K, clipped_loss_K > unclipped_loss_K


@register_loss("gspo", per_token=False)
def gspo(logp_K, log_ratio_K, advantages_K, rollout_K, algo):
    """Return `ppo_clip` with one ratio per response, exp(mean of logp - old_logp) (arXiv:2507.18071, eq. 5 and 7)."""
    return ppo_clip(logp_K, response_means(log_ratio_K, rollout_K), advantages_K, rollout_K, algo)


@register_loss("cispo")
def cispo(logp_K, log_ratio_K, advantages_K, rollout_K, algo):
    """Return -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logp, where sg stops the gradient (arXiv:2506.13585,
    eq. 4 and 5). If clip_low is 1, the ratio has no lower bound."""
    ratio_K = log_ratio_K.detach().exp()
    weight_K = ratio_K.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    return -weight_K * advantages_K * logp_K, weight_K != ratio_K


@register_loss("sapo")
def sapo(logp_K, log_ratio_K, advantages_K, rollout_K, algo):
    """Return -(4 / tau) * sigmoid(tau * (ratio - 1)) * A, a smooth gate (arXiv:2511.20347, section 3). tau is
    sapo_tau_positive where A > 0, and sapo_tau_negative elsewhere."""
    tau_K = torch.full_like(advantages_K, algo.sapo_tau_negative)
    tau_K = tau_K.masked_fill(advantages_K > 0, algo.sapo_tau_positive)
    loss_K = -(4 / tau_K) * torch.sigmoid(tau_K * (log_ratio_K.exp() - 1)) * advantages_K
    return loss_K, torch.zeros_like(loss_K, dtype=torch.bool)


@register_loss("reinforce")
def reinforce(logp_K, log_ratio_K, advantages_K, rollout_K, algo):
    """Return -A * logp (Williams 1992). This is only correct on policy."""
    return -advantages_K * logp_K, torch.zeros_like(logp_K, dtype=torch.bool)


def response_means(x_K: torch.Tensor, rollout_K: torch.Tensor) -> torch.Tensor:
    """Return for each token the mean of x over its rollout, whose tokens need not be contiguous; differentiable."""
    _, index_K, count = rollout_K.unique(return_inverse=True, return_counts=True)
    return (torch.zeros_like(x_K[: len(count)]).index_add(0, index_K, x_K) / count)[index_K]


def policy_loss(
    logp_K: torch.Tensor,
    old_logp_K: torch.Tensor,
    advantages_K: torch.Tensor,
    kind: str = "clip",
    rollout_K: torch.Tensor | None = None,
    algo: "Algorithm | None" = None,
    **settings: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of each token, (K,), and per-token indicators: "clipped", and "kl", the k3 estimate of
    KL(old || new).

    `rollout_K` is the rollout of each token, for losses that couple the tokens of a response. `algo` selects the loss
    and its settings. Without it, pass the loss's name as `kind` and fields of Algorithm, such as clip_low, clip_high
    and dual_clip, as keywords."""
    algo = algo or Algorithm(loss=kind, **settings)
    if algo.loss not in LOSSES:
        raise ValueError(f"policy_loss: unknown kind {algo.loss!r}; choose one of {', '.join(LOSSES)}")
    log_ratio_K = logp_K - old_logp_K
    loss_K, clipped_K = LOSSES[algo.loss].function(logp_K, log_ratio_K, advantages_K, rollout_K, algo)
    d_K = log_ratio_K.detach()
    return loss_K, {"clipped": clipped_K.to(logp_K.dtype), "kl": d_K.expm1() - d_K}


def truncated_importance_weight(
    trainer_logp_K: torch.Tensor, rollout_logp_K: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the importance weight p_trainer / p_engine of each token, truncated at `cap` and without gradient, and a
    mask of the tokens whose weight was capped (Ionides 2008, Truncated importance sampling).

    Engine and trainer round differently, so even "on-policy" samples come from a slightly different policy. The cap
    bounds the variance, at the price of a bias on the few tokens whose weight exceeds it."""
    ratio_K = (trainer_logp_K - rollout_logp_K).detach().exp()
    return ratio_K.clamp(max=cap), ratio_K > cap


def geometric_mean_mask(
    trainer_logp_K: torch.Tensor, rollout_logp_K: torch.Tensor, rollout_K: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """Return a mask of the tokens to keep: those of responses over which the geometric mean of p_trainer / p_engine is
    within [low, high]. Without this mask one garbled response, say from an engine bug, could dominate the update."""
    mean_K = response_means((trainer_logp_K - rollout_logp_K).detach().double(), rollout_K).exp()
    return (mean_K >= low) & (mean_K <= high)


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of the update. The fused LM head calls it on each block of tokens, with their log-probabilities.
    The loss of a token is

    weight * kept * (tis * policy_loss + kl_coef * kl(logp, ref_logp) - entropy_coef * entropy + methods' terms)

    tis is 1 without tis_cap, kept is 1 without ratio_mask, and the KL is a term only with kl_in=loss.

    The arguments are logp_K, entropy_K and the rows K of a TokenBatch. The results are the loss of each token, whose
    sum is the loss of the minibatch, and indicators: those of policy_loss, "capped" (truncated_importance_weight) and
    "kept" (geometric_mean_mask). Reading a column that was not computed is an error.

    With --async-steps, tokens may be sampled with older weights than those before the update. `old_policy` chooses the
    weights that old_logp is computed with:
    trainer   the trainer's weights before the update. On policy they are the current ones, and the ratio is exactly 1.
              Clipping bounds the update; TIS multiplies a token's loss by p_old / p_engine, at most tis_cap
              (decoupled objective, arXiv:2505.24298, section 5.2)
    rollout   the weights that sampled the token, with the engine's log-probabilities. The ratio includes staleness, and
              clipping bounds staleness and update together (arXiv:1707.06347 off policy). TIS and ratio_mask would
              correct for the engine's probabilities a second time, so they are refused
    """

    algo: "Algorithm"
    kl_coef: float = 0.0

    @property
    def per_token(self) -> bool:
        """Return whether a block of tokens may end inside a rollout. If not, it must contain whole rollouts."""
        return LOSSES[self.algo.loss].per_token and self.algo.ratio_mask is None

    def __call__(
        self, logp_K: torch.Tensor, entropy_K: torch.Tensor, tokens: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        algo = self.algo
        old_logp_K = logp_K.detach() if algo.on_policy else tokens.old_logps
        loss_K, indicators = policy_loss(
            logp_K, old_logp_K, tokens.advantages, rollout_K=tokens.rollout, algo=algo
        )
        weight_K = tokens.weights
        if algo.tis_cap is not None:
            tis_K, indicators["capped"] = truncated_importance_weight(old_logp_K, tokens.rollout_logps, algo.tis_cap)
            loss_K = loss_K * tis_K
        if algo.ratio_mask is not None:
            low, high = algo.ratio_mask_bounds
            kept_K = geometric_mean_mask(old_logp_K, tokens.rollout_logps, tokens.rollout, low, high)
            indicators["kept"] = kept_K
            weight_K = weight_K * kept_K
        if self.kl_coef > 0 and algo.kl_in == "loss":
            loss_K = loss_K + self.kl_coef * kl(logp_K, tokens.ref_logps, algo.kl)
        if algo.entropy_coef:
            loss_K = loss_K - algo.entropy_coef * entropy_K
        for method in algo.methods:
            if method.token_loss:
                loss_K = loss_K + method.token_loss(logp_K, tokens, algo)
        return weight_K * loss_K, indicators


def value_loss(
    value_K: torch.Tensor, old_value_K: torch.Tensor, return_K: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return half the squared error of each value, and a mask of the clipped values; all (K,). With `clip`, use the
    larger of two errors: the value's, and that of the value clipped to old_value +- clip (OpenAI baselines' ppo2;
    arXiv:2005.12729)."""
    loss_K = (value_K - return_K) ** 2
    if not clip:
        return loss_K / 2, torch.zeros_like(value_K)
    clipped_value_K = old_value_K + (value_K - old_value_K).clamp(-clip, clip)
    clipped_loss_K = (clipped_value_K - return_K) ** 2
    # a value inside the range is not clipped, even if rounding makes the two losses differ
    was_clipped_K = (clipped_loss_K > loss_K) & ((value_K - old_value_K).abs() > clip)
    return torch.maximum(loss_K, clipped_loss_K) / 2, was_clipped_K.to(value_K.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Token weights

LOSS_AGGREGATIONS = ("token", "seq", "const")


def token_weights(
    n_tokens_B: Sequence[int],
    counted_B: Sequence[bool],
    aggregation: str,
    constant: int,
    all_sum: Callable[[dict[str, float]], dict[str, float]] = dict,
) -> list[float]:
    """Return one weight for each response of a minibatch, which all its tokens get. The loss is the weighted sum of
    token losses. Responses outside `counted_B` have weight 0 and are not part of the totals.

    token  1 / all tokens of the minibatch                   every token has the same weight (DAPO)
    seq    1 / (responses * tokens of this response)         every response has the same weight (GRPO)
    const  1 / (responses * constant)                        no length bias (Dr. GRPO); constant = --max-new-tokens

    `all_sum` adds the totals of all ranks. The totals include all micro-batches and are known before the first
    backward, so neither the split into micro-batches nor the number of ranks changes the loss.
    """
    counted_tokens = [n for n, counted in zip(n_tokens_B, counted_B, strict=True) if counted]
    total = all_sum({"tokens": float(sum(counted_tokens)), "responses": float(len(counted_tokens))})
    divisor = {
        "token": lambda n: total["tokens"],
        "seq": lambda n: total["responses"] * n,
        "const": lambda n: total["responses"] * constant,
    }[aggregation]
    return [1.0 / divisor(n) if counted else 0.0 for n, counted in zip(n_tokens_B, counted_B, strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# Methods of algorithms/


@dataclass(frozen=True)
class StepInfo:
    """A training step. `seed` (--seed) and `step` name random numbers, so that a resumed run repeats them. `gather`
    returns the item of each process (with --tp: of each data rank), in rank order."""

    seed: int
    step: int
    gather: Callable[[Any], list[Any]] = lambda item: [item]


@dataclass(frozen=True)
class Method:
    """A method of algorithms/: the parts that it adds to the algorithm if `is_on(algo)`. A part may be None.

    `columns`: the columns of the packing.TokenBatch that it reads, among old_logps, entropies, view_logps and
    teacher_logps; they are computed before the update.
    """

    is_on: Callable[["Algorithm"], bool]
    columns: tuple[str, ...] = ()
    # (logp_K, tokens, algo) -> (K,): a term added to the loss of each token
    token_loss: Callable | None = None
    # (advantages_N, batch, algo, StepInfo) -> (N,): new advantages; `batch` is a packing.TrainBatch. Tokens that are
    # not packed have NaN in `columns`
    change_advantages: Callable | None = None
    # (prompts, algo, seed, step, steps) -> prompts: new prompts of a batch, before it is sampled
    change_prompts: Callable | None = None
    check: Callable[["Algorithm"], None] | None = None  # raises UserError if settings contradict each other
    order: int = 1  # of methods: 0 those that replace the advantages, 1 those that add to them, 2 that choose tokens
    zero_without_advantage: bool = True  # adds no gradient to responses with advantage 0, so they are not packed


METHODS: list[Method] = []


def register_method(presets: dict[str, dict[str, Any]] | None = None, **parts: Any) -> None:
    """Add a Method with these parts, and its presets of --algo."""
    METHODS.append(Method(**parts))
    METHODS.sort(key=lambda method: method.order)
    PRESETS.update(presets or {})


def change_prompts(prompts: Sequence[Any], algo: "Algorithm", seed: int, step: int, steps: int) -> Sequence[Any]:
    """Return the prompts of a batch after the changes by all methods that are on."""
    for method in algo.methods:
        if method.change_prompts:
            prompts = method.change_prompts(prompts, algo, seed, step, steps)
    return prompts


def change_advantages(advantages_N: torch.Tensor, batch: Any, algo: "Algorithm", info: StepInfo) -> torch.Tensor:
    """Return the advantages after the changes by all methods that are on."""
    for method in algo.methods:
        if method.change_advantages:
            advantages_N = method.change_advantages(advantages_N, batch, algo, info)
    return advantages_N


# ----------------------------------------------------------------------------------------------------------------------
# Settings

NORM_STD = ("group", "batch", "none")
algo_arg = partial(flag_field, key=True)  # a rarely used setting, passed as --algo-args KEY=VALUE
PRESETS: dict[str, dict[str, Any]] = {  # --algo NAME: the settings that differ from the defaults of Algorithm
    "grpo": {},
    "dr_grpo": {"adv": "dr_grpo", "loss_agg": "const"},
    "dapo": {"clip_high": 0.28, "max_gen_batches": 10, "truncated": "penalise"},
    "gspo": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "loss_agg": "seq"},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},  # ratios up to 5 as in ScaleRL, arXiv:2510.13786
    "sapo": {"loss": "sapo", "loss_agg": "seq"},
    "rloo": {"adv": "rloo", "loss": "reinforce", "loss_agg": "const"},
    "reinforce++": {"adv": "reinforce++", "kl": "k1", "kl_in": "reward", "kl_coef": 1e-3},  # our choice of coefficient
    "ppo": {"adv": "gae", "update_epochs": 4, "entropy_coef": 0.01},
}


@dataclass(frozen=True)
class Algorithm:
    """Algorithm (--algo sets several of these; flags you pass override it)"""  # this section's title in --help

    algo: str = flag_field("grpo", "preset of the algorithm flags, which you can override one by one",
                           choices=PRESETS)
    group_size: int = flag_field(8, "responses sampled per prompt (G)", least=1)
    adv: str = flag_field("grpo", "advantage estimator; docs/algorithms.md", choices=ADVANTAGES)
    loss: str = flag_field("clip", "policy loss; docs/algorithms.md", choices=LOSSES)
    clip_low: float = flag_field(0.2, "lower clip range: the ratio is clipped at 1 - X", above=0, most=1)
    clip_high: float = flag_field(0.2, "upper clip range: the ratio is clipped at 1 + X (DAPO's clip-higher)", above=0)
    loss_agg: str = flag_field("token", "token: mean over tokens; seq: mean over responses; const: sum / (responses x "
                               "--max-new-tokens)", choices=LOSS_AGGREGATIONS)
    truncated: str = flag_field("keep", "keep: train on responses cut off at --max-new-tokens; mask: leave them out of "
                                "the loss; penalise: lower the reward of responses longer than 4/5 of that limit "
                                "(overlong reward shaping)", choices=("keep", "mask", "penalise"))
    max_gen_batches: int = flag_field(1, "dynamic sampling: sample up to N batches per step, until P groups have "
                                      "unequal rewards; 1: off", least=1)
    update_epochs: int = flag_field(1, "passes over the rollouts of a step", least=1)
    minibatches: int = flag_field(1, "minibatches per pass; one optimizer step each", least=1)
    entropy_coef: float = flag_field(0.0, "coefficient of the entropy bonus; a negative one penalises entropy")
    kl_coef: float = flag_field(0.0, "coefficient of the KL to the reference policy; 0: no KL and no reference model",
                                least=0)
    kl: str = flag_field("k3", "KL estimator per token, with d = logp - ref_logp: k1: d, k2: d^2/2, k3: exp(-d) - 1 "
                         "+ d", choices=KL_ESTIMATORS)

    # Keys of --algo-args
    norm_std: str | None = algo_arg(None, "what advantages are divided by. group: the std of the group; batch: the std "
                                    "over the step and all ranks, after subtracting the mean if --adv does not "
                                    "compare a group; none: nothing (default: depends on --adv)",
                                    choices=NORM_STD)
    dual_clip: float | None = algo_arg(None, "dual clip: where A < 0, a token's loss is at most this times |A| "
                                       "(default: off)", above=1)
    tis_cap: float | None = algo_arg(None, "TIS: weight tokens by p_old / p_engine, capped at this (default: off)",
                                     above=0)
    ratio_mask: str | None = algo_arg(None, "leave out responses whose tokens' geometric mean of p_old / p_engine is "
                                      "outside LOW,HIGH (default: off)")
    old_policy: str = algo_arg("trainer", "policy in the ratio's denominator. trainer: that before the update; "
                               "rollout: the one that sampled the token", choices=("trainer", "rollout"))
    kl_in: str = algo_arg("loss", "loss: add the KL to the loss; reward: subtract it from the reward",
                          choices=("loss", "reward"))
    kl_target: float | None = algo_arg(None, "adapt --kl-coef to keep the KL near this, in nats per token", above=0)
    kl_horizon: float = algo_arg(10_000.0, "samples over which --kl-coef can change by about a fifth", above=0)
    ref_every: int = algo_arg(0, "steps between copies of the policy into the reference; 0: never", least=0)
    critic: str = algo_arg("head", "critic of --adv gae; head: a value head on the policy; separate: another copy of "
                           "the model", choices=("head", "separate"))
    critic_lr: float = algo_arg(1e-5, "peak learning rate of the value head or the separate critic", above=0)
    critic_warmup_steps: int = algo_arg(0, "number of initial steps that train only the critic", least=0)
    value_coef: float = algo_arg(0.5, "coefficient of the value loss", above=0)
    value_clip: float | None = algo_arg(0.2, "value loss: how far a value may move from the one before the "
                                         "update before it is clipped; none: no clipping", above=0)
    gamma: float = algo_arg(0.99, "discount per token of --adv gae; use 1 for long responses", least=0, most=1)
    lam: float = algo_arg(0.95, "lambda of --adv gae; 1: full returns, 0: one-step TD error", least=0, most=1)
    sapo_tau_positive: float = algo_arg(1.0, "steepness of SAPO's gate where A > 0", above=0)
    sapo_tau_negative: float = algo_arg(1.05, "steepness of SAPO's gate where A <= 0", above=0)

    # Derived settings
    @property
    def methods(self) -> list[Method]:
        """Return the methods that are on: none here, see algorithms/_registry.py."""
        return []

    def reads(self, column: str) -> bool:
        """Return whether a method that is on reads a column."""
        return any(column in method.columns for method in self.methods)

    @property
    def effective_norm_std(self) -> str:
        return self.norm_std or ADVANTAGES[self.adv].norm_std

    @property
    def on_policy(self) -> bool:
        """Return whether the old policy is the current one: with old_policy=trainer and one optimizer step per training
        step."""
        return self.update_epochs * self.minibatches == 1 and self.old_policy == "trainer"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def kl_in_reward(self) -> bool:
        """Return whether the KL is subtracted from the rewards."""
        return self.needs_reference and self.kl_in == "reward"

    @property
    def needs_values(self) -> bool:
        return ADVANTAGES[self.adv].needs_values

    @property
    def needs_old_logps(self) -> bool:
        """Return whether a forward pass before the update has to compute the trainer's old log-probabilities."""
        return self.old_policy == "trainer" and (self.kl_in_reward or not self.on_policy or self.reads("old_logps"))

    @property
    def needs_forward(self) -> bool:
        """Return whether any log-probabilities or values have to be computed before the update."""
        return (self.needs_old_logps or self.needs_values or self.needs_reference
                or any(method.columns for method in self.methods))

    @property
    def ratio_mask_bounds(self) -> tuple[float, float]:
        low, high = self.ratio_mask.split(",")
        return float(low), float(high)

    def counts_in_loss(self, finish_reason: str) -> bool:
        """Return whether a response with this finish reason is part of the loss."""
        return finish_reason != "error" and (self.truncated != "mask" or finish_reason != "length")

    def check(self) -> None:
        """Raise UserError if settings contradict each other."""
        estimator = ADVANTAGES[self.adv]
        adv, size, std, kl_coef = f"--adv {self.adv}", self.group_size, self.effective_norm_std, self.kl_coef
        has_token_advantages = estimator.per_token and (estimator.needs_values or self.kl_in_reward)
        updates = f"--update-epochs {self.update_epochs} x --minibatches {self.minibatches}"
        need(size > 1 or not estimator.grouped,
             f"--group-size {size}: {adv} compares samples of one prompt; use at least 2")
        need(size > 1 or self.max_gen_batches == 1,
             f"--group-size {size}: --max-gen-batches {self.max_gen_batches} needs unequal rewards; use at least 2")
        need(std != "group" or (estimator.grouped and not estimator.per_token),
             f"--algo-args norm_std=group needs an estimator that compares a group's samples and gives each sample one "
             f"advantage; {adv} does not; use norm_std=batch or none")
        need(std != "group" or not self.kl_in_reward,
             f"--algo-args kl_in=reward norm_std=group (--kl-coef {kl_coef}): if all rewards of a group are equal, KL "
             f"penalties of any size would become advantages of about +-1; use norm_std=batch or none, or kl_in=loss")
        need(self.clip_low < 1 or self.loss == "cispo",
             f"--clip-low {self.clip_low}: must be below 1, except with --loss cispo, where 1 means no lower bound")
        need(LOSSES[self.loss].per_token or not has_token_advantages,
             f"--loss {self.loss} couples the tokens of a response, but {adv} has an advantage per token (with "
             f"kl_in={self.kl_in}); use --loss clip")
        need(self.loss != "reinforce" or self.on_policy,
             f"--loss reinforce is only correct on policy (one optimizer step per training step, old_policy=trainer), "
             f"but the settings are {updates} and old_policy={self.old_policy}; use --loss clip")
        need(self.old_policy == "trainer" or (self.tis_cap is None and self.ratio_mask is None),
             "--algo-args old_policy=rollout: the ratio already uses the engine's log-probabilities, so tis_cap and "
             "ratio_mask would correct for these a second time; remove both, or use old_policy=trainer")
        need(self.kl_target is None or self.needs_reference,
             f"--algo-args kl_target={self.kl_target} adapts --kl-coef, but --kl-coef is {kl_coef}; set it above 0")
        need(self.ref_every == 0 or self.needs_reference,
             f"--algo-args ref_every={self.ref_every} updates the reference, but there is none; set --kl-coef above 0")
        need(self.adv != "none" or self.reads("teacher_logps"),
             "--adv none, which --algo opd sets, gives no training signal by itself; add --teacher MODEL")
        need(self.adv != "none" or not self.kl_in_reward,
             f"--kl-coef {kl_coef} --algo-args kl_in=reward: --adv none ignores rewards; use kl_in=loss")
        need(self.critic_warmup_steps == 0 or estimator.needs_values,
             f"--algo-args critic_warmup_steps={self.critic_warmup_steps}: {adv} has no critic; use --adv gae")
        need(self.critic == "head" or estimator.needs_values,
             f"--algo-args critic={self.critic}: {adv} has no critic; use --adv gae")
        need(self.kl_in == PRESETS[self.algo].get("kl_in", "loss") or self.needs_reference,
             f"--algo-args kl_in={self.kl_in} has no effect with --kl-coef {kl_coef}; raise --kl-coef, or remove kl_in")
        need(self.dual_clip is None or self.loss not in ("cispo", "sapo", "reinforce"),
             f"--algo-args dual_clip={self.dual_clip} has no effect on --loss {self.loss}; use --loss clip or gspo")
        for method in self.methods:
            if method.check:
                method.check(self)
        if self.ratio_mask is not None:
            message = f"--algo-args ratio_mask={self.ratio_mask}: give LOW,HIGH around 1, such as 0.5,2"
            with as_user_error(ValueError, message):
                low, high = self.ratio_mask_bounds
                need(0 <= low < 1 < high, f"1 is not between {low} and {high}")


def has_gradient(rewards_PG: torch.Tensor, finish_reasons: Sequence[str], algo: Algorithm) -> list[bool]:
    """Return for each response whether it is packed:

    - with a KL in the reward, or a critic: every response, even those outside the loss, because the advantages are
      computed from the log-probabilities or values of all responses;
    - with entropy, KL or a method's term in the loss, or if a group with equal rewards can have advantages other than
      0: every response in the loss;
    - otherwise: only the responses in the loss whose advantage is not 0 or, if a method changes advantages, those of
      groups with an advantage that is not 0.
    """
    counted = [algo.counts_in_loss(reason) for reason in finish_reasons]
    if algo.kl_in_reward or algo.needs_values:  # responses outside the loss are needed for the others' advantages
        return [True] * len(counted)
    estimator = ADVANTAGES[algo.adv]
    can_skip = estimator.grouped and not estimator.per_token and LOSSES[algo.loss].zero_without_advantage
    adds_gradient = not all(method.zero_without_advantage for method in algo.methods)
    if not can_skip or adds_gradient or algo.needs_reference or algo.entropy_coef != 0:
        return counted
    has_advantage = group_advantages(rewards_PG, algo.adv, "none", graded_PG=~rewards_PG.isnan()) != 0
    if any(method.change_advantages for method in algo.methods):  # to another comparison of the group, perhaps
        has_advantage = has_advantage.any(dim=1, keepdim=True).expand_as(rewards_PG)
    return [bool(a) and c for a, c in zip(has_advantage.flatten(), counted, strict=True)]
