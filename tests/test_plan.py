"""train.py --plan: sizes, memory, FLOPs and seconds, against what this machine counts.   pytest tests/test_plan.py"""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import written
from test_train import ROOT, write_parquet
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import demo
import train
from errors import UserError
from model import FAMILIES, Policy
from packing import Packer, flop_costs, rollouts_flops
from parallel import plan as P
from report.gpus import GPU_CHOICES, peak_flops
from tasks.shapes import shapes_rows

sys.path.append(str(ROOT / "benchmarks"))
import gpu as gpu_bench  # noqa: E402
import memory as memory_bench  # noqa: E402

FLAGS = "--steps 10 --prompts-per-step 16 --group-size 4 --max-new-tokens 64"


def plan_of(model, *flags):
    """Return what --plan --json prints, in this process. It exits with 1 if there is a problem."""
    out, code = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text, **_: out.append(text))
        try:
            P.print_plan([*FLAGS.split(), "--json", "--model", str(model), *map(str, flags)], train.parse_args,
                         train.check_config)  # fmt: skip
        except SystemExit as stop:
            code = stop.code
            if not out:
                raise
    plan = json.loads(out[-1])
    assert code == bool(plan["problems"])
    return plan


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Return the folder of a toy whose components have several MiB."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    demo.make_model(folder, "qwen2_5_vl", hidden=256, layers=3, vocab=8192)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_loaded_model(family, toys, loaded):
    p = plan_of(toys[family])
    hf = loaded[family][0]
    tower = sum(w.numel() for w in hf.get_submodule(hf.family.vision).parameters())
    assert p["parameters"] == sum(w.numel() for w in hf.parameters())
    assert p["trained"] == p["parameters"] - tower
    assert plan_of(toys[family], "--train-vision", "all")["trained"] == p["parameters"]
    lora = plan_of(toys[family], "--lora-rank", 4)
    assert lora["trained"] == lora["parameters"] - p["parameters"] > 0


