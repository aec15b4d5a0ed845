"""Advantages, scoring and one update, in process, on a toy model.   pytest tests/test_update.py"""

import math
import random

import pytest
import torch
import torch.distributed as dist
from test_algorithms import slow_gae, slow_kl

import grpo
import train
from model import Critic, Lora, Policy, add_lora, load_hf, load_processor, lora_layers
from rollout import Rollout
from sharding import copy_weights, full_parameters, make_optimizer, same_tower, shard
from utils import Context


@pytest.fixture
def ctx():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Context(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


def parse(flags: str):
    return train.parse_args(f"--model m --data d --out o --steps 9 --group-size 4 --max-new-tokens 8 {flags}".split())


def make_rollouts(rewards_PG, seed=0, length=None):
    """Text-only rollouts of a made-up vocabulary; the last one of each group was cut at the length limit."""
    rng = random.Random(seed)
    rollouts = []
    for p, rewards in enumerate(rewards_PG):
        prompt = [rng.randrange(200) for _ in range(5)]
        for g, reward in enumerate(rewards):
            n = length or rng.randint(1, 8)
            rollouts.append(Rollout(f"p{p}", g, prompt + [rng.randrange(200) for _ in range(n)], 5, [True] * n, [-6.0] * n, [],
                                    "length" if g == len(rewards) - 1 else "stop", f"text {g}", {"reward": reward}))
    return rollouts


def one_update(args, ctx, policy, optimizer, rollouts, reference=None, critic=None, critic_optimizer=None, warming=False):
    """The parts 3 to 5 of a step of train.py, in one minibatch."""
    processor = load_processor(policy.path)
    micros = []
    if train.scores_first(args):
        micros = train.pack_minibatch(rollouts, args, processor, ctx.device)
        train.score([micros], args, policy, reference, critic)
    m = train.set_advantages(rollouts, args, args.kl_coef)
    for micro in micros:
        for name in ("advantage", "return") if args.adv == "gae" else ("advantage",):
            micro.take(name)
    micros = micros or train.pack_minibatch(rollouts, args, processor, ctx.device)
    m |= train.update(policy, optimizer, [micros], args, ctx, args.kl_coef, reference, critic, critic_optimizer, warming)
    return m, micros


def make_policy(path, args, kind=Policy):
    extra = {"value_head": args.adv == "gae" and args.critic == "head"} if kind is Policy else {}
    policy = kind(load_hf(str(path)), load_processor(str(path)), **extra)
    policy.path = str(path)
    return policy.train()


def weights(policy):
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


UNEVEN = [[0.0, 1.0, 0.5, 0.0], [1.0, 1.0, 0.0, 0.0], [0.3, 0.3, 0.3, 0.3]]


@pytest.mark.parametrize("algo", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce++ --kl-coef 0"])
def test_constant_groups_cost_no_forward_and_move_nothing(algo, toys, ctx):
    args = parse(f"--algo {algo} --lr 1e-2")
    policy = make_policy(toys["qwen2_5_vl"], args)
    optimizer, before = make_optimizer(policy, args.lr, args.weight_decay), weights(policy)
    m, micros = one_update(args, ctx, policy, optimizer, make_rollouts([[0.1] * 4, [0.1] * 4]))
    assert micros == [] and m["policy/grad_norm"] == 0 and m["update/empty"] == 1 and m["update/skipped"] == 0
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters())
    measured = {"policy/entropy", "policy/clipped", "policy/kl_old", "rollout/kl", "rollout/max_abs_dlogp"}
    assert not measured & m.keys()  # of nothing
    m, micros = one_update(args, ctx, policy, optimizer, make_rollouts(UNEVEN))
    assert measured <= m.keys() and m["update/steps"] == 1
    uids = {s.uid for micro in micros for s in micro.samples}
    assert uids == ({"p0", "p1", "p2"} if "reinforce" in algo else {"p0", "p1"}) and m["policy/grad_norm"] > 0
    assert any(not torch.equal(p, before[n]) for n, p in policy.named_parameters())


@pytest.mark.parametrize("more", ["--entropy-coef 0.1", "--kl-coef 0.1"])
def test_with_entropy_or_kl_constant_groups_have_a_gradient(more, toys, ctx):
    args = parse(f"--algo grpo {more}")
    policy = make_policy(toys["qwen2_5_vl"], args)
    reference = None
    if args.kl_coef:
        reference = make_policy(toys["qwen2_5_vl"], args)
        with torch.no_grad():
            for p in reference.parameters():
                p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    m, micros = one_update(args, ctx, policy, make_optimizer(policy, 1e-3, 0.0), make_rollouts([[0.1] * 4]), reference)
    assert sum(len(micro.target_K) for micro in micros) == m["update/tokens"] > 4 and m["policy/grad_norm"] > 1e-4
    assert m.get("policy/kl_ref", 1.0) > 1e-4


def test_a_reference_equal_to_the_policy_is_at_distance_zero_until_the_policy_moves(toys, ctx):
    args = parse("--algo grpo --kl-coef 0.1 --lr 1e-2")
    policy, reference = (make_policy(toys["qwen2_5_vl"], args) for _ in range(2))
    reference.requires_grad_(False)
    for model, frozen in ((policy, False), (reference, True)):
        shard(model, ctx.device, torch.float32, frozen=frozen)
    optimizer = make_optimizer(policy, args.lr, 0.0)
    first, _ = one_update(args, ctx, policy, optimizer, make_rollouts(UNEVEN), reference)
    second, _ = one_update(args, ctx, policy, optimizer, make_rollouts(UNEVEN), reference)
    assert first["policy/kl_ref"] == 0 and second["policy/kl_ref"] > 1e-5 and second["kl/coef"] == 0.1
    copy_weights(policy, reference)
    third, _ = one_update(args, ctx, policy, optimizer, make_rollouts(UNEVEN), reference)
    assert third["policy/kl_ref"] == 0
    assert not any(p.requires_grad or p.grad is not None for p in reference.parameters())


def test_towers_are_told_apart(toys, ctx):
    args = parse("--algo grpo --kl-coef 0.1")
    policy, reference = (make_policy(toys["qwen2_5_vl"], args) for _ in range(2))
    with torch.no_grad():
        next(p for n, p in reference.named_parameters() if "visual" in n).view(-1)[3] += 1e-3
    for model, frozen in ((policy, False), (reference, True)):
        shard(model, ctx.device, torch.float32, frozen=frozen)
    assert not same_tower(policy, reference)
    copy_weights(policy, reference)
    assert same_tower(policy, reference)


@pytest.mark.parametrize("critic_kind", ["head", "separate"])
def test_critic_warm_up_leaves_the_policy_as_it_is(critic_kind, toys, ctx):
    args = parse(f"--algo ppo --critic {critic_kind} --epochs 2 --lr 1e-2 --critic-lr 1e-2")
    policy = make_policy(toys["qwen2_5_vl"], args)
    optimizer = make_optimizer(policy, args.lr, args.weight_decay, args.critic_lr)
    critic = critic_optimizer = None
    if critic_kind == "separate":
        critic = make_policy(toys["qwen2_5_vl"], args, Critic)
        critic_optimizer = make_optimizer(critic, args.critic_lr, args.weight_decay)
    model = critic or policy
    before, head = weights(policy), weights(model.value_head)
    m, _ = one_update(args, ctx, policy, optimizer, make_rollouts(UNEVEN), None, critic, critic_optimizer, warming=True)
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters() if n.startswith("hf."))
    assert not torch.equal(model.value_head.weight, head["weight"]) and m["update/skipped"] == 0
    one_update(args, ctx, policy, optimizer, make_rollouts(UNEVEN), None, critic, critic_optimizer)
    assert any(not torch.equal(p, before[n]) for n, p in policy.named_parameters() if n.startswith("hf."))
    names = [name for name, _ in full_parameters(policy)]
    assert names and not any("value_head" in name for name in names)  # no engine knows it


