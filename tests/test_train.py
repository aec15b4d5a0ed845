"""The loop as users run it: subprocesses, one and two processes, killed and resumed.   pytest tests/test_train.py"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import demo
import grpo
import model as M
import train
from model import Policy
from parallel.checkpoint import load_trained
from rollout import Rollout
from utils import Context

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(command, check=True, **extra):
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300, **extra)
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    return write_parquet(folder / "train.parquet", demo.shapes_rows(24, "train", 0)), write_parquet(
        folder / "test.parquet", demo.shapes_rows(10, "test", 0))


def flags(model, data, out, *more):
    # random rewards: a random toy never earns one, and without a reward there is nothing to train on
    reward = Path(data).parent / "reward.py"
    reward.write_text("def score(response, example):\n    return {'reward': (len(response) * 7919 % 5) / 4, 'length': len(response)}\n")
    return ["--model", model, "--data", data, "--out", out, "--reward", f"{reward}:score", "--prompts-per-step", 4,
            "--group-size", 3, "--max-new-tokens", 6, "--max-prompt-tokens", 80, "--micro-tokens", 120, "--lr", "1e-3", *more]


def rows(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def without_time(out):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(out)]


# --- one process and two agree ------------------------------------------------------------------------------------------


def parity(toy, tmp_path, *cases, worlds=(1, 2)):
    """Results of the worker for each number of processes: {world: [one per case]}."""
    flags = [flag for case in cases for flag in ("/", *case.split())][1:]
    results = {}
    for world in worlds:
        out = tmp_path / f"{world}.pt"
        run([*TORCHRUN, world, "tests/parity_worker.py", toy, out, *flags])
        results[world] = torch.load(out)
    return results


def assert_equal_updates(one, two, what, tolerance=1e-5):
    assert one["metrics"]["update/tokens"] == two["metrics"]["update/tokens"] > 50, what
    assert one["metrics"].keys() == two["metrics"].keys()
    for key in one["metrics"].keys() - {"update/empty", "rollout/max_abs_dlogp"}:
        assert one["metrics"][key] == pytest.approx(two["metrics"][key], rel=1e-5, abs=1e-6), (what, key)
    for key in ("loss/policy", "loss/value"):
        assert one["metrics"].get(key, 0.0) == pytest.approx(two["metrics"].get(key, 0.0), rel=1e-6, abs=1e-6), (what, key)
    assert one["gradients"].keys() == two["gradients"].keys() and one["metrics"]["policy/grad_norm"] > 1e-3
    largest = max(g.norm() for g in one["gradients"].values())
    for name, gradient in one["gradients"].items():
        error = (gradient - two["gradients"][name]).norm() / gradient.norm().clamp(min=1e-4 * largest)
        assert error < tolerance, f"{what}, {name}: relative difference {error:.1e}"


@pytest.mark.parametrize("family,more", [
    ("qwen2_5_vl", "--no-freeze-vision"),
    ("qwen3_vl", "--no-freeze-vision --loss-agg seq"),
    ("qwen2_vl", "--loss-agg const --grad-checkpointing"),
    ("qwen3_vl", "--no-freeze-merger"),
    ("qwen3_5_moe", "--no-freeze-vision --freeze-merger"),
])
def test_two_processes_equal_one(family, more, toys, tmp_path):
    results = parity(toys[family], tmp_path, f"--micro-tokens 130 {more}")
    one, two = results[1][0], results[2][0]
    assert two["micros"] > 1
    names = {n.removeprefix("policy.hf.model.visual.") for n in one["gradients"] if "visual" in n}
    mergers = {n for n in names if "merger" in n}
    assert bool(names - mergers) == ("--no-freeze-vision" in more)
    assert bool(mergers) == (more.split()[0] in ("--no-freeze-vision", "--no-freeze-merger") and " --freeze-merger" not in more)
    assert_equal_updates(one, two, more)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_every_family_goes_through_the_whole_loop(family, toys, shapes, tmp_path):
    """Trained, evaluated, merged and opened by transformers alone."""
    command = flags(toys[family], shapes[0], tmp_path / "run", "--steps", 2, "--lr", 1e-2, "--eval-data", shapes[0])
    run([sys.executable, "train.py", *command])
    row = rows(tmp_path / "run")[-1]
    assert row["step"] == 2 and row["rollout/max_abs_dlogp"] < 1e-4 and row["policy/grad_norm"] > 0
    run([sys.executable, "merge_lora.py", tmp_path / "run", "--out", tmp_path / "merged"])
    ours, before = (M.load_hf(str(path)).state_dict() for path in (tmp_path / "merged", toys[family]))
    assert any(not torch.equal(ours[name], before[name]) for name in before)


def test_a_family_outside_the_table_is_found_by_its_paths(toys, shapes, tmp_path):
    """The same run with the row, and without it but with the paths."""
    command = flags(toys["qwen3_vl"], shapes[0], tmp_path / "a", "--steps", 1)
    run([sys.executable, "train.py", *command])
    program = ("import model, runpy, sys; del model.FAMILIES['qwen3_vl']; sys.argv[:] = sys.argv[1:]; "
               "runpy.run_path(sys.argv[0], run_name='__main__')")
    without = [sys.executable, "-c", program, "train.py", *flags(toys["qwen3_vl"], shapes[0], tmp_path / "b", "--steps", 1)]
    paths = ["--vision-attr", "model.visual", "--language-attr", "model.language_model"]
    run([*without, *paths])
    assert without_time(tmp_path / "a") == without_time(tmp_path / "b")
    run([*without[:3], "merge_lora.py", tmp_path / "b", "--out", tmp_path / "merged"])


def test_four_processes_and_two_replicas_of_two_equal_one(toys, tmp_path):
    """HSDP; with a tower that trains, uneven micro-batches, text-only ranks, a reference, a tied head and adapters."""
    demo.make_model(tmp_path / "tied", "qwen2_5_vl", hidden=64, layers=2, vocab=448, tied=True)
    cases = ["--no-freeze-vision --kl-coef 0.1", "--lora-rank 4 --lora-vision"]
    cases = [f"--micro-tokens 130 --replicate {r} {case}" for case in cases for r in (1, 2)]
    results = parity(tmp_path / "tied", tmp_path, *cases, worlds=(1, 4))
    for i, (one, four) in enumerate(zip(results[1], results[4], strict=True)):
        assert_equal_updates(one, four, f"case {i} on four processes")


def test_bfloat16_weights_with_and_without_adapters(toys, shapes, tmp_path):
    """Adapters stay fp32 beside bfloat16 weights, so the smallest update moves them; of bfloat16 weights hardly any."""
    for more, moves in ((["--lora-rank", 2], True), ([], False)):
        out = tmp_path / str(moves)
        command = ["--steps", 1, "--master-dtype", "bf16", "--lr", 1e-7, "--dtype", "bfloat16", *more]
        run([*TORCHRUN, 2, "train.py", *flags(toys["qwen2_5_vl"], shapes[0], out, *command)])
        assert rows(out)[0]["policy/grad_norm"] > 0
        after, before = load_trained(str(out), merge=False).state_dict(), M.load_hf(str(toys["qwen2_5_vl"])).state_dict()
        name = "model.language_model.layers.0.mlp.up_proj.weight"
        stayed = (after[name] == (before[name] if moves else before[name].bfloat16().float())).double().mean()
        assert stayed == 1 if moves else stayed > 0.98  # the few smallest weights have room for it
        assert not moves or 0 < after[name.replace("weight", "lora_B")].abs().max() < 1e-6


ALGORITHMS = [
    "--algo dapo --truncated mask", "--algo gspo", "--algo cispo --clip-high 0.1", "--algo sapo", "--algo rloo",
    "--algo grpo --norm-std batch --dual-clip 1.2", "--algo reinforce++", "--algo reinforce++ --kl-coef 0", "--algo grpo --kl-coef 0.1",
    "--algo rloo --kl-coef 0.1 --kl-in reward", "--algo grpo --entropy-coef 0.05",
    "--algo grpo --kl-coef 0.1 --lora-rank 4", "--algo grpo --lora-rank 4 --lora-vision --grad-checkpointing",
    "--algo ppo --epochs 1", "--algo ppo --epochs 1 --critic separate --kl-coef 0.1 --kl-in reward --no-freeze-vision",
]


def test_no_algorithm_depends_on_the_processes_or_the_micro_batches(toys, tmp_path):
    small, whole = ([f"{case} --micro-tokens {n}" for case in ALGORITHMS] for n in (130, 4000))
    results = parity(toys["qwen2_5_vl"], tmp_path, *small, worlds=(2,)) | parity(toys["qwen2_5_vl"], tmp_path, *small, *whole, worlds=(1,))
    gradients = []
    for i, case in enumerate(ALGORITHMS):
        two, one, packed = results[2][i], results[1][i], results[1][len(ALGORITHMS) + i]
        assert two["micros"] > 1 and packed["micros"] == 1
        assert_equal_updates(one, two, f"{case} on two processes")
        assert_equal_updates(one, packed, f"{case} in one micro-batch")
        names = one["gradients"].keys()
        assert ("policy.value_head.weight" in names) == ("--algo ppo" in case and "separate" not in case)
        assert ("critic.value_head.weight" in names) == ("separate" in case) and not any(n.startswith("reference") for n in names)
        up = "policy.hf.model.language_model.layers.0.mlp.up_proj"
        assert (f"{up}.weight" in names) != ("lora" in case) and any("visual" in n for n in names) == ("vision" in case)
        gradients.append(one["gradients"][f"{up}.lora_A" if "lora" in case else f"{up}.weight"])
        if "kl-coef 0.1" in case:
            assert one["metrics"]["policy/kl_ref"] > 1e-4
    # and the cases differ from each other: no flag was without effect
    for i, a in enumerate(gradients):
        assert all(a.shape != b.shape or (a - b).norm() > 1e-3 * a.norm() for b in gradients[:i]), ALGORITHMS[i]


# --- killed and resumed -------------------------------------------------------------------------------------------------


def descendants(pid):
    """pid and everything below it: torchrun puts its workers into sessions of their own."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
    found = [pid]
    for p in found:
        found += [child for child, parent in parents.items() if parent == p]
    return found