def test_memory_by_hand(wide):
    """fp32 masters: 16 bytes per trained and 4 per frozen weight, divided by the processes that shard together."""
    p, gib = plan_of(wide, "--gpus", 8, "--replicate", 2), 2**30
    frozen = p["parameters"] - p["trained"]
    m = p["memory"]
    assert m["weights"] * gib == pytest.approx(4 * p["parameters"] / 4)
    assert m["optimizer"] == pytest.approx(2 * m["gradients"]) and m["gradients"] * gib == p["trained"]
    assert m["total"] == pytest.approx(sum(m.values()) - m["total"] - m["offloaded"])
    half = plan_of(wide, "--master-dtype", "bf16")["memory"]
    assert half["weights"] * gib == pytest.approx(2 * (p["trained"] + frozen) / 8)
    reference = plan_of(wide, "--kl-coef", 0.1)
    assert reference["memory"]["reference_teacher"] * gib == 2 * p["parameters"] / 8
    offloaded = plan_of(wide, "--kl-coef", 0.1, "--offload", "reference")
    assert offloaded["memory"]["reference_teacher"] == 0 and offloaded["host"]["offloaded"] * gib == 2 * p["parameters"]
    alone = plan_of(wide, "--gpus", 1)["memory"]["unsharded"] * gib
    assert alone == pytest.approx(2 * p["parameters"])  # a single shard stays gathered, unless flags save memory
    for flags in (["--gpus", 8], ["--gpus", 1, "--gradient-checkpointing"], ["--gpus", 1, "--lora-rank", 4]):
        assert plan_of(wide, *flags)["memory"]["unsharded"] * gib < 0.9 * alone
    critic = plan_of(wide, "--algo", "ppo", "--algo-args", "critic=separate")["memory"]
    assert critic["gradients"] == pytest.approx(2 * plan_of(wide)["memory"]["gradients"])


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_of_a_packed_forward_are_within_2_percent_of_the_counters(family, loaded, picture, monkeypatch):
    """Tower, language model and head of a micro-batch of two prompts with images, each with three responses."""
    hf, processor = loaded[family]
    monkeypatch.setattr(hf.config.text_config, "_experts_implementation_internal", "eager", raising=False)
    costs, image_token = flop_costs(hf.config, vision=1.0), processor.image_token_id
    rollouts, masked, side = [], 0, 32 if family.startswith("qwen3") else 28
    for p in range(2):
        image = processor.image_to_patches(str(p), picture(4 * side, 4 * side, p))
        ids = [7] * 40 + [image_token] * image.n_tokens + [8] * 71
        for i in range(3):
            rollouts.append(replace(written(f"p{p}", ids, [9 + i] + [20] * 127, [image]), sample_index=i))
        # pairs that attention computes and masks: the first response is in one segment with the prompt
        masked += (len(ids) + 127) ** 2 / 2 + 2 * 127**2 / 2
    policy = Policy(hf, processor)
    [micro] = Packer(10_000, image_token, costs).pack(rollouts)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        policy(micro)
    planned = sum(rollouts_flops(rollouts[i : i + 3], costs) for i in (0, 3)) + costs.pair * masked
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_activations_are_those_of_a_real_forward(family, wide, tmp_path):
    """Counted from the storages that autograd keeps of the language blocks, for a single sequence in bf16."""
    demo.make_model(tmp_path / "m", family, hidden=256, layers=3, vocab=1024)
    cfg = train.parse_args([*FLAGS.split(), *"--data - --out - --model".split(), str(tmp_path / "m")])
    hf = P.build_meta_model(str(tmp_path / "m"), torch.bfloat16).to_empty(device="cpu")
    for p in hf.parameters():
        torch.nn.init.normal_(p, 0, 0.02)
    n, storages = 512, {}
    weights = {p.untyped_storage()._cdata for p in hf.parameters()}

    def keep(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    embeds = torch.randn(1, n, 256, dtype=torch.bfloat16).requires_grad_()
    positions = torch.arange(n).expand(3, 1, n)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        P.run_language_model(hf, embeds, positions, plan=P._SavedTensorsPacking(n))
    counted = sum(s.nbytes() for key, s in storages.items() if key not in weights) / n / 3
    planned = P.count_sizes(cfg.model).kept
    assert counted > 10 * 2**10 and planned == pytest.approx(counted, rel=0.15)


def test_a_step_by_hand(toys):
    """Seconds follow from FLOPs, the GPU's table and the efficiencies; async steps take the longer half."""
    flags = ["--gpu", "a100", "--gpus", 4, "--training-efficiency", 0.5, "--kl-coef", 0.1, "--response-tokens", 20,
             "--gpu-hour-usd", 2, "--steps", 100]  # fmt: skip
    p = plan_of(toys["qwen2_5_vl"], *flags)
    assert GPU_CHOICES["a100"].tflops == 312 and p["responses"] == 64 and p["response_tokens"] == 20
    for phase in ("prefill", "vision", "logprobs", "update"):
        assert p["seconds"][phase] == pytest.approx(p["flops"][phase] / 4 / 156e12)
    assert p["mfu"] == pytest.approx(0.5) and p["step_seconds"] == pytest.approx(sum(p["seconds"].values()))
    assert p["usd"] == pytest.approx(100 * p["step_seconds"] / 3600 * 4 * 2)
    assert p["tokens_per_second_per_gpu"] == pytest.approx(64 * (512 + 20) / p["step_seconds"] / 4)
    # 16 sequences on each GPU, 20 token steps, then 44 of the longest response; a toy's token step is only overhead
    assert p["engine"]["sequences"] == 16 and p["seconds"]["decode"] == pytest.approx(64 * 0.010, rel=0.01)
    again = plan_of(toys["qwen2_5_vl"], *flags, "--gradient-checkpointing")
    assert again["flops"]["update"] > 1.25 * p["flops"]["update"] and again["mfu"] < 0.4
    unshared = plan_of(toys["qwen2_5_vl"], *flags, "--attn", "flash")
    assert unshared["flops"]["update"] > 2 * p["flops"]["update"]
    servers = [*flags, "--rollout", "server", "--serve", 2, "--vllm", "tensor_parallel_size=3", "--async-steps", 1]
    served = plan_of(toys["qwen2_5_vl"], *servers)
    assert served["gpus"] == 10 and served["nodes"] == 2 and served["memory"]["engine"] == 0
    assert served["step_seconds"] == served["seconds"]["prefill"] + served["seconds"]["decode"]


def test_passes_over_the_rollouts_follow_from_the_algorithm(toys):
    def passes(*flags):
        p = plan_of(toys["qwen2_5_vl"], *flags)["flops"]
        return p["logprobs"] / p["update"] * 3

    assert passes() == 0
    assert passes("--minibatches", 2) == pytest.approx(1)  # the old policy
    assert passes("--minibatches", 2, "--kl-coef", 0.1) == pytest.approx(2)
    assert passes("--minibatches", 2, "--update-epochs", 2) == pytest.approx(1 / 2)
    assert passes("--minibatches", 2, "--lora-rank", 4) > 1.2  # 1.5 but for attention, of which a toy has much
    assert passes("--algo", "ppo", "--algo-args", "critic=separate") < passes("--algo", "ppo") + 1


def test_second_views_run_through_the_tower(toys):
    """Their features are never cached, except those of white images."""
    def logprobs(*flags):
        return plan_of(toys["qwen3_vl"], *flags)["flops"]["logprobs"]

    view = ["--algo-args", "vision_kl=true"]
    assert logprobs(*view) == logprobs(*view, "--vision-cache-gb", 0) > 1.1 * logprobs(*view, "view=blank") > 0


SMALL = "--gpu 4090 --gpus 1 --gradient-checkpointing --vllm gpu_memory_utilization=0.46"


@pytest.mark.parametrize("size, flags, suggested", [
    ("7B", "--gpus 8 --micro-tokens 12288", "--gradient-checkpointing"),
    ("7B", "--gpu a10 --gpus 1", "--gradient-checkpointing --offload --vllm"),
    ("3B", "--gpu 3090 --gpus 1", "--gradient-checkpointing --lora-rank --vllm"),
    ("7B", "--gpu a100-40gb --gpus 4 --train-vision all --gradient-checkpointing", "--lora-rank"),
    ("3B", f"{SMALL} --lora-rank 16", "--master-dtype"),
    ("3B", f"{SMALL} --lora-rank 64 --train-vision tower", "--master-dtype"),
    ("7B", f"{SMALL} --lora-rank 16 --vllm gpu_memory_utilization=0.85", "--offload"),
    ("7B", f"{SMALL} --lora-rank 16 --master-dtype bf16", "--offload --vllm"),
    ("3B", "--gpu a100-40gb --gpus 1 --lora-rank 16 --master-dtype bf16 --micro-tokens 8192 --vllm "
           "gpu_memory_utilization=0.5", "--gradient-checkpointing"),
])  # fmt: skip
def test_the_fix_is_enough_and_each_of_its_flags_is_needed(size, flags, suggested, tmp_path):
    """The flags are valid as they are printed, and not on already."""
    gpu_bench.config_of(size).save_pretrained(tmp_path)
    fix = plan_of(tmp_path, *flags.split())["fix"]
    changes = re.findall(r"(--[^(;]+?)(?: \([^)]+\)|(?=;))", fix)
    assert [change.split()[0] for change in changes] == suggested.split()
    p = plan_of(tmp_path, *flags.split(), *" ".join(changes).split())
    assert p["problems"] == [] and fix.endswith(f"the update then needs {p['memory']['total']:.1f} GiB")
    for left_out in changes:
        others = " ".join(change for change in changes if change != left_out)
        assert plan_of(tmp_path, *flags.split(), *others.split())["problems"]


def test_what_does_not_fit_has_a_line(tmp_path):
    gpu_bench.config_of("7B").save_pretrained(tmp_path)
    p = plan_of(tmp_path, "--gpus", 8, "--micro-tokens", 12288)
    assert len(p["problems"]) == 1 and "the update needs" in p["problems"][0]
    assert plan_of(tmp_path, "--gpus", 8, "--micro-tokens", p["max_micro_tokens"])["problems"] == []
    assert plan_of(tmp_path, "--gpu", "3060", "--gpus", 1)["fix"] == P.NO_FIX


ROWS = [line.strip("| ").split(" | ") for line in (ROOT / "docs/hardware.md").read_text().splitlines()
        if re.match(r"\| (2 x )?\d+ GB \| `", line)]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[2].rpartition('/')[2]}")
