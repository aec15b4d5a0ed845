"""Data files named by paths, globs and URLs, and the rows of parquet files. A row that cannot be read is represented by
a string with the reason."""

import glob
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from errors import as_user_error, nearest_path, need, plug_in

File = Any  # a Path, or a remote.RemoteFile
# URL schemes that rows may use, and the package that reads each: remote stores only, nothing that could read files of
# this machine or run code. Flags may use any scheme.
ROW_SCHEMES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
               "abfss": "adlfs", "hf": "huggingface_hub", "oss": "ossfs", "r2": "s3fs"}  # fmt: skip
STORE_ERRORS = {  # the error class of each library that reads a store, by module
    "botocore.exceptions": "BotoCoreError", "google.auth.exceptions": "GoogleAuthError",
    "azure.core.exceptions": "AzureError", "aiohttp": "ClientError", "gcsfs.retry": "HttpError",
}  # fmt: skip
Record = dict | str  # a row by column, or the reason why it cannot be read
# The line of a bad row: its file and number, unless it is a folder, and the reason
BAD_ROW_PATTERN = re.compile(r"(?:(.*? (?:row|line)) (\d+)(?=: ))?(.*)", re.DOTALL)
SPLITS = {"train": "train", "val": "validation", "test": "test"}  # our name -> the hub's name
BATCH_ROWS = 16  # max rows of a parquet file that are read at once
BATCH_BYTES = 2 << 20  # target size in memory of such a batch of rows
MAX_ROW_BYTES = 256 << 20  # per row in memory, or per line of a text file
VALUE_BYTES = 100  # per value as a Python object: a few kilobytes of a file can hold millions of nulls
# Errors of converting single values to Python: bytes that are not UTF-8, dates after the year 9999, deep nesting
CELL_ERRORS = (pa.ArrowException, ValueError, OverflowError, RecursionError)


def url_scheme(name: str) -> str:
    """Return the scheme of a URL in lower case, or "" if the name is not a URL."""
    return name.partition("://")[0].lower() if "://" in name else ""


def store_errors() -> tuple[type[Exception], ...]:
    """Return the errors besides OSError and ValueError that reading from a store may raise, of the loaded libraries."""
    return tuple(getattr(sys.modules[m], name) for m, name in STORE_ERRORS.items() if m in sys.modules)


def to_path(name: str) -> File:
    """Return the file or folder that the user names by a path, a file:// URL or another URL."""
    if url_scheme(name) in ("", "file"):
        return Path(name.removeprefix("file://"))
    return plug_in("sources.remote", name, "use a path on this machine").RemoteFile.from_url(name)


def expand_data_paths(path: str | Path | list, split: str | None = None) -> list[File]:
    """Return the files, in order, named by a file, a folder of shards, a glob, a comma-separated list, or a list of
    these; each may be a URL.

    From a folder with shards of several splits, return only those of `split`. Raise UserError if nothing is found.
    """
    name = str(path)
    need(path, "--input is required: the files to read")
    if isinstance(path, list | tuple):
        return list(chain.from_iterable(expand_data_paths(part, split) for part in path))
    if "," in name and not os.path.exists(name):
        return expand_data_paths([part.strip() for part in name.split(",") if part.strip()], split)
    if (file := to_path(name)).is_dir():
        files = split_shards(file, split)
    elif file.is_file():
        files = [file]
    else:
        matches = map(Path, glob.glob(name)) if isinstance(file, Path) else file.parent.glob(file.name)
        files = sorted((p for p in matches if p.is_file()), key=str)
    of_split = f" of --split {split}" if split else ""
    need(files, f"{name}: no such file or folder of parquet files{of_split}, and no file matches it as a glob"
         f"{nearest_path(name)}")
    return files


def split_shards(folder: File, split: str | None) -> list[File]:
    """Return the parquet files of a folder, or of its subfolder `data`. If file names start with the names of splits,
    return only the files of `split`."""
    files = sorted([*folder.glob("*.parquet")] or folder.glob("data/*.parquet"), key=str)
    by_split = {name: [f for f in files if f.name.startswith(hub_name)] for name, hub_name in SPLITS.items()}
    present = [name for name, shards in by_split.items() if shards]
    if split and present:
        return by_split[split]
    need(len(present) <= 1,
         f"{folder} contains shards of several splits ({', '.join(present)}); pass one split, e.g. '{folder}/train*'")
    return files


