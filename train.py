"""Reinforcement learning of a vision-language model.

1 process:  python train.py --model demo/start --data demo/train.parquet --out out/shapes --steps 60
8 GPUs:     torchrun --nproc-per-node 8 train.py --model Qwen/Qwen2.5-VL-7B-Instruct --data geo3k.parquet \\
                --out out/geo3k --steps 60

Each step: rollout, reward, pack, log-probabilities before the update, advantage, update, sync, report. --algo names an
algorithm: settings that may also be given one by one. How the default differs from the GRPO paper (arXiv:2402.03300):
(1) every token counts the same in the loss (--loss-agg token), not every response; (2) without --kl-coef there is no KL
term and so no reference model; (3) with one update per step the old policy is the current one, so no separate pass
computes its log-probabilities; (4) a group whose rewards are all equal has no gradient and costs no forward; (5) a
prompt and its images are computed once for all of its responses.

Axes: P prompts of a step, G samples per prompt; B responses and N trained tokens of a step on this rank; T packed
tokens and K trained tokens of a micro-batch.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import grpo
from engines.choose import resolve_engine, start_engine, vllm_settings
from engines.connect import ConnectionConfig, ServerConfig
from engines.self_test import self_test
from envs import EnvConfig
from envs._load import load_environments
from envs._play import player
from errors import UserError, check_writable, need
from eval import Evaluation
from kernels import TangentLoss, loss_and_gradients, resolve_kernel
from layers.attention import resolve_attention
from model import ModelConfig, load_config, load_processor
from packing import Batch, Packer, TokenBatch, balance_over_ranks, flop_rates, token_batch
from parallel.checkpoint import load_checkpoint
from parallel.models import Models, OptimConfig, build_models, peak_memory, probe_memory, saved_parts
from parallel.nodes import check_restarts, check_settings, check_shared
from parallel.resume import Saver, absolute, changed_settings, find_start, resumed_settings
from parallel.rounds import Rounds
from parallel.sharding import ParallelConfig, clip_gradients, full_parameters
from parallel.watch import Interrupt, Watch
from prepare_data import DataConfig, ReadingConfig
from report.files import lock_folder
from report.log import RunLog, Skipped
from report.metrics import measure_tokens, measure_values, rollout_metrics, update_flops
from report.progress import Progress, comparing, training
from report.trackers import check_trackers
from reward import RewardConfig, Rewards, give_rewards
from rewards.curriculum import Curriculum, Memory, last_stage
from rewards.custom import absolute_files
from rollout import Examples, GroupPool, RolloutConfig, Sampling, as_given, load_examples, make_prompts
from settings import REQUIRED, Parser, add_settings, check_given, flag_of, never, read_settings, setting, typed
from utils import Context, Meter, Stages, copy_together, dist_setup, print0, run_script


@dataclass(frozen=True)
class RunConfig:
    """Run"""

    steps: int = setting(REQUIRED, "rollout steps of the whole run", least=1)
    out: str = setting(REQUIRED, "run directory", from_run=never)
    resume: str = setting("no", "no, auto (newest intact checkpoint of --out, if any), a run or a checkpoint; flags "
                          "that are not given keep that run's values (code and servers have to be given)")
    eval_every: int = setting(0, "steps between evaluations on --eval-data; 0: only before and after", least=0)
    save_every: int = setting(50, "steps between checkpoints; the last step is always saved", least=1)
    keep: int = setting(2, "checkpoints kept", least=1)
    keep_best: bool = setting(False, "also keep the checkpoint of the best evaluation, which then is saved at once")
    track: tuple[str, ...] = setting((), "tensorboard, wandb: also tell them metrics and samples", metavar="TRACKER",
                                     from_run=lambda name: name == "tensorboard")  # wandb sends them to a server
    self_test: bool = setting(True, "compare engine and trainer on real prompts before the first step")
    grace_seconds: float = setting(60.0, "from SIGTERM or Ctrl-C to the end, checkpoint included", above=0)
    timeout_minutes: float = setting(30.0, "a rank that others wait for longer is named, and the run ends", above=0)
    seed: int = setting(0, "of data order and sampling")


@dataclass(frozen=True)
class Config:
    """All settings of a run, a group for each stage that owns them."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    servers: ServerConfig
    env: EnvConfig
    reward: RewardConfig
    algo: grpo.Algorithm
    optim: OptimConfig
    parallel: ParallelConfig

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Config":
        """Read the settings of all groups from values by the names of their flags."""
        check_given(settings, *(group.type for group in fields(cls)))
        return cls(**{group.name: read_settings(group.type, settings) for group in fields(cls)})

    def flat(self) -> dict:
        """As run.json has them."""
        return dict(chain.from_iterable(group.items() for group in asdict(self).values()))


