"""ServerEngine: rollouts from servers (vLLM's, SGLang's) on this machine or others. Tokens go in, tokens come out.

Every process of the trainer sends requests for its own prompts, from one event loop in a thread; a prompt's samples go
to one server, prompts to the server with the fewest responses in flight. Rank 0 alone sends weights (engines/sync.py).

A server that fails, hangs or answers with other weights than this run's is unavailable: its requests are sent to
another one, with the same seeds, and when it answers again it gets all weights with the next sync. One line says so,
each time.
"""

import asyncio
import math
import os
import queue
import shutil
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engines.client import (
    Calls,
    ConnectionLost,
    GenerateRequest,
    GenerateResult,
    ServerClient,
    ServerUnavailable,
    find_common_kind,
)
from engines.common import build_request, check_answer
from engines.sglang_client import SGLangClient
from engines.sync import make_sender
from engines.vllm_client import VLLMClient
from errors import UserError, describe_error
from model import Processor
from rollout import (
    IDLE_POLL_SECONDS,
    Engine,
    GetWeights,
    Rollout,
    RolloutQueue,
    SamplingParams,
    add_response,
    never,
)
from utils import DistContext, NamedTensors, derive_seed

# What reading JSON of another form raises
MISMATCH_MESSAGE = (AttributeError, LookupError, TypeError, ValueError, OverflowError)
MAX_FRUITLESS_REQUESTS = 6  # answers in a row without a token, before their server is left out
INITIAL_PAUSE_SECONDS = 0.1  # seconds after the first of them; each further pause is about twice as long

CLIENTS = {client.kind: client for client in (VLLMClient, SGLangClient)}


def raise_mismatch(why: str) -> None:
    raise UserError(why)


