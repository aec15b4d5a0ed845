"""ServerEngine: rollouts from vLLM or SGLang servers, on this machine or others. Requests and results are token ids.

Every rank of the trainer sends requests for its own prompts, from one event loop in a thread. All samples of a prompt
go to the same server: the one with the fewest responses in flight. Only rank 0 sends weights (engines/sync.py).

A server that fails, hangs, or samples with weights that this run did not send is marked unavailable. Its requests are
sent again, with the same seeds, to another server. The first sync after the server answers again sends all weights to
all servers and makes it available again. Both events are printed, one line each.
"""

import asyncio
import math
import os
import queue
import shutil
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import replace
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
from engines.common import build_request, check_response
from engines.sglang_client import SGLangClient
from engines.sync import make_sender
from engines.vllm_client import VLLMClient
from errors import UserError, describe_error, need
from model import Processor
from rollout import (
    IDLE_POLL_SECONDS,
    Engine,
    GetWeights,
    Rollout,
    RolloutQueue,
    SamplingParams,
    add_response,
    never_stop,
)
from utils import DistContext, NamedTensors, derive_seed

# exceptions raised while reading a result whose JSON does not have the expected form
BAD_RESULT_ERRORS = (AttributeError, LookupError, TypeError, ValueError, OverflowError)
# a server is marked unavailable after this many consecutive results without a usable token
MAX_FRUITLESS_REQUESTS = 6
INITIAL_PAUSE_SECONDS = 0.1  # pause after the first such result; each further pause is about twice as long

CLIENTS = {client.kind: client for client in (VLLMClient, SGLangClient)}


def raise_user_error(message: str) -> None:
    raise UserError(message)


