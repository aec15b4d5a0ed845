"""Packing against slow references: each trained token sees its context, and nothing is computed twice.

pytest tests/test_packing.py
"""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import dense_mask, written
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import UserError
from layers.attention import PackedAttention
from packing import FlopCosts, Packer, TokenBatch, TrainBatch, make_token_batch
from rollout import Prompt, Rollout, TurnSequence

IMAGE = 7  # the image token


def image(key, n):
    fake = SimpleNamespace(key=key, n_tokens=n, grid_thw=(1, 2, 2 * n))
    fake.parts = [fake]
    return fake


@st.composite
def groups(draw):
    """Draw rollouts of several prompts, some with several turns. Tokens come from a small alphabet, so that responses
    often begin the same. A prompt has 0 or 1 images; a later image may differ between the samples of a prompt."""
    rollouts = []
    for u in range(draw(st.integers(1, 4))):
        text = draw(st.lists(st.integers(0, 2), max_size=5))
        first = [image(f"{u}a", draw(st.integers(1, 3)))] if draw(st.booleans()) else []
        ids = [5, *text, *[IMAGE] * sum(x.n_tokens for x in first), 5]
        for i in range(draw(st.integers(1, 5))):
            images = list(first)
            response: list[int] = []
            mask: list[bool] = []
            if draw(st.booleans()):
                images.append(image(f"{u}{draw(st.sampled_from('bc'))}", 2))
                response = [3, IMAGE, IMAGE, 4]
                mask = [False] * 4
            answer = draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
            response = response + answer
            mask = mask + [draw(st.booleans()) for _ in answer]
            mask[draw(st.integers(len(mask) - len(answer), len(mask) - 1))] = True
            prompt = Prompt(f"u{u}", ids, images, None, [])
            rollouts.append(Rollout(prompt, i, response, mask, [-1.0] * sum(mask), "stop", ""))
    return rollouts


def sequence(rollout):
    return rollout.prompt.token_ids + rollout.response


def trained_positions(rollout):
    """Return the positions in the sequence of the tokens that the policy produced."""
    return [len(rollout.prompt.token_ids) + t for t, produced in enumerate(rollout.response_mask) if produced]


def name_images(ids, images):
    """Replace each image token by its image's name. Contexts are compared in this form."""
    names = iter([x.key for x in images for _ in range(x.n_tokens)])
    named = [next(names) if t == IMAGE else t for t in ids]
    assert next(names, None) is None
    return named


def rows(rollouts):
    """Return (rollout, position in its sequence) for each row of the TokenBatch, in the order of its rows."""
    return [(r, t) for r in rollouts for t in trained_positions(r)]


def contexts(micro):
    """Return the visible tokens of each position in order, from the dense mask alone."""
    tokens = name_images(micro.ids_T.tolist(), micro.images)
    mask = dense_mask(micro.subtree_end_T)
    return [[tokens[k] for k in range(len(tokens)) if mask[q, k]] for q in range(len(tokens))]


@settings(max_examples=80, deadline=None)
@given(groups(), st.integers(22, 60), st.booleans())
def test_each_trained_token_sees_just_its_context_once_within_the_cap(rollouts, cap, share):
    micros = Packer(cap, IMAGE, share=share).pack(rollouts)
    all_rows = rows(rollouts)
    packed = []
    micro_of_rollout = {}
    for number, m in enumerate(micros):
        assert 0 < m.n_tokens <= cap
        context = contexts(m)
        for position, target, row in zip(
            m.hidden_index_K.tolist(), m.target_K.tolist(), m.token_index_K.tolist(), strict=True
        ):
            rollout, t = all_rows[row]
            assert context[position] == name_images(sequence(rollout), rollout.prompt.images)[:t]
            assert target == sequence(rollout)[t]
            assert micro_of_rollout.setdefault(id(rollout), number) == number, "a rollout is split over micro-batches"
            packed.append(row)
        if share and len({r.prompt.uid for r, _ in (all_rows[row] for row in m.token_index_K.tolist())}) == 1:
            assert len({tuple(c) for c in context}) == m.n_tokens, "a token is computed twice"
        if not share:
            inputs = {id(r): max(trained_positions(r)) for r, _ in (all_rows[row] for row in m.token_index_K.tolist())}
            assert m.n_tokens == sum(inputs.values()), "responses share a prompt"
            assert all(before < 0 for _, _, before in m.segments)
    assert sorted(packed) == list(range(len(all_rows)))


