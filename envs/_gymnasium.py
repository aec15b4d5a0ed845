"""Environments with Gymnasium's interface: `reset(seed=..., options=...)` returns (observation, info), and
`step(action)` returns (observation, reward, terminated, truncated, info). Gymnasium itself is not needed. The file name
begins with _ because it is not an environment."""

import reprlib
import zlib
from typing import Any

from PIL import Image

from envs import Observation
from errors import as_user_error, need
from prepare_data import Example

EXPECTED = (
    "(observation, info) from reset and (observation, reward, terminated, truncated, info) from step, where an "
    "observation is text, a PIL image, a uint8 array of pixels, or a list or dict of these"
)


class GymnasiumAdapter:
    """Adapter from Gymnasium's interface to that of our environments. An action is the text of a response."""

    def __init__(self, env: Any):
        self.env = env
        self.close = getattr(env, "close", lambda: None)

    def reset(self, example: Example) -> tuple[str, list]:
        """Start an episode, with a seed that depends only on the row, and the row as options["example"]."""
        result = self.env.reset(seed=zlib.crc32(example.uid.encode()), options={"example": example})
        text, images = self._read(result, 2)
        return text if "<image>" in text else "<image>" * len(images) + text, images

    def step(self, response: str) -> Observation:
        """Return what follows a response. The episode is over if it is terminated or truncated; info is not used."""
        result = self.env.step(response)
        return Observation(*self._read(result, 5), result[1], any(result[2:4]))

    def _read(self, result: Any, n_values: int) -> tuple[str, list]:
        """Return the texts of the observation in a result, one per line, and its images."""
        problem = f"{type(self.env).__name__} returned {reprlib.repr(result)}; return {EXPECTED}"
        need(isinstance(result, tuple) and len(result) == n_values, problem)
        ends = [str(getattr(end, "dtype", type(end).__name__)) for end in result[2:4]]
        need(set(ends) <= {"bool"}, problem)
        with as_user_error((TypeError, ValueError, IndexError, RecursionError), problem):
            parts = [Image.fromarray(p) if getattr(p, "dtype", "") == "uint8" else p for p in flatten(result[0])]
        need(all(isinstance(part, str | Image.Image) for part in parts), problem)
        images = [part for part in parts if not isinstance(part, str)]
        return "\n".join(part for part in parts if isinstance(part, str)), images


def flatten(observation: Any) -> list:
    """Return the parts of an observation, in order. The parts of a dict are those of its values."""
    parts = list(observation.values()) if isinstance(observation, dict) else observation
    return sum(map(flatten, parts), []) if isinstance(parts, list | tuple) else [parts]
