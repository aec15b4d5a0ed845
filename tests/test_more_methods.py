"""GMPO, DPPO, Clip-Cov, KL-Cov, OPO, GDPO and PODS against loops that follow the papers' formulas.

pytest tests/test_more_methods.py
"""

import itertools
import math
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from test_update import make_models, make_rollouts, parse, run_update, split_by_rollout

import grpo
import kernels
import train
from algorithms.groups import most_varied
from errors import UserError
from grpo import PolicyLoss, StepInfo
from kernels import fused_policy_loss, linear_logprob
from packing import FlopCosts, Packer, TokenBatch, make_token_batch
from report.metrics import rollout_metrics
from report.samples import sample_records
from rollout import GroupPool, TurnSequence
from train import AlgorithmSettings as Algorithm
from utils import Meter

NAN = math.nan
SEED, STEP = 3, 5


# --- losses -----------------------------------------------------------------------------------------------------------


def evaluate(kind, logp, old, advantages, rollout, **settings):
    """Return the loss of each token and the gradient of their sum, as lists of float64, and the clipped tokens."""
    algo = Algorithm(loss=kind, update_epochs=2, **settings)
    x = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    columns = (torch.tensor(values, dtype=torch.float64) for values in (old, advantages))
    loss_K, indicators = grpo.policy_loss(x, *columns, rollout_K=torch.tensor(rollout), algo=algo)
    loss_K.sum().backward()
    return loss_K.tolist(), x.grad.tolist(), indicators["clipped"].tolist()


def gmpo_by_response(logp, old, advantages, rollout, e):
    """Return losses and gradients of GMPO by equation 4: per response -A exp(mean of the clipped log ratios)."""
    losses, gradients = [0.0] * len(logp), [0.0] * len(logp)
    for response in sorted(set(rollout)):
        tokens = [t for t in range(len(logp)) if rollout[t] == response]
        a = advantages[tokens[0]]
        product, inside = 1.0, []
        for t in tokens:
            ratio = math.exp(logp[t] - old[t])
            clipped = min(max(ratio, math.exp(-e)), math.exp(e))
            chosen = min(ratio, clipped) if a > 0 else max(ratio, clipped)
            product *= chosen
            inside += [t] if chosen == ratio else []
        mean = product ** (1 / len(tokens))
        for t in tokens:
            losses[t] = -a * mean
            # the sum over the response has its loss once per token
            gradients[t] = -a * mean / len(tokens) * len(tokens) if t in inside else 0.0
    return losses, gradients


@pytest.mark.parametrize("shuffled", [False, True])
def test_gmpo_equals_its_geometric_mean(shuffled):
    rng = random.Random(2)
    rollout = [i for i, n in enumerate([1, 7, 4, 9, 2]) for _ in range(n)]
    if shuffled:  # tokens of a response need not be contiguous
        rng.shuffle(rollout)
    old = [rng.uniform(-3, 0) for _ in rollout]
    logp = [x + rng.uniform(-0.9, 0.9) for x in old]
    by_response = [1.5, -0.7, 0.4, -2.0, 1.0]
    advantages = [by_response[i] for i in rollout]
    found = evaluate("gmpo", logp, old, advantages, rollout, clip_low=0.4, clip_high=0.4)
    losses, gradients = gmpo_by_response(logp, old, advantages, rollout, 0.4)
    assert found[0] == pytest.approx(losses, rel=1e-12) and found[1] == pytest.approx(gradients, rel=1e-12)
    outside = [(a > 0 and x - y > 0.4) or (a < 0 and x - y < -0.4)
               for x, y, a in zip(logp, old, advantages, strict=True)]  # fmt: skip
    assert found[2] == outside and 3 <= sum(outside) < len(outside) - 3
    assert [g == 0.0 for g in found[1]] == outside  # exactly 0, and only there
    both = {(a > 0, x > y) for x, y, a, out in zip(logp, old, advantages, outside, strict=True) if out}
    assert both == {(True, True), (False, False)}