def kill_after(command, out, step):
    """SIGKILL every process of the run once `step` is logged."""
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 200
    while time.time() < deadline and process.poll() is None:
        path = Path(out) / "metrics.jsonl"
        if path.exists() and any(f'"step": {step},' in line for line in path.read_text().splitlines()):
            break
        time.sleep(0.02)
    assert process.poll() is None, "the run ended before it could be killed"
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


# All that a run carries from step to step: value head, refreshed reference, adaptive coefficient, position of the data
EVERYTHING = ("--algo ppo --epochs 1 --critic-lr 1e-3 --critic-warmup-steps 1 --kl-coef 0.1 --kl-in reward --kl-target 0.01 "
              "--kl-horizon 50 --ref-every 4 --sample-rounds 4 --truncated penalise").split()


@pytest.mark.parametrize("world,more", [(1, ["--epochs", 2]), (2, ["--epochs", 2]), (2, EVERYTHING)], ids=["1", "2", "everything"])
def test_killed_and_resumed_run_is_bitwise_the_uninterrupted_one(world, more, toys, shapes, tmp_path):
    launch = [*TORCHRUN, world] if world > 1 else [sys.executable]
    uneven = tmp_path / "uneven.py"  # four prompts of five have a signal
    uneven.write_text("def score(response, example):\n    flat = sum(map(ord, example.uid)) % 5 == 0\n"
                      "    return 0.5 if flat else (len(response) * 7919 % 5) / 4\n")
    common = ["--eval-data", shapes[1], "--steps", 12, "--save-every", 3, "--eval-every", 5, "--minibatches", 2,
              "--schedule", "cosine", "--warmup-steps", 2, "--reward", f"{uneven}:score", *more]
    command = {name: [*launch, "train.py", *flags(toys["qwen2_5_vl"], shapes[0], tmp_path / name, *common)] for name in ("whole", "cut")}
    run(command["whole"])
    kill_after(command["cut"], tmp_path / "cut", 7)
    before = len(rows(tmp_path / "cut"))
    assert before < 13
    left = sorted(p.name for p in (tmp_path / "cut" / "checkpoints").iterdir() if not p.name.startswith("."))
    assert left and left[-1] < "step_000012"
    # a second start without --resume must not touch the run
    refused = run(command["cut"], check=False)
    assert refused.returncode != 0 and "already holds a run" in refused.stderr
    done = run([*command["cut"], "--resume", "auto"])
    assert f"resumed from {tmp_path / 'cut' / 'checkpoints' / left[-1]}" in done.stdout and "changed since" not in done.stdout
    assert without_time(tmp_path / "cut") == without_time(tmp_path / "whole")
    logged = rows(tmp_path / "whole")
    assert any(row.get("loss/policy") for row in logged)
    if more is EVERYTHING:  # the state was there to be lost
        assert {row["sampling/rounds"] for row in logged[1:]} > {1} and logged[-1]["progress/epoch"] > 2
        assert len({row["kl/coef"] for row in logged[1:]}) > 6 and logged[-1]["policy/kl_ref"] > 0 and logged[-1]["value/mean"] != 0
    weights = []
    for name in ("whole", "cut"):
        run([sys.executable, "merge_lora.py", tmp_path / name, "--out", tmp_path / f"{name}-hf"])
        weights.append(load_file(tmp_path / f"{name}-hf" / "model.safetensors"))
    start = load_file(toys["qwen2_5_vl"] / "model.safetensors")
    assert weights[0].keys() == weights[1].keys() == start.keys()
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in start)
    changed = {k for k in start if not torch.equal(start[k], weights[0][k])}
    assert changed and not any(k.startswith(("visual", "model.visual")) for k in changed)  # frozen


