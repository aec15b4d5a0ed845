"""HFEngine against transformers' generate and against full recomputation.   pytest tests/test_rollout.py"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES, written

import engines.hf
import model as M
from engines.hf import DecodeBatch, HFEngine, PromptCache, compute_logits, sample_tokens
from engines.launch import make_engine, size_limits
from errors import UserError
from packing import Packer
from rollout import ExampleList, SamplingParams, filter_prompts, make_prompts
from tasks.shapes import encode_png
from utils import DistContext

CPU = torch.device("cpu")


def example(uid, content, images):
    messages = [{"role": "user", "content": content}]
    fields = {"ground_truth": "x", "extra": {}, "data_source": "shapes"}
    sizes = [image.size for image in images]
    return SimpleNamespace(
        uid=uid, messages=messages, images=[encode_png(i) for i in images], image_sizes=sizes, videos=[],
        video_sizes=[], **fields,
    )


def ids(rollouts):
    """Return the token ids of each rollout's prompt and response."""
    return [r.prompt.token_ids + r.response for r in rollouts]


def places(rollouts):
    return [(r.prompt.uid, r.sample_index) for r in rollouts]


def assert_same(ours, theirs, greedy=False):
    """Assert that two engines, or two batches of other compositions, sampled the same tokens with the same
    log-probabilities, up to rounding.

    Rounding changes a token if its random number falls on the border between two tokens (about once in 10,000 tokens),
    or, if sampling is greedy, if two tokens are equally likely. The rest of the response is then another one. So one
    response in ten, but at least one, may differ, after tokens with the same log-probabilities.
    """
    assert places(ours) == places(theirs) and len(ours) > 2
    differing = 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.prompt.token_ids == b.prompt.token_ids
        pairs = enumerate(zip(a.response, b.response, strict=False))
        n = next((i for i, (x, y) in pairs if x != y), min(len(a.response), len(b.response))) + greedy
        torch.testing.assert_close(torch.tensor(a.logprobs[:n]), torch.tensor(b.logprobs[:n]), rtol=0, atol=1e-5)
        if a.response == b.response:
            assert (a.finish_reason, a.text) == (b.finish_reason, b.text)
        differing += a.response != b.response
    assert differing <= max(1, len(ours) // 10)


@torch.no_grad()
def trainer_logprobs(policy, r, temperature=1.0):
    """Return the log-probabilities (K,) that the trainer computes for a response, alone in its micro-batch."""
    [micro] = Packer(10_000, policy.image_token_id).pack([r])
    return policy(micro, temperature).logp_K


@pytest.fixture
def examples(picture):
    return [example("one", "<image>What is it?", [picture(84, 84, 1)]),
            example("none", "Tell me something long and odd, would you please?", []),
            example("two", "Compare <image> with <image>.", [picture(60, 97, 2), picture(130, 56, 3)])]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(family, loaded, examples):
    hf, processor = loaded[family]
    engine = HFEngine(hf, processor, CPU)
    prompts = make_prompts(examples, processor)
    ours = engine.generate(prompts, 1, SamplingParams(12, temperature=0.0))
    for prompt, rollout in zip(prompts, ours, strict=True):
        ids_1T = torch.tensor([prompt.token_ids])
        kwargs = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": engine.banned.tolist()}
        if prompt.images:
            kwargs["pixel_values"] = torch.cat([image.pixel_values() for image in prompt.images])
            kwargs["image_grid_thw"] = torch.tensor([image.grid_thw for image in prompt.images])
            kwargs["mm_token_type_ids"] = (ids_1T == processor.image_token_id).int()
        hf.model.rope_deltas = None
        mask = torch.ones_like(ids_1T)
        kwargs |= {"output_scores": True, "return_dict_in_generate": True}
        theirs = hf.generate(input_ids=ids_1T, attention_mask=mask, eos_token_id=processor.eos_ids, **kwargs)
        best, second = torch.cat(theirs.scores).topk(2).values.unbind(1)
        assert (best - second).min() > 1e-5  # rounding is ten times smaller, so it cannot change a token
        assert ids([rollout]) == theirs.sequences.tolist() and rollout.prompt is prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_logprobs_equal_the_trainers(family, loaded, examples):
    hf, processor = loaded[family]
    engine, policy = HFEngine(hf, processor, CPU), M.Policy(hf, processor)
    for r in engine.generate(make_prompts(examples, processor), 4, SamplingParams(9, temperature=0.8, seed=3)):
        torch.testing.assert_close(torch.tensor(r.logprobs), trainer_logprobs(policy, r, 0.8), rtol=0, atol=5e-6)


def test_a_sample_does_not_depend_on_its_batch(loaded, examples):
    hf, processor = loaded["qwen2_5_vl"]
    prompts = make_prompts(examples, processor)
    sampling = SamplingParams(10, seed=5)
    together = HFEngine(hf, processor, CPU).generate(prompts, 3, sampling)
    engine = HFEngine(hf, processor, CPU)
    engine.max_rows = 3
    few_rows = engine.generate(prompts, 3, sampling)
    alone = HFEngine(hf, processor, CPU).generate(prompts[2:], 3, sampling)
    assert_same(together, few_rows)
    assert_same(together[6:], alone)
    assert places(together) == list(itertools.product(["one", "none", "two"], range(3)))
    assert len({tuple(r.response) for r in together[:3]}) > 1  # samples of a group differ
    other = HFEngine(hf, processor, CPU).generate(prompts, 3, SamplingParams(10, seed=6))
    assert [r.response for r in other] != [r.response for r in together]


def test_each_image_is_encoded_once_per_group(loaded, examples, monkeypatch):
    hf, processor = loaded["qwen2_5_vl"]
    calls = []
    original = hf.model.get_image_features

    def counted(pixels, grids, **kwargs):
        calls.append(len(grids))
        return original(pixels, grids, **kwargs)

    monkeypatch.setattr(hf.model, "get_image_features", counted)
    HFEngine(hf, processor, CPU).generate(make_prompts(examples, processor), 8, SamplingParams(3))
    assert calls == [3]  # three images for 24 rollouts


def test_finished_rows_leave_the_batch(loaded, examples, monkeypatch):
    hf, processor = loaded["qwen2_5_vl"]
    engine = HFEngine(hf, processor, CPU)
    first = engine.generate(make_prompts(examples, processor), 8, SamplingParams(6, seed=1))
    # end tokens are now those that some rows sampled second and none first, so that rows end at different times
    ends = sorted({r.response[1] for r in first[:8]} - {r.response[0] for r in first})
    monkeypatch.setattr(processor, "eos_ids", ends)
    engine = HFEngine(hf, processor, CPU)
    rows = []
    original = type(hf.model.language_model).forward

    def counted(self, *args, **kwargs):
        rows.append(len(kwargs["inputs_embeds"]))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(hf.model.language_model), "forward", counted)
    second = engine.generate(make_prompts(examples, processor), 8, SamplingParams(6, seed=1))
    assert rows[0] == 3 and rows[1] == 24 and rows[-1] < 24 and sorted(rows[1:], reverse=True) == rows[1:]
    cut = []
    for a, b in zip(first, second, strict=True):
        n = next((i + 1 for i, t in enumerate(a.response) if t in ends), None)
        expected = "length" if n is None else "stop"
        cut.append(replace(a, response=a.response[:n], logprobs=a.logprobs[:n], finish_reason=expected, text=b.text))
        assert len(b.logprobs) == len(b.response_mask) == len(b.response) and all(b.response_mask)
    assert_same(cut, second)
    assert {r.finish_reason for r in second} == {"stop", "length"}


