"""Estimate memory, time and price of a run from its flags, data and config.json.

    python train.py --plan --gpu h100 --gpus 8 --model M --data F --prompts-per-step 512 --max-new-tokens 2048 ...

Needs no GPU and no weights: it counts parameters and saved activations on a model without weights. docs/plan.md
explains each figure, its assumptions, and how far predictions were from measurements.
"""

import argparse
import itertools
import json
import math
import sys
from collections import ChainMap
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from errors import UserError, as_user_error, need
from kernels import GPU_BLOCK_ROWS
from layers.attention import PackedAttention
from layers.lora import add_lora
from model import ModelConfig, Processor, run_language_model, set_trainable
from packing import flop_costs, group_flops
from parallel.loading import build_meta_model
from parallel.models import ASLEEP_GIB
from report.gpus import GPU_CHOICES, WITHOUT_BF16
from rollout import load_examples
from settings import FlagParser, add_flags, build_config, flag_field, parse_pairs

GIB = 2**30
CUDA_GIB = 1.5  # CUDA's context and NCCL's buffers, outside torch's allocator
# Gradients of activations that exist at once in the backward of a block, relative to the activations that it keeps:
# fitted to how the peaks in docs/hardware.md grow with the number of tokens
BACKWARD_SHARE = 0.4
# Seconds that kernel launches, scheduling and sampling add to a decoding step: fitted to published steps (docs/plan.md)
DECODING_STEP_SECONDS = 0.010
MAX_EXAMPLES = 2000  # rows of --data whose lengths are read
Examples = list[tuple[int, tuple[int, ...]]]  # prompts: tokens, and patches of each image
ASSUMED_PROMPT = 512, (4 * 17**2,)  # for --data -; the image has 17 x 17 tokens

TOO_FEW = {"data": "-", "out": "-", "steps": 1}  # flags that a run needs and a plan does not
LORA = {"lora_rank": 64, "train_vision": "none"}
LORA_FLAGS = "--lora-rank 64 --lr 3e-5 --train-vision none "
NO_FIX = "No flag is enough; use more or larger GPUs, a smaller model, or servers (--servers)"
AT_REST = ("weights", "optimizer", "reference_teacher", "vision_cache", "cuda")  # on the GPU while vLLM is awake
CONFIGS = Path(__file__).with_name("configs")  # the config.json of some models, so that a plan needs no network
MAX_MICRO_TOKENS = 2**17  # the search for the largest --micro-tokens ends here

REPORT = """\
{model} on {gpus} x {gpu_name}; nodes: {nodes}; GPUs for training: {training_gpus}
{parameters:,} parameters, {trained:,} of them trainable
each step: {responses:,} responses, mean {response_tokens:,.0f} tokens; prompts: mean {prompt_tokens:,.0f} tokens, \
{patches:,.0f} image patches

GiB per GPU, of {gpu_gib}          update   rollout
  weights                  {memory[weights]:10.1f}{rollout_memory[weights]:10.1f}
  optimizer                {memory[optimizer]:10.1f}{rollout_memory[optimizer]:10.1f}
  gradients                {memory[gradients]:10.1f}
  reference, teacher       {memory[reference_teacher]:10.1f}{rollout_memory[reference_teacher]:10.1f}
  unsharded layers         {memory[unsharded]:10.1f}
  activations              {memory[activations]:10.1f}
  logits or block's backward{memory[temporary]:9.1f}
  image-feature cache      {memory[vision_cache]:10.1f}{rollout_memory[vision_cache]:10.1f}
  vLLM buffers, or hf copy {memory[engine]:10.1f}{rollout_memory[engine]:10.1f}
  vLLM weights                       {rollout_memory[engine_weights]:10.1f}
  vLLM KV cache                      {rollout_memory[kv_cache]:10.1f}
  CUDA, NCCL               {memory[cuda]:10.1f}{rollout_memory[cuda]:10.1f}
  total                    {memory[total]:10.1f}{rollout_memory[total]:10.1f}
largest --micro-tokens that fits: {largest}; concurrent sequences per engine: {engine[sequences]:,.0f}
GiB of CPU memory per node: {host[engines]:.1f} for sleeping vLLM, {host[offloaded]:.1f} for --offload

each step                     FLOPs   seconds
  prefill                  {flops[prefill]:10.1e}{seconds[prefill]:10.1f}
  decoding                 {flops[decode]:10.1e}{seconds[decode]:10.1f}
  vision tower             {flops[vision]:10.1e}{seconds[vision]:10.1f}
  log-probabilities        {flops[logprobs]:10.1e}{seconds[logprobs]:10.1f}
  update                   {flops[update]:10.1e}{seconds[update]:10.1f}   MFU {mfu:.1%}
  whole step                         {step_seconds:10.1f}   rollout + training (--async-steps: the longer one)
{tokens_per_second_per_gpu:,.0f} tokens/s per GPU, prompts included
steps: {steps:,}; time: {hours:.2f} hours; price: {usd:,.2f} USD at {gpu_hour_usd:g} USD per GPU-hour

Assumed: training and prefill reach {training_efficiency:.0%} of the peak FLOP/s (--training-efficiency), decoding \
{bandwidth_efficiency:.0%}
of the bandwidth (--bandwidth-efficiency), plus 10 ms per decoding step.
{assumed}Not counted in time: rewards, weight sync, evaluation, checkpoints, optimizer step, --offload's
transfers, further batches of --max-gen-batches, waiting, --rollout hf's slower sampling, a teacher of
another size. In memory: gaps between tensors, savings of --tp, --rollout hf's KV cache.
{fits}"""


