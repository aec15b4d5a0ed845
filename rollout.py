"""From prompts to rollouts: the records, the conversion of examples to prompts, and the interface of rollout engines.

An engine implements sample, load_weights, sleep and wake, and has a dtype and a version of its weights. engines/hf.py
is the reference implementation, engines/vllm.py the fast one. Both exclude the same tokens from sampling, stop at the
same tokens, see the same pixels, and report log-probabilities of the distribution they sampled from (with greedy
decoding: at temperature 1).

With --env a rollout is an episode, in which responses of the policy alternate with observations of an environment.
Text is never tokenized again: turn k + 1 continues from the token ids of turn k and of the observation that followed.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain, product
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from errors import need, plug_in, printable
from grpo import Algorithm, change_prompts, overlong_penalty
from layers.video import encode_prompt, frames_to_patches
from model import ImageInput, Processor
from packing import TrainBatch
from prepare_data import DataFormatConfig, Example, check_bad_rows, decode_image, read_examples
from reward import RewardContext
from rewards.grade import Grader
from settings import flag_field, plain_pair
from utils import DistContext, NamedTensors, derive_seed, print0


@dataclass(eq=False)
class Prompt:
    """The model's input for an example: token ids with image tokens expanded, and images as patches."""

    uid: str
    token_ids: list[int]
    images: list[ImageInput]  # and videos, in the order of their tokens
    example: Example
    unexpanded_ids: list[int]  # token ids with one placeholder per image or video, for engines that expand them
    blank: bool = False  # whether every image and frame was replaced by a white one
    initial_example: Example | None = None  # the example as the environment's reset returned it (default: `example`)
    # what rewards get besides the example; None until it is known which step trains on this prompt
    context: RewardContext | None = None
    noised: "Prompt | None" = None  # the same prompt with noised images, from which the last n_noised samples are drawn
    n_noised: int = 0
    view_of: "Prompt | None" = None  # of a prompt with noised images: the one without noise
    experts: np.ndarray | None = None  # of its tokens, from a response (Rollout.add_experts)

    def __post_init__(self):
        self.initial_example = self.initial_example or self.example


EPISODE_END_REASONS = (
    "done",  # the environment ended it
    "max_turns",  # --max-turns was reached
    "length",  # a response was cut off
    "room",  # --max-new-tokens has no room for the observation and one more token
    "error",  # the environment failed
)


class TurnSequence(NamedTuple):
    """The token ids of one turn of an episode: the full context of the response, then the response itself."""

    ids: list[int]
    n_sampled: int  # length of the response, which is the end of `ids`
    n_images: int  # number of images in `ids`: of the prompt's and then the observations' images, the first n_images
    experts: Sequence[np.ndarray] = ()  # as in Rollout


