"""HFEngine: rollouts with transformers' own modelling code and a plain key-value cache. The reference for any engine.

Each prompt and its images go through the model once per group, finished rows leave the batch, and a sample's randomness
depends on (seed, uid, sample) alone, never on what else is in the batch.

Axes: P prompts, B rows being decoded, L cached tokens, H hidden size, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from errors import need
from layers.recurrent import RecurrentState
from model import Processor, VisionCache, embed, language_hidden, mrope_positions, vision_features
from rollout import NOT_FINITE, Engine, OnRollout, Prompt, Rollout, Sampling, finished_rollout
from utils import derive_seed


class KVCache:
    """Keys and values of all layers, in buffers that grow by doubling; what transformers' attention calls is
    `update`."""

    def __init__(self):
        self.layers: dict[int, list[Tensor]] = {}  # layer -> [keys, values], (rows, heads, capacity, dim)
        self.recurrent: dict[int, RecurrentState] = {}  # of layers that keep no keys and values
        self.length = 0

    def update(self, key: Tensor, value: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        end = self.length + key.shape[2]
        buffers = self.layers.setdefault(layer, [key[:, :, :0], value[:, :, :0]])
        for i, new in enumerate((key, value)):
            if buffers[i].shape[2] < end:
                grown = new.new_empty(*new.shape[:2], max(2 * buffers[i].shape[2], end + 32), new.shape[3])
                grown[:, :, : self.length] = buffers[i][:, :, : self.length]
                buffers[i] = grown
            buffers[i][:, :, self.length : end] = new
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def get_seq_length(self, *_) -> int:
        return self.length

    def take(self, rows: Tensor) -> None:
        """Keep these rows, in this order, repeats allowed."""
        for buffers in self.layers.values():
            buffers[:] = [buffer.index_select(0, rows) for buffer in buffers]
        self.recurrent = {layer: state.take(rows) for layer, state in self.recurrent.items()}


class SharedPrompts:
    """Attention of rows being decoded to prompts whose keys and values are held once, not once per row.

    Rows lie in slots, `width` per prompt, so that the prompt's part of attention is one product for all its rows; the
    responses' part has a cache of its own. All rows have responses of equal length, so only prompts need a mask.
    """

    def __init__(self, cache: KVCache, valid_PL: Tensor, width: int):
        self.layers = {i: [b[:, :, : cache.length] for b in buffers] for i, buffers in cache.layers.items()}
        self.bias_P11L = torch.where(valid_PL, 0.0, -torch.inf)[:, None, None]
        self.width = width
        self.slot_B = torch.arange(len(valid_PL) * width, device=valid_PL.device)

    def take(self, rows: Tensor) -> None:
        """Keep these rows, in increasing order; prompts and slots without any are closed."""
        prompt_B = (self.slot_B // self.width)[rows]
        kept_P, prompt_B, count_P = prompt_B.unique_consecutive(return_inverse=True, return_counts=True)
        first_P = count_P.cumsum(0) - count_P
        if len(kept_P) < len(self.bias_P11L):
            self.layers = {i: [b.index_select(0, kept_P) for b in buffers] for i, buffers in self.layers.items()}
            self.bias_P11L = self.bias_P11L[kept_P]
        self.width = int(count_P.max())
        self.slot_B = prompt_B * self.width + torch.arange(len(rows), device=rows.device) - first_P[prompt_B]

    def by_prompt(self, x_B: Tensor) -> Tensor:
        """(B, key heads, repeat, D) -> (P, key heads, width * repeat, D), with zeros in slots without a row."""
        slots = len(self.bias_P11L) * self.width
        if len(x_B) < slots:
            x_B = x_B.new_zeros(slots, *x_B.shape[1:]).index_copy_(0, self.slot_B, x_B)
        return x_B.unflatten(0, (-1, self.width)).transpose(1, 2).flatten(2, 3)

    def by_row(self, x_P: Tensor) -> Tensor:
        """The inverse: (P, key heads, width * repeat, D) -> (B, key heads, repeat, D)."""
        x_B = x_P.unflatten(2, (self.width, -1)).transpose(1, 2).flatten(0, 1)
        return x_B if len(x_B) == len(self.slot_B) else x_B[self.slot_B]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query (B, heads, 1, D); key and value (B, key heads, response tokens, D) -> (B, heads, 1, D)."""
        prompt_key, prompt_value = self.layers[layer]
        grouped = (query * scale).reshape(len(query), key.shape[1], -1, query.shape[3])
        to_prompt = self.by_row(self.by_prompt(grouped) @ prompt_key.transpose(2, 3) + self.bias_P11L.to(query.dtype))
        to_response = grouped @ key.transpose(2, 3)
        weights = torch.cat([to_prompt, to_response], dim=-1).float().softmax(dim=-1).to(query.dtype)
        on_prompt, on_response = weights.split([to_prompt.shape[-1], to_response.shape[-1]], dim=-1)
        out = on_response @ value + self.by_row(self.by_prompt(on_prompt) @ prompt_value)
        return out.reshape(query.shape)


