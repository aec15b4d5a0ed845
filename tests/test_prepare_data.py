import base64
import csv
import errno
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

import prepare_data as pd
import train
from errors import UserError
from model import Processor
from prepare_data import (
    ConvertConfig,
    DataFormatConfig,
    Example,
    RawRow,
    decode_image,
    main,
    parse_args,
    write_examples,
)
from reward import Task, full_marks
from rewards.grade import Grader
from rollout import filter_prompts, load_examples
from sources import fetch as fetching
from sources import images
from sources.fetch import fetch, is_public
from sources.images import image_bytes
from tasks import geometry, shapes

GEO = Path(__file__).parent / "data" / "geometry3k"


def encode(image: Image.Image, fmt: str = "PNG", **kw) -> bytes:
    out = io.BytesIO()
    image.save(out, fmt, **kw)
    return out.getvalue()


def png(color="red", size=(8, 6)) -> bytes:
    return encode(Image.new("RGB", size, color))


RED, BLUE = png("red"), png("blue")


def run(*argv) -> None:
    main(parse_args([str(a) for a in argv]))


def verl_row(i=0, **change) -> dict:
    """Return a row in the layout of verl's geo3k preprocessing."""
    row = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"<image>Find x. {i}"}],
        "images": [{"bytes": RED, "path": "images/0.png"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"split": "train", "index": i, "answer": str(i), "question": "<image>Find x."},
    }
    return row | change


def save(path: Path, rows: list[dict], **kw) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **kw)
    return path


def read_examples(path, limit=None, **settings) -> tuple[list[Example], list[str]]:
    return pd.read_examples(path, DataFormatConfig(**settings), limit)


def error_message(path, **settings) -> str:
    with pytest.raises(UserError) as e:
        read_examples(path, **settings)
    return str(e.value)


# ---------------------------------------------------------------------------------------------------- geo3k


def test_geo3k_folders(tmp_path, capsys):
    out = tmp_path / "sub" / "geo.parquet"
    run("geo3k", "--input", GEO, "--out", out)
    assert "wrote 10 rows" in capsys.readouterr().out
    examples, left_out = read_examples(out)
    assert left_out == []
    assert [e.extra["index"] for e in examples] == list(range(11, 21))
    assert [e.ground_truth for e in examples] == [
        "80", "13", "9", "48", "5 \\sqrt { 3 }", "10", "120", "22", "\\frac { 2 \\sqrt { 2 } } { 5 }", "16",
    ]  # fmt: skip
    e = examples[4]
    assert e.uid == "geo3k/train/15" and e.data_source == "geo3k"
    assert e.messages == [{"role": "user", "content": f"<image>Find y. {geometry.INSTRUCTION}"}]
    assert e.images == [(GEO / "train/15/img_diagram.png").read_bytes()], "stored byte for byte"
    assert e.extra["answer_type"] == "surd" and e.extra["letter"] == "C" and e.extra["split"] == "train"
    assert e.extra["problem_type_graph"] == ["Triangle"] and e.extra["choices"][3] == "10"
    assert [p.name for p in out.parent.iterdir()] == ["geo.parquet"], "no temporary file is left"


def test_output_is_deterministic_and_verl_shaped(tmp_path):
    a, b = tmp_path / "a.parquet", tmp_path / "b.parquet"
    run("geo3k", "--input", GEO, "--out", a)
    run("geo3k", "--input", GEO / "train", "--out", b)  # the numbered folders directly
    assert a.read_bytes() == b.read_bytes()
    schema = pq.read_schema(a)
    assert schema.names == ["data_source", "prompt", "images", "videos", "reward_model", "extra_info"]
    assert str(schema.field("prompt").type) == "list<element: struct<role: string, content: string>>"
    assert str(schema.field("images").type) == "list<element: struct<bytes: binary, path: string>>"
    row = pq.read_table(a).to_pylist()[0]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "80"}
    assert row["images"][0]["path"] is None
    assert {"split", "index", "uid", "answer_type"} <= row["extra_info"].keys()


def test_geo3k_wrong_split_and_damaged_problem(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"10 of 10 rows.*train/11: data_type is 'train' but --split is 'test'"):
        try:
            run("geo3k", "--input", GEO / "train", "--split", "test", "--out", tmp_path / "x.parquet")
        except ValueError as e:
            raise ValueError(str(e).replace("\n", " ")) from e
    for name in ("1", "2", "3", "10"):
        (tmp_path / "g" / name).mkdir(parents=True)
        data = json.loads((GEO / "train/11/data.json").read_text())
        (tmp_path / "g" / name / "data.json").write_text(json.dumps(data | {"answer": "E" if name == "3" else "A"}))
        if name != "1":
            (tmp_path / "g" / name / "img_diagram.png").write_bytes(RED)
    run("geo3k", "--input", tmp_path / "g", "--out", tmp_path / "x.parquet", "--bad-rows", "skip")
    output = capsys.readouterr().out
    assert "wrote 2 rows" in output and "left out 2" in output
    assert "g/1: image 0" in output and "img_diagram.png: No such file" in output
    assert "g/3: data.json has no 'E', or its answer 'E' names no choice" in output
    assert [e.extra["index"] for e in read_examples(tmp_path / "x.parquet")[0]] == [2, 10], "numeric order"


def hub_rows(n: int) -> list[dict]:
    return [
        {"images": [{"bytes": RED, "path": None}], "problem": f"<image>Find {i}.", "answer": "\\frac { 1 } { 2 }",
         "id": 100 + i, "choices": ["1", "2"], "ground_truth": "B"}
        for i in range(n)
    ]  # fmt: skip


def test_geo3k_hub_shards(tmp_path):
    clone, out = tmp_path / "clone", tmp_path / "out.parquet"
    (clone / "data").mkdir(parents=True)
    save(clone / "data/train-00000-of-00001.parquet", hub_rows(3))
    save(clone / "data/validation-00000-of-00001.parquet", hub_rows(1))
    run("geo3k", "--input", clone, "--out", out)
    e = read_examples(out)[0][2]
    assert (e.uid, e.ground_truth, e.data_source) == ("geo3k/train/102", "\\frac { 1 } { 2 }", "geo3k")
    assert e.messages[0]["content"] == f"<image>Find 2. {geometry.INSTRUCTION}"
    assert e.extra["letter"] == "B" and e.extra["answer_type"] == "fraction" and e.extra["choices"] == ["1", "2"]
    run("geo3k", "--input", clone, "--split", "val", "--out", out, "--data-source", "hiyouga/geometry3k")
    assert [e.uid for e in read_examples(out)[0]] == ["hiyouga/geometry3k/val/100"]
    with pytest.raises(ValueError, match="no such file or folder of parquet files of --split test"):
        run("geo3k", "--input", clone, "--split", "test", "--out", out)


def test_geo3k_hub_id(tmp_path, monkeypatch):
    import huggingface_hub as hub  # a dependency of transformers, so it is installed
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError) as e:
        run("geo3k", "--input", "nobody/nothing", "--out", tmp_path / "x.parquet")
    for part in ("--input nobody/nothing", "is not a local path", "--repo-type dataset", "pass --input FOLDER"):
        assert part in str(e.value)

    def snapshot(hub_id, repo_type, allow_patterns):
        assert (hub_id, repo_type) == ("hiyouga/geometry3k", "dataset") and "*/train*.parquet" in allow_patterns
        (tmp_path / "snap/data").mkdir(parents=True)
        save(tmp_path / "snap/data/train-0.parquet", hub_rows(2))
        return str(tmp_path / "snap")

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    run("geo3k", "--out", tmp_path / "x.parquet")
    assert len(read_examples(tmp_path / "x.parquet")[0]) == 2


@pytest.mark.parametrize(
    ("answer", "kind"),
    [("12", "integer"), ("-3", "integer"), ("1,000", "integer"), ("48^\\circ", "integer"), ("18.8", "decimal"),
     (".5", "decimal"), ("5 \\sqrt { 3 }", "surd"), ("\\frac { 2 \\sqrt { 2 } } { 5 }", "surd"),
     ("\\frac { 1 } { 2 }", "fraction"), ("4 \\frac { 4 } { 11 }", "fraction"), ("3/4", "fraction"),
     ("16 \\pi", "pi"), ("2:3", "other"), ("x < 60", "other"), ("\\frac{x}{2}", "other")],
)  # fmt: skip
def test_answer_type(answer, kind):
    assert geometry.answer_type(answer) == kind


def test_shapes_are_drawn_by_their_task(tmp_path, monkeypatch):
    calls = []

    def shapes_rows(n, split, seed):
        calls.append((n, split, seed))
        extra = {"split": split, "index": 0, "answer_type": "count"}
        for i in range(n):
            yield verl_row(i, data_source="shapes", extra_info=extra | {"index": i})

    monkeypatch.setattr(shapes, "toy", shapes_rows)
    run("shapes", "--n", 5, "--split", "test", "--seed", 7, "--out", tmp_path / "s.parquet")
    assert calls == [(5, "test", 7)]
    examples, _ = read_examples(tmp_path / "s.parquet")
    assert [e.uid for e in examples] == [f"shapes/test/{i}" for i in range(5)]
    run("shapes", "--toy", "--n", 5, "--split", "test", "--seed", 7, "--out", tmp_path / "toy.parquet")
    assert (tmp_path / "toy.parquet").read_bytes() == (tmp_path / "s.parquet").read_bytes()


