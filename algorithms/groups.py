r"""Other ways to compare the samples of a group.

OPO (arXiv:2505.23585, equation 8; --algo opo): A_i = r_i - sum_j n_j r_j / sum_j n_j, where n_j is the number of tokens
of sample j. On policy it has the least variance if the norm of a response's gradient grows with its length.

GDPO (arXiv:2601.05242, equations 4 to 7; --algo-args reward_weights=accuracy=1,format=0.2): each named reward is
normalized within the group (mean and standard deviation); their weighted sum is then divided by its standard deviation
over the step. A group with equal totals of different parts then has a signal, and the scale of a reward has no
effect.

PODS (arXiv:2504.13818; --algo-args train_samples=8): of the --group-size samples, train on those train_samples whose
rewards have the largest variance, k with the highest rewards and the rest with the lowest. Advantages compare these.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import pvariance
from typing import Any

import torch

from algorithms._tokens import sum_over_ranks
from errors import as_user_error, need
from grpo import PRESETS, StepInfo, algo_arg, group_advantages, register_method, sum_per_rollout
from utils import print0


@dataclass(frozen=True)
class Settings:
    """Comparison of a group's samples"""

    length_baseline: bool = algo_arg(False, "OPO: weight rewards by response length in the mean of a group")
    reward_weights: str | None = algo_arg(None, "GDPO: named rewards to normalize separately, as NAME=WEIGHT,...")
    train_samples: int | None = algo_arg(None, "PODS: number of samples of each prompt to train on, chosen so that "
                                         "their rewards vary most (default: all)", least=2)


def to_groups(values: Sequence[float], algo) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, algo.group_size)


def subtract_length_baseline(advantages_N: torch.Tensor, batch, algo, info: StepInfo) -> torch.Tensor:
    """Return OPO's advantages. Failed rewards are not compared, and a group with equal rewards keeps advantage 0."""
    rewards_PG = to_groups([r.reward for r in batch.rollouts], algo)
    graded_PG = ~rewards_PG.isnan()
    lengths_PG = to_groups([sum(r.response_mask) for r in batch.rollouts], algo) * graded_PG
    rewards_PG = rewards_PG.nan_to_num(0.0)
    baseline_P1 = (lengths_PG * rewards_PG).sum(1, keepdim=True) / lengths_PG.sum(1, keepdim=True).clamp(min=1)
    sums_B = sum_per_rollout(advantages_N.abs(), batch.tokens.rollout, len(batch.rollouts))
    has_signal_P1 = sums_B.view_as(rewards_PG).sum(1, keepdim=True) > 0
    return ((rewards_PG - baseline_P1) * graded_PG * has_signal_P1).flatten()[batch.tokens.rollout]


def parse_weights(text: str) -> dict[str, float]:
    """Return the weights of --algo-args reward_weights, by name."""
    pairs = re.findall(r"([^=,]+)=([^=,]+)", text)
    with as_user_error(ValueError, f"--algo-args reward_weights={text}: give NAME=WEIGHT,NAME=WEIGHT"):
        weights = {name: float(weight) for name, weight in pairs}
        need(",".join(map("=".join, pairs)) == text and len(weights) == len(pairs), "a name is missing or repeated")
        need(all(weight and math.isfinite(weight) for weight in weights.values()), "a weight is 0 or not finite")
    return weights


def gdpo_advantages(advantages_N: torch.Tensor, batch, algo, info: StepInfo) -> torch.Tensor:
    """Return GDPO's advantages. A response that lacks a reward gets no part for it; each step reports such rows."""
    sum_PG, compared_PG, lacking = 0.0, False, {}
    for name, weight in parse_weights(algo.reward_weights).items():
        rewards_PG = to_groups([r.rewards.get(name, torch.nan) for r in batch.rollouts], algo)
        graded_PG = ~rewards_PG.isnan()
        sum_PG = sum_PG + weight * group_advantages(rewards_PG, "grpo", "group", graded_PG=graded_PG)
        compared_PG = compared_PG | graded_PG
        lacking[name] = [r.prompt.uid for r in batch.rollouts if r.rewards and name not in r.rewards]
    n, squares = sum_over_ranks([float(compared_PG.sum()), (sum_PG**2).sum().item()], info)  # the mean is 0
    for name, *parts in zip(lacking, *(item.values() for item in info.gather(lacking)), strict=True):
        if uids := list(chain.from_iterable(parts)):
            print0(f"warning: --algo-args reward_weights: {len(uids)} responses of step {info.step + 1} have no reward "
                   f"{name!r}, the first of row {uids[0]!r}; they are not compared by it. Correct the name, or return "
                   "this reward for all rows")
    std = (squares / max(n - 1, 1)) ** 0.5
    return (sum_PG / (std + 1e-6)).flatten()[batch.tokens.rollout]


def most_varied(rewards: Sequence[float], m: int, seed: str = "") -> list[int]:
    """Return the indices of the m rewards with the largest variance, ascending: for some k the k highest and the m - k
    lowest (PODS, lemma 3.1). `seed` draws among equal rewards."""
    rng = random.Random(seed)
    order = sorted(range(len(rewards)), key=lambda i: (rewards[i], rng.random()))
    choices = [order[: m - k] + order[len(order) - k :] for k in range(m + 1)]
    best = max(choices, key=lambda chosen: pvariance([rewards[i] for i in chosen] or [0.0]))
    return sorted(best)


def downsample(rollouts: list[Any], algo) -> list[Any]:
    """Return the rollouts; those that PODS does not train on are copies without a reward."""
    kept = []
    for start in range(0, len(rollouts), algo.group_size):
        group = rollouts[start : start + algo.group_size]
        graded = [i for i, r in enumerate(group) if r.rewards]
        chosen = most_varied([group[i].reward for i in graded], min(algo.train_samples, len(graded)),
                             group[0].text + group[0].prompt.uid)
        unselected = set(graded) - {graded[i] for i in chosen}
        kept += [replace(r, rewards={}, finish_reason="unselected") if i in unselected else r
                 for i, r in enumerate(group)]
    return kept


def check_train_samples(algo) -> None:
    need(algo.train_samples <= algo.group_size,
         f"--algo-args train_samples={algo.train_samples} is more than --group-size {algo.group_size}; lower it")


def check_comparison(algo, flag: str, adv: str) -> None:
    need(algo.adv == adv and algo.norm_std is None and not algo.kl_in_reward,
         f"--algo-args {flag} replaces the advantages of --adv {adv}; use that, without norm_std and kl_in=reward")


def check_weights(algo) -> None:
    parse_weights(algo.reward_weights)
    check_comparison(algo, "reward_weights", "grpo")
    need(algo.max_gen_batches == 1 and algo.truncated != "penalise",
         "--algo-args reward_weights: dynamic sampling and length penalties are for the total reward; use "
         "--max-gen-batches 1 and --truncated keep or mask")


PRESETS["opo"] = {"adv": "dr_grpo", "length_baseline": True}
register_method(is_on=lambda algo: algo.length_baseline, change_advantages=subtract_length_baseline,
                check=partial(check_comparison, flag="length_baseline", adv="dr_grpo"), order=0)
register_method(is_on=lambda algo: algo.reward_weights is not None, change_advantages=gdpo_advantages,
                check=check_weights, zero_without_advantage=False, order=0)
register_method(is_on=lambda algo: algo.train_samples is not None, select_rollouts=downsample,
                check=check_train_samples)