@pytest.mark.parametrize("critic_kind", ["head", "separate"])
def test_the_critic_learns_to_predict_returns(critic_kind, toys, ctx):
    """Rewards that the prompt determines: all of the return can be explained, and soon most of it is."""
    args = parse(f"--algo ppo --critic {critic_kind} --critic-lr 3e-3 --lr 1e-4 --gamma 1 --value-clip 0 --epochs 4")
    policy = make_policy(toys["qwen2_5_vl"], args)
    optimizer = make_optimizer(policy, args.lr, 0.0, args.critic_lr)
    critic = make_policy(toys["qwen2_5_vl"], args, Critic) if critic_kind == "separate" else None
    critic_optimizer = make_optimizer(critic, 1e-3, 0.0) if critic else None
    explained = []
    for _ in range(12):
        rollouts = make_rollouts([[1.0] * 4, [0.0] * 4, [0.5] * 4], length=6)
        m, _ = one_update(args, ctx, policy, optimizer, rollouts, None, critic, critic_optimizer, warming=True)
        explained.append(m["value/explained_variance"])
    assert explained[0] == pytest.approx(0.0, abs=1e-9) and explained[-1] > 0.8, explained  # the head starts at 0


def test_updates_end_once_the_policy_has_moved_too_far(toys, ctx):
    far, near = ({}, {})
    for target, m in ((1e-6, far), (1e3, near)):
        args = parse(f"--algo grpo --epochs 4 --target-kl {target} --lr 1e-2")
        policy = make_policy(toys["qwen2_5_vl"], args)
        m |= one_update(args, ctx, policy, make_optimizer(policy, args.lr, 0.0), make_rollouts(UNEVEN))[0]
    assert far["update/stopped"] == 3 and near["update/stopped"] == 0 and near["policy/kl_old"] > far["policy/kl_old"] > 1e-6


