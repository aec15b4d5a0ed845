"""Tensor parallelism, the gradient norm over meshes, and checkpoints across layouts.   pytest tests/test_sharding.py"""

import json
import random
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from test_train import TORCHRUN, assert_equal_updates, flags, parity, rows, run, shapes  # noqa: F401
from torch import nn

import demo
import model as M
import parallel.sharding as sharding
import parallel.tensor_parallel as tensor_parallel
import train
from parallel.checkpoint import load_model_or_checkpoint

# With the two families below, these cases cover modules that tensor parallelism divides and those that it does not:
# biases, head norms, deepstack, experts, recurrent layers; a trained tower or merger; adapters and recomputed
# activations; losses that couple the tokens of a response; a value head, a critic, a reference model.
CASES = [
    "--train-vision all",
    "--train-vision all --algo ppo --update-epochs 1",
    "--lora-rank 4 --train-vision tower --gradient-checkpointing",
    "--algo gspo --entropy-coef 0.01 --train-vision merger --update-epochs 2",
    "--algo ppo --update-epochs 2 --algo-args critic=separate --kl-coef 0.1 --algo-args kl_in=reward",
    "--algo-args tis_cap=1.5 ratio_mask=0.8,1.25 norm_std=batch",
]


@pytest.mark.slow
@pytest.mark.parametrize("family,worlds", [("qwen3_vl", (2, 4)), ("qwen3_5_moe", (4,))])
def test_tensor_parallel_equals_one_process_in_double_precision(family, worlds, toys, tmp_path):
    cases = [f"--micro-tokens 130 --tp 2 {case} float64" for case in CASES]
    results = parity(toys[family], tmp_path, *cases, worlds=(1, *worlds))
    for world in worlds:
        for case, single, sharded in zip(cases, results[1], results[world], strict=True):
            assert_equal_updates(single, sharded, f"{case} on {world} processes", tolerance=1e-10)
    images = results[4][0][
        "images"
    ]  # per rank and micro-batch: equal in a tensor-parallel group; some group has a micro-batch without images
    assert images[0] == images[1] != images[2] == images[3] and 0 in images[0] + images[2]
    name = "policy.hf.model.language_model.layers.0.input_layernorm.weight"
    gradients = [result["gradients"][name] for result in results[1] if name in result["gradients"]]
    assert len(gradients) == len(CASES) - 1  # all cases but the one with adapters; no two of these gradients are equal
    assert all((a - b).norm() > 1e-3 * a.norm() for i, a in enumerate(gradients[1:]) for b in gradients[1:][:i])


@pytest.mark.slow
def test_tensor_parallel_and_replicas_equal_one_process(toys, tmp_path):
    demo.make_model(tmp_path / "tied", "qwen2_5_vl", hidden=64, layers=2, vocab=448, tied=True)
    cases = [f"--micro-tokens 130 --tp 2 --replicate {r} --train-vision all --kl-coef 0.1" for r in (1, 2)]
    results = parity(tmp_path / "tied", tmp_path, *cases, worlds=(1, 4))
    for case, single, four in zip(cases, results[1], results[4], strict=True):
        assert_equal_updates(single, four, case)


LOSSES = [
    "--algo gspo --clip-low 0.05 --clip-high 0.05",
    "--loss spread",  # defined in parity_worker.py
    "--algo-args ratio_mask=0.8,1.25",
    "--algo gspo --clip-low 0.1 --clip-high 0.1 --algo-args ratio_mask=0.8,1.25 --entropy-coef 0.05",
    "--algo sapo --algo-args tis_cap=1.5 ratio_mask=0.8,1.25 --kl-coef 0.1",
    "--algo dapo",
]


