"""Checkpoints that are damaged, forged, half written or cannot be written.   pytest tests/test_checkpoint.py"""

import ast
import errno
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_train import ROOT, TORCHRUN, flags, rows, run, shapes  # noqa: F401
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter

import demo
import merge_lora
import model as M
import parallel.checkpoint as C
import parallel.loading as loading
import parallel.resume as resume
import parallel.sharding as sharding
import train
from errors import UserError
from layers.lora import LoraConfig, add_lora
from parallel.models import checkpoint_parts

WEIGHT = "model.language_model.layers.0.mlp.up_proj.weight"
SHARD = "shard-00001-model-00001-of-00001.safetensors"  # the only file of a toy on one process


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(toy):
    policy = M.Policy(loading.build_meta_model(str(toy)), M.Processor(str(toy)))
    sharding.apply_fsdp(policy, torch.device("cpu"), torch.float32)
    loading.load_sharded(policy, str(toy))
    return policy, sharding.make_optimizer(policy, 1e-3, 0.0)


def weight(policy):
    return dict(policy.hf.named_parameters())[WEIGHT].to_local().detach()


@pytest.fixture(scope="module")
def saved(toys, tmp_path_factory):
    """Return a policy, its optimizer, and a run with checkpoints of steps 2 and 4. One weight equals the step."""
    out = tmp_path_factory.mktemp("saved") / "run"
    policy, optimizer = build(toys["qwen2_5_vl"])
    for step in (2, 4):
        weight(policy).fill_(step)
        C.save_checkpoint(
            out, step, {"policy": (policy, optimizer)}, 2, position={"position": step, "kl_coef": 0.1 + 1e-17}
        )
    run_args = start_args(toys["qwen2_5_vl"], out, "no").to_flags()
    (out / "run.json").write_text(json.dumps({"args": run_args}))
    return policy, optimizer, out


@pytest.fixture
def copy(saved, tmp_path):
    """Yield the policy, the optimizer, and a copy of the run."""
    policy, optimizer, out = saved
    weight(policy).fill_(7)
    yield policy, optimizer, Path(shutil.copytree(out, tmp_path / "run"))
    weight(policy).fill_(7)
    next(iter(optimizer.state.values()))["exp_avg"].to_local().zero_()


def find_start(cfg, data="16 rows"):
    """Return the checkpoint from which a run with these settings resumes."""
    parts = checkpoint_parts(cfg.model, cfg.algo)
    return resume.find_resume_checkpoint(Path(cfg.run.out), cfg.run.resume, cfg.to_flags(), parts, data)


def start_flags(toy, out):
    return ["--model", str(toy), "--data", "d", "--out", str(out), "--steps", "1000000"]


def start_args(toy, out, resume):
    return train.parse_args([*start_flags(toy, out), "--resume", str(resume)])


def step_dir(out, step):
    return out / "checkpoints" / f"step_{step:06d}"


