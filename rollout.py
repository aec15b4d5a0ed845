"""Prompts in, rollouts out: the records, how examples become prompts, and what an engine and an environment are.

An engine has four verbs, sample, load_weights, sleep, wake, the dtype of its weights, and their version. engines/hf.py
is the reference, engines/vllm.py the fast one. Both ban the same tokens, stop at the same ones, take the same pixels,
and report the log-probability of the distribution that they sampled from.

With --env a rollout is an episode: the policy's responses in turn with what an environment says to them. Its tokens are
never written anew: turn k + 1 goes on from turn k's prompt, the tokens that were sampled, and the environment's.
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

import torch
from PIL import Image

from errors import need, plug_in, printable
from grpo import Algorithm, overlong_penalty
from model import ImageInput, Processor
from packing import TrainBatch
from prepare_data import DataFormatConfig, Example, check_bad_rows, decode_image, read_examples
from reward import RewardContext
from rewards.grade import Grader
from settings import flag_field, plain_pair
from utils import DistContext, NamedTensors, derive_seed, print0


@dataclass(eq=False)
class Prompt:
    """An example as the model reads it: image tokens expanded, images as patches."""

    uid: str
    token_ids: list[int]
    images: list[ImageInput]
    example: Example
    unexpanded_ids: list[int]  # one placeholder per image, for engines that expand them
    blank: bool = False  # is every image a white one?
    initial_example: Example | None = None  # what was asked: the example, or what an environment makes of it
    context: RewardContext | None = None  # for its rewards; None: the step that trains on it is not known yet

    def __post_init__(self):
        self.initial_example = self.initial_example or self.example


EPISODE_END_REASONS = (  # of an episode
    "done",  # its environment said so
    "max_turns",  # after the last turn that was allowed
    "length",  # a response was cut off
    "room",  # --max-new-tokens leaves no room for what the environment says and a token more
    "error",  # its environment failed
)


class TurnSequence(NamedTuple):
    """One response of an episode and all that it was sampled after."""

    ids: list[int]
    n_sampled: int  # of them, the last ones
    n_images: int  # of the prompt's and the episode's, the first ones


@dataclass(eq=False)
class Rollout:
    """One sampled response, or an episode of several: token ids, never re-tokenised text."""

    prompt: Prompt
    sample_index: int  # index in the group
    response: list[int] = field(default_factory=list)  # token ids; of an episode the environment's too, images expanded
    response_mask: list[bool] = field(default_factory=list)  # which of them the policy produced
    logprobs: list[float] = field(default_factory=list)  # the engine's, in nats, of the tokens under the mask
    finish_reason: str = ""  # "stop" (an end token), "length", "error" (reward or environment failed: not trained on)
    text: str = ""  # of an episode its last response
    rewards: dict[str, float] = field(default_factory=dict)  # by name; "reward" is the total
    n_turns: int = 1  # how many responses
    ended_by: str = ""  # once it is over "response", or of an episode one of ENDS
    env_failure: str = ""  # of its environment: "errors" or "timeouts"
    failure_line: str = ""  # the same in words
    images: list[ImageInput] = field(default_factory=list)  # that came after the prompt, in order
    messages: list[dict] = field(default_factory=list)  # of an episode: what was said after the prompt
    turn_rewards: list[float] = field(default_factory=list)  # of its environment for each turn, discounted
    discount: float = 1.0  # of the reward that comes after the last turn
    env_rewards: dict[str, float] = field(default_factory=dict)  # the environment's named numbers, summed over turns
    separate_turns: list[TurnSequence] = field(
        default_factory=list
    )  # if the chat template has rewritten what was said before
    versions: list[int] = field(default_factory=list)  # as long as logprobs: of the weights that sampled each token

    @property
    def reward(self) -> float:
        """NaN if its reward failed."""
        return self.rewards.get("reward", math.nan)

    @property
    def accuracy(self) -> float:
        """Or the total, of a reward that has no such part."""
        return self.rewards.get("accuracy", self.task_reward)

    @property
    def is_episode(self) -> bool:
        """One that is over, rather than a single response."""
        return self.ended_by in EPISODE_END_REASONS

    @property
    def task_reward(self) -> float:
        """Before any penalty for its length: dynamic sampling keeps groups where it is not the same for all."""
        return self.rewards.get("unpenalised", self.reward)


def start_rollouts(prompts: Sequence[Prompt], n: int) -> list[Rollout]:
    """n of each prompt, without a response yet."""
    return [Rollout(prompt, sample) for prompt, sample in product(prompts, range(n))]


RolloutCallback = Callable[[Rollout], None]  # what an engine calls with each rollout that is finished


@dataclass
class RolloutCounter:
    """Counts finished rollouts and their sampled tokens before it hands them to `on_rollout`: what progress shows."""

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
    temperature: float = 1.0  # 0 = greedy; logprobs are then those at temperature 1
    top_p: float = 1.0
    seed: int = 0


def response_text(processor: Processor, tokens: Sequence[int]) -> str:
    """Without the end token. Other special tokens stay visible: a reward must see the `<|im_start|>` of
    `4<|im_start|>`."""
    ended = tokens[-1:] and tokens[-1] in processor.eos_ids
    return processor.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)


def add_response(
    rollout: Rollout, tokens: list[int], logprobs: list[float], processor: Processor, versions: list[int]
) -> None:
    """What an engine sampled, at the end of a rollout, and which version of its weights sampled each token."""
    rollout.response += tokens
    rollout.response_mask += [True] * len(tokens)
    rollout.logprobs += logprobs
    rollout.versions += versions
    rollout.text = response_text(processor, tokens)
    rollout.finish_reason = "stop" if tokens[-1] in processor.eos_ids else "length"


# ----------------------------------------------------------------------------------------------------------------------
# Examples to prompts


ResetFn = Callable[[Example], Example]  # what an environment begins with: other messages and images


def identity(example: Example) -> Example:
    """Without an environment."""
    return example


def preprocess_image(image: Image.Image, processor: Processor, blank: bool, key: str) -> ImageInput:
    """Return an image as the model sees it, or with `blank` a white image of its size. `key` identifies its content."""
    if blank:
        image, key = Image.new("RGB", image.size, "white"), f"blank-{image.size}"
    return processor.image_to_patches(key, image)


def make_prompts(
    examples: Sequence[Example],
    processor: Processor,
    blank: bool = False,
    start_of: ResetFn = identity,
    context: RewardContext | None = None,
) -> list[Prompt]:
    """Decode and tokenise. With `blank` every image is replaced by a white one of its size: what is still answered
    right was not seen but guessed."""

    @cache  # examples may share an image
    def prepare(data: bytes) -> ImageInput:
        return preprocess_image(decode_image(data), processor, blank, hashlib.sha1(data).hexdigest())

    def one(example: Example) -> Prompt:
        start = start_of(example)
        images = list(map(prepare, start.images))
        short_ids = processor.tokenize_messages(start.messages)
        ids = processor.expand_image_tokens(short_ids, images)
        return Prompt(example.uid, ids, images, example, short_ids, blank, start, context)

    with ThreadPoolExecutor(4) as pool:  # decoding and resizing release the GIL
        return list(pool.map(one, examples))


SPECIAL_TOKEN_REASON = "the tokenizer's special token"  # in the line of a prompt that is left out for one


def drop_long_prompts(
    examples: Sequence[Example],
    processors: Sequence[Processor],
    max_tokens: int,
    bad_rows: str = "error",
    start_of: ResetFn = identity,
) -> tuple[list[Example], list[str], list[int]]:
    """Examples whose prompt, image tokens included, has at most max_tokens tokens for each processor; a line for each
    one dropped; and the lengths of those kept. A text that a tokenizer would read a special token from is a bad row: it
    could end a turn, or stand for an image that is not there. UserError unless bad_rows is "skip"."""
    kept, dropped, lengths, bad = [], [], [], []
    for example in examples:
        start = start_of(example)
        if found := dict.fromkeys(chain.from_iterable(p.special_tokens_in(start.messages) for p in processors)):
            line = (
                f"{example.uid!r}: {SPECIAL_TOKEN_REASON} {', '.join(found)} in the prompt's text; write it otherwise"
            )
            bad.append(printable(line))
            continue
        n = max(p.count_tokens(start.messages, start.image_sizes) for p in processors)
        if n > max_tokens:
            dropped.append(f"{example.uid!r}: {n} prompt tokens, over --max-prompt-tokens {max_tokens}")
        else:
            kept.append(example)
            lengths.append(n)
    check_bad_rows(bad, len(examples) - len(bad), bad_rows)
    return kept, bad + dropped, lengths


class ExampleList(list[Example]):
    """With the number of tokens of each one's prompt, and how many rows were left out."""

    def __init__(self, examples: Sequence[Example] = (), lengths: Sequence[int] = (), left_out: int = 0):
        super().__init__(examples)
        self.lengths = list(lengths)
        self.left_out = left_out


