"""Records: the data of examples and their responses, for files and pages.

A record is an example with its responses. Its keys are index, uid, answer_type, task, source, n_images (with videos),
n_videos, ground_truth, `groups` (the values of the --group-by columns) and `samples`. A sample has text, finish_reason,
tokens and rewards; an episode also has turns, ended_by, messages and images (encoded files, which only pages and
trackers show), and those with film strips have `videos`: index of the image -> its description.

The process that writes pages imports this file, so it must import quickly.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image

MAX_IMAGE_SIDE = 480  # pixels of the longer side of a shown image
STRIP_FRAMES = 8
MAX_PROMPTS = 1000  # per report
# name of a by_* table -> key of a record
GROUPINGS = {"answer_type": "answer_type", "task": "task", "source": "source", "images": "n_images"}


def encode_image(image: Image.Image) -> bytes:
    """Return an image as a WEBP file of at most MAX_IMAGE_SIDE pixels, lossless if it is tiny or has few colours."""
    image = image.convert("RGB")
    image.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
    lossless = max(image.size) <= 128 or image.getcolors(256) is not None
    image.save(file := io.BytesIO(), format="WEBP", quality=60, lossless=lossless, method=3)
    return file.getvalue()


def film_strip(frames: Sequence[Any], to_image: Callable[[Any], Image.Image]) -> Image.Image:
    """Return an image of at most STRIP_FRAMES frames of a video, evenly spaced, from left to right."""
    n = len(frames)
    chosen = range(n) if n <= STRIP_FRAMES else [round(i * (n - 1) / (STRIP_FRAMES - 1)) for i in range(STRIP_FRAMES)]
    images = [to_image(frames[i]) for i in chosen]
    width, height = images[0].size
    strip = Image.new("RGB", (len(images) * (width + 2) - 2, height), "white")
    for i, image in enumerate(images):
        strip.paste(image, (i * (width + 2), 0))
    return strip


def video_name(n: int, fps: float) -> str:
    """Return the description of a film strip: that of a video of n frames."""
    shown = f", {STRIP_FRAMES} of them shown" if n > STRIP_FRAMES else ""
    return f"video: {n} frames, {fps:g} per second{shown}"


def drop_images(record: dict) -> dict:
    """Return a record without the images of its episodes, so that it can be written as JSON."""
    samples = [{name: value for name, value in s.items() if name != "images"} for s in record["samples"]]
    return record | {"samples": samples}


def filter_columns(records: Sequence[dict]) -> dict[str, list[str]]:
    """Return the columns by which records can be filtered: name -> the value of each record."""
    columns = {name: [str(record[key]) for record in records] for name, key in GROUPINGS.items()}
    if columns["source"] == columns["task"]:
        del columns["source"]
    extra = [record.get("groups", {}) for record in records]
    return columns | {name: [values.get(name, "") for values in extra] for row in extra for name in row}


# ----------------------------------------------------------------------------------------------------------------------
# Properties of a record


def is_right(sample: dict, summary: Mapping) -> bool | None:
    """Return whether a sample is right, or None if its task has no right or wrong. In an evaluation a failed sample is
    wrong."""
    if "accuracy" not in sample["rewards"]:
        failed = sample["finish_reason"] == "error" and "accuracy" in summary
        return False if failed else None
    return sample["rewards"]["accuracy"] >= 0.5


def record_rewards(record: dict) -> list[float]:
    """Return the total rewards of the samples that have one."""
    return [s["rewards"]["reward"] for s in record["samples"] if "reward" in s["rewards"]]


def filter_tags(record: dict, summary: Mapping) -> set[str]:
    """Return the names of the gallery's filters that a record passes."""
    verdicts = [is_right(s, summary) for s in record["samples"]]
    ends = {s["finish_reason"] for s in record["samples"]}
    tags = {name for name, reason in (("cut", "length"), ("failed", "error")) if reason in ends}
    graded = {verdict for verdict in verdicts if verdict is not None}
    if len(graded) == 1:
        tags.add("right" if graded == {True} else "wrong")
    if len(graded) == 2 or (not graded and len(set(record_rewards(record))) > 1):
        tags.add("disagree")
    for baseline in summary.get("baselines", ())[:1]:
        tags |= {name for name in ("gained", "lost") if record["uid"] in baseline.get(f"{name}_uids", ())}
    return tags


def select_records(records: Sequence[dict], summary: Mapping) -> list[dict]:
    """Return the records that a report shows, in their order. If there are more than MAX_PROMPTS, prefer records that
    are gained or lost, then failed or truncated, then wrong or with samples that disagree."""
    if len(records) <= MAX_PROMPTS:
        return list(records)

    def rank(i: int) -> list[bool]:
        tags = filter_tags(records[i], summary)
        return [tags.isdisjoint(names) for names in ({"gained", "lost"}, {"failed", "cut"}, {"wrong", "disagree"})]

    selected = sorted(range(len(records)), key=rank)[:MAX_PROMPTS]
    return [records[i] for i in sorted(selected)]
