"""Rewards: (response text, example) -> named parts, e.g. {"accuracy": 1.0, "format": 1.0, "reward": 1.0}.

`score` picks the reward by the example's `data_source`; `--reward FILE.py:FUNCTION` replaces it (`load_reward`).
To add a task, write `@register("name") def name(response, example, finish_reason): return {..., "reward": total}`.

A policy writes whatever it likes into the box, `9**9**9**9` included, so nothing here hands its text to a computer
algebra system in this process. Answers are read by a small parser and evaluated to 80 digits under hard limits on
length, depth and magnitude: it cannot hang. What needs more algebra than that (unknown LaTeX commands, sets, implicit
equations) goes to math-verify in a child process, which is killed when it is late. `grader_stats` counts every answer
that could not be read, was refused, or timed out.
"""

import atexit
import decimal
import importlib.util
import inspect
import json
import math
import numbers
import os
import re
import select
import signal
import subprocess
import sys
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any

from errors import UserError

MAX_ANSWER_CHARS = 1000  # a longer box is refused; it is no final answer
MAX_NESTING = 80  # brackets, powers and commands in one answer; about six Python frames each, of 1000
CAS_TIMEOUT_S = 3.0  # wall-clock seconds for one math-verify comparison
CAS_START_S = 120.0  # importing sympy takes half a second from a local disk, far longer from a busy network one
CAS_MEMORY = 4 << 30  # bytes of address space of the child (Linux)

grader_stats: Counter[str] = Counter()
"""Since the start or the last `.clear()`. graded: answers compared; no_box: no complete box; bad_truth: the truth is
empty or "None"; unreadable: no such expression; refused: too long, deep or large; cas: sent to math-verify, of which
cas_timeout were killed and cas_crash died. All but graded and cas are graded as wrong."""

# --- the box and the format ---------------------------------------------------------------------------------------

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"[{}]")


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
    r"""1.0 if the whole response is `<think>...</think>...\boxed{...}...`, else 0.0.

    The language of verl's geo3k regex `<think>.*</think>.*\\boxed\{.*\}.*` (verl/utils/reward_score/geo3k.py, DOTALL,
    fullmatch), decided in linear time: taking each mark at its earliest place leaves the most room for the next.
    """
    if not response.startswith("<think>"):
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
_CHARS |= str.maketrans({"¼": "\\frac14", "¾": "\\frac34"} | {c: f"^{i}" for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})
_MEANINGS = {
    **{"\\frac ": "frac dfrac tfrac cfrac", "*": "cdot times ast", "/": "div", ":": "colon", "±": "pm mp", "": "!"},
    **{"≈": "approx simeq cong sim", "≤": "le leq leqslant", "≥": "ge geq geqslant", "<": "lt", ">": "gt"},
    **{"≠": "ne neq", " or ": "lor vee", "°": "circ degree deg", "∠": "angle measuredangle", "△": "triangle"},
    **{"π": "pi", "α": "alpha", "β": "beta", "γ": "gamma", "θ": "theta", "φ": "phi varphi", "'": "prime", "%": "%"},
    " ": "$ ( ) [ ] , ; : quad qquad displaystyle textstyle left right big Big bigl bigr Bigl Bigr bigg Bigg",
}
_COMMANDS = {name: meaning for meaning, names in _MEANINGS.items() for name in names.split()} | {" ": " "}
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")
_WRAPPERS = "text textbf textit textrm mathrm mathbf mathit mathsf bm mbox operatorname overline widehat overarc arc"
_WRAPPER = re.compile(r"\\(?:" + "|".join(_WRAPPERS.split()) + r")\s*(?:\{([^{}\\]*)\})?")
_THOUSANDS = re.compile(r"(?<![\d.,])(?<!\d )\d{1,3}(?:(?:,\d{3})+(?![\d,])|(?: \d{3})+(?! ?[\d/]))")
_MIXED = re.compile(
    r"(?<![\d.^])(\d{1,9})(?: ?\\frac ?(?:\{ ?(\d{1,9}) ?\} ?\{ ?(\d{1,9}) ?\}|(\d) ?(\d))| (\d{1,9})/(\d{1,9})(?!\d))"
)