def test_a_task_file_adds_a_source(tmp_path, monkeypatch):
    """As README promises, a file in tasks/ is enough: it gives the name, flag defaults, instruction and rows."""

    def toy(n, split, seed, drawn=True):
        for i in range(n):
            yield {"data_source": "mine", "prompt": f"{i}?", "a": i, "toy": drawn}

    def rows(cfg):
        return (RawRow(f"mine row {i}", i, row) for i, row in enumerate(toy(cfg.n, cfg.split, cfg.seed, drawn=False)))

    task = types.ModuleType("mine", "Rows of mine.")
    vars(task).update(toy=toy, rows=rows, INSTRUCTION="Say it.", DEFAULTS={"answer_key": "a", "instruction": "mine"})
    monkeypatch.setattr(pd, "find_tasks", lambda: {"mine": task, "my-task": task})
    known = Task("mine", lambda response, example: 1.0, full_marks, "Say it.")
    monkeypatch.setitem(pd.TASKS, "mine", known)
    for name, flags in (("mine", ()), ("my-task", ("--toy",))):
        run(name, *flags, "--n", 2, "--out", tmp_path / "o.parquet")
        examples, _ = read_examples(tmp_path / "o.parquet")
        assert [e.messages[0]["content"] for e in examples] == ["0? Say it.", "1? Say it."]
        assert [(e.ground_truth, e.extra["toy"]) for e in examples] == [("0", bool(flags)), ("1", bool(flags))]


# ---------------------------------------------------------------------------------------------------- reading


def test_reads_verl_unchanged(tmp_path):
    path = save(tmp_path / "verl.parquet", [verl_row(i) for i in range(3)])
    examples, _ = read_examples(path)
    assert examples[1] == Example(
        uid="hiyouga/geometry3k/train/verl/1", data_source="hiyouga/geometry3k",
        messages=[{"role": "user", "content": "<image>Find x. 1"}], images=[RED], ground_truth="1",
        extra={"ability": "math", "split": "train", "index": 1, "answer": "1", "question": "<image>Find x."},
    )  # fmt: skip


def test_reads_easyr1_unchanged(tmp_path):
    path = save(tmp_path / "easy.parquet", hub_rows(2))
    examples, _ = read_examples(path, prompt_key="problem", answer_key="answer")
    assert examples[1].messages == [{"role": "user", "content": "<image>Find 1."}]
    assert examples[1].ground_truth == "\\frac { 1 } { 2 }" and examples[1].data_source == ""
    assert examples[0].uid != examples[1].uid


def test_parquet_is_converted_to_our_layout(tmp_path, capsys):
    rows = [r | {"thumb": b"x", "level": i} for i, r in enumerate(hub_rows(2))]
    source, out = save(tmp_path / "easy.parquet", rows), tmp_path / "ours.parquet"
    keys = ("--prompt-key", "problem", "--answer-key", "answer")
    run("parquet", "--input", source, *keys, "--data-source", "geo3k", "--split", "val", "--out", out)
    assert "left out the binary columns thumb" in capsys.readouterr().out
    e = read_examples(out)[0][1]
    assert (e.uid, e.images, e.extra["level"], e.extra["choices"]) == ("geo3k/val/easy/1", [RED], 1, ["1", "2"])
    # a file in verl's layout keeps its own split, index and other fields
    truth = {"style": "rule", "ground_truth": "4", "tolerance": 0.1}
    run("parquet", "--input", save(tmp_path / "v.parquet", [verl_row(4)]), "--split", "test", "--out", out)
    e = read_examples(out)[0][0]
    assert (e.uid, e.extra["question"]) == ("hiyouga/geometry3k/train/v/4", "<image>Find x.")
    assert e.extra["ability"] == "math"
    run("parquet", "--input", save(tmp_path / "v.parquet", [verl_row(4, reward_model=truth)]), "--out", out)
    e = read_examples(out)[0][0]
    assert e.extra["tolerance"] == 0.1 and "style" not in e.extra and e.ground_truth == "4"


def test_directories_lists_globs_and_limit(tmp_path):
    for i in range(3):
        save(tmp_path / f"part-{i}.parquet", [verl_row(10 * i + j) for j in range(4)])

    def read_indices(path, **kw):
        return [e.extra["index"] for e in read_examples(path, **kw)[0]]

    everything = [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    assert read_indices(tmp_path) == everything
    assert read_indices(f"{tmp_path}/part-*.parquet") == everything
    assert read_indices(f"{tmp_path}/part-2.parquet,{tmp_path}/part-0.parquet") == [20, 21, 22, 23, 0, 1, 2, 3]
    assert read_indices([tmp_path / "part-1.parquet"], limit=3) == [10, 11, 12]
    assert "part-0.parquet row 0" in error_message([tmp_path / "part-0.parquet"] * 2), "the same shard was passed twice"
    for nothing in ([], ","):
        assert "--input is required" in error_message(nothing)
    assert "no such file" in error_message(f"{tmp_path}/x*")


def test_directory_of_mixed_splits_is_refused(tmp_path):
    save(tmp_path / "train-0.parquet", [verl_row(0)])
    save(tmp_path / "test-0.parquet", [verl_row(1)])
    assert "shards of several splits (train, test)" in error_message(tmp_path)
    assert len(read_examples(f"{tmp_path}/train*")[0]) == 1


def test_many_row_groups_and_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(pd, "ROW_GROUP_ROWS", 50)
    examples = [Example(f"u{i}", "t", [{"role": "user", "content": "q"}], [], str(i), {}) for i in range(180)]
    assert write_examples(iter(examples), tmp_path / "x.parquet") == 180
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 4
    assert [e.ground_truth for e in read_examples(tmp_path / "x.parquet")[0]] == [str(i) for i in range(180)]
    monkeypatch.setattr(pd, "ROW_GROUP_BYTES", len(RED))
    examples = [Example(f"u{i}", "t", [{"role": "user", "content": "<image>"}], [RED], "1", {}) for i in range(3)]
    write_examples(examples, tmp_path / "x.parquet")
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"images": []}, "<image> placeholders in the prompt: 1; images: 0; write one per"),
        ({"images": [{"bytes": RED, "path": None}] * 2}, "<image> placeholders in the prompt: 1; images: 2; write"),
        ({"prompt": [{"role": "user", "content": "<image 2>"}]},
         "<image 2> in the prompt, but the number of images in its row is 1"),
        ({"images": [{"bytes": None, "path": None}]}, "image 0 has neither bytes nor path"),
        ({"images": [{"bytes": None, "path": "gone.png"}]}, "gone.png: No such file or directory; relative paths star"),
        ({"images": [{"bytes": RED[:-30], "path": None}]}, f"image 0 ({len(RED) - 30} bytes) cannot be decoded: "),
        ({"images": [{"bytes": b"garbage", "path": None}]}, "image 0 (7 bytes) cannot be decoded: not one of PNG, JPE"),
        ({"images": [{"bytes": None, "path": "http://h/x.png"}]}, "training does not read from the network; run "),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "no ground truth"),
        ({"reward_model": {"style": "rule", "ground_truth": "  "}}, "or empty; name its column with --answer-key"),
        ({"prompt": []}, "empty prompt"),
        ({"prompt": None}, "empty prompt"),
        ({"prompt": [{"role": "user", "content": " \n"}]}, "empty prompt: no user message has any text"),
        ({"prompt": [{"role": "bot", "content": "<image>x"}]}, "message 0 has role 'bot', expected one of system, use"),
        ({"prompt": [{"role": "user", "content": None}]}, "message 0 has no content string"),
        ({"prompt": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "4"}]}, "last message i"),
        ({"extra_info": {"split": "train", "index": 0}}, "uid 'hiyouga/geometry3k/train/f/0' is already taken by"),
    ],
)  # fmt: skip
def test_bad_rows_are_named_or_skipped(tmp_path, change, reason):
    path = save(tmp_path / "f.parquet", [verl_row(0), verl_row(1, **change), verl_row(2)])
    message = error_message(path)
    assert f"{path} row 1: " in message and reason in message
    assert "1 of 3 rows are bad (parquet rows count from 0)" in message and "--bad-rows skip" in message
    examples, left_out = read_examples(path, bad_rows="skip")
    assert [e.extra["index"] for e in examples] == [0, 2]
    assert len(left_out) == 1 and left_out[0].startswith(f"{path} row 1: ") and reason in left_out[0]


def test_many_bad_rows_are_counted_and_none_left_is_an_error(tmp_path):
    path = save(tmp_path / "f.parquet", [verl_row(i, images=[{"bytes": b"x" * i}]) for i in range(9)])
    assert "9 of 9 rows are bad" in error_message(path) and "... and 4 more" in error_message(path)
    assert "9 of 9 rows are bad" in error_message(path, bad_rows="skip")


