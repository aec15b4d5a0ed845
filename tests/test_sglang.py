"""Real SGLang servers on the CPU, compared with HFEngine and the trainer.   make test-sglang"""

import asyncio
import itertools
import json
import os
import re
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import httpx2
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from test_rollout import assert_same, example, places, trainer_logprobs
from test_servers import LIMITS, ONE, connected, in_the_middle, spans
from test_train import flags, rows
from test_train import run as run_command
from test_vllm import data, named  # noqa: F401  data is a fixture

import demo
import model as M
from engines.client import GenerateRequest, ServerUnavailable, detect_server_kind
from engines.hf import HFEngine
from engines.local import LocalServers, server_command
from engines.sglang_client import SGLangClient, checkpoint_name
from engines.sync import free_port, join_process_group, read_safetensors, tensor_checksum, tensor_meta
from errors import UserError
from rollout import Rollout, SamplingParams, make_prompts

pytestmark = pytest.mark.sglang
CPU = torch.device("cpu")
VOCAB, MAX_TOKENS = 448, 12
COUNTER = itertools.count()


@pytest.fixture(scope="session")
def toys(tmp_path_factory):
    """Return a function that maps a family to the folder of its model, which it makes if needed."""
    root = tmp_path_factory.mktemp("sglang_toys")

    def make(family):
        if not (root / family).exists():
            demo.make_model(root / family, family, seed=0, hidden=128, layers=2, vocab=VOCAB)
        if family == "qwen2_vl":  # as in the config of Qwen's own checkpoints
            config = json.loads((root / family / "config.json").read_text())
            config["vision_config"]["in_chans"] = 3
            (root / family / "config.json").write_text(json.dumps(config))
        return root / family

    return make


@contextmanager
def start_server(folder, log):
    """Start a server. Yield its URL and its process."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    local, processor = LocalServers(), M.Processor(str(folder))
    local.start(*server_command("sglang", str(folder), processor, torch.float32, LIMITS, "127.0.0.1", port), log)
    try:
        local.wait_until_healthy([url])
        yield url, local.processes[log]
    finally:
        kill(local.processes[log])


def kill(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="session")
def server(toys, tmp_path_factory):
    folder = toys("qwen2_5_vl")
    with start_server(folder, tmp_path_factory.mktemp("log") / "server.log") as (url, _):
        yield SimpleNamespace(url=url, folder=folder, hf=M.load_hf(str(folder)).eval(),
                              processor=M.Processor(str(folder)))  # fmt: skip


@pytest.fixture
def mixed(picture):
    """Return examples with 1, 0, 2 and 3 images, most of which are resized for the model."""
    first = picture(84, 84, 1)
    return [
        example("one", "<image>What is it?", [first]),
        example("none", "Tell me something long and odd, would you please?", []),
        example("two", "Compare <image> with <image>.", [picture(60, 97, 2), picture(130, 56, 3)]),
        example("three", "<image><image> or <image>?", [picture(31, 33, 4), picture(200, 100, 5), first]),
    ]


class Trainer:
    """A client of one server, and rank 0 of the process group that sends it weights. `label` names those weights."""

    label = "start"
    group = None

    def __init__(self, target, http):
        self.processor = target.processor
        self.server = SGLangClient(
            target.url, http, 60.0, target.processor.eos_ids, target.processor.banned_token_ids(VOCAB).tolist()
        )

    def ask(self, prompt, ids=(), max_tokens=MAX_TOKENS, temperature=1.0, top_p=1.0):
        images = [replace(i, key=f"{i.key}-{self.label}") for i in prompt.images]
        token_ids = [*prompt.unexpanded_ids, *ids]
        return self.server.generate(
            GenerateRequest(prompt.uid, token_ids, images, max_tokens, 1, temperature, top_p, self.label)
        )

    async def ask_all(self, prompts, n=3, **options):
        """Sample n answers to each prompt. Return (prompt, answer) pairs."""
        repeated = [prompt for prompt in prompts for _ in range(n)]
        results = await asyncio.gather(*(self.ask(prompt, **options) for prompt in repeated))
        return list(zip(repeated, results, strict=True))

    async def join(self):
        self.leave()
        name, port = f"group-{os.getpid()}-{next(COUNTER)}", free_port()
        group = {"address": "127.0.0.1", "port": port, "world": 2, "name": name, "seconds": 60.0, "backend": "gloo"}
        joining = asyncio.to_thread(join_process_group, rank=0, **group)
        _, self.group = await asyncio.gather(self.server.init_weight_transfer("gloo", group, 1), joining)

    def leave(self):
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group = None

    async def send(self, tensors):
        """Send some weights in one update."""
        metas = [tensor_meta(name, tensor) for name, tensor in tensors]

        def broadcast():
            for _, tensor in tensors:
                dist.broadcast(tensor.contiguous(), group=self.group, group_src=0)

        sent = asyncio.to_thread(broadcast)
        results = await asyncio.gather(
            self.server.update(metas, [tensor_checksum(tensor) for _, tensor in tensors]), sent, return_exceptions=True
        )
        for error in filter(None, results):
            raise error

    async def sync(self, hf, label, select=lambda name: True):
        """Send weights over gloo in two buckets. The caller pauses and resumes the server."""
        tensors = [(name, p.detach()) for name, p in hf.named_parameters() if select(name)]
        await self.server.start_weight_update()
        for bucket in (tensors[::2], tensors[1::2]):
            await self.send(bucket)
        await self.server.end_update(label)
        self.label = label


@pytest.fixture
def run_with_trainer(server):
    """Return a function that runs scenario(trainer), an async function, and then restores the server's weights."""

    def run(scenario, restore=True):
        async def main():
            async with httpx2.AsyncClient(trust_env=False, limits=httpx2.Limits(max_connections=None)) as http:
                trainer = Trainer(server, http)
                try:
                    await scenario(trainer)
                finally:
                    if restore:
                        await trainer.join()
                        await trainer.server.pause("abort")
                        await trainer.sync(server.hf, f"restored-{next(COUNTER)}")
                        await trainer.server.resume()
                    trainer.leave()

        asyncio.run(main())

    return run


