"""Images that stay in their parquet file until they are used: what is kept of a checked row is where it is.

Rows are read one at a time from the stream of a row group, whose earlier rows pass by; the last of them are kept, BOUND
bytes in a process. In files of prepare_data.py row groups are small, so that little passes by.
"""

import os
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from errors import UserError, need, refusing
from sources.content import row_content
from sources.images import image_bytes

BOUND = 16 << 20  # bytes of rows that a process keeps
OPEN_FILES = 8  # per process, with what their footers tell
LARGE_GROUP = 256 << 20  # bytes of a row group from which on to read a row of it is told to be slow


def print_once(text: str) -> None:
    """Print a line, in the first process of a run alone."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


def open_parquet(file: object) -> pq.ParquetFile:
    """Open a file to read it piece by piece, and verify the checksums of its pages if it has any. Without a buffer size
    pyarrow reads a whole row group at once."""
    return pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 16, page_checksum_verification=True)


@dataclass(frozen=True)
class ImageTable:
    """A parquet file as it was when its rows were checked, and the columns that its images come from."""

    path: Path
    root: Path  # where relative image paths start
    size: int
    mtime_ns: int
    prompt_key: str
    image_key: str
    columns: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, root: Path, prompt_key: str, image_key: str, columns: Iterable[str]) -> "ImageTable":
        status = path.stat()
        return cls(path, root, status.st_size, status.st_mtime_ns, prompt_key, image_key, tuple(columns))

    def check_same(self) -> None:
        """UserError if the file is gone or another one."""
        with refusing(OSError, f"{self.path}: gone since its rows were checked; put it back and start again"):
            status = self.path.stat()
        same = (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)
        need(same, f"{self.path} has changed since its rows were checked ({self.size} bytes then, {status.st_size} "
                   "now, or another time); start again")  # fmt: skip


class Rows:
    """The last rows read of all tables, for the threads of one process."""

    def __init__(self):
        self.reader = ThreadPoolExecutor(1, "rows")  # one: in the heaps of several threads it takes 150 MiB more
        self.kept: OrderedDict[tuple[ImageTable, int, int], pa.RecordBatch] = OrderedDict()
        self.bytes = 0
        self.group: tuple[ImageTable, int] | None = None  # which the stream is of
        self.stream: Iterator[pa.RecordBatch] = iter(())
        self.next_row = 0  # of the stream
        self.open = lru_cache(OPEN_FILES)(lambda table: open_parquet(table.path))

    def record(self, table: ImageTable, group: int, row: int) -> dict:
        """A row's image columns. Raises UserError if the file is no longer what was checked."""
        key = (table, group, row)

        def batch() -> pa.RecordBatch:
            if key not in self.kept:
                self.read_up_to(table, group, row)
            self.kept.move_to_end(key)
            return self.kept[key]

        return self.reader.submit(batch).result().to_pylist()[0]

    def read_up_to(self, table: ImageTable, group: int, row: int) -> None:
        if self.group != (table, group) or self.next_row > row:
            table.check_same()
            self.group = None  # until there is a stream of it
        told = f"{table.path} row group {group} cannot be read; it may have changed since its rows were checked"
        with refusing((pa.ArrowException, OSError, StopIteration), told):
            if self.group is None:
                columns = list(table.columns)
                self.stream = self.open(table).iter_batches(1, row_groups=[group], columns=columns, use_threads=False)
                self.group = (table, group)
                self.next_row = 0
            while self.next_row <= row:
                self.keep((table, group, self.next_row), next(self.stream))
                self.next_row += 1

    def keep(self, key: tuple[ImageTable, int, int], batch: pa.RecordBatch) -> None:
        old = self.kept.pop(key, None)
        self.kept[key] = batch
        self.bytes += batch.nbytes - (old.nbytes if old else 0)
        while self.bytes > BOUND and len(self.kept) > 1:
            self.bytes -= self.kept.popitem(last=False)[1].nbytes


ROWS = Rows()
os.register_at_fork(after_in_child=ROWS.__init__)  # which has none of its parent's threads


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyImages(Sequence):
    """The encoded images of one row of a parquet file, read when they are asked for."""

    table: ImageTable
    group: int
    row: int  # in its group
    sizes: tuple[tuple[int, int], ...]  # (width, height) of each image, decoded
    sums: tuple[int, ...]  # CRC-32 of each

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        wanted = range(len(self))[index]
        return list(self.read(wanted)) if isinstance(wanted, range) else next(self.read([wanted]))

    def __iter__(self) -> Iterator[bytes]:
        return self.read(range(len(self)))

    def read(self, wanted: Iterable[int]) -> Iterator[bytes]:
        """Raises UserError if one is not what was checked."""
        if not len(self):
            return
        record = ROWS.record(self.table, self.group, self.row)
        cells = row_content(record, self.table.prompt_key, self.table.image_key)[1]
        for i in wanted:
            with refusing(UserError, f"{self!r}: image {i}"):
                data = image_bytes(cells[i], self.table.root)
                need(zlib.crc32(data) == self.sums[i], "has changed since it was checked; start again")
            yield data

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return f"{self.table.path} row group {self.group} row {self.row}"


def row_places(table: ImageTable) -> Iterator[tuple[ImageTable, int, int]]:
    """Table, row group and row in it, of each row of a parquet file. Tells of row groups that are slow to read."""
    with pq.ParquetFile(table.path) as parquet:
        groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
        rows = [group.num_rows for group in groups]
        largest = max((group.total_byte_size for group in groups), default=0)
    if largest > LARGE_GROUP and table.columns:
        told = f"row groups of up to {largest >> 20} MiB make reading its images slow; prepare_data.py parquet --input"
        print_once(f"{table.path}: {told} {table.path} makes a file of small ones")
    for group, n in enumerate(rows):
        for row in range(n):
            yield table, group, row
