"""Train a vision-language model with reinforcement learning.

1 process:  python train.py --model demo/start --data demo/train.parquet --out out/shapes \\
                --steps 60 --lr 2e-4 --train-vision all
8 GPUs:     torchrun --nproc-per-node 8 train.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
                --data geo3k.parquet --out out/geo3k --steps 60
Plan:       python train.py --plan --gpu h100 --gpus 8 ...  # memory, time and price, without a GPU;
                its flags: train.py --plan --help

Each step: rollout, reward, pack, log-probabilities before the update, advantage, update, weight
sync, report. --algo names a preset of the algorithm's settings, which you can also set one by one.

The default differs from the GRPO paper (arXiv:2402.03300) in two ways:
1. The loss averages over tokens, not over responses (--loss-agg token).
2. Without --kl-coef there is no KL term, so no reference model is loaded.

Three savings leave the gradient unchanged:
1. With one optimizer step per training step, the old policy is the current one, so its log-probabilities need no
   separate forward pass.
2. A group whose rewards are all equal is not packed if it has no gradient: if --adv compares the samples of a group
   and the loss has no KL, entropy or value term.
3. Each prompt and its images are computed once for all responses of the group.

Axes: P prompts per step (in a rank's tensors, its share of them); G samples per prompt; B responses
and N tokens that the policy sampled, in a step on this rank; T packed tokens in a micro-batch; K
sampled tokens that the micro-batch predicts.
"""

import startup  # noqa: F401

import sys
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain

import torch

import grpo
from engines.launch import RolloutServerConfig, check_engine, check_videos, resolve_engine, server_kind, start_sampling
from errors import in_copy, plug_in
from eval import Evaluation
from kernels import TangentLoss, loss_and_gradients
from model import ModelConfig, Processor, load_config
from packing import Packer, TokenBatch, TrainBatch, balance_across_ranks, flop_costs, make_token_batch
from parallel import node_checks, resume, sharding, watchdog
from parallel.checkpoint import load_checkpoint
from parallel.models import Models, OptimConfig, build_models, checkpoint_parts, peak_memory, probe_memory
from prepare_data import DataConfig
from report import metrics, progress
from report.ablation import check_ablations
from report.log import RunLog, SkippedUpdates
from report.run_files import lock_folder
from reward import RewardConfig
from rewards.grade import Grader
from rewards.order import CurriculumState, DataOrder, load_last_stage, make_order
from rollout import (
    Batches,
    Engine,
    EnvConfig,
    ExampleList,
    GroupPool,
    RolloutConfig,
    SamplingParams,
    identity,
    load_examples,
    make_env_factory,
)
from settings import FlagParser, add_flags, build_config, check_given, is_run_file, load_config_file, naming_origins
from utils import DistContext, Meter, StepTimer, print0, run_script

# with the settings of the methods in algorithms/, unless this copy lacks them
WITH_METHODS = in_copy("algorithms._registry")
AlgorithmSettings = plug_in("algorithms._registry", "").AlgorithmWithMethods if WITH_METHODS else grpo.Algorithm


@dataclass(frozen=True)
class Config:
    """The settings of a run: one field per section of flags."""

    run: resume.RunConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    servers: RolloutServerConfig
    env: EnvConfig
    reward: RewardConfig
    algo: AlgorithmSettings
    optim: OptimConfig
    parallel: sharding.ParallelConfig

    @classmethod
    def from_flags(cls, settings: dict) -> "Config":
        """Build the settings from values keyed by flag name. Raise UserError if a required one is missing."""
        check_given(settings, *(section.type for section in fields(cls)))
        return cls(**{section.name: build_config(section.type, settings) for section in fields(cls)})

    def to_flags(self) -> dict:
        """Return the values keyed by flag name, as run.json stores them."""
        return dict(chain.from_iterable(section.items() for section in asdict(self).values()))


