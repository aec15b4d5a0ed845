r"""Visual questions: a word, a number, yes or no, a letter of a choice; one reference answer, or several people's.

Rows are {image, question, answer, type} as found, and further columns where there are any: `choices` (texts, from which
`answer` names one, by its letter or by its text), `tolerance` of a number (0.5, or "5%" of the truth; counting has
none). An `answer` that is a list holds what several people said: as in VQA, an answer that three of them gave is right.

How a truth looks decides how an answer is compared with it: a number by value, yes and no by meaning, a choice by its
letter, everything else as text. Text is normalised as by the evaluation code of VQA v2 (Goyal et al. 2017,
github.com/GT-Vision-Lab/VQA, `processPunctuation` and `processDigitArticle`); plurals and the synonyms below are ours.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from errors import UserError, need
from prepare_data import MARK, TABLES, Raw, TaskConfig, table_rows
from reward import BOX, MAX_ANSWER_CHARS, extract_boxed, register, weighted
from sources.tables import data_files
from tasks.shapes import COLOURS, SALT, Scene, boxed, drawings, in_turn, only_box

INSTRUCTION = r"Put the answer, a word, a number or the letter of a choice, in \boxed{}."
DEFAULTS = {"prompt_key": "question", "image_key": "image", "answer_key": "answer", "add_image_marks": True}
DEFAULTS |= {"instruction": "vqa"}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MULTIPLE_CHOICE = "multiple choice"
COUNTING = ("counting", "count")  # types whose numbers are exact, whatever `tolerance` says

# --- words, as data -----------------------------------------------------------------------------------------------

YES, NO = "yes yeah yep yup sure indeed affirmative true correct", "no nope nah false incorrect"
SAYS = {word: word in YES.split() for word in f"{YES} {NO}".split()}
NEGATIONS = set("not never cannot neither nor".split())  # and all that ends with n't
HEDGES = set("or but maybe perhaps possibly unsure either".split())
ARTICLES = ("a", "an", "the")
FILLER = set("an the is are was were it it's they they're them there there's this that that's these those".split())
FILLER |= set("here in on of exactly image picture photo shows total number degree made".split())
SYNONYMS = """
grey gray
purple violet
cyan aqua
magenta fuchsia
blond blonde
gold golden
silver silvery
multicolored multicoloured multicolor multicolour
wood wooden timber
metal metallic
stone stony
wool woolen woollen
leather leathery
rubber rubbery
silk silken
fabric cloth textile
aluminum aluminium
man men
woman women
person people
child children
foot feet
tooth teeth
mouse mice
goose geese
knife knives
leaf leaves
loaf loaves
wolf wolves
shelf shelves
scarf scarves
half halves
potato potatoes
tomato tomatoes
color colour
% percent percentage
"""  # a line for each meaning: colours, materials, plurals that follow no rule, spellings
MEANING = {word: line.split()[0] for line in SYNONYMS.strip().splitlines() for word in line.split()}
NO_PLURALS = set("glasses shorts news goods means customs lens".split())  # other things than their singulars

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
ONES += "seventeen eighteen nineteen".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def spelled(n: int) -> str:
    """0 to 999 in words, as `one hundred five`."""
    if n < 100:
        return ONES[n] if n < 20 else f"{TENS[n // 10 - 2]} {ONES[n % 10]}".removesuffix(" zero")
    return f"{ONES[n // 100]} hundred {spelled(n % 100)}".removesuffix(" zero")


NUMBER_WORDS = {spelled(n): n for n in range(1000)}
NUMBER_WORDS |= {words.replace("hundred ", "hundred and "): n for words, n in NUMBER_WORDS.items()}
NUMBER_WORDS |= {"none": 0, "no": 0, "dozen": 12, "hundred": 100, "thousand": 1000, "one thousand": 1000}
LONGEST = max(len(words.split()) for words in NUMBER_WORDS)

# --- text ---------------------------------------------------------------------------------------------------------

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'  # of VQA's evaluation
DIGIT_COMMA = re.compile(r"[0-9],[0-9]")
PERIOD = re.compile(r"\.(?![0-9])")
END = ".,!?;:"  # of a word in a sentence
NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{0,15})(?:\.[0-9]{1,15})?")
IN_TEXT = re.compile(r"\\(?:text|math)[a-z]* ?\{([^{}]*)\}")  # `\text{red}`
LEAD = r"^(?:the |my )?(?:final |correct )?(?:answer|option|choice)(?: is ?:?| ?:) ?|^i (?:see|count|think) "
LEAD = re.compile(LEAD)
IT_IS = re.compile(r"(?:it's|they're|that's|there's) (.+)")
SUBJECT = re.compile(r"((?:the|an?|it|they|this|that|these|those|there)\b.*) (?:is|are|was|were):? (.+)")
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|%")
CHOICE = re.compile(r"(?:option |choice |answer )?([(\[]?)([a-z])(?![a-z0-9'])([.:)\]]*) ?(.*)")
SPELLINGS = {"’": "'", "−": "-", "°": "", "\\%": "%", "%": " %", "$": " ", "**": ""}
SPELLINGS |= {"<answer>": "", "</answer>": ""}


def clean(text: str) -> str:
    r"""Lower case and single spaces; without bold, `\text{}`, a leading `Answer:` and a final period."""
    text = text.casefold()
    for old, new in SPELLINGS.items():
        text = text.replace(old, new)
    text = LEAD.sub("", IN_TEXT.sub(r"\1", " ".join(text.split())).strip())
    return " ".join(text.split()).removesuffix(".").rstrip()


@lru_cache(16384)
def stem(word: str) -> str:
    """What all words of a meaning have in common: the singular's stem, the first of its synonyms, no apostrophes (which
    VQA's evaluation puts back where they are missing)."""
    word = word.replace("'", "")
    word = MEANING.get(word, word)
    if word not in NO_PLURALS:
        word = re.sub(r"ies?$", "y", word)
        word, es = re.subn(r"(s|x|z|ch|sh)es?$", r"\1", word)
        word = word if es else re.sub(r"(?<=..[^su])s$", "", word)
    return MEANING.get(word, word)


