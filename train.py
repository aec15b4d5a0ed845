"""Reinforcement learning of a vision-language model.

1 process:  python train.py --model demo/start --data demo/train.parquet --out out/shapes
8 GPUs:     torchrun --nproc-per-node 8 train.py --model Qwen/Qwen2.5-VL-7B-Instruct --data geo3k.parquet --out out/geo3k

Each step: rollout, reward, advantage, pack, update, sync, report. --algo names an algorithm: settings of flags that may also
be given one by one. How the default differs from the GRPO paper (arXiv:2402.03300): (1) every token counts alike in the loss
(--loss-agg token), not every sequence; (2) without --kl-coef there is no KL term and so no reference model; (3) with one
update per step the old policy is the current one, so no separate pass computes its log-probabilities; (4) a group whose
rewards are all equal has no gradient and costs no forward; (5) a prompt and its pictures are computed once for all of its
responses.

Axes: P prompts of a step, G samples per prompt, T packed tokens, K scored tokens.
"""

import argparse
import importlib.util
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

import grpo
from errors import UserError, check_writable
from eval import evaluate, rollout_page, summarise
from kernels import KERNELS, resolve_kernel
from model import (
    ATTENTION,
    AdaptersOff,
    Critic,
    Policy,
    Processor,
    VisionCache,
    add_lora,
    default_dtype,
    load_config,
    load_hf,
    load_processor,
    resolve_attention,
)
from parallel.checkpoint import (
    check_room,
    complete_checkpoints,
    intact,
    load_checkpoint,
    on_rank0,
    read_trainer,
    run_args,
    save_checkpoint,
)
from parallel.watch import Interrupt, Watch
from prepare_data import Example, add_reading_flags, read_flagged
from reward import check_tasks, grader_stats, load_reward, score_batch, try_reward
from rollout import (
    SPECIAL_TOKEN,
    HFEngine,
    Rollout,
    Sampling,
    VLLMEngine,
    drop_long_prompts,
    make_prompts,
    picture_limits,
    resolve_engine,
    vllm_settings,
)
from self_test import self_test
from sharding import (
    check_tp,
    clip_gradients,
    copy_weights,
    full_parameters,
    load_sharded,
    lora_of,
    make_optimizer,
    meta_hf,
    same_tower,
    set_learning_rate,
    shard,
)
from utils import (
    Context,
    RunLog,
    Timers,
    all_sum,
    derive_seed,
    dist_setup,
    from_peers,
    gather0,
    gather_dicts,
    lock_folder,
    print0,
    read_rows,
    run_script,
    write_text,
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    flag = argparse.BooleanOptionalAction
    # model
    p.add_argument("--model", required=True, help="model folder or hub id")
    p.add_argument("--vision-attr", help="for a family that model.FAMILIES lacks: where its tower is, such as model.visual")
    p.add_argument("--language-attr", help="and its language model, such as model.language_model; both or neither")
    p.add_argument("--freeze-vision", action=flag, default=True, help="keep the vision tower as it is")
    p.add_argument("--freeze-merger", action=flag, help="keep what projects its patches into the language model (default: as the tower)")
    p.add_argument("--vision-lr", type=float, help="peak learning rate of what trains of the tower and merger (default: --lr)")
    p.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
                   help="of computation (auto: bfloat16 on a GPU)")
    p.add_argument("--master-dtype", choices=("fp32", "bf16"), default="fp32",
                   help="of weights and optimizer; bf16 is half the memory but loses small updates, except to LoRA's fp32 adapters")
    p.add_argument("--replicate", type=int, default=1, help="HSDP: shard within this many groups of processes (nodes) and replicate across")
    p.add_argument("--tp", type=int, default=1, help="tensor parallelism: so many neighbouring processes divide each language block")
    p.add_argument("--cpu-offload", action=flag, default=False, help="keep weights, gradients and optimizer in the CPU's memory (GPU only)")
    p.add_argument("--attn", choices=("auto", *ATTENTION), default="auto",
                   help="attention of the update: sdpa (CPU), flex (block mask, GPU) or flash (GPU; prompts are not shared)")
    p.add_argument("--vision-cache-gb", type=float, default=2.0, help="memory for features of a frozen tower (0 = off)")
    p.add_argument("--kernel", choices=KERNELS, default="auto", help="policy head: Triton kernels (GPU) or plain torch")
    p.add_argument("--grad-checkpointing", action=flag, default=False, help="recompute activations in the backward")
    # LoRA: adapters learn beside frozen weights. It wants a larger --lr, say 3e-5
    p.add_argument("--lora-rank", type=int, default=0, help="rank of the adapters (0 = train the weights themselves)")
    p.add_argument("--lora-alpha", type=float, default=32.0, help="adapters count alpha / rank times")
    p.add_argument("--lora-dropout", type=float, default=0.0, help="of the adapters' inputs, in the update only")
    p.add_argument("--lora-targets", nargs="+", help="linear layers of the language blocks (default: all that the family lists)")
    p.add_argument("--lora-vision", action=flag, default=False, help="adapt the linear layers of the vision tower's blocks too")
    # data
    p.add_argument("--data", required=True, help="training parquet file(s), see prepare_data.py")
    p.add_argument("--eval-data", help="parquet file(s) for evaluation during training")
    add_reading_flags(p)
    p.add_argument("--max-prompt-tokens", type=int, default=2048, help="longer prompts are dropped and counted")
    p.add_argument("--min-pixels", type=int, help="enlarge smaller pictures to this many pixels (default: the processor's)")
    p.add_argument("--max-pixels", type=int, help="shrink larger pictures to this many pixels (default: the processor's)")
    # rollout
    p.add_argument("--prompts-per-step", type=int, default=16, help="P, over all processes")
    p.add_argument("--group-size", type=int, default=8, help="G, samples per prompt")
    p.add_argument("--max-new-tokens", type=int, default=512, help="longest response, tokens")
    p.add_argument("--temperature", type=float, default=1.0, help="of sampling and of all log-probabilities")
    p.add_argument("--top-p", type=float, default=1.0, help="1: the loss is of the whole distribution, so that is sampled from")
    p.add_argument("--rollout", choices=("auto", "hf", "vllm"), default="auto", help="engine (auto: vllm on a GPU where it is installed)")
    p.add_argument("--rollout-rows", type=int, default=256, help="responses decoded together")
    p.add_argument("--rollout-tp", type=int, default=1, help="processes that share one vLLM engine (tensor parallel)")
    p.add_argument("--gpu-memory-utilization", type=float, default=0.6, help="share of the GPU's memory for vLLM while it is awake")
    p.add_argument("--max-num-batched-tokens", type=int, default=8192, help="tokens in one forward of vLLM; longer prefills go in chunks")
    p.add_argument("--vllm-sleep", type=int, choices=(0, 1, 2), default=1,
                   help="during the update vLLM keeps its memory (0), its weights in host memory (1), or nothing (2; all are sent again)")
    p.add_argument("--vllm", nargs="+", metavar="KEY=VALUE", help="further arguments of vLLM's LLM, such as kv_cache_dtype=fp8")
    p.add_argument("--limit-images", type=int, help="leave out, and count, prompts with more pictures (default: none)")
    p.add_argument("--sync-bucket-mb", type=int, default=512, help="weights handed to vLLM at a time")
    p.add_argument("--self-test", action=flag, default=True, help="compare engine and trainer on real prompts before the first step")
    # algorithm: --algo presets the flags that say (preset), and what is given here wins
    p.add_argument("--algo", choices=tuple(grpo.PRESETS), default="grpo", help="named settings of the flags below, see grpo.PRESETS")
    p.add_argument("--reward", help="FILE.py:FUNCTION instead of the task's own reward")
    p.add_argument("--adv", choices=grpo.ADVANTAGES, help="advantage: within a group, against the step, or by a critic (preset)")
    p.add_argument("--norm-std", choices=("group", "batch", "none"), help="standard deviation that divides advantages (preset)")
    p.add_argument("--loss", choices=grpo.LOSSES, help="what the advantage weighs, see grpo.policy_loss (preset)")
    p.add_argument("--clip-low", type=float, help="ratio is clipped below 1 - this (preset)")
    p.add_argument("--clip-high", type=float, help="ratio is clipped above 1 + this (preset)")
    p.add_argument("--dual-clip", type=float, help="bound on the loss of a token with negative advantage, > 1 (default: off)")
    p.add_argument("--sapo-tau-positive", type=float, default=1.0, help="sapo: steepness of the gate where the advantage is positive")
    p.add_argument("--sapo-tau-negative", type=float, default=1.05, help="sapo: the same where it is not")
    p.add_argument("--loss-agg", choices=grpo.LOSS_AGGREGATIONS,
                   help="what counts alike: tokens, sequences, or tokens over a constant (preset)")
    p.add_argument("--truncated", choices=("keep", "mask", "penalise"),
                   help="responses cut at --max-new-tokens: train on them, do not, or lower the reward of overlong ones (preset)")
    p.add_argument("--overlong-buffer", type=int, help="penalise: last tokens, over which the penalty grows to 1 (default: a fifth)")
    p.add_argument("--tis-cap", type=float, help="weigh each token by trainer / engine probability, at most this (default: off)")
    p.add_argument("--tis-mask", metavar="LOW,HIGH", help="leave out responses whose geometric mean of trainer / engine is outside")
    p.add_argument("--sample-rounds", type=int, help="sample until all groups have unequal rewards, so often at most (1 = off; preset)")
    p.add_argument("--epochs", type=int, help="passes over the rollouts of a step (preset)")
    p.add_argument("--minibatches", type=int, help="optimizer steps per pass (preset)")
    p.add_argument("--target-kl", type=float, help="end a step's updates once KL(old, current) exceeds this (default: off)")
    p.add_argument("--entropy-coef", type=float, help="weight of the entropy bonus (preset)")
    p.add_argument("--kl-coef", type=float, help="weight of the KL to the reference policy (0 = no reference; preset)")
    p.add_argument("--kl", choices=grpo.KL_KINDS, help="its estimator (preset)")
    p.add_argument("--kl-in", choices=("loss", "reward"), help="where it counts (preset)")
    p.add_argument("--kl-target", type=float, help="adapt --kl-coef to keep the KL near this, nats a token (default: constant)")
    p.add_argument("--kl-horizon", type=float, default=10000, help="samples in which the adaptive coefficient can change by about a fifth")
    p.add_argument("--ref-every", type=int, default=0, help="steps between copies of the policy into the reference (0 = it stays --model)")
    p.add_argument("--ref-offload", action=flag, default=False, help="keep the reference in the memory of the CPU between uses (GPU only)")
    # PPO's critic, with --adv gae
    p.add_argument("--critic", choices=("head", "separate"), default="head", help="value head on the policy, or on a copy of the model")
    p.add_argument("--critic-lr", type=float, default=1e-5, help="peak learning rate of the value head or the separate critic")
    p.add_argument("--critic-warmup-steps", type=int, default=0, help="first steps in which the policy stays as it is")
    p.add_argument("--gamma", type=float, default=0.99, help="discount per token; for long responses use 1")
    p.add_argument("--lam", type=float, default=0.95, help="lambda of the advantage estimate (1 = whole returns, 0 = one step)")
    p.add_argument("--value-coef", type=float, default=0.5, help="weight of the value loss")
    p.add_argument("--value-clip", type=float, default=0.2, help="values are clipped to this around the old ones (0 = off)")
    # optimisation
    p.add_argument("--steps", type=int, required=True, help="rollout steps of the whole run")
    p.add_argument("--lr", type=float, default=1e-6, help="peak learning rate")
    p.add_argument("--schedule", choices=("constant", "cosine"), default="constant", help="after the warm-up; cosine ends at 0")
    p.add_argument("--warmup-steps", type=int, default=0, help="steps of linear warm-up")
    p.add_argument("--weight-decay", type=float, default=0.01, help="AdamW's (0 = off)")
    p.add_argument("--max-grad-norm", type=float, default=1.0, help="clip the global gradient norm to this")
    p.add_argument("--max-skipped", type=int, default=10, help="end the run after so many updates in a row that were not finite")
    p.add_argument("--micro-tokens", type=int, default=8192, help="most tokens in a micro-batch")
    # run
    p.add_argument("--out", required=True, help="run directory")
    p.add_argument("--resume", default="no", help="no, auto (newest intact checkpoint of --out, if any), a run directory or a checkpoint")
    p.add_argument("--eval-every", type=int, default=0, help="steps between evaluations on --eval-data (0 = only before and after)")
    p.add_argument("--save-every", type=int, default=50, help="steps between checkpoints; the last step is always saved")
    p.add_argument("--keep", type=int, default=2, help="checkpoints kept")
    p.add_argument("--grace-seconds", type=float, default=60.0, help="from SIGTERM or Ctrl-C to the end; the checkpoint is made within")
    p.add_argument("--timeout-minutes", type=float, default=30.0, help="a rank that others wait for longer is named, and the run ends")
    p.add_argument("--sample-every", type=int, default=10, help="steps between printed and stored rollouts (0 = never)")
    p.add_argument("--tensorboard", action=flag, default=False, help="write OUT/tensorboard too")
    p.add_argument("--seed", type=int, default=0, help="of data order and sampling")
    args = p.parse_args(argv)
    vars(args).update(grpo.resolve_preset(args.algo, vars(args)))
    if args.freeze_merger is None:
        args.freeze_merger = args.freeze_vision
    if args.overlong_buffer is None:
        args.overlong_buffer = max(1, args.max_new_tokens // 5)
    return args


def describe_algorithm(args: argparse.Namespace) -> str:
    """The preset as resolved, with what was given against it marked."""
    preset = grpo.resolve_preset(args.algo, {})
    shown = [f"{name.replace('_', '-')} {getattr(args, name)}{'' if getattr(args, name) == value else f' (preset: {value})'}"
             for name, value in preset.items()]
    return f"algorithm {args.algo}: " + ", ".join(shown)


def scores_first(args: argparse.Namespace) -> bool:
    """Do advantages need the trainer's log-probabilities or values, so that all rollouts are scored before the update?"""
    return args.adv == "gae" or (args.kl_coef > 0 and args.kl_in == "reward")


def validate(args: argparse.Namespace, world: int) -> None:
    """Every check that needs no data, on one screen."""

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise UserError(message)

    counts = ("prompts_per_step group_size max_new_tokens max_prompt_tokens micro_tokens rollout_rows rollout_tp max_num_batched_tokens "
              "sync_bucket_mb sample_rounds epochs minibatches steps save_every keep max_skipped")
    for name in counts.split():
        value = getattr(args, name)
        need(value >= 1, f"--{name.replace('_', '-')} {value}: must be at least 1")
    for name in ("warmup_steps", "eval_every", "sample_every", "weight_decay", "vision_cache_gb", "entropy_coef", "kl_coef", "ref_every",
                 "critic_warmup_steps", "value_coef", "value_clip"):
        value = getattr(args, name)
        need(value >= 0, f"--{name.replace('_', '-')} {value}: must not be negative")
    need(args.group_size >= 2 or args.adv not in grpo.GROUP_METHODS,
         f"--group-size {args.group_size}: --adv {args.adv} compares samples of one prompt; use at least 2")
    need(args.group_size >= 2 or args.sample_rounds == 1,
         f"--group-size {args.group_size}: --sample-rounds {args.sample_rounds} looks for unequal rewards in a group; use at least 2")
    need(args.norm_std != "group" or args.adv in grpo.GROUP_METHODS,
         f"--norm-std group: --adv {args.adv} knows no groups; use batch or none")
    share = world * args.minibatches
    need(
        args.prompts_per_step % share == 0,
        f"--prompts-per-step {args.prompts_per_step} does not divide into {world} processes x {args.minibatches} "
        f"--minibatches; use a multiple of {share}",
    )
    need(world % args.rollout_tp == 0, f"--rollout-tp {args.rollout_tp} does not divide {world} processes; use a divisor")
    need(args.rollout_tp == 1 or args.rollout == "vllm", f"--rollout-tp {args.rollout_tp}: only --rollout vllm spans processes")
    need(0 < args.gpu_memory_utilization < 1, f"--gpu-memory-utilization {args.gpu_memory_utilization}: must be in (0, 1)")
    need(args.limit_images is None or args.limit_images >= 0, f"--limit-images {args.limit_images}: must not be negative")
    need(args.tis_cap is None or args.tis_cap > 0, f"--tis-cap {args.tis_cap}: must be above 0")
    if args.tis_mask is not None:
        tis_bounds(args.tis_mask)
    need(args.temperature > 0, f"--temperature {args.temperature}: training samples, so it must be above 0")
    need(args.top_p == 1, f"--top-p {args.top_p}: the loss has log-probabilities of the whole distribution, so training samples from that; "
         f"use 1 (--temperature, which the loss knows, sharpens samples)")
    need(args.grace_seconds > 0 and args.timeout_minutes > 0,
         f"--grace-seconds {args.grace_seconds} and --timeout-minutes {args.timeout_minutes} must be above 0")
    need(not (args.kl_coef > 0 and args.kl_in == "reward" and args.norm_std == "group"),
         f"--kl-in reward with --norm-std group: where all answers of a group earn the same, penalties of any size would become advantages "
         f"of 1; use --norm-std batch or none, or --kl-in loss (--kl-coef {args.kl_coef})")
    vllm_settings(args.vllm, args.rollout)
    need(0 < args.clip_low < 1 or (args.loss == "cispo" and args.clip_low == 1),
         f"--clip-low {args.clip_low}: must be in (0, 1), or 1 with --loss cispo for no bound")
    need(args.clip_high > 0, f"--clip-high {args.clip_high}: must be above 0")
    need(args.dual_clip is None or args.dual_clip > 1, f"--dual-clip {args.dual_clip}: must be above 1")
    per_token = args.adv == "gae" or (args.adv == "reinforce++" and scores_first(args))
    need(args.loss != "gspo" or not per_token,
         f"--loss gspo weighs a response as a whole, but --adv {args.adv}{'' if args.adv == 'gae' else ' --kl-in reward'} has an advantage "
         f"per token; use --loss clip")
    updates = args.epochs * args.minibatches
    need(args.loss != "reinforce" or updates == 1,
         f"--loss reinforce is right for one update a step only, not for --epochs {args.epochs} x --minibatches {args.minibatches}; "
         f"use --loss clip")
    need(args.sapo_tau_positive > 0 and args.sapo_tau_negative > 0,
         f"--sapo-tau-positive {args.sapo_tau_positive} and --sapo-tau-negative {args.sapo_tau_negative} must be above 0")
    need(1 <= args.overlong_buffer <= args.max_new_tokens,
         f"--overlong-buffer {args.overlong_buffer}: must be between 1 and --max-new-tokens {args.max_new_tokens}")
    need(args.target_kl is None or args.target_kl > 0, f"--target-kl {args.target_kl}: must be above 0; leave it out to turn it off")
    need(args.kl_target is None or (args.kl_target > 0 and args.kl_coef > 0 and args.kl_horizon > 0),
         f"--kl-target {args.kl_target} with --kl-coef {args.kl_coef} and --kl-horizon {args.kl_horizon}: all must be above 0")
    need(args.ref_every == 0 or args.kl_coef > 0, f"--ref-every {args.ref_every} refreshes a reference that only --kl-coef above 0 has")
    need(0 <= args.gamma <= 1 and 0 <= args.lam <= 1, f"--gamma {args.gamma} and --lam {args.lam} must be in [0, 1]")
    need(args.replicate >= 1 and world % args.replicate == 0,
         f"--replicate {args.replicate}: {world} processes do not divide into so many groups")
    need(args.tp >= 1 and world % (args.replicate * args.tp) == 0,
         f"--tp {args.tp}: {world} processes do not divide into groups of so many"
         + (f" within each of --replicate {args.replicate}" if args.replicate > 1 else ""))
    need(not args.cpu_offload or torch.cuda.is_available(), "--cpu-offload: there is no GPU whose memory it could spare; leave it out")
    need(args.lora_rank >= 0 and args.lora_alpha > 0 and 0 <= args.lora_dropout < 1,
         f"--lora-rank {args.lora_rank} must not be negative, --lora-alpha {args.lora_alpha} must be above 0, --lora-dropout "
         f"{args.lora_dropout} in [0, 1)")
    given = [flag for flag, value in (("--lora-vision", args.lora_vision), ("--lora-targets", args.lora_targets)) if value]
    need(args.lora_rank > 0 or not given, f"{' and '.join(given)}: there are no adapters without --lora-rank above 0")
    need(args.vision_lr is None or (args.vision_lr > 0 and (args.lora_vision or not (args.freeze_vision and args.freeze_merger))),
         f"--vision-lr {args.vision_lr}: must be above 0, and something of the tower must train: --no-freeze-vision, --no-freeze-merger or "
         f"--lora-vision")
    need(args.lora_rank == 0 or (args.freeze_vision and args.freeze_merger),
         f"--no-freeze-{'merger' if args.freeze_vision else 'vision'}: with --lora-rank {args.lora_rank} all weights are frozen; "
         f"adapt the tower with --lora-vision")
    need(args.lora_rank == 0 or args.ref_every == 0,
         f"--ref-every {args.ref_every}: with --lora-rank {args.lora_rank} the reference is the policy without its adapters; use 0")
    need(args.critic_lr > 0, f"--critic-lr {args.critic_lr}: must be above 0")
    need(args.critic_warmup_steps == 0 or args.adv == "gae",
         f"--critic-warmup-steps {args.critic_warmup_steps}: --adv {args.adv} has no critic")
    need(args.lr > 0 and args.max_grad_norm > 0, f"--lr {args.lr} and --max-grad-norm {args.max_grad_norm} must be above 0")
    need(args.warmup_steps <= args.steps, f"--warmup-steps {args.warmup_steps} exceeds --steps {args.steps}")
    need(not args.tensorboard or importlib.util.find_spec("tensorboard") is not None,
         "--tensorboard: the tensorboard package is not installed; pip install tensorboard, or leave the flag out")
    need(args.eval_every == 0 or args.eval_data, f"--eval-every {args.eval_every} needs --eval-data")
    need(not Path(args.out).is_file(), f"--out {args.out} is a file; give a directory")
    check_writable(Path(args.out), "--out")
    need(args.resume != "no" or not holds_run(Path(args.out)),
         f"--out {args.out} already holds a run; continue it with --resume auto, or choose another directory")
    need(args.resume in ("no", "auto") or (Path(args.resume) / "trainer.json").is_file() or complete_checkpoints(Path(args.resume)),
         f"--resume {args.resume}: neither 'no' nor 'auto' nor a complete checkpoint (a folder with trainer.json) nor a run that has one")


def holds_run(out: Path) -> bool:
    """Is there anything that a new run would destroy? One that ended before its first step leaves nothing."""
    return bool(complete_checkpoints(out)) or any(row["step"] > 0 for row in read_rows(out / "metrics.jsonl"))


def tis_bounds(text: str) -> tuple[float, float]:
    """--tis-mask LOW,HIGH"""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        low, high = 1.0, 0.0
    if not 0 <= low < 1 < high:
        raise UserError(f"--tis-mask {text!r}: give LOW,HIGH around 1, such as 0.5,2")
    return low, high


def load_data(args: argparse.Namespace, path: str, processor: Processor, reward_fn: Callable) -> tuple[list[Example], list[int]]:
    """Examples that are readable and fit, and their prompts' tokens; what is left out is counted and shown."""
    examples, skipped = read_flagged(path, args)
    kept, dropped, lengths = drop_long_prompts(examples, processor, args.max_prompt_tokens, args.limit_images, args.bad_rows)
    special = sum(SPECIAL_TOKEN in line for line in dropped)
    for line in (skipped + dropped)[:10]:
        print0(f"left out: {line}")
    print0(
        f"{path}: {len(kept)} examples of up to {max(lengths, default=0)} prompt tokens; left out: {len(skipped)} unreadable, "
        f"{len(dropped) - special} over --max-prompt-tokens {args.max_prompt_tokens}"
        + (f" or --limit-images {args.limit_images}" if args.limit_images is not None else "")
        + (f", {special} with special tokens in their text" if special else "")
    )
    if not kept:
        raise UserError(
            f"{path}: none of {len(examples)} prompts fits --max-prompt-tokens {args.max_prompt_tokens}"
            + (f" and --limit-images {args.limit_images}" if args.limit_images is not None else "") + "; raise it, or lower --max-pixels"
        )
    check_tasks(kept, reward_fn)
    return kept, lengths


def find_start(args: argparse.Namespace) -> Path | None:
    """The checkpoint to continue from, if any."""
    out = Path(args.out)
    newest = on_rank0(lambda: (complete_checkpoints(out) or [None])[-1])
    if args.resume == "no":
        if newest is not None:
            raise UserError(f"--out {out} already holds {newest}; continue from it with --resume auto, or choose another directory")
        return None
    given = None if args.resume == "auto" or Path(args.resume).resolve() == out.resolve() else intact(Path(args.resume))
    if given is None or newest is None or newest.resolve() != given.resolve():
        newest = intact(out, set_aside=True)
    given = given or newest
    if given is None:
        return None
    held, wanted = read_trainer(given).get("parts", []), checkpoint_parts(args)
    if held != wanted:
        raise UserError(f"--resume {given}: it holds {held or 'the policy alone'}, but --adv {args.adv}, --critic {args.critic}, "
                         f"--ref-every {args.ref_every} and --lora-rank {args.lora_rank} need "
                         f"{wanted or 'the policy alone'}; keep the run's flags, or start a new one")
    before = run_args(given) or {}
    for name in ("freeze_vision", "freeze_merger", "lora_targets", "lora_vision"):
        if name in before and before[name] != getattr(args, name):
            raise UserError(f"--resume {given}: other weights were trained there: --{name.replace('_', '-')} was {before[name]} and is "
                             f"{getattr(args, name)}; keep it, or start a new run from what merge_lora.py exports")
    if newest is not None and newest.resolve() != given.resolve():
        raise UserError(
            f"--resume {args.resume} is not the newest checkpoint of --out {args.out}, which is {newest.name}; two histories "
            f"must not mix: choose another --out, or delete the later checkpoints"
        )
    return given


def checkpoint_parts(args: argparse.Namespace) -> list[str]:
    """What a checkpoint holds beside the policy. A reference that is never refreshed is --model, and is read from there."""
    parts = {"critic": args.adv == "gae" and args.critic == "separate", "reference": args.kl_coef > 0 and args.ref_every > 0,
             "value_head": args.adv == "gae" and args.critic == "head", f"lora_rank_{args.lora_rank}": args.lora_rank > 0}
    return sorted(name for name, held in parts.items() if held)


def model_location(args: argparse.Namespace) -> str:
    """--model as run.json keeps it: readable from any directory."""
    return str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model


def changed_flags(args: argparse.Namespace) -> list[str]:
    """What differs from the flags that the run in --out was last started with."""
    path = Path(args.out) / "run.json"
    before = json.loads(path.read_text())["args"] if path.is_file() else {}
    now = {key: value for key, value in vars(args).items() if key != "resume"} | {"model": model_location(args)}
    return [f"--{k.replace('_', '-')} {before[k]} -> {v}" for k, v in now.items() if k in before and before[k] != v]


def batch_of(position: int, n_examples: int, per_step: int, seed: int) -> list[int]:
    """Indices of the examples of the batch at a 0-based position of the data, a function of it alone. The position is the
    step, unless steps sample more than once (--sample-rounds); then checkpoints keep it.

    Each epoch is a fresh shuffle; what is left over after its last full batch (another part each epoch) is not used."""
    per_epoch = n_examples // per_step
    epoch, batch = divmod(position, per_epoch)
    order = torch.randperm(n_examples, generator=torch.Generator().manual_seed(derive_seed(seed, "order", epoch)))
    return order[batch * per_step : (batch + 1) * per_step].tolist()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Of 0-based step: linear warm-up, then constant or half a cosine down to 0."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    if args.schedule == "constant":
        return args.lr
    progress = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    return args.lr * 0.5 * (1 + math.cos(math.pi * progress))


def dropout_seed(args: argparse.Namespace, step: int, rank: int) -> int:
    """The same for peers, which --tp makes neighbours: what they compute alike must stay alike."""
    return derive_seed(args.seed, "dropout", step, rank // args.tp)


def is_used(r: Rollout, args: argparse.Namespace) -> bool:
    """Does the loss count this response?"""
    return args.truncated != "mask" or r.finish_reason != "length"


def choose_groups(signals: dict[tuple[int, int], bool], n: int) -> list[tuple[int, int]]:
    """The n groups to train on, by (round, place in the batch): the first whose rewards are unequal, and where there are
    too few of them, the first others."""
    return sorted(sorted(signals, key=lambda key: (not signals[key], key))[:n])


def share(
    parts: list[list[Rollout]], peers: dist.ProcessGroup | None, examples: dict[str, Example], processor: Processor
) -> list[list[Rollout]]:
    """This process's rollouts, part by part, with those of its peers (sharding.shard). Pictures do not travel, patches being
    many times a picture's size: they are made here as they were there."""
    if peers is None:
        return parts
    light = [[replace(r, images=[]) for r in part] for part in parts]
    mine = {id(a): b for without, part in zip(light, parts, strict=True) for a, b in zip(without, part, strict=True)}
    joined = from_peers(light, peers)
    theirs = [r for part in joined for r in part if id(r) not in mine]
    images = {p.uid: p.images for p in make_prompts([examples[uid] for uid in dict.fromkeys(r.uid for r in theirs)], processor)}
    for r in theirs:
        r.images = images[r.uid]
    return [[mine.get(id(r), r) for r in part] for part in joined]


def pack_minibatch(
    rollouts: Sequence[Rollout], args: argparse.Namespace, processor: Processor, device: torch.device,
    rates: tuple[float, ...] | None = None,
) -> list[grpo.Micro]:
    """Micro-batches of this rank's part of a minibatch, even in FLOPs; the same number on every rank."""
    total = all_sum({"tokens": sum(sum(r.loss_mask) for r in rollouts if is_used(r, args)),
                     "sequences": sum(is_used(r, args) for r in rollouts)}, args.tp)
    samples = []
    for i, r in enumerate(rollouts):
        n = sum(r.loss_mask)
        advantages = r.columns.get("advantage", [r.advantage] * n)
        # Without an advantage there is no gradient, so no forward; its tokens stay in the normaliser
        pulled = any(advantages) or args.entropy_coef > 0 or (args.kl_coef > 0 and args.kl_in == "loss")
        if not scores_first(args) and not (pulled and is_used(r, args)):
            continue
        weight = 0.0  # scored, as its group's advantages need it, but not trained on
        if is_used(r, args):
            weight = grpo.token_weight(args.loss_agg, n, int(total["tokens"]), int(total["sequences"]), args.max_new_tokens)
        r.columns |= {"advantage": advantages, "weight": [weight] * n, "engine_logp": r.logprobs,
                      "has_image": [float(len(r.images) > 0)] * n}
        uid = r.uid if args.attn != "flash" else f"{r.uid}/{i}"  # flash attention knows no branches
        samples.append(grpo.Sample(uid, r.token_ids, [False] * r.prompt_len + r.loss_mask, r.columns, r.images))
    wanted = torch.zeros(1, dtype=torch.long, device=device)

    def over_ranks(needed: int) -> int:
        dist.all_reduce(wanted.fill_(needed), dist.ReduceOp.MAX)
        return int(wanted)

    micros = grpo.pack(samples, args.micro_tokens, processor.image_token_id, rates, over_ranks)
    eos = processor.eos_ids[0]
    while len(micros) < int(wanted):  # collectives must match: a rank with less work adds a forward of weight 0
        nothing = {name: [0.0] for name in ("advantage", "return", "weight", "engine_logp", "has_image")}
        micros.append(grpo.plant([grpo.Sample("idle", [eos, eos], [False, True], nothing)], processor.image_token_id))
    return micros


def probe_memory(policy: Policy, longest: Example, processor: Processor, args: argparse.Namespace) -> int:
    """Forward and backward of the fullest micro-batch there can be, before the first step rather than hours into the run.
    Its loss is 0, so nothing is learnt. Returns its tokens; ValueError when the GPU's memory does not hold it."""
    prompt = make_prompts([longest], processor)[0]
    room, samples = args.micro_tokens - len(prompt.token_ids), []
    while room > 0:
        n = min(args.max_new_tokens, room)
        tokens = prompt.token_ids + [len(samples) % 100] * n + processor.eos_ids[:1]  # the first token tells branches apart
        samples.append(grpo.Sample("probe", tokens, [False] * len(prompt.token_ids) + [True] * (n + 1), {}, prompt.images))
        room -= n
    micro = max(grpo.pack(samples, args.micro_tokens, processor.image_token_id), key=lambda m: m.n_tokens)
    try:
        (0.0 * sum(policy(micro, args.temperature)).sum()).backward()
    except torch.OutOfMemoryError as e:
        raise UserError(f"--micro-tokens {args.micro_tokens}: a full micro-batch of {micro.n_tokens} tokens does not fit in this GPU's "
                         f"memory ({str(e).splitlines()[0]}); lower it, or turn on --grad-checkpointing") from e
    policy.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        print0(f"fullest micro-batch: {micro.n_tokens} tokens, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return micro.n_tokens


@torch.no_grad()
def score(minibatches: list[list[grpo.Micro]], args, policy: Policy | None, reference: Policy | None, critic: Critic | None = None) -> None:
    """Adds what the loss compares with, under the weights before the update, to micro-batches and their rollouts: old_logp,
    value (from the policy's head or the critic) and ref_logp. A model that is None is left out."""
    for micro in (m for micros in minibatches for m in micros):
        value = ()
        if policy is not None:
            logp, _, *value = policy(micro, args.temperature)
            micro.put("old_logp", logp.cpu())
        if critic is not None:
            value = (critic(micro),)
        for value_K in value:
            micro.put("value", value_K.cpu())
        if reference is not None:
            micro.put("ref_logp", reference(micro, args.temperature)[0].cpu())
    # no backward follows that would let go of the gathered weights, which an update would leave stale
    for model in (policy, critic, getattr(reference, "policy", None)):
        if isinstance(model, FSDPModule):
            model.reshard()


def global_moments(x: torch.Tensor, alike: int = 1) -> tuple[float, float]:
    """Mean and standard deviation (Bessel's correction) of the entries of all ranks, in float64; `alike` as in all_sum."""
    total = all_sum({"n": float(x.numel()), "sum": x.double().sum().item()}, alike)
    mean = total["sum"] / max(1.0, total["n"])
    squares = all_sum({"squares": ((x.double() - mean) ** 2).sum().item()}, alike)["squares"]
    return mean, math.sqrt(squares / (total["n"] - 1)) if total["n"] > 1 else 0.0


def set_advantages(rollouts: Sequence[Rollout], args: argparse.Namespace, kl_coef: float) -> dict[str, float]:
    """Fills r.advantage and the columns advantage and, for a critic, return, of this rank's rollouts (whole groups)."""
    rewards = [r.rewards["reward"] for r in rollouts]
    penalties = [torch.zeros(sum(r.loss_mask), dtype=torch.float64) for r in rollouts]
    if kl_coef > 0 and args.kl_in == "reward":
        for i, r in enumerate(rollouts):
            logp, ref_logp = (torch.tensor(r.columns[name], dtype=torch.float64) for name in ("old_logp", "ref_logp"))
            penalties[i] = kl_coef * grpo.kl(logp, ref_logp, args.kl)

    # Where all of the step earned the same, only penalties differ, and to divide by their std would make each of them large
    only_penalties = False
    if args.norm_std == "batch" and args.kl_in == "reward" and kl_coef > 0 and args.adv != "gae":
        mean, std = global_moments(torch.tensor(rewards, dtype=torch.float64), args.tp)
        only_penalties = not std > 1e-9 * max(1.0, abs(mean))  # as in grpo.whiten: no more than the rounding of equal rewards
    if args.adv in grpo.GROUP_METHODS:  # one advantage a response: its penalties are summed
        total = torch.tensor([x - p.sum().item() for x, p in zip(rewards, penalties, strict=True)], dtype=torch.float64)
        rewards_PG = total.view(len(rollouts) // args.group_size, args.group_size)
        without = torch.zeros_like(rewards_PG[:, :1], dtype=torch.bool)
        if args.sample_rounds > 1:  # groups kept for want of others: that their lengths differ is no signal either
            task_PG = torch.tensor([r.task_reward for r in rollouts], dtype=torch.float64).view_as(rewards_PG)
            without = task_PG.amax(1, keepdim=True) == task_PG.amin(1, keepdim=True)
        moments = None
        if args.norm_std == "batch":
            moments = global_moments(grpo.group_advantages(rewards_PG, args.adv, "none").masked_fill(without, 0.0), args.tp)
            moments = (moments[0], 1.0) if only_penalties else moments
        advantages_PG = grpo.group_advantages(rewards_PG, args.adv, args.norm_std, moments).masked_fill(without, 0.0)
        for r, a in zip(rollouts, advantages_PG.flatten().tolist(), strict=True):
            r.advantage, r.columns["advantage"] = a, [a] * sum(r.loss_mask)
        return {}

    # One a token: the reward comes with the last one, penalties with each. REINFORCE++ is the case without values.
    by_critic = args.adv == "gae"
    width = max((len(p) for p in penalties), default=1)
    rewards_BT, values_BT = torch.zeros(2, len(rollouts), width, dtype=torch.float64)
    mask_BT = torch.zeros(len(rollouts), width, dtype=torch.bool)
    for i, (r, penalty) in enumerate(zip(rollouts, penalties, strict=True)):
        n = len(penalty)
        rewards_BT[i, :n] = -penalty
        rewards_BT[i, n - 1] += rewards[i]
        mask_BT[i, :n] = True
        if by_critic:
            values_BT[i, :n] = torch.tensor(r.columns["value"], dtype=torch.float64)
    gamma, lam = (args.gamma, args.lam) if by_critic else (1.0, 1.0)
    advantages_BT, returns_BT = grpo.gae(rewards_BT, values_BT, mask_BT, gamma, lam)
    counted_BT = mask_BT & torch.tensor([is_used(r, args) for r in rollouts], dtype=torch.bool)[:, None]
    if args.norm_std == "batch":
        mean, std = global_moments(advantages_BT[counted_BT], args.tp)
        advantages_BT = grpo.whiten(advantages_BT, mean, 1.0 if only_penalties else std)
    for r, advantages, returns, penalty in zip(rollouts, advantages_BT.tolist(), returns_BT.tolist(), penalties, strict=True):
        n = len(penalty)
        r.columns |= {"advantage": advantages[:n], "return": returns[:n]}
        r.advantage = sum(advantages[:n]) / n  # what reports show
    if not by_critic:
        return {}
    returns_K, values_K = returns_BT[counted_BT], values_BT[counted_BT]
    (_, spread), (_, error), (mean, _) = (global_moments(x, args.tp) for x in (returns_K, returns_K - values_K, values_K))
    return {"value/mean": mean, "value/explained_variance": 1 - (error / spread) ** 2 if spread > 0 else 0.0}


def clipped_step(model: Policy, optimizer: torch.optim.Optimizer, max_norm: float) -> tuple[float, bool]:
    """The global gradient norm before clipping, and whether there was a step. A norm of 0 means that nothing had a
    gradient; stepping would move the weights by momentum and decay alone. All ranks see the same norm."""
    norm = clip_gradients(model, max_norm)
    good = math.isfinite(norm) and norm > 0
    if good:
        optimizer.step()
    return norm, good


def update(
    policy: Policy, optimizer, minibatches: list[list[grpo.Micro]], args, ctx: Context, kl_coef: float = 0.0,
    reference: Policy | None = None, critic: Critic | None = None, critic_optimizer=None, warming: bool = False,
    skipped: "Skipped | None" = None,
) -> dict[str, float]:
    """The optimizer steps of one rollout step. Returns the step's metrics, equal on all ranks; what was not measured, for want
    of tokens with a gradient, is left out. While `warming`, only values are learnt. `skipped` is told of updates left out."""
    policy_loss = grpo.PolicyLoss(
        args.loss, args.clip_low, args.clip_high, args.dual_clip, args.kl if reference is not None and args.kl_in == "loss" else None,
        kl_coef, args.entropy_coef, args.sapo_tau_positive, args.sapo_tau_negative,
        args.tis_cap, tis_bounds(args.tis_mask) if args.tis_mask is not None else None,
    )
    on_policy = args.epochs * args.minibatches == 1
    dropout = args.lora_rank > 0 and args.lora_dropout > 0
    if not scores_first(args):
        score(minibatches, args, None if on_policy and not dropout else policy, reference)
    if on_policy and dropout:
        # The old policy is the current one, dropout included, and the ratio 1. The engine has no dropout: it is compared with
        # what was scored without.
        for micro in (micro for micros in minibatches for micro in micros):
            micro.values["trainer_logp"] = micro.values.pop("old_logp")
    sums = dict.fromkeys(("loss", "tokens", "entropy", "clipped", "kl", "kl_ref", "value_loss", "value_clipped", "capped", "masked"), 0.0)
    skipped = skipped or Skipped(None, 0)
    mismatch, norms, critic_norms, steps, empty, not_finite, stopped = Mismatch(), [], [], 0, 0, 0, 0
    for epoch, micros in ((epoch, micros) for epoch in range(args.epochs) for micros in minibatches):
        optimizer.zero_grad(set_to_none=True)
        if critic is not None:
            critic_optimizer.zero_grad(set_to_none=True)
        here = {"kl": 0.0, "tokens": 0.0, "loss": 0.0}
        for micro in micros:
            micro = micro.to(ctx.device)
            loss, logp, entropy, *value = policy(micro, args.temperature, policy_loss)
            real = micro.values["weight"] > 0
            here["loss"] += loss.item()
            if critic is not None:
                value = [critic(micro)]
            if value:
                value_K, value_clipped = grpo.value_loss(value[0], micro.values["value"], micro.values["return"], args.value_clip or None)
                value_total = (micro.values["weight"] * value_K).sum()
                sums["value_loss"] += value_total.item()
                sums["value_clipped"] += value_clipped[real].sum().item()
                if critic is None:
                    loss = loss + args.value_coef * value_total
                else:
                    (args.value_coef * value_total).backward()
            loss.backward()
            _, indicators = policy_loss(logp, entropy, micro.values)
            here["tokens"] += real.sum().item()
            here["kl"] += indicators["kl"][real].sum().item()
            sums["entropy"] += entropy[real].sum().item()
            sums["clipped"] += indicators["clipped"][real].sum().item()
            if reference is not None:
                sums["kl_ref"] += grpo.kl(logp, micro.values["ref_logp"], "k3")[real].sum().item()
            if args.tis_cap is not None:
                sums["capped"] += indicators["capped"][real].sum().item()
            if args.tis_mask is not None:
                sums["masked"] += len(micro.values["sequence"][real & ~indicators["kept"]].unique())
            if epoch == 0:  # once per token, under the weights before the update
                trainer_logp = micro.values.get("trainer_logp", micro.values.get("old_logp", logp))
                mismatch.add((trainer_logp - micro.values["engine_logp"])[real], micro.values["has_image"][real] > 0)
        for name, value in here.items():
            sums[name] += value
        if args.target_kl is not None and norms:
            everywhere = all_sum(here, args.tp)
            if everywhere["kl"] > args.target_kl * everywhere["tokens"]:
                stopped = args.epochs * args.minibatches - len(norms)
                break
        if warming:
            for name, parameter in policy.named_parameters():
                if name.startswith("hf."):
                    parameter.grad = None
        norm, stepped = clipped_step(policy, optimizer, args.max_grad_norm)
        norms.append(norm)
        if critic is not None:
            critic_norm, critic_stepped = clipped_step(critic, critic_optimizer, args.max_grad_norm)
            critic_norms.append(critic_norm)
            norm, stepped = norm + critic_norm, stepped or critic_stepped
        steps += stepped
        if math.isfinite(norm):
            empty += not stepped
            skipped.good(stepped)
        else:
            not_finite += 1
            skipped.add(here["loss"], norm, micros)
    total = all_sum(sums, args.tp)
    tokens, passes = max(1.0, total["tokens"]), len(norms) + (stopped > 0)
    metrics = {
        "loss/policy": total["loss"] / passes,
        "policy/grad_norm": sum(norms) / len(norms),
        "update/tokens": total["tokens"],
        "update/steps": float(steps),
        "update/empty": float(empty),
        "update/skipped": float(not_finite),
    }
    if args.target_kl is not None:
        metrics["update/stopped"] = float(stopped)
    if reference is not None:
        metrics["kl/coef"] = kl_coef
    if total["tokens"]:  # or nothing of this was measured
        metrics |= {name: total[key] / tokens for name, key in (
            ("policy/entropy", "entropy"), ("policy/clipped", "clipped"), ("policy/kl_old", "kl"))}
        if args.tis_cap is not None:
            metrics["rollout/tis_capped"] = total["capped"] / tokens
        if args.tis_mask is not None:
            metrics["rollout/tis_masked"] = total["masked"]
        if reference is not None:
            metrics["policy/kl_ref"] = total["kl_ref"] / tokens
        if args.adv == "gae":
            metrics |= {"loss/value": total["value_loss"] / passes, "value/clipped": total["value_clipped"] / tokens}
    if critic is not None:
        metrics["value/grad_norm"] = sum(critic_norms) / len(critic_norms)
    return metrics | mismatch.metrics(ctx, args.tp)


class Skipped:
    """Updates left out because a gradient was not finite: told once a step, kept with the uids of their batch in OUT/skipped,
    and after `limit` in a row the end of the run. An update without any gradient is neither good nor bad."""

    def __init__(self, out: Path | None, limit: int):
        self.out, self.limit, self.in_a_row = out, limit, 0
        self.of_step: list[dict] = []

    def good(self, stepped: bool) -> None:
        self.in_a_row = 0 if stepped else self.in_a_row

    def add(self, loss: float, norm: float, micros: list[grpo.Micro]) -> None:
        """This rank's part of the loss, the global norm, and the minibatch."""
        uids = sorted({sample.uid for micro in micros for sample in micro.samples})
        self.of_step.append({"loss": loss, "norm": norm, "uids": uids})
        self.in_a_row += 1

    def report(self, step: int, alike: int) -> None:
        """On all ranks at once, as all of them skip the same updates; `alike` as in all_sum."""
        mine, self.of_step = self.of_step, []
        if not mine:
            return
        ranks = gather0([mine])[::alike]
        if not ranks:
            return
        updates = [{"loss": str(sum(part["loss"] for part in parts)), "grad_norm": str(parts[0]["norm"]),
                    "uids": sorted({uid for part in parts for uid in part["uids"]})} for parts in zip(*ranks, strict=True)]
        path = self.out / "skipped" / f"step_{step:06d}.json"
        write_text(path, json.dumps({"step": step, "in_a_row": self.in_a_row, "updates": updates}, indent=2) + "\n")
        tqdm.write(f"warning: step {step} skipped {len(updates)} update(s), {self.in_a_row} in a row (the run ends at --max-skipped "
                   f"{self.limit}): loss {updates[-1]['loss']}, gradient norm {updates[-1]['grad_norm']}; the prompts are in {path}")


class Mismatch:
    """How far the trainer's log-probabilities are from the engine's on the tokens that the engine sampled."""

    def __init__(self):
        self.kinds = ("", "_text", "_image")  # all, prompts without pictures, prompts with
        self.sums: dict[str, float] = {}
        self.worst = [0.0] * 3

    def add(self, gap_K: torch.Tensor, image_K: torch.Tensor) -> None:
        """Trainer's minus engine's logprobs, and which tokens answer a prompt with pictures."""
        for i, chosen in enumerate((gap_K, gap_K[~image_K], gap_K[image_K])):
            if len(chosen):
                kind = self.kinds[i]
                self.sums[f"kl{kind}"] = self.sums.get(f"kl{kind}", 0.0) + (chosen.exp() - 1 - chosen).sum().item()  # k3, per token
                self.sums[f"n{kind}"] = self.sums.get(f"n{kind}", 0.0) + len(chosen)
                self.worst[i] = max(self.worst[i], chosen.abs().max().item())

    def metrics(self, ctx: Context, alike: int = 1) -> dict[str, float]:
        """Over all ranks, `alike` as in all_sum; a kind of prompt that the step did not have is left out."""
        total = all_sum(self.sums, alike)
        worst = torch.tensor(self.worst, dtype=torch.float64, device=ctx.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        metrics = {}
        for kind, largest in zip(self.kinds, worst.tolist(), strict=True):
            if f"n{kind}" in total:
                metrics[f"rollout/kl{kind}"] = total[f"kl{kind}"] / total[f"n{kind}"]
                metrics[f"rollout/max_abs_dlogp{kind}"] = largest
        return metrics


def make_engine(
    args: argparse.Namespace, processor: Processor, ctx: Context, dtype: torch.dtype, cache: VisionCache | None,
    examples: Sequence[Example], longest: int,
) -> HFEngine | VLLMEngine:
    """The engine that --rollout names, for prompts of up to `longest` tokens."""
    if args.rollout == "hf":
        return HFEngine(load_hf(args.model, dtype, (args.vision_attr, args.language_attr)), processor, ctx.device, args.rollout_rows, cache)
    count, largest = picture_limits(examples, processor)
    return VLLMEngine(
        args.model, processor, ctx.device, dtype, max_model_len=longest + args.max_new_tokens, max_images=count,
        largest_picture=largest, memory=args.gpu_memory_utilization, max_batched_tokens=args.max_num_batched_tokens,
        max_rows=args.rollout_rows, tp=args.rollout_tp, sleep_level=args.vllm_sleep, bucket_bytes=args.sync_bucket_mb << 20,
        more=vllm_settings(args.vllm, args.rollout),
    )


def give_rewards(rollouts: Sequence[Rollout], examples: dict[str, Example], reward_fn: Callable, args: argparse.Namespace) -> None:
    """Fills r.rewards with named parts and their total, "reward"; a total that is no number is an error."""
    parts = score_batch([r.text for r in rollouts], [examples[r.uid] for r in rollouts], reward_fn, [r.finish_reason for r in rollouts])
    for r, rewards in zip(rollouts, parts, strict=True):
        r.rewards = rewards
        if args.truncated == "penalise":
            penalty = grpo.overlong_penalty(len(r.response), args.max_new_tokens, args.overlong_buffer)
            r.rewards |= {"unpenalised": rewards["reward"], "overlong": penalty, "reward": rewards["reward"] + penalty}


def sampling_metrics(signals: dict[tuple[int, int], bool], chosen: Sequence[tuple[int, int]]) -> dict[str, float]:
    """What --sample-rounds did: rounds, groups left out for equal rewards or as more than needed, and ones kept for want of better."""
    filled = sum(not signals[key] for key in chosen)
    equal = sum(not signal for signal in signals.values())
    return {"sampling/rounds": float(1 + max(turn for turn, _ in signals)), "sampling/equal": float(equal - filled),
            "sampling/surplus": float(len(signals) - equal - len(chosen) + filled), "sampling/filled": float(filled)}


def rollout_metrics(rollouts: Sequence[Rollout], group_size: int) -> dict[str, float]:
    """Means over all ranks of rewards, lengths, and groups without a signal."""
    rewards_PG = torch.tensor([r.rewards["reward"] for r in rollouts], dtype=torch.float64).view(-1, group_size)
    constant = (rewards_PG.amax(1) == rewards_PG.amin(1)).sum().item()
    sums = {"n": float(len(rollouts)), "groups": float(len(rewards_PG)), "constant": float(constant)}
    sums["tokens"] = float(sum(len(r.response) for r in rollouts))
    sums["length"] = float(sum(r.finish_reason == "length" for r in rollouts))
    sums |= {f"grader/{why}": float(grader_stats[why]) for why in ("unreadable", "refused", "cas_timeout", "cas_budget")}
    grader_stats.clear()
    for r in rollouts:
        for part, value in r.rewards.items():  # tasks differ in their parts: a mean is over the samples that have it
            sums[f"reward/{part}"] = sums.get(f"reward/{part}", 0.0) + value
            sums[f"n/{part}"] = sums.get(f"n/{part}", 0.0) + 1
    total = all_sum(sums)
    means = {key: value / total[f"n/{key.removeprefix('reward/')}"] for key, value in total.items() if key.startswith("reward/")}
    return {
        "reward/mean": means.pop("reward/reward"),
        **means,
        **{key: value for key, value in total.items() if key.startswith("grader/")},
        "reward/constant_groups": total["constant"] / total["groups"],
        "response/tokens": total["tokens"] / total["n"],
        "response/truncated": total["length"] / total["n"],
        "rollout/tokens": total["tokens"],
    }


def rollout_records(rollouts: Sequence[Rollout], examples: dict[str, Example]) -> list[dict]:
    """Rollouts as plain records, one per prompt, for rollouts/step_*.jsonl and .html."""
    records: dict[str, dict] = {}
    for r in rollouts:
        example = examples[r.uid]
        record = records.setdefault(r.uid, {"uid": r.uid, "ground_truth": example.ground_truth, "samples": []})
        record["samples"].append({"text": r.text, "finish_reason": r.finish_reason, "tokens": len(r.response),
                                  "rewards": r.rewards, "advantage": r.advantage})
    return list(records.values())


FLAT_STEPS = 5


def no_signal(m: dict[str, float], args: argparse.Namespace) -> bool:
    """Was there nothing to tell good samples of a step from bad ones? Groups of one are compared with the step."""
    return m["reward/constant_groups"] == 1 and (args.group_size > 1 or m["update/empty"] > 0)


def show_samples(record: dict, example: Example) -> None:
    """One prompt and its first two responses, on the terminal."""
    question = " / ".join(m["content"] for m in example.messages if m["role"] == "user")
    tqdm.write(f"  prompt {example.uid!r}: {question[:160]!r}  truth {example.ground_truth!r}")
    for s in record["samples"][:2]:
        tqdm.write(f"    {s['text'][:120]!r}  reward {s['rewards']['reward']:.2f}  advantage {s['advantage']:+.2f}")


def step_line(step: int, args: argparse.Namespace, m: dict[str, float], eta: float) -> str:
    entropy = f"{m['policy/entropy']:.3f}" if "policy/entropy" in m else "-"  # nothing had a gradient
    return (
        f"step {step:>{len(str(args.steps))}}/{args.steps}  reward {m['reward/mean']:.3f}  "
        f"const {m['reward/constant_groups']:.2f}  resp {m['response/tokens']:6.1f} tok  loss {m['loss/policy']:+.4f}  "
        f"gnorm {m['policy/grad_norm']:7.3f}  entropy {entropy}  lr {m['lr']:.1e}  "
        f"{m['time/step']:.2f}s (rollout {m['time/rollout']:.2f} update {m['time/update']:.2f} sync {m['time/sync']:.2f})  "
        f"eta {int(eta) // 3600}:{int(eta) // 60 % 60:02}:{int(eta) % 60:02}"
    )


def main(args: argparse.Namespace) -> None:
    # --- set-up: first everything that can be wrong, then everything that takes long -----------------------------------
    # What waits for a rank waits a minute longer than the watch, which names it
    ctx, interrupt, timers = dist_setup(args.timeout_minutes + 1), Interrupt(args.grace_seconds), Timers()
    Watch(ctx, timers, args.timeout_minutes)
    args.rollout = resolve_engine(args.rollout, ctx.device)
    validate(args, ctx.world)
    args.attn, args.kernel = resolve_attention(args.attn, ctx.device), resolve_kernel(args.kernel, ctx.device)
    attrs = (args.vision_attr, args.language_attr)
    check_tp(load_config(args.model, attrs), args.tp)
    processor = load_processor(args.model, args.min_pixels, args.max_pixels)
    reward_fn = load_reward(args.reward)
    train_set, lengths = load_data(args, args.data, processor, reward_fn)
    if ctx.main:
        try_reward(reward_fn, train_set[0])
    eval_set, eval_lengths = load_data(args, args.eval_data, processor, reward_fn) if args.eval_data else ([], [])
    by_uid = {example.uid: example for example in train_set}
    if len(train_set) < args.prompts_per_step:
        raise UserError(
            f"--data {args.data} has {len(train_set)} usable examples, fewer than --prompts-per-step {args.prompts_per_step}"
        )
    longest = max(lengths)
    if longest + args.max_new_tokens > args.micro_tokens:
        raise UserError(
            f"--micro-tokens {args.micro_tokens} cannot hold the longest prompt of {longest} tokens and a response of "
            f"--max-new-tokens {args.max_new_tokens}; raise it to {longest + args.max_new_tokens}, or lower one of the others"
        )
    out = Path(args.out)
    lock = lock_folder(out) if ctx.main else None  # noqa: F841  held until the process ends
    dist.barrier()
    checkpoint = find_start(args)

    dtype = default_dtype(ctx.device) if args.dtype == "auto" else getattr(torch, args.dtype)
    # One cache for engine and trainer: with the tower frozen both compute the same features
    lora, tower_frozen = lora_of(vars(args)), args.freeze_vision and not args.lora_vision
    vision_frozen = tower_frozen and args.freeze_merger
    cache = VisionCache(args.vision_cache_gb * 2**30) if vision_frozen and args.vision_cache_gb > 0 else None
    has_head = args.adv == "gae" and args.critic == "head"

    master = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.master_dtype]

    def load_trainable() -> torch.nn.Module:
        hf = meta_hf(args.model, master, attrs)
        return add_lora(hf, lora) if lora else hf

    policy = Policy(load_trainable(), processor, tower_frozen, args.attn, cache, args.kernel, has_head, args.freeze_merger)
    separate = args.adv == "gae" and not has_head
    critic = Critic(load_trainable(), processor, tower_frozen, args.attn, cache, freeze_merger=args.freeze_merger) if separate else None
    for model in (policy, critic) if critic else (policy,):
        if args.grad_checkpointing:
            model.hf.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        shard(model, ctx.device, dtype, offload=args.cpu_offload, replicate=args.replicate, tp=args.tp)
        load_sharded(model, args.model)
    optimizer = make_optimizer(policy, args.lr, args.weight_decay, args.critic_lr, args.vision_lr)
    critic_optimizer = make_optimizer(critic, args.critic_lr, args.weight_decay) if critic else None
    reference = AdaptersOff(policy) if lora and args.kl_coef > 0 else None
    if args.kl_coef > 0 and not lora:
        reference = Policy(meta_hf(args.model, dtype, attrs), processor, True, args.attn, cache, args.kernel).requires_grad_(False).eval()
        shard(reference, ctx.device, dtype, frozen=True, offload=args.ref_offload, replicate=args.replicate, tp=args.tp)
        load_sharded(reference, args.model)
    beside = {"critic": (critic, critic_optimizer), "reference": (reference, None)}
    others = {name: beside[name] for name in checkpoint_parts(args) if name in beside}
    resumed = load_checkpoint(checkpoint, policy, optimizer, others) if checkpoint else {"step": 0}
    for other in (reference, critic):  # a run that once trained its tower
        if isinstance(other, Policy) and other.cache is not None and not same_tower(policy, other):
            other.cache = VisionCache(cache.max_bytes)
    # Where the run stands beside its weights: steps done, batches of prompts drawn, and the adaptive coefficient
    start, position = resumed["step"], resumed.get("position", resumed["step"])
    kl_coef = args.kl_coef if args.kl_target is None else resumed.get("kl_coef", args.kl_coef)
    if ctx.device.type == "cuda":
        probe_memory(policy, train_set[lengths.index(longest)], processor, args)
    engine = make_engine(args, processor, ctx, dtype, cache, train_set + eval_set, max(lengths + eval_lengths))
    engine.load_weights(full_parameters(policy, dtype=engine.dtype))  # also the frozen ones, once: a resumed run may have trained them
    if args.self_test:
        print0(self_test(policy, engine, train_set, lengths, processor, args))
    changes = changed_flags(args) if checkpoint else []
    dist.barrier()  # every rank has read run.json before rank 0 writes it anew
    log = RunLog(out, vars(args) | {"model": model_location(args)}, ctx, start, args.tensorboard)
    counts = [sum(p.numel() for p in policy.parameters() if p.requires_grad >= trained) for trained in (False, True)]
    print0(
        f"{args.model}: {counts[0] / 1e6:.2f} M parameters, {counts[1] / 1e6:.2f} M trained, {dtype} on {ctx.world} x {ctx.device.type}, "
        f"attention {args.attn}, kernel {args.kernel}, rollouts by {args.rollout}\n"
        f"{args.prompts_per_step} prompts x {args.group_size} samples a step, "
        f"{len(train_set) // args.prompts_per_step} steps an epoch ({len(train_set) % args.prompts_per_step} examples left over in each), "
        f"{args.epochs * args.minibatches} update(s) a step\n{describe_algorithm(args)}"
        + (f"\nresumed from {checkpoint} after step {start}" if checkpoint else "")
        + (f"\nno checkpoint in {out}: starting from --model" if args.resume == "auto" and not checkpoint else "")
        + "".join(f"\nchanged since: {change}" for change in changes)
    )

    # A trained tower costs three times a frozen one's forward; a cached one nothing: the engine has just filled the cache.
    vision = 0.0 if cache else 1.0 if vision_frozen else 3.0
    rates = grpo.flop_rates(policy.hf.config)
    rates = (*rates[:3], *(vision * rate for rate in rates[3:6]), rates[6])
    eval_sampling = Sampling(args.max_new_tokens, temperature=0.0)

    def run_eval(step: int) -> dict[str, float]:
        """Metrics, on rank 0; where the run was asked to end, none, and a resumed run makes up for it."""
        with timers("eval"):
            engine.wake()
            records = evaluate(engine, eval_set, processor, reward_fn, ctx, eval_sampling, stop=interrupt.agreed)
        finished["eval_due"] = step if interrupt.agreed() else 0
        if finished["eval_due"] or not ctx.main:
            return {}
        summary = summarise(records)
        kinds = summary["by_answer_type"]
        tqdm.write(f"eval at step {step}: accuracy {summary['accuracy']:.3f} on {summary['n']}  " +
                   "  ".join(f"{kind} {part['accuracy']:.2f}" for kind, part in kinds.items()))
        write_text(out / "eval" / f"step_{step:06d}.json", json.dumps(summary, indent=2) + "\n")
        return {"eval/accuracy": summary["accuracy"], "eval/reward": summary["reward"], "eval/truncated": summary["truncated"],
                **{f"eval/accuracy/{kind}": part["accuracy"] for kind, part in kinds.items()}}

    # The last whole step: what a checkpoint is of, also where a later one has begun
    finished, saved = {"step": start, "position": position, "kl_coef": kl_coef, "eval_due": 0}, start

    def save() -> Path | None:
        """A checkpoint of it, unless there is one; the newest."""
        nonlocal saved
        if finished["step"] > saved:
            rest = {key: value for key, value in finished.items() if key != "step"}
            save_checkpoint(out, finished["step"], policy, optimizer, args.keep, others, rest)
            saved = finished["step"]
        return (complete_checkpoints(out) or [checkpoint])[-1]

    def save_and_tell() -> str:
        """What is said when the run was asked to end."""
        if not finished["step"]:
            return "no step was finished, so there is nothing to save"
        if finished["step"] == start and not complete_checkpoints(out):  # --resume of another run
            return f"no step was finished since {checkpoint}; the same command goes on from it"
        return f"stopped after step {finished['step']} of {args.steps}, saved in {save()}; the same command with --resume auto goes on"

    check_room(out, args.keep, policy, optimizer, others)
    interrupt.arm(save_and_tell)
    engine.interrupted = interrupt.requested
    skipped, flat = Skipped(out, args.max_skipped), 0
    if start == 0 and eval_set:
        log.log(0, run_eval(0) | timers.pop())
    elif eval_set and resumed.get("eval_due") == start:
        log.amend(run_eval(start))

    # --- loop ----------------------------------------------------------------------------------------------------------
    began = time.perf_counter()
    bar = tqdm(total=args.steps, initial=start, unit="step", disable=None if ctx.main else True, dynamic_ncols=True)
    for step in range(start, args.steps):
        interrupt.check()
        step_began = time.perf_counter()
        m: dict[str, float] = {}

        # 1. rollout: this rank's share of each minibatch, whole groups; and 2. reward. Once, or in rounds until enough groups
        # have unequal rewards. A group is known by its round and its place in that round's batch.
        mine: dict[tuple[int, int], list[Rollout]] = {}
        signals: dict[tuple[int, int], bool] = {}
        for turn in range(args.sample_rounds):
            with timers("rollout"):
                batch = batch_of(position, len(train_set), args.prompts_per_step, args.seed)
                position += 1
                # Minibatch k is every k-th prompt of the batch, whatever the number of ranks; each rank strides through each.
                places = [i for k in range(args.minibatches) for i in range(len(batch))[k :: args.minibatches][ctx.rank :: ctx.world]]
                prompts = make_prompts([train_set[batch[i]] for i in places], processor)
                seed = derive_seed(args.seed, "sample", step, *([turn] if turn else []))
                engine.wake()
                rollouts = engine.generate(prompts, args.group_size, Sampling(args.max_new_tokens, args.temperature, args.top_p, seed))
                engine.sleep()
            interrupt.check()
            with timers("reward"):
                give_rewards(rollouts, by_uid, reward_fn, args)
            groups = [rollouts[i : i + args.group_size] for i in range(0, len(rollouts), args.group_size)]
            mine |= {(turn, place): group for place, group in zip(places, groups, strict=True)}
            # decided before penalties for length, which tell no right answer from a wrong one     arXiv:2503.14476, section 3.2
            signals = gather_dicts({key: len({r.task_reward for r in group}) > 1 for key, group in mine.items()})
            if sum(signals.values()) >= args.prompts_per_step:
                break
        chosen = choose_groups(signals, args.prompts_per_step)
        parts = [[r for key in chosen[k :: args.minibatches] if key in mine for r in mine[key]] for k in range(args.minibatches)]
        shown = [r for part in parts for r in part]
        with timers("rollout"):
            parts = share(parts, policy.peers, by_uid, processor)  # processes that divide the model train on the same
        rollouts = [r for part in parts for r in part]
        m["progress/epoch"] = position / (len(train_set) // args.prompts_per_step)
        m |= rollout_metrics([r for group in mine.values() for r in group], args.group_size)
        if args.sample_rounds > 1:
            m |= sampling_metrics(signals, chosen)

        # 3. advantage, and 4. pack: prompt and pictures once for all samples of a group. Where advantages need the trainer's
        # own log-probabilities or values, all is packed and scored first.
        minibatches = []
        if scores_first(args):
            with timers("score"):
                minibatches = [pack_minibatch(part, args, processor, ctx.device, rates) for part in parts]
                score(minibatches, args, policy, reference, critic)
        m |= set_advantages(rollouts, args, kl_coef)
        for micro in (micro for micros in minibatches for micro in micros):
            for name in ("advantage", "return") if args.adv == "gae" else ("advantage",):
                micro.take(name)
        minibatches = minibatches or [pack_minibatch(part, args, processor, ctx.device, rates) for part in parts]

        # 5. update; from here on a step is finished
        interrupt.check()
        with timers("update"):
            torch.manual_seed(dropout_seed(args, step, ctx.rank))
            m["lr"] = learning_rate(step, args)
            critic_lr = args.critic_lr * m["lr"] / args.lr
            vision_lr = None if args.vision_lr is None else args.vision_lr * m["lr"] / args.lr
            set_learning_rate(optimizer, m["lr"], critic_lr, vision_lr)
            if critic:
                set_learning_rate(critic_optimizer, critic_lr)
            m |= update(policy, optimizer, minibatches, args, ctx, kl_coef, reference, critic, critic_optimizer,
                        warming=step < args.critic_warmup_steps, skipped=skipped)
            moved = m["update/steps"] > 0 and step >= args.critic_warmup_steps
            if args.kl_target is not None and moved and math.isfinite(m.get("policy/kl_ref", math.nan)):
                n_samples = args.prompts_per_step * args.group_size
                kl_coef = grpo.adapt_kl(kl_coef, m["policy/kl_ref"], args.kl_target, n_samples, args.kl_horizon)
            if args.ref_every and (step + 1) % args.ref_every == 0:
                copy_weights(policy, reference)
                reference.cache = policy.cache  # now of one tower

        # 6. sync: the engine samples from the new weights, or from stale ones if this is forgotten. What is frozen it has
        # already, unless it slept so deeply that it lost it
        with timers("sync"):
            m |= engine.load_weights(full_parameters(policy, trainable_only=engine.complete, dtype=engine.dtype))

        # 7. report
        done, last = step + 1, step + 1 == args.steps
        finished = {"step": done, "position": position, "kl_coef": kl_coef, "eval_due": 0}
        if args.sample_every and (done % args.sample_every == 0 or done == start + 1):
            records = gather0(rollout_records(shown, by_uid))
            if ctx.main:
                show_samples(records[0], by_uid[records[0]["uid"]])
                stem = out / "rollouts" / f"step_{done:06d}"
                write_text(stem.with_suffix(".jsonl"), "".join(json.dumps(record) + "\n" for record in records))
                write_text(stem.with_suffix(".html"), rollout_page(f"Rollouts of step {done}", m, records, by_uid))
        if eval_set and (last or (args.eval_every and done % args.eval_every == 0)):
            m |= run_eval(done)
        m |= timers.pop()
        m["time/step"] = time.perf_counter() - step_began
        if ctx.device.type == "cuda":
            m["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        log.log(done, m)
        skipped.report(done, args.tp)
        flat = flat + 1 if no_signal(m, args) else 0
        if flat == FLAT_STEPS and ctx.main:
            tqdm.write(f"warning: in the last {flat} steps all samples of a prompt got the same reward (mean {m['reward/mean']:.3g}), so "
                       f"nothing is learnt; look at the samples in {out / 'rollouts'}, at what the reward expects, and at --temperature")
        eta = (time.perf_counter() - began) / (done - start) * (args.steps - done)
        if ctx.main:
            tqdm.write(step_line(done, args, m, eta))
        bar.update()
        if last or done % args.save_every == 0:
            save()
        if skipped.in_a_row >= args.max_skipped:
            raise UserError(f"{skipped.in_a_row} updates in a row were not finite, --max-skipped {args.max_skipped}; their prompts are in "
                            f"{out / 'skipped'}. The newest checkpoint is {save()}: lower --lr or mend the reward, then --resume auto")

    # --- close ---------------------------------------------------------------------------------------------------------
    interrupt.check()
    bar.close()
    log.close()
    if start >= args.steps:
        return print0(f"nothing to do: {checkpoint} is of step {start}, and --steps is {args.steps}")
    print0(f"done: {args.steps} steps, newest checkpoint in {out / 'checkpoints'}")


if __name__ == "__main__":
    run_script(main, parse_args)
