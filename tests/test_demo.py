"""The toy world: deterministic, balanced, its splits apart.   pytest tests/test_demo.py"""

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


def test_rows_are_deterministic_balanced_and_of_unique_images():
    rows, again = list(shapes.shapes_rows(200, "train", 3)), list(shapes.shapes_rows(200, "train", 3))
    assert rows == again != list(shapes.shapes_rows(200, "train", 4))
    kinds = ["count", "colour", "shape", "exists", "angle"]
    assert Counter(r["extra_info"]["answer_type"] for r in rows) == dict.fromkeys(kinds, 40)
    assert len({r["images"][0]["bytes"] for r in rows}) == len({r["extra_info"]["uid"] for r in rows}) == 200
    with pytest.raises(ValueError, match="--split 'dev'"):
        next(shapes.shapes_rows(1, "dev", 0))


def test_no_test_image_occurs_in_training():
    train = {r["images"][0]["bytes"] for seed in (0, 1) for r in shapes.shapes_rows(400, "train", seed)}
    warm = {data for [data], _ in itertools.islice(shapes.drawings("warm", 0), 400)}
    test = {r["images"][0]["bytes"] for r in shapes.shapes_rows(400, "test", 0)}
    assert not test & (train | warm)


def test_no_constant_answer_exceeds_half():
    """What a model without eyes could reach at best: it must stay well under the bar for seeing."""
    best = []
    for kind in ("count", "colour", "shape", "exists", "angle"):
        rows = [r for r in shapes.shapes_rows(2000, "test", 1) if r["extra_info"]["answer_type"] == kind]
        answers = Counter(r["reward_model"]["ground_truth"] for r in rows)
        best.append(max(answers.values()) / sum(answers.values()))
    assert sum(best) / len(best) < 0.40 and max(best) < 0.58


def test_images_show_what_the_answers_say():
    """Counted from pixels, not from the generator: the share of painted area grows with the number of shapes, and the
    dominant colour is the answer."""
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
    """In pixels: the box around the paint, and how much there is of it; an angle by its share of a half disc."""
    kinds = Counter()
    for [data], questions in itertools.islice(geometry.scenes("train", 7), 100):
        image = Image.open(io.BytesIO(data))
        paint = [p for p, c in zip(itertools.product(range(84), range(84)), image.get_flattened_data(), strict=True)
                 if c in shapes.COLOURS.values()]  # fmt: skip
        (top, bottom), (left, right) = ((min(axis), max(axis)) for axis in zip(*paint, strict=True))
        answers = {kind: truth for kind, _, _, truth in questions}
        kinds.update(list(answers))
        if "angle" in answers:  # the painted share of a half disc
            half_disc = math.pi * max(bottom - top, 1) ** 2 / 2
            if 30 < int(answers["angle"]) <= 90:  # then the sector is as high as its radius
                assert len(paint) / half_disc == pytest.approx(1 - int(answers["angle"]) / 180, abs=0.09)
            continue
        across, up = (round((high - low + 2) / geometry.STEP) for low, high in ((left, right), (top, bottom)))
        assert len(paint) == pytest.approx(across * up * geometry.STEP**2 / 2, rel=0.25)
        assert float(answers["area"]) == across * up / 2
        assert eval(answers["hypotenuse"].replace("\\sqrt", "math.sqrt").translate(BRACES)) ** 2 == pytest.approx(
            across**2 + up**2
        )
        slope = re.sub(r"\\frac\{(\d)\}\{(\d)\}", r"\1/\2", answers["tangent"])
        assert Fraction(slope) == Fraction(up, across)
    assert min(kinds.values()) > 15 and len(kinds) == 4


BRACES = str.maketrans("{}", "()")


