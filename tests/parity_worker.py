"""Trains one step on fixed rollouts and saves metrics and gradients. Run by test_train.py under torchrun.

python -m torch.distributed.run --standalone --nproc-per-node N tests/parity_worker.py MODEL OUT.pt [flags of train.py]

The ranks get unequal shares of the rollouts, and packing.balance_across_ranks moves some between them. Further cases
follow a "/", each with its own flags; OUT.pt then has one result per case. These flags are not train.py's: `float64`
computes all cases in double precision, `turns` splits rollouts into episodes whose turns are separate sequences,
`block=N` has the policy head compute N rows at a time, and `sgd=RATE` updates the weights."""

import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from PIL import Image  # noqa: E402

import grpo  # noqa: E402
import kernels  # noqa: E402
import train  # noqa: E402
from layers.lora import AdapterFreePolicy, LoraConfig, add_lora, find_lora_layers  # noqa: E402
from model import Critic, Policy, Processor, load_config, load_hf  # noqa: E402
from packing import Packer, flop_costs  # noqa: E402
from parallel.models import Models  # noqa: E402
from parallel.sharding import apply_fsdp, gather_full  # noqa: E402
from report.log import SkippedUpdates  # noqa: E402
from rollout import GroupPool, Prompt, Rollout, TurnSequence  # noqa: E402
from utils import DistContext, Meter, run_script, setup_distributed  # noqa: E402

# images per prompt; all samples of p0 have the same reward, so that often only one rank trains on images
N_IMAGES = (1, 0, 0, 3, 0, 0)


def make_prompts(uids: Sequence[str], processor: Processor) -> list[Prompt]:
    """Return the prompts with uids p0 to p5. Each uid has its own images, and a longer text than the one before."""
    prompts = []
    for uid in uids:
        index = int(uid[1:])
        rng = random.Random(index)
        images = []
        for i in range(N_IMAGES[index]):
            image = Image.frombytes("RGB", (84, 56), rng.randbytes(84 * 56 * 3))
            images.append(processor.image_to_patches(f"{index}/{i}", image))
        content = "<image>" * len(images) + "What now? " * (index + 1)
        prompts.append(
            Prompt(uid, processor.tokenize_prompt([{"role": "user", "content": content}], images), images, None, [])
        )
    return prompts


def make_rollouts(prompts: Sequence[Prompt], group_size: int) -> list[Rollout]:
    """Return responses of different lengths, given by the prompt's uid. All samples of p0 have the same reward."""
    rollouts = []
    for prompt in prompts:
        rng = random.Random(f"responses of {prompt.uid}")
        for sample in range(group_size):
            response = [rng.randrange(250) for _ in range(rng.randint(1, 14))]
            n = len(response)
            reward = 0.3 if prompt.uid == "p0" else rng.choice([0.0, 0.3, 1.0])
            logprobs = [rng.uniform(-6.9, -5.3) for _ in response]  # close to the toy's, which are almost uniform
            rewards = {"reward": reward, "length": float(n)}
            rollouts.append(Rollout(prompt, sample, response, [True] * n, logprobs, "stop", "", rewards))
    return rollouts


def split_into_turns(rollout: Rollout) -> Rollout:
    """Return a rollout whose response is split into up to three turns, which are sequences with the same prompt. The
    response includes the observations before the turns."""
    rng = random.Random(f"turns of {rollout.prompt.uid}/{rollout.sample_index}")
    sampled, turns, response, mask = rollout.response, [], [], []
    cuts = rng.sample(range(1, len(sampled)), min(rng.randint(0, 2), len(sampled) - 1))
    for start, end in itertools.pairwise([0, *sorted(cuts), len(sampled)]):
        observation = [rng.randrange(2) for _ in range(rng.randint(1, 3))] if start else []
        ids = [*rollout.prompt.token_ids, *observation, *sampled[start:end]]
        turns.append(TurnSequence(ids, end - start, len(rollout.prompt.images)))
        response += [*observation, *sampled[start:end]]
        mask += [False] * len(observation) + [True] * (end - start)
    return replace(rollout, response=response, response_mask=mask, separate_turns=turns)