@dataclass(frozen=True)
class State:
    """Where a run stands, besides its weights."""

    step: int = 0  # steps done
    position: int = 0  # batches of prompts drawn
    kl_coef: float = 0.0  # adaptive with kl_target
    eval_due: int = 0  # the step of an evaluation that is still to be made: the first, or one that was cut short
    curriculum: Memory = field(default_factory=dict)  # what it carries from step to step


def parse_args(argv: list[str] | None = None) -> Config:
    parser = Parser(__doc__)
    for group in (*(f.type for f in fields(Config)), ReadingConfig, ConnectionConfig):
        add_settings(parser, group)
    given = vars(parser.parse_args(argv))
    known = chain.from_iterable(fields(f.type) for f in fields(Config))
    before = resumed_settings(known, given)  # of the run that --resume continues
    if given.get("algo", before.get("algo")) != before.get("algo"):  # a new --algo drops what the old one had set
        for name in grpo.PRESETS.get(before.get("algo"), {}):
            before.pop(name, None)
        before |= grpo.PRESETS[given["algo"]]
    return Config.of(before | given)


def check(cfg: Config, world: int) -> None:
    """Everything that can be wrong about the settings, before anything is read."""
    cfg.algo.check()
    cfg.model.check(cfg.algo.ref_every)
    cfg.rollout.check(world, cfg.algo.minibatches)
    cfg.servers.check(cfg.rollout.rollout, cfg.rollout.vllm, cfg.model)
    vllm_settings(cfg.rollout.vllm, cfg.rollout.rollout, world)
    cfg.optim.check(cfg.model, cfg.run.steps)
    need(not cfg.run.eval_every or cfg.data.eval_data, f"--eval-every {cfg.run.eval_every} needs --eval-data")
    need(not Path(cfg.run.out).is_file(), f"--out {cfg.run.out} is a file; give a directory")
    need(not cfg.run.keep_best or cfg.data.eval_data, "--keep-best needs --eval-data, and with it --eval-every")
    check_writable(Path(cfg.run.out), "--out")
    check_trackers(cfg.run.track)
    cfg.parallel.check(world, load_config(cfg.model.model, cfg.model.family_paths))


def check_data(train_set: Examples, cfg: Config) -> None:
    n, longest, per_step = len(train_set), max(train_set.lengths), cfg.rollout.prompts_per_step
    need(n >= per_step, f"--data {cfg.data.data} has {n} usable examples, fewer than --prompts-per-step {per_step}")
    whole = longest + cfg.rollout.max_new_tokens
    has = f"the longest prompt has {longest} tokens and --max-new-tokens is {cfg.rollout.max_new_tokens}"
    need(whole <= cfg.optim.micro_tokens, f"--micro-tokens {cfg.optim.micro_tokens}: {has}; raise it to {whole}")


def resolve(cfg: Config, device: torch.device) -> Config:
    """What "auto" means here, and where files are: a run is continued and evaluated from any directory."""
    settings = cfg.flat()
    paths = ("model", "data", "eval_data", "image_root", "curriculum")
    settings |= {name: absolute(settings[name]) for name in paths} | absolute_files(settings)
    settings["attn"] = resolve_attention(cfg.model.attn, device)
    settings["kernel"] = resolve_kernel(cfg.model.kernel, device)
    settings["rollout"] = resolve_engine(cfg.rollout.rollout, device)
    return Config.of(settings)


# ----------------------------------------------------------------------------------------------------------------------
# The stages of a step


