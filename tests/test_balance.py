"""Balancing and its cost model.   pytest tests/test_balance.py"""

import itertools
import random
import time
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from grpo import balance, flop_rates, sequence_flops, tree_flops

ROOT = Path(__file__).parent.parent

COSTS = st.lists(st.floats(0, 1e15, allow_subnormal=False) | st.integers(0, 9).map(float), max_size=60)
ITEMS = st.lists(st.tuples(st.floats(0, 1e15), st.integers(0, 500)), min_size=1, max_size=60)


def top(costs, bins):
    return max(sum(costs[i] for i in b) for b in bins)


def check(costs, k, bins):
    assert len(bins) == k and sorted(i for b in bins for i in b) == list(range(len(costs)))
    assert all(b == sorted(b) for b in bins)


@settings(max_examples=150, deadline=None)
@given(COSTS, st.integers(1, 20))
def test_every_index_once_and_no_worse_than_greedy_promises(costs, k):
    bins = balance(costs, k)
    check(costs, k, bins)
    assert bins == balance(costs, k)
    if costs:  # what any greedy start promises
        assert top(costs, bins) <= (sum(costs) / k + max(costs)) * (1 + 1e-9)


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
    check(costs, k, bins)
    assert top(costs, bins) <= cap and top(sizes, bins) <= max_size


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), min_size=2, max_size=40), st.integers(2, 6))
def test_roomy_bounds_always_succeed(items, k):
    costs, sizes = [c for c, _ in items], [s for _, s in items]
    max_size = sum(sizes) // k + max(sizes)  # greedy cannot fail: some bin is at or below the mean
    assert top(sizes, balance(costs, k, None, sizes, max_size)) <= max_size


@pytest.mark.parametrize(("kwargs", "words"), [
    ({"costs": [1, 7, 2], "k": 2, "cap": 5}, ("item 1", "cost 7", "cap 5", "raise")),
    ({"costs": [1, 1], "k": 2, "sizes": [3, 9], "max_size": 8}, ("item 1", "size 9", "max_size 8")),
    ({"costs": [3, 3, 3], "k": 2, "cap": 5}, ("3 items", "cost 9", "2 bins", "<= 5", "more bins")),
    ({"costs": [1, float("nan")], "k": 2}, ("item 1", "nan")),
    ({"costs": [1, -1], "k": 2}, ("item 1", "-1")),
    ({"costs": [1], "k": 0}, ("k=0",)),
    ({"costs": [1], "k": 1, "sizes": [1]}, ("max_size",)),
    ({"costs": [1, 2], "k": 1, "sizes": [1], "max_size": 3}, ("2 costs", "1 sizes")),
])
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
        loads = ([sum(c for c, b in zip(costs, where, strict=True) if b == i) for i in range(k)]
                 for where in itertools.product(range(k), repeat=n))
        best, ours = min(max(load) for load in loads), top(costs, balance(costs, k))
        assert ours <= 1.03 * best, (costs, k)
        equal += ours == best
    assert equal >= 57


def test_tight_sizes_are_met_where_costs_disagree():
    # The costly items are small: by cost alone the large ones would share a bin.
    costs, sizes = [9, 9, 1, 1, 1, 1], [1, 1, 8, 8, 4, 4]
    bins = balance(costs, 2, None, sizes, 13)
    assert top(sizes, bins) <= 13 and top(costs, bins) == 11