@dataclass(frozen=True)
class PlanConfig:
    """Plan"""

    gpu: str = flag_field("h100", "GPU model", choices=tuple(GPU_CHOICES))
    gpus: int = flag_field(8, "number of GPUs for training", least=1)
    gpus_per_node: int = flag_field(8, "GPUs per node", least=1)
    server_gpus: int = flag_field(1, "GPUs per rollout server of --servers", least=1)
    gpu_hour_usd: float = flag_field(3.0, "price per GPU-hour, in USD", above=0, most=1000)
    response_tokens: int | None = flag_field(None, "mean response length in tokens (default: half of "
                                             "--max-new-tokens)", least=1)
    training_efficiency: float = flag_field(0.25, "fraction of the peak FLOP/s that training and prefill reach",
                                            above=0, most=1)
    bandwidth_efficiency: float = flag_field(0.6, "fraction of the memory bandwidth that decoding reaches",
                                             above=0, most=1)
    json: bool = flag_field(False, "print the plan as JSON")


# ----------------------------------------------------------------------------------------------------------------------
# Sizes of a model, counted on the meta device


class Sizes(NamedTuple):
    """Parameters of a model and of its FSDP units (parallel.sharding.apply_fsdp), and the bytes that autograd keeps."""

    config: Any
    parameters: int
    trained: int  # adapters included
    adapters: int  # in fp32 whatever --master-dtype
    root: int  # outside of the blocks: gathered from the first forward to the end of the backward
    root_trained: int
    block: int  # in the largest block
    block_trained: int
    kept: float  # per token, by a language block (mean)


class _SavedTensorsAttention(torch.autograd.Function):
    """Attention that computes nothing and saves what a fused kernel saves."""

    @staticmethod
    def forward(ctx, query, key, value):
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out


class _SavedTensorsPacking(PackedAttention):
    """The packing of one sequence, whose attention saves what a fused kernel saves."""

    def __init__(self, n: int):
        self.pieces, self.prefixes = [n], [([0], 1)]

    def __call__(self, layer, query, key, value, scale):
        repeats = query.shape[1] // key.shape[1]  # as for flex_attention
        return _SavedTensorsAttention.apply(query, *(x.repeat_interleave(repeats, dim=1) for x in (key, value)))


@cache
def count_sizes(model: ModelConfig) -> Sizes:
    """Return the sizes of a model. What autograd keeps is counted in a forward without values."""
    hf = build_meta_model(find_config(model.model), compute_dtype(model), model.family_paths)
    if lora := model.lora(seed=0):
        with torch.device("meta"):
            add_lora(hf, lora)
    set_trainable(hf.to("meta"), model.train_vision)
    family, config = hf.family, hf.config
    blocks = [*hf.get_submodule(f"{family.language}.{family.blocks}")]
    tower = [] if model.vision_frozen else hf.get_submodule(f"{family.vision}.{family.vision_blocks}")
    units = [count_parameters(block) for block in (*blocks, *tower)]
    (total, trained), n = count_parameters(hf), 8192
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    embeds = torch.empty(1, n, config.text_config.hidden_size, dtype=hf.dtype, device="meta").requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        positions = torch.zeros(3, 1, n, dtype=torch.long, device="meta")
        run_language_model(hf, embeds, positions, plan=_SavedTensorsPacking(n))
    weights = {p.untyped_storage()._cdata for p in hf.parameters()}
    kept = sum(storage.nbytes() for key, storage in storages.items() if key not in weights)
    adapters = sum(p.numel() for name, p in hf.named_parameters() if ".lora_" in name)
    in_blocks = [sum(counts) for counts in zip(*units, strict=True)]
    root = total - in_blocks[0], trained - in_blocks[1]
    return Sizes(config, total, trained, adapters, *root, *max(units), kept / n / len(blocks))


