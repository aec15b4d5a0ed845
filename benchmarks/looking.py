"""Which algorithms keep a policy looking at the image if a text cue is a shortcut? Eight arms on the toy `shortcut`.

    python benchmarks/looking.py                                # eight arms, five seeds, two runs at a time
    python benchmarks/looking.py --arms grpo papo_k2 --seeds 0  # a part; runs that are done are kept, not repeated
    python benchmarks/looking.py --short                        # only check that it runs, in under a minute
    python benchmarks/looking.py --false-alarms shapes digits --seeds 0 1 2 3 4 5 6 7 8 9   # see below

Further flags are passed to train.py, e.g. `--steps 60`. Each seed has its own data, evaluation questions and warm
start, which all its arms share, with the same steps, prompts per step, group size and learning rate. Every few steps,
train.py answers three sets of questions greedily:

    own        test rows, whose cue is right in 80% of the rows, as in training
    blank      the same rows with white images
    conflict   rows of the split val with a wrong cue: right answers need the image. The primary measure

The cue rate is the share of the conflict rows that are answered as the cue says.

All arms sample the same number of responses; those based on DAPO run without dynamic sampling. The forward passes
before the update, for old log-probabilities and those of a second view of the image, come on top. The table therefore
has the FLOPs of training, by the model of packing.py: three forward passes for an update (a backward pass counts as
two), and one for each of these log-probabilities. Seconds are those of the steps without the evaluations.

For each run the table names two evaluations by their step: the first for which the rule of report/looking.py warns (on
the rows of own and blank), and the first with significantly fewer right conflict answers than before RL (exact
one-sided sign test on the same questions, 5%).

Differences from grpo are paired by question. Intervals and p-values come from a bootstrap that draws seeds, and in each
drawn seed its questions; with five seeds such p-values are somewhat too small. They are adjusted for the number of arms
(Holm 1979). Writes OUT/seedS/ARM.json, one per run, and OUT/looking.md, OUT/looking.png (curves) and
OUT/differences.png.

--false-alarms trains on other tasks instead, whose text gives no answer away, with the settings of their demos and
--eval-ablate blank, and counts warnings. The seeds of a task have one warm start, but training data, evaluation
questions and random numbers of their own. Writes OUT/false_alarms.md.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import learning  # noqa: E402
import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from learning import BLUE, GREY, ORANGE, command, draw_band, holm, new_figure, start_logged, tidy, write  # noqa: E402
from PIL import Image  # noqa: E402

import demo  # noqa: E402
import train  # noqa: E402
from errors import need  # noqa: E402
from prepare_data import DataFormatConfig, read_examples  # noqa: E402
from report.evaluation import chance_level, example_scores  # noqa: E402
from report.looking import FORMAT_READY, error_level, learns_shortcut  # noqa: E402
from report.run_files import read_rows, write_text  # noqa: E402
from report.statistics import binomial_tail  # noqa: E402
from sources.images import encode_png  # noqa: E402
from tasks.shortcut import IMAGE_SIDE  # noqa: E402
from utils import run_script  # noqa: E402

EQUAL = ["--max-gen-batches", "1"]  # presets based on DAPO, without its dynamic sampling
ARMS = {  # flags of train.py
    "grpo": ["--eval-every", "10"],  # more often, to see when the warning comes
    "dapo": ["--algo", "dapo", *EQUAL],
    "entropy": ["--entropy-coef", "-0.03"],
    "noisy": ["--algo", "noisy"],
    "papo_k2": ["--algo", "papo", *EQUAL, "--algo-args", "perception_kl=k2"],
    "papo_k3": ["--algo", "papo", *EQUAL, "--algo-args", "perception_kl=k3"],
    "vppo": ["--algo", "vppo", *EQUAL],
    "random40": ["--algo-args", "token_score=random", "token_share=0.4"],
}
TRAIN = (
    "--steps 80 --eval-every 20 --prompts-per-step 16 --group-size 8 --lr 4e-4 --warmup-steps 5 --schedule cosine "
    "--micro-tokens 2048 --save-every 1000 --reward-workers 0 --train-vision all"
)
SHORT = "--steps 2 --eval-every 1 --prompts-per-step 3 --group-size 2 --warmup-steps 1"
MEASURES = {"own": BLUE, "blank": GREY, "conflict": ORANGE}  # and their colours
DRAWS = 10_000


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="arms to run; grpo is required")
    p.add_argument("--seeds", nargs="+", type=int, default=list(range(5)), help="each has its own data and warm start")
    p.add_argument("--false-alarms", nargs="+", default=[], metavar="TASK", help="count warnings on these tasks")
    p.add_argument("--jobs", type=int, default=2, help="runs in parallel")
    p.add_argument("--out", type=Path, default=ROOT / "out/looking", help="folder to write")
    p.add_argument("--short", action="store_true", help="only check that it runs: one seed, two arms, two steps")
    args, args.flags = p.parse_known_args(argv)
    args.out = args.out.resolve()
    if args.short:
        args.seeds, args.arms, args.flags = args.seeds[:1], ["grpo", "papo_k2"], [*SHORT.split(), *args.flags]
    need("grpo" in args.arms, f"--arms {' '.join(args.arms)}: the others are compared with grpo; add it")
    return args


# ----------------------------------------------------------------------------------------------------------------------
# Data, warm starts and runs


def make_start(folder: Path, seed: int, short: bool) -> None:
    """Create the data of a seed, a random toy model and its warm start, unless they exist."""
    toy, seeded = ("prepare_data.py", "shortcut", "--toy", "--n"), ("--seed", seed)
    n_train, n_test, n_val, warm = (12, 8, 8, ["--see-steps", 1, "--habit-steps", 1]) if short else (2000, 400, 200, [])
    makers = {
        "train.parquet": command(*toy, n_train, "--split", "train", *seeded),
        "test.parquet": command(*toy, n_test, "--split", "test", *seeded),
        "val.parquet": command(*toy, n_val, "--split", "val", *seeded),
        "base": command("demo.py", "model", "--task", "shortcut", *seeded),
        "start": command("demo.py", "warm", "--model", folder / "base", "--task", "shortcut", *seeded, *warm),
    }
    for name, words in makers.items():
        if not (folder / name).exists():
            subprocess.run([*words, "--out", folder / name], cwd=ROOT, check=True)
    write_blank_rows(folder / "test.parquet", folder / "blank.parquet")


def write_blank_rows(file: Path, out: Path) -> None:
    """Write the rows of a file with white images; their uids end in -blank."""
    table = pq.read_table(file)
    white = encode_png(Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "white"))
    rows = table.to_pylist()
    for row in rows:
        row["images"] = [{"bytes": white, "path": None} for _ in row["images"]]
        row["extra_info"]["uid"] += "-blank"
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), out)


def run_arm(folder: Path, arm: str, seed: int, extra: Sequence[str]) -> str:
    """Train an arm and write its result, unless a result with the same flags exists. Return an error, or ""."""
    result, flags = folder / f"{arm}.json", [*TRAIN.split(), *ARMS[arm], *extra]
    if result.exists() and json.loads(result.read_text())["flags"] == flags:
        return ""
    run = folder / arm
    shutil.rmtree(run, ignore_errors=True)
    data = ["--data", folder / "train.parquet"]
    data += ["--eval-data", ",".join(str(folder / f"{name}.parquet") for name in ("test", "blank", "val"))]
    length = demo.max_reply_tokens(folder / "base", "shortcut")
    words = ["--model", folder / "start", "--out", run, *data, "--max-new-tokens", length, "--seed", seed, *flags]
    if start_logged(command("train.py", *words), folder / f"{arm}.log").wait():
        return f"{arm}, seed {seed}: see {folder / arm}.log"
    measured = measure_run(run, folder, train.parse_args(list(map(str, words))).algo)
    write_text(result, json.dumps({"arm": arm, "seed": seed, "flags": flags} | measured) + "\n")
    print(f"seed {seed}, {arm}: done", flush=True)
    return ""


def measure_run(run: Path, folder: Path, algo) -> dict:
    """Return a run's evaluations, the answers of its last one by measure and question, and its compute."""
    extra = {name: {e.uid: e.extra for e in read_examples(str(folder / f"{name}.parquet"), DataFormatConfig())[0]}
             for name in ("test", "val")}  # fmt: skip
    files = {int(file.stem.partition("_")[2]): file for file in sorted((run / "eval").glob("step_*.jsonl"))}
    records = {step: list(map(json.loads, file.read_text().splitlines())) for step, file in files.items()}
    answers = {step: read_answers(rows, extra["test"], extra["val"]) for step, rows in records.items()}
    evaluations = [{"step": step} | {name: fmean(values.values()) for name, values in by_name.items()}
                   for step, by_name in answers.items()]  # fmt: skip
    rows = [row for row in read_rows(run / "metrics.jsonl") if "reward/mean" in row]
    passes = 3 + algo.needs_old_logps + algo.reads("view_logps")
    return {
        "evaluations": evaluations,
        "answers": answers[max(answers)],
        "warned": warning_step(records, list(extra["test"])),
        "fell": falling_step({step: by_name["conflict"] for step, by_name in answers.items()}),
        "flops": passes / 3 * sum(row.get("update/flops", 0.0) for row in rows),
        "seconds": sum(row["time/step"] - row.get("time/eval", 0.0) for row in rows),
    }