@dataclass(eq=False)
class Rollout:
    """A sampled response, or an episode of several responses, as token ids that are never tokenized again."""

    prompt: Prompt
    sample_index: int  # index in the group
    response: list[int] = field(default_factory=list)  # token ids after the prompt, an episode's observations included
    response_mask: list[bool] = field(default_factory=list)  # True for tokens that the policy sampled
    logprobs: list[float] = field(default_factory=list)  # the engine's log-probability of each sampled token, in nats
    # "stop" (an end token), "length", or not trained on: "error" (reward or environment failed)
    finish_reason: str = ""
    text: str = ""  # text of the response; in an episode, of the last response
    rewards: dict[str, float] = field(default_factory=dict)  # by name; "reward" is the total
    n_turns: int = 1  # number of responses
    ended_by: str = ""  # "response" or, for episodes, one of EPISODE_END_REASONS; empty before the end
    env_failure: str = ""  # "errors" or "timeouts" if the environment failed
    failure_line: str = ""  # the message of that failure
    images: list[ImageInput] = field(default_factory=list)  # images and videos of observations, in order
    # the token ids of each observation with one placeholder per image or video, as in Prompt.unexpanded_ids
    unexpanded_observations: list[list[int]] = field(default_factory=list)
    messages: list[dict] = field(default_factory=list)  # episodes: the messages after the prompt
    turn_rewards: list[float] = field(default_factory=list)  # the environment's reward of each turn, discounted
    discount: float = 1.0  # factor applied to the last response's own reward: turn_gamma^(n_turns - 1)
    env_rewards: dict[str, float] = field(default_factory=dict)  # the environment's named rewards, summed over turns
    separate_turns: list[TurnSequence] = field(default_factory=list)  # set if the chat template rewrote earlier turns
    versions: list[int] = field(default_factory=list)  # version of the weights that sampled each token in `logprobs`
    noised: bool = False  # was it sampled from noised images?
    # --replay-experts: the engine's experts for the tokens from the prompt's first on, as uint8 or uint16 arrays
    # (tokens, layers with experts, experts per token)
    experts: list[np.ndarray] = field(default_factory=list)

    @property
    def reward(self) -> float:
        """Return the total reward, or NaN if the reward failed."""
        return self.rewards.get("reward", math.nan)

    @property
    def n_routed(self) -> int:
        """Return the number of tokens, from the prompt's first on, whose experts are known."""
        return sum(map(len, self.experts))

    def add_experts(self, rows: np.ndarray) -> None:
        """Append the experts of the tokens after the first n_routed. The responses of a prompt share one array for the
        prompt's tokens if the engine chose the same experts for all of them."""
        if not self.experts:
            of_prompt, rows = np.split(rows, [len(self.prompt.token_ids)])
            if not np.array_equal(of_prompt, self.prompt.experts):
                self.prompt.experts = of_prompt.copy()
            self.experts.append(self.prompt.experts)
        self.experts.append(rows.copy())  # a view would keep the prompt's rows in memory

    @property
    def accuracy(self) -> float:
        """Return the reward named "accuracy", or `task_reward` if there is none."""
        return self.rewards.get("accuracy", self.task_reward)

    @property
    def is_episode(self) -> bool:
        """Return whether this is a finished episode rather than a single response."""
        return self.ended_by in EPISODE_END_REASONS

    @property
    def task_reward(self) -> float:
        """Return the total reward before the length penalty. Dynamic sampling keeps the groups in which
        this reward differs."""
        return self.rewards.get("unpenalised", self.reward)


def start_rollouts(prompts: Sequence[Prompt], n: int) -> list[Rollout]:
    """Return n rollouts of each prompt, which have no response yet."""
    pairs = product(prompts, range(n))
    return [Rollout(p.noised if p.noised and index >= n - p.n_noised else p, index) for p, index in pairs]


def remove_noise(rollouts: Sequence[Rollout]) -> None:
    """Give rollouts that were sampled from noised images the prompt with the images themselves, which they are trained
    with. Their engine's log-probabilities become NaN, and its experts are dropped: they belong to other images."""
    for r in rollouts:
        if r.prompt.view_of:
            r.prompt, r.noised, r.logprobs = r.prompt.view_of, True, [math.nan] * len(r.logprobs)
            r.experts, r.separate_turns = [], [turn._replace(experts=()) for turn in r.separate_turns]
        r.prompt.noised = None  # other ranks do not need its images


RolloutCallback = Callable[[Rollout], None]  # an engine calls it with each finished rollout


@dataclass
class RolloutCounter:
    """A counter of finished rollouts and their sampled tokens, for progress bars, that passes each rollout on to
    `on_rollout`."""

    on_rollout: RolloutCallback | None = None
    rollouts: int = 0
    tokens: int = 0

    def add(self, rollout: Rollout) -> None:
        self.rollouts += 1
        self.tokens += sum(rollout.response_mask)
        if self.on_rollout:
            self.on_rollout(rollout)


@dataclass(frozen=True)
class SamplingParams:
    max_new_tokens: int
    temperature: float = 1.0  # 0: greedy decoding, with log-probabilities at temperature 1
    top_p: float = 1.0
    seed: int = 0


def response_text(processor: Processor, tokens: Sequence[int]) -> str:
    """Decode a response, from the opening that the chat template left in the prompt (`<think>`), without its end token.
    Other special tokens stay in the text, so that a reward can reject
    `4<|im_start|>`; without its special token it would be graded as the answer `4`."""
    has_end_token = tokens[-1:] and tokens[-1] in processor.eos_ids
    sampled = tokens[:-1] if has_end_token else tokens
    return processor.opening + processor.tokenizer.decode(sampled, skip_special_tokens=False)


