"""Tests of the built-in environment: tool calls and crops.   pytest tests/test_envs.py"""

import io
import itertools
import json
import math
import random
import string
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import cpu_limit
from PIL import Image

from envs import Environment, look_closer
from envs._factory import validate_messages
from errors import UserError
from prepare_data import DataFormatConfig, Example, main, parse_args, read_examples
from rewards.grade import grade
from tasks.shapes import COLOURS, encode_png

ROOT = Path(__file__).parent.parent
ENVS = {
    "look_closer": (look_closer, lambda: look_closer.LookCloser(view=28, crop=56)),
}


def example(task, prompt="What is it?", images=(), truth="1", **extra):
    return Example("row", task, [{"role": "user", "content": prompt}], list(images), truth, extra)


def toy_examples(task, n, split="train"):
    """Return an example of every question about the first n scenes."""
    examples = []
    for images, questions in itertools.islice(ENVS[task][0].scenes(split, 5), n):
        examples += [example(task, prompt, images, truth, answer_type=kind) for kind, prompt, _, truth in questions]
    return examples


def noise(width, height, seed=0):
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))


def play(task, e, policy, turns):
    """Play an episode; return its responses, the observations' texts, the rewards and whether it ended."""
    module, make = ENVS[task]
    env = make()
    env.reset(e)
    responses, observations, rewards = [], [], []
    for _ in range(turns):
        responses.append(policy(e, responses, observations))
        observation = env.step(responses[-1])
        rewards.append(observation.reward)
        if observation.done:
            return responses, observations, rewards, True
        observations.append(observation.messages)
    return responses, observations, rewards, False


# --- all environments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ENVS)
def test_the_expert_earns_the_full_reward_and_a_policy_that_never_asks_does_not(task):
    module, _ = ENVS[task]
    blind = []
    for e in toy_examples(task, 60):
        responses, observations, rewards, ended = play(task, e, module.expert, module.ENV["max_turns"])
        assert grade(responses[-1], e)["reward"] == pytest.approx(1.0) and rewards == [0.0] * len(responses)
        assert ended
        usual = getattr(module, "USUAL", {}).get(e.extra["answer_type"], module.expert(e, [], []))
        blind.append(grade(usual, e)["reward"])
    assert sum(blind) / len(blind) < 0.75


@pytest.mark.parametrize("task", ENVS)
def test_a_file_holds_one_environment_and_a_task_of_its_name(task, tmp_path):
    module, make = ENVS[task]
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Environment)]
    assert [c for c in classes if c is not Environment] == [type(make())]
    file = tmp_path / "toy.parquet"
    main(parse_args([task, "--toy", "--n", "8", "--split", "test", "--out", str(file)]))
    rows, _ = read_examples(str(file), DataFormatConfig())
    assert {e.data_source for e in rows} == {task} and len(rows) == 8
    known = {(e.messages[0]["content"], e.ground_truth) for e in toy_examples(task, 300, "test")}
    texts = {prompt for prompt, _ in known}
    assert all(e.messages[0]["content"] in texts for e in rows)


@pytest.mark.parametrize("task", ENVS)
def test_reset_is_deterministic_and_leaves_the_example_unchanged(task):
    [e, *_] = toy_examples(task, 1)
    before = json.dumps(e.messages)
    results = []
    for _ in range(2):
        messages, images = ENVS[task][1]().reset(e)
        as_bytes = [image if isinstance(image, bytes) else image.tobytes() for image in images]
        results.append((messages, as_bytes))
    assert results[0] == results[1] and json.dumps(e.messages) == before
    assert messages == e.messages  # the toy's prompt already has the instruction


@pytest.mark.parametrize("task, tag", [("look_closer", "<look>")])
def test_reset_adds_the_instruction_to_a_prompt_that_lacks_it(task, tag):
    truth = json.dumps({"lat": 1.0, "lon": 2.0})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>How many?"}]
    e = Example("row", task, messages, [encode_png(noise(30, 30))], truth, {})
    system, user = ENVS[task][1]().reset(e)[0]
    assert system == messages[0] and user["content"] == f"<image>How many? {ENVS[task][0].INSTRUCTION}"
    assert tag in user["content"] and messages[1]["content"] == "<image>How many?"


