"""The real vLLM on the CPU, against HFEngine, the trainer, and fresh engines.   make test-vllm"""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from test_rollout import example
from test_train import ROOT, TORCHRUN, flags, rows, run, without_time, write_parquet

import demo
import model as M
import rollout
import sharding
from grpo import Sample, plant
from rollout import HFEngine, Sampling, VLLMEngine, make_prompts

pytestmark = pytest.mark.vllm
CPU = torch.device("cpu")
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
RECURRENT = ("qwen3_5", "qwen3_5_moe")  # for a CPU vLLM has them in bfloat16 only, and with wider heads
SIZES = dict(max_model_len=384, max_images=3, max_batched_tokens=512, max_rows=64, cache_gb=0.125)


@pytest.fixture(scope="session")
def toys(tmp_path_factory):
    """As conftest's, but wider: vLLM's attention for CPUs wants heads of 32."""
    root = tmp_path_factory.mktemp("vllm_toys")
    for family in (*FAMILIES, *RECURRENT, "qwen2_vl"):
        demo.make_model(root / family, family, seed=0, hidden=256 if family in RECURRENT else 128, layers=2, vocab=448)
    return {family: root / family for family in (*FAMILIES, *RECURRENT, "qwen2_vl")}


KEPT = []  # vLLM takes its process groups down with the first engine that is collected


def start(folder, pixels=(), dtype=torch.float32, **more):
    KEPT.append(VLLMEngine(str(folder), M.load_processor(str(folder), *pixels), CPU, dtype, **SIZES | more))
    return KEPT[-1]


@pytest.fixture(scope="session", autouse=True)
def experts_first(toys):
    """vLLM makes its process group for experts with the first engine of a process, or never."""
    start(toys["qwen3_vl_moe"])


@pytest.fixture(scope="session")
def engines(toys):
    """family -> (VLLMEngine, hf model, processor); a test that changes the engine's weights puts them back by `restored`."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = start(toys[family]), M.load_hf(str(toys[family])).eval(), M.load_processor(str(toys[family]))
            made[family][0].load_weights(named(made[family][1]))
        return made[family]

    return get


@pytest.fixture
def restored(engines):
    """engines(family), with the engine's weights put back afterwards, and a fresh copy of the hf model to spoil."""
    used = []

    def get(family):
        engine, hf, processor = engines(family)
        used.append((engine, hf))
        spoilt = M.load_hf(hf.name_or_path).eval()
        return engine, spoilt, processor

    yield get
    for engine, hf in used:
        engine.load_weights(named(hf))


def named(hf, wanted=lambda name: True):
    return [(name, p.detach()) for name, p in hf.named_parameters() if wanted(name)]


@pytest.fixture
def mixed(picture):
    """Prompts with 1, 0, 2 and 3 pictures, most of them not of the size that the model sees."""
    return [example("one", "<image>What is it?", [picture(84, 84, 1)]),
            example("none", "Tell me something long and odd, would you please?", []),
            example("two", "Compare <image> with <image>.", [picture(60, 97, 2), picture(130, 56, 3)]),
            example("three", "<image><image> or <image>?", [picture(31, 33, 4), picture(200, 100, 5), picture(84, 84, 1)])]


def trainer_logprobs(hf, processor, rollout, temperature=1.0):
    micro = plant([Sample(rollout.uid, rollout.token_ids, [False] * rollout.prompt_len + rollout.loss_mask, {}, rollout.images)],
                  processor.image_token_id)
    with torch.no_grad():
        return M.Policy(hf, processor)(micro, temperature)[0]


def assert_same(ours, theirs, atol=1e-5):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.uid, a.sample, a.prompt_len, a.finish_reason, a.text) == (b.uid, b.sample, b.prompt_len, b.finish_reason, b.text)
        assert a.token_ids == b.token_ids
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=atol)


