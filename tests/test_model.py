"""The processor, positions and the packed forward agree with transformers.   pytest tests/test_model.py"""

import copy
import json
import pickle
import random
import shutil
import socket
from itertools import chain, pairwise

import pytest
import torch
import transformers
from conftest import FAMILIES, dense_mask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.attention.flex_attention import create_block_mask

import demo
import layers.attention as attention
import model as M
import parallel.sharding as sharding
from errors import UserError
from grpo import Algorithm, PolicyLoss
from layers.attention import PackedAttention, block_mask, resolve_attention
from layers.lora import LoraConfig, add_lora, find_lora_layers
from packing import Packer, make_token_batch
from rollout import Prompt, Rollout, response_text
from sources import hub

QUESTION = "What is this odd thing, and why? "


def make_group(processor, images, responses, uid):
    """Return rollouts of one prompt."""
    ids = processor.tokenize_prompt([{"role": "user", "content": "<image>" * len(images) + QUESTION}], images)
    prompt = Prompt(uid, ids, images, None, [])
    rollouts = []
    for i, response in enumerate(responses):
        n = len(response)
        rollouts.append(Rollout(prompt, i, response, [True] * n, [0.0] * n, "stop", ""))
    return rollouts


def pack_together(rollouts, processor, share=True):
    """Pack all rollouts into one micro-batch."""
    [micro] = Packer(10**6, processor.image_token_id, share=share).pack(rollouts)
    return micro


def separate_logprobs(hf, processor, rollout, banned):
    """Return the log-probabilities of one response by transformers' unpacked forward, with its positions and masks."""
    ids = torch.tensor([rollout.prompt.token_ids + rollout.response])
    images = rollout.prompt.images
    extra = {}
    if images:
        extra = {"pixel_values": torch.cat([i.pixel_values() for i in images]),
                 "image_grid_thw": torch.tensor([i.grid_thw for i in images]),
                 "mm_token_type_ids": (ids == processor.image_token_id).int()}  # fmt: skip
    hf.model.rope_deltas = None  # transformers would reuse those of the previous sequence
    logits = hf(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).logits[0].clone()
    logits[:, banned] = -torch.inf
    first = len(rollout.prompt.token_ids)
    at = first + torch.tensor(rollout.response_mask).nonzero()[:, 0]
    return logits[at - 1].log_softmax(-1).gather(1, ids[0, at, None])[:, 0]


@pytest.fixture
def make_groups(picture):
    """Return a function that makes groups with 0, 1 and 3 images. Some responses are a single token, some share their
    first tokens."""

    def make(processor):
        sizes = [(84, 84), (60, 97), (130, 56), (84, 84)]
        images = [processor.image_to_patches(f"i{k}", picture(*size, seed=k)) for k, size in enumerate(sizes)]
        g = torch.Generator().manual_seed(1)
        responses = []
        for lengths in ([1, 7, 12], [5, 1], [3, 9, 2, 4]):
            responses.append([torch.randint(0, 250, (n,), generator=g).tolist() for n in lengths])
        responses[0].append(responses[0][2][:6] + [3, 4])  # begins with six tokens of another response
        responses[1].append(list(responses[1][0]))  # the first response again
        chosen = zip([[], images[:1], images[1:]], responses, "abc", strict=True)
        return [make_group(processor, group_images, group, uid) for group_images, group, uid in chosen]

    return make


