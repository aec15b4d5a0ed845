"""Episodes with any engine: the policy's responses alternate with the observations of an environment.

The text of an episode is never tokenized again. Turn k + 1 continues turn k's prompt, the tokens that were sampled, and
the chat template's tokens for the observation. If the template would change earlier turns (for example drop thoughts),
each turn of that episode is a separate sequence: Rollout.separate_turns.

Environments run in threads, or in one event loop if their methods are `async`. An episode continues as soon as its own
environment has returned. The file name begins with _ because it is not an environment.
"""

import asyncio
import hashlib
import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from envs import Observation
from envs._factory import (
    EnvFactory,
    check_image,
    check_placeholders,
    copy_example,
    decode_env_image,
    make_start,
    validate_messages,
)
from envs._threads import ENV_EXCEPTIONS, ENV_POOL, ThreadJob, close_environment, event_loop, to_coroutine
from errors import UserError, describe_error, need, users_traceback
from layers.video import encode_prompt, frames_to_patches
from model import ImageInput, Processor
from reward import RewardFailure, validate_reward
from rollout import (
    Engine,
    EngineWrapper,
    Prompt,
    Rollout,
    RolloutCallback,
    RolloutCounter,
    RolloutQueue,
    SamplingParams,
    TurnSequence,
    preprocess_image,
    start_rollouts,
)
from sources.content import IMAGE_PLACEHOLDER, MARK_PATTERN, VIDEO_PLACEHOLDER
from sources.videos import Video, need_rate
from utils import print0, sum_dicts

# Sampling waits at most MAX_WAIT_SECONDS for an environment that was just called, and all waits of one call of
# `generate` last at most MAX_WAIT_SECONDS plus MAX_WAIT_FRACTION of its time. If environments return within these
# limits, batches do not depend on timing, and a resumed run is bit-identical. After the first that is slower, sampling
# no longer waits.
MAX_WAIT_SECONDS = 0.5
MAX_WAIT_FRACTION = 0.2


@dataclass
class EncodedObservation:
    """An observation as tokens and image patches."""

    tokens: list[int]  # by the chat template, up to the policy's next response; image tokens expanded
    unexpanded: list[int]  # the same with one placeholder per image or video
    messages: list[dict]
    images: list[ImageInput]  # and videos, in the order of their tokens
    rewards: dict[str, float]
    done: bool


# ----------------------------------------------------------------------------------------------------------------------
# Episodes


@dataclass(eq=False)
class Episode:
    """An episode: its rollout, its environment, and the current call of the environment."""

    rollout: Rollout
    env: Any = None
    rewritten: bool = False  # has the chat template changed earlier turns?
    called_at: float = 0.0  # when the call was submitted
    started_at: float | None = None  # when the call started; None: it waits for a thread
    job: ThreadJob | None = None  # the call, in a thread
    future: Future | None = None  # the call, in the event loop


class EpisodeEngine(EngineWrapper):
    """An engine whose rollouts are episodes. `separate` is true if the chat template may rewrite earlier turns."""

    def __init__(self, engine: Engine, environments: EnvFactory, processor: Processor):
        super().__init__(engine)
        self.environments = environments
        self.processor = processor
        self.separate = processor.template_rewrites_history()
        if self.separate:
            print0("the chat template may rewrite earlier turns; an episode in which it does is trained as separate "
                   "sequences, one per turn")

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, on_rollout: RolloutCallback | None = None
    ) -> list[Rollout]:
        """Return n episodes of each prompt, in the order of the prompts. Call `on_rollout` with each one that ends,
        unless its environment failed."""
        self.progress = progress = RolloutCounter(on_rollout)
        queue = EpisodeQueue(self, prompts, n, sampling, progress.add)
        self.engine.sample(queue, sampling)
        queue.report_failures()
        return [episode.rollout for episode in queue.episodes]


