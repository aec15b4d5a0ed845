"""The second view of the images that methods compare with, and the metric vision/kl: how much the images matter to what
the policy says."""

from dataclasses import dataclass

from algorithms._views import VIEWS
from grpo import algo_arg, register_method


@dataclass(frozen=True)
class Settings:
    """Second view of images"""

    view: str = algo_arg("masked", "second view of images, used by papo, vppo and vision_kl", choices=VIEWS)
    view_share: float = algo_arg(0.6, "masked: share of black patches; noise: diffusion steps / 1000", above=0,
                                 most=1)
    vision_kl: bool = algo_arg(False, "log vision/kl, the mean of log p(token | image) - log p(token | second view); "
                               "one more forward pass per step")


register_method(is_on=lambda algo: algo.vision_kl, columns=("view_logps",))
