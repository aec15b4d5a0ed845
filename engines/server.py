"""ServerEngine: rollouts from servers (vLLM's, SGLang's) on this machine or others. Tokens go in, tokens come out.

Every process of the trainer asks for its own prompts, from one event loop in a thread; a prompt's samples go to one
server, prompts to the server with the fewest responses in flight. Rank 0 alone sends weights (engines/transfer.py).

A server that fails, hangs or answers with other weights than this run's is lost: what it was asked is asked of another
one, with the same seeds, and when it answers again it gets all weights with the next sync. One line says so, each time.
"""

import asyncio
import math
import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence, Set
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import torch

from engines.sglang_server import SGLangServer
from engines.transfer import make_transfer
from engines.vllm import asked_of
from engines.vllm_server import VLLMServer
from engines.wire import Answer, Ask, Cut, Lost, Server, find_kind
from errors import UserError, describe_error, need
from model import Processor
from rollout import (
    NOT_FINITE,
    WAIT,
    Engine,
    Responses,
    Rollout,
    Sampling,
    Weights,
    add_response,
    difference,
    never,
)
from utils import Context, NamedTensors, derive_seed

# Each request has a connection of its own: one that was kept may just have been closed by the server
HTTP_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=0)

MOST_FRUITLESS = 6  # answers in a row without a token, before their server is left out
FIRST_PAUSE = 0.1  # seconds after the first of them; each further pause is about twice as long


def refuse(why: str) -> None:
    raise UserError(why)


WIRES = {wire.kind: wire for wire in (VLLMServer, SGLangServer)}


