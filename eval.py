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
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from tqdm import tqdm

from engines.launch import ConnectionConfig, ServerConfig, check_engine, make_engine, resolve_engine, size_limits
from errors import check_writable, need, plug_in
from model import ModelConfig, Processor, default_dtype, load_config
from parallel.checkpoint import TrainedWeights, locate, on_rank0, read_json
from prepare_data import Example, ReadingConfig, read_examples
from report import progress
from report.ablation import Ablation
from report.evaluation import (
    FAILED,
    compare,
    group_of,
    lines_of,
    make_record,
    metric_of,
    plain,
    reliance,
    summarise,
    with_interval,
)
from report.files import read_rows, write_text
from report.log import RunLog
from report.records import choose, without_images
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
    RolloutCounter,
    Sampling,
    StartOf,
    as_given,
    drop_long_prompts,
    load_environments,
    make_prompts,
)
from settings import REQUIRED, Parser, add_settings, flag_of, flag_text, read_settings, setting, settings_of_run
from utils import Context, Stages, dist_setup, print0, run_script

CHUNK = 64  # examples of a rank that are generated, then graded, together
MOST_GROUPS = 100  # of a --group-by column


@dataclass(frozen=True)
class AsTrained(RewardConfig, EnvConfig, ReadingConfig):
    """As in training: a run's own values are its defaults"""

    max_new_tokens: int = setting(512, "longest response; of an episode all that is said in it; tokens", least=1)
    max_prompt_tokens: int = setting(2048, "longer prompts are dropped and counted", least=1)
    min_pixels: int | None = setting(None, "enlarge smaller images to so many (default: the processor's)", least=1)
    max_pixels: int | None = setting(None, "shrink larger images to so many (default: the processor's)", least=1)
    dtype: str = setting("auto", "auto: bfloat16 on a GPU, as in training", choices=("auto", "float32", "bfloat16"))


@dataclass(frozen=True)
class EvalConfig(AsTrained, ConnectionConfig):
    """Evaluation"""

    model: str = setting(REQUIRED, "model folder, hub id, run directory or checkpoint", positional=True)
    data: str = setting(REQUIRED, "parquet file(s) to evaluate on (default: the run's --eval-data)", metavar="FILE")
    out: str = setting(REQUIRED, "directory for eval.json, predictions.jsonl and report.html", metavar="DIR")
    baseline: tuple[str, ...] = setting((), "other models to compare with, pairwise", metavar="MODEL")
    ablate: tuple[str, ...] = setting((), "ask again with white images of their size, with images of other examples, "
                                      "without images: what comes from seeing", choices=tuple(IMAGES))
    group_by: tuple[str, ...] = setting((), "columns of the data; accuracy for each value", metavar="COLUMN")
    limit: int | None = setting(None, "only the first N examples", least=1)
    samples: int = setting(1, "K, responses per example", least=1)
    temperature: float | None = setting(None, "of sampling (default: 0 with one sample, else 1)", least=0)
    top_p: float = setting(1.0, "nucleus mass (1 = off)", above=0, most=1)
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
        by_type = {kind: of[metric] for kind, of in summary["by_answer_type"].items()}
        rewards = {name: of["mean"] for name, of in summary["rewards"].items()}
        kinds = "  ".join(f"{plain(name)} {value:.2f}" for name, value in (*by_type.items(), *rewards.items()))
        failed = f"  {FAILED.format(n=summary['failed'])}" if summary["failed"] else ""
        found = f"eval at step {step}: {metric} {with_interval(summary, metric)} on {summary['n']}{failed}"
        tqdm.write("\n".join([found, *wrap(kinds, 98, initial_indent="  ", subsequent_indent="  ")]))
        log.evaluated(step, records, summary, self.examples, self.start_of)
        metrics = {f"eval/{name}": summary[name] for name in ("n", metric, "reward", "truncated", "failed")}
        ends = (f"eval/{metric}_low", f"eval/{metric}_high")
        metrics |= dict(zip(ends, summary[f"{metric}_ci95"], strict=True))
        metrics |= {f"eval/{task}/{metric}": of[metric] for task, of in summary.get("by_task", {}).items()}
        if "task_mean" in summary:
            metrics["eval/task_mean"] = summary["task_mean"][metric]
        metrics |= {f"eval/rewards/{name}": value for name, value in rewards.items()}
        return metrics | {f"eval/{metric}/{kind}": value for kind, value in by_type.items()}


# ----------------------------------------------------------------------------------------------------------------------
# The command




