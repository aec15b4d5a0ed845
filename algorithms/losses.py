"""Losses of other papers, as functions: --loss gmpo, --loss dppo."""

from dataclasses import dataclass

import torch

from grpo import PRESETS, algo_arg, register_loss, response_means


@dataclass(frozen=True)
class Settings:
    """DPPO"""

    dppo_delta: float = algo_arg(0.15, "DPPO: largest change of a token's probability that still has a gradient",
                                 above=0, most=1)
    dppo_cap: float = algo_arg(10.0, "DPPO: cap on the ratio that weights a token", above=1)


@register_loss("gmpo", per_token=False)
def gmpo(logp_K, log_ratio_K, advantages_K, rollout_K, algo):
    """Return -A times the geometric mean of a response's ratios (GMPO, arXiv:2507.20673, equation 4). Each ratio is
    clipped from above if A > 0, else from below. The bounds are those of log ratios: clip_low 0.4 is a ratio of
    exp(-0.4). With --loss-agg seq each response counts once, as in the paper."""
    upper_K, lower_K = log_ratio_K.clamp(max=algo.clip_high), log_ratio_K.clamp(min=-algo.clip_low)
    clipped_K = torch.where(advantages_K > 0, upper_K, lower_K)
    return -advantages_K * response_means(clipped_K, rollout_K).exp(), clipped_K != log_ratio_K


@register_loss("dppo")
def dppo(logp_K, log_ratio_K, advantages_K, rollout_K, algo):
    """Return -A * sg(min(ratio, dppo_cap)) * logp, without gradient where the probability has moved by more than
    dppo_delta in the direction of A (DPPO with binary total variation, arXiv:2602.04879). Unlike a bound of the ratio,
    it lets rare tokens rise and keeps frequent ones from falling far."""
    change_K = (logp_K.exp() - (logp_K - log_ratio_K).exp()).detach()
    masked_K = advantages_K.sign() * change_K > algo.dppo_delta
    weight_K = log_ratio_K.detach().exp().clamp(max=algo.dppo_cap).masked_fill(masked_K, 0.0)
    return -advantages_K * weight_K * logp_K, masked_K


PRESETS["gmpo"] = {"loss": "gmpo", "loss_agg": "seq", "clip_low": 0.4, "clip_high": 0.4}
PRESETS["dppo"] = {"loss": "dppo"}