def test_a_separate_critic_is_resumed_and_other_flags_are_refused(toys, shapes, tmp_path):
    def command(out, steps, *more):
        ppo = ["--algo", "ppo", "--critic", "separate", "--critic-lr", "1e-3", "--epochs", 1, "--save-every", 1, "--steps", steps]
        return [sys.executable, "train.py", *flags(toys["qwen2_5_vl"], shapes[0], tmp_path / out, *ppo, *more)]

    run(command("whole", 3))
    run(command("cut", 2))
    refused = run([*command("cut", 3, "--critic", "head"), "--resume", "auto"], check=False)
    assert refused.returncode == 1 and "it holds ['critic'], but --adv gae, --critic head" in refused.stderr
    run([*command("cut", 3), "--resume", "auto"])
    assert without_time(tmp_path / "cut") == without_time(tmp_path / "whole") and rows(tmp_path / "cut")[-1]["value/grad_norm"] > 0


def test_bfloat16_trains_and_stays_near_its_engine(toys, shapes, tmp_path):
    run([sys.executable, "train.py", *flags(toys["qwen2_5_vl"], shapes[0], tmp_path / "r", "--steps", 2, "--dtype", "bfloat16")])
    logged = rows(tmp_path / "r")
    assert all(row["policy/grad_norm"] > 0 and 1e-5 < row["rollout/max_abs_dlogp"] < 0.2 for row in logged)


