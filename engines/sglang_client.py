"""The client of an SGLang server: sampling and weight sync over HTTP. None of this project's code runs in the server.

Tested with SGLang 0.5.23, on a CPU, with Qwen2-VL, Qwen2.5-VL and Qwen3-VL. Recurrent layers (Qwen3.5) and experts are
untested, because they need kernels that PyPI has only for GPUs; SGLang does not accept all experts in one tensor, as
transformers stores them.
"""

import asyncio
import hashlib
import json
import re
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from engines.client import (
    GenerateRequest,
    GenerateResult,
    ServerClient,
    ServerUnavailable,
    media_data_uri,
    spread_labels,
)
from engines.sync import TensorMeta, read_safetensors
from errors import UserError, need

# a pickle, by name, of SGLang's own class that bans tokens, as the class's to_str() writes it
BAN_PROCESSOR = b"csglang.srt.sampling.custom_logit_processor\nDisallowedTokensLogitsProcessor\n."
# For these model types SGLang identifies images by their files' bytes. With mm_hashes it would look for those hashes in
# prompts that it has filled with its own ones, and fail with an IndexError.
KEYED_BY_FILE_BYTES = ("qwen3_vl", "qwen3_vl_moe")
POLL_SECONDS = 0.05  # between checks whether requests still run

# names of the checkpoint's parameters -> names of SGLang's fused parameters that contain them
FUSED_PARAMETERS = (
    (r"^visual(.*)\.attn\.qkv\.", r"visual\1.attn.qkv_proj."),
    (r"\.[qkv]_proj\.", ".qkv_proj."),
    (r"\.(gate|up)_proj\.", ".gate_up_proj."),
    (r"\.in_proj_(qkv|z)\.", ".in_proj_qkvz."),
    (r"\.in_proj_[ba]\.", ".in_proj_ba."),
)
IGNORED = "rotary_emb.inv_freq"  # SGLang ignores tensors with this in their name


def checkpoint_name(name: str) -> str:
    """Return the name in a checkpoint, which SGLang expects, of a transformers parameter."""
    return name.replace("model.visual.", "visual.", 1).replace("model.language_model.", "model.", 1)


def sglang_names(name: str) -> set[str]:
    """Return the names that SGLang's parameter may have which contains this one (a checkpoint's name)."""
    for pattern, new in FUSED_PARAMETERS:
        name = re.sub(pattern, new, name)
    return {name, name.replace(".self_attn.", ".")}  # Qwen3.5's


