"""Any source -> one parquet file, and back again: the only file that knows the on-disk format.

    python prepare_data.py geo3k --input hiyouga/geometry3k --split train --out geo3k.parquet
    python prepare_data.py jsonl --input qa.jsonl --data-source vqa --add-image-marks --out qa.parquet --inspect
    python prepare_data.py inspect geo3k.parquet --model Qwen/Qwen2.5-VL-7B-Instruct

Columns: data_source string, prompt list<struct<role, content>>, images list<struct<bytes, path>>,
reward_model struct<style, ground_truth>, extra_info struct<split, index, uid, ...>. Each literal <image> in a
prompt stands for one image, in order. Image files are stored byte for byte as they were found.
"""

import argparse
import base64
import csv
import glob
import http.client
import io
import ipaddress
import itertools
import json
import os
import re
import socket
import stat
import string
import struct
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote, urljoin, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageOps
from tqdm import tqdm

from errors import Note, UserError, check_writable, existing, writing

MARK = "<image>"
ROLES = ("system", "user", "assistant", "tool")
CHUNK = 64  # rows checked together; also the read batch, so memory holds a few dozen images beyond the result
ROW_GROUP_ROWS, ROW_GROUP_BYTES = 128, 32 << 20
WORKERS = 8
SPLITS = {"train": "train", "val": "validation", "test": "test"}  # our name -> the hub's name
SPECIAL = re.compile(r"<\|[^<>|]+\|>")  # what tokenizers like Qwen's read as one special token
VIDEOS = ("videos", "video")
BAD_BYTE = re.compile("[\udc80-\udcff]")  # what open(errors="surrogateescape") makes of bytes that are no UTF-8
MAX_DEPTH = 32  # levels of lists and objects in a row
MAX_FILE_BYTES = 256 << 20  # of an image or data.json on disk

MAX_PIXELS, MAX_SIDE = 50_000_000, 65_535  # of an image: a small file can hold more than memory does
MAX_ASPECT = 200  # Qwen's image processor raises from there on
LARGE_PIXELS = 4_000_000  # images above are decoded one at a time: each takes up to 20 bytes a pixel for a moment
LARGE = threading.Lock()

# Only formats whose decoders are plain libraries: Pillow would hand EPS to an external program.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
# What Pillow raises on damaged files (UnidentifiedImageError is an OSError; TypeError, KeyError: bad TIFF tags).
IMAGE_ERRORS = (
    OSError, SyntaxError, ValueError, TypeError, KeyError, EOFError, struct.error, zlib.error,
    Image.DecompressionBombError,
)  # fmt: skip

GEO3K_INSTRUCTION = (
    "Before answering, reason through the problem step by step inside <think> </think> tags. "
    "Only after that, state the final answer inside \\boxed{}."
)
GEO3K_HELP = "our own text, which asks for the <think> and \\boxed format that the geo3k reward checks"


class BadRow(ValueError):
    """One row cannot be used; the text is the reason, without file and row."""


def shown(text: object, length: int = 600) -> str:
    """Text from data as it may go to a terminal: one line, no control characters, not endless."""
    text = str(text)
    cut = f"... ({len(text)} characters)" if len(text) > length else ""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:length]) + cut


@dataclass(frozen=True, slots=True)
class Example:
    """One checked row. `images` are encoded files that are known to decode, one per <image> mark in order."""

    uid: str
    data_source: str
    messages: list[dict]
    images: list[bytes]
    ground_truth: str
    extra: dict


@dataclass(slots=True)
class Raw:
    """One row as found, before any check. `problem` is set when the source could not even read it.

    `name` tells its file from others in uids.
    """

    where: str
    number: int
    root: Path = Path()
    data_source: str = ""
    prompt: object = None
    images: object = None
    truth: object = None
    extra: object = field(default_factory=dict)
    problem: str = ""
    name: str = ""


# ---------------------------------------------------------------------------------------------------- images


def decode_image(data: bytes) -> Image.Image:
    """Encoded image file -> RGB image: EXIF orientation applied, alpha on white, 16-bit grey cut to its high byte.

    Raises one of IMAGE_ERRORS when the file is damaged, truncated, too large, animated or of a format not in FORMATS.
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        check_header(image)
        if image.width * image.height <= LARGE_PIXELS:
            return to_rgb(image)
        with LARGE:
            Image.core.set_block_size(64 << 20)  # malloc keeps smaller blocks for the thread that freed them
            return to_rgb(image)


def check_header(image: Image.Image) -> None:
    """Refuse, before anything is decoded, what takes too much memory or what the model's image processor refuses."""
    (width, height), most = image.size, f"at most {MAX_PIXELS / 1e6:g} million pixels and {MAX_SIDE} a side"
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise UserError(f"{width}x{height} pixels, {most} are read; make it smaller")
    if max(width, height) >= MAX_ASPECT * min(width, height):
        raise UserError(f"{width}x{height} pixels: one side is {MAX_ASPECT} or more times the other; crop it")
    # the further images of an MPO are a camera's own previews and gain maps of the first
    if image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
        raise UserError(f"{frames} frames or pages, and only the first would be seen; save the one that is meant")


