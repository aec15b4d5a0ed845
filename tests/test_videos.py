"""Videos in rows: cells of every form, placeholders, and the frames that training reads.

pytest tests/test_videos.py
"""

import base64
import csv
import json
import re
import shlex
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image
from test_inputs import text, user
from test_prepare_data import BLUE, RED, encode, error_message, read_examples, run, save, verl_row, write_jsonl
from video_files import animation, make_video

import prepare_data as pd
from errors import UserError
from prepare_data import DataFormatConfig, RawRow, build_example
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


def test_files_are_refused_in_training(tmp_path):
    rows = [verl_row(0, videos=["a.mp4"]), verl_row(1, videos=[])]
    message = error_message(save(tmp_path / "f.parquet", rows))
    assert "1 of 2 rows" in message and "row 0: video 0: it is a file, but training does not decode" in message
    assert "run prepare_data.py parquet --input FILE --out F.parquet" in message


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
        ("?", [CELL, {"frames": [FRAMES[0], b"x"], "fps": 1}], "video 1: frame 1 (1 bytes) cannot be decoded"),
        ("?", [{"frames": ["gone.png"], "fps": 1}], "video 0: frame 0 gone.png: No such file"),
    ],
)
def test_bad_videos_are_bad_rows(prompt, videos, reason):
    with pytest.raises(UserError) as e:
        example_of(row(prompt, videos))
    assert reason in str(e.value)


# ---------------------------------------------------------------------------------------------------- conversion

VIDEO = make_video(20)  # two seconds
SECTION = (ROOT / "docs" / "data.md").read_text().partition("\n## Videos\n")[2].partition("\n## ")[0]


def rates(path) -> list[list[tuple[int, float]]]:
    """Return the number and the rate of the frames of each video of each row."""
    return [[(len(video.frames), video.fps) for video in e.videos] for e in read_examples(path)[0]]


def convert(tmp_path, *cells, flags=()) -> list[list[tuple[int, float]]]:
    """Convert rows with these values of `videos` to a file, and return what `rates` returns of it."""
    rows = [{"prompt": "What?", "videos": cell, "answer": "1"} for cell in cells]
    source = write_jsonl(tmp_path / "q.jsonl", rows)
    run("jsonl", "--input", source, "--data-source", "t", "--out", tmp_path / "o.parquet", *flags)
    return rates(tmp_path / "o.parquet")


def test_cells_of_every_form_are_converted(tmp_path):
    (tmp_path / "a.mp4").write_bytes(VIDEO)
    (tmp_path / "b.gif").write_bytes(animation())
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(FRAMES[i])
    uri = f"data:video/mp4;base64,{base64.b64encode(VIDEO).decode()}"
    listed = {"video": ["0.png", "1.png", "2.png"], "fps": 1.5}
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    handler.log_message = lambda *_: None
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.mp4"
        found = convert(
            tmp_path, "a.mp4", ["a.mp4", "b.gif"], {"path": "a.mp4"}, [uri],
            {"video": str(tmp_path / "a.mp4"), "fps": 4}, [{"video": "a.mp4", "nframes": 6}],
            {"video": "a.mp4", "fps": 10, "max_frames": 3, "min_frames": 1},
            {"video": "a.mp4", "fps": 1, "min_frames": 5},
            listed, [listed | {"frames": listed["video"], "video": None}], url,
            {"video": f"file://{tmp_path}/a.mp4"}, flags=("--url-private",),
        )  # fmt: skip
        server.shutdown()
    file = (4, 2.0)
    even = [(6, round(5 / 1.9, 6)), (3, round(2 / 1.9, 6)), (5, round(4 / 1.9, 6))]
    assert found == [[file], [file, (4, 5.0)], [file], [file], [(8, 4.0)], *([e] for e in even), *[[(3, 1.5)]] * 2,
                     [file], [file]]  # fmt: skip
    listed = read_examples(tmp_path / "o.parquet")[0][8]
    assert shown(listed) == [(FRAMES[:3], 1.5)], "frames that are listed are stored unchanged"


def test_bytes_of_a_parquet_file_are_converted(tmp_path):
    rows = [verl_row(0, prompt="<video>?", images=[], videos=[{"bytes": VIDEO, "path": None}])]
    run("parquet", "--input", save(tmp_path / "f.parquet", rows), "--out", tmp_path / "o.parquet")
    assert rates(tmp_path / "o.parquet") == [[(4, 2.0)]]
    rows = [verl_row(0, prompt="<video>?", images=[], video=VIDEO)]
    run("parquet", "--input", save(tmp_path / "f.parquet", rows), "--out", tmp_path / "o.parquet")
    assert rates(tmp_path / "o.parquet") == [[(4, 2.0)]]


def test_flags_choose_and_shrink_frames(tmp_path):
    (tmp_path / "a.mp4").write_bytes(VIDEO)
    large = {"frames": [base64.b64encode(noise(i, 200, 120)).decode() for i in range(2)], "fps": 1}
    flags = "--video-fps 3 --video-max-pixels 3000 --video-multiple 16 --video-max-frames 5".split()
    assert convert(tmp_path, ["a.mp4", large], flags=flags) == [[(5, round(4 / 1.9, 6)), (2, 1.0)]]
    assert [size for *_, size in read_examples(tmp_path / "o.parquet")[0][0].video_sizes] == [(48, 32), (64, 32)]
    assert convert(tmp_path, "a.mp4", flags=["--video-nframes", 7]) == [[(7, round(6 / 1.9, 6))]]