@pytest.mark.parametrize("interrupted", [False, True])
def test_each_rollout_is_reported_once_and_as_soon_as_it_ends(interrupted, loaded, examples, monkeypatch):
    hf, processor = loaded["qwen2_5_vl"]
    prompts, sampling = make_prompts(examples, processor), SamplingParams(6, seed=1)
    first = HFEngine(hf, processor, CPU).generate(prompts, 8, sampling)
    ends = sorted({r.response[1] for r in first[:8]} - {r.response[0] for r in first})
    monkeypatch.setattr(processor, "eos_ids", ends)  # some rows end at their second token, none at their first
    steps, reported = [], []  # one entry per decoding step; (rollout, number of decoding steps so far)
    engine = HFEngine(hf, processor, CPU, should_stop=lambda: interrupted and len(steps) >= 3)
    engine.max_rows = 16  # two of the three prompts together, then the third
    uninterrupted = engine.generate(prompts, 8, sampling)
    original = engines.hf.sample_tokens
    monkeypatch.setattr(engines.hf, "sample_tokens", lambda *args: steps.append(1) or original(*args))
    rollouts = engine.generate(prompts, 8, sampling, lambda r: reported.append((r, len(steps))))
    assert sorted(id(r) for r, _ in reported) == sorted(map(id, rollouts)) and len(set(map(id, rollouts))) == 24
    assert places(rollouts) == list(itertools.product(["one", "none", "two"], range(8)))
    n_before = 0
    for together in (reported[:16], reported[16:]):
        assert [len(r.response) for r, _ in together] == [n_steps - n_before for _, n_steps in together]
        n_before = together[-1][1]
    lengths = [len(r.response) for r in rollouts]
    assert set(lengths) == ({1, 2, 3} if interrupted else {len(r.response) for r in uninterrupted})
    for r, complete in zip(rollouts, uninterrupted, strict=True):
        text_ids = r.response[:-1] if r.finish_reason == "stop" else r.response
        assert r.response == complete.response[: len(r.response)] and r.text == processor.tokenizer.decode(text_ids)
        assert interrupted or vars(r) == vars(complete)