@dataclass(frozen=True)
class TrainState:
    """The state of a run besides its weights. Checkpoints save it."""

    step: int = 0  # number of finished steps
    position: int = 0  # number of prompt batches that steps have used; batches drawn ahead do not count
    kl_coef: float = 0.0  # current KL coefficient; adaptive if kl_target is set
    # a missing evaluation: N if the one after step N was interrupted, 0 at the start of a run (the one before step 1
    # has not run yet). Start-up runs it if eval_due == step; in later steps 0 never equals `step`, so nothing runs
    eval_due: int = 0
    curriculum: CurriculumState = field(default_factory=dict)  # state that the curriculum carries from step to step

    @classmethod
    def from_checkpoint(cls, saved: dict, algo: grpo.Algorithm) -> "TrainState":
        """Return the state that a checkpoint saved; fields that it lacks get the values of a new run."""
        state = cls(**{"kl_coef": algo.kl_coef} | {f.name: saved[f.name] for f in fields(cls) if f.name in saved})
        return state if algo.kl_target is not None else replace(state, kl_coef=algo.kl_coef)


@dataclass
class Run:
    """The objects that `set_up` creates for the training loop."""

    cfg: Config
    ctx: DistContext
    timer: StepTimer
    interrupt: watchdog.SignalHandler
    state: TrainState
    models: Models
    packer: Packer
    batches: Batches
    engine: Engine
    grader: Grader
    evaluation: Evaluation
    log: RunLog
    saver: resume.CheckpointSaver
    skipped: SkippedUpdates
    steps_per_epoch: int
    lock: object  # lock on --out, held until the process exits


def parse_args(argv: list[str] | None = None, more: tuple[type, ...] = (), defaults: dict | None = None) -> Config:
    """Return the settings of a command line. `more` are further sections of flags that it may have, which are ignored;
    `defaults` stand for flags that neither it nor a file gives."""
    parser = FlagParser(__doc__, essential="model data eval_data out config steps eval_every resume prompts_per_step "
                        "group_size max_new_tokens temperature rollout reward algo lr lora_rank train_vision "
                        "micro_tokens")
    for section in (*(f.type for f in fields(Config)), *more):
        add_flags(parser, section)
    args = vars(parser.parse_args(argv))
    all_settings = list(chain.from_iterable(fields(f.type) for f in fields(Config)))
    file = load_config_file(args["config"], all_settings) if "config" in args else {}
    snapshot = file if is_run_file(args.get("config", "")) else {}  # all settings of a run, those of its preset too
    given = args if snapshot else file | args
    base = snapshot | resume.load_resumed_settings(all_settings, given)  # empty unless --resume continues a run
    if (algo := given.get("algo", base.get("algo"))) != base.get("algo"):  # it replaces the old preset's settings
        base = {name: value for name, value in base.items() if name not in grpo.PRESETS.get(base.get("algo"), {})}
        base |= grpo.PRESETS.get(str(algo), {})
    with naming_origins(file, f"from --config {args.get('config')}"):
        return Config.from_flags((defaults or {}) | base | given | {"config": args.get("config")})


def check_config(cfg: Config, world: int, planned: bool = False) -> None:
    """Raise UserError if any setting is invalid or contradicts another, before data or weights are read. A
    `planned` run needs no engine on this machine."""
    cfg.algo.check()
    cfg.model.check(cfg.algo.ref_every)
    cfg.rollout.check(world, cfg.algo.minibatches)
    engine_settings = cfg.rollout.rollout, cfg.rollout.vllm, cfg.servers, cfg.model, world
    check_engine(*engine_settings, planned, cfg.rollout.replay_experts)
    cfg.optim.check(cfg.model, cfg.run.steps)
    cfg.run.check(cfg.data.eval_data)
    cfg.parallel.check(world, load_config(cfg.model.model, cfg.model.family_paths), cfg.model.compile)