@pytest.fixture
def make_perturbed(server):
    """Return a function that copies the model and perturbs all weights, the tower's too, with a new seed each time."""
    seeds = itertools.count(1)

    def make():
        hf = M.load_hf(str(server.folder)).eval()
        generator = torch.Generator().manual_seed(next(seeds))
        with torch.no_grad():
            for p in hf.parameters():
                p += 0.2 * p.std(unbiased=False) * torch.randn(p.shape, generator=generator)
        return hf

    return make


def logprob_gaps(hf, trainer, prompt, answer, temperature=1.0):
    """Return |server's log-probability - trainer's| for each token of an answer."""
    n = len(answer.tokens)
    rollout = Rollout(prompt, 0, answer.tokens, [True] * n, answer.logprobs, answer.finish_reason, "")
    policy = M.Policy(hf, trainer.processor)
    policy.banned = torch.tensor(trainer.server.banned)
    return (trainer_logprobs(policy, rollout, temperature) - torch.tensor(answer.logprobs)).abs()


def check_answers(hf, trainer, pairs, label, temperature=1.0):
    for prompt, answer in pairs:
        assert answer.prompt_ids == prompt.token_ids
        assert logprob_gaps(hf, trainer, prompt, answer, temperature).max() <= 1e-5
        assert answer.labels == [label] * len(answer.tokens)
        assert (answer.finish_reason == "stop") == (answer.tokens[-1] in trainer.processor.eos_ids)
        assert answer.finish_reason == "stop" or len(answer.tokens) == MAX_TOKENS


# --- the same log-probabilities and tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_equal_the_trainers(temperature, server, mixed, run_with_trainer):
    prompts = make_prompts(mixed, server.processor)

    async def scenario(trainer):
        assert await detect_server_kind(server.url, trainer.server.http) == "sglang"
        assert await trainer.server.limits("disk") == (384, 1) and await trainer.server.alive()
        pairs = await trainer.ask_all(prompts, temperature=temperature)
        label = pairs[0][1].labels[0]
        check_answers(server.hf, trainer, pairs, label, temperature)
        assert len({tuple(answer.tokens) for _, answer in pairs}) == 12

    run_with_trainer(scenario, restore=False)


