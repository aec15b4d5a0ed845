r"""The vqa task: visual questions whose answer is a word, a number, yes or no, or the letter of a choice.

Rows are {image, question, answer, type} of any dataset, with optional columns: `choices` (texts; `answer` names one by
its letter or its text) and `tolerance` of a number (0.5, or "5%" of the truth; counting has none). An `answer` that is
a list has the answers of several people: as in VQA, an answer that three of them gave is right. A list of two texts has
two forms of one answer, and each of them is right.

The form of a truth decides how an answer is compared with it: a number by value, yes and no by meaning, a choice by its
letter, a formula as written, everything else as text. Text is normalised as by the evaluation code of VQA v2 (Goyal et
al. 2017, github.com/GT-Vision-Lab/VQA, `processPunctuation` and `processDigitArticle`); plurals and the synonyms below
are additions of this project.
"""

import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from errors import UserError, as_user_error, need
from prepare_data import IMAGE_PLACEHOLDER, RawRow, ToyConfig
from reward import (
    BOX_PATTERN,
    MAX_ANSWER_CHARS,
    SPECIAL_TOKEN_PATTERN,
    accuracy_and_format_reward,
    count,
    extract_boxed,
    register,
    unwrap_truth,
)
from sources.cells import Choices, list_choices, listed_choices, parse_cell, read_choices
from tasks._grammar import NUMBER, NUMERAL, with_exponents
from tasks._tables import any_rows, convert_row
from tasks.shapes import COLOURS, Scene, drawings, has_only_box, make_boxed_response, toy_of

INSTRUCTION = r"Put the answer, a word, a number or the letter of a choice, in \boxed{}."
DEFAULTS = {"prompt_key": "question", "image_key": "image", "answer_key": "answer", "instruction": "vqa"}
CHOICE_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MULTIPLE_CHOICE = "multiple choice"
COUNTING_TYPES = ("counting", "count")  # question types whose numbers are exact, for any `tolerance`

# --- words, as data -----------------------------------------------------------------------------------------------

YES, NO = "yes yeah yep yup sure indeed affirmative true correct", "no nope nah false incorrect untrue"
YES_NO_WORDS = {word: word in YES.split() for word in f"{YES} {NO}".split()}
# Words that end with n't are negations too.
NEGATIONS = set("not never cannot neither nor without zero 0 none nobody nothing".split())
HEDGES = set("or but maybe perhaps possibly probably unsure either".split())
MODALS = set("could might may would".split())  # they hedge too, unless the question has them
# Words that deny a yes
DENIALS = set("wrong missing absent gone empty nowhere fake lie lying joke joking lacks lacking".split())
CERTAIN = set("definitely certainly absolutely clearly obviously exactly".split())
ARTICLES = ("a", "an", "the")
FILLER = set(
    """
an the is are was were it it's they they're them there there's this that that's these those here in on at of exactly
image picture photo shows total number degree made he she his her its we you my your can be been being seen see visible
present shown depicted appears appear seems seem looks look like to has have only just clearly i'm he's she's there're
says say reads read who with currently contains contain displays display made called named titled located situated
""".split()
)
IMAGE_WORDS = set("image picture photo".split())  # part of FILLER
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
child children kid
foot feet ft
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
calf calves
hoof hooves
thief thieves
wife wives
life lives
elf elves
ox oxen
die dice
cactus cacti
potato potatoes
tomato tomatoes
tire tyre
pajama pyjama
mustache moustache
donut doughnut
yogurt yoghurt
jewelry jewellery
license licence
defense defence
program programme
traveler traveller
cozy cosy
curb kerb
plow plough
sofa couch settee
bicycle bike
motorcycle motorbike
television tv telly
telephone phone
airplane plane aeroplane
refrigerator fridge
photo photograph
striped stripe stripes
checkered chequered checked
dotted dot dots
percent % percentage
dollar buck usd
euro eur €
cent ¢
meter m
kilometer km
centimeter cm
millimeter mm
kilogram kg kilo
gram g
pound lb lbs £
ounce oz
inch inches
yard yd
mile mi
hour hr
minute min
second sec
year yr
celsius centigrade °c
fahrenheit °f
"""  # one line per meaning: colours, materials, irregular plurals, spellings, things, units
MEANING = {word: line.split()[0] for line in SYNONYMS.strip().splitlines() for word in line.split()}
NO_PLURALS = set("glasses shorts news goods means customs lens".split())  # their singulars mean other things

UNIT_WORDS = set(
    """
dollar euro cent meter kilometer centimeter millimeter foot inch yard mile kilogram gram pound ounce hour minute second
day week month year old celsius fahrenheit degree mph kmh percent
""".split()
)
SPELLING_RULES = (("(?<=[a-z]{3})our$", "or"), ("(?<=[a-z]{2})([tb])re$", r"\1er"), ("(?<=[a-z]{3})ogue$", "og"),
                  ("(?<=[a-z]{3})is(e|ed|ing)$", r"iz\1"), ("(?<=..)men$", "man"), ("(?<=..)people$", "person"))

ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen""".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
SMALL_NUMBERS = {word: n for n, word in enumerate(ONES)} | {word: 10 * n for n, word in enumerate(TENS, 2)}
SMALL_NUMBERS |= dict.fromkeys("no none nobody nothing".split(), 0) | {"single": 1}
SCALES = {"pair": 2, "pairs": 2, "couple": 2, "dozen": 12, "dozens": 12, "hundred": 100, "thousand": 1000,
          "million": 10**6, "billion": 10**9}
PHRASES = {("half", "a", "dozen"): 6, ("half", "dozen"): 6, ("no", "one"): 0, ("not", "any"): 0}
NUMBER_WORDS = SMALL_NUMBERS | SCALES
BEFORE_NUMBERS = (*ARTICLES, "only", "just", "exactly", "total", "of")