def resolve_auto_settings(cfg: Config, device: torch.device) -> Config:
    """Resolve `auto` to its value on this machine, and make paths absolute so that the run can be resumed from any
    working directory."""
    cfg = Config.from_flags(cfg.to_flags() | resume.absolute_paths(cfg.to_flags()))
    rollout = replace(cfg.rollout, rollout=resolve_engine(cfg.rollout.rollout, device))
    return replace(cfg, model=cfg.model.resolve(device), rollout=rollout)


# ----------------------------------------------------------------------------------------------------------------------
# The phases of a step


def pack_batch(pool: GroupPool, cfg: Config, packer: Packer, ctx: DistContext, meter: Meter) -> TrainBatch:
    """Phase 3: balance whole groups across ranks by FLOPs and pack them. Responses without a gradient are left out."""
    algo = cfg.algo
    groups, chosen = pool.groups, pool.select_groups()
    by_minibatch = balance_across_ranks(groups, chosen, algo.minibatches, packer.flop_costs, ctx, meter)
    rollouts = list(chain.from_iterable(by_minibatch))
    rewards_PG = reshape_to_groups([r.reward for r in rollouts], algo)
    has_gradient = grpo.has_gradient(rewards_PG, [r.finish_reason for r in rollouts], algo)
    weights, minibatches = [], []
    for minibatch in by_minibatch:
        members = range(len(weights), len(weights) + len(minibatch))
        n_tokens = [sum(r.response_mask) for r in minibatch]
        counted = [algo.counts_in_loss(r.finish_reason) for r in minibatch]
        weights += grpo.token_weights(n_tokens, counted, algo.loss_agg, cfg.rollout.max_new_tokens, ctx.sum)
        minibatches.append(packer.pack(rollouts, [i for i in members if has_gradient[i]], ctx.max))
    trained = [r for r, is_trained in zip(rollouts, has_gradient, strict=True) if is_trained]
    flops = metrics.update_flops(trained, packer.flop_costs, frozen=cfg.model.lora_rank > 0)
    meter.sum("update/flops", algo.update_epochs * flops)
    metrics.add_useful_tokens(chain.from_iterable(minibatches), cfg.model.attn, meter)
    return TrainBatch(rollouts, make_token_batch(rollouts, weights), minibatches)


def reshape_to_groups(rewards_B: list[float], algo: grpo.Algorithm) -> torch.Tensor:
    return torch.tensor(rewards_B, dtype=torch.float64).view(-1, algo.group_size)


@torch.no_grad()
def compute_logprobs_and_values(batch: TrainBatch, models: Models, cfg: Config, step: int = 0) -> None:
    """Phase 4: compute log-probabilities (of the old policy, the reference, a second view of the images, a teacher) and
    values with the weights before the update, as far as the algorithm needs them."""
    algo, temperature, tokens = cfg.algo, cfg.rollout.temperature, batch.tokens
    needs_policy = algo.needs_old_logps or (algo.needs_values and models.critic is None)
    empty = torch.zeros(0)  # methods read these columns even if nothing is packed
    tokens.fill(empty.long(), **{name: empty for method in algo.methods for name in method.columns})
    passes = models.logprob_passes(algo, cfg.run.seed, step)
    for micro in progress.iter_with_progress(list(chain(*batch.minibatches)), "log-probabilities"):
        rows = micro.token_index_K
        if needs_policy:
            out = models.policy(micro, temperature)
            tokens.fill(rows, old_logps=out.logp_K, values=out.value_K, entropies=out.entropy_K)
        if models.critic:
            tokens.fill(rows, values=models.critic(micro))
        for column, forward in passes.items():
            tokens.fill(rows, **{column: forward(micro, temperature).logp_K})
    if algo.old_policy == "rollout":
        tokens.old_logps = tokens.rollout_logps
    models.reshard()