def test_a_prepared_file_is_converted_again_without_change(tmp_path):
    (tmp_path / "a.mp4").write_bytes(VIDEO)
    convert(tmp_path, "a.mp4")
    run("parquet", "--input", tmp_path / "o.parquet", "--out", tmp_path / "p.parquet")
    first, second = (read_examples(tmp_path / f"{name}.parquet")[0][0] for name in "op")
    assert shown(first) == shown(second) and rates(tmp_path / "p.parquet") == [[(4, 2.0)]]


def test_damaged_videos_are_bad_rows_of_a_file(tmp_path, capsys):
    (tmp_path / "a.mp4").write_bytes(VIDEO)
    (tmp_path / "cut.mp4").write_bytes(VIDEO[:-99])
    (tmp_path / "list.mp4").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{tmp_path}/a.mp4\n")
    (tmp_path / "sound.mp4").write_bytes(make_video(n=0, audio=1))
    cells = ["a.mp4", "cut.mp4", "list.mp4", "sound.mp4", "gone.mp4", "s3:a.mp4", ["a.mp4", {"fps": 2}], 5,
             {"video": "a.mp4", "fps": "2"}, {"video": "a.mp4", "nframes": float("nan")}, {"video": "a.mp4", "fps": -1}]
    assert convert(tmp_path, *cells, flags=["--bad-rows", "skip"]) == [[(4, 2.0)]]
    output = capsys.readouterr().out
    assert "wrote 1 row" in output and "left out 10" in output
    assert "q.jsonl line 4: video 0: " in output and "it has no video that PyAV can decode" in output
    with pytest.raises(UserError, match=r"line 2: video 0: fps is '2', expected a number above 0"):
        convert(tmp_path, "a.mp4", {"video": "a.mp4", "fps": "2"})
    with pytest.raises(UserError, match=r"line 2: video 1: has neither bytes nor path"):
        convert(tmp_path, "a.mp4", ["a.mp4", {"fps": 2}])


def test_training_reads_no_decoder(tmp_path):
    """Not even the module is imported."""
    (tmp_path / "a.mp4").write_bytes(VIDEO)
    convert(tmp_path, "a.mp4")
    code = ("import sys, prepare_data as pd; [e], _ = pd.read_examples(sys.argv[1], pd.DataFormatConfig());"
            "print(len(e.videos[0].frames[0]) > 99, {'av', 'sources.decode_videos'} & {*sys.modules})")  # fmt: skip
    command = [sys.executable, "-c", code, tmp_path / "o.parquet"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == "True set()\n"


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


def documented_commands() -> list[list[str]]:
    lines = re.findall(r"^    \$ python (.*)$", SECTION.replace("\\\n", " "), re.M)
    return [shlex.split(line)[1:] for line in lines]


def run_script(code: str, folder) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


SCRIPTS = re.findall(r"```python\n(.*?)```", SECTION, re.S)


def test_the_first_command_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.mp4").write_bytes(make_video(20, size=(64, 64)))
    (tmp_path / "b.gif").write_bytes(animation())
    (tmp_path / "clips.jsonl").write_text(re.search(r"`clips.jsonl`.*?```\n(.*?)```", SECTION, re.S)[1])
    run(*documented_commands()[0])
    output = capsys.readouterr().out
    shown_lines = re.search(r"--inspect\n((?:    .*\n)+)", SECTION)[1].splitlines()
    assert len(shown_lines) == 3 and all(line.strip() in output for line in shown_lines), output
    assert "videos per row: {1: 2}" in output and "frames per second: min 2.0, median 2.0, p90 5.0, max 5.0" in output


def test_video_r1_is_read_by_the_commands_of_the_page(tmp_path, monkeypatch):
    """Rows of Video-R1-260k.json: the columns that its training script reads."""
    monkeypatch.chdir(tmp_path)
    for name, data in {"LLaVA-Video-178K/a.mp4": VIDEO, "CLEVR/b.png": RED, "NeXT-QA/c.mp4": VIDEO[:-99]}.items():
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
    run_script(SCRIPTS[0], tmp_path)
    run(*documented_commands()[1])
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
    (tmp_path / "videos" / "1164" / "4010069381.mp4").write_bytes(VIDEO)
    run_script(SCRIPTS[1], tmp_path)
    run(*documented_commands()[2])
    [e] = read_examples(tmp_path / "nextqa.parquet")[0]
    assert e.messages[0]["content"].startswith("<video>how do the two man play the instrument\nA. roll the handle\nB. ")
    assert (e.ground_truth, e.extra["answer_type"], e.extra["choices"][4]) == ("A", "CH", "pat with hand")
    assert [(len(v.frames), v.fps) for v in e.videos] == [(4, 2.0)]


def test_easyr1_and_verl_files_with_videos_are_converted(tmp_path):
    """With the flags of docs/coming_from.md, for files whose videos are paths."""
    (tmp_path / "a.mp4").write_bytes(VIDEO)
    easyr1 = {"problem": "<video>What moves?", "videos": ["a.mp4"], "answer": "cat"}
    cell = {"video": f"file://{tmp_path}/a.mp4", "fps": 1.0, "min_frames": 2, "max_frames": 8}
    verl = verl_row(0, prompt=[{"role": "user", "content": "<video>Find x."}], images=None, videos=[cell])
    flags = "--prompt-key problem --answer-key answer --data-source geo3k --instruction geo3k".split()
    for record, options, wanted in ((easyr1, flags, (4, 2.0)), (verl, (), (2, 1.0))):
        path = save(tmp_path / "f.parquet", [record])
        keys = dict(zip(["prompt_key", "answer_key", "data_source"], options[1::2], strict=False))
        assert "training does not decode videos; run prepare_data.py parquet" in error_message(path, **keys)
        run("parquet", "--input", path, "--out", tmp_path / "o.parquet", *options)
        assert rates(tmp_path / "o.parquet") == [[wanted]]