def add_response(
    rollout: Rollout, tokens: list[int], logprobs: list[float], processor: Processor, versions: list[int]
) -> None:
    """Append a sampled response to a rollout, with the version of the weights that sampled each token."""
    rollout.response += tokens
    rollout.response_mask += [True] * len(tokens)
    rollout.logprobs += logprobs
    rollout.versions += versions
    rollout.text = response_text(processor, tokens)
    rollout.finish_reason = "stop" if tokens[-1] in processor.eos_ids else "length"


# ----------------------------------------------------------------------------------------------------------------------
# From examples to prompts


# an environment's reset: returns the example with the episode's first messages and images
ResetFn = Callable[[Example], Example]


def identity(example: Example) -> Example:
    """Return the example itself: the ResetFn of runs without an environment."""
    return example


def preprocess_image(image: Image.Image, processor: Processor, blank: bool, key: str) -> ImageInput:
    """Return the patches of an image or, with `blank`, of a white image of the same size. `key` identifies the content
    of the image."""
    if blank:
        image, key = Image.new("RGB", image.size, "white"), f"blank-{image.size}"
    return processor.image_to_patches(key, image)


def make_prompts(
    examples: Sequence[Example],
    processor: Processor,
    blank: bool = False,
    reset_fn: ResetFn = identity,
    context: RewardContext | None = None,
) -> list[Prompt]:
    """Decode the images and videos of examples and tokenize their messages. With `blank`, replace every image and frame
    by a white one of the same size, to measure how many answers are correct without them."""

    @cache  # examples may share an image or a frame
    def prepare(data: bytes) -> ImageInput:
        return preprocess_image(decode_image(data), processor, blank, hashlib.sha1(data).hexdigest())

    def make_prompt(example: Example) -> Prompt:
        initial = reset_fn(example)
        images = list(map(prepare, initial.images))
        images += [frames_to_patches(processor, map(prepare, video.frames), video.fps) for video in initial.videos]
        ids, images, unexpanded_ids = encode_prompt(processor, initial.messages, images)
        return Prompt(example.uid, ids, images, example, unexpanded_ids, blank, initial, context)

    with ThreadPoolExecutor(4) as pool:  # decoding and resizing release the GIL
        return list(pool.map(make_prompt, examples))


# the part of a message by which load_examples counts the prompts that were dropped for special tokens
SPECIAL_TOKEN_REASON = "the prompt text contains the special token"


def filter_prompts(
    examples: Sequence[Example],
    processors: Sequence[Processor],
    max_tokens: int,
    bad_rows: str = "error",
    reset_fn: ResetFn = identity,
) -> tuple[list[Example], list[str], list[int]]:
    """Return the examples to keep, one line for each dropped example, and the lengths of the kept prompts.

    A prompt, its images included, may have at most max_tokens tokens for each processor. An example whose text contains
    special tokens is a bad row, because such a token could end a turn or stand for an image that does not exist. Raise
    UserError if there are bad rows, unless bad_rows is "skip"."""
    kept, dropped, lengths, bad = [], [], [], []
    for example in examples:
        initial = reset_fn(example)
        if special := dict.fromkeys(chain.from_iterable(p.special_tokens_in(initial.messages) for p in processors)):
            bad.append(printable(f"{example.uid!r}: {SPECIAL_TOKEN_REASON} {', '.join(special)}; remove or reword it"))
            continue
        sizes = initial.image_sizes, initial.video_sizes
        n = max(p.count_tokens(initial.messages, *sizes) for p in processors)
        if n > max_tokens:
            dropped.append(f"{example.uid!r}: {n} prompt tokens, over --max-prompt-tokens {max_tokens}")
        else:
            kept.append(example)
            lengths.append(n)
    check_bad_rows(bad, len(examples) - len(bad), bad_rows)
    return kept, bad + dropped, lengths


class ExampleList(list[Example]):
    """A list of examples with the prompt length of each, in tokens, and the number of rows that were left out."""

    def __init__(self, examples: Sequence[Example] = (), lengths: Sequence[int] = (), left_out: int = 0):
        super().__init__(examples)
        self.lengths = list(lengths)
        self.left_out = left_out