def test_each_row_of_your_gpu_fits_and_not_without_its_flags(row):
    """The table of docs/hardware.md, whose models' configs ship with the plan."""
    size, names, model, flags, gib, seconds = row
    lora = "--lora-rank 64 --lora-alpha 32 --lr 3e-5 --master-dtype bf16"
    flags = flags.replace("`", "").replace("LORA", lora).split()
    base = ["--gpus", 2 if size.startswith("2 x") else 1, "--gradient-checkpointing", "--prompts-per-step", 64,
            "--group-size", 8, "--max-new-tokens", 1024]  # fmt: skip
    for i, name in enumerate(names.replace("`", "").split(", ")):
        p = plan_of(model, *base, "--gpu", name, *flags)
        assert p["problems"] == [] and GPU_CHOICES[name].gb == int(size.split()[-2]) and p["model"] == model
        if i == 0:
            memory = f"{p['memory']['total']:.1f}; {p['rollout_memory']['total']:.1f} of {p['gpu_gib']}"
            assert (gib, seconds) == (memory, f"{p['step_seconds']:.0f}")
        if size != "80 GB":
            larger = ["--master-dtype", "fp32", "--offload", "none"]
            assert plan_of(model, *base, "--gpu", name, *flags, *larger)["problems"]


@pytest.mark.parametrize("gpu", ["t4", "v100-16gb", "v100-32gb"])
def test_gpus_without_bf16_are_a_problem(gpu, toys):
    p = plan_of(toys["qwen2_5_vl"], "--gpu", gpu, "--gpus", 1)
    assert "has no bf16" in p["problems"][0] and len(p["problems"]) == 1 and "Ampere" in p["fix"]