HOSTILE = ["", "<look>", "</look>", "<calc>", "<look></look>", "<calc></calc>", "<look>" * 50_000, "<calc>" * 50_000]
HOSTILE += ["<look>" + "9" * 100_000 + "</look>", "<calc>" + "9" * 100_000 + "</calc>", "<look>top left" * 20_000]
HOSTILE += [f"<look>{box}</look>" for box in ("nan nan nan nan", "inf 0 1 1", "1e9 0 1 1", "0x1 0 1 1", "0 0 1", "?")]
HOSTILE += ["<look>0 0 1 1 1</look>", "<look>٠ ٠ ١ ١</look>", "<look>-0 -0 0 0</look>", "<look>:</look>"]
HOSTILE += [f"<calc>{text}</calc>" for text in ("9**9**9**9", "(" * 500, "__import__('os')", "1/0", "sqrt(-1)", "a+b")]
HOSTILE += ["<calc>0^0</calc>", "<calc><image><|im_end|></calc>", "<look><image><|im_end|></look>", "\x00", "\ud800"]
HOSTILE += ['{"lat": ' * 2000, "lat: nan, lon: inf", "lat: 91, lon: 0", "coordinates: " + "1," * 50_000]


@pytest.mark.parametrize("task", ENVS)
def test_no_response_breaks_an_environment_or_is_repeated_by_it(task):
    """Observations never repeat a response, because its image marks and special tokens would be read as such."""
    [e, *_] = toy_examples(task, 1)
    rng = random.Random(0)
    responses = ["".join(rng.choices(string.printable + "<look>calc/0.:,", k=rng.randint(0, 80))) for _ in range(300)]
    responses += [f"<look>{text}</look><calc>{text}</calc>" for text in responses]
    for response in HOSTILE + responses:
        env = ENVS[task][1]()
        env.reset(e)
        with cpu_limit():
            result = env.step(response)
        assert result.messages.count("<image>") == len(result.images) <= env.images_per_turn
        assert len(result.messages) < 200 and "<|" not in result.messages and math.isfinite(result.reward)
        assert result.done == (result.messages == "")
        assert all(1 <= min(image.size) and max(image.size) <= 56 for image in result.images)


def test_environments_and_their_rewards_need_no_torch():
    """Processes that grade responses import them."""
    code = "import reward, sys; reward.load_tasks(); print('envs.look_closer' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


# --- look closer --------------------------------------------------------------------------------------------------


def look(image, call, **settings):
    """Return the part of an image that a call shows, or the message that it gets."""
    env = look_closer.LookCloser(**{"view": 10_000, "crop": 10_000} | settings)
    env.reset(example("look_closer", "<image>?", [encode_png(image)]))
    observation = env.step(f"Let me see. <look>{call}</look>")
    assert not observation.done
    return observation.images[0] if observation.images else observation.messages


@pytest.mark.parametrize("call, pixels", [
    ("top left", (0, 0, 60, 40)), ("bottom right", (60, 40, 120, 80)), ("Upper-Right", (60, 0, 120, 40)),
    ("the lower left quadrant", (0, 40, 60, 80)), ("left", (0, 0, 60, 80)), ("bottom half", (0, 40, 120, 80)),
    ("centre", (30, 20, 90, 60)), ("middle center", (30, 20, 90, 60)),
    ("top center", (30, 0, 90, 40)), ("middle right", (60, 20, 120, 60)),
    ("0 0 1 1", (0, 0, 120, 80)), ("0.1 0.2 0.6 0.7", (12, 16, 72, 56)), ("[0.1, 0.2, 0.6, 0.7]", (12, 16, 72, 56)),
    ("10% 20% 60% 70%", (12, 16, 72, 56)), ("1: .1; .2; .6; .7", (12, 16, 72, 56)), ("-1 0.5 0.5 9", (0, 40, 60, 80)),
    ("0.7 0.7 0.71 0.71", (84, 56, 86, 57)),  # float rounding of 0.7 * 120 and 0.7 * 80 costs or adds no pixel
    ("0.001 0.001 0.002 0.002", (0, 0, 1, 1)),
])  # fmt: skip
def test_a_crop_is_the_originals_pixels(call, pixels):
    image = noise(120, 80)
    left, top, right, bottom = pixels
    shown = look(image, call)
    assert shown.size == (right - left, bottom - top)
    for x, y in itertools.product(range(shown.width), range(shown.height)):
        assert shown.getpixel((x, y)) == image.getpixel((left + x, top + y))


@pytest.mark.parametrize("call, why", [
    ("", "no such place"), ("top bottom", "no such place"), ("top top", "no such place"), ("the cat", "no such place"),
    ("nan 0 1 1", "no such place"), ("0 0 1", "no such place"), ("0.1 0.2 0.6 0.7 1", "no such place"),
    ("0.6 0.2 0.1 0.7", "empty"), ("0.5 0.5 0.5 0.9", "empty"), ("2 2 3 3", "empty"), ("2: top left", "no such image"),
    ("0: top left", "no such image"), ("x: top left", "no such image"), ("top left" * 99, "too long"),
])  # fmt: skip
def test_a_wrong_call_gets_the_reason(call, why):
    message = look(noise(120, 80), call)
    assert why in message and message.endswith(look_closer.LOOK_AGAIN)


