"""Comparison of our loop with TRL's GRPOTrainer on the CPU, with the same toy Qwen2.5-VL, images, group size, lengths,
reward and optimizer.

    pip install -c requirements.txt -r requirements-dev.txt
    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 python benchmarks/vs_trl.py                  # equality, then speed and memory
    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 python benchmarks/vs_trl.py --only equality --json equality.json
    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 python benchmarks/vs_trl.py --only speed --configs B --steps 8

Equality: TRL samples a batch. Its responses are cut to different lengths and its old log-probabilities are shifted, so
that ratios are clipped. On this batch TRL's per-token log-probabilities, per-token weighted losses and gradients are
compared with ours, which are computed from the same pixels, token ids and advantages, for each of LOSS_TYPES, with a
frozen and with a trained vision tower.

Speed: each side runs in a separate process with one thread. They run their steps in turn, and the minimum of each part
is reported. The end token cannot be sampled on either side, so both generate exactly rollouts x new tokens. TRL's step
is timed from on_step_begin to on_step_end: its data loading and logging are not counted, but ours (decoding images,
metrics) are.
  generate   TRL: model.generate; ours: HFEngine.generate (log-probabilities and texts included)
  train      loss, backward, clipping, AdamW
  rest       images and prompts, rewards, advantages, packing, copying the weights to the engine
The column "bound" is the ratio that arithmetic allows: TRL's FLOPs over ours, by packing.flop_costs. TRL sends the
prompt and its images through the model once per response, padded to the longest prompt, both in sampling and in
training. We send them once per prompt, and each image through the frozen tower only once in total. A ratio above its
bound means that we do more FLOP/s than TRL. On both sides the tokens in the language model's forward are counted,
including padding; the counts must equal the formula's.
Memory: peak resident set of each process above what it held before its first step.
"""

import argparse
import hashlib
import io
import json
import math
import multiprocessing as mp
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from PIL import Image  # noqa: E402

import demo  # noqa: E402
import grpo  # noqa: E402
import train  # noqa: E402
from engines.hf import HFEngine  # noqa: E402
from model import ImageInput, Policy, Processor, VisionCache, load_hf  # noqa: E402
from packing import Packer, flop_costs, group_flops, make_token_batch  # noqa: E402
from parallel.models import Models  # noqa: E402
from parallel.sharding import FullParameters, apply_fsdp, make_optimizer  # noqa: E402
from prepare_data import Example  # noqa: E402
from report.log import SkippedUpdates  # noqa: E402
from report.metrics import rollout_metrics  # noqa: E402
from rollout import GroupPool, Prompt, Rollout, SamplingParams, make_prompts  # noqa: E402
from tasks.shapes import encode_png, shapes_rows  # noqa: E402
from utils import Meter, setup_distributed  # noqa: E402

LR, MAX_GRAD_NORM = 1e-4, 1.0
TOWERS = ("frozen", "trained")
# Our flags -> TRL's settings. CISPO's bound is a ratio in TRL and a distance from 1 in our code; TRL has no lower one.
LOSS_TYPES = {
    "token": ("", {"loss_type": "dapo"}),
    "seq": ("--loss-agg seq", {"loss_type": "grpo"}),
    "const": ("--loss-agg const", {"loss_type": "dr_grpo"}),
    # bnpo weights all tokens of a batch equally; here the batch is the whole step
    "bnpo": ("--algo-args dual_clip=1.3", {"loss_type": "bnpo", "delta": 1.3}),
    "higher": ("--clip-high 0.28", {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        "--algo gspo --clip-low 0.1 --clip-high 0.15",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.15},
    ),
    "cispo": ("--algo cispo --clip-high 0.2", {"loss_type": "cispo", "epsilon_high": 1.2}),
    "sapo": ("--algo sapo", {"loss_type": "sapo"}),
    # GRPO's own KL term; TRL's default multiplies it by the ratio (DeepSeek-V3.2)
    "kl": ("--kl-coef 0.04", {"loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": False}),
}


@dataclass(frozen=True)
class Config:
    hidden: int
    layers: int
    pixels: int  # per side
    prompts: int
    group: int
    new_tokens: int
    micro_tokens: int  # our token budget of a micro-batch
    speed_bar: float  # how many times faster than TRL the whole step must be
    memory_bar: float | None  # max fraction of TRL's memory

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group


