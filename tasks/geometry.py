r"""The geometry task: short answers, such as numbers, surds, units, ratios, points, relations, a letter of a choice.

A policy may write anything into the box, `9**9**9**9` included, so this process passes none of its text to a computer
algebra system. A small parser reads answers and evaluates them to 80 digits under hard limits on length, depth and
magnitude, so it cannot hang. Answers that need more algebra (unknown LaTeX commands, sets, implicit equations) go to
math-verify, in a process that can be killed (_math_verify.py). `reward.count` counts every answer that could not be
parsed, was refused, or timed out.
"""

import decimal
import hashlib
import importlib.util
import json
import math
import random
import re
import unicodedata
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache, partial
from itertools import chain, permutations
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from errors import need, plug_in
from prepare_data import IMAGE_PLACEHOLDER, TABLE_SOURCES, RawRow, ToyConfig, table_rows
from reward import (
    MAX_ANSWER_CHARS,
    SPECIAL_TOKEN_PATTERN,
    accuracy_and_format_reward,
    closing_brace,
    count,
    extract_boxed,
    full_marks,
    register,
    unwrap_truth,
)
from sources.images import read_regular_file
from sources.tables import expand_data_paths
from tasks import _math_verify
from tasks._grammar import NUMBER, VALUE_WORDS, Unit, split_unit, table
from tasks.shapes import ANGLES, COLOURS, SIDE, Scene, draw_angle, encode_png, in_one_split, make_boxed_response, toy_of

MAX_NESTING = 80  # brackets, powers and commands in one answer; each takes about six of Python's 1000 frames


# --- data -------------------------------------------------------------------------------------------------------------

INSTRUCTION = (
    "Before answering, reason through the problem step by step inside <think> </think> tags. "
    "Only after that, state the final answer inside \\boxed{}."
)
DEFAULTS = {"prompt_key": "problem", "answer_key": "answer", "instruction": "geo3k"}
ANSWER_TYPES = {  # type -> pattern; the first that matches all of an answer is its type, else "other"
    "pi": r".*(\\pi|π).*",
    "surd": r".*(\\sqrt|√).*",
    "integer": r"[+-]?(\d+|\d{1,3}(,\d{3})+)",
    "decimal": rf"[+-]?{NUMBER}",
    "fraction": r"[+-]?\d*(\\[dt]?frac(\{[+-]?\d+\}|\d){2}|\d+/\d+)",
}


def rows(cfg: ToyConfig) -> Iterator[RawRow]:
    """Return the rows of Geometry3K: its original folders, parquet shards, or a hub id (default hiyouga/geometry3k)."""
    inputs = cfg.input or ("hiyouga/geometry3k",)
    if not Path(inputs[0]).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", inputs[0]):
        remote = plug_in("sources.remote", f"--input {inputs[0]}", "give local files")
        inputs = (remote.download(inputs[0], cfg.split),)
    folder = Path(inputs[0])
    folder = folder / cfg.split if (folder / cfg.split).is_dir() else folder
    problems = sorted((d for d in folder.glob("*") if d.name.isdecimal()), key=lambda d: int(d.name))
    if problems and len(inputs) == 1:
        return (RawRow(str(d), int(d.name), folder_record(d, cfg.split), root=d) for d in problems)
    return shard_rows(expand_data_paths(inputs, cfg.split), cfg)


def folder_record(problem: Path, split: str) -> dict | str:
    """Return the row of a problem as InterGPS published it, NUMBER/data.json and NUMBER/img_diagram.png.

    If the problem is invalid, return what is wrong instead.
    """
    try:
        data = json.loads(read_regular_file(problem / "data.json"))
        answer = dict(zip("ABCDEFGH", data["choices"], strict=False))[data["answer"]]
        data_type = data.get("data_type", split)
        if data_type != split:  # keeps test problems out of the training data
            return f"data_type is {data_type!r} but --split is {split!r}; pass --split {data_type}"
        return {
            "data_source": "geo3k",
            "problem": f"{IMAGE_PLACEHOLDER}{data['annotat_text']}",
            "images": "img_diagram.png",
            "answer": answer,
            "answer_type": answer_type(answer),
            "letter": data["answer"],
        } | {key: data[key] for key in ("problem_type_goal", "problem_type_graph", "choices")}
    except KeyError as e:
        return f"data.json has no {e}, or its answer {e} names no choice"
    except (OSError, ValueError, TypeError, RecursionError) as e:
        return f"data.json cannot be read: {e}"


def shard_rows(files: list[Path], cfg: ToyConfig) -> Iterator[RawRow]:
    """Yield the rows of the hub's shards: images, problem, answer, id, choices, ground_truth (a letter)."""
    new_names = {"id": "index", "ground_truth": "letter"}
    extension = files[0].suffix[1:].lower()
    records = TABLE_SOURCES.get({"json": "jsonl"}.get(extension, extension), TABLE_SOURCES["parquet"])[0]
    for raw in table_rows(files, cfg, records):
        raw.name = ""  # the ids identify the rows
        if isinstance(raw.record, dict):
            raw.record = {new_names.get(key, key): value for key, value in raw.record.items()}
            answer = unwrap_truth(str(raw.record.get(cfg.answer_key)))
            raw.record |= {"data_source": "geo3k", "answer_type": answer_type(answer)}
        yield raw


def answer_type(answer: str) -> str:
    """Return the form of a short maths answer: integer, decimal, surd, fraction, pi or other."""
    text = re.sub(r"\s|\$|\^\\circ|\^\{\\circ\}|\\degree|°", "", answer)
    return next((kind for kind, pattern in ANSWER_TYPES.items() if re.fullmatch(pattern, text)), "other")


# --- errors of the parser ---------------------------------------------------------------------------------------------


class ExpressionError(ValueError):
    """Error for text that the parser cannot read as an expression."""


class ExpressionTooLarge(ExpressionError):
    """Error for an expression that is too long, deep or large."""


class NeedsAlgebra(ExpressionError):
    """Error for an expression that the parser does not support but math-verify may, so math-verify decides."""


# --- normalising LaTeX --------------------------------------------------------------------------------------------

