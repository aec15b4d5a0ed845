"""Where our grader and the published rules of EasyR1 and verl disagree, on the same answers.

    python benchmarks/graders.py                            # the 200 answers of tests/data/graded_answers.jsonl
    python benchmarks/graders.py out/eval/predictions.jsonl # the responses of an evaluation

The 200 answers have labels by hand, so the tables also show which grader is right. 92 are the cases of a survey of
graders, 76 of them with its labels; 108 are composed here, most with truths of Geometry3K. Each line of the file has
the response, the truth, the label, its reason, and the rewards that verl's function (commit b178a3cd) and EasyR1's
(b44b311b) returned with MathRuler 0.1.0; null: it was still running after 25 seconds.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from report.evaluation import named_rewards, summarise, with_interval  # noqa: E402
from tasks._published import add_published_grades  # noqa: E402
from tasks.geometry import geo3k  # noqa: E402

ANSWERS = ROOT / "tests" / "data" / "graded_answers.jsonl"
SURVEY = 92  # the first answers of the file
GRADERS = ("ours", "easyr1", "verl")


class Truth:
    """The part of an example that our reward reads."""

    def __init__(self, ground_truth: str):
        self.ground_truth = ground_truth


def stored_records(rows: Sequence[dict]) -> list[dict]:
    """Return the stored answers as records of an evaluation, graded by all."""
    records = []
    for i, row in enumerate(rows):
        rewards = geo3k(row["response"], Truth(row["truth"]), "stop")
        sample = {"text": row["response"], "finish_reason": "stop", "tokens": 0, "rewards": rewards}
        records.append({"uid": str(i), "task": "geo3k", "ground_truth": row["truth"], "samples": [sample]})
    for grader in GRADERS[1:]:
        add_published_grades(grader, records)
    return records


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def verdicts(record: dict) -> dict[str, float]:
    """Return the accuracy of a record's first response by each grader."""
    rewards = record["samples"][0]["rewards"]
    return {grader: rewards["accuracy" if grader == "ours" else f"{grader}_accuracy"] for grader in GRADERS}


def agreement(rows: Sequence[dict], records: Sequence[dict], grader: str) -> tuple[int, int, int]:
    """Return how many answers a grader judges like the label, accepts though they are wrong, and rejects though they
    are right."""
    gaps = [verdicts(record)[grader] - row["right"] for row, record in zip(rows, records, strict=True)]
    return gaps.count(0), gaps.count(1), gaps.count(-1)


def print_stored(step: int = 1) -> None:
    """Print the tables for the stored answers, or for every `step`-th of each part."""
    rows = read_lines(ANSWERS)
    rows = rows[:SURVEY:step] + rows[SURVEY::step]
    records = stored_records(rows)
    n = -(-SURVEY // step)
    parts = {"all": slice(None), "survey": slice(n), "composed": slice(n, None)}
    print("| answers | grader | accuracy | judged like the label | wrong but accepted | right but rejected |")
    print("|---|---|--:|--:|--:|--:|")
    for part, chosen in parts.items():
        for grader in GRADERS:
            judged = [verdicts(record)[grader] for record in records[chosen]]
            counts = " | ".join(map(str, agreement(rows[chosen], records[chosen], grader)))
            print(f"| {part} ({len(judged)}) | {grader} | {sum(judged) / len(judged):.3f} | {counts} |")
        print(f"| {part} | label | {sum(row['right'] for row in rows[chosen]) / len(judged):.3f} | | | |")
    print("\nlabel ours easyr1 verl  truth | response | reason")
    for row, record in zip(rows, records, strict=True):
        given = [row["right"], *map(int, verdicts(record).values())]
        if len(set(given)) > 1:
            print(*given, f"{row['truth']} | {row['response']!r} | {row['why']}")


def print_predictions(path: Path) -> None:
    records = read_lines(path)
    for grader in GRADERS[1:]:
        uids = add_published_grades(grader, records)
        print(f"{grader} alone accepts {uids['accepts']}; ours alone accepts {uids['rejects']}")
    print(f"accuracy {with_interval(summarise(records, 'accuracy'), 'accuracy')}")
    for name, result in named_rewards(records, "accuracy").items():
        print(f"{name} {with_interval(result, 'mean')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictions", nargs="?", type=Path, help="predictions.jsonl of an evaluation")
    parser.add_argument("--short", action="store_true", help="only check that it runs: every tenth answer")
    args = parser.parse_args()
    if args.predictions and not args.predictions.is_file():
        parser.error(f"{args.predictions}: no such file; pass the predictions.jsonl of an evaluation")
    print_predictions(args.predictions) if args.predictions else print_stored(10 if args.short else 1)
