"""Loading into shards: memory, equality, damaged files.   pytest tests/test_loading.py"""

import json
import shutil

import pytest
import torch
from conftest import FAMILIES
from safetensors.torch import load_file, save_file
from test_train import TORCHRUN, run

import demo
import model as M
import sharding


def load(path, world, out, small, tp=1):
    run([*TORCHRUN, world, "tests/load_worker.py", path, out, small, tp])
    return json.loads(out.read_text())


@pytest.mark.parametrize("tied,tp", [(False, 1), (True, 1), (False, 2)])
def test_two_processes_hold_half_each_even_while_loading(tied, tp, toys, tmp_path):
    demo.make_model(tmp_path / "model", hidden=512, layers=4, vocab=8192, tied=tied)
    for part in load(tmp_path / "model", 2, tmp_path / "out.json", toys["qwen2_5_vl"], tp):
        assert part["whole"] > (45 if tied else 60) * 2**20 and part["equal"] == [True] * 3 and part["tied"] == tied
        print(f"tied {tied}, tp {tp}: peak {part['peak'] / part['whole']:.2f} x {part['whole'] / 2**20:.0f} MiB")
        assert 0.45 * part["whole"] < part["peak"] < 0.75 * part["whole"]


def test_uneven_and_empty_shards(toys, tmp_path):
    """Parts of three shards; and decay rates, of which there are fewer than processes."""
    for part in load(toys["qwen3_5"], 6, tmp_path / "out.json", toys["qwen2_5_vl"], tp=2):
        assert part["equal"] == [True] * 3


def sharded(path, tmp_path):
    """The same model in several files, with the older names that the hub has for Qwen2.5-VL."""
    tensors, out = load_file(path / "model.safetensors"), tmp_path / "several"
    shutil.copytree(path, out)
    (out / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        part = {n.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensors[n] for n in names[i::3]}
        save_file(part, out / file)
        index |= dict.fromkeys(part, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return out


def test_several_files_and_older_names(toys, tmp_path):
    [part] = load(sharded(toys["qwen2_5_vl"], tmp_path), 1, tmp_path / "out.json", toys["qwen2_5_vl"])
    assert part["equal"] == [True] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_built_without_weights_is_the_same_model(family, toys):
    ours, theirs = sharding.meta_hf(str(toys[family])), M.load_hf(str(toys[family]))
    names = [n for n, p in ours.named_parameters()]
    assert names == [n for n, _ in theirs.named_parameters()] and all(p.is_meta for p in ours.parameters()) == ("moe" not in family)
    buffers = dict(theirs.named_buffers())
    assert buffers.keys() == dict(ours.named_buffers()).keys()
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_damaged_and_missing_files_are_named(toys, tmp_path):
    folder = sharded(toys["qwen2_5_vl"], tmp_path)
    file = folder / "model-00002-of-00003.safetensors"
    data = file.read_bytes()
    damaged = bytearray(data)
    damaged[8:12] = b"oops"
    for content, words in [
        (data[:-1], "truncated or damaged"), (data[: len(data) // 2], "truncated or damaged"), (data[:6], "truncated or no safetensors"),
        (b"\xff" * 8 + data[8:], "truncated or no safetensors"), (bytes(damaged), "its header is damaged"), (b"", "truncated or no"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"model-00002-of-00003.safetensors: .*{words}"):
            sharding.tensors_of(file)
    file.unlink()
    with pytest.raises(ValueError, match="no model-00002-of-00003.safetensors there \\(1 of 3"):
        sharding.weight_files(str(folder))
    tensors = sharding.tensors_of(folder / "model-00001-of-00003.safetensors")
    save_file({"model.norm.weight": torch.ones(64)}, file)
    assert len(tensors) > 10
    done = run([*TORCHRUN, 1, "tests/load_worker.py", folder, tmp_path / "out.json", toys["qwen2_5_vl"]], check=False)
    assert done.returncode and "tensors are in none of model-00001" in done.stderr
