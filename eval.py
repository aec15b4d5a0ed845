"""Evaluate a model folder, a hub id, a run or a checkpoint: greedy accuracy per answer type, and a page to look at.

    python eval.py out/geo3k --data geo3k_test.parquet --out out/geo3k/eval
    python eval.py MODEL --data F --out DIR --baseline BASE     # the same prompts through both, compared pairwise
    python eval.py MODEL --data F --out DIR --samples 8         # avg@8 and pass@8 at --temperature
    python eval.py MODEL --data F --out DIR --blank-images      # what is right without looking?

Writes eval.json and report.html to --out.
"""

import json
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from engines.choose import make_engine, resolve_engine, vllm_settings
from envs import EnvConfig
from envs._load import Environments, load_environments
from envs._play import Episodes, player
from errors import check_writable, need
from model import Processor, default_dtype
from parallel.checkpoint import load_trained, locate
from prepare_data import Example, ReadingConfig, read_examples
from report.log import RunLog, write_text
from report.page import PAGE_RECORDS, episode_record, rollout_page
from reward import RewardConfig, Rewards, Stage, uncounted
from rewards.curriculum import last_stage
from rewards.custom import has_file
from rollout import ENGINES, VLLM_HELP, Engine, Rollout, Sampling, StartOf, as_given, drop_long_prompts, make_prompts
from settings import REQUIRED, Parser, add_settings, flag_of, read_settings, setting
from utils import Context, Stages, dist_setup, print0, run_script

CHUNK = 64  # examples of a rank that are generated, then graded, together
FAILED = "rewards that failed, counted as wrong: {n}"


@dataclass(frozen=True)
class AsTrained(RewardConfig, EnvConfig, ReadingConfig):
    """As in training: a run's own values are its defaults"""

    max_new_tokens: int = setting(512, "longest response; of an episode all that is said in it; tokens", least=1)
    max_prompt_tokens: int = setting(2048, "longer prompts are dropped and counted", least=1)
    min_pixels: int | None = setting(None, "enlarge smaller images to so many (default: the processor's)", least=1)
    max_pixels: int | None = setting(None, "shrink larger images to so many (default: the processor's)", least=1)
    dtype: str = setting("auto", "auto: bfloat16 on a GPU, as in training", choices=("auto", "float32", "bfloat16"))


@dataclass(frozen=True)
class EvalConfig(AsTrained):
    """Evaluation"""

    model: str = setting(REQUIRED, "model folder, hub id, run directory or checkpoint", positional=True)
    data: str = setting(REQUIRED, "parquet file(s) to evaluate on", metavar="FILE")
    out: str = setting(REQUIRED, "directory for eval.json and report.html", metavar="DIR")
    baseline: str | None = setting(None, "a second model to compare with, pairwise", metavar="MODEL")
    limit: int | None = setting(None, "only the first N examples", least=1)
    samples: int = setting(1, "responses per example", least=1)
    temperature: float | None = setting(None, "of sampling (default: 0 with one sample, else 1)", least=0)
    top_p: float = setting(1.0, "nucleus mass (1 = off)", above=0, most=1)
    blank_images: bool = setting(False, "replace every image by a white one")
    rollout: str = setting("auto", "engine; auto: vllm on a GPU where it is installed", choices=ENGINES)
    vllm: tuple[str, ...] = setting((), VLLM_HELP, metavar="KEY=VALUE")
    seed: int = setting(0, "of sampling")


