r"""LaTeX in a text as MathML that is safe to show, whatever a policy wrote; all else as escaped text.

Formulas are what stands between $...$, $$...$$, \( \), \[ \] and in \boxed{...}. Dollars that are money stay text.
"""

import html
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple
from xml.etree.ElementTree import Element

MAX_CHARS = 1500  # of a formula's source; longer ones stay as they are
MOST_INLINE = 500  # of one in \( \), whose end is searched for at each beginning
MAX_MATHML_DEPTH = 24  # of nested elements: a browser's layout takes a time that grows with a power of it
INSIDE = r"[^{}\\]|\\."  # of braces, which may be nested
for _ in range(5):
    INSIDE = rf"[^{{}}\\]|\\.|\{{(?:{INSIDE})*+\}}"
FORMULA = re.compile(
    rf"""
    (?:(?<!\n)\n++)? \$\$ (?!\$\$) (?P<block>.{{1,{MAX_CHARS}}}?) \$\$ \n*  # a block has the empty lines around it
    | (?:(?<!\n)\n++)? \\\[ (?!\\\]) (?P<bracket>.{{1,{MAX_CHARS}}}?) \\\] \n*
    | \\\( (?!\\\)) (?P<inline>.{{1,{MOST_INLINE}}}?) \\\)
    | \$ (?![\s$]) (?P<dollar>(?:[^$\\]|\\.){{1,{MAX_CHARS}}}?) (?<=\S) \$ (?!\d)
    | \\boxed\s* \{{ (?P<boxed>(?:{INSIDE}){{1,{MAX_CHARS}}}+) \}}
    | \\\\ | \\\$ | \$\$  # the end of a line, an escaped dollar, one without its end: no formulas
    """,
    re.DOTALL | re.VERBOSE,
)
TEX = re.compile(r"[\\^_{}=<>+*/|]")  # in a formula; words without any are no formula
MACROS = re.compile(r"\\(?:def|edef|gdef|let|(?:re)?newcommand|providecommand|(?:re)?newenvironment|Declare)")

ELEMENTS = frozenset(
    "math mrow mi mn mo mtext mspace msup msub msubsup mfrac msqrt mroot mover munder munderover mtable mtr mtd mstyle "
    "mpadded mphantom menclose mmultiscripts mprescripts none".split()
)
ATTRIBUTES = frozenset(
    "display mathvariant stretchy fence separator accent accentunder movablelimits displaystyle largeop form "
    "scriptlevel linethickness width height depth voffset lspace rspace minsize maxsize columnalign columnlines "
    "rowlines notation".split()
)
# of attributes: words, a digit or a short length, so nothing that links, runs, styles or covers other text
VALUE = re.compile(
    r"[a-z-]{1,20}(?: [a-z-]{1,20}){0,20}|[+-]?\d"
    r"|[+-]?(?:\d|\d?\.\d{1,4})(?:em|ex|mu)|[+-]?\d\d?(?:\.\d+)?(?:px|pt)|[01]?\d\d%"
)


class TextSegment(NamedTuple):
    """A piece of a text. `latex` is None where it is no formula."""

    source: str
    latex: str | None = None
    block: bool = False
    boxed: bool = False


class UnsupportedFormula(Exception):
    """A formula that stays text: too deep, or of elements that are not allowed."""


def split_formulas(text: str) -> Iterator[TextSegment]:
    """Yield the text in pieces, whose sources joined are the text."""
    done = at = 0
    while found := FORMULA.search(text, at):
        at, kind = found.end(), found.lastgroup
        if kind is None:
            continue
        latex = found[kind].strip()
        if not latex or (kind == "dollar" and is_price_range(latex)):
            at = found.start() + 1
            continue
        if found.start() > done:
            yield TextSegment(text[done : found.start()])
        yield TextSegment(found[0], latex, kind in ("block", "bracket"), kind == "boxed")
        done = at
    if done < len(text):
        yield TextSegment(text[done:])


def is_price_range(latex: str) -> bool:
    """Between two dollars that are money rather than a formula's: "5 or 6", "5.\n\nIt has"."""
    return "\n\n" in latex or (not TEX.search(latex) and bool(re.search(r"[A-Za-z]{2}.*\s|\s.*[A-Za-z]{2}", latex)))


def render_segment(part: TextSegment) -> str:
    """A piece as HTML: a formula with its source, which the page can show in its stead."""
    source = html.escape(part.source)
    if part.latex is None:
        return source
    if part.boxed and not re.search(r"[\\^_{}$]", part.latex):
        formula = f"<b class=boxed>{html.escape(part.latex)}</b>"  # often words, which as a formula lose their spaces
    else:
        latex = part.latex.strip().removeprefix("$").removesuffix("$") if part.boxed else part.latex
        formula = mathml(latex, part.block)
        formula = f"<b class=boxed>{formula}</b>" if formula and part.boxed else formula
    return f"<span class=tex>{formula}<code>{source}</code></span>" if formula else source


@lru_cache(1 << 15)
def mathml(latex: str, block: bool = False) -> str:
    r"""A <math> element; "" if the formula is wrong, too long, or more than a formula (\def: its expansion may be
    without end)."""
    from latex2mathml import exceptions
    from latex2mathml.converter import Converter

    if len(latex) > MAX_CHARS or MACROS.search(latex):
        return ""
    wrong = tuple(error for error in vars(exceptions).values() if isinstance(error, type))
    # The library has no base class of its own, and on wrong input raises these too. RuntimeError: too deep
    wrong += (UnsupportedFormula, LookupError, ValueError, TypeError, AttributeError, RuntimeError, StopIteration)
    try:
        return serialise_element(Converter(display="block" if block else "inline").convert_to_element(latex))
    except wrong:
        return ""


def serialise_element(element: Element, depth: int = 0) -> str:
    """An element with what is allowed of its attributes. The library writes characters as references, in text that
    it does not escape."""
    if element.tag not in ELEMENTS or depth > MAX_MATHML_DEPTH:
        raise UnsupportedFormula(f"{element.tag} at depth {depth}")
    children = "".join(serialise_element(child, depth + 1) for child in element)
    inner = html.escape(html.unescape(element.text or ""), quote=False) + children
    allowed = {k: v for k, v in element.attrib.items() if k in ATTRIBUTES and VALUE.fullmatch(v)}
    if element.tag == "mrow" and len(element) == 1 and not element.text:
        return inner
    attributes = "".join(f' {k}="{v}"' for k, v in allowed.items())
    return f"<{element.tag}{attributes}>{inner}</{element.tag}>"
