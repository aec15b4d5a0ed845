"""The start-up self-test: it passes on a sound pair, names each thing that can disagree, and leaves no trace.

pytest tests/test_self_test.py
"""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from test_rollout import example
from test_train import flags, run, shapes, without_time  # noqa: F401  (shapes is a fixture)

import model as M
import rollout
import self_test as S
import train
from rollout import HFEngine


@pytest.fixture
def pair(toys, picture):
    """(policy, engine, examples, lengths, processor, args) that agree."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    folder = str(toys["qwen3_vl"])
    processor = M.load_processor(folder)
    examples = [example("one", "<image>What is it?", [picture(90, 84, 1)]), example("none", "Tell me something, please?", []),
                example("two", "Compare <image> with <image>.", [picture(60, 97, 2), picture(130, 56, 3)])]
    lengths = [len(p.token_ids) for p in rollout.make_prompts(examples, processor)]
    args = train.parse_args("--model m --data d --out o --steps 1 --micro-tokens 600 --max-new-tokens 20 --rollout hf".split())
    args.attn = "sdpa"
    engine = HFEngine(M.load_hf(folder), processor, torch.device("cpu"))
    yield M.Policy(M.load_hf(folder), processor), engine, examples, lengths, processor, args
    torch.distributed.destroy_process_group()


def test_a_sound_pair_passes_and_says_what_was_compared(pair):
    line = S.self_test(*pair)
    assert line.startswith("self-test: 3 prompts (2 with pictures) tokenised alike") and line.endswith("weight tensors equal")


def test_a_stale_tensor_is_named(pair):
    with torch.no_grad():
        pair[1].hf.model.language_model.layers[1].mlp.up_proj.weight[0, 0] += 0.5
    with pytest.raises(ValueError, match="1 of [0-9]+ weight tensors differ .*layers.1.mlp.up_proj.weight by 5.00e-01"):
        S.self_test(*pair)


def test_a_mistake_that_engine_and_trainer_share_is_named(pair, monkeypatch):
    """Pictures placed as if they were text: both compute with the same code, so only transformers' own forward can tell."""
    as_text = lambda ids, grids, image_token, merge: torch.arange(len(ids)).expand(3, -1)  # noqa: E731
    monkeypatch.setattr(M, "mrope_positions", as_text)
    monkeypatch.setattr(rollout, "mrope_positions", as_text)
    with pytest.raises(ValueError, match="of the trainer and of transformers' own forward differ by .*positions, embeddings or attention"):
        S.self_test(*pair)


@pytest.mark.parametrize("mistake", ["swapped sides", "text off by one"])
def test_mistakes_in_positions_are_seen_in_bfloat16_too(mistake, pair, toys, monkeypatch):
    """Where rounding is larger than what they change."""
    right = M.mrope_positions

    def wrong(ids, grids, image_token, merge):
        if mistake == "swapped sides":
            return right(ids, grids, image_token, merge)[[0, 2, 1]]
        seen = torch.tensor([token == image_token for token in ids]).long().cumsum(0) > 0
        text = torch.tensor([token != image_token for token in ids])
        return right(ids, grids, image_token, merge) + (seen & text).long()

    folder = str(toys["qwen3_vl"])
    policy, hf = (M.load_hf(folder, torch.bfloat16) for _ in range(2))
    policy, engine = M.Policy(policy, pair[4]), HFEngine(hf, pair[4], pair[1].device)
    assert S.self_test(policy, engine, *pair[2:])
    for module in (M, rollout):
        monkeypatch.setattr(module, "mrope_positions", wrong)
    with pytest.raises(ValueError, match=r"positions \(t, h, w\) of example '(one|two)' differ from transformers' from token"):
        S.self_test(policy, engine, *pair[2:])


