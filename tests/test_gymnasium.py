"""Environments with Gymnasium's interface: what they get, which observations they may return, and their errors.

The environments are written by hand; the last test needs gymnasium and is skipped without it.

pytest tests/test_gymnasium.py
"""


import numpy as np
import pytest
from conftest import wait_until
from PIL import Image
from test_episodes import make_examples, make_factory, play

import envs._threads
from envs import Observation
from envs._gymnasium import GymnasiumAdapter
from errors import UserError

ARRAY = np.full((28, 56, 3), 7, np.uint8)
IMAGE = Image.new("RGB", (56, 28), (7, 7, 7))


class Returning:
    """An environment whose methods return the results that it was made with."""

    def __init__(self, at_reset=("Go.", {}), at_step=("More.", 0.5, False, False, {})):
        self.results, self.calls = [at_reset, at_step], []

    def reset(self, *, seed=None, options=None):
        self.calls.append((seed, options))
        return self.results[0]

    def step(self, action):
        self.calls.append(action)
        return self.results[1]


class Counting:
    """An environment that shows a random picture, then counts the turns; the third one ends the episode."""

    made = []

    def __init__(self):
        self.turn = 0
        self.is_closed = False
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        self.rng = np.random.default_rng(seed)
        self.example = options["example"]
        return {"image": self.rng.integers(0, 256, (28, 56, 3), np.uint8), "text": f"Truth {self.example.uid}?"}, {}

    def step(self, action):
        assert isinstance(action, str)
        self.turn += 1
        return f"turn {self.turn}", np.float32(self.turn / 4), self.turn == 3, False, {"ignored": object()}

    def close(self):
        self.is_closed = True


def make_adapter(**results):
    return GymnasiumAdapter(Returning(**results))


def test_a_class_is_adapted_if_its_reset_takes_options():
    env = make_factory(Returning).make()
    assert isinstance(env, GymnasiumAdapter) and isinstance(env.env, Returning)
    assert make_factory(Returning).make().env is not env.env

    class Plain:
        def reset(self, example):
            return "Go.", []

        def step(self, response):
            return Observation(done=True)

    assert isinstance(make_factory(Plain).make(), Plain)


def test_settings_reach_the_constructor():
    class Sized(Returning):
        def __init__(self, size):
            self.size = size

    assert make_factory(Sized, env_settings=("size=3",)).make().env.size == 3
    with pytest.raises(UserError, match="its settings: size"):
        make_factory(Sized, env_settings=("width=3",))


def test_the_environment_gets_the_row_a_seed_of_the_row_and_the_response():
    first, second = make_examples([1, 2])
    env = make_adapter()
    for example in (first, second, first):
        env.reset(example)
    env.step("left")
    (a, options), (b, _), (c, _), action = env.env.calls
    assert a == c != b and 0 <= min(a, b) and max(a, b) < 2**32 and type(a) is int  # numpy takes seeds of 32 bits
    assert options == {"example": first} and action == "left"


@pytest.mark.parametrize(
    "observation, text, n_images",
    [
        ("Go.", "Go.", 0),
        (ARRAY, "<image>", 1),
        (IMAGE, "<image>", 1),
        ({"text": "Go.", "image": ARRAY}, "<image>Go.", 1),
        ({"image": [ARRAY, IMAGE], "text": "Go."}, "<image><image>Go.", 2),
        ({"text": "Left <image>, right <image>.", "image": (IMAGE, ARRAY)}, "Left <image>, right <image>.", 2),
        (["One.", IMAGE, {"text": "Two.", "image": ARRAY}], "<image><image>One.\nTwo.", 2),
    ],
)
def test_observations(observation, text, n_images):
    messages, images = make_adapter(at_reset=(observation, {})).reset(make_examples([1])[0])
    assert messages == text and [image.tobytes() for image in images] == [IMAGE.tobytes()] * n_images
    start = make_factory(Returning, env_settings=()).reset_example(make_examples([1])[0])
    assert start.messages == [{"role": "user", "content": "Go."}]
    result = make_adapter(at_step=(observation, 1, False, False, {})).step("x")
    assert result.messages.replace("<image>", "") == text.replace("<image>", "") and len(result.images) == n_images