class ServerEngine(Engine):
    """An engine that samples on rollout servers.

    `cfg` is a launch.RolloutServerConfig, `out` the run directory, and `max_model_len` the max length of a sequence in
    tokens. With `trained_tower`, servers compute image features again after every weight sync. `save_adapter(folder)`
    is a collective that writes the policy's adapter (--sync adapter). `should_stop` returns True once the run must end.
    `request_stop(message)` is called when no server is available: it raises UserError, or makes the run save a
    checkpoint and end.
    """

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
        should_stop: Callable[[], bool] = never_stop,
        request_stop: Callable[[str], None] = raise_user_error,
    ):
        super().__init__(should_stop)
        self.processor = processor
        self.dtype = dtype
        self.ctx = ctx
        self.max_model_len = max_model_len
        self.in_flight_mode = cfg.in_flight  # keep, abort or wait: what a sync does with requests in flight
        self.trained_tower = trained_tower
        self.request_stop = request_stop
        self.run_id = ctx.gather(os.urandom(4).hex())[0]  # first part of the labels of the weights that this run sends
        self.requests_allowed = asyncio.Event()  # cleared while weights change
        self.pending: dict[asyncio.Task, ServerClient] = {}  # requests in flight
        self.unavailable: dict[str, str] = {}  # URL -> reason
        self.counted_at = self.reported_at = time.monotonic()
        self.idle_seconds = 0.0
        self.weights_label = ""  # label of the weights on the servers
        # label of the last sync that sent the vision tower; image features cached under this label stay valid until
        # the label changes
        self.tower_label = ""
        self.synced_urls: list[str] = []  # servers that rank 0 is connected to and that have all weights

        self.calls = Calls()
        urls, banned = [url.rstrip("/") for url in cfg.servers], processor.banned_token_ids(vocab_size).tolist()
        self.allowed_ids = set(range(vocab_size)).difference(banned)  # token ids that may be sampled
        [kind] = self.calls.run_all([find_common_kind(urls)])
        client_args = (self.calls.http, cfg.server_timeout, processor.eos_ids, banned)
        self.servers: dict[str, ServerClient] = {url: CLIENTS[kind](url, *client_args) for url in urls}
        auto = "nccl" if ctx.device.type == "cuda" else "gloo"
        method = auto if cfg.sync == "auto" else cfg.sync
        self.calls.run_all([server.check(method, max_model_len) for server in self.servers.values()])
        folder = out.absolute() / "sync"  # --sync disk and adapter write there; all servers must be able to read it
        if ctx.is_main:  # remove the files of a run that was killed during a sync
            shutil.rmtree(folder, ignore_errors=True)
        self.sender = make_sender(method, kind, self.calls, cfg.server_timeout, folder, save_adapter)

    # --- sampling ---

    def available_servers(self) -> list[ServerClient]:
        return [server for url, server in self.servers.items() if url not in self.unavailable]

    def sample(self, responses: RolloutQueue, sampling: SamplingParams) -> None:
        """Sample a response for each queued rollout on a server. Several threads may call this at the same time."""
        done: queue.SimpleQueue = queue.SimpleQueue()
        servers: dict[str, ServerClient] = {}  # uid of a prompt -> the server for all its samples
        running: dict[Future, Rollout] = {}
        try:
            while True:
                closed = responses.closed  # read before polling, else a rollout that arrives in between is missed
                for rollout in responses.poll(0.0 if running else IDLE_POLL_SECONDS):
                    future = self.calls.start(
                        self._generate(rollout, responses.remaining_tokens(rollout), sampling, servers)
                    )
                    running[future] = rollout
                    future.add_done_callback(done.put)
                if self.should_stop() or (closed and not running):
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
        self, rollout: Rollout, max_tokens: int, sampling: SamplingParams, servers: dict[str, ServerClient]
    ) -> tuple[list[int], list[float], list[int]]:
        """Return a response's tokens, their log-probabilities, and the weights version that sampled each token. A
        response that a sync aborts (--in-flight abort) continues after its last token, with the new weights."""
        uid, sample, turn, max_tokens, unexpanded_ids, images, _ = build_request(
            rollout, max_tokens, self.processor, self.max_model_len)
        expanded_ids = rollout.prompt.token_ids + rollout.response
        tokens, logprobs, versions = [], [], []
        lost_once: set[ServerClient] = set()  # servers that already lost a connection for this response
        fruitless = 0  # consecutive results without a usable token
        while True:
            await self.requests_allowed.wait()
            server = self._pick_server(uid, servers)
            if server is None:
                await asyncio.Event().wait()  # forever: the run is ending
            keyed_images = [replace(image, key=f"{image.key}-{self.tower_label}") for image in images]
            offset = [len(tokens)] if tokens else []  # a continuation must not reuse the random numbers of its start
            seed = derive_seed(sampling.seed, uid, sample, *([turn] if turn > 1 or offset else []), *offset)
            request = GenerateRequest(
                uid, unexpanded_ids + tokens, keyed_images, max_tokens - len(tokens), seed, sampling.temperature,
                sampling.top_p, self.weights_label, rollout.n_routed)
            try:
                result = await self._send_request(server, request, expanded_ids + tokens)
            except ServerUnavailable as error:
                may_retry = isinstance(error, ConnectionLost) and server not in lost_once
                if not (may_retry and await server.alive()):
                    self._mark_unavailable(server, str(error))
                lost_once.add(server)
                continue
            # cache_salt is the label of the weights that the request was sent for
            if result and (self.in_flight_mode == "keep" or set(result.labels) <= {request.cache_salt}):
                tokens += result.tokens
                logprobs += result.logprobs
                versions += map(self._parse_version, result.labels)
                if self.expert_layers and len(result.experts):
                    rollout.add_experts(result.experts[:, self.expert_layers])
                # an abort after the last allowed token loses nothing, so the response is complete
                if result.finish_reason != "abort" or len(tokens) == max_tokens:
                    need(not self.expert_layers or rollout.n_routed == len(expanded_ids) + len(tokens) - 1,
                         f"--servers {server.url} did not return the experts of all tokens; start it with "
                         "--replay-experts")
                    return tokens, logprobs, versions
            # An empty result right after a sync is normal. If a server keeps returning nothing, pause longer and, after
            # MAX_FRUITLESS_REQUESTS results mark it unavailable.
            synced = request.cache_salt != self.weights_label or not self.requests_allowed.is_set()
            fruitless = 0 if synced or len(request.ids) < len(unexpanded_ids + tokens) else fruitless + 1
            if fruitless == MAX_FRUITLESS_REQUESTS:
                self._mark_unavailable(server, f"{fruitless} replies in a row had no token from the newest weights")
                fruitless = 0
            await asyncio.sleep(INITIAL_PAUSE_SECONDS * (2**fruitless - 1))

    async def _send_request(
        self, server: ServerClient, request: GenerateRequest, prompt_ids: Sequence[int]
    ) -> GenerateResult | None:
        """Return the result, or None if the request was cancelled after a sync.

        On available servers, the sync has already finished or aborted every request that was running. A request that is
        still pending was only queued there, so no token is lost. It is sent again with the new cache_salt, because with
        the old one the server could reuse KV cache that the old weights computed."""
        self._add_idle_time()
        server.in_flight += 1
        task = asyncio.ensure_future(server.generate(request))
        self.pending[task] = server
        try:
            result = await task
            result = result._replace(prompt_ids=self.processor.merge_placeholders(result.prompt_ids))
            validate_result(result, request, prompt_ids, server.url, self.allowed_ids)
            if max(map(self._parse_version, result.labels), default=math.inf) < self._parse_version(request.cache_salt):
                raise ServerUnavailable("it still has the weights of an earlier sync")
            return result
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            return None
        except UserError as error:
            raise UserError(f"example {request.uid!r}: {error}") from error
        except BAD_RESULT_ERRORS as error:
            raise ServerUnavailable(f"its reply cannot be parsed: {describe_error(error)}") from error
        finally:
            del self.pending[task]
            self._add_idle_time()
            server.in_flight -= 1

    async def _hold_new_requests(self) -> None:
        """Make new requests wait until `_cancel_pending_and_resume` is called."""
        self.requests_allowed.clear()

    def _cancel_pending_and_resume(self) -> None:
        """Cancel the requests that are still pending after a sync, and allow new ones. Cancelled requests are sent
        again. With --in-flight keep, cancel only requests to unavailable servers, which may never answer."""
        for task, server in self.pending.items():
            if self.in_flight_mode != "keep" or server.url in self.unavailable:
                task.cancel()
        self.requests_allowed.set()

    def _pick_server(self, uid: str, servers: dict[str, ServerClient]) -> ServerClient | None:
        """Return the server that has the prompt's other samples, or, if there is none, the available server with the
        fewest responses in flight. If no server is available, ask the run to end and return None."""
        server = servers.get(uid)
        if server is None or server.url in self.unavailable:
            usable = self.available_servers()
            if not usable:
                return self._request_stop("none is available")
            first = self.ctx.rank % len(usable)  # ranks start with different servers
            server = servers[uid] = min(usable[first:] + usable[:first], key=lambda server: server.in_flight)
        return server

    def _parse_version(self, label: str) -> int:
        """Return the weights version in a label RUN_ID-VERSION. Raise ServerUnavailable if the label is not from this
        run."""
        run_id, _, number = str(label).rpartition("-")
        if run_id != self.run_id or not number.isdecimal():
            raise ServerUnavailable(f"it samples with weights {label!r}, which this run did not send: it was "
                                    "restarted, or another run uses it")
        return int(number)

    def _mark_unavailable(self, server: ServerClient, why: str) -> None:
        if server.url not in self.unavailable:
            self.unavailable[server.url] = why
            rank = f"rank {self.ctx.rank}: " if self.ctx.world > 1 else ""
            print(f"{rank}rollout server {server.url} is unavailable: {why}; "
                  f"available servers: {len(self.available_servers())}")

    def _request_stop(self, what: str) -> None:
        reasons = "; ".join(f"{url}: {why}" for url, why in self.unavailable.items())
        if not self.should_stop():
            self.request_stop(f"rollout servers: {what} ({reasons}); restart them, then repeat the command; "
                              "for train.py, add --resume auto")

    # --- new weights ---

    def sync(self, weights: GetWeights, changed: bool = True) -> dict[str, float]:
        """Send new weights to the servers and return metrics. All ranks call this together. If the weights have not
        changed since the last sync, send nothing; servers that are back are noticed by the next sync.

        If the servers that answer are the same as in the last sync, they get only the trained weights, otherwise all
        weights. A server that fails is marked unavailable, and the others then get all weights. If no server is left,
        ask the run to end."""
        if not changed and self.has_all_weights:
            return dict.fromkeys(("sync/calls", "sync/bytes", "sync/servers"), 0.0)
        self.calls.run_all([self._hold_new_requests()])
        for unavailable in self.ctx.gather(dict(self.unavailable)):  # from here on, no rank sends requests
            self.unavailable = unavailable | self.unavailable
        label = f"{self.run_id}-{self.weights_version + 1}"
        failed: dict[str, str] = {}
        while True:
            targets, full = self._from_rank0(partial(self._sync_targets, failed))
            for url in self.servers.keys() - failed.keys() - set(targets):
                self._mark_unavailable(self.servers[url], "no answer to /health")
            if not targets:
                self._request_stop("none accepted the new weights")
                self.synced_urls = []
                break
            tensors = iter(self.sender.collect(weights, full, label))
            errors = self._from_rank0(partial(self._send, targets, tensors, full, label), tensors)
            for url in targets:
                if url in errors:
                    self._mark_unavailable(self.servers[url], f"weight sync failed: {errors[url]}")
                elif url in self.unavailable:
                    print(f"rollout server {url} is available again")
                    del self.unavailable[url]
            if not errors:
                break
            failed |= errors
        if (targets and full) or self.trained_tower:
            self.tower_label = label
        self.has_all_weights = True
        self.weights_version += 1
        self.weights_label = label
        self.calls.loop.call_soon_threadsafe(self._cancel_pending_and_resume)
        counts = {"sync/calls": self.sender.n_calls, "sync/bytes": self.sender.n_bytes} if targets else {}
        return {name: float(n) for name, n in counts.items()} | {"sync/servers": float(len(targets))}

    def _from_rank0(self, work: Callable[[], Any], tensors: NamedTensors = ()) -> Any:
        """Return the result of `work`, which only rank 0 runs, on all ranks. All ranks iterate over `tensors` to the
        end, because gathering each tensor is a collective."""
        result = work() if self.ctx.is_main else None
        for _ in tensors:
            pass
        return self.ctx.gather(result)[0]

    def _send(self, targets: Sequence[str], tensors: NamedTensors, full: bool, label: str) -> dict[str, str]:
        """Pause these servers, send them weights, and resume them. Return why servers failed, by URL."""
        servers = [self.servers[url] for url in targets]
        self.synced_urls = []
        _, failed = self.calls.each(servers, lambda server: server.pause(self.in_flight_mode))
        if full and not failed:
            failed = self.sender.connect_to(servers)
        failed = failed or self.sender.sync_weights(tensors, full, label)
        if not failed:
            _, failed = self.calls.each(servers, lambda server: server.resume())
        if failed:
            self.sender.close()
        else:
            self.synced_urls = list(targets)
        return failed

    def _sync_targets(self, failed: Set[str]) -> tuple[list[str], bool]:
        """Return the URLs of all servers that answer, including those marked unavailable, but without those that failed
        in this sync (`failed`). Also return whether they get all weights over a new connection: they do in the first
        sync, and whenever the set of servers has changed."""
        urls = [url for url in self.servers if url not in failed]
        alive = self.calls.run_all([self._is_alive(self.servers[url]) for url in urls])
        targets = [url for url, is_alive in zip(urls, alive, strict=True) if is_alive]
        return targets, not self.has_all_weights or set(targets) != set(self.synced_urls)

    async def _is_alive(self, server: ServerClient) -> bool:
        """Return whether a server answers. A server marked unavailable gets one short try. Any other may just be busy,
        or lose a connection, so it gets two long tries."""
        if server.url in self.unavailable:
            return await server.alive()
        return await server.alive(15.0) or await server.alive(15.0)

    def load_weights(self, named_tensors: NamedTensors) -> dict[str, float]:
        """Send these tensors: all weights the first time, any subset later. Only tests and scripts call this. A run
        calls `sync`, which can get the weights again if a server fails."""
        tensors = list(named_tensors)
        return self.sync(lambda trainable_only: tensors)

    # --- metrics ---

    def _add_idle_time(self) -> None:
        """Add the time since the last call, multiplied by the fraction of servers without a request from this rank.
        Call this before the number of requests in flight changes."""
        now = time.monotonic()
        idle = sum(server.in_flight == 0 for server in self.servers.values()) / len(self.servers)
        self.idle_seconds += idle * (now - self.counted_at)
        self.counted_at = now

    def metrics(self) -> dict[str, float]:
        """Return, for the time since the last call, the fraction in which a server had no request from this rank,
        averaged over the servers."""
        self._add_idle_time()
        seconds, self.reported_at = self.counted_at - self.reported_at, self.counted_at
        idle, self.idle_seconds = self.idle_seconds / seconds, 0.0
        return {"servers_idle": idle}