def to_rgb(image: Image.Image) -> Image.Image:
    """What `decode_image` makes of an opened file."""
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "F":
        raise UserError("float pixels have no agreed range; convert the file to 8 or 16 bits")
    if image.mode.startswith("I"):
        # convert("RGB") would clip every value above 255 to white
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise UserError(f"grey values {values.min()}..{values.max()} exceed 16 bits; convert the file")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def clean_url(url: str) -> str:
    """An http(s) URL with all but its host percent-encoded. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an http(s) URL with a host")
    if "@" in parts.netloc:
        raise ValueError("it holds a user name; fetch such files yourself and give their paths")
    if parts.port == 0:  # others outside 1..65535 raise by themselves
        raise ValueError("port 0")
    path, query = (quote(part, safe=string.punctuation) for part in (parts.path, parts.query))
    return parts._replace(path=path, query=query, fragment="").geturl()


def is_public(address: str) -> bool:
    """Whether an IP address is of the internet at large: not private, loopback, link-local or otherwise set apart."""
    ip = ipaddress.ip_address(address)
    ip = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None) or ip
    return ip.is_global and not ip.is_multicast


class Fetcher(urllib.request.AbstractHTTPHandler):
    """Connects to addresses that were checked, the very ones, and ends its connections at a deadline.

    A socket's own timeout would not do: it is per operation, and a header can come byte by byte.
    """

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def __init__(self, timeout: float, private: bool):
        super().__init__()
        self.deadline, self.private, self.sockets = time.monotonic() + timeout, private, []

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self.connection, http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self.connection, http.client.HTTPSConnection), request)

    def connection(self, kind: type, host: str, timeout: float) -> http.client.HTTPConnection:
        connection = kind(host, timeout=timeout)
        connection._create_connection = self.connect  # TLS is put on top of it, for the host's name
        return connection

    def left(self) -> float:
        """Seconds before the deadline. Raises TimeoutError when there are none."""
        if (left := self.deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        return left

    def connect(self, address: tuple[str, int], timeout: float, source: None = None) -> socket.socket:
        resolver = ThreadPoolExecutor(1)  # looking up a name knows no timeout: it is left behind at the deadline
        found = resolver.submit(socket.getaddrinfo, *address, type=socket.SOCK_STREAM)
        resolver.shutdown(wait=False)
        addresses = [entry[4][:2] for entry in found.result(self.left())]
        # A proxy of the environment may be private, and looks up the names itself
        proxies = {urlsplit(p).hostname for scheme, p in urllib.request.getproxies().items() if scheme != "no"}
        inside = [ip for ip, _ in addresses if not is_public(ip)]
        if inside and not self.private and address[0] not in proxies:
            raise BadRow(f"is not fetched: {address[0]} is at {inside[0]}, not public; --url-private allows that")
        for i, place in enumerate(addresses):
            try:
                connected = socket.create_connection(place, self.left())
                break
            except OSError:
                if i == len(addresses) - 1:
                    raise
        self.sockets.append(connected.dup())  # the same connection, whatever wraps the first handle
        connected.settimeout(self.left())
        return connected

    def close(self) -> None:
        """End all connections: whoever reads from them reads their end."""
        for connected in self.sockets:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


def fetch_once(url: str, timeout: float, max_bytes: int, private: bool) -> bytes:
    """Body of a URL, redirects followed, in `timeout` seconds. Raises OSError, HTTPException or ValueError."""
    fetcher, opener = Fetcher(timeout, private), urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler(), fetcher):
        opener.add_handler(handler)
    timer = threading.Timer(timeout, fetcher.close)
    timer.start()
    try:
        for _ in range(10):
            request = urllib.request.Request(clean_url(url), headers={"User-Agent": "prepare_data"})
            with opener.open(request, timeout=fetcher.left()) as response:
                location = response.headers["location"]
                if response.status in (301, 302, 303, 307, 308) and location:
                    url = urljoin(request.full_url, quote(location, safe=string.punctuation, encoding="iso-8859-1"))
                    continue
                if response.status // 100 != 2:
                    raise urllib.error.HTTPError(url, response.status, response.reason, response.headers, None)
                body = response.read(max_bytes + 1)
                fetcher.left()
                if len(body) > max_bytes:
                    raise BadRow(f"is larger than {max_bytes / 2**20:g} MiB; raise --url-max-mb")
                if response.length:
                    raise http.client.IncompleteRead(b"", response.length)
                return body
        raise ValueError("more than 10 redirects")
    except (OSError, http.client.HTTPException):
        fetcher.left()  # a connection that ended at the deadline has timed out, whatever it looks like
        raise
    finally:
        timer.cancel()
        fetcher.close()
        for connected in fetcher.sockets:
            connected.close()


def fetch_url(url: str, timeout: float = 20, max_bytes: int = 32 << 20, tries: int = 3, private: bool = False) -> bytes:
    """Body of an http(s) URL; `timeout` seconds bound each try as a whole. Raises BadRow naming the flag to change.

    Addresses that are not public are refused unless `private`, redirects to them too.
    """
    for attempt in range(1, tries + 1):
        try:
            return fetch_once(url, timeout, max_bytes, private)
        except urllib.error.HTTPError as e:
            problem = f"HTTP {e.code} {e.reason}"
            if e.code < 500 and e.code not in (408, 429):
                raise BadRow(f"{url} could not be fetched: {problem}; correct or remove the URL") from e
        except BadRow as e:
            raise BadRow(f"{url} {e}") from e
        except (ValueError, http.client.InvalidURL) as e:  # UnicodeErrors of names are ValueErrors
            raise BadRow(f"{url} cannot be fetched: {e}; correct or remove the URL") from e
        except (OSError, http.client.HTTPException) as e:  # URLErrors and timeouts are OSErrors
            problem = f"{e} (--url-timeout {timeout:g})"
        if attempt < tries:
            time.sleep(0.5 * attempt)
    raise BadRow(f"{url} could not be fetched in {tries} tries: {problem}; try again or raise --url-tries")


def read_file(path: Path) -> bytes:
    """Content of a file that a row names: a pipe would hang, a device never end. Raises OSError or ValueError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise BadRow(f"{path} is no regular file")
    if not 0 < status.st_size <= MAX_FILE_BYTES:
        raise BadRow(f"{path} has {status.st_size} bytes, expected 1 to {MAX_FILE_BYTES}")
    with open(path, "rb") as file:
        return file.read(MAX_FILE_BYTES)


def image_bytes(cell: object, root: Path, fetch: Callable[[str], bytes] | None = None) -> bytes:
    """One image cell (bytes, {bytes, path}, path, base64, data URI, URL) -> the encoded file. Raises BadRow."""
    if isinstance(cell, dict):
        inner = next((cell[k] for k in ("bytes", "path") if cell.get(k)), None)
        if inner is None:
            raise BadRow("has neither bytes nor path")
        return image_bytes(inner, root, fetch)
    if isinstance(cell, bytes):
        return cell
    if not isinstance(cell, str) or not cell.strip():
        raise BadRow("is empty" if cell is None or isinstance(cell, str) else f"is a {type(cell).__name__}")
    cell = cell.strip()
    if cell.startswith(("http://", "https://")):
        if fetch is None:
            raise BadRow(f"is a URL ({cell[:80]}) and training touches no network: run prepare_data.py first")
        return fetch(cell)
    if cell.startswith("data:"):
        head, comma, cell = cell.partition(",")
        if not comma or not head.endswith(";base64"):
            raise BadRow(f"data URI {head[:40]!r} is not base64")
    elif len(cell) < 4096:  # an existing file wins: its name may happen to be valid base64
        path = root / cell.removeprefix("file://")
        try:
            return read_file(path)
        except BadRow:
            raise
        except (OSError, ValueError) as e:  # ValueError: null byte in the name
            if "." in cell or len(cell) < 40:  # no dot in base64, no image file in 30 bytes
                reason = getattr(e, "strerror", None) or e
                raise BadRow(f"{path}: {reason}; relative paths start at the file's folder or --image-root") from e
    try:
        return base64.b64decode("".join(cell.split()), validate=True)
    except ValueError as e:
        raise BadRow(f"{cell[:40]!r} is neither an existing file nor valid base64 ({e})") from e


