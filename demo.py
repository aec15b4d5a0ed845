"""Build a tiny Qwen-VL (1 M parameters) from scratch, train it by RL on generated images, and evaluate
it: the whole pipeline on a laptop.

    python demo.py run --out demo  # everything: data, model, warm start, RL, evaluation, plot
    python demo.py run --task digits --out out/digits  # a task whose file draws `scenes`
    python demo.py model --out demo/base  # only a random toy Qwen2.5-VL and its tokenizer
    python demo.py model --out demo/base --family qwen3_vl  # the same for Qwen3-VL
    python demo.py warm --model demo/base --out demo/start  # only its supervised warm start

Only the size is a toy: the model uses transformers' classes with Qwen's architecture, special
tokens and chat format. The task is real too: the model answers correctly only if it uses the image,
which `eval.py --ablate` measures by taking the image away. The warm start teaches it a bad habit,
answering without looking, which RL has to break.
"""

import startup  # noqa: F401

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from errors import check_writable, nearest, need, report_write_errors
from model import FAMILIES, Policy, Processor, load_hf
from packing import Packer
from parallel.loading import atomic_folder, check_output_is_new, save_hf
from prepare_data import IMAGE_PLACEHOLDER, Example
from report.progress import iter_with_progress
from report.writer import find_drawing
from reward import find_tasks
from rollout import EnvConfig, Prompt, Rollout, add_response, identity, make_env_factory, make_prompts
from settings import FlagParser
from sources.videos import Video, content_bytes, split_media
from utils import derive_seed, run_script, setup_distributed

# ----------------------------------------------------------------------------------------------------------------------
# What a task's file provides

Question = tuple[str, str, str, str]  # answer type, prompt, reply, truth
DemoScene = tuple[list[bytes | Video], list[Question]]  # images and videos, and questions about them


@dataclass(frozen=True)
class DemoConfig:
    """How long the demo of a task trains. A task's file can change these numbers in its `DEMO`."""

    see_steps: int = 700  # warm-start steps with correct answers
    habit_steps: int = 80  # warm-start steps with a lazy annotator's answers
    images: int = 32  # images per warm-start step
    questions: int = 8  # max questions per image in a warm-start step
    lazy: float = 0.7  # fraction of the lazy annotator's answers that are the usual one, given without looking
    steps: int = 60  # RL steps
    train_vision: str = "none"  # the part of the vision tower that RL trains; values as for train.py --train-vision
    eval_every: int = 10  # RL steps between evaluations
    rows: tuple[int, int] = (2000, 400)  # for training and test, each with an image of its own
    ablate: tuple[str, ...] = ("blank",)  # what the final evaluation takes away; values as for eval.py --ablate


def find_demo_tasks() -> dict[str, ModuleType]:
    """Return the modules of all tasks that have a demo, by name: those that define scenes(split, seed)."""
    return {name: task for name, task in find_tasks().items() if hasattr(task, "scenes")}


def get_task_module(task: str) -> ModuleType:
    """Return the module of a task. Raise UserError if it has no demo."""
    tasks = find_demo_tasks()
    need(task in tasks, f"--task {task}: no task of that name has a demo{nearest(task, tasks)}; choose "
         f"from {', '.join(tasks)}")
    return tasks[task]


def load_demo_config(task: str) -> DemoConfig:
    return DemoConfig(**getattr(get_task_module(task), "DEMO", {}))


@cache
def first_examples(task: str) -> list[Example]:
    """Return an example for each question about the first 400 scenes of the warm start."""
    return list(scenes_to_examples(task, islice(get_task_module(task).scenes("warm", 0), 400)))


def most_frequent_replies(task: str) -> dict[str, str]:
    """Return the reply of a lazy annotator for each answer type: the one in USUAL of the task's file, or else the most
    frequent one."""
    replies = defaultdict(Counter)
    for example in first_examples(task):
        replies[example.extra["answer_type"]][example.extra["reply"]] += 1
    most_frequent = {answer_type: count.most_common(1)[0][0] for answer_type, count in replies.items()}
    return most_frequent | getattr(get_task_module(task), "USUAL", {})


def demo_env_config(task: str) -> EnvConfig:
    """Return the settings of a multi-turn task's environment (ENV in its file); for other tasks, settings without an
    environment."""
    settings = getattr(get_task_module(task), "ENV", {})
    return EnvConfig(env=task if settings else None, **settings)