@lru_cache(4096)
def normal(text: str) -> str:
    """The normal form of a cleaned text: that of VQA's evaluation, then each word's stem. "" equals nothing."""
    out = text
    for mark in PUNCTUATION:
        joined = f"{mark} " in text or f" {mark}" in text or DIGIT_COMMA.search(text)
        out = out.replace(mark, "" if joined else " ")
    words = PERIOD.sub("", out).split()
    named = [word for word in words if word not in ARTICLES]
    words = words if all(len(word) == 1 and word.isalpha() for word in named) else named  # `A` and `A, B` are points
    return " ".join(stem(str(NUMBER_WORDS.get(word, word))) for word in words)


@lru_cache(4096)
def known_words(question: str) -> frozenset[str]:
    """Stems that may stand around an answer without being a second one: of the question's words, and a few more."""
    words = set(WORD.findall(clean(question[:4000]))) | FILLER
    words -= HEDGES | NEGATIONS | {"and"} | set(NUMBER_WORDS) | set(SAYS)
    return frozenset(stem(word) for word in words if len(word) != 1 or word == "%")  # a letter may be an answer


def is_known(word: str, known: frozenset[str]) -> bool:
    """Of `t-shirt` each part; nothing with digits or other characters."""
    found = WORD.findall(word)
    return "".join(found) == word.replace("-", "") != "" and all(stem(part) in known for part in found)


def all_known(words: Iterable[str], known: frozenset[str]) -> bool:
    return all(is_known(word, known) for word in words)


def number_of(text: str, known: frozenset[str] = frozenset()) -> Decimal | None:
    """The value of `3`, `1,000`, `-2.5`, `twenty-one`, `a dozen`, `three dogs` (if dogs are known); else None."""
    words = re.sub("(?<=[a-z])-(?=[a-z])", " ", text.rstrip(END)).split()
    words = words[1:] if words and words[0] in ARTICLES else words
    if not words:
        return None
    for size in range(LONGEST, 0, -1):
        value = NUMBER_WORDS.get(" ".join(words[:size]))
        if value is not None:
            return Decimal(value) if all_known(words[size:], known) else None
    written = NUMBER.fullmatch(words[0]) and words[0].strip("-")
    return Decimal(words[0].replace(",", "")) if written and all_known(words[1:], known) else None


