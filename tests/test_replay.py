"""--replay-experts: the trainer computes tokens with the experts that the engine chose.   pytest tests/test_replay.py

The engine's routers are perturbed as rounding perturbs them: they choose other experts, but weigh the chosen ones as
the unperturbed router does. So only the choice differs, and a replay of it must remove the whole mismatch.
"""

import asyncio
import base64
import copy
import io
import json
import pickle
import random
import shutil
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import written
from PIL import Image
from test_episodes import DROPS_THOUGHTS, Scripted, add_end_tokens, make_examples, make_factory
from test_rollout import example
from test_server_engine import (
    CPU,
    N_NEW,
    FakeServer,
    call_at_token,
    connect,  # noqa: F401
    prompts_of,
    set_delay,
    weights,
)
from test_train import TORCHRUN, flags, rows, run, write_parquet

import demo
import engines.self_test as S
import layers.experts as experts
import model as M
from algorithms._views import view_micro_batch
from engines import launch, serve
from engines.client import GenerateRequest
from engines.hf import HFEngine
from engines.launch import RolloutServerConfig, check_engine
from engines.vllm import llm_arguments, parse_vllm_args
from engines.vllm_client import VLLMClient, parse_completion
from envs._episodes import EpisodeEngine
from errors import UserError
from grpo import Algorithm
from layers.lora import AdapterFreePolicy, LoraConfig, add_lora
from model import ModelConfig
from packing import Packer
from parallel.models import Models
from report.metrics import add_expert_metrics
from rollout import ExampleList, Prompt, Rollout, SamplingParams, make_prompts, remove_noise
from tasks.shapes import shapes_rows
from utils import Meter, run_in_thread

MIXTURES = experts.MIXTURES


def choose_others(hf, scale=1.0):
    """Make the routers of a model choose by noisy logits, and weigh the chosen experts by their true probabilities."""
    generator = torch.Generator().manual_seed(0)

    def forward(plain, k, hidden):
        logits, weights, _ = plain(hidden)
        ids = (logits + scale * torch.randn(logits.shape, generator=generator)).topk(k, dim=-1).indices
        chosen = logits.softmax(-1, dtype=torch.float).gather(1, ids)
        return logits, (chosen / chosen.sum(-1, keepdim=True)).to(weights.dtype), ids

    for block in experts.expert_blocks(hf).values():
        router = block.mlp.gate
        router.forward = partial(forward, router.forward, router.top_k)
    return hf


@pytest.fixture
def questions(picture):
    return [example("one", "<image>What is it?", [picture(84, 84, 1)]),
            example("none", "Tell me something long and odd, would you please?", []),
            example("two", "Compare <image> with <image>.", [picture(60, 97, 2), picture(130, 56, 3)])]


@pytest.fixture
def pair(toys):
    """pair(family, scale): return an engine, whose choice of experts is perturbed unless scale is 0, and a policy with
    the same weights that replays the engine's experts."""

    def make(family, scale=1.0, **kwargs):
        processor = M.Processor(str(toys[family]))
        engine_hf, hf = (M.load_hf(str(toys[family])).eval() for _ in range(2))
        engine = HFEngine(choose_others(engine_hf, scale) if scale else engine_hf, processor, CPU)
        policy = M.Policy(hf, processor, **kwargs)
        experts.start_replay(policy.hf, engine)
        return engine, policy

    return make


def own_choice(rollouts):
    return [replace(r, experts=[]) for r in rollouts]


def pack(rollouts, policy, budget=10**6, share=True):
    return Packer(budget, policy.image_token_id, share=share).pack(rollouts)


def logprobs(policy, rollouts, budget=10**6, share=True):
    """Return the trainer's log-probabilities of all sampled tokens, in the order of the rollouts."""
    logp_N = torch.zeros(sum(map(sum, (r.response_mask for r in rollouts))))
    with torch.no_grad():
        for micro in pack(rollouts, policy, budget, share):
            logp_N[micro.token_index_K] = policy(micro).logp_K
    return logp_N


