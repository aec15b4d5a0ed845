"""Readers of CSV, JSONL and parquet files for tasks whose rows have an image and other columns.

The file name begins with _ because this is no task.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from errors import UserError, need
from prepare_data import IMAGE_PLACEHOLDER, TABLE_SOURCES, RawRow, ToyConfig, table_rows
from sources.content import split_column_names
from sources.tables import File, Record, expand_data_paths, parquet_columns

DEFAULT_IMAGE_COLUMNS = ("image", "image_url")


def any_rows(cfg: ToyConfig, images: tuple[str, ...], convert: Callable[[dict, File], dict]) -> Iterator[RawRow]:
    """Yield the rows of the CSV, JSONL and parquet files of --input as `convert(columns, folder)` returns them.

    A row is bad if `convert` raises UserError for it. `images` names columns that may hold an image; if it is empty, a
    file must have the columns that --prompt-key, --image-key and --answer-key name.
    """
    need(cfg.input, "--input: give CSV, JSONL or parquet files, or make toy rows with --toy")

    def records(file: File, cfg: ToyConfig) -> Iterator[tuple[str, Record]]:
        extension = file.suffix.removeprefix(".").lower()
        file_format = {"json": "jsonl"}.get(extension, extension)  # NLVR2's .json files have one JSON object per line
        need(file_format in TABLE_SOURCES, f"{file}: expected a file that ends in .json, .{', .'.join(TABLE_SOURCES)}")
        if not images:
            return TABLE_SOURCES[file_format][0](file, cfg)
        image = ""  # only the binary columns of a parquet file that are named here are read
        if file_format == "parquet":
            named = dict.fromkeys((*split_column_names(cfg.image_key, ()), *images))
            image = ",".join(name for name in named if name in parquet_columns(file))
        return TABLE_SOURCES[file_format][0](
            file, replace(cfg, prompt_key="", answer_key="", image_key=image, prompt_template="")
        )

    for raw in table_rows(expand_data_paths(cfg.input, cfg.split), cfg, records):
        yield convert_row(raw, convert)


def convert_row(raw: RawRow, convert: Callable[[dict, File], dict]) -> RawRow:
    """Return a row with its record converted; a bad one gets the reason as its record."""
    if isinstance(raw.record, dict):
        try:
            raw.record = convert(raw.record, raw.root)
        except UserError as error:
            raw.record = str(error)
    return raw


def make_row(
    source: str, record: dict, used: Collection[str], image: Any, truth: str, cfg: ToyConfig, instruction: str = ""
) -> dict:
    """Return a row in the on-disk format that keeps the columns of a record that are not in `used`.

    A row without a prompt gets the image placeholder and `instruction`, or only the placeholder with --instruction.
    """
    used = {*used, cfg.prompt_key, cfg.image_key}
    return {name: value for name, value in record.items() if name not in used} | {
        "data_source": source,
        cfg.prompt_key: record.get(cfg.prompt_key)
        or (IMAGE_PLACEHOLDER if cfg.instruction else f"{IMAGE_PLACEHOLDER}{instruction}"),
        cfg.image_key: image,
        "reward_model": {"style": "rule", "ground_truth": truth},
    }


@cache
def files_below(root: File, pattern: str) -> dict[str, str]:
    """Return the files below a folder, as name -> path relative to it."""
    return {path.name: str(path.relative_to(root)) for path in root.rglob(pattern)}


def first_nonempty(values: list) -> Any:
    """Return the first value that is not None, "" or [], or None if there is none."""
    return next((value for value in values if value not in (None, "", [])), None)
