"""The gallery of a page: a card for each prompt, with its images, samples and what other models said."""

import html
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

from prepare_data import MARK, Example
from report.formulas import parts, shown
from report.thumbnails import Source, Thumbnails, fair_limit, tag_bytes

MOST_PROMPTS = 1000  # on a page
IMAGE_CHARS = 8_000_000  # of a page: all its images
TEXT_CHARS = 6_000_000  # all texts, as HTML
FORMULA_CHARS = 2_500_000  # all formulas
EMPTY = "<span class=none>(empty)</span>"
PLACES = {"answer_type": "answer_type", "task": "task", "source": "source", "images": "n_images"}  # of a by_* table


def readable(text: object) -> str:
    """Without what no file can hold: half of a surrogate pair, which JSON may bring."""
    return str(text).encode(errors="replace").decode()


def safe(text: object) -> str:
    """For all that comes from data, from the policy or from a user's reward."""
    return html.escape(readable(text))


def number(value: float | str) -> str:
    """Four digits, more of a large one."""
    if not isinstance(value, float):
        return safe(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value + 0.0:.4g}"  # + 0: no -0


# ----------------------------------------------------------------------------------------------------------------------
# What a record is


def is_right(sample: dict, summary: Mapping) -> bool | None:
    """Return whether a sample is right; None if its task has no right or wrong. In an evaluation a failure is wrong."""
    if "accuracy" not in sample["rewards"]:
        failed = sample["finish_reason"] == "error" and "accuracy" in summary
        return False if failed else None
    return sample["rewards"]["accuracy"] >= 0.5


def rewards_of(record: dict) -> list[float]:
    earned = [s["rewards"].get("reward", s["rewards"].get("accuracy")) for s in record["samples"]]
    return [float(x) for x in earned if x is not None]


def marks(record: dict, summary: Mapping) -> set[str]:
    """The filters that a record passes."""
    verdicts = [is_right(s, summary) for s in record["samples"]]
    ends = {s["finish_reason"] for s in record["samples"]}
    found = {name for name, why in (("cut", "length"), ("failed", "error")) if why in ends}
    known = {verdict for verdict in verdicts if verdict is not None}
    if len(known) == 1:
        found.add("right" if known == {True} else "wrong")
    if len(known) == 2 or (not known and len(set(rewards_of(record))) > 1):
        found.add("disagree")
    for first in summary.get("baselines", ())[:1]:
        found |= {name for name in ("gained", "lost") if record["uid"] in first.get(f"{name}_uids", ())}
    return found


def choose(records: Sequence[dict], summary: Mapping | None = None) -> list[dict]:
    """Return the records that a page shows, in order; if there are too many, those that tell most."""
    if len(records) <= MOST_PROMPTS:
        return list(records)

    def rank(i: int) -> int:
        found = marks(records[i], summary or {})
        order = ({"gained", "lost"}, {"failed", "cut"}, {"wrong", "disagree"}, found)
        return next((k for k, wanted in enumerate(order) if found & wanted), len(order))

    kept = sorted(range(len(records)), key=rank)[:MOST_PROMPTS]
    return [records[i] for i in sorted(kept)]


def groups_of(records: Sequence[dict]) -> dict[str, list[str]]:
    """What the records can be told apart by: name -> the value of each, where there are several."""
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


# ----------------------------------------------------------------------------------------------------------------------
# Texts