def load_examples(
    path: str,
    cfg: DataFormatConfig,
    processors: Sequence[Processor],
    grader: Grader | None = None,
    reset_fn: ResetFn = identity,
    limit: int | None = None,
) -> ExampleList:
    """Load the first `limit` readable examples, check that `grader` can grade them, and drop prompts that are too long
    for at least one processor or contain special tokens. Print how many rows were left out, and the reasons for the
    first ten."""
    examples, unreadable = read_examples(path, cfg, limit, grader.check_examples if grader else len)
    kept, dropped, lengths = filter_prompts(examples, processors, cfg.max_prompt_tokens, cfg.bad_rows, reset_fn)
    n_special = sum(SPECIAL_TOKEN_REASON in line for line in dropped)
    left_out = unreadable + dropped
    for line in left_out[:10]:
        print0(f"left out: {line}")
    print0(
        f"{path}: {len(kept)} examples of up to {max(lengths, default=0)} prompt tokens; left out: {len(unreadable)} "
        f"unreadable, {len(dropped) - n_special} over --max-prompt-tokens {cfg.max_prompt_tokens}, {n_special} with "
        "special tokens in their text"
    )
    need(kept, f"{path}: no usable prompts: {len(dropped) - n_special} over --max-prompt-tokens {cfg.max_prompt_tokens}"
         f", {n_special} with special tokens; raise the limit, or lower --max-pixels to get fewer image tokens")
    for line in grader.format_warnings(kept) if grader else ():
        print0(f"warning: {path}: {line}")
    return ExampleList(kept, lengths, len(left_out))


def assign_rewards(
    rollouts: Sequence[Rollout], results: Sequence[dict[str, float] | None], algo: Algorithm, max_new_tokens: int
) -> None:
    """Set the rewards of each rollout: named numbers and their total, "reward".

    A rollout whose reward failed (None) gets no rewards and the finish reason "error": it is not trained on, and the
    advantages of its group are computed without it."""
    for r, rewards in zip(rollouts, results, strict=True):
        r.finish_reason = "error" if rewards is None else r.finish_reason
        r.rewards = rewards or {}
        if algo.truncated == "penalise" and rewards:
            total = rewards["reward"]
            penalty = overlong_penalty(len(r.response), max_new_tokens)
            r.rewards = rewards | {"unpenalised": total, "overlong": penalty, "reward": total + penalty}


# ----------------------------------------------------------------------------------------------------------------------
# Engines


ENGINES = ("auto", "hf", "vllm", "server")
VLLM_HELP = (
    "arguments of vLLM's LLM, such as gpu_memory_utilization=0.5 or tensor_parallel_size=2 (consecutive ranks share "
    "an engine), and sleep_level, which sets what vLLM keeps during the update: everything (0), its weights in "
    "host memory (1, the default), or nothing (2)"
)


@dataclass(frozen=True)
class RolloutConfig:
    """Rollout"""  # this section's title in --help

    prompts_per_step: int = flag_field(16, "prompts per step, over all processes (P)", least=1)
    max_new_tokens: int = flag_field(512, "max new tokens per response (for episodes: all turns and observations "
                                     "together)", least=1)
    temperature: float = flag_field(1.0, "sampling temperature, also used for all log-probabilities", above=0)
    rollout: str = flag_field("auto", "rollout engine; auto: vllm on a GPU if it is installed, else hf",
                              choices=ENGINES)
    vllm: tuple[str, ...] = flag_field((), VLLM_HELP, metavar="KEY=VALUE", from_run=plain_pair)
    replay_experts: bool = flag_field(False, "mixtures of experts: train each token with the experts that the engine "
                                      "chose for it (R3, rollout routing replay)")

    def check(self, world: int, minibatches: int) -> None:
        divisor = world * minibatches
        need(self.prompts_per_step % divisor == 0,
             f"--prompts-per-step {self.prompts_per_step} is not divisible by {world} processes x {minibatches} "
             f"--minibatches; use a multiple of {divisor}")

    def check_data(self, examples: ExampleList, data: str, micro_tokens: int) -> None:
        """Raise UserError if there are fewer examples than a batch needs, or if the longest prompt and a response do
        not fit in a micro-batch."""
        n, longest = len(examples), max(examples.lengths)
        need(n >= self.prompts_per_step,
             f"--data {data} has {n} usable examples, but --prompts-per-step is {self.prompts_per_step}; lower it")
        need(longest + self.max_new_tokens <= micro_tokens,
             f"--micro-tokens {micro_tokens} is too small: the longest prompt has {longest} tokens and "
             f"--max-new-tokens is {self.max_new_tokens}; set it to at least {longest + self.max_new_tokens}")


