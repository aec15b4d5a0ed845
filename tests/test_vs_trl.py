"""Losses and gradients equal those of TRL's GRPOTrainer on TRL's own batch.   pytest tests/test_vs_trl.py"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def differences(tmp_path_factory) -> dict[str, dict[str, float]]:
    """Differences from TRL by case, measured in a separate process because TRL and accelerate change global state."""
    out = tmp_path_factory.mktemp("vs_trl") / "equality.json"
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "benchmarks/vs_trl.py", "--only", "equality", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())["equality"]


@pytest.mark.parametrize("tower", ["frozen", "trained"])
@pytest.mark.parametrize("loss", ["token", "seq", "const", "bnpo", "higher", "gspo", "cispo", "sapo", "kl"])
def test_losses_and_gradients_equal_trls(loss, tower, differences):
    d = differences[f"{loss}/{tower}"]
    for name in ("logp", "entropy", "per_token_loss", "loss", "gradient_max", "gradient_relative"):
        # TRL's loss of a token is computed from its gradient with respect to the advantage, so it lacks the KL term
        assert d[name] < 1e-5 or (loss, name) == ("kl", "per_token_loss"), f"{name}: {d[name]}"
    # the comparison includes clipped tokens, several prompts and micro-batches, and gradients that are not tiny
    assert 0 < d["clipped"] < d["tokens"] or (loss == "sapo" and d["clipped"] == 0)
    assert d["prompts"] == 4 and d["micro_batches"] > 1
    assert d["gradient_norm"] > 0.1 and d["loss_size"] > 1e-4


def test_training_the_tower_adds_its_gradients(differences):
    assert differences["token/trained"]["parameters"] > differences["token/frozen"]["parameters"]
