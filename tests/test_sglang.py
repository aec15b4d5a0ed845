"""Real servers of SGLang's on the CPU, against HFEngine and the trainer.   make test-sglang"""

import asyncio
import itertools
import json
import os
import re
import signal
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace

import httpx2
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from test_rollout import example, places, trainer_logprobs
from test_servers import LIMITS, ONE, connected, in_the_middle, spans
from test_train import flags, rows
from test_train import run as run_command
from test_vllm import data, named  # noqa: F401  a fixture too

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
VOCAB, ROOM = 448, 12
NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def toys(tmp_path_factory):
    """family -> folder, made when it is asked for."""
    root = tmp_path_factory.mktemp("sglang_toys")

    def make(family):
        if not (root / family).exists():
            demo.make_model(root / family, family, seed=0, hidden=128, layers=2, vocab=VOCAB)
        if family == "qwen2_vl":  # as the config of Qwen's own checkpoints has it, too
            config = json.loads((root / family / "config.json").read_text())
            config["vision_config"]["in_chans"] = 3
            (root / family / "config.json").write_text(json.dumps(config))
        return root / family

    return make


@contextmanager
def served(folder, log):
    """The URL of a server that has started, and its process."""
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
def running(toys, tmp_path_factory):
    folder = toys("qwen2_5_vl")
    with served(folder, tmp_path_factory.mktemp("log") / "server.log") as (url, _):
        yield SimpleNamespace(url=url, folder=folder, hf=M.load_hf(str(folder)).eval(),
                              processor=M.Processor(str(folder)))  # fmt: skip


@pytest.fixture
def mixed(picture):
    """Prompts with 1, 0, 2 and 3 images, most of them not of the size that the model sees."""
    first = picture(84, 84, 1)
    return [
        example("one", "<image>What is it?", [first]),
        example("none", "Tell me something long and odd, would you please?", []),
        example("two", "Compare <image> with <image>.", [picture(60, 97, 2), picture(130, 56, 3)]),
        example("three", "<image><image> or <image>?", [picture(31, 33, 4), picture(200, 100, 5), first]),
    ]


class Trainer:
    """A client of one server, and rank 0 of the group that it gets weights from. `label`: of the server's weights."""

    label = "start"
    group = None

    def __init__(self, at, http):
        self.processor = at.processor
        self.server = SGLangClient(
            at.url, http, 60.0, at.processor.eos_ids, at.processor.banned_token_ids(VOCAB).tolist()
        )

    def ask(self, prompt, ids=(), room=ROOM, temperature=1.0, top_p=1.0):
        images = [(f"{i.key}-{self.label}", i.image) for i in prompt.images]
        short = [*prompt.unexpanded_ids, *ids]
        return self.server.generate(GenerateRequest(prompt.uid, short, images, room, 1, temperature, top_p, self.label))

    async def asked(self, prompts, n=3, **more):
        """(prompt, answer) of each."""
        every = [prompt for prompt in prompts for _ in range(n)]
        answers = await asyncio.gather(*(self.ask(prompt, **more) for prompt in every))
        return list(zip(every, answers, strict=True))

    async def join(self):
        self.leave()
        name, port = f"group-{os.getpid()}-{next(NUMBERS)}", free_port()
        group = {"address": "127.0.0.1", "port": port, "world": 2, "name": name, "seconds": 60.0, "backend": "gloo"}
        ours = asyncio.to_thread(join_process_group, rank=0, **group)
        _, self.group = await asyncio.gather(self.server.init_weight_transfer("gloo", group, 1), ours)

    def leave(self):
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group = None

    async def send(self, tensors):
        """What one update is."""
        metas = [tensor_meta(name, tensor) for name, tensor in tensors]

        def broadcast():
            for _, tensor in tensors:
                dist.broadcast(tensor.contiguous(), group=self.group, group_src=0)

        sent = asyncio.to_thread(broadcast)
        answers = await asyncio.gather(
            self.server.update(metas, [tensor_checksum(tensor) for _, tensor in tensors]), sent, return_exceptions=True
        )
        for error in filter(None, answers):
            raise error

    async def sync(self, hf, label, wanted=lambda name: True):
        """Over gloo, between a pause and a resume of the caller's, in two buckets."""
        tensors = [(name, p.detach()) for name, p in hf.named_parameters() if wanted(name)]
        await self.server.start_weight_update()
        for part in (tensors[::2], tensors[1::2]):
            await self.send(part)
        await self.server.end_update(label)
        self.label = label


