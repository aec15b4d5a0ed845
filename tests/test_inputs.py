"""Input formats of users' rows: content parts, native placeholders, templates, several columns, object stores.

pytest tests/test_inputs.py
"""

import base64
import builtins
import csv
import json
import sys
import time
import types

import fsspec  # noqa: F401, the fixture changes its registry
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from test_prepare_data import BLUE, RED, png, read_examples, run, save, verl_row, write_jsonl

import prepare_data as pd
from errors import UserError
from prepare_data import ConvertConfig, DataFormatConfig, RawRow, build_example
from sources import remote
from sources.content import fill_template, insert_placeholders, template_columns
from sources.fetch import fetch
from sources.remote import RemoteFile

GREEN = png("green")
TEXT = {name: base64.b64encode(data).decode() for name, data in (("red", RED), ("blue", BLUE), ("green", GREEN))}
URI = {name: f"data:image/png;base64,{text}" for name, text in TEXT.items()}


def example_of(record: dict, reading: DataFormatConfig | None = None, root=None) -> pd.Example:
    reading = reading or DataFormatConfig(answer_key="answer")
    return build_example(RawRow("f row 0", 0, {"answer": "1", **record}, *([root] if root else [])), reading)


def user(*parts) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


def text(content: str) -> dict:
    return {"type": "text", "text": content}


# ---------------------------------------------------------------------------------------------------- content parts


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URI["red"]}},
        {"type": "image_url", "image_url": {"url": URI["red"], "detail": "high"}},
        {"type": "image_url", "image_url": URI["red"]},
        {"type": "input_image", "image_url": URI["red"], "detail": "auto"},
        {"type": "image", "image": URI["red"]},
        {"type": "image", "image": RED},
        {"type": "image", "image": {"bytes": RED, "path": None}},
        {"type": "image", "base64": TEXT["red"]},
        {"type": "image", "path": "red.png"},
        {"type": "image", "url": "file://red.png", "text": None, "image_url": None, "index": None},
    ],
)
def test_an_image_part_becomes_a_placeholder(tmp_path, part):
    """The formats of OpenAI's two APIs and of Hugging Face, also with fields that a parquet struct fills with None."""
    (tmp_path / "red.png").write_bytes(RED)
    e = example_of({"prompt": user(text("Is it"), part, {"type": "input_text", "text": " red?"})}, root=tmp_path)
    assert e.messages == [{"role": "user", "content": "Is it<image> red?"}] and e.images == [RED]


def test_images_of_parts_and_of_the_column_are_in_order():
    prompt = [
        {"role": "system", "content": [text("Look.")]},
        {"role": "user", "content": "first <image>"},
        {"role": "assistant", "content": [text("yes")]},
        *user({"type": "image"}, text("and <image>"), {"type": "image_url", "image_url": {"url": URI["green"]}}),
    ]
    e = example_of({"prompt": prompt, "images": [RED, BLUE, RED]})
    assert [m["content"] for m in e.messages] == ["Look.", "first <image>", "yes", "<image>and <image><image>"]
    assert e.images == [RED, BLUE, RED, GREEN]
    e = example_of({"prompt": user({"type": "image", "index": 0}, {"type": "image", "index": 1}, text("?")),
                    "images": [RED, BLUE]})  # fmt: skip
    assert e.images == [RED, BLUE]
    e = example_of({"prompt": user({"type": "image", "image": BLUE}, text("?"), {"type": "image"}), "images": [RED]})
    assert e.images == [BLUE, RED]


