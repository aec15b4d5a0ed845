"""A step's rollouts, to look at: on the terminal, and as OUT/rollouts/step_*.jsonl and .html."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from prepare_data import Example
from report.evaluation import about, sample_record
from utils import Context

SHOWN = 160  # characters of a text on the terminal; of a longer one its beginning and its end


def gather_samples(batch: Any, ctx: Context) -> tuple[list[dict], dict[str, Example]]:
    """On all ranks at once, of a packing.Batch: its records and, by uid, what was asked; empty but on rank 0."""
    examples = ctx.gather_main(list({r.prompt.uid: r.prompt.start for r in batch.rollouts}.values()))
    records = ctx.gather_main(sample_records(batch))
    records = [record | {"index": index} for index, record in enumerate(records)]
    return records, {example.uid: example for example in examples}


def sample_records(batch: Any) -> list[dict]:
    """One plain record per prompt, with its samples; the advantage of a sample is the mean of its tokens'."""
    tokens = batch.tokens
    sums_R = torch.zeros(len(batch.rollouts)).index_add_(0, tokens.rollout, tokens.advantages)
    counts_R = torch.bincount(tokens.rollout, minlength=len(batch.rollouts))
    records: dict[str, dict] = {}
    for r, advantage in zip(batch.rollouts, (sums_R / counts_R.clamp(min=1)).tolist(), strict=True):
        shown = {"n_images": len(r.prompt.start.images)}  # an environment may begin with others
        record = records.setdefault(r.prompt.uid, about(r.prompt.example) | shown | {"samples": []})
        record["samples"].append(sample_record(r, r.rewards) | {"advantage": advantage})
    return list(records.values())


# ----------------------------------------------------------------------------------------------------------------------
# On the terminal


def reward_of(sample: Mapping[str, Any]) -> float:
    """NaN if its reward failed."""
    return sample["rewards"].get("reward", math.nan)


def spread(record: Mapping[str, Any]) -> float:
    """Between the best and the worst reward of a group."""
    rewards = [x for x in map(reward_of, record["samples"]) if not math.isnan(x)]
    return max(rewards) - min(rewards) if rewards else 0.0


def telling(records: Sequence[dict]) -> dict:
    """The first group of the widest spread of rewards: where there is one, it shows what the policy learns from."""
    return max(records, key=spread)


def best_and_worst(samples: Sequence[dict]) -> list[tuple[str, dict]]:
    """Of unequal rewards the first best and the first worst; else the first, and the next that says something else."""
    graded = [s for s in samples if not math.isnan(reward_of(s))]
    if graded and reward_of(max(graded, key=reward_of)) > reward_of(min(graded, key=reward_of)):
        return [("best", max(graded, key=reward_of)), ("worst", min(graded, key=reward_of))]
    other = [s for s in samples if s["text"] != samples[0]["text"]]
    return [("one", samples[0]), *(("other", s) for s in other[:1])]


def shortened(text: str, most: int = SHOWN) -> str:
    """On one line, as Python writes it, so that no character acts on the terminal; of a long text both ends."""
    if len(text) <= most:
        return repr(text)
    first = most * 5 // 8
    last = most - first
    return f"{text[:first]!r} [... {len(text) - most} characters ...] {text[-last:]!r}"


def show(records: Sequence[dict], examples: Mapping[str, Example]) -> list[str]:
    """Lines on a prompt and two of its responses."""
    record = telling(records)
    example = examples[record["uid"]]
    question = " / ".join(message["content"] for message in example.messages if message["role"] == "user")
    truth = shortened(str(record["ground_truth"]), 60)
    lines = [f"  prompt {record['uid']!r}: {shortened(question)}  truth {truth}"]
    for which, s in best_and_worst(record["samples"]):
        messages = s.get("messages", [])
        said = [shortened(message["content"], 80) for message in messages] or [shortened(s["text"])]
        cut = ", cut" if s["finish_reason"] == "length" else ""
        earned = f"reward {reward_of(s):.2f}, advantage {s['advantage']:+.2f}, {s['tokens']} tokens{cut}"
        lines.append(f"    {which:<5} ({earned}): {' -> '.join(said)}")
    return lines