CHARACTERS = dict(zip("º˚⁻−–—×·⋅∙•÷⁄∕∶⩽⩾≦≧≃$~’′", "°°----*****///:≤≥≤≥≈  ''", strict=True))
CHARACTERS |= {"ℝ": "\\mathbb R ", "√": "\\sqrt ", "∛": "\\sqrt[3] ", "½": "\\frac12", "⅓": "\\frac13", "⅔": "\\frac23"}
CHARACTERS = str.maketrans(CHARACTERS | {"¼": "\\frac14", "¾": "\\frac34"})
COMMAND_TABLE = r"""
frac dfrac tfrac cfrac sfrac nicefrac -> \frac~
textsuperscript -> ^
cdot times ast -> *
div -> /
colon -> :
pm mp -> ±
! ->
approx simeq sim -> ≈
cong -> ≅
le leq leqslant leqq -> ≤
ge geq geqslant geqq -> ≥
lt -> <
gt -> >
ne neq -> ≠
equiv in -> =
cup bigcup -> ∪
infty -> ∞
ldots dots cdots dotsc -> …
lor vee -> ~or~
land wedge -> ~and~
mid vert -> |
lbrace -> \{
rbrace -> \}
% -> %
angle measuredangle -> ∠
triangle -> △
circ degree deg textdegree -> °
prime -> '
pi -> π
alpha -> α
beta -> β
gamma -> γ
theta -> θ
phi varphi -> φ
mu micro -> μ
Omega ohm -> Ω
quad qquad -> ;
$ ( ) [ ] , ; : displaystyle textstyle left right big Big bigl bigr Bigl Bigr bigg Bigg -> ~
"""  # ~ is a space; `\quad` inside an answer separates two answers, and is not a product
COMMANDS = {name: meaning for names, meaning in table(COMMAND_TABLE) for name in names.split()}
COMMANDS[" "] = " "
WRAPPERS = """
text textbf textit textrm textsf texttt textup textnormal emph mbox operatorname overline underline widehat overarc
overparen arc mathrm mathbf mathit mathsf bm boldsymbol bf it rm sf large Large LARGE huge Huge
""".split()


def repeating_to_fraction(match: re.Match) -> str:
    r"""Return the fraction that a repeating decimal equals: `0.1\overline{6}` or `0.(6)`."""
    whole, digits, *repeated = (part or "" for part in match.groups())
    first, period = whole + digits, "".join(repeated)
    return f"(({first + period}-{first or 0})/({10 ** len(period) - 1}*{10 ** len(digits)}))"


# pattern -> new text. In this order they are for `\\frac` (escaped once too often), repeating decimals, thousands,
# spaces, signs that only decorate (such as an arc), fonts, commands, `\sin\theta`, Markdown's bold, words for signs,
# sets such as `\{x | x > 3\}`, `≅` (the sign of congruence, unless a number follows), and degrees.
REWRITES = r"""
\\\\(?=[A-Za-z]) -> \\
(\d*)\.(\d*)(?:\\overline\s*\{(\d{1,20})\}|(?<=\.)\((\d{1,20})\)) -> @repeating
\{,\}|,\s*\\!\s* -> ,
(^|,)\s*\\q?quad\b|\\q?quad\s*(?=\\text|\\mathrm|$) -> \1~
\\(?:left|right)\s*\.|\\(?:textcolor|color)\s*\{[a-z]+\} -> ~
\\(?:overset|stackrel)\s*(?:\{\s*\\frown\s*\}|\\frown) -> ~
\\(?:WRAPPERS)(?![A-Za-z])\s*(?:\{([^{}\\]*)\})? -> ~\1~
\\([A-Za-z]+|.) -> @command
(\\[a-z]+)(?=[α-ω]) -> \1~
^\s*\*\*([^*]*)\*\*\s*$ -> \1
(?<![A-Za-z\\])(?i:sqrt) ?(?=[\d({]) -> \\sqrt~
(?<![A-Za-z\\_])[pP]i(?![A-Za-z_]) -> π
\*\* -> ^
(?<=[0-9]) ?[xX] ?(?=10 ?\^) -> *
(?<![A-Za-z\\])(?i:inf(?:inity|ty)?)(?![A-Za-z]) -> ∞
(?<=[)\]]) ?U ?(?=[(\[]) -> ∪
\\mathbb ?\{? ?R ?\}?|(?i:all real numbers) -> (-∞,∞)
^\\\{ ?[A-Za-zα-ω] ?(?:= ?\(-∞,∞\) ?)?[|:] ?((?:(?!\\\}).)*)\\\}$ -> \1
≅(?= ?-?[\d.]) -> ≈
<=|=< -> ≤
>=|=> -> ≥
\s+ -> ~
 ?(?<![A-Za-z\\])(?i:per ?cent)(?![A-Za-z]) -> %
(?<![A-Za-z\\])(?i:deg(?:rees?)?)(?![A-Za-z])\.? -> °
\{ ?\}(?= ?[\^°]) ->
\^ ?(?:\{ ?° ?\}|°)|(?<=[\d)}]) ?\^ ?(?:\{ ?o ?\}|o(?![A-Za-z])) -> °
\{ ?° ?\} -> °
\^  -> ^
(?i)° ?c(?:elsius)? ?$ -> ~celsius
(?i)° ?f(?:ahrenheit)? ?$ -> ~fahrenheit
"""
CONVERSIONS = {"@repeating": repeating_to_fraction, "@command": lambda match: COMMANDS.get(match[1], match[0])}
REWRITES = table(REWRITES.replace("WRAPPERS", "|".join(WRAPPERS)))
REWRITES = [(re.compile(pattern), CONVERSIONS.get(new, new)) for pattern, new in REWRITES]

PLAIN = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
PRICE = re.compile(r"\\\$ ?([0-9][0-9.,]*)|^ *\$ ?([0-9][0-9.,]*)$")  # `\$5` and `$5`, not LaTeX's `$5$`
THOUSANDS = re.compile(r"(?<![\d.,])(?<!\d )\d{1,3}(?:(?:,\d{3})+(?![\d,])|(?: \d{3})+(?! ?[\d/]))")
MIXED = re.compile(
    r"(?<![\d.^])(\d{1,9})(?: ?\\frac ?(?:\{ ?(\d{1,9}) ?\} ?\{ ?(\d{1,9}) ?\}|(\d) ?(\d))"
    r"| (\d{1,9}) ?/ ?(\d{1,9})(?!\d))"
)


