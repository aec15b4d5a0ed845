"""LoRA adapters: compared with PEFT's, and in training, checkpoints and merging.   pytest tests/test_lora.py"""

import json
import sys

import pytest
import torch
import transformers
from conftest import FAMILIES
from safetensors.torch import load_file, save_file
from test_train import TORCHRUN, flags, rows, run, shapes  # noqa: F401

import demo
import merge_lora
import model as M
import parallel.sharding as sharding
from errors import UserError
from layers.lora import (
    LoraConfig,
    add_adapter,
    add_lora,
    find_linear_layers,
    find_lora_layers,
    is_target,
    read_adapter,
    write_adapter,
)
from layers.lora import merge_lora as merge_adapters


def compute_logits(hf, processor, picture):
    image = processor.image_to_patches("a", picture(84, 84))
    ids = torch.tensor([processor.tokenize_prompt([{"role": "user", "content": "<image>What?"}], [image])])
    hf.eval()
    with torch.no_grad():
        return hf(input_ids=ids, pixel_values=image.pixel_values(), image_grid_thw=torch.tensor([image.grid_thw]),
                  mm_token_type_ids=(ids == processor.image_token_id).int()).logits


def load_adapted(path, **settings):
    """Load a model, and add adapters that change its output."""
    hf = add_lora(M.load_hf(str(path)), LoraConfig(4, 6.0, **settings))
    generator = torch.Generator().manual_seed(1)
    for layer in find_lora_layers(hf).values():
        layer.lora_B.data.normal_(0, 0.05, generator=generator)
    return hf


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_ours_and_we_read_pefts(family, toys, loaded, picture, tmp_path):
    import peft

    path, processor = toys[family], loaded[family][1]
    ours = load_adapted(path, vision=True)
    want, plain = compute_logits(ours, processor, picture), compute_logits(loaded[family][0], processor, picture)
    assert (want - plain).abs().max() > 1e-2
    write_adapter(ours, str(path), tmp_path / "ours")
    wrapped = peft.PeftModel.from_pretrained(
        transformers.AutoModelForImageTextToText.from_pretrained(path), tmp_path / "ours"
    )
    # the wrapped model uses transformers' own attention
    torch.testing.assert_close(compute_logits(wrapped, processor, picture), want, rtol=0, atol=1e-5)
    wrapped.save_pretrained(tmp_path / "theirs")
    reloaded = read_adapter(M.load_hf(str(path)), tmp_path / "theirs", str(path))
    assert find_lora_layers(reloaded).keys() == find_lora_layers(ours).keys()
    for off, expected in ((True, plain), (False, want)):
        for layer in find_lora_layers(reloaded).values():
            layer.off = off
        # recurrent layers do not always sum in the same order, and layers without adapters do not add zeros
        torch.testing.assert_close(compute_logits(reloaded, processor, picture), expected, rtol=0, atol=1e-6)
    sent = dict(sharding.FullParameters(M.Policy(reloaded, processor), trainable_only=True))  # an engine gets these
    assert sent.keys() == {f"{name}.weight" for name in find_lora_layers(ours)}
    engine = M.load_hf(str(path))
    for name, parameter in engine.named_parameters():
        parameter.data.copy_(sent.get(name, parameter.data))
    torch.testing.assert_close(compute_logits(engine, processor, picture), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(compute_logits(merge_adapters(reloaded), processor, picture), want, rtol=0, atol=1e-5)
    assert not find_lora_layers(reloaded)


def test_adapters_are_in_the_language_model_by_default_and_only_they_train(toys, loaded):
    hf = add_lora(M.load_hf(str(toys["qwen2_5_vl"])), LoraConfig(2, 4.0, targets=("q_proj", "up_proj")))
    assert {n.rsplit(".", 1)[-1] for n in find_lora_layers(hf)} == {"q_proj", "up_proj"} and len(
        find_lora_layers(hf)
    ) == 4
    policy = M.Policy(hf, loaded["qwen2_5_vl"][1])
    assert all((".lora_" in n) == p.requires_grad for n, p in policy.named_parameters())
    default_layers = find_lora_layers(add_lora(M.load_hf(str(toys["qwen2_5_vl"])), LoraConfig(2, 4.0)))
    assert len(default_layers) == 14 and all(name.startswith("model.language_model.layers.") for name in default_layers)
    assert all(layer.lora_B.abs().max() == 0 for layer in default_layers.values())
    with pytest.raises(ValueError, match="--lora-targets gate: no such linear layers; .* have down_proj, gate_proj"):
        add_lora(M.load_hf(str(toys["qwen2_5_vl"])), LoraConfig(2, 4.0, targets=("gate", "q_proj")))


def test_errors_name_adapters_of_other_models_and_damaged_files(toys, tmp_path):
    path = str(toys["qwen2_5_vl"])
    write_adapter(load_adapted(path), path, tmp_path)
    tensors, config = (
        load_file(tmp_path / "adapter_model.safetensors"),
        json.loads((tmp_path / "adapter_config.json").read_text()),
    )
    load_base = lambda: M.load_hf(path)  # noqa: E731
    with pytest.raises(ValueError, match="made for .*qwen2_5_vl', not for .*qwen2_vl'"):
        read_adapter(M.load_hf(str(toys["qwen2_vl"])), tmp_path, str(toys["qwen2_vl"]))
    key = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight"
    for changed, message in [
        (
            {**tensors, key: torch.zeros(4, 65)},
            r"lora_A of .*up_proj has shape \(4, 65\), but must have \(4, 64\)",
        ),
        (
            {k: v for k, v in tensors.items() if k != key},
            r"lora_A of .*layers.0.mlp.up_proj has shape None, but must have \(4, 64\)",
        ),
        (tensors | {key.replace("layers.0", "layers.7"): tensors[key].clone()}, "key .*layers.7.* keys are such as"),
        ({k: v for k, v in tensors.items() if "layers.1." not in k}, "no tensors for 7 layers, .*layers.1.mlp"),
    ]:
        save_file(changed, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=message):
            read_adapter(load_base(), tmp_path, path)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    data = (tmp_path / "adapter_model.safetensors").read_bytes()
    for damaged in (data[:-100], b"\xff" * 8 + data[8:], b""):
        (tmp_path / "adapter_model.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match="adapter_model.safetensors: missing, truncated"):
            read_adapter(load_base(), tmp_path, path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ValueError, match="only plain LoRA .*has use_dora=True"):
        read_adapter(load_base(), tmp_path, path)


Q_PROJ = "model.language_model.layers.{}.self_attn.q_proj"
SELECTIONS = [
    {"target_modules": ["q_proj", "mlp.up_proj"]},
    {"target_modules": r".*language_model.*\.(q_proj|v_proj)"},
    {"target_modules": "q_proj"},  # a regex, which must match the whole name
    {"target_modules": ["q_proj", "qkv"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "qkv"], "exclude_modules": r".*visual.*"},
    {"target_modules": ["q_proj", "qkv"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "qkv"], "layers_to_transform": [0], "layers_pattern": "layers"},
    {"target_modules": ["q_proj", "qkv"], "layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": [Q_PROJ.format(0), "v_proj"], "layers_to_transform": [1]},
    {"target_modules": r".*layers\.1.*q_proj", "layers_to_transform": None},
]


@pytest.mark.parametrize("options", SELECTIONS, ids=json.dumps)
def test_options_select_the_layers_that_peft_selects(options, loaded):
    from peft import LoraConfig as PeftConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    names = find_linear_layers(loaded["qwen2_5_vl"][0])
    config = PeftConfig(**options)
    expected = {name for name in names if check_target_module_exists(config, name)}
    assert {name for name in names if is_target(name, options)} == expected
    everything = {name for name in names if is_target(name, {"target_modules": "all-linear"})}
    assert everything == names.keys() - {"lm_head"}


def keep(part):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if part not in key}


def rename(old, new, prefix="base_model.model."):
    return lambda tensors: {prefix + key[17:].replace(old, new): tensor for key, tensor in tensors.items()}


SAME = rename("", "")
LISTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXT = rf".*language_model.*({'|'.join(LISTED)})"
OLD_TEXT = rf"model\.(?!visual).*({'|'.join(LISTED)})"  # before transformers 4.52 the tower was outside `model`
OLD = rename("model.language_model.", "model.")
BORDER = [  # (change of the tensors, change of the options, None if the adapter is read, else a part of the error)
    (SAME, {"target_modules": TEXT}, None),
    (OLD, {"target_modules": TEXT}, None),
    (OLD, {"target_modules": OLD_TEXT}, None),
    (rename(".weight", ".default.weight"), {}, None),
    (rename(".weight", ".policy.weight"), {}, None),
    (rename("", "", prefix=""), {}, None),
    (rename("model.language_model.", "model.", prefix=""), {}, None),
    (rename("model.language_model.", "mtp."), {}, "it has the key base_model.model.mtp.layers.0"),
    (rename("model.language_model.layers.1", "vision.layers.1"), {}, "it has the key .*vision.layers.1"),
    (lambda t: t | rename(".weight", ".ref.weight")(t), {}, "but also another one of lora_A"),
    (keep("layers.1."), {}, r"no tensors for 7 layers, such as .*layers.1.mlp.down_proj, .*target_modules"),
    (keep("layers.1."), {"target_modules": TEXT}, "no tensors for 7 layers"),
    (keep("layers.1."), {"target_modules": TEXT, "exclude_modules": [Q_PROJ.format(1)]}, "no tensors for 6 layers"),
    (lambda t: OLD(keep("layers.1.")(t)), {"target_modules": OLD_TEXT}, "tensors for"),
    (keep("o_proj"), {"target_modules": [*LISTED[:3], *LISTED[4:]], "exclude_modules": "visual.*|.*visual.*"}, None),
    (keep("layers.1."), {"target_modules": TEXT.replace("language_model", r"layers\.0")}, None),
    (SAME, {"target_modules": "all-linear"}, "no tensors for .* such as model.visual"),
    (SAME, {"target_modules": ["q_proj"]}, "has tensors for 12 layers"),
    (SAME, {"target_modules": None}, "has tensors for 14 layers"),
    (SAME, {"init_lora_weights": "gaussian", "eva_config": {"rho": 2.0}, "revision": "main", "bias": "none",
            "loftq_config": {}, "rank_pattern": {}, "runtime_config": {"ephemeral_gpu_offload": False}}, None),
    *((SAME, {key: value}, f"adapter_config.json has {key}=") for key, value in {
        "init_lora_weights": "pissa_niter_4", "use_dora": True, "bias": "lora_only", "lora_bias": True,
        "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 8}, "modules_to_save": ["lm_head"],
        "layer_replication": [[0, 2]], "trainable_token_indices": [1], "target_parameters": ["experts.up"],
        "fan_in_fan_out": True, "use_qalora": True, "alora_invocation_tokens": [1], "invented_in_2031": 0.5}.items()),
    *((SAME, {"init_lora_weights": kind}, "has init_lora_weights=") for kind in ("olora", "corda", "loftq", "lora_ga")),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(BORDER)))
