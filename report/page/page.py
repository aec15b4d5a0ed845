"""An evaluation, or a step's rollouts, as HTML files that need no others: numbers with their intervals, curves, and a
gallery of prompts, images, responses and rewards, PER_PAGE prompts a file.

templates/ has what the pages look like. Templates escape whatever they show, as it may come from data, the policy or a
reward, and refuse names that are not defined. Only what we made, MathML and SVG, is `Markup`, which is not escaped.
"""

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from report.files import read_rows, write_text
from report.page.gallery import PER_PAGE, Gallery
from report.page.plots import Curve, draw_grid, measured_panels, run_curves
from report.records import select_records
from report.summary import ABLATIONS
from report.writer import ReportPage

TEMPLATES = Path(__file__).parent / "templates"


def write_run_page(out: Path, shown: ReportPage | None) -> None:
    """Draw OUT/curves.png from metrics.jsonl, if matplotlib is installed, and write OUT/report.html."""
    rows = read_rows(out / "metrics.jsonl")
    if found := measured_panels(rows):
        draw_grid(found, out / "curves.png")
    if shown or not (out / "report.html").exists():  # else keep the page from before the interruption
        write_pages(out / "report.html", shown or ReportPage(out.name), run_curves(rows))


def write_pages(path: Path, shown: ReportPage, curves: Sequence[Curve] = ()) -> None:
    """Write NAME.html, NAME-2.html, ..., and remove further ones that an earlier, longer report left."""
    n = 0
    for n, text in enumerate(pages(shown, curves, path.stem), 1):
        write_text(path.with_name(page_name(path.stem, n)), text)
    while (old := path.with_name(page_name(path.stem, n := n + 1))).exists():
        old.unlink()


def page_name(stem: str, n: int) -> str:
    return f"{stem}.html" if n == 1 else f"{stem}-{n}.html"


def pages(shown: ReportPage, curves: Sequence[Curve], stem: str = "report") -> Iterator[str]:
    """Yield the pages of a report. Numbers and curves are on the first."""
    summary = shown.summary
    records = select_records(shown.records, summary)
    gallery = Gallery(shown, records)
    style, script = ((TEMPLATES / f"page.{kind}").read_text() for kind in ("css", "js"))
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                      loader=FileSystemLoader(TEMPLATES))  # fmt: skip
    env.filters |= {"number": number, "share": format_three_digits, "query": url_query}
    env.globals |= {"scale": scale, "is_number": is_number, "IMAGES": ABLATIONS}
    env.globals |= {
        "title": shown.title, "summary": summary,
        "facts": [(*name.rpartition("/"), value) for name, value in shown.facts.items() if is_number(value)],
        "passes": [name for name in summary if name.startswith("pass@")],
        "curves": [(curve, Markup(curve.image)) for curve in curves], "style": Markup(style), "script": Markup(script),
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "gallery": gallery, "n_shown": len(records), "n_records": len(shown.records),
    }  # fmt: skip
    starts = range(0, max(1, len(records)), PER_PAGE)
    names = [page_name(stem, k) for k in range(1, len(starts) + 1)]
    facts = {k: gallery.facts[start : start + PER_PAGE] for k, start in enumerate(starts, 1)}
    template = env.get_template("page.html")
    for k, start in enumerate(starts, 1):
        cards, notes = gallery.cards(start) if records else ([], [])
        others = {other: of for other, of in facts.items() if other != k}  # for the filters, which count them
        text = template.render(page=k, names=names, others=others, start=start, cards=cards, notes=notes)
        yield text.encode(errors="replace").decode()  # half a surrogate pair, which JSON may bring, is in no file


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: object) -> str:
    """Return a number with four digits, or more if it is large; anything else as text."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value + 0.0:.4g}"  # + 0: no -0


def format_three_digits(value: float | None, form: str = ".3f") -> str:
    return f"{value or 0:{form}}" if is_number(value) else "–"


def scale(groups: Mapping[str, Mapping], metric: str) -> tuple[float, float]:
    """Return the ends of a scale for a metric of groups and its intervals: 0 and 1, or what lies beyond."""
    found = [x for g in groups.values() for x in (g.get(metric), *(g.get(f"{metric}_ci95") or ())) if is_number(x)]
    return min([0.0, *found]), max([1.0, *found])


def url_query(text: object) -> str:
    return quote(str(text), safe="", errors="replace")
