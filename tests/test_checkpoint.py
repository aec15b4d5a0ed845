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
    """A policy, its optimizer, and a run with checkpoints of steps 2 and 4, in which one weight equals the step."""
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
    """(policy, optimizer, a copy of the run)"""
    policy, optimizer, out = saved
    weight(policy).fill_(7)
    yield policy, optimizer, Path(shutil.copytree(out, tmp_path / "run"))
    weight(policy).fill_(7)
    next(iter(optimizer.state.values()))["exp_avg"].to_local().zero_()


def find_start(cfg):
    """Of a run with these settings."""
    return resume.find_resume_checkpoint(
        Path(cfg.run.out), cfg.run.resume, cfg.to_flags(), checkpoint_parts(cfg.model, cfg.algo)
    )


def start_flags(toy, out):
    return ["--model", str(toy), "--data", "d", "--out", str(out), "--steps", "9"]


def start_args(toy, out, resume):
    return train.parse_args([*start_flags(toy, out), "--resume", str(resume)])


def at(out, step):
    return out / "checkpoints" / f"step_{step:06d}"


def held(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def flip(file, at=None, bit=0):
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1 << bit
    file.write_bytes(content)


def rewrite(checkpoint, **changed):
    (checkpoint / "trainer.json").write_text(C.to_text_with_crc(C.read_trainer_state(checkpoint) | changed))


def first_value(out):
    return dict(C.load_model_or_checkpoint(str(out)).named_parameters())[WEIGHT].flatten()[0].item()


def forge(checkpoint, more=()):
    """Checksums as they would be had these files been written."""
    trainer = {
        key: value for key, value in json.loads((checkpoint / "trainer.json").read_text()).items() if key != "crc32"
    }
    trainer["files"] = {name: C.file_checksum(checkpoint / name) for name in [*trainer["files"], *more]}
    (checkpoint / "trainer.json").write_text(C.to_text_with_crc(trainer))


# --- what eval.py holds ----------------------------------------------------------------------------------------------


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
    """Two processes, in bfloat16. The engine gets a merge in fp32 rounded to bfloat16, bit for bit."""
    demo.make_model(tmp_path / "model", "qwen2_5_vl", hidden=512, layers=8, vocab=4096)
    paths = [tmp_path / "model", *(save_run(tmp_path / "model", tmp_path / f"rank{rank}", rank) for rank in (0, 8))]
    run([*TORCHRUN, 2, "tests/eval_worker.py", toys["qwen2_5_vl"], tmp_path / "out.json", *paths])
    for part in json.loads((tmp_path / "out.json").read_text()):
        for path, found in zip(paths, part, strict=True):
            print(f"{path.name}: peak {found['peak'] / 2**20:.0f} MiB of {found['whole'] / 2**20:.0f}")
            assert found["equal"] and found["whole"] > 100e6
            # the largest tensor four times: as read, in fp32, merged, in bfloat16; and 20 MB for code
            assert found["peak"] < 4 * found["largest"] + 20e6


# --- weights that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e25])
def test_weights_that_nothing_survives_are_never_saved(value, copy):
    policy, optimizer, out = copy
    before = held(out)
    weight(policy)[3, 5] = value
    with pytest.raises(
        UserError, match=f"after step 6 model.hf.{WEIGHT} holds NaN.*no checkpoint.*{at(out, 4)}.*--resume auto"
    ):
        C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 1)
    assert held(out) == before
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
    assert held(out) == ["step_000002", "step_000004", "step_000005"]


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e38])
def test_bad_weights_are_named_when_they_are_read(value, toys, tmp_path):
    shutil.copytree(toys["qwen2_5_vl"], tmp_path / "toy")
    tensors = load_file(tmp_path / "toy" / "model.safetensors")
    next(tensors[name] for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))[1, 2] = value
    save_file(tensors, tmp_path / "toy" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{WEIGHT} of {tmp_path}/toy/model.safetensors holds NaN"):
        build(tmp_path / "toy")
    with pytest.raises(UserError, match=f"{tmp_path}/toy: {WEIGHT} holds NaN"):
        C.load_model_or_checkpoint(str(tmp_path / "toy"))


def test_bad_weights_of_a_checkpoint_are_named_when_they_are_read(copy, monkeypatch):
    policy, optimizer, out = copy
    weight(policy)[3, 5] = math.nan
    monkeypatch.setattr(
        C, "find_nonfinite", lambda tensors: None
    )  # as an earlier version, which saved what it was given
    C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 9)
    monkeypatch.undo()
    with pytest.raises(UserError, match=f"{at(out, 6)}: model.hf.{WEIGHT} holds NaN.*remove this checkpoint"):
        C.load_checkpoint(at(out, 6), {"policy": (policy, optimizer)})
    with pytest.raises(UserError, match=f"{at(out, 6)}: {WEIGHT} holds NaN"):
        C.load_model_or_checkpoint(str(out))