def list_names(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def flip_bit(file, offset=None, bit=0):
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= 1 << bit
    file.write_bytes(content)


def rewrite_trainer_state(checkpoint, **changed):
    (checkpoint / "trainer.json").write_text(C.to_text_with_crc(C.read_trainer_state(checkpoint) | changed))


def load_first_value(out):
    return dict(C.load_model_or_checkpoint(str(out)).named_parameters())[WEIGHT].flatten()[0].item()


def forge_checksums(checkpoint, extra=()):
    """Write the checksums that match the present files of a checkpoint and the files `extra`."""
    trainer = {
        key: value for key, value in json.loads((checkpoint / "trainer.json").read_text()).items() if key != "crc32"
    }
    trainer["files"] = {name: C.file_checksum(checkpoint / name) for name in [*trainer["files"], *extra]}
    (checkpoint / "trainer.json").write_text(C.to_text_with_crc(trainer))


# --- memory of eval.py -----------------------------------------------------------------------------------------------


def save_run(model, out, lora_rank):
    """Write a run with one checkpoint, whose weights differ from the model's; return its folder."""
    hf = loading.build_meta_model(str(model))
    if lora_rank:
        add_lora(hf, LoraConfig(lora_rank, 32.0))
    policy = M.Policy(hf, M.Processor(str(model)))
    sharding.apply_fsdp(policy, torch.device("cpu"), torch.float32)
    loading.load_sharded(policy, str(model))
    for name, p in policy.hf.named_parameters():
        if ".lora_B" in name or not lora_rank:
            p.detach().to_local().add_(torch.randn(p.to_local().shape).mul_(1e-2))
    C.save_checkpoint(out, 1, {"policy": (policy, None)}, 1)
    args = train.parse_args([*start_flags(model, out), "--lora-rank", str(lora_rank)]).to_flags()
    (out / "run.json").write_text(json.dumps({"args": args}))
    return out


@pytest.mark.slow
def test_eval_holds_one_tensor_of_a_run_at_a_time(toys, tmp_path):
    """On two processes, the engine gets exactly the weights that were merged in fp32 and rounded to bfloat16."""
    demo.make_model(tmp_path / "model", "qwen2_5_vl", hidden=512, layers=8, vocab=4096)
    paths = [tmp_path / "model", *(save_run(tmp_path / "model", tmp_path / f"rank{rank}", rank) for rank in (0, 8))]
    run([*TORCHRUN, 2, "tests/eval_worker.py", toys["qwen2_5_vl"], tmp_path / "out.json", *paths])
    for results in json.loads((tmp_path / "out.json").read_text()):
        for path, result in zip(paths, results, strict=True):
            print(f"{path.name}: peak {result['peak'] / 2**20:.0f} MiB of {result['whole'] / 2**20:.0f}")
            assert result["equal"] and result["whole"] > 100e6
            # the largest tensor four times (as read, in fp32, merged, in bfloat16), and 40 MB for code and freed memory
            assert result["peak"] < 4 * result["largest"] + 40e6


# --- weights that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e25])
def test_unusable_weights_are_never_saved(value, copy):
    policy, optimizer, out = copy
    before = list_names(out)
    weight(policy)[3, 5] = value
    with pytest.raises(
        UserError, match=f"after step 6 model.hf.{WEIGHT} holds NaN.*no checkpoint.*{step_dir(out, 4)}.*--resume auto"
    ):
        C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 1)
    assert list_names(out) == before
    with pytest.raises(UserError, match="there is no earlier one: start again"):
        C.save_checkpoint(out / "other", 6, {"policy": (policy, optimizer)}, 1)
    assert not (out / "other").exists()


def test_optimizer_state_that_is_not_finite_is_never_saved(copy):
    policy, optimizer, out = copy
    state = next(iter(optimizer.state.values()))["exp_avg"].to_local()
    state[0] = 1e30  # large, but Adam divides by its own second moment
    C.save_checkpoint(out, 5, {"policy": (policy, optimizer)}, 9)
    state[0] = math.inf
    with pytest.raises(UserError, match=r"after step 6 optimizer.state.*\.exp_avg holds NaN, an infinity"):
        C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 1)
    assert list_names(out) == ["step_000002", "step_000004", "step_000005"]


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e38])
def test_loading_bad_weights_names_them(value, toys, tmp_path):
    shutil.copytree(toys["qwen2_5_vl"], tmp_path / "toy")
    tensors = load_file(tmp_path / "toy" / "model.safetensors")
    next(tensors[name] for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))[1, 2] = value
    save_file(tensors, tmp_path / "toy" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{WEIGHT} of {tmp_path}/toy/model.safetensors holds NaN"):
        build(tmp_path / "toy")
    with pytest.raises(UserError, match=f"{tmp_path}/toy: {WEIGHT} holds NaN"):
        C.load_model_or_checkpoint(str(tmp_path / "toy"))


def test_loading_a_checkpoint_with_bad_weights_names_them(copy, monkeypatch):
    policy, optimizer, out = copy
    weight(policy)[3, 5] = math.nan
    # earlier versions did not check what they saved
    monkeypatch.setattr(C, "find_nonfinite", lambda tensors: None)
    C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 9)
    monkeypatch.undo()
    with pytest.raises(UserError, match=f"{step_dir(out, 6)}: model.hf.{WEIGHT} holds NaN.*remove this checkpoint"):
        C.load_checkpoint(step_dir(out, 6), {"policy": (policy, optimizer)})
    with pytest.raises(UserError, match=f"{step_dir(out, 6)}: {WEIGHT} holds NaN"):
        C.load_model_or_checkpoint(str(out))


