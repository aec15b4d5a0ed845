"""Does it learn? Accuracy on unseen images over samples and seconds, from the same warm starts.

    python benchmarks/learning.py trl           # TRL's GRPOTrainer and train.py: shapes and digits, three seeds
    python benchmarks/learning.py algorithms    # our nine algorithms on digits, which does not saturate, five seeds

Further flags go to train.py, e.g. `--steps 20`; TRL gets the same values. What is there already is not made again: a
warm start, a run. Writes OUT/TASK/seedS/... and the plots and tables OUT/*.png, OUT/*.md.

trl: both sides have the same weights to start from, prompts in the same order, rewards, AdamW, learning rates, clipping
of gradients, numbers of prompts and samples. They differ in the random numbers that they sample with. Their two
processes, of one thread each, run at the same time, so that other work on the machine delays both. Seconds are of the
processor, children's included, and leave out loading and the evaluations, which our code makes for both sides.

algorithms: every one has all settings of the demo of digits and its own preset, but for MORE.
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
from report.files import read_rows, write_text  # noqa: E402
from rewards.grade import Grader, grade  # noqa: E402
from rewards.order import make_order  # noqa: E402
from rollout import Prompt, SamplingParams, response_text  # noqa: E402
from utils import StepTimer, run_script, setup_distributed  # noqa: E402

T = TypeVar("T")
PER_ROUND = 256  # samples, with the demo's settings
SIDES = ("trl", "ours")
LEVELS = {"shapes": 0.9, "digits": 0.5}  # of accuracy; both sides' times to it are compared
# In a single update every ratio is 1, and three losses would be GRPO's; a critic's default lr is for large models
MORE = dict.fromkeys(("gspo", "cispo", "sapo"), ["--minibatches", "4"]) | {"ppo": ["--algo-args", "critic_lr=1e-3"]}


SHORT = "--steps 2 --eval-every 1 --prompts-per-step 3 --group-size 2 --warmup-steps 1 --max-new-tokens 6"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    sub = p.add_subparsers(dest="command", required=True)
    trl = sub.add_parser("trl", help="TRL's GRPOTrainer and train.py", allow_abbrev=False)
    algorithms = sub.add_parser("algorithms", help="our nine algorithms on digits", allow_abbrev=False)
    side = sub.add_parser("side", help="one run of `trl`, which starts it", allow_abbrev=False)
    trl.add_argument("--tasks", nargs="+", default=list(LEVELS), help="any whose file draws scenes")
    algorithms.add_argument("--algos", nargs="+", default=list(PRESETS), choices=list(PRESETS), help="grpo among them")
    algorithms.add_argument("--jobs", type=int, default=2, help="runs at a time")
    for q, seeds in ((trl, 3), (algorithms, 5)):
        q.add_argument("--seeds", nargs="+", type=int, default=list(range(seeds)), help="a warm start each")
        q.add_argument("--out", type=Path, default=ROOT / "out/learning", help="folder to write")
        q.add_argument("--short", action="store_true", help="does it run? One seed, one task, two tiny steps")
    side.add_argument("side", choices=SIDES)
    args, args.flags = p.parse_known_args(argv)
    if args.command != "side":
        args.out = args.out.resolve()
        if args.short:
            args.seeds, args.tasks, args.algos = args.seeds[:1], ["shapes"], ["grpo", "rloo"]
            args.flags = [*SHORT.split(), *args.flags]
    return args


# ----------------------------------------------------------------------------------------------------------------------
# What all runs share


def command(script: str, *flags: object) -> list[str]:
    return [sys.executable, script, *map(str, flags)]


def make_start(folder: Path, task: str, seed: int, short: bool) -> None:
    """Images to train and test on, a random toy and its warm start, by the commands of the demo."""
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


def settings(folder: Path, task: str, seed: int, more: Sequence[str]) -> list[str]:
    """Flags of train.py but for --out: those of the demo's RL stage, without files on the way."""
    plan = demo.load_demo_config(task)
    flags = ["--model", folder / "start", "--data", folder / "train.parquet", "--eval-data", folder / "test.parquet"]
    flags += [
        *demo.TRAIN_FLAGS.split(),
        "--max-new-tokens",
        demo.max_reply_tokens(folder / "base", task),
        "--seed",
        seed,
    ]
    flags += ["--steps", plan.steps, "--save-every", 1000, "--reward-workers", 0, *more]
    return list(map(str, flags))


