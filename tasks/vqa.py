r"""Visual questions: a word, a number, yes or no, a letter of a choice; one reference answer, or several people's.

Rows are {image, question, answer, type} as found, and further columns where there are any: `choices` (texts, from which
`answer` names one, by its letter or by its text), `tolerance` of a number (0.5, or "5%" of the truth; counting has
none). An `answer` that is a list holds what several people said: as in VQA, an answer that three of them gave is right.
A list of two texts holds two forms of one answer, and each of them is right.

How a truth looks decides how an answer is compared with it: a number by value, yes and no by meaning, a choice by its
letter, a formula as it is written, everything else as text. Text is normalised as by the evaluation code of VQA v2
(Goyal et al. 2017, github.com/GT-Vision-Lab/VQA, `processPunctuation` and `processDigitArticle`); plurals and the
synonyms below are ours.
"""

import ast
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from errors import UserError, need
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
from tasks._tables import any_rows
from tasks.shapes import COLOURS, Scene, drawings, has_only_box, make_boxed_response, toy_of

INSTRUCTION = r"Put the answer, a word, a number or the letter of a choice, in \boxed{}."
DEFAULTS = {"prompt_key": "question", "image_key": "image", "answer_key": "answer", "instruction": "vqa"}
CHOICE_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MULTIPLE_CHOICE = "multiple choice"
COUNTING_TYPES = ("counting", "count")  # types whose numbers are exact, whatever `tolerance` says

# --- words, as data -----------------------------------------------------------------------------------------------

YES, NO = "yes yeah yep yup sure indeed affirmative true correct", "no nope nah false incorrect untrue"
YES_NO_WORDS = {word: word in YES.split() for word in f"{YES} {NO}".split()}
NEGATIONS = set("not never cannot neither nor without zero 0 none nobody nothing".split())  # and all that ends with n't
HEDGES = set("or but maybe perhaps possibly probably unsure either".split())
MODALS = set("could might may would".split())  # hedge too, unless the question has them
DENIALS = set("wrong missing absent gone empty nowhere fake lie lying joke joking lacks lacking".split())  # of a yes
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
IMAGE_WORDS = set("image picture photo".split())  # of FILLER
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
"""  # a line for each meaning: colours, materials, plurals that follow no rule, spellings, things, units
MEANING = {word: line.split()[0] for line in SYNONYMS.strip().splitlines() for word in line.split()}
NO_PLURALS = set("glasses shorts news goods means customs lens".split())  # other things than their singulars

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

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'  # of VQA's evaluation
DIGIT_COMMA = re.compile(r"[0-9],[0-9]")
PERIOD = re.compile(r"\.(?![0-9])")
END = ".,!?;:"  # of a word in a sentence
NUMBER_REGEX = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{0,15})(?:\.[0-9]{1,30})?")
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
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|%")
CHOICE_PATTERN = r"\b(under|above|behind|inside|outside|in|on) or ([a-z]+)|"  # one of `left or right` is the answer
CHOICE_PATTERN = re.compile(CHOICE_PATTERN + r"([a-z]+),? or (?:(?:an?|the|in|on|at|to) )*([a-z]+)")
CHOICE_REPLY_PATTERN = re.compile(r"(?:option |choice |answer )?([(\[]?)([a-z])(?![a-z0-9'])([.,:)\]]*) ?(.*)")
FIRST_CHOICE = re.compile(r"[\s(]A[.):]\s", re.IGNORECASE)
GLOSS = re.compile(r"([^()]+) \(([^()]+)\)([^()]*)")  # `3 (three) dogs`
SIGN = re.compile(r"[+<>≤≥=^]|(?<![a-z0-9])-|-(?![a-z0-9])")  # of `sin x - 1` and `C++`; none in `t-shirt`
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
HINTS = {  # what is asked, and words that then say no more
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
    r"""Lower case and single spaces; without bold, `\text{}`, a leading `Answer:` and a final period."""
    text = text.casefold()
    for old, new in SPELLINGS.items():
        text = text.replace(old, new)
    text = MONEY.sub(r"\1 dollars", text).replace("$", " ")
    text = LEAD.sub("", IN_TEXT.sub(r"\1", " ".join(text.split())).strip())
    return TAIL_PATTERN.sub("", " ".join(QUOTES.sub("", text).split()).removesuffix(".").rstrip())


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
    for pattern, new in SPELLING_RULES:
        word = re.sub(pattern, new, word)
    return MEANING.get(word, word)


def plain_words(text: str) -> list[str]:
    """Words of a cleaned text without punctuation and articles, as VQA's evaluation takes them away."""
    out = text
    for mark in PUNCTUATION:
        joined = f"{mark} " in text or f" {mark}" in text or DIGIT_COMMA.search(text)
        out = out.replace(mark, "" if joined else " ")
    words = PERIOD.sub("", out).split()
    named = [word for word in words if word not in ARTICLES]
    return words if all(len(word) == 1 and word.isalpha() for word in named) else named  # `A` and `A, B` are points