def says(text: str, known: frozenset[str]) -> bool | None:
    """True for yes, False for no, None for neither or both. A reason may follow, unless it takes the word back."""
    first, mark, rest = re.match(r"([a-z]*)([,.;:!]?)(.*)", text).groups()
    said, words = SAYS.get(first), re.findall(r"[^\s.,!?;:]+", rest)
    if said is None or len(words) > 30 or not all(re.fullmatch(r"[a-z0-9'-]+", word) for word in words):
        return None
    negated = any(word in NEGATIONS or word.endswith("n't") for word in words)
    other = any(SAYS.get(word, said) != said for word in words) or (said and negated)
    if other or HEDGES & set(words) - NEGATIONS or not (mark or all_known(set(words) - NEGATIONS, known)):
        return None
    return said


EXACT = (Decimal(0), Decimal(0))

# --- grading ------------------------------------------------------------------------------------------------------


def same(text: str, truth: str, known: frozenset[str], tolerance: tuple[Decimal, Decimal]) -> bool:
    """Whether a cleaned answer means a cleaned truth. `tolerance`: absolute, and as a share of the truth."""
    if truth in SAYS:
        return says(text, known) == SAYS[truth]
    number = number_of(truth)
    if number is not None:
        value = number_of(text, known)
        return value is not None and abs(value - number) <= tolerance[0] + tolerance[1] * abs(number)
    return normal(text) == normal(truth) != ""


def choice_of(text: str, choices: Sequence[str], known: frozenset[str] = frozenset()) -> int | None:
    """Which choice a cleaned text names: `b`, `(b)`, `b. red`, `option b`, `red`; None if none, or more than one."""

    def is_choice(part: str, i: int) -> bool:
        return same(part, clean(str(choices[i])), known, EXACT)

    if found := CHOICE.fullmatch(text):
        i = LETTERS.lower().index(found[2])
        if i < len(choices) and (not found[4] or is_choice(found[4], i)):
            return i
        if found[1] or found[3]:  # `b. blue`, where b is red
            return None
    named = [i for i in range(len(choices)) if is_choice(text, i)]
    return named[0] if len(named) == 1 else None


def answer_of(response: str, finish_reason: str) -> str | None:
    """What the last box holds; of a response without a box, all of it, except for its thinking.

    None if thinking or the box does not end, if boxes hold different answers, and if a plain answer was cut off.
    """
    rest = response.rpartition("</think>")[2]
    if "<think>" in rest:
        return None
    if not BOX.search(rest):
        answer = rest.strip() if finish_reason == "stop" else None
    else:
        answer = extract_boxed(rest)
    if answer is None or len(answer) > MAX_ANSWER_CHARS:
        return None
    return answer if all(rest.startswith(f"{answer}}}", box.end()) for box in BOX.finditer(rest)) else None


def without_subject(text: str, known: frozenset[str]) -> str:
    """`the car is red` -> `red`, if the words before the verb are the question's: `Is the car red or blue?`"""
    if found := IT_IS.fullmatch(text):
        return found[1]
    found = SUBJECT.fullmatch(text)
    return found[2] if found and all_known(found[1].split()[1:], known) else text


def without_known(text: str, known: frozenset[str]) -> str:
    """`made of wood` -> `wood`, `red bus` -> `red`: without the question's words at both ends. `red, blue` stays."""
    words = text.rstrip(END).split()
    if not all(word[0].isalnum() and word[-1].isalnum() for word in words):
        return text
    new = [i for i, word in enumerate(words) if not is_known(word, known)]
    rest = " ".join(words[new[0] : new[-1] + 1]) if new else ""
    return text if rest in ARTICLES else rest  # `a dog` is not choice A


@lru_cache(4096)  # a truth is met once for each of its samples
def references(truth: str) -> tuple[str, ...]:
    """The cleaned answers of a truth: itself, or those in its JSON list."""
    answers = [truth]
    if truth.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            answers = json.loads(truth)
    return tuple(clean(str(answer)) for answer in answers)