class Texts:
    """How texts are shown: those longer than `limit` with their beginning and end, formulas while there is room."""

    def __init__(self, texts: Sequence[str]):
        self.limit = fair_limit([len(safe(text).encode()) for text in texts], TEXT_CHARS)
        self.share = FORMULA_CHARS // max(1, len(texts))
        self.room = 0  # for formulas, characters: each text's share, and what those before it left
        self.clipped = 0
        self.left_as_source = 0

    def show(self, text: str) -> str:
        self.room += self.share
        weight = len(safe(text).encode())
        if weight <= self.limit:
            return self.with_formulas(text) or EMPTY
        half = max(20, len(text) * self.limit // weight // 2)
        self.clipped += 1
        told = f"<span class=left-out>{len(text) - 2 * half:,} characters are left out</span>"
        return f"{self.with_formulas(text[:half])} {told} {self.with_formulas(text[-half:])}"

    def with_formulas(self, text: str) -> str:
        pieces = []
        for part in parts(readable(text)):
            piece = shown(part)
            if part.latex is not None and len(piece) > self.room:
                self.left_as_source += 1
                piece = safe(part.source)
            elif part.latex is not None:
                self.room -= len(piece)
            pieces.append(piece)
        return "".join(pieces)


def texts_of(record: dict) -> Iterator[str]:
    for sample in record["samples"]:
        yield from (m["content"] for m in sample["messages"]) if "messages" in sample else [sample["text"]]


# ----------------------------------------------------------------------------------------------------------------------
# Cards


def row(images: Sequence[str]) -> str:
    """Those with no text between them, next to each other."""
    return f"<span class=images>{''.join(images)}</span>" if images else ""


class Gallery:
    """The cards of `records`. `others`: label -> records of the same prompts, shown folded."""

    def __init__(
        self,
        records: Sequence[dict],
        examples: Mapping[str, Example],
        summary: Mapping,
        others: Mapping[str, Sequence[dict]],
        folder: Path | None,
    ):
        self.records = records
        self.examples = examples
        self.summary = summary
        uids = {record["uid"] for record in records}
        self.others = {label: {r["uid"]: r for r in of if r["uid"] in uids} for label, of in others.items()}
        self.groups = groups_of(records)
        self.images = Thumbnails(self.sources(), IMAGE_CHARS, folder)
        systems = {self.system(record) for record in records}
        self.same_system = systems.pop() if len(systems) == 1 and len(records) > 1 else ""
        self.texts = Texts(list(self.all_texts()))

    def system(self, record: dict) -> str:
        """What stands before the user's first word."""
        first = self.examples[record["uid"]].messages[0]
        return first["content"] if first["role"] == "system" and MARK not in first["content"] else ""

    def sources(self) -> list[Source]:
        """The images of all prompts, and those that came in their episodes."""
        found = []
        for record in self.records:
            images = self.examples[record["uid"]].images
            for i in range(len(images)):
                found.append(Source((record["uid"], i), i, lambda images=images, i=i: images[i]))
            for s, sample in enumerate(record["samples"]):
                for i, tag in enumerate(sample.get("images", ())):
                    key = (record["uid"], s, i)
                    found.append(Source(key, 1 + s + i, lambda tag=tag: tag_bytes(tag)))
        return found

    def all_texts(self) -> Iterator[str]:
        for record in self.records:
            messages = self.examples[record["uid"]].messages[bool(self.same_system) :]
            yield from (message["content"] for message in messages)
            yield from texts_of(record)
            for of in self.others.values():
                yield from texts_of(of[record["uid"]]) if record["uid"] in of else ()

    def card(self, n: int) -> str:
        """Of the n-th record."""
        record = self.records[n]
        found = marks(record, self.summary)
        rewards = rewards_of(record)
        data = {
            "is": " ".join(sorted(found)),
            "tokens": max((s["tokens"] for s in record["samples"]), default=0),
            "reward": f"{fmean(rewards):.6g}" if rewards else "",
            "spread": f"{max(rewards) - min(rewards):.6g}" if rewards else "",
        }
        data |= {f"g{i}": values[n] for i, values in enumerate(self.groups.values())}
        attributes = " ".join(f'data-{name}="{safe(value)}"' for name, value in data.items() if value != "")
        about = [f"<b>{safe(record['uid'])}</b>"]
        for name, values in self.groups.items():
            if values[n] and name != "images":
                about.append(safe(values[n] if name in PLACES else f"{name} {values[n]}"))
        about += [name for name in ("gained", "lost") if name in found]
        place = record.get("index", n)
        said = "".join(self.sample(record, i) for i in range(len(record["samples"])))
        folded = "".join(self.other(label, of[record["uid"]]) for label, of in self.others.items()
                         if record["uid"] in of)  # fmt: skip
        return (
            f"<article class=card id=p{n} tabindex=-1 aria-labelledby=t{n} {attributes}>"
            f"<h3 id=t{n}><a href=#p{n}>#{safe(place)}</a> {' &middot; '.join(about)}</h3>"
            f"<div class=asked>{self.prompt(record)}"
            f"<p class=truth>truth <b>{self.texts.with_formulas(str(record['ground_truth']))}</b></p></div>"
            f"<div class=said>{said}{folded}</div></article>"
        )

    def prompt(self, record: dict) -> str:
        """The messages, images where their marks stand."""
        example = self.examples[record["uid"]]
        images = [self.image(record, i) for i in range(len(example.images))]
        messages = example.messages[bool(self.same_system) :]
        return "".join(self.message(m["role"], m["content"], images) for m in messages) + row(images)

    def message(self, role: str, content: str, images: list[str]) -> str:
        """Takes the images of its marks from `images`."""
        pieces = content.split(MARK)
        shown = [self.texts.show(pieces[0]) if pieces[0].strip() or len(pieces) == 1 else ""]
        together = []
        for piece in pieces[1:]:
            if not images:  # a mark that somebody wrote
                piece = MARK + piece
            else:
                together.append(images.pop(0))
            if piece.strip():
                shown += [row(together), self.texts.show(piece.removeprefix("\n"))]
                together = []
        shown.append(row(together))
        return f"<div class=message><span class=role>{safe(role)}</span><div class=text>{''.join(shown)}</div></div>"

    def image(self, record: dict, i: int) -> str:
        """The i-th of a prompt, with what each sample earned for it, if its task's reward says."""
        name = f"image_{i + 1}"
        shown = self.images.tag((record["uid"], i), f"image {i + 1} of {readable(record['uid'])}")
        earned = [s["rewards"][name] for s in record["samples"] if name in s["rewards"]]
        told = f"<span class=note>image {i + 1}: credit {', '.join(map(number, earned))}</span>" if earned else ""
        return f"<span class=image>{shown}{told}</span>"

    def sample(self, record: dict, i: int) -> str:
        """A response, with what became of it above."""
        sample = record["samples"][i]
        if "messages" not in sample:
            return self.told(sample, f"<div class=text>{self.texts.show(sample['text'])}</div>")
        images = []
        for k in range(len(sample.get("images", ()))):
            name = f"image {k + 1} of the episode"
            images.append(f"<span class=image>{self.images.tag((record['uid'], i, k), name)}</span>")
        blocks = []
        for message in sample["messages"]:
            theirs = [] if message["role"] == "assistant" else images  # a mark that the policy writes is text
            blocks.append(self.message(message["role"], message["content"], theirs))
        return self.told(sample, "".join(blocks) + row(images))

    def told(self, sample: dict, text: str) -> str:
        """The text of a sample under its reward, the reward's parts, and how it ended."""
        right = is_right(sample, self.summary)
        verdict, word = {True: ("right", "✓ right"), False: ("wrong", "✗ wrong"), None: ("neutral", "")}[right]
        notes = [f"<b class=verdict>{word}</b>"] if word else []
        notes += [f"{safe(name)} <b>{number(float(x))}</b>" for name, x in sample["rewards"].items()]
        if "advantage" in sample:
            notes.append(f"advantage <b>{sample['advantage']:+.3f}</b>")
        notes.append(f"<b>{sample['tokens']}</b> tokens")
        if "turns" in sample:
            notes.append(f"<b>{sample['turns']}</b> turns, ended by {safe(sample['ended_by'])}")
        if sample["finish_reason"] == "length":
            notes.append("<em>cut at the length limit</em>")
        if sample["finish_reason"] == "error":
            what = "environment" if sample.get("ended_by") == "error" else "reward"
            notes.append(f"<em>its {what} failed</em>")
        about = "".join(f"<li>{note}" for note in notes)
        return f"<section class='sample {verdict}'><ul class=facts>{about}</ul>{text}</section>"

    def other(self, label: str, record: dict) -> str:
        """What was said elsewhere to the same prompt; of episodes without images."""
        verdicts = [is_right(s, self.summary) for s in record["samples"]]
        known = [verdict for verdict in verdicts if verdict is not None]
        told = f" &middot; {sum(known)} of {len(known)} right" if known else ""
        if len(known) == 1:
            told = " &middot; ✓ right" if known[0] else " &middot; ✗ wrong"
        samples = []
        for sample in record["samples"]:
            said = sample.get("messages", [{"role": "", "content": sample["text"]}])
            texts = (f"<div class=text>{self.texts.show(message['content'])}</div>" for message in said)
            samples.append(self.told(sample, "".join(texts)))
        return f"<details><summary>{safe(label)}{told}</summary>{''.join(samples)}</details>"

    def notes(self) -> list[str]:
        """What is shown shortened."""
        told = self.images.notes()
        if self.texts.clipped:
            where = "predictions.jsonl, or the .jsonl file of the step, has them whole"
            told.append(f"Of {self.texts.clipped} long texts the beginning and the end are shown; {where}.")
        if self.texts.left_as_source:
            told.append(f"{self.texts.left_as_source} formulas stay as they were written: the page has its weight.")
        return told
