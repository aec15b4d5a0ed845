"""Episodes: the policy's responses in turn with what an environment says, for any engine.

The tokens of an episode are never written anew. Turn k + 1 goes on from turn k's prompt, the tokens that were sampled,
and the chat template's tokens for what the environment said. If the template would
change earlier turns (drop thoughts, say), each turn of that episode is a separate sequence: Rollout.separate.

Environments answer in threads, or in one event loop if their methods are `async`; an episode goes on as soon as its own
has answered. The name begins with _ because it is no environment.
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
from envs._load import (
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
from model import IMAGE_PLACEHOLDER, ImageInput, Processor
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
from utils import print0, sum_dicts

# Seconds that all episodes wait for an environment that was just asked; all waits of a call of generate together are at
# most this and WAITS of its time. Environments that answer so fast make no batch depend on time, so that a resumed run
# is bit for bit the same. Once they are slower, nobody is waited for any more.
MAX_WAIT_SECONDS = 0.5
MAX_WAIT_FRACTION = 0.2


@dataclass
class EncodedObservation:
    """An observation, as tokens and patches."""

    tokens: list[int]  # of the chat template, up to the policy's next response; image tokens expanded
    messages: list[dict]
    images: list[ImageInput]
    rewards: dict[str, float]
    done: bool


# ----------------------------------------------------------------------------------------------------------------------
# Episodes


@dataclass(eq=False)
class Episode:
    rollout: Rollout
    env: Any = None
    rewritten: bool = False  # has the chat template changed what was said before?
    asked_at: float = 0.0
    started_at: float | None = None  # when it began; None: it waits for a thread
    job: ThreadJob | None = None  # in a thread
    future: Future | None = None  # in the event loop


class EpisodeEngine(EngineWrapper):
    """An engine whose rollouts are episodes. `separate`: the chat template may rewrite what was said before."""

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
        """n episodes of each prompt, in the order of the prompts; `on_rollout` gets each when it is over, but for those
        whose environment failed."""
        self.finished = finished = RolloutCounter(on_rollout)
        play = EpisodeQueue(self, prompts, n, sampling, finished.add)
        self.engine.sample(play, sampling)
        play.report_failures()
        return [episode.rollout for episode in play.episodes]


class EpisodeQueue(RolloutQueue):
    """The episodes of one call of generate, as the engine sees them."""

    def __init__(
        self,
        of: EpisodeEngine,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        on_rollout: RolloutCallback,
    ):
        self.player = of
        self.environments = of.environments
        self.cfg = of.environments.cfg
        self.processor = of.processor
        self.sampling = sampling
        self.on_rollout = on_rollout
        self.images: dict[str, Future] = {}  # each is resized once
        self.changed = threading.Condition()
        self.answers: dict[Episode, EncodedObservation | RewardFailure | None] = {}  # None: it has begun
        self.thinking: set[Episode] = set()  # whose environments have still to answer
        self.failed: list[RewardFailure] = []
        self.began = time.monotonic()
        self.answered_at = self.began  # when the last answer came
        self.waited = 0.0  # for environments, while others could have been sampled
        self.episodes = list(map(Episode, start_rollouts(prompts, n)))
        self.episode_of = {id(episode.rollout): episode for episode in self.episodes}  # by what the engine adds to
        for episode in self.episodes:
            self._call_environment(episode)

    # --- what the engine calls ---

    @property
    def exhausted(self) -> bool:
        return all(episode.rollout.ended_by for episode in self.episodes)

    def remaining_tokens(self, rollout: Rollout) -> int:
        """Return how many tokens the next response may have. The limit holds for the whole episode after its prompt,
        and for each turn that is a separate sequence, since a template may write more than was said."""
        own = self.episode_of[id(rollout)].rollout
        said = len(own.response) + (len(rollout.response) if rollout is not own else 0)
        sequence = len(rollout.prompt.token_ids) - len(own.prompt.token_ids) + len(rollout.response)
        return self.sampling.max_new_tokens - max(said, sequence)

    def poll(self, wait: float) -> list[Rollout]:
        if self.player.engine.should_stop():
            for episode in self.episodes:
                if not episode.rollout.ended_by:
                    episode.rollout.ended_by = "length"
                    close_environment(episode.env, self.environments.flag)
        with self.changed:
            self._wait_for_environments(idle=wait > 0)
            if not self.answers and wait and not self.exhausted:
                self.changed.wait(wait)
            answers = self.answers | self._timed_out()
            self.answers = {}
        ready = []
        for episode in self.episodes:
            if episode in answers and not episode.rollout.ended_by:
                ready.append(self._advance(episode, answers[episode]))
        return [rollout for rollout in ready if rollout]

    def mark_sampled(self, rollout: Rollout) -> None:
        episode = self.episode_of[id(rollout)]
        own = episode.rollout
        if rollout is not own:  # a turn that is a sequence of its own
            rollout.ended_by = "response"
            own.response += rollout.response
            own.response_mask += rollout.response_mask
            own.logprobs += rollout.logprobs
            own.versions += rollout.versions
            own.text, own.finish_reason = rollout.text, rollout.finish_reason
        if self.player.separate:
            ids = rollout.prompt.token_ids + rollout.response
            n_sampled = len(own.logprobs) - sum(turn.n_sampled for turn in own.separate_turns)
            own.separate_turns.append(TurnSequence(ids, n_sampled, len(own.prompt.images) + len(own.images)))
        own.messages.append({"role": "assistant", "content": own.text})
        self._call_environment(episode, own.text)

    # --- the environment ---

    def _call_environment(self, episode: Episode, response: str | None = None) -> None:
        """Its answer to a response, or its beginning, comes to `answers` some time."""
        self.thinking.add(episode)
        episode.started_at, episode.future = None, None
        episode.asked_at = time.monotonic()

        def call() -> Any:
            episode.started_at = time.monotonic()
            if response is not None:
                return episode.env.step(response)
            episode.env = self.environments.make()
            return episode.env.reset(copy_example(episode.rollout.prompt.example))

        episode.job = ENV_POOL.submit(lambda: self._answer(episode, response, call))

    def _answer(self, episode: Episode, response: str | None, call: Callable[[], Any]) -> None:
        """Deliver what an environment says to a response, or its beginning: now, or when the event loop has it."""
        try:
            said = call()
            if inspect.isawaitable(said):
                episode.future = asyncio.run_coroutine_threadsafe(to_coroutine(said), event_loop())
                read = partial(self._answer, episode, response, episode.future.result)
                episode.future.add_done_callback(lambda _: ENV_POOL.submit(read))
                return
            if episode.rollout.ended_by:  # it came too late
                return
            answer = self._check_reset(episode, said) if response is None else self._encode_observation(episode, said)
        except ENV_EXCEPTIONS as error:
            line = self._line(episode, f"raised {describe_error(error)}")
            error.add_note(line)
            users = isinstance(error, UserError)
            answer = RewardFailure("errors", type(error).__name__, line, users_traceback(error), users,
                             None if users else error)
        with self.changed:
            self.answers[episode] = answer
            self.thinking.discard(episode)
            self.answered_at = time.monotonic()
            self.changed.notify_all()

    def _line(self, episode: Episode, what: str) -> str:
        return f"row {episode.rollout.prompt.uid!r}: {self.environments.flag} {what}"

    def _check_reset(self, episode: Episode, said: Any) -> None:
        """An example's episodes must all begin as its prompt does: they are compared with each other."""
        prompt = episode.rollout.prompt
        start = make_start(said, prompt.example)
        same = start.images is prompt.example.images or start.images == list(prompt.initial_example.images)
        need(same and start.messages == list(prompt.initial_example.messages),
             "reset says something else than before for the same example")

    def _encode_observation(self, episode: Episode, said: Any) -> EncodedObservation:
        """An observation, checked, as tokens and patches."""
        need(isinstance(said, Observation), f"step returned {type(said).__name__}; expected an envs.Observation")
        messages, images = validate_messages(said.messages, said.images) if said.messages or not said.done else ([], ())
        given = dict(said.reward) if isinstance(said.reward, Mapping) else said.reward
        rewards = validate_reward(given, episode.rollout.prompt.uid, episode.rollout.text)
        if said.done:  # its last words are for those who read the episode
            last = [message | {"content": message["content"].replace(IMAGE_PLACEHOLDER, "")} for message in messages]
            return EncodedObservation([], last, [], rewards, True)
        roles = [message["role"] for message in messages]
        need("assistant" not in roles, "step returned a message of the role assistant, which is the policy's")
        if not any(IMAGE_PLACEHOLDER in message["content"] for message in messages):
            messages[0]["content"] = IMAGE_PLACEHOLDER * len(images) + messages[0]["content"]
        check_placeholders(messages, images)
        most = self.environments.images_per_turn
        need(len(images) <= most, f"step returned {len(images)} images, more than images_per_turn = {most}")
        special = self.processor.special_tokens_in(messages)
        need(not special, f"step said {', '.join(special)}, which the tokenizer takes for special tokens")
        images = [self._preprocess(image, episode.rollout.prompt.blank) for image in images]
        ids = self.processor.expand_image_tokens(self.processor.tokenize_observation(messages), images)
        return EncodedObservation(ids, messages, images, rewards, False)

    def _preprocess(self, image: Any, blank: bool) -> ImageInput:
        """Return an image as the model sees it. Episodes that see the same image share one object."""
        check_image(image)
        data = image if isinstance(image, bytes) else image.convert("RGB").tobytes() + str(image.size).encode()
        key = hashlib.sha1(data).hexdigest()
        mine: Future = Future()
        future = self.images.setdefault(f"{blank}{key}", mine)  # the first of all threads prepares it, the others wait
        if future is mine:
            try:
                opened = decode_env_image(image) if isinstance(image, bytes) else image.convert("RGB")
                mine.set_result(preprocess_image(opened, self.processor, blank, key))
            except BaseException as error:
                mine.set_exception(error)
        return future.result()

    def _wait_for_environments(self, idle: bool) -> None:
        """Wait for environments that were just asked, see PATIENCE; with the lock held.

        Each has PATIENCE from when it began, and all waits of this call have a budget. While the engine is idle a wait
        costs nothing, and any answer starts PATIENCE anew: they may be many for few threads."""
        while self.environments.all_answered_quickly and self.thinking:
            now = time.monotonic()
            since = self.answered_at if idle else 0.0
            left = MAX_WAIT_SECONDS - max(now - max(e.started_at or e.asked_at, since) for e in self.thinking)
            left = min(left, MAX_WAIT_SECONDS + MAX_WAIT_FRACTION * (now - self.began) - self.waited)
            if left <= 0:
                self.environments.all_answered_quickly = False
                print(
                    f"environments answer more slowly than within {MAX_WAIT_SECONDS:g} s: nobody waits for them any more, "
                    "and a resumed run is not the same bit for bit"
                )
                return
            self.changed.wait(left)
            self.waited += 0.0 if idle else time.monotonic() - now

    def _timed_out(self) -> dict[Episode, RewardFailure]:
        """Give up environments that took longer than --env-timeout; with the lock held."""
        late = {}
        for e in list(self.thinking):
            if e.started_at and time.monotonic() - e.started_at > self.cfg.env_timeout:
                line = self._line(e, f"took longer than --env-timeout {self.cfg.env_timeout:g} s")
                late[e] = RewardFailure("timeouts", "time-out", line, is_user_error=True)
                ENV_POOL.abandon(e.job) if e.future is None else e.future.cancel()
                self.thinking.remove(e)
        return late

    # --- an answer ---

    def _advance(self, episode: Episode, answer: EncodedObservation | RewardFailure | None) -> Rollout | None:
        """What the engine is to add the next response to; None: the episode is over."""
        r = episode.rollout
        if answer is None:
            return r
        if isinstance(answer, RewardFailure):
            self._fail_episode(episode, answer)
            return None
        r.discount = self.cfg.turn_gamma ** (r.n_turns - 1)
        r.turn_rewards.append(r.discount * answer.rewards["reward"])
        r.env_rewards = sum_dicts([r.env_rewards, answer.rewards])
        if answer.done:
            r.messages += answer.messages
        if answer.done or r.finish_reason == "length" or r.n_turns == self.cfg.max_turns:
            self._finish(episode, "length" if r.finish_reason == "length" else "done" if answer.done else "max_turns")
            return None
        asked = r
        if self.player.separate:
            said = [self._escape_special_tokens(m) if m["role"] == "assistant" else m for m in r.messages]
            messages = [*r.prompt.initial_example.messages, *said, *answer.messages]
            written = self._make_turn_prompt(r, messages, r.images + answer.images)
            said, decode = [*r.prompt.token_ids, *r.response, *answer.tokens], self.processor.tokenizer.decode
            episode.rewritten = episode.rewritten or decode(said) != decode(written.prompt.token_ids)
            if episode.rewritten:
                asked = written
                self.episode_of[id(asked)] = episode
        if min(self.remaining_tokens(r) - len(answer.tokens), self.remaining_tokens(asked)) < 1:
            r.finish_reason = "length"
            self._finish(episode, "room")
            return None
        r.response += answer.tokens
        r.response_mask += [False] * len(answer.tokens)
        r.messages += answer.messages
        r.images += answer.images
        r.n_turns += 1
        asked.n_turns = r.n_turns
        return asked

    def _make_turn_prompt(self, r: Rollout, messages: list[dict], images: list[ImageInput]) -> Rollout:
        """The next turn as the chat template writes all that was said."""
        images = r.prompt.images + images
        short_ids = self.processor.tokenize_messages(messages)
        ids = self.processor.expand_image_tokens(short_ids, images)
        return Rollout(Prompt(f"{r.prompt.uid}#{r.n_turns}", ids, images, r.prompt.example, short_ids), r.sample_index)

    def _escape_special_tokens(self, message: dict) -> dict:
        """What the policy said, where the template writes it anew: special tokens and marks that it spelt stay text."""
        text = message["content"]
        for token in self.processor.special_tokens_in([message]):
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return message | {"content": [{"type": "text", "text": text}]}

    def _finish(self, episode: Episode, why: str) -> None:
        episode.rollout.ended_by = why
        if not episode.rewritten:  # one sequence
            episode.rollout.separate_turns = []
        close_environment(episode.env, self.environments.flag)
        self.on_rollout(episode.rollout)

    def _fail_episode(self, episode: Episode, failure: RewardFailure) -> None:
        close_environment(episode.env, self.environments.flag)
        if self.cfg.env_errors == "stop":
            raise failure.exception()
        self.failed.append(failure)
        r = episode.rollout
        r.turn_rewards, r.env_rewards = [], {}
        r.ended_by, r.env_failure, r.failure_line = "error", failure.kind, failure.line
        # one that failed before its first response has nothing that could be compared or trained on
        r.finish_reason = "error" if self.cfg.env_errors == "drop" or not r.response else "stop"

    def report_failures(self) -> None:
        """Print the first failure of each kind in full, then a line on all of them."""
        shown_kinds = self.environments.shown_kinds
        for failure in self.failed:
            if failure.what not in shown_kinds:
                shown_kinds.add(failure.what)
                print(f"{failure.line}\n{failure.trace}The first failure of its kind", file=sys.stderr)
        if self.failed:
            kinds = Counter(failure.what for failure in self.failed).most_common(3)
            kinds = ", ".join(f"{n} {what}" for what, n in kinds)
            print(f"{len(self.failed)} of {len(self.episodes)} episodes failed ({kinds}), as {self.failed[0].line}; "
                  f"with --env-errors {self.cfg.env_errors} the run goes on", file=sys.stderr)
