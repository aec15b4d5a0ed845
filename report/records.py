"""Records: what is kept of examples and their responses, in files and for pages.

A record is an example with its responses: index, uid, answer_type, task, source, n_images, ground_truth, `groups` (its
values of --group-by), and `samples`: text, finish_reason, tokens, rewards, and of episodes turns, ended_by, messages
and images (encoded files, which only pages and trackers show). The process that writes pages imports this file, so it
imports nothing that is slow to import.
"""

import io
from collections.abc import Mapping, Sequence

from PIL import Image

MAX_IMAGE_SIDE = 480  # pixels of the longer side of an image that is shown, at most
MAX_PROMPTS = 1000  # in one report
GROUPINGS = {"answer_type": "answer_type", "task": "task", "source": "source", "images": "n_images"}  # of a by_* table


def encode_image(image: Image.Image) -> bytes:
    """Return an image as a WEBP file of at most SIDE pixels; without loss if it is tiny or has few colours."""
    image = image.convert("RGB")
    image.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
    lossless = max(image.size) <= 128 or image.getcolors(256) is not None
    image.save(file := io.BytesIO(), format="WEBP", quality=60, lossless=lossless, method=3)
    return file.getvalue()


def drop_images(record: dict) -> dict:
    """Return a record as JSON can have it: without the images of its episodes."""
    samples = [{name: value for name, value in s.items() if name != "images"} for s in record["samples"]]
    return record | {"samples": samples}


def filter_columns(records: Sequence[dict]) -> dict[str, list[str]]:
    """Return what records may be told apart by: column -> the value of each."""
    columns = {name: [str(record[place]) for record in records] for name, place in GROUPINGS.items()}
    if columns["source"] == columns["task"]:
        del columns["source"]
    groups = [record.get("groups", {}) for record in records]
    return columns | {name: [of.get(name, "") for of in groups] for of in groups for name in of}


# ----------------------------------------------------------------------------------------------------------------------
# What a record tells


def is_right(sample: dict, summary: Mapping) -> bool | None:
    """Return whether a sample is right; None if its task has no right or wrong. In an evaluation a failure is wrong."""
    if "accuracy" not in sample["rewards"]:
        failed = sample["finish_reason"] == "error" and "accuracy" in summary
        return False if failed else None
    return sample["rewards"]["accuracy"] >= 0.5


def record_rewards(record: dict) -> list[float]:
    return [s["rewards"]["reward"] for s in record["samples"] if "reward" in s["rewards"]]


def filter_tags(record: dict, summary: Mapping) -> set[str]:
    """The filters that a record passes."""
    verdicts = [is_right(s, summary) for s in record["samples"]]
    ends = {s["finish_reason"] for s in record["samples"]}
    found = {name for name, why in (("cut", "length"), ("failed", "error")) if why in ends}
    known = {verdict for verdict in verdicts if verdict is not None}
    if len(known) == 1:
        found.add("right" if known == {True} else "wrong")
    if len(known) == 2 or (not known and len(set(record_rewards(record))) > 1):
        found.add("disagree")
    for first in summary.get("baselines", ())[:1]:
        found |= {name for name in ("gained", "lost") if record["uid"] in first.get(f"{name}_uids", ())}
    return found


def select_records(records: Sequence[dict], summary: Mapping) -> list[dict]:
    """Return the records that a page shows, in order; if there are too many, those that tell most."""
    if len(records) <= MAX_PROMPTS:
        return list(records)

    def rank(i: int) -> list[bool]:
        found = filter_tags(records[i], summary)
        return [found.isdisjoint(of) for of in ({"gained", "lost"}, {"failed", "cut"}, {"wrong", "disagree"})]

    kept = sorted(range(len(records)), key=rank)[:MAX_PROMPTS]
    return [records[i] for i in sorted(kept)]