def test_a_run_without_a_single_update_can_be_resumed(toys, shapes, tmp_path):
    flat = tmp_path / "flat.py"
    flat.write_text("def score(response, example):\n    return -3.5\n")  # no spread, no gradient; and no proportion
    common = flags(toys["qwen2_5_vl"], shapes[0], tmp_path / "r", "--eval-data", shapes[1], "--reward", f"{flat}:score")
    first = run([sys.executable, "train.py", *common, "--steps", 1, "--resume", "auto"])
    assert "resumed" not in first.stdout
    run([sys.executable, "train.py", *common, "--steps", 2, "--resume", "auto"])
    logged = rows(tmp_path / "r")
    assert [row["step"] for row in logged] == [0, 1, 2] and all(row["update/empty"] == 1 for row in logged[1:])
    assert logged[0]["eval/accuracy"] == logged[1]["reward/mean"] == -3.5
    run([sys.executable, "merge_lora.py", tmp_path / "r", "--out", tmp_path / "hf"])
    start, end = (load_file(p / "model.safetensors") for p in (toys["qwen2_5_vl"], tmp_path / "hf"))
    assert all(torch.equal(start[k], end[k]) for k in start)


def test_resume_auto_before_the_first_checkpoint_starts_afresh(toys, shapes, tmp_path):
    common = flags(toys["qwen2_5_vl"], shapes[0], tmp_path / "r", "--eval-data", shapes[1], "--steps", 9, "--save-every", 9)
    kill_after([sys.executable, "train.py", *common], tmp_path / "r", 1)
    run([sys.executable, "train.py", *common, "--resume", "auto"])
    assert [row["step"] for row in rows(tmp_path / "r")] == list(range(10))