def test_images_keep_their_order():
    pixels = [np.full((28, 28, 3), i, np.uint8) for i in range(4)]
    nested = [pixels[0], {"a": [pixels[1], pixels[2]]}, pixels[3]]
    _, images = make_adapter(at_reset=(nested, {})).reset(make_examples([1])[0])
    assert [image.getpixel((0, 0))[0] for image in images] == [0, 1, 2, 3]


@pytest.mark.parametrize("terminated, truncated", [(False, False), (True, False), (False, True), (np.True_, False)])
def test_terminated_and_truncated_both_end_the_episode(terminated, truncated):
    result = make_adapter(at_step=("End.", 2, terminated, truncated, {})).step("x")
    assert result == Observation("End.", [], 2, bool(terminated or truncated))


@pytest.mark.parametrize(
    "returned, shown",
    [
        ("Go.", "'Go.'"),
        (("Go.", 0.5, False, {}), r"\('Go.', 0.5, False, {}\)"),  # Gym before 0.26
        ((3, 0.5, False, False, {}), r"\(3, 0.5, False, False, {}\)"),
        ((np.zeros(4, np.float32), 0.5, False, False, {}), r"\(array\("),
        ((None, 0.5, True, False, {}), r"\(None, 0.5, True"),
    ],
)
def test_an_invalid_result_is_reported_with_its_class(returned, shown):
    with pytest.raises(UserError, match=rf"Returning returned {shown}.*; return \(observation, info\) from reset and"):
        make_adapter(at_step=returned).step("x")


@pytest.mark.parametrize("returned", ["Go.", {"text": "Go."}, ("Go.",), (1.5, {})])
def test_an_invalid_reset_is_reported_with_its_class(returned):
    class Wrong(Returning):
        def __init__(self):
            super().__init__(at_reset=returned)

    with pytest.raises(UserError, match=r"Wrong returned .*; return \(observation, info\)"):
        make_factory(Wrong).reset_example(make_examples([1])[0])


def test_episodes_are_played(loaded, monkeypatch):
    # another test may have left a `close` that hangs in each thread of the usual pool
    monkeypatch.setattr(envs._threads, "CLOSE_POOL", envs._threads.ThreadPool(2))
    Counting.made.clear()
    rollouts, _ = play(loaded, "qwen2_5_vl", [1, 2], kind=Counting, max_turns=5)
    assert len(rollouts) == 4 and {r.ended_by for r in rollouts} == {"done"}
    for r in rollouts:
        observed = [message["content"] for message in r.messages if message["role"] == "user"]
        assert observed == ["turn 1", "turn 2", "turn 3"] and r.n_turns == 3
        assert r.turn_rewards == [0.25, 0.5, 0.75]
        [message] = r.prompt.initial_example.messages
        assert message["content"] == f"<image>Truth {r.prompt.uid}?"
    images = {r.prompt.uid: r.prompt.initial_example.images for r in rollouts}
    assert images["u0"] != images["u1"]
    wait_until(lambda: all(env.is_closed for env in Counting.made))
    assert all(env.is_closed for env in Counting.made) and len(Counting.made) == 6  # one for each prompt as well


def test_an_environment_of_gymnasium_is_played(loaded):
    gymnasium = pytest.importorskip("gymnasium")

    class Guess(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(100)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.number = int(self.np_random.integers(10**6))
            return f"Is it {self.number}?", {}

        def step(self, action):
            return "", float(str(self.number) in action), True, False, {}

    rollouts, _ = play(loaded, "qwen2_5_vl", [1, 2], kind=Guess)
    assert {r.ended_by for r in rollouts} == {"done"} and [r.n_turns for r in rollouts] == [1] * 4
    asked = [r.prompt.initial_example.messages[0]["content"] for r in rollouts]
    assert asked[0] == asked[1] != asked[2] == asked[3]
