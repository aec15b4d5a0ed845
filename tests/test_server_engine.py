"""ServerEngine on servers that are objects of this process: who is asked what, and what becomes of it when servers fail
or weights change.   pytest tests/test_server_engine.py    Real servers: test_servers.py, test_sglang.py
"""

import asyncio
import json
import math
import re
import shutil
import socket
import threading
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

import httpx2
import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from test_train import write_parquet

import engines.client
import engines.server
import engines.sync
import eval as evaluation
import model as M
from engines import local, serve
from engines.client import Calls, ConnectionLost, GenerateResult, ServerClient, ServerUnavailable
from engines.launch import RolloutServerConfig
from engines.server import ServerEngine
from engines.sglang_client import parse_response as parse_sglang_answer
from engines.sync import GroupSender, read_safetensors
from engines.vllm import llm_arguments
from engines.vllm_client import POLICY_MODEL_NAME, parse_completion
from errors import UserError
from model import ModelConfig
from rollout import Prompt, SamplingParams
from tasks.shapes import shapes_rows
from utils import DistContext, derive_seed, run_in_thread

URLS = ["http://one", "http://two", "http://three"]
PROCESSOR = SimpleNamespace(
    eos_ids=[0],
    banned_token_ids=lambda vocab_size: torch.tensor([99]),
    image_token_id=99,
    tokenizer=SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids))),
)
CPU = torch.device("cpu")
ROOM = 8


def token_of(seed, place):
    """The one that a fake server samples with this seed as so many-th token of an answer; no end token."""
    return 1 + derive_seed("token", seed, place) % 90


def logprob_of(token):
    return -token / 8


class Fake(ServerClient):
    """Samples a token every `delay` seconds, at most `slots` responses at a time; its weights come from files."""

    kind = "vllm"
    delay = 0.002
    slots = 1000
    longest = 64
    dead = False
    cuts = 0  # so many of the next requests
    silent = False  # no answer to /health
    fails = 0  # so many of the next updates
    noise = ""  # in its checksums
    on_token = staticmethod(lambda server: None)

    def __init__(self, *of):
        super().__init__(*of)
        self.label = ""
        self.paused = False
        self.epoch = 0  # grows with each abort
        self.asks, self.done, self.busy, self.sampled, self.cancelled = [], 0, 0, 0, 0
        self.holds, self.updates = {}, []  # its tensors; names of those that each update brought

    async def alive(self, seconds=5.0):
        return not self.dead and not self.silent

    async def limits(self, sync):
        return self.longest, 1

    async def generate(self, ask):
        self.asks.append(ask)
        if self.cuts:
            self.cuts -= 1
            raise ConnectionLost("it broke")
        epoch, tokens, labels = self.epoch, [], []
        try:
            while (self.paused or self.busy >= self.slots) and epoch == self.epoch:
                await asyncio.sleep(0.001)
            self.busy += 1
            try:
                while len(tokens) < ask.max_tokens and epoch == self.epoch:
                    await asyncio.sleep(self.delay)
                    if self.dead:
                        raise ServerUnavailable("gone")
                    if not self.paused and epoch == self.epoch:
                        tokens.append(token_of(ask.seed, len(tokens)))
                        labels.append(self.label)
                        self.sampled += 1
                        self.on_token(self)
            finally:
                self.busy -= 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.done += 1
        finish = "length" if len(tokens) == ask.max_tokens else "abort"
        return GenerateResult(list(ask.ids), tokens, [logprob_of(token) for token in tokens], finish, labels)

    async def pause(self, mode):
        self.paused = mode != "wait"
        self.epoch += mode == "abort"
        if mode != "keep":
            self.slots, slots = 0, self.slots  # those that wait for their turn go on waiting
            while self.busy:
                await asyncio.sleep(0.001)
            self.paused, self.slots = True, slots

    async def resume(self):
        self.paused = False

    async def init_weight_transfer(self, how, group, rank_offset):
        self.holds = {}

    async def start_weight_update(self):
        if self.fails:
            self.fails -= 1
            raise ServerUnavailable("no room for it")

    async def update_from_disk(self, file):
        new = dict(read_safetensors(file))
        self.holds |= new
        self.updates.append(sorted(new))

    async def end_update(self, label):
        self.label = label

    async def checksums(self):
        return {name: f"{tensor.sum().item()}{self.noise}" for name, tensor in self.holds.items()}


@pytest.fixture
def connect(monkeypatch, tmp_path):
    """connect(how many, **settings): an engine, and its servers, whose weights it has brought them."""

    async def find_kind(url, http):
        return "vllm"

    monkeypatch.setattr(engines.client, "detect_server_kind", find_kind)
    monkeypatch.setattr(engines.server, "CLIENTS", {"vllm": Fake})

    def make(n, rank=0, **more):
        in_flight = more.pop("in_flight", "abort")
        cfg = RolloutServerConfig(servers=tuple(URLS[:n]), sync="disk", in_flight=in_flight)
        more = {"vocab_size": 100, "max_model_len": 64} | more
        engine = ServerEngine(cfg, PROCESSOR, torch.float32, DistContext(rank, 1, CPU), out=tmp_path, **more)
        servers = list(engine.servers.values())
        if rank == 0:
            engine.load_weights(weights(1.0))
        else:  # whose weights process 0 brings
            engine.weights_label = f"{engine.run_id}-1"
            for server in servers:
                server.label = engine.weights_label
            engine.calls.loop.call_soon_threadsafe(engine.requests_allowed.set)
        return engine, servers

    return make