def load_examples(
    path: str,
    cfg: DataFormatConfig,
    processors: Sequence[Processor],
    rewards: Grader | None = None,
    start_of: ResetFn = identity,
    limit: int | None = None,
) -> ExampleList:
    """The first `limit` examples that are readable, those of them that fit every processor and that `rewards` can
    grade; what is left out is counted and shown."""
    examples, unreadable = read_examples(path, cfg, limit, rewards.check_examples if rewards else len)
    kept, dropped, lengths = drop_long_prompts(examples, processors, cfg.max_prompt_tokens, cfg.bad_rows, start_of)
    special = sum(SPECIAL_TOKEN_REASON in line for line in dropped)
    left_out = unreadable + dropped
    for line in left_out[:10]:
        print0(f"left out: {line}")
    print0(
        f"{path}: {len(kept)} examples of up to {max(lengths, default=0)} prompt tokens; left out: {len(unreadable)} "
        f"unreadable, {len(dropped) - special} over --max-prompt-tokens {cfg.max_prompt_tokens}, {special} with "
        "special tokens in their text"
    )
    need(kept, f"{path}: none of {len(examples)} prompts fits --max-prompt-tokens {cfg.max_prompt_tokens}; raise it, "
         "or lower --max-pixels")
    for line in rewards.unasked(kept) if rewards else ():
        print0(f"warning: {path}: {line}")
    return ExampleList(kept, lengths, len(left_out))