def test_almost_known_adapters_are_read_rightly_or_refused(case, toys, tmp_path):
    change, options, error = BORDER[case]
    path = str(toys["qwen2_5_vl"])
    write_adapter(ours := load_adapted(path), path, tmp_path)
    file, settings = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    save_file({key: tensor.clone() for key, tensor in change(load_file(file)).items()}, file)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | options))
    if error:
        with pytest.raises(UserError, match=error):
            read_adapter(M.load_hf(path), tmp_path, path)
        return
    expected = find_lora_layers(ours)
    layers = find_lora_layers(read_adapter(M.load_hf(path), tmp_path, path))
    assert layers
    for name, layer in layers.items():
        assert torch.equal(layer.lora_B, expected[name].lora_B) and layer.scale == expected[name].scale


def test_an_adapter_of_a_tied_head_is_refused(tmp_path):
    demo.make_model(tmp_path / "base", tied=True)
    hf = M.load_hf(base := str(tmp_path / "base"))
    add_adapter(hf.lm_head, 1.0, torch.zeros(4, hf.lm_head.in_features), torch.zeros(hf.lm_head.out_features, 4))
    write_adapter(hf, base, tmp_path)
    with pytest.raises(UserError, match="it adapts lm_head, which .*base' ties to the embedding"):
        read_adapter(M.load_hf(base), tmp_path, base)