def weights(value, names="ab"):
    return [(name, torch.full((2,), value)) for name in names]


def prompts_of(*uids, images=()):
    return [Prompt(uid, [3, 5, 7], list(images), None, [3, 5, 7]) for uid in uids]


def seed_of(r, *more, seed=0):
    return derive_seed(seed, r.prompt.uid, r.sample_index, *more)


def assert_whole(rollouts, version=1, room=ROOM):
    """As if nothing had happened."""
    for r in rollouts:
        assert r.response == [token_of(seed_of(r), i) for i in range(room)]
        assert r.logprobs == [logprob_of(token) for token in r.response]
        assert r.response_mask == [True] * room and r.versions == [version] * room
        assert r.text == " ".join(map(str, r.response)) and r.ended_by == "response"


def wait_until(true, seconds=10.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def hurry(servers, delay=0.002):
    for server in servers:
        server.delay = delay


def at_token(n, do):
    """What a server calls with each token, for `do` to be called with the n-th one."""
    left = [n]

    def on_token(server):
        left[0] -= 1
        if left[0] == 0:
            do()

    return on_token


# --- who is asked -----------------------------------------------------------------------------------------------------


def test_a_group_goes_to_one_server_and_groups_to_the_one_with_the_fewest_in_flight(connect):
    engine, servers = connect(3)
    prompts = prompts_of(*"abcdef")
    rollouts = engine.generate(prompts, 4, SamplingParams(ROOM))
    assert [(r.prompt.uid, r.sample_index) for r in rollouts] == [(uid, i) for uid in "abcdef" for i in range(4)]
    assert_whole(rollouts)
    asked = [Counter(ask.uid for ask in server.asks) for server in servers]
    assert asked == [{"a": 4, "d": 4}, {"b": 4, "e": 4}, {"c": 4, "f": 4}]
    ask = servers[0].asks[0]
    assert (ask.ids, ask.images, ask.max_tokens, ask.temperature, ask.top_p) == ([3, 5, 7], [], ROOM, 1.0, 1.0)
    assert ask.seed == seed_of(rollouts[0]) and ask.cache_salt == engine.weights_label == f"{engine.run_id}-1"

    for server in servers:
        server.asks.clear()
    servers[0].delay = servers[2].delay = 0.5
    long = run_in_thread(lambda: engine.generate(prompts_of("x", "y", "z"), 2, SamplingParams(ROOM)), "long")
    wait_until(lambda: servers[1].done == 10)  # y's are over, x's and z's are not
    assert_whole(engine.generate(prompts_of("u"), 1, SamplingParams(ROOM)))
    assert [[ask.uid for ask in server.asks] for server in servers] == [["x"] * 2, ["y", "y", "u"], ["z"] * 2]
    hurry(servers)
    assert_whole(long.result())


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_processes_begin_with_different_servers(rank, connect):
    engine, servers = connect(3, rank)
    engine.generate(prompts_of("a"), 2, SamplingParams(2))
    assert [len(server.asks) for server in servers] == [2 * (i == rank % 3) for i in range(3)]


def test_two_threads_sample_at_once(connect):
    engine, servers = connect(2)
    both = threading.Barrier(2, timeout=10)
    hurry(servers, 0.5)

    def sample(uid):
        both.wait()
        return engine.generate(prompts_of(uid), 3, SamplingParams(ROOM))

    calls = [run_in_thread(partial(sample, uid), uid) for uid in "ab"]
    wait_until(lambda: [server.busy for server in servers] == [3, 3])
    hurry(servers)
    a, b = (call.result() for call in calls)
    assert_whole(a + b)
    assert {r.prompt.uid for r in a} == {"a"} and {r.prompt.uid for r in b} == {"b"}


def test_a_run_that_is_asked_to_end(connect):
    ended = threading.Event()
    engine, servers = connect(2, should_stop=ended.is_set)
    hurry(servers, 0.5)
    call = run_in_thread(partial(engine.generate, prompts_of("a", "b"), 3, SamplingParams(40)), "run")  # 20 seconds
    wait_until(lambda: servers[0].busy + servers[1].busy == 6)
    ended.set()
    assert not any(rollout.response for rollout in call.result(5.0))
    wait_until(lambda: servers[0].cancelled + servers[1].cancelled == 6)
    assert [server.in_flight for server in servers] == [0, 0] and not engine.pending and not engine.unavailable


def test_the_share_of_time_without_work(connect, monkeypatch):
    engine, servers = connect(2)
    clock = [100.0]
    monkeypatch.setattr(engines.server, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    engine.counted_at = engine.reported_at = clock[0]
    engine.idle_seconds = 0.0

    def tick(server):
        clock[0] += 1

    servers[0].on_token = tick
    clock[0] += 2  # both idle
    engine.generate(prompts_of("a"), 1, SamplingParams(ROOM))  # 8 s, at the first
    clock[0] += 4
    assert engine.metrics() == {"servers_idle": pytest.approx((2 + 8 / 2 + 4) / 14)}
    clock[0] += 1
    assert engine.metrics() == {"servers_idle": 1.0}


# --- servers that fail ------------------------------------------------------------------------------------------------


def test_what_a_server_that_is_lost_was_asked_is_asked_of_another_with_the_same_seeds(connect, capfd):
    engine, servers = connect(2)
    servers[0].on_token = at_token(13, lambda: setattr(servers[0], "dead", True))
    prompts = prompts_of(*"abcd")
    rollouts = engine.generate(prompts, 3, SamplingParams(ROOM))
    assert_whole(rollouts)
    assert set(engine.unavailable) == {URLS[0]} and engine.unavailable[URLS[0]] == "gone"
    assert Counter(ask.uid for ask in servers[0].asks) == {"a": 3, "c": 3}
    again = [ask for ask in servers[1].asks if ask.uid in "ac"]
    assert sorted(again) == sorted(servers[0].asks) and len(servers[1].asks) == 12
    told = f"rollout server {URLS[0]} is unavailable: gone; available servers: 1\n"
    assert capfd.readouterr().out.count(told) == 1  # six requests broke off
    assert_whole(engine.generate(prompts, 1, SamplingParams(ROOM)))
    assert len(servers[0].asks) == 6


def test_all_servers_are_lost(connect):
    engine, servers = connect(2)
    for server in servers:
        server.on_token = at_token(5, partial(setattr, server, "dead", True))
    with pytest.raises(UserError) as told:
        engine.generate(prompts_of(*"abcd"), 2, SamplingParams(ROOM))
    lost = sorted(f"{url}: gone" for url in URLS[:2])
    remedy = "restart them, then repeat the command; for train.py, add --resume auto"
    either = [f"rollout servers: none is available ({'; '.join(order)}); {remedy}"
              for order in (lost, lost[::-1])]  # fmt: skip
    assert str(told.value) in either
    with pytest.raises(UserError, match="^rollout servers: none accepted the new weights .*; restart them, [^\n]*$"):
        engine.load_weights(weights(2.0))
    assert engine.weights_version == 1


def test_where_no_server_is_left_a_run_is_asked_to_end(connect):
    """With all that it has: nothing is raised, neither where it samples nor where it brings weights."""
    asked = []
    engine, servers = connect(2, request_stop=asked.append, should_stop=lambda: bool(asked))
    for server in servers:
        server.on_token = at_token(5, partial(setattr, server, "dead", True))
    assert len(engine.generate(prompts_of(*"abcd"), 2, SamplingParams(ROOM))) == 8
    assert len(asked) == 1 and asked[0].startswith("rollout servers: none is available (")
    told, gathered = synced(engine, 2.0)
    assert engine.weights_version == 2 and told == {"sync/servers": 0.0} and not gathered
    for server in servers:
        server.dead = False
    synced(engine, 3.0)
    assert not engine.unavailable and all(server.updates[-1] == ["a", "b"] for server in servers)


@pytest.mark.parametrize("changed", [
    {"finish_reason": "abort", "tokens": [], "logprobs": [], "labels": []}, {"labels": "of weights to come"},
])  # fmt: skip
def test_a_server_whose_answers_hold_nothing_is_asked_ever_more_slowly_then_left_out(changed, connect, monkeypatch):
    """As one that another run has paused, or given weights of a later sync."""
    monkeypatch.setattr(engines.server, "INITIAL_PAUSE_SECONDS", 0.01)
    engine, servers = connect(2)
    generate, asked = servers[0].generate, Counter()

    async def other(ask):
        asked[ask.seed] += 1
        answer = (await generate(ask))._replace(**changed)
        return answer if changed.get("tokens") == [] else answer._replace(labels=[f"{engine.run_id}-9"] * ROOM)

    monkeypatch.setattr(servers[0], "generate", other)
    began = time.monotonic()
    assert_whole(engine.generate(prompts_of(*"ab"), 2, SamplingParams(ROOM)))
    assert list(engine.unavailable) == [URLS[0]]
    assert engine.unavailable[URLS[0]] == "6 replies in a row had no token from the newest weights"
    assert max(asked.values()) == 6 and time.monotonic() - began > 0.01 * (1 + 3 + 7 + 15 + 31)


@pytest.mark.parametrize("label", ["", "other-1", "run-x", "run-\u00b2", "run"])
def test_weights_that_this_run_did_not_send_are_not_sampled_from(label, connect):
    engine, servers = connect(2)
    servers[0].label = label.replace("run", engine.run_id)
    assert_whole(engine.generate(prompts_of(*"ab"), 2, SamplingParams(ROOM)))
    assert list(engine.unavailable) == [URLS[0]] and "which this run did not send" in engine.unavailable[URLS[0]]


@pytest.mark.parametrize(("changed", "told"), [
    ({"prompt_ids": [3, 5, 8]}, r"example 'a': .*\(http://one\), so the trained prompt would not be the sampled one"),
    ({"logprobs": [math.nan] * ROOM}, "example 'a': cannot sample: the log-probabilities from http://one are not fin"),
])  # fmt: skip
def test_answers_that_must_not_be_trained_on(changed, told, connect, monkeypatch):
    engine, [server] = connect(1)
    generate = server.generate

    async def other(ask):
        return (await generate(ask))._replace(**changed)

    monkeypatch.setattr(server, "generate", other)
    with pytest.raises(UserError, match=told):
        engine.generate(prompts_of("a"), 1, SamplingParams(ROOM))


@pytest.mark.parametrize("changed", [
    {"tokens": [1] * (ROOM + 1), "logprobs": [-1.0] * (ROOM + 1), "labels": ["x"] * (ROOM + 1)},
    {"logprobs": [-1.0]}, {"labels": ["x"]}, {"finish_reason": "gone"}, {"logprobs": [None] * ROOM},
    {"logprobs": [0.7] * ROOM}, {"tokens": [], "logprobs": [], "labels": []},
    {"tokens": [100] * ROOM}, {"tokens": [-1] * ROOM}, {"tokens": [99] * ROOM}, {"tokens": [5.0] * ROOM},
    {"tokens": [[5]] * ROOM},
])  # fmt: skip
def test_answers_that_are_none(changed, connect, monkeypatch):
    """Their server is lost; another one answers."""
    engine, servers = connect(2)
    generate = servers[0].generate

    async def other(ask):
        answer = await generate(ask)
        if "labels" in changed:
            changed["labels"] = [engine.weights_label] * len(changed["labels"])
        return answer._replace(**changed)

    monkeypatch.setattr(servers[0], "generate", other)
    assert_whole(engine.generate(prompts_of(*"ab"), 2, SamplingParams(ROOM)))
    assert list(engine.unavailable) == [URLS[0]] and "answered" in engine.unavailable[URLS[0]]


@pytest.mark.parametrize(("cuts", "lost"), [(1, []), (9, [URLS[0]])])
def test_a_connection_that_breaks_is_made_again_once(cuts, lost, connect):
    engine, servers = connect(2)
    servers[0].cuts = cuts
    assert_whole(engine.generate(prompts_of(*"ab"), 1, SamplingParams(ROOM)))
    assert list(engine.unavailable) == lost and len(servers[0].asks) == 2


def test_what_vllm_says_in_place_of_nan():
    """Its /inference/v1/generate answers NaN with -9999."""
    entries = [{"token_id": 5, "logprob": -9999.0}, {"token_id": 6, "logprob": -0.5}]
    spans = [{"version": "run-1", "start": 0, "end": 2}]
    choice = {"token_ids": [5, 6], "logprobs": {"content": entries}, "weight_versions": spans, "finish_reason": "stop"}
    answer = parse_completion({"prompt_token_ids": [1], "choices": [choice]}, "policy")
    assert math.isnan(answer.logprobs[0]) and answer.logprobs[1] == -0.5 and answer.labels == ["run-1"] * 2


def test_servers_that_do_not_suit(connect, monkeypatch):
    with pytest.raises(UserError, match="http://one accepts sequences of up to 64 tokens, but this run needs 65"):
        connect(2, max_model_len=65)
    monkeypatch.setattr(Fake, "noise", property(lambda server: server.url))
    with pytest.raises(UserError, match=f"{URLS[0]} and {URLS[1]} have different weights .*first in .'a'.; run them"):
        connect(2)

    async def find_kind(url, http):
        return "vllm" if url == URLS[0] else "sglang"

    monkeypatch.setattr(engines.client, "detect_server_kind", find_kind)
    with pytest.raises(UserError, match="must all be of one kind, but http://one is vllm, http://two is sglang"):
        connect(2)


def test_requests_that_fail():
    """Which of them are the server's fault, and which the question's."""

    def handle(request):
        status = int(request.url.path.strip("/"))
        return httpx2.Response(status, text="so\nit is")

    async def main():
        with socket.socket() as hung:  # takes connections, and says nothing
            hung.bind(("127.0.0.1", 0))
            hung.listen()
            url = f"http://127.0.0.1:{hung.getsockname()[1]}"
            async with httpx2.AsyncClient(trust_env=False) as http:
                server = ServerClient(url, http, 0.2, [], [])
                with pytest.raises(ServerUnavailable, match="^no answer to /generate within 0.2 s$"):
                    await server.post("/generate")
                assert not await server.alive()
        async with httpx2.AsyncClient(trust_env=False) as http:
            with pytest.raises(ServerUnavailable, match="^/generate: ConnectError"):
                await ServerClient(url, http, 5.0, [], []).post("/generate")
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(handle)) as http:
            server = ServerClient("http://one", http, 5.0, [], [])
            assert await server.post("/200") == "so\nit is"
            with pytest.raises(ServerUnavailable, match="^/503 answered 503: so it is$"):
                await server.post("/503")
            with pytest.raises(UserError, match="^--servers http://one: /400 answered 400: so it is$"):
                await server.post("/400")
            with pytest.raises(UserError, match="^--servers http://one has no endpoint /404; "):
                await server.post("/404")

    asyncio.run(main())


def test_an_answer_is_bounded_in_size_and_time(monkeypatch):
    monkeypatch.setattr(engines.client, "MAX_BODY_BYTES", 1000, raising=False)

    async def large():
        for _ in range(100):
            yield b'"' + b"x" * 99

    async def slow():
        for _ in range(100):
            yield b" "
            await asyncio.sleep(0.02)

    def handle(request):
        json_type = {"content-type": "application/json"}
        return httpx2.Response(200, headers=json_type, content=large() if "large" in request.url.path else slow())

    async def main():
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(handle)) as http:
            server = ServerClient("http://one", http, 0.2, [], [])
            with pytest.raises(ServerUnavailable, match="^/large answered with more than 1000 bytes$"):
                await server.post("/large")
            with pytest.raises(ServerUnavailable, match="^no answer to /slow within 0.2 s$"):
                await server.post("/slow")

    asyncio.run(main())