class SGLangClient(ServerClient):
    """A client of one SGLang server. ServerClient documents the methods."""

    kind = "sglang"
    begin_path, end_path = "/begin_weight_update", "/end_weight_update"
    health = "/model_info"  # its /health samples a token, which fails while sampling is paused
    control = "use SGLang 0.5.23, which has it"

    accepts_hashes = True  # of images
    group = ""  # name of the process group that the server is in
    names: frozenset[str] = frozenset()  # of the server's parameters and buffers; set by init_weight_transfer
    unsent: frozenset[str] = frozenset()  # parameters of the server that the first, full update still has to send

    async def limits(self, sync: str) -> tuple[int, int]:
        need(sync != "adapter",
             f"--servers {self.url}: SGLang servers do not accept adapters; use --sync gloo, nccl or disk")
        info = await self.request("GET", "/server_info")
        sizes = info["dp_size"], info["pp_size"]
        need(sizes == (1, 1),
             f"--servers {self.url}: SGLang cannot receive weights with (dp_size, pp_size) = {sizes}; start a server "
             "for each replica, with only tensor parallelism")
        model = await self.request("GET", "/model_info")
        self.accepts_hashes = model["model_type"] not in KEYED_BY_FILE_BYTES
        return info["context_length"] or info["max_req_input_len"], info["tp_size"]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        need(request.top_p == 1,
             f"--top-p {request.top_p:g}: SGLang returns log-probabilities before top-p; use --top-p 1")
        body: dict[str, Any] = {
            "input_ids": request.ids,
            "cache_salt": request.cache_salt,
            "sampling_params": {
                "temperature": request.temperature,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "max_new_tokens": request.max_tokens,
                "stop_token_ids": self.eos,
                "ignore_eos": False,  # with True SGLang would also ignore stop_token_ids
                "sampling_seed": request.seed,  # only used with --enable-deterministic-inference (GPUs)
                "custom_params": {"token_ids": self.banned},
            },
            "custom_logit_processor": json.dumps({"callable": BAN_PROCESSOR.hex()}) if self.banned else None,
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_prompt_token_ids": True,
        }
        if request.images:
            body["image_data"] = [media_data_uri(image) for image in request.images]
            if self.accepts_hashes:
                body["mm_hashes"] = [hashlib.sha256(image.key.encode()).hexdigest() for image in request.images]
        response = await self.post("/generate", body)
        return parse_response(response, self.eos, request)

    async def pause(self, mode: str) -> None:
        if mode != "keep":
            await self._drain(abort=mode == "abort")
        await self.post("/pause_generation", {"mode": "abort" if mode == "abort" else "in_place"})

    async def _drain(self, abort: bool) -> None:
        """Wait until no request runs: SGLang's pause has no wait mode, and after an abort it checks only once a second
        whether all requests have ended. The pause that follows aborts or keeps requests that arrive meanwhile."""
        for _ in range(int(self.timeout / POLL_SECONDS) + 1):
            if abort:
                await self.post("/abort_request", {"abort_all": True})
            loads = (await self.request("GET", "/v1/loads", params={"include": "core"}))["loads"]
            if not any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads):
                return
            await asyncio.sleep(POLL_SECONDS)
        raise ServerUnavailable(f"responses are still running after {self.timeout:g} s")

    async def resume(self) -> None:
        await self.post("/continue_generation")

    async def init_weight_transfer(self, method: str, group: dict | None, rank_offset: int) -> None:
        if self.group:
            await self.post("/destroy_weights_update_group", {"group_name": self.group})
            self.group = ""
        sums = await self.checksums()
        self.names = frozenset(sums)
        tied = {"lm_head.weight"} if sums.get("lm_head.weight") == sums.get("model.embed_tokens.weight") else set()
        self.unsent = frozenset(name for name in sums if name.endswith((".weight", "bias", "A_log"))) - tied
        if group is not None:
            body = {"master_address": group["address"], "master_port": group["port"], "world_size": group["world"]}
            body |= {"group_name": group["name"], "backend": method, "rank_offset": rank_offset}
            await self.post("/init_weights_update_group", body)
            self.group = group["name"]

    def translate_names(self, names: Sequence[str]) -> list[str]:
        """Return the names under which SGLang accepts these parameters. Raise UserError for one that it does not have:
        SGLang would silently drop some unknown names, and fail half-way at others."""
        translated = [checkpoint_name(name) for name in names]
        for name, new_name in zip(names, translated, strict=True):
            if not sglang_names(new_name) & self.names:
                why = "does not accept all experts in one tensor" if ".experts." in name else "has no such parameter"
                raise UserError(f"--servers {self.url}: the SGLang server {why}: {name}")
        return translated

    async def update(self, metas: Sequence[TensorMeta], crc: Sequence[int] | None) -> None:
        """Receive tensors from the process group. `crc` is not verified, as SGLang has no request for it."""
        names, dtypes, shapes = zip(*metas, strict=True)
        body = {"dtypes": dtypes, "shapes": shapes, "group_name": self.group, "flush_cache": False}
        path = "/update_weights_from_distributed"
        try:
            translated = self.translate_names(names)
        except UserError:  # receive the tensors, as the other members wait for this server, and ignore them
            await self._post_update(path, [], body | {"names": [f"{name}.{IGNORED}" for name in names]})
            raise
        await self._post_update(path, translated, body | {"names": translated})

    async def _post_update(self, path: str, names: Sequence[str], body: dict) -> None:
        try:
            await self.post(path, body)
        except UserError as error:  # whatever the cause, the server may have a mixture of old and new weights
            raise ServerUnavailable(str(error)) from error
        self.unsent -= set(chain.from_iterable(map(sglang_names, names)))

    async def update_from_disk(self, file: Path) -> None:
        """Load a copy of the file, in its own folder and with the checkpoint's names: SGLang reads all files of a
        folder, and does not know transformers' names."""
        with tempfile.TemporaryDirectory(dir=file.parent, prefix="sglang-") as copy:
            tensors = dict(read_safetensors(file))
            names = self.translate_names(list(tensors))
            save_file(dict(zip(names, tensors.values(), strict=True)), Path(copy) / file.name)
            body = {"model_path": copy, "load_format": "safetensors", "flush_cache": False}
            await self._post_update("/update_weights_from_disk", names, body)

    async def end_update(self, label: str) -> None:
        unsent, self.unsent = sorted(self.unsent), frozenset()
        if unsent:
            raise ServerUnavailable(f"{len(unsent)} parameters were not sent, the first is {unsent[0]}")
        await self.post(self.end_path)
        await self.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        # this drops the old KV cache only if nothing runs; if it stays, its cache salt keeps it from being reused
        async with self.http.stream("POST", f"{self.url}/flush_cache", timeout=self.timeout):
            pass

    async def checksums(self) -> dict[str, str]:
        response = await self.post("/weights_checker", {"action": "checksum"})
        ranks = [rank["checksums"] for rank in response["ranks"]]
        return {name: "-".join(rank[name] for rank in ranks) for name in ranks[0]}


def parse_response(response: dict, eos: Sequence[int], request: GenerateRequest) -> GenerateResult:
    """Parse the response of /generate."""
    info, tokens = response["meta_info"], response["output_ids"]
    finish = info["finish_reason"]["type"]
    if finish not in ("stop", "length", "abort"):
        raise ServerUnavailable(f"/generate ended with {info['finish_reason']}")
    if finish == "stop" and tokens[-1] not in eos:
        raise UserError(
            f"example {request.uid!r}: SGLang stopped at token {tokens[-1]}, which is not an end token of --model; set "
            f"the same eos_token_id ({list(eos)}) in its config.json and generation_config.json"
        )
    pairs = info.get("output_token_logprobs") or []
    if [pair[1] for pair in pairs] != tokens:
        raise ServerUnavailable("/generate answered with log-probabilities that are not those of its tokens")
    logprobs = [pair[0] for pair in pairs]
    labels = spread_labels(info.get("weight_versions"), info["weight_version"], len(tokens))
    return GenerateResult(response.get("prompt_token_ids") or [], tokens, logprobs, finish, labels)
