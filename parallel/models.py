"""What trains: policy, critic and reference with their optimizers, built without weights, sharded and filled."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from errors import UserError, need
from grpo import Algorithm
from layers.lora import AdapterFreePolicy, add_lora
from model import Critic, ModelConfig, Policy, Processor, VisionCache, resolve_dtype
from packing import Packer
from parallel import sharding
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
             f"--vision-lr {self.vision_lr}: nothing of the tower trains; choose with --train-vision")
        need(self.warmup_steps <= steps, f"--warmup-steps {self.warmup_steps} exceeds --steps {steps}")

    def lr_factor(self, step: int, steps: int) -> float:
        """Share of the peak learning rates at a 0-based step of so many."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(eq=False)
class Models:
    """`critic` is a separate one; a value head is part of the policy. `reference` may be the policy without
    adapters."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    critic: Critic | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    reference: Policy | AdapterFreePolicy | None = None
    dtype: torch.dtype = torch.float32  # of computation
    checkpointed: dict[str, tuple] = field(
        default_factory=dict
    )  # what a checkpoint holds: model and optimizer, by name
    checkpoint_parts: list[str] = field(default_factory=list)  # saved_parts

    def with_weights(self) -> list[Policy]:
        """The models that have weights of their own."""
        return [model for model in (self.policy, self.critic, self.reference) if isinstance(model, Policy)]

    @property
    def vision_flop_factor(self) -> float:
        """Of the vision tower in an update, see packing.flop_rates: trained, or only run forward, or cached."""
        if not self.policy.vision_frozen:
            return 1.0
        return 1 / 3 if self.policy.cache is None else 0.0

    def weights(self, dtype: torch.dtype) -> GetWeights:
        """Return the policy's weights as engines take them (Engine.sync)."""
        return partial(sharding.FullParameters, self.policy, dtype=dtype)

    def reshard(self) -> None:
        """After forwards that no backward follows: or an update would leave gathered weights stale."""
        for model in self.with_weights():
            sharding.reshard(model)

    def zero_grad(self) -> None:
        for model in self.with_weights():
            model.zero_grad(set_to_none=True)

    def set_learning_rates(self, optim: OptimConfig, step: int, steps: int) -> float:
        """The policy's, which it returns, the vision tower's and the critic's."""
        factor = optim.lr_factor(step, steps)
        for optimizer in filter(None, (self.optimizer, self.critic_optimizer)):
            for group in optimizer.param_groups:
                group["lr"] = factor * group["peak"]
        return factor * optim.lr

    def refresh_reference(self, step: int, ref_every: int) -> None:
        """The reference becomes the policy, every so many steps."""
        if ref_every and step % ref_every == 0:
            sharding.copy_weights(self.policy, self.reference)


def build_models(cfg: Any, processor: Processor, ctx: DistContext) -> Models:
    """All that the algorithm of train.py's `cfg` needs, at the weights of --model."""
    algo, optim, model = cfg.algo, cfg.optim, cfg.model
    dtype = resolve_dtype(model.dtype, ctx.device)
    master = {"fp32": torch.float32, "bf16": torch.bfloat16}[model.master_dtype]
    # One cache for engine and trainer: with the tower frozen both compute the same features
    cached = model.vision_frozen and model.vision_cache_gb > 0
    cache = VisionCache(model.vision_cache_gb * 2**30) if cached else None
    lora = model.lora(cfg.run.seed)

    def build(kind: type[Policy], frozen: bool = False, **more: bool) -> Policy:
        hf = build_meta_model(model.model, dtype if frozen else master, model.family_paths)
        if lora:
            add_lora(hf, lora)
        train_vision = "none" if frozen else model.train_vision
        policy = kind(hf, processor, train_vision, model.attn, cache, model.kernel, **more).train(not frozen)
        if frozen:
            policy.requires_grad_(False)
        elif model.gradient_checkpointing:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        sharding.apply_fsdp(policy, ctx.device, dtype, cfg.parallel, frozen)
        load_sharded(policy, model.model)
        return policy

    policy = build(Policy, value_head=algo.needs_values and algo.critic == "head")
    optimizer = sharding.make_optimizer(policy, optim.lr, optim.weight_decay, algo.critic_lr, optim.vision_lr)
    models = Models(policy, optimizer, dtype=dtype, checkpoint_parts=checkpoint_parts(model, algo))
    models.checkpointed["policy"] = policy, optimizer
    if algo.needs_values and algo.critic == "separate":
        models.critic = build(Critic)
        models.critic_optimizer = sharding.make_optimizer(models.critic, algo.critic_lr, optim.weight_decay)
        models.checkpointed["critic"] = models.critic, models.critic_optimizer
    if algo.needs_reference:
        models.reference = AdapterFreePolicy(policy) if lora else build(Policy, frozen=True)
        if algo.ref_every:  # one that is never refreshed is --model, and is read from there
            models.checkpointed["reference"] = models.reference, None
    return models


def checkpoint_parts(cfg: ModelConfig, algo: Algorithm) -> list[str]:
    """What a checkpoint holds besides the policy's own weights; what a resumed run must have, too."""
    parts = {
        "critic": algo.needs_values and algo.critic == "separate",
        f"lora_rank_{cfg.lora_rank}": cfg.lora_rank > 0,
        "reference": algo.ref_every > 0,
        "value_head": algo.needs_values and algo.critic == "head",
        "vision": not cfg.vision_frozen,  # else all models have --model's tower, and share its features
    }
    return [part for part, held in parts.items() if held]


@contextmanager
def peak_memory(meter: Meter, asleep_bytes: Callable[[], int]) -> Iterator[None]:
    """Record the peak GPU memory of the block as memory/peak_gib. `asleep_bytes` is subtracted: memory that a sleeping
    engine gave back, but torch's allocator still counts."""
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
    start_of: ResetFn = identity,
) -> int:
    """Try the fullest micro-batch there can be before the first step rather than hours into the run; return its tokens.

    Run its forward and backward twice, because gradients are in memory from the second micro-batch of an update on. The
    loss is 0, so nothing is learnt. Raise UserError if the micro-batch does not fit, together with a full vision cache
    and a sleeping engine. `cfg` is train.py's.
    """
    longest = examples[examples.lengths.index(max(examples.lengths))]
    prompt = make_prompts([longest], processor, start_of=start_of)[0]
    room, max_new_tokens = packer.max_tokens - len(prompt.token_ids), cfg.rollout.max_new_tokens
    rollouts = []
    for sample, taken in enumerate(range(0, room, max_new_tokens)):
        n = min(max_new_tokens, room - taken)
        response = [sample % 100] * n + processor.eos_ids[:1]  # the first token tells responses apart
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
             f"engine {reserve:.1f}; this GPU has {total:.1f}; {remedy}")
    return micro.n_tokens
