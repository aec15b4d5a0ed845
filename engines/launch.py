"""Which engine samples: the flags of servers, what is checked of them, and how each engine starts.

Servers and vLLM, which a fork may delete, are imported where a flag asks for them. vLLM itself, which takes seconds, is
imported when it starts.
"""

import asyncio
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from engines.hf import HFEngine
from engines.self_test import self_test
from errors import in_copy, need, plug_in
from model import ModelConfig, Processor, VisionCache, load_hf
from packing import Packer
from parallel.checkpoint import run_on_rank0
from parallel.models import Models
from parallel.sharding import save_adapter
from rollout import Batches, Engine, ExampleList, identity
from rollout import never as never_interrupted
from settings import flag_field, format_flag, never
from utils import DistContext, print0

VLLM_INSTALL_HINT = "pip install -r requirements-gpu.txt (on a CPU: docs/scale.md, On a CPU)"


@dataclass(frozen=True)
class ConnectionConfig:
    """Connection to rollout servers"""

    servers: tuple[str, ...] = flag_field((), "URLs of vLLM or SGLang servers, which `python -m engines.serve` starts",
                                       metavar="URL", from_run=never)
    sync: str = flag_field(
        "auto",
        "weight sync: broadcast (nccl, gloo), or through --out on a shared disk: all weights "
        "(disk) or the LoRA adapter; auto: nccl on a GPU, else gloo",
        choices=("auto", "nccl", "gloo", "disk", "adapter"),
    )
    server_timeout: float = flag_field(
        600.0, "seconds a server may take for one response or one weight update", above=0
    )


@dataclass(frozen=True)
class RolloutServerConfig(ConnectionConfig):
    """Rollout servers (--rollout server; docs/scale.md)"""

    serve: int = flag_field(0, "number of vLLM servers to run on this machine during training; not with --servers",
                         least=0)
    async_steps: int = flag_field(0, "sample up to K batches ahead, with weights at most K updates old; 0: synchronous",
                               least=0)
    in_flight: str = flag_field("abort", "requests in flight at a weight sync: keep their KV cache; abort, then resume "
                             "with the new weights; or wait for them", choices=("keep", "abort", "wait"))

    def check(self, engine: str, vllm: tuple[str, ...], model: ModelConfig) -> None:
        """Raise UserError for settings that contradict each other, --rollout, --vllm or the model's."""
        if engine != "server":
            given = {name: value for name, value in vars(self).items() if value != getattr(type(self), name)}
            flags = " ".join(format_flag(name, value) for name, value in given.items())
            need(not given, f"{flags}: for servers, but the engine is --rollout {engine}; use --rollout server")
            return
        given = "both" if self.servers else "neither"
        need(bool(self.servers) != bool(self.serve),
             f"--rollout server: give --servers URL... or --serve N, not {given}"
             + (" (--servers default takes back those of a run that is resumed)" if self.servers else ""))
        need(not vllm or self.serve > 0, "--vllm: give it where the servers are started, or use --serve")
        need(self.sync != "adapter" or model.lora_rank > 0, "--sync adapter: there is none without --lora-rank above 0")
        need(self.sync != "adapter" or model.train_vision == "none",
             f"--sync adapter: servers take adapters of the language model alone, not those of --train-vision "
             f"{model.train_vision}; use --sync gloo, nccl or disk")
        need(self.sync != "nccl" or torch.cuda.is_available(), "--sync nccl: there is no GPU here; use gloo")
        for url in self.servers:
            parts = re.fullmatch(r"https?://[^/?#@]+:(\d+)/?", url)
            need(parts is not None and 0 < int(parts[1]) < 65536,
                 f"--servers {url}: give http://HOST:PORT, several with spaces between")
        urls = [url.rstrip("/") for url in self.servers]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        need(not twice, f"--servers {' '.join(twice)} is given twice; give each once")


def vllm_is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def check_engine(
    engine: str, vllm: tuple[str, ...], servers: RolloutServerConfig, model: ModelConfig, world: int
) -> None:
    """Raise UserError for settings of --rollout that contradict each other, and unless what it needs is there: files of
    ours, an installed vLLM, servers that answer. Call it before a model loads."""
    if servers.async_steps:
        plug_in("engines.ahead", f"--async-steps {servers.async_steps}")
    servers.check(engine, vllm, model)
    installed = vllm_is_installed()
    if engine == "vllm":
        plug_in("engines.vllm", "--rollout vllm")
        need(installed, f"--rollout vllm: vLLM is not installed here; {VLLM_INSTALL_HINT}, or use --rollout hf")
    if engine == "server":
        plug_in("engines.server", "--rollout server")
        if servers.serve:
            flag = f"--serve {servers.serve}"
            plug_in("engines.local", flag)
            plug_in("engines.vllm", flag)
            need(installed, f"{flag}: vLLM is not installed here; {VLLM_INSTALL_HINT}, or name servers with --servers")
        else:
            asyncio.run(plug_in("engines.client", "--servers").find_common_kind(servers.servers))
    vllm_settings(vllm, engine, world)


def resolve_engine(choice: str, device: torch.device) -> str:
    """Turn --rollout auto into the engine of the run; called once, before anything is loaded."""
    if choice != "auto":
        return choice
    return "vllm" if device.type == "cuda" and in_copy("engines.vllm") and vllm_is_installed() else "hf"