# --- text ---------------------------------------------------------------------------------------------------------

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'  # as in VQA's evaluation
DIGIT_COMMA = re.compile(r"[0-9],[0-9]")
PERIOD = re.compile(r"\.(?![0-9])")
END = ".,!?;:"  # characters after a word of a sentence
IN_TEXT = re.compile(r"\\(?:text|math)[a-z]* ?\{([^{}]*)\}")  # `\text{red}`
LEAD = r"^(?:so,? |therefore,? |thus,? )?(?:(?:the |my )?(?:final |correct |right )?(?:answer|option|choice)"
LEAD += r"(?: (?:is|would be|should be) ?:?| ?:| (?=\([a-z]\))) ?"
LEAD += r"|i (?:can |do |would |will )?(?:see|count|saw|counted|think|believe|say|choose|pick) )"
LEAD = re.compile(LEAD)
TAIL_PATTERN = r"(?<!\bit)(?<!\bthis)(?<!\bthat)(?<!\bstatement) is (?:the )?(?:correct|right)"
TAIL_PATTERN = re.compile(TAIL_PATTERN + r"(?: (?:answer|option|choice|one))?$| at all$")
QUOTES = re.compile(r'(?<!\w)"|"(?!\w)')
DENIED = re.compile(r"(?:\bnot|(?<=is)n't) (true|correct|false|incorrect)\b")
IT_IS = re.compile(r"(?:it|they|that|there|these|those|he|she)'(?:s|re) (.+)")
SUBJECT = r"((?:the|an?|it|they|this|that|these|those|there|he|she)\b.*)"
SUBJECT = re.compile(SUBJECT + r" (?:is|are|was|were|says?|reads?):? (.+)")
STATEMENT = re.compile(rf"(?:{SUBJECT.pattern}|[a-z] ?= ?(.+))")  # `x = 5` too
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|%")
CHOICE_PATTERN = r"\b(under|above|behind|inside|outside|in|on) or ([a-z]+)|"  # an answer is one of `left or right`
CHOICE_PATTERN = re.compile(CHOICE_PATTERN + r"([a-z]+),? or (?:(?:an?|the|in|on|at|to) )*([a-z]+)")
LETTER_AND_TEXT = re.compile(r"\(?[a-h](?:[.:] |\) ?)\w")
CHOICE_REPLY_PATTERN = re.compile(r"(?:option |choice |answer )?([(\[]?)([a-z])(?![a-z0-9'])([.,:)\]]*) ?(.*)")
FIRST_CHOICE = re.compile(r"[\s(]A[.):]\s", re.IGNORECASE)
GLOSS = re.compile(r"([^()]+) \(([^()]+)\)([^()]*)")  # `3 (three) dogs`
SIGN = re.compile(r"[+<>≤≥=^]|(?<![a-z0-9])-|-(?![a-z0-9])")  # as in `sin x - 1` and `C++`, not in `t-shirt`
DASH = re.compile(r"^- (?=[a-z]{2})|(?<=[a-z]{3}) -+ (?=[a-z]{2})")  # punctuation between words, not a minus
FORMULA_PATTERN = re.compile(
    rf"(?=.*(?:{SIGN.pattern})).+|(?!.*(?<![a-z\\])[a-z]{{2}})(?=.*[-()\[\]/]).+"
)  # `x - 1`, `(1, 2)`
BRACKETS = re.compile(r"^[(\[]([^()\[\],]+)[)\]]$")
NUMBER_LIST_PATTERN = re.compile(
    r"-?[0-9.]+(?:(?: ?, ?(?:and )?| and | ?& ?)-?[0-9.]+)+"
)  # a list of two or more numbers
LABELLED = re.compile(r"([a-z' ]+): ([a-z0-9.,-]+)")
MONEY = re.compile(r"\$ ?([0-9](?:[0-9.,]*[0-9])?)(?![0-9]| ?\$)")  # `$5`, but not LaTeX's `$5$`
ASKED_UNIT = re.compile(r"\bin ([a-z]+)\W*$|\bhow (old)\b")  # `How tall is it in feet?`
HINTS = {  # topic of a question -> words that add nothing to its answer
    "how much|cost|price|pay|money|worth": "dollar cost", "how old": "year", "time": "clock watch",
    "weather": "day sky", "made of": "material", "company|made by|manufacturer|logo": "company brand manufactured",
    "when|date": "year date", "where|located": "location place", "who": "person taken written",
    "rate|share": "percent", "population": "people",
    "width|height|length|depth|age|weight": "wide tall high long deep old heavy weigh",
}  # fmt: skip
SPELLINGS = {
    "’": "'", "−": "-", "“": '"', "”": '"', "\\$": "$", "\\%": "%", "%": " %", "**": "", "\\(": " ", "\\)": " ",
    "<answer>": "", "</answer>": "", "^{\\circ}": "°", "^\\circ": "°", "°c": " celsius", "°f": " fahrenheit", "°": "",
    "º": "", "a.m.": "am", "p.m.": "pm", "miles per hour": "mph", "kilometers per hour": "kmh", "km/h": "kmh",
    "out of": "of",
}  # fmt: skip


def clean(text: str) -> str:
    r"""Return a text in lower case with single spaces.

    Bold, `\text{}`, a leading `Answer:` and a final period are removed.
    """
    text = text.casefold()
    for old, new in SPELLINGS.items():
        text = text.replace(old, new)
    text = with_exponents(text)
    text = MONEY.sub(r"\1 dollars", text).replace("$", " ")
    text = LEAD.sub("", IN_TEXT.sub(r"\1", " ".join(text.split())).strip())
    return TAIL_PATTERN.sub("", " ".join(QUOTES.sub("", text).split()).removesuffix(".").rstrip())


@lru_cache(16384)
def stem(word: str) -> str:
    """Return the stem that all words of a meaning share: of the singular and the first synonym, without apostrophes.

    VQA's evaluation inserts missing apostrophes instead.
    """
    word = word.replace("'", "")
    word = MEANING.get(word, word)
    if word not in NO_PLURALS:
        word = re.sub(r"ies?$", "y", word)
        word, es = re.subn(r"(s|x|z|ch|sh)es?$", r"\1", word)
        word = word if es else re.sub(r"(?<=..[^su])s$", "", word)
    for pattern, new in SPELLING_RULES:
        word = re.sub(pattern, new, word)
    return MEANING.get(word, word)


def plain_words(text: str) -> list[str]:
    """Return the words of a cleaned text without punctuation and articles, removed as in VQA's evaluation."""
    stripped = text
    for mark in PUNCTUATION:
        joined = f"{mark} " in text or f" {mark}" in text or DIGIT_COMMA.search(text)
        stripped = stripped.replace(mark, "" if joined else " ")
    words = PERIOD.sub("", stripped).split()
    content = [word for word in words if word not in ARTICLES]
    return words if all(len(word) == 1 and word.isalpha() for word in content) else content  # `A` and `A, B` are points


@lru_cache(4096)
def normalize_text(text: str) -> str:
    """Return the normal form of a cleaned text: plain words, numbers in digits, the stem of each word.

    An empty form equals nothing.
    """
    return " ".join(
        stem(word) if value is None else str(value) for word, value in merge_number_words(plain_words(text))
    )