def spread(logp_K, log_ratio_K, advantages_K, rollout_K, algo):
    """Compute a loss that only tests use: it couples the tokens of a response, even on policy."""
    _, index_K, count = rollout_K.unique(return_inverse=True, return_counts=True)
    mean = torch.zeros_like(logp_K[: len(count)]).index_add(0, index_K, logp_K) / count
    return (logp_K - mean[index_K]) ** 2 * advantages_K, torch.zeros_like(logp_K, dtype=torch.bool)


def policy_differences(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return (N,) differences between the log-probabilities of the policy and the old policy, in nats per token. Some
    are large enough that ratios are clipped."""
    differences = []
    for rollout in rollouts:
        rng = random.Random(f"{rollout.prompt.uid}/{rollout.sample_index}")
        differences += [rng.uniform(-0.6, 0.6) for _ in rollout.logprobs]
    return torch.tensor(differences)


def add_noise(model: torch.nn.Module, size: float) -> torch.nn.Module:
    """Add the same noise on every rank and return the model, so that a reference differs and values are not all 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


def assert_equal_copies(model: Policy) -> None:
    """Assert that replicated parameters have bitwise equal gradients on all ranks of a tensor-parallel group, because
    nothing would synchronize them."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None or not model.tp_group or parameter.device_mesh.mesh_dim_names[-1] != "tp":
            continue
        if parameter.placements[-1].is_replicate():
            mine = parameter.grad.to_local().contiguous()
            first = mine.clone()
            torch.distributed.broadcast(first, group=model.tp_group, group_src=0)
            assert torch.equal(first, mine), name


SINGLE = (torch.float32, torch.Tensor.float)
DOUBLE = (torch.float64, torch.Tensor.double)


def set_precision(types: tuple) -> None:
    """Use `types` wherever code asks for single precision by name, or for no precision."""
    torch.float32, torch.Tensor.float = types
    torch.set_default_dtype(types[0])


def load_model(path: str, lora: LoraConfig | None, double: bool) -> torch.nn.Module:
    set_precision(SINGLE)
    hf = load_hf(path)
    if lora:  # B starts at 0, which gives A no gradient
        for layer in find_lora_layers(add_lora(hf, lora)).values():
            torch.nn.init.constant_(layer.lora_B, 0.01)
    if double:
        hf = hf.double()
        if "moe" in hf.config.model_type:
            hf.set_experts_implementation("eager")  # the grouped matrix product does not support float64
        set_precision(DOUBLE)
    return hf


def build_test_models(cfg: train.Config, processor: Processor, ctx: DistContext, double: bool, lr: float) -> Models:
    """Build the models as parallel.models.build_models does, but different from each other, and with SGD."""
    algo = cfg.algo
    lora = cfg.model.lora(cfg.run.seed)

    def prepare(model: Policy, frozen: bool = False) -> Policy:
        if hasattr(model, "value_head"):
            add_noise(model.value_head.to(torch.float32), 0.1)
        model.train()
        if cfg.model.gradient_checkpointing:
            model.hf.gradient_checkpointing_enable({"use_reentrant": False})
        apply_fsdp(model, ctx.device, torch.float32, cfg.parallel, frozen)
        return model

    def optimizer_of(model: Policy) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr)

    has_head = algo.needs_values and algo.critic == "head"
    policy = prepare(
        Policy(load_model(cfg.model.model, lora, double), processor, cfg.model.train_vision, value_head=has_head)
    )
    models = Models(policy, optimizer_of(policy))
    if algo.needs_values and algo.critic == "separate":
        models.critic = prepare(Critic(load_model(cfg.model.model, lora, double), processor, cfg.model.train_vision))
        models.critic_optimizer = optimizer_of(models.critic)
    if algo.needs_reference and lora:
        models.reference = AdapterFreePolicy(policy)
    elif algo.needs_reference:
        other = Policy(add_noise(load_model(cfg.model.model, None, double), 0.01), processor)
        models.reference = prepare(other.requires_grad_(False), frozen=True)
    if algo.reads("teacher_logps"):
        other = Policy(add_noise(load_model(algo.teacher, None, double), 0.02), processor)
        models.teacher = prepare(other.requires_grad_(False), frozen=True)
    return models


def run_case(model: str, flags: list[str], double: bool) -> dict:
    options = dict(flag.partition("=")[::2] for flag in flags if flag.startswith(("turns", "block=", "sgd=")))
    flags = [flag for flag in flags if flag.partition("=")[0] not in options]
    cfg = train.parse_args(
        ["--model", model, "--data", "-", "--out", "-", "--steps", "1", "--group-size", "4", "--prompts-per-step",
         str(len(N_IMAGES)), "--max-grad-norm", "1e9", *flags]
    )  # fmt: skip
    world = torch.distributed.get_world_size()
    if world == 1:  # the reference for other numbers of ranks
        cfg = replace(cfg, parallel=replace(cfg.parallel, replicate=1, tp=1))
    ctx = DistContext(torch.distributed.get_rank(), world, torch.device("cpu"), cfg.parallel.tp)
    processor = Processor(model)
    vocab = load_config(model).text_config.vocab_size
    kernels.CPU_BLOCK_ELEMENTS = int(options.get("block", 4000)) * vocab
    models = build_test_models(cfg, processor, ctx, double, lr=float(options.get("sgd", 0)))
    packer = Packer(cfg.optim.micro_tokens, processor.image_token_id, flop_costs(models.policy.hf.config))

    # with a stride, so that some rank has more work
    pool = GroupPool(cfg.algo, cfg.rollout, 0, ctx)
    prompts = make_prompts([f"p{place}" for place in range(ctx.rank, pool.target_groups, ctx.world)], processor)
    rollouts = make_rollouts(prompts, cfg.algo.group_size)
    rollouts = [split_into_turns(r) for r in rollouts] if "turns" in options else rollouts
    pool.add(rollouts, [r.rewards for r in rollouts])
    meter = Meter()
    batch = train.pack_batch(pool, cfg, packer, ctx, meter)
    received = sorted({r.prompt.uid for r in batch.rollouts} - {prompt.uid for prompt in prompts})  # from other ranks
    train.compute_logprobs_and_values(batch, models, cfg)
    if not cfg.algo.on_policy:
        batch.tokens.old_logps -= policy_differences(batch.rollouts)
    train.set_advantages(batch, cfg.algo, cfg.algo.kl_coef, ctx, meter)
    state = train.TrainState(kl_coef=cfg.algo.kl_coef)
    train.update_policy(models, batch, cfg, state, ctx, meter, SkippedUpdates(Path("-"), ctx))
    gradients = {}
    for name, net in (("policy", models.policy), ("critic", models.critic), ("reference", models.reference)):
        if isinstance(net, Policy):
            assert_equal_copies(net)
            gradients |= {f"{name}.{n}": gather_full(p.grad) for n, p in net.named_parameters() if p.grad is not None}
    micros = batch.minibatches[0]
    return {
        "metrics": meter.reduce(ctx),
        "gradients": gradients,
        "micros": len(micros),
        "split": bool(ctx.max(batch.splits_rollouts(0))),
        "images": ctx.gather([len(micro.images) for micro in micros]),  # per rank
        "moved": ctx.gather(received),
    }


def main(_) -> None:
    torch.set_num_threads(1)
    model, out, *flags = sys.argv[1:]
    double = "float64" in flags
    ctx = setup_distributed()
    cases: list[list[str]] = [[]]
    for flag in flags:
        if flag == "/":
            cases.append([])
        elif flag != "float64":
            cases[-1].append(flag)
    results = [run_case(model, case, double) for case in cases]
    if ctx.is_main:
        torch.save(results, out)


if __name__ == "__main__":
    grpo.register_loss("spread", per_token=False)(spread)
    run_script(main, lambda: None)