def mixed_number(match: re.Match) -> str:
    """Return a mixed number as a sum in brackets; a whole number before an improper fraction stays a product."""
    whole, numerator, denominator = (int(digits) for digits in match.groups() if digits is not None)
    return f"({whole}+{numerator}/{denominator})" if numerator < denominator else match[0]  # not `2 \frac{3}{2}`


@lru_cache(4096)  # every response of a group has the same truth
def normalise(text: str) -> str:
    """Rewrite LaTeX or Unicode maths with single spaces, `^ * / ≤ ≥ ≈ ° π` and bare words.

    frac, sqrt and unknown commands stay LaTeX. Raise ExpressionTooLarge for text that is too long or too deep.
    """
    if len(text) > MAX_ANSWER_CHARS:
        raise ExpressionTooLarge(f"{len(text)} characters are too many")
    if PLAIN.fullmatch(text):  # most answers
        return text
    text = re.sub("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", r"^{\g<0>}", PRICE.sub(r"\1\2 dollars", text)).translate(CHARACTERS)
    text = unicodedata.normalize("NFKC", text).rstrip("\\ \t\n")
    for pattern, new in REWRITES:
        text = pattern.sub(new, text)
    if not re.search(r"[(\[]", text):  # `(1,000)` is a point
        text = THOUSANDS.sub(lambda number: re.sub("[, ]", "", number[0]), text)
    text = MIXED.sub(mixed_number, text.strip()).removesuffix(".").strip()
    while text.startswith("{") and closing_brace(text, 1) == len(text) - 1:  # braces around all of it are invisible
        text = text[1:-1].strip()
    # Every nested call of the parser costs one of these characters, so this bounds its recursion.
    if len(text) > 2 * MAX_ANSWER_CHARS or len(re.findall(r"[(\[{^\\]", text)) > MAX_NESTING:
        raise ExpressionTooLarge(f"{text!r} is too deep")
    return text


# --- evaluating ---------------------------------------------------------------------------------------------------

CONTEXT = decimal.Context(prec=80, Emax=9999, Emin=-9999)  # 9**9**9 overflows at once instead of being computed
CONTEXT.traps[decimal.Underflow] = True
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")
RELATIVE_TOLERANCE = Decimal("1e-40")  # half of the digits, since cancellation may lose the others
# Expressions with letters are compared at these points.
TEST_POINTS = (Decimal("1.0311"), Decimal("29.3"), Decimal("0.0137"), Decimal("1013.7"))


def letter_value(name: str, point: Decimal) -> Decimal:
    """Return the value of a letter, from `point` to 2 * `point` since letters are lengths and angles here.

    It is the same in every process. It has 77 digits of a hash, so no fraction, sum or product of a few letters equals
    another letter or a short number by accident.
    """
    digest = hashlib.sha256(f"{name} at {point}".encode()).digest()
    return point * (1 + Decimal(int.from_bytes(digest)).scaleb(-78))


def add_exact(a: Decimal, b: Decimal) -> Decimal:
    r"""Return a + b, exactly 0 if they cancel.

    So a division by the zero that is hidden in `\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}` fails.
    """
    smaller, larger = sorted((abs(a), abs(b)))
    if 0 < smaller < larger * RELATIVE_TOLERANCE:
        raise ExpressionTooLarge("a sum of numbers whose magnitudes differ too much for 80 digits")
    return a + b if abs(a + b) > larger * RELATIVE_TOLERANCE else Decimal(0)


def power_exact(base: Decimal, exponent: Decimal) -> Decimal:
    """Return base ** exponent; raise DivisionByZero if it is not finite."""
    value = base**exponent
    if not value.is_finite():  # `decimal` returns Infinity for 0^{-1} without an error
        raise decimal.DivisionByZero("0 to a negative power")
    return value


class ExpressionParser:
    """A recursive-descent parser that evaluates one expression as it reads it; letters have fixed values at each point.

    sum := term (("+"|"-") term)*; term := signed (("*"|"/"|nothing) signed)*; power := atom ["^" signed] ["°"] ["%"]
    """

    def __init__(self, text: str, point: Decimal):
        self.text = text
        self.point = point
        self.position = 0  # index of the next character
        self.letters = False  # whether any letter was read

    def accept(self, pattern: str) -> str:
        """Return the next characters after spaces, and move past them, if they match `pattern`; else return ""."""
        match = re.compile(f" *({pattern})").match(self.text, self.position)
        self.position = match.end() if match else self.position
        return match[1] if match else ""

    def peek(self) -> str:
        """Return the next character after spaces, or "" at the end."""
        self.accept("")  # past spaces
        return self.text[self.position : self.position + 1]

    def expect(self, char: str) -> None:
        """Move past `char`, or raise ExpressionError if it is not the next character ("": the end)."""
        if self.peek() != char:
            raise ExpressionError(f"{self.text!r}: {self.peek()!r} instead of {char!r} at {self.position}")
        self.position += len(char)

    def sum(self) -> Decimal:
        total = self.term()
        while sign := self.accept("[+-]"):
            total = add_exact(total, self.term() if sign == "+" else -self.term())
        return total

    def term(self) -> Decimal:
        value = self.signed()
        while char := self.peek():
            if self.accept("[*/]"):
                value = value * self.signed() if char == "*" else value / self.signed()
            elif char in "([{\\" or char.isalpha():  # not a digit: `3 4` is not a product
                value *= self.power()
            else:
                break
        return value

    def signed(self) -> Decimal:
        signs = self.accept("[+-][+ -]*")
        value = self.power()
        return -value if signs.count("-") % 2 else +value

    def power(self) -> Decimal:
        value = self.atom()
        if self.accept(r"\^"):
            value = power_exact(value, self.signed())
        self.accept("°")
        return value / 100 if self.accept("%") else value

    def atom(self) -> Decimal:
        if bracket := self.accept(r"[(\[{]"):
            value = self.sum()
            self.expect({"(": ")", "[": "]", "{": "}"}[bracket])
            return value
        if self.accept("π"):
            return PI
        if command := self.accept(r"\\[A-Za-z]*"):
            return self.function(command)
        if symbol := self.accept("[|±∪]"):
            raise NeedsAlgebra(symbol)
        if number := self.accept(NUMBER):
            return CONTEXT.create_decimal(number)
        # `AB` is a product, `abc` is a word
        name = self.accept(r"(?![A-Za-z]{3})[A-Za-zα-ω]'*(?:_(?:\{ ?\w{1,8} ?\}|\w))?")
        if not name:
            raise ExpressionError(f"{self.text!r}: cannot read {self.peek()!r} at {self.position}")
        self.letters = True
        return letter_value(re.sub(r"[{} ]", "", name), self.point)

    def function(self, command: str) -> Decimal:
        if command == r"\frac":
            return self.argument() / self.argument()
        if command != r"\sqrt":
            raise NeedsAlgebra(command)
        index = self.atom() if self.peek() == "[" else 2
        value = self.atom()  # `\sqrt41` is meant as \sqrt{41}
        root = abs(value).sqrt() if index == 2 else power_exact(abs(value), 1 / index)
        if value < 0 and index % 2 != 1:
            raise decimal.InvalidOperation("an even root of a negative number")
        return root if value >= 0 else -root

    def argument(self) -> Decimal:
        digit = self.accept("[0-9]")  # `\frac12` is 1/2, as in TeX
        return Decimal(digit) if digit else self.atom()