def set_advantages(batch: TrainBatch, algo: grpo.Algorithm, kl_coef: float, ctx: DistContext, meter: Meter,
                   seed: int = 0, step: int = 0) -> None:
    """Phase 5: compute advantages and returns from the rewards and the results of phase 4."""
    tokens = batch.tokens
    task_rewards_PG = reshape_to_groups([r.task_reward for r in batch.rollouts], algo)
    counted_B = torch.tensor([algo.counts_in_loss(r.finish_reason) for r in batch.rollouts], dtype=torch.bool)
    rewards_PG = reshape_to_groups([r.reward for r in batch.rollouts], algo)
    advantages_N, returns_N = grpo.compute_advantages(
        rewards_PG, task_rewards_PG, tokens, counted_B, algo, kl_coef, ctx.mean_and_std)
    info = grpo.StepInfo(seed, step, lambda item: ctx.gather(item)[:: ctx.tp])
    advantages_N = grpo.change_advantages(advantages_N, batch, algo, info)
    tokens.advantages = advantages_N.float()
    tokens.returns = None if returns_N is None else returns_N.float()
    if algo.needs_values:
        metrics.add_value_metrics(tokens[counted_B[tokens.rollout]], ctx, meter)


def update_policy(models: Models, batch: TrainBatch, cfg: Config, state: TrainState, ctx: DistContext, meter: Meter,
                  skipped: SkippedUpdates) -> int:
    """Phase 6: take --update-epochs x --minibatches optimizer steps of the policy, and as many of a separate critic if
    there is one; a value head is part of the policy. During the first critic_warmup_steps training steps only the
    values are trained. Return how many optimizer steps changed the policy: those without a gradient change nothing."""
    algo, n_steps = cfg.algo, 0
    loss = grpo.PolicyLoss(algo, state.kl_coef if models.reference else 0.0)
    if models.reference:
        meter.set_replicated("kl/coef", state.kl_coef)
    for i in range(algo.update_epochs * algo.minibatches):
        epoch, number = divmod(i, algo.minibatches)
        micros = batch.minibatches[number]
        models.zero_grad()
        policy_total = value_total = 0.0
        results: list[torch.Tensor] = []  # read only after all micro-batches, because reading them waits for the GPU
        head_loss = loss
        if not loss.per_token and ctx.max(batch.splits_rollouts(number)):  # all ranks must run the same collectives
            head_loss = TangentLoss()
            compute_tangents(models, batch, number, loss, cfg)
        for micro in progress.iter_with_progress(micros, "update"):
            rows = micro.token_index_K
            tokens = batch.tokens[rows].to(ctx.device)
            out = models.policy(micro, cfg.rollout.temperature, head_loss, tokens)
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
            # mismatch metrics compare the engine's log-probabilities with the trainer's before the update: old_logps if
            # computed, else the logps of the first optimizer step
            first_pass = epoch == 0 and (algo.needs_old_logps or number == 0)
            metrics.add_token_metrics(batch.tokens[batch.rows(number)], loss, meter, first_pass=first_pass)
            metrics.add_expert_metrics(micros, meter)
        if state.step < algo.critic_warmup_steps:
            models.policy.hf.zero_grad()
        norm, stepped = clip_and_step(models.policy, models.optimizer, cfg.optim.max_grad_norm)
        n_steps += stepped
        # log the loss, summed over ranks and averaged over optimizer steps; steps without any gradient (norm 0) do not
        # count
        meter.add_mean("loss/policy", policy_total, (norm != 0) / ctx.data_world)
        meter.add_mean("policy/grad_norm", norm, norm != 0)
        skipped.after_update(norm, stepped, policy_total, batch.uids(number), meter)
        if models.critic:
            norm, _ = clip_and_step(models.critic, models.critic_optimizer, cfg.optim.max_grad_norm)
            meter.add_mean("value/grad_norm", norm, norm != 0)
            skipped.count_if_skipped(norm, value_total, batch.uids(number), meter)
        if algo.needs_values:
            meter.add_mean("loss/value", value_total, (norm != 0) / ctx.data_world)
    return n_steps


