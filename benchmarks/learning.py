"""Learning curves: accuracy on unseen images over samples and seconds, from the same warm starts.

    python benchmarks/learning.py trl           # TRL's GRPOTrainer and train.py: shapes and digits, three seeds
    python benchmarks/learning.py algorithms    # our nine algorithms on digits, which does not saturate, five seeds

Further flags are passed to train.py, e.g. `--steps 20`; TRL gets the same values. Existing warm starts and finished
runs are kept and not repeated. Writes OUT/TASK/seedS/..., and plots and tables to OUT/*.png and OUT/*.md.

trl: both sides have the same initial weights, order of prompts, rewards, AdamW settings, learning rates, gradient
clipping, and numbers of prompts and samples. They differ in the random numbers used for sampling. Their two processes,
with one thread each, run at the same time, so that other load on the machine slows both. Seconds are CPU seconds,
including child processes; they exclude loading and the evaluations, which our code runs for both sides.

algorithms: all use the settings of the digits demo and their own preset; EXTRA lists the exceptions.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= ENV  # before torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from vs_trl import make_trainer  # noqa: E402

import demo  # noqa: E402
import rollout  # noqa: E402
import train  # noqa: E402
from engines.hf import HFEngine  # noqa: E402
from errors import need  # noqa: E402
from grpo import PRESETS  # noqa: E402
from model import Processor, VisionCache, load_hf  # noqa: E402
from prepare_data import DataFormatConfig, read_examples  # noqa: E402
from report.run_files import read_rows, write_text  # noqa: E402
from rewards.grade import Grader, grade  # noqa: E402
from rewards.order import make_order  # noqa: E402
from rollout import Prompt, SamplingParams, response_text  # noqa: E402
from utils import StepTimer, run_script, setup_distributed  # noqa: E402

T = TypeVar("T")
SAMPLES_PER_BATCH = 256  # with the demo's settings
SIDES = ("trl", "ours")
LEVELS = {"shapes": 0.9, "digits": 0.5}  # accuracy levels; the times of both sides to reach them are compared
# In a single update every ratio is 1, so three losses would equal GRPO's; the critic's default lr suits large models
EXTRA = dict.fromkeys(("gspo", "cispo", "sapo"), ["--minibatches", "4"]) | {"ppo": ["--algo-args", "critic_lr=1e-3"]}


SHORT = "--steps 2 --eval-every 1 --prompts-per-step 3 --group-size 2 --warmup-steps 1 --max-new-tokens 6"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    sub = p.add_subparsers(dest="command", required=True)
    trl = sub.add_parser("trl", help="TRL's GRPOTrainer and train.py", allow_abbrev=False)
    algorithms = sub.add_parser("algorithms", help="our nine algorithms on digits", allow_abbrev=False)
    side = sub.add_parser("side", help="one run of `trl` (started by it)", allow_abbrev=False)
    trl.add_argument("--tasks", nargs="+", default=list(LEVELS), help="tasks whose files define `scenes`")
    algorithms.add_argument("--algos", nargs="+", default=list(PRESETS), choices=list(PRESETS), help="include grpo")
    algorithms.add_argument("--jobs", type=int, default=2, help="runs in parallel")
    for q, seeds in ((trl, 3), (algorithms, 5)):
        q.add_argument("--seeds", nargs="+", type=int, default=list(range(seeds)), help="each has its own warm start")
        q.add_argument("--out", type=Path, default=ROOT / "out/learning", help="folder to write")
        q.add_argument("--short", action="store_true", help="only check that it runs: one seed, one task, two steps")
    side.add_argument("side", choices=SIDES)
    args, args.flags = p.parse_known_args(argv)
    if args.command != "side":
        args.out = args.out.resolve()
        if args.short:
            args.seeds, args.tasks, args.algos = args.seeds[:1], ["shapes"], ["grpo", "rloo"]
            args.flags = [*SHORT.split(), *args.flags]
    return args


# ----------------------------------------------------------------------------------------------------------------------
# Code for all runs


def command(script: str, *flags: object) -> list[str]:
    return [sys.executable, script, *map(str, flags)]


def make_start(folder: Path, task: str, seed: int, short: bool) -> None:
    """Create training and test data, a random toy model and its warm start, with the commands of the demo."""
    seeded = ("--seed", seed)
    n_train, n_test, warm = (12, 5, ["--see-steps", 1, "--habit-steps", 1]) if short else (2000, 400, [])
    makers = {
        "train.parquet": command("prepare_data.py", task, "--toy", "--n", n_train, "--split", "train", *seeded),
        "test.parquet": command("prepare_data.py", task, "--toy", "--n", n_test, "--split", "test", *seeded),
        "base": command("demo.py", "model", "--task", task, *seeded),
        "start": command("demo.py", "warm", "--model", folder / "base", "--task", task, *seeded, *warm),
    }
    for name, words in makers.items():
        if not (folder / name).exists():
            subprocess.run([*words, "--out", folder / name], cwd=ROOT, check=True)


def settings(folder: Path, task: str, seed: int, extra: Sequence[str]) -> list[str]:
    """Return the flags of train.py except --out: those of the demo's RL run, without intermediate checkpoints."""
    plan = demo.load_demo_config(task)
    flags = ["--model", folder / "start", "--data", folder / "train.parquet", "--eval-data", folder / "test.parquet"]
    flags += [
        *demo.TRAIN_FLAGS.split(),
        "--max-new-tokens",
        demo.max_reply_tokens(folder / "base", task),
        "--seed",
        seed,
    ]
    flags += ["--steps", plan.steps, "--save-every", 1000, "--reward-workers", 0, *extra]
    return list(map(str, flags))