# --- new weights ------------------------------------------------------------------------------------------------------


def test_what_a_sync_aborts_goes_on_from_what_there_is(connect):
    engine, servers = connect(2)
    hurry(servers, 0.05)
    call = run_in_thread(lambda: engine.generate(prompts_of(*"abcd"), 2, SamplingParams(40, seed=5)), "sampled")
    wait_until(lambda: min(server.sampled for server in servers) >= 8)  # two of each response
    engine.load_weights(weights(2.0))
    hurry(servers)
    rollouts = call.result()
    for r in rollouts:
        k = r.versions.count(1)
        assert 0 < k < 40 and r.versions == [1] * k + [2] * (40 - k)
        before = [token_of(seed_of(r, seed=5), i) for i in range(k)]
        seed = seed_of(r, 1, k, seed=5)  # of the first turn, from token k on
        [server] = [server for server in servers if r.prompt.uid in {ask.uid for ask in server.asks}]
        asks = [ask for ask in server.asks if ask.seed in (seed_of(r, seed=5), seed)]
        assert r.response == before + [token_of(seed, i) for i in range(40 - k)]
        assert r.logprobs == [logprob_of(token) for token in r.response] and len(r.response_mask) == 40
        first, second = asks
        assert (first.ids, first.max_tokens, first.cache_salt) == ([3, 5, 7], 40, f"{engine.run_id}-1")
        assert (second.ids, second.max_tokens, second.cache_salt) == ([3, 5, 7] + before, 40 - k, f"{engine.run_id}-2")


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_that_had_not_begun_are_asked_again_under_the_new_weights(mode, connect):
    engine, [server] = connect(1, in_flight=mode)
    server.slots, server.delay = 1, 0.05
    call = run_in_thread(lambda: engine.generate(prompts_of("a"), 3, SamplingParams(20)), "sampled")
    wait_until(lambda: len(server.asks) == 3 and server.sampled >= 2)
    engine.load_weights(weights(2.0))
    hurry([server])
    first, *others = call.result()
    assert_whole(others, version=2, room=20)
    assert set(first.versions) == ({1, 2} if mode == "abort" else {1})
    for r in others:
        salts = [ask.cache_salt for ask in server.asks if ask.seed == seed_of(r)]
        assert salts == [f"{engine.run_id}-1", f"{engine.run_id}-2"]
    assert server.cancelled == (2 if mode == "wait" else 0) and server.in_flight == 0


