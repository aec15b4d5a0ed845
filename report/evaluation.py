"""The summary of an evaluation's records: metrics with confidence intervals, overall and by column value,
comparisons with baselines, and visual reliance."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from PIL import Image

from errors import printable
from prepare_data import Example
from report.ablation import FRAMES
from report.records import encode_image, film_strip, filter_columns, video_name
from report.statistics import (
    bootstrap,
    confidence_interval,
    majority_vote_score,
    mcnemar_p_value,
    normalize_answer,
    pass_at_k,
    score_bounds,
)
from report.summary import ABLATIONS, SEEN, TAKEN_AWAY
from reward import extract_boxed, task_name
from rollout import Rollout

FAILED_NOTE = "failed rewards, counted as 0: {n}"


def make_record(
    index: int, example: Example, graded: Sequence[tuple[Rollout, dict[str, float]]], group_by: Sequence[str]
) -> dict:
    """Return an example with its responses and their rewards as a record (see report/records.py)."""
    groups = {name: column_as_text(example, name) for name in group_by}
    samples = [make_sample_record(r, rewards) for r, rewards in graded]
    return {"index": index} | example_fields(example) | {"groups": groups, "samples": samples}


def example_fields(example: Example) -> dict:
    """Return the fields of a record that describe its example."""
    return {
        "uid": example.uid,
        "answer_type": example_answer_type(example),
        "task": task_name(example.data_source),
        "source": example.data_source,
        "n_images": len(example.images) + len(example.videos),
        "n_videos": len(example.videos),
        "ground_truth": example.ground_truth,
    }


def make_sample_record(r: Rollout, rewards: dict[str, float]) -> dict:
    """Return a response or an episode, with its rewards, as a sample of a record."""
    sample = {"text": r.text, "finish_reason": r.finish_reason, "tokens": sum(r.response_mask), "rewards": rewards}
    if r.is_episode:
        shown = (film_strip(image.frames, Image.fromarray) if image.fps else image.image for image in r.images)
        images = list(map(encode_image, shown))
        videos = {i: video_name(image.patcher.n_frames, image.fps) for i, image in enumerate(r.images) if image.fps}
        sample |= {"turns": r.n_turns, "ended_by": r.ended_by, "messages": r.messages, "images": images}
        sample |= {"videos": videos} if videos else {}  # by their index among the images
    return sample


def example_answer_type(example: Example) -> str:
    """Return the example's answer_type, or "all" if it has none."""
    return column_as_text(example, "answer_type", "all")


def column_as_text(example: Example, column: str, missing: str = "none") -> str:
    """Return the value of a column as text, or `missing` if there is none. Types may be numbers in the data."""
    value = example.extra.get(column)
    return missing if value is None or value == "" else str(value)


def record_metric(records: Sequence[dict]) -> str:
    """Return the name of the reward by which examples are compared: "accuracy", or "reward", the total, if a sample has
    no accuracy."""
    samples = chain.from_iterable(record["samples"] for record in records)
    return "accuracy" if all("accuracy" in s["rewards"] for s in samples if s["finish_reason"] != "error") else "reward"


def sample_scores(record: dict, metric: str) -> list[float]:
    """Return the metric of each sample; it is 0 if the reward failed."""
    return [s["rewards"].get(metric, 0.0) for s in record["samples"]]


def example_scores(records: Sequence[dict], metric: str) -> list[float]:
    """Return one score per example: the mean over its samples."""
    return [fmean(sample_scores(record, metric)) for record in records]


def voted_answer(sample: dict) -> str | None:
    """Return the answer that a response votes for: the content of its last \\boxed{}, or else its text after a <think>
    block. Return None if it failed, is empty, or ends inside the block."""
    if sample["finish_reason"] == "error":
        return None
    boxed, text = extract_boxed(sample["text"]), sample["text"].rpartition("</think>")[2].partition("<think>")[0]
    return normalize_answer(text if boxed is None else boxed) or None


def summarise(records: Sequence[dict], metric: str | None = None) -> dict:
    """Return the metric (its mean over samples, then over examples) and all named rewards with their intervals, pass@k
    and majority@k if there are several samples, and the metric by column value."""
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
        summary["ended_by"] = {reason: n / len(samples) for reason, n in ends.most_common()}
    return summary | metrics_by_column(records, metric)


def named_rewards(records: Sequence[dict], metric: str) -> dict[str, dict]:
    """Return the mean of each named reward except the metric, over the n examples that have it. If there are several
    tasks, the names are TASK/NAME."""
    several_tasks = len({record["task"] for record in records}) > 1
    scores = defaultdict(list)
    for record in records:
        values = defaultdict(list)
        for name, value in chain.from_iterable(s["rewards"].items() for s in record["samples"]):
            values[f"{record['task']}/{name}" if several_tasks else name].append(value)
        for name, sample_values in values.items():
            scores[name].append(fmean(sample_values))
    scores.pop(metric, None)
    return {name: summarise_scores(values, "mean") for name, values in sorted(scores.items())}


