"""Which environment --env names, how its episodes begin, and checks of what it says. The name begins with _ because it
is no environment."""

import asyncio
import functools
import importlib
import inspect
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from envs import Environment
from envs._threads import close_environment, event_loop, to_coroutine
from errors import ErrorContext, UserError, as_user_error, need
from model import IMAGE_PLACEHOLDER
from prepare_data import Example, decode_image
from rewards.functions import import_file
from rollout import EnvConfig
from settings import parse_pairs
from sources.content import insert_image_placeholders
from sources.images import IMAGE_ERRORS

# ----------------------------------------------------------------------------------------------------------------------
# Which environment


class EnvFactory:
    """What --env names: makes one for each episode."""

    def __init__(self, cfg: EnvConfig):
        self.cfg = cfg
        self.flag = f"--env {cfg.env}"
        kind = load_class(cfg.env)
        settings = parse_pairs("--env-settings", cfg.env_settings)
        try:
            inspect.signature(kind).bind(**settings)
        except TypeError as error:
            takes = ", ".join(inspect.signature(kind).parameters) or "none"
            raise UserError(f"{self.flag}: --env-settings: {error}; it takes {takes}") from error
        self.make = functools.partial(kind, **settings)
        for name in ("reset", "step"):
            need(callable(getattr(kind, name, None)), f"{self.flag} has no method {name}; see docs/environments.md")
        self.images_per_turn = getattr(kind, "images_per_turn", Environment.images_per_turn)
        need(type(self.images_per_turn) is int and self.images_per_turn >= 0,
             f"{self.flag}: images_per_turn is {self.images_per_turn!r}, expected a whole number")
        self.most_at_start = 0  # images that an episode began with
        self.largest: tuple[int, int] = (0, 0)  # of them, (width, height)
        self.all_answered_quickly = True  # has every environment answered within PATIENCE so far?
        self.told_kinds: set[str] = set()  # of failures, told in full

    def reset_example(self, example: Example) -> Example:
        """An example with the messages and images that its episodes begin with."""
        where = f"{self.flag}: row {example.uid!r}: reset"
        env = self.make()
        with ErrorContext(f"raised by {where}"):
            said = env.reset(copy_example(example))
            if inspect.isawaitable(said):
                said = asyncio.run_coroutine_threadsafe(to_coroutine(said), event_loop()).result(self.cfg.env_timeout)
        with as_user_error(UserError, where):
            start = make_start(said, example)
            same = start.images is example.images
            sizes = example.image_sizes if same else [decode_env_image(data).size for data in start.images]
        close_environment(env, self.flag)
        self.most_at_start = max(self.most_at_start, len(sizes))
        self.largest = max([self.largest, *sizes], key=math.prod)
        return start

    def episode_image_limits(self) -> tuple[int, tuple[int, int]]:
        """The most images of an episode, and the size of the largest that one began with, of all examples so far."""
        return self.most_at_start + self.images_per_turn * (self.cfg.max_turns - 1), self.largest


def load_class(name: str) -> type:
    if ":" in name:
        path, _, attribute = name.rpartition(":")
        module = import_file(path, f"--env {name}")
        kind = getattr(module, attribute, None)
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        need(inspect.isclass(kind),
             f"--env {name}: no class {attribute} in {path}; it has {', '.join(classes) or 'none'}")
        return kind
    known = sorted(file.stem for file in Path(__file__).parent.glob("[!_]*.py"))
    need(name in known, f"--env {name}: there are {', '.join(known)}; or give FILE.py:CLASS, such as my.py:Zoom")
    with as_user_error(ModuleNotFoundError, f"--env {name} builds on a file that is not in this copy"):
        module = importlib.import_module(f"envs.{name}")
    [kind] = [kind for kind in Environment.__subclasses__() if kind.__module__ == module.__name__]
    return kind


# ----------------------------------------------------------------------------------------------------------------------
# What environments say, checked

def make_start(said: Any, example: Example) -> Example:
    """Return an example with what `reset` returned for it: messages and images."""
    need(isinstance(said, tuple | list) and len(said) == 2,
         f"returned {said!r:.200}; expected (messages, images), such as (\"<image>Go on.\", [image])")
    messages, images = validate_messages(*said)
    check_placeholders(messages, images)
    images = images if images is example.images else list(map(to_image_bytes, images))
    return replace(example, messages=messages, images=images)


def check_placeholders(messages: Sequence[dict], images: Sequence[Any]) -> None:
    n_marks = sum(message["content"].count(IMAGE_PLACEHOLDER) for message in messages)
    need(n_marks == len(images), f"{len(images)} images with {n_marks} {IMAGE_PLACEHOLDER} marks; give one for each")


def copy_example(example: Example) -> Example:
    """An environment may change what it is given."""
    return replace(example, messages=[dict(message) for message in example.messages], extra=dict(example.extra))


def decode_env_image(data: bytes) -> Image.Image:
    with as_user_error(IMAGE_ERRORS, "an image cannot be read"):
        return decode_image(data)


def validate_messages(messages: Any, images: Any) -> tuple[list[dict], Sequence[Any]]:
    """Return (messages, images) of what an environment said: a text, or a list of {role, content} whose contents may be
    lists of parts, as in rows, becomes messages whose contents are texts with <image> marks."""
    need(isinstance(images, Sequence) and not isinstance(images, str | bytes),
         f"images are {type(images).__name__}; expected a list of images")
    told = f"messages are {messages!r:.200}; expected text, or a list of {{'role': ..., 'content': ...}} of texts"
    with as_user_error((TypeError, LookupError), told):
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        if any(isinstance(message["content"], list) for message in said):
            said, images = insert_image_placeholders(said, list(images))
        # plain texts: those of a class in the user's file could not be sent to other processes
        said = [{name: str.__str__(value) for name, value in dict(message).items()} for message in said]
    need(said and all(message.keys() == {"role", "content"} for message in said), told)
    return said, images


def check_image(image: Any) -> None:
    need(isinstance(image, bytes | Image.Image),
         f"an image is {type(image).__name__}; expected a file's bytes, or PIL's Image")


def to_image_bytes(image: Any) -> bytes:
    """An image as a file."""
    check_image(image)
    if isinstance(image, bytes):
        return image
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
