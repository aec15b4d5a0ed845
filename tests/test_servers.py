"""Real vLLM servers on the CPU, compared with vLLM in this process, with the trainer and with each other.

make test-vllm
"""

import os
import re
import signal
import sys
import threading
import time
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from conftest import wait_until
from test_rollout import assert_same, example, places, trainer_logprobs
from test_train import TORCHRUN, flags, rows, run, without_time
from test_vllm import CPU, RECURRENT, SETTINGS, check_noised_samples, gaps, named, start
from test_vllm import data as data
from test_vllm import mixed as mixed
from test_vllm import toys as toys

import model as M
from engines.client import Calls
from engines.launch import RolloutServerConfig
from engines.local import LocalServers, is_healthy, server_command
from engines.server import ServerEngine
from engines.sync import free_port, make_sender
from errors import UserError
from rollout import SamplingParams, make_prompts
from utils import DistContext

pytestmark = pytest.mark.vllm
ONE = DistContext(0, 1, CPU)
LIMITS = {"max_model_len": 384, "limit_mm_per_prompt": {"image": {"count": 3, "width": 224, "height": 224}}}


def connected(urls, processor, dtype, ctx, out, sync="gloo", in_flight="abort", timeout=60.0, **extra):
    """Return an engine that samples from the servers at these URLs."""
    servers = RolloutServerConfig(servers=tuple(urls), sync=sync, server_timeout=timeout, in_flight=in_flight)
    return ServerEngine(servers, processor, dtype, ctx, out=out, **{"max_model_len": 384} | extra)


class Servers:
    """vLLM servers of one model, and engines that sample from them."""

    def __init__(self, folder, logs, **settings):
        self.folder, self.logs, self.settings = folder, logs, LIMITS | SETTINGS | settings
        self.processor = M.Processor(str(folder))
        self.local, self.urls = LocalServers(), []

    def begin(self, n, lora_rank=0, port=None):
        for _ in range(n):
            port_, dtype = port or free_port(), self.settings.get("dtype", torch.float32)
            settings = {key: value for key, value in self.settings.items() if key != "dtype"}
            args = ("vllm", str(self.folder), self.processor, dtype, settings, "127.0.0.1", port_, lora_rank)
            self.local.start(*server_command(*args), self.logs / f"{port_}.log")
            self.urls.append(f"http://127.0.0.1:{port_}")
        return self

    def wait(self):
        self.local.wait_until_healthy(self.urls)
        return self.urls

    def engine(self, urls=None, ctx=ONE, **extra):
        vocab_size = M.load_config(str(self.folder)).get_text_config().vocab_size
        dtype = self.settings.get("dtype", torch.float32)
        return connected(urls or self.urls, self.processor, dtype, ctx, self.logs, vocab_size=vocab_size, **extra)


@pytest.fixture(scope="session")
def two(toys, tmp_path_factory):  # noqa: F811
    """Two servers of a toy Qwen2.5-VL."""
    servers = Servers(toys["qwen2_5_vl"], tmp_path_factory.mktemp("servers")).begin(2)
    servers.wait()
    yield servers
    servers.local.stop()


def load_model(servers):
    return M.load_hf(str(servers.folder)).eval()


def perturbed_model(servers, seed=1):
    """Return the model of the servers' folder with noise added to its weights."""
    hf = load_model(servers)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in hf.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator))
    return hf


@pytest.fixture
def fifty_examples(picture):
    questions = ["What colour are they?", "How many shapes are there?", "Describe this in detail.", "Why?"]
    examples = []
    for i in range(50):
        images = [picture(40 + 7 * ((i + k) % 13), 40 + 11 * (i % 9), 10 * i + k) for k in range(i % 4)]
        examples.append(example(f"p{i}", "<image>" * len(images) + questions[i % 3], images))
    return examples


def test_responses_equal_those_of_vllm_in_this_process(two, fifty_examples):
    hf = load_model(two)
    engine, in_process = two.engine(), start(two.folder)
    for each in (engine, in_process):
        each.load_weights(named(hf))
    prompts, sampling = make_prompts(fifty_examples, two.processor), SamplingParams(24, temperature=0.8, seed=3)
    ours, theirs = engine.generate(prompts, 2, sampling), in_process.generate(prompts, 2, sampling)
    assert_same(ours, theirs)
    assert max(map(torch.max, gaps(ours, hf, two.processor, 0.8))) <= 1e-5
    assert {tuple(r.versions) for r in ours} <= {(1,) * n for n in range(1, 25)}
    assert all(len(r.versions) == len(r.response) for r in ours)
    greedy = SamplingParams(12, temperature=0.0)
    assert_same(engine.generate(prompts[:8], 1, greedy), in_process.generate(prompts[:8], 1, greedy), greedy=True)


