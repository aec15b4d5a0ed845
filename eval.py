"""Evaluate a model folder, hub id, run or checkpoint: accuracy with its confidence interval, and a
report page.

    python eval.py out/geo3k --data geo3k_test.parquet --out out/geo3k/eval
    python eval.py MODEL --data F --out DIR --baseline A B  # other models, compared in pairs
    python eval.py MODEL --data F --out DIR --samples 8  # avg@8, pass@k, majority@8
    python eval.py MODEL --data F --out DIR --ablate blank none # does it need the images?
    python eval.py MODEL --data F --out DIR --grader easyr1 verl  # Geometry3K as they grade
    python eval.py --plot-runs out/a out/b --out out/curves  # several runs in one plot

For a run, flags default to the values that it was trained with, except code and servers: pass
--reward, --env and --judge-url again. The output lists the settings that differ; if none do, the
accuracy is the run's eval/accuracy. Writes eval.json, predictions.jsonl (one per model) and
report.html to --out; see docs/evaluation.md.
"""

import startup  # noqa: F401

import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engines.launch import (
    ConnectionConfig,
    RolloutServerConfig,
    check_engine,
    check_videos,
    make_engine,
    resolve_engine,
    server_kind,
    size_limits,
)
from errors import UserError, check_writable, need, plug_in
from model import ModelConfig, Processor, load_config, resolve_dtype
from parallel.checkpoint import TrainedWeights, read_json, resolve_model, run_on_rank0
from parallel.resume import diff_settings
from prepare_data import DataFormatConfig, Example
from report import progress
from report.ablation import Ablation, check_ablations
from report.evaluation import (
    compare_with_baseline,
    format_summary,
    make_record,
    record_metric,
    summarise,
    visual_reliance,
)
from report.log import RunLog
from report.looking import LEARNT_SHORTCUT, looking_metrics, with_ends
from report.records import select_records
from report.run_files import read_rows, write_records, write_text
from report.summary import ABLATIONS
from report.writer import ReportPage, find_drawing
from reward import CurriculumStage, RewardConfig, RewardContext, task_name
from rewards.functions import absolute_files
from rewards.grade import Grader
from rewards.order import load_last_stage
from rollout import (
    ENGINES,
    VLLM_HELP,
    Engine,
    EnvConfig,
    ExampleList,
    ResetFn,
    RolloutCounter,
    SamplingParams,
    identity,
    load_examples,
    make_env_factory,
    make_prompts,
)
from settings import (
    REQUIRED,
    FlagParser,
    PixelConfig,
    add_flags,
    build_config,
    flag_field,
    flag_name,
    format_flag,
    load_run_settings,
)
from utils import DistContext, StepTimer, print0, run_script, setup_distributed

CHUNK_EXAMPLES = 64  # examples that a rank samples, then grades, together


@dataclass(frozen=True)
class InheritedConfig(RewardConfig, EnvConfig, DataFormatConfig, PixelConfig):
    """Settings shared with training (if MODEL is a run, its values are the defaults)"""

    max_new_tokens: int = flag_field(512, "max new tokens per response (for episodes: all turns and observations "
                                     "together)", least=1)
    max_prompt_tokens: int = flag_field(2048, "max prompt length in tokens, images included; longer prompts are "
                                        "dropped and counted", least=1)
    dtype: str = flag_field("auto", "compute dtype; auto: bfloat16 on a GPU, float32 on a CPU",
                            choices=("auto", "float32", "bfloat16"))