@pytest.fixture
def make_rollouts(make_groups):
    return lambda processor: list(chain.from_iterable(make_groups(processor)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [1000, 105])  # one micro-batch, and a budget so small that a group is split
def test_packed_forward_equals_separate_forwards(family, budget, loaded, make_rollouts, toys, monkeypatch):
    hf, processor = loaded[family]
    if "3_5" in family:
        # Gradients of decay rates are small sums of large terms, of which fp32 keeps three digits in any order of
        # summation. transformers' recurrence requests fp32 by name, so that name is replaced below.
        hf = M.load_hf(str(toys[family])).double().eval()
        if "moe" in family:
            hf.set_experts_implementation("eager")  # grouped matmuls do not support float64
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    policy = M.Policy(hf, processor, "all")
    rollouts = make_rollouts(processor)
    tokens = make_token_batch(rollouts)
    micros = Packer(budget, processor.image_token_id).pack(rollouts)
    assert (len(micros) > 1) == (budget == 105) and all(m.n_tokens <= budget for m in micros)
    policy.zero_grad()
    packed = {}
    for m in micros:
        logp_K = policy(m).logp_K
        (logp_K * torch.sin(m.target_K.float())).sum().backward()  # a weight per token, for any packing order
        rollout_K = tokens[m.token_index_K].rollout
        for i in rollout_K.unique().tolist():
            assert i not in packed  # each rollout is in one micro-batch
            packed[i] = logp_K[rollout_K == i].detach()
    gradients = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    assert len(packed) == len(rollouts)
    for i, rollout in enumerate(rollouts):
        want = separate_logprobs(hf, processor, rollout, policy.banned)
        (want * torch.sin(torch.tensor(rollout.response).float())).sum().backward()
        torch.testing.assert_close(packed[i], want.detach(), rtol=0, atol=2e-6)
    assert any(n.startswith("hf.model.visual") for n in gradients)
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            error = (parameter.grad - gradients[name]).norm() / parameter.grad.norm().clamp(min=1e-8)
            assert error < 1e-5, f"{name}: relative gradient error {error:.1e}"


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_groups_equal_separate_forwards(data, loaded, picture):
    """Vary prompts, images, responses with shared prefixes, and the budget, which fits the longest sequence."""
    hf, processor = loaded[data.draw(st.sampled_from(FAMILIES))]
    rollouts = []
    for uid in "abc"[: data.draw(st.integers(1, 3))]:
        sizes = data.draw(st.lists(st.sampled_from([(84, 84), (60, 97), (130, 56)]), max_size=3))
        images = [processor.image_to_patches(f"{uid}{k}", picture(*size, seed=k)) for k, size in enumerate(sizes)]
        responses = data.draw(st.lists(st.lists(st.integers(20, 22), min_size=1, max_size=7), min_size=1, max_size=4))
        rollouts += make_group(processor, images, responses, uid)
    policy = M.Policy(hf, processor)
    tokens = make_token_batch(rollouts)
    longest = max(len(r.prompt.token_ids) + len(r.response) - 1 for r in rollouts)
    packer = Packer(longest + data.draw(st.integers(0, 60)), processor.image_token_id, share=data.draw(st.booleans()))
    with torch.no_grad():
        for micro in packer.pack(rollouts):
            logp_K = policy(micro).logp_K
            rollout_K = tokens[micro.token_index_K].rollout
            for i in rollout_K.unique().tolist():
                want = separate_logprobs(hf, processor, rollouts[i], policy.banned)
                torch.testing.assert_close(logp_K[rollout_K == i], want, rtol=0, atol=2e-6)


def test_a_response_sees_only_its_own_prompt(loaded, make_groups):
    """A response depends on its image but not on other groups. The tests above would pass if nothing did."""
    hf, processor = loaded["qwen2_5_vl"]
    policy = M.Policy(hf, processor)
    a, b, c = make_groups(processor)
    with torch.no_grad():
        alone = policy(pack_together(b, processor)).logp_K
        together = pack_together(a + b + c, processor)
        rollout_K = make_token_batch(a + b + c)[together.token_index_K].rollout
        is_b = (rollout_K >= len(a)) & (rollout_K < len(a) + len(b))
        torch.testing.assert_close(alone, policy(together).logp_K[is_b], rtol=0, atol=2e-6)
        image = b[0].prompt.images[0]
        blank = processor.image_to_patches("blank", Image.new("RGB", image.image.size))
        changed = policy(pack_together(make_group(processor, [blank], [r.response for r in b], "b"), processor)).logp_K
    assert (alone - changed).abs().max() > 1e-3


def test_rollouts_share_the_tokens_before_different_images(loaded, picture):
    """Rollouts share the prompt and the first turn, then see different images: their prefix ends within a turn."""
    hf, processor = loaded["qwen3_vl"]
    policy = M.Policy(hf, processor)
    first, left, right = (processor.image_to_patches(str(k), picture(84, 84, seed=k)) for k in range(3))
    ids = processor.tokenize_prompt([{"role": "user", "content": "<image>look"}], [first])
    observation = processor.tokenize_prompt([{"role": "user", "content": "<image>and now?"}], [left])
    first_turn, answers = [5, 6, 7, 8], [[9, 10, 11], [9, 10, 12]]
    rollouts = []
    for image, answer in [(left, answers[0]), (left, answers[1]), (right, answers[0])]:
        prompt = Prompt("deep", ids, [first, image], None, [])
        mask = [True] * 4 + [False] * len(observation) + [True] * 3
        rollouts.append(Rollout(prompt, len(rollouts), first_turn + observation + answer, mask, [0.0] * 7, "stop", ""))
    micro = pack_together(rollouts, processor)
    # the tokens before the second image once, then once per image the rest of that turn and two tokens of the answer,
    # whose last token is not an input
    before_image = observation.index(processor.image_token_id)
    assert micro.n_tokens == len(ids) + 4 + before_image + 2 * (len(observation) - before_image + 2)
    assert len(micro.segments) == 2 and len(micro.images) == 3
    with torch.no_grad():
        logp_K = policy(micro).logp_K
        rollout_K = make_token_batch(rollouts)[micro.token_index_K].rollout
        for i, rollout in enumerate(rollouts):
            want = separate_logprobs(hf, processor, rollout, policy.banned)
            torch.testing.assert_close(logp_K[rollout_K == i], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_flex_attention_equals_the_dense_mask(family, loaded, make_rollouts):
    hf, processor = loaded[family]
    micro = pack_together(make_rollouts(processor), processor)
    assert micro.n_tokens % 128  # so that padding is exercised
    with torch.no_grad():
        dense, flex = (M.Policy(hf, processor, attention=back_end)(micro).logp_K for back_end in ("sdpa", "flex"))
    torch.testing.assert_close(flex, dense, rtol=0, atol=2e-6)


@pytest.mark.parametrize("n", [1, 127, 128, 129, 256, 700, 1024])
def test_the_block_mask_equals_the_dense_mask(n):
    """Blocks that are computed without a mask are fully visible; blocks that are skipped are fully invisible."""
    rng = random.Random(n)
    for _ in range(5):
        lengths = [rng.choice((1, 5, 130, 300)) for _ in range(n)]
        end_T = torch.tensor([min(n, k + lengths[k]) for k in range(n)])
        mask, padded = block_mask(end_T)
        assert padded % 128 == 0 and padded > n and padded >= 256
        q, k = torch.arange(padded)[:, None], torch.arange(padded)[None]
        visible = mask.mask_mod(None, None, q, k)
        assert torch.equal(visible[:n, :n], (k <= q)[:n, :n] & (q[:n] < end_T))
        assert torch.equal(visible[n:], (q == k)[n:])
        computed = torch.zeros(padded, padded, dtype=torch.int32)
        for counts, numbers, value in (
            (mask.kv_num_blocks, mask.kv_indices, 1), (mask.full_kv_num_blocks, mask.full_kv_indices, 2)
        ):  # fmt: skip
            for row in range(padded // 128):
                for column in numbers[0, 0, row, : counts[0, 0, row]].tolist():
                    computed[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)] += value
        assert computed.max() <= 2 and visible[computed == 2].all() and not visible[computed == 0].any()
        wanted = create_block_mask(mask.mask_mod, None, None, padded, padded, device="cpu")
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(mask, name), getattr(wanted, name)), name


def test_the_block_mask_of_a_long_sequence_is_small():
    mask, padded = block_mask(torch.full((131_072,), 131_072))  # a T x T mask of booleans would take 16 GiB
    assert padded == 131_072 + 128 and mask.kv_indices.shape == (1, 1, 1025, 1025)


def test_attention_that_needs_a_gpu_is_refused_on_a_cpu():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_attention("auto", cpu) == "sdpa" and resolve_attention("auto", cuda) == "flex"
    for name in ("flash", "flex"):
        assert resolve_attention(name, cuda) == name
        with pytest.raises(ValueError, match=f"--attn {name} trains on CUDA only"):
            resolve_attention(name, cpu)


def test_flash_bounds_are_the_bounds_of_the_sequences(loaded, make_rollouts):
    """Check the kernel's arguments, which needs no GPU. Without shared prefixes its runs are whole sequences, and they
    describe the dense mask."""
    _, processor = loaded["qwen2_5_vl"]
    rollouts = make_rollouts(processor)
    micro = pack_together(rollouts, processor, share=False)
    plan = PackedAttention("flash", micro)
    bounds = plan.cu_seqlens.tolist()
    lengths = [len(r.prompt.token_ids) + len(r.response) - 1 for r in rollouts]
    assert sorted(b - a for a, b in pairwise(bounds)) == sorted(lengths) and plan.longest == max(lengths)
    assert bounds[0] == 0 and bounds[-1] == micro.n_tokens
    blocks = torch.block_diag(*(torch.ones(b - a, b - a).tril() for a, b in pairwise(bounds)))
    assert torch.equal(blocks.bool(), dense_mask(micro.subtree_end_T))
    with pytest.raises(AssertionError, match="shared prefix"):
        PackedAttention("flash", pack_together(rollouts, processor))


def test_cached_features_equal_computed_ones_and_the_cache_keeps_its_limit(loaded, picture, monkeypatch):
    hf, processor = loaded["qwen3_vl"]
    images = [processor.image_to_patches(str(k), picture(84, 84, seed=k)) for k in range(3)]
    with torch.no_grad():
        plain, deep = M.vision_features(hf, images)
        size = (plain.nbytes + sum(d.nbytes for d in deep)) / 3
        cache = M.VisionCache(2.5 * size)
        cold = M.vision_features(hf, images, cache)
        assert len(cache.entries) == 2 and cache.bytes <= 2.5 * size
        monkeypatch.setattr(hf.model, "get_image_features", None)  # a hit must not compute
        warm = M.vision_features(hf, images[1:], cache)
    # the cache computes each image alone, and other shapes are summed in another order
    torch.testing.assert_close(cold, (plain, deep), rtol=0, atol=1e-5)
    third = len(plain) // 3  # the last two images are read from the cache, so they are copies
    assert torch.equal(warm[0], cold[0][third:]) and torch.equal(warm[1][0], cold[1][0][third:])
    with pytest.raises(AssertionError, match="stale"):
        M.Policy(hf, processor, "all", cache=cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_equal_transformers(family, loaded, picture):
    hf, processor = loaded[family]
    images = [processor.image_to_patches(str(k), picture(*size)) for k, size in enumerate([(84, 112), (200, 60)])]
    content = "look <image> and then <image>, what now?"
    ids = processor.tokenize_prompt([{"role": "user", "content": content}], images) + list(range(9))
    x = torch.tensor([ids])
    grids = [i.grid_thw for i in images]
    want, _ = hf.model.get_rope_index(
        x, mm_token_type_ids=(x == processor.image_token_id).int(), image_grid_thw=torch.tensor(grids)
    )
    got = M.mrope_positions(ids, images, processor.image_token_id, processor.merge_size)
    assert torch.equal(got, want[:, 0])
    assert M.mrope_positions([], [], 5, 2).shape == (3, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_has_as_many_image_tokens_as_features(family, loaded, picture):
    hf, processor = loaded[family]
    sizes = [(84, 84), (640, 400), (30, 500), (1, 1)]
    images = [processor.image_to_patches(str(k), picture(*size)) for k, size in enumerate(sizes)]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>" * 4 + "so?"}]
    ids = processor.tokenize_prompt(messages, images)
    assert processor.count_tokens(messages, sizes) == len(ids)
    with torch.no_grad():
        features, deep = M.vision_features(hf, images)
    assert features.shape[0] == ids.count(processor.image_token_id) == sum(i.n_tokens for i in images)
    assert len(deep) == (1 if family.startswith("qwen3_vl") else 0)


def test_equal_images_are_computed_once(loaded, picture, monkeypatch):
    hf, processor = loaded["qwen2_5_vl"]
    a, b = processor.image_to_patches("a", picture(84, 84, 1)), processor.image_to_patches("b", picture(56, 84, 2))
    batch_sizes = []
    original = hf.model.get_image_features
    monkeypatch.setattr(
        hf.model, "get_image_features", lambda p, g, **k: (batch_sizes.append(len(g)), original(p, g, **k))[1]
    )
    with torch.no_grad():
        together = M.vision_features(hf, [a, b, a])[0]
        alone = M.vision_features(hf, [a])[0]
    assert batch_sizes == [2, 1]
    torch.testing.assert_close(together[-9:], alone, rtol=1e-5, atol=1e-6)  # another batch, other kernels


def test_image_marks_and_images_must_have_the_same_number(loaded, picture):
    _, processor = loaded["qwen2_5_vl"]
    image = processor.image_to_patches("a", picture(84, 84))
    with pytest.raises(ValueError, match="2 <image> marks .* but 1 images"):
        processor.tokenize_prompt([{"role": "user", "content": "<image><image>?"}], [image])
    with pytest.raises(ValueError, match="0 <image> marks .* but 1 images"):
        processor.tokenize_prompt([{"role": "user", "content": "?"}], [image])
    with pytest.raises(ValueError, match="2 <image> marks or"):  # a placeholder smuggled in as text
        processor.tokenize_prompt([{"role": "user", "content": "<image> <|image_pad|>"}], [image])


def test_banned_ids_are_the_placeholders_and_the_padding_rows(loaded):
    hf, processor = loaded["qwen2_5_vl"]
    banned = processor.banned_token_ids(hf.config.text_config.vocab_size).tolist()
    names = processor.tokenizer.convert_ids_to_tokens(banned[:5])
    assert set(names) == set(M.VISION_TOKENS)
    assert banned[5:] == list(range(len(processor.tokenizer), 448)) and len(banned) > 5
    assert not set(banned) & set(processor.eos_ids)


def test_frozen_vision_has_no_gradient(loaded, make_rollouts):
    hf, processor = loaded["qwen3_vl"]
    policy = M.Policy(hf, processor, "none")
    policy.zero_grad()
    policy(pack_together(make_rollouts(processor), processor)).logp_K.sum().backward()
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is None) == ("visual" in name), name


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("train_vision", M.TRAIN_VISION)
def test_frozen_parameters_have_neither_gradient_nor_optimizer_state(family, train_vision, loaded, make_rollouts):
    hf, processor = loaded[family]
    policy = M.Policy(hf, processor, train_vision)
    policy.zero_grad()
    optimizer = sharding.make_optimizer(policy, 1e-3, 0.0, vision_lr=1e-5)
    policy(pack_together(make_rollouts(processor), processor)).logp_K.sum().backward()
    rates = {}
    for group in optimizer.param_groups:
        rates |= {id(p): group["lr"] for p in group["params"]}
    for name, p in policy.named_parameters():
        part = "merger" if "visual" in name and "merger" in name else "tower" if "visual" in name else "language"
        frozen = part != "language" and train_vision not in (part, "all")
        assert (p.grad is None) == frozen and (p not in optimizer.state) == frozen, name
        assert frozen or rates[id(p)] == (1e-3 if part == "language" else 1e-5)
    state_bytes = sum(state["exp_avg"].nbytes for state in optimizer.state.values())
    assert state_bytes == sum(p.nbytes for p in policy.parameters() if p.requires_grad)
    assert policy.vision_frozen == (train_vision == "none")
    policy.zero_grad()


def test_a_micro_batch_without_images_gives_a_trained_tower_zero_gradients(loaded, make_groups):
    hf, processor = loaded["qwen2_5_vl"]
    policy = M.Policy(hf, processor, "all")
    policy.zero_grad()
    policy(pack_together(make_groups(processor)[0], processor)).logp_K.sum().backward()
    tower = [p for n, p in policy.named_parameters() if "visual" in n]
    assert tower and all(p.grad is not None and p.grad.abs().max() == 0 for p in tower)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_micro_batch_gives_all_trained_parameters_zero_gradients(family, loaded):
    """A rank with less work than others joins their collectives with an empty micro-batch."""
    hf, processor = loaded[family]
    policy = M.Policy(hf, processor, "all", value_head=True)
    packer = Packer(9, processor.image_token_id)
    [micro] = packer.pack([], reduce_max=lambda needed: needed + 1)
    tokens = make_token_batch([])
    tokens.weights = tokens.advantages = torch.zeros(0)
    policy.zero_grad()
    out = policy(micro, 1.0, PolicyLoss(Algorithm()), tokens)
    (out.loss + out.value_K.sum()).backward()
    assert out.loss.item() == 0 and len(out.logp_K) == len(out.entropy_K) == len(out.value_K) == 0
    for name, p in policy.named_parameters():
        assert p.grad is not None and p.grad.abs().max() == 0, name
    policy.zero_grad()


def test_errors_name_models_that_cannot_be_loaded(tmp_path, toys):
    with pytest.raises(ValueError, match="no such folder"):
        M.load_config(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="neither a folder with a config.json"):
        M.load_config("nobody/no-such-model")
    run = tmp_path / "demo" / "run"
    for file in (run / "run.json", run / "step" / "trainer.json", run.with_name("start") / "config.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    for folder in (run, run / "step"):
        with pytest.raises(ValueError, match=f"is a run, checkpoint .*python merge_lora.py {folder} --out DIR"):
            M.load_config(str(folder))
    for wrong, hint in (("demo", "inside it"), ("demo/strat", "did you mean")):
        with pytest.raises(ValueError, match=f"{tmp_path / wrong}'.*{hint}.*{tmp_path}/demo/start"):
            M.load_config(str(tmp_path / wrong))
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="'bert'; supported: qwen2_vl, qwen2_5_vl, qwen3_vl"):
        M.load_config(str(tmp_path / "bert"))
    with pytest.raises(ValueError, match="cannot load its tokenizer"):
        M.Processor(str(tmp_path / "bert"))
    with pytest.raises(ValueError, match="--min-pixels 9999999 is above --max-pixels"):
        M.Processor(str(toys["qwen2_vl"]), min_pixels=9999999)


@pytest.mark.parametrize("endpoint", ["https://huggingface.invalid", "http://127.0.0.1:9", None])
def test_a_hub_id_without_a_connection_fails_at_once_and_says_what_to_do(endpoint, monkeypatch, capfd):
    """Its client retried for 30 s. No endpoint: HF_HUB_OFFLINE=1 is set."""
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", endpoint is None)
    monkeypatch.setattr(hub.constants, "ENDPOINT", endpoint or "https://huggingface.co")
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for load in (M.load_config, M.Processor, M.load_hf):
        with pytest.raises(UserError, match="`hf download nobody/nothing --local-dir FOLDER`, .*HF_ENDPOINT") as caught:
            load("nobody/nothing")
        assert "HF_HUB_OFFLINE" in str(caught.value) and "\n" not in str(caught.value)
    error = capfd.readouterr().err
    assert "Retry" not in error and error.count("no connection to") == (endpoint is not None)


def test_the_connection_to_the_hub_is_left_alone_if_it_works(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "getproxies", dict)
        monkeypatch.setattr(hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.offline_remedy("a/b") == "" and not hub.constants.HF_HUB_OFFLINE
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy"})  # it may reach what we cannot
    assert hub.offline_remedy("a/b") == "" and not hub.constants.HF_HUB_OFFLINE
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    assert hub.offline_remedy(str(tmp_path)) == ""  # a folder needs no hub


def test_the_error_for_a_bad_family_path_lists_valid_paths(toys, monkeypatch):
    model = str(toys["qwen3_vl"])
    row = M.FAMILIES.pop("qwen3_vl")
    monkeypatch.setitem(M.FAMILIES, "other", row)
    try:
        good = ("model.visual", "model.language_model")
        family = M.find_family(M.load_config(model, good), model, good)
        assert (family.vision_blocks, family.blocks) == ("blocks", "layers")
        hf, known_hf = M.load_hf(model, paths=good), M.load_hf(model, paths=good)
        known_hf.family = row
        assert (
            find_lora_layers(add_lora(hf, LoraConfig(1, 1.0))).keys()
            == find_lora_layers(add_lora(known_hf, LoraConfig(1, 1.0))).keys()
        )
        for paths, message in [
            ((), "type 'qwen3_vl'; supported: qwen2_vl"),
            (good[:1], "--family-paths model.visual: give two"),
            ((good[0], "model.text.layers"),
             "'model.text.layers' has no list of blocks; use a path that has one: model.visual, model.language_model"),
            ((good[0], "model.language_model.norm"), "'model.language_model.norm' has no list of blocks"),
            (("visual", good[1]),
             "--family-paths 'visual' has no list of blocks; use a path that has one: model.visual, "),
        ]:  # fmt: skip
            with pytest.raises(ValueError, match=message):
                M.load_config(model, paths)
    finally:
        M.FAMILIES["qwen3_vl"] = row


@pytest.mark.parametrize("path", ["model.visual", "model.visual.vision_model", "model.visual.vision_model.encoder"])
def test_blocks_may_lie_deeper_in_the_tower_than_the_path(path):
    """All these paths select the whole tower, which is what gets frozen, sharded and adapted."""
    config = transformers.AutoConfig.for_model("paddleocr_vl")
    family = M.find_family(config, "x", (path, "model.language_model"))
    assert (family.vision, family.vision_blocks) == ("model.visual", "vision_model.encoder.layers")
    assert (family.language, family.blocks) == ("model.language_model", "layers")


def test_models_with_another_kind_of_image_processing_are_refused(toys, tmp_path):
    supported = "supported are models that process images as Qwen-VL does.*as qwen2_vl, qwen2_5_vl, qwen3_vl"
    config = transformers.AutoConfig.for_model("llava")
    with pytest.raises(UserError, match=rf"--model 'x' \(llava\): {supported}"):
        M.find_family(config, "x", ("model.vision_tower.encoder", "model.language_model"))
    shutil.copytree(toys["qwen2_5_vl"], tmp_path / "other")
    file = next(f for f in (tmp_path / "other").iterdir() if f.name == "preprocessor_config.json")
    settings = json.loads(file.read_text())
    for kind in ("Glm4vImageProcessor", "CLIPImageProcessor"):  # of GLM-4V; of LLaVA, without longest_edge
        size = settings["size"] if kind[0] == "G" else {"shortest_edge": 336}
        file.write_text(json.dumps(settings | {"image_processor_type": kind, "size": size}))
        with pytest.raises(UserError, match=f"its image processor is {kind[:5]}.*; {supported}"):
            M.Processor(str(tmp_path / "other"))


@pytest.fixture
def change_folder(toys, tmp_path):
    """change_folder({file name: settings to change, text, or None}) -> a copy of a toy model with other files."""

    def change(files):
        folder = shutil.copytree(toys["qwen2_5_vl"], tmp_path / "model")
        for name, content in files.items():
            file = folder / name
            if isinstance(content, dict):
                content = json.dumps((json.loads(file.read_text()) if file.exists() else {}) | content)
            file.write_text(content) if content else file.unlink()
        return str(folder)

    return change


SIZES = [  # (file, size, --min-pixels and --max-pixels, expected limits; None: refused)
    ("preprocessor_config.json", {"min_pixels": 3136, "max_pixels": 200704}, (), (3136, 200704)),
    ("preprocessor_config.json", {"min_pixels": 3136, "max_pixels": 200704}, (None, 9000), (3136, 9000)),
    ("preprocessor_config.json", {"shortest_edge": 3136, "longest_edge": None}, (), None),
    ("preprocessor_config.json", {"shortest_edge": 3136, "longest_edge": None}, (None, 9000), (3136, 9000)),
    ("preprocessor_config.json", {"min_pixels": None, "max_pixels": 9000}, (), None),
    ("preprocessor_config.json", {"height": 224, "width": 224}, (), None),
    ("preprocessor_config.json", {"height": 224, "width": 224}, (3136, None), None),
    ("preprocessor_config.json", {"height": 224, "width": 224}, (3136, 9000), (3136, 9000)),
    ("preprocessor_config.json", 224, (), None),
    ("processor_config.json", {"min_pixels": 3136, "max_pixels": 200704}, (), (3136, 200704)),
    ("processor_config.json", {"longest_edge": 9000, "shortest_edge": None}, (), None),
    ("video_preprocessor_config.json", {"min_pixels": 1, "max_pixels": None}, (), (784, 262144)),  # not read
]


@pytest.mark.parametrize("case", range(len(SIZES)))
def test_pixel_limits_of_other_versions_are_read_or_refused(case, change_folder, toys):
    name, size, flags, expected = SIZES[case]
    settings = json.loads((toys["qwen2_5_vl"] / "preprocessor_config.json").read_text())
    files = {name: {"size": size}}
    if name == "processor_config.json":
        files = {"preprocessor_config.json": None, name: {"image_processor": settings | {"size": size}}}
    folder = change_folder(files)
    if expected:
        assert tuple(dict(M.Processor(folder, *flags).image_processor.size).values()) == expected
    else:
        with pytest.raises(UserError, match="preprocessor_config.json or processor_config.json has the size .*edge"):
            M.Processor(folder, *flags)


PAD, END = 385, 384  # <|endoftext|>, <|im_end|>


@pytest.mark.parametrize("generation, tokenizer, expected", [
    ({"eos_token_id": PAD}, {}, [END, PAD]),
    ({"eos_token_id": [PAD]}, {}, [END, PAD]),
    ({"eos_token_id": [END, PAD]}, {}, [END, PAD]),
    ({"eos_token_id": None}, {}, [END]),
    (None, {}, [END]),
    ({"eos_token_id": PAD}, {"eos_token": "<|endoftext|>"}, [END, PAD]),  # the template ends turns with <|im_end|>
    ({"eos_token_id": None}, {"eos_token": None}, [END]),
])  # fmt: skip
def test_a_response_ends_at_every_end_token(generation, tokenizer, expected, change_folder):
    folder = change_folder({"generation_config.json": generation, "tokenizer_config.json": tokenizer})
    assert M.Processor(folder).eos_ids == expected


CLOSED = "<think>\n\n</think>\n\n"
OPENINGS = [  # (end of the prompt, what the history has before a response, the opening)
    *((text, "", text) for text in ("", "<think>\n", "<think>", "<reasoning>\n", "[THINK]", "<|begin_of_thought|>\n",
                                    "Let me look.\n")),
    ("\n", "", ""), (CLOSED, "", ""), (CLOSED, CLOSED, ""), ("", CLOSED, ""),
    ("<think>\n", CLOSED, "<think>\n"), ("<reasoning>", CLOSED, "<reasoning>"),
]  # fmt: skip


@pytest.mark.parametrize("text, history, opening", OPENINGS)
def test_a_response_begins_with_the_templates_opening(text, history, opening, loaded):
    processor = copy.copy(loaded["qwen2_5_vl"][1])
    processor.tokenizer = copy.deepcopy(processor.tokenizer)
    template = processor.tokenizer.chat_template.rstrip().removesuffix("{% endif %}") + text + "{% endif %}"
    role = "{{ message['role'] }}\n"
    assert role in template
    template = template.replace(role, role + "{% if message['role'] == 'assistant' %}" + history + "{% endif %}")
    processor.tokenizer.chat_template = template
    processor.opening, _ = processor._try_template("x")
    assert processor.opening == opening
    assert response_text(processor, [*processor.tokenizer.encode("a b"), END]) == f"{opening}a b"


def test_templates_of_other_files_are_read_and_those_without_images_refused(change_folder, toys, tmp_path):
    template = (toys["qwen2_5_vl"] / "chat_template.jinja").read_text()
    named = [{"name": "default", "template": template}, {"name": "tools", "template": "x"}]
    places = {"chat_template.json": template, "processor_config.json": template, "tokenizer_config.json": named}
    for name, content in places.items():
        folder = change_folder({"chat_template.jinja": None, name: {"chat_template": content}})
        assert M.Processor(folder).apply_chat_template([{"role": "user", "content": "<image>"}]).count("pad|>") == 1
        shutil.rmtree(folder)
    loop = "{% for m in messages %}"
    for wrong, message in [
        ("", "no chat template in its tokenizer, chat_template.json or processor_config.json"),
        (loop + "{{ m['role'] + m['content'] }}{% endfor %}", "cannot write a prompt with an image; .*concatenate"),
        (loop + "{{ m['content'] }}{% endfor %}", "writes 0 image tokens"),
        (template.replace("<|vision_end|>", "<|image_pad|>"), "writes 2 image tokens"),
        ("{{ raise_exception('no images') }}", "cannot write a prompt with an image; .*no images"),
    ]:
        folder = change_folder({"chat_template.jinja": wrong})
        with pytest.raises(UserError, match=message):
            M.Processor(folder)
        shutil.rmtree(folder)


def test_a_base_without_a_tensor_or_with_another_head_than_the_tied_one_is_refused(toys, tmp_path):
    shutil.copytree(toys["qwen2_5_vl"], tmp_path / "cut")
    weights = load_file(tmp_path / "cut" / "model.safetensors")
    name = next(key for key in weights if "layers.1.mlp.down_proj" in key)
    save_file({key: tensor for key, tensor in weights.items() if key != name}, tmp_path / "cut" / "model.safetensors")
    with pytest.raises(UserError, match="1 tensors are missing: .*layers.1.mlp.down_proj"):
        M.load_hf(str(tmp_path / "cut"))
    config = json.loads((toys["qwen2_5_vl"] / "config.json").read_text())
    for section in (config, config["text_config"]):
        section.pop("tie_word_embeddings", None)
    tie = {"tie_word_embeddings": True}
    for change in (tie, {"text_config": config["text_config"] | tie}):
        (tmp_path / "cut" / "config.json").write_text(json.dumps(config | change))
        head = torch.ones_like(weights["lm_head.weight"])
        save_file(weights | {"lm_head.weight": head, "mtp.embed_tokens.weight": head.clone()},
                  tmp_path / "cut" / "model.safetensors")
        with pytest.raises(UserError, match="config.json ties the head .* although the files hold both"):
            M.load_hf(str(tmp_path / "cut"))


def test_pixel_limits_change_the_number_of_image_tokens(toys, picture):
    small = M.Processor(str(toys["qwen2_5_vl"]), max_pixels=56 * 56)
    assert small.image_to_patches("a", picture(400, 400)).n_tokens <= 4
    large = M.Processor(str(toys["qwen2_5_vl"]), min_pixels=280 * 280)
    assert large.image_to_patches("a", picture(40, 40)).n_tokens >= 100


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_loss_inside_the_head_equals_loss_on_logprobs(tied, kernel, make_rollouts, tmp_path):
    """Compare on a real micro-batch, with tied and untied head, and with the vocabulary's padding rows banned."""
    demo.make_model(tmp_path, "qwen2_5_vl", seed=1, hidden=64, layers=1, vocab=448, tied=tied)
    hf, processor = M.load_hf(str(tmp_path)), M.Processor(str(tmp_path))
    policy = M.Policy(hf, processor, "all", kernel=kernel)
    rollouts = make_rollouts(processor)
    micro = pack_together(rollouts, processor)
    tokens = make_token_batch(rollouts)
    tokens.advantages = torch.randn(len(tokens))
    tokens.weights = torch.rand(len(tokens))
    tokens.old_logps = torch.randn(len(tokens)) * 0.1 - 6.0
    tokens_K = tokens[micro.token_index_K]
    loss = PolicyLoss(Algorithm(dual_clip=2.0, entropy_coef=0.05, update_epochs=2))
    results = []
    for fused in (True, False):
        policy.zero_grad()
        if fused:
            out = policy(micro, 0.9, loss, tokens_K)
            total = out.loss
        else:
            policy.kernel = "torch"
            out = policy(micro, 0.9)
            assert out.loss is None and out.value_K is None
            total = loss(out.logp_K, out.entropy_K, tokens_K)[0].sum()
        total.backward()
        gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}
        results.append((total.detach(), out.logp_K.detach(), gradients))
    (total, logp_K, gradients), (want, want_logp_K, exact) = results
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logp_K, want_logp_K, rtol=0, atol=5e-6)
    head = "hf.model.language_model.embed_tokens.weight" if tied else "hf.lm_head.weight"
    assert exact[head].abs().max() > 0 and ("hf.lm_head.weight" in exact) == (not tied)
    for name, gradient in gradients.items():
        assert (gradient - exact[name]).norm() <= 1e-5 * exact[name].norm() + 1e-9, name


def test_unsupported_attention_is_refused(toys, tmp_path):
    """Refuse sliding windows, which were once ignored, and rotary frequencies that depend on the batch."""
    sliding = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None}
    for change, match in (
        (lambda text: text.update(sliding), "has sliding_attention layers with a window of 16 tokens"),
        (lambda text: text["rope_parameters"].update(rope_type="dynamic", factor=2.0), "embeddings of type 'dynamic'"),
    ):
        config = json.loads((toys["qwen2_5_vl"] / "config.json").read_text())
        change(config["text_config"])
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=match):
            M.load_config(str(tmp_path))
    for path in toys.values():
        M.load_config(str(path))


