"""Videos: their text in a prompt, and their input to the model.

A slice of a video is two consecutive frames; if their number is odd, the last one is repeated. The vision tower sees a
slice as one image and never looks across slices. Families with timestamps (model.Family) read each slice as an image,
after its time in the prompt's text. Other families read the whole video as one block of tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from errors import need
from layers.vision import ImageInput, make_video_input


def video_text(processor: Any, n_frames: int, fps: float) -> str:
    """Return the text that replaces the placeholder of a video in a prompt, with one <|image_pad|> for each of its
    ImageInput.parts. Raise UserError for a family whose way to write videos is not known."""
    need(processor.family,
         "the data has videos, which are only supported with models whose type is in model.FAMILIES")
    if not processor.family.timestamps:
        return "<|image_pad|>"
    n, text = processor.patcher.slice_frames, ""
    for start in range(0, n_frames, n):  # the time of a slice is the mean of its first and its last frame's
        seconds = (start / fps + (min(start + n, n_frames) - 1) / fps) / 2
        text += f"<{seconds:.1f} seconds><|vision_start|><|image_pad|><|vision_end|>"
    return text


def frames_to_patches(processor: Any, frames: Iterable[ImageInput], fps: float) -> ImageInput:
    """Return a video as the model sees it, from its frames, which are all of the same size."""
    seconds = float(np.float32(processor.patcher.slice_frames / fps))  # per slice; engines round it to float32
    interval = seconds * processor.tokens_per_second if processor.tokens_per_second else 1.0
    separate, pixels = processor.family.timestamps, np.stack([frame.image for frame in frames])
    return make_video_input(pixels, fps, processor.patcher, True, interval, separate)


def encode_prompt(
    processor: Any, messages: Sequence[dict], images: Sequence[ImageInput], tokenize: Callable | None = None
) -> tuple[list[int], list[ImageInput], list[int]]:
    """Return (token ids, images and videos in the order of their tokens, token ids with one placeholder per image or
    video). The order in `images` only matters among images and among videos. Raise UserError if the numbers of
    placeholders and of images or videos differ. `tokenize` is a method of the processor (default: tokenize_messages).
    """
    tokenize = tokenize or processor.tokenize_messages
    unexpanded_ids = tokenize(messages)
    videos = [image for image in images if image.fps]
    remaining = {processor.image_token_id: iter(image for image in images if not image.fps),
                 processor.video_token_id: iter(videos)}
    ordered = [islice(remaining[token], 1) for token in unexpanded_ids if token in remaining]
    images = list(chain(*ordered, *remaining.values()))
    ids = tokenize(messages, [(video.patcher.n_frames, video.fps) for video in videos])
    parts = [part for image in images for part in image.parts]
    return processor.expand_image_tokens(ids, parts), images, unexpanded_ids