@pytest.fixture
def play(running):
    """play(what): run what(trainer), an async function, with the server's weights put back afterwards."""

    def run(what, restore=True):
        async def main():
            async with httpx2.AsyncClient(trust_env=False, limits=httpx2.Limits(max_connections=None)) as http:
                trainer = Trainer(running, http)
                try:
                    await what(trainer)
                finally:
                    if restore:
                        await trainer.join()
                        await trainer.server.pause("abort")
                        await trainer.sync(running.hf, f"restored-{next(NUMBERS)}")
                        await trainer.server.resume()
                    trainer.leave()

        asyncio.run(main())

    return run


@pytest.fixture
def nudged(running):
    """nudged(): a copy of the model with every weight moved, the tower's too, under another seed each time."""
    seeds = itertools.count(1)

    def make():
        hf = M.load_hf(str(running.folder)).eval()
        generator = torch.Generator().manual_seed(next(seeds))
        with torch.no_grad():
            for p in hf.parameters():
                p += 0.2 * p.std(unbiased=False) * torch.randn(p.shape, generator=generator)
        return hf

    return make


def gaps(hf, trainer, prompt, answer, temperature=1.0):
    """|server's log-probability - trainer's| of each token of an answer."""
    n = len(answer.tokens)
    rollout = Rollout(prompt, 0, answer.tokens, [True] * n, answer.logprobs, answer.finish_reason, "")
    policy = M.Policy(hf, trainer.processor)
    policy.banned = torch.tensor(trainer.server.banned)
    return (trainer_logprobs(policy, rollout, temperature) - torch.tensor(answer.logprobs)).abs()


def check(hf, trainer, pairs, label, temperature=1.0):
    for prompt, answer in pairs:
        assert answer.prompt_ids == prompt.token_ids
        assert gaps(hf, trainer, prompt, answer, temperature).max() <= 1e-5
        assert answer.labels == [label] * len(answer.tokens)
        assert (answer.finish_reason == "stop") == (answer.tokens[-1] in trainer.processor.eos_ids)
        assert answer.finish_reason == "stop" or len(answer.tokens) == ROOM


# --- the same function ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_the_trainers(temperature, running, mixed, play):
    prompts = make_prompts(mixed, running.processor)

    async def what(trainer):
        assert await detect_server_kind(running.url, trainer.server.http) == "sglang"
        assert await trainer.server.limits("disk") == (384, 1) and await trainer.server.alive()
        pairs = await trainer.asked(prompts, temperature=temperature)
        label = pairs[0][1].labels[0]
        check(running.hf, trainer, pairs, label, temperature)
        assert len({tuple(answer.tokens) for _, answer in pairs}) == 12

    play(what, restore=False)


def test_greedy_tokens_are_those_of_hf(running, mixed, play):
    prompts = make_prompts(mixed, running.processor)
    theirs = HFEngine(running.hf, running.processor, CPU).generate(prompts, 1, SamplingParams(ROOM, 0.0))

    async def what(trainer):
        greedy, others = await asyncio.gather(trainer.asked(prompts, 1, temperature=0.0), trainer.asked(prompts, 1))
        assert [answer.tokens for _, answer in greedy] == [r.response for r in theirs] and len(others) == 4
        for (_, answer), r in zip(greedy, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(r.logprobs), rtol=0, atol=1e-5)

    play(what, restore=False)


# --- new weights ------------------------------------------------------------------------------------------------------


def test_weights_over_gloo(running, mixed, play, nudged):
    """All of them, then the language model's alone, then the tower's; all again, in another group."""
    prompts, hf = make_prompts(mixed, running.processor), nudged()

    async def what(trainer):
        await trainer.asked(prompts)  # leaves keys and values, and features of images, of the old weights
        await trainer.join()
        await trainer.server.pause("wait")
        await trainer.sync(hf, "v1")
        await trainer.server.resume()
        pairs = await trainer.asked(prompts)
        check(hf, trainer, pairs, "v1")
        assert gaps(running.hf, trainer, *pairs[0]).max() > 1e-3
        other = nudged().state_dict()
        for label, tower in (("v2", False), ("v3", True)):
            with torch.no_grad():
                for name, p in hf.named_parameters():
                    if ("visual" in name) == tower:
                        p.copy_(other[name])
            await trainer.server.pause("abort")
            await trainer.sync(hf, label, lambda name, tower=tower: ("visual" in name) == tower)
            await trainer.server.resume()
            check(hf, trainer, await trainer.asked(prompts), label)
        await trainer.join()
        await trainer.server.pause("abort")
        with pytest.raises(ServerUnavailable, match="parameters were not sent, the first is"):
            await trainer.sync(running.hf, "v4", lambda name: "visual" in name)
        await trainer.sync(running.hf, "v4")
        await trainer.server.resume()
        check(running.hf, trainer, await trainer.asked(prompts), "v4")

    play(what)


