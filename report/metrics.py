"""What is measured in a step; what each metric means is in docs/metrics.md."""

from itertools import chain

import torch

import grpo
from model import PolicyOutput
from packing import TokenBatch
from reward import grader_stats
from rollout import GroupPool
from utils import Context, Meter, sum_dicts

GRADER_STATS = ("unreadable", "refused", "cas_timeout", "cas_budget")


def rollout_metrics(pool: GroupPool) -> dict[str, float]:
    """Means over all processes and rounds of rewards, lengths, and groups without a signal."""
    groups = list(pool.groups.values())
    rollouts = list(chain.from_iterable(groups))
    constant = [len({r.reward for r in group}) == 1 for group in groups]
    sums = {
        "n": float(len(rollouts)),
        "groups": float(len(groups)),
        "constant": float(sum(constant)),
        "tokens": float(sum(len(r.response) for r in rollouts)),
        "truncated": float(sum(r.finish_reason == "length" for r in rollouts)),
    }
    for r in rollouts:
        for name, value in r.rewards.items():  # tasks differ in their parts: a mean is over the samples that have it
            sums[f"reward/{name}"] = sums.get(f"reward/{name}", 0.0) + value
            sums[f"count/{name}"] = sums.get(f"count/{name}", 0.0) + 1
    # why answers were wrong without being compared
    sums |= {f"grader/{why}": float(grader_stats[why]) for why in GRADER_STATS}
    grader_stats.clear()
    total = sum_dicts(pool.ctx.gather(sums))
    names = [key.removeprefix("reward/") for key in total if key.startswith("reward/")]
    metrics = {f"reward/{name}": total[f"reward/{name}"] / total[f"count/{name}"] for name in names}
    metrics["reward/mean"] = metrics.pop("reward/reward")
    metrics["reward/constant_groups"] = total["constant"] / total["groups"]
    metrics["response/tokens"] = total["tokens"] / total["n"]
    metrics["response/truncated"] = total["truncated"] / total["n"]
    metrics["rollout/tokens"] = total["tokens"]
    metrics |= {f"grader/{why}": total[f"grader/{why}"] for why in GRADER_STATS}
    return metrics | (sampling_metrics(pool) if pool.algo.sample_rounds > 1 else {})


def sampling_metrics(pool: GroupPool) -> dict[str, float]:
    """Rounds; groups left out for equal rewards, or as more than needed; and ones kept for want of better."""
    chosen = pool.chosen()
    filled = sum(not pool.has_signal[key] for key in chosen)
    equal = sum(not signal for signal in pool.has_signal.values())
    surplus = len(pool.has_signal) - equal - (len(chosen) - filled)
    counts = {"rounds": pool.round, "equal": equal - filled, "surplus": surplus, "filled": filled}
    return {f"sampling/{name}": float(n) for name, n in counts.items()}


def measure_values(tokens: TokenBatch, ctx: Context, meter: Meter) -> None:
    """Of the critic, before the update: the mean, and which share of the returns' variance it explains."""
    returns_N = tokens.returns.double()
    values_N = tokens.values.double()
    spread, error = ctx.moments(returns_N)[1], ctx.moments(returns_N - values_N)[1]
    meter.set("value/mean", ctx.moments(values_N)[0])
    meter.set("value/explained_variance", 1 - (error / spread) ** 2 if spread > 0 else 0.0)


@torch.no_grad()
def measure_tokens(
    out: PolicyOutput, tokens: TokenBatch, loss: grpo.PolicyLoss, meter: Meter, first_pass: bool
) -> None:
    """Of a micro-batch's tokens that are trained on."""
    algo, real = loss.algo, tokens.weights > 0
    indicators = loss(out.logp_K, out.entropy_K, tokens)[1]
    n = int(real.sum())
    meter.sum("update/tokens", n)
    meter.add("policy/entropy", out.entropy_K[real].sum(), n)
    meter.add("policy/clipped", indicators["clipped"][real].sum(), n)
    meter.add("policy/kl_old", indicators["kl"][real].sum(), n)
    if algo.needs_reference:
        meter.add("policy/kl_ref", grpo.kl(out.logp_K, tokens.ref_logps, "k3")[real].sum(), n)
    if algo.tis_cap is not None:
        meter.add("rollout/tis_capped", indicators["capped"][real].sum(), n)
    if algo.tis_mask is not None:
        meter.sum("rollout/tis_masked", len(tokens.rollout[real & ~indicators["kept"]].unique()))
    if not first_pass:
        return
    # How far the trainer's log-probabilities are from the engine's, on the tokens that the engine sampled
    trainer_logp_K = tokens.old_logps if algo.needs_old_logps else out.logp_K
    gap_K = trainer_logp_K - tokens.rollout_logps
    has_image = tokens.has_image > 0
    for kind, chosen in {"": real, "_text": real & ~has_image, "_image": real & has_image}.items():
        gap = gap_K[chosen]
        if len(gap):
            meter.add(f"rollout/kl{kind}", (gap.exp() - 1 - gap).sum(), len(gap))  # k3
            meter.max(f"rollout/max_abs_dlogp{kind}", gap.abs().max())