@pytest.mark.parametrize("name, parameters", [
    ("Qwen2.5-VL-3B", 3_754_622_976), ("Qwen2.5-VL-7B", 8_292_166_656), ("Qwen2.5-VL-32B", 33_452_718_336),
    ("Qwen3-VL-2B", 2_127_532_032), ("Qwen3-VL-4B", 4_437_815_808), ("Qwen3-VL-8B", 8_767_123_696),
    ("Qwen3-VL-30B-A3B", 31_070_754_032),
])  # fmt: skip
def test_the_configs_that_ship_have_the_published_numbers_of_parameters(name, parameters):
    folder = P.find_config(f"Qwen/{name}-Instruct")
    hf = P.build_meta_model(folder)
    assert sum(p.numel() for p in hf.parameters()) == parameters and str(P.CONFIGS) in folder


def test_a_folder_is_read_rather_than_a_config_that_ships(toys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert P.find_config("Qwen") == "Qwen" and P.find_config("nobody/nothing") == "nobody/nothing"
    shipped = plan_of("Qwen/Qwen2.5-VL-3B-Instruct")
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "Qwen2.5-VL-3B-Instruct").symlink_to(toys["qwen2_5_vl"])
    P.count_sizes.cache_clear()
    assert plan_of("Qwen/Qwen2.5-VL-3B-Instruct")["parameters"] < 1e7 < shipped["parameters"]
    P.count_sizes.cache_clear()


@pytest.mark.parametrize("gpus", [2, 3, 4])
def test_the_suggested_share_of_vllm_fits(gpus, tmp_path):
    """It was rounded up, so that the plan repeated its own suggestion."""
    gpu_bench.config_of("7B").save_pretrained(tmp_path)
    flags = f"--gpu a100 --gpus {gpus} --gradient-checkpointing --micro-tokens 4096 --prompts-per-step 12".split()
    flags += ["--vllm", "gpu_memory_utilization=0.9"]
    share = re.match("Add --vllm (gpu_memory_utilization=[0-9.]+); the update", plan_of(tmp_path, *flags)["fix"])[1]
    assert plan_of(tmp_path, *flags, share)["problems"] == []


def test_vllm_needs_room_for_the_longest_sequence(tmp_path):
    gpu_bench.config_of("7B").save_pretrained(tmp_path)
    flags = "--gpus 8 --gradient-checkpointing --vllm gpu_memory_utilization=0.234".split()
    assert plan_of(tmp_path, *flags)["problems"] == []
    [problem] = plan_of(tmp_path, *flags, "--max-new-tokens", 6000)["problems"]
    assert "a KV cache for 6,512 tokens" in problem


