r"""Tests of the page of an evaluation or a step: its content, its safety, and its gallery in a real browser.

pytest tests/test_page.py; tests marked `needs_browser` are skipped if there is no Chromium."""

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
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs

import pytest
from browser import PROGRAM, Browser
from conftest import wait_until
from PIL import Image, ImageDraw

import report.page.gallery as G
import report.page.page as P
import report.records as R
from prepare_data import Example
from report.evaluation import make_sample_record
from report.page.plots import Curve, Panel, run_curves
from report.writer import ReportPage
from tasks.shapes import shapes_rows

ROOT = Path(__file__).parent.parent

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium, Chrome or chromium-browser here")


def sample(text="x", accuracy=1.0, finish="stop", **fields):
    rewards = {"accuracy": accuracy, "format": 1.0, "reward": accuracy}
    return {"text": text, "finish_reason": finish, "tokens": len(text), "rewards": rewards} | fields


def record(uid, *samples, **fields):
    samples = list(samples) or [sample()]
    defaults = {"index": 0, "answer_type": "count", "task": "t", "source": "s", "n_images": 1, "groups": {}}
    return {"uid": uid, "ground_truth": "3", "samples": samples} | defaults | fields


def make_example(uid, content="How many?", images=()):
    return Example(uid, "t", [{"role": "user", "content": content}], list(images), "3", {})


def first_page(title, records=(), examples=None, curves=(), **options):
    """Return the first page of a report. Most reports have only one."""
    overview = {"info": {}, "scores": [], "rows": [{"step": 1}], "curves": curves} if curves else {}
    return next(P.pages(ReportPage(title, records, examples or {}, **options), overview))


def make_curve(title, note):
    return Curve(Panel(title, "", {}, note), [], [])


def render_page(records, title="T", images=(), **options):
    return first_page(title, records, {r["uid"]: make_example(r["uid"], images=images) for r in records}, **options)


def photo(width=84, height=84, format="PNG", noise=60):
    file = io.BytesIO()
    bands = [Image.radial_gradient("L").resize((width, height)), Image.linear_gradient("L").resize((width, height)),
             Image.effect_noise((width, height), noise)]  # fmt: skip
    Image.merge("RGB", bands).save(file, format, **({"quality": 95} if format == "JPEG" else {}))
    return file.getvalue()