@dataclass(frozen=True)
class EnvConfig:
    """Environment"""  # this section's title in --help

    env: str | None = flag_field(None, "environment of multi-turn episodes: a name in envs/, or your own; "
                                 "docs/environments.md", metavar="NAME|FILE.py:CLASS",
                                 from_run=lambda name: ":" not in str(name))
    env_settings: tuple[str, ...] = flag_field((), "constructor arguments of the environment; parsed as JSON, or "
                                               "taken as text", metavar="KEY=VALUE", from_run=plain_pair, part_of="env")
    max_turns: int = flag_field(4, "max responses per episode", least=1)
    turn_gamma: float = flag_field(1.0, "discount per turn (1: none)", above=0, most=1)
    env_errors: str = flag_field("drop", "episodes whose environment fails: drop them, give reward zero, or stop the "
                                 "run", choices=("drop", "zero", "stop"))
    env_timeout: float = flag_field(30.0, "seconds an environment may take for one reset or step", above=0)


def make_env_factory(cfg: EnvConfig) -> Any:
    """Return an envs._factory.EnvFactory for the environment that --env names, or None without --env."""
    need(cfg.env or not cfg.env_settings, "--env-settings needs --env")
    return plug_in("envs._factory", f"--env {cfg.env}").EnvFactory(cfg) if cfg.env else None


NOT_FINITE_MESSAGE = (
    "cannot sample: the {what} are not finite. The weights contain NaN or infinity, or values too large for --dtype; "
    "check --model, or resume from an earlier checkpoint with a lower --lr"
)


IDLE_POLL_SECONDS = 0.05  # how long an idle engine waits for environments before it polls again


class RolloutQueue:
    """The rollouts for which an engine still has to sample a response. In this class all are available at once; with
    an environment they arrive over time (envs/_episodes.EpisodeQueue)."""

    closed = True  # whether the next `poll` returns the last rollouts

    def __init__(self, rollouts: Sequence[Rollout], sampling: SamplingParams, on_rollout: RolloutCallback):
        self.waiting = list(rollouts)
        self.sampling = sampling
        self.on_rollout = on_rollout

    def remaining_tokens(self, rollout: Rollout) -> int:
        """Return the max number of tokens for the next response."""
        return self.sampling.max_new_tokens - len(rollout.response)

    def poll(self, wait: float) -> list[Rollout]:
        """Return the rollouts that arrived since the last call. If there are none, wait up to `wait` seconds."""
        arrived, self.waiting = self.waiting, []
        return arrived

    def mark_sampled(self, rollout: Rollout) -> None:
        """Record that a rollout has its response. Engines call this as soon as the response has been added; the
        order of the rollouts does not matter."""
        rollout.ended_by = "response"
        self.on_rollout(rollout)


# returns unsharded tensors (True: only the trained ones); collective over all ranks
GetWeights = Callable[[bool], NamedTensors]


def never_stop() -> bool:
    return False