@torch.no_grad()
def compute_tangents(models: Models, batch: TrainBatch, minibatch: int, loss: grpo.PolicyLoss, cfg: Config) -> None:
    """Set `batch.tokens.tangents`: the loss linearised at the current log-probabilities and entropies, as a constant
    and two slopes per token. It has the same value and gradient but does not couple tokens, so a rollout may be split
    over several micro-batches (kernels.TangentLoss). This takes a forward pass over all micro-batches."""
    tokens = batch.tokens
    for micro in batch.minibatches[minibatch]:
        out = models.policy(micro, cfg.rollout.temperature)
        tokens.fill(micro.token_index_K, logps=out.logp_K, entropies=out.entropy_K)
    models.reshard()
    rows = batch.rows(minibatch)
    selected, tokens.tangents = tokens[rows], torch.zeros(len(tokens), 3)
    total, logp_slope_N, entropy_slope_N = loss_and_gradients(loss, selected.logps, selected.entropies, selected)
    constant_N = total / len(rows) - logp_slope_N * selected.logps - entropy_slope_N * selected.entropies
    tokens.tangents[rows] = torch.stack([constant_N, logp_slope_N, entropy_slope_N], dim=1)


def weighted_value_loss(value_K: torch.Tensor | None, tokens: TokenBatch, algo: grpo.Algorithm,
                        meter: Meter) -> torch.Tensor:
    """Return the value loss of a micro-batch without its coefficient, or 0 if the algorithm has no values."""
    if value_K is None:
        return tokens.weights.new_zeros(())
    loss_K, clipped_K = grpo.value_loss(value_K, tokens.values, tokens.returns, algo.value_clip)
    in_loss_K = tokens.weights > 0
    meter.add_mean("value/clip_frac", clipped_K[in_loss_K].sum(), in_loss_K.sum())
    return (tokens.weights * loss_K).sum()


def clip_and_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> tuple[float, bool]:
    """Clip the gradients and step the optimizer. Return the global norm before clipping, the same on all ranks, and
    whether the optimizer stepped. It does not step if the norm is not finite or 0. If the norm is 0, no weight has a
    gradient, and a step would apply only momentum and weight decay."""
    norm = sharding.clip_gradients(model, max_norm)
    can_step = 0 < norm < float("inf")
    if can_step:
        optimizer.step()
    return norm, can_step


def next_state(state: TrainState, pool: GroupPool, curriculum: DataOrder, row: dict[str, float],
               cfg: Config) -> TrainState:
    """Return the run's state after a step. `row` holds the step's metrics. With kl_target the KL coefficient adapts,
    but only if the policy was updated."""
    algo, kl_coef, infinite = cfg.algo, state.kl_coef, float("inf")
    updated = row.get("update/steps", 0) > 0 and state.step >= algo.critic_warmup_steps
    if algo.kl_target is not None and updated and abs(row.get("policy/kl_ref", infinite)) < infinite:
        samples = cfg.rollout.prompts_per_step * algo.group_size
        kl_coef = grpo.adapt_kl_coef(kl_coef, row["policy/kl_ref"], algo.kl_target, samples, algo.kl_horizon)
    curriculum_state = curriculum.after_step(state.curriculum, state.step, pool.position, pool.mean_accuracy)
    return TrainState(state.step + 1, pool.position, kl_coef, curriculum=curriculum_state)


# ----------------------------------------------------------------------------------------------------------------------
# Set-up and the training loop


