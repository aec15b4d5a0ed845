"""Quality and speed of balancing sequences over ranks or micro-batches by FLOPs: our method against the usual ones.

    OMP_NUM_THREADS=1 python benchmarks/balance.py
    OMP_NUM_THREADS=1 python benchmarks/balance.py --seeds 20 --repeats 1

The first table divides N sequences into k bins:
ours       packing.balance
LPT        longest first, each to the least loaded bin
KK         Karmarkar-Karp: largest differencing, a heap of k-way partial partitions (used by verl)
multifit   first-fit decreasing at the smallest capacity that bisection finds
arrival    consecutive slices of N / k sequences
by tokens  our method, given the token counts instead of the FLOPs
bound      the best value that any partition can reach, as the longest sequence can exceed the mean bin
Each cell is max / mean - 1 of FLOPs (worst of --seeds), and milliseconds (minimum of --repeats interleaved runs, worst
of --seeds).

Lengths are as in geo3k: prompts of 109-1247 tokens, median 361, 20-90% of them image tokens; log-normal responses,
median 326, at most 2048; groups of 8 share a prompt. Each sequence has its own copy of prompt and image. FLOPs are
those of Qwen2.5-VL-7B.

The second table divides the groups of a step over ranks: 512 prompts with 5 responses each; half of the variance of
their log-lengths comes from the prompt. A group's prompt and images count once. Each cell is max / mean of FLOPs
over ranks, worst of --seeds:
of the step    summed over its minibatches
of a minibatch the worst minibatch; ranks wait for each other at the end of each, so this one costs time
stride         rank r gets every n-th group, starting with group r
ours           packing.assign_to_ranks
largest group  its FLOPs over a rank's mean in a minibatch; above 1 no assignment of whole groups can be even
"""

import argparse
import heapq
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np  # noqa: E402
import transformers  # noqa: E402

from packing import assign_to_ranks, balance, flop_costs, group_flops  # noqa: E402

CELLS = ((512, 8), (512, 64), (512, 128), (4096, 8), (4096, 64), (4096, 512))
QWEN2_5_VL_7B = {
    "text_config": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                    "num_key_value_heads": 4, "vocab_size": 152064},
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
}


