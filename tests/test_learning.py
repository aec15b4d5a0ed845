"""benchmarks/learning.py: equal prompts on both sides, and correct statistics.   pytest tests/test_learning.py"""

import hashlib
import json
import math
import shutil
import sys

import pytest
from test_train import ROOT, run, write_parquet

from model import Processor
from prepare_data import DataFormatConfig, read_examples
from rewards.order import shuffled_batch
from rollout import make_prompts
from tasks.shapes import shapes_rows

sys.path.append(str(ROOT / "benchmarks"))
import learning  # noqa: E402


@pytest.mark.slow
def test_both_sides_get_the_same_prompts_and_the_same_start(toys, tmp_path):
    folder = tmp_path / "shapes" / "seed3"
    for name in ("base", "start"):
        shutil.copytree(toys["qwen2_5_vl"], folder / name)
    for split, n in (("train", 12), ("test", 5)):
        write_parquet(folder / f"{split}.parquet", shapes_rows(n, split, 3))
    run([sys.executable, "benchmarks/learning.py", "trl", "--short", "--seeds", 3, "--out", tmp_path])

    ours, theirs = (json.loads((folder / side / "curve.json").read_text()) for side in ("ours", "trl"))
    assert ours[0]["accuracy"] == theirs[0]["accuracy"]
    examples, _ = read_examples(str(folder / "train.parquet"), DataFormatConfig())
    processor = Processor(str(folder / "start"))
    for step in (1, 2):
        prompts = make_prompts([examples[i] for i in shuffled_batch(step - 1, 12, 3, seed=3)], processor)
        prompts_hash = hashlib.sha1(json.dumps([[p.uid, p.token_ids] for p in prompts]).encode()).hexdigest()
        for rows in (ours, theirs):
            assert rows[step]["prompts"] == prompts_hash
            assert rows[step]["samples"] == 6 * step and rows[step]["lr"] == pytest.approx(2e-4)
            assert 0 <= rows[step]["accuracy"] <= 1
            assert rows[step]["wall"] > rows[step - 1]["wall"] and rows[step]["cpu"] > rows[step - 1]["cpu"]
    assert (tmp_path / "learning_vs_trl.png").read_bytes()[:4] == b"\x89PNG"
    assert "| CPU seconds a step |" in (tmp_path / "learning_vs_trl.md").read_text()

    theirs[1]["prompts"] = "others"
    (folder / "trl" / "curve.json").write_text(json.dumps(theirs))
    with pytest.raises(AssertionError, match="differ in the prompts"):
        learning.read_sides(folder)


def test_paired_interval_and_p_value():
    values, others = [0.71, 0.55, 0.60, 0.64, 0.58], [0.66, 0.56, 0.52, 0.60, 0.55]
    differences = [0.05, -0.01, 0.08, 0.04, 0.03]
    mean = sum(differences) / 5
    error = math.sqrt(sum((x - mean) ** 2 for x in differences) / 4 / 5)
    result = learning.paired(values, others)
    assert result.mean == pytest.approx(mean)
    # 2.776445: the 97.5% quantile of Student's t with 4 degrees of freedom, as tables have it
    assert result[1:3] == pytest.approx((mean - 2.776445 * error, mean + 2.776445 * error), rel=1e-5)
    t = mean / error  # with 4 degrees the distribution has a closed form
    x = t / math.sqrt(4 + t * t)
    assert result.p == pytest.approx(1 - x * (3 - x * x) / 2, rel=1e-6)
    assert learning.ratio([1, 2, 6], [2, 4, 8]).startswith("0.57 (")  # (1/2 * 1/2 * 3/4) ** (1/3)


def test_holm():
    assert learning.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert learning.holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_first_reach_interpolates_between_evaluations():
    rows = [{"accuracy": a, "cpu": c} for a, c in ((0.3, 0), (0.5, 10), (0.4, 20), (0.8, 40), (0.9, 50))]
    assert learning.first_reach(rows, 0.6, "cpu") == pytest.approx(30)
    assert learning.first_reach(rows, 0.5, "cpu") == pytest.approx(10)
    assert math.isnan(learning.first_reach(rows, 0.95, "cpu"))