@pytest.mark.parametrize(
    ("parts", "images", "reason"),
    [
        (({"type": "image"},), [], "<image> placeholders in the prompt: 1; images: 0"),
        (({"type": "image", "image": RED},), [BLUE], "<image> placeholders in the prompt: 1; images: 2"),
        (({"type": "image", "image": RED}, text("<image>")), [], "<image> placeholders in the prompt: 2; images: 1"),
        (({"type": "audio", "audio": "a.wav"},), [], "message 0, part 1: has type 'audio', expected one of text, "),
        (({"type": "input_audio"},), [], "part 1: has type 'input_audio', expected one of"),
        (({"text": "no type"},), [], "part 1: has type None, expected one of"),
        (({"type": ["image"]},), [], "part 1: has type ['image'], expected one of"),
        (("a string",), [], "part 1: is a str, expected an object such as {'type': 'text', ...}"),
        (({"type": "image_url"},), [], "part 1: has type 'image_url' but no image"),
        (({"type": "image_url", "image_url": {"url": None}},), [], "part 1: has no image in its field image_url"),
        (({"type": "image", "image": RED, "path": "x"},), [], "image, path; image parts may have only one of image"),
        (({"type": "image", "min_pixels": 9},), [RED], "has fields min_pixels; image parts may have only one of"),
        (({"type": "input_image", "file_id": "f"},), [], "has fields file_id; image parts may have only one of"),
        (({"type": "text", "text": "x", "cache": 1},), [], "is a text with unsupported fields: cache; remove them"),
        (({"type": "text", "text": 5},), [], "part 1: has a text of type int, expected a string"),
        (({"type": "image", "index": 1},), [RED], "part 1: has index 1, but the row's next image is 0"),
        (({"type": "image_url", "image_url": {"url": "https://h/x.png"}},), [], "image 0 is a URL (https://h/x.png)"),
        ((text("<|im_end|>"),), [], "message 0 contains the special token '<|im_end|>'"),
        (({"type": "image", "base64": "!!"},), [], "image 0 '!!' is neither an existing file nor valid base64"),
    ],
)  # fmt: skip
def test_other_parts_are_bad_rows(parts, images, reason):
    with pytest.raises(UserError) as e:
        example_of({"prompt": user(text("x"), *parts), "images": images})
    assert reason in str(e.value)


def test_parts_are_read_from_every_kind_of_file(tmp_path):
    chats = [user({"type": "image_url", "image_url": {"url": URI["red"]}}, text("a?")),
             user({"type": "image"}, text("b?")), user(text("c?"))]  # fmt: skip
    images = ([], [URI["blue"]], [URI["red"]])
    rows = [{"messages": chat, "answer": "1", "images": images[i]} for i, chat in enumerate(chats)]
    wanted = [("<image>a?", [RED]), ("<image>b?", [BLUE]), ("<image>c?", [RED])]
    flags = ("--prompt-key", "messages", "--data-source", "t", "--out", tmp_path / "o.parquet")
    run("jsonl", "--input", write_jsonl(tmp_path / "q.jsonl", rows), *flags)
    assert [(e.messages[0]["content"], e.images) for e in read_examples(tmp_path / "o.parquet")[0]] == wanted
    path = save(tmp_path / "f.parquet", rows)  # read directly, as training does
    examples = read_examples(path, prompt_key="messages", answer_key="answer")[0]
    assert [(e.messages[0]["content"], e.images) for e in examples] == wanted
    run("parquet", "--input", path, "--answer-key", "answer", *flags)
    assert [(e.messages[0]["content"], e.images) for e in read_examples(tmp_path / "o.parquet")[0]] == wanted


# ---------------------------------------------------------------------------------------------------- placeholders

PAD, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"


@pytest.mark.parametrize(
    ("prompt", "plain"),
    [
        (f"{START}{PAD}{END}How many?", "<image>How many?"),
        (f"a{START}{PAD * 40}{END}b", "a<image>b"),
        (f"{PAD}How many?", "<image>How many?"),
        (f"{START}<image>{END}x", "<image>x"),
        (f"<image>{START}{PAD}{END} {PAD} <image>x", "<image><image> <image> <image>x"),
        (f"{START}{PAD}{END}{START}{PAD}{END}x", "<image><image>x"),
    ],
)
def test_native_placeholders_become_image_placeholders(prompt, plain):
    n = plain.count("<image>")
    for given in (prompt, [{"role": "user", "content": prompt}], user(text(prompt))):
        e = example_of({"prompt": given, "images": [RED, BLUE, GREEN, RED][:n]})
        assert e.messages == [{"role": "user", "content": plain}] and e.images == [RED, BLUE, GREEN, RED][:n]
        with pytest.raises(UserError, match=f"<image> placeholders in the prompt: {n}; images: {n + 1}"):
            example_of({"prompt": given, "images": [RED] * (n + 1)})


@pytest.mark.parametrize("prompt", [f"{START}x", f"x{END}", f"{START}{PAD}", f"{START} {PAD}{END}",
                                    f"{START}{PAD}<|video_pad|>{END}"])  # fmt: skip