@dataclass
class Evaluation:
    """Of a model on examples, which the ranks share out."""

    engine: Engine | Episodes
    examples: Sequence[Example]
    processor: Processor
    rewards: Rewards
    ctx: Context
    sampling: Sampling
    samples: int = 1  # of each example
    blank: bool = False  # white images instead of the examples' own
    stage: Stage = Stage()  # of the curriculum, which rewards are told: the last, whatever the step
    stop: Callable[[], object] = lambda: False  # the same on all ranks: ends it before the next chunk, with no records
    cut_at: int = 0  # the step of an evaluation that was cut short
    start_of: StartOf = as_given  # what an environment begins with

    def records(self, step: int = 0) -> list[dict]:
        """One per example, in order, on rank 0 (empty elsewhere)."""
        mine = list(enumerate(self.examples))[self.ctx.rank :: self.ctx.world]
        # As many rounds on every rank, if need be with nothing to do: engines that span ranks answer together
        rounds = range(0, math.ceil(len(self.examples) / self.ctx.world), CHUNK)
        records = []
        for start in tqdm(rounds, "evaluating", leave=False, disable=None if self.ctx.main else True):
            if self.stop():
                return []
            chunk = mine[start : start + CHUNK]
            prompts = make_prompts([example for _, example in chunk], self.processor, self.blank, self.start_of)
            with uncounted():  # in metrics, which are of the responses that are trained on
                grading = self.rewards.begin(step, self.stage)
                rollouts = self.engine.generate(prompts, self.samples, self.sampling, grading.add)
                results = grading.results(rollouts)
            graded = []
            for i, (r, rewards) in enumerate(zip(rollouts, results, strict=True)):
                r.finish_reason = "error" if i in grading.failed else r.finish_reason
                graded.append((r, rewards or {"reward": 0.0}))  # wrong, if its reward failed
            for k, (index, example) in enumerate(chunk):
                records.append(make_record(index, example, graded[k * self.samples : (k + 1) * self.samples]))
        return sorted(self.ctx.gather_main(records), key=lambda record: record["index"])

    def due(self, cfg: Any, step: int) -> bool:
        """In training, of train.py's RunConfig."""
        return bool(self.examples) and (step == cfg.steps or (cfg.eval_every > 0 and step % cfg.eval_every == 0))

    def run(self, log: RunLog, stage: Stages, step: int) -> dict[str, float]:
        """In training: metrics, on rank 0; none where the run is asked to end."""
        with stage("eval", interruptible=False):
            records = self.records(step)
        self.cut_at = step if self.stop() else 0
        if self.cut_at or not records:
            return {}
        summary = summarise(records)
        by_type = {kind: of["accuracy"] for kind, of in summary["by_answer_type"].items()}
        kinds = "  ".join(f"{kind} {accuracy:.2f}" for kind, accuracy in by_type.items())
        failed = f"  {FAILED.format(n=summary['failed'])}" if summary["failed"] else ""
        tqdm.write(f"eval at step {step}: accuracy {summary['accuracy']:.3f} on {summary['n']}  {kinds}{failed}")
        log.evaluated(step, records, summary, self.examples, self.start_of)
        metrics = {f"eval/{name}": summary[name] for name in ("n", "accuracy", "reward", "truncated", "failed")}
        if interval := summary["accuracy_ci95"]:
            metrics |= dict(zip(("eval/accuracy_low", "eval/accuracy_high"), interval, strict=True))
        return metrics | {f"eval/accuracy/{kind}": accuracy for kind, accuracy in by_type.items()}


def make_record(index: int, example: Example, graded: Sequence[tuple[Rollout, dict[str, float]]]) -> dict:
    """An example with its responses and their rewards, as JSON has it."""
    samples = []
    for r, scores in graded:
        told = {"text": r.text, "finish_reason": r.finish_reason, "tokens": sum(r.response_mask), "rewards": scores}
        samples.append(told | episode_record(r))
    about = {"uid": example.uid, "answer_type": answer_type(example), "ground_truth": example.ground_truth}
    return {"index": index, **about, "samples": samples}


def answer_type(example: Example) -> str:
    """As text: data may name types by numbers, or by both."""
    kind = example.extra.get("answer_type")
    return "all" if kind is None or kind == "" else str(kind)


def correctness(record: dict) -> list[float]:
    """1 or 0 of each sample; the total reward where a task has no accuracy."""
    return [s["rewards"].get("accuracy", s["rewards"]["reward"]) for s in record["samples"]]


def wilson(successes: float, n: int) -> tuple[float, float]:
    """95% confidence interval of a proportion.   Wilson 1927"""
    z, p = 1.959964, successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def summarise(records: Sequence[dict]) -> dict:
    """Accuracy (mean over samples, then over examples), its interval, pass@k, and the same per answer type."""
    scores = [correctness(record) for record in records]
    samples = list(chain.from_iterable(record["samples"] for record in records))
    accuracy = fmean(map(fmean, scores))
    by_type = defaultdict(list)
    for record, score in zip(records, scores, strict=True):
        by_type[record["answer_type"]].append(fmean(score))
    # A reward that is no proportion has no such interval. Over examples: the samples of one are not independent
    proportions = all(0 <= min(score) and max(score) <= 1 for score in scores)
    summary = {
        "n": len(records),
        "samples": len(scores[0]),
        "accuracy": accuracy,
        "accuracy_ci95": wilson(accuracy * len(records), len(records)) if proportions else None,
        f"pass@{len(scores[0])}": fmean(max(score) == 1 for score in scores),
        "reward": fmean(s["rewards"]["reward"] for s in samples),
        "truncated": fmean(s["finish_reason"] == "length" for s in samples),
        "failed": sum(s["finish_reason"] == "error" for s in samples),
        "response_tokens": fmean(s["tokens"] for s in samples),
        "by_answer_type": {kind: {"n": len(x), "accuracy": fmean(x)} for kind, x in sorted(by_type.items())},
    }
    if "messages" in samples[0]:
        summary["turns"] = fmean(s["turns"] for s in samples)
        ends = Counter(s["ended_by"] for s in samples)
        summary["ended_by"] = {why: n / len(samples) for why, n in ends.most_common()}
    if "format" in samples[0]["rewards"]:
        summary["format"] = fmean(s["rewards"].get("format", 0.0) for s in samples)
    return summary


