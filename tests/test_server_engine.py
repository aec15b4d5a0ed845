"""ServerEngine on fake servers in this process: which server gets which request, and what happens when servers fail or
weights change.   pytest tests/test_server_engine.py    Real servers: test_servers.py, test_sglang.py
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
from conftest import wait_until
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
from engines.sglang_client import parse_response as parse_sglang_response
from engines.sync import GroupSender, read_safetensors
from engines.vllm import llm_arguments
from engines.vllm_client import POLICY_MODEL_NAME, parse_completion
from errors import UserError
from model import ImageInput, ModelConfig
from rollout import Prompt, SamplingParams
from tasks.shapes import shapes_rows
from utils import DistContext, derive_seed, run_in_thread

URLS = ["http://one", "http://two", "http://three"]
PROCESSOR = SimpleNamespace(
    opening="",
    eos_ids=[0],
    banned_token_ids=lambda vocab_size: torch.tensor([99]),
    image_token_id=99,
    merge_placeholders=list,
    tokenizer=SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids))),
)
CPU = torch.device("cpu")
N_NEW = 8  # new tokens per response


def fake_token(seed, position):
    """Return the token that a fake server samples with this seed at this position of a response; never an end token."""
    return 1 + derive_seed("token", seed, position) % 90


def fake_logprob(token):
    return -token / 8


class FakeServer(ServerClient):
    """A server that samples a token every `delay` seconds for each of at most `slots` responses, and reads its weights
    from files."""

    kind = "vllm"
    delay = 0.002
    slots = 1000
    max_length = 64
    dead = False
    lost_connections = 0  # this many of the next requests lose their connection
    silent = False  # does not answer /health
    failing_updates = 0  # this many of the next weight updates fail
    noise = ""  # appended to each checksum
    on_token = staticmethod(lambda server: None)

    def __init__(self, *args):
        super().__init__(*args)
        self.label = ""
        self.paused = False
        self.epoch = 0  # incremented by each abort
        self.requests, self.done, self.busy, self.sampled, self.cancelled = [], 0, 0, 0, 0
        self.tensors, self.updates = {}, []  # current weights; names of the tensors in each update

    async def alive(self, seconds=5.0):
        return not self.dead and not self.silent

    async def limits(self, sync):
        return self.max_length, 1

    async def generate(self, request):
        self.requests.append(request)
        if self.lost_connections:
            self.lost_connections -= 1
            raise ConnectionLost("it broke")
        epoch, tokens, labels = self.epoch, [], []
        try:
            while (self.paused or self.busy >= self.slots) and epoch == self.epoch:
                await asyncio.sleep(0.001)
            self.busy += 1
            try:
                while len(tokens) < request.max_tokens and epoch == self.epoch:
                    await asyncio.sleep(self.delay)
                    if self.dead:
                        raise ServerUnavailable("gone")
                    if not self.paused and epoch == self.epoch:
                        tokens.append(fake_token(request.seed, len(tokens)))
                        labels.append(self.label)
                        self.sampled += 1
                        self.on_token(self)
            finally:
                self.busy -= 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.done += 1
        finish = "length" if len(tokens) == request.max_tokens else "abort"
        return GenerateResult(list(request.ids), tokens, [fake_logprob(token) for token in tokens], finish, labels)

    async def pause(self, mode):
        self.paused = mode != "wait"
        self.epoch += mode == "abort"
        if mode != "keep":
            self.slots, slots = 0, self.slots  # requests that wait for a slot keep waiting
            while self.busy:
                await asyncio.sleep(0.001)
            self.paused, self.slots = True, slots

    async def resume(self):
        self.paused = False

    async def init_weight_transfer(self, how, group, rank_offset):
        self.tensors = {}

    async def start_weight_update(self):
        if self.failing_updates:
            self.failing_updates -= 1
            raise ServerUnavailable("no room for it")

    async def update_from_disk(self, file):
        new = dict(read_safetensors(file))
        self.tensors |= new
        self.updates.append(sorted(new))

    async def end_update(self, label):
        self.label = label

    async def checksums(self):
        return {name: f"{tensor.sum().item()}{self.noise}" for name, tensor in self.tensors.items()}


@pytest.fixture
def connect(monkeypatch, tmp_path):
    """connect(n, **settings): return an engine and its n servers, which already have the engine's weights."""

    async def find_kind(url, http):
        return "vllm"

    monkeypatch.setattr(engines.client, "detect_server_kind", find_kind)
    monkeypatch.setattr(engines.server, "CLIENTS", {"vllm": FakeServer})

    def make(n, rank=0, **settings):
        in_flight = settings.pop("in_flight", "abort")
        cfg = RolloutServerConfig(servers=tuple(URLS[:n]), sync="disk", in_flight=in_flight)
        settings = {"vocab_size": 100, "max_model_len": 64} | settings
        engine = ServerEngine(cfg, PROCESSOR, torch.float32, DistContext(rank, 1, CPU), out=tmp_path, **settings)
        servers = list(engine.servers.values())
        if rank == 0:
            engine.load_weights(weights(1.0))
        else:  # rank 0 sends the weights
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