@pytest.mark.slow
def test_losses_do_not_depend_on_how_rollouts_are_laid_out(toys, tmp_path):
    """Updates with random settings on two processes equal those of one process that has a whole minibatch in one
    micro-batch and block."""
    rng, undivided, divided = random.Random(591), [], []  # with this seed, rollouts are divided in every way
    for loss, turns in [*((loss, "turns") for loss in LOSSES), *((loss, "") for loss in LOSSES[::2])]:
        updates = rng.choice(["", "--update-epochs 2", "--minibatches 2"])
        case = f"{loss} {updates} --loss-agg {rng.choice(['token', 'seq', 'const'])} sgd=0.02 {turns}"
        undivided.append(f"{case} --micro-tokens 4000")
        divided.append(f"{case} --micro-tokens {rng.choice([60, 70, 4000])} --tp {rng.choice([1, 2])}")
        divided[-1] += f" block={rng.choice([3, 8, 4000])}"
    results = parity(toys["qwen3_vl"], tmp_path, *undivided, worlds=(1,)) | parity(
        toys["qwen3_vl"], tmp_path, *divided, worlds=(2,)
    )
    for case, single, two in zip(divided, results[1], results[2], strict=True):
        assert single["micros"] == 1 and two["split"] == ("turns" in case and "--micro-tokens 4000" not in case), case
        assert_equal_updates(single, two, case)
        if "ratio_mask=" in case:
            assert single["metrics"]["rollout/ratio_masked"] > 0, case


METHODS = [  # of algorithms/
    "--algo papo --max-gen-batches 1 --algo-args perception_coef=0.5",
    "--algo papo --max-gen-batches 1 --algo-args perception_coef=0.5 perception_kl=k3 view=noise view_share=0.9",
    "--algo vppo --max-gen-batches 1",
    "--algo-args token_score=entropy token_scope=step token_share=0.3",
    "--algo-args token_score=random token_share=0.4 vision_kl=true view=blank",
    "--algo opd --teacher {toy}",
    "--algo grpo --teacher {toy} --algo-args distill_coef=0.5",
    "--algo-args reward_weights=reward=1,length=0.5",
]


@pytest.mark.slow
def test_methods_do_not_depend_on_how_rollouts_are_laid_out(toys, tmp_path):
    """The same for the methods, in double precision, so that rounding chooses no other tokens."""
    rng, undivided, divided, toy = random.Random(7), [], [], toys["qwen3_vl"]
    for method in METHODS:
        updates = "" if "--minibatches" in method else rng.choice(["--update-epochs 2", "--minibatches 2"])
        vision, turns = rng.choice(["none", "all"]), rng.choice(["turns", ""])
        case = f"{method.format(toy=toy)} {updates} --train-vision {vision} sgd=0.02 float64 {turns}"
        undivided.append(f"{case} --micro-tokens 4000")
        divided.append(f"{case} --micro-tokens {rng.choice([60, 70])} --tp {rng.choice([1, 2])}")
    results = parity(toy, tmp_path, *undivided, worlds=(1,)) | parity(toy, tmp_path, *divided, worlds=(2,))
    for case, single, two in zip(divided, results[1], results[2], strict=True):
        assert_equal_updates(single, two, case, tolerance=1e-9)
    assert any("--tp 2" in case for case in divided) and any("--tp 1" in case for case in divided)


