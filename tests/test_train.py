"""Training as users run it, in subprocesses: on one and several processes, killed and resumed.

pytest tests/test_train.py
"""

import json
import math
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import written
from safetensors.torch import load_file
from warm import ROOT, TORCHRUN, forked, run_command, running

import demo
import engines.launch
import grpo
import model as M
import parallel.models
import train
from errors import UserError
from model import Policy
from packing import Packer, TrainBatch, flop_costs, make_token_batch
from parallel.checkpoint import load_model_or_checkpoint, read_run_args
from parallel.models import Models, probe_memory
from parallel.resume import absolute_path, format_setting_changes
from report.log import SkippedUpdates
from rewards.order import shuffled_batch
from rollout import ExampleList
from settings import naming_origins
from tasks.shapes import shapes_rows
from utils import Meter


def run(command, check=True, **extra):
    done = run_command(command, **extra)
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    return write_parquet(folder / "train.parquet", shapes_rows(24, "train", 0)), write_parquet(
        folder / "test.parquet", shapes_rows(10, "test", 0)
    )


def flags(model, data, out, *extra_flags):
    # random rewards, because a random toy model never earns one, and without rewards there is nothing to train on
    reward = Path(data).parent / "reward.py"
    reward.write_text(
        "def score(response, example):\n    return {'reward': (len(response) * 7919 % 5) / 4, 'length': "
        "len(response)}\n"
    )
    return [
        "--model",
        model,
        "--data",
        data,
        "--out",
        out,
        *([] if "--reward" in extra_flags else ["--reward", f"{reward}:score"]),
        "--prompts-per-step",
        4,
        "--group-size",
        3,
        "--max-new-tokens",
        6,
        "--max-prompt-tokens",
        80,
        "--micro-tokens",
        120,
        "--lr",
        "1e-3",
        *extra_flags,
    ]