def test_the_rollout_adds_up(tmp_path):
    gpu_bench.config_of("7B").save_pretrained(tmp_path)
    flags = "--gpus 8 --gradient-checkpointing".split()
    p = plan_of(tmp_path, *flags)
    m, gib = p["rollout_memory"], p["gpu_gib"]
    assert m["total"] == pytest.approx(sum(m.values()) - m["total"])
    assert m["engine_weights"] + m["kv_cache"] + m["engine"] == pytest.approx(0.6 * gib)
    assert all(m[name] == p["memory"][name] > 0 for name in ("weights", "optimizer", "vision_cache", "cuda"))
    hf = plan_of(tmp_path, *flags, "--rollout", "hf")["rollout_memory"]
    assert hf["engine_weights"] == hf["kv_cache"] == 0 and hf["engine"] * 2**30 == 2 * p["parameters"]
    served = plan_of(tmp_path, *flags, "--rollout", "server", "--servers", "http://a:1")["rollout_memory"]
    assert served["total"] == pytest.approx(0.6 * gib)


def test_adapters_are_counted_without_memory(tmp_path, monkeypatch):
    """They were drawn on the CPU: 9 GiB and a minute for rank 1024 of 7B."""
    gpu_bench.config_of("7B").save_pretrained(tmp_path)
    devices = set()
    original = P.add_lora

    def add_lora(hf, lora):
        original(hf, lora)
        devices.update(p.device.type for name, p in hf.named_parameters() if ".lora_" in name)

    monkeypatch.setattr(P, "add_lora", add_lora)
    P.count_sizes.cache_clear()
    plan_of(tmp_path, "--lora-rank", 1024)
    assert devices == {"meta"}


def test_flags_may_come_from_a_file(toys, tmp_path):
    """The defaults of a plan replaced those of --config=FILE, and with a space it demanded --data and --out."""
    (tmp_path / "run.toml").write_text(f'model = "{toys["qwen2_5_vl"]}"\nsteps = 60\nprompts_per_step = 16\n')
    out = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text, **_: out.append(text))
        for flags in ([f"--config={tmp_path}/run.toml"], ["--config", f"{tmp_path}/run.toml"]):
            P.print_plan(["--plan", "--json", *flags], train.parse_args, train.check_config)
    assert [json.loads(text)["steps"] for text in out] == [60, 60]


def test_prompts_come_from_the_data(toys, tmp_path):
    data = write_parquet(tmp_path / "train.parquet", shapes_rows(20, "train", 0))
    p = plan_of(toys["qwen2_5_vl"], "--data", data)
    assert 20 < p["prompt_tokens"] < 300 and p["patches"] > 4
    with pytest.raises(UserError, match="--micro-tokens 70 is too small: the longest prompt has"):
        plan_of(toys["qwen2_5_vl"], "--data", data, "--micro-tokens", 70)
    assert plan_of(toys["qwen2_5_vl"])["prompt_tokens"] == 512


@pytest.mark.parametrize("flags, message", [
    ("--gpus 6 --replicate 4 --prompts-per-step 24", "this takes 4 processes or a multiple"),
    ("--gpus 6", "--prompts-per-step 16 is not divisible by 6 processes"),
    ("--serve 4", "--serve 4: only for servers, but the engine is --rollout vllm"),
    ("--async-steps 2", "--async-steps 2: only for servers"),
    ("--rollout server", "--rollout server needs --servers URL... or --serve N"),
    ("--rollout server --servers http://a:1 http://a:1", "--servers http://a:1 is given twice"),
    ("--vllm tensor_parallel_size=3", "tensor_parallel_size=3 does not divide 8 processes"),
    ("--vllm tensor_parallel_size=0", "tensor_parallel_size=0 does not divide 8 processes"),
    ("--vllm gpu_memory_utilization=abc", "--vllm: could not convert string to float: 'abc'"),
    ("--response-tokens 65", "--response-tokens 65 exceeds --max-new-tokens 64"),
    ("--gpu-hour-usd 1e308", "must be above 0 and at most 1000"),
    ("--gpus 0", "--gpus 0: must be at least 1"),
    ("--training-efficiency 2", "--training-efficiency 2.0: must be above 0 and at most 1"),
    ("--lora-targets q_proj", "there are no adapters without --lora-rank"),
])  # fmt: skip
def test_mistakes_name_the_flag(flags, message, toys):
    with pytest.raises(UserError, match=re.escape(message)):
        plan_of(toys["qwen2_5_vl"], *flags.split())


