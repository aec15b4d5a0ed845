"""The client of an SGLang server: requests over HTTP, and how weights get into it.

Nothing of ours runs inside SGLang's server. Tested with SGLang 0.5.23, on a CPU, with Qwen2-VL, Qwen2.5-VL and
Qwen3-VL. Untested are recurrent layers (Qwen3.5) and experts, which need kernels that PyPI has for GPUs only; SGLang
does not take experts that lie in one tensor, as transformers has them.
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
    image_data_uri,
    spread_labels,
)
from engines.sync import TensorMeta, read_safetensors
from errors import UserError, need

# A pickle by name of the class that SGLang has for this, as its to_str() writes it
BAN_PROCESSOR = b"csglang.srt.sampling.custom_logit_processor\nDisallowedTokensLogitsProcessor\n."
# It knows their images by their files' bytes. Given mm_hashes it looks for these in prompts that are filled with hashes
# of its own, and ends with an IndexError
KEYED_BY_FILE_BYTES = ("qwen3_vl", "qwen3_vl_moe")
POLL_SECONDS = 0.05  # seconds between looks at what still runs

# the checkpoint's -> SGLang's own parameters, in which several of them lie side by side
FUSED_PARAMETERS = (
    (r"^visual(.*)\.attn\.qkv\.", r"visual\1.attn.qkv_proj."),
    (r"\.[qkv]_proj\.", ".qkv_proj."),
    (r"\.(gate|up)_proj\.", ".gate_up_proj."),
    (r"\.in_proj_(qkv|z)\.", ".in_proj_qkvz."),
    (r"\.in_proj_[ba]\.", ".in_proj_ba."),
)
IGNORED = "rotary_emb.inv_freq"  # SGLang drops what has this in its name


def checkpoint_name(name: str) -> str:
    """Return the checkpoint's name, by which SGLang takes weights, for one of transformers'."""
    return name.replace("model.visual.", "visual.", 1).replace("model.language_model.", "model.", 1)


def sglang_names(name: str) -> set[str]:
    """What SGLang may call the parameter that holds this one (a checkpoint's name)."""
    for pattern, new in FUSED_PARAMETERS:
        name = re.sub(pattern, new, name)
    return {name, name.replace(".self_attn.", ".")}  # Qwen3.5's


class SGLangClient(ServerClient):
    kind = "sglang"
    begin_path, end_path = "/begin_weight_update", "/end_weight_update"
    health = "/model_info"  # its /health samples a token, and so fails while it is paused
    control = "SGLang 0.5.23 has it"

    takes_hashes = True  # of images
    group = ""  # that it is in
    names: frozenset[str] = frozenset()  # of its own parameters and buffers, since it joined
    unsent: frozenset[str] = frozenset()  # of its parameters, until all have come once

    async def limits(self, sync: str) -> tuple[int, int]:
        need(sync != "adapter", f"--servers {self.url}: SGLang's server takes whole weights: --sync gloo, nccl or disk")
        info = await self.request("GET", "/server_info")
        sizes = info["dp_size"], info["pp_size"]
        need(sizes == (1, 1),
             f"--servers {self.url}: with dp_size and pp_size {sizes} SGLang takes no weights; start a server for each "
             "replica, with tensor parallelism alone")
        model = await self.request("GET", "/model_info")
        self.takes_hashes = model["model_type"] not in KEYED_BY_FILE_BYTES
        return info["context_length"] or info["max_req_input_len"], info["tp_size"]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        need(request.top_p == 1,
             f"--top-p {request.top_p:g}: SGLang tells log-probabilities before top-p; use --top-p 1")
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
                "ignore_eos": False,  # or it ignores stop_token_ids, too
                "sampling_seed": request.seed,  # heeded with --enable-deterministic-inference, which CPUs have not
                "custom_params": {"token_ids": self.banned},
            },
            "custom_logit_processor": json.dumps({"callable": BAN_PROCESSOR.hex()}) if self.banned else None,
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_prompt_token_ids": True,
        }
        if request.images:
            body["image_data"] = [image_data_uri(image, key) for key, image in request.images]
            if self.takes_hashes:
                body["mm_hashes"] = [hashlib.sha256(key.encode()).hexdigest() for key, _ in request.images]
        answer = await self.post("/generate", body)
        return parse_response(answer, self.eos, request)

    async def pause(self, mode: str) -> None:
        if mode != "keep":
            await self._drain(abort=mode == "abort")
        await self.post("/pause_generation", {"mode": "abort" if mode == "abort" else "in_place"})

    async def _drain(self, abort: bool) -> None:
        """Until nothing runs: SGLang has no mode to wait, and looks once a second whether what it aborts is over. What
        is asked in the meantime is aborted, or kept, by the pause that follows."""
        for _ in range(int(self.timeout / POLL_SECONDS) + 1):
            if abort:
                await self.post("/abort_request", {"abort_all": True})
            loads = (await self.request("GET", "/v1/loads", params={"include": "core"}))["loads"]
            if not any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads):
                return
            await asyncio.sleep(POLL_SECONDS)
        raise ServerUnavailable(f"responses still run after {self.timeout:g} s")

    async def resume(self) -> None:
        await self.post("/continue_generation")

    async def init_weight_transfer(self, how: str, group: dict | None, rank_offset: int) -> None:
        if self.group:
            await self.post("/destroy_weights_update_group", {"group_name": self.group})
            self.group = ""
        sums = await self.checksums()
        self.names = frozenset(sums)
        tied = {"lm_head.weight"} if sums.get("lm_head.weight") == sums.get("model.embed_tokens.weight") else set()
        self.unsent = frozenset(name for name in sums if name.endswith((".weight", "bias", "A_log"))) - tied
        if group is not None:
            asked = {"master_address": group["address"], "master_port": group["port"], "world_size": group["world"]}
            asked |= {"group_name": group["name"], "backend": how, "rank_offset": rank_offset}
            await self.post("/init_weights_update_group", asked)
            self.group = group["name"]

    def translate_names(self, names: Sequence[str]) -> list[str]:
        """As SGLang takes them. Of those that it does not know it would drop some, and stop half-way at others."""
        theirs = [checkpoint_name(name) for name in names]
        for name, their in zip(names, theirs, strict=True):
            if not sglang_names(their) & self.names:
                told = "takes no experts that lie in one tensor" if ".experts." in name else "has no such parameter"
                raise UserError(f"--servers {self.url}: SGLang's server {told}: {name}")
        return theirs

    async def update(self, metas: Sequence[TensorMeta], crc: Sequence[int] | None) -> None:
        """SGLang has nothing that could look at `crc`."""
        given, dtypes, shapes = zip(*metas, strict=True)
        asked = {"dtypes": dtypes, "shapes": shapes, "group_name": self.group, "flush_cache": False}
        path = "/update_weights_from_distributed"
        try:
            names = self.translate_names(given)
        except UserError:  # received, for the others of the group, and dropped
            await self._take(path, [], asked | {"names": [f"{name}.{IGNORED}" for name in given]})
            raise
        await self._take(path, names, asked | {"names": names})

    async def _take(self, path: str, names: Sequence[str], body: dict) -> None:
        try:
            await self.post(path, body)
        except UserError as error:  # whatever failed, some weights may be new and some old
            raise ServerUnavailable(str(error)) from error
        self.unsent -= set(chain.from_iterable(map(sglang_names, names)))

    async def update_from_disk(self, file: Path) -> None:
        """Through a copy of the file under the checkpoint's names: SGLang reads whole folders, and its own names."""
        with tempfile.TemporaryDirectory(dir=file.parent, prefix="sglang-") as copy:
            tensors = dict(read_safetensors(file))
            names = self.translate_names(list(tensors))
            save_file(dict(zip(names, tensors.values(), strict=True)), Path(copy) / file.name)
            asked = {"model_path": copy, "load_format": "safetensors", "flush_cache": False}
            await self._take("/update_weights_from_disk", names, asked)

    async def end_update(self, label: str) -> None:
        unsent, self.unsent = sorted(self.unsent), frozenset()
        if unsent:
            raise ServerUnavailable(f"{len(unsent)} parameters were not sent, the first is {unsent[0]}")
        await self.post(self.end_path)
        await self.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        # keys and values of old weights, if nothing runs; salts keep those that are left apart
        async with self.http.stream("POST", f"{self.url}/flush_cache", timeout=self.timeout):
            pass

    async def checksums(self) -> dict[str, str]:
        answer = await self.post("/weights_checker", {"action": "checksum"})
        ranks = [rank["checksums"] for rank in answer["ranks"]]
        return {name: "-".join(rank[name] for rank in ranks) for name in ranks[0]}


def parse_response(answer: dict, eos: Sequence[int], request: GenerateRequest) -> GenerateResult:
    """Return the result of an answer of /generate."""
    info, tokens = answer["meta_info"], answer["output_ids"]
    finish = info["finish_reason"]["type"]
    if finish not in ("stop", "length", "abort"):
        raise ServerUnavailable(f"/generate ended with {info['finish_reason']}")
    if finish == "stop" and tokens[-1] not in eos:
        raise UserError(
            f"example {request.uid!r}: SGLang stopped at token {tokens[-1]}, which is no end token of --model: "
            f"its config.json and generation_config.json should name the same eos_token_id ({list(eos)})"
        )
    pairs = info.get("output_token_logprobs") or []
    if [pair[1] for pair in pairs] != tokens:
        raise ServerUnavailable("/generate answered with log-probabilities of other tokens")
    logprobs = [pair[0] for pair in pairs]
    labels = spread_labels(info.get("weight_versions"), info["weight_version"], len(tokens))
    return GenerateResult(answer.get("prompt_token_ids") or [], tokens, logprobs, finish, labels)