@lru_cache(16384)
def verb_stem(word: str) -> str:
    """Return a stem that the forms of a verb share too: `playing`, `played` and `plays` -> play."""
    return re.sub(r"([bdgmnprt])\1$", r"\1", re.sub("(?<=...)(?:ing|ed|e)$", "", stem(word)))


@lru_cache(4096)
def known_words(question: str) -> frozenset[str]:
    """Return the stems of words that may surround an answer without being a second answer.

    They are the question's words and a few more.
    """
    words = set(WORD.findall(clean(question[:4000]))) | FILLER
    words -= HEDGES | NEGATIONS | {"and"} | set(NUMBER_WORDS) | set(YES_NO_WORDS)
    words -= set(chain(*CHOICE_PATTERN.findall(clean(question))))
    return frozenset(verb_stem(word) for word in words if len(word) != 1 or word == "%")  # a letter may be an answer


def is_known(word: str, known: frozenset[str]) -> bool:
    """Return whether a word is known, for `t-shirt` whether each part is.

    Words with digits or other characters are not.
    """
    parts = WORD.findall(word)
    return "".join(parts) == word.replace("-", "") != "" and all(verb_stem(part) in known for part in parts)


def all_known(words: Iterable[str], known: frozenset[str]) -> bool:
    """Return whether all words are known."""
    return all(is_known(word, known) for word in words)


def number_at(words: Sequence[str], start: int = 0) -> tuple[Decimal, int] | None:
    """Return the number in digits or words that begins at `start`, and the index of its end, or None.

    `minus two thousand five hundred and one` is read in one pass. `pair` and `couple` are 2 and `dozen` is 12:
    they multiply as `hundred` does. Adjacent numbers are not joined.
    """
    sign = -1 if words[start : start + 1] in (["minus"], ["negative"]) else 1
    index = start + (sign < 0)
    for phrase, value in PHRASES.items():
        if tuple(words[index : index + len(phrase)]) == phrase:
            return sign * Decimal(value), index + len(phrase)
    total, group, least = Decimal(0), None, Decimal(10**15)  # `least`: the smallest scale so far
    last = ""
    while index < len(words):
        word = words[index]
        small, scale = SMALL_NUMBERS.get(word), SCALES.get(word)
        digits = NUMERAL.fullmatch(word)
        if small is not None:
            tens = last in TENS and 0 < small < 10
            if not (group is None or tens or (last == "hundred" and small)) or small >= least:
                break
            group = (group or 0) + small
        elif scale is not None and scale < least:
            if group is None and (total or word.endswith("s")):  # `dozens` is not a number
                break
            group = Decimal(1 if group is None else group) * scale
            if scale != 100 or group >= 1000:
                total, group, least = total + group, None, Decimal(scale)
        elif digits and group is None and Decimal(word.replace(",", "")) < least:
            group = Decimal(word.replace(",", ""))
        elif word == "and" and words[index + 1 : index + 3] == ["a", "half"] and last:
            group = (group or 0) + Decimal("0.5")
            index += 3
            break
        elif not (word == "and" and last in SCALES and SMALL_NUMBERS.keys() & words[index + 1 : index + 2]):
            break
        last = word if word != "and" else last
        index += 1
    return (sign * (total + (group or 0)), index) if last else None


def merge_number_words(words: Sequence[str]) -> Iterator[tuple[str, Decimal | None]]:
    """Yield (word, None) for each word, and (words, value) for each run of words that spells out a number."""
    index = 0
    while index < len(words):
        value, end = number_at(words, index) or (None, index + 1)
        in_digits = end == index + 1 and words[index] not in NUMBER_WORDS  # digits are left unchanged
        yield " ".join(words[index:end]), None if in_digits else value
        index = end


def number_words(text: str) -> list[str]:
    """Return the words of a text, with `twenty-one` and `5cm` as two words each, and `#5` as 5."""
    return re.sub("(?<=[a-z])-(?=[a-z])|(?<=[0-9])(?=[a-z])(?!e[+-]?[0-9])|#(?=[0-9])", " ", text.rstrip(END)).split()


@lru_cache(4096)
def quantity(text: str, known: frozenset[str] = frozenset()) -> tuple[Decimal, str] | None:
    """Return the value and the unit of a quantity, or None for any other text.

    Quantities are `3`, `1,000`, `minus 2.5`, `twenty-one`, `a dozen`, `three dogs` (if dogs are known). The unit is ""
    or one of UNIT_WORDS: `$5` is (5, dollar).
    """
    words = number_words(text)
    start = next((i for i, word in enumerate(words) if word not in BEFORE_NUMBERS), 0)
    number = number_at(words, start)
    if number is None:
        return None
    value, end = number
    others = [word for word in words[end:] if word != "of" and stem(word) not in UNIT_WORDS]
    units = [stem(word) for word in words[end:] if stem(word) in UNIT_WORDS - {"old", "degree"}]
    return (value, "".join(units)) if len(units) < 2 and all_known(others, known) else None


CLOCK = re.compile(r"([0-9]{1,2})(?:[:. ]([0-5][0-9])(?::00)?|:00)?(?: ([ap]m|in the (?:morning|afternoon|evening)))?")
BESIDE_HOUR = re.compile(r"([0-9]{1,2}) (past|after|to) ([0-9]{1,2})( [ap]m)?")
IS_TIME = re.compile(r"[0-9]:[0-5][0-9]|[0-9] ?[ap]m$|o[' ]?clock$| past |^(?:noon|midday|midnight)$")
TIME_WORDS = {"half": "30", "quarter": "15", "noon": "12 pm", "midday": "12 pm", "midnight": "12 am"}
HALVES = {"in the morning": "am", "in the afternoon": "pm", "in the evening": "pm"}


@lru_cache(4096)
def parse_clock_time(text: str) -> tuple[int, int, str] | None:
    """Return (hour from 0 to 11, minute, am, pm or ""), or None if the text is not a time.

    Times are `5:30 pm`, `17:30`, `half past five`, `five thirty`.
    """
    text = re.sub(" ?o[' ]?clock", " :00", text)
    words = [TIME_WORDS.get(word, word) for word in number_words(text) if word not in ("a", "at", "minutes")]
    in_digits = " ".join(word if value is None else str(value) for word, value in merge_number_words(words)).replace(
        " :", ":"
    )
    if match := BESIDE_HOUR.fullmatch(in_digits):
        minute = int(match[1]) if match[2] != "to" else 60 - int(match[1])
        hour = (int(match[3]) - (match[2] == "to") - 1) % 12 + 1
        in_digits = f"{hour}:{minute:02}{match[4] or ''}"
    match = CLOCK.fullmatch(in_digits)
    if not match or int(match[1]) > 23:
        return None
    hour, half = int(match[1]), HALVES.get(match[3], match[3])
    return hour % 12, int(match[2] or 0), "pm" if hour > 12 else half or "am" * (hour == 0 and ":" in in_digits)