@dataclass(frozen=True)
class EvalConfig(InheritedConfig, ConnectionConfig):
    """Evaluation"""

    model: str = flag_field(REQUIRED, "model folder, hub id, run directory, checkpoint or PEFT adapter",
                            positional=True)
    data: str = flag_field(REQUIRED, "parquet files to evaluate on (default: the run's --eval-data)", metavar="FILE")
    out: str = flag_field(REQUIRED, "output directory for eval.json, predictions.jsonl and report.html", metavar="DIR")
    baseline: tuple[str, ...] = flag_field((), "other models to evaluate on the same examples, for paired comparisons",
                                           metavar="MODEL")
    ablate: tuple[str, ...] = flag_field((), "evaluate again with blank (white) images, shuffled images (those of "
                                         "other examples), none (no images), or changed frames of videos",
                                         choices=tuple(ABLATIONS))
    group_by: tuple[str, ...] = flag_field((), "also report the metric for each value of these data columns",
                                           metavar="COLUMN")
    limit: int | None = flag_field(None, "evaluate only the first N examples", least=1)
    samples: int = flag_field(1, "responses per example (K)", least=1)
    temperature: float | None = flag_field(None, "sampling temperature (default: 0 with --samples 1, else 1)", least=0)
    top_p: float = flag_field(1.0, "nucleus sampling probability mass; 1: off", above=0, most=1)
    rollout: str = flag_field("auto", "rollout engine; auto: vllm on a GPU if it is installed, else hf (default: auto, "
                              "or server for a run that trained on servers)", choices=ENGINES)
    vllm: tuple[str, ...] = flag_field((), VLLM_HELP, metavar="KEY=VALUE")
    seed: int = flag_field(0, "random seed for sampling")
    grader: tuple[str, ...] = flag_field(("ours",), "also grade answers as EasyR1 or verl do for Geometry3K; ours: "
                                         "the task's own reward, always included",
                                         choices=("ours", "easyr1", "verl"))


@dataclass(frozen=True)
class PlotRunsConfig:
    """Plots of runs"""

    plot_runs: tuple[str, ...] = flag_field(REQUIRED,
                                            "run directories; runs that differ only in --seed share one curve")
    out: str = flag_field(REQUIRED, "directory for curves.png", metavar="DIR")


# ----------------------------------------------------------------------------------------------------------------------
# One model on all examples


