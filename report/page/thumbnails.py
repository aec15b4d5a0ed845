"""Thumbnails of a report's images. Full-size images are stored in a folder next to the pages."""

import base64
import hashlib
import io
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps

from errors import report_write_errors
from prepare_data import FORMATS, IMAGE_ERRORS, decode_image
from report.records import MAX_IMAGE_SIDE, encode_image

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