@settings(max_examples=60, deadline=None)
@given(groups(), st.integers(22, 60), st.data())
def test_chosen_rollouts_keep_their_row_numbers(rollouts, cap, data):
    """Rows are numbered over all rollouts, including those that are not packed."""
    chosen = data.draw(st.lists(st.sampled_from(range(len(rollouts))), unique=True))
    micros = Packer(cap, IMAGE).pack(rollouts, chosen)
    expected = [row for row, (r, _) in enumerate(rows(rollouts)) if any(r is rollouts[i] for i in chosen)]
    packed = [row for m in micros for row in m.token_index_K.tolist()]
    assert sorted(packed) == expected
    for m in micros:
        tokens = make_token_batch(rollouts)[m.token_index_K]
        assert len(tokens) == len(m.target_K) == len(m.hidden_index_K)
        rollout_of_row = [rows(rollouts)[row][0] for row in m.token_index_K.tolist()]
        assert [rollouts[i] for i in tokens.rollout.tolist()] == rollout_of_row
    batch = TrainBatch(rollouts, make_token_batch(rollouts), [micros, []])
    assert batch.uids(0) == sorted({rollouts[i].prompt.uid for i in chosen}) and batch.uids(1) == []


@settings(max_examples=40, deadline=None)
@given(groups(), st.integers(22, 60), st.integers(0, 6), st.booleans())
def test_all_ranks_can_get_the_same_number_of_micro_batches(rollouts, cap, extra, by_flops):
    """A rank with too little to pack adds micro-batches of a single token that train nothing."""
    reported = []
    costs = FlopCosts(10.0, 0.1, 3.0, 1.0, 0.1, 0.0, 1) if by_flops else None
    packer = Packer(cap, IMAGE, costs)
    fewest = packer.pack(rollouts)
    padded = packer.pack(rollouts, reduce_max=lambda n: reported.append(n) or n + extra)
    assert reported == [len(fewest)] and len(padded) == len(fewest) + extra
    for micros in (fewest, padded):
        packed = torch.cat([m.token_index_K for m in micros])
        assert sorted(packed.tolist()) == list(range(len(rows(rollouts))))
        assert all(0 < m.n_tokens <= cap for m in micros)
    for m in padded:
        assert len(m.target_K) or (m.ids_T.tolist(), m.subtree_end_T.tolist(), m.segments, m.images) == (
            [0],
            [1],
            [(0, 1, -1)],
            [],
        )
    assert len(Packer(cap, IMAGE).pack([], reduce_max=lambda n: n + 2)) == 2 and Packer(cap, IMAGE).pack([]) == []


@settings(max_examples=60, deadline=None)
@given(groups())
def test_a_packed_group_is_as_small_as_its_trie(rollouts):
    group = [r for r in rollouts if r.prompt.uid == "u0"]
    prefixes = set()
    for r in group:
        prefixes |= {
            tuple(name_images(sequence(r), r.prompt.images)[: t + 1]) for t in range(max(trained_positions(r)))
        }
    [micro] = Packer(1000, IMAGE).pack(group)
    assert micro.n_tokens == len(prefixes)
    context = contexts(micro)
    for start, _, before in micro.segments:
        assert context[start][:-1] == (context[before] if before >= 0 else [])
        assert start == 0 or before < start


