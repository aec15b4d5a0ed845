"""Helpers that engines/vllm.py and the servers' code share: requests with unexpanded images, checks of what an engine
returns, and buckets of weights."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import torch

from errors import UserError, need
from model import Processor
from rollout import NOT_FINITE_MESSAGE, Rollout
from utils import NamedTensors


def iter_buckets(named_tensors: NamedTensors, max_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield lists of consecutive tensors of at most `max_bytes` each. A larger tensor gets its own list. Only one
    list is in memory at a time."""
    bucket, size = [], 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def build_request(rollout: Rollout, max_tokens: int, processor: Processor, max_model_len: int) -> tuple:
    """Return (uid, sample index, turn, max tokens, token ids, images, number of tokens whose experts are known) of a
    request for a rollout's next response. The token ids have one placeholder for each image or video."""
    prompt, observations = rollout.prompt, iter(rollout.unexpanded_observations)
    unexpanded_ids = list(prompt.unexpanded_ids)
    for sampled, pairs in groupby(zip(rollout.response_mask, rollout.response, strict=True), key=itemgetter(0)):
        unexpanded_ids += [token for _, token in pairs] if sampled else next(observations)
    length = len(prompt.token_ids) + len(rollout.response)
    assert length + max_tokens <= max_model_len, "the engine was started for shorter sequences"
    images, turn = prompt.images + rollout.images, rollout.n_turns
    return prompt.uid, rollout.sample_index, turn, max_tokens, unexpanded_ids, images, rollout.n_routed


def check_response(
    engine: str, engine_ids: Sequence[int], prompt_ids: Sequence[int], logprobs: Sequence[float]
) -> None:
    """Raise UserError if the engine's prompt ids are not the processor's, or if a log-probability is not finite."""
    if list(engine_ids) != list(prompt_ids):
        pairs = enumerate(zip(engine_ids, prompt_ids, strict=False))
        index = next((i for i, (a, b) in pairs if a != b), min(len(engine_ids), len(prompt_ids)))
        raise UserError(
            f"the engine's prompt has {len(engine_ids)} tokens and the processor's {len(prompt_ids)}, and they differ "
            f"from token {index} on ({engine}), so the trained prompt would not be the sampled one; check "
            "--min-pixels, --max-pixels and preprocessor_config.json, also where servers run"
        )
    need(all(map(math.isfinite, logprobs)), NOT_FINITE_MESSAGE.format(what=f"log-probabilities from {engine}"))