def scenes_to_examples(task: str, scenes: Iterable[DemoScene]) -> Iterator[Example]:
    """Yield an example for each question of each scene. Examples of the same scene share its images and its uid."""
    from tasks.shapes import check_question

    for media, questions in scenes:
        uid = hashlib.sha1(b"".join(map(content_bytes, media))).hexdigest()
        images, videos = split_media(media)
        for answer_type, prompt, reply, truth in (check_question(question, task) for question in questions):
            extra = {"answer_type": answer_type, "reply": reply}
            yield Example(uid, task, [{"role": "user", "content": prompt}], images, truth, extra, videos)


def play_expert(task: str, example: Example, lazy_reply: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each response of an expert to an example, with the environment's observation after it, or None after the
    last one. If `lazy_reply` is given, every response is that text."""
    if (env_factory := make_env_factory(demo_env_config(task))) is None:
        yield lazy_reply or example.extra["reply"], None
        return
    env, responses, observations = env_factory.make(), [], []
    env.reset(example)
    done = False
    while not done:
        responses.append(lazy_reply or get_task_module(task).expert(example, responses, observations))
        observation = env.step(responses[-1])
        done = observation.done or len(responses) == env_factory.cfg.max_turns
        observations.append(observation.messages)
        yield responses[-1], None if done else observation


# ----------------------------------------------------------------------------------------------------------------------
# The toy model

SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'video') %}<|vision_start|><|{{ part['type'] }}_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(task: str):
    """Return a byte-level BPE tokenizer in Qwen's format, trained on the texts of a task's toys. It encodes any other
    text too, with more tokens."""
    texts: set[str] = set()
    for example in first_examples(task):
        texts |= {example.messages[0]["content"], example.extra["reply"]}
        texts |= {example.ground_truth} if example.ground_truth.isalpha() else set()
        for response, observation in play_expert(task, example):
            texts |= {response, observation.messages if observation else ""}
    corpus = sorted({text.replace(IMAGE_PLACEHOLDER, "") for text in texts})
    corpus += ["user", "assistant", "system", "think", "user\n", "assistant\n", "<think>\n</think>"]
    bpe = Tokenizer(models.BPE())
    reference = transformers.Qwen2TokenizerFast(vocab={}, merges=[])  # only its pre-tokenizer is used
    bpe.pre_tokenizer = reference.backend_tokenizer.pre_tokenizer
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(corpus * 4, trainer)
    state = json.loads(bpe.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    options = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "bos_token": None}
    options |= {"additional_special_tokens": SPECIAL_TOKENS, "chat_template": CHAT_TEMPLATE}
    return transformers.Qwen2TokenizerFast(state["vocab"], merges, **options)


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

    `hidden`, the width of the language model, must be a multiple of 64. `vocab` > 0 makes the vocabulary larger than
    the tokenizer's, as in Qwen's own checkpoints; `tied` makes the head share the embedding's weight, as in Qwen's 3B
    models.
    """
    check_output_is_new(out)
    tokenizer = make_tokenizer(task)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    stops = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    patch = 14 if family.startswith("qwen2") else 16
    side = 3 * hidden // 64  # size of M-RoPE's height section, and of its width section
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [hidden // 8 - 2 * side, side, side]}
    text = {"vocab_size": max(vocab, len(tokenizer)), "bos_token_id": None, **stops}
    text |= {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "rms_norm_eps": 1e-6}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    text |= {"max_position_embeddings": 32768, "rope_parameters": rope}
    if family.startswith("qwen3"):
        rope["mrope_interleaved"] = True  # transformers always interleaves; vLLM only if the config has this
    if "qwen3_5" in family:
        text |= {"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": hidden // 4, "linear_value_head_dim": hidden // 4}
        rope["partial_rotary_factor"] = 1.0
    if family.endswith("moe"):
        # the experts' weights are not square, so that code that transposes them by mistake fails
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * hidden // 4}
        # vLLM needs norm_topk_prob in Qwen3-VL's configs, as on the hub; transformers always normalizes
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
    token_ids = {"image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"]}
    token_ids |= {"vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"]}
    parts = {"text_config": text, "vision_config": vision}
    config = transformers.CONFIG_MAPPING[family](**parts, **token_ids, tie_word_embeddings=tied)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    # transformers' std of 0.02 suits wide models. A narrow model initialized with it does not learn to see, because the
    # image's signal is lost in the residual stream. With fan-in scaling it learns that within a few hundred steps.
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv3d):
                module.weight.normal_(0, module.weight[0].numel() ** -0.5)
            elif isinstance(module, torch.nn.Embedding):
                module.weight.normal_(0, 0.5)
        model.lm_head.weight.normal_(0, 0.02)  # first guesses near uniform; for a tied head this is the embedding too
    model.generation_config = transformers.GenerationConfig(**stops)
    # These are the class names of a real checkpoint, by which transformers and vLLM find their own processors.
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": PROCESSOR_MAPPING_NAMES[family]}
    processor |= {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "do_convert_rgb": True}
    processor |= {"size": {"shortest_edge": 4 * patch * patch, "longest_edge": 512 * 512}}
    processor |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    video_processor = "Qwen3VLVideoProcessor" if FAMILIES[family].timestamps else "Qwen2VLVideoProcessor"
    files = {"preprocessor": processor, "video_preprocessor": processor | {"video_processor_type": video_processor}}
    with atomic_folder(out) as folder:
        save_hf(model, folder)
        tokenizer.save_pretrained(folder)
        for name, settings in files.items():
            (folder / f"{name}_config.json").write_text(json.dumps(settings, indent=2) + "\n")


