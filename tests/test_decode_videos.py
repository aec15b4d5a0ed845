"""Video files: formats, the choice of frames, and damaged and hostile files.   pytest tests/test_decode_videos.py"""

import io
import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image
from video_files import (
    LOSSLESS,
    OPTIONS,
    animation,
    endless_gif,
    jpeg_video,
    make_video,
    patched,
    playlists,
    song_with_cover,
)

from errors import UserError
from sources import decode_videos
from sources.decode_videos import choose_frames, decode_video, encode_frame


def decode(data: bytes, **options) -> tuple[list[Image.Image], float]:
    frames, fps = decode_video(data, OPTIONS | {f"video_{name}": value for name, value in options.items()})
    return [Image.open(io.BytesIO(frame)) for frame in frames], fps


def indices(data: bytes, **options) -> tuple[list[int], float]:
    """Return which frames of a file of `make_video` are chosen, by their grey, and their rate."""
    frames, fps = choose_frames(data, OPTIONS | {f"video_{name}": value for name, value in options.items()})
    greys = [np.asarray(Image.open(io.BytesIO(frame))).mean() / 8 for frame in frames]
    assert all(abs(grey - round(grey)) < 0.2 for grey in greys)
    return [round(grey) for grey in greys], fps


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"movflags": "faststart"},
        {"movflags": "frag_keyframe+empty_moov"},
        {"audio": 3},
        {"container": "mov", "codec": "mpeg4"},
        {"container": "matroska"},
        {"container": "matroska", "audio": 4},
        {"container": "webm", "codec": "libvpx-vp9"},
        {"container": "avi", "codec": "mpeg4"},
        {"container": "avi"},
        LOSSLESS,
    ],
    ids=str,
)
def test_files_of_every_format_are_decoded(settings):
    """Three seconds at ten frames per second, of which those at 0, 0.5 ... 2.5 s are taken."""
    frames, fps = decode(make_video(**settings))
    assert fps == 2 and [frame.size for frame in frames] == [(56, 28)] * 6 and frames[0].format == "JPEG"
    greys = [np.asarray(frame).mean() / 8 for frame in frames]
    assert np.allclose(greys, [0, 5, 10, 15, 20, 25], atol=0.5)  # 8 grey levels are 1


FILE = make_video(**LOSSLESS)


@pytest.mark.parametrize(
    ("options", "chosen", "fps"),
    [
        ({}, range(0, 30, 5), 2),
        ({"fps": 5}, range(0, 30, 2), 5),
        ({"fps": 3}, [0, 3, 6, 10, 13, 16, 20, 23, 26], 3),
        ({"fps": 100}, np.linspace(0, 29, 16).round(), 15 / 2.9),
        ({"fps": 100, "max_frames": 100}, range(30), 10),
        ({"fps": 0.1}, [0, 10, 19, 29], 3 / 2.9),
        ({"fps": 0.1, "min_frames": 1}, [0], 0.1),
        ({"nframes": 8}, np.linspace(0, 29, 8).round(), 7 / 2.9),
        ({"nframes": 30, "max_frames": 40}, range(30), 10),
        ({"nframes": 90, "max_frames": 90}, range(30), 10),
        ({"nframes": 2}, [0, 29], 1 / 2.9),  # not bounded by min_frames and max_frames
        ({"nframes": 6, "max_frames": 5}, np.linspace(0, 29, 6).round(), 5 / 2.9),
    ],
)
def test_frames_are_chosen_as_asked(options, chosen, fps):
    assert indices(FILE, **options) == (list(map(int, chosen)), pytest.approx(fps, abs=1e-6))


def test_a_frame_is_given_only_for_times_at_which_it_is_shown():
    """A GIF that shows one frame for 1.9 s and then ten for 50 ms each, at one frame per second."""
    shades = [Image.new("L", (56, 56), 8 * i) for i in range(11)]
    durations = [1900] + [50] * 10
    shades[0].save(file := io.BytesIO(), "GIF", save_all=True, append_images=shades[1:], duration=durations)
    assert indices(file.getvalue(), fps=1, min_frames=1)[0][:2] == [0, 0]
    with pytest.raises(UserError, match="min_frames 32 is above max_frames 16"):
        indices(FILE, min_frames=32)