def test_banned_tokens_are_never_sampled(loaded, examples):
    hf, processor = loaded["qwen2_5_vl"]
    engine = HFEngine(hf, processor, CPU)
    head = hf.get_output_embeddings().weight
    original = head.detach().clone()
    try:
        with torch.no_grad():  # make every banned token overwhelmingly likely
            head[engine.banned] = 50 * head.abs().max() * torch.sign(torch.randn(1, head.shape[1]))
        rollouts = engine.generate(make_prompts(examples, processor), 4, SamplingParams(20))
    finally:
        with torch.no_grad():
            head.copy_(original)
    sampled = set(itertools.chain.from_iterable(r.response for r in rollouts))
    assert not sampled & set(engine.banned.tolist())


def test_sampling_follows_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    n = 40000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    for temperature, top_p in [(1.0, 1.0), (0.5, 1.0), (1.0, 0.8)]:
        p = (logits.double() / temperature).softmax(0)
        if top_p < 1:  # the smallest set of likeliest tokens that reaches top_p, here {0, 1}
            p = torch.where(torch.arange(5) < 2, p, 0.0)
            p = p / p.sum()
        tokens, logp = sample_tokens(logits.expand(n, -1), SamplingParams(1, temperature, top_p), u)
        torch.testing.assert_close(torch.bincount(tokens, minlength=5).double() / n, p, rtol=0, atol=2 / n)
        torch.testing.assert_close(logp.double(), p.log()[tokens], rtol=0, atol=1e-5)


def test_extreme_uniforms_pick_possible_tokens():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]] * 2)
    tokens, logp = sample_tokens(logits, SamplingParams(1), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 3] and torch.isfinite(logp).all()


def test_unknown_weight_names_are_an_error(loaded, toys):
    hf = M.load_hf(str(toys["qwen2_5_vl"]))
    _, processor = loaded["qwen2_5_vl"]
    engine = HFEngine(hf, processor, CPU)
    name, tensor = next(iter(hf.named_parameters()))
    assert engine.load_weights([(name, tensor.detach() + 1)]) == {"sync/calls": 1, "sync/bytes": tensor.nbytes}
    with pytest.raises(ValueError, match="no parameter 'model.nonsense'"):
        engine.load_weights([("model.nonsense", tensor)])


