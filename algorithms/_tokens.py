"""Helpers of methods that choose tokens of a step, over all ranks."""

import math

import torch

from grpo import StepInfo
from utils import derive_seed


def random_numbers(batch, name: str, info: StepInfo) -> torch.Tensor:
    """Return a number from 0 to 1 for each token, (N,) float64, which depends only on its response and the step."""
    parts = [torch.zeros(0, dtype=torch.float64)]
    for r in batch.rollouts:
        generator = torch.Generator().manual_seed(
            derive_seed(info.seed, name, info.step, r.prompt.uid, r.sample_index)
        )
        parts.append(torch.rand(sum(r.response_mask), dtype=torch.float64, generator=generator))
    return torch.cat(parts)


def top_over_ranks(scores_n: torch.Tensor, n: int, info: StepInfo) -> torch.Tensor:
    """Return a mask of the n highest scores of all ranks, and of those equal to the last of them; collective."""
    found = torch.cat(info.gather(scores_n.sort(descending=True).values[:n])).sort(descending=True).values
    return scores_n >= found[:n][-1] if n and len(found) else torch.zeros_like(scores_n, dtype=torch.bool)


def sum_over_ranks(values: list[float], info: StepInfo) -> list[float]:
    """Return the sums over all ranks; collective."""
    return [math.fsum(parts) for parts in zip(*info.gather(values), strict=True)]
