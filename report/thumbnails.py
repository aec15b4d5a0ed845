"""The images of a page: each distinct one once, small enough that all of them fit, the files themselves in a folder
next to it."""

import base64
import hashlib
import html
import io
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from PIL import Image, ImageOps

from errors import writing
from prepare_data import FORMATS, IMAGE_ERRORS, decode_image

SIDE = 480  # pixels of the longer side, at most
TINY = 128  # pixels: up to there without loss
QUALITY = 60  # of a WEBP
MOST_IMAGES = 4000  # on a page, a repeated one counted each time
MOST_FULL_BYTES = 500_000_000  # in the folder
SHOWN_IN = ("PNG", "JPEG", "GIF", "WEBP")  # by every browser
TAG = re.compile(r'<img [^<>]*src="data:image/[a-z]+;base64,([A-Za-z0-9+/=]+)"[^<>]*>')
UNREADABLE = "<span class=none>(an image that cannot be read)</span>"
LEFT_OUT = "<span class=none>(an image that is left out: the page has its weight)</span>"


class Source(NamedTuple):
    """An image that a page asks for. Those of a lower rank come first, if there is no room for all."""

    key: Hashable
    rank: int
    read: Callable[[], bytes]


@dataclass
class Thumbnail:
    data: bytes  # an encoded image
    kind: str  # its format
    size: tuple[int, int]  # as it is drawn, pixels
    full_size: tuple[int, int]
    file: str = ""  # the name of the image itself in the folder
    full_kind: str = ""  # its format
    drawn: bool = False  # somewhere on the page already