def mismatch(policy, rollouts, share=True):
    """Return the largest difference between the trainer's log-probabilities and the engine's."""
    engine_N = torch.tensor([logp for r in rollouts for logp in r.logprobs])
    return (logprobs(policy, rollouts, share=share) - engine_N).abs().max().item()


# --- engine and trainer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MIXTURES)
def test_replay_removes_the_mismatch_of_other_choices(family, pair, questions):
    engine, policy = pair(family)
    rollouts = engine.generate(make_prompts(questions, engine.processor), 4, SamplingParams(24, seed=1))
    for r in rollouts:
        assert r.n_routed == len(r.prompt.token_ids) + len(r.response) - 1
    assert mismatch(policy, own_choice(rollouts)) > 5e-4
    assert mismatch(policy, rollouts) < 2e-6


@pytest.mark.parametrize("family", MIXTURES)
def test_replay_changes_nothing_if_engine_and_trainer_choose_the_same(family, pair, questions):
    engine, policy = pair(family, scale=0)
    rollouts = engine.generate(make_prompts(questions, engine.processor), 4, SamplingParams(24, seed=1))
    assert all(r.experts for r in rollouts)
    assert torch.equal(logprobs(policy, rollouts), logprobs(policy, own_choice(rollouts)))
    [micro] = pack(rollouts, policy)
    policy(micro)
    assert [share.item() for share in micro.differing] == [0.0, 0.0]  # two layers


def test_layers_without_experts_are_left_out(loaded, questions):
    hf, processor = loaded["qwen3_vl_moe"]
    config = copy.deepcopy(hf.config)
    config.text_config.mlp_only_layers = [0]
    torch.manual_seed(0)
    hf = M.AutoModel.from_config(config, attn_implementation="planned")
    hf = M.attach_family(hf, M.FAMILIES["qwen3_vl_moe"]).eval()
    assert list(experts.expert_blocks(hf)) == [1]
    engine, policy = HFEngine(choose_others(copy.deepcopy(hf)), processor, CPU), M.Policy(hf, processor)
    experts.start_replay(policy.hf, engine)
    rollouts = engine.generate(make_prompts(questions, processor), 2, SamplingParams(12, seed=1))
    assert rollouts[0].experts[0].shape[1:] == (1, 2)
    assert mismatch(policy, rollouts) < 2e-6 < 1e-4 < mismatch(policy, own_choice(rollouts))


def test_the_shares_of_choices_that_differ_are_counted(pair, questions):
    engine, policy = pair("qwen3_vl_moe")
    rollouts = engine.generate(make_prompts(questions, engine.processor), 2, SamplingParams(12, seed=1))
    rollouts.append(replace(rollouts[-1], experts=[]))
    rollouts.append(written("text", [1, 2, 3], [4, 5, 6]))  # a prompt of 3 tokens, and 2 input tokens of a response
    [micro] = pack(rollouts, policy)
    own = []
    for block in experts.expert_blocks(policy.hf).values():
        router = block.mlp.gate
        router.register_forward_pre_hook(
            lambda gate, args: own.append((args[0] @ gate.weight.t()).topk(gate.top_k).indices))
    policy(micro)
    shares = []
    for layer, ids in enumerate(own):
        given = micro.experts_T[:, layer].tolist()
        pairs = zip(given, ids.tolist(), strict=True)
        differing = [sum(expert not in theirs for expert in row if expert >= 0) for row, theirs in pairs]
        shares.append(sum(differing) / ids.numel())
    assert [share.item() for share in micro.differing] == pytest.approx(shares) and min(shares) > 0.1
    meter, idle = Meter(), pack([written("x", [1, 2], [3])], policy)[0]
    add_expert_metrics([micro, idle], meter)
    metrics = meter.reduce(SimpleNamespace(gather=lambda item: [item], tp=1))
    n_other = metrics.pop("mismatch/tokens_with_other_experts")
    replayed = (micro.n_tokens - 5) / micro.n_tokens
    assert n_other == 0 and metrics == pytest.approx({
        "mismatch/experts": sum(shares) / 2 / replayed, "mismatch/tokens_without_experts": 5 / micro.n_tokens})
    assert micro.differing == []


