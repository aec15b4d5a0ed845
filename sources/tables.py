"""Tables of rows in parquet files, as found. A row that cannot be read is a text that says why."""

import glob
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from errors import nearest_path, need, refusing
from sources.paths import File, as_path, store_errors

Record = dict | str  # a row by its columns, or why it cannot be read
SPLITS = {"train": "train", "val": "validation", "test": "test"}  # our name -> the hub's name
BATCH_ROWS = 64  # of a parquet file that are read at once, or fewer
BATCH_BYTES = 2 << 20
MAX_ROW_BYTES = 256 << 20  # of a row in memory, or of a line of text
VALUE_BYTES = 100  # of each value as a Python object: a few kilobytes of a file can hold millions of nulls
# What single values raise on the way to Python: bytes that are no UTF-8, dates beyond 9999, depth
CELL_ERRORS = (pa.ArrowException, ValueError, OverflowError, RecursionError)


def data_files(path: str | Path | list, split: str | None = None) -> list[File]:
    """A file, a folder of shards, a glob, a comma list or a list of those, URLs among them -> files in order.

    Of a folder with shards of several splits only those of `split` are taken.
    """
    name = str(path)
    need(path, "--input is missing: the files to read")
    if isinstance(path, list | tuple):
        files = list(chain.from_iterable(data_files(p, split) for p in path))
    elif "," in name and not os.path.exists(name):
        files = data_files([p.strip() for p in name.split(",") if p.strip()], split)
    elif (file := as_path(name)).is_dir():
        files = shards_of(file, split)
    elif file.is_file():
        files = [file]
    else:
        found = map(Path, sorted(glob.glob(name))) if isinstance(file, Path) else file.glob()
        files = [p for p in found if p.is_file()]
    of_split = f" of --split {split}" if split else ""
    need(files, f"{name}: no such file, nor folder of parquet files{of_split}, nor glob of either{nearest_path(name)}")
    return files


def shards_of(folder: File, split: str | None) -> list[File]:
    """The parquet files of a folder, or of its `data`; those of `split` if their names begin with splits."""
    files = sorted(folder.glob("*.parquet")) or sorted(folder.glob("data/*.parquet"))
    by_split = {ours: [f for f in files if f.name.startswith(hub)] for ours, hub in SPLITS.items()}
    there = [ours for ours, shards in by_split.items() if shards]
    if split and there:
        return by_split[split]
    told = f"{folder} holds shards of {', '.join(there)}; pass those of one, e.g. '{folder}/train*'"
    need(len(there) <= 1, told)
    return files


def file_names(files: list[File]) -> list[str]:
    """The files' names for uids: each without its ending, with as many folders in front as tell it from the others."""
    paths = [Path(os.path.abspath(str(f))).with_suffix("").parts for f in files]
    names = []
    for path in paths:
        others = [p for p in paths if p != path]
        n = next(n for n in range(1, len(path) + 1) if all(p[-n:] != path[-n:] for p in others))
        names.append("/".join(path[-n:]))
    return names


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


def parquet_columns(file: File) -> list[str]:
    """Names of the columns. Raises UserError if it is no parquet file."""
    with refusing((pa.ArrowException, OSError, *store_errors()), f"{file} is no parquet file, or is damaged"):
        return pq.read_schema(file if isinstance(file, Path) else file.open()).names


def parquet_rows(parquet: pq.ParquetFile, columns: list[str]) -> Iterator[Record]:
    """Rows of a file, a few MiB of them in memory at once."""
    groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
    values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
    size = sum(group.total_byte_size for group in groups) + VALUE_BYTES * values
    at_once = max(1, min(BATCH_ROWS, BATCH_BYTES * parquet.metadata.num_rows // max(1, size)))
    for batch in parquet.iter_batches(at_once, columns=columns):
        yield from batch_records(batch)


def extra_column(extras: list[dict]) -> pa.StructArray:
    """The extra_info column. A field whose values have no common type is stored as JSON text, and that is said."""
    first = [key for key in ("split", "index", "uid", "answer_type") if any(key in extra for extra in extras)]
    names = dict.fromkeys(chain(first, *extras))
    columns: dict[str, pa.Array] = {}
    mixed = []
    for name in names:
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
