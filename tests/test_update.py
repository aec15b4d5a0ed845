"""Advantages, log-probabilities and updates of a toy model, in this process.   pytest tests/test_update.py"""

import math
import random
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import written
from test_algorithms import slow_gae, slow_kl

import grpo
import train
from layers.lora import LoraConfig, add_lora, find_lora_layers
from model import Critic, Policy, Processor, load_hf
from packing import FlopCosts, Packer
from parallel.models import Models
from parallel.sharding import FullParameters, apply_fsdp, copy_weights, make_optimizer
from report.log import SkippedUpdates, changed_settings
from report.metrics import sampling_metrics
from reward import RewardConfig, UserError
from rewards.grade import Grader
from rollout import GroupPool, Prompt, Rollout, RolloutConfig, assign_rewards
from utils import DistContext, Meter


def parse(flags: str) -> train.Config:
    return train.parse_args(f"--model m --data d --out o --steps 9 --group-size 4 --max-new-tokens 8 {flags}".split())


def make_rollouts(rewards_PG, seed=0, length=None):
    """Return text-only rollouts of a made-up vocabulary; the last one of each group was cut off at the length limit."""
    rng = random.Random(seed)
    rollouts = []
    for p, rewards in enumerate(rewards_PG):
        example = SimpleNamespace(data_source="mine", uid=f"p{p}")
        prompt = Prompt(f"p{p}", [rng.randrange(200) for _ in range(5)], [], example, [])
        for g, reward in enumerate(rewards):
            n = length or rng.randint(1, 8)
            response = [rng.randrange(200) for _ in range(n)]
            finish_reason = "length" if g == len(rewards) - 1 else "stop"
            scored = {"reward": reward}
            rollouts.append(Rollout(prompt, g, response, [True] * n, [-6.0] * n, finish_reason, f"text {g}", scored))
    return rollouts