@dataclass
class Evaluation:
    """The evaluation of a model on examples, which are divided over the ranks."""

    engine: Engine
    examples: Sequence[Example]
    processor: Processor
    grader: Grader
    ctx: DistContext
    sampling: SamplingParams
    samples: int = 1  # responses per example
    blank_images: bool = False  # white images instead of the examples' own
    # passed to rewards: a run's last curriculum stage and step, so that scores of its checkpoints are comparable
    stage: CurriculumStage = CurriculumStage()
    step: int = 0
    # returns the same on all ranks; if true, the evaluation ends before the next chunk, without records
    should_stop: Callable[[], object] = lambda: False
    interrupted_at_step: int = 0  # the step of an evaluation that was cut short
    reset_fn: ResetFn = identity  # returns what an environment starts an example with
    group_by: Sequence[str] = ()
    title: str = "evaluating"

    def collect_records(self) -> list[dict]:
        """Sample and grade all examples. Return one record per example, in order, on rank 0, and [] elsewhere."""
        local = list(enumerate(self.examples))[self.ctx.rank :: self.ctx.world]
        # all ranks make the same number of chunks, some of them empty, because engines that span ranks are collective
        starts = range(0, math.ceil(len(self.examples) / self.ctx.world), CHUNK_EXAMPLES)
        records, finished = [], RolloutCounter(self.grader.submit)
        with progress.sampling(lambda: finished, len(local) * self.samples, self.title):
            for start in starts:
                if self.should_stop():
                    return []
                records += self.evaluate_chunk(start, local[start : start + CHUNK_EXAMPLES], finished)
        all_ranks = replace(self.ctx, tp=1)  # with tensor parallelism, too, each process has different examples
        return sorted(all_ranks.gather_to_main(records), key=lambda record: record["index"])

    def evaluate_chunk(self, start: int, chunk: Sequence[tuple[int, Example]], finished: RolloutCounter) -> list[dict]:
        """Return the records of a chunk of (index, example)."""
        context = RewardContext(-1 - start, self.step, self.stage)  # negative, because training batches count from 0
        examples = [example for _, example in chunk]
        prompts = make_prompts(examples, self.processor, self.blank_images, self.reset_fn, context)
        with self.grader.preserve_counts():  # since metrics count only responses of training
            rollouts = self.engine.generate(prompts, self.samples, self.sampling, finished.add)
            results = self.grader.collect(rollouts)
            self.grader.check_worked(rollouts, self.ctx.gather)
        graded = []
        for i, (r, rewards) in enumerate(zip(rollouts, results, strict=True)):
            r.finish_reason = "error" if i in self.grader.failed else r.finish_reason
            graded.append((r, rewards or {"reward": 0.0}))  # a failed reward counts as wrong
        records = []
        for k, (index, example) in enumerate(chunk):
            responses = graded[k * self.samples : (k + 1) * self.samples]
            records.append(make_record(index, example, responses, self.group_by))
        return records

    def is_due(self, cfg: Any, step: int) -> bool:
        """Return whether training evaluates after this step; `cfg` is train.py's RunConfig."""
        return bool(self.examples) and (step == cfg.steps or (cfg.eval_every > 0 and step % cfg.eval_every == 0))

    def run_during_training(self, log: RunLog, timer: StepTimer, step: int) -> dict[str, float]:
        """Evaluate during training. Return metrics on rank 0, and {} elsewhere or if the run was asked to end."""
        with timer("eval", interruptible=False):
            records = self.collect_records()
            ablated = {}
            for kind in log.cfg.run.ablations_at(step):
                ablation = Ablation(kind, self.examples, self.reset_fn, log.cfg.run.seed)
                change = {"blank_images": ablation.blank, "examples": ablation.examples, "reset_fn": ablation.reset_fn}
                ablated[kind] = replace(self, **change).collect_records()
        self.interrupted_at_step = step if self.should_stop() else 0
        if self.interrupted_at_step or not records:
            return {}
        summary = summarise(records)
        metric = summary["metric"]
        tqdm.write(f"greedy evaluation after step {step}: {format_summary(summary)[0]}")
        if ablated:
            summary["reliance"] = reliance = visual_reliance(records, ablated, metric)
            looking = looking_metrics(log.out, read_rows(log.path), records, ablated, summary)
            reliance["said"] += f" {LEARNT_SHORTCUT}" if looking.get("shortcut") else ""
            tqdm.write(textwrap.fill(reliance["said"], 100))
        log.save_evaluation(step, records, summary, self.examples, self.reset_fn, ablated)
        metrics = {name: summary[name] for name in ("n", "reward", "truncated", "failed")}
        metrics |= with_ends(metric, summary, metric)
        metrics |= {f"{task}/{metric}": values[metric] for task, values in summary.get("by_task", {}).items()}
        if "task_mean" in summary:
            metrics["task_mean"] = summary["task_mean"][metric]
        metrics |= {f"rewards/{name}": values["mean"] for name, values in summary["rewards"].items()}
        metrics |= {f"{metric}/{kind}": values[metric] for kind, values in summary["by_answer_type"].items()}
        if ablated:
            metrics |= looking
        return {f"eval/{name}": value for name, value in metrics.items()}


# ----------------------------------------------------------------------------------------------------------------------
# The command