@lru_cache(4096)
def evaluate(text: str, point: Decimal = TEST_POINTS[0]) -> Decimal | None:
    """Return the value of an expression to 80 digits; it is finite.

    Return None if the expression has letters and no real value at this point, such as sqrt(x-50) at the first point.
    Raise ExpressionError, NeedsAlgebra, or the other errors that `same_answer` lists.
    """
    expression = ExpressionParser(text, point)
    try:
        value = expression.sum()
    except decimal.InvalidOperation:
        if expression.letters:
            return None
        raise
    expression.expect("")
    return value


def same_value(prediction: str, truth: str) -> bool:
    """Return whether two expressions are equal wherever they have values, and have one somewhere."""
    compared = False
    for point in TEST_POINTS:
        try:
            a, b = evaluate(prediction, point), evaluate(truth, point)
        except NeedsAlgebra:
            return same_to_math_verify(prediction, truth)
        if a is None and b is None:
            continue
        if a is None or b is None or abs(a - b) > RELATIVE_TOLERANCE * max(abs(a), abs(b)):
            return False
        compared = True
    return compared


def same_to_math_verify(prediction: str, truth: str) -> bool:
    """Return whether math-verify considers two single values or equations equal.

    It is never given a whole answer, because it would take only the last value of `|47| = 48`.
    """
    if re.search(r"%|\\[hv]?phantom|[0-9|)] ?_", prediction + truth):
        raise ExpressionError("math-verify drops percent signs, invisible text and subscripts of numbers")
    return _math_verify.same_latex(*(in_radians(text).translate(LATEX) for text in (prediction, truth)))


def in_radians(text: str) -> str:
    r"""Return `\sin (30*π/180)` for `\sin 30°`, as math-verify drops degree signs; other text is returned unchanged."""
    return re.sub(r"([0-9.]+) ?°", r"(\1*π/180)", text) if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text) else text


# --- comparing answers --------------------------------------------------------------------------------------------

# Words and signs of a hedge, which has several answers. OR and NO in capitals are segments.
SENTENCE = re.compile(r"(?i)\w (?:is|are|was|were|has|have|had|equals?|because|since|therefore|so)\b")
LEADING_WORDS = r"(?<![\\A-Za-z])(?!(?:and|sin|cos|tan|log)\b)[A-Za-z]?[a-z]{3,}\W+(?:[+-]?[0-9][^A-Za-z]*|[A-H]\W*)$"
LEADING_WORDS = re.compile(LEADING_WORDS)  # `Hence 5`, `about 5`
HEDGE = re.compile(r"\b(?:or|to|vs|no|(?i:either|maybe|and|not|never|but|isn|nan))\b|[;?]")
# The name before `=`: AB, |AB|, m ∠A, ∠ 1, x°, x_1, f(x), sin A, Area of △ABC, AB/BC, (x, y) in this order, or nothing.
# A name has no separate number, as in `x 47`, and is not `|x|`, since x may be negative.
NAME = r"(?:\\(?:sin|cos|tan)(?:[ (]*[0-9]+ ?°)?|(?:m ?)?[∠△] ?\w+|\| ?[A-Z]{2} ?\||"
NAME += r"[A-Za-zα-ωΔ]+\d*'*(?:_(?:\{[ △{]*\w+[ }]*\}|\w))?°?)"
NAME_LIST = rf"[ {{(]*{NAME}(?:[ {{(}}):]+{NAME})*[ }}):]*|{NAME} ?/ ?{NAME}|\\frac ?\{{ ?{NAME} ?\}} ?\{{ ?{NAME} ?\}}"
NAME_LIST += r"|\( ?(?:x ?, ?y(?: ?, ?z)?|a ?, ?b(?: ?, ?c)?|m ?, ?n|p ?, ?q) ?\)"
NAME = re.compile(rf"(?!.*π)(?!\( ?[A-H] ?\) ?\w)(?=.{{,60}}$)(?:{NAME_LIST})|")  # `(A) x` names a choice
POINT_NAMES = re.compile("(?<![A-Za-z])[A-Z]{2,3}(?![A-Za-z])")
# The left side of an equation if it only names the right side, as `f(3)` and `\cos 2θ` do, and has no value.
FUNCTION = re.compile(r"(?<![A-Za-z])[fghFGHP]'* ?\(|\\(?!frac|sqrt)|[|±∠△]")
LIST = re.compile("(?i) ?; ?|,? and ")  # separators of a list's values, in addition to commas
WORDS_PATTERN = re.compile("(?i)(?=.*[a-z]{3})[a-z][a-z -]+|no|or|to|vs")
SET = re.compile(r"^([A-Za-zα-ω] ?= ?)?\\\{((?:(?!\\[{}]).)*)\\\}$")
LETTER = re.compile(r"(?<![A-Za-z\\])(?!(?<=[0-9.])[eE][+-]?[0-9])[A-Za-zα-ωΔ](?<!π)")
NOT_UNITS = {("L", 2), ("L", 3), ("any", 2), ("any", 3), ("°", 1)}  # that `units` cannot stand for
DEGREES: Unit = (Fraction(1), frozenset({("°", 1)}))
# A number and one to three words that name what is counted; `known` must have them in the plural, unlike `5 May`
NAMED_COUNT = re.compile(rf"([+-]?{NUMBER})((?: [A-Za-z]{{3,}}){{1,3}})")
CHOICE_ANSWER_PATTERN = re.compile(
    r"(?:(?:option|choice|answer) ?:? ?)?(?:\( ?([A-Z]) ?\)|([A-Z]) ?(?:[.:)]|$)) ?(.*)", re.I
)
LATEX = str.maketrans({"π": "\\pi ", "*": "\\cdot ", "°": "^{\\circ}", "±": "\\pm ", "∪": "\\cup "})
MIRROR = str.maketrans("<>≤≥", "><≥≤")
RELATION = re.compile("[<>≤≥≠]")
POINT = re.compile(r"(?:^|∪) ?\([^()∞]*\)")


