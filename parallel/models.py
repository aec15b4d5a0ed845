"""What trains: policy, critic and reference with their optimizers, built without weights, sharded and filled."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from errors import UserError, need
from grpo import Algorithm
from layers.lora import AdaptersOff, add_lora
from model import Critic, ModelConfig, Policy, Processor, VisionCache, default_dtype
from packing import Packer
from parallel.loading import load_sharded, meta_hf
from parallel.sharding import (
    copy_weights,
    make_optimizer,
    reshard,
    same_tower,
    set_learning_rate,
    shard,
)
from parallel.tensor_parallel import check_tp
from rollout import Examples, Rollout, make_prompts
from settings import setting
from utils import Context, print0


@dataclass(frozen=True)
class OptimConfig:
    """Optimiser"""

    lr: float = setting(1e-6, "peak learning rate", above=0)
    vision_lr: float | None = setting(None, "of what trains of the vision tower (default: --lr)", above=0)
    critic_lr: float = setting(1e-5, "of the value head or the separate critic", above=0)
    schedule: str = setting("constant", "after the warm-up; cosine ends at 0", choices=("constant", "cosine"))
    warmup_steps: int = setting(0, "steps of linear warm-up", least=0)
    weight_decay: float = setting(0.01, "AdamW's", least=0)
    max_grad_norm: float = setting(1.0, "clip the global gradient norm to this", above=0)
    micro_tokens: int = setting(8192, "most tokens in a micro-batch", least=1)

    def check(self, model: ModelConfig, steps: int) -> None:
        need(self.vision_lr is None or not model.vision_frozen,
             f"--vision-lr {self.vision_lr}: nothing of the tower trains; choose with --train-vision")
        need(self.warmup_steps <= steps, f"--warmup-steps {self.warmup_steps} exceeds --steps {steps}")

    def factor(self, step: int, steps: int) -> float:
        """Share of the peak learning rates at a 0-based step of so many."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism"""

    replicate: int = setting(1, "HSDP: shard within this many groups of processes (nodes), replicate across "
                                "them", least=1)
    tp: int = setting(1, "tensor parallelism: so many neighbouring processes divide each language block", least=1)
    offload: str = setting("none", "keep in the CPU's memory (GPU only): the reference between uses, or all weights, "
                           "gradients and optimizers", choices=("none", "reference", "all"))

    def check(self, world: int, model: transformers.PreTrainedConfig) -> None:
        if world % self.replicate:
            raise UserError(f"--replicate {self.replicate}: {world} processes do not divide into so many groups")
        if world % (self.replicate * self.tp):
            within = f" within each of --replicate {self.replicate}" if self.replicate > 1 else ""
            raise UserError(f"--tp {self.tp}: {world} processes do not divide into groups of so many{within}")
        if self.offload != "none" and not torch.cuda.is_available():
            raise UserError(f"--offload {self.offload}: there is no GPU whose memory it could spare; leave it out")
        check_tp(model, self.tp)


@dataclass(eq=False)
class Models:
    """`critic` is a separate one; a value head is part of the policy. `reference` may be the policy without
    adapters."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    critic: Critic | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    reference: Policy | AdaptersOff | None = None
    dtype: torch.dtype = torch.float32  # of computation
    saved: dict[str, tuple] = field(default_factory=dict)  # what a checkpoint holds of each, by name

    def each(self) -> Iterator[Policy]:
        """The models that have weights of their own."""
        for model in (self.policy, self.critic, self.reference):
            if isinstance(model, Policy):
                yield model

    def reshard(self) -> None:
        """After forwards that no backward follows: or an update would leave gathered weights stale."""
        for model in self.each():
            reshard(model)

    def zero_grad(self) -> None:
        for model in self.each():
            model.zero_grad(set_to_none=True)

    def set_learning_rates(self, optim: OptimConfig, step: int, steps: int) -> float:
        """The policy's, which it returns, the vision tower's and the critic's."""
        factor = optim.factor(step, steps)
        vision_lr = None if optim.vision_lr is None else factor * optim.vision_lr
        set_learning_rate(self.optimizer, factor * optim.lr, factor * optim.critic_lr, vision_lr)
        if self.critic:
            set_learning_rate(self.critic_optimizer, factor * optim.critic_lr)
        return factor * optim.lr

    def after_step(self, step: int, ref_every: int) -> None:
        """The reference becomes the policy, every so many steps."""
        if ref_every and step % ref_every == 0:
            copy_weights(self.policy, self.reference)
            self.reference.cache = self.policy.cache  # now of one tower

    def own_caches(self) -> None:
        """A model whose tower is not the policy's, in a run that once trained its tower, caches features of its own."""
        for model in self.each():
            if model.cache is not None and not same_tower(self.policy, model):
                model.cache = VisionCache(self.policy.cache.max_bytes)