def assign_rewards(
    rollouts: Sequence[Rollout], results: Sequence[dict[str, float] | None], algo: Algorithm, max_new_tokens: int
) -> None:
    """Set the rewards of each rollout: named numbers and their total, "reward".

    One whose reward failed (None) has none, and ends in "error": nothing of it is trained on, and the others of its
    group are compared without it."""
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
    "arguments of vLLM's LLM, such as gpu_memory_utilization=0.5 or tensor_parallel_size=2 (neighbouring processes "
    "share an engine), and sleep_level: what it keeps during the update: all (0), its weights in host memory (1, the "
    "default), or nothing (2)"
)


@dataclass(frozen=True)
class RolloutConfig:
    """Rollout"""

    prompts_per_step: int = flag_field(16, "prompts per step, over all processes (P)", least=1)
    max_new_tokens: int = flag_field(512, "max new tokens per response (for episodes: all turns and observations "
                                  "together)", least=1)
    temperature: float = flag_field(1.0, "sampling temperature; all log-probabilities are computed at it too", above=0)
    rollout: str = flag_field(
        "auto", "rollout engine; auto: vllm on a GPU if it is installed, else hf", choices=ENGINES
    )
    vllm: tuple[str, ...] = flag_field((), VLLM_HELP, metavar="KEY=VALUE", from_run=plain_pair)

    def check(self, world: int, minibatches: int) -> None:
        share = world * minibatches
        need(self.prompts_per_step % share == 0,
             f"--prompts-per-step {self.prompts_per_step} does not divide into {world} processes x {minibatches} "
             f"--minibatches; use a multiple of {share}")

    def check_data(self, examples: ExampleList, data: str, micro_tokens: int) -> None:
        """Raise UserError if there are too few examples for a batch, or a micro-batch is too small for the longest."""
        n, longest = len(examples), max(examples.lengths)
        need(n >= self.prompts_per_step,
             f"--data {data} has {n} usable examples, but --prompts-per-step is {self.prompts_per_step}; lower it")
        need(longest + self.max_new_tokens <= micro_tokens,
             f"--micro-tokens {micro_tokens}: the longest prompt has {longest} tokens and --max-new-tokens is "
             f"{self.max_new_tokens}; raise it to {longest + self.max_new_tokens}")


@dataclass(frozen=True)
class EnvConfig:
    """Environment"""

    env: str | None = flag_field(None, "environment of multi-turn episodes: a name in envs/, or your own; "
                              "docs/environments.md", metavar="NAME|FILE.py:CLASS",
                              from_run=lambda name: ":" not in str(name))
    env_settings: tuple[str, ...] = flag_field(
        (),
        "constructor arguments of the environment; values are JSON, else text",
        metavar="KEY=VALUE",
        from_run=plain_pair,
        part_of="env",
    )
    max_turns: int = flag_field(4, "max responses per episode", least=1)
    turn_gamma: float = flag_field(1.0, "discount per turn (1: none)", above=0, most=1)
    env_errors: str = flag_field(
        "drop",
        "episodes whose environment fails: drop them, give reward zero, or stop the run",
        choices=("drop", "zero", "stop"),
    )
    env_timeout: float = flag_field(30.0, "seconds an environment may take for one reset or step", above=0)


def make_env_factory(cfg: EnvConfig) -> Any:
    """Return envs._load.Environments, what --env names; None without."""
    need(cfg.env or not cfg.env_settings, "--env-settings needs --env")
    return plug_in("envs._load", f"--env {cfg.env}").EnvFactory(cfg) if cfg.env else None


