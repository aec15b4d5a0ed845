r"""The rules by which EasyR1 and verl grade Geometry3K, so that an accuracy can be compared with their published ones.

Both read the last `\boxed{...}`, compare it by mathruler's rules, and weight as we do: 0.9 * accuracy + 0.1 * format.
EasyR1 first removes the spaces around `<`, `>` and `/`. This is our implementation of the behaviour of MathRuler 0.1.0
(github.com/hiyouga/MathRuler), examples/reward_function/math.py of EasyR1 and verl/utils/reward_score/geo3k.py.

It reproduces their faults on purpose, but cannot hang: our parser, with its limits, replaces sympy. So it differs for:

- boxes over MAX_ANSWER_CHARS characters, where sympy hangs: wrong here
- roots of negative numbers: wrong here
- decimals in sums, products, quotients, powers and roots, which our parser computes exactly: sympy rejects
  `\sqrt{41.0}` for `\sqrt{41}`, and `57.3/3` for 19.1
- letters, which are positive here, as lengths are: sympy rejects `\sqrt{x^2}` for x
- functions of sympy with names of one or two letters, such as `ln`, and LaTeX commands outside LATEX_SIGNS, which are
  compared only as text
"""

import decimal
import re
from collections.abc import Iterable

from reward import MAX_ANSWER_CHARS, accuracy_and_format_reward, closing_brace
from tasks.geometry import CONTEXT, FORMAT, ExpressionError, same_value

SPACES_AT_MARKS = re.compile(r"(?<=[<>/])\s+|(?<!\s)\s+(?=[<>/])")

# Tables of replacements, PATTERN -> NEW, applied in order.
# Two answers are equal if this table turns both into the same text; it removes optional LaTeX, units and `x =`.
SPELLING = r"""
^\\text\{(.+?)\}$ -> \1
\n|\\! ->
\\\\ -> \\
[td]frac -> frac
\\left|\\right|\^\{\\circ\}|\^\\circ|\\\$|\\?% ->
(?<=[ {])\.|^\. -> 0.
^(?!.*\\text\{ .*\\text\{ )(.*)\\text\{ .* -> \1
^[^=]{0,2}=([^=]*)$ -> \1
\\sqrt([^{]) -> \\sqrt{\1}
[ ] ->
\\frac([^{])(?=\{) -> \\frac{\1}
\\frac([^{])([^{]) -> \\frac{\1}{\2}
^0\.5$ -> 1/2
^(0|-?[1-9]\d*)/(0|-?[1-9]\d*)$ -> \\frac{\1}{\2}
"""
# Otherwise both become expressions. Units are removed inside words too: `48 millimeters` becomes `48milli`.
WORDS = r"""
\\%|\\?\$|% ->
[ ](?:or|and)[ ] -> ,
million -> *10^6
billion -> *10^9
trillion -> *10^12
(?:degree|cm|(?:centi)?meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)(?:es)?s?[ ]*(?:\^\d+)? ->
\^[ ]*\\circ ->
"""
# Applied from the innermost braces outwards. A fraction gets no brackets, so `\frac{1}{2\pi}` is pi/2, and a root
# loses its index.
GROUPS = r"""
\\\\ -> \n
\\[td]frac -> \\frac
\\frac[ ]*(?:\{([^{}]*)\}|([^{}\\ ]))[ ]*(?:\{([^{}]*)\}|([^{}\\ ])) ->  \1\2/\3\4
(?<![^{(+*/=,\d-])\{([^{}]*)\} -> \1
\\(?:[hv]space\*?|mbox|color|label)[ ]*\{[^{}]*\} ->
\\sqrt[ ]*(?:\[[^]]*\])?[ ]*(?:\{([^{}]*)\}|([^{}\\ ])) ->  sqrt(\1\2)
(\\(?!frac|sqrt)[A-Za-z]+[ ]*|[_^])\{([^{}]*)\} -> \1 \2
"""
# pylatexenc turns a command into a sign or a word, and drops those that it does not know: `x \lt 60` becomes `x60`. A
# command that is not here is kept, so the answer is right only if the truth has the same one. A `~` is a space only at
# the ends.
LATEX_SIGNS = r"""
\\pi(?![A-Za-z])|π -> pi
\\(?:cdot|times)(?![A-Za-z])|[·×] -> *
\\leq?(?![A-Za-z]) -> ≤
\\geq?(?![A-Za-z]) -> ≥
\\neq(?![A-Za-z]) -> ≠
\\pm(?![A-Za-z]) -> ±
\\div(?![A-Za-z]) -> ÷
\\approx(?![A-Za-z]) -> ≈
\\angle(?![A-Za-z]) -> ∠
\\[lr]?vert(?![A-Za-z])|\\mid(?![A-Za-z]) -> |
\\prime(?![A-Za-z]) -> '
\\infty(?![A-Za-z])|∞ -> inf
\\cup(?![A-Za-z])|∪ -> U
\\theta(?![A-Za-z]) -> θ
\\alpha(?![A-Za-z]) -> α
\\beta(?![A-Za-z]) -> β
\\((?:arc)?(?:sin|cos|tan)h?|log|ln|exp|lim|max|min)(?![A-Za-z]) -> \1
\\math(?:bb|bf|cal|frak|it|scr|sf|tt)(?![A-Za-z])[ ]*(?![ A-Za-z]) ->
\\(?:text(?:bf|it|normal|rm|s[cfl])?|math(?:normal|op|rm)|boldsymbol|bm|boxed|emph|fbox)(?![A-Za-z])[ ]* ->
\\(?:(?:over|under)line|over(?:left)?rightarrow|over(?:arc|paren|set)|wide(?:hat|paren|tilde)|cancel)[ ]+ ->
\\(?:(?:display|script|text)style|rm|bf|it|sf|tt|sl|q?quad|left|right|middle|[bB]igg?[lr]?)(?![A-Za-z])[ ]* ->
\\(?:[lg]t|neg?|arc|deg(?:ree)?|triangle|operatorname|implies|iff|colon|gcd|sec|csc|cot)(?![A-Za-z])[ ]* ->
\\[,;: ]() ->  \1
\\(?:[()\[\]!0-9]|(?![A-Za-z])) ->
√ -> sqrt
-- -> –
~ -> \n
"""
LAST = r"""
([0-9])[ ]+([0-9]) -> \1+\2
[ {}] ->
(?<=\d),(?=\d{3}(?:\D|$)) ->
"""
PARSABLE = r"""
(?<![\d.p])([a-z])(?=\d+(?![\d.])) -> \1*
\*\* -> ^
sqrt\( -> \\sqrt(
"""