def rows(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def without_time(out):
    return [{k: v for k, v in row.items() if k[:5] not in ("time/", "perf/")} for row in rows(out)]


# --- one process and several agree ----------------------------------------------------------------------------------


def parity(toy, tmp_path, *cases, worlds=(1, 2)):
    """Run parity_worker.py on each number of processes. Return {number of processes: [result of each case]}."""
    flags = [flag for case in cases for flag in ("/", *case.split())][1:]
    results = {}
    for world in worlds:
        out = tmp_path / f"{world}.pt"
        run([*TORCHRUN, world, "tests/parity_worker.py", toy, out, *flags])
        results[world] = torch.load(out)
    return results


def assert_equal_updates(one_process, several_processes, case, tolerance=1e-5):
    assert one_process["metrics"]["update/tokens"] == several_processes["metrics"]["update/tokens"] > 50, case
    assert one_process["metrics"].keys() == several_processes["metrics"].keys(), case
    measured = [
        key for key in one_process["metrics"] if not key.startswith("balance/") and key != "update/useful_tokens"
    ]  # both depend on the layout
    for key in measured:
        bound = {"rel": 1e-6 if key.startswith("loss/") else 1e-5, "abs": 1e-6}
        assert one_process["metrics"][key] == pytest.approx(several_processes["metrics"][key], **bound), (case, key)
    assert (
        one_process["gradients"].keys() == several_processes["gradients"].keys()
        and one_process["metrics"]["policy/grad_norm"] > 1e-3
    )
    largest = max(g.norm() for g in one_process["gradients"].values())
    for name, gradient in one_process["gradients"].items():
        error = (gradient - several_processes["gradients"][name]).norm() / gradient.norm().clamp(min=1e-4 * largest)
        assert error < tolerance, f"{case}, {name}: relative difference {error:.1e}"


def assert_moved(one_process, several_processes, case):
    """Assert that groups moved from one process to another. This lowers the larger of two processes' loads. With four
    processes the largest load may stay the same, because it is a single group."""
    assert not any(one_process["moved"]) and any(several_processes["moved"]), case
    trained, sampled = several_processes["metrics"]["balance/trained"], several_processes["metrics"]["balance/sampled"]
    assert trained <= sampled and (trained < sampled or len(several_processes["moved"]) > 2), case


@pytest.mark.parametrize(
    "family,extra_flags",
    [
        ("qwen2_5_vl", "--train-vision all"),
        pytest.param("qwen3_vl", "--train-vision all --loss-agg seq", marks=pytest.mark.slow),
        pytest.param("qwen2_vl", "--loss-agg const --gradient-checkpointing", marks=pytest.mark.slow),
        pytest.param("qwen3_vl", "--train-vision merger", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "--train-vision tower", marks=pytest.mark.slow),
    ],
)
def test_two_processes_equal_one(family, extra_flags, toys, tmp_path):
    results = parity(toys[family], tmp_path, f"--micro-tokens 130 {extra_flags}")
    one_process, two_processes = results[1][0], results[2][0]
    assert two_processes["micros"] > 1
    assert 0 in {a for a, b in zip(*two_processes["images"], strict=True) if b} | {
        b for a, b in zip(*two_processes["images"], strict=True) if a
    }
    names = {n.removeprefix("policy.hf.model.visual.") for n in one_process["gradients"] if "visual" in n}
    mergers = {n for n in names if "merger" in n}
    assert bool(names - mergers) == ("vision all" in extra_flags or "vision tower" in extra_flags)
    assert bool(mergers) == ("vision all" in extra_flags or "vision merger" in extra_flags)
    assert_moved(one_process, two_processes, extra_flags)
    assert_equal_updates(one_process, two_processes, extra_flags)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_every_family_goes_through_the_whole_loop(family, toys, shapes, tmp_path):
    """Each family is trained and evaluated, then merged, and transformers opens the result."""
    command = flags(toys[family], shapes[0], tmp_path / "run", "--steps", 2, "--lr", 1e-2, "--eval-data", shapes[0])
    run([sys.executable, "train.py", *command])
    row = rows(tmp_path / "run")[-1]
    assert row["step"] == 2 and row["mismatch/max_abs_logprob_diff"] < 1e-4 and row["policy/grad_norm"] > 0
    run([sys.executable, "merge_lora.py", tmp_path / "run", "--out", tmp_path / "merged"])
    merged, before = (M.load_hf(str(path)).state_dict() for path in (tmp_path / "merged", toys[family]))
    assert any(not torch.equal(merged[name], before[name]) for name in before)


@pytest.mark.slow
def test_a_family_outside_the_table_trains_with_its_paths(toys, shapes, tmp_path):
    """A family without a row in model.FAMILIES, but with --family-paths, trains as it does with the row."""
    command = flags(toys["qwen3_vl"], shapes[0], tmp_path / "a", "--steps", 1)
    run([sys.executable, "train.py", *command])
    program = (
        "import model, runpy, sys; del model.FAMILIES['qwen3_vl']; sys.argv[:] = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    without_row = [
        sys.executable,
        "-c",
        program,
        "train.py",
        *flags(toys["qwen3_vl"], shapes[0], tmp_path / "b", "--steps", 1),
    ]
    run([*without_row, "--family-paths", "model.visual", "model.language_model"])
    assert without_time(tmp_path / "a") == without_time(tmp_path / "b")
    run([*without_row[:3], "merge_lora.py", tmp_path / "b", "--out", tmp_path / "merged"])


@pytest.mark.slow
def test_four_processes_and_two_replicas_of_two_equal_one(toys, tmp_path):
    """Four processes, also as two replicas (HSDP), equal one process: with a trained vision tower, uneven
    micro-batches, text-only ranks, a reference model, a tied head, and adapters."""
    demo.make_model(tmp_path / "tied", "qwen2_5_vl", hidden=64, layers=2, vocab=448, tied=True)
    cases = ["--train-vision all --kl-coef 0.1", "--lora-rank 4 --train-vision tower"]
    cases = [f"--micro-tokens 130 --replicate {r} {case}" for case in cases for r in (1, 2)]
    results = parity(tmp_path / "tied", tmp_path, *cases, worlds=(1, 4))
    for i, (one_process, four_processes) in enumerate(zip(results[1], results[4], strict=True)):
        assert_moved(one_process, four_processes, f"case {i}")
        assert_equal_updates(one_process, four_processes, f"case {i} on four processes")


@pytest.mark.slow
def test_bfloat16_weights_with_and_without_adapters(toys, shapes, tmp_path):
    """Adapters stay fp32 next to bfloat16 weights, so a tiny update changes them. It changes hardly any bfloat16
    weight."""
    for extra_flags, has_adapters in ((["--lora-rank", 2], True), ([], False)):
        out = tmp_path / str(has_adapters)
        command = ["--steps", 1, "--master-dtype", "bf16", "--lr", 1e-7, "--dtype", "bfloat16", *extra_flags]
        run([*TORCHRUN, 2, "train.py", *flags(toys["qwen2_5_vl"], shapes[0], out, *command)])
        assert rows(out)[0]["policy/grad_norm"] > 0
        after, before = (
            load_model_or_checkpoint(str(out)).state_dict(),
            M.load_hf(str(toys["qwen2_5_vl"])).state_dict(),
        )
        name = "model.language_model.layers.0.mlp.up_proj.weight"
        unchanged = (after[name] == (before[name] if has_adapters else before[name].bfloat16().float())).double().mean()
        assert unchanged == 1 if has_adapters else unchanged > 0.98  # the few smallest weights change
        assert not has_adapters or 0 < after[name.replace("weight", "lora_B")].abs().max() < 1e-6


# With two epochs the worker's policy moves away from the old one, and some ratios are clipped
ALGORITHMS = [
    "--algo dapo --truncated mask --update-epochs 2",
    "--algo gspo --update-epochs 2",
    "--algo cispo --clip-high 0.1 --update-epochs 2",
    "--algo sapo --update-epochs 2",
    "--algo rloo",
    "--algo grpo --algo-args norm_std=batch dual_clip=1.2 --update-epochs 2",
    "--algo reinforce++",
    "--algo reinforce++ --kl-coef 0 --update-epochs 2",
    "--algo grpo --kl-coef 0.1 --update-epochs 2",
    "--algo rloo --kl-coef 0.1 --algo-args kl_in=reward",
    "--algo grpo --entropy-coef 0.05",
    "--algo grpo --kl-coef 0.1 --lora-rank 4 --update-epochs 2",
    "--algo grpo --lora-rank 4 --train-vision tower --gradient-checkpointing --update-epochs 2",
    "--algo grpo --algo-args tis_cap=1.5 ratio_mask=0.8,1.25",
    "--algo ppo --update-epochs 1",
    "--algo ppo --update-epochs 2 --algo-args critic=separate kl_in=reward --kl-coef 0.1 --train-vision all",
]


@pytest.mark.slow
def test_no_algorithm_depends_on_the_number_of_processes_or_micro_batches(toys, tmp_path):
    small, whole = ([f"{case} --micro-tokens {n}" for case in ALGORITHMS] for n in (130, 4000))
    results = parity(toys["qwen2_5_vl"], tmp_path, *small, worlds=(2,))
    results |= parity(toys["qwen2_5_vl"], tmp_path, *small, *whole, worlds=(1,))
    gradients = []
    for i, case in enumerate(ALGORITHMS):
        two_processes, one_process, packed = results[2][i], results[1][i], results[1][len(ALGORITHMS) + i]
        assert two_processes["micros"] > 1 and packed["micros"] == 1
        assert_moved(one_process, two_processes, case)
        assert_equal_updates(one_process, two_processes, f"{case} on two processes")
        assert_equal_updates(one_process, packed, f"{case} in one micro-batch")
        names = one_process["gradients"].keys()
        assert ("policy.value_head.weight" in names) == ("--algo ppo" in case and "separate" not in case)
        assert ("critic.value_head.weight" in names) == ("separate" in case) and not any(
            n.startswith("reference") for n in names
        )
        up = "policy.hf.model.language_model.layers.0.mlp.up_proj"
        assert (f"{up}.weight" in names) != ("lora" in case) and any("visual" in n for n in names) == ("vision" in case)
        gradients.append(one_process["gradients"][f"{up}.lora_A" if "lora" in case else f"{up}.weight"])
        if "kl-coef 0.1" in case:
            assert one_process["metrics"]["policy/kl_ref"] > 1e-4
        if "epochs 2" in case:
            assert one_process["metrics"]["policy/approx_kl"] > 1e-2
        if "epochs 2" in case and "sapo" not in case:
            assert 0 < one_process["metrics"]["policy/clip_frac"] < 1
        if "tis" in case:
            assert (
                one_process["metrics"]["rollout/ratio_masked"] > 0
                and one_process["metrics"]["rollout/tis_capped"] > 0
            )
    # all cases differ from each other, so every flag had an effect
    for i, a in enumerate(gradients):
        assert all(a.shape != b.shape or (a - b).norm() > 1e-3 * a.norm() for b in gradients[:i]), ALGORITHMS[i]


# --- killed and resumed ---------------------------------------------------------------------------------------------


def descendants(pid):
    """Return the ids of a process and all its descendants. (torchrun starts its workers in separate sessions.)"""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    pids = [pid]
    for p in pids:
        pids += [child for child, parent in parents.items() if parent == p]
    return pids


def kill_after(command, out, step):
    """Kill all processes of the run with SIGKILL once `step` is logged."""
    log = Path(out).parent / "killed.log"
    with forked(list(map(str, command)), ROOT, None, log, log) as processes:
        deadline = time.time() + 1200
        while time.time() < deadline and len(running(processes)) == len(processes):
            path = Path(out) / "metrics.jsonl"
            if path.exists() and any(f'"step": {step},' in line for line in path.read_text().splitlines()):
                break
            time.sleep(0.02)
        assert len(running(processes)) == len(processes), "the run ended before it could be killed"
        for pid in chain.from_iterable(descendants(process.pid) for process in processes):
            os.kill(pid, signal.SIGKILL)


def add_end_tokens(model):
    """Declare so many tokens as end tokens that a random toy model ends some of its responses."""
    path = model / "generation_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"eos_token_id": [settings["eos_token_id"], *range(3, 256, 6)]}))


# With these flags a run has all kinds of state: value head, refreshed reference, adaptive KL coefficient, and a
# position in the data that does not follow from the step
EVERYTHING = (
    "--algo ppo --update-epochs 1 --algo-args critic_lr=1e-3 critic_warmup_steps=1 kl_in=reward kl_target=0.01 "
    "ref_every=4 --kl-coef 0.1 --max-gen-batches 4 --truncated penalise"
).split()

EPISODES = ["--env", "{env}", "--max-turns", 3, "--turn-gamma", 0.9, "--max-new-tokens", 60]


@pytest.mark.slow
@pytest.mark.parametrize(
    "world,extra_flags",
    [(1, ["--update-epochs", 2]), (2, ["--update-epochs", 2]), (2, EVERYTHING), (2, EPISODES)],
    ids=["1", "2", "everything", "episodes"],
)
def test_killed_and_resumed_run_equals_the_uninterrupted_one_bitwise(world, extra_flags, toys, shapes, tmp_path):
    launch = [*TORCHRUN, world] if world > 1 else [sys.executable]
    uneven = tmp_path / "uneven.py"  # four prompts in five get rewards that differ
    uneven.write_text(
        "def score(response, example):\n    flat = sum(map(ord, example.uid)) % 5 == 0\n"
        "    return 0.5 if flat else (len(response) * 7919 % 5) / 4\n"
    )
    common = [
        "--eval-data",
        shapes[1],
        "--steps",
        12,
        "--save-every",
        3,
        "--eval-every",
        5,
        "--minibatches",
        2,
        "--schedule",
        "cosine",
        "--warmup-steps",
        2,
        "--reward",
        f"{uneven}:score",
        *extra_flags,
    ]
    model = toys["qwen2_5_vl"]
    if "--env" in extra_flags:
        common = [str(word).format(env=f"{ROOT}/tests/echo_env.py:Echo") for word in common]
        model = shutil.copytree(model, tmp_path / "model")
        add_end_tokens(model)
    command = {
        name: [*launch, "train.py", *flags(model, shapes[0], tmp_path / name, *common)] for name in ("whole", "cut")
    }
    run(command["whole"])
    kill_after(command["cut"], tmp_path / "cut", 7)
    before = len(rows(tmp_path / "cut"))
    assert before < 13
    saved = sorted(p.name for p in (tmp_path / "cut" / "checkpoints").iterdir() if not p.name.startswith("."))
    assert saved and saved[-1] < "step_000012"
    # a second start without --resume must not touch the run
    refused = run(command["cut"], check=False)
    assert refused.returncode != 0 and "already holds a run" in refused.stderr
    done = run([*command["cut"], "--resume", "auto"])
    assert (
        f"resumed from {tmp_path / 'cut' / 'checkpoints' / saved[-1]}" in done.stdout
        and "changed setting" not in done.stdout
    )
    assert without_time(tmp_path / "cut") == without_time(tmp_path / "whole")
    logged = rows(tmp_path / "whole")
    assert any(row.get("loss/policy") for row in logged)
    if extra_flags is EVERYTHING:  # there was state to lose
        assert {row["sampling/batches"] for row in logged[1:]} > {1} and logged[-1]["progress/epoch"] > 2
        assert (
            len({row["kl/coef"] for row in logged[1:]}) > 6
            and logged[-1]["policy/kl_ref"] > 0
            and logged[-1]["value/mean"] != 0
        )
    weights = []
    for name in ("whole", "cut"):
        run([sys.executable, "merge_lora.py", tmp_path / name, "--out", tmp_path / f"{name}-hf"])
        weights.append(load_file(tmp_path / f"{name}-hf" / "model.safetensors"))
    start = load_file(toys["qwen2_5_vl"] / "model.safetensors")
    assert weights[0].keys() == weights[1].keys() == start.keys()
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in start)
    changed = {k for k in start if not torch.equal(start[k], weights[0][k])}
    assert changed and not any(k.startswith(("visual", "model.visual")) for k in changed)  # frozen