NOT_FINITE_MESSAGE = (
    "the {what} are not finite, so nothing can be sampled: weights hold NaN or infinity, or values too large for "
    "--dtype; check --model, or continue from an earlier checkpoint with a lower --lr"
)


IDLE_POLL_SECONDS = 0.05  # seconds that an engine without work waits for environments, at a time


class RolloutQueue:
    """What an engine is to sample: rollouts that a response is added to. Of single responses all are there at once;
    envs/_play.py has those of episodes."""

    exhausted = True  # no more will come than the next `take` gives

    def __init__(self, rollouts: Sequence[Rollout], sampling: SamplingParams, on_rollout: RolloutCallback):
        self.waiting = list(rollouts)
        self.sampling = sampling
        self.on_rollout = on_rollout

    def remaining_tokens(self, rollout: Rollout) -> int:
        """How many tokens the next response may have."""
        return self.sampling.max_new_tokens - len(rollout.response)

    def poll(self, wait: float) -> list[Rollout]:
        """Those that came since the last call. Without any it may wait, so many seconds at most."""
        taken, self.waiting = self.waiting, []
        return taken

    def mark_sampled(self, rollout: Rollout) -> None:
        """The engine calls this as soon as it has added a response, in any order."""
        rollout.ended_by = "response"
        self.on_rollout(rollout)


GetWeights = Callable[[bool], NamedTensors]  # in full (True: only of what is trained); all ranks consume them together


def never() -> bool:
    return False


class Engine:
    """What samples responses, with weights of its own that only load_weights changes. generate and load_weights wake
    what they need; it stays awake until somebody who needs its memory lets it sleep."""

    dtype: torch.dtype  # of its weights: a sync casts to it
    has_all_weights = False  # has load_weights brought every tensor? Until then a sync must send the frozen ones too
    weights_version = 0  # of its weights: each call of load_weights adds 1

    def __init__(self, should_stop: Callable[[], bool] = never):
        """`should_stop` returns True once the run was asked to end: stop sampling."""
        self.should_stop = should_stop
        self.finished = RolloutCounter()  # of the last call of generate

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, on_rollout: RolloutCallback | None = None
    ) -> list[Rollout]:
        """n rollouts of each prompt, in the order of the prompts. Each, the same object, is handed to `on_rollout` as
        soon as it is finished, in any order."""
        self.finished = finished = RolloutCounter(on_rollout)
        rollouts = start_rollouts(prompts, n)
        self.sample(RolloutQueue(rollouts, sampling, finished.add), sampling)
        return rollouts

    def sample(self, responses: RolloutQueue, sampling: SamplingParams) -> None:
        """Add a response to each of the rollouts, until no more come; with what is there already a rollout has at most
        max_new_tokens. One that comes again goes on after what was added to it meanwhile."""
        raise NotImplementedError

    def sync(self, weights: GetWeights) -> dict[str, float]:
        """Take over the trainer's weights, on all ranks at once; what load_weights says of it."""
        return self.load_weights(weights(self.has_all_weights))

    def load_weights(self, named_tensors: NamedTensors) -> dict[str, float]:
        """Take over weights, by Hugging Face names; how many calls and bytes that took."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """What it measured of itself since the last call."""
        return {}

    def step_metrics(self, batch: TrainBatch) -> dict[str, float]:
        """Return metrics of a step that trained on this batch, over all processes."""
        return {}

    def wake(self) -> None:
        """Be ready to sample; generate sees to it itself."""

    def sleep(self) -> None:
        """Make room for the update. Weights may be lost with it: before the next use comes a sync."""

    def asleep_bytes(self) -> int:
        """Return the bytes that the sleeping engine has given back, but torch's CUDA allocator still counts."""
        return 0