def apply_replacements(text: str, table: str) -> str:
    """Apply a table's replacements to a text."""
    for line in table.strip().splitlines():
        pattern, _, new = line.partition(" ->")
        text = re.sub(pattern, new.removeprefix(" "), text)
    return text


def whole_number(text: str) -> str:
    """Return the digits of a number that is whole to 1e-7, as `float` reads it (`3.0` -> `3`), or "" for any
    other text."""
    try:
        number, nearest = float(text), round(float(text))
        return str(nearest) if abs(number - nearest) <= 1e-7 else ""
    except (ValueError, OverflowError):
        return ""


def normalise_expression(answer: str) -> str:
    """Return an answer as an expression in lower case without spaces, units and braces; a whole number becomes its
    digits (`3.0` -> `3`)."""
    text = apply_replacements(answer, WORDS)
    if "\\" in text:
        while text != (text := apply_replacements(text, GROUPS)):
            pass
        text = apply_replacements(text, LATEX_SIGNS).strip()
    text = apply_replacements(text, LAST).lower()
    return whole_number(text) or text


def split_members(text: str) -> list[str]:
    """Return the members of a point or an interval, or, for any other text, a list with just the text."""
    return text[1:-1].split(",") if re.fullmatch(r"[(\[][^()\[\]]+[)\]]", text) else [text]


def equal_members(answer: str, truth: str) -> bool:
    """Return whether two expressions have the same value. Two fractions, or a whole number and another text, are equal
    only if they are the same text."""
    both = f"{answer};{truth}"
    letters = set(filter(str.isalpha, re.sub("sqrt|frac", "", both)))
    fraction = r"-?[0-9]+.?/0*[1-9][0-9]*.?"
    if re.fullmatch(f"{fraction};{fraction}", both) or bool(whole_number(answer)) != bool(whole_number(truth)):
        return answer == truth
    if len(letters) > 2 or re.search(r"\^\(|\^[0-9]+\^|\^[0-9]{2}|[|±∪°\\]", both):
        return False
    try:
        with decimal.localcontext(CONTEXT):
            return same_value(apply_replacements(answer, PARSABLE), apply_replacements(truth, PARSABLE))
    except (ExpressionError, decimal.DecimalException, RecursionError):
        return False


def equal_by_mathruler(answer: str, truth: str) -> bool:
    """Return whether mathruler counts an answer as equal to the truth."""
    if apply_replacements(answer, SPELLING) == apply_replacements(truth, SPELLING):
        return True
    answer, truth = normalise_expression(answer), normalise_expression(truth)
    answers, truths = split_members(answer), split_members(truth)
    if answer == truth or not answer or len(answers) != len(truths):
        return answer == truth
    same_brackets = len(truths) == 1 or answer[0] + answer[-1] == truth[0] + truth[-1]
    return same_brackets and all(map(equal_members, answers, truths))


def published_reward(grader: str, response: str, truth: str) -> dict[str, float]:
    """Return the accuracy, format and total reward of a response by the rules of `easyr1` or `verl`."""
    if grader == "easyr1":
        response = SPACES_AT_MARKS.sub("", response)
    _, box, rest = response.rpartition("\\boxed{")
    end = closing_brace(rest, 0)
    answer = rest[:end].strip() if box and end is not None else "None"
    accuracy = len(answer) <= MAX_ANSWER_CHARS and equal_by_mathruler(answer, truth.strip())
    return accuracy_and_format_reward(accuracy, bool(FORMAT.match(response)))


def add_published_grades(grader: str, records: Iterable[dict]) -> dict[str, list[str]]:
    """Add a published grader's accuracy and score, its total reward, to the rewards of all responses. Return the uids
    of the examples with a response that only this grader accepts, and of those with one that only ours accepts.
    Responses without an accuracy of ours, such as those whose reward failed, are not compared."""
    differ = {"accepts": [], "rejects": []}
    for record in records:
        gaps = set()
        for sample in record["samples"]:
            theirs = published_reward(grader, sample["text"], record["ground_truth"])
            gaps.add(theirs["accuracy"] - sample["rewards"].get("accuracy", theirs["accuracy"]))
            sample["rewards"] |= {f"{grader}_accuracy": theirs["accuracy"], f"{grader}_score": theirs["reward"]}
        differ["accepts"] += [record["uid"]] * (max(gaps) > 0)
        differ["rejects"] += [record["uid"]] * (min(gaps) < 0)
    return differ
