"""A rollout server as the trainer sees it: what it is asked, what it answers, and what the client of each kind of
server implements.

The kinds are engines/vllm_client.py and engines/sglang_client.py: subclasses of ServerClient, which only speak HTTP.
"""

import asyncio
import base64
import io
import json
import resource
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, ClassVar, NamedTuple

import httpx2
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from errors import UserError, need

MAX_BODY_BYTES = 64 << 20  # of an answer: a response of 100,000 tokens takes a fifth of it
# Each request has a connection of its own: one that was kept may just have been closed by the server
TIMEOUT = httpx2.Timeout(None, connect=30.0)  # the whole answer has a limit of its own
HTTP_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=0)


class ServerUnavailable(Exception):
    """A server that cannot be used for now: it is gone, hangs, failed, or has weights that this run did not send. Its
    requests are sent to another server."""


class ConnectionLost(ServerUnavailable):
    """A connection that broke: the same request may work a second time."""


class EndpointNotFound(UserError):
    """What a request names is not there."""


class GenerateRequest(NamedTuple):
    """A request for one response, or for the rest of one."""

    uid: str  # of the prompt, for messages
    ids: list[int]  # one placeholder for each image
    images: list[tuple[str, Image.Image]]  # key and pixels, at the size that the model sees
    max_tokens: int  # max new tokens
    seed: int
    temperature: float
    top_p: float
    cache_salt: str  # of the prefix cache: keys and values of other weights are never reused


class GenerateResult(NamedTuple):
    """The answer to a GenerateRequest."""

    prompt_ids: list[int]  # as the model read them, images expanded
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # stop, length; abort: stopped for a sync, with what there was
    labels: list[str]  # of the weights that sampled each token


