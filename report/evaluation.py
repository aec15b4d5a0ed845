"""The summary of an evaluation's records: with intervals, by type, against baselines, without images."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from errors import printable
from prepare_data import Example
from report.records import encode_image, filter_columns
from report.statistics import (
    bootstrap,
    confidence_interval,
    majority_vote_score,
    mcnemar_p_value,
    normalize_answer,
    pass_at_k,
    score_bounds,
)
from report.summary import ABLATIONS
from reward import extract_boxed, task_name
from rollout import Rollout

FAILED_NOTE = "rewards that failed, counted as 0: {n}"


def make_record(
    index: int, example: Example, graded: Sequence[tuple[Rollout, dict[str, float]]], group_by: Sequence[str]
) -> dict:
    """An example with its responses and their rewards, as JSON has it."""
    groups = {name: column_as_text(example, name) for name in group_by}
    samples = [make_sample_record(r, rewards) for r, rewards in graded]
    return {"index": index} | example_fields(example) | {"groups": groups, "samples": samples}


def example_fields(example: Example) -> dict:
    """What a record says of its example."""
    return {
        "uid": example.uid,
        "answer_type": example_answer_type(example),
        "task": task_name(example.data_source),
        "source": example.data_source,
        "n_images": len(example.images),
        "ground_truth": example.ground_truth,
    }


def make_sample_record(r: Rollout, rewards: dict[str, float]) -> dict:
    """A response, or an episode."""
    sample = {"text": r.text, "finish_reason": r.finish_reason, "tokens": sum(r.response_mask), "rewards": rewards}
    if r.is_episode:
        images = [encode_image(image.image) for image in r.images]
        sample |= {"turns": r.n_turns, "ended_by": r.ended_by, "messages": r.messages, "images": images}
    return sample


def example_answer_type(example: Example) -> str:
    return column_as_text(example, "answer_type", "all")


def column_as_text(example: Example, column: str, missing: str = "none") -> str:
    """Return the value of a column as text: data may name types by numbers, or by both."""
    value = example.extra.get(column)
    return missing if value is None or value == "" else str(value)


def record_metric(records: Sequence[dict]) -> str:
    """Return the reward that examples are compared by: "accuracy", or "reward", the total, if some have none."""
    samples = chain.from_iterable(record["samples"] for record in records)
    return "accuracy" if all("accuracy" in s["rewards"] for s in samples if s["finish_reason"] != "error") else "reward"


def samples_of(record: dict, metric: str) -> list[float]:
    """Return the metric of each sample; of one whose reward failed it is 0."""
    return [s["rewards"].get(metric, 0.0) for s in record["samples"]]


def example_scores(records: Sequence[dict], metric: str) -> list[float]:
    """Return one score per example: the mean over its samples."""
    return [fmean(samples_of(record, metric)) for record in records]


def voted_answer(sample: dict) -> str | None:
    """The answer that a response votes for: what is in its last box, or all of it after a <think> block."""
    if sample["finish_reason"] == "error":
        return None
    boxed = extract_boxed(sample["text"])
    return normalize_answer(sample["text"].rpartition("</think>")[2] if boxed is None else boxed) or None


def summarise(records: Sequence[dict], metric: str | None = None) -> dict:
    """Return the metric (its mean over samples, then over examples) and all named rewards with their intervals; of
    several samples also pass@k and majority; the metric of each group of examples."""
    metric = metric or record_metric(records)
    samples = list(chain.from_iterable(record["samples"] for record in records))
    summary = {
        "samples": len(records[0]["samples"]),
        "metric": metric,
        "reward": fmean(s["rewards"]["reward"] for s in samples),
        **summarise_group(records, metric),
        **multi_sample_metrics(records, metric),
        "rewards": named_rewards(records, metric),
        "truncated": fmean(s["finish_reason"] == "length" for s in samples),
        "failed": sum(s["finish_reason"] == "error" for s in samples),
        "response_tokens": fmean(s["tokens"] for s in samples),
    }
    if "messages" in samples[0]:
        summary["turns"] = fmean(s["turns"] for s in samples)
        ends = Counter(s["ended_by"] for s in samples)
        summary["ended_by"] = {why: n / len(samples) for why, n in ends.most_common()}
    return summary | by_group(records, metric)


def named_rewards(records: Sequence[dict], metric: str) -> dict[str, dict]:
    """Return the mean of each named reward except the metric, over the n examples that have it. With several tasks the
    names are TASK/NAME."""
    several = len({record["task"] for record in records}) > 1
    scores = defaultdict(list)
    for record in records:
        values = defaultdict(list)
        for name, value in chain.from_iterable(s["rewards"].items() for s in record["samples"]):
            values[f"{record['task']}/{name}" if several else name].append(value)
        for name, found in values.items():
            scores[name].append(fmean(found))
    scores.pop(metric, None)
    return {name: described(values, "mean") for name, values in sorted(scores.items())}


def multi_sample_metrics(records: Sequence[dict], metric: str) -> dict[str, float]:
    """Of K samples: their mean, the chance that one of k is right, for each k, and what a vote of all says."""
    k_max = len(records[0]["samples"])
    if k_max == 1:
        return {}
    told = {f"avg@{k_max}": fmean(example_scores(records, metric))}
    of_samples = [samples_of(record, metric) for record in records]
    if metric != "accuracy" or not set(chain.from_iterable(of_samples)) <= {0, 1}:  # some answers are right in part
        return told
    right = [sum(score == 1 for score in scores) for scores in of_samples]
    for k in range(1, k_max + 1):
        told[f"pass@{k}"] = fmean(pass_at_k(k_max, n, k) for n in right)
    votes = [list(map(voted_answer, record["samples"])) for record in records]
    voted = [majority_vote_score(answers, scores) for answers, scores in zip(votes, of_samples, strict=True)]
    return told | {f"majority@{k_max}": fmean(voted)}


def by_group(records: Sequence[dict], metric: str) -> dict[str, dict]:
    """Return `by_answer_type`, and `by_*` of all else in which the records differ or that was asked for; over several
    tasks the mean of their figures, whatever their sizes."""
    asked = {"answer_type", *records[0]["groups"]}
    found = {}
    for column, values in filter_columns(records).items():
        if column not in asked and len(set(values)) == 1:
            continue
        members = defaultdict(list)
        for value, record in zip(values, records, strict=True):
            members[value].append(record)
        found[f"by_{column}"] = {
            value: summarise_group(of, metric) for value, of in sorted(members.items(), key=numeric_sort_key)
        }
        if column == "task":
            scores = [example_scores(of, metric) for of in members.values()]
            ci95 = bootstrap(*scores, ends=score_bounds(example_scores(records, metric)))
            found["task_mean"] = {metric: fmean(map(fmean, scores)), f"{metric}_ci95": ci95, "n_tasks": len(members)}
    return found


def numeric_sort_key(item: tuple[str, Any]) -> tuple[bool, float, str]:
    """Numbers by value, before texts."""
    try:
        return False, float(item[0]), item[0]
    except ValueError:
        return True, 0.0, item[0]


def summarise_group(records: Sequence[dict], metric: str) -> dict:
    return described(example_scores(records, metric), metric)


def described(scores: Sequence[float], name: str) -> dict:
    """Return n, the mean of the scores as `name`, and its interval."""
    return {"n": len(scores), name: fmean(scores), f"{name}_ci95": confidence_interval(scores)}


def compare_with_baseline(records: Sequence[dict], baseline: Sequence[dict], metric: str) -> dict:
    """Compare with another model on the same examples. Return the difference of the metric with its interval (bootstrap
    over examples), the examples gained and lost, and an exact test of whether these may be chance."""
    assert [r["uid"] for r in records] == [r["uid"] for r in baseline], "a paired comparison needs the same examples"
    ours, theirs = example_scores(records, metric), example_scores(baseline, metric)
    gaps = {r["uid"]: a - b for r, a, b in zip(records, ours, theirs, strict=True)}
    ends = (-1.0, 1.0) if score_bounds(ours + theirs) else ()
    gained = [uid for uid, gap in gaps.items() if gap > 0]
    lost = [uid for uid, gap in gaps.items() if gap < 0]
    return {
        "difference": fmean(gaps.values()),
        "difference_ci95": bootstrap(list(gaps.values()), ends=ends),
        "gained": len(gained),
        "lost": len(lost),
        "mcnemar_p": mcnemar_p_value(len(gained), len(lost)),
        "gained_uids": gained,
        "lost_uids": lost,
    }


# ----------------------------------------------------------------------------------------------------------------------
# Visual reliance


def visual_reliance(records: Sequence[dict], ablated: Mapping[str, Sequence[dict]], metric: str) -> dict:
    """Measure how much of the metric comes from seeing: the same questions with other images, or without."""
    table: dict[str, Any] = {}
    for kind, others in ablated.items():
        found = compare_with_baseline(records, others, metric)
        table[kind] = summarise_group(others, metric) | {
            "drop": found["difference"],
            "drop_ci95": found["difference_ci95"],
        }
    table["constant"] = most_frequent_answer_accuracy(records) if metric == "accuracy" else None
    said = [reliance_sentence(metric, kind, table[kind], table["constant"]) for kind in ablated]
    return table | {"said": " ".join(said)}


def most_frequent_answer_accuracy(records: Sequence[dict]) -> float:
    """How often it would be right to give always the most frequent answer of each type: without looking, and without
    reading more than what kind of answer is wanted. What is called chance."""
    truths = defaultdict(Counter)
    for record in records:
        truths[record["task"], record["answer_type"]][record["ground_truth"]] += 1
    return sum(count.most_common(1)[0][1] for count in truths.values()) / len(records)


def reliance_sentence(metric: str, kind: str, found: Mapping[str, Any], guess: float | None) -> str:
    """A sentence."""
    if found["drop_ci95"][0] <= 0:
        return f"With {ABLATIONS[kind]} there is no certain fall of the {metric}: no sign that it looks."
    told = f"With {ABLATIONS[kind]} the {metric} falls by {found['drop']:.3f}"
    if guess is None:
        return f"{told}: so much comes from seeing."
    if found["accuracy_ci95"][0] <= guess:
        return f"{told}, to what may be chance: it answers by looking."
    return f"{told}, but not to chance: some questions it answers without looking."


# ----------------------------------------------------------------------------------------------------------------------
# On the terminal, on which escape codes from data would act


def with_interval(found: Mapping[str, Any], name: str, form: str = ".3f") -> str:
    low, high = found[f"{name}_ci95"]
    return f"{found[name]:{form}} ({low:{form}} to {high:{form}})"


def format_summary(summary: Mapping[str, Any]) -> list[str]:
    """The summary, in at most 100 columns where names are not long."""
    metric = summary["metric"]
    lines = [f"{metric} {with_interval(summary, metric)}, 95% interval, n {summary['n']}, truncated "
             f"{summary['truncated']:.3f}"]
    if summary["failed"]:
        lines.append(f"  {FAILED_NOTE.format(n=summary['failed'])}")
    few = {f"pass@{2**i}" for i in range(20)}
    if several := [name for name in summary if name in few or name.startswith(("avg@", "majority@"))]:
        lines.append("  " + "  ".join(f"{name} {summary[name]:.3f}" for name in several))
    tables = {"rewards": "mean"} | {name: metric for name in summary if name.startswith("by_")}
    for column, name in tables.items():
        lines += [f"{printable(column).replace('_', ' ', 1)}:"] if summary[column] else []
        width = max(map(len, map(printable, summary[column])), default=0)
        for kind, found in summary[column].items():
            lines.append(f"  {printable(kind):<{width}}  {with_interval(found, name)}  n {found['n']}")
    if "task_mean" in summary:
        lines.append(f"mean of {summary['task_mean']['n_tasks']} tasks: {with_interval(summary['task_mean'], metric)}")
    for base in summary.get("baselines", ()):
        lines.append(f"baseline {printable(base['path'])}: {with_interval(base, metric)}")
        test = "McNemar" if summary["samples"] == 1 else "sign test"
        changes = f"{base['gained']} gained, {base['lost']} lost, {test} p {base['mcnemar_p']:.2g}"
        lines.append(f"  difference {with_interval(base, 'difference', '+.3f')}; {changes}")
    if table := summary.get("reliance"):
        lines.append("visual reliance:")
        lines.append(f"  {'its own images':<32}  {with_interval(summary, metric)}")
        for kind, images in ABLATIONS.items():
            if found := table.get(kind):
                drop = with_interval(found, "drop")
                lines.append(f"  {images:<32}  {with_interval(found, metric)}  drop {drop}")
        if table["constant"] is not None:
            lines.append(f"  {'chance: the most frequent answer':<32}  {table['constant']:.3f}")
        lines += [f"  {sentence}" for sentence in table["said"].replace(". ", ".\n").splitlines()]
    return lines
