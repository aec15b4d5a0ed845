"""Evaluate a model folder, a hub id, a run or a checkpoint: accuracy with its interval, and a page to look at.

    python eval.py out/geo3k --data geo3k_test.parquet --out out/geo3k/eval
    python eval.py MODEL --data F --out DIR --baseline A B      # the same prompts through others, compared in pairs
    python eval.py MODEL --data F --out DIR --samples 8         # avg@8, pass@k, majority@8 at --temperature
    python eval.py MODEL --data F --out DIR --ablate blank none # how much of the accuracy comes from seeing?
    python eval.py --watch out/a out/b --out out/curves         # the curves of several runs over each other

For a run the defaults are the settings that it was trained with, except code and servers: give --reward, --env and
--judge-url again. The output lists the settings that differ; if none do, the figure is the training's eval/accuracy.
Writes eval.json, predictions.jsonl (of every model) and report.html to --out; docs/evaluation.md.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engines.launch import ConnectionConfig, ServerConfig, check_engine, make_engine, resolve_engine, size_limits
from errors import UserError, check_writable, need, plug_in
from model import ModelConfig, Processor, load_config, resolve_dtype
from parallel.checkpoint import TrainedWeights, locate, on_rank0, read_json
from parallel.resume import changes
from prepare_data import Example, ReadingConfig
from report import progress
from report.ablation import Ablation
from report.evaluation import (
    compare,
    lines_of,
    make_record,
    metric_of,
    reliance,
    summarise,
)
from report.files import read_rows, write_records, write_text
from report.log import RunLog
from report.records import choose
from report.summary import IMAGES
from report.writer import Shown, find_drawing
from reward import RewardConfig, RewardContext, Stage
from rewards.functions import absolute_files
from rewards.grade import Grader
from rewards.order import last_stage
from rollout import (
    ENGINES,
    VLLM_HELP,
    Engine,
    EnvConfig,
    Examples,
    RolloutCounter,
    Sampling,
    StartOf,
    as_given,
    load_environments,
    load_examples,
    make_prompts,
)
from settings import (
    REQUIRED,
    Parser,
    PixelConfig,
    add_settings,
    flag_of,
    flag_text,
    read_settings,
    setting,
    settings_of_run,
)
from utils import Context, Stages, dist_setup, print0, run_script

CHUNK = 64  # examples of a rank that are generated, then graded, together


@dataclass(frozen=True)
class AsTrained(RewardConfig, EnvConfig, ReadingConfig, PixelConfig):
    """As in training: a run's own values are its defaults"""

    max_new_tokens: int = setting(512, "max new tokens per response (for episodes: all turns and observations "
                                  "together)", least=1)
    max_prompt_tokens: int = setting(2048, "max prompt length in tokens, images included; longer prompts are dropped "
                                     "and counted", least=1)
    dtype: str = setting("auto", "compute dtype; auto: bfloat16 on a GPU, float32 on a CPU",
                         choices=("auto", "float32", "bfloat16"))


@dataclass(frozen=True)
class EvalConfig(AsTrained, ConnectionConfig):
    """Evaluation"""

    model: str = setting(REQUIRED, "model folder, hub id, run directory, checkpoint or PEFT adapter", positional=True)
    data: str = setting(REQUIRED, "parquet file(s) to evaluate on (default: the run's --eval-data)", metavar="FILE")
    out: str = setting(REQUIRED, "output directory for eval.json, predictions.jsonl and report.html", metavar="DIR")
    baseline: tuple[str, ...] = setting((), "other models to evaluate on the same examples, for paired comparisons",
                                        metavar="MODEL")
    ablate: tuple[str, ...] = setting((), "evaluate again with blank (white) images, shuffled images of other "
                                      "examples, or none", choices=tuple(IMAGES))
    group_by: tuple[str, ...] = setting((), "data columns; also report the metric for each of their values",
                                        metavar="COLUMN")
    limit: int | None = setting(None, "evaluate only the first N examples", least=1)
    samples: int = setting(1, "responses per example (K)", least=1)
    temperature: float | None = setting(None, "sampling temperature (default: 0 with --samples 1, else 1)", least=0)
    top_p: float = setting(1.0, "nucleus sampling probability mass; 1: off", above=0, most=1)
    rollout: str = setting("auto", "engine; auto: vllm on a GPU where it is installed (default: auto, or server "
                           "for a run that trained on servers)", choices=ENGINES)
    vllm: tuple[str, ...] = setting((), VLLM_HELP, metavar="KEY=VALUE")
    seed: int = setting(0, "of sampling")


