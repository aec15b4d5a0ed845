"""Simulation of a training run: how much faster are asynchronous steps than the synchronous loop, on 8 to 1,024 GPUs?

    OMP_NUM_THREADS=1 python benchmarks/async.py                              # all tables, about two minutes
    OMP_NUM_THREADS=1 python benchmarks/async.py --lengths geo3k --gpus 8 32 --scaling strong --seeds 3

Nothing here ran on a GPU: all times are computed from assumptions, which are printed first with their sources.

Modes:

colocated   all GPUs sample, then all sleep or wake, then all train
K=0         servers sample, then the trainer trains, then the weights are sent to the servers
K=1, 2, 3   up to K batches beyond the one that is needed are sampled at the same time; they are trained in the order of
            the data. When the weights change, responses in flight are handled in one of three ways:
            keep    they continue with their old KV cache
            abort   they continue from prompt + partial response, which is prefilled again with the new weights
            wait    all requests that were sent are finished first, as servers do not choose what is sent to them
first K     finished first, trained first: as many groups are in flight as with K, and new ones also start right after
            a sync; a step trains the groups that were finished first. Groups that would be older than K are dropped.
any K       the same, but nothing is dropped, so staleness may exceed K: see the column `max`

A batch is the P prompts of a step with G samples each. A group is sent to the server with the fewest requests, which
runs up to `slots` sequences at once in order of arrival. In an iteration each running sequence gets a token. It takes

    overhead + max((weights + KV cache of the running sequences) / bandwidth, FLOPs / rate)

(weights and KV cache are read from the same memory, so their times add up). The first sequence of a group on a server
prefills the prompt, and all other sequences wait meanwhile. A sync interrupts work in flight: an iteration that is not
finished, or a prefill without a first token, is lost. A training step takes max(FLOPs of the batch / GPUs, FLOPs of its
largest group) / rate, because groups are not split over GPUs, plus a constant.

Between two syncs nothing is sent to the servers. So each sync projects all requests to their ends at once by sorting,
and cuts the projection off at the next sync. This is exact and needs no event loop (tests/test_async_bench.py compares
it with a loop over iterations).

Scaling:

weak        the batch grows with the GPUs: --prompts-per-gpu
strong      the batch stays the same: --prompts

Layouts with separate servers use the best split of the GPUs, in eighths. For the first GPU count all splits are tried.
For the others the search starts at the best split of the previous count and moves up and down as long as that helps;
with weak scaling and more than 128 GPUs that split is used without a search. The trainer needs 16 bytes per parameter.

Columns:

speed       steps in the same time, relative to colocated and to K=0
tokens/s    trained response tokens per second and GPU of both kinds: the speed if trained lengths differ
idle        1 - the fraction of the time that GPUs train, or that a server has something to sample; syncs count as idle
staleness   weight versions between sampling a token and training on it, averaged over trained tokens
again       tokens of responses that are prefilled again, over tokens sampled
dropped     tokens of dropped groups, over tokens sampled
length      mean length of trained responses over that of all prompts' responses, minus 1
"""

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import log
from pathlib import Path
from statistics import NormalDist, fmean
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
import transformers  # noqa: E402
from balance import QWEN2_5_VL_7B  # noqa: E402

from errors import need  # noqa: E402
from packing import flop_costs, group_flops  # noqa: E402
from report.run_files import write_text  # noqa: E402
from utils import run_script  # noqa: E402

PARAMETERS = 8.29e9  # in the checkpoint of Qwen2.5-VL-7B
PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
CALCULATOR = (1, 1, 3, 4, 7, 12, 19, 28, 35, 37, 37)  # tokens at these percentiles


class Lengths(NamedTuple):
    """A distribution of response lengths: log-lengths at standard normal quantiles, interpolated linearly."""

    source: str
    z: Sequence[float]
    log_length: Sequence[float]
    cap: int
    prompt_share: float  # fraction of the variance that comes from the prompt

    def draw(self, rng: np.random.Generator, n: int, samples: int) -> np.ndarray:
        own_z = rng.normal(size=(n, samples)) * (1 - self.prompt_share) ** 0.5
        z_NG = rng.normal(size=(n, 1)) * self.prompt_share**0.5 + own_z
        return np.clip(np.exp(np.interp(z_NG, self.z, self.log_length)), 1, self.cap).astype(np.int64)