def parse_args(argv: list[str] | None = None) -> EvalConfig | PlotRunsConfig:
    """Return the settings of a command line. Flags that are not passed have the run's values, else their defaults."""
    if "--plot-runs" in (sys.argv[1:] if argv is None else argv):
        parser = FlagParser(__doc__, prog="eval.py --plot-runs")
        add_flags(parser, PlotRunsConfig)
        return build_config(PlotRunsConfig, vars(parser.parse_args(argv)))
    parser = FlagParser(__doc__, essential="model data out baseline ablate limit samples temperature max_new_tokens "
                        "rollout reward env")
    add_flags(parser, EvalConfig)
    args = vars(parser.parse_args(argv))
    for path in args.get("baseline", ()):
        resolve_model(path, "--baseline")
    run = resolve_model(args["model"])[2]
    data = {"data": run["eval_data"]} if run.get("eval_data") else {}
    data |= {"rollout": "server"} if run.get("rollout") == "server" else {}  # addresses must be passed again
    inherited = load_run_settings(fields(InheritedConfig), run, args, args["model"])
    cfg = build_config(EvalConfig, inherited | data | args)
    cfg = replace(cfg, **absolute_files(vars(cfg)))
    need(cfg.rollout != "server" or cfg.servers, "--rollout server (the default for a run that trained with it) needs "
         "--servers URL...; add it, or use --rollout hf or vllm")
    if cfg.temperature is None:
        cfg = replace(cfg, temperature=0.0 if cfg.samples == 1 else 1.0)
    need(cfg.samples == 1 or cfg.temperature > 0,
         f"--samples {cfg.samples} at --temperature 0 would be copies of one response; raise --temperature")
    return cfg


def describe_run_settings(cfg: EvalConfig) -> list[str]:
    """Return a line with the settings that equal the run's and are not defaults, and a line with those that differ."""
    run = resolve_model(cfg.model)[2]
    if not run:
        return []
    names = [*(f.name for f in fields(InheritedConfig)), "rollout"]
    greedy = {"temperature": 0.0, "samples": 1, "top_p": 1.0, "limit": None}  # as in training
    run_settings = {name: run[name] for name in names if name in run} | {"data": run.get("eval_data")} | greedy
    changed = diff_settings(run_settings, vars(cfg))
    same = [format_flag(name, value) for name, value in run_settings.items() if name not in greedy | changed
            and value not in (None, [], getattr(EvalConfig, name, None))]  # fmt: skip
    others = []
    for name, (old, new) in changed.items():
        value = "none" if old in (None, []) else format_flag(name, old).partition(" ")[2]
        others.append(f"{format_flag(name, new)} (run: {value})")
    lines = {"same as in training": same, "unlike the run's evaluations": others}
    return [f"{title}: {', '.join(flags)}" for title, flags in lines.items() if flags]


def check_columns(cfg: EvalConfig, examples: Sequence[Example]) -> None:
    """Raise UserError unless the examples have images for --ablate and the columns of --group-by."""
    check_ablations("--ablate", cfg.ablate, examples, cfg.data, cfg.env)
    columns = sorted(set(chain.from_iterable(example.extra for example in examples)))
    for column in cfg.group_by:
        need(column in columns,
             f"--group-by {column}: no such column in {cfg.data}; it has {', '.join(columns) or 'none'}")


def evaluation_settings(cfg: EvalConfig) -> dict:
    """Return the settings that identify an evaluation, as stored in eval.json, with the checkpoints that it resolved
    (a run's newest one changes)."""
    ignored = ("out", *ConnectionConfig.__annotations__)
    settings = {name: value for name, value in asdict(cfg).items() if name not in ignored}
    checkpoints = [str(resolve_model(path)[1] or path) for path in (cfg.model, *cfg.baseline)]
    return settings | {"checkpoints": checkpoints}


def check_output_dir(cfg: EvalConfig) -> None:
    """Raise UserError if --out is not writable, is a run, or holds another evaluation; repeating one is fine."""
    out = Path(cfg.out)
    check_writable(out, f"--out {cfg.out}")
    need(not (out / "run.json").exists(),
         f"--out {out} is a run, whose report.html this would replace; choose another folder, such as {out / 'eval'}")
    if not (out / "eval.json").is_file():
        return
    existing = read_json(out / "eval.json", "; remove it, or choose another folder").get("settings", {})
    for name, (old, new) in diff_settings(existing, evaluation_settings(cfg)).items():
        raise UserError(f"--out {out} holds another evaluation: {flag_name(name)} was {old} and is {new}; choose "
                        "another folder, or remove it")


