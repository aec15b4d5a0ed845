"""GDPO against loops that follow the paper's formulas, and whole steps with it.   pytest tests/test_gdpo.py"""

import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_update import make_models, make_rollouts, parse, run_update, split_by_rollout

import grpo
import train
from errors import UserError
from grpo import StepInfo
from packing import FlopCosts, Packer
from rollout import GroupPool, TurnSequence
from utils import Meter

SEED, STEP = 3, 5


def on_ranks(calls):
    """Call each function with a `gather` over all of them, in threads as ranks; return their results."""
    barrier, slots, results = threading.Barrier(len(calls)), [None] * len(calls), [None] * len(calls)

    def run(rank, call):
        def gather(item):
            slots[rank] = item
            barrier.wait(timeout=20)
            items = list(slots)
            barrier.wait(timeout=20)
            return items

        results[rank] = call(gather)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def set_rewards(rollouts, rewards):
    """Replace the rewards of rollouts by dicts; an empty one is a reward that failed."""
    for r, named in zip(rollouts, rewards, strict=True):
        r.rewards = dict(named)
        r.finish_reason = r.finish_reason if named else "error"
    return rollouts


def response_advantages(cfg, ctx, rollouts):
    """Return the advantage of each response after phases 3 and 5, and the batch."""
    meter, groups = Meter(), len(rollouts) // cfg.algo.group_size
    pool = GroupPool(replace(cfg.algo, truncated="keep"), replace(cfg.rollout, prompts_per_step=groups), 0, ctx)
    for r in rollouts:
        r.prompt.example.extra = {}
    pool.add(rollouts, [r.rewards or None for r in rollouts])
    packer = Packer(1000, -1, FlopCosts(1.0, 0.1, 1.0, 1.0, 0.0, 0.0, 0))
    batch = train.pack_batch(pool, cfg, packer, ctx, meter)
    train.set_advantages(batch, cfg.algo, 0.0, ctx, meter, SEED, STEP)
    parts = split_by_rollout(batch, batch.tokens.advantages)
    assert all(part.min() == part.max() for part in parts)  # the same for all tokens of a response
    return {(r.prompt.uid, r.sample_index): part[0].item()
            for r, part in zip(batch.rollouts, parts, strict=True)}, batch, pool  # fmt: skip


def packed(batch):
    """Return the keys of the responses that are trained on."""
    rows = torch.cat([batch.rows(number) for number in range(len(batch.minibatches))])
    rollouts = [batch.rollouts[i] for i in batch.tokens.rollout[rows].unique().tolist()]
    return {(r.prompt.uid, r.sample_index) for r in rollouts}


def gdpo_by_loops(groups, weights):
    """Return GDPO's advantages, by equations 4 to 7: rewards are dicts per response, in groups."""
    sums = []
    for group in groups:
        sums.append([0.0] * len(group))
        for name, weight in weights.items():
            members = [i for i, named in enumerate(group) if name in named]
            values = [group[i][name] for i in members]
            if len(set(values)) < 2:
                continue
            mean = sum(values) / len(values)
            std = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
            for i, x in zip(members, values, strict=True):
                sums[-1][i] += weight * (x - mean) / (std + 1e-6)
    compared = [x for group, row in zip(groups, sums, strict=True) for named, x in zip(group, row, strict=True)
                if set(named) & set(weights)]  # fmt: skip
    mean = sum(compared) / len(compared)
    std = math.sqrt(sum((x - mean) ** 2 for x in compared) / (len(compared) - 1))
    return [x / (std + 1e-6) for row in sums for x in row]


def gdpo(flags, ctx, groups, weights="accuracy=1,format=0.2"):
    """Return the advantages in order, and the batch, of groups of named rewards, whose total is their sum."""
    cfg = parse(f"--algo-args reward_weights={weights} {flags}")
    named = [{"reward": sum(row.values()), **row} if row else {} for group in groups for row in group]
    rollouts = set_rewards(make_rollouts([[0.0] * len(group) for group in groups]), named)
    found, batch, _ = response_advantages(cfg, ctx, rollouts)
    return [found[r.prompt.uid, r.sample_index] for r in rollouts], batch


def named(accuracy, form):
    return [{"accuracy": float(a), "format": float(f)} for a, f in zip(accuracy, form, strict=True)]


