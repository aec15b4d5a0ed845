"""Toy tasks, models and the demo: deterministic, balanced, with disjoint splits.   pytest tests/test_demo.py"""

import io
import itertools
import json
import math
import re
from collections import Counter
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

import demo
from errors import UserError
from model import Processor
from prepare_data import DataFormatConfig, main, parse_args, read_examples
from rewards.grade import grade
from rollout import make_env_factory, make_prompts
from tasks import geometry, shapes


def test_rows_are_deterministic_balanced_and_have_unique_images():
    rows, again = list(shapes.shapes_rows(200, "train", 3)), list(shapes.shapes_rows(200, "train", 3))
    assert rows == again != list(shapes.shapes_rows(200, "train", 4))
    kinds = ["count", "colour", "shape", "exists", "angle"]
    assert Counter(r["extra_info"]["answer_type"] for r in rows) == dict.fromkeys(kinds, 40)
    assert len({r["images"][0]["bytes"] for r in rows}) == len({r["extra_info"]["uid"] for r in rows}) == 200
    with pytest.raises(ValueError, match="--split 'dev'"):
        next(shapes.shapes_rows(1, "dev", 0))


def one_colour(i):
    return [shapes.encode_png(Image.new("RGB", (8, 8), (i % 256, i // 256, 0)))]


def ask(*kinds):
    return [(kind, "prompt", "reply", "truth") for kind in kinds]


DRAWINGS = {  # name: scenes(split, seed), answer types, how many rows of train and test there are
    "ends": (lambda *_: iter([(one_colour(i), ask("a")) for i in range(5)]), "a", 5, 5),
    "repeats": (lambda *_: itertools.cycle([(one_colour(i), ask("a", "b")) for i in range(6)]), "ab", 6, 6),
    "a type runs out": (lambda *_: itertools.cycle([(one_colour(i), ask("ab"[i > 0])) for i in range(9)]), "ab", 2, 2),
    "types are sorted": (lambda *_: iter([(one_colour(i), ask("ab"[i > 299])) for i in range(400)]), "ab", 201, 201),
    "is drawn at random": (
        shapes.in_one_split("few/")(lambda rng: (one_colour(rng.randrange(40)), ask("a"))), "a", 29, 11),
    "a type is never asked": (lambda *_: ((one_colour(i), ask("a")) for i in itertools.count()), "ab", 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_toy_that_runs_out_of_images_says_how_many_rows_it_has(name):
    """It hung."""
    scenes, kinds, *available = DRAWINGS[name]
    toy = shapes.toy_of("mine", scenes, kinds)
    for split, n in zip(("train", "test"), available, strict=True):
        assert len(list(toy(n, split, 0))) == n
        with pytest.raises(UserError, match=f"--n {n + 50}: the task 'mine' .* only {n} rows .*; pass --n {n} "):
            list(toy(n + 50, split, 0))


def test_a_split_without_images_is_an_error():
    scenes = shapes.in_one_split("mine/")(lambda rng: (one_colour(7), ask("a")))
    assert next(scenes("train", 0)) and next(scenes("warm", 0))
    with pytest.raises(UserError, match="--split test: none of 10,000 drawings of 'mine/' belongs to it"):
        next(scenes("test", 0))


def test_no_test_image_occurs_in_training():
    train = {r["images"][0]["bytes"] for seed in (0, 1) for r in shapes.shapes_rows(400, "train", seed)}
    warm = {data for [data], _ in itertools.islice(shapes.drawings("warm", 0), 400)}
    test = {r["images"][0]["bytes"] for r in shapes.shapes_rows(400, "test", 0)}
    assert not test & (train | warm)


def test_no_constant_answer_is_usually_right():
    """The best accuracy without looking at the image is well below what counts as seeing."""
    best = []
    for kind in ("count", "colour", "shape", "exists", "angle"):
        rows = [r for r in shapes.shapes_rows(2000, "test", 1) if r["extra_info"]["answer_type"] == kind]
        answers = Counter(r["reward_model"]["ground_truth"] for r in rows)
        best.append(max(answers.values()) / sum(answers.values()))
    assert sum(best) / len(best) < 0.40 and max(best) < 0.58


def test_images_show_what_the_answers_say():
    """The most frequent colour of the pixels, after the background, is the answer to the question about the colour."""
    checked = 0
    for [data], questions in itertools.islice(shapes.drawings("train", 7), 80):
        answers = {kind: answer for kind, _, answer in questions}
        if "colour" not in answers:
            continue
        pixels = Counter(Image.open(io.BytesIO(data)).convert("RGB").get_flattened_data())
        (background, _), *rest = pixels.most_common()
        colour = max((c for c in rest), key=lambda item: item[1])[0]
        assert colour == shapes.COLOURS[answers["colour"]] and min(background) >= 236
        checked += 1
    assert checked > 40


def test_triangles_are_as_large_as_the_answers_say():
    """Sides are measured as the box around the painted pixels and areas as their number. An angle is the share of
    half a disc that is not painted."""
    kinds = Counter()
    for [data], questions in itertools.islice(geometry.scenes("train", 7), 100):
        image = Image.open(io.BytesIO(data))
        painted = [p for p, c in zip(itertools.product(range(84), range(84)), image.get_flattened_data(), strict=True)
                 if c in shapes.COLOURS.values()]  # fmt: skip
        (top, bottom), (left, right) = ((min(axis), max(axis)) for axis in zip(*painted, strict=True))
        answers = {kind: truth for kind, _, _, truth in questions}
        kinds.update(list(answers))
        if "angle" in answers:
            half_disc = math.pi * max(bottom - top, 1) ** 2 / 2
            if 30 < int(answers["angle"]) <= 90:  # only then is the sector as high as its radius
                assert len(painted) / half_disc == pytest.approx(1 - int(answers["angle"]) / 180, abs=0.09)
            continue
        across, up = (round((high - low + 2) / geometry.STEP) for low, high in ((left, right), (top, bottom)))
        assert len(painted) == pytest.approx(across * up * geometry.STEP**2 / 2, rel=0.25)
        assert float(answers["area"]) == across * up / 2
        assert eval(answers["hypotenuse"].replace("\\sqrt", "math.sqrt").translate(BRACES)) ** 2 == pytest.approx(
            across**2 + up**2
        )
        slope = re.sub(r"\\frac\{(\d)\}\{(\d)\}", r"\1/\2", answers["tangent"])
        assert Fraction(slope) == Fraction(up, across)
    assert min(kinds.values()) > 15 and len(kinds) == 4


BRACES = str.maketrans("{}", "()")


@pytest.mark.parametrize("names", ["thesis.txt", "train.parquet", ".demo train.parquet thesis.txt", ".demo run notes/"])
def test_the_demo_overwrites_only_an_earlier_demo(tmp_path, names):
    for name in names.split():
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("precious")
    with pytest.raises(ValueError, match="has files that are not an earlier demo's: "):
        demo.run_demo(tmp_path, 0, "qwen2_5_vl", short=True)
    assert len(list(tmp_path.iterdir())) == len(names.split())


def test_a_task_without_a_demo_is_refused_with_a_list_of_those_that_have_one(tmp_path):
    message = "--task chess: no task of that name has a demo; choose from .*shapes, shortcut, vqa"
    with pytest.raises(UserError, match=message):
        demo.main(demo.parse_args(["run", "--out", str(tmp_path), "--task", "chess"]))
    assert not list(tmp_path.iterdir())


def test_true_answers_earn_the_reward_and_the_most_frequent_ones_mostly_do_not():
    from types import SimpleNamespace

    examples = []
    for row in shapes.shapes_rows(200, "train", 5):
        truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
        examples.append(SimpleNamespace(uid=extra["uid"], data_source="shapes", ground_truth=truth, extra=extra))
    assert all(grade(rf"\boxed{{{e.ground_truth}}}", e)["reward"] == 1.0 for e in examples)
    lazy = [grade(demo.most_frequent_replies("shapes")[e.extra["answer_type"]], e)["accuracy"] for e in examples]
    assert 0.1 < sum(lazy) / len(lazy) < 0.5


# --- all tasks whose file draws scenes ----------------------------------------------------------------------------

ENVS = ("look_closer",)  # for these, only last responses are graded here
TASKS = ("caption", "digits", "geo3k", "geospot", "nlvr2", "shapes", "shortcut", "vqa", *ENVS)


def test_each_of_our_tasks_has_scenes_and_a_demo_config():
    assert set(TASKS) <= set(demo.find_demo_tasks())
    for task in TASKS:
        assert 20 <= demo.load_demo_config(task).steps <= 60


@pytest.mark.slow
def test_the_demo_of_another_task_runs_to_its_summary(tmp_path):
    """All parts of the demo run, and the summary names the task. Nothing needs to be learned in 10 steps."""
    demo.main(demo.parse_args(["run", "--task", "caption", "--short", "--processes", "1", "--out", str(tmp_path)]))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["task"], summary["metric"], summary["n_test"], summary["steps"]) == ("caption", "reward", 100, 10)
    before, after, blank = (summary[key] for key in ("accuracy_before", "accuracy_after", "blank_image_accuracy"))
    assert -0.5 <= min(before, after, blank) and max(before, after, blank) < 1 and summary["train_seconds"] > 0
    prompts = {e.messages[0]["content"] for e in read_examples(str(tmp_path / "test.parquet"), DataFormatConfig())[0]}
    assert prompts == {"<image>Describe the image."}
    assert (tmp_path / "curve.png").is_file() and (tmp_path / "eval" / "report.html").is_file()
    [*_, last] = sorted((tmp_path / "run" / "rollouts").glob("step_*.jsonl"))
    row = json.loads(last.read_text().splitlines()[0])
    assert set(row["samples"][0]["rewards"]) >= {"cider", "keywords", "reward"}


@pytest.fixture(scope="module")
def toy_examples(tmp_path_factory):
    """toy_examples(task, split) -> 60 examples, written and read by prepare_data.py."""

    @cache
    def make(task, split):
        file = tmp_path_factory.mktemp("toys") / f"{task}.parquet"
        main(parse_args([task, "--toy", "--n", "60", "--split", split, "--seed", "3", "--out", str(file)]))
        return read_examples(str(file), DataFormatConfig())[0]

    return make


def as_json(truth):
    return json.loads(truth) if truth.startswith("{") else truth


def contents(media):
    """Return the bytes of images, and of the frames of videos."""
    return tuple(item if isinstance(item, bytes) else tuple(item.frames) for item in media)


def media(example):
    return contents([*example.images, *example.videos])


@pytest.mark.parametrize("task", TASKS)
def test_rows_ask_the_questions_of_the_scenes(task, toy_examples):
    """The warm start has the same prompts as RL, byte for byte, but no images of the test split."""
    truths, replies = {}, {}
    for images, questions in itertools.islice(demo.find_demo_tasks()[task].scenes("test", 3), 1200):
        for kind, prompt, reply, truth in questions:
            truths[kind, prompt, contents(images)] = truth
            replies[kind, prompt, truth] = reply
            assert prompt.count("<image>") + prompt.count("<video>") == len(images)
    examples = toy_examples(task, "test")
    kinds = [e.extra["answer_type"] for e in examples]
    period = len(set(kinds))
    assert kinds == kinds[:period] * (60 // period) and len(set(map(media, examples))) == 60
    correct, lazy = [], []
    for e, kind in zip(examples, kinds, strict=True):
        [message] = e.messages
        truth = truths[kind, message["content"], media(e)]
        assert as_json(truth) == as_json(e.ground_truth)
        correct.append(grade(replies[kind, message["content"], truth], e))
        lazy.append(grade(demo.most_frequent_replies(task)[kind], e)["reward"])
    if "accuracy" in correct[0]:
        assert all(rewards["accuracy"] == rewards["format"] == 1.0 for rewards in correct)
    assert min(rewards["reward"] for rewards in correct) > max(0.5, sum(lazy) / len(lazy) + 0.25)
    other_images = {image for e in toy_examples(task, "train") for image in media(e)}
    for images, _ in itertools.islice(demo.find_demo_tasks()[task].scenes("warm", 3), 300):
        other_images |= set(contents(images))
    assert not other_images & {image for e in examples for image in media(e)}


@pytest.mark.parametrize("task", TASKS)
def test_no_constant_reply_of_a_toy_task_is_usually_right(task, toy_examples):
    """The best constant reply of each answer type, which needs no image, has a low mean reward over that type."""
    by_kind = {}
    for e in toy_examples(task, "train"):
        by_kind.setdefault(e.extra["answer_type"], []).append(e)
    replies_by_kind = {}
    for e in demo.first_examples(task):
        replies_by_kind.setdefault(e.extra["answer_type"], Counter())[e.extra["reply"]] += 1
    best = []
    for kind, examples in by_kind.items():
        candidates = [reply for reply, _ in replies_by_kind[kind].most_common(12)]
        best.append(max(sum(grade(reply, e)["reward"] for e in examples) / len(examples) for reply in candidates))
    assert sum(best) / len(best) < 0.62


@pytest.mark.parametrize("task", ENVS)
def test_written_episodes_have_the_right_reply_or_the_usual_one(task, tmp_path):
    """Written episodes have the environments, tokens and masks of a policy's. Responses are decoded from the tokens."""
    demo.make_model(tmp_path / "base", task=task, hidden=64, layers=1)
    processor = Processor(str(tmp_path / "base"))
    longest = demo.max_reply_tokens(tmp_path / "base", task)
    scenes = list(itertools.islice(demo.find_demo_tasks()[task].scenes("warm", 1), 12))
    reset_fn = make_env_factory(demo.demo_env_config(task)).reset_example
    prompts = make_prompts(list(demo.scenes_to_examples(task, scenes)), processor, reset_fn=reset_fn)
    usual_replies = demo.most_frequent_replies(task)
    n_lazy = 0
    for lazy in (False, True):
        for prompt in prompts:
            usual = usual_replies[prompt.example.extra["answer_type"]]
            r = demo.write_rollout(task, prompt, processor, usual if lazy else "")
            tokens = [token for token, is_sampled in zip(r.response, r.response_mask, strict=True) if is_sampled]
            responses = processor.tokenizer.decode(tokens).split("<|im_end|>")[:-1]
            assert len(responses) == r.n_turns <= demo.demo_env_config(task).max_turns and len(r.response) < longest
            assert r.logprobs == [0.0] * len(tokens) and r.response.count(processor.image_token_id) == 4 * len(r.images)
            reward = grade(responses[-1], r.prompt.example)["reward"]
            n_lazy += responses[-1] == usual and reward < 1
            assert responses == [usual] * r.n_turns if lazy else reward == pytest.approx(1.0)
    assert n_lazy > len(prompts) / 2
    flags = ("--env", task, "--max-turns", 2)
    assert demo.env_flag_args(task)[:4] == flags and demo.env_flag_args("shapes") == ()


def test_the_demo_writes_below_the_folder_where_it_was_started(tmp_path, monkeypatch):
    """Paths are absolute, because the demo's commands run in the repository."""
    commands = []

    def record(command, **options):
        commands.append(command)
        raise InterruptedError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.subprocess, "Popen", record)
    with pytest.raises(InterruptedError):
        demo.run_demo(Path("d_vqa"), 0, "qwen2_5_vl", short=True)
    assert commands[0][-2:] == ["--out", str(tmp_path / "d_vqa" / "train.parquet")]


def test_tokenizer_round_trips_any_text_and_keeps_special_tokens_whole(loaded):
    tokenizer = loaded["qwen2_5_vl"][1].tokenizer
    texts = ["How many shapes are there?", "\\sqrt { 41 } 5√3 ≤ 日本 \n\t x", "<|im_start|>user\nhi<|im_end|>"]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    for token in demo.SPECIAL_TOKENS:
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    assert len(tokenizer.encode(" What colour are they?", add_special_tokens=False)) == 5


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_models_are_deterministic_and_small(family, tmp_path):
    for name in ("a", "b"):
        demo.make_model(tmp_path / name, family, seed=4)
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in ("a", "b"))
    assert all((a[k] == b[k]).all() for k in a) and 1.0e6 < sum(t.numel() for t in a.values()) < 4.0e6
    for file in ("tokenizer.json", "preprocessor_config.json", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert json.loads((tmp_path / "a" / "config.json").read_text())["model_type"] == family
