"""Tests that files from strangers (runs, models, data) cannot run code or leak data.   pytest tests/test_folders.py"""

import json
import os
import random
from dataclasses import fields
from typing import get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import eval as E
import train
from errors import UserError
from layers.lora import read_adapter
from parallel import checkpoint
from prepare_data import ConvertConfig, DataFormatConfig, read_examples, table_rows, write_examples
from report.page.plots import plot_runs
from reward import RewardConfig, validate_reward
from rollout import EnvConfig
from settings import parse_type_hint, plain_pair
from sources import tables
from sources import text as texts
from tasks.shapes import shapes_rows

# --- settings that run.json passes on --------------------------------------------------------------------------------

WITHHELD = [  # a setting of a run, and what it must not do unless the user passes it too
    ("reward", ["geo3k=evil.py:f"], "runs a file"),
    ("env", "evil.py:Env", "runs a file"),
    ("env_settings", ["path=/etc/passwd"], "hands text to an environment"),
    ("judge_url", "http://evil:1", "sends prompts, images and a key"),
    ("judge", ["weight=0.5", "key_env=AWS_SECRET_ACCESS_KEY"], "sends an environment variable"),
    ("judge", ["template=/etc/passwd"], "sends a file"),
    ("curriculum", "/gone/stages.toml", "is not there"),
    ("servers", ["http://evil:1"], "sends prompts, images and weights"),
    ("vllm", ["worker_extension_cls=evil.Worker"], "runs code"),
    ("vllm", ["hf_overrides={\"a\": 1}"], "configures a model"),
    ("report_to", ["tensorboard", "wandb"], "sends metrics and samples"),
]


def run_folder(folder, **args):
    step = folder / "checkpoints" / "step_000001"
    step.mkdir(parents=True, exist_ok=True)
    (step / "trainer.json").write_text("{}")
    args = {"model": "m", "data": "d", "out": str(folder), "steps": 9, "max_new_tokens": 77} | args
    (folder / "run.json").write_text(json.dumps({"args": args}))
    return args


def parse_command(command, folder, *extra_flags):
    """Return the settings that train.py --resume or eval.py reads from a run's folder and further flags."""
    if command == "train":
        return train.parse_args(["--out", str(folder), "--resume", "auto", *extra_flags]).to_flags()
    return vars(E.parse_args([str(folder), "--data", "d", "--out", "e", *extra_flags]))


@pytest.fixture
def command(request, monkeypatch, tmp_path):
    def locate(path, flag=""):
        return "m", tmp_path, json.loads((tmp_path / "run.json").read_text())["args"]

    monkeypatch.setattr(E, "resolve_model", locate)  # the model need not exist
    return request.param


INHERITED = {"train": {row[0] for row in WITHHELD}, "eval": {f.name for f in fields(E.InheritedConfig)}}


CASES = [(command, *row[:2]) for command in INHERITED for row in WITHHELD if row[0] in INHERITED[command]]


@pytest.mark.parametrize("command, name, value", CASES, indirect=["command"])
def test_a_folder_cannot_name_code_servers_or_secrets(command, name, value, tmp_path):
    run_folder(tmp_path, **{name: value})
    values = value if isinstance(value, list) else [value]
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(UserError) as refused:
        parse_command(command, tmp_path)
    text = str(refused.value)
    assert "\n" not in text and f"{tmp_path} was trained with {flag} " in text and f"; add {flag} " in text
    assert values[0].split("=")[0] in text and text.endswith(f"or return to the default with {flag} default")
    parsed = parse_command(command, tmp_path, flag, *values)
    assert parsed[name] == (tuple(value) if isinstance(value, list) else value) and parsed["max_new_tokens"] == 77
    assert parse_command(command, tmp_path, flag, "default")[name] in ((), None)


@pytest.mark.parametrize("command", ["train", "eval"], indirect=True)
def test_harmless_settings_are_inherited_from_a_folder(command, tmp_path):
    (tmp_path / "stages.toml").write_text("")
    args = {"env": "look_closer", "env_settings": ["cost=0.5"], "curriculum": str(tmp_path / "stages.toml")}
    args |= {"judge": ["weight=0.5", "model=big"], "prompt_key": "problem", "image_root": str(tmp_path)}
    args |= {"vllm": ["gpu_memory_utilization=0.5", "enforce_eager=true"], "report_to": ["tensorboard"]}
    run_folder(tmp_path, **args)
    inherited = parse_command(command, tmp_path)
    for name, value in args.items():
        if name in INHERITED[command]:
            assert inherited[name] == (tuple(value) if isinstance(value, list) else value)
    without = parse_command(command, tmp_path, "--env", "default", "--judge-url", "default")
    assert without["env_settings"] == () and without["judge"] == ()  # dropped with the flag that they belong to
    run_folder(tmp_path, reward=["a.py:f"], judge_url="http://x")
    with pytest.raises(UserError, match="with --reward default --judge-url default$"):  # all flags
        parse_command(command, tmp_path)