def _mixed(match: re.Match) -> str:
    whole, over, under = (int(digits) for digits in match.groups() if digits is not None)
    return f"({whole}+{over}/{under})" if over < under else match.group()  # `2 \frac{3}{2}` stays a product


def _normalise(text: str) -> str:
    """LaTeX or Unicode maths -> single spaces, `^ * / ≤ ≥ ≈ ° π`, bare words; frac, sqrt and the unknown stay LaTeX."""
    if len(text) > MAX_ANSWER_CHARS:
        raise _Refused(f"{len(text)} characters")
    text = unicodedata.normalize("NFKC", text.translate(_CHARS)).rstrip("\\ \t\n")
    text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text).replace("{,}", ",")  # `\\frac`: escaped once too often
    text = _WRAPPER.sub(lambda m: f" {m.group(1) or ''} ", text)
    text = _COMMAND.sub(lambda m: _COMMANDS.get(m.group(1), m.group()), text)
    text = text.replace("**", "^").replace("<=", "≤").replace(">=", "≥")
    text = re.sub(r"\^ ?(?:\{ ?° ?\}|°)", "°", " ".join(text.split())).replace("^ ", "^")
    if not re.search(r"[(\[]", text):  # `(1,000)` is a point
        text = _THOUSANDS.sub(lambda m: re.sub("[, ]", "", m.group()), text)
    text = _MIXED.sub(_mixed, text).removesuffix(".").rstrip()
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
_POINTS = (Decimal("1.0311"), Decimal("29.3"), Decimal("0.0137"))  # where expressions with letters are compared


class _Expression:
    """Recursive descent over one expression, evaluated as it is read; a letter has a fixed value at each point.

    sum := term (("+"|"-") term)*; term := signed (("*"|"/"|nothing) signed)*; power := atom ["^" signed] ["°"]
    """

    def __init__(self, text: str, point: Decimal = _POINTS[0]):
        self.text, self.point, self.at, self.letters = text, point, 0, False

    def value(self) -> Decimal:
        """To 80 digits; raises _Unreadable (also: no real value), _Refused (out of range) or _NeedsCas."""
        try:
            with decimal.localcontext(_CONTEXT):
                value = self.sum()
        except (decimal.Overflow, decimal.Underflow) as error:
            raise _Refused(f"{self.text!r} is out of range") from error
        except (decimal.InvalidOperation, decimal.DivisionByZero) as error:  # sqrt(x-50) may have one elsewhere
            raise (_NeedsCas if self.letters else _Unreadable)(f"{self.text!r} has no real value") from error
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
            total = total + self.term() if op == "+" else total - self.term()
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
            value **= self.signed()
        self.take("°")
        return value

    def atom(self) -> Decimal:
        if start := self.take("([{"):
            value = self.sum()
            self.expect({"(": ")", "[": "]", "{": "}"}[start])
            return value
        if self.take("π"):
            return _PI
        if self.take("\\"):
            return self.function()
        if self.peek() and self.peek() in "|±∞∪":
            raise _NeedsCas(self.peek())
        if found := _NUMBER.match(self.text, self.at):
            self.at = found.end()
            return _CONTEXT.create_decimal(found.group())
        found = _NAME.match(self.text, self.at)  # `AB` is a product, `abc` is a word
        if not found:
            raise _Unreadable(f"{self.text!r}: cannot read {self.peek()!r} at {self.at}")
        self.at, self.letters = found.end(), True
        key = re.sub(r"[{}_ ]", "", found.group())
        # Distinct, positive (letters are lengths and angles here), and the same in every process.
        return self.point * (1 + Decimal(sum(ord(c) * 31**i for i, c in enumerate(key)) * 7919 % 10007) / 3001)

    def function(self) -> Decimal:
        name = _LETTERS.match(self.text, self.at).group()
        self.at += len(name)
        if name == "frac":
            return self.argument() / self.argument()
        if name != "sqrt":
            raise _NeedsCas(f"\\{name}")
        index = self.atom() if self.peek() == "[" else 2
        value = self.atom()  # `\sqrt41` is meant as \sqrt{41}
        root = abs(value).sqrt() if index == 2 else abs(value) ** (1 / index)
        return root if value >= 0 else -root if index % 2 == 1 else value.sqrt()  # the last one signals

    def argument(self) -> Decimal:
        digit = self.take("0123456789")  # `\frac12` is 1/2, as in TeX
        return Decimal(digit) if digit else self.atom()