def compare(records: Sequence[dict], baseline: Sequence[dict]) -> dict:
    """Paired comparison on the same examples: exact two-sided McNemar test on the first sample of each."""
    assert [r["uid"] for r in records] == [r["uid"] for r in baseline], "a paired comparison needs the same examples"
    pairs = [(correctness(a)[0] == 1, correctness(b)[0] == 1) for a, b in zip(records, baseline, strict=True)]
    gained = pairs.count((True, False))
    lost = pairs.count((False, True))
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n if n else 1.0
    return {"gained": gained, "lost": lost, "mcnemar_p": min(1.0, 2 * tail)}


# ----------------------------------------------------------------------------------------------------------------------
# The command


def settings_of_run(path: str) -> dict:
    """What a run, or one of its checkpoints, was trained with, as far as it is ours too. {} for other models."""
    run = locate(path)[2]
    settings = {f.name: run[f.name] for f in fields(AsTrained) if run.get(f.name) is not None}
    if not Path(settings.get("curriculum", ".")).exists():
        del settings["curriculum"]
    if ":" in settings.get("env", "") and not has_file(settings["env"]):
        del settings["env"]
    return settings | {"reward": list(filter(has_file, settings.get("reward", [])))}


def parse_args(argv: list[str] | None = None) -> EvalConfig:
    parser = Parser(__doc__)
    for group in (EvalConfig, AsTrained, EnvConfig, RewardConfig, ReadingConfig):
        add_settings(parser, group)
    given = vars(parser.parse_args(argv))
    settings = settings_of_run(given["model"]) | given
    if settings.get("env") is None and "env_settings" not in given:
        settings.pop("env_settings", None)
    cfg = read_settings(EvalConfig, settings)
    if cfg.temperature is None:
        cfg = replace(cfg, temperature=0.0 if cfg.samples == 1 else 1.0)
    copies = f"--samples {cfg.samples} at --temperature 0 would be copies of one response; raise it"
    need(cfg.samples == 1 or cfg.temperature > 0, copies)
    need(not Path(cfg.out).is_file(), f"--out {cfg.out} is a file; give a directory")
    return cfg


def told_of_run(cfg: EvalConfig) -> str:
    """Which settings are other than the defaults because the run had them."""
    run = locate(cfg.model)[2]
    run = {name: tuple(value) if isinstance(value, list) else value for name, value in run.items()}
    same = {f.name: run[f.name] for f in fields(AsTrained) if run.get(f.name) == getattr(cfg, f.name) != f.default}
    several = {name: value if isinstance(value, tuple) else (value,) for name, value in same.items()}
    told = [shlex.join([flag_of(name), *map(str, values)]) for name, values in several.items()]
    for spec in run.get("reward") or ():
        if not has_file(spec):
            told.append(f"not --reward {spec!r}, a file that is not here: the task's own reward is used")
    if run.get("env") and cfg.env is None and not has_file(run["env"]):
        told.append(f"not --env {run['env']}, a file that is not here: single responses, not episodes")
    if run.get("curriculum") and cfg.curriculum is None:
        told.append(f"not --curriculum {run['curriculum']!r}, a file that is not here: rewards are told no stage")
    return ", ".join(told)


def read_data(
    cfg: EvalConfig, rewards: Rewards, processors: Sequence[Processor], start_of: StartOf
) -> tuple[list[Example], int]:
    """The examples that every processor takes, and how many were left out."""
    examples, left_out = read_examples(cfg.data, cfg, cfg.limit)
    rewards.check(examples)
    kept = examples
    for processor in processors:
        kept, dropped, _ = drop_long_prompts(kept, processor, cfg.max_prompt_tokens, cfg.bad_rows, start_of)
        left_out += dropped
    for line in left_out:
        print0(f"left out: {line}")
    told = f"--data {cfg.data}: all {len(examples)} prompts exceed --max-prompt-tokens {cfg.max_prompt_tokens}"
    need(kept, told)
    return kept, len(left_out)