def unique_file_names(files: list[File]) -> list[str]:
    """Return names of the files that are unique, for uids: paths relative to their common folder, without suffix."""
    paths = [Path(os.path.abspath(str(file))).with_suffix("") for file in files]
    folder = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(folder)) for path in paths]


def batch_records(batch: pa.RecordBatch) -> list[Record]:
    """Return the rows of a batch. A row that is too large, or has a value that Python cannot represent, is replaced by
    a string with the reason."""
    size = batch.nbytes + VALUE_BYTES * sum(map(count_values, batch.columns))
    reason = f"it takes {size} bytes of memory, but the limit is {MAX_ROW_BYTES}; split the row"
    if size <= MAX_ROW_BYTES:
        try:
            return batch.to_pylist()
        except CELL_ERRORS as e:
            reason = f"a value cannot be read: {type(e).__name__}: {e}"
    if batch.num_rows == 1:
        return [reason]
    return list(chain.from_iterable(batch_records(batch.slice(i, 1)) for i in range(batch.num_rows)))


def count_values(array: pa.Array) -> int:
    """Return the number of values in a column, including those inside its lists and structs."""
    inner = array.flatten() if pa.types.is_nested(array.type) else []  # the values of lists, or the fields of a struct
    return len(array) + sum(map(count_values, inner if isinstance(inner, list) else [inner]))


def open_parquet(file: File) -> pq.ParquetFile:
    """Open a file for reading piece by piece, verifying the checksums of its pages if it has any. Without a buffer size
    pyarrow would read a whole row group at once."""
    opened = file if isinstance(file, Path) else file.open()
    return pq.ParquetFile(opened, pre_buffer=False, buffer_size=1 << 16, page_checksum_verification=True)


def parquet_columns(file: File) -> list[str]:
    """Return the names of a file's columns. Raise UserError if it is not a parquet file."""
    with as_user_error((pa.ArrowException, OSError, *store_errors()), f"{file} is not a parquet file, or is damaged"):
        return open_parquet(file).schema_arrow.names


def parquet_rows(parquet: pq.ParquetFile, columns: list[str]) -> Iterator[Record]:
    """Yield the rows of a file. Large rows are read in small batches, to limit memory."""
    groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
    values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
    size = sum(group.total_byte_size for group in groups) + VALUE_BYTES * values
    batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES * parquet.metadata.num_rows // max(1, size)))
    return chain.from_iterable(map(batch_records, parquet.iter_batches(batch_rows, columns=columns)))


def build_extra_info_column(extras: list[dict]) -> pa.StructArray:
    """Return the extra_info column. A field whose values have no common type is stored as JSON text, and its name is
    printed."""
    columns: dict[str, pa.Array] = {}
    mixed = []
    for name in dict.fromkeys(chain.from_iterable(extras)):
        values = [extra.get(name) for extra in extras]
        column = None
        with suppress(pa.ArrowTypeError, pa.ArrowInvalid, OverflowError):
            column = pa.array(values)
        if column is None or "struct<>" in str(column.type):  # parquet does not support structs without fields
            mixed.append(name)
            column = pa.array([v if isinstance(v, str | None) else json.dumps(v) for v in values])
        columns[name] = column
    if mixed:
        print(f"extra_info fields of mixed types, stored as JSON text: {', '.join(mixed)}")
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


def summarise_bad_rows(bad: list[str]) -> list[str]:
    """Return the first few lines, with one line for all rows of a file that are bad for the same reason, and the number
    of the rows that these do not include."""
    rows: dict[tuple[str, str], list[str]] = {}
    for line in bad:
        file, number, reason = BAD_ROW_PATTERN.fullmatch(line).groups()
        rows.setdefault((file, reason), []).append(number)
    shown = dict(islice(rows.items(), 5))
    lines = []
    for (file, reason), numbers in shown.items():
        others = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
        lines.append(f"{file}{'s' * (len(numbers) > 1)} {', '.join(numbers[:5])}{others}{reason}" if file else reason)
    rest = len(bad) - sum(map(len, shown.values()))
    return lines + [f"... and {rest} more"] * (rest > 0)