# ---------------------------------------------------------------------------------------------------- checking a row


def count_marks(messages: list[dict]) -> int:
    """Number of literal <image> marks in all contents."""
    return sum(m["content"].count(MARK) for m in messages)


def to_messages(prompt: object, system: str = "") -> list[dict]:
    """A string or a list of {role, content} -> messages, `system` put in front. Raises BadRow."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not prompt:
        raise BadRow("empty prompt")
    if not isinstance(prompt, list):
        raise BadRow(f"prompt is a {type(prompt).__name__}, expected a string or a list of messages")
    messages = [{"role": "system", "content": system}] if system else []
    for i, m in enumerate(prompt):
        if not isinstance(m, dict) or not isinstance(m.get("content"), str):
            raise BadRow(f"message {i} has no content string; write images as {MARK} marks inside the text")
        if m.get("role") not in ROLES:
            raise BadRow(f"message {i} has role {m.get('role')!r}, expected one of {', '.join(ROLES)}")
        if system and m["role"] == "system":
            raise BadRow("the prompt already has a system message and --system gives another; drop one")
        if more := [k for k, v in m.items() if k not in ("role", "content") and v is not None]:
            raise BadRow(f"message {i} has fields the format cannot hold: {', '.join(more)}")
        messages.append({"role": m["role"], "content": m["content"]})
    if not any(m["content"].strip() for m in messages if m["role"] == "user"):
        raise BadRow("empty prompt: no user message has any text")
    if messages[-1]["role"] == "assistant":
        raise BadRow("the last message is the assistant's (an answer left in the prompt?); it must be the user's")
    return messages


def to_truth(value: object) -> str:
    """Ground truth as a string: strings stay, everything else becomes JSON. Raises BadRow when there is none."""
    if value is None or isinstance(value, str):
        if not (value or "").strip():
            raise BadRow("no ground truth: the answer is missing or empty; --answer-key names its column")
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise BadRow(f"ground truth {value!r} is neither a string nor JSON: {e}") from e


def too_deep(value: object, levels: int = MAX_DEPTH) -> bool:
    """Whether lists and objects are nested further than our own and others' recursion can be trusted with."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return levels == 0 or any(too_deep(v, levels - 1) for v in inner)