def test_other_special_tokens_stay_bad_rows(prompt):
    with pytest.raises(UserError, match="message 0 contains the special token"):
        example_of({"prompt": prompt, "images": [RED] * prompt.count(PAD)})


# ---------------------------------------------------------------------------------------------------- templates


def test_a_template_is_filled_from_columns(tmp_path):
    rows = [{"q": "Which?", "choices": ["a", "b"], "level": 3, "image": URI["red"], "answer": "a", "tags": {"k": True}}]
    template = r"<image>Question: {q}\nChoices:\n{choices}\nLevel {level} {tags} {{x}}"
    out = tmp_path / "o.parquet"
    flags = ("--prompt-template", template, "--image-key", "image", "--data-source", "t", "--out", out)
    run("jsonl", "--input", write_jsonl(tmp_path / "q.jsonl", rows), *flags, "--instruction", "Think.")
    [e] = read_examples(out)[0]
    wanted = '<image>Question: Which?\nChoices:\nA. a\nB. b\nLevel 3 {"k": true} {x} Think.'
    assert e.messages == [{"role": "user", "content": wanted}] and e.images == [RED]
    assert e.extra["choices"] == ["a", "b"] and e.extra["level"] == 3, "the template's columns must stay in extra"
    with pytest.raises(
        UserError, match=r"q.jsonl: no column 'question'; it has q, choices, level, image, answer, tags. Correct --pr"
    ):
        run("jsonl", "--input", tmp_path / "q.jsonl", *flags[2:], "--prompt-template", "{question}?")
    run("parquet", "--input", save(tmp_path / "f.parquet", rows), "--answer-key", "answer", *flags)
    assert read_examples(out)[0][0].messages[0]["content"] == wanted.removesuffix(" Think.")
    with pytest.raises(UserError, match="f.parquet: no columns 'nothing', .*--prompt-template"):
        run("parquet", "--input", tmp_path / "f.parquet", *flags[2:], "--prompt-template", "{nothing}")


def test_columns_add_no_placeholders_to_a_template():
    assert fill_template("<image>{a}{b}", {"a": "x<", "b": "image"}) == "<image>x<image"
    for record in ({"a": "<image>", "b": ""}, {"a": "<ima", "b": "ge>"}, {"a": PAD, "b": "x"},
                   {"a": ["y", "<image>"], "b": ""}, {"a": {"k": "<image>"}, "b": ""}):  # fmt: skip
        with pytest.raises(UserError, match=r"a column adds 1 placeholders to --prompt-template"):
            fill_template("<image>{a}{b}", record)
    with pytest.raises(UserError, match="no value in column 'a' of --prompt-template; the row has a, b"):
        fill_template("{a}", {"a": None, "b": 1})
    with pytest.raises(UserError, match="column 'a' of --prompt-template holds bytes"):
        fill_template("{a}", {"a": b"x"})


@pytest.mark.parametrize("template", ["{a", "a}", "{}", "{a:.2f}", "{a!r}", "{ {a} }"])
def test_a_wrong_template_is_an_error_before_any_work(tmp_path, template):
    with pytest.raises(UserError, match=r"--prompt-template '.*': write columns as {name}, and {{ and }} for braces"):
        run("jsonl", "--input", "gone.jsonl", "--prompt-template", template, "--out", tmp_path / "o.parquet")
    assert template_columns("{{a}}{b.c}{d e}") == ["b.c", "d e"]


# ---------------------------------------------------------------------------------------------------- several columns


