"""What an environment is. Files of envs/ are tasks too, and processes that grade import them: nothing here needs torch.

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


@dataclass
class Observation:
    """What an environment says to a response."""

    messages: str | Sequence[Mapping[str, str]] = ""  # a user's message, or several, each <image> one of `images`
    images: Sequence[Image.Image | bytes] = ()
    reward: float | Mapping[str, float] = 0.0  # of this turn, or named numbers with it under "reward"
    done: bool = False  # is the episode over? What is said then is for those who read it


class Environment:
    """One for each episode. Its methods may be `async`; the others run in threads."""

    images_per_turn = 1  # that an observation has at most

    def reset(self, example: Example) -> tuple[Sequence[Mapping[str, str]], Sequence[Image.Image | bytes]]:
        """Messages and images of the prompt, the same whenever it is called with this example."""
        return example.messages, example.images

    def step(self, response: str) -> Observation:
        """After a response, without its end token."""
        raise NotImplementedError


def need_number(name: str, value: object, most: float) -> None:
    """Raise UserError unless a setting of an environment is a number from 0 to `most`."""
    need(isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most,
         f"--env-settings {name}={value}: give a number from 0 to {most:g}")


def append_instruction(messages: Sequence[Mapping[str, str]], instruction: str, unless: str) -> list[dict[str, str]]:
    """Messages with an instruction behind the last one, the user's, unless it has the text `unless` already."""
    *before, last = map(dict, messages)
    if unless not in last["content"]:
        last["content"] += f" {instruction}"
    return [*before, last]


def parse_tool_call(response: str, tag: str) -> str | None:
    """Return what stands in the last `<tag>...</tag>` of a response, or None. UserError if it does not end."""
    *_, call = re.split(f"<{tag}>", response, flags=re.IGNORECASE)
    if call == response:
        return None
    text, *ended = re.split(f"</{tag}>", call, maxsplit=1, flags=re.IGNORECASE)
    need(ended, f"<{tag}> has no </{tag}>.")
    return text