@pytest.mark.slow
def test_a_run_with_adapters_resumes_bit_for_bit_and_merges(toys, shapes, tmp_path, loaded):  # noqa: F811
    """Train on two processes, with adapters in the tower too, and the model without adapters as the reference. Then
    merge them, and also export them as an adapter, which is merged in turn."""
    base = ["--lora-rank", 4, "--train-vision", "tower", "--kl-coef", 0.1, "--lr", 1e-2, "--save-every", 1, "--keep", 9]

    def train(out, steps, *extra):
        run([*TORCHRUN, 2, "train.py", *flags(toys["qwen2_5_vl"], shapes[0], out, "--steps", steps, *base, *extra)])
        return rows(out)

    full = train(tmp_path / "a", 2)
    train(tmp_path / "b", 1)
    resumed = train(tmp_path / "b", 2, "--resume", "auto")
    timeless = [
        [{k: v for k, v in row.items() if k[:5] not in ("time/", "perf/")} for row in log] for log in (full, resumed)
    ]
    assert timeless[0] == timeless[1]
    assert (
        abs(full[0]["policy/kl_ref"]) < 1e-9 < full[1]["policy/kl_ref"] and full[1]["mismatch/max_abs_logprob_diff"] < 1
    )
    base[1] = 8
    done = run(
        [
            sys.executable,
            "train.py",
            *flags(toys["qwen2_5_vl"], shapes[0], tmp_path / "b", "--steps", 3, *base, "--resume", "auto"),
        ],
        check=False,
    )
    assert done.returncode == 1 and "holds lora_rank_4, vision, but this run needs lora_rank_8, vision" in done.stderr
    base[1] = 4  # continue on one process instead of two
    run(
        [
            sys.executable,
            "train.py",
            *flags(toys["qwen2_5_vl"], shapes[0], tmp_path / "b", "--steps", 3, *base, "--resume", "auto"),
        ]
    )
    assert [row["step"] for row in rows(tmp_path / "b")] == [1, 2, 3] and rows(tmp_path / "b")[-1]["policy/kl_ref"] > 0
    stored = sum(f.stat().st_size for f in (tmp_path / "a" / "checkpoints" / "step_000002").glob("*.safetensors"))
    weights = (toys["qwen2_5_vl"] / "model.safetensors").stat().st_size
    assert (
        stored < 0.7 * weights
    )  # only adapters and their optimizer state, which at rank 4 and width 64 are not small
    for out, extra in (("hf", []), ("adapter", ["--adapter"])):
        merge_lora.main(merge_lora.parse_args([str(tmp_path / "a"), "--out", str(tmp_path / out), *extra]))
    merge_lora.main(merge_lora.parse_args([str(tmp_path / "adapter"), "--out", str(tmp_path / "back")]))
    processor = loaded["qwen2_5_vl"][1]
    probes = [merge_lora.compute_probe_logprobs(M.load_hf(str(tmp_path / out)), processor) for out in ("hf", "back")]
    torch.testing.assert_close(*probes, rtol=0, atol=1e-5)  # two ways to the weights
    plain = merge_lora.compute_probe_logprobs(M.load_hf(str(toys["qwen2_5_vl"])), processor)
    assert (probes[0] - plain).abs().max() > 1e-3
    done = run([sys.executable, "merge_lora.py", toys["qwen2_5_vl"], "--out", tmp_path / "no"], check=False)
    assert done.returncode == 1 and "nor a PEFT adapter" in done.stderr
