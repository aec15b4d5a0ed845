"""Tests of lazily read images: the same bytes as in the file, little memory, and errors if the file changes.

pytest tests/test_lazy.py
"""

import base64
import io
import multiprocessing
import pickle
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_prepare_data import BLUE, RED, encode, save, verl_row

import prepare_data as pd
from errors import UserError
from prepare_data import DataFormatConfig, Example, decode_image, write_examples
from sources import lazy_images
from sources.lazy_images import LazyImages

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch):
    """Empty the cache of row groups, so that no test uses those of another."""
    monkeypatch.setattr(lazy_images, "ROW_GROUPS", lazy_images.RowGroups())


def read(path, **settings) -> list[Example]:
    return pd.read_examples(path, DataFormatConfig(**settings))[0]


def noise(i: int, side: int = 40) -> bytes:
    pixels = np.random.default_rng(i).integers(0, 255, (side, side + i % 7, 3), dtype=np.uint8)
    return encode(Image.fromarray(pixels))


def noise_file(path: Path, n: int, **kw) -> list[bytes]:
    """Write n rows with a different image each. Check that pyarrow reads the same images, and return them."""
    images = [noise(i) for i in range(n)]
    save(path, [verl_row(i, images=[{"bytes": data, "path": None}]) for i, data in enumerate(images)], **kw)
    assert [row["images"][0]["bytes"] for row in pq.read_table(path).to_pylist()] == images
    return images


def test_a_large_row_group_is_read_row_by_row(tmp_path, monkeypatch):
    """Arrow cannot hold 2 GiB of images in one array."""
    monkeypatch.setattr(lazy_images, "LARGE_GROUP", 1)
    images = noise_file(tmp_path / "f.parquet", 9)
    examples = read(tmp_path / "f.parquet")
    assert [examples[i].images[0] for i in (8, 0, 3, 3)] == [images[i] for i in (8, 0, 3, 3)]
    assert not lazy_images.ROW_GROUPS.cached


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("bound", [1, 30_000, 1 << 30])
def test_rows_return_their_own_images_in_any_order(tmp_path, monkeypatch, rows, bound):
    """For any size of row groups and cache: in order, backwards, shuffled, one row repeatedly, and from 4 threads."""
    monkeypatch.setattr(lazy_images, "CACHE_BYTES", bound)
    images = noise_file(tmp_path / "f.parquet", 30, row_group_size=rows)
    examples = read(tmp_path / "f.parquet")
    assert all(isinstance(e.images, LazyImages) for e in examples) and not lazy_images.ROW_GROUPS.cached
    shuffled = random.Random(0).sample(range(30), 30)
    for order in (range(30), range(29, -1, -1), shuffled, [3] * 3):
        assert [examples[i].images[0] for i in order] == [images[i] for i in order]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda i: examples[i].images[-1], order)) == [images[i] for i in order]
    cached = lazy_images.ROW_GROUPS.cached
    assert len(cached) == 1 or sum(group.nbytes for group in cached.values()) <= bound
    assert len(cached) == -(-30 // rows) or bound < 1 << 30


def test_lazy_images_are_a_sequence_of_bytes(tmp_path):
    row = verl_row(
        0, prompt="<image><image><image>", images=[{"bytes": b, "path": None} for b in (RED, BLUE, noise(0))]
    )
    [example] = read(save(tmp_path / "f.parquet", [row]))
    images = example.images
    assert len(images) == 3 and list(images) == [RED, BLUE, noise(0)] == [images[0], images[1], images[2]]
    assert images[-1] == noise(0) and images[1:] == [BLUE, noise(0)] and images[::-1] == [noise(0), BLUE, RED]
    assert images == [RED, BLUE, noise(0)] and [RED, BLUE, noise(0)] == images and images != [RED] and images != 3
    assert BLUE in images and b"" not in images
    with pytest.raises(IndexError):
        images[3]
    assert example.image_sizes == [(8, 6), (8, 6), (40, 40)] and len(repr(images)) < 200
    pil_images = example.pil_images
    assert [image.mode for image in pil_images] == ["RGB"] * 3
    assert [image.tobytes() for image in pil_images] == [decode_image(data).tobytes() for data in images]
    [text] = read(save(tmp_path / "t.parquet", [verl_row(0, prompt="q?", images=[])]))
    assert not text.images and list(text.images) == [] == text.image_sizes


def test_sizes_are_those_of_the_decoded_image(tmp_path):
    """The sizes account for EXIF rotation, and are known without opening the file again."""
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encode(Image.new("RGB", (32, 16)), "JPEG", exif=exif)
    path = save(tmp_path / "f.parquet", [verl_row(0, images=[{"bytes": turned, "path": None}])])
    [example] = read(path)
    path.unlink()
    assert example.image_sizes == [(16, 32)] != [Image.open(io.BytesIO(turned)).size]
    assert Example("u", "t", [], [turned], "1", {}).image_sizes == [(16, 32)]


def test_image_bytes_are_neither_stored_nor_pickled(tmp_path):
    noise_file(tmp_path / "f.parquet", 20)
    examples = read(tmp_path / "f.parquet")
    pickled = pickle.dumps(examples)
    assert len(noise(0)) > 4000 and len(pickled) < 20 * 600
    loaded = pickle.loads(pickled)
    assert loaded == examples and loaded[3].images[0] == noise(3) and loaded[3].image_sizes == examples[3].image_sizes


def test_cells_of_all_kinds_are_read_lazily(tmp_path):
    """Paths are read and base64 is decoded on access, also in content parts."""
    (tmp_path / "a.png").write_bytes(RED)
    text = base64.b64encode(BLUE).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}, {"type": "image"}]
    rows = [
        verl_row(0, prompt=[{"role": "user", "content": [*parts, {"type": "text", "text": "q"}]}], images=["a.png"])
    ]
    rows += [
        verl_row(
            1, prompt=[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}], images=[text]
        )
    ]
    examples = read(save(tmp_path / "f.parquet", rows))
    assert [list(e.images) for e in examples] == [[BLUE, RED], [BLUE]]
    lazy_images.ROW_GROUPS.__init__()
    (tmp_path / "a.png").write_bytes(BLUE)
    assert examples[0].images[0] == BLUE, "this image did not change"
    with pytest.raises(UserError, match=r"f.parquet row group 0 row 0: image 1: has changed since it was checked"):
        list(examples[0].images)
    (tmp_path / "a.png").unlink()
    with pytest.raises(UserError, match=r"f.parquet row group 0 row 0: image 1: .*a.png: No such file"):
        examples[0].images[1]


