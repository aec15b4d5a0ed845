"""Loss weights and packing against slow references.   pytest tests/test_grpo.py"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from grpo import Sample, dense_mask, pack, plant, token_weight

# Loss weights --------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9))
def test_token_weights_add_up(lengths):
    total, n = sum(lengths), len(lengths)
    sums = {how: sum(k * token_weight(how, k, total, n, 50) for k in lengths) for how in grpo.LOSS_AGGREGATIONS}
    assert math.isclose(sums["token"], 1.0) and math.isclose(sums["seq"], 1.0)
    assert math.isclose(sums["const"], total / (50 * n))
    with pytest.raises(ValueError, match="--loss-agg 'mean'"):
        token_weight("mean", 1, 1, 1, 1)


# Packing --------------------------------------------------------------------------------------------------------------

IMAGE = 7  # the image token


def image(key, n):
    return SimpleNamespace(key=key, n_tokens=n)


@st.composite
def groups(draw):
    """Samples of several uids. Tokens come from a small alphabet, so that responses often begin alike; prompts hold 0 to
    2 pictures, and a second picture may differ between the samples of a uid, as in a later turn."""
    samples = []
    for u in range(draw(st.integers(1, 4))):
        text = st.lists(st.integers(0, 2), max_size=5)
        pictures = [image(f"{u}a", draw(st.integers(1, 3)))] if draw(st.booleans()) else []
        prompt = [5, *draw(text), *[IMAGE] * sum(p.n_tokens for p in pictures), 5]
        for _ in range(draw(st.integers(1, 5))):
            own, tokens = list(pictures), list(prompt)
            if draw(st.booleans()):
                own.append(image(f"{u}{draw(st.sampled_from('bc'))}", 2))
                tokens += [3, IMAGE, IMAGE, 4]
            response = draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
            scored = [False] * len(tokens) + [draw(st.booleans()) for _ in response]
            scored[draw(st.integers(len(tokens), len(scored) - 1))] = True
            samples.append(Sample(f"u{u}", tokens + response, scored, {}, own))
    for i, s in enumerate(samples):
        s.values["id"] = [1000.0 * i + t for t, scored in enumerate(s.scored) if scored]
    return samples


def expanded(sample):
    """Inputs with pictures by name: what a token's context is."""
    names = iter([p.key for p in sample.images for _ in range(p.n_tokens)])
    return [next(names) if t == IMAGE else t for t in sample.tokens]


def contexts(micro):
    """For each position, its visible tokens in order with pictures by name, by the dense mask alone."""
    names = iter([p.key for p in micro.images for _ in range(p.n_tokens)])
    tokens = [next(names) if t == IMAGE else t for t in micro.ids_T.tolist()]
    assert next(names, None) is None
    mask = dense_mask(micro.end_T)
    return [[tokens[k] for k in range(len(tokens)) if mask[q, k]] for q in range(len(tokens))]


