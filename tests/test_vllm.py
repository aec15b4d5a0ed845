"""vLLM itself on a CPU, compared with HFEngine, the trainer, and newly started engines.   make test-vllm"""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_episodes import Scripted, add_end_tokens, compare_with_turn_by_turn, make_examples, make_factory
from test_rollout import assert_same, example, ids, places, trainer_logprobs
from test_train import ROOT, TORCHRUN, flags, rows, run, without_time, write_parquet

import demo
import engines.self_test as S
import engines.vllm
import eval as evaluate
import layers.experts as experts
import model as M
import train
from engines import launch
from engines.hf import HFEngine
from engines.vllm import VLLMEngine
from envs._episodes import EpisodeEngine
from layers.lora import LoraConfig, add_lora, find_lora_layers, merge_lora
from packing import Packer
from parallel.loading import save_hf
from parallel.sharding import FullParameters
from rollout import ExampleList, SamplingParams, make_prompts
from tasks.shapes import shapes_rows

pytestmark = pytest.mark.vllm
CPU = torch.device("cpu")
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
RECURRENT = ("qwen3_5", "qwen3_5_moe")  # vLLM on CPUs needs bfloat16 and wider heads for them
SETTINGS = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "kv_cache_memory_bytes": 1 << 27}


@pytest.fixture(scope="session")
def toys(tmp_path_factory):
    """The same as conftest's toys, but wider: vLLM's attention on CPUs needs heads of size 32."""
    root = tmp_path_factory.mktemp("vllm_toys")
    for family in (*FAMILIES, *RECURRENT, "qwen2_vl"):
        hidden = 256 if family in RECURRENT else 128
        demo.make_model(root / family, family, seed=0, hidden=hidden, layers=2, vocab=448)
    return {family: root / family for family in (*FAMILIES, *RECURRENT, "qwen2_vl")}


ENGINES = []  # vLLM destroys its process groups when the first engine is garbage-collected


def start(folder, pixels=(), dtype=torch.float32, **settings):
    processor = M.Processor(str(folder), *pixels)
    limits = {"max_model_len": 384, "limit_mm_per_prompt": {"image": {"count": 3, "width": 224, "height": 224}}}
    ENGINES.append(VLLMEngine(str(folder), processor, CPU, dtype, **limits | SETTINGS | settings))
    return ENGINES[-1]


@pytest.fixture(scope="session", autouse=True)
def experts_first(toys):
    """Start an engine with experts first: vLLM creates the experts' process group with a process's first engine or
    never."""
    start(toys["qwen3_vl_moe"])


@pytest.fixture(scope="session")
def started(toys):
    """started(family) -> (VLLMEngine, hf model, processor). Tests that change the engine's weights use `restored`."""
    cache = {}

    def get(family):
        if family not in cache:
            engine, hf = start(toys[family]), M.load_hf(str(toys[family])).eval()
            engine.load_weights(named(hf))
            cache[family] = engine, hf, engine.processor
        return cache[family]

    return get


@pytest.fixture
def restored(started):
    """restored(family) -> the same as started(family), with a separate copy of the hf model that the test may change.
    The engine's weights are restored afterwards."""
    used = []

    def get(family):
        engine, hf, processor = started(family)
        used.append((engine, hf))
        hf_copy = M.load_hf(hf.name_or_path).eval()
        return engine, hf_copy, processor

    yield get
    for engine, hf in used:
        engine.load_weights(named(hf))


def named(hf, wanted=lambda name: True):
    return [(name, p.detach()) for name, p in hf.named_parameters() if wanted(name)]


@pytest.fixture
def mixed(picture):
    """Examples with 1, 0, 2 and 3 images, most of which the processor has to resize."""
    first = picture(84, 84, 1)
    return [
        example("one", "<image>What is it?", [first]),
        example("none", "Tell me something long and odd, would you please?", []),
        example("two", "Compare <image> with <image>.", [picture(60, 97, 2), picture(130, 56, 3)]),
        example("three", "<image><image> or <image>?", [picture(31, 33, 4), picture(200, 100, 5), first]),
    ]


def gaps(rollouts, hf, processor, temperature=1.0):
    """Return, for each rollout, |engine's log-probability - trainer's| of its tokens."""
    policy = M.Policy(hf, processor)
    return [(trainer_logprobs(policy, r, temperature) - torch.tensor(r.logprobs)).abs() for r in rollouts]


# --- tokens and log-probabilities -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_hf_on_50_prompts_with_images(family, started, picture, mixed):
    engine, hf, processor = started(family)
    questions = ["What colour are they?", "How many shapes are there?", "Describe this in detail.", "Why?"]
    examples = []
    for i in range(50):
        image = picture(40 + 7 * (i % 13), 40 + 11 * (i % 9), i)
        examples.append(example(f"p{i}", f"<image>{questions[i % 4]}", [image]))
    prompts = make_prompts(examples + mixed, processor)
    greedy = SamplingParams(16, temperature=0.0)
    theirs = HFEngine(hf, processor, CPU).generate(prompts, 1, greedy)
    assert_same(engine.generate(prompts, 1, greedy), theirs, greedy=True)


