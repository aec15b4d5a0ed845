"""The gallery of a report: what the templates show of each prompt, its images, its samples and others' answers."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from markupsafe import Markup

from prepare_data import MARK
from report.page.formulas import parts, shown
from report.page.thumbnails import Source, Thumbnails
from report.records import PLACES, is_right, marks, rewards_of
from report.writer import Shown

PER_PAGE = 200  # prompts
PAGE_CHARS = 3_000_000  # of the texts of a page, all of which may have the same length
FORMULA_CHARS = 1_500_000  # of a page's formulas, as HTML


def groups_of(records: Sequence[dict]) -> dict[str, list[str]]:
    """Return what the records can be told apart by: name -> the value of each, where there are several values."""
    names = [*PLACES, *dict.fromkeys(chain.from_iterable(record.get("groups", ()) for record in records))]
    found = {}
    for name in names:
        values = []
        for record in records:
            value = record.get("groups", {}).get(name, record.get(PLACES.get(name, "")))
            values.append("" if value is None else str(value))
        if len(set(values)) > 1:
            found[name] = values
    if found.get("source") == found.get("task"):
        found.pop("source", None)
    return found


def messages_of(sample: dict) -> list[dict]:
    """Return the messages of an episode, or a response as one message without a role."""
    return sample.get("messages", [{"role": "", "content": sample.get("text", "")}])


class Texts:
    """How the texts of a page are shown: long ones by their beginning and end, formulas while there is room."""

    def __init__(self, n: int):
        self.limit = PAGE_CHARS // max(1, n)
        self.share = FORMULA_CHARS // max(1, n)
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
        for part in parts(text):
            piece = shown(part)
            if part.latex is not None:
                if len(piece) > self.room:
                    self.left_as_source += 1
                    piece = shown(part._replace(latex=None))
                else:
                    self.room -= len(piece)
            pieces.append(piece)
        return Markup("".join(pieces))


class Gallery:
    """The prompts of a report. `cards` makes what one page shows of them."""

    def __init__(self, shown: Shown, records: Sequence[dict]):
        self.records = records
        self.examples = shown.examples
        self.summary = shown.summary or {}
        uids = {record["uid"] for record in records}
        self.others = [(label, {r["uid"]: r for r in of if r["uid"] in uids}) for label, of in shown.others.items()]
        self.groups = groups_of(records)
        self.sources = {record["uid"]: self.images_of(record) for record in records}
        self.images = Thumbnails([*chain.from_iterable(self.sources.values())], shown.folder)
        systems = {self.system(record) for record in records}
        self.same_system = systems.pop() if len(systems) == 1 and len(records) > 1 else ""
        self.facts = [self.facts_of(n) for n in range(len(records))]

    def system(self, record: dict) -> str:
        """Return what stands before the user's first word."""
        first = self.examples[record["uid"]].messages[0]
        return first["content"] if first["role"] == "system" and MARK not in first["content"] else ""

    def images_of(self, record: dict) -> list[Source]:
        """Return the images of a prompt, and those that came in its episodes."""
        uid, images = record["uid"], self.examples[record["uid"]].images
        found = [Source((uid, i), i, lambda i=i: images[i]) for i in range(len(images))]
        for s, sample in enumerate(record["samples"]):
            episode = enumerate(sample.get("images", ()))
            found += [Source((uid, s, i), 1 + s + i, lambda data=data: data) for i, data in episode]
        return found

    def facts_of(self, n: int) -> dict[str, Any]:
        """Return what page.js filters and sorts a prompt by."""
        record, rewards = self.records[n], rewards_of(self.records[n])
        facts = {
            "is": " ".join(sorted(marks(record, self.summary))),
            "tokens": max((s["tokens"] for s in record["samples"]), default=0),
            "reward": f"{fmean(rewards):.6g}" if rewards else "",
            "spread": f"{max(rewards) - min(rewards):.6g}" if rewards else "",
        }
        facts |= {f"g{i}": values[n] for i, values in enumerate(self.groups.values())}
        return {name: value for name, value in facts.items() if value != ""}

    def cards(self, start: int) -> tuple[list[dict], list[str]]:
        """Return the cards of the page whose first prompt is at `start`, and sentences on what they leave out."""
        records = self.records[start : start + PER_PAGE]
        n_texts = sum(1 + sum(s.get("turns", 1) for s in record["samples"]) for record in records)
        self.texts = Texts(n_texts * (1 + len(self.others)))
        keys = (source.key for record in records for source in self.sources[record["uid"]])
        self.times = Counter(map(self.images.digest.get, keys))
        self.drawn: set[str] = set()  # images that stand on the page already
        cards, notes = [self.card(start + i) for i in range(len(records))], self.images.notes()
        if self.texts.clipped:
            where = "predictions.jsonl, or the .jsonl file of the step, has them whole"
            notes.append(f"Of {self.texts.clipped} long texts the beginning and the end are shown; {where}.")
        if self.texts.left_as_source:
            notes.append(f"{self.texts.left_as_source} formulas stay as they were written: the page has its weight.")
        return cards, notes

    def card(self, n: int) -> dict[str, Any]:
        record = self.records[n]
        named = [(name, values[n]) for name, values in self.groups.items() if values[n] and name != "images"]
        about = [value if name in PLACES else f"{name} {value}" for name, value in named]
        about += [name for name in ("gained", "lost") if name in self.facts[n].get("is", "").split()]
        example = self.examples[record["uid"]]
        images = [self.image(record, i) for i in range(len(example.images))]
        asked = [self.message(m["role"], m["content"], images) for m in example.messages[bool(self.same_system) :]]
        truth = self.texts.with_formulas(str(record["ground_truth"]))
        said = [self.sample(record["uid"], i, sample) for i, sample in enumerate(record["samples"])]
        others = [self.other(label, of[record["uid"]]) for label, of in self.others if record["uid"] in of]
        place = {"n": n, "place": record.get("index", n), "uid": record["uid"], "facts": self.facts[n]}
        return place | {"about": about, "asked": asked, "rest": images, "truth": truth, "said": said, "others": others}

    def message(self, role: str, content: str, images: list[dict]) -> dict[str, Any]:
        """Return a role with its blocks: texts, and rows of images, which are taken from `images` at each mark."""
        pieces = content.split(MARK)
        blocks = [self.texts.show(pieces[0])] if pieces[0].strip() or len(pieces) == 1 else []
        row: list[dict] = []  # images with no text between them
        for piece in pieces[1:]:
            if images:
                row.append(images.pop(0))
            else:  # a mark that somebody wrote
                piece = MARK + piece
            if piece.strip():
                blocks += [row, self.texts.show(piece.removeprefix("\n"))]
                row = []
        return {"role": role, "blocks": [block for block in [*blocks, row] if block]}

    def image(self, record: dict, i: int) -> dict[str, Any]:
        """Return the i-th image of a prompt, with what each sample earned for it, if its task's reward says."""
        earned = [s["rewards"][f"image_{i + 1}"] for s in record["samples"] if f"image_{i + 1}" in s["rewards"]]
        found = self.drawn_image((record["uid"], i), f"image {i + 1} of {record['uid']}")
        return found | {"number": i + 1, "earned": earned}

    def drawn_image(self, key: tuple, name: str) -> dict[str, Any]:
        """Return what the template draws for an image. One that is shown more than once stands on the page once."""
        digest = self.images.digest.get(key)
        first, times = digest not in self.drawn, self.times[digest]
        self.drawn.add(digest)
        found = {"name": name, "digest": digest, "first": first, "repeated": times > 1, "earned": []}
        return found | {"thumbnail": self.images.of.get(digest), "file": self.images.files.get(digest)}

    def sample(self, uid: str, i: int, sample: dict) -> dict[str, Any]:
        """Return a response, or an episode turn by turn; a mark that the policy writes is text."""
        numbers = range(len(sample.get("images", ())))
        images = [self.drawn_image((uid, i, k), f"image {k + 1} of the episode") for k in numbers]
        said = []
        for message in messages_of(sample):
            theirs = images if message["role"] not in ("", "assistant") else []
            said.append(self.message(message["role"], message["content"], theirs))
        return {"sample": sample, "right": is_right(sample, self.summary), "said": said, "rest": images}

    def other(self, label: str, record: dict) -> dict[str, Any]:
        """Return what was said elsewhere to the same prompt; of episodes without images."""
        samples = []
        for sample in record["samples"]:
            said = [{"role": "", "blocks": [self.texts.show(m["content"])]} for m in messages_of(sample)]
            samples.append({"sample": sample, "right": is_right(sample, self.summary), "said": said, "rest": []})
        known = [s["right"] for s in samples if s["right"] is not None]
        return {"label": label, "known": known, "samples": samples}