def multi_sample_metrics(records: Sequence[dict], metric: str) -> dict[str, float]:
    """Return avg@K of K samples, pass@k for each k (the probability that at least one of k samples is right) and
    majority@K (the score of a majority vote); nothing if there is one sample."""
    k_max = len(records[0]["samples"])
    if k_max == 1:
        return {}
    metrics = {f"avg@{k_max}": fmean(example_scores(records, metric))}
    scores = [sample_scores(record, metric) for record in records]
    if metric != "accuracy" or not set(chain.from_iterable(scores)) <= {0, 1}:  # some answers are partly right
        return metrics
    n_right = [sum(score == 1 for score in example) for example in scores]
    for k in range(1, k_max + 1):
        metrics[f"pass@{k}"] = fmean(pass_at_k(k_max, n, k) for n in n_right)
    votes = [list(map(voted_answer, record["samples"])) for record in records]
    voted = [majority_vote_score(answers, example) for answers, example in zip(votes, scores, strict=True)]
    return metrics | {f"majority@{k_max}": fmean(voted)}


def metrics_by_column(records: Sequence[dict], metric: str) -> dict[str, dict]:
    """Return the metric by column value: `by_answer_type`, `by_*` for each column of --group-by and for all others in
    which the records differ. If there are several tasks, add `task_mean`, the mean over tasks of equal weight."""
    always_shown = {"answer_type", *records[0]["groups"]}
    tables = {}
    for column, values in filter_columns(records).items():
        if column not in always_shown and len(set(values)) == 1:
            continue
        by_value = defaultdict(list)
        for value, record in zip(values, records, strict=True):
            by_value[value].append(record)
        tables[f"by_{column}"] = {
            value: summarise_group(subset, metric) for value, subset in sorted(by_value.items(), key=numeric_sort_key)
        }
        if column == "task":
            scores = [example_scores(subset, metric) for subset in by_value.values()]
            ci95 = bootstrap(*scores, ends=score_bounds(example_scores(records, metric)))
            tables["task_mean"] = {metric: fmean(map(fmean, scores)), f"{metric}_ci95": ci95, "n_tasks": len(by_value)}
    return tables


def numeric_sort_key(item: tuple[str, Any]) -> tuple[bool, float, str]:
    """Return a sort key that orders numbers by value and puts them before other texts."""
    try:
        return False, float(item[0]), item[0]
    except ValueError:
        return True, 0.0, item[0]


def summarise_group(records: Sequence[dict], metric: str) -> dict:
    """Return n, the mean of the metric over the examples, and its interval."""
    return summarise_scores(example_scores(records, metric), metric)


def summarise_scores(scores: Sequence[float], name: str) -> dict:
    """Return n, the mean of the scores under the key `name`, and its interval."""
    return {"n": len(scores), name: fmean(scores), f"{name}_ci95": confidence_interval(scores)}


def compare_with_baseline(records: Sequence[dict], baseline: Sequence[dict], metric: str) -> dict:
    """Compare with another model on the same examples. Return the difference of the metric with its interval (bootstrap
    over examples), the examples gained and lost, and the p value of an exact test on these two counts."""
    assert [r["uid"] for r in records] == [r["uid"] for r in baseline], "a paired comparison needs the same examples"
    scores, baseline_scores = example_scores(records, metric), example_scores(baseline, metric)
    gaps = {r["uid"]: a - b for r, a, b in zip(records, scores, baseline_scores, strict=True)}
    ends = (-1.0, 1.0) if score_bounds(scores + baseline_scores) else ()
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
    """Measure how much of the metric depends on the images: compare with the same questions under each ablation. Only
    examples with images or videos count, and for ablations of frames only those with videos."""
    records = with_images(records)
    table: dict[str, Any] = {"own": summarise_group(records, metric)}
    if FRAMES.keys() & ablated and len(videos := with_images(records, "n_videos")) < len(records):
        table["own_videos"] = summarise_group(videos, metric)
    sentences = []
    for ablation, ablated_records in ablated.items():
        counted = "n_videos" if ablation in FRAMES else "n_images"
        same, ablated_records = with_images(records, counted), with_images(ablated_records, counted)
        comparison = compare_with_baseline(same, ablated_records, metric)
        table[ablation] = summarise_group(ablated_records, metric) | {
            "drop": comparison["difference"],
            "drop_ci95": comparison["difference_ci95"],
        }
        sentences.append(reliance_sentence(metric, ablation, table[ablation], chance_level(same, metric)))
    own, chance = table["own"], chance_level(records, metric)
    table["constant"] = chance
    if chance is not None and own["accuracy_ci95"][0] <= chance:
        sentences = [f"The accuracy, {own['accuracy']:.3f}, is not significantly above chance, {chance:.3f}, so "
                     "nothing can be said yet about the use of images and videos."]
    return table | {"said": " ".join(sentences)}