def test_resume_on_another_number_of_processes_continues(toys, shapes, tmp_path):
    common = flags(toys["qwen2_5_vl"], shapes[0], tmp_path / "r", "--save-every", 2)
    run([sys.executable, "train.py", *common, "--steps", 2])
    done = run([*TORCHRUN, 2, "train.py", *common, "--steps", 4, "--resume", "auto"])
    assert "resumed from" in done.stdout and [row["step"] for row in rows(tmp_path / "r")] == [1, 2, 3, 4]
    assert "changed since: --steps 2 -> 4" in done.stdout
    other = run([sys.executable, "train.py", *common, "--steps", 6, "--resume", "auto", "--no-freeze-vision"], check=False)
    assert other.returncode == 1 and "other weights were trained there: --freeze-vision was True and is False" in other.stderr
    mixed = run([sys.executable, "train.py", *common, "--steps", 6, "--resume", tmp_path / "r/checkpoints/step_000002"], check=False)
    assert mixed.returncode == 1 and "two histories must not mix" in mixed.stderr


# --- real Geometry3K problems through every stage ------------------------------------------------------------------------


def test_real_geometry_problems_pass_through_every_stage(toys, tmp_path):
    data = tmp_path / "geo3k.parquet"
    run([sys.executable, "prepare_data.py", "geo3k", "--input", "tests/data/geometry3k", "--split", "train", "--out", data])
    out = tmp_path / "run"
    common = ["--model", toys["qwen2_5_vl"], "--data", data, "--eval-data", data, "--out", out, "--prompts-per-step", 5,
              "--group-size", 2, "--max-new-tokens", 8, "--max-prompt-tokens", 700, "--micro-tokens", 1500, "--max-pixels", 200 * 200,
              "--lr", "1e-4", "--save-every", 1, "--sample-every", 1]
    run([sys.executable, "train.py", *common, "--steps", 1])
    run([sys.executable, "train.py", *common, "--steps", 2, "--resume", "auto"])
    logged = rows(out)
    assert [row["step"] for row in logged] == [0, 1, 2] and {"reward/accuracy", "reward/format"} <= logged[1].keys()
    page = (out / "rollouts" / "step_000002.html").read_text()
    assert page.count("<img") == 5 and "boxed" in page
    # a random toy is never right: give each prompt an unequal reward, so that an update really happens on them
    uneven = tmp_path / "uneven.py"
    uneven.write_text("def score(response, example):\n    return float(len(response))\n")
    run([sys.executable, "train.py", *common[:4], "--out", tmp_path / "uneven", *common[8:], "--steps", 1, "--reward", f"{uneven}:score"])
    trained = rows(tmp_path / "uneven")[0]
    assert trained["policy/grad_norm"] > 0 and trained["update/tokens"] > 0 and trained["rollout/max_abs_dlogp"] < 1e-4
    run([sys.executable, "eval.py", tmp_path / "uneven", "--data", data, "--max-new-tokens", 4, "--out", tmp_path / "eval"])
    result = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert result["n"] == 10 and set(result["by_answer_type"]) >= {"integer"}
    assert (tmp_path / "eval" / "report.html").read_text().count("<img") == 10


# --- what users get wrong: an error before any model is loaded -----------------------------------------------------------


