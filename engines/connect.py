"""Servers for --rollout server: the settings, what is checked of them, and the engine that speaks to them."""

import importlib.util
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from errors import need, refusing
from model import ModelConfig, Processor
from parallel.checkpoint import on_rank0
from rollout import Engine
from settings import flag_of, never, setting
from utils import Context

VLLM_REMEDY = "pip install -r requirements-gpu.txt (on a CPU: docs/scale.md, On a CPU)"
SYNC = ("auto", "nccl", "gloo", "disk", "adapter")
IN_FLIGHT = ("keep", "abort", "wait")


@dataclass(frozen=True)
class ConnectionConfig:
    """Servers (--rollout server; docs/scale.md)"""

    servers: tuple[str, ...] = setting((), "vLLM's or SGLang's, which engines.serve starts", metavar="URL",
                                       from_run=never)
    sync: str = setting("auto", "how they get weights: by broadcast, through --out (a disk that they see), or the "
                        "adapter alone; auto: nccl on a GPU, else gloo", choices=SYNC)
    server_timeout: float = setting(600.0, "seconds that one may take for a response or an update", above=0)


@dataclass(frozen=True)
class ServerConfig(ConnectionConfig):
    """Servers in training"""

    serve: int = setting(0, "instead of --servers: number of vLLM servers to start and stop on this machine", least=0)
    async_steps: int = setting(0, "K: sample up to K batches ahead of the update, with weights up to K updates old",
                               least=0)
    in_flight: str = setting("abort", "responses that a sync meets: go on with old keys and values; stop, and go on "
                             "from what is there with the new weights; or end first", choices=IN_FLIGHT)

    def check(self, engine: str, vllm: tuple[str, ...], model: ModelConfig) -> None:
        """Settings that contradict each other, --rollout, --vllm or what is there; does every server answer?"""
        if engine != "server":
            given = {name: value for name, value in vars(self).items() if value != getattr(type(self), name)}
            told = " ".join(f"{flag_of(n)} {' '.join(v) if n == 'servers' else v}" for n, v in given.items())
            need(not given, f"{told}: for servers, but the engine is --rollout {engine}; use --rollout server")
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
        gpu = torch.cuda.is_available()
        need(self.sync != "nccl" or gpu, "--sync nccl: there is no GPU here; use gloo")
        installed = importlib.util.find_spec("vllm") is not None
        told = f"--serve {self.serve}: vLLM is not installed here; {VLLM_REMEDY}, or name servers with --servers"
        need(not self.serve or installed, told)
        for url in self.servers:
            check_server(url)


def check_server(url: str) -> None:
    """Raise UserError unless a server answers at the URL."""
    import httpx2  # here, as in `connect`: without servers a run must start without their libraries

    form = f"--servers {url}: give http://HOST:PORT, several with spaces between"
    with refusing(ValueError, form):
        parts = urlsplit(url)
        plain = parts.scheme in ("http", "https") and parts.hostname and parts.port
    need(bool(plain) and not (parts.path.strip("/") or parts.query or parts.fragment or parts.username), form)
    told = f"--servers {url}: no server answers there; `python -m engines.serve` starts one"
    more = {"timeout": 30.0, "trust_env": False}  # only the answer's status is read
    with refusing(httpx2.HTTPError, told), httpx2.stream("GET", f"{url.rstrip('/')}/health", **more) as answer:
        need(answer.status_code == 200, f"{told} (/health says {answer.status_code})")


def connect(
    servers: ServerConfig,
    path: str,
    hf: torch.nn.Module,
    dtype: torch.dtype,
    processor: Processor,
    settings: dict,
    ctx: Context,
    out: Path,
    lora_rank: int = 0,
    **more: Any,
) -> Engine:
    """Return the engine of --rollout server. With --serve, rank 0 first starts servers of the model at `path`; they end
    when it ends. `more` is passed to ServerEngine."""
    from engines.local import serve_local
    from engines.server import ServerEngine

    for left in (out / "sync").glob("*") if ctx.main else ():  # of a run that was killed in the middle of a sync
        shutil.rmtree(left, ignore_errors=True)
    urls, adapter = list(servers.servers), lora_rank if servers.sync == "adapter" else 0
    if servers.serve:
        urls = on_rank0(partial(serve_local, servers.serve, path, processor, dtype, settings, out, adapter))
    text = hf.config.get_text_config()
    sync = {"auto": "nccl" if ctx.device.type == "cuda" else "gloo"}.get(servers.sync, servers.sync)
    return ServerEngine(
        urls,
        processor,
        dtype,
        ctx,
        vocab_size=text.vocab_size,
        banned=processor.banned(text.vocab_size).tolist(),
        max_model_len=settings["max_model_len"],
        folder=out / "sync",
        sync=sync,
        in_flight=servers.in_flight,
        seconds=servers.server_timeout,
        **more,
    )
