"""Balancing sequences over ranks or micro-batches by FLOPs: ours against the usual ways.

    OMP_NUM_THREADS=1 python benchmarks/balance.py
    OMP_NUM_THREADS=1 python benchmarks/balance.py --seeds 20 --repeats 1

ours       grpo.balance
LPT        longest first, each to the least loaded bin
KK         Karmarkar-Karp: largest differencing, a heap of k-way partial partitions (what verl uses)
multifit   first-fit decreasing at the smallest capacity that bisection finds
arrival    consecutive runs of N / k
by tokens  ours, given the token counts instead of the FLOPs
Cells are max / mean - 1 of FLOPs, worst of --seeds, and milliseconds: minimum of --repeats interleaved runs, worst of --seeds.
bound is what no partition can beat: the longest sequence can exceed the mean bin.

Lengths as in geo3k: prompts of 109-1247 tokens, median 361, 20-90% of them image tokens; log-normal responses, median 326,
at most 2048; groups of 8 share a prompt. Each sequence is a whole one, with its own copy of the picture, as Qwen2.5-VL-7B.
"""

import argparse
import heapq
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np  # noqa: E402
import transformers  # noqa: E402

from grpo import balance, flop_rates, longest_first, sequence_flops  # noqa: E402

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
    rates = flop_rates(transformers.Qwen2_5_VLConfig(**QWEN2_5_VL_7B))
    lengths = zip(prompt.tolist(), image.tolist(), response.tolist(), strict=True)
    flops = [sequence_flops(rates, p + r, [4 * i], r, train_vision=train_vision) for p, i, r in lengths]
    return (prompt + response).tolist(), flops


def lpt(costs: list[float], k: int) -> list[list[int]]:
    bin_N = longest_first(np.array(costs), k)
    return [np.flatnonzero(bin_N == b).tolist() for b in range(k)]


def karmarkar_karp(costs: list[float], k: int) -> list[list[int]]:
    """Merge the two partitions of largest spread, the heaviest bins of one onto the lightest of the other, until one is left.

    A partition keeps only its loaded bins, (load, id) descending; the other k - len(loaded) are empty."""
    joined: dict[int, tuple] = {i: (i,) for i in range(len(costs))}  # id -> tree of ids; flattened at the end
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
    assert sorted(i for b in bins for i in b) == list(range(len(costs)))
    return max(sum(costs[i] for i in b) for b in bins) * len(bins) / sum(costs) - 1


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--seeds", type=int, default=3, help="draws of the lengths")
    p.add_argument("--repeats", type=int, default=3, help="interleaved runs of a draw; the minimum counts")
    p.add_argument("--train-vision", action="store_true", help="count the tower's backward too")
    return p.parse_args()


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
        print(f"| {n}, {k} | {worst['bound']:.1e} | " + " | ".join(cells) + f" | {worst['by tokens']:.1e} |", flush=True)


if __name__ == "__main__":
    main()
