"""Tests of requests to vLLM in this process and of its settings, without vLLM.   pytest tests/test_vllm_requests.py"""

import importlib.util
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES
from test_rollout import example, places

import engines.vllm
import model as M
import train
from engines import launch
from engines.common import build_request
from engines.launch import vllm_settings
from engines.vllm import VLLMEngine
from engines.vllm_weights import parameter_names
from errors import UserError
from rollout import Rollout, SamplingParams, make_prompts


class TwoProcesses:
    """A fake of vLLM and of all_gather_object, as seen by one of two processes that share a model. It also has the
    other process's rollouts, and finishes one response at a time, the newest request first."""

    def __init__(self, rank, others, processor):
        self.rank = rank
        self.others = [build_request(r, 4, processor, 10**6) for r in others]
        self.llm_engine = self
        self.requests, self.aborted = [], None

    def gather(self, everywhere, mine, **_):
        everywhere[:] = [mine, (self.others, True)] if self.rank == 0 else [(self.others, True), mine]
        self.others = []

    def enqueue(self, requests, parameters, use_tqdm):
        names = [str(len(self.requests) + i) for i in range(len(requests))]
        self.requests += zip(names, requests, parameters, strict=True)
        return [f"{name}-random" for name in names]

    def step(self):
        name, request, _ = self.requests.pop()
        token = 40 + int(name)
        logprobs = SimpleNamespace(token_ids=[token], logprobs=[-float(token)])
        sample = SimpleNamespace(token_ids=[token], logprobs=logprobs, finish_reason="length")
        short = request["prompt_token_ids"]
        ids = list(itertools.chain.from_iterable([t] * (9 if t == self.image else 1) for t in short))
        return [SimpleNamespace(request_id=name, prompt_token_ids=ids, outputs=[sample])]

    def abort_request(self, names, internal):
        self.aborted = names


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_share_a_model_each_return_their_own_rollouts(rank, loaded, picture, monkeypatch):
    """The requests of both are queued, the first process's first. The first process has two of the three prompts."""
    _, processor = loaded["qwen2_5_vl"]
    square = picture(84, 84, 1)
    rows = [("one", "<image>What?", [square]), ("none", "Tell me.", []), ("two", "Is <image> <image>?", [square] * 2)]
    everyone = make_prompts(list(itertools.starmap(example, rows)), processor)
    mine, others = (everyone[:2], everyone[2:]) if rank == 0 else (everyone[2:], everyone[:2])
    theirs = [Rollout(prompt, sample, [], [], [], "", "") for prompt in others for sample in range(2)]
    fake = TwoProcesses(rank, theirs, processor)
    fake.image = processor.image_token_id
    engine = object.__new__(VLLMEngine)
    attributes = {"tp": 2, "tp_group": None, "tp_rank": rank, "max_model_len": 10**6, "sleep_level": 0,
            "has_all_weights": True}
    vars(engine).update(processor=processor, llm=fake, **attributes)
    monkeypatch.setattr(engine, "wake", lambda: None)
    monkeypatch.setattr(engine, "_add_requests", partial(add_requests_without_vllm, engine))
    monkeypatch.setattr(engines.vllm.dist, "all_gather_object", fake.gather)
    handed = []
    rollouts = engine.generate(mine, 2, SamplingParams(4), handed.append)
    assert [r.response for r in rollouts] == ([[40], [41], [42], [43]] if rank == 0 else [[44], [45]])
    assert [r.response for r in handed] == ([[43], [42], [41], [40]] if rank == 0 else [[45], [44]])
    assert sorted(map(id, handed)) == sorted(map(id, rollouts)) and fake.aborted == []
    assert places(rollouts) == list(itertools.product([p.uid for p in mine], range(2)))


def add_requests_without_vllm(engine, wanted, sampling):
    requests = [{"prompt_token_ids": ids} for *_, ids, _, _ in wanted]
    names = engine.llm.enqueue(requests, requests, use_tqdm=False) if requests else []
    return [name.partition("-")[0] for name in names]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_names_for_vllm_are_the_models(family, loaded, toys):
    """Names made from the config alone equal those of the trainer's model: tied weights once, adapters never."""
    names = {name for name, _ in loaded[family][0].named_parameters()}
    assert parameter_names(M.load_config(str(toys[family]))) == names


@pytest.mark.parametrize("pair, engine, match", [
    ("kv_cache_dtype=fp8", "hf", "the engine is hf"),
    ("enforce_eager", "vllm", "give KEY=VALUE"),
    ("seed=3", "vllm", "--vllm seed=3: "),
    ("max_model_len=3", "vllm", "--vllm max_model_len=3: "),
])
def test_invalid_vllm_settings_are_refused(pair, engine, match):
    with pytest.raises(UserError, match=match):
        vllm_settings([pair], engine, world=1)
    assert vllm_settings((), engine, world=1) == {}


def test_settings_of_servers_do_not_need_vllm_here(monkeypatch):
    """This holds for engines.serve --print and for a trainer whose servers are elsewhere."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert vllm_settings(["max_num_seqs=4", "x=y"], "server", world=1) == {"max_num_seqs": 4, "x": "y"}


def test_missing_vllm_is_reported_in_one_line_before_anything_loads(monkeypatch):
    def patch_find_spec(spec):
        original = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: spec if name == "vllm" else original(name))

    patch_find_spec(None)
    monkeypatch.setattr(train, "load_config", None)  # calling it would fail
    message = "--rollout vllm: vLLM is not installed here; pip install -r requirements-gpu.txt"
    try:
        with pytest.raises(ValueError, match=message):
            train.main(train.parse_args("--model m --data d --out o --steps 1 --rollout vllm".split()))
    finally:
        torch.distributed.destroy_process_group()
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert launch.resolve_engine("auto", cuda) == launch.resolve_engine("auto", cpu) == "hf"
    patch_find_spec(object())
    assert launch.resolve_engine("auto", cuda) == "vllm"
    assert launch.resolve_engine("auto", cpu) == "hf"
