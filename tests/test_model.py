"""Processor, positions and the packed forward against transformers, one sample at a time.   pytest tests/test_model.py"""

import json

import pytest
import torch
from conftest import FAMILIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import demo
import model as M
import sharding
from errors import UserError
from grpo import PolicyLoss, Sample, pack, plant

QUESTION = "What is this odd thing, and why? "


def make_samples(processor, images, responses, uid):
    prompt = processor.encode([{"role": "user", "content": "<image>" * len(images) + QUESTION}], images)
    return [
        Sample(uid, prompt + r, [False] * len(prompt) + [True] * len(r), {"name": [100.0 * ord(uid) + i] * len(r)}, images)
        for i, r in enumerate(responses)
    ]


def separately(hf, processor, sample, banned):
    """Log-probabilities of one response by transformers' own forward: unpacked, positions and masks of its making."""
    ids = torch.tensor([list(sample.tokens)])
    n = sum(sample.scored)
    extra = {}
    if sample.images:
        extra = {"pixel_values": torch.cat([i.pixel_values for i in sample.images]),
                 "image_grid_thw": torch.tensor([i.grid_thw for i in sample.images]),
                 "mm_token_type_ids": (ids == processor.image_token_id).int()}
    hf.model.rope_deltas = None  # transformers would reuse those of the sample before
    logits = hf(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).logits[0, -n - 1 : -1].clone()
    logits[:, banned] = -torch.inf
    return logits.log_softmax(-1).gather(1, ids[0, -n:, None])[:, 0]


@pytest.fixture
def samples_of(picture):
    """Groups with 0, 1 and 3 pictures; responses of odd lengths, one of a single token, some that begin alike."""

    def make(processor):
        images = [processor.image(f"i{k}", picture(*size, seed=k)) for k, size in enumerate([(84, 84), (60, 97), (130, 56), (84, 84)])]
        g = torch.Generator().manual_seed(1)
        groups = [[torch.randint(0, 250, (n,), generator=g).tolist() for n in lengths] for lengths in ([1, 7, 12], [5, 1], [3, 9, 2, 4])]
        groups[0].append(groups[0][2][:6] + [3, 4])  # shares five tokens of another response
        groups[1].append(list(groups[1][0]))  # and one is sampled twice
        return [make_samples(processor, pictures, responses, uid) for pictures, responses, uid in
                zip([[], images[:1], images[1:]], groups, "abc", strict=True)]

    return make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [1000, 105])  # one micro-batch; and so small that a tree is split
def test_packed_equals_separate(family, budget, loaded, samples_of, toys, monkeypatch):
    hf, processor = loaded[family]
    if "3_5" in family:
        # Gradients of decay rates are small sums of large terms: fp32 leaves three digits of them, whatever the order. And
        # transformers' recurrence asks for fp32 by name.
        hf = M.load_hf(str(toys[family])).double().eval()
        if "moe" in family:
            hf.set_experts_implementation("eager")  # the grouped product knows no float64
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    policy = M.Policy(hf, processor, freeze_vision=False)
    samples = [s for group in samples_of(processor) for s in group]
    micros = pack(samples, budget, processor.image_token_id)
    assert (len(micros) > 1) == (budget == 105) and all(m.n_tokens <= budget for m in micros)
    policy.zero_grad()
    packed = {}
    for m in micros:
        logp, _ = policy(m)
        (logp * torch.sin(m.target_K.float())).sum().backward()  # a weight per token, whatever the order of packing
        for name in m.values["name"].unique().tolist():
            assert name not in packed  # each sample is in one micro-batch
            packed[name] = logp[m.values["name"] == name].detach()
    gradients = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    assert len(packed) == len(samples)
    for sample in samples:
        want = separately(hf, processor, sample, policy.banned)
        (want * torch.sin(torch.tensor(sample.tokens[-len(want) :]).float())).sum().backward()
        torch.testing.assert_close(packed[sample.values["name"][0]], want.detach(), rtol=0, atol=2e-6)
    assert any(n.startswith("hf.model.visual") for n in gradients)
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            error = (parameter.grad - gradients[name]).norm() / parameter.grad.norm().clamp(min=1e-8)
            assert error < 1e-5, f"{name}: relative gradient error {error:.1e}"


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_forests_equal_separate_forwards(data, loaded, picture):
    """Any number of prompts, pictures and responses, responses that begin alike, any budget that holds the longest."""
    hf, processor = loaded[data.draw(st.sampled_from(FAMILIES))]
    samples = []
    for uid in "abc"[: data.draw(st.integers(1, 3))]:
        sizes = data.draw(st.lists(st.sampled_from([(84, 84), (60, 97), (130, 56)]), max_size=3))
        images = [processor.image(f"{uid}{k}", picture(*size, seed=k)) for k, size in enumerate(sizes)]
        responses = data.draw(st.lists(st.lists(st.integers(20, 22), min_size=1, max_size=7), min_size=1, max_size=4))
        samples += make_samples(processor, images, responses, uid)
    policy = M.Policy(hf, processor)
    budget = max(s.n_inputs for s in samples) + data.draw(st.integers(0, 60))
    with torch.no_grad():
        for micro in pack(samples, budget, processor.image_token_id):
            logp, _ = policy(micro)
            for name in micro.values["name"].unique().tolist():
                sample = next(s for s in samples if s.values["name"][0] == name)
                want = separately(hf, processor, sample, policy.banned)
                torch.testing.assert_close(logp[micro.values["name"] == name], want, rtol=0, atol=2e-6)