def test_the_command_prints_a_table_of_100_columns(toys, tmp_path):
    data = write_parquet(tmp_path / "train.parquet", shapes_rows(20, "train", 0))
    flags = [*FLAGS.split(), "--model", toys["qwen3_vl"], "--data", data, "--gpu", "4090", "--gpus", 2]
    done = subprocess.run([sys.executable, "train.py", "--plan", *map(str, flags)], cwd=ROOT, capture_output=True,
                          text=True)  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and " on 2 x RTX 4090 24 GB; nodes: 1; GPUs for training: 2" in lines[0], done.stderr
    assert lines[-1] == "GPU memory: fits, as computed. CPU memory: not checked."
    assert max(map(len, lines[1:])) <= 103 and not (tmp_path / "-").exists()
    # only what was assumed is printed; a cap of the search is not a figure
    assert "Responses have half" in done.stdout and "Prompts have 512 tokens" not in done.stdout
    assert "largest --micro-tokens that fits: 131,072 or more;" in done.stdout


def test_flags_of_the_plan_and_of_training_are_checked(toys, capsys):
    for flags, message in (("--gpu h1000", "invalid choice: 'h1000'"), ("--gpuz 3", "did you mean --gpu or --gpus?"),
                           ("--respone-tokens 3", "did you mean --response-tokens"),
                           ("--gpu-hour 3", "did you mean --gpu-hour-usd")):  # fmt: skip
        with pytest.raises(SystemExit):
            plan_of(toys["qwen2_5_vl"], *flags.split())
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name, peak", [
    ("3B 8 GPUs", 11.8), ("7B 8 GPUs", 24.9), ("Qwen3-VL-8B 8 GPUs", 26.3),
    pytest.param("Qwen3-VL-30B-A3B 8 GPUs", 68.7, marks=pytest.mark.slow),
])  # fmt: skip
def test_peaks_are_within_5_percent_of_the_null_gpus(name, peak, tmp_path):
    """The peaks with recomputation of docs/hardware.md; benchmarks/plan.py compares all of them."""
    [row] = [row for row in memory_bench.ROWS if row.name == name]
    gpu_bench.config_of(row.size).save_pretrained(tmp_path)
    m = plan_of(tmp_path, "--gpus", 8, "--micro-tokens", 8192, "--gradient-checkpointing", "--rollout", "hf")["memory"]
    assert m["total"] - m["engine"] - m["cuda"] - m["vision_cache"] == pytest.approx(peak, rel=0.05)


def test_the_help_of_train_points_to_the_flags_of_a_plan(capsys):
    for flags in (["--help"], ["--help", "all"]):
        with pytest.raises(SystemExit):
            train.parse_args(flags)
        assert "train.py --plan --help" in capsys.readouterr().out


def test_gpus_of_40_and_80_gb_differ():
    assert GPU_CHOICES["a100-40gb"][1:] == (40, 312, 1555, 39.4) and GPU_CHOICES["a100"].gb == 80
    for device, tflops in (("NVIDIA A100-PCIE-40GB", 312), ("NVIDIA A10", 125), ("NVIDIA RTX A6000", 154.8)):
        assert peak_flops(device) == 1e12 * tflops
    for other in ("A10G", "RTX 3060 Ti", "RTX 4080 SUPER", "RTX 4090 Laptop GPU", "RTX 5090 D", "L400", "T400"):
        assert peak_flops(f"NVIDIA {other}") is None  # other GPUs
    assert peak_flops("NVIDIA GeForce RTX 4060 Ti") == 44e12 and peak_flops("Tesla V100-SXM2-32GB") == 125e12
