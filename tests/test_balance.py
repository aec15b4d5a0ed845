"""Tests of balancing work over micro-batches and ranks, and of its FLOPs model.   pytest tests/test_balance.py"""

import importlib.util
import itertools
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import cpu_limit, written
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from packing import (
    assign_to_ranks,
    balance,
    balance_across_ranks,
    bins_needed,
    flop_costs,
    group_flops,
    load_imbalance,
    rollouts_flops,
)
from rollout import Rollout
from utils import DistContext, Meter

ROOT = Path(__file__).parent.parent

COSTS = st.lists(st.floats(0, 1e15, allow_subnormal=False) | st.integers(0, 9).map(float), max_size=60)
ITEMS = st.lists(st.tuples(st.floats(0, 1e15), st.integers(0, 500)), min_size=1, max_size=60)


def heaviest(costs, bins):
    return max(sum(costs[i] for i in b) for b in bins)


def check_partition(costs, k, bins):
    assert len(bins) == k and sorted(i for b in bins for i in b) == list(range(len(costs)))
    assert all(b == sorted(b) for b in bins)


@settings(max_examples=150, deadline=None)
@given(COSTS, st.integers(1, 20))
def test_each_index_is_in_one_bin_and_loads_meet_the_greedy_bound(costs, k):
    bins = balance(costs, k)
    check_partition(costs, k, bins)
    assert bins == balance(costs, k)
    if costs:  # the bound that any greedy start meets
        assert heaviest(costs, bins) <= (sum(costs) / k + max(costs)) * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(ITEMS, st.integers(1, 12), st.floats(1.0, 2.0), st.floats(1.0, 2.0))
def test_bounds_are_never_exceeded(items, k, slack, slack_size):
    costs, sizes = [c for c, _ in items], [s for _, s in items]
    cap = max(max(costs), sum(costs) / k) * slack
    max_size = int(max(max(sizes), sum(sizes) / k) * slack_size)
    try:
        bins = balance(costs, k, cap, sizes, max_size)
    except ValueError as error:
        assert "found no way" in str(error)
        return
    check_partition(costs, k, bins)
    assert heaviest(costs, bins) <= cap and heaviest(sizes, bins) <= max_size


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), min_size=2, max_size=40), st.integers(2, 6))
def test_roomy_bounds_always_succeed(items, k):
    costs, sizes = [c for c, _ in items], [s for _, s in items]
    max_size = sum(sizes) // k + max(sizes)  # greedy cannot fail: some bin is at or below the mean
    assert heaviest(sizes, balance(costs, k, None, sizes, max_size)) <= max_size


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"costs": [1, 7, 2], "k": 2, "cap": 5}, ("item 1", "cost 7", "cap 5", "raise")),
        ({"costs": [1, 1], "k": 2, "sizes": [3, 9], "max_size": 8}, ("item 1", "size 9", "max_size 8")),
        ({"costs": [3, 3, 3], "k": 2, "cap": 5}, ("3 items", "cost 9", "2 bins", "<= 5", "more bins")),
        ({"costs": [1, float("nan")], "k": 2}, ("item 1", "nan")),
        ({"costs": [1, -1], "k": 2}, ("item 1", "-1")),
    ],
)
def test_errors_name_the_numbers(kwargs, words):
    with pytest.raises(ValueError) as error:
        balance(**kwargs)
    assert all(word in str(error.value) for word in words), error.value


def test_tiny_instances_are_near_the_optimum():
    generator = torch.Generator().manual_seed(0)
    equal = 0
    for trial in range(60):
        n, k = 4 + trial % 4, 2 + trial % 2
        costs = torch.randint(1, 100, (n,), generator=generator).tolist()
        loads = (
            [sum(c for c, b in zip(costs, where, strict=True) if b == i) for i in range(k)]
            for where in itertools.product(range(k), repeat=n)
        )
        best, ours = min(max(load) for load in loads), heaviest(costs, balance(costs, k))
        assert ours <= 1.03 * best, (costs, k)
        equal += ours == best
    assert equal >= 57


