"""The models of a run: policy, critic and reference with their optimizers, built, sharded and filled with weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from errors import UserError, need, plug_in
from grpo import Algorithm
from layers.attention import compile_blocks
from layers.lora import AdapterFreePolicy, add_lora
from model import Critic, ModelConfig, Policy, PolicyOutput, Processor, VisionCache, resolve_dtype
from packing import Packer
from parallel import sharding
from parallel.checkpoint import base_checksum
from parallel.loading import build_meta_model, load_sharded
from rollout import ExampleList, GetWeights, ResetFn, Rollout, identity, make_prompts
from settings import flag_field
from utils import DistContext, Meter, print0


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer"""

    lr: float = flag_field(1e-6, "peak learning rate", above=0)
    vision_lr: float | None = flag_field(
        None, "peak learning rate of the trained vision weights (default: --lr)", above=0
    )
    schedule: str = flag_field("constant", "learning-rate schedule after warmup; cosine decays to 0",
                               choices=("constant", "cosine"))
    warmup_steps: int = flag_field(0, "steps of linear learning-rate warmup", least=0)
    weight_decay: float = flag_field(0.01, "AdamW weight decay", least=0)
    max_grad_norm: float = flag_field(1.0, "max global gradient norm; larger gradients are scaled down to it", above=0)
    micro_tokens: int = flag_field(8192, "max packed tokens per micro-batch; does not change the loss", least=1)

    def check(self, model: ModelConfig, steps: int) -> None:
        need(self.vision_lr is None or not model.vision_frozen,
             f"--vision-lr {self.vision_lr}: the vision tower is frozen; choose what to train with --train-vision")
        need(self.warmup_steps <= steps, f"--warmup-steps {self.warmup_steps} exceeds --steps {steps}")

    def lr_factor(self, step: int, steps: int) -> float:
        """Return the factor of the peak learning rates at a 0-based step of `steps`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(eq=False)
class Models:
    """The models of a run and their optimizers. `critic` is a separate model, since a value head is part of the policy.
    `reference` may be the policy without its adapters."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    critic: Critic | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    reference: Policy | AdapterFreePolicy | None = None
    teacher: Policy | None = None
    dtype: torch.dtype = torch.float32  # compute dtype
    checkpointed: dict[str, tuple] = field(default_factory=dict)  # saved in checkpoints: name -> (model, optimizer)
    checkpoint_parts: list[str] = field(default_factory=list)  # result of the function checkpoint_parts
    base: str | None = None  # with LoRA: checksum of the weights that the adapters are trained on

    def with_weights(self) -> list[Policy]:
        """Return the models that have separate weights; AdapterFreePolicy shares the policy's."""
        return [model for model in (self.policy, self.critic, self.reference, self.teacher)
                if isinstance(model, Policy)]

    @property
    def vision_flop_factor(self) -> float:
        """Return the tower's factor for packing.flop_costs: 1 if trained, 1/3 if only run forward, 0 if cached."""
        if not self.policy.vision_frozen:
            return 1.0
        return 1 / 3 if self.policy.cache is None else 0.0

    def weights(self, dtype: torch.dtype) -> GetWeights:
        """Return a function that yields the policy's weights in `dtype`, as Engine.sync needs it."""
        return partial(sharding.FullParameters, self.policy, dtype=dtype)

    def logprob_passes(self, algo: Algorithm, seed: int, step: int) -> dict[str, Callable[..., PolicyOutput]]:
        """Return the forward passes that fill columns of the TokenBatch before the update, besides the old policy's:
        by column, functions of a micro-batch and a temperature."""
        models = {"ref_logps": self.reference, "teacher_logps": self.teacher}
        passes: dict[str, Callable] = {column: model for column, model in models.items() if model}
        if algo.reads("view_logps"):
            views = plug_in("algorithms._views", "--algo-args view")
            view = partial(views.view_micro_batch, kind=algo.view, amount=algo.view_share)
            seeds = seed, step
            passes["view_logps"] = lambda micro, temperature: self.policy(view(micro, seed=seeds), temperature)
        return passes

    def reshard(self) -> None:
        """Free gathered weights after forwards without a backward, because an update would leave them stale."""
        for model in self.with_weights():
            sharding.reshard(model)

    def zero_grad(self) -> None:
        """Drop the gradients of all models."""
        for model in self.with_weights():
            model.zero_grad(set_to_none=True)

    def set_learning_rates(self, optim: OptimConfig, step: int, steps: int) -> float:
        """Set the learning rates of policy, vision tower and critic for a step, and return the policy's."""
        factor = optim.lr_factor(step, steps)
        for optimizer in filter(None, (self.optimizer, self.critic_optimizer)):
            for group in optimizer.param_groups:
                group["lr"] = factor * group["peak"]
        return factor * optim.lr

    def refresh_reference(self, step: int, ref_every: int) -> None:
        """Copy the policy's weights into the reference every `ref_every` steps; 0: never."""
        if ref_every and step % ref_every == 0:
            sharding.copy_weights(self.policy, self.reference)


