"""What an evaluation shows a model instead of the examples' own images: how much of its accuracy comes from seeing?"""

import io
import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from errors import need
from prepare_data import IMAGE_PLACEHOLDER, Example, decode_image
from rollout import ResetFn, identity
from utils import derive_seed


class Ablation:
    """What the model sees instead of an example's images: `kind` is one of IMAGES, or "" for its own."""

    def __init__(self, kind: str, examples: Sequence[Example], start_of: ResetFn, seed: int):
        self.blank = kind == "blank"  # also of what an environment shows
        change = {"shuffled": self.shuffle_images, "none": remove_images}.get(kind, identity)
        self.start_of = lambda example: change(start_of(example))
        self.seed = seed
        self.places: dict[Any, tuple[Example, int]] = {}  # of each distinct image
        if kind == "shuffled":
            for example in map(start_of, examples):
                self.places |= {key: (example, i) for i, key in enumerate(image_keys(example))}

    def shuffle_images(self, example: Example) -> Example:
        """Each image is that of another example, stretched to the size of the one whose place it takes: as many tokens
        at the same positions, only other content."""
        own = set(image_keys(example))
        if not own:
            return example
        told = f"row {example.uid!r}: --ablate shuffled: no example has other images; leave it out, or raise --limit"
        need(not own.issuperset(self.places), told)
        images = []
        order = list(self.places)
        seen = {pixels(image) for image in example.pil_images}  # the same image may be another file elsewhere
        for i, size in enumerate(example.image_sizes):
            start = random.Random(derive_seed(self.seed, "shuffled", example.uid, i)).randrange(len(order))
            places = (self.places[key] for key in order[start:] + order[:start] if key not in own)
            others = (decode_image(found.images[place]) for found, place in places)
            other = next((image for image in others if pixels(image) not in seen), None)
            need(other is not None, told)
            images.append(encode_png(other.resize(size, Image.Resampling.BICUBIC)))
        return replace(example, images=images)


def image_keys(example: Example) -> list:
    """What tells each of its images from others."""
    sums = getattr(example.images, "sums", None)  # of images that stay in their file
    return list(zip(sums, example.image_sizes, strict=True)) if sums else [zlib.crc32(data) for data in example.images]


def pixels(image: Image.Image) -> tuple:
    return image.size, zlib.crc32(image.tobytes())


def remove_images(example: Example) -> Example:
    messages = [m | {"content": m["content"].replace(IMAGE_PLACEHOLDER, "")} for m in example.messages]
    return replace(example, messages=messages, images=[])


def encode_png(image: Image.Image) -> bytes:
    image.save(file := io.BytesIO(), format="PNG", compress_level=1)
    return file.getvalue()
