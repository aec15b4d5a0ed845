"""Metrics of a training step; docs/metrics.md explains each of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch

import grpo
from layers.attention import padded_length
from packing import FlopCosts, MicroBatch, TokenBatch, rollouts_flops
from reward import task_name
from rollout import EPISODE_END_REASONS, GroupPool, Rollout
from utils import DistContext, Meter

GRADER_STATS = ("unreadable", "refused", "cas_timeout", "cas_budget")
FAILURE_COUNTERS = ("reward/errors", "reward/timeouts")


def rollout_metrics(pool: GroupPool, counts: Mapping[str, float]) -> dict[str, float]:
    """Return means of rewards, lengths and the fraction of groups without a signal, over all processes and batches, and
    sums of a Grader's counts."""
    meter = Meter()
    for group in pool.groups.values():
        meter.add_mean("reward/zero_std_frac", len({r.reward for r in group if r.rewards}) <= 1)
    for r in chain.from_iterable(pool.groups.values()):
        n_tokens = sum(r.response_mask)
        meter.sum("rollout/responses", 1)
        meter.add_mean("response/tokens", n_tokens)
        meter.add_mean("response/truncated", r.finish_reason == "length")
        if r.rewards and r.prompt.n_noised:
            meter.add_mean(f"noisy/accuracy_{'noised' if r.noised else 'own'}", r.accuracy)
        meter.sum("rollout/tokens", n_tokens)
        meter.sum("rollout/prompt_tokens", len(r.prompt.token_ids))
        add_episode_metrics(r, meter)
        example = r.prompt.example
        task, answer_type = task_name(example.data_source), example.extra.get("answer_type")
        if not r.rewards:  # the reward failed
            continue
        for name, value in r.rewards.items():  # tasks have different rewards: a mean is over the samples that have it
            meter.add_mean(f"reward/{name}", value)
            meter.add_mean(f"reward/{task}/{name}", value)
        if answer_type is not None:
            meter.add_mean(f"accuracy/{task}/type={answer_type}", r.accuracy)
        meter.add_mean(f"accuracy/images={len(r.prompt.images) + len(r.images)}", r.accuracy)
    for reason in GRADER_STATS:  # reasons why answers count as wrong without a comparison
        meter.sum(f"grader/{reason}", counts.get(reason, 0))
    for name in {*FAILURE_COUNTERS, *(name for name in counts if "/" in name)}:
        meter.sum(name, counts.get(name, 0))
    metrics = meter.reduce(replace(pool.ctx, tp=1))  # even in a tensor-parallel group each process samples for itself
    if "reward/reward" in metrics:  # it is missing if all rewards failed
        metrics["reward/mean"] = metrics.pop("reward/reward")
    return metrics | (sampling_metrics(pool) if pool.algo.max_gen_batches > 1 else {})


def add_episode_metrics(r: Rollout, meter: Meter) -> None:
    """Add the metrics of a rollout if it is an episode."""
    if not r.is_episode:
        return
    for reason in EPISODE_END_REASONS:
        meter.add_mean(f"episode/ended_by/{reason}", r.ended_by == reason)
    meter.sum("episode/errors", r.env_failure == "errors")
    meter.sum("episode/timeouts", r.env_failure == "timeouts")
    if r.ended_by == "error":
        return
    meter.add_mean("episode/turns", r.n_turns)
    meter.add_mean("episode/images", len(r.images))
    meter.add_mean("episode/observed_tokens", len(r.response) - sum(r.response_mask))
    meter.sum("episode/separate_turns", len(r.separate_turns))


def sampling_metrics(pool: GroupPool) -> dict[str, float]:
    """Return the number of batches drawn (`batches`), of groups left out because their rewards are equal or because
    enough others were found, and of groups with equal rewards that are kept because too few others were found."""
    chosen = pool.select_groups()
    filled = sum(not pool.has_signal[key] for key in chosen)
    equal = sum(not signal for signal in pool.has_signal.values())
    surplus = len(pool.has_signal) - equal - (len(chosen) - filled)
    counts = {"batches": pool.batches_used, "equal": equal - filled, "surplus": surplus, "filled": filled}
    return {f"sampling/{name}": float(n) for name, n in counts.items()}


def update_flops(rollouts: Sequence[Rollout], costs: FlopCosts, frozen: bool) -> float:
    """Return the FLOPs of one pass over the rollouts: one forward and a backward of twice its cost, each prompt counted
    once. With `frozen` weights (LoRA) the products for their gradients are left out. Recomputation and padding are not
    counted."""
    groups: dict[str, list[Rollout]] = {}
    for r in rollouts:
        groups.setdefault(r.prompt.uid, []).append(r)
    factor = 2 / 3 if frozen else 1.0
    costs = costs._replace(token=factor * costs.token, trained_token=factor * costs.trained_token)
    return 3 * sum(rollouts_flops(group, costs) for group in groups.values() if any(map(has_trained_tokens, group)))