# ----------------------------------------------------------------------------------------------------------------------
# TRL and train.py


def clock() -> tuple[float, float]:
    """Seconds of the processor, this process's and its children's, and of the wall."""
    return sum(os.times()[:4]), time.perf_counter()


class Recorder:
    """Of one side: a row for every step, with its seconds so far, evaluations left out. The first of these starts the
    clock."""

    def __init__(self):
        self.rows: list[dict] = []
        self.accuracy: dict[int, float] = {}  # by step
        self.prompts = ""  # the examples and the token ids of the step's prompts, as a hash
        self.began = self.away = (0.0, 0.0)

    def evaluate(self, step: int, evaluation: Callable[[], dict[str, float]]) -> dict[str, float]:
        metrics = self.uncounted(evaluation)
        self.accuracy[step] = metrics["eval/accuracy"]
        if self.accuracy.keys() == {0}:
            self.began = clock()
            self.away = (0.0, 0.0)
        return metrics

    def uncounted(self, do: Callable[[], T]) -> T:
        """What is no part of learning."""
        before = clock()
        done = do()
        self.away = tuple(sum(of) for of in zip(self.away, elapsed(before), strict=True))
        return done

    def asked(self, uids: Sequence[str], token_ids: Sequence[Sequence[int]]) -> None:
        asked = [[uid, list(ids)] for uid, ids in zip(uids, token_ids, strict=True)]
        self.prompts = hashlib.sha1(json.dumps(asked).encode()).hexdigest()

    def step(self, step: int, lr: float) -> None:
        cpu, wall = (now - away for now, away in zip(elapsed(self.began), self.away, strict=True))
        self.rows.append({"step": step, "cpu": cpu, "wall": wall, "lr": lr, "prompts": self.prompts})

    def write(self, cfg: train.Config) -> None:
        per_step = cfg.rollout.prompts_per_step * cfg.algo.group_size
        rows = [{"step": 0, "cpu": 0.0, "wall": 0.0}, *self.rows]
        rows = [{**row, "samples": row["step"] * per_step, "accuracy": self.accuracy.get(row["step"])} for row in rows]
        write_text(Path(cfg.run.out) / "curve.json", json.dumps(rows, indent=0) + "\n")


def elapsed(since: tuple[float, float]) -> list[float]:
    return [now - then for now, then in zip(clock(), since, strict=True)]


def our_side(cfg: train.Config, recorder: Recorder) -> None:
    """train.py itself, watched."""
    evaluate, make_prompts, log_step = train.Evaluation.run_during_training, rollout.make_prompts, train.RunLog.log_step

    def evaluated(self, log: train.RunLog, stage: StepTimer, step: int) -> dict[str, float]:
        return recorder.evaluate(step, lambda: evaluate(self, log, stage, step))

    def prompts_made(examples: Sequence, *more: object, **named: object) -> list[Prompt]:
        prompts = make_prompts(examples, *more, **named)
        recorder.asked([example.uid for example in examples], [prompt.token_ids for prompt in prompts])
        return prompts

    def logged(self, step: int, metrics: dict[str, float]) -> None:
        recorder.step(step, metrics["lr"])
        recorder.uncounted(lambda: log_step(self, step, metrics))  # it draws curves; TRL does not log

    train.Evaluation.run_during_training, rollout.make_prompts, train.RunLog.log_step = evaluated, prompts_made, logged
    train.main(cfg)