CONFIGS = {
    "A": Config(64, 3, 112, 2, 8, 32, 1024, 1.5, None),
    "B": Config(256, 4, 224, 4, 8, 32, 1300, 2.5, 0.6),
    "C": Config(256, 4, 224, 4, 8, 64, 1300, 2.5, 0.6),  # B with longer responses, which have less to share
    "B-long": Config(256, 4, 224, 6, 4, 48, 1300, 2.2, 0.6),  # longer responses, and fewer of them share a prompt
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--short", action="store_true", help="only check that it runs: one loss, two tiny steps")
    p.add_argument("--only", choices=("equality", "speed"), help="run only this part")
    p.add_argument("--configs", nargs="+", choices=tuple(CONFIGS), default=list(CONFIGS), help="for the speed part")
    p.add_argument("--steps", type=int, default=8, help="steps of each side; the first is not counted (warmup)")
    p.add_argument("--prompts", type=int, help="prompts per step, instead of the configuration's")
    p.add_argument("--group", type=int, help="responses per prompt, instead of the configuration's")
    p.add_argument("--new-tokens", type=int, help="tokens of each response, instead of the configuration's")
    p.add_argument("--micro-tokens", type=int, help="our token budget of a micro-batch, instead of the configuration's")
    p.add_argument("--trl-accumulation", type=int, default=1, help="micro-batches into which TRL splits its rollouts")
    p.add_argument(
        "--trl-checkpointing", action="store_true", help="use gradient checkpointing in TRL (TRL's default; slower)"
    )
    p.add_argument("--profile", metavar="FILE", help="write a cProfile of our steps (which slows them down)")
    p.add_argument("--json", metavar="FILE", help="write all numbers to this file")
    args = p.parse_args(argv)
    if args.short:
        args.configs, args.steps, args.prompts, args.group, args.new_tokens = ["A"], 2, 2, 4, 8
    return args


# ----------------------------------------------------------------------------------------------------------------------
# Code for both sides


def rewards(n: int) -> list[float]:
    """Return the rewards of a batch. They all differ, whatever was sampled, so every response has a gradient."""
    return [i * 0.618 % 1 for i in range(n)]


def trl_reward(completions: list, **_: object) -> list[float]:
    return rewards(len(completions))


def examples(n: int, pixels: int) -> list[Example]:
    """Return rows of the shapes task with enlarged images."""
    result = []
    for row in shapes_rows(n, "train", seed=0):
        image = Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB").resize((pixels, pixels))
        extra, truth = row["extra_info"], row["reward_model"]["ground_truth"]
        result.append(Example(extra["uid"], row["data_source"], row["prompt"], [encode_png(image)], truth, extra))
    return result


def unsampled_ids(processor) -> list[int]:
    """Return the tokens that neither side may sample in the speed part: vision placeholders and the end token."""
    return sorted({*processor.banned_ids, *processor.eos_ids})


class Clock:
    """A timer that sums the seconds per name since the last `pop`."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def wrap(self, name: str, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            with self(name):
                return function(*args, **kwargs)

        return timed

    def pop(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


class TokenCounter:
    """A counter of the tokens that go through language models: rows x columns of their inputs, padding included.
    Forwards with gradients count as "train", others as "generate"."""

    def __init__(self, *models: torch.nn.Module):
        self.counts = {"generate": 0, "train": 0}
        for hf in models:
            language = hf.get_submodule(hf.family.language)
            language.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: torch.nn.Module, inputs: tuple, named: dict) -> None:
        part = "train" if torch.is_grad_enabled() else "generate"
        self.counts[part] += named["inputs_embeds"].shape[:2].numel()

    def pop(self) -> dict[str, int]:
        counts, self.counts = self.counts, {"generate": 0, "train": 0}
        return counts


def arithmetic(config: Config, hf_config, prompt_tokens: Sequence[int], patches: int) -> dict[tuple[str, str], dict]:
    """Return, for each side and part, the language tokens and the FLOPs of a step on prompts of these lengths, each
    with an image of `patches` patches. The last token of a response goes through the model only in TRL's training."""
    work = {}
    padded, new = [max(prompt_tokens)] * config.prompts, config.new_tokens
    # the frozen tower has no backward; TRL runs it in both parts, we cache its features
    for side, part, lengths, share, inputs, forwards, vision in (
        ("trl", "generate", padded * config.group, 1, new - 1, 1, 1.0),
        ("trl", "train", padded * config.group, 1, new, 3, 1 / 3),
        ("ours", "generate", padded, config.group, new - 1, 1, 1.0),
        ("ours", "train", prompt_tokens, config.group, new - 1, 3, 0.0),
    ):
        costs = flop_costs(hf_config, vision)
        flops = sum(group_flops(costs, n, [patches], [inputs] * share, new * share) for n in lengths)
        work[side, part] = {"tokens": sum(lengths) + config.rollouts * inputs, "flops": forwards * flops}
    return work


def status_kib(field: str) -> int:
    return next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)
    )


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to what is resident now


