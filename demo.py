"""A toy world, made from nothing, in which every stage runs on a laptop: images, tokenizer, a Qwen-VL of 1 M
parameters.

    python demo.py model --out demo/base                    # toy Qwen2.5-VL, random, and its tokenizer
    python demo.py model --out demo/base --family qwen3_vl  # the same for Qwen3-VL
    python demo.py warm --model demo/base --out demo/start  # a short supervised start, with a bad habit for RL to break
    python demo.py run --out demo                           # all of it: build, warm up, train by RL, evaluate, plot
    python demo.py run --task digits --out out/digits       # the same of another task, any whose file draws `scenes`

The toy is the real architecture: transformers' classes, Qwen's special tokens and chat format, only small. What it has
to learn is real too: its answers are right only if it looks (see `--ablate` in eval.py).
"""

import argparse
import hashlib
import json
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from errors import check_writable, need, report_write_errors
from model import FAMILIES, Policy, Processor, load_hf
from packing import Packer
from parallel.loading import atomic_folder, check_output_is_new, save_hf
from prepare_data import IMAGE_PLACEHOLDER, Example
from report.progress import iter_with_progress
from report.writer import find_drawing
from reward import find_tasks
from rollout import (
    EnvConfig,
    Prompt,
    Rollout,
    add_response,
    identity,
    make_env_factory,
    make_prompts,
)
from settings import FlagParser
from utils import derive_seed, run_script, setup_distributed

# ----------------------------------------------------------------------------------------------------------------------
# What a task brings

Question = tuple[str, str, str, str]  # answer type, prompt, reply, truth
Scene = tuple[list[bytes], list[Question]]  # images and questions about them


@dataclass(frozen=True)
class DemoConfig:
    """How much a demo trains. A task's file may have other numbers, in `DEMO`."""

    see_steps: int = 700  # of the warm start, with honest answers
    habit_steps: int = 80  # of the warm start, with a lazy annotator's
    images: int = 32  # of a step of the warm start
    questions: int = 8  # about an image, at most, in such a step
    lazy: float = 0.7  # of the lazy annotator's answers are the usual one, given without a look
    steps: int = 60  # of RL
    eval_every: int = 10  # of them


def find_demo_tasks() -> dict[str, ModuleType]:
    """Task -> its file, of those whose file draws toys: scenes(split, seed)."""
    return {name: task for name, task in find_tasks().items() if hasattr(task, "scenes")}


def file_of(task: str) -> ModuleType:
    known = find_demo_tasks()
    need(task in known, f"--task {task}: no file of tasks/ or envs/ draws scenes of it; there are {', '.join(known)}")
    return known[task]


def load_demo_config(task: str) -> DemoConfig:
    return DemoConfig(**getattr(file_of(task), "DEMO", {}))


@cache
def first_examples(task: str) -> list[Example]:
    """Return an example for each question about the first images of the warm start's split."""
    return list(scenes_to_examples(task, islice(file_of(task).scenes("warm", 0), 400)))


def most_frequent_replies(task: str) -> dict[str, str]:
    """Return what a lazy annotator says, by answer type: the most frequent reply, or what the task's file has as
    USUAL."""
    replies = defaultdict(Counter)
    for example in first_examples(task):
        replies[example.extra["answer_type"]][example.extra["reply"]] += 1
    usual = {kind: count.most_common(1)[0][0] for kind, count in replies.items()}
    return usual | getattr(file_of(task), "USUAL", {})


def demo_env_config(task: str) -> EnvConfig:
    """Return how the toys of an environment are played: ENV of its file. A task's own toys are not."""
    settings = getattr(file_of(task), "ENV", {})
    return EnvConfig(env=task if settings else None, **settings)


def scenes_to_examples(task: str, scenes: Iterable[Scene]) -> Iterator[Example]:
    """Yield an example for each question of scenes; those of a scene have one uid, as they share its images."""
    for images, questions in scenes:
        uid = hashlib.sha1(b"".join(images)).hexdigest()
        for kind, prompt, reply, truth in questions:
            extra = {"answer_type": kind, "reply": reply}
            yield Example(uid, task, [{"role": "user", "content": prompt}], images, truth, extra)