def _same_value(prediction: str, truth: str) -> bool:
    for point in _POINTS:
        left, right = _Expression(prediction, point), _Expression(truth, point)
        a, b = left.value(), right.value()
        # 40 of 80 digits: a rounded decimal never equals a surd, while cancellation may cost half of the digits.
        if abs(a - b) > Decimal("1e-40") * max(abs(a), abs(b)) and max(abs(a), abs(b)) > Decimal("1e-50"):
            return False
        if not left.letters and not right.letters:
            break
    return True


# --- comparing answers --------------------------------------------------------------------------------------------

_UNITS = {"mm": "millimet", "cm": "centimet", "m": "met", "km": "kilomet"}
_UNITS = {f"{long}{end}": unit for unit, long in _UNITS.items() for end in ("er", "ers", "re", "res")}
_UNITS |= {name: name for name in ("mm", "cm", "m", "km", "in", "ft", "yd", "mi")}
_UNITS |= dict(inch="in", inches="in", foot="ft", feet="ft", yard="yd", yards="yd", mile="mi", miles="mi")
_UNITS |= dict.fromkeys(("unit", "units", "degree", "degrees", "deg"), "any")
_UNIT = re.compile(
    r"(?<![A-Za-z\\])(?:(sq)uare |(sq)\.? |(cu)bic |(cu)\.? )?"
    rf"({'|'.join(sorted(_UNITS, key=len, reverse=True))})\.? ?(?:\^ ?\{{? ?([23]) ?\}}?)?$"
)
_HEDGE = re.compile(r"\b(?:or|and|either|to|vs|maybe)\b|[;?]", re.IGNORECASE)
_NOTHING = {"", "none", "null", "nan", "n/a"}
_NAMED = re.compile(r"(?!.*π)[ {(]*[∠△A-Za-zα-ω][\w∠△ '{}():]{0,60}|")  # before `=`: AB, m ∠A, x_1, Area, nothing
_CHOICE = re.compile(r"(?:(?:option|choice|answer) ?:? ?)?(?:\( ?([A-Z]) ?\)|([A-Z]) ?(?:[.:)]|$)) ?(.*)", re.I)
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


def _without_unit(text: str) -> tuple[str, str]:
    """(value, unit), unit "" if there is none; a lone `m` is a unit only if no other letter is used."""
    if text.endswith("%"):
        return text[:-1], "%"
    found = _UNIT.search(text)
    value = text[: found.start()].strip() if found else ""
    if not value or (found.group(5) == "m" and re.search(r"(?<![A-Za-z\\])[A-Za-z]", value)):
        return text, ""
    size = {"sq": "2", "cu": "3"}.get("".join(filter(None, found.groups()[:4])), found.group(6) or "")
    unit = _UNITS[found.group(5)]
    return value, unit if unit == "any" else unit + size


def _choice_is(prediction: str, letter: str) -> bool:
    found = _CHOICE.fullmatch(prediction)
    if not found or (found.group(1) or found.group(2)).upper() != letter or _HEDGE.search(prediction):
        return False
    # `B. 60` may repeat the option's text, but not name a second option.
    return "," not in found.group(3) and not re.search(r"(?<![A-Za-z\\])[A-H] ?[.:)]", found.group(3))