def request_seed(r, *more, seed=0):
    return derive_seed(seed, r.prompt.uid, r.sample_index, *more)


def assert_complete(rollouts, version=1, max_tokens=N_NEW):
    """Assert that responses are complete, as if no server had failed and no sync had interrupted them."""
    for r in rollouts:
        assert r.response == [fake_token(request_seed(r), i) for i in range(max_tokens)]
        assert r.logprobs == [fake_logprob(token) for token in r.response]
        assert r.response_mask == [True] * max_tokens and r.versions == [version] * max_tokens
        assert r.text == " ".join(map(str, r.response)) and r.ended_by == "response"


def set_delay(servers, delay=0.002):
    for server in servers:
        server.delay = delay


def call_at_token(n, do):
    """Return an `on_token` callback that calls `do` at the n-th token."""
    remaining = [n]

    def on_token(server):
        remaining[0] -= 1
        if remaining[0] == 0:
            do()

    return on_token


# --- choice of the server ---------------------------------------------------------------------------------------------


def test_samples_of_a_prompt_go_to_the_one_server_with_the_fewest_in_flight(connect):
    engine, servers = connect(3)
    prompts = prompts_of(*"abcdef")
    rollouts = engine.generate(prompts, 4, SamplingParams(N_NEW))
    assert [(r.prompt.uid, r.sample_index) for r in rollouts] == [(uid, i) for uid in "abcdef" for i in range(4)]
    assert_complete(rollouts)
    samples_by_uid = [Counter(request.uid for request in server.requests) for server in servers]
    assert samples_by_uid == [{"a": 4, "d": 4}, {"b": 4, "e": 4}, {"c": 4, "f": 4}]
    request = servers[0].requests[0]
    assert (request.ids, request.images, request.max_tokens, request.temperature, request.top_p) == (
        [3, 5, 7], [], N_NEW, 1.0, 1.0
    )  # fmt: skip
    assert (
        request.seed == request_seed(rollouts[0])
        and request.cache_salt == engine.weights_label == f"{engine.run_id}-1"
    )

    for server in servers:
        server.requests.clear()
    servers[0].delay = servers[2].delay = 0.5
    slow_call = run_in_thread(lambda: engine.generate(prompts_of("x", "y", "z"), 2, SamplingParams(N_NEW)), "long")
    wait_until(lambda: servers[1].done == 10)  # y's responses are done, those of x and z are not
    assert_complete(engine.generate(prompts_of("u"), 1, SamplingParams(N_NEW)))
    assert [[request.uid for request in server.requests] for server in servers] == [
        ["x"] * 2, ["y", "y", "u"], ["z"] * 2
    ]  # fmt: skip
    set_delay(servers)
    assert_complete(slow_call.result())


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_ranks_start_with_different_servers(rank, connect):
    engine, servers = connect(3, rank)
    engine.generate(prompts_of("a"), 2, SamplingParams(2))
    assert [len(server.requests) for server in servers] == [2 * (i == rank % 3) for i in range(3)]


def test_two_threads_sample_at_once(connect):
    engine, servers = connect(2)
    both = threading.Barrier(2, timeout=120)
    set_delay(servers, 0.5)

    def sample(uid):
        both.wait()
        return engine.generate(prompts_of(uid), 3, SamplingParams(N_NEW))

    calls = [run_in_thread(partial(sample, uid), uid) for uid in "ab"]
    wait_until(lambda: [server.busy for server in servers] == [3, 3])
    set_delay(servers)
    a, b = (call.result() for call in calls)
    assert_complete(a + b)
    assert {r.prompt.uid for r in a} == {"a"} and {r.prompt.uid for r in b} == {"b"}


def test_a_stopped_run_cancels_its_requests(connect):
    stop_requested = threading.Event()
    engine, servers = connect(2, should_stop=stop_requested.is_set)
    set_delay(servers, 0.5)
    call = run_in_thread(partial(engine.generate, prompts_of("a", "b"), 3, SamplingParams(40)), "run")  # takes 20 s
    wait_until(lambda: servers[0].busy + servers[1].busy == 6)
    stop_requested.set()
    assert not any(rollout.response for rollout in call.result(120))
    wait_until(lambda: servers[0].cancelled + servers[1].cancelled == 6)
    assert [server.in_flight for server in servers] == [0, 0] and not engine.pending and not engine.unavailable