@pytest.mark.slow
def test_a_separate_critic_is_resumed_and_other_flags_are_refused(toys, shapes, tmp_path):
    def command(out, steps, *extra_flags):
        ppo = [
            "--algo",
            "ppo",
            "--algo-args",
            "critic=separate",
            "--algo-args",
            "critic_lr=1e-3",
            "--update-epochs",
            1,
            "--save-every",
            1,
            "--steps",
            steps,
        ]
        return [sys.executable, "train.py", *flags(toys["qwen2_5_vl"], shapes[0], tmp_path / out, *ppo, *extra_flags)]

    run(command("whole", 3))
    run(command("cut", 2))
    refused = run([*command("cut", 3, "--algo-args", "critic=head"), "--resume", "auto"], check=False)
    assert refused.returncode == 1 and "it holds critic, but this run needs value_head; keep --adv" in refused.stderr
    run([*command("cut", 3), "--resume", "auto"])
    assert (
        without_time(tmp_path / "cut") == without_time(tmp_path / "whole")
        and rows(tmp_path / "cut")[-1]["value/grad_norm"] > 0
    )


@pytest.mark.slow
def test_bfloat16_trains_and_stays_near_its_engine(toys, shapes, tmp_path):
    run(
        [
            sys.executable,
            "train.py",
            *flags(toys["qwen2_5_vl"], shapes[0], tmp_path / "r", "--steps", 2, "--dtype", "bfloat16"),
        ]
    )
    logged = rows(tmp_path / "r")
    assert all(row["policy/grad_norm"] > 0 and 1e-5 < row["mismatch/max_abs_logprob_diff"] < 0.2 for row in logged)