def make_batch(cfg, ctx, rollouts, image_token=-1):
    """Pack the rollouts with train.pack_batch, as if they were all that a step sampled."""
    rollout = replace(cfg.rollout, prompts_per_step=len(rollouts) // cfg.algo.group_size)
    pool = GroupPool(replace(cfg.algo, truncated="keep"), rollout, 0, ctx)  # the rewards already include penalties
    pool.add(rollouts, [r.rewards for r in rollouts])
    packer = Packer(cfg.optim.micro_tokens, image_token, flop_costs=FlopCosts(1.0, 0.1, 1.0, 1.0, 0.0, 0.0, 0))
    return train.pack_batch(pool, cfg, packer, ctx, Meter())


def run_update(cfg, ctx, models, rollouts, step=9):
    """Run phases 3 to 6 of a step of train.py; return the metrics and the batch."""
    meter = Meter()
    batch = make_batch(cfg, ctx, rollouts)
    train.compute_logprobs_and_values(batch, models, cfg)
    train.set_advantages(batch, cfg.algo, cfg.algo.kl_coef, ctx, meter)
    state = train.TrainState(step=step, kl_coef=cfg.algo.kl_coef)
    train.update_policy(models, batch, cfg, state, ctx, meter, SkippedUpdates(Path("-"), ctx))
    return meter.reduce(ctx), batch


def compute_advantages(cfg, ctx, rollouts, **columns):
    """Return the batch with its advantages, and the metrics. Each of `columns` has a list of numbers per rollout."""
    batch = make_batch(cfg, ctx, rollouts)
    for name, values in columns.items():
        setattr(batch.tokens, name, torch.tensor(list(chain(*values)), dtype=torch.float64))
    meter = Meter()
    train.set_advantages(batch, cfg.algo, cfg.algo.kl_coef, ctx, meter)
    return batch, meter.reduce(ctx)


def split_by_rollout(batch, column):
    """Split a column of the tokens into a tensor per rollout."""
    return column.split([sum(r.response_mask) for r in batch.rollouts])


def make_policy(path, cfg, kind=Policy):
    extra = {"value_head": cfg.algo.needs_values and cfg.algo.critic == "head"} if kind is Policy else {}
    return kind(load_hf(str(path)), Processor(str(path)), **extra).train()


def make_models(path, cfg, weight_decay=0.0):
    """Return the policy, and the critic if the settings have one, without a reference."""
    policy = make_policy(path, cfg)
    optim = cfg.optim
    models = Models(policy, make_optimizer(policy, optim.lr, weight_decay, cfg.algo.critic_lr))
    if cfg.algo.needs_values and cfg.algo.critic == "separate":
        models.critic = make_policy(path, cfg, Critic)
        models.critic_optimizer = make_optimizer(models.critic, cfg.algo.critic_lr, weight_decay)
    return models


def copy_parameters(policy):
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


UNEVEN = [[0.0, 1.0, 0.5, 0.0], [1.0, 1.0, 0.0, 0.0], [0.3, 0.3, 0.3, 0.3]]


@pytest.mark.parametrize(
    "algo", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce++ --kl-coef 0"]
)
def test_constant_groups_need_no_forward_and_change_no_weights(algo, toys, ctx):
    cfg = parse(f"--algo {algo} --lr 1e-2")
    models = make_models(toys["qwen2_5_vl"], cfg, cfg.optim.weight_decay)
    policy = models.policy
    before = copy_parameters(policy)
    m, batch = run_update(cfg, ctx, models, make_rollouts([[0.1] * 4, [0.1] * 4]))
    assert not {"policy/grad_norm", "loss/policy"} & m.keys()
    assert m["update/empty"] == 1 and m["update/skipped"] == m["update/steps"] == 0
    assert algo.startswith("reinforce") or batch.minibatches == [[]]
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters())
    measured = {
        "policy/entropy",
        "policy/clip_frac",
        "policy/approx_kl",
        "mismatch/kl",
        "mismatch/max_abs_logprob_diff",
    }
    assert algo.startswith("reinforce") or not measured & m.keys()  # there are no tokens to measure
    m, batch = run_update(cfg, ctx, models, make_rollouts(UNEVEN))
    assert measured <= m.keys() and m["update/steps"] == 1
    assert batch.uids(0) == (["p0", "p1", "p2"] if "reinforce" in algo else ["p0", "p1"]) and m["policy/grad_norm"] > 0
    assert any(not torch.equal(p, before[n]) for n, p in policy.named_parameters())


@pytest.mark.parametrize("flags", ["--entropy-coef 0.1", "--kl-coef 0.1"])
def test_with_entropy_or_kl_constant_groups_have_a_gradient(flags, toys, ctx):
    cfg = parse(f"--algo grpo {flags} --lr 1e-3")
    models = make_models(toys["qwen2_5_vl"], cfg)
    if cfg.algo.needs_reference:
        models.reference = make_policy(toys["qwen2_5_vl"], cfg)
        with torch.no_grad():
            for p in models.reference.parameters():
                p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    m, batch = run_update(cfg, ctx, models, make_rollouts([[0.1] * 4]))
    trained = sum(len(micro.target_K) for micro in batch.minibatches[0])
    assert trained == m["update/tokens"] > 4 and m["policy/grad_norm"] > 1e-4
    assert m.get("policy/kl_ref", 1.0) > 1e-4


def test_kl_to_an_equal_reference_is_zero_until_the_policy_changes(toys, ctx):
    cfg = parse("--algo grpo --kl-coef 0.1 --lr 1e-2")
    policy, reference = (make_policy(toys["qwen2_5_vl"], cfg) for _ in range(2))
    reference.requires_grad_(False)
    for model, frozen in ((policy, False), (reference, True)):
        apply_fsdp(model, ctx.device, torch.float32, frozen=frozen)
    models = Models(policy, make_optimizer(policy, cfg.optim.lr, 0.0), reference=reference)
    first, _ = run_update(cfg, ctx, models, make_rollouts(UNEVEN))
    second, _ = run_update(cfg, ctx, models, make_rollouts(UNEVEN))
    # with and without gradients the models may run other kernels; an error of 1e-5 in a log-probability gives 5e-11
    assert abs(first["policy/kl_ref"]) < 1e-9 and second["policy/kl_ref"] > 1e-5 and second["kl/coef"] == 0.1
    copy_weights(policy, reference)
    third, _ = run_update(cfg, ctx, models, make_rollouts(UNEVEN))
    assert abs(third["policy/kl_ref"]) < 1e-9
    assert not any(p.requires_grad or p.grad is not None for p in reference.parameters())


