"""An evaluation, or a step's rollouts, as one HTML file that needs no other: numbers with their intervals, curves, and
a gallery of prompts, images, responses and rewards. page.css and page.js are its style and its keys."""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from prepare_data import Example
from report.gallery import MOST_PROMPTS, Gallery, choose, number, readable, safe
from report.summary import IMAGES
from report.thumbnails import image_tag

MOST_BYTES = 20_000_000  # of a page
HERE = Path(__file__).parent
FILTERS = {  # of the gallery: name -> key, what it shows
    "all": ("a", "all"), "wrong": ("w", "wrong"), "right": ("r", "right"), "gained": ("g", "gained"),
    "lost": ("l", "lost"), "disagree": ("d", "samples disagree"), "cut": ("c", "truncated"), "failed": ("f", "failed"),
}  # fmt: skip
ORDERS = {"order": "in order", "tokens": "longest first", "reward": "lowest reward first", "spread": "largest spread"}
TILES = {  # figures of a summary: name -> what it is called, its format
    "truncated": ("truncated", ".3f"), "response_tokens": ("tokens per response", ".1f"),
    "failed": ("rewards that failed", ","), "left_out": ("prompts left out", ","), "turns": ("turns", ".2f"),
}  # fmt: skip
KEYS = {
    "j / k": "next, previous prompt", "o, Enter": "open its image in full", "s": "another order", "/": "search",
    "t": "formulas as they were written, and back", "?": "this list", "Esc": "close, or leave the search",
}  # fmt: skip


class Curve(NamedTuple):
    title: str
    image: str  # an <svg> or <img> tag of ours
    note: str  # what is healthy, and what to think otherwise


def page(
    title: str,
    records: Sequence[dict],
    examples: Mapping[str, Example],
    *,
    summary: dict | None = None,
    facts: Mapping[str, float] | None = None,
    curves: Sequence[Curve] = (),
    others: Mapping[str, Sequence[dict]] | None = None,
    folder: Path | None = None,
) -> str:
    """`examples`: by uid, of those that `choose(records, summary)` gives, as the model saw them. `summary`: an
    evaluation's; `facts`: a training step's metrics. `others`: label -> what other models, or this one without its
    images, said to the same prompts. `folder`: a folder next to the page's file, for images in full size."""
    summary = summary or {}
    head = [f"<header><h1>{safe(title)}</h1>{subtitle(title, summary)}</header>"]
    head += [tiles(summary), facts_block(facts or {}), tables(summary), curve_block(curves)]
    shown = choose(records, summary)
    cards = Gallery(shown, examples, summary, others or {}, folder) if shown else None
    return document(title, "".join(head), cards, len(records))