def test_a_response_sees_its_own_prompt_only(loaded, samples_of):
    """The comparison above could pass if nothing depended on pictures or neighbours; here it must."""
    hf, processor = loaded["qwen2_5_vl"]
    policy = M.Policy(hf, processor)
    a, b, c = samples_of(processor)
    with torch.no_grad():
        alone = policy(plant(b, processor.image_token_id))[0]
        together = plant(a + b + c, processor.image_token_id)
        among = policy(together)[0][together.values["name"] // 100 == ord("b")]
        torch.testing.assert_close(alone, among, rtol=0, atol=2e-6)
        image = b[0].images[0]
        blank = M.ImageInput("blank", torch.zeros_like(image.pixel_values), image.grid_thw, image.n_tokens)
        unseen = policy(plant([Sample("b", s.tokens, s.scored, s.values, [blank]) for s in b], processor.image_token_id))[0]
    assert (alone - unseen).abs().max() > 1e-3


def test_a_picture_in_a_later_turn_makes_a_deeper_tree(loaded, picture):
    """Two samples share prompt and first turn, then see different pictures: the trunk splits below the first turn."""
    hf, processor = loaded["qwen3_vl"]
    policy = M.Policy(hf, processor)
    first, left, right = (processor.image(str(k), picture(84, 84, seed=k)) for k in range(3))
    prompt = processor.encode([{"role": "user", "content": "<image>look"}], [first])
    again = processor.encode([{"role": "user", "content": "<image>and now?"}], [left])
    turn, answers = [5, 6, 7, 8], [[9, 10, 11], [9, 10, 12]]
    samples = []
    for image, answer in [(left, answers[0]), (left, answers[1]), (right, answers[0])]:
        tokens = prompt + turn + again + answer
        scored = [False] * len(prompt) + [True] * 4 + [False] * len(again) + [True] * 3
        samples.append(Sample("deep", tokens, scored, {"name": [float(len(samples))] * 7}, [first, image]))
    micro = plant(samples, processor.image_token_id)
    # all up to the second picture once, what follows once per picture, and of each answer all but the last token
    alike = again.index(processor.image_token_id)
    assert micro.n_tokens == len(prompt) + 4 + alike + 2 * (len(again) - alike + 2)
    assert len(micro.runs) == 2 and len(micro.images) == 3
    with torch.no_grad():
        logp, _ = policy(micro)
        for i, sample in enumerate(samples):
            ids = torch.tensor([sample.tokens])
            hf.model.rope_deltas = None
            grids = torch.tensor([x.grid_thw for x in sample.images])
            logits = hf(input_ids=ids, attention_mask=torch.ones_like(ids), image_grid_thw=grids,
                        pixel_values=torch.cat([x.pixel_values for x in sample.images]),
                        mm_token_type_ids=(ids == processor.image_token_id).int()).logits[0]
            logits[:, policy.banned] = -torch.inf
            at = [t for t, s in enumerate(sample.scored) if s]
            want = torch.stack([logits[t - 1].log_softmax(-1)[sample.tokens[t]] for t in at])
            torch.testing.assert_close(logp[micro.values["name"] == i], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_flex_attention_gives_the_values_of_the_dense_mask(family, loaded, samples_of):
    hf, processor = loaded[family]
    micro = plant([s for group in samples_of(processor) for s in group], processor.image_token_id)
    assert micro.n_tokens % 128  # so that padding is exercised
    with torch.no_grad():
        dense, flex = (M.Policy(hf, processor, attention=attention)(micro)[0] for attention in ("sdpa", "flex"))
    torch.testing.assert_close(flex, dense, rtol=0, atol=2e-6)


def test_back_ends_that_need_a_gpu_and_unknown_names_are_refused():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert M.resolve_attention("auto", cpu) == "sdpa" and M.resolve_attention("auto", cuda) == "flex"
    for name in ("flash", "flex"):
        assert M.resolve_attention(name, cuda) == name
        with pytest.raises(ValueError, match=f"--attn {name} trains on CUDA only"):
            M.resolve_attention(name, cpu)
    with pytest.raises(ValueError, match="--attn 'eager'"):
        M.resolve_attention("eager", cpu)


def test_flash_bounds_are_those_of_the_sequences(loaded, samples_of):
    """The kernel needs a GPU; what it is given does not. Runs without branches are whole sequences, and the dense mask
    they stand for is the forest's."""
    from grpo import dense_mask

    _, processor = loaded["qwen2_5_vl"]
    singles = [group[0] for group in samples_of(processor)]
    micro = plant(singles, processor.image_token_id)
    plan = M.ForestAttention("flash", micro)
    bounds = plan.cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == micro.n_tokens and plan.longest == max(s.n_inputs for s in singles)
    blocks = torch.block_diag(*(torch.ones(b - a, b - a).tril() for a, b in zip(bounds, bounds[1:], strict=False)))
    assert torch.equal(blocks.bool(), dense_mask(micro.end_T))
    with pytest.raises(AssertionError, match="branches"):
        M.ForestAttention("flash", plant(samples_of(processor)[2], processor.image_token_id))


def test_cached_features_are_the_computed_ones_and_the_limit_holds(loaded, picture, monkeypatch):
    hf, processor = loaded["qwen3_vl"]
    images = [processor.image(str(k), picture(84, 84, seed=k)) for k in range(3)]
    with torch.no_grad():
        plain, deep = M.vision_features(hf, images)
        size = (plain.nbytes + sum(d.nbytes for d in deep)) / 3
        cache = M.VisionCache(2.5 * size)
        cold = M.vision_features(hf, images, cache)
        assert len(cache.entries) == 2 and cache.bytes <= 2.5 * size and (cache.hits, cache.misses) == (0, 3)
        monkeypatch.setattr(hf.model, "get_image_features", None)  # a hit must not compute
        warm = M.vision_features(hf, images[1:], cache)
    assert torch.equal(cold[0], plain) and all(map(torch.equal, cold[1], deep))
    third = len(plain) // 3
    assert torch.equal(warm[0], plain[third:]) and torch.equal(warm[1][0], deep[0][third:]) and cache.hits == 2
    with pytest.raises(AssertionError, match="stale"):
        M.Policy(hf, processor, freeze_vision=False, cache=cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_equal_transformers(family, loaded, picture):
    hf, processor = loaded[family]
    images = [processor.image(str(k), picture(*size)) for k, size in enumerate([(84, 112), (200, 60)])]
    content = "look <image> and then <image>, what now?"
    ids = processor.encode([{"role": "user", "content": content}], images) + list(range(9))
    x = torch.tensor([ids])
    grids = [i.grid_thw for i in images]
    want, _ = hf.model.get_rope_index(x, mm_token_type_ids=(x == processor.image_token_id).int(), image_grid_thw=torch.tensor(grids))
    got = M.mrope_positions(ids, grids, processor.image_token_id, processor.merge_size)
    assert torch.equal(got, want[:, 0])
    assert M.mrope_positions([], [], 5, 2).shape == (3, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_has_as_many_image_tokens_as_features(family, loaded, picture):
    hf, processor = loaded[family]
    sizes = [(84, 84), (640, 400), (30, 500), (1, 1)]
    images = [processor.image(str(k), picture(*size)) for k, size in enumerate(sizes)]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>" * 4 + "so?"}]
    ids = processor.encode(messages, images)
    assert processor.count_tokens(messages, sizes) == len(ids)
    with torch.no_grad():
        features, deep = M.vision_features(hf, images)
    assert features.shape[0] == ids.count(processor.image_token_id) == sum(i.n_tokens for i in images)
    assert len(deep) == (1 if family.startswith("qwen3_vl") else 0)


def test_equal_pictures_are_computed_once(loaded, picture, monkeypatch):
    hf, processor = loaded["qwen2_5_vl"]
    a, b = processor.image("a", picture(84, 84, 1)), processor.image("b", picture(56, 84, 2))
    seen = []
    original = hf.model.get_image_features
    monkeypatch.setattr(hf.model, "get_image_features", lambda p, g, **k: (seen.append(len(g)), original(p, g, **k))[1])
    with torch.no_grad():
        together = M.vision_features(hf, [a, b, a])[0]
        alone = M.vision_features(hf, [a])[0]
    assert seen == [2, 1]
    torch.testing.assert_close(together[-9:], alone, rtol=0, atol=1e-6)


def test_marks_and_images_must_agree(loaded, picture):
    _, processor = loaded["qwen2_5_vl"]
    image = processor.image("a", picture(84, 84))
    with pytest.raises(ValueError, match="more <image> marks"):
        processor.encode([{"role": "user", "content": "<image><image>?"}], [image])
    with pytest.raises(ValueError, match="fewer <image> marks"):
        processor.encode([{"role": "user", "content": "?"}], [image])
    with pytest.raises(ValueError, match="more <image> marks or"):  # a placeholder smuggled in as text
        processor.encode([{"role": "user", "content": "<image> <|image_pad|>"}], [image])


def test_banned_ids_are_the_placeholders_and_the_padding_rows(loaded):
    hf, processor = loaded["qwen2_5_vl"]
    banned = processor.banned(hf.config.text_config.vocab_size).tolist()
    names = processor.tokenizer.convert_ids_to_tokens(banned[:5])
    assert set(names) == set(M.VISION_TOKENS)
    assert banned[5:] == list(range(len(processor.tokenizer), 448)) and len(banned) > 5
    assert not set(banned) & set(processor.eos_ids)


def test_frozen_vision_has_no_gradient(loaded, samples_of):
    hf, processor = loaded["qwen3_vl"]
    policy = M.Policy(hf, processor, freeze_vision=True)
    policy.zero_grad()
    policy(plant([s for group in samples_of(processor) for s in group], processor.image_token_id))[0].sum().backward()
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is None) == ("visual" in name), name


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("vision,merger", [(True, None), (True, True), (True, False), (False, None), (False, True), (False, False)])
def test_what_is_frozen_has_neither_gradient_nor_optimizer_state(family, vision, merger, loaded, samples_of):
    hf, processor = loaded[family]
    policy = M.Policy(hf, processor, freeze_vision=vision, freeze_merger=merger)
    policy.zero_grad()
    optimizer = sharding.make_optimizer(policy, 1e-3, 0.0, vision_lr=1e-5)
    micro = plant([s for group in samples_of(processor) for s in group], processor.image_token_id)
    policy(micro)[0].sum().backward()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in policy.named_parameters():
        frozen = (vision if merger is None else merger) if "visual" in name and "merger" in name else vision if "visual" in name else False
        assert (p.grad is None) == frozen and (p not in optimizer.state) == frozen, name
        assert frozen or rates[id(p)] == (1e-5 if "visual" in name else 1e-3)
    assert sum(s["exp_avg"].nbytes for s in optimizer.state.values()) == sum(p.nbytes for p in policy.parameters() if p.requires_grad)
    assert policy.vision_frozen == (vision and merger in (None, True))
    policy.zero_grad()


def test_text_only_micro_gives_a_trained_tower_zero_gradients(loaded, samples_of):
    hf, processor = loaded["qwen2_5_vl"]
    policy = M.Policy(hf, processor, freeze_vision=False)
    policy.zero_grad()
    policy(plant(samples_of(processor)[0], processor.image_token_id))[0].sum().backward()
    tower = [p for n, p in policy.named_parameters() if "visual" in n]
    assert tower and all(p.grad is not None and p.grad.abs().max() == 0 for p in tower)


def test_models_that_cannot_be_loaded_are_named(tmp_path, toys):
    with pytest.raises(ValueError, match="no such folder"):
        M.load_config(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="no loadable config.json"):
        M.load_config("nobody/no-such-model")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="'bert'; supported: qwen2_vl, qwen2_5_vl, qwen3_vl"):
        M.load_config(str(tmp_path / "bert"))
    with pytest.raises(ValueError, match="cannot load its tokenizer"):
        M.load_processor(str(tmp_path / "bert"))
    with pytest.raises(ValueError, match="--min-pixels 9999999 is over --max-pixels"):
        M.load_processor(str(toys["qwen2_vl"]), min_pixels=9999999)


def test_a_bad_path_to_a_part_lists_what_is_there(toys, monkeypatch):
    model = str(toys["qwen3_vl"])
    row = M.FAMILIES.pop("qwen3_vl")
    monkeypatch.setitem(M.FAMILIES, "other", row)
    try:
        good = ("model.visual", "model.language_model")
        found = M.find_family(M.load_config(model, good), model, good)
        assert (found.model_class, found.mergers, found.vision_blocks, found.blocks) == (row.model_class, row.mergers, "blocks", "layers")
        assert set(found.lora_targets) == set(row.lora_targets)
        for attrs, words in [
            (None, "type 'qwen3_vl'; supported: qwen2_vl"), ((good[0], None), "give both or neither"),
            ((good[0], "model.text.layers"), "'model.text.layers': model has no child 'text'; its children are visual, language_model"),
            ((good[0], "model.language_model.norm"), "has no list of blocks"),
            (("visual", good[1]), "--vision-attr 'visual': .* has no child 'visual'; its children are model, lm_head"),
        ]:
            with pytest.raises(ValueError, match=words):
                M.load_config(model, attrs)
    finally:
        M.FAMILIES["qwen3_vl"] = row


def test_pixel_limits_change_the_number_of_image_tokens(toys, picture):
    small = M.load_processor(str(toys["qwen2_5_vl"]), max_pixels=56 * 56)
    assert small.image("a", picture(400, 400)).n_tokens <= 4
    large = M.load_processor(str(toys["qwen2_5_vl"]), min_pixels=280 * 280)
    assert large.image("a", picture(40, 40)).n_tokens >= 100


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_loss_inside_the_head_equals_loss_on_logprobs(tied, kernel, samples_of, tmp_path):
    """The fused head on a real forest, head and embedding tied or not, with the vocabulary's padding rows banned."""
    demo.make_model(tmp_path, "qwen2_5_vl", seed=1, hidden=64, layers=1, vocab=448, tied=tied)
    hf, processor = M.load_hf(str(tmp_path)), M.load_processor(str(tmp_path))
    policy = M.Policy(hf, processor, freeze_vision=False, kernel=kernel)
    micro = plant([s for group in samples_of(processor) for s in group], processor.image_token_id)
    n = len(micro.target_K)
    micro.values |= {"advantage": torch.randn(n), "weight": torch.rand(n), "old_logp": torch.randn(n) * 0.1 - 6.0}
    loss = PolicyLoss(dual_clip=2.0, entropy_coef=0.05)
    results = []
    for fused in (True, False):
        policy.zero_grad()
        if fused:
            total, logp, entropy = policy(micro, 0.9, loss)
        else:
            policy.kernel = "torch"
            logp, entropy = policy(micro, 0.9)
            total = loss(logp, entropy, micro.values)[0].sum()
        total.backward()
        results.append((total.detach(), logp.detach(), {name: p.grad.clone() for name, p in policy.named_parameters()}))
    (total, logp, gradients), (want, want_logp, exact) = results
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logp, want_logp, rtol=0, atol=5e-6)
    head = "hf.model.language_model.embed_tokens.weight" if tied else "hf.lm_head.weight"
    assert exact[head].abs().max() > 0 and ("hf.lm_head.weight" in exact) == (not tied)
    for name, gradient in gradients.items():
        assert (gradient - exact[name]).norm() <= 1e-5 * exact[name].norm() + 1e-9, name


def test_attention_that_is_not_computed_here_is_refused(toys, tmp_path):
    """Sliding windows, which were read and ignored, and rotary frequencies that depend on the batch."""
    sliding = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None}
    for change, match in ((lambda text: text.update(sliding), "1 layers have sliding_attention .a window of 16 tokens"),
                          (lambda text: text["rope_parameters"].update(rope_type="dynamic", factor=2.0), "embeddings of type 'dynamic'")):
        config = json.loads((toys["qwen2_5_vl"] / "config.json").read_text())
        change(config["text_config"])
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=match):
            M.load_config(str(tmp_path))
    for path in toys.values():
        M.load_config(str(path))