def test_what_is_kept_goes_on_and_each_token_has_its_version(connect):
    engine, [server] = connect(1, in_flight="keep")
    server.delay = 0.05
    call = run_in_thread(lambda: engine.generate(prompts_of("a", "b"), 2, SamplingParams(20)), "sampled")
    wait_until(lambda: server.sampled >= 8)
    engine.load_weights(weights(2.0))
    hurry([server])
    rollouts = call.result()
    assert len(server.asks) == 4 and server.cancelled == 0
    for r in rollouts:
        k = r.versions.count(1)
        assert 0 < k < 20 and r.versions == [1] * k + [2] * (20 - k)
        assert r.response == [token_of(seed_of(r), i) for i in range(20)]


def test_features_of_images_outlive_a_sync_unless_the_tower_is_trained(connect):
    image = SimpleNamespace(key="pixels", n_tokens=1, image=None)
    for trained, expected in ((False, [1, 1]), (True, [1, 2])):
        engine, [server] = connect(1, trained_tower=trained)
        engine.generate(prompts_of("a", images=[image]), 1, SamplingParams(2))
        engine.load_weights(weights(2.0, "a"))
        engine.generate(prompts_of("a", images=[image]), 1, SamplingParams(2))
        assert [ask.images for ask in server.asks] == [[(f"pixels-{engine.run_id}-{i}", None)] for i in expected]


