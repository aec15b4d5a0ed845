"""T-GRPO (Video-R1, arXiv:2503.21776): right answers get a bonus if the order of a video's frames helped to find them.

Besides the samples that see a video as it is, some see its frames in random order; nothing is trained on these. If the
accuracy with the right order is at least temporal_ratio of that with the random one, right answers get temporal_bonus.
The authors' code has a ratio of 0.8, so it also gives the bonus if the order made no difference. Times in the prompt
are not permuted.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from PIL import Image

from algorithms._views import replace_pixels
from errors import need
from grpo import algo_arg, register_method
from utils import derive_seed

RIGHT = 0.1  # accuracy above which the authors' code counts an answer as right


@dataclass(frozen=True)
class Settings:
    """T-GRPO"""

    temporal_bonus: float = algo_arg(0.0, "T-GRPO: reward added to right answers if temporal_ratio is reached; 0: off",
                                     least=0)
    temporal_samples: float = algo_arg(1 / 3, "share of the samples of each prompt that see the frames of its videos "
                                       "in random order; nothing is trained on them", above=0, most=1)
    temporal_ratio: float = algo_arg(0.8, "give the bonus if the accuracy with ordered frames is at least this times "
                                     "that with permuted ones", least=0)


def n_permuted(algo) -> int:
    return round(algo.temporal_samples * algo.group_size)


def add_permuted_prompts(prompts: Sequence, algo, seed: int, step: int, steps: int) -> list:
    """Return the prompts. Those with a video also get a copy with permuted frames, from which the last samples of the
    group are drawn."""

    def permute(video: Any) -> Any:
        if not video.fps:
            return video
        n, rng = len(video.frames), random.Random(derive_seed(seed, "permuted", step, video.key))
        order = rng.sample(range(n), n)
        return replace_pixels(video, Image.fromarray(np.concatenate(video.frames[order])), f"permuted{order}")

    changed = []
    for prompt in prompts:
        if any(image.fps for image in prompt.images):
            prompt = replace(prompt, n_noised=n_permuted(algo))
            prompt.noised = replace(prompt, images=list(map(permute, prompt.images)), view_of=prompt)
        changed.append(prompt)
    return changed


def give_bonus(rollouts: list[Any], algo) -> list[Any]:
    """Return the rollouts. Those that saw permuted frames are copies without a reward; right answers of the others are
    copies with the bonus if their group earns it."""
    changed = []
    for start in range(0, len(rollouts), algo.group_size):
        group = rollouts[start : start + algo.group_size]
        accuracies = [[r.accuracy for r in group if r.rewards and r.noised == permuted] for permuted in (False, True)]
        earned = all(accuracies) and fmean(accuracies[0]) >= algo.temporal_ratio * fmean(accuracies[1])
        for r in group:
            if r.noised:
                r = replace(r, rewards={}, finish_reason="unselected")
            elif earned and r.rewards and r.accuracy > RIGHT:
                bonus = algo.temporal_bonus
                r = replace(r, rewards=r.rewards | {"temporal": bonus, "reward": r.reward + bonus})
            changed.append(r)
    return changed


def check_temporal(algo) -> None:
    need(0 < n_permuted(algo) < algo.group_size - 1,
         f"--algo-args temporal_samples={algo.temporal_samples:.3g} with --group-size {algo.group_size} permutes "
         f"the frames of {n_permuted(algo)} per group, but 1 must be permuted and 2 must not; change one of the two")
    others = [key for key in ("noise_level", "train_samples", "reward_weights") if getattr(algo, key, None)]
    need(not others, f"--algo-args temporal_bonus cannot be combined with {' and '.join(others)}; remove it")


register_method(
    presets={"t_grpo": {"temporal_bonus": 0.3}}, is_on=lambda algo: algo.temporal_bonus > 0,
    change_prompts=add_permuted_prompts, select_rollouts=give_bonus, check=check_temporal,
)  # fmt: skip