@pytest.fixture
def model_must_not_load(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a model was loaded before the input was checked")

    monkeypatch.setattr(train, "load_hf", forbidden)
    monkeypatch.setattr(train, "meta_hf", forbidden)


def bad_rows(shapes):
    good = list(demo.shapes_rows(6, "train", 1))
    broken = [dict(r) for r in good]
    broken[2] = broken[2] | {"images": [{"bytes": b"\x89PNG\r\n\x1a\n nonsense", "path": None}]}
    unmarked = [dict(r) for r in good]
    unmarked[3] = unmarked[3] | {"prompt": [{"role": "user", "content": "no mark"}]}
    unknown = [r | {"data_source": "chess"} for r in good]
    no_prompt = [{k: v for k, v in r.items() if k != "prompt"} for r in good]
    return {"good": good, "broken": broken, "unmarked": unmarked, "no_prompt": no_prompt, "unknown": unknown}


CASES = [
    ("good", {"--model": "nobody/nothing"}, "--model 'nobody/nothing'"),
    ("good", {"--model": "./no/such/folder"}, "no such folder"),
    ("missing", {}, "no such file"),
    ("no_prompt", {}, "no column 'prompt'.*--prompt-key"),
    ("broken", {}, "row 2: image 0 .* cannot be decoded"),
    ("unmarked", {}, "row 3: 0 <image> marks in the prompt but 1 images"),
    ("unknown", {}, "'chess'.*--reward"),
    ("good", {"--max-prompt-tokens": "10"}, "none of 6 prompts fits --max-prompt-tokens 10"),
    ("good", {"--group-size": "1"}, "--group-size 1.*at least 2"),
    ("good", {"--prompts-per-step": "5", "--minibatches": "2"}, "--prompts-per-step 5 does not divide .* multiple of 2"),
    ("good", {"--prompts-per-step": "8"}, "6 usable examples, fewer than --prompts-per-step 8"),
    ("good", {"--micro-tokens": "20"}, "--micro-tokens 20 cannot hold the longest prompt of [0-9]+ tokens"),
    ("good", {"--attn": "flex"}, "--attn flex trains on CUDA only"),
    ("good", {"--vision-cache-gb": "-1"}, "--vision-cache-gb -1.0: must not be negative"),
    ("good", {"--steps": "0"}, "--steps 0: must be at least 1"),
    ("good", {"--temperature": "0"}, "--temperature 0"),
    ("good", {"--eval-every": "5"}, "--eval-every 5 needs --eval-data"),
    ("good", {"--resume": "elsewhere"}, "--resume elsewhere"),
    ("good", {"--reward": "nowhere.py:score"}, "no file 'nowhere.py'"),
    ("good", {"--dual-clip": "0.5"}, "--dual-clip 0.5: must be above 1"),
    ("good", {"--group-size": "1", "--algo": "rloo"}, "--group-size 1: --adv rloo compares samples .* at least 2"),
    ("good", {"--group-size": "1", "--algo": "ppo", "--sample-rounds": "2"}, "--group-size 1: --sample-rounds 2"),
    ("good", {"--clip-low": "1"}, "--clip-low 1.0: must be in .0, 1., or 1 with --loss cispo"),
    ("good", {"--algo": "ppo", "--loss": "gspo"}, "--loss gspo weighs a response as a whole, but --adv gae"),
    ("good", {"--algo": "rloo", "--epochs": "2"}, "--loss reinforce is right for one update a step only.*--loss clip"),
    ("good", {"--algo": "ppo", "--norm-std": "group"}, "--norm-std group: --adv gae knows no groups"),
    ("good", {"--kl-target": "0.1"}, "--kl-target 0.1 with --kl-coef 0.0"),
    ("good", {"--ref-every": "5"}, "--ref-every 5 refreshes a reference that only --kl-coef"),
    ("good", {"--gamma": "1.5"}, "--gamma 1.5 and --lam 0.95 must be in"),
    ("good", {"--entropy-coef": "-1"}, "--entropy-coef -1.0: must not be negative"),
    ("good", {"--critic-warmup-steps": "2"}, "--critic-warmup-steps 2: --adv grpo has no critic"),
    ("good", {"--lora-targets": "q_proj"}, "--lora-targets: there are no adapters without --lora-rank"),
    ("good", {"--lora-rank": "4", "--kl-coef": "0.1", "--ref-every": "2"}, "the reference is the policy without its adapters"),
    ("good", {"--vision-lr": "1e-5"}, "--vision-lr 1e-05: .* something of the tower must train"),
    ("good", {"--replicate": "2"}, "--replicate 2: 1 processes do not divide"),
    ("good", {"--tp": "2"}, "--tp 2: 1 processes do not divide into groups of so many"),
    ("good", {"--vision-attr": "model.visual"}, "--vision-attr 'model.visual' and --language-attr None: give both or neither"),
    ("good", {"--vision-attr": "model.tower", "--language-attr": "model.language_model"},
     "model has no child 'tower'; its children are visual"),
    ("good", {"--overlong-buffer": "9"}, "--overlong-buffer 9: must be between 1 and --max-new-tokens 4"),
    ("good", {"--target-kl": "0"}, "--target-kl 0.0: must be above 0"),
    ("good", {"--warmup-steps": "9"}, "--warmup-steps 9 exceeds --steps 2"),
    ("good", {"--min-pixels": "4000000"}, "--min-pixels 4000000 is over --max-pixels"),
    ("good", {"--top-p": "0.8"}, "--top-p 0.8: the loss has log-probabilities of the whole distribution"),
    ("good", {"--kl-coef": "0.1", "--kl-in": "reward"}, "--kl-in reward with --norm-std group.*--norm-std batch or none"),
    ("good", {"--vllm": "kv_cache_dtype=fp8"}, "--vllm kv_cache_dtype=fp8: the engine is --rollout hf"),
    ("good", {"--grace-seconds": "0"}, "--grace-seconds 0.0 and --timeout-minutes 30.0 must be above 0"),
    ("good", {"--rollout-tp": "2"}, "--rollout-tp 2 does not divide 1 processes"),
    ("good", {"--gpu-memory-utilization": "1.5"}, "--gpu-memory-utilization 1.5: must be in"),
    ("good", {"--limit-images": "0"}, "none of 6 prompts fits --max-prompt-tokens 80 and --limit-images 0"),
    ("good", {"--tis-cap": "0"}, "--tis-cap 0.0: must be above 0"),
    ("good", {"--tis-mask": "2,3"}, "--tis-mask '2,3': give LOW,HIGH around 1"),
    ("good", {"--eval-data": "none.parquet"}, "none.parquet: no such file"),
    ("good", {"--answer-key": "answer"}, "no column 'answer'.*--answer-key"),
    ("good", {"--data-source": "chess"}, "'chess'.*--data-source"),
]


@pytest.mark.parametrize("data,change,match", CASES, ids=[f"{d}{''.join(c)}" for d, c, _ in CASES])
def test_mistakes_are_named_before_the_model_loads(data, change, match, toys, shapes, tmp_path, model_must_not_load):
    path = tmp_path / f"{data}.parquet"
    if data != "missing":
        write_parquet(path, bad_rows(shapes)[data])
    arguments = {"--model": str(toys["qwen2_5_vl"]), "--data": str(path), "--out": str(tmp_path / "out"), "--steps": "2",
                 "--prompts-per-step": "2", "--max-prompt-tokens": "80", "--max-new-tokens": "4"} | change
    try:
        with pytest.raises(ValueError, match=match):
            train.main(train.parse_args([text for pair in arguments.items() for text in pair]))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert not (tmp_path / "out").exists()


def test_bad_rows_can_be_skipped_and_are_counted(toys, shapes, tmp_path):
    path = write_parquet(tmp_path / "broken.parquet", bad_rows(shapes)["broken"])
    arguments = [sys.executable, "train.py", *flags(toys["qwen2_5_vl"], path, tmp_path / "out", "--steps", 1)]
    refused = run(arguments, check=False)
    assert refused.returncode != 0 and "error:" in refused.stderr and "Traceback" not in refused.stderr
    done = run([*arguments, "--bad-rows", "skip"])
    assert "row 2: image 0" in done.stdout and "left out: 1 unreadable, 0 over --max-prompt-tokens" in done.stdout


def test_misspelt_flags_are_refused(capsys):
    with pytest.raises(SystemExit):
        train.parse_args(["--model", "m", "--data", "d", "--out", "o", "--steps", "1", "--group", "4"])
    assert "unrecognized arguments: --group 4" in capsys.readouterr().err


def test_a_sampled_image_token_is_an_error_that_names_the_sample(loaded):
    _, processor = loaded["qwen2_5_vl"]
    args = train.parse_args("--model m --data d --out o --steps 1".split())
    rollout = Rollout("p7", 0, [1, 2, processor.image_token_id, 3], 2, [True, True], [-1.0, -1.0], [], "stop", "", advantage=1.0)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="'p7': token 2 of 3 is an image token .* was a placeholder sampled"):
            train.pack_minibatch([rollout], args, processor, torch.device("cpu"))
    finally:
        torch.distributed.destroy_process_group()


