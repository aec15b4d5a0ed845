"""HFEngine: rollouts with transformers' own modelling code and a plain KV cache. The reference for other engines.

Each prompt and its images are prefilled once per group, and each observation of an environment once, after the response
before it. Finished rows leave the batch. A sample's randomness depends only on (seed, uid, sample index), never on what
else is in the batch.

Axes: P prompts, B rows of a batch, R rows of the current forward, M tokens of each row in it, L cached tokens, H hidden
size, V vocabulary size.
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
    never_stop,
)
from utils import derive_seed


class PromptCache:
    """A KV cache of prompts, which transformers' attention fills when they are prefilled."""

    def __init__(self) -> None:
        self.layers: dict[int, list[Tensor]] = {}  # layer -> [keys, values], (P, key heads, L, D)
        self.recurrent: dict[int, RecurrentState] = {}  # layer -> state, of layers without keys and values

    def update(self, key: Tensor, value: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        self.layers[layer] = [key, value]
        return key, value

    def get_seq_length(self, *_) -> int:
        return 0


def sample_tokens(logits_BV: Tensor, sampling: SamplingParams, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution at uniform_B in [0, 1). Return token ids and
    log-probabilities, (B,).

    Log-probabilities are those of the distribution sampled from, after temperature and top-p. Raise UserError if the
    logits of a row do not define a distribution, because its token would be arbitrary and its log-probability NaN.
    """
    greedy = sampling.temperature == 0
    logp_BV = (logits_BV if greedy else logits_BV / sampling.temperature).log_softmax(dim=-1)
    nan_rows = int(logp_BV[:, 0].isnan().sum())  # a row that is no distribution is NaN in all columns
    need(not nan_rows, NOT_FINITE_MESSAGE.format(what=f"logits of {nan_rows} of {len(logits_BV)} rows"))
    if greedy:
        token_B = logits_BV.argmax(dim=-1)
    else:
        # in float64, because a float32 sum over 150,000 tokens is off by more than a rare token's probability
        if sampling.top_p < 1:
            logp_BV = TopPLogitsWarper(sampling.top_p)(None, logp_BV.double()).log_softmax(dim=-1)
        cdf_BV = logp_BV.double().exp().cumsum(dim=-1)
        total_B = cdf_BV[:, -1]
        # if u were rounded up to the total, the search would end after the last token, or at one with probability 0
        u_B = torch.minimum(uniform_B.to(cdf_BV) * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
        token_B = torch.searchsorted(cdf_BV, u_B[:, None], right=True)[:, 0]
    return token_B, logp_BV.gather(1, token_B[:, None])[:, 0]


def compute_logits(hidden_BH: Tensor, head_HV: Tensor) -> Tensor:
    """Return fp32 logits (B, V), accumulated in fp32 for every input dtype, as in the trainer (kernels.py)."""
    if head_HV.dtype == torch.float32:
        return hidden_BH.float() @ head_HV
    return torch.mm(hidden_BH, head_HV, out_dtype=torch.float32)


@dataclass(eq=False)
class DecodeRow:
    """A row of a batch: a rollout that is being sampled, or waits for its environment."""

    rollout: Rollout
    uniform: Iterator[float]  # a random number in [0, 1) for each token that may be sampled
    position: int  # M-RoPE position of the next token
    n_seen: int = 0  # number of tokens after the prompt that the model has processed
    n_images: int = 0  # number of images among them
    tokens: list[int] = field(default_factory=list)  # of the response that is being sampled
    logprobs: list[float] = field(default_factory=list)
    active: bool = True  # False while the rollout waits for its environment


class DecodeBatch:
    """Rows whose prompts were prefilled together, with their KV cache, recurrent states and attention (it is the `plan`
    that layers/attention.py calls).

    The KV cache has each prompt once, not once per row. Each prompt has `width` slots for its rows, so that attention
    to a prompt is one matrix product for all of its rows. Later tokens are in per-row buffers that grow by doubling, in
    which a query attends to its row's tokens up to itself.
    """

    def __init__(
        self, rows: list[DecodeRow], prompt_B: Tensor, hidden_PH: Tensor, valid_PL: Tensor, prompts: PromptCache
    ):
        self.rows = rows
        self.hidden_BH = hidden_PH[prompt_B]  # of each row's last token; the next token is sampled from it
        self.prompts = prompts.layers
        self.bias_P11L = torch.where(valid_PL, 0.0, -torch.inf)[:, None, None]
        self.row_cache: dict[int, list[Tensor]] = {}  # layer -> [keys, values], (B, key heads, capacity, D)
        self.recurrent = {layer: state.select_rows(prompt_B) for layer, state in prompts.recurrent.items()}
        self._assign_slots(prompt_B, prompt_B.bincount())

    @property
    def active_rows(self) -> list[int]:
        return [b for b, row in enumerate(self.rows) if row.active]

    def _assign_slots(self, prompt_B: Tensor, count_P: Tensor) -> None:
        self.width = int(count_P.max())
        first_P = count_P.cumsum(0) - count_P
        self.slot_B = prompt_B * self.width + torch.arange(len(prompt_B), device=prompt_B.device) - first_P[prompt_B]

    def drop_finished(self) -> None:
        """Remove the rows whose rollout has ended, and prompts that have no row left."""
        keep = [b for b, row in enumerate(self.rows) if not row.rollout.ended_by]
        if 0 < len(keep) < len(self.rows):
            index = torch.tensor(keep, device=self.hidden_BH.device)
            self.hidden_BH = self.hidden_BH[index]
            self.row_cache = {i: [b.index_select(0, index) for b in buffers] for i, buffers in self.row_cache.items()}
            self.recurrent = {layer: state.select_rows(index) for layer, state in self.recurrent.items()}
            prompt_B = (self.slot_B // self.width)[index]
            kept_P, prompt_B, count_P = prompt_B.unique_consecutive(return_inverse=True, return_counts=True)
            if len(kept_P) < len(self.bias_P11L):
                self.prompts = {i: [b.index_select(0, kept_P) for b in layer] for i, layer in self.prompts.items()}
                self.bias_P11L = self.bias_P11L[kept_P]
            self._assign_slots(prompt_B, count_P)
        self.rows = [self.rows[b] for b in keep]

    def prepare(self, indices: list[int], n_tokens: int) -> None:
        """Prepare attention for a forward of the next M = `n_tokens` tokens of each of these R rows."""
        device, lengths = self.slot_B.device, [self.rows[b].n_seen for b in indices]
        self.all_rows = len(indices) == len(self.rows)
        self.rows_R = torch.tensor(indices, device=device)
        self.slot_R = self.slot_B[self.rows_R]
        self.index_RM = torch.tensor(lengths, device=device)[:, None] + torch.arange(n_tokens, device=device)
        self.end = max(lengths) + n_tokens
        self.same_length = self.all_rows and len(set(lengths)) == 1  # without an environment, always true
        self.bias_R11ML = None
        if n_tokens > 1 or len(set(lengths)) > 1:
            later_RML = torch.arange(self.end, device=device) > self.index_RM[..., None]
            self.bias_R11ML = torch.where(later_RML, -torch.inf, 0.0)[:, None, None]

    def append(self, layer: int, new: Sequence[Tensor]) -> list[Tensor]:
        """Append keys and values, (R, key heads, M, D). Return all those of these rows, (R, key heads, end, D)."""
        empty = [x.new_empty(len(self.rows), x.shape[1], 0, x.shape[3]) for x in new]
        buffers = self.row_cache.setdefault(layer, empty)
        for i, x in enumerate(new):
            capacity = buffers[i].shape[2]
            if capacity < self.end:  # pad with zeros: entries after the end of a shorter row are read, with weight 0
                buffers[i] = F.pad(buffers[i], (0, 0, 0, max(capacity, self.end + 32 - capacity)))
            if self.same_length:
                buffers[i][:, :, self.end - x.shape[2] : self.end] = x
            else:
                buffers[i][self.rows_R[:, None], :, self.index_RM] = x.transpose(1, 2)
        return [b[:, :, : self.end] if self.all_rows else b[self.rows_R, :, : self.end] for b in buffers]

    def to_prompt_layout(self, x_R: Tensor) -> Tensor:
        """Reshape (R, key heads, repeat * M, D) to (P, key heads, width * repeat * M, D), with zeros in empty slots."""
        slots = len(self.bias_P11L) * self.width
        if len(x_R) < slots:
            x_R = x_R.new_zeros(slots, *x_R.shape[1:]).index_copy_(0, self.slot_R, x_R)
        return x_R.unflatten(0, (-1, self.width)).transpose(1, 2).flatten(2, 3)

    def to_row_layout(self, x_P: Tensor) -> Tensor:
        """Invert to_prompt_layout: (P, key heads, width * repeat * M, D) -> (R, key heads, repeat * M, D)."""
        x_R = x_P.unflatten(2, (self.width, -1)).transpose(1, 2).flatten(0, 1)
        return x_R if len(x_R) == len(self.slot_R) else x_R[self.slot_R]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Compute attention: query (R, heads, M, D), key and value (R, key heads, M, D) -> (R, heads, M, D)."""
        prompt_key, prompt_value = self.prompts[layer]
        key, value = self.append(layer, (key, value))
        grouped = (query * scale).reshape(len(query), key.shape[1], -1, query.shape[3])
        prompt_scores = self.to_row_layout(
            self.to_prompt_layout(grouped) @ prompt_key.transpose(2, 3) + self.bias_P11L.to(query.dtype)
        )
        row_scores = grouped @ key.transpose(2, 3)
        if self.bias_R11ML is not None:
            row_scores = (row_scores.unflatten(2, (-1, query.shape[2])) + self.bias_R11ML.to(query.dtype)).flatten(2, 3)
        weights = torch.cat([prompt_scores, row_scores], dim=-1).float().softmax(dim=-1).to(query.dtype)
        prompt_weights, row_weights = weights.split([prompt_scores.shape[-1], row_scores.shape[-1]], dim=-1)
        out = row_weights @ value + self.to_row_layout(self.to_prompt_layout(prompt_weights) @ prompt_value)
        return out.reshape(query.shape)


class HFEngine(Engine):
    """An engine that runs transformers in the trainer's process, on its own copy of the model: load_weights is the only
    way in which weights reach it."""

    max_rows = 256  # max number of responses that are decoded together
    last_experts: Callable[[int], Any]  # with --replay-experts: layers.experts.last_experts of the model

    def __init__(
        self,
        hf: nn.Module,
        processor: Processor,
        device: torch.device,
        vision_cache: VisionCache | None = None,
        should_stop: Callable[[], bool] = never_stop,
    ):
        super().__init__(should_stop)
        self.hf = hf.to(device).eval().requires_grad_(False)
        if device.type == "cpu" and hf.dtype == torch.float32:
            for layer in hf.get_submodule(f"{hf.family.language}.{hf.family.blocks}").modules():
                if isinstance(layer, nn.Linear):  # the transposed layout is faster for few rows
                    layer.weight.data = layer.weight.data.t().contiguous().t()
        self.processor = processor
        self.device = device
        self.vision_cache = vision_cache
        self.banned = processor.banned_token_ids(hf.config.text_config.vocab_size).to(device)
        self.dtype = hf.dtype

    @torch.no_grad()
    def sample(self, responses: RolloutQueue, sampling: SamplingParams) -> None:
        """Sample a response of each queued rollout. Prompts of similar lengths are prefilled together, up to max_rows
        rollouts, once no earlier rollout is being sampled."""
        head_HV = self.hf.get_output_embeddings().weight.t()
        if head_HV.device.type == "cpu":
            head_HV = head_HV.float()  # cast once: CPUs have no 16-bit matmul that accumulates in fp32
        waiting: list[Rollout] = []  # rollouts whose prompts are not prefilled yet
        batches: list[DecodeBatch] = []
        while True:
            busy = any(batch.active_rows for batch in batches)
            closed = responses.closed  # read first: rollouts queued after the poll get another iteration
            arrived = responses.poll(0.0 if busy or waiting else IDLE_POLL_SECONDS)
            for batch in batches:
                batch.drop_finished()
                arrived = self._resume_rows(batch, arrived)
            batches = [batch for batch in batches if batch.rows]
            waiting += arrived
            busy = any(batch.active_rows for batch in batches)
            if selected := self._select_next(waiting, busy):
                waiting = [r for r in waiting if r not in selected]
                batches.append(self._prefill_batch(selected, sampling))
            elif closed and not busy and not waiting:
                return
            for batch in batches:
                self._decode_step(batch, responses, sampling, head_HV)

    def _select_next(self, waiting: Sequence[Rollout], busy: bool) -> list[Rollout]:
        """Return the waiting rollouts to prefill now: any later turns, which are separate prompts
        (Rollout.separate_turns) and never wait, or else groups, shortest prompts first, if nothing is being sampled."""
        if later_turns := [r for r in waiting if r.n_turns > 1]:
            return later_turns
        selected: list[Rollout] = []
        groups: dict[Prompt, list[Rollout]] = {}
        for r in waiting:
            groups.setdefault(r.prompt, []).append(r)
        for group in sorted(groups.values(), key=lambda group: len(group[0].prompt.token_ids)):  # for short padding
            if busy or (selected and len(selected) + len(group) > self.max_rows):
                break
            selected += group
        return selected

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """Copy weights in place, and return the numbers of calls and bytes as metrics. Raise ValueError for an unknown
        name, because the parameter it is meant for would stay stale."""
        parameters = dict(self.hf.named_parameters())
        seen, n_bytes = set(), 0
        for name, tensor in named_tensors:
            if name not in parameters:
                raise ValueError(f"load_weights: the engine has no parameter {name!r}")
            parameters[name].copy_(tensor)
            seen.add(name)
            n_bytes += tensor.nbytes
        self.has_all_weights |= seen == parameters.keys()
        self.weights_version += 1
        return {"sync/calls": float(len(seen) > 0), "sync/bytes": float(n_bytes)}

    def _positions(self, ids: Sequence[int], images: Sequence[ImageInput]) -> Tensor:
        """Return the M-RoPE positions of tokens with these images, starting at 0, (3, M)."""
        return mrope_positions(ids, images, self.processor.image_token_id, self.processor.merge_size)

    def _hidden(self, ids: Tensor, positions: Tensor, images: Sequence[ImageInput], **attention: Any) -> Tensor:
        """Return the hidden states of each row's last token. ids (B, M), positions (3, B, M)."""
        features, deep = vision_features(self.hf, images, self.vision_cache) if images else (None, [])
        ids, token = ids.to(self.device), self.processor.image_token_id
        embeds, positions = embed_inputs(self.hf, ids, features, token), positions.to(self.device)
        return run_language_model(self.hf, embeds, positions, deep=deep, image_mask=ids == token, **attention)[:, -1]

    def _prefill_batch(self, rollouts: Sequence[Rollout], sampling: SamplingParams) -> DecodeBatch:
        """Prefill the prompts of these rollouts, each prompt once, left-padded. Return their batch."""
        prompts = list(dict.fromkeys(r.prompt for r in rollouts))
        ids = [torch.tensor(prompt.token_ids) for prompt in prompts]
        positions = [self._positions(prompt.token_ids, prompt.images).t() for prompt in prompts]
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        ids_PL, positions_3PL = pad(ids), pad(positions).permute(2, 0, 1)
        valid_PL = pad([torch.ones(len(x), dtype=torch.bool) for x in ids]).to(self.device)
        causal = torch.ones(ids_PL.shape[1:] * 2, dtype=torch.bool, device=self.device).tril()
        # a padding query attends to itself, because a softmax over no keys would be NaN
        mask = (causal & valid_PL[:, None, :]) | torch.eye(len(causal), dtype=torch.bool, device=self.device)
        cache, images = PromptCache(), list(chain.from_iterable(prompt.images for prompt in prompts))
        hidden_PH = self._hidden(ids_PL, positions_3PL, images, mask=mask[:, None], cache=cache)

        index = {prompt: p for p, prompt in enumerate(prompts)}
        next_P = (positions_3PL.amax(dim=(0, 2)) + 1).tolist()
        rows = []
        for r in sorted(rollouts, key=lambda r: index[r.prompt]):
            generator = torch.Generator().manual_seed(derive_seed(sampling.seed, r.prompt.uid, r.sample_index))
            uniform = torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)
            rows.append(DecodeRow(r, iter(uniform.tolist()), next_P[index[r.prompt]]))
        if self.expert_layers:
            experts_P = self.last_experts(len(prompts))
            for r in rollouts:
                r.add_experts(experts_P[index[r.prompt], -len(r.prompt.token_ids) :])
        prompt_B = torch.tensor([index[row.rollout.prompt] for row in rows], device=self.device)
        return DecodeBatch(rows, prompt_B, hidden_PH, valid_PL, cache)

    def _resume_rows(self, batch: DecodeBatch, arrived: Sequence[Rollout]) -> list[Rollout]:
        """Run the new tokens of these rollouts through the model: the last sampled token and the observation after it.
        Rows with equally many new tokens go through together. Return the rollouts that are not in the batch."""
        index = {id(row.rollout): b for b, row in enumerate(batch.rows)}
        by_length: dict[int, list[int]] = {}
        for r in arrived:
            if (b := index.get(id(r))) is not None:
                by_length.setdefault(len(r.response) - batch.rows[b].n_seen, []).append(b)
        for rows in by_length.values():
            self._forward(batch, sorted(rows))
            for b in rows:
                batch.rows[b].active = True
        return [r for r in arrived if id(r) not in index]

    def _decode_step(
        self, batch: DecodeBatch, responses: RolloutQueue, sampling: SamplingParams, head_HV: Tensor
    ) -> None:
        """Sample a token of each active row, and run it through the model if its response continues."""
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
            is_full = len(row.tokens) == responses.remaining_tokens(row.rollout)
            if token in self.processor.eos_ids or is_full or self.should_stop():
                versions = [self.weights_version] * len(row.tokens)
                add_response(row.rollout, row.tokens, row.logprobs, self.processor, versions)
                row.active, row.tokens, row.logprobs = False, [], []
                responses.mark_sampled(row.rollout)
        batch.drop_finished()
        if batch.active_rows:
            self._forward(batch, batch.active_rows)

    @torch.inference_mode()  # faster than no_grad, because it checks less; the outputs are never trained on
    def _forward(self, batch: DecodeBatch, indices: list[int]) -> None:
        """Run the new tokens of these rows through the model. All rows must have the same number of new tokens."""
        rows = [batch.rows[b] for b in indices]
        ids, images = [row.tokens[-1:] or row.rollout.response[row.n_seen :] for row in rows], []
        positions_3RM = torch.tensor([[row.position] for row in rows]).expand(3, -1, -1)
        if len(ids[0]) > 1:  # an observation, possibly with images, and not just a sampled token
            new = [row.rollout.images[row.n_images :] for row in rows]
            images = list(chain.from_iterable(new))
            positions_3RM = positions_3RM + torch.stack(list(map(self._positions, ids, new)), dim=1)
        batch.prepare(indices, len(ids[0]))
        states = batch.recurrent
        if not batch.all_rows:
            batch.recurrent = {layer: state.select_rows(batch.rows_R) for layer, state in states.items()}
        hidden_RH = self._hidden(torch.tensor(ids), positions_3RM, images, plan=batch)
        batch.hidden_BH = batch.hidden_BH.index_copy(0, batch.rows_R, hidden_RH)
        if not batch.all_rows:
            for layer, state in states.items():
                state.update_rows(batch.rows_R, batch.recurrent[layer])
            batch.recurrent = states
        if self.expert_layers:
            for row, experts in zip(rows, self.last_experts(len(rows)), strict=True):
                row.rollout.add_experts(experts)
        for row, last in zip(rows, positions_3RM.amax(dim=(0, 2)).tolist(), strict=True):
            row.position = last + 1
            row.n_images = len(row.rollout.images)
            row.n_seen += len(ids[0])
