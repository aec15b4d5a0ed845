"""The gallery of a report: what the templates show of each prompt, its images, its samples and others' answers."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from statistics import fmean
from typing import Any

from markupsafe import Markup

from prepare_data import IMAGE_PLACEHOLDER
from report.page.formulas import render_segment, split_formulas
from report.page.thumbnails import Thumbnail, make_thumbnail
from report.records import MAX_IMAGE_SIDE, filter_columns, filter_tags, is_right, record_rewards
from report.writer import ReportPage

PER_PAGE = 200  # prompts
LEFT_OUT = "an image that is left out: the page has its weight"
PAGE_IMAGES = 1000  # which the prompts of a page share out
PAGE_CHARS = 3_000_000  # of the texts of a page, all of which may have the same length
FORMULA_CHARS = 1_500_000  # of a page's formulas, as HTML
FULL_SIZE_BYTES = 1_000_000_000  # of a report's images in full size, all of which may have the same size


class Texts:
    """How the texts of a page are shown: long ones by their beginning and end, formulas while there is room."""

    def __init__(self, n: int):
        self.limit = PAGE_CHARS // n
        self.share = FORMULA_CHARS // n
        self.room = 0  # for formulas, in characters: each text's share, and what those before it left
        self.clipped = 0
        self.left_as_source = 0

    def show(self, text: str) -> list[Markup | int]:
        """Return the pieces of a text; a number stands for so many characters that are left out."""
        self.room += self.share
        if len(text) <= self.limit:
            return [self.with_formulas(text)]
        self.clipped += 1
        half = max(20, self.limit // 2)
        return [self.with_formulas(text[:half]), len(text) - 2 * half, self.with_formulas(text[-half:])]

    def with_formulas(self, text: str) -> Markup:
        pieces = []
        for part in split_formulas(text):
            piece = render_segment(part)
            if part.latex is not None:
                if len(piece) > self.room:
                    self.left_as_source += 1
                    piece = render_segment(part._replace(latex=None))
                else:
                    self.room -= len(piece)
            pieces.append(piece)
        return Markup("".join(pieces))


def numbered(drawn: Iterator[Thumbnail | str], n: int) -> list[tuple[int, Thumbnail | str]]:
    """Return the next n images with their numbers, also of those that are left out."""
    return [(number, next(drawn, LEFT_OUT)) for number in range(1, n + 1)]


class Gallery:
    """The prompts of a report. `cards` makes what one page shows of them."""

    def __init__(self, shown: ReportPage, records: Sequence[dict]):
        self.records = records
        self.examples = shown.examples
        self.summary = shown.summary
        self.folder = shown.folder
        self.most_bytes = FULL_SIZE_BYTES // max(1, self.count_images(records))
        self.others = [(label, {r["uid"]: r for r in of}) for label, of in shown.others.items()]
        self.groups = {name: values for name, values in filter_columns(records).items() if len(set(values)) > 1}
        self.facts = [self.facts_of(n) for n in range(len(records))]

    def images_of(self, record: dict) -> list[Sequence[bytes]]:
        """Return the images of a prompt, and those that came in each of its episodes."""
        return [self.examples[record["uid"]].images, *(s.get("images", ()) for s in record["samples"])]

    def count_images(self, records: Sequence[dict]) -> int:
        return sum(len(images) for record in records for images in self.images_of(record))

    def facts_of(self, n: int) -> dict[str, Any]:
        """Return what page.js filters and sorts a prompt by."""
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
        """Return the cards of the page whose first prompt is at `start`, and sentences on what they leave out."""
        records = self.records[start : start + PER_PAGE]
        n_texts = sum(1 + sum(s.get("turns", 1) for s in record["samples"]) for record in records)
        self.texts = Texts(n_texts * (1 + len(self.others)))
        room = PAGE_IMAGES // len(records)

        def draw(record: dict) -> list[Thumbnail | str]:
            files = islice(chain.from_iterable(self.images_of(record)), room)
            return [make_thumbnail(file, self.folder, self.most_bytes) for file in files]

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            drawn = list(pool.map(draw, records))
        cards = [self.card(start + i, iter(images)) for i, images in enumerate(drawn)]
        made = [image for image in chain.from_iterable(drawn) if isinstance(image, Thumbnail)]
        left_out = {
            f"images are left out: a page shows {PAGE_IMAGES}.": self.count_images(records) - sum(map(len, drawn)),
            f"images of more than {self.most_bytes:,} bytes have only their thumbnails here.":
                sum(max(image.full_size) > MAX_IMAGE_SIDE and not image.file for image in made) if self.folder else 0,
            "long texts are shown by their beginning and end; predictions.jsonl, or the .jsonl file of the step, has "
            "them whole.": self.texts.clipped,
            "formulas stay as they were written: the page has its weight.": self.texts.left_as_source,
        }  # fmt: skip
        return cards, [f"{n:,} {what}" for what, n in left_out.items() if n]

    def card(self, n: int, drawn: Iterator[Thumbnail | str]) -> dict[str, Any]:
        record = self.records[n]
        example, uid = self.examples[record["uid"]], record["uid"]
        about = [f"{name} {values[n]}" for name, values in self.groups.items() if values[n]]
        about += [name for name in ("gained", "lost") if name in self.facts[n].get("is", "").split()]
        images = numbered(drawn, len(example.images))
        asked = [self.message(m["role"], m["content"], images) for m in example.messages]
        truth = self.texts.with_formulas(str(record["ground_truth"]))
        said = [self.sample(sample, drawn) for sample in record["samples"]]
        others = [self._comparison(label, of[uid]["samples"]) for label, of in self.others if uid in of]
        place = {"n": n, "place": record.get("index", n), "uid": uid, "facts": self.facts[n]}
        return place | {"about": about, "asked": asked, "rest": images, "truth": truth, "said": said, "others": others}

    def message(self, role: str, content: str, images: list[tuple]) -> dict[str, Any]:
        """Return a role with its blocks: texts, and rows of images, which are taken from `images` at each mark."""
        pieces = content.split(IMAGE_PLACEHOLDER)
        blocks = [self.texts.show(pieces[0])] if pieces[0].strip() or len(pieces) == 1 else []
        row: list[tuple] = []  # images with no text between them
        for piece in pieces[1:]:
            if images:
                row.append(images.pop(0))
            else:  # a mark that somebody wrote
                piece = IMAGE_PLACEHOLDER + piece
            if piece.strip():
                blocks += [row, self.texts.show(piece.removeprefix("\n"))]
                row = []
        return {"role": role, "blocks": [block for block in [*blocks, row] if block]}

    def sample(self, sample: dict, drawn: Iterator[Thumbnail | str]) -> dict[str, Any]:
        """Return a response as one message without a role, or an episode turn by turn. A mark that the policy writes is
        text."""
        images = numbered(drawn, len(sample.get("images", ())))
        said = []
        for message in sample.get("messages", [{"role": "", "content": sample["text"]}]):
            theirs = images if message["role"] not in ("", "assistant") else []
            said.append(self.message(message["role"], message["content"], theirs))
        return {"sample": sample, "right": is_right(sample, self.summary), "said": said, "rest": images}

    def _comparison(self, label: str, samples: Sequence[dict]) -> dict[str, Any]:
        """Return what was said elsewhere to the same prompt; of episodes without images."""
        samples = [self.sample(sample | {"images": ()}, iter(())) for sample in samples]
        known = [s["right"] for s in samples if s["right"] is not None]
        return {"label": label, "known": known, "samples": samples}