# --- forged files, and files of earlier versions ---------------------------------------------------------------------

FORGED = "step_000004: its safetensors files are damaged or forged; use another checkpoint: "


class PickleBomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


def assert_refused_everywhere(out, policy, optimizer, toy, match):
    """Assert that neither the run nor its checkpoint can be loaded by eval.py, merge_lora.py or train.py --resume."""
    weight(policy).fill_(7)
    for path in (out, step_dir(out, 4)):
        with pytest.raises(UserError, match=match):
            C.load_model_or_checkpoint(str(path))
        with pytest.raises(UserError, match=match):
            find_start(start_args(toy, out, path))
    assert list_names(out) == ["step_000002", "step_000004"] and (weight(policy) == 7).all()


@pytest.mark.parametrize("names", [[".metadata", "__0_0.distcp"], ["__1_0.distcp"], [".metadata"]])
def test_checkpoints_of_earlier_versions_are_named_and_never_unpickled(names, copy, toys, tmp_path):
    """No pickle is read, whether next to safetensors files, listed in trainer.json, or alone."""
    policy, optimizer, out = copy
    for name in names:
        (step_dir(out, 4) / name).write_bytes(pickle.dumps(PickleBomb(tmp_path / "witness")))
    match = f"step_000004/({'|'.join(names)}): written by a version before 2026-11-25.*CHANGELOG.md names the last"
    assert_refused_everywhere(out, policy, optimizer, toys["qwen2_5_vl"], match)
    forge_checksums(step_dir(out, 4), names)
    assert_refused_everywhere(out, policy, optimizer, toys["qwen2_5_vl"], match)
    (step_dir(out, 4) / SHARD).unlink()
    assert_refused_everywhere(out, policy, optimizer, toys["qwen2_5_vl"], match)
    assert not (tmp_path / "witness").exists()
    pickle.loads((step_dir(out, 4) / names[0]).read_bytes())
    assert (tmp_path / "witness").exists()  # reading it does create the file


@pytest.mark.parametrize("name", [SHARD, "trainer.json"])
def test_a_pickle_in_place_of_a_checkpoints_file_is_never_read(name, copy, toys, tmp_path):
    policy, optimizer, out = copy
    for dump in (torch.save, lambda program, file: file.write_bytes(pickle.dumps(program))):
        dump(PickleBomb(tmp_path / "witness"), step_dir(out, 4) / name)
        if name == SHARD:
            forge_checksums(step_dir(out, 4))
            assert C.find_damage(step_dir(out, 4)) is None  # the checksums are forged too
            with pytest.raises(UserError, match=f"{FORGED}.*header"):
                C.load_model_or_checkpoint(str(out))
            with pytest.raises(UserError, match=f"{FORGED}.*header"):
                C.load_checkpoint(step_dir(out, 4), {"policy": (policy, optimizer)})
        else:
            with pytest.raises(UserError, match="no intact checkpoint: .*trainer.json: missing, empty, cut"):
                C.load_model_or_checkpoint(str(step_dir(out, 4)))
    assert not (tmp_path / "witness").exists()


OFFSETS = {"": None, "text": "x", "a number": {f"model.hf.{WEIGHT}": {"saved_offsets": 5}}, "nothing": {},
           "too far": {f"model.hf.{WEIGHT}": {"saved_offsets": [2**70, 0]}},
           "words": {f"model.hf.{WEIGHT}": {"saved_offsets": ["a", "b"]}}}  # fmt: skip


