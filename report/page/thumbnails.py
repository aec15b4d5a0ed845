"""The images of a report. Each distinct one is made small once; its file is kept in a folder next to the pages."""

import base64
import hashlib
import io
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps

from errors import writing
from prepare_data import FORMATS, IMAGE_ERRORS, decode_image
from report.records import SIDE, encode_image

MOST_IMAGES = 4000  # in a report
MOST_LARGE = 1500  # with more, all of them are shown in half the size
MOST_FULL_BYTES = 500_000_000  # in the folder
SHOWN_IN = ("PNG", "JPEG", "GIF", "WEBP")  # by every browser


class Source(NamedTuple):
    """An image that a report asks for. Those of a lower rank come first, if there are too many."""

    key: Hashable
    rank: int
    read: Callable[[], bytes]


class Thumbnail(NamedTuple):
    data: bytes  # an encoded image
    kind: str  # its format
    size: tuple[int, int]  # as it is drawn, pixels
    full_size: tuple[int, int]
    full_kind: str  # the format of the image itself

    @property
    def uri(self) -> str:
        return f"data:image/{self.kind.lower()};base64,{base64.b64encode(self.data).decode()}"


class Thumbnails:
    """`digest` tells which image a source has; `of` its thumbnail, None if it cannot be read; `files` its file."""

    def __init__(self, sources: Sequence[Source], folder: Path | None = None):
        self.folder = folder
        self.lock = threading.Lock()
        self.full_bytes = 0
        self.full_left_out: set[str] = set()
        self.of: dict[str, Thumbnail | None] = {}
        self.files: dict[str, str] = {}
        kept = sorted(range(len(sources)), key=lambda i: sources[i].rank)[:MOST_IMAGES]
        self.left_out = len(sources) - len(kept)
        self.side = SIDE if len(kept) <= MOST_LARGE else SIDE // 2
        wanted = [sources[i] for i in sorted(kept)]  # in the order in which they can be read
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            self.digest = dict(zip([source.key for source in wanted], pool.map(self.add, wanted), strict=True))

    def add(self, source: Source) -> str:
        """Make a source's thumbnail and keep its file, unless its image has come before. Return its digest."""
        data = source.read()
        digest = hashlib.sha256(data).hexdigest()[:20]
        with self.lock:
            new = digest not in self.of
            self.of.setdefault(digest, None)
        if new:
            self.of[digest] = thumbnail = make_thumbnail(data, self.side)
            if thumbnail and self.folder and max(thumbnail.full_size) > max(thumbnail.size):
                self.keep(digest, thumbnail, data)
        return digest

    def keep(self, digest: str, thumbnail: Thumbnail, data: bytes) -> None:
        """Write the file itself to the folder, as long as there is room."""
        with self.lock:
            if self.full_bytes + len(data) > MOST_FULL_BYTES:
                self.full_left_out.add(digest)
                return
            self.full_bytes += len(data)
        path = self.folder / f"{digest}.{thumbnail.full_kind.lower()}"
        with writing(path, "the images next to a page"):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.stat().st_size != len(data):
                path.write_bytes(data)
        self.files[digest] = f"{self.folder.name}/{path.name}"

    def notes(self) -> list[str]:
        """Return sentences on what is not shown."""
        notes = []
        if self.left_out:
            notes.append(f"{self.left_out} images are left out: a report shows {MOST_IMAGES}.")
        if self.full_left_out:
            where = f"{self.folder.name}/, which has {self.full_bytes / 1e6:.0f} MB"
            notes.append(f"{len(self.full_left_out)} images are not in {where}: only their thumbnails are kept.")
        return notes


def make_thumbnail(data: bytes, side: int) -> Thumbnail | None:
    """Return the thumbnail of an image file: the file itself if it is small, else a WEBP; None if it is unreadable."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            kind = "JPEG" if opened.format == "MPO" else opened.format
            size = opened.size
            opened.draft("RGB", (side, side))  # a large JPEG is decoded at a fraction of its size
            image = ImageOps.exif_transpose(opened).convert("RGB") if kind == "JPEG" else decode_image(data)
            turned = opened.getexif().get(0x0112, 1) >= 5
    except IMAGE_ERRORS:
        return None
    full_size = size[::-1] if turned else size
    image.thumbnail((side, side))
    if max(size) <= side and kind in SHOWN_IN and len(data) <= 20_000:
        return Thumbnail(data, kind, image.size, full_size, kind)
    return Thumbnail(encode_image(image, side), "WEBP", image.size, full_size, kind)