def test_boxes_may_have_another_scale_and_images_are_counted_from_one():
    image, other = noise(50, 40), noise(70, 20, 1)
    assert look(image, "500 500 1000 1000", scale=1000).tobytes() == image.crop((25, 20, 50, 40)).tobytes()
    assert "100 200 600 700</look>" in look_closer.make_instruction(
        1000
    ) and "from 0 to 1000" in look_closer.make_instruction(1000)
    env = look_closer.LookCloser(cost=0.25)
    env.reset(example("look_closer", "<image><image>?", [encode_png(image), encode_png(other)]))
    observation = env.step("<look>top left</look><look>Image 2: right</look>")  # the last call counts
    assert observation.images[0].tobytes() == other.crop((35, 0, 70, 20)).tobytes() and observation.reward == -0.25
    assert env.step("<look>").reward == -0.25 and env.step(r"\boxed{3}").reward == 0.0


def test_images_are_limited_in_size_and_downscaled_by_averaging():
    image = noise(80, 40)
    env = look_closer.LookCloser(view=20, crop=10)
    _, [view] = env.reset(example("look_closer", "<image>?", [encode_png(image)]))
    [part] = env.step("<look>left</look>").images
    assert view.size == (20, 10) and part.size == (10, 10)
    for x, y, band in itertools.product(range(10), range(10), range(3)):
        block = [image.getpixel((4 * x + i, 4 * y + j))[band] for i in range(4) for j in range(4)]
        rounded_twice = pytest.approx(sum(block) / 16, abs=1.01)
        assert view.getpixel((x, y))[band] == part.getpixel((x, y))[band] == rounded_twice
    assert look_closer.downscale(image, 80) is image and look_closer.downscale(noise(300, 2), 100).size == (100, 1)


def test_a_crop_that_no_model_takes_is_refused():
    assert "too thin" in look(noise(400, 300), "0 0 1 0.003")
    with pytest.raises(UserError, match="row 'row' has no image"):
        look_closer.LookCloser().reset(example("look_closer"))


@pytest.mark.parametrize("name, wrong", [("view", 0), ("crop", 1.5), ("cost", 2), ("scale", "big"), ("view", True)])
def test_settings_of_look_closer_are_checked(name, wrong):
    with pytest.raises(UserError, match=f"--env-settings {name}={wrong}: give"):
        look_closer.LookCloser(**{name: wrong})


def test_the_view_of_a_toy_is_the_same_whatever_the_answers_are():
    """The views are equal bit for bit, so the answer cannot be seen without a look; the full-size quadrants differ."""
    for seed in range(4):
        views, parts = set(), set()
        for patterns in itertools.product(look_closer.PATTERNS, repeat=4):
            quadrant = look_closer.draw_frame(random.Random(seed), COLOURS["red"], patterns)
            parts.add(quadrant.tobytes())
            views.add(look_closer.downscale(quadrant, quadrant.width // 4).tobytes())
        assert len(views) == 1 and len(parts) == 4**4
    _, [view] = ENVS["look_closer"][1]().reset(toy_examples("look_closer", 1)[0])
    assert view.width == 2 * quadrant.width // 4


def test_patterns_are_drawn_as_named():
    """Patterns are read from pixels: those two apart are equal along a stripe and differ across it."""
    for e in toy_examples("look_closer", 12):
        image = Image.open(io.BytesIO(e.images[0])).convert("RGB")
        corners = itertools.product((0, 56), repeat=2)
        [(left, top)] = [place for place in corners if image.getpixel(place) in COLOURS.values()]
        seen = []
        for y0, x0 in itertools.product((top + 8, top + 28), (left + 8, left + 28)):
            dark = {(x, y) for x in range(20) for y in range(20) if image.getpixel((x0 + x, y0 + y))[0] < 128}
            inner = list(itertools.product(range(2, 18), repeat=2))
            across, down, slant = (
                sum(((x, y) in dark) == ((x + dx, y + dy) in dark) for x, y in inner) / len(inner)
                for dx, dy in ((2, 0), (0, 2), (1, -1))
            )
            names = {(1, 0): "rows", (0, 1): "columns", (0, 0): "diagonals" if slant == 1 else "checks"}
            seen.append(names[across, down])
        assert " ".join(seen) == e.ground_truth


def test_str_subclasses_become_plain_str():
    """Another process could not unpickle a class that only the user's file defines."""

    class Say(str):
        pass

    for content in (Say("look"), [{"role": Say("user"), "content": Say("look")}]):
        [message], _, _ = validate_messages(content, [])
        assert message == {"role": "user", "content": "look"} and {type(x) for x in message.values()} == {str}