def test_deepstack_features_in_one_tensor_are_split_by_image(loaded, picture, monkeypatch):
    """transformers 5.17 returns one tensor per layer; later versions return a list by image, as for the last layer."""
    hf, processor = loaded["qwen3_vl"]
    images = [processor.image_to_patches(str(i), picture(64 * (i + 1), 64, i)) for i in range(3)]
    with torch.no_grad():
        want = M.vision_features(hf, images)
        get_features = hf.model.get_image_features

        def join_images(*args, **kwargs):
            out = get_features(*args, **kwargs)
            out.deepstack_features = [
                layer if torch.is_tensor(layer) else torch.cat(layer) for layer in out.deepstack_features
            ]
            return out

        monkeypatch.setattr(hf.model, "get_image_features", join_images)
        got = M.vision_features(hf, images)
    assert len(want[1]) > 0 and torch.equal(got[0], want[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


@pytest.mark.parametrize("version", ["2.11", "2.12"])
def test_flash_calls_torchs_varlen_attention_as_each_version_expects(version, loaded, make_groups, monkeypatch):
    """torch's function needs a GPU; a stand-in with its signature, sequence by sequence, equals the dense mask."""
    import torch.nn.attention.varlen as varlen

    def dense(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
    ):
        assert window_size == (-1, 0) and cu_seq_q.dtype == torch.int32 and max_q == int(cu_seq_q.diff().max())
        assert query.shape == key.shape == value.shape and all(x.is_contiguous() for x in (query, key, value))
        outputs = []
        for a, b in pairwise(cu_seq_q.tolist()):
            qkv = (x[a:b].transpose(0, 1)[None] for x in (query, key, value))
            attended = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, scale=scale)
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)

    def grouped(query, key, value, *args, enable_gqa=False, window_size=(-1, -1), scale=None):
        assert enable_gqa and key.shape[1] == 2
        key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
        return dense(query, key, value, *args, scale=scale, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", dense if version == "2.11" else grouped)
    processor = loaded["qwen2_5_vl"][1]
    micro = pack_together(make_groups(processor)[2], processor, share=False)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, micro.n_tokens, 16, generator=generator) for heads in (4, 2, 2))
    got = PackedAttention("flash", micro)(0, q, k, v, 0.3)
    keys, values = (x.repeat_interleave(2, dim=1) for x in (k, v))
    want = (q @ keys.transpose(2, 3) * 0.3).masked_fill(~dense_mask(micro.subtree_end_T), -torch.inf).softmax(
        -1
    ) @ values
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_equal_the_image_processors(family, toys, tmp_path, picture):
    """This holds for all sizes, and also for other numbers in the processor's config."""
    shutil.copytree(toys[family], tmp_path / "toy")
    file = tmp_path / "toy/preprocessor_config.json"
    numbers = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.3, 0.2, 0.1], "rescale_factor": 0.01}
    file.write_text(json.dumps(json.loads(file.read_text()) | numbers))
    processor = M.Processor(str(tmp_path / "toy"))
    for size in [(30, 40), (200, 60), (1, 150), (333, 222)]:
        image = processor.image_to_patches("a", picture(*size))
        theirs = processor.image_processor(images=[image.image], return_tensors="pt", do_resize=False)
        torch.testing.assert_close(image.pixel_values(), theirs["pixel_values"], rtol=0, atol=1e-6)
        assert [list(image.grid_thw)] == theirs["image_grid_thw"].tolist()
    assert torch.equal(pickle.loads(pickle.dumps(image)).pixel_values(), image.pixel_values())


