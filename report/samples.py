"""A step's rollouts, to look at: on the terminal, and as OUT/rollouts/step_*.jsonl and .html."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from prepare_data import Example
from report.log import write_text
from report.page import episode_record, rollout_page
from utils import Context


def report_samples(out: Path, step: int, batch: Any, metrics: dict[str, float], ctx: Context) -> None:
    """Of a packing.Batch, on all ranks at once."""
    examples = ctx.gather_main(list({r.prompt.uid: r.prompt.start for r in batch.rollouts}.values()))
    records = ctx.gather_main(sample_records(batch))
    if not ctx.main:
        return
    by_uid = {example.uid: example for example in examples}
    show(records[0], by_uid[records[0]["uid"]])
    stem = out / "rollouts" / f"step_{step:06d}"
    write_text(stem.with_suffix(".jsonl"), "".join(json.dumps(without_images(record)) + "\n" for record in records))
    write_text(stem.with_suffix(".html"), rollout_page(f"Rollouts of step {step}", metrics, records, by_uid))


def without_images(record: dict) -> dict:
    """Of episodes: the page has them."""
    samples = [{name: value for name, value in s.items() if name != "images"} for s in record["samples"]]
    return record | {"samples": samples}


def sample_records(batch: Any) -> list[dict]:
    """One plain record per prompt, with its samples; the advantage of a sample is the mean of its tokens'."""
    tokens = batch.tokens
    sums_R = torch.zeros(len(batch.rollouts)).index_add_(0, tokens.rollout, tokens.advantages)
    counts_R = torch.bincount(tokens.rollout, minlength=len(batch.rollouts))
    records: dict[str, dict] = {}
    for r, advantage in zip(batch.rollouts, (sums_R / counts_R.clamp(min=1)).tolist(), strict=True):
        new = {"uid": r.prompt.uid, "ground_truth": r.prompt.example.ground_truth, "samples": []}
        told = {"text": r.text, "finish_reason": r.finish_reason, "tokens": sum(r.response_mask), "rewards": r.rewards}
        told |= episode_record(r)
        records.setdefault(r.prompt.uid, new)["samples"].append(told | {"advantage": advantage})
    return list(records.values())


def show(record: dict, example: Example) -> None:
    """One prompt and its first two responses, on the terminal."""
    question = " / ".join(message["content"] for message in example.messages if message["role"] == "user")
    tqdm.write(f"  prompt {example.uid!r}: {question[:160]!r}  truth {example.ground_truth!r}")
    for s in record["samples"][:2]:
        earned = s["rewards"].get("reward", math.nan)
        said = [f"{message['content'][:80]!r}" for message in s.get("messages", [])] or [f"{s['text'][:120]!r}"]
        tqdm.write(f"    {' -> '.join(said)}  reward {earned:.2f}  advantage {s['advantage']:+.2f}")
