"""The caption task: a text about an image, compared with captions that people wrote.

The parts of the reward are CIDEr, BLEU-4 and ROUGE-L as the COCO caption evaluation computes them (tylin/coco-caption,
maintained as pycocoevalcap, whose tokenizer needs Java; here a regular expression splits words), the share of keywords
that the text contains, and penalties for length and repetition.
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
from tasks._tables import DEFAULT_IMAGE_COLUMNS, any_rows, first_nonempty, make_row
from tasks.shapes import COLOURS, SHAPES, SIDE, Scene, draw_shapes, encode_png, in_one_split, toy_of

INSTRUCTION = "Describe the image in one sentence."
MAX_CAPTION_CHARS = 4000  # a longer text is graded as an empty one
MAX_N = 4  # words of the longest n-grams
SIGMA = 6.0  # standard deviation, in words, of CIDEr's Gaussian penalty on a difference in length
BETA = 1.2  # ROUGE-L: weight of recall relative to precision
# Lengths have no penalty from the shortest reference's divided by this up to the longest reference's times this.
LENGTH_SLACK = 1.5
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
    """Return the words of a text in lower case, without punctuation; words with hyphens stay whole."""
    return tuple(re.findall(r"[^\W_]+(?:-[^\W_]+)*", unicodedata.normalize("NFKC", text).casefold()))


def ngrams(words: Words, n: int) -> Counter[Words]:
    """Count the n-grams of a text."""
    return Counter(zip(*(words[i:] for i in range(n)), strict=False))


# --- measures ---------------------------------------------------------------------------------------------------------


def bleu4(words: Words, references: list[Words]) -> float:
    """Return the BLEU-4 of one sentence (Papineni et al. 2002); its brevity penalty uses the closest reference length.

    The two small constants are COCO's: without a common 4-gram the score is nearly 0, and no division fails.
    """
    product = 1.0
    for n in range(1, MAX_N + 1):
        max_counts = Counter()
        for reference in references:
            max_counts |= ngrams(reference, n)
        matches = (ngrams(words, n) & max_counts).total()
        product *= (matches + 1e-15) / (max(0, len(words) - n + 1) + 1e-9)
    closest = min((abs(len(reference) - len(words)), len(reference)) for reference in references)[1]
    ratio = (len(words) + 1e-15) / (closest + 1e-9)
    return product**0.25 * math.exp(min(0.0, 1 - 1 / ratio))


def common_subsequence(a: Words, b: Words) -> int:
    """Return the length of the longest common subsequence of two texts.

    Each row of the usual table is stored in the bits of one integer (Hyyrö 2004).
    """
    positions: dict[str, int] = {}
    for i, word in enumerate(a):
        positions[word] = positions.get(word, 0) | 1 << i
    mask = (1 << len(a)) - 1
    row = mask
    for word in b:
        hits = row & positions.get(word, 0)
        row = ((row + hits) | (row - hits)) & mask
    return len(a) - row.bit_count()


def rouge_l(words: Words, references: list[Words]) -> float:
    """Return ROUGE-L (Lin 2004) with the best precision and the best recall over the references, as COCO does."""
    common = [common_subsequence(words, reference) for reference in references]
    precision = max(common) / max(1, len(words))
    recall = max(length / len(reference) for length, reference in zip(common, references, strict=True))
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision) if precision else 0.0


def all_ngrams(texts: list[Words]) -> set[Words]:
    """Return the n-grams of all lengths up to MAX_N that occur in any of the texts."""
    return set().union(*(ngrams(text, n) for text in texts for n in range(1, MAX_N + 1)))


class Corpus:
    """Document frequencies of n-grams, which CIDEr weights by their rarity; a document is the references of one row."""

    def __init__(self, size: float = 0, frequency: Mapping[Words, int] | None = None):
        self.size = size
        self.frequency: Counter[Words] = Counter(frequency)

    def add(self, references: list[Words]) -> None:
        """Count the references of one row as a document."""
        self.size += 1
        self.frequency.update(all_ngrams(references))

    def document_frequencies(self, references: list[Words]) -> dict[str, int]:
        """Return how many documents contain each n-gram of these references.

        Counts below 2 are left out: an n-gram without a count has the same weight.
        """
        grams = sorted(all_ngrams(references))
        return {" ".join(gram): self.frequency[gram] for gram in grams if self.frequency[gram] > 1}

    def vector(self, words: Words, n: int) -> dict[Words, float]:
        """Return the TF-IDF weights of a text's n-grams."""
        log_size = math.log(max(1, self.size))
        counts = ngrams(words, n).items()
        return {gram: count * (log_size - math.log(max(1, self.frequency[gram]))) for gram, count in counts}

    def cider(self, words: Words, references: list[Words]) -> float:
        """Return CIDEr-D (Vedantam et al. 2015), which COCO's code calls CIDEr.

        The range is 0 to 10; a text that equals its only reference gets 10.
        """
        total = 0.0
        for n in range(1, MAX_N + 1):
            weights = self.vector(words, n)
            for reference in references:
                ref_weights = self.vector(reference, n)
                norms = math.hypot(*weights.values()) * math.hypot(*ref_weights.values())
                product = sum(
                    min(weights[gram], ref_weights[gram]) * ref_weights[gram]
                    for gram in weights.keys() & ref_weights.keys()
                )
                gap = len(words) - len(reference)
                total += product / norms * math.exp(-(gap**2) / (2 * SIGMA**2)) if norms else 0.0
        return 10 * total / MAX_N / len(references)


