"""Which engine samples: the flags of servers, what is checked of them, and how each engine starts.

Servers and vLLM, which a fork may delete, are imported where a flag asks for them. vLLM itself, which takes seconds, is
imported when it starts.
"""

import asyncio
import importlib.util
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from engines.hf import HFEngine
from engines.self_test import self_test
from errors import in_copy, need, plug_in, refusing
from model import ModelConfig, Processor, VisionCache, load_hf
from packing import Packer
from parallel.checkpoint import on_rank0
from parallel.models import Models
from parallel.sharding import save_adapter
from prepare_data import Example
from rollout import Batches, Engine, Examples, RolloutConfig, as_given
from rollout import never as never_interrupted
from settings import flag_of, never, setting
from utils import Context, print0

VLLM_INSTALL_HINT = "pip install -r requirements-gpu.txt (on a CPU: docs/scale.md, On a CPU)"
SYNC_METHODS = ("auto", "nccl", "gloo", "disk", "adapter")
IN_FLIGHT_POLICIES = ("keep", "abort", "wait")


@dataclass(frozen=True)
class ConnectionConfig:
    """Servers (--rollout server; docs/scale.md)"""

    servers: tuple[str, ...] = setting((), "vLLM's or SGLang's, which engines.serve starts", metavar="URL",
                                       from_run=never)
    sync: str = setting("auto", "how they get weights: by broadcast, through --out (a disk that they see), or the "
                        "adapter alone; auto: nccl on a GPU, else gloo", choices=SYNC_METHODS)
    server_timeout: float = setting(600.0, "seconds that one may take for a response or an update", above=0)


@dataclass(frozen=True)
class ServerConfig(ConnectionConfig):
    """Servers in training"""

    serve: int = setting(0, "instead of --servers: number of vLLM servers to start and stop on this machine", least=0)
    async_steps: int = setting(0, "K: sample up to K batches ahead of the update, with weights up to K updates old",
                               least=0)
    in_flight: str = setting("abort", "responses that a sync meets: go on with old keys and values; stop, and go on "
                             "from what is there with the new weights; or end first", choices=IN_FLIGHT_POLICIES)

    def check(self, engine: str, vllm: tuple[str, ...], model: ModelConfig) -> None:
        """Raise UserError for settings that contradict each other, --rollout, --vllm or the model's."""
        if engine != "server":
            given = {name: value for name, value in vars(self).items() if value != getattr(type(self), name)}
            flags = " ".join(f"{flag_of(n)} {' '.join(v) if n == 'servers' else v}" for n, v in given.items())
            need(not given, f"{flags}: for servers, but the engine is --rollout {engine}; use --rollout server")
            return
        given = "both" if self.servers else "neither"
        one = bool(self.servers) != bool(self.serve)
        need(one, f"--rollout server: give --servers URL... or --serve N, not {given}"
             + (" (--servers default takes back those of a run that is resumed)" if self.servers else ""))
        need(not vllm or self.serve > 0, "--vllm: give it where the servers are started, or use --serve")
        need(self.sync != "adapter" or model.lora_rank > 0, "--sync adapter: there is none without --lora-rank above 0")
        need(self.sync != "adapter" or model.train_vision == "none",
             f"--sync adapter: servers take adapters of the language model alone, not those of --train-vision "
             f"{model.train_vision}; use --sync gloo, nccl or disk")
        need(self.sync != "nccl" or torch.cuda.is_available(), "--sync nccl: there is no GPU here; use gloo")
        for url in self.servers:
            form = f"--servers {url}: give http://HOST:PORT, several with spaces between"
            with refusing(ValueError, form):
                parts = urlsplit(url)
                plain = parts.scheme in ("http", "https") and parts.hostname and parts.port
            need(bool(plain) and not (parts.path.strip("/") or parts.query or parts.fragment or parts.username), form)


