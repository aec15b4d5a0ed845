r"""PAPO, perception-aware policy optimization (arXiv:2507.06448): the loss also rewards a difference between what the
policy says with the image and with most of it masked.

    loss of a token = ... - perception_coef * KL(policy given the image || policy given the masked image)

The second policy is the one before the update, as in the authors' code, so its log-probabilities m are constants. Each
token gives an estimate of the KL from d = logp - m (grpo.kl):

    k2   d^2 / 2          on policy, its gradient is that of the KL in the paper (equation 2)
    k3   exp(-d) - 1 + d  the authors' code; its gradient is that of the reverse KL, KL(masked || own)

The paper's entropy terms: the one of the policy itself is exact here (--entropy-coef, below 0); the authors use
-log-probabilities of sampled tokens, whose mean gradient on policy is 0. The one of the masked policy has no gradient
in their code either, as m is constant.
"""

from dataclasses import dataclass

import torch

from errors import need
from grpo import KL_ESTIMATORS, algo_arg, kl, register_method


@dataclass(frozen=True)
class Settings:
    """PAPO"""

    perception_coef: float = algo_arg(0.0, "PAPO: weight of the KL between the policies that see the image and the "
                                      "masked image; 0: off", least=0)
    perception_kl: str = algo_arg("k2", "PAPO: estimator of that KL: k2, as in the paper, or k3, as in its code",
                                  choices=KL_ESTIMATORS[1:])
    perception_clamp: float = algo_arg(10.0, "PAPO: cap on a token's estimate of the KL; tokens above it get no "
                                       "gradient from this term", above=0)


def perception_loss(logp_K: torch.Tensor, tokens, algo) -> torch.Tensor:
    """Return PAPO's term of each token's loss, (K,); 0 for responses without an image."""
    close_K = torch.maximum(logp_K, tokens.view_logps - 50)  # k3 would overflow; it is above any clamp there
    estimate_K = kl(close_K, tokens.view_logps, algo.perception_kl).clamp(max=algo.perception_clamp)
    return -algo.perception_coef * torch.where(tokens.n_images > 0, estimate_K, 0.0)


def check_perception(algo) -> None:
    need(algo.old_policy == "trainer",
         f"--algo-args perception_coef={algo.perception_coef} needs the log-probabilities of the trainer's old policy; "
         "use old_policy=trainer")


register_method(
    # the settings of PAPO_D-7B: table 6 of the paper, on top of DAPO
    presets={"papo": {"perception_coef": 0.01, "clip_high": 0.28, "max_gen_batches": 10, "truncated": "penalise",
                      "entropy_coef": -0.03}},
    is_on=lambda algo: algo.perception_coef > 0, columns=("view_logps",), token_loss=perception_loss,
    check=check_perception, zero_without_advantage=False,
)  # fmt: skip
