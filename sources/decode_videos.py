"""Decoding of video files, in a process of its own with limits on memory and time: `decode_video` starts this file as a
program. GIF and WebP files are read by Pillow, others by PyAV (requirements-video.txt).

A file is given as bytes, and only formats that hold their frames are read: none that could name other files.
"""

import base64
import io
import json
import math
import resource
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image, ImageSequence

from errors import as_user_error, need

PROCESS_BYTES = 1 << 30  # all the memory that the process may ask for
PROCESSOR_SECONDS = 120
MAX_FRAMES = 50_000  # of a file; 27 minutes at 30 per second
MAX_FRAME_PIXELS = 9_000_000  # 4096x2160 and a little
CONTAINERS = {"format_whitelist": "mov,matroska,avi", "protocol_whitelist": "none"}  # mov: also MP4; matroska: WebM
TIME_TOLERANCE = 1e-3  # seconds, for times that files round
WHOLE = 0.9  # a file that ends before this share of its header's duration is cut
JPEG = {"format": "JPEG", "quality": 95, "subsampling": 0}

Frame = tuple[float, float, Any]  # the seconds at which it starts and ends, and PyAV's or Pillow's frame


def decode_video(data: bytes, options: dict) -> tuple[list[bytes], float]:
    """Return the encoded frames that `choose_frames` takes from a video file, and their rate. Raise UserError with the
    reason."""
    command = [sys.executable, "-m", "sources.decode_videos", json.dumps(options)]
    done = subprocess.run(command, input=data, capture_output=True, cwd=Path(__file__).parents[1])
    reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("errors.UserError: ")
    if done.returncode < 0:
        reason = f"the decoder ended by signal {-done.returncode} (24: it took over {PROCESSOR_SECONDS} s)"
    hint = "; the file is truncated, damaged or not a video" if reason.startswith("av.error") else ""
    need(done.returncode == 0, f"({len(data)} bytes) cannot be decoded: {reason}{hint}")
    frames, fps = json.loads(done.stdout)
    return list(map(base64.b64decode, frames)), fps


def pillow_frames(data: bytes) -> Iterator[Frame]:
    """Yield the frames of a GIF or WebP file. One without a duration is shown for 0.1 s, as browsers do."""
    end = 0.0
    with Image.open(io.BytesIO(data), formats=("GIF", "WEBP")) as file:
        for frame in ImageSequence.Iterator(file):
            frame.load()
            start, end = end, end + (frame.info.get("duration") or 100) / 1000
            yield start, end, frame


def av_frames(data: bytes) -> Iterator[Frame]:
    """Yield the frames of the first video stream of a file. Raise UserError at the end if the file is cut."""
    with as_user_error(ImportError, "pip install -r requirements-video.txt"):
        import av

    with av.open(io.BytesIO(data), options=CONTAINERS, metadata_errors="replace") as file:
        covers = av.stream.Disposition.attached_pic
        streams = [s for s in file.streams.video if s.codec_context and not s.disposition & covers]
        need(streams, "it has no video that PyAV can decode")
        streams[0].codec_context.thread_count = 1
        aspect = streams[0].sample_aspect_ratio or 1
        need(aspect == 1, f"its pixels are not square ({aspect}); convert it, for example with ffmpeg's setsar=1")
        step = 1 / float(streams[0].guessed_rate or 25)
        end = 0.0
        for packet in file.demux():
            end = max(end, float((packet.pts or packet.dts or 0) * (packet.time_base or 0)))
            for frame in packet.decode() if packet.stream is streams[0] else ():
                need(not frame.is_corrupt and frame.time is not None, "a frame is damaged")
                yield frame.time, frame.time + step, frame
        length = (file.duration or 0) / av.time_base
        need(end >= WHOLE * length - step,
             f"it ends at {end:.1f} of {length:.1f} s: the file is truncated, or its header is wrong")


def video_frames(data: bytes) -> Iterator[Frame]:
    """Yield the frames of a video file. Raise UserError if there are none, too many, too large, or of several sizes."""
    pillow = data.startswith(b"GIF8") or data[8:12] == b"WEBP"
    size = None
    for i, frame in enumerate((pillow_frames if pillow else av_frames)(data)):
        first, size = size, f"{frame[2].width}x{frame[2].height}"
        need(first in (None, size), f"frame {i} has {size} pixels, but the one before {first}")
        need(frame[2].width * frame[2].height <= MAX_FRAME_PIXELS, f"{size} pixels; make it smaller")
        need(i < MAX_FRAMES, f"it has over {MAX_FRAMES} frames; split it")
        yield frame
    need(size, "it has no frames")


def encode_frame(frame: Any, max_pixels: int, multiple: int) -> bytes:
    """Return PyAV's or Pillow's frame as a JPEG file. It is shrunk to at most `max_pixels`, and its sides become
    multiples of `multiple`. Transparent frames are put on white."""
    if not isinstance(frame, Image.Image):
        frame = frame.to_image().rotate(frame.rotation, expand=True)
    if frame.has_transparency_data:
        frame = Image.alpha_composite(Image.new("RGBA", frame.size, "white"), frame.convert("RGBA"))
    scale = min(1, math.sqrt(max_pixels / (frame.width * frame.height)))
    size = [max(multiple, int(side * scale) // multiple * multiple) for side in frame.size]
    frame.convert("RGB").resize(size).save(file := io.BytesIO(), **JPEG)
    return file.getvalue()


def choose_frames(data: bytes, options: dict) -> tuple[list[bytes], float]:
    """Return encoded frames of a video file, and their rate: `video_nframes` evenly from first to last, or those
    shown at 0, 1 / fps, 2 / fps ... seconds. If the latter are too few, or more than allowed or than all frames, take
    as many as allowed, evenly. Frames are counted, as headers may be wrong. `options` are the settings of VideoConfig.
    """
    spans = [(start, end) for start, end, _ in video_frames(data)]
    starts, ends = map(sorted, zip(*spans, strict=True))  # they come in order, but AVI may give them each other's times
    fps, count, least, most, *size = (
        options[f"video_{name}"] for name in ("fps", "nframes", "min_frames", "max_frames", "max_pixels", "multiple")
    )
    need(count or least <= most, f"min_frames {least} is above max_frames {most}; change one of them")
    wanted = count or math.ceil((ends[-1] - starts[0]) * fps - 1e-6)
    n = min(wanted if count else min(max(wanted, least), most), len(starts))
    span = starts[-1] - starts[0]
    need(n == 1 or span > 0, "its frames have no timestamps")
    evenly = n > 1 and (count or n != wanted)
    step = span / (n - 1) if evenly else 1 / fps
    times = [starts[0] + i * step for i in range(n)]
    if evenly:
        chosen = [min(range(len(starts)), key=lambda j: abs(starts[j] - time)) for time in times]
    else:
        chosen = [bisect_right(starts, time + TIME_TOLERANCE) - 1 for time in times]
    frames = enumerate(islice(video_frames(data), max(chosen) + 1))
    encoded = {i: encode_frame(frame, *size) for i, (_, _, frame) in frames if i in chosen}
    return [encoded[i] for i in chosen], round(1 / step, 6)


def main() -> None:
    if sys.platform == "linux":  # macOS does not limit it
        resource.setrlimit(resource.RLIMIT_AS, (PROCESS_BYTES, PROCESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS + 1))
    frames, fps = choose_frames(sys.stdin.buffer.read(), json.loads(sys.argv[1]))
    print(json.dumps([[base64.b64encode(frame).decode() for frame in frames], fps]))


if __name__ == "__main__":
    main()