def make_batch(pool: GroupPool, cfg: Config, packer: Packer, ctx: Context, meter: Meter) -> Batch:
    """3. Whole groups, evened in FLOPs over ranks, and packed. What cannot have a gradient costs no forward."""
    algo = cfg.algo
    groups, chosen = pool.groups, pool.chosen()
    by_minibatch, evenness = balance_over_ranks(groups, chosen, algo.minibatches, packer.rates, ctx)
    for name, value in evenness.items():
        meter.set(name, value)
    rollouts = list(chain.from_iterable(by_minibatch))
    rewards_PG = per_group([r.reward for r in rollouts], algo)
    live = grpo.may_train(rewards_PG, [r.finish_reason for r in rollouts], algo)
    weights, minibatches = [], []
    for part in by_minibatch:
        members = range(len(weights), len(weights) + len(part))
        n_tokens = [sum(r.response_mask) for r in part]
        counted = [algo.counts(r.finish_reason) for r in part]
        weights += grpo.token_weights(n_tokens, counted, algo.loss_agg, cfg.rollout.max_new_tokens, ctx.sum)
        minibatches.append(packer.pack(rollouts, [i for i in members if live[i]], ctx.max))
    trained = [r for r, alive in zip(rollouts, live, strict=True) if alive]
    meter.sum("update/flops", algo.epochs * update_flops(trained, packer.rates, frozen=cfg.model.lora_rank > 0))
    return Batch(rollouts, token_batch(rollouts, weights), minibatches)


def per_group(rewards_B: Sequence[float], algo: grpo.Algorithm) -> torch.Tensor:
    return torch.tensor(rewards_B, dtype=torch.float64).view(-1, algo.group_size)


@torch.no_grad()
def compute_before_update(batch: Batch, models: Models, cfg: Config) -> None:
    """4. What the algorithm compares with, under the weights before the update: old_logps, ref_logps and values."""
    algo, temperature, tokens = cfg.algo, cfg.rollout.temperature, batch.tokens
    by_policy = algo.needs_old_logps or (algo.needs_values and models.critic is None)
    for micro in chain.from_iterable(batch.minibatches):
        rows = micro.token_index_K
        if by_policy:
            out = models.policy(micro, temperature)
            tokens.fill(rows, old_logps=out.logp_K, values=out.value_K)
        if models.critic:
            tokens.fill(rows, values=models.critic(micro))
        if models.reference:
            tokens.fill(rows, ref_logps=models.reference(micro, temperature).logp_K)
    if algo.old_policy == "rollout":
        tokens.old_logps = tokens.rollout_logps
    models.reshard()


def set_advantages(batch: Batch, algo: grpo.Algorithm, kl_coef: float, ctx: Context, meter: Meter) -> None:
    """5. One function of the rewards and of what was computed before the update."""
    tokens = batch.tokens
    task_rewards_PG = per_group([r.task_reward for r in batch.rollouts], algo)
    counted_B = torch.tensor([algo.counts(r.finish_reason) for r in batch.rollouts], dtype=torch.bool)
    rewards_PG = per_group([r.reward for r in batch.rollouts], algo)
    advantages_N, returns_N = grpo.advantages(
        rewards_PG, task_rewards_PG, tokens, counted_B, algo, kl_coef, ctx.moments)
    tokens.advantages = advantages_N.float()
    tokens.returns = None if returns_N is None else returns_N.float()
    if algo.needs_values:
        measure_values(tokens[counted_B[tokens.rollout]], ctx, meter)