def test_noised_samples_see_noised_images(two, mixed):  # noqa: F811
    engine, hf = two.engine(), load_model(two)
    engine.load_weights(named(hf))
    check_noised_samples(engine, hf, two.processor, mixed)


@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_log_probabilities_equal_the_trainers_after_every_sync(sync, two, mixed):  # noqa: F811
    engine = two.engine(sync=sync, trained_tower=True)
    prompts = make_prompts(mixed, two.processor)
    for number in range(3):
        hf = perturbed_model(two, number)
        weights = named(hf) if number < 2 else named(hf, lambda name: "q_proj" in name or "lm_head" in name)
        engine.load_weights(weights)
        if number == 2:  # only parts of fused modules were sent: the rest keeps the weights of the sync before
            mixture, sent = perturbed_model(two, 1), dict(weights)
            with torch.no_grad():
                for name, p in mixture.named_parameters():
                    p.copy_(sent.get(name, p))
            hf = mixture
        rollouts = engine.generate(prompts, 4, SamplingParams(14, seed=number))
        assert max(map(torch.max, gaps(rollouts, hf, two.processor))) <= 1e-5
        assert set(chain(*(r.versions for r in rollouts))) == {number + 1}
    assert len({r.prompt.uid for r in rollouts}) == 4


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_log_probabilities_of_every_family_equal_the_trainers(family, toys, mixed, tmp_path):  # noqa: F811
    """On a CPU, vLLM supports the recurrent families only in bfloat16."""
    dtype = torch.bfloat16 if family in RECURRENT else torch.float32
    servers = Servers(toys[family], tmp_path, dtype=dtype).begin(1)
    try:
        servers.wait()
        engine, prompts = servers.engine(), make_prompts(mixed, servers.processor)
        engine.load_weights([(name, p.to(dtype)) for name, p in named(load_model(servers))])
        trained = perturbed_model(servers, 4).to(dtype).float()
        engine.load_weights([(name, p.to(dtype)) for name, p in named(trained)])
        rollouts = engine.generate(prompts, 4, SamplingParams(12, seed=1))
        differences = torch.cat(gaps(rollouts, trained, servers.processor))
        print(f"{family}: {differences.max():.1e} at most, {differences.mean():.1e} on average")
        assert differences.max() <= 1e-5 if dtype is torch.float32 else differences.mean() <= 0.03
    finally:
        servers.local.stop()


def in_the_middle(engine, prompts, n, sampling, do, after=0.4):
    """Return rollouts. `do` is called while they are sampled, after `after` seconds."""
    out = []
    thread = threading.Thread(target=lambda: out.append(engine.generate(prompts, n, sampling)))
    thread.start()
    time.sleep(after)
    do()
    thread.join()
    return out[0]