def test_gmpo_without_a_change_of_the_policy_is_the_clipped_loss():
    rng = random.Random(0)
    rollout = [0, 0, 0, 1, 2, 2]
    logp, advantages = [rng.uniform(-3, 0) for _ in rollout], [1.0] * 3 + [-2.0] + [0.5] * 2
    assert parse("--algo gmpo").algo.loss_agg == "seq" and parse("--algo gmpo").algo.clip_high == 0.4
    found = [evaluate(kind, logp, logp, advantages, rollout)[:2] for kind in ("gmpo", "clip")]
    assert found[0][0] == found[1][0] and found[0][1] == pytest.approx(found[1][1], rel=1e-14)


@pytest.mark.parametrize("p, old, advantage, weight", [
    (0.30, 0.20, 2.0, 1.5),  # risen by 0.1: kept, with its ratio
    (0.40, 0.20, 2.0, 0.0),  # risen by 0.2 > 0.15
    (0.40, 0.20, -2.0, 2.0),  # the same with the other sign: moved against A, so it is kept
    (0.60, 0.90, -1.0, 0.0),  # fallen by 0.3, though the ratio of 0.67 is moderate
    (0.60, 0.90, 1.0, 0.6 / 0.9),
    (0.80, 0.90, -1.0, 0.8 / 0.9),  # fallen by 0.1
    (0.05, 0.01, 1.0, 5.0),  # a rare token may rise fivefold
    (0.14, 0.001, 1.0, 10.0),  # a ratio of 140, capped
    (0.14, 0.001, -1.0, 10.0),
    (0.001, 0.14, -1.0, 0.001 / 0.14),
    (0.50, 0.50, 1.0, 1.0),
    (0.90, 0.10, 0.0, 1.0),  # no advantage
])  # fmt: skip
def test_dppo_bounds_the_change_of_the_probability(p, old, advantage, weight):
    logp, old_logp = math.log(p), math.log(old)
    [loss], [gradient], [clipped] = evaluate("dppo", [logp], [old_logp], [advantage], [0])
    if advantage:
        weight = weight and min(p / old, 10.0)
    assert loss == pytest.approx(-advantage * weight * logp, rel=1e-12, abs=1e-15)
    assert gradient == pytest.approx(-advantage * weight, rel=1e-12, abs=1e-15)
    assert clipped == (weight == 0.0) and (weight or gradient == 0.0)


def test_dppo_takes_its_bounds_from_the_settings():
    logps = [math.log(0.4)], [math.log(0.2)], [1.0], [0]
    assert evaluate("dppo", *logps, dppo_delta=0.21)[1] == [pytest.approx(-2.0)]
    assert evaluate("dppo", *logps, dppo_delta=0.21, dppo_cap=1.5)[1] == [pytest.approx(-1.5)]
    assert evaluate("dppo", *logps, dppo_delta=0.19)[1] == [0.0]


FUSED = {
    "gmpo": {"clip_low": 0.1, "clip_high": 0.2},
    "dppo": {"dppo_delta": 0.003, "dppo_cap": 1.1},
    "clip": {"kl_cov": 0.1, "kl_cov_coef": 0.7},
}


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("kind", FUSED)
def test_the_fused_head_equals_the_plain_one(kind, kernel, monkeypatch):
    """Blocks of 7 rows, shorter than some responses; values and gradients against float64."""
    if kernel == "triton" and not kernels.is_triton_interpreter():
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setattr(kernels, "CPU_BLOCK_ELEMENTS", 7 * 99)
    g = torch.Generator().manual_seed(0)
    n, lengths = 39, (3, 9, 1, 2, 2, 17, 5)
    hidden, weight = torch.randn(n, 8, generator=g), torch.randn(99, 8, generator=g) / 3
    targets = torch.randint(99, (n,), generator=g)
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp_K = (x @ w.T).log_softmax(1)[torch.arange(n), targets]
    rollout = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    tokens = TokenBatch(rollout, torch.zeros(n), torch.zeros(n), torch.rand(n, generator=g),
                        old_logps=logp_K.detach().float() + 0.3 * torch.randn(n, generator=g),
                        advantages=torch.randn(len(lengths), generator=g)[rollout],
                        chosen=(torch.rand(n, generator=g) < 0.3).float())  # fmt: skip
    loss = PolicyLoss(Algorithm(loss=kind, update_epochs=2, **FUSED[kind]))
    exact = TokenBatch(**{k: v.double() if v.is_floating_point() else v for k, v in tokens.columns().items()})
    want_K, indicators = loss(logp_K, torch.zeros(n, dtype=torch.float64), exact)
    want_K.sum().backward()
    assert 2 < indicators["clipped"].sum() < 37
    y, u = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total, *_ = fused_policy_loss(y, u, targets, loss, tokens, kernel=kernel)
    total.backward()
    assert total.item() == pytest.approx(want_K.sum().item(), rel=1e-5)
    for ours, reference in ((y.grad, x.grad), (u.grad, w.grad)):
        assert (ours - reference).norm() < 1e-5 * reference.norm()
    torch.testing.assert_close(linear_logprob(hidden, weight, targets, kernel="torch")[0].double(), logp_K.detach(),
                               rtol=1e-5, atol=1e-5)  # fmt: skip