@pytest.mark.parametrize(("n", "k", "most"), [(4096, 64, 1e-3), (4096, 512, 5e-3), (512, 64, 2e-3)])
def test_imbalance_and_time_on_geo3k_like_lengths(n, k, most):
    import importlib.util

    spec = importlib.util.spec_from_file_location("benchmark_balance", ROOT / "benchmarks" / "balance.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    for seed in range(3):
        tokens, flops = benchmark.geo3k_like(n, seed)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            bins = balance(flops, k)
            seconds.append(time.perf_counter() - start)
        assert benchmark.imbalance(flops, bins) <= most and min(seconds) <= 4 * 0.060
    room = int(1.05 * max(sum(tokens) / k, max(tokens)))
    bins = balance(flops, k, sizes=tokens, max_size=room)
    assert top(tokens, bins) <= room and benchmark.imbalance(flops, bins) <= most
    assert benchmark.imbalance(flops, benchmark.karmarkar_karp(flops, 8)) <= 1e-3


# ----------------------------------------------------------------------------------------------------------------------
# FLOPs

TEXT = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
VISION = {"depth": 4, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
FAMILIES = {
    "Qwen2VL": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 3},
    "Qwen2_5_VL": {"hidden_size": 32, "intermediate_size": 72, "out_hidden_size": 64, "window_size": 112, "fullatt_block_indexes": [1, 3]},
    "Qwen3VL": {"hidden_size": 32, "intermediate_size": 72, "out_hidden_size": 64, "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 2]},
}
N_TEXT, N_RESPONSE = 20, 13  # tokens after the pictures, and those of them that are scored


def make(family, head_dim=16):
    text = TEXT | {"head_dim": head_dim} if family == "Qwen3VL" else TEXT
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=VISION | FAMILIES[family], image_token_id=150, video_token_id=151, vision_start_token_id=152,
        vision_end_token_id=153)
    config._attn_implementation = "eager"  # plain matmuls: the counter does not know CPU's fused attention
    return config, getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()


def counted(config, model, grids):
    """FLOPs of a forward on these pictures and some text: by FlopCounterMode in all, and of its linear and conv layers."""
    patches = [t * h * w for t, h, w in grids]
    row = [i for p in patches for i in [7] + [150] * (p // 4)]  # a token between: pictures are told apart by runs
    ids = torch.tensor([row + [7] * N_TEXT])
    linear = [0]

    def count(module, args, out):
        linear[0] += 2 * module.weight.numel() * out.numel() // out.shape[-1 if isinstance(module, torch.nn.Linear) else 1]

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv3d)]
    pictures = {}
    if grids:
        pictures = {"pixel_values": torch.randn(sum(patches), 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor(grids)}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, mm_token_type_ids=(ids == 150).int(), logits_to_keep=N_RESPONSE, use_cache=False, **pictures)
    for hook in hooks:
        hook.remove()
    return ids.shape[1], patches, counter.get_total_flops(), linear[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("grids", [[], [(1, 8, 8)], [(1, 16, 8), (1, 8, 24)]], ids=["text", "one", "two"])
def test_flops_equal_those_counted(family, grids):
    config, model = make(family, head_dim=24)
    n, patches, total, linear = counted(config, model, grids)
    _, pair, _, _, whole, windowed, window = flop_rates(config)
    vision_pairs = sum(whole * p * p + windowed * p * min(p, window) for p in patches)
    ours = sequence_flops(config, n, patches, N_RESPONSE, train_vision=True)
    assert ours - pair * n * (n + 1) / 2 - vision_pairs == linear
    assert linear + pair * n * n + vision_pairs == total  # the counter sees the masked half of the square too
    assert sequence_flops(flop_rates(config), n, patches, N_RESPONSE, train_vision=True) == ours


NEWER = {
    "Qwen3VLMoe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
    "Qwen3_5": {},
    "Qwen3_5Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24},
}
RECURRENT = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_num_key_heads": 2,
             "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24}


@pytest.mark.parametrize("family", NEWER)
def test_flops_of_experts_and_recurrences_equal_those_counted(family):
    vision = {"hidden_size": 32, "intermediate_size": 72, "out_hidden_size": 64}
    config = getattr(transformers, f"{family}Config")(
        text_config=TEXT | {"head_dim": 16} | NEWER[family] | (RECURRENT if "3_5" in family else {}), vision_config=VISION | vision)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model, n = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval(), 128  # whole chunks: padding is computed too
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.full((1, n), 7), logits_to_keep=N_RESPONSE, use_cache=False)
    ours = sequence_flops(config, n, [], N_RESPONSE) + flop_rates(config)[1] * n * (n - 1) / 2
    if "3_5" in family:  # the counter does not know triangular systems, and sees the convolution's padding of 3 tokens
        ours += 2 * 2 * ((2 * 2 * 16 + 4 * 24) * 4 * 3 - 4 * 32 * (16 + 24) * n)
    assert counter.get_total_flops() == ours


def test_pictures_that_cut_windows_count_slightly_too_much():
    config, model = make("Qwen2_5_VL")
    n, patches, total, _ = counted(config, model, [(1, 18, 22)])
    pair = flop_rates(config)[1]
    dense = sequence_flops(config, n, patches, N_RESPONSE, train_vision=True) + pair * n * (n - 1) / 2
    assert 0.99 * total < dense < 1.1 * total


def test_a_tree_counts_its_prompt_once():
    config = make("Qwen3VL")[0]
    one = sequence_flops(config, 50 + 9, [64], 9)
    assert tree_flops(config, 50, [64], [9], [9]) == pytest.approx(one, rel=1e-12)
    trunk = sequence_flops(config, 50, [64], 0)
    assert tree_flops(config, 50, [64], [9] * 4, [9] * 4) == pytest.approx(trunk + 4 * (one - trunk), rel=1e-12)
    text = sequence_flops(config, 59, [], 9)
    assert sequence_flops(config, 59, [64], 9, train_vision=True) - text == pytest.approx(3 * (one - text))


def test_no_bin_is_empty_while_there_are_items_for_all():
    """An empty micro-batch would end the run. The first case is one that the search alone leaves with an empty bin."""
    cases = [([15, 15, 15, 14, 9, 35], 5, [3, 3, 3, 7, 9, 7], 10)]
    rng = random.Random(0)
    for _ in range(3000):
        n = rng.randint(2, 9)
        cases.append(([rng.choice([0, 1, 9, 15, 35]) for _ in range(n)], rng.randint(2, n), [rng.randint(1, 9) for _ in range(n)], 10))
    found = 0
    for costs, k, sizes, room in cases:
        try:
            bins = balance(costs, k, sizes=sizes, max_size=room)
        except ValueError:  # no partition within the bounds
            continue
        found += 1
        assert all(bins) and sorted(i for b in bins for i in b) == list(range(len(costs)))
        assert all(sum(sizes[i] for i in b) <= room for b in bins) and all(b == sorted(b) for b in bins)
    assert found > 1000
