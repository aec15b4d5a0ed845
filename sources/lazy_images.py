"""Images that stay in their parquet file until they are used. For a checked row only its location is kept in memory.

A row is read with its whole row group. Each process caches the row groups that it read last: up to CACHE_BYTES, or one
larger row group. Files written by prepare_data.py have small row groups.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from errors import UserError, as_user_error, need
from sources.content import VIDEO_COLUMNS, frame_cells, row_content, split_column_names
from sources.images import check_decodes, decode_image, image_bytes
from sources.tables import open_parquet

CACHE_BYTES = 16 << 20  # row groups cached per process
OPEN_FILES = 8  # files kept open per process, with their parsed footers
LARGE_GROUP = 256 << 20  # bytes; larger row groups are read row by row, and a line is printed that this is slow


ONE_COLOUR = "have an image of a single colour"


def print_once(text: str) -> None:
    """Print a line, only in the first process of a run."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


@dataclass(frozen=True)
class ImageTable:
    """A parquet file whose rows were checked, and the columns that its images come from."""

    path: Path
    size: int
    mtime_ns: int  # a file that is written again counts as another one
    root: Path  # where relative image paths start
    prompt_key: str
    image_key: str
    columns: tuple[str, ...]


RowLocation = tuple[ImageTable, int, int]  # file, row group, and index of the row in that group


class RowGroups:
    """A cache of the row groups that were read last, of all tables, shared by the threads of a process."""

    def __init__(self):
        self.reader = ThreadPoolExecutor(1, "rows")  # with several reader threads their heaps take 150 MiB more
        self.cached: dict[tuple[ImageTable, int], pa.Table] = {}
        self.open_table = lru_cache(OPEN_FILES)(lambda table: open_parquet(table.path))

    def get(self, table: ImageTable, group: int, row: int) -> dict:
        """Return a row's image columns. Raise UserError if its file cannot be read."""
        message = f"{table.path} row group {group} cannot be read; it may have changed since its rows were checked"
        with as_user_error((pa.ArrowException, OSError, IndexError, StopIteration), message):
            return self.reader.submit(self.read, table, group, row).result().to_pylist()[0]

    def read(self, table: ImageTable, group: int, row: int) -> pa.Table | pa.RecordBatch:
        key, file = (table, group), self.open_table(table)
        if file.metadata.row_group(group).total_byte_size > LARGE_GROUP:  # one arrow array cannot hold 2 GiB of images
            batches = file.iter_batches(1, row_groups=[group], columns=list(table.columns), use_threads=False)
            return next(islice(batches, row, None))
        if key not in self.cached:
            self.cached[key] = file.read_row_group(group, list(table.columns), use_threads=False)
            while len(self.cached) > 1 and sum(rows.nbytes for rows in self.cached.values()) > CACHE_BYTES:
                del self.cached[next(iter(self.cached))]  # the oldest
        return self.cached[key].slice(row, 1)


ROW_GROUPS = RowGroups()
os.register_at_fork(after_in_child=ROW_GROUPS.__init__)  # a forked process has none of its parent's threads


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyImages(Sequence):
    """The encoded images, or the frames of one video, of one row of a parquet file, read when they are used."""

    location: RowLocation
    sizes: tuple[tuple[int, int], ...]  # (width, height) of each decoded image
    checksums: tuple[int, ...]  # CRC-32 of each encoded image
    video: int | None = None  # index of the video in its row

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """Read one encoded image, or a list of them. Raise UserError if an image has changed since it was checked."""
        positions = range(len(self))[index]
        if isinstance(positions, int):
            return self[positions : positions + 1][0]
        table = self.location[0]
        _, cells, videos = row_content(ROW_GROUPS.get(*self.location), table.prompt_key, table.image_key)
        read = []
        for position in positions:
            with as_user_error((UserError, IndexError, TypeError), f"{self!r}: image {position}"):
                cell = (cells if self.video is None else frame_cells(videos[self.video]))[position]
                read.append(image_bytes(cell, table.root))
                need(zlib.crc32(read[-1]) == self.checksums[position], "has changed since it was checked; start again")
        return read

    def __iter__(self) -> Iterator[bytes]:
        return iter(self[:])  # reads the row once

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        table, group, row = self.location
        return f"{table.path} row group {group} row {row}"


def sizes_of(images: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return (width, height) of each image, without decoding those that are still in a parquet file."""
    return list(images.sizes) if isinstance(images, LazyImages) else [decode_image(data).size for data in images]


def load_images(cells: list, raw: Any, reading: Any, video: int | None = None) -> Sequence[bytes]:
    """Return the encoded files of image cells, or of the frames of a video, after decoding each once as a check. For
    rows of a parquet file that is only read, return LazyImages."""
    images, sizes = [], []
    for i, cell in enumerate(cells):
        try:
            images.append(image_bytes(cell, raw.root, reading.fetch, reading.image_root))
            size, is_plain = check_decodes(images[i])
            sizes.append(size)
            raw.notes |= {ONE_COLOUR} if is_plain and video is None else set()
        except UserError as e:
            raise UserError(f"{'image' if video is None else f'video {video}: frame'} {i} {e}") from e
        need(video is None or sizes[i] == sizes[0],
             f"video {video}: frame {i} has size {sizes[i]}, but the first has {sizes[0]}; make them equal")
    checksums = tuple(map(zlib.crc32, images))
    return LazyImages(raw.image_source, tuple(sizes), checksums, video) if raw.image_source else images


def row_locations(path: Path, root: Path, prompt_key: str, image_key: str) -> Iterator[RowLocation]:
    """Yield the location of each row of a parquet file; relative image paths start at `root`. Print a line if the row
    groups are so large that reading is slow."""
    with pq.ParquetFile(path) as parquet:
        names = parquet.schema_arrow.names
        groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
    columns = {*split_column_names(image_key, names), *split_column_names(prompt_key, names), *VIDEO_COLUMNS}
    status = path.stat()
    table = ImageTable(path, status.st_size, status.st_mtime_ns, root, prompt_key, image_key, tuple(columns & {*names}))
    largest = max((group.total_byte_size for group in groups), default=0)
    if largest > LARGE_GROUP:
        print_once(f"{path}: row groups of up to {largest >> 20} MiB make reading its images slow; rewrite it with "
                   f"smaller ones: prepare_data.py parquet --input {path}")
    for i, group in enumerate(groups):
        for row in range(group.num_rows):
            yield table, i, row