@pytest.mark.slow
def test_a_run_without_a_single_update_can_be_resumed(toys, shapes, tmp_path):
    flat = tmp_path / "flat.py"
    # equal rewards give no gradient, and -3.5 is not a proportion
    flat.write_text("def score(response, example):\n    return -3.5\n")
    common = flags(toys["qwen2_5_vl"], shapes[0], tmp_path / "r", "--eval-data", shapes[1], "--reward", f"{flat}:score")
    first = run([sys.executable, "train.py", *common, "--steps", 1, "--resume", "auto"])
    assert "resumed" not in first.stdout
    run([sys.executable, "train.py", *common, "--steps", 2, "--resume", "auto"])
    logged = rows(tmp_path / "r")
    assert [row["step"] for row in logged] == [0, 1, 2] and all(row["update/empty"] == 1 for row in logged[1:])
    assert logged[0]["eval/reward"] == logged[1]["reward/mean"] == -3.5
    run([sys.executable, "merge_lora.py", tmp_path / "r", "--out", tmp_path / "hf"])
    start, end = (load_file(p / "model.safetensors") for p in (toys["qwen2_5_vl"], tmp_path / "hf"))
    assert all(torch.equal(start[k], end[k]) for k in start)


@pytest.mark.slow
def test_resume_auto_before_the_first_checkpoint_starts_afresh(toys, shapes, tmp_path):
    common = flags(
        toys["qwen2_5_vl"], shapes[0], tmp_path / "r", "--eval-data", shapes[1], "--steps", 9, "--save-every", 9
    )
    kill_after([sys.executable, "train.py", *common], tmp_path / "r", 1)
    run([sys.executable, "train.py", *common, "--resume", "auto"])
    assert [row["step"] for row in rows(tmp_path / "r")] == list(range(10))


@pytest.mark.slow
def test_resume_on_another_number_of_processes_continues(toys, shapes, tmp_path):
    common = flags(toys["qwen2_5_vl"], shapes[0], tmp_path / "r", "--save-every", 2)
    run([sys.executable, "train.py", *common, "--steps", 2])
    done = run([*TORCHRUN, 2, "train.py", *common, "--steps", 4, "--resume", "auto"])
    assert "resumed from" in done.stdout and [row["step"] for row in rows(tmp_path / "r")] == [1, 2, 3, 4]
    assert "changed setting: --steps 2 -> 4" in done.stdout
    other = run(
        [sys.executable, "train.py", *common, "--steps", 6, "--resume", "auto", "--train-vision", "all"], check=False
    )
    assert (
        other.returncode == 1 and "the checkpoint does not fit: --train-vision was none and is all" in other.stderr
    )
    mixed = run(
        [sys.executable, "train.py", *common, "--steps", 6, "--resume", tmp_path / "r/checkpoints/step_000002"],
        check=False,
    )
    assert mixed.returncode == 1 and "a run directory holds one history" in mixed.stderr