def geo3k_like(n: int, seed: int, train_vision: bool = False, group: int = 8) -> tuple[list[int], list[float]]:
    """Return the token counts and FLOPs of n random sequences with lengths as in geo3k."""
    rng = np.random.default_rng(seed)
    prompt = np.clip(np.exp(rng.normal(np.log(361), 0.5, n // group)), 109, 1247).astype(int).repeat(group)
    image = (prompt * rng.uniform(0.2, 0.9, n // group).repeat(group)).astype(int)
    response = np.clip(np.exp(rng.normal(np.log(326), 0.75, n)), 8, 2048).astype(int)
    costs = flop_costs(transformers.Qwen2_5_VLConfig(**QWEN2_5_VL_7B), vision=1 if train_vision else 1 / 3)
    lengths = zip(prompt.tolist(), image.tolist(), response.tolist(), strict=True)
    flops = [group_flops(costs, p + r, [4 * i], [], r) for p, i, r in lengths]
    return (prompt + response).tolist(), flops


def groups_like_geo3k(n: int, seed: int, samples: int = 5) -> list[float]:
    """Return the FLOPs of n random groups, each with one prompt, its image and `samples` responses."""
    rng = np.random.default_rng(seed)
    prompt_N = np.clip(np.exp(rng.normal(np.log(361), 0.5, n)), 109, 1247).astype(int)
    image_N = (prompt_N * rng.uniform(0.2, 0.9, n)).astype(int)
    deviation_NG = (rng.normal(size=(n, 1)) + rng.normal(size=(n, samples))) * 0.75 / 2**0.5
    response_NG = np.clip(np.exp(np.log(326) + deviation_NG), 8, 2048).astype(int)
    costs = flop_costs(transformers.Qwen2_5_VLConfig(**QWEN2_5_VL_7B))
    lengths = zip(prompt_N.tolist(), image_N.tolist(), response_NG.tolist(), strict=True)
    return [group_flops(costs, p, [4 * i], responses, sum(responses)) for p, i, responses in lengths]


def lpt(costs: list[float], k: int) -> list[list[int]]:
    """Return k bins of indices, filled by the rule longest processing time first."""
    bins: list[list[int]] = [[] for _ in range(k)]
    heap = [(0.0, b) for b in range(k)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, b = heap[0]
        heapq.heapreplace(heap, (load + costs[i], b))
        bins[b].append(i)
    return bins


def karmarkar_karp(costs: list[float], k: int) -> list[list[int]]:
    """Return k bins of indices. Until one partition is left, merge the two with the largest spread: the heaviest bins
    of one with the lightest of the other.

    A partition stores only its loaded bins, as (load, id) in descending order; the other k - len(loaded) are empty."""
    joined: dict[int, tuple] = {i: (i,) for i in range(len(costs))}  # id -> nested pairs of ids; flattened at the end
    heap = [(-c, i, [(c, i)]) for i, c in enumerate(costs)]
    heapq.heapify(heap)
    serial = len(costs)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, order, b = heapq.heappop(heap)
        free = k - len(a)
        n_kept = len(a) - max(0, len(b) - free)
        merged = a[:n_kept] + b[:free]  # b's heaviest bins go into a's empty ones
        for (load_b, i), (load_a, j) in zip(b[free:], reversed(a[n_kept:]), strict=True):
            merged.append((load_b + load_a, serial))
            joined[serial] = (i, j)
            serial += 1
        merged.sort(reverse=True)
        spread = merged[0][0] - (merged[-1][0] if len(merged) == k else 0.0)
        heapq.heappush(heap, (-spread, order, merged))
    bins = []
    for _, root in heap[0][2] if heap else []:
        stack, leaves = [root], []
        while stack:
            node = stack.pop()
            if node < len(costs):
                leaves.append(node)
            else:
                stack.extend(joined[node])
        bins.append(sorted(leaves))
    return bins + [[] for _ in range(k - len(bins))]


def multifit(costs: list[float], k: int, steps: int = 10) -> list[list[int]]:
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    low = max(max(costs), sum(costs) / k)
    high, best = 2 * low, None
    for step in range(steps):
        cap = high if step == 0 else (low + high) / 2
        bins, remaining = [[] for _ in range(k)], np.full(k, cap)
        for i in order:
            b = int((remaining >= costs[i]).argmax())
            if remaining[b] < costs[i]:
                low = cap
                break
            remaining[b] -= costs[i]
            bins[b].append(i)
        else:
            best, high = bins, cap
    return best


def arrival(costs: list[float], k: int) -> list[list[int]]:
    return [part.tolist() for part in np.array_split(np.arange(len(costs)), k)]


def imbalance(costs: list[float], bins: list[list[int]]) -> float:
    assert sorted(itertools.chain.from_iterable(bins)) == list(range(len(costs)))
    return max(sum(costs[i] for i in b) for b in bins) * len(bins) / sum(costs) - 1


def print_rank_table(seeds: int, n_prompts: int = 512) -> None:
    columns = "largest group | stride: of the step | of a minibatch | ours: of the step | of a minibatch"
    print(f"\n| minibatches, ranks | {columns} |\n|" + "---|" * 6)
    for n_minibatches, n_ranks in itertools.product((1, 4), (8, 32)):
        worst = np.zeros(5)
        minibatch_N = [i % n_minibatches for i in range(n_prompts)]
        stride_N = [i // n_minibatches % n_ranks for i in range(n_prompts)]
        for seed in range(seeds):
            flops_N = groups_like_geo3k(n_prompts, seed)
            row = [max(flops_N) * n_minibatches * n_ranks / sum(flops_N)]
            for rank_N in (stride_N, assign_to_ranks(flops_N, n_minibatches, n_ranks)):
                load_MR = np.zeros((n_minibatches, n_ranks))
                np.add.at(load_MR, (minibatch_N, rank_N), flops_N)
                row.append(load_MR.sum(0).max() / load_MR.sum(0).mean())
                row.append((load_MR.max(1) / load_MR.mean(1)).max())
            worst = np.maximum(worst, row)
        print(f"| {n_minibatches}, {n_ranks} | " + " | ".join(f"{x:.4f}" for x in worst) + " |", flush=True)


SHORT = "--seeds 1 --repeats 1"


def parse_args() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    p.add_argument("--seeds", type=int, default=3, help="random draws of the lengths")
    p.add_argument("--repeats", type=int, default=3, help="interleaved runs per draw; the minimum is reported")
    p.add_argument("--train-vision", action="store_true", help="also count the vision tower's backward pass")
    p.add_argument("--short", action="store_true", help=f"only check that it runs; same as {SHORT}")
    args = p.parse_args()
    return p.parse_args([*SHORT.split(), *sys.argv[1:]]) if args.short else args


def main() -> None:
    args = parse_args()
    methods = {"ours": balance, "LPT": lpt, "KK": karmarkar_karp, "multifit": multifit, "arrival": arrival}
    print("| N, k | bound | " + " | ".join(methods) + " | by tokens |\n|" + "---|" * (len(methods) + 3))
    for n, k in CELLS:
        worst: dict[str, float] = dict.fromkeys([*methods, "by tokens", "bound"], 0.0)
        slowest = dict.fromkeys(methods, 0.0)
        for seed in range(args.seeds):
            tokens, flops = geo3k_like(n, seed, args.train_vision)
            worst["bound"] = max(worst["bound"], max(flops) * k / sum(flops) - 1)
            worst["by tokens"] = max(worst["by tokens"], imbalance(flops, balance(tokens, k)))
            fastest = dict.fromkeys(methods, float("inf"))
            for _ in range(args.repeats):
                for name, method in methods.items():
                    start = time.perf_counter()
                    bins = method(flops, k)
                    fastest[name] = min(fastest[name], 1e3 * (time.perf_counter() - start))
                    worst[name] = max(worst[name], imbalance(flops, bins))
            slowest = {name: max(slowest[name], fastest[name]) for name in methods}
        cells = [f"{worst[name]:.1e}, {slowest[name]:.3g} ms" for name in methods]
        cells = [f"{n}, {k}", f"{worst['bound']:.1e}", *cells, f"{worst['by tokens']:.1e}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    print_rank_table(args.seeds)


if __name__ == "__main__":
    main()
