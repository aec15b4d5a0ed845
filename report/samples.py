"""A step's rollouts, to look at: on the terminal, and as OUT/rollouts/step_*.jsonl and .html."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from prepare_data import Example
from report.evaluation import example_fields, make_sample_record
from report.records import record_rewards
from utils import DistContext

MAX_SHOWN_CHARS = 160  # characters of a text on the terminal; of a longer one its beginning and its end


def gather_samples(batch: Any, ctx: DistContext) -> tuple[list[dict], dict[str, Example]]:
    """On all ranks at once, of a packing.Batch: its records and, by uid, what was asked; empty but on rank 0."""
    examples = ctx.gather_to_main(list({r.prompt.uid: r.prompt.initial_example for r in batch.rollouts}.values()))
    records = ctx.gather_to_main(sample_records(batch))
    records = [record | {"index": index} for index, record in enumerate(records)]
    return records, {example.uid: example for example in examples}


def sample_records(batch: Any) -> list[dict]:
    """One plain record per prompt, with its samples; the advantage of a sample is the mean of its tokens'."""
    tokens = batch.tokens
    sums_R = torch.zeros(len(batch.rollouts)).index_add_(0, tokens.rollout, tokens.advantages)
    counts_R = torch.bincount(tokens.rollout, minlength=len(batch.rollouts))
    records: dict[str, dict] = {}
    for r, advantage in zip(batch.rollouts, (sums_R / counts_R.clamp(min=1)).tolist(), strict=True):
        shown = {"n_images": len(r.prompt.initial_example.images)}  # an environment may begin with others
        record = records.setdefault(r.prompt.uid, example_fields(r.prompt.example) | shown | {"samples": []})
        record["samples"].append(make_sample_record(r, r.rewards) | {"advantage": advantage})
    return list(records.values())


# ----------------------------------------------------------------------------------------------------------------------
# On the terminal


def sample_reward(sample: Mapping[str, Any]) -> float:
    """Return the reward of a sample; if it failed, what sorts below all others."""
    return sample["rewards"].get("reward", -math.inf)


def most_varied_group(records: Sequence[dict]) -> dict:
    """Return the first group of the widest range of rewards: where there is one, it shows what the policy learns
    from."""

    def reward_range(record: dict) -> float:
        rewards = record_rewards(record)
        return max(rewards) - min(rewards) if rewards else 0.0

    return max(records, key=reward_range)


def shorten(text: str, most: int = MAX_SHOWN_CHARS) -> str:
    """Return a text on one line, as Python writes it, so that no character acts on the terminal; of a long one both
    ends."""
    if len(text) <= most:
        return repr(text)
    first = most * 5 // 8
    return f"{text[:first]!r} [... {len(text) - most} characters ...] {text[first - most :]!r}"


def format_sample_lines(records: Sequence[dict], examples: Mapping[str, Example]) -> list[str]:
    """Return lines on a prompt with its best and its worst response."""
    record = most_varied_group(records)
    question = " / ".join(m["content"] for m in examples[record["uid"]].messages if m["role"] == "user")
    lines = [f"  prompt {record['uid']!r}: {shorten(question)}  truth {shorten(str(record['ground_truth']), 60)}"]
    best, *others = sorted(record["samples"], key=sample_reward, reverse=True)
    for which, s in (("best", best), *(("worst", s) for s in others[-1:])):
        said = [shorten(message["content"], 80) for message in s.get("messages", ())] or [shorten(s["text"])]
        cut = ", cut" if s["finish_reason"] == "length" else ""
        earned = f"reward {sample_reward(s):.2f}, advantage {s['advantage']:+.2f}, {s['tokens']} tokens{cut}"
        lines.append(f"    {which:<5} ({earned}): {' -> '.join(said)}")
    return lines