def test_the_probe_fills_a_micro_batch_and_leaves_no_gradient(loaded):
    hf, processor = loaded["qwen3_vl"]
    row = next(iter(demo.shapes_rows(1, "train", 0)))
    example = SimpleNamespace(uid="x", messages=row["prompt"], images=[row["images"][0]["bytes"]])
    args = train.parse_args("--model m --data d --out o --steps 1 --micro-tokens 300 --max-new-tokens 40".split())
    policy = Policy(hf, processor, freeze_vision=False)
    policy.zero_grad()
    assert 290 <= train.probe_memory(policy, example, processor, args) <= 300
    assert all(p.grad is None for p in policy.parameters())


# --- small parts of the loop ---------------------------------------------------------------------------------------------


def test_each_epoch_is_a_new_shuffle_without_repeats():
    steps = [train.batch_of(s, 10, 3, seed=1) for s in range(6)]
    for epoch in (steps[:3], steps[3:]):
        seen = [i for batch in epoch for i in batch]
        assert len(set(seen)) == 9 and set(seen) <= set(range(10))
    assert steps[:3] != steps[3:] and train.batch_of(4, 10, 3, seed=1) == steps[4]
    assert train.batch_of(4, 10, 3, seed=2) != steps[4]


def test_learning_rate_schedule():
    args = train.parse_args("--model m --data d --out o --steps 10 --lr 2 --warmup-steps 4 --schedule cosine".split())
    rates = [train.learning_rate(s, args) for s in range(10)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0] and rates[4] == 2.0 and rates[7] == pytest.approx(1.0) and 0 < rates[9] < 0.2
    args.schedule = "constant"
    assert {train.learning_rate(s, args) for s in range(4, 10)} == {2.0}


