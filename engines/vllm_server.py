"""vLLM's server: its command line, with the settings of the in-process engine, and its wire format.

Tested with vLLM 0.32.0. What it needs: engines/vllm_worker.py inside (--worker-extension-cls), /inference/v1/generate
(--enable-scale-out) and the control endpoints (VLLM_SERVER_DEV_MODE=1), which ask nobody for a password.
"""

import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from engines.transfer import Meta
from engines.wire import Answer, Ask, Lost, Missing, Server, data_uri
from errors import UserError, need

POLICY = "policy"  # what the model is called in requests
NO_NUMBER = -9999.0  # what this endpoint says in place of NaN and -inf, which JSON has not
# Our own --vllm settings; the rest of LLM's arguments are flags of `vllm serve`
NO_FLAGS = ("model", "distributed_executor_backend", "enable_sleep_mode", "sleep_level")


def vllm_command(arguments: dict[str, Any], host: str, port: int, lora_rank: int = 0) -> tuple[list[str], dict]:
    """The command of a server with these arguments (engines.vllm.engine_arguments), and the environment that it needs.
    With `lora_rank` it takes adapters (--sync adapter)."""
    root = str(Path(__file__).parent.parent)
    paths = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # the control endpoints
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))),
    }
    path = arguments["model"]
    arguments = {key: value for key, value in arguments.items() if key not in NO_FLAGS} | {
        "host": host,
        "port": port,
        "served_model_name": POLICY,
        "enable_scale_out": True,
        "disable_uvicorn_access_log": True,
        "worker_extension_cls": "engines.vllm_worker.Extension",
        "weight_transfer_config": {"backend": "trainer"},
    }
    if lora_rank:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        ranks = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM knows
        arguments |= {"enable_lora": True, "max_lora_rank": min(r for r in ranks if r >= lora_rank), "max_loras": 2}
    if not torch.cuda.is_available():
        environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", path, *as_flags(arguments)], environment


def as_flags(arguments: dict[str, Any]) -> list[str]:
    """Of a command line."""
    flags = []
    for key, value in arguments.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def parts_of(ask: Ask, data: bool = False) -> list[dict]:
    """The images of a request, by name, or with their data."""
    names = [{"type": "image_url", "uuid": key} for key, _ in ask.images]
    if not data:
        return names
    return [part | {"url": data_uri(image)} for part, (_, image) in zip(names, ask.images, strict=True)]


def answer_of(answer: dict, model: str) -> Answer:
    """`model`: what was asked, the policy or an adapter, which then says which weights."""
    [choice] = answer["choices"]
    tokens, content = choice["token_ids"], choice["logprobs"]["content"]
    if [entry["token_id"] for entry in content] != tokens:
        raise ValueError("log-probabilities are of other tokens")
    labels: list[str] = []
    for span in choice["weight_versions"] or []:
        count = span["end"] - span["start"]
        if not 0 <= count <= len(tokens):
            raise ValueError(f"a version of weights for {count:.3g} of {len(tokens)} tokens")
        labels += [span["version"]] * count
    labels = labels if model == POLICY else [model] * len(tokens)
    if len(labels) != len(tokens):
        raise ValueError(f"{len(labels)} of {len(tokens)} tokens have a version of weights")
    logprobs = [entry["logprob"] for entry in content]
    logprobs = [math.nan if logprob <= NO_NUMBER else logprob for logprob in logprobs]
    return Answer(answer["prompt_token_ids"], tokens, logprobs, choice["finish_reason"], labels)


