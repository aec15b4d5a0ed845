"""An evaluation or a step's rollouts as one HTML file that needs no other: images, prompts, responses, rewards."""

import base64
import html
import io
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from PIL import Image, ImageOps

from prepare_data import FORMATS, IMAGE_ERRORS, MARK, Example, decode_image

PAGE_RECORDS = 200  # prompts on a page; more makes browsers slow
THUMBNAIL = 320  # pixels of an image's longer side on a page
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1080px;padding:0 1rem;overflow-wrap:anywhere;
color:#1c2330;background:#f6f7f9}
h1{font-size:1.35rem}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:.4rem;margin:1rem 0 1.5rem}
.fact,.card{background:#fff;border:1px solid #dfe3ea;border-radius:8px;padding:.25rem .7rem}
.fact b,.fact span,.sample code{display:block}
.fact span,.meta,.sample div,.sample span{color:#647084;font-size:.8rem}
.card{display:grid;grid-template-columns:220px minmax(0,1fr);gap:1.2rem;margin:0 0 1rem;padding:1rem}
.card img{width:100%;max-height:320px;object-fit:contain;margin-bottom:.4rem}
.prompt,.sample code{white-space:pre-wrap}
.sample{border-left:4px solid #c9ced8;padding:.15rem .7rem;margin:.5rem 0}
.right{border-color:#2e9e5b} .wrong{border-color:#d2433f}
.sample code{max-height:24em;overflow:auto;font:13px/1.45 ui-monospace,monospace}
.said{background:#f0f2f6;border-radius:6px;padding:.3rem .6rem;margin:.3rem 0;white-space:pre-wrap}
.said img{display:block;max-width:160px;image-rendering:pixelated;margin:.3rem 0}
@media(max-width:700px){.card{grid-template-columns:minmax(0,1fr)} .card img{max-width:320px}}
"""


class Curve(NamedTuple):
    """A panel of a run: `image` is an <svg> or <img> tag of ours; `note` says what is healthy, as text."""

    title: str
    image: str
    note: str


def page(title, records, examples, *, summary=None, facts=None, curves=()) -> str:
    return rollout_page(title, summary or facts or {}, records, examples) + "".join(c.image for c in curves)


def rollout_page(title: str, facts: dict, records: Sequence[dict], examples: dict[str, Example]) -> str:
    """`facts`: eval.summarise's, or a step's metrics. `records`: prompts with their samples, as eval.py has them,
    in training with advantages. `examples`: by uid."""
    head = "<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    lines = [f"{head}<title>{safe(title)}</title><style>{STYLE}</style><h1>{safe(title)}</h1>", "<div class=facts>"]
    for name, value in figures(facts).items():
        lines.append(f"<div class=fact><b>{number(value)}</b><span>{safe(name)}</span></div>")
    lines.append("</div>")
    if len(records) > PAGE_RECORDS:
        lines.append(f"<p>The first {PAGE_RECORDS} of {len(records)} prompts.</p>")
    note = "<div class=meta>blanked for the model</div>" if facts.get("blank_images") else ""
    lines += [card(record, examples[record["uid"]], note) for record in records[:PAGE_RECORDS]]
    return "\n".join(lines) + "\n"


def safe(text: object) -> str:
    """For all that comes from data, from the policy or from a user's reward."""
    return html.escape(str(text))


def number(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def figures(facts: dict) -> dict[str, float | str]:
    """What a page begins with: the accuracy, the comparison, then all other numbers, then each type's accuracy."""
    shown = {"accuracy": facts["accuracy"]} if "accuracy" in facts else {}
    if interval := facts.get("accuracy_ci95"):
        shown["95% interval"] = "{:.3f} to {:.3f}".format(*interval)
    if baseline := facts.get("baseline"):
        shown["baseline accuracy"] = baseline["accuracy"]
        shown |= {"gained": baseline["gained"], "lost": baseline["lost"], "McNemar p": baseline["mcnemar_p"]}
    shown |= {name: x for name, x in facts.items() if isinstance(x, int | float) and not isinstance(x, bool)}
    if facts.get("samples") == 1:
        shown.pop("pass@1", None)  # the accuracy once more
    return shown | {f"accuracy: {kind}": of["accuracy"] for kind, of in facts.get("by_answer_type", {}).items()}


def card(record: dict, example: Example, note: str) -> str:
    """A prompt: its images on the left, under a note if there is one, its text and its samples on the right."""
    images = "".join(thumbnail(data) + credit(i, record["samples"]) for i, data in enumerate(example.images, 1))
    prompt = "\n".join(f"{message['role']}: {message['content']}" for message in example.messages)
    truth = f"{safe(record['uid'])} &middot; truth <b>{safe(record['ground_truth'])}</b>"
    left = f"<div>{note + images if images else '(no image)'}</div>"
    samples = "".join(map(sample_block, record["samples"]))
    right = f"<div><div class=prompt>{safe(prompt)}</div><div class=meta>{truth}</div>{samples}</div>"
    return f"<div class=card>{left}{right}</div>"


def credit(image: int, samples: Sequence[dict]) -> str:
    """What each sample earned for an image, counted from 1, if its task's reward says."""
    earned = [s["rewards"][f"image_{image}"] for s in samples if f"image_{image}" in s["rewards"]]
    return f"<div class=meta>image {image}: credit {', '.join(map(number, earned))}</div>" if earned else ""


def sample_block(sample: dict) -> str:
    """A response, with its rewards under it."""
    rewards = sample["rewards"]
    notes = [f"{safe(name)} {number(float(value))}" for name, value in rewards.items()]
    if "advantage" in sample:
        notes.append(f"advantage {sample['advantage']:+.3f}")
    notes.append(f"{sample['tokens']} tokens")
    if sample["finish_reason"] == "error":
        notes.append("its environment failed" if sample.get("ended_by") == "error" else "its reward failed")
    if sample["finish_reason"] == "length":
        notes.append("cut at the length limit")
    if "turns" in sample:
        notes.append(f"{sample['turns']} turns, ended by {sample['ended_by']}")
    verdict = "right" if rewards.get("accuracy", rewards.get("reward", 0.0)) >= 0.5 else "wrong"
    said = f"<code>{safe(sample['text']) or '<span>(empty)</span>'}</code>"
    text = turns_block(sample) if "turns" in sample else said
    return f"<div class='sample {verdict}'>{text}<div>{' &middot; '.join(notes)}</div></div>"


def episode_record(r: Any) -> dict:
    """What a rollout's record has besides, if it is an episode; its images as tags of the page."""
    if not r.is_episode:
        return {}
    images = []
    for image in r.pil_images:
        image.save(file := io.BytesIO(), format="PNG")
        images.append(thumbnail(file.getvalue()))
    return {"turns": r.turns, "ended_by": r.ended_by, "messages": r.messages, "images": images}


def turns_block(sample: dict) -> str:
    """An episode, turn by turn, each image where it came."""
    images = iter(sample["images"])
    blocks = []
    for message in sample["messages"]:
        text = safe(message["content"]) or "<span>(empty)</span>"
        if message["role"] == "assistant":
            blocks.append(f"<code>{text}</code>")
            continue
        shown = "".join(islice(images, message["content"].count(MARK)))
        blocks.append(f"<div class=said>{safe(message['role'])}: {text}{shown}</div>")
    return "".join(blocks)


def thumbnail(data: bytes) -> str:
    """An image file as an <img> of few kilobytes: the file itself if it is small, else the smaller of PNG and JPEG."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            name, size = opened.format, opened.size
            opened.draft("RGB", (2 * THUMBNAIL, 2 * THUMBNAIL))  # a large JPEG is decoded at a fraction of its size
            image = ImageOps.exif_transpose(opened).convert("RGB") if name == "JPEG" else decode_image(data)
    except IMAGE_ERRORS:
        return "<div class=meta>(an image that cannot be read)</div>"
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    files = {}
    for kind in ("PNG", "JPEG"):
        image.save(file := io.BytesIO(), format=kind)
        files[kind] = file.getvalue()
    if max(size) <= THUMBNAIL and name in ("PNG", "JPEG", "GIF", "WEBP"):
        files[name] = data
    kind, data = min(files.items(), key=lambda item: len(item[1]))
    return f'<img alt="" src="data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}">'