def document(title: str, head: str, gallery: Gallery | None, total: int) -> str:
    style, script = ((HERE / f"page.{kind}").read_text() for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    policy += "; base-uri 'none'; form-action 'none'"
    start = (
        "<!doctype html><html lang=en><head><meta charset=utf-8><meta http-equiv=Content-Security-Policy "
        f'content="{policy}"><meta name=viewport content="width=device-width,initial-scale=1">'
        f"<meta name=referrer content=no-referrer><title>{safe(title)}</title><style>{style}</style></head>"
        "<body>"
    )
    end = f"<script>{script}</script></body></html>\n"
    if not gallery:
        return f"{start}{head}{end}"
    room = MOST_BYTES - sum(len(text.encode()) for text in (start, head, end)) - 20_000  # what stands around the cards
    cards = []
    for n in range(len(gallery.records)):
        card = gallery.card(n)
        room -= len(card.encode())
        if room < 0:
            break
        cards.append(card)
    notes = gallery.notes()
    if len(cards) < total:
        first = "first those gained, lost, failed, truncated or wrong" if total > MOST_PROMPTS else "the first"
        notes.insert(0, f"{len(cards):,} of {total:,} prompts are shown, {first}.")
    system = ""
    if gallery.same_system:
        text = gallery.texts.show(gallery.same_system)
        system = f"<details class=system><summary>The system message of all prompts</summary>{text}</details>"
    told = "".join(f"<p class=note>{safe(note)}</p>" for note in notes)
    switch = "<label><input type=checkbox id=source> formulas as they were written <kbd>t</kbd></label>"
    top = f"<div class=title><h2>Prompts</h2>{switch}</div>{told}{system}{toolbar(gallery)}"
    body = f"{top}<main id=gallery>{''.join(cards)}</main>{keys()}"
    return f"{start}{head}{body}{end}"


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def share(value: float | None) -> str:
    return f"{value + 0.0:.3f}" if is_number(value) else "&ndash;"


def interval(ends: Sequence[float] | None, signed: bool = False) -> str:
    if not ends:
        return ""
    return " to ".join(f"{x:+.3f}" if signed else f"{x:.3f}" for x in ends)


def p_value(p: float | None) -> str:
    if not is_number(p):
        return "&ndash;"
    return "&lt; 0.001" if p < 0.001 else f"{p:.3f}"


def bar(value: float | None, ends: Sequence[float] | None, low: float, high: float) -> str:
    """A value with its interval, on a scale from low to high."""
    if not is_number(value):
        return ""
    zero, at, *whisker = (100 * (min(max(x, low), high) - low) / (high - low) for x in (0.0, value, *(ends or ())))
    fill = f"left:{min(zero, at):.2f}%;width:{abs(at - zero):.2f}%"
    drawn = f"<i class=fill style='{fill}'></i>"
    if whisker:
        drawn += f"<i class=whisker style='left:{whisker[0]:.2f}%;width:{whisker[1] - whisker[0]:.2f}%'></i>"
    return f"<span class=bar aria-hidden=true>{drawn}</span>"


def subtitle(title: str, summary: Mapping) -> str:
    """What the title does not say already."""
    names = ("path", "checkpoint", "data", "n", "samples", "temperature")
    found = {name: summary[name] for name in names if summary.get(name) is not None}
    said = [name for name in ("path", "data") if str(found.get(name)) in title]
    told = [f"{name} <b>{number(value)}</b>" for name, value in found.items() if name not in said]
    return f"<p class=about>{' &middot; '.join(told)}</p>" if told else ""


def tile(name: str, value: str, note: str = "", kind: str = "") -> str:
    below = f"<dd class=note>{note}</dd>" if note else ""
    return f"<div class='tile {kind}'><dt>{name}</dt><dd>{value}</dd>{below}</div>"


def tiles(summary: Mapping) -> str:
    """Show what an evaluation found: the accuracy, or the reward of a task without right or wrong, then all else."""
    metric = summary.get("metric", "accuracy")
    if metric not in summary:
        return ""
    ends = summary.get(f"{metric}_ci95")
    note = f"{interval(ends)} (95%)" if ends else "no interval"
    drawn = bar(summary[metric], ends, 0.0, 1.0) if metric == "accuracy" else ""
    prompts = f" of {summary['n']:,} prompts" if "n" in summary else ""
    shown = [tile(metric + prompts, share(summary[metric]), note + drawn, "first")]
    if mean := summary.get("task_mean"):
        note = f"{interval(mean.get(f'{metric}_ci95'))} (95%), of {mean.get('n_tasks', '?')} tasks"
        shown.append(tile("mean over tasks", share(mean[metric]), note))
    vote = f"majority@{summary.get('samples')}"
    for name, (told, form) in ({vote: (vote, ".3f")} | TILES).items():
        if name in summary:
            warns = form == "," and summary[name]
            figure = share(summary[name]) if form == ".3f" else f"{summary[name]:{form}}"
            shown.append(tile(told, figure, kind="warns" if warns else ""))
    if ended := summary.get("ended_by"):
        told = ", ".join(f"{safe(why)} {x:.3f}" for why, x in ended.items())
        shown.append(tile("episodes ended by", f"<small>{told}</small>", kind="wide"))
    return f"<dl class=tiles>{''.join(shown)}</dl>"


def facts_block(facts: Mapping[str, Any]) -> str:
    """The metrics of a training step, those of a name's first part together."""
    together: dict[str, list[str]] = {}
    for name, value in facts.items():
        if is_number(value):
            first, _, rest = str(name).rpartition("/")
            row = f"<tr><th scope=row>{safe(rest)}</th><td>{number(value)}</td></tr>"
            together.setdefault(first, []).append(row)
    shown = []
    for first, rows in sorted(together.items()):
        shown.append(f"<table class=metrics><caption>{safe(first) or 'step'}</caption>{''.join(rows)}</table>")
    return f"<section class=blocks aria-label=metrics>{''.join(shown)}</section>" if shown else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Cells are HTML."""
    top = "".join(f"<th scope=col>{name}</th>" for name in head)
    lines = []
    for first, *rest in rows:
        lines.append(f"<tr><th scope=row>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>")
    made = f"<table class='{kind}'><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<div class=wide>{made}</div>"


def tables(summary: Mapping) -> str:
    short = pass_table(summary) + comparison(summary)
    return f"<div class=tables>{short}</div>{reliance(summary)}{by_groups(summary)}"


def pass_table(summary: Mapping) -> str:
    """pass@k over k, of several samples."""
    values = {int(name[5:]): x for name, x in summary.items() if name.startswith("pass@") and name[5:].isdigit()}
    if len(values) < 2:
        return ""
    head = ["k", *map(str, sorted(values))]
    row = ["pass@k", *(share(values[k]) for k in sorted(values))]
    return f"<section><h2>Right at least once in k samples</h2>{table(head, [row], 'numbers')}</section>"


def comparison(summary: Mapping) -> str:
    rows, metric = [], summary.get("metric", "accuracy")
    for i, base in enumerate(summary.get("baselines", ())):
        counts = [f"{base.get(name, 0):,}" for name in ("gained", "lost")]
        if i == 0:
            counts = [f"<a href='#show={name}'>{x}</a>" for name, x in zip(("gained", "lost"), counts, strict=True)]
        difference = base.get("difference")
        rows.append([
            safe(base.get("path", "baseline")), *score_cells(base, metric)[1:],
            f"<b>{difference + 0.0:+.3f}</b>" if is_number(difference) else "&ndash;",
            interval(base.get("difference_ci95"), signed=True), *counts, p_value(base.get("mcnemar_p")),
        ])  # fmt: skip
    test = "McNemar p" if summary.get("samples", 1) == 1 else "sign test p"
    head = ["baseline", "its score", "95%", "difference", "95%, paired", "gained", "lost", test]
    note = "The same prompts, compared pair by pair: gained score higher than with the baseline, lost lower."
    made = table(head, rows, "numbers")
    return f"<section><h2>Against baselines</h2>{made}<p class=note>{note}</p></section>" if rows else ""


def reliance(summary: Mapping) -> str:
    """Show how much of the metric comes from seeing."""
    found, metric = summary.get("reliance"), summary.get("metric", "accuracy")
    if not found:
        return ""
    rows = [["its own images", *score_cells(summary, metric), "", ""]]
    for name, of in found.items():
        if isinstance(of, Mapping):
            drop = f"<b>{of['drop']:.3f}</b>" if is_number(of.get("drop")) else ""
            cells = [*score_cells(of, metric), drop, interval(of.get("drop_ci95"))]
            rows.append([safe(IMAGES.get(name, name)), *cells])
    if is_number(found.get("constant")):
        chance = found["constant"]
        rows.append(["chance: the most frequent answer", bar(chance, None, 0, 1), share(chance), "", "", ""])
    said = f"<p class=told>{safe(found['said'])}</p>" if found.get("said") else ""
    made = table(["asked with", "", metric, "95%", "drop", "95%, paired"], rows, "numbers bars")
    return f"<section><h2>Does it look?</h2>{said}{made}</section>"


def score_cells(found: Mapping, name: str, low: float = 0.0, high: float = 1.0) -> list[str]:
    """Return a bar, the number and its interval."""
    value, ends = found.get(name), found.get(f"{name}_ci95")
    return [bar(value, ends, low, high), share(value), interval(ends)]


def by_groups(summary: Mapping) -> str:
    """Show every by_* table as bars, and the named rewards as numbers."""
    shown, metric = [], summary.get("metric", "accuracy")
    if named := summary.get("rewards"):
        rows = [[safe(name), *score_cells(of, "mean")[1:], f"{of.get('n', 0):,}"] for name, of in named.items()]
        shown.append(f"<div class=block>{table(['reward', 'mean', '95%', 'n'], rows, 'numbers')}</div>")
    for key, of in summary.items():
        if not key.startswith("by_") or not isinstance(of, Mapping):
            continue
        name = key.removeprefix("by_")
        drawn = chain.from_iterable((g.get(metric), *(g.get(f"{metric}_ci95") or ())) for g in of.values())
        found = list(filter(is_number, drawn))
        low, high = min([0.0, *found]), max([1.0, *found])
        rows = []
        for value, g in of.items():
            link = f"<a href='#{query(state_name(name))}={query(value)}'>{safe(value) or '(none)'}</a>"
            rows.append([link, *score_cells(g, metric, low, high), f"{g.get('n', 0):,}"])
        made = table([safe(name.replace("_", " ")), "", metric, "95%", "n"], rows, "numbers bars")
        shown.append(f"<div class=block>{made}</div>")
    return f"<section><h2>Rewards and groups</h2><div class=blocks>{''.join(shown)}</div></section>" if shown else ""


def query(text: object) -> str:
    return quote(readable(text), safe="")


def state_name(group: str) -> str:
    """Of a group in the page's address, where three names are taken."""
    return f"{group}." if group in ("show", "sort", "q") else group


def curve_block(curves: Sequence[Curve]) -> str:
    shown = []
    for curve in curves:
        told = f"<figcaption><b>{safe(curve.title)}</b> {safe(curve.note)}</figcaption>"
        shown.append(f"<figure>{curve.image}{told}</figure>")
    return f"<section><h2>The run</h2><div class=curves>{''.join(shown)}</div></section>" if shown else ""


# ----------------------------------------------------------------------------------------------------------------------
# The gallery's controls, which page.js makes work


def toolbar(gallery: Gallery) -> str:
    buttons = []
    for name, (key, told) in FILTERS.items():
        label = f"{told} <span class=count></span>"
        buttons.append(f"<button type=button data-show={name} data-key={key} aria-pressed=false>{label}</button>")
    chosen = []
    for i, (name, values) in enumerate(gallery.groups.items()):
        options = "".join(f'<option value="{safe(x)}">{safe(x) or "(none)"}</option>' for x in sorted(set(values)))
        start = f'<option value="">{safe(name.replace("_", " "))}: any</option>'
        named = f'data-group=g{i} name="{safe(state_name(name))}" aria-label="{safe(name)}"'
        chosen.append(f"<select {named}>{start}{options}</select>")
    orders = "".join(f"<option value={name}>{told}</option>" for name, told in ORDERS.items())
    return (
        "<form id=bar role=search hidden aria-label='Which prompts are shown'><div class=buttons role=group "
        f"aria-label=Filters>{''.join(buttons)}</div><div class=choices>{''.join(chosen)}"
        f"<select id=sort aria-label=Order>{orders}</select>"
        "<input type=search id=search placeholder='Search (/)' aria-label='Search in prompts and responses'>"
        "<output id=count role=status aria-live=polite></output>"
        "<button type=button id=help aria-haspopup=dialog>Keys (?)</button></div></form>"
    )


def keys() -> str:
    rows = {key: told for key, told in FILTERS.values()} | KEYS
    lines = "".join(f"<dt><kbd>{key}</kbd></dt><dd>{told}</dd>" for key, told in rows.items())
    close = "<form method=dialog><button>Close</button></form>"
    return f"<dialog id=keys aria-label=Keys><h2>Keys</h2><dl>{lines}</dl>{close}</dialog>"


# ----------------------------------------------------------------------------------------------------------------------


def episode_record(r: Any) -> dict:
    """What an episode's record has more than a response's; its images as tags of the page."""
    if not r.is_episode:
        return {}
    images = [image_tag(image.image) for image in r.images]
    return {"turns": r.turns, "ended_by": r.ended_by, "messages": r.messages, "images": images}