def load_engine(cfg: EvalConfig, path: str, processor: Processor, examples: ExampleList, env: Any, ctx: DistContext,
                running: Engine | None = None) -> Engine:
    """Return the engine of --rollout with the weights of a model, run or checkpoint, for prompts from `examples`. Reuse
    `running`, an engine of the same architecture, if there is one."""
    dtype = resolve_dtype(cfg.dtype, ctx.device)
    weights = TrainedWeights(path, dtype)
    if running is not None:
        engine, running.processor = running, processor
    else:
        sizes = size_limits([examples], processor, cfg.max_new_tokens, env.episode_limits if env else None)
        kwargs = {"vocab_size": weights.hf.config.get_text_config().vocab_size, "trained_tower": True}
        kwargs |= {"family_paths": weights.cfg.family_paths, "out": Path(cfg.out)}
        servers = build_config(RolloutServerConfig, vars(cfg))
        engine = make_engine(cfg.rollout, weights.cfg.model, processor, ctx, dtype, sizes, cfg.vllm, servers, **kwargs)
    engine.sync(lambda trainable_only: weights)
    print0(f"loaded {weights.hf.loaded_from}")
    return engine


def architecture(path: str) -> str:
    """Return the part of a model's config that determines the names and shapes of its weights, as JSON."""
    config = load_config(resolve_model(path)[0]).to_json_string(use_diff=False)
    irrelevant = r'"(_\w+|dtype|torch_dtype|transformers_version|architectures)": (\[[^]]*\]|.*)'
    return re.sub(irrelevant, "", config)


def main(cfg: EvalConfig | PlotRunsConfig) -> dict:
    """Evaluate the models, write --out, and return the summary (on rank 0), or plot runs."""
    if isinstance(cfg, PlotRunsConfig):
        plug_in("report.page.plots", "--plot-runs").plot_runs(list(map(Path, cfg.plot_runs)), Path(cfg.out))
        return {}
    ctx = setup_distributed()
    cfg = replace(cfg, rollout=resolve_engine(cfg.rollout, ctx.device))
    run_on_rank0(lambda: check_output_dir(cfg))
    for line in describe_run_settings(cfg):
        print0(line)
    # All checks come before the first model is loaded. Baselines get images at the evaluated run's pixel limits.
    servers = build_config(RolloutServerConfig, vars(cfg))
    check_engine(cfg.rollout, cfg.vllm, servers, ModelConfig(model=cfg.model), ctx.world)
    graders = {name: plug_in("tasks._published", f"--grader {name}") for name in cfg.grader if name != "ours"}
    env = make_env_factory(cfg)
    reset_fn = env.reset_example if env else identity
    grader = Grader(cfg, Path(cfg.out), ctx.rank, ctx.world, has_environment=env is not None)
    paths = [cfg.model, *cfg.baseline]
    for path in cfg.baseline if cfg.rollout == "vllm" else ():
        need(architecture(path) == architecture(cfg.model),
             f"--baseline {path}: its architecture differs from {cfg.model}'s, and a process can run only one vLLM; "
             "evaluate it with a separate command, or use --rollout hf")
    processors = [Processor(resolve_model(path)[0], cfg.min_pixels, cfg.max_pixels) for path in paths]
    examples = load_examples(cfg.data, cfg, processors, grader, reset_fn, cfg.limit)
    check_videos(server_kind(cfg.rollout, servers), [examples], env)
    check_columns(cfg, examples)
    others = {task_name(example.data_source) or "none" for example in examples} - {"geo3k"}
    if graders and others:
        print0(f"warning: --grader {' '.join(graders)}: these rules are for boxed answers to Geometry3K, but "
               f"{cfg.data} has tasks {', '.join(sorted(others))}")
    step, stage = load_last_stage(cfg.curriculum, examples)
    grader.dry_run(ctx.is_main, [(step, stage)])
    step = resolve_model(cfg.model)[2].get("steps", step)  # as in the run's evaluations
    ablations = [(name, Ablation(name, examples, reset_fn, cfg.seed)) for name in ("", *cfg.ablate)]
    sampling = SamplingParams(cfg.max_new_tokens, cfg.temperature, cfg.top_p, cfg.seed)
    results: list[list[dict]] = []  # of the model, of its ablations, of the baselines
    running = None
    for path, processor in zip(paths, processors, strict=True):
        engine = load_engine(cfg, path, processor, examples, env, ctx, running)
        player = plug_in("envs._episodes", "--env").EpisodeEngine(engine, env, processor) if env else engine
        for name, ablation in ablations[:1] if results else ablations:
            args = (player, ablation.examples, processor, grader, ctx, sampling, cfg.samples, ablation.blank, stage)
            kwargs = {"step": step, "reset_fn": ablation.reset_fn, "group_by": cfg.group_by,
                      "title": f"{Path(path).name} {name}".rstrip()}
            results.append(Evaluation(*args, **kwargs).collect_records())
        engine.sleep()
        running = engine if cfg.rollout == "vllm" else None
        del engine, player, args  # frees an hf engine, so that one model is in memory at a time
    if not ctx.is_main:
        return {}
    differ = {name: [rules.add_published_grades(name, records) for records in results][0]
              for name, rules in graders.items()}  # fmt: skip
    summary = summarise_all(cfg, results) | {"left_out": examples.left_out, "settings": evaluation_settings(cfg)}
    summary["graders_differ"] = differ
    # printed before anything is written, so that a full disk does not lose the results
    print("\n".join(format_summary(summary)))
    uids = {record["uid"] for record in select_records(results[0], summary)}
    write_eval_report(cfg, summary, results, {e.uid: reset_fn(e) for e in examples if e.uid in uids})
    return summary