@pytest.mark.parametrize("flags", ["--algo ppo --gamma 0.9 --lam 0.8 --kl-coef 0.3 --kl k2 --kl-in reward --norm-std none",
                                   "--algo ppo", "--algo reinforce++ --kl-coef 0.2", "--algo rloo --kl-coef 0.2 --kl abs --kl-in reward"])
@pytest.mark.parametrize("truncated", ["keep", "mask"])
def test_advantages_with_values_and_penalties_equal_plain_loops(flags, truncated, ctx):
    args, rollouts, rng = parse(f"{flags} --truncated {truncated}"), make_rollouts(UNEVEN), random.Random(3)
    for r in rollouts:
        for name in ("value", "old_logp", "ref_logp"):
            r.columns[name] = [rng.gauss(0, 1) for _ in r.response]
    m = train.set_advantages(rollouts, args, args.kl_coef)
    want = []
    for r in rollouts:
        penalties = [args.kl_coef * slow_kl(a, b, args.kl) if args.kl_in == "reward" else 0.0
                     for a, b in zip(r.columns["old_logp"], r.columns["ref_logp"], strict=True)]
        rewards = [-p for p in penalties]
        rewards[-1] += r.rewards["reward"]
        if args.adv == "rloo":
            group = [q for q in rollouts if q.uid == r.uid and q is not r]
            scores = {q.sample: q.rewards["reward"] - sum(args.kl_coef * slow_kl(a, b, args.kl) for a, b in zip(
                q.columns["old_logp"], q.columns["ref_logp"], strict=True)) for q in [*group, r]}
            want.append([scores[r.sample] - sum(scores[q.sample] for q in group) / 3] * len(rewards))
        else:
            values, gamma, lam = (r.columns["value"], args.gamma, args.lam) if args.adv == "gae" else ([0.0] * len(rewards), 1.0, 1.0)
            advantages, returns = slow_gae(rewards, values, [True] * len(rewards), gamma, lam)
            want.append(advantages)
            assert r.columns["return"] == pytest.approx(returns, abs=1e-9)
    if args.norm_std == "batch":
        counted = [a for r, part in zip(rollouts, want, strict=True) for a in part if truncated == "keep" or r.finish_reason != "length"]
        mean = sum(counted) / len(counted)
        std = math.sqrt(sum((a - mean) ** 2 for a in counted) / (len(counted) - 1))
        want = [[(a - mean) / std for a in part] for part in want]
    for r, advantages in zip(rollouts, want, strict=True):
        assert r.columns["advantage"] == pytest.approx(advantages, abs=1e-9)
    assert ("value/explained_variance" in m) == (args.adv == "gae")


def test_truncated_responses_are_kept_masked_or_penalised(toys, ctx):
    processor = load_processor(str(toys["qwen2_5_vl"]))
    packed = {}
    for how in ("keep", "mask", "penalise"):
        args, rollouts = parse(f"--truncated {how}"), make_rollouts(UNEVEN, length=8)
        train.set_advantages(rollouts, args, 0.0)
        samples = [s for micro in train.pack_minibatch(rollouts, args, processor, ctx.device) for s in micro.samples]
        packed[how] = len(samples)
        assert sum(x for s in samples for x in s.values["weight"]) == pytest.approx(8 / 12 if how != "mask" else 6 / 9)  # p2 is constant
    assert packed == {"keep": 8, "penalise": 8, "mask": 6}
    example = type("E", (), {"uid": "p0"})
    for how, expected in (("keep", {"reward": 0.5}), ("penalise", {"reward": -0.5, "overlong": -1.0, "unpenalised": 0.5})):
        rollouts = make_rollouts([[0.0, 0.0]], length=8)[:1]
        train.give_rewards(rollouts, {"p0": example}, lambda r, e, finish_reason: {"reward": 0.5}, parse(f"--truncated {how}"))
        assert rollouts[0].rewards == expected