def test_new_weights_change_what_is_generated(loaded, toys, examples):
    """After a sync, the engine generates what a fresh engine with those weights does. Stale weights would show here."""
    _, processor = loaded["qwen2_5_vl"]
    hf, fresh_hf = (M.load_hf(str(toys["qwen2_5_vl"])) for _ in range(2))
    engine, fresh_engine = HFEngine(hf, processor, CPU), HFEngine(fresh_hf, processor, CPU)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in fresh_hf.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.05)
    prompts, sampling = make_prompts(examples, processor), SamplingParams(8, seed=2)
    before = engine.generate(prompts, 2, sampling)
    assert {version for r in before for version in r.versions} == {0} == {engine.weights_version}
    requested = []
    engine.sync(
        lambda trainable_only: (
            requested.append(trainable_only) or ((n, p.detach()) for n, p in fresh_hf.named_parameters())
        )
    )
    assert requested == [False] and engine.has_all_weights and engine.weights_version == 1
    after = engine.generate(prompts, 2, sampling)
    assert all(r.versions == [1] * len(r.logprobs) for r in after)
    fresh = fresh_engine.generate(prompts, 2, sampling)
    assert ids(after) == ids(fresh) != ids(before)
    assert [r.logprobs for r in after] == [r.logprobs for r in fresh]


def test_cache_grows_and_keeps_rows():
    chunks = [torch.randn(4, 2, n, 4) for n in (5, 40, 1, 60)]
    rows = [SimpleNamespace(n_seen=0, rollout=SimpleNamespace(ended_by="")) for _ in range(4)]
    valid = torch.ones(4, 1, dtype=torch.bool)
    batch = DecodeBatch(rows, torch.arange(4), torch.zeros(4, 8), valid, PromptCache())

    def append(chunk, row_ids, lengths):
        for row_id, length in zip(row_ids, lengths, strict=True):
            batch.rows[row_id].n_seen = length
        batch.prepare(list(row_ids), chunk.shape[2])
        return batch.append(0, (chunk[: len(row_ids)], -chunk[: len(row_ids)]))

    length = 0
    for chunk in chunks:
        keys, values = append(chunk, range(4), [length] * 4)
        length += chunk.shape[2]
    whole = torch.cat(chunks, dim=2)
    assert torch.equal(keys, whole) and torch.equal(values, -keys)
    rows[1].rollout.ended_by = "response"
    batch.drop_finished()
    keys, _ = append(chunks[2], range(3), [length] * 3)
    assert torch.equal(keys[:, :, :-1], whole[[0, 2, 3]])
    # only rows 0 and 2 continue, at different positions
    keys, _ = append(chunks[1], [0, 2], [length + 1, 7])
    assert torch.equal(keys[0, :, length + 1 :], chunks[1][0]) and torch.equal(keys[1, :, 7:47], chunks[1][1])
    assert torch.equal(keys[1, :, :7], whole[3, :, :7]) and torch.equal(keys[0, :, :length], whole[0])
    keys, _ = append(chunks[0], range(3), [3, 1, 2])
    assert torch.equal(keys[1, :, 1:6], chunks[0][1]) and torch.equal(keys[1, :, :1], whole[2, :, :1])


def test_blank_images_keep_their_size_and_lose_their_content(loaded, examples):
    _, processor = loaded["qwen2_5_vl"]
    real, blank = make_prompts(examples, processor), make_prompts(examples, processor, blank=True)
    assert [p.token_ids for p in real] == [p.token_ids for p in blank]
    assert blank[0].images[0].pixel_values().std() < 1e-6 < real[0].images[0].pixel_values().std()


