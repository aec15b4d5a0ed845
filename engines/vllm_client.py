"""The client of a vLLM server. The server must be started by engines.serve or engines/local.py: it needs
engines/worker.py in its workers, /inference/v1/generate, and the control endpoints, which have no password. Tested with
vLLM 0.32.0.
"""

import asyncio
import base64
import io
import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from engines.client import (
    EndpointNotFound,
    GenerateRequest,
    GenerateResult,
    ServerClient,
    ServerUnavailable,
    media_data_uri,
    spread_labels,
)
from engines.sync import TensorMeta
from errors import UserError, need

POLICY_MODEL_NAME = "policy"  # the model's name in requests
NON_FINITE_LOGPROB = -9999.0  # what this endpoint returns for NaN and -inf, which JSON cannot represent


def parse_completion(response: dict, model: str) -> GenerateResult:
    """Parse the response of /inference/v1/generate. `model` is the requested model: the policy, or an adapter, whose
    name is then the weights label of all tokens."""
    [choice] = response["choices"]
    tokens, content = choice["token_ids"], choice["logprobs"]["content"]
    if [entry["token_id"] for entry in content] != tokens:
        raise ValueError("the log-probabilities are not those of the returned tokens")
    labels = spread_labels(choice["weight_versions"] if model == POLICY_MODEL_NAME else None, model, len(tokens))
    logprobs = [entry["logprob"] for entry in content]
    logprobs = [math.nan if logprob <= NON_FINITE_LOGPROB else logprob for logprob in logprobs]
    encoded = choice.get("routed_experts")  # a .npy file in base64
    experts = np.load(io.BytesIO(base64.b64decode(encoded))) if encoded else ()
    return GenerateResult(response["prompt_token_ids"], tokens, logprobs, choice["finish_reason"], labels, experts)


