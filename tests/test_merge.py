"""Which adapters merge_lora.py accepts and refuses, and the folders that it writes.   pytest tests/test_merge.py"""

import json
import os
import random
import re
import shlex
import shutil
import stat
from pathlib import Path

import pytest
import torch
import transformers
from conftest import FAMILIES
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import demo
import merge_lora as G
import model as M
from layers import lora

ROOT = Path(__file__).parent.parent


def make_adapter(path, folder, rank, alpha, std, seed=0, vision=True):
    """Write a PEFT adapter with random weights, in the layout of a trained one. Return its folder."""
    hf = lora.add_lora(M.load_hf(str(path)), lora.LoraConfig(rank, alpha, vision=vision, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    for layer in lora.find_lora_layers(hf).values():
        layer.lora_B.data.normal_(generator=generator).mul_(std)
    lora.write_adapter(hf, str(path), folder)
    return folder


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def plain_file(tmp_path):
    """A file and its folder, `plain`, with the permissions that the umask gives."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    return tmp_path / "plain" / "file"


def merge(source, out, *flags):
    G.main(G.parse_args([str(source), "--out", str(out), *flags]))


@pytest.fixture(scope="module")
def sharp(toys, tmp_path_factory):
    """family -> folder of a toy model whose log-probabilities reach hundreds of nats, as confident models' do."""
    folders = {}
    for family, path in toys.items():
        hf = M.load_hf(str(path))
        hf.get_output_embeddings().weight.data *= 100
        folders[family] = tmp_path_factory.mktemp("sharp") / family
        hf.save_pretrained(folders[family])
        G.save_processor(str(path), M.Processor(str(path)), folders[family])
    return folders


@pytest.mark.parametrize("family", FAMILIES)
def test_correct_merges_are_accepted_and_open_in_transformers(family, sharp, tmp_path, plain_file, capsys):
    rng = random.Random(family)
    for i, (dtype, std) in enumerate([("float32", 1e-2), ("bfloat16", 1.0), ("float32", 1e-5)]):
        rank, alpha = rng.choice([1, 8, 64]), rng.choice([2.0, 32.0])
        source = make_adapter(sharp[family], tmp_path / f"adapter{i}", rank, alpha, std, seed=i)
        out = tmp_path / f"out{i}"
        merge(source, out, "--dtype", dtype)
        assert "log-probabilities differ from the run's by at most" in capsys.readouterr().out
        config = json.loads((out / "config.json").read_text())
        assert {config["dtype"], config["text_config"]["dtype"], config["vision_config"]["dtype"]} == {dtype}
        assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {getattr(torch, dtype)}
        assert {mode(file) for file in out.iterdir()} == {mode(plain_file)} and mode(out) == mode(tmp_path / "plain")
    # transformers loads it in the dtype that its config states
    hf = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out1")
    assert hf.dtype == torch.bfloat16
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out1")
    images = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out1")
    assert tokenizer.chat_template and images.size["longest_edge"] == 512 * 512
    folders = {"adapter0", "adapter1", "adapter2", "out0", "out1", "out2", "plain"}
    assert {p.name for p in tmp_path.iterdir()} == folders


def make_broken_merge(fault):
    """Return a merge_lora with a fault in one layer's adapter: forgotten, half its scale, transposed, or swapped with
    that of another block."""

    def broken_merge(hf):
        layers = list(lora.find_lora_layers(hf).values())
        layer, other = layers[0], layers[7]  # q_proj of two blocks, which is square
        assert layer.weight.shape == other.weight.shape == layer.weight.T.shape
        if fault == "forgotten":
            layer.lora_B.data.zero_()
        elif fault == "half":
            layer.scale /= 2
        elif fault == "transposed":
            layer.lora_A.data, layer.lora_B.data = layer.lora_B.data.T.contiguous(), layer.lora_A.data.T.contiguous()
        else:
            layer.lora_B.data, other.lora_B.data = other.lora_B.data, layer.lora_B.data
        return lora.merge_lora(hf)

    return broken_merge


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["forgotten", "half", "transposed", "swapped"])
def test_a_wrongly_merged_layer_is_refused(fault, dtype, toys, tmp_path, monkeypatch):
    """The fault is found even in an adapter that has hardly been trained, whose effect on log-probabilities is smaller
    than that of rounding."""
    source = make_adapter(toys["qwen2_5_vl"], tmp_path / "adapter", 4, 8.0, 1e-5, vision=False)
    monkeypatch.setattr(G, "merge_lora", make_broken_merge(fault))
    with pytest.raises(RuntimeError, match="layers.0.self_attn.q_proj: merged, its outputs differ"):
        merge(source, tmp_path / "out", "--dtype", dtype)
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["swapped", "one_bit"])
def test_a_wrongly_written_tensor_is_refused(fault, dtype, toys, tmp_path, monkeypatch):
    source = make_adapter(toys["qwen2_5_vl"], tmp_path / "adapter", 4, 8.0, 1e-2)
    save, names = G.save_hf, [f"model.layers.{i}.self_attn.k_proj.weight" for i in (0, 1)]

    def save_wrongly(hf, folder):
        save(hf, folder)
        tensors = load_file(folder / "model.safetensors")
        a, b = names
        if fault == "swapped":
            tensors[a], tensors[b] = tensors[b], tensors[a]
        else:
            tensors[a][3, 5] *= 1.01
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(G, "save_hf", save_wrongly)
    wrong = 2 if fault == "swapped" else 1
    with pytest.raises(RuntimeError, match=f"{wrong} tensors of the written folder are not the run's: .*layers.0"):
        merge(source, tmp_path / "out", "--dtype", dtype)
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_a_folder_with_other_log_probabilities_is_refused(toys, tmp_path, monkeypatch):
    source = make_adapter(toys["qwen2_5_vl"], tmp_path / "adapter", 4, 8.0, 1e-2)
    save = G.save_processor

    def save_and_spoil(base, processor, folder):
        save(base, processor, folder)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["rope_parameters"]["rope_theta"] *= 2
        (folder / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(G, "save_processor", save_and_spoil)
    with pytest.raises(RuntimeError, match="log-probabilities differ from those of its weights in memory by "):
        merge(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("files", [1, 2])
def test_pixel_limits_reach_every_file_that_holds_them(files, toys, tmp_path):
    """transformers 5 writes a processor to one file that includes the image processor's settings."""
    base = shutil.copytree(toys["qwen2_5_vl"], tmp_path / "base")
    own = json.loads((base / "preprocessor_config.json").read_text()) | {"max_pixels": 9000}
    whole = {"image_processor": own, "processor_class": own["processor_class"]}
    (base / "processor_config.json").write_text(json.dumps(whole))
    if files == 1:
        (base / "preprocessor_config.json").unlink()
    shutil.copytree(base, tmp_path / "out", ignore=shutil.ignore_patterns("*processor*"))
    G.save_processor(str(base), M.Processor(str(base), None, 4000), tmp_path / "out")
    assert M.Processor(str(tmp_path / "out")).image_processor.size == {"shortest_edge": 784, "longest_edge": 4000}
    assert (tmp_path / "out" / "preprocessor_config.json").exists() == (files == 2)


def test_tensors_that_are_not_exported_are_told(toys, tmp_path, capsys):
    base = shutil.copytree(toys["qwen3_5"], tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.ones(2), "aux.weight": torch.ones(2)}, base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (base / "config.json").write_text(json.dumps(config))
    merge(make_adapter(base, tmp_path / "adapter", 2, 4, 0.1), tmp_path / "out")
    told = capsys.readouterr().out
    assert "mtp_num_hidden_layers 0 instead of 1" in told and "ignored 1 tensors" in told and "aux.weight" in told
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["text_config"]["mtp_num_hidden_layers"] == 0


def test_adapters_with_nan_are_named(toys, tmp_path):
    source = make_adapter(toys["qwen2_5_vl"], tmp_path / "adapter", 4, 8.0, float("nan"))
    with pytest.raises(ValueError, match="adapter: .*lora_B.* holds NaN"):
        merge(source, tmp_path / "out")


@pytest.mark.parametrize("flags", [(), ("--adapter",)])
def test_a_full_disk_is_a_one_line_error_and_leaves_nothing(flags, toys, tmp_path, monkeypatch):
    source = make_adapter(toys["qwen2_5_vl"], tmp_path / "adapter", 4, 8.0, 1e-2)

    def fail_with_full_disk(hf, *where):
        folder = where[-1]
        folder.mkdir()
        (folder / "half").write_text("half")
        # the real message of safetensors
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(G, "save_hf", fail_with_full_disk)
    monkeypatch.setattr(G, "write_adapter", fail_with_full_disk)
    with pytest.raises(ValueError, match=r"--out .*/out: no space left for .*/out \([\d.e+]+ GB free\)"):
        merge(source, tmp_path / "out", *flags)
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_an_unwritable_folder_is_an_error_before_the_model_is_loaded(toys, tmp_path, monkeypatch):
    source = make_adapter(toys["qwen2_5_vl"], tmp_path / "adapter", 4, 8.0, 1e-2)
    monkeypatch.setattr(G, "load_model_or_checkpoint", lambda *_, **__: pytest.fail("read the model first"))
    refused = "/sys/no" if os.geteuid() == 0 else "/no"  # not even root can create files in /sys
    with pytest.raises(ValueError, match=f"--out {refused}: .* cannot be written"):
        merge(source, refused)
    with pytest.raises(ValueError, match=f"--out {refused}: .* cannot be written"):
        demo.main(demo.parse_args(["model", "--out", refused]))


def test_adapters_follow_the_umask_too(toys, tmp_path, plain_file):
    source = make_adapter(toys["qwen2_5_vl"], tmp_path / "adapter", 4, 8.0, 1e-2)
    merge(source, tmp_path / "again", "--adapter")
    assert {mode(file) for file in (tmp_path / "again").iterdir()} == {mode(plain_file)}


def test_the_page_on_evaluation_passes_the_exported_folder_to_other_tools(toys, tmp_path):
    page = (ROOT / "docs" / "evaluation.md").read_text().partition("## Public benchmarks\n")[2]
    export, lmms, _ = re.findall(r"^    (\S.*)$", page, re.M)
    out = G.parse_args(shlex.split(export)[2:]).out
    assert f" --model_args pretrained={out} " in lmms
    config = json.loads(re.search(r"```json\n(.*?)```", page, re.S)[1])
    assert config["model"]["geo3k"]["model_path"].endswith(f"/{out}")
    # VLMEvalKit chooses the class of the model by this entry of its config.json
    adapter = make_adapter(toys["qwen2_5_vl"], tmp_path / "adapter", 2, 4, 0.1)
    merge(adapter, tmp_path / out)
    exported = json.loads((tmp_path / out / "config.json").read_text())
    assert exported["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