def spans(r):
    """Return a tuple (version, start, end) for each span of tokens that one version of the weights sampled."""
    starts = [0, *(i for i in range(1, len(r.versions)) if r.versions[i] != r.versions[i - 1])]
    ends = [*starts[1:], len(r.versions)]
    return [(r.versions[start], start, end) for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_responses_in_flight_when_weights_change(mode, two, mixed):  # noqa: F811
    engine = two.engine(in_flight=mode, trained_tower=True)
    weights = {1: perturbed_model(two, 1), 2: perturbed_model(two, 2)}
    engine.load_weights(named(weights[1]))
    prompts, sampling = make_prompts(mixed, two.processor), SamplingParams(200, seed=1)
    rollouts = in_the_middle(engine, prompts, 16, sampling, lambda: engine.load_weights(named(weights[2])))
    assert places(rollouts) == [(uid, i) for uid in ("one", "none", "two", "three") for i in range(16)]
    policies = {version: M.Policy(hf, two.processor) for version, hf in weights.items()}
    crossed, worst = 0, {"exact": 0.0, "kept": 0.0}
    for r in rollouts:
        parts = spans(r)
        crossed += len(parts) == 2
        assert [version for version, *_ in parts] in ([1], [2], [1, 2])
        for version, first, end in parts:
            theirs = trainer_logprobs(policies[version], r)[first:end]
            gap = (theirs - torch.tensor(r.logprobs[first:end])).abs().max().item()
            kind = "kept" if mode == "keep" and version == 2 else "exact"
            worst[kind] = max(worst[kind], gap)
    print(f"{mode}: {crossed} of {len(rollouts)} responses under two versions, {worst}")
    assert worst["exact"] <= 1e-5
    assert crossed == 0 if mode == "wait" else crossed  # how many depends on how busy the machine is
    if mode == "keep":
        assert worst["kept"] > 1e-4  # the old KV cache was kept: TIS corrects this difference
    assert max(map(torch.max, gaps(engine.generate(prompts, 2, SamplingParams(10)), weights[2], two.processor))) <= 1e-5


def test_a_server_that_dies_during_generation_and_comes_back(two, mixed, capfd):  # noqa: F811
    engine, hf = two.engine(timeout=30.0), perturbed_model(two)
    engine.load_weights(named(hf))
    prompts, sampling = make_prompts(mixed, two.processor), SamplingParams(200, seed=9)
    expected = engine.generate(prompts, 8, sampling)
    victim, process = two.urls[1], [*two.local.processes.values()][1]
    rollouts = in_the_middle(engine, prompts, 8, sampling, partial(os.killpg, process.pid, signal.SIGKILL))
    assert_same(rollouts, expected)  # no response is lost or differs
    assert list(engine.unavailable) == [victim] and f"rollout server {victim} is unavailable" in capfd.readouterr().out
    engine.load_weights(named(perturbed_model(two, 2)))
    assert engine.synced_urls == two.urls[:1]

    process.wait()
    two.local.processes.popitem()
    two.urls.pop()
    two.begin(1, port=int(victim.rpartition(":")[2]))
    two.wait()
    assert_same(engine.generate(prompts, 1, SamplingParams(4)), engine.generate(prompts, 1, SamplingParams(4)))
    assert victim in engine.unavailable  # it still has the folder's weights
    hf = perturbed_model(two, 3)
    engine.load_weights(named(hf))
    assert not engine.unavailable and engine.synced_urls == two.urls
    assert f"rollout server {victim} is available again" in capfd.readouterr().out
    rollouts = engine.generate(prompts, 8, sampling)
    assert max(map(torch.max, gaps(rollouts, hf, two.processor))) <= 1e-5


def test_a_server_with_weights_of_another_run_is_not_sampled_from(two, mixed):  # noqa: F811
    engine, hf = two.engine(), perturbed_model(two)
    engine.load_weights(named(hf))
    other_run = two.engine(two.urls[1:])
    other_run.load_weights(named(perturbed_model(two, 5)))
    rollouts = engine.generate(make_prompts(mixed, two.processor), 8, SamplingParams(12, seed=1))
    assert "which this run did not send" in engine.unavailable[two.urls[1]]
    assert max(map(torch.max, gaps(rollouts, hf, two.processor))) <= 1e-5


def test_a_server_that_hangs_is_left_out_until_it_answers(two, mixed):  # noqa: F811
    engine, hf = two.engine(timeout=8.0), perturbed_model(two)
    engine.load_weights(named(hf))
    prompts, sampling = make_prompts(mixed, two.processor), SamplingParams(8, seed=2)
    expected = engine.generate(prompts, 2, sampling)
    process = [*two.local.processes.values()][1]
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        assert_same(engine.generate(prompts, 2, sampling), expected)
        assert "within 8 s" in engine.unavailable[two.urls[1]]
        engine.load_weights(named(hf))  # to the other server only
    finally:
        os.killpg(process.pid, signal.SIGCONT)
    wait_until(lambda: is_healthy(two.urls[1]))
    engine.load_weights(named(hf))
    assert not engine.unavailable
    assert_same(engine.generate(prompts, 2, sampling), expected)


def test_a_server_on_which_an_update_fails_is_left_out_until_the_next_sync(two, mixed, monkeypatch):  # noqa: F811
    engine, hf = two.engine(), perturbed_model(two)
    engine.load_weights(named(hf))
    bad, calls = engine.servers[two.urls[0]], []

    async def update(metas, crc):
        calls.append(1)
        metas = [meta._replace(name="nowhere." + meta.name) for meta in metas]
        await type(bad).update(bad, metas, crc)

    monkeypatch.setattr(bad, "update", update)
    hf = perturbed_model(two, 7)
    engine.load_weights(named(hf))
    assert calls and "no parameter 'nowhere." in engine.unavailable[two.urls[0]] and engine.weights_version == 2
    prompts = make_prompts(mixed, two.processor)
    assert max(map(torch.max, gaps(engine.generate(prompts, 4, SamplingParams(8)), hf, two.processor))) <= 1e-5
    monkeypatch.undo()
    engine.load_weights(named(hf))
    assert not engine.unavailable
    with pytest.raises(UserError, match="rollout servers: none accepted the new weights .*no parameter 'nobody'"):
        engine.load_weights([("nobody", torch.zeros(3))])


def test_differences_between_a_server_and_this_run_are_reported(two, mixed):  # noqa: F811
    engine = two.engine()
    engine.load_weights(named(load_model(two)))
    prompts = make_prompts(mixed, two.processor)
    prompts[3].token_ids.insert(-2, 5)
    with pytest.raises(UserError, match=r"example 'three'.*the engine's prompt has .* tokens.*trained prompt would"):
        engine.generate(prompts, 1, SamplingParams(4))
    with pytest.raises(UserError, match="accepts sequences of up to 384 tokens, but this run needs 500"):
        two.engine(max_model_len=500)
    with pytest.raises(UserError, match="no server answers there"):
        two.engine([f"http://127.0.0.1:{free_port()}"])


def test_images_are_sent_once_to_a_server_and_again_if_it_dropped_them(two, mixed, monkeypatch):  # noqa: F811
    engine = two.engine(two.urls[:1])
    hf = load_model(two)
    engine.load_weights(named(hf))
    [server] = engine.servers.values()
    sent, original = [], server._generate

    async def count(request, name, parts):
        sent.append(sum("url" in part for part in parts))
        return await original(request, name, parts)

    monkeypatch.setattr(server, "_generate", count)
    prompts, sampling = make_prompts(mixed, two.processor), SamplingParams(6, seed=1)
    expected = engine.generate(prompts, 8, sampling)
    assert sum(sent) == 6  # all images of the four prompts, of which one is in two prompts
    sent.clear()
    assert_same(engine.generate(prompts, 8, sampling), expected)
    assert sum(sent) == 0
    engine.calls.run_all([server.post("/pause", mode="abort", clear_cache="true")])  # drops its cached images
    engine.calls.run_all([server.resume()])
    assert_same(engine.generate(prompts, 8, sampling), expected)
    assert sum(sent) > 0


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(two, data, tmp_path):  # noqa: F811
    """command(name, *flags) -> the command of a run that learns, in the folder `name`."""
    common = ["--reward", f"{data.parent}/letters.py:score", "--lr", "3e-3", "--group-size", 4, "--eval-data", data]

    def make(name, *extra):
        return ["train.py", *flags(two.folder, data, tmp_path / name, *common, *extra)]

    return make


def server_flags(two):
    return ["--rollout", "server", "--servers", *two.urls]


def test_a_synchronous_run_with_servers_equals_the_run_in_process(two, command, tmp_path):
    run([sys.executable, *command("inside", "--steps", 5, "--rollout", "vllm")])
    run([sys.executable, *command("servers", "--steps", 5, *server_flags(two))])
    run([*TORCHRUN, 2, *command("two", "--steps", 5, *server_flags(two))])
    in_process, servers, on_two = (without_time(tmp_path / name) for name in ("inside", "servers", "two"))
    for row in (*servers, *on_two):
        row.pop("sync/servers", None)
    assert len(in_process) == len(servers) == 6
    # comparisons with the engine's own log-probabilities depend, in the last bit, on what else is in its batch
    mismatch_metrics = [
        {k: row.pop(k) for k in list(row) if k.startswith(("mismatch/",))} for row in in_process
    ]
    for row, expected in zip(servers, mismatch_metrics, strict=True):
        for name, value in expected.items():
            assert row.pop(name) == pytest.approx(value, abs=2e-6)
    # the last bits of the engine's log-probabilities may also change a loss
    assert servers == [pytest.approx(row, rel=1e-4, abs=1e-6) for row in in_process]
    assert [row["reward/mean"] for row in on_two[1:]] == pytest.approx([row["reward/mean"] for row in in_process[1:]])


@pytest.mark.parametrize(("sync", "k"), [("gloo", 2), ("disk", 1)])
def test_an_asynchronous_run_with_two_processes_is_at_most_k_steps_stale(sync, k, two, command, tmp_path):
    extra = ["--steps", 8, "--async-steps", k, "--sync", sync, "--save-every", 4, *server_flags(two)]
    run([*TORCHRUN, 2, *command("run", *extra)])
    steps = [row for row in rows(tmp_path / "run") if "async/staleness" in row]
    assert len(steps) == 8
    assert max(row["async/staleness_max"] for row in steps) == k
    assert steps[0]["async/staleness_max"] == 0 and steps[0]["mismatch/max_abs_logprob_diff"] <= 1e-5
    assert not list((tmp_path / "run").glob("sync/*"))


def test_a_sync_of_the_adapter_alone_matches_a_sync_of_merged_weights(two, command, tmp_path):
    servers = Servers(two.folder, tmp_path).begin(1, lora_rank=8)
    try:
        servers.wait()
        extra = ["--lora-rank", 8, "--steps", 4, "--sync", "adapter", "--rollout", "server", "--servers", *servers.urls]
        with pytest.raises(UserError, match="was started for --sync adapter; start it without"):
            servers.engine()
        with pytest.raises(UserError, match="does not accept adapters; start it with --sync adapter and this run's"):
            two.engine(sync="adapter")
        run([sys.executable, *command("alone", *extra)])
        run([sys.executable, *command("merged", "--lora-rank", 8, "--steps", 4, *server_flags(two))])
    finally:
        servers.local.stop()
    adapter, merged = rows(tmp_path / "alone"), rows(tmp_path / "merged")
    for a, b in zip(adapter[1:], merged[1:], strict=True):
        assert a["mismatch/max_abs_logprob_diff"] <= 1e-5 and b["mismatch/max_abs_logprob_diff"] <= 1e-5
        assert a["sync/bytes"] < b["sync/bytes"] / 3
        assert a["reward/mean"] == pytest.approx(b["reward/mean"], abs=0.02)


def test_a_run_starts_its_own_server_and_stops_it(command, tmp_path):
    sizes = [f"{key}={value}" for key, value in SETTINGS.items()]
    done = run([sys.executable, *command("own", "--steps", 1, "--rollout", "server", "--serve", 1, "--vllm", *sizes)])
    assert "rollouts by server" in done.stdout
    log = tmp_path / "own" / "servers" / "server0.log"
    assert "Application startup complete" in log.read_text()
    port = re.search(r"--port (\d+)", (tmp_path / "own" / "servers" / "server0.txt").read_text())
    assert not is_healthy(f"http://127.0.0.1:{port[1]}")  # the server ended with the run


def test_vllms_nccl_transfer_calls_all_servers(monkeypatch, tmp_path):
    """Tested without a GPU: vLLM's trainer engine is real, its communicator and the servers are not."""
    from vllm.distributed.weight_transfer import nccl_engine

    broadcast, calls = [], []

    class Server:
        def __init__(self, url, workers):
            self.url = url
            self.workers = workers

        def __getattr__(self, name):
            async def call(*args):
                calls.append((self.url, name, *args))
                return {"a": "1"} if name == "checksums" else None

            return call

    servers = [Server("a", 2), Server("b", 4)]
    monkeypatch.setattr("engines.sync.local_address", lambda servers: "10.0.0.1")
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: SimpleNamespace(destroy=lambda: None))
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer",
                        lambda iterator, post_iter_func, **_: broadcast.extend(iterator))

    class Weights(list):
        def shapes(self):
            return [SimpleNamespace(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in self]

    weights = Weights([("x", torch.ones(2, 3)), ("y", torch.zeros(5, dtype=torch.bfloat16))])
    sender = make_sender("nccl", "vllm", Calls(), 60.0, tmp_path)

    def send(tensors, whole, label):
        return sender.sync_weights(iter(sender.collect(lambda trainable_only: tensors, whole, label)), whole, label)

    assert not sender.connect_to(servers) and not send(weights, True, "run-1")
    assert [name for name, _ in broadcast] == ["x", "y"] and (sender.n_calls, sender.n_bytes) == (1, 34)
    by_server = {url: [(name, *args) for u, name, *args in calls if u == url] for url in ("a", "b")}
    for url, offset in (("a", 1), ("b", 3)):  # the trainer is rank 0
        names = [name for name, *_ in by_server[url]]
        assert names == ["start_transfer", "start_weight_update", "send_update", "end_update", "set_weights_label",
                         "checksums"]
        info = by_server[url][0][1]
        assert info["how"] == "nccl" and info["info"]["rank_offset"] == offset and info["info"]["world_size"] == 7
        assert by_server[url][2][1]["shapes"] == [[2, 3], [5]] and by_server[url][4][1] == "run-1"
    calls.clear()
    assert not send(Weights(weights[1:]), False, "run-2")
    assert [name for url, name, *_ in calls if url == "a"] == names[1:-1] and len(broadcast) == 3