def _is_rounding(exact: str, rounded: str) -> bool:
    """Whether the decimal `rounded` is `exact` rounded or cut at its last digit."""
    (exact, _), (rounded, _) = _without_unit(exact), _without_unit(rounded)
    last = Decimal(1).scaleb(-len(rounded.rstrip("° ").partition(".")[2]))
    return abs(_Expression(exact).value() - _Expression(rounded).value()) < last


def _strip_names(text: str) -> tuple[set[str], list[str]]:
    """`AB = CD = 2*24 = 48` -> ({"AB", "CD"}, ["2*24", "48"])."""
    (*left, last), names = _split(text, "=")[0], set()
    while left and _NAMED.fullmatch(left[0]):
        names.add("".join(sorted(re.sub(r"m? ?∠|△|[ {}()_]", "", left.pop(0)))))  # sorted: AB is BA
    return names - {""}, [*left, last]


def _same(prediction: str, truth: str) -> bool:
    """Whether two normalised answers are the same one. Raises _Unreadable; each step removes one kind of structure."""
    if not prediction or not truth:
        return False
    if _squash(prediction) == _squash(truth):
        return True

    items, truths = _split(prediction, ",")[0], _split(truth, ",")[0]
    if len(items) > 1 or len(truths) > 1:  # a list in any order, but never more answers than asked for
        orders = permutations(items) if len(items) == len(truths) <= 4 else []
        return any(all(map(_same, order, truths)) for order in orders)

    (items, ops), (truths, truth_ops) = _split(prediction, "<>≤≥≠"), _split(truth, "<>≤≥≠")
    if ops or truth_ops:
        if ops[::-1].translate(_MIRROR) == truth_ops and all(map(_same, items[::-1], truths)):
            return True
        return ops == truth_ops and all(map(_same, items, truths))

    (names, items), (truth_names, truths) = _strip_names(prediction), _strip_names(truth)
    if len(truths) > 1:
        raise _NeedsCas("equation")
    if names and truth_names and not names & truth_names:
        return False
    if items != [prediction] or truths != [truth]:  # every value of a chain has to be right: `x = 47 = 48` is a hedge
        return all(_same(item, truths[0]) for item in items)

    items, truth = _split(prediction, "≈")[0], _split(truth, "≈")[0][-1]
    if len(items) > 1:
        items = items[1:] if _NAMED.fullmatch(items[0]) else items
        if len(items) == 2:  # `5\sqrt{3} \approx 8.66` is one answer if the two agree, and a hedge if not
            return _is_rounding(*items) and any(_same(item, truth) for item in items)
        return len(items) == 1 and _same(items[0], truth)

    if prediction[0] in "([" and truth[0] in "([" and prediction[-1] in ")]" and truth[-1] in ")]":
        items, truths = _split(prediction[1:-1], ",")[0], _split(truth[1:-1], ",")[0]
        if len(items) > 1 or len(truths) > 1:  # points, intervals
            brackets = prediction[0] == truth[0] and prediction[-1] == truth[-1]
            return brackets and len(items) == len(truths) and all(map(_same, items, truths))

    items, truths = _split(prediction, ":")[0], _split(truth, ":")[0]
    if len(items) == len(truths) > 1:  # 4:6 is 2:3: each member against the first
        first, wanted = items[0], truths[0]
        return all(_same_value(f"({a})({wanted})", f"({b})({first})") for a, b in zip(items, truths, strict=True))
    prediction = f"({items[0]})/({items[1]})" if len(items) == 2 else prediction
    truth = f"({truths[0]})/({truths[1]})" if len(truths) == 2 else truth

    (prediction, unit), (truth, truth_unit) = _without_unit(prediction), _without_unit(truth)
    if "%" in (unit, truth_unit) and unit != truth_unit and not _same_value(prediction, truth):
        return _same_value(f"({prediction})/100", truth) if unit == "%" else _same_value(prediction, f"({truth})/100")
    clash = unit and truth_unit and unit != truth_unit and "any" not in (unit, truth_unit)
    return not clash and _same_value(prediction, truth)