@pytest.mark.parametrize("offsets", OFFSETS)
def test_a_forged_header_is_refused(offsets, copy):
    """torch's reader uses a field of the header that safetensors does not check."""
    policy, optimizer, out = copy
    file = step_dir(out, 4) / SHARD
    value = "[" * 99 if offsets == "" else json.dumps(OFFSETS[offsets])
    save_file(load_file(file), file, metadata={"DCP_SHARDING_INFO": value})
    with pytest.raises(UserError, match=FORGED):
        C.load_checkpoint(step_dir(out, 4), {"policy": (policy, optimizer)})


def test_a_file_of_another_checkpoint_is_named_and_not_read(copy, toys):
    """torch's reader would load tensors from every safetensors file in the folder."""
    policy, optimizer, out = copy
    os.link(step_dir(out, 2) / SHARD, step_dir(out, 4) / "shard-00002-model-00001-of-00001.safetensors")
    assert "shard-00002-model-00001-of-00001.safetensors is not part of this checkpoint" in C.find_damage(
        step_dir(out, 4)
    )
    assert load_first_value(out) == 2


def test_only_tensors_are_saved(copy):
    policy, optimizer, out = copy
    next(iter(optimizer.state.values()))["n"] = 3
    with pytest.raises(TypeError, match=r"holds tensors only, but \['optimizer.state.*\.n'\] are not tensors"):
        C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 1)
    del next(iter(optimizer.state.values()))["n"]
    assert list_names(out) == ["step_000002", "step_000004"]


def test_a_process_writes_several_files_and_none_is_a_pickle(copy, monkeypatch):
    """torch builds each file in memory before it writes it, so files are kept small."""
    policy, optimizer, out = copy
    monkeypatch.setattr(C, "FILE_BYTES", 2**19)
    C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 9)
    files = sorted(file for file in step_dir(out, 6).iterdir() if file.name != "trainer.json")
    largest = max(p.nbytes for p in policy.parameters())
    assert len(files) > 3 and all(file.stat().st_size < 2**19 + largest + 50_000 for file in files)
    for file in files:
        with safe_open(file, "pt") as tensors:
            assert tensors.keys()
    weight(policy).fill_(1)
    C.load_checkpoint(step_dir(out, 6), {"policy": (policy, optimizer)})
    assert (weight(policy) == 7).all() and load_first_value(out) == 7