def synced(engine, value):
    """What sync says, and for which sets of weights it asked."""
    asked = []

    def given(trainable_only):
        asked.append("trained" if trainable_only else "all")
        return weights(value, "a" if trainable_only else "ab")

    return engine.sync(given), asked


def test_an_update_that_fails_on_one_server(connect, capfd):
    engine, (bad, good) = connect(2)
    told, asked = synced(engine, 2.0)
    assert asked == ["trained"] and told == {"sync/calls": 1.0, "sync/bytes": 8.0, "sync/servers": 2.0}
    assert bad.updates == good.updates == [["a", "b"], ["a"]]
    bad.fails = 1
    told, asked = synced(engine, 3.0)
    assert asked == ["trained", "all"] and told["sync/servers"] == 1.0
    assert engine.weights_version == 3 and good.label == engine.weights_label == f"{engine.run_id}-3"
    assert engine.unavailable == {URLS[0]: "weight sync failed: no room for it"}
    assert good.updates[-1] == ["a", "b"] and good.holds["a"].tolist() == good.holds["b"].tolist() == [3.0, 3.0]
    rollouts = engine.generate(prompts_of(*"abc"), 1, SamplingParams(ROOM))
    assert_whole(rollouts, version=3)
    assert not bad.asks
    told, asked = synced(engine, 4.0)  # and it is back
    assert asked == ["all"] and not engine.unavailable and engine.weights_version == 4 and told["sync/servers"] == 2.0
    assert bad.updates[-1] == good.updates[-1] == ["a", "b"] and bad.label == f"{engine.run_id}-4"
    out = capfd.readouterr().out
    assert out.count(f"rollout server {URLS[0]} is unavailable: weight sync failed") == 1
    assert out.count(f"rollout server {URLS[0]} is available again\n") == 1
    assert synced(engine, 5.0)[1] == ["trained"]