@dataclass(frozen=True)
class WatchConfig:
    """Watch runs"""

    watch: tuple[str, ...] = setting(REQUIRED, "run directories; those that differ in --seed alone are one curve")
    out: str = setting(REQUIRED, "directory for curves.png", metavar="DIR")


# ----------------------------------------------------------------------------------------------------------------------
# One model on all examples


@dataclass
class Evaluation:
    """Of a model on examples, which the ranks share out."""

    engine: Engine
    examples: Sequence[Example]
    processor: Processor
    grader: Grader
    ctx: Context
    sampling: Sampling
    samples: int = 1  # of each example
    blank: bool = False  # white images instead of the examples' own
    # Passed to rewards: a run's last stage and step, so that a model's score does not depend on when it was saved
    stage: Stage = Stage()
    step: int = 0
    stop: Callable[[], object] = lambda: False  # the same on all ranks: ends it before the next chunk, with no records
    cut_at: int = 0  # the step of an evaluation that was cut short
    start_of: StartOf = as_given  # what an environment begins with
    group_by: Sequence[str] = ()
    title: str = "evaluating"

    def records(self) -> list[dict]:
        """One per example, in order, on rank 0 (empty elsewhere)."""
        mine = list(enumerate(self.examples))[self.ctx.rank :: self.ctx.world]
        # As many chunks on every rank, if need be with nothing to do: engines that span ranks answer together
        starts = range(0, math.ceil(len(self.examples) / self.ctx.world), CHUNK)
        records, finished = [], RolloutCounter(self.grader.submit)
        with progress.sampling(lambda: finished, len(mine) * self.samples, self.title):
            for start in starts:
                if self.stop():
                    return []
                records += self.chunk(start, mine[start : start + CHUNK], finished)
        everyone = replace(self.ctx, tp=1)  # also where some train together, each process has examples of its own
        return sorted(everyone.gather_main(records), key=lambda record: record["index"])

    def chunk(self, start: int, mine: Sequence[tuple[int, Example]], finished: RolloutCounter) -> list[dict]:
        context = RewardContext(-1 - start, self.step, self.stage)  # no batch of the data: those count from 0
        examples = [example for _, example in mine]
        prompts = make_prompts(examples, self.processor, self.blank, self.start_of, context)
        with self.grader.uncounted():  # in metrics, which are of the responses that are trained on
            rollouts = self.engine.generate(prompts, self.samples, self.sampling, finished.add)
            results = self.grader.collect(rollouts)
            self.grader.check_worked(rollouts, self.ctx.gather)
        graded = []
        for i, (r, rewards) in enumerate(zip(rollouts, results, strict=True)):
            r.finish_reason = "error" if i in self.grader.failed else r.finish_reason
            graded.append((r, rewards or {"reward": 0.0}))  # wrong, if its reward failed
        records = []
        for k, (index, example) in enumerate(mine):
            of_example = graded[k * self.samples : (k + 1) * self.samples]
            records.append(make_record(index, example, of_example, self.group_by))
        return records

    def due(self, cfg: Any, step: int) -> bool:
        """In training, of train.py's RunConfig."""
        return bool(self.examples) and (step == cfg.steps or (cfg.eval_every > 0 and step % cfg.eval_every == 0))

    def run(self, log: RunLog, stage: Stages, step: int) -> dict[str, float]:
        """In training: metrics, on rank 0; none where the run is asked to end."""
        with stage("eval", interruptible=False):
            records = self.records()
        self.cut_at = step if self.stop() else 0
        if self.cut_at or not records:
            return {}
        summary = summarise(records)
        metric = summary["metric"]
        tqdm.write("\n".join([f"evaluation after step {step}:", *lines_of(summary)]))
        log.evaluated(step, records, summary, self.examples, self.start_of)
        figures = {name: summary[name] for name in ("n", metric, "reward", "truncated", "failed")}
        figures[f"{metric}_low"], figures[f"{metric}_high"] = summary[f"{metric}_ci95"]
        figures |= {f"{task}/{metric}": of[metric] for task, of in summary.get("by_task", {}).items()}
        if "task_mean" in summary:
            figures["task_mean"] = summary["task_mean"][metric]
        figures |= {f"rewards/{name}": of["mean"] for name, of in summary["rewards"].items()}
        figures |= {f"{metric}/{kind}": of[metric] for kind, of in summary["by_answer_type"].items()}
        return {f"eval/{name}": value for name, value in figures.items()}