def test_rows_that_are_bad_for_the_same_reason_share_a_line(tmp_path):
    rows = [verl_row(i, data_source="mine" if i % 2 else "yours") for i in range(14)]
    path = save(tmp_path / "f.parquet", [*rows, verl_row(14, images=[])])
    with pytest.raises(UserError) as e:
        pd.read_examples(path, DataFormatConfig(), check=Grader().check_examples)
    first, yours, mine, placeholders, last = str(e.value).splitlines()
    assert first == "15 of 15 rows are bad (parquet rows count from 0):" and last == "Fix them."
    assert yours.startswith(f"  {path} rows 0, 2, 4, 6, 8 and 2 more: no reward for data_source 'yours' (task 'yours')")
    assert mine.startswith(f"  {path} rows 1, 3, 5, 7, 9 and 2 more: no reward for data_source 'mine' (task 'mine')")
    assert "pass your own reward with --reward FILE.py:FUNCTION" in mine
    assert placeholders.startswith(f"  {path} row 14: <image> placeholders")


def test_file_errors(tmp_path):
    path = save(tmp_path / "f.parquet", hub_rows(1))
    message = error_message(path)
    for part in (str(path), "no columns 'prompt',", "images, problem, answer", "--prompt-key"):
        assert part in message
    assert "'reward_model'" in error_message(path, prompt_key="problem")
    assert error_message(path, prompt_key="problem").endswith("Correct --answer-key")
    message = error_message(path, prompt_key="problem", answer_key="answer", image_key="image")
    assert "no column 'image'" in message and "--image-key" in message
    assert "gone.parquet: no such file" in error_message(tmp_path / "gone.parquet")
    (tmp_path / "zero.parquet").write_bytes(b"")
    message = error_message(tmp_path / "zero.parquet")
    assert "zero.parquet is not a parquet file, or is damaged near row 0: Parquet file size is 0" in message
    assert "prepare_data.py" in message
    (tmp_path / "text.parquet").write_text("hello" * 20)
    assert "text.parquet is not a parquet file, or is damaged" in error_message(tmp_path / "text.parquet")
    pq.write_table(pa.Table.from_pylist([verl_row(0)]).slice(0, 0), tmp_path / "none.parquet")
    assert "none.parquet has no rows" in error_message(tmp_path / "none.parquet")
    (tmp_path / "empty").mkdir()
    assert "empty: no such file or folder of parquet files" in error_message(tmp_path / "empty")


def test_damaged_pages_name_the_file(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    row = verl_row(0, images=[{"bytes": encode(Image.fromarray(noise)), "path": None}])
    path = save(tmp_path / "f.parquet", [row], write_page_checksum=True, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)
    path.write_bytes(data)
    assert f"{path} is not a parquet file, or is damaged near row 0" in error_message(path)


def test_text_only_file(tmp_path):
    row = {"q": "2+2?", "a": 4}
    path = save(tmp_path / "t.parquet", [row])
    examples, _ = read_examples(path, prompt_key="q", image_key="", answer_key="a")
    assert examples[0].images == [] and examples[0].ground_truth == "4"


def test_structured_ground_truth_becomes_json(tmp_path):
    path = save(tmp_path / "t.parquet", [{"q": "where?", "a": {"lat": 1.5, "name": "Köln"}}])
    truth = read_examples(path, prompt_key="q", image_key="", answer_key="a")[0][0].ground_truth
    assert truth == '{"lat": 1.5, "name": "Köln"}'
    path = save(tmp_path / "t.parquet", [{"q": "where?", "a": float("nan")}])
    assert "neither a string nor JSON" in error_message(path, prompt_key="q", image_key="", answer_key="a")


def test_none_fields_of_extra_are_dropped(tmp_path):
    rows = [verl_row(0, extra_info={"index": 0, "a": None}), verl_row(1, extra_info={"index": 1, "a": "x"})]
    examples, _ = read_examples(save(tmp_path / "f.parquet", rows))
    assert [e.extra for e in examples] == [{"ability": "math", "index": 0}, {"ability": "math", "index": 1, "a": "x"}]
    rows = [verl_row(0, extra_info={"index": 0, "boxes": [{"x": 1}, {"y": {"z": 2}}]})]
    examples, _ = read_examples(save(tmp_path / "g.parquet", rows))
    assert examples[0].extra["boxes"] == [{"x": 1}, {"y": {"z": 2}}]


# ---------------------------------------------------------------------------------------------------- image cells


def test_image_cells_of_every_form(tmp_path):
    (tmp_path / "pics").mkdir()
    (tmp_path / "pics/red.png").write_bytes(RED)
    (tmp_path / "iVBORw0KGgo").write_bytes(BLUE)
    text = base64.b64encode(RED).decode()
    for cell in (RED, {"bytes": RED, "path": "x"}, {"bytes": None, "path": "pics/red.png"}, "pics/red.png", text,
                 f"data:image/png;base64,{text}", str(tmp_path / "pics/red.png"), f"file://{tmp_path}/pics/red.png",
                 {"bytes": text}, text[:40] + "\n" + text[40:]):  # fmt: skip
        assert image_bytes(cell, tmp_path) == RED
    assert image_bytes("iVBORw0KGgo", tmp_path) == BLUE, "an existing file wins over base64"
    for cell, reason in ((None, "is empty"), (" ", "is empty"), (5, "is a int"), ("data:image/png,abc", "not base64"),
                         ("a/b", "a/b: No such file"), ("a\0.png", "null byte"),
                         ("no such thing " * 5, "neither an existing file nor valid base64")):  # fmt: skip
        with pytest.raises(UserError, match=reason):
            image_bytes(cell, tmp_path)


def test_image_columns_of_other_types(tmp_path):
    (tmp_path / "r.png").write_bytes(RED)
    text = base64.b64encode(RED).decode()
    uri = f"data:image/png;base64,{text}"
    for value in (RED, {"bytes": RED, "path": None}, "r.png", text, [text], ["r.png"], uri, '["r.png"]'):
        path = save(tmp_path / "f.parquet", [verl_row(0, images=value)])
        assert read_examples(path)[0][0].images == [RED]


def test_two_images_keep_their_order(tmp_path):
    row = verl_row(0, prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "<image> or <image>?"}])
    path = save(tmp_path / "f.parquet", [row | {"images": [{"bytes": b, "path": None} for b in (BLUE, RED)]}])
    e = read_examples(path)[0][0]
    assert e.images == [BLUE, RED]


def test_decode_composites_alpha_on_white():
    pixels = np.zeros((3, 256, 4), np.uint8)
    pixels[..., 3] = np.arange(256)
    pixels[1, :, :3], pixels[2, :, 0] = 255, 200
    image = decode_image(encode(Image.fromarray(pixels, "RGBA")))
    alpha = pixels[..., 3:] / 255
    wanted = pixels[..., :3] * alpha + 255 * (1 - alpha)
    got = np.asarray(image).astype(float)
    assert image.mode == "RGB" and np.abs(got - wanted).max() <= 1
    assert (got[:, 0] == 255).all() and (got[:, 255] == pixels[:, 255, :3]).all()


def test_real_diagram_is_black_on_white():
    data = (GEO / "train/15/img_diagram.png").read_bytes()
    rgba = np.asarray(Image.open(io.BytesIO(data)))
    clear = rgba[..., 3] == 0
    assert (np.asarray(decode_image(data))[clear] == 255).all()


def colours(data: bytes) -> list[tuple]:
    return [tuple(p) for p in np.asarray(decode_image(data)).reshape(-1, 3).tolist()]