def set_up(cfg: Config) -> Run:
    """Create everything that the training loop uses. All checks come first, so that errors appear before slow work."""
    # 1. processes: join the process group, handle signals, watch for ranks that hang
    ctx, interrupt, timer = watchdog.start_processes(cfg.run, cfg.parallel.tp)

    # 2. settings: resolve `auto`, compare across nodes, check
    cfg = resolve_auto_settings(cfg, ctx.device)
    node_checks.check_same_settings(cfg.to_flags(), ctx)
    check_config(cfg, ctx.world)

    # 3. processor, environment and rewards
    processor = Processor(cfg.model.model, cfg.model.min_pixels, cfg.model.max_pixels)
    env = make_env_factory(cfg.env)
    reset_fn = env.reset_example if env else identity
    grader = Grader(cfg.reward, cfg.run.folder, ctx.rank, ctx.world, has_environment=env is not None)

    # 4. data
    train_set = load_examples(cfg.data.data, cfg.data, [processor], grader, reset_fn)
    eval_data = cfg.data.eval_data
    eval_set = load_examples(eval_data, cfg.data, [processor], grader, reset_fn) if eval_data else ExampleList()
    check_ablations("--eval-ablate", cfg.run.eval_ablate, eval_set, eval_data, cfg.env.env)
    cfg.rollout.check_data(train_set, cfg.data.data, cfg.optim.micro_tokens)
    check_videos(server_kind(cfg.rollout.rollout, cfg.servers), [train_set, eval_set], env)

    # 5. curriculum, and a dry run of the rewards in each of its stages
    curriculum = make_order(cfg.reward.curriculum, train_set, cfg.rollout.prompts_per_step, cfg.run.seed)
    # evaluations use the last stage: of --curriculum, or of the curriculum of the evaluation data's task (see eval.py)
    _, eval_stage = load_last_stage(cfg.reward.curriculum, eval_set)
    batches = Batches(cfg, curriculum, processor, reset_fn, ctx)
    grader.dry_run(ctx.is_main, curriculum.stages())

    # 6. run directory, and the checkpoint to resume from
    lock = lock_folder(cfg.run.folder) if ctx.is_main else None
    node_checks.check_shared_storage(cfg.run.folder, {"--data": train_set, "--eval-data": eval_set}, ctx)
    parts = checkpoint_parts(cfg.model, cfg.algo)
    data = resume.describe_data(train_set)
    start = resume.find_resume_checkpoint(cfg.run.folder, cfg.run.resume, cfg.to_flags(), parts, data)

    # 7. models, and the state of the run
    print0(f"loading {cfg.model.model} ...")
    models = build_models(cfg, processor, ctx)
    state = TrainState.from_checkpoint(load_checkpoint(start, models.checkpointed) if start else {}, cfg.algo)
    costs = flop_costs(models.policy.hf.config, models.vision_flop_factor)
    packer = Packer(cfg.optim.micro_tokens, processor.image_token_id, costs, share=cfg.model.attn != "flash")
    if ctx.device.type == "cuda":
        probe_memory(models.policy, train_set, packer, processor, cfg, reset_fn)

    # 8. engine
    engine = start_sampling(cfg, models, processor, packer, [train_set, eval_set], env, batches, interrupt, ctx)

    # 9. checkpoints and logs
    saver = resume.CheckpointSaver(cfg.run, models, start, state, data)
    changed = resume.format_setting_changes(cfg.run.folder, cfg.to_flags()) if start else []
    log = RunLog(cfg, ctx, start, state.step)
    log.log_header(models, len(train_set), changed)
    interrupt.enable_saving(saver.save_and_describe, log.finish)

    # 10. evaluation
    greedy = SamplingParams(cfg.rollout.max_new_tokens, temperature=0.0)
    evaluation = Evaluation(
        engine, eval_set, processor, grader, ctx, greedy, stage=eval_stage, step=cfg.run.steps,
        should_stop=interrupt.reduce_signal, reset_fn=reset_fn)  # fmt: skip
    # an evaluation is due: the one before the first step, or one that a signal interrupted
    if eval_set and state.eval_due == state.step:
        row = evaluation.run_during_training(log, timer, state.step)
        log.log_extra_evaluation(state.step, row | timer.pop_metrics())

    skipped, steps_per_epoch = SkippedUpdates(cfg.run.folder, ctx), len(train_set) // cfg.rollout.prompts_per_step
    return Run(cfg, ctx, timer, interrupt, state, models, packer, batches, engine, grader, evaluation, log, saver,
               skipped, steps_per_epoch, lock)  # fmt: skip