def test_stored_paths_have_no_dots_and_a_config_is_no_change(tmp_path, monkeypatch):
    (tmp_path / "repo").mkdir()
    (tmp_path / "my" / "real").mkdir(parents=True)
    (tmp_path / "my" / "real" / "a.parquet").touch()
    (tmp_path / "my" / "linked.parquet").symlink_to("real/a.parquet")
    monkeypatch.chdir(tmp_path / "repo")
    paths = [absolute_path(f"../my/{end}") for end in ("linked.parquet", "real/*.parquet", "missing")]
    assert paths == [f"{tmp_path}/my/linked.parquet", f"{tmp_path}/my/real/*.parquet", "../my/missing"]
    (tmp_path / "run.json").write_text(json.dumps({"args": {"config": "c.toml", "resume": "no", "lr": 1.0}}))
    settings = {"config": None, "resume": "auto", "lr": 2.0}
    assert format_setting_changes(tmp_path, settings) == ["--lr 1.0 -> 2.0"]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_settings_and_prints_changes(toys, shapes, tmp_path):
    """Settings have the same effect whether passed again or read from run.json. New values are used and printed."""
    given_flags = flags(
        toys["qwen2_5_vl"],
        shapes[0],
        tmp_path / "r",
        "--algo",
        "gspo",
        "--clip-high",
        0.5,
        "--minibatches",
        2,
        "--temperature",
        0.9,
        "--train-vision",
        "merger",
        "--save-every",
        1,
    )
    run([sys.executable, "train.py", *given_flags, "--steps", 2])
    before = json.loads((tmp_path / "r" / "run.json").read_text())["args"]
    assert before["loss_agg"] == "seq" and before["clip_low"] == 3e-4 and before["clip_high"] == 0.5
    shutil.copytree(tmp_path / "r", tmp_path / "again")
    reward = given_flags[given_flags.index("--reward") :][:2]  # it names code, which is never taken from a run's folder
    new_flags = ["--resume", "auto", "--steps", 3, "--lr", 2e-3]
    # start it in another working directory
    program = [sys.executable, ROOT / "train.py"]
    done = run_command([*program, "--out", tmp_path / "r", *new_flags, *reward], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    changes = sorted(line for line in done.stdout.splitlines() if "changed setting" in line)
    assert changes == ["changed setting: --lr 0.001 -> 0.002", "changed setting: --steps 2 -> 3"]
    after = json.loads((tmp_path / "r" / "run.json").read_text())["args"]
    assert {name for name in after if after[name] != before[name]} == {"lr", "steps", "resume"}
    given_flags[given_flags.index("--out") + 1] = tmp_path / "again"
    run([*program, *given_flags, *new_flags])
    assert without_time(tmp_path / "again") == without_time(tmp_path / "r") and len(rows(tmp_path / "r")) == 3
    # a preset on the command line replaces the run's, and the other settings stay
    cfg = train.parse_args(["--out", str(tmp_path / "r"), "--resume", "auto", "--algo", "dapo", *map(str, reward)])
    assert cfg.algo == type(cfg.algo)(algo="dapo", group_size=3, minibatches=2, **grpo.PRESETS["dapo"])
    assert cfg.rollout.temperature == 0.9 and cfg.run.resume == "auto"
    # without a checkpoint there are no settings to read
    with pytest.raises(UserError, match="no checkpoint in --out .* needs --model --data$"):
        train.parse_args(["--out", str(tmp_path / "new"), "--resume", "auto", "--steps", "1"])


# --- one new function in grpo.py is enough for a new advantage -----------------------------------------------------

ADDED = """

@register_advantage("doubled", norm_std="none")
def doubled(rewards_PG):
    return 2 * subtract_group_mean(rewards_PG)


@register_advantage("at_the_end", norm_std="none", grouped=False, per_token=True)
def at_the_end(rewards_BT, values_BT, mask_BT, algo):
    return rewards_BT, rewards_BT
"""


@pytest.mark.slow
def test_an_advantage_added_as_one_function_trains_as_written(toys, shapes, tmp_path):
    """Two advantages added to a copy of grpo.py train as written. The expected advantages and loss are computed from
    the rewards and lengths that the run logged. The expected gradient is twice that of an advantage half as large."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "tests", "docs", "assets", "runs", "out"))
    text = (copy / "grpo.py").read_text()
    mark = "MeanAndStd = Callable"
    (copy / "grpo.py").write_text(text.replace(mark, f"{ADDED}\n\n{mark}", 1))

    def first_step(name, *extra_flags):
        """Train one step. Return its metrics and the samples of each prompt."""
        out = tmp_path / "-".join([name, *extra_flags[1:]])
        run(
            [
                sys.executable,
                copy / "train.py",
                *flags(toys["qwen2_5_vl"], shapes[0], out, "--steps", 1, "--no-self-test", "--adv", name, *extra_flags),
            ]
        )
        lines = (out / "rollouts" / "step_000001.jsonl").read_text().splitlines()
        return rows(out)[0], [json.loads(line)["samples"] for line in lines]

    half_metrics, half_groups = first_step("dr_grpo")
    for extra_flags in ([], ["--kernel", "triton"]):
        metrics, groups = first_step("doubled", *extra_flags)
        assert (
            metrics["policy/grad_norm"] == pytest.approx(2 * half_metrics["policy/grad_norm"], rel=1e-4)
            and half_metrics["policy/grad_norm"] > 0.01
        )
        for group, before in zip(groups, half_groups, strict=True):
            assert [s["text"] for s in group] == [s["text"] for s in before]
            rewards = [s["rewards"]["reward"] for s in group]
            want = [2 * (reward - sum(rewards) / len(rewards)) for reward in rewards]
            assert [s["advantage"] for s in group] == pytest.approx(want, abs=1e-6)
    metrics, groups = first_step("at_the_end")
    samples = list(chain(*groups))
    total, n_tokens = sum(s["rewards"]["reward"] for s in samples), sum(s["tokens"] for s in samples)
    assert metrics["loss/policy"] == pytest.approx(-total / n_tokens, rel=1e-4) and total > 1
    unknown = run(
        [
            sys.executable,
            copy / "train.py",
            *flags(toys["qwen2_5_vl"], shapes[0], "o", "--steps", 1),
            "--adv",
            "double",
        ],
        check=False,
    )
    assert unknown.returncode == 2 and "doubled" in unknown.stderr and "at_the_end" in unknown.stderr


# --- real Geometry3K problems, from preparation to evaluation -------------------------------------------------------


@pytest.mark.slow
def test_real_geometry_problems_are_prepared_trained_on_and_evaluated(toys, tmp_path):
    data = tmp_path / "geo3k.parquet"
    run(
        [
            sys.executable,
            "prepare_data.py",
            "geo3k",
            "--input",
            "tests/data/geometry3k",
            "--split",
            "train",
            "--out",
            data,
        ]
    )
    out = tmp_path / "run"
    common = [
        "--model",
        toys["qwen2_5_vl"],
        "--data",
        data,
        "--eval-data",
        data,
        "--out",
        out,
        "--prompts-per-step",
        5,
        "--group-size",
        2,
        "--max-new-tokens",
        8,
        "--max-prompt-tokens",
        700,
        "--micro-tokens",
        1500,
        "--max-pixels",
        200 * 200,
        "--lr",
        "1e-4",
        "--save-every",
        1,
    ]
    run([sys.executable, "train.py", *common, "--steps", 1])
    run([sys.executable, "train.py", *common, "--steps", 2, "--resume", "auto"])
    logged = rows(out)
    assert [row["step"] for row in logged] == [0, 1, 2] and {"reward/accuracy", "reward/format"} <= logged[1].keys()
    page = (out / "rollouts" / "step_000002.html").read_text()
    assert page.count("<img") == 5 and "boxed" in page
    # a random toy model is never right: reward length instead, so that rewards differ and there is an update
    uneven = tmp_path / "uneven.py"
    uneven.write_text("def score(response, example):\n    return float(len(response))\n")
    run(
        [
            sys.executable,
            "train.py",
            *common[:4],
            "--out",
            tmp_path / "uneven",
            *common[8:],
            "--steps",
            1,
            "--reward",
            f"{uneven}:score",
        ]
    )
    trained = rows(tmp_path / "uneven")[0]
    assert (
        trained["policy/grad_norm"] > 0
        and trained["update/tokens"] > 0
        and trained["mismatch/max_abs_logprob_diff"] < 1e-4
    )
    run(
        [
            sys.executable,
            "eval.py",
            tmp_path / "uneven",
            "--data",
            data,
            "--max-new-tokens",
            4,
            "--reward",
            f"{uneven}:score",
            "--out",
            tmp_path / "eval",
        ]
    )
    result = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert result["n"] == 10 and set(result["by_answer_type"]) >= {"integer"}
    assert (tmp_path / "eval" / "report.html").read_text().count("<img") == 10


# --- user errors are reported before any model is loaded ------------------------------------------------------------


@pytest.fixture
def model_must_not_load(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a model was loaded before the input was checked")

    monkeypatch.setattr(engines.launch, "load_hf", forbidden)
    monkeypatch.setattr(parallel.models, "build_meta_model", forbidden)


def bad_rows(shapes):
    good = list(shapes_rows(6, "train", 1))
    broken = [dict(r) for r in good]
    broken[2] = broken[2] | {"images": [{"bytes": b"\x89PNG\r\n\x1a\n nonsense", "path": None}]}
    unmarked = [dict(r) for r in good]
    unmarked[3] = unmarked[3] | {"prompt": [{"role": "user", "content": "<image> <image>"}]}
    unknown = [r | {"data_source": "chess"} for r in good]
    no_prompt = [{k: v for k, v in r.items() if k != "prompt"} for r in good]
    return {"good": good, "broken": broken, "unmarked": unmarked, "no_prompt": no_prompt, "unknown": unknown}


CASES = [
    ("good", {"--model": "nobody/nothing"}, "--model 'nobody/nothing'"),
    ("good", {"--model": "./no/such/folder"}, "no such folder"),
    ("missing", {}, "no such file"),
    ("no_prompt", {}, "no column 'prompt'.*--prompt-key"),
    ("broken", {}, "row 2: image 0 .* cannot be decoded"),
    ("unmarked", {}, "row 3: <image> placeholders in the prompt: 2; images: 1"),
    ("unknown", {}, "'chess'.*--reward"),
    ("good", {"--max-prompt-tokens": "10"}, "no usable prompts: 6 over --max-prompt-tokens 10, 0 with special tokens"),
    (
        "good",
        {"--prompts-per-step": "5", "--minibatches": "2"},
        "--prompts-per-step 5 is not divisible by .* multiple of 2",
    ),
    ("good", {"--prompts-per-step": "8"}, "6 usable examples, but --prompts-per-step is 8; lower it"),
    ("good", {"--micro-tokens": "20"}, "--micro-tokens 20 is too small: the longest prompt has [0-9]+ tokens and"),
    ("good", {"--attn": "flex"}, "--attn flex trains on CUDA only"),
    ("good", {"--vision-cache-gb": "-1"}, "--vision-cache-gb -1.0: must be at least 0"),
    ("good", {"--steps": "0"}, "--steps 0: must be at least 1"),
    ("good", {"--temperature": "0"}, "--temperature 0.0: must be above 0"),
    ("good", {"--turn-gamma": "1.5"}, "--turn-gamma 1.5: must be above 0 and at most 1"),
    ("good", {"--eval-every": "5"}, "--eval-every 5 needs --eval-data"),
    ("good", {"--resume": "elsewhere"}, "--resume elsewhere"),
    ("good", {"--reward": "nowhere.py:score"}, "no file 'nowhere.py'"),
    ("good", {"--clip-low": "1"}, "--clip-low 1.0: must be below 1, except with --loss cispo"),
    ("good", {"--lora-targets": "q_proj"}, "--lora-targets q_proj: there are no adapters without --lora-rank"),
    (
        "good",
        {"--lora-rank": "4", "--kl-coef": "0.1", "--algo-args": "ref_every=2"},
        "the reference is the policy without its adapters",
    ),
    ("good", {"--vision-lr": "1e-5"}, "--vision-lr 1e-05: the vision tower is frozen"),
    ("good", {"--replicate": "2"}, "--replicate 2 --tp 1: this takes 2 processes or a multiple"),
    ("good", {"--tp": "2"}, "--tp 2: this takes 2 processes or a multiple .* has 1;"),
    ("good", {"--family-paths": "model.visual"}, "--family-paths model.visual: give two"),
    (
        "good",
        {"--family-paths": "model.tower model.language_model"},
        "'model.tower' has no list of blocks; use a path that has one: model.visual, model.language_model",
    ),
    (
        "good",
        {"--lora-rank": "4", "--train-vision": "all"},
        "--train-vision all: with --lora-rank 4 all weights are frozen",
    ),
    ("good", {"--offload": "all"}, "--offload all: there is no GPU"),
    ("good", {"--timeout-minutes": "0"}, "--timeout-minutes 0.0: must be above 0"),
    ("good", {"--warmup-steps": "9"}, "--warmup-steps 9 exceeds --steps 2"),
    ("good", {"--min-pixels": "4000000"}, r"--min-pixels 4000000 is above --max-pixels [0-9]+ \(the model's default\)"),
    ("good", {"--max-pixels": "100"}, r"--min-pixels [0-9]+ \(the model's default\) is above --max-pixels 100;"),
    ("good", {"--algo-args": "value_klip=1"}, "--algo-args value_klip=1: no such key \\(did you mean value_clip\\?\\)"),
    ("good", {"--vllm": "kv_cache_dtype=fp8"}, "--vllm kv_cache_dtype=fp8: the engine is hf"),
    ("good", {"--grace-seconds": "0"}, "--grace-seconds 0.0: must be above 0"),
    ("good", {"--eval-data": "none.parquet"}, "none.parquet: no such file"),
    ("good", {"--data": "{out}/goood.parquet"}, "no such file.* \\(did you mean .*/good.parquet"),
    ("good", {"--curriculum": "{out}/good.parqet"}, "--curriculum .* \\(did you mean .*/good.parquet"),
    ("good", {"--answer-key": "answer"}, "no column 'answer'.*--answer-key"),
    ("good", {"--data-source": "chess"}, "'chess'.*--data-source"),
]


@pytest.mark.parametrize("data,change,match", CASES, ids=[f"{d}{''.join(c)}" for d, c, _ in CASES])
def test_mistakes_are_named_before_the_model_loads(data, change, match, toys, shapes, tmp_path, model_must_not_load):
    path = tmp_path / f"{data}.parquet"
    if data != "missing":
        write_parquet(path, bad_rows(shapes)[data])
    arguments = {
        "--model": str(toys["qwen2_5_vl"]),
        "--data": str(path),
        "--out": str(tmp_path / "out"),
        "--steps": "2",
        "--prompts-per-step": "2",
        "--max-prompt-tokens": "80",
        "--max-new-tokens": "4",
    } | {name: value.format(out=tmp_path) for name, value in change.items()}
    try:
        with pytest.raises(ValueError, match=match):
            train.main(train.parse_args(" ".join(chain(*arguments.items())).split()))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert not (tmp_path / "out").exists()


def test_an_error_says_where_values_come_from_that_were_not_passed(monkeypatch, tmp_path):
    """Values that are defaults or come from the resumed run are marked so; those on the command line are not."""
    new = f"--model m --data d --out {tmp_path} --steps 2 --warmup-steps=5".split()
    monkeypatch.setattr(sys, "argv", ["train.py", *new])
    cfg = train.parse_args(new)
    message = "--warmup-steps 5 exceeds --steps 2: --steps 20, --group-size 8, --lr 1e-06, --clip-low 0.28"
    with pytest.raises(UserError) as error, naming_origins(cfg.to_flags(), cfg.run.origin):
        raise UserError(message)
    assert str(error.value) == message.replace("size 8", "size 8 (the default)").replace(
        "--lr 1e-06", "--lr 1e-06 (the default)")
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume", "auto", "--steps", "2"])
    cfg = replace(cfg, run=replace(cfg.run, resume="auto"))
    monkeypatch.setattr(train, "main", lambda cfg: cfg.optim.check(cfg.model, cfg.run.steps))
    with pytest.raises(UserError, match=r"--warmup-steps 5 \(from the run that is resumed\) exceeds --steps 2$"):
        train.run_training(cfg)


def test_all_missing_flags_are_named_at_once():
    match = ".*".join(f"{flag} is required: " for flag in ("--steps", "--out", "--model", "--data"))
    with pytest.raises(UserError, match=match):
        train.parse_args([])


@pytest.mark.slow
def test_bad_rows_can_be_skipped_and_are_counted(toys, shapes, tmp_path):
    path = write_parquet(tmp_path / "broken.parquet", bad_rows(shapes)["broken"])
    arguments = [sys.executable, "train.py", *flags(toys["qwen2_5_vl"], path, tmp_path / "out", "--steps", 1)]
    refused = run(arguments, check=False)
    assert refused.returncode != 0 and "error:" in refused.stderr and "Traceback" not in refused.stderr
    done = run([*arguments, "--bad-rows", "skip"])
    assert "row 2: image 0" in done.stdout and "left out: 1 unreadable, 0 over --max-prompt-tokens" in done.stdout


@pytest.mark.parametrize("given, message", [
    (["--epochs", "4"], "unknown flag --epochs; for epochs of the data use --steps = 4 x rows / "),
    (["--sample-rounds", "4"], "unknown flag --sample-rounds; use --max-gen-batches"),
    (["--track", "wandb"], "unknown flag --track; use --report-to"),
    (["--group_size", "4"], "unknown flag --group_size; use --group-size;"),
    (["--learning-rate", "1e-6"], "unknown flag --learning-rate; docs/glossary.md has the names of TRL"),
    (["--tis-mask", "1,2"], "unknown flag --tis-mask; use --algo-args ratio_mask=VALUE"),
])  # fmt: skip
def test_the_error_for_an_old_name_gives_the_new_one(given, message, capsys):
    with pytest.raises(SystemExit):
        train.parse_args(["--model", "m", "--data", "d", "--out", "o", "--steps", "1", *given])
    assert f"error: {message}" in capsys.readouterr().err


def test_an_earlier_run_is_read_with_the_new_names(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"args": {"epochs": 2, "tis_mask": "0.5,2", "lr": 1e-6}}))
    args = read_run_args(tmp_path / "checkpoints" / "step_000001")
    assert args == {"update_epochs": 2, "ratio_mask": "0.5,2", "lr": 1e-6}


UNKNOWN_FLAGS = ["--gamma", "--group", "--rollout-tp", "--top-p", "--target-kl", "--overlong-buffer", "--freeze-vision"]


@pytest.mark.parametrize("flag", UNKNOWN_FLAGS)
def test_unknown_flags_are_refused(flag, capsys):
    with pytest.raises(SystemExit):
        train.parse_args(["--model", "m", "--data", "d", "--out", "o", "--steps", "1", flag, "4"])
    assert f"error: unknown flag {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag,known",
    [
        ("--adv", "grpo dr_grpo rloo reinforce++ gae"),
        ("--loss", "clip gspo cispo sapo reinforce"),
        ("--algo", "grpo dr_grpo dapo gspo cispo sapo rloo reinforce++ ppo"),
        ("--algo-args norm_std=", "group batch none"),
        ("--loss-agg", "token seq const"),
        ("--kl", "k1 k2 k3"),
        ("--train-vision", "none merger tower all"),
        ("--offload", "none reference all"),
        ("--rollout", "auto hf vllm"),
    ],
)
def test_the_error_for_an_unknown_name_lists_the_known_ones(flag, known, capsys):
    with pytest.raises((SystemExit, UserError)) as refused:
        wrong = f"{flag} grpoo".replace("= ", "=").split()
        train.parse_args(["--model", "m", "--data", "d", "--out", "o", "--steps", "1", *wrong])
    message = f"{refused.value} {capsys.readouterr().err}"
    assert flag in message and "grpoo" in message
    assert set(known.split()) <= set(re.findall(r"[\w+]+", message)), message


def test_a_sampled_image_token_is_an_error_that_names_the_sample(loaded):
    _, processor = loaded["qwen2_5_vl"]
    rollout = written("p7", [1, 2], [processor.image_token_id, 3])
    with pytest.raises(ValueError, match="'p7' has 1 image tokens, and its images need .*; was a placeholder sampled"):
        Packer(100, processor.image_token_id).pack([rollout])


def test_the_probe_fills_a_micro_batch_and_leaves_no_gradient(loaded):
    hf, processor = loaded["qwen3_vl"]
    row = next(iter(shapes_rows(1, "train", 0)))
    example = SimpleNamespace(uid="x", messages=row["prompt"], images=[row["images"][0]["bytes"]], videos=[])
    packer = Packer(300, processor.image_token_id, flop_costs(hf.config))
    length = processor.count_tokens(example.messages, [(84, 84)])
    policy = Policy(hf, processor, train_vision="all")
    policy.zero_grad()
    cfg = SimpleNamespace(rollout=SimpleNamespace(max_new_tokens=40))
    assert 290 <= probe_memory(policy, ExampleList([example], [length]), packer, processor, cfg) <= 300
    assert all(p.grad is None for p in policy.parameters())


# --- small parts of the loop ----------------------------------------------------------------------------------------


def test_each_epoch_is_a_new_shuffle_without_repeats():
    steps = [shuffled_batch(s, 10, 3, seed=1) for s in range(6)]
    for epoch in (steps[:3], steps[3:]):
        seen = [i for batch in epoch for i in batch]
        assert len(set(seen)) == 9 and set(seen) <= set(range(10))
    assert steps[:3] != steps[3:] and shuffled_batch(4, 10, 3, seed=1) == steps[4]
    assert shuffled_batch(4, 10, 3, seed=2) != steps[4]


def test_learning_rate_schedule():
    cfg = train.parse_args("--model m --data d --out o --steps 10 --lr 2 --warmup-steps 4 --schedule cosine".split())
    rates = [2 * cfg.optim.lr_factor(s, 10) for s in range(10)]
    assert (
        rates[:4] == [0.5, 1.0, 1.5, 2.0] and rates[4] == 2.0 and rates[7] == pytest.approx(1.0) and 0 < rates[9] < 0.2
    )
    constant = replace(cfg.optim, schedule="constant")
    assert {2 * constant.lr_factor(s, 10) for s in range(4, 10)} == {2.0}


@pytest.mark.parametrize("passes", [1, 2])
def test_mismatch_is_measured_by_kind_and_corrected(passes, loaded, picture, ctx):
    """The mismatch is logged for prompts with and without images. The gradient of an update that corrects it equals
    that of an update with each token's weight applied by hand."""
    hf, processor = loaded["qwen2_5_vl"]
    images = [processor.image_to_patches("a", picture(56, 56, 1))]
    ids = {
        "text": processor.tokenize_prompt([{"role": "user", "content": "Hello?"}], []),
        "image": processor.tokenize_prompt([{"role": "user", "content": "<image>Hello?"}], images),
    }
    policy = Policy(hf, processor)
    models = Models(policy, torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.0))
    packer = Packer(8192, processor.image_token_id)
    # log-probability of each token of a response, in nats: the trainer's minus the engine's
    shift = {"text": 0.3, "image": -0.2, "far": 2.0}
    rollouts = []
    for uid, kind in (("text", "text"), ("image", "image"), ("far", "text")):
        rollout = written(uid, ids[kind], [65, 66, 67], images if kind == "image" else [])
        [micro] = packer.pack([rollout])
        with torch.no_grad():
            rollout.logprobs = (policy(micro).logp_K - shift[uid]).tolist()
        rollouts.append(rollout)

    def gradient(*extra_flags, advantages=(1.0, 1.0, 1.0)):
        cfg = train.parse_args(
            [
                "--model",
                "m",
                "--data",
                "d",
                "--out",
                "o",
                "--steps",
                "1",
                "--update-epochs",
                str(passes),
                "--max-grad-norm",
                "1e9",
                *extra_flags,
            ]
        )
        batch = TrainBatch(rollouts, make_token_batch(rollouts, [1 / 9] * 3), [packer.pack(rollouts)])
        train.compute_logprobs_and_values(batch, models, cfg)
        batch.tokens.advantages = torch.tensor(advantages).repeat_interleave(3)
        meter = Meter()
        train.update_policy(models, batch, cfg, train.TrainState(), ctx, meter, SkippedUpdates(Path("-"), ctx))
        return meter.reduce(ctx), policy.hf.lm_head.weight.grad.clone()

    metrics, _ = gradient()
    k3 = {kind: math.exp(x) - 1 - x for kind, x in shift.items()}
    assert metrics["mismatch/kl"] == pytest.approx(sum(k3.values()) / 3, rel=1e-3)
    assert metrics["mismatch/kl/images=1"] == pytest.approx(k3["image"], rel=1e-3)
    assert metrics["mismatch/kl/images=0"] == pytest.approx((k3["text"] + k3["far"]) / 2, rel=1e-3)
    assert metrics["mismatch/max_abs_logprob_diff/images=1"] == pytest.approx(0.2, rel=1e-3)
    assert (
        metrics["mismatch/max_abs_logprob_diff"]
        == metrics["mismatch/max_abs_logprob_diff/images=0"]
        == pytest.approx(2.0, rel=1e-3)
    )
    capped, got = gradient("--algo-args", "tis_cap=1.2", "--algo-args", "ratio_mask=0.5,2")
    _, expected = gradient(advantages=(1.2, math.exp(-0.2), 1e-30))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)
    assert capped["rollout/tis_capped"] == pytest.approx(2 / 3) and capped["rollout/ratio_masked"] == passes