# --- forged files, and those of earlier versions ---------------------------------------------------------------------

FORGED = "step_000004: its safetensors files are damaged or forged; use another checkpoint: "


class Program:
    """Makes a file when it is unpickled."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


def refused_everywhere(out, policy, optimizer, toy, match):
    """By what eval.py, merge_lora.py and train.py --resume load with, given the run or the checkpoint."""
    weight(policy).fill_(7)
    for path in (out, at(out, 4)):
        with pytest.raises(UserError, match=match):
            C.load_model_or_checkpoint(str(path))
        with pytest.raises(UserError, match=match):
            find_start(start_args(toy, out, path))
    assert held(out) == ["step_000002", "step_000004"] and (weight(policy) == 7).all()


@pytest.mark.parametrize("names", [[".metadata", "__0_0.distcp"], ["__1_0.distcp"], [".metadata"]])
def test_checkpoints_of_earlier_versions_are_named_and_never_unpickled(names, copy, toys, tmp_path):
    """Beside safetensors and listed as the checkpoint's own, or alone: nothing reads a pickle."""
    policy, optimizer, out = copy
    for name in names:
        (at(out, 4) / name).write_bytes(pickle.dumps(Program(tmp_path / "witness")))
    match = f"step_000004/({'|'.join(names)}): written by a version before 2026-11-25.*CHANGELOG.md names the last"
    refused_everywhere(out, policy, optimizer, toys["qwen2_5_vl"], match)
    forge(at(out, 4), names)
    refused_everywhere(out, policy, optimizer, toys["qwen2_5_vl"], match)
    (at(out, 4) / SHARD).unlink()
    refused_everywhere(out, policy, optimizer, toys["qwen2_5_vl"], match)
    assert not (tmp_path / "witness").exists()
    pickle.loads((at(out, 4) / names[0]).read_bytes())
    assert (tmp_path / "witness").exists()  # it would have


@pytest.mark.parametrize("name", [SHARD, "trainer.json"])
def test_a_pickle_in_place_of_a_checkpoints_file_is_never_read(name, copy, toys, tmp_path):
    policy, optimizer, out = copy
    for dump in (torch.save, lambda program, file: file.write_bytes(pickle.dumps(program))):
        dump(Program(tmp_path / "witness"), at(out, 4) / name)
        if name == SHARD:
            forge(at(out, 4))
            assert C.find_damage(at(out, 4)) is None  # whoever forges the one forges the other
            with pytest.raises(UserError, match=f"{FORGED}.*header"):
                C.load_model_or_checkpoint(str(out))
            with pytest.raises(UserError, match=f"{FORGED}.*header"):
                C.load_checkpoint(at(out, 4), {"policy": (policy, optimizer)})
        else:
            with pytest.raises(UserError, match="no intact checkpoint: .*trainer.json: missing, empty, cut"):
                C.load_model_or_checkpoint(str(at(out, 4)))
    assert not (tmp_path / "witness").exists()


OFFSETS = {"": None, "text": "x", "a number": {f"model.hf.{WEIGHT}": {"saved_offsets": 5}}, "nothing": {},
           "too far": {f"model.hf.{WEIGHT}": {"saved_offsets": [2**70, 0]}},
           "words": {f"model.hf.{WEIGHT}": {"saved_offsets": ["a", "b"]}}}  # fmt: skip


