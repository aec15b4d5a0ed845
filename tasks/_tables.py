"""What tasks with rows of an image and columns of their own share: files of any kind, and the columns that hold images.
The name begins with _ because it is no task."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from errors import need, refusing
from prepare_data import TABLES, Raw, TaskConfig, table_rows
from sources.tables import Record, data_files

IMAGES = ("image", "image_url")


def any_rows(cfg: TaskConfig, images: tuple[str, ...] = IMAGES) -> Iterator[Raw]:
    """Rows of the CSV, JSONL and parquet files of --input, as they are. `images`: columns that may be an image."""
    need(cfg.input, "--input: give CSV, JSONL or parquet files, or draw rows with --toy")

    def records(file: Path, cfg: TaskConfig) -> Iterator[tuple[str, Record]]:
        kind = file.suffix.removeprefix(".").lower()
        need(kind in TABLES, f"{file}: expected a file that ends in .{', .'.join(TABLES)}")
        image = ""  # of a parquet file's binary columns only the one that is named is read
        if kind == "parquet":
            with refusing((pa.ArrowException, OSError), f"{file} is no parquet file"):
                names = pq.read_schema(file).names
            image = next((name for name in (cfg.image_key, *images) if name in names), "")
        return TABLES[kind][0](file, replace(cfg, prompt_key="", answer_key="", image_key=image))

    return table_rows(data_files(cfg.input, cfg.split), cfg, records)


def first(values: list) -> Any:
    """The first that is something, or None."""
    return next((value for value in values if value not in (None, "", [])), None)
