"""Selection and start of the rollout engine: the flags of servers, checks of these flags, and the start of each engine.

The modules for servers and vLLM, which a fork may delete, are imported only if a flag needs them. vLLM itself, whose
import takes seconds, is imported when its engine starts.
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
from model import ModelConfig, Processor, VisionCache, load_config, load_hf
from packing import Packer
from parallel.checkpoint import run_on_rank0
from parallel.models import Models
from parallel.sharding import save_adapter
from rollout import Batches, Engine, ExampleList, identity, never_stop
from settings import flag_field, format_flag, never
from utils import DistContext, print0

SGLANG_REPLAY = "--replay-experts: SGLang servers do not return the experts; use vLLM's, or leave the flag out"
VLLM_INSTALL_HINT = "pip install -r requirements-gpu.txt (on a CPU: docs/scale.md, On a CPU)"


@dataclass(frozen=True)
class ConnectionConfig:
    """Rollout servers (--rollout server; docs/scale.md)"""

    servers: tuple[str, ...] = flag_field((), "URLs of vLLM or SGLang servers, which `python -m engines.serve` starts",
                                          metavar="URL", from_run=never)
    sync: str = flag_field(
        "auto",
        "how weights reach the servers. nccl, gloo: broadcast; disk: all weights, through files in --out on a "
        "shared disk; adapter: only the LoRA adapter, through files too; auto: nccl on a GPU, else gloo",
        choices=("auto", "nccl", "gloo", "disk", "adapter")
    )
    server_timeout: float = flag_field(
        600.0, "seconds a server may take for one response or one weight update", above=0
    )


@dataclass(frozen=True)
class RolloutServerConfig(ConnectionConfig):
    """Rollout servers (--rollout server; docs/scale.md)"""

    serve: int = flag_field(0, "number of vLLM servers to run on this machine during training; not with --servers",
                            least=0)
    async_steps: int = flag_field(0, "number of batches (N) to sample ahead; trained tokens come from weights at most "
                                  "N syncs old; 0: synchronous", least=0)
    in_flight: str = flag_field("abort", "what happens to running requests at a weight sync. keep: continue with the "
                                "new weights on the old KV cache; abort: stop, then recompute and continue with the "
                                "new weights; wait: let them finish first", choices=("keep", "abort", "wait"))

    def check(self, engine: str, vllm: tuple[str, ...], model: ModelConfig) -> None:
        """Raise UserError if these flags contradict each other, --rollout, --vllm or the flags of the model."""
        if engine != "server":
            changed = {name: value for name, value in vars(self).items() if value != getattr(type(self), name)}
            flags = " ".join(format_flag(name, value) for name, value in changed.items())
            need(not changed, f"{flags}: only for servers, but the engine is --rollout {engine}; use --rollout server")
            return
        need(self.servers or self.serve, "--rollout server needs --servers URL... or --serve N")
        need(not (self.servers and self.serve), "--servers and --serve exclude each other; pass one (to drop the "
             "servers of a resumed run, pass --servers default)")
        need(not vllm or self.serve > 0,
             "--vllm has no effect on running servers; pass it to the command that starts them, or use --serve")
        need(self.sync != "adapter" or model.lora_rank > 0, "--sync adapter needs an adapter; set --lora-rank above 0")
        need(self.sync != "adapter" or model.train_vision == "none",
             f"--sync adapter: servers accept only adapters of the language model, not those of --train-vision "
             f"{model.train_vision}; use --sync gloo, nccl or disk")
        need(self.sync != "nccl" or torch.cuda.is_available(), "--sync nccl: there is no GPU here; use gloo")
        for url in self.servers:
            match = re.fullmatch(r"https?://[^/?#@]+:(\d+)/?", url)
            need(match is not None and 0 < int(match[1]) < 65536,
                 f"--servers {url}: give http://HOST:PORT; separate several URLs with spaces")
        urls = [url.rstrip("/") for url in self.servers]
        duplicates = sorted({url for url in urls if urls.count(url) > 1})
        need(not duplicates, f"--servers {' '.join(duplicates)} is given twice; give each once")


def vllm_is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def server_kind(engine: str, servers: RolloutServerConfig) -> str:
    """Return "vllm" or "sglang" with --rollout server, else "". Raise UserError if a server does not answer."""
    if engine != "server" or servers.serve:
        return "vllm" * (engine == "server")
    return asyncio.run(plug_in("engines.client", "--servers").find_common_kind(servers.servers))


def check_engine(
    engine: str, vllm: tuple[str, ...], servers: RolloutServerConfig, model: ModelConfig, world: int,
    planned: bool = False, replay_experts: bool = False,
) -> None:  # fmt: skip
    """Raise UserError if flags of --rollout contradict each other, or if the engine is not available: its modules were
    deleted, vLLM is not installed, or a server does not answer. Call this before a model is loaded. The
    engine of a `planned` run need not be available."""
    if servers.async_steps:
        plug_in("engines.ahead", f"--async-steps {servers.async_steps}")
    servers.check(engine, vllm, model)
    installed = planned or vllm_is_installed()
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
    vllm_settings(vllm, engine, world)
    if not planned and server_kind(engine, servers) == "sglang":
        need(not replay_experts, SGLANG_REPLAY)
    if replay_experts:
        experts = plug_in("layers.experts", "--replay-experts")
        experts.check_replay(load_config(model.model, model.family_paths))
        need(not model.compile,
             "--replay-experts --compile: each block would be compiled separately, which takes minutes; "
             "leave one of the two out")


def check_videos(server: str, sets: Sequence[ExampleList], env: Any = None) -> None:
    """Raise UserError unless servers of this kind ("": there are none) show every frame of the examples' videos at its
    time, and the environment `env` shows no videos. Call this before a model is loaded."""
    if not server:
        return
    need(not env or not env.limits["videos_per_turn"], "servers can only show videos of prompts, but --env has "
         "videos_per_turn above 0; use --rollout vllm or hf")
    rates = {fps: example.uid for example in chain.from_iterable(sets) for _, fps, _ in example.video_sizes}
    some = dict(list(rates.items())[:2])  # each with one of its rows
    need(server == "vllm" or not rates, f"the data has videos (frame rates with a row: {some}), but SGLang servers "
         "choose and resize frames by themselves, so the model would be trained on other frames than they see; use "
         "vLLM servers, or --rollout vllm or hf")
    need(len(rates) < 2, f"the videos have {len(rates)} frame rates, such as {some}, but a server has "
         "one; prepare them at one rate (docs/data.md#videos), or use --rollout vllm or hf")


def resolve_engine(choice: str, device: torch.device) -> str:
    """Return the engine of --rollout, with auto resolved. Call this once, before anything is loaded."""
    if choice != "auto":
        return choice
    return "vllm" if device.type == "cuda" and in_copy("engines.vllm") and vllm_is_installed() else "hf"


def vllm_settings(pairs: Sequence[str], engine: str, world: int) -> dict[str, object]:
    """Return --vllm KEY=VALUE ... as arguments of vLLM's LLM. Raise UserError if parse_vllm_args does."""
    return plug_in("engines.vllm", "--vllm").parse_vllm_args(pairs, engine, world) if pairs else {}