@lru_cache(4096)
def normalize_text(text: str) -> str:
    """The normal form of a cleaned text: plain words, numbers in digits, each word's stem. "" equals nothing."""
    return " ".join(
        stem(word) if value is None else str(value) for word, value in merge_number_words(plain_words(text))
    )


@lru_cache(16384)
def verb_stem(word: str) -> str:
    """The stem of a verb's forms too: `playing`, `played` and `plays` -> play."""
    return re.sub(r"([bdgmnprt])\1$", r"\1", re.sub("(?<=...)(?:ing|ed|e)$", "", stem(word)))


@lru_cache(4096)
def known_words(question: str) -> frozenset[str]:
    """Stems that may stand around an answer without being a second one: of the question's words, and a few more."""
    words = set(WORD.findall(clean(question[:4000]))) | FILLER
    words -= HEDGES | NEGATIONS | {"and"} | set(NUMBER_WORDS) | set(YES_NO_WORDS)
    words -= set(chain(*CHOICE_PATTERN.findall(clean(question))))
    return frozenset(verb_stem(word) for word in words if len(word) != 1 or word == "%")  # a letter may be an answer


def is_known(word: str, known: frozenset[str]) -> bool:
    """Of `t-shirt` each part; nothing with digits or other characters."""
    found = WORD.findall(word)
    return "".join(found) == word.replace("-", "") != "" and all(verb_stem(part) in known for part in found)


def all_known(words: Iterable[str], known: frozenset[str]) -> bool:
    return all(is_known(word, known) for word in words)


def number_at(words: Sequence[str], start: int = 0) -> tuple[Decimal, int] | None:
    """The number that begins there, in digits or words, and where it ends: `minus two thousand five hundred and one`.

    One pass. `pair` and `couple` are 2, `dozen` is 12: they multiply as `hundred` does. Adjacent numbers stay two.
    """
    sign = -1 if words[start : start + 1] in (["minus"], ["negative"]) else 1
    at = start + (sign < 0)
    for phrase, value in PHRASES.items():
        if tuple(words[at : at + len(phrase)]) == phrase:
            return sign * Decimal(value), at + len(phrase)
    total, group, least = Decimal(0), None, Decimal(10**15)  # `least`: the smallest scale so far
    last = ""
    while at < len(words):
        word = words[at]
        small, scale = SMALL_NUMBERS.get(word), SCALES.get(word)
        written = NUMBER_REGEX.fullmatch(word) if word.strip("-") else None
        if small is not None:
            tens = last in TENS and 0 < small < 10
            if not (group is None or tens or (last == "hundred" and small)) or small >= least:
                break
            group = (group or 0) + small
        elif scale is not None and scale < least:
            if group is None and (total or word.endswith("s")):  # `dozens` is no number
                break
            group = Decimal(1 if group is None else group) * scale
            if scale != 100 or group >= 1000:
                total, group, least = total + group, None, Decimal(scale)
        elif written and group is None and Decimal(word.replace(",", "")) < least:
            group = Decimal(word.replace(",", ""))
        elif word == "and" and words[at + 1 : at + 3] == ["a", "half"] and last:
            group = (group or 0) + Decimal("0.5")
            at += 3
            break
        elif not (word == "and" and last in SCALES and SMALL_NUMBERS.keys() & words[at + 1 : at + 2]):
            break
        last = word if word != "and" else last
        at += 1
    return (sign * (total + (group or 0)), at) if last else None


def merge_number_words(words: Sequence[str]) -> Iterator[tuple[str, Decimal | None]]:
    """The words, each run of them that is a number spelled out as one: (its words, its value)."""
    at = 0
    while at < len(words):
        value, end = number_at(words, at) or (None, at + 1)
        written = end == at + 1 and words[at] not in NUMBER_WORDS  # digits stay as they are
        yield " ".join(words[at:end]), None if written else value
        at = end


