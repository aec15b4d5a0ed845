"""Videos in rows: cells of every form, placeholders, and the frames that training reads.

pytest tests/test_videos.py
"""

import base64
import csv
import io
import json
import re
import subprocess
import sys

import av
import numpy as np
import pytest
from conftest import ROOT
from PIL import Image
from test_docs import commands, sections
from test_inputs import text, user
from test_prepare_data import BLUE, RED, encode, read_examples, run, save, verl_row, write_jsonl

import prepare_data as pd
from errors import UserError
from prepare_data import ConvertConfig, DataFormatConfig, RawRow, build_example
from sources.lazy_images import LazyImages
from sources.videos import Video


def noise(seed: int, width=64, height=48) -> bytes:
    return encode(Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)))


FRAMES = [noise(i) for i in range(5)]
CELL = {"frames": FRAMES, "fps": 2.5}


def row(prompt="<video>What?", videos=(CELL,), **change) -> dict:
    prompt = [{"role": "user", "content": prompt}]
    return verl_row(0, **{"prompt": prompt, "images": [], "videos": list(videos)} | change)


def example_of(record: dict, root=None, reading=None) -> pd.Example:
    reading = reading or DataFormatConfig()
    return build_example(RawRow("f row 0", 0, record, *([root] if root else [])), reading)


def shown(example: pd.Example) -> list[tuple[list[bytes], float]]:
    return [(list(video.frames), video.fps) for video in example.videos]


def test_frames_go_through_a_file_unchanged(tmp_path):
    """Frames of a row in a file with a prompt and images, written and read again, lazily."""
    mixed = row("<image> then <video> or <video>?", [CELL, {"frames": [RED], "fps": 1}], images=[{"bytes": BLUE}])
    rows = [mixed, verl_row(1), row("Which?", extra_info={"index": 2})]
    path = save(tmp_path / "f.parquet", rows)
    run("parquet", "--input", path, "--out", tmp_path / "o.parquet")
    for file in (path, tmp_path / "o.parquet"):
        examples = read_examples(file)[0]
        assert [shown(e) for e in examples] == [[(FRAMES, 2.5), ([RED], 1.0)], [], [(FRAMES, 2.5)]]
        assert [list(e.images) for e in examples] == [[BLUE], [RED], []]
        prompts = [e.messages[0]["content"] for e in examples]
        assert prompts[::2] == ["<image> then <video> or <video>?", "<video>Which?"]
        assert [e.video_sizes for e in examples] == [[(5, 2.5, (64, 48)), (1, 1.0, (8, 6))], [], [(5, 2.5, (64, 48))]]
        assert all(isinstance(v, Video) and isinstance(v.frames, LazyImages) for e in examples for v in e.videos)
        assert "videos" not in examples[0].extra


FILE_CELLS = ["a.mp4", {"path": "a.mp4"}, {"bytes": b"x", "path": None}, b"x", "https://example.com/a.mp4",
              "data:video/mp4;base64,AAAA", {"video": "file:///a.mp4", "fps": 1.0, "min_frames": 2, "max_frames": 8},
              {"video": "a.mp4", "nframes": 6}, {"frames": [], "fps": 2}, {"fps": 2}, 5]  # fmt: skip


@pytest.mark.parametrize("cell", FILE_CELLS, ids=str)
@pytest.mark.parametrize("reading", [DataFormatConfig(), ConvertConfig(out="o")], ids=["training", "conversion"])
def test_a_cell_that_names_a_video_file_is_a_bad_row(cell, reading):
    reason = r"^video 1: it lists no frames, and video files are not read; decode it into \{frames, fps\} first: see "
    for change in ({"videos": [CELL, cell]}, {"videos": None, "video": [CELL, cell]}):
        with pytest.raises(UserError, match=reason + r"docs/data\.md#videos$"):
            example_of(row("<video><video>?") | change, reading=reading)
    with pytest.raises(UserError, match="video 0: it lists no frames"):
        example_of(row([{"type": "video", "video": "a.mp4"}, text("?")], []), reading=reading)
    with pytest.raises(UserError, match=r"video 0: frame 0 \(1 bytes\) .* \(for video files see docs/data.md#videos"):
        example_of(row(videos=[{"video": [b"x"], "fps": 2}]), reading=reading)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("<video>a <image>b", "<video>a <image>b"),
        ("<image>b <video>", "<image>b <video>"),
        ("a?", "<image><video>a?"),
        ("a <image>?", "<video>a <image>?"),
        ("<|vision_start|><|video_pad|><|video_pad|><|vision_end|>a<|image_pad|>", "<video>a<image>"),
        ([{"type": "video"}, {"type": "image"}, text("a")], "<video><image>a"),
        ([text("<image>"), {"type": "video", "index": 0}], "<image><video>"),
    ],
)
def test_marks_of_videos_are_checked_like_those_of_images(prompt, wanted):
    prompt = prompt if isinstance(prompt, str) else user(*prompt)
    e = example_of(verl_row(0, prompt=prompt, images=[BLUE], video=CELL))
    assert e.messages[0]["content"] == wanted and shown(e) == [(FRAMES, 2.5)] and e.images == [BLUE]
    assert shown(example_of(row([{"type": "video", "video": FRAMES, "fps": 2.5}], []))) == [(FRAMES, 2.5)]