def test_decode_other_modes():
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([0, 1])
    assert colours(encode(palette, transparency=0)) == [(255, 255, 255), (40, 50, 60)]
    grey = Image.new("LA", (2, 1))
    grey.putdata([(0, 0), (80, 255)])
    assert colours(encode(grey)) == [(255,) * 3, (80,) * 3]
    deep = Image.fromarray(np.array([[0, 255, 256, 32768, 65535]], np.uint16))
    assert [r for r, _, _ in colours(encode(deep))] == [0, 0, 1, 128, 255]
    assert [r for r, _, _ in colours(encode(deep, "TIFF"))] == [0, 0, 1, 128, 255]
    colour = decode_image(encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")).getpixel((4, 4))
    assert colour[0] > 240 and max(colour[1:]) < 15, "cyan-free ink is red"
    keyed = encode(Image.new("RGB", (2, 2), (1, 2, 3)), transparency=(1, 2, 3))
    assert decode_image(keyed).getpixel((0, 0)) == (255, 255, 255)
    with pytest.raises(ValueError, match="float pixels"):
        decode_image(encode(Image.new("F", (2, 2)), "TIFF"))


def test_decode_applies_exif_orientation():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    image = Image.new("RGB", (32, 16), "white")
    image.paste("red", (0, 0, 16, 16))
    turned = decode_image(encode(image, "JPEG", exif=exif, quality=95))
    assert turned.size == (16, 32)
    assert turned.getpixel((8, 4))[1] < 60 and turned.getpixel((8, 28))[1] > 200


def test_damaged_images_raise_only_image_errors(monkeypatch):
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 255, (24, 24, 3), dtype=np.uint8))
    refused = 0
    for data in (encode(noise), encode(noise, "JPEG"), encode(noise, "WEBP"), encode(noise.convert("P"), "GIF")):
        for cut in range(1, len(data), max(1, len(data) // 40)):
            try:
                decode_image(data[:cut])
            except pd.IMAGE_ERRORS:
                refused += 1
    assert refused > 100
    with pytest.raises(Image.UnidentifiedImageError):
        decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(Image.DecompressionBombError):
        decode_image(encode(noise))


# ---------------------------------------------------------------------------------------------------- jsonl, csv


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def test_jsonl(tmp_path):
    (tmp_path / "a.png").write_bytes(RED)
    chat = [{"role": "user", "content": "which?<image>"}]
    rows = [
        {"prompt": "<image>colour?", "images": "a.png", "answer": "red", "level": 1},
        {"prompt": chat, "images": [base64.b64encode(BLUE).decode()], "answer": ["blue", 2], "level": 2.5},
        "\n",
        {"prompt": "?", "images": "a.png", "answer": 7, "uid": "mine", "tags": {"k": [1]}, "split": "test"},
    ]
    out = tmp_path / "o.parquet"
    source = write_jsonl(tmp_path / "q.jsonl", rows)
    run("jsonl", "--input", source, "--data-source", "vqa", "--system", "Be brief.", "--out", out)
    a, b, c = read_examples(out)[0]
    assert a.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>colour?"}]
    assert (a.uid, a.ground_truth, a.images, a.extra["level"]) == ("vqa/train/q/0", "red", [RED], 1)
    assert b.messages[1:] == chat and b.ground_truth == '["blue", 2]' and b.images == [BLUE]
    assert (c.uid, c.ground_truth, c.images, c.extra["split"]) == ("mine", "7", [RED], "test")
    assert c.extra["tags"] == {"k": [1]}


def test_jsonl_with_custom_keys_and_image_root_but_no_placeholders(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p/a.png").write_bytes(RED)
    source = write_jsonl(tmp_path / "q.jsonl", [{"q": "same?", "pic": ["a.png", "a.png"], "gold": "yes"}])
    keys = ("--prompt-key", "q", "--image-key", "pic", "--answer-key", "gold", "--data-source", "vqa")
    command = ("jsonl", "--input", source, *keys, "--image-root", tmp_path / "p", "--out", tmp_path / "o.parquet")
    run(*command)
    assert read_examples(tmp_path / "o.parquet")[0][0].messages[0]["content"] == "<image><image>same?"


def test_jsonl_with_a_reward_model(tmp_path):
    source = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "q?", "reward_model": {"ground_truth": "1", "unit": "cm"}}])
    command = ("jsonl", "--input", source, "--image-key", "", "--data-source", "t", "--out", tmp_path / "o.parquet")
    with pytest.raises(UserError, match="no column 'answer'; it has prompt, reward_model.*--answer-key"):
        run(*command)
    run(*command, "--answer-key", "reward_model.ground_truth")
    e = read_examples(tmp_path / "o.parquet")[0][0]
    assert e.ground_truth == "1" and e.extra["unit"] == "cm"


def test_jsonl_bad_lines(tmp_path, capsys):
    good = {"prompt": "a?", "images": [], "answer": "1"}
    lines = [
        good, "{broken\n", "[1]\n", good | {"answer": ""}, good | {"images": "none.png"}, good | {"extra_info": 3},
        '"text"\n', good | {"prompt": "bad \ud800"}, good | {"prompt": [{"role": "system", "content": "s"}]},
    ]  # fmt: skip
    source = write_jsonl(tmp_path / "q.jsonl", lines)
    command = ("jsonl", "--input", source, "--data-source", "t", "--out", tmp_path / "o.parquet")
    with pytest.raises(ValueError, match=r"8 of 9 rows are bad") as e:
        run(*command)
    for text in ("line 2: not valid JSON", "line 3: JSON list, expected an object", "line 4: no ground truth"):
        assert text in str(e.value)
    run(*command, "--bad-rows", "skip")
    assert "count from 0" not in str(e.value), "lines count from 1"
    output = capsys.readouterr().out
    assert (
        "wrote 1 row " in output
        and "left out 8" in output
        and output.count("left out: ") == 6
        and "left out: ... and 3 more" in output
    )
    write_jsonl(tmp_path / "bad.jsonl", lines[1:])
    with pytest.raises(UserError, match=r"(?s)8 of 8 rows are bad.*line 1: not valid JSON.*\.\.\. and 3 more"):
        run(*command[:2], tmp_path / "bad.jsonl", *command[3:], "--bad-rows", "skip")
    assert [e.extra["index"] for e in read_examples(tmp_path / "o.parquet")[0]] == [0]
    write_jsonl(source, [good])
    with pytest.raises(ValueError, match="no data_source; --data-source NAME"):
        run("jsonl", "--input", source, "--out", tmp_path / "p.parquet")
    with pytest.raises(ValueError, match="no column 'question'; it has prompt, images, answer.*--prompt-key"):
        run(*command, "--prompt-key", "question")
    source.write_bytes(json.dumps(good).encode() + b'\n{"prompt": "\xff", "answer": "1"}\n' + b"[" * 10_000)
    with pytest.raises(ValueError, match=r"2 of 3 rows.*") as e:
        run(*command)
    assert "line 2: text is not UTF-8" in str(e.value) and "line 3: not valid JSON: maximum rec" in str(e.value)
    for data in (b"", json.dumps(good).encode("utf-16")):
        source.write_bytes(data)
        with pytest.raises(ValueError, match="q.jsonl: no row can be read; (it is empty|line .: not valid JSON)"):
            run(*command)


def test_mixed_extra_types_are_reported_and_stored_as_text(tmp_path, capsys):
    rows = [{"prompt": "a?", "answer": "1", "id": i, "none": {}} for i in (1, "two")]
    source = write_jsonl(tmp_path / "q.jsonl", rows)
    run("jsonl", "--input", source, "--image-key", "", "--data-source", "t", "--out", tmp_path / "o.parquet")
    assert "mixed types, stored as JSON text: id, none" in capsys.readouterr().out
    assert [e.extra["id"] for e in read_examples(tmp_path / "o.parquet")[0]] == ["1", "two"]