def vllm_settings(pairs: Sequence[str], engine: str, world: int) -> dict[str, object]:
    """Return --vllm KEY=VALUE ... as arguments of vLLM's LLM (engines/vllm.py has the same function)."""
    return plug_in("engines.vllm", "--vllm").parse_vllm_args(pairs, engine, world) if pairs else {}


ImageLimitsFn = Callable[[], tuple[int, tuple[int, int]]]  # of episodes: how many images, and how large


def size_limits(
    sets: Sequence[ExampleList], processor: Processor, max_new_tokens: int, of_episodes: ImageLimitsFn | None = None
) -> dict[str, Any]:
    """Return the arguments of vLLM by which it reserves memory: the longest sequence; the most images in a prompt, or
    an episode, and the size of the largest, as the model sees it."""
    length = max(chain.from_iterable(examples.lengths for examples in sets)) + max_new_tokens
    images = [example.image_sizes for example in chain.from_iterable(sets)]
    sizes, count = list(chain.from_iterable(images)), max(map(len, images), default=0)
    if of_episodes:
        count, largest = of_episodes()
        sizes += [size for size in [largest] if 0 not in size]
    width, height = max((processor.resized_size(*size) for size in sizes), key=math.prod, default=(448, 448))
    image = {"count": count, "width": width, "height": height} if count else 0
    return {"max_model_len": length, "limit_mm_per_prompt": {"image": image, "video": 0}}


def make_engine(
    choice: str,
    path: str,
    processor: Processor,
    ctx: DistContext,
    dtype: torch.dtype,
    sizes: dict[str, Any],
    vllm: Sequence[str] = (),
    servers: RolloutServerConfig | None = None,
    *,
    family_paths: tuple[str, ...] = (),
    cache: VisionCache | None = None,
    should_stop: Callable[[], bool] = never_interrupted,
    **of_servers: Any,
) -> Engine:
    """Return the engine that resolve_engine chose. `sizes`: what size_limits returns; `vllm`: --vllm; `of_servers`:
    what ServerEngine alone needs."""
    if choice == "hf":
        return HFEngine(load_hf(path, dtype, family_paths), processor, ctx.device, cache, should_stop)
    if choice == "server":
        of_servers |= {"max_model_len": sizes["max_model_len"], "should_stop": should_stop}
        return plug_in("engines.server", "--rollout server").ServerEngine(servers, processor, dtype, ctx, **of_servers)
    settings = vllm_settings(vllm, choice, ctx.world) | sizes
    kind = plug_in("engines.vllm", "--rollout vllm").VLLMEngine
    return kind(path, processor, ctx.device, dtype, should_stop, **settings)


def make_training_engine(
    cfg: Any,
    models: Models,
    processor: Processor,
    sets: list[ExampleList],
    ctx: DistContext,
    of_episodes: ImageLimitsFn | None = None,
    **ends: Callable,
) -> Engine:
    """Return the engine of a run (`cfg` is train.Config), for prompts made of these sets of examples, with all of the
    policy's weights: also the frozen ones, which the run that is resumed may have trained. `ends`: `should_stop` and
    `request_stop`, what ServerEngine has by these names."""
    model, vllm, servers, out, policy = cfg.model, cfg.rollout.vllm, cfg.servers, Path(cfg.run.out), models.policy
    sizes = size_limits(sets, processor, cfg.rollout.max_new_tokens, of_episodes)
    if servers.serve:
        launch = plug_in("engines.local", f"--serve {servers.serve}").launch_servers
        rank = model.lora_rank if servers.sync == "adapter" else 0
        settings = vllm_settings(vllm, "server", ctx.world) | sizes
        asked = (servers.serve, model.model, processor, models.dtype, settings, out, rank)
        servers = replace(servers, servers=run_on_rank0(lambda: launch(*asked)))
    engine = make_engine(
        cfg.rollout.rollout,
        model.model,
        processor,
        ctx,
        models.dtype,
        sizes,
        vllm,
        servers,
        family_paths=model.family_paths,
        cache=policy.cache,
        out=out,
        vocab_size=policy.hf.config.get_text_config().vocab_size,
        trained_tower=not policy.vision_frozen,
        save_adapter=partial(save_adapter, policy, model.model),
        **ends,
    )
    engine.sync(models.weights(engine.dtype))
    return engine


def start_sampling(
    cfg: Any, models: Models, processor: Processor, packer: Packer, sets: list[ExampleList], env: Any, batches: Batches,
    interrupt: Any, ctx: DistContext,
) -> Engine:  # fmt: skip
    """Return what a run samples with: the engine, compared with the trainer; with --env (`env`) one that plays
    episodes, with --async-steps one that samples ahead. `cfg` is train.Config, `interrupt` a watch.Interrupt."""
    ends = {"should_stop": interrupt.requested, "request_stop": interrupt.give_up}
    engine = make_training_engine(cfg, models, processor, sets, ctx, env.episode_image_limits if env else None, **ends)
    if cfg.run.self_test:
        sampling, start_of = batches.sampling(0), env.reset_example if env else identity
        print0(self_test(models.policy, engine, sets[0], processor, packer, sampling, start_of))
    if env:
        engine = plug_in("envs._play", "--env").EpisodeEngine(engine, env, processor)
    if cfg.servers.async_steps:
        engine = plug_in("engines.ahead", "--async-steps").Ahead(engine, batches)
    return engine