def test_weights_from_disk(running, mixed, play, nudged, tmp_path):
    prompts, hf = make_prompts(mixed, running.processor), nudged()
    tensors = {name: p.detach().contiguous() for name, p in hf.named_parameters()}
    half = len(tensors) // 2
    for file, names in (("a.safetensors", list(tensors)[:half]), ("b.safetensors", list(tensors)[half:])):
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    save_file({"model.visual.nonsense": torch.zeros(3)}, tmp_path / "bad.safetensors")

    async def what(trainer):
        await trainer.server.init_weight_transfer("disk", None, 0)
        before = await trainer.server.checksums()
        await trainer.server.pause("abort")
        await trainer.server.start_weight_update()
        with pytest.raises(UserError, match="no such parameter: model.visual.nonsense"):
            await trainer.server.update_from_disk(tmp_path / "bad.safetensors")
        assert await trainer.server.checksums() == before
        await trainer.server.start_weight_update()  # what was given up is closed
        for file in ("a.safetensors", "b.safetensors"):
            await trainer.server.update_from_disk(tmp_path / file)
        await trainer.server.end_update("from disk")
        await trainer.server.resume()
        trainer.label = "from disk"
        check(hf, trainer, await trainer.asked(prompts), "from disk")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "bad.safetensors"]
        assert set(dict(read_safetensors(tmp_path / "a.safetensors"))) == set(list(tensors)[:half])  # as they were

    play(what)