def warning_step(records: dict[int, list[dict]], uids: list[str]) -> int | None:
    """Return the step of the first evaluation for which the rule of report/looking.py warns, from the records by step.
    `uids` are the questions of own; those with blank images have -blank after them."""
    start, k = None, 0
    for step, rows in sorted(records.items()):
        by_uid = {row["uid"]: row for row in rows}
        own, blank = [by_uid[uid] for uid in uids], [by_uid[f"{uid}-blank"] for uid in uids]
        now = np.array([example_scores(own, "accuracy"), example_scores(blank, "accuracy")])
        if start is not None:
            k += 1
            if learns_shortcut(start, now, chance_level(own, "accuracy"), error_level(k)):
                return step
        elif fmean(row["samples"][0]["rewards"]["format"] for row in own) >= FORMAT_READY:
            start = now
    return None


def falling_step(conflict: dict[int, dict[str, float]]) -> int | None:
    """Return the first step in which significantly fewer questions are answered right than in the first evaluation."""
    (_, start), *later = sorted(conflict.items())
    for step, now in later:
        lost, gained = (sum(start[uid] == x != now[uid] for uid in now) for x in (1.0, 0.0))
        if lost > gained and binomial_tail(lost, lost + gained, 0.5) < 0.05:
            return step
    return None