# ----------------------------------------------------------------------------------------------------------------------
# TRL's side


def make_trainer(model: Path, rows: list[Example], out: Path, **changes):
    """Return a GRPOTrainer without vLLM, KL term, evaluation, logging and files. `changes` override its settings;
    `reward` and `train_vision` among them are ours."""
    import datasets
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from trl import GRPOConfig, GRPOTrainer

    class ImagesOnly(transformers.Qwen2_5_VLProcessor):
        """The processor without its video processor, which needs torchvision."""

        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

        def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
            super().__init__(image_processor, tokenizer, chat_template=chat_template, **kwargs)

        def check_argument_for_proper_class(self, *_) -> None:
            pass

    tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")  # TRL requires left padding
    processor = ImagesOnly(
        Qwen2VLImageProcessorPil.from_pretrained(model), tokenizer, chat_template=tokenizer.chat_template
    )
    settings = {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "use_vllm": False,
        "beta": 0.0,
        "temperature": 1.0,
        "top_k": 0,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "gradient_checkpointing": False,
        "num_iterations": 1,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "seed": 0,
    }
    hf = load_hf(str(model))
    hf.model.visual.requires_grad_(changes.pop("train_vision", False))
    reward = changes.pop("reward", trl_reward)
    data = datasets.Dataset.from_dict(
        {
            "prompt": [
                [{"role": "user", "content": row.messages[0]["content"].removeprefix("<image>")}] for row in rows
            ],
            "image": [Image.open(io.BytesIO(row.images[0])) for row in rows],
            "uid": [row.uid for row in rows],
        }
    )
    config = GRPOConfig(**(settings | changes))
    trainer = GRPOTrainer(model=hf, reward_funcs=reward, args=config, train_dataset=data, processing_class=processor)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def trl_worker(pipe, model: Path, config: Config, args: argparse.Namespace) -> None:
    import transformers

    torch.set_num_threads(1)
    clock, token_counts = Clock(), []

    class StepOnMessage(transformers.TrainerCallback):
        """Run one step for each message from the other end of the pipe."""

        def on_step_begin(self, *_, **__) -> None:
            pipe.recv()
            clock.pop()
            if not token_counts:
                self.before = status_kib("VmRSS")
                reset_peak()
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__) -> None:
            step, seconds = time.perf_counter() - self.began, clock.pop()
            pipe.send(
                {
                    "step": step,
                    "generate": seconds["generate"],
                    "train": step - seconds["prepare"],
                    "rest": seconds["prepare"] - seconds["generate"],
                    "tokens": token_counts[-1],
                    "computed": counter.pop(),
                    "kib": status_kib("VmHWM") - self.before,
                    "peak_kib": status_kib("VmHWM"),
                }
            )

    with tempfile.TemporaryDirectory() as out:
        unsampled = unsampled_ids(Processor(str(model)))
        trainer = make_trainer(
            model,
            examples(config.prompts * args.steps, config.pixels),
            Path(out),
            max_steps=args.steps,
            per_device_train_batch_size=config.rollouts // args.trl_accumulation,
            gradient_accumulation_steps=args.trl_accumulation,
            num_generations=config.group,
            max_completion_length=config.new_tokens,
            generation_kwargs={"suppress_tokens": unsampled},
            gradient_checkpointing=args.trl_checkpointing,
        )
        counter = TokenCounter(trainer.model)
        generate = clock.wrap("generate", trainer.model.generate)

        def count_tokens(*positional, **named):
            ids = generate(*positional, **named)
            token_counts.append(int(ids.shape[0] * (ids.shape[1] - named["input_ids"].shape[1])))
            return ids

        trainer.model.generate = count_tokens
        trainer._prepare_inputs = clock.wrap("prepare", trainer._prepare_inputs)
        trainer.add_callback(StepOnMessage())
        pipe.send("ready")
        trainer.train()


# ----------------------------------------------------------------------------------------------------------------------
# Our side