@pytest.mark.parametrize("offsets", OFFSETS)
def test_a_forged_header_is_refused(offsets, copy):
    """What torch's reader takes from a header beyond what safetensors checks."""
    policy, optimizer, out = copy
    file = at(out, 4) / SHARD
    value = "[" * 99 if offsets == "" else json.dumps(OFFSETS[offsets])
    save_file(load_file(file), file, metadata={"DCP_SHARDING_INFO": value})
    with pytest.raises(UserError, match=FORGED):
        C.load_checkpoint(at(out, 4), {"policy": (policy, optimizer)})


def test_a_file_of_another_checkpoint_is_named_and_not_read(copy, toys):
    """torch's reader takes tensors from every safetensors file of a folder."""
    policy, optimizer, out = copy
    os.link(at(out, 2) / SHARD, at(out, 4) / "shard-00002-model-00001-of-00001.safetensors")
    assert "shard-00002-model-00001-of-00001.safetensors is not part of this checkpoint" in C.find_damage(at(out, 4))
    assert first_value(out) == 2


def test_only_tensors_are_saved(copy):
    policy, optimizer, out = copy
    next(iter(optimizer.state.values()))["n"] = 3
    with pytest.raises(TypeError, match=r"holds tensors only, but \['optimizer.state.*\.n'\] are not tensors"):
        C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 1)
    del next(iter(optimizer.state.values()))["n"]
    assert held(out) == ["step_000002", "step_000004"]


def test_a_process_writes_several_files_and_none_is_a_pickle(copy, monkeypatch):
    """torch holds a whole file in memory before it writes it, so each is kept small."""
    policy, optimizer, out = copy
    monkeypatch.setattr(C, "FILE_BYTES", 2**19)
    C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 9)
    files = sorted(file for file in at(out, 6).iterdir() if file.name != "trainer.json")
    largest = max(p.nbytes for p in policy.parameters())
    assert len(files) > 3 and all(file.stat().st_size < 2**19 + largest + 50_000 for file in files)
    for file in files:
        with safe_open(file, "pt") as tensors:
            assert tensors.keys()
    weight(policy).fill_(1)
    C.load_checkpoint(at(out, 6), {"policy": (policy, optimizer)})
    assert (weight(policy) == 7).all() and first_value(out) == 7


