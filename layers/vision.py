"""Images and videos: their patches, made on the device of the vision tower, and the tower's features, computed once per
image or slice of a video (layers/video.py).

Axes: H hidden size, I image tokens.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from utils import copy_together


@dataclass(frozen=True, eq=False)
class Patcher:
    """A function from images at their final size to patches, on any device. It looks up each byte in a table, and so
    gives exactly the values of the model's own image processor."""

    table_CB: Tensor  # (channels, 256) fp32, see model.Processor._make_patcher
    patch: int  # side of a patch in pixels
    merge: int  # side of an image token in patches
    slice_frames: int  # frames in a patch; the last frame of the input is repeated if one is missing
    n_frames: int = 1  # frames of the input, which are one below the other

    def __call__(self, image: Image.Image, device: torch.device | str = "cpu") -> Tensor:
        """Return the patches of an RGB image, (patches, channels * slice_frames * patch * patch) fp32."""
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(-1, len(self.table_CB))
        pixels, table_CB = copy_together([pixels, self.table_CB], torch.device(device))
        planes = table_CB.gather(1, pixels.t().long()).view(len(table_CB), self.n_frames, -1)
        planes = torch.cat([planes, planes[:, -1:].expand(-1, -self.n_frames % self.slice_frames, -1)], dim=1)
        rows, columns = (n // (self.patch * self.merge) for n in (image.height // self.n_frames, image.width))
        inner = (self.merge, self.patch)
        patches = planes.view(len(planes), -1, self.slice_frames, rows, *inner, columns, *inner)
        return patches.permute(1, 3, 6, 4, 7, 0, 2, 5, 8).flatten(0, 4).flatten(1)


@dataclass(eq=False)
class ImageInput:
    """An image or a video at the size that the model sees. `key` identifies its content.

    Patches are eight times as large as the image, so they are not kept but made whenever the vision tower runs, on its
    device. This is rare for a frozen tower, whose features are cached.
    """

    key: str
    image: Image.Image  # RGB; the frames of a video are one below the other
    grid_thw: tuple[int, int, int]  # in patches
    n_tokens: int  # image tokens of the language model
    patcher: Callable[[Image.Image, torch.device | str], Tensor]
    keep: bool = True  # whether a VisionCache may keep its features; False for images that occur only once
    fps: float = 0.0  # frames per second of a video; 0: an image
    interval: float = 1.0  # distance between consecutive slices of a video in M-RoPE's temporal positions
    separate: bool = False  # whether the model reads the slices of a video as images

    @property
    def kind(self) -> str:
        return "video" if self.fps else "image"

    @property
    def frames(self) -> np.ndarray:
        """Return the frames of a video, (frames, height, width, 3) uint8."""
        return np.array(self.image).reshape(self.patcher.n_frames, -1, self.image.width, 3)

    @property
    def parts(self) -> list["ImageInput"]:
        """Return the slices of a video if they are separate, else only the input itself."""
        return self.slices if self.separate else [self]

    @cached_property
    def slices(self) -> list["ImageInput"]:
        """Return the slices of a video as inputs."""
        frames, n = self.frames, self.patcher.slice_frames
        pairs = (frames[start : start + n] for start in range(0, len(frames), n))
        return [make_video_input(pair, self.fps, self.patcher, self.keep) for pair in pairs]

    def pixel_values(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the patches that the vision tower reads, (patches, patch dim) fp32."""
        return self.patcher(self.image, device)


def make_video_input(
    frames: np.ndarray, fps: float, patcher: Patcher, keep: bool = True, interval: float = 1.0, separate: bool = False
) -> ImageInput:
    """Return a video as an input. frames: (frames, height, width, 3) uint8, at the size that the model sees."""
    t, (h, w) = -(-len(frames) // patcher.slice_frames), (side // patcher.patch for side in frames.shape[1:3])
    key, image = f"{hashlib.sha1(frames).hexdigest()}-{frames.shape}-{fps}", Image.fromarray(np.concatenate(frames))
    patcher = replace(patcher, n_frames=len(frames))
    return ImageInput(key, image, (t, h, w), t * h * w // patcher.merge**2, patcher, keep, fps, interval, separate)


class VisionCache:
    """A least-recently-used cache of image features by content. It is only valid while the tower does not change."""

    def __init__(self, max_bytes: float):
        self.max_bytes, self.bytes = max_bytes, 0
        self.entries: OrderedDict[str, tuple[Tensor, ...]] = OrderedDict()

    def get(self, key: str) -> tuple[Tensor, ...] | None:
        """Return the features of an image, or None if they are not cached."""
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def put(self, key: str, layers: tuple[Tensor, ...]) -> None:
        """Add the features of an image, and remove the least recently used ones beyond max_bytes."""
        layers = tuple(layer.clone() for layer in layers)  # slices would keep the whole batch alive
        self.entries[key] = layers
        self.bytes += sum(layer.nbytes for layer in layers)
        while self.bytes > self.max_bytes:
            self.bytes -= sum(layer.nbytes for layer in self.entries.popitem(last=False)[1])


def vision_features(hf, images: Sequence[ImageInput], cache: VisionCache | None = None) -> tuple[Tensor, list[Tensor]]:
    """Return the features of the images, (I, H), and those of each deepstack layer, (I, H) each. Equal images are
    computed once."""
    images = [part for image in images for part in image.parts]
    unique = {image.key: image for image in images}
    layers_by_key = {key: cache.get(key) if cache else None for key in unique}
    missing = [image for key, image in unique.items() if layers_by_key[key] is None]
    # Rounding depends on the other images in a batch. Cached features must not depend on when they were computed, or a
    # resumed run, whose cache is empty, would differ from an uninterrupted one: so with a cache each image is a batch.
    # An image of one token is computed twice in its batch: a single row would be multiplied as a vector, where rounding
    # depends on the weights' position in memory.
    batches = [[image] * (2 if image.n_tokens == 1 else 1) for image in missing] if cache else [missing]
    device = hf.get_input_embeddings().weight.device
    for batch in batches:
        pixels = torch.cat([image.pixel_values(device) for image in batch])
        grids = torch.tensor([image.grid_thw for image in batch], device=device)
        out = hf.model.get_image_features(pixels, grids, return_dict=True)
        layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
        sizes = [image.n_tokens for image in batch]  # transformers 5.17 does not split deepstack layers by image
        layers = [layer.split(sizes) if torch.is_tensor(layer) else layer for layer in layers]
        for i, image in enumerate(dict.fromkeys(batch)):
            layers_by_key[image.key] = tuple(layer[i] for layer in layers)
            if cache and image.keep:
                cache.put(image.key, layers_by_key[image.key])
    pooled, *deep = (torch.cat(parts) for parts in zip(*(layers_by_key[image.key] for image in images), strict=True))
    return pooled, deep