def our_settings(config: Config, more_flags: str = "") -> train.Config:
    """Return the parsed flags of train.py."""
    named = {
        "prompts-per-step": config.prompts,
        "group-size": config.group,
        "max-new-tokens": config.new_tokens,
        "lr": LR,
        "micro-tokens": config.micro_tokens,
        "max-grad-norm": MAX_GRAD_NORM,
        "weight-decay": 0.0,
    }
    flags = ["--model", "-", "--data", "-", "--out", "-", "--steps", "1"]
    for name, value in named.items():
        flags += [f"--{name}", str(value)]
    return train.parse_args([*flags, *more_flags.split()])


def our_worker(pipe, model: Path, config: Config, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    ctx = setup_distributed()
    cfg = our_settings(config)
    algo = cfg.algo
    processor = Processor(str(model))
    rows = examples(config.prompts * args.steps, config.pixels)
    cache = VisionCache(cfg.model.vision_cache_gb * 2**30)
    policy = Policy(load_hf(str(model)), processor, cache=cache)
    policy.banned = torch.tensor(unsampled_ids(processor))
    policy.train()
    apply_fsdp(policy, ctx.device, torch.float32)
    models = Models(policy, make_optimizer(policy, cfg.optim.lr, cfg.optim.weight_decay))
    engine = HFEngine(load_hf(str(model)), processor, ctx.device, vision_cache=cache)
    engine.banned = policy.banned
    packer = Packer(config.micro_tokens, processor.image_token_id, flop_costs(policy.hf.config))
    skipped = SkippedUpdates(model, ctx)
    clock, counter = Clock(), TokenCounter(policy.hf, engine.hf)

    def step(number: int) -> dict:
        """Run the phases of a training step as in train.py."""
        meter = Meter()
        pool = GroupPool(algo, cfg.rollout, number, ctx)
        with clock("prompts"):
            prompts = make_prompts(rows[number * config.prompts : (number + 1) * config.prompts], processor)
        with clock("generate"):
            engine.wake()
            rollouts = engine.generate(prompts, algo.group_size, SamplingParams(config.new_tokens, seed=number))
            engine.sleep()
        pool.add(rollouts, [{"reward": reward} for reward in rewards(len(rollouts))])
        with clock("pack"):
            batch = train.pack_batch(pool, cfg, packer, ctx, meter)
        train.compute_logprobs_and_values(batch, models, cfg)
        train.set_advantages(batch, algo, algo.kl_coef, ctx, meter)
        with clock("train"):
            train.update_policy(models, batch, cfg, train.TrainState(step=number), ctx, meter, skipped)
        with clock("sync"):
            engine.load_weights(FullParameters(policy, trainable_only=True))
        metrics = rollout_metrics(pool, {}) | meter.reduce(ctx)
        assert metrics["update/tokens"] == metrics["rollout/tokens"], "rollouts without a gradient are not packed"
        work = arithmetic(
            config, policy.hf.config, [len(p.token_ids) for p in prompts], math.prod(prompts[0].images[0].grid_thw)
        )
        return {"tokens": sum(len(r.response) for r in rollouts), "computed": counter.pop(), "arithmetic": work}

    pipe.send("ready")
    before, profile = status_kib("VmRSS"), None
    reset_peak()
    for number in range(args.steps):
        pipe.recv()
        if args.profile and number == 1:
            import cProfile

            profile = cProfile.Profile()
        clock.pop()
        began = time.perf_counter()
        counts = profile.runcall(step, number) if profile else step(number)
        seconds, total = clock.pop(), time.perf_counter() - began
        pipe.send(
            {
                "step": total,
                "generate": seconds["generate"],
                "train": seconds["train"],
                "rest": total - seconds["generate"] - seconds["train"],
                "kib": status_kib("VmHWM") - before,
                "peak_kib": status_kib("VmHWM"),
            }
            | counts
        )
    if profile:
        profile.dump_stats(args.profile)


def speed(name: str, config: Config, args: argparse.Namespace) -> dict:
    """Run the steps of both sides in turn. Print and return the minimum seconds, and the memory."""
    context, measured = mp.get_context("spawn"), {"trl": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        demo.make_model(model, hidden=config.hidden, layers=config.layers)
        pipes = {}
        for side, worker in (("trl", trl_worker), ("ours", our_worker)):
            pipes[side], child_end = context.Pipe()
            context.Process(target=worker, args=(child_end, model, config, args), daemon=True).start()
            child_end.close()
            pipes[side].recv()  # ready
        for _ in range(args.steps):
            for side, pipe in pipes.items():
                pipe.send("step")
                measured[side].append(pipe.recv())
        parameters = sum(p.numel() for p in load_hf(str(model)).parameters())
    tokens = {row["tokens"] for row in chain.from_iterable(measured.values())}
    assert tokens == {config.rollouts * config.new_tokens}, f"the sides generated different numbers of tokens: {tokens}"
    works = [row.pop("arithmetic") for row in measured["ours"]]
    for number, work in enumerate(works):
        for (side, part), computed in work.items():
            counted = measured[side][number]["computed"][part]
            # responses that begin with the same token share it, which the arithmetic cannot predict
            close = 0 <= computed["tokens"] - counted <= 0.01 * computed["tokens"]
            assert close, f"{side}, {part}: {counted} tokens, expected {computed['tokens']}"
    # the first step is a warmup and not counted
    mean = {side: {quantity: {} for quantity in ("tokens", "flops")} for side in measured}
    for side, part in works[0]:
        for quantity, numbers in mean[side].items():
            numbers[part] = statistics.mean(work[side, part][quantity] for work in works[1:])
    for numbers in chain.from_iterable(quantities.values() for quantities in mean.values()):
        numbers["step"] = sum(numbers.values())
    bound = {part: mean["trl"]["flops"][part] / n for part, n in mean["ours"]["flops"].items()}
    best = {
        side: {part: min(row[part] for row in rows[1:]) for part in ("step", "generate", "train", "rest")}
        | {"mib": rows[-1]["kib"] / 1024, "peak_mib": rows[-1]["peak_kib"] / 1024}
        for side, rows in measured.items()
    }
    ratio = {part: best["trl"][part] / best["ours"][part] for part in best["ours"]}
    print(
        f"\n{name}: {parameters / 1e6:.2f} M parameters (hidden {config.hidden}, {config.layers} layers), "
        f"{config.pixels}-pixel images, {config.prompts} prompts x {config.group} = {config.rollouts} rollouts of "
        f"{config.new_tokens} tokens; minimum of {args.steps - 1} interleaved steps, one thread"
    )
    print(f"{'seconds':22} {'TRL':>8} {'ours':>8} {'ratio':>7} {'bound':>7}")
    for part in ("step", "generate", "train", "rest"):
        bound_cell = f" {bound[part]:6.2f}x" if part in bound else ""
        print(f"{part:22} {best['trl'][part]:8.3f} {best['ours'][part]:8.3f} {ratio[part]:6.2f}x{bound_cell}")
    for label, quantity, unit in (("tokens", "tokens", 1), ("GFLOP", "flops", 1e9)):
        for part in ("step", "generate", "train"):
            theirs, ours = (mean[side][quantity][part] / unit for side in ("trl", "ours"))
            print(f"{f'{label}, {part}':22} {theirs:8.6g} {ours:8.6g} {theirs / ours:6.2f}x")
    print(
        f"{'MiB above start':22} {best['trl']['mib']:8.1f} {best['ours']['mib']:8.1f} {1 / ratio['mib']:6.2f} of "
        "TRL's"
    )
    print(
        f"{'MiB in total':22} {best['trl']['peak_mib']:8.1f} {best['ours']['peak_mib']:8.1f} "
        f"{1 / ratio['peak_mib']:6.2f} of TRL's"
    )
    verdicts = [f"step at least {config.speed_bar}x faster: {'yes' if ratio['step'] >= config.speed_bar else 'NO'}"]
    if config.memory_bar:
        verdicts.append(
            f"memory at most {config.memory_bar} of TRL's: {'yes' if 1 / ratio['mib'] <= config.memory_bar else 'NO'}"
        )
    print("; ".join(verdicts), flush=True)
    return {"parameters": parameters, "best": best, "ratio": ratio, "bound": bound, "work": mean, "rows": measured}


# ----------------------------------------------------------------------------------------------------------------------
# Equality


class _GradientsReady(Exception):
    """Raised to stop TRL's loop once its gradients are computed."""


def trl_gradients(model: Path, out: Path, name: str, train_vision: bool) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return TRL's own batch with what TRL computes on it, as (rows, columns) tensors, and the gradients by name."""
    import transformers

    batch: dict = {}

    class Stop(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__) -> None:
            raise _GradientsReady

    trainer = make_trainer(
        model,
        examples(4, 84),
        out,
        max_steps=1,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=12,
        train_vision=train_vision,
        max_grad_norm=0.0,
        **(LOSS_TYPES[name][1] | {"beta": 0.0}),  # with beta it would load a second model
    )
    compute_logps, compute_loss = trainer._get_per_token_logps_and_entropies, trainer._compute_loss

    def record_logps(*args, **kwargs):
        out = compute_logps(*args, **kwargs)
        batch["logp"], batch["entropy"] = out[0].detach().clone(), out[1].detach().clone()
        return out

    def changed_loss(hf, inputs):
        """Compute the loss on the sampled batch, but with changed lengths and old log-probabilities."""
        lengths = torch.arange(len(inputs["completion_ids"])) % 12 + 1
        inputs["completion_mask"] = inputs["completion_mask"] * (
            torch.arange(inputs["completion_ids"].shape[1]) < lengths[:, None]
        )
        inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
        with torch.no_grad():
            trainer.model.eval()
            compute_loss(hf, inputs)
            trainer.model.train()
        shift = torch.randn(batch["logp"].shape, generator=torch.Generator().manual_seed(1)) * 0.3
        # TRL accepts advantages per token. The loss is linear in them, so their gradient is each token's
        # loss / advantage
        per_token = inputs["advantages"][:, None].expand_as(shift).clone().requires_grad_()
        inputs |= {
            "old_per_token_logps": batch["logp"] + shift,
            "ref_per_token_logps": batch["logp"] - 2 * shift,
            "advantages": per_token,
        }
        trainer.beta = LOSS_TYPES[name][1].get("beta", 0.0)
        total = compute_loss(hf, inputs)
        batch.update(inputs, loss=total.detach())
        return total

    trainer._get_per_token_logps_and_entropies, trainer._compute_loss = record_logps, changed_loss
    trainer.add_callback(Stop())
    try:
        trainer.train()
    except _GradientsReady:
        pass
    batch["per_token_loss"] = (batch["advantages"] * batch["advantages"].grad).detach()
    return batch, {
        n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.requires_grad and p.grad is not None
    }


def compare(model: Path, name: str, train_vision: bool) -> dict[str, float]:
    """Return the largest differences of log-probabilities, per-token losses and gradients between TRL and us."""
    if not torch.distributed.is_initialized():
        setup_distributed()
    with tempfile.TemporaryDirectory() as out:
        theirs, their_grads = trl_gradients(model, Path(out), name, train_vision)
    processor = Processor(str(model))
    n, width = theirs["completion_ids"].shape
    mask = theirs["completion_mask"].bool()
    patches = theirs["image_grid_thw"].prod(dim=1).tolist()
    rollouts = []
    uids: dict[tuple, str] = {}
    positions: list[int] = []  # the position of each of our tokens in TRL's batch
    for b, pixels in enumerate(theirs["pixel_values"].split(patches)):
        prompt = theirs["prompt_ids"][b][theirs["prompt_mask"][b].bool()].tolist()
        response = theirs["completion_ids"][b][mask[b]].tolist()
        key = hashlib.sha1(pixels.numpy().tobytes()).hexdigest()
        uid = uids.setdefault((key, tuple(prompt)), f"prompt-{len(uids)}")
        grid = tuple(theirs["image_grid_thw"][b].tolist())
        image = ImageInput(key, None, grid, len(pixels) // processor.merge_size**2, lambda _, device, own=pixels: own)
        sampled = [True] * len(response)
        record = Prompt(uid, prompt, [image], None, [])
        rollouts.append(Rollout(record, 0, response, sampled, [0.0] * len(sampled), "stop"))
        positions += range(b * width, b * width + len(response))
    # use micro-batches so small that prompts are spread over several, and two updates, as one would clip nothing
    cfg = our_settings(Config(0, 1, 0, 4, 4, 12, 150, 0, None), f"--update-epochs 2 {LOSS_TYPES[name][0]}")
    n_tokens = [len(r.response) for r in rollouts]
    weights = grpo.token_weights(n_tokens, [True] * n, cfg.algo.loss_agg, cfg.rollout.max_new_tokens)
    tokens = make_token_batch(rollouts, weights)
    position_N = torch.tensor(positions)
    tokens.advantages = theirs["advantages"].detach().flatten()[position_N]
    tokens.old_logps = theirs["old_per_token_logps"].flatten()[position_N]
    tokens.ref_logps = theirs["ref_per_token_logps"].flatten()[position_N]
    micros = Packer(cfg.optim.micro_tokens, processor.image_token_id).pack(rollouts)
    policy_loss = grpo.PolicyLoss(cfg.algo, cfg.algo.kl_coef)
    policy = Policy(load_hf(str(model)), processor, "all" if train_vision else "none")
    # TRL bans tokens from sampling, but not from the normaliser of its loss
    policy.banned = torch.zeros(0, dtype=torch.long)
    policy.train()
    apply_fsdp(policy, torch.device("cpu"), torch.float32)
    ours = {name: torch.zeros(n * width) for name in ("logp", "entropy", "per_token_loss")}
    loss = 0.0
    clipped = 0.0
    for micro in micros:
        tokens_K = tokens[micro.token_index_K]
        out = policy(micro, 1.0, policy_loss, tokens_K)
        out.loss.backward()
        weighted_K, indicators = policy_loss(out.logp_K, out.entropy_K, tokens_K)
        loss += out.loss.item()
        clipped += indicators["clipped"].sum().item()
        for column, value_K in (("logp", out.logp_K), ("entropy", out.entropy_K), ("per_token_loss", weighted_K)):
            ours[column][position_N[micro.token_index_K]] = value_K
    gradients = {
        n.removeprefix("hf."): p.grad.full_tensor() for n, p in policy.named_parameters() if p.grad is not None
    }
    assert gradients.keys() == their_grads.keys(), sorted(gradients.keys() ^ their_grads.keys())
    real = mask.flatten()
    scale = real.sum()  # the weights are about 1 / tokens; scaled by tokens, a difference is that of one token's loss
    differences = {
        "logp": (ours["logp"] - theirs["logp"].flatten())[real].abs().max(),
        "entropy": (ours["entropy"] - theirs["entropy"].flatten())[real].abs().max(),
        "per_token_loss": (ours["per_token_loss"] - theirs["per_token_loss"].flatten())[real].abs().max() * scale,
        "loss": abs(loss - theirs["loss"].item()),
        "gradient_max": max((gradients[k] - g).abs().max() for k, g in their_grads.items()),
        "gradient_relative": max((gradients[k] - g).norm() / g.norm().clamp(min=1e-6) for k, g in their_grads.items()),
    }
    facts = {
        "tokens": scale,
        "clipped": clipped,
        "prompts": len(uids),
        "micro_batches": len(micros),
        "parameters": len(gradients),
        "gradient_norm": torch.stack([g.norm() for g in their_grads.values()]).norm(),
        "loss_size": abs(loss),
    }
    return {name: float(value) for name, value in (differences | facts).items()}


def equality(losses: Sequence[str], towers: Sequence[str]) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        demo.make_model(Path(folder), hidden=64, layers=2)
        print(
            f"{'loss':18} {'tower':8} {'logp':>9} {'entropy':>9} {'tok. loss':>9} {'loss':>9} {'gradient':>9} "
            f"{'relative':>9}   on"
        )
        for tower in towers:
            for name in losses:
                theirs = LOSS_TYPES[name][1]
                d = compare(Path(folder), name, train_vision=tower == "trained")
                results[f"{name}/{tower}"] = d
                errors = ("logp", "entropy", "per_token_loss", "loss", "gradient_max", "gradient_relative")
                print(
                    f"{name + ' = ' + theirs['loss_type']:18} {tower:8} "
                    + " ".join(f"{d[e]:9.1e}" for e in errors)
                    + f"   {d['tokens']:.0f} tokens ({d['clipped']:.0f} clipped), {d['parameters']:.0f} parameters, "
                    f"gradient norm {d['gradient_norm']:.2f}",
                    flush=True,
                )
    return results


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    import transformers
    import trl

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }
    print(", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
    results: dict = {"versions": versions}
    if args.only != "speed":
        results["equality"] = equality(["token"] if args.short else list(LOSS_TYPES), TOWERS[: 1 if args.short else 2])
    if args.only != "equality":
        changed = {
            k: getattr(args, k)
            for k in ("prompts", "group", "new_tokens", "micro_tokens")
            if getattr(args, k) is not None
        }
        for name in args.configs:
            results[name] = speed(name, Config(**(vars(CONFIGS[name]) | changed)), args)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # exit as train.py does: gloo's threads must not outlive the interpreter
