"""Loading the environment of --env, the start of its episodes, and checks of the messages and images that it returns.
The file name begins with _ because it is not an environment."""

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
from envs._gymnasium import GymnasiumAdapter
from envs._threads import close_environment, event_loop, to_coroutine
from errors import ErrorContext, UserError, as_user_error, nearest, need
from prepare_data import Example, decode_image
from rewards.functions import import_file
from rollout import EnvConfig
from settings import parse_pairs
from sources.content import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, insert_placeholders
from sources.images import IMAGE_ERRORS, check_header
from sources.videos import Video

# ----------------------------------------------------------------------------------------------------------------------
# Loading


class EnvFactory:
    """The environment of --env and its settings. `make` returns a new instance, for one episode."""

    def __init__(self, cfg: EnvConfig):
        self.cfg = cfg
        self.flag = f"--env {cfg.env}"
        env_class = load_class(cfg.env)
        settings = parse_pairs("--env-settings", cfg.env_settings)
        try:
            inspect.signature(env_class).bind(**settings)
        except TypeError as error:
            names = ", ".join(inspect.signature(env_class).parameters) or "none"
            raise UserError(f"{self.flag}: --env-settings: {error}; its settings: {names}") from error
        self.make = functools.partial(env_class, **settings)
        for name in ("reset", "step"):
            need(callable(getattr(env_class, name, None)), f"{self.flag}: no method {name}; see docs/environments.md")
        if {"seed", "options"} <= {*inspect.signature(env_class.reset).parameters}:  # Gymnasium's interface
            self.make = lambda: GymnasiumAdapter(env_class(**settings))
        names = "images_per_turn", "videos_per_turn", "frames_per_video"
        self.limits = {name: getattr(env_class, name, getattr(Environment, name)) for name in names}
        for name, limit in self.limits.items():
            need(type(limit) is int and limit >= 0, f"{self.flag}: {name} is {limit!r}, expected a whole number")
        self.most_at_start = 0  # most images at the start of an episode so far
        self.largest: tuple[int, int] = (0, 0)  # (width, height) of the largest image at the start of an episode so far
        self.all_answered_quickly = True  # has every environment answered within MAX_WAIT_SECONDS so far?
        self.shown_kinds: set[str] = set()  # kinds of failures that were printed in full

    def reset_example(self, example: Example) -> Example:
        """Return an example with the messages and images with which its episodes begin. Raise UserError if `reset`
        returns something invalid; its own exceptions pass through."""
        label = f"{self.flag}: row {example.uid!r}: reset"
        env = self.make()
        with ErrorContext(f"raised by {label}"):
            pair = env.reset(copy_example(example))
            if inspect.isawaitable(pair):
                pair = asyncio.run_coroutine_threadsafe(to_coroutine(pair), event_loop()).result(self.cfg.env_timeout)
        with as_user_error(UserError, label):
            start = make_start(pair, example)
            same = start.images is example.images
            sizes = example.image_sizes if same else [decode_env_image(data).size for data in start.images]
        close_environment(env, self.flag)
        self.most_at_start = max(self.most_at_start, len(sizes))
        self.largest = max([self.largest, *sizes], key=math.prod)
        return start

    def episode_limits(self) -> tuple[int, tuple[int, int], int, int]:
        """Return the most images that an episode can have, the size of the largest image at the start of one, over all
        examples so far, the most videos in its observations, and the most frames of one of these."""
        images, videos, frames = self.limits.values()
        turns = self.cfg.max_turns - 1
        return self.most_at_start + images * turns, self.largest, videos * turns, frames


def load_class(name: str) -> type:
    """Return the environment class of --env: a name in envs/ or FILE.py:CLASS. Raise UserError if there is none."""
    if ":" in name:
        path, _, attribute = name.rpartition(":")
        module = import_file(path, f"--env {name}")
        env_class = getattr(module, attribute, None)
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        need(inspect.isclass(env_class),
             f"--env {name}: no class {attribute} in {path}; it has {', '.join(classes) or 'none'}")
        return env_class
    names = sorted(file.stem for file in Path(__file__).parent.glob("[!_]*.py"))
    need(name in names,
         f"--env {name}: no such environment{nearest(name, names)}; give one of {', '.join(names)}, or FILE.py:CLASS, "
         "such as my.py:Zoom")
    with as_user_error(ModuleNotFoundError, f"--env {name} needs a file that is not in this copy"):
        module = importlib.import_module(f"envs.{name}")
    [env_class] = [subclass for subclass in Environment.__subclasses__() if subclass.__module__ == module.__name__]
    return env_class


