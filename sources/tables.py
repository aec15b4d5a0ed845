"""What paths and URLs name, and tables of rows in parquet files. A row that cannot be read is a text that says why."""

import glob
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from errors import as_user_error, nearest_path, need, plug_in

File = Any  # a Path, or a remote.RemoteFile
# Schemes that rows may name: remote stores, and nothing that could be this machine, or code. The user may name any.
ROW_SCHEMES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
               "abfss": "adlfs", "hf": "huggingface_hub", "oss": "ossfs", "r2": "s3fs"}  # fmt: skip
STORE_ERRORS = {  # of the stores' libraries, where they are loaded
    "botocore.exceptions": "BotoCoreError", "google.auth.exceptions": "GoogleAuthError",
    "azure.core.exceptions": "AzureError", "aiohttp": "ClientError", "gcsfs.retry": "HttpError",
}  # fmt: skip
Record = dict | str  # a row by its columns, or why it cannot be read
SPLITS = {"train": "train", "val": "validation", "test": "test"}  # our name -> the hub's name
BATCH_ROWS = 16  # of a parquet file that are read at once, or fewer
BATCH_BYTES = 2 << 20
MAX_ROW_BYTES = 256 << 20  # of a row in memory, or of a line of text
VALUE_BYTES = 100  # of each value as a Python object: a few kilobytes of a file can hold millions of nulls
# What single values raise on the way to Python: bytes that are no UTF-8, dates beyond 9999, depth
CELL_ERRORS = (pa.ArrowException, ValueError, OverflowError, RecursionError)


def url_scheme(name: str) -> str:
    """Of a URL, in small letters; "" of what is none."""
    return name.partition("://")[0].lower() if "://" in name else ""


def store_errors() -> tuple[type[Exception], ...]:
    """What reading may raise besides OSErrors and ValueErrors."""
    return tuple(getattr(sys.modules[m], name) for m, name in STORE_ERRORS.items() if m in sys.modules)


def to_path(name: str) -> File:
    """Return what the user names: a path, file:// one too, or a URL."""
    if url_scheme(name) in ("", "file"):
        return Path(name.removeprefix("file://"))
    return plug_in("sources.remote", name, "give a path of this machine").RemoteFile.from_url(name)


def expand_data_paths(path: str | Path | list, split: str | None = None) -> list[File]:
    """Return the files, in order, of a file, a folder of shards, a glob, a comma list or a list of those, URLs among
    them.

    Of a folder with shards of several splits only those of `split` are taken.
    """
    name = str(path)
    need(path, "--input is missing: the files to read")
    if isinstance(path, list | tuple):
        return list(chain.from_iterable(expand_data_paths(part, split) for part in path))
    if "," in name and not os.path.exists(name):
        return expand_data_paths([part.strip() for part in name.split(",") if part.strip()], split)
    if (file := to_path(name)).is_dir():
        files = split_shards(file, split)
    elif file.is_file():
        files = [file]
    else:
        found = map(Path, glob.glob(name)) if isinstance(file, Path) else file.parent.glob(file.name)
        files = sorted((p for p in found if p.is_file()), key=str)
    of_split = f" of --split {split}" if split else ""
    need(files, f"{name}: no such file, nor folder of parquet files{of_split}, nor glob of either{nearest_path(name)}")
    return files


def split_shards(folder: File, split: str | None) -> list[File]:
    """Return the parquet files of a folder, or of its `data`; those of `split` if their names begin with splits."""
    files = sorted([*folder.glob("*.parquet")] or folder.glob("data/*.parquet"), key=str)
    by_split = {ours: [f for f in files if f.name.startswith(hub)] for ours, hub in SPLITS.items()}
    there = [ours for ours, shards in by_split.items() if shards]
    if split and there:
        return by_split[split]
    need(len(there) <= 1, f"{folder} holds shards of {', '.join(there)}; pass those of one, e.g. '{folder}/train*'")
    return files


def unique_file_names(files: list[File]) -> list[str]:
    """Return the files' names for uids: without their ending, from the folder on that holds all of them."""
    paths = [Path(os.path.abspath(str(file))).with_suffix("") for file in files]
    folder = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(folder)) for path in paths]


def batch_records(batch: pa.RecordBatch) -> list[Record]:
    """Return the rows of a batch. A row that is too large, or has a value that Python cannot hold, is replaced by the
    reason, a text; the other rows stay."""
    size = batch.nbytes + VALUE_BYTES * sum(map(count_values, batch.columns))
    reason = f"it takes {size} bytes of memory, at most {MAX_ROW_BYTES} are read; split the row"
    if size <= MAX_ROW_BYTES:
        try:
            return batch.to_pylist()
        except CELL_ERRORS as e:
            reason = f"a value cannot be read: {type(e).__name__}: {e}"
    if batch.num_rows == 1:
        return [reason]
    return list(chain.from_iterable(batch_records(batch.slice(i, 1)) for i in range(batch.num_rows)))


def count_values(array: pa.Array) -> int:
    """Return how many values a column has, those inside of its lists and structs included."""
    inner = array.flatten() if pa.types.is_nested(array.type) else []  # a list's values, or the columns of a struct
    return len(array) + sum(map(count_values, inner if isinstance(inner, list) else [inner]))


def open_parquet(file: File) -> pq.ParquetFile:
    """Open a file to read it piece by piece, and verify the checksums of its pages if it has any. Without a buffer size
    pyarrow reads a whole row group at once."""
    opened = file if isinstance(file, Path) else file.open()
    return pq.ParquetFile(opened, pre_buffer=False, buffer_size=1 << 16, page_checksum_verification=True)


def parquet_columns(file: File) -> list[str]:
    """Return the names of the columns. Raise UserError if it is no parquet file."""
    with as_user_error((pa.ArrowException, OSError, *store_errors()), f"{file} is no parquet file, or is damaged"):
        return open_parquet(file).schema_arrow.names


def parquet_rows(parquet: pq.ParquetFile, columns: list[str]) -> Iterator[Record]:
    """Yield the rows of a file, of which few are in memory at once if they are large."""
    groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
    values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
    size = sum(group.total_byte_size for group in groups) + VALUE_BYTES * values
    at_once = max(1, min(BATCH_ROWS, BATCH_BYTES * parquet.metadata.num_rows // max(1, size)))
    return chain.from_iterable(map(batch_records, parquet.iter_batches(at_once, columns=columns)))


def build_extra_info_column(extras: list[dict]) -> pa.StructArray:
    """Return the extra_info column. A field whose values have no common type is stored as JSON text, and is printed."""
    columns: dict[str, pa.Array] = {}
    mixed = []
    for name in dict.fromkeys(chain.from_iterable(extras)):
        values = [extra.get(name) for extra in extras]
        column = None
        with suppress(pa.ArrowTypeError, pa.ArrowInvalid, OverflowError):
            column = pa.array(values)
        if column is None or "struct<>" in str(column.type):  # parquet has no struct without fields
            mixed.append(name)
            column = pa.array([v if isinstance(v, str | None) else json.dumps(v) for v in values])
        columns[name] = column
    if mixed:
        print(f"extra_info fields of mixed types, stored as JSON text: {', '.join(mixed)}")
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))