PARTS = [named([1, 0, 0, 1], [1, 1, 0, 1]), named([0, 0, 0, 0], [1, 1, 1, 0]), named([1, 1, 1, 1], [1, 1, 1, 1]),
         named([0.3, 0.1, 0.9, 0.9], [0, 1, 1, 0])]  # fmt: skip


def test_gdpo_normalises_each_reward_on_its_own(ctx):
    weights = {"accuracy": 1.0, "format": 0.2}
    found, _ = gdpo("", ctx, PARTS)
    assert found == pytest.approx(gdpo_by_loops(PARTS, weights), rel=1e-5, abs=1e-9)
    assert found[8:12] == [0.0] * 4
    scaled = [[{"accuracy": 10 * row["accuracy"], "format": 0.1 * row["format"]} for row in group] for group in PARTS]
    assert gdpo("", ctx, scaled)[0] == pytest.approx(found, rel=1e-4, abs=1e-9)  # 1e-6 is added to each std


def test_gdpo_compares_what_there_is(ctx, capsys):
    """A response without a named reward is not compared by it, and the step says so; one without any is not compared
    at all."""
    groups = [[dict(row) for row in group] for group in PARTS]
    groups[0][1], groups[1][3] = {}, {}
    del groups[3][2]["format"], groups[3][0]["accuracy"]
    found, batch = gdpo("", ctx, groups)
    wanted = gdpo_by_loops(groups, {"accuracy": 1.0, "format": 0.2})
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-9)
    assert found[1] == found[7] == 0.0 and ("p0", 1) not in packed(batch)
    out = capsys.readouterr().out
    assert ", 1 responses have no reward 'format', the first one of row 'p3'" in out and "'accuracy'" in out
    found, _ = gdpo("", ctx, PARTS, "accuracy=1,fromat=1")
    assert found == pytest.approx(gdpo("", ctx, PARTS, "accuracy=1")[0])
    assert ", 16 responses have no reward 'fromat', the first one of row 'p0'" in capsys.readouterr().out
    assert set(gdpo("", ctx, PARTS, "fromat=1")[0]) == {0.0}  # nothing to compare: no gradient


def test_gdpo_with_one_reward_is_grpo_scaled_over_the_step(ctx):
    found, _ = gdpo("", ctx, PARTS, "accuracy=3")
    rewards_PG = torch.tensor([[row["accuracy"] for row in group] for group in PARTS], dtype=torch.float64)
    one = grpo.group_advantages(rewards_PG)
    assert found == pytest.approx((one / one.std()).flatten().tolist(), rel=1e-5, abs=1e-9)


def test_gdpo_trains_a_group_with_equal_totals_of_different_parts(ctx):
    groups = [named([1, 0, 1, 0], [0, 1, 0, 1]), named([1, 0, 0, 0], [0, 0, 1, 0])]
    found, batch = gdpo("", ctx, groups)
    assert all(found[i] != 0.0 for i in range(4)) and {("p0", i) for i in range(4)} <= packed(batch)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_gdpo_scales_over_all_ranks(split, ctx):
    whole, _ = gdpo("", ctx, PARTS)
    algo = parse("--algo-args reward_weights=accuracy=1,format=0.2").algo

    def rank(groups):
        rollouts = set_rewards(make_rollouts([[0.0] * 4] * len(groups)), [row for group in groups for row in group])
        index = torch.arange(len(rollouts))  # one token each
        batch = SimpleNamespace(rollouts=rollouts, tokens=SimpleNamespace(rollout=index))
        return lambda gather: grpo.change_advantages(torch.zeros(len(rollouts)), batch, algo,
                                                     StepInfo(SEED, STEP, gather)).tolist()  # fmt: skip

    assert sum(on_ranks([rank(PARTS[:split]), rank(PARTS[split:])]), []) == pytest.approx(whole, rel=1e-6, abs=1e-9)


# --- PODS -------------------------------------------------------------------------------------------------------------


# --- whole steps ------------------------------------------------------------------------------------------------------

TWO = [[0.0, 1.0, 0.5, 0.0], [1.0, 1.0, 0.0, 0.0], [0.3, 0.3, 0.3, 0.3], [0.0, 0.2, 1.0, 0.9]]
STEPS = {
    "gdpo": "--algo-args reward_weights=reward=1,brevity=0.5",
    "entropy": "--algo-args token_score=entropy token_scope=step token_share=0.2",
}