def test_greedy_tokens_equal_those_of_hf(server, mixed, run_with_trainer):
    prompts = make_prompts(mixed, server.processor)
    theirs = HFEngine(server.hf, server.processor, CPU).generate(prompts, 1, SamplingParams(MAX_TOKENS, 0.0))

    async def scenario(trainer):
        greedy, others = await asyncio.gather(trainer.ask_all(prompts, 1, temperature=0.0), trainer.ask_all(prompts, 1))
        pairs = zip(greedy, theirs, strict=True)
        ours = [replace(r, response=answer.tokens, logprobs=answer.logprobs) for (_, answer), r in pairs]
        assert_same(ours, theirs, greedy=True)
        assert len(others) == 4

    run_with_trainer(scenario, restore=False)


# --- new weights ------------------------------------------------------------------------------------------------------


def test_weight_sync_over_gloo(server, mixed, run_with_trainer, make_perturbed):
    """Send all weights, then only the language model's, only the tower's, and all again in another process group."""
    prompts, hf = make_prompts(mixed, server.processor), make_perturbed()

    async def scenario(trainer):
        await trainer.ask_all(prompts)  # fills the caches of prefixes and image features
        await trainer.join()
        await trainer.server.pause("wait")
        await trainer.sync(hf, "v1")
        await trainer.server.resume()
        pairs = await trainer.ask_all(prompts)
        check_answers(hf, trainer, pairs, "v1")
        assert logprob_gaps(server.hf, trainer, *pairs[0]).max() > 1e-3
        other = make_perturbed().state_dict()
        for label, tower in (("v2", False), ("v3", True)):
            with torch.no_grad():
                for name, p in hf.named_parameters():
                    if ("visual" in name) == tower:
                        p.copy_(other[name])
            await trainer.server.pause("abort")
            await trainer.sync(hf, label, lambda name, tower=tower: ("visual" in name) == tower)
            await trainer.server.resume()
            check_answers(hf, trainer, await trainer.ask_all(prompts), label)
        await trainer.join()
        await trainer.server.pause("abort")
        with pytest.raises(ServerUnavailable, match="parameters were not sent, the first is"):
            await trainer.sync(server.hf, "v4", lambda name: "visual" in name)
        await trainer.sync(server.hf, "v4")
        await trainer.server.resume()
        check_answers(server.hf, trainer, await trainer.ask_all(prompts), "v4")

    run_with_trainer(scenario)


def test_weight_sync_from_disk(server, mixed, run_with_trainer, make_perturbed, tmp_path):
    prompts, hf = make_prompts(mixed, server.processor), make_perturbed()
    tensors = {name: p.detach().contiguous() for name, p in hf.named_parameters()}
    half = len(tensors) // 2
    for file, names in (("a.safetensors", list(tensors)[:half]), ("b.safetensors", list(tensors)[half:])):
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    save_file({"model.visual.nonsense": torch.zeros(3)}, tmp_path / "bad.safetensors")

    async def scenario(trainer):
        await trainer.server.init_weight_transfer("disk", None, 0)
        before = await trainer.server.checksums()
        await trainer.server.pause("abort")
        await trainer.server.start_weight_update()
        with pytest.raises(UserError, match="no such parameter: model.visual.nonsense"):
            await trainer.server.update_from_disk(tmp_path / "bad.safetensors")
        assert await trainer.server.checksums() == before
        await trainer.server.start_weight_update()  # also closes the failed update
        for file in ("a.safetensors", "b.safetensors"):
            await trainer.server.update_from_disk(tmp_path / file)
        await trainer.server.end_update("from disk")
        await trainer.server.resume()
        trainer.label = "from disk"
        check_answers(hf, trainer, await trainer.ask_all(prompts), "from disk")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "bad.safetensors"]
        assert set(dict(read_safetensors(tmp_path / "a.safetensors"))) == set(list(tensors)[:half])  # unchanged

    run_with_trainer(scenario)