def test_a_server_that_failed_an_update_does_not_keep_what_it_was_at(connect):
    """With --in-flight keep it is paused, and nobody lets it go on."""
    engine, servers = connect(2, in_flight="keep")
    hurry(servers, 0.02)
    call = run_in_thread(lambda: engine.generate(prompts_of(*"ab"), 2, SamplingParams(ROOM)), "sampled")
    wait_until(lambda: min(server.sampled for server in servers) >= 2)
    servers[0].fails = 1
    synced(engine, 2.0)
    assert list(engine.unavailable) == [URLS[0]] and servers[0].paused
    rollouts = call.result(timeout=10)
    assert {r.prompt.uid for r in rollouts if set(r.versions) == {2}} == {"a"}
    assert all(len(r.response) == ROOM for r in rollouts)


class Member(ServerClient):
    """Of a transfer group whose `broadcast` takes as long as its slowest member, at most the group's wait_seconds."""

    kind = "vllm"
    does = "takes"  # refuses: at once; hangs: says nothing, for as long as one may
    up = True

    async def alive(self, seconds=5.0):
        return self.up

    async def update(self, metas, crc):
        if self.does == "refuses":
            raise ServerUnavailable("no")
        if self.does == "hangs":
            await asyncio.sleep(2.0)
        for _ in range(60):
            if self.all_take():
                return
            await asyncio.sleep(0.005)
        raise ServerUnavailable("timed out waiting for recv")

    async def start_weight_update(self):
        pass

    async def end_update(self, label):
        self.label = label


@pytest.mark.parametrize(("does", "up", "blamed"), [
    (("takes", "takes"), (True, True), {}),
    (("refuses", "takes"), (True, True), {"http://one": "no"}),
    (("takes", "hangs"), (True, True), {"http://two": "no answer during the weight sync"}),
    (("hangs", "takes"), (False, True), {"http://one": "no answer during the weight sync"}),
])  # fmt: skip
def test_who_is_to_blame_where_a_group_waits_for_one(does, up, blamed, monkeypatch):
    """Those that waited for it in vain fail as well, and must get the weights that are sent once more."""
    calls, servers = Calls(), [Member(url, None, 2.0, [], []) for url in URLS[:2]]
    for server, what, answers in zip(servers, does, up, strict=True):
        server.does, server.up = what, answers
        server.all_take = lambda: set(does) == {"takes"}

    def broadcast_tensors(group, backend, tensors):
        if set(does) != {"takes"}:
            time.sleep(0.3)
            raise RuntimeError("timed out waiting for send")

    monkeypatch.setattr(engines.sync, "broadcast_tensors", broadcast_tensors)
    monkeypatch.setattr(GroupSender, "wait_seconds", 0.3)
    sender = GroupSender("gloo", calls, 2.0, None, clients=servers)
    assert sender.sync_weights(weights(1.0), False, "run-2") == blamed
    calls.loop.call_soon_threadsafe(calls.loop.stop)


def test_a_full_disk_is_told_and_nothing_is_left(connect, tmp_path, monkeypatch):
    engine, _ = connect(1)

    def save(tensors, file):
        file.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(engines.sync, "save_file", save)
    with pytest.raises(UserError, match="^--sync disk: no space left for .*bytes free"):
        synced(engine, 2.0)
    assert not list((tmp_path / "sync").iterdir())


def test_a_server_that_comes_back_gets_all_weights(connect):
    engine, (one, two) = connect(2)
    one.dead = True
    assert synced(engine, 2.0)[1] == ["all"] and engine.unavailable == {URLS[0]: "no answer to /health"}
    assert synced(engine, 3.0)[1] == ["trained"]
    one.dead, one.label, one.holds = False, "", {}  # started again
    assert_whole(engine.generate(prompts_of(*"ab"), 2, SamplingParams(ROOM)), version=3)
    assert not one.asks  # not before it has this run's weights
    assert synced(engine, 4.0)[1] == ["all"] and not engine.unavailable
    assert one.holds.keys() == {"a", "b"} and one.holds["b"].tolist() == two.holds["b"].tolist() == [4.0, 4.0]
    assert_whole(engine.generate(prompts_of(*"ab"), 2, SamplingParams(ROOM)), version=4)
    assert len(one.asks) == len(two.asks) - 4 == 2