def step_rollouts():
    rollouts = make_rollouts(TWO)
    for r in rollouts:
        r.rewards["brevity"] = -float(len(r.response))
    return rollouts


@pytest.mark.parametrize("name", STEPS)
def test_each_preset_runs_a_step_that_does_not_depend_on_the_packing(name, toys, ctx):
    results = []
    for micro_tokens in (1000, 30):
        cfg = parse(f"{STEPS[name]} --lr 1e-4 --micro-tokens {micro_tokens}")
        cfg.algo.check()
        models = make_models(toys["qwen2_5_vl"], cfg)
        before = {n: p.detach().clone() for n, p in models.policy.named_parameters()}
        models.optimizer = torch.optim.SGD([{"params": models.policy.parameters()}], lr=0.1)
        m, batch = run_update(cfg, ctx, models, step_rollouts())
        changes = {n: p.detach() - before[n] for n, p in models.policy.named_parameters()}
        results.append((m, batch, changes))
        assert m["policy/grad_norm"] > 0 and m["update/skipped"] == 0 and math.isfinite(m["loss/policy"])
    (_, batch, one), (_, parts, other) = results
    assert sum(map(len, parts.minibatches)) > sum(map(len, batch.minibatches))
    torch.testing.assert_close(batch.tokens.advantages, parts.tokens.advantages)
    difference = sum(float((one[n] - other[n]).norm() ** 2) for n in one) ** 0.5
    assert difference < 1e-4 * sum(float(x.norm() ** 2) for x in one.values()) ** 0.5


def test_gspo_of_a_response_in_several_micro_batches_equals_the_whole(toys, ctx):
    """Turns that are sequences of their own may be in different micro-batches; the loss couples their tokens."""
    gradients, splits = [], []
    for micro_tokens in (1000, 14):
        cfg = parse(f"--algo gspo --clip-low 0.02 --clip-high 0.02 --update-epochs 2 --micro-tokens {micro_tokens}")
        rollouts = make_rollouts([[0.0, 1.0, 0.5, 0.0], [1.0, 0.0, 0.0, 1.0]], length=6)
        for r in rollouts:
            prompt, response = r.prompt.token_ids, r.response
            r.separate_turns = [TurnSequence([*prompt, *response[:3]], 3, 0),
                                TurnSequence([*prompt[:3], *response[3:]], 3, 0)]  # fmt: skip
        models = make_models(toys["qwen2_5_vl"], cfg)
        models.optimizer = torch.optim.SGD([{"params": models.policy.parameters()}], lr=0.05)
        m, batch = run_update(cfg, ctx, models, rollouts)
        assert 0.1 < m["policy/clip_frac"] < 0.5
        splits.append(batch.splits_rollouts(0))
        gradients.append({n: p.grad.clone() for n, p in models.policy.named_parameters() if p.grad is not None})
    assert splits == [False, True]
    norm = sum(float(g.norm() ** 2) for g in gradients[0].values()) ** 0.5
    difference = sum(float((g - gradients[1][n]).norm() ** 2) for n, g in gradients[0].items()) ** 0.5
    assert norm > 1e-3 and difference < 1e-3 * norm


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, message", [
    ("--algo-args reward_weights=accuracy=1,accuracy=2", "a name is missing or repeated"),
    ("--algo-args reward_weights==1", "a name is missing or repeated"),
    ("--algo-args reward_weights=a=1,b", "a name is missing or repeated"),
    ("--algo-args reward_weights=a=nan", "a weight is 0 or not finite"),
    ("--algo-args reward_weights=a=0", "a weight is 0 or not finite"),
    ("--algo-args reward_weights=accuracy", "reward_weights=accuracy: give NAME=WEIGHT,NAME=WEIGHT"),
    ("--algo-args reward_weights=a=1,b=x", "reward_weights=a=1,b=x: give NAME=WEIGHT"),
    ("--algo-args reward_weights=a=1 --max-gen-batches 2", "--max-gen-batches 1 and --truncated keep or mask"),
    ("--algo-args reward_weights=a=1 --truncated penalise", "--max-gen-batches 1 and --truncated keep or mask"),
    ("--algo-args reward_weights=a=1 --adv rloo", "reward_weights replaces the advantages of --adv grpo"),
    ("--algo-args reward_weights=a=1 norm_std=none", "use --adv grpo, without norm_std and kl_in=reward"),
])  # fmt: skip
def test_settings_without_sense_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        parse(flags).algo.check()