def test_the_share_of_choices_that_differ_does_not_depend_on_the_micro_batches(pair, questions):
    engine, policy = pair("qwen3_vl_moe")
    prompts = make_prompts(questions, engine.processor)
    rollouts = engine.generate(prompts, 2, SamplingParams(12, seed=1))
    rollouts = own_choice(rollouts[:2]) + rollouts[2:]
    shares = []
    for budget in (10**6, 60):
        micros, meter = pack(rollouts, policy, budget, share=False), Meter()
        for micro in micros:
            policy(micro)
        add_expert_metrics(micros, meter)
        shares.append(meter.reduce(SimpleNamespace(gather=lambda item: [item], tp=1))["mismatch/experts"])
    assert len(micros) > 2 and shares[1] == pytest.approx(shares[0], rel=1e-6) and shares[0] > 0.3


def test_a_rollout_of_noised_images_has_no_experts():
    noised = Prompt("a", [1, 2], [], None, [], view_of=Prompt("a", [1, 2], [], None, []))
    r = Rollout(noised, 0, [3], [True], [0.0], experts=[np.zeros((2, 2, 2), np.uint8)])
    remove_noise([r])
    assert r.experts == [] and r.prompt is noised.view_of


# --- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("budget", [10**6, 110])
def test_packed_responses_equal_separate_ones(family, budget, pair, questions):
    """Also if a group is split, and if responses begin with the same tokens."""
    engine, policy = pair(family)
    rollouts = engine.generate(make_prompts(questions, engine.processor), 8, SamplingParams(12, seed=1))
    rollouts.append(replace(rollouts[0]))
    shorter, n = rollouts[1], len(rollouts[1].prompt.token_ids) + 5
    rows = [np.concatenate(shorter.experts)[:n]]
    rollouts.append(replace(shorter, response=shorter.response[:6], response_mask=[True] * 6, experts=rows))
    alone = torch.cat([logprobs(policy, [r]) for r in rollouts])
    torch.testing.assert_close(logprobs(policy, rollouts, budget), alone, rtol=0, atol=2e-6)


def routed(uid, prompt, response, table):
    """Return a rollout whose token t has the experts table[t], in one layer of two experts per token."""
    r = written(uid, prompt, response)
    r.add_experts(np.array(table, np.uint8)[:, None])
    return r


def test_shared_tokens_get_the_experts_of_the_first_response_and_others_are_counted():
    a = routed("u", [1, 2], [5, 6, 7], [[0, 1], [0, 1], [2, 3], [2, 3]])
    b = routed("u", [1, 2], [5, 8], [[0, 1], [3, 1], [0, 2]])
    c = routed("u", [1, 2], [9, 9], [[0, 1], [0, 1], [1, 0]])
    [micro] = Packer(100, 99).pack([a, b, c])  # sorted, b is first; a has two tokens with other experts, and c has one
    assert micro.ids_T.tolist() == [1, 2, 5, 6, 9]
    assert micro.experts_T[:, 0].tolist() == [[0, 1], [3, 1], [0, 2], [2, 3], [1, 0]]
    assert micro.n_other_experts == 3 and micro.experts_T.shape == (5, 1, 2)
    moved = micro.to(CPU)
    assert torch.equal(moved.experts_T, micro.experts_T) and moved.differing is micro.differing