def test_servers_idle_is_the_fraction_of_time_without_work(connect, monkeypatch):
    engine, servers = connect(2)
    clock = [100.0]
    monkeypatch.setattr(engines.server, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    engine.counted_at = engine.reported_at = clock[0]
    engine.idle_seconds = 0.0

    def tick(server):
        clock[0] += 1

    servers[0].on_token = tick
    clock[0] += 2  # both servers are idle
    engine.generate(prompts_of("a"), 1, SamplingParams(N_NEW))  # 8 s on the first server
    clock[0] += 4
    assert engine.metrics() == {"servers_idle": pytest.approx((2 + 8 / 2 + 4) / 14)}
    clock[0] += 1
    assert engine.metrics() == {"servers_idle": 1.0}


# --- servers that fail ------------------------------------------------------------------------------------------------


def test_requests_of_a_lost_server_are_sent_to_another_with_the_same_seeds(connect, capfd):
    engine, servers = connect(2)
    servers[0].on_token = call_at_token(13, lambda: setattr(servers[0], "dead", True))
    prompts = prompts_of(*"abcd")
    rollouts = engine.generate(prompts, 3, SamplingParams(N_NEW))
    assert_complete(rollouts)
    assert set(engine.unavailable) == {URLS[0]} and engine.unavailable[URLS[0]] == "gone"
    assert Counter(request.uid for request in servers[0].requests) == {"a": 3, "c": 3}
    resent = [request for request in servers[1].requests if request.uid in "ac"]
    assert sorted(resent) == sorted(servers[0].requests) and len(servers[1].requests) == 12
    message = f"rollout server {URLS[0]} is unavailable: gone; available servers: 1\n"
    assert capfd.readouterr().out.count(message) == 1  # printed once, although six requests failed
    assert_complete(engine.generate(prompts, 1, SamplingParams(N_NEW)))
    assert len(servers[0].requests) == 6


def test_losing_all_servers_is_an_error(connect):
    engine, servers = connect(2)
    for server in servers:
        server.on_token = call_at_token(5, partial(setattr, server, "dead", True))
    with pytest.raises(UserError) as error:
        engine.generate(prompts_of(*"abcd"), 2, SamplingParams(N_NEW))
    reasons = sorted(f"{url}: gone" for url in URLS[:2])
    remedy = "restart them, then repeat the command; for train.py, add --resume auto"
    messages = [f"rollout servers: none is available ({'; '.join(order)}); {remedy}"
              for order in (reasons, reasons[::-1])]  # fmt: skip
    assert str(error.value) in messages
    with pytest.raises(UserError, match="^rollout servers: none accepted the new weights .*; restart them, [^\n]*$"):
        engine.load_weights(weights(2.0))
    assert engine.weights_version == 1


def test_losing_all_servers_requests_a_stop(connect):
    """With `request_stop`, neither sampling nor a weight sync raises; the run can save what it has."""
    stop_messages = []
    engine, servers = connect(2, request_stop=stop_messages.append, should_stop=lambda: bool(stop_messages))
    for server in servers:
        server.on_token = call_at_token(5, partial(setattr, server, "dead", True))
    assert len(engine.generate(prompts_of(*"abcd"), 2, SamplingParams(N_NEW))) == 8
    assert len(stop_messages) == 1 and stop_messages[0].startswith("rollout servers: none is available (")
    metrics, requested = run_sync(engine, 2.0)
    assert engine.weights_version == 2 and metrics == {"sync/servers": 0.0} and not requested
    for server in servers:
        server.dead = False
    run_sync(engine, 3.0)
    assert not engine.unavailable and all(server.updates[-1] == ["a", "b"] for server in servers)


@pytest.mark.parametrize("changed", [
    {"finish_reason": "abort", "tokens": [], "logprobs": [], "labels": []}, {"labels": "of a later sync"},
])  # fmt: skip
def test_a_server_without_usable_tokens_is_retried_ever_more_slowly_then_given_up(changed, connect, monkeypatch):
    """Such a server was paused by another run, or has the weights of a later sync."""
    monkeypatch.setattr(engines.server, "INITIAL_PAUSE_SECONDS", 0.01)
    engine, servers = connect(2)
    original, n_requests = servers[0].generate, Counter()

    async def generate_unusable(request):
        n_requests[request.seed] += 1
        result = (await original(request))._replace(**changed)
        return result if changed.get("tokens") == [] else result._replace(labels=[f"{engine.run_id}-9"] * N_NEW)

    monkeypatch.setattr(servers[0], "generate", generate_unusable)
    start = time.monotonic()
    assert_complete(engine.generate(prompts_of(*"ab"), 2, SamplingParams(N_NEW)))
    assert list(engine.unavailable) == [URLS[0]]
    assert engine.unavailable[URLS[0]] == "6 replies in a row had no token from the newest weights"
    assert max(n_requests.values()) == 6 and time.monotonic() - start > 0.01 * (1 + 3 + 7 + 15 + 31)


@pytest.mark.parametrize("label", ["", "other-1", "run-x", "run-\u00b2", "run"])
def test_weights_that_this_run_did_not_send_are_not_sampled_from(label, connect):
    engine, servers = connect(2)
    servers[0].label = label.replace("run", engine.run_id)
    assert_complete(engine.generate(prompts_of(*"ab"), 2, SamplingParams(N_NEW)))
    assert list(engine.unavailable) == [URLS[0]] and "which this run did not send" in engine.unavailable[URLS[0]]


@pytest.mark.parametrize(("changed", "message"), [
    ({"prompt_ids": [3, 5, 8]}, r"example 'a': .*\(http://one\), so the trained prompt would not be the sampled one"),
    ({"logprobs": [math.nan] * N_NEW}, "example 'a': cannot sample: the log-probabilities from http://one are not fin"),
])  # fmt: skip
def test_results_that_must_not_be_trained_on_are_an_error(changed, message, connect, monkeypatch):
    engine, [server] = connect(1)
    original = server.generate

    async def generate_changed(request):
        return (await original(request))._replace(**changed)

    monkeypatch.setattr(server, "generate", generate_changed)
    with pytest.raises(UserError, match=message):
        engine.generate(prompts_of("a"), 1, SamplingParams(N_NEW))


@pytest.mark.parametrize("changed", [
    {"tokens": [1] * (N_NEW + 1), "logprobs": [-1.0] * (N_NEW + 1), "labels": ["x"] * (N_NEW + 1)},
    {"logprobs": [-1.0]}, {"labels": ["x"]}, {"finish_reason": "gone"}, {"logprobs": [None] * N_NEW},
    {"logprobs": [0.7] * N_NEW}, {"tokens": [], "logprobs": [], "labels": []},
    {"tokens": [100] * N_NEW}, {"tokens": [-1] * N_NEW}, {"tokens": [99] * N_NEW}, {"tokens": [5.0] * N_NEW},
    {"tokens": [[5]] * N_NEW},
])  # fmt: skip
def test_invalid_results_make_their_server_unavailable(changed, connect, monkeypatch):
    """Their server becomes unavailable, and another one samples instead."""
    engine, servers = connect(2)
    original = servers[0].generate

    async def generate_changed(request):
        result = await original(request)
        if "labels" in changed:
            changed["labels"] = [engine.weights_label] * len(changed["labels"])
        return result._replace(**changed)

    monkeypatch.setattr(servers[0], "generate", generate_changed)
    assert_complete(engine.generate(prompts_of(*"ab"), 2, SamplingParams(N_NEW)))
    assert list(engine.unavailable) == [URLS[0]] and "answered" in engine.unavailable[URLS[0]]


@pytest.mark.parametrize(("lost_connections", "unavailable"), [(1, []), (9, [URLS[0]])])
def test_a_lost_connection_is_retried_once(lost_connections, unavailable, connect):
    engine, servers = connect(2)
    servers[0].lost_connections = lost_connections
    assert_complete(engine.generate(prompts_of(*"ab"), 1, SamplingParams(N_NEW)))
    assert list(engine.unavailable) == unavailable and len(servers[0].requests) == 2


def test_vllms_replacement_for_nan_is_read_as_nan():
    """vLLM's /inference/v1/generate returns -9999 in place of NaN."""
    entries = [{"token_id": 5, "logprob": -9999.0}, {"token_id": 6, "logprob": -0.5}]
    spans = [{"version": "run-1", "start": 0, "end": 2}]
    choice = {"token_ids": [5, 6], "logprobs": {"content": entries}, "weight_versions": spans, "finish_reason": "stop"}
    result = parse_completion({"prompt_token_ids": [1], "choices": [choice]}, "policy")
    assert math.isnan(result.logprobs[0]) and result.logprobs[1] == -0.5 and result.labels == ["run-1"] * 2


def test_unsuitable_servers_are_refused(connect, monkeypatch):
    with pytest.raises(UserError, match="http://one accepts sequences of up to 64 tokens, but this run needs 65"):
        connect(2, max_model_len=65)
    monkeypatch.setattr(FakeServer, "noise", property(lambda server: server.url))
    with pytest.raises(UserError, match=f"{URLS[0]} and {URLS[1]} have different weights .*first in .'a'.; run them"):
        connect(2)

    async def find_kind(url, http):
        return "vllm" if url == URLS[0] else "sglang"

    monkeypatch.setattr(engines.client, "detect_server_kind", find_kind)
    with pytest.raises(UserError, match="must all be of one kind, but http://one is vllm, http://two is sglang"):
        connect(2)


def test_failed_requests_blame_the_server_or_the_request():
    """Timeouts, lost connections and status 5xx are the server's fault; status 4xx is the request's."""

    def handle(request):
        status = int(request.url.path.strip("/"))
        return httpx2.Response(status, text="so\nit is")

    async def main():
        with socket.socket() as hung:  # accepts connections but never answers
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


def test_an_http_response_is_bounded_in_size_and_time(monkeypatch):
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


# --- weight sync ------------------------------------------------------------------------------------------------------


def test_aborted_responses_continue_after_their_last_token(connect):
    engine, servers = connect(2)
    set_delay(servers, 0.05)
    call = run_in_thread(lambda: engine.generate(prompts_of(*"abcd"), 2, SamplingParams(40, seed=5)), "sampled")
    wait_until(lambda: min(server.sampled for server in servers) >= 8)  # two tokens of each response
    engine.load_weights(weights(2.0))
    set_delay(servers)
    rollouts = call.result()
    for r in rollouts:
        k = r.versions.count(1)
        assert 0 < k < 40 and r.versions == [1] * k + [2] * (40 - k)
        before = [fake_token(request_seed(r, seed=5), i) for i in range(k)]
        seed = request_seed(r, 1, k, seed=5)  # seed of the continuation: turn 1, from token k on
        [server] = [server for server in servers if r.prompt.uid in {request.uid for request in server.requests}]
        requests = [request for request in server.requests if request.seed in (request_seed(r, seed=5), seed)]
        assert r.response == before + [fake_token(seed, i) for i in range(40 - k)]
        assert r.logprobs == [fake_logprob(token) for token in r.response] and len(r.response_mask) == 40
        first, second = requests
        assert (first.ids, first.max_tokens, first.cache_salt) == ([3, 5, 7], 40, f"{engine.run_id}-1")
        assert (second.ids, second.max_tokens, second.cache_salt) == ([3, 5, 7] + before, 40 - k, f"{engine.run_id}-2")


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_that_had_not_begun_are_sent_again_for_the_new_weights(mode, connect):
    engine, [server] = connect(1, in_flight=mode)
    server.slots, server.delay = 1, 0.05
    call = run_in_thread(lambda: engine.generate(prompts_of("a"), 3, SamplingParams(20)), "sampled")
    wait_until(lambda: len(server.requests) == 3 and server.sampled >= 2)
    engine.load_weights(weights(2.0))
    set_delay([server])
    first, *others = call.result()
    assert_complete(others, version=2, max_tokens=20)
    assert set(first.versions) == ({1, 2} if mode == "abort" else {1})
    for r in others:
        salts = [request.cache_salt for request in server.requests if request.seed == request_seed(r)]
        assert salts == [f"{engine.run_id}-1", f"{engine.run_id}-2"]
    assert server.cancelled == (2 if mode == "wait" else 0) and server.in_flight == 0


def test_kept_requests_continue_and_each_token_has_its_version(connect):
    engine, [server] = connect(1, in_flight="keep")
    server.delay = 0.05
    call = run_in_thread(lambda: engine.generate(prompts_of("a", "b"), 2, SamplingParams(20)), "sampled")
    wait_until(lambda: server.sampled >= 8)
    engine.load_weights(weights(2.0))
    set_delay([server])
    rollouts = call.result()
    assert len(server.requests) == 4 and server.cancelled == 0
    for r in rollouts:
        k = r.versions.count(1)
        assert 0 < k < 20 and r.versions == [1] * k + [2] * (20 - k)
        assert r.response == [fake_token(request_seed(r), i) for i in range(20)]


def test_cached_image_features_survive_a_sync_unless_the_tower_is_trained(connect):
    image = ImageInput("pixels", None, (1, 2, 2), 1, None)
    for trained, expected in ((False, [1, 1]), (True, [1, 2])):
        engine, [server] = connect(1, trained_tower=trained)
        engine.generate(prompts_of("a", images=[image]), 1, SamplingParams(2))
        engine.load_weights(weights(2.0, "a"))
        engine.generate(prompts_of("a", images=[image]), 1, SamplingParams(2))
        keys = [[image.key for image in request.images] for request in server.requests]
        assert keys == [[f"pixels-{engine.run_id}-{i}"] for i in expected]


def run_sync(engine, value):
    """Sync weights. Return the metrics, and which sets of weights the engine requested."""
    requested = []

    def get_weights(trainable_only):
        requested.append("trained" if trainable_only else "all")
        return weights(value, "a" if trainable_only else "ab")

    return engine.sync(get_weights), requested


def test_an_update_that_fails_on_one_server(connect, capfd):
    engine, (bad, good) = connect(2)
    metrics, requested = run_sync(engine, 2.0)
    assert requested == ["trained"] and metrics == {"sync/calls": 1.0, "sync/bytes": 8.0, "sync/servers": 2.0}
    assert bad.updates == good.updates == [["a", "b"], ["a"]]
    assert engine.sync(None, changed=False) == dict.fromkeys(metrics, 0.0) and engine.weights_version == 2
    bad.failing_updates = 1
    metrics, requested = run_sync(engine, 3.0)
    assert requested == ["trained", "all"] and metrics["sync/servers"] == 1.0
    assert engine.weights_version == 3 and good.label == engine.weights_label == f"{engine.run_id}-3"
    assert engine.unavailable == {URLS[0]: "weight sync failed: no room for it"}
    assert good.updates[-1] == ["a", "b"] and good.tensors["a"].tolist() == good.tensors["b"].tolist() == [3.0, 3.0]
    rollouts = engine.generate(prompts_of(*"abc"), 1, SamplingParams(N_NEW))
    assert_complete(rollouts, version=3)
    assert not bad.requests
    metrics, requested = run_sync(engine, 4.0)  # it is available again
    assert (
        requested == ["all"]
        and not engine.unavailable
        and engine.weights_version == 4
        and metrics["sync/servers"] == 2.0
    )
    assert bad.updates[-1] == good.updates[-1] == ["a", "b"] and bad.label == f"{engine.run_id}-4"
    out = capfd.readouterr().out
    assert out.count(f"rollout server {URLS[0]} is unavailable: weight sync failed") == 1
    assert out.count(f"rollout server {URLS[0]} is available again\n") == 1
    assert run_sync(engine, 5.0)[1] == ["trained"]


def test_requests_of_a_server_that_failed_an_update_are_sent_elsewhere(connect):
    """With --in-flight keep it stays paused, so its requests would never finish."""
    engine, servers = connect(2, in_flight="keep")
    set_delay(servers, 0.02)
    call = run_in_thread(lambda: engine.generate(prompts_of(*"ab"), 2, SamplingParams(N_NEW)), "sampled")
    wait_until(lambda: min(server.sampled for server in servers) >= 2)
    servers[0].failing_updates = 1
    run_sync(engine, 2.0)
    assert list(engine.unavailable) == [URLS[0]] and servers[0].paused
    rollouts = call.result(timeout=120)
    assert {r.prompt.uid for r in rollouts if set(r.versions) == {2}} == {"a"}
    assert all(len(r.response) == N_NEW for r in rollouts)


class GroupMember(ServerClient):
    """A member of a transfer group, in which a broadcast takes as long as the slowest member, at most the group's
    wait_seconds."""

    kind = "vllm"
    behaviour = "takes"  # or "refuses": fails at once; or "hangs": never answers
    up = True

    async def alive(self, seconds=5.0):
        return self.up

    async def update(self, metas, crc):
        if self.behaviour == "refuses":
            raise ServerUnavailable("no")
        if self.behaviour == "hangs":
            await asyncio.sleep(60.0)
        for _ in range(60):
            if self.all_receive():
                return
            await asyncio.sleep(0.005)
        raise ServerUnavailable("timed out waiting for recv")

    async def start_weight_update(self):
        pass

    async def end_update(self, label):
        self.label = label


@pytest.mark.parametrize(("behaviours", "up", "blamed"), [
    (("takes", "takes"), (True, True), {}),
    (("refuses", "takes"), (True, True), {"http://one": "no"}),
    (("takes", "hangs"), (True, True), {"http://two": "no answer during the weight sync"}),
    (("hangs", "takes"), (False, True), {"http://one": "no answer during the weight sync"}),
])  # fmt: skip
def test_a_failed_broadcast_is_blamed_on_the_member_that_caused_it(behaviours, up, blamed, monkeypatch):
    """Members that waited for it fail too, but are not blamed, so they get the weights when these are sent again."""
    calls, servers = Calls(), [GroupMember(url, None, 2.0, [], []) for url in URLS[:2]]
    for server, behaviour, is_up in zip(servers, behaviours, up, strict=True):
        server.behaviour, server.up = behaviour, is_up
        server.all_receive = lambda: set(behaviours) == {"takes"}

    def broadcast_tensors(group, backend, tensors):
        if set(behaviours) != {"takes"}:
            time.sleep(0.3)
            raise RuntimeError("timed out waiting for send")

    monkeypatch.setattr(engines.sync, "broadcast_tensors", broadcast_tensors)
    monkeypatch.setattr(GroupSender, "wait_seconds", 3.0)
    sender = GroupSender("gloo", calls, 2.0, None, clients=servers)
    assert sender.sync_weights(weights(1.0), False, "run-2") == blamed
    calls.loop.call_soon_threadsafe(calls.loop.stop)


def test_a_full_disk_is_reported_and_leaves_no_files(connect, tmp_path, monkeypatch):
    engine, _ = connect(1)

    def save(tensors, file):
        file.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(engines.sync, "save_file", save)
    with pytest.raises(UserError, match="^--sync disk: no space left for .*GB free"):
        run_sync(engine, 2.0)
    assert not list((tmp_path / "sync").iterdir())


def test_a_server_that_comes_back_gets_all_weights(connect):
    engine, (first, second) = connect(2)
    first.dead = True
    assert run_sync(engine, 2.0)[1] == ["all"] and engine.unavailable == {URLS[0]: "no answer to /health"}
    assert run_sync(engine, 3.0)[1] == ["trained"]
    first.dead, first.label, first.tensors = False, "", {}  # restarted
    assert_complete(engine.generate(prompts_of(*"ab"), 2, SamplingParams(N_NEW)), version=3)
    assert not first.requests  # not before it has this run's weights
    assert run_sync(engine, 4.0)[1] == ["all"] and not engine.unavailable
    assert (
        first.tensors.keys() == {"a", "b"}
        and first.tensors["b"].tolist() == second.tensors["b"].tolist() == [4.0, 4.0]
    )
    assert_complete(engine.generate(prompts_of(*"ab"), 2, SamplingParams(N_NEW)), version=4)
    assert len(first.requests) == len(second.requests) - 4 == 2


def test_ranks_agree_on_which_servers_are_unavailable(connect, capfd):
    """A server that one rank could not reach is unavailable to all ranks, else ranks would sample from different
    weights."""
    engine, servers = connect(2)
    original_ctx = engine.ctx

    class TwoRanks:  # a context of two ranks, in which rank 1 has lost the second server
        rank, world, is_main = 0, 2, True

        def gather(self, mine):
            return [mine, {URLS[1]: "no answer"}] if isinstance(mine, dict) else [mine, mine]

    engine.ctx = TwoRanks()
    servers[1].silent = True  # answers requests, but not /health
    assert run_sync(engine, 2.0)[1] == ["all"] and engine.unavailable == {URLS[1]: "no answer"}
    servers[1].silent = False
    run_sync(engine, 3.0)
    assert not engine.unavailable and f"rollout server {URLS[1]} is available again" in capfd.readouterr().out
    engine.ctx = original_ctx
    assert_complete(engine.generate(prompts_of(*"ab"), 1, SamplingParams(N_NEW)), version=3)


SERVERS = {"servers": ("http://127.0.0.1:9",)}


@pytest.mark.parametrize(("settings", "model_settings", "message"), [
    ({}, {}, "--rollout server needs --servers URL... or --serve N"),
    (SERVERS | {"serve": 1}, {}, "--servers and --serve exclude each other; pass one"),
    ({"servers": ("127.0.0.1:8000",)}, {}, "--servers 127.0.0.1:8000: give http://HOST:PORT"),
    ({"servers": ("ftp://host:8000",)}, {}, "give http://HOST:PORT"),
    ({"servers": ("http://host:port",)}, {}, "give http://HOST:PORT"),
    ({"servers": ("http://host:99999",)}, {}, "give http://HOST:PORT"),
    ({"servers": ("http://host:8000/v1",)}, {}, "give http://HOST:PORT"),
    ({"servers": ("http://one:1", "http://one:1/")}, {}, "--servers http://one:1 is given twice; give each once"),
    (SERVERS | {"sync": "adapter"}, {}, "--sync adapter needs an adapter; set --lora-rank above 0"),
    (SERVERS | {"sync": "adapter"}, {"lora_rank": 8, "train_vision": "tower"}, "not those of --train-vision tower"),
    (SERVERS | {"sync": "nccl"}, {}, "--sync nccl: there is no GPU here; use gloo"),
])  # fmt: skip
def test_contradictory_settings_are_refused(settings, model_settings, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        RolloutServerConfig(**settings).check("server", (), ModelConfig(model="m", **model_settings))
    assert "\n" not in str(error.value)


def test_weight_files_are_removed_after_a_sync(connect, tmp_path):
    engine, servers = connect(2)
    run_sync(engine, 2.0)
    assert not list((tmp_path / "sync").iterdir())


# --- evaluation through servers ---------------------------------------------------------------------------------------


@pytest.fixture
def evaluate(toys, monkeypatch, tmp_path):
    """evaluate(*flags): run eval.main in this process on rows without images. Return the summary and the servers
    that it used."""
    question = "How many?"
    rows = [{"data_source": "mine", "prompt": [{"role": "user", "content": question}], "images": [],
             "reward_model": {"style": "rule", "ground_truth": "1"}, "extra_info": {"uid": f"u{i}"}} for i in range(5)]
    data = write_parquet(tmp_path / "test.parquet", rows)
    (tmp_path / "mine.py").write_text("def score(response, example):\n    return len(response) % 2\n")
    servers_used = []

    async def find_kind(url, http):
        return "vllm"

    class RecordedServer(FakeServer):
        max_length = 64

        def __init__(self, *args):
            super().__init__(*args)
            servers_used.append(self)

    monkeypatch.setattr(engines.client, "detect_server_kind", find_kind)
    monkeypatch.setattr(engines.server, "CLIENTS", {"vllm": RecordedServer})

    def run_eval(*given_flags, url="http://one:1"):
        servers_used.clear()
        common = ["--data", data, "--reward", f"{tmp_path}/mine.py:score", "--reward-workers", 0, "--max-new-tokens", 6]
        common += ["--servers", url, "--sync", "disk"] if url else []
        cfg = evaluation.parse_args(list(map(str, [*given_flags, *common, "--out", tmp_path / "e"])))
        try:
            return evaluation.main(cfg), servers_used.copy()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return run_eval


def test_an_evaluation_on_servers_sends_them_the_weights_of_each_model(evaluate, toys, tmp_path):
    model, other = toys["qwen2_5_vl"], tmp_path / "other"
    hf = M.load_hf(str(model))
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(0.25)
    hf.save_pretrained(other)
    for file in model.iterdir():
        if not (other / file.name).exists():
            shutil.copy(file, other)
    summary, (server, baseline_server) = evaluate(model, "--rollout", "server", "--baseline", other, "--samples", 2)
    sent = {name: p.detach() for name, p in M.load_hf(str(model)).named_parameters()}
    for tensors, shift in ((server.tensors, 0.0), (baseline_server.tensors, 0.25)):
        assert tensors.keys() == sent.keys()
        assert all(torch.equal(tensors[name], sent[name] + shift) for name in sent)
    assert (
        len(server.requests) == len(baseline_server.requests) == 10
        and len({request.uid for request in server.requests}) == 5
    )
    assert summary["n"] == 5 and "servers" not in summary["settings"] and len(summary["baselines"]) == 1
    prediction = json.loads((tmp_path / "e" / "predictions.jsonl").read_text().splitlines()[0])
    assert all(s["tokens"] == 6 for s in prediction["samples"])
    # with another server it is the same evaluation, so it may be repeated in the same folder
    evaluate(model, "--rollout", "server", "--baseline", other, "--samples", 2, url="http://two:2")


def test_evaluating_a_run_that_trained_on_servers_needs_servers(evaluate, toys, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text("{}")
    args = {"model": str(toys["qwen2_5_vl"]), "rollout": "server", "servers": ["http://elsewhere:1"]}
    (tmp_path / "run" / "run.json").write_text(json.dumps({"args": args}))
    with pytest.raises(UserError, match="default for a run that trained with it.* --servers URL.*--rollout hf or vllm"):
        evaluate(tmp_path / "run", url=None)
    flags = [str(tmp_path / "run"), "--data", "x", "--out", "y"]
    assert evaluation.parse_args([*flags, "--servers", "http://one:1"]).rollout == "server"
    assert evaluation.parse_args([*flags, "--rollout", "hf"]).rollout == "hf"
    with pytest.raises(UserError, match="--servers http://one:1.*: only for servers, but the engine is --rollout hf"):
        evaluate(toys["qwen2_5_vl"], "--rollout", "hf")


@pytest.mark.parametrize("start, end", [(0, 4 * 10**8), (0, 10**30), (5, 3), (0.5, 2), (None, 2)])
def test_a_version_span_beyond_the_tokens_costs_no_memory(start, end):
    span = {"version": "r-1", "start": start, "end": end}
    content = [{"token_id": token, "logprob": -1.0} for token in (5, 6)]
    choice = {"token_ids": [5, 6], "logprobs": {"content": content}, "weight_versions": [span], "finish_reason": "stop"}
    with pytest.raises((ServerUnavailable, TypeError)):
        parse_completion({"choices": [choice], "prompt_token_ids": [1]}, POLICY_MODEL_NAME)
    info = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 5], [-1.0, 6]], "weight_version": "r-1"}
    with pytest.raises((ServerUnavailable, TypeError)):
        parse_sglang_response({"meta_info": info | {"weight_versions": [span]}, "output_ids": [5, 6]}, [6], None)