def number_words(text: str) -> list[str]:
    """Words of a text with the hyphens of `twenty-one` and the units of `5cm` apart, `#5` as 5."""
    return re.sub("(?<=[a-z])-(?=[a-z])|(?<=[0-9])(?=[a-z])|#(?=[0-9])", " ", text.rstrip(END)).split()


@lru_cache(4096)
def quantity(text: str, known: frozenset[str] = frozenset()) -> tuple[Decimal, str] | None:
    """The value of `3`, `1,000`, `minus 2.5`, `twenty-one`, `a dozen`, `three dogs` (if dogs are known), and its unit
    if it has one of UNITS: `$5` is (5, dollar). None for anything else."""
    words = number_words(text)
    start = next((i for i, word in enumerate(words) if word not in BEFORE_NUMBERS), 0)
    found = number_at(words, start)
    if found is None:
        return None
    value, end = found
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
    """(hour from 0 to 11, minute, am, pm or "") of `5:30 pm`, `17:30`, `half past five`, `five thirty`."""
    text = re.sub(" ?o[' ]?clock", " :00", text)
    words = [TIME_WORDS.get(word, word) for word in number_words(text) if word not in ("a", "at", "minutes")]
    written = " ".join(word if value is None else str(value) for word, value in merge_number_words(words)).replace(
        " :", ":"
    )
    if found := BESIDE_HOUR.fullmatch(written):
        minute = int(found[1]) if found[2] != "to" else 60 - int(found[1])
        hour = (int(found[3]) - (found[2] == "to") - 1) % 12 + 1
        written = f"{hour}:{minute:02}{found[4] or ''}"
    found = CLOCK.fullmatch(written)
    if not found or int(found[1]) > 23:
        return None
    hour, half = int(found[1]), HALVES.get(found[3], found[3])
    return hour % 12, int(found[2] or 0), "pm" if hour > 12 else half or "am" * (hour == 0 and ":" in written)


def parse_yes_no(text: str, asked: "QuestionContext") -> bool | None:
    """True for yes, False for no, None for neither or both. A reason may follow, unless it takes the word back."""
    text = DENIED.sub(lambda found: "true" if found[1] in NO.split() else "false", text)
    text = re.sub(r"\bthat(?:'s| is) right\b", "true", text)
    first, mark, rest = re.match(r"([a-z]*)([,.;:!]?)(.*)", text).groups()
    said, words = YES_NO_WORDS.get(first), re.findall(r"[^\s.,!?;:]+", rest)
    if said is None or len(words) > 30 or not all(re.fullmatch(r"[a-z0-9'-]+", word) for word in words):
        return None
    wanted = split_contractions(asked.question)
    negated = any(word in NEGATIONS or word.endswith("n't") for word in words)
    denied = negated or DENIALS & {*words} - {*wanted}
    other = any(YES_NO_WORDS.get(word, said) != said for word in words) or (said and denied)
    hedged = HEDGES & {*words} or MODALS & {*words} - {*wanted}
    expected = NEGATIONS | {"one"} if said else NEGATIONS  # `yes there is one`, but not `no one`
    if other or hedged or not (mark or all_known(set(words) - expected, asked.known)):
        return None
    words = re.findall(r"[^\s.,!?;:]+", re.sub("'(?:s|re)(?![a-z])", " is", rest))
    return said if negated or gives_reason(said, words, bool(mark), wanted) else None


AUXILIARIES = set("is are was were does do did has have can will would could".split())
PRONOUNS = set("there it he she they this that these those".split())
YES_NO_QUESTION_PATTERN = re.compile(
    rf"(?:{'|'.join(AUXILIARIES)}) (?:the|{'|'.join(PRONOUNS)}) "
)  # `is the statement true`
SAY_NOTHING = AUXILIARIES | PRONOUNS | IMAGE_WORDS | set("a an the any be seen visible present here in on of".split())


def split_contractions(text: str) -> list[str]:
    """`There isn't one.` -> there, is, not, one"""
    return re.sub("n't(?![a-z])", " not", text).rstrip(END).split()