def test_greedy_tokens_of_qwen2_vl_equal_those_of_hf(toys, mixed):
    engine, hf = start(toys["qwen2_vl"]), M.load_hf(str(toys["qwen2_vl"]))
    assert engine.load_weights(named(hf))["sync/calls"] == 1
    prompts, greedy = make_prompts(mixed, engine.processor), SamplingParams(12, 0.0)
    theirs = HFEngine(hf, engine.processor, CPU).generate(prompts, 1, greedy)
    assert_same(engine.generate(prompts, 1, greedy), theirs, greedy=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_equal_the_trainers(family, started, mixed):
    engine, hf, processor = started(family)
    rollouts = engine.generate(make_prompts(mixed, processor), 5, SamplingParams(14, temperature=0.7, seed=3))
    assert max(map(torch.max, gaps(rollouts, hf, processor, 0.7))) <= 1e-5
    assert len({tuple(r.response) for r in rollouts}) == 20


def check_noised_samples(engine, hf, processor, examples):
    """NoisyRollout: the samples of noised images, which have the uid of the others, are sampled from noised images."""
    noisy = pytest.importorskip("algorithms.noisy")
    algo = train.AlgorithmSettings(noise_level=900.0, group_size=4)
    prompts = noisy.add_noised_prompts(make_prompts(examples, processor), algo, seed=0, step=0, steps=10)
    for _ in range(2):  # the second time from caches
        rollouts = engine.generate(prompts, 4, SamplingParams(10, temperature=0.8, seed=3))
        assert [r.prompt.view_of is not None for r in rollouts] == [False] * 2 + [True] * 2 + [False] * 4 + (
            [False] * 2 + [True] * 2) * 2
        assert max(map(torch.max, gaps(rollouts, hf, processor, 0.8))) <= 1e-5
        noised = [replace(r, prompt=r.prompt.view_of) for r in rollouts if r.prompt.view_of]
        assert min(map(torch.max, gaps(noised, hf, processor, 0.8))) > 1e-4  # not given the images themselves


def test_noised_samples_see_noised_images(started, mixed):
    check_noised_samples(*started("qwen2_5_vl"), mixed)


def test_pixel_limits_reach_both_engines(toys, mixed):
    folder = str(toys["qwen2_5_vl"])
    engine = start(folder, (100 * 28 * 28 // 16, 12 * 28 * 28))
    processor = engine.processor
    prompts = make_prompts(mixed, processor)
    assert prompts[0].images[0].n_tokens != make_prompts(mixed, M.Processor(folder))[3].images[1].n_tokens
    assert_same(engine.generate(prompts, 1, SamplingParams(8, 0.0)),
                HFEngine(M.load_hf(folder), processor, CPU).generate(prompts, 1, SamplingParams(8, 0.0)))


# --- groups, seeds, ends ----------------------------------------------------------------------------------------------


def test_groups_are_in_order_and_each_sample_has_its_own_seed(started, mixed):
    engine, _, processor = started("qwen2_5_vl")
    prompts = make_prompts(mixed, processor)
    sampling = SamplingParams(10, seed=5)
    rollouts = engine.generate(prompts, 3, sampling)
    assert places(rollouts) == list(itertools.product(["one", "none", "two", "three"], range(3)))
    assert all(r.prompt is prompts[i // 3] for i, r in enumerate(rollouts))
    assert_same(engine.generate(prompts, 3, sampling), rollouts)  # this time from the prefix cache
    assert_same(engine.generate(prompts[2:3], 3, sampling), rollouts[6:9])  # whatever the batch contains besides
    assert ids(engine.generate(prompts, 3, SamplingParams(10, seed=6))) != ids(rollouts)
    assert engine.generate([], 3, sampling) == []


def load_weights_that_end_early(engine, hf, processor):
    """Load weights with which some samples end early."""
    direction = torch.randn(128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hf.lm_head.weight[processor.eos_ids[0]] = 0.02 * direction
    engine.load_weights(named(hf))


def test_the_callback_gets_each_rollout_once_when_it_ends(restored, mixed, monkeypatch):
    engine, hf, processor = restored("qwen2_5_vl")
    load_weights_that_end_early(engine, hf, processor)
    monkeypatch.setattr(engine, "should_stop", lambda: True)  # must not stop vLLM early
    prompts, sampling = make_prompts(mixed, processor), SamplingParams(12, seed=1)
    steps, finished = [], []
    original = type(engine.llm.llm_engine).step
    monkeypatch.setattr(type(engine.llm.llm_engine), "step", lambda self: steps.append(1) or original(self))
    rollouts = engine.generate(prompts, 16, sampling, lambda r: finished.append((r, len(steps))))
    assert sorted(id(r) for r, _ in finished) == sorted(map(id, rollouts)) and len(set(map(id, rollouts))) == 64
    assert places(rollouts) == list(itertools.product(["one", "none", "two", "three"], range(16)))
    lengths = [len(r.response) for r, _ in finished]
    assert min(lengths) < max(lengths) == 12 and finished[0][1] < finished[-1][1]
    for uid in ("one", "none", "two", "three"):  # all samples of a group start within two steps
        offsets = [len(r.response) - step for r, step in finished if r.prompt.uid == uid]
        assert max(offsets) - min(offsets) <= 2
    assert_same(engine.generate(prompts, 16, sampling), rollouts)


def test_generate_equals_vllms_own_generate(started, mixed, monkeypatch):
    """The tokens and log-probabilities equal those of llm.generate, which has no callback, on the same requests."""
    engine, _, processor = started("qwen2_5_vl")
    prompts, sampling = make_prompts(mixed, processor), SamplingParams(10, seed=7)
    requests, original = [], engine.llm.enqueue
    monkeypatch.setattr(engine.llm, "enqueue", lambda *a, **k: requests.append(a) or original(*a, **k))
    ours = engine.generate(prompts, 3, sampling)
    engine.reset_caches()
    theirs = [output.outputs[0] for output in engine.llm.generate(*requests[0], use_tqdm=False)]
    pairs = zip(ours, theirs, strict=True)
    assert_same(ours, [replace(r, response=[*s.token_ids], logprobs=[*s.logprobs.logprobs]) for r, s in pairs])


def test_a_failed_generate_leaves_no_requests_in_vllm(started, mixed):
    engine, _, processor = started("qwen2_5_vl")
    prompts, sampling = make_prompts(mixed, processor), SamplingParams(10, seed=5)
    expected = engine.generate(prompts, 3, sampling)

    def fail(rollout):
        raise RuntimeError("the reward failed")

    with pytest.raises(RuntimeError, match="the reward failed") as caught:
        engine.generate(prompts, 3, sampling, fail)
    assert not engine.llm.llm_engine.has_unfinished_requests()
    assert not any("vLLM failed" in note for note in getattr(caught.value, "__notes__", []))
    engine.reset_caches()  # raises an error if a request is still running
    assert_same(engine.generate(prompts, 3, sampling), expected)


def test_end_tokens_are_kept_and_finish_reasons_are_right(restored, mixed):
    engine, hf, processor = restored("qwen2_5_vl")
    load_weights_that_end_early(engine, hf, processor)
    prompts = make_prompts(mixed, processor)
    rollouts = engine.generate(prompts, 16, SamplingParams(12, seed=1))
    ends = {r.finish_reason for r in rollouts}
    assert ends == {"stop", "length"}
    for r in rollouts:
        assert (r.finish_reason == "stop") == (r.response[-1] in processor.eos_ids)
        assert not set(r.response[:-1]) & set(processor.eos_ids)
        assert len(r.response) == 12 or r.finish_reason == "stop"
        assert len(r.logprobs) == len(r.response_mask) == len(r.response) and all(r.response_mask)
    greedy = SamplingParams(12, 0.0)
    theirs = HFEngine(hf, processor, CPU).generate(prompts, 1, greedy)
    assert_same(engine.generate(prompts, 1, greedy), theirs, greedy=True)


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_families_are_as_close_as_bfloat16_allows(family, toys, mixed):
    """The engine differs from the fp32 trainer less than twice as much as transformers' model in bfloat16 does, before
    and after a weight sync."""
    hf, half = (M.load_hf(str(toys[family])).eval() for _ in range(2))
    processor = M.Processor(str(toys[family]))
    engine = start(toys[family], dtype=torch.bfloat16)
    prompts = make_prompts(mixed, processor)
    for change in (0.0, 0.3):
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in hf.parameters():
                p += change * p.std(unbiased=False) * torch.randn(p.shape, generator=generator)
        half.load_state_dict(hf.state_dict())
        half.bfloat16()
        if change:
            stale = engine.generate(prompts, 2, SamplingParams(10, seed=1))
            engine.load_weights(named(half))
        rollouts = engine.generate(prompts, 2, SamplingParams(10, seed=1))
        exact, rounded = (list(map(partial(trainer_logprobs, M.Policy(x, processor)), rollouts)) for x in (hf, half))
        ours = [(torch.tensor(r.logprobs) - e).abs().mean().item() for r, e in zip(rollouts, exact, strict=True)]
        theirs = [(a - e).abs().mean().item() for a, e in zip(rounded, exact, strict=True)]
        assert sum(ours) < 2 * sum(theirs) and max(ours) < 0.02
        half.float()
    assert ids(stale) != ids(rollouts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholders_and_padding_cannot_be_sampled_even_by_a_model_that_wants_them(temperature, restored, mixed):
    engine, hf, processor = restored("qwen3_vl")
    banned = processor.banned_token_ids(448).tolist()
    assert processor.image_token_id in banned and 447 in banned and len(banned) > 5
    direction = torch.randn(128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # whatever the hidden state, one of the two tokens has by far the largest logit
        hf.lm_head.weight[processor.image_token_id] = 100 * direction
        hf.lm_head.weight[447] = -100 * direction
    engine.load_weights(named(hf))
    prompts = make_prompts(mixed, processor)
    rollouts = engine.generate(prompts, 4, SamplingParams(10, temperature, seed=2))
    assert not set(itertools.chain.from_iterable(r.response for r in rollouts)) & set(banned)
    assert max(map(torch.max, gaps(rollouts, hf, processor))) <= 1e-5
    unbanned = M.Policy(hf, processor)
    unbanned.banned = torch.tensor([], dtype=torch.long)
    assert trainer_logprobs(unbanned, rollouts[0]).max() < -5  # very unlikely without the ban


def test_the_ban_is_accepted_by_model_runner_v2():
    """On a GPU vLLM uses Model Runner V2, which has another interface for logits processors. The CPU build contains its
    code too."""
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcRequestState, build_custom_logits_processors

    config = SimpleNamespace(additional_config={"banned": [1, 3]})
    state = SimpleNamespace(**{f.name: None for f in dataclasses.fields(LogitsProcRequestState)} | {"device": CPU})
    (ban,) = build_custom_logits_processors(config, state, False, ["engines.vllm_ban:BannedTokensProcessor"])
    assert not any(isinstance(value, torch.Tensor) for value in vars(ban).values())  # sleep level 2 would discard it
    logits = ban.apply(torch.zeros(2, 5), SimpleNamespace())
    assert (logits == -torch.inf).nonzero().tolist() == [[0, 1], [0, 3], [1, 1], [1, 3]]


START_WITH_V2 = """
import sys
import vllm.config.vllm
vllm.config.vllm.HAS_TRITON = True  # what chooses Model Runner V2
from test_vllm import start
print("V2:", start(sys.argv[1]).llm.llm_engine.vllm_config.use_v2_model_runner)
"""


def test_vllm_starts_with_model_runner_v2(toys):
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-c", START_WITH_V2, toys["qwen2_5_vl"]]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert "V2: True" in done.stdout, done.stderr[-3000:]


# --- replayed experts -------------------------------------------------------------------------------------------------


@pytest.fixture
def routed(restored, monkeypatch):
    """routed(noise): return the same as started("qwen3_vl_moe"), with a policy that replays experts in place of the hf
    model. On a CPU vLLM refuses to return experts, so its routers' hook for this collects them, for one request at a
    time, and they are added to its outputs. With noise the routers choose by noisy logits."""

    def make(noise):
        engine, hf, processor = restored("qwen3_vl_moe")
        policy, llm = M.Policy(hf, processor), engine.llm
        experts.start_replay(hf, SimpleNamespace())
        monkeypatch.setattr(engine, "expert_layers", [0, 1])  # removes it after the test
        model, chosen, starts = engine.executor.driver_worker.model_runner.model, {}, []
        routers = [module.router for module in model.modules() if hasattr(module, "router")]
        mixing = torch.randn(hf.config.text_config.hidden_size, 4, generator=torch.Generator().manual_seed(0)) / 10

        def choose(plain, k, hidden, logits, dtype, **kwargs):
            weights, ids = plain(hidden, logits, dtype, **kwargs)
            # noise that depends on the token's state, because vLLM computes tokens of earlier turns again if they do
            # not fill a block of its prefix cache
            noisy = logits + noise * hidden @ mixing
            ids = noisy.topk(k, dim=-1).indices.to(ids.dtype)
            weights = logits.softmax(-1).gather(1, ids.long())
            return weights / weights.sum(-1, keepdim=True), ids

        for layer, router in enumerate(routers):
            monkeypatch.setattr(router, "capture_fn", lambda ids, layer=layer: chosen[layer].append(ids.clone()))
            if noise:
                plain = partial(choose, router._compute_routing, router.top_k)
                monkeypatch.setattr(router, "_compute_routing", plain)
        enqueue, step = llm.enqueue, llm.llm_engine.step

        def enqueue_one(prompts, parameters, use_tqdm):
            if prompts:
                [one] = parameters
                starts.append(one.routed_experts_prompt_start)
                chosen.update({layer: [] for layer in range(len(routers))})
            return enqueue(prompts, parameters, use_tqdm=use_tqdm)

        def step_with_experts():
            outputs = step()
            for output in outputs:
                [sample] = output.outputs
                rows = torch.stack([torch.cat(chosen[layer]) for layer in range(len(routers))], dim=1)
                n_new = len(output.prompt_token_ids) + len(sample.token_ids) - 1 - starts[-1]
                assert len(rows) >= n_new  # the tokens before them may be in the prefix cache
                sample.routed_experts = rows[len(rows) - n_new :].numpy().astype("uint8")
            return outputs

        monkeypatch.setattr(llm, "enqueue", enqueue_one)
        monkeypatch.setattr(llm.llm_engine, "step", step_with_experts)
        return engine, policy, processor, starts

    yield make


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_replayed_experts_of_vllm(noise, routed, mixed):
    engine, policy, processor, starts = routed(noise)
    rollouts = []
    for prompt in make_prompts(mixed, processor):
        engine.reset_caches()  # the hook sees no token that is in the prefix cache
        rollouts += engine.generate([prompt], 1, SamplingParams(14, seed=3))
    assert len(starts) == 4 and not any(starts)
    for r in rollouts:
        assert r.n_routed == len(r.prompt.token_ids) + len(r.response) - 1
        engine_logp = torch.tensor(r.logprobs)
        [micro] = Packer(10_000, processor.image_token_id).pack([r])
        assert (policy(micro).logp_K - engine_logp).abs().max() < 2e-6
        assert all((share > 0.1) == (noise > 0) for share in micro.differing)
        own = policy(replace(micro, experts_T=None)).logp_K
        assert ((own - engine_logp).abs().max() > 1e-4) == (noise > 0)


def test_later_turns_ask_vllm_for_the_experts_of_new_tokens(routed):
    engine, policy, plain, starts = routed(1.0)
    engine.processor = processor = add_end_tokens(plain)
    envs = make_factory(Scripted, max_turns=5)
    n_images = 0
    for prompt in make_prompts(make_examples([2, 2, 2]), processor, reset_fn=envs.reset_example):
        engine.reset_caches()
        starts.clear()
        [r] = EpisodeEngine(engine, envs, processor).generate([prompt], 1, SamplingParams(200, seed=1))
        assert starts[0] == 0 and starts == sorted(set(starts)) and len(starts) == r.n_turns == 2
        n_images += len(r.images)
        [micro] = Packer(10_000, processor.image_token_id).pack([r])
        assert (micro.experts_T >= 0).all()
        assert (policy(micro).logp_K - torch.tensor(r.logprobs)).abs().max() < 2e-6
    assert n_images
    engine.processor = plain


# --- new weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tower", [False, True])
def test_generation_after_a_sync_equals_that_of_a_new_engine(family, tower, restored, mixed, tmp_path, monkeypatch):
    engine, hf, processor = restored(family)
    prompts, sampling = make_prompts(mixed, processor), SamplingParams(10, seed=4)
    before = engine.generate(prompts, 3, sampling)
    generator = torch.Generator().manual_seed(1)
    changed = [name for name, _ in hf.named_parameters() if ("visual" in name) == tower]
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if name in changed:
                p += 0.2 * p.std() * torch.randn(p.shape, generator=generator)
    save_hf(hf, tmp_path)
    for file in Path(hf.name_or_path).iterdir():
        if not (tmp_path / file.name).exists():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    fresh = start(tmp_path).generate(prompts, 3, sampling)
    assert ids(fresh) != ids(before)
    synced = named(hf, lambda name: name in changed)
    with monkeypatch.context() as patch:  # the bug: without this reset, caches filled by the old weights are used
        patch.setattr(engine, "reset_caches", lambda: None)
        engine.load_weights(synced)
        stale = engine.generate(prompts, 3, sampling)
    assert ids(stale) != ids(fresh)
    engine.load_weights(synced)
    assert_same(engine.generate(prompts, 3, sampling), fresh)
    assert max(map(torch.max, gaps(engine.generate(prompts, 3, sampling), hf, processor))) <= 1e-5


def test_a_sync_takes_the_expected_calls_and_bytes(restored, monkeypatch):
    engine, hf, _ = restored("qwen2_5_vl")
    sizes = {name: 4 * math.prod(p.shape) for name, p in hf.named_parameters()}
    calls = []
    original = type(engine.loader.model).load_weights

    def counted(self, weights):
        calls.append(sum(t.nbytes for _, t in weights))
        return original(self, weights)

    monkeypatch.setattr(type(engine.loader.model), "load_weights", counted)
    for wanted in (lambda name: True, lambda name: "visual" not in name):
        for limit in (1, 100_000, 300_000, 10**9):
            engine.bucket_bytes = limit
            sent = [size for name, size in sizes.items() if wanted(name)]
            expected, room = 0, 0  # tensors fill a bucket in order; one that does not fit starts a new bucket
            for size in sent:
                if size > room:
                    expected += 1
                    room = limit
                room -= size
            calls.clear()
            metrics = engine.load_weights(named(hf, wanted))
            assert metrics == {"sync/calls": expected, "sync/bytes": sum(sent)}
            assert len(calls) == expected and sum(calls) == metrics["sync/bytes"]
            assert max(calls) <= max(limit, max(sizes.values()))
    engine.bucket_bytes = 512 << 20


def test_unknown_and_missing_names_are_errors(restored, toys):
    engine, hf, _ = restored("qwen2_5_vl")
    vector, layers = torch.zeros(128), "model.language_model.layers"
    # vLLM itself ignores an unknown bias silently, as a remnant of quantisation
    for name in (f"{layers}.0.self_attn.o_proj.bias", f"{layers}.9.mlp.up_proj.weight", "q"):
        with pytest.raises(ValueError, match=f"no parameter '{name}'"):
            engine.load_weights([(name, vector)])
    with pytest.raises(AssertionError, match="no tensor was given"):
        engine.load_weights([])
    engine.has_all_weights = False  # as at the start, or after sleep at level 2
    missing = f"{layers}.1.self_attn.k_proj.bias"  # one of three that vLLM stacks in one parameter
    with pytest.raises(ValueError, match=f"1 parameters were not sent, the first is '{missing}'"):
        engine.load_weights(named(hf, lambda name: name != missing))
    engine.load_weights(named(hf))
    assert engine.has_all_weights


def test_a_parameter_that_vllm_does_not_fill_is_an_error(restored, monkeypatch):
    """Otherwise vLLM would continue with the old value."""
    engine, hf, _ = restored("qwen2_5_vl")
    lost = "language_model.model.layers.1.mlp.gate_up_proj.weight"
    original = type(engine.loader.model).load_weights
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.loader.model), "load_weights", lambda self, weights: original(self, weights) - {lost})
        engine.has_all_weights = False
        with pytest.raises(ValueError, match=f"1 parameters were not sent, the first is '{lost}'"):
            engine.load_weights(named(hf))


# --- the self-test ----------------------------------------------------------------------------------------------------


def self_test(policy, engine, processor, examples):
    """Run the self-test as train.py does, on an engine that has the policy's weights."""
    examples = ExampleList(examples, [len(p.token_ids) for p in make_prompts(examples, processor)])
    packer = Packer(2000, processor.image_token_id)
    return S.self_test(policy, engine, examples, processor, packer, SamplingParams(12))


@pytest.mark.parametrize("family", (*FAMILIES, *RECURRENT, "qwen2_vl"))
def test_the_self_test_passes_and_puts_everything_back(family, toys, mixed):
    dtype = torch.bfloat16 if family in RECURRENT else torch.float32
    engine, processor = start(toys[family], dtype=dtype), M.Processor(str(toys[family]))
    policy = M.Policy(M.load_hf(str(toys[family]), dtype), processor, "all")
    engine.load_weights(FullParameters(policy))
    prompts, sampling = make_prompts(mixed, processor), SamplingParams(8, seed=1)
    before = engine.generate(prompts, 2, sampling)
    moved = self_test(policy, engine, processor, mixed).split("moved log-probabilities by ")[1].split(";")[0]
    assert float(moved) > 0.05
    assert_same(engine.generate(prompts, 2, sampling), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_test_finds_a_stale_tensor(family, restored, mixed, monkeypatch):
    """The self-test notices a lost update of each kind of parameter that vLLM stacks, splits or renames."""
    engine, hf, processor = restored(family)
    policy = M.Policy(hf, processor, "all")
    original, names = engine.load_weights, dict(hf.named_parameters())
    language = ("self_attn.k_proj.weight", "mlp.up_proj.weight", "mlp.experts.down_proj", "input_layernorm.weight")
    kinds = (*language, "lm_head.weight", "blocks.0.attn.qkv.bias", "visual.patch_embed.proj.weight")
    chosen = [[name for name in names if name.endswith(kind)][-1:] for kind in kinds]

    def load_all_but(lost, named):
        return original((name, tensor) for name, tensor in named if name != lost)

    for name in itertools.chain.from_iterable(chosen):
        monkeypatch.setattr(engine, "load_weights", partial(load_all_but, name))
        with pytest.raises(ValueError, match="of engine and trainer under new weights differ"):
            self_test(policy, engine, processor, mixed)
        monkeypatch.undo()


@pytest.mark.parametrize("family", FAMILIES[:2])  # experts have no adapters
def test_adapters_arrive_merged(family, restored, mixed):
    engine, hf, processor = restored(family)
    policy = M.Policy(add_lora(hf, LoraConfig(8, 16)), processor)
    assert engine.has_all_weights and self_test(policy, engine, processor, mixed)
    with torch.no_grad():
        for layer in find_lora_layers(hf).values():
            generator = torch.Generator().manual_seed(1)
            layer.lora_B.copy_(0.2 * torch.randn(layer.lora_B.shape, generator=generator))
    engine.load_weights(FullParameters(policy, trainable_only=True))
    reference = HFEngine(merge_lora(hf), processor, CPU)
    prompts, greedy = make_prompts(mixed, processor), SamplingParams(10, 0.0)
    assert_same(engine.generate(prompts, 1, greedy), reference.generate(prompts, 1, greedy), greedy=True)


# --- errors and limits ------------------------------------------------------------------------------------------------


def test_prompts_beyond_the_engines_limits_are_refused(started, picture):
    engine, _, processor = started("qwen2_5_vl")
    long = make_prompts([example("long", "word " * 380, [])], processor)
    with pytest.raises(AssertionError, match="the engine was started for shorter sequences"):
        engine.generate(long, 1, SamplingParams(8))
    many = make_prompts([example("many", "<image>" * 4, [picture(56, 56, i) for i in range(4)])], processor)
    with pytest.raises(Exception, match="At most 3 image.* may be provided in one prompt"):
        engine.generate(many, 1, SamplingParams(8))


def test_more_images_than_the_caches_hold(started, toys, picture):
    """Encoder budget, KV blocks and the processor's cache all overflow. Requests then wait, and none is lost."""
    _, hf, processor = started("qwen2_5_vl")
    settings = {"kv_cache_memory_bytes": 3 << 20, "max_num_seqs": 6, "max_num_batched_tokens": 128}
    engine, greedy = start(toys["qwen2_5_vl"], **settings), SamplingParams(6, 0.0)
    prompts = make_prompts([example(f"b{i}", "<image>?", [picture(224, 196, i)]) for i in range(12)], processor)
    theirs = HFEngine(hf, processor, CPU).generate(prompts, 1, greedy)
    assert_same(engine.generate(prompts, 1, greedy), theirs, greedy=True)
    assert max(map(torch.max, gaps(engine.generate(prompts, 3, SamplingParams(6, seed=1)), hf, processor))) <= 1e-5


def test_a_cache_that_is_too_small_is_an_error_at_the_start(toys):
    with pytest.raises(ValueError, match="the engine did not start .*change --vllm gpu_memory_utilization"):
        start(toys["qwen2_5_vl"], kv_cache_memory_bytes=100_000)


def test_vllm_settings_reach_vllm_and_wrong_ones_are_refused(toys, monkeypatch):
    pairs = ["block_size=64", "served_model_name=toy", "max_num_seqs=3", "sleep_level=2"]
    settings = launch.vllm_settings(pairs, "vllm", world=3)
    assert settings == {"block_size": 64, "served_model_name": "toy", "max_num_seqs": 3, "sleep_level": 2}
    given = {}

    def stop(cuda, tp, arguments):
        given.update(arguments)
        raise RuntimeError("that is enough")

    monkeypatch.setattr(engines.vllm, "start_llm", stop)
    with pytest.raises(ValueError, match="that is enough"):
        start(toys["qwen2_5_vl"], **settings)
    assert given["block_size"] == 64 and given["served_model_name"] == "toy" and given["max_num_seqs"] == 3
    assert "sleep_level" not in given
    refused = {
        "kv_cache_dtyp=auto": "vLLM has no such argument \\(did you mean kv_cache_dtype",
        "block_size": "give KEY=VALUE",
        "logprobs_mode=raw_logits": "relies on its own value",
        "dtype=float16": "use --dtype",
        "enable_sleep_mode=true": "use sleep_level",
        "sleep_level=3": "sleep_level=3: must be 0, 1 or 2",
        "tensor_parallel_size=2": "tensor_parallel_size=2 does not divide 3 processes",
        "tensor_parallel_size=two": "tensor_parallel_size=two does not divide 3 processes",
    }
    for pair, match in refused.items():
        with pytest.raises(ValueError, match=match):
            launch.vllm_settings([pair], "vllm", world=3)
    with pytest.raises(ValueError, match="--vllm block_size=64 .*: the engine is hf; remove --vllm"):
        launch.vllm_settings(pairs, "hf", world=3)


def test_running_out_of_memory_says_what_to_lower(toys, mixed):
    engine = start(toys["qwen2_5_vl"])

    def fail(*_):
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    engine.loader.model.register_forward_pre_hook(fail)
    message = "(?s)tried to allocate 3 GiB.*vLLM failed while generating.*lower --vllm"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        engine.generate(make_prompts(mixed, engine.processor), 2, SamplingParams(4))


def test_a_prompt_that_differs_from_the_processors_is_refused(started, mixed):
    engine, _, processor = started("qwen2_5_vl")
    prompts = make_prompts(mixed[:1], processor)
    prompts[0].images[0].image = prompts[0].images[0].image.resize((112, 84))
    with pytest.raises(ValueError, match="'one': the engine's prompt has [0-9]+ tokens .* differ from token"):
        engine.generate(prompts, 1, SamplingParams(4))


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm_data")
    path = write_parquet(folder / "train.parquet", shapes_rows(24, "train", 0))
    flags("-", path, "-")  # writes the reward
    (folder / "letters.py").write_text("def score(response, example):\n"
                                       "    return sum(c.islower() for c in response) / (len(response) + 1)\n")
    return path


def command(toys, data, out, *options, family="qwen2_5_vl"):
    return [sys.executable, "train.py", *flags(toys[family], data, out, "--rollout", "vllm", *options)]


def test_a_run_learns_and_the_self_test_leaves_no_trace(toys, data, tmp_path):
    options = ["--steps", 14, "--eval-data", data, "--reward", f"{data.parent}/letters.py:score", "--lr", "3e-3"]
    options += ["--save-every", 14, "--group-size", 8, "--micro-tokens", 400]
    done = run(command(toys, data, tmp_path / "with", *options))
    assert "rollouts by vllm" in done.stdout and "self-test: " in done.stdout and "under new weights" in done.stdout
    logged = rows(tmp_path / "with")
    steps = [row for row in logged if "reward/mean" in row]
    reward = [row["reward/mean"] for row in steps]
    assert sum(reward[-3:]) / 3 > sum(reward[:3]) / 3 + 0.15
    hf = M.load_hf(str(toys["qwen2_5_vl"]))
    # frozen weights are sent only once, before step 1
    trained = sum(p.nbytes for name, p in hf.named_parameters() if "visual" not in name)
    assert all(row["sync/bytes"] == trained and row["sync/calls"] == 1 for row in steps)
    assert all(0 < row["mismatch/max_abs_logprob_diff"] <= 1e-5 and row["mismatch/kl"] < 1e-9 for row in steps)
    run(command(toys, data, tmp_path / "without", *options, "--no-self-test"))
    assert without_time(tmp_path / "without") == without_time(tmp_path / "with")


def test_a_run_resumes_from_its_checkpoint_after_a_crash(toys, data, tmp_path):
    options = ["--steps", 4, "--save-every", 1]
    broken = tmp_path / "broken.py"
    broken.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import engines.vllm, train, utils
original, calls = engines.vllm.VLLMEngine.generate, []
def lose(*_):
    raise RuntimeError("device lost")
def generate(engine, *args, **more):
    calls.append(1)
    if len(calls) == 5:  # the self-test twice, two steps, and now
        engine.loader.model.register_forward_pre_hook(lose)
    return original(engine, *args, **more)
engines.vllm.VLLMEngine.generate = generate
utils.run_script(train.main, train.parse_args)
""")
    crashed = run([sys.executable, broken, *command(toys, data, tmp_path / "r", *options)[2:]], check=False)
    assert crashed.returncode != 0 and "vLLM failed while generating" in crashed.stderr
    assert "device lost" in crashed.stderr
    assert [p.name for p in sorted((tmp_path / "r" / "checkpoints").iterdir())][-1] == "step_000002"
    done = run([*command(toys, data, tmp_path / "r", *options), "--resume", "auto"])
    assert "resumed from" in done.stdout and [row["step"] for row in rows(tmp_path / "r")] == [1, 2, 3, 4]


@pytest.mark.parametrize("tp", [1, 2])
def test_training_on_two_processes(tp, toys, data, tmp_path):
    stale = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")  # left by a run that was killed during start-up
    if Path("/dev/shm").is_dir() and not stale.exists():
        stale.touch()
    options = ["--steps", 2, "--minibatches", 2, "--vllm", f"tensor_parallel_size={tp}", "--tp", 3 - tp]
    options += ["--algo-args", "tis_cap=1.01", "--algo-args", "ratio_mask=0.5,2", "--eval-data", data]
    launch = [*TORCHRUN, 2, *command(toys, data, tmp_path / "r", *options)[1:]]
    done = run(launch)
    assert "self-test: " in done.stdout and (tp == 1 or not stale.exists())
    for row in rows(tmp_path / "r")[1:]:
        assert 0 < row["mismatch/max_abs_logprob_diff/images=1"] == row["mismatch/max_abs_logprob_diff"] <= 1e-5
        assert "mismatch/kl/images=0" not in row and row["rollout/ratio_masked"] == 0 == row["rollout/tis_capped"]
        assert row["sync/calls"] == 1


def test_eval_gives_the_same_result_with_every_engine(toys, data, tmp_path):
    """Both engines give the same results, also with one vLLM engine for two processes (tensor parallel)."""
    results = []
    options = ["--baseline", toys["qwen2_5_vl"], "--max-new-tokens", 8, "--reward", f"{data.parent}/letters.py:score"]
    options += ["--ablate", "shuffled", "none"]
    for name, engine in {"hf": ["hf"], "vllm": ["vllm"], "tp": ["vllm", "--vllm", "tensor_parallel_size=2"]}.items():
        args = ["eval.py", toys["qwen2_5_vl"], "--data", data, "--out", tmp_path / name, *options, "--rollout", *engine]
        run([*([*TORCHRUN, 2] if name == "tp" else [sys.executable]), *args])
        results.append(json.loads((tmp_path / name / "eval.json").read_text()))
        assert results[-1].pop("settings")["rollout"] == engine[0]
    assert results[0] == results[1] == results[2] and results[0]["reward"] > 0


def test_a_baseline_of_the_same_architecture_gets_the_same_engine(toys, data, tmp_path):
    """On a GPU a process has only one engine. It must receive all of the baseline's weights."""
    demo.make_model(tmp_path / "other", "qwen2_5_vl", seed=1, hidden=128, layers=2, vocab=448)
    assert evaluate.architecture(str(tmp_path / "other")) == evaluate.architecture(str(toys["qwen2_5_vl"]))
    assert evaluate.architecture(str(tmp_path / "other")) != evaluate.architecture(str(toys["qwen2_vl"]))
    options = ["--baseline", tmp_path / "other", "--max-new-tokens", 8, "--reward", f"{data.parent}/letters.py:score"]
    code = "import sys, runpy; sys.argv = sys.argv[1:]; import engines.vllm as v; start = v.start_llm; "
    code += "v.start_llm = lambda *a: (print('an engine starts'), start(*a))[1]; "
    code += "runpy.run_path('eval.py', run_name='__main__')"
    results = []
    for engine in ("hf", "vllm"):
        args = ["eval.py", toys["qwen2_5_vl"], "--data", data, "--out", tmp_path / engine, "--rollout", engine,
                *options]  # fmt: skip
        done = run([sys.executable, "-c", code, *args])
        assert done.stdout.count("an engine starts") == (engine == "vllm")
        results.append(json.loads((tmp_path / engine / "eval.json").read_text()))
        assert results[-1].pop("settings")["rollout"] == engine
    assert results[0] == results[1] and results[0]["reward"] != results[0]["baselines"][0]["reward"]


LORA = ["--lora-rank", 4, "--lora-alpha", 32]


@pytest.mark.parametrize("family,options", [("qwen2_5_vl", []), ("qwen2_5_vl", LORA), ("qwen3_vl_moe", [])])
def test_exported_runs_generate(family, options, toys, data, mixed, tmp_path):
    """Weights of a run, with or without adapters, reach the engine. The exported run generates the same in a new engine
    as in HFEngine."""
    run(command(toys, data, tmp_path / "r", "--steps", 2, "--lr", "3e-2", *options, family=family))
    assert all(row["mismatch/max_abs_logprob_diff"] <= 1e-5 for row in rows(tmp_path / "r"))
    run([sys.executable, "merge_lora.py", tmp_path / "r", "--out", tmp_path / "hf"])
    hf, processor = M.load_hf(str(tmp_path / "hf")).eval(), M.Processor(str(tmp_path / "hf"))
    engine, prompts, greedy = start(tmp_path / "hf"), make_prompts(mixed, processor), SamplingParams(10, 0.0)
    expected = HFEngine(hf, processor, CPU).generate(prompts, 1, greedy)
    assert_same(engine.generate(prompts, 1, greedy), expected, greedy=True)
    before = HFEngine(M.load_hf(str(toys[family])), processor, CPU).generate(prompts, 1, greedy)
    assert ids(expected) != ids(before)
    engine.load_weights(named(hf))
    assert_same(engine.generate(prompts, 1, greedy), expected, greedy=True)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_episodes_equal_turn_by_turn_forwards(family, toys):
    """Each turn's request repeats all earlier tokens exactly, so that vLLM's caches hold the common prefix."""
    limits = {"max_model_len": 700, "limit_mm_per_prompt": {"image": {"count": 9, "width": 224, "height": 224}}}
    engine, hf = start(toys[family], **limits, max_num_batched_tokens=1024), M.load_hf(str(toys[family])).eval()
    engine.load_weights(named(hf))
    compare_with_turn_by_turn({family: (hf, M.Processor(str(toys[family])))}, family, engine)


def test_episodes_of_recurrent_layers_are_as_close_as_bfloat16_allows(toys):
    """vLLM's CPU build computes recurrent layers only in bfloat16."""
    family = "qwen3_5"
    limits = {"max_model_len": 700, "limit_mm_per_prompt": {"image": {"count": 9, "width": 224, "height": 224}}}
    engine = start(toys[family], dtype=torch.bfloat16, **limits, max_num_batched_tokens=1024)
    hf = M.load_hf(str(toys[family])).eval()
    engine.load_weights(named(hf))
    compare_with_turn_by_turn({family: (hf, M.Processor(str(toys[family])))}, family, engine, tolerance=0.05)