@settings(max_examples=60, deadline=None)
@given(groups())
def test_pieces_and_prefixes_equal_the_dense_mask(rollouts):
    """`pieces` and `prefixes`, which attention and recurrent layers use, describe the same mask as dense_mask."""
    [micro] = Packer(1000, IMAGE).pack(rollouts)
    plan = PackedAttention("sdpa", micro)
    mask = dense_mask(micro.subtree_end_T)
    starts = [0]
    for length in plan.pieces:
        starts.append(starts[-1] + length)
    assert starts[-1] == micro.n_tokens
    for (start, stop, _), (prefix, n_own) in zip(micro.segments, plan.prefixes, strict=True):
        keys = [t for piece in prefix for t in range(starts[piece], starts[piece + 1])]
        assert [t for piece in prefix[-n_own:] for t in range(starts[piece], starts[piece + 1])] == list(
            range(start, stop)
        )
        for query in range(start, stop):
            assert mask[query].nonzero()[:, 0].tolist() == keys[: keys.index(query) + 1]


def test_prompt_is_computed_once_and_the_last_token_never():
    [m] = Packer(99, IMAGE).pack([written("a", [1, 2, 3], r) for r in ([17, 8], [9])])
    assert m.ids_T.tolist() == [1, 2, 3, 17] and m.subtree_end_T.tolist() == [4, 4, 4, 4]
    assert sorted(zip(m.hidden_index_K.tolist(), m.target_K.tolist(), strict=True)) == [(2, 9), (2, 17), (3, 8)]


def test_equal_images_are_shared_and_different_ones_are_not():
    def pack_two(a, b):
        [m] = Packer(99, IMAGE).pack([written("u", [1, IMAGE, IMAGE, 2], [3], [image(key, 2)]) for key in (a, b)])
        return m.n_tokens, [x.key for x in m.images]

    assert pack_two("p", "p") == (4, ["p"])
    assert pack_two("p", "q")[0] == 7 and sorted(pack_two("p", "q")[1]) == ["p", "q"]


def test_a_split_group_repeats_its_prompt_and_keeps_the_cap():
    rollouts = [written("u", [1] * 10, [20 + i] * 6) for i in range(6)]
    micros = Packer(21, IMAGE).pack(rollouts)
    assert [m.n_tokens for m in micros] == [20, 20, 20] and all(m.ids_T.tolist().count(1) == 10 for m in micros)


def test_equal_prompts_stay_separate_without_sharing():
    """Flash attention needs this also within a micro-batch."""
    rollouts = [written("u", [1] * 10, [2, 3]) for _ in range(3)]
    [m] = Packer(99, IMAGE, share=False).pack(rollouts)
    assert m.n_tokens == 33 and m.segments == [(0, 11, -1), (11, 22, -1), (22, 33, -1)]


@pytest.mark.parametrize("prompt,response,images,error,match", [
    ([1] * 10, [2] * 15, [], UserError,
     r"prompt 'p' of 10 tokens and its response need 24, more than --micro-tokens 20"),
    ([1, IMAGE], [2], [], ValueError, r"'p' has 1 image tokens, and its images need \[\]; was a placeholder sampled"),
    ([1, IMAGE, 2], [3], [image("x", 2)], ValueError, r"'p' has 1 image tokens, and its images need \[2\]"),
    ([1, 2], [3], [image("x", 2)], ValueError, r"0 image tokens, and its images need \[2\]"),
    ([1, IMAGE, IMAGE, IMAGE], [3], [image("x", 2)], ValueError, r"3 image tokens, and its images need \[2\]"),
    ([1, IMAGE, 2, IMAGE], [3], [image("x", 2)], ValueError, r"2 image tokens, .* need \[2\], but .* not contiguous"),
    ([IMAGE, 1, IMAGE, IMAGE], [3], [image("x", 2), image("y", 1)], ValueError, "not contiguous"),
])  # fmt: skip
def test_errors_name_the_rollout_and_its_lengths(prompt, response, images, error, match):
    with pytest.raises(error, match=match):
        Packer(20, IMAGE).pack([written("p", prompt, response, images)])