def test_a_run_writes_only_where_the_command_says(tmp_path):
    """--resume RUN without --out is refused, because run.json could name any folder of this machine."""
    run_folder(tmp_path, out="/somewhere/else")
    with pytest.raises(UserError, match="trained with --out /somewhere/else.* add --out /somewhere/else$"):
        train.parse_args(["--resume", str(tmp_path)])


def test_every_free_text_setting_is_listed_or_withheld():
    """Add a new setting with free text here, or withhold it with `from_run`."""
    free = set()
    for group in fields(train.Config):
        for f in fields(group.type):
            if parse_type_hint(get_type_hints(group.type)[f.name])[0] is str and not f.metadata["choices"]:
                free |= {f.name} if f.metadata["from_run"]("x.py:y") else set()
                assert f.metadata["from_run"] is not plain_pair or f.metadata["metavar"] == "KEY=VALUE"
    paths = {"model", "data", "eval_data", "image_root", "teacher"}  # only read, and sent nowhere
    names = {"family_paths", "lora_targets", "data_source", "instruction"}
    names |= {"prompt_key", "image_key", "answer_key"}
    judge = {"judge"}  # except template and key_env
    # parse_args of train.py takes --config and --resume only from the command line
    assert free == paths | names | judge | {"resume", "config", "ratio_mask", "reward_weights"}
    assert all(hasattr(config, "env") or hasattr(config, "reward") for config in (EnvConfig, RewardConfig))


# --- models, adapters, checkpoints ------------------------------------------------------------------------------------