def play(task: str, example: Example, usual: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each response of an expert to an example, or the usual one if that is given, with the observation that
    comes before the next response, or None."""
    if (environments := make_env_factory(demo_env_config(task))) is None:
        yield usual or example.extra["reply"], None
        return
    env, responses, said = environments.make(), [], []
    env.reset(example)
    over = False
    while not over:
        responses.append(usual or file_of(task).expert(example, responses, said))
        observation = env.step(responses[-1])
        over = observation.done or len(responses) == environments.cfg.max_turns
        said.append(observation.messages)
        yield responses[-1], None if over else observation


# ----------------------------------------------------------------------------------------------------------------------
# The toy model

SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(task: str):
    """Byte-level BPE in Qwen's format, trained on what is said in a task's toys; any text encodes, if at length."""
    texts: set[str] = set()
    for example in first_examples(task):
        texts |= {example.messages[0]["content"], example.extra["reply"]}
        texts |= {example.ground_truth} if example.ground_truth.isalpha() else set()
        for response, observation in play(task, example):
            texts |= {response, observation.messages if observation else ""}
    corpus = sorted({text.replace(IMAGE_PLACEHOLDER, "") for text in texts})
    corpus += ["user", "assistant", "system", "think", "user\n", "assistant\n", "<think>\n</think>"]
    bpe = Tokenizer(models.BPE())
    reference = transformers.Qwen2TokenizerFast(vocab={}, merges=[])  # for its text splitting
    bpe.pre_tokenizer = reference.backend_tokenizer.pre_tokenizer
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(corpus * 4, trainer)
    state = json.loads(bpe.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "bos_token": None}
    named |= {"additional_special_tokens": SPECIAL_TOKENS, "chat_template": CHAT_TEMPLATE}
    return transformers.Qwen2TokenizerFast(state["vocab"], merges, **named)


def make_model(
    out: Path,
    family: str = "qwen2_5_vl",
    seed: int = 0,
    hidden: int = 128,
    layers: int = 3,
    vocab: int = 0,
    tied: bool = False,
    task: str = "shapes",
) -> None:
    """Write a random toy model with its tokenizer and processor files to `out`, in the Hugging Face layout.

    `hidden`, the width of the language model, is a multiple of 64. vocab > 0 widens the vocabulary beyond the
    tokenizer, as Qwen's own checkpoints do; `tied` makes the head share the embedding's weight, as Qwen's 3B models do.
    """
    check_output_is_new(out)
    tokenizer = make_tokenizer(task)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    stops = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    patch = 14 if family.startswith("qwen2") else 16
    side = 3 * hidden // 64  # of M-RoPE's sections, that of height and that of width
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [hidden // 8 - 2 * side, side, side]}
    text = {"vocab_size": max(vocab, len(tokenizer)), "bos_token_id": None, **stops}
    text |= {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "rms_norm_eps": 1e-6}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    text |= {"max_position_embeddings": 32768, "rope_parameters": rope}
    if family.startswith("qwen3"):
        rope["mrope_interleaved"] = True  # transformers always does; vLLM only if the config says so
    if "qwen3_5" in family:
        text |= {"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": hidden // 4, "linear_value_head_dim": hidden // 4}
        rope["partial_rotary_factor"] = 1.0
    if family.endswith("moe"):
        # not square, so that no one can take them the wrong way round
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * hidden // 4}
        # what vLLM asks of Qwen3-VL's configs, as the hub has them; transformers always does it
        text |= {"norm_topk_prob": True} if "vl" in family else {"shared_expert_intermediate_size": hidden}
    vision = {"depth": 2, "num_heads": 4, "patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 96, "hidden_size": hidden, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 96, "intermediate_size": 192, "out_hidden_size": hidden}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 112, "fullatt_block_indexes": [1]}
    elif family.startswith("qwen3"):
        vision |= {"num_position_embeddings": 64}
        vision |= {"deepstack_visual_indexes": [0]} if "vl" in family else {}
    marks = {"image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"]}
    marks |= {"vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"]}
    parts = {"text_config": text, "vision_config": vision}
    config = transformers.CONFIG_MAPPING[family](**parts, **marks, tie_word_embeddings=tied)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    # transformers' std of 0.02 suits wide models. A narrow one with it does not see: the signal of the image is lost
    # among the residuals. Fan-in scaling lets it start to see within a few hundred steps.
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv3d):
                module.weight.normal_(0, module.weight[0].numel() ** -0.5)
            elif isinstance(module, torch.nn.Embedding):
                module.weight.normal_(0, 0.5)
        model.lm_head.weight.normal_(0, 0.02)  # first guesses near uniform; for a tied head this is the embedding too
    model.generation_config = transformers.GenerationConfig(**stops)
    # The class names that a real checkpoint carries, so that transformers and vLLM find their own processors.
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": PROCESSOR_MAPPING_NAMES[family]}
    processor |= {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "do_convert_rgb": True}
    processor |= {"size": {"shortest_edge": 4 * patch * patch, "longest_edge": 512 * 512}}
    processor |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    with atomic_folder(out) as folder:
        save_hf(model, folder)
        tokenizer.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


# ----------------------------------------------------------------------------------------------------------------------
# The supervised warm start


def write_rollout(task: str, prompt: Prompt, processor: Processor, usual: str = "") -> Rollout:
    """Return what `play` says to a prompt, with the tokens and masks of a rollout that was sampled."""
    rollout = Rollout(prompt, 0)
    for response, observation in play(task, prompt.example, usual):
        tokens = processor.tokenizer.encode(f"{response}<|im_end|>", add_special_tokens=False)
        add_response(rollout, tokens, [0.0] * len(tokens), processor, [0] * len(tokens))
        if observation:
            images = [processor.image_to_patches(hashlib.sha1(x.tobytes()).hexdigest(), x) for x in observation.images]
            said = processor.tokenize_observation([{"role": "user", "content": observation.messages}])
            said = processor.expand_image_tokens(said, images)
            rollout.response += said
            rollout.response_mask += [False] * len(said)
            rollout.images += images
            rollout.n_turns += 1
    return rollout


def warm_start(
    model: Path, out: Path, seed: int, see_steps: int | None, habit_steps: int | None, task: str
) -> None:
    """Supervised start from random weights, in two parts: first honest answers, by which the toy learns to see; then a
    lazy annotator's, by which it learns to give each question's usual answer. The first makes it able, the second
    makes it half-competent: RL is left with a habit to break, as it is with a real instruction-tuned model.

    A step's images are shared out over the processes; gradients are averaged.
    """
    plan, ctx = load_demo_config(task), setup_distributed()
    see_steps = plan.see_steps if see_steps is None else see_steps
    habit_steps = plan.habit_steps if habit_steps is None else habit_steps
    need(plan.images % ctx.world == 0,
         f"warm start: {plan.images} images a step do not divide among {ctx.world} processes")
    if ctx.is_main:
        check_output_is_new(out)
    processor = Processor(str(model))
    hf = load_hf(str(model))
    policy = Policy(hf, processor, train_vision="all")
    packer = Packer(320, processor.image_token_id)
    source = file_of(task).scenes("warm", derive_seed(seed, ctx.rank))
    usual = most_frequent_replies(task)
    rng = random.Random(derive_seed(seed, "lazy", ctx.rank))
    environments = make_env_factory(demo_env_config(task))
    start_of = environments.reset_example if environments else identity

    def next_scene() -> Scene:
        images, questions = next(source)
        return images, rng.sample(questions, plan.questions) if len(questions) > plan.questions else questions

    def next_samples(lazy: float) -> list[Rollout]:
        """Of a step."""
        scenes = (next_scene() for _ in range(plan.images // ctx.world))
        lazily = [(example, rng.random() < lazy) for example in scenes_to_examples(task, scenes)]
        prompts = make_prompts([example for example, _ in lazily], processor, start_of=start_of)
        given = [usual[example.extra["answer_type"]] if is_lazy else "" for example, is_lazy in lazily]
        return [write_rollout(task, prompt, processor, reply) for prompt, reply in zip(prompts, given, strict=True)]

    for name, steps, lazy, peak in [("see", see_steps, 0.0, 2e-3), ("habit", habit_steps, plan.lazy, 5e-4)]:
        optimizer = torch.optim.AdamW(policy.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
        for step in iter_with_progress(range(steps), f"warm start: {name}"):
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
            micros = packer.pack(next_samples(lazy))
            scored = sum(len(m.target_K) for m in micros)
            optimizer.zero_grad(set_to_none=False)
            for micro in micros:
                (-policy(micro).logp_K.sum() / scored).backward()
            gradients = [p.grad for p in policy.parameters()]
            flat = parameters_to_vector(gradients)
            dist.all_reduce(flat)
            vector_to_parameters(flat.div_(ctx.world), gradients)
            clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    if ctx.is_main:
        with atomic_folder(out) as folder:
            shutil.copytree(model, folder, copy_function=shutil.copyfile)  # for its tokenizer and processor
            save_hf(hf, folder)


# ----------------------------------------------------------------------------------------------------------------------
# The whole demo

TRAIN_FLAGS = (
    "--prompts-per-step 32 --group-size 8 --lr 2e-4 --warmup-steps 5 --schedule cosine "
    "--micro-tokens 2048 --save-every 20"
)


def max_reply_tokens(model: Path, task: str) -> int:
    """How many tokens a response, or an episode, may have: those of the longest reply, its end, and a few."""
    processor = Processor(str(model))
    bare = (Prompt(example.uid, [], [], example, []) for example in first_examples(task))
    return 5 + max(len(write_rollout(task, prompt, processor).response) for prompt in bare)


def env_flag_args(task: str) -> tuple[object, ...]:
    """Return the flags of train.py and eval.py."""
    cfg = demo_env_config(task)
    more = ("--env-settings", *cfg.env_settings) if cfg.env_settings else ()
    return ("--env", cfg.env, "--max-turns", cfg.max_turns, *more) if cfg.env else ()


def run_demo(out: Path, seed: int, family: str, short: bool, task: str = "shapes", processes: int = 2) -> dict:
    """Run every stage by its own command, as a user would type it."""
    out = out.absolute()  # the commands run in this folder
    plan = load_demo_config(task)
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    seconds = {}

    def sh(stage: str, *command: object) -> None:
        words = [sys.executable, *map(str, command)]
        print(f"\n[{stage}] {shlex.join(words)}")
        began = time.perf_counter()
        code = subprocess.run(words, env=env, cwd=Path(__file__).parent).returncode
        need(code == 0, f"stage '{stage}' failed with exit code {code}: {shlex.join(words)}")
        seconds[stage] = round(seconds.get(stage, 0.0) + time.perf_counter() - began, 1)

    # A previous demo's run must not be resumed or mixed with this one; anything else is not ours to remove.
    need((out / "train.parquet").is_file() or not out.exists() or not any(out.iterdir()),
         f"--out {out} is not empty and no earlier demo's folder; choose another")
    check_writable(out, f"--out {out}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    plan = replace(plan, steps=10, see_steps=10, habit_steps=5) if short else plan
    n_train, n_test = (400, 100) if short else (2000, 400)
    base, start, run, final = (out / name for name in ("base", "start", "run", "final"))
    train, test = out / "train.parquet", out / "test.parquet"
    seeded = ("--seed", seed)
    for split, n, file in (("train", n_train, train), ("test", n_test, test)):
        sh("data", "prepare_data.py", task, "--toy", "--n", n, "--split", split, *seeded, "--out", file)
    sh("model", "demo.py", "model", "--out", base, "--family", family, "--task", task, *seeded)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
    warm = ("--task", task, "--see-steps", plan.see_steps, "--habit-steps", plan.habit_steps)
    sh("warm start", *torchrun, "demo.py", "warm", "--model", base, "--out", start, *seeded, *warm)
    data = ("--data", train, "--eval-data", test)
    longest = ("--max-new-tokens", max_reply_tokens(base, task), *env_flag_args(task))
    settings = ("--steps", plan.steps, "--eval-every", plan.eval_every, *longest, *TRAIN_FLAGS.split(), *seeded)
    sh("train", *torchrun, "train.py", "--model", start, *data, "--out", run, *settings)
    sh("merge", "merge_lora.py", run, "--out", final)
    greedy = ("eval.py", final, "--data", test, *longest)
    sh("eval", *greedy, "--baseline", start, "--ablate", "blank", "--out", out / "eval")
    after = json.loads((out / "eval" / "eval.json").read_text())
    [before], metric = after["baselines"], after["metric"]
    blank = after["reliance"]["blank"][metric]
    summary = {
        "task": task,
        "metric": metric,
        "seed": seed,
        "family": family,
        "n_test": after["n"],
        "steps": plan.steps,
        "accuracy_before": before[metric],
        "accuracy_after": after[metric],
        "blank_image_accuracy": blank,
        "train_seconds": seconds["train"],
        "stage_seconds": seconds,
    }
    with report_write_errors(out, f"--out {out}"):
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        if plots := find_drawing("plots"):
            plots.draw_curve(run, blank, out / "curve.png", task, metric)
    moved = f"{before[metric]:.3f} -> {after[metric]:.3f} after {plan.steps} RL steps; with blank ones {blank:.3f}"
    print(f"\n{task}: {metric} on {after['n']} unseen images: {moved}")
    print(f"look at {out / 'curve.png'}, {out / 'eval' / 'report.html'} and {run / 'rollouts'}")
    return summary


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = FlagParser(__doc__)
    sub = p.add_subparsers(dest="command", required=True)
    model = sub.add_parser("model", help="write a random toy model")
    warm = sub.add_parser("warm", help="supervised warm start of a toy model")
    run = sub.add_parser("run", help="the whole demo")
    for q in (model, warm, run):
        q.add_argument("--out", type=Path, required=True, help="folder to write")
        q.add_argument("--seed", type=int, default=0, help="of weights, images and sampling")
        q.add_argument("--task", default="shapes", help="whose toys to learn from: any whose file draws scenes")
    for q in (model, run):
        q.add_argument("--family", choices=FAMILIES, default="qwen2_5_vl", help="architecture")
    warm.add_argument("--model", type=Path, required=True, help="folder of the random model")
    warm.add_argument("--see-steps", type=int, help="steps with honest answers (default: the task's)")
    warm.add_argument("--habit-steps", type=int, help="those with a lazy annotator's answers (default: the task's)")
    run.add_argument("--processes", type=int, default=2, help="that warm up and train")
    run.add_argument("--short", action="store_true", help="every stage runs, in a minute or two; little is learnt")
    return p.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    """A command's flags are the arguments of its function."""
    given = dict(vars(args))
    command = given.pop("command")
    {"model": make_model, "warm": warm_start, "run": run_demo}[command](**given)


if __name__ == "__main__":
    run_script(main, parse_args)
