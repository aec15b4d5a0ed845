"""Captions: a text about an image, compared with what people wrote about it.

CIDEr, BLEU-4 and ROUGE-L as the COCO caption evaluation computes them (tylin/coco-caption, kept as pycocoevalcap, whose
tokenizer needs Java; here words are split by a regular expression), the share of keywords that are named, and penalties
for length and repetition, each a part of its own.
"""

import json
import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

from errors import UserError, as_user_error, need
from prepare_data import IMAGE_PLACEHOLDER, RawRow, ToyConfig
from reward import SPECIAL_TOKEN_PATTERN, register, unwrap_truth
from tasks._tables import DEFAULT_IMAGE_COLUMNS, any_rows, first, row_of
from tasks.shapes import COLOURS, SHAPES, SIDE, Scene, draw_shapes, encode_png, in_one_split, toy_of

INSTRUCTION = "Describe the image in one sentence."
MAX_CAPTION_CHARS = 4000  # a longer one is none
MAX_N = 4  # of n-grams
SIGMA = 6.0  # of CIDEr's penalty on a length that differs
BETA = 1.2  # of ROUGE-L: how much more recall counts than precision
LENGTH_SLACK = (
    1.5  # lengths up to this times the longest reference's, and down to the shortest's divided by it, are free
)
METRIC_WEIGHTS = {"cider": 0.04, "bleu4": 0.1, "rouge_l": 0.3, "keywords": 0.2, "length": -0.5, "repetition": -0.5}
STOP_WORDS = set(
    """
a an the this that these those some of in on at to by for from with without into onto over under near between and or but
as is are was were be been being has have had do does it its he she they his her their there here who which what while
very up down out off image picture photo photograph drawing
""".split()
)

Words = tuple[str, ...]


def split_words(text: str) -> Words:
    """Lower case, without punctuation; words with hyphens stay whole."""
    return tuple(re.findall(r"[^\W_]+(?:-[^\W_]+)*", unicodedata.normalize("NFKC", text).casefold()))


def ngrams(words: Words, n: int) -> Counter[Words]:
    return Counter(zip(*(words[i:] for i in range(n)), strict=False))


# --- measures ---------------------------------------------------------------------------------------------------------


def bleu4(words: Words, references: list[Words]) -> float:
    """BLEU-4 of one sentence (Papineni et al. 2002), with the reference whose length is closest.

    The two small numbers are COCO's: without any 4-gram in common it is nearly 0, and never an error.
    """
    product = 1.0
    for n in range(1, MAX_N + 1):
        most = Counter()
        for reference in references:
            most |= ngrams(reference, n)
        right = (ngrams(words, n) & most).total()
        product *= (right + 1e-15) / (max(0, len(words) - n + 1) + 1e-9)
    closest = min((abs(len(reference) - len(words)), len(reference)) for reference in references)[1]
    ratio = (len(words) + 1e-15) / (closest + 1e-9)
    return product**0.25 * math.exp(min(0.0, 1 - 1 / ratio))


def common_subsequence(a: Words, b: Words) -> int:
    """Length of the longest: a row of the usual table in the bits of one integer (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for i, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << i
    whole = (1 << len(a)) - 1
    row = whole
    for word in b:
        hits = row & places.get(word, 0)
        row = ((row + hits) | (row - hits)) & whole
    return len(a) - row.bit_count()


def rouge_l(words: Words, references: list[Words]) -> float:
    """ROUGE-L (Lin 2004) with the best precision and the best recall over the references, as COCO has it."""
    common = [common_subsequence(words, reference) for reference in references]
    precision = max(common) / max(1, len(words))
    recall = max(length / len(reference) for length, reference in zip(common, references, strict=True))
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision) if precision else 0.0


def all_ngrams(texts: list[Words]) -> set[Words]:
    """The n-grams that any of the texts has, of all lengths."""
    return set().union(*(ngrams(text, n) for text in texts for n in range(1, MAX_N + 1)))


class Corpus:
    """In how many documents, each the references of one row, an n-gram occurs: CIDEr weighs it by how rare it is."""

    def __init__(self, size: float = 0, frequency: Mapping[Words, int] | None = None):
        self.size = size
        self.frequency: Counter[Words] = Counter(frequency)

    def add(self, references: list[Words]) -> None:
        """Count a row."""
        self.size += 1
        self.frequency.update(all_ngrams(references))

    def document_frequencies(self, references: list[Words]) -> dict[str, int]:
        """In how many documents each n-gram of these is, if in more than one: less weighs the same."""
        grams = sorted(all_ngrams(references))
        return {" ".join(gram): self.frequency[gram] for gram in grams if self.frequency[gram] > 1}

    def vector(self, words: Words, n: int) -> dict[Words, float]:
        """TF-IDF of a text's n-grams."""
        whole = math.log(max(1, self.size))
        found = ngrams(words, n).items()
        return {gram: count * (whole - math.log(max(1, self.frequency[gram]))) for gram, count in found}

    def cider(self, words: Words, references: list[Words]) -> float:
        """CIDEr-D (Vedantam et al. 2015), from 0 to 10: what COCO's code calls CIDEr. 10 with one, equal reference."""
        total = 0.0
        for n in range(1, MAX_N + 1):
            given = self.vector(words, n)
            for reference in references:
                wanted = self.vector(reference, n)
                norms = math.hypot(*given.values()) * math.hypot(*wanted.values())
                same = sum(min(given[gram], wanted[gram]) * wanted[gram] for gram in given.keys() & wanted.keys())
                gap = len(words) - len(reference)
                total += same / norms * math.exp(-(gap**2) / (2 * SIGMA**2)) if norms else 0.0
        return 10 * total / MAX_N / len(references)