def update_policy(
    models: Models, batch: Batch, cfg: Config, state: State, ctx: Context, meter: Meter, skipped: Skipped
) -> None:
    """6. The optimizer steps of one rollout step, of the policy and of its critic: a head on the policy, or a model of
    its own. During the critic's warm-up only values are learnt."""
    algo = cfg.algo
    loss = grpo.PolicyLoss(algo, state.kl_coef if models.reference else 0.0)
    if models.reference:
        meter.set("kl/coef", state.kl_coef)
    for update in range(algo.epochs * algo.minibatches):
        epoch, number = divmod(update, algo.minibatches)
        micros = batch.minibatches[number]
        models.zero_grad()
        policy_total = value_total = 0.0
        results: list[torch.Tensor] = []  # read only after all micro-batches: reading makes the host wait
        head_loss, columns = loss, batch.tokens
        if not loss.per_token and ctx.max(batch.splits_rollouts(number)):  # collectives must match
            head_loss, columns = TangentLoss(), tangent_columns(models, batch, number, loss, cfg)
        for micro in micros:
            rows = micro.token_index_K
            tokens = batch.tokens[rows].to(ctx.device)
            read = tokens if columns is batch.tokens else copy_together([columns[rows]], ctx.device)[0]
            out = models.policy(micro, cfg.rollout.temperature, head_loss, read)
            value_loss = weighted_value_loss(out.value_K, tokens, algo, meter)
            (out.loss + algo.value_coef * value_loss).backward()
            if models.critic:
                value_loss = weighted_value_loss(models.critic(micro), tokens, algo, meter)
                (algo.value_coef * value_loss).backward()
            policy_total += out.loss.detach().double()
            value_total += value_loss.detach().double()
            results.append(torch.stack([out.logp_K, out.entropy_K]))
            meter.sum("update/tokens", int((batch.tokens.weights[rows] > 0).sum()))
        policy_total, value_total = float(policy_total), float(value_total)
        if micros:
            rows = torch.cat([micro.token_index_K for micro in micros])
            logps, entropies = torch.cat(results, dim=1).cpu()
            batch.tokens.fill(rows, logps=logps, entropies=entropies)
            # log-probabilities of weights that no update has changed yet: known for all, or those of the first update
            before = epoch == 0 and (algo.needs_old_logps or number == 0)
            measure_tokens(batch.tokens[batch.rows(number)], loss, meter, first_pass=before)
        if state.step < algo.critic_warmup_steps:
            for parameter in models.policy.hf.parameters():
                parameter.grad = None
        norm, stepped = clipped_step(models.policy, models.optimizer, cfg.optim.max_grad_norm)
        # A norm of 0: nothing had a gradient, so there is no loss either. A mean over updates, of sums over ranks
        meter.add("loss/policy", policy_total, (norm != 0) / ctx.data_world)
        meter.add("policy/grad_norm", norm, norm != 0)
        skipped.after_update(norm, stepped, policy_total, batch.uids(number), meter)
        if models.critic:
            norm, _ = clipped_step(models.critic, models.critic_optimizer, cfg.optim.max_grad_norm)
            meter.add("value/grad_norm", norm, norm != 0)
            skipped.after_critic_update(norm, value_total, batch.uids(number), meter)
        if algo.needs_values:
            meter.add("loss/value", value_total, (norm != 0) / ctx.data_world)


@torch.no_grad()
def tangent_columns(
    models: Models, batch: Batch, minibatch: int, loss: grpo.PolicyLoss, cfg: Config
) -> torch.Tensor:
    """Return what kernels.TangentLoss reads of each token, (N, 3). If micro-batches hold parts of rollouts, a loss that
    couples the tokens of a rollout needs a forward over all micro-batches before the first backward."""
    tokens = batch.tokens
    for micro in batch.minibatches[minibatch]:
        out = models.policy(micro, cfg.rollout.temperature)
        tokens.fill(micro.token_index_K, logps=out.logp_K, entropies=out.entropy_K)
    models.reshard()
    rows = batch.rows(minibatch)
    whole, columns = tokens[rows], torch.zeros(len(tokens), 3)
    total, logp_slope_N, entropy_slope_N = loss_and_gradients(loss, whole.logps, whole.entropies, whole)
    constant_N = total / len(rows) - logp_slope_N * whole.logps - entropy_slope_N * whole.entropies
    columns[rows] = torch.stack([constant_N, logp_slope_N, entropy_slope_N], dim=1)
    return columns


def weighted_value_loss(
    value_K: torch.Tensor | None, tokens: TokenBatch, algo: grpo.Algorithm, meter: Meter
) -> torch.Tensor:
    """Return the value loss of a micro-batch, before its coefficient; 0 without values."""
    if value_K is None:
        return tokens.weights.new_zeros(())
    loss_K, clipped_K = grpo.value_loss(value_K, tokens.values, tokens.returns, algo.value_clip)
    real = tokens.weights > 0
    meter.add("value/clipped", clipped_K[real].sum(), real.sum())
    return (tokens.weights * loss_K).sum()


def clipped_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> tuple[float, bool]:
    """The global gradient norm before clipping, and whether there was a step. A norm of 0 means that nothing had a
    gradient; stepping would move the weights by momentum and decay alone. All ranks see the same norm."""
    norm = clip_gradients(model, max_norm)
    good = math.isfinite(norm) and norm > 0
    if good:
        optimizer.step()
    return norm, good