@pytest.mark.parametrize("critic_kind", ["head", "separate"])
def test_critic_warmup_does_not_change_the_policy(critic_kind, toys, ctx):
    args = f"--algo-args critic={critic_kind} critic_lr=1e-2 critic_warmup_steps=1"
    cfg = parse(f"--algo ppo {args} --update-epochs 2 --lr 1e-2")
    models = make_models(toys["qwen2_5_vl"], cfg, cfg.optim.weight_decay)
    policy = models.policy
    model = models.critic or policy
    before, head = copy_parameters(policy), copy_parameters(model.value_head)
    m, _ = run_update(cfg, ctx, models, make_rollouts(UNEVEN), step=0)
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters() if n.startswith("hf."))
    assert not torch.equal(model.value_head.weight, head["weight"]) and m["update/skipped"] == 0
    run_update(cfg, ctx, models, make_rollouts(UNEVEN), step=1)
    assert any(not torch.equal(p, before[n]) for n, p in policy.named_parameters() if n.startswith("hf."))
    names = [name for name, _ in FullParameters(policy)]
    assert names and not any("value_head" in name for name in names)  # engines have no value head


@pytest.mark.parametrize("critic_kind", ["head", "separate"])
def test_the_critic_learns_to_predict_returns(critic_kind, toys, ctx):
    """The prompt determines the reward, so all variance of the returns can be explained, and soon most of it is."""
    critic_lr = "3e-3" if critic_kind == "head" else "1e-3"
    cfg = parse(
        f"--algo ppo --algo-args critic={critic_kind} critic_lr={critic_lr} --lr 1e-4 --update-epochs 4 "
        f"--algo-args gamma=1 critic_warmup_steps=9 value_clip=none"
    )
    models = make_models(toys["qwen2_5_vl"], cfg)
    explained = []
    for step in range(9):
        rollouts = make_rollouts([[1.0] * 4, [0.0] * 4, [0.5] * 4], length=6)
        m, _ = run_update(cfg, ctx, models, rollouts, step=min(step, 8))
        explained.append(m["value/explained_variance"])
    assert explained[0] == pytest.approx(0.0, abs=1e-9) and explained[-1] > 0.8, explained  # the head starts at 0


