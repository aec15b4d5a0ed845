"""HFEngine: rollouts with transformers' own modelling code and a plain key-value cache. The reference for any engine.

Each prompt and its images go through the model once per group, what an environment says goes through it once and after
what was sampled, finished rows leave the batch, and a sample's randomness depends on (seed, uid, sample) alone, never
on what else is in the batch.

Axes: P prompts, B rows of a batch, R rows that are computed now, M tokens of each, L cached tokens, H hidden size, V
vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import TopPLogitsWarper

from errors import need
from layers.recurrent import RecurrentState
from model import ImageInput, Processor, VisionCache, embed_inputs, mrope_positions, run_language_model, vision_features
from rollout import (
    IDLE_POLL_SECONDS,
    NOT_FINITE_MESSAGE,
    Engine,
    Prompt,
    Rollout,
    RolloutQueue,
    SamplingParams,
    add_response,
    never,
)
from utils import derive_seed


class PromptCache:
    """Keys and values of prompts, as transformers' attention hands them over when the prompts go through the model."""

    def __init__(self) -> None:
        self.layers: dict[int, list[Tensor]] = {}  # layer -> [keys, values], (P, key heads, L, D)
        self.recurrent: dict[int, RecurrentState] = {}  # of layers that keep no keys and values

    def update(self, key: Tensor, value: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        self.layers[layer] = [key, value]
        return key, value

    def get_seq_length(self, *_) -> int:
        return 0


def sample_tokens(logits_BV: Tensor, sampling: SamplingParams, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row by inverting the cumulative distribution at uniform_B in [0, 1); returns ids and logprobs (B,).

    Logprobs are those of the distribution sampled from: after temperature and top-p. UserError for logits that are no
    distribution: such tokens would be made up, and their log-probabilities NaN.
    """
    greedy = sampling.temperature == 0
    logp_BV = (logits_BV if greedy else logits_BV / sampling.temperature).log_softmax(dim=-1)
    bad = int(logp_BV[:, 0].isnan().sum())  # a row that is no distribution is NaN throughout
    need(not bad, NOT_FINITE_MESSAGE.format(what=f"logits of {bad} of {len(logits_BV)} rows"))
    if greedy:
        token_B = logits_BV.argmax(dim=-1)
    else:
        # float64: with 150,000 tokens a float32 sum is off by more than a rare token's probability
        if sampling.top_p < 1:
            logp_BV = TopPLogitsWarper(sampling.top_p)(None, logp_BV.double()).log_softmax(dim=-1)
        cdf_BV = logp_BV.double().exp().cumsum(dim=-1)
        total_B = cdf_BV[:, -1]
        # rounding must not carry u up to the total: the search would run off the end, or into tokens of probability 0
        u_B = torch.minimum(uniform_B.to(cdf_BV) * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
        token_B = torch.searchsorted(cdf_BV, u_B[:, None], right=True)[:, 0]
    return token_B, logp_BV.gather(1, token_B[:, None])[:, 0]


def compute_logits(hidden_BH: Tensor, head_HV: Tensor) -> Tensor:
    """(B, V) fp32, summed in fp32 whatever the inputs are in, as the trainer's are (kernels.py)."""
    if head_HV.dtype == torch.float32:
        return hidden_BH.float() @ head_HV
    return torch.mm(hidden_BH, head_HV, out_dtype=torch.float32)


@dataclass(eq=False)
class DecodeRow:
    """A rollout that is being sampled, or waits for its environment."""

    rollout: Rollout
    uniform: Iterator[float]  # a number from 0 to 1 for each token it may sample
    position: int  # M-RoPE's, of its next token
    n_seen: int = 0  # tokens after the prompt that went through the model
    n_images: int = 0  # images among them
    tokens: list[int] = field(default_factory=list)  # of the response that is being sampled
    logprobs: list[float] = field(default_factory=list)
    active: bool = True  # is it being sampled?


class DecodeBatch:
    """Rows whose prompts went through the model together, what it has computed of them, and their attention (a plan of
    layers/attention.py).

    Prompts' keys and values are held once, not once per row. Rows lie in slots, `width` per prompt, so that the
    prompt's part of attention is one product for all its rows. What comes after it is in buffers that grow by doubling,
    in which a row sees its own tokens up to the one that asks.
    """

    def __init__(
        self, rows: list[DecodeRow], prompt_B: Tensor, hidden_PH: Tensor, valid_PL: Tensor, prompts: PromptCache
    ):
        self.rows = rows
        self.hidden_BH = hidden_PH[prompt_B]  # which the next token is sampled from
        self.prompts = prompts.layers
        self.bias_P11L = torch.where(valid_PL, 0.0, -torch.inf)[:, None, None]
        self.own: dict[int, list[Tensor]] = {}  # layer -> [keys, values], (B, key heads, capacity, D)
        self.recurrent = {layer: state.select_rows(prompt_B) for layer, state in prompts.recurrent.items()}
        self._place(prompt_B, prompt_B.bincount())

    @property
    def active_rows(self) -> list[int]:
        return [b for b, row in enumerate(self.rows) if row.active]

    def _place(self, prompt_B: Tensor, count_P: Tensor) -> None:
        self.width = int(count_P.max())
        first_P = count_P.cumsum(0) - count_P
        self.slot_B = prompt_B * self.width + torch.arange(len(prompt_B), device=prompt_B.device) - first_P[prompt_B]

    def drop_finished(self) -> None:
        """Keep the rows whose rollout is not over; prompts without any are dropped, too."""
        keep = [b for b, row in enumerate(self.rows) if not row.rollout.ended_by]
        if 0 < len(keep) < len(self.rows):
            index = torch.tensor(keep, device=self.hidden_BH.device)
            self.hidden_BH = self.hidden_BH[index]
            self.own = {i: [b.index_select(0, index) for b in buffers] for i, buffers in self.own.items()}
            self.recurrent = {layer: state.select_rows(index) for layer, state in self.recurrent.items()}
            prompt_B = (self.slot_B // self.width)[index]
            kept_P, prompt_B, count_P = prompt_B.unique_consecutive(return_inverse=True, return_counts=True)
            if len(kept_P) < len(self.bias_P11L):
                self.prompts = {i: [b.index_select(0, kept_P) for b in layer] for i, layer in self.prompts.items()}
                self.bias_P11L = self.bias_P11L[kept_P]
            self._place(prompt_B, count_P)
        self.rows = [self.rows[b] for b in keep]

    def prepare(self, numbers: list[int], n_tokens: int) -> None:
        """The next forward is of M tokens of each of these rows, R, after those that went through the model."""
        device, lengths = self.slot_B.device, [self.rows[b].n_seen for b in numbers]
        self.all_rows = len(numbers) == len(self.rows)
        self.rows_R = torch.tensor(numbers, device=device)
        self.slot_R = self.slot_B[self.rows_R]
        self.at_RM = torch.tensor(lengths, device=device)[:, None] + torch.arange(n_tokens, device=device)
        self.end = max(lengths) + n_tokens
        self.even = self.all_rows and len(set(lengths)) == 1  # as those of single responses are
        self.bias_R11ML = None
        if n_tokens > 1 or len(set(lengths)) > 1:
            later_RML = torch.arange(self.end, device=device) > self.at_RM[..., None]
            self.bias_R11ML = torch.where(later_RML, -torch.inf, 0.0)[:, None, None]

    def append(self, layer: int, new: Sequence[Tensor]) -> list[Tensor]:
        """Add keys and values, (R, key heads, M, D), and return those of these rows so far, (R, key heads, end, D)."""
        empty = [x.new_empty(len(self.rows), x.shape[1], 0, x.shape[3]) for x in new]
        buffers = self.own.setdefault(layer, empty)
        for i, x in enumerate(new):
            have = buffers[i].shape[2]
            if have < self.end:  # zeros: what a shorter row has not written yet is read, if with weight 0
                buffers[i] = F.pad(buffers[i], (0, 0, 0, max(have, self.end + 32 - have)))
            if self.even:
                buffers[i][:, :, self.end - x.shape[2] : self.end] = x
            else:
                buffers[i][self.rows_R[:, None], :, self.at_RM] = x.transpose(1, 2)
        return [b[:, :, : self.end] if self.all_rows else b[self.rows_R, :, : self.end] for b in buffers]

    def to_prompt_layout(self, x_R: Tensor) -> Tensor:
        """(R, key heads, repeat * M, D) -> (P, key heads, width * repeat * M, D), with zeros in slots without a row."""
        slots = len(self.bias_P11L) * self.width
        if len(x_R) < slots:
            x_R = x_R.new_zeros(slots, *x_R.shape[1:]).index_copy_(0, self.slot_R, x_R)
        return x_R.unflatten(0, (-1, self.width)).transpose(1, 2).flatten(2, 3)

    def to_row_layout(self, x_P: Tensor) -> Tensor:
        """The inverse: (P, key heads, width * repeat * M, D) -> (R, key heads, repeat * M, D)."""
        x_R = x_P.unflatten(2, (self.width, -1)).transpose(1, 2).flatten(0, 1)
        return x_R if len(x_R) == len(self.slot_R) else x_R[self.slot_R]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query (R, heads, M, D); key and value (R, key heads, M, D) -> (R, heads, M, D)."""
        prompt_key, prompt_value = self.prompts[layer]
        key, value = self.append(layer, (key, value))
        grouped = (query * scale).reshape(len(query), key.shape[1], -1, query.shape[3])
        to_prompt = self.to_row_layout(
            self.to_prompt_layout(grouped) @ prompt_key.transpose(2, 3) + self.bias_P11L.to(query.dtype)
        )
        to_own = grouped @ key.transpose(2, 3)
        if self.bias_R11ML is not None:
            to_own = (to_own.unflatten(2, (-1, query.shape[2])) + self.bias_R11ML.to(query.dtype)).flatten(2, 3)
        weights = torch.cat([to_prompt, to_own], dim=-1).float().softmax(dim=-1).to(query.dtype)
        on_prompt, on_own = weights.split([to_prompt.shape[-1], to_own.shape[-1]], dim=-1)
        out = on_own @ value + self.to_row_layout(self.to_prompt_layout(on_prompt) @ prompt_value)
        return out.reshape(query.shape)


class HFEngine(Engine):
    """Rollouts with transformers, in process, with a replica of its own: weights reach it only by load_weights."""

    max_rows = 256  # responses that are decoded together

    def __init__(
        self,
        hf: nn.Module,
        processor: Processor,
        device: torch.device,
        vision_cache: VisionCache | None = None,
        should_stop: Callable[[], bool] = never,
    ):
        super().__init__(should_stop)
        self.hf = hf.to(device).eval().requires_grad_(False)
        if device.type == "cpu" and hf.dtype == torch.float32:
            for layer in hf.get_submodule(f"{hf.family.language}.{hf.family.blocks}").modules():
                if isinstance(layer, nn.Linear):  # a transposed layout multiplies few rows faster
                    layer.weight.data = layer.weight.data.t().contiguous().t()
        self.processor = processor
        self.device = device
        self.vision_cache = vision_cache
        self.banned = processor.banned_token_ids(hf.config.text_config.vocab_size).to(device)
        self.dtype = hf.dtype

    @torch.no_grad()
    def sample(self, responses: RolloutQueue, sampling: SamplingParams) -> None:
        """Prompts of similar lengths go through the model together, as many as max_rows allows, once all those before
        are sampled or wait for their environments."""
        head_HV = self.hf.get_output_embeddings().weight.t()
        if head_HV.device.type == "cpu":
            head_HV = head_HV.float()  # once: a CPU has no product of 16-bit numbers with sums of 32 bits
        waiting: list[Rollout] = []  # whose prompts did not go through the model yet
        batches: list[DecodeBatch] = []
        while True:
            busy = any(batch.active_rows for batch in batches)
            over = responses.exhausted  # before taking: what comes in between is taken the next time
            came = responses.poll(0.0 if busy or waiting else IDLE_POLL_SECONDS)
            for batch in batches:
                batch.drop_finished()
                came = self._resume_rows(batch, came)
            batches = [batch for batch in batches if batch.rows]
            waiting += came
            busy = any(batch.active_rows for batch in batches)
            if starting := self._select_next(waiting, busy):
                waiting = [r for r in waiting if r not in starting]
                batches.append(self._prefill_batch(starting, sampling))
            elif over and not busy and not waiting:
                return
            for batch in batches:
                self._decode_step(batch, responses, sampling, head_HV)

    def _select_next(self, waiting: Sequence[Rollout], busy: bool) -> list[Rollout]:
        """Which of them to begin with. A later turn that is a prompt of its own (Rollout.separate) does not wait."""
        if later := [r for r in waiting if r.n_turns > 1]:
            return later
        starting: list[Rollout] = []
        groups: dict[Prompt, list[Rollout]] = {}
        for r in waiting:
            groups.setdefault(r.prompt, []).append(r)
        for group in sorted(groups.values(), key=lambda group: len(group[0].prompt.token_ids)):  # pads little
            if busy or (starting and len(starting) + len(group) > self.max_rows):
                break
            starting += group
        return starting

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
        self.has_all_weights |= seen == own.keys()
        self.weights_version += 1
        return {"sync/calls": float(len(seen) > 0), "sync/bytes": float(n_bytes)}

    def _positions(self, ids: Sequence[int], images: Sequence[ImageInput]) -> Tensor:
        """Return M-RoPE positions of tokens with these images, from 0 on, (3, M)."""
        grids = [image.grid_thw for image in images]
        return mrope_positions(ids, grids, self.processor.image_token_id, self.processor.merge_size)

    def _hidden(self, ids: Tensor, positions: Tensor, images: Sequence[ImageInput], **attention: Any) -> Tensor:
        """Return the hidden states of each row's last token. ids (B, M), positions (3, B, M)."""
        features, deep = vision_features(self.hf, images, self.vision_cache) if images else (None, [])
        ids, token = ids.to(self.device), self.processor.image_token_id
        embeds, positions = embed_inputs(self.hf, ids, features, token), positions.to(self.device)
        return run_language_model(self.hf, embeds, positions, deep=deep, image_mask=ids == token, **attention)[:, -1]

    def _prefill_batch(self, rollouts: Sequence[Rollout], sampling: SamplingParams) -> DecodeBatch:
        """Their prompts through the model, each once, left-padded."""
        prompts = list(dict.fromkeys(r.prompt for r in rollouts))
        ids = [torch.tensor(prompt.token_ids) for prompt in prompts]
        positions = [self._positions(prompt.token_ids, prompt.images).t() for prompt in prompts]
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        ids_PL, positions_3PL = pad(ids), pad(positions).permute(2, 0, 1)
        valid_PL = pad([torch.ones(len(x), dtype=torch.bool) for x in ids]).to(self.device)
        causal = torch.ones(ids_PL.shape[1:] * 2, dtype=torch.bool, device=self.device).tril()
        # A padding query attends to itself, or its softmax would have nothing to sum over.
        mask = (causal & valid_PL[:, None, :]) | torch.eye(len(causal), dtype=torch.bool, device=self.device)
        cache, images = PromptCache(), list(chain.from_iterable(prompt.images for prompt in prompts))
        hidden_PH = self._hidden(ids_PL, positions_3PL, images, mask=mask[:, None], cache=cache)

        number = {prompt: p for p, prompt in enumerate(prompts)}
        next_P = (positions_3PL.amax(dim=(0, 2)) + 1).tolist()
        rows = []
        for r in sorted(rollouts, key=lambda r: number[r.prompt]):
            generator = torch.Generator().manual_seed(derive_seed(sampling.seed, r.prompt.uid, r.sample_index))
            uniform = torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)
            rows.append(DecodeRow(r, iter(uniform.tolist()), next_P[number[r.prompt]]))
        prompt_B = torch.tensor([number[row.rollout.prompt] for row in rows], device=self.device)
        return DecodeBatch(rows, prompt_B, hidden_PH, valid_PL, cache)

    def _resume_rows(self, batch: DecodeBatch, came: Sequence[Rollout]) -> list[Rollout]:
        """The last token that was sampled and what the environment said after it, through the model; returns those that
        are no rows of the batch. Rows with as many new tokens go together."""
        number = {id(row.rollout): b for b, row in enumerate(batch.rows)}
        by_length: dict[int, list[int]] = {}
        for r in came:
            if (b := number.get(id(r))) is not None:
                by_length.setdefault(len(r.response) - batch.rows[b].n_seen, []).append(b)
        for rows in by_length.values():
            self._forward(batch, sorted(rows))
            for b in rows:
                batch.rows[b].active = True
        return [r for r in came if id(r) not in number]

    def _decode_step(
        self, batch: DecodeBatch, responses: RolloutQueue, sampling: SamplingParams, head_HV: Tensor
    ) -> None:
        """A token of each row that is being sampled."""
        rows = [batch.rows[b] for b in batch.active_rows]
        if not rows:
            return
        logits_RV = compute_logits(batch.hidden_BH[batch.active_rows], head_HV)
        logits_RV[:, self.banned] = -torch.inf
        uniform = torch.tensor([next(row.uniform) for row in rows], dtype=torch.float64)
        token_R, logp_R = sample_tokens(logits_RV, sampling, uniform.to(self.device))
        for row, token, logp in zip(rows, token_R.tolist(), logp_R.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logp)
            full = len(row.tokens) == responses.remaining_tokens(row.rollout)
            if token in self.processor.eos_ids or full or self.should_stop():
                versions = [self.weights_version] * len(row.tokens)
                add_response(row.rollout, row.tokens, row.logprobs, self.processor, versions)
                row.active, row.tokens, row.logprobs = False, [], []
                responses.mark_sampled(row.rollout)
        batch.drop_finished()
        if batch.active_rows:
            self._forward(batch, batch.active_rows)

    @torch.inference_mode()  # faster than no_grad, as it checks less; nothing trains on its outputs
    def _forward(self, batch: DecodeBatch, numbers: list[int]) -> None:
        """All tokens of these rows that did not go through the model yet, as many of each."""
        rows = [batch.rows[b] for b in numbers]
        ids, images = [row.tokens[-1:] or row.rollout.response[row.n_seen :] for row in rows], []
        positions_3RM = torch.tensor([[row.position] for row in rows]).expand(3, -1, -1)
        if len(ids[0]) > 1:  # more than a token that was sampled
            new = [row.rollout.images[row.n_images :] for row in rows]
            images = list(chain.from_iterable(new))
            positions_3RM = positions_3RM + torch.stack(list(map(self._positions, ids, new)), dim=1)
        batch.prepare(numbers, len(ids[0]))
        states = batch.recurrent
        if not batch.all_rows:
            batch.recurrent = {layer: state.select_rows(batch.rows_R) for layer, state in states.items()}
        hidden_RH = self._hidden(torch.tensor(ids), positions_3RM, images, plan=batch)
        batch.hidden_BH = batch.hidden_BH.index_copy(0, batch.rows_R, hidden_RH)
        if not batch.all_rows:
            for layer, state in states.items():
                state.update_rows(batch.rows_R, batch.recurrent[layer])
            batch.recurrent = states
        for row, last in zip(rows, positions_3RM.amax(dim=(0, 2)).tolist(), strict=True):
            row.position = last + 1
            row.n_images = len(row.rollout.images)
            row.n_seen += len(ids[0])
