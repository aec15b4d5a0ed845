"""Files of a run: the lock of its folder, and readers and atomic writers."""

import fcntl
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from errors import UserError, as_user_error, describe_error, report_write_errors
from report.records import drop_images


def lock_folder(out: Path, patience: float = 5.0) -> object:
    """Create and lock the folder `out`, and return the lock: it is held while that object exists, and released when the
    process ends, even if it is killed. Raise UserError, which names the other process, if the folder is still locked
    after `patience` seconds. (torchrun restarts a run at once, when its killed processes may not have ended yet.)"""
    with report_write_errors(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".lock", "a+")
    deadline = time.monotonic() + patience
    while not try_lock(file):
        if time.monotonic() > deadline:
            holder = Path(file.name).read_text().strip()
            raise UserError(f"--out {out}: another run writes there ({holder}); wait for it, or choose another folder")
        time.sleep(0.2)
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"process {os.getpid()} on {platform.node()}, since {since}", file=file, flush=True)
    return file


def try_lock(file: Any) -> bool:
    """Return False if another process holds the lock of the file; else lock it, if the file system supports that."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems have no locks
        message = f"{file.name} cannot be locked ({error.strerror}); make sure that no other run writes to this folder"
        print(message, file=sys.stderr)
    return True


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a metrics.jsonl file without an incomplete last line. Raise UserError if a line is damaged."""
    with as_user_error(OSError, f"{path} cannot be read; move it away"):
        if path.is_fifo():
            raise OSError("it is a pipe, not a file")
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
            float(rows[-1]["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} line {number}: damaged ({describe_error(error)}); remove the line") from error
    return rows


def write_rows(path: Path, rows: Sequence[dict[str, float]]) -> None:
    """Write a metrics.jsonl file."""
    write_text(path, "".join(map(json_line, rows)))


def json_line(row: dict[str, float]) -> str:
    """Return a row as a line of JSON, which has no NaN or infinity: these become null."""
    finite = {key: x if x is not None and math.isfinite(x) else None for key, x in row.items()}
    return json.dumps(finite) + "\n"


def write_records(path: Path, records: Sequence[dict]) -> None:
    """Write one line of JSON per record, without the images of episodes."""
    write_text(path, "".join(json.dumps(drop_images(record)) + "\n" for record in records))


def write_text(path: Path, text: str) -> None:
    """Write a text file through a temporary file, so that no reader sees an incomplete one, even after a crash."""
    with report_write_errors(path, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # without this, a power failure could leave an empty file
        os.replace(temporary, path)
