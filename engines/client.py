"""Clients of rollout servers: requests, results, and the base class of the client of each kind of server.

Its subclasses are VLLMClient (engines/vllm_client.py) and SGLangClient (engines/sglang_client.py). They only use HTTP.
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
from layers.vision import ImageInput

MAX_BODY_BYTES = 64 << 20  # of an HTTP response; 100,000 sampled tokens take a fifth of it
# each request opens a new connection: the server may have just closed one that was kept alive
TIMEOUT = httpx2.Timeout(None, connect=30.0)  # ServerClient.request limits the time of the whole HTTP response
HTTP_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=0)


class ServerUnavailable(Exception):
    """Raised if a server cannot be used for now: it is down, hangs, fails, or has weights that this run did not send.
    Its requests are then sent to another server."""


class ConnectionLost(ServerUnavailable):
    """Raised if a connection breaks. The same request may succeed at the second try."""


class EndpointNotFound(UserError):
    """Raised if an endpoint, or what a request names, does not exist (404 or 405)."""


class GenerateRequest(NamedTuple):
    """A request for one response, or for the rest of one."""

    uid: str  # of the prompt, for messages
    ids: list[int]  # with one placeholder for each image or video
    images: list[ImageInput]  # and videos
    max_tokens: int  # max new tokens
    seed: int
    temperature: float
    top_p: float
    cache_salt: str  # label of the weights: the prefix cache is never shared between different weights
    n_routed: int = 0  # the experts of the first n_routed tokens, images expanded, are not needed


class GenerateResult(NamedTuple):
    """The result of a GenerateRequest."""

    prompt_ids: list[int]  # as the model read them, with images expanded
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # stop or length; abort: stopped by a sync, possibly after some tokens
    labels: list[str]  # for each token, the label of the weights that sampled it
    experts: Any = ()  # array as in rollout.Rollout, of the tokens after the first n_routed, except the last


class ServerClient:
    """Base class of the clients of all servers. `banned`: token ids that are never sampled; `eos`: ids that end a
    response.

    A subclass implements these coroutines. They run in one event loop. They raise ServerUnavailable if the server is at
    fault and UserError if the request is:

    limits(sync) -> tuple[int, int] return the max sequence length, and the number of worker processes that join a
                                    broadcast; raise UserError if the server was not started for --sync `sync`
    generate(request) -> GenerateResult
    pause(mode)                     stop sampling; --in-flight: keep running responses for `resume`, abort them (they
                                    return the tokens so far), or wait until they finish
    resume()
    init_weight_transfer(method, group, rank_offset)
                                    prepare for weights by gloo or nccl, as ranks rank_offset, rank_offset + 1, ... of a
                                    process group (`group`: arguments of sync.join_process_group, without backend and
                                    rank), or by disk, without a process group; the first update has all weights
    update(metas, crc)              receive these tensors (sync.TensorMeta) from the process group in this order, and
                                    return once they are loaded; `crc`: checksums to verify, or None
    update_from_disk(file)          load a safetensors file that both sides can read
    end_update(label)               sample with the new weights from now on; they get this label
    load_adapter(folder, label)     do the same for an adapter (PEFT's format) in a folder that both sides can read
    checksums() -> dict[str, str]   return a checksum of each parameter
    """

    kind: ClassVar[str]
    health: ClassVar[str] = "/health"  # an endpoint that answers as long as the server is up
    control: ClassVar[str] = ""  # how to get its control endpoints, for messages
    begin_path: ClassVar[str]  # endpoint that begins a weight update
    end_path: ClassVar[str]
    workers = 1  # number of its processes that join a broadcast; set by `check`

    def __init__(self, url: str, http: httpx2.AsyncClient, timeout: float, eos: Sequence[int], banned: Sequence[int]):
        self.url = url
        self.http = http
        self.timeout = timeout  # seconds for one HTTP request
        self.eos = list(eos)
        self.banned = list(banned)
        self.in_flight = 0  # number of responses that this client waits for

    async def check(self, sync: str, length: int) -> None:
        """Raise UserError unless the server answers, fits --sync, and accepts sequences of `length` tokens."""
        try:
            max_length, self.workers = await self.limits(sync)
        except ServerUnavailable as error:
            raise UserError(f"--servers {self.url}: {error}") from error
        need(max_length >= length,
             f"--servers {self.url} accepts sequences of up to {max_length} tokens, but this run needs {length}; start "
             "it with this run's --data and --max-new-tokens")

    async def start_weight_update(self) -> None:
        """Begin a weight update. If an earlier update was abandoned and is still open, end it first."""
        try:
            await self.post(self.begin_path)
        except (ServerUnavailable, UserError):
            await self.post(self.end_path)
            await self.post(self.begin_path)

    async def post(self, path: str, body: dict | None = None, **params: Any) -> Any:
        """Send a POST request with a JSON body. Return and raise what `request` does."""
        return await self.request("POST", path, json=body or {}, params=params)

    async def request(self, method: str, path: str, **kwargs: Any) -> Any:
        """Send an HTTP request and return the parsed JSON, or the text if the response is not JSON. Raise
        ServerUnavailable after a timeout, a lost connection or a server error, UserError if the request is refused."""
        data = bytearray()
        try:
            async with asyncio.timeout(self.timeout), self.http.stream(
                method, self.url + path, timeout=TIMEOUT, **kwargs
            ) as response:
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > MAX_BODY_BYTES:
                        raise ServerUnavailable(f"{path} answered with more than {MAX_BODY_BYTES} bytes")
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise ServerUnavailable(f"no answer to {path} within {self.timeout:g} s") from error
        except httpx2.HTTPError as error:
            raise ConnectionLost(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        text = data.decode(errors="replace")
        message = f"{path} answered {response.status_code}: {' '.join(text[:2000].split())[:300]}"
        if response.status_code >= 500:
            raise ServerUnavailable(message)
        if response.status_code in (404, 405):
            raise EndpointNotFound(f"--servers {self.url} has no endpoint {path}; {self.control}")
        if response.status_code >= 300:
            raise UserError(f"--servers {self.url}: {message}")
        if not response.headers.get("content-type", "").startswith("application/json"):
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ServerUnavailable(f"{path} answered with invalid JSON: {text[:100]!r}") from error

    async def alive(self, seconds: float = 5.0) -> bool:
        """Return whether the server answers its health check within `seconds`."""
        return await is_reachable(self.http, self.url + self.health, min(seconds, self.timeout))


async def is_reachable(http: httpx2.AsyncClient, url: str, seconds: float) -> bool:
    """Return whether a GET of `url` answers 200 within `seconds`."""
    try:
        async with asyncio.timeout(seconds), http.stream("GET", url, timeout=seconds) as response:
            return response.status_code == 200
    except (httpx2.HTTPError, TimeoutError):
        return False


async def detect_server_kind(url: str, http: httpx2.AsyncClient) -> str:
    """Return the kind of a server, vllm or sglang, from the endpoints it has. Raise UserError if it is neither."""
    for path, kind in (("/version", "vllm"), ("/get_model_info", "sglang")):
        if await is_reachable(http, url + path, 10.0):
            return kind
    raise UserError(f"--servers {url}: no server answers there, or it is neither vLLM nor SGLang; start one with "
                    "`python -m engines.serve`")


async def find_common_kind(urls: Sequence[str]) -> str:
    """Return the kind of all these servers. Raise UserError if one does not answer, or if their kinds differ."""
    async with httpx2.AsyncClient(trust_env=False) as http:
        kinds = await asyncio.gather(*(detect_server_kind(url, http) for url in urls))
    by_url = ", ".join(f"{url} is {kind}" for url, kind in zip(urls, kinds, strict=True))
    need(len(set(kinds)) == 1, f"--servers must all be of one kind, but {by_url}; keep those of one kind")
    return kinds[0]


def spread_labels(spans: Sequence[dict] | None, default: str, n: int) -> list[str]:
    """Return the label of the weights that sampled each of n tokens: the version of the span that holds the token, or
    `default`. Raise ServerUnavailable if a span is outside the n tokens."""
    labels = [default] * n
    for span in spans or ():
        start, end = span["start"], span["end"]
        if not 0 <= start <= end <= n:
            raise ServerUnavailable(f"it answered with a weights version for tokens {start:.3g} to {end:.3g} of {n}")
        labels[start:end] = [span["version"]] * (end - start)
    return labels


def media_data_uri(image: ImageInput) -> str:
    """Return an image or a video as a lossless data URI. The key is written into the files, for servers that identify
    an image by its file's bytes. vLLM reads frames of any image format as video/jpeg."""
    frames = []
    for frame in image.frames:
        file, info = io.BytesIO(), PngInfo()
        info.add_text("key", image.key)
        Image.fromarray(frame).save(file, "PNG", compress_level=1, pnginfo=info)
        frames.append(base64.b64encode(file.getvalue()).decode())
    return f"data:{'video/jpeg' if image.fps else 'image/png'};base64,{','.join(frames)}"


class Calls:
    """A thread with an event loop and an HTTP client, for all requests to servers."""

    def __init__(self) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # each request opens a connection
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(ignore_late_errors)
        threading.Thread(target=self.loop.run_forever, name="servers", daemon=True).start()
        self.http = httpx2.AsyncClient(limits=HTTP_LIMITS, trust_env=False)

    def start(self, work: Coroutine) -> Future:
        """Start a coroutine in the event loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run_all(self, coroutines: Iterable[Coroutine]) -> list[Any]:
        """Run coroutines at the same time. Return their results in order, or raise the first error."""
        return [future.result() for future in list(map(self.start, coroutines))]

    def each(
        self, clients: Iterable[ServerClient], call: Callable[[ServerClient], Coroutine]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Run `call` for all servers at the same time. Return the results, and the errors of the servers that failed,
        both by URL."""
        futures = {client.url: self.start(call(client)) for client in clients}
        wait(futures.values())
        failed = collect_errors(futures)
        return {url: future.result() for url, future in futures.items() if url not in failed}, failed


def collect_errors(futures: dict[str, Future]) -> dict[str, str]:
    """Return the messages of ServerUnavailable and UserError in the futures that are done, by URL. Raise any other
    error."""
    errors = {}
    for url, future in futures.items():
        if error := future.done() and future.exception():
            if not isinstance(error, ServerUnavailable | UserError):
                raise error
            errors[url] = str(error)
    return errors


def ignore_late_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore the errors of requests whose result is no longer needed because another error has ended the run."""
    if not isinstance(context.get("exception"), ServerUnavailable | UserError):
        loop.default_exception_handler(context)
