"""The client of a vLLM server. The server was started by engines/local.py: it needs engines/worker.py inside,
/inference/v1/generate, and the control endpoints, which ask nobody for a password. Tested with vLLM 0.32.0.
"""

import asyncio
import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engines.client import (
    EndpointNotFound,
    GenerateRequest,
    GenerateResult,
    ServerClient,
    ServerUnavailable,
    image_data_uri,
    spread_labels,
)
from engines.sync import TensorMeta
from errors import UserError, need

POLICY_MODEL_NAME = "policy"  # what the model is called in requests
NON_FINITE_LOGPROB = -9999.0  # what this endpoint says in place of NaN and -inf, which JSON has not


def parse_completion(answer: dict, model: str) -> GenerateResult:
    """Parse the answer of /inference/v1/generate. `model` is what was asked: the policy, or an adapter, whose name then
    says which weights."""
    [choice] = answer["choices"]
    tokens, content = choice["token_ids"], choice["logprobs"]["content"]
    if [entry["token_id"] for entry in content] != tokens:
        raise ValueError("log-probabilities are of other tokens")
    labels = spread_labels(choice["weight_versions"] if model == POLICY_MODEL_NAME else None, model, len(tokens))
    logprobs = [entry["logprob"] for entry in content]
    logprobs = [math.nan if logprob <= NON_FINITE_LOGPROB else logprob for logprob in logprobs]
    return GenerateResult(answer["prompt_token_ids"], tokens, logprobs, choice["finish_reason"], labels)


class VLLMClient(ServerClient):
    kind = "vllm"
    begin_path, end_path = "/start_weight_update", "/finish_weight_update"
    control = "start the server with `python -m engines.serve`, which opens it"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.model = POLICY_MODEL_NAME  # or the newest adapter
        self.adapters: list[str] = []
        self.names: dict[str, str] = {}  # of images that it holds, by their keys
        self.numbers = itertools.count()  # a part of the names
        self.sending: dict[tuple, asyncio.Lock] = {}  # by the keys of a prompt's images

    async def limits(self, sync: str) -> tuple[int, int]:
        """A server that takes adapters has other layers, and so takes nothing else."""
        paths = (await self.request("GET", "/openapi.json"))["paths"]
        adapters, wanted = "/v1/load_lora_adapter" in paths, sync == "adapter"
        need(adapters or not wanted, f"--servers {self.url} takes no adapters; start it with --sync adapter and this "
             "run's --lora-rank")
        need(wanted or not adapters, f"--servers {self.url} was started for --sync adapter; start it without, or use "
             "--sync adapter")
        models = await self.request("GET", "/v1/models")
        world = await self.request("GET", "/get_world_size")
        return models["data"][0]["max_model_len"], world["world_size"]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """An image goes once; requests name it, and only if the server has dropped it is it sent again."""
        model = self.model
        for _ in range(3):
            try:
                await self._upload_images(request, model)
                named = [{"type": "image_url", "uuid": self.names[key]} for key, _ in request.images]
                return parse_completion(await self._generate(request, model, named), model)
            except (ServerUnavailable, UserError) as error:
                # Of a request that was given up the server may believe that its engine has the image. It then fails
                # whoever names it; under another name the image is sent anew
                if "Cache miss" not in str(error) and "answered 500" not in str(error):
                    raise
                for key, _ in request.images:
                    self.names.pop(key, None)
        # it drops images faster than they are asked for
        parts = await asyncio.to_thread(self._image_parts, request)
        return parse_completion(await self._generate(request, model, parts), model)

    def _image_parts(self, request: GenerateRequest) -> list[dict]:
        """Return the images of a request with their data, under new names where the server does not hold them."""
        return [
            {
                "type": "image_url",
                "uuid": self.names.get(key, f"{key}-{next(self.numbers)}"),
                "url": image_data_uri(image),
            }
            for key, image in request.images
        ]

    async def _upload_images(self, request: GenerateRequest, model: str) -> None:
        """Send the images that it lacks, once for all samples of a prompt, with a request for a single token; the
        prompt is then in its prefix cache, too."""
        keys = tuple(key for key, _ in request.images)
        async with self.sending.setdefault(keys, asyncio.Lock()):
            if not self.names.keys() >= set(keys):
                parts = await asyncio.to_thread(self._image_parts, request)
                await asyncio.shield(self._generate(request._replace(max_tokens=1), model, parts))
                self.names |= {key: part["uuid"] for key, part in zip(keys, parts, strict=True)}
        self.sending.pop(keys, None)

    async def _generate(self, request: GenerateRequest, model: str, parts: list[dict]) -> dict:
        sampling = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "stop_token_ids": self.eos,
            "ignore_eos": True,  # the model's own: these are all
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
            raise ServerUnavailable(f"it has no adapter {model!r}: it was started again") from error

    async def pause(self, mode: str) -> None:
        # without emptying caches: keys and values of other weights have another salt, and images another name
        await self.post("/pause", mode=mode, clear_cache="false")

    async def resume(self) -> None:
        await self.post("/resume")

    async def init_weight_transfer(self, how: str, group: dict | None, rank_offset: int) -> None:
        await self.start_transfer({"how": how, "info": {"group": group, "rank_offset": rank_offset}})

    async def start_transfer(self, info: dict) -> None:
        await self.post("/init_weight_transfer_engine", {"init_info": info})

    async def update(self, metas: Sequence[TensorMeta], crc: Sequence[int] | None) -> None:
        names, dtypes, shapes = zip(*metas, strict=True)
        await self.send_update({"names": names, "dtype_names": dtypes, "shapes": shapes, "crc": crc})

    async def send_update(self, info: dict) -> None:
        await self.post("/update_weights", {"update_info": info})

    async def update_from_disk(self, file: Path) -> None:
        await self.send_update({"path": str(file)})

    async def end_update(self, label: str | None) -> None:
        await self.send_update({"check": True})  # vLLM could not go on after an error in what follows
        await self.post(self.end_path, {"weight_version": label} if label else {})

    async def set_weights_label(self, label: str) -> None:
        await self.post("/update_weight_version", {"new_version": label})

    async def load_adapter(self, folder: str, label: str) -> None:
        if label not in self.adapters:
            await self.post("/v1/load_lora_adapter", {"lora_name": label, "lora_path": folder})
            self.adapters.append(label)
        self.model = label
        while len(self.adapters) > 2:  # the one before may still be sampled from
            with suppress(EndpointNotFound):  # of a server that was started again
                await self.post("/v1/unload_lora_adapter", {"lora_name": self.adapters.pop(0)})

    async def checksums(self) -> dict[str, str]:
        return (await self.post("/weight_checker", {"action": "checksum"}))["checksums"]
