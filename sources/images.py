"""One image of a row: from whatever a cell holds to an encoded file, and from that to RGB."""

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

MAX_PIXELS = 50_000_000  # of an image: a small file can hold more than memory does
MAX_SIDE = 65_535
MAX_ASPECT = 200  # Qwen's image processor raises from there on
MAX_FILE_BYTES = 256 << 20  # of a file on disk that a row names
LARGE_PIXELS = 4_000_000  # images above are decoded one at a time: each takes up to 20 bytes a pixel for a moment
LARGE_IMAGE_LOCK = threading.Lock()

# Only formats whose decoders are plain libraries: Pillow would hand EPS to an external program.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
# What Pillow raises on damaged files (UnidentifiedImageError is an OSError; TypeError, KeyError: bad TIFF tags).
IMAGE_ERRORS = (OSError, SyntaxError, ValueError, TypeError, KeyError, EOFError)
IMAGE_ERRORS += (struct.error, zlib.error, Image.DecompressionBombError)


def decode_image(data: bytes) -> Image.Image:
    """Encoded image file -> RGB image: EXIF orientation applied, alpha on white, 16-bit grey cut to its high byte.

    Raises one of IMAGE_ERRORS when the file is damaged, truncated, too large, animated or of a format not in FORMATS.
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        check_header(image)
        if image.width * image.height <= LARGE_PIXELS:
            return to_rgb(image)
        with LARGE_IMAGE_LOCK:
            Image.core.set_block_size(64 << 20)  # malloc keeps smaller blocks for the thread that freed them
            return to_rgb(image)


def check_header(image: Image.Image) -> None:
    """Refuse, before anything is decoded, what takes too much memory or what the model's image processor refuses."""
    short, long = sorted(image.size)
    size, most = f"{image.width}x{image.height} pixels", f"{MAX_PIXELS / 1e6:g} million pixels and {MAX_SIDE} a side"
    need(short * long <= MAX_PIXELS and long <= MAX_SIDE, f"{size}, at most {most} are read; make it smaller")
    need(long < MAX_ASPECT * short, f"{size}: one side is {MAX_ASPECT} or more times the other; crop it")
    # the further images of an MPO are a camera's own previews and gain maps of the first
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    need(frames <= 1, f"{frames} frames or pages, and only the first would be seen; save the one that is meant")


def to_rgb(image: Image.Image) -> Image.Image:
    """What `decode_image` makes of an opened file."""
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    need(image.mode != "F", "float pixels have no agreed range; convert the file to 8 or 16 bits")
    if image.mode.startswith("I"):
        # convert("RGB") would clip every value above 255 to white
        values = np.asarray(image)
        low, high = values.min(), values.max()
        need(low >= 0 and high <= 65535, f"grey values {low}..{high} exceed 16 bits; convert the file")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def read_regular_file(path: Path, folder: str | None = None) -> bytes:
    """Return the content of a file that a row names. If `folder` is given, the file has to be inside it once links are
    followed. Pipes (which would hang) and devices (which never end) are refused. Raises OSError or ValueError."""
    status = path.stat()
    need(folder is None or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)),
         f"{path} is outside of --image-root {folder}; move it there, or give a folder that holds all images")
    size = status.st_size
    need(stat.S_ISREG(status.st_mode), f"{path} is no regular file")
    need(0 < size <= MAX_FILE_BYTES, f"{path} has {size} bytes, expected 1 to {MAX_FILE_BYTES}")
    return path.read_bytes()


def image_bytes(
    cell: object,
    root: File,
    fetch: Callable[[str | File], bytes] | None = None,
    folder: str | None = None,
) -> bytes:
    """One image cell (bytes, {bytes, path}, path, base64, data URI, URL) -> the encoded file.

    Relative paths start at `root`, and none may leave `folder`. Raises UserError with the reason, which reads on after
    "image 0".
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
        need(fetch, f"is a URL ({cell[:80]}) and training touches no network: run prepare_data.py first")
        return fetch(cell)
    elif len(cell) >= 4096:
        pass  # base64
    elif isinstance(root, Path):  # an existing file wins: its name may happen to be valid base64
        path = root / cell.removeprefix("file://")
        try:
            return read_regular_file(path, folder)
        except UserError:
            raise
        except (OSError, ValueError) as e:  # ValueError: null byte in the name
            need("." not in cell and len(cell) >= 40,  # no dot in base64, no image in 30 bytes
                 f"{path}: {getattr(e, 'strerror', e)}; relative paths start at the file's folder or --image-root")
    elif "." in cell:
        need(not cell.startswith(("/", "file://")), f"{cell[:80]!r} is a path of this machine in a row from elsewhere")
        return fetch(root / cell)
    with as_user_error(ValueError, f"{cell[:40]!r} is neither an existing file nor valid base64"):
        return base64.b64decode("".join(cell.split()), validate=True)


def check_decodes(data: bytes) -> tuple[int, int]:
    """(width, height) of an encoded file. Raises UserError with the reason, which reads on after "image 0"."""
    try:
        return decode_image(data).size
    except Image.UnidentifiedImageError as e:  # whose own text would only show the address of a BytesIO
        raise UserError(f"({len(data)} bytes) cannot be decoded: not one of {', '.join(FORMATS)}") from e
    except IMAGE_ERRORS as e:
        raise UserError(f"({len(data)} bytes) cannot be decoded: {e}") from e
