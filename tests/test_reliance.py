"""A toy that learns to look falls to chance without its images, one that need not look does not, and eval.py says so.

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
    """Questions that tell their answers, each with an image of noise."""
    from PIL import Image

    rng = random.Random(f"{split}/{seed}")
    while True:
        image = encode_png(Image.effect_noise((56, 56), 100).convert("RGB"))
        things = rng.sample(sorted(COLOURS), 3)
        ask = "<image>Answer in \\boxed{}. Which colour has {}?".replace("{}?", "%s?")
        yield [image], [("colour", ask % t, f"\\boxed{{{COLOURS[t]}}}", COLOURS[t]) for t in things]


def colours(split, seed):
    """Of the shapes' questions those for a colour."""
    for images, questions in demo.find_tasks()["shapes"].scenes(split, seed):
        if chosen := [asked for asked in questions if asked[0] == "colour"]:
            yield images, chosen


def noise_rows(n):
    for i, ([image], questions) in enumerate(itertools.islice(scenes("test", 0), n)):
        _, prompt, _, truth = questions[i % 3]
        yield {"data_source": "shapes", "prompt": [{"role": "user", "content": prompt}],
               "images": [{"bytes": image, "path": None}], "reward_model": {"style": "rule", "ground_truth": truth},
               "extra_info": {"split": "test", "index": i, "uid": f"noise-{i}", "answer_type": "colour"}}


def trained(folder, task, steps):
    """Supervised, from random weights."""
    base = folder / "base"
    demo.make_model(base, task=task)
    demo.warm_start(base, folder / "start", 0, steps, 0, task)
    return folder / "start"


def evaluated(model, rows, out, kinds):
    data = write_parquet(out.with_suffix(".parquet"), rows)
    done = run([sys.executable, "eval.py", model, "--data", data, "--max-new-tokens", 14, "--out", out,
                "--ablate", *kinds])
    print(done.stdout)
    return json.loads((out / "eval.json").read_text()), done.stdout


@pytest.mark.slow
def test_reliance_is_told(tmp_path, monkeypatch):
    known = demo.find_demo_tasks() | {
        "noise": SimpleNamespace(scenes=scenes),
        "colour": SimpleNamespace(scenes=colours),
    }
    monkeypatch.setattr(demo, "find_demo_tasks", lambda: known)
    monkeypatch.setattr(demo, "setup_distributed", lambda: SimpleNamespace(rank=0, world=1, is_main=True))
    monkeypatch.setattr(demo.dist, "all_reduce", lambda tensor: None)

    model, kinds = trained(tmp_path / "noise", "noise", 50), ("blank", "none")
    blind, told = evaluated(model, noise_rows(50), tmp_path / "blind", kinds)
    assert blind["accuracy"] > 0.9 and blind["reliance"]["constant"] < 0.35
    for kind in kinds:
        assert blind["reliance"][kind]["accuracy"] > 0.9
    assert told.count("no evidence that the model uses the image") == 2 and ": the model" not in told

    model, kinds = trained(tmp_path / "colour", "colour", 100), ("blank", "shuffled")
    rows = [row for row in shapes_rows(400, "test", 0) if row["extra_info"]["answer_type"] == "colour"]
    sees, told = evaluated(model, rows, tmp_path / "sees", kinds)
    assert sees["accuracy"] > 0.6
    for kind in kinds:
        found = sees["reliance"][kind]
        assert found["accuracy_ci95"][0] <= sees["reliance"]["constant"] and found["drop_ci95"][0] > 0.1
        assert f"{found['drop']:.3f}, to a level not significantly above chance: the model uses" in told