def test_tokens_without_rows_get_the_routers_own_experts(pair, questions):
    """Bit for bit, in a micro-batch in which other tokens replay theirs."""
    engine, policy = pair("qwen3_vl_moe")
    rollouts = engine.generate(make_prompts(questions, engine.processor), 2, SamplingParams(12, seed=1))
    [micro] = pack(rollouts, policy)
    plain = policy(replace(micro, experts_T=None)).logp_K
    unknown = replace(micro, experts_T=torch.full_like(micro.experts_T, -1))
    assert torch.equal(policy(unknown).logp_K, plain) and not torch.equal(policy(micro).logp_K, plain)
    mixed = rollouts[:2] + own_choice(rollouts[2:])
    parts = torch.cat([logprobs(policy, mixed[:2]), logprobs(policy, mixed[2:])])
    torch.testing.assert_close(logprobs(policy, mixed), parts, rtol=0, atol=2e-6)
    short = replace(rollouts[0], experts=[rollouts[0].prompt.experts])  # rows of the prompt only
    [micro] = pack([short], policy)
    is_known = micro.experts_T[:, 0, 0] >= 0
    assert is_known.sum() == len(short.prompt.token_ids) and is_known[: is_known.sum()].all()


def test_rows_for_more_tokens_than_there_are_fail():
    r = routed("u", [1, 2], [5, 6], [[0, 1]] * 4)
    with pytest.raises(ValueError, match="shape"):
        Packer(100, 99).pack([r])


def test_a_groups_prompt_rows_are_kept_and_sent_once():
    prompt = Prompt("u", list(range(1000)), [], None, [])
    rng = np.random.default_rng(0)
    of_prompt = rng.integers(0, 128, (1000, 48, 8), np.uint8)
    group = [Rollout(prompt, i, [5, 6], [True, True]) for i in range(8)]
    for r in group[:7]:
        r.add_experts(np.concatenate([of_prompt, rng.integers(0, 128, (1, 48, 8), np.uint8)]))
    group[7].add_experts(np.concatenate([of_prompt + 1, of_prompt[:1]]))  # other experts of the same prompt
    received = pickle.loads(data := pickle.dumps(group))
    assert len(data) < 2.2 * of_prompt.nbytes
    assert all(r.experts[0] is received[0].experts[0] for r in received[:7])
    assert np.array_equal(received[3].experts[0], of_prompt) and (received[7].experts[0] == of_prompt + 1).all()
    assert all(rows.base is None for r in group for rows in r.experts)  # no view keeps other rows in memory


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MIXTURES)
def test_gradients_of_the_router_equal_finite_differences(family, loaded, questions, monkeypatch):
    hf, processor = loaded[family]
    hf = copy.deepcopy(hf).double()
    hf.set_experts_implementation("eager")  # grouped matmuls do not support float64
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    policy = M.Policy(hf, processor)
    experts.start_replay(hf, SimpleNamespace())
    rng = np.random.default_rng(0)
    prompts = make_prompts(questions[:2], processor)
    rollouts = [Rollout(p, i, [50 + i, 60, 70 + i], [True] * 3, [0.0] * 3) for p in prompts for i in range(2)]
    for r in rollouts:  # two of four experts
        n_tokens = len(r.prompt.token_ids) + 2
        r.add_experts(rng.permuted(np.tile(np.arange(4), (n_tokens, 2, 1)), axis=2)[..., :2].astype(np.uint8))
    [micro] = pack(rollouts, policy)

    def total():
        logp_K = policy(micro).logp_K
        return (logp_K * torch.sin(micro.target_K.double())).sum()

    total().backward()
    checked, gradients = [], []
    for block in experts.expert_blocks(hf).values():
        weight = block.mlp.gate.weight
        row, column = divmod(int(weight.grad.abs().argmax()), weight.shape[1])
        values = []
        with torch.no_grad():
            for step in (1e-4, -2e-4, 1e-4):
                weight[row, column] += step
                values.append(total().item())
        checked.append((values[0] - values[1]) / 2e-4)
        gradients.append(weight.grad[row, column].item())
    assert gradients == pytest.approx(checked, rel=1e-5) and min(map(abs, gradients)) > 1e-5


