"""Reading of one image of a row: from its cell, in any supported form, to an encoded file, and from that to RGB."""

import base64
import io
import os
import stat
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from errors import UserError, as_user_error, need
from sources.tables import File, url_scheme

MAX_PIXELS = 50_000_000  # per image: a small file can expand to more pixels than fit in memory
MAX_SIDE = 65_535
MAX_ASPECT = 200  # at this aspect ratio and above Qwen's image processor raises an error
MAX_FILE_BYTES = 256 << 20  # of a file on disk that a row names
LARGE_PIXELS = 4_000_000  # larger images are decoded one at a time: each briefly takes up to 20 bytes per pixel
LARGE_IMAGE_LOCK = threading.Lock()

# Only formats whose decoders are plain libraries: Pillow would hand EPS to an external program.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
# What Pillow raises on damaged files (UnidentifiedImageError is an OSError; TypeError, KeyError: bad TIFF tags).
IMAGE_ERRORS = (OSError, SyntaxError, ValueError, TypeError, KeyError, EOFError)
IMAGE_ERRORS += (struct.error, zlib.error, Image.DecompressionBombError)


def encode_png(image: Image.Image, **options: int) -> bytes:
    """Return an image as a PNG file. `options` are Pillow's, such as compress_level."""
    image.save(file := io.BytesIO(), format="PNG", **options)
    return file.getvalue()


def decode_image(data: bytes) -> Image.Image:
    """Decode an image file to RGB: apply the EXIF orientation, put transparent images on white (on black if all that
    they show is white), and scale grey values of more than 8 bits.

    Raise one of IMAGE_ERRORS if the file is damaged, truncated, too large, animated or of a format not in FORMATS.
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        check_header(image)
        if image.width * image.height <= LARGE_PIXELS:
            return to_rgb(image)
        with LARGE_IMAGE_LOCK:
            Image.core.set_block_size(64 << 20)  # malloc would keep smaller freed blocks in the thread's own heap
            return to_rgb(image)


def check_header(image: Image.Image) -> None:
    """Raise UserError, before anything is decoded, if an image would take too much memory, has several frames, or has a
    shape that the model's image processor does not accept."""
    short, long = sorted(image.size)
    size, limit = f"{image.width}x{image.height} pixels", f"{MAX_PIXELS / 1e6:g} million pixels and {MAX_SIDE} per side"
    need(short * long <= MAX_PIXELS and long <= MAX_SIDE, f"{size}, but the limit is {limit}; make it smaller")
    need(long < MAX_ASPECT * short, f"{size}: one side is at least {MAX_ASPECT} times the other; crop it")
    # the other images in an MPO file are the camera's previews and gain maps of the first
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    need(frames <= 1, f"{frames} frames or pages, but only the first would be used; save the one you need alone")


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode an opened image to RGB, as described in `decode_image`."""
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    need(image.mode != "F", "float pixels have no standard range; convert the file to 8 or 16 bits")
    if image.mode.startswith("I"):
        # convert("RGB") would clip every value above 255 to white
        values = np.asarray(image)
        low, high = values.min(), values.max()
        need(low >= 0 and high <= 65535, f"grey values {low}..{high} do not fit in 16 bits; convert the file")
        extra_bits = 0 if high <= 255 else 4 if high <= 4095 else 8  # files of 8 or 12 bits are stored as 16
        image = Image.fromarray((values >> extra_bits).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        on_white = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
        if not is_one_colour(on_white) or is_one_colour(image):
            return on_white
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
    return image.convert("RGB")


def is_one_colour(image: Image.Image) -> bool:
    return all(low == high for low, high in np.atleast_2d(image.getextrema()))


def read_regular_file(path: Path, folder: str | None = None) -> bytes:
    """Return the content of a file that a row names. With `folder`, the file must be inside it after links are
    resolved. Raise OSError or ValueError, also for pipes (which would hang) and devices (which never end)."""
    status = path.stat()
    need(folder is None or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)),
         f"{path} is outside --image-root {folder}; move it there, or pass a folder that contains all images")
    size = status.st_size
    need(stat.S_ISREG(status.st_mode), f"{path} is not a regular file")
    need(0 < size <= MAX_FILE_BYTES, f"{path} has {size} bytes, expected 1 to {MAX_FILE_BYTES}")
    return path.read_bytes()


def image_bytes(
    cell: object,
    root: File,
    fetch: Callable[[str | File], bytes] | None = None,
    folder: str | None = None,
) -> bytes:
    """Return the encoded file of an image cell: bytes, {bytes, path}, a path, base64, a data URI or a URL.

    Relative paths start at `root`. With `folder`, all paths must be inside it. Raise UserError with the reason, worded
    to follow "image 0".
    """
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
        need(cell, "has neither bytes nor path")
    if isinstance(cell, bytes):
        return cell
    need(isinstance(cell, str | None), f"is a {type(cell).__name__}, expected bytes, a path, base64 or a URL")
    cell = (cell or "").strip()
    need(cell, "is empty")
    if cell.startswith("data:"):
        head, _, cell = cell.partition(",")
        need(head.endswith(";base64"), f"data URI {head[:40]!r} is not base64")
    elif url_scheme(cell) not in ("", "file"):
        need(fetch, f"is a URL ({cell[:80]}), but training does not read from the network; run prepare_data.py first")
        return fetch(cell)
    elif len(cell) >= 4096:
        pass  # base64
    elif isinstance(root, Path):  # try a file first: its name may happen to be valid base64
        path = root / cell.removeprefix("file://")
        try:
            return read_regular_file(path, folder)
        except UserError:
            raise
        except (OSError, ValueError) as e:  # ValueError: null byte in the name
            need("." not in cell and len(cell) >= 40,  # base64 has no dots, and no image fits in 30 bytes
                 f"{path}: {getattr(e, 'strerror', e)}; relative paths start at the file's folder or --image-root")
    elif "." in cell:
        need(not cell.startswith(("/", "file://")),
             f"{cell[:80]!r} is a path on this machine, but the data is remote; use a path relative to it")
        return fetch(root / cell)
    with as_user_error(ValueError, f"{cell[:40]!r} is neither an existing file nor valid base64"):
        return base64.b64decode("".join(cell.split()), validate=True)


def check_decodes(data: bytes) -> tuple[tuple[int, int], bool]:
    """Decode an image file and return (width, height), and whether it has a single colour. Raise UserError with the
    reason, worded to follow "image 0"."""
    try:
        image = decode_image(data)
        return image.size, is_one_colour(image)
    except Image.UnidentifiedImageError as e:  # its own text only shows the address of a BytesIO
        raise UserError(f"({len(data)} bytes) cannot be decoded: not one of {', '.join(FORMATS)} (for video files "
                        "see docs/data.md#videos)") from e
    except IMAGE_ERRORS as e:
        raise UserError(f"({len(data)} bytes) cannot be decoded: {e}") from e