def test_tight_sizes_are_met_when_costs_disagree():
    # The costly items are small. Balanced by cost alone, the large items would share a bin.
    costs, sizes = [9, 9, 1, 1, 1, 1], [1, 1, 8, 8, 4, 4]
    bins = balance(costs, 2, None, sizes, 13)
    assert heaviest(sizes, bins) <= 13 and heaviest(costs, bins) == 11


def load_benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_balance", ROOT / "benchmarks" / "balance.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    return benchmark


@pytest.mark.parametrize(("n", "k", "limit"), [(4096, 64, 1e-3), (4096, 512, 5e-3), (512, 64, 2e-3)])
def test_imbalance_and_time_on_geo3k_like_lengths(n, k, limit):
    benchmark = load_benchmark()
    for seed in range(3):
        tokens, flops = benchmark.geo3k_like(n, seed)
        with cpu_limit():
            bins = balance(flops, k)
        assert benchmark.imbalance(flops, bins) <= limit
    room = int(1.05 * max(sum(tokens) / k, max(tokens)))
    bins = balance(flops, k, sizes=tokens, max_size=room)
    assert heaviest(tokens, bins) <= room and benchmark.imbalance(flops, bins) <= limit
    assert benchmark.imbalance(flops, benchmark.karmarkar_karp(flops, 8)) <= 1e-3


def fewest_bins(sizes, max_size):
    """Return the smallest number of bins by exhaustive search: each item goes to every open bin and to a new one."""

    def search(i, left):
        if i == len(sizes):
            return len(left)
        options = [left[:b] + [x - sizes[i]] + left[b + 1 :] for b, x in enumerate(left) if x >= sizes[i]]
        return min(search(i + 1, option) for option in [*options, left + [max_size - sizes[i]]])

    return search(0, [])


def test_bins_needed_are_nearly_the_fewest_and_enough_for_balance():
    rng = random.Random(0)
    extra = 0
    for _ in range(100):
        sizes = [rng.randint(0, 10) for _ in range(rng.randint(0, 7))]
        needed = bins_needed(sizes, 12)
        extra += needed - fewest_bins(sizes, 12)
        costs = [rng.randint(0, 99) for _ in sizes]
        for k in range(max(1, needed), max(1, len(sizes)) + 1):  # pack may be asked for more bins than it needs
            bins = balance(costs, k, sizes=sizes, max_size=12)
            check_partition(costs, k, bins)
            assert heaviest(sizes, bins) <= 12
    assert 0 <= extra <= 2
    with pytest.raises(ValueError, match="item 1 has size 13, .*max_size 12"):
        bins_needed([3, 13], 12)


# ----------------------------------------------------------------------------------------------------------------------
# Ranks


def flops_per_rank(flops, minibatches, ranks, n_ranks):
    """Return the FLOPs of each rank in each minibatch, as [minibatch][rank]."""
    rows = [[0.0] * n_ranks for _ in range(minibatches)]
    for i, (cost, r) in enumerate(zip(flops, ranks, strict=True)):
        rows[i % minibatches][r] += cost
    return rows


