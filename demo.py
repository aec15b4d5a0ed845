"""A toy world, made from nothing, in which every stage runs on a laptop: pictures, tokenizer, a Qwen-VL of 1 M parameters.

    python demo.py model --out demo/base                    # toy Qwen2.5-VL, random, and its tokenizer
    python demo.py model --out demo/base --family qwen3_vl  # the same for Qwen3-VL
    python demo.py warm --model demo/base --out demo/start  # a short supervised start, with a bad habit for RL to break
    python demo.py run --out demo                           # all of it: build, warm up, train by RL, evaluate, plot

The toy is the real architecture: transformers' classes, Qwen's special tokens and chat format, only small. What it has
to learn is real too: its answers are right only if it looks (see `--blank-images` in eval.py).
"""

import argparse
import hashlib
import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw

from errors import UserError, check_writable, writing

# ----------------------------------------------------------------------------------------------------------------------
# The shapes task

SIDE = 84  # pixels: 3 x 3 cells of 28, and a cell is one merged patch of a Qwen2-VL vision tower
CELL = 28
COLOURS = {"red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 210), "yellow": (240, 200, 30)}
SHAPES = ("circle", "square", "triangle", "star")
ANGLES = (30, 60, 90, 120, 150)
INSTRUCTION = r"Answer in \boxed{}."  # before the question, so that all questions about a picture share it
SALT = {"warm": 1, "train": 2, "test": 3}  # the splits draw from different random streams


def _polygon(shape: str, x: float, y: float, r: float) -> list[tuple[float, float]]:
    if shape == "square":
        return [(x - r, y - r), (x + r, y - r), (x + r, y + r), (x - r, y + r)]
    if shape == "triangle":
        return [(x, y - r), (x + r, y + r), (x - r, y + r)]
    points = []
    for i in range(10):
        reach = r * (1.15 if i % 2 == 0 else 0.45)
        points.append((x + reach * math.sin(i * math.pi / 5), y - reach * math.cos(i * math.pi / 5)))
    return points


def draw_shapes(rng: random.Random, colour: str, shape: str, count: int) -> Image.Image:
    """`count` equal shapes, one to a cell, with a little jitter in place and size."""
    picture = Image.new("RGB", (SIDE, SIDE), (rng.randint(236, 255),) * 3)
    draw = ImageDraw.Draw(picture)
    for cell in rng.sample(range(9), count):
        x = (cell % 3 + 0.5) * CELL + rng.uniform(-2, 2)
        y = (cell // 3 + 0.5) * CELL + rng.uniform(-2, 2)
        r = rng.uniform(8.5, 10.5)
        if shape == "circle":
            draw.ellipse((x - r, y - r, x + r, y + r), fill=COLOURS[colour])
        else:
            draw.polygon(_polygon(shape, x, y, r), fill=COLOURS[colour])
    return picture


def draw_angle(rng: random.Random, colour: str, missing: int) -> Image.Image:
    """A straight angle cut by a ray. The left part is painted, the right part is the missing one."""
    picture = Image.new("RGB", (SIDE, SIDE), (rng.randint(236, 255),) * 3)
    draw = ImageDraw.Draw(picture)
    x, y, r = SIDE / 2 + rng.uniform(-2, 2), 60 + rng.uniform(-2, 2), 36 + rng.uniform(-2, 2)
    draw.pieslice((x - r, y - r, x + r, y + r), 180, 360 - missing, fill=COLOURS[colour])
    draw.line((x - r, y, x + r, y), fill=(0, 0, 0), width=2)
    radians = math.radians(missing)
    draw.line((x, y, x + r * math.cos(radians), y - r * math.sin(radians)), fill=(0, 0, 0), width=2)
    return picture


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def scenes(split: str, seed: int) -> Iterator[tuple[bytes, list[tuple[str, str, str]]]]:
    """Endless (png, [(answer_type, question, answer), ...]). No picture occurs in two splits: the hash of its bytes
    decides which split may have it."""
    rng = random.Random(f"{SALT[split]}/{seed}")
    while True:
        colour, shape, count = rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.randint(1, 4)
        if rng.random() < 0.2:
            missing = rng.choice(ANGLES)
            picture = png(draw_angle(rng, colour, missing))
            questions = [("angle", "What is the missing angle?", str(missing))]
        else:
            picture = png(draw_shapes(rng, colour, shape, count))
            questions = [
                ("count", "How many shapes are there?", str(count)),
                ("colour", "What colour are they?", colour),
                ("shape", "Which shape is it?", shape),
            ]
            for truth, options, ask in [(colour, list(COLOURS), "Is there a {} shape?"), (shape, list(SHAPES), "Is there a {}?")]:
                present = rng.random() < 0.5
                asked = truth if present else rng.choice([o for o in options if o != truth])
                questions.append(("exists", ask.format(asked), "yes" if present else "no"))
        in_test = hashlib.sha256(picture).digest()[0] < 64
        if in_test == (split == "test"):
            yield picture, questions


def shapes_rows(n: int, split: str, seed: int) -> Iterator[dict]:
    """n rows of the shapes task in the on-disk format, one question to a picture, the answer types in turn."""
    if split not in SALT:
        raise UserError(f"--split {split!r}: shapes has {', '.join(SALT)}")
    types = ("count", "colour", "shape", "exists", "angle")
    waiting: dict[str, list] = {t: [] for t in types}
    seen = set()
    source = scenes(split, seed)
    for index in range(n):
        kind = types[index % len(types)]
        while not waiting[kind]:
            picture, questions = next(source)
            if picture not in seen:
                seen.add(picture)
                question = questions[len(seen) % len(questions)]
                waiting[question[0]].append((picture, *question[1:]))
        picture, question, answer = waiting[kind].pop(0)
        yield {
            "data_source": "shapes",
            "prompt": [{"role": "user", "content": f"<image>{INSTRUCTION} {question}"}],
            "images": [{"bytes": picture, "path": None}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index, "uid": f"shapes-{split}-{seed}-{index}", "answer_type": kind},
        }


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


def make_tokenizer():
    """Byte-level BPE in Qwen's format, trained on the task's own sentences; any text encodes, if at length."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen2TokenizerFast

    words = [*COLOURS, *SHAPES, "yes", "no", "user", "assistant", "system", "think"]
    answers = [rf"\boxed{{{w}}}" for w in [*COLOURS, *SHAPES, "yes", "no", *map(str, ANGLES), "1", "2", "3", "4"]]
    questions = ["How many shapes are there?", "What colour are they?", "Which shape is it?", "What is the missing angle?"]
    questions += [f"Is there a {c} shape?" for c in COLOURS] + [f"Is there a {s}?" for s in SHAPES]
    corpus = [f"{INSTRUCTION} {q}" for q in questions] + answers + words + ["user\n", "assistant\n", "<think>\n</think>"]
    bpe = Tokenizer(models.BPE())
    reference = Qwen2TokenizerFast(vocab={}, merges=[])  # for its text splitting
    bpe.pre_tokenizer = reference.backend_tokenizer.pre_tokenizer
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(corpus * 4, trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False))
    state = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2TokenizerFast(
        vocab=state["vocab"], merges=[tuple(m) for m in state["merges"]], eos_token="<|im_end|>",
        pad_token="<|endoftext|>", unk_token=None, bos_token=None,
        additional_special_tokens=SPECIAL_TOKENS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(
    out: Path, family: str = "qwen2_5_vl", seed: int = 0, hidden: int = 128, layers: int = 3, vocab: int = 0, tied: bool = False
) -> None:
    """Write a random toy model with its tokenizer and processor files to `out`, in the Hugging Face layout.

    vocab > 0 widens the vocabulary beyond the tokenizer, as Qwen's own checkpoints do; `tied` makes the head share the
    embedding's weight, as Qwen's 3B models do.
    """
    import torch
    import transformers

    from model import FAMILIES
    from sharding import save_hf

    tokenizer = make_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    patch = 14 if family.startswith("qwen2") else 16
    text = {
        "vocab_size": max(vocab, len(tokenizer)), "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4,
        "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": ids("<|im_end|>"),
        "pad_token_id": ids("<|endoftext|>"), "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                            "mrope_section": [hidden // 8 - 2 * (3 * hidden // 64), 3 * hidden // 64, 3 * hidden // 64]},
    }
    if family.startswith("qwen3"):
        text["rope_parameters"]["mrope_interleaved"] = True  # transformers always interleaves; vLLM only if the config says so
    if "qwen3_5" in family:
        text["layer_types"] = [("linear_attention", "full_attention")[i % 2] for i in range(layers)]
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": hidden // 4, "linear_value_head_dim": hidden // 4}
        text["rope_parameters"]["partial_rotary_factor"] = 1.0
    if family.endswith("moe"):
        # not square, so that no one can take them the wrong way round
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * hidden // 4}
        # what vLLM asks of Qwen3-VL's configs, as the hub has them; transformers always does it
        text |= {"norm_topk_prob": True} if "vl" in family else {"shared_expert_intermediate_size": hidden}
    vision = {"depth": 2, "num_heads": 4, "patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 96, "hidden_size": hidden, "mlp_ratio": 2}
    elif family == "qwen2_5_vl":
        vision |= {"hidden_size": 96, "intermediate_size": 192, "out_hidden_size": hidden, "window_size": 112,
                   "fullatt_block_indexes": [1]}
    else:
        vision |= {"hidden_size": 96, "intermediate_size": 192, "out_hidden_size": hidden, "num_position_embeddings": 64}
        vision |= {"deepstack_visual_indexes": [0]} if "vl" in family else {}
    config_class = FAMILIES[family].model_class.replace("ForConditionalGeneration", "Config")
    config = getattr(transformers, config_class)(
        text_config=text, vision_config=vision, tie_word_embeddings=tied,
        image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"), vision_end_token_id=ids("<|vision_end|>"),
    )
    config.architectures = [config_class.replace("Config", "ForConditionalGeneration")]
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = getattr(transformers, config.architectures[0])(config)
    # transformers' std of 0.02 suits wide models. A narrow one with it does not see: the signal of the picture is lost
    # among the residuals. Fan-in scaling lets it start to see within a few hundred steps.
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv3d):
                module.weight.normal_(0, module.weight[0].numel() ** -0.5)
            elif isinstance(module, torch.nn.Embedding):
                module.weight.normal_(0, 0.5)
        model.lm_head.weight.normal_(0, 0.02)  # first guesses near uniform; for a tied head this is the embedding too
    model.generation_config = transformers.GenerationConfig(eos_token_id=ids("<|im_end|>"), pad_token_id=ids("<|endoftext|>"))
    save_hf(model, out)
    tokenizer.save_pretrained(out)
    # The class names that a real checkpoint carries, so that transformers and vLLM find their own processors.
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor" if family.startswith("qwen3")
        else "Qwen2_5_VLProcessor" if family == "qwen2_5_vl" else "Qwen2VLProcessor",
        "patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "do_convert_rgb": True,
        "size": {"shortest_edge": 4 * patch * patch, "longest_edge": 512 * 512},
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }
    (out / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


# ----------------------------------------------------------------------------------------------------------------------
# The supervised warm start

USUAL = {"count": "2", "colour": "red", "shape": "circle", "exists": "yes", "angle": "90"}
LAZY = 0.7  # of the lazy annotator's answers are the usual one, given without a look


def warm_start(base: Path, out: Path, seed: int = 0, see_steps: int = 700, habit_steps: int = 80, batch: int = 32) -> None:
    """Supervised start from random weights, in two parts: first honest answers, by which the toy learns to see; then a
    lazy annotator's, by which it learns to give each question's usual answer. The first makes it able, the second
    makes it half-competent: RL is left with a habit to break, as it is with a real instruction-tuned model.

    `batch` pictures a step, shared out over the processes; gradients are averaged.
    """
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    from grpo import Sample, pack
    from model import Policy, load_hf, load_processor
    from prepare_data import decode_image
    from sharding import check_new_folder, save_hf, whole_folder
    from utils import derive_seed, dist_setup

    ctx = dist_setup()
    if batch % ctx.world:
        raise UserError(f"warm start: {batch} pictures a step do not divide among {ctx.world} processes")
    if ctx.main:
        check_new_folder(out)
    processor = load_processor(str(base))
    hf = load_hf(str(base))
    policy = Policy(hf, processor, freeze_vision=False)
    source = scenes("warm", derive_seed(seed, ctx.rank))
    rng = random.Random(derive_seed(seed, "lazy", ctx.rank))

    def next_samples(lazy: float) -> list[Sample]:
        """One picture with each of its questions and answers: one tree."""
        data, questions = next(source)
        image = processor.image(hashlib.sha1(data).hexdigest(), decode_image(data))
        samples = []
        for kind, question, answer in questions:
            prompt = processor.encode([{"role": "user", "content": f"<image>{INSTRUCTION} {question}"}], [image])
            given = USUAL[kind] if rng.random() < lazy else answer
            reply = processor.tokenizer.encode(rf"\boxed{{{given}}}<|im_end|>", add_special_tokens=False)
            samples.append(Sample(image.key, prompt + reply, [False] * len(prompt) + [True] * len(reply), {}, [image]))
        return samples

    for name, steps, lazy, peak in [("see", see_steps, 0.0, 2e-3), ("habit", habit_steps, LAZY, 5e-4)]:
        optimizer = torch.optim.AdamW(policy.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
        bar = tqdm(range(steps), desc=f"warm start: {name}", disable=None if ctx.main else True)
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
            samples = [sample for _ in range(batch // ctx.world) for sample in next_samples(lazy)]
            micros = pack(samples, 320, processor.image_token_id)
            scored = sum(len(m.target_K) for m in micros)
            optimizer.zero_grad(set_to_none=False)
            total = 0.0
            for micro in micros:
                loss = -policy(micro)[0].sum() / scored
                loss.backward()
                total += loss.item()
            gradients = [p.grad for p in policy.parameters()]
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat)
            for g, part in zip(gradients, flat.div_(ctx.world).split([g.numel() for g in gradients]), strict=True):
                g.copy_(part.view_as(g))
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            bar.set_postfix(loss=f"{total:.3f}")
            if ctx.main and bar.disable and (step + 1) % 100 == 0:
                print(f"warm start: {name} {step + 1}/{steps}, loss {total:.3f}", flush=True)
    if ctx.main:
        with whole_folder(out) as folder:
            save_hf(hf, folder)
            for file in base.iterdir():  # tokenizer and processor
                if not (folder / file.name).exists():
                    shutil.copyfile(file, folder / file.name)


# ----------------------------------------------------------------------------------------------------------------------
# The whole demo


def draw_curve(run: Path, blank: float, out: Path) -> None:
    """Accuracy on unseen pictures and training reward over the RL steps of a run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evals = [(r["step"], r["eval/accuracy"]) for r in rows if "eval/accuracy" in r]
    rewards = [(r["step"], r["reward/mean"]) for r in rows if "reward/mean" in r]
    figure, axes = plt.subplots(figsize=(7.2, 3.8), dpi=120)
    axes.plot(*zip(*rewards, strict=True), color="#9db4d3", linewidth=1, label="reward of the step's samples")
    axes.plot(*zip(*evals, strict=True), color="#1f5fa8", marker="o", markersize=4, linewidth=2, label="greedy accuracy, unseen pictures")
    axes.axhline(blank, color="#c0392b", linestyle="--", linewidth=1.2, label="the same model, blank pictures")
    axes.set(xlabel="RL step", ylim=(0, 1.02), xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.tight_layout()
    figure.savefig(out)


def run_demo(out: Path, seed: int, family: str, short: bool) -> dict:
    """Every stage by its own command, as a user would type it."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    here = Path(__file__).parent
    seconds = {}

    def sh(stage: str, *command: object) -> None:
        shown = " ".join(map(str, command))
        print(f"\n[{stage}] {shown}", flush=True)
        began = time.perf_counter()
        launcher = [sys.executable]
        if command[0] == "torchrun":
            launcher, command = [sys.executable, "-m", "torch.distributed.run", "--standalone"], command[1:]
        done = subprocess.run([*launcher, *map(str, command)], env=env, cwd=here)
        if done.returncode:
            sys.exit(f"error: stage '{stage}' failed with exit code {done.returncode}: {shown}")
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - began

    # A previous demo's run must not be resumed or mixed with this one; anything else is not ours to remove.
    if out.exists() and any(out.iterdir()) and not (out / "train.parquet").is_file():
        raise UserError(f"--out {out} is not empty and no earlier demo's folder; choose another")
    check_writable(out, f"--out {out}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    n_train, n_test, steps, warm = (400, 100, 10, (60, 20)) if short else (2000, 400, 60, (700, 80))
    base, start, run, final = out / "base", out / "start", out / "run", out / "final"
    train, test = out / "train.parquet", out / "test.parquet"
    sh("data", "prepare_data.py", "shapes", "--n", n_train, "--split", "train", "--seed", seed, "--out", train)
    sh("data", "prepare_data.py", "shapes", "--n", n_test, "--split", "test", "--seed", seed, "--out", test)
    sh("model", "demo.py", "model", "--out", base, "--family", family, "--seed", seed)
    sh("warm start", "torchrun", "--nproc-per-node", 2, "demo.py", "warm", "--model", base, "--out", start, "--seed", seed,
       "--see-steps", warm[0], "--habit-steps", warm[1])
    sh("train", "torchrun", "--nproc-per-node", 2, "train.py", "--model", start, "--data", train, "--eval-data", test, "--out", run,
       "--steps", steps, "--prompts-per-step", 32, "--group-size", 8, "--max-new-tokens", 12, "--lr", "2e-4", "--warmup-steps", 5,
       "--schedule", "cosine", "--micro-tokens", 2048, "--eval-every", 5, "--save-every", 20, "--seed", seed)
    sh("merge", "merge_lora.py", run, "--out", final)
    sh("eval", "eval.py", final, "--data", test, "--baseline", start, "--max-new-tokens", 12, "--out", out / "eval")
    sh("eval", "eval.py", final, "--data", test, "--blank-images", "--max-new-tokens", 12, "--out", out / "eval_blank")
    after = json.loads((out / "eval" / "eval.json").read_text())
    blank = json.loads((out / "eval_blank" / "eval.json").read_text())
    summary = {
        "accuracy_before": after["baseline"]["accuracy"],
        "accuracy_after": after["accuracy"],
        "blank_image_accuracy": blank["accuracy"],
        "n_test": after["n"],
        "train_seconds": round(seconds["train"], 1),
        "steps": steps,
        "seed": seed,
        "family": family,
        "by_answer_type": {k: v["accuracy"] for k, v in after["by_answer_type"].items()},
        "stage_seconds": {k: round(v, 1) for k, v in seconds.items()},
    }
    print("\n" + json.dumps(summary, indent=2))
    with writing(out, f"--out {out}"):
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        draw_curve(run, summary["blank_image_accuracy"], out / "curve.png")
    print(f"\naccuracy on {after['n']} unseen pictures: {summary['accuracy_before']:.3f} -> {summary['accuracy_after']:.3f} after "
          f"{steps} RL steps; with blank pictures {summary['blank_image_accuracy']:.3f}")
    if short:
        print("--short only shows that each stage runs; so few steps are not meant to learn anything")
    print(f"look at {out / 'curve.png'}, {out / 'eval' / 'report.html'} and {run / 'rollouts'}")
    return summary


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    sub = p.add_subparsers(dest="command", required=True)
    families = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    model = sub.add_parser("model", help="write a random toy model", allow_abbrev=False)
    warm = sub.add_parser("warm", help="supervised warm start of a toy model", allow_abbrev=False)
    run = sub.add_parser("run", help="the whole demo", allow_abbrev=False)
    for q in (model, warm, run):
        q.add_argument("--out", type=Path, required=True, help="folder to write")
        q.add_argument("--seed", type=int, default=0, help="of weights, pictures and sampling")
    for q in (model, run):
        q.add_argument("--family", choices=families, default="qwen2_5_vl", help="architecture")
    model.add_argument("--hidden", type=int, default=128, help="width of the language model, a multiple of 64")
    model.add_argument("--layers", type=int, default=3, help="depth of the language model")
    model.add_argument("--vocab", type=int, default=0, help="widen the vocabulary to this (0 = the tokenizer's)")
    warm.add_argument("--model", type=Path, required=True, help="folder of the random model")
    warm.add_argument("--see-steps", type=int, default=700, help="steps with honest answers")
    warm.add_argument("--habit-steps", type=int, default=80, help="steps with a lazy annotator's answers")
    run.add_argument("--short", action="store_true", help="minutes become seconds: every stage runs, little is learnt")
    return p.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    if args.command == "model":
        from sharding import check_new_folder, whole_folder

        check_new_folder(args.out)
        with whole_folder(args.out) as folder:
            make_model(folder, args.family, args.seed, args.hidden, args.layers, args.vocab)
    elif args.command == "warm":
        warm_start(args.model, args.out, args.seed, args.see_steps, args.habit_steps)
    else:
        run_demo(args.out, args.seed, args.family, args.short)


if __name__ == "__main__":
    from utils import run_script

    run_script(main, parse_args)