class ServerClient:
    """What the clients of all servers have in common. `banned`: ids that are never sampled; `eos`: ids that end a
    response.

    A subclass implements these coroutines. They run in one event loop, and raise ServerUnavailable if the server is to
    blame, UserError if the request is:

    limits(sync) -> tuple[int, int] the longest sequence, and how many of its processes take part in a broadcast. Raise
                                    UserError if the server was not started for weights that come by --sync
    generate(request) -> GenerateResult
    pause(mode)                     sample nothing. Running responses: keep them for `resume`; abort them, which answers
                                    what there is; or wait until they are over
    resume()
    join(how, group, rank_offset)   get ready for weights by gloo or nccl, as ranks rank_offset, rank_offset + 1, ... of
                                    a process group (the arguments of sync.join_process_group, without the rank), or by
                                    disk, without a process group. The first update brings all weights
    update(metas, crc)              receive these tensors (sync.TensorMeta) from the process group, in this order;
                                    returns once it has them. `crc`: checksums to compare them with, or None
    update_from_disk(file)          read a safetensors file that both sides see
    end_update(label)               from now on sample from the weights with this label
    load_adapter(folder, label)     the same, for an adapter (PEFT's format) in a folder that both sides see
    checksums() -> dict[str, str]   of its parameters
    """

    kind: ClassVar[str]
    health: ClassVar[str] = "/health"  # what it answers as long as it lives
    control: ClassVar[str] = ""  # how its control endpoints are opened, for messages
    begin_path: ClassVar[str]  # which begins an update
    end_path: ClassVar[str]
    workers = 1  # its processes that take part in a broadcast, known after `check`

    def __init__(self, url: str, http: httpx2.AsyncClient, timeout: float, eos: Sequence[int], banned: Sequence[int]):
        self.url = url
        self.http = http
        self.timeout = timeout  # seconds that an answer may take
        self.eos = list(eos)
        self.banned = list(banned)
        self.in_flight = 0  # responses that this client waits for

    async def check(self, sync: str, length: int) -> None:
        """Raise UserError unless the server answers, suits --sync, and takes sequences of `length` tokens."""
        try:
            longest, self.workers = await self.limits(sync)
        except ServerUnavailable as error:
            raise UserError(f"--servers {self.url}: {error}") from error
        need(longest >= length, f"--servers {self.url} takes sequences of {longest} tokens, and this run needs {length}"
             "; start it with this run's --data and --max-new-tokens")

    async def start_weight_update(self) -> None:
        try:
            await self.post(self.begin_path)
        except (ServerUnavailable, UserError):  # an update that was given up is still open
            await self.post(self.end_path)
            await self.post(self.begin_path)

    async def post(self, path: str, body: dict | None = None, **params: Any) -> Any:
        """Return what the server answers: JSON, or else text."""
        return await self.request("POST", path, json=body or {}, params=params)

    async def request(self, method: str, path: str, **more: Any) -> Any:
        data = bytearray()
        try:
            async with asyncio.timeout(self.timeout), self.http.stream(
                method, self.url + path, timeout=TIMEOUT, **more
            ) as answer:
                async for piece in answer.aiter_bytes():
                    data += piece
                    if len(data) > MAX_BODY_BYTES:
                        raise ServerUnavailable(f"{path} answered more than {MAX_BODY_BYTES} bytes")
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise ServerUnavailable(f"no answer to {path} within {self.timeout:g} s") from error
        except httpx2.HTTPError as error:
            raise ConnectionLost(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        text = data.decode(errors="replace")
        message = f"{path} answered {answer.status_code}: {' '.join(text[:2000].split())[:300]}"
        if answer.status_code >= 500:
            raise ServerUnavailable(message)
        if answer.status_code in (404, 405):
            raise EndpointNotFound(f"--servers {self.url}: there is no {path}; {self.control}")
        if answer.status_code >= 300:
            raise UserError(f"--servers {self.url}: {message}")
        if not answer.headers.get("content-type", "").startswith("application/json"):
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ServerUnavailable(f"{path} answered what is no JSON: {text[:100]!r}") from error

    async def alive(self, seconds: float = 5.0) -> bool:
        """Return whether the server answers at all."""
        return await is_reachable(self.http, self.url + self.health, min(seconds, self.timeout))


async def is_reachable(http: httpx2.AsyncClient, url: str, seconds: float) -> bool:
    """Return whether there is an answer within some seconds, and no error."""
    try:
        async with asyncio.timeout(seconds), http.stream("GET", url, timeout=seconds) as answer:
            return answer.status_code == 200
    except (httpx2.HTTPError, TimeoutError):
        return False


async def detect_server_kind(url: str, http: httpx2.AsyncClient) -> str:
    """Return the kind of a server, vllm or sglang, by what it answers. Raise UserError if it is neither."""
    for path, kind in (("/version", "vllm"), ("/get_model_info", "sglang")):
        if await is_reachable(http, url + path, 10.0):
            return kind
    raise UserError(f"--servers {url}: no server answers there, or it is neither vLLM's nor SGLang's; `python -m "
                    "engines.serve` starts one")


async def find_common_kind(urls: Sequence[str]) -> str:
    """Return the kind of these servers. Raise UserError if one does not answer, or if their kinds differ."""
    async with httpx2.AsyncClient(trust_env=False) as http:
        kinds = await asyncio.gather(*(detect_server_kind(url, http) for url in urls))
    each = ", ".join(f"{url} is {kind}'s" for url, kind in zip(urls, kinds, strict=True))
    need(len(set(kinds)) == 1, f"--servers must be of one kind: {each}; leave some out")
    return kinds[0]


def spread_labels(spans: Sequence[dict] | None, default: str, n: int) -> list[str]:
    """Return the label of the weights that sampled each of n tokens, by spans of them that servers answer."""
    labels = [default] * n
    for span in spans or ():
        start, end = span["start"], span["end"]
        if not 0 <= start <= end <= n:
            raise ServerUnavailable(f"it answered a version of weights for tokens {start:.3g} to {end:.3g} of {n}")
        labels[start:end] = [span["version"]] * (end - start)
    return labels


def image_data_uri(image: Image.Image, key: str = "") -> str:
    """Return an image as a lossless data URI. `key` is written into it, for servers that know images by their files'
    bytes."""
    file, info = io.BytesIO(), PngInfo()
    info.add_text("key", key)
    image.save(file, "PNG", compress_level=1, pnginfo=info)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class Calls:
    """An event loop in a thread of its own, where all requests to servers run, and their HTTP client."""

    def __init__(self) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # a request has a connection of its own
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(ignore_late_errors)
        threading.Thread(target=self.loop.run_forever, name="servers", daemon=True).start()
        self.http = httpx2.AsyncClient(limits=HTTP_LIMITS, trust_env=False)

    def start(self, work: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run_all(self, works: Iterable[Coroutine]) -> list[Any]:
        """Return their results, in order, or raise the first error."""
        return [future.result() for future in list(map(self.start, works))]

    def each(
        self, clients: Iterable[ServerClient], call: Callable[[ServerClient], Coroutine]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Call all these servers at once. Return the answers, and why the other servers failed, both by URL."""
        futures = {client.url: self.start(call(client)) for client in clients}
        wait(futures.values())
        failed = collect_errors(futures)
        return {url: future.result() for url, future in futures.items() if url not in failed}, failed


def collect_errors(futures: dict[str, Future]) -> dict[str, str]:
    """Return what those that are over failed with, by URL."""
    errors = {}
    for url, future in futures.items():
        if error := future.done() and future.exception():
            if not isinstance(error, ServerUnavailable | UserError):
                raise error
            errors[url] = str(error)
    return errors


def ignore_late_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Drop the error of a request that nobody waits for any more, because another error has ended the run."""
    if not isinstance(context.get("exception"), ServerUnavailable | UserError):
        loop.default_exception_handler(context)