def parse_args(argv: list[str] | None = None) -> EvalConfig | WatchConfig:
    if "--watch" in (sys.argv[1:] if argv is None else argv):
        parser = Parser(__doc__, prog="eval.py --watch")
        add_settings(parser, WatchConfig)
        return read_settings(WatchConfig, vars(parser.parse_args(argv)))
    parser = Parser(__doc__)
    for group in (EvalConfig, AsTrained, EnvConfig, RewardConfig, ReadingConfig, ConnectionConfig):
        add_settings(parser, group)
    given = vars(parser.parse_args(argv))
    for path in given.get("baseline", ()):
        locate(path, "--baseline")
    run = locate(given["model"])[2]
    data = {"data": run["eval_data"]} if run.get("eval_data") else {}
    data |= {"rollout": "server"} if run.get("rollout") == "server" else {}  # whose addresses are given again
    as_trained = settings_of_run(fields(AsTrained), run, given, given["model"])
    cfg = read_settings(EvalConfig, as_trained | data | given)
    cfg = replace(cfg, **absolute_files(vars(cfg)))
    told = "--rollout server (the default for a run that trained with it) needs --servers URL..."
    need(cfg.rollout != "server" or cfg.servers, f"{told}; add it, or use --rollout hf or vllm")
    if cfg.temperature is None:
        cfg = replace(cfg, temperature=0.0 if cfg.samples == 1 else 1.0)
    copies = f"--samples {cfg.samples} at --temperature 0 would be copies of one response; raise it"
    need(cfg.samples == 1 or cfg.temperature > 0, copies)
    for name in ("baseline", "ablate", "group_by"):
        values = getattr(cfg, name)
        need(len(set(values)) == len(values), f"{flag_text(name, values)}: the same twice; give it once")
    shown = [kind for kind in cfg.ablate if kind != "blank"]
    told = f"--ablate {' '.join(shown)} with --env {cfg.env}: only white images can replace what an environment shows"
    need(not (shown and cfg.env), f"{told}; use --ablate blank")
    need(not Path(cfg.out).is_file(), f"--out {cfg.out} is a file; give a directory")
    return cfg


def told_of_run(cfg: EvalConfig) -> list[str]:
    """Of a run: what is as it was in training, though not by default, and all that is not."""
    run = {name: tuple(x) if isinstance(x, list) else x for name, x in locate(cfg.model)[2].items()}
    if not run:
        return []
    was = {name: run[name] for name in (*(f.name for f in fields(AsTrained)), "rollout") if name in run}
    greedy = {"temperature": 0.0, "samples": 1, "top_p": 1.0, "limit": None}  # as training evaluates
    was |= {"data": run.get("eval_data")} | greedy
    defaults = {f.name: f.default for f in fields(EvalConfig)}
    kept = {name: x for name, x in was.items() if getattr(cfg, name) == x != defaults[name] and name not in greedy}
    same = [flag_text(name, x) for name, x in kept.items() if x is not None]
    lines = [f"as in the run: {', '.join(same)}"] if same else []
    other = []
    for name, value in was.items():
        if getattr(cfg, name) != value:
            there = "none" if value in (None, ()) else flag_text(name, value).partition(" ")[2]
            other.append(f"{flag_text(name, getattr(cfg, name))} (there {there})")
    return lines + ([f"unlike the run's evaluations: {', '.join(other)}"] if other else [])


def read_data(
    cfg: EvalConfig, grader: Grader, processors: Sequence[Processor], start_of: StartOf
) -> tuple[list[Example], int, int]:
    """Return the examples that every processor takes, how many were left out, and the tokens of the longest prompt."""
    examples, left_out = read_examples(cfg.data, cfg, cfg.limit, grader.check)
    kept, longest = examples, 0
    for processor in processors:
        kept, dropped, lengths = drop_long_prompts(kept, processor, cfg.max_prompt_tokens, cfg.bad_rows, start_of)
        left_out, longest = left_out + dropped, max([longest, *lengths])
    for line in left_out:
        print0(f"left out: {line}")
    told = f"--data {cfg.data}: all {len(examples)} prompts exceed --max-prompt-tokens {cfg.max_prompt_tokens}"
    need(kept, told)
    for line in grader.unasked(kept):
        print0(f"warning: --data {cfg.data}: {line}")
    shown = any(len(example.images) for example in kept)
    none = f"--ablate {' '.join(cfg.ablate)}: no example of {cfg.data} has an image; leave it out"
    need(shown or not cfg.ablate, none)
    for column in cfg.group_by:
        known = sorted(set(chain.from_iterable(example.extra for example in kept)))
        need(column in known, f"--group-by {column}: no such column in {cfg.data}; it has {', '.join(known) or 'none'}")
        values = len({group_of(example, column) for example in kept})
        many = f"--group-by {column}: {values} values, more than {MOST_GROUPS}; choose a column with fewer"
        need(values <= MOST_GROUPS, many)
    return kept, len(left_out), longest