def test_text_files_are_combined(tmp_path):
    for name in "ab":
        rows = [{"prompt": f"{name}{i}?", "answer": str(i), "level": i} for i in range(2)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    run(
        "jsonl",
        "--input",
        tmp_path / "?.jsonl",
        "--image-key",
        "",
        "--data-source",
        "t",
        "--out",
        tmp_path / "o.parquet",
    )
    examples, _ = read_examples(tmp_path / "o.parquet")
    assert [e.uid for e in examples] == ["t/train/a/0", "t/train/a/1", "t/train/b/2", "t/train/b/3"]
    assert [e.extra["level"] for e in examples] == [0, 1, 0, 1]
    write_jsonl(tmp_path / "b.jsonl", [{"question": "?", "answer": "1"}])
    with pytest.raises(UserError, match="b.jsonl: no column 'prompt'; it has question, answer"):
        run("jsonl", "--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--image-key", "", "--data-source", "t",
            "--out", tmp_path / "o.parquet")  # fmt: skip
    (tmp_path / "c.csv").write_text("prompt,answer\nq?\n")
    with pytest.raises(UserError, match="c.csv: no row can be read; line 2: 1 cells but the header names 2 columns"):
        run(
            "csv",
            "--input",
            tmp_path / "c.csv",
            "--image-key",
            "",
            "--data-source",
            "t",
            "--out",
            tmp_path / "o.parquet",
        )


def test_csv(tmp_path):
    (tmp_path / "a.png").write_bytes(RED)
    (tmp_path / "b.png").write_bytes(BLUE)
    source = tmp_path / "q.csv"
    big = base64.b64encode(encode(Image.fromarray(np.random.default_rng(0).integers(0, 255, (250, 250, 3), np.uint8))))
    assert len(big) > 131072, "the cell must be longer than csv's default limit"
    with open(source, "w", newline="", encoding="utf-8-sig") as f:
        writer = csv.writer(f)
        writer.writerows([
            ["prompt", "images", "answer", "note"], ["<image>two\nlines", "a.png", "1", "n"],
            ["<image><image>", '["a.png", "b.png"]', "2", ""], ["text", "b.png", "3", ""],
            ["<image>", big.decode(), "4", ""],
        ])  # fmt: skip
    out = tmp_path / "o.parquet"
    run("csv", "--input", source, "--data-source", "t", "--out", out)
    examples, _ = read_examples(out)
    assert [len(e.images) for e in examples] == [1, 2, 1, 1] and examples[1].images == [RED, BLUE]
    assert examples[0].messages[0]["content"] == "<image>two\nlines" and examples[0].extra["note"] == "n"
    source.write_text('prompt,images,answer\na,b\n<image>,"[oops",1\n')
    with pytest.raises(ValueError) as e:
        run("csv", "--input", source, "--data-source", "t", "--out", out)
    assert "q.csv line 2: 2 cells but the header names 3 columns" in str(e.value)
    assert f"q.csv line 3: image 0 {tmp_path}/[oops: No such file" in str(e.value)
    assert len(read_examples(out)[0]) == 4, "a failed run leaves the old file alone"


# ---------------------------------------------------------------------------------------------------- URLs


@pytest.fixture(scope="module")
def server():
    hits = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            hits.append(self.path)
            if self.path == "/flaky.png" and hits.count("/flaky.png") == 1:
                return self.send_error(503)
            if self.path == "/gone.png":
                return self.send_error(404)
            if self.path == "/slow.png":
                time.sleep(1.0)
            if self.path.startswith("/to?") or self.path == "/loop.png":
                self.send_response(302)
                self.send_header("Location", self.path.partition("?")[2] or self.path)
                return self.end_headers()
            if self.path == "/header.png":  # every byte arrives within the timeout, but the headers never end
                try:
                    for byte in chain(b"HTTP/1.0 200 OK\r\nX: ", repeat(97)):
                        self.wfile.write(bytes([byte]))
                        time.sleep(0.05)
                except ConnectionError:
                    return
            self.send_response(200)
            if self.path == "/short.png":
                self.send_header("Content-Length", str(len(RED) + 9))
            self.end_headers()
            try:
                self.wfile.write(bytes(3 << 20) if self.path == "/huge.png" else RED)
                if self.path == "/drip.png":
                    for _ in repeat(None):
                        time.sleep(0.1)
                        self.wfile.write(b"x")
                        self.wfile.flush()
            except ConnectionError:
                pass

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", hits
    httpd.shutdown()
    httpd.server_close()


def test_urls_are_fetched_and_stored(tmp_path, server):
    url, hits = server
    rows = [{"prompt": "<image>", "images": f"{url}/{name}.png", "answer": "1"} for name in ("ok", "flaky")]
    source, out = write_jsonl(tmp_path / "q.jsonl", rows), tmp_path / "o.parquet"
    run("jsonl", "--input", source, "--data-source", "t", "--out", out, "--url-private")
    assert [e.images for e in read_examples(out)[0]] == [[RED], [RED]]
    assert hits.count("/flaky.png") == 2


@pytest.mark.parametrize(
    ("name", "flags", "reason", "tries"),
    [
        ("gone", (), "gone.png cannot be fetched: .*HTTP Error 404: .*; correct or remove", 1),
        ("slow", ("--url-timeout", 0.2, "--url-tries", 2), "fetched in 2 tries: .*timeout 0.2", 2),
        ("drip", ("--url-timeout", 0.3, "--url-tries", 1), "fetched in 1 tries: TimeoutError; .*timeout 0.3", 1),
        ("header", ("--url-timeout", 0.3, "--url-tries", 1), "fetched in 1 tries: TimeoutError; .*timeout 0.3", 1),
        ("short", ("--url-tries", 1), "fetched in 1 tries: .*9 more expected", 1),
        ("huge", ("--url-max-mb", 1), r"huge.png cannot be fetched: it is larger than 1 MiB \(raise --url-max-mb\)", 1),
    ],
)
def test_url_failures(tmp_path, server, name, flags, reason, tries):
    url, hits = server
    source = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "<image>", "images": f"{url}/{name}.png", "answer": "1"}])
    with pytest.raises(ValueError, match=f"q.jsonl line 1: image 0 .*{reason}"):
        run("jsonl", "--input", source, "--data-source", "t", "--out", tmp_path / "o.parquet", "--url-private", *flags)
    assert hits.count(f"/{name}.png") == tries
    # no abandoned thread goes on reading
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")])


def test_a_malformed_url_only_fails_its_own_row(tmp_path, server, capsys):
    url, _ = server
    port = url.rpartition(":")[2]
    urls = {
        "http://[::1": "Invalid IPv6 URL", f"http://{'a' * 64}.example/x.png": "too long",
        "http://h:99999/x": "out of range", f"http://a@127.0.0.1:{port}/x": "user name",
        "http:///x.png": "with a host", "http://a..b/x.png": "label", f"{url}/to?ftp://127.0.0.1/x": "not an http",
        f"{url}/to?file:///etc/passwd": "'file:///etc/passwd' is not allowed",
        f"{url}/loop.png": "HTTP Error 302: .*infinite loop", "http://h:0/x.png": "port 0", "http://h:x/": "Port",
        "http://\ud800.example/x": "can't encode",
    }  # fmt: skip
    fine = [f"{url}/Gr\u00fc\u00dfe und so.png?\u00e4", f"{url}/to?/ok.png", f"{url}/to?{url}/ok.png"]
    rows = [{"prompt": "<image>", "images": u, "answer": "1"} for u in (*urls, *fine)]
    source, out = write_jsonl(tmp_path / "q.jsonl", rows), tmp_path / "o.parquet"
    common = ("jsonl", "--input", source, "--data-source", "t", "--out", out, "--url-tries", 1, "--url-private")
    run(*common, "--bad-rows", "skip")
    assert f"wrote {len(fine)} rows" in capsys.readouterr().out
    for u, reason in urls.items():
        with pytest.raises(UserError, match=reason):
            fetch(u, tries=1, private=True)


def test_private_addresses_are_refused_at_every_hop(tmp_path, server, monkeypatch):
    url, hits = server
    for u in (
        f"{url}/private.png",
        url.replace("127.0.0.1", "localhost"),
        url.replace("127.0.0.1", "[::ffff:127.0.0.1]"),
        url.replace("127.0.0.1", "0x7f.1"),
    ):
        with pytest.raises(UserError, match=r"not public \(pass --url-private to allow it"):
            fetch(u, tries=1)
    private = ("10.0.0.1", "169.254.169.254", "::1", "fe80::1", "100.64.0.1", "2002:7f00:1::", "224.0.0.1", "0.0.0.0")
    private += ("64:ff9b::7f00:1", "64:ff9b:1::808:808", "::7f00:1", "::808:808", "::ffff:0:7f00:1", "::ffff:10.0.0.1")
    private += ("2001:0:808:808::80ff:fffe", "5f00::1", "fec0::1")
    assert not [ip for ip in private if is_public(ip)]
    public = ("8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8", "2002:808:808::")
    assert all(map(is_public, public))
    # Here 127.0.0.1 stands for a public host and 127.0.0.2 for a private one
    monkeypatch.setattr(fetching, "is_public", lambda ip: ip == "127.0.0.1")
    private = url.replace("127.0.0.1", "127.0.0.2")
    assert fetch(f"{url}/to?{url}/public.png") == RED
    with pytest.raises(UserError, match="127.0.0.2 resolves to 127.0.0.2, which is not public"):
        fetch(f"{url}/to?{private}/private.png")
    assert "/private.png" not in hits and "/public.png" in hits
    calls, original = [], fetching.socket.getaddrinfo

    def rebinding(host, *args, **kw):
        if host == "rebind.test":
            calls.append(host)
            host = "127.0.0.1" if len(calls) == 1 else "127.0.0.2"
        return original(host, *args, **kw)

    monkeypatch.setattr(fetching.socket, "getaddrinfo", rebinding)
    assert fetch(url.replace("127.0.0.1", "rebind.test") + "/ok.png") == RED and len(calls) == 1, (
        "the address that was checked is the one that is used"
    )


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_private_proxy_gives_no_access_to_private_hosts(scheme, server, monkeypatch):
    """The proxy is the `server` fixture, which answers GET with an image and CONNECT with an error."""
    url, hits = server
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    private = ("127.0.0.1:1", "127.1", "0x7f000001", "127.0.0%2e1", "[::1]:80", "[64:ff9b::7f00:1]", "localhost.")
    for host in (*private, url.removeprefix("http://")):
        with pytest.raises(UserError, match=r"not public \(pass --url-private to allow it"):
            fetch(f"{scheme}://{host}/behind.png", tries=1)
    assert not [path for path in hits if "behind" in path]
    if scheme == "http":  # hosts that the proxy resolves itself, and public addresses, still go through it
        assert fetch("http://images.example/x.png", tries=1) == RED and hits[-1] == "http://images.example/x.png"
        assert fetch("http://8.8.8.8/x.png", tries=1) == RED
    else:
        with pytest.raises(UserError, match="Tunnel connection failed: 501"):
            fetch("https://images.example/x.png", tries=1)
    monkeypatch.setenv("no_proxy", "direct.test")  # not proxied, so resolved and checked here
    loopback = socket.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)
    monkeypatch.setattr(fetching.socket, "getaddrinfo", lambda *args, **kwargs: loopback)
    with pytest.raises(UserError, match="direct.test resolves to 127.0.0.1, which is not public"):
        fetch(f"{scheme}://direct.test/behind.png", tries=1)


