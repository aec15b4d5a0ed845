"""Videos of rows: frames with their rate."""

from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

from errors import UserError, as_user_error, need
from sources.content import frame_cells
from sources.lazy_images import load_images

MIN_FPS, MAX_FPS = 1e-4, 1000


class Video(NamedTuple):
    """A video as the data has it: some of its frames, and their rate."""

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


def load_videos(cells: list, raw: Any, reading: Any) -> tuple[Video, ...]:
    """Return the videos of video cells, each {frames or video: a list of image cells, fps}. Frames are checked as by
    `load_images`. Raise UserError with the reason, also for a cell that names a video file."""
    videos = []
    for i, cell in enumerate(cells):
        frames = frame_cells(cell)
        with as_user_error(UserError, f"video {i}"):
            need(frames, "it lists no frames, and video files are not read; decode it into {frames, fps} first: see "
                 "docs/data.md#videos")
            need_rate(cell.get("fps"))
        videos.append(Video(load_images(frames, raw, reading, i), float(cell["fps"])))
    return tuple(videos)