# ----------------------------------------------------------------------------------------------------------------------
# The command


def parse_args(argv: list[str] | None = None) -> EvalConfig | WatchConfig:
    if "--watch" in (sys.argv[1:] if argv is None else argv):
        parser = Parser(__doc__, prog="eval.py --watch")
        add_settings(parser, WatchConfig)
        return read_settings(WatchConfig, vars(parser.parse_args(argv)))
    parser = Parser(__doc__)
    add_settings(parser, EvalConfig)
    given = vars(parser.parse_args(argv))
    for path in given.get("baseline", ()):
        locate(path, "--baseline")
    run = locate(given["model"])[2]
    data = {"data": run["eval_data"]} if run.get("eval_data") else {}
    data |= {"rollout": "server"} if run.get("rollout") == "server" else {}  # whose addresses are given again
    as_trained = settings_of_run(fields(AsTrained), run, given, given["model"])
    cfg = read_settings(EvalConfig, as_trained | data | given)
    cfg = replace(cfg, **absolute_files(vars(cfg)))
    need(cfg.rollout != "server" or cfg.servers, "--rollout server (the default for a run that trained with it) needs "
         "--servers URL...; add it, or use --rollout hf or vllm")
    if cfg.temperature is None:
        cfg = replace(cfg, temperature=0.0 if cfg.samples == 1 else 1.0)
    need(cfg.samples == 1 or cfg.temperature > 0,
         f"--samples {cfg.samples} at --temperature 0 would be copies of one response; raise it")
    need(not cfg.env or set(cfg.ablate) <= {"blank"},
         "with --env only white images can replace what an environment shows; use --ablate blank")
    return cfg


def told_of_run(cfg: EvalConfig) -> list[str]:
    """Return a line with the settings that are a run's own and not the defaults, and one with those that are not."""
    run = locate(cfg.model)[2]
    if not run:
        return []
    names = [*(f.name for f in fields(AsTrained)), "rollout"]
    greedy = {"temperature": 0.0, "samples": 1, "top_p": 1.0, "limit": None}  # as training evaluates
    there = {name: run[name] for name in names if name in run} | {"data": run.get("eval_data")} | greedy
    differ = changes(there, vars(cfg))
    same = [flag_text(name, value) for name, value in there.items() if name not in greedy | differ
            and value not in (None, [], getattr(EvalConfig, name, None))]  # fmt: skip
    others = []
    for name, (was, now) in differ.items():
        value = "none" if was in (None, []) else flag_text(name, was).partition(" ")[2]
        others.append(f"{flag_text(name, now)} (there {value})")
    lines = {"as in the run": same, "unlike the run's evaluations": others}
    return [f"{title}: {', '.join(flags)}" for title, flags in lines.items() if flags]


def check_columns(cfg: EvalConfig, examples: Sequence[Example]) -> None:
    """Raise UserError unless examples have what --ablate and --group-by are about."""
    need(not cfg.ablate or any(len(example.images) for example in examples),
         f"--ablate: no example of {cfg.data} has an image; leave it out")
    known = sorted(set(chain.from_iterable(example.extra for example in examples)))
    for column in cfg.group_by:
        need(column in known, f"--group-by {column}: no such column in {cfg.data}; it has {', '.join(known) or 'none'}")