def test_banned_ids_are_not_sampled_even_by_a_model_that_wants_them(running, mixed, play, nudged):
    prompts, hf, processor = make_prompts(mixed, running.processor), nudged(), running.processor
    direction = torch.randn(128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # whatever the hidden state, one of the two is far ahead
        hf.lm_head.weight[processor.image_token_id] = 100 * direction
        hf.lm_head.weight[447] = -100 * direction

    async def what(trainer):
        await trainer.join()
        await trainer.server.pause("abort")
        await trainer.sync(hf, "wants")
        await trainer.server.resume()
        for temperature in (0.0, 1.0):
            pairs = await trainer.asked(prompts, 4, temperature=temperature)
            sampled = set(itertools.chain.from_iterable(answer.tokens for _, answer in pairs))
            assert not sampled & set(processor.banned_token_ids(VOCAB).tolist())
            check(hf, trainer, pairs, "wants")

    play(what)


def test_a_name_that_is_unknown_leaves_weights_as_they_were(running, mixed, play, nudged):
    prompts = make_prompts(mixed[:2], running.processor)

    async def what(trainer):
        await trainer.join()
        before = await trainer.server.checksums()
        good = [(name, p.detach()) for name, p in nudged().named_parameters()]
        for name, told in (("model.visual.nonsense.weight", "has no such parameter"),
                           ("model.language_model.layers.0.mlp.experts.down_proj", "does not accept all")):  # fmt: skip
            await trainer.server.pause("abort")
            await trainer.server.start_weight_update()
            with pytest.raises(UserError, match=f"{told}.*: {name}"):
                await trainer.send([*good, (name, torch.ones(3))])
            await trainer.server.resume()
            assert await trainer.server.checksums() == before
        pairs = await trainer.asked(prompts)
        check(running.hf, trainer, pairs, pairs[0][1].labels[0])
        await trainer.server.start_weight_update()
        with pytest.raises(ServerUnavailable):  # of another shape: SGLang stops half-way
            await trainer.send([good[0], (good[1][0], torch.ones(3))])

    play(what)


def test_what_it_refuses(running, mixed, play):
    prompts = make_prompts(mixed[:2], running.processor)

    async def what(trainer):
        with pytest.raises(UserError, match="--sync gloo"):
            await trainer.server.limits("adapter")
        with pytest.raises(UserError, match="/generate answered 400"):
            await trainer.ask(prompts[0], room=1000)
        with pytest.raises(UserError, match="--top-p 0.9: .* before top-p"):
            await trainer.ask(prompts[0], top_p=0.9)

    play(what, restore=False)


# --- in the middle of responses ---------------------------------------------------------------------------------------


async def begun(trainer, prompts, room):
    """Responses of so many tokens that are being sampled; none ends before."""
    trainer.server.banned += trainer.processor.eos_ids
    tasks = [asyncio.create_task(trainer.ask(prompt, room=room)) for prompt in prompts]
    while not any(task.done() for task in tasks):
        await asyncio.sleep(0.05)
        [load] = (await trainer.server.request("GET", "/v1/loads"))["loads"]
        if load["num_running_reqs"] == len(tasks):
            await asyncio.sleep(0.2)
            break
    assert not any(task.done() for task in tasks), "they were to take longer"
    return tasks


def test_aborted_responses_go_on_under_new_weights(running, mixed, play, nudged):
    prompts, new = make_prompts(mixed, running.processor), nudged()

    async def what(trainer):
        await trainer.join()
        first = await trainer.asked(prompts, 1)
        old = first[0][1].labels[0]
        tasks = await begun(trainer, prompts, 250)
        started = time.perf_counter()
        await trainer.server.pause("abort")
        print(f"pause: {time.perf_counter() - started:.2f} s")
        parts = await asyncio.gather(*tasks)
        assert {part.finish_reason for part in parts} == {"abort"}
        await trainer.sync(new, "new")
        await trainer.server.resume()
        for prompt, part in zip(prompts, parts, strict=True):
            assert 0 < len(part.tokens) < 250 and part.labels == [old] * len(part.tokens)
            assert gaps(running.hf, trainer, prompt, part).max() <= 1e-5
            rest = await trainer.ask(prompt, part.tokens)
            assert rest.prompt_ids == prompt.token_ids + part.tokens
            assert rest.labels == ["new"] * len(rest.tokens)
            whole = rest._replace(tokens=part.tokens + rest.tokens, logprobs=part.logprobs + rest.logprobs)
            assert gaps(new, trainer, prompt, whole)[len(part.tokens) :].max() <= 1e-5

    play(what)


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_responses_that_are_kept_go_on_and_those_waited_for_end(mode, running, mixed, play, nudged):
    prompts, new = make_prompts(mixed, running.processor), nudged()

    async def what(trainer):
        await trainer.join()
        first = await trainer.asked(prompts, 1)
        old = first[0][1].labels[0]
        tasks = await begun(trainer, prompts, 200)
        await trainer.server.pause(mode)
        late = asyncio.create_task(trainer.ask(prompts[0]))
        await asyncio.sleep(0.3)
        assert await trainer.server.alive()  # while it is paused
        assert [task.done() for task in tasks] == [mode == "wait"] * 4 and not late.done()
        await trainer.sync(new, "new")
        await trainer.server.resume()
        answers = await asyncio.gather(*tasks)
        assert set((await late).labels) == {"new"}
        check(new, trainer, await trainer.asked(prompts), "new")  # nothing is gone on from
        for prompt, answer in zip(prompts, answers, strict=True):
            n = answer.labels.count(old)
            assert 0 < n <= len(answer.tokens) and answer.labels == [old] * n + ["new"] * (len(answer.tokens) - n)
            assert gaps(running.hf, trainer, prompt, answer)[:n].max() <= 1e-5
            assert mode == "keep" or n == len(answer.tokens)
        if mode == "keep":
            assert any("new" in answer.labels for answer in answers)

    play(what)


# --- ServerEngine -----------------------------------------------------------------------------------------------------


def engine_of(url, processor, folder, **more):
    return connected([url], processor, torch.float32, ONE, folder, vocab_size=VOCAB, trained_tower=True, **more)


@pytest.fixture
def engine(running, tmp_path):
    """engine(**settings): on the running server, whose weights are put back afterwards."""
    yield partial(engine_of, running.url, running.processor, tmp_path / "sync")
    engine_of(running.url, running.processor, tmp_path / "back").load_weights(named(running.hf))


def trainer_gaps(hf, processor, rollouts):
    """Of each rollout: |engine's log-probability - trainer's| of its tokens."""
    policy = M.Policy(hf, processor)
    return [(trainer_logprobs(policy, r) - torch.tensor(r.logprobs)).abs() for r in rollouts]


@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_log_probabilities_of_an_engine_are_the_trainers_after_every_sync(sync, engine, running, mixed, nudged):
    through, prompts, hf = engine(sync=sync), make_prompts(mixed, running.processor), nudged()
    for number, wanted in enumerate((None, None, lambda name: "q_proj" in name or "visual.merger" in name), 1):
        sent = named(nudged(), wanted or (lambda name: True))
        with torch.no_grad():
            for name, tensor in sent:
                hf.get_parameter(name).copy_(tensor)
        told = through.load_weights(sent)
        assert told["sync/bytes"] == sum(tensor.nbytes for _, tensor in sent)
        rollouts = through.generate(prompts, 3, SamplingParams(ROOM))
        assert max(map(torch.max, trainer_gaps(hf, running.processor, rollouts))) <= 1e-5
        assert max(map(torch.max, trainer_gaps(running.hf, running.processor, rollouts))) > 1e-3
        assert set(itertools.chain(*(r.versions for r in rollouts))) == {number}
        assert places(rollouts) == [(uid, i) for uid in ("one", "none", "two", "three") for i in range(3)]


def test_responses_of_an_engine_that_a_sync_aborts(engine, running, mixed, nudged):
    through, prompts = engine(in_flight="abort"), make_prompts(mixed, running.processor)
    weights = {1: running.hf, 2: nudged()}
    through.load_weights(named(weights[1]))
    rollouts = in_the_middle(
        through, prompts, 8, SamplingParams(200), lambda: through.load_weights(named(weights[2])), after=1.0)
    policies = {version: M.Policy(hf, running.processor) for version, hf in weights.items()}
    crossed = 0
    for r in rollouts:
        found = spans(r)
        crossed += len(found) == 2
        assert [version for version, *_ in found] in ([1], [2], [1, 2])
        for version, first, end in found:
            theirs = trainer_logprobs(policies[version], r)[first:end]
            assert (theirs - torch.tensor(r.logprobs[first:end])).abs().max() <= 1e-5
    print(f"{crossed} of {len(rollouts)} responses under two versions")
    assert crossed > 3 and {r.finish_reason for r in rollouts} <= {"stop", "length"}


def test_a_whole_asynchronous_run(engine, running, data, tmp_path):  # noqa: F811
    more = ["--rollout", "server", "--servers", running.url, "--async-steps", 1, "--steps", 4]
    done = run_command([sys.executable, "train.py", *flags(running.folder, data, tmp_path / "out", *more)])
    assert "self-test: " in done.stdout and "under new weights" in done.stdout
    steps = [row for row in rows(tmp_path / "out") if "async/staleness" in row]
    ages = [row["async/staleness_max"] for row in steps]
    # 0 later, too, if a sync came before the first token of the batch that was sampled ahead
    assert len(ages) == 4 and ages[0] == 0 and max(ages) == 1
    assert steps[0]["mismatch/max_abs_logprob_diff"] <= 1e-5 and all(row["sync/servers"] == 1 for row in steps)


# --- other families, and an end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_other_families_serve_and_are_lost_when_they_are_killed(family, toys, mixed, tmp_path):
    folder = toys(family)
    hf, processor = M.load_hf(str(folder)).eval(), M.Processor(str(folder))
    prompts = make_prompts(mixed, processor)

    async def what(url):
        async with httpx2.AsyncClient(trust_env=False) as http:
            trainer = Trainer(SimpleNamespace(url=url, processor=processor), http)
            assert await trainer.server.limits("disk") == (384, 1)
            pairs = await trainer.asked(prompts)
            check(hf, trainer, pairs, pairs[0][1].labels[0])
            with torch.no_grad():
                for p in hf.parameters():
                    p += 0.2 * p.std(unbiased=False) * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
            await trainer.join()
            await trainer.server.pause("abort")
            await trainer.sync(hf, "new")
            await trainer.server.resume()
            check(hf, trainer, await trainer.asked(prompts), "new")
            trainer.leave()

    with served(folder, tmp_path / "log") as (url, process):
        asyncio.run(what(url))
        engine = engine_of(url, processor, tmp_path)
        engine.load_weights(named(hf))
        sampling, errors = SamplingParams(250), []

        def sample():
            with pytest.raises(UserError) as caught:
                engine.generate(prompts, 2, sampling)
            errors.append(str(caught.value))

        in_the_middle(SimpleNamespace(generate=lambda *_: sample()), prompts, 2, sampling, partial(kill, process))
        told = rf"rollout servers: none is available \({url}: /generate: .*\); restart them, then repeat .*auto"
        assert re.fullmatch(told, errors[0])
        with pytest.raises(UserError, match=f"rollout servers: none accepted the new weights .{url}"):
            engine.load_weights(named(hf))


def test_names_are_the_checkpoints():
    assert checkpoint_name("model.visual.blocks.0.attn.qkv.weight") == "visual.blocks.0.attn.qkv.weight"
    assert checkpoint_name("model.language_model.norm.weight") == "model.norm.weight"
    assert checkpoint_name("lm_head.weight") == "lm_head.weight"