def start_engine(
    cfg: EvalConfig,
    path: str,
    processor: Processor,
    examples: Sequence[Example],
    env: Environments | None,
    ctx: Context,
) -> Engine:
    """--rollout with the weights of a model, run or checkpoint, for prompts made of `examples`."""
    dtype = default_dtype(ctx.device) if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
    hf = load_trained(path, dtype)
    limits = {"examples": examples, "max_model_len": cfg.max_prompt_tokens + cfg.max_new_tokens}
    limits["of_episodes"] = env.image_limits if env else None
    limits["settings"] = vllm_settings(cfg.vllm, cfg.rollout, ctx.world)
    engine = make_engine(cfg.rollout, locate(path)[0], processor, ctx.device, dtype, load_hf=lambda: hf, **limits)
    if cfg.rollout == "vllm":
        engine.load_weights((name, parameter.detach()) for name, parameter in hf.named_parameters())
    return engine


def main(cfg: EvalConfig) -> dict:
    ctx = dist_setup()
    if ctx.main:
        check_writable(Path(cfg.out), f"--out {cfg.out}")
    if told := told_of_run(cfg):
        print0(f"settings of the run: {told}")
    # All that can be wrong comes before the first model. The baseline sees the images at the run's own pixel limits
    cfg = replace(cfg, rollout=resolve_engine(cfg.rollout, ctx.device))
    vllm_settings(cfg.vllm, cfg.rollout, ctx.world)
    env = load_environments(cfg)
    start_of = env.start_of if env else as_given
    rewards = Rewards(cfg, Path(cfg.out), ctx.rank, ctx.world, played=env is not None)
    paths = [path for path in (cfg.model, cfg.baseline) if path]
    processors = [Processor(locate(path)[0], cfg.min_pixels, cfg.max_pixels) for path in paths]
    examples, left_out = read_data(cfg, rewards, processors, start_of)
    first_step, stage = last_stage(cfg.curriculum, examples)
    rewards.try_out(ctx.main, [(first_step, stage)])
    sampling = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_p, cfg.seed)
    results, asleep = [], []
    for path, processor in zip(paths, processors, strict=True):
        engine = start_engine(cfg, path, processor, examples, env, ctx)
        play = player(engine, env, processor)
        asked = (play, examples, processor, rewards, ctx, sampling, cfg.samples, cfg.blank_images, stage)
        results.append(Evaluation(*asked, start_of=start_of).records(first_step))
        engine.sleep()
        if cfg.rollout == "vllm":
            asleep.append(engine)  # one that goes would take the next one's process groups with it
        del engine, play  # an hf engine goes: one model in memory at a time
    if not ctx.main:
        return {}
    summaries = [{"path": path, "left_out": left_out, **summarise(of)} for path, of in zip(paths, results, strict=True)]
    summary = summaries[0] | {"data": cfg.data, "blank_images": cfg.blank_images, "temperature": cfg.temperature}
    if cfg.baseline:
        summary["baseline"] = summaries[1] | compare(*results)
    tell(summary)  # before anything is written: a disk that is full by now does not take an evaluation with it
    write_report(cfg, summary, results[0], examples, start_of)
    return summary


def tell(summary: dict) -> None:
    """The summary on the terminal, on which escape codes from data would act."""
    interval = "({:.3f} to {:.3f}, 95%), ".format(*summary["accuracy_ci95"]) if summary["accuracy_ci95"] else ""
    more = f"truncated {summary['truncated']:.3f}" + (", images blanked" if summary["blank_images"] else "")
    print(f"accuracy {summary['accuracy']:.3f} {interval}n {summary['n']}, {more}")
    if summary["failed"]:
        print(f"  {FAILED.format(n=summary['failed'])}")
    for kind, of in summary["by_answer_type"].items():
        print(f"  {repr(kind)[1:-1]:<12} {of['accuracy']:.3f}  n {of['n']}")
    if base := summary.get("baseline"):
        changes = f"{base['gained']} gained, {base['lost']} lost, McNemar p {base['mcnemar_p']:.2g}"
        print(f"baseline {base['accuracy']:.3f}: {changes}")


def write_report(
    cfg: EvalConfig, summary: dict, records: Sequence[dict], examples: Sequence[Example], start_of: StartOf
) -> None:
    title = f"{cfg.model} on {cfg.data}" + (", images blanked" if cfg.blank_images else "")
    shown = {record["uid"] for record in records[:PAGE_RECORDS]}
    by_uid = {example.uid: start_of(example) for example in examples if example.uid in shown}
    page = rollout_page(title, summary, records, by_uid)
    out = Path(cfg.out)
    write_text(out / "eval.json", json.dumps(summary, indent=2) + "\n")
    write_text(out / "report.html", page)
    print(f"wrote {out / 'eval.json'} and {out / 'report.html'}")


if __name__ == "__main__":
    run_script(main, parse_args)