# ----------------------------------------------------------------------------------------------------------------------
# Checks of what environments return

def make_start(result: Any, example: Example) -> Example:
    """Return an example with the messages and images that `reset` returned for it. Raise UserError if they are
    invalid."""
    need(isinstance(result, tuple | list) and len(result) == 2,
         f"returned {result!r:.200}; expected (messages, images), such as (\"<image>What is this?\", [image])")
    messages, images, videos = validate_messages(*result)
    n_marks = sum(message["content"].count(VIDEO_PLACEHOLDER) for message in messages)
    need(not videos and n_marks == len(example.videos),
         f"messages have {n_marks} {VIDEO_PLACEHOLDER} marks and {len(videos)} videos, but a prompt shows exactly the "
         f"videos of its row; write {len(example.videos)} marks, and no videos")
    check_placeholders(messages, images, example.videos)
    images = images if images is example.images else list(map(to_image_bytes, images))
    return replace(example, messages=messages, images=images)


def check_placeholders(messages: Sequence[dict], images: Sequence[Any], videos: Sequence[Any]) -> None:
    """Raise UserError if the number of <image> or <video> marks in the messages is not that of images or videos."""
    for mark, given in ((IMAGE_PLACEHOLDER, images), (VIDEO_PLACEHOLDER, videos)):
        n_marks, kind = sum(message["content"].count(mark) for message in messages), mark.strip("<>")
        need(n_marks == len(given), f"{kind}s: {len(given)}; {mark} marks: {n_marks}; give one mark per {kind}")


def copy_example(example: Example) -> Example:
    """Return a copy of an example whose messages and extra an environment may change."""
    return replace(example, messages=[dict(message) for message in example.messages], extra=dict(example.extra))


def decode_env_image(data: bytes) -> Image.Image:
    """Decode an image of an environment. Raise UserError if that fails."""
    with as_user_error(IMAGE_ERRORS, "an image cannot be read"):
        return decode_image(data)


def validate_messages(
    messages: Any, images: Any, videos: Any = ()
) -> tuple[list[dict], Sequence[Any], Sequence[Any]]:
    """Return an environment's messages as {role, content}, whose contents are texts with <image> and <video> marks, its
    images and its videos. `messages` is a text, or a list of {role, content} whose contents may be lists of parts, as
    in rows. Raise UserError if they are invalid."""
    for kind, given in (("images", images), ("videos", videos)):
        need(isinstance(given, Sequence) and not isinstance(given, str | bytes | Video),
             f"{kind} are {type(given).__name__}; expected a list of {kind}")
    problem = f"messages are {messages!r:.200}; expected text, or a list of {{'role': ..., 'content': ...}} of texts"
    with as_user_error((TypeError, LookupError), problem):
        checked = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        if any(isinstance(message["content"], list) for message in checked):
            checked, images, videos = insert_placeholders(checked, list(images), list(videos))
        # plain str: instances of a subclass in the user's file could not be sent to other processes
        checked = [{name: str.__str__(value) for name, value in dict(message).items()} for message in checked]
    need(checked and all(message.keys() == {"role", "content"} for message in checked), problem)
    return checked, images, videos


def check_image(image: Any) -> None:
    """Raise UserError if an image is neither bytes nor a PIL Image, or a PIL Image that would be refused as a file."""
    need(isinstance(image, bytes | Image.Image),
         f"an image is {type(image).__name__}; expected the bytes of a file, or a PIL Image")
    if isinstance(image, Image.Image):
        with as_user_error(UserError, "an image"):
            check_header(image)


def to_image_bytes(image: Any) -> bytes:
    """Return an image as the bytes of a file: unchanged if it is bytes, else as a PNG."""
    check_image(image)
    if isinstance(image, bytes):
        return image
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