def split_outside_brackets(text: str, separators: str) -> tuple[list[str], str]:
    """Return the members of `text` and the separators between them; it is split only outside brackets."""
    if not any(separator in text for separator in separators):
        return [text.strip()], ""
    members, found_separators, depth = [""], "", 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and char in separators:
            members.append("")
            found_separators += char
        else:
            members[-1] += char
    return [member.strip() for member in members], found_separators


def members(text: str, separator: str) -> list[str]:
    """Return the members of a list or union; a member with a single `±` becomes two."""
    signed = (
        [m.replace("±", sign) for sign in "+-"] if m.count("±") == 1 else [m]
        for m in split_outside_brackets(text, separator)[0]
    )
    return list(chain.from_iterable(signed))


def all_paired(table: list[list[bool]]) -> bool:
    """Return whether each row of a square table can get a different column that is true there (Kuhn's algorithm)."""
    row_by_column: dict[int, int] = {}

    def pair(row: int, tried: set[int]) -> bool:
        for column in range(len(table)):
            if table[row][column] and column not in tried:
                tried.add(column)
                if column not in row_by_column or pair(row_by_column[column], tried):
                    row_by_column[column] = row
                    return True
        return False

    return all(pair(row, set()) for row in range(len(table)))


def without_unit(text: str, known: str = "") -> tuple[str, Unit | None]:
    """Return (value, its unit), or (text, None) without a unit.

    Degrees are a unit, but their text is not shortened. A unit of one letter needs a value without letters. Words of
    `known`, such as the truth, are units of a number too: `5 widgets`.
    """
    value, unit = split_unit(text)
    if unit and len(text) - len(value) < 3 and text[-1] != "." and text[-1].isalpha() and LETTER.search(value):
        value, unit = text, None
    counted = NAMED_COUNT.fullmatch(text) if not unit and known else None
    noun = counted[2].casefold().rstrip("s") if counted else ""
    if counted and f"{noun}s" in known.casefold() and not VALUE_WORDS & {*counted[2].split()}:
        value, unit = counted[1], (Fraction(1), frozenset({(noun, 1)}))
    if "°" in text:
        if unit:
            raise ExpressionError(f"{text!r} has two units")
        unit = DEGREES
    return value, unit


def in_unit(text: str, unit: Unit | None, other: Unit | None) -> str | None:
    """Return a value in `unit` as an expression in `other`, or None if the units contradict.

    `units` are compatible with every unit of the same power, and no unit with every unit.
    """
    if not unit or not other or unit == other:
        return text
    (size, kinds), (other_size, other_kinds) = unit, other
    for [(kind, power), *_], others in ((kinds, other_kinds), (other_kinds, kinds)):
        if kind == "any" and (others == {("L", power)} or (power == 1 and not others & NOT_UNITS)):
            return text
    return f"({text})*({size / other_size})" if kinds == other_kinds else None


def is_choice(prediction: str, letter: str) -> bool:
    """Return whether a prediction names the choice `letter`.

    `B. 60` may repeat the option's text, but not name a second option.
    """
    match = CHOICE_ANSWER_PATTERN.fullmatch(prediction)
    if not match or (match[1] or match[2]).upper() != letter or HEDGE.search(prediction):
        return False
    if "," in match[3] or match[3].startswith(("=", "≈")):  # `(B) = 3` is an equation
        return False
    return not re.search(r"(?<![A-Za-z\\])[A-H](?![A-Za-z])", match[3])


def is_rounded_value(exact: str, rounded: str) -> bool:
    """Return whether `rounded` is a plain decimal within half a unit in its last place of `exact`.

    8.66 is 5√3 rounded; 8.6 and 26/3 are not.
    """
    (exact, unit), (rounded, rounded_unit) = without_unit(exact), without_unit(rounded)
    numeral = re.fullmatch(r"-?(?:\d+\.?|\d*\.(\d+)) ?°?", rounded)
    if not numeral or (unit and rounded_unit and unit != rounded_unit):
        return False
    half = Decimal("0.5").scaleb(-len(numeral[1] or ""))
    values = [evaluate(exact, point) for point in TEST_POINTS]  # `x - x` is allowed, `x` is not
    return all(value is not None and abs(value - evaluate(rounded)) <= half for value in values)


def strip_names(text: str) -> tuple[set[str], list[str]]:
    """Return the names and the values of a chain: `AB = CD = 2*24 = 48` -> ({"AB", "CD"}, ["2*24", "48"])."""
    *left, last = split_outside_brackets(text, "=")[0]
    names = set()
    while left and NAME.fullmatch(left[0]):
        name = re.sub(r"\\frac ?\{(.*?)\} ?\{", r"\1/", left.pop(0))
        name = POINT_NAMES.sub(lambda match: min(match[0], match[0][::-1]), name)  # AB is BA
        name = re.sub(r"m? ?∠|[△ {}()|°]", "", name)
        names.add(name)
    return names - {""}, [*left, last]