def parse_yes_no(text: str, context: "QuestionContext") -> bool | None:
    """Return True for yes, False for no, None for neither or both.

    A reason may follow, unless it contradicts the yes or no.
    """
    text = DENIED.sub(lambda match: "true" if match[1] in NO.split() else "false", text)
    text = re.sub(r"\bthat(?:'s| is) right\b", "true", text)
    first, punctuation, rest = re.match(r"([a-z]*)([,.;:!]?)(.*)", text).groups()
    is_yes, words = YES_NO_WORDS.get(first), re.findall(r"[^\s.,!?;:]+", rest)
    if is_yes is None or len(words) > 30 or not all(re.fullmatch(r"[a-z0-9'-]+", word) for word in words):
        return None
    asked_words = split_contractions(context.question)
    negated = any(word in NEGATIONS or word.endswith("n't") for word in words)
    denied = negated or DENIALS & {*words} - {*asked_words}
    contradicted = any(YES_NO_WORDS.get(word, is_yes) != is_yes for word in words) or (is_yes and denied)
    hedged = HEDGES & {*words} or MODALS & {*words} - {*asked_words}
    expected = NEGATIONS | {"one"} if is_yes else NEGATIONS  # `yes there is one`, but not `no one`
    if contradicted or hedged or not (punctuation or all_known(set(words) - expected, context.known)):
        return None
    words = re.findall(r"[^\s.,!?;:]+", re.sub("'(?:s|re)(?![a-z])", " is", rest))
    return is_yes if negated or reason_agrees(is_yes, words, bool(punctuation), asked_words) else None


AUXILIARIES = set("is are was were does do did has have can will would could".split())
PRONOUNS = set("there it he she they this that these those".split())
YES_NO_QUESTION_PATTERN = re.compile(
    rf"(?:{'|'.join(AUXILIARIES)}) (?:the|{'|'.join(PRONOUNS)}) "
)  # `is the statement true`
SAY_NOTHING = AUXILIARIES | PRONOUNS | IMAGE_WORDS | set("a an the any be seen visible present here in on of".split())


def split_contractions(text: str) -> list[str]:
    """Return the words of a text, with `n't` as `not`: `There isn't one.` -> there, is, not, one"""
    return re.sub("n't(?![a-z])", " not", text).rstrip(END).split()


def reason_agrees(yes: bool, words: list[str], apart: bool, asked_words: list[str]) -> bool:
    """Return whether the words after yes or no agree with it, as far as the words show.

    `apart` means that punctuation separates them from it. `Yes, just kidding` has no word of the question, `No, there
    is a dog` says yes, and `no sofa` does not deny the dog on the sofa that the question asks for.
    """
    content, target = ([verb_stem(w) for w in listed if w not in SAY_NOTHING] for listed in (words, asked_words))
    if yes:
        neutral = SAY_NOTHING | CERTAIN | set(NUMBER_WORDS) | set(YES_NO_WORDS)
        return not words or any(w in neutral or w.isdecimal() or verb_stem(w) in target for w in words)
    denies = not content or "no" in words
    if denies or apart or words[0] in {*PRONOUNS, *ARTICLES}:
        affirms = not denies and words[0] == "there" in asked_words[1:2] and content == target[: len(content)]
        return not affirms and parse_yes_no_sentence(" ".join(words), " ".join(asked_words)) is not True
    definite = asked_words[0] not in AUXILIARIES or {"the", *PRONOUNS} & set(asked_words[1:2]) - {"there"}
    return bool(definite) or content[0] in map(verb_stem, NEAR.split(" ".join(asked_words))[0].split())


def parse_yes_no_sentence(text: str, question: str) -> bool | None:
    """Return True for yes and False for no, if a sentence answers a question so.

    It repeats the whole question, as `There is no dog`, or is short, as `There isn't one`. Return None if it leaves
    something out (`There is a dog`, if the question is about a dog on the mat), adds something, or is a question.
    """
    asked_words, words = split_contractions(question), split_contractions(text)
    stated = [word for word in words if word not in NEGATIONS and word != "no"]
    if (
        len(stated) < 2
        or not all(word.isalnum() for word in stated)
        or HEDGES & {*stated, *asked_words}
        or len(asked_words) < 2
    ):
        return None
    if asked_words[0] not in AUXILIARIES or len(words) - len(stated) > 1 or MODALS & set(stated) - set(asked_words):
        return None
    content, target = ([verb_stem(w) for w in listed if w not in SAY_NOTHING] for listed in (stated, asked_words))
    it_is = asked_words[1] == "there" and len(words) == len(stated)  # `it is not` may be about anything
    named = asked_words[1] not in PRONOUNS - {"this", "that", "these", "those"}
    subject = words[0] in PRONOUNS and (asked_words[1] == words[0] or named or it_is)
    short = subject and stated[1] == asked_words[0] and set(content) <= {verb_stem("one")}
    complete = content == target and words[0] in {*PRONOUNS, *ARTICLES, asked_words[1]}
    pronoun = words[0] in PRONOUNS - {"there"} and 0 < len(content) < len(target) and target[-len(content) :] == content
    return len(words) == len(stated) if short or complete or pronoun else None


ZERO_TOLERANCE = (Decimal(0), Decimal(0))
APPROXIMATELY = re.compile(r"^(?:about|around|approximately|approx\.?|roughly|circa|~|≈) ?")
PLATE = re.compile("(?<=[a-z])(?=[0-9])|(?<=[0-9])(?=[a-z])")  # `abc123` is `abc 123`
BOTH = re.compile("[a-z]+ and [a-z]+")
THAN = re.compile("(?<=er) than (the .+)$")
AND = re.compile(r" ?, (?:and )?| and | ?& ?|, ?")
BEFORE = re.compile(r"(?:in|on|at|by|from|of|for|between|during|behind|under|above|below|according) ")
ABOUT = re.compile(r"the (.+?) (?:is|are|was|were) (.+)|(?:there (?:is|are) )?[a-z0-9,-]+ ([a-z]+)")
QUESTION_WORDS = set("what which who how many".split())
NEAR = re.compile(r" (?:next to|in front of|behind|near|around|by|on|in|under|above|below|with) ")
PLACED = re.compile(r"(in|on|at|inside|by|near|with|from|of|to|for) (.+)")  # not `under`, which is part of the answer
ONE = re.compile(r"^(?:the )?one (?=on |in |at |with )| one$")


