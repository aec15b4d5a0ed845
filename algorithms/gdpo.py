"""GDPO (arXiv:2601.05242, equations 4 to 7; --algo-args reward_weights=accuracy=1,format=0.2): each named reward is
normalized within the group (mean and standard deviation); their weighted sum is then divided by its standard deviation
over the step. A group with equal totals of different parts then has a signal, and the scale of a reward has no
effect."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from algorithms._tokens import sum_over_ranks
from errors import as_user_error, need
from grpo import StepInfo, algo_arg, group_advantages, register_method
from utils import print0


@dataclass(frozen=True)
class Settings:
    """GDPO"""

    reward_weights: str | None = algo_arg(None, "GDPO: named rewards to normalize separately, as NAME=WEIGHT,...")


def to_groups(values: Sequence[float], algo) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, algo.group_size)


def parse_weights(text: str) -> dict[str, float]:
    """Return the weights of --algo-args reward_weights, by name."""
    pairs = re.findall(r"([^=,]+)=([^=,]+)", text)
    with as_user_error(ValueError, f"--algo-args reward_weights={text}: give NAME=WEIGHT,NAME=WEIGHT"):
        weights = {name: float(weight) for name, weight in pairs}
        need(",".join(map("=".join, pairs)) == text and len(weights) == len(pairs), "a name is missing or repeated")
        need(all(weight and math.isfinite(weight) for weight in weights.values()), "a weight is 0 or not finite")
    return weights


def gdpo_advantages(advantages_N: torch.Tensor, batch, algo, info: StepInfo) -> torch.Tensor:
    """Return GDPO's advantages. A response without a named reward is left out of that reward's normalization, and a
    warning names its row."""
    sum_PG, compared_PG, without = 0.0, False, {}
    for name, weight in parse_weights(algo.reward_weights).items():
        rewards_PG = to_groups([r.rewards.get(name, torch.nan) for r in batch.rollouts], algo)
        graded_PG = ~rewards_PG.isnan()
        sum_PG = sum_PG + weight * group_advantages(rewards_PG, "grpo", "group", graded_PG=graded_PG)
        compared_PG = compared_PG | graded_PG
        without[name] = [r.prompt.uid for r in batch.rollouts if r.rewards and name not in r.rewards]
    n, squares = sum_over_ranks([float(compared_PG.sum()), (sum_PG**2).sum().item()], info)  # the mean is 0
    for name, *parts in zip(without, *(item.values() for item in info.gather(without)), strict=True):
        if uids := list(chain.from_iterable(parts)):
            print0(f"warning: --algo-args reward_weights: in step {info.step + 1}, {len(uids)} responses have no "
                   f"reward {name!r}, the first one of row {uids[0]!r}; its normalization leaves them out. Correct the "
                   "name, or return this reward for all rows")
    std = (squares / max(n - 1, 1)) ** 0.5
    return (sum_PG / (std + 1e-6)).flatten()[batch.tokens.rollout]


def check_weights(algo) -> None:
    parse_weights(algo.reward_weights)
    need(algo.adv == "grpo" and algo.norm_std is None and not algo.kl_in_reward, "--algo-args reward_weights replaces "
         "the advantages of --adv grpo; use --adv grpo, without norm_std and kl_in=reward")
    need(algo.max_gen_batches == 1 and algo.truncated != "penalise",
         "--algo-args reward_weights: dynamic sampling and length penalties are for the total reward; use "
         "--max-gen-batches 1 and --truncated keep or mask")


register_method(is_on=lambda algo: algo.reward_weights is not None, change_advantages=gdpo_advantages,
                check=check_weights, zero_without_advantage=False, order=0)