@lru_cache(4096)
def choices_in(question: str) -> tuple[str, ...]:
    """The choices that a question ends with, as `A. red B. blue` or line by line; none if there are not two."""
    _, *parts = re.split(r"(?:^|[\s(])([A-Za-z])[.):]\s", question.removesuffix(INSTRUCTION))
    texts = tuple(text.strip().partition("\n")[0] for text in parts[1::2])
    return texts if len(texts) > 1 and LETTERS.startswith("".join(parts[::2]).upper()) else ()


def kind_of(example: Any) -> str:
    return re.sub("[-_]", " ", str(example.extra.get("answer_type")).casefold())


def tolerance_of(example: Any) -> tuple[Decimal, Decimal]:
    """(absolute, share of the truth) that a number may be off, of the column `tolerance`."""
    text = str(example.extra.get("tolerance") or 0).strip()
    if kind_of(example) in COUNTING:
        return EXACT
    with suppress(InvalidOperation):
        number = Decimal(text.removesuffix("%"))
        if number.is_finite() and 0 <= number:
            return (Decimal(0), number / 100) if text.endswith("%") else (number, Decimal(0))
    raise UserError(f"row {example.uid!r}: tolerance is {text!r}; write a number such as 0.5, or a share such as 5%")


def answerable(truth: str, rewards: dict[str, float]) -> bool:
    return any(normal(reference) for reference in references(truth))