def test_long_prompts_are_dropped_whole_and_reported(loaded, examples):
    _, processor = loaded["qwen2_5_vl"]
    lengths = [len(p.token_ids) for p in make_prompts(examples, processor)]
    kept, dropped, kept_lengths = filter_prompts(examples, [processor], sorted(lengths)[1])
    assert sorted(kept_lengths) == sorted(lengths)[:2]
    assert [e.uid for e in kept] == [e.uid for e, n in zip(examples, lengths, strict=True) if n <= sorted(lengths)[1]]
    assert len(dropped) == 1 and str(max(lengths)) in dropped[0] and "--max-prompt-tokens" in dropped[0]


def test_bfloat16_logits_are_summed_in_fp32(toys, loaded, examples):
    """In bfloat16, engine and trainer agree on log-probabilities. With 16-bit logits, they would differ three times as
    much."""
    _, processor = loaded["qwen2_5_vl"]
    policy = M.Policy(M.load_hf(str(toys["qwen2_5_vl"]), torch.bfloat16), processor)
    engine = HFEngine(M.load_hf(str(toys["qwen2_5_vl"]), torch.bfloat16), processor, torch.device("cpu"))
    rollouts = engine.generate(make_prompts(examples, processor), 4, SamplingParams(12, seed=3))
    gaps = [(trainer_logprobs(policy, r) - torch.tensor(r.logprobs)).abs() for r in rollouts]
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    head = policy.hf.lm_head.weight.detach()
    exact = hidden.double() @ head.double().t()
    error = (compute_logits(hidden, head.t().float()) - exact).abs().max()
    assert error < 1e-6 < (hidden @ head.t() - exact).abs().max() / 100
    assert torch.cat(gaps).mean() < 1.2e-3, torch.cat(gaps).mean()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad, toys, loaded, examples):
    """Such logits come from weights with a NaN or an infinity; responses would be made up."""
    logits = torch.zeros(3, 9)
    logits[1, 4] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match="logits of 1 of 3 rows are not finite.*--model"):
            sample_tokens(logits, SamplingParams(1, temperature), torch.full((3,), 0.5))
    hf = M.load_hf(str(toys["qwen2_5_vl"]))
    with torch.no_grad():
        hf.model.language_model.layers[0].mlp.up_proj.weight[0, 0] = bad
    engine = HFEngine(hf, loaded["qwen2_5_vl"][1], torch.device("cpu"))
    with pytest.raises(UserError, match="are not finite"):
        engine.generate(make_prompts(examples, loaded["qwen2_5_vl"][1]), 1, SamplingParams(4, 0.0))


def test_make_engine_and_the_size_limits_of_a_dataset(loaded, examples):
    hf, processor = loaded["qwen2_5_vl"]
    engine = make_engine("hf", hf.name_or_path, processor, DistContext(0, 1, CPU), torch.bfloat16, {})
    assert isinstance(engine, HFEngine) and engine.dtype == torch.bfloat16
    prompts = make_prompts(examples, processor)
    sizes = [image.image.size for image in itertools.chain.from_iterable(p.images for p in prompts)]
    width, height = max(sizes, key=math.prod)
    assert len(set(map(math.prod, sizes))) == 3
    largest = {"count": 2, "width": width, "height": height}
    for dataset, image in ((ExampleList(examples, [5, 7, 6]), largest), (ExampleList(examples[1:2], [7]), 0)):
        limits = {"max_model_len": 9, "limit_mm_per_prompt": {"image": image, "video": 0}}
        assert size_limits([dataset], processor, 2) == limits


def test_a_written_response_has_the_fields_of_one_sampled_with_probability_1():
    rollout = written("u", [1, 2], [3, 4, 5])
    assert (rollout.prompt.uid, rollout.prompt.token_ids, rollout.response) == ("u", [1, 2], [3, 4, 5])
    assert (rollout.response_mask, rollout.logprobs, rollout.versions) == ([True] * 3, [0.0] * 3, [0] * 3)
    assert rollout.finish_reason == "stop" and rollout.prompt.images == []