def test_banned_ids_are_not_sampled_even_if_the_model_prefers_them(server, mixed, run_with_trainer, make_perturbed):
    prompts, hf, processor = make_prompts(mixed, server.processor), make_perturbed(), server.processor
    direction = torch.randn(128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # for any hidden state, one of the two has by far the largest logit
        hf.lm_head.weight[processor.image_token_id] = 100 * direction
        hf.lm_head.weight[447] = -100 * direction

    async def scenario(trainer):
        await trainer.join()
        await trainer.server.pause("abort")
        await trainer.sync(hf, "wants")
        await trainer.server.resume()
        for temperature in (0.0, 1.0):
            pairs = await trainer.ask_all(prompts, 4, temperature=temperature)
            sampled = set(itertools.chain.from_iterable(answer.tokens for _, answer in pairs))
            assert not sampled & set(processor.banned_token_ids(VOCAB).tolist())
            check_answers(hf, trainer, pairs, "wants")

    run_with_trainer(scenario)


def test_an_unknown_name_leaves_the_weights_unchanged(server, mixed, run_with_trainer, make_perturbed):
    prompts = make_prompts(mixed[:2], server.processor)

    async def scenario(trainer):
        await trainer.join()
        before = await trainer.server.checksums()
        good = [(name, p.detach()) for name, p in make_perturbed().named_parameters()]
        for name, message in (
            ("model.visual.nonsense.weight", "has no such parameter"),
            ("model.language_model.layers.0.mlp.experts.down_proj", "does not accept all"),
        ):
            await trainer.server.pause("abort")
            await trainer.server.start_weight_update()
            with pytest.raises(UserError, match=f"{message}.*: {name}"):
                await trainer.send([*good, (name, torch.ones(3))])
            await trainer.server.resume()
            assert await trainer.server.checksums() == before
        pairs = await trainer.ask_all(prompts)
        check_answers(server.hf, trainer, pairs, pairs[0][1].labels[0])
        await trainer.server.start_weight_update()
        with pytest.raises(ServerUnavailable):  # wrong shape: SGLang stops half-way
            await trainer.send([good[0], (good[1][0], torch.ones(3))])

    run_with_trainer(scenario)


def test_unsupported_requests_are_refused(server, mixed, run_with_trainer):
    prompts = make_prompts(mixed[:2], server.processor)

    async def scenario(trainer):
        with pytest.raises(UserError, match="--sync gloo"):
            await trainer.server.limits("adapter")
        with pytest.raises(UserError, match="/generate answered 400"):
            await trainer.ask(prompts[0], max_tokens=1000)
        with pytest.raises(UserError, match="--top-p 0.9: .* before top-p"):
            await trainer.ask(prompts[0], top_p=0.9)

    run_with_trainer(scenario, restore=False)


# --- weight syncs during responses ------------------------------------------------------------------------------------


async def start_responses(trainer, prompts, max_tokens):
    """Start a response of `max_tokens` tokens per prompt, with end tokens banned. Return the running tasks."""
    trainer.server.banned += trainer.processor.eos_ids
    tasks = [asyncio.create_task(trainer.ask(prompt, max_tokens=max_tokens)) for prompt in prompts]
    while not any(task.done() for task in tasks):
        await asyncio.sleep(0.05)
        [load] = (await trainer.server.request("GET", "/v1/loads"))["loads"]
        if load["num_running_reqs"] == len(tasks):
            await asyncio.sleep(0.2)
            break
    assert not any(task.done() for task in tasks), "the responses ended too early"
    return tasks


def test_aborted_responses_continue_with_new_weights(server, mixed, run_with_trainer, make_perturbed):
    prompts, new = make_prompts(mixed, server.processor), make_perturbed()

    async def scenario(trainer):
        await trainer.join()
        first = await trainer.ask_all(prompts, 1)
        old = first[0][1].labels[0]
        tasks = await start_responses(trainer, prompts, 250)
        started = time.perf_counter()
        await trainer.server.pause("abort")
        print(f"pause: {time.perf_counter() - started:.2f} s")
        parts = await asyncio.gather(*tasks)
        assert {part.finish_reason for part in parts} == {"abort"}
        await trainer.sync(new, "new")
        await trainer.server.resume()
        for prompt, part in zip(prompts, parts, strict=True):
            assert 0 < len(part.tokens) < 250 and part.labels == [old] * len(part.tokens)
            assert logprob_gaps(server.hf, trainer, prompt, part).max() <= 1e-5
            rest = await trainer.ask(prompt, part.tokens)
            assert rest.prompt_ids == prompt.token_ids + part.tokens
            assert rest.labels == ["new"] * len(rest.tokens)
            whole = rest._replace(tokens=part.tokens + rest.tokens, logprobs=part.logprobs + rest.logprobs)
            assert logprob_gaps(new, trainer, prompt, whole)[len(part.tokens) :].max() <= 1e-5

    run_with_trainer(scenario)


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_keep_continues_responses_and_wait_lets_them_end(mode, server, mixed, run_with_trainer, make_perturbed):
    prompts, new = make_prompts(mixed, server.processor), make_perturbed()

    async def scenario(trainer):
        await trainer.join()
        first = await trainer.ask_all(prompts, 1)
        old = first[0][1].labels[0]
        tasks = await start_responses(trainer, prompts, 200)
        await trainer.server.pause(mode)
        late = asyncio.create_task(trainer.ask(prompts[0]))
        await asyncio.sleep(0.3)
        assert await trainer.server.alive()  # while it is paused
        assert [task.done() for task in tasks] == [mode == "wait"] * 4 and not late.done()
        await trainer.sync(new, "new")
        await trainer.server.resume()
        answers = await asyncio.gather(*tasks)
        assert set((await late).labels) == {"new"}
        check_answers(new, trainer, await trainer.ask_all(prompts), "new")  # without the old prefix cache
        for prompt, answer in zip(prompts, answers, strict=True):
            n = answer.labels.count(old)
            assert 0 < n <= len(answer.tokens) and answer.labels == [old] * n + ["new"] * (len(answer.tokens) - n)
            assert logprob_gaps(server.hf, trainer, prompt, answer)[:n].max() <= 1e-5
            assert mode == "keep" or n == len(answer.tokens)
        if mode == "keep":
            assert any("new" in answer.labels for answer in answers)

    run_with_trainer(scenario)


# --- ServerEngine -----------------------------------------------------------------------------------------------------


def connect_engine(url, processor, folder, **settings):
    return connected([url], processor, torch.float32, ONE, folder, vocab_size=VOCAB, trained_tower=True, **settings)


@pytest.fixture
def make_engine(server, tmp_path):
    """Yield a function that connects an engine to the running server, then restore the server's weights."""
    yield partial(connect_engine, server.url, server.processor, tmp_path / "sync")
    connect_engine(server.url, server.processor, tmp_path / "back").load_weights(named(server.hf))


def rollout_gaps(hf, processor, rollouts):
    """Return |engine's log-probability - trainer's| for the tokens of each rollout."""
    policy = M.Policy(hf, processor)
    return [(trainer_logprobs(policy, r) - torch.tensor(r.logprobs)).abs() for r in rollouts]


@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_engine_log_probabilities_equal_the_trainers_after_every_sync(sync, make_engine, server, mixed, make_perturbed):
    engine, prompts, hf = make_engine(sync=sync), make_prompts(mixed, server.processor), make_perturbed()
    for number, select in enumerate((None, None, lambda name: "q_proj" in name or "visual.merger" in name), 1):
        sent = named(make_perturbed(), select or (lambda name: True))
        with torch.no_grad():
            for name, tensor in sent:
                hf.get_parameter(name).copy_(tensor)
        metrics = engine.load_weights(sent)
        assert metrics["sync/bytes"] == sum(tensor.nbytes for _, tensor in sent)
        rollouts = engine.generate(prompts, 3, SamplingParams(MAX_TOKENS))
        assert max(map(torch.max, rollout_gaps(hf, server.processor, rollouts))) <= 1e-5
        assert max(map(torch.max, rollout_gaps(server.hf, server.processor, rollouts))) > 1e-3
        assert set(itertools.chain(*(r.versions for r in rollouts))) == {number}
        assert places(rollouts) == [(uid, i) for uid in ("one", "none", "two", "three") for i in range(3)]


def test_an_engine_continues_responses_that_a_sync_aborts(make_engine, server, mixed, make_perturbed):
    engine, prompts = make_engine(in_flight="abort"), make_prompts(mixed, server.processor)
    weights = {1: server.hf, 2: make_perturbed()}
    engine.load_weights(named(weights[1]))
    rollouts = in_the_middle(
        engine, prompts, 8, SamplingParams(200), lambda: engine.load_weights(named(weights[2])), after=1.0)
    policies = {version: M.Policy(hf, server.processor) for version, hf in weights.items()}
    crossed = 0
    for r in rollouts:
        parts = spans(r)
        crossed += len(parts) == 2
        assert [version for version, *_ in parts] in ([1], [2], [1, 2])
        for version, first, end in parts:
            theirs = trainer_logprobs(policies[version], r)[first:end]
            assert (theirs - torch.tensor(r.logprobs[first:end])).abs().max() <= 1e-5
    print(f"{crossed} of {len(rollouts)} responses were sampled by two versions of the weights")
    assert crossed > 3 and {r.finish_reason for r in rollouts} <= {"stop", "length"}


def test_a_complete_asynchronous_run(make_engine, server, data, tmp_path):  # noqa: F811
    options = ["--rollout", "server", "--servers", server.url, "--async-steps", 1, "--steps", 4]
    done = run_command([sys.executable, "train.py", *flags(server.folder, data, tmp_path / "out", *options)])
    assert "self-test: " in done.stdout and "under new weights" in done.stdout
    steps = [row for row in rows(tmp_path / "out") if "async/staleness" in row]
    ages = [row["async/staleness_max"] for row in steps]
    # later ages are 0 too if a sync came before the first token of the batch that was sampled ahead
    assert len(ages) == 4 and ages[0] == 0 and max(ages) == 1
    assert steps[0]["mismatch/max_abs_logprob_diff"] <= 1e-5 and all(row["sync/servers"] == 1 for row in steps)


# --- other families, and a server that is killed ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_other_families_are_served_and_a_killed_server_is_reported(family, toys, mixed, tmp_path):
    folder = toys(family)
    hf, processor = M.load_hf(str(folder)).eval(), M.Processor(str(folder))
    prompts = make_prompts(mixed, processor)

    async def compare(url):
        async with httpx2.AsyncClient(trust_env=False) as http:
            trainer = Trainer(SimpleNamespace(url=url, processor=processor), http)
            assert await trainer.server.limits("disk") == (384, 1)
            pairs = await trainer.ask_all(prompts)
            check_answers(hf, trainer, pairs, pairs[0][1].labels[0])
            with torch.no_grad():
                for p in hf.parameters():
                    p += 0.2 * p.std(unbiased=False) * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
            await trainer.join()
            await trainer.server.pause("abort")
            await trainer.sync(hf, "new")
            await trainer.server.resume()
            check_answers(hf, trainer, await trainer.ask_all(prompts), "new")
            trainer.leave()

    with start_server(folder, tmp_path / "log") as (url, process):
        asyncio.run(compare(url))
        engine = connect_engine(url, processor, tmp_path)
        engine.load_weights(named(hf))
        sampling, errors = SamplingParams(250), []

        def sample():
            with pytest.raises(UserError) as caught:
                engine.generate(prompts, 2, sampling)
            errors.append(str(caught.value))

        in_the_middle(SimpleNamespace(generate=lambda *_: sample()), prompts, 2, sampling, partial(kill, process))
        message = rf"rollout servers: none is available \({url}: /generate: .*\); restart them, then repeat .*auto"
        assert re.fullmatch(message, errors[0])
        with pytest.raises(UserError, match=f"rollout servers: none accepted the new weights .{url}"):
            engine.load_weights(named(hf))


def test_names_are_those_of_the_checkpoint():
    assert checkpoint_name("model.visual.blocks.0.attn.qkv.weight") == "visual.blocks.0.attn.qkv.weight"
    assert checkpoint_name("model.language_model.norm.weight") == "model.norm.weight"
    assert checkpoint_name("lm_head.weight") == "lm_head.weight"