def main(cfg: Config) -> None:
    run = set_up(cfg)
    cfg, algo, state, ctx, timer = run.cfg, run.cfg.algo, run.state, run.ctx, run.timer
    models, engine, batches, grader = run.models, run.engine, run.batches, run.grader

    for step in range(state.step, cfg.run.steps):
        meter = Meter()
        pool = GroupPool(algo, cfg.rollout, state.position, ctx)

        # 1. rollout and 2. reward, for one batch. Dynamic sampling repeats both until enough groups have unequal
        # rewards, or until --max-gen-batches batches have been drawn
        while not pool.is_full():
            prompts = batches.next(state, pool.position)
            with timer("rollout"), progress.sampling(lambda: engine.progress, len(prompts) * algo.group_size):
                rollouts = engine.generate(prompts, algo.group_size, prompts.sampling, on_rollout=grader.submit)
            with timer("reward"):
                rewards = grader.collect(rollouts)
            # `pool.add` is a collective and is not timed, so ranks that wait in it are in no phase. A rank that hangs
            # elsewhere is then the only one in a phase, and the watchdog can name that rank
            pool.add(rollouts, rewards)
            grader.check_worked(rollouts, ctx.gather)
        engine.sleep()  # free its memory for the update

        # 3. pack: balance whole groups across ranks by FLOPs; the responses of a group share its prompt and images
        with timer("pack"):
            batch = pack_batch(pool, cfg, run.packer, ctx, meter)

        # 4. log-probabilities before the update (old policy, reference, ...) and values, if the algorithm uses them
        with timer("logprobs", timed=algo.needs_forward):
            compute_logprobs_and_values(batch, models, cfg, step)

        # 5. advantage: a function of the rewards and of the results of phase 4
        set_advantages(batch, algo, state.kl_coef, ctx, meter, cfg.run.seed, step)

        # 6. update: --update-epochs x --minibatches optimizer steps
        with timer("update"), peak_memory(meter, engine.asleep_bytes):
            lr = models.set_learning_rates(cfg.optim, step, cfg.run.steps)
            n_steps = update_policy(models, batch, cfg, state, ctx, meter, run.skipped)
            models.zero_grad()  # free the gradients: the engine needs their memory when it wakes

        # 7. weight sync: send the changed weights to the engine; frozen weights only if it does not have them yet
        with timer("sync", interruptible=False):
            sync_metrics = engine.sync(models.weights(engine.dtype), changed=n_steps > 0)

        # 8. report: metrics, evaluation, checkpoint. Samples and pages come last; if they fail, the run only warns
        row = metrics.rollout_metrics(pool, grader.pop_counts()) | meter.reduce(ctx) | sync_metrics
        row |= {"lr": lr, "progress/epoch": pool.position / run.steps_per_epoch}
        state = run.saver.set_state(next_state(state, pool, batches.curriculum, row, cfg))
        row |= batches.curriculum.metrics(step, state.curriculum) | engine.step_metrics(batch)
        models.refresh_reference(state.step, algo.ref_every)
        if run.evaluation.is_due(cfg.run, state.step):
            row |= run.evaluation.run_during_training(run.log, timer, state.step)
            state = run.saver.set_state(replace(state, eval_due=run.evaluation.interrupted_at_step))
        run.log.log_step(state.step, row | timer.pop_metrics())
        run.skipped.report(state.step, run.saver.save)
        run.saver.save_if_due()
        run.log.report(state.step, batch, row)

    run.interrupt.check()
    run.log.close()


def run_training(cfg: Config) -> None:
    with naming_origins(cfg.to_flags(), cfg.run.origin):
        main(cfg)


def plan_run(argv: list[str]) -> None:
    plug_in("parallel.plan", "--plan").print_plan(argv, parse_args, check_config)


if __name__ == "__main__":
    argv = sys.argv[1:]
    run_script(*((plan_run, lambda: argv) if "--plan" in argv else (run_training, parse_args)))