class EngineWrapper:
    """An engine that samples with another one, in its own way. Weights, sleep and metrics are the other's."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


# ----------------------------------------------------------------------------------------------------------------------
# A step's prompts, and its groups


@dataclass(eq=False)
class PromptBatch(Sequence[Prompt]):
    """This process's part of a batch of prompts. They are made of their examples when they are first read: those of a
    batch that is sampled ahead in a thread of its own."""

    position: int  # in the data
    uids: set[str]  # of all processes
    examples: list[Example]
    sampling: SamplingParams
    make: Callable[..., list[Prompt]]
    context: RewardContext | None  # None until the step that trains on it is known

    @cached_property
    def prompts(self) -> list[Prompt]:
        return self.make(self.examples, context=self.context)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


class Batches:
    """Batches of prompts by their position in the data. `cfg` is train.Config, `curriculum` a
    rewards.curriculum.Curriculum."""

    def __init__(self, cfg: Any, curriculum: Any, processor: Processor, start_of: ResetFn, ctx: DistContext):
        self.cfg = cfg
        self.curriculum = curriculum
        self.make = partial(make_prompts, processor=processor, start_of=start_of)
        self.ctx = ctx
        self.state: Any = None  # train.State of the step that is under way
        self.drawn: dict[int, PromptBatch] = {}  # by position: this step's, and those for later steps

    def next(self, state: Any, position: int) -> PromptBatch:
        """Return the batch at a position, for the step of `state`."""
        self.state = state
        batch = self.drawn[position] if position in self.drawn else self.draw(state.step, position)
        batch.context = batch.context or self._context(state.step, position)
        return batch

    def draw(self, step: int, position: int, step_known: bool = True) -> PromptBatch:
        """Choose the examples of a batch. With --async-steps, where batches are drawn before the solve rates of earlier
        ones are known, a curriculum takes examples that are being sampled last."""
        first = self.state.position
        self.drawn = {at: batch for at, batch in self.drawn.items() if at >= first}
        ahead = set().union(*(batch.uids for batch in self.drawn.values())) if self.cfg.servers.async_steps else None
        examples = self.curriculum.select_batch(step, first, position - first, self.state.curriculum, ahead)
        own, context = examples[self.ctx.rank :: self.ctx.world], self._context(step, position) if step_known else None
        uids, sampling = {example.uid for example in examples}, self.sampling(position)
        self.drawn[position] = PromptBatch(position, uids, own, sampling, self.make, context)
        return self.drawn[position]

    def sampling(self, position: int, again: int = 0) -> SamplingParams:
        """Return how to sample a batch. The randomness of a sample is a function of (seed, position), its prompt and
        its place in the group."""
        seed = derive_seed(self.cfg.run.seed, "sample", position, *([again] if again else []))
        return SamplingParams(self.cfg.rollout.max_new_tokens, self.cfg.rollout.temperature, seed=seed)

    def _context(self, step: int, position: int) -> RewardContext:
        return RewardContext(position, step, self.curriculum.current_stage(step))


class GroupPool:
    """The groups that a step samples, until enough of them have unequal rewards or --max-gen-batches batches are used up.
    A group is known by (batch, place in the batch), the same on all processes, each of which holds its own groups."""

    def __init__(self, algo: Algorithm, cfg: RolloutConfig, position: int, ctx: DistContext):
        self.algo = algo
        self.target_groups = cfg.prompts_per_step
        self.max_new_tokens = cfg.max_new_tokens
        self.position = position  # in the data
        self.ctx = ctx
        self.batches_drawn = 0
        self.groups: dict[tuple[int, int], list[Rollout]] = {}
        self.has_signal: dict[tuple[int, int], bool] = {}  # of all processes
        self.mean_accuracy: dict[str, float] = {}  # uid -> mean accuracy of its group, of all processes

    def is_full(self) -> bool:
        enough = sum(self.has_signal.values()) >= self.target_groups
        return self.batches_drawn == self.algo.max_gen_batches or (self.batches_drawn > 0 and enough)

    def add(self, rollouts: Sequence[Rollout], rewards: Sequence[Mapping[str, float] | None]) -> None:
        """Add this process's rollouts of a batch and their rewards, on all processes at once."""
        assign_rewards(rollouts, rewards, self.algo, self.max_new_tokens)
        size = self.algo.group_size
        places = range(self.ctx.rank, self.target_groups, self.ctx.world)
        groups = {(self.batches_drawn, place): list(rollouts[i * size :][:size]) for i, place in enumerate(places)}
        # before penalties for length, which tell no right answer from a wrong one: arXiv:2503.14476, section 3.2
        graded = {key: [r for r in group if r.rewards] for key, group in groups.items()}
        signals = {key: len({r.task_reward for r in group}) > 1 for key, group in graded.items()}
        solved = {group[0].prompt.uid: fmean(r.accuracy for r in group) for group in graded.values() if group}
        for their_signals, their_solved in self.ctx.gather((signals, solved)):
            self.has_signal |= their_signals
            self.mean_accuracy |= their_solved
        self.groups |= groups
        self.batches_drawn += 1
        self.position += 1

    def select_groups(self) -> list[tuple[int, int]]:
        """The groups to train on: the first whose rewards are unequal, and where there are too few of them, others."""
        best_first = sorted(self.has_signal, key=lambda key: (not self.has_signal[key], key))
        return sorted(best_first[: self.target_groups])