# --- damage ----------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_noticed_and_its_file_named(copy):
    _, _, out = copy
    assert C.find_damage(at(out, 4)) is None
    for file in [at(out, 4) / SHARD]:
        size = file.stat().st_size
        for place, bit in ((0, 7), (size // 3, 0), (size - 1, 3)):
            flip(file, place, bit)
            assert str(file) in C.find_damage(at(out, 4)) and "checksum" in C.find_damage(at(out, 4))
            flip(file, place, bit)
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        assert f"{file}: damaged: its size and checksum are [{size - 1}, " in C.find_damage(at(out, 4))
        file.unlink()
        assert f"No such file or directory: '{file}'" in C.find_damage(at(out, 4))
        file.write_bytes(content)
    file = at(out, 4) / "trainer.json"
    for place in range(file.stat().st_size - 1):  # the last byte ends the line
        flip(file, place, place % 8)
        assert str(file) in (C.find_damage(at(out, 4)) or ""), file.read_bytes()
        flip(file, place, place % 8)
    assert C.find_damage(at(out, 4)) is None and C.read_trainer_state(at(out, 4))["kl_coef"] == 0.1 + 1e-17


@pytest.mark.parametrize("content", ["", '{"step": 4', "[]", "\xff\xfe", "{}", "[" * 100_000])
def test_a_cut_trainer_json_is_named_and_passed_over(content, copy, toys, capsys):
    _, _, out = copy
    (at(out, 4) / "trainer.json").write_text(content, encoding="latin1")
    with pytest.raises(UserError, match="no intact checkpoint: .*step_000004/trainer.json: "):
        find_start(start_args(toys["qwen2_5_vl"], out, at(out, 4)))
    assert first_value(out) == 2 and f"skipped: {at(out, 4)}/trainer.json" in capsys.readouterr().out


def test_a_cut_run_json_is_named(copy, toys):
    _, _, out = copy
    for content in ("", "{}", '{"args": {"mod'):
        (out / "run.json").write_text(content)
        with pytest.raises(UserError, match=f"{out}/run.json: "):
            C.resolve_model(str(out))
        with pytest.raises(UserError, match=f"{out}/run.json: "):
            find_start(start_args(toys["qwen2_5_vl"], out, "auto"))
    (out / "run.json").unlink()
    with pytest.raises(UserError, match=f"is a checkpoint without its run: no run.json two folders above {at(out, 4)}"):
        C.resolve_model(str(at(out, 4)))


def test_resume_falls_back_to_the_newest_intact_checkpoint(copy, toys, capsys):
    policy, optimizer, out = copy

    def start(where, to=out):
        return find_start(start_args(toys["qwen2_5_vl"], to, where))

    assert start("auto") == start(out) == start(at(out, 4)) == at(out, 4)
    with pytest.raises(UserError, match="holds one history"):
        start(at(out, 2))
    with pytest.raises(UserError, match="already holds a run"):
        start("no")
    flip(at(out, 4) / SHARD)
    capsys.readouterr()
    # to read from it, or go on elsewhere, changes nothing there
    assert first_value(out) == 2 and start(out, to=out.parent / "new") == at(out, 2)
    told = f"skipped: {at(out, 4)}/{SHARD}: damaged: its size and checksum are"
    assert capsys.readouterr().out.count(told) == 2 and held(out) == ["step_000002", "step_000004"]
    for damaged in (lambda: start(at(out, 4)), lambda: C.load_model_or_checkpoint(str(at(out, 4)))):
        with pytest.raises(UserError, match=f"{at(out, 4)}: no intact checkpoint: .*{SHARD}"):
            damaged()
    assert held(out) == ["step_000002", "step_000004"]
    shutil.copytree(at(out, 4), out / "checkpoints" / "damaged_step_000004")  # one of an earlier time
    assert start("auto") == at(out, 2)
    text = capsys.readouterr().out
    assert told in text and ". The folder is now called damaged_step_000004_2" in text
    assert C.list_checkpoints(out) == [at(out, 2)] and start(at(out, 2)) == start("auto") == at(out, 2)
    C.save_checkpoint(out, 3, {"policy": (policy, optimizer)}, 2)
    assert held(out) == ["damaged_step_000004", "damaged_step_000004_2", "step_000002", "step_000003"]
    for step in (2, 3):
        flip(at(out, step) / SHARD)
    with pytest.raises(UserError, match=f"no intact checkpoint: .*3/{SHARD}: .*2/{SHARD}: .*restore these files"):
        start("auto")
    assert held(out)[2:] == ["step_000002", "step_000003"]


def test_a_run_with_adapters_goes_on_with_the_same_adapters(copy, toys):
    _, _, out = copy
    (out / "run.json").unlink()
    rewrite(at(out, 4), parts=["lora_rank_4"])
    common = f"--model {toys['qwen2_5_vl']} --data d --out {out} --steps 9 --resume auto --lora-rank 4".split()
    cfg = train.parse_args(common)
    (out / "run.json").write_text(json.dumps({"args": cfg.to_flags()}))
    assert find_start(cfg) == at(out, 4)
    for more, told in (("--lora-alpha 3", "alpha was 32.0 and is 3.0"), ("--lora-targets q_proj", "is ..q_proj")):
        with pytest.raises(UserError, match=f"the checkpoint does not fit: .*{told}"):
            find_start(train.parse_args([*common, *more.split()]))


def test_what_the_weights_or_the_place_in_the_data_depend_on_stays(copy, toys):
    _, _, out = copy
    (out / "run.json").unlink()
    rewrite(at(out, 4), parts=[])
    common = ["--model", toys["qwen2_5_vl"], "--data", "d", "--out", out, "--steps", 9, "--resume", "auto"]
    cfg = train.parse_args(list(map(str, common)))
    (out / "run.json").write_text(json.dumps({"args": cfg.to_flags()}))
    assert find_start(cfg) == at(out, 4)
    for flag, value in (("--model", toys["qwen2_vl"]), ("--prompts-per-step", 8), ("--train-vision", "all")):
        with pytest.raises(UserError, match=f"the checkpoint does not fit: {flag} was .* and is {value}; keep it"):
            find_start(train.parse_args(list(map(str, [*common, flag, value]))))


def test_a_named_checkpoint_goes_on_where_only_damaged_ones_are_newer(copy, toys):
    _, _, out = copy
    flip(at(out, 4) / SHARD)
    assert find_start(start_args(toys["qwen2_5_vl"], out, at(out, 2))) == at(out, 2)
    assert held(out) == ["damaged_step_000004", "step_000002"]


def test_a_checkpoint_without_checksums_is_damaged(copy, capsys):
    _, _, out = copy
    trainer = C.read_trainer_state(at(out, 4))
    (at(out, 4) / "trainer.json").write_text(json.dumps(trainer) + "\n")
    assert "trainer.json: damaged: its checksum is not" in C.find_damage(at(out, 4))
    (at(out, 4) / "trainer.json").write_text(C.to_text_with_crc({"step": 4}))
    assert f"{SHARD} is not part of this checkpoint" in C.find_damage(at(out, 4)) and first_value(out) == 2


# --- names, leftovers, order -----------------------------------------------------------------------------------------


def test_only_names_of_digits_count_and_in_the_order_of_numbers(copy, toys, capsys):
    policy, optimizer, out = copy
    shutil.copytree(at(out, 2), out / "checkpoints" / "step_backup")
    shutil.copytree(at(out, 2), out / "checkpoints" / "step_000002.bak")
    assert find_start(start_args(toys["qwen2_5_vl"], out, "auto")) == at(out, 4)
    C.save_checkpoint(out, 999_999, {"policy": (policy, optimizer)}, 2)
    C.save_checkpoint(out, 1_000_000, {"policy": (policy, optimizer)}, 2)
    assert C.list_checkpoints(out) == [at(out, 999_999), at(out, 1_000_000)]
    assert held(out) == ["step_000002.bak", "step_1000000", "step_999999", "step_backup"]
    os.rename(at(out, 1_000_000), at(out, 1_000_001))  # a name that says another step than the file
    assert find_start(start_args(toys["qwen2_5_vl"], out, "auto")) == at(out, 999_999)
    assert "of step 1000000, but its folder is named after another step" in capsys.readouterr().out


def test_leftovers_are_removed_and_the_newest_never(copy):
    policy, optimizer, out = copy
    for name in (".step_000003", ".step_000001.old", "step_000099"):
        (out / "checkpoints" / name).mkdir()
    shutil.copytree(at(out, 4), at(out, 60))  # of another history, whose metrics were deleted, say
    C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 1)
    assert at(out, 6).is_dir() and held(out) == ["step_000006", "step_000060", "step_000099"]
    C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 2)  # again
    assert C.find_damage(at(out, 6)) is None and held(out) == ["step_000006", "step_000060", "step_000099"]