@pytest.mark.parametrize("family", MIXTURES)
def test_recomputed_blocks_replay_the_same_experts(family, pair, questions):
    """Two micro-batches run forward before either runs backward."""
    engine, policy = pair(family)
    rollouts = engine.generate(make_prompts(questions, engine.processor), 2, SamplingParams(12, seed=1))
    micros = [pack(rollouts[:3], policy)[0], pack(rollouts[3:], policy)[0]]
    policy.train()

    def gradient():
        policy.zero_grad()
        totals = [policy(micro).logp_K.sum() for micro in micros]
        for total in totals:
            total.backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    kept = gradient()
    policy.hf.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradient(), kept, rtol=0, atol=1e-6)
    own = [replace(micro, experts_T=None) for micro in micros]
    micros[:] = own
    assert (gradient() - kept).abs().max() > 1e-4


# --- which forward passes replay --------------------------------------------------------------------------------------


def test_references_views_and_critics_choose_their_own_experts(pair, loaded, questions):
    engine, policy = pair("qwen3_vl_moe")
    rollouts = engine.generate(make_prompts(questions, engine.processor), 2, SamplingParams(12, seed=1))
    [micro] = pack(rollouts, policy)
    own = replace(micro, experts_T=None)
    hf, processor = loaded["qwen3_vl_moe"]
    reference = M.Policy(copy.deepcopy(hf), processor)  # as a teacher's or a critic's, its routers are not changed
    assert torch.equal(reference(micro).logp_K, reference(own).logp_K)
    assert view_micro_batch(micro, "blank", 0.5, (0, 0)).experts_T is None
    add_lora(policy.hf, LoraConfig(4, 8.0))
    assert torch.equal(AdapterFreePolicy(policy)(micro).logp_K, policy(own).logp_K)
    assert not torch.equal(policy(micro).logp_K, policy(own).logp_K)
    passes = Models(policy, None, reference=reference).logprob_passes(Algorithm(kl_coef=0.1), 0, 0)
    assert torch.equal(passes["ref_logps"](micro, 1.0).logp_K, reference(own).logp_K)


def test_adapters_train_with_replayed_experts(pair, questions):
    engine, policy = pair("qwen3_vl_moe")
    rollouts = engine.generate(make_prompts(questions, engine.processor), 2, SamplingParams(12, seed=1))
    add_lora(policy.hf, LoraConfig(4, 8.0))
    M.set_trainable(policy.hf, "none")
    assert mismatch(policy, rollouts) < 2e-6 < mismatch(policy, own_choice(rollouts))
    [micro] = pack(rollouts, policy)
    policy(micro).logp_K.sum().backward()
    assert all(".lora_" in name for name, p in policy.named_parameters() if p.grad is not None)


# --- episodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["", DROPS_THOUGHTS])
@pytest.mark.parametrize("family", MIXTURES)
def test_episodes_replay_the_experts_of_every_turn(family, template, pair):
    """Also those of observations, and of turns that are separate sequences. HFEngine computes the prompt of such a turn
    again, with other choices, so these are compared without sharing."""
    engine, policy = pair(family)
    engine.processor = processor = add_end_tokens(engine.processor)
    if template:
        processor.tokenizer = copy.deepcopy(processor.tokenizer)
        processor.tokenizer.chat_template = template
    envs = make_factory(Scripted, max_turns=5)
    prompts = make_prompts(make_examples([1, 2, 3, 4]), processor, reset_fn=envs.reset_example)
    episodes = EpisodeEngine(engine, envs, processor).generate(prompts, 2, SamplingParams(400, seed=1))
    assert max(r.n_turns for r in episodes) == 4 and any(r.separate_turns for r in episodes) == bool(template)
    for micro in pack(episodes, policy):
        assert (micro.experts_T >= 0).all() and (micro.n_other_experts > 0) == bool(template)
    assert mismatch(policy, episodes, share=not template) < 1e-5
    assert mismatch(policy, [without_rows(r) for r in episodes]) > 2e-4


def without_rows(r):
    return replace(r, experts=[], separate_turns=[turn._replace(experts=()) for turn in r.separate_turns])


# --- servers ----------------------------------------------------------------------------------------------------------


