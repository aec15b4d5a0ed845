r"""The page of an evaluation or a step: what it says, what it never does, and its gallery in a real browser.

pytest tests/test_page.py; what is marked `needs_browser` is left out where there is no Chromium."""

import base64
import functools
import html
import html.parser
import http.server
import io
import json
import random
import re
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs

import pytest
from browser import PROGRAM, Browser
from hypothesis import example as case
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

import report.page.gallery as G
import report.page.page as P
import report.records as R
from prepare_data import Example
from report.evaluation import make_sample_record
from report.page.formulas import ATTRIBUTES, ELEMENTS, mathml, render_segment, split_formulas
from report.page.plots import Curve
from report.writer import ReportPage
from tasks.shapes import shapes_rows

ROOT = Path(__file__).parent.parent

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium, Chrome or chromium-browser here")


def sample(text="x", accuracy=1.0, finish="stop", **more):
    rewards = {"accuracy": accuracy, "format": 1.0, "reward": accuracy}
    return {"text": text, "finish_reason": finish, "tokens": len(text), "rewards": rewards} | more


def record(uid, *samples, **more):
    samples = list(samples) or [sample()]
    place = {"index": 0, "answer_type": "count", "task": "t", "source": "s", "n_images": 1, "groups": {}}
    return {"uid": uid, "ground_truth": "3", "samples": samples} | place | more


def asked(uid, content="How many?", images=()):
    return Example(uid, "t", [{"role": "user", "content": content}], list(images), "3", {})


def first_page(title, records=(), examples=None, curves=(), **more):
    """The first page, most often the only one."""
    return next(P.pages(ReportPage(title, records, examples or {}, **more), curves))


def page_of(records, title="T", images=(), **more):
    return first_page(title, records, {r["uid"]: asked(r["uid"], images=images) for r in records}, **more)


def photo(width=84, height=84, kind="PNG", noise=60):
    file = io.BytesIO()
    bands = [Image.radial_gradient("L").resize((width, height)), Image.linear_gradient("L").resize((width, height)),
             Image.effect_noise((width, height), noise)]  # fmt: skip
    Image.merge("RGB", bands).save(file, kind, **({"quality": 95} if kind == "JPEG" else {}))
    return file.getvalue()


