"""Small video files for tests, made with PyAV and Pillow; and damaged and hostile ones.

    python tests/video_files.py   decode all hostile files and print what became of them, as JSON
"""

import io
import json
import os
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))
from errors import UserError
from sources.decode_videos import decode_video

OPTIONS = {"video_fps": 2.0, "video_nframes": None, "video_min_frames": 4, "video_max_frames": 16,
           "video_max_pixels": 100352, "video_multiple": 28}  # fmt: skip
LOSSLESS = {"container": "mov", "codec": "png", "pixels": "rgb24"}


def make_video(
    n=30, fps=10, size=(64, 48), container="mp4", codec="libx264", pixels="yuv420p", times=None, audio=0, **muxer
) -> bytes:
    """Return a video file. Frame i is grey: all its values are 8 * i modulo 256. `times` are those of the frames in
    milliseconds, `audio` is a number of silent seconds, `muxer` are FFmpeg's options for the container."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/video"
        with av.open(path, "w", format=container, options=muxer) as file:
            video = file.add_stream(codec, rate=fps) if n else None
            sound = file.add_stream("aac", rate=8000, layout="mono") if audio else None
            if video:
                video.width, video.height = size
                video.pix_fmt = pixels
                if times:
                    video.codec_context.time_base = Fraction(1, 1000)
            for i in range(n):
                frame = av.VideoFrame.from_ndarray(np.full((*size[::-1], 3), 8 * i % 256, np.uint8), "rgb24")
                if times:
                    frame.pts, frame.time_base = times[i], Fraction(1, 1000)
                file.mux(video.encode(frame))
            if video:
                file.mux(video.encode(None))
            for i in range(audio * 8):
                frame = av.AudioFrame.from_ndarray(np.zeros((1, 1000), np.float32), "fltp", "mono")
                frame.sample_rate, frame.pts = 8000, 1000 * i
                file.mux(sound.encode(frame))
            if sound:
                file.mux(sound.encode(None))
        return Path(path).read_bytes()


def animation(file_format="GIF", durations=(100, 200, 300, 400), size=(60, 90), mode="RGB", **options) -> bytes:
    """Return an animated image file. Frame i is grey with values 8 * i."""
    colour = {"RGB": lambda i: (8 * i,) * 3, "RGBA": lambda i: (0, 0, 0, 0)}[mode]
    frames = [Image.new(mode, size, colour(i)) for i in range(len(durations))]
    for i, frame in enumerate(frames):  # equal frames would be merged
        frame.putpixel((i, 0), (255, 0, 0, 255)[: len(mode)])
    out = io.BytesIO()
    frames[0].save(out, file_format, save_all=True, append_images=frames[1:], duration=list(durations), **options)
    return out.getvalue()


def song_with_cover() -> bytes:
    """Return an MP4 file of a second of sound, with an image as its cover."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/song"
        with av.open(path, "w", format="mp4") as file:
            sound, cover = file.add_stream("aac", rate=8000, layout="mono"), file.add_stream("mjpeg", rate=1)
            cover.width, cover.height, cover.pix_fmt = 64, 48, "yuvj420p"
            cover.disposition = av.stream.Disposition.attached_pic
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1000), np.float32), "fltp", "mono")
            frame.sample_rate, frame.pts = 8000, 0
            file.mux(sound.encode(frame))
            image = io.BytesIO()
            Image.new("RGB", (64, 48)).save(image, "JPEG")
            packet = av.Packet(image.getvalue())
            packet.stream, packet.pts, packet.dts, packet.time_base = cover, 0, 0, Fraction(1, 1)
            file.mux(packet)
            file.mux(sound.encode(None))
        return Path(path).read_bytes()