def test_frames_are_counted_because_headers_are_wrong():
    """Matroska has no count, and MP4's is too large here."""
    assert indices(make_video(container="matroska"), nframes=4)[0] == [0, 10, 19, 29]
    data = make_video(**LOSSLESS, movflags="faststart")
    with_long_track = patched(data, b"tkhd", 20, 10**6)
    assert indices(with_long_track, nframes=4)[0] == [0, 10, 19, 29]


def test_metadata_may_be_in_any_encoding():
    data = make_video(container="matroska")
    assert len(decode(data.replace(b"Lavf", b"\xffavf"))[0]) == 6 and b"Lavf" in data


def test_times_decide_if_the_rate_varies():
    """Ten frames in the first second, then one per second."""
    times = [*range(0, 1000, 100), *range(1000, 6000, 1000)]
    chosen, fps = indices(make_video(15, times=times, **LOSSLESS), fps=1)
    assert (chosen, fps) == ([0, 10, 11, 12, 13, 14], 1)


def test_rotated_videos_are_shown_upright():
    """A phone's video is stored lying, with a matrix that turns it by 90 degrees clockwise."""
    data = make_video(size=(64, 32), **LOSSLESS)
    for i, value in enumerate((0, 1, 0, -1, 0)):  # the rows of the matrix, in 1 / 65536
        data = patched(data, b"tkhd", 40 + 4 * i, (value << 16) % 2**32)
    frames, _ = decode(data, multiple=8)
    assert {frame.size for frame in frames} == {(32, 64)}

    class Turned:
        rotation = -90

        @staticmethod
        def to_image() -> Image.Image:
            image = Image.new("RGB", (64, 32))
            image.paste((255, 255, 255), (0, 0, 16, 16))
            return image

    image = Image.open(io.BytesIO(encode_frame(Turned, 10**6, 8))).convert("L")
    assert [image.getpixel(at) > 200 for at in ((2, 2), (29, 2), (2, 61), (29, 61))] == [False, True, False, False]


@pytest.mark.parametrize(
    ("size", "pixels", "multiple", "wanted"),
    [
        ((320, 240), 100352, 28, (308, 224)),
        ((320, 240), 10**6, 32, (320, 224)),
        ((1920, 1080), 100352, 28, (420, 224)),
        ((1080, 1920), 100352, 32, (224, 416)),
        ((20, 10), 100352, 28, (28, 28)),
        ((100, 90), 10**6, 1, (100, 90)),
    ],
)
def test_frames_are_shrunk_to_multiples(size, pixels, multiple, wanted):
    data = encode_frame(Image.new("RGB", size, (10, 200, 30)), pixels, multiple)
    image = Image.open(io.BytesIO(data))
    assert image.size == wanted and np.abs(np.asarray(image).astype(int) - (10, 200, 30)).max() <= 3
    assert image.width * image.height <= max(pixels, multiple**2)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP"])