# ----------------------------------------------------------------------------------------------------------------------
# TRL and train.py


def clock() -> tuple[float, float]:
    """Return the CPU seconds of this process and its children, and the wall-clock seconds."""
    return sum(os.times()[:4]), time.perf_counter()


class Recorder:
    """A recorder of one side: a row for every step with the seconds so far, without evaluations. The first evaluation
    starts the clock."""

    def __init__(self):
        self.rows: list[dict] = []
        self.accuracy: dict[int, float] = {}  # by step
        self.prompts = ""  # hash of the examples and token ids of the step's prompts
        self.start = self.excluded = (0.0, 0.0)

    def evaluate(self, step: int, evaluation: Callable[[], dict[str, float]]) -> dict[str, float]:
        metrics = self.uncounted(evaluation)
        self.accuracy[step] = metrics["eval/accuracy"]
        if self.accuracy.keys() == {0}:
            self.start = clock()
            self.excluded = (0.0, 0.0)
        return metrics

    def uncounted(self, do: Callable[[], T]) -> T:
        """Call `do` without counting its time."""
        start = clock()
        result = do()
        self.excluded = tuple(sum(pair) for pair in zip(self.excluded, elapsed(start), strict=True))
        return result

    def record_prompts(self, uids: Sequence[str], token_ids: Sequence[Sequence[int]]) -> None:
        prompts = [[uid, list(ids)] for uid, ids in zip(uids, token_ids, strict=True)]
        self.prompts = hashlib.sha1(json.dumps(prompts).encode()).hexdigest()

    def step(self, step: int, lr: float) -> None:
        cpu, wall = (total - excluded for total, excluded in zip(elapsed(self.start), self.excluded, strict=True))
        self.rows.append({"step": step, "cpu": cpu, "wall": wall, "lr": lr, "prompts": self.prompts})

    def write(self, cfg: train.Config) -> None:
        per_step = cfg.rollout.prompts_per_step * cfg.algo.group_size
        rows = [{"step": 0, "cpu": 0.0, "wall": 0.0}, *self.rows]
        rows = [{**row, "samples": row["step"] * per_step, "accuracy": self.accuracy.get(row["step"])} for row in rows]
        write_text(Path(cfg.run.out) / "curve.json", json.dumps(rows, indent=0) + "\n")


def elapsed(since: tuple[float, float]) -> list[float]:
    return [now - then for now, then in zip(clock(), since, strict=True)]


def our_side(cfg: train.Config, recorder: Recorder) -> None:
    """Run train.py itself and record its steps and evaluations."""
    evaluate, make_prompts, log_step = train.Evaluation.run_during_training, rollout.make_prompts, train.RunLog.log_step

    def record_evaluation(self, log: train.RunLog, stage: StepTimer, step: int) -> dict[str, float]:
        return recorder.evaluate(step, lambda: evaluate(self, log, stage, step))

    def make_and_record_prompts(examples: Sequence, *args: object, **kwargs: object) -> list[Prompt]:
        prompts = make_prompts(examples, *args, **kwargs)
        recorder.record_prompts([example.uid for example in examples], [prompt.token_ids for prompt in prompts])
        return prompts

    def log_and_record_step(self, step: int, metrics: dict[str, float]) -> None:
        recorder.step(step, metrics["lr"])
        recorder.uncounted(lambda: log_step(self, step, metrics))  # log_step draws curves; TRL does not log

    train.Evaluation.run_during_training, rollout.make_prompts, train.RunLog.log_step = (
        record_evaluation,
        make_and_record_prompts,
        log_and_record_step,
    )
    train.main(cfg)