def read_answers(records, test: dict[str, dict], val: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Return for each measure whether the questions, by uid, are answered right; for the cue rate, whether they follow
    the cue. `test` and `val` have the columns of both files' rows by uid."""
    answers = {"own": {}, "blank": {}, "conflict": {}, "cue rate": {}}
    for record in records:
        uid, [sample] = record["uid"], record["samples"]
        right = sample["rewards"]["accuracy"]
        if uid in test:
            answers["own"][uid] = right
        elif uid not in val:
            answers["blank"][uid.removesuffix("-blank")] = right
        elif val[uid]["cue"] == "wrong":
            answers["conflict"][uid] = right
            answers["cue rate"][uid] = float(f"\\boxed{{{val[uid]['cue_answer']}}}" in sample["text"])
    return answers


# ----------------------------------------------------------------------------------------------------------------------
# Statistics, table and plot


class Difference(NamedTuple):
    """A mean of paired differences, its 95% confidence interval and its two-sided p-value."""

    mean: float
    low: float
    high: float
    p: float


def bootstrap_seeds(seeds: Sequence[np.ndarray], draws: int = DRAWS) -> Difference:
    """Return the mean over seeds of their mean differences, with a bootstrap over seeds and, in each drawn seed, over
    its questions. `seeds` has the differences by question of each seed."""
    rng = np.random.default_rng(0)
    means = np.zeros(draws)
    for _ in seeds:  # one of the drawn seeds of every draw
        drawn = rng.integers(len(seeds), size=draws)
        for index, differences in enumerate(seeds):
            rows = np.flatnonzero(drawn == index)
            questions = rng.integers(len(differences), size=(len(rows), len(differences)))
            means[rows] += differences[questions].mean(axis=1) / len(seeds)
    tail = 1 + min((means <= 0).sum(), (means >= 0).sum())
    low, high = np.quantile(means, (0.025, 0.975))
    return Difference(fmean(map(np.mean, seeds)), low, high, min(1.0, 2 * tail / (draws + 1)))


def compare(results: Sequence[dict], others: Sequence[dict], measure: str) -> Difference:
    """Return the difference of two arms' results, one per seed, in a measure; "drop" is own - blank by question."""

    def scores(result: dict) -> dict[str, float]:
        answers = result["answers"]
        if measure == "drop":
            return {uid: right - answers["blank"][uid] for uid, right in answers["own"].items()}
        return answers[measure]

    pairs = [(scores(a), scores(b)) for a, b in zip(results, others, strict=True)]
    assert all(a.keys() == b.keys() for a, b in pairs), "the arms answered different questions"
    return bootstrap_seeds([np.array([a[uid] - b[uid] for uid in a]) for a, b in pairs])


def compare_all(results: dict[str, list[dict]]) -> dict[str, dict[str, Difference]]:
    """Return each arm's difference from grpo in each measure; `results` has one result per seed for each arm."""
    return {measure: {arm: compare(runs, results["grpo"], measure) for arm, runs in results.items() if arm != "grpo"}
            for measure in ("conflict", "own", "drop")}  # fmt: skip


def make_table(results: dict[str, list[dict]], differences: dict[str, dict[str, Difference]]) -> list[str]:
    """Return the lines of both tables: the last evaluations, and the steps of the warnings."""
    compared = " | ".join(f"{measure} - grpo's | p, Holm" for measure in differences)
    lines = [f"| arm | conflict | cue rate | own | drop | TFLOP | seconds | {compared} |", f"|---|{'--:|' * 12}"]
    for arm, runs in results.items():
        last = mean_evaluation(runs, -1)
        shown = [last["conflict"], last["cue rate"], last["own"], last["own"] - last["blank"]]
        cells = [arm, *(f"{x:.3f}" for x in shown)]
        cells += [f"{fmean(run['flops'] for run in runs) / 1e12:.2f}", f"{fmean(run['seconds'] for run in runs):.0f}"]
        for by_arm in differences.values():
            if arm == "grpo":
                cells += ["", ""]
                continue
            adjusted = dict(zip(by_arm, holm([difference.p for difference in by_arm.values()]), strict=True))
            mean, low, high, _ = by_arm[arm]
            cells += [f"{mean:+.3f} ({low:+.3f} to {high:+.3f})", f"{adjusted[arm]:.2g}"]
        lines.append(f"| {' | '.join(cells)} |")
    start = ", ".join(f"{name} {mean:.3f}" for name, mean in mean_evaluation(results["grpo"], 0).items())
    lines += ["", f"{len(results['grpo'])} seeds. Before RL: {start}", ""]
    lines += ["| arm | warned at step, each seed | conflict accuracy fell at step, each seed |", "|---|---|---|"]
    for arm, runs in results.items():
        steps = [", ".join(str(run[name] or "-") for run in runs) for name in ("warned", "fell")]
        lines.append(f"| {arm} | {' | '.join(steps)} |")
    return lines


def mean_evaluation(runs: Sequence[dict], index: int) -> dict[str, float]:
    """Return the means over runs of each measure in the evaluation with this index."""
    return {name: fmean(run["evaluations"][index][name] for run in runs) for name in runs[0]["answers"]}


def draw_curves(results: dict[str, list[dict]]):
    """Return a figure with a panel for each arm: the measures over steps, means and ranges over seeds."""
    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure = new_figure(2.6 * columns, 2.4 * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    marked = False
    for axes, (arm, runs) in zip(panels, results.items(), strict=False):
        steps = [evaluation["step"] for evaluation in runs[0]["evaluations"]]
        for name, colour in MEASURES.items():
            draw_band(axes, steps, [[e[name] for e in run["evaluations"]] for run in runs], colour, name)
        for step in filter(None, (run["warned"] for run in runs)):  # darker the more seeds warn at this step
            axes.plot([step], [0.97], "v", color="#b01030", alpha=0.35, markersize=6, label="" if marked else "warning")
            marked = True
        axes.set(ylim=(0, 1))
        axes.set_title(arm, fontsize=9, loc="left")
        axes.set_xlabel("RL step", fontsize=8)
        tidy(axes)
    for axes in panels[len(results):]:
        axes.set_axis_off()
    panels[0].set_ylabel("greedy accuracy", fontsize=8)
    figure.legend(*collect_labels(panels), frameon=False, fontsize=7, loc="outside upper right", ncols=4)
    return figure


def collect_labels(panels) -> tuple[list, list[str]]:
    """Return the drawn lines and their labels, each label once."""
    labelled = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    return list(labelled.values()), list(labelled)


def draw_differences(differences: dict[str, dict[str, Difference]]):
    """Return a figure of the arms' differences from grpo, with intervals."""
    figure = new_figure(6.4, 3.2)
    axes = figure.subplots()
    for shift, (name, colour) in zip((-0.15, 0.15), {"conflict": ORANGE, "own": BLUE}.items(), strict=True):
        for y, (mean, low, high, _) in enumerate(differences[name].values()):
            axes.plot([low, high], [y + shift] * 2, color=colour, linewidth=1.6)
            axes.plot(mean, y + shift, "o", color=colour, markersize=5, label="" if y else name)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(differences["own"])), list(differences["own"]))
    axes.invert_yaxis()
    axes.set_xlabel("greedy accuracy minus grpo's: mean with 95% confidence interval", fontsize=8)
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)
    return figure


