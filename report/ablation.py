"""Ablated images of an evaluation, which measure how much of a model's accuracy depends on the images."""

import random
import zlib
from collections.abc import Collection, Sequence
from dataclasses import replace

from errors import need
from prepare_data import Example, decode_image
from rollout import ResetFn, identity
from sources.content import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from sources.images import encode_png
from utils import derive_seed

# ablation -> indices of the frames that replace a video's n frames
FRAMES = {
    "first_frame": lambda n, rng: [0] * n,
    "middle_frame": lambda n, rng: [n // 2] * n,
    "permuted": lambda n, rng: rng.sample(range(n), n),
    "reversed": lambda n, rng: range(n)[::-1],
    "reversed_answer": lambda n, rng: range(n)[::-1],
}


def check_ablations(flag: str, kinds: Collection[str], examples: Sequence[Example], data: str, env: str | None) -> None:
    """Raise UserError, which names the flag, if an ablation would change no image or video of `examples`, which are
    from `data`, or of the environment `env`."""
    need(not env or set(kinds) <= {"blank"},
         f"{flag}: with --env only white images can replace an environment's images; use {flag} blank")
    visual = [example for example in examples if len(example.images) or example.videos]
    need(not kinds or visual, f"{flag}: no example of {data} has an image or a video; leave the flag out")
    need("shuffled" not in kinds or len(visual) > 1,
         f"{flag} shuffled: only one example of {data} has an image or a video; leave shuffled out")
    for kind in FRAMES.keys() & kinds:
        clips = [example for example in examples if example.videos]
        need(clips, f"{flag} {kind}: no example of {data} has a video; leave {kind} out")
        for example in clips if kind == "reversed_answer" else ():
            need(kind in example.extra, f"{flag} {kind}: row {example.uid!r} has no column {kind}; leave {kind} out")


class Ablation:
    """The images and videos that the model sees instead of an example's: `kind` is a key of ABLATIONS, or "" for its
    own. `examples` are the given ones, for reversed_answer with that column as their ground truth."""

    def __init__(self, kind: str, examples: Sequence[Example], reset_fn: ResetFn, seed: int):
        self.blank = kind == "blank"  # images from an environment are blanked too
        change = {"shuffled": self.shuffle, "none": remove_images} | dict.fromkeys(FRAMES, self.reorder_frames)
        change = change.get(kind, identity)
        self.kind, self.examples = kind, examples
        if kind == "reversed_answer":
            self.examples = [replace(e, ground_truth=e.extra[kind]) if e.videos else e for e in examples]
        self.reset_fn = lambda example: change(reset_fn(example))
        self.seed = seed
        shown = list(map(reset_fn, examples)) if kind == "shuffled" else []
        self.media = {name: [(example, i) for example in shown for i in range(len(getattr(example, name)))]
                      for name in ("images", "videos")}  # fmt: skip

    def reorder_frames(self, example: Example) -> Example:
        """Return the example with the frames of its videos as FRAMES says: their number and rate stay the same."""
        videos = []
        for i, video in enumerate(example.videos):
            rng = random.Random(derive_seed(self.seed, self.kind, example.uid, i))
            order = FRAMES[self.kind](len(video.frames), rng)
            videos.append(video._replace(frames=tuple(video.frames[j] for j in order)))
        return replace(example, videos=videos)

    def shuffle(self, example: Example) -> Example:
        """Return the example with its images and videos replaced by those of other examples."""
        images = [self.find_other(example, "images", i)[0] for i in range(len(example.images))]
        frames = (self.find_other(example, "videos", i) for i in range(len(example.videos)))
        videos = [video._replace(frames=other) for video, other in zip(example.videos, frames, strict=True)]
        return replace(example, images=images, videos=videos)

    def find_other(self, example: Example, kind: str, i: int) -> list[bytes]:
        """Return an image, or the frames of a video at the same relative times, of another example, stretched to the
        size of the i-th one of this example: the number and positions of its tokens are the same, only the content
        differs. Raise UserError if no example has another."""
        frames = media_frames(example, kind, i)
        own = [fingerprint(media_frames(example, kind, j)) for j in range(len(getattr(example, kind)))]
        media = self.media[kind]
        start = random.Random(derive_seed(self.seed, "shuffled", example.uid, kind, i)).randrange(len(media))
        candidates = (media_frames(e, kind, j) for e, j in media[start:] + media[:start])
        other = next((frames for frames in candidates if fingerprint(frames) not in own), None)
        need(other is not None, f"row {example.uid!r}: shuffled: no example has other {kind}; omit shuffled, or use "
             "more examples")
        n, size = len(frames), decode_image(frames[0]).size
        chosen = (decode_image(other[j * len(other) // n]) for j in range(n))
        return [encode_png(frame.resize(size), compress_level=1) for frame in chosen]


def media_frames(example: Example, kind: str, i: int) -> Sequence[bytes]:
    """Return the i-th image, as a list, or the frames of the i-th video."""
    return [example.images[i]] if kind == "images" else example.videos[i].frames


def fingerprint(frames: Sequence[bytes]) -> list[tuple]:
    """Return sizes and checksums of the pixels, which do not depend on the file format."""
    return [(image.size, zlib.crc32(image.tobytes())) for image in map(decode_image, frames)]


def remove_images(example: Example) -> Example:
    """Return the example without its images, its videos and their placeholders."""
    texts = (m["content"].replace(IMAGE_PLACEHOLDER, "").replace(VIDEO_PLACEHOLDER, "") for m in example.messages)
    messages = [m | {"content": text} for m, text in zip(example.messages, texts, strict=True)]
    return replace(example, messages=messages, images=[], videos=[])