class Thumbnails:
    """What `tag` shows of each source. `budget`: characters that all images together may have on the page."""

    def __init__(self, sources: Sequence[Source], budget: int, folder: Path | None = None):
        self.folder = folder
        self.lock = threading.Lock()
        self.full_bytes = 0
        self.full_left_out: set[str] = set()
        self.of: dict[str, Thumbnail | None] = {}  # by the digest of the image's bytes
        kept = sorted(range(len(sources)), key=lambda i: sources[i].rank)[:MOST_IMAGES]
        self.left_out = len(sources) - len(kept)
        wanted = [sources[i] for i in sorted(kept)]  # in the order in which they can be read
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(self.add, wanted))
            self.digest = {source.key: digest for source, digest in zip(wanted, digests, strict=True)}
            self.times = Counter(digests)
            made = [thumbnail for thumbnail in self.of.values() if thumbnail]
            most = fair_limit([len(thumbnail.data) for thumbnail in made], budget * 3 // 4)  # base64 makes 4 of 3
            list(pool.map(lambda thumbnail: shrink(thumbnail, most), made))

    def add(self, source: Source) -> str:
        """Make a source's thumbnail and keep its file, unless its image has come before. Its digest."""
        data = source.read()
        digest = hashlib.sha256(data).hexdigest()[:20]
        with self.lock:
            new = digest not in self.of
            self.of.setdefault(digest, None)
        if new:
            self.of[digest] = thumbnail = make_thumbnail(data)
            if thumbnail and self.folder and max(thumbnail.full_size) > max(thumbnail.size):
                self.keep(digest, thumbnail, data)
        return digest

    def keep(self, digest: str, thumbnail: Thumbnail, data: bytes) -> None:
        """The file itself, in the folder, as long as there is room."""
        with self.lock:
            if self.full_bytes + len(data) > MOST_FULL_BYTES:
                self.full_left_out.add(digest)
                return
            self.full_bytes += len(data)
        thumbnail.file = f"{digest}.{thumbnail.full_kind.lower()}"
        path = self.folder / thumbnail.file
        with writing(path, "the images next to a page"):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.stat().st_size != len(data):
                path.write_bytes(data)

    def tag(self, key: Hashable, name: str) -> str:
        """A source's image, with a link to its file. What is shown more than once stands on the page once."""
        if key not in self.digest:
            return LEFT_OUT
        digest = self.digest[key]
        thumbnail = self.of[digest]
        if thumbnail is None:
            return UNREADABLE
        width, height = thumbnail.size
        zoom = max(1, round(160 / max(width, height)))  # small ones are enlarged
        kind = " class=tiny" if max(width, height) <= 64 else ""
        size = f"{kind} width={width * zoom} height={height * zoom}"
        name = html.escape(name)
        if self.times[digest] == 1:
            shown = f'<img alt="{name}" loading=lazy decoding=async{size} src="{data_uri(thumbnail)}">'
        else:
            drawn = f'<use href="#i{digest}"/>'
            if not thumbnail.drawn:
                thumbnail.drawn = True
                drawn = f'<image id="i{digest}" width="{width}" height="{height}" href="{data_uri(thumbnail)}"/>'
                drawn = f'<defs>{drawn}</defs><use href="#i{digest}"/>'
            shown = f'<svg role=img aria-label="{name}" viewBox="0 0 {width} {height}"{size}>{drawn}</svg>'
        if not thumbnail.file:
            return shown
        told = "{}, {} x {} pixels".format(name, *thumbnail.full_size)
        link = quote(f"{self.folder.name}/{thumbnail.file}")
        return f'<a class=full href="{link}" target=_blank rel=noopener title="{told}">{shown}</a>'

    def notes(self) -> list[str]:
        """What is not there."""
        told = []
        if self.left_out:
            told.append(f"{self.left_out} images are left out: a page shows {MOST_IMAGES}.")
        if self.full_left_out:
            where = f"{self.folder.name}/, which has {self.full_bytes / 1e6:.0f} MB"
            told.append(f"{len(self.full_left_out)} images are not in {where}: only their thumbnails are kept.")
        return told


def fair_limit(sizes: Sequence[int], budget: int) -> int:
    """The largest size for which all, cut to it, fit the budget."""
    left = budget
    for i, size in enumerate(sorted(sizes)):
        if size * (len(sizes) - i) > left:
            return left // (len(sizes) - i)
        left -= size
    return max(sizes, default=0)


def data_uri(thumbnail: Thumbnail) -> str:
    return f"data:image/{thumbnail.kind.lower()};base64,{base64.b64encode(thumbnail.data).decode()}"


def make_thumbnail(data: bytes) -> Thumbnail | None:
    """Of an image file: the file itself if it is small, else a WEBP. None if it cannot be read."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            kind = "JPEG" if opened.format == "MPO" else opened.format
            size = opened.size
            opened.draft("RGB", (SIDE, SIDE))  # a large JPEG is decoded at a fraction of its size
            image = ImageOps.exif_transpose(opened).convert("RGB") if kind == "JPEG" else decode_image(data)
            turned = opened.getexif().get(0x0112, 1) >= 5
    except IMAGE_ERRORS:
        return None
    full_size = size[::-1] if turned else size
    image.thumbnail((SIDE, SIDE))
    if max(size) <= SIDE and kind in SHOWN_IN and len(data) <= 20_000:
        return Thumbnail(data, kind, image.size, full_size, full_kind=kind)
    return Thumbnail(encoded(image), "WEBP", image.size, full_size, full_kind=kind)


def encoded(image: Image.Image) -> bytes:
    """As WEBP, without loss if it is tiny or a drawing of few colours."""
    lossless = max(image.size) <= TINY or image.getcolors(256) is not None
    image.save(file := io.BytesIO(), format="WEBP", quality=QUALITY, lossless=lossless, method=3)
    return file.getvalue()


def shrink(thumbnail: Thumbnail, most: int) -> None:
    """To `most` bytes, if that leaves something to see."""
    first = None
    while len(thumbnail.data) > most and max(thumbnail.size) > 64:
        first = first or decode_image(thumbnail.data)
        scale = max(0.5, 0.95 * math.sqrt(most / len(thumbnail.data)))
        width, height = thumbnail.size
        image = first.resize((max(1, int(width * scale)), max(1, int(height * scale))), Image.Resampling.LANCZOS)
        thumbnail.data = encoded(image)
        thumbnail.kind = "WEBP"
        thumbnail.size = image.size


def image_tag(image: Image.Image) -> str:
    """Of an episode's image, for its record."""
    image = image.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    return f'<img alt="" src="data:image/webp;base64,{base64.b64encode(encoded(image)).decode()}">'


def tag_bytes(tag: str) -> bytes:
    """The image file that such a tag holds; nothing of any other."""
    found = TAG.fullmatch(tag)
    return base64.b64decode(found[1]) if found else b""
