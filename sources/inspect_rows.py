"""Text descriptions of a data file for the terminal: single rows, and statistics over all rows."""

import io
import json
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
from PIL import Image

from errors import printable


def print_example(e: Any) -> None:
    """Print a row (an Example) in full."""
    print(f"--- {printable(e.uid)}  [{printable(e.data_source)}]  answer: {printable(e.ground_truth)}")
    for m in e.messages:
        print(f"{m['role']}:", "\n".join(printable(line, 10_000) for line in m["content"].split("\n")))
    for data, (width, height) in zip(e.images, e.image_sizes, strict=True):  # the header's size may be before rotation
        with Image.open(io.BytesIO(data)) as image:
            print(f"image: {width}x{height} {image.format} {image.mode}, {len(data)} bytes")
    for video, (n, fps, (width, height)) in zip(e.videos, e.video_sizes, strict=True):
        print(f"video: {n} frames of {width}x{height}, {fps:g} per second, {sum(map(len, video.frames))} bytes")
    print(f"extra: {printable(json.dumps(e.extra, ensure_ascii=False, default=str), 10_000)}")


def print_statistics(examples: list, model: str | None, min_pixels: int | None, max_pixels: int | None) -> None:
    """Print counts and distributions over the rows; with a model, also of the lengths of their prompts in tokens."""
    print("data_source:", dict(Counter(e.data_source for e in examples).most_common()))
    for key in ("split", "answer_type"):
        if counts := Counter(str(e.extra[key]) for e in examples if key in e.extra):
            print(f"{key}:", dict(counts.most_common()))
    for kind in ("images", "videos"):
        print(f"{kind} per row:", dict(sorted(Counter(len(getattr(e, kind)) for e in examples).items())))
    sizes = list(chain.from_iterable(e.image_sizes for e in examples))
    figures = {"image width": [width for width, _ in sizes], "image height": [height for _, height in sizes]}
    figures["image bytes"] = [len(data) for e in examples for data in e.images]
    videos = list(chain.from_iterable(e.video_sizes for e in examples))
    figures["frames per video"] = [n for n, _, _ in videos]
    figures["frames per second"] = [fps for _, fps, _ in videos]
    if model:
        from model import Processor

        processor = Processor(model, min_pixels=min_pixels, max_pixels=max_pixels)
        tokens = [processor.count_tokens(e.messages, e.image_sizes, e.video_sizes) for e in examples]
        figures["prompt tokens, image tokens included"] = tokens
    for name, values in figures.items():
        if values:
            low, mid, p90, high = np.percentile(values, [0, 50, 90, 100], method="nearest")
            print(f"{name}: min {low}, median {mid}, p90 {p90}, max {high}")