@pytest.mark.parametrize(
    "flags",
    [
        "--algo ppo --algo-args gamma=0.9 lam=0.8 --kl-coef 0.3 --kl k2 --algo-args kl_in=reward norm_std=none",
        "--algo ppo",
        "--algo reinforce++ --kl-coef 0.2",
        "--algo rloo --kl-coef 0.2 --kl k3 --algo-args kl_in=reward",
    ],
)
@pytest.mark.parametrize("truncated", ["keep", "mask"])
def test_advantages_with_values_and_penalties_equal_plain_loops(flags, truncated, ctx):
    cfg, rollouts, rng = parse(f"{flags} --truncated {truncated}"), make_rollouts(UNEVEN), random.Random(3)
    algo = cfg.algo
    names = ("values", "old_logps", "ref_logps")
    columns = {name: [[rng.gauss(0, 1) for _ in r.response] for r in rollouts] for name in names}
    batch, m = compute_advantages(cfg, ctx, rollouts, **columns)
    assert batch.rollouts == rollouts
    penalties = []  # per token
    for old, ref in zip(columns["old_logps"], columns["ref_logps"], strict=True):
        pairs = zip(old, ref, strict=True)
        penalties.append([algo.kl_coef * slow_kl(a, b, algo.kl) if algo.kl_in_reward else 0.0 for a, b in pairs])
    want = []
    for i, r in enumerate(rollouts):
        rewards = [-p for p in penalties[i]]
        rewards[-1] += r.rewards["reward"]
        if algo.adv == "rloo":
            others = [j for j, q in enumerate(rollouts) if q.prompt.uid == r.prompt.uid and j != i]
            totals = [rollouts[j].rewards["reward"] - sum(penalties[j]) for j in others]
            want.append([sum(rewards) - sum(totals) / 3] * len(rewards))
        else:
            values, gamma, lam = [0.0] * len(rewards), 1.0, 1.0
            if algo.needs_values:
                values, gamma, lam = columns["values"][i], algo.gamma, algo.lam
            advantages, returns = slow_gae(rewards, values, [True] * len(rewards), gamma, lam)
            want.append(advantages)
            assert split_by_rollout(batch, batch.tokens.returns)[i].tolist() == pytest.approx(returns, abs=1e-6)
    if algo.effective_norm_std == "batch":
        counted_parts = [
            part for r, part in zip(rollouts, want, strict=True) if truncated == "keep" or r.finish_reason != "length"
        ]
        counted = list(chain(*counted_parts))
        mean = sum(counted) / len(counted)
        std = math.sqrt(sum((a - mean) ** 2 for a in counted) / (len(counted) - 1))
        want = [[(a - mean) / std for a in part] for part in want]
    for got, advantages in zip(split_by_rollout(batch, batch.tokens.advantages), want, strict=True):
        assert got.tolist() == pytest.approx(advantages, abs=1e-6)
    assert ("value/explained_variance" in m) == algo.needs_values


def test_truncated_responses_are_kept_masked_or_penalised(ctx):
    packed = {}
    for how in ("keep", "mask", "penalise"):
        cfg, rollouts = parse(f"--truncated {how}"), make_rollouts(UNEVEN, length=8)
        batch, _ = compute_advantages(cfg, ctx, rollouts)
        rows = torch.cat([micro.token_index_K for micro in batch.minibatches[0]])
        packed[how] = len(batch.tokens.rollout[rows].unique())
        trained = batch.tokens.weights[rows].sum().item()
        assert trained == pytest.approx(8 / 12 if how != "mask" else 6 / 9)  # p2 is constant
        cut = torch.tensor([r.finish_reason == "length" for r in batch.rollouts])[batch.tokens.rollout]
        assert bool((batch.tokens.weights[cut] == 0).all()) == (how == "mask")
    assert packed == {"keep": 8, "penalise": 8, "mask": 6}
    for how, expected in (
        ("keep", {"reward": 0.5}),
        ("penalise", {"reward": -0.5, "overlong": -1.0, "unpenalised": 0.5}),
    ):
        rollouts = make_rollouts([[0.0, 0.0]], length=8)[:1]
        assign_rewards(rollouts, [{"reward": 0.5}], parse(f"--truncated {how}").algo, 8)
        assert rollouts[0].rewards == expected


def test_a_group_without_a_right_answer_has_no_signal_however_long_its_answers_are(ctx):
    """Seven wrong answers and one that is wrong and too long have no signal: DAPO filters by correctness."""
    cfg = parse("--group-size 8 --algo dapo --max-new-tokens 20")  # the penalty begins at 16
    rollouts = make_rollouts([[0.0] * 8, [0.0] * 7 + [1.0]], length=3)
    for long in (rollouts[0], rollouts[8]):
        long.response, long.response_mask, long.logprobs = [7] * 20, [True] * 20, [-6.0] * 20
    assign_rewards(rollouts, [{"reward": r.rewards["reward"]} for r in rollouts], cfg.algo, 20)
    assert rollouts[0].rewards["reward"] == -1 and {r.task_reward for r in rollouts[:8]} == {0.0}
    batch, _ = compute_advantages(cfg, ctx, rollouts)  # the first group has no signal, but there are no others
    got = [column[0].item() for column in split_by_rollout(batch, batch.tokens.advantages)]
    assert got[:8] == [0.0] * 8 and got[8] < 0 < got[15]