# --- Clip-Cov and KL-Cov ----------------------------------------------------------------------------------------------


def make_responses(lengths, first=0):
    """Return rollouts with these numbers of tokens, two per prompt."""
    result = []
    for i, n in enumerate(lengths):
        prompt = SimpleNamespace(uid=f"p{first + i // 2}", images=[])
        result.append(SimpleNamespace(prompt=prompt, sample_index=i % 2, response_mask=[True] * n, images=[],
                                      logprobs=[0.0] * n, turn_rewards=[]))  # fmt: skip
    return result


def make_covariance_batch(rollouts, logps, micros=1, minibatches=1, weights=None):
    """Return a batch of these rollouts whose tokens lie in several micro-batches and minibatches."""
    tokens = make_token_batch(rollouts, weights or [1.0] * len(rollouts))
    tokens.old_logps = torch.tensor(logps, dtype=torch.float32)
    parts = [rows for rows in torch.arange(len(tokens)).tensor_split(minibatches)]
    layout = [[SimpleNamespace(token_index_K=rows[i::micros].flip(0)) for i in range(micros)] for rows in parts]

    def rows(number):
        return torch.cat([micro.token_index_K for micro in layout[number]]).sort().values

    return SimpleNamespace(rollouts=rollouts, tokens=tokens, minibatches=layout, rows=rows)


def covariances(logps, advantages):
    """Return equation 10 for each token, by a loop."""
    logps = np.asarray(logps, dtype=np.float32).astype(np.float64)
    mean_logp, mean_advantage = sum(logps) / len(logps), sum(advantages) / len(advantages)
    return np.array([(x - mean_logp) * (a - mean_advantage) for x, a in zip(logps, advantages, strict=True)])


def on_ranks(calls):
    """Call each function with a `gather` over all of them, in threads as ranks; return their results."""
    barrier, slots, results = threading.Barrier(len(calls)), [None] * len(calls), [None] * len(calls)

    def run(rank, call):
        def gather(item):
            slots[rank] = item
            barrier.wait(timeout=120)
            items = list(slots)
            barrier.wait(timeout=120)
            return items

        results[rank] = call(gather)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def hold_back(flags, batch, advantages, gather=lambda item: [item], step=STEP):
    """Return the advantages after the change, and the column `chosen`, as lists."""
    algo = parse(f"--minibatches 8 --algo-args {flags}").algo
    info = StepInfo(SEED, step, gather)
    found = grpo.change_advantages(torch.tensor(advantages, dtype=torch.float64), batch, algo, info)
    return found.tolist(), batch.tokens.chosen.tolist()