def drop_none(value: object) -> object:
    """Without the None fields that a struct column gives to rows that lack a field."""
    if isinstance(value, list):
        return [drop_none(v) for v in value]
    return {k: drop_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def build_example(
    raw: Raw, *, fetch: Callable[[str], bytes] | None = None, system: str = "", add_marks: bool = False,
    data_source: str | None = None, split: str | None = None, instruction: str = "",
) -> Example:  # fmt: skip
    """Check one row completely, decoding each image once. Raises BadRow with the reason.

    With `split` (writing) a row must have a data_source, and rows without split or index get them. `instruction` is put
    behind the last user message that does not end with it.
    """
    if raw.problem:
        raise BadRow(raw.problem)
    if too_deep([raw.prompt, raw.images, raw.truth, raw.extra, raw.data_source]):
        raise BadRow(f"nested more than {MAX_DEPTH} levels deep")
    messages = to_messages(raw.prompt, system)
    last = next(m for m in reversed(messages) if m["role"] == "user")
    if not last["content"].endswith(instruction):
        last["content"] = f"{last['content']} {instruction}"
    for i, m in enumerate(messages):
        if found := SPECIAL.search(m["content"]):
            raise BadRow(f"message {i} contains {found[0]!r}, a special token to tokenizers; write it otherwise")
        if "<video>" in m["content"]:
            raise BadRow(f"message {i} contains <video>, and videos are not supported; leave such rows out")
    cells = raw.images if isinstance(raw.images, list) else [raw.images] if raw.images not in (None, "") else []
    images = []
    for i, cell in enumerate(cells):
        try:
            data = image_bytes(cell, raw.root, fetch)
        except BadRow as e:
            raise BadRow(f"image {i} {e}") from e
        try:
            decode_image(data)
        except IMAGE_ERRORS as e:
            # Pillow's own text would only show the address of a BytesIO
            reason = f"not one of {', '.join(FORMATS)}" if isinstance(e, Image.UnidentifiedImageError) else e
            raise BadRow(f"image {i} ({len(data)} bytes) cannot be decoded: {reason}") from e
        images.append(data)
    marks = count_marks(messages)
    if add_marks and images and not marks:
        first = next(m for m in messages if m["role"] == "user")
        first["content"], marks = MARK * len(images) + first["content"], len(images)
    if marks != len(images):
        remedy = f"the prompt needs one {MARK} per image"
        if not marks:
            remedy = "prepare_data.py --add-image-marks puts the marks in front of the prompt"
        elif not images:
            remedy = "--image-key names the column of the images"
        raise BadRow(f"{marks} {MARK} marks in the prompt but {len(images)} images; {remedy}")
    truth = to_truth(raw.truth)
    if not isinstance(raw.extra, dict | None):
        raise BadRow(f"extra_info is a {type(raw.extra).__name__}, expected a struct")
    extra = drop_none(raw.extra or {})
    source = data_source or raw.data_source
    if not isinstance(source, str):
        raise BadRow(f"data_source is a {type(source).__name__}, expected a string; --data-source NAME replaces it")
    if split:
        if not source:
            raise BadRow("no data_source; --data-source NAME gives one to every row")
        extra = {"split": split, "index": raw.number} | extra
    # rows without an index are told apart by their number; "row" keeps those apart from real indices
    index = extra.get("index", f"row{raw.number}")
    file = f"{raw.name}/" if raw.name else ""
    uid = str(extra.get("uid", f"{source or 'data'}/{extra.get('split', '-')}/{file}{index}"))
    try:
        json.dumps([messages, truth, extra, uid, source], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as e:
        raise BadRow(f"text cannot be stored as UTF-8: {e}") from e
    return Example(uid, source, messages, images, truth, extra)


def checked(raws: Iterable[Raw], build: Callable[[Raw], Example], bad: list[str]) -> Iterator[Example]:
    """Yield the good rows in order; append one line per bad row (file, row, reason) to `bad`."""

    def attempt(raw: Raw) -> Example | BadRow:
        try:
            with Note(f"in {shown(raw.where)}"):
                return build(raw)
        except BadRow as e:
            return e

    raws, seen = iter(raws), {}
    with ThreadPoolExecutor(WORKERS) as pool:  # decoding and fetching release the GIL
        while chunk := list(itertools.islice(raws, CHUNK)):
            with closing(pool.map(attempt, chunk)) as results:  # which drops what is not begun yet: Ctrl-C is not to wait for it
                for raw, result in zip(chunk, results, strict=True):
                    if isinstance(result, Example) and result.uid in seen:
                        other = seen[result.uid]
                        result = BadRow(f"uid {result.uid[:200]!r} is already taken by {other}; make extra_info.uid unique")
                    if isinstance(result, BadRow):
                        bad.append(shown(f"{raw.where}: {result}"))
                    else:
                        seen[result.uid] = raw.where
                        yield result


def first_of(bad: list[str]) -> list[str]:
    """The first few lines, and how many more there are."""
    return bad[:5] + ([f"... and {len(bad) - 5} more"] if len(bad) > 5 else [])


def refuse_bad(bad: list[str], good: int, bad_rows: str) -> None:
    """Raise UserError with the first few bad rows and the count, unless `bad_rows` is "skip"."""
    if bad_rows not in ("error", "skip"):
        raise UserError(f"--bad-rows is {bad_rows!r}, expected error or skip")
    if bad and bad_rows == "error":
        lines = "\n  ".join(first_of(bad))
        remark = " (parquet rows count from 0)" if re.search(r" row \d+: ", lines) else ""  # text files have lines
        raise UserError(
            f"{len(bad)} of {len(bad) + good} rows are bad{remark}:\n  {lines}\n"
            "Mend them, or pass --bad-rows skip to leave them out."
        )


# ---------------------------------------------------------------------------------------------------- reading


def parquet_files(path: str | Path | list, split: str | None = None) -> list[Path]:
    """A file, a folder of shards, a glob, a comma list or a list of those -> files in order. Raises ValueError.

    Of a folder with shards of several splits only those of `split` are taken.
    """
    if isinstance(path, list | tuple):
        return [f for p in path for f in parquet_files(p, split)]
    name, path = str(path), Path(path)
    if not path.exists() and "," in name:
        return parquet_files([p.strip() for p in name.split(",") if p.strip()], split)
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))
        splits = {s: [f for f in files if f.name.startswith(hub)] for s, hub in SPLITS.items()}
        there = [s for s in SPLITS if splits[s]]
        if split and there:
            files = splits[split]
        elif len(there) > 1:
            raise UserError(f"{path} holds shards of {', '.join(there)}; pass those of one, e.g. '{path}/train*'")
    elif not path.exists() and any(c in name for c in "*?["):
        files = [Path(p) for p in sorted(glob.glob(name))]
    if not files:
        raise UserError(f"{path}: no parquet file{f' of --split {split}' if split else ''} found there")
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: no such file; check the path given to --data or --input")
        if file.stat().st_size == 0:
            raise UserError(f"{file} is empty (0 bytes); write it again with prepare_data.py")
    return files


def need_columns(found: list[str], keys: tuple, file: Path) -> None:
    """Raise ValueError unless the columns `keys` = (prompt, image, answer) are there."""
    flags = ("--prompt-key", "--image-key", "--answer-key")
    for column, flag in zip((keys[0], keys[1], keys[2] or "reward_model"), flags, strict=True):
        if column and column not in found:
            hint = " ('' if there are no images)" if flag == "--image-key" else ""
            has = ", ".join(map(str, found))
            raise UserError(f"{file}: no column {column!r}; it has {has}. Name the right one with {flag}{hint}")


def table_row(
    row: dict | str, keys: tuple, where: str, number: int, root: Path, rest: bool = False, name: str = ""
) -> Raw:  # fmt: skip
    """Pick the columns `keys` = (prompt, image, answer) out of a row; `rest` puts the others into extra.

    A text in place of the row says why it could not be read.
    """
    if isinstance(row, str):
        return Raw(where, number, problem=row)
    prompt_key, image_key, answer_key = keys
    reward_model = row.get("reward_model") if isinstance(row.get("reward_model"), dict) else {}
    truth = row.get(answer_key) if answer_key else reward_model.get("ground_truth")
    extra = row.get("extra_info")
    if rest and isinstance(extra, dict | None):
        known = {prompt_key, image_key, answer_key, "data_source", "reward_model", "extra_info", *VIDEOS}
        extra = {k: v for k, v in row.items() if k not in known} | (extra or {})
        extra = {k: v for k, v in reward_model.items() if k not in ("style", "ground_truth")} | extra
    images = row.get(image_key) if image_key else None
    filled = [key for key in VIDEOS if key not in keys and row.get(key)]
    problem = f"column {filled[0]} is not empty, and videos are not supported; leave such rows out" if filled else ""
    source, prompt = row.get("data_source") or "", row.get(prompt_key)
    return Raw(where, number, root, source, prompt, images, truth, extra, problem, name)


def file_names(files: list[Path]) -> list[str]:
    """The files' names for uids: each without its ending, with as many folders in front as tell it from the others."""
    paths = [Path(os.path.abspath(f)).with_suffix("").parts for f in files]
    names = []
    for path in paths:
        others = [p for p in paths if p != path]
        n = next(n for n in range(1, len(path) + 1) if all(p[-n:] != path[-n:] for p in others))
        names.append("/".join(path[-n:]))
    return names