class Engine:
    """The interface of rollout engines. An engine samples responses with its own copy of the weights, which only
    `sync` and load_weights change; by default `sync` calls load_weights. generate and load_weights wake the engine, and
    it stays awake until `sleep` is called."""

    dtype: torch.dtype  # dtype of the engine's weights; a weight sync casts to it
    has_all_weights = False  # whether load_weights has set every tensor; until then a sync also sends frozen weights
    weights_version = 0  # each update of the weights adds 1
    expert_layers: Sequence[int] = ()  # --replay-experts: the layers whose experts rollouts get (Rollout.experts)

    def __init__(self, should_stop: Callable[[], bool] = never_stop):
        """`should_stop` returns True if the run has to end; the engine then stops sampling."""
        self.should_stop = should_stop
        self.progress = RolloutCounter()  # progress of the newest call of generate

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, on_rollout: RolloutCallback | None = None
    ) -> list[Rollout]:
        """Sample n rollouts of each prompt and return them in the order of the prompts. Call `on_rollout` with each
        of these objects as soon as it is finished, in any order."""
        self.progress = progress = RolloutCounter(on_rollout)
        rollouts = start_rollouts(prompts, n)
        self.sample(RolloutQueue(rollouts, sampling, progress.add), sampling)
        return rollouts

    def sample(self, queue: RolloutQueue, sampling: SamplingParams) -> None:
        """Append a response to each rollout from the queue, until the queue is closed and all responses are complete.
        max_new_tokens includes the response tokens that a rollout already has. A rollout may come back for another
        turn; its next response continues after the observation added in between."""
        raise NotImplementedError

    def sync(self, weights: GetWeights, changed: bool = True) -> dict[str, float]:
        """Load the trainer's weights; collective over all ranks. Return the metrics of load_weights. If the weights
        have not changed since the last sync and the engine still has them, send nothing."""
        if not changed and self.has_all_weights:
            return {"sync/calls": 0.0, "sync/bytes": 0.0}
        return self.load_weights(weights(self.has_all_weights))

    def load_weights(self, named_tensors: NamedTensors) -> dict[str, float]:
        """Load weights by their Hugging Face names. Return the metrics sync/calls (buckets) and sync/bytes."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return the engine's own measurements since the last call."""
        return {}

    def step_metrics(self, batch: TrainBatch) -> dict[str, float]:
        """Return the metrics of a step that trained on `batch`, over all processes."""
        return {}

    def wake(self) -> None:
        """Prepare the engine for sampling; generate does so by itself."""

    def sleep(self) -> None:
        """Free memory for the update. This may drop the weights, so call sync before sampling again."""

    def asleep_bytes(self) -> int:
        """Return the bytes that the sleeping engine has freed but that torch's CUDA allocator still counts."""
        return 0