def covariance_case():
    """Return lengths, log-probabilities and advantages of 8 responses: some have a covariance above 1."""
    rng = random.Random(2)
    lengths = [5, 12, 1, 7, 9, 3, 8, 6]
    logps = [-3.5 * rng.random() for _ in range(sum(lengths))]
    by_response = [rng.choice([-2.0, -1.0, 1.0, 2.0]) for _ in lengths]
    advantages = [a for a, n in zip(by_response, lengths, strict=True) for _ in range(n)]
    return lengths, logps, advantages


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5])
def test_kl_cov_takes_the_highest_covariances_of_all_ranks(share):
    lengths, logps, advantages = covariance_case()
    cov = covariances(logps, advantages)
    n = max(1, round(share * len(cov)))
    wanted = np.zeros(len(cov))
    wanted[np.argsort(-cov)[:n]] = 1.0
    flags = f"kl_cov={share}"
    for micros in (1, 4):
        batch = make_covariance_batch(make_responses(lengths), logps, micros)
        changed, chosen = hold_back(flags, batch, advantages)
        assert chosen == wanted.tolist() and changed == advantages
    cut = sum(lengths[:4])
    halves = [(make_responses(lengths[:4]), slice(None, cut)), (make_responses(lengths[4:], 2), slice(cut, None))]
    calls = [lambda gather, rollouts=rollouts, part=part: hold_back(
        flags, make_covariance_batch(rollouts, logps[part]), advantages[part], gather)[1] for rollouts, part in halves]
    assert sum(on_ranks(calls), []) == wanted.tolist()
    empty = [*calls, lambda gather: hold_back(flags, make_covariance_batch([], []), [], gather)[1]]
    assert sum(on_ranks(empty), []) == wanted.tolist()  # a rank without tokens


def test_clip_cov_gives_a_random_share_of_the_high_covariances_no_advantage():
    lengths, logps, advantages = covariance_case()
    cov = covariances(logps, advantages)
    candidates = {t for t in range(len(cov)) if 1.0 <= cov[t] <= 5.0}
    assert 5 < len(candidates) < 40 and (cov > 5).sum() == 0
    n, flags = round(0.06 * len(cov)), "clip_cov=0.06"
    dropped = {}
    for step in range(30):
        changed, chosen = hold_back(flags, make_covariance_batch(make_responses(lengths), logps), advantages, step=step)
        dropped[step] = frozenset(t for t, a in enumerate(changed) if a == 0.0)
        assert len(dropped[step]) == n and dropped[step] <= candidates and not any(chosen)
        assert all(changed[t] == advantages[t] for t in range(len(cov)) if t not in dropped[step])
    assert len(set(dropped.values())) > 10 and frozenset().union(*dropped.values()) == candidates
    again, _ = hold_back(flags, make_covariance_batch(make_responses(lengths), logps, micros=3), advantages, step=4)
    assert {t for t, a in enumerate(again) if a == 0.0} == dropped[4]  # repeatable, whatever the micro-batches
    cut = sum(lengths[:4])
    halves = [(make_responses(lengths[:4]), slice(None, cut)), (make_responses(lengths[4:], 2), slice(cut, None))]
    calls = [lambda gather, rollouts=rollouts, part=part: hold_back(
        flags, make_covariance_batch(rollouts, logps[part]), advantages[part], gather, 4)[0]
        for rollouts, part in halves]  # fmt: skip
    assert sum(on_ranks(calls), []) == again


def test_clip_cov_with_fewer_candidates_than_its_share_takes_them_all():
    lengths, logps, advantages = covariance_case()
    cov = covariances(logps, advantages)
    found, _ = hold_back("clip_cov=0.9 cov_low=2", make_covariance_batch(make_responses(lengths), logps), advantages)
    assert [a == 0.0 for a in found] == [2.0 <= c <= 5.0 for c in cov]
    found, _ = hold_back("clip_cov=0.9 cov_low=50 cov_high=60", make_covariance_batch(make_responses(lengths), logps),
                         advantages)  # fmt: skip
    assert found == advantages
    found, _ = hold_back("clip_cov=0.9 cov_low=0.5 cov_high=0.9",
                         make_covariance_batch(make_responses(lengths), logps), advantages)  # fmt: skip
    assert [a == 0.0 for a in found] == [0.5 <= c <= 0.9 for c in cov]