# What single values raise on the way to Python: bytes that are no UTF-8, dates beyond 9999, depth
CELL_ERRORS = (pa.ArrowException, ValueError, OverflowError, RecursionError)


def batch_rows(batch: pa.RecordBatch) -> list[dict | str]:
    """Rows of a batch; a text with the reason for each one with a value that Python cannot hold."""
    try:
        return batch.to_pylist()
    except CELL_ERRORS as e:
        if batch.num_rows == 1:
            return [f"a value cannot be read: {type(e).__name__}: {e}"]
        return [row for i in range(batch.num_rows) for row in batch_rows(batch.slice(i, 1))]


def parquet_rows(path, keys: tuple, root: Path | None = None, rest: bool = False) -> Iterator[Raw]:
    """Rows of any parquet file(s), read in batches; `number` runs on over the files. Raises ValueError."""
    number, files = 0, parquet_files(path)
    for file, name in zip(files, file_names(files), strict=True):
        try:
            parquet = pq.ParquetFile(file)
        except (pa.ArrowException, OSError) as e:
            raise UserError(f"{file} is not a readable parquet file: {e}") from e
        schema = parquet.schema_arrow
        need_columns(schema.names, keys, file)
        wanted = {keys[0], keys[1], keys[2] or "reward_model", "data_source", "extra_info", *VIDEOS}
        columns = [c for c in schema.names if c in wanted]
        if rest:
            # binary columns other than the images would not survive as extra_info
            out = [f.name for f in schema if f.name not in columns and "binary" in str(f.type)]
            columns = [c for c in schema.names if c not in out]
            if out:
                print(f"{file}: left out the binary columns {', '.join(out)}")
        if parquet.metadata.num_rows == 0:
            raise UserError(f"{file} has no rows")
        with parquet:
            batches, row = parquet.iter_batches(CHUNK, columns=columns), 0
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                except (pa.ArrowException, OSError) as e:
                    raise UserError(f"{file} is damaged near row {row}: {e}") from e
                for record in batch_rows(batch):
                    yield table_row(record, keys, f"{file} row {row}", number, root or file.parent, rest, name)
                    row, number = row + 1, number + 1


def read_examples(
    path: str | Path | list, *, prompt_key: str = "prompt", image_key: str = "images",
    answer_key: str | None = None, bad_rows: str = "error", limit: int | None = None, data_source: str | None = None,
    instruction: str = "",
) -> tuple[list[Example], list[str]]:  # fmt: skip
    """Read and check parquet file(s): ours, verl's, EasyR1's (prompt_key="problem", answer_key="answer").

    `answer_key=None` means reward_model.ground_truth, `image_key=""` a file without images, `limit` the first so
    many good rows. `data_source` replaces the column's; a file without that column gives "". `instruction` is put behind
    prompts that do not end with it.
    Returns the examples and one line per row left out (only with bad_rows="skip"). Raises UserError naming file, row,
    reason and remedy.
    """
    bad: list[str] = []
    build = partial(build_example, data_source=data_source, instruction=instruction)
    rows = checked(parquet_rows(path, (prompt_key, image_key, answer_key)), build, bad)
    examples = list(itertools.islice(rows, limit))
    refuse_bad(bad, len(examples), bad_rows)
    if not examples:
        raise UserError(f"{path}: none of the {len(bad)} rows is usable; the first: {bad[:1]}")
    return examples, bad


def add_reading_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every script that reads examples; `read_flagged` obeys them."""
    p = parser
    p.add_argument("--prompt-key", default="prompt", help="column of the prompt")
    p.add_argument("--image-key", default="images", help="column of the images ('' if there are none)")
    p.add_argument("--answer-key", help="column of the answer (default: reward_model.ground_truth)")
    p.add_argument("--data-source", help="task of all rows, e.g. geo3k (default: the file's data_source column)")
    p.add_argument("--instruction", default="", help=f"text behind prompts that lack it; geo3k: {GEO3K_HELP}")
    p.add_argument("--bad-rows", choices=("error", "skip"), default="error", help="what to do with unreadable rows")


def instruction_of(text: str) -> str:
    """What --instruction stands for."""
    return GEO3K_INSTRUCTION if text == "geo3k" else text


def read_flagged(path: str, args: argparse.Namespace, limit: int | None = None) -> tuple[list[Example], list[str]]:
    """`read_examples` as the flags of `add_reading_flags` say."""
    keys = {"prompt_key": args.prompt_key, "image_key": args.image_key, "answer_key": args.answer_key}
    more = {"data_source": args.data_source, "instruction": instruction_of(args.instruction)}
    return read_examples(path, **keys, **more, bad_rows=args.bad_rows, limit=limit)


# ---------------------------------------------------------------------------------------------------- writing


def arrow_schema(extra: pa.DataType) -> pa.Schema:
    """Our columns, in order, with `extra` as the type of extra_info."""
    columns = {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}.items())),
        "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}.items())),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}.items()),
        "extra_info": extra,
    }
    return pa.schema(columns.items())


def row_groups(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Groups small enough that a reader never holds much more than ROW_GROUP_BYTES of images."""
    group, size = [], 0
    for example in examples:
        group.append(example)
        size += sum(map(len, example.images))
        if len(group) == ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def common_type(types: Iterable[pa.DataType | None]) -> pa.DataType | None:
    """The one type that holds all values of an extra_info field; None if there is none (stored as JSON text)."""
    types = list(types)
    if None in types or any("struct<>" in str(t) for t in types):  # parquet has no struct without fields
        return None
    try:
        return pa.unify_schemas([pa.schema([("x", t)]) for t in types], promote_options="permissive").field("x").type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None