def gives_reason(yes: bool, words: list[str], apart: bool, asked: list[str]) -> bool:
    """Whether what stands after yes or no, `apart` by a comma or not, agrees with it, as far as the words tell.

    `Yes, just kidding` has nothing of the question's, `No, there is a dog` says yes, and `no sofa` denies something
    else than the dog on the sofa that was asked for.
    """
    content, wanted = ([verb_stem(w) for w in of if w not in SAY_NOTHING] for of in (words, asked))
    if yes:
        plain = SAY_NOTHING | CERTAIN | set(NUMBER_WORDS) | set(YES_NO_WORDS)
        return not words or any(w in plain or w.isdecimal() or verb_stem(w) in wanted for w in words)
    denies = not content or "no" in words
    if denies or apart or words[0] in {*PRONOUNS, *ARTICLES}:
        there = not denies and words[0] == "there" in asked[1:2] and content == wanted[: len(content)]
        return not there and parse_yes_no_sentence(" ".join(words), " ".join(asked)) is not True
    definite = asked[0] not in AUXILIARIES or {"the", *PRONOUNS} & set(asked[1:2]) - {"there"}
    return bool(definite) or content[0] in map(verb_stem, NEAR.split(" ".join(asked))[0].split())


def parse_yes_no_sentence(text: str, question: str) -> bool | None:
    """Yes or no in a sentence: it has all that was asked, as `There is no dog`, or is short, as `There isn't one`.

    None if it leaves something out (`There is a dog`, of a dog on the mat), adds something, or asks.
    """
    asked, words = split_contractions(question), split_contractions(text)
    said = [word for word in words if word not in NEGATIONS and word != "no"]
    if len(said) < 2 or not all(word.isalnum() for word in said) or HEDGES & {*said, *asked} or len(asked) < 2:
        return None
    if asked[0] not in AUXILIARIES or len(words) - len(said) > 1 or MODALS & set(said) - set(asked):
        return None
    content, wanted = ([verb_stem(w) for w in of if w not in SAY_NOTHING] for of in (said, asked))
    it_is = asked[1] == "there" and len(words) == len(said)  # `it is not` may be about anything
    named = asked[1] not in PRONOUNS - {"this", "that", "these", "those"}
    subject = words[0] in PRONOUNS and (asked[1] == words[0] or named or it_is)
    short = subject and said[1] == asked[0] and set(content) <= {verb_stem("one")}
    whole = content == wanted and words[0] in {*PRONOUNS, *ARTICLES, asked[1]}
    pronoun = words[0] in PRONOUNS - {"there"} and 0 < len(content) < len(wanted) and wanted[-len(content) :] == content
    return len(words) == len(said) if short or whole or pronoun else None


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
PLACED = re.compile(r"(in|on|at|inside|by|near|with|from|of|to|for) (.+)")  # `under` is half of the answer
ONE = re.compile(r"^(?:the )?one (?=on |in |at |with )| one$")


class QuestionContext(NamedTuple):
    """What a question leaves open: words known from it, how far a number may be off (absolute, and as a share of the
    truth), whether it counts, and the question itself."""

    known: frozenset[str] = frozenset()
    tolerance: tuple[Decimal, Decimal] = ZERO_TOLERANCE
    counting: bool = False
    question: str = ""


NO_QUESTION = QuestionContext()

# --- grading ------------------------------------------------------------------------------------------------------


def matches_truth(text: str, truth: str, asked: QuestionContext) -> bool:
    """Whether a cleaned answer means a cleaned truth."""
    if truth in YES_NO_WORDS:
        said = parse_yes_no(text, asked)
        return (parse_yes_no_sentence(text, asked.question) if said is None else said) == YES_NO_WORDS[truth]
    if IS_TIME.search(truth) and (time := parse_clock_time(truth)):
        given = parse_clock_time(text)
        return given is not None and given[:2] == time[:2] and time[2] in ("", given[2])
    if number := quantity(truth):
        # About 3 is 2 or 4 as well: no count. Of a measure it is the only way to say what one sees.
        value = quantity(text if asked.counting else APPROXIMATELY.sub("", text), asked.known)
        if value is None or abs(value[0] - number[0]) > asked.tolerance[0] + asked.tolerance[1] * abs(number[0]):
            return False
        if value[1] == number[1]:
            return True
        if not number[1]:  # `50 metres` of 50, but not `50%`, unless they were asked for
            wanted = ASKED_UNIT.search(asked.question)
            other = wanted and stem(wanted[1] or wanted[2]) in UNIT_WORDS
            return verb_stem(value[1]) in asked.known or not (asked.counting or other or value[1] == "percent")
        return not value[1] and verb_stem(number[1]) in asked.known
    (place, what), (other_place, other) = split_place(text), split_place(truth)
    return same_text(text, truth) or (same_text(what, other) and (not place or not other_place or place == other_place))


