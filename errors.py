"""Errors that only the user can fix, and how scripts report them. It imports no other module of this project, so every
file can import it."""

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
    """A mistake of the user's, or a state of the machine that only they can fix. The text names the flag, file or row,
    the values and the remedy; scripts print it as one line. Every other exception keeps its traceback."""


def need(ok: bool, message: str) -> None:
    """Raise UserError with this message unless `ok` is true."""
    if not ok:
        raise UserError(message)


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return " (did you mean A or B?)" with the known words that are most like a wrong one, each after `prefix`, or ""
    if none is close."""
    matches = " or ".join(prefix + match for match in difflib.get_close_matches(word, known, cutoff=0.65))
    return matches and f" (did you mean {matches}?)"


def nearest_path(path: str | Path) -> str:
    """Return " (did you mean A or B?)" with the most similar paths in the folder of a wrong path, or "" if none is
    close."""
    path = Path(path)
    names = os.listdir(path.parent) if path.parent.is_dir() and not path.exists() else ()
    return nearest(path.name, names, str(path).removesuffix(path.name))


def in_copy(module: str) -> bool:
    """Return whether the file of one of our modules exists: a fork of the project may delete optional folders."""
    return (Path(__file__).parent / f"{module.replace('.', '/')}.py").is_file()


def plug_in(module: str, flag: str, remedy: str = "leave the flag out") -> ModuleType:
    """Import one of our modules that may have been deleted. Raise a UserError that names the flag if it has been."""
    need(in_copy(module), f"{flag}: {module.replace('.', '/')}.py is not in this copy; {remedy}")
    return importlib.import_module(module)


@contextmanager
def as_user_error(errors: type[Exception] | tuple[type[Exception], ...], message: str) -> Iterator[None]:
    """Raise a UserError in place of these errors: `message`, then the first line of the original error's text."""
    try:
        yield
    except errors as error:
        raise UserError(f"{message}: {str(error).strip().partition(chr(10))[0]}") from error


@dataclass(frozen=True)
class ErrorContext(AbstractContextManager):
    """A context manager that adds a line to any exception raised inside it, which keeps its type and traceback:
    `with ErrorContext("row 'a1', response '...'"):`."""

    text: str

    def __exit__(self, error_type: type | None, error: BaseException | None, traceback: object) -> None:
        if error is not None and self.text:
            error.add_note(self.text)


# ----------------------------------------------------------------------------------------------------------------------
# Printed text

HERE = re.escape(str(Path(__file__).parent))
# Files whose frames surround users' code in a traceback
CALLERS = re.compile(rf"{HERE}/(rewards/|reward\.py|envs/_)|/asyncio/|/concurrent/|<frozen import")


def printable(text: object, length: int = 600, keep: str = "") -> str:
    """Return a text that is safe to print: control characters other than `keep` are escaped, and it is cut after
    `length` characters."""
    text = str(text)
    text, ending = text[:length], f"... ({len(text)} characters)" if len(text) > length else ""
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
    return text + ending


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
    """An output file that drops data that it cannot write because its reader is gone or its disk is full, so that no
    run ends for that reason; all values that matter are in metrics.jsonl."""

    def write(self, data: bytes) -> int | None:
        with suppress(OSError):
            return super().write(data)
        return len(data)


def keep_printing() -> None:
    """Make stdout and stderr of this process accept any text, flush each line and never fail."""
    for name in ("stdout", "stderr"):
        if stream := getattr(sys, name):
            file = io.BufferedWriter(LossyFile(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=True))


class Interrupted(Exception):
    """Raised when a run was asked to stop and has saved its state. Its text explains how to resume."""

    def __init__(self, signal_number: int, text: str):
        super().__init__(text)
        self.signal_number = signal_number


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENOENT, errno.EISDIR, errno.ENOTDIR,
                       errno.ENAMETOOLONG)  # fmt: skip


@contextmanager
def report_write_errors(path: Path, what: str, remedy: str = "free disk space or use another folder") -> Iterator[None]:
    """Raise a UserError in place of an error from a full disk or a path that cannot be written to. It begins with
    `what`, the flag or thing that was being written, and names the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = getattr(error, "errno", None)
        if isinstance(error, SafetensorError) and (match := re.search(r"os error (\d+)", str(error))):
            code = int(match[1])  # safetensors wraps errors of the operating system in its own class
        if code not in DISK_FULL_ERRNOS + NOT_WRITABLE_ERRNOS:
            raise
        file = getattr(error, "filename", None) or path
        problem = f"{file} cannot be written ({os.strerror(code)})"
        if code in DISK_FULL_ERRNOS:
            problem = f"no space left for {file} ({free_bytes(path) / 1e9:.3g} GB free)"
        raise UserError(f"{what}: {problem}; {remedy}") from error


def check_writable(folder: Path, what: str) -> None:
    """Raise UserError if no file can be created in `folder` or, while that does not exist, in its nearest parent that
    does. Meant to be called before any work; it leaves no file."""
    with report_write_errors(folder, what), tempfile.TemporaryFile(dir=nearest_existing(folder)) as file:
        file.write(bytes(4096))
        file.flush()


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    path = path.resolve()
    return next(p for p in (path, *path.parents) if p.exists())


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds, or would hold, a path."""
    return shutil.disk_usage(nearest_existing(path)).free