def write_examples(examples: Iterable[Example], path: str | Path) -> int:
    """Stream examples into one parquet file, complete or not at all; returns the number of rows.

    The type of extra_info is known only after the last row, so it is first written as JSON text, then laid out.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, final = (path.with_name(f".{path.name}.{os.getpid()}.{kind}") for kind in ("draft", "tmp"))
    types: dict[str, set] = {}
    count = 0
    try:
        with pq.ParquetWriter(draft, arrow_schema(pa.string())) as writer:
            for group in row_groups(examples):
                rows = []
                for e in group:
                    extra = drop_none(json.loads(json.dumps(e.extra | {"uid": e.uid}, default=str)))
                    for key, value in extra.items():
                        try:
                            kind = pa.array([value]).type
                        except (pa.ArrowTypeError, pa.ArrowInvalid, OverflowError):
                            kind = None
                        types.setdefault(key, set()).add(kind)
                    images = [{"bytes": data, "path": None} for data in e.images]
                    reward_model = {"style": "rule", "ground_truth": e.ground_truth}
                    rows.append((e.data_source, e.messages, images, reward_model, json.dumps(extra)))
                columns = [dict(zip(writer.schema.names, row, strict=True)) for row in rows]
                writer.write_batch(pa.RecordBatch.from_pylist(columns, schema=writer.schema))
                count += len(group)
        if count == 0:
            raise UserError(f"nothing to write to {path}: the source gave no usable row")
        first = [k for k in ("split", "index", "uid", "answer_type") if k in types]
        fields = {k: common_type(types[k]) for k in first + [k for k in types if k not in first]}
        if mixed := [k for k, t in fields.items() if t is None]:
            print(f"extra_info fields of mixed types, stored as JSON text: {', '.join(mixed)}")
        schema = arrow_schema(pa.struct([(k, t or pa.string()) for k, t in fields.items()]))
        with pq.ParquetFile(draft) as source, pq.ParquetWriter(final, schema) as writer:
            for i in range(source.num_row_groups):
                table = source.read_row_group(i)
                extras = [json.loads(text) for text in table["extra_info"].to_pylist()]
                for extra, k in itertools.product(extras, mixed):
                    if k in extra and not isinstance(extra[k], str):
                        extra[k] = json.dumps(extra[k])
                try:
                    extras = pa.array(extras, schema.field("extra_info").type)
                except pa.ArrowInvalid as e:  # integers above 2**53 in a field that also holds floats
                    raise UserError(f"{path}: extra_info does not fit one type, store that field as text: {e}") from e
                writer.write_table(table.set_column(4, schema.field("extra_info"), extras))
        os.replace(final, path)
    finally:
        draft.unlink(missing_ok=True)
        final.unlink(missing_ok=True)
    return count


# ---------------------------------------------------------------------------------------------------- sources


def keys_of(args: argparse.Namespace, prompt: str, answer: str | None) -> tuple:
    """(prompt, image, answer) columns: the flags, or this source's own names."""
    image = "images" if args.image_key is None else args.image_key
    return args.prompt_key or prompt, image, args.answer_key or answer


def answer_type(answer: str) -> str:
    """Form of a short maths answer: integer, decimal, surd, fraction, pi or other."""
    text = re.sub(r"\s|\$|\^\\circ|\^\{\\circ\}|\\degree|°", "", answer)
    if "\\pi" in text or "π" in text:
        return "pi"
    if "\\sqrt" in text or "√" in text:
        return "surd"
    if re.fullmatch(r"[+-]?(\d+|\d{1,3}(,\d{3})+)", text):
        return "integer"
    if re.fullmatch(r"[+-]?\d*\.\d+", text):
        return "decimal"
    if re.fullmatch(r"[+-]?\d*(\\[dt]?frac(\{[+-]?\d+\}|\d){2}|\d+/\d+)", text):
        return "fraction"
    return "other"


def geo3k_folders(folder: Path, args: argparse.Namespace) -> Iterator[Raw]:
    """Original InterGPS problems (id/data.json, id/img_diagram.png) in numeric order."""
    for problem in sorted((d for d in folder.iterdir() if d.name.isdecimal()), key=lambda d: int(d.name)):
        raw = Raw(str(problem), int(problem.name), problem, "geo3k", images="img_diagram.png")
        try:
            data = json.loads(read_file(problem / "data.json").decode())
            raw.truth = dict(zip("ABCDEFGH", data["choices"], strict=False))[data["answer"]]
            raw.prompt = f"{MARK}{data['annotat_text']}"
            extra = {"index": raw.number, "answer_type": answer_type(raw.truth), "letter": data["answer"]}
            raw.extra = extra | {k: data[k] for k in ("problem_type_goal", "problem_type_graph", "choices")}
        except OSError as e:
            raw.problem = f"data.json: {e.strerror}"
        except KeyError as e:
            raw.problem = f"data.json has no {e}, or its answer {e} names no choice"
        except (ValueError, TypeError, RecursionError) as e:
            raw.problem = f"data.json is damaged: {e}"
        else:
            split = data.get("data_type", args.split)
            if split != args.split:  # never let test problems pass for training ones
                raw.problem = f"data_type is {split!r} but --split is {args.split!r}; pass --split {split}"
        yield raw


def geo3k_parquet(files: list[Path], args: argparse.Namespace) -> Iterator[Raw]:
    """Rows of the hub's geometry3k shards: images, problem, answer, id, choices, ground_truth (a letter)."""
    for raw in parquet_rows(files, keys_of(args, "problem", "answer"), args.image_root, rest=True):
        raw.data_source, raw.name = "geo3k", ""  # its ids tell its rows apart
        if isinstance(raw.extra, dict):
            names = {"id": "index", "ground_truth": "letter"}
            raw.extra = {names.get(k, k): v for k, v in raw.extra.items()}
            raw.extra["answer_type"] = answer_type(str(raw.truth))
        yield raw


def geo3k_rows(args: argparse.Namespace) -> Iterator[Raw]:
    """Geometry3K from InterGPS folders, from local shards, or from the hub."""
    inputs = args.input or ["hiyouga/geometry3k"]
    folder = Path(inputs[0])
    if not folder.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", inputs[0]):
        folder = download(inputs[0], SPLITS[args.split])
        inputs = [folder]
    if folder.is_dir() and len(inputs) == 1:
        folder = folder / args.split if (folder / args.split).is_dir() else folder
        if any(d.name.isdecimal() for d in folder.iterdir()):
            return geo3k_folders(folder, args)
    return geo3k_parquet(parquet_files(inputs, args.split), args)