def build_models(
    cfg: ModelConfig, algo: Algorithm, optim: OptimConfig, parallel: ParallelConfig, processor: Processor, ctx: Context,
    seed: int,
) -> Models:
    """All that the algorithm needs, at the weights of --model."""
    dtype = default_dtype(ctx.device) if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
    master = {"fp32": torch.float32, "bf16": torch.bfloat16}[cfg.master_dtype]
    # One cache for engine and trainer: with the tower frozen both compute the same features
    cache = VisionCache(cfg.vision_cache_gb * 2**30) if cfg.vision_frozen and cfg.vision_cache_gb > 0 else None
    lora = cfg.lora(seed)

    def build(kind: type[Policy], **more: Any) -> Policy:
        hf = meta_hf(cfg.model, master, cfg.family_paths)
        if lora:
            add_lora(hf, lora)
        model = kind(hf, processor, cfg.train_vision, cfg.attn, cache, cfg.kernel, **more).train()
        if cfg.grad_checkpointing:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        place(model, offload=parallel.offload == "all")
        return model

    def place(model: Policy, **more: bool) -> None:
        shard(model, ctx.device, dtype, replicate=parallel.replicate, tp=parallel.tp, **more)
        load_sharded(model, cfg.model)

    policy = build(Policy, value_head=algo.needs_values and algo.critic == "head")
    optimizer = make_optimizer(policy, optim.lr, optim.weight_decay, optim.critic_lr, optim.vision_lr)
    models = Models(policy, optimizer, dtype=dtype, saved={"policy": (policy, optimizer)})
    if algo.needs_values and algo.critic == "separate":
        models.critic = build(Critic)
        models.critic_optimizer = make_optimizer(models.critic, optim.critic_lr, optim.weight_decay)
        models.saved["critic"] = models.critic, models.critic_optimizer
    if algo.needs_reference and lora:
        models.reference = AdaptersOff(policy)
    elif algo.needs_reference:
        hf = meta_hf(cfg.model, dtype, cfg.family_paths)
        models.reference = Policy(hf, processor, "none", cfg.attn, cache, cfg.kernel).requires_grad_(False).eval()
        place(models.reference, frozen=True, offload=parallel.offload != "none")
        if algo.ref_every:  # one that is never refreshed is --model, and is read from there
            models.saved["reference"] = models.reference, None
    return models


def saved_parts(cfg: ModelConfig, algo: Algorithm) -> list[str]:
    """What a checkpoint holds besides the policy's own weights; what a resumed run must have, too."""
    parts = {
        "critic": algo.needs_values and algo.critic == "separate",
        "reference": algo.ref_every > 0,
        "value_head": algo.needs_values and algo.critic == "head",
        f"lora_rank_{cfg.lora_rank}": cfg.lora_rank > 0,
    }
    return sorted(name for name, held in parts.items() if held)


def probe_memory(
    policy: Policy, examples: Examples, packer: Packer, processor: Processor, max_new_tokens: int, temperature: float
) -> int:
    """Forward and backward of the fullest micro-batch there can be, before the first step rather than hours into the
    run. Its loss is 0, so nothing is learnt. Returns its tokens; UserError where the GPU's memory does not hold it."""
    longest = examples[examples.lengths.index(max(examples.lengths))]
    prompt = make_prompts([longest], processor)[0]
    room = packer.max_tokens - len(prompt.token_ids)
    rollouts = []
    while room > 0:
        n = min(max_new_tokens, room)
        response = [len(rollouts) % 100] * n + processor.eos_ids[:1]  # the first token tells responses apart
        rollouts.append(Rollout(prompt, len(rollouts), response, [True] * (n + 1), [0.0] * (n + 1), "length", ""))
        room -= n
    micro = max(packer.pack(rollouts), key=lambda micro: micro.n_tokens)
    try:
        out = policy(micro, temperature)
        (0.0 * (out.logp_K + out.entropy_K).sum()).backward()
    except torch.OutOfMemoryError as e:
        raise UserError(
            f"--micro-tokens {packer.max_tokens}: a full micro-batch of {micro.n_tokens} tokens does not fit in this "
            f"GPU's memory ({str(e).splitlines()[0]}); lower it, or turn on --grad-checkpointing"
        ) from e
    policy.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
        print0(f"fullest micro-batch: {micro.n_tokens} tokens, peak {peak:.1f} GiB")
    return micro.n_tokens