def rows_of(ids):
    """Return the experts that the fake servers choose in three layers: functions of layer, token and position."""
    layers = np.arange(3)[:, None]
    return np.array([layers + [(token + 7 * i) % 120, 120 + i % 100] for i, token in enumerate(ids)], np.uint8)


class RoutingServer(FakeServer):
    """A fake server that returns experts, as vLLM's does: not those of the last token."""

    returns_experts = True

    async def generate(self, request):
        result = await super().generate(request)
        ids = [*request.ids, *result.tokens]
        return result._replace(experts=rows_of(ids)[request.n_routed : -1]) if self.returns_experts else result


@pytest.fixture
def servers(connect, monkeypatch):  # noqa: F811
    def make(**settings):
        monkeypatch.setattr("engines.server.CLIENTS", {"vllm": RoutingServer})
        engine, servers = connect(2, **settings)
        engine.expert_layers = [0, 2]
        return engine, servers

    return make


def test_servers_return_the_experts_of_every_token(servers):
    engine, _ = servers()
    rollouts = engine.generate(prompts_of("a", "b"), 3, SamplingParams(N_NEW))
    for r in rollouts:
        assert np.array_equal(np.concatenate(r.experts), rows_of([*r.prompt.token_ids, *r.response])[:-1, [0, 2]])
        assert r.experts[0] is r.prompt.experts


def test_a_response_that_a_sync_aborts_keeps_the_experts_of_its_tokens(servers):
    engine, fakes = servers(in_flight="abort")
    set_delay(fakes, 0.005)
    syncs = []
    fakes[0].on_token = call_at_token(5, lambda: syncs.append(
        run_in_thread(partial(engine.load_weights, weights(2.0)), "sync")))  # fmt: skip
    rollouts = engine.generate(prompts_of("a", "b"), 2, SamplingParams(N_NEW))
    syncs[0].result()
    assert any(len(set(r.versions)) == 2 for r in rollouts)
    for r in rollouts:
        assert np.array_equal(np.concatenate(r.experts), rows_of([*r.prompt.token_ids, *r.response])[:-1, [0, 2]])
    assert any(request.n_routed for server in fakes for request in server.requests)


def test_servers_that_return_no_experts_are_refused(servers, monkeypatch):
    monkeypatch.setattr(RoutingServer, "returns_experts", False)
    engine, _ = servers()
    with pytest.raises(UserError, match="http://one did not return the experts of all tokens.*--replay-experts"):
        engine.generate(prompts_of("a"), 1, SamplingParams(N_NEW))