UNIFORM_CORPUS = Corpus(math.e)  # log(e) - log(1): every n-gram weighs 1


def coverage(words: Words, keywords: list[Words]) -> float:
    """Share of the keywords that a text has; one of several words has to stand together."""
    text = f" {' '.join(words)} "
    return sum(f" {' '.join(keyword)} " in text for keyword in keywords) / max(1, len(keywords))


def length_deviation(words: Words, references: list[Words]) -> float:
    """How much too long or too short, as a share, at most 1."""
    lengths = [len(reference) for reference in references]
    return min(
        1.0, max(0.0, len(words) / (LENGTH_SLACK * max(lengths)) - 1, 1 - LENGTH_SLACK * len(words) / min(lengths))
    )


def repeated_bigram_share(words: Words) -> float:
    """Share of the bigrams that were there before."""
    pairs = ngrams(words, 2)
    return 1 - len(pairs) / pairs.total() if pairs else 0.0


# --- reward -----------------------------------------------------------------------------------------------------------


class CaptionTruth(NamedTuple):
    references: list[Words]
    keywords: list[Words]
    corpus: Corpus  # what the row knows of it


@lru_cache(4096)  # a truth is met once for each of its samples
def parse_caption_truth(text: str) -> CaptionTruth:
    """A plain caption, a JSON list of captions, or {"references": [...], "keywords": [...], "documents": 100,
    "frequency": {"a": 90}}: how many rows there are, and how many of them have an n-gram of these references.

    Keywords that are not given are the words of half of the references, without stop words.
    """
    told = f"the truth {text[:200]!r} is no caption, nor JSON with a list of references"
    fields: Any = [text]
    if text.lstrip().startswith(("[", "{")):
        with as_user_error((ValueError, RecursionError), told):
            fields = json.loads(text)
    fields = fields if isinstance(fields, dict) else {"references": fields}
    lists = [fields.get(name) or [] for name in ("references", "keywords")]
    need(all(isinstance(t, list) and all(isinstance(line, str) for line in t) for t in lists), told)
    references, keywords = ([words for words in map(split_words, lines) if words] for lines in lists)
    need(references, f"{told} with a word in it")
    if not keywords:
        often = Counter(chain.from_iterable(set(reference) - STOP_WORDS for reference in references))
        keywords = [(word,) for word, count in sorted(often.items()) if 2 * count >= len(references)]
    size, frequency = fields.get("documents"), fields.get("frequency") or {}
    counts = [size, *frequency.values()] if isinstance(frequency, dict) else [None]
    counted = all(type(count) is int and 0 < count for count in counts)
    need(counted or "documents" not in fields, f"{told} with counts of documents; write it again with prepare_data.py")
    corpus = Corpus(size, {tuple(gram.split()): n for gram, n in frequency.items()}) if size else UNIFORM_CORPUS
    return CaptionTruth(references, keywords, corpus)


