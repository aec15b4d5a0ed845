"""Loading weights into shards: memory, equality with transformers, damaged files.   pytest tests/test_loading.py"""

import json
import shutil

import pytest
import torch
from conftest import FAMILIES
from safetensors.torch import load_file, save_file
from test_train import TORCHRUN, run

import demo
import model as M
import parallel.loading as loading
from errors import UserError


def load(path, world, out, small, tp=1):
    run([*TORCHRUN, world, "tests/load_worker.py", path, out, small, tp])
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    "family,tied,tp",
    [
        ("qwen2_5_vl", False, 1),
        ("qwen2_5_vl", True, 1),
        ("qwen2_5_vl", False, 2),
        ("qwen3_vl_moe", False, 1),
        ("qwen3_5_moe", False, 1),
    ],
)
def test_two_processes_hold_half_of_the_weights_each_even_while_loading(family, tied, tp, toys, tmp_path):
    demo.make_model(tmp_path / "model", family, hidden=512, layers=4, vocab=8192, tied=tied)
    for part in load(tmp_path / "model", 2, tmp_path / "out.json", toys["qwen2_5_vl"], tp):
        assert part["whole"] > (45 if tied else 60) * 2**20 and part["equal"] == [True] * 3 and part["tied"] == tied
        print(
            f"{family}, tied {tied}, tp {tp}: peak {part['peak'] / part['whole']:.2f} x {part['whole'] / 2**20:.0f} MiB"
        )
        assert 0.45 * part["whole"] < part["peak"] < 0.75 * part["whole"]


@pytest.mark.slow
def test_uneven_and_empty_shards(toys, tmp_path):
    """Tensors are split into three shards, and there are fewer decay rates than processes."""
    for part in load(toys["qwen3_5"], 6, tmp_path / "out.json", toys["qwen2_5_vl"], tp=2):
        assert part["equal"] == [True] * 3


def write_in_several_files(path, tmp_path):
    """Write the model to several files, with the older tensor names of Qwen2.5-VL on the Hub; return the folder."""
    tensors, out = load_file(path / "model.safetensors"), tmp_path / "several"
    shutil.copytree(path, out)
    (out / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        part = {
            n.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensors[n]
            for n in names[i::3]
        }
        save_file(part, out / file)
        index |= dict.fromkeys(part, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return out


def test_several_files_with_older_names_are_loaded(toys, tmp_path):
    [part] = load(write_in_several_files(toys["qwen2_5_vl"], tmp_path), 1, tmp_path / "out.json", toys["qwen2_5_vl"])
    assert part["equal"] == [True] * 3


@pytest.mark.slow
def test_experts_in_one_tensor_are_loaded_in_both_layouts(toys, tmp_path):
    """On the Hub, Qwen3-VL's expert tensors have inputs before outputs; transformers writes them the other way round.
    Qwen3.5's experts may be in one tensor too."""
    files = {f: load_file(toys[f] / "model.safetensors") for f in ("qwen3_vl_moe", "qwen3_5_moe")}
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    assert files["qwen3_vl_moe"][name].shape == (4, 48, 64) and name not in files["qwen3_5_moe"]
    for family in files:
        hf, out = M.load_hf(str(toys[family])), tmp_path / family
        shutil.copytree(toys[family], out)
        tensors = {n: p.detach().contiguous() for n, p in hf.named_parameters()}
        assert tensors[name].shape == (4, 64, 48)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        for folder in (toys[family], out):
            for part in load(folder, 2, tmp_path / "out.json", toys["qwen2_5_vl"]):
                assert part["equal"] == [True] * 3
        save_file(
            tensors | {name: tensors[name][:3].contiguous()}, out / "model.safetensors", metadata={"format": "pt"}
        )
        shapes = {n: list(p.shape) for n, p in hf.named_parameters()}
        with pytest.raises(ValueError, match="experts.down_proj has shape .3, 64, 48.*needs .4, 64, 48"):
            loading.match_parameters(hf, str(out), shapes)


def test_a_missing_expert_is_named(toys, tmp_path):
    hf, out = M.load_hf(str(toys["qwen3_5_moe"])), tmp_path / "model"
    shutil.copytree(toys["qwen3_5_moe"], out)
    tensors = load_file(out / "model.safetensors")
    shapes = {n: list(p.shape) for n, p in hf.named_parameters()}
    assert (
        len(loading.match_parameters(hf, str(out), shapes)["model.language_model.layers.0.mlp.experts.gate_up_proj"])
        == 8
    )
    del tensors["model.language_model.layers.0.mlp.experts.2.up_proj.weight"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="1 tensors are missing or cut: .*layers.0.mlp.experts.gate_up_proj"):
        loading.match_parameters(hf, str(out), shapes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_built_without_weights_has_the_same_names_and_buffers(family, toys):
    ours, theirs = loading.build_meta_model(str(toys[family])), M.load_hf(str(toys[family]))
    names = [n for n, p in ours.named_parameters()]
    assert names == [n for n, _ in theirs.named_parameters()] and all(p.is_meta for p in ours.parameters())
    buffers = dict(theirs.named_buffers())
    assert buffers.keys() == dict(ours.named_buffers()).keys()
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_damaged_and_missing_files_are_named(toys, tmp_path):
    folder, hf = write_in_several_files(toys["qwen2_5_vl"], tmp_path), M.load_hf(str(toys["qwen2_5_vl"]))
    shapes = {n: list(p.shape) for n, p in hf.named_parameters()}
    file = folder / "model-00002-of-00003.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    longer = data[8 : 8 + size].replace(b'"shape":[64', b'"shape":[65', 1)
    for content, reason in [
        (data[:-1], "not fully covered"),
        (data[: len(data) // 2], "not fully covered"),
        (data[:6], "header too small"),
        (b"\xff" * 8 + data[8:], "header too large"),
        (data[:8] + b"oops" + data[12:], "invalid JSON"),
        (b"", "header too small"),
        (data[:8] + longer + data[8 + size :], "invalid shape, data type, or offset"),
    ]:
        file.write_bytes(content)
        with pytest.raises(
            UserError, match=f"model-00002-of-00003.safetensors: truncated, damaged or not a safetensors.*{reason}"
        ):
            loading.match_parameters(hf, str(folder), shapes)
    file.unlink()
    with pytest.raises(UserError, match="1 of 3 weight files are missing: .'model-00002-of-00003"):
        loading.weight_files(str(folder))
    save_file({"model.norm.weight": torch.ones(64)}, file)
    done = run([*TORCHRUN, 1, "tests/load_worker.py", folder, tmp_path / "out.json", toys["qwen2_5_vl"]], check=False)
    assert done.returncode and "tensors are missing or cut: [" in done.stderr
    save_file({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, file)
    with pytest.raises(
        UserError, match="model-00002.*: model.norm.weight is of dtype F8_E4M3, not .*: quantised"
    ):
        loading.match_parameters(hf, str(folder), shapes)