def settings_of(cfg: EvalConfig) -> dict:
    """What an evaluation is known by: as eval.json has it. Of a run also its checkpoint, which may be a newer one."""
    no_part = ("out", *ConnectionConfig.__annotations__)
    settings = {name: value for name, value in asdict(cfg).items() if name not in no_part}
    checkpoints = [str(locate(path)[1] or path) for path in (cfg.model, *cfg.baseline)]
    return settings | {"checkpoints": checkpoints}


def check_out(cfg: EvalConfig) -> None:
    """An evaluation may be made again where it is, but not over another one."""
    out = Path(cfg.out)
    check_writable(out, f"--out {cfg.out}")
    need(not (out / "run.json").exists(),
         f"--out {out} is a run, whose report.html this would replace; choose another folder, such as {out / 'eval'}")
    if not (out / "eval.json").is_file():
        return
    before = read_json(out / "eval.json", "; remove it, or choose another folder").get("settings", {})
    for name, (was, now) in changes(before, settings_of(cfg)).items():
        raise UserError(f"--out {out} holds another evaluation: {flag_of(name)} was {was} and is {now}; choose another "
                        "folder, or remove it")


def start_engine(
    cfg: EvalConfig,
    path: str,
    processor: Processor,
    examples: Examples,
    env: Any,
    ctx: Context,
    running: Engine | None = None,
) -> Engine:
    """Return the engine of --rollout with the weights of a model, run or checkpoint, for prompts made of
    `examples`. If `running` is given, an engine of the same architecture, reuse it."""
    dtype = resolve_dtype(cfg.dtype, ctx.device)
    weights = TrainedWeights(path, dtype)
    if running is not None:
        engine, running.processor = running, processor
    else:
        sizes = size_limits([examples], processor, cfg.max_new_tokens, env.image_limits if env else None)
        more = {"vocab_size": weights.hf.config.get_text_config().vocab_size, "trained_tower": True}
        more |= {"family_paths": weights.cfg.family_paths, "out": Path(cfg.out)}
        servers = read_settings(ServerConfig, vars(cfg))
        engine = make_engine(cfg.rollout, weights.cfg.model, processor, ctx, dtype, sizes, cfg.vllm, servers, **more)
    engine.sync(lambda trainable_only: weights)
    need(engine.complete, f"{path}: the engine has weights that the model does not give it; does config.json tie the "
         "head to the embedding, while the files hold both?")
    print0(f"loaded {weights.hf.loaded_from}")
    return engine


def architecture(path: str) -> str:
    """Return the part of a model's config that decides its weights' names and shapes, as JSON."""
    config = load_config(locate(path)[0]).to_json_string(use_diff=False)
    others = r'"(_\w+|dtype|torch_dtype|transformers_version|architectures)": (\[[^]]*\]|.*)'
    return re.sub(others, "", config)