def add_useful_tokens(micros: Iterable[MicroBatch], attention: str, meter: Meter) -> None:
    """Add the share of the tokens that the update computes that belong to prompts and responses. The others pad
    --attn flex to whole blocks, or are micro-batches of one token, for ranks that have less to train."""
    for micro in micros:
        computed = padded_length(micro.n_tokens) if attention == "flex" else micro.n_tokens
        meter.add_mean("update/useful_tokens", micro.n_tokens * (len(micro.target_K) > 0), computed)


def add_expert_metrics(micros: Iterable[MicroBatch], meter: Meter) -> None:
    """Add how often the trainer would not have chosen the replayed experts, and how often it cannot replay them."""
    for micro in micros:
        if micro.experts_T is not None:
            without = int((micro.experts_T[:, 0, 0] < 0).sum())
            n_replayed = len(micro.differing) * (micro.n_tokens - without)  # over layers and passes
            meter.add_mean("mismatch/experts", sum(micro.differing) * micro.n_tokens, n_replayed)
            micro.differing.clear()  # later passes add to it
            meter.add_mean("mismatch/tokens_without_experts", without, micro.n_tokens)
            meter.add_mean("mismatch/tokens_with_other_experts", micro.n_other_experts, micro.n_tokens)


def has_trained_tokens(r: Rollout) -> bool:
    """Return whether the policy sampled any token of the rollout."""
    return any(r.response_mask)


def add_value_metrics(tokens: TokenBatch, ctx: DistContext, meter: Meter) -> None:
    """Add the mean of the critic's values before the update, and the fraction of the returns' variance that they
    explain; collective."""
    returns_N = tokens.returns.double()
    values_N = tokens.values.double()
    std, error = ctx.mean_and_std(returns_N)[1], ctx.mean_and_std(returns_N - values_N)[1]
    mean = ctx.mean_and_std(values_N)[0]
    if ctx.sum({"n": float(len(values_N))})["n"]:
        meter.set_replicated("value/mean", mean)
    if std > 0:
        meter.set_replicated("value/explained_variance", 1 - (error / std) ** 2)


@torch.no_grad()
def add_token_metrics(tokens: TokenBatch, loss: grpo.PolicyLoss, meter: Meter, first_pass: bool) -> None:
    """Add metrics of a minibatch's trained tokens (weight above 0). `tokens` holds whole rollouts, because the loss may
    couple the tokens of a rollout."""
    algo, tokens = loss.algo, tokens[tokens.weights > 0]
    indicators = loss(tokens.logps, tokens.entropies, tokens)[1]
    means = {"policy/entropy": tokens.entropies}
    means |= {"policy/clip_frac": indicators["clipped"], "policy/approx_kl": indicators["kl"]}
    if algo.needs_reference:
        means["policy/kl_ref"] = grpo.kl(tokens.logps, tokens.ref_logps, "k3")
    if algo.tis_cap is not None:
        means["rollout/tis_capped"] = indicators["capped"]
    for name, values_N in means.items():
        meter.add_mean(name, values_N.sum(), len(tokens))
    if algo.ratio_mask is not None:
        meter.sum("rollout/ratio_masked", len(tokens.rollout[~indicators["kept"]].unique()))
    if not first_pass:
        return
    # old_policy=rollout replaces old_logps by the engine's
    before_N = tokens.old_logps if algo.needs_old_logps else tokens.logps
    if tokens.view_logps is not None and (seeing_N := tokens.n_images > 0).any():
        d_N = (before_N - tokens.view_logps)[seeing_N]  # its mean estimates the KL(own images || second view)
        for name, values_N in {"vision/kl": d_N, "vision/k3": (-d_N).expm1() + d_N}.items():
            meter.add_mean(name, values_N.sum(), len(d_N))
    if tokens.teacher_logps is not None:
        meter.add_mean("policy/kl_teacher", (before_N - tokens.teacher_logps).sum(), len(tokens))
    # compare the log-probabilities of trainer and engine on the tokens that the engine sampled
    gap_N = before_N - tokens.rollout_logps
    subsets = {"": slice(None)} | {f"/images={n:g}": tokens.n_images == n for n in tokens.n_images.unique().tolist()}
    for suffix, rows in subsets.items():
        gap = gap_N[rows]
        gap = gap[~gap.isnan()]  # NaN: sampled from noised images
        if len(gap):
            meter.add_mean(f"mismatch/kl{suffix}", (gap.expm1() - gap).sum(), len(gap))  # k3
            meter.max(f"mismatch/max_abs_logprob_diff{suffix}", gap.abs().max())