def trl_side(cfg: train.Config, recorder: Recorder) -> None:
    import transformers

    out, n_samples = Path(cfg.run.out), cfg.algo.group_size
    processor = Processor(cfg.model.model)
    examples, test = (read_examples(file, DataFormatConfig())[0] for file in (cfg.data.data, cfg.data.eval_data))
    by_uid = {example.uid: example for example in examples}
    curriculum = make_order(None, examples, cfg.rollout.prompts_per_step, cfg.run.seed)
    batches = [curriculum.select_batch(step, step, 0, {}) for step in range(cfg.run.steps)]
    prompt_ids: list[list[int]] = []

    def compute_rewards(completion_ids: list[list[int]], uid: list[str], **_: object) -> list[float]:
        recorder.record_prompts(uid[::n_samples], prompt_ids[::n_samples])
        texts = [response_text(processor, ids) for ids in completion_ids]
        ends = ["stop" if ids[-1] in processor.eos_ids else "length" for ids in completion_ids]
        responses = zip(texts, uid, ends, strict=True)
        return [grade(text, by_uid[key], finish_reason=end)["reward"] for text, key, end in responses]

    banned = processor.banned_token_ids(load_hf(cfg.model.model).config.text_config.vocab_size)
    changes = {"max_steps": cfg.run.steps, "max_grad_norm": cfg.optim.max_grad_norm, "seed": cfg.run.seed}
    changes |= {"num_generations": n_samples, "per_device_train_batch_size": cfg.rollout.prompts_per_step * n_samples}
    changes |= {"max_completion_length": cfg.rollout.max_new_tokens, "loss_type": "dapo"}  # equal token weights
    changes |= {"reward": compute_rewards, "generation_kwargs": {"suppress_tokens": banned.tolist()}}
    trainer = make_trainer(Path(cfg.model.model), list(chain.from_iterable(batches)), out, **changes)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    adamw = {"lr": cfg.optim.lr, "betas": (0.9, 0.999), "weight_decay": cfg.optim.weight_decay, "fused": True}
    trainer.optimizer = torch.optim.AdamW(trained, **adamw)
    schedule = partial(cfg.optim.lr_factor, steps=cfg.run.steps)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, schedule)
    tokenize = trainer._tokenize_prompts

    def tokenize_and_record(prompts: list) -> tuple:
        result = tokenize(prompts)
        prompt_ids[:] = result[0]
        return result

    trainer._tokenize_prompts = tokenize_and_record
    ctx = setup_distributed()
    engine = HFEngine(load_hf(cfg.model.model), processor, ctx.device, VisionCache(2**31))
    greedy = SamplingParams(cfg.rollout.max_new_tokens, temperature=0.0)
    evaluation = train.Evaluation(engine, test, processor, Grader(cfg.reward), ctx, greedy)
    log = SimpleNamespace(cfg=cfg, save_evaluation=lambda *_: None)  # draws no curves

    class RecorderCallback(transformers.TrainerCallback):
        """A callback that records steps, with the learning rate before the scheduler's step, and runs evaluations."""

        def on_train_begin(self, *_: object, **__: object) -> None:
            recorder.evaluate(0, lambda: evaluation.run_during_training(log, StepTimer(), 0))

        def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
            self.lr = trainer.optimizer.param_groups[0]["lr"]

        def on_step_end(self, args: object, state: transformers.TrainerState, *_: object, **__: object) -> None:
            step = state.global_step
            recorder.step(step, self.lr)
            if evaluation.is_due(cfg.run, step):
                recorder.evaluate(step, self.evaluate)

        def evaluate(self) -> dict[str, float]:
            engine.load_weights(trainer.model.named_parameters())
            return evaluation.run_during_training(log, StepTimer(), trainer.state.global_step)

    trainer.add_callback(RecorderCallback())
    trainer.train()