def count_false_alarms(task: str, args: argparse.Namespace) -> str:
    """Train on a task with each seed, and return a line of the table."""
    folders = {seed: args.out / task / f"seed{seed}" for seed in args.seeds}
    first = folders[args.seeds[0]]
    learning.make_start(first, task, args.seeds[0], args.short)
    plan = demo.load_demo_config(task)
    extra = ["--eval-every", "5", "--eval-ablate", "blank", "--train-vision", plan.train_vision, *args.flags]

    def run_seed(seed: int) -> list[dict]:
        folder = folders[seed]
        for name in ("base", "start"):
            if not (folder / name).exists():
                shutil.copytree(first / name, folder / name)
        learning.make_start(folder, task, seed, args.short)
        words = learning.settings(folder, task, seed, extra)
        steps = train.parse_args([*words, "--out", str(folder / "run")]).run.steps
        if not learning.is_finished(folder / "run", steps):
            shutil.rmtree(folder / "run", ignore_errors=True)
            done = start_logged(command("train.py", *words, "--out", folder / "run"), folder / "run.log").wait()
            need(not done, f"{task}, seed {seed}: see {folder / 'run.log'}")
        return read_rows(folder / "run" / "metrics.jsonl")

    with ThreadPoolExecutor(args.jobs) as pool:
        runs = list(pool.map(run_seed, args.seeds))
    tests = [[row["eval/shortcut"] for row in rows if "eval/shortcut" in row] for rows in runs]
    ends = [[row for row in rows if "eval/own" in row][i] for rows in runs for i in (0, -1)]
    cells = [task, len(runs), sum(map(len, tests)), sum(any(verdicts) for verdicts in tests)]
    cells += [f"{fmean(row[key] for row in ends[i::2]):.3f}" for key in ("eval/own", "eval/blank") for i in (0, 1)]
    return f"| {' | '.join(map(str, cells))} |"


def main(args: argparse.Namespace) -> None:
    if args.false_alarms:
        lines = ["| task | runs | tests | runs with a warning | own, first | own, last | blank, first | blank, last |"]
        lines += [f"|---|{'--:|' * 7}", *(count_false_alarms(task, args) for task in args.false_alarms)]
        write_text(args.out / "false_alarms.md", "\n".join([*lines, ""]))
        print("\n".join(lines))
        return
    folders = {seed: args.out / f"seed{seed}" for seed in args.seeds}
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda seed: make_start(folders[seed], seed, args.short), args.seeds))
        runs = [(folders[seed], arm, seed, args.flags) for seed, arm in product(args.seeds, args.arms)]
        failed = list(filter(None, pool.map(lambda run: run_arm(*run), runs)))
    need(not failed, f"{len(failed)} runs failed, the others are kept: {'; '.join(failed)}")
    results = {arm: [json.loads((folder / f"{arm}.json").read_text()) for folder in folders.values()]
               for arm in args.arms}  # fmt: skip
    differences = compare_all(results)
    draw_differences(differences).savefig(args.out / "differences.png")
    write(draw_curves(results), args.out / "looking", make_table(results, differences))


if __name__ == "__main__":
    run_script(main, parse_args)