def build_models(cfg: Any, processor: Processor, ctx: DistContext) -> Models:
    """Return the models that the algorithm of train.py's `cfg` needs, with the weights of --model."""
    algo, optim, model = cfg.algo, cfg.optim, cfg.model
    if algo.reads("teacher_logps"):  # before anything large is loaded
        teacher = Processor(algo.teacher, model.min_pixels, model.max_pixels, "--teacher")
        plug_in("algorithms.distill", "--teacher").check_teacher(algo.teacher, model.model, processor, teacher)
    dtype = resolve_dtype(model.dtype, ctx.device)
    master = {"fp32": torch.float32, "bf16": torch.bfloat16}[model.master_dtype]

    def new_cache() -> VisionCache | None:
        return VisionCache(model.vision_cache_gb * 2**30) if model.vision_cache_gb else None

    # engine and trainer share a cache, because both compute the same features if the tower is frozen
    cache = new_cache() if model.vision_frozen else None
    lora = model.lora(cfg.run.seed)

    def build(model_class: type[Policy], frozen: bool = False, path: str = model.model, **kwargs: bool) -> Policy:
        hf, is_teacher = build_meta_model(path, dtype if frozen else master, model.family_paths), path != model.model
        if lora and not is_teacher:
            add_lora(hf, lora)
        train_vision = "none" if frozen else model.train_vision
        features = new_cache() if is_teacher else cache  # the towers may differ
        policy = model_class(hf, processor, train_vision, model.attn, features, model.kernel, **kwargs)
        policy.train(not frozen)
        assert policy.vision_frozen == (train_vision == "none"), f"--train-vision {train_vision} had no effect"
        if frozen:
            policy.requires_grad_(False)
        elif model.gradient_checkpointing:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        if model.compile:
            compile_blocks(hf.get_submodule(f"{hf.family.language}.{hf.family.blocks}"))
        sharding.apply_fsdp(policy, ctx.device, dtype, cfg.parallel, frozen)
        load_sharded(policy, path)
        return policy

    policy = build(Policy, value_head=algo.needs_values and algo.critic == "head")
    optimizer = sharding.make_optimizer(policy, optim.lr, optim.weight_decay, algo.critic_lr, optim.vision_lr)
    base = base_checksum(model.model) if lora else None
    models = Models(policy, optimizer, dtype=dtype, checkpoint_parts=checkpoint_parts(model, algo), base=base)
    models.checkpointed["policy"] = policy, optimizer
    if algo.needs_values and algo.critic == "separate":
        models.critic = build(Critic)
        models.critic_optimizer = sharding.make_optimizer(models.critic, algo.critic_lr, optim.weight_decay)
        models.checkpointed["critic"] = models.critic, models.critic_optimizer
    if algo.needs_reference:
        models.reference = AdapterFreePolicy(policy) if lora else build(Policy, frozen=True)
        if algo.ref_every:  # without it the reference stays --model and is not saved
            models.checkpointed["reference"] = models.reference, None
    if algo.reads("teacher_logps"):
        models.teacher = build(Policy, frozen=True, path=algo.teacher)
    return models