@pytest.mark.parametrize("family", M.FAMILIES)
def test_our_forward_is_transformers_own_for_every_family(family, loaded, picture):
    hf, processor = loaded[family]
    images = [processor.image(f"{i}", picture(90 + 40 * i, 84, i)) for i in range(2)]
    prompt = processor.encode([{"role": "user", "content": "Compare <image> with <image>."}], images)
    ids = prompt + [5, 6, 7, 8]
    policy = M.Policy(hf, processor)
    with torch.no_grad():
        sample = S.grpo.Sample("x", ids, [False] * len(prompt) + [True] * 4, {}, images)
        ours = policy(S.grpo.plant([sample], processor.image_token_id), 0.7)
        theirs = policy.plain_logprobs(ids, images, len(prompt), 0.7)
    torch.testing.assert_close(ours[0], theirs, rtol=0, atol=5e-6)


def test_another_function_is_named(pair):
    original = pair[1].generate

    def hotter(*arguments):
        rollouts = original(*arguments)
        for r in rollouts:
            r.logprobs = [p - 0.01 for p in r.logprobs]
        return rollouts

    pair[1].generate = hotter
    with pytest.raises(ValueError, match=r"engine \(hf\) and trainer differ by 1.00e-02 nats a token .*1e-04 is tolerated; .*--attn"):
        S.self_test(*pair)


def test_a_leak_between_packed_samples_is_named(pair, monkeypatch):
    original = M.ForestAttention.__init__

    def leaky(self, backend, micro):
        original(self, backend, micro)
        # the first tree is seen by the last run too
        self.ways = [(self.ways[0][0] + way, own) if i > 2 else (way, own) for i, (way, own) in enumerate(self.ways)]

    monkeypatch.setattr(M.ForestAttention, "__init__", leaky)
    with pytest.raises(ValueError, match="packed and separate, differ by .*samples of a micro-batch see each other") as failure:
        S.self_test(*pair)
    assert "engine (hf)" not in str(failure.value)


def test_another_prompt_is_named(pair):
    original = pair[1].generate

    def shifted(*arguments):
        rollouts = original(*arguments)
        rollouts[-1].token_ids[3] += 1
        return rollouts

    pair[1].generate = shifted
    with pytest.raises(ValueError, match="they differ from token 3; check --min-pixels"):
        S.self_test(*pair)


def test_prompts_are_unlike_and_fit_together():
    def fake(n):
        return SimpleNamespace(images=[None] * n)

    examples, lengths = [fake(1), fake(3), fake(0), fake(1), fake(0)], [50, 300, 20, 700, 40]
    cost = S.SAMPLES * S.NEW_TOKENS
    assert S.choose(examples, lengths, 10_000, 1) == [examples[1], examples[2], examples[3]]
    assert S.choose(examples, lengths, 300 + 20 + 2 * cost, 1) == [examples[1], examples[2]]
    assert S.choose(examples, lengths, 10, 1) == [examples[1]]


def test_with_and_without_it_a_run_is_the_same(toys, shapes, tmp_path):  # noqa: F811
    for name, more in (("with", []), ("without", ["--no-self-test"])):
        done = run([sys.executable, "train.py", *flags(toys["qwen2_5_vl"], shapes[0], tmp_path / name, "--steps", 3, *more)])
        assert ("self-test: " in done.stdout) == (name == "with")
    assert without_time(tmp_path / "with") == without_time(tmp_path / "without")


def test_vllm_where_it_is_not_installed_is_one_line_before_anything_is_loaded(monkeypatch):
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "vllm" else original(name, *more))
    monkeypatch.setattr(train, "load_config", None)  # would fail if it came to that
    try:
        with pytest.raises(ValueError, match="--rollout vllm: vLLM is not installed here; pip install -r requirements-gpu.txt"):
            train.main(train.parse_args("--model m --data d --out o --steps 1 --rollout vllm".split()))
    finally:
        torch.distributed.destroy_process_group()
    assert rollout.resolve_engine("auto", torch.device("cuda")) == rollout.resolve_engine("auto", torch.device("cpu")) == "hf"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: object() if name == "vllm" else original(name, *more))
    assert rollout.resolve_engine("auto", torch.device("cuda")) == "vllm" and rollout.resolve_engine("auto", torch.device("cpu")) == "hf"