class EngineWrapper:
    """A base class of engines that change how another engine samples. Attributes that a subclass does not define are
    those of the other engine."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


# ----------------------------------------------------------------------------------------------------------------------
# The prompts and groups of a step


@dataclass(eq=False)
class PromptBatch(Sequence[Prompt]):
    """This process's part of a batch of prompts. The first access to `prompts` makes them from the examples; for a
    batch that is sampled ahead, this happens in a separate thread."""

    position: int  # position of the batch in the data
    step: int  # the step that trains on it, as far as is known when it is drawn
    uids: set[str]  # uids of the whole batch, over all processes
    examples: list[Example]
    sampling: SamplingParams
    make: Callable[..., list[Prompt]]
    change: Callable[[list[Prompt], int], list[Prompt]]  # changes the prompts for a training step
    context: RewardContext | None  # None until the step that trains on the batch is known

    @cached_property
    def prompts(self) -> list[Prompt]:
        return self.change(self.make(self.examples, context=self.context), self.step)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


class Batches:
    """The batches of prompts, by their position in the data. `cfg` is a train.Config; `curriculum` is a
    rewards.order.DataOrder or a rewards.curriculum.Curriculum."""

    def __init__(self, cfg: Any, curriculum: Any, processor: Processor, reset_fn: ResetFn, ctx: DistContext):
        self.cfg = cfg
        self.curriculum = curriculum
        self.make = partial(make_prompts, processor=processor, reset_fn=reset_fn)
        self.change = lambda prompts, step: change_prompts(prompts, cfg.algo, cfg.run.seed, step, cfg.run.steps)
        self.ctx = ctx
        self.state: Any = None  # train.TrainState of the current step
        self.prepared: dict[int, PromptBatch] = {}  # by position: batches of this step and later ones

    def next(self, state: Any, position: int) -> PromptBatch:
        """Return the batch at a position in the data, for the step of `state`."""
        self.state = state
        batch = self.prepared[position] if position in self.prepared else self.draw(state.step, position)
        batch.context = batch.context or self._context(state.step, position)
        return batch

    def draw(self, step: int, position: int, step_known: bool = True) -> PromptBatch:
        """Select the examples of the batch at a position in the data, and return the batch. `step_known`: whether it is
        certain that `step` trains on it.

        With --async-steps a batch is drawn before the solve rates of earlier batches are known, so a curriculum by
        solve rate takes examples that are still being sampled last, when no others are left."""
        first = self.state.position
        self.prepared = {at: batch for at, batch in self.prepared.items() if at >= first}
        ahead = set().union(*(batch.uids for batch in self.prepared.values())) if self.cfg.servers.async_steps else None
        examples = self.curriculum.select_batch(step, first, position - first, self.state.curriculum, ahead)
        part, context = examples[self.ctx.rank :: self.ctx.world], self._context(step, position) if step_known else None
        uids, sampling = {example.uid for example in examples}, self.sampling(position)
        self.prepared[position] = PromptBatch(position, step, uids, part, sampling, self.make, self.change, context)
        return self.prepared[position]

    def sampling(self, position: int, attempt: int = 0) -> SamplingParams:
        """Return the sampling parameters for a batch. The random numbers of a sample depend only on --seed, `position`,
        its prompt, its index in the group, and `attempt`: how often groups of this batch were sampled again."""
        seed = derive_seed(self.cfg.run.seed, "sample", position, *([attempt] if attempt else []))
        return SamplingParams(self.cfg.rollout.max_new_tokens, self.cfg.rollout.temperature, seed=seed)

    def _context(self, step: int, position: int) -> RewardContext:
        return RewardContext(position, step, self.curriculum.current_stage(step))


class GroupPool:
    """The groups that a step samples. The step samples batches until enough groups have unequal rewards, or until it
    has used --max-gen-batches batches. The key of a group, (number of its batch in the step, index in the batch), is
    the same on all processes; each process stores only the groups it sampled."""

    def __init__(self, algo: Algorithm, cfg: RolloutConfig, position: int, ctx: DistContext):
        self.algo = algo
        self.target_groups = cfg.prompts_per_step
        self.max_new_tokens = cfg.max_new_tokens
        self.position = position  # position of the next batch in the data
        self.ctx = ctx
        self.batches_used = 0
        self.groups: dict[tuple[int, int], list[Rollout]] = {}
        self.has_signal: dict[tuple[int, int], bool] = {}  # do its rewards differ? groups of all processes
        self.mean_accuracy: dict[str, float] = {}  # by uid, of the groups of all processes

    def is_full(self) -> bool:
        enough = sum(self.has_signal.values()) >= self.target_groups
        return self.batches_used == self.algo.max_gen_batches or (self.batches_used > 0 and enough)

    def add(self, rollouts: Sequence[Rollout], rewards: Sequence[Mapping[str, float] | None]) -> None:
        """Add this process's rollouts of a batch and their rewards; collective over all processes."""
        remove_noise(rollouts)
        assign_rewards(rollouts, rewards, self.algo, self.max_new_tokens)
        size = self.algo.group_size
        indices = range(self.ctx.rank, self.target_groups, self.ctx.world)
        groups = {(self.batches_used, index): list(rollouts[i * size :][:size]) for i, index in enumerate(indices)}
        # has_signal ignores length penalties, because they do not separate right answers from wrong ones:
        # arXiv:2503.14476, section 3.2
        graded = {key: [r for r in group if r.rewards] for key, group in groups.items()}
        signals = {key: len({r.task_reward for r in group}) > 1 for key, group in graded.items()}
        clean = {key: [r for r in group if not r.noised] or group for key, group in graded.items()}
        accuracies = {group[0].prompt.uid: fmean(r.accuracy for r in group) for group in clean.values() if group}
        for rank_signals, rank_accuracies in self.ctx.gather((signals, accuracies)):
            self.has_signal |= rank_signals
            self.mean_accuracy |= rank_accuracies
        self.groups |= groups
        self.batches_used += 1
        self.position += 1

    def select_groups(self) -> list[tuple[int, int]]:
        """Return the keys of the groups to train on: the first groups with unequal rewards and, if these are too few,
        groups with equal rewards."""
        best_first = sorted(self.has_signal, key=lambda key: (not self.has_signal[key], key))
        return sorted(best_first[: self.target_groups])