def settings_of(cfg: EvalConfig) -> dict:
    """What an evaluation is known by: as eval.json has it. Of a run also its checkpoint, which may be a newer one."""
    no_part = ("out", *ConnectionConfig.__annotations__)
    settings = {name: value for name, value in asdict(cfg).items() if name not in no_part}
    checkpoints = [str(locate(path)[1] or path) for path in (cfg.model, *cfg.baseline)]
    return json.loads(json.dumps(settings | {"checkpoints": checkpoints}))


def check_out(cfg: EvalConfig) -> None:
    """An evaluation may be made again where it is, but not over another one."""
    out = Path(cfg.out)
    check_writable(out, f"--out {cfg.out}")
    run = f"--out {out} is a run, whose report.html this would replace; choose another folder, such as {out / 'eval'}"
    need(not (out / "run.json").exists(), run)
    if not (out / "eval.json").is_file():
        return
    before = read_json(out / "eval.json", "; remove it, or choose another folder").get("settings", {})
    now = settings_of(cfg)
    other = [name for name in now | before if now.get(name) != before.get(name)]
    told = [f"{flag_of(name)} was {before.get(name)} and is {now.get(name)}" for name in other[:1]]
    need(not other, f"--out {out} holds another evaluation: {', '.join(told)}; choose another folder, or remove it")


def start_engine(
    cfg: EvalConfig,
    path: str,
    processor: Processor,
    examples: Sequence[Example],
    longest: int,
    env: Any,
    ctx: Context,
    running: Engine | None = None,
) -> Engine:
    """Return the engine of --rollout with the weights of a model, run or checkpoint, for prompts made of `examples`,
    of at most `longest` tokens. If `running` is given, an engine of the same architecture, reuse it."""
    dtype = default_dtype(ctx.device) if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
    weights, length = TrainedWeights(path, dtype), longest + cfg.max_new_tokens
    base = weights.cfg.model
    if running is not None:
        engine, running.processor = running, processor
    else:
        sizes = size_limits(examples, processor, length, env.image_limits if env else None)
        more = {"vocab_size": weights.hf.config.get_text_config().vocab_size, "trained_tower": True}
        more |= {"family_paths": weights.cfg.family_paths, "out": Path(cfg.out)}
        servers = read_settings(ServerConfig, vars(cfg))
        engine = make_engine(cfg.rollout, base, processor, ctx, dtype, sizes, cfg.vllm, servers, **more)
    engine.sync(lambda trainable_only: weights)
    tied = "does config.json tie the head to the embedding, while the files hold both?"
    need(engine.complete, f"{path}: the engine has weights that the model does not give it; {tied}")
    print0(f"loaded {weights.hf.loaded_from}")
    return engine