def find_config(model: str) -> str:
    """Return our folder with the config.json of a hub id, or the model itself if it is a folder or we have none."""
    folder = CONFIGS / model
    return str(folder) if not Path(model).exists() and (folder / "config.json").is_file() else model


def compute_dtype(model: ModelConfig) -> torch.dtype:
    """Return the dtype in which a GPU computes."""
    return torch.float32 if model.dtype == "float32" else torch.bfloat16


def count_parameters(module: torch.nn.Module) -> tuple[int, int]:
    """Return the numbers of all and of trained parameters."""
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return sum(p.numel() for p in module.parameters()), trained


# ----------------------------------------------------------------------------------------------------------------------
# Memory, FLOPs, seconds. `cfg` is train.py's


def gpu_memory(cfg: Any, gpus: int, patches_per_token: float = 0.0) -> dict[str, float]:
    """Return the GiB of a GPU by component, at the peak of an update of full micro-batches, their `total`, and
    `offloaded`: the GiB that --offload keeps in CPU memory, not part of the total."""
    model, s, tokens, shards = cfg.model, count_sizes(cfg.model), cfg.optim.micro_tokens, gpus // cfg.parallel.replicate
    text, vision = s.config.text_config, s.config.vision_config
    compute, master = compute_dtype(model).itemsize, 4 if model.master_dtype == "fp32" else 2
    copies = 1 + (cfg.algo.needs_values and cfg.algo.critic == "separate")
    trained = copies * (4 * s.adapters + master * (s.trained - s.adapters)) / shards
    reference = s.parameters * (cfg.algo.needs_reference and not model.lora_rank)
    if cfg.algo.reads("teacher_logps"):
        reference += count_sizes(replace(model, model=cfg.algo.teacher, lora_rank=0)).parameters
    size = {
        "weights": trained + copies * master * (s.parameters - s.trained) / shards,
        "optimizer": 2 * trained,
        "gradients": trained,
        "reference_teacher": compute * reference / shards,
    }
    names = {"none": (), "reference": ("reference_teacher",), "all": tuple(size)}[cfg.parallel.offload]
    offloaded = sum(size[name] for name in names) / GIB
    size |= dict.fromkeys(names, 0.0)

    # a trained tower is counted like a language model of its width (in Qwen2-VL hidden_size is the output's width, so
    # embed_dim is used)
    tower_width = vision.depth * getattr(vision, "embed_dim", vision.hidden_size) * (not model.vision_frozen)
    width = tokens * (text.num_hidden_layers * text.hidden_size + tower_width * patches_per_token)  # in all blocks
    block, head = s.kept * tokens, text.vocab_size * text.hidden_size * (s.root_trained > 0)
    activations = width * (compute if model.gradient_checkpointing else s.kept / text.hidden_size)
    # the peak is at one of three moments: in the head, in the backward of the last block, after that of all blocks
    temporary = max(
        4 * GPU_BLOCK_ROWS * text.vocab_size + 4 * head,
        (BACKWARD_SHARE + model.gradient_checkpointing) * block + compute * head + (compute + 4) * s.block_trained,
        (compute + 4) * s.root_trained - activations,
    )
    saves_memory = cfg.parallel.offload == "all" or model.gradient_checkpointing or model.lora_rank
    gathered = s.root + 2 * s.block if saves_memory or shards > 1 else s.parameters  # see sharding.apply_fsdp
    size |= {"unsharded": compute * gathered, "activations": activations, "temporary": temporary}
    gib = {name: n / GIB for name, n in size.items()} | {"cuda": CUDA_GIB}
    gib["vision_cache"] = model.vision_cache_gb * model.vision_frozen
    gib["engine"] = {"hf": compute * s.parameters / GIB, "vllm": ASLEEP_GIB}.get(cfg.rollout.rollout, 0.0)
    return gib | {"total": sum(gib.values()), "offloaded": offloaded}