# ---------------------------------------------------------------------------------------------------- round trip


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
words = words.filter(
    lambda s: "<image>" not in s and "<video>" not in s and not pd.PROMPT_SPECIAL_TOKEN_PATTERN.search(s)
)
numbers = st.integers(-9, 9) | st.integers(2**64, 2**70) | st.floats(allow_nan=False)
values = st.none() | st.booleans() | numbers | words | st.lists(st.integers(-9, 9) | words, max_size=3)
values |= st.dictionaries(st.sampled_from("xy"), st.integers(-9, 9), max_size=2)


@st.composite
def example_lists(draw) -> list[Example]:
    examples = []
    for i in range(draw(st.integers(1, 6))):
        images = draw(st.lists(st.sampled_from([RED, BLUE]), max_size=3))
        content = draw(words) + "x" + "".join("<image>" + draw(words) for _ in images)
        messages = draw(st.sampled_from([[], [{"role": "system", "content": "s"}]])) + [
            {"role": "user", "content": content}
        ]
        truth = draw(words.filter(str.strip))
        extra = {"split": "train", "index": i, "uid": f"u{i}", "a": draw(st.floats(allow_nan=False)), "b": draw(words)}
        examples.append(Example(f"u{i}", draw(words), messages, images, truth, extra))
    return examples


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(examples=example_lists())
def test_round_trip(tmp_path, examples):
    write_examples(examples, tmp_path / "r.parquet")
    assert read_examples(tmp_path / "r.parquet") == (examples, [])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(extras=st.lists(st.dictionaries(st.sampled_from("abc"), values), min_size=1, max_size=5))
def test_any_extra_can_be_stored(tmp_path, extras):
    user = [{"role": "user", "content": "q"}]
    write_examples([Example(f"u{i}", "t", user, [], "1", e) for i, e in enumerate(extras)], tmp_path / "r.parquet")
    for example, extra in zip(read_examples(tmp_path / "r.parquet")[0], extras, strict=True):
        wanted = {k: v for k, v in extra.items() if v is not None}
        read = {k: v for k, v in example.extra.items() if k != "uid"}
        assert read == wanted or read == {
            k: v if isinstance(v, str) or not isinstance(read.get(k), str) else json.dumps(v) for k, v in wanted.items()
        }


def test_extra_that_would_lose_digits_is_stored_as_text(tmp_path, capsys):
    user = [{"role": "user", "content": "q"}]
    examples = [Example(f"u{i}", "t", user, [], "1", {"a": v}) for i, v in enumerate((2**60 + 1, 0.5))]
    write_examples(examples, tmp_path / "r.parquet")
    assert "mixed types, stored as JSON text: a" in capsys.readouterr().out
    assert [e.extra["a"] for e in read_examples(tmp_path / "r.parquet")[0]] == ["1152921504606846977", "0.5"]


# ---------------------------------------------------------------------------------------------------- inspect, flags


def test_inspect_with_model(tmp_path, capsys, monkeypatch):
    out, calls = tmp_path / "geo.parquet", []
    load = types.SimpleNamespace(count_tokens=lambda messages, sizes, videos: calls.append(sizes) or 100 + len(calls))

    def Processor(path, *, min_pixels=None, max_pixels=None):
        assert (path, min_pixels, max_pixels) == ("some/model", 3136, 50000)
        return load

    monkeypatch.setitem(sys.modules, "model", types.SimpleNamespace(Processor=Processor))
    run("geo3k", "--input", GEO, "--out", out, "--inspect")
    written = capsys.readouterr().out
    assert "wrote 10 rows" in written and "--- geo3k/train/13" in written and "--- geo3k/train/14" not in written
    run("inspect", out, "--rows", 1)
    output = capsys.readouterr().out
    assert "--- geo3k/train/11" in output and "--- geo3k/train/12" not in output
    assert output.split("===")[1] == written.split("===")[1]
    assert "image: 250x251 PNG RGBA, 15160 bytes" in output and "answer: 80" in output
    assert "answer_type: {'integer': 8, 'surd': 2}" in output and "image width: min 214" in output
    pixels = ("--min-pixels", 3136, "--max-pixels", 50000)
    run("inspect", out, "--rows", 0, "--model", "some/model", *pixels)
    output = capsys.readouterr().out
    assert calls[0] == [(250, 251)] and len(calls) == 10
    assert "prompt tokens, image tokens included: min 101, median 105, p90 109, max 110" in output


def test_inspect_other_layout(tmp_path, capsys):
    path = save(tmp_path / "easy.parquet", hub_rows(2))
    run("inspect", path, "--prompt-key", "problem", "--answer-key", "answer")
    assert "2 rows, 0 left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("geo3k", "--out", "."), "--out is ."),
        (("shapes", "--toy", "--out", "x.jsonl"), "--out is x.jsonl, expected the parquet file to write"),
        (
            ("csv", "--input", "a", "b", "--out", "x.parquet"),
            "a: no such file or folder of parquet files, and no file matches it as a glob",
        ),
        (("parquet", "--input", "x.parquet", "--out", "x.parquet"), "--out x.parquet is also the --input"),
        (("jsonl", "--input", "gone.jsonl", "--out", "x.parquet"), "gone.jsonl: no such file"),
        (("parquet", "--input", "gone.parquet", "--out", "x.parquet"), "gone.parquet: no such file"),
        (("shapes", "--n", "0", "--out", "x.parquet"), "--n 0: must be at least 1"),
        (("jsonl", "--url-tries", "0", "--input", "a", "--out", "x.parquet"), "--url-tries 0: must be at least 1"),
        (("inspect", "x.parquet", "--limit", "0"), "--limit 0: must be at least 1"),
        (("geo3k",), "--out is required"),
        (("jsonl", "--out", "x.parquet"), "--input is required"),
    ],
)
def test_wrong_flags(tmp_path, monkeypatch, argv, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as e:
        run(*argv)
    assert reason in str(e.value)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ((), "required: SOURCE"),
        (
            ("nothing", "--out", "x"),
            "'nothing' (choose from 'jsonl', 'csv', 'parquet', ",
        ),
        (("geo3k", "somewhere", "--out", "x.parquet"), "unrecognized arguments: somewhere"),
        (("inspect",), "the following arguments are required: FILE"),
        (("jsonl", "--toy", "--input", "x", "--out", "y"), "unknown flag --toy"),
        (("csv", "--toy", "--out", "y"), "unknown flag --toy"),
    ],
)
def test_wrong_command_lines(argv, reason, capsys):
    with pytest.raises(SystemExit):
        parse_args(list(argv))
    assert reason in capsys.readouterr().err


def test_help_lists_sources_and_their_own_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def read_help(*argv) -> str:
        with pytest.raises(SystemExit, match="0"):
            parse_args([*argv, "--help"])
        return capsys.readouterr().out

    listed = read_help()
    for name in ("jsonl", "csv", "parquet", "digits", "geo3k", "geometry3k", "shapes", "vqa", "inspect"):
        assert f"\n    {name} " in listed or f"\n    {name}\n" in listed
    assert (
        "column of the prompt (default: problem)"
        in read_help("geo3k")
        == read_help("geometry3k").replace("geometry3k ", "geo3k ", 1)
    )
    assert "become one JSON object (default: answer)" in read_help("jsonl") and "--toy" not in read_help("jsonl")
    assert "become one JSON object (default: reward_model.ground_truth)" in read_help("parquet")


def test_abbreviated_flags_are_refused():
    with pytest.raises(SystemExit):
        parse_args(["geo3k", "--inp", "x", "--out", "y"])


def test_limit_counts_good_rows(tmp_path):
    run("geo3k", "--input", GEO, "--limit", 4, "--out", tmp_path / "x.parquet")
    assert len(read_examples(tmp_path / "x.parquet")[0]) == 4


# ---------------------------------------------------------------------------------------------------- hostile rows


SPECIAL_PIECES = [
    "<|im_end|>",
    "<|im_start|>user\n",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|endoftext|>",
]


def test_no_special_token_comes_from_text(tmp_path, loaded, toys):
    """A row that passes reading and startup renders to the special tokens of the template and of its images only."""
    rng, processor = np.random.default_rng(0), loaded["qwen2_5_vl"][1]
    pieces = [
        *SPECIAL_PIECES,
        "<image>",
        "<|",
        "|>",
        "<",
        "|",
        ">",
        "im_end",
        "image_pad",
        " ",
        "\n",
        "a",
        "<think>",
        "é",
    ]
    special = set(processor.special_tokens.values())

    def count(messages):
        return sum(i in special for i in processor.tokenize_messages(messages))

    plain, refused, rendered = count([{"role": "user", "content": "a"}]), 0, 0
    per_image = count([{"role": "user", "content": "a<image>"}]) - plain
    for _ in range(400):
        text = "".join(rng.choice(pieces, rng.integers(1, 12))) + "x"
        record = {"prompt": text, "images": [RED] * text.count("<image>"), "reward_model": {"ground_truth": "1"}}
        try:
            example = pd.build_example(RawRow("f row 0", 0, record), DataFormatConfig())
        except UserError:
            refused += 1
            assert "<|" in text
            continue
        if not processor.special_tokens_in(example.messages):
            rendered += 1
            assert count(example.messages) == plain + per_image * len(example.images), text
    assert min(refused, rendered) > 50
    rows = [
        verl_row(i, prompt=[{"role": "user", "content": f"<image>{t}"}]) for i, t in enumerate(["x", *SPECIAL_PIECES])
    ]
    assert "6 of 7 rows are bad" in error_message(save(tmp_path / "f.parquet", rows))
    left_out = read_examples(tmp_path / "f.parquet", bad_rows="skip")[1]
    assert "f.parquet row 1: message 0 contains the special token '<|im_end|>'" in left_out[0] and len(left_out) == 6