def same_answer_text(prediction: str, truth: str, as_text: bool = True) -> bool:
    """Return whether two normalised answers are the same. Raise ExpressionError if one cannot be parsed.

    Each step removes one kind of structure.
    """
    if not prediction or not truth:
        return False
    if WORDS_PATTERN.fullmatch(truth):
        return prediction.casefold() == truth.casefold()
    squashed, true_squashed = (re.sub(r"(?<!\d) | (?!\d)", "", text) for text in (prediction, truth))  # `4 8` is not 48
    if squashed == true_squashed and (as_text or NAME.fullmatch(truth)):
        return True
    if "∞" in (squashed.lstrip("+-"), true_squashed.lstrip("+-")):
        return squashed.lstrip("+") == true_squashed.lstrip("+")
    compare = partial(same_answer_text, as_text=as_text)

    for separator in ",∪":  # a list or a union in any order, but without additional answers
        items, truths = members(prediction, separator), members(truth, separator)
        if len(items) > 1 or len(truths) > 1:
            in_order = len({tuple(strip_names(t)[0]) for t in truths}) > 1 and not any(strip_names(i)[0] for i in items)
            if in_order and len(items) == len(truths) and all(strip_names(t)[0] for t in truths):
                return all(map(compare, items, truths))  # values without names come in the order of the names
            return len(items) == len(truths) and all_paired([[compare(item, t) for t in truths] for item in items])

    (items, signs), (truths, true_signs) = (split_outside_brackets(text, "<>≤≥≠") for text in (prediction, truth))
    if signs or true_signs:
        mirrored = signs[::-1].translate(MIRROR) == true_signs and all(map(compare, items[::-1], truths))
        return mirrored or (signs == true_signs and all(map(compare, items, truths)))
    return same_equation(prediction, truth, compare)


def bounds(relation: str) -> tuple[str, str, str] | None:
    """Return the letter and the ends of an interval: `3 < x` -> ("x", "(3", "∞)"); None for any other text."""
    items, signs = split_outside_brackets(relation, "<>≤≥")
    if signs[:1] in tuple(">≥"):
        items, signs = items[::-1], signs[::-1].translate(MIRROR)
    named = [bool(item and NAME.fullmatch(item)) for item in items]
    if named == [True, False]:
        items, signs = ["-∞", *items], f"<{signs}"
    elif named == [False, True]:
        items, signs = [*items, "∞"], f"{signs}<"
    if len(items) != 3 or not NAME.fullmatch(items[1]) or not set(signs) <= {*"<≤"}:
        return None
    return items[1], "[("[signs[0] == "<"] + items[0], items[2] + "])"[signs[1] == "<"]


@lru_cache(4096)
def without_set_or_relation(text: str) -> str:
    r"""Return a set as a list, and relations of one letter as an equation with intervals.

    `\{1, 2\}` -> `1, 2`, `1 ≤ x < 2` -> `x=[1,2)`, `x < 1 or x ≥ 3` -> `x=(-∞,1)∪[3,∞)`. Any other text is unchanged.
    """
    text = SET.sub(r"\1\2", text)
    if not RELATION.search(text):
        return text
    letters, intervals = set(), []
    text = re.sub("^(.+?) ?≠ ?(.+)$", r"\1 < \2 or \1 > \2", text) if text.count("≠") == 1 else text
    for part in re.split("(?i) or |∪", text):
        ends = [bounds(relation) for relation in re.split("(?i) and ", part)]
        if None in ends:
            return text
        names, lows, highs = map(set, zip(*ends, strict=True))
        letters |= names
        lows, highs = (group - {"(-∞", "∞)"} or group for group in (lows, highs))  # `x > 1 and x < 3`
        if len(lows) > 1 or len(highs) > 1:
            return text
        intervals.append(f"{lows.pop()},{highs.pop()}")
    return f"{letters.pop()}={'∪'.join(intervals)}" if len(letters) == 1 else text


def same_equation(prediction: str, truth: str, compare: Callable[[str, str], bool]) -> bool:
    """Return whether every value of a chain is right.

    `x = 47 = 48` is a hedge, and so is `48 cm = 48 m` for the truth 48.
    """
    name, _, value = prediction.partition(":")
    exact, _ = without_unit(split_outside_brackets(truth, "=")[0][-1], truth)
    letters = LETTER.search(exact)
    is_name = NAME.fullmatch(name) and not re.fullmatch(r"\(? ?[A-H] ?\)?", name)  # `A: 48` is a choice
    if name and value and ":" not in truth and is_name and not letters:
        prediction = f"{name}={value}"  # `x: 48` is an equation; if the truth has letters, as `x/y`, it is a ratio
    (names, items), (true_names, truths) = strip_names(prediction), strip_names(truth)
    if len(truths) > 1:
        return same_sides(prediction, truth, compare)
    if names and true_names and not names & true_names:
        return False
    if items == [prediction] and truths == [truth]:
        return same_rounded(prediction, truth, compare)
    by_unit = {without_unit(item)[1]: item for item in items}
    all_right = all(compare(item, truths[0]) for item in items)
    return all_right and all(compare(a, b) for a, b in permutations(by_unit.values(), 2))


def same_sides(prediction: str, truth: str, compare: Callable[[str, str], bool]) -> bool:
    """Return whether an answer is the right side of `f(3) = 32`, or an equation that is a multiple of `2x + 3y = 6`.

    A truth without letters, such as `2+3=5`, asks for nothing, so only the same text is a right answer.
    """
    (items, _), (sides, _) = split_outside_brackets(prediction, "="), split_outside_brackets(truth, "=")
    if len(sides) != 2 or not LETTER.search(truth):
        return False
    if FUNCTION.search(sides[0]):
        items = items[1:] if items[0].replace(" ", "") == sides[0].replace(" ", "") else items
        return bool(items) and all(compare(item, sides[1]) for item in items)
    if len(items) != 2:
        return False
    difference, true_difference = (f"({left}-({right}))" for left, right in (items, sides))
    # Letters are lengths, so a multiple has the same ratio at all points, and is nowhere 0.
    ratios = [evaluate(f"{difference}/{true_difference}", point) for point in TEST_POINTS]
    first = ratios[0]
    return bool(first) and all(r is not None and abs(r - first) <= RELATIVE_TOLERANCE * abs(first) for r in ratios)