def test_processes_agree_on_which_servers_are_lost(connect, capfd):
    """A server that one process could not reach is out for all: its samples and another's would be of other weights."""
    engine, servers = connect(2)
    process0 = engine.ctx

    class OfTwo:  # what process 1 says of its lost servers stands next to what process 0 says
        rank, world, is_main = 0, 2, True

        def gather(self, mine):
            return [mine, {URLS[1]: "no answer"}] if isinstance(mine, dict) else [mine, mine]

    engine.ctx = OfTwo()
    servers[1].silent = True  # answers requests, but not /health
    assert synced(engine, 2.0)[1] == ["all"] and engine.unavailable == {URLS[1]: "no answer"}
    servers[1].silent = False
    synced(engine, 3.0)
    assert not engine.unavailable and f"rollout server {URLS[1]} is available again" in capfd.readouterr().out
    engine.ctx = process0
    assert_whole(engine.generate(prompts_of(*"ab"), 1, SamplingParams(ROOM)), version=3)


SUITS = {"servers": ("http://127.0.0.1:9",)}


@pytest.mark.parametrize(("settings", "of_model", "told"), [
    ({}, {}, "--rollout server needs --servers URL... or --serve N"),
    (SUITS | {"serve": 1}, {}, "--servers and --serve exclude each other; pass one"),
    ({"servers": ("127.0.0.1:8000",)}, {}, "--servers 127.0.0.1:8000: give http://HOST:PORT"),
    ({"servers": ("ftp://host:8000",)}, {}, "give http://HOST:PORT"),
    ({"servers": ("http://host:port",)}, {}, "give http://HOST:PORT"),
    ({"servers": ("http://host:99999",)}, {}, "give http://HOST:PORT"),
    ({"servers": ("http://host:8000/v1",)}, {}, "give http://HOST:PORT"),
    ({"servers": ("http://one:1", "http://one:1/")}, {}, "--servers http://one:1 is given twice; give each once"),
    (SUITS | {"sync": "adapter"}, {}, "--sync adapter needs an adapter; set --lora-rank above 0"),
    (SUITS | {"sync": "adapter"}, {"lora_rank": 8, "train_vision": "tower"}, "not those of --train-vision tower"),
    (SUITS | {"sync": "nccl"}, {}, "--sync nccl: there is no GPU here; use gloo"),
])  # fmt: skip
def test_settings_that_contradict_each_other(settings, of_model, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=re.escape(told)) as error:
        RolloutServerConfig(**settings).check("server", (), ModelConfig(model="m", **of_model))
    assert "\n" not in str(error.value)


def test_files_of_weights_are_gone_after_a_sync(connect, tmp_path):
    engine, servers = connect(2)
    synced(engine, 2.0)
    assert not list((tmp_path / "sync").iterdir())


# --- evaluation through servers ---------------------------------------------------------------------------------------


@pytest.fixture
def evaluate(toys, monkeypatch, tmp_path):
    """evaluate(flags) runs eval.main in this process, on rows without images; the servers that it used."""
    asked = "How many?"
    rows = [{"data_source": "mine", "prompt": [{"role": "user", "content": asked}], "images": [],
             "reward_model": {"style": "rule", "ground_truth": "1"}, "extra_info": {"uid": f"u{i}"}} for i in range(5)]
    data = write_parquet(tmp_path / "test.parquet", rows)
    (tmp_path / "mine.py").write_text("def score(response, example):\n    return len(response) % 2\n")
    made = []

    async def find_kind(url, http):
        return "vllm"

    class Held(Fake):
        longest = 64

        def __init__(self, *of):
            super().__init__(*of)
            made.append(self)

    monkeypatch.setattr(engines.client, "detect_server_kind", find_kind)
    monkeypatch.setattr(engines.server, "CLIENTS", {"vllm": Held})

    def go(*given, url="http://one:1"):
        made.clear()
        more = ["--data", data, "--reward", f"{tmp_path}/mine.py:score", "--reward-workers", 0, "--max-new-tokens", 6]
        more += ["--servers", url, "--sync", "disk"] if url else []
        cfg = evaluation.parse_args(list(map(str, [*given, *more, "--out", tmp_path / "e"])))
        try:
            return evaluation.main(cfg), made.copy()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return go


def test_an_evaluation_through_servers_brings_them_the_weights_of_each_model(evaluate, toys, tmp_path):
    model, other = toys["qwen2_5_vl"], tmp_path / "other"
    hf = M.load_hf(str(model))
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(0.25)
    hf.save_pretrained(other)
    for file in model.iterdir():
        if not (other / file.name).exists():
            shutil.copy(file, other)
    summary, (server, of_baseline) = evaluate(model, "--rollout", "server", "--baseline", other, "--samples", 2)
    sent = {name: p.detach() for name, p in M.load_hf(str(model)).named_parameters()}
    for holds, shift in ((server.holds, 0.0), (of_baseline.holds, 0.25)):
        assert holds.keys() == sent.keys()
        assert all(torch.equal(holds[name], sent[name] + shift) for name in sent)
    assert len(server.asks) == len(of_baseline.asks) == 10 and len({ask.uid for ask in server.asks}) == 5
    assert summary["n"] == 5 and "servers" not in summary["settings"] and len(summary["baselines"]) == 1
    told = json.loads((tmp_path / "e" / "predictions.jsonl").read_text().splitlines()[0])
    assert all(s["tokens"] == 6 for s in told["samples"])
    # through another server it is the same evaluation, which may be made again
    evaluate(model, "--rollout", "server", "--baseline", other, "--samples", 2, url="http://two:2")