def test_an_unparsable_result_makes_only_its_server_unavailable(connect, capsys):
    engine, servers = connect(2)
    original = servers[1].generate

    async def generate_odd(request):
        return (await original(request))._replace(prompt_ids=5)

    servers[1].generate = generate_odd
    engine.generate(prompts_of("a", "b", "c", "d"), 2, SamplingParams(N_NEW))
    assert f"{URLS[1]} is unavailable: its reply cannot be parsed: TypeError" in capsys.readouterr().out


def test_servers_use_only_visible_gpus(monkeypatch, tmp_path):
    """Ranks under torchrun do the same. Counting from 0 would take other people's GPUs on a shared machine."""
    gpus = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(local, "server_command", lambda *args: ([], {}))
    monkeypatch.setattr(local.LocalServers, "start", lambda self, command, env, log: gpus.append([*env.values()]))
    monkeypatch.setattr(local.LocalServers, "wait_until_healthy", lambda self, urls: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def serve(n, **settings):
        gpus.clear()
        local.launch_servers(n, "model", None, torch.bfloat16, settings, tmp_path)
        return gpus

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert serve(2) == [["2"], ["3"]] and serve(1, tensor_parallel_size=2) == [["2,3"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,GPU-a1,GPU-b2")
    assert serve(2) == [["GPU-a1"], ["GPU-b2"]]
    with pytest.raises(UserError, match="2 trainer processes and 3 servers of 1 GPUs need 5 GPUs, but there are 4"):
        serve(3)


def test_a_gpu_computes_logits_in_float32_as_the_trainer_does(toys):
    processor = M.Processor(str(toys["qwen3_vl"]))
    for dtype, cuda, expected in (("bfloat16", True, "float32"), ("bfloat16", False, None), ("float32", True, None)):
        arguments = llm_arguments(str(toys["qwen3_vl"]), processor, getattr(torch, dtype), cuda, {"max_model_len": 64})
        assert arguments.get("hf_overrides", {}).get("head_dtype") == expected


def test_a_server_reads_adapter_flags_as_training_does():
    _, model, *_, servers, _ = serve.parse_args("--model m --data d --sync adapter --lora-rank 8".split())
    assert (servers.sync, model.lora_rank) == ("adapter", 8)


def test_print_prints_only_the_command_of_the_server(toys, tmp_path, capsys):
    data = write_parquet(tmp_path / "data.parquet", shapes_rows(4, "train", 0))
    command_line = ["--model", str(toys["qwen2_5_vl"]), "--data", str(data), "--max-new-tokens", "8", "--print"]
    serve.main(serve.parse_args(command_line))
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and " serve " in out and "4 examples" in err