@pytest.mark.parametrize("n_minibatches", [1, 4])
@pytest.mark.parametrize("n_ranks", [8, 32])
def test_ranks_are_balanced_over_a_step_and_within_each_minibatch(n_minibatches, n_ranks):
    benchmark = load_benchmark()
    for seed in range(3):
        flops = benchmark.groups_like_geo3k(512, seed)
        ranks = assign_to_ranks(flops, n_minibatches, n_ranks)
        assert ranks == assign_to_ranks(flops, n_minibatches, n_ranks) and set(ranks) == set(range(n_ranks))
        rows = flops_per_rank(flops, n_minibatches, ranks, n_ranks)
        step = [sum(column) for column in zip(*rows, strict=True)]
        assert max(step) <= 1.02 * sum(step) / n_ranks
        for m, row in enumerate(rows):  # one group may be more than a rank's share
            largest = max(flops[m::n_minibatches])
            assert max(row) <= max(1.005 * sum(row) / n_ranks, largest * (1 + 1e-3))
        strided = flops_per_rank(flops, n_minibatches, [i // n_minibatches % n_ranks for i in range(512)], n_ranks)
        assert sum(map(max, rows)) < sum(map(max, strided))


def test_every_rank_gets_a_group_of_every_minibatch_that_has_enough():
    flops = [100.0, 1.0, 0.0, 1.0, 0.0, 50.0, 0.0, 0.0]
    ranks = assign_to_ranks(flops, 2, 4)
    assert sorted(ranks[::2]) == sorted(ranks[1::2]) == [0, 1, 2, 3]
    assert assign_to_ranks([], 1, 3) == [] and assign_to_ranks([3.0, 1.0], 2, 1) == [0, 0]
    assert set(assign_to_ranks([7.0], 2, 4)) < {0, 1, 2, 3}  # a minibatch without any


def test_load_imbalance_compares_the_heaviest_rank_with_the_mean_in_each_minibatch():
    """Ranks wait for each other in a minibatch: (3 + 2) / (2 + 2). An idle rank counts too: (4 + 2) / (2 + 1)."""
    assert load_imbalance([3.0, 2.0, 1.0, 2.0], [0, 0, 1, 1], 2, 2) == 5 / 4
    assert load_imbalance([4.0, 2.0], [0, 0], 2, 2) == 2.0


class ThreadRank(DistContext):
    """A rank that runs as a thread of this process; `gather` returns the items that all ranks gave in the same call."""

    def gather(self, item):
        return self.everyone.meet(self.rank, item)

    def exchange(self, items):
        return [everything[self.rank] for everything in self.gather(items)]


class RankThreads:
    """The ranks, as threads of this process."""

    def __init__(self, world, tp):
        self.world, self.tp = world, tp
        self.items = [None] * world
        self.barrier = threading.Barrier(world)

    def meet(self, rank, item):
        self.items[rank] = pickle.dumps(item)  # each rank receives copies, as from another process
        self.barrier.wait(60)
        items = [pickle.loads(data) for data in self.items]
        self.barrier.wait(60)
        return items

    def run(self, work):
        """Run work(ctx) on every rank; return the results in rank order."""
        with ThreadPoolExecutor(self.world) as pool:
            contexts = []
            for rank in range(self.world):
                contexts.append(ThreadRank(rank, self.world, torch.device("cpu"), self.tp))
                object.__setattr__(contexts[-1], "everyone", self)
            return list(pool.map(work, contexts))


@pytest.mark.parametrize("world,tp,minibatches", [(2, 1, 1), (4, 1, 2), (4, 2, 2), (4, 4, 1)])
def test_groups_arrive_whole_and_once_and_balance_the_ranks(world, tp, minibatches, loaded, picture):
    hf, processor = loaded["qwen2_5_vl"]
    costs, rng = flop_costs(hf.config), random.Random(0)
    n_groups, size = 32, 3
    data_world = world // tp
    keys = [(i // 20, i % 20) for i in range(n_groups)]  # from two batches
    lengths = {f"p{i}": [rng.randint(1, 60) for _ in range(size)] for i in range(n_groups)}
    for i in range(0, n_groups, world):  # the first rank samples long responses
        lengths[f"p{i}"] = [60] * size

    def prompts_of(uids):
        prompts = []
        for uid in uids:
            number = int(uid[1:])
            images = [processor.image_to_patches(uid, picture(56, 56, number))] * (number % 3 == 0)
            prompts.append(written(uid, list(range(5 + number % 4)), [1], images).prompt)
        return prompts

    def sample_group(i):
        [prompt] = prompts_of([f"p{i}"])
        group = []
        for g, n in enumerate(lengths[prompt.uid]):
            logprobs, mask = [-i - g / 8] * n, [True] * n
            group.append(Rollout(prompt, g, [i] * n, mask, logprobs, "length", f"{i}/{g}", {"reward": g + i / 64}))
        return group

    chosen = [key for i, key in enumerate(keys) if i % 8 != 7]  # some sampled groups are not trained on

    def work(ctx):
        groups = {keys[i]: sample_group(i) for i in range(ctx.rank, n_groups, world)}
        meter = Meter()
        return balance_across_ranks(groups, chosen, minibatches, costs, ctx, meter), meter.values

    results = RankThreads(world, tp).run(work)
    assert all(metrics == results[0][1] for _, metrics in results)
    for rank in range(0, world, tp):  # all ranks of a tensor-parallel group train on the same rollouts
        for other in range(rank + 1, rank + tp):
            assert [[r.text for r in part] for part in results[other][0]] == [
                [r.text for r in part] for part in results[rank][0]
            ]
    trained_loads = np.zeros((data_world, minibatches))
    for number in range(minibatches):
        arrived = []
        for data_rank in range(data_world):
            part = results[data_rank * tp][0][number]
            assert len(part) % size == 0
            for start in range(0, len(part), size):
                group = part[start : start + size]
                i = int(group[0].prompt.uid[1:])
                arrived.append(keys[i])
                for got, want in zip(group, sample_group(i), strict=True):  # complete, in order, with nothing lost
                    assert (got.prompt.uid, got.prompt.token_ids) == (want.prompt.uid, want.prompt.token_ids)
                    pairs = zip(got.prompt.images, want.prompt.images, strict=True)
                    assert all(torch.equal(a.pixel_values(), b.pixel_values()) and a.key == b.key for a, b in pairs)
                    assert vars(replace(got, prompt=None)) == vars(replace(want, prompt=None))
                trained_loads[data_rank, number] += rollouts_flops(group, costs)
        assert sorted(arrived) == chosen[number::minibatches]  # each once, in its own minibatch
    sampled_loads = np.zeros((data_world, minibatches))
    for place, key in enumerate(chosen):
        i = keys.index(key)
        sampled_loads[i % world // tp, place % minibatches] += rollouts_flops(sample_group(i), costs)
    # ranks wait for each other at the end of each minibatch
    before, after = (x.max(axis=0).sum() / x.mean(axis=0).sum() for x in (sampled_loads, trained_loads))
    assert results[0][1] == {"balance/sampled": pytest.approx(before), "balance/trained": pytest.approx(after)}
    if data_world > 1:
        assert after < 1.02 < 1.15 < before
        assert (trained_loads.max(axis=0) / trained_loads.mean(axis=0)).max() < 1.05  # each minibatch is balanced too


# ----------------------------------------------------------------------------------------------------------------------
# FLOPs

TEXT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
VISION = {"depth": 4, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
FAMILIES = {
    "Qwen2VL": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 3},
    "Qwen2_5_VL": {
        "hidden_size": 32,
        "intermediate_size": 72,
        "out_hidden_size": 64,
        "window_size": 112,
        "fullatt_block_indexes": [1, 3],
    },
    "Qwen3VL": {
        "hidden_size": 32,
        "intermediate_size": 72,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 2],
    },
}
N_TEXT, N_RESPONSE = 20, 13  # number of tokens after the images, and how many of these are trained on


def make_model(family, head_dim=16):
    text = TEXT | {"head_dim": head_dim} if family == "Qwen3VL" else TEXT
    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config=VISION | FAMILIES[family],
        image_token_id=150,
        video_token_id=151,
        vision_start_token_id=152,
        vision_end_token_id=153,
    )
    config._attn_implementation = "eager"  # plain matmuls: the counter does not know CPU's fused attention
    return config, getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()


def count_flops(config, model, grids):
    """Run a forward on images and some text; return its number of tokens, the patches of each image, all FLOPs that
    FlopCounterMode counts, and the FLOPs of linear and conv layers."""
    patches = [t * h * w for t, h, w in grids]
    row = [i for p in patches for i in [7] + [150] * (p // 4)]  # a text token separates two images
    ids = torch.tensor([row + [7] * N_TEXT])
    linear = [0]

    def count(module, args, out):
        linear[0] += (
            2 * module.weight.numel() * out.numel() // out.shape[-1 if isinstance(module, torch.nn.Linear) else 1]
        )

    hooks = [
        m.register_forward_hook(count) for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv3d)
    ]
    images = {}
    if grids:
        images = {"pixel_values": torch.randn(sum(patches), 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor(grids)}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, mm_token_type_ids=(ids == 150).int(), logits_to_keep=N_RESPONSE, use_cache=False, **images)
    for hook in hooks:
        hook.remove()
    return ids.shape[1], patches, counter.get_total_flops(), linear[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("grids", [[], [(1, 8, 8)], [(1, 16, 8), (1, 8, 24)]], ids=["text", "one", "two"])
def test_flops_equal_counted_flops(family, grids):
    config, model = make_model(family, head_dim=24)
    n, patches, total, linear = count_flops(config, model, grids)
    costs = flop_costs(config, vision=1.0)
    pair = costs.pair
    vision_pairs = sum(costs.image_pair * p * p + costs.window_pair * p * min(p, costs.window) for p in patches)
    ours = group_flops(costs, n, patches, [], N_RESPONSE)
    assert ours - pair * n * (n + 1) / 2 - vision_pairs == linear
    assert linear + pair * n * n + vision_pairs == total  # the counter counts the masked half of attention too


NEWER = {
    "Qwen3VLMoe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
    "Qwen3_5": {},
    "Qwen3_5Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 24,
    },
}
RECURRENT = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}


@pytest.mark.parametrize("family", NEWER)
def test_flops_of_experts_and_recurrences_equal_counted_flops(family):
    vision = {"hidden_size": 32, "intermediate_size": 72, "out_hidden_size": 64}
    config = getattr(transformers, f"{family}Config")(
        text_config=TEXT | {"head_dim": 16} | NEWER[family] | (RECURRENT if "3_5" in family else {}),
        vision_config=VISION | vision,
    )
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model, n = (
        getattr(transformers, f"{family}ForConditionalGeneration")(config).eval(),
        128,
    )  # whole chunks, because padding is computed too
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.full((1, n), 7), logits_to_keep=N_RESPONSE, use_cache=False)
    costs = flop_costs(config)
    ours = group_flops(costs, n, [], [], N_RESPONSE) + costs.pair * n * (n - 1) / 2
    if "3_5" in family:  # the counter leaves out triangular solves and counts the convolution's padding of 3 tokens
        ours += 2 * 2 * ((2 * 2 * 16 + 4 * 24) * 4 * 3 - 4 * 32 * (16 + 24) * n)
    assert counter.get_total_flops() == ours


def test_images_that_cut_windows_are_slightly_overestimated():
    config, model = make_model("Qwen2_5_VL")
    n, patches, total, _ = count_flops(config, model, [(1, 18, 22)])
    costs = flop_costs(config, vision=1.0)
    dense = group_flops(costs, n, patches, [], N_RESPONSE) + costs.pair * n * (n - 1) / 2
    assert 0.99 * total < dense < 1.1 * total


def test_a_group_counts_its_prompt_once_and_the_tower_by_its_share():
    config = make_model("Qwen3VL")[0]
    costs = flop_costs(config)
    single = group_flops(costs, 50 + 9, [64], [], 9)
    assert group_flops(costs, 50, [64], [9], 9) == pytest.approx(single, rel=1e-12)
    prefix = group_flops(costs, 50, [64], [], 0)
    assert group_flops(costs, 50, [64], [9] * 4, 4 * 9) == pytest.approx(prefix + 4 * (single - prefix), rel=1e-12)
    text = group_flops(costs, 59, [], [], 9)
    assert group_flops(flop_costs(config, vision=1.0), 59, [64], [], 9) - text == pytest.approx(3 * (single - text))
    assert group_flops(flop_costs(config, vision=0.0), 59, [64], [], 9) == text < single


def test_no_bin_is_empty_if_there_are_enough_items():
    """An empty micro-batch would end the run. In the first case the search alone leaves a bin empty."""
    cases = [([15, 15, 15, 14, 9, 35], 5, [3, 3, 3, 7, 9, 7], 10)]
    rng = random.Random(0)
    for _ in range(600):
        n = rng.randint(2, 9)
        cases.append(
            (
                [rng.choice([0, 1, 9, 15, 35]) for _ in range(n)],
                rng.randint(2, n),
                [rng.randint(1, 9) for _ in range(n)],
                10,
            )
        )
    n_solved = 0
    for costs, k, sizes, room in cases:
        try:
            bins = balance(costs, k, sizes=sizes, max_size=room)
        except ValueError:  # no partition within the bounds
            continue
        n_solved += 1
        assert all(bins) and sorted(i for b in bins for i in b) == list(range(len(costs)))
        assert all(sum(sizes[i] for i in b) <= room for b in bins) and all(b == sorted(b) for b in bins)
    assert n_solved > 200