def same_text(text: str, truth: str) -> bool:
    """Equal after normalising: as they are, with `t-shirt`, `tshirt` and `t shirt` as one, or as lists in any order."""
    text, truth = DASH.sub(" ", text), DASH.sub(" ", truth)
    if FORMULA_PATTERN.fullmatch(truth):
        return as_written(text) == as_written(truth)
    if NUMBER_LIST_PATTERN.fullmatch(truth):  # `3,4` is not 34
        return (
            sorted(map(normalize_text, AND.split(text))) == sorted(map(normalize_text, AND.split(truth)))
            and text[0] not in "(["
        )
    if SIGN.search(text) or ("-" in text + truth and ("/" in text) != ("/" in truth)):  # `ab/cd` is not `ab-cd`
        return False
    if PLATE.sub(" ", normalize_text(text)) == PLATE.sub(" ", normalize_text(truth)) != "":
        return True
    words, wanted = plain_words(text), plain_words(truth)
    if stem("".join(words)) == stem("".join(wanted)) != "" and not re.search("[0-9]", text):
        return all(len(word) > 2 for word in words + wanted) or "-" in text + truth  # `base ball`, but not `gr ay`
    items = [sorted(map(normalize_text, AND.split(listed))) for listed in (text, truth)]
    return items[0] == items[1] and len(items[1]) > 1


def as_written(formula: str) -> str:
    """A cleaned formula without its spaces, the braces of single characters and brackets around one value."""
    text = re.sub(r"\{(\w)\}", r"\1", re.sub(r"(?<!\d) | (?!\d)", "", formula.replace("–", "-")))
    return text if "," in text else BRACKETS.sub(r"\1", text)


def split_place(text: str) -> tuple[str, str]:
    """`on the sofa` -> (on, the sofa); `the left one` -> ("", the left)"""
    text = ONE.sub("", text)
    found = PLACED.fullmatch(text)
    return (found[1], found[2]) if found else ("", text)


def parse_choice(text: str, choices: Sequence[str], asked: QuestionContext = NO_QUESTION) -> int | None:
    """Which choice a cleaned text names: `b`, `(b)`, `b. red`, `option b`, `red`; None if none, or more than one."""

    def is_choice(part: str, i: int) -> bool:
        return matches_truth(part, clean(str(choices[i])), asked)

    if found := CHOICE_REPLY_PATTERN.fullmatch(text):
        i = CHOICE_LETTERS.lower().index(found[2])
        if i < len(choices) and (not found[4] or is_choice(found[4], i)):
            return i
        if found[1] or found[3]:  # `b. blue`, where b is red
            return None
    named = [i for i in range(len(choices)) if is_choice(text, i)]
    return named[0] if len(named) == 1 else None


def extract_answer(response: str, finish_reason: str) -> str | None:
    """What the last box holds; of a response without a box, all of it, except for its thinking.

    None if thinking or the box does not end, if boxes hold different answers, if a plain answer was cut off, and with a
    special token.
    """
    rest = response.rpartition("</think>")[2]
    if "<think>" in rest or SPECIAL_TOKEN_PATTERN.search(rest):
        return None
    if not BOX_PATTERN.search(rest):
        answer = rest.strip() if finish_reason == "stop" else None
    else:
        answer = extract_boxed(rest)
    if answer is None or len(answer) > MAX_ANSWER_CHARS:
        return None
    return answer if all(rest.startswith(f"{answer}}}", box.end()) for box in BOX_PATTERN.finditer(rest)) else None


def offers_choices(question: str) -> bool:
    """Whether it asks for yes or no, or between answers: its words are an answer then."""
    return question.partition(" ")[0] in AUXILIARIES or bool(re.search(r" or |/", question))


def is_about_other_object(text: str, question: str) -> bool:
    """Whether it is about trucks alone (`the truck is red`, `3 trucks`), of a car next to the truck, or says something
    of the question's in another place: `the car next to the red truck is blue`, of a blue truck."""
    found = ABOUT.fullmatch(text)
    parts = (*(found.groups("") if found else ("", "", "")), *NEAR.split(question, maxsplit=1), "")[:5]
    subject, told, counted, asked, near = (
        {verb_stem(w) for w in WORD.findall(p) if w not in SAY_NOTHING} for p in parts
    )
    if told and told <= asked | near and subject & (asked | near) and not re.search("[0-9]", text):
        return not offers_choices(question) and not question.rstrip("?").endswith(parts[1].rstrip(END))
    said = counted if "how many" in question else subject
    return bool(said and asked - QUESTION_WORDS and not said & asked and said <= near)