def caption_reward(response: str, truth: str) -> dict[str, float]:
    """Return the parts, and their weighted sum as "reward". Raise UserError only for a truth without a caption.

    CIDEr uses the document counts in the truth: an n-gram in none of its references weighs as one that no document
    has, and without counts every n-gram weighs the same. So a reward depends on its row alone, in any process.

    Only what stands behind `</think>` is the caption; with a special token in it, or over MAX_CAPTION_CHARS, it is
    none.
    """
    references, keywords, corpus = parse_caption_truth(truth)
    text = response.rpartition("</think>")[2]
    whole = len(text) <= MAX_CAPTION_CHARS and "<think>" not in text and not SPECIAL_TOKEN_PATTERN.search(text)
    words = split_words(text) if whole else ()
    parts = {
        "cider": corpus.cider(words, references),
        "bleu4": bleu4(words, references) if words else 0.0,
        "rouge_l": rouge_l(words, references),
        "keywords": coverage(words, keywords),
        "length": length_deviation(words, references),
        "repetition": max(0.0, repeated_bigram_share(words) - max(map(repeated_bigram_share, references))),
    }
    return parts | {"reward": sum(METRIC_WEIGHTS[part] * value for part, value in parts.items())}


@register("caption")
def caption(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    """By the row alone."""
    with as_user_error(UserError, f"row {example.uid!r}"):
        return caption_reward(response, example.ground_truth)


# --- data -------------------------------------------------------------------------------------------------------------

CAPTIONS = ("references", "captions", "caption", "text")


def rows(cfg: ToyConfig) -> Iterator[RawRow]:
    """CSV, JSONL or parquet with an image, and caption, text, captions or references: a text or a list (in CSV JSON).

    A column keywords, a list or a text with commas, is optional. Read twice: CIDEr's counts of documents come first,
    and each row gets those of its own n-grams.
    """
    corpus = Corpus()
    for raw in any_rows(cfg, DEFAULT_IMAGE_COLUMNS, lambda record, _: caption_record(record, cfg)):
        if isinstance(raw.record, dict):
            corpus.add(parse_caption_truth(raw.record["reward_model"]["ground_truth"]).references)
    yield from any_rows(cfg, DEFAULT_IMAGE_COLUMNS, lambda record, _: caption_record(record, cfg, corpus))


def as_list(value: Any, comma: bool = False) -> list:
    """A list, JSON of one, or a text as a list of one, or of its parts between commas."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with as_user_error((ValueError, RecursionError), f"{value[:80]!r} is no list in JSON"):
            return json.loads(value)
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")] if comma else [unwrap_truth(value)]
    return value or []


def caption_record(record: dict, cfg: ToyConfig, corpus: Corpus | None = None) -> dict:
    """Return a row in the on-disk format, its other columns kept, with what the corpus knows of its references."""
    names = (cfg.answer_key, *CAPTIONS)
    with as_user_error(UserError, f"looked for columns {', '.join(CAPTIONS)}"):
        references = as_list(first([record.get(name) for name in names]))
        keywords = [word for word in as_list(record.get("keywords"), comma=True) if str(word).strip()]
        truth = {"references": references, "keywords": keywords}
        words = parse_caption_truth(json.dumps(truth, default=str)).references
    if corpus:
        truth |= {"documents": corpus.size, "frequency": corpus.document_frequencies(words)}
    image = first([record.get(name) for name in (cfg.image_key, *DEFAULT_IMAGE_COLUMNS)])
    need(image is not None, f"no image: looked for columns {', '.join((cfg.image_key, *DEFAULT_IMAGE_COLUMNS))}")
    text = json.dumps(truth, ensure_ascii=False, default=str)
    return row_of("caption", record, (*names, *DEFAULT_IMAGE_COLUMNS, "keywords"), image, text, cfg, INSTRUCTION)


# --- drawn shapes -----------------------------------------------------------------------------------------------------

DEMO = {"see_steps": 300, "habit_steps": 60, "steps": 30}  # of demo.py
NUMBER_WORDS = ("one", "two", "three", "four")
TOY_INSTRUCTION = "Describe the image."
SENTENCE_FORMS = ("{}", "there {be} {}", "a drawing of {}")


@in_one_split("caption/")
def scenes(rng: random.Random) -> Scene:
    """Equal shapes and what they are, said in several ways."""
    colour, shape, count = rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.randint(1, len(NUMBER_WORDS))
    image = Image.new("RGB", (SIDE, SIDE), (rng.randint(236, 255),) * 3)
    draw_shapes(ImageDraw.Draw(image), rng, COLOURS[colour], shape, count)
    what = f"{NUMBER_WORDS[count - 1]} {colour} {shape}{'s' if count > 1 else ''}"
    captions = [form.format(what, be="are" if count > 1 else "is") for form in SENTENCE_FORMS]
    truth = json.dumps({"references": captions, "keywords": what.split()})
    return [encode_png(image)], [("caption", f"{IMAGE_PLACEHOLDER}{TOY_INSTRUCTION}", what, truth)]


toy = toy_of("caption", scenes, ["caption"])