class QuestionContext(NamedTuple):
    """The properties of a question that its grading needs.

    They are the words known from it, the tolerance of a number (absolute, and as a share of the truth), whether it asks
    for a count, and the question itself.
    """

    known: frozenset[str] = frozenset()
    tolerance: tuple[Decimal, Decimal] = ZERO_TOLERANCE
    counting: bool = False
    question: str = ""


NO_QUESTION = QuestionContext()

# --- grading ------------------------------------------------------------------------------------------------------


def matches_truth(text: str, truth: str, context: QuestionContext) -> bool:
    """Return whether a cleaned answer means the same as a cleaned truth."""
    if truth in YES_NO_WORDS:
        is_yes = parse_yes_no(text, context)
        return (parse_yes_no_sentence(text, context.question) if is_yes is None else is_yes) == YES_NO_WORDS[truth]
    if IS_TIME.search(truth) and (time := parse_clock_time(truth)):
        answer_time = parse_clock_time(text)
        return answer_time is not None and answer_time[:2] == time[:2] and time[2] in ("", answer_time[2])
    if number := quantity(truth):
        # `about 3` may be 2 or 4 too, so it is not a count; but a measure can only be seen approximately.
        value = quantity(text if context.counting else APPROXIMATELY.sub("", text), context.known)
        if value is None or abs(value[0] - number[0]) > context.tolerance[0] + context.tolerance[1] * abs(number[0]):
            return False
        if value[1] == number[1]:
            return True
        if not number[1]:  # 50 accepts `50 metres`, but not `50%` unless the question has percent
            asked_unit = ASKED_UNIT.search(context.question)
            asks_unit = asked_unit and stem(asked_unit[1] or asked_unit[2]) in UNIT_WORDS
            return verb_stem(value[1]) in context.known or not (context.counting or asks_unit or value[1] == "percent")
        return not value[1] and verb_stem(number[1]) in context.known
    (place, name), (true_place, true_name) = split_place(text), split_place(truth)
    return same_text(text, truth) or (
        same_text(name, true_name) and (not place or not true_place or place == true_place)
    )


def same_text(text: str, truth: str) -> bool:
    """Return whether two texts are equal after normalising.

    `t-shirt`, `tshirt` and `t shirt` are equal, and so are lists in any order.
    """
    text, truth = DASH.sub(" ", text), DASH.sub(" ", truth)
    if FORMULA_PATTERN.fullmatch(truth):
        return compact_formula(text) == compact_formula(truth)
    if NUMBER_LIST_PATTERN.fullmatch(truth):  # `3,4` is not 34
        return (
            sorted(map(normalize_text, AND.split(text))) == sorted(map(normalize_text, AND.split(truth)))
            and text[0] not in "(["
        )
    if SIGN.search(text) or ("-" in text + truth and ("/" in text) != ("/" in truth)):  # `ab/cd` is not `ab-cd`
        return False
    if PLATE.sub(" ", normalize_text(text)) == PLATE.sub(" ", normalize_text(truth)) != "":
        return True
    words, true_words = plain_words(text), plain_words(truth)
    if stem("".join(words)) == stem("".join(true_words)) != "" and not re.search("[0-9]", text):
        return all(len(word) > 2 for word in words + true_words) or "-" in text + truth  # `base ball`, but not `gr ay`
    items = [sorted(map(normalize_text, AND.split(listed))) for listed in (text, truth)]
    return items[0] == items[1] and len(items[1]) > 1


def compact_formula(formula: str) -> str:
    """Return a cleaned formula without spaces, braces of single characters and brackets around one value."""
    text = re.sub(r"\{(\w)\}", r"\1", re.sub(r"(?<!\d) | (?!\d)", "", formula.replace("–", "-")))
    return text if "," in text else BRACKETS.sub(r"\1", text)


def split_place(text: str) -> tuple[str, str]:
    """Split a place into preposition and object: `on the sofa` -> (on, the sofa); `the left one` -> ("", the left)"""
    text = ONE.sub("", text)
    match = PLACED.fullmatch(text)
    return (match[1], match[2]) if match else ("", text)


def parse_choice(text: str, choices: Sequence[str], context: QuestionContext = NO_QUESTION) -> int | None:
    """Return the index of the choice that a cleaned text names: `b`, `(b)`, `b. red`, `option b`, `red`.

    Return None if it names none, or more than one.
    """

    def is_choice(part: str, i: int) -> bool:
        return matches_truth(part, clean(str(choices[i])), context)

    if match := CHOICE_REPLY_PATTERN.fullmatch(text):
        i = CHOICE_LETTERS.lower().index(match[2])
        if i < len(choices) and (not match[4] or is_choice(match[4], i)):
            return i
        if match[1] or match[3]:  # `b. blue`, where b is red
            return None
    indices = [i for i in range(len(choices)) if is_choice(text, i)]
    return indices[0] if len(indices) == 1 else None


def choice_letters(text: str) -> str:
    """Return the letters of several choices in order, `A, C` -> AC, or "" for any other text.

    They may be joined (`CA`), a list in words (`A and C`) or JSON.
    """
    letters = re.sub(r"\b(?:and|AND)\b|[\s,;&/()\[\]\"'.]", "", text)
    return "".join(sorted(letters)) if re.fullmatch("[A-H]{2,8}", letters) and len({*letters}) == len(letters) else ""


def extract_answer(response: str, finish_reason: str) -> str | None:
    """Return the content of the last box, or without a box the whole response except for its thinking.

    Return None if the thinking or the box is not closed, if boxes have different answers, if an answer without a box
    was cut off, if the answer is too long, or if there is a special token.
    """
    text = response.rpartition("</think>")[2]
    if "<think>" in text or SPECIAL_TOKEN_PATTERN.search(text):
        return None
    if not BOX_PATTERN.search(text):
        answer = text.strip() if finish_reason == "stop" else None
    else:
        answer = extract_boxed(text)
    if answer is None or len(answer) > MAX_ANSWER_CHARS:
        return None
    return answer if all(text.startswith(f"{answer}}}", box.end()) for box in BOX_PATTERN.finditer(text)) else None


def offers_choices(question: str) -> bool:
    """Return whether a question asks for yes or no, or offers answers, so that its words may be an answer."""
    return question.partition(" ")[0] in AUXILIARIES or bool(re.search(r" or |/", question))