# --- damage ----------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_noticed_and_its_file_named(copy):
    _, _, out = copy
    assert C.find_damage(step_dir(out, 4)) is None
    for file in [step_dir(out, 4) / SHARD]:
        size = file.stat().st_size
        for offset, bit in ((0, 7), (size // 3, 0), (size - 1, 3)):
            flip_bit(file, offset, bit)
            assert str(file) in C.find_damage(step_dir(out, 4)) and "checksum" in C.find_damage(step_dir(out, 4))
            flip_bit(file, offset, bit)
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        assert f"{file}: damaged: its size and checksum are [{size - 1}, " in C.find_damage(step_dir(out, 4))
        file.unlink()
        assert f"No such file or directory: '{file}'" in C.find_damage(step_dir(out, 4))
        file.write_bytes(content)
    file = step_dir(out, 4) / "trainer.json"
    for offset in range(file.stat().st_size - 1):  # the last byte ends the line
        flip_bit(file, offset, offset % 8)
        assert str(file) in (C.find_damage(step_dir(out, 4)) or ""), file.read_bytes()
        flip_bit(file, offset, offset % 8)
    assert C.find_damage(step_dir(out, 4)) is None and C.read_trainer_state(step_dir(out, 4))["kl_coef"] == 0.1 + 1e-17


@pytest.mark.parametrize("content", ["", '{"step": 4', "[]", "\xff\xfe", "{}", "[" * 100_000])
def test_a_truncated_trainer_json_is_named_and_skipped(content, copy, toys, capsys):
    _, _, out = copy
    (step_dir(out, 4) / "trainer.json").write_text(content, encoding="latin1")
    with pytest.raises(UserError, match="no intact checkpoint: .*step_000004/trainer.json: "):
        find_start(start_args(toys["qwen2_5_vl"], out, step_dir(out, 4)))
    assert load_first_value(out) == 2 and f"skipped: {step_dir(out, 4)}/trainer.json" in capsys.readouterr().out


def test_a_truncated_run_json_is_named(copy, toys):
    _, _, out = copy
    for content in ("", "{}", '{"args": {"mod'):
        (out / "run.json").write_text(content)
        with pytest.raises(UserError, match=f"{out}/run.json: "):
            C.resolve_model(str(out))
        with pytest.raises(UserError, match=f"{out}/run.json: "):
            find_start(start_args(toys["qwen2_5_vl"], out, "auto"))
    (out / "run.json").unlink()
    with pytest.raises(
        UserError, match=f"is a checkpoint without its run: no run.json two folders above {step_dir(out, 4)}"
    ):
        C.resolve_model(str(step_dir(out, 4)))


def test_resume_falls_back_to_the_newest_intact_checkpoint(copy, toys, capsys):
    policy, optimizer, out = copy

    def start(source, to=out):
        return find_start(start_args(toys["qwen2_5_vl"], to, source))

    assert start("auto") == start(out) == start(step_dir(out, 4)) == step_dir(out, 4)
    with pytest.raises(UserError, match="holds one history"):
        start(step_dir(out, 2))
    with pytest.raises(UserError, match="already holds a run"):
        start("no")
    flip_bit(step_dir(out, 4) / SHARD)
    capsys.readouterr()
    # loading the run, or resuming into another folder, changes nothing in the run
    assert load_first_value(out) == 2 and start(out, to=out.parent / "new") == step_dir(out, 2)
    message = f"skipped: {step_dir(out, 4)}/{SHARD}: damaged: its size and checksum are"
    assert capsys.readouterr().out.count(message) == 2 and list_names(out) == ["step_000002", "step_000004"]
    for load in (lambda: start(step_dir(out, 4)), lambda: C.load_model_or_checkpoint(str(step_dir(out, 4)))):
        with pytest.raises(UserError, match=f"{step_dir(out, 4)}: no intact checkpoint: .*{SHARD}"):
            load()
    assert list_names(out) == ["step_000002", "step_000004"]
    shutil.copytree(step_dir(out, 4), out / "checkpoints" / "damaged_step_000004")  # from earlier damage
    assert start("auto") == step_dir(out, 2)
    text = capsys.readouterr().out
    assert message in text and ". The folder is now called damaged_step_000004_2" in text
    assert C.list_checkpoints(out) == [step_dir(out, 2)] and start(step_dir(out, 2)) == start("auto") == step_dir(
        out, 2
    )
    C.save_checkpoint(out, 3, {"policy": (policy, optimizer)}, 2)
    assert list_names(out) == ["damaged_step_000004", "damaged_step_000004_2", "step_000002", "step_000003"]
    for step in (2, 3):
        flip_bit(step_dir(out, step) / SHARD)
    with pytest.raises(UserError, match=f"no intact checkpoint: .*3/{SHARD}: .*2/{SHARD}: .*restore these files"):
        start("auto")
    assert list_names(out)[2:] == ["step_000002", "step_000003"]


def test_a_run_resumes_only_with_the_same_adapters(copy, toys):
    _, _, out = copy
    (out / "run.json").unlink()
    rewrite_trainer_state(step_dir(out, 4), parts=["lora_rank_4"])
    common = f"--model {toys['qwen2_5_vl']} --data d --out {out} --steps 9 --resume auto --lora-rank 4".split()
    cfg = train.parse_args(common)
    (out / "run.json").write_text(json.dumps({"args": cfg.to_flags()}))
    assert find_start(cfg) == step_dir(out, 4)
    for flag, message in (("--lora-alpha 3", "alpha was 32.0 and is 3.0"), ("--lora-targets q_proj", "is ..q_proj")):
        with pytest.raises(UserError, match=f"the checkpoint does not fit: .*{message}"):
            find_start(train.parse_args([*common, *flag.split()]))


def test_adapters_are_not_used_with_other_weights_than_they_were_trained_on(copy, toys, tmp_path):
    _, _, out = copy
    base = Path(shutil.copytree(toys["qwen2_5_vl"], tmp_path / "base"))
    rewrite_trainer_state(step_dir(out, 4), parts=["lora_rank_4"], base=C.base_checksum(str(base)))
    cfg = train.parse_args(f"--model {base} --data d --out {out} --steps 9 --resume auto --lora-rank 4".split())
    (out / "run.json").write_text(json.dumps({"args": cfg.to_flags()}))
    assert find_start(cfg) == step_dir(out, 4)
    flip_bit(base / "model.safetensors", offset=-1)
    for use in (lambda: find_start(cfg), lambda: C.TrainedWeights(str(out))):
        with pytest.raises(UserError, match="000004: its adapters were trained on other weights than '.*base' has now"):
            use()


def test_resume_refuses_flags_that_change_the_weights_or_the_data_position(copy, toys):
    _, _, out = copy
    (out / "run.json").unlink()
    rewrite_trainer_state(step_dir(out, 4), parts=[])
    common = ["--model", toys["qwen2_5_vl"], "--data", "d", "--out", out, "--steps", 9, "--resume", "auto"]
    cfg = train.parse_args(list(map(str, common)))
    (out / "run.json").write_text(json.dumps({"args": cfg.to_flags()}))
    assert find_start(cfg) == step_dir(out, 4)
    flags = {"--model": toys["qwen2_vl"], "--prompts-per-step": 8, "--train-vision": "all", "--seed": 1}
    for flag, value in flags.items():
        with pytest.raises(UserError, match=f"the checkpoint does not fit: {flag} was .* and is {value}; keep it"):
            find_start(train.parse_args(list(map(str, [*common, flag, value]))))


def test_resume_refuses_other_rows(copy, toys):
    _, _, out = copy
    rows = [SimpleNamespace(uid=f"row{i}", ground_truth=str(i)) for i in range(4)]
    rewrite_trainer_state(step_dir(out, 4), parts=[], data=resume.describe_data(rows))
    cfg = start_args(toys["qwen2_5_vl"], out, "auto")
    moved = [SimpleNamespace(uid=row.uid, ground_truth=str(3 - i)) for i, row in enumerate(rows)]
    for other in (rows[:3], [*rows, rows[0]], rows[::-1], moved):  # fewer, more, another order, uids that are numbers
        with pytest.raises(UserError, match=rf"--data had 4 rows, .* but now has {len(other)} rows, .*; restore"):
            find_start(cfg, resume.describe_data(other))
    assert find_start(cfg, resume.describe_data(list(rows))) == step_dir(out, 4)


def test_a_named_checkpoint_is_resumed_if_all_newer_ones_are_damaged(copy, toys):
    _, _, out = copy
    flip_bit(step_dir(out, 4) / SHARD)
    assert find_start(start_args(toys["qwen2_5_vl"], out, step_dir(out, 2))) == step_dir(out, 2)
    assert list_names(out) == ["damaged_step_000004", "step_000002"]


def test_a_checkpoint_without_checksums_is_damaged(copy, capsys):
    _, _, out = copy
    trainer = C.read_trainer_state(step_dir(out, 4))
    (step_dir(out, 4) / "trainer.json").write_text(json.dumps(trainer) + "\n")
    assert "trainer.json: damaged: its checksum is not" in C.find_damage(step_dir(out, 4))
    (step_dir(out, 4) / "trainer.json").write_text(C.to_text_with_crc({"step": 4}))
    assert f"{SHARD} is not part of this checkpoint" in C.find_damage(step_dir(out, 4)) and load_first_value(out) == 2


# --- names, leftovers, order -----------------------------------------------------------------------------------------


def test_only_numbered_checkpoints_count_in_numeric_order(copy, toys, capsys):
    policy, optimizer, out = copy
    shutil.copytree(step_dir(out, 2), out / "checkpoints" / "step_backup")
    shutil.copytree(step_dir(out, 2), out / "checkpoints" / "step_000002.bak")
    assert find_start(start_args(toys["qwen2_5_vl"], out, "auto")) == step_dir(out, 4)
    C.save_checkpoint(out, 999_999, {"policy": (policy, optimizer)}, 2)
    C.save_checkpoint(out, 1_000_000, {"policy": (policy, optimizer)}, 2)
    assert C.list_checkpoints(out) == [step_dir(out, 999_999), step_dir(out, 1_000_000)]
    assert list_names(out) == ["step_000002.bak", "step_1000000", "step_999999", "step_backup"]
    os.rename(step_dir(out, 1_000_000), step_dir(out, 1_000_001))  # trainer.json still says 1000000
    assert find_start(start_args(toys["qwen2_5_vl"], out, "auto")) == step_dir(out, 999_999)
    assert "of step 1000000, but its folder is named after another step" in capsys.readouterr().out


def test_leftovers_are_removed_but_never_the_newest_checkpoint(copy):
    policy, optimizer, out = copy
    for name in (".step_000003", ".step_000001.old", "step_000099"):
        (out / "checkpoints" / name).mkdir()
    shutil.copytree(step_dir(out, 4), step_dir(out, 60))  # for example of an earlier run whose metrics were deleted
    C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 1)
    assert step_dir(out, 6).is_dir() and list_names(out) == ["step_000006", "step_000060", "step_000099"]
    C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 2)  # overwrite it
    assert C.find_damage(step_dir(out, 6)) is None and list_names(out) == ["step_000006", "step_000060", "step_000099"]