def test_the_demo_removes_nothing_but_an_earlier_demo(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not empty and not the folder of an earlier demo"):
        demo.run_demo(tmp_path, 0, "qwen2_5_vl", short=True)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_a_task_without_a_demo_is_refused_with_those_that_have_one(tmp_path):
    told = "--task chess: no task of that name has a demo; choose from .*shapes, vqa"
    with pytest.raises(UserError, match=told):
        demo.main(demo.parse_args(["run", "--out", str(tmp_path), "--task", "chess"]))
    assert not list(tmp_path.iterdir())


def test_true_answers_earn_the_reward_and_usual_ones_mostly_do_not():
    from types import SimpleNamespace

    examples = []
    for row in shapes.shapes_rows(200, "train", 5):
        truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
        examples.append(SimpleNamespace(uid=extra["uid"], data_source="shapes", ground_truth=truth, extra=extra))
    assert all(grade(rf"\boxed{{{e.ground_truth}}}", e)["reward"] == 1.0 for e in examples)
    lazy = [grade(demo.most_frequent_replies("shapes")[e.extra["answer_type"]], e)["accuracy"] for e in examples]
    assert 0.1 < sum(lazy) / len(lazy) < 0.5


# --- every task whose file draws scenes ---------------------------------------------------------------------------

ENVS = ("calculator", "guess_the_place", "look_closer")  # here only their last responses
TASKS = ("caption", "digits", "geo3k", "geospot", "nlvr2", "shapes", "vqa", *ENVS)


def test_each_task_of_ours_has_scenes_and_a_plan():
    assert set(TASKS) <= set(demo.find_demo_tasks())
    assert demo.load_demo_config("shapes") == demo.DemoConfig(eval_every=5)  # whose figures are in README
    for task in TASKS:
        assert 20 <= demo.load_demo_config(task).steps <= 60


@pytest.mark.slow
def test_the_demo_of_another_task(tmp_path):
    """Each stage runs, and the summary says of what; 10 steps are not meant to learn anything."""
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
    """toy_examples(task, split) -> 60 rows as prepare_data.py writes and reads them."""

    @cache
    def made(task, split):
        file = tmp_path_factory.mktemp("toys") / f"{task}.parquet"
        main(parse_args([task, "--toy", "--n", "60", "--split", split, "--seed", "3", "--out", str(file)]))
        return read_examples(str(file), DataFormatConfig())[0]

    return made


def as_json(truth):
    return json.loads(truth) if truth.startswith("{") else truth


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_questions_of_the_scenes(task, toy_examples):
    """The warm start shows what RL will ask: the same prompts, byte for byte, about other images than the test's."""
    asked, replies = {}, {}
    for images, questions in itertools.islice(demo.find_demo_tasks()[task].scenes("test", 3), 1200):
        for kind, prompt, reply, truth in questions:
            asked[kind, prompt, tuple(images)] = truth
            replies[kind, prompt, truth] = reply
            assert prompt.count("<image>") == len(images)
    found = toy_examples(task, "test")
    kinds = [e.extra["answer_type"] for e in found]
    period = len(set(kinds))
    assert kinds == kinds[:period] * (60 // period) and len({tuple(e.images) for e in found}) == 60
    best, lazy = [], []
    for e, kind in zip(found, kinds, strict=True):
        [message] = e.messages
        truth = asked[kind, message["content"], tuple(e.images)]
        assert as_json(truth) == as_json(e.ground_truth)
        best.append(grade(replies[kind, message["content"], truth], e))
        lazy.append(grade(demo.most_frequent_replies(task)[kind], e)["reward"])
    if "accuracy" in best[0]:
        assert all(rewards["accuracy"] == rewards["format"] == 1.0 for rewards in best)
    assert min(rewards["reward"] for rewards in best) > max(0.5, sum(lazy) / len(lazy) + 0.25)
    others = {image for e in toy_examples(task, "train") for image in e.images}
    for images, _ in itertools.islice(demo.find_demo_tasks()[task].scenes("warm", 3), 300):
        others |= set(images)
    assert not others & {image for e in found for image in e.images}


@pytest.mark.parametrize("task", TASKS)
def test_no_reply_of_a_toy_is_usually_right(task, toy_examples):
    """What a model without eyes could reach at best: the best reply of each answer type, over all of that type."""
    by_kind = {}
    for e in toy_examples(task, "train"):
        by_kind.setdefault(e.extra["answer_type"], []).append(e)
    of_kind = {}
    for e in demo.first_examples(task):
        of_kind.setdefault(e.extra["answer_type"], Counter())[e.extra["reply"]] += 1
    best = []
    for kind, examples in by_kind.items():
        candidates = [reply for reply, _ in of_kind[kind].most_common(12)]
        best.append(max(sum(grade(reply, e)["reward"] for e in examples) / len(examples) for reply in candidates))
    assert sum(best) / len(best) < 0.62


@pytest.mark.parametrize("task", ENVS)
def test_written_episodes_are_right_or_lazy(task, tmp_path):
    """With the same environments, tokens and masks as a policy's; what was said is read from the tokens again."""
    demo.make_model(tmp_path / "base", task=task, hidden=64, layers=1)
    processor = Processor(str(tmp_path / "base"))
    longest = demo.max_reply_tokens(tmp_path / "base", task)
    scenes = list(itertools.islice(demo.find_demo_tasks()[task].scenes("warm", 1), 12))
    reset_fn = make_env_factory(demo.demo_env_config(task)).reset_example
    prompts = make_prompts(list(demo.scenes_to_examples(task, scenes)), processor, reset_fn=reset_fn)
    usual_replies = demo.most_frequent_replies(task)
    lazy_ones = 0
    for lazy in (False, True):
        for prompt in prompts:
            usual = usual_replies[prompt.example.extra["answer_type"]]
            r = demo.write_rollout(task, prompt, processor, usual if lazy else "")
            own = [token for token, mine in zip(r.response, r.response_mask, strict=True) if mine]
            responses = processor.tokenizer.decode(own).split("<|im_end|>")[:-1]
            assert len(responses) == r.n_turns <= demo.demo_env_config(task).max_turns and len(r.response) < longest
            assert r.logprobs == [0.0] * len(own) and r.response.count(processor.image_token_id) == 4 * len(r.images)
            reward = grade(responses[-1], r.prompt.example)["reward"]
            lazy_ones += responses[-1] == usual and reward < 1
            assert responses == [usual] * r.n_turns if lazy else reward == pytest.approx(1.0)
    assert lazy_ones > len(prompts) / 2
    flags = ("--env", task, "--max-turns", 2)
    assert demo.env_flag_args(task)[:4] == flags and demo.env_flag_args("shapes") == ()


def test_the_demo_writes_below_the_folder_that_it_is_started_in(tmp_path, monkeypatch):
    """Its commands run in the repository."""
    commands = []

    def begin(words, **more):
        commands.append(words)
        raise InterruptedError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.subprocess, "run", begin)
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