def is_about_other_object(text: str, question: str) -> bool:
    """Return whether a text answers about another object of the question.

    For a car next to a truck, it is about trucks alone: `the truck is red`, `3 trucks`. Or it says of one object what
    the question says of another: `the car next to the red truck is blue`, for a blue truck.
    """
    match = ABOUT.fullmatch(text)
    parts = (*(match.groups("") if match else ("", "", "")), *NEAR.split(question, maxsplit=1), "")[:5]
    subject, predicate, counted, target, near = (
        {verb_stem(w) for w in WORD.findall(p) if w not in SAY_NOTHING} for p in parts
    )
    if predicate and predicate <= target | near and subject & (target | near) and not re.search("[0-9]", text):
        return not offers_choices(question) and not question.rstrip("?").endswith(parts[1].rstrip(END))
    mentioned = counted if "how many" in question else subject
    return bool(mentioned and target - QUESTION_WORDS and not mentioned & target and mentioned <= near)


def without_clause(text: str, question: str) -> str:
    """Return a text without a clause that the question has, in the same words.

    `in 2015, it was 3` -> `it was 3`, `3 dogs in 2015` -> `3 dogs`.
    """
    first, _, remainder = text.partition(", ")
    if (compared := THAN.search(text)) and compared[1] in question:  # `the bed is bigger than the sofa`
        text = text[: compared.start()]
    for pair in BOTH.findall(question):  # `3 cats and dogs` has one number
        text = text.replace(pair, pair.replace(" and ", " "))
    if offers_choices(question):
        return text
    if remainder and BEFORE.match(first) and f" {first}" in question:
        text, question = remainder, question.replace(f" {first}", "")
    asked_words, words = split_contractions(question.rstrip("?")), text.rstrip(END).split()
    n_equal = 0
    while n_equal < min(len(words), len(asked_words)) - 1 and words[-1 - n_equal] == asked_words[-1 - n_equal]:
        n_equal += 1
    remainder = words[: len(words) - n_equal] if n_equal > 1 else words
    return " ".join(remainder) if remainder and remainder[-1][-1] not in END else text  # `red, blue bus` are two


def without_subject(text: str, context: QuestionContext) -> str:
    """Return a text without its subject and verb, if the words before the verb are the question's.

    `the car is red` -> `red` for `Is the car red or blue?`
    """
    if match := IT_IS.fullmatch(text):
        return match[1]
    match = SUBJECT.fullmatch(" ".join(split_contractions(text)) if "n't" in text else text)
    if not match or all_known(match[1].split()[1:], context.known):
        return match[2] if match else text
    return match[2] if match[1] in context.question and not offers_choices(context.question) else text


def without_known(text: str, known: frozenset[str]) -> str:
    """Return a text without the question's words at both ends.

    `made of wood` -> `wood`, `red bus` -> `red`; `red, blue` stays.
    """
    words = text.rstrip(END).split()
    if not all(word[0].isalnum() and word[-1].isalnum() for word in words):
        return text
    # An article belongs to the next word, so that neither `a dog` nor `car a` is choice A; `A B` has none.
    kept = [w for w, after in zip_longest(words, words[1:], fillvalue="") if w not in ARTICLES or len(after) < 2]
    unknown = [i for i, word in enumerate(kept) if not is_known(word, known)]
    middle = " ".join(kept[unknown[0] : unknown[-1] + 1]) if unknown else ""
    return text if middle in ARTICLES else middle


@lru_cache(4096)  # every response of a group has the same truth
def references(truth: str) -> tuple[str, ...]:
    """Return the cleaned answers of a truth: the truth itself, or the items of its JSON list."""
    answers = parse_cell(truth)
    return tuple(clean(str(answer)) for answer in (answers if isinstance(answers, list) else [truth]))


def answer_kind(example: Any) -> str:
    """Return the answer type of a row in lower case, with spaces."""
    return re.sub("[-_]", " ", str(example.extra.get("answer_type")).casefold())


def number_tolerance(example: Any) -> tuple[Decimal, Decimal]:
    """Return (absolute, share of the truth) by which a number may differ, from the column `tolerance`."""
    text = str(example.extra.get("tolerance") or 0).strip()
    if answer_kind(example) in COUNTING_TYPES:
        return ZERO_TOLERANCE
    with suppress(InvalidOperation):
        number = Decimal(text.removesuffix("%"))
        if number.is_finite() and 0 <= number:
            return (Decimal(0), number / 100) if text.endswith("%") else (number, Decimal(0))
    raise UserError(f"row {example.uid!r}: tolerance is {text!r}; write a number such as 0.5, or a share such as 5%")


FOUR_NUMBERS = re.compile(rf"\s*[(\[]?\s*[+-]?{NUMBER}(?:[\s,;]+[+-]?{NUMBER}){{3}}\s*[)\]]?\s*")
NO_BOXES = "the answer {truth:.80} is a box or a point, which this task does not grade; give the row's data_source a "
NO_BOXES += "reward of your own (--reward NAME=FILE.py:FUNCTION), or write the answers of several people as texts"


def check_no_box(answers: object) -> None:
    """Raise UserError if the answers are a list of numbers that are a box or a point: four, or two or more that all
    differ. Neither several people nor several forms of one answer give those."""
    numbers = answers if isinstance(answers, list) else []
    while numbers and all(isinstance(item, list) for item in numbers):
        numbers = list(chain(*numbers))
    is_number = all(NUMERAL.fullmatch(str(item)) for item in numbers)
    values = {Decimal(str(item).replace(",", "")) for item in numbers} if is_number else ()
    need(not (1 < len(numbers) == len(values) or len(numbers) == 4 and len(values) == 3),
         NO_BOXES.format(truth=str(answers)))


def answerable(truth: str, grade: Callable[[str], dict[str, float]]) -> bool:
    """Return whether one of the references, given as the answer, is right.

    An object is not answerable, nor is a missing value in the data, nor a sentence whose answer alone is wrong.
    """
    check_no_box(re.findall(r"[^\s,;()\[\]]+", truth) if FOUR_NUMBERS.fullmatch(truth) else parse_cell(truth))
    need(not re.search("</?(?:box|bbox|point)>", truth), NO_BOXES.format(truth=truth))
    if isinstance(parse_cell(truth), dict) or {"nan", "null"}.issuperset(references(truth)):
        count("bad_truth")
        return False
    sentences = [match for text in references(truth) if (match := IT_IS.fullmatch(text) or STATEMENT.fullmatch(text))]
    is_choice = sentences and any(grade(letter)["accuracy"] for letter in CHOICE_LETTERS)
    alone = (match[match.lastindex] for match in sentences if not is_choice)
    if "\n" in truth.strip() or not all(grade(answer)["accuracy"] for answer in alone):
        count("sentence")
        return False
    return any(grade(reference)["accuracy"] for reference in references(truth))