# --- the same function ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_hf_on_50_prompts_with_pictures(family, engines, picture, mixed):
    engine, hf, processor = engines(family)
    asked = ["What colour are they?", "How many shapes are there?", "Describe this in detail.", "Why?"]
    examples = [example(f"p{i}", f"<image>{asked[i % 4]}", [picture(40 + 7 * (i % 13), 40 + 11 * (i % 9), i)]) for i in range(50)]
    prompts = make_prompts(examples + mixed, processor)
    greedy = Sampling(16, temperature=0.0)
    assert_same(engine.generate(prompts, 1, greedy), HFEngine(hf, processor, CPU).generate(prompts, 1, greedy))


def test_qwen2_vl_too(toys, mixed):
    engine, hf, processor = start(toys["qwen2_vl"]), M.load_hf(str(toys["qwen2_vl"])), M.load_processor(str(toys["qwen2_vl"]))
    assert engine.load_weights(named(hf))["sync/calls"] == 1 and not engine.unequal_weights(named(hf))
    prompts = make_prompts(mixed, processor)
    assert_same(engine.generate(prompts, 1, Sampling(12, 0.0)), HFEngine(hf, processor, CPU).generate(prompts, 1, Sampling(12, 0.0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_the_trainers(family, engines, mixed):
    engine, hf, processor = engines(family)
    rollouts = engine.generate(make_prompts(mixed, processor), 5, Sampling(14, temperature=0.7, seed=3))
    worst = max((trainer_logprobs(hf, processor, r, 0.7) - torch.tensor(r.logprobs)).abs().max().item() for r in rollouts)
    assert worst <= 1e-5
    assert len({tuple(r.response) for r in rollouts}) == 20


def test_pixel_limits_reach_both_sides(toys, mixed):
    folder = str(toys["qwen2_5_vl"])
    engine = start(folder, (100 * 28 * 28 // 16, 12 * 28 * 28))
    processor = engine.processor
    prompts = make_prompts(mixed, processor)
    assert prompts[0].images[0].n_tokens != make_prompts(mixed, M.load_processor(folder))[3].images[1].n_tokens
    assert_same(engine.generate(prompts, 1, Sampling(8, 0.0)),
                HFEngine(M.load_hf(folder), processor, CPU).generate(prompts, 1, Sampling(8, 0.0)))


# --- groups, seeds, ends -------------------------------------------------------------------------------------------------


def test_groups_are_in_order_and_each_sample_has_its_own_seed(engines, mixed):
    engine, _, processor = engines("qwen2_5_vl")
    prompts = make_prompts(mixed, processor)
    sampling = Sampling(10, seed=5)
    rollouts = engine.generate(prompts, 3, sampling)
    assert [(r.uid, r.sample) for r in rollouts] == [(p.uid, i) for p in prompts for i in range(3)]
    assert all(r.token_ids[: r.prompt_len] == p.token_ids and r.images is p.images
               for r, p in zip(rollouts, [p for p in prompts for _ in range(3)], strict=True))
    assert_same(engine.generate(prompts, 3, sampling), rollouts)  # now from the prefix cache
    assert_same(engine.generate(prompts[2:3], 3, sampling), rollouts[6:9])  # whatever else is in the batch
    assert [r.token_ids for r in engine.generate(prompts, 3, Sampling(10, seed=6))] != [r.token_ids for r in rollouts]
    assert engine.generate([], 3, sampling) == []


def test_ends_are_kept_and_told_apart(restored, mixed):
    engine, hf, processor = restored("qwen2_5_vl")
    direction = torch.randn(128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hf.lm_head.weight[processor.eos_ids[0]] = 0.02 * direction
    engine.load_weights(named(hf))
    prompts = make_prompts(mixed, processor)
    rollouts = engine.generate(prompts, 16, Sampling(12, seed=1))
    ends = {r.finish_reason for r in rollouts}
    assert ends == {"stop", "length"}
    for r in rollouts:
        assert (r.finish_reason == "stop") == (r.response[-1] in processor.eos_ids) and not set(r.response[:-1]) & set(processor.eos_ids)
        assert len(r.response) == 12 or r.finish_reason == "stop"
        assert len(r.logprobs) == len(r.loss_mask) == len(r.response)
    greedy = Sampling(12, 0.0)
    assert_same(engine.generate(prompts, 1, greedy), HFEngine(hf, processor, CPU).generate(prompts, 1, greedy))


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_families_are_as_near_as_bfloat16_allows(family, toys, mixed):
    """Engine and trainer, before and after new weights; what bfloat16 does to transformers' own model is the measure."""
    hf, half, processor = M.load_hf(str(toys[family])).eval(), M.load_hf(str(toys[family])).eval(), M.load_processor(str(toys[family]))
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
            stale = engine.generate(prompts, 2, Sampling(10, seed=1))
            engine.load_weights(named(half))
            assert not engine.unequal_weights(named(half))
        rollouts = engine.generate(prompts, 2, Sampling(10, seed=1))
        exact, rounded = ([trainer_logprobs(model, processor, r) for r in rollouts] for model in (hf, half))
        ours = [(torch.tensor(r.logprobs) - e).abs().mean().item() for r, e in zip(rollouts, exact, strict=True)]
        theirs = [(a - e).abs().mean().item() for a, e in zip(rounded, exact, strict=True)]
        assert sum(ours) < 2 * sum(theirs) and max(ours) < 0.02
        half.float()
    assert [r.token_ids for r in stale] != [r.token_ids for r in rollouts]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholders_and_padding_cannot_be_sampled_even_by_a_model_that_wants_them(temperature, restored, mixed):
    engine, hf, processor = restored("qwen3_vl")
    banned = processor.banned(448).tolist()
    assert processor.image_token_id in banned and 447 in banned and len(banned) > 5
    direction = torch.randn(128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # whatever the hidden state, one of the two is far ahead
        hf.lm_head.weight[processor.image_token_id] = 100 * direction
        hf.lm_head.weight[447] = -100 * direction
    engine.load_weights(named(hf))
    prompts = make_prompts(mixed, processor)
    rollouts = engine.generate(prompts, 4, Sampling(10, temperature, seed=2))
    assert not {t for r in rollouts for t in r.response} & set(banned)
    for r in rollouts:
        assert (trainer_logprobs(hf, processor, r) - torch.tensor(r.logprobs)).abs().max() <= 1e-5
    unbanned = M.Policy(hf, processor)
    unbanned.banned = torch.tensor([], dtype=torch.long)
    r = rollouts[0]
    micro = plant([Sample("x", r.token_ids, [False] * r.prompt_len + r.loss_mask, {}, r.images)], processor.image_token_id)
    with torch.no_grad():
        assert unbanned(micro)[0].max() < -5  # without the ban the model would hardly ever have said this


# --- new weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tower", [False, True])
def test_after_a_sync_generation_is_that_of_a_fresh_engine(family, tower, restored, mixed, tmp_path, monkeypatch):
    engine, hf, processor = restored(family)
    prompts, sampling = make_prompts(mixed, processor), Sampling(10, seed=4)
    before = engine.generate(prompts, 3, sampling)
    generator = torch.Generator().manual_seed(1)
    changed = [name for name, _ in hf.named_parameters() if ("visual" in name) == tower]
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if name in changed:
                p += 0.2 * p.std() * torch.randn(p.shape, generator=generator)
    sharding.save_hf(hf, tmp_path)
    for file in Path(hf.name_or_path).iterdir():
        if not (tmp_path / file.name).exists():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    fresh = start(tmp_path).generate(prompts, 3, sampling)
    assert [r.token_ids for r in fresh] != [r.token_ids for r in before]
    synced = named(hf, lambda name: name in changed)
    with monkeypatch.context() as patch:  # the bug itself: without this reset the old pictures and prompts live on
        patch.setattr(engine, "reset_caches", lambda encoder: None)
        engine.load_weights(synced)
        stale = engine.generate(prompts, 3, sampling)
    assert [r.token_ids for r in stale] != [r.token_ids for r in fresh]
    engine.load_weights(synced)
    assert_same(engine.generate(prompts, 3, sampling), fresh)
    for r in engine.generate(prompts, 3, sampling):
        assert (trainer_logprobs(hf, processor, r) - torch.tensor(r.logprobs)).abs().max() <= 1e-5


def test_calls_and_bytes_are_as_predicted(restored, monkeypatch):
    engine, hf, _ = restored("qwen2_5_vl")
    sizes = {name: 4 * math.prod(p.shape) for name, p in hf.named_parameters()}
    calls = []
    original = type(engine.parts.model).load_weights
    monkeypatch.setattr(type(engine.parts.model), "load_weights",
                        lambda self, weights: calls.append(sum(t.nbytes for _, t in weights)) or original(self, weights))
    for wanted in (lambda name: True, lambda name: "visual" not in name):
        for limit in (1, 100_000, 300_000, 10**9):
            engine.bucket_bytes = limit
            expected, room = 0, 0  # consecutive tensors, a new bucket when the next does not fit
            for name, size in sizes.items():
                if wanted(name):
                    if size > room:
                        expected, room = expected + 1, limit
                    room -= size
            calls.clear()
            told = engine.load_weights(named(hf, wanted))
            assert told == {"sync/calls": expected, "sync/bytes": sum(size for name, size in sizes.items() if wanted(name))}
            assert len(calls) == expected and sum(calls) == told["sync/bytes"]
            assert max(calls) <= max(limit, max(sizes.values()))
    engine.bucket_bytes = 512 << 20


def test_unknown_and_missing_names_are_errors(restored, toys):
    engine, hf, _ = restored("qwen2_5_vl")
    vector = torch.zeros(128)
    # vLLM itself takes a bias that it does not know for a leftover of quantisation, and drops it without a word
    for name in ("model.language_model.layers.0.self_attn.o_proj.bias", "model.language_model.layers.9.mlp.up_proj.weight", "q"):
        with pytest.raises(ValueError, match=f"no parameter '{name}'"):
            engine.load_weights([(name, vector)])
    with pytest.raises(ValueError, match="no tensor was given"):
        engine.load_weights([])
    engine.complete = False  # as at the start, or after a deep sleep
    missing = "model.language_model.layers.1.self_attn.k_proj.bias"  # one of three that vLLM stacks in one parameter
    with pytest.raises(ValueError, match="1 of the engine's parameters were not sent, .*layers.1.self_attn.qkv_proj.bias"):
        engine.load_weights(named(hf, lambda name: name != missing))
    engine.load_weights(named(hf))
    assert engine.complete and not engine.unequal_weights(named(hf))
    with torch.no_grad():
        dict(hf.named_parameters())[missing][3] += 0.25
        hf.model.visual.blocks[1].mlp.up_proj.weight[0, 0] -= 0.5
    found = engine.unequal_weights(named(hf))
    assert found.keys() == {missing, "model.visual.blocks.1.mlp.up_proj.weight"} and found[missing] == pytest.approx(0.25)


# --- LoRA ----------------------------------------------------------------------------------------------------------------


def adapter_for(hf, seed, rank=8, alpha=16):
    """PEFT-named A and B for all language projections, and the weights with them merged."""
    generator = torch.Generator().manual_seed(seed)
    tensors, merged = {}, []
    for name, module in hf.named_modules():
        if isinstance(module, torch.nn.Linear) and "language_model" in name:
            a = torch.randn(rank, module.in_features, generator=generator) * module.in_features**-0.5
            b = torch.randn(module.out_features, rank, generator=generator) * 0.2
            tensors[f"base_model.model.{name}.lora_A.weight"], tensors[f"base_model.model.{name}.lora_B.weight"] = a, b
            merged.append((f"{name}.weight", module.weight.detach() + alpha / rank * b @ a))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return tensors, {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}, merged


@pytest.mark.parametrize("family", FAMILIES[:2])  # beside experts its adapters need a GPU
def test_adapters_and_merged_deltas_answer_alike(family, toys, mixed):
    hf, processor = M.load_hf(str(toys[family])).eval(), M.load_processor(str(toys[family]))
    engine = start(toys[family], lora_rank=8)
    engine.load_weights(named(hf))  # the base, below the adapter's layers
    assert not engine.unequal_weights(named(hf))
    prompts, greedy = make_prompts(mixed, processor), Sampling(10, 0.0)
    answers = [[r.token_ids for r in engine.generate(prompts, 1, greedy)]]
    plain = engine.generate(prompts, 1, greedy)
    for seed in (1, 2):
        tensors, config, merged = adapter_for(hf, seed)
        assert engine.load_adapter(tensors, config) == seed  # a new id each time
        reference = HFEngine(M.load_hf(str(toys[family])), processor, CPU)
        reference.load_weights(merged)
        ours = engine.generate(prompts, 1, greedy)
        assert_same(ours, reference.generate(prompts, 1, greedy))
        answers.append([r.token_ids for r in ours])
    assert answers[0] != answers[1] != answers[2]
    with pytest.raises(ValueError, match="load_adapter: vLLM refuses it"):
        engine.load_adapter({name.replace("q_proj", "z_proj"): t for name, t in tensors.items()}, config)
    # merged: new weights for an engine without adapters, and back again
    other = start(toys[family])
    other.load_weights(named(hf))
    other.load_weights(merged)
    assert_same(other.generate(prompts, 1, greedy), ours)
    other.load_weights(named(hf))
    assert_same(other.generate(prompts, 1, greedy), plain)


# --- what can go wrong ---------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_named_before_anything_is_generated(engines, picture):
    engine, _, processor = engines("qwen2_5_vl")
    long = make_prompts([example("long", "word " * 380, [])], processor)
    with pytest.raises(ValueError, match="'long': [0-9]+ prompt tokens and 8 new ones exceed the engine's 384; lower --max-prompt-tokens"):
        engine.generate(long, 1, Sampling(8))
    many = make_prompts([example("many", "<image>" * 4, [picture(56, 56, i) for i in range(4)])], processor)
    with pytest.raises(ValueError, match="'many' has 4 pictures, the engine takes 3; raise --limit-images"):
        engine.generate(many, 1, Sampling(8))


def test_more_pictures_than_the_caches_hold(engines, toys, picture):
    """Encoder budget, key-value blocks and the processor's cache all overflow; requests wait, nothing is lost."""
    _, hf, processor = engines("qwen2_5_vl")
    engine = start(toys["qwen2_5_vl"], cache_gb=0.003, max_rows=6, max_batched_tokens=128)
    prompts = make_prompts([example(f"b{i}", "<image>?", [picture(224, 196, i)]) for i in range(12)], processor)
    assert_same(engine.generate(prompts, 1, Sampling(6, 0.0)), HFEngine(hf, processor, CPU).generate(prompts, 1, Sampling(6, 0.0)))
    for r in engine.generate(prompts, 3, Sampling(6, seed=1)):
        assert (trainer_logprobs(hf, processor, r) - torch.tensor(r.logprobs)).abs().max() <= 1e-5


def test_a_cache_that_is_too_small_is_an_error_at_the_start(toys):
    with pytest.raises(ValueError, match="the engine did not start .*change --gpu-memory-utilization"):
        start(toys["qwen2_5_vl"], cache_gb=0.0001)


def test_settings_of_ones_own_reach_vllm_and_others_are_refused(toys, monkeypatch):
    more = rollout.vllm_settings(["block_size=64", "served_model_name=toy"], "vllm")
    assert more == {"block_size": 64, "served_model_name": "toy"}
    given = {}

    def stop(cuda, **settings):
        given.update(settings)
        raise RuntimeError("that is enough")

    monkeypatch.setattr(rollout, "start_vllm", stop)
    with pytest.raises(ValueError, match="that is enough"):
        start(toys["qwen2_5_vl"], more=more)
    assert given["block_size"] == 64 and given["served_model_name"] == "toy" and given["seed"] == 0
    for pair, match in (("kv_cache_dtyp=auto", "vLLM has no such setting; nearest: kv_cache_dtype"), ("block_size", "give KEY=VALUE"),
                        ("logprobs_mode=raw_logits", "relies on its own value"), ("max_num_seqs=3", "use --rollout-rows")):
        with pytest.raises(ValueError, match=match):
            rollout.vllm_settings([pair], "vllm")


def test_an_engine_out_of_memory_says_what_is_lost(toys, mixed):
    engine = start(toys["qwen2_5_vl"])

    def fail(*_):
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    engine.parts.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="vLLM failed .*OutOfMemoryError: tried to allocate 3 GiB.*--resume auto.*--rollout-rows"):
        engine.generate(make_prompts(mixed, engine.processor), 2, Sampling(4))


def test_another_prompt_than_the_processors_is_refused(engines, mixed):
    engine, _, processor = engines("qwen2_5_vl")
    prompts = make_prompts(mixed[:1], processor)
    prompts[0].pictures[0] = prompts[0].pictures[0].resize((112, 84))
    with pytest.raises(ValueError, match="'one': the engine's prompt has [0-9]+ tokens, .* differ from token"):
        engine.generate(prompts, 1, Sampling(4))


# --- whole runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm_data")
    path = write_parquet(folder / "train.parquet", demo.shapes_rows(24, "train", 0))
    flags("-", path, "-")  # writes the reward
    (folder / "letters.py").write_text("def score(response, example):\n"
                                       "    return sum(c.islower() for c in response) / (len(response) + 1)\n")
    return path


def command(toys, data, out, *more, family="qwen2_5_vl"):
    return [sys.executable, "train.py", *flags(toys[family], data, out, "--rollout", "vllm", *more)]


def test_a_run_learns_and_the_self_test_leaves_no_trace(toys, data, tmp_path):
    more = ["--steps", 14, "--eval-data", data, "--reward", f"{data.parent}/letters.py:score", "--lr", "3e-3", "--save-every", 14,
            "--group-size", 8, "--micro-tokens", 400, "--sync-bucket-mb", 1]
    done = run(command(toys, data, tmp_path / "with", *more))
    assert "rollouts by vllm" in done.stdout and "self-test: " in done.stdout and "weight tensors equal" in done.stdout
    logged = rows(tmp_path / "with")
    steps = [row for row in logged if "reward/mean" in row]
    reward = [row["reward/mean"] for row in steps]
    assert sum(reward[-3:]) / 3 > sum(reward[:3]) / 3 + 0.15
    hf = M.load_hf(str(toys["qwen2_5_vl"]))
    trained = sum(p.nbytes for name, p in hf.named_parameters() if "visual" not in name)  # the frozen are sent once, before step 1
    assert all(row["sync/bytes"] == trained and row["sync/calls"] == math.ceil(trained / 2**20) for row in steps)
    assert all(0 < row["rollout/max_abs_dlogp"] <= 1e-5 and row["rollout/kl"] < 1e-9 for row in steps)
    run(command(toys, data, tmp_path / "without", *more, "--no-self-test"))
    assert without_time(tmp_path / "without") == without_time(tmp_path / "with")


def test_a_crash_leaves_the_checkpoint_and_the_run_goes_on(toys, data, tmp_path):
    more = ["--steps", 4, "--save-every", 1]
    broken = tmp_path / "broken.py"
    broken.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import rollout, train, utils
original, calls = rollout.VLLMEngine.generate, []
def generate(engine, *args):
    calls.append(1)
    if len(calls) == 4:  # the self-test, two steps, and now
        engine.parts.model.register_forward_pre_hook(lambda *_: [][0])
        engine.parts.model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")), prepend=True)
    return original(engine, *args)
rollout.VLLMEngine.generate = generate
utils.run_script(train.main, train.parse_args)
""")
    crashed = run([sys.executable, broken, *command(toys, data, tmp_path / "r", *more)[2:]], check=False)
    assert crashed.returncode != 0 and "vLLM failed while generating" in crashed.stderr and "device lost" in crashed.stderr
    assert [p.name for p in sorted((tmp_path / "r" / "checkpoints").iterdir())][-1] == "step_000002"
    done = run([*command(toys, data, tmp_path / "r", *more), "--resume", "auto"])
    assert "resumed from" in done.stdout and [row["step"] for row in rows(tmp_path / "r")] == [1, 2, 3, 4]


@pytest.mark.parametrize("tp", [1, 2])
def test_two_processes(tp, toys, data, tmp_path):
    stale = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")  # as a run leaves it that was killed while it started
    if Path("/dev/shm").is_dir() and not stale.exists():
        stale.touch()
    more = ["--steps", 2, "--minibatches", 2, "--rollout-tp", tp, "--tp", 3 - tp, "--tis-cap", 1.01, "--tis-mask", "0.5,2",
            "--eval-data", data]
    launch = [*TORCHRUN, 2, *command(toys, data, tmp_path / "r", *more)[1:]]
    done = run(launch)
    assert "self-test: " in done.stdout and (tp == 1 or not stale.exists())
    for row in rows(tmp_path / "r")[1:]:
        assert 0 < row["rollout/max_abs_dlogp_image"] == row["rollout/max_abs_dlogp"] <= 1e-5
        assert "rollout/kl_text" not in row and row["rollout/tis_masked"] == 0 == row["rollout/tis_capped"]
        assert row["sync/calls"] == 1


def test_eval_with_either_engine(toys, data, tmp_path):
    results = []
    for engine in ("hf", "vllm"):
        run([sys.executable, "eval.py", toys["qwen2_5_vl"], "--data", data, "--out", tmp_path / engine, "--rollout", engine,
             "--baseline", toys["qwen2_5_vl"], "--max-new-tokens", 8, "--reward", f"{data.parent}/letters.py:score"])
        results.append(json.loads((tmp_path / engine / "eval.json").read_text()))
    assert results[0] == results[1] and results[0]["reward"] > 0


@pytest.mark.parametrize("family,more", [("qwen2_5_vl", []), ("qwen2_5_vl", ["--lora-rank", 4, "--lora-alpha", 32]), ("qwen3_vl_moe", [])])
def test_exported_runs_generate(family, more, toys, data, mixed, tmp_path):
    """A run, with adapters or without, whose weights reach the engine, and whose export opens in it."""
    run(command(toys, data, tmp_path / "r", "--steps", 2, "--lr", "3e-2", *more, family=family))
    assert all(row["rollout/max_abs_dlogp"] <= 1e-5 for row in rows(tmp_path / "r"))
    run([sys.executable, "merge_lora.py", tmp_path / "r", "--out", tmp_path / "hf"])
    hf, processor = M.load_hf(str(tmp_path / "hf")).eval(), M.load_processor(str(tmp_path / "hf"))
    engine, prompts, greedy = start(tmp_path / "hf"), make_prompts(mixed, processor), Sampling(10, 0.0)
    want = HFEngine(hf, processor, CPU).generate(prompts, 1, greedy)
    assert_same(engine.generate(prompts, 1, greedy), want)
    before = HFEngine(M.load_hf(str(toys[family])), processor, CPU).generate(prompts, 1, greedy)
    assert [r.token_ids for r in want] != [r.token_ids for r in before]
    engine.load_weights(named(hf))
    assert_same(engine.generate(prompts, 1, greedy), want)