def step_flops(cfg: Any, examples: Examples, response: float) -> dict[str, float]:
    """Return the FLOPs of a step by phase, over all GPUs. `examples` are prompts: tokens, and patches of each image;
    `response` is the mean length. The key `model` is the update without recomputation, as MFU counts it."""
    algo, model, config = cfg.algo, cfg.model, count_sizes(cfg.model).config
    group, copies = (1, algo.group_size) if model.attn == "flash" else (algo.group_size, 1)
    trained, critic = not model.vision_frozen, algo.needs_values and algo.critic == "separate"
    cached = not trained and model.vision_cache_gb > 0

    def forward(vision: float, n: int = group, copies: int = copies, head: bool = True, factor: float = 1.0) -> float:
        costs = flop_costs(config, vision)
        costs = costs._replace(token=factor * costs.token, trained_token=factor * head * costs.trained_token)
        flops = (group_flops(costs, tokens, patches, [response] * n, n * response) for tokens, patches in examples)
        return cfg.rollout.prompts_per_step * copies * fmean(flops)

    passes = sum([algo.needs_old_logps or (algo.needs_values and not critic), critic, algo.needs_reference,
                  algo.reads("teacher_logps")])
    # no features of second views are kept, except those of white images
    view = forward(1.0 - cached * (algo.view == "blank")) if algo.reads("view_logps") else 0.0
    updates, text = algo.update_epochs * (1 + critic), forward(0.0, 0, 1)
    # no gradients are computed for frozen weights, as in report.metrics.update_flops
    update = 3 * updates * forward(trained or (1 - cached) / 3, factor=2 / 3 if model.lora_rank else 1.0)
    return {
        "prefill": forward(1.0, 0, 1),
        "decode": forward(0.0, algo.group_size, 1) - text,
        "vision": cached * (forward(1.0, 0, 1) - text),
        "logprobs": passes * forward(1.0 - cached) + view,
        "update": update + updates * model.gradient_checkpointing * forward(trained, head=False),
        "model": update,
    }