def test_an_image_processor_that_mixes_pixels_is_refused(toys, monkeypatch):
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil

    normalize = pil.Qwen2VLImageProcessorPil.normalize

    def contrast(self, image, *args, **kwargs):
        return normalize(self, image / image.mean(), *args, **kwargs)

    monkeypatch.setattr(pil.Qwen2VLImageProcessorPil, "normalize", contrast)
    with pytest.raises(UserError, match="--model .*its image processor"):
        M.Processor(str(toys["qwen2_5_vl"]))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_tower_attends_to_all_images_in_one_call(family, toys, picture, monkeypatch):
    """The one call, used on GPUs, has the values and gradients of transformers' sdpa, which makes one per window."""
    images = [M.Processor(str(toys[family])).image_to_patches(str(k), picture(90 + 40 * k, 84, k)) for k in range(3)]
    pixels, grids = torch.cat([i.pixel_values() for i in images]), torch.tensor([i.grid_thw for i in images])
    calls = []

    def varlen(query, key, value, cu_seqlens, longest, scale, causal):
        calls.append(len(cu_seqlens) - 1)
        assert not causal and longest == cu_seqlens.diff().max()
        sequence = torch.bucketize(torch.arange(len(query)), cu_seqlens, right=True)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        scores = scores.masked_fill(sequence[:, None] != sequence, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)

    def features(name, on_gpu=False):
        hf = M.load_hf(str(toys[family]), torch.float64)
        tower = hf.get_submodule(hf.family.vision)
        tower.config._attn_implementation = name
        monkeypatch.setattr(attention, "_varlen", varlen)
        monkeypatch.setattr(attention, "_supports_varlen", lambda query: on_gpu)
        out = tower(pixels, grid_thw=grids).pooler_output
        torch.cat(list(out) if isinstance(out, tuple) else [out]).square().sum().backward()
        return out, [p.grad for p in tower.parameters() if p.grad is not None]

    want = features("sdpa")
    torch.testing.assert_close(features("planned_flash"), want, rtol=0, atol=0)
    assert not calls
    torch.testing.assert_close(features("planned_flash", on_gpu=True), want, rtol=1e-6, atol=1e-8)
    assert len(calls) == 2 and min(calls) == len(images)  # one call for each of the two layers
    assert (max(calls) > len(images)) == (family == "qwen2_5_vl")  # the family with windows
