"""Prompts in, rollouts out. An engine is anything with four verbs: generate, load_weights, sleep, wake.

HFEngine is the reference: transformers' own modelling code with a plain key-value cache. Each prompt and its pictures
go through the model once per group, finished rows leave the batch, and a sample's randomness depends on
(seed, uid, sample) alone, never on what else is in the batch.

Axes: P prompts, B rows being decoded, L cached tokens, V vocabulary.
"""

import hashlib
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from PIL import Image

from model import ImageInput, Processor, RecurrentState, VisionCache, embed, language_hidden, mrope_positions, vision_features
from prepare_data import Example, decode_image
from utils import derive_seed


@dataclass(eq=False)
class Prompt:
    """An example as the model reads it: image tokens expanded, pictures as patches."""

    uid: str
    token_ids: list[int]
    images: list[ImageInput]
    example: Example


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


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    temperature: float = 1.0  # 0 = greedy; logprobs are then those at temperature 1
    top_p: float = 1.0
    seed: int = 0


def make_prompts(examples: Sequence[Example], processor: Processor, blank: bool = False) -> list[Prompt]:
    """Decode and tokenise. With `blank` every picture is replaced by a white one of its size: what is still answered
    right was not seen but guessed."""

    def one(example: Example) -> Prompt:
        images = []
        for data in example.images:
            picture = decode_image(data)
            if blank:
                picture = Image.new("RGB", picture.size, "white")
            key = f"blank-{picture.size}" if blank else hashlib.sha1(data).hexdigest()
            images.append(processor.image(key, picture))
        try:
            ids = processor.encode(example.messages, images)
        except ValueError as e:
            raise ValueError(f"example {example.uid!r}: {e}") from e
        return Prompt(example.uid, ids, images, example)

    with ThreadPoolExecutor(4) as pool:  # decoding and resizing release the GIL
        return list(pool.map(one, examples))


def drop_long_prompts(
    examples: Sequence[Example], processor: Processor, max_tokens: int
) -> tuple[list[Example], list[str], list[int]]:
    """Examples whose prompt, image tokens included, has at most max_tokens tokens; a line for each one dropped; and the
    lengths of those kept."""
    kept, dropped, lengths = [], [], []
    for example in examples:
        sizes = [Image.open(io.BytesIO(data)).size for data in example.images]
        n = processor.count_tokens(example.messages, sizes)
        if n <= max_tokens:
            kept.append(example)
            lengths.append(n)
        else:
            dropped.append(f"{example.uid}: {n} prompt tokens, over --max-prompt-tokens {max_tokens}")
    return kept, dropped, lengths


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


def sample_tokens(logits_BV: torch.Tensor, sampling: Sampling, uniform_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row by inverting the cumulative distribution at uniform_B in [0, 1); returns ids and logprobs (B,).

    Logprobs are those of the distribution sampled from: after temperature and top-p.
    """
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

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Copy weights in place; the number of tensors. An unknown name is an error: it would mean stale weights."""
        own = dict(self.hf.named_parameters())
        count = 0
        for name, tensor in named_tensors:
            if name not in own:
                raise ValueError(f"load_weights: the engine has no parameter {name!r}; its names start like {next(iter(own))!r}")
            own[name].copy_(tensor)
            count += 1
        return count

    def sleep(self) -> None:
        """Nothing is held between calls but the weights."""

    def wake(self) -> None:
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
        head = self.hf.get_output_embeddings().weight
        for t in range(sampling.max_new_tokens):
            logits = (hidden @ head.t()).float()
            logits[:, self.banned] = -torch.inf
            token_B, logp_B = sample_tokens(logits, sampling, uniform[alive.cpu(), t].to(self.device))
            ended = torch.isin(token_B, self.eos)
            for row, token, logp, end in zip(alive.tolist(), token_B.tolist(), logp_B.tolist(), ended.tolist(), strict=True):
                tokens[row].append(token)
                logprobs[row].append(logp)
                if end:
                    finish[row] = "stop"
            if t + 1 == sampling.max_new_tokens or bool(ended.all()):
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
        texts = self.processor.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        groups = []
        for i, prompt in enumerate(prompts):
            span = range(i * n, (i + 1) * n)
            groups.append([
                Rollout(prompt.uid, row - i * n, prompt.token_ids + tokens[row], len(prompt.token_ids),
                        [True] * len(tokens[row]), logprobs[row], prompt.images, finish[row], texts[row])
                for row in span
            ])
        return groups