def test_a_group_without_a_right_answer_has_no_signal_however_long_its_answers_are(ctx):
    """Seven wrong answers and one that is wrong and too long: DAPO's filter is for correctness."""
    args = parse("--group-size 8 --algo dapo --overlong-buffer 4")
    rollouts = make_rollouts([[0.0] * 8, [0.0] * 7 + [1.0]], length=3)
    for long in (rollouts[0], rollouts[8]):
        long.token_ids, long.loss_mask = long.token_ids + [7] * 5, [True] * 8
    example = type("E", (), {"uid": "p"})
    given = {id(r): r.rewards["reward"] for r in rollouts}
    scores = iter([given[id(r)] for r in rollouts])
    train.give_rewards(rollouts, dict.fromkeys(("p0", "p1"), example), lambda r, e, finish_reason: {"reward": next(scores)}, args)
    assert rollouts[0].rewards["reward"] == -1 and {r.task_reward for r in rollouts[:8]} == {0.0}
    train.set_advantages(rollouts, args, 0.0)  # the first group is one that was kept for want of others
    assert [r.advantage for r in rollouts[:8]] == [0.0] * 8 and rollouts[8].advantage < 0 < rollouts[15].advantage


@pytest.mark.parametrize("flags", ["--algo grpo --norm-std batch --kl k1 --kl-in reward --kl-coef 0.01",
                                   "--algo reinforce++ --kl-coef 0.01"])
def test_penalties_alone_stay_as_small_as_they_are(flags, ctx):
    """Where all of a step earned the same, dividing by the std of penalties of 1e-6 would make them advantages of 1."""
    rng, largest = random.Random(0), {}
    for rewards in ([[1.0] * 4] * 2, UNEVEN):
        args, rollouts = parse(flags), make_rollouts(rewards)
        for r in rollouts:
            r.columns |= {"old_logp": [rng.gauss(0, 1e-4) for _ in r.response], "ref_logp": [0.0] * len(r.response)}
        train.set_advantages(rollouts, args, args.kl_coef)
        largest[len(rewards)] = max(abs(a) for r in rollouts for a in r.columns["advantage"])
    assert 0 < largest[2] < 1e-4 and largest[3] > 0.5


def test_groups_without_a_signal_do_not_count_in_the_steps_std(ctx):
    args = parse("--algo dapo --norm-std batch --overlong-buffer 4")
    live, dead = [[0.0, 1.0, 1.0, 0.0]], [[0.0, -1.0, 0.0, 0.0]]  # the second differs by a penalty alone
    alone, both = make_rollouts(live), make_rollouts(live + dead)
    for r in both[4:]:
        r.rewards["unpenalised"] = 0.0
    for rollouts in (alone, both):
        train.set_advantages(rollouts, args, 0.0)
    assert [r.advantage for r in both[4:]] == [0.0] * 4
    scale = (sum(r.advantage**2 for r in alone) / 3) ** 0.5, (sum(r.advantage**2 for r in both) / 7) ** 0.5
    assert scale == pytest.approx((1.0, 1.0))


