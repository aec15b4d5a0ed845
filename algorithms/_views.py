"""A second view of an image, at the size that the model sees: the same number of tokens, with less or other content.

Methods compare the policy's log-probabilities given the image with those given a view of it. A view is a pure function
of the image and a seed, so a resumed run repeats it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from PIL import Image

from layers.vision import ImageInput
from packing import MicroBatch
from utils import derive_seed

VIEWS = ("masked", "noise", "blank")


def masked_view(image: ImageInput, share: float, *seed: int | str) -> ImageInput:
    """Return the image with each patch of the vision tower black with probability `share`, independently (PAPO,
    arXiv:2507.06448, section 3.2). Black pixels become what the image processor makes of black, not zeros, which would
    be the mean colour. `seed` and the content of the image select the patches."""
    patcher, side = image.patcher, image.patcher.patch
    rng = np.random.default_rng(derive_seed(*seed, "masked", image.key))
    visible = rng.random(image.grid_thw) >= share
    # a patch of a video is the same place in several frames, which are one below the other
    visible = np.concatenate(visible.repeat(patcher.slice_frames, axis=0)[: patcher.n_frames])
    pixels = np.asarray(image.image) * np.kron(visible, np.ones((side, side), dtype=bool))[..., None]
    return replace_pixels(image, Image.fromarray(pixels), f"masked{share:g}/{'/'.join(map(str, seed))}")


def blank_view(image: ImageInput) -> ImageInput:
    """Return a white image of the same size, as for `eval.py --ablate blank`."""
    white = Image.new("RGB", image.image.size, "white")
    return replace(image, key=f"blank view-{image.grid_thw}-{white.size}", image=white)


@cache
def noise_levels() -> np.ndarray:
    """Return the products of 1 - beta up to each of 1000 diffusion steps (NoisyRollout, arXiv:2504.13055, appendix; its
    code: beta from 1e-5 to 0.005 along a sigmoid)."""
    betas = 1 / (1 + np.exp(-np.linspace(-6, 6, 1000))) * (0.005 - 1e-5) + 1e-5
    return np.cumprod(1 - betas)


def noisy_view(image: ImageInput, level: int, *seed: int | str) -> ImageInput:
    """Return the image after `level` of 1000 diffusion steps: sqrt(a) * x + sqrt(1 - a) * Gaussian noise with pixels x
    from 0 to 1 and the product a of `noise_levels`, clipped to 0 and 1. Level 0 is the image itself."""
    if level <= 0:
        return image
    remaining = noise_levels()[level]
    rng = np.random.default_rng(derive_seed(*seed, "noise", image.key))
    pixels = np.asarray(image.image, dtype=np.float32) / 255
    noise = rng.standard_normal(pixels.shape, dtype=np.float32)
    noised = np.clip(remaining**0.5 * pixels + (1 - remaining) ** 0.5 * noise, 0, 1)
    rounded = Image.fromarray((noised * 255).round().astype(np.uint8))
    return replace_pixels(image, rounded, f"noise{level}/{'/'.join(map(str, seed))}")


def replace_pixels(image: ImageInput, pixels: Image.Image, name: str) -> ImageInput:
    """Return an image with other pixels. Its key differs, so that a cache never returns the image's own features; it is
    not cached, because it occurs only once."""
    return replace(image, key=f"{image.key}|{name}", image=pixels, keep=False)


def view_micro_batch(micro: MicroBatch, kind: str, amount: float, seed: Sequence[int | str]) -> MicroBatch:
    """Return the micro-batch with a view of each of its images; tokens, positions and attention are the same, but no
    experts are replayed. `kind` is one of VIEWS, `amount` from 0 to 1 the share of masked patches or of the diffusion
    steps. A view depends on nothing but its image and the seed, so neither the micro-batch nor the rank changes it."""
    views = {
        "masked": lambda image: masked_view(image, amount, *seed),
        "noise": lambda image: noisy_view(image, round(999 * amount), *seed),
        "blank": blank_view,
    }
    return replace(micro, images=list(map(views[kind], micro.images)), experts_T=None)