def download(hub_id: str, split: str) -> Path:
    """Fetch the parquet shards of one split of a Hugging Face dataset; returns the folder. Raises ValueError."""
    remedy = (
        f"On a machine with network run `hf download {hub_id} --repo-type dataset --local-dir FOLDER`, "
        "then pass --input FOLDER"
    )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as e:
        raise UserError(f"--input {hub_id}: pip install huggingface_hub to download it. {remedy}") from e
    try:
        patterns = [f"{split}*.parquet", f"*/{split}*.parquet"]
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as e:  # the hub's errors are OSErrors, a malformed id is a ValueError
        reason = str(e).splitlines()[0]
        raise UserError(
            f"--input {hub_id}: no such local path, and the download from the Hugging Face hub failed ({reason}). "
            f"{remedy}"
        ) from e


def shapes_rows(args: argparse.Namespace) -> Iterator[Raw]:
    """Toy pictures made by demo.py."""
    import demo

    keys = ("prompt", "images", None)
    for i, row in enumerate(demo.shapes_rows(n=args.n, split=args.split, seed=args.seed)):
        yield table_row(row, keys, f"shapes row {i}", i, Path())


def text_lines(file: Path) -> Iterator[str]:
    """Lines of a UTF-8 text file (newlines kept); bytes that are no UTF-8 become what BAD_BYTE finds."""
    if not file.is_file():
        raise UserError(f"--input {file}: no such file")
    try:
        f = open(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    except OSError as e:
        raise UserError(f"--input {file}: {e.strerror}") from e
    with f:
        yield from f


def not_utf8(text: str) -> str:
    """Why a line read by `text_lines` cannot be used; empty if it can."""
    found = BAD_BYTE.search(text)
    return f"not UTF-8 text (byte {ord(found[0]) - 0xDC00:#x}); save the file as UTF-8" if found else ""


def text_rows(file: Path, records: Iterable, columns: list[str], args: argparse.Namespace) -> Iterator[Raw]:
    """Raws of (line number, record or problem text) pairs, once the columns are known to be there."""
    keys = keys_of(args, "prompt", None if "reward_model" in columns else "answer")
    need_columns(columns, keys, file)
    for number, (line, record) in enumerate(records):
        yield table_row(record, keys, f"{file} line {line}", number, args.image_root or file.parent, True, file.stem)


def jsonl_rows(args: argparse.Namespace) -> Iterator[Raw]:
    """One JSON object per line; other keys than the named ones go to extra_info."""
    file = Path(args.input[0])

    def records() -> Iterator[tuple[int, dict | str]]:
        for line, text in enumerate(text_lines(file), 1):
            if problem := not_utf8(text):
                yield line, problem
            elif text.strip():
                try:
                    row = json.loads(text)
                except (ValueError, RecursionError) as e:
                    yield line, f"not valid JSON: {e}"
                    continue
                yield line, row if isinstance(row, dict) else f"JSON {type(row).__name__}, expected an object"

    # rows may leave keys out, so a column is missing only if no row has it: one cheap pass ahead of the real one
    columns = list(dict.fromkeys(k for _, row in records() if isinstance(row, dict) for k in row))
    if not columns:
        raise UserError(f"{file}: no line holds a JSON object in UTF-8")
    return text_rows(file, records(), columns, args)


def csv_rows(args: argparse.Namespace) -> Iterator[Raw]:
    """A CSV file with a header line; an image cell is one value or a JSON list of values."""
    file = Path(args.input[0])
    csv.field_size_limit(2**31 - 1)  # base64 cells
    reader = csv.reader(text_lines(file))
    columns = next(reader, None)
    if not columns:
        raise UserError(f"{file} is empty: the first line must name the columns")

    def records() -> Iterator[tuple[int, dict | str]]:
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as e:
                yield reader.line_num, f"not valid CSV: {e}"
                continue
            if cells is None:
                return
            row: dict | str = dict(zip(columns, cells, strict=False))
            if len(cells) != len(columns):
                row = f"{len(cells)} cells but the header names {len(columns)} columns"
            elif problem := not_utf8("".join(cells)):
                row = problem
            elif (cell := row.get(args.image_key or "images", "").strip()).startswith("["):
                try:
                    row[args.image_key or "images"] = json.loads(cell)
                except (ValueError, RecursionError) as e:
                    row = f"image cell {cell[:60]!r} starts like a JSON list but is none: {e}"
            if cells:  # a blank line is no row
                yield reader.line_num, row

    return text_rows(file, records(), columns, args)


def any_parquet_rows(args: argparse.Namespace) -> Iterator[Raw]:
    """Rows of any parquet file(s); other columns than the named ones go to extra_info."""
    return parquet_rows(args.input, keys_of(args, "prompt", None), args.image_root, rest=True)


SOURCES = {
    "geo3k": geo3k_rows, "shapes": shapes_rows, "jsonl": jsonl_rows, "csv": csv_rows, "parquet": any_parquet_rows,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- inspecting


def spread(values: list[int]) -> str:
    """min, median, p90 and max of a non-empty list, as text."""
    low, mid, p90, high = np.percentile(values, [0, 50, 90, 100], method="nearest")
    return f"min {low}, median {mid}, p90 {p90}, max {high}"


def inspect_file(path: str, args: argparse.Namespace) -> None:
    """Print some rows, the counts and the statistics of parquet file(s)."""
    # a file just written has our keys, whatever its source had
    prompt_key, image_key, answer_key = keys_of(args, "prompt", None) if args.file else ("prompt", "images", None)
    keys = {"prompt_key": prompt_key, "image_key": image_key, "answer_key": answer_key}
    instruction = instruction_of(args.instruction or "") if args.file else ""
    examples, bad = read_examples(path, **keys, bad_rows=args.bad_rows, limit=args.limit, instruction=instruction)
    sizes = [[decode_image(data).size for data in e.images] for e in examples]
    for e, sizes_of_e in zip(examples[: args.rows], sizes, strict=False):
        print(f"--- {shown(e.uid)}  [{shown(e.data_source)}]  answer: {shown(e.ground_truth)}")
        for m in e.messages:
            print(f"{m['role']}:", "\n".join(shown(line, 10_000) for line in m["content"].split("\n")))
        for data, (w, h) in zip(e.images, sizes_of_e, strict=True):
            with Image.open(io.BytesIO(data)) as image:
                print(f"image: {w}x{h} {image.format} {image.mode}, {len(data)} bytes")
        print(f"extra: {shown(json.dumps(e.extra, ensure_ascii=False, default=str), 10_000)}")
    print(f"=== {path}: {len(examples)} rows, {len(bad)} left out")
    print("data_source:", dict(Counter(e.data_source for e in examples).most_common()))
    for key in ("split", "answer_type"):
        print(f"{key}:", dict(Counter(str(e.extra.get(key)) for e in examples).most_common()))
    print("images per row:", dict(sorted(Counter(len(e.images) for e in examples).items())))
    if flat := [size for row in sizes for size in row]:
        print("image width:", spread([w for w, _ in flat]))
        print("image height:", spread([h for _, h in flat]))
        print("image bytes:", spread([len(data) for e in examples for data in e.images]))
    for line in first_of(bad):
        print("left out:", line)
    if args.model:
        from model import load_processor

        processor = load_processor(args.model, min_pixels=args.min_pixels, max_pixels=args.max_pixels)
        counts = [processor.count_tokens(e.messages, s) for e, s in zip(examples, sizes, strict=True)]
        print("prompt tokens, image tokens included:", spread(counts))


# ---------------------------------------------------------------------------------------------------- command line


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("source", choices=[*SOURCES, "inspect"], help="where the rows come from, or inspect FILE")
    p.add_argument("file", nargs="?", help="inspect: parquet file, folder of shards or comma list")
    p.add_argument("--out", type=Path, help="parquet file to write")
    p.add_argument("--input", nargs="+", help="file(s); geo3k: a folder, shards or a hub id")
    p.add_argument("--split", choices=list(SPLITS), default="train", help="which split; stored in extra_info.split")
    p.add_argument("--n", type=int, default=1000, help="shapes: how many rows")
    p.add_argument("--seed", type=int, default=0, help="shapes: seed")
    p.add_argument("--instruction", help=f"text behind prompts that lack it; geo3k, the default of that source: {GEO3K_HELP}")
    p.add_argument("--prompt-key", help="column of the prompt (default prompt; geo3k: problem)")
    p.add_argument("--image-key", help="column of the images (default images; '' for no images)")
    p.add_argument("--answer-key", help="column of the answer (default reward_model.ground_truth; text, geo3k: answer)")
    p.add_argument("--data-source", help="task name stored with every row; the default reward goes by it")
    p.add_argument("--system", default="", help="system message put in front of each prompt")
    p.add_argument("--image-root", type=Path, help="folder of relative image paths (default: the input's own)")
    p.add_argument("--add-image-marks", action="store_true", help="put <image> marks in front of prompts without any")
    p.add_argument("--bad-rows", choices=["error", "skip"], default="error", help="stop at bad rows, or leave them out")
    p.add_argument("--limit", type=int, help="keep only the first so many good rows")
    p.add_argument("--url-timeout", type=float, default=20.0, help="seconds for one try at an image URL")
    p.add_argument("--url-max-mb", type=float, default=32.0, help="largest image fetched from a URL, MiB")
    p.add_argument("--url-tries", type=int, default=3, help="tries per image URL")
    p.add_argument("--url-private", action="store_true", help="fetch from private, loopback and link-local addresses too")
    p.add_argument("--inspect", action="store_true", help="print rows and statistics of the file written")
    p.add_argument("--rows", type=int, default=3, help="inspect: how many rows to print in full")
    p.add_argument("--model", help="inspect: model or processor whose prompt tokens to count")
    p.add_argument("--min-pixels", type=int, help="inspect: as in training, for the token count")
    p.add_argument("--max-pixels", type=int, help="inspect: as in training, for the token count")
    return p.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    for flag, value in {"--n": args.n, "--limit": args.limit, "--url-tries": args.url_tries}.items():
        if value is not None and value < 1:
            raise UserError(f"{flag} is {value}, expected at least 1")
    if args.source == "inspect":
        if not args.file:
            raise UserError("inspect needs a file: prepare_data.py inspect FILE.parquet")
        return inspect_file(args.file, args)
    if args.file:
        raise UserError(f"unexpected argument {args.file!r}; pass it as --input {args.file}")
    if args.out is None:
        raise UserError("--out is missing: give the parquet file to write")
    if (args.out.exists() and not args.out.is_file()) or existing(args.out.parent).is_file():
        raise UserError(f"--out is {args.out}, expected the parquet file to write, e.g. --out {args.source}.parquet")
    if args.source in ("jsonl", "csv", "parquet") and not args.input:
        raise UserError(f"{args.source} needs --input FILE")
    if args.source in ("jsonl", "csv") and len(args.input) > 1:
        raise UserError(f"{args.source} takes one --input file, got {len(args.input)}: {' '.join(args.input)}")
    if args.input and args.out.resolve() in [Path(i).resolve() for i in args.input]:
        raise UserError(f"--out {args.out} is also the --input; write to another file")
    check_writable(args.out.parent, f"--out {args.out}")
    if args.instruction is None and args.source == "geo3k":
        args.instruction = "geo3k"
    fetch = partial(
        fetch_url, timeout=args.url_timeout, max_bytes=int(args.url_max_mb * 2**20), tries=args.url_tries,
        private=args.url_private,
    )  # fmt: skip
    build = partial(
        build_example, fetch=fetch, system=args.system, add_marks=args.add_image_marks,
        data_source=args.data_source, split=args.split, instruction=instruction_of(args.instruction or ""),
    )  # fmt: skip
    bad: list[str] = []
    raws = tqdm(SOURCES[args.source](args), desc=args.source, unit=" rows", disable=None)

    def good() -> Iterator[Example]:
        count = 0
        for example in itertools.islice(checked(raws, build, bad), args.limit):
            count += 1
            yield example
        refuse_bad(bad, count, args.bad_rows)  # before write_examples puts the file in place
        if bad and not count:
            raise UserError("\n  ".join([f"nothing to write to {args.out}: all {len(bad)} rows are bad:", *first_of(bad)]))

    with writing(args.out, f"--out {args.out}"):
        count = write_examples(good(), args.out)
    print(f"wrote {count} rows ({args.out.stat().st_size / 2**20:.1f} MiB) to {args.out}; left out {len(bad)}")
    for line in first_of(bad):
        print("left out:", line)
    if args.inspect:
        inspect_file(str(args.out), args)


if __name__ == "__main__":
    try:
        main(parse_args())
    except UserError as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT
