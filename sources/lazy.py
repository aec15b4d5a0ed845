"""Images that stay in their parquet file until they are used: what is kept of a checked row is where it is.

A row is read with its whole row group; the last groups are kept, BOUND bytes in a process, or one. In files of
prepare_data.py row groups are small.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from errors import UserError, as_user_error, need
from sources.content import row_content, split_column_names
from sources.images import image_bytes
from sources.tables import open_parquet

CACHE_BYTES = 16 << 20  # bytes of row groups that a process keeps
OPEN_FILES = 8  # per process, with what their footers tell
LARGE_GROUP = 256 << 20  # bytes of a row group from which on to read a row of it is told to be slow


def print_once(text: str) -> None:
    """Print a line, in the first process of a run alone."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


@dataclass(frozen=True)
class ImageTable:
    """A parquet file whose rows were checked, and the columns that its images come from."""

    path: Path
    size: int
    mtime_ns: int  # a file that is written anew is another one
    root: Path  # where relative image paths start
    prompt_key: str
    image_key: str
    columns: tuple[str, ...]


Place = tuple[ImageTable, int, int]  # of a row: its file, row group, and number in that group


class RowGroups:
    """The last row groups read of all tables, for the threads of one process."""

    def __init__(self):
        self.reader = ThreadPoolExecutor(1, "rows")  # one: in the heaps of several threads it takes 150 MiB more
        self.kept: dict[tuple[ImageTable, int], pa.Table] = {}
        self.open = lru_cache(OPEN_FILES)(lambda table: open_parquet(table.path))

    def get(self, table: ImageTable, group: int, row: int) -> dict:
        """Return a row's image columns. Raise UserError if its file cannot be read."""
        told = f"{table.path} row group {group} cannot be read; it may have changed since its rows were checked"
        with as_user_error((pa.ArrowException, OSError, IndexError, StopIteration), told):
            return self.reader.submit(self.read, table, group, row).result().to_pylist()[0]

    def read(self, table: ImageTable, group: int, row: int) -> pa.Table | pa.RecordBatch:
        key, file = (table, group), self.open(table)
        if file.metadata.row_group(group).total_byte_size > LARGE_GROUP:  # arrow cannot hold 2 GiB of images in one
            batches = file.iter_batches(1, row_groups=[group], columns=list(table.columns), use_threads=False)
            return next(islice(batches, row, None))
        if key not in self.kept:
            self.kept[key] = file.read_row_group(group, list(table.columns), use_threads=False)
            while len(self.kept) > 1 and sum(read.nbytes for read in self.kept.values()) > CACHE_BYTES:
                del self.kept[next(iter(self.kept))]  # the oldest
        return self.kept[key].slice(row, 1)


ROW_GROUPS = RowGroups()
os.register_at_fork(after_in_child=ROW_GROUPS.__init__)  # which has none of its parent's threads


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyImages(Sequence):
    """The encoded images of one row of a parquet file, read when they are asked for."""

    place: Place
    sizes: tuple[tuple[int, int], ...]  # (width, height) of each image, decoded
    sums: tuple[int, ...]  # CRC-32 of each

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """Raise UserError if an image is not what was checked."""
        wanted = range(len(self))[index]
        if isinstance(wanted, range):
            return [self[i] for i in wanted]
        table = self.place[0]
        cells = row_content(ROW_GROUPS.get(*self.place), table.prompt_key, table.image_key)[1]
        with as_user_error((UserError, IndexError), f"{self!r}: image {wanted}"):
            data = image_bytes(cells[wanted], table.root)
            need(zlib.crc32(data) == self.sums[wanted], "has changed since it was checked; start again")
        return data

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        table, group, row = self.place
        return f"{table.path} row group {group} row {row}"


def row_locations(path: Path, root: Path, prompt_key: str, image_key: str) -> Iterator[Place]:
    """Yield the place of each row of a parquet file, whose relative image paths start at `root`. Print a line if its
    row groups are slow to read."""
    with pq.ParquetFile(path) as parquet:
        names = parquet.schema_arrow.names
        groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
    columns = split_column_names(image_key, names) + split_column_names(prompt_key, names)
    status = path.stat()
    table = ImageTable(path, status.st_size, status.st_mtime_ns, root, prompt_key, image_key, tuple(columns))
    largest = max((group.total_byte_size for group in groups), default=0)
    if largest > LARGE_GROUP:
        print_once(f"{path}: row groups of up to {largest >> 20} MiB make reading its images slow; prepare_data.py "
                   f"parquet --input {path} makes a file of small ones")
    for i, group in enumerate(groups):
        for row in range(group.num_rows):
            yield table, i, row