def test_covariances_are_of_a_minibatch_and_of_tokens_in_the_loss():
    lengths, logps, advantages = covariance_case()
    halves = torch.arange(len(logps)).tensor_split(2)
    batch = make_covariance_batch(make_responses(lengths), logps, 2, minibatches=2)
    _, chosen = hold_back("kl_cov=0.2", batch, advantages)
    for half in halves:
        cov = covariances([logps[t] for t in half], [advantages[t] for t in half])
        best = set(half[np.argsort(-cov)[: round(0.2 * len(cov))].tolist()].tolist())
        assert {t for t in half.tolist() if chosen[t]} == best
    weights = [1.0, 0.0] * 4  # responses outside the loss, which are packed with a critic
    batch = make_covariance_batch(make_responses(lengths), logps, weights=weights)
    _, chosen = hold_back("kl_cov=0.2", batch, advantages)
    inside = [t for t, i in enumerate(batch.tokens.rollout.tolist()) if weights[i]]
    cov = covariances([logps[t] for t in inside], [advantages[t] for t in inside])
    best = {inside[k] for k in np.argsort(-cov)[: round(0.2 * len(cov))]}
    assert {t for t in range(len(logps)) if chosen[t]} == best


def test_kl_covs_penalty_is_the_absolute_log_ratio_of_the_chosen_tokens():
    algo = parse("--minibatches 2 --algo-args kl_cov=0.5 kl_cov_coef=0.3").algo
    logp = torch.tensor([-1.0, -2.0, -1.0, -1.5], dtype=torch.float64, requires_grad=True)
    old, chosen = [-1.5, -1.5, -1.5, -1.5], [1.0, 1.0, 0.0, 1.0]
    tokens = SimpleNamespace(old_logps=torch.tensor(old, dtype=torch.float64), chosen=torch.tensor(chosen))
    [method] = algo.methods
    loss_K = method.token_loss(logp, tokens, algo)
    loss_K.sum().backward()
    wanted = [0.3 * c * abs(x - y) for x, y, c in zip(logp.tolist(), old, chosen, strict=True)]
    assert loss_K.tolist() == pytest.approx(wanted, rel=1e-6)
    assert logp.grad.tolist() == [pytest.approx(0.3, rel=1e-6), pytest.approx(-0.3, rel=1e-6), 0.0, 0.0]


# --- OPO, GDPO --------------------------------------------------------------------------------------------------------


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


def opo_by_loops(rollouts, size):
    """Return OPO's advantages, by equation 8, of responses with a reward in groups where rewards differ."""
    wanted = {}
    for start in range(0, len(rollouts), size):
        group = rollouts[start : start + size]
        graded = [r for r in group if r.rewards]
        weighted, tokens = 0.0, 0
        for r in graded:
            weighted += len(r.response) * r.rewards["reward"]
            tokens += len(r.response)
        equal = len({r.rewards["reward"] for r in graded}) < 2
        for r in group:
            skipped = equal or not r.rewards
            wanted[r.prompt.uid, r.sample_index] = 0.0 if skipped else r.rewards["reward"] - weighted / tokens
    return wanted


def test_opo_weights_the_baseline_with_lengths(ctx):
    cfg = parse("--algo opo")
    rewards = [[0.0, 1.0, 0.5, 0.0], [0.1] * 4, [1.0, 1.0, 0.0, 1.0], [0.3, 0.7, 0.2, 0.9]]
    rollouts = make_rollouts(rewards)
    named = [r.rewards for r in rollouts]
    named[9] = named[12] = {}  # failed
    found, batch, _ = response_advantages(cfg, ctx, set_rewards(rollouts, named))
    wanted = opo_by_loops(rollouts, 4)
    assert found == {key: pytest.approx(value, rel=1e-6) for key, value in wanted.items()}
    assert all(found["p1", i] == 0.0 for i in range(4)) and found["p2", 1] == 0.0 == found["p3", 0]
    assert found["p2", 2] < 0 < found["p2", 0] and not any(key[0] == "p1" for key in packed(batch))


def test_opo_trains_a_response_whose_reward_is_the_groups_mean(ctx):
    """Its advantage under the plain mean is 0, but not under the mean weighted with lengths."""
    rollouts = make_rollouts([[0.0, 0.5, 1.0, 0.5]])
    for r, n in zip(rollouts, (1, 2, 7, 3), strict=True):
        r.response, r.response_mask, r.logprobs = r.response[:1] * n, [True] * n, [-6.0] * n
    found, batch, _ = response_advantages(parse("--algo opo"), ctx, rollouts)
    assert found["p0", 1] == pytest.approx(0.5 - (1.0 + 7.0 + 1.5) / 13)
    assert packed(batch) == {("p0", i) for i in range(4)}


