"""Ablated images of an evaluation, which measure how much of a model's accuracy depends on the images."""

import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from errors import need
from prepare_data import IMAGE_PLACEHOLDER, Example, decode_image
from rollout import ResetFn, identity
from sources.images import encode_png
from utils import derive_seed


class Ablation:
    """The images that the model sees instead of an example's: `kind` is a key of ABLATIONS, or "" for its own."""

    def __init__(self, kind: str, examples: Sequence[Example], reset_fn: ResetFn, seed: int):
        self.blank = kind == "blank"  # images from an environment are blanked too
        change = {"shuffled": self.shuffle_images, "none": remove_images}.get(kind, identity)
        self.reset_fn = lambda example: change(reset_fn(example))
        self.seed = seed
        self.sources: dict[Any, tuple[Example, int]] = {}  # key of a distinct image -> its example and index
        if kind == "shuffled":
            for example in map(reset_fn, examples):
                self.sources |= {key: (example, i) for i, key in enumerate(image_keys(example))}

    def shuffle_images(self, example: Example) -> Example:
        """Return the example with each image replaced by one of another example, stretched to the size of the replaced
        image: the number and positions of its tokens are the same, only the content differs. Raise UserError if no
        example has other images."""
        own = set(image_keys(example))
        if not own:
            return example
        message = f"row {example.uid!r}: --ablate shuffled: no example has other images; omit shuffled or raise --limit"
        need(not own.issuperset(self.sources), message)
        images = []
        keys = list(self.sources)
        seen = {pixels(image) for image in example.pil_images}  # another file may hold the same image
        for i, size in enumerate(example.image_sizes):
            start = random.Random(derive_seed(self.seed, "shuffled", example.uid, i)).randrange(len(keys))
            sources = (self.sources[key] for key in keys[start:] + keys[:start] if key not in own)
            candidates = (decode_image(source.images[index]) for source, index in sources)
            other = next((image for image in candidates if pixels(image) not in seen), None)
            need(other is not None, message)
            images.append(encode_png(other.resize(size, Image.Resampling.BICUBIC), compress_level=1))
        return replace(example, images=images)


def image_keys(example: Example) -> list:
    """Return a key of each image's content."""
    sums = getattr(example.images, "sums", None)  # set for images that are read from their file only when needed
    return list(zip(sums, example.image_sizes, strict=True)) if sums else [zlib.crc32(data) for data in example.images]


def pixels(image: Image.Image) -> tuple:
    """Return the size and a checksum of the pixels, which do not depend on the file format."""
    return image.size, zlib.crc32(image.tobytes())


def remove_images(example: Example) -> Example:
    """Return the example without its images and their placeholders."""
    messages = [m | {"content": m["content"].replace(IMAGE_PLACEHOLDER, "")} for m in example.messages]
    return replace(example, messages=messages, images=[])