def test_all_files_are_flushed_to_disk_before_the_rename(copy, monkeypatch):
    policy, optimizer, out = copy
    calls, real = [], (os.fsync, os.rename)

    def fsync(handle):
        calls.append(os.readlink(f"/proc/self/fd/{handle}"))
        real[0](handle)

    def rename(old, new):
        calls.append((str(old), str(new)))
        real[1](old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 9)
    renamed = calls.index((str(out / "checkpoints" / ".step_000006"), str(step_dir(out, 6))))
    before, after = calls[:renamed], calls[renamed + 1 :]
    written = {Path(path).name for path in before if isinstance(path, str)}
    assert {SHARD, "trainer.json", ".step_000006"} <= written
    assert before[-2:] == [f"{out}/checkpoints/.step_000006/trainer.json", f"{out}/checkpoints/.step_000006"]
    assert f"{out}/checkpoints" in after


# --- full disks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", folder], capture_output=True).returncode
    ):
        pytest.skip("may not mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("late", [False, True])
def test_a_full_disk_is_named_and_loses_nothing(late, saved, small_disk, monkeypatch):
    policy, optimizer, _ = saved
    out = small_disk / "run"
    C.save_checkpoint(out, 2, {"policy": (policy, optimizer)}, 2)
    usage = shutil.disk_usage
    if late:  # someone else fills the disk during the save, so the first check sees another disk
        first = iter([ROOT])
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(next(first, path)))
    free = usage(small_disk).free
    message = rf"--out {out}: .* step 4 needs 0.0038\d GB: no space left .* \({free / 1e9:.3g} GB free\)"
    with pytest.raises(UserError, match=f"{message}; continue from {step_dir(out, 2)} with --resume auto"):
        C.save_checkpoint(out, 4, {"policy": (policy, optimizer)}, 2)
    assert list_names(out) == ["step_000002"] and C.find_damage(step_dir(out, 2)) is None