def same_rounded(prediction: str, truth: str, compare: Callable[[str, str], bool]) -> bool:
    r"""Return whether two answers that may have an `≈` are the same.

    `5\sqrt{3} \approx 8.66` is one answer if its sides agree, and a hedge if they do not.
    """
    items = split_outside_brackets(prediction, "≈")[0]
    truth = split_outside_brackets(truth, "≈")[0][-1]
    if len(items) == 1:
        return same_single(prediction, truth, compare)
    items = items[1:] if NAME.fullmatch(items[0]) else items
    if len(items) == 1:
        return compare(items[0], truth)
    return len(items) == 2 and is_rounded_value(*items) and any(compare(item, truth) for item in items)


def same_single(prediction: str, truth: str, compare: Callable[[str, str], bool]) -> bool:
    """Return whether two single answers are the same.

    Points and intervals are compared member by member, ratios as ratios, the rest by value in the truth's unit.
    """
    point, true_point = (re.fullmatch(r"([(\[])(.*)([)\]])", text) for text in (prediction, truth))
    if point and true_point:
        items, truths = split_outside_brackets(point[2], ",")[0], split_outside_brackets(true_point[2], ",")[0]
        if len(items) > 1 or len(truths) > 1:
            brackets = point[1] == true_point[1] and point[3] == true_point[3]
            return brackets and len(items) == len(truths) and all(map(compare, items, truths))
    elif true_point and "," in truth:
        return False  # math-verify would accept a set for a point
    items, truths = split_outside_brackets(prediction, ":")[0], split_outside_brackets(truth, ":")[0]
    if len(items) == len(truths) > 1:  # a time, or a ratio to 0: 12:00 is not 1:00
        if re.match(r"\d+:0\d|[1-9]\d*:0(?::0)?$", truth):
            return all(map(compare, items, truths))
        # 4:6 is 2:3: each member is divided by the same one, which is not 0
        divisor_index = next((i for i, member in enumerate(truths) if evaluate(member)), 0)
        pairs = zip(items, truths, strict=True)
        return all(same_value(f"({a})/({items[divisor_index]})", f"({b})/({truths[divisor_index]})") for a, b in pairs)
    prediction = f"({items[0]})/({items[1]})" if len(items) == 2 else prediction
    truth = f"({truths[0]})/({truths[1]})" if len(truths) == 2 else truth
    (value, unit), (truth, true_unit) = without_unit(prediction, truth), without_unit(truth, truth)
    value = in_unit(value, unit, true_unit)
    return value is not None and same_value(value, truth)


# --- grading ------------------------------------------------------------------------------------------------------


def has_answer(truth: str) -> bool:
    """Return whether a normalised truth has an answer.

    It has none if it is empty, a word for nothing, contains a special token, or is only signs or only a unit.
    """
    if (
        truth.casefold() in {"none", "null", "nan", "n/a"}
        or not re.search(r"[\w∞]", truth)
        or SPECIAL_TOKEN_PATTERN.search(truth)
    ):
        return False
    value, unit = split_unit(f"1 {truth}")  # a word such as `student` may be an answer
    return truth == "m" or value != "1" or not unit or not {kind for kind, _ in unit[1]} <= {"L", "any"}


def compare_answers(prediction: str, answer: str, as_text: bool) -> bool:
    """Return the result of `same_answer`, without counting it; raise an error if an answer cannot be parsed."""
    truth = normalise(answer)
    if not has_answer(truth):  # the data lack an answer, so no prediction can be right
        count("bad_truth")
        return False
    if SPECIAL_TOKEN_PATTERN.search(prediction):
        raise ExpressionError("a special token in the answer")
    text = normalise(prediction)
    if re.search(r"\\(?:boxed|fbox)", text):  # math-verify would read only that box and drop the text around it
        raise ExpressionError("a box in the answer")
    if letter := re.fullmatch(r"(?:\( ?([A-H]) ?\)|([A-H]))(?:$|[.:)]? .*|[.:)])", truth):
        return is_choice(text, letter[1] or letter[2])
    given, text, truth = text, without_set_or_relation(text), without_set_or_relation(truth)
    if RELATION.search(given) and POINT.search(truth):
        return False  # the truth `(1, 2)` is a point; `x \in (1, 2)` is an interval, and so is `1 < x < 2`
    values = LIST.sub(", ", truth)
    if values != truth or len(members(values, ",")) > 1:
        text, truth = LIST.sub(", ", text), values
    elif " or " in truth:  # `x = 3 or x = -3` is a list
        text, truth = (re.sub("(?i),? or ", ", ", whole) for whole in (text, truth))
    text = re.sub("(?i) to ", ":", text) if ":" in truth else text
    if WORDS_PATTERN.fullmatch(truth):
        return text.casefold() == truth.casefold()
    if (HEDGE.search(text) and not HEDGE.search(truth)) or (text.count("±") > 1 and "±" not in truth):
        return False
    return same_answer_text(text, truth, as_text)


def same_answer(prediction: str, answer: str, as_text: bool = True) -> bool:
    r"""Return whether a bare answer (the content of a box) is the same as the truth, by exact value (to 40 digits).

    Accept other forms of the value (`\frac{48}{11}` for `4 \frac{4}{11}`), units if the truth has none or they can be
    converted (`48 cm` for `0.48 m`), degree signs, a name before `=`, and `exact \approx rounded` if either is the
    truth and the second is the first rounded. `48\%` is 0.48 and nothing else. Reject units that contradict (`30°` for
    `30 m`), rounded decimals of an exact truth and the reverse, special tokens, and every hedge (`3 or 4`, `3, 4`).
    Never raise and never hang on a prediction; see `reward.Counting`. Without `as_text` it is not enough that the two
    texts are the same: they must have a value.
    """
    out_of_range = (ExpressionTooLarge, decimal.Overflow, decimal.Underflow, RecursionError, MemoryError)
    try:
        with decimal.localcontext(CONTEXT):
            right = compare_answers(prediction, answer, as_text)
    # A policy's text may raise only these errors; an expression without a value counts as unreadable too.
    except (ExpressionError, decimal.DecimalException, RecursionError, MemoryError) as error:
        count("refused" if isinstance(error, out_of_range) else "unreadable")
        right = False
    count("graded")
    return right