def their_side(cfg: train.Config, recorder: Recorder) -> None:
    import transformers

    out, n_samples = Path(cfg.run.out), cfg.algo.group_size
    processor = Processor(cfg.model.model)
    examples, test = (read_examples(file, DataFormatConfig())[0] for file in (cfg.data.data, cfg.data.eval_data))
    by_uid = {example.uid: example for example in examples}
    curriculum = make_order(None, examples, cfg.rollout.prompts_per_step, cfg.run.seed)
    batches = [curriculum.select_batch(step, step, 0, {}) for step in range(cfg.run.steps)]
    asked: list[list[int]] = []

    def graded(completion_ids: list[list[int]], uid: list[str], **_: object) -> list[float]:
        recorder.asked(uid[::n_samples], asked[::n_samples])
        texts = [response_text(processor, ids) for ids in completion_ids]
        ends = ["stop" if ids[-1] in processor.eos_ids else "length" for ids in completion_ids]
        responses = zip(texts, uid, ends, strict=True)
        return [grade(text, by_uid[of], finish_reason=end)["reward"] for text, of, end in responses]

    banned = processor.banned_token_ids(load_hf(cfg.model.model).config.text_config.vocab_size)
    told = {"max_steps": cfg.run.steps, "max_grad_norm": cfg.optim.max_grad_norm, "seed": cfg.run.seed}
    told |= {"num_generations": n_samples, "per_device_train_batch_size": cfg.rollout.prompts_per_step * n_samples}
    told |= {"max_completion_length": cfg.rollout.max_new_tokens, "loss_type": "dapo"}  # every token counts the same
    told |= {"reward": graded, "generation_kwargs": {"suppress_tokens": banned.tolist()}}
    trainer = make_trainer(Path(cfg.model.model), list(chain.from_iterable(batches)), out, **told)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    adamw = {"lr": cfg.optim.lr, "betas": (0.9, 0.999), "weight_decay": cfg.optim.weight_decay, "fused": True}
    trainer.optimizer = torch.optim.AdamW(trained, **adamw)
    schedule = partial(cfg.optim.lr_factor, steps=cfg.run.steps)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, schedule)
    tokenize = trainer._tokenize_prompts

    def tokenized(prompts: list) -> tuple:
        found = tokenize(prompts)
        asked[:] = found[0]
        return found

    trainer._tokenize_prompts = tokenized
    ctx = setup_distributed()
    engine = HFEngine(load_hf(cfg.model.model), processor, ctx.device, VisionCache(2**31))
    greedy = SamplingParams(cfg.rollout.max_new_tokens, temperature=0.0)
    evaluation = train.Evaluation(engine, test, processor, Grader(cfg.reward), ctx, greedy)
    log = SimpleNamespace(evaluated=lambda *of: None)  # nothing is drawn

    class Watch(transformers.TrainerCallback):
        """The learning rate before the scheduler's step, then the step, then perhaps an evaluation."""

        def on_train_begin(self, *_: object, **__: object) -> None:
            recorder.evaluate(0, lambda: evaluation.run_during_training(log, StepTimer(), 0))

        def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
            self.lr = trainer.optimizer.param_groups[0]["lr"]

        def on_step_end(self, args: object, state: transformers.TrainerState, *_: object, **__: object) -> None:
            step = state.global_step
            recorder.step(step, self.lr)
            if evaluation.is_due(cfg.run, step):
                recorder.evaluate(step, self.evaluated)

        def evaluated(self) -> dict[str, float]:
            engine.load_weights(trainer.model.named_parameters())
            return evaluation.run_during_training(log, StepTimer(), trainer.state.global_step)

    trainer.add_callback(Watch())
    trainer.train()


def run_side(args: argparse.Namespace) -> None:
    cfg = train.parse_args(args.flags)
    torch.set_num_threads(1)
    recorder = Recorder()
    {"ours": our_side, "trl": their_side}[args.side](cfg, recorder)
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
            running.append(logged(command(__file__, "side", side, *flags), folder / f"{side}.log"))
        failed = [side for side, process in zip(SIDES, running, strict=True) if process.wait()]
        need(not failed, f"{task}, seed {seed}: {', '.join(failed)} failed, see the logs in {folder}")


def logged(words: list[str], file: Path) -> subprocess.Popen:
    with open(file, "w") as log:
        return subprocess.Popen(words, cwd=ROOT, env=os.environ | ENV, stdout=log, stderr=subprocess.STDOUT)


# ----------------------------------------------------------------------------------------------------------------------
# The algorithms