def test_several_answer_columns_become_one_json_object(tmp_path):
    rows = [{"prompt": "where?", "country": "France", "region": None, "lat": 48.5, "n": 0},
            {"prompt": "and?", "country": "", "region": "X", "lat": 1.0, "n": 2}]  # fmt: skip
    keys = {"answer_key": "country,region, lat,n", "image_key": ""}
    path = save(tmp_path / "f.parquet", rows)
    truths = [{"country": "France", "lat": 48.5, "n": 0}, {"region": "X", "lat": 1.0, "n": 2}]
    examples = read_examples(path, **keys)[0]
    assert [json.loads(e.ground_truth) for e in examples] == truths and examples[0].extra == {}
    flags = (
        "--answer-key",
        keys["answer_key"],
        "--image-key",
        "",
        "--data-source",
        "t",
        "--out",
        tmp_path / "o.parquet",
    )
    run("jsonl", "--input", write_jsonl(tmp_path / "q.jsonl", rows), *flags)
    assert [json.loads(e.ground_truth) for e in read_examples(tmp_path / "o.parquet")[0]] == truths
    with pytest.raises(UserError, match=r"no column 'city'; .*--answer-key"):
        read_examples(path, answer_key="country,city", image_key="")
    with pytest.raises(UserError, match="row 0: no ground truth"):
        read_examples(
            save(tmp_path / "g.parquet", [{"prompt": "q", "a": None, "b": ""}]), answer_key="a,b", image_key=""
        )
    path = save(tmp_path / "h.parquet", [{"prompt": "q", "a,b": "c", "a": "x", "b": "y"}])
    assert read_examples(path, answer_key="a,b", image_key="")[0][0].ground_truth == "c", "column 'a,b' comes first"


def test_images_come_from_several_columns(tmp_path):
    row = verl_row(0, prompt=[{"role": "user", "content": "<image> and <image>?"}], left=RED, right=[BLUE])
    path = save(tmp_path / "f.parquet", [row])
    [e] = read_examples(path, image_key="left,right")[0]
    assert list(e.images) == [RED, BLUE] == e.images and list(
        read_examples(path, image_key="right,left")[0][0].images
    ) == [BLUE, RED]
    run("parquet", "--input", path, "--image-key", "left,right", "--out", tmp_path / "o.parquet")
    assert read_examples(tmp_path / "o.parquet")[0][0].images == [RED, BLUE]
    with pytest.raises(UserError, match="no column 'middle'; .*--image-key"):
        read_examples(path, image_key="left,middle")
    path = save(tmp_path / "f.parquet", [row | {"right": None}])
    with pytest.raises(UserError, match="<image> placeholders in the prompt: 2; images: 1"):
        read_examples(path, image_key="left,right")
    with open(tmp_path / "q.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [["prompt", "left", "right", "answer"], ["same?", URI["red"], f'["{URI["blue"]}"]', "no"]]
        )
    flags = ("--image-key", "left,right", "--data-source", "t", "--out", tmp_path / "o.parquet")
    run("csv", "--input", tmp_path / "q.csv", *flags)
    [e] = read_examples(tmp_path / "o.parquet")[0]
    assert e.images == [RED, BLUE] and e.messages[0]["content"] == "<image><image>same?"


def test_tasks_take_two_image_columns_from_parquet(tmp_path):
    from tasks._tables import any_rows

    path = save(tmp_path / "f.parquet", [{"left": RED, "right": BLUE, "thumb": b"x", "label": 1}])
    cfg = pd.ToyConfig(out="", input=(str(path),))
    [raw] = any_rows(cfg, ("left", "right"), lambda record, _: record)
    assert raw.record == {"left": RED, "right": BLUE, "label": 1}


# ---------------------------------------------------------------------------------------------------- object stores


@pytest.fixture
def store(monkeypatch):
    """A bucket in memory, at s3:// and memory://. Rows may not use memory://."""
    memory = MemoryFileSystem()
    MemoryFileSystem.store.clear()

    class Bucket(MemoryFileSystem):
        protocol = "s3"
        root_marker = ""

        @classmethod
        def _strip_protocol(cls, path):
            return MemoryFileSystem._strip_protocol(path.replace("s3://", "memory://"))

        def unstrip_protocol(self, name):
            return f"s3:/{name}"

    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "s3", Bucket)
    yield memory
    MemoryFileSystem.store.clear()


def put(store, path: str, data: bytes | str) -> str:
    store.pipe_file(path, data.encode() if isinstance(data, str) else data)
    return f"s3:/{path}"