EpisodeLimitsFn = Callable[[], tuple[int, tuple[int, int], int, int]]  # envs._factory.EnvFactory.episode_limits


def size_limits(
    sets: Sequence[ExampleList], processor: Processor, max_new_tokens: int,
    episode_limits: EpisodeLimitsFn | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments of vLLM that depend on the data: the max sequence length, the max number of images and
    videos in a prompt or an episode, the size of the largest after resizing, and the frame rate, which servers need."""
    length = max(chain.from_iterable(examples.lengths for examples in sets)) + max_new_tokens
    examples = list(chain.from_iterable(sets))
    images, videos = ([getattr(example, name) for example in examples] for name in ("image_sizes", "video_sizes"))
    sizes, count = list(chain.from_iterable(images)), max(map(len, images), default=0)
    observed, n_frames = 0, 0  # videos in observations, and their frames
    if episode_limits:
        count, largest, observed, n_frames = episode_limits()
        sizes += [size for size in [largest] if 0 not in size]
    sizes += [size for *_, size in chain.from_iterable(videos)]
    width, height = max((processor.resized_size(*size) for size in sizes), key=math.prod, default=(448, 448))
    size = {"width": width, "height": height}
    limits: dict[str, Any] = {"image": {"count": count} | size if count else 0, "video": 0}
    media, shapes = {}, list(chain.from_iterable(videos))
    if shapes or observed:
        n_frames = max([n_frames * (observed > 0), *(n for n, *_ in shapes)])
        limits["video"] = {"count": max(map(len, videos)) + observed, "num_frames": n_frames} | size
        fps = max((fps for _, fps, _ in shapes), default=1.0)
        media = {"media_io_kwargs": {"video": {"num_frames": -1, "fps": fps}}}  # servers do not choose frames
    return {"max_model_len": length, "limit_mm_per_prompt": limits} | media


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
    should_stop: Callable[[], bool] = never_stop,
    **server_kwargs: Any,
) -> Engine:
    """Return the engine `choice`, which comes from resolve_engine. `sizes`: the result of size_limits, and other
    arguments of vLLM; `vllm`: --vllm; `server_kwargs`: arguments that only ServerEngine needs."""
    if choice == "hf":
        return HFEngine(load_hf(path, dtype, family_paths), processor, ctx.device, cache, should_stop)
    if choice == "server":
        server_kwargs |= {"max_model_len": sizes["max_model_len"], "should_stop": should_stop}
        return plug_in("engines.server", "--rollout server").ServerEngine(
            servers, processor, dtype, ctx, **server_kwargs)
    settings = vllm_settings(vllm, choice, ctx.world) | sizes
    vllm_engine = plug_in("engines.vllm", "--rollout vllm").VLLMEngine
    return vllm_engine(path, processor, ctx.device, dtype, should_stop, **settings)


def make_training_engine(
    cfg: Any,
    models: Models,
    processor: Processor,
    sets: list[ExampleList],
    ctx: DistContext,
    episode_limits: EpisodeLimitsFn | None = None,
    **stop_callbacks: Callable,
) -> Engine:
    """Return the engine of a run, with all of the policy's weights: also the frozen ones, which a resumed run may have
    trained earlier. `cfg` is a train.Config, `sets` are the datasets of all prompts, and `stop_callbacks` are the
    `should_stop` and `request_stop` of ServerEngine."""
    model, vllm, servers, out, policy = cfg.model, cfg.rollout.vllm, cfg.servers, Path(cfg.run.out), models.policy
    sizes = size_limits(sets, processor, cfg.rollout.max_new_tokens, episode_limits)
    if cfg.rollout.replay_experts:
        sizes["enable_return_routed_experts"] = True
    if servers.serve:
        launch = plug_in("engines.local", f"--serve {servers.serve}").launch_servers
        rank = model.lora_rank if servers.sync == "adapter" else 0
        settings = vllm_settings(vllm, "server", ctx.world) | sizes
        args = (servers.serve, model.model, processor, models.dtype, settings, out, rank)
        servers = replace(servers, servers=run_on_rank0(lambda: launch(*args)))
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
        **stop_callbacks,
    )
    engine.sync(models.weights(engine.dtype))
    return engine


def start_sampling(
    cfg: Any, models: Models, processor: Processor, packer: Packer, sets: list[ExampleList], env: Any, batches: Batches,
    interrupt: Any, ctx: DistContext,
) -> Engine:  # fmt: skip
    """Start the engine of a run, compare it with the trainer (self_test), and return it. With --env (`env`) it plays
    episodes, with --async-steps it samples ahead. `cfg` is a train.Config, `interrupt` a watchdog.SignalHandler."""
    stop_callbacks = {"should_stop": interrupt.requested, "request_stop": interrupt.give_up}
    engine = make_training_engine(
        cfg, models, processor, sets, ctx, env.episode_limits if env else None, **stop_callbacks)
    if cfg.rollout.replay_experts:
        plug_in("layers.experts", "--replay-experts").start_replay(models.policy.hf, engine)
    if cfg.run.self_test:
        sampling, reset_fn = batches.sampling(0), env.reset_example if env else identity
        print0(self_test(models.policy, engine, sets[0], processor, packer, sampling, reset_fn))
    if env:
        engine = plug_in("envs._episodes", "--env").EpisodeEngine(engine, env, processor)
    if cfg.servers.async_steps:
        engine = plug_in("engines.ahead", "--async-steps").Ahead(engine, batches)
    return engine