def jpeg_video(sizes: list[tuple[int, int]]) -> bytes:
    """Return an AVI file whose frames are JPEG images of these sizes, whatever its header says."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/video"
        with av.open(path, "w", format="avi") as file:
            stream = file.add_stream("mjpeg", rate=10)
            stream.width, stream.height, stream.pix_fmt = *sizes[0], "yuvj420p"
            for i, size in enumerate(sizes):
                image = io.BytesIO()
                Image.new("RGB", size, (8 * i % 256,) * 3).save(image, "JPEG")
                packet = av.Packet(image.getvalue())
                packet.stream, packet.pts, packet.dts, packet.time_base = stream, i, i, Fraction(1, 10)
                packet.is_keyframe = True
                file.mux(packet)
        return Path(path).read_bytes()


def endless_gif(n: int, side: int) -> bytes:
    """Return a GIF file of n frames, each of which changes one pixel of a large canvas."""
    one = animation(durations=(100,), size=(1, 1))
    start = one.index(b"\x21\xf9") if b"\x21\xf9" in one else one.index(b"\x2c")
    head = bytearray(one[:start])
    head[6:10] = struct.pack("<HH", side, side)
    return bytes(head) + one[start:].removesuffix(b";") * n + b";"


def patched(data: bytes, box: bytes, offset: int, value: int) -> bytes:
    """Return an MP4 file with the 32-bit number at this offset after the name of a box replaced."""
    at = data.index(box) + 4 + offset
    return data[:at] + struct.pack(">I", value) + data[at + 4 :]


def playlists(target: str) -> dict[str, bytes]:
    """Return files of formats that name other files to be read."""
    names = {"path": target, "file": f"file://{target}", "concat": f"concat:{target}", "http": "http://127.0.0.1:1/a"}
    files = {}
    for kind, name in names.items():
        files[f"hls {kind}"] = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{name}\n#EXT-X-ENDLIST\n".encode()
        files[f"master hls {kind}"] = f"#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=1\n{name}\n".encode()
        files[f"ffconcat {kind}"] = f"ffconcat version 1.0\nfile '{name}'\n".encode()
        dash = f"<AdaptationSet><Representation id='1'><BaseURL>{name}</BaseURL></Representation></AdaptationSet>"
        dash = f"<MPD xmlns='urn:mpeg:dash:schema:mpd:2011' type='static'><Period>{dash}</Period></MPD>"
        files[f"dash {kind}"] = f"<?xml version='1.0'?>{dash}".encode()
        files[f"sdp {kind}"] = f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns={name}\nm=video 1 RTP/AVP 96\n".encode()
        files[f"svg {kind}"] = f"<svg xmlns='http://www.w3.org/2000/svg'><image href='{name}'/></svg>".encode()
    return files


def hostile_files(seed: int = 0) -> dict[str, bytes]:
    """Return at least 500 damaged or hostile files by name: cut, with flipped bits and overwritten headers, without
    frames, with false and huge counts of frames, of changing and huge sizes, audio only, playlists."""
    rng = random.Random(seed)
    valid = {
        "mp4": make_video(), "moov first": make_video(movflags="faststart"),
        "fragments": make_video(movflags="frag_keyframe+empty_moov"), "audio": make_video(audio=3),
        "mkv": make_video(container="matroska"), "webm": make_video(container="webm", codec="libvpx-vp9"),
        "avi": make_video(container="avi", codec="mpeg4"), "mov": make_video(**LOSSLESS),
        "gif": animation(), "webp": animation("WEBP"),
    }  # fmt: skip
    files = {}
    for name, data in valid.items():
        for i in range(12):
            files[f"{name} cut {i}"] = data[: rng.randrange(len(data))]
        for i in range(24):
            changed = bytearray(data)
            for _ in range(rng.choice((1, 4, 16, 64, 256))):
                changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            files[f"{name} flipped {i}"] = bytes(changed)
        for i in range(8):
            start, n = rng.randrange(min(600, len(data))), rng.choice((4, 8, 32))
            new = rng.choice((b"\0" * n, b"\xff" * n, rng.randbytes(n)))
            files[f"{name} header {i}"] = data[:start] + new + data[start + n :]
        files[f"{name} twice"] = data * 2
        files[f"{name} after text"] = b"hello" + data
        files[f"{name} without its middle"] = data[: len(data) // 3] + data[len(data) * 2 // 3 :]
    mp4 = valid["moov first"]
    for value in (0, 10**6, 2**31 - 1, 2**32 - 1):
        files[f"stsz counts {value}"] = patched(mp4, b"stsz", 8, value)
        files[f"stts counts {value}"] = patched(mp4, b"stts", 8, value)
        files[f"stts lasts {value}"] = patched(mp4, b"stts", 12, value)
        files[f"mdhd lasts {value}"] = patched(mp4, b"mdhd", 16, value)
        files[f"time scale {value}"] = patched(mp4, b"mdhd", 12, value)
        files[f"stsc {value}"] = patched(mp4, b"stsc", 12, value)
    for width, height in ((65535, 65535), (16384, 16384), (65535, 16), (8192, 8192)):
        files[f"tkhd {width}x{height}"] = patched(patched(mp4, b"tkhd", 76, width << 16), b"tkhd", 80, height << 16)
        files[f"gif {width}x{height}"] = valid["gif"][:6] + struct.pack("<HH", width, height) + valid["gif"][10:]
        files[f"jpeg {width}x{height}"] = jpeg_video([(64, 48)] * 4).replace(
            struct.pack(">BHH", 8, 48, 64), struct.pack(">BHH", 8, height, width))  # fmt: skip
    files |= playlists(os.path.abspath(__file__))
    files |= {
        "no frames": make_video(n=0, audio=2), "empty": b"", "a zero": b"\0", "text": b"hello" * 1000,
        "mkv of audio": make_video(n=0, audio=2, container="matroska"), "png": animation("PNG", (100,)),
        "changing sizes": jpeg_video([(64, 48)] * 5 + [(48, 64)] * 5),
        "a large frame": jpeg_video([(64, 48), (4000, 3000)]),
        "large frames": make_video(n=2, size=(4096, 2304)), "random": rng.randbytes(5000),
        "10^6 frames": endless_gif(10**6, 1),
        "60,000 frames": make_video(n=60_000, size=(16, 16), codec="mpeg4", container="avi"),
    }  # fmt: skip
    return files


# runs in each decoder, as Python imports a module of this name; /proc counts only what the program itself took
WRITE_PEAK = """
import atexit, os, re
def write():
    peaks = re.findall(r"Vm(?:Peak|HWM):\\s+(\\d+) kB", open("/proc/self/status").read())
    open(os.path.join(os.path.dirname(__file__), f"{os.getpid()}.peak"), "w").write(" ".join(peaks))