class VLLMClient(ServerClient):
    """A client of one vLLM server. ServerClient documents the methods that are not described here."""

    kind = "vllm"
    begin_path, end_path = "/start_weight_update", "/finish_weight_update"
    control = "start the server with `python -m engines.serve`, which enables it"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.model = POLICY_MODEL_NAME  # or the newest adapter
        self.adapters: list[str] = []
        self.image_names: dict[str, str] = {}  # image key -> name of the image in the server's cache
        self.numbers = itertools.count()  # make image names unique
        self.upload_locks: dict[tuple, asyncio.Lock] = {}  # keys of a prompt's images -> lock

    async def limits(self, sync: str) -> tuple[int, int]:
        """Return (max sequence length, number of workers). Raise UserError unless the server is for adapters exactly if
        --sync is adapter: one with adapters has other layers, so it cannot receive whole weights."""
        paths = (await self.request("GET", "/openapi.json"))["paths"]
        has_adapters, needs_adapters = "/v1/load_lora_adapter" in paths, sync == "adapter"
        need(has_adapters or not needs_adapters, f"--servers {self.url} does not accept adapters; start it with --sync "
             "adapter and this run's --lora-rank")
        need(needs_adapters or not has_adapters, f"--servers {self.url} was started for --sync adapter; start it "
             "without, or use --sync adapter")
        models = await self.request("GET", "/v1/models")
        world = await self.request("GET", "/get_world_size")
        return models["data"][0]["max_model_len"], world["world_size"]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample a response. An image is uploaded once; later requests only name it, and it is uploaded again if the
        server has dropped it."""
        model = self.model
        for _ in range(3):
            try:
                await self._upload_images(request, model)
                names = self.image_names
                references = [{"type": f"{image.kind}_url", "uuid": names[image.key]} for image in request.images]
                return parse_completion(await self._generate(request, model, references), model)
            except (ServerUnavailable, UserError) as error:
                # After a cancelled request the server may wrongly assume that its engine has the image. All requests
                # that name the image then fail, so it is uploaded again under another name.
                if "Cache miss" not in str(error) and "answered 500" not in str(error):
                    raise
                for image in request.images:
                    self.image_names.pop(image.key, None)
        # the server drops images faster than requests can name them, so this request has their data
        parts = await asyncio.to_thread(self._image_parts, request)
        return parse_completion(await self._generate(request, model, parts), model)

    def _image_parts(self, request: GenerateRequest) -> list[dict]:
        """Return the images of a request with their data, under new names if the server does not have them."""
        return [
            {
                "type": f"{image.kind}_url",
                "uuid": self.image_names.get(image.key, f"{image.key}-{next(self.numbers)}"),
                "url": media_data_uri(image),
            }
            for image in request.images
        ]

    async def _upload_images(self, request: GenerateRequest, model: str) -> None:
        """Upload the images that the server does not have, once for all samples of a prompt, by sampling a single
        token. This also puts the prompt into the server's prefix cache."""
        keys = tuple(image.key for image in request.images)
        async with self.upload_locks.setdefault(keys, asyncio.Lock()):
            if not self.image_names.keys() >= set(keys):
                parts = await asyncio.to_thread(self._image_parts, request)
                await asyncio.shield(self._generate(request._replace(max_tokens=1), model, parts))
                self.image_names |= {key: part["uuid"] for key, part in zip(keys, parts, strict=True)}
        self.upload_locks.pop(keys, None)

    async def _generate(self, request: GenerateRequest, model: str, parts: list[dict]) -> dict:
        sampling = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "stop_token_ids": self.eos,
            "ignore_eos": True,  # stop only at stop_token_ids, not at the model's own EOS
            "routed_experts_prompt_start": request.n_routed,
            "logprobs": 0,
            "detokenize": False,
        }
        body = {
            "model": model,
            "token_ids": request.ids,
            "return_token_ids": True,
            "cache_salt": request.cache_salt,
            "sampling_params": sampling,
        }
        if parts:
            body["content_parts"] = parts
        try:
            return await self.post("/inference/v1/generate", body)
        except EndpointNotFound as error:
            if model == POLICY_MODEL_NAME:
                raise
            raise ServerUnavailable(f"it has no adapter {model!r}: it was restarted") from error

    async def pause(self, mode: str) -> None:
        # caches can stay: the KV cache of other weights has another salt, and their image features another name
        await self.post("/pause", mode=mode, clear_cache="false")

    async def resume(self) -> None:
        await self.post("/resume")

    async def init_weight_transfer(self, method: str, group: dict | None, rank_offset: int) -> None:
        await self.start_transfer({"how": method, "info": {"group": group, "rank_offset": rank_offset}})

    async def start_transfer(self, info: dict) -> None:
        """Send a worker.TransferInitInfo to the server's workers."""
        await self.post("/init_weight_transfer_engine", {"init_info": info})

    async def update(self, metas: Sequence[TensorMeta], crc: Sequence[int] | None) -> None:
        names, dtypes, shapes = zip(*metas, strict=True)
        await self.send_update({"names": names, "dtype_names": dtypes, "shapes": shapes, "crc": crc})

    async def send_update(self, info: dict) -> None:
        """Send a worker.TransferUpdateInfo to the server's workers."""
        await self.post("/update_weights", {"update_info": info})

    async def update_from_disk(self, file: Path) -> None:
        await self.send_update({"path": str(file)})

    async def end_update(self, label: str | None) -> None:
        await self.send_update({"check": True})  # fail here: vLLM cannot recover from an error in the next request
        await self.post(self.end_path, {"weight_version": label} if label else {})

    async def set_weights_label(self, label: str) -> None:
        """Set the label of the weights without an update."""
        await self.post("/update_weight_version", {"new_version": label})

    async def load_adapter(self, folder: str, label: str) -> None:
        if label not in self.adapters:
            await self.post("/v1/load_lora_adapter", {"lora_name": label, "lora_path": folder})
            self.adapters.append(label)
        self.model = label
        while len(self.adapters) > 2:  # running responses may still use the previous one
            with suppress(EndpointNotFound):  # a restarted server does not have the old adapter
                await self.post("/v1/unload_lora_adapter", {"lora_name": self.adapters.pop(0)})

    async def checksums(self) -> dict[str, str]:
        return (await self.post("/weight_checker", {"action": "checksum"}))["checksums"]