def test_special_tokens_of_the_tokenizer_are_found_at_startup(tmp_path, toys, capsys):
    """Special tokens that do not look like Qwen's are known only from the tokenizer."""
    processor = Processor(str(toys["qwen2_5_vl"]))
    tokens = {"additional_special_tokens": ["[STOP]"]}
    processor.tokenizer.add_special_tokens(tokens, replace_extra_special_tokens=False)
    processor.tokenizer.save_pretrained(tmp_path / "toy")
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / "toy" / name).write_bytes((toys["qwen2_5_vl"] / name).read_bytes())
    processor = Processor(str(tmp_path / "toy"))
    assert "<think>" not in processor.special_tokens and "[STOP]" in processor.special_tokens
    rows = [
        verl_row(i, prompt=[{"role": "user", "content": f"<image>{t}"}])
        for i, t in enumerate(["x", "a[STOP]b", "<think>y"])
    ]
    examples, _ = read_examples(save(tmp_path / "f.parquet", rows))
    with pytest.raises(
        UserError, match=r"1 of 3 rows(.|\n)*train/f/1': the prompt text contains the special token \[STOP\]"
    ):
        filter_prompts(examples, [processor], 2048)
    kept, dropped, lengths = filter_prompts(examples, [processor], 2048, bad_rows="skip")
    assert [e.extra["index"] for e in kept] == [0, 2] and len(lengths) == 2 and "[STOP]" in dropped[0]
    args = train.parse_args(["--model", "m", "--data", "d", "--out", "o", "--steps", "1", "--bad-rows", "skip"])
    loaded = load_examples(str(tmp_path / "f.parquet"), args.data, [processor], Grader())
    assert (loaded, loaded.lengths) == (kept, lengths)
    output = capsys.readouterr().out
    assert (
        "0 over --max-prompt-tokens 2048, 1 with special tokens" in output
        and "left out: 'hiyouga/geometry3k/train/f/1'" in output
    )


def png_header(width: int, height: int) -> bytes:
    """Return a PNG whose header states this size, but which has no pixel data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def frames(fmt: str, n: int) -> bytes:
    colours = [Image.new("RGB", (8, 6), (40 * i, 0, 0)) for i in range(n)]
    return encode(colours[0], fmt, save_all=True, append_images=colours[1:])


def test_images_too_large_too_long_or_animated_are_bad_rows(tmp_path, monkeypatch):
    loads, original = [], ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: loads.append(self.size) or original(self))
    bad = {
        png_header(8_000, 8_000): "8000x8000 pixels, but the limit is 50 million pixels",
        png_header(70_000, 400): "70000x400 pixels, but the limit is 50 million pixels and 65535 per side",
        png(size=(3, 900)): "3x900 pixels: one side is at least 200 times the other",
        png(size=(200, 1)): "200x1 pixels: one side is at least 200",
        **{
            frames(fmt, 3): "3 frames or pages, but only the first would be used"
            for fmt in ("GIF", "WEBP", "PNG", "TIFF")
        },
    }
    fine = [png(size=(199, 1)), *(frames(fmt, 1) for fmt in ("GIF", "WEBP", "PNG", "TIFF")), frames("MPO", 2)]
    rows = [verl_row(i, images=[{"bytes": data, "path": None}]) for i, data in enumerate([*bad, *fine])]
    examples, left_out = read_examples(save(tmp_path / "f.parquet", rows), bad_rows="skip")
    assert [e.images[0] for e in examples] == fine
    assert set(loads) == {(199, 1), (8, 6)}, "refused before decoding"
    for i, (line, reason) in enumerate(zip(left_out, bad.values(), strict=True)):
        assert line.startswith(f"{tmp_path}/f.parquet row {i}: image 0 ") and reason in line


def test_large_images_are_decoded_one_at_a_time(monkeypatch):
    decoding, counts, original = [], [], images.to_rgb

    def to_rgb(image):
        decoding.append(image)
        counts.append(len(decoding))
        time.sleep(0.01)
        decoding.pop()
        return original(image)

    monkeypatch.setattr(images, "to_rgb", to_rgb)
    for limit, expected in ((10, {1}), (1000, {1, 2, 3, 4})):
        monkeypatch.setattr(images, "LARGE_PIXELS", limit)
        counts.clear()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(decode_image, [RED] * 12))
        assert (set(counts) == {1}) == (expected == {1}) and len(counts) == 12


def test_only_regular_files_of_a_valid_size_are_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "empty.png").touch()
    (tmp_path / "dir.png").mkdir()
    (tmp_path / "red.png").write_bytes(RED)
    with open(tmp_path / "huge.png", "wb") as file:
        file.truncate(20 << 30)  # sparse
    cells = {"pipe.png": "not a regular file", "/dev/zero": "not a regular file", "dir.png": "not a regular file",
             "empty.png": "has 0 bytes", "huge.png": "has 21474836480 bytes, expected 1 to"}  # fmt: skip
    for cell, reason in cells.items():
        with pytest.raises(UserError, match=reason):
            image_bytes(cell, tmp_path)
    (tmp_path / "g/1").mkdir(parents=True)
    os.mkfifo(tmp_path / "g/1/data.json")
    (tmp_path / "g/²").mkdir()  # str.isdigit is true for it, but int() fails
    with pytest.raises(UserError, match="1/data.json is not a regular file"):
        run("geo3k", "--input", tmp_path / "g", "--out", tmp_path / "o.parquet")


# ---------------------------------------------------------------------------------------------------- instruction, uids


def test_documented_flags_for_easyr1_work(tmp_path, loaded):
    """The flags that docs/data.md lists for EasyR1 read a file in its layout."""
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    flags = re.search(r"`(--prompt-key problem [^`]*)`", page)[1].split()
    path = save(tmp_path / "easy.parquet", hub_rows(2))
    args = train.parse_args(["--model", "m", "--data", str(path), "--out", "o", "--steps", "1", *flags])
    examples = load_examples(args.data.data, args.data, [loaded["qwen2_5_vl"][1]], Grader())
    assert [e.messages[0]["content"] for e in examples] == [
        f"<image>Find {i}. {geometry.INSTRUCTION}" for i in range(2)
    ]
    assert "\\boxed{}" in geometry.INSTRUCTION and len(examples.lengths) == 2
    assert examples[0].ground_truth == "\\frac { 1 } { 2 }"


def test_instruction_is_appended_to_prompts_that_lack_it(tmp_path):
    chat = [
        {"role": "user", "content": "first?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "then?"},
    ]
    rows = [{"prompt": chat, "answer": "1"}, {"prompt": "so? Box it.", "answer": "1"}]
    source, out = write_jsonl(tmp_path / "q.jsonl", rows), tmp_path / "o.parquet"
    flags = ("--image-key", "", "--data-source", "t", "--out", out)
    run("jsonl", "--input", source, *flags, "--instruction", "Box it.")
    assert [[m["content"] for m in e.messages] for e in read_examples(out)[0]] == [
        ["first?", "1", "then? Box it."],
        ["so? Box it."],
    ]
    again = read_examples(out, instruction="Box it.")[0]
    assert again == read_examples(out)[0], "the instruction is added only once"
    run("parquet", "--input", out, "--out", tmp_path / "p.parquet", "--instruction", "geo3k")
    assert read_examples(tmp_path / "p.parquet")[0][1].messages[0]["content"] == f"so? Box it. {geometry.INSTRUCTION}"
    source.write_text("prompt,answer\nq?,1\n")
    run("csv", "--input", source, *flags, "--instruction", "Box it.")
    assert read_examples(out)[0][0].messages[0]["content"] == "q? Box it."
    run("geo3k", "--input", GEO, "--out", out, "--instruction", "Short.", "--limit", 1)
    assert read_examples(out)[0][0].messages[0]["content"].endswith("{A B}$ Short.")


def test_files_with_equal_indices_are_combined(tmp_path):
    for name in ("a/train", "b/train", "b/more"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save(tmp_path / f"{name}.parquet", [verl_row(i) for i in range(2)])
    a, b, more = (tmp_path / f"{name}.parquet" for name in ("a/train", "b/train", "b/more"))

    def uids(*files):
        return [e.uid.removeprefix("hiyouga/geometry3k/train/") for e in read_examples(list(files))[0]]

    assert uids(b, more) == ["train/0", "train/1", "more/0", "more/1"] == uids(more, b)[2:] + uids(more, b)[:2]
    assert uids(a, b) == ["a/train/0", "a/train/1", "b/train/0", "b/train/1"]
    assert "is already taken by" in error_message([a, a]), "the same file was passed twice"
    for name in ("x", "y"):  # converted, then combined
        source = write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": "q?", "answer": "1"}])
        run("jsonl", "--input", source, "--image-key", "", "--data-source", "t", "--out", tmp_path / f"{name}.parquet")
    assert uids(tmp_path / "x.parquet", tmp_path / "y.parquet") == ["t/train/x/0", "t/train/y/0"]
    named = [save(tmp_path / f"{name}.parquet", [verl_row(0, extra_info={"uid": "mine"})]) for name in ("p", "q")]
    assert "uid 'mine' is already taken by" in error_message(named), "uids from the data must be unique"


# ---------------------------------------------------------------------------------------------------- full disks


@pytest.fixture
def small_disk(tmp_path):
    """A 256 KB file system. Tests are skipped if mounting fails: `mount` needs root, and may be forbidden even then."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no right to mount")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_full_and_read_only_disks_are_reported_in_one_line(tmp_path, small_disk, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 255, (300, 300, 3), dtype=np.uint8)
    big = save(
        tmp_path / "big.parquet", [verl_row(0, images=[{"bytes": encode(Image.fromarray(noise)), "path": None}])]
    )
    with pytest.raises(UserError, match=r"no space left for .*disk.*GB free\)") as e:
        run("parquet", "--input", big, "--out", small_disk / "o.parquet")
    assert not list(small_disk.iterdir()) and "\n" not in str(e.value)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    monkeypatch.setattr(pd, "table_rows", lambda *args: pytest.fail("rows were read before --out was checked"))
    with pytest.raises(UserError, match=r"--out .*cannot be written \(Read-only file system\)"):
        run("parquet", "--input", big, "--out", small_disk / "sub/o.parquet")