@pytest.mark.parametrize("where", ["trainer.json", "tensors", "other"])
def test_a_write_that_fails_late_leaves_no_checkpoint(where, copy, monkeypatch):
    policy, optimizer, out = copy

    def fail(*_, **__):
        raise OSError(errno.EDQUOT if where != "other" else errno.EIO, "the disk says no")

    if where == "trainer.json":
        monkeypatch.setattr(C, "fsync_path", fail)
    else:
        monkeypatch.setattr(HuggingFaceStorageWriter, "finish", fail)
    with pytest.raises(
        OSError if where == "other" else UserError, match="the disk says no" if where == "other" else "no space left"
    ):
        C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 1)
    assert list_names(out) == ["step_000002", "step_000004"]


def test_errors_of_torch_keep_their_traceback(copy, monkeypatch):
    policy, optimizer, out = copy
    monkeypatch.setattr(HuggingFaceStorageWriter, "finish", lambda *_, **__: 1 // 0)
    with pytest.raises(CheckpointException, match="ZeroDivisionError"):
        C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 1)
    assert list_names(out) == ["step_000002", "step_000004"]


# --- several processes, and the programs -----------------------------------------------------------------------------


def test_two_ranks_decide_the_same(toys, tmp_path):
    run([*TORCHRUN, 2, "tests/checkpoint_worker.py", toys["qwen2_5_vl"], tmp_path])
    messages = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert messages[0] == messages[1]
    nan, full, trainer, damaged, start, model = messages[0]
    assert f"after step 6 model.hf.{WEIGHT} holds NaN" in nan and "step_000004" in nan
    for message in (full, trainer):
        assert "the checkpoint of step 6 needs" in message and "no space left" in message
    assert "shard-00002-model-00001-of-00001.safetensors: damaged" in damaged and start.endswith("step_000002")
    assert f"{WEIGHT} of" in model and "holds NaN" in model
    assert list_names(tmp_path / "run") == ["damaged_step_000004", "step_000002"]