@pytest.mark.parametrize(
    "flags",
    ["--algo grpo --kl k1 --algo-args norm_std=batch kl_in=reward --kl-coef 0.01", "--algo reinforce++ --kl-coef 0.01"],
)
def test_penalties_alone_are_not_scaled_up(flags, ctx):
    """If all rewards of a step are equal, dividing by the std of penalties of 1e-6 would make them advantages of 1."""
    rng, largest = random.Random(0), {}
    for rewards in ([[1.0] * 4] * 2, UNEVEN):
        rollouts = make_rollouts(rewards)
        old = [[rng.gauss(0, 1e-4) for _ in r.response] for r in rollouts]
        ref = [[0.0] * len(r.response) for r in rollouts]
        batch, _ = compute_advantages(parse(flags), ctx, rollouts, old_logps=old, ref_logps=ref)
        largest[len(rewards)] = batch.tokens.advantages.abs().max().item()
    assert 0 < largest[2] < 1e-4 and largest[3] > 0.5


@pytest.mark.parametrize(
    "flags,rewards",
    [  # rewards that are equal within each group; rewards that are equal except for those cut off, which do not count
        ("--algo grpo --kl k1 --algo-args norm_std=batch kl_in=reward --kl-coef 0.01", [[0.0] * 4, [1.0] * 4]),
        ("--algo reinforce++ --kl-coef 0.01 --truncated mask", [[1.0, 1.0, 1.0, 0.0]] * 2),
    ],
)
def test_rewards_without_a_signal_do_not_scale_penalties_up(flags, rewards, ctx):
    rng = random.Random(1)
    rollouts = make_rollouts(rewards)
    old = [[rng.gauss(0, 1e-4) for _ in r.response] for r in rollouts]
    ref = [[0.0] * len(r.response) for r in rollouts]
    cfg = parse(flags)
    batch, _ = compute_advantages(cfg, ctx, rollouts, old_logps=old, ref_logps=ref)
    columns = split_by_rollout(batch, batch.tokens.advantages)
    counted = [c for c, r in zip(columns, rollouts, strict=True) if cfg.algo.counts_in_loss(r.finish_reason)]
    assert 0 < max(column.abs().max().item() for column in counted) < 1e-4


def test_groups_without_a_signal_do_not_count_in_the_steps_std(ctx):
    cfg = parse("--algo dapo --algo-args norm_std=batch")
    live, dead = [[0.0, 1.0, 1.0, 0.0]], [[0.0, -1.0, 0.0, 0.0]]  # in the second, only a penalty differs
    alone, both = make_rollouts(live), make_rollouts(live + dead)
    for r in both[4:]:
        r.rewards["unpenalised"] = 0.0
    spread = []
    for rollouts in (alone, both):
        batch, _ = compute_advantages(cfg, ctx, rollouts)
        got = [column[0].item() for column in split_by_rollout(batch, batch.tokens.advantages)]
        assert got[4:] == [0.0] * len(got[4:])
        spread.append((sum(a**2 for a in got) / (len(got) - 1)) ** 0.5)
    assert spread == pytest.approx([1.0, 1.0])


