r"""Rendering of LaTeX formulas in a text as MathML that is safe to show, whatever the policy wrote; other text is
escaped.

Formulas are enclosed in $...$, $$...$$, \( \), \[ \] or \boxed{...}. Dollar signs of prices remain text.
"""

import html
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple
from xml.etree.ElementTree import Element

MAX_CHARS = 1500  # per formula; the source of longer ones is shown
MAX_INLINE_CHARS = 500  # of a formula in \( \); its end is searched for at every \(
MAX_MATHML_DEPTH = 24  # nested elements; a browser's layout time grows with a power of the depth
INSIDE = r"[^{}\\]|\\."  # text inside braces; the loop adds nested braces
for _ in range(5):
    INSIDE = rf"[^{{}}\\]|\\.|\{{(?:{INSIDE})*+\}}"
FORMULA = re.compile(
    rf"""
    (?:(?<!\n)\n++)? \$\$ (?!\$\$) (?P<block>.{{1,{MAX_CHARS}}}?) \$\$ \n*  # a block includes the empty lines around it
    | (?:(?<!\n)\n++)? \\\[ (?!\\\]) (?P<bracket>.{{1,{MAX_CHARS}}}?) \\\] \n*
    | \\\( (?!\\\)) (?P<inline>.{{1,{MAX_INLINE_CHARS}}}?) \\\)
    | \$ (?![\s$]) (?P<dollar>(?:[^$\\]|\\.){{1,{MAX_CHARS}}}?) (?<=\S) \$ (?!\d)
    | \\boxed\s* \{{ (?P<boxed>(?:{INSIDE}){{1,{MAX_CHARS}}}+) \}}
    | \\\\ | \\\$ | \$\$  # not formulas: a line break, an escaped dollar, an unclosed $$
    """,
    re.DOTALL | re.VERBOSE,
)
TEX = re.compile(r"[\\^_{}=<>+*/|]")  # characters of formulas; several words without any of them are text
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
# allowed attribute values: words, a digit or a short length, so that none can link, run, style or cover other text
VALUE = re.compile(
    r"[a-z-]{1,20}(?: [a-z-]{1,20}){0,20}|[+-]?\d"
    r"|[+-]?(?:\d|\d?\.\d{1,4})(?:em|ex|mu)|[+-]?\d\d?(?:\.\d+)?(?:px|pt)|[01]?\d\d%"
)


class TextSegment(NamedTuple):
    """A piece of a text. `latex` is None if the piece is not a formula."""

    source: str
    latex: str | None = None
    block: bool = False
    boxed: bool = False


class UnsupportedFormula(Exception):
    """Raised for a formula that must remain text: it is too deep or has elements that are not allowed."""


def split_formulas(text: str) -> Iterator[TextSegment]:
    """Yield the pieces of a text; their sources together are the text."""
    done = position = 0
    while match := FORMULA.search(text, position):
        position, kind = match.end(), match.lastgroup
        if kind is None:
            continue
        latex = match[kind].strip()
        if not latex or (kind == "dollar" and is_price_range(latex)):
            position = match.start() + 1
            continue
        if match.start() > done:
            yield TextSegment(text[done : match.start()])
        yield TextSegment(match[0], latex, kind in ("block", "bracket"), kind == "boxed")
        done = position
    if done < len(text):
        yield TextSegment(text[done:])


def is_price_range(latex: str) -> bool:
    """Return whether the text between two dollar signs belongs to prices, not a formula: "5 or 6", "5.\n\nIt has"."""
    return "\n\n" in latex or (not TEX.search(latex) and bool(re.search(r"[A-Za-z]{2}.*\s|\s.*[A-Za-z]{2}", latex)))


def render_segment(segment: TextSegment) -> str:
    """Return a piece as HTML. A formula includes its source, which the page can show instead."""
    source = html.escape(segment.source)
    if segment.latex is None:
        return source
    if segment.boxed and not re.search(r"[\\^_{}$]", segment.latex):
        formula = f"<b class=boxed>{html.escape(segment.latex)}</b>"  # often words, whose spaces a formula would lose
    else:
        latex = segment.latex.strip().removeprefix("$").removesuffix("$") if segment.boxed else segment.latex
        formula = mathml(latex, segment.block)
        formula = f"<b class=boxed>{formula}</b>" if formula and segment.boxed else formula
    return f"<span class=tex>{formula}<code>{source}</code></span>" if formula else source


@lru_cache(1 << 15)
def mathml(latex: str, block: bool = False) -> str:
    r"""Return a formula as a <math> element, or "" if it is invalid, too long or defines macros (\def: its expansion
    may never end)."""
    from latex2mathml import exceptions
    from latex2mathml.converter import Converter

    if len(latex) > MAX_CHARS or MACROS.search(latex):
        return ""
    errors = tuple(error for error in vars(exceptions).values() if isinstance(error, type))
    # the library's exceptions have no common base class, and invalid input raises these too (RuntimeError: too deep)
    errors += (UnsupportedFormula, LookupError, ValueError, TypeError, AttributeError, RuntimeError, StopIteration)
    try:
        return serialise_element(Converter(display="block" if block else "inline").convert_to_element(latex))
    except errors:
        return ""


def serialise_element(element: Element, depth: int = 0) -> str:
    """Return an element as HTML with only the allowed attributes. Raise UnsupportedFormula if it is too deep or not
    allowed. The library writes characters as references, but does not escape text."""
    if element.tag not in ELEMENTS or depth > MAX_MATHML_DEPTH:
        raise UnsupportedFormula(f"{element.tag} at depth {depth}")
    children = "".join(serialise_element(child, depth + 1) for child in element)
    inner = html.escape(html.unescape(element.text or ""), quote=False) + children
    allowed = {k: v for k, v in element.attrib.items() if k in ATTRIBUTES and VALUE.fullmatch(v)}
    if element.tag == "mrow" and len(element) == 1 and not element.text:
        return inner
    attributes = "".join(f' {k}="{v}"' for k, v in allowed.items())
    return f"<{element.tag}{attributes}>{inner}</{element.tag}>"
