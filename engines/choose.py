"""Which engine samples, and how it is started. vLLM itself, which takes seconds, is imported when it is."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from engines.connect import VLLM_REMEDY, ServerConfig, connect
from engines.hf import HFEngine
from engines.self_test import self_test
from engines.vllm import VLLMEngine, vllm_settings
from errors import need
from model import ModelConfig, Processor, VisionCache, load_hf
from packing import Packer
from parallel.models import Models
from parallel.sharding import save_adapter
from prepare_data import Example
from rollout import Batches, Engine, Examples, RolloutConfig, as_given, never
from utils import Context, print0


def resolve_engine(choice: str, device: torch.device) -> str:
    """Turn --rollout auto|hf|vllm into the engine of the run; called once, before anything is loaded."""
    installed = importlib.util.find_spec("vllm") is not None
    if choice == "server":
        return choice
    if choice == "auto":
        return "vllm" if installed and device.type == "cuda" else "hf"
    told = f"--rollout vllm: vLLM is not installed here; {VLLM_REMEDY}, or use --rollout hf"
    need(choice != "vllm" or installed, told)
    return choice


ImageLimits = Callable[[], tuple[int, tuple[int, int]]]  # of episodes: how many images, and how large


def image_limits(
    examples: Sequence[Example], processor: Processor, of_episodes: ImageLimits | None = None
) -> dict[str, object]:
    """vLLM's limit_mm_per_prompt, by which it reserves memory: the most images in a prompt, or an episode, and the size
    of the largest, as the model sees it."""
    sizes = list(chain.from_iterable(example.image_sizes for example in examples))
    count = max(len(example.images) for example in examples)
    if of_episodes:
        count, largest = of_episodes()
        sizes += [size for size in [largest] if 0 not in size]
    width, height = max((processor.final_size(*size) for size in sizes), key=math.prod, default=(448, 448))
    return {"image": {"count": count, "width": width, "height": height} if count else 0, "video": 0}


def make_engine(
    choice: str,
    path: str,
    processor: Processor,
    device: torch.device,
    dtype: torch.dtype,
    *,
    examples: Sequence[Example],
    max_model_len: int,
    family_paths: tuple[str, ...] = (),
    of_episodes: ImageLimits | None = None,
    cache: VisionCache | None = None,
    settings: dict | None = None,
    interrupted: Callable[[], bool] = never,
) -> Engine:
    """Return the engine that resolve_engine chose, for prompts made of `examples` and sequences of at most
    max_model_len tokens. Only vLLM reads `settings` (--vllm)."""
    if choice == "hf":
        return HFEngine(load_hf(path, dtype, family_paths), processor, device, cache, interrupted)
    more = {"max_model_len": max_model_len, "limit_mm_per_prompt": image_limits(examples, processor, of_episodes)}
    return VLLMEngine(path, processor, device, dtype, interrupted, **more, **settings or {})


def start_engine(
    cfg: ModelConfig,
    rollout: RolloutConfig,
    servers: ServerConfig,
    models: Models,
    processor: Processor,
    sets: list[Examples],
    ctx: Context,
    out: Path,
    of_episodes: ImageLimits | None = None,
    *,
    interrupted: Callable[[], bool],
    give_up: Callable[[str], None],
) -> Engine:
    """For prompts made of all these sets of examples; with all of the policy's weights, also the frozen ones: a resumed
    run may have trained them."""
    longest = max(chain.from_iterable(examples.lengths for examples in sets))
    settings = vllm_settings(rollout.vllm, rollout.rollout, ctx.world)
    examples, length = list(chain.from_iterable(sets)), longest + rollout.max_new_tokens
    if rollout.rollout == "server":
        settings |= {"max_model_len": length, "limit_mm_per_prompt": image_limits(examples, processor, of_episodes)}
        more = {
            "lora_rank": cfg.lora_rank,
            "trained_tower": not models.policy.vision_frozen,
            "save_adapter": partial(save_adapter, models.policy, cfg.model),
            "interrupted": interrupted,
            "give_up": give_up,
        }
        asked = (servers, cfg.model, models.policy.hf, models.dtype, processor, settings, ctx, out)
        engine = connect(*asked, **more)
    else:
        more = {
            "family_paths": cfg.family_paths,
            "examples": examples,
            "max_model_len": length,
            "of_episodes": of_episodes,
            "cache": models.policy.cache,
            "settings": settings,
            "interrupted": interrupted,
        }
        engine = make_engine(rollout.rollout, cfg.model, processor, ctx.device, models.dtype, **more)
    engine.sync(models.weights(engine.dtype))
    return engine


def start_sampling(
    cfg: Any, models: Models, processor: Processor, packer: Packer, sets: list[Examples], env: Any, batches: Batches,
    interrupt: Any, ctx: Context,
) -> Engine:  # fmt: skip
    """Return what a run samples with: the engine, compared with the trainer; with --env (`env`) one that plays
    episodes, with --async-steps one that samples ahead. `cfg` is train.Config, `interrupt` a watch.Interrupt."""
    limits = env.image_limits if env else None
    places = (models, processor, sets, ctx, Path(cfg.run.out), limits)
    ends = {"interrupted": interrupt.requested, "give_up": interrupt.request}
    engine = start_engine(cfg.model, cfg.rollout, cfg.servers, *places, **ends)
    if cfg.run.self_test:
        sampling, start_of = batches.sampling(0), env.start_of if env else as_given
        print0(self_test(models.policy, engine, sets[0], processor, packer, sampling, start_of))
    if env:
        from envs._play import Episodes

        engine = Episodes(engine, env, processor)
    if cfg.servers.async_steps:
        from engines.ahead import Ahead

        engine = Ahead(engine, batches)
    return engine