@pytest.mark.parametrize(
    ("prompt", "videos", "reason"),
    [
        ("<video><video>?", [CELL], "<video> placeholders in the prompt: 2; videos: 1; write one per video"),
        ("<video>?", [], "<video> placeholders in the prompt: 1; videos: 0"),
        ("<video>?", [CELL] * 2, "<video> placeholders in the prompt: 1; videos: 2"),
        ("<|vision_start|><|video_pad|><|image_pad|><|vision_end|>", [CELL], "message 0 contains the special token"),
        ("?", [{"frames": FRAMES}], "video 0: fps is None, expected the number of frames per second"),
        ("?", [{"frames": FRAMES, "fps": float("nan")}], "video 0: fps is nan"),
        ("?", [{"frames": FRAMES, "fps": 0}], "video 0: fps is 0, expected"),
        ("?", [{"frames": [*FRAMES, RED], "fps": 1}], "video 0: frame 5 has size (8, 6), but the first has (64, 48)"),
        ("?", [{"frames": FRAMES, "fps": "2"}], "video 0: fps is '2', expected the number of frames per second"),
        ("?", [CELL, {"frames": [FRAMES[0], b"x"], "fps": 1}], "video 1: frame 1 (1 bytes) cannot be decoded"),
        ("?", [{"frames": ["gone.png"], "fps": 1}], "video 0: frame 0 gone.png: No such file"),
    ],
)
def test_bad_videos_are_bad_rows(prompt, videos, reason):
    with pytest.raises(UserError) as e:
        example_of(row(prompt, videos))
    assert reason in str(e.value)


# ---------------------------------------------------------------------------------------------------- conversion


def rates(path) -> list[list[tuple[int, float]]]:
    """Return the number and the rate of the frames of each video of each row."""
    return [[(len(video.frames), video.fps) for video in e.videos] for e in read_examples(path)[0]]


def convert(tmp_path, *cells) -> list[list[tuple[int, float]]]:
    """Convert rows with these values of `videos` to a file, and return what `rates` returns of it."""
    rows = [{"prompt": "What?", "videos": cell, "answer": "1"} for cell in cells]
    source = write_jsonl(tmp_path / "q.jsonl", rows)
    run("jsonl", "--input", source, "--data-source", "t", "--out", tmp_path / "o.parquet")
    return rates(tmp_path / "o.parquet")