UNIFORM_CORPUS = Corpus(math.e)  # log(e) - log(1): every n-gram has weight 1


def coverage(words: Words, keywords: list[Words]) -> float:
    """Return the share of the keywords that a text contains; a keyword of several words must occur as a phrase."""
    text = f" {' '.join(words)} "
    return sum(f" {' '.join(keyword)} " in text for keyword in keywords) / max(1, len(keywords))


def length_deviation(words: Words, references: list[Words]) -> float:
    """Return by which share a text is longer or shorter than LENGTH_SLACK allows, at most 1."""
    lengths = [len(reference) for reference in references]
    return min(
        1.0, max(0.0, len(words) / (LENGTH_SLACK * max(lengths)) - 1, 1 - LENGTH_SLACK * len(words) / min(lengths))
    )


def repeated_bigram_share(words: Words) -> float:
    """Return the share of a text's bigrams that repeat an earlier one."""
    pairs = ngrams(words, 2)
    return 1 - len(pairs) / pairs.total() if pairs else 0.0


# --- reward -----------------------------------------------------------------------------------------------------------


class CaptionTruth(NamedTuple):
    """The parsed truth of a row."""

    references: list[Words]
    keywords: list[Words]
    corpus: Corpus  # the document counts that are stored in the row


@lru_cache(4096)  # every response of a group has the same truth
def parse_caption_truth(text: str) -> CaptionTruth:
    """Parse a plain caption, a JSON list of captions, or {"references": [...], "keywords": [...], "documents": 100,
    "frequency": {"a": 90}}.

    `documents` is the number of rows, and `frequency` says how many rows contain an n-gram of these references. The
    default keywords are the words of at least half of the references, without stop words. Raise UserError if the truth
    is malformed or no reference contains a word.
    """
    message = f"the truth {text[:200]!r} is neither a caption nor JSON with a list of references"
    fields: Any = [text]
    if text.lstrip().startswith(("[", "{")):
        with as_user_error((ValueError, RecursionError), message):
            fields = json.loads(text)
    fields = fields if isinstance(fields, dict) else {"references": fields}
    lists = [fields.get(name) or [] for name in ("references", "keywords")]
    need(all(isinstance(t, list) and all(isinstance(line, str) for line in t) for t in lists), message)
    references, keywords = ([words for words in map(split_words, lines) if words] for lines in lists)
    need(references, f"the truth {text[:200]!r} has no reference with a word in it")
    if not keywords:
        word_counts = Counter(chain.from_iterable(set(reference) - STOP_WORDS for reference in references))
        keywords = [(word,) for word, count in sorted(word_counts.items()) if 2 * count >= len(references)]
    size, frequency = fields.get("documents"), fields.get("frequency") or {}
    counts = [size, *frequency.values()] if isinstance(frequency, dict) else [None]
    counts_valid = all(type(count) is int and 0 < count for count in counts)
    need(counts_valid or "documents" not in fields,
         f"the truth {text[:200]!r} has invalid document counts; write the file again with prepare_data.py")
    corpus = Corpus(size, {tuple(gram.split()): n for gram, n in frequency.items()}) if size else UNIFORM_CORPUS
    return CaptionTruth(references, keywords, corpus)


