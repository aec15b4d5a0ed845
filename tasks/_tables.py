"""What tasks with rows of an image and columns of their own share: files of any kind, and the columns that hold images.
The name begins with _ because it is no task."""

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
    """Yield the rows of the CSV, JSONL and parquet files of --input as `convert(columns, folder)` returns them; if it
    raises UserError, the row is bad. `images` are columns that may be an image; with none of them, a file has to have
    the columns that --prompt-key, --image-key and --answer-key name."""
    need(cfg.input, "--input: give CSV, JSONL or parquet files, or draw rows with --toy")

    def records(file: File, cfg: ToyConfig) -> Iterator[tuple[str, Record]]:
        ending = file.suffix.removeprefix(".").lower()
        kind = {"json": "jsonl"}.get(ending, ending)  # NLVR2's .json has a row a line
        need(kind in TABLE_SOURCES, f"{file}: expected a file that ends in .json, .{', .'.join(TABLE_SOURCES)}")
        if not images:
            return TABLE_SOURCES[kind][0](file, cfg)
        image = ""  # of a parquet file's binary columns only those that are named are read
        if kind == "parquet":
            named = dict.fromkeys((*split_column_names(cfg.image_key, ()), *images))
            image = ",".join(name for name in named if name in parquet_columns(file))
        return TABLE_SOURCES[kind][0](
            file, replace(cfg, prompt_key="", answer_key="", image_key=image, prompt_template="")
        )

    for raw in table_rows(expand_data_paths(cfg.input, cfg.split), cfg, records):
        if isinstance(raw.record, dict):
            try:
                raw.record = convert(raw.record, raw.root)
            except UserError as error:
                raw.record = str(error)
        yield raw


def row_of(
    source: str, record: dict, used: Collection[str], image: Any, truth: str, cfg: ToyConfig, instruction: str = ""
) -> dict:
    """Return a row in the on-disk format, with the columns of a record that are not `used`. A row without a prompt gets
    the instruction."""
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
    """Return the files below a folder: name -> path."""
    return {path.name: str(path.relative_to(root)) for path in root.rglob(pattern)}


def first(values: list) -> Any:
    """The first that is something, or None."""
    return next((value for value in values if value not in (None, "", [])), None)
