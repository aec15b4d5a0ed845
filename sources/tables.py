"""Tables of rows, as found: parquet, jsonl, csv. A row that cannot be read is a text that says why."""

import csv
import glob
import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pyarrow as pa

from errors import UserError, need, refusing

Record = dict | str  # a row by its columns, or why it cannot be read
SPLITS = {"train": "train", "val": "validation", "test": "test"}  # our name -> the hub's name
# What single values raise on the way to Python: bytes that are no UTF-8, dates beyond 9999, depth
CELL_ERRORS = (pa.ArrowException, ValueError, OverflowError, RecursionError)


def data_files(path: str | Path | list, split: str | None = None) -> list[Path]:
    """A file, a folder of shards, a glob, a comma list or a list of those -> files in order.

    Of a folder with shards of several splits only those of `split` are taken.
    """
    name = str(path)
    if isinstance(path, list | tuple):
        files = list(chain.from_iterable(data_files(p, split) for p in path))
    elif Path(name).is_dir():
        files = shards_of(Path(name), split)
    elif Path(name).is_file():
        files = [Path(name)]
    elif "," in name:
        files = data_files([p.strip() for p in name.split(",") if p.strip()], split)
    else:
        files = [Path(p) for p in sorted(glob.glob(name)) if os.path.isfile(p)]
    of_split = f" of --split {split}" if split else ""
    need(files, f"{name}: no such file or folder of parquet files{of_split}; check --data or --input")
    return files


def download(hub_id: str, split: str) -> Path:
    """Fetch the parquet shards of one split of a dataset of the Hugging Face hub; returns the folder."""
    shards = f"{SPLITS[split]}*.parquet"
    remedy = f"run `hf download {hub_id} --repo-type dataset --local-dir FOLDER` elsewhere and pass --input FOLDER"
    told = f"--input {hub_id}: no such local path, and no download from the Hugging Face hub; {remedy}"
    with refusing((ImportError, OSError, ValueError), told):  # the hub's errors are OSErrors; ValueError: malformed id
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=[shards, f"*/{shards}"]))


def shards_of(folder: Path, split: str | None) -> list[Path]:
    """The parquet files of a folder, or of its `data`; those of `split` if their names begin with splits."""
    files = sorted(folder.glob("*.parquet")) or sorted(folder.glob("data/*.parquet"))
    by_split = {ours: [f for f in files if f.name.startswith(hub)] for ours, hub in SPLITS.items()}
    there = [ours for ours, shards in by_split.items() if shards]
    if split and there:
        return by_split[split]
    told = f"{folder} holds shards of {', '.join(there)}; pass those of one, e.g. '{folder}/train*'"
    need(len(there) <= 1, told)
    return files


def file_names(files: list[Path]) -> list[str]:
    """The files' names for uids: each without its ending, with as many folders in front as tell it from the others."""
    paths = [Path(os.path.abspath(f)).with_suffix("").parts for f in files]
    names = []
    for path in paths:
        others = [p for p in paths if p != path]
        n = next(n for n in range(1, len(path) + 1) if all(p[-n:] != path[-n:] for p in others))
        names.append("/".join(path[-n:]))
    return names


def batch_records(batch: pa.RecordBatch) -> list[Record]:
    """Rows of a batch; one with a value that Python cannot hold becomes the reason, and the others stay."""
    try:
        return batch.to_pylist()
    except CELL_ERRORS as e:
        if batch.num_rows == 1:
            return [f"a value cannot be read: {type(e).__name__}: {e}"]
        return list(chain.from_iterable(batch_records(batch.slice(i, 1)) for i in range(batch.num_rows)))


def text_lines(file: Path) -> Iterator[str]:
    """Lines of a text file, newlines kept. Bytes that are no UTF-8 become what no text in UTF-8 can hold."""
    with refusing(OSError, f"--input {file}"):
        lines = open(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    with lines:
        yield from lines


def jsonl_records(file: Path) -> Iterator[tuple[str, Record]]:
    """The place and the row of each line that is not blank."""
    for line, text in enumerate(text_lines(file), 1):
        if text.strip():
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as e:
                row = f"not valid JSON: {e}"
            else:
                row = row if isinstance(row, dict) else f"JSON {type(row).__name__}, expected an object"
            yield f"line {line}", row


def csv_records(file: Path) -> Iterator[tuple[str, Record]]:
    """The place and the row of each line that is not blank, after the header that names the columns."""
    csv.field_size_limit(2**31 - 1)  # base64 cells
    reader = csv.reader(text_lines(file))
    columns = next(reader, [])
    try:
        for cells in reader:
            if len(cells) == len(columns):
                yield f"line {reader.line_num}", dict(zip(columns, cells, strict=True))
            elif cells:
                problem = f"{len(cells)} cells but the header names {len(columns)} columns"
                yield f"line {reader.line_num}", problem
    except csv.Error as e:
        raise UserError(f"{file} line {reader.line_num}: not valid CSV: {e}") from e