def test_tables_and_images_are_read_from_a_store(store, tmp_path):
    put(store, "/bucket/data/img/red.png", RED)
    blue = put(store, "/elsewhere/blue.png", BLUE)
    rows = [{"prompt": "<image>a?", "images": "img/red.png", "answer": "1"},
            {"prompt": "<image><image>b?", "images": [blue, URI["green"]], "answer": "2"},
            {"prompt": "<image>c?", "images": TEXT["red"], "answer": "3"}]  # fmt: skip
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    wanted = [[RED], [BLUE, GREEN], [RED]]
    out = tmp_path / "o.parquet"
    flags = ("--data-source", "t", "--out", out)
    put(store, "/bucket/data/q.jsonl", lines)
    for url in ("s3://bucket/data/q.jsonl", "s3://bucket/*/q.json?", "memory://bucket/data/q.jsonl"):
        run("jsonl", "--input", url, *flags)
        examples = read_examples(out)[0]
        assert [e.images for e in examples] == wanted and examples[0].uid == "t/train/q/0"
    (tmp_path / "q.jsonl").write_text(lines)
    run("jsonl", "--input", tmp_path / "q.jsonl", "--image-root", "s3://bucket/data", *flags)
    assert [e.images for e in read_examples(out)[0]] == wanted
    run("jsonl", "--input", f"file://{tmp_path}/q.jsonl", "--image-root", "s3://bucket/data", *flags)
    for name in ("train-0", "train-1", "test-0"):
        path = save(tmp_path / f"{name}.parquet", [verl_row(i, images=["img/red.png"]) for i in range(2)])
        put(store, f"/bucket/data/{name}.parquet", path.read_bytes())
    run("parquet", "--input", "s3://bucket/data/train*", "--out", out)
    assert [e.uid[-9:] for e in read_examples(out)[0]] == ["train-0/0", "train-0/1", "train-1/0", "train-1/1"]
    assert read_examples(out)[0][3].images == [RED]
    with pytest.raises(UserError, match="s3://bucket/data contains shards of several splits .train, test.; pass one"):
        run("parquet", "--input", "s3://bucket/data", "--out", out)
    put(store, "/bucket/q.csv", f"prompt,images,answer\n<image>a?,{blue},1\n")
    run("csv", "--input", "s3://bucket/q.csv", *flags)
    assert read_examples(out)[0][0].images == [BLUE]


def test_what_a_store_lacks_is_an_error(store, tmp_path):
    flags = ("--data-source", "t", "--out", tmp_path / "o.parquet", "--url-tries", 1)
    with pytest.raises(UserError, match="s3://bucket/gone.jsonl: no such file"):
        run("jsonl", "--input", "s3://bucket/gone.jsonl", *flags)
    put(store, "/bucket/q.jsonl", json.dumps({"prompt": "<image>a?", "images": "s3://bucket/no.png", "answer": "1"}))
    with pytest.raises(
        UserError, match=r"q.jsonl line 1: image 0 s3://bucket/no.png cannot be fetched: FileNotFoundError"
    ):
        run("jsonl", "--input", "s3://bucket/q.jsonl", *flags)
    put(store, "/bucket/x.parquet", b"no parquet")
    with pytest.raises(UserError, match="s3://bucket/x.parquet is not a parquet file, or is damaged"):
        run("parquet", "--input", "s3://bucket/x.parquet", *flags)
    with pytest.raises(UserError, match="nothing://x cannot be read: ValueError: Protocol not known: nothing"):
        run("jsonl", "--input", "nothing://x", *flags)


@pytest.mark.parametrize(
    "cell",
    ["memory://bucket/red.png", "local:///etc/hostname", "simplecache::s3://bucket/red.png",
     "dir://x::s3://bucket/red.png", "s3://bucket/red.png::file:///etc/hostname", "ftp://h/x.png",
     "github://a:b@main/x.png", "reference://::s3://b/x"],
)  # fmt: skip
def test_rows_may_name_only_remote_stores(store, tmp_path, cell):
    put(store, "/bucket/red.png", RED)
    cfg = ConvertConfig(out="", answer_key="answer", data_source="t")
    for value in (cell, [cell], {"bytes": None, "path": cell}):
        with pytest.raises(UserError, match="image 0 .*has a scheme that rows may not use"):
            example_of({"prompt": "<image>a?", "images": value}, cfg, tmp_path)
    with pytest.raises(UserError, match="has a scheme that rows may not use"):
        RemoteFile.from_row_url(cell)