def test_a_model_is_read_only_from_safetensors_in_its_folder(toys, tmp_path):
    import model

    for file in toys["qwen2_5_vl"].iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"1 of 1 weight files are missing: \['model.safetensors'\]"):
        model.load_hf(str(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    for files, error in (({"a": "../x.safetensors"}, "lists files outside"), ({"a": 5}, "damaged"), ([], "damaged")):
        index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
        with pytest.raises(UserError, match=error):
            model.load_hf(str(tmp_path))


@pytest.mark.parametrize("r, alpha", [(0, 8), ("8", 8), (8, None), (8, [1])])
def test_adapter_sizes_must_be_numbers(r, alpha, tmp_path):
    config = {"peft_type": "LORA", "base_model_name_or_path": "b", "r": r, "lora_alpha": alpha}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"base_model.model.a.lora_A.weight": torch.zeros(8, 4)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match="adapter_config.json has r="):
        read_adapter(nn.Module(), tmp_path, "b")


def test_a_checkpoint_names_only_its_own_files(tmp_path):
    folder = tmp_path / "step_000001"
    folder.mkdir()
    (tmp_path / "outside").write_text("x")
    os.mkfifo(folder / "pipe")  # reading it would wait forever
    for name in ("../outside", str(tmp_path / "outside"), "pipe"):
        files = {name: checkpoint.file_checksum(tmp_path / "outside")}
        (folder / "trainer.json").write_text(checkpoint.to_text_with_crc({"step": 1, "files": files}))
        assert "not a regular file inside the checkpoint's folder" in checkpoint.find_damage(folder)


def test_plotting_a_damaged_run_is_a_user_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for text in ("{", "[]", '{"args": 5}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(UserError, match="run.json: damaged"):
            plot_runs([tmp_path], tmp_path / "curves")


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_a_reward_has_at_most_100_parts():
    parts = {f"part{i}": 1.0 for i in range(99)}
    assert len(validate_reward(parts | {"reward": 1.0}, "a", "")) == 100
    with pytest.raises(UserError, match="row 'a': the reward returned 20001 parts; return at most 100"):
        validate_reward({f"part{i}": 1.0 for i in range(20_000)} | {"reward": 1.0}, "a", "")


# --- data -------------------------------------------------------------------------------------------------------------


def shapes_file(path, n, **changed):
    """Write rows of shapes to a file, with these columns of row 1 changed; return its path."""
    rows = list(shapes_rows(n, "train", 0))
    rows[1] |= changed
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_row_of_millions_of_nulls_is_bad(tmp_path):
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    nulls = pa.ListArray.from_arrays(pa.array([0, 1, 2_000_001], pa.int32()), pa.nulls(2_000_001, struct))
    table = pa.table({"prompt": ["a", "b"], "images": nulls, "reward_model": [{"ground_truth": "x"}] * 2})
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(UserError) as refused:
        read_examples(tmp_path / "x.parquet", DataFormatConfig())
    first, second = str(refused.value).splitlines()[1:3]
    assert "row 0: image 0 is empty" in first
    assert "row 1: " in second and "bytes of memory, but the limit is" in second


def test_a_large_cell_is_a_bad_row_and_other_rows_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 100_000)
    monkeypatch.setattr(texts, "MAX_ROW_BYTES", 100_000)
    file = shapes_file(tmp_path / "x.parquet", 3, data_source="x" * 200_000)
    examples, bad = read_examples(file, DataFormatConfig(bad_rows="skip"))
    assert len(examples) == 2 and len(bad) == 1 and "row 1: " in bad[0] and "bytes of memory" in bad[0]
    lines = [json.dumps({"prompt": "p", "answer": "x" * n}) for n in (1, 200_000)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    (tmp_path / "x.csv").write_text(f"prompt,answer\np,1\np,{'x' * 200_000}\n")
    for name, read in (("x.jsonl", texts.jsonl_records), ("x.csv", texts.csv_records)):
        with pytest.raises(UserError, match=f"{name} line [23]: "):
            list(read(tmp_path / name))


def test_a_flipped_bit_of_our_file_is_never_read_as_another_image(tmp_path):
    from io import BytesIO

    from PIL import Image

    rows = list(shapes_rows(4, "train", 0))
    for row in rows:  # a format without checksums of its own
        file = BytesIO()
        Image.frombytes("RGB", (16, 16), random.Random(row["extra_info"]["uid"]).randbytes(768)).save(file, "BMP")
        row["images"] = [{"bytes": file.getvalue()}]
    plain = tmp_path / "plain.parquet"  # a file written elsewhere has no checksums, and is still read
    pq.write_table(pa.Table.from_pylist(rows), plain)
    examples, _ = read_examples(plain, DataFormatConfig())
    write_examples(examples, tmp_path / "x.parquet")
    data = (tmp_path / "x.parquet").read_bytes()
    images = [list(e.images) for e in examples]
    start = data.index(images[0][0][60:]) - 60
    refused = 0
    for i in range(40):
        flipped = bytearray(data)
        flipped[start + 60 + 80 * i % 3000] ^= 1 << i % 8
        file = tmp_path / f"{i}.parquet"
        file.write_bytes(flipped)
        try:
            assert [list(e.images) for e in read_examples(file, DataFormatConfig())[0]] == images
        except UserError:
            refused += 1
    assert refused > 30


def test_image_root_is_a_boundary_for_paths(tmp_path):
    image = next(shapes_rows(1, "train", 0))["images"][0]["bytes"]
    inside = tmp_path / "in" / "deep"
    inside.mkdir(parents=True)
    for file in (tmp_path / "out.png", inside / "a.png"):
        file.write_bytes(image)
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "out.png")
    (tmp_path / "in" / "good.png").symlink_to(inside / "a.png")
    (tmp_path / "door").symlink_to(tmp_path / "in")
    paths = ["deep/a.png", str(inside / "a.png"), "good.png", "deep/../deep/a.png"]
    outside = ["../out.png", str(tmp_path / "out.png"), "link.png", f"file://{tmp_path}/out.png", "deep/../../out.png"]
    rows = [row | {"images": [{"bytes": None, "path": path}]} for row, path in
            zip(shapes_rows(9, "train", 0), paths + outside, strict=True)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in" / "x.parquet")
    for root in ("in", "door"):
        examples, bad = read_examples(tmp_path / "in" / "x.parquet",
                                      DataFormatConfig(image_root=str(tmp_path / root), bad_rows="skip"))
        assert [list(e.images) for e in examples] == [[image]] * 4
        assert len(bad) == 5 and all("is outside --image-root" in line for line in bad)
    assert len(read_examples(tmp_path / "in" / "x.parquet", DataFormatConfig())[0]) == 9  # the default: any file
    cfg = ConvertConfig(out="o", image_root=str(tmp_path / "in"))
    raws = list(table_rows([tmp_path / "in" / "x.parquet"], cfg))
    from prepare_data import build_example

    with pytest.raises(UserError, match="is outside --image-root"):
        build_example(raws[4], cfg)
