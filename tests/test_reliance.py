"""eval.py reports whether a model relies on its images: without them a toy that needs them falls to chance, and a toy
that does not need them stays accurate.

pytest -s tests/test_reliance.py prints both tables.
"""

import itertools
import json
import random
import sys
from types import SimpleNamespace

import pytest
from test_train import run, write_parquet

import demo
from tasks.shapes import encode_png, shapes_rows

COLOURS = {"lemon": "yellow", "grass": "green", "sky": "blue", "blood": "red", "coal": "black", "snow": "white"}


def scenes(split, seed):
    """Yield an image of noise, and questions that can be answered without it."""
    from PIL import Image

    rng = random.Random(f"{split}/{seed}")
    while True:
        image = encode_png(Image.effect_noise((56, 56), 100).convert("RGB"))
        things = rng.sample(sorted(COLOURS), 3)
        ask = "<image>Answer in \\boxed{}. Which colour has {}?".replace("{}?", "%s?")
        yield [image], [("colour", ask % t, f"\\boxed{{{COLOURS[t]}}}", COLOURS[t]) for t in things]


def colours(split, seed):
    """Yield the scenes of the shapes task that have questions for a colour, with only these questions."""
    for images, questions in demo.find_tasks()["shapes"].scenes(split, seed):
        if chosen := [question for question in questions if question[0] == "colour"]:
            yield images, chosen


def noise_rows(n):
    for i, ([image], questions) in enumerate(itertools.islice(scenes("test", 0), n)):
        _, prompt, _, truth = questions[i % 3]
        yield {"data_source": "shapes", "prompt": [{"role": "user", "content": prompt}],
               "images": [{"bytes": image, "path": None}], "reward_model": {"style": "rule", "ground_truth": truth},
               "extra_info": {"split": "test", "index": i, "uid": f"noise-{i}", "answer_type": "colour"}}


def train_toy(folder, task, steps):
    """Train a model with supervision, from random weights, and return its folder."""
    base = folder / "base"
    demo.make_model(base, task=task)
    demo.warm_start(base, folder / "start", 0, steps, 0, task)
    return folder / "start"


def evaluate(model, rows, out, kinds):
    data = write_parquet(out.with_suffix(".parquet"), rows)
    done = run([sys.executable, "eval.py", model, "--data", data, "--max-new-tokens", 14, "--out", out,
                "--ablate", *kinds])
    print(done.stdout)
    return json.loads((out / "eval.json").read_text()), done.stdout


@pytest.mark.slow
def test_eval_reports_whether_a_model_relies_on_images(tmp_path, monkeypatch):
    tasks = demo.find_demo_tasks() | {
        "noise": SimpleNamespace(scenes=scenes),
        "colour": SimpleNamespace(scenes=colours),
    }
    monkeypatch.setattr(demo, "find_demo_tasks", lambda: tasks)
    monkeypatch.setattr(demo, "setup_distributed", lambda: SimpleNamespace(rank=0, world=1, is_main=True))
    monkeypatch.setattr(demo.dist, "all_reduce", lambda tensor: None)

    model, kinds = train_toy(tmp_path / "noise", "noise", 50), ("blank", "none")
    blind, printed = evaluate(model, noise_rows(50), tmp_path / "blind", kinds)
    assert blind["accuracy"] > 0.9 and blind["reliance"]["constant"] < 0.35
    for kind in kinds:
        assert blind["reliance"][kind]["accuracy"] > 0.9
    assert printed.count("no evidence that the model uses the image") == 2 and ": the model" not in printed

    model, kinds = train_toy(tmp_path / "colour", "colour", 100), ("blank", "shuffled")
    rows = [row for row in shapes_rows(400, "test", 0) if row["extra_info"]["answer_type"] == "colour"]
    seeing, printed = evaluate(model, rows, tmp_path / "sees", kinds)
    assert seeing["accuracy"] > 0.6
    for kind in kinds:
        ablation = seeing["reliance"][kind]
        assert ablation["accuracy_ci95"][0] <= seeing["reliance"]["constant"] and ablation["drop_ci95"][0] > 0.1
        assert f"to {ablation['accuracy']:.3f}, down to the level of chance" in printed