def test_everything_is_on_the_disk_before_it_has_its_name(copy, monkeypatch):
    policy, optimizer, out = copy
    done, real = [], (os.fsync, os.rename)

    def fsync(handle):
        done.append(os.readlink(f"/proc/self/fd/{handle}"))
        real[0](handle)

    def rename(old, new):
        done.append((str(old), str(new)))
        real[1](old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 9)
    named = done.index((str(out / "checkpoints" / ".step_000006"), str(at(out, 6))))
    before, after = done[:named], done[named + 1 :]
    written = {Path(path).name for path in before if isinstance(path, str)}
    assert {SHARD, "trainer.json", ".step_000006"} <= written
    assert before[-2:] == [f"{out}/checkpoints/.step_000006/trainer.json", f"{out}/checkpoints/.step_000006"]
    assert f"{out}/checkpoints" in after


# --- disks that are full ---------------------------------------------------------------------------------------------


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
    if late:  # someone else fills the disk meanwhile: the first look at it is at another
        first = iter([ROOT])
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(next(first, path)))
    free = usage(small_disk).free
    needs = rf"--out {out}: the checkpoint of step 4 needs 38\d{{5}} bytes: no space left .* \({free} bytes free\)"
    with pytest.raises(UserError, match=f"{needs}; continue from {at(out, 2)} with --resume auto"):
        C.save_checkpoint(out, 4, {"policy": (policy, optimizer)}, 2)
    assert held(out) == ["step_000002"] and C.find_damage(at(out, 2)) is None