def without_clause(text: str, question: str) -> str:
    """`in 2015, it was 3` and `3 dogs in 2015` -> `it was 3` and `3 dogs`, if the question has these words in a row."""
    first, _, rest = text.partition(", ")
    if (compared := THAN.search(text)) and compared[1] in question:  # `the bed is bigger than the sofa`
        text = text[: compared.start()]
    for both in BOTH.findall(question):  # `3 cats and dogs` are one number
        text = text.replace(both, both.replace(" and ", " "))
    if offers_choices(question):
        return text
    if rest and BEFORE.match(first) and f" {first}" in question:
        text, question = rest, question.replace(f" {first}", "")
    asked, words = split_contractions(question.rstrip("?")), text.rstrip(END).split()
    end = 0
    while end < min(len(words), len(asked)) - 1 and words[-1 - end] == asked[-1 - end]:
        end += 1
    rest = words[: len(words) - end] if end > 1 else words
    return " ".join(rest) if rest and rest[-1][-1] not in END else text  # `red, blue bus` are two


def without_subject(text: str, asked: QuestionContext) -> str:
    """`the car is red` -> `red`, if the words before the verb are the question's: `Is the car red or blue?`"""
    if found := IT_IS.fullmatch(text):
        return found[1]
    found = SUBJECT.fullmatch(" ".join(split_contractions(text)) if "n't" in text else text)
    if not found or all_known(found[1].split()[1:], asked.known):
        return found[2] if found else text
    return found[2] if found[1] in asked.question and not offers_choices(asked.question) else text


def without_known(text: str, known: frozenset[str]) -> str:
    """`made of wood` -> `wood`, `red bus` -> `red`: without the question's words at both ends. `red, blue` stays."""
    words = text.rstrip(END).split()
    if not all(word[0].isalnum() and word[-1].isalnum() for word in words):
        return text
    # An article is the next word's, so that neither `a dog` nor `car a` is choice A; in `A B` there is none.
    said = [w for w, after in zip_longest(words, words[1:], fillvalue="") if w not in ARTICLES or len(after) < 2]
    new = [i for i, word in enumerate(said) if not is_known(word, known)]
    rest = " ".join(said[new[0] : new[-1] + 1]) if new else ""
    return text if rest in ARTICLES else rest


@lru_cache(4096)  # a truth is met once for each of its samples
def references(truth: str) -> tuple[str, ...]:
    """The cleaned answers of a truth: itself, or those in its JSON list."""
    answers = from_json(truth)
    return tuple(clean(str(answer)) for answer in (answers if isinstance(answers, list) else [truth]))


@lru_cache(4096)
def choices_in(question: str) -> tuple[str, ...]:
    """The choices that a question ends with, as `A. red B. blue` or line by line; none if there are not two."""
    _, *parts = re.split(r"(?:^|[\s(])([A-Za-z])[.):]\s", question.removesuffix(INSTRUCTION))
    texts = tuple(text.strip().partition("\n")[0] for text in parts[1::2])
    return texts if len(texts) > 1 and CHOICE_LETTERS.startswith("".join(parts[::2]).upper()) else ()


def answer_kind(example: Any) -> str:
    return re.sub("[-_]", " ", str(example.extra.get("answer_type")).casefold())


def number_tolerance(example: Any) -> tuple[Decimal, Decimal]:
    """(absolute, share of the truth) that a number may be off, of the column `tolerance`."""
    text = str(example.extra.get("tolerance") or 0).strip()
    if answer_kind(example) in COUNTING_TYPES:
        return ZERO_TOLERANCE
    with suppress(InvalidOperation):
        number = Decimal(text.removesuffix("%"))
        if number.is_finite() and 0 <= number:
            return (Decimal(0), number / 100) if text.endswith("%") else (number, Decimal(0))
    raise UserError(f"row {example.uid!r}: tolerance is {text!r}; write a number such as 0.5, or a share such as 5%")


def answerable(truth: str, earned: Callable[[str], dict[str, float]]) -> bool:
    """Return whether one of the references, written as an answer, is right; none of an object or a hole in the data."""
    if isinstance(from_json(truth), dict) or {"nan", "null"}.issuperset(references(truth)):
        count("bad_truth")
        return False
    return any(earned(reference)["accuracy"] for reference in references(truth))


