"""Each edit of docs/changing.md takes effect in a copy of the repository.   pytest tests/test_change.py"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warm import run_command

from tasks.shapes import shapes_rows
from train import parse_args

ROOT = Path(__file__).parent.parent
ENGINES = "engines/launch.py"  # where make_engine is
KERNELS = ["torch", pytest.param("triton", marks=pytest.mark.slow)]


@pytest.fixture
def copy(tmp_path):
    """Return a copy of the repository to edit."""
    folder = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks", "docs", "demo", "out", "runs")
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("change")
    reward = folder / "reward.py"
    reward.write_text("def score(response, example):\n    return (len(response) * 7919 % 5) / 4\n")
    pq.write_table(pa.Table.from_pylist(list(shapes_rows(8, "train", 0))), folder / "train.parquet")
    return folder


def page_block(text):
    """Return the code block of docs/changing.md that contains this text."""
    blocks = [part.split("```")[0] for part in (ROOT / "docs/changing.md").read_text().split("```python\n")[1:]]
    [match] = [part for part in blocks if text in part]
    return match


def replace_once(file, old, new):
    source = file.read_text()
    assert source.count(old) == 1, old
    file.write_text(source.replace(old, new))


def insert(file, before, text):
    """Insert `text` into a file before a text that occurs once."""
    source = file.read_text()
    assert source.count(before) == 1, before
    file.write_text(source.replace(before, text + before))


def train(copy, model, data, *options, kernel="torch", fails=False):
    """Train one step. Return its metrics, or the error output if the run should fail."""
    out = copy / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "train.py", "--model", model, "--data", data / "train.parquet", "--out", out]
    command += ["--steps", 1, "--prompts-per-step", 4, "--group-size", 3, "--max-new-tokens", 4]
    command += ["--micro-tokens", 120, "--lr", "1e-3"]
    command += ["--reward", f"{data / 'reward.py'}:score", "--no-self-test", "--kernel", kernel, *options]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = run_command(command, copy, env)
    if fails:
        assert done.returncode != 0
        return done.stderr
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_new_advantage_and_a_new_loss_each_take_one_registration(kernel, copy, toys, data):
    insert(
        copy / "grpo.py",
        "def gae(\n",
        """@register_advantage("tripled", norm_std="none")
def tripled(rewards_PG):
    return 3 * (rewards_PG - rewards_PG.mean(dim=1, keepdim=True))


""",
    )
    insert(
        copy / "grpo.py",
        "def response_means(",
        """@register_loss("doubled")
def doubled(logp_K, log_ratio_K, advantages_K, rollout_K, algo):
    loss_K, clipped_K = ppo_clip(logp_K, log_ratio_K, advantages_K, rollout_K, algo)
    return 2 * loss_K, clipped_K