def validate_result(
    result: GenerateResult, request: GenerateRequest, prompt_ids: Sequence[int], url: str, allowed_ids: Set[int]
) -> None:
    """Raise ServerUnavailable if a result has a token outside `allowed_ids`, an invalid log-probability, an unknown
    finish reason, or lengths that do not match. Raise UserError if check_response does."""
    n = len(result.tokens)
    # only an aborted request may return no tokens
    sizes_match = n == len(result.logprobs) == len(result.labels) <= request.max_tokens and (
        n or result.finish_reason == "abort"
    )
    if not sizes_match or result.finish_reason not in ("stop", "length", "abort"):
        raise ServerUnavailable(
            f"it answered with {n} tokens (at most {request.max_tokens} were requested), {len(result.logprobs)} "
            f"log-probabilities, {len(result.labels)} weights versions and finish reason {result.finish_reason!r}"
        )
    for token in result.tokens:
        if type(token) is not int or token not in allowed_ids:
            raise ServerUnavailable(
                f"it answered with token id {token!r:.40}, which is not in the vocabulary or must not be sampled")
    if any(not isinstance(logprob, int | float) or logprob > 1e-3 for logprob in result.logprobs):
        raise ServerUnavailable("it answered with values that are not log-probabilities")
    check_response(url, result.prompt_ids, prompt_ids, result.logprobs)
