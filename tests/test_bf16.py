"""Tests of bfloat16, the default on GPUs: on policy every ratio is 1, and gradients equal those with fp32 columns.

pytest tests/test_bf16.py
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import grpo
import train
from model import Policy, load_hf
from packing import FlopCosts, Packer
from parallel.models import Models
from parallel.sharding import apply_fsdp, gather_full
from report.log import SkippedUpdates
from rollout import GroupPool, Prompt, Rollout
from utils import Meter

LOSSES = [
    "grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "rloo",
    "reinforce++ --kl-coef 0",
    "ppo --algo-args critic=separate",
    "grpo --algo-args dual_clip=1.5",
    *(f"grpo --kl-coef 0.1 --kl {kind}" for kind in grpo.KL_ESTIMATORS),
    "grpo --entropy-coef 0.05",
    "grpo --algo-args tis_cap=1.01 ratio_mask=0.9,1.1",
]


def make_rollouts(processor, picture):
    """Return two groups of four rollouts, with an image each. The engine's log-probabilities are near the toy model's
    own, which are nearly uniform."""
    rng, rollouts = random.Random(0), []
    for p in range(2):
        image = processor.image_to_patches(f"p{p}", picture(112, 84, p))
        ids = processor.tokenize_prompt([{"role": "user", "content": "<image>What is this?"}], [image])
        prompt = Prompt(f"p{p}", ids, [image], None, [])
        for g, reward in enumerate([0.0, 1.0, 0.3, 0.9]):
            n = rng.randint(3, 9)
            response = [rng.randrange(250) for _ in range(n)]
            rollouts.append(Rollout(prompt, g, response, [True] * n, [-6.0] * n, "stop", "", {"reward": reward}))
    return rollouts


def parse(*flags):
    return train.parse_args(
        [
            "--model",
            "m",
            "--data",
            "d",
            "--out",
            "o",
            "--steps",
            "1",
            "--group-size",
            "4",
            "--max-new-tokens",
            "9",
            "--max-grad-norm",
            "1e9",
            *flags,
        ]
    )


def make_batch(rollouts, cfg, models, processor, ctx):
    """Return a batch of one micro-batch that is ready for the update."""
    pool = GroupPool(cfg.algo, replace(cfg.rollout, prompts_per_step=2), 0, ctx)
    pool.add(rollouts, [{"reward": r.task_reward} for r in rollouts])
    packer = Packer(8192, processor.image_token_id, flop_costs=FlopCosts(1.0, 0.1, 1.0, 1.0, 0.0, 0.0, 0))
    batch = train.pack_batch(pool, cfg, packer, ctx, Meter())
    assert len(batch.minibatches[0]) == 1
    train.compute_logprobs_and_values(batch, models, cfg)
    train.set_advantages(batch, cfg.algo, 0.0, ctx, Meter())
    return batch


@pytest.mark.parametrize("train_vision", ["none", "all"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_on_policy_ratios_are_one_and_gradients_equal_fp32_columns(family, train_vision, toys, loaded, picture, ctx):
    processor = loaded[family][1]
    rollouts = make_rollouts(processor, picture)
    sharded = Policy(load_hf(str(toys[family])), processor, train_vision)
    apply_fsdp(sharded, ctx.device, torch.bfloat16)
    # without FSDP, nothing casts the columns
    plain = Policy(load_hf(str(toys[family]), torch.bfloat16), processor, train_vision)
    optimizer = torch.optim.SGD([p for p in sharded.parameters() if p.requires_grad], lr=0.0)
    for name in LOSSES:
        cfg = parse("--update-epochs", "2", "--algo", *name.split())
        if cfg.algo.needs_values:  # the same loss, with advantages that need no critic
            cfg = replace(cfg, algo=replace(cfg.algo, adv="grpo", norm_std="group"))
        if cfg.algo.loss == "reinforce":  # this loss allows one update per step, and has no ratio
            cfg = replace(cfg, algo=replace(cfg.algo, update_epochs=1))
        models = Models(sharded, optimizer, reference=sharded if cfg.algo.needs_reference else None)
        batch = make_batch(rollouts, cfg, models, processor, ctx)
        meter = Meter()
        state = train.TrainState(kl_coef=cfg.algo.kl_coef)
        train.update_policy(models, batch, cfg, state, ctx, meter, SkippedUpdates(Path("-"), ctx))
        metrics = meter.reduce(ctx)
        # the old log-probabilities come from a pass without gradients, which may run other kernels; if they were
        # rounded to bfloat16, the KL would be 4e-5
        assert abs(metrics["policy/approx_kl"]) < 1e-5 and metrics["policy/clip_frac"] == 0, name
        assert abs(metrics.get("policy/kl_ref", 0.0)) < 1e-5 and metrics["policy/grad_norm"] > 1e-3, name

        models = Models(plain, None, reference=plain if cfg.algo.needs_reference else None)
        batch = make_batch(rollouts, cfg, models, processor, ctx)
        [micro] = batch.minibatches[0]
        plain.zero_grad(set_to_none=True)
        loss = grpo.PolicyLoss(cfg.algo, cfg.algo.kl_coef)
        plain(micro, cfg.rollout.temperature, loss, batch.tokens[micro.token_index_K]).loss.backward()
        expected = {n: p.grad.double() for n, p in plain.named_parameters() if p.grad is not None}
        got = {n: gather_full(p.grad).double() for n, p in sharded.named_parameters() if p.grad is not None}
        assert got.keys() == expected.keys() and any("visual" in n for n in got) == (train_vision == "all")
        a, b = (torch.cat([grads[n].flatten() for n in expected]) for grads in (got, expected))
        cosine = (torch.dot(a, b) / (a.norm() * b.norm())).item()
        print(f"{family}, --train-vision {train_vision}, {name}: 1 - cosine {1 - cosine:.1e}")  # pytest -s
        assert cosine >= 0.9999, name


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_the_loss_reads_fp32_and_vision_features_are_not_rounded(family, toys, loaded, picture, ctx):
    processor = loaded[family][1]
    policy = Policy(load_hf(str(toys[family])), processor, train_vision="all")
    apply_fsdp(policy, ctx.device, torch.bfloat16)
    batch = make_batch(
        make_rollouts(processor, picture), parse("--update-epochs", "2"), Models(policy, None), processor, ctx
    )
    [micro] = batch.minibatches[0]
    assert batch.tokens.old_logps.dtype == torch.float32
    # bfloat16 cannot represent most of these
    batch.tokens.old_logps = torch.linspace(-6, -5, len(batch.tokens))
    read = {}

    def loss(logp_K, entropy_K, tokens):
        for name in ("rollout_logps", "n_images", "weights", "old_logps", "advantages"):
            read[name] = getattr(tokens, name)
        read.update(logp=logp_K, entropy=entropy_K)
        return logp_K * 1.0, {}

    loss.per_token = True
    hidden = []
    policy.visual[0].register_forward_hook(lambda _, inputs, out: hidden.append(out.last_hidden_state.detach().clone()))
    policy(micro, 1.0, loss, batch.tokens[micro.token_index_K])
    assert {name: column.dtype for name, column in read.items()} == dict.fromkeys(read, torch.float32)
    assert torch.equal(read["old_logps"], batch.tokens.old_logps[micro.token_index_K])
    exact = load_hf(str(toys[family]), torch.bfloat16)  # the same tower without FSDP rounds in the same way
    pixels = torch.cat([image.pixel_values() for image in micro.images])
    grids = torch.tensor([image.grid_thw for image in micro.images])
    assert torch.equal(hidden[0], exact.get_submodule("model.visual")(pixels, grids).last_hidden_state)