def vllm_is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def check_engine(
    engine: str, vllm: tuple[str, ...], servers: ServerConfig, model: ModelConfig, world: int
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
            find_kind(servers.servers)
    vllm_settings(vllm, engine, world)


def find_kind(urls: Sequence[str]) -> str:
    """Return the kind of these servers, vllm or sglang. Raise UserError unless all answer, and are of one kind."""
    return asyncio.run(plug_in("engines.client", "--servers").find_common_kind(urls))


def resolve_engine(choice: str, device: torch.device) -> str:
    """Turn --rollout auto into the engine of the run; called once, before anything is loaded."""
    if choice != "auto":
        return choice
    return "vllm" if device.type == "cuda" and in_copy("engines.vllm") and vllm_is_installed() else "hf"


def vllm_settings(pairs: Sequence[str], engine: str, world: int) -> dict[str, object]:
    """Return --vllm KEY=VALUE ... as arguments of vLLM's LLM (engines/vllm.py has the same function)."""
    return plug_in("engines.vllm", "--vllm").vllm_settings(pairs, engine, world) if pairs else {}


ImageLimits = Callable[[], tuple[int, tuple[int, int]]]  # of episodes: how many images, and how large


def image_limits(
    examples: Sequence[Example], processor: Processor, of_episodes: ImageLimits | None = None
) -> dict[str, object]:
    """Return vLLM's limit_mm_per_prompt, by which it reserves memory: the most images in a prompt, or an episode, and
    the size of the largest, as the model sees it."""
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
    vllm: Sequence[str] = (),
    world: int = 1,
    interrupted: Callable[[], bool] = never_interrupted,
) -> Engine:
    """Return the engine that resolve_engine chose, for prompts made of `examples` and sequences of at most
    max_model_len tokens. vLLM alone reads `vllm`, which is --vllm, for a run of `world` processes."""
    if choice == "hf":
        return HFEngine(load_hf(path, dtype, family_paths), processor, device, cache, interrupted)
    limits = image_limits(examples, processor, of_episodes)
    settings = vllm_settings(vllm, choice, world) | {"max_model_len": max_model_len, "limit_mm_per_prompt": limits}
    return plug_in("engines.vllm", "--rollout vllm").VLLMEngine(path, processor, device, dtype, interrupted, **settings)


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
    """Return the engine of a run, for prompts made of these sets of examples, with all of the policy's weights: also
    the frozen ones, which the run that is resumed may have trained. It stops sampling if `interrupted`, and calls
    `give_up` with a message if no server is left."""
    longest = max(chain.from_iterable(examples.lengths for examples in sets))
    examples, length = list(chain.from_iterable(sets)), longest + rollout.max_new_tokens
    policy = models.policy
    if rollout.rollout == "server":
        if servers.serve:
            limits = image_limits(examples, processor, of_episodes)
            settings = vllm_settings(rollout.vllm, "server", ctx.world)
            settings |= {"max_model_len": length, "limit_mm_per_prompt": limits}
            rank = cfg.lora_rank if servers.sync == "adapter" else 0
            launch = plug_in("engines.local", f"--serve {servers.serve}").launch_servers
            urls = on_rank0(
                lambda: launch(servers.serve, cfg.model, processor, models.dtype, settings, out, lora_rank=rank))
            servers = replace(servers, servers=urls)
        engine = connect(
            servers,
            processor,
            models.dtype,
            ctx,
            out,
            vocab_size=policy.hf.config.get_text_config().vocab_size,
            max_model_len=length,
            save_adapter=partial(save_adapter, policy, cfg.model),
            trained_tower=not policy.vision_frozen,
            interrupted=interrupted,
            give_up=give_up,
        )
    else:
        engine = make_engine(
            rollout.rollout,
            cfg.model,
            processor,
            ctx.device,
            models.dtype,
            family_paths=cfg.family_paths,
            examples=examples,
            max_model_len=length,
            of_episodes=of_episodes,
            cache=policy.cache,
            vllm=rollout.vllm,
            world=ctx.world,
            interrupted=interrupted,
        )
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
    ends = {"interrupted": interrupt.requested, "give_up": interrupt.give_up}
    engine = start_engine(cfg.model, cfg.rollout, cfg.servers, *places, **ends)
    if cfg.run.self_test:
        sampling, start_of = batches.sampling(0), env.start_of if env else as_given
        print0(self_test(models.policy, engine, sets[0], processor, packer, sampling, start_of))
    if env:
        engine = plug_in("envs._play", "--env").Episodes(engine, env, processor)
    if cfg.servers.async_steps:
        engine = plug_in("engines.ahead", "--async-steps").Ahead(engine, batches)
    return engine


def connect(
    servers: ServerConfig,
    processor: Processor,
    dtype: torch.dtype,
    ctx: Context,
    out: Path,
    *,
    vocab_size: int,
    max_model_len: int,
    save_adapter: Callable[[Path], None] | None = None,
    **more: Any,
) -> Engine:
    """Return the engine that samples from the servers at these URLs. `save_adapter(folder)`, collective, writes the
    policy's adapter (--sync adapter). `more` is passed to ServerEngine."""
    client, server, sync = (plug_in(f"engines.{name}", "--rollout server") for name in ("client", "server", "sync"))
    folder = out / "sync"  # where --sync disk and adapter write; all servers must see it
    for left in folder.glob("*") if ctx.main else ():  # by a run that was killed in the middle of a sync
        shutil.rmtree(left, ignore_errors=True)
    urls, timeout = [url.rstrip("/") for url in servers.servers], servers.server_timeout
    twice = sorted({url for url in urls if urls.count(url) > 1})
    need(not twice, f"--servers {' '.join(twice)} is given twice; give each once")
    auto = "nccl" if ctx.device.type == "cuda" else "gloo"
    how = auto if servers.sync == "auto" else servers.sync
    kind, calls, banned = find_kind(urls), client.Calls(), processor.banned(vocab_size).tolist()
    clients = [server.CLIENTS[kind](url, calls.http, timeout, processor.eos_ids, banned) for url in urls]
    calls.run_all([client.check(how, max_model_len) for client in clients])
    sender = sync.make_sender(how, kind, calls, timeout, folder, save_adapter)
    ids = set(range(vocab_size)).difference(banned)
    more["in_flight"] = servers.in_flight
    return server.ServerEngine(calls, clients, sender, processor, dtype, ctx, ids, max_model_len, **more)