class EpisodeQueue(RolloutQueue):
    """The queue from which the engine takes the turns to sample: the episodes of one call of `generate`."""

    def __init__(
        self,
        owner: EpisodeEngine,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        on_rollout: RolloutCallback,
    ):
        self.owner = owner
        self.environments = owner.environments
        self.cfg = owner.environments.cfg
        self.processor = owner.processor
        self.sampling = sampling
        self.on_rollout = on_rollout
        self.images: dict[str, Future] = {}  # images of observations by content, so that each is resized once
        self.changed = threading.Condition()
        self.results: dict[Episode, EncodedObservation | RewardFailure | None] = {}  # not yet polled; None: after reset
        self.running: set[Episode] = set()  # episodes whose environment is still running
        self.failed: list[RewardFailure] = []
        self.created_at = time.monotonic()
        self.returned_at = self.created_at  # when an environment last returned
        self.waited = 0.0  # seconds spent waiting for environments while the engine could have sampled other episodes
        self.episodes = list(map(Episode, start_rollouts(prompts, n)))
        self.episode_of = {id(episode.rollout): episode for episode in self.episodes}  # by id of the engine's rollout
        for episode in self.episodes:
            self._call_environment(episode)

    # --- what the engine calls ---

    @property
    def closed(self) -> bool:
        """Return whether no more rollouts will arrive after the next `poll`: every episode has ended."""
        return all(episode.rollout.ended_by for episode in self.episodes)

    def remaining_tokens(self, rollout: Rollout) -> int:
        """Return how many tokens the next response may have. The limit holds for the whole episode after its prompt,
        and for each turn that is a separate sequence, because a template may add tokens to earlier turns."""
        r = self.episode_of[id(rollout)].rollout
        in_episode = len(r.response) + (len(rollout.response) if rollout is not r else 0)
        in_sequence = len(rollout.prompt.token_ids) - len(r.prompt.token_ids) + len(rollout.response)
        return self.sampling.max_new_tokens - max(in_episode, in_sequence)

    def poll(self, wait: float) -> list[Rollout]:
        """Return the rollouts that are ready for their next response. Wait up to `wait` seconds if there are none."""
        if self.owner.engine.should_stop():
            for episode in self.episodes:
                if not episode.rollout.ended_by:
                    episode.rollout.ended_by = "length"
                    close_environment(episode.env, self.environments.flag)
        with self.changed:
            self._wait_for_environments(idle=wait > 0)
            if not self.results and wait and not self.closed:
                self.changed.wait(wait)
            results = self.results | self._timed_out()
            self.results = {}
        ready = []
        for episode in self.episodes:
            if episode in results and not episode.rollout.ended_by:
                ready.append(self._advance(episode, results[episode]))
        return [rollout for rollout in ready if rollout]

    def mark_sampled(self, rollout: Rollout) -> None:
        """Record the response that the engine has added, and call the environment with it."""
        episode = self.episode_of[id(rollout)]
        r = episode.rollout
        if rollout is not r:  # the turn is a separate sequence
            rollout.ended_by = "response"
            r.response += rollout.response
            r.response_mask += rollout.response_mask
            r.logprobs += rollout.logprobs
            r.versions += rollout.versions
            r.text, r.finish_reason = rollout.text, rollout.finish_reason
        if self.owner.separate:
            ids = rollout.prompt.token_ids + rollout.response
            n_sampled = len(r.logprobs) - sum(turn.n_sampled for turn in r.separate_turns)
            r.separate_turns.append(
                TurnSequence(ids, n_sampled, len(r.prompt.images) + len(r.images), list(rollout.experts)))
        r.messages.append({"role": "assistant", "content": r.text})
        self._call_environment(episode, r.text)

    # --- calls of environments ---

    def _call_environment(self, episode: Episode, response: str | None = None) -> None:
        """Call `step` with a response, or `reset` without one. The result is added to `results` later."""
        self.running.add(episode)
        episode.started_at, episode.future = None, None
        episode.called_at = time.monotonic()

        def call() -> Any:
            episode.started_at = time.monotonic()
            if response is not None:
                return episode.env.step(response)
            episode.env = self.environments.make()
            return episode.env.reset(copy_example(episode.rollout.prompt.example))

        episode.job = ENV_POOL.submit(lambda: self._run_call(episode, response, call))

    def _run_call(self, episode: Episode, response: str | None, call: Callable[[], Any]) -> None:
        """Make a call of an environment and deliver its result: at once, or when the event loop has it."""
        try:
            raw = call()
            if inspect.isawaitable(raw):
                episode.future = asyncio.run_coroutine_threadsafe(to_coroutine(raw), event_loop())
                read = partial(self._run_call, episode, response, episode.future.result)
                episode.future.add_done_callback(lambda _: ENV_POOL.submit(read))
                return
            if episode.rollout.ended_by:  # the call has timed out, or sampling has stopped
                return
            result = self._check_reset(episode, raw) if response is None else self._encode_observation(episode, raw)
        except ENV_EXCEPTIONS as error:
            ours = isinstance(error, UserError)
            line = self._line(episode, str(error) if ours else f"raised {describe_error(error)}")
            trace = "" if ours else users_traceback(error)
            result = RewardFailure("errors", type(error).__name__, line, trace)
        with self.changed:
            self.results[episode] = result
            self.running.discard(episode)
            self.returned_at = time.monotonic()
            self.changed.notify_all()

    def _line(self, episode: Episode, problem: str) -> str:
        return f"row {episode.rollout.prompt.uid!r}: {self.environments.flag} {problem}"

    def _check_reset(self, episode: Episode, pair: Any) -> None:
        """Raise UserError unless `reset` returned the start of the example's prompt. All episodes of an example must
        begin with it, because they are compared with each other."""
        prompt = episode.rollout.prompt
        start = make_start(pair, prompt.example)
        same = start.images is prompt.example.images or start.images == list(prompt.initial_example.images)
        need(same and start.messages == list(prompt.initial_example.messages),
             "reset returned something different for the same example; return the same each time")

    def _encode_observation(self, episode: Episode, obs: Any) -> EncodedObservation:
        """Return an observation as tokens and patches. Raise UserError if it is invalid."""
        need(isinstance(obs, Observation), f"step returned {obs!r:.100}; return an envs.Observation")
        messages, images, videos = [], (), ()
        if obs.messages or not obs.done:
            messages, images, videos = validate_messages(obs.messages, obs.images, obs.videos)
        reward = dict(obs.reward) if isinstance(obs.reward, Mapping) else obs.reward
        rewards = validate_reward(reward, episode.rollout.prompt.uid, episode.rollout.text)
        if obs.done:  # the last messages are recorded, but not shown to the policy
            last = [message | {"content": MARK_PATTERN.sub("", message["content"])} for message in messages]
            return EncodedObservation([], [], last, [], rewards, True)
        roles = [message["role"] for message in messages]
        need("assistant" not in roles, "step returned a message of the role assistant, which is the policy's")
        for mark, given in ((VIDEO_PLACEHOLDER, videos), (IMAGE_PLACEHOLDER, images)):
            if not any(mark in message["content"] for message in messages):
                messages[0]["content"] = mark * len(given) + messages[0]["content"]
        check_placeholders(messages, images, videos)
        for kind, given in (("images", images), ("videos", videos)):
            limit = self.environments.limits[f"{kind}_per_turn"]
            need(len(given) <= limit, f"step returned {len(given)} {kind}, more than {kind}_per_turn = {limit}")
        special = self.processor.special_tokens_in(messages)
        need(not special, f"step returned text with the special tokens {', '.join(special)}; remove them")
        blank = episode.rollout.prompt.blank
        inputs = [self._preprocess(image, blank) for image in images]
        inputs += [self._preprocess_video(video, blank) for video in videos]
        tokenize = self.processor.tokenize_observation
        ids, inputs, unexpanded_ids = encode_prompt(self.processor, messages, inputs, tokenize)
        return EncodedObservation(ids, unexpanded_ids, messages, inputs, rewards, False)

    def _preprocess_video(self, video: Any, blank: bool) -> ImageInput:
        """Return a video as the model sees it."""
        need(isinstance(video, Video), f"a video is {type(video).__name__}; expected an envs.Video(frames, fps)")
        need_rate(video.fps)
        need(isinstance(video.frames, Sequence) and not isinstance(video.frames, str | bytes),
             f"the frames of a video are {type(video.frames).__name__}; expected a list of images")
        limit = self.environments.limits["frames_per_video"]
        need(0 < len(video.frames) <= limit,
             f"a video has {len(video.frames)} frames; expected 1 to frames_per_video = {limit}")
        frames = [self._preprocess(frame, blank) for frame in video.frames]
        need(len({frame.image.size for frame in frames}) == 1, "the frames of a video have different sizes")
        return frames_to_patches(self.processor, frames, float(video.fps))

    def _preprocess(self, image: Any, blank: bool) -> ImageInput:
        """Return an image as the model sees it. Equal images of all episodes share one object."""
        check_image(image)
        data = image if isinstance(image, bytes) else image.convert("RGB").tobytes() + str(image.size).encode()
        key = hashlib.sha1(data).hexdigest()
        new: Future = Future()
        future = self.images.setdefault(f"{blank}{key}", new)  # the first thread prepares the image, the others wait
        if future is new:
            try:
                opened = decode_env_image(image) if isinstance(image, bytes) else image.convert("RGB")
                new.set_result(preprocess_image(opened, self.processor, blank, key))
            except BaseException as error:
                new.set_exception(error)
        return future.result()

    def _wait_for_environments(self, idle: bool) -> None:
        """Wait for environments that were just called, within the limits of MAX_WAIT_SECONDS. The caller holds the
        lock.

        Each environment has MAX_WAIT_SECONDS from the start of its call, and all waits of the queue share a budget.
        While the engine is idle, waiting is free, and each result restarts the MAX_WAIT_SECONDS of all environments,
        because many of them may share few threads."""
        while self.environments.all_answered_quickly and self.running:
            now = time.monotonic()
            since = self.returned_at if idle else 0.0
            left = MAX_WAIT_SECONDS - max(now - max(e.started_at or e.called_at, since) for e in self.running)
            left = min(left, MAX_WAIT_SECONDS + MAX_WAIT_FRACTION * (now - self.created_at) - self.waited)
            if left <= 0:
                self.environments.all_answered_quickly = False
                print(
                    f"environments take longer than {MAX_WAIT_SECONDS:g} s: sampling no longer waits for them, and a "
                    "resumed run will not be bit-identical"
                )
                return
            self.changed.wait(left)
            self.waited += 0.0 if idle else time.monotonic() - now

    def _timed_out(self) -> dict[Episode, RewardFailure]:
        """Abandon calls that took longer than --env-timeout, and return their failures. The caller holds the lock."""
        failures = {}
        for e in list(self.running):
            if e.started_at and time.monotonic() - e.started_at > self.cfg.env_timeout:
                line = self._line(e, f"took longer than --env-timeout {self.cfg.env_timeout:g} s")
                failures[e] = RewardFailure("timeouts", "timeout", line)
                ENV_POOL.abandon(e.job) if e.future is None else e.future.cancel()
                self.running.remove(e)
        return failures

    # --- results of environments ---

    def _advance(self, episode: Episode, result: EncodedObservation | RewardFailure | None) -> Rollout | None:
        """Apply the result of an environment's call to an episode. Return the rollout to which the engine must add the
        next response, or None if the episode is over."""
        r = episode.rollout
        if result is None:
            return r
        if isinstance(result, RewardFailure):
            self._fail_episode(episode, result)
            return None
        r.discount = self.cfg.turn_gamma ** (r.n_turns - 1)
        r.turn_rewards.append(r.discount * result.rewards["reward"])
        r.env_rewards = sum_dicts([r.env_rewards, result.rewards])
        if result.done:
            r.messages += result.messages
        if result.done or r.finish_reason == "length" or r.n_turns == self.cfg.max_turns:
            self._finish(episode, "length" if r.finish_reason == "length" else "done" if result.done else "max_turns")
            return None
        sampled = r
        if self.owner.separate:
            earlier = [self._escape_special_tokens(m) if m["role"] == "assistant" else m for m in r.messages]
            messages = [*r.prompt.initial_example.messages, *earlier, *result.messages]
            turn = self._make_turn_prompt(r, messages, r.images + result.images)
            ids, decode = [*r.prompt.token_ids, *r.response, *result.tokens], self.processor.tokenizer.decode
            episode.rewritten = episode.rewritten or decode(ids) != decode(turn.prompt.token_ids)
            if episode.rewritten:
                sampled = turn
                self.episode_of[id(sampled)] = episode
        if min(self.remaining_tokens(r) - len(result.tokens), self.remaining_tokens(sampled)) < 1:
            r.finish_reason = "length"
            self._finish(episode, "room")
            return None
        r.response += result.tokens
        r.response_mask += [False] * len(result.tokens)
        r.messages += result.messages
        r.images += result.images
        r.unexpanded_observations.append(result.unexpanded)
        r.n_turns += 1
        sampled.n_turns = r.n_turns
        return sampled

    def _make_turn_prompt(self, r: Rollout, messages: list[dict], images: list[ImageInput]) -> Rollout:
        """Return a rollout for the next turn, whose prompt is all messages so far as the chat template writes them."""
        ids, images, unexpanded_ids = encode_prompt(self.processor, messages, r.prompt.images + images)
        return Rollout(
            Prompt(f"{r.prompt.uid}#{r.n_turns}", ids, images, r.prompt.example, unexpanded_ids), r.sample_index
        )

    def _escape_special_tokens(self, message: dict) -> dict:
        """Return a message of the policy for a prompt by the chat template: special tokens and <image> marks that the
        policy spelled out stay text."""
        text = message["content"]
        for token in self.processor.special_tokens_in([message]):
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return message | {"content": [{"type": "text", "text": text}]}

    def _finish(self, episode: Episode, reason: str) -> None:
        """End an episode. `reason` is one of EPISODE_END_REASONS."""
        episode.rollout.ended_by = reason
        if not episode.rewritten:  # the episode is one sequence
            episode.rollout.separate_turns = []
        close_environment(episode.env, self.environments.flag)
        self.on_rollout(episode.rollout)

    def _fail_episode(self, episode: Episode, failure: RewardFailure) -> None:
        """End an episode whose environment failed, as --env-errors says: drop it, give reward zero, or raise."""
        close_environment(episode.env, self.environments.flag)
        if self.cfg.env_errors == "stop":
            raise failure.exception()
        self.failed.append(failure)
        r = episode.rollout
        r.turn_rewards, r.env_rewards = [], {}
        r.ended_by, r.env_failure, r.failure_line = "error", failure.kind, failure.line
        # an episode that failed before its first response has no tokens to train on, so it is dropped anyway
        r.finish_reason = "error" if self.cfg.env_errors == "drop" or not r.response else "stop"

    def report_failures(self) -> None:
        """Print the first failure of each kind in full, then one line that counts all of them."""
        shown_kinds = self.environments.shown_kinds
        for failure in self.failed:
            if failure.what not in shown_kinds:
                shown_kinds.add(failure.what)
                print(f"{failure.line}\n{failure.trace}This is the first failure of its kind", file=sys.stderr)
        if self.failed:
            kinds = Counter(failure.what for failure in self.failed).most_common(3)
            kinds = ", ".join(f"{n} {what}" for what, n in kinds)
            print(f"{len(self.failed)} of {len(self.episodes)} episodes failed ({kinds}); with "
                  f"--env-errors {self.cfg.env_errors} the run continues", file=sys.stderr)
