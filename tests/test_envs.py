"""Tests of the built-in environments: tool calls, crops, calculated values, distances.   pytest tests/test_envs.py"""

import io
import itertools
import json
import math
import random
import re
import string
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from conftest import cpu_limit
from PIL import Image

from envs import Environment, calculator, guess_the_place, look_closer
from envs._factory import validate_messages
from errors import UserError
from prepare_data import DataFormatConfig, Example, main, parse_args, read_examples
from rewards.grade import grade
from tasks.shapes import COLOURS, encode_png

ROOT = Path(__file__).parent.parent
ENVS = {
    "look_closer": (look_closer, lambda: look_closer.LookCloser(view=28, crop=56)),
    "calculator": (calculator, calculator.Calculator),
    "guess_the_place": (guess_the_place, guess_the_place.GuessThePlace),
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
        assert ended or task == "guess_the_place"  # its second guess may be right without ending the episode
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


@pytest.mark.parametrize("task, tag", [("look_closer", "<look>"), ("calculator", "<calc>"), ("guess_the_place", "far")])
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


# --- calculator ---------------------------------------------------------------------------------------------------


def calculate(text):
    env = calculator.Calculator(cost=0.125)
    observation = env.step(f"So <calc>{text}</calc>")
    assert not observation.done and observation.reward == -0.125
    return observation.messages


def test_values_are_those_of_fractions():
    """Random expressions have the value that exact fractions give."""
    rng = random.Random(1)

    def make_expression(depth):
        if depth == 0:
            number = rng.choice([str(rng.randint(0, 9999)), f"{rng.randint(0, 99)}.{rng.randint(0, 99):02}"])
            return number, Fraction(number)
        (a, x), (b, y) = make_expression(rng.randrange(depth)), make_expression(rng.randrange(depth))
        sign = rng.choice("+-*/" if y else "+-*")
        return f"({a}) {sign} ({b})", {"+": x + y, "-": x - y, "*": x * y, "/": x / (y or 1)}[sign]

    n_exact = 0
    for _ in range(400):
        text, exact = make_expression(3)
        output = calculate(text)
        assert Fraction(output) == exact or abs(Fraction(output) - exact) <= abs(exact) * Fraction(5, 10**12), text
        n_exact += Fraction(output) == exact
    assert n_exact > 150
    by_hand = {"12*(3+4)": "84", "2^10": "1024", "9999*9999": "99980001", "1/3": "0.333333333333", "-3--4": "1"}
    by_hand |= {"2/3": "0.666666666667", "10^15": "1E+15", "0*5": "0", "50%": "0.5"}
    assert {text: calculate(text) for text in by_hand} == by_hand
    assert float(calculate("sqrt(2)")) == pytest.approx(math.sqrt(2), rel=1e-11)
    assert float(calculate(r"\frac{\pi}{4}")) == pytest.approx(math.pi / 4, rel=1e-11)
    assert float(calculate("1/3000000")) == pytest.approx(1 / 3e6, rel=1e-11)


@pytest.mark.parametrize("text, why", [
    ("", "no arithmetic"), ("x+1", "no arithmetic"), ("2 3", "no arithmetic"), ("1+", "no arithmetic"),
    ("print(1)", "no arithmetic"), ("1=1", "no arithmetic"), ("(1", "no arithmetic"), ("sin(30)", "no arithmetic"),
    ("1/0", "no value"), ("sqrt(-4)", "no value"), ("0^(-1)", "no value"), ("9^9^9^9", "too large"),
    ("1" * 2000, "too long"), ("(" * 200 + "1", "too long"),
])  # fmt: skip
def test_an_expression_without_a_value_gets_the_reason(text, why):
    assert why in calculate(text)


def test_an_answer_ends_the_episode_and_an_unclosed_tag_is_reported():
    env = calculator.Calculator()
    assert env.step(r"\boxed{84}").done and env.step("").done
    assert env.step("<calc>1+1").messages == "<calc> has no </calc>."
    assert env.step("<calc>1+1</calc> and <calc>2+2</calc>").messages == "4"
    with pytest.raises(UserError, match="--env-settings cost=-1"):
        calculator.Calculator(cost=-1)


def test_drawn_numbers_are_read_back():
    """Every number is read back from its drawing. Digit 1 (2 strokes) has the least paint, 8 (7 strokes) the most."""
    from PIL import ImageDraw

    paint = {}
    for number in range(100):
        image = Image.new("RGB", (56, 56), "white")
        for row in (0, 1):
            calculator.draw_number(ImageDraw.Draw(image), number, row, 30)
            assert calculator.read_number(image, row) == number
        if number < 10:
            paint[number] = sum(p[0] < 128 for p in image.crop((28, 0, 56, 28)).get_flattened_data())
    order = sorted(paint, key=paint.get)
    assert order[0] == 1 and order[1] == 7 and order[-1] == 8 and len(set(paint.values())) > 5


def test_a_calculators_answer_is_graded_by_value():
    e = example("calculator", truth="1776")
    assert grade(r"\boxed{1776}", e) == {"accuracy": 1.0, "format": 1.0, "reward": 1.0}
    assert grade(r"It is \boxed{1,776.0}", e)["reward"] == pytest.approx(0.9)
    assert grade(r"\boxed{1777}", e)["accuracy"] == grade("<calc>1776</calc>", e)["reward"] == 0.0


# --- guess the place ----------------------------------------------------------------------------------------------


def vector_distance_km(lat, lon, other_lat, other_lon):
    """Return the distance from the angle between two vectors; the environment uses the haversine formula."""
    points = []
    for phi, psi in ((math.radians(lat), math.radians(lon)), (math.radians(other_lat), math.radians(other_lon))):
        points.append((math.cos(phi) * math.cos(psi), math.cos(phi) * math.sin(psi), math.sin(phi)))
    return 6371.0088 * math.acos(max(-1.0, min(1.0, sum(a * b for a, b in zip(*points, strict=True)))))


def make_guess(lat, lon, truth, **settings):
    env = guess_the_place.GuessThePlace(**settings)
    env.reset(example("guess_the_place", truth=json.dumps(dict(zip(("lat", "lon"), truth, strict=True)))))
    return env.step(f"lat: {lat}, lon: {lon}")


def test_distances_and_directions_agree_with_vectors():
    rng = random.Random(2)
    for _ in range(200):
        lat, lon, other_lat, other_lon = (round(rng.uniform(-x, x), 3) for x in (89, 179, 89, 179))
        message = make_guess(lat, lon, (other_lat, other_lon)).messages
        number, direction = re.fullmatch(r"(\d+) km ([a-z]+)\.", message).groups()
        assert float(number) == pytest.approx(vector_distance_km(lat, lon, other_lat, other_lon), abs=0.6)
        # a short step in this direction comes nearer by most of its length
        step = 0.2 / math.cos(math.radians(lat))
        north = ("north" in direction) - ("south" in direction)
        east = ("east" in direction) - ("west" in direction)
        there = lat + 0.2 * north / math.hypot(north, east), lon + step * east / math.hypot(north, east)
        nearer = vector_distance_km(lat, lon, other_lat, other_lon) - vector_distance_km(*there, other_lat, other_lon)
        assert nearer > 0.8 * vector_distance_km(lat, lon, *there)


@pytest.mark.parametrize("guess, point", [((1, 0), "south"), ((-1, 0), "north"), ((0, 1), "west"), ((0, -1), "east"),
                                          ((-1, 1), "northwest"), ((0, 179), "west"), ((0, -179), "east")])  # fmt: skip
def test_directions(guess, point):
    assert make_guess(*guess, (0, 0)).messages.endswith(f" km {point}.")


def test_a_near_guess_ends_the_episode_and_others_get_the_distance():
    assert make_guess(48.86, 2.35, (48.86, 2.36)) == guess_the_place.Observation(done=True)
    assert make_guess(48.86, 2.35, (48.86, 2.36), tolerance_km=0.5).messages == "1 km east."
    assert make_guess(0, 0, (0, 1), directions=False).messages == "111 km."
    assert make_guess(91, 0, (0, 1)).messages == make_guess("x", 0, (0, 1)).messages == guess_the_place.NO_GUESS
    with pytest.raises(UserError, match="no lat and lon"):
        guess_the_place.GuessThePlace().reset(example("guess_the_place", truth='{"country": "France"}'))
    with pytest.raises(UserError, match="--env-settings tolerance_km=far"):
        guess_the_place.GuessThePlace("far")


def test_observations_reveal_only_distance_and_direction():
    """Two truths at the same distance and direction from a guess give equal observations, whatever their names."""
    truths = [{"country": "Spain", "city": "Madrid", "lat": 0, "lon": 3}, {"region": "Bavaria", "lat": 0.0, "lon": 3.0}]
    outputs = []
    for truth in truths:
        env = guess_the_place.GuessThePlace()
        messages, images = env.reset(example("guess_the_place", truth=json.dumps(truth)))
        outputs.append((messages, images, [env.step(text) for text in ("lat: 0, lon: 0", "Spain, Madrid", "")]))
    assert outputs[0] == outputs[1]
    assert not re.search("Spain|Madrid|Bavaria", str(outputs))


def test_a_toys_city_cannot_be_seen():
    """Images show one mark whatever the city is, and a region's three cities are equally likely."""
    cities = {}
    for e in toy_examples("guess_the_place", 600):
        place = json.loads(e.ground_truth)
        cities.setdefault((place["country"], place["region"]), []).append(place["city"])
        image = Image.open(io.BytesIO(e.images[0])).convert("RGB")
        assert 120 < sum(max(p) < 60 for p in image.get_flattened_data()) < 560  # the pixels of one mark
    assert len(cities) == 12
    share = [max(map(names.count, names)) / len(names) for names in cities.values()]
    assert sum(share) / len(share) < 0.5


def test_str_subclasses_become_plain_str():
    """Another process could not unpickle a class that only the user's file defines."""

    class Say(str):
        pass

    for content in (Say("look"), [{"role": Say("user"), "content": Say("look")}]):
        [message], _, _ = validate_messages(content, [])
        assert message == {"role": "user", "content": "look"} and {type(x) for x in message.values()} == {str}
