"""Processor, positions and the packed forward against transformers, one sample at a time.   pytest tests/test_model.py"""

import json

import pytest
import torch
from conftest import FAMILIES

import model as M
from grpo import Branch, Tree, pack, plant

QUESTION = "What is this odd thing, and why? "


def make_tree(processor, images, responses, uid="a"):
    prompt = processor.encode([{"role": "user", "content": "<image>" * len(images) + QUESTION}], images)
    branches = [Branch(r, [True] * len(r), {"uid": [float(ord(uid))] * len(r)}) for r in responses]
    return Tree(uid, prompt, images, branches)


def separately(hf, processor, tree, response, banned):
    """Log-probabilities of one response by transformers' own forward: unpacked, positions and masks of its making."""
    ids = torch.tensor([list(tree.prompt) + list(response)])
    extra = {}
    if tree.images:
        extra = {"pixel_values": torch.cat([i.pixel_values for i in tree.images]),
                 "image_grid_thw": torch.tensor([i.grid_thw for i in tree.images]),
                 "mm_token_type_ids": (ids == processor.image_token_id).int()}
    hf.model.rope_deltas = None  # transformers would reuse those of the sample before
    logits = hf(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).logits[0, len(tree.prompt) - 1 : -1].clone()
    logits[:, banned] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.fixture
def trees_of(picture):
    def make(processor):
        images = [processor.image(f"i{k}", picture(*size, seed=k)) for k, size in enumerate([(84, 84), (60, 97), (130, 56), (84, 84)])]
        g = torch.Generator().manual_seed(1)
        responses = [[torch.randint(0, 250, (n,), generator=g).tolist() for n in lengths] for lengths in ([1, 7, 12], [5, 1], [3, 9, 2, 4])]
        return [make_tree(processor, [], responses[0], "a"), make_tree(processor, images[:1], responses[1], "b"),
                make_tree(processor, images[1:], responses[2], "c")]

    return make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [1000, 105])  # one micro-batch, and so small that a tree is split
def test_packed_equals_separate(family, budget, loaded, trees_of):
    hf, processor = loaded[family]
    policy = M.Policy(hf, processor, freeze_vision=False)
    trees = trees_of(processor)
    micros = pack(trees, budget)
    assert (len(micros) > 1) == (budget == 105) and all(m.n_tokens <= budget for m in micros)
    policy.zero_grad()
    packed, total = {}, 0.0
    for m in micros:
        logp, _ = policy(m)
        # a weight per token that does not depend on the order of packing
        weights = torch.sin(m.target_K.float())
        (logp * weights).sum().backward()
        total += (logp * weights).sum().item()
        for uid in m.values["uid"].unique().tolist():
            packed.setdefault(chr(int(uid)), []).append(logp[m.values["uid"] == uid].detach())
    gradients = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    separate_total = 0.0
    for tree in trees:
        want = [separately(hf, processor, tree, b.tokens, policy.banned) for b in tree.branches]
        for b, logp in zip(tree.branches, want, strict=True):
            loss = (logp * torch.sin(torch.tensor(b.tokens).float())).sum()
            loss.backward()
            separate_total += loss.item()
        got = torch.cat(packed[tree.uid]).sort().values
        torch.testing.assert_close(got, torch.cat(want).detach().sort().values, rtol=0, atol=2e-6)
    assert abs(total - separate_total) < 1e-4
    assert any(n.startswith("hf.model.visual") for n in gradients)
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            error = (parameter.grad - gradients[name]).norm() / parameter.grad.norm().clamp(min=1e-8)
            assert error < 1e-5, f"{name}: relative gradient error {error:.1e}"


def test_a_response_sees_its_own_prompt_only(loaded, trees_of):
    """The comparison above could pass if nothing depended on pictures or neighbours; here it must."""
    hf, processor = loaded["qwen2_5_vl"]
    policy = M.Policy(hf, processor)
    trees = trees_of(processor)
    with torch.no_grad():
        alone = policy(plant([trees[1]]))[0]
        among = policy(plant(trees))[0][20:26]
        torch.testing.assert_close(alone, among, rtol=0, atol=2e-6)
        blank = M.ImageInput("blank", torch.zeros_like(trees[1].images[0].pixel_values), trees[1].images[0].grid_thw)
        unseen = policy(plant([Tree("b", trees[1].prompt, [blank], trees[1].branches)]))[0]
    assert (alone - unseen).abs().max() > 1e-3


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
    assert features.shape[0] == ids.count(processor.image_token_id) == sum(i.n_tokens(2) for i in images)
    assert len(deep) == (1 if family == "qwen3_vl" else 0)


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


def test_frozen_vision_has_no_gradient(loaded, trees_of):
    hf, processor = loaded["qwen3_vl"]
    policy = M.Policy(hf, processor, freeze_vision=True)
    policy.zero_grad()
    policy(plant(trees_of(processor)))[0].sum().backward()
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is None) == ("visual" in name), name


def test_text_only_micro_gives_a_trained_tower_zero_gradients(loaded, trees_of):
    hf, processor = loaded["qwen2_5_vl"]
    policy = M.Policy(hf, processor, freeze_vision=False)
    policy.zero_grad()
    policy(plant(trees_of(processor)[:1]))[0].sum().backward()
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


def test_pixel_limits_change_the_number_of_image_tokens(toys, picture):
    small = M.load_processor(str(toys["qwen2_5_vl"]), max_pixels=56 * 56)
    assert small.image("a", picture(400, 400)).n_tokens(2) <= 4
    large = M.load_processor(str(toys["qwen2_5_vl"]), min_pixels=280 * 280)
    assert large.image("a", picture(40, 40)).n_tokens(2) >= 100
