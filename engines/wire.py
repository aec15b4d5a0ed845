"""One rollout server as its clients see it: what is asked, what is answered, and what a wire format has to say.

engines/vllm_server.py and engines/sglang_server.py are the two there are: subclasses of `Server`.
"""

import asyncio
import base64
import io
import json
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import httpx2
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from errors import UserError

MAX_BYTES = 64 << 20  # of an answer: a response of 100,000 tokens takes a fifth of it


class Lost(Exception):
    """A server that cannot be used for now: gone, hung, failed, or with weights that this run did not send. What it was
    asked is asked of another one."""


class Cut(Lost):
    """A connection that broke: the same may work a second time."""


class Missing(UserError):
    """What a request names is not there."""


class Ask(NamedTuple):
    """For one response, or the rest of one."""

    uid: str  # of the prompt, for messages
    ids: list[int]  # one placeholder for each image
    images: list[tuple[str, Image.Image]]  # key and pixels, at the size that the model sees
    room: int  # tokens at most
    seed: int
    temperature: float
    top_p: float
    salt: str  # of the prefix cache: keys and values of other weights are not gone on from


class Answer(NamedTuple):
    prompt_ids: list[int]  # as the model read them, images expanded
    tokens: list[int]
    logprobs: list[float]
    finish: str  # stop, length; abort: stopped for a sync, with what there was
    labels: list[str]  # of the weights that sampled each token


class Server:
    """What all servers have in common. `banned`: ids that are never sampled; `eos`: ids that end a response.

    A subclass says how its server is asked, in coroutines of one event loop that raise Lost where the server is to
    blame, UserError where what was asked is:

    suits(sync)                     UserError if it was not started for weights that come by --sync
    limits() -> tuple[int, int]     the most tokens of a sequence, and how many processes of it take part in a broadcast
    generate(ask: Ask) -> Answer
    pause(mode)                     sample nothing. Running responses: keep them for `resume`; abort them, which answers
                                    what there is; or wait until they are over
    resume()
    join(how, group, rank_offset)   be ready for weights by gloo or nccl, as ranks rank_offset, rank_offset + 1, ... of
                                    a group (the arguments of transfer.join, without the rank); or by disk, without a
                                    group. What comes first are all weights
    begin_update()
    update(metas, crc)              take these tensors (transfer.Meta) from the group, in this order. Over once it has
                                    them; `crc`: checksums to compare them with, or None
    update_from_disk(folder, files) take the safetensors files of a folder that both sides see
    end_update(label)               what is sampled from now on is of the weights with this label
    load_adapter(folder, label)     the same, of an adapter (PEFT's format) in a folder that both sides see
    checksums() -> dict[str, str]   of its parameters
    """

    kind: ClassVar[str]
    health: ClassVar[str] = "/health"  # what it answers as long as it lives
    control: ClassVar[str] = ""  # how its control endpoints are opened, for messages

    def __init__(self, url: str, http: httpx2.AsyncClient, seconds: float, eos: Sequence[int], banned: Sequence[int]):
        self.url = url
        self.http = http
        self.seconds = seconds  # that an answer may take
        self.eos = list(eos)
        self.banned = list(banned)
        self.in_flight = 0  # responses that this client waits for

    async def post(self, path: str, body: dict | None = None, **params: Any) -> Any:
        """What it answers: JSON, or else text."""
        return await self.request("POST", path, json=body or {}, params=params)

    async def request(self, method: str, path: str, **more: Any) -> Any:
        timeout, data = httpx2.Timeout(self.seconds, connect=min(30.0, self.seconds)), bytearray()
        try:
            # Limits the whole answer; the client's own timeout applies to each piece of it
            async with asyncio.timeout(self.seconds), self.http.stream(
                method, self.url + path, timeout=timeout, **more
            ) as answer:
                async for piece in answer.aiter_bytes():
                    data += piece
                    if len(data) > MAX_BYTES:
                        raise Lost(f"{path} answered more than {MAX_BYTES} bytes")
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise Lost(f"no answer to {path} within {self.seconds:g} s") from error
        except httpx2.HTTPError as error:
            raise Cut(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        text = data.decode(errors="replace")
        told = f"{path} answered {answer.status_code}: {' '.join(text[:2000].split())[:300]}"
        if answer.status_code >= 500:
            raise Lost(told)
        if answer.status_code in (404, 405):
            raise Missing(f"--servers {self.url}: there is no {path}; {self.control}")
        if answer.status_code >= 300:
            raise UserError(f"--servers {self.url}: {told}")
        if not answer.headers.get("content-type", "").startswith("application/json"):
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Lost(f"{path} answered what is no JSON: {text[:100]!r}") from error

    async def alive(self, seconds: float = 5.0) -> bool:
        """Does it answer at all?"""
        try:
            limit = min(seconds, self.seconds)  # of the whole answer
            async with asyncio.timeout(limit), self.http.stream("GET", self.url + self.health, timeout=limit) as answer:
                return answer.status_code == 200
        except (httpx2.HTTPError, TimeoutError):
            return False


async def find_kind(url: str, http: httpx2.AsyncClient) -> str:
    """vllm or sglang, by what it answers."""
    for path, kind in (("/version", "vllm"), ("/get_model_info", "sglang")):
        try:
            async with asyncio.timeout(10.0), http.stream("GET", url + path, timeout=10.0) as answer:
                if answer.status_code == 200:
                    return kind
        except (httpx2.HTTPError, TimeoutError) as error:
            raise UserError(
                f"--servers {url}: {type(error).__name__}: is a server there? `python -m engines.serve` starts one"
            ) from error
    raise UserError(f"--servers {url} is neither vLLM's nor SGLang's server")


def data_uri(image: Image.Image, key: str = "") -> str:
    """Lossless. With a `key` in it, for servers that know images by their files' bytes."""
    file, told = io.BytesIO(), PngInfo()
    told.add_text("key", key)
    image.save(file, "PNG", compress_level=1, pnginfo=told)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