@pytest.mark.slow
def test_tensor_parallel_with_uneven_shards_equals_one_process(toys, tmp_path):
    """FSDP over three ranks, each with tensor parallelism over two: no dimension of the toy is a multiple of three. The
    outputs that are summed over ranks have a bias."""
    shutil.copytree(toys["qwen3_vl"], tmp_path / "toy")
    config = json.loads((tmp_path / "toy" / "config.json").read_text())
    config["text_config"]["attention_bias"] = True
    (tmp_path / "toy" / "config.json").write_text(json.dumps(config))
    tensors, rng = load_file(tmp_path / "toy" / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in list(tensors.items()):
        if "language_model" in name and name.endswith(tuple(f"{x}_proj.weight" for x in "qkvo")):
            tensors[name.replace(".weight", ".bias")] = 0.1 * torch.randn(len(tensor), generator=rng)
    save_file(tensors, tmp_path / "toy" / "model.safetensors", metadata={"format": "pt"})
    case = "--micro-tokens 130 --tp 2 --train-vision all float64"
    results = parity(tmp_path / "toy", tmp_path, case, worlds=(1, 6))
    assert_equal_updates(results[1][0], results[6][0], case, tolerance=1e-10)
    assert results[1][0]["gradients"]["policy.hf.model.language_model.layers.1.self_attn.o_proj.bias"].norm() > 1e-3


@pytest.mark.slow
def test_a_run_continues_with_another_tp(toys, shapes, tmp_path):  # noqa: F811
    """Runs with and without tensor parallelism have equal metrics, and each continues from the other's checkpoint."""
    common = [
        "--steps",
        4,
        "--save-every",
        2,
        "--minibatches",
        2,
        "--max-grad-norm",
        0.1,
        "--train-vision",
        "all",
        "--schedule",
        "cosine",
    ]
    alone = [sys.executable, "train.py"]
    divided = [*TORCHRUN, 2, "train.py"]
    run([*alone, *flags(toys["qwen3_vl"], shapes[0], tmp_path / "alone", *common)])
    run([*divided, *flags(toys["qwen3_vl"], shapes[0], tmp_path / "divided", *common, "--tp", 2)])
    for a, b in zip(rows(tmp_path / "alone"), rows(tmp_path / "divided"), strict=True):
        assert a.keys() == b.keys() and a["policy/grad_norm"] > 0.1  # clipped
        for key in (
            "reward/mean",
            "update/tokens",
            "rollout/tokens",
            "loss/policy",
            "policy/grad_norm",
            "policy/entropy",
        ):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), (a["step"], key)
    expected, initial = (
        load_model_or_checkpoint(str(tmp_path / "alone")).state_dict(),
        M.load_hf(str(toys["qwen3_vl"])).state_dict(),
    )
    moved = max((expected[k] - initial[k]).abs().max() for k in expected)
    for name, command, extra in (("alone", divided, ["--tp", 2]), ("divided", alone, ["--tp", 1])):
        half = tmp_path / name / "checkpoints" / "step_000002"
        out = tmp_path / f"{name}-on"
        done = run([*command, *flags(toys["qwen3_vl"], shapes[0], out, *common, *extra, "--resume", half)])
        assert f"resumed from {half}" in done.stdout
        got = load_model_or_checkpoint(str(out)).state_dict()
        assert max((expected[k] - got[k]).abs().max() for k in expected) < 0.05 * moved, name
    run([sys.executable, "merge_lora.py", tmp_path / "divided", "--out", tmp_path / "merged"])


def test_models_that_cannot_be_divided_are_refused(toys):
    config = M.load_config(str(toys["qwen3_vl"]))
    tensor_parallel.check_tp(config, 2)
    with pytest.raises(ValueError, match="--tp 4: the model's 2 key-value heads cannot be divided .* a divisor of 2"):
        tensor_parallel.check_tp(config, 4)
    config.text_config.num_key_value_heads = 4
    config.text_config.intermediate_size = 190
    with pytest.raises(ValueError, match="--tp 4: the model's 190 units of an MLP"):
        tensor_parallel.check_tp(config, 4)
    with torch.device("meta"):
        fused, plain = nn.Module(), nn.Module()
        fused.qkv_proj, fused.o_proj = nn.Linear(4, 12), nn.Linear(4, 4)
        plain.gate_proj, plain.up_proj, plain.down_proj, plain.act = (
            nn.Linear(4, 8),
            nn.Linear(4, 8),
            nn.Linear(8, 4),
            nn.SiLU(),
        )
    assert not tensor_parallel.can_parallelize(fused) and tensor_parallel.can_parallelize(plain)
    plain.sinks = nn.Parameter(torch.zeros(2))
    assert not tensor_parallel.can_parallelize(plain)


@pytest.mark.parametrize("bound", [1e-3, 1e3])
def test_clip_gradients_equals_torchs(bound, loaded):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        hf, processor = loaded["qwen2_5_vl"]
        policy = M.Policy(hf, processor)
        rng = torch.Generator().manual_seed(0)
        for parameter in policy.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=rng) if parameter.requires_grad else None
        before = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
        want = torch.nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.grad is not None], bound)
        clipped = [p.grad for p in policy.parameters() if p.grad is not None]
        for parameter, gradient in zip((p for p in policy.parameters() if p.grad is not None), before, strict=True):
            parameter.grad = gradient
        assert sharding.clip_gradients(policy, bound) == pytest.approx(want.item(), rel=1e-6)
        for mine, theirs in zip((p.grad for p in policy.parameters() if p.grad is not None), clipped, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)
        policy.zero_grad()
        assert sharding.clip_gradients(policy, bound) == 0 and train.clip_and_step(policy, None, bound) == (0.0, False)
    finally:
        dist.destroy_process_group()
