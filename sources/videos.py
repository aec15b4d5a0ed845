"""Videos of rows: their cells, and the settings by which frames of a file are chosen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, NamedTuple

from errors import UserError, as_user_error, need, plug_in
from settings import flag_field
from sources.content import frame_cells
from sources.images import decode_image, image_bytes
from sources.lazy_images import load_images, sizes_of
from sources.tables import File

MIN_FPS, MAX_FPS = 1e-4, 1000


class Video(NamedTuple):
    """A video as the model sees it: frames that were chosen and resized when the data was prepared."""

    frames: Sequence[bytes]  # encoded images of one size
    fps: float  # frame i is shown at i / fps seconds


def need_rate(fps: Any) -> None:
    """Raise UserError if this is not a possible number of frames per second."""
    need(isinstance(fps, Real) and MIN_FPS <= fps <= MAX_FPS,
         f"fps is {fps!r:.20}, expected the number of frames per second, {MIN_FPS} to {MAX_FPS}")


def split_media(media: Sequence[bytes | Video]) -> tuple[list[bytes], list[Video]]:
    """Return the images and the videos among encoded images and videos."""
    return [x for x in media if isinstance(x, bytes)], [x for x in media if isinstance(x, Video)]


def content_bytes(item: bytes | Video) -> bytes:
    """Return the bytes of an encoded image, or of all frames of a video."""
    return item if isinstance(item, bytes) else b"".join(item.frames)


@dataclass(frozen=True)
class VideoConfig:
    """Videos"""

    video_fps: float = flag_field(2.0, "frames per second that are taken from a video file", above=0)
    video_nframes: int | None = flag_field(None, "number of evenly spaced frames, from the first to the last; "
                                           "replaces --video-fps", least=1)
    video_min_frames: int = flag_field(4, "min frames of a video, if the file has that many", least=1)
    video_max_frames: int = flag_field(16, "max frames of a video; longer ones are thinned evenly", least=1)
    video_max_pixels: int = flag_field(100352, "shrink frames with more than N pixels (width x height) to N", least=1)
    video_multiple: int = flag_field(28, "sides of stored frames become multiples of N: 28 for Qwen2-VL and "
                                     "Qwen2.5-VL, 32 for later models", least=1)


def read_video(cell: Any, root: File, reading: Any) -> tuple[list, float]:
    """Return the image cells of a video's frames, and their rate. A cell lists frames, {frames or video, fps}; or
    is an image cell that names a video file; or is {video, and any of fps, nframes, min_frames, max_frames} of a file.

    Files are decoded only where a file is written (`reading` is a ConvertConfig). Raise UserError with the reason.
    """
    frames, asked = frame_cells(cell), cell if isinstance(cell, dict) else {}
    need(frames or reading.fetch, "it is a file, but training does not decode videos; run prepare_data.py parquet "
         "--input FILE --out F.parquet, with the same flags")
    fps = asked.get("fps")
    if not frames:
        options = {f.name: getattr(reading, f.name) for f in fields(VideoConfig)}
        for name, value in asked.items():
            if f"video_{name}" in options and value is not None:
                number = isinstance(value, int | float) and value > 0
                need(number, f"{name} is {value!r:.20}, expected a number above 0")
                options[f"video_{name}"] = value
        data = image_bytes(asked.get("video") or cell, root, reading.fetch, reading.image_root)
        frames, fps = plug_in("sources.decode_videos", "videos", "leave them out").decode_video(data, options)
    need_rate(fps)
    return frames, float(fps)


def load_videos(cells: list, raw: Any, reading: Any) -> tuple[Video, ...]:
    """Return the videos of video cells, whose frames are checked as by `load_images`. Frames that are listed are shrunk
    where a file is written, if they are too large."""
    videos = []
    for i, cell in enumerate(cells):
        with as_user_error(UserError, f"video {i}"):
            frames, fps = read_video(cell, raw.root, reading)
        frames = load_images(frames, raw, reading, i)
        if reading.fetch and math.prod(sizes_of(frames)[0]) > reading.video_max_pixels:
            size = reading.video_max_pixels, reading.video_multiple
            encode_frame = plug_in("sources.decode_videos", "large frames", "shrink them").encode_frame
            frames = [encode_frame(decode_image(data), *size) for data in frames]
        videos.append(Video(frames, fps))
    return tuple(videos)