def test_deepstack_features_in_one_piece_are_split_by_picture(loaded, picture, monkeypatch):
    """As transformers 5.17 gives them; later ones give a list of pictures, as for the last layer."""
    hf, processor = loaded["qwen3_vl"]
    images = [processor.image(str(i), picture(64 * (i + 1), 64, i)) for i in range(3)]
    with torch.no_grad():
        want = M.vision_features(hf, images)
        features_of = hf.model.get_image_features

        def whole(*args, **kwargs):
            out = features_of(*args, **kwargs)
            out.deepstack_features = [layer if torch.is_tensor(layer) else torch.cat(layer) for layer in out.deepstack_features]
            return out

        monkeypatch.setattr(hf.model, "get_image_features", whole)
        got = M.vision_features(hf, images)
    assert len(want[1]) > 0 and torch.equal(got[0], want[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


@pytest.mark.parametrize("version", ["2.11", "2.12"])
def test_flash_calls_torchs_varlen_attention_as_each_version_wants_it(version, loaded, samples_of, monkeypatch):
    """torch's own needs a GPU; here a stand-in with its signature, sequence by sequence, against the dense mask."""
    import torch.nn.attention.varlen as varlen

    from grpo import dense_mask

    def dense(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        assert window_size == (-1, 0) and cu_seq_q.dtype == torch.int32 and max_q == int(cu_seq_q.diff().max())
        assert query.shape == key.shape == value.shape and all(x.is_contiguous() for x in (query, key, value))
        parts = [torch.nn.functional.scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1)[None] for x in (query, key, value)), is_causal=True, scale=scale)[0].transpose(0, 1)
            for a, b in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False)]
        return torch.cat(parts)

    def grouped(query, key, value, *args, enable_gqa=False, window_size=(-1, -1), scale=None):
        assert enable_gqa and key.shape[1] == 2
        key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
        return dense(query, key, value, *args, scale=scale, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", dense if version == "2.11" else grouped)
    processor = loaded["qwen2_5_vl"][1]
    apart = [Sample(str(i), s.tokens, s.scored, {}, s.images) for i, s in enumerate(samples_of(processor)[2])]
    micro = plant(apart, processor.image_token_id)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, micro.n_tokens, 16, generator=generator) for heads in (4, 2, 2))
    got = M.ForestAttention("flash", micro)(0, q, k, v, 0.3)
    keys, values = (x.repeat_interleave(2, dim=1) for x in (k, v))
    want = (q @ keys.transpose(2, 3) * 0.3).masked_fill(~dense_mask(micro.end_T), -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
