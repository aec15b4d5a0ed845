"""In bfloat16, a GPU's default: on policy every ratio is 1, and gradients are those of fp32 columns.   pytest tests/test_bf16.py"""

import random

import pytest
import torch
import torch.distributed as dist

import grpo
import train
from model import Policy, load_hf
from rollout import Rollout
from sharding import full, shard
from utils import Context

LOSSES = ["grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce++ --kl-coef 0", "ppo --critic separate", "grpo --dual-clip 1.5",
          *(f"grpo --kl-coef 0.1 --kl {kind}" for kind in grpo.KL_KINDS), "grpo --entropy-coef 0.05",
          "grpo --tis-cap 1.01 --tis-mask 0.9,1.1"]


@pytest.fixture
def ctx():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Context(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


def make_rollouts(processor, picture):
    """Two groups of four, with a picture each; the engine's log-probabilities are near the toy's own, which are near uniform."""
    rng, rollouts = random.Random(0), []
    for p in range(2):
        image = processor.image(f"p{p}", picture(112, 84, p))
        prompt = processor.encode([{"role": "user", "content": "<image>What is this?"}], [image])
        for g in range(4):
            n = rng.randint(3, 9)
            rollouts.append(Rollout(f"p{p}", g, prompt + [rng.randrange(250) for _ in range(n)], len(prompt), [True] * n, [-6.0] * n,
                                    [image], "stop", "", {"reward": [0.0, 1.0, 0.3, 0.9][g]}))
    return rollouts


def micro_of(rollouts, args, processor):
    for r in rollouts:
        r.columns = {}
    train.set_advantages(rollouts, args, 0.0)
    [micro] = train.pack_minibatch(rollouts, args, processor, torch.device("cpu"))
    return micro


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen tower", "trained tower"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_on_policy_ratios_are_one_and_gradients_those_of_fp32_columns(family, frozen, toys, loaded, picture, ctx):
    processor = loaded[family][1]
    rollouts = make_rollouts(processor, picture)
    sharded = Policy(load_hf(str(toys[family])), processor, frozen)
    shard(sharded, ctx.device, torch.bfloat16)
    plain = Policy(load_hf(str(toys[family]), torch.bfloat16), processor, frozen)  # no FSDP: nothing casts its columns
    optimizer = torch.optim.SGD([p for p in sharded.parameters() if p.requires_grad], lr=0.0)
    for algo in LOSSES:
        name, *more = algo.split()
        args = train.parse_args(["--model", "m", "--data", "d", "--out", "o", "--steps", "1", "--group-size", "4", "--max-new-tokens", "9",
                                 "--algo", name, "--epochs", "2", "--max-grad-norm", "1e9", *more])
        if args.adv == "gae":
            args.adv, args.norm_std = "grpo", "group"  # its loss, on advantages that need no critic
        args.epochs = 1 if args.loss == "reinforce" else 2  # it is for one update a step, and has no ratio
        reference = sharded if args.kl_coef else None
        micro = micro_of(rollouts, args, processor)
        metrics = train.update(sharded, optimizer, [[micro]], args, ctx, args.kl_coef, reference)
        assert metrics["policy/kl_old"] == 0 and metrics["policy/clipped"] == 0, algo
        assert metrics.get("policy/kl_ref", 0.0) == 0 and metrics["policy/grad_norm"] > 1e-3, algo

        micro = micro_of(rollouts, args, processor)
        train.score([[micro]], args, plain, plain if reference else None)
        loss = grpo.PolicyLoss(args.loss, args.clip_low, args.clip_high, args.dual_clip, args.kl if reference else None, args.kl_coef,
                               args.entropy_coef, tis_cap=args.tis_cap, tis_mask=args.tis_mask and train.tis_bounds(args.tis_mask))
        plain.zero_grad(set_to_none=True)
        plain(micro, args.temperature, loss)[0].backward()
        expected = {n: p.grad.double() for n, p in plain.named_parameters() if p.grad is not None}
        got = {n: full(p.grad).double() for n, p in sharded.named_parameters() if p.grad is not None}
        assert got.keys() == expected.keys() and any("visual" in n for n in got) != frozen
        a, b = (torch.cat([grads[n].flatten() for n in expected]) for grads in (got, expected))
        cosine = (torch.dot(a, b) / (a.norm() * b.norm())).item()
        print(f"{family}, {'frozen' if frozen else 'trained'} tower, {algo}: 1 - cosine {1 - cosine:.1e}")  # pytest -s
        assert cosine >= 0.9999, algo


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_what_the_loss_reads_is_fp32_and_a_towers_features_are_not_rounded(family, toys, loaded, picture, ctx):
    processor = loaded[family][1]
    args = train.parse_args("--model m --data d --out o --steps 1 --group-size 4 --max-new-tokens 9".split())
    micro = micro_of(make_rollouts(processor, picture), args, processor)
    micro.values["old_logp"] = torch.linspace(-6, -5, len(micro.target_K))  # most of these are no bfloat16 numbers
    policy = Policy(load_hf(str(toys[family])), processor, freeze_vision=False)
    shard(policy, ctx.device, torch.bfloat16)
    read = {}

    def loss(logp, entropy, values):
        read.update(values, logp=logp, entropy=entropy)
        return logp * 1.0, {}

    loss.per_token = True
    hidden = []
    policy.visual[0].register_forward_hook(lambda _, inputs, out: hidden.append(out.last_hidden_state.detach().clone()))
    policy(micro, 1.0, loss)
    assert {name: v.dtype for name, v in read.items() if v.is_floating_point()} == dict.fromkeys(read.keys() - {"sequence"}, torch.float32)
    assert torch.equal(read["old_logp"], micro.values["old_logp"])
    exact = load_hf(str(toys[family]), torch.bfloat16)  # the same tower without FSDP: the same roundings
    pixels = torch.cat([image.pixel_values for image in micro.images])
    features = exact.get_submodule("model.visual")(pixels, torch.tensor([image.grid_thw for image in micro.images])).last_hidden_state
    assert torch.equal(hidden[0], features)
