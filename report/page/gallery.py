"""The gallery of a report: the values that the templates show for each prompt, with its images, its samples and the
answers of other models."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from statistics import fmean
from typing import Any

from report.page.thumbnails import Thumbnail, image_names, make_thumbnail, shown_images
from report.records import MAX_IMAGE_SIDE, filter_columns, filter_tags, is_right, record_rewards
from report.writer import ReportPage
from sources.content import MARK_PATTERN

PER_PAGE = 200  # prompts per page
IMAGE_LEFT_OUT = "image left out to limit the size of the page"
PAGE_IMAGES = 1000  # per page, divided equally among its prompts
PAGE_CHARS = 3_000_000  # of text per page, divided equally among its texts
FULL_SIZE_BYTES = 1_000_000_000  # of full-size images per report, divided equally among its images


class Texts:
    """Shortens the long texts of a page."""

    def __init__(self, n: int):
        self.limit = PAGE_CHARS // n
        self.n_shortened = 0

    def show(self, text: str) -> list[str | int]:
        """Return the pieces of a text; a number is the number of characters left out at its position."""
        if len(text) <= self.limit:
            return [text]
        self.n_shortened += 1
        half = max(20, self.limit // 2)
        return [text[:half], len(text) - 2 * half, text[-half:]]


def take_images(thumbnails: Iterator[Thumbnail | str], names: Sequence[str]) -> list[tuple[str, Thumbnail | str]]:
    """Return the next images with these names; images that are left out have names too."""
    return [(name, next(thumbnails, IMAGE_LEFT_OUT)) for name in names]


class Gallery:
    """The prompts of a report. `cards` returns the values that one page shows."""

    def __init__(self, content: ReportPage, records: Sequence[dict]):
        self.records = records
        self.examples = content.examples
        self.summary = content.summary
        self.folder = content.folder
        self.max_bytes = FULL_SIZE_BYTES // max(1, self.count_images(records))
        self.others = [(label, {r["uid"]: r for r in others}) for label, others in content.others.items()]
        self.groups = {name: values for name, values in filter_columns(records).items() if len(set(values)) > 1}
        self.facts = [self.prompt_facts(n) for n in range(len(records))]

    def record_images(self, record: dict) -> list[Sequence[bytes]]:
        """Return the images of a prompt, and those added by the environment in each of its episodes."""
        return [shown_images(self.examples[record["uid"]]), *(s.get("images", ()) for s in record["samples"])]

    def count_images(self, records: Sequence[dict]) -> int:
        """Return the number of images and videos of all records."""
        examples = (self.examples[record["uid"]] for record in records)
        n_added = sum(len(s.get("images", ())) for record in records for s in record["samples"])
        return n_added + sum(len(example.images) + len(example.videos) for example in examples)

    def prompt_facts(self, n: int) -> dict[str, Any]:
        """Return the values by which page.js filters and sorts a prompt."""
        record, rewards = self.records[n], record_rewards(self.records[n])
        facts = {
            "is": " ".join(sorted(filter_tags(record, self.summary))),
            "tokens": max((s["tokens"] for s in record["samples"]), default=0),
        }
        if rewards:
            facts |= {"reward": fmean(rewards), "spread": max(rewards) - min(rewards)}
        facts |= {f"g{i}": values[n] for i, values in enumerate(self.groups.values())}
        return {name: value for name, value in facts.items() if value != ""}

    def cards(self, start: int) -> tuple[list[dict], list[str]]:
        """Return the cards of the page whose first prompt is at `start`, and notes on what the page leaves out."""
        records = self.records[start : start + PER_PAGE]
        n_texts = sum(1 + sum(s.get("turns", 1) for s in record["samples"]) for record in records)
        self.texts = Texts(n_texts * (1 + len(self.others)))
        max_images = PAGE_IMAGES // len(records)

        def draw(record: dict) -> list[Thumbnail | str]:
            files = islice(chain.from_iterable(self.record_images(record)), max_images)
            return [make_thumbnail(file, self.folder, self.max_bytes) for file in files]

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            drawn = list(pool.map(draw, records))
        cards = [self.card(start + i, iter(images)) for i, images in enumerate(drawn)]
        thumbnails = [image for image in chain.from_iterable(drawn) if isinstance(image, Thumbnail)]
        left_out = {
            f"images are left out: a page shows at most {PAGE_IMAGES}.":
                self.count_images(records) - sum(map(len, drawn)),
            f"images of more than {self.max_bytes:,} bytes are shown only as thumbnails.":
                sum(max(image.full_size) > MAX_IMAGE_SIDE and not image.file for image in thumbnails)
                if self.folder else 0,
            "long texts are shortened; predictions.jsonl, or the .jsonl file of the step, has the full texts.":
                self.texts.n_shortened,
        }  # fmt: skip
        return cards, [f"{n:,} {note}" for note, n in left_out.items() if n]

    def card(self, n: int, thumbnails: Iterator[Thumbnail | str]) -> dict[str, Any]:
        """Return the values that the template shows for the n-th prompt; `thumbnails` are those of all its images."""
        record = self.records[n]
        example, uid = self.examples[record["uid"]], record["uid"]
        labels = [f"{name} {values[n]}" for name, values in self.groups.items() if values[n]]
        labels += [name for name in ("gained", "lost") if name in self.facts[n].get("is", "").split()]
        images = take_images(thumbnails, image_names(example))
        messages = [self.message(m["role"], m["content"], images) for m in example.messages]
        truth = str(record["ground_truth"])
        samples = [self.sample(sample, thumbnails) for sample in record["samples"]]
        others = [self._comparison(label, by_uid[uid]["samples"]) for label, by_uid in self.others if uid in by_uid]
        head = {"n": n, "index": record.get("index", n), "uid": uid, "facts": self.facts[n]}
        return head | {
            "labels": labels, "messages": messages, "unplaced_images": images, "truth": truth, "samples": samples,
            "comparisons": others}  # fmt: skip

    def message(self, role: str, content: str, images: list[tuple]) -> dict[str, Any]:
        """Return a role with its blocks: texts, and rows of images. Each placeholder removes an image from `images`."""
        pieces = MARK_PATTERN.split(content)  # texts, with placeholders between them
        blocks = [self.texts.show(pieces[0])] if pieces[0].strip() or len(pieces) == 1 else []
        row: list[tuple] = []  # images without text between them
        for mark, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            if images:
                row.append(images.pop(0))
            else:  # a placeholder without an image is text
                piece = mark + piece
            if piece.strip():
                blocks += [row, self.texts.show(piece.removeprefix("\n"))]
                row = []
        return {"role": role, "blocks": [block for block in [*blocks, row] if block]}

    def sample(self, fields: dict, thumbnails: Iterator[Thumbnail | str]) -> dict[str, Any]:
        """Return a response as one message without a role, or an episode turn by turn. An image placeholder that the
        policy wrote is text."""
        videos = fields.get("videos", {})
        names = [videos.get(i, f"image {i + 1}") for i in range(len(fields.get("images", ())))]
        images = take_images(thumbnails, names)
        messages = []
        for message in fields.get("messages", [{"role": "", "content": fields["text"]}]):
            message_images = images if message["role"] not in ("", "assistant") else []
            messages.append(self.message(message["role"], message["content"], message_images))
        return {
            "fields": fields, "right": is_right(fields, self.summary), "messages": messages,
            "unplaced_images": images}  # fmt: skip

    def _comparison(self, label: str, samples: Sequence[dict]) -> dict[str, Any]:
        """Return the samples of another model, or of an ablation, for the same prompt; images of episodes are left
        out."""
        samples = [self.sample(sample | {"images": ()}, iter(())) for sample in samples]
        verdicts = [s["right"] for s in samples if s["right"] is not None]
        return {"label": label, "verdicts": verdicts, "samples": samples}
