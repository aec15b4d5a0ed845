"""Balancing sequences over ranks or micro-batches by FLOPs: ours against the usual ways.

    OMP_NUM_THREADS=1 python benchmarks/balance.py
    OMP_NUM_THREADS=1 python benchmarks/balance.py --seeds 20 --repeats 1

ours       packing.balance
LPT        longest first, each to the least loaded bin
KK         Karmarkar-Karp: largest differencing, a heap of k-way partial partitions (what verl uses)
multifit   first-fit decreasing at the smallest capacity that bisection finds
arrival    consecutive runs of N / k
by tokens  ours, given the token counts instead of the FLOPs
Cells are max / mean - 1 of FLOPs, worst of --seeds, and milliseconds: minimum of --repeats interleaved runs, worst of
--seeds.
bound is what no partition can beat: the longest sequence can exceed the mean bin.

Lengths as in geo3k: prompts of 109-1247 tokens, median 361, 20-90% of them image tokens; log-normal responses, median
326, at most 2048; groups of 8 share a prompt. Each sequence is a whole one, with its own copy of the image, as
Qwen2.5-VL-7B.

Then the groups of a step over ranks: 512 prompts with 5 responses each, whose log-lengths owe half of their variance to
the prompt; a group's prompt and images count once. Cells are max / mean of FLOPs over ranks, worst of --seeds:
of the step    summed over its minibatches
of a minibatch the worst one; ranks wait for each other at the end of each, so this is what costs time
stride         rank r takes every n-th group from the r-th on
ours           packing.assign_to_ranks
largest group  over a rank's mean of a minibatch: above 1 no assignment of whole groups could be even
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

from packing import assign_to_ranks, balance, flop_rates, group_flops  # noqa: E402

CELLS = ((512, 8), (512, 64), (512, 128), (4096, 8), (4096, 64), (4096, 512))
QWEN2_5_VL_7B = {
    "text_config": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                    "num_key_value_heads": 4, "vocab_size": 152064},
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
}


def geo3k_like(n: int, seed: int, train_vision: bool = False, group: int = 8) -> tuple[list[int], list[float]]:
    """Tokens and FLOPs of n sequences."""
    rng = np.random.default_rng(seed)
    prompt = np.clip(np.exp(rng.normal(np.log(361), 0.5, n // group)), 109, 1247).astype(int).repeat(group)
    image = (prompt * rng.uniform(0.2, 0.9, n // group).repeat(group)).astype(int)
    response = np.clip(np.exp(rng.normal(np.log(326), 0.75, n)), 8, 2048).astype(int)
    rates = flop_rates(transformers.Qwen2_5_VLConfig(**QWEN2_5_VL_7B), vision=1 if train_vision else 1 / 3)
    lengths = zip(prompt.tolist(), image.tolist(), response.tolist(), strict=True)
    flops = [group_flops(rates, p + r, [4 * i], [], r) for p, i, r in lengths]
    return (prompt + response).tolist(), flops


def groups_like_geo3k(n: int, seed: int, samples: int = 5) -> list[float]:
    """FLOPs of n groups: a prompt with its image, once, and its responses."""
    rng = np.random.default_rng(seed)
    prompt_N = np.clip(np.exp(rng.normal(np.log(361), 0.5, n)), 109, 1247).astype(int)
    image_N = (prompt_N * rng.uniform(0.2, 0.9, n)).astype(int)
    deviation_NG = (rng.normal(size=(n, 1)) + rng.normal(size=(n, samples))) * 0.75 / 2**0.5
    response_NG = np.clip(np.exp(np.log(326) + deviation_NG), 8, 2048).astype(int)
    rates = flop_rates(transformers.Qwen2_5_VLConfig(**QWEN2_5_VL_7B))
    lengths = zip(prompt_N.tolist(), image_N.tolist(), response_NG.tolist(), strict=True)
    return [group_flops(rates, p, [4 * i], responses, sum(responses)) for p, i, responses in lengths]


def lpt(costs: list[float], k: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(k)]
    heap = [(0.0, b) for b in range(k)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, b = heap[0]
        heapq.heapreplace(heap, (load + costs[i], b))
        bins[b].append(i)
    return bins


def karmarkar_karp(costs: list[float], k: int) -> list[list[int]]:
    """Merge the two partitions of largest spread, the heaviest bins of one onto the lightest of the other, until one is
    left.

    A partition keeps only its loaded bins, (load, id) descending; the other k - len(loaded) are empty."""
    joined: dict[int, tuple] = {i: (i,) for i in range(len(costs))}  # id -> nested pairs of ids; flattened at the end
    heap = [(-c, i, [(c, i)]) for i, c in enumerate(costs)]
    heapq.heapify(heap)
    serial = len(costs)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, order, b = heapq.heappop(heap)
        free = k - len(a)
        met = len(a) - max(0, len(b) - free)
        merged = a[:met] + b[:free]  # b's heaviest go to a's empty bins
        for (load, i), (more, j) in zip(b[free:], reversed(a[met:]), strict=True):
            merged.append((load + more, serial))
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
        bins, room = [[] for _ in range(k)], np.full(k, cap)
        for i in order:
            b = int((room >= costs[i]).argmax())
            if room[b] < costs[i]:
                low = cap
                break
            room[b] -= costs[i]
            bins[b].append(i)
        else:
            best, high = bins, cap
    return best


def arrival(costs: list[float], k: int) -> list[list[int]]:
    return [part.tolist() for part in np.array_split(np.arange(len(costs)), k)]


def imbalance(costs: list[float], bins: list[list[int]]) -> float:
    assert sorted(itertools.chain.from_iterable(bins)) == list(range(len(costs)))
    return max(sum(costs[i] for i in b) for b in bins) * len(bins) / sum(costs) - 1


def table_of_ranks(seeds: int, n_prompts: int = 512) -> None:
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
    p.add_argument("--seeds", type=int, default=3, help="draws of the lengths")
    p.add_argument("--repeats", type=int, default=3, help="interleaved runs of a draw; the minimum counts")
    p.add_argument("--train-vision", action="store_true", help="count the tower's backward too")
    p.add_argument("--short", action="store_true", help=f"does it run? The same as {SHORT}")
    args = p.parse_args()
    return p.parse_args([*SHORT.split(), *sys.argv[1:]]) if args.short else args


def main() -> None:
    args = parse_args()
    ways = {"ours": balance, "LPT": lpt, "KK": karmarkar_karp, "multifit": multifit, "arrival": arrival}
    print("| N, k | bound | " + " | ".join(ways) + " | by tokens |\n|" + "---|" * (len(ways) + 3))
    for n, k in CELLS:
        worst: dict[str, float] = dict.fromkeys([*ways, "by tokens", "bound"], 0.0)
        slowest = dict.fromkeys(ways, 0.0)
        for seed in range(args.seeds):
            tokens, flops = geo3k_like(n, seed, args.train_vision)
            worst["bound"] = max(worst["bound"], max(flops) * k / sum(flops) - 1)
            worst["by tokens"] = max(worst["by tokens"], imbalance(flops, balance(tokens, k)))
            fastest = dict.fromkeys(ways, float("inf"))
            for _ in range(args.repeats):
                for name, way in ways.items():
                    start = time.perf_counter()
                    bins = way(flops, k)
                    fastest[name] = min(fastest[name], 1e3 * (time.perf_counter() - start))
                    worst[name] = max(worst[name], imbalance(flops, bins))
            slowest = {name: max(slowest[name], fastest[name]) for name in ways}
        cells = [f"{worst[name]:.1e}, {slowest[name]:.3g} ms" for name in ways]
        cells = [f"{n}, {k}", f"{worst['bound']:.1e}", *cells, f"{worst['by tokens']:.1e}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    table_of_ranks(args.seeds)


if __name__ == "__main__":
    main()