@register("vqa", "vqav2", answerable=answerable)
def vqa(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    r"""0.9 * accuracy + 0.1 * format; format: an optional `<think>...</think>`, then one box, and nothing else.

    accuracy = min(n / 3, 1), where n of the references say the same (of one or two: n / 1 or n / 2). Raises UserError
    for a `tolerance` that is no number, and for a truth that is none of the row's `choices`.
    """
    question = "\n".join(m["content"] for m in example.messages if m["role"] == "user")
    tolerance, truths = number_tolerance(example), references(example.ground_truth)
    choices = from_json(example.extra.get("choices")) or ()
    if answer_kind(example) == MULTIPLE_CHOICE and not choices:
        choices = choices_in(question)
    options = ", ".join(map(str, choices))
    for truth in truths if choices else ():
        need(parse_choice(truth, choices) is not None,
             f"row {example.uid!r}: ground_truth {truth!r} is none of the choices {options}; correct or remove it")
    answer = extract_answer(response, finish_reason)
    other = re.search(r"\?|[0-9] ?!", answer or "")  # `Red?` asks, and `3!` is 6
    if answer is None or other and other[0][-1] not in example.ground_truth:
        return accuracy_and_format_reward(0.0, 0.0)
    tolerance = ZERO_TOLERANCE if choices else tolerance
    asked = make_question_context(question, tolerance, answer_kind(example) in COUNTING_TYPES, tuple(map(str, choices)))
    if "\n" in answer.strip():  # lines are no sentence
        asked = asked._replace(known=frozenset())

    def is_right(text: str, truth: str) -> bool:
        if choices:
            return parse_choice(text, choices, asked) == parse_choice(truth, choices)
        return matches_truth(text, truth, asked) and not (truth in YES_NO_WORDS and YES_NO_QUESTION_PATTERN.match(said))

    said = clean(answer)
    readings = [
        strip_question_words(text, asked)
        for text in split_gloss(said if choices else without_label(said, asked.counting))
    ]
    hits = 0
    for truth in truths:  # the brackets of a formula say something
        texts_of = [strip_question_words(said, asked)] if FORMULA_PATTERN.fullmatch(truth) and not choices else readings
        hits += all(any(is_right(text, truth) for text in texts) for texts in texts_of)
    accuracy = min(hits / max(1, min(3, len(truths))), 1.0)
    return accuracy_and_format_reward(accuracy, has_only_box(response, answer))


@lru_cache(1024)
def make_question_context(
    question: str, tolerance: tuple[Decimal, Decimal], counting: bool, choices: tuple[str, ...]
) -> QuestionContext:
    text = question[:4000].replace(IMAGE_PLACEHOLDER, " ").replace(INSTRUCTION, " ")
    text = clean(FIRST_CHOICE.split(text)[0] if choices else text)
    hints = " ".join(words for hint, words in HINTS.items() if re.search(rf"\b(?:{hint})\b", text))
    known = known_words(question) | set(map(verb_stem, hints.split()))
    known -= set(map(verb_stem, WORD.findall(clean(" ".join(choices)))))  # what they say is an answer
    sentence, mark, _ = text.rpartition("?")  # `Answer in \boxed{}.` may stand before it
    sentence = re.split("[.:!?] ", sentence)[-1] + "?" if mark else text
    return QuestionContext(known, tolerance, counting or "how many" in text, sentence)


def without_label(text: str, counting: bool) -> str:
    """`dogs: 3` -> `3 dogs` where dogs are counted, `statement: true` -> `true statement`, `(3)` -> `3`"""
    text = BRACKETS.sub(r"\1", text)
    found = LABELLED.fullmatch(text)
    labelled = found and (found[2] in YES_NO_WORDS or counting and number_at([found[2]]))
    return f"{found[2]} {found[1]}" if labelled else text


def split_gloss(text: str) -> list[str]:
    """`3 (three) dogs` says it twice, and both have to be right; anything else once."""
    found = GLOSS.fullmatch(text)
    return [" ".join(f"{found[1]} {found[3]}".split()), found[2]] if found else [text]


def strip_question_words(text: str, asked: QuestionContext) -> list[str]:
    """An answer without the subject of its sentence, and without the question's words around it."""
    if is_about_other_object(text, asked.question):
        return []
    short = without_clause(text, asked.question)
    rest = without_known(short, asked.known)
    rest = short if rest == "no" else rest  # `no sofa` is judged as a whole
    return [text, without_subject(text, asked), short, without_subject(short, asked), rest]


# --- data ---------------------------------------------------------------------------------------------------------


def rows(cfg: ToyConfig) -> Iterator[RawRow]:
    """Rows {image, question, answer, type} of .jsonl, .csv or .parquet files, or of a folder of parquet shards."""
    return any_rows(cfg, (), lambda record, root: to_columns(record, cfg.prompt_key, cfg.answer_key))


def to_columns(record: dict, question_key: str, answer_key: str) -> dict:
    """Return a row as it is kept: `type` becomes answer_type, choices (or `options`) are listed below the question, and
    the answer becomes the letter of one. Raises UserError with the reason."""
    answer, choices = from_json(record.get(answer_key)), from_json(record.get("choices", record.get("options")))
    if isinstance(answer, list):  # VQA's own are {"answer": ..., "answer_id": ...}
        people = any(isinstance(a, dict) for a in answer)
        answer = [unwrap_truth(str(a.get("answer", "") if isinstance(a, dict) else a)) for a in answer]
        need(answer, "the answer is an empty list")
        if len(answer) == 2 and not people:  # two forms of one answer, as MMMU's: each is right by itself
            answer = answer * 3
    row = {"data_source": "vqa", **record, answer_key: answer}
    if kind := row.pop("type", None):
        row.setdefault("answer_type", kind)
    if choices:
        choices = list(choices.values()) if isinstance(choices, dict) else choices
        need(isinstance(choices, list) and 2 <= len(choices) <= len(CHOICE_LETTERS),
             f"choices is {choices!r}, expected a list of 2 to {len(CHOICE_LETTERS)} texts")
        row["choices"] = [str(choice) for choice in choices]
        row[answer_key] = choice_letter(answer, choices)
        row[question_key] = with_choices(row.get(question_key), row["choices"])
    return row


def from_json(value: object) -> object:
    """Read a list or an object in a cell of a csv file, which is JSON, or as Python prints it, in MMMU's options."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(value.strip())
    return value


def choice_letter(answer: object, choices: list) -> str:
    """Return the letter of the choice that an answer names by letter, by text or, as in ScienceQA, by its index from 0
    (an integer, if all choices are texts). Raises UserError if it names two, or none."""
    text, names = clean(unwrap_truth(str(answer))), list(map(str, choices))
    by_text = {i for i, choice in enumerate(names) if text == clean(choice)}
    by_text = by_text or {i for i, choice in enumerate(names) if normalize_text(text) == normalize_text(clean(choice))}
    by_place = {CHOICE_LETTERS.lower().index(text)} if re.fullmatch("[a-z]", text) else set()
    by_place |= {answer} if type(answer) is int and names == choices else set()
    named = by_text | {i for i in by_place if 0 <= i < len(choices)}
    if not named and (found := parse_choice(text, names)) is not None:  # `(B)`, `B. blue`
        named = {found}
    told = f"answer {answer!r} names {len(named)} of the choices {', '.join(names)}; give the letter or text of one"
    if len(by_text) == len(by_place) == 1:
        told += f" (its text is {CHOICE_LETTERS[min(by_text)]}, its place is {CHOICE_LETTERS[min(by_place)]})"
    need(len(named) == 1, told)
    return CHOICE_LETTERS[named.pop()]


def with_choices(question: object, choices: list[str]) -> str:
    need(isinstance(question, str), f"question is a {type(question).__name__}, expected a string where choices are")
    lines = [f"{CHOICE_LETTERS[i]}. {choice}\n" for i, choice in enumerate(choices)]
    return f"{question}\n{''.join(lines)}"  # the last line ends too: an instruction may follow


# --- toy ----------------------------------------------------------------------------------------------------------

KINDS = {"count": "counting", "colour": "attribute", "exists": "existence", "shape": "open"}
TOY_TYPES = (*KINDS.values(), MULTIPLE_CHOICE)
DEMO = {"see_steps": 280, "habit_steps": 60, "images": 24, "questions": 3, "steps": 40}  # of demo.py


def scenes(split: str, seed: int) -> Iterator[Scene]:
    """The images of the shapes task without its angles."""
    rng = random.Random(f"vqa/{split}/{seed}")
    for images, asked in drawings(split, seed):
        questions = [(KINDS[kind], question, answer) for kind, question, answer in asked if kind in KINDS]
        if questions:
            count, colour, shape = (answer for _, _, answer in questions[:3])
            choices = rng.sample(list(COLOURS), len(COLOURS))
            question = with_choices("Which colour do you see?", choices)
            questions.append((MULTIPLE_CHOICE, question, CHOICE_LETTERS[choices.index(colour)]))
            seen = f"{count} {colour} {shape}"
            yield (
                images,
                [
                    (kind, f"{IMAGE_PLACEHOLDER}{text} {INSTRUCTION}", make_boxed_response(truth, seen), truth)
                    for kind, text, truth in questions
                ],
            )


toy = toy_of("vqa", scenes, TOY_TYPES, "question", "image", "answer")