def test_opo_with_dynamic_sampling_ignores_groups_that_differ_in_length_penalties_only(ctx):
    cfg = parse("--algo opo --max-gen-batches 2")
    rewards = [{"reward": 1.0 - 0.1 * i, "unpenalised": 1.0} for i in range(4)]
    found, *_ = response_advantages(cfg, ctx, set_rewards(make_rollouts([[0.0] * 4]), rewards))
    assert set(found.values()) == {0.0}
    found, *_ = response_advantages(parse("--algo opo"), ctx, set_rewards(make_rollouts([[0.0] * 4]), rewards))
    assert 0.0 not in found.values()


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


def test_gdpo_compares_what_there_is(ctx):
    """A response without a named reward is not compared by it; one without any is not compared at all."""
    groups = [[dict(row) for row in group] for group in PARTS]
    groups[0][1], groups[1][3] = {}, {}
    del groups[3][2]["format"], groups[3][0]["accuracy"]
    found, batch = gdpo("", ctx, groups)
    wanted = gdpo_by_loops(groups, {"accuracy": 1.0, "format": 0.2})
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-9)
    assert found[1] == found[7] == 0.0 and ("p0", 1) not in packed(batch)
    with pytest.raises(UserError, match="accuracy=1,fromat=1: no response has the reward fromat; correct the name"):
        gdpo("", ctx, PARTS, "accuracy=1,fromat=1")


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


@pytest.mark.parametrize("seed", range(12))
def test_pods_finds_the_subset_with_the_largest_variance(seed):
    rng = random.Random(seed)
    n = rng.randint(2, 8)
    kinds = ([0.0, 1.0], [0.0, 0.5, 1.0], [rng.gauss(0, 1) for _ in range(8)], [-3.0, 0.0, 0.1, 0.2])
    for values in kinds:
        rewards = [rng.choice(values) for _ in range(n)]
        for m in range(1, n + 1):
            chosen = most_varied(rewards, m)
            assert len(set(chosen)) == m and chosen == sorted(chosen) and set(chosen) <= set(range(n))
            best = max(np.var([rewards[i] for i in subset]) for subset in itertools.combinations(range(n), m))
            assert np.var([rewards[i] for i in chosen]) == pytest.approx(best, rel=1e-12, abs=1e-12)
            assert chosen == most_varied(rewards, m)
    assert sum(i < 20 for i in most_varied([0.0] * 20 + [1.0] * 12, 8)) == 4  # as many right as wrong ones


def test_pods_draws_among_equal_rewards():
    """So it does not prefer the last samples of a group, which NoisyRollout samples from noised images."""
    counts = np.bincount(sum((most_varied([1, 1, 0, 0, 1, 1, 0, 0], 4, f"s{i}") for i in range(400)), []))
    assert stats.chisquare(counts).pvalue > 1e-3 and sum(counts) == 1600


PODS_REWARDS = [[0.0, 1.0, 0.5, 0.4, 0.6, 0.5, 0.45, 0.55], [0.0] * 7 + [1.0], [1.0] * 8]