def run_side(args: argparse.Namespace) -> None:
    cfg = train.parse_args(args.flags)
    torch.set_num_threads(1)
    recorder = Recorder()
    {"ours": our_side, "trl": trl_side}[args.side](cfg, recorder)
    recorder.write(cfg)


def run_both(args: argparse.Namespace) -> None:
    for task, seed in product(args.tasks, args.seeds):
        folder = args.out / task / f"seed{seed}"
        make_start(folder, task, seed, args.short)
        if all((folder / side / "curve.json").exists() for side in SIDES):
            continue
        running = []
        for side in SIDES:
            shutil.rmtree(folder / side, ignore_errors=True)
            flags = [*settings(folder, task, seed, ["--eval-every", "5", *args.flags]), "--out", str(folder / side)]
            running.append(start_logged(command(__file__, "side", side, *flags), folder / f"{side}.log"))
        failed = [side for side, process in zip(SIDES, running, strict=True) if process.wait()]
        need(not failed, f"{task}, seed {seed}: {', '.join(failed)} failed; see the logs in {folder}")


def start_logged(words: list[str], file: Path) -> subprocess.Popen:
    with open(file, "w") as log:
        return subprocess.Popen(words, cwd=ROOT, env=os.environ | ENV, stdout=log, stderr=subprocess.STDOUT)


# ----------------------------------------------------------------------------------------------------------------------
# The algorithms


def run_algorithms(args: argparse.Namespace) -> None:
    """Run all algorithms and seeds that are not finished, --jobs at a time."""
    folders = {seed: args.out / "digits" / f"seed{seed}" for seed in args.seeds}
    for seed, folder in folders.items():
        make_start(folder, "digits", seed, args.short)

    def run(seed_algo: tuple[int, str]) -> int:
        """Run train.py unless it has finished, and return its exit status."""
        seed, algo = seed_algo
        out = folders[seed] / algo
        extra = ["--algo", algo, *EXTRA.get(algo, []), "--eval-every", "10", *args.flags, "--out", str(out)]
        flags = settings(folders[seed], "digits", seed, extra)
        if is_finished(out, train.parse_args(flags).run.steps):
            return 0
        shutil.rmtree(out, ignore_errors=True)
        code = start_logged(command("train.py", *flags), folders[seed] / f"{algo}.log").wait()
        print(f"digits, seed {seed}, {algo}: {'failed' if code else 'done'}", flush=True)
        return code

    with ThreadPoolExecutor(args.jobs) as pool:
        failed = sum(map(bool, pool.map(run, product(args.seeds, args.algos))))
    need(not failed, f"{failed} runs failed; see their logs in {args.out / 'digits'}. Finished runs are kept")


def is_finished(out: Path, steps: int) -> bool:
    rows = read_rows(out / "metrics.jsonl")
    return bool(rows) and rows[-1]["step"] == steps


# ----------------------------------------------------------------------------------------------------------------------
# Tables and plots

BLUE, ORANGE, GREY = "#1f5fa8", "#c0561f", "#8a8a8a"


class Paired(NamedTuple):
    """The mean of paired differences, its 95% confidence interval and the p-value of the paired t-test."""

    mean: float
    low: float
    high: float
    p: float

    def describe(self, form: str = "+.3f") -> str:
        mean, low, high = (format(x, form) for x in self[:3])
        return f"{mean} ({low} to {high})" if self.low < self.high else mean


def paired(values: Sequence[float], others: Sequence[float]) -> Paired:
    from scipy.stats import ttest_rel

    test = ttest_rel(values, others)
    return Paired(fmean(values) - fmean(others), *test.confidence_interval(0.95), float(test.pvalue))


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Return the geometric mean of the ratios of values to others, with its confidence interval."""
    log_ratio = paired(np.log(values), np.log(others))
    return Paired(*np.exp(log_ratio)).describe(".2f")


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of comparisons (Holm 1979)."""
    adjusted, least = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values)):
        least = max(least, min(1.0, p_values[i] * (len(p_values) - rank)))
        adjusted[i] = least
    return adjusted