def plan_engine(
    cfg: Any, plan: PlanConfig, gpus: int, prompt: float, response: float, flops: float
) -> dict[str, float]:
    """Return GiB per GPU of the rollout engines, how many sequences each samples at a time, and the seconds of a step's
    responses. `flops` are the responses' FLOPs. Each decoding step reads the weights, and keys and values of all
    sequences. The longest response then continues alone, up to --max-new-tokens."""
    settings, s, gpu = parse_pairs("--vllm", cfg.rollout.vllm), count_sizes(cfg.model), GPU_CHOICES[plan.gpu]
    with as_user_error(ValueError, "--vllm"):
        fraction, most = float(settings.get("gpu_memory_utilization", 0.6)), float(settings.get("max_num_seqs", 256))
    text, servers = s.config.text_config, cfg.servers.serve or len(cfg.servers.servers)
    tp = plan.server_gpus if cfg.servers.servers else settings.get("tensor_parallel_size", 1)
    engine_gpus, itemsize = servers * tp or gpus, compute_dtype(cfg.model).itemsize
    weights = itemsize * (s.parameters - s.adapters) / tp / GIB
    # keys and values of a token, divided over the engine's GPUs by heads
    heads = max(1, text.num_key_value_heads / tp) / text.num_attention_heads
    per_token = itemsize / 2 * flop_costs(s.config).pair * heads / GIB
    kv_cache = max(0.0, fraction * gpu.gib - weights - ASLEEP_GIB)
    responses = cfg.rollout.prompts_per_step * cfg.algo.group_size
    queued = responses * tp / engine_gpus
    sequences = max(1.0, min(queued, most, kv_cache / per_token // (prompt + response)))

    def step_seconds(n: float) -> float:
        read = (weights + n * per_token * (prompt + response / 2)) * GIB / (1e9 * gpu.bandwidth)
        computed = n * flops / responses / response / (1e12 * gpu.tflops * tp)
        return DECODING_STEP_SECONDS + max(read / plan.bandwidth_efficiency, computed / plan.training_efficiency)

    seconds = queued / sequences * response * step_seconds(sequences)
    seconds += (cfg.rollout.max_new_tokens - response) * step_seconds(1)
    return {"gpus": engine_gpus, "limit": fraction * gpu.gib, "weights": weights, "kv_cache": kv_cache,
            "per_token": per_token, "sequences": sequences, "seconds": seconds}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# The plan


def alter(cfg: Any, **values: Any) -> Any:
    """Return settings with some values replaced."""
    return type(cfg).from_flags(cfg.to_flags() | values)


def make_plan(cfg: Any, plan: PlanConfig, gpus: int, examples: Examples) -> dict[str, Any]:
    """Return the plan of a run, as --json prints it. `examples` are its prompts."""
    gpu, s, kind = GPU_CHOICES[plan.gpu], count_sizes(cfg.model), cfg.rollout.rollout
    prompt, patches = fmean(n for n, _ in examples), fmean(sum(sizes) for _, sizes in examples)
    longest = max(n for n, _ in examples) + cfg.rollout.max_new_tokens
    response = plan.response_tokens or cfg.rollout.max_new_tokens / 2
    need(response <= cfg.rollout.max_new_tokens,
         f"--response-tokens {response} exceeds --max-new-tokens {cfg.rollout.max_new_tokens}; lower it")
    responses = cfg.rollout.prompts_per_step * cfg.algo.group_size
    flops = step_flops(cfg, examples, response)
    engine = plan_engine(cfg, plan, gpus, prompt, response, flops["decode"])

    def memory(**values: Any) -> dict[str, float]:
        return gpu_memory(alter(cfg, **values), gpus, patches / (prompt + cfg.algo.group_size * response))

    def vllm_share(gib: dict[str, float]) -> float:
        """Return the largest gpu_memory_utilization that leaves room for what the trainer keeps on the GPU."""
        return math.floor(100 - 100 * (kind != "server") * sum(map(gib.get, AT_REST)) / gpu.gib) / 100

    gib, problems, flags = memory(), [], cfg.to_flags()
    largest = next((n for n in range(MAX_MICRO_TOKENS, 0, -1024) if memory(micro_tokens=n)["total"] <= gpu.gib), 0)
    tokens = min(max(largest, longest), cfg.optim.micro_tokens)
    needed = engine["weights"] + ASLEEP_GIB + longest * engine["per_token"]
    lora = {} if cfg.model.lora_rank else LORA
    # flags that need less memory -> (their settings, weight: the set with the smallest sum that fits is proposed)
    changes = {
        "--gradient-checkpointing (a third more compute)": ({"gradient_checkpointing": True}, 1),
        f"--micro-tokens {tokens} (smaller micro-batches)": ({"micro_tokens": tokens}, 1),
        "--vision-cache-gb 0 (computes image features again)": ({"vision_cache_gb": 0.0}, 1),
        f"{LORA_FLAGS * bool(lora)}--master-dtype bf16 (trains adapters only)": (lora | {"master_dtype": "bf16"}, 4),
        "--offload all (slow transfers, not counted)": ({"offload": "all"}, 8),
    }
    changes = {text: change for text, change in changes.items() if flags | change[0] != flags}  # those not on yet
    sets = (chosen for n in range(len(changes) + 1) for chosen in itertools.combinations(changes, n))
    remedy = NO_FIX
    for chosen in sorted(sets, key=lambda chosen: sum(changes[text][1] for text in chosen)):
        after = memory(**dict(ChainMap(*(changes[text][0] for text in chosen))))
        if after["total"] <= gpu.gib and (kind == "hf" or vllm_share(after) * gpu.gib >= needed):
            share, limit = vllm_share(after), engine["limit"]
            fitting = kind == "hf" or needed <= limit <= gpu.gib - (kind != "server") * sum(map(after.get, AT_REST))
            texts = [*chosen, *[f"--vllm gpu_memory_utilization={share}"] * (not fitting)]
            remedy = f"Add {' '.join(texts)}; the update then needs {after['total']:.1f} GiB"
            break
    if gib["total"] > gpu.gib:
        problems.append(f"the update needs {gib['total']:.1f} GiB, the GPU has {gpu.gib}")
    rollout, with_vllm = {name: gib[name] * (kind != "server") for name in AT_REST}, kind != "hf"
    free = gpu.gib - sum(rollout.values())
    rollout |= {"engine": gib["engine"] or ASLEEP_GIB, "engine_weights": engine["weights"] * with_vllm,
                "kv_cache": engine["kv_cache"] * with_vllm}
    if with_vllm and not needed <= engine["limit"] <= free:
        problems.append(
            f"vLLM gets {engine['limit']:.1f} GiB. It needs {needed:.1f} (weights {engine['weights']:.1f}, buffers "
            f"{ASLEEP_GIB:g}, a KV cache for {longest:,} tokens), and the trainer leaves {free:.1f}")
    if gpu.name in WITHOUT_BF16:
        problems = [f"{gpu.name} has no bf16, in which GPUs train and sample"]
        remedy = "Use an NVIDIA Ampere GPU or newer"
    rate = 1e12 * gpu.tflops * plan.training_efficiency
    seconds = {name: n / rate / gpus for name, n in flops.items() if name != "model"}
    seconds |= {"prefill": flops["prefill"] / rate / engine["gpus"], "decode": engine["seconds"]}
    sampling = seconds["prefill"] + seconds["decode"]
    training = sum(seconds.values()) - sampling
    step = max(sampling, training) if cfg.servers.async_steps else sampling + training
    all_gpus, node_gpus = gpus + engine["gpus"] * (kind == "server"), min(gpus, plan.gpus_per_node)
    hours = step * cfg.run.steps / 3600
    host = {"engines": node_gpus * engine["weights"] * (kind == "vllm"), "offloaded": node_gpus * gib["offloaded"]}
    return vars(plan) | {
        "model": cfg.model.model, "steps": cfg.run.steps, "gpus": all_gpus, "training_gpus": gpus,
        "nodes": math.ceil(all_gpus / plan.gpus_per_node), "parameters": s.parameters, "trained": s.trained,
        "responses": responses, "response_tokens": response, "prompt_tokens": prompt, "patches": patches,
        "gpu_name": f"{gpu.name} {gpu.gb:g} GB", "gpu_gib": gpu.gib,
        "memory": gib, "rollout_memory": rollout | {"total": sum(rollout.values())}, "max_micro_tokens": largest,
        "host": host, "engine": engine, "flops": flops, "seconds": seconds, "step_seconds": step,
        "tokens_per_second_per_gpu": responses * (prompt + response) / step / all_gpus,
        "mfu": plan.training_efficiency * flops["model"] / flops["update"],
        "hours": hours, "usd": hours * all_gpus * plan.gpu_hour_usd,
        "problems": problems, "fix": remedy if problems else "",
    }  # fmt: skip


def read_prompts(cfg: Any) -> Examples:
    """Return the length of each prompt of --data and the patches of its images and slices of videos, or ASSUMED_PROMPT
    for `-`."""
    if cfg.data.data == "-":
        return [ASSUMED_PROMPT]
    try:
        processor = Processor(cfg.model.model, cfg.model.min_pixels, cfg.model.max_pixels)
    except UserError as error:
        raise UserError(f"{error}; or leave out --data, to plan for prompts of 512 tokens") from error
    with redirect_stdout(sys.stderr):
        examples = load_examples(cfg.data.data, cfg.data, [processor], limit=MAX_EXAMPLES)
    cfg.rollout.check_data(examples, cfg.data.data, cfg.optim.micro_tokens)
    patches = (tuple(processor.count_patches(e.image_sizes, e.video_sizes)) for e in examples)
    return list(zip(examples.lengths, patches, strict=True))


def print_plan(argv: list[str], parse_args: Callable, check_config: Callable) -> None:
    """Print the plan of a train.py command line, and exit with 1 if it has a problem. The callables are train.py's own
    functions."""
    argv = [argument for argument in argv if argument != "--plan"]
    parser = FlagParser(__doc__, prog="train.py --plan")
    add_flags(parser, PlanConfig)
    plan = build_config(PlanConfig, vars(argparse.ArgumentParser.parse_known_args(parser, argv)[0]))
    cfg = parse_args(argv, (PlanConfig,), TOO_FEW)
    cfg = alter(cfg, rollout=cfg.rollout.rollout.replace("auto", "vllm"))
    checked = alter(cfg, model=find_config(cfg.model.model), sync="auto", offload="none")  # no GPU is needed here
    check_config(checked, plan.gpus, planned=True)
    p = make_plan(cfg, plan, plan.gpus, read_prompts(cfg))
    largest = p["max_micro_tokens"]
    print(json.dumps(p, indent=1) if plan.json else REPORT.format(
        **p,
        largest=f"{largest or 'none':{',' * (largest > 0)}}{' or more' * (largest == MAX_MICRO_TOKENS)}",
        assumed="Responses have half of --max-new-tokens on average (--response-tokens).\n" * (not plan.response_tokens)
        + "Prompts have 512 tokens with an image of 17 x 17 tokens (--data).\n" * (cfg.data.data == "-"),
        fits="\n".join([*(f"PROBLEM: {text}" for text in p["problems"]), *[f"FIX: {p['fix']}"] * bool(p["fix"])])
        or "GPU memory: fits, as computed. CPU memory: not checked."))
    if p["problems"]:
        sys.exit(1)
