r"""NoisyRollout (arXiv:2504.13055): a share of each group is sampled from noised images, and trained as if it had been
sampled from the images themselves: the policy learns from what it says when it sees less. All samples of a group are
compared with each other, and there is no importance weight for the noise (equation 2).

The noise of step t of T is that of diffusion step

    level(t) = noise_level * (1 - 1 / (1 + exp(-noise_slope * (t / T - noise_midpoint))))        (equation 3)

of 1000. With the paper's slope of 30 it is above 95% until 0.57 of the run, at half at 2/3, and below 5% from 0.77
on. A level of 550 destroyed the training in the paper (table 6), so do not raise it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from algorithms._views import noisy_view
from errors import need
from grpo import algo_arg, register_method


@dataclass(frozen=True)
class Settings:
    """NoisyRollout"""

    noise_level: float = algo_arg(0.0, "initial noise: number of diffusion steps, of 1000, applied to the images; "
                                  "0: off", least=0, most=999)
    noise_samples: float = algo_arg(0.5, "share of the samples of each prompt that see noised images", above=0, most=1)
    noise_slope: float = algo_arg(30.0, "steepness of the decay of the noise over the run", above=0)
    noise_midpoint: float = algo_arg(2 / 3, "fraction of the run (0 to 1) at which the noise has fallen to half of "
                                     "noise_level", least=0)


def noise_level(algo, step: int, steps: int) -> int:
    """Return the diffusion step of a 0-based training step of `steps`."""
    x = algo.noise_slope * ((step + 1) / steps - algo.noise_midpoint)
    return int(algo.noise_level / (1 + math.exp(min(x, 700.0))))


def add_noised_prompts(prompts: Sequence, algo, seed: int, step: int, steps: int) -> list:
    """Return the prompts, each with a second one with noised images, from which the last samples are drawn."""
    level = noise_level(algo, step, steps)
    if level == 0:
        return list(prompts)
    n = round(algo.noise_samples * algo.group_size)
    changed = []
    for prompt in prompts:
        if prompt.images:
            images = [noisy_view(image, level, seed, step, prompt.uid) for image in prompt.images]
            prompt = replace(prompt, n_noised=n)
            prompt.noised = replace(prompt, images=images, view_of=prompt)
        changed.append(prompt)
    return changed


def check_noise(algo) -> None:
    need(algo.tis_cap is None and algo.ratio_mask is None and algo.old_policy == "trainer",
         f"--algo-args noise_level={algo.noise_level} cannot be combined with tis_cap, ratio_mask or "
         "old_policy=rollout: the engine's log-probabilities are those for the noised images; remove these settings")
    need(algo.noise_level >= 1, f"--algo-args noise_level={algo.noise_level} counts diffusion steps, of 1000; use 500")
    need(round(algo.noise_samples * algo.group_size) > 0,
         f"--algo-args noise_samples={algo.noise_samples} of --group-size {algo.group_size} rounds to 0 noised "
         "samples; raise it")


register_method(
    presets={"noisy": {"noise_level": 500.0}}, is_on=lambda algo: algo.noise_level > 0,
    change_prompts=add_noised_prompts, check=check_noise,
)  # fmt: skip