def test_rows_from_a_store_read_no_local_files(store, tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    root = RemoteFile.from_url("s3://bucket/data")
    cfg = ConvertConfig(out="", answer_key="answer", data_source="t", url_tries=1)
    for cell in (str(tmp_path / "red.png"), f"file://{tmp_path}/red.png"):
        with pytest.raises(UserError, match="is a path on this machine, but the data is remote"):
            example_of({"prompt": "<image>a?", "images": cell}, cfg, root)
    with pytest.raises(UserError, match="FileNotFoundError"):
        example_of({"prompt": "<image>a?", "images": f"../..{tmp_path}/red.png"}, cfg, root)


def test_training_touches_no_store(store, tmp_path):
    put(store, "/bucket/red.png", RED)
    path = save(tmp_path / "f.parquet", [verl_row(0, images=["s3://bucket/red.png"])])
    with pytest.raises(UserError, match=r"is a URL \(s3://bucket/red.png\), but training does not read from the net"):
        read_examples(path)
    for data in ("s3://bucket/f.parquet", ["x.parquet", "s3://bucket/f.parquet"], "x.parquet,s3://bucket/f.parquet"):
        with pytest.raises(
            UserError, match="s3://bucket/f.parquet.*training does not read from the network; download it"
        ):
            read_examples(data)


def test_size_time_and_tries_are_bounded(store, monkeypatch):
    put(store, "/bucket/large.png", bytes(2 << 20))
    file = RemoteFile.from_row_url("s3://bucket/large.png")
    assert fetch(file, max_mb=2) == bytes(2 << 20)
    with pytest.raises(UserError, match=r"large.png cannot be fetched: it is larger than 1 MiB \(raise --url-max-mb\)"):
        fetch(file, max_mb=1)
    attempts, real = [], MemoryFileSystem._open

    def slow(self, *args, **kwargs):
        attempts.append(time.monotonic())
        time.sleep(1.0)

    monkeypatch.setattr(MemoryFileSystem, "_open", slow)
    with pytest.raises(UserError, match="fetched in 2 tries: TimeoutError; try again, .* or --url-timeout 0.1"):
        fetch(file, timeout=0.1, tries=2)
    assert len(attempts) == 2

    def flaky(self, *args, **kwargs):
        attempts.append(0)
        if len(attempts) == 3:
            raise ConnectionError("reset")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "_open", flaky)
    assert fetch(file) == bytes(2 << 20) and len(attempts) == 4


def test_a_missing_store_library_is_a_one_line_error(monkeypatch, tmp_path):
    real = builtins.__import__

    def no_fsspec(name, *args, **kwargs):
        if name.partition(".")[0] == "fsspec":
            raise ImportError("No module named 'fsspec'")
        return real(name, *args, **kwargs)

    with pytest.raises(UserError, match="gs://bucket/x.jsonl: run pip install fsspec gcsfs"):  # gcsfs is not installed
        run("jsonl", "--input", "gs://bucket/x.jsonl", "--out", tmp_path / "o.parquet")
    monkeypatch.setattr(builtins, "__import__", no_fsspec)
    with pytest.raises(UserError, match="s3://bucket/x.jsonl: run pip install fsspec s3fs: No module named 'fsspec'"):
        run("jsonl", "--input", "s3://bucket/x.jsonl", "--out", tmp_path / "o.parquet")
    with pytest.raises(UserError, match="s3://bucket/x.png: run pip install fsspec s3fs: No module named 'fsspec'"):
        RemoteFile.from_row_url("s3://bucket/x.png")


def test_errors_of_a_store_library_are_one_line(monkeypatch):
    """Errors of botocore, for example, are not OSErrors."""

    class BotoCoreError(Exception):
        pass

    library = types.SimpleNamespace(BotoCoreError=BotoCoreError)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", library)
    with pytest.raises(UserError, match="s3://b/x cannot be read: .*BotoCoreError: no credentials"):
        with remote.remote_read_errors("s3://b/x"):
            raise BotoCoreError("no credentials\nmore")
    with pytest.raises(KeyError), remote.remote_read_errors("s3://b/x"):
        raise KeyError("our own mistake")


def test_insert_placeholders_returns_other_values_unchanged():
    for prompt in (None, 5, [], [None, {"role": "user"}], {"a": 1}):
        assert insert_placeholders(prompt, [RED], [BLUE]) == (prompt, [RED], [BLUE])