def test_turns_of_a_rollout_stay_together_and_a_batch_knows_if_they_do_not():
    """Two episodes have two separate turns each. Sorting by shared prefixes would interleave their turns."""
    rollouts = []
    for i in range(2):
        first, second = TurnSequence([5, 1, i, 2], 2, 0), TurnSequence([5, 2, 3, 3, i], 1, 0)
        prompt = Prompt("u", [5, 1], [], None, [])
        response, mask = [i, 2, 3, 3, i], [True, True, False, False, True]
        rollouts.append(Rollout(prompt, i, response, mask, [-1.0] * 3, "stop", separate_turns=[first, second]))
    for cap, n_micros in ((99, 1), (5, 2)):
        micros = Packer(cap, IMAGE).pack(rollouts)
        batch = TrainBatch(rollouts, make_token_batch(rollouts), [micros])
        assert len(micros) == n_micros and batch.splits_rollouts(0) == (n_micros > 1)
        assert all((m.token_index_K.diff() > 0).all() for m in micros) and batch.rows(0).tolist() == [*range(6)]
        for m in micros:  # targets and contexts moved with their rows
            context = contexts(m)
            for position, target, row in zip(
                m.hidden_index_K.tolist(), m.target_K.tolist(), m.token_index_K.tolist(), strict=True
            ):
                turn = rollouts[row // 3].separate_turns[row % 3 // 2]
                end = len(turn.ids) - (row % 3 == 0)
                assert [*context[position], target] == turn.ids[:end]


# --- The columns ------------------------------------------------------------------------------------------------------


def test_columns_have_one_row_per_trained_token():
    a = written("a", [1, 2], [3, 4, 5], [image("x", 1)])
    b = Rollout(written("b", [1], []).prompt, 1, [6, 7, 8], [True, False, True], [-0.5, -0.25], "length", "")
    a.images, b.images = [image("y", 1)], [image("y", 1), image("z", 1)]  # images in turns of an environment
    a.logprobs = [-1.0, -2.0, -3.0]
    tokens = make_token_batch([a, b], [0.5, 0.0])
    assert len(tokens) == 5 and tokens.rollout.tolist() == [0, 0, 0, 1, 1] and tokens.rollout.dtype == torch.int64
    assert tokens.rollout_logps.tolist() == [-1.0, -2.0, -3.0, -0.5, -0.25]
    assert tokens.n_images.tolist() == [2, 2, 2, 2, 2] and tokens.weights.tolist() == [0.5, 0.5, 0.5, 0, 0]
    assert make_token_batch([a]).weights is None and len(make_token_batch([])) == 0


def test_a_column_that_was_not_computed_cannot_be_used():
    tokens = make_token_batch([written("a", [1], [2, 3, 4])])
    part = tokens[torch.tensor([2, 0])]
    assert part.old_logps is None and part.rollout.tolist() == [0, 0]
    with pytest.raises(TypeError):
        part.old_logps - part.rollout_logps
    with pytest.raises(AttributeError):
        part.advantage = torch.zeros(2)  # __slots__ refuse a misspelt name
    with pytest.raises(AttributeError):
        part.fill(torch.arange(2), advantage=torch.zeros(2))
    with pytest.raises(TypeError):
        TokenBatch(tokens.rollout, tokens.rollout_logps, tokens.n_images, old_logp=None)


def test_a_column_is_filled_in_parts_and_nan_elsewhere():
    tokens = make_token_batch([written("a", [1], [2, 3, 4, 5])])
    tokens.fill(torch.tensor([3, 1]), values=torch.tensor([30.0, 10.0], dtype=torch.bfloat16))
    tokens.fill(torch.tensor([0]), values=torch.tensor([5.0]), ref_logps=None)
    values = tokens.values.tolist()
    assert values[:2] == [5.0, 10.0] and math.isnan(values[2]) and values[3] == 30.0
    assert tokens.ref_logps is None and tokens.values.dtype == torch.float32
