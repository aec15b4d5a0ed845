"""The interface of an environment. Files of envs/ are tasks too, so reward workers import them: nothing here may import
torch.

class Env(Environment):
    def step(self, response):                # after each response of an episode
        return Observation("Are you sure?")  # a message, images, a reward; done=True ends the episode
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

from errors import need
from prepare_data import Example
from sources.videos import Video


@dataclass
class Observation:
    """An observation: what an environment returns for a response."""

    # a user message, or several; each <image> is one of `images`, and each <video> one of `videos`
    messages: str | Sequence[Mapping[str, str]] = ""
    images: Sequence[Image.Image | bytes] = ()
    reward: float | Mapping[str, float] = 0.0  # reward of this turn, or named numbers with it under "reward"
    done: bool = False  # is the episode over? The messages are then only recorded, not shown to the policy
    videos: Sequence[Video] = ()


class Environment:
    """The base class of environments. Each episode has its own instance. Its methods may be `async`; other methods run
    in threads."""

    images_per_turn = 1  # most images in an observation
    videos_per_turn = 0  # most videos in an observation
    frames_per_video = 16  # most frames of such a video

    def reset(self, example: Example) -> tuple[Sequence[Mapping[str, str]], Sequence[Image.Image | bytes]]:
        """Return the messages and images of the prompt, always the same ones for the same example."""
        return example.messages, example.images

    def step(self, response: str) -> Observation:
        """Return the observation that follows a response, which is given without its end token."""
        raise NotImplementedError


def need_number(name: str, value: object, most: float) -> None:
    """Raise UserError if a setting of an environment is not a number from 0 to `most`."""
    need(isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most,
         f"--env-settings {name}={value}: give a number from 0 to {most:g}")


def append_instruction(messages: Sequence[Mapping[str, str]], instruction: str, unless: str) -> list[dict[str, str]]:
    """Return the messages with an instruction at the end of the last one, the user's, unless it contains `unless`."""
    *earlier, last = map(dict, messages)
    if unless not in last["content"]:
        last["content"] += f" {instruction}"
    return [*earlier, last]


def parse_tool_call(response: str, tag: str) -> str | None:
    """Return the text in the last `<tag>...</tag>` of a response, or None if there is no `<tag>`. Raise UserError if
    `</tag>` is missing; its message is an observation for the policy."""
    *_, call = re.split(f"<{tag}>", response, flags=re.IGNORECASE)
    if call == response:
        return None
    text, *after = re.split(f"</{tag}>", call, maxsplit=1, flags=re.IGNORECASE)
    need(after, f"<{tag}> has no </{tag}>.")
    return text
