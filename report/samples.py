"""Samples of a training step, for the terminal and for OUT/rollouts/step_*.jsonl and .html."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from prepare_data import Example
from report.evaluation import example_fields, make_sample_record
from report.records import record_rewards
from utils import DistContext

MAX_SHOWN_CHARS = 160  # characters of a text on the terminal; of longer texts both ends are printed


def gather_samples(batch: Any, ctx: DistContext) -> tuple[list[dict], dict[str, Example]]:
    """Gather from all ranks the records of a packing.TrainBatch, and by uid the examples as the model saw them. Ranks
    other than 0 get empty ones. A collective."""
    examples = ctx.gather_to_main(list({r.prompt.uid: r.prompt.initial_example for r in batch.rollouts}.values()))
    records = ctx.gather_to_main(sample_records(batch))
    records = [record | {"index": index} for index, record in enumerate(records)]
    return records, {example.uid: example for example in examples}


def sample_records(batch: Any) -> list[dict]:
    """Return one record per prompt with its samples. The advantage of a sample is the mean advantage of its tokens."""
    tokens = batch.tokens
    sums_R = torch.zeros(len(batch.rollouts)).index_add_(0, tokens.rollout, tokens.advantages)
    counts_R = torch.bincount(tokens.rollout, minlength=len(batch.rollouts))
    records: dict[str, dict] = {}
    for r, advantage in zip(batch.rollouts, (sums_R / counts_R.clamp(min=1)).tolist(), strict=True):
        initial = r.prompt.initial_example  # an environment may start with other images
        n_images = {"n_images": len(initial.images) + len(initial.videos)}
        record = records.setdefault(r.prompt.uid, example_fields(r.prompt.example) | n_images | {"samples": []})
        record["samples"].append(make_sample_record(r, r.rewards) | {"advantage": advantage})
    return list(records.values())


# ----------------------------------------------------------------------------------------------------------------------
# On the terminal


def most_varied_group(records: Sequence[dict]) -> dict:
    """Return the record with the widest range of rewards, the first of equal ones: it shows best what the policy learns
    from."""

    def reward_range(record: dict) -> float:
        rewards = record_rewards(record)
        return max(rewards) - min(rewards) if rewards else 0.0

    return max(records, key=reward_range)


def shorten(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    """Return a text as a Python literal, on one line and without control characters. Of a long text return both
    ends."""
    if len(text) <= limit:
        return repr(text)
    first = limit * 5 // 8
    return f"{text[:first]!r} [... {len(text) - limit} characters ...] {text[first - limit :]!r}"


def format_sample_lines(records: Sequence[dict], examples: Mapping[str, Example]) -> list[str]:
    """Return lines that show the prompt with the most unequal rewards, and its best and worst graded response."""
    record = most_varied_group(records)
    question = " / ".join(m["content"] for m in examples[record["uid"]].messages if m["role"] == "user")
    lines = [
        f"  prompt {record['uid']!r}: {shorten(question)}  ground truth {shorten(str(record['ground_truth']), 60)}"
    ]
    graded = [s for s in record["samples"] if "reward" in s["rewards"]]
    best, *others = sorted(graded, key=lambda s: s["rewards"]["reward"], reverse=True) or record["samples"]
    for label, s in (("best", best), *(("worst", s) for s in others[-1:])):
        texts = [shorten(message["content"], 80) for message in s.get("messages", ())] or [shorten(s["text"])]
        truncated = ", truncated" if s["finish_reason"] == "length" else ""
        reward = f"reward {s['rewards']['reward']:.2f}, advantage {s['advantage']:+.2f}" if graded else "reward failed"
        facts = f"{reward}, {s['tokens']} tokens{truncated}"
        lines.append(f"    {label:<5} ({facts}): {' -> '.join(texts)}")
    return lines