""",
    )
    toy = toys["qwen2_5_vl"]
    plain = train(copy, toy, data, "--adv", "dr_grpo", kernel=kernel)["policy/grad_norm"]
    options = ["--adv", "tripled", "--loss", "doubled"]
    assert train(copy, toy, data, *options, kernel=kernel)["policy/grad_norm"] == pytest.approx(6 * plain, rel=1e-4)
    assert plain > 1e-3


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_edited_loss_takes_effect(kernel, copy, toys, data):
    toy = toys["qwen2_5_vl"]
    before = train(copy, toy, data, kernel=kernel)["policy/grad_norm"]
    file = copy / "grpo.py"
    source = file.read_text()
    line = "    unclipped_loss_K = -advantages_K * ratio_K\n"
    assert source.count(line) == 1
    edited = source.replace(line, line.replace("-advantages_K", "-10 * advantages_K"))
    clipped = "clipped_loss_K = -advantages_K * ratio_K.clamp"
    file.write_text(edited.replace(clipped, clipped.replace("-advantages_K", "-10 * advantages_K")))
    assert train(copy, toy, data, kernel=kernel)["policy/grad_norm"] == pytest.approx(10 * before, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_pages_advantage_and_loss(kernel, copy, toys, data):
    with open(copy / "grpo.py", "a") as file:
        file.write("\n\n" + page_block('@register_advantage("median"'))
    toy = toys["qwen2_5_vl"]
    plain, median, both = (
        train(copy, toy, data, *options, kernel=kernel)["policy/grad_norm"]
        for options in (["--adv", "dr_grpo"], ["--adv", "median"], ["--adv", "median", "--loss", "quadratic"])
    )
    # on policy the quadratic loss has the gradient of the clipped one
    assert abs(median - plain) > 1e-3 * plain and both == pytest.approx(median, rel=1e-4)


@pytest.mark.slow
def test_the_pages_method(copy, toys, data):
    (copy / "algorithms/calm.py").write_text(page_block("class Settings:"))
    toy = toys["qwen2_5_vl"]
    plain, calm, strong = (train(copy, toy, data, *options)["policy/grad_norm"] for options in (
        ["--update-epochs", 2], ["--algo", "calm"], ["--update-epochs", 2, "--algo-args", "calm_coef=1000"]))
    assert abs(calm - plain) > 1e-6 * plain and strong > 2 * plain


@pytest.mark.slow
def test_the_pages_reward(copy, toys, data):
    (copy / "my.py").write_text(page_block("def score(response, example):"))
    row = train_on(copy, toys["qwen2_5_vl"], data / "train.parquet", "--reward", "my.py:score")
    assert row["reward/short"] == 1 and row["reward/mean"] == pytest.approx(0.1 + 0.9 * row["reward/accuracy"])


def test_the_pages_task_is_a_file_with_its_data_and_its_reward(copy, toys):
    (copy / "tasks" / "dark.py").write_text(page_block("def toy(n, split, seed)"))
    command = [sys.executable, "prepare_data.py", "dark", "--toy", "--n", "8", "--out", "dark.parquet"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0 and "wrote 8 rows" in done.stdout, done.stderr
    row = train_on(copy, toys["qwen2_5_vl"], copy / "dark.parquet")
    assert row["reward/mean"] == 0 and row["reward/zero_std_frac"] == 1  # a toy with random weights never answers yes


BARS = ("prepare_data.py", "bars", "--toy", "--n", "40", "--out", "bars.parquet")


@pytest.mark.parametrize("edit, command, output", [
    ((), BARS, "wrote 40 rows"),
    (("range(10, 76)", "(20, 30, 50, 60)", "rng.randint(6, 16)", "9", "rng.randint(0, 160)", "9"), BARS,
     "--n 40: the task 'bars' has enough images for only "),
    pytest.param((), ("demo.py", "run", "--task", "bars", "--short", "--processes", "1", "--out", "out"),
                 "bars: accuracy on 100 unseen images", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_pages_task_with_a_demo(edit, command, output, copy):
    text = page_block("def scenes(rng)")
    for old, new in zip(edit[::2], edit[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    (copy / "tasks" / "bars.py").write_text(text)
    done = subprocess.run([sys.executable, *command], cwd=copy, capture_output=True, text=True)
    assert output in done.stdout + done.stderr and (done.returncode == 0) == (not edit), done.stderr


@pytest.mark.slow
def test_the_pages_frozen_embeddings(copy, toys, data):
    source = (copy / "model.py").read_text()
    end = source.index("\n\n\n", source.index("def set_trainable("))
    (copy / "model.py").write_text(
        source[:end] + "\n" + page_block("hf.get_input_embeddings()").rstrip("\n") + source[end:]
    )
    before, after = (trained_parameters(folder, toys["qwen2_5_vl"], data) for folder in (ROOT, copy))
    assert before - after == 448 * 64  # the toy's vocabulary and width


def trained_parameters(folder, toy, data):
    program = """if True:
        import sys
        from model import Policy, load_hf, Processor
        policy = Policy(load_hf(sys.argv[1]), Processor(sys.argv[1]))
        print(sum(p.numel() for p in policy.parameters() if p.requires_grad))"""
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", program, toy], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_the_pages_engine(copy, toys, data):
    (copy / "engines" / "mine.py").write_text("from engines.hf import HFEngine as MyEngine  # noqa: F401\n")
    replace_once(copy / "rollout.py", 'ENGINES = ("auto",', 'ENGINES = ("mine", "auto",')
    source = (copy / ENGINES).read_text()
    start = source.index('    if choice == "hf":', source.index("def make_engine("))
    (copy / ENGINES).write_text(source[:start] + page_block('if choice == "mine":') + source[start:])
    train(copy, toys["qwen2_5_vl"], data, "--rollout", "mine")


def train_on(copy, model, file, *options):
    out = copy / "out"
    command = [
        sys.executable,
        "train.py",
        "--model",
        model,
        "--data",
        file,
        "--out",
        out,
        "--steps",
        1,
        "--no-self-test",
    ]
    command += ["--prompts-per-step", 4, "--group-size", 3, "--max-new-tokens", 4, "--micro-tokens", 120, *options]
    done = run_command(command, copy)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_family_is_a_row_of_the_table(copy, toys, data):
    file = copy / "model.py"
    source = file.read_text()
    row = '    "qwen2_5_vl": Family(),\n'
    assert source.count(row) == 1
    file.write_text(source.replace(row, ""))
    stderr = train(copy, toys["qwen2_5_vl"], data, fails=True)
    assert "is of type 'qwen2_5_vl'; supported: qwen2_vl, qwen3_vl" in stderr and "Traceback" not in stderr
    file.write_text(source)
    assert train(copy, toys["qwen2_5_vl"], data)["policy/grad_norm"] > 1e-3


@pytest.mark.parametrize(
    "flag,known",
    [
        ("--adv", "rloo"),
        ("--loss", "gspo"),
        ("--algo", "dapo"),
        ("--kl", "k3"),
        ("--attn", "sdpa"),
        ("--rollout", "vllm"),
    ],
)
def test_the_error_for_an_unknown_name_lists_the_known_ones(flag, known, capsys):
    with pytest.raises(SystemExit):
        parse_args(["--model", "m", "--data", "d", "--out", "o", "--steps", "1", flag, "nonsense"])
    stderr = capsys.readouterr().err
    assert "nonsense" in stderr and known in stderr and len(stderr.splitlines()) == 1