# ----------------------------------------------------------------------------------------------------------------------
# The supervised warm start


def write_rollout(task: str, prompt: Prompt, processor: Processor, lazy_reply: str = "") -> Rollout:
    """Return the responses of `play_expert` to a prompt as a rollout, with the tokens and masks of a sampled one."""
    rollout = Rollout(prompt, 0)
    for response, observation in play_expert(task, prompt.example, lazy_reply):
        tokens = processor.tokenizer.encode(f"{response}<|im_end|>", add_special_tokens=False)
        add_response(rollout, tokens, [0.0] * len(tokens), processor, [0] * len(tokens))
        if observation:
            images = [processor.image_to_patches(hashlib.sha1(x.tobytes()).hexdigest(), x) for x in observation.images]
            tokens = processor.tokenize_observation([{"role": "user", "content": observation.messages}])
            tokens = processor.expand_image_tokens(tokens, images)
            rollout.response += tokens
            rollout.response_mask += [False] * len(tokens)
            rollout.images += images
            rollout.n_turns += 1
    return rollout


def make_warm_optimizers(policy: Policy, hidden_lr: float, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the hidden layers and AdamW for the rest. From scratch, Muon needs a third of
    AdamW's steps."""
    named = dict(policy.named_parameters())
    hidden = {name for name, p in named.items() if p.ndim == 2 and "embed" not in name and "lm_head" not in name}
    muon_group = {"params": [named[name] for name in named if name in hidden], "peak_lr": hidden_lr}
    adamw_group = {"params": [named[name] for name in named if name not in hidden], "peak_lr": lr}
    muon = torch.optim.Muon([muon_group], weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW([adamw_group], betas=(0.9, 0.98), weight_decay=0.01)]


def warm_start(
    model: Path, out: Path, seed: int, see_steps: int | None, habit_steps: int | None, task: str
) -> None:
    """Train a random toy model on supervised data and write it to `out`.

    First it trains on correct answers and learns to use the image. Then it trains on a lazy annotator's answers and
    learns to give the usual answer to each kind of question. RL then starts from a model that can see but has a bad
    habit to break, like a real instruction-tuned model.

    The images of a step are divided over the processes, and gradients are averaged.
    """
    cfg, ctx = load_demo_config(task), setup_distributed()
    see_steps = cfg.see_steps if see_steps is None else see_steps
    habit_steps = cfg.habit_steps if habit_steps is None else habit_steps
    need(cfg.images % ctx.world == 0,
         f"warm start: {cfg.images} images per step are not divisible by {ctx.world} processes; use another number")
    if ctx.is_main:
        check_output_is_new(out)
    processor = Processor(str(model))
    hf = load_hf(str(model))
    policy = Policy(hf, processor, train_vision="all")
    packer = Packer(1280, processor.image_token_id)
    # scenes that end are repeated
    source = chain.from_iterable(iter(lambda: get_task_module(task).scenes("warm", derive_seed(seed, ctx.rank)), None))
    most_frequent = most_frequent_replies(task)
    rng = random.Random(derive_seed(seed, "lazy", ctx.rank))
    env_factory = make_env_factory(demo_env_config(task))
    reset_fn = env_factory.reset_example if env_factory else identity
    losses = [math.nan]

    def next_scene() -> DemoScene:
        images, questions = next(source)
        return images, rng.sample(questions, cfg.questions) if len(questions) > cfg.questions else questions

    def next_samples(lazy: float) -> list[Rollout]:
        """Return the rollouts of one step on this process; a fraction `lazy` of them has the lazy annotator's reply."""
        scenes = (next_scene() for _ in range(cfg.images // ctx.world))
        examples = [(example, rng.random() < lazy) for example in scenes_to_examples(task, scenes)]
        prompts = make_prompts([example for example, _ in examples], processor, reset_fn=reset_fn)
        replies = [most_frequent[example.extra["answer_type"]] if is_lazy else "" for example, is_lazy in examples]
        return [write_rollout(task, prompt, processor, reply) for prompt, reply in zip(prompts, replies, strict=True)]

    for name, steps, lazy, *peak_lrs in [
        ("see", see_steps, 0.0, 5e-3, 2e-3),
        ("habit", habit_steps, cfg.lazy, 5e-4, 5e-4),
    ]:
        optimizers = make_warm_optimizers(policy, *peak_lrs)
        for step in iter_with_progress(range(steps), f"warm start: {name}", lambda: f"loss {losses[-1]:.3f} per token"):
            for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
                schedule = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
                group["lr"] = group["peak_lr"] * schedule
            micros = packer.pack(next_samples(lazy))
            n_scored = sum(len(m.target_K) for m in micros)
            policy.zero_grad(set_to_none=False)
            parts = []
            for micro in micros:
                parts.append(-policy(micro).logp_K.sum() / n_scored)
                parts[-1].backward()
            losses.append(sum(part.item() for part in parts))
            gradients = [p.grad for p in policy.parameters()]
            flat = parameters_to_vector(gradients)
            dist.all_reduce(flat)
            vector_to_parameters(flat.div_(ctx.world), gradients)
            clip_grad_norm_(policy.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
    if ctx.is_main:
        with atomic_folder(out) as folder:
            shutil.copytree(model, folder, copy_function=shutil.copyfile)  # for the tokenizer and processor files
            save_hf(hf, folder)


# ----------------------------------------------------------------------------------------------------------------------
# The whole demo

OUTPUTS = ".demo base start run final eval train.parquet test.parquet summary.json curve.png".split()
TRAIN_FLAGS = (
    "--prompts-per-step 32 --group-size 8 --lr 2e-4 --warmup-steps 5 --schedule cosine "
    "--micro-tokens 2048 --save-every 20"
)


def max_reply_tokens(model: Path, task: str) -> int:
    """Return the max number of tokens of a response or episode: that of the longest expert reply with its end token,
    plus 5."""
    processor = Processor(str(model))
    prompts = (Prompt(example.uid, [], [], example, []) for example in first_examples(task))
    return 5 + max(len(write_rollout(task, prompt, processor).response) for prompt in prompts)


def env_flag_args(task: str) -> tuple[object, ...]:
    """Return the flags of train.py and eval.py that choose the task's environment, if it has one."""
    cfg = demo_env_config(task)
    settings = ("--env-settings", *cfg.env_settings) if cfg.env_settings else ()
    return ("--env", cfg.env, "--max-turns", cfg.max_turns, *settings) if cfg.env else ()


def run_demo(out: Path, seed: int, family: str, short: bool, task: str = "shapes", processes: int = 2) -> dict:
    """Run the whole pipeline, each command as a user would type it. Write summary.json and return its content."""
    out = out.resolve()  # the commands run in the folder of this file
    cfg = load_demo_config(task)
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    seconds = {}

    def run_commands(name: str, expected: float, *commands: Sequence[object]) -> None:
        """Run commands at the same time. `expected`: the seconds that they take for `shapes` on two quiet cores."""
        lines = [[sys.executable, *map(str, command)] for command in commands]
        print("", *(f"[{name}, about {expected:.0f} s] {shlex.join(line)}" for line in lines), sep="\n", flush=True)
        start_time = time.perf_counter()
        running = [subprocess.Popen(line, env=env, cwd=Path(__file__).parent) for line in lines]
        codes = [process.wait() for process in running]
        for line, code in zip(lines, codes, strict=True):
            need(code == 0, f"the '{name}' command of the demo failed with exit code {code}: {shlex.join(line)}")
        seconds[name] = round(time.perf_counter() - start_time, 1)

    # An earlier demo is replaced, so that its run is not resumed. Other files must not be deleted.
    found = {path.name for path in out.glob("*")}
    others = found.difference(OUTPUTS if ".demo" in found else ())
    need(not others, f"--out {out} has files that are not an earlier demo's: {', '.join(sorted(others)[:3])}; move or "
         "delete them, or choose another folder")
    check_writable(out, f"--out {out}")
    print("The demo builds data and a model, trains the model on correct answers and then on a bad habit (the\n"
          "supervised warm start), trains it by RL, and evaluates it. The seconds shown are those of `shapes`\n"
          "on two otherwise idle cores. An earlier demo in the same folder is replaced.", flush=True)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / ".demo").touch()
    cfg = replace(cfg, steps=10, see_steps=10, habit_steps=5) if short else cfg
    n_train, n_test = (cfg.rows[0] // 5, cfg.rows[1] // 4) if short else cfg.rows
    base, start, run, final, train, test = map(out.joinpath, "base start run final train.parquet test.parquet".split())
    seeded = ("--seed", seed)
    toy = ("prepare_data.py", task, "--toy", *seeded)
    run_commands(
        "data and model", 7,
        (*toy, "--n", n_train, "--split", "train", "--out", train),
        (*toy, "--n", n_test, "--split", "test", "--out", test),
        ("demo.py", "model", "--out", base, "--family", family, "--task", task, *seeded),
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
    warm = ("demo.py", "warm", "--model", base, "--out", start, *seeded, "--task", task)
    warm += ("--see-steps", cfg.see_steps, "--habit-steps", cfg.habit_steps)
    run_commands("warm start", 10 + 0.17 * (cfg.see_steps + cfg.habit_steps), (*torchrun, *warm))
    data = ("--data", train, "--eval-data", test)
    sampling = ("--max-new-tokens", max_reply_tokens(base, task), *env_flag_args(task))
    training = ("train.py", "--model", start, *data, "--out", run, "--steps", cfg.steps, *sampling, *seeded)
    training += ("--eval-every", cfg.eval_every, "--eval-ablate", "blank")
    training += ("--train-vision", cfg.train_vision, *TRAIN_FLAGS.split())
    run_commands("train", 14 + 0.6 * cfg.steps, (*torchrun, *training))
    greedy = ("eval.py", run, "--data", test, *sampling)
    greedy += ("--baseline", start, "--ablate", *cfg.ablate, "--out", out / "eval")
    run_commands("eval and export", 12, greedy, ("merge_lora.py", run, "--out", final))
    after = json.loads((out / "eval" / "eval.json").read_text())
    [before], metric = after["baselines"], after["metric"]
    ablated = {f"{kind}_accuracy": after["reliance"][kind][metric] for kind in cfg.ablate}
    blank = ablated.pop("blank_accuracy")
    summary = {
        "task": task,
        "metric": metric,
        "seed": seed,
        "family": family,
        "n_test": after["n"],
        "steps": cfg.steps,
        "accuracy_before": before[metric],
        "accuracy_after": after[metric],
        "blank_image_accuracy": blank,
        **ablated,
        "train_seconds": seconds["train"],
        "stage_seconds": seconds,
    }
    with report_write_errors(out, f"--out {out}"):
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        if plots := find_drawing("plots"):
            plots.draw_curve(run, blank, out / "curve.png", task, metric)
    change = f"{before[metric]:.3f} before RL, {after[metric]:.3f} after {cfg.steps} RL steps"
    print(f"\n{task}: {metric} on {after['n']} unseen images: {change} ({blank:.3f} if the images are blank)")
    if short:
        print("this was a smoke test of the commands: in so few steps the model learns next to nothing")
    print(f"open {run / 'report.html'} (training), {out / 'eval' / 'report.html'} (evaluation), {out / 'curve.png'}")
    return summary


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = FlagParser(__doc__)
    sub = p.add_subparsers(dest="command", metavar="COMMAND (model, warm or run)", required=True)
    model = sub.add_parser("model", help="write a random toy model")
    warm = sub.add_parser("warm", help="supervised warm start of a toy model")
    run = sub.add_parser("run", help="the whole demo: data, model, warm start, RL, evaluation")
    for q in (model, warm, run):
        q.add_argument("--out", type=Path, required=True, help="folder to write")
        q.add_argument("--seed", type=int, default=0, help="random seed for weights, images and sampling (default: 0)")
        q.add_argument("--task", default="shapes", help="task to learn; it must have a demo (default: shapes)")
    for q in (model, run):
        q.add_argument("--family", choices=FAMILIES, default="qwen2_5_vl", help="architecture (default: qwen2_5_vl)")
    warm.add_argument("--model", type=Path, required=True, help="folder of the random model")
    warm.add_argument("--see-steps", type=int, help="number of steps with correct answers (default: the task's)")
    warm.add_argument("--habit-steps", type=int, help="steps with often careless answers (default: the task's)")
    run.add_argument("--processes", type=int, default=2, help="number of processes for warm start and RL (default: 2)")
    run.add_argument("--short", action="store_true", help="run everything in a minute or two; the model learns little")
    return p.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    """Call the function of the chosen command with its flags as arguments."""
    kwargs = dict(vars(args))
    command = kwargs.pop("command")
    {"model": make_model, "warm": warm_start, "run": run_demo}[command](**kwargs)
    if command == "model":
        print(f"wrote a random {args.family} model to {args.out}")


if __name__ == "__main__":
    run_script(main, parse_args)
