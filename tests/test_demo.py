"""The toy world: deterministic, balanced, its splits apart.   pytest tests/test_demo.py"""

import io
import itertools
import json
from collections import Counter

import pytest
from PIL import Image
from safetensors.torch import load_file

import demo
from errors import UserError
from reward import score
from tasks import shapes


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
    warm = {data for data, _ in itertools.islice(shapes.scenes("warm", 0), 400)}
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
    for data, questions in itertools.islice(shapes.scenes("train", 7), 80):
        answers = {kind: answer for kind, _, answer in questions}
        if "colour" not in answers:
            continue
        pixels = Counter(Image.open(io.BytesIO(data)).convert("RGB").get_flattened_data())
        (background, _), *rest = pixels.most_common()
        colour = max((c for c in rest), key=lambda item: item[1])[0]
        assert colour == shapes.COLOURS[answers["colour"]] and min(background) >= 236
        checked += 1
    assert checked > 40


def test_the_demo_removes_nothing_but_an_earlier_demo(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not empty and no earlier demo"):
        demo.run_demo(tmp_path, 0, "qwen2_5_vl", short=True)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_a_task_without_a_demo_is_refused_with_those_that_have_one(tmp_path):
    with pytest.raises(UserError, match="--task geo3k: the demo knows shapes"):
        demo.main(demo.parse_args(["run", "--out", str(tmp_path), "--task", "geo3k"]))
    assert not list(tmp_path.iterdir())


def test_true_answers_earn_the_reward_and_usual_ones_mostly_do_not():
    from types import SimpleNamespace

    examples = []
    for row in shapes.shapes_rows(200, "train", 5):
        truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
        examples.append(SimpleNamespace(uid=extra["uid"], data_source="shapes", ground_truth=truth, extra=extra))
    assert all(score(rf"\boxed{{{e.ground_truth}}}", e)["reward"] == 1.0 for e in examples)
    lazy = [score(rf"\boxed{{{demo.USUAL[e.extra['answer_type']]}}}", e)["accuracy"] for e in examples]
    assert 0.1 < sum(lazy) / len(lazy) < 0.5


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