class VLLMServer(Server):
    kind = "vllm"
    control = "start the server with `python -m engines.serve`, which opens it"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.model = POLICY  # or the newest adapter
        self.adapters: list[str] = []
        self.images: set[str] = set()  # keys of those that it holds
        self.names = 0  # a part of their names
        self.sending: dict[tuple, asyncio.Lock] = {}  # by the keys of a prompt's images

    async def suits(self, sync: str) -> None:
        """A server that takes adapters has other layers, and so takes nothing else."""
        paths = (await self.request("GET", "/openapi.json"))["paths"]
        adapters, wanted = "/v1/load_lora_adapter" in paths, sync == "adapter"
        need(adapters or not wanted, f"--servers {self.url} takes no adapters; start it with --sync adapter and this "
             "run's --lora-rank")
        need(wanted or not adapters, f"--servers {self.url} was started for --sync adapter; start it without, or use "
             "--sync adapter")

    async def limits(self) -> tuple[int, int]:
        models = await self.request("GET", "/v1/models")
        world = await self.request("GET", "/get_world_size")
        return models["data"][0]["max_model_len"], world["world_size"]

    async def generate(self, ask: Ask) -> Answer:
        """An image goes once; requests name it, and only if the server has dropped it is it sent again."""
        model, answer, given = self.model, None, ask
        for tries in range(1, 4):
            names = self.names
            ask = given._replace(images=[(f"{key}-{names}", image) for key, image in given.images])
            try:
                await self._introduce(ask, model)
                answer = await self._generate(ask, model, parts_of(ask))
            except Lost as error:
                # Of a request that was given up the server may believe that its engine has the image. It then fails
                # whoever names it; under another name the image is sent anew
                if "answered 500" not in str(error) or tries == 3:
                    raise
                self.names = max(self.names, names + 1)
            if answer is not None:
                break
        else:  # it drops images faster than they are asked for
            answer = await self._generate(ask, model, await asyncio.to_thread(parts_of, ask, data=True))
        try:
            return answer_of(answer, model)
        except (KeyError, TypeError, ValueError) as error:
            raise Lost(f"/inference/v1/generate answered in another form: {type(error).__name__} {error}") from error

    async def _introduce(self, ask: Ask, model: str) -> None:
        """Send the images that it lacks, once for all samples of a prompt, with a request for a single token; the
        prompt is then in its prefix cache, too."""
        names = tuple(key for key, _ in ask.images)
        async with self.sending.setdefault(names, asyncio.Lock()):
            if not self.images.issuperset(names):
                parts = await asyncio.to_thread(parts_of, ask, data=True)
                await asyncio.shield(self._generate(ask._replace(room=1), model, parts))
                self.images.update(names)
        self.sending.pop(names, None)

    async def _generate(self, ask: Ask, model: str, parts: list[dict]) -> dict | None:
        """None: an image that is only named is gone."""
        sampling = {
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "seed": ask.seed,
            "max_tokens": ask.room,
            "stop_token_ids": self.eos,
            "ignore_eos": True,  # the model's own: these are all
            "logprobs": 0,
            "detokenize": False,
        }
        body = {
            "model": model,
            "token_ids": ask.ids,
            "return_token_ids": True,
            "cache_salt": ask.salt,
            "sampling_params": sampling,
        }
        if parts:
            body["content_parts"] = parts
        try:
            return await self.post("/inference/v1/generate", body)
        except Missing as error:
            if model == POLICY:
                raise
            raise Lost(f"it has no adapter {model!r}: it was started again") from error
        except UserError as error:
            if "Cache miss" not in str(error):
                raise
            self.images -= {part["uuid"] for part in parts}
            return None

    async def pause(self, mode: str) -> None:
        # without emptying caches: keys and values of other weights have another salt, and images another name
        await self.post("/pause", mode=mode, clear_cache="false")

    async def resume(self) -> None:
        await self.post("/resume")

    async def join(self, how: str, group: dict | None, rank_offset: int) -> None:
        info = {} if group is None else {"group": group, "rank_offset": rank_offset}
        await self.start_transfer({"how": how, "info": info})

    async def start_transfer(self, info: dict) -> None:
        await self.post("/init_weight_transfer_engine", {"init_info": info})

    async def begin_update(self) -> None:
        try:
            await self.post("/start_weight_update")
        except Lost as error:
            if "already active" not in str(error):
                raise
            await self.post("/finish_weight_update")  # one that was given up in the middle
            await self.post("/start_weight_update")

    async def update(self, metas: Sequence[Meta], crc: Sequence[int] | None) -> None:
        names, dtypes, shapes = zip(*metas, strict=True)
        await self.send_update({"names": names, "dtype_names": dtypes, "shapes": shapes, "crc": crc})

    async def send_update(self, info: dict) -> None:
        await self.post("/update_weights", {"update_info": info})

    async def update_from_disk(self, folder: str, files: Sequence[str]) -> None:
        for file in files:
            await self.send_update({"path": str(Path(folder) / file)})

    async def end_update(self, label: str | None) -> None:
        await self.send_update({"check": True})  # vLLM could not go on after an error in what follows
        await self.post("/finish_weight_update", {"weight_version": label} if label else {})

    async def name_weights(self, label: str) -> None:
        await self.post("/update_weight_version", {"new_version": label})

    async def load_adapter(self, folder: str, label: str) -> None:
        if label not in self.adapters:
            await self.post("/v1/load_lora_adapter", {"lora_name": label, "lora_path": folder})
            self.adapters.append(label)
        self.model = label
        while len(self.adapters) > 2:  # the one before may still be sampled from
            with suppress(Missing):  # of a server that was started again
                await self.post("/v1/unload_lora_adapter", {"lora_name": self.adapters.pop(0)})

    async def checksums(self) -> dict[str, str]:
        return (await self.post("/weight_checker", {"action": "checksum"}))["checksums"]