@settings(max_examples=150, deadline=None)
@given(groups(), st.integers(22, 60))
def test_each_scored_token_has_just_its_context_once_within_the_cap(samples, cap):
    micros = pack(samples, cap, IMAGE)
    seen = []
    for m in micros:
        assert m.n_tokens <= cap
        context = contexts(m)
        for at, target, value in zip(m.src_K.tolist(), m.target_K.tolist(), m.values["id"].tolist(), strict=True):
            sample, t = samples[int(value // 1000)], int(value % 1000)
            assert context[at] == expanded(sample)[:t] and target == sample.tokens[t] and sample.scored[t]
            seen.append(value)
        # nothing is computed twice: no two positions of one tree have the same context
        uids = [next(s.uid for s in samples if expanded(s)[: len(c)] == c) for c in context]
        assert len({(u, *c) for u, c in zip(uids, context, strict=True)}) == m.n_tokens or len({s.uid for s in samples}) > 1
    assert sorted(seen) == sorted(v for s in samples for v in s.values["id"])


@settings(max_examples=40, deadline=None)
@given(groups(), st.integers(22, 60), st.integers(0, 6))
def test_all_ranks_can_be_given_the_same_number_of_micro_batches(samples, cap, extra):
    needs = []
    fewest = pack(samples, cap, IMAGE)
    more = pack(samples, cap, IMAGE, count=lambda n: needs.append(n) or n + extra)
    assert needs == [len(fewest)] and len(fewest) <= len(more) <= len(fewest) + extra
    assert sorted(v for m in more for v in m.values["id"].tolist()) == sorted(v for s in samples for v in s.values["id"])
    assert all(0 < m.n_tokens <= cap for m in more) and sum(m.n_tokens for m in fewest) <= sum(m.n_tokens for m in more)
    assert pack([], cap, IMAGE, count=lambda n: n + 2) == []


@settings(max_examples=60, deadline=None)
@given(groups())
def test_a_tree_is_as_small_as_a_trie(samples):
    one = [s for s in samples if s.uid == "u0"]
    prefixes = {tuple(expanded(s)[: t + 1]) for s in one for t in range(s.n_inputs)}
    micro = plant(one, IMAGE)
    assert micro.n_tokens == len(prefixes)
    for (start, before), context in zip(micro.runs, [contexts(micro)[start] for start, _ in micro.runs], strict=True):
        assert len(context) == 1 if before < 0 else len(context) == len(contexts(micro)[before]) + 1
        assert start == 0 or before < start


def test_prompt_is_computed_once_and_the_last_token_never():
    samples = [Sample("a", [1, 2, 3, *r], [False] * 3 + [True] * len(r), {}) for r in ([7, 8], [9])]
    m = plant(samples, IMAGE + 90)
    assert m.ids_T.tolist() == [1, 2, 3, 7] and m.end_T.tolist() == [4, 4, 4, 4]
    assert sorted(zip(m.src_K.tolist(), m.target_K.tolist(), strict=True)) == [(2, 7), (2, 9), (3, 8)]


def test_equal_pictures_are_shared_and_different_ones_are_not():
    def two(a, b):
        return [Sample("u", [1, IMAGE, IMAGE, 2, 3], [False] * 4 + [True], {}, [image(key, 2)]) for key in (a, b)]

    assert plant(two("p", "p"), IMAGE).n_tokens == 4 and plant(two("p", "q"), IMAGE).n_tokens == 7


def test_a_split_tree_repeats_its_trunk_and_keeps_the_cap():
    samples = [Sample("u", [1] * 10 + [20 + i] * 6, [False] * 10 + [True] * 6, {}) for i in range(6)]
    micros = pack(samples, 21, IMAGE)
    assert [m.n_tokens for m in micros] == [20, 20, 20] and all(m.ids_T.tolist().count(1) == 10 for m in micros)


@pytest.mark.parametrize("tokens,images,cap,match", [
    ([1] * 10 + [2] * 15, [], 20, r"prompt 'p' of 10 tokens with a response of 15 needs 24 tokens, over --micro-tokens 20"),
    ([1, IMAGE, 2], [], 20, r"'p': token 1 of 2 is an image token that none of its 0 pictures accounts for"),
    ([1, IMAGE, 2, 3], [image("x", 2)], 20, r"'p': picture 0 needs 2 image tokens at token 1 of 3, found 1"),
    ([1, 2, 3], [image("x", 2)], 20, r"picture 0 needs 2 image tokens at token 2 of 2, found 0"),
    ([1, IMAGE, IMAGE, IMAGE, 3], [image("x", 2)], 20, r"token 3 of 4 is an image token"),
])
def test_what_cannot_be_packed_names_the_sample_and_its_lengths(tokens, images, cap, match):
    scored = [t >= 10 or len(tokens) < 10 and t == len(tokens) - 1 for t in range(len(tokens))]
    with pytest.raises(ValueError, match=match):
        pack([Sample("p", tokens, scored, {}, images)], cap, IMAGE)


# --- engine and trainer disagree ------------------------------------------------------------------------------------------


def test_importance_weights_token_by_token():
    generator = torch.Generator().manual_seed(0)
    trainer = (-3 * torch.rand(200, generator=generator)).requires_grad_()
    engine = trainer.detach() + 0.5 * torch.randn(200, generator=generator)
    weight, capped = grpo.importance_weight(trainer, engine, 1.3)
    assert not weight.requires_grad
    for i in range(200):
        ratio = math.exp(trainer[i].item() - engine[i].item())
        assert weight[i].item() == pytest.approx(min(ratio, 1.3), rel=1e-5) and bool(capped[i]) == (ratio > 1.3)
    assert 0 < capped.sum() < 200


def test_sequences_are_kept_or_left_out_whole():
    generator = torch.Generator().manual_seed(1)
    sequence = torch.randint(0, 9, (120,), generator=generator).float() * 3  # interleaved, as in a packed micro-batch
    trainer = torch.randn(120, generator=generator)
    engine = trainer + 0.6 * torch.randn(120, generator=generator)
    keep = grpo.keep_sequences(trainer, engine, sequence, 0.8, 1.2)
    for s in set(sequence.tolist()):
        ratios = [math.exp(float(a) - float(b)) for a, b, c in zip(trainer, engine, sequence, strict=True) if float(c) == s]
        expected = 0.8 <= math.prod(ratios) ** (1 / len(ratios)) <= 1.2
        assert keep[sequence == s].tolist() == [expected] * len(ratios)
    assert 0 < keep.sum() < 120
    assert grpo.keep_sequences(trainer[:0], engine[:0], sequence[:0], 0.8, 1.2).shape == (0,)