class ServerEngine(Engine):
    """`banned`: ids that are never sampled. `trained_tower`: images are read anew with each version of the weights.
    `max_model_len`: the longest sequence that will be asked for. `folder` is where --sync disk and adapter write; all
    servers must see it. `save_adapter(folder)`, collective, writes the policy's adapter (--sync adapter).
    `give_up(message)` raises UserError, or asks the run to save and end, if no server is left."""

    concurrent = True

    def __init__(
        self,
        urls: Sequence[str],
        processor: Processor,
        dtype: torch.dtype,
        ctx: Context,
        *,
        vocab_size: int,
        banned: Sequence[int],
        max_model_len: int,
        folder: Path,
        sync: str = "gloo",
        in_flight: str = "abort",
        seconds: float = 600.0,
        trained_tower: bool = False,
        save_adapter: Callable[[Path], None] | None = None,
        interrupted: Callable[[], bool] = never,
        give_up: Callable[[str], None] = refuse,
    ):
        super().__init__(interrupted)
        self.give_up = give_up
        self.processor = processor
        self.dtype = dtype
        self.ctx = ctx
        self.in_flight = in_flight
        self.seconds = seconds
        self.trained_tower = trained_tower
        self.max_model_len = max_model_len
        self.ids = set(range(vocab_size)).difference(banned)  # that may be sampled
        self.run = ctx.gather(os.urandom(4).hex())[0]  # tells this run's weights from those of others
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # a request has a connection of its own
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(unheard)
        threading.Thread(target=self.loop.run_forever, name="servers", daemon=True).start()
        self.http = httpx2.AsyncClient(limits=HTTP_LIMITS, trust_env=False)
        self.may_ask = asyncio.Event()  # not while weights change
        self.asked: dict[asyncio.Task, Server] = {}  # requests without an answer yet
        self.lost: dict[str, str] = {}  # url -> why
        self.counted_at = self.reported_at = time.monotonic()
        self.idle_seconds = 0.0
        self.servers = self._connect(urls, processor, banned, sync)
        self.transfer = make_transfer(sync, self, folder, save_adapter)
        self.label = ""  # of the weights that servers have
        self.tower = ""  # of those with the vision tower that they have: their features of images outlive a sync

    def _connect(
        self, urls: Sequence[str], processor: Processor, banned: Sequence[int], sync: str
    ) -> dict[str, Server]:
        urls = [url.rstrip("/") for url in urls]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        need(not twice, f"--servers {' '.join(twice)} is given twice; give each once")
        kinds = self.wait_for([find_kind(url, self.http) for url in urls])
        told = ", ".join(f"{url} is {kind}'s" for url, kind in zip(urls, kinds, strict=True))
        need(len(set(kinds)) == 1, f"--servers must be of one kind: {told}; leave some out")
        servers = {}
        for url in urls:
            servers[url] = WIRES[kinds[0]](url, self.http, self.seconds, processor.eos_ids, banned)
        limits = self.wait_for([self._limits(server, sync) for server in servers.values()])
        self.workers = dict(zip(urls, [n for _, n in limits], strict=True))  # processes, of each server
        for url, (longest, _) in zip(urls, limits, strict=True):
            short = f"--servers {url} takes sequences of {longest} tokens, and this run needs {self.max_model_len}"
            need(longest >= self.max_model_len, f"{short}; start it with this run's --data and --max-new-tokens")
        return servers

    async def _limits(self, server: Server, sync: str) -> tuple[int, int]:
        try:
            await server.suits(sync)
            return await server.limits()
        except Lost as error:
            raise UserError(f"--servers {server.url}: {error}") from error

    # --- between threads ---

    def start(self, work: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait_for(self, works: Iterable[Coroutine]) -> list[Any]:
        """Their results, in order; the first error of any."""

        async def together() -> list[Any]:
            return await asyncio.gather(*works)

        return self.start(together()).result()

    # --- sampling ---

    def usable(self) -> list[Server]:
        return [server for url, server in self.servers.items() if url not in self.lost]

    def sample(self, responses: Responses, sampling: Sampling) -> None:
        """Each response is a request of its own. May be called from several threads at once."""
        done: queue.SimpleQueue = queue.SimpleQueue()
        servers: dict[str, Server] = {}  # of each prompt
        running: dict[Future, Rollout] = {}
        try:
            while True:
                over = responses.over  # before taking: what comes in between is taken the next time
                for rollout in responses.take(0.0 if running else WAIT):
                    future = self.start(self._respond(rollout, responses.room(rollout), sampling, servers))
                    running[future] = rollout
                    future.add_done_callback(done.put)
                if self.interrupted() or (over and not running):
                    return
                try:
                    finished = [done.get(timeout=WAIT)] if running else []
                except queue.Empty:
                    continue
                while not done.empty():
                    finished.append(done.get())
                for future in finished:
                    rollout = running.pop(future)
                    tokens, logprobs, versions = future.result()
                    add_response(rollout, tokens, logprobs, self.processor, versions)
                    responses.added(rollout)
        finally:
            for future in running:
                future.cancel()

    async def _respond(
        self, rollout: Rollout, room: int, sampling: Sampling, servers: dict[str, Server]
    ) -> tuple[list[int], list[float], list[int]]:
        """Tokens, their log-probabilities, and the versions of the weights that sampled them. What a sync interrupts
        (--in-flight abort) goes on from what there is, under the new weights."""
        uid, sample, turn, length, room, short, pil_images = asked_of(rollout, room, self.processor)
        assert length + room <= self.max_model_len, "the engine was started for shorter sequences"
        so_far = rollout.prompt.token_ids + rollout.response
        keys = [image.key for image in rollout.prompt.images + rollout.images]
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        cut: set[Server] = set()  # those that lost this request once
        fruitless = 0  # answers in a row that brought no token
        while True:
            await self.may_ask.wait()
            server = self._server_of(uid, servers)
            if server is None:
                await asyncio.Event().wait()  # until the run ends
            images = [(f"{key}-{self.tower}", image) for key, image in zip(keys, pil_images, strict=True)]
            again = [len(tokens)] if tokens else []  # other random numbers than those of its beginning
            seed = derive_seed(sampling.seed, uid, sample, *([turn] if turn > 1 or again else []), *again)
            ask = Ask(uid, short + tokens, images, room - len(tokens), seed, sampling.temperature, sampling.top_p,
                      self.label)
            try:
                answer = await self._ask(server, ask)
                numbers = checked(answer, ask, so_far + tokens, server.url, self._version, self.ids) if answer else []
            except Lost as error:
                if not (isinstance(error, Cut) and server not in cut and await server.alive()):
                    self._lose(server, str(error))
                cut.add(server)
                continue
            except UserError:
                raise
            except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:  # JSON of another form
                self._lose(server, f"its answer cannot be read: {describe_error(error)}")
                continue
            if numbers and max(numbers) < self._version(ask.salt):
                self._lose(server, "it still has the weights of an earlier sync")
                continue
            if answer and (self.in_flight == "keep" or set(answer.labels) <= {ask.salt}):
                tokens += answer.tokens
                logprobs += answer.logprobs
                versions += numbers
                if answer.finish != "abort" or len(tokens) == room:  # or it was aborted with its last token
                    return tokens, logprobs, versions
            # A sync aborts requests once. A server that keeps doing so is asked more and more slowly, then left out
            synced = ask.salt != self.label or not self.may_ask.is_set()
            fruitless = 0 if synced or len(ask.ids) < len(short + tokens) else fruitless + 1
            if fruitless == MOST_FRUITLESS:
                self._lose(server, f"{fruitless} answers in a row held no token of the newest weights")
                fruitless = 0
            await asyncio.sleep(FIRST_PAUSE * (2**fruitless - 1))

    async def _ask(self, server: Server, ask: Ask) -> Answer | None:
        """None: new weights overtook it. It was not running yet when they came, so nothing is lost; but its prompt
        would be gone on from as the old ones read it."""
        self._count_idle()
        server.in_flight += 1
        task = asyncio.ensure_future(server.generate(ask))
        self.asked[task] = server
        try:
            return await task
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            return None
        except UserError as error:
            raise UserError(f"example {ask.uid!r}: {error}") from error
        finally:
            del self.asked[task]
            self._count_idle()
            server.in_flight -= 1

    async def _stop_asking(self) -> None:
        self.may_ask.clear()

    def _ask_again(self) -> None:
        """After a sync. A server that is lost may never go on with what it was at."""
        for task, server in self.asked.items():
            if self.in_flight != "keep" or server.url in self.lost:
                task.cancel()
        self.may_ask.set()

    def _server_of(self, uid: str, servers: dict[str, Server]) -> Server | None:
        """That of the prompt's other samples, or the one with the fewest responses in flight. None: no server is left,
        and the run has been asked to end."""
        server = servers.get(uid)
        if server is None or server.url in self.lost:
            usable = self.usable()
            if not usable:
                return self._give_up("none is left")
            first = self.ctx.rank % len(usable)  # processes do not all begin with the same one
            server = servers[uid] = min(usable[first:] + usable[:first], key=lambda one: one.in_flight)
        return server

    def _version(self, label: str) -> int:
        run, _, number = str(label).rpartition("-")
        if run != self.run or not number.isdecimal():
            raise Lost(f"it samples with weights {label!r}, which this run did not send: it was started again, or "
                       "another run uses it")
        return int(number)

    def _lose(self, server: Server, why: str) -> None:
        if server.url not in self.lost:
            self.lost[server.url] = why
            rank = f"rank {self.ctx.rank}: " if self.ctx.world > 1 else ""
            print(f"{rank}--servers {server.url} is left out: {why}; {len(self.usable())} others go on")

    def _give_up(self, what: str) -> None:
        """UserError, or once there are steps to save the run is asked to end."""
        why = "; ".join(f"{url}: {why}" for url, why in self.lost.items())
        told = f"--servers: {what} ({why}); start them again, then repeat the command (in training with --resume auto)"
        if not self.interrupted():
            self.give_up(told)

    # --- new weights ---

    def sync(self, weights: Weights) -> dict[str, float]:
        """On all processes. What a server lacks it gets: one that is new, or back, all weights; the others what is
        trained. One that fails is lost, and the others get all weights. Where none is left the run is asked to end."""
        self.wait_for([self._stop_asking()])
        for theirs in self.ctx.gather(dict(self.lost)):  # all have stopped asking
            self.lost = theirs | self.lost
        label = f"{self.run}-{self.version + 1}"
        tried: set[str] = set()  # in vain
        while True:
            targets, whole = self._broadcast(partial(self._targets, tried))
            for url in self.servers:
                if url not in targets and url not in tried:
                    self._lose(self.servers[url], "no answer to /health")
            if not targets:
                self._give_up("none takes new weights")
                self.transfer.members = []
                sent: dict[str, float] = {}
                break
            sent = self.transfer.send(weights, [self.servers[url] for url in targets], whole, label)
            failed = self._broadcast(lambda: self.transfer.failed)
            for url in targets:
                if url in failed:
                    self._lose(self.servers[url], f"new weights: {failed[url]}")
                elif url in self.lost:
                    print(f"--servers {url} is used again")
                    del self.lost[url]
            if not failed:
                break
            tried |= set(failed)
        if (targets and whole) or self.trained_tower:
            self.tower = label
        self.complete = True
        self.version += 1
        self.label = label
        self.loop.call_soon_threadsafe(self._ask_again)
        return sent | {"sync/servers": float(len(targets))}

    def _broadcast(self, of_main: Callable[[], Any]) -> Any:
        """What rank 0 says, on all."""
        return self.ctx.gather(of_main() if self.ctx.main else None)[0]

    def _targets(self, without: set[str]) -> tuple[list[str], bool]:
        """Servers that get the next weights, lost ones that answer again among them; and whether they get all weights,
        in a new transfer group: at first, and whenever they are others than before."""
        urls = [url for url in self.servers if url not in without]
        alive = self.wait_for([self._answers(self.servers[url]) for url in urls])
        targets = [url for url, answers in zip(urls, alive, strict=True) if answers]
        return targets, not self.complete or set(targets) != set(self.transfer.members)

    async def _answers(self, server: Server) -> bool:
        """One that is lost is not waited for; another may be busy, or drop a connection."""
        if server.url in self.lost:
            return await server.alive()
        return await server.alive(15.0) or await server.alive(15.0)

    def load_weights(self, named_tensors: NamedTensors) -> dict[str, float]:
        """All weights, or once it has had them all, some. For tests and scripts: a run calls `sync`, which can send
        them again."""
        held = list(named_tensors)
        return self.sync(lambda trainable_only: held)

    # --- the rest of an engine ---

    def _count_idle(self) -> None:
        """Adds up the time since the last change, times the share of servers without anything to do."""
        now = time.monotonic()
        idle = sum(server.in_flight == 0 for server in self.servers.values()) / len(self.servers)
        self.idle_seconds += idle * (now - self.counted_at)
        self.counted_at = now

    def metrics(self) -> dict[str, float]:
        """Since the last call: the share of time in which a server had none of this process's requests, on average."""
        self._count_idle()
        seconds, self.reported_at = self.counted_at - self.reported_at, self.counted_at
        idle, self.idle_seconds = self.idle_seconds / seconds, 0.0
        return {"servers_idle": idle}


def unheard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What a request failed with that nobody waits for any more, as another one has ended the run."""
    if not isinstance(context.get("exception"), Lost | UserError):
        loop.default_exception_handler(context)


def checked(
    answer: Answer, ask: Ask, so_far: Sequence[int], url: str, version: Callable[[str], int], ids: Set[int]
) -> list[int]:
    """Return the versions of the weights that sampled an answer's tokens. Raise Lost unless the tokens are of `ids`,
    and each has one finite log-probability."""
    if answer.prompt_ids != list(so_far):
        raise UserError(
            f"example {ask.uid!r}: {difference(answer.prompt_ids, so_far)} ({url}): another prompt would be trained on "
            "than answered; check --min-pixels, --max-pixels and preprocessor_config.json, and those of the server"
        )
    n = len(answer.tokens)
    sizes = n == len(answer.logprobs) == len(answer.labels) and (answer.finish != "abort") <= n <= ask.room
    if not sizes or answer.finish not in ("stop", "length", "abort"):
        raise Lost(f"it answered {n} tokens of {ask.room}, {len(answer.logprobs)} log-probabilities, "
                   f"{len(answer.labels)} versions, finish reason {answer.finish!r}")
    for token in answer.tokens:
        if type(token) is not int or token not in ids:
            raise Lost(f"it answered token id {token!r:.40}, which is not in the vocabulary or must not be sampled")
    if any(not isinstance(logprob, int | float) or logprob > 1e-3 for logprob in answer.logprobs):
        raise Lost("it answered what are no log-probabilities")
    finite = all(map(math.isfinite, answer.logprobs))
    need(finite, NOT_FINITE.format(what=f"log-probabilities of {url}'s answer to example {ask.uid!r}"))
    return [version(label) for label in answer.labels]