def test_pods_trains_on_the_most_varied_and_measures_all(ctx, monkeypatch):
    cfg = parse("--group-size 8 --algo-args train_samples=4")
    rollouts = make_rollouts(PODS_REWARDS)
    found, batch, pool = response_advantages(cfg, ctx, rollouts)
    chosen = {(f"p{p}", i) for p in range(3) for i in most_varied(PODS_REWARDS[p], 4, rollouts[8 * p].text + f"p{p}")}
    equal = {key for key in chosen if key[0] == "p2"}  # rewards without variance: not packed
    chosen -= equal
    assert len(equal) == 4 and {("p0", 0), ("p0", 1), ("p1", 7)} <= chosen and packed(batch) == chosen
    for p in range(2):
        own = [key for key in found if key in chosen and key[0] == f"p{p}"]
        rewards = torch.tensor([[PODS_REWARDS[p][i] for _, i in own]], dtype=torch.float64)
        wanted = grpo.group_advantages(rewards)[0].tolist()
        assert [found[key] for key in own] == pytest.approx(wanted, rel=1e-6)
    assert all(value == 0.0 for key, value in found.items() if key not in chosen)
    weights = [part[0].item() for part in split_by_rollout(batch, batch.tokens.weights)]
    tokens = sum(len(r.response) for r in batch.rollouts if r.rewards)
    assert weights == [pytest.approx(1 / tokens) if r.rewards else 0.0 for r in batch.rollouts]
    assert [len([r for r in batch.rollouts if r.prompt.uid == f"p{p}" and r.rewards]) for p in range(3)] == [4, 4, 4]
    m = rollout_metrics(pool, {})
    assert m["rollout/responses"] == 24 and m["reward/mean"] == pytest.approx(np.mean(PODS_REWARDS))
    assert m["response/tokens"] == pytest.approx(np.mean([len(r.response) for r in rollouts]))
    assert pool.mean_accuracy["p1"] == 0.125 and list(pool.has_signal.values()) == [True, True, False]
    assert all(r.rewards and r.finish_reason in ("stop", "length") for r in rollouts)  # they are copied, not changed
    for r in rollouts:
        r.prompt.example.ground_truth = ""
        r.prompt.example.images = r.prompt.example.videos = []
    monkeypatch.setattr("report.samples.example_fields", lambda example: {"uid": example.uid})
    monkeypatch.setattr(type(rollouts[0].prompt), "initial_example", property(lambda prompt: prompt.example))
    shown = [len(record["samples"]) for record in sample_records(batch)]
    assert shown == [4, 4, 4] and all(s["rewards"] for record in sample_records(batch) for s in record["samples"])


def test_pods_with_all_samples_changes_nothing(ctx):
    results = []
    for flags in ("", "--algo-args train_samples=8"):
        cfg = parse(f"--group-size 8 {flags}")
        found, batch, _ = response_advantages(cfg, ctx, make_rollouts(PODS_REWARDS))
        results.append((found, packed(batch), batch.tokens.weights.tolist()))
    assert results[0] == results[1]


def test_pods_leaves_failed_rewards_out(ctx):
    cfg = parse("--group-size 8 --algo-args train_samples=4")
    rollouts = make_rollouts(PODS_REWARDS)
    named = [r.rewards for r in rollouts]
    named[0] = {}  # the lowest reward of p0
    named[8:13] = [{}] * 5  # fewer than 4 are left of p1
    named[16:24] = [{}] * 8  # none of p2
    found, batch, _ = response_advantages(cfg, ctx, set_rewards(rollouts, named))
    p0 = {("p0", 1 + i) for i in most_varied(PODS_REWARDS[0][1:], 4)}
    assert packed(batch) == p0 | {("p1", 5), ("p1", 6), ("p1", 7)}
    assert found["p1", 7] == pytest.approx(2 / 3 / math.sqrt(1 / 3), rel=1e-5)
    assert all(found["p2", i] == 0.0 for i in range(8))


# --- whole steps ------------------------------------------------------------------------------------------------------