def next_state(state: State, pool: GroupPool, curriculum: Curriculum, metrics: dict[str, float], cfg: Config) -> State:
    """After a step; a coefficient that adapts does so if the policy moved."""
    algo, kl_coef = cfg.algo, state.kl_coef
    moved = metrics.get("update/steps", 0) > 0 and state.step >= algo.critic_warmup_steps
    if algo.kl_target is not None and moved and math.isfinite(metrics.get("policy/kl_ref", math.nan)):
        samples = cfg.rollout.prompts_per_step * algo.group_size
        kl_coef = grpo.adapt_kl(kl_coef, metrics["policy/kl_ref"], algo.kl_target, samples, algo.kl_horizon)
    memory = curriculum.after_step(state.curriculum, state.step, pool.position, pool.solved)
    return State(state.step + 1, pool.position, kl_coef, curriculum=memory)


# ----------------------------------------------------------------------------------------------------------------------


def main(cfg: Config) -> None:
    # --- set-up: first everything that can be wrong, then everything that takes long ---
    check_restarts()
    ctx = dist_setup(cfg.run.timeout_minutes + 1, cfg.parallel.tp)  # the watch, which names who is late, comes first
    interrupt = Interrupt(cfg.run.grace_seconds)
    stage = Stages(interrupt.check)
    Watch(ctx, stage, cfg.run.timeout_minutes)
    cfg = resolve(cfg, ctx.device)
    check_settings(cfg.flat(), ctx)
    check(cfg, ctx.world)
    algo, out = cfg.algo, Path(cfg.run.out)
    processor = load_processor(cfg.model.model, cfg.model.min_pixels, cfg.model.max_pixels)
    env = load_environments(cfg.env)
    start_of = env.start_of if env else as_given
    rewards = Rewards(cfg.reward, out, ctx.rank, ctx.world, played=env is not None)
    load = partial(load_examples, cfg=cfg.data, processor=processor, rewards=rewards, start_of=start_of)
    train_set = load(cfg.data.data)
    eval_set = load(cfg.data.eval_data) if cfg.data.eval_data else Examples()
    check_data(train_set, cfg)
    curriculum = Curriculum(cfg.reward.curriculum, train_set, cfg.rollout.prompts_per_step, cfg.run.seed)
    _, final_stage = last_stage(cfg.reward.curriculum, eval_set)  # by the data it is for, as eval.py has it
    rewards.try_out(ctx.main, curriculum.stages())
    lock = lock_folder(out) if ctx.main else None  # noqa: F841  held until the process ends
    check_shared(out, {"--data": train_set, "--eval-data": eval_set}, ctx)
    checkpoint = find_start(out, cfg.run.resume, cfg.flat(), saved_parts(cfg.model, algo))

    models = build_models(cfg, processor, ctx)
    state = State(kl_coef=algo.kl_coef)
    if checkpoint:
        position = load_checkpoint(checkpoint, models.saved)
        state = State(**{f.name: position[f.name] for f in fields(State) if f.name in position})
        if algo.kl_target is None:
            state = replace(state, kl_coef=algo.kl_coef)
        models.own_caches()
    rates = flop_rates(models.policy.hf.config, models.vision_share)
    packer = Packer(cfg.optim.micro_tokens, processor.image_token_id, rates, share=cfg.model.attn != "flash")
    if ctx.device.type == "cuda":
        probe_memory(models.policy, train_set, packer, processor, cfg, start_of)
    sets = [train_set, eval_set]
    limits = env.image_limits if env else None
    engine = start_engine(cfg.model, cfg.rollout, cfg.servers, models, processor, sets, ctx, out, limits)
    engine.interrupted = interrupt.requested
    play = player(engine, env, processor)
    prompts_of = partial(make_prompts, processor=processor, start_of=start_of)
    rounds = Rounds(cfg, play, engine, prompts_of, rewards, curriculum, ctx)
    if cfg.run.self_test:
        print0(self_test(models.policy, engine, train_set, processor, packer, rounds.sampling(0), start_of))
    saver = Saver(cfg.run, models, checkpoint, state)
    changed = changed_settings(out, cfg.flat()) if checkpoint else []
    log = RunLog(cfg, ctx, checkpoint, state.step)
    log.introduce(models, len(train_set), changed)
    skipped = Skipped(out, ctx)
    interrupt.arm(saver.save_and_tell, log.end)
    engine.give_up = interrupt.request
    greedy = Sampling(cfg.rollout.max_new_tokens, temperature=0.0)
    more = {"stage": final_stage, "step": cfg.run.steps, "stop": interrupt.agreed, "start_of": start_of}
    evaluation = Evaluation(play, eval_set, processor, rewards, ctx, greedy, **more)
    if eval_set and state.eval_due == state.step:  # before the first step, or cut short by what ended the run
        log.evaluation(state.step, evaluation.run(log, stage, state.step) | stage.pop())

    compares = algo.needs_old_logps or algo.needs_values or algo.needs_reference

    # --- loop ---
    for step in range(state.step, cfg.run.steps):
        meter = Meter()
        pool = GroupPool(algo, cfg.rollout.prompts_per_step, state.position, ctx)

        # 1. rollout and 2. reward: one round, or (dynamic sampling) rounds until enough groups have unequal rewards
        while not pool.full():
            with stage("rollout"):
                round = rounds.take(state, pool.position)
                rollouts = round.rollouts
            with stage("reward"), Progress("graded responses", len(rollouts), round.grading.answered):
                rewarded = round.grading.results(rollouts)
                give_rewards(rollouts, rewarded, algo, cfg.rollout.max_new_tokens)
            pool.add(rollouts)  # waits for the other ranks: not in the stage, so that the watch names one that hangs
            rewards.check_worked(round.grading, rollouts, ctx.gather)
        engine.sleep()  # the update needs its memory

        # 3. pack: whole groups, evened in FLOPs over ranks; a prompt and its images once for all of its responses
        with stage("pack"):
            batch = make_batch(pool, cfg, packer, ctx, meter)

        # 4. log-probabilities and values under the weights before the update, where the algorithm compares with them
        with stage("logprobs", timed=compares), comparing(batch):
            compute_before_update(batch, models, cfg)

        # 5. advantage: one function of the rewards and of what was just computed
        set_advantages(batch, algo, state.kl_coef, ctx, meter)

        # 6. update
        with stage("update"), training(batch, algo.epochs, meter), peak_memory(meter, engine.asleep_bytes):
            lr = models.set_learning_rates(cfg.optim, step, cfg.run.steps)
            update_policy(models, batch, cfg, state, ctx, meter, skipped)
            models.zero_grad()  # the engine needs the gradients' memory when it wakes

        # 7. sync: without it the engine would go on sampling from the old weights. What is frozen it has already
        with stage("sync", interruptible=False):
            sent = engine.sync(partial(full_parameters, models.policy, dtype=engine.dtype))

        # 8. metrics, evaluation, checkpoint; then samples and pages, whose failure is a warning
        epochs = pool.position / (len(train_set) // cfg.rollout.prompts_per_step)
        metrics = rollout_metrics(pool) | meter.reduce(ctx) | sent | {"lr": lr, "progress/epoch": epochs}
        state = saver.state = next_state(state, pool, curriculum, metrics, cfg)
        metrics |= curriculum.metrics(step, state.curriculum) | rounds.metrics(batch)
        models.after_step(state.step, algo.ref_every)
        if evaluation.due(cfg.run, state.step):
            metrics |= evaluation.run(log, stage, state.step)
            state = saver.state = replace(state, eval_due=evaluation.cut_at)
        log.step(state.step, metrics | stage.pop())
        skipped.report(state.step, saver.save)
        saver.after_step()
        log.report(state.step, batch, metrics)

    interrupt.check()
    log.close()


def say_origins(message: str, cfg: Config) -> str:
    """Add to each "--flag value" in a message where the value comes from, if the flag was not given."""
    given, settings = {word.partition("=")[0] for word in sys.argv}, cfg.flat()
    new = cfg.run.resume == "no" or (cfg.run.resume == "auto" and not Path(cfg.run.out, "checkpoints").exists())
    origin = "the default" if new else "from the run that is resumed"
    for f in chain.from_iterable(fields(group.type) for group in fields(Config)):
        text = typed(f, settings[f.name])
        if flag_of(f.name) not in given and not any(word.startswith(f"{f.name}=") for word in sys.argv):
            message = re.sub(rf"{re.escape(text)}(?!\w|\.\d)", f"{text} ({origin})", message, count=1)
    return message


def run(cfg: Config) -> None:
    try:
        main(cfg)
    except UserError as error:
        raise UserError(say_origins(str(error), cfg)) from error


if __name__ == "__main__":
    run_script(run, parse_args)
