"""Evaluate a model folder, a hub id, a run or a checkpoint: greedy accuracy per answer type, and a page to look at.

    python eval.py out/geo3k --data geo3k_test.parquet --out out/geo3k/eval
    python eval.py MODEL --data F --out DIR --baseline BASE     # the same prompts through both, compared pairwise
    python eval.py MODEL --data F --out DIR --samples 8         # avg@8 and pass@8 at --temperature
    python eval.py MODEL --data F --out DIR --blank-images      # what is right without looking?

Writes eval.json and report.html to --out.
"""

import argparse
import base64
import html
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageOps

from errors import UserError, check_writable, writing
from model import Processor, default_dtype
from parallel.checkpoint import load_trained, locate
from prepare_data import FORMATS, IMAGE_ERRORS, Example, add_reading_flags, decode_image, read_flagged
from reward import check_tasks, load_reward, score_batch, try_reward
from rollout import HFEngine, Sampling, VLLMEngine, drop_long_prompts, make_prompts, picture_limits, resolve_engine
from utils import Context, dist_setup, gather0, print0, run_script, write_text


def evaluate(
    engine, examples: Sequence[Example], processor: Processor, reward_fn: Callable, ctx: Context, sampling: Sampling,
    samples: int = 1, blank: bool = False, chunk: int = 64, stop: Callable[[], object] = lambda: False,
) -> list[dict]:
    """One record per example, in order, on rank 0 (empty elsewhere). Ranks share the examples. `stop`, the same on all ranks,
    ends it before the next chunk, with no records."""
    mine = range(ctx.rank, len(examples), ctx.world)
    records = []
    # As many rounds on every rank, if need be with nothing to do: engines that span ranks answer together
    for start in range(0, -(-len(examples) // ctx.world), chunk):
        if stop():
            return []
        part = mine[start : start + chunk]
        prompts = make_prompts([examples[i] for i in part], processor, blank)
        rollouts = engine.generate(prompts, samples, sampling)
        asked = [examples[i] for i in part for _ in range(samples)]
        # in one call: its time for math-verify is for all of the chunk
        rewards = score_batch([r.text for r in rollouts], asked, reward_fn, [r.finish_reason for r in rollouts])
        for j, i in enumerate(part):
            group = slice(j * samples, (j + 1) * samples)
            records.append({
                "index": i,
                "uid": examples[i].uid,
                "answer_type": answer_type(examples[i]),
                "ground_truth": examples[i].ground_truth,
                "samples": [
                    {"text": r.text, "finish_reason": r.finish_reason, "tokens": len(r.response), "rewards": parts}
                    for r, parts in zip(rollouts[group], rewards[group], strict=True)
                ],
            })
    return sorted(gather0(records), key=lambda record: record["index"])


def answer_type(example: Example) -> str:
    """As text: data may name types by numbers, or by both."""
    kind = example.extra.get("answer_type")
    return "all" if kind is None or kind == "" else str(kind)


def correctness(record: dict) -> list[float]:
    """1 or 0 of each sample; the total reward where a task has no accuracy part."""
    return [s["rewards"].get("accuracy", s["rewards"]["reward"]) for s in record["samples"]]


def wilson(successes: float, n: int) -> tuple[float, float]:
    """95% confidence interval of a proportion.   Wilson 1927"""
    z, p = 1.959964, successes / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def summarise(records: Sequence[dict]) -> dict:
    """Accuracy (mean over samples, then over examples), its interval, pass@k, and the same per answer type."""
    samples = [s for record in records for s in record["samples"]]
    scores = [correctness(record) for record in records]
    accuracy = sum(sum(s) / len(s) for s in scores) / len(scores)
    summary = {
        "n": len(records),
        "samples": len(scores[0]),
        "accuracy": accuracy,
        # Over examples: the samples of one are not independent. A reward that is no proportion has no such interval.
        "accuracy_ci95": wilson(accuracy * len(records), len(records)) if all(0 <= x <= 1 for s in scores for x in s) else None,
        f"pass@{len(scores[0])}": sum(max(s) == 1 for s in scores) / len(scores),
        "reward": sum(s["rewards"]["reward"] for s in samples) / len(samples),
        "truncated": sum(s["finish_reason"] == "length" for s in samples) / len(samples),
        "response_tokens": sum(s["tokens"] for s in samples) / len(samples),
        "by_answer_type": {},
    }
    if "format" in samples[0]["rewards"]:
        summary["format"] = sum(s["rewards"].get("format", 0.0) for s in samples) / len(samples)
    for kind in sorted({record["answer_type"] for record in records}):
        of_kind = [sum(s) / len(s) for record, s in zip(records, scores, strict=True) if record["answer_type"] == kind]
        summary["by_answer_type"][kind] = {"n": len(of_kind), "accuracy": sum(of_kind) / len(of_kind)}
    return summary


def compare(records: Sequence[dict], baseline: Sequence[dict]) -> dict:
    """Paired comparison on the same examples: exact two-sided McNemar test on the first sample of each."""
    assert [r["uid"] for r in records] == [r["uid"] for r in baseline], "a paired comparison needs the same examples"
    pairs = [(correctness(a)[0] == 1, correctness(b)[0] == 1) for a, b in zip(records, baseline, strict=True)]
    gained, lost = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n if n else 1.0
    return {"gained": gained, "lost": lost, "mcnemar_p": min(1.0, 2 * tail)}


# ----------------------------------------------------------------------------------------------------------------------
# The page

PAGE_RECORDS = 200  # prompts on a page; more makes browsers slow
THUMBNAIL = 320  # pixels of an image's longer side on a page
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1080px;padding:0 1rem;color:#1c2330;background:#f6f7f9}
h1{font-size:1.35rem;overflow-wrap:anywhere}
.facts{display:flex;flex-wrap:wrap;gap:.5rem;margin:1rem 0 1.5rem}
.fact{background:#fff;border:1px solid #dfe3ea;border-radius:8px;padding:.35rem .8rem}
.fact b{display:block;font-size:1.1rem}
.fact span{color:#647084;font-size:.8rem}
.card{display:grid;grid-template-columns:220px 1fr;gap:1.2rem;margin:0 0 1rem;padding:1rem;
background:#fff;border:1px solid #dfe3ea;border-radius:10px}
.card img{width:100%;max-height:320px;object-fit:contain;border:1px solid #dfe3ea;border-radius:6px;margin-bottom:.4rem}
.prompt{white-space:pre-wrap;overflow-wrap:anywhere}
.meta{color:#647084;font-size:.85rem;margin:.3rem 0 .6rem}
.sample{border-left:4px solid #c9ced8;padding:.15rem .7rem;margin:.35rem 0}
.right{border-color:#2e9e5b} .wrong{border-color:#d2433f}
.sample code{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,monospace}
.sample div,.sample span{color:#647084;font-size:.8rem}
@media(max-width:700px){.card{grid-template-columns:1fr}}
"""


def thumbnail(data: bytes) -> str:
    """An image file as an <img> of a few kilobytes: the file itself where it is small, else whichever of PNG and JPEG is smaller."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            name, size = opened.format, opened.size
            opened.draft("RGB", (2 * THUMBNAIL, 2 * THUMBNAIL))  # a large JPEG is decoded at a fraction of its size
            image = ImageOps.exif_transpose(opened).convert("RGB") if name == "JPEG" else decode_image(data)
    except IMAGE_ERRORS:
        return "<div class=meta>(an image that cannot be read)</div>"
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    files = {name: data} if max(size) <= THUMBNAIL and name in ("PNG", "JPEG", "GIF", "WEBP") else {}
    for kind in ("PNG", "JPEG"):
        image.save(file := io.BytesIO(), format=kind)
        files.setdefault(kind, file.getvalue())
    kind, data = min(files.items(), key=lambda item: len(item[1]))
    return f'<img alt="" src="data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}">'


def rollout_page(title: str, facts: dict, records: Sequence[dict], examples: dict[str, Example]) -> str:
    """A self-contained HTML page: pictures, prompt, responses with their reward parts and, in training, advantages."""

    def number(value: float) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    def safe(text: object) -> str:  # all that comes from data, from the policy or from a user's reward
        return html.escape(str(text))

    cells = {"accuracy": facts["accuracy"]} if "accuracy" in facts else {}
    if interval := facts.get("accuracy_ci95"):
        cells["95% interval"] = "{:.3f} to {:.3f}".format(*interval)
    if base := facts.get("baseline"):
        cells |= {"baseline accuracy": base["accuracy"], "gained": base["gained"], "lost": base["lost"], "McNemar p": base["mcnemar_p"]}
    cells |= {key: value for key, value in facts.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    if facts.get("samples") == 1:
        cells.pop("pass@1", None)  # the accuracy once more
    cells |= {f"accuracy: {kind}": part["accuracy"] for kind, part in facts.get("by_answer_type", {}).items()}
    parts = [f"<!doctype html><meta charset=utf-8><title>{safe(title)}</title><style>{STYLE}</style><h1>{safe(title)}</h1>"]
    parts.append("<div class=facts>" + "".join(
        f"<div class=fact><b>{number(value)}</b><span>{safe(key)}</span></div>" for key, value in cells.items()) + "</div>")
    if len(records) > PAGE_RECORDS:
        parts.append(f"<p>The first {PAGE_RECORDS} of {len(records)} prompts.</p>")
    for record in records[:PAGE_RECORDS]:
        example = examples[record["uid"]]
        pictures = "".join(map(thumbnail, example.images))
        if pictures and facts.get("blank_images"):
            pictures = f"<div class=meta>blanked for the model</div>{pictures}"
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in example.messages)
        parts.append(f"<div class=card><div>{pictures or '(no picture)'}</div><div><div class=prompt>{safe(prompt)}</div>")
        parts.append(f"<div class=meta>{safe(record['uid'])} &middot; truth <b>{safe(record['ground_truth'])}</b></div>")
        for s in record["samples"]:
            right = "right" if s["rewards"].get("accuracy", s["rewards"]["reward"]) >= 0.5 else "wrong"
            notes = [f"{safe(key)} {number(float(value))}" for key, value in s["rewards"].items()]
            notes += [f"advantage {s['advantage']:+.3f}"] if "advantage" in s else []
            notes += [f"{s['tokens']} tokens"] + (["cut at the length limit"] if s["finish_reason"] == "length" else [])
            text = safe(s["text"]) or "<span>(empty)</span>"
            parts.append(f"<div class='sample {right}'><code>{text}</code><div>{' &middot; '.join(notes)}</div></div>")
        parts.append("</div></div>")
    return "\n".join(parts) + "\n"


def shown(text: str) -> str:
    """For the terminal, on which escape codes from data would act."""
    return repr(text)[1:-1]


def settings_of_run(path: str) -> dict:
    """What a run, or one of its checkpoints, was trained with, by the names of the flags here. {} for other models."""
    reading = argparse.ArgumentParser()
    add_reading_flags(reading)
    names = ["max_new_tokens", "max_prompt_tokens", "limit_images", "min_pixels", "max_pixels", "dtype", "reward"]
    run = locate(path)[2]
    settings = {name: run.get(name) for name in (*names, *vars(reading.parse_args([])))} | {"rows": run.get("rollout_rows")}
    return {name: value for name, value in settings.items() if value is not None}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("model", help="model folder, hub id, run directory or checkpoint")
    p.add_argument("--data", required=True, help="parquet file(s) to evaluate on")
    p.add_argument("--out", required=True, help="directory for eval.json and report.html")
    p.add_argument("--baseline", help="a second model to compare with, pairwise")
    p.add_argument("--limit", type=int, help="only the first N examples")
    p.add_argument("--samples", type=int, default=1, help="responses per example")
    p.add_argument("--temperature", type=float, help="sampling temperature (default: 0 with one sample, else 1)")
    p.add_argument("--top-p", type=float, default=1.0, help="nucleus mass (1 = off)")
    p.add_argument("--max-new-tokens", type=int, default=512, help="longest response, tokens")
    p.add_argument("--max-prompt-tokens", type=int, default=2048, help="drop longer prompts, and say how many")
    p.add_argument("--limit-images", type=int, help="drop prompts with more pictures, and say how many (default: none)")
    p.add_argument("--min-pixels", type=int, help="enlarge smaller pictures to this many pixels (default: the processor's)")
    p.add_argument("--max-pixels", type=int, help="shrink larger pictures to this many pixels (default: the processor's)")
    p.add_argument("--blank-images", action="store_true", help="replace every picture by a white one")
    p.add_argument("--reward", help="FILE.py:FUNCTION instead of the task's own reward")
    add_reading_flags(p)
    p.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: bfloat16 on a GPU, as in training")
    p.add_argument("--rollout", choices=("auto", "hf", "vllm"), default="auto", help="engine (auto: vllm on a GPU where it is installed)")
    p.add_argument("--gpu-memory-utilization", type=float, default=0.6, help="share of the GPU's memory for vLLM")
    p.add_argument("--rows", type=int, default=256, help="responses decoded together")
    p.add_argument("--seed", type=int, default=0, help="of sampling")
    plain = vars(p.parse_args(argv))
    run = settings_of_run(plain["model"])
    file = run.get("reward", "").rpartition(":")[0]
    lost = run.pop("reward") if file and not Path(file).is_file() and not plain["reward"] else None
    p.set_defaults(**run)
    args = p.parse_args(argv)  # a flag that is given wins
    taken = [f"--{name.replace('_', '-')} {getattr(args, name)!r}" for name in run if getattr(args, name) != plain[name]]
    taken += [f"not --reward {lost!r}, a file that is not here: the task's own reward is used"] if lost else []
    args.from_run = ", ".join(taken)
    if args.temperature is None:
        args.temperature = 0.0 if args.samples == 1 else 1.0
    for name in ("samples", "max_new_tokens", "max_prompt_tokens", "limit_images", "rows", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.temperature < 0 or not 0 < args.top_p <= 1:
        raise UserError(f"--temperature {args.temperature} must not be negative, and --top-p {args.top_p} must be in (0, 1]")
    if args.samples > 1 and args.temperature == 0:
        raise UserError(f"--samples {args.samples} at --temperature 0 would be copies of one response; raise the temperature")
    if not 0 < args.gpu_memory_utilization < 1:
        raise UserError(f"--gpu-memory-utilization {args.gpu_memory_utilization}: must be in (0, 1)")
    if Path(args.out).is_file():
        raise UserError(f"--out {args.out} is a file; give a directory")
    return args


def main(args: argparse.Namespace) -> dict:
    ctx = dist_setup()
    out = Path(args.out)
    if ctx.main:
        check_writable(out, f"--out {args.out}")
    if args.from_run:
        print0(f"settings of the run: {args.from_run}")
    args.rollout = resolve_engine(args.rollout, ctx.device)
    reward_fn = load_reward(args.reward)
    examples, skipped = read_flagged(args.data, args, args.limit)
    check_tasks(examples, reward_fn)
    if ctx.main:
        try_reward(reward_fn, examples[0])
    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_p, args.seed)
    paths = {"model": args.model} | ({"baseline": args.baseline} if args.baseline else {})
    # All that can be wrong comes before the first model. The baseline sees the pictures at the run's own pixel limits.
    processors = {name: Processor(locate(path)[0], args.min_pixels, args.max_pixels) for name, path in paths.items()}
    kept, left_out = examples, list(skipped)
    for processor in processors.values():
        kept, dropped, _ = drop_long_prompts(kept, processor, args.max_prompt_tokens, args.limit_images, args.bad_rows)
        left_out += dropped
    for line in left_out:
        print0(f"left out: {line}")
    if not kept:
        raise UserError(f"--data {args.data}: all {len(examples)} prompts exceed --max-prompt-tokens {args.max_prompt_tokens}")
    dtype = default_dtype(ctx.device) if args.dtype == "auto" else getattr(torch, args.dtype)
    results, engines = {}, []
    for name, path in paths.items():
        hf = load_trained(path, dtype)
        if args.rollout == "vllm":
            count, largest = picture_limits(kept, processors[name])
            engine = VLLMEngine(
                locate(path)[0], processors[name], ctx.device, dtype, max_model_len=args.max_prompt_tokens + args.max_new_tokens,
                max_images=count, largest_picture=largest, memory=args.gpu_memory_utilization, max_rows=args.rows,
            )
            engine.load_weights((name, parameter.detach()) for name, parameter in hf.named_parameters())
        else:
            engine = HFEngine(hf, processors[name], ctx.device, args.rows)
        records = evaluate(engine, kept, processors[name], reward_fn, ctx, sampling, args.samples, args.blank_images)
        engine.sleep()
        engines.append(engine if args.rollout == "vllm" else None)  # asleep; an hf engine is dropped: one model in memory at a time
        del engine, hf
        if ctx.main:
            results[name] = {"path": path, "left_out": len(left_out), **summarise(records)}, records
    if not ctx.main:
        return {}
    summary = results["model"][0] | {"data": args.data, "blank_images": args.blank_images, "temperature": args.temperature}
    if args.baseline:
        summary["baseline"] = results["baseline"][0] | compare(results["model"][1], results["baseline"][1])
    blanked = ", pictures blanked" if args.blank_images else ""
    # told before anything is written: a disk that is full by now does not take an evaluation with it
    interval = "({:.3f} to {:.3f}, 95%), ".format(*summary["accuracy_ci95"]) if summary["accuracy_ci95"] else ""
    print(f"accuracy {summary['accuracy']:.3f} {interval}n {summary['n']}, truncated {summary['truncated']:.3f}{blanked}")
    for kind, part in summary["by_answer_type"].items():
        print(f"  {shown(kind):<12} {part['accuracy']:.3f}  n {part['n']}")
    if args.baseline:
        base = summary["baseline"]
        print(f"baseline {base['accuracy']:.3f}: {base['gained']} gained, {base['lost']} lost, McNemar p {base['mcnemar_p']:.2g}")
    records = results["model"][1]
    page = rollout_page(f"{args.model} on {args.data}{blanked}", summary, records, {e.uid: e for e in examples})
    with writing(out, f"--out {args.out}"):
        write_text(out / "eval.json", json.dumps(summary, indent=2) + "\n")
        write_text(out / "report.html", page)
    print(f"wrote {out / 'eval.json'} and {out / 'report.html'}")
    return summary


if __name__ == "__main__":
    run_script(main, parse_args)