def test_an_engine_that_computes_like_the_trainer_has_no_mismatch(toys, ctx):
    """In an update with adapters the ratio is 1, and no token is capped or masked."""
    processor = Processor(str(toys["qwen2_5_vl"]))
    cfg = parse("--lora-rank 4 --algo-args tis_cap=1.05 ratio_mask=0.9,1.1 --lr 1e-3")
    hf = add_lora(load_hf(str(toys["qwen2_5_vl"])), LoraConfig(4, 32.0))
    for layer in find_lora_layers(hf).values():
        torch.nn.init.constant_(layer.lora_B, 0.02)
    policy = Policy(hf, processor).train()
    rollouts = make_rollouts(UNEVEN)
    for r in rollouts:
        [micro] = Packer(99, processor.image_token_id).pack([r])
        with torch.no_grad():
            r.logprobs = policy(micro).logp_K.tolist()
    m, _ = run_update(cfg, ctx, Models(policy, make_optimizer(policy, 1e-3, 0.0)), rollouts)
    assert m["policy/grad_norm"] > 0
    assert m["mismatch/max_abs_logprob_diff"] < 1e-5 and m["rollout/tis_capped"] == m["rollout/ratio_masked"] == 0
    assert m["policy/approx_kl"] == 0 and m["policy/clip_frac"] == 0


def test_the_error_for_a_nan_reward_names_the_sample(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def score(response, example):\n    return float('nan') if response == 'text 2' else 1.0\n")
    grader = Grader(RewardConfig(reward=(f"{file}:score",), reward_errors="stop"))
    with pytest.raises(UserError, match="--reward .*bad.py:score: row 'p0': .* is nan .* for the response 'text 2'"):
        grader.collect(make_rollouts([[0.0] * 4]))


def test_a_group_has_a_signal_if_two_of_its_rewards_differ(ctx):
    pool = GroupPool(parse("--max-gen-batches 3").algo, RolloutConfig(prompts_per_step=2), 5, ctx)
    rollouts = make_rollouts([[1.0] * 4, [0.0, 1.0, 1.0, 1.0]])
    pool.add(rollouts, [r.rewards for r in rollouts])
    assert pool.has_signal == {(0, 0): False, (0, 1): True} and pool.mean_accuracy == {"p0": 1.0, "p1": 0.75}
    assert (pool.batches_used, pool.position) == (1, 6) and not pool.is_full()


def test_dynamic_sampling_takes_the_first_groups_with_a_signal():
    signals = {(0, 0): True, (0, 1): False, (0, 2): False, (1, 0): True, (1, 1): True, (1, 2): True}
    expected = {
        3: ([(0, 0), (1, 0), (1, 1)], {"batches": 2, "equal": 2, "surplus": 1, "filled": 0}),
        4: ([(0, 0), (1, 0), (1, 1), (1, 2)], {"batches": 2, "equal": 2, "surplus": 0, "filled": 0}),
        5: ([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)], {"batches": 2, "equal": 1, "surplus": 0, "filled": 1}),
    }
    for n_prompts, (chosen, counts) in expected.items():
        algo, rollout = parse("--max-gen-batches 3").algo, RolloutConfig(prompts_per_step=n_prompts)
        pool = GroupPool(algo, rollout, 0, DistContext(0, 1, torch.device("cpu")))
        pool.has_signal, pool.batches_used = dict(signals), 2
        assert pool.select_groups() == chosen
        assert sampling_metrics(pool) == {f"sampling/{name}": n for name, n in counts.items()}
        assert pool.is_full() == (n_prompts <= 4)
        pool.batches_used = 3
        assert pool.is_full()


def test_algo_args_reach_their_losses(toys, ctx):
    """The value head's gradient of one update is proportional to value_coef; SAPO's loss uses its two taus."""
    heads = []
    for coef in (0.5, 2.0):
        cfg = parse(f"--algo ppo --update-epochs 1 --algo-args value_coef={coef}")
        models = make_models(toys["qwen2_5_vl"], cfg)
        models.policy.value_head.weight.register_hook(lambda gradient: heads.append(gradient.double()))
        run_update(cfg, ctx, models, make_rollouts([[1.0, 0.0, 0.5, 0.0]], length=4))
    assert len(heads) == 2
    torch.testing.assert_close(4 * heads[0], heads[1], rtol=1e-4, atol=1e-9)
    assert heads[0].norm() > 0
    logp, advantages = torch.tensor([0.3, -0.4, 0.2]).double(), torch.tensor([1.0, 2.0, -1.0]).double()
    algo = parse("--algo sapo --algo-args sapo_tau_positive=3 sapo_tau_negative=7").algo
    loss, _ = grpo.policy_loss(logp, torch.zeros_like(logp), advantages, algo=algo)
    for x, a, got in zip(logp.tolist(), advantages.tolist(), loss.tolist(), strict=True):
        tau = 3 if a > 0 else 7
        assert got == pytest.approx(-4 / tau * a / (1 + math.exp(-tau * (math.exp(x) - 1))))
    assert parse("--group-size 8").algo == train.AlgorithmSettings()
    assert parse("--algo-args kl_horizon=50").algo.kl_horizon == 50


