"""Mistakes that only the user can mend, and how they are told. Imports nothing of ours, so that every file can import
it."""

import difflib
import errno
import importlib
import io
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from safetensors import SafetensorError


class UserError(ValueError):
    """A mistake of the user's, or a state of the machine that only they can mend. The text names the flag, file or row,
    the values and the remedy; scripts print it as one line. Every other exception keeps its traceback."""


def need(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; nearest: A, B" with the known words most like a wrong one, or "" if there are none."""
    found = ", ".join(difflib.get_close_matches(word, list(known), cutoff=0.5))
    return found and f"; nearest: {found}"


def nearest_path(path: str | Path) -> str:
    """Return "; nearest: A, B" with the most similar names in the folder of a wrong path, or "" if there are none."""
    folder = Path(path).parent
    return nearest(Path(path).name, os.listdir(folder) if folder.is_dir() and not Path(path).exists() else ())


def in_copy(module: str) -> bool:
    """Return whether the file of one of our modules is there: who forks the project may delete optional folders."""
    return (Path(__file__).parent / f"{module.replace('.', '/')}.py").is_file()


def plug_in(module: str, flag: str, remedy: str = "leave the flag out") -> ModuleType:
    """Import one of our modules that may have been deleted. Raise UserError that names the flag if it has been."""
    need(in_copy(module), f"{flag}: {module.replace('.', '/')}.py is not in this copy; {remedy}")
    return importlib.import_module(module)


@contextmanager
def as_user_error(errors: type[Exception] | tuple[type[Exception], ...], told: str) -> Iterator[None]:
    """Makes these errors UserErrors that begin with `told`, and end with the first line of their own text."""
    try:
        yield
    except errors as error:
        raise UserError(f"{told}: {str(error).strip().partition(chr(10))[0]}") from error


@dataclass(frozen=True)
class ErrorContext(AbstractContextManager):
    """`with Note("row 'a1', response '...'"):` adds a line to whatever is raised inside, which keeps its type and
    traceback."""

    text: str

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        if error is not None and self.text:
            error.add_note(self.text)


# ----------------------------------------------------------------------------------------------------------------------
# What is printed

HERE = re.escape(str(Path(__file__).parent))
# Files that run users' code
CALLERS = re.compile(rf"{HERE}/(rewards/|reward\.py|envs/_)|/asyncio/|/concurrent/|<frozen import")


def printable(text: object, length: int = 600, keep: str = "") -> str:
    """Return a text that is safe to print: without control characters other than `keep`, cut after `length`."""
    text = str(text)
    cut = f"... ({len(text)} characters)" if len(text) > length else ""
    text = text[:length]
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
    return text + cut


def describe_error(error: BaseException) -> str:
    """Return the type of an exception and the first line of its text, even if the user's __str__ fails."""
    text = traceback.format_exception_only(error)[0].removeprefix("errors.")
    return printable(text.strip().partition("\n")[0], 300)


def users_traceback(error: BaseException) -> str:
    """Return the traceback of an exception in a user's code, without our own frames around it."""
    frame = error.__traceback__
    while frame and frame.tb_next and CALLERS.search(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    text = "".join(traceback.format_exception(type(error), error, frame))
    return printable(text[-20_000:], 20_000, keep="\n")


class LossyFile(io.FileIO):
    """An output file that drops what cannot be written because its reader is gone or its disk is full. So no run ends
    for that reason; metrics.jsonl has what matters."""

    def write(self, data: bytes) -> int | None:
        with suppress(OSError):
            return super().write(data)
        return len(data)


def keep_printing() -> None:
    """Make stdout and stderr of this process take any text, line by line, and never fail."""
    for name in ("stdout", "stderr"):
        if stream := getattr(sys, name):
            file = io.BufferedWriter(LossyFile(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=True))


class Interrupted(Exception):
    """A run that was asked to end has saved what there was to save. The text says how to go on."""

    def __init__(self, signal_number: int, text: str):
        super().__init__(text)
        self.signal_number = signal_number


DISK_FULL_ERRNOS, NOT_WRITABLE_ERRNOS = (errno.ENOSPC, errno.EDQUOT), (errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENOENT,
                                               errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)  # fmt: skip


@contextmanager
def report_write_errors(path: Path, what: str, remedy: str = "free some, or give another folder") -> Iterator[None]:
    """A full disk or a folder that must not be written to becomes a UserError that names `what` was written and
    where."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        if isinstance(error, SafetensorError) and (said := re.search(r"os error (\d+)", str(error))):
            number = int(said[1])  # its own class also for what the system says
        if number not in DISK_FULL_ERRNOS + NOT_WRITABLE_ERRNOS:
            raise
        where = getattr(error, "filename", None) or path
        why = f"{where} cannot be written ({os.strerror(number)})"
        if number in DISK_FULL_ERRNOS:
            why = f"no space left for {where} ({free_bytes(path)} bytes free)"
        raise UserError(f"{what}: {why}; {remedy}") from error


def check_writable(folder: Path, what: str) -> None:
    """Before any work: can files be made in `folder`, or in what exists of the way to it? UserError if not. Leaves
    nothing."""
    with report_write_errors(folder, what):
        with tempfile.TemporaryFile(dir=nearest_existing(folder)) as file:
            file.write(bytes(4096))
            file.flush()


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.resolve()
    return next(p for p in (path, *path.parents) if p.exists())


def free_bytes(path: Path) -> int:
    """Free space of the disk that holds, or would hold, a path."""
    return shutil.disk_usage(nearest_existing(path)).free