TWO = [[0.0, 1.0, 0.5, 0.0], [1.0, 1.0, 0.0, 0.0], [0.3, 0.3, 0.3, 0.3], [0.0, 0.2, 1.0, 0.9]]
STEPS = {
    "gmpo": "--algo gmpo --minibatches 2 --update-epochs 2",
    "dppo": "--algo dppo --minibatches 2",
    "dppo, engine": "--algo dppo --algo-args old_policy=rollout",
    "clip_cov": "--algo clip_cov --minibatches 2 --algo-args clip_cov=0.2 cov_low=0.01",
    "kl_cov": "--algo kl_cov --minibatches 2 --algo-args kl_cov=0.3",
    "clip_cov, 8": "--algo clip_cov",
    "kl_cov, 8": "--algo kl_cov",
    "opo": "--algo opo",
    "gdpo": "--algo-args reward_weights=reward=1,brevity=0.5",
    "pods": "--algo-args train_samples=2",
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
    (whole, batch, one), (_, parts, other) = results
    assert sum(map(len, parts.minibatches)) > sum(map(len, batch.minibatches)) or ", 8" in name  # one group each
    torch.testing.assert_close(batch.tokens.advantages, parts.tokens.advantages)
    difference = sum(float((one[n] - other[n]).norm() ** 2) for n in one) ** 0.5
    assert difference < 1e-4 * sum(float(x.norm() ** 2) for x in one.values()) ** 0.5
    if name == "kl_cov":
        assert 0 < batch.tokens.chosen.sum() < len(batch.tokens)
    if name == "clip_cov":
        assert 0 < (batch.tokens.advantages[batch.tokens.weights > 0] == 0).sum()
    if name == "pods":
        assert whole["update/tokens"] < sum(len(r.response) for r in batch.rollouts)


def test_gmpo_of_a_response_in_several_micro_batches_equals_the_whole(toys, ctx):
    """Turns that are sequences of their own may be in different micro-batches; the loss couples their tokens."""
    gradients, splits = [], []
    for micro_tokens in (1000, 14):
        cfg = parse(f"--algo gmpo --clip-low 0.02 --clip-high 0.02 --update-epochs 2 --micro-tokens {micro_tokens}")
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
    ("--algo kl_cov --minibatches 1", "kl_cov=0.002 has no effect with one optimizer step per training step"),
    ("--algo clip_cov --algo-args old_policy=rollout", "use old_policy=trainer"),
    ("--algo clip_cov --loss gmpo", "clip_cov=0.0002: --loss gmpo couples the tokens of a response"),
    ("--algo-args clip_cov=1.5", "clip_cov"),
    ("--algo-args kl_cov=-1", "kl_cov"),
    ("--algo-args kl_cov_coef=0", "kl_cov_coef"),
    ("--algo-args dppo_delta=0", "dppo_delta"),
    ("--algo-args dppo_cap=1", "dppo_cap"),
    ("--algo gmpo --algo-args dual_clip=3", "dual_clip=3.0 has no effect on --loss gmpo"),
    ("--algo dppo --algo-args dual_clip=3", "dual_clip=3.0 has no effect on --loss dppo"),
    ("--algo gmpo --adv gae", "--loss gmpo couples the tokens of a response, but --adv gae"),
    ("--algo clip_cov --algo-args cov_low=5 cov_high=1", "cov_low=5.0 cov_high=1.0: no covariance is between them"),
    ("--algo-args reward_weights=accuracy=1,accuracy=2", "a name is missing or repeated"),
    ("--algo-args reward_weights==1", "a name is missing or repeated"),
    ("--algo-args reward_weights=a=1,b", "a name is missing or repeated"),
    ("--algo-args reward_weights=a=nan", "a weight is 0 or not finite"),
    ("--algo-args reward_weights=a=0", "a weight is 0 or not finite"),
    ("--algo-args train_samples=5", "train_samples=5 is more than --group-size 4; lower it"),
    ("--algo-args train_samples=1", "train_samples"),
    ("--algo-args reward_weights=accuracy", "reward_weights=accuracy: give NAME=WEIGHT,NAME=WEIGHT"),
    ("--algo-args reward_weights=a=1,b=x", "reward_weights=a=1,b=x: give NAME=WEIGHT"),
    ("--algo-args reward_weights=a=1 --max-gen-batches 2", "--max-gen-batches 1 and --truncated keep or mask"),
    ("--algo-args reward_weights=a=1 --truncated penalise", "--max-gen-batches 1 and --truncated keep or mask"),
    ("--algo-args reward_weights=a=1 --adv rloo", "reward_weights replaces the advantages of --adv grpo"),
    ("--algo-args reward_weights=a=1 norm_std=none", "use that, without norm_std and kl_in=reward"),
    ("--algo-args length_baseline=true", "length_baseline replaces the advantages of --adv dr_grpo; use that"),
    ("--algo opo --kl-coef 0.1 --algo-args kl_in=reward", "without norm_std and kl_in=reward"),
])  # fmt: skip
def test_settings_without_sense_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        parse(flags).algo.check()