def same_answer(prediction: str, answer: str) -> bool:
    r"""Whether a bare answer (the content of a box) is the same answer as the truth, by exact value.

    Accepts other forms of the value (`\frac{48}{11}` for `4 \frac{4}{11}`), units, degree signs, a name before `=`,
    `exact \approx rounded`, percent for its fraction. Rejects rounded decimals of an exact truth and the reverse, and
    every hedge (`3 or 4`, `3, 4`). Never raises and never hangs on a prediction; see `grader_stats`.
    """
    grader_stats["graded"] += 1
    if answer.strip().casefold() in _NOTHING:  # a hole in the data: an answer to it cannot be right
        grader_stats["bad_truth"] += 1
        return False
    try:
        p, t = _normalise(prediction), _normalise(answer)
        if letter := re.fullmatch(r"\(? ?([A-H]) ?\)?", t):
            return _choice_is(p, letter.group(1))
        if re.fullmatch(r"[A-Za-z][A-Za-z -]{2,}", t):
            return p.casefold() == t.casefold()
        if (_HEDGE.search(p) and not _HEDGE.search(t)) or ("±" in p and "±" not in t):
            return False
        return _same(p, t)
    except _NeedsCas:
        return _cas_same(prediction, answer)
    except _Unreadable as error:
        grader_stats[error.stat] += 1
        return False


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


class _Cas:
    """One child process that runs math-verify, started when first needed, kept, and killed when late.

    A plain subprocess of this file rather than multiprocessing: `spawn` would import train.py, and so torch, again,
    and `fork` is not safe beside CUDA and its threads. sympy can sit in one C call for hours without noticing a
    Python signal, so only SIGKILL ends it for certain.
    """

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.owner = 0  # pid: a forked copy of this process must not share the pipes
        self.lock = threading.Lock()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--cas-worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        self.owner = os.getpid()
        atexit.register(self.close)
        if self.read(CAS_START_S) != b"ready\n":
            self.close()
            raise RuntimeError(
                f"the math-verify process did not start within {CAS_START_S:.0f} s; its error is above. "
                "Try `python -c 'import math_verify'`; if that fails: pip install -r requirements.txt"
            )

    def read(self, seconds: float) -> bytes | None:
        """One line; b"" if the child is dead, None if it is late."""
        readable, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if readable else None

    def same(self, prediction: str, answer: str) -> bool:
        """Whether math-verify calls the two raw LaTeX strings the same; False, and counted, if it is late or dies."""
        grader_stats["cas"] += 1
        with self.lock:
            if self.process is None or self.owner != os.getpid():
                self.start()
            line = None
            try:
                request = json.dumps([prediction, answer, CAS_TIMEOUT_S + 2.0])
                self.process.stdin.write(request.encode() + b"\n")
                line = self.read(CAS_TIMEOUT_S)
            except BrokenPipeError:
                line = b""
            finally:  # also on KeyboardInterrupt: a late reply must never answer the next question
                if line not in (b"true\n", b"false\n"):
                    self.close()
        if line is None:
            grader_stats["cas_timeout"] += 1
        elif line == b"":
            grader_stats["cas_crash"] += 1
        return line == b"true\n"

    def close(self) -> None:
        process, self.process = self.process, None
        atexit.unregister(self.close)
        if process is not None and self.owner == os.getpid():
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


_cas = _Cas()
_cas_same = lru_cache(1024)(_cas.same)  # a group repeats its answers; one that hangs must cost its timeout only once