class ServerEngine(Engine):
    """Rollouts from servers. `cfg` is launch.ServerConfig, `out` the folder of the run; `max_model_len`: the longest
    sequence of a request. `trained_tower`: images are read again with each version of the weights.
    `save_adapter(folder)`, collective, writes the policy's adapter (--sync adapter). `should_stop`: stop sampling, as
    the run was asked to end. `request_stop(message)` raises UserError, or asks the run to save and end, if no server is
    left."""

    def __init__(
        self,
        cfg: Any,
        processor: Processor,
        dtype: torch.dtype,
        ctx: DistContext,
        *,
        out: Path,
        vocab_size: int,
        max_model_len: int,
        trained_tower: bool = False,
        save_adapter: Callable[[Path], None] | None = None,
        should_stop: Callable[[], bool] = never,
        request_stop: Callable[[str], None] = raise_mismatch,
    ):
        super().__init__(should_stop)
        self.processor = processor
        self.dtype = dtype
        self.ctx = ctx
        self.max_model_len = max_model_len
        self.in_flight = cfg.in_flight
        self.trained_tower = trained_tower
        self.request_stop = request_stop
        self.run_id = ctx.gather(os.urandom(4).hex())[0]  # tells this run's weights from those of others
        self.requests_allowed = asyncio.Event()  # not while weights change
        self.pending: dict[asyncio.Task, ServerClient] = {}  # requests without an answer yet
        self.unavailable: dict[str, str] = {}  # URL -> why
        self.counted_at = self.reported_at = time.monotonic()
        self.idle_seconds = 0.0
        self.weights_label = ""  # of the weights that servers have
        self.tower = ""  # of those with the vision tower that they have: their features of images outlive a sync
        self.synced_urls: list[str] = []  # servers that rank 0 is connected with, and that have all weights

        self.calls = Calls()
        urls, banned = [url.rstrip("/") for url in cfg.servers], processor.banned_token_ids(vocab_size).tolist()
        self.ids = set(range(vocab_size)).difference(banned)  # that may be sampled
        [kind] = self.calls.run_all([find_common_kind(urls)])
        more = (self.calls.http, cfg.server_timeout, processor.eos_ids, banned)
        self.servers: dict[str, ServerClient] = {url: CLIENTS[kind](url, *more) for url in urls}
        auto = "nccl" if ctx.device.type == "cuda" else "gloo"
        how = auto if cfg.sync == "auto" else cfg.sync
        self.calls.run_all([server.check(how, max_model_len) for server in self.servers.values()])
        folder = out.absolute() / "sync"  # where --sync disk and adapter write; all servers must see it
        if ctx.is_main:  # left by a run that was killed in the middle of a sync
            shutil.rmtree(folder, ignore_errors=True)
        self.sender = make_sender(how, kind, self.calls, cfg.server_timeout, folder, save_adapter)

    # --- sampling ---

    def healthy_servers(self) -> list[ServerClient]:
        return [server for url, server in self.servers.items() if url not in self.unavailable]

    def sample(self, responses: RolloutQueue, sampling: SamplingParams) -> None:
        """Send a request for each response. May be called from several threads at once."""
        done: queue.SimpleQueue = queue.SimpleQueue()
        servers: dict[str, ServerClient] = {}  # of each prompt
        running: dict[Future, Rollout] = {}
        try:
            while True:
                over = responses.exhausted  # before taking: what comes in between is taken the next time
                for rollout in responses.poll(0.0 if running else IDLE_POLL_SECONDS):
                    future = self.calls.start(
                        self._generate(rollout, responses.remaining_tokens(rollout), sampling, servers)
                    )
                    running[future] = rollout
                    future.add_done_callback(done.put)
                if self.should_stop() or (over and not running):
                    return
                try:
                    finished = [done.get(timeout=IDLE_POLL_SECONDS)] if running else []
                except queue.Empty:
                    continue
                while not done.empty():
                    finished.append(done.get())
                for future in finished:
                    rollout = running.pop(future)
                    tokens, logprobs, versions = future.result()
                    add_response(rollout, tokens, logprobs, self.processor, versions)
                    responses.mark_sampled(rollout)
        finally:
            for future in running:
                future.cancel()

    async def _generate(
        self, rollout: Rollout, room: int, sampling: SamplingParams, servers: dict[str, ServerClient]
    ) -> tuple[list[int], list[float], list[int]]:
        """Return tokens, their log-probabilities, and the versions of the weights that sampled them. A response that a
        sync interrupts (--in-flight abort) is continued from what there is, under the new weights."""
        uid, sample, turn, room, short, _ = build_request(rollout, room, self.processor, self.max_model_len)
        so_far, images = rollout.prompt.token_ids + rollout.response, rollout.prompt.images + rollout.images
        tokens, logprobs, versions = [], [], []
        lost_once: set[ServerClient] = set()  # servers whose connection broke once during this request
        fruitless = 0  # answers in a row that brought no token
        while True:
            await self.requests_allowed.wait()
            server = self._pick_server(uid, servers)
            if server is None:
                await asyncio.Event().wait()  # until the run ends
            named = [(f"{image.key}-{self.tower}", image.image) for image in images]
            again = [len(tokens)] if tokens else []  # other random numbers than those of its beginning
            seed = derive_seed(sampling.seed, uid, sample, *([turn] if turn > 1 or again else []), *again)
            request = GenerateRequest(
                uid, short + tokens, named, room - len(tokens), seed, sampling.temperature, sampling.top_p,
                self.weights_label)
            try:
                result = await self._send_request(server, request, so_far + tokens)
            except ServerUnavailable as error:
                first = isinstance(error, ConnectionLost) and server not in lost_once
                if not (first and await server.alive()):
                    self._mark_unavailable(server, str(error))
                lost_once.add(server)
                continue
            if result and (self.in_flight == "keep" or set(result.labels) <= {request.cache_salt}):
                tokens += result.tokens
                logprobs += result.logprobs
                versions += map(self._parse_version, result.labels)
                if result.finish_reason != "abort" or len(tokens) == room:  # or it was aborted with its last token
                    return tokens, logprobs, versions
            # A sync aborts requests once. A server that keeps doing so is asked more and more slowly, then left out
            synced = request.cache_salt != self.weights_label or not self.requests_allowed.is_set()
            fruitless = 0 if synced or len(request.ids) < len(short + tokens) else fruitless + 1
            if fruitless == MAX_FRUITLESS_REQUESTS:
                self._mark_unavailable(server, f"{fruitless} answers in a row held no token of the newest weights")
                fruitless = 0
            await asyncio.sleep(INITIAL_PAUSE_SECONDS * (2**fruitless - 1))

    async def _send_request(
        self, server: ServerClient, request: GenerateRequest, so_far: Sequence[int]
    ) -> GenerateResult | None:
        """Return the answer, or None if new weights overtook the request. It was not running yet when they came, so
        nothing is lost; but it would continue from its prompt as the old weights read it."""
        self._add_idle_time()
        server.in_flight += 1
        task = asyncio.ensure_future(server.generate(request))
        self.pending[task] = server
        try:
            result = await task
            validate_result(result, request, so_far, server.url, self.ids)
            if max(map(self._parse_version, result.labels), default=math.inf) < self._parse_version(request.cache_salt):
                raise ServerUnavailable("it still has the weights of an earlier sync")
            return result
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            return None
        except UserError as error:
            raise UserError(f"example {request.uid!r}: {error}") from error
        except MISMATCH_MESSAGE as error:
            raise ServerUnavailable(f"its answer cannot be read: {describe_error(error)}") from error
        finally:
            del self.pending[task]
            self._add_idle_time()
            server.in_flight -= 1

    async def _pause_requests(self) -> None:
        self.requests_allowed.clear()

    def _resume_requests(self) -> None:
        """Allow requests again after a sync. Cancel those of unavailable servers, which may never answer."""
        for task, server in self.pending.items():
            if self.in_flight != "keep" or server.url in self.unavailable:
                task.cancel()
        self.requests_allowed.set()

    def _pick_server(self, uid: str, servers: dict[str, ServerClient]) -> ServerClient | None:
        """Return the server of the prompt's other samples, or the one with the fewest responses in flight. None: no
        server is left, and the run has been asked to end."""
        server = servers.get(uid)
        if server is None or server.url in self.unavailable:
            usable = self.healthy_servers()
            if not usable:
                return self._fail_run("none is left")
            first = self.ctx.rank % len(usable)  # processes do not all begin with the same one
            server = servers[uid] = min(usable[first:] + usable[:first], key=lambda server: server.in_flight)
        return server

    def _parse_version(self, label: str) -> int:
        run, _, number = str(label).rpartition("-")
        if run != self.run_id or not number.isdecimal():
            raise ServerUnavailable(f"it samples with weights {label!r}, which this run did not send: it was started "
                                    "again, or another run uses it")
        return int(number)

    def _mark_unavailable(self, server: ServerClient, why: str) -> None:
        if server.url not in self.unavailable:
            self.unavailable[server.url] = why
            rank = f"rank {self.ctx.rank}: " if self.ctx.world > 1 else ""
            print(f"{rank}--servers {server.url} is left out: {why}; {len(self.healthy_servers())} others go on")

    def _fail_run(self, what: str) -> None:
        why = "; ".join(f"{url}: {why}" for url, why in self.unavailable.items())
        if not self.should_stop():
            self.request_stop(f"--servers: {what} ({why}); start them again, then repeat the command (in training with "
                         "--resume auto)")

    # --- new weights ---

    def sync(self, weights: GetWeights) -> dict[str, float]:
        """Bring servers what they lack, on all ranks: all weights to one that is new or back, else what is trained. A
        server that fails is unavailable, and the others get all weights. If none is left the run is asked to end."""
        self.calls.run_all([self._pause_requests()])
        for theirs in self.ctx.gather(dict(self.unavailable)):  # all have stopped sending requests
            self.unavailable = theirs | self.unavailable
        label = f"{self.run_id}-{self.weights_version + 1}"
        failed: dict[str, str] = {}
        while True:
            targets, whole = self._from_rank0(partial(self._sync_targets, failed))
            for url in self.servers.keys() - failed.keys() - set(targets):
                self._mark_unavailable(self.servers[url], "no answer to /health")
            if not targets:
                self._fail_run("none takes new weights")
                self.synced_urls = []
                break
            tensors = iter(self.sender.collect(weights, whole, label))
            lost = self._from_rank0(partial(self._send, targets, tensors, whole, label), tensors)
            for url in targets:
                if url in lost:
                    self._mark_unavailable(self.servers[url], f"new weights: {lost[url]}")
                elif url in self.unavailable:
                    print(f"--servers {url} is used again")
                    del self.unavailable[url]
            if not lost:
                break
            failed |= lost
        if (targets and whole) or self.trained_tower:
            self.tower = label
        self.has_all_weights = True
        self.weights_version += 1
        self.weights_label = label
        self.calls.loop.call_soon_threadsafe(self._resume_requests)
        counts = {"sync/calls": self.sender.n_calls, "sync/bytes": self.sender.n_bytes} if targets else {}
        return {name: float(n) for name, n in counts.items()} | {"sync/servers": float(len(targets))}

    def _from_rank0(self, work: Callable[[], Any], tensors: NamedTensors = ()) -> Any:
        """Return on all ranks what rank 0 computes. All iterate over the tensors to their end, as they gather them
        together."""
        result = work() if self.ctx.is_main else None
        for _ in tensors:
            pass
        return self.ctx.gather(result)[0]

    def _send(self, targets: Sequence[str], tensors: NamedTensors, whole: bool, label: str) -> dict[str, str]:
        """Pause these servers, bring them weights, and let them continue. Return which failed, and why."""
        servers = [self.servers[url] for url in targets]
        self.synced_urls = []
        _, failed = self.calls.each(servers, lambda server: server.pause(self.in_flight))
        if whole and not failed:
            failed = self.sender.connect_senders(servers)
        failed = failed or self.sender.sync_weights(tensors, whole, label)
        if not failed:
            _, failed = self.calls.each(servers, lambda server: server.resume())
        if failed:
            self.sender.close()
        else:
            self.synced_urls = list(targets)
        return failed

    def _sync_targets(self, failed: Set[str]) -> tuple[list[str], bool]:
        """Return the servers that get the next weights, unavailable ones that answer again among them; and whether they
        get all weights, over a new link: at first, and whenever they are others than before."""
        urls = [url for url in self.servers if url not in failed]
        alive = self.calls.run_all([self._is_alive(self.servers[url]) for url in urls])
        targets = [url for url, answers in zip(urls, alive, strict=True) if answers]
        return targets, not self.has_all_weights or set(targets) != set(self.synced_urls)

    async def _is_alive(self, server: ServerClient) -> bool:
        """An unavailable server is not waited for; another may be busy, or drop a connection."""
        if server.url in self.unavailable:
            return await server.alive()
        return await server.alive(15.0) or await server.alive(15.0)

    def load_weights(self, named_tensors: NamedTensors) -> dict[str, float]:
        """Send all weights, or after that some. For tests and scripts: a run calls `sync`, which can send them
        again."""
        held = list(named_tensors)
        return self.sync(lambda trainable_only: held)

    # --- the rest of an engine ---

    def _add_idle_time(self) -> None:
        """Add up the time since the last change, times the share of servers without anything to do."""
        now = time.monotonic()
        idle = sum(server.in_flight == 0 for server in self.servers.values()) / len(self.servers)
        self.idle_seconds += idle * (now - self.counted_at)
        self.counted_at = now

    def metrics(self) -> dict[str, float]:
        """Return the share of time, since the last call, in which a server had none of this process's requests, on
        average."""
        self._add_idle_time()
        seconds, self.reported_at = self.counted_at - self.reported_at, self.counted_at
        idle, self.idle_seconds = self.idle_seconds / seconds, 0.0
        return {"servers_idle": idle}


def validate_result(
    result: GenerateResult, request: GenerateRequest, so_far: Sequence[int], url: str, ids: Set[int]
) -> None:
    """Raise ServerUnavailable unless the tokens of an answer are of `ids`, and each has one log-probability; and what
    check_answer raises."""
    n = len(result.tokens)
    sizes = (
        n == len(result.logprobs) == len(result.labels) and (result.finish_reason != "abort") <= n <= request.max_tokens
    )
    if not sizes or result.finish_reason not in ("stop", "length", "abort"):
        raise ServerUnavailable(
            f"it answered {n} tokens of {request.max_tokens}, {len(result.logprobs)} log-probabilities, "
            f"{len(result.labels)} versions, finish reason {result.finish_reason!r}"
        )
    for token in result.tokens:
        if type(token) is not int or token not in ids:
            raise ServerUnavailable(
                f"it answered token id {token!r:.40}, which is not in the vocabulary or must not be sampled")
    if any(not isinstance(logprob, int | float) or logprob > 1e-3 for logprob in result.logprobs):
        raise ServerUnavailable("it answered what are no log-probabilities")
    check_answer(url, result.prompt_ids, so_far, result.logprobs)