def run_algorithms(args: argparse.Namespace) -> None:
    """Those that are not finished, so many at a time."""
    folders = {seed: args.out / "digits" / f"seed{seed}" for seed in args.seeds}
    for seed, folder in folders.items():
        make_start(folder, "digits", seed, args.short)

    def run(seed_algo: tuple[int, str]) -> int:
        """Its exit status."""
        seed, algo = seed_algo
        out = folders[seed] / algo
        more = ["--algo", algo, *MORE.get(algo, []), "--eval-every", "10", *args.flags, "--out", str(out)]
        flags = settings(folders[seed], "digits", seed, more)
        if finished(out, train.parse_args(flags).run.steps):
            return 0
        shutil.rmtree(out, ignore_errors=True)
        code = logged(command("train.py", *flags), folders[seed] / f"{algo}.log").wait()
        print(f"digits, seed {seed}, {algo}: {'failed' if code else 'done'}", flush=True)
        return code

    with ThreadPoolExecutor(args.jobs) as pool:
        failed = sum(map(bool, pool.map(run, product(args.seeds, args.algos))))
    need(not failed, f"{failed} runs failed, see their logs in {args.out / 'digits'}; the others are not made again")


def finished(out: Path, steps: int) -> bool:
    rows = read_rows(out / "metrics.jsonl")
    return bool(rows) and rows[-1]["step"] == steps


# ----------------------------------------------------------------------------------------------------------------------
# Tables and plots

BLUE, ORANGE, GREY = "#1f5fa8", "#c0561f", "#8a8a8a"


class Paired(NamedTuple):
    """The mean of differences of pairs, its 95% interval and the p-value of the paired t-test."""

    mean: float
    low: float
    high: float
    p: float

    def told(self, form: str = "+.3f") -> str:
        mean, low, high = (format(x, form) for x in self[:3])
        return f"{mean} ({low} to {high})" if self.low < self.high else mean