def first_reach(rows: Sequence[dict], level: float, axis: str) -> float:
    """Return where an accuracy is reached on `axis`, interpolated between two evaluations; nan if it is not reached."""
    for before, after in pairwise(rows):
        if before["accuracy"] < level <= after["accuracy"]:
            part = (level - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before[axis] + part * (after[axis] - before[axis])
    return math.nan


def read_sides(folder: Path) -> dict[str, list[dict]]:
    """Return the evaluated steps of both sides for a seed, after checking that prompts and learning rates are equal."""
    curves = {side: json.loads((folder / side / "curve.json").read_text()) for side in SIDES}
    for a, b in list(zip(*curves.values(), strict=True))[1:]:
        same = a["prompts"] == b["prompts"] and math.isclose(a["lr"], b["lr"])
        assert same, f"{folder}: the sides differ in the prompts or the learning rate at step {a['step']}"
    return {side: [row for row in rows if row["accuracy"] is not None] for side, rows in curves.items()}


def report_both(args: argparse.Namespace) -> None:
    """Plot the curves of both sides over samples and over seconds, and write a table of their differences."""
    lines, figure = [], new_figure(8, 2.7 * len(args.tasks))
    panels = figure.subplots(len(args.tasks), 2, sharey="row", squeeze=False)
    for task, row in zip(args.tasks, panels, strict=True):
        seeds = [read_sides(args.out / task / f"seed{seed}") for seed in args.seeds]
        lines += comparison_table(task, seeds)
        for axes, (axis, name) in zip(row, {"samples": "samples", "cpu": "CPU seconds"}.items(), strict=True):
            for side, (name_of_side, colour) in {"trl": ("TRL", ORANGE), "ours": ("train.py", BLUE)}.items():
                x = np.mean([[r[axis] for r in seed[side]] for seed in seeds], axis=0)
                draw_band(axes, x, [[r["accuracy"] for r in seed[side]] for seed in seeds], colour, name_of_side)
            axes.axhline(LEVELS.get(task, 0.9), color="black", linewidth=0.6, linestyle=":")
            axes.set(xlim=0)
            axes.set_xlabel(name, fontsize=8)
            axes.set_title(f"{task}, over {name}", fontsize=9, loc="left")
            tidy(axes)
        row[0].set_ylabel("greedy accuracy, unseen images", fontsize=8)
        row[0].legend(frameon=False, fontsize=8, loc="lower right")
    write(figure, args.out / "learning_vs_trl", lines)


def comparison_table(task: str, seeds: Sequence[dict[str, list[dict]]]) -> list[str]:
    level = LEVELS.get(task, 0.9)
    measured = {
        "accuracy before": lambda rows: rows[0]["accuracy"],
        "accuracy after": lambda rows: rows[-1]["accuracy"],
        "mean accuracy of the run": lambda rows: fmean(row["accuracy"] for row in rows[1:]),
        f"samples to {level}": lambda rows: first_reach(rows, level, "samples"),
        f"CPU seconds to {level}": lambda rows: first_reach(rows, level, "cpu"),
        "CPU seconds a step": lambda rows: rows[-1]["cpu"] / rows[-1]["step"],
        "wall seconds a step": lambda rows: rows[-1]["wall"] / rows[-1]["step"],
    }
    lines = ["", f"| {task}, each seed | TRL | train.py | difference (train.py - TRL) or ratio |", "|---|--:|--:|--:|"]
    for name, value in measured.items():
        theirs, ours = ([value(seed[side]) for seed in seeds] for side in SIDES)
        form, change = (".3f", paired(ours, theirs).describe()) if "accuracy" in name else (".4g", ratio(ours, theirs))
        cells = [", ".join(format(x, form) for x in values) for values in (theirs, ours)]
        lines.append(f"| {name} | {' | '.join(cells)} | {change} |")
    theirs, ours = (np.array([[row["accuracy"] for row in seed[side]] for seed in seeds]) for side in SIDES)
    gaps = (ours - theirs).mean(axis=0)
    widest = np.abs(gaps).argmax()
    step = seeds[0]["ours"][widest]["step"]
    return [*lines, "", f"{task}: largest difference of mean accuracies, after step {step}: {gaps[widest]:+.3f}"]


def report_algorithms(args: argparse.Namespace) -> None:
    """Write a table and a plot of the accuracy after the last step and over the run, paired with grpo's."""
    rows, curves, others = {}, {}, [algo for algo in args.algos if algo != "grpo"]
    for algo in args.algos:
        rows[algo] = [read_rows(args.out / f"digits/seed{seed}/{algo}/metrics.jsonl") for seed in args.seeds]
        curves[algo] = np.array([[row["eval/accuracy"] for row in run if "eval/accuracy" in row] for run in rows[algo]])
    steps = [row["step"] for row in rows["grpo"][0] if "eval/accuracy" in row]
    measures = {
        f"after {steps[-1]} steps": {algo: curve[:, -1] for algo, curve in curves.items()},
        f"mean of {len(steps) - 1} evaluations": {algo: curve[:, 1:].mean(axis=1) for algo, curve in curves.items()},
    }
    differences_by_measure = {
        name: {algo: paired(values[algo], values["grpo"]) for algo in others} for name, values in measures.items()
    }
    after = next(iter(measures.values()))
    columns = list(chain.from_iterable((f"{name}, minus grpo's", "p, Holm") for name in measures))
    lines = [f"| algorithm | after | each seed | {' | '.join(columns)} | samples |", f"|---|--:|---|{'--:|' * 5}"]
    for algo in args.algos:
        compared = []
        for differences in differences_by_measure.values():
            adjusted = dict(zip(others, holm([differences[other].p for other in others]), strict=True))
            compared += [differences[algo].describe(), f"{adjusted[algo]:.2g}"] if algo in others else ["", ""]
        batches = [sum(row.get("sampling/batches", 1) for row in run if "reward/mean" in row) for run in rows[algo]]
        each = ", ".join(format(x, ".3f") for x in after[algo])
        cells = [algo, f"{after[algo].mean():.3f}", each, *compared, f"{SAMPLES_PER_BATCH * fmean(batches):,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    halves = [
        np.median([(x.high - x.low) / 2 for x in differences.values()])
        for differences in differences_by_measure.values()
    ]
    half_widths = ", ".join(f"{half:.3f} {name}" for name, half in zip(measures, halves, strict=True))
    lines += ["", f"Before RL {curves['grpo'][:, 0].mean():.3f}. Median half-width of the intervals: {half_widths}"]

    figure = new_figure(9, 4.2)
    left, right = figure.subplots(1, 2)
    draw_band(left, steps, curves["grpo"], GREY)
    for algo in args.algos:
        left.plot(steps, curves[algo].mean(axis=0), "o-", markersize=3, linewidth=1.2, label=algo)
    left.set_title(f"mean accuracy of {len(args.seeds)} seeds", fontsize=9, loc="left")
    left.set_xlabel("RL step (grey: range of grpo's seeds)", fontsize=8)
    left.set_ylabel("greedy accuracy, 400 unseen images", fontsize=8)
    left.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    for shift, (name, differences), colour in zip(
        (-0.15, 0.15), differences_by_measure.items(), (BLUE, ORANGE), strict=True
    ):
        for y, algo in enumerate(others):
            mean, low, high, _ = differences[algo]
            right.plot([low, high], [y + shift] * 2, color=colour, linewidth=1.6)
            right.plot(mean, y + shift, "o", color=colour, markersize=5, label="" if y else name)
    right.axvline(0, color="black", linewidth=0.8)
    right.set_yticks(range(len(others)), others)
    right.invert_yaxis()
    right.set_title("accuracy minus grpo's, paired by seed", fontsize=9, loc="left")
    right.set_xlabel("mean with 95% confidence interval", fontsize=8)
    right.legend(frameon=False, fontsize=8, loc="upper right")
    tidy(left)
    tidy(right)
    write(figure, args.out / "algorithms_digits", lines)


def new_figure(width: float, height: float):
    """Return an empty figure; width and height are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def draw_band(axes, x: Sequence[float], seeds: Sequence[Sequence[float]], colour: str, label: str = "") -> None:
    """Draw the mean over seeds, and a band from the lowest to the highest seed."""
    axes.fill_between(x, np.min(seeds, axis=0), np.max(seeds, axis=0), color=colour, alpha=0.18, linewidth=0)
    axes.plot(x, np.mean(seeds, axis=0), color=colour, linewidth=1.8, label=label)


def tidy(axes) -> None:
    axes.grid(alpha=0.2)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def write(figure, path: Path, lines: Sequence[str]) -> None:
    figure.savefig(path.with_suffix(".png"))
    write_text(path.with_suffix(".md"), "\n".join([*lines, ""]))
    print("\n".join(lines), f"\nwrote {path}.png and {path}.md", flush=True)


def main(args: argparse.Namespace) -> None:
    stages = {"trl": (run_both, report_both), "algorithms": (run_algorithms, report_algorithms), "side": (run_side,)}
    for stage in stages[args.command]:
        stage(args)


if __name__ == "__main__":
    run_script(main, parse_args)