atexit.register(write)
"""


def decode_all(files: dict[str, bytes], threads: int) -> dict:
    """Return how many files were decoded and how many refused, the reasons, what took longest, and the most memory of a
    decoder in MiB: address space, resident."""

    def outcome(item: tuple[str, bytes]) -> tuple[str, float, str]:
        began = time.monotonic()
        try:
            frames, fps = decode_video(item[1], OPTIONS)
            reason = "" if 1 <= len(frames) <= 16 and fps > 0 else f"{len(frames)} frames, {fps} per second"
        except UserError as e:
            reason = str(e)
        return item[0], time.monotonic() - began, reason

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as pool:
        (Path(folder) / "sitecustomize.py").write_text(WRITE_PEAK)
        os.environ["PYTHONPATH"] = folder
        results = list(pool.map(outcome, files.items()))
        peaks = [[int(kb) // 1024 for kb in path.read_text().split()] for path in Path(folder).glob("*.peak")]
    reasons = {name: reason for name, _, reason in results if reason}
    slowest = max(results, key=lambda result: result[1])
    return {
        "files": len(results), "decoded": len(results) - len(reasons), "refused": len(reasons), "reasons": reasons,
        "kinds": Counter(reason.partition("cannot be decoded: ")[2][:45] for reason in reasons.values()).most_common(),
        "slowest": slowest[:2], "decoders": len(peaks), "MiB": [max(both) for both in zip(*peaks, strict=True)],
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(decode_all(hostile_files(), threads=2)))