def with_images(records: Sequence[dict], counted: str = "n_images") -> list[dict]:
    """Return the records in which the model saw an image, of the example or of its environment; with "n_videos", those
    of examples with a video."""
    return [r for r in records if r[counted] or any(sample.get("images") for sample in r["samples"])]


def chance_level(records: Sequence[dict], metric: str) -> float | None:
    """Return the accuracy of always giving the most frequent answer of each answer type, which needs neither the image
    nor more of the question than the type of its answer; None for another metric."""
    if metric != "accuracy":
        return None
    truths = defaultdict(Counter)
    for record in records:
        truths[record["task"], record["answer_type"]][record["ground_truth"]] += 1
    return sum(count.most_common(1)[0][1] for count in truths.values()) / len(records)


def reliance_sentence(metric: str, ablation: str, result: Mapping[str, Any], chance: float | None) -> str:
    """Return a sentence: what the result of an ablation shows about the model's use of the images."""
    if ablation == "reversed_answer":  # another question: accuracy should not drop
        return f"Of the reversed videos {result[metric]:.3f} get the answer that is right for them."
    taken_away = TAKEN_AWAY.get(ablation, "the image")
    if result["drop_ci95"][0] <= 0:
        return (
            f"With {ABLATIONS[ablation]} the {metric} is {result[metric]:.3f}, not significantly lower: no evidence "
            f"that the model uses {taken_away}."
        )
    own = result[metric] + result["drop"]
    drop = f"With {ABLATIONS[ablation]} the {metric} drops from {own:.3f} to {result[metric]:.3f}"
    if chance is None:
        return f"{drop}: this much depends on {taken_away}."
    if result["accuracy_ci95"][0] <= chance:
        return f"{drop}, down to the level of chance ({chance:.3f}): the model uses {taken_away}."
    return f"{drop}, still above chance ({chance:.3f}): some questions can be answered without {taken_away}."


# ----------------------------------------------------------------------------------------------------------------------
# The summary on the terminal; escape codes in data are made harmless


def with_interval(result: Mapping[str, Any], name: str, form: str = ".3f") -> str:
    """Return a mean with its interval as text."""
    low, high = result[f"{name}_ci95"]
    return f"{result[name]:{form}} ({low:{form}} to {high:{form}})"


def format_summary(summary: Mapping[str, Any]) -> list[str]:
    """Return a summary for the terminal, in parts: the overall result, then a line for each group and comparison. Lines
    have at most about 100 columns, unless names are long."""
    metric = summary["metric"]
    lines = [f"{metric} {with_interval(summary, metric)}, 95% interval, n {summary['n']}, truncated "
             f"{summary['truncated']:.3f}"]
    if summary["failed"]:
        lines[0] += f"\n  {FAILED_NOTE.format(n=summary['failed'])}"  # training prints this entry alone
    printed_passes = {f"pass@{2**i}" for i in range(20)}
    if several := [name for name in summary if name in printed_passes or name.startswith(("avg@", "majority@"))]:
        lines.append("  " + "  ".join(f"{name} {summary[name]:.3f}" for name in several))
    tables = {"rewards": "mean"} | {name: metric for name in summary if name.startswith("by_")}
    for column, name in tables.items():
        if column == "by_answer_type" and len(summary[column]) == 1:  # it would repeat the first line
            continue
        lines += [f"{printable(column).replace('_', ' ', 1)}:"] if summary[column] else []
        width = max(map(len, map(printable, summary[column])), default=0)
        for value, result in summary[column].items():
            lines.append(f"  {printable(value):<{width}}  {with_interval(result, name)}  n {result['n']}")
    if "task_mean" in summary:
        lines.append(f"mean of {summary['task_mean']['n_tasks']} tasks: {with_interval(summary['task_mean'], metric)}")
    for name, uids in summary.get("graders_differ", {}).items():
        accepted, rejected = map(len, uids.values())
        lines.append(f"{name} accepts a response that ours rejects in {accepted} examples, and rejects one that ours "
                     f"accepts in {rejected}")
    for base in summary.get("baselines", ()):
        lines.append(f"baseline {printable(base['path'])}: {with_interval(base, metric)}")
        test = "McNemar" if summary["samples"] == 1 else "sign test"
        changes = f"{base['gained']} gained, {base['lost']} lost, {test} p {base['mcnemar_p']:.2g}"
        lines.append(f"  difference {with_interval(base, 'difference', '+.3f')}; {changes}")
    if table := summary.get("reliance"):
        lines.append("visual reliance:")
        width = max(32, *(len(SEEN[name]) for name in SEEN.keys() & table.keys()))
        for name, images in SEEN.items():
            if result := table.get(name):
                drop = f"  drop {with_interval(result, 'drop')}" if "drop" in result else ""
                lines.append(f"  {images:<{width}}  {with_interval(result, metric)}{drop}")
        if table["constant"] is not None:
            lines.append(f"  {'chance: the most frequent answer':<{width}}  {table['constant']:.3f}")
        lines += [f"  {sentence}" for sentence in table["said"].replace(". ", ".\n").splitlines()]
    return lines