@pytest.mark.parametrize("pair, reason", [
    ("value_coeff=1", "no such key \\(did you mean value_coef"), ("value_clip", "give KEY=VALUE"),
    ("value_coef=none", "must be of type float"), ("kl_horizon=0.0", "must be above 0"),
    ("ref_every=x", "must be of type int"), ("critic=tail", "must be one of head, separate"),
    ("value_clip=nan", "must be above 0"), ("sapo_tau_positive=inf", "must be finite"),
])  # fmt: skip
def test_wrong_algo_args_are_refused_before_a_model_loads(pair, reason):
    with pytest.raises(UserError, match=f"--algo-args {pair}: {reason}"):
        parse(f"--algo-args {pair}")


def test_presets_are_resolved_when_parsed_and_shown():
    cfg = parse("--algo dapo --clip-low 0.1")
    algo = cfg.algo
    assert (algo.clip_low, algo.clip_high, algo.max_gen_batches, algo.truncated) == (0.1, 0.28, 10, "penalise")
    shown = changed_settings(cfg)  # also what the preset sets
    assert {"--algo dapo", "--clip-low 0.1", "--clip-high 0.28", "--max-gen-batches 10"} <= {*shown}
    unchanged = ("--model", "--data", "--kl-coef")  # without a default, or at it
    assert not any(setting.startswith(unchanged) for setting in shown)
    assert algo.effective_norm_std == "group" and parse("--algo ppo").algo.effective_norm_std == "batch"
    ppo = parse("--algo ppo").algo
    recipe = (ppo.update_epochs, ppo.clip_low, ppo.clip_high, ppo.value_coef, ppo.entropy_coef, ppo.gamma, ppo.lam)
    assert recipe == (4, 0.2, 0.2, 0.5, 0.01, 0.99, 0.95)


def test_a_value_head_reads_the_state_before_each_token(toys):
    """Adding a value head does not change the policy, and each value depends only on what comes before its token."""
    plain, valued = (make_policy(toys["qwen2_5_vl"], parse(flags)) for flags in ("", "--algo ppo"))
    torch.nn.init.normal_(valued.value_head.weight)
    processor = Processor(str(toys["qwen2_5_vl"]))
    prompt = processor.tokenize_prompt([{"role": "user", "content": "What now?"}], [])
    packer = Packer(99, processor.image_token_id)
    a, b = (packer.pack([written("u", prompt, response)])[0] for response in ([5, 6, 7], [5, 9, 8]))
    out, got, other = plain(a), valued(a), valued(b)
    assert torch.equal(got.logp_K, out.logp_K) and torch.equal(got.entropy_K, out.entropy_K) and out.value_K is None
    torch.testing.assert_close(got.value_K[:2], other.value_K[:2])
    assert (got.value_K[2] - other.value_K[2]).abs() > 1e-4
    with torch.no_grad():  # against transformers' own forward
        hidden = valued.hf(torch.tensor([prompt + [5, 6, 7]]), output_hidden_states=True).hidden_states[-1]
        want = valued.value_head(hidden[0, len(prompt) - 1 : -1])[:, 0]
    torch.testing.assert_close(got.value_K, want, rtol=1e-4, atol=1e-5)