@pytest.mark.parametrize("passes", [1, 2])
def test_mismatch_is_measured_by_kind_and_corrected(passes, loaded, picture):
    """Gradients of one update against the same with each token's weight applied by hand."""
    hf, processor = loaded["qwen2_5_vl"]
    images = [processor.image("a", picture(56, 56, 1))]
    ids = {"text": processor.encode([{"role": "user", "content": "Hello?"}], []),
           "image": processor.encode([{"role": "user", "content": "<image>Hello?"}], images)}
    policy = Policy(hf, processor)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.0)
    shift = {"text": 0.3, "image": -0.2, "far": 2.0}  # of each response's tokens: trainer minus engine, nats
    made = []
    for uid, kind in (("text", "text"), ("image", "image"), ("far", "text")):
        made.append(Rollout(uid, 0, ids[kind] + [65, 66, 67], len(ids[kind]), [True] * 3, [0.0] * 3,
                            images if kind == "image" else [], "stop", "", advantage=1.0))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ctx = Context(0, 1, torch.device("cpu"))
        for r in made:
            micro = grpo.plant([grpo.Sample("x", r.token_ids, [False] * r.prompt_len + [True] * 3, {}, r.images)], processor.image_token_id)
            with torch.no_grad():
                r.logprobs = (policy(micro)[0] - shift[r.uid]).tolist()

        def gradient(*more, advantages=(1.0, 1.0, 1.0)):
            args = train.parse_args(["--model", "m", "--data", "d", "--out", "o", "--steps", "1", "--epochs", str(passes),
                                     "--max-grad-norm", "1e9", *more])
            for r, advantage in zip(made, advantages, strict=True):
                r.advantage, r.columns = advantage, {}  # as if sampled anew
            micros = train.pack_minibatch(made, args, processor, ctx.device)
            metrics = train.update(policy, optimizer, [micros], args, ctx)
            return metrics, policy.hf.lm_head.weight.grad.clone()

        metrics, _ = gradient()
        k3 = {kind: math.exp(x) - 1 - x for kind, x in shift.items()}
        assert metrics["rollout/kl"] == pytest.approx(sum(k3.values()) / 3, rel=1e-3)
        assert metrics["rollout/kl_image"] == pytest.approx(k3["image"], rel=1e-3)
        assert metrics["rollout/kl_text"] == pytest.approx((k3["text"] + k3["far"]) / 2, rel=1e-3)
        assert metrics["rollout/max_abs_dlogp_image"] == pytest.approx(0.2, rel=1e-3)
        assert metrics["rollout/max_abs_dlogp"] == metrics["rollout/max_abs_dlogp_text"] == pytest.approx(2.0, rel=1e-3)
        capped, got = gradient("--tis-cap", "1.2", "--tis-mask", "0.5,2")
        _, expected = gradient(advantages=(1.2, math.exp(-0.2), 1e-30))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)
        assert capped["rollout/tis_capped"] == pytest.approx(2 / 3) and capped["rollout/tis_masked"] == passes
    finally:
        torch.distributed.destroy_process_group()