def test_a_run_that_trained_on_servers_asks_for_them(evaluate, toys, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text("{}")
    args = {"model": str(toys["qwen2_5_vl"]), "rollout": "server", "servers": ["http://elsewhere:1"]}
    (tmp_path / "run" / "run.json").write_text(json.dumps({"args": args}))
    with pytest.raises(UserError, match="default for a run that trained with it.* --servers URL.*--rollout hf or vllm"):
        evaluate(tmp_path / "run", url=None)
    given = [str(tmp_path / "run"), "--data", "x", "--out", "y"]
    assert evaluation.parse_args([*given, "--servers", "http://one:1"]).rollout == "server"
    assert evaluation.parse_args([*given, "--rollout", "hf"]).rollout == "hf"
    with pytest.raises(UserError, match="--servers http://one:1.*: only for servers, but the engine is --rollout hf"):
        evaluate(toys["qwen2_5_vl"], "--rollout", "hf")


@pytest.mark.parametrize("start, end", [(0, 4 * 10**8), (0, 10**30), (5, 3), (0.5, 2), (None, 2)])
def test_a_version_for_more_tokens_than_there_are_costs_no_memory(start, end):
    span = {"version": "r-1", "start": start, "end": end}
    content = [{"token_id": token, "logprob": -1.0} for token in (5, 6)]
    choice = {"token_ids": [5, 6], "logprobs": {"content": content}, "weight_versions": [span], "finish_reason": "stop"}
    with pytest.raises((ServerUnavailable, TypeError)):
        parse_completion({"choices": [choice], "prompt_token_ids": [1]}, POLICY_MODEL_NAME)
    info = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 5], [-1.0, 6]], "weight_version": "r-1"}
    with pytest.raises((ServerUnavailable, TypeError)):
        parse_sglang_answer({"meta_info": info | {"weight_versions": [span]}, "output_ids": [5, 6]}, [6], None)


def test_an_answer_of_another_form_loses_its_server_alone(connect, capsys):
    engine, servers = connect(2)
    original = servers[1].generate

    async def odd(ask):
        return (await original(ask))._replace(prompt_ids=5)

    servers[1].generate = odd
    engine.generate(prompts_of("a", "b", "c", "d"), 2, SamplingParams(ROOM))
    assert f"{URLS[1]} is unavailable: its reply cannot be parsed: TypeError" in capsys.readouterr().out


def test_servers_take_their_gpus_from_those_that_are_visible(monkeypatch, tmp_path):
    """As torchrun's processes do; numbers from 0 would be other people's GPUs on a shared machine."""
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(local, "server_command", lambda *args: ([], {}))
    monkeypatch.setattr(local.LocalServers, "start", lambda self, command, env, log: taken.append([*env.values()]))
    monkeypatch.setattr(local.LocalServers, "wait_until_healthy", lambda self, urls: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def serve(n, **settings):
        taken.clear()
        local.launch_servers(n, "model", None, torch.bfloat16, settings, tmp_path)
        return taken

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert serve(2) == [["2"], ["3"]] and serve(1, tensor_parallel_size=2) == [["2,3"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,GPU-a1,GPU-b2")
    assert serve(2) == [["GPU-a1"], ["GPU-b2"]]
    with pytest.raises(UserError, match="2 trainer processes and 3 servers of 1 GPUs need 5 GPUs, but there are 4"):
        serve(3)


def test_a_gpu_computes_logits_in_float32_as_the_trainer_does(toys):
    processor = M.Processor(str(toys["qwen3_vl"]))
    for dtype, cuda, wanted in (("bfloat16", True, "float32"), ("bfloat16", False, None), ("float32", True, None)):
        given = llm_arguments(str(toys["qwen3_vl"]), processor, getattr(torch, dtype), cuda, {"max_model_len": 64})
        assert given.get("hf_overrides", {}).get("head_dtype") == wanted


def test_a_server_is_started_for_adapters_by_the_flags_of_training():
    _, model, *_, servers, _ = serve.parse_args("--model m --data d --sync adapter --lora-rank 8".split())
    assert (servers.sync, model.lora_rank) == ("adapter", 8)


def test_the_command_of_a_server_is_all_that_print_prints(toys, tmp_path, capsys):
    data = write_parquet(tmp_path / "data.parquet", shapes_rows(4, "train", 0))
    given = ["--model", str(toys["qwen2_5_vl"]), "--data", str(data), "--max-new-tokens", "8", "--print"]
    serve.main(serve.parse_args(given))
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and " serve " in out and "4 examples" in err