def architecture(path: str) -> dict:
    """Return the part of a model's config that decides its weights' names and shapes."""
    config = load_config(locate(path)[0]).to_dict()
    parts = {"": config, **{name: config.get(name) or {} for name in ("text_config", "vision_config")}}
    others = (*parts, "dtype", "torch_dtype", "transformers_version", "architectures")
    return {name: {k: v for k, v in part.items() if k not in others and k[0] != "_"} for name, part in parts.items()}


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
    servers = read_settings(ServerConfig, vars(cfg))
    check_engine(cfg.rollout, cfg.vllm, servers, ModelConfig(model=cfg.model), ctx.world)
    env = load_environments(cfg)
    start_of = env.start_of if env else as_given
    grader = Grader(cfg, Path(cfg.out), ctx.rank, ctx.world, played=env is not None)
    paths = [cfg.model, *cfg.baseline]
    reusable = [cfg.rollout == "vllm" and architecture(path) == architecture(cfg.model) for path in paths]
    for path, same in zip(paths, reusable, strict=True):
        other = f"--baseline {path}: its architecture differs from {cfg.model}'s, and a GPU process holds only one vLLM"
        held = same or cfg.rollout != "vllm" or ctx.device.type != "cuda"
        need(held, f"{other}; evaluate it in a call of its own, or use --rollout hf")
    processors = [Processor(locate(path)[0], cfg.min_pixels, cfg.max_pixels) for path in paths]
    examples, left_out, longest = read_data(cfg, grader, processors, start_of)
    step, stage = last_stage(cfg.curriculum, examples)
    grader.try_out(ctx.main, [(step, stage)])
    step = locate(cfg.model)[2].get("steps", step)  # as the run's own evaluations
    ablations = {kind: Ablation(kind, examples, start_of, cfg.seed) for kind in ("", *cfg.ablate)}
    sampling = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_p, cfg.seed)
    of_model: dict[str, list[dict]] = {}  # by what it saw: "", its own images, and what --ablate names
    of_baselines: list[list[dict]] = []
    asleep = []
    for number, (path, processor) in enumerate(zip(paths, processors, strict=True)):
        running = asleep[0] if asleep and reusable[number] else None
        engine = start_engine(cfg, path, processor, examples, longest, env, ctx, running)
        player = plug_in("envs._play", "--env").Episodes(engine, env, processor) if env else engine
        for kind, shown in ablations.items() if number == 0 else [("", ablations[""])]:
            asked = (player, examples, processor, grader, ctx, sampling, cfg.samples, shown.blank, stage)
            title = f"{Path(path).name}, {IMAGES[kind]}" if kind else Path(path).name
            more = {"step": step, "start_of": shown.start_of, "group_by": cfg.group_by, "title": title}
            records = Evaluation(*asked, **more).records()
            if number == 0:
                of_model[kind] = records
            else:
                of_baselines.append(records)
        engine.sleep()
        if cfg.rollout == "vllm":
            asleep.append(engine)  # one that goes would take the next one's process groups with it
        del engine, player  # an hf engine goes: one model in memory at a time
    if not ctx.main:
        return {}
    summary = summarise_all(cfg, of_model, of_baselines) | {"left_out": left_out, "settings": settings_of(cfg)}
    print("\n".join(lines_of(summary)))  # before anything is written: a full disk does not take an evaluation with it
    others = {IMAGES[kind]: records for kind, records in of_model.items() if kind}
    others |= {f"baseline {path}": records for path, records in zip(cfg.baseline, of_baselines, strict=True)}
    shown = {record["uid"] for record in choose(of_model[""], summary)}
    write_report(cfg, summary, of_model[""], others, {e.uid: start_of(e) for e in examples if e.uid in shown})
    return summary


def summarise_all(cfg: EvalConfig, of_model: Mapping[str, list[dict]], of_baselines: Sequence[list[dict]]) -> dict:
    records = of_model[""]
    about = {"path": cfg.model, "data": cfg.data, "temperature": cfg.temperature}
    if checkpoint := locate(cfg.model)[1]:
        about["checkpoint"] = checkpoint.name
    metric = metric_of(list(chain(*of_model.values(), *of_baselines)))
    summary = about | summarise(records, metric)
    if cfg.baseline:
        pairs = zip(cfg.baseline, of_baselines, strict=True)
        both = [(path, summarise(base, metric), compare(records, base, metric)) for path, base in pairs]
        summary["baselines"] = [{"path": path, **base, **compared} for path, base, compared in both]
    if cfg.ablate:
        summary["reliance"] = reliance(records, {kind: of_model[kind] for kind in cfg.ablate}, metric)
    return summary


def write_report(
    cfg: EvalConfig,
    summary: dict,
    records: Sequence[dict],
    others: Mapping[str, Sequence[dict]],
    examples: Mapping[str, Example],
) -> None:
    """`others`: of the same examples, by what answered them; `examples` by uid, as they were shown."""
    out, checkpoint = Path(cfg.out), locate(cfg.model)[1]
    names = [f"ablate_{kind}" for kind in cfg.ablate] + [f"baseline_{i}" for i in range(1, len(cfg.baseline) + 1)]
    write_text(out / "eval.json", json.dumps(summary, indent=2) + "\n")
    for name, of in zip(["", *(f"_{name}" for name in names)], [records, *others.values()], strict=True):
        write_text(out / f"predictions{name}.jsonl", "".join(json.dumps(without_images(r)) + "\n" for r in of))
    written = [out / "eval.json", out / "predictions.jsonl"]
    if page := find_drawing("page"):  # last, so that nothing is lost where it fails
        rows = read_rows(checkpoint.resolve().parent.parent / "metrics.jsonl") if checkpoint else []
        title = f"{Path(cfg.model).name} on {Path(cfg.data).name}"
        shown = Shown(title, records, examples, summary, others=others, folder=out / "images")
        page.write_pages(out / "report.html", shown, page.run_curves(rows))
        written.append(out / "report.html")
    print(f"wrote {', '.join(map(str, written[:-1]))} and {written[-1]}")


if __name__ == "__main__":
    run_script(main, parse_args)