def test_cells_of_every_form_are_converted(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(FRAMES[i])
    listed = {"video": ["0.png", "1.png", "2.png"], "fps": 1.5}
    encoded = {"frames": [base64.b64encode(frame).decode() for frame in FRAMES], "fps": 4}
    cells = [listed, [listed], [listed | {"frames": listed["video"], "video": None}], [encoded, listed]]
    assert convert(tmp_path, *cells) == [[(3, 1.5)]] * 3 + [[(5, 4.0), (3, 1.5)]]
    assert shown(read_examples(tmp_path / "o.parquet")[0][3]) == [(FRAMES, 4.0), (FRAMES[:3], 1.5)], "unchanged"
    run("parquet", "--input", tmp_path / "o.parquet", "--out", tmp_path / "p.parquet")
    assert [shown(e) for e in read_examples(tmp_path / "p.parquet")[0]] == [
        shown(e) for e in read_examples(tmp_path / "o.parquet")[0]]


def test_frames_are_read_from_the_file_when_they_are_used(tmp_path, monkeypatch):
    path = save(tmp_path / "f.parquet", [row()])
    [e] = read_examples(path)[0]
    reads = []
    read = LazyImages.__getitem__
    monkeypatch.setattr(LazyImages, "__getitem__", lambda self, index: reads.append(index) or read(self, index))
    assert list(e.videos[0].frames) == FRAMES and len(reads) == 1, "the row is read once for all frames"
    changed = [row(videos=[{"frames": FRAMES[::-1], "fps": 2.5}])]
    save(path, changed)
    from sources import lazy_images

    monkeypatch.setattr(lazy_images, "ROW_GROUPS", lazy_images.RowGroups())
    with pytest.raises(UserError, match="image 0: has changed since it was checked"):
        e.videos[0].frames[0]


def test_rows_with_large_frames_have_row_groups_of_their_own():
    example = example_of(row(videos=[{"frames": [noise(i, 900, 600) for i in range(2)], "fps": 1}]))
    assert sum(map(len, example.videos[0].frames)) < pd.ROW_GROUP_BYTES < 2 * sum(map(len, example.videos[0].frames))
    assert [len(group) for group in pd.row_groups([example] * 5)] == [2, 2, 1]


# ---------------------------------------------------------------------------------------------------- docs/data.md


SECTION = sections((ROOT / "docs" / "data.md").read_text())["Videos"]
RECIPE, *SCRIPTS = re.findall(r"```python\n(.*?)```", SECTION, re.S)
COMMANDS = commands(SECTION.replace("\\\n", " "))


def make_video(n=20, size=(64, 48), times=None, turned=False) -> bytes:
    """Return an MP4 file of n frames, ten per second or at `times` in milliseconds. Frame i is grey: all its values are
    8 * i modulo 256. If turned, it is to be shown rotated by 90 degrees."""
    with av.open(out := io.BytesIO(), "w", format="mp4") as file:
        video = file.add_stream("libx264", rate=1000)
        video.width, video.height = size
        for i in range(n):
            frame = av.VideoFrame.from_ndarray(np.full((*size[::-1], 3), 8 * i % 256, np.uint8), "rgb24")
            frame.pts = times[i] if times else 100 * i
            file.mux(video.encode(frame))
        file.mux(video.encode(None))
    data = out.getvalue()
    at = data.index(b"tkhd") + 44  # the matrix, of numbers of 32 bits in 1 / 65536
    matrix = b"".join((value << 16).to_bytes(4, "big", signed=True) for value in (0, 1, 0, -1, 0))
    return data[:at] + matrix + data[at + 20 :] if turned else data


def follow(scripts=(), conversion=0) -> None:
    """Run scripts of the page, and its command for `frames.py` and the one after it, in the working directory."""
    for code in scripts:
        subprocess.run([sys.executable, "-c", code], check=True)
    frames, convert = (words[1:] for words, *_ in COMMANDS[2 * conversion :][:2])
    subprocess.run([sys.executable, "-c", RECIPE, *frames[1:]], check=True)
    run(*convert[1:])


@pytest.mark.parametrize(
    ("settings", "chosen", "fps", "size"),
    [
        ({}, range(0, 20, 5), 2, (56, 28)),
        ({"n": 30}, range(0, 30, 5), 2, (56, 28)),
        ({"n": 1}, [0], 2, (56, 28)),
        ({"n": 200}, [199 * i // 15 for i in range(16)], 15 / 19.9, (56, 28)),
        ({"n": 6, "times": [0, 100, 200, 2000, 2100, 2200]}, [0, 2, 2, 2, 3], 2, (56, 28)),
        ({"size": (640, 480)}, range(0, 20, 5), 2, (364, 252)),
        ({"size": (64, 32), "turned": True}, range(0, 20, 5), 2, (28, 56)),
    ],
    ids=str,
)
def test_the_recipe_takes_evenly_spaced_frames(settings, chosen, fps, size, tmp_path):
    (tmp_path / "a.mp4").write_bytes(make_video(**settings))
    write_jsonl(tmp_path / "clips.jsonl", [{"video": "a.mp4", "answer": 1}, {"answer": 2}, {"video": "gone.mp4"}])
    command = [sys.executable, "-c", RECIPE, "clips.jsonl", "frames.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("left out: gone.mp4 ") and done.stdout.count("\n") == 1
    made, other = map(json.loads, (tmp_path / "frames.jsonl").read_text().splitlines())
    frames = [Image.open(io.BytesIO(base64.b64decode(frame))) for frame in made["video"]["frames"]]
    assert made["video"]["fps"] == pytest.approx(fps, abs=1e-6) and made["answer"] == 1 and other == {"answer": 2}
    assert {(frame.format, frame.size) for frame in frames} == {("JPEG", size)}
    assert [round(np.asarray(frame).mean() / 8) for frame in frames] == [i % 32 for i in chosen]


def test_the_first_commands_print_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_bytes(make_video(size=(64, 64)))
    (tmp_path / "clips.jsonl").write_text(re.search(r"`clips.jsonl`.*?```\n(.*?)```", SECTION, re.S)[1])
    follow()
    output = capsys.readouterr().out
    assert len(COMMANDS[1][2]) == 3 and all(line in output for line in COMMANDS[1][2]), output
    assert "videos per row: {1: 2}" in output and "frames per second: min 2.0, median 2.0, p90 2.0, max 2.0" in output


def test_video_r1_is_read_by_the_commands_of_the_page(tmp_path, monkeypatch):
    """Rows of Video-R1-260k.json: the columns that its training script reads."""
    monkeypatch.chdir(tmp_path)
    video = make_video()
    for name, data in {"LLaVA-Video-178K/a.mp4": video, "CLEVR/b.png": RED, "NeXT-QA/c.mp4": video[:-99]}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(data)
    common = {"problem_id": 2, "data_source": "LLaVA-Video-178K"}
    rows = [
        common | {"problem": "What does the man do?", "data_type": "video", "problem_type": "multiple choice",
                  "options": ["A. He runs.", "B. He sits.", "C. Nothing."], "solution": "<answer>B</answer>",
                  "path": "./LLaVA-Video-178K/a.mp4"},
        common | {"problem": "How many cubes?", "data_type": "image", "problem_type": "numerical", "options": [],
                  "solution": "<answer>3</answer>", "path": "./CLEVR/b.png"},
        common | {"problem": "Why?", "data_type": "video", "problem_type": "free-form", "options": [],
                  "solution": "<answer>rain</answer>", "path": "./NeXT-QA/c.mp4"},
    ]  # fmt: skip
    (tmp_path / "Video-R1-260k.json").write_text(json.dumps(rows))
    follow(SCRIPTS[:1], conversion=1)
    [video, image] = read_examples(tmp_path / "video-r1.parquet")[0]
    question = "<video>What does the man do?\nA. He runs.\nB. He sits.\nC. Nothing.\n"
    assert video.messages[0]["content"].startswith(question) and (video.data_source, video.ground_truth) == ("vqa", "B")
    assert [(len(v.frames), v.fps) for v in video.videos] == [(4, 2.0)] and not video.images
    assert image.messages[0]["content"].startswith("<image>How many cubes?") and list(image.images) == [RED]
    assert (image.ground_truth, image.videos, image.extra["problem_type"]) == ("3", (), "numerical")


def test_nextqa_is_read_by_the_commands_of_the_page(tmp_path, monkeypatch):
    """A row of its val.csv, with all columns, and of the file that maps its videos to those of VidOR."""
    monkeypatch.chdir(tmp_path)
    header = "video,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4".split(",")
    cells = [4010069381, 369, 640, 480, "how do the two man play the instrument", 0, 6, "CH",
             "roll the handle", "tap their feet", "strum the string", "hit with sticks", "pat with hand"]  # fmt: skip
    with open(tmp_path / "val.csv", "w", newline="") as file:
        csv.writer(file).writerows([header, cells])
    (tmp_path / "map_vid_vidorID.json").write_text('{"4010069381": "1164/4010069381"}')
    (tmp_path / "videos" / "1164").mkdir(parents=True)
    (tmp_path / "videos" / "1164" / "4010069381.mp4").write_bytes(make_video())
    follow(SCRIPTS[1:], conversion=2)
    [e] = read_examples(tmp_path / "nextqa.parquet")[0]
    assert e.messages[0]["content"].startswith("<video>how do the two man play the instrument\nA. roll the handle\nB. ")
    assert (e.ground_truth, e.extra["answer_type"], e.extra["choices"][4]) == ("A", "CH", "pat with hand")
    assert [(len(v.frames), v.fps) for v in e.videos] == [(4, 2.0)]
