"""What a data file holds, as text for a terminal."""

import io
import json
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
from PIL import Image

from errors import printable


def spread(values: list[int]) -> str:
    """min, median, p90 and max of a non-empty list, as text."""
    low, mid, p90, high = np.percentile(values, [0, 50, 90, 100], method="nearest")
    return f"min {low}, median {mid}, p90 {p90}, max {high}"


def print_example(e: Any) -> None:
    """A row, an Example, in full."""
    print(f"--- {printable(e.uid)}  [{printable(e.data_source)}]  answer: {printable(e.ground_truth)}")
    for m in e.messages:
        print(f"{m['role']}:", "\n".join(printable(line, 10_000) for line in m["content"].split("\n")))
    for data, (width, height) in zip(e.images, e.image_sizes, strict=True):  # the header's size may be turned
        with Image.open(io.BytesIO(data)) as image:
            print(f"image: {width}x{height} {image.format} {image.mode}, {len(data)} bytes")
    print(f"extra: {printable(json.dumps(e.extra, ensure_ascii=False, default=str), 10_000)}")


def print_statistics(examples: list, processor: Any = None) -> None:
    """Counts and distributions over rows; with a processor also of their prompts' tokens."""
    print("data_source:", dict(Counter(e.data_source for e in examples).most_common()))
    for key in ("split", "answer_type"):
        if counts := Counter(str(e.extra[key]) for e in examples if key in e.extra):
            print(f"{key}:", dict(counts.most_common()))
    print("images per row:", dict(sorted(Counter(len(e.images) for e in examples).items())))
    sizes = [e.image_sizes for e in examples]
    if flat := list(chain.from_iterable(sizes)):
        print("image width:", spread([width for width, _ in flat]))
        print("image height:", spread([height for _, height in flat]))
        print("image bytes:", spread([len(data) for data in chain.from_iterable(e.images for e in examples)]))
    if processor:
        counts = [processor.count_tokens(e.messages, s) for e, s in zip(examples, sizes, strict=True)]
        print("prompt tokens, image tokens included:", spread(counts))