def sample_tokens(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row by inverting the cumulative distribution at uniform_B in [0, 1); returns ids and logprobs (B,).

    Logprobs are those of the distribution sampled from: after temperature and top-p. UserError for logits that are no
    distribution: such tokens would be made up, and their log-probabilities NaN.
    """
    bad = int((~logits_BV.logsumexp(dim=-1).isfinite()).sum())
    need(not bad, NOT_FINITE.format(what=f"logits of {bad} of {len(logits_BV)} rows"))
    if sampling.temperature == 0:
        token_B = logits_BV.argmax(dim=-1)
        return token_B, logits_BV.log_softmax(dim=-1).gather(1, token_B[:, None])[:, 0]
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


def logits_of(hidden_BH: Tensor, head_HV: Tensor) -> Tensor:
    """(B, V) fp32, summed in fp32 whatever the inputs are in, as the trainer's are (kernels.py)."""
    if head_HV.dtype == torch.float32:
        return hidden_BH.float() @ head_HV
    return torch.mm(hidden_BH, head_HV, out_dtype=torch.float32)


class HFEngine(Engine):
    """Rollouts with transformers, in process, with a replica of its own: weights reach it only by load_weights."""

    max_rows = 256  # responses that are decoded together

    def __init__(
        self, hf: nn.Module, processor: Processor, device: torch.device, vision_cache: VisionCache | None = None
    ):
        self.hf = hf.to(device).eval().requires_grad_(False)
        self.processor = processor
        self.device = device
        self.vision_cache = vision_cache
        self.banned = processor.banned(hf.config.text_config.vocab_size).to(device)
        self.eos = torch.tensor(processor.eos_ids, device=device)
        self.dtype = hf.dtype

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, on_rollout: OnRollout | None = None
    ) -> list[Rollout]:
        """n rollouts of each prompt, in the order of the prompts."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))  # similar lengths pad little
        step = max(1, self.max_rows // n)
        rollouts = []
        for start in range(0, len(order), step):
            rollouts += self._generate([prompts[i] for i in order[start : start + step]], n, sampling, on_rollout)
        place = {i: k * n for k, i in enumerate(order)}
        return list(chain.from_iterable(rollouts[place[i] : place[i] + n] for i in range(len(prompts))))

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """Copy weights in place; how many calls and bytes that took. An unknown name is an error: it would mean stale
        weights."""
        own = dict(self.hf.named_parameters())
        seen, n_bytes = set(), 0
        for name, tensor in named_tensors:
            if name not in own:
                raise ValueError(f"load_weights: the engine has no parameter {name!r}")
            own[name].copy_(tensor)
            seen.add(name)
            n_bytes += tensor.nbytes
        self.complete = self.complete or seen == own.keys()
        return {"sync/calls": float(len(seen) > 0), "sync/bytes": float(n_bytes)}

    def _prefill(self, prompts: Sequence[Prompt], cache: KVCache) -> tuple[Tensor, Tensor, Tensor]:
        """Left-padded forward of the prompts: last hidden (P, H), valid (P, L) bool, next position (P,)."""
        image_token, merge_size = self.processor.image_token_id, self.processor.merge_size
        ids, positions, images = [], [], []
        for prompt in prompts:
            grids = [image.grid_thw for image in prompt.images]
            ids.append(torch.tensor(prompt.token_ids))
            positions.append(mrope_positions(prompt.token_ids, grids, image_token, merge_size).t())
            images += prompt.images
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        ids_PL, positions_3PL = pad(ids).to(self.device), pad(positions).permute(2, 0, 1).to(self.device)
        valid_PL = pad([torch.ones(len(x), dtype=torch.bool) for x in ids]).to(self.device)
        length = ids_PL.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
        # A padding query attends to itself, or its softmax would have nothing to sum over.
        mask = (causal & valid_PL[:, None, :]) | torch.eye(length, dtype=torch.bool, device=self.device)
        features, deep = vision_features(self.hf, images, self.vision_cache) if images else (None, [])
        embeds = embed(self.hf, ids_PL, features, image_token)
        hidden = language_hidden(self.hf, embeds, positions_3PL, mask[:, None], deep, ids_PL == image_token, cache)
        cache.length = length
        return hidden[:, -1], valid_PL, positions_3PL.amax(dim=(0, 2)) + 1

    def _generate(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, on_rollout: OnRollout | None
    ) -> list[Rollout]:
        """As generate, for prompts that are decoded together."""
        prompt_cache, cache = KVCache(), KVCache()
        hidden, valid_PL, position = self._prefill(prompts, prompt_cache)
        shared = SharedPrompts(prompt_cache, valid_PL, n)
        prompt_B = torch.arange(len(prompts), device=self.device).repeat_interleave(n)
        hidden_BH, position_B = hidden[prompt_B], position[prompt_B]
        cache.recurrent = {layer: state.take(prompt_B) for layer, state in prompt_cache.recurrent.items()}

        n_rows = len(prompts) * n
        uniform = torch.empty(n_rows, sampling.max_new_tokens, dtype=torch.float64)
        for row in range(n_rows):
            seed = derive_seed(sampling.seed, prompts[row // n].uid, row % n)
            torch.rand(sampling.max_new_tokens, generator=torch.Generator().manual_seed(seed), out=uniform[row])
        tokens: list[list[int]] = [[] for _ in range(n_rows)]
        logprobs: list[list[float]] = [[] for _ in range(n_rows)]
        rollouts: dict[int, Rollout] = {}  # by row
        alive_B = torch.arange(n_rows, device=self.device)  # which row each row still in the batch was
        head_HV = self.hf.get_output_embeddings().weight.t()
        if head_HV.device.type == "cpu":
            head_HV = head_HV.float()  # once: a CPU has no product of 16-bit numbers with sums of 32 bits

        for t in range(sampling.max_new_tokens):
            logits_BV = logits_of(hidden_BH, head_HV)
            logits_BV[:, self.banned] = -torch.inf
            token_B, logp_B = sample_tokens(logits_BV, sampling, uniform[alive_B.cpu(), t].to(self.device))
            for row, token, logp in zip(alive_B.tolist(), token_B.tolist(), logp_B.tolist(), strict=True):
                tokens[row].append(token)
                logprobs[row].append(logp)
            ended_B = torch.isin(token_B, self.eos)
            if t + 1 == sampling.max_new_tokens or self.interrupted():
                ended_B = torch.ones_like(ended_B)
            for row in alive_B[ended_B].tolist():
                prompt = prompts[row // n]
                rollouts[row] = finished_rollout(prompt, row % n, tokens[row], logprobs[row], self.processor)
                if on_rollout is not None:
                    on_rollout(rollouts[row])
            if len(rollouts) == n_rows:
                break
            if ended_B.any():
                keep = (~ended_B).nonzero()[:, 0]
                cache.take(keep)
                shared.take(keep)
                alive_B, token_B, position_B = alive_B[keep], token_B[keep], position_B[keep]
            embeds = self.hf.get_input_embeddings()(token_B[:, None])
            positions = position_B[None, :, None].expand(3, -1, -1)
            hidden_BH = language_hidden(self.hf, embeds, positions, cache=cache, plan=shared)[:, 0]
            cache.length += 1
            position_B = position_B + 1
        return [rollouts[row] for row in range(n_rows)]
