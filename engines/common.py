"""What vLLM in the trainer's process and servers have in common: short requests, what answers must be, and weights in
buckets."""

import math
from collections.abc import Iterator, Sequence

import torch

from errors import UserError, need
from model import Processor
from rollout import NOT_FINITE_MESSAGE, Rollout
from utils import NamedTensors


def iter_buckets(named_tensors: NamedTensors, max_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield consecutive tensors in lists of at most `max_bytes`, a larger tensor alone. Only one list is in memory."""
    bucket, size = [], 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def build_request(rollout: Rollout, room: int, processor: Processor, max_model_len: int) -> tuple:
    """Return what an engine needs for a rollout's next response: (uid, sample, turn, room, ids, images), where `ids`
    have one placeholder for all tokens of an image."""
    prompt = rollout.prompt
    response, images = iter(rollout.response), iter(rollout.images)
    short = list(prompt.unexpanded_ids)
    for token in response:
        short.append(token)
        if token == processor.image_token_id:
            skipped = next(images).n_tokens - 1
            assert all(next(response) == token for _ in range(skipped)), "an image's tokens stand together"
    length = len(prompt.token_ids) + len(rollout.response)
    assert length + room <= max_model_len, "the engine was started for shorter sequences"
    pil_images = [image.image for image in prompt.images + rollout.images]
    return prompt.uid, rollout.sample_index, rollout.n_turns, room, short, pil_images


def check_answer(engine: str, theirs: Sequence[int], ours: Sequence[int], logprobs: Sequence[float]) -> None:
    """Raise UserError unless an engine has read the prompt as the processor does, and log-probabilities are finite."""
    if list(theirs) != list(ours):
        pairs = enumerate(zip(theirs, ours, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(theirs), len(ours)))
        raise UserError(
            f"the engine's prompt has {len(theirs)} tokens, the processor's {len(ours)}, and they differ from token "
            f"{at} ({engine}): another prompt would be trained on than answered; check --min-pixels, --max-pixels and "
            "preprocessor_config.json, also where servers run"
        )
    need(all(map(math.isfinite, logprobs)), NOT_FINITE_MESSAGE.format(what=f"log-probabilities of {engine}'s answer"))