def summarise_all(cfg: EvalConfig, results: Sequence[list[dict]]) -> dict:
    """Return the content of eval.json. `results` are the records of the model, its ablations and the baselines."""
    records, n = results[0], 1 + len(cfg.ablate)
    header = {"path": cfg.model, "data": cfg.data, "temperature": cfg.temperature}
    if checkpoint := resolve_model(cfg.model)[1]:
        header["checkpoint"] = checkpoint.name
    metric = record_metric(list(chain(*results)))
    summary = header | summarise(records, metric)
    if cfg.baseline:
        summary["baselines"] = [
            {"path": path, **summarise(baseline, metric), **compare_with_baseline(records, baseline, metric)}
            for path, baseline in zip(cfg.baseline, results[n:], strict=True)
        ]
    if cfg.ablate:
        summary["reliance"] = visual_reliance(records, dict(zip(cfg.ablate, results[1:n], strict=True)), metric)
    return summary


def write_eval_report(cfg: EvalConfig, summary: dict, results: Sequence[list[dict]],
                      examples: Mapping[str, Example]) -> None:
    """Write the files of --out. `results` are as in `summarise_all`; `examples` by uid are as the model saw them."""
    out, checkpoint = Path(cfg.out), resolve_model(cfg.model)[1]
    names = [f"_ablate_{name}" for name in cfg.ablate] + [f"_baseline_{i}" for i in range(1, len(cfg.baseline) + 1)]
    titles = [ABLATIONS[name] for name in cfg.ablate] + [f"baseline {path}" for path in cfg.baseline]
    write_text(out / "eval.json", json.dumps(summary, indent=2) + "\n")
    for name, records in zip(["", *names], results, strict=True):
        write_records(out / f"predictions{name}.jsonl", records)
    written = [out / "eval.json", out / "predictions.jsonl"]
    if page := find_drawing("page"):  # last, so that nothing is lost if it fails
        run = checkpoint.resolve().parent.parent if checkpoint else None
        title = f"{Path(cfg.model).name} on {Path(cfg.data).name}"
        others = dict(zip(titles, results[1:], strict=True))
        content = ReportPage(title, results[0], examples, summary, others=others, folder=out / "images", run=run)
        page.write_pages(out / "report.html", content)
        written.append(out / "report.html")
    print(f"wrote {', '.join(map(str, written))}")


if __name__ == "__main__":
    run_script(main, parse_args)