class Tags(html.parser.HTMLParser):
    """A page's tags with their attributes' names, the text outside of style and script, and the images."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.images, self.addresses = Counter(), Counter(), "", [], []
        self.inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes.update(f"{tag} {name}" for name, _ in attrs)
        self.inside = tag
        address = dict(attrs).get("src" if tag == "img" else "href", "") or ""
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag in ("img", "image"):
            data = base64.b64decode(address.split("base64,")[1])
            self.images.append((data, Image.open(io.BytesIO(data)).size))

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside not in ("style", "script"):
            self.text += data


# ----------------------------------------------------------------------------------------------------------------------
# Formulas


class Sources(html.parser.HTMLParser):
    """A text's HTML: `source`, what is shown with formulas as they were written; `formulas`, how many there are."""

    def __init__(self, text):
        super().__init__()
        self.source, self.formulas, self.stack, self.found = "", 0, [], set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.stack.append((tag, dict(attrs).get("class")))
        self.formulas += self.stack[-1] == ("span", "tex")
        self.found |= {tag} | {f"{tag} {name}" for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.stack.pop()[0] == tag

    def handle_data(self, data):
        if not self.stack or self.stack[-1][0] == "code":
            self.source += data


def as_html(text):
    return "".join(map(render_segment, split_formulas(text)))


def check_formulas(text):
    """The source is still there, whole; nothing but formulas of allowed elements around it."""
    made = as_html(text)
    found = Sources(made)
    assert found.source == text and not found.stack
    others = {"span", "span class", "code", "b", "b class"}
    for name in found.found - others:
        element, _, attribute = name.partition(" ")
        assert element in ELEMENTS and (not attribute or attribute in ATTRIBUTES), name
    return found


HOSTILE = [
    r"\href{javascript:alert(1)}{x}", r"\url{javascript:alert(1)}", r"\class{evil}{x}", r"\style{color:red}{x}",
    r"\cssId{evil}{x}", r"\def\a{\a\a}\a", r"\newcommand{\a}{\a\a}\a", r"\let\a=\b",
    r"\text{<script>alert(1)</script>}",
    r"\text{&lt;script&gt;}", r"\mathrm{&#60;img src=x onerror=alert(1)&#62;}", r"\color{red;background:url(x)}{x}",
    r"\color{expression(alert(1))} x", r"\rule{1e9em}{1e9em}", r"\hspace{100000em} x", r"\hspace{-50em} x",
    r"\raisebox{99em}{x}", r"\includegraphics{http://127.0.0.1/x}", r"\begin{array}{c<script>}x\end{array}",
    r"\begin{matrix} 1 & 2 \\", r"\end{matrix}", r"\left( x", r"\right)", r"\frac{1}", r"\frac", r"\sqrt[",
    "{", "}", "_",
    "^", "x^^y", "x__y", r"\\", "\\", r"\unknown{x}", "&", "#", "%", "~", r"\mathbb{R}", "\u202e\u0000\ud7ff\U0001f600",
    r"\operatorname{</math><script>alert(1)</script>}", r"\bbox[url(x)]{y}", r"\fcolorbox{red}{url(x)}{y}",
    r"\vec{\overline{\hat{x}}}", r"\begin{cases} x & y \\ z \end{cases}", r"\binom{n}{k}", "x_" * 300 + "y",
]  # fmt: skip


@pytest.mark.parametrize("latex", HOSTILE)
def test_no_formula_raises_or_brings_what_runs(latex):
    for text in (f"${latex}$", f"$${latex}$$", rf"\({latex}\)", rf"\[{latex}\]", rf"\boxed{{{latex}}}", latex):
        check_formulas(f"so {text} is it")
    made = mathml(latex)
    assert not re.search(r"<script|<img|\shref|\sstyle|\sclass|javascript:[^<]*\"", made)
    if made and not re.search("[\0-\x08]", made):
        ET.fromstring(made)


SIGNS = ["$", "$$", "\\", "{", "}", "^", "_", "&", "<", ">", "\"", "'", r"\(", r"\)", r"\[", r"\]", r"\boxed{",
         r"\frac{1}{2}", r"\sqrt", r"\left(", r"\right)", r"\begin{matrix}", r"\end{matrix}", r"\\", r"\text{a b}", "x",
         "12", " ", "\n", "é", "字", r"\hline", r"\color{red}", r"\limits", r"\overline", r"\sum", "#", "%", "~", "'",
         r"\pmod", r"\middle|", r"\substack{", r"\operatorname", r"\hspace{1em}", "[", "]", r"\kern",
         r"\big", r"\not"]  # fmt: skip


@settings(max_examples=400, deadline=1000)
@given(st.lists(st.one_of(st.sampled_from(SIGNS), st.text(max_size=4)), max_size=30).map("".join))
@case("a $x$ b \\boxed{\\boxed{1}} $5")
def test_any_text_keeps_its_source(text):
    check_formulas(text)
    check_formulas(f"${text}$")


@settings(max_examples=200, deadline=1000)
@given(st.text(st.characters(exclude_characters="$\\", exclude_categories=["Cs"])))
def test_what_has_no_formula_is_the_escaped_text(text):
    assert as_html(text) == html.escape(text)


@pytest.mark.parametrize("text", [
    "it costs $5 and $6", "$5 or 6 dollars$", "from $1,000 to $2,000 a year", r"\$5 and \$6", "$ x $", "an $", "$$",
    r"\( x", r"\[ x", r"\boxed{x", "$x\n\ny$", r"Answer in \boxed{}.", r"in \boxed{ }", "$$ $$", r"\(\)", r"C:\boxedly",
])  # fmt: skip
def test_what_is_no_formula_stays_as_it_is(text):
    assert as_html(text) == html.escape(text)


@pytest.mark.parametrize(("text", "formulas"), [
    ("$x$", 1), ("$x$, $y$ and $5", 2), ("so $x = 5$.", 1), (r"\boxed{\frac{1}{2}}", 1), ("$$x$$", 1), (r"\(x\)", 1),
    (r"\[x\]", 1), (r"\boxed{x^{2}} or \boxed{3}", 2), (r"$\$5 + x$", 1), (r"\boxed{12 cm}", 1),
    ("\n\n$$x$$\n\n$$y$$\n", 2), (r"$5 or so$x^2$", 1), (r"\boxed{\frac{\sqrt{x^{2}}}{\text{a\}b}}}", 1),
])  # fmt: skip
def test_formulas_are_found(text, formulas):
    assert check_formulas(text).formulas == formulas


def test_formulas_have_the_structure_that_was_written():
    frac = ET.fromstring(mathml(r"\frac{a}{b}"))
    assert [e.tag for e in frac.iter()][-3:] == ["mfrac", "mi", "mi"]
    assert [e.text for e in frac.iter("mi")] == ["a", "b"]
    assert ET.fromstring(mathml("a < b")).find(".//mo").text == "<"
    assert "boxed" in as_html(r"\boxed{red}") and "red</b>" in as_html(r"\boxed{red}")


def test_a_formula_with_lines_of_its_own_takes_the_empty_ones_around_it():
    first, formula, last = split_formulas("so\n\n$$x^2$$\n\n\nand")
    assert (first.source, formula.source, last.source) == ("so", "\n\n$$x^2$$\n\n\n", "and") and formula.latex == "x^2"


def test_very_long_and_very_deep_formulas_are_quick():
    start = time.perf_counter()
    texts = ["$" + "{" * 200 + "x" + "}" * 200 + "$", "$" + r"\sqrt{" * 200 + "x" + "}" * 200 + "$",
             "$" + r"\frac{1}{" * 150 + "x" + "}" * 150 + "$", r"\boxed{" * 5000, "$" * 100_000, "$x" * 50_000,
             r"\(" * 50_000, r"$$ \[ " * 20_000, "$" + "x" * 100_000 + "$", "$" + "x^" * 50_000, "\\" * 100_000,
             r"\boxed{" + "{" * 100_000, "$$x$$\n" * 15_000, "$a " * 30_000 + "$", "a $" * 30_000]  # fmt: skip
    for text in texts:
        check_formulas(text)
    assert time.perf_counter() - start < 10


# ----------------------------------------------------------------------------------------------------------------------
# Numbers and texts


@pytest.mark.parametrize(("value", "told"), [
    (0.1 + 0.2, "0.3"), (1e-7, "1e-07"), (-0.0, "0"), (float("nan"), "nan"), (float("inf"), "inf"),
    (12345.678, "12,346"),
    (1234567.0, "1,234,567"), (-0.25, "-0.25"), (3, "3"), (1.0, "1"), (12.345, "12.35"),
    ("<b>", "<b>"), (True, "True"),
])  # fmt: skip
def test_numbers_are_short_and_true(value, told):
    assert P.number(value) == told


EVERYTHING = {
    "path": "runs/a", "checkpoint": 40, "data": "test.parquet", "n": 80, "samples": 8, "temperature": 1.0,
    "metric": "accuracy", "accuracy": 0.9, "accuracy_ci95": [0.81, 0.95], "avg@8": 0.9, "pass@1": 0.9, "pass@2": 0.93,
    "pass@8": 0.97, "majority@8": 0.94, "reward": 0.88, "format": 1.0, "truncated": 0.05, "failed": 2,
    "response_tokens": 31.25, "left_out": 7, "turns": 2.5, "ended_by": {"done": 0.75, "turns <8>": 0.25},
    "by_answer_type": {"count": {"n": 80, "accuracy": 0.9, "accuracy_ci95": [0.8, 0.95]}},
    "by_images": {"1": {"n": 80, "accuracy": 0.9, "accuracy_ci95": None}},
    "by_a <column>": {"</td>": {"n": 1, "accuracy": 0.5, "accuracy_ci95": None}},
    "task_mean": {"accuracy": 0.85, "accuracy_ci95": [0.7, 0.9], "n_tasks": 3},
    "baselines": [{"path": "<base>", "accuracy": 0.6, "accuracy_ci95": [0.5, 0.7], "difference": 0.3,
                   "difference_ci95": [0.2, 0.4], "gained": 12, "lost": 3, "mcnemar_p": 0.0312,
                   "gained_uids": ["a"], "lost_uids": ["b"]},
                  {"path": "second", "accuracy": 0.6, "accuracy_ci95": None, "difference": -0.0, "gained": 0, "lost": 0,
                   "mcnemar_p": 1e-9}],
    "reliance": {"blank": {"accuracy": 0.4, "accuracy_ci95": [0.3, 0.5], "drop": 0.5, "drop_ci95": [0.4, 0.6]},
                 "none": {"accuracy": 0.35, "accuracy_ci95": None, "drop": 0.55, "drop_ci95": None}, "constant": 0.31,
                 "said": "It looks: <yes>."},
    "settings": {"seed": 0},
}  # fmt: skip


def test_a_summary_with_everything():
    text = Tags(page_of([record("a"), record("b", sample(accuracy=0.0))], summary=EVERYTHING)).text
    for told in ("0.900", "0.810 to 0.950 (95% interval)", "of 80 prompts", "0.850", "of 3 tasks", "majority@80.940",
                 "turns <8> 0.250",
                 "2.50", "31.2", "+0.300", "+0.200 to +0.400", "<base>", "0.031", "< 0.001", "It looks: <yes>.",
                 "0.310", "0.400 to 0.600", "a <column>", "</td>", "failed rewards2",
                 "prompts left out7"):  # fmt: skip
        assert told in text, told
    assert "-0.000" not in text and "nan" not in text and "None" not in text


def test_a_summary_of_the_least():
    text = Tags(page_of([record("a")], summary={"n": 1, "accuracy": 0.0})).text
    assert "0.000" in text and "no interval" in text and "Comparison with" not in text and "Rewards and" not in text


def test_half_a_surrogate_pair_does_not_break_a_page():
    half = json.loads('"<\\ud800>"')
    summary = {"n": 1, "accuracy": 1.0, f"by_{half}": {half: {"n": 1, "accuracy": 1.0}}}
    records = [record(half, sample(half), ground_truth=half), record("b", groups={half: half})]
    assert page_of(records, half, [photo()], summary=summary).encode().count(b"&lt;?&gt;") >= 6


def test_a_reward_is_not_an_accuracy():
    summary = {"n": 2, "reward": -1.5, "reward_ci95": [-2.0, -1.0], "metric": "reward", "by_task": {
        "t": {"n": 2, "reward": -1.5, "reward_ci95": [-2.0, -1.0]}}}  # fmt: skip
    summary["rewards"] = {"km": {"n": 1, "mean": 512.25, "mean_ci95": (3.5, 1001.0)}}
    records = [record("a"), record("b", sample(), sample())]
    for s, reward in zip(records[0]["samples"] + records[1]["samples"], (1.0, -2.0, 3.0), strict=True):
        s["rewards"] = {"reward": reward}
    page = page_of(records, summary=summary)
    text = Tags(page).text
    assert "km512.2503.500 to 1001.0001" in text and "-2.000 to -1.000" in text
    assert "reward of 2 prompts-1.500" in text and "✓" not in text and "✗" not in text and "accuracy" not in text[:60]
    assert re.findall(r'data-is="([^"]*)"', page) == ["disagree"]


def test_a_page_without_prompts_and_one_with_curves_alone():
    bare = Tags(first_page("T", [], {}))
    assert bare.text.count("T") == 2 and "main" not in bare.tags and "form" not in bare.tags
    curve = Curve("loss <x>", "<svg viewBox='0 0 1 1'></svg>", "falls & <ends>")
    found = Tags(first_page("T", [], {}, curves=[curve]))
    assert found.tags["figure"] == 1 and "loss <x> falls & <ends>" in found.text and found.tags["svg"] == 1


def test_metrics_of_a_step_are_told_together():
    facts = {"loss": 0.5, "reward/a": 1.0, "reward/b": float("nan"), "reward/c": None, "time/<x>": 12}
    page = page_of([record("a", sample(advantage=-0.5))], facts=facts)
    rows = re.findall(r"<th scope=row>([^<]*)</th><td>([^<]*)</td>", page)
    assert rows == [("loss", "0.5"), ("a", "1"), ("&lt;x&gt;", "12")] and "advantage <b>-0.500</b>" in page


def test_long_texts_keep_their_ends_and_are_counted(monkeypatch):
    monkeypatch.setattr(G, "PAGE_CHARS", 4 * 1000)  # of the question and three responses
    texts = ["short", "START" + "<" * 3000 + "END", "BEGIN" + "y" * 3000 + "LAST"]
    page = page_of([record("u", *map(sample, texts))])
    text = Tags(page).text
    for told in ("short", "START<", "<END", "BEGINy", "yLAST", "2 long texts are shortened"):
        assert told in text
    left = [int(x.replace(",", "")) for x in re.findall(r"([\d,]+) characters are left out", text)]
    assert left == [3008 - 1000, 3009 - 1000]


def test_formulas_beyond_their_room_stay_as_written(monkeypatch):
    monkeypatch.setattr(G, "FORMULA_CHARS", 3000)
    page = page_of([record("u", *[sample(rf"$\frac{{{i}}}{{2}}$") for i in range(40)])])
    found = Tags(page)
    assert 1 < found.tags["math"] < 40 and f"{40 - found.tags['math']} formulas are shown as source" in found.text


# ----------------------------------------------------------------------------------------------------------------------
# Which prompts, and what is around them


def many(n, **samples):
    return [record(f"u{i}", sample(accuracy=1.0), index=i) for i in range(n)]


def test_of_too_many_prompts_the_telling_ones_come_first():
    records = many(1500)
    records[1400] = record("wrong", sample(accuracy=0.0), index=1400)
    records[1401] = record("cut", sample(finish="length"), index=1401)
    summary = {"n": 1500, "accuracy": 0.9, "baselines": [{"gained_uids": ["u1498"], "lost_uids": ["u1499"]}]}
    chosen = R.select_records(records, summary)
    assert len(chosen) == 1000 and [r["uid"] for r in chosen[-4:]] == ["wrong", "cut", "u1498", "u1499"]
    assert [r["uid"] for r in chosen[:996]] == [f"u{i}" for i in range(996)]  # in order
    examples = {r["uid"]: asked(r["uid"]) for r in chosen}  # no more than those are asked for
    text = Tags(first_page("T", records, examples, summary=summary)).text
    assert "1,000 of 1,500 prompts are shown; those gained, lost" in text
    lost = {f"u{i}" for i in range(500, 1500)}  # too many even of these: none but these
    summary["baselines"][0] |= {"gained_uids": [], "lost_uids": lost}
    assert {r["uid"] for r in R.select_records(records, summary)} == lost - {"u1400", "u1401"} | {
        "wrong",
        "cut",
    } - set()


def test_records_of_other_models_and_those_that_have_none():
    records = [record("a"), record("b"), record("c")]
    others = {"baseline <m>": [record("b", sample("other says", accuracy=0.0)), record("unknown")],
              "blank": [record("a", sample(), sample(accuracy=0.0))]}  # fmt: skip
    page = page_of(records, others=others, summary={"n": 3, "accuracy": 1.0})
    a, b, c = re.findall(r"<article.*?</article>", page, re.DOTALL)
    assert "<summary>blank · 1 of 2 right</summary>" in a and "baseline &lt;m&gt;" not in a
    assert "<summary>baseline &lt;m&gt; · ✗ wrong</summary>" in b and "other says" in b
    assert "<details" not in c and "unknown" not in page


def test_a_sample_that_failed_and_one_that_was_cut():
    failed = sample(finish="error") | {"rewards": {}}
    broken = failed | {"ended_by": "error", "turns": 2}
    page = page_of([record("a", failed), record("b", sample(finish="length")), record("c", broken)],
                   summary={"n": 3, "accuracy": 0.3})  # fmt: skip
    a, b, c = re.findall(r"<article.*?</article>", page, re.DOTALL)
    assert "reward failed" in a and "environment failed" in c and "truncated at the length limit" in b
    assert re.findall(r'data-is="([^"]*)"', page) == ["failed wrong", "cut right", "failed wrong"]
    training = page_of([record("a", failed)])  # in training a failure is not wrong
    assert re.findall(r'data-is="([^"]*)"', training) == ["failed"]


def test_an_episode_is_shown_turn_by_turn():
    pixels = Image.new("RGB", (30, 20), "red")
    r = SimpleNamespace(is_episode=True, images=[SimpleNamespace(image=pixels)], n_turns=2, ended_by="done", messages=[
        {"role": "assistant", "content": "zoom <image>"}, {"role": "user", "content": "here <image> it is"},
        {"role": "assistant", "content": "three"}])  # fmt: skip
    vars(r).update(text="x", finish_reason="stop", response_mask=[True])
    page = page_of([record("a", make_sample_record(r, {"reward": 1.0}))])
    found = Tags(page)
    assert [size for _, size in found.images] == [(30, 20)] and "ended by done" in found.text
    assert "zoom <image>" in found.text  # what the policy writes is no image
    assert "here " in page.split("<img")[0] and " it is" in page.split("<img")[1]
    bad = {"images": [b"<img src=http://127.0.0.1/x onerror=alert(1)>"], "messages": [], "turns": 1, "ended_by": "x"}
    found = Tags(page_of([record("a", sample() | bad)]))
    assert not found.tags["img"] and "cannot be read" in found.text
    r.is_episode = False
    assert "messages" not in make_sample_record(r, {})


def test_images_stand_where_their_marks_are_and_those_without_text_between_in_a_row():
    images = [photo(noise=i) for i in range(4)]
    example = asked("u", "first<image> \n<image>then<image>last <b>", images)
    said = first_page("T", [record("u")], {"u": example}).partition("<div class=prompt>")[2]
    assert re.findall(r"<img|<span class=images>|first|then|last &lt;b&gt;", said) == [
        "first", "<span class=images>", "<img", "<img", "then", "<span class=images>", "<img", "last &lt;b&gt;",
        "<span class=images>", "<img"]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Images


def test_page_shows_thumbnails(tmp_path):
    small = next(shapes_rows(1, "test", 0))["images"][0]["bytes"]
    photos = [*2 * [photo(4000, 3000, "JPEG")], photo(1000, 2000, "TIFF"), photo(300, 200, "JPEG"), small]
    drawing = io.BytesIO()
    ImageDraw.Draw(image := Image.new("1", (2000, 1000), 1)).line((0, 0, 2000, 1000), width=20)
    image.save(drawing, "PNG")
    images = [*photos, drawing.getvalue(), b"no image"]
    page = page_of([record("u")], images=images, folder=tmp_path / "images")
    found = Tags(page)
    sizes = [(480, 360), (480, 360), (240, 480), (300, 200), (84, 84), (480, 240)]
    assert [size for _, size in found.images] == sizes
    assert all(len(data) < 60_000 for data, _ in found.images) and len(page) < 250_000 < sum(map(len, photos))
    assert found.images[4][0] == small  # what is small stays as it is
    assert "cannot be read" in found.text
    links = re.findall(r'href="(images/[0-9a-f]{20}\.(?:jpeg|tiff|png))"', page)
    assert len(links) == 4 and {(tmp_path / link).read_bytes() for link in links} == {photos[0], photos[2], images[5]}


def test_turned_photos_are_shown_upright(tmp_path):
    image = Image.new("RGB", (1200, 600), "white")
    image.paste("red", (0, 0, 600, 600))  # left: on top, once it is turned
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    image.save(file := io.BytesIO(), "JPEG", exif=exif)
    page = page_of([record("u")], images=[file.getvalue()], folder=tmp_path / "i")
    data, size = Tags(page).images[0]
    red = Image.open(io.BytesIO(data)).convert("RGB").getpixel((120, 20))
    assert size == (240, 480) and red[0] > 200 > 60 > red[1] and "600 x 1200 pixels" in page


def test_images_in_full_size_have_a_limit_and_it_is_told(tmp_path, monkeypatch):
    images = [photo(600, 400, noise=noise) for noise in (60, 5, 80)]
    least = min(map(len, images))
    monkeypatch.setattr(G, "FULL_SIZE_BYTES", 3 * least)
    page = page_of([record("u")], images=images, folder=tmp_path / "images")
    (file,) = (tmp_path / "images").iterdir()
    assert file.read_bytes() == images[1] and page.count("<a class=full") == 1 and Tags(page).tags["img"] == 3
    assert f"2 images of more than {least:,} bytes are shown only as thumbnails" in page


def test_images_beyond_the_most_are_counted(monkeypatch):
    monkeypatch.setattr(G, "PAGE_IMAGES", 5)
    page = page_of([record("a"), record("b")], images=[photo(noise=1), photo(noise=2), photo(noise=3)])
    assert "2 images are left out: a page shows at most 5." in page and page.count("image left out to limit") == 2


# ----------------------------------------------------------------------------------------------------------------------
# Several pages


def many_pages(n=450):
    records = [record(f"u{i}", sample(accuracy=float(i < 300)), index=i, groups={"g": str(i % 2)}) for i in range(n)]
    image = photo()
    examples = {r["uid"]: asked(r["uid"], images=[image]) for r in records}
    return ReportPage("T", records, examples, {"n": n, "accuracy": 0.6})


def test_a_page_has_200_prompts_and_links_the_others(tmp_path):
    path = tmp_path / "report.html"
    P.write_pages(path, many_pages())
    first, *others = (tmp_path / name for name in ("report.html", "report-2.html", "report-3.html"))
    assert sorted(tmp_path.iterdir()) == sorted([first, *others])
    assert [page.read_text().count("<article") for page in (first, *others)] == [200, 200, 50]
    for page in others:  # numbers are on the first page alone
        assert "class=tiles" not in page.read_text() and "<h1>T</h1>" in page.read_text()
    assert "class=tiles" in first.read_text() and "Prompts 401 to 450 of 450" in others[1].read_text()
    assert re.findall(r'<a href="(report[^"]*)"', others[0].read_text())[:2] == ["report.html", "report-3.html"]
    P.write_pages(path, many_pages(3))
    assert list(tmp_path.iterdir()) == [first]  # none of an earlier, longer report is left
    assert "class=pages" not in first.read_text()


@needs_browser
def test_filters_go_along_to_other_pages(opened, tmp_path):
    P.write_pages(tmp_path / "report.html", many_pages())
    browser = opened((tmp_path / "report.html").read_text())
    counts = browser.evaluate("[...document.querySelectorAll('#bar .count')].map((x) => x.textContent)")
    assert counts[:3] == ["450", "150", "300"]  # on all pages
    browser.press("w")
    choose(browser, "by.g", "1")
    links = "[...document.querySelector('.pages').querySelectorAll('a')].map((x) => x.textContent)"
    assert browser.evaluate(VISIBLE) == [] and browser.evaluate(links) == ["2 (50)", "3 (25)"]
    before = browser.loaded
    browser.click(".pages a")
    while browser.loaded == before:
        browser.read()
    visible = browser.evaluate(VISIBLE)
    assert visible == [f"u{i}" for i in range(301, 400, 2)] and "report-2.html" in browser.evaluate("location.href")
    assert browser.evaluate("document.querySelector('[aria-pressed=true]').dataset.show") == "wrong"


# ----------------------------------------------------------------------------------------------------------------------
# Nothing runs, nothing is fetched

EVILS = [
    "<script>window.hit = 1; alert(1)</script>", "</script><script>window.hit = 1</script>",
    "</style><script>hit = 1</script>",
    "<img src=ADDRESS/img onerror='window.hit = 1'>", "<svg onload='window.hit = 1'><use href=ADDRESS/u></svg>",
    "\" onmouseover=\"window.hit = 1\" autofocus onfocus=\"window.hit = 1", "' onload='window.hit = 1",
    "<a href='javascript:window.hit = 1'>x</a>", "<style>body{background:url(ADDRESS/css)}</style>",
    "--><iframe src=ADDRESS/frame>",
    "<math href='javascript:window.hit = 1'><mtext><img src=ADDRESS/math onerror='hit = 1'></mtext></math>",
    r"$\href{javascript:window.hit = 1}{x}$", r"$\text{<img src=ADDRESS/tex onerror='window.hit = 1'>}$",
    r"\boxed{<img src=ADDRESS/boxed onerror='window.hit = 1'>}",
    "<meta http-equiv=refresh content='0;url=ADDRESS/meta'>",
    "<link rel=stylesheet href=ADDRESS/link>", "<base href=ADDRESS/>", "]]><object data=ADDRESS/object>",
    "&lt;b&gt;", "\u2028\u202e",
]  # fmt: skip


def hostile_page(address, folder):
    evils = [text.replace("ADDRESS", address) for text in EVILS]
    all_of = " ".join(evils)
    records = []
    for i, evil in enumerate(evils):
        bad = sample(evil, 0.0, finish=evil, advantage=0.5, turns=1, ended_by=evil)
        bad |= {"rewards": {"reward": 1.0, "accuracy": 1.0, evil: 0.5}}
        bad |= {"images": [f"<img src='{address}/{i}'>".encode()]}
        episode = bad | {"messages": [{"role": evil, "content": "<image>" + evil}]}
        groups = {f"group {evil}": f"{i}{evil}", "__proto__": str(i)}
        records.append(
            record(
                f"{i}{evil}", bad, episode, ground_truth=evil, groups=groups, answer_type=evil, task=evil, index=evil
            )
        )
    messages = [{"role": evils[0], "content": all_of + "<image>"}]
    images = [photo(600, 500)]
    examples = {r["uid"]: Example(r["uid"], "x", messages, images, "", {}) for r in records}
    base = {"path": all_of, "accuracy": 0.5, "gained_uids": [records[0]["uid"]], "lost_uids": [all_of], "gained": 1}
    summary = {"n": 3, "accuracy": 0.5, "path": all_of, "data": all_of, "checkpoint": all_of, "baselines": [base],
               "reliance": {all_of: {"accuracy": 0.1}, "said": all_of}, "ended_by": {all_of: 1.0},
               f"by_{all_of}": {all_of: {"n": 1, "accuracy": 0.5}}}  # fmt: skip
    curves = [Curve(all_of, "<svg viewBox='0 0 1 1'></svg>", all_of)]
    facts = {f"{all_of}/{all_of}": 1.0}
    more = {"curves": curves, "facts": facts, "others": {all_of: records}, "folder": folder}
    return first_page(all_of, records, examples, summary=summary, **more), evils


def test_page_shows_as_text_whatever_came_from_data_policy_or_reward(tmp_path):
    page, evils = hostile_page("http://127.0.0.1:1", tmp_path / "images")
    found = Tags(page)
    ours = set("html head meta title style body header h1 h2 h3 p b i a dl dt dd div span section table caption thead "
               "tbody tr th td figure figcaption svg details summary form button select option input output label kbd "
               "main article ul li em small code defs image use dialog img script".split())  # fmt: skip
    assert set(found.tags) <= ours | ELEMENTS and found.tags["script"] == found.tags["style"] == 1
    assert not [name for name in found.attributes if name.split()[1].startswith("on")]
    assert all(re.match(r"data:image/|images/[0-9a-f]{20}\.png$|#", address) for address in found.addresses)
    for evil in evils:
        assert evil in found.text, evil
    uids = re.findall(r"<h3 id=t\d+><a[^>]*>.*?</a> <b>(.*?)</b>", page)
    assert [html.unescape(x) for x in uids] == [f"{i}{evil}" for i, evil in enumerate(evils)]


FIELDS = ["title", "uid", "text", "truth", "role", "content", "reward", "group", "value", "ended_by", "task", "type",
          "baseline", "label", "said", "kind", "metric", "checkpoint", "column", "curve", "note"]  # fmt: skip


@pytest.mark.parametrize("evil", ["<script>window.hit = 1</script>", "{{ 7*7 }}{% raw %}", "</script><b>", "'\"><img>"])
def test_each_field_is_shown_as_it_is(evil):
    """No field is HTML, and none is a template."""
    x = {name: f"{name}:{evil}" for name in FIELDS}
    messages = [{"role": x["role"], "content": x["text"]}]
    episode = sample(x["text"], turns=1, ended_by=x["ended_by"], messages=messages)
    episode["rewards"] = {"accuracy": 1.0, "reward": 1.0, x["reward"]: 1.0}
    groups = {x["group"]: x["value"]}
    records = [record(x["uid"], episode, ground_truth=x["truth"], groups=groups, task=x["task"], answer_type=x["type"]),
               record("b", sample(x["text"]))]  # fmt: skip
    examples = {r["uid"]: asked(r["uid"], x["content"]) for r in records}
    base = {"path": x["baseline"], "accuracy": 0.5, "gained_uids": [], "lost_uids": []}
    summary = {"accuracy": 0.5, "checkpoint": x["checkpoint"], "baselines": [base]}
    summary |= {"reliance": {x["kind"]: {"accuracy": 0.1}, "said": x["said"]}, f"by_{x['column']}": {x["value"]: {}}}
    more = {"summary": summary, "facts": {x["metric"]: 1.0}, "others": {x["label"]: records}}
    page = first_page(x["title"], records, examples, [Curve(x["curve"], "<svg></svg>", x["note"])], **more)
    found = Tags(page)
    for name, value in x.items():
        value = value.partition("/")[2] if name == "metric" and "/" in value else value
        assert value.replace("_", " ") in found.text or value in found.text, name
    assert found.tags["script"] == 1 and "49" not in found.text and "img" not in found.tags


def test_the_process_that_writes_pages_does_not_import_torch():
    code = "import sys, report.page.page; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_templates_trust_nothing():
    """What is not escaped is made by page.py: `Markup` of style, script, curves and formulas."""
    templates = "".join(path.read_text() for path in sorted(P.TEMPLATES.glob("*.html")))
    assert "|safe" not in templates.replace(" ", "") and "autoescape" not in templates and len(templates) > 5000


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """opened(page, hash, more) -> the browser, with the page open."""

    def show(page, fragment="", **more):
        file = tmp_path / "report.html"
        file.write_text(page)
        browser.open(f"{file.as_uri()}{fragment}", **more)
        return browser

    yield show
    assert not browser.errors


class Canary(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.hits.append(self.path)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def canary():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canary)
    server.hits = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@needs_browser
def test_a_hostile_page_runs_and_fetches_nothing(opened, canary, tmp_path):
    page, evils = hostile_page(f"http://127.0.0.1:{canary.server_port}", tmp_path / "images")
    browser = opened(page)
    browser.evaluate("document.querySelectorAll('details').forEach((x) => x.open = true)")
    browser.press(*"j" * len(evils))
    browser.press("t", "s", "t", "/")
    browser.press("Escape")
    browser.evaluate("new Promise((done) => setTimeout(done, 300))")
    assert browser.evaluate("typeof window.hit") == "undefined" and not browser.errors
    asked_for = [url for url in browser.requests if not url.startswith("data:")]
    assert asked_for == [(tmp_path / "report.html").as_uri()] and canary.hits == []
    text = browser.evaluate("document.body.textContent")
    assert all(evil in text for evil in evils)
    # the guard itself: what the page's policy lets through, had something not been escaped
    browser.evaluate(f"document.body.append(Object.assign(new Image(), {{src: '{canary.server_port}'}}))")
    code = f"fetch('http://127.0.0.1:{canary.server_port}/').then(() => 1, () => 0)"
    assert browser.evaluate(code) == 0 and canary.hits == []
    browser.errors.clear()  # of these two


# ----------------------------------------------------------------------------------------------------------------------
# The gallery in a browser

VISIBLE = "[...document.querySelectorAll('.card:not([hidden])')].map((x) => x.querySelector('h3 b').textContent)"
CURRENT = "document.querySelector('[aria-current] h3 b')?.textContent ?? null"
MIXED = [
    record("right", sample("one")), record("wrong", sample("two words", 0.0), answer_type="colour"),
    record("mixed", sample("three", 0.0), sample("tri", 1.0), groups={"level": "1"}),
    record("cut", sample("a" * 50, 0.0, "length"), groups={"level": "2"}),
    record("failed", sample("", 0.0, "error"), groups={"level": "a 'b' \"c\" & </option>"}),
    record("gained", sample("x")), record("lost", sample("half", 0.0), groups={"level": "1"}),
]  # fmt: skip
MIXED_SUMMARY = {"n": 7, "accuracy": 0.4, "baselines": [{"path": "b", "gained": 1, "lost": 1, "gained_uids": ["gained"],
                 "lost_uids": ["lost"]}], "by_level": {"1": {"n": 2, "accuracy": 0.3}}}  # fmt: skip
SHOWN = {
    "a": [r["uid"] for r in MIXED], "w": ["wrong", "cut", "failed", "lost"], "r": ["right", "gained"], "g": ["gained"],
    "l": ["lost"], "d": ["mixed"], "c": ["cut"], "f": ["failed"],
}  # fmt: skip


@needs_browser
def test_filters_show_what_they_say(opened):
    browser = opened(page_of(MIXED, summary=MIXED_SUMMARY))
    counts = browser.evaluate("[...document.querySelectorAll('#bar .count')].map((x) => x.textContent)")
    assert counts == [str(len(uids)) for uids in SHOWN.values()]
    for key, uids in SHOWN.items():
        browser.press(key)
        assert browser.evaluate(VISIBLE) == uids, key
        assert browser.evaluate("document.querySelectorAll('[aria-pressed=true]').length") == 1
        assert browser.evaluate("document.getElementById('count').textContent") == f"{len(uids)} of 7"
    browser.click("button[data-show=wrong]")
    assert browser.evaluate(VISIBLE) == SHOWN["w"]
    browser.evaluate("document.querySelector('a[href=\"#show=gained\"]').click()")  # in the table of baselines
    assert browser.evaluate(f"new Promise((done) => setTimeout(() => done({VISIBLE}), 100))") == ["gained"]
    browser.evaluate("document.querySelector('a[href=\"#by.level=1\"]').click()")  # in the table by level
    assert browser.evaluate(f"new Promise((done) => setTimeout(() => done({VISIBLE}), 100))") == ["mixed", "lost"]


CHOOSE = """((name, value) => {{
    const found = document.querySelector(`select[name="${{name}}"], select[id="${{name}}"]`);
    found.value = value; found.dispatchEvent(new Event('change')); return found.value; }})({}, {})"""


def choose(browser, name, value):
    assert browser.evaluate(CHOOSE.format(json.dumps(name), json.dumps(value))) == value


@needs_browser
def test_selects_search_and_order(opened):
    browser = opened(page_of(MIXED, summary=MIXED_SUMMARY))
    choose(browser, "by.level", "1")
    assert browser.evaluate(VISIBLE) == ["mixed", "lost"]
    browser.press("w")
    assert browser.evaluate(VISIBLE) == ["lost"]
    browser.press("a")
    choose(browser, "by.level", "a 'b' \"c\" & </option>")
    assert browser.evaluate(VISIBLE) == ["failed"]
    choose(browser, "by.level", "")
    choose(browser, "by.answer_type", "colour")
    assert browser.evaluate(VISIBLE) == ["wrong"]
    choose(browser, "by.answer_type", "")
    for order, first in (("tokens", ["cut", "wrong"]), ("reward", ["wrong", "cut"]), ("spread", ["mixed", "right"])):
        choose(browser, "sort", order)
        assert browser.evaluate(VISIBLE)[:2] == first, order
    browser.press("s")  # the order after the last
    assert browser.evaluate(VISIBLE) == SHOWN["a"]
    browser.press("/", *"Words")  # letters that are keys elsewhere
    waited = f"new Promise((done) => setTimeout(() => done({VISIBLE}), 400))"
    assert browser.evaluate(waited) == ["wrong"]
    browser.press("Escape", "r")
    assert browser.evaluate(VISIBLE) == []
    browser.press("j", "k", "o")  # with nothing to go to


@needs_browser
def test_state_is_in_the_address(opened):
    browser = opened(page_of(MIXED, summary=MIXED_SUMMARY))
    browser.press("w", "s", "/", *"a b")
    browser.evaluate("new Promise((done) => setTimeout(done, 400))")
    browser.press("Escape")
    choose(browser, "by.level", "a 'b' \"c\" & </option>")
    state = parse_qs(browser.evaluate("location.hash.slice(1)"))
    assert state == {"show": ["wrong"], "sort": ["tokens"], "q": ["a b"], "by.level": ["a 'b' \"c\" & </option>"]}
    choose(browser, "by.level", "")
    browser.evaluate("document.getElementById('search').value = 'half'")
    choose(browser, "by.level", "1")
    browser.go("Page.reload")
    assert (
        browser.evaluate(VISIBLE) == ["lost"] and browser.evaluate("document.getElementById('sort').value") == "tokens"
    )
    assert browser.evaluate("document.querySelector('[aria-pressed=true]').dataset.show") == "wrong"
    for unknown in ("#show=nothing&by.level=9&sort=constructor", "#%", "#p999", "#p1'", "#show=constructor"):
        browser = opened(page_of(MIXED, summary=MIXED_SUMMARY), unknown)
        assert browser.evaluate(VISIBLE) == SHOWN["a"], unknown
    browser = opened(page_of(MIXED, summary=MIXED_SUMMARY), "#p2")
    assert browser.evaluate(CURRENT) == "mixed"


@needs_browser
def test_a_group_may_have_the_name_of_another_part_of_the_state(opened):
    names = ("show", "sort", "q", "order", "__proto__", "task")
    records = [record(str(i), groups={name: f"{name}{i}" for name in names}) for i in range(3)]
    browser = opened(page_of(records))
    for name in names:
        choose(browser, f"by.{name}", f"{name}1")
    assert browser.evaluate(VISIBLE) == ["1"]
    browser.press("r", "s")
    browser.press("s")
    browser.go("Page.reload")
    assert browser.evaluate(VISIBLE) == ["1"] and browser.evaluate("document.getElementById('sort').value") == "reward"


@needs_browser
def test_keys_go_through_the_prompts(opened):
    browser = opened(page_of(MIXED, summary=MIXED_SUMMARY))
    assert browser.evaluate(CURRENT) is None
    seen = []
    for key in "jjkw":
        browser.press(key)
        seen.append(browser.evaluate(CURRENT))
    assert seen == ["right", "wrong", "right", "right"]
    browser.press("j")
    assert browser.evaluate(CURRENT) in SHOWN["w"]
    browser.press(*"jjjjjjj")
    assert browser.evaluate(CURRENT) == "lost" and browser.evaluate("document.activeElement.id") == "p6"
    browser.press(*"kkkkkkk")
    assert browser.evaluate(CURRENT) == "wrong"
    browser.press("?")
    assert browser.evaluate("document.getElementById('keys').open")
    browser.press("r")  # while the list of keys is open, they do nothing
    assert browser.evaluate(VISIBLE) == SHOWN["w"]
    browser.press("Escape")
    assert not browser.evaluate("document.getElementById('keys').open")
    assert browser.evaluate("document.getElementById('source').checked") is False
    browser.press("t")
    assert browser.evaluate("document.getElementById('source').checked") is True


@needs_browser
@pytest.mark.parametrize("key", ["o", "Enter", "click"])
def test_an_image_opens_in_full_size(opened, tmp_path, key):
    image = photo(900, 600)
    page = page_of([record("a"), record("b")], images=[image], folder=tmp_path / "the images #1")
    browser = opened(page)
    browser.press("j")
    (file,) = (tmp_path / "the images #1").iterdir()
    browser.click("a.full") if key == "click" else browser.press(key)
    for _ in range(50):
        if file.as_uri() in browser.tabs():
            break
        time.sleep(0.1)
    assert file.as_uri() in browser.tabs() and file.read_bytes() == image


@needs_browser
def test_formulas_can_be_seen_as_they_were_written(opened):
    browser = opened(page_of([record("a", sample(r"so $\frac{1}{2}$ it is"))]))
    height = "document.querySelector('.responses math')?.getBoundingClientRect().height"
    shown = browser.evaluate("document.querySelector('.responses').innerText")
    assert browser.evaluate(height) > 15 and "frac" not in shown
    browser.press("t")
    assert browser.evaluate(height) == 0 and r"so $\frac{1}{2}$ it is" in browser.evaluate(
        "document.querySelector('.responses').innerText"
    )


@needs_browser
def test_a_narrow_page_does_not_scroll_sideways(opened, tmp_path):
    wide = [
        record("u" * 200, sample("w" * 3000 + r" $\frac{1}{2}" + "+ x" * 200 + "$"), groups={"g": "v" * 200}),
        record("b"),
    ]
    page = page_of(wide, title="t" * 200, summary=EVERYTHING, images=[photo(700, 300)], folder=tmp_path / "i")
    browser = opened(page, width=400)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400


@needs_browser
def test_a_page_without_prompts_opens(opened):
    assert opened(first_page("T", [], {})).evaluate("document.querySelector('h1').innerText") == "T"


# ----------------------------------------------------------------------------------------------------------------------
# A page of the largest size


@functools.cache
def bands(n=24):
    """Pieces of the entropy-coded data of a few JPEG files of 12 megapixels, cut at restart markers, and the header."""
    pieces = []
    for seed in range(n):
        noise = Image.frombytes("RGB", (80, 60), random.Random(seed).randbytes(3 * 80 * 60))
        noise.resize((4000, 3000), Image.Resampling.BICUBIC).save(
            file := io.BytesIO(), "JPEG", quality=85, restart_marker_rows=1
        )
        data = file.getvalue()
        start = data.index(b"\xff\xda") + 14
        pieces.append(re.split(rb"\xff[\xd0-\xd7]", data[start:-2]))
    return data[:start], pieces


class Photos:
    """The images of a prompt, a distinct photo of 4000 x 3000 pixels, made when it is asked for: rows of the others."""

    def __init__(self, seed):
        self.seed = seed

    def __len__(self):
        return 1

    def __iter__(self):
        yield self[0]

    def __getitem__(self, _):
        head, pieces = bands()
        dice = random.Random(self.seed)
        rows = [dice.choice(pieces)[i] for i in range(len(pieces[0]))]
        body = b"".join(row + bytes([0xFF, 0xD0 + i % 8]) for i, row in enumerate(rows[:-1]))
        return head + body + rows[-1] + b"\xff\xd9"


@needs_browser
@pytest.mark.slow
def test_a_page_of_a_thousand_photos_is_light_and_quick(opened, tmp_path, n=1000, photos=250):
    words = "so the angle at B is $x^{2} + 3x = \\frac{180 - 40}{2}$ degrees and AB = 12 which gives ".split(" ")
    records, examples = [], {}
    for i in range(n):
        dice = random.Random(i)
        samples = []
        for _ in range(8):
            text = " ".join(dice.choice([" ".join(words), *words]) for _ in range(2048))[:8000] + r" \boxed{70}"
            samples.append(sample(text, float(dice.random() < 0.6)) | {"tokens": 2048})
        records.append(record(f"u{i}", *samples, index=i))
        examples[f"u{i}"] = Example(
            f"u{i}", "t", [{"role": "user", "content": "<image>Find $x$."}], Photos(i % photos), "70", {}
        )
    assert Image.open(io.BytesIO(Photos(1)[0])).size == (4000, 3000)
    shown = ReportPage("T", records, examples, {"n": n, "samples": 8, "accuracy": 0.6})
    start = time.perf_counter()
    P.write_pages(tmp_path / "report.html", shown)
    took = time.perf_counter() - start
    files = sorted(tmp_path.glob("report*.html"))
    weight = max(file.stat().st_size for file in files) / 1e6
    page = (tmp_path / "report.html").read_text()
    browser = opened("<!doctype html><title>x</title>")  # a tab that is open already
    (tmp_path / "report.html").write_text(page)
    start = time.perf_counter()
    browser.go("Page.navigate", url=(tmp_path / "report.html").as_uri() + "?")
    loaded = time.perf_counter() - start
    browser.press("d")
    visible = browser.evaluate("document.querySelectorAll('.card:not([hidden])').length")
    ready = time.perf_counter() - start
    print(f"{n} prompts: {weight:.1f} MB a page, written {took:.1f} s, loaded {loaded:.2f} s, first key {ready:.2f} s")
    assert page.count("<article") == 200 == len(Tags(page).images) and len(files) == 5
    assert weight <= 20 and 0 < visible < 200
    assert ready <= 2, "seconds from the address to the first filter"
