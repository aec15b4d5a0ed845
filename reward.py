"""Rewards: (response text, example) -> named parts, e.g. {"accuracy": 1.0, "format": 1.0, "reward": 1.0}.

`score` picks the reward by the example's `data_source`; `--reward FILE.py:FUNCTION` replaces it (`load_reward`).
To add a task, write `@register("name") def name(response, example, finish_reason): return {..., "reward": total}`.

A policy writes whatever it likes into the box, `9**9**9**9` included, so nothing here hands its text to a computer
algebra system in this process. Answers are read by a small parser and evaluated to 80 digits under hard limits on
length, depth and magnitude: it cannot hang. What needs more algebra than that (unknown LaTeX commands, sets, implicit
equations) goes to math-verify in child processes, which are killed when they are late, and get so many seconds a step.
`grader_stats` counts every answer that could not be read, was refused, or timed out.
"""

import atexit
import decimal
import hashlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import re
import reprlib
import select
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import lru_cache, partial
from itertools import permutations
from pathlib import Path
from typing import Any

from errors import Note, UserError

MAX_ANSWER_CHARS = 1000  # a longer box is refused; it is no final answer
MAX_NESTING = 80  # brackets, powers and commands in one answer; about six Python frames each, of 1000
MAX_REWARD = 1e6  # a larger reward overflows what is computed from it in fp32
CAS_TIMEOUT_S = 3.0  # wall-clock seconds for one math-verify comparison
CAS_BUDGET_S = 20.0  # for all comparisons of one `score_batch`, however many hang
CAS_WORKERS = max(2, min(4, (os.cpu_count() or 2) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
CAS_START_S = 120.0  # importing sympy takes half a second from a local disk, far longer from a busy network one
CAS_MEMORY = 4 << 30  # bytes of address space of a child (Linux)

grader_stats: Counter[str] = Counter()
"""Since the start or the last `.clear()`. graded: answers compared; no_box: no complete box; bad_truth: the truth holds
no answer; unreadable: no such expression; refused: too long, deep or large; cas: sent to math-verify, of which
cas_timeout were killed and cas_crash died; cas_budget: no time left for it. All but graded and cas are graded as wrong."""

# --- the box and the format ---------------------------------------------------------------------------------------

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"[{}]")
_SPECIAL = re.compile(r"<\|[^<>|]{1,64}\|>")  # a special token, as `<|im_start|>`: kept visible by the engines, no text


def _boxes(response: str) -> list[re.Match]:
    return list(_BOX.finditer(response))


def _box_end(response: str, start: int) -> int | None:
    """Index of the brace that closes the box whose content starts at `start`; None if the text ends first."""
    depth = 1
    for brace in _BRACE.finditer(response, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def extract_boxed(response: str) -> str | None:
    r"""Content of the last `\boxed{...}` (or `\boxed {...}`, `\fbox{...}`); None if there is none or it is not closed.

    An unclosed last box means that the response was cut off while it was changing its answer, so an earlier box does
    not count (verl and mathruler decide the same). Braces are counted escaped or not, again as they do.
    """
    boxes = _boxes(response)
    if not boxes:
        return None
    end = _box_end(response, boxes[-1].end())
    return None if end is None else response[boxes[-1].end() : end]


def format_reward(response: str) -> float:
    r"""1.0 if the whole response is `<think>...</think>...\boxed{...}...` without special tokens, else 0.0.

    The language of verl's geo3k regex `<think>.*</think>.*\\boxed\{.*\}.*` (verl/utils/reward_score/geo3k.py, DOTALL,
    fullmatch), decided in linear time: taking each mark at its earliest place leaves the most room for the next.
    """
    if not response.startswith("<think>") or _SPECIAL.search(response):
        return 0.0
    at = len("<think>")
    for mark in ("</think>", "\\boxed{", "}"):
        at = response.find(mark, at)
        if at < 0:
            return 0.0
        at += len(mark)
    return 1.0


# --- normalising LaTeX --------------------------------------------------------------------------------------------


class _Unreadable(ValueError):
    """Not an expression this file can read; `stat` is the grader_stats key it is counted under."""

    stat = "unreadable"


class _Refused(_Unreadable):
    stat = "refused"


class _NeedsCas(_Unreadable):
    """Beyond the parser, but perhaps a fair answer: math-verify decides."""


_CHARS = str.maketrans("º˚−–—×·⋅∙•÷⁄∕∶⩽⩾≃≅$~’′", "°°---*****///:≤≥≈≈  ''")
_CHARS |= str.maketrans({"√": "\\sqrt ", "∛": "\\sqrt[3] ", "½": "\\frac12", "⅓": "\\frac13", "⅔": "\\frac23"})
_CHARS |= str.maketrans({"¼": "\\frac14", "¾": "\\frac34"})
_RAISED = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_LOWER = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_MEANINGS = {
    **{"\\frac ": "frac dfrac tfrac cfrac sfrac nicefrac", "^": "textsuperscript"},
    **{"*": "cdot times ast", "/": "div", ":": "colon", "±": "pm mp", "": "!"},
    **{"≈": "approx simeq cong sim", "≤": "le leq leqslant", "≥": "ge geq geqslant", "<": "lt", ">": "gt"},
    **{"∞": "infty", "=": "equiv", "…": "ldots dots cdots dotsc"},
    **{"≠": "ne neq", " or ": "lor vee", "°": "circ degree deg textdegree"},
    **{"∠": "angle measuredangle", "△": "triangle"},
    **{"π": "pi", "α": "alpha", "β": "beta", "γ": "gamma", "θ": "theta", "φ": "phi varphi", "'": "prime", "%": "%"},
    ";": "quad qquad",  # inside an answer it stands between two, and is no product
    " ": "$ ( ) [ ] , ; : displaystyle textstyle left right big Big bigl bigr Bigl Bigr bigg Bigg",
}
_COMMANDS = {name: meaning for meaning, names in _MEANINGS.items() for name in names.split()} | {" ": " "}
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")
_WRAPPERS = "text textbf textit textrm textsf texttt textup textnormal emph mbox operatorname overline underline"
_WRAPPERS += " widehat overarc arc mathrm mathbf mathit mathsf bm boldsymbol bf it rm sf large Large LARGE huge Huge"
_WRAPPER = re.compile(r"\\(?:" + "|".join(_WRAPPERS.split()) + r")(?![A-Za-z])\s*(?:\{([^{}\\]*)\})?")
_UNSEEN = re.compile(r"\\(?:left|right)\s*\.|\\(?:textcolor|color)\s*\{[a-z]+\}")
_SQRT, _PI_WORD = re.compile(r"(?<![A-Za-z\\])sqrt ?(?=[\d({])"), re.compile(r"(?<![A-Za-z\\_])pi(?![A-Za-z_])")
_THOUSANDS = re.compile(r"(?<![\d.,])(?<!\d )\d{1,3}(?:(?:,\d{3})+(?![\d,])|(?: \d{3})+(?! ?[\d/]))")
_MIXED = re.compile(
    r"(?<![\d.^])(\d{1,9})(?: ?\\frac ?(?:\{ ?(\d{1,9}) ?\} ?\{ ?(\d{1,9}) ?\}|(\d) ?(\d))| (\d{1,9})/(\d{1,9})(?!\d))"
)


def _mixed(match: re.Match) -> str:
    whole, over, under = (int(digits) for digits in match.groups() if digits is not None)
    return f"({whole}+{over}/{under})" if over < under else match.group()  # `2 \frac{3}{2}` stays a product


@lru_cache(4096)  # a truth is met once for each of its samples
def _normalise(text: str) -> str:
    """LaTeX or Unicode maths -> single spaces, `^ * / ≤ ≥ ≈ ° π`, bare words; frac, sqrt and the unknown stay LaTeX."""
    if len(text) > MAX_ANSWER_CHARS:
        raise _Refused(f"{len(text)} characters")
    text = _RAISED.sub(lambda m: f"^{{{m.group().translate(_LOWER)}}}", text.translate(_CHARS))
    text = unicodedata.normalize("NFKC", text).rstrip("\\ \t\n")
    text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text).replace("{,}", ",")  # `\\frac`: escaped once too often
    text = re.sub(r"(^|,)\s*\\q?quad\b|\\q?quad\s*(?=\\text|\\mathrm|$)", r"\1 ", text)
    text = _WRAPPER.sub(lambda m: f" {m.group(1) or ''} ", _UNSEEN.sub(" ", text))
    text = _COMMAND.sub(lambda m: _COMMANDS.get(m.group(1), m.group()), text)
    text = re.sub(r"^\s*\*\*([^*]*)\*\*\s*$", r"\1", text)  # Markdown's bold
    text = _PI_WORD.sub("π", _SQRT.sub(r"\\sqrt ", text))
    text = text.replace("**", "^").replace("<=", "≤").replace(">=", "≥")
    text = re.sub(r"(?<![A-Za-z\\])deg(?:rees?)?(?![A-Za-z])\.?", "°", " ".join(text.split()))
    text = re.sub(r"\{ ?\}(?= ?[\^°])", "", text)  # `48{}^\circ`
    text = re.sub(r"\^ ?(?:\{ ?° ?\}|°)|(?<=[\d)}]) ?\^ ?(?:\{ ?o ?\}|o(?![A-Za-z]))", "°", text)
    text = re.sub(r"\{ ?° ?\}", "°", text).replace("^ ", "^")
    if not re.search(r"[(\[]", text):  # `(1,000)` is a point
        text = _THOUSANDS.sub(lambda m: re.sub("[, ]", "", m.group()), text)
    text = _MIXED.sub(_mixed, text).removesuffix(".").strip()
    while text.startswith("{") and _box_end(text, 1) == len(text) - 1:  # braces around it all are invisible
        text = text[1:-1].strip()
    # Every nested call of the parser costs one of these characters, so this bounds its recursion.
    if len(text) > 2 * MAX_ANSWER_CHARS or len(re.findall(r"[(\[{^\\]", text)) > MAX_NESTING:
        raise _Refused(f"{text!r} is too deep")
    return text


def _squash(text: str) -> str:
    return re.sub(r"(?<!\d) | (?!\d)", "", text)  # the space in `4 8` stays: it is not 48


# --- evaluating ---------------------------------------------------------------------------------------------------

_CONTEXT = decimal.Context(prec=80, Emax=9999, Emin=-9999)  # 9**9**9 overflows at once instead of being computed
_CONTEXT.traps[decimal.Underflow] = True
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")
_LETTERS = re.compile("[A-Za-z]*")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
_NAME = re.compile(r"(?![A-Za-z]{3})[A-Za-zα-ω]'*(?:_(?:\{ ?\w{1,8} ?\}|\w))?")
_POINTS = (Decimal("1.0311"), Decimal("29.3"), Decimal("0.0137"), Decimal("1013.7"))  # where expressions with letters are compared
_CLOSE = Decimal("1e-40")  # half of the digits: cancellation may cost the others


@lru_cache(4096)
def _letter(name: str, point: Decimal) -> Decimal:
    """Between `point` and twice that (letters are lengths and angles here), the same in every process. 77 digits of a hash:
    no fraction, sum or product of a few letters is another letter or a short number by accident."""
    digest = hashlib.sha256(f"{name} at {point}".encode()).digest()
    return point * (1 + Decimal(int.from_bytes(digest)).scaleb(-78))


def _plus(a: Decimal, b: Decimal) -> Decimal:
    """a + b, exactly 0 if they cancel: the zero hidden in `\\sqrt{2}+\\sqrt{3}-\\sqrt{5+2\\sqrt{6}}` must not divide."""
    total, size, least = a + b, max(abs(a), abs(b)), min(abs(a), abs(b))
    if least < size * _CLOSE and least:
        raise _Refused("a sum of numbers too unlike for 80 digits")
    return total if abs(total) > size * _CLOSE else Decimal(0)


def _power(base: Decimal, exponent: Decimal) -> Decimal:
    value = base**exponent
    if not value.is_finite():  # 0^{-1} is Infinity, which `decimal` says without an error
        raise decimal.DivisionByZero("0 to a negative power")
    return value


class _Expression:
    """Recursive descent over one expression, evaluated as it is read; a letter has a fixed value at each point.

    sum := term (("+"|"-") term)*; term := signed (("*"|"/"|nothing) signed)*; power := atom ["^" signed] ["°"]
    """

    def __init__(self, text: str, point: Decimal = _POINTS[0]):
        self.text, self.point, self.at, self.letters = text, point, 0, False

    def value(self) -> Decimal | None:
        """To 80 digits, finite; None if it has no real value at this point: sqrt(x-50) has one elsewhere. Raises _Unreadable,
        _NeedsCas, or what `same_answer` lists."""
        try:
            value = self.sum()
        except decimal.InvalidOperation:
            if self.letters:
                return None
            raise
        self.expect("")
        return value

    def peek(self) -> str:
        while self.text[self.at : self.at + 1] == " ":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def take(self, choices: str) -> str:
        """The next character if it is one of `choices`, and moves past it; else ""."""
        char = self.peek() if self.peek() in choices else ""
        self.at += len(char)
        return char

    def expect(self, char: str) -> None:
        if self.peek() != char:
            raise _Unreadable(f"{self.text!r}: {self.peek()!r} instead of {char!r} at {self.at}")
        self.at += len(char)

    def sum(self) -> Decimal:
        total = self.term()
        while op := self.take("+-"):
            total = _plus(total, self.term() if op == "+" else -self.term())
        return total

    def term(self) -> Decimal:
        value = self.signed()
        while op := self.peek():
            if self.take("*/"):
                value = value * self.signed() if op == "*" else value / self.signed()
            elif op in "([{\\" or op.isalpha():  # not a digit: `3 4` is no product
                value *= self.power()
            else:
                break
        return value

    def signed(self) -> Decimal:
        sign = 1
        while op := self.take("+-"):
            sign = -sign if op == "-" else sign
        return sign * self.power()

    def power(self) -> Decimal:
        value = self.atom()
        if self.take("^"):
            value = _power(value, self.signed())
        self.take("°")
        return value / 100 if self.take("%") else value

    def atom(self) -> Decimal:
        if start := self.take("([{"):
            value = self.sum()
            self.expect({"(": ")", "[": "]", "{": "}"}[start])
            return value
        if self.take("π"):
            return _PI
        if self.take("\\"):
            return self.function()
        if self.peek() and self.peek() in "|±∪":
            raise _NeedsCas(self.peek())
        if found := _NUMBER.match(self.text, self.at):
            self.at = found.end()
            return _CONTEXT.create_decimal(found.group())
        found = _NAME.match(self.text, self.at)  # `AB` is a product, `abc` is a word
        if not found:
            raise _Unreadable(f"{self.text!r}: cannot read {self.peek()!r} at {self.at}")
        self.at, self.letters = found.end(), True
        return _letter(re.sub(r"[{} ]", "", found.group()), self.point)

    def function(self) -> Decimal:
        name = _LETTERS.match(self.text, self.at).group()
        self.at += len(name)
        if name == "frac":
            return self.argument() / self.argument()
        if name != "sqrt":
            raise _NeedsCas(f"\\{name}")
        index = self.atom() if self.peek() == "[" else 2
        value = self.atom()  # `\sqrt41` is meant as \sqrt{41}
        root = abs(value).sqrt() if index == 2 else _power(abs(value), 1 / index)
        return root if value >= 0 else -root if index % 2 == 1 else value.sqrt()  # the last one signals

    def argument(self) -> Decimal:
        digit = self.take("0123456789")  # `\frac12` is 1/2, as in TeX
        return Decimal(digit) if digit else self.atom()


@lru_cache(4096)
def _value(text: str, point: Decimal = _POINTS[0]) -> tuple[Decimal | None, bool]:
    """(value, whether letters occur); see `_Expression.value`."""
    expression = _Expression(text, point)
    return expression.value(), expression.letters


def _same_value(prediction: str, truth: str) -> bool:
    compared = False
    for point in _POINTS:
        try:
            (a, letters), (b, truth_letters) = _value(prediction, point), _value(truth, point)
        except _NeedsCas:
            return _cas_same(prediction, truth)
        if a is None and b is None:
            continue
        if a is None or b is None or abs(a - b) > _CLOSE * max(abs(a), abs(b)):
            return False
        if not letters and not truth_letters:
            return True
        compared = True
    return compared


def _cas_same(prediction: str, truth: str) -> bool:
    """math-verify sees two single values or equations, never a whole answer: of `|47| = 48` it would take the last."""
    if "%" in prediction + truth:
        raise _Unreadable("percent of what math-verify reads")
    return _cas.same(prediction.translate(_LATEX), truth.translate(_LATEX))


# --- comparing answers --------------------------------------------------------------------------------------------

_LENGTHS = {"mm": "1", "cm": "10", "m": "1000", "km": "1000000", "in": "25.4", "ft": "304.8", "yd": "914.4", "mi": "1609344"}
_UNITS = {"mm": "millimet", "cm": "centimet", "m": "met", "km": "kilomet"}
_UNITS = {f"{long}{end}": unit for unit, long in _UNITS.items() for end in ("er", "ers", "re", "res")}
_UNITS |= {name: name for name in _LENGTHS} | dict.fromkeys(("unit", "units"), "unit")
_UNITS |= dict(inch="in", inches="in", foot="ft", feet="ft", yard="yd", yards="yd", mile="mi", miles="mi")
_UNIT = re.compile(
    r"(?<![A-Za-z\\])(?:(sq)uare |(sq)\.? |(cu)bic |(cu)\.? )?"
    rf"({'|'.join(sorted(_UNITS, key=len, reverse=True))})\.? ?(?:\^ ?(?:([23])|\{{ ?([23]) ?\}}))?$"
)
_HEDGE = re.compile(r"\b(?:or|to|vs|no|(?i:either|maybe|and|not|never|but|isn|nan|inf|infinity))\b|[;?]")  # OR and NO are segments
_NOTHING = {"", "none", "null", "nan", "n/a"}
# Before `=`: AB, m ∠A, ∠ 1, x_1, f(x), Area of △ABC, nothing. No number of its own, as in `x 47`.
_NAME_PART = r"(?:(?:m ?)?[∠△] ?\w+|[A-Za-zα-ωΔ]+\d*'*(?:_(?:\{ ?\w+ ?\}|\w))?)"
_NAMED = re.compile(rf"(?!.*π)(?=.{{,60}}$)[ {{(]*{_NAME_PART}(?:[ {{(}}):]+{_NAME_PART})*[ }}):]*|")
_BARE = re.compile(r"(?<![A-Za-z\\])[A-Za-zα-ωΔ]")
_CHOICE = re.compile(r"(?:(?:option|choice|answer) ?:? ?)?(?:\( ?([A-Z]) ?\)|([A-Z]) ?(?:[.:)]|$)) ?(.*)", re.I)
_LATEX = str.maketrans({"π": "\\pi ", "*": "\\cdot ", "°": "^{\\circ}", "±": "\\pm ", "∪": "\\cup "})
_MIRROR = str.maketrans("<>≤≥", "><≥≤")


def _split(text: str, separators: str) -> tuple[list[str], str]:
    """Parts and separators of `text`, cut only outside brackets."""
    parts, found, depth = [""], "", 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and char in separators:
            parts.append("")
            found += char
        else:
            parts[-1] += char
    return [part.strip() for part in parts], found


def _without_unit(text: str) -> tuple[str, tuple[str, int] | None]:
    """(value, (unit, its power)), or (text, None); a lone `m` is a unit only if no other letter is used."""
    found, degrees = _UNIT.search(text), ("°", 1) if "°" in text else None
    value = text[: found.start()].strip() if found else ""
    if not value or (found.group(5) == "m" and re.search(r"(?<![A-Za-z\\])[A-Za-z]", value)):
        return text, degrees
    powers = {{"sq": 2, "cu": 3}.get(group) or int(group) for group in found.groups() if group and group != found.group(5)}
    if degrees or len(powers) > 1:
        raise _Unreadable(f"{text!r} has two units")
    return value, (_UNITS[found.group(5)], *(powers or {1}))


def _in_unit(text: str, unit: tuple[str, int] | None, other: tuple[str, int] | None) -> str | None:
    """A value in one unit as an expression in the other; None if they contradict. No unit, and `units`, go with any length."""
    if not unit or not other or unit == other:
        return text
    (name, power), (other_name, other_power) = unit, other
    if power != other_power or "°" in (name, other_name):
        return None
    return text if "unit" in (name, other_name) else f"({text})*({_LENGTHS[name]}/{_LENGTHS[other_name]})^{power}"


def _choice_is(prediction: str, letter: str) -> bool:
    found = _CHOICE.fullmatch(prediction)
    if not found or (found.group(1) or found.group(2)).upper() != letter or _HEDGE.search(prediction):
        return False
    # `B. 60` may repeat the option's text, but not name a second option.
    return "," not in found.group(3) and not re.search(r"(?<![A-Za-z\\])[A-H](?![A-Za-z])", found.group(3))


def _is_rounding(exact: str, rounded: str) -> bool:
    """Whether `rounded` is a plain decimal within half a unit of its last place of `exact`: 8.66 of 5√3, and not 8.6 or 26/3."""
    (exact, unit), (rounded, rounded_unit) = _without_unit(exact), _without_unit(rounded)
    numeral = re.fullmatch(r"-?(?:\d+\.?|\d*\.(\d+)) ?°?", rounded)
    if not numeral or (unit and rounded_unit and unit != rounded_unit):
        return False
    half = Decimal("0.5").scaleb(-len(numeral.group(1) or ""))
    values = [_value(exact, point)[0] for point in _POINTS]  # an `x - x` may occur, an `x` not
    return all(value is not None and abs(value - _value(rounded)[0]) <= half for value in values)


def _strip_names(text: str) -> tuple[set[str], list[str]]:
    """`AB = CD = 2*24 = 48` -> ({"AB", "CD"}, ["2*24", "48"])."""
    (*left, last), names = _split(text, "=")[0], set()
    while left and _NAMED.fullmatch(left[0]):
        name = re.sub(r"m? ?∠|△|[ {}()]", "", left.pop(0))
        names.add(min(name, name[::-1]))  # AB is BA
    return names - {""}, [*left, last]


def _same(prediction: str, truth: str, as_text: bool = True) -> bool:
    """Whether two normalised answers are the same one. Raises _Unreadable; each step removes one kind of structure.

    Without `as_text` equal text is not enough: the reader has to make something of it.
    """
    same = partial(_same, as_text=as_text)
    if not prediction or not truth:
        return False
    if _squash(prediction) == _squash(truth) and (as_text or _NAMED.fullmatch(truth) or truth.lstrip("+- ") == "∞"):
        return True

    items, truths = _split(prediction, ",")[0], _split(truth, ",")[0]
    if len(truths) > 1 and prediction.startswith("\\{") and prediction.endswith("\\}"):  # a set for a list
        items = _split(prediction[2:-2], ",")[0]
    if len(items) > 1 or len(truths) > 1:  # a list in any order, but never more answers than asked for
        orders = permutations(items) if len(items) == len(truths) <= 4 else []
        return any(all(map(same, order, truths)) for order in orders)

    (items, ops), (truths, truth_ops) = _split(prediction, "<>≤≥≠"), _split(truth, "<>≤≥≠")
    if ops or truth_ops:
        if ops[::-1].translate(_MIRROR) == truth_ops and all(map(same, items[::-1], truths)):
            return True
        return ops == truth_ops and all(map(same, items, truths))

    (name, _, value), exact = prediction.partition(":"), _without_unit(_split(truth, "=")[0][-1])[0]
    if name and value and ":" not in truth and _NAMED.fullmatch(name) and not _BARE.search(exact):
        prediction = f"{name}={value}"  # `x: 48`; of a truth with letters, as `x/y`, it is a ratio
    (names, items), (truth_names, truths) = _strip_names(prediction), _strip_names(truth)
    if len(truths) > 1:
        return prediction.count("=") == truth.count("=") and "≈" not in prediction and _cas_same(prediction, truth)
    if names and truth_names and not names & truth_names:
        return False
    if items != [prediction] or truths != [truth]:  # every value of a chain has to be right: `x = 47 = 48` is a hedge
        by_unit = {_without_unit(item)[1]: item for item in items}  # and `48 cm = 48 m`, whose truth is 48, too
        return all(same(item, truths[0]) for item in items) and all(same(a, b) for a, b in permutations(by_unit.values(), 2))

    items, truth = _split(prediction, "≈")[0], _split(truth, "≈")[0][-1]
    if len(items) > 1:
        items = items[1:] if _NAMED.fullmatch(items[0]) else items
        if len(items) == 2:  # `5\sqrt{3} \approx 8.66` is one answer if the two agree, and a hedge if not
            return _is_rounding(*items) and any(same(item, truth) for item in items)
        return len(items) == 1 and same(items[0], truth)

    if prediction[0] in "([" and truth[0] in "([" and prediction[-1] in ")]" and truth[-1] in ")]":
        items, truths = _split(prediction[1:-1], ",")[0], _split(truth[1:-1], ",")[0]
        if len(items) > 1 or len(truths) > 1:  # points, intervals
            brackets = prediction[0] == truth[0] and prediction[-1] == truth[-1]
            return brackets and len(items) == len(truths) and all(map(same, items, truths))

    items, truths = _split(prediction, ":")[0], _split(truth, ":")[0]
    if len(items) == len(truths) > 1:  # 4:6 is 2:3: each member against the same one, which is not 0
        some = next((i for i, member in enumerate(truths) if _value(member)[0]), 0)
        return all(_same_value(f"({a})/({items[some]})", f"({b})/({truths[some]})") for a, b in zip(items, truths, strict=True))
    prediction = f"({items[0]})/({items[1]})" if len(items) == 2 else prediction
    truth = f"({truths[0]})/({truths[1]})" if len(truths) == 2 else truth

    (prediction, unit), (truth, truth_unit) = _without_unit(prediction), _without_unit(truth)
    prediction = _in_unit(prediction, unit, truth_unit)
    return prediction is not None and _same_value(prediction, truth)


def _holds_answer(truth: str) -> bool:
    """Whether a normalised truth says anything: not if it is empty, a word for nothing, signs alone or a lone unit."""
    nothing = truth.casefold() in _NOTHING or not re.search(r"\w", truth) or _SPECIAL.search(truth)
    return not nothing and (truth == "m" or not _UNIT.fullmatch(truth))


def _readable(truth: str) -> bool:
    """Whether the reader or math-verify can make anything of a truth; words are compared as text."""
    text = _normalise(truth)
    if re.search(r"(?<!\\)\b[A-Za-z]{3}", text) or _CHOICE.fullmatch(text):
        return True
    try:
        with decimal.localcontext(_CONTEXT):
            return _same(text, text, as_text=False)
    except (_Unreadable, decimal.DecimalException):
        return False


def _verdict(prediction: str, answer: str) -> bool:
    if not _holds_answer(t := _normalise(answer)):  # a hole in the data: an answer to it cannot be right
        grader_stats["bad_truth"] += 1
        return False
    if _SPECIAL.search(prediction):
        raise _Unreadable("a special token in the answer")
    p = _normalise(prediction)
    if re.search(r"\\(?:boxed|fbox)", p):  # math-verify would read that box alone, and drop what stands around it
        raise _Unreadable("a box in the answer")
    if letter := re.fullmatch(r"\(? ?([A-H]) ?\)?", t):
        return _choice_is(p, letter.group(1))
    if re.fullmatch(r"[A-Za-z][A-Za-z -]{2,}", t):
        return p.casefold() == t.casefold()
    if (_HEDGE.search(p) and not _HEDGE.search(t)) or ("±" in p and "±" not in t):
        return False
    return _same(p, t)


def same_answer(prediction: str, answer: str) -> bool:
    r"""Whether a bare answer (the content of a box) is the same answer as the truth, by exact value (to 40 digits).

    Accepts other forms of the value (`\frac{48}{11}` for `4 \frac{4}{11}`), units where the truth has none or ones that
    can be converted (`48 cm` for `0.48 m`), degree signs, a name before `=`, `exact \approx rounded` if either is the truth
    and the second is the first rounded. `48\%` is 0.48 and nothing else. Rejects units that contradict (`30°` for `30 m`),
    rounded decimals of an exact truth and the reverse, special tokens, and every hedge (`3 or 4`, `3, 4`). Never raises
    and never hangs on a prediction; see `grader_stats`.
    """
    try:
        with decimal.localcontext(_CONTEXT):
            right = _verdict(prediction, answer)
    # The one place that says what a policy's text may raise. What is out of range is refused, what has no value unreadable.
    except (decimal.Overflow, decimal.Underflow, RecursionError, MemoryError):
        grader_stats["refused"] += 1
        right = False
    except _Unreadable as error:
        grader_stats[error.stat] += 1
        right = False
    except decimal.DecimalException:
        grader_stats["unreadable"] += 1
        right = False
    grader_stats["graded"] += 1
    return right


def grade_geometry(response: str, answer: str) -> bool:
    r"""Whether `response` answers a geometry problem whose truth is `answer` (a number, LaTeX, letter, ratio, ...).

    The answer is the last `\boxed{...}`; see `extract_boxed` and `same_answer`. A single line without any box or tag
    is taken as a bare answer, for calls by hand; the geo3k task (`score`) does not do that: there, no box is wrong.
    """
    boxed = extract_boxed(response)
    if boxed is None and len(response) <= MAX_ANSWER_CHARS and not re.search(r"\\f?box|</? ?[a-z]+ ?>|\n", response):
        boxed = response
    if boxed is None:
        grader_stats["no_box"] += 1
        return False
    return same_answer(boxed, answer)


# --- math-verify, at arm's length ---------------------------------------------------------------------------------


class _Later(Exception):
    """Says to `score_batch` that an answer waits for math-verify, so that all of a batch are asked together."""


class _Cas:
    """Child processes that run math-verify, started when first needed, kept, and killed when late; and their verdicts.

    Plain subprocesses of this file rather than multiprocessing: `spawn` would import train.py, and so torch, again,
    and `fork` is not safe beside CUDA and its threads. sympy can sit in one C call for hours without noticing a
    Python signal, so only SIGKILL ends it for certain.
    """

    def __init__(self):
        self.workers: dict[subprocess.Popen, tuple[tuple[str, str] | None, float] | None] = {}
        """None if idle, else what it was asked (None: it is starting) and when it is late."""
        self.verdicts: dict[tuple[str, str], bool] = {}  # a group repeats its answers; one that hangs costs its time once
        self.waiting: dict[tuple[str, str], None] | None = None  # while `score_batch` collects questions
        self.unsure: list[tuple[str, str]] = []  # without a reply: wrong in this batch, and asked again in the next
        self.left = math.inf  # seconds that the present batch may still spend here
        self.owner = 0  # pid: a forked copy of this process must not share the pipes
        self.lock = threading.Lock()

    def same(self, prediction: str, answer: str) -> bool:
        """Whether math-verify calls the two raw LaTeX strings the same; False, and counted, if that cannot be had in time."""
        pair = (prediction, answer)
        if pair not in self.verdicts:
            if self.waiting is not None and self.left > 0:
                self.waiting[pair] = None
                raise _Later
            self.ask([pair])
        if pair not in self.verdicts:
            grader_stats["cas_budget"] += 1
        return self.verdicts.get(pair, False)

    def ask(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Fill `verdicts` for new pairs, CAS_WORKERS at a time, as far as that goes in `left` seconds of asking."""
        with self.lock:
            if self.owner != os.getpid():
                self.workers, self.owner = {}, os.getpid()
                atexit.register(self.close)
            todo = [pair for pair in pairs if pair not in self.verdicts] if self.left > 0 else []
            began, until = None, math.inf  # the clock starts when a child is ready: a first import may take a minute
            try:
                while todo or any(state and state[0] for state in self.workers.values()):
                    now, idle = time.monotonic(), [worker for worker, state in self.workers.items() if state is None]
                    if began is None and idle:
                        began, until = now, now + self.left
                    if now >= until:
                        break
                    for worker in idle[: len(todo)]:
                        self.send(worker, todo.pop(0))
                    for _ in range(min(CAS_WORKERS - len(self.workers), len(todo))):
                        self.start()
                    self.collect(until)
            finally:  # also on KeyboardInterrupt: a late reply must never answer the next question
                for worker in [worker for worker, state in self.workers.items() if state and state[0]]:
                    self.kill(worker)
                if began is not None:
                    self.left = max(0.0, until - time.monotonic())

    def start(self) -> None:
        worker = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--cas-worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        self.workers[worker] = (None, time.monotonic() + CAS_START_S)

    def send(self, worker: subprocess.Popen, pair: tuple[str, str]) -> None:
        grader_stats["cas"] += 1
        self.workers[worker] = (pair, time.monotonic() + CAS_TIMEOUT_S)
        try:
            worker.stdin.write(json.dumps([*pair, CAS_TIMEOUT_S + 2.0]).encode() + b"\n")
        except BrokenPipeError:
            pass  # it is dead, and `collect` reads the end of its output

    def collect(self, until: float) -> None:
        """Wait for a reply, at most to the first time limit; take what is there and kill who is late."""
        active = {worker: state for worker, state in self.workers.items() if state}
        wait = min([until, *(late for _, late in active.values())]) - time.monotonic()
        readable, _, _ = select.select([worker.stdout for worker in active], [], [], max(0.0, wait))
        for worker, (pair, late) in active.items():
            if worker.stdout not in readable and time.monotonic() < late:
                continue
            line = worker.stdout.readline() if worker.stdout in readable else None  # b"" if it is dead
            self.workers[worker] = None
            if line not in (b"true\n", b"false\n", b"ready\n"):
                self.kill(worker)
                if pair is None:
                    raise RuntimeError(
                        f"the math-verify process did not start within {CAS_START_S:.0f} s; its error is above. "
                        "Try `python -c 'import math_verify'`; if that fails: pip install -r requirements.txt"
                    )
                grader_stats["cas_timeout" if line is None else "cas_crash"] += 1
                self.unsure += [pair] if pair else []
            if pair is not None:
                self.verdicts[pair] = line == b"true\n"
                if len(self.verdicts) > 4096:
                    del self.verdicts[next(iter(self.verdicts))]

    def kill(self, worker: subprocess.Popen) -> None:
        del self.workers[worker]
        worker.kill()
        worker.wait()
        worker.stdin.close()
        worker.stdout.close()

    def close(self) -> None:
        atexit.unregister(self.close)
        for worker in list(self.workers) if self.owner == os.getpid() else []:
            self.kill(worker)
        self.owner = 0


_cas = _Cas()


def close() -> None:
    """End the math-verify processes, if any run. The next answer that needs one starts it; exit calls this too."""
    with _cas.lock:
        _cas.close()


def _cas_worker() -> None:
    """Requests [prediction, truth, seconds] as JSON lines on stdin, `true` or `false` on stdout, until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not be taken for a reply
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (CAS_MEMORY, CAS_MEMORY))
    import logging

    import sympy
    from math_verify import LatexExtractionConfig, parse, verify

    def has_value(tree: object) -> bool:
        """Without a division by zero or a logarithm of it: sympy takes 48 + 0 * 0^{-1} for 48."""
        nodes = list(sympy.preorder_traversal(tree)) if isinstance(tree, sympy.Basic) else []
        poles = [n.base for n in nodes if isinstance(n, sympy.Pow) and n.exp.could_extract_minus_sign()]
        poles += [n.args[0] for n in nodes if isinstance(n, sympy.log)]
        return not any(n in (sympy.zoo, sympy.nan, sympy.oo, -sympy.oo) for n in nodes) and not any(p.equals(0) for p in poles)

    logging.disable(logging.CRITICAL)
    # If the trainer itself was killed nobody is left to kill us: the kernel does, without asking Python.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        prediction, truth, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        # math-verify's own timeouts are off: they use SIGALRM too, and a C loop never sees them.
        a, b = (
            parse(f"${text.strip().strip('$')}$", [LatexExtractionConfig()], parsing_timeout=None)
            for text in (prediction, truth)
        )
        same = bool(a and b) and has_value(a[0]) and verify(b, a, float_rounding=12, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write("true\n" if same else "false\n")
        replies.flush()


# --- tasks --------------------------------------------------------------------------------------------------------

REWARDS: dict[str, Callable[[str, Any, str], dict[str, float]]] = {}
_ALIASES = {"geometry3k": "geo3k"}
_ANSWER_TYPES = ("count", "colour", "shape", "exists", "angle")


def register(task: str) -> Callable:
    """Decorator: make `function(response, example, finish_reason) -> {"reward": total, ...}` the reward of `task`.

    A function that uses `same_answer` is called again for answers that wait for math-verify.
    """

    def add(function: Callable) -> Callable:
        if task in REWARDS:
            raise ValueError(f"task {task!r} already has the reward {REWARDS[task].__name__}; choose another name")
        REWARDS[task] = function
        return function

    return add


def task_name(data_source: str) -> str:
    """`hiyouga/geometry3k`, `Geometry3K` and `geo3k` -> `geo3k`: lower case, no owner, aliases resolved."""
    name = data_source.strip().lower().rsplit("/", 1)[-1]
    return _ALIASES.get(name, name)


def _total(accuracy: float, form: float) -> dict[str, float]:
    return {"accuracy": accuracy, "format": form, "reward": 0.9 * accuracy + 0.1 * form}  # verl's geo3k weights


@register("geo3k")
def geo3k(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    """0.9 * accuracy + 0.1 * format, on the text alone as verl does: a response cut off has no complete box."""
    boxed = extract_boxed(response)
    if boxed is None:
        grader_stats["no_box"] += 1
    return _total(float(boxed is not None and same_answer(boxed, example.ground_truth)), format_reward(response))


def _plain(text: str) -> str:
    text = " ".join(text.casefold().replace("$", " ").split())  # first: the patterns below are slow on runs of spaces
    text = re.sub(r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|it|rm|sf)|boldsymbol) ?\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\^? ?\{? ?\\(?:circ|degree) ?\}?|°|\bdegrees?\b", " ", text)
    return " ".join(text.split()).removesuffix(".").rstrip()


@register("shapes")
def shapes(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    r"""0.9 * accuracy + 0.1 * format; format: an optional `<think>...</think>`, then one box, and nothing else.

    Accuracy compares text, not values, after case, spaces, a final period and degree signs are dropped; nothing is never
    right. Special tokens stay, and are wrong. Raises ValueError if `extra["answer_type"]` is missing or unknown.
    """
    if example.extra.get("answer_type") not in _ANSWER_TYPES:
        raise UserError(
            f"row {example.uid!r}: answer_type {example.extra.get('answer_type')!r} is not one of "
            f"{', '.join(_ANSWER_TYPES)}; write it again with `python prepare_data.py shapes`"
        )
    boxed = extract_boxed(response)
    if boxed is None:
        grader_stats["no_box"] += 1
        return _total(0.0, 0.0)
    (*earlier, box), rest = _boxes(response), response.strip()
    if rest.startswith("<think>"):
        rest = rest[rest.find("</think>") + len("</think>") :].strip() if "</think>" in rest else ""
    form = not earlier and rest == response[box.start() : _box_end(response, box.end()) + 1] and not _SPECIAL.search(response)
    accuracy = len(boxed) <= MAX_ANSWER_CHARS and _plain(boxed) == _plain(example.ground_truth) != ""
    return _total(float(accuracy), float(form))


def _reward_of(example: Any) -> Callable[[str, Any, str], dict[str, float]]:
    task = task_name(example.data_source)
    if not isinstance(example.ground_truth, str):
        raise UserError(
            f"row {example.uid!r}: ground_truth is {example.ground_truth!r} ({type(example.ground_truth).__name__}); "
            "it must be a string, or JSON text for a structured truth"
        )
    if task not in REWARDS:
        raise UserError(
            f"row {example.uid!r}: no reward for data_source {example.data_source!r} (task {task!r}); known tasks: "
            f"{', '.join(sorted(REWARDS))}. Name the task with --data-source, or give your own with --reward FILE.py:FUNCTION"
        )
    return REWARDS[task]


def _short(value: Any) -> str:
    """A `repr` that fits on a line; that of a very long integer is an error."""
    huge = isinstance(value, int) and value.bit_length() > 256
    return f"an integer of {value.bit_length()} bits" if huge else f"{reprlib.repr(value)} ({type(value).__name__})"


def _checked(result: Any, uid: str, response: str) -> dict[str, float]:
    """A number, or a dict of numbers with the total under "reward", as a dict of floats of at most MAX_REWARD."""
    parts = result if isinstance(result, dict) else {"reward": result}
    if "reward" not in parts:
        raise UserError(f"row {uid!r}: the reward returned {reprlib.repr(parts)} without a total; add the key 'reward'")
    checked = {}
    for name, value in parts.items():
        if name in ("mean", "constant_groups", "unpenalised", "overlong"):
            raise UserError(f"row {uid!r}: reward part {name!r} has the name of a metric of train.py, reward/{name}; rename it")
        number = value.item() if getattr(value, "shape", None) == () else value  # numpy's and torch's scalars
        known = isinstance(number, numbers.Real | Decimal) and not (isinstance(number, Decimal) and number.is_nan())
        if not known or not abs(number) <= MAX_REWARD:
            raise UserError(
                f"row {uid!r}: reward part {name!r} is {_short(value)} for the response {response[:80]!r}; "
                f"return a finite number from -{MAX_REWARD:g} to {MAX_REWARD:g} (for a tensor: float(x))"
            )
        checked[str(name)] = float(number)
    return checked


def _called(function: Callable, response: str, example: Any, *more: str) -> dict[str, float]:
    """A reward function's checked result; what it raises says for which response."""
    with Note(f"raised by the reward of row {example.uid!r} for the response {response[:200]!r}"):
        return _checked(function(response, example, *more), example.uid, response)


def score(response: str, example: Any, *, finish_reason: str = "stop") -> dict[str, float]:
    """Named reward parts plus the total under "reward", by the example's task. Raises ValueError for an unknown task.

    `example` has data_source, ground_truth, extra (dict) and uid; `finish_reason` is the engine's, `stop` or `length`.
    """
    return _called(_reward_of(example), response, example, finish_reason)


def load_reward(spec: str | None) -> Callable[..., dict[str, float]]:
    """`score` for None; for `path/to/file.py:function` a callable like `score` around the user's function.

    The function is `(response, example) -> number or dict with "reward"`. Raises ValueError if the file or the
    function is missing or does not take two arguments; an error inside the file is the user's and passes through.
    The file may import its neighbours, except ones named like our own modules or installed ones, which come first.
    """
    if spec is None:
        return score
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name:
        raise UserError(f"--reward {spec!r}: expected FILE.py:FUNCTION, e.g. my_reward.py:score")
    if not Path(path).is_file():
        raise UserError(f"--reward {spec!r}: there is no file {path!r} (looked from {os.getcwd()})")
    module_spec = importlib.util.spec_from_file_location(f"custom_reward_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look a module up by its name
    if (folder := str(Path(path).resolve().parent)) not in sys.path:
        sys.path.append(folder)  # last, and kept: a function may import when it is called
    with Note(f"raised on importing --reward {spec!r}; modules of this project and installed ones come before its neighbours"):
        module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        state = "is not a function" if hasattr(module, name) else "does not exist"
        raise UserError(f"--reward {spec!r}: {name} {state} in {path}; it has: {', '.join(functions) or 'none'}")
    try:
        inspect.signature(function).bind("", None)
    except TypeError as error:
        raise UserError(f"--reward {spec!r}: {name} must take (response, example): {error}") from error

    def custom(response: str, example: Any, *, finish_reason: str = "stop") -> dict[str, float]:
        return _called(function, response, example)

    return custom


def try_reward(reward_fn: Callable, example: Any) -> None:
    """Call a custom reward once, with a plausible response, so that a broken one stops the run before a model loads."""
    if reward_fn is not score:
        before = grader_stats.copy()
        with Note("this was the trial call before the run"):
            reward_fn(f"<think>A trial.</think> \\boxed{{{example.ground_truth}}}", example)
        grader_stats.clear()
        grader_stats.update(before)


def check_tasks(examples: Iterable[Any], reward_fn: Callable = score) -> dict[str, int]:
    """Rows per task. Scores every row's truth as an answer to itself, so that bad data stops a run before a model loads.

    Raises ValueError as `score` does, and for a truth that no answer could equal (empty, `°`, `None`, broken LaTeX).
    A custom reward is not called: only rows are counted.
    """
    rows, before = Counter(), grader_stats.copy()
    for example in examples:
        task, truth = task_name(example.data_source), example.ground_truth
        if reward_fn is score and task == "geo3k" and task not in rows and importlib.util.find_spec("math_verify") is None:
            raise UserError("geo3k grading needs math-verify; pip install -r requirements.txt")
        if reward_fn is score:
            parts = score(f"\\boxed{{{truth}}}", example)
            if task in ("geo3k", "shapes") and not (parts["accuracy"] and (task == "shapes" or _readable(truth))):
                raise UserError(f"row {example.uid!r}: nothing could equal the ground_truth {truth[:80]!r}; correct or remove the row")
        rows[task] += 1
    grader_stats.clear()
    grader_stats.update(before)  # these responses are not the policy's
    return dict(rows)


def score_batch(
    responses: Sequence[str],
    examples: Sequence[Any],
    reward_fn: Callable = score,
    finish_reasons: Sequence[str] | None = None,
) -> list[dict[str, float]]:
    """Parts of each response, in order; one example (and finish reason) per response, repeated within a group.

    One call after another, in this thread; answers that need math-verify are put off and asked together, CAS_BUDGET_S
    in all, in as many rounds as an answer has questions that follow from each other: a list has up to 16.
    """
    reasons = ["stop"] * len(responses) if finish_reasons is None else finish_reasons
    if not len(responses) == len(examples) == len(reasons):
        raise ValueError(
            f"{len(responses)} responses, {len(examples)} examples and {len(reasons)} finish reasons; give one of each"
        )
    parts, later = [{}] * len(responses), list(range(len(responses)))
    _cas.left = CAS_BUDGET_S
    while _cas.unsure:  # late on a machine that was busy then
        _cas.verdicts.pop(_cas.unsure.pop(), None)
    try:
        while later:
            todo, later = later, []
            _cas.waiting = {} if reward_fn is score else None  # a custom function is called only once
            for i in todo:
                try:
                    parts[i] = reward_fn(responses[i], examples[i], finish_reason=reasons[i])
                except _Later:
                    later.append(i)
            asked, _cas.waiting = _cas.waiting, None
            _cas.ask(asked or ())
    finally:
        _cas.left, _cas.waiting = math.inf, None
    return parts


if __name__ == "__main__":
    if sys.argv[1:] != ["--cas-worker"]:
        raise SystemExit(__doc__)
    _cas_worker()