def paired(values: Sequence[float], others: Sequence[float]) -> Paired:
    from scipy.stats import ttest_rel

    test = ttest_rel(values, others)
    return Paired(fmean(values) - fmean(others), *test.confidence_interval(0.95), float(test.pvalue))


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """The geometric mean of what a value is of the other, with its interval."""
    of_logs = paired(np.log(values), np.log(others))
    return Paired(*np.exp(of_logs)).told(".2f")


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values that hold for all of so many comparisons together.   Holm 1979"""
    adjusted, least = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values)):
        least = max(least, min(1.0, p_values[i] * (len(p_values) - rank)))
        adjusted[i] = least
    return adjusted


def first_reach(rows: Sequence[dict], level: float, axis: str) -> float:
    """Where an accuracy is reached, on the straight line between two evaluations; nan if it is not."""
    for before, after in pairwise(rows):
        if before["accuracy"] < level <= after["accuracy"]:
            part = (level - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before[axis] + part * (after[axis] - before[axis])
    return math.nan


def read_sides(folder: Path) -> dict[str, list[dict]]:
    """The curves of a seed, of evaluated steps, if both sides were asked the same with the same learning rates."""
    curves = {side: json.loads((folder / side / "curve.json").read_text()) for side in SIDES}
    for a, b in list(zip(*curves.values(), strict=True))[1:]:
        same = a["prompts"] == b["prompts"] and math.isclose(a["lr"], b["lr"])
        assert same, f"{folder}: the sides differ in the prompts or the learning rate of step {a['step']}"
    return {side: [row for row in rows if row["accuracy"] is not None] for side, rows in curves.items()}


def report_both(args: argparse.Namespace) -> None:
    """Curves of both sides over samples and over seconds, and what they differ by."""
    lines, figure = [], new_figure(8, 2.7 * len(args.tasks))
    panels = figure.subplots(len(args.tasks), 2, sharey="row", squeeze=False)
    for task, row in zip(args.tasks, panels, strict=True):
        seeds = [read_sides(args.out / task / f"seed{seed}") for seed in args.seeds]
        lines += table_of_both(task, seeds)
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


def table_of_both(task: str, seeds: Sequence[dict[str, list[dict]]]) -> list[str]:
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
    lines = ["", f"| {task}, each seed | TRL | train.py | train.py - TRL, or its share |", "|---|--:|--:|--:|"]
    for name, value in measured.items():
        theirs, ours = ([value(seed[side]) for seed in seeds] for side in SIDES)
        form, compared = (".3f", paired(ours, theirs).told()) if "accuracy" in name else (".4g", ratio(ours, theirs))
        cells = [", ".join(format(x, form) for x in values) for values in (theirs, ours)]
        lines.append(f"| {name} | {' | '.join(cells)} | {compared} |")
    theirs, ours = (np.array([[row["accuracy"] for row in seed[side]] for seed in seeds]) for side in SIDES)
    gaps = (ours - theirs).mean(axis=0)
    widest = np.abs(gaps).argmax()
    step = seeds[0]["ours"][widest]["step"]
    return [*lines, "", f"{task}: mean accuracies are farthest apart after step {step}: {gaps[widest]:+.3f}"]


def report_algorithms(args: argparse.Namespace) -> None:
    """Accuracy after the last step and over the run, and its paired differences from grpo's, as a table and a plot."""
    rows, curves, others = {}, {}, [algo for algo in args.algos if algo != "grpo"]
    for algo in args.algos:
        rows[algo] = [read_rows(args.out / f"digits/seed{seed}/{algo}/metrics.jsonl") for seed in args.seeds]
        curves[algo] = np.array([[row["eval/accuracy"] for row in of if "eval/accuracy" in row] for of in rows[algo]])
    steps = [row["step"] for row in rows["grpo"][0] if "eval/accuracy" in row]
    measures = {
        f"after {steps[-1]} steps": {algo: curve[:, -1] for algo, curve in curves.items()},
        f"mean of {len(steps) - 1} evaluations": {algo: curve[:, 1:].mean(axis=1) for algo, curve in curves.items()},
    }
    found = {name: {algo: paired(of[algo], of["grpo"]) for algo in others} for name, of in measures.items()}
    after = next(iter(measures.values()))
    columns = list(chain.from_iterable((f"{name}, minus grpo's", "p, Holm") for name in measures))
    lines = [f"| algorithm | after | each seed | {' | '.join(columns)} | samples |", f"|---|--:|---|{'--:|' * 5}"]
    for algo in args.algos:
        compared = []
        for differences in found.values():
            adjusted = dict(zip(others, holm([differences[other].p for other in others]), strict=True))
            compared += [differences[algo].told(), f"{adjusted[algo]:.2g}"] if algo in others else ["", ""]
        rounds = [sum(row.get("sampling/rounds", 1) for row in of if "reward/mean" in row) for of in rows[algo]]
        each = ", ".join(format(x, ".3f") for x in after[algo])
        cells = [algo, f"{after[algo].mean():.3f}", each, *compared, f"{PER_ROUND * fmean(rounds):,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    halves = [np.median([(x.high - x.low) / 2 for x in differences.values()]) for differences in found.values()]
    told = ", ".join(f"{half:.3f} {name}" for name, half in zip(measures, halves, strict=True))
    lines += ["", f"Before RL {curves['grpo'][:, 0].mean():.3f}. Half of an interval, median: {told}"]

    figure = new_figure(9, 4.2)
    left, right = figure.subplots(1, 2)
    draw_band(left, steps, curves["grpo"], GREY)
    for algo in args.algos:
        left.plot(steps, curves[algo].mean(axis=0), "o-", markersize=3, linewidth=1.2, label=algo)
    left.set_title(f"mean accuracy of {len(args.seeds)} seeds", fontsize=9, loc="left")
    left.set_xlabel("RL step (grey: grpo's lowest to highest seed)", fontsize=8)
    left.set_ylabel("greedy accuracy, 400 unseen images", fontsize=8)
    left.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    for shift, (name, differences), colour in zip((-0.15, 0.15), found.items(), (BLUE, ORANGE), strict=True):
        for place, algo in enumerate(others):
            mean, low, high, _ = differences[algo]
            right.plot([low, high], [place + shift] * 2, color=colour, linewidth=1.6)
            right.plot(mean, place + shift, "o", color=colour, markersize=5, label="" if place else name)
    right.axvline(0, color="black", linewidth=0.8)
    right.set_yticks(range(len(others)), others)
    right.invert_yaxis()
    right.set_title("accuracy minus grpo's, paired by seed", fontsize=9, loc="left")
    right.set_xlabel("mean and its 95% interval", fontsize=8)
    right.legend(frameon=False, fontsize=8, loc="upper right")
    tidy(left)
    tidy(right)
    write(figure, args.out / "algorithms_digits", lines)


def new_figure(width: float, height: float):
    """In inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def draw_band(axes, x: Sequence[float], seeds: Sequence[Sequence[float]], colour: str, label: str = "") -> None:
    """The mean over seeds, from the lowest to the highest."""
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