def caption_reward(response: str, truth: str) -> dict[str, float]:
    """Return the reward's parts and their weighted sum as "reward". Raise UserError only for an invalid truth.

    CIDEr uses the document counts in the truth. An n-gram that is in none of its references has the weight of one that
    no document contains; without counts all n-grams have the same weight. So a reward depends only on its row, and is
    the same in every process.

    Only the text after `</think>` is the caption. It is graded as empty if it contains `<think>` or a special token, or
    is longer than MAX_CAPTION_CHARS.
    """
    references, keywords, corpus = parse_caption_truth(truth)
    text = response.rpartition("</think>")[2]
    valid = len(text) <= MAX_CAPTION_CHARS and "<think>" not in text and not SPECIAL_TOKEN_PATTERN.search(text)
    words = split_words(text) if valid else ()
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
    """Grade a response with `caption_reward`; errors name the row."""
    with as_user_error(UserError, f"row {example.uid!r}"):
        return caption_reward(response, example.ground_truth)


# --- data -------------------------------------------------------------------------------------------------------------

CAPTIONS = ("references", "captions", "caption", "text")


def rows(cfg: ToyConfig) -> Iterator[RawRow]:
    """Yield rows of CSV, JSONL or parquet files with an image, and a column caption, text, captions or references.

    The captions are a text or a list (in CSV as JSON). The column keywords is optional: a list, or a text with commas.
    The files are read twice, because CIDEr's document counts come first; each row gets the counts of its n-grams.
    """
    corpus = Corpus()
    for raw in any_rows(cfg, DEFAULT_IMAGE_COLUMNS, lambda record, _: caption_record(record, cfg)):
        if isinstance(raw.record, dict):
            corpus.add(parse_caption_truth(raw.record["reward_model"]["ground_truth"]).references)
    yield from any_rows(cfg, DEFAULT_IMAGE_COLUMNS, lambda record, _: caption_record(record, cfg, corpus))


def as_list(value: Any, comma: bool = False) -> list:
    """Return a list: the value itself, a parsed JSON list, or a text as one item, or split at commas with `comma`."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with as_user_error((ValueError, RecursionError), f"{value[:80]!r} is not a valid JSON list"):
            return json.loads(value)
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")] if comma else [unwrap_truth(value)]
    return value or []


def caption_record(record: dict, cfg: ToyConfig, corpus: Corpus | None = None) -> dict:
    """Return a row in the on-disk format that keeps its other columns.

    With a corpus, the truth contains the document counts of the references' n-grams.
    """
    names = (cfg.answer_key, *CAPTIONS)
    with as_user_error(UserError, f"looked for columns {', '.join(CAPTIONS)}"):
        references = as_list(first_nonempty([record.get(name) for name in names]))
        keywords = [word for word in as_list(record.get("keywords"), comma=True) if str(word).strip()]
        truth = {"references": references, "keywords": keywords}
        words = parse_caption_truth(json.dumps(truth, default=str)).references
    if corpus:
        truth |= {"documents": corpus.size, "frequency": corpus.document_frequencies(words)}
    image = first_nonempty([record.get(name) for name in (cfg.image_key, *DEFAULT_IMAGE_COLUMNS)])
    need(image is not None, f"no image: looked for columns {', '.join((cfg.image_key, *DEFAULT_IMAGE_COLUMNS))}")
    text = json.dumps(truth, ensure_ascii=False, default=str)
    return make_row("caption", record, (*names, *DEFAULT_IMAGE_COLUMNS, "keywords"), image, text, cfg, INSTRUCTION)


# --- drawn shapes -----------------------------------------------------------------------------------------------------

DEMO = {"see_steps": 300, "habit_steps": 60, "steps": 30}  # settings of demo.py
COUNT_WORDS = ("one", "two", "three", "four")
TOY_INSTRUCTION = "Describe the image."
SENTENCE_FORMS = ("{}", "there {be} {}", "a drawing of {}")


@in_one_split("caption/")
def scenes(rng: random.Random) -> Scene:
    """Draw equal shapes and describe them in several sentences."""
    colour, shape, count = rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.randint(1, len(COUNT_WORDS))
    image = Image.new("RGB", (SIDE, SIDE), (rng.randint(236, 255),) * 3)
    draw_shapes(ImageDraw.Draw(image), rng, COLOURS[colour], shape, count)
    phrase = f"{COUNT_WORDS[count - 1]} {colour} {shape}{'s' if count > 1 else ''}"
    captions = [form.format(phrase, be="are" if count > 1 else "is") for form in SENTENCE_FORMS]
    truth = json.dumps({"references": captions, "keywords": phrase.split()})
    return [encode_png(image)], [("caption", f"{IMAGE_PLACEHOLDER}{TOY_INSTRUCTION}", phrase, truth)]


toy = toy_of("caption", scenes, ["caption"])