def close() -> None:
    """End the math-verify process, if one runs. The next answer that needs it starts another; exit calls this too."""
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

    from math_verify import LatexExtractionConfig, parse, verify

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
        same = bool(a and b) and verify(b, a, float_rounding=12, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write("true\n" if same else "false\n")
        replies.flush()


# --- tasks --------------------------------------------------------------------------------------------------------

REWARDS: dict[str, Callable[[str, Any, str], dict[str, float]]] = {}
_ALIASES = {"geometry3k": "geo3k"}
_ANSWER_TYPES = ("count", "colour", "shape", "exists", "angle")


def register(task: str) -> Callable:
    """Decorator: make `function(response, example, finish_reason) -> {"reward": total, ...}` the reward of `task`."""

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
    text = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\^? ?\{? ?\\(?:circ|degree) ?\}?|°|\bdegrees?\b", " ", text)
    return " ".join(text.split()).removesuffix(".").rstrip()


@register("shapes")
def shapes(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    r"""0.9 * accuracy + 0.1 * format; format: an optional `<think>...</think>`, then one box, and nothing else.

    Accuracy compares text, not values, after case, spaces, a final period and degree signs are dropped. Raises
    ValueError if `extra["answer_type"]` is missing or unknown.
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
    form = not earlier and rest == response[box.start() : _box_end(response, box.end()) + 1]
    accuracy = len(boxed) <= MAX_ANSWER_CHARS and _plain(boxed) == _plain(example.ground_truth)
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


def _checked(result: Any, uid: str, response: str) -> dict[str, float]:
    """A number, or a dict of numbers with the total under "reward", as a dict of finite floats."""
    parts = result if isinstance(result, dict) else {"reward": result}
    if "reward" not in parts:
        raise UserError(f"row {uid!r}: the reward returned {parts!r} without a total; add the key 'reward'")
    for name, value in parts.items():
        if name in ("mean", "constant_groups"):
            raise UserError(f"row {uid!r}: reward part {name!r} has the name of a metric of train.py, reward/{name}; rename it")
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise UserError(
                f"row {uid!r}: reward part {name!r} is {value!r} ({type(value).__name__}) for the response {response[:80]!r}; "
                "return a finite number (for a tensor: float(x))"
            )
    return {str(name): float(value) for name, value in parts.items()}


def score(response: str, example: Any, *, finish_reason: str = "stop") -> dict[str, float]:
    """Named reward parts plus the total under "reward", by the example's task. Raises ValueError for an unknown task.

    `example` has data_source, ground_truth, extra (dict) and uid; `finish_reason` is the engine's, `stop` or `length`.
    """
    return _checked(_reward_of(example)(response, example, finish_reason), example.uid, response)


def load_reward(spec: str | None) -> Callable[..., dict[str, float]]:
    """`score` for None; for `path/to/file.py:function` a callable like `score` around the user's function.

    The function is `(response, example) -> number or dict with "reward"`. Raises ValueError if the file or the
    function is missing or does not take two arguments; an error inside the file is the user's and passes through.
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
        return _checked(function(response, example), example.uid, response)

    return custom


def check_tasks(examples: Iterable[Any], reward_fn: Callable = score) -> dict[str, int]:
    """Rows per task. Scores an empty response against every row, so that bad data stops a run before a model loads.

    Raises ValueError as `score` does. A custom reward is not called: only rows are counted.
    """
    rows, before = Counter(), grader_stats.copy()
    for example in examples:
        if reward_fn is score:
            score("", example)
        rows[task_name(example.data_source)] += 1
    grader_stats.clear()
    grader_stats.update(before)  # empty responses are not the policy's
    if reward_fn is score and rows["geo3k"] and importlib.util.find_spec("math_verify") is None:
        raise UserError("geo3k grading needs math-verify; pip install -r requirements.txt")
    return dict(rows)


def score_batch(
    responses: Sequence[str],
    examples: Sequence[Any],
    reward_fn: Callable = score,
    finish_reasons: Sequence[str] | None = None,
) -> list[dict[str, float]]:
    """Parts of each response, in order; one example (and finish reason) per response, repeated within a group."""
    reasons = ["stop"] * len(responses) if finish_reasons is None else finish_reasons
    if not len(responses) == len(examples) == len(reasons):
        raise ValueError(
            f"{len(responses)} responses, {len(examples)} examples and {len(reasons)} finish reasons; give one of each"
        )
    return [reward_fn(r, e, finish_reason=f) for r, e, f in zip(responses, examples, reasons, strict=True)]


if __name__ == "__main__":
    if sys.argv[1:] != ["--cas-worker"]:
        raise SystemExit(__doc__)
    _cas_worker()