def test_animated_images_need_no_pyav(file_format, tmp_path, monkeypatch):
    """Their durations are 0.1 to 0.4 s; PyAV cannot be imported in the decoder."""
    (tmp_path / "av.py").write_text("raise ImportError('none here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    data = animation(file_format, **({"lossless": True} if file_format == "WEBP" else {}))
    frames, fps = decode(data, fps=3, min_frames=1)
    greys = [np.asarray(frame)[16:].mean() / 8 for frame in frames]
    assert np.allclose(greys, [0, 2, 3], atol=0.3) and fps == 3  # they start at 0, 0.1, 0.3 and 0.6 s
    with pytest.raises(UserError, match=r"cannot be decoded: pip install -r requirements-video.txt: none here$"):
        decode(make_video(3))


def test_frames_without_a_duration_last_a_tenth_and_transparent_ones_are_white():
    frames, fps = decode(animation(durations=[0] * 12), fps=100)
    assert (len(frames), fps) == (12, 10)
    frames, _ = decode(animation("WEBP", mode="RGBA"))
    assert all(np.asarray(frame)[16:].min() > 250 for frame in frames)


AVI, CUT = make_video(container="avi", codec="mpeg4"), make_video(container="matroska")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "(0 bytes) cannot be decoded: av.error.InvalidDataError: "),
        (b"hello" * 99, "(495 bytes) cannot be decoded: av.error.InvalidDataError: "),
        (make_video(n=0, audio=1), "it has no video that PyAV can decode"),
        (song_with_cover(), "it has no video that PyAV can decode"),
        (make_video(container="mpegts"), "ArgumentError"),  # a format that is not on the list
        (make_video()[:-200], "InvalidDataError"),
        (make_video(movflags="faststart")[:-200], "InvalidDataError"),
        (AVI[: len(AVI) * 7 // 10], "a frame is damaged"),
        (CUT[: len(CUT) * 2 // 3], "of 3.0 s: the file is truncated, or its header is wrong"),
        (animation()[:-20], "OSError: image file is truncated"),
        (jpeg_video([(64, 48)] * 5 + [(48, 64)]), "frame 5 has 48x64 pixels, but the one before 64x48"),
        (make_video(2, size=(4096, 2304)), "4096x2304 pixels; make it smaller"),
        (animation()[:6] + struct.pack("<HH", 8000, 8000) + animation()[10:], "8000x8000 pixels; make it smaller"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_files_that_cannot_be_decoded_have_a_reason(data, reason):
    with pytest.raises(UserError) as e:
        decode(data)
    assert reason in str(e.value)


def test_files_that_name_others_are_refused(tmp_path):
    """The files that they name can be decoded."""
    (tmp_path / "a.mp4").write_bytes(make_video())
    assert len(decode((tmp_path / "a.mp4").read_bytes())[0]) == 6
    for name, data in playlists(str(tmp_path / "a.mp4")).items():
        if name.endswith("path") and not name.startswith(("sdp", "svg")):
            with pytest.raises(UserError, match="cannot be decoded: av.error."):
                decode(data)


def limited(limits: str, data: bytes) -> subprocess.CompletedProcess:
    """Run the decoder with other limits."""
    code = f"from sources import decode_videos as program; program.{limits}; program.main()"
    command = [sys.executable, "-c", code, json.dumps(OPTIONS)]
    return subprocess.run(command, input=data, cwd=ROOT, capture_output=True, timeout=300)


def test_memory_and_time_are_limited(monkeypatch):
    file = make_video(1, size=(4096, 2160), codec="mpeg4")
    assert limited("PROCESS_BYTES = 1 << 30", file).returncode == 0
    done = limited("PROCESS_BYTES = 160 << 20", file)
    assert done.returncode == 1 and b"Error" in done.stderr
    endless = endless_gif(10**6, 2900)
    assert limited("PROCESSOR_SECONDS = 1", endless).returncode == -24
    done = subprocess.CompletedProcess([], -24, b"", b"")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UserError, match=r"the decoder ended by signal 24 \(24: it took over 120 s\)"):
        decode(b"x")
    assert decode_videos.PROCESS_BYTES == 1 << 30


@pytest.mark.slow
def test_five_hundred_hostile_files(capsys):
    """Each is decoded or refused with a reason; no decoder crashes, or takes more memory than docs/data.md says."""
    done = subprocess.run([sys.executable, "tests/video_files.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    reasons = results.pop("reasons")
    with capsys.disabled():
        print(f"\n{results}")
    assert results["files"] == results["decoders"] >= 500, "a decoder that crashes does not write how much it took"
    assert len(reasons) == results["refused"] > 250 and results["decoded"] > 50
    assert all("cannot be decoded: " in r and len(r.partition("decoded: ")[2]) > 10 for r in reasons.values())
    assert not [name for name, r in reasons.items() if "signal" in r or "Traceback" in r]
    assert results["MiB"][0] <= 1024 and results["slowest"][1] < 60
    named = ("hls", "master", "ffconcat", "dash", "sdp", "svg", "no frames", "10^6", "60,000", "changing", "a large",
             "stsc")  # fmt: skip
    refused = {start for name in reasons for start in named if name.startswith(start)}
    assert refused == {*named}
