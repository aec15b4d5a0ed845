"""Unchecked rows of JSON Lines and CSV files. A row that cannot be read is represented by a string with the reason."""

import csv
import io
import json
import re
from collections.abc import Iterator
from functools import partial

from errors import UserError, as_user_error, need
from sources.remote import RemoteFile, remote_read_errors
from sources.tables import MAX_ROW_BYTES, File, Record


def text_lines(file: File) -> Iterator[str]:
    """Yield the lines of a text file with their newlines. Bytes that are not valid UTF-8 become lone surrogates, which
    are found when the row is checked."""
    options = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    with as_user_error(OSError, f"--input {file}"):
        lines = io.TextIOWrapper(file.open(), **options) if isinstance(file, RemoteFile) else open(file, **options)
    with lines, remote_read_errors(f"--input {file}"):
        for number, line in enumerate(iter(partial(lines.readline, MAX_ROW_BYTES), ""), 1):
            need(len(line) < MAX_ROW_BYTES, f"--input {file} line {number}: over {MAX_ROW_BYTES} characters; split it")
            yield line


def jsonl_records(file: File) -> Iterator[tuple[str, Record]]:
    """Yield (location, row) of each line that is not blank, such as ("line 3", {"prompt": ...})."""
    for line, text in enumerate(text_lines(file), 1):
        need(line > 1 or not re.match(r"\s*\[\s*(\{|$)", text),
             f"{file} is one JSON array; write an object with prompt, images and answer on each line, for example "
             f"with: jq -c '.[]' {file} > rows.jsonl")
        if text.strip():
            try:
                row = json.loads(text)
                row = row if isinstance(row, dict) else f"JSON {type(row).__name__}, expected an object"
            except (ValueError, RecursionError) as e:
                row = f"not valid JSON: {e}"
            yield f"line {line}", row


def csv_records(file: File) -> Iterator[tuple[str, Record]]:
    """Yield (location, row) of each line that is not blank, after the header line that names the columns."""
    csv.field_size_limit(MAX_ROW_BYTES)  # base64 cells
    reader = csv.reader(text_lines(file))
    columns = next(reader, [])
    for mark in ";\t|":
        need(len(columns) != 1 or mark not in columns[0], f"{file} line 1: one column, {columns[0]!r}; columns must be "
             f"separated by commas, but these are by {mark!r}: save it as CSV with commas")
    try:
        for cells in reader:
            if len(cells) == len(columns):
                yield f"line {reader.line_num}", dict(zip(columns, cells, strict=True))
            elif cells:
                yield f"line {reader.line_num}", f"{len(cells)} cells but the header names {len(columns)} columns"
    except csv.Error as e:
        raise UserError(f"{file} line {reader.line_num}: not valid CSV: {e}") from e