def test_experts_are_read_from_vllms_response():
    array = rows_of([1, 5, 6])[:-1]
    buffer = io.BytesIO()
    np.save(buffer, array)
    entries = [{"token_id": token, "logprob": -0.5} for token in (5, 6)]
    spans = [{"version": "run-1", "start": 0, "end": 2}]
    choice = {"token_ids": [5, 6], "logprobs": {"content": entries}, "weight_versions": spans, "finish_reason": "stop"}
    response = {"prompt_token_ids": [1], "choices": [choice]}
    assert parse_completion(response, "policy").experts == ()
    choice["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
    experts_read = parse_completion(response, "policy").experts
    assert np.array_equal(experts_read, array) and experts_read.dtype == np.uint8
    choice["routed_experts"] = base64.b64encode(pickle.dumps({})).decode()
    with pytest.raises(ValueError):  # never unpickled
        parse_completion(response, "policy")


# --- flags ------------------------------------------------------------------------------------------------------------


def test_replay_is_refused_before_a_model_loads(toys, monkeypatch):
    def check(family, kind="hf"):
        async def find_kind(urls):
            return kind

        monkeypatch.setattr("engines.client.find_common_kind", find_kind)
        engine, urls = ("hf", ()) if kind == "hf" else ("server", ("http://127.0.0.1:1",))
        model, servers = ModelConfig(model=str(toys[family])), RolloutServerConfig(servers=urls)
        check_engine(engine, (), servers, model, 1, replay_experts=True)

    monkeypatch.setattr(launch, "load_hf", None)  # calling it would fail
    with pytest.raises(UserError, match="--replay-experts: --model is of type 'qwen3_vl', but only qwen3_vl_moe and "):
        check("qwen3_vl")
    for family in MIXTURES:
        check(family)
    check("qwen3_vl_moe", "vllm")
    with pytest.raises(UserError, match="--replay-experts: SGLang servers do not return the experts; use vLLM's"):
        check("qwen3_vl_moe", "sglang")


@pytest.mark.parametrize("pair, message", [
    ("enable_return_routed_experts=true", "use --replay-experts"),
    ("quantization=fp8", "new weights would reach vLLM unquantized"),
    ("quantization_config={}", "new weights would reach vLLM unquantized"),
    ("speculative_config={}", "on a CPU, vLLM's speculative decoding returns wrong log-probabilities"),
    ("spec_method=ngram", "on a CPU, vLLM's speculative decoding returns wrong log-probabilities"),
])  # fmt: skip
def test_arguments_of_vllm_are_refused(pair, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # also without vLLM
    with pytest.raises(UserError, match=f"--vllm {pair.split('=')[0]}=.*: {message}"):
        parse_vllm_args([pair], "vllm", 1)
    if "spec" in pair:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert parse_vllm_args([pair], "vllm", 1)


def test_a_quantized_model_is_refused(toys, tmp_path):
    shutil.copytree(toys["qwen3_vl_moe"], tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has quantized weights, which cannot be trained"):
        M.load_config(str(tmp_path / "fp8"))


def test_vllm_is_started_to_return_experts(toys, tmp_path, capsys, monkeypatch):
    processor = M.Processor(str(toys["qwen3_vl_moe"]))
    data = write_parquet(tmp_path / "train.parquet", shapes_rows(4, "train", 0))
    command = f"--print --model {toys['qwen3_vl_moe']} --data {data}".split()
    monkeypatch.setattr("engines.serve.vllm_settings", lambda *_: {})
    with pytest.raises(UserError, match="--replay-experts: vLLM returns its experts only on a GPU; use --rollout hf"):
        serve.main(serve.parse_args([*command, "--replay-experts"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for extra in ([], ["--replay-experts"]):
        serve.main(serve.parse_args([*command, *extra]))
        assert ("--enable-return-routed-experts" in capsys.readouterr().out) == bool(extra)
    settings = {"max_model_len": 64, "enable_return_routed_experts": True}
    arguments = llm_arguments(str(toys["qwen3_vl_moe"]), processor, torch.bfloat16, True, settings)
    assert arguments["enable_return_routed_experts"] and arguments["enable_prefix_caching"]


def test_a_request_to_a_server_asks_for_the_missing_rows_only():
    sent = []

    async def post(path, body):
        sent.append(body)
        return {}

    client = VLLMClient("http://x", None, 1.0, [0], [])
    client.post = post
    asyncio.run(client._generate(GenerateRequest("u", [1], [], 4, 0, 1.0, 1.0, "s", n_routed=7), "policy", []))
    assert sent[0]["sampling_params"]["routed_experts_prompt_start"] == 7


# --- the self-test ----------------------------------------------------------------------------------------------------


def self_test(engine, policy, questions):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        lengths = [len(prompt.token_ids) for prompt in make_prompts(questions, engine.processor)]
        packer = Packer(600, policy.image_token_id)
        examples = ExampleList(questions, lengths)
        return S.self_test(policy, engine, examples, engine.processor, packer, SamplingParams(20))
    finally:
        torch.distributed.destroy_process_group()


def test_the_self_test_replays_experts_and_finds_rows_of_other_tokens(pair, questions, monkeypatch):
    """With other choices in the engine it passes only because of the replay."""
    engine, policy = pair("qwen3_vl_moe")
    assert "self-test passed" in self_test(engine, policy, questions)
    original = Rollout.add_experts

    def shifted(r, rows):
        original(r, np.roll(rows, 1, axis=0) if len(rows) > 1 else rows)

    monkeypatch.setattr(Rollout, "add_experts", shifted)
    with pytest.raises(UserError, match="log-probabilities of engine and trainer under new weights differ"):
        self_test(engine, policy, questions)


def test_one_token_with_a_wrong_logprob_fails_the_self_test(pair, questions):
    """The mean over all tokens is below its limit."""
    engine, policy = pair("qwen3_vl_moe", scale=0)
    original = engine.generate

    def generate(*args):
        rollouts = original(*args)
        rollouts[5].logprobs[3] -= 0.015
        return rollouts

    engine.generate = generate
    with pytest.raises(UserError, match=r"differ by [4-9]\.\d+e-05 nats per token on average, 1.50e-02 at most"):
        self_test(engine, policy, questions)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family,world,options", [
    ("qwen3_5_moe", 2, ""), ("qwen3_vl_moe", 2, "--tp 2"), ("qwen3_vl_moe", 1, "--lora-rank 4 --kl-coef 0.1"),
    ("qwen3_5_moe", 1, "--gradient-checkpointing --update-epochs 2"),
])  # fmt: skip
def test_a_run_replays_every_token(family, world, options, toys, tmp_path):
    """Groups move between processes. Rows of other tokens would show in mismatch/experts (0.4), as HFEngine and the
    trainer choose the same experts."""
    data = write_parquet(tmp_path / "train.parquet", shapes_rows(16, "train", 0))
    command = flags(toys[family], data, tmp_path / "run", "--replay-experts", "--steps", 2, *options.split())
    run([*(TORCHRUN + [world] if world > 1 else [sys.executable]), "train.py", *command])
    for row in rows(tmp_path / "run"):
        assert row["mismatch/experts"] < 0.1 and row["mismatch/tokens_without_experts"] == 0
        assert row["mismatch/tokens_with_other_experts"] < 0.01 and row["mismatch/max_abs_logprob_diff"] < 1e-4


def print_figures():
    """Print the table of RESULTS.md: 12 prompts with 0 to 2 images, 8 responses of up to 32 tokens each."""
    rng = random.Random(0)
    examples = []
    for i in range(12):
        sizes = [rng.choice([(84, 84), (60, 97), (130, 56)]) for _ in range(i % 3)]
        images = [Image.frombytes("RGB", (w, h), rng.randbytes(3 * w * h)) for w, h in sizes]
        examples.append(example(f"q{i}", "<image>" * len(images) + f"What is it, number {i}?", images))
    with tempfile.TemporaryDirectory() as folder:
        for family in MIXTURES:
            demo.make_model(Path(folder, family), family, seed=0, hidden=64, layers=2, vocab=448)
            hf, processor = M.load_hf(f"{folder}/{family}").eval(), M.Processor(f"{folder}/{family}")
            for scale in (0, 0.03, 1.0):
                engine_hf = copy.deepcopy(hf)
                engine = HFEngine(choose_others(engine_hf, scale) if scale else engine_hf, processor, CPU)
                policy = M.Policy(copy.deepcopy(hf), processor)
                experts.start_replay(policy.hf, engine)
                rollouts = engine.generate(make_prompts(examples, processor), 8, SamplingParams(32, seed=1))
                [micro] = pack(rollouts, policy)
                policy(micro)
                cells = [family, scale, f"{float(sum(micro.differing) / len(micro.differing)):.3f}"]
                for chosen, share in ((own_choice(rollouts), True), (rollouts, True), (rollouts, False)):
                    engine_N = torch.tensor([logp for r in rollouts for logp in r.logprobs])
                    gap_N = (logprobs(policy, chosen, share=share) - engine_N).double()
                    kl = (gap_N.expm1() - gap_N).mean()
                    cells.append(f"{gap_N.abs().mean():.1e}, {gap_N.abs().max():.1e}, {kl:.1e}")
                print(*cells, f"{micro.n_other_experts} of {micro.n_tokens}", sep=" | ")


if __name__ == "__main__":
    print_figures()