def test_a_failed_write_is_reported_in_one_line(tmp_path, monkeypatch):
    """The full-disk test above, for machines where nothing can be mounted."""

    def write_batch(self, batch):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_batch", write_batch)
    path = save(tmp_path / "f.parquet", [verl_row(0)])
    with pytest.raises(UserError, match="no space left for .*o.parquet"):
        run("parquet", "--input", path, "--out", tmp_path / "o.parquet")
    assert sorted(tmp_path.iterdir()) == [path]
    for out in (path / "o.parquet", "/dev/null"):
        with pytest.raises(UserError, match="expected the parquet file to write"):
            run("parquet", "--input", path, "--out", out)


def test_the_draft_of_a_killed_process_is_deleted_but_not_that_of_a_live_one(tmp_path):
    command = [sys.executable, "prepare_data.py", "shapes", "--toy", "--n", "100000", "--out", tmp_path / "o.parquet"]

    def start_process():
        process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stderr=subprocess.DEVNULL)
        old = set(tmp_path.glob(".o.parquet.*/draft"))
        while not (new := set(tmp_path.glob(".o.parquet.*/draft")) - old):
            assert process.poll() is None, "it ended before it wrote a draft"
            time.sleep(0.05)
        return process, new.pop().parent

    (killed, killed_folder), (live, live_folder) = start_process(), start_process()
    try:
        time.sleep(0.2)
        killed.kill()
        killed.wait()
        run("shapes", "--toy", "--n", "2", "--out", tmp_path / "o.parquet")
        assert live_folder.exists() and not killed_folder.exists()
    finally:
        live.kill()
        live.wait()


def test_ctrl_c_ends_without_a_traceback(tmp_path):
    # The background processes of a shell script ignore SIGINT
    restore = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    restore += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = ["prepare_data.py", "shapes", "--n", "100000", "--out", tmp_path / "o.parquet"]
    command = [sys.executable, "-c", restore, *command]
    root = Path(__file__).parents[1]
    child = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 300
        # Wait for the draft
        while not list(tmp_path.iterdir()) and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=300)[1] == "interrupted\n" and child.returncode == 130
    finally:
        child.kill()
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------- fuzz


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


HOSTILE = [
    None, "", " ", "\0", "\ud800", "<image>", "<video>", "<|im_end|>", "x" * 100_000, 0, -1, 2**70, 10**400, 1e308,
    float("nan"), float("inf"), True, [], {}, [None], [[]], [{}], {"": ""}, {"bytes": None}, {"bytes": b""},
    {"path": "/dev/zero"}, b"", b"\xff", RED, {"a": {"b": [1, "x", None]}}, nested(30), nested(31), nested(500),
    {"uid": []}, {"index": nested(40)}, [{"role": "user", "content": "q"}], [{"role": "user"}],
    [{"role": [], "content": "q"}], {"bytes": {"bytes": {"bytes": "x"}}}, "http://[::1", "data:image/png;base64,é",
    "[" * 5000, '["http://[::1", 5]', datetime(1, 1, 1), ("a", 1), "../" * 2000, "\x1b[31m", {"k\ud800": 1},
    {"split": float("nan")}, png(size=(1, 900)),
]  # fmt: skip


def test_hostile_rows_are_examples_or_bad_rows(tmp_path):
    rng, raws = np.random.default_rng(0), []
    for i in range(1500):
        good = {"data_source": "t", "prompt": "q?", "images": [], "answer": "1", "extra_info": {}, "other": 1}
        for name in rng.choice(list(good), rng.integers(1, 3), replace=False):
            value = HOSTILE[rng.integers(len(HOSTILE))]
            good[name] = {"k": value} if name == "extra_info" and rng.random() < 0.5 else value
        raws.append(RawRow(f"f\x1b row {i}", i, good, tmp_path, name=str(i)))
    bad: list[str] = []
    examples = list(pd.valid_examples(raws, ConvertConfig(out="", answer_key="answer", bad_rows="skip"), bad))
    assert len(examples) + len(bad) == len(raws) and min(len(examples), len(bad)) > 200
    assert all(line.startswith("f\\x1b row ") and line.isprintable() and len(line) < 700 for line in bad)
    assert write_examples(examples, tmp_path / "o.parquet") == len(examples)
    read, left_out = read_examples(tmp_path / "o.parquet")
    assert [(e.uid, e.messages, e.ground_truth) for e in read] == [
        (e.uid, e.messages, e.ground_truth) for e in examples
    ]


def test_values_that_python_cannot_hold_are_bad_rows(tmp_path, capsys):
    """Parquet: dates after year 9999 and invalid UTF-8. CSV: deeply nested JSON and invalid UTF-8."""
    when = pa.array([0, 2**62, 0, 0], pa.int64()).cast(pa.timestamp("us"))
    text = pa.Array.from_buffers(
        pa.string(), 4, [None, pa.py_buffer(np.array([0, 1, 2, 4, 5], np.int32)), pa.py_buffer(b"ab\xff\xfec")]
    )
    extra = pa.StructArray.from_arrays([when, text], ["when", "text"])
    table = pa.table({"prompt": ["q?"] * 4, "answer": ["1"] * 4, "extra_info": extra})
    pq.write_table(table, tmp_path / "f.parquet")
    keys = {"image_key": "", "answer_key": "answer"}
    examples, left_out = read_examples(tmp_path / "f.parquet", **keys, bad_rows="skip")
    assert [e.extra["text"] for e in examples] == ["a", "c"]
    assert "f.parquet row 1: a value cannot be read: OverflowError" in left_out[0] and "row 2: " in left_out[1]
    deep, source = "[" * 5000 + "]" * 5000, tmp_path / "q.csv"
    source.write_bytes(f'prompt,images,answer\nq?,"{deep}",1\nq?,,1\n'.encode() + b"q?,,\xff\n")
    run("csv", "--input", source, "--data-source", "t", "--out", tmp_path / "o.parquet", "--bad-rows", "skip")
    output = capsys.readouterr().out
    assert "wrote 1 row " in output and "line 2: image 0 '[[[[" in output and "line 4: text is not UTF-8" in output


@pytest.mark.parametrize("argv,text,message", [
    ("rows.csv --out o.parquet", "", "rows.csv is in the place of SOURCE; pass SOURCE --input rows.csv --out"),
    ("someone/dataset", "", "someone/dataset is in the place of SOURCE; pass SOURCE --input someone/dataset"),
    ("vga --input rows.csv", "", "(did you mean vqa?)"),
    ("vqa --input rows.csv --out o.parquet", "image;question;answer\na;b;c\n", "by commas, but these are by ';'"),
    ("csv --input rows.csv --out o.parquet", "prompt\tground_truth\na\tb\n", "by commas, but these are by '\\t'"),
    ("vqa --input rows.csv --out o.parquet", "question,answer\na,b\n",
     "Correct --image-key, or pass --image-key '' for rows without images"),
])  # fmt: skip
def test_mistakes_that_get_a_remedy(argv, text, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text(text)
    try:
        pd.main(pd.parse_args(argv.split()))
    except UserError as error:
        assert message in str(error)
    except SystemExit as stop:
        assert stop.code == 2 and message in capsys.readouterr().err
    else:
        raise AssertionError("no error")
