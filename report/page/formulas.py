r"""LaTeX in a text as MathML that is safe to show, whatever a policy wrote; all else as escaped text.

Formulas are what stands between $...$, $$...$$, \( \), \[ \] and in \boxed{...}. Dollars that are money stay text.
"""

import html
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple
from xml.etree.ElementTree import Element

MOST_CHARS = 1500  # of a formula's source; longer ones stay as they are
MOST_DEPTH = 24  # of nested elements: a browser's layout takes a time that grows with a power of it
OPENERS = re.compile(r"\\\\|\\\$|\$\$|\$|\\\(|\\\[|\\boxed\s*\{")
INLINE = re.compile(rf"\$(?=\S)((?:[^$\\]|\\.){{1,{MOST_CHARS}}}?)(?<=\S)\$(?!\d)", re.DOTALL)
CLOSERS = {"$$": "$$", r"\(": r"\)", r"\[": r"\]"}
LINES = re.compile(r"\n*")
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


class Part(NamedTuple):
    """A piece of a text. `latex` is None where it is no formula."""

    source: str
    latex: str | None = None
    block: bool = False
    boxed: bool = False


class NotShown(Exception):
    """A formula that stays text: too deep, or of elements that are not allowed."""


def parts(text: str) -> Iterator[Part]:
    """The text in pieces, whose sources joined are the text."""
    done = at = 0
    while opened := OPENERS.search(text, at):
        at = opened.end()
        if found := formula_at(text, opened):
            start, end = opened.start(), opened.start() + len(found.source)
            if found.block:  # it has lines of its own: those that are empty around it belong to it
                start = done + len(text[done:start].rstrip("\n"))
                end = LINES.match(text, end).end()
            if start > done:
                yield Part(text[done:start])
            yield found._replace(source=text[start:end])
            done = at = end
    if done < len(text):
        yield Part(text[done:])


def formula_at(text: str, opened: re.Match) -> Part | None:
    """The formula that begins there, if one does."""
    start, kind = opened.start(), opened[0]
    if kind == "$":
        found = INLINE.match(text, start)
        return Part(found[0], found[1]) if found and not is_words(found[1]) else None
    if kind in CLOSERS:
        end = text.find(CLOSERS[kind], opened.end(), opened.end() + MOST_CHARS)
        latex = text[opened.end() : end].strip()
        return Part(text[start : end + 2], latex, kind != r"\(") if end >= 0 and latex else None
    if kind.startswith(r"\boxed"):
        end = closing_brace(text, opened.end())
        latex = text[opened.end() : end - 1]
        return Part(text[start:end], latex, boxed=True) if end and latex.strip() else None
    return None  # an escaped dollar, or the end of a line


def is_words(latex: str) -> bool:
    """Between two dollars that are money rather than a formula's: "5 or 6", "5.\n\nIt has"."""
    return "\n\n" in latex or (not TEX.search(latex) and bool(re.search(r"[A-Za-z]{2}.*\s|\s.*[A-Za-z]{2}", latex)))


def closing_brace(text: str, start: int) -> int:
    """The place after the brace that closes the one before `start`, 0 without one."""
    depth, end = 1, min(len(text), start + MOST_CHARS)
    at = start
    while at < end:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 2 if text[at] == "\\" else 1
        if not depth:
            return at
    return 0


def shown(part: Part) -> str:
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

    if len(latex) > MOST_CHARS or MACROS.search(latex):
        return ""
    wrong = tuple(error for error in vars(exceptions).values() if isinstance(error, type))
    # The library has no base class of its own, and on wrong input raises these too. RuntimeError: too deep
    wrong += (NotShown, LookupError, ValueError, TypeError, AttributeError, RuntimeError, StopIteration)
    try:
        return serialised(Converter(display="block" if block else "inline").convert_to_element(latex))
    except wrong:
        return ""


def serialised(element: Element, depth: int = 0) -> str:
    """An element with what is allowed of its attributes. The library writes characters as references, in text that
    it does not escape."""
    if element.tag not in ELEMENTS or depth > MOST_DEPTH:
        raise NotShown(f"{element.tag} at depth {depth}")
    children = "".join(serialised(child, depth + 1) for child in element)
    inner = html.escape(html.unescape(element.text or ""), quote=False) + children
    allowed = {k: v for k, v in element.attrib.items() if k in ATTRIBUTES and VALUE.fullmatch(v)}
    if element.tag == "mrow" and len(element) == 1 and not element.text:
        return inner
    attributes = "".join(f' {k}="{v}"' for k, v in allowed.items())
    return f"<{element.tag}{attributes}>{inner}</{element.tag}>"
