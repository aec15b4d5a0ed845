"""Thumbnails of a report's images. Full-size images are stored in a folder next to the pages."""

import base64
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps

from errors import report_write_errors
from prepare_data import FORMATS, IMAGE_ERRORS, Example, decode_image
from report.records import MAX_IMAGE_SIDE, encode_image, film_strip, video_name
from sources.content import MARK_PATTERN, VIDEO_PLACEHOLDER
from sources.images import encode_png

BROWSER_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")  # every browser shows these


class Thumbnail(NamedTuple):
    """A small image as it is shown on a page."""

    uri: str  # contains the image itself
    size: tuple[int, int]  # of the thumbnail, in pixels
    full_size: tuple[int, int]
    file: str = ""  # path of the full-size image, if it is larger and was stored


def make_thumbnail(data: bytes, folder: Path | None, max_bytes: int) -> Thumbnail | str:
    """Return the thumbnail of an image file: the file itself if it is small, else a WEBP; or a text if the file cannot
    be read. Store a larger image in the folder, unless it has more than `max_bytes` bytes."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            kind = "JPEG" if opened.format == "MPO" else opened.format
            size = opened.size
            opened.draft("RGB", (MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))  # a large JPEG is decoded at a fraction of its size
            image = ImageOps.exif_transpose(opened).convert("RGB") if kind == "JPEG" else decode_image(data)
            full_size = size[::-1] if opened.getexif().get(0x0112, 1) >= 5 else size  # rotated by 90 degrees
    except IMAGE_ERRORS:
        return "image cannot be read"
    image.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
    file = ""
    if folder and max(size) > MAX_IMAGE_SIDE and len(data) <= max_bytes:
        file = keep_file(data, folder, kind.lower())
    if max(size) > MAX_IMAGE_SIDE or kind not in BROWSER_FORMATS or len(data) > 20_000:
        data, kind = encode_image(image), "webp"
    uri = f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"
    return Thumbnail(uri, image.size, full_size, file)


def keep_file(data: bytes, folder: Path, kind: str) -> str:
    """Write an image file to the folder unless it exists there. Return its path relative to the pages."""
    path = folder / f"{hashlib.sha256(data).hexdigest()[:20]}.{kind}"
    with report_write_errors(path, "the images next to a page"):
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_size != len(data):
            path.write_bytes(data)
    return f"{folder.name}/{path.name}"


def shown_images(example: Example) -> Sequence[bytes]:
    """Return the images of an Example, with a film strip for each of its videos, in the order of their placeholders."""
    if not example.videos:
        return example.images
    images = iter(example.images)
    strips = (encode_png(film_strip(video.frames, decode_image)) for video in example.videos)
    return [next(strips if mark == VIDEO_PLACEHOLDER else images) for mark in visual_marks(example)]


def visual_marks(example: Example) -> list[str]:
    """Return the placeholders of an Example's images and videos, in order."""
    return [mark for m in example.messages for mark in MARK_PATTERN.findall(m["content"])]


def image_names(example: Example) -> list[str]:
    """Return a name for each of `shown_images`; that of a film strip describes its video."""
    names = [f"image {i + 1}" for i in range(len(example.images) + len(example.videos))]
    strips = [i for i, mark in enumerate(visual_marks(example)) if mark == VIDEO_PLACEHOLDER]
    for i, video in zip(strips, example.videos, strict=False):
        names[i] = video_name(len(video.frames), video.fps)
    return names