@register("vqa", "vqav2", answerable=answerable)
def vqa(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    r"""0.9 * accuracy + 0.1 * format; format: an optional `<think>...</think>`, then one box, and nothing else.

    accuracy = min(n / 3, 1), where n of the references say the same (of one or two: n / 1 or n / 2). Raises UserError
    for a `tolerance` that is no number, and for a truth that is none of the row's `choices`.
    """
    question = "\n".join(m["content"] for m in example.messages if m["role"] == "user")
    known = known_words(question)
    tolerance, truths = tolerance_of(example), references(example.ground_truth)
    choices = from_json(example.extra.get("choices")) or ()
    if kind_of(example) == MULTIPLE_CHOICE and not choices:
        choices = choices_in(question)
    options = ", ".join(map(str, choices))
    for truth in truths if choices else ():
        told = f"row {example.uid!r}: ground_truth {truth!r} is none of the choices {options}; correct or remove it"
        need(choice_of(truth, choices) is not None, told)
    answer = answer_of(response, finish_reason)
    if answer is None:
        return weighted(0.0, 0.0)
    whole = clean(answer)
    known = frozenset() if "\n" in answer.strip() else known  # lines are no sentence
    texts = [whole, without_subject(whole, known)]
    if not choices:  # whose words are the question's
        texts.append(without_known(whole, known))

    def is_right(text: str, truth: str) -> bool:
        if choices:
            return choice_of(text, choices, known) == choice_of(truth, choices)
        return same(text, truth, known, tolerance)

    hits = sum(any(is_right(text, truth) for text in texts) for truth in truths)
    accuracy = min(hits / max(1, min(3, len(truths))), 1.0)
    return weighted(accuracy, only_box(response, answer))


# --- data ---------------------------------------------------------------------------------------------------------


def rows(cfg: TaskConfig) -> Iterator[Raw]:
    """Rows {image, question, answer, type} of .jsonl, .csv or .parquet files, or of a folder of parquet shards."""
    files = data_files(cfg.input, cfg.split)
    kinds = {file.suffix.lower().lstrip(".") for file in files}
    told = f"--input: files that end with {', '.join(sorted(kinds))}; vqa reads one of {', '.join(TABLES)} at a time"
    need(len(kinds) == 1 and kinds <= set(TABLES), told)
    for raw in table_rows(files, cfg, TABLES[kinds.pop()][0]):
        if isinstance(raw.record, dict):
            try:
                raw.record = to_columns(raw.record, cfg.prompt_key, cfg.answer_key)
            except UserError as error:
                raw.record = str(error)
        yield raw


def to_columns(record: dict, question_key: str = "question", answer_key: str = "answer") -> dict:
    """A row as found -> as it is kept: `type` becomes answer_type, choices are listed below the question, and the
    answer becomes the letter of one. Raises UserError with the reason."""
    answer, choices = from_json(record.get(answer_key)), from_json(record.get("choices"))
    if isinstance(answer, list):  # VQA's own are {"answer": ..., "answer_id": ...}
        answer = [str(a.get("answer", "") if isinstance(a, dict) else a) for a in answer]
        need(answer, "the answer is an empty list")
    row = {"data_source": "vqa", **record, answer_key: answer}
    if kind := row.pop("type", None):
        row.setdefault("answer_type", kind)
    if choices:
        choices = list(choices.values()) if isinstance(choices, dict) else choices
        ok = isinstance(choices, list) and 2 <= len(choices) <= len(LETTERS)
        need(ok, f"choices is {choices!r}, expected a list of 2 to {len(LETTERS)} texts")
        row["choices"] = [str(choice) for choice in choices]
        row[answer_key] = letter_of(answer, row["choices"])
        row[question_key] = with_choices(row.get(question_key), row["choices"])
    return row


def from_json(value: object) -> object:
    """Lists and objects in a cell of a csv file are JSON."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def letter_of(answer: object, choices: list[str]) -> str:
    """The letter of the choice that an answer names. An answer that is the letter of one and the text of another, or no
    choice at all, is refused."""
    text = clean(str(answer))
    by_text = {i for i, choice in enumerate(choices) if normal(text) == normal(clean(choice))}
    by_letter = {LETTERS.lower().index(text)} if re.fullmatch("[a-z]", text) else set()
    named = by_text | {i for i in by_letter if i < len(choices)}
    told = f"answer {answer!r} names {len(named)} of the choices {', '.join(choices)}; give the letter or text of one"
    need(len(named) == 1, told)
    return LETTERS[named.pop()]


def with_choices(question: object, choices: list[str]) -> str:
    need(isinstance(question, str), f"question is a {type(question).__name__}, expected a string where choices are")
    lines = [f"{LETTERS[i]}. {choice}\n" for i, choice in enumerate(choices)]
    return f"{question}\n{''.join(lines)}"  # the last line ends too: an instruction may follow


# --- toy ----------------------------------------------------------------------------------------------------------

KINDS = {"count": "counting", "colour": "attribute", "exists": "existence", "shape": "open"}
TOY_TYPES = (*KINDS.values(), MULTIPLE_CHOICE)
DEMO = {"see_steps": 280, "habit_steps": 60, "images": 24, "questions": 3, "steps": 40}  # of demo.py


def scenes(split: str, seed: int) -> Iterator[Scene]:
    """The images of the shapes task without its angles."""
    rng = random.Random(f"vqa/{split}/{seed}")
    for image, asked in drawings(split, seed):
        questions = [(KINDS[kind], question, answer) for kind, question, answer in asked if kind in KINDS]
        if questions:
            count, colour, shape = (answer for _, _, answer in questions[:3])
            choices = rng.sample(list(COLOURS), len(COLOURS))
            question = with_choices("Which colour do you see?", choices)
            questions.append((MULTIPLE_CHOICE, question, LETTERS[choices.index(colour)]))
            seen = f"{count} {colour} {shape}"
            yield (
                [image],
                [(kind, f"{MARK}{text} {INSTRUCTION}", boxed(truth, seen), truth) for kind, text, truth in questions],
            )


def toy(n: int, split: str, seed: int) -> Iterator[dict]:
    """n rows {image, question, answer, answer_type}, the types in turn, one question to an image."""
    need(split in SALT, f"--split {split!r}: vqa has {', '.join(SALT)}")
    for index, ([image], kind, question, answer) in enumerate(in_turn(n, scenes(split, seed), TOY_TYPES)):
        row = {"data_source": "vqa", "image": image, "question": question, "answer": answer, "answer_type": kind}
        yield row | {"split": split, "index": index, "uid": f"vqa-{split}-{seed}-{index}"}