@pytest.mark.parametrize("where", ["trainer.json", "tensors", "other"])
def test_writing_that_fails_late(where, copy, monkeypatch):
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
    assert held(out) == ["step_000002", "step_000004"]


def test_errors_of_torch_keep_their_traceback(copy, monkeypatch):
    policy, optimizer, out = copy
    monkeypatch.setattr(HuggingFaceStorageWriter, "finish", lambda *_, **__: 1 // 0)
    with pytest.raises(CheckpointException, match="ZeroDivisionError"):
        C.save_checkpoint(out, 6, {"policy": (policy, optimizer)}, 1)
    assert held(out) == ["step_000002", "step_000004"]


# --- several processes, and the programs -----------------------------------------------------------------------------


def test_two_processes_decide_alike(toys, tmp_path):
    run([*TORCHRUN, 2, "tests/checkpoint_worker.py", toys["qwen2_5_vl"], tmp_path])
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert told[0] == told[1]
    nan, full, trainer, damaged, start, model = told[0]
    assert f"after step 6 model.hf.{WEIGHT} holds NaN" in nan and "step_000004" in nan
    for told in (full, trainer):
        assert "the checkpoint of step 6 needs" in told and "no space left" in told
    assert "shard-00002-model-00001-of-00001.safetensors: damaged" in damaged and start.endswith("step_000002")
    assert f"{WEIGHT} of" in model and "holds NaN" in model
    assert held(tmp_path / "run") == ["damaged_step_000004", "step_000002"]


@pytest.mark.slow
def test_a_run_goes_on_from_another_runs_newest_intact_checkpoint(toys, shapes, tmp_path, capsys):  # noqa: F811
    command = [sys.executable, "train.py", *flags(toys["qwen2_5_vl"], shapes[0], tmp_path / "a", "--save-every", 1)]
    run([*command, "--steps", 2])
    flip(at(tmp_path / "a", 2) / SHARD)
    command[command.index(tmp_path / "a")] = tmp_path / "b"
    done = run([*command, "--steps", 2, "--resume", tmp_path / "a"])
    assert f"skipped: {at(tmp_path / 'a', 2)}/{SHARD}" in done.stdout
    assert f"resumed from {at(tmp_path / 'a', 1)} after step 1" in done.stdout
    again, first = (
        [{k: v for k, v in row.items() if k[:5] not in ("time/", "perf/")} for row in rows(tmp_path / x)] for x in "ba"
    )
    assert again == first[1:] and held(tmp_path / "b") == ["step_000002"]
    merge_lora.main(merge_lora.parse_args([str(tmp_path / "a"), "--out", str(tmp_path / "hf")]))
    told = capsys.readouterr().out
    assert f"wrote {tmp_path / 'hf'} from {at(tmp_path / 'a', 1)}" in told and "skipped: " in told


def test_resume_wants_a_checkpoint_or_a_run_that_has_one(toys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text("{}")
    for given in (toys["qwen2_5_vl"], tmp_path / "empty"):
        with pytest.raises(UserError, match=f"--resume {given}: expected no, auto, a complete checkpoint or a run"):
            find_start(start_args(toys["qwen2_5_vl"], tmp_path / "out", given))


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