def grade_geometry(response: str, answer: str) -> bool:
    r"""Return whether `response` is right for a problem whose truth is `answer` (a number, LaTeX, letter, ratio, ...).

    The answer is the last `\boxed{...}`; see `extract_boxed` and `same_answer`. A single line without any box or tag
    counts as a bare answer, for calls by hand. The geo3k task (`geo3k`) does not do that: it requires a box.
    """
    bare = len(response) <= MAX_ANSWER_CHARS and not re.search(r"\\f?box|</? ?[a-z]+ ?>|\n", response)
    boxed = response if bare else extract_boxed(response)
    return boxed is not None and same_answer(boxed, answer)


# Atomic groups make the time linear: each mark's earliest match leaves the most text for the next mark.
FORMAT = re.compile(r"<think>(?>.*?</think>)(?>.*?\\boxed\{).*?\}", re.DOTALL)


def format_reward(response: str) -> float:
    r"""Return 1.0 if the whole response is `<think>...</think>...\boxed{...}...` without special tokens, else 0.0.

    It matches the same texts as verl's geo3k regex `<think>.*</think>.*\\boxed\{.*\}.*`
    (verl/utils/reward_score/geo3k.py, DOTALL, fullmatch).
    """
    return float(FORMAT.match(response) is not None and not SPECIAL_TOKEN_PATTERN.search(response))


def answerable(truth: str, grade: Callable[[str], dict[str, float]]) -> bool:
    """Return whether a truth, given as the answer, is right, and either is plain words or has a value."""
    require_math_verify()
    if not full_marks(truth, grade):
        return False
    words = re.fullmatch(r"(?=.*[A-Za-z]{3})[\w ,.'-]+", normalise(truth))
    # a short answer, such as its last word or number, would be wrong
    if words and SENTENCE.search(truth) or LEADING_WORDS.search(normalise(truth)):
        count("sentence")
        return False
    return words is not None or same_answer(truth, truth, as_text=False)


@cache
def require_math_verify() -> None:
    """Raise UserError if math-verify is not installed."""
    need(importlib.util.find_spec("math_verify"), "geo3k grading needs math-verify; pip install -r requirements.txt")


@register("geo3k", "geometry3k", answerable=answerable)
def geo3k(response: str, example: Any, finish_reason: str) -> dict[str, float]:
    """Return accuracy, format and their weighted sum, 0.9 * accuracy + 0.1 * format, as "reward".

    As in verl, only the text counts: a response that was cut off has no complete box.
    """
    boxed = extract_boxed(response)
    accuracy = boxed is not None and same_answer(boxed, example.ground_truth)
    return accuracy_and_format_reward(accuracy, format_reward(response))


# --- toy --------------------------------------------------------------------------------------------------------------

TOY_TYPES = ("angle", "area", "hypotenuse", "tangent")
STEP = 18  # pixels between the lattice's lines
LATTICE_GREY = (190, 190, 190)  # colour of the lattice
LEGS = range(1, 5)  # lengths of the legs, in squares
DEMO = {"see_steps": 320, "habit_steps": 60, "questions": 1, "steps": 40}  # settings of demo.py


def draw_triangle(draw: ImageDraw.ImageDraw, rng: random.Random, colour: str, across: int, up: int) -> None:
    """Draw a right triangle on a lattice of 4 by 4 squares.

    Its corners are three of a rectangle of `across` by `up` squares at a random position.
    """
    size = 4 * STEP
    left, top = (rng.randint(0, SIDE - size - 1) for _ in range(2))
    for i in range(0, size + 1, STEP):
        draw.line((left, top + i, left + size, top + i), fill=LATTICE_GREY)
        draw.line((left + i, top, left + i, top + size), fill=LATTICE_GREY)
    x = left + STEP * rng.randint(0, 4 - across)
    y = top + STEP * rng.randint(0, 4 - up)
    corners = [(x + right, y + down) for down in (0, up * STEP) for right in (0, across * STEP)]
    corners.pop(rng.randrange(4))
    draw.polygon(corners, fill=COLOURS[colour], outline=(0, 0, 0))


def triangle_questions(across: int, up: int) -> list[tuple[str, str, str]]:
    """Return tuples (answer type, question, answer) about a triangle that is drawn on squares of side 1."""
    square, slope = across**2 + up**2, Fraction(up, across)
    root = str(math.isqrt(square)) if math.isqrt(square) ** 2 == square else rf"\sqrt{{{square}}}"
    tangent = str(slope) if slope.denominator == 1 else rf"\frac{{{slope.numerator}}}{{{slope.denominator}}}"
    return [
        ("area", "Find the area of the triangle.", f"{across * up / 2:g}"),
        ("hypotenuse", "Find the longest side.", root),
        ("tangent", "Find the vertical side over the horizontal one.", tangent),
    ]


@in_one_split("geo3k/")
def scenes(rng: random.Random) -> Scene:
    """Draw a right triangle on a lattice, or a straight angle cut by a ray."""
    colour, missing = rng.choice(list(COLOURS)), rng.choice(ANGLES) if rng.random() < 0.3 else None
    image = Image.new("RGB", (SIDE, SIDE), (rng.randint(236, 255),) * 3)
    if missing:
        draw_angle(ImageDraw.Draw(image), rng, colour, missing)
        thought, problems = f"180 - {180 - missing}", [("angle", "Find the white angle in degrees.", str(missing))]
    else:
        across, up = rng.choice(LEGS), rng.choice(LEGS)
        draw_triangle(ImageDraw.Draw(image), rng, colour, across, up)
        thought, problems = f"{across} by {up}", triangle_questions(across, up)
    questions = [
        (kind, f"{IMAGE_PLACEHOLDER}{text} {INSTRUCTION}", make_boxed_response(truth, thought), truth)
        for kind, text, truth in problems
    ]
    return [encode_png(image)], questions


toy = toy_of("geo3k", scenes, TOY_TYPES, "problem", answers="answer")
