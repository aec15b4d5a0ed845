r"""Clip-Cov and KL-Cov (arXiv:2505.22617): keep the entropy from falling by holding back the few tokens that lower it
most, those with a high covariance of log-probability and advantage,

    cov_t = (log pi(y_t) - mean) (A_t - mean)        (equation 10)

with means over the tokens of a minibatch on all ranks, and the policy before the update. Clip-Cov removes the gradient
of random tokens with a covariance from cov_low to cov_high, as many as clip_cov of all tokens (equation 11). KL-Cov
adds kl_cov_coef |log ratio| to the loss of the share kl_cov of all tokens, those with the highest covariance (equation
12; "KL" is the authors' name). verl chooses per micro-batch and takes at least one token from each, which for small
micro-batches is many times the requested share. With one update per step the log ratio is 0, so KL-Cov does nothing and
is refused.
"""

from dataclasses import dataclass

import torch

from algorithms._tokens import random_numbers, sum_over_ranks, top_over_ranks
from errors import need
from grpo import LOSSES, StepInfo, algo_arg, register_method


@dataclass(frozen=True)
class Settings:
    """Clip-Cov and KL-Cov"""

    clip_cov: float = algo_arg(0.0, "Clip-Cov: share of a minibatch's tokens to leave out; 0: off", least=0, most=1)
    cov_low: float = algo_arg(1.0, "Clip-Cov: lowest covariance of the tokens that may be left out")
    cov_high: float = algo_arg(5.0, "Clip-Cov: highest covariance of the tokens that may be left out")
    kl_cov: float = algo_arg(0.0, "KL-Cov: share of a minibatch's tokens with a KL penalty; 0: off", least=0, most=1)
    kl_cov_coef: float = algo_arg(1.0, "KL-Cov: coefficient of that penalty", above=0)


def change_by_covariance(advantages_N: torch.Tensor, batch, algo, info: StepInfo) -> torch.Tensor:
    """Return the advantages, 0 at the tokens of Clip-Cov. Set the column `chosen` to 1 at those of KL-Cov, else 0."""
    tokens, advantages_N = batch.tokens, advantages_N.clone()
    tokens.chosen = torch.zeros(len(tokens))
    random_N = random_numbers(batch, "clip_cov", info)
    for number in range(len(batch.minibatches)):
        rows = batch.rows(number)
        rows = rows[tokens.weights[rows] > 0]
        logps, advantages = tokens.old_logps[rows].double(), advantages_N[rows]
        n, *sums = sum_over_ranks([float(len(rows)), logps.sum().item(), advantages.sum().item()], info)
        mean_logp, mean_advantage = (x / max(n, 1.0) for x in sums)
        cov = (logps - mean_logp) * (advantages - mean_advantage)
        if algo.kl_cov:
            tokens.chosen[rows] = top_over_ranks(cov, max(1, round(algo.kl_cov * n)), info).float()
        if algo.clip_cov:
            candidates = (cov >= algo.cov_low) & (cov <= algo.cov_high)
            random = torch.where(candidates, random_N[rows], -1.0)
            clipped = candidates & top_over_ranks(random, max(1, round(algo.clip_cov * n)), info)
            advantages_N[rows[clipped]] = 0.0
    return advantages_N


def covariance_penalty(logp_K: torch.Tensor, tokens, algo) -> torch.Tensor:
    """Return KL-Cov's term of each token's loss."""
    return algo.kl_cov_coef * tokens.chosen * (logp_K - tokens.old_logps).abs()


def check_covariance(algo) -> None:
    flags = f"--algo-args kl_cov={algo.kl_cov} clip_cov={algo.clip_cov}"
    need(algo.old_policy == "trainer",
         f"{flags} needs the log-probabilities of the trainer's old policy; use old_policy=trainer")
    need(not algo.kl_cov or not algo.on_policy,
         f"--algo-args kl_cov={algo.kl_cov} has no effect with one optimizer step per training step, because every "
         "ratio is 1; raise --minibatches or --update-epochs")
    need(algo.cov_low < algo.cov_high,
         f"--algo-args cov_low={algo.cov_low} cov_high={algo.cov_high}: no covariance is between them; swap them")
    need(not algo.clip_cov or LOSSES[algo.loss].per_token,
         f"{flags}: --loss {algo.loss} couples the tokens of a response, so single ones cannot be left out; use "
         "--loss clip")


register_method(
    presets={  # table 2 of the paper; its 32B model has a tenth of kl_cov
        "clip_cov": {"clip_cov": 2e-4, "clip_low": 0.99, "clip_high": 1.0, "minibatches": 8},
        "kl_cov": {"kl_cov": 2e-3, "clip_low": 0.99, "clip_high": 1e6, "minibatches": 8},  # no clipping
    },
    is_on=lambda algo: algo.kl_cov > 0 or algo.clip_cov > 0, columns=("old_logps",),
    change_advantages=change_by_covariance, token_loss=covariance_penalty, check=check_covariance, order=2,
    zero_without_advantage=False,  # the covariances are of all responses
)  # fmt: skip