def checkpoint_parts(cfg: ModelConfig, algo: Algorithm) -> list[str]:
    """Return what a checkpoint has besides the policy's weights, by name; a resumed run must have the same parts."""
    parts = {
        "critic": algo.needs_values and algo.critic == "separate",
        f"lora_rank_{cfg.lora_rank}": cfg.lora_rank > 0,
        "reference": algo.ref_every > 0,
        "value_head": algo.needs_values and algo.critic == "head",
        "vision": not cfg.vision_frozen,  # if frozen, all models share --model's tower and its features
    }
    return [part for part, included in parts.items() if included]


@contextmanager
def peak_memory(meter: Meter, asleep_bytes: Callable[[], int]) -> Iterator[None]:
    """Record the peak GPU memory of the block as memory/peak_gib. `asleep_bytes` is subtracted: memory that a sleeping
    engine has released, but torch's allocator still counts."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield
    if torch.cuda.is_available():
        meter.max("memory/peak_gib", (torch.cuda.max_memory_allocated() - asleep_bytes()) / 2**30)


ASLEEP_GIB = 3.0  # GPU memory that vLLM keeps while it sleeps: CUDA graphs, its context and workspaces


def probe_memory(
    policy: Policy,
    examples: ExampleList,
    packer: Packer,
    processor: Processor,
    cfg: Any,
    reset_fn: ResetFn = identity,
) -> int:
    """Try the largest possible micro-batch before the first step, not hours into the run; return its number of tokens.

    Its forward and backward run twice, because gradients are in memory from the second micro-batch of an update on. The
    loss is 0, so nothing is learnt. Raise UserError if the micro-batch does not fit in the GPU's memory together with a
    full vision cache and a sleeping engine. `cfg` is train.py's.
    """
    longest = examples[examples.lengths.index(max(examples.lengths))]
    prompt = make_prompts([longest], processor, reset_fn=reset_fn)[0]
    remaining, max_new_tokens = packer.max_tokens - len(prompt.token_ids), cfg.rollout.max_new_tokens
    rollouts = []
    for sample, start in enumerate(range(0, remaining, max_new_tokens)):
        n = min(max_new_tokens, remaining - start)
        response = [sample % 100] * n + processor.eos_ids[:1]  # first tokens differ, so only the prompt is shared
        rollouts.append(Rollout(prompt, sample, response, [True] * (n + 1), [0.0] * (n + 1), "length", ""))
    micro = max(packer.pack(rollouts), key=lambda micro: micro.n_tokens)
    remedy = "lower it, or use --gradient-checkpointing"
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(2):
            out = policy(micro)
            (0.0 * (out.logp_K + out.entropy_K).sum()).backward()
    except torch.OutOfMemoryError as error:
        raise UserError(f"--micro-tokens {packer.max_tokens}: a full micro-batch does not fit in this GPU's memory "
                        f"({str(error).splitlines()[0]}); {remedy}") from error
    policy.zero_grad(set_to_none=True)
    if cuda:
        cache = cfg.model.vision_cache_gb if policy.cache is not None else 0.0
        reserve = cache + (ASLEEP_GIB if cfg.rollout.rollout == "vllm" else 0.0)
        peak, total = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.mem_get_info()[1] / 2**30
        print0(f"fullest micro-batch: {micro.n_tokens} tokens, peak {peak:.1f} of {total:.1f} GiB")
        need(peak + reserve <= total,
             f"--micro-tokens {packer.max_tokens}: a full micro-batch needs {peak:.1f} GiB, vision cache and sleeping "
             f"engine need {reserve:.1f} GiB, but this GPU has {total:.1f} GiB; {remedy}")
    return micro.n_tokens