class ParsedPage(html.parser.HTMLParser):
    """A parsed page: its tags and attributes, the text outside of style and script, the images and the addresses."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.images, self.addresses = Counter(), Counter(), "", [], []
        self.open_tag = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes.update(f"{tag} {name}" for name, _ in attrs)
        self.open_tag = tag
        address = dict(attrs).get("src" if tag == "img" else "href", "") or ""
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag in ("img", "image"):
            data = base64.b64decode(address.split("base64,")[1])
            self.images.append((data, Image.open(io.BytesIO(data)).size))

    def handle_endtag(self, tag):
        self.open_tag = ""

    def handle_data(self, data):
        if self.open_tag not in ("style", "script"):
            self.text += data


# ----------------------------------------------------------------------------------------------------------------------
# Numbers and texts


@pytest.mark.parametrize(("value", "expected"), [
    (0.1 + 0.2, "0.3"), (1e-7, "1e-07"), (-0.0, "0"), (float("nan"), "nan"), (float("inf"), "inf"),
    (12345.678, "12,346"),
    (1234567.0, "1,234,567"), (-0.25, "-0.25"), (3, "3"), (1.0, "1"), (12.345, "12.35"),
    ("<b>", "<b>"), (True, "True"),
])  # fmt: skip
def test_numbers_are_short_and_correct(value, expected):
    assert P.number(value) == expected


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
    text = ParsedPage(render_page([record("a"), record("b", sample(accuracy=0.0))], summary=EVERYTHING)).text
    for expected in (
        "0.900", "0.810 to 0.950 (95% interval)", "of 80 prompts", "0.850", "of 3 tasks", "majority@80.940",
        "turns <8> 0.250", "2.50", "31.2", "+0.300", "+0.200 to +0.400", "<base>", "0.031", "< 0.001",
        "It looks: <yes>.", "0.310", "0.400 to 0.600", "a <column>", "</td>", "failed rewards2", "prompts left out7",
    ):  # fmt: skip
        assert expected in text, expected
    assert "-0.000" not in text and "nan" not in text and "None" not in text


def test_a_minimal_summary():
    text = ParsedPage(render_page([record("a")], summary={"n": 1, "accuracy": 0.0})).text
    assert "0.000" in text and "no interval" in text and "Comparison with" not in text and "Rewards and" not in text


def test_half_a_surrogate_pair_does_not_break_a_page():
    half = json.loads('"<\\ud800>"')
    summary = {"n": 1, "accuracy": 1.0, f"by_{half}": {half: {"n": 1, "accuracy": 1.0}}}
    records = [record(half, sample(half), ground_truth=half), record("b", groups={half: half})]
    assert render_page(records, half, [photo()], summary=summary).encode().count(b"&lt;?&gt;") >= 6


def test_a_reward_is_not_an_accuracy():
    summary = {"n": 2, "reward": -1.5, "reward_ci95": [-2.0, -1.0], "metric": "reward", "by_task": {
        "t": {"n": 2, "reward": -1.5, "reward_ci95": [-2.0, -1.0]}}}  # fmt: skip
    summary["rewards"] = {"km": {"n": 1, "mean": 512.25, "mean_ci95": (3.5, 1001.0)}}
    records = [record("a"), record("b", sample(), sample())]
    for s, reward in zip(records[0]["samples"] + records[1]["samples"], (1.0, -2.0, 3.0), strict=True):
        s["rewards"] = {"reward": reward}
    page = render_page(records, summary=summary)
    text = ParsedPage(page).text
    assert "km512.2503.500 to 1001.0001" in text and "-2.000 to -1.000" in text
    assert "reward of 2 prompts-1.500" in text and "✓" not in text and "✗" not in text and "accuracy" not in text[:60]
    assert re.findall(r'data-is="([^"]*)"', page) == ["disagree"]


def test_pages_without_prompts_with_and_without_curves():
    bare = ParsedPage(first_page("T", [], {}))
    assert bare.text.count("T") == 2 and "main" not in bare.tags and "form" not in bare.tags
    parsed = ParsedPage(first_page("T", [], {}, curves=[make_curve("loss <x>", "falls & <ends>")]))
    assert parsed.tags["figure"] == parsed.tags["svg"] == 1
    assert "loss <x>" in parsed.text and "falls & <ends>" in parsed.text


def test_metrics_of_a_step_are_shown_together():
    facts = {"loss": 0.5, "reward/a": 1.0, "reward/b": float("nan"), "reward/c": None, "time/<x>": 12}
    page = render_page([record("a", sample(advantage=-0.5))], facts=facts)
    rows = re.findall(r"<th scope=row>([^<]*)</th><td>([^<]*)</td>", page)
    assert rows == [("loss", "0.5"), ("a", "1"), ("&lt;x&gt;", "12")] and "advantage <b>-0.500</b>" in page


def test_the_page_of_a_run_starts_with_its_settings_and_ends_with_all_metrics(tmp_path):
    info = {"command": "train.py --lr 1e-5", "args": {"model": "org/<model>", "data": "d.parquet"},
            "changed_settings": ["--lr 1e-05", "--no-self-test"], "git": "0123456789abcdef" * 2 + "01234567-dirty",
            "hardware": "a GPU", "world": 8}  # fmt: skip
    rows = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "reward/mean": 0.1, "lr": 1e-5, "perf/mfu": 0.4},
            {"step": 2, "eval/accuracy": 0.75, "reward/mean": 0.3}]  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(info))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    example, records = make_example("a"), [record("a")]
    content = ReportPage("T", records, {"a": example}, {"n": 1, "accuracy": 0.75}, {"loss/policy": 0.5}, run=tmp_path)
    P.write_pages(tmp_path / "report.html", content)
    text = re.sub(r"\s+", " ", ParsedPage((tmp_path / "report.html").read_text()).text)
    parts = ["during training accuracy 0.250 step 0 → 0.750 step 2", "model org/<model>", "processes 8",
             "commit 0123456789ab-dirty", "not default --lr 1e-05 --no-self-test", "commandshowtrain.py --lr 1e-5",
             "accuracy of 1 prompts", "Training curves", "Learning rate", "MFU", "Prompts", "All metrics of the step"]
    text = re.sub(r"(model|processes|commit|not default)(?=org|8|0123|--lr)", r"\1 ", text)
    positions = [text.find(part) for part in parts]
    assert -1 not in positions and positions == sorted(positions), list(zip(parts, positions, strict=True))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:2]))
    P.write_pages(tmp_path / "report.html", content)
    assert "reward <b>0.100</b> <span class=note>step 1</span></p>" in (tmp_path / "report.html").read_text()


def test_long_texts_keep_their_ends_and_are_counted(monkeypatch):
    monkeypatch.setattr(G, "PAGE_CHARS", 4 * 1000)  # shared by the question and three responses
    texts = ["short", "START" + "<" * 3000 + "END", "BEGIN" + "y" * 3000 + "LAST"]
    page = render_page([record("u", *map(sample, texts))])
    text = ParsedPage(page).text
    for expected in ("short", "START<", "<END", "BEGINy", "yLAST", "2 long texts are shortened"):
        assert expected in text
    left = [int(x.replace(",", "")) for x in re.findall(r"([\d,]+) characters are left out", text)]
    assert left == [3008 - 1000, 3009 - 1000]


# ----------------------------------------------------------------------------------------------------------------------
# Prompts and samples


def make_records(n, **samples):
    return [record(f"u{i}", sample(accuracy=1.0), index=i) for i in range(n)]


def test_the_most_informative_prompts_are_chosen_if_there_are_too_many():
    records = make_records(1500)
    records[1400] = record("wrong", sample(accuracy=0.0), index=1400)
    records[1401] = record("cut", sample(finish="length"), index=1401)
    summary = {"n": 1500, "accuracy": 0.9, "baselines": [{"gained_uids": ["u1498"], "lost_uids": ["u1499"]}]}
    chosen = R.select_records(records, summary)
    assert len(chosen) == 1000 and [r["uid"] for r in chosen[-4:]] == ["wrong", "cut", "u1498", "u1499"]
    assert [r["uid"] for r in chosen[:996]] == [f"u{i}" for i in range(996)]  # in order
    examples = {r["uid"]: make_example(r["uid"]) for r in chosen}  # the page needs no other examples
    text = ParsedPage(first_page("T", records, examples, summary=summary)).text
    assert "1,000 of 1,500 prompts are shown; those gained, lost" in text
    lost = {f"u{i}" for i in range(500, 1500)}  # more than the limit: only these are chosen
    summary["baselines"][0] |= {"gained_uids": [], "lost_uids": lost}
    assert {r["uid"] for r in R.select_records(records, summary)} == lost - {"u1400", "u1401"} | {"wrong", "cut"}


def test_records_of_other_models_are_shown_at_their_prompts():
    records = [record("a"), record("b"), record("c")]
    others = {"baseline <m>": [record("b", sample("other says", accuracy=0.0)), record("unknown")],
              "blank": [record("a", sample(), sample(accuracy=0.0))]}  # fmt: skip
    page = render_page(records, others=others, summary={"n": 3, "accuracy": 1.0})
    a, b, c = re.findall(r"<article.*?</article>", page, re.DOTALL)
    assert "<summary>blank · 1 of 2 right</summary>" in a and "baseline &lt;m&gt;" not in a
    assert "<summary>baseline &lt;m&gt; · ✗ wrong</summary>" in b and "other says" in b
    assert "<details" not in c and "unknown" not in page


def test_failed_and_truncated_samples_are_marked():
    failed = sample(finish="error") | {"rewards": {}}
    broken = failed | {"ended_by": "error", "turns": 2}
    page = render_page([record("a", failed), record("b", sample(finish="length")), record("c", broken)],
                   summary={"n": 3, "accuracy": 0.3})  # fmt: skip
    a, b, c = re.findall(r"<article.*?</article>", page, re.DOTALL)
    assert "reward failed" in a and "environment failed" in c and "truncated at the length limit" in b
    assert re.findall(r'data-is="([^"]*)"', page) == ["failed wrong", "cut right", "failed wrong"]
    training = render_page([record("a", failed)])  # in training, a failed sample does not count as wrong
    assert re.findall(r'data-is="([^"]*)"', training) == ["failed"]


def test_an_episode_is_shown_turn_by_turn():
    pixels = Image.new("RGB", (30, 20), "red")
    images = [SimpleNamespace(image=pixels, fps=0)]
    r = SimpleNamespace(is_episode=True, images=images, n_turns=2, ended_by="done", messages=[
        {"role": "assistant", "content": "zoom <image>"}, {"role": "user", "content": "here <image> it is"},
        {"role": "assistant", "content": "three"}])  # fmt: skip
    vars(r).update(text="x", finish_reason="stop", response_mask=[True])
    page = render_page([record("a", make_sample_record(r, {"reward": 1.0}))])
    parsed = ParsedPage(page)
    assert [size for _, size in parsed.images] == [(30, 20)] and "ended by done" in parsed.text
    assert "zoom <image>" in parsed.text  # <image> in a response stays text
    assert "here " in page.split("<img")[0] and " it is" in page.split("<img")[1]
    bad = {"images": [b"<img src=http://127.0.0.1/x onerror=alert(1)>"], "messages": [], "turns": 1, "ended_by": "x"}
    parsed = ParsedPage(render_page([record("a", sample() | bad)]))
    assert not parsed.tags["img"] and "cannot be read" in parsed.text
    r.is_episode = False
    assert "messages" not in make_sample_record(r, {})


def test_images_are_where_their_marks_are_and_adjacent_ones_share_a_row():
    images = [photo(noise=i) for i in range(4)]
    example = make_example("u", "first<image> \n<image>then<image>last <b>", images)
    prompt_html = first_page("T", [record("u")], {"u": example}).partition("<div class=prompt>")[2]
    assert re.findall(r"<img|<span class=images>|first|then|last &lt;b&gt;", prompt_html) == [
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
    page = render_page([record("u")], images=images, folder=tmp_path / "images")
    parsed = ParsedPage(page)
    sizes = [(480, 360), (480, 360), (240, 480), (300, 200), (84, 84), (480, 240)]
    assert [size for _, size in parsed.images] == sizes
    assert all(len(data) < 60_000 for data, _ in parsed.images) and len(page) < 250_000 < sum(map(len, photos))
    assert parsed.images[4][0] == small  # a small image is not changed
    assert "cannot be read" in parsed.text
    links = re.findall(r'href="(images/[0-9a-f]{20}\.(?:jpeg|tiff|png))"', page)
    assert len(links) == 4 and {(tmp_path / link).read_bytes() for link in links} == {photos[0], photos[2], images[5]}


def test_rotated_photos_are_shown_upright(tmp_path):
    image = Image.new("RGB", (1200, 600), "white")
    image.paste("red", (0, 0, 600, 600))  # the left half, which is on top after the rotation
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    image.save(file := io.BytesIO(), "JPEG", exif=exif)
    page = render_page([record("u")], images=[file.getvalue()], folder=tmp_path / "i")
    data, size = ParsedPage(page).images[0]
    red = Image.open(io.BytesIO(data)).convert("RGB").getpixel((120, 20))
    assert size == (240, 480) and red[0] > 200 > 60 > red[1] and "600 x 1200 pixels" in page


def test_images_over_the_full_size_limit_are_thumbnails_and_counted(tmp_path, monkeypatch):
    images = [photo(600, 400, noise=noise) for noise in (60, 5, 80)]
    smallest = min(map(len, images))
    monkeypatch.setattr(G, "FULL_SIZE_BYTES", 3 * smallest)
    page = render_page([record("u")], images=images, folder=tmp_path / "images")
    (file,) = (tmp_path / "images").iterdir()
    assert file.read_bytes() == images[1] and page.count("<a class=full") == 1 and ParsedPage(page).tags["img"] == 3
    assert f"2 images of more than {smallest:,} bytes are shown only as thumbnails" in page


def test_images_beyond_the_limit_are_counted(monkeypatch):
    monkeypatch.setattr(G, "PAGE_IMAGES", 5)
    page = render_page([record("a"), record("b")], images=[photo(noise=1), photo(noise=2), photo(noise=3)])
    assert "2 images are left out: a page shows at most 5." in page and page.count("image left out to limit") == 2


# ----------------------------------------------------------------------------------------------------------------------
# Several pages


def make_report_page(n=450):
    records = [record(f"u{i}", sample(accuracy=float(i < 300)), index=i, groups={"g": str(i % 2)}) for i in range(n)]
    image = photo()
    examples = {r["uid"]: make_example(r["uid"], images=[image]) for r in records}
    return ReportPage("T", records, examples, {"n": n, "accuracy": 0.6})


def test_a_page_has_200_prompts_and_links_to_the_others(tmp_path):
    path = tmp_path / "report.html"
    P.write_pages(path, make_report_page())
    first, *others = (tmp_path / name for name in ("report.html", "report-2.html", "report-3.html"))
    assert sorted(tmp_path.iterdir()) == sorted([first, *others])
    assert [page.read_text().count("<article") for page in (first, *others)] == [200, 200, 50]
    for page in others:  # the summary is only on the first page
        assert "class=tiles" not in page.read_text() and "<h1>T</h1>" in page.read_text()
    assert "class=tiles" in first.read_text() and "Prompts 401 to 450 of 450" in others[1].read_text()
    assert re.findall(r'<a href="(report[^"]*)"', others[0].read_text())[:2] == ["report.html", "report-3.html"]
    P.write_pages(path, make_report_page(3))
    assert list(tmp_path.iterdir()) == [first]  # the other pages of an earlier, longer report are deleted
    assert "class=pages" not in first.read_text()


@needs_browser
def test_filters_are_kept_on_other_pages(open_page, tmp_path):
    P.write_pages(tmp_path / "report.html", make_report_page())
    browser = open_page((tmp_path / "report.html").read_text())
    counts = browser.evaluate("[...document.querySelectorAll('#bar .count')].map((x) => x.textContent)")
    assert counts[:3] == ["450", "150", "300"]  # counts over all pages
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


def make_hostile_page(address, folder):
    evils = [text.replace("ADDRESS", address) for text in EVILS]
    joined = " ".join(evils)
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
    messages = [{"role": evils[0], "content": joined + "<image>"}]
    images = [photo(600, 500)]
    examples = {r["uid"]: Example(r["uid"], "x", messages, images, "", {}) for r in records}
    base = {"path": joined, "accuracy": 0.5, "gained_uids": [records[0]["uid"]], "lost_uids": [joined], "gained": 1}
    summary = {"n": 3, "accuracy": 0.5, "path": joined, "data": joined, "checkpoint": joined, "baselines": [base],
               "reliance": {joined: {"accuracy": 0.1}, "said": joined}, "ended_by": {joined: 1.0},
               f"by_{joined}": {joined: {"n": 1, "accuracy": 0.5}}}  # fmt: skip
    curves = [make_curve(joined, joined), *run_curves([{"step": 1, f"reward/{evils[0]}": 0.5, f"my/{joined}": 0.5}])]
    facts = {f"{joined}/{joined}": 1.0}
    info = {"args": {"model": joined, "data": joined}, "command": joined, "git": joined, "changed_settings": evils}
    overview = {"info": info, "scores": [], "rows": [{"step": 1}], "curves": curves}
    content = ReportPage(joined, records, examples, summary, facts, {joined: records}, folder)
    return next(P.pages(content, overview)), evils


def test_all_text_from_data_policy_and_reward_is_escaped(tmp_path):
    page, evils = make_hostile_page("http://127.0.0.1:1", tmp_path / "images")
    parsed = ParsedPage(page)
    allowed = set(
        "html head meta title style body header h1 h2 h3 p b i a dl dt dd div span section table caption thead "
        "tbody tr th td figure figcaption svg details summary form button select option input output label kbd "
        "main article ul li em small code dialog img script g path text polyline polygon".split()
    )
    assert set(parsed.tags) <= allowed and parsed.tags["script"] == parsed.tags["style"] == 1
    assert not [name for name in parsed.attributes if name.split()[1].startswith("on")]
    assert all(re.match(r"data:image/|images/[0-9a-f]{20}\.png$|#", address) for address in parsed.addresses)
    for evil in evils:
        assert evil in parsed.text, evil
    uids = re.findall(r"<h3 id=t\d+><a[^>]*>.*?</a> <b>(.*?)</b>", page)
    assert [html.unescape(x) for x in uids] == [f"{i}{evil}" for i, evil in enumerate(evils)]


FIELDS = ["title", "uid", "text", "truth", "role", "content", "reward", "group", "value", "ended_by", "task", "type",
          "baseline", "label", "said", "kind", "metric", "checkpoint", "column", "curve", "note"]  # fmt: skip


@pytest.mark.parametrize("evil", ["<script>window.hit = 1</script>", "{{ 7*7 }}{% raw %}", "</script><b>", "'\"><img>"])
def test_each_field_is_shown_as_it_is(evil):
    """No field is interpreted as HTML or as a template."""
    x = {name: f"{name}:{evil}" for name in FIELDS}
    messages = [{"role": x["role"], "content": x["text"]}]
    episode = sample(x["text"], turns=1, ended_by=x["ended_by"], messages=messages)
    episode["rewards"] = {"accuracy": 1.0, "reward": 1.0, x["reward"]: 1.0}
    groups = {x["group"]: x["value"]}
    records = [record(x["uid"], episode, ground_truth=x["truth"], groups=groups, task=x["task"], answer_type=x["type"]),
               record("b", sample(x["text"]))]  # fmt: skip
    examples = {r["uid"]: make_example(r["uid"], x["content"]) for r in records}
    base = {"path": x["baseline"], "accuracy": 0.5, "gained_uids": [], "lost_uids": []}
    summary = {"accuracy": 0.5, "checkpoint": x["checkpoint"], "baselines": [base]}
    summary |= {"reliance": {x["kind"]: {"accuracy": 0.1}, "said": x["said"]}, f"by_{x['column']}": {x["value"]: {}}}
    options = {"summary": summary, "facts": {x["metric"]: 1.0}, "others": {x["label"]: records}}
    page = first_page(x["title"], records, examples, [make_curve(x["curve"], x["note"])], **options)
    parsed = ParsedPage(page)
    for name, value in x.items():
        value = value.partition("/")[2] if name == "metric" and "/" in value else value
        assert value.replace("_", " ") in parsed.text or value in parsed.text, name
    assert parsed.tags["script"] == 1 and "49" not in parsed.text and "img" not in parsed.tags


def test_the_process_that_writes_pages_does_not_import_torch():
    code = "import sys, report.page.page; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_templates_escape_everything():
    """Only the `Markup` that the page's code makes is not escaped: style and script."""
    templates = "".join(path.read_text() for path in sorted(P.TEMPLATES.glob("*.html")))
    assert "|safe" not in templates.replace(" ", "") and "autoescape" not in templates and len(templates) > 5000


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Return open_page(page, fragment, **options), which opens a page and returns the browser."""

    def show(page, fragment="", **options):
        file = tmp_path / "report.html"
        file.write_text(page)
        browser.open(f"{file.as_uri()}{fragment}", **options)
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
def test_a_hostile_page_runs_and_fetches_nothing(open_page, canary, tmp_path):
    page, evils = make_hostile_page(f"http://127.0.0.1:{canary.server_port}", tmp_path / "images")
    browser = open_page(page)
    browser.evaluate("document.querySelectorAll('details').forEach((x) => x.open = true)")
    browser.press(*"j" * len(evils))
    browser.press("t", "s", "t", "/")
    browser.press("Escape")
    browser.evaluate("new Promise((done) => setTimeout(done, 300))")
    assert browser.evaluate("typeof window.hit") == "undefined" and not browser.errors
    requests = [url for url in browser.requests if not url.startswith("data:")]
    assert requests == [(tmp_path / "report.html").as_uri()] and canary.hits == []
    text = browser.evaluate("document.body.textContent")
    assert all(evil in text for evil in evils)
    # even without escaping, the page's content security policy blocks requests
    browser.evaluate(f"document.body.append(Object.assign(new Image(), {{src: '{canary.server_port}'}}))")
    code = f"fetch('http://127.0.0.1:{canary.server_port}/').then(() => 1, () => 0)"
    assert browser.evaluate(code) == 0 and canary.hits == []
    browser.errors.clear()  # the policy's reports of the two blocked requests


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
def test_filters_show_the_right_prompts(open_page):
    browser = open_page(render_page(MIXED, summary=MIXED_SUMMARY))
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
def test_selects_search_and_order(open_page):
    browser = open_page(render_page(MIXED, summary=MIXED_SUMMARY))
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
    browser.press("s")  # back to the first order
    assert browser.evaluate(VISIBLE) == SHOWN["a"]
    browser.press("/", *"Words")  # in the search field, letters are not shortcuts
    visible_later = f"new Promise((done) => setTimeout(() => done({VISIBLE}), 400))"
    assert browser.evaluate(visible_later) == ["wrong"]
    browser.press("Escape", "r")
    assert browser.evaluate(VISIBLE) == []
    browser.press("j", "k", "o")  # no error if no prompt is visible


@needs_browser
def test_state_is_in_the_address(open_page):
    browser = open_page(render_page(MIXED, summary=MIXED_SUMMARY))
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
        browser = open_page(render_page(MIXED, summary=MIXED_SUMMARY), unknown)
        assert browser.evaluate(VISIBLE) == SHOWN["a"], unknown
    browser = open_page(render_page(MIXED, summary=MIXED_SUMMARY), "#p2")
    assert browser.evaluate(CURRENT) == "mixed"


@needs_browser
def test_a_group_may_have_the_name_of_another_part_of_the_state(open_page):
    names = ("show", "sort", "q", "order", "__proto__", "task")
    records = [record(str(i), groups={name: f"{name}{i}" for name in names}) for i in range(3)]
    browser = open_page(render_page(records))
    for name in names:
        choose(browser, f"by.{name}", f"{name}1")
    assert browser.evaluate(VISIBLE) == ["1"]
    browser.press("r", "s")
    browser.press("s")
    browser.go("Page.reload")
    assert browser.evaluate(VISIBLE) == ["1"] and browser.evaluate("document.getElementById('sort').value") == "reward"


@needs_browser
def test_shortcuts_move_through_the_prompts(open_page):
    browser = open_page(render_page(MIXED, summary=MIXED_SUMMARY))
    assert browser.evaluate(CURRENT) is None
    current = []
    for key in "jjkw":
        browser.press(key)
        current.append(browser.evaluate(CURRENT))
    assert current == ["right", "wrong", "right", "right"]
    browser.press("j")
    assert browser.evaluate(CURRENT) in SHOWN["w"]
    browser.press(*"jjjjjjj")
    assert browser.evaluate(CURRENT) == "lost" and browser.evaluate("document.activeElement.id") == "p6"
    browser.press(*"kkkkkkk")
    assert browser.evaluate(CURRENT) == "wrong"
    browser.press("?")
    assert browser.evaluate("document.getElementById('keys').open")
    browser.press("r")  # shortcuts do nothing while the list of keys is open
    assert browser.evaluate(VISIBLE) == SHOWN["w"]
    browser.press("Escape")
    assert not browser.evaluate("document.getElementById('keys').open")


@needs_browser
@pytest.mark.parametrize("key", ["o", "Enter", "click"])
def test_an_image_opens_in_full_size(open_page, tmp_path, key):
    image = photo(900, 600)
    page = render_page([record("a"), record("b")], images=[image], folder=tmp_path / "the images #1")
    browser = open_page(page)
    browser.press("j")
    (file,) = (tmp_path / "the images #1").iterdir()
    browser.click("a.full") if key == "click" else browser.press(key)
    wait_until(lambda: file.as_uri() in browser.tabs())
    assert file.read_bytes() == image


HOVER = """((name, x) => {{
    const svg = document.querySelector('figure svg'), box = svg.getBoundingClientRect();
    const at = box.left + box.width * (44 + 400 * x) / 452;
    svg.dispatchEvent(new PointerEvent(name, {{clientX: at, clientY: box.top + 20}}));
    return document.querySelector('figure').innerText; }})({}, {})"""
END = "document.querySelector('figure polyline.dot:nth-last-of-type({})').getAttribute('points').split(/[ ,]/)[0]"


@needs_browser
def test_curves_show_the_values_at_the_pointer_and_offer_other_x_axes(open_page, tmp_path):
    """Half of the tokens are sampled in the last of four steps."""
    rows = [{"step": 0, "eval/accuracy": 0.25, "time/eval": 60.0}]
    rows += [{"step": n, "reward/mean": n / 8, "rollout/tokens": 3.0 if n == 4 else 1.0, "time/step": 60.0}
             for n in range(1, 5)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    P.write_run_page(tmp_path, None)
    browser = open_page((tmp_path / "report.html").read_text(), dark=True)
    assert "0.5" in browser.evaluate("document.querySelector('.legend').innerText")  # the newest value
    text = browser.evaluate(HOVER.format("'pointermove'", 0.55))
    assert "step 2" in text and "mean 0.25" in text
    assert "mean 0.5" in browser.evaluate(HOVER.format("'pointerleave'", 0.5))
    places = {}
    for axis in ("sampled tokens", "minutes of steps and evaluations", "step"):
        choose(browser, "x axis", axis)
        places[axis] = [float(browser.evaluate(END.format(n))) for n in (2, 1)]
        labels = browser.evaluate("[...document.querySelectorAll('figure .x text')].map((x) => x.textContent)")
        assert labels[:2] == ["0", "2" if axis == "sampled tokens" else "1"]
    assert places == {"sampled tokens": [0.5, 1], "minutes of steps and evaluations": [0.8, 1], "step": [0.75, 1]}
    choose(browser, "x axis", "sampled tokens")
    assert "step 3" in browser.evaluate(HOVER.format("'pointermove'", 0.5))
    background = "getComputedStyle(document.querySelector('figure')).backgroundColor"
    assert browser.evaluate(background) == "rgb(26, 32, 40)"  # and the plot has none of its own


@needs_browser
def test_a_narrow_page_does_not_scroll_sideways(open_page, tmp_path):
    wide = [
        record("u" * 200, sample("w" * 3000 + r" $\frac{1}{2}" + "+ x" * 200 + "$"), groups={"g": "v" * 200}),
        record("b"),
    ]
    page = render_page(wide, title="t" * 200, summary=EVERYTHING, images=[photo(700, 300)], folder=tmp_path / "i")
    browser = open_page(page, width=400)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400


@needs_browser
def test_a_page_without_prompts_opens(open_page):
    assert open_page(first_page("T", [], {})).evaluate("document.querySelector('h1').innerText") == "T"


# ----------------------------------------------------------------------------------------------------------------------
# The largest page


@functools.cache
def make_jpeg_pieces(n=24):
    """Return the header of 12-megapixel JPEG files, and the entropy-coded data of n files, cut at restart markers."""
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
    """The image of a prompt: a photo of 4000 x 3000 pixels for each seed. It is made of rows of other photos when it is
    read."""

    def __init__(self, seed):
        self.seed = seed

    def __len__(self):
        return 1

    def __iter__(self):
        yield self[0]

    def __getitem__(self, _):
        head, pieces = make_jpeg_pieces()
        dice = random.Random(self.seed)
        rows = [dice.choice(pieces)[i] for i in range(len(pieces[0]))]
        body = b"".join(row + bytes([0xFF, 0xD0 + i % 8]) for i, row in enumerate(rows[:-1]))
        return head + body + rows[-1] + b"\xff\xd9"


@needs_browser
@pytest.mark.slow
def test_pages_of_a_thousand_photos_are_small_and_fast(open_page, tmp_path, n=1000, photos=250):
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
    report_page = ReportPage("T", records, examples, {"n": n, "samples": 8, "accuracy": 0.6})
    start = time.perf_counter()
    P.write_pages(tmp_path / "report.html", report_page)
    write_seconds = time.perf_counter() - start
    files = sorted(tmp_path.glob("report*.html"))
    megabytes = max(file.stat().st_size for file in files) / 1e6
    page = (tmp_path / "report.html").read_text()
    browser = open_page("<!doctype html><title>x</title>")  # a tab that is open already
    (tmp_path / "report.html").write_text(page)
    start = time.perf_counter()
    browser.go("Page.navigate", url=(tmp_path / "report.html").as_uri() + "?")
    load_seconds = time.perf_counter() - start
    browser.press("d")
    visible = browser.evaluate("document.querySelectorAll('.card:not([hidden])').length")
    filter_seconds = time.perf_counter() - start
    print(f"{n} prompts: {megabytes:.1f} MB per page, written in {write_seconds:.1f} s, "
          f"loaded in {load_seconds:.2f} s, first filter after {filter_seconds:.2f} s")  # fmt: skip
    assert page.count("<article") == 200 == len(ParsedPage(page).images) and len(files) == 5
    assert megabytes <= 20 and 0 < visible < 200