@register("vqa", "vqav2", answerable=answerable)
def vqa(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    r"""Return accuracy, format and their weighted sum, 0.9 * accuracy + 0.1 * format, as "reward".

    The format is an optional `<think>...</think>`, then one box, and nothing else. accuracy = min(n / 3, 1) if n
    references agree with the answer (for one or two references: n / 1 or n / 2). Raise UserError if `tolerance` is not
    a number, or a truth is none of the row's `choices`.
    """
    question = "\n".join(m["content"] for m in example.messages if m["role"] == "user")
    tolerance, truths = number_tolerance(example), references(example.ground_truth)
    with as_user_error(UserError, f"row {example.uid!r}"):
        choices = [text for _, text in read_choices(example.extra)]
    listed = choices or listed_choices(question.removesuffix(INSTRUCTION))
    if answer_kind(example) == MULTIPLE_CHOICE or any(LETTER_AND_TEXT.match(truth) for truth in truths):
        choices = listed
    if not choices and all(parse_choice(truth, listed) is not None for truth in truths):
        choices = listed
    letters = choice_letters(example.ground_truth)
    if not {*letters} <= {*CHOICE_LETTERS[: len(listed)]} or parse_choice(truths[0], listed) is not None:
        letters = ""
    options = ", ".join(map(str, choices))
    for truth in truths if choices and not letters else ():
        need(parse_choice(truth, choices) is not None,
             f"row {example.uid!r}: ground_truth {truth!r} is none of the choices {options}; correct or remove it")
    answer = extract_answer(response, finish_reason)
    mark = re.search(r"\?|[0-9] ?!", answer or "")  # `Red?` asks, and `3!` is 6
    if answer is None or mark and mark[0][-1] not in example.ground_truth:
        return accuracy_and_format_reward(0.0, 0.0)
    tolerance = ZERO_TOLERANCE if choices else tolerance
    context = make_question_context(
        question, tolerance, answer_kind(example) in COUNTING_TYPES, tuple(map(str, choices))
    )
    if "\n" in answer.strip():  # several lines are not a sentence
        context = context._replace(known=frozenset())

    def is_right(text: str, truth: str) -> bool:
        if choices:
            return parse_choice(text, choices, context) == parse_choice(truth, choices)
        return matches_truth(text, truth, context) and not (
            truth in YES_NO_WORDS and YES_NO_QUESTION_PATTERN.match(reply)
        )

    reply = clean(answer)
    readings = [
        strip_question_words(text, context)
        for text in split_gloss(reply if choices else without_label(reply, context.counting))
    ]
    if letters:
        return accuracy_and_format_reward(choice_letters(answer.upper()) == letters, has_only_box(response, answer))
    hits = 0
    for truth in truths:  # the brackets of a formula have a meaning
        parts = [strip_question_words(reply, context)] if FORMULA_PATTERN.fullmatch(truth) and not choices else readings
        hits += all(any(is_right(text, truth) for text in texts) for texts in parts)
    accuracy = min(hits / max(1, min(3, len(truths))), 1.0)
    return accuracy_and_format_reward(accuracy, has_only_box(response, answer))


@lru_cache(1024)
def make_question_context(
    question: str, tolerance: tuple[Decimal, Decimal], counting: bool, choices: tuple[str, ...]
) -> QuestionContext:
    """Return the QuestionContext of a prompt's text."""
    text = question[:4000].replace(IMAGE_PLACEHOLDER, " ").replace(INSTRUCTION, " ")
    text = clean(FIRST_CHOICE.split(text)[0] if choices else text)
    hints = " ".join(words for hint, words in HINTS.items() if re.search(rf"\b(?:{hint})\b", text))
    known = known_words(question) | set(map(verb_stem, hints.split()))
    known -= set(map(verb_stem, WORD.findall(clean(" ".join(choices)))))  # the words of a choice are an answer
    sentence, question_mark, _ = text.rpartition("?")  # `Answer in \boxed{}.` may precede it
    sentence = re.split("[.:!?] ", sentence)[-1] + "?" if question_mark else text
    return QuestionContext(known, tolerance, counting or "how many" in text, sentence)


def without_label(text: str, counting: bool) -> str:
    """Return a text with its label at the end, and without brackets around it.

    `dogs: 3` -> `3 dogs` if dogs are counted, `statement: true` -> `true statement`, `(3)` -> `3`
    """
    text = BRACKETS.sub(r"\1", text)
    match = LABELLED.fullmatch(text)
    labelled = match and (match[2] in YES_NO_WORDS or counting and number_at([match[2]]))
    return f"{match[2]} {match[1]}" if labelled else text


def split_gloss(text: str) -> list[str]:
    """Return the readings of a text: `3 (three) dogs` has two, which must both be right; other texts have one."""
    match = GLOSS.fullmatch(text)
    return [" ".join(f"{match[1]} {match[3]}".split()), match[2]] if match else [text]


def strip_question_words(text: str, context: QuestionContext) -> list[str]:
    """Return the readings of an answer without the subject of its sentence, and without the question's words around it.

    It has none if it is about another object of the question.
    """
    if is_about_other_object(text, context.question):
        return []
    short = without_clause(text, context.question)
    middle = without_known(short, context.known)
    middle = short if middle == "no" else middle  # `no sofa` is judged as a whole
    return [text, without_subject(text, context), short, without_subject(short, context), middle]


# --- data ---------------------------------------------------------------------------------------------------------


class IntegerAnswers:
    """What the integer answers of a file mean, if its choices are texts: their positions from 0, as in ScienceQA, or
    from 1, or the texts themselves. The rows of the file show it together: no position from 1 is 0."""

    def __init__(self):
        self.meanings = {"positions from 0", "positions from 1", "texts"}  # those that fit the rows so far

    def read(self, answer: object, choices: Choices) -> set[int] | None:
        """Return the positions from 0 that an answer may mean, or None if it is no such integer. Raise UserError if no
        meaning fits both it and the answers before it."""
        texts = [text for _, text in choices if isinstance(text, str)]
        if type(answer) is not int or len(texts) < len(choices) or not texts or choices[0][0] not in ("", "A"):
            return None
        by_text = [i for i, text in enumerate(texts) if normalize_text(clean(text)) == str(answer)]
        fitting = {"positions from 0": answer, "positions from 1": answer - 1}
        fitting |= {"texts": by_text[0]} if len(by_text) == 1 else {}
        fitting = {meaning: i for meaning, i in fitting.items() if 0 <= i < len(texts)}
        need(not fitting or self.meanings & fitting.keys(),
             f"the integer answers so far are {' or '.join(sorted(self.meanings))}, but {answer} for the choices "
             f"{', '.join(texts)} is not; write letters or texts")
        self.meanings = self.meanings & fitting.keys() or self.meanings
        return {i for meaning, i in fitting.items() if meaning in self.meanings}


def rows(cfg: ToyConfig) -> Iterator[RawRow]:
    """Yield the rows {image, question, answer, type} of .jsonl, .csv or .parquet files, or of a folder of shards. Rows
    whose integer answer may mean two choices wait until later rows show what it means."""
    integers, waiting = IntegerAnswers(), deque()

    def positions(raw: RawRow) -> set[int]:
        choices: Choices = []
        with suppress(UserError):  # convert_record raises it again
            choices = read_choices(raw.record) if isinstance(raw.record, dict) else []
        with as_user_error(UserError, raw.location):
            return (integers.read(parse_cell(raw.record.get(cfg.answer_key)), choices) if choices else None) or set()

    for row in any_rows(cfg, (), lambda record, root: record):
        waiting.append(row)
        positions(row)  # before those of the first row that waits
        while waiting and len(positions(waiting[0])) < 2:
            yield convert_row(waiting.popleft(), lambda record, root: convert_record(record, cfg, integers))
    if len(integers.meanings) == 1:
        print(f"integer answers are read as {min(integers.meanings)}")
    for row in waiting:
        raise UserError(f"{row.location}: integer answers may mean {', '.join(sorted(integers.meanings))}, and no row "
                        "shows which, as 0 or the number of choices would; write letters or texts")


def convert_record(record: dict, cfg: ToyConfig, integers: IntegerAnswers) -> dict:
    """Return a row as it is stored; raise UserError if it is invalid.

    `type` becomes answer_type, the choices (cells.read_choices) are listed below the question, and the answer becomes
    the letter of a choice.
    """
    question_key, answer_key = cfg.prompt_key, cfg.answer_key
    answer, choices = parse_cell(record.get(answer_key)), read_choices(record)
    check_no_box(answer)
    if isinstance(answer, list):  # in VQA they are {"answer": ..., "answer_id": ...}
        people = any(isinstance(a, dict) for a in answer)
        answer = [unwrap_truth(str(a.get("answer", "") if isinstance(a, dict) else a)) for a in answer]
        need(answer, "the answer is an empty list")
        if len(answer) == 2 and not people:  # two forms of one answer, as MMMU's: each is right by itself
            answer = answer * 3
    row = {"data_source": "vqa", **record, answer_key: answer}
    if kind := row.pop("type", None):
        row.setdefault("answer_type", kind)
    if choices:
        need(2 <= len(choices) <= len(CHOICE_LETTERS),
             f"choices is {choices!r}, expected 2 to {len(CHOICE_LETTERS)} texts")
        row["choices"] = [str(choice) for _, choice in choices]
        row[answer_key] = choice_letter(answer, choices, integers)
        question = with_choices(row.get(question_key), choices)
        listed, names = (list(map(clean, texts)) for texts in (listed_choices(record[question_key]), row["choices"]))
        need(listed == names or sorted(listed) != sorted(names),
             "the question lists the choices in another order than their column; remove them from the question")
        row[question_key] = record[question_key] if listed == names else question
    return row


def choice_letter(answer: object, choices: Choices, integers: IntegerAnswers) -> str:
    """Return the letter of the choice that an answer names; raise UserError if it names none or several.

    An answer names a choice by its label, by its text or, if it is an integer and the choices are texts without other
    labels, as IntegerAnswers reads it.
    """
    text, names = clean(unwrap_truth(str(answer))), [str(name) for _, name in choices]
    by_text = {i for i, choice in enumerate(names) if text == clean(choice)}
    by_text = by_text or {i for i, choice in enumerate(names) if normalize_text(text) == normalize_text(clean(choice))}
    labels = [label for label, _ in choices] if choices[0][0] else list(CHOICE_LETTERS[: len(names)])
    by_label = {i for i, label in enumerate(labels) if text == label.casefold()}
    positions = integers.read(answer, choices)
    named = by_text | by_label if positions is None else positions
    if not named and (index := parse_choice(text, names)) is not None:  # `(B)`, `B. blue`
        named = {index}
    need(len(named) == 1,
         f"answer {answer!r} names {len(named)} of the choices {', '.join(names)}; give the letter or text of one")
    return CHOICE_LETTERS[named.pop()]


def with_choices(question: object, choices: Choices) -> str:
    """Return a question with its choices listed below it."""
    need(isinstance(question, str), f"question is a {type(question).__name__}, expected a string if there are choices")
    return f"{question}\n{list_choices(choices)}"  # it ends in a newline, as an instruction may follow


# --- toy ----------------------------------------------------------------------------------------------------------

KINDS = {"count": "counting", "colour": "attribute", "exists": "existence", "shape": "open"}
TOY_TYPES = (*KINDS.values(), MULTIPLE_CHOICE)
DEMO = {"see_steps": 280, "habit_steps": 60, "images": 24, "questions": 3, "steps": 40}  # settings of demo.py


def scenes(split: str, seed: int) -> Iterator[Scene]:
    """Yield the images of the shapes task, except its angles, with questions."""
    rng = random.Random(f"vqa/{split}/{seed}")
    for images, drawn_questions in drawings(split, seed):
        questions = [(KINDS[kind], question, answer) for kind, question, answer in drawn_questions if kind in KINDS]
        if questions:
            count, colour, shape = (answer for _, _, answer in questions[:3])
            choices = rng.sample(list(COLOURS), len(COLOURS))
            question = with_choices("Which colour do you see?", [("", choice) for choice in choices])
            questions.append((MULTIPLE_CHOICE, question, CHOICE_LETTERS[choices.index(colour)]))
            thought = f"{count} {colour} {shape}"
            yield (
                images,
                [
                    (kind, f"{IMAGE_PLACEHOLDER}{text} {INSTRUCTION}", make_boxed_response(truth, thought), truth)
                    for kind, text, truth in questions
                ],
            )


toy = toy_of("vqa", scenes, TOY_TYPES, "question", "image", "answer")