@pytest.mark.slow
def test_a_run_resumes_from_another_runs_newest_intact_checkpoint(toys, shapes, tmp_path, capsys):  # noqa: F811
    command = [sys.executable, "train.py", *flags(toys["qwen2_5_vl"], shapes[0], tmp_path / "a", "--save-every", 1)]
    run([*command, "--steps", 2])
    flip_bit(step_dir(tmp_path / "a", 2) / SHARD)
    command[command.index(tmp_path / "a")] = tmp_path / "b"
    done = run([*command, "--steps", 2, "--resume", tmp_path / "a"])
    assert f"skipped: {step_dir(tmp_path / 'a', 2)}/{SHARD}" in done.stdout
    assert f"resumed from {step_dir(tmp_path / 'a', 1)} after step 1" in done.stdout
    resumed, original = (
        [{k: v for k, v in row.items() if k[:5] not in ("time/", "perf/")} for row in rows(tmp_path / x)] for x in "ba"
    )
    assert resumed == original[1:] and list_names(tmp_path / "b") == ["step_000002"]
    merge_lora.main(merge_lora.parse_args([str(tmp_path / "a"), "--out", str(tmp_path / "hf")]))
    output = capsys.readouterr().out
    assert f"wrote {tmp_path / 'hf'} from {step_dir(tmp_path / 'a', 1)}" in output and "skipped: " in output


def test_resume_needs_a_checkpoint_or_a_run_that_has_one(toys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text("{}")
    for source in (toys["qwen2_5_vl"], tmp_path / "empty"):
        with pytest.raises(UserError, match=f"--resume {source}: expected no, auto, a complete checkpoint or a run"):
            find_start(start_args(toys["qwen2_5_vl"], tmp_path / "out", source))
    with pytest.raises(UserError, match="--resume .*/emty: there is no such folder; .*did you mean .*/empty"):
        find_start(start_args(toys["qwen2_5_vl"], tmp_path / "out", tmp_path / "emty"))


def test_a_run_that_ended_before_its_first_checkpoint_keeps_its_settings(toys, tmp_path):
    settings = {"model": str(toys["qwen2_5_vl"]), "data": "d", "steps": 7, "lr": 3e-4}
    (tmp_path / "run.json").write_text(json.dumps({"args": settings}))
    cfg = train.parse_args(["--out", str(tmp_path), "--resume", "auto", "--steps", "9"])
    assert (cfg.run.steps, cfg.optim.lr, cfg.data.data) == (9, 3e-4, "d")
    with pytest.raises(UserError, match="no checkpoint in --out .*new, and a new run needs --model --data --steps"):
        train.parse_args(["--out", str(tmp_path / "new"), "--resume", "auto"])


def test_imports_run_one_way():
    for name in ("rollout.py", "model.py", "utils.py", "errors.py"):
        nodes = ast.walk(ast.parse((ROOT / name).read_text()))
        assert not any(isinstance(n, ast.ImportFrom) and n.module.startswith("parallel") for n in nodes), name