def test_a_changed_or_missing_file_is_named(tmp_path):
    path = tmp_path / "f.parquet"
    noise_file(path, 3)
    examples, data = read(path), path.read_bytes()
    path.unlink()
    with pytest.raises(UserError, match=rf"{path} row group 0 cannot be read.*No such file"):
        examples[0].images[0]
    for change, expected in ((lambda d: d.replace(noise(1)[50:60], bytes(10)), "has changed since it was checked"),
                             (lambda d: bytes(len(d)), "cannot be read; it may have changed")):  # fmt: skip
        path.write_bytes(change(data))
        lazy_images.ROW_GROUPS.__init__()
        with pytest.raises(UserError, match=rf"{path} row group 0.*{expected}"):
            examples[1].images[0]
    path.write_bytes(data)
    lazy_images.ROW_GROUPS.__init__()
    assert examples[1].images == [noise(1)] == read(path)[1].images


@pytest.mark.parametrize("rows", [[2, 0], [0]])
def test_moved_or_removed_rows_are_refused(tmp_path, rows):
    path = tmp_path / "f.parquet"
    noise_file(path, 3)
    examples = read(path)
    pq.write_table(pq.read_table(path).take(rows), path)
    for i in (1, 2):  # each now has another image or does not exist
        lazy_images.ROW_GROUPS.__init__()
        with pytest.raises(UserError, match="f.parquet row group 0 .*changed since"):
            list(examples[i].images)


def test_images_can_be_read_in_another_process(tmp_path):
    images = noise_file(tmp_path / "f.parquet", 4)
    examples = read(tmp_path / "f.parquet")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(first_image, examples) == images


def first_image(example: Example) -> bytes:
    return example.images[0]


def test_images_can_be_read_in_a_forked_child(tmp_path):
    """A forked child has none of its parent's threads, so it must start a reader thread of its own."""
    noise_file(tmp_path / "f.parquet", 4)
    code = (
        "import os, signal, sys; from prepare_data import *\n"
        f"examples, _ = read_examples({str(tmp_path / 'f.parquet')!r}, DataFormatConfig())\n"
        "first, child = examples[0].images[0], os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    os._exit(0 if examples[0].images == [first] and len(examples[3].images[0]) > 4000 else 3)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_our_files_have_small_row_groups_and_pages(tmp_path, capsys, monkeypatch):
    images = [noise(i, 200) for i in range(80)]  # 120 kB each
    examples = [
        Example(f"u{i}", "t", [{"role": "user", "content": "<image>"}], [b], "1", {"uid": f"u{i}"})
        for i, b in enumerate(images)
    ]
    write_examples(examples, tmp_path / "f.parquet")
    with pq.ParquetFile(tmp_path / "f.parquet") as file:
        sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    assert max(sizes) < pd.ROW_GROUP_BYTES + 300_000 and len(sizes) == 3
    assert read(tmp_path / "f.parquet") == examples and "slow" not in capsys.readouterr().out
    monkeypatch.setattr(lazy_images, "LARGE_GROUP", 1 << 20)
    read(tmp_path / "f.parquet")
    assert re.search(
        r"f.parquet: row groups of up to \d MiB make reading its images slow; .*--input", capsys.readouterr().out
    )


def test_memory_does_not_grow_with_the_data(tmp_path):
    """Arrow's peak memory stays below the size of a 24 MB file that is checked and read, and torch is not imported."""
    images = [noise(i, 200) for i in range(20)]
    rows = (
        Example(f"u{i}", "t", [{"role": "user", "content": "<image>"}], [images[i % 20]], "1", {}) for i in range(200)
    )
    write_examples(rows, tmp_path / "f.parquet")
    code = (
        "import sys; import pyarrow as pa; from prepare_data import *; from sources import lazy_images\n"
        f"examples, _ = read_examples({str(tmp_path / 'f.parquet')!r}, DataFormatConfig())\n"
        "checked = pa.default_memory_pool().max_memory()\n"
        "lazy_images.CACHE_BYTES = 2 << 20\n"
        "assert sum(len(e.images[0]) for e in examples) > 23e6\n"
        "print(checked, pa.default_memory_pool().max_memory(), pa.total_allocated_bytes(), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    peak_checking, peak, allocated, has_torch = result.stdout.split()
    assert int(peak_checking) < 16 << 20 and int(peak) < 16 << 20 and int(allocated) < 8 << 20 and has_torch == "False"
