"""Self-contained HTML pages of an evaluation or of a step's rollouts: numbers with their intervals, curves, and a
gallery of prompts, images, responses and rewards with PER_PAGE prompts per file.

The layout is in templates/. Templates escape all values, because these may come from data, the policy or a reward, and
raise an error for undefined names. Only styles and scripts of templates/ are `Markup`, which is not escaped.
"""

import base64
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from report.page.gallery import PER_PAGE, Gallery
from report.page.plots import axis_ticks, draw_grid, measured_panels, run_curves
from report.records import select_records
from report.run_files import read_rows, write_text
from report.summary import SEEN, evaluations, scores
from report.writer import ReportPage
from settings import is_finite_number

TEMPLATES = Path(__file__).parent / "templates"


def read_overview(run: Path) -> dict[str, Any]:
    """Return what a page shows of a run, from the files of its folder."""
    rows, file = read_rows(run / "metrics.jsonl"), run / "run.json"
    return {
        "info": json.loads(file.read_text()) if file.exists() else {},
        "scores": evaluations(rows) or scores(rows, "reward/mean", "reward"),
        "rows": rows, "curves": run_curves(rows),
    }  # fmt: skip


def write_run_page(out: Path, content: ReportPage | None) -> None:
    """Write OUT/report.html, and draw OUT/curves.png from metrics.jsonl if matplotlib is installed."""
    if content or not (out / "report.html").exists():  # else keep the page from before an interruption
        write_pages(out / "report.html", (content or ReportPage("/".join(out.absolute().parts[-2:])))._replace(run=out))
    panels = measured_panels(read_rows(out / "metrics.jsonl"))
    if panels and importlib.util.find_spec("matplotlib"):  # last, because it can fail
        draw_grid(panels, out / "curves.png")


def write_pages(path: Path, content: ReportPage) -> None:
    """Write NAME.html, NAME-2.html, ..., and remove the remaining pages of an earlier, longer report."""
    overview = read_overview(content.run) if content.run else {}
    n = 0
    for n, text in enumerate(pages(content, overview, path.stem), 1):
        write_text(path.with_name(page_name(path.stem, n)), text)
    while (old := path.with_name(page_name(path.stem, n := n + 1))).exists():
        old.unlink()


def page_name(stem: str, n: int) -> str:
    """Return the file name of page n, counted from 1."""
    return f"{stem}.html" if n == 1 else f"{stem}-{n}.html"


def pages(content: ReportPage, overview: Mapping[str, Any], stem: str = "report") -> Iterator[str]:
    """Yield the pages of a report as HTML. Numbers and curves are on the first."""
    summary = content.summary
    records = select_records(content.records, summary)
    gallery = Gallery(content, records)
    style, script = ((TEMPLATES / f"page.{suffix}").read_text() for suffix in ("css", "js"))
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                      loader=FileSystemLoader(TEMPLATES))  # fmt: skip
    env.filters |= {"number": number, "decimals": format_three_digits, "url_query": url_query}
    env.globals |= {"scale": scale, "is_number": is_finite_number, "SEEN": SEEN, "axis_ticks": axis_ticks}
    env.globals |= {
        "title": content.title, "summary": summary,
        "facts": [(*name.rpartition("/"), value) for name, value in content.facts.items() if is_finite_number(value)],
        "passes": [name for name in summary if name.startswith("pass@")],
        **overview, "style": Markup(style), "script": Markup(script),
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "gallery": gallery, "n_shown": len(records), "n_records": len(content.records),
    }  # fmt: skip
    starts = range(0, max(1, len(records)), PER_PAGE)
    names = [page_name(stem, k) for k in range(1, len(starts) + 1)]
    facts = {k: gallery.facts[start : start + PER_PAGE] for k, start in enumerate(starts, 1)}
    template = env.get_template("page.html")
    for k, start in enumerate(starts, 1):
        cards, notes = gallery.cards(start) if records else ([], [])
        other_pages = {n: page_facts for n, page_facts in facts.items() if n != k}  # the filters count their prompts
        text = template.render(page=k, names=names, other_pages=other_pages, start=start, cards=cards, notes=notes)
        yield text.encode(errors="replace").decode()  # JSON may contain half a surrogate pair, which no file can


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


def number(value: object) -> str:
    """Return a float with four digits, or more if it is large; other values as text."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value + 0.0:.4g}"  # + 0: no -0


def format_three_digits(value: float | None, form: str = ".3f") -> str:
    """Return a number with three decimal places (or another format), or a dash if it is not a number."""
    return f"{value or 0:{form}}" if is_finite_number(value) else "–"


def scale(table: Mapping[str, Mapping], metric: str) -> tuple[float, float]:
    """Return the ends of a scale for a table of means and intervals: 0 and 1, or beyond these if a value is."""
    ends = [
        x
        for row in table.values()
        for x in (row.get(metric), *(row.get(f"{metric}_ci95") or ()))
        if is_finite_number(x)
    ]
    return min([0.0, *ends]), max([1.0, *ends])


def url_query(text: object) -> str:
    """Return a text quoted for use in a URL's query."""
    return quote(str(text), safe="", errors="replace")