def test_dropout_leaves_the_ratio_and_the_engines_metrics_alone(toys, ctx):
    """One update with adapters and heavy dropout: what is compared with the engine is scored without it, the ratio is 1."""
    processor = load_processor(str(toys["qwen2_5_vl"]))
    made = {}
    for dropout in (0.0, 0.5):
        args = parse(f"--lora-rank 4 --lora-dropout {dropout} --tis-cap 1.05 --tis-mask 0.9,1.1")
        hf = add_lora(load_hf(str(toys["qwen2_5_vl"])), Lora(4, 32.0, dropout))
        for layer in lora_layers(hf).values():
            torch.nn.init.constant_(layer.lora_B, 0.02)
        policy = Policy(hf, processor)
        policy.path = str(toys["qwen2_5_vl"])
        policy.train()
        rollouts = make_rollouts(UNEVEN)
        for r in rollouts:  # an engine that computes just what the trainer does
            micro = grpo.plant([grpo.Sample("x", r.token_ids, [False] * 5 + r.loss_mask, {})], processor.image_token_id)
            with torch.no_grad():
                r.logprobs = policy(micro)[0].tolist()
        torch.manual_seed(0)
        made[dropout], _ = one_update(args, ctx, policy, make_optimizer(policy, 1e-3, 0.0), rollouts)
    assert made[0.5]["policy/grad_norm"] != made[0.0]["policy/grad_norm"]  # there was dropout
    for m in made.values():
        assert m["rollout/max_abs_dlogp"] < 1e-5 and m["rollout/tis_capped"] == m["rollout/tis_masked"] == 0
        assert m["policy/kl_old"] == 0 and m["policy/clipped"] == 0


def test_a_reward_that_is_no_number_names_the_sample(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def score(response, example):\n    return float('nan') if response == 'text 2' else 1.0\n")
    rollouts, examples = make_rollouts([[0.0] * 4]), {"p0": type("E", (), {"uid": "p0"})}
    with pytest.raises(ValueError, match="row 'p0': reward part 'reward' is nan .* for the response 'text 2'"):
        train.give_rewards(rollouts, examples, train.load_reward(f"{file}:score"), parse(""))


def test_dynamic_sampling_takes_the_first_groups_with_a_signal():
    signals = {(0, 0): True, (0, 1): False, (0, 2): False, (1, 0): True, (1, 1): True, (1, 2): True}
    assert train.choose_groups(signals, 3) == [(0, 0), (1, 0), (1, 1)]
    assert train.choose_groups(signals, 5) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert train.sampling_metrics(signals, train.choose_groups(signals, 3)) == {
        "sampling/rounds": 2, "sampling/equal": 2, "sampling/surplus": 1, "sampling/filled": 0}
    assert train.sampling_metrics(signals, train.choose_groups(signals, 5)) == {
        "sampling/rounds": 2, "sampling/equal": 1, "sampling/surplus": 0, "sampling/filled": 1}


def test_presets_are_resolved_when_parsed_and_shown():
    args = parse("--algo dapo --clip-low 0.1")
    assert (args.clip_low, args.clip_high, args.sample_rounds, args.truncated, args.overlong_buffer) == (0.1, 0.28, 10, "penalise", 1)
    shown = train.describe_algorithm(args)
    assert "algorithm dapo: " in shown and "clip-low 0.1 (preset: 0.2)" in shown and "clip-high 0.28," in shown
    ppo = parse("--algo ppo")
    recipe = (ppo.epochs, ppo.clip_low, ppo.clip_high, ppo.value_coef, ppo.entropy_coef, ppo.gamma, ppo.lam)
    assert recipe == (4, 0.2, 0.2, 0.5, 0.01, 0.99, 0.95)
    for algo in grpo.PRESETS:
        train.validate(parse(f"--algo {algo}"), 1)


def test_a_value_head_reads_the_state_before_each_token(toys):
    """Values do not change the policy, and depend on nothing but what comes before the token."""
    args = parse("--algo ppo")
    plain, valued = make_policy(toys["qwen2_5_vl"], parse("")), make_policy(toys["qwen2_5_vl"], args)
    torch.nn.init.normal_(valued.value_head.weight)
    processor = load_processor(valued.path)
    prompt = processor.encode([{"role": "user", "content": "What now?"}], [])
    a, b = (grpo.plant([grpo.Sample("u", prompt + r, [False] * len(prompt) + [True] * 3, {})], processor.image_token_id)
            for r in ([5, 6, 7], [5, 9, 8]))
    logp, entropy = plain(a)
    got = valued(a)
    assert torch.equal(got[0], logp) and torch.equal(got[1], entropy)
    torch.testing.assert_close(got[2][:2], valued(b)[2][:2])
    assert (got[2][2] - valued(b)[2][2]).abs() > 1e-4
    with torch.no_grad():  # against transformers' own forward
        states = valued.hf(torch.tensor([prompt + [5, 6, 7]]), output_hidden_states=True).hidden_states[-1][0, len(prompt) - 1 : -1]
    torch.testing.assert_close(got[2], valued.value_head(states)[:, 0], rtol=1e-4, atol=1e-5)
