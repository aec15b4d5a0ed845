r"""VPPO, visually-perceptive policy optimization (arXiv:2510.09285), and other choices of the tokens that are trained.

Each token has a score s_t. The advantage of a token is

    A'_t = alpha_i A_t m_t     m_t = 1 for the token_share of tokens with the highest scores (equation 4), else 0

The score of VPPO is how much the image matters to the token: the k3 estimate exp(x) - x - 1, at most 10, with x = m - l
from the old policy's log-probabilities l given the image and m given its second view; the paper has the KL of the whole
distributions (equation 3), its code and appendix B this estimate of it. With the mean score S_i of response i,

    alpha_i = b + (1 - b) n_i / mean of n      n_i = (S_i - min S) / (max S - min S)        (equation 5)

over all responses of the step on all ranks, where b is response_factor_min; so the mean of alpha is 1. The authors'
code takes min S and max S per device and the mean per micro-batch, so there the result depends on the split.

Other scores: `entropy` with token_scope=step is arXiv:2506.01939, which trains the fifth of a step's tokens with the
highest entropy; `random` is the control of both. Filtered tokens stay in the totals of --loss-agg, as in the authors'
code, and in the terms for KL and entropy.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch

from algorithms._tokens import random_numbers, sum_over_ranks, top_over_ranks
from errors import need
from grpo import LOSSES, StepInfo, algo_arg, register_method

SCORES = {  # of --algo-args token_score: the columns that they are computed from
    "view": ("old_logps", "view_logps"),
    "entropy": ("old_logps", "entropies"),
    "random": (),
}
MAX_TOKEN_SCORE, ROUNDING = 10.0, 1e-6  # scores up to ROUNDING are 0: rounding must not choose among them


@dataclass(frozen=True)
class Settings:
    """VPPO and choices of tokens"""

    token_share: float = algo_arg(1.0, "share of tokens, the highest-scored, that keep their advantage; 1: all",
                                  above=0, most=1)
    token_score: str = algo_arg("view", "score of a token. view: how much the image matters (VPPO); entropy; random",
                                choices=tuple(SCORES))
    token_scope: str = algo_arg("response", "choose the tokens per response, or among all tokens of the step",
                                choices=("response", "step"))
    response_factor_min: float = algo_arg(1.0, "VPPO: factor on the advantages of the response with the lowest mean "
                                          "score; 1: off", above=0, most=1)


def token_scores(batch, kind: str, info: StepInfo) -> torch.Tensor:
    """Return the score of each token, (N,) float64; NaN for tokens that are not packed."""
    tokens = batch.tokens
    if kind == "entropy":
        return tokens.entropies.double()
    if kind == "view":
        x_N = (tokens.view_logps.double() - tokens.old_logps.double()).clamp(-20, 20)
        scores_N = (x_N.expm1() - x_N).clamp(max=MAX_TOKEN_SCORE)
        return scores_N.masked_fill(scores_N <= ROUNDING, 0.0)
    return random_numbers(batch, "token_score", info)


def choose_tokens(batch, scores_N: torch.Tensor, algo, info: StepInfo) -> torch.Tensor:
    """Return a mask of the ceil(token_share * n) highest scores of each response (of equal scores, the first tokens) or
    of the step (of equal scores, random ones). Tokens whose score is NaN are True; within a response all scores are NaN
    or none."""
    if algo.token_scope == "step":
        [n] = sum_over_ranks([float((~scores_N.isnan()).sum())], info)
        ties_N = 1e-9 * random_numbers(batch, "ties", info)  # a group's first tokens have equal scores
        known_N = (scores_N + ties_N).nan_to_num(-1.0)  # scores are 0 and more
        return scores_N.isnan() | top_over_ranks(known_N, math.ceil(algo.token_share * n), info)
    mask_N, counts = scores_N.isnan(), [sum(r.response_mask) for r in batch.rollouts]
    for mask, scores in zip(mask_N.split(counts), scores_N.split(counts), strict=True):
        n = math.ceil(algo.token_share * len(scores))
        mask[scores.sort(descending=True, stable=True).indices[:n]] = True
    return mask_N


def response_factors(scores_N: torch.Tensor, rollout_N: torch.Tensor, floor: float, info: StepInfo) -> torch.Tensor:
    """Return equation 5's factor of each token's response; 1 where the score is NaN or all responses are equal."""
    known_N = ~scores_N.isnan()
    rollouts, index_n, count = rollout_N[known_N].unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(rollouts), dtype=torch.float64).index_add(0, index_n, scores_N[known_N]) / count
    all_means = torch.cat(info.gather(means))
    factors_N = torch.ones_like(scores_N)
    if len(all_means) and all_means.max() > all_means.min():
        low, high = all_means.min(), all_means.max()
        normalised = (means - low) / (high - low)
        factors_N[known_N] = (floor + (1 - floor) * normalised / ((all_means - low) / (high - low)).mean())[index_n]
    return factors_N


def choose_advantages(advantages_N: torch.Tensor, batch, algo, info: StepInfo) -> torch.Tensor:
    """Return the advantages A' of the module's docstring. Responses without images keep theirs."""
    tokens = batch.tokens
    scores_N = token_scores(batch, algo.token_score, info)
    if algo.token_score == "view":
        scores_N = torch.where(tokens.n_images > 0, scores_N, torch.nan)
    factors_N = response_factors(scores_N, tokens.rollout, algo.response_factor_min, info)
    return advantages_N * factors_N * choose_tokens(batch, scores_N, algo, info)


def check_scores(algo) -> None:
    flags = f"--algo-args token_share={algo.token_share} response_factor_min={algo.response_factor_min}"
    need(LOSSES[algo.loss].per_token, f"{flags}: the tokens of a response get different advantages, but --loss "
         f"{algo.loss} couples them; use --loss clip")
    need(algo.old_policy == "trainer" or algo.token_score == "random",
         f"{flags}: scores come from the trainer's policy before the update; use old_policy=trainer")


for score, columns in SCORES.items():
    register_method(
        # table 5 and appendix B of the paper, on top of DAPO; its entropy penalty is worth more than the method (there:
        # table 10), so compare with DAPO with the same penalty
        presets={"vppo": {"token_share": 0.4, "response_factor_min": 0.9, "view_share": 0.5, "clip_high": 0.28,
                          "max_gen_batches": 10, "truncated": "penalise", "loss_agg": "seq", "entropy_coef": -0.06}},
        is_on=partial(lambda algo, score: algo.token_score == score
                      and min(algo.token_share, algo.response_factor_min) < 1, score=score),
        columns=columns, change_advantages=choose_advantages, check=check_scores, order=2,
        zero_without_advantage=score == "random",  # others compare all responses of the step
    )  # fmt: skip