def main(cfg: EvalConfig | WatchConfig) -> dict:
    if isinstance(cfg, WatchConfig):
        plug_in("report.page.plots", "--watch").watch(list(map(Path, cfg.watch)), Path(cfg.out))
        return {}
    ctx = dist_setup()
    cfg = replace(cfg, rollout=resolve_engine(cfg.rollout, ctx.device))
    on_rank0(lambda: check_out(cfg))
    for line in told_of_run(cfg):
        print0(line)
    # All that can be wrong comes before the first model. Baselines see the images at the run's own pixel limits
    check_engine(cfg.rollout, cfg.vllm, read_settings(ServerConfig, vars(cfg)), ModelConfig(model=cfg.model), ctx.world)
    env = load_environments(cfg)
    start_of = env.start_of if env else as_given
    grader = Grader(cfg, Path(cfg.out), ctx.rank, ctx.world, played=env is not None)
    paths = [cfg.model, *cfg.baseline]
    for path in cfg.baseline if cfg.rollout == "vllm" else ():
        need(architecture(path) == architecture(cfg.model),
             f"--baseline {path}: its architecture differs from {cfg.model}'s, and a process holds only one vLLM; "
             "evaluate it in a call of its own, or use --rollout hf")
    processors = [Processor(locate(path)[0], cfg.min_pixels, cfg.max_pixels) for path in paths]
    examples = load_examples(cfg.data, cfg, processors, grader, start_of, cfg.limit)
    check_columns(cfg, examples)
    step, stage = last_stage(cfg.curriculum, examples)
    grader.try_out(ctx.main, [(step, stage)])
    step = locate(cfg.model)[2].get("steps", step)  # as the run's own evaluations
    ablations = [(kind, Ablation(kind, examples, start_of, cfg.seed)) for kind in ("", *cfg.ablate)]
    sampling = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_p, cfg.seed)
    results: list[list[dict]] = []  # of the model, of its ablations, of the baselines
    running = None
    for path, processor in zip(paths, processors, strict=True):
        engine = start_engine(cfg, path, processor, examples, env, ctx, running)
        player = plug_in("envs._play", "--env").Episodes(engine, env, processor) if env else engine
        for kind, shown in ablations[:1] if results else ablations:
            asked = (player, examples, processor, grader, ctx, sampling, cfg.samples, shown.blank, stage, step)
            more = {"start_of": shown.start_of, "group_by": cfg.group_by, "title": f"{Path(path).name} {kind}".rstrip()}
            results.append(Evaluation(*asked, **more).records())
        engine.sleep()
        running = engine if cfg.rollout == "vllm" else None
        del engine, player, asked  # an hf engine goes: one model in memory at a time
    if not ctx.main:
        return {}
    summary = summarise_all(cfg, results) | {"left_out": examples.left_out, "settings": settings_of(cfg)}
    print("\n".join(lines_of(summary)))  # before anything is written: a full disk does not take an evaluation with it
    shown = {record["uid"] for record in choose(results[0], summary)}
    write_report(cfg, summary, results, {e.uid: start_of(e) for e in examples if e.uid in shown})
    return summary


def summarise_all(cfg: EvalConfig, results: Sequence[list[dict]]) -> dict:
    """Return what eval.json has; `results` are the records of the model, of its ablations, of the baselines."""
    records, n = results[0], 1 + len(cfg.ablate)
    about = {"path": cfg.model, "data": cfg.data, "temperature": cfg.temperature}
    if checkpoint := locate(cfg.model)[1]:
        about["checkpoint"] = checkpoint.name
    metric = metric_of(list(chain(*results)))
    summary = about | summarise(records, metric)
    if cfg.baseline:
        summary["baselines"] = [
            {"path": path, **summarise(base, metric), **compare(records, base, metric)}
            for path, base in zip(cfg.baseline, results[n:], strict=True)
        ]
    if cfg.ablate:
        summary["reliance"] = reliance(records, dict(zip(cfg.ablate, results[1:n], strict=True)), metric)
    return summary


def write_report(
    cfg: EvalConfig, summary: dict, results: Sequence[list[dict]], examples: Mapping[str, Example]
) -> None:
    """`results` as in `summarise_all`; `examples` by uid, as they were shown."""
    out, checkpoint = Path(cfg.out), locate(cfg.model)[1]
    names = [f"_ablate_{kind}" for kind in cfg.ablate] + [f"_baseline_{i}" for i in range(1, len(cfg.baseline) + 1)]
    titles = [IMAGES[kind] for kind in cfg.ablate] + [f"baseline {path}" for path in cfg.baseline]
    write_text(out / "eval.json", json.dumps(summary, indent=2) + "\n")
    for name, records in zip(["", *names], results, strict=True):
        write_records(out / f"predictions{name}.jsonl", records)
    written = [out / "eval.json", out / "predictions.jsonl"]
    if page := find_drawing("page"):  # last, so that nothing is lost where it fails
        rows = read_rows(checkpoint.resolve().parent.parent / "metrics.jsonl") if checkpoint else []
        title = f"{Path(cfg.model).name} on {Path(cfg.data).name}"
        others = dict(zip(titles, results[1:], strict=True))
        shown = Shown(title, results[0], examples, summary, others=others, folder=out / "images")
        page.write_pages(out / "report.html", shown, page.run_curves(rows))
        written.append(out / "report.html")
    print(f"wrote {', '.join(map(str, written))}")


if __name__ == "__main__":
    run_script(main, parse_args)