def lognormal(source: str, median: float, sigma: float, cap: int, prompt_share: float) -> Lengths:
    return Lengths(source, (-8, 8), (log(median) - 8 * sigma, log(median) + 8 * sigma), cap, prompt_share)


def measured(source: str, quantiles: Sequence[float], stretch: float, prompt_share: float) -> Lengths:
    z = [NormalDist().inv_cdf(min(max(p / 100, 1e-6), 1 - 1e-6)) for p in PERCENTILES]
    return Lengths(source, z, [log(stretch * q) for q in quantiles], round(stretch * quantiles[-1]), prompt_share)


LENGTHS = {
    "toy": measured(
        "MEASURED in shape: 512 responses of steps 1 and 10 of `demo.py run --task calculator --seed 0 --short`, mean "
        "14.0, 4.7% at the limit of 37, 12% of the log-lengths' variance comes from the prompt. Scale ASSUMED: "
        "times 30, which gives the mean of geo3k",
        CALCULATOR, 30, 0.12,
    ),
    "geo3k": lognormal(
        "ASSUMED shape, PUBLISHED mean: log-normal, median 326, sigma 0.75, at most 2048, as in benchmarks/balance.py: "
        "its mean fits the tokens/s that EasyR1 publishes for Qwen2.5-VL-7B on geo3k (README of hiyouga/EasyR1). Half "
        "of the variance comes from the prompt: ASSUMED. (A run in a log at verl-project/verl issue 1208, mean 325, "
        "0.4% at the limit of 1024, would have sigma 0.48: a shorter tail)",
        326, 0.75, 2048, 0.5,
    ),
    "reasoning": lognormal(
        "FITTED to published figures: limit 40,960 tokens, and the last tenth of the responses takes up to half of the "
        "sampling time (RL of Qwen2-VL-72B, Seer, arXiv 2511.14617, according to reviews of it), so that the 90th "
        "percentile is half the limit. Log-normal with sigma 1: ASSUMED; median 5685. Half of the variance comes "
        "from the prompt: ASSUMED (Seer reports that responses to a prompt have similar lengths)",
        20480 / np.exp(NormalDist().inv_cdf(0.9)), 1.0, 40960, 0.5,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """The assumed speed and size of hardware and engines. `note` is the source of each value."""

    def _(default: float, note: str):
        return field(default=default, metadata={"note": note})

    peak: float = _(989, "TFLOP/s of dense bf16: datasheet of the H100 SXM")
    gemm: float = _(0.80, "fraction of it that prefill and decoding reach: cuBLAS's 790 of 989 as measured by others")
    bandwidth: float = _(3.35, "TB/s of memory bandwidth: datasheet of the H100 SXM")
    reached: float = _(0.80, "fraction of it that decoding reaches: ASSUMED")
    memory: float = _(80, "GB per GPU: datasheet; nine tenths of it for weights and KV cache")
    overhead: float = _(2.0, "ms per iteration of an engine for everything except the model: ASSUMED")
    all_reduce: float = _(0.6, "additional ms per iteration with tp > 1: ASSUMED, 56 all-reduces of 10 us")
    slots: int = _(256, "sequences that an engine runs at once, if KV caches of mean length fit: ASSUMED")
    mfu: float = _(0.35, "MFU of the trainer: torchtitan's Llama-3.1-8B on 8 H100 has 0.33-0.39, EasyR1 0.23")
    step: float = _(1.0, "s per training step beyond its FLOPs, for rewards, packing, optimizer: ASSUMED")
    link: float = _(8.25, "GB/s at which servers receive weights, all at once: 30B to 30 of them in 7 s, as published")
    latency: float = _(0.5, "s per sync beyond its bytes: ASSUMED")
    wake: float = _(3.0, "s per colocated step for sleep, wake and weights: vLLM's blog has 0.8-2.6 for waking")
    tp: int = _(1, "GPUs per server")
    del _

    def sync_seconds(self) -> float:
        return 2 * PARAMETERS / (self.link * 1e9) + self.latency


class Engine(NamedTuple):
    """The seconds that the parts of an engine's work take."""

    overhead: float  # per iteration
    weights: float  # to read the weights once
    kv: float  # to read the KV cache of a token
    compute: float  # per sequence in an iteration
    flop: float  # per FLOP of a prefill
    slots: int

    def seconds(self, j, n, first):
        """Return the seconds of j iterations of n sequences. Their contexts have `first` tokens in the first iteration
        and n more in each further one. Arguments may be arrays."""
        above = self.compute * n - self.weights - self.kv * first  # seconds by which compute exceeds memory at first
        bound = np.clip(np.ceil(above / np.maximum(self.kv * n, 1e-30)), 0, j)  # number of compute-bound iterations
        rest = j - bound
        memory = rest * (self.weights + self.kv * first) + self.kv * n * (bound + j - 1) * rest / 2
        return j * self.overhead + bound * self.compute * n + memory


COSTS = flop_costs(transformers.Qwen2_5_VLConfig(**QWEN2_5_VL_7B))  # a third of an update with a frozen tower
FORWARD = flop_costs(transformers.Qwen2_5_VLConfig(**QWEN2_5_VL_7B), vision=1)
KV_BYTES = 2 * 2 * 28 * 4 * 128  # per token: keys and values, bf16, layers, heads, head size


def engine(machine: Machine, mean_context: float) -> Engine:
    rate = machine.peak * 1e12 * machine.gemm * machine.tp
    bandwidth = machine.bandwidth * 1e12 * machine.reached * machine.tp
    fits = (0.9 * machine.memory * 1e9 * machine.tp - 2 * PARAMETERS) / (KV_BYTES * mean_context)
    memory = f"--memory {machine.memory:g} GB x --tp {machine.tp} cannot hold a sequence of {mean_context:.0f} tokens"
    need(fits >= 1, f"{memory}; raise --tp")
    return Engine(
        (machine.overhead + machine.all_reduce * (machine.tp > 1)) / 1e3,
        (COSTS.token + COSTS.trained_token) / bandwidth,  # 2 FLOPs per multiplication and 2 bytes per weight
        KV_BYTES / bandwidth,
        (COSTS.token + COSTS.trained_token) / rate,
        1 / rate,
        min(machine.slots, int(fits)),
    )


class Work(NamedTuple):
    """The groups of a run, in the order of the data."""

    prompts: int  # per step
    prompt_N: np.ndarray  # tokens
    length_NG: np.ndarray
    prefill_N: np.ndarray  # FLOPs of a prompt with its image
    update_N: np.ndarray  # FLOPs of a group's update


def draw_work(lengths: Lengths, prompts: int, samples: int, batches: int, seed: int) -> Work:
    """Return random groups, with prompts and images as in benchmarks/balance.py."""
    rng = np.random.default_rng(seed)
    n = prompts * batches
    length_NG = lengths.draw(rng, n, samples)
    prompt_N = np.clip(np.exp(rng.normal(np.log(361), 0.5, n)), 109, 1247).astype(np.int64)
    image_N = (prompt_N * rng.uniform(0.2, 0.9, n)).astype(np.int64)
    prefill, update = [], []
    for prompt, image, responses in zip(prompt_N.tolist(), image_N.tolist(), length_NG.tolist(), strict=True):
        prefill.append(group_flops(FORWARD, prompt, [4 * image], [], 0))
        update.append(3 * group_flops(COSTS, prompt, [4 * image], responses, sum(responses)))
    return Work(prompts, prompt_N, length_NG, np.array(prefill), np.array(update))


# ----------------------------------------------------------------------------------------------------------------------
# Servers


class Requests(NamedTuple):
    """A table of requests: arrays with one row per request, in the order in which they were sent."""

    group: np.ndarray
    server: np.ndarray
    length: np.ndarray
    done: np.ndarray  # tokens sampled so far
    live: np.ndarray  # whether its KV cache is in its server
    versions: np.ndarray  # sum over its tokens of the versions that sampled them
    oldest: np.ndarray  # oldest of these versions
    finished: np.ndarray  # time; inf if it is not finished

    def take(self, rows: np.ndarray) -> "Requests":
        return Requests(*(column[rows] for column in self))


NO_REQUESTS = Requests(*(np.zeros(0, kind) for kind in (int, int, int, int, bool, float, int, float)))


def send(requests: Requests, work: Work, groups: Sequence[int], servers: int) -> Requests:
    """Send each group to the server with the fewest requests, and return all requests."""
    samples = work.length_NG.shape[1]
    busy = np.bincount(requests.server[np.isinf(requests.finished)], minlength=servers).tolist()
    heap = [(n, server) for server, n in enumerate(busy)]
    heapq.heapify(heap)
    chosen = []
    for _ in groups:
        n, server = heap[0]
        heapq.heapreplace(heap, (n + samples, server))
        chosen.append(server)
    rows = np.array(groups, np.int64)
    length = work.length_NG[rows % len(work.length_NG)].reshape(-1)
    zeros = np.zeros(len(length), np.int64)
    far = np.full(len(length), 1 << 40)
    fresh = (rows.repeat(samples), np.array(chosen, np.int64).repeat(samples), length, zeros, zeros.astype(bool))
    fresh = Requests(*fresh, zeros.astype(float), far, np.full(len(length), np.inf))
    return Requests(*(np.concatenate(pair) for pair in zip(requests, fresh, strict=True)))


def start_iterations(server: np.ndarray, remaining: np.ndarray, slots: int) -> np.ndarray:
    """Return when each request gets a slot of its server, in iterations from now. Requests are sorted by server."""
    start = np.zeros(len(server), np.int64)
    edges = np.flatnonzero(np.diff(server, prepend=-1, append=-1)).tolist()
    for low, high in zip(edges, edges[1:], strict=False):
        ends = remaining[low : low + slots].tolist()
        heapq.heapify(ends)
        for i in range(low + slots, high):
            start[i] = ends[0]
            heapq.heapreplace(ends, ends[0] + int(remaining[i]))
    return start


class Projection:
    """The work of the servers from `now` on if nothing else is sent. `requests` are the unfinished ones."""

    def __init__(self, requests: Requests, work: Work, engine: Engine, servers: int, now: float):
        self.order = np.argsort(requests.server, kind="stable")
        queue = requests.take(self.order)
        rows = queue.group % len(work.prompt_N)
        remaining = queue.length - queue.done
        self.start_R = start_iterations(queue.server, remaining, engine.slots)
        # the first request of a group that needs the prompt prefills it
        cold = np.flatnonzero(~queue.live)
        first = np.zeros(len(rows), bool)
        first[cold[np.unique(queue.group[cold], return_index=True)[1]]] = True
        prompt = work.prompt_N[rows]
        again = np.where(queue.live, 0, COSTS.token * queue.done + COSTS.pair * queue.done * (prompt + queue.done / 2))
        prefill_R = engine.flop * (again + np.where(first, work.prefill_N[rows], 0.0))
        self.again = int(queue.done[cold].sum())

        # each start and each end is an event; within an iteration the ends come first
        n = len(rows)
        server = np.concatenate([queue.server, queue.server])
        iteration = np.concatenate([self.start_R, self.start_R + remaining])
        sign = np.repeat([1, -1], n)
        events = np.lexsort((np.arange(2 * n), sign, iteration, server))
        offset_R = prompt + queue.done - self.start_R  # context = offset + iteration
        self.server, self.iteration = server[events], iteration[events]
        self.running = np.cumsum(sign[events])
        self.offset = np.cumsum((sign * np.tile(offset_R, 2))[events])
        gaps = np.append(np.diff(self.iteration), 0)
        gaps[np.append(self.server[1:] != self.server[:-1], True)] = 0  # after a server's last event
        self.engine = engine
        spent = self.seconds(gaps, slice(None)) + np.append(np.concatenate([prefill_R, np.zeros(n)])[events][1:], 0)
        starts = np.searchsorted(self.server, np.arange(servers + 1))
        self.starts = starts[:-1]
        self.present = np.diff(starts) > 0
        clock = np.concatenate([[0.0], np.cumsum(spent)[:-1]]) if n else np.zeros(0)
        # each server begins with the prefill of its first event, which is not part of a gap
        base = np.zeros(servers)
        base[self.present] = clock[self.starts[self.present]]
        opening = np.zeros(servers)
        opening[self.present] = np.concatenate([prefill_R, np.zeros(n)])[events][self.starts[self.present]]
        self.time = now + clock - base[self.server] + opening[self.server]
        self.now = now
        self.busy_until = np.full(servers, now)
        self.busy_until[self.present] = self.time[starts[1:][self.present] - 1]
        finish_R = np.empty(n)
        ends = events >= n
        finish_R[events[ends] - n] = self.time[ends]
        self.finished = np.empty(n)
        self.finished[self.order] = finish_R
        self.remaining_R, self.server_R, self.finish_R = remaining, queue.server, finish_R

    def seconds(self, iterations: np.ndarray, at) -> np.ndarray:
        running = self.running[at]
        return self.engine.seconds(iterations, running, self.offset[at] + running * self.iteration[at])

    def sampled(self, time: float) -> np.ndarray:
        """Return the tokens that each request has sampled by `time`. Unfinished iterations do not count."""
        done = np.zeros(len(self.order), np.int64)
        if not len(done):
            return done
        passed = np.add.reduceat(self.time <= time, self.starts[self.present])
        servers = np.flatnonzero(self.present)[passed > 0]
        last = self.starts[self.present][passed > 0] + passed[passed > 0] - 1
        limit = np.append(self.iteration, 0)[np.minimum(last + 1, len(self.iteration))] - self.iteration[last]
        low = np.zeros(len(last), np.int64)
        high = np.where(self.running[last] > 0, limit, 0)
        while (low < high).any():  # bisection for the largest number of iterations that end in time
            middle = (low + high + 1) // 2
            fits = self.time[last] + self.seconds(middle, last) <= time
            low = np.where(fits, middle, low)
            high = np.where(fits, high, middle - 1)
        reached = np.full(len(self.present), -1)
        reached[servers] = self.iteration[last] + low
        by_order = np.clip(reached[self.server_R] - self.start_R, 0, self.remaining_R - 1)
        done[self.order] = np.where(self.finish_R <= time, self.remaining_R, by_order)
        return done


# ----------------------------------------------------------------------------------------------------------------------
# A run


class Mode(NamedTuple):
    name: str
    k: int = 0
    in_flight: str = "keep"
    first: bool = False  # train the groups that finish first
    drop: bool = True  # drop groups that would be older than K
    colocated: bool = False


COLOCATED = Mode("colocated", colocated=True)
MODES = (
    COLOCATED,
    Mode("K=0"),
    *(Mode(f"K={k} {way}", k, way) for k, way in product((1, 2), ("keep", "abort", "wait"))),
    Mode("K=3 keep", 3),
    *(Mode(f"first {k}", k, first=True) for k in (1, 2)),
    *(Mode(f"any {k}", k, first=True, drop=False) for k in (1, 2)),
)


class Times(NamedTuple):
    """The sizes and times of a run besides those of the engine."""

    servers: int
    trainers: int  # GPUs
    rate: float  # FLOP/s of a trainer's GPU
    step: float  # seconds of a training step beyond its FLOPs
    pause: float  # seconds of a sync, or of sleep, wake and sync

    def train(self, update: np.ndarray) -> float:
        """Return the seconds of a training step on groups with these FLOPs."""
        return max(update.sum() / self.trainers, update.max()) / self.rate + self.step


def simulate(work: Work, mode: Mode, engine: Engine, times: Times, steps: int, warmup: int) -> dict[str, float]:
    """Return means over the steps from `warmup` on, and sums of tokens (sampled, trained, thrown, left) of the run."""
    ahead = mode.k + 1
    requests = send(NO_REQUESTS, work, range(ahead * work.prompts), times.servers)
    sent = ahead * work.prompts
    now, began = 0.0, 0.0
    total = dict.fromkeys(("sampled", "trained", "thrown"), 0)
    sums = dict.fromkeys("train busy stale trained sampled again thrown responses gone gone_tokens".split(), 0.0)
    oldest = 0
    for step in range(steps):
        if step == warmup:
            began, sums = now, dict.fromkeys(sums, 0.0)
        open_R = np.isinf(requests.finished)
        projection = Projection(requests.take(open_R), work, engine, times.servers, now)
        finished = requests.finished.copy()
        finished[open_R] = projection.finished
        groups, row_R = np.unique(requests.group, return_inverse=True)
        done_at = np.zeros(len(groups))
        np.maximum.at(done_at, row_R, finished)
        chosen = np.argsort(done_at, kind="stable")[: work.prompts] if mode.first else np.arange(work.prompts)
        seconds = times.train(work.update_N[groups[chosen] % len(work.update_N)])
        cut = max(now, done_at[chosen].max()) + seconds
        if mode.in_flight == "wait":
            cut = max(cut, finished.max())

        new_tokens = np.zeros(len(open_R), np.int64)
        new_tokens[open_R] = projection.sampled(cut)
        done = requests.done + new_tokens
        requests = requests._replace(
            done=done,
            versions=requests.versions + step * new_tokens,
            oldest=np.where(new_tokens > 0, np.minimum(requests.oldest, step), requests.oldest),
            finished=np.where(finished <= cut, finished, np.inf),
            live=(done > 0) & (mode.in_flight != "abort"),
        )
        trained_R = np.isin(row_R, chosen)
        trained = requests.take(trained_R)
        oldest = max(oldest, step - int(trained.oldest.min()))
        first_version = np.full(len(groups), 1 << 40)
        np.minimum.at(first_version, row_R, requests.oldest)
        late_R = ~trained_R & (first_version[row_R] < step + 1 - mode.k) & mode.drop  # at the next step
        thrown = requests.take(late_R)
        requests = requests.take(~trained_R & ~late_R)
        n_new = ahead * work.prompts - len(np.unique(requests.group))
        requests = send(requests, work, range(sent, sent + n_new), times.servers)
        sent += n_new

        counts = {"sampled": new_tokens.sum(), "trained": trained.done.sum(), "thrown": thrown.done.sum()}
        total = {key: total[key] + int(n) for key, n in counts.items()}
        step_sums = counts | {
            "train": seconds,
            "busy": (np.minimum(projection.busy_until, cut) - now).sum() / times.servers,
            "stale": (step * trained.done - trained.versions).sum(),
            "again": projection.again,
            "responses": len(trained.done),
            "gone": len(thrown.done),
            "gone_tokens": thrown.length.sum(),
        }
        sums = {key: value + step_sums[key] for key, value in sums.items()}
        now = cut + times.pause
    time = now - began
    mean = sums["trained"] / sums["responses"]
    mean_of_all = (sums["trained"] + sums["gone_tokens"]) / (sums["responses"] + sums["gone"])
    busy_share = (sums["train"] + sums["busy"]) / time
    return {
        "seconds": time / (steps - warmup),
        "train_seconds": sums["train"] / (steps - warmup),
        "tokens": sums["trained"] / time,
        "trainer_idle": 1 - (busy_share if mode.colocated else sums["train"] / time),
        "server_idle": 1 - (busy_share if mode.colocated else sums["busy"] / time),
        "staleness": sums["stale"] / sums["trained"],
        "max_staleness": oldest,
        "again": sums["again"] / sums["sampled"],
        "dropped": sums["thrown"] / sums["sampled"],
        "length": mean / mean_of_all - 1,
        **total,
        "left": int(requests.done.sum()),
    }


def try_split(work: list[Work], mode: Mode, args: argparse.Namespace, gpus: int, eighths: int) -> dict | None:
    """Return means over seeds (`work` has an item per seed), or None if the trainer has too few GPUs for the model."""
    machine = args.machine
    servers = max(1, gpus * eighths // 8 // machine.tp)
    trainers = gpus if mode.colocated else gpus - servers * machine.tp
    if trainers * machine.memory * 1e9 < 16 * PARAMETERS:  # weights, gradients and Adam's moments
        return None
    context = fmean(float(seed_work.prompt_N.mean() + seed_work.length_NG.mean()) for seed_work in work)
    pause = machine.wake if mode.colocated else machine.sync_seconds()
    times = Times(servers, trainers, machine.peak * 1e12 * machine.mfu, machine.step, pause)
    rows = [simulate(seed_work, mode, engine(machine, context), times, args.steps, args.warmup) for seed_work in work]
    mean = {key: fmean(row[key] for row in rows) for key in rows[0]}
    mean["max_staleness"] = max(row["max_staleness"] for row in rows)
    seeds = [float(row["seconds"]) for row in rows]
    return mean | {"servers": servers, "trainers": trainers, "eighths": eighths, "seconds_of_seeds": seeds}


def best_split(work: list[Work], mode: Mode, args: argparse.Namespace, gpus: int, near: int | None, keep: bool) -> dict:
    """Return the fastest split. The search starts at `near`, the best split of fewer GPUs; with `keep` use it."""
    tried: dict[int, dict | None] = {}

    def seconds(eighths: int) -> float:
        if not 1 <= eighths <= 7:
            return float("inf")
        if eighths not in tried:
            tried[eighths] = try_split(work, mode, args, gpus, eighths)
        return tried[eighths]["seconds"] if tried[eighths] else float("inf")

    if mode.colocated:
        tried[8] = try_split(work, mode, args, gpus, 8)
    elif keep and near:
        seconds(near)
    else:
        best = near or min(range(1, 8), key=seconds)
        for way in (1, -1):
            while seconds(best + way) < seconds(best):
                best += way
    possible = [row for row in tried.values() if row]
    memory = f"--gpus {gpus} of --memory {args.machine.memory:g} GB cannot hold the trainer and a server"
    need(bool(possible), f"{memory}; the trainer needs {16 * PARAMETERS / 1e9:.0f} GB; use more GPUs")
    best_row = min(possible, key=lambda row: row["seconds"])
    return best_row | {"tried": {row["eighths"]: row["seconds"] for row in possible}}


# ----------------------------------------------------------------------------------------------------------------------
# The report


def assumptions(args: argparse.Namespace) -> list[str]:
    lines = ["Assumptions", ""]
    for name, item in Machine.__dataclass_fields__.items():
        lines.append(f"--{name.replace('_', '-'):10} {getattr(args.machine, name):>7g}  {item.metadata['note']}")
    lines += [
        "",
        f"model      Qwen2.5-VL-7B, {PARAMETERS / 1e9:g}e9 parameters, bf16, all but the tower trained; FLOPs by "
        f"packing.flop_costs, {COSTS.token / 1e9:.1f} GFLOP per token forward; {KV_BYTES / 1e3:.0f} kB of KV cache "
        "per token",
        f"sync       {args.machine.sync_seconds():.1f} s",
        "prompts    log-normal, median 361 tokens, 109-1247, 20-90% of them image tokens, as in benchmarks/balance.py",
        *(f"{name:10} {LENGTHS[name].source}" for name in args.lengths),
        "",
    ]
    return lines


COLUMNS = ("mode", "servers + trainer", "s / step", "vs colocated", "vs K=0", "tokens/s", "idle: trainer", "servers",
           "staleness", "max", "again", "dropped", "length")  # fmt: skip


def table(rows: list[dict]) -> list[str]:
    """Return the lines of Markdown tables, one table per case."""
    lines = []
    for row in rows:
        if row["mode"] == COLOCATED.name:
            size = f"{row['gpus']} GPUs, {row['prompts']} prompts x {row['samples']}"
            head = "| " + " | ".join(COLUMNS) + " |"
            rule = "|---|" + "--:|" * (len(COLUMNS) - 1)
            lines += ["", f"**{size}, {row['lengths']}, {row['scaling']}**", "", head, rule]
        split = "all" if row["mode"] == COLOCATED.name else f"{row['servers']} + {row['trainers']}"
        shares = [f"{100 * row[key]:.0f}%" for key in ("trainer_idle", "server_idle")]
        ages = [f"{row['staleness']:.2f}", f"{row['max_staleness']:.0f}"]
        lost = [f"{100 * row[key]:.1f}%" for key in ("again", "dropped", "length")]
        speeds = [f"{row['vs_colocated']:.2f}x", f"{row['vs_k0']:.2f}x", f"{row['tokens'] / row['gpus']:.0f}"]
        cells = [row["mode"], split, f"{row['seconds']:.1f}", *speeds, *shares, *ages, *lost]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


STYLES = {
    "K=0": ("#777777", "-"), "K=1 keep": ("#1f77b4", "-"), "K=2 keep": ("#d62728", "-"), "K=3 keep": ("#7b3294", "-"),
    "K=1 wait": ("#1f77b4", ":"), "first 1": ("#1f77b4", "--"), "first 2": ("#d62728", "--"),
    "any 1": ("#1f77b4", "-."), "any 2": ("#d62728", "-."),
}  # fmt: skip


def draw(rows: list[dict], path: Path) -> None:
    """Plot trained tokens per second relative to colocated over GPUs, in a column for each distribution of lengths."""
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(row["lengths"] for row in rows))
    kinds = list(dict.fromkeys(row["scaling"] for row in rows))
    figure = Figure(figsize=(4.1 * len(columns), 3.2 * len(kinds) + 0.6), dpi=110, layout="constrained")
    panels = figure.subplots(len(kinds), len(columns), sharex=True, sharey="row", squeeze=False)
    for (scaling, lengths), axes in zip(product(kinds, columns), panels.flat, strict=True):
        case = [row for row in rows if (row["scaling"], row["lengths"]) == (scaling, lengths)]
        base = {row["gpus"]: row["tokens"] for row in case if row["mode"] == COLOCATED.name}
        for name, (colour, style) in STYLES.items():
            speeds = [row["tokens"] / base[row["gpus"]] for row in case if row["mode"] == name]
            axes.plot(list(base), speeds, style, color=colour, marker="o", markersize=3, label=name)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(base), [f"{gpus:,}" for gpus in base], fontsize=8)
        axes.set_title(f"{lengths}, {'batch grows with GPUs' if scaling == 'weak' else 'the same batch'}", fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylim(bottom=0)
        axes.set_ylabel("trained tokens/s, colocated = 1")
    for axes in panels[-1]:
        axes.set_xlabel("GPUs")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=9, frameon=False)
    figure.savefig(path)


SHORT = "--gpus 8 16 --prompts 8 --prompts-per-gpu 1 --steps 3 --warmup 1"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    p.add_argument("--gpus", type=int, nargs="+", default=[8, 32, 128, 512, 1024], help="GPU counts, ascending")
    p.add_argument("--lengths", nargs="+", default=list(LENGTHS), choices=LENGTHS, help="length distributions to use")
    p.add_argument("--scaling", nargs="+", default=["weak", "strong"], choices=("weak", "strong"))
    p.add_argument("--prompts-per-gpu", type=int, default=4, help="prompts per GPU and step for weak scaling")
    p.add_argument("--prompts", type=int, default=512, help="prompts per step for strong scaling")
    p.add_argument("--samples", type=int, default=8, help="responses per prompt")
    p.add_argument("--steps", type=int, default=32, help="steps of a run")
    p.add_argument("--warmup", type=int, default=14, help="first steps of a run, which are not counted")
    p.add_argument("--seeds", type=int, default=1, help="random draws of the lengths to average over")
    p.add_argument("--short", action="store_true", help=f"only check that it runs; same as {SHORT}")
    p.add_argument("--json", type=Path, help="file to write all figures to")
    p.add_argument("--plot", type=Path, help="PNG file to write: speed over GPUs")
    machine = p.add_argument_group("the machine")
    for name, item in Machine.__dataclass_fields__.items():
        kind = type(item.default)
        machine.add_argument(f"--{name.replace('_', '-')}", type=kind, default=item.default, help=item.metadata["note"])
    args = p.parse_args(argv)
    if args.short:
        args = p.parse_args([*SHORT.split(), *(sys.argv[1:] if argv is None else argv)])
    need(0 <= args.warmup < args.steps, f"--warmup {args.warmup} must be 0 or more and less than --steps {args.steps}")
    need(args.tp >= 1 and min(args.gpus) >= 2 * args.tp, f"--gpus {min(args.gpus)} is less than 2 x --tp {args.tp}")
    counts = (args.prompts, args.prompts_per_gpu, args.samples, args.seeds, args.slots)
    need(min(counts) >= 1, "--prompts, --prompts-per-gpu, --samples, --seeds and --slots must be 1 or more")
    args.machine = Machine(**{name: getattr(args, name) for name in Machine.__dataclass_fields__})
    return args


def main(args: argparse.Namespace) -> None:
    print("\n".join(assumptions(args)), flush=True)
    rows: list[dict] = []
    for lengths, scaling in product(args.lengths, args.scaling):
        near: dict[str, int] = {}
        for gpus in sorted(args.gpus):
            prompts = args.prompts if scaling == "strong" else args.prompts_per_gpu * gpus
            batches = args.steps + max(mode.k for mode in MODES) + 1
            work = [draw_work(LENGTHS[lengths], prompts, args.samples, batches, seed) for seed in range(args.seeds)]
            by_mode: dict[str, dict] = {}
            for mode in MODES:
                keep = scaling == "weak" and gpus > 128
                best = best_split(work, mode, args, gpus, near.get(mode.name), keep)
                near[mode.name] = best["eighths"]
                case = {"lengths": lengths, "scaling": scaling, "gpus": gpus, "prompts": prompts}
                by_mode[mode.name] = case | {"samples": args.samples, "mode": mode.name} | best
            for row in by_mode.values():
                row["vs_colocated"] = by_mode["colocated"]["seconds"] / row["seconds"]
                row["vs_k0"] = by_mode["K=0"]["seconds"] / row["seconds"]
            rows += by_mode.values()
            print("\n".join(table(list(by_mode.values()))), flush=True)
            if args.json:
                report = {"assumptions": assumptions(args), "rows": rows}
                write_text(args.json, json.dumps(report, indent=1, default=float) + "\n")
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    run_script(main, parse_args)
