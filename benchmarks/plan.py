"""What train.py --plan predicts, beside what was published and what was measured; the tables of docs/plan.md.

    python benchmarks/plan.py                        # all tables, in four minutes, without a GPU or a network
    python benchmarks/plan.py --only published       # or: peaks, layouts, cpu
    python benchmarks/plan.py --short                # a row of each table

published  EasyR1's eight rows (assets/baselines.md at b44b311): seconds of a step, tokens/s per GPU, MFU, GPU memory.
           Its settings are those of its examples/config.yaml. The tokens of a step are derived from its throughput
           and step time. Lengths of prompts are not published: TEXT tokens and an image of the configured min_pixels
           are assumed. Last line: the efficiencies that these rows suggest, from which --plan's defaults were rounded.
peaks      the peaks of the null GPU in docs/hardware.md (benchmarks/memory.py)
layouts    the layouts of docs/scale.md
cpu        toy runs of train.py on this CPU: what their process adds to its resident memory, and the activations that
           autograd keeps, counted from storages
"""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import gpu as gpu_bench  # noqa: E402
import memory  # noqa: E402

import demo  # noqa: E402
import parallel.plan as plan_module  # noqa: E402
import train  # noqa: E402
from parallel.plan import PlanConfig, gpu_memory, make_plan  # noqa: E402

GEO3K = "--data - --out - --steps 60 --prompts-per-step 512 --group-size 5 --minibatches 4 --max-new-tokens 2048 "
GEO3K += "--gradient-checkpointing"


def model_folder(size: str, root: Path) -> Path:
    """Return a folder with the config.json of a model of benchmarks/gpu.py, below `root`."""
    folder = root / size
    if not folder.exists():
        gpu_bench.config_of(size).save_pretrained(folder)
    return folder


# ----------------------------------------------------------------------------------------------------------------------
# Published


class Published(NamedTuple):
    """A row of EasyR1's performance baselines; `micro` are responses per micro-batch in the update, of up to 4,096
    tokens each."""

    name: str
    size: str
    gpu: str
    bits: str
    micro: int
    tp: int
    gb: int
    throughput: int
    seconds: int
    mfu: float  # percent


PUBLISHED = (
    Published("3B", "3B", "h100", "fp32", 1, 2, 54, 1800, 120, 8.1),
    Published("7B", "7B", "h100", "fp32", 1, 2, 68, 1600, 145, 16.0),
    Published("7B, micro-batch 4", "7B", "h100", "fp32", 4, 2, 72, 2000, 120, 23.2),
    Published("7B on L20", "7B", "l20", "fp32", 1, 2, 42, 410, 580, 26.5),
    Published("7B, bf16", "7B", "h100", "bf16", 1, 2, 58, 1600, 145, 16.0),
    Published("32B, bf16", "32B", "h100", "bf16", 1, 8, 72, 620, 530, 25.8),
    Published("Qwen3-VL-30B-A3B", "30B-A3B", "h800", "bf16", 1, 8, 50, 80, 4600, 1.8),
    Published("Qwen3-VL-30B-A3B-Thinking", "30B-A3B", "h800", "bf16", 1, 8, 50, 65, 8000, 1.4),
)
TEXT = 130  # assumed tokens of a question with EasyR1's instruction
MIN_PIXELS = 262144
RESPONSE = 285  # mean response of the fastest row with 7B


def plan_published(row: Published, root: Path, plan: PlanConfig) -> dict:
    """Return the plan of EasyR1's settings for a row: no shared prompts (--attn flash), a trained tower, a reference,
    whose weights it keeps in CPU memory."""
    side = 32 if row.size == "30B-A3B" else 28  # pixels of an image token
    image = math.ceil(MIN_PIXELS / side**2)
    response = row.throughput * row.seconds * 8 / 2560 - TEXT - image
    flags = f"{GEO3K} --kl-coef 0.01 --train-vision all --attn flash --micro-tokens {4096 * row.micro}"
    flags += f" --master-dtype {row.bits} --rollout vllm --vllm tensor_parallel_size={row.tp}"
    cfg = train.parse_args([*flags.split(), "--model", str(model_folder(row.size, root))])
    cfg = replace(cfg, parallel=replace(cfg.parallel, offload="reference"))
    plan = replace(plan, gpu=row.gpu, response_tokens=round(response))
    return make_plan(cfg, plan, 8, [(TEXT + image, (4 * image,))])


def print_published(root: Path, rows: tuple[Published, ...]) -> None:
    print("| EasyR1, 8 GPUs | response tokens | s per step | planned | error | tok/s/GPU | planned | MFU | "
          "planned | GiB | planned |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    plan, plans = PlanConfig(), []
    for row in rows:
        p = plan_published(row, root, plan)
        plans.append(p)
        needed = max(p["memory"]["total"], p["engine"]["limit"] + p["memory"]["cuda"])
        print(f"| {row.name} | {p['response_tokens']} | {row.seconds} | {p['step_seconds']:.0f} | "
              f"{p['step_seconds'] / row.seconds - 1:+.0%} | {row.throughput} | "
              f"{p['tokens_per_second_per_gpu']:.0f} | {row.mfu}% | {p['mfu']:.1%} | "
              f"{row.gb * 1e9 / 2**30:.0f} | {needed:.0f} |")
    dense = [(row, p) for row, p in zip(rows, plans, strict=True) if row.size != "30B-A3B"]
    training = median(row.mfu / 100 / p["mfu"] * plan.training_efficiency for row, p in dense)

    def error(seconds: float) -> float:
        plan_module.DECODING_STEP_SECONDS = seconds
        return abs(median(plan_published(row, root, plan)["step_seconds"] / row.seconds for row, _ in dense) - 1)

    default = plan_module.DECODING_STEP_SECONDS
    best = min((n / 1000 for n in range(31)), key=error)
    plan_module.DECODING_STEP_SECONDS = default
    print(f"\nthe dense rows suggest: --training-efficiency {training:.2f} (from the median of MFU; default "
          f"{plan.training_efficiency}), {1000 * best:.0f} ms per decoding step (median error of seconds 0; default "
          f"{1000 * default:.0f})\n")


# ----------------------------------------------------------------------------------------------------------------------
# Peaks of the null GPU


def documented_peaks() -> list[list[str]]:
    """Return the cells of the rows of the table of peaks in docs/hardware.md."""
    text = (ROOT / "docs" / "hardware.md").read_text().partition("| at rest | peak, 8,192 tokens |")[2]
    rows = [line.strip("| ").split(" | ") for line in text.partition("\n\n")[0].splitlines()[2:]]
    # a row stands for two
    return [cells for row in rows for cells in ([row, row] if "or on 16" in row[0] else [row])]


def print_peaks(root: Path, some: int | None) -> None:
    print("| GiB per GPU | at rest | planned | peak | planned | error | peak without checkpointing | planned | "
          "error |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for row, cells in list(zip(memory.ROWS, documented_peaks(), strict=True))[:some]:
        bits = {"float32": "fp32", "bfloat16": "bf16"}[row.master_dtype]
        flags = f"--data - --out - --steps 1 --micro-tokens 8192 --replicate {row.replicate} --master-dtype {bits} "
        flags += f"--lora-rank {row.lora_rank} --model {model_folder(row.size, root)}"
        text = f"| {row.name} | {cells[1]} "
        for number, measured in enumerate((cells[2], cells[4])):
            cfg = train.parse_args(flags.split() + ["--gradient-checkpointing"] * (number == 0))
            parts = gpu_memory(cfg, row.gpus)
            planned = parts["total"] - parts["cuda"] - parts["vision_cache"]  # torch's allocator, without a cache
            rest = parts["weights"] + parts["optimizer"]
            text += f"| {rest:.1f} " * (number == 0) + f"| {measured} | {planned:.1f} | "
            text += f"{planned / float(measured) - 1:+.1%} " if measured != "-" else "- "
        print(f"{text}|", flush=True)
    print()


# ----------------------------------------------------------------------------------------------------------------------
# Layouts of docs/scale.md


LAYOUTS = (  # nodes, model, training GPUs, GPUs that serve, --replicate, TP
    (1, "7B", 8, 0, 1, 1), (1, "7B", 4, 4, 1, 1), (2, "7B", 16, 0, 2, 1), (2, "7B", 8, 8, 1, 1),
    (2, "32B", 16, 0, 1, 4), (4, "7B", 16, 16, 2, 1), (4, "32B", 16, 16, 1, 4), (16, "7B", 64, 64, 8, 1),
    (16, "32B", 64, 64, 4, 4),
)  # fmt: skip


def print_layouts(root: Path, some: int | None) -> None:
    print("| nodes | model | train | serve | GiB of 79.1 | largest --micro-tokens | rollout s | training s | "
          "s per step | tok/s/GPU | USD, 60 steps |")
    print("|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for nodes, size, gpus, serving, replicate, tp in LAYOUTS[:some]:
        flags = f"{GEO3K} --replicate {replicate} --model {model_folder(size, root)}"
        flags += " --master-dtype bf16" * (nodes == 1 and serving > 0) + " --group-size 16" * (nodes == 16)
        if serving:
            urls = " ".join(f"http://s{i}" for i in range(serving // tp))
            flags += f" --rollout server --async-steps 1 --servers {urls}"
        else:
            flags += f" --rollout vllm --vllm tensor_parallel_size={tp}" + " gpu_memory_utilization=0.5" * (tp > 1)
        plan = PlanConfig(server_gpus=tp, response_tokens=RESPONSE)
        p = make_plan(train.parse_args(flags.split()), plan, gpus, [(TEXT + 335, (4 * 335,))])
        assert not p["problems"], p["problems"]
        rollout = p["seconds"]["prefill"] + p["seconds"]["decode"]
        training = sum(p["seconds"].values()) - rollout
        print(f"| {nodes} | {size} | {gpus} | {serving or 'the same'} | {p['memory']['total']:.1f} | "
              f"{p['max_micro_tokens']:,} | {rollout:.0f} | {training:.0f} | {p['step_seconds']:.0f} | "
              f"{p['tokens_per_second_per_gpu']:,.0f} | {p['usd']:,.0f} |")
    print()


# ----------------------------------------------------------------------------------------------------------------------
# Toy runs on this CPU


CASES = {"full": "", "recomputed": "--gradient-checkpointing", "LoRA": "--lora-rank 16"}
CPU_TOKENS = 1024


def measure_on_cpu(folder: str, case: str) -> dict[str, float]:
    """Update a toy's weights in this process. Return MiB by component: planned, counted from storages, and what the
    update added to the largest resident set."""
    import torch
    import torch.distributed as dist

    from kernels import CPU_BLOCK_ELEMENTS
    from model import Processor
    from parallel.models import build_models
    from report.log import SkippedUpdates
    from rollout import Prompt, Rollout
    from utils import DistContext, Meter

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ctx = DistContext(0, 1, torch.device("cpu"))
    flags = f"--model {folder} --data - --out - --steps 1 --group-size 8 --dtype float32 --micro-tokens {CPU_TOKENS}"
    cfg = train.parse_args(f"{flags} --attn sdpa --kernel torch --rollout server {CASES[case]}".split())
    processor = Processor(folder)
    prompts = [Prompt(f"p{i}", [5 + i] * 64, [], None, []) for i in range(2)]
    length = (CPU_TOKENS - 64) // 8
    rollouts = [
        Rollout(prompt, g, [9 + g] + [20] * (length - 1), [True] * length, [0.0] * length, "stop", "",
                {"reward": float(g % 2)})
        for prompt in prompts for g in range(8)
    ]  # fmt: skip
    gc.collect()
    before = resident_mib("VmRSS")
    models = build_models(cfg, processor, ctx)
    batch = gpu_bench.make_batch(rollouts, cfg, models.policy.hf.config, ctx, CPU_TOKENS, share=True)
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    blocks = [*models.policy.hf.get_submodule("model.language_model").layers]
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    handles = []
    if not cfg.model.gradient_checkpointing:  # which has hooks of its own
        handles = [blocks[0].register_forward_pre_hook(lambda *_: hooks.__enter__()),
                   blocks[-1].register_forward_hook(lambda *_: hooks.__exit__())]  # fmt: skip
    out = models.policy(batch.minibatches[0][0])
    for handle in handles:
        handle.remove()
    kept = sum(storage.nbytes() for storage in storages.values())  # gathered weights of blocks are empty again
    storages.clear()
    out.logp_K.sum().backward()  # frees what it kept
    models.zero_grad()
    local = [p.to_local() for p in models.policy.parameters()]
    reset_peak()
    train.update_policy(models, batch, cfg, train.TrainState(), ctx, Meter(), SkippedUpdates(Path("."), ctx))
    peak = resident_mib("VmHWM") - before
    counted = {
        "weights": sum(p.nbytes for p in local),
        "optimizer": sum(x.to_local().nbytes for state in models.optimizer.state.values() for x in state.values()
                         if x.ndim),
        "gradients": sum(p.grad.to_local().nbytes for p in models.policy.parameters() if p.grad is not None),
        "activations": kept,
    }  # fmt: skip
    plan_module.GPU_BLOCK_ROWS = CPU_BLOCK_ELEMENTS // models.policy.hf.config.text_config.vocab_size
    planned = {name: 1024 * gib for name, gib in gpu_memory(cfg, 1).items()}
    total = planned["total"] - planned["cuda"] - planned["vision_cache"]
    return {"planned": planned | {"total": total},
            "counted": {name: n / 2**20 for name, n in counted.items()} | {"total": peak}}  # fmt: skip


def resident_mib(key: str) -> float:
    """Return a size from /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


def reset_peak() -> None:
    """Forget the largest resident set so far (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def print_cpu(root: Path, short: bool) -> None:
    """Measure each case in a process of its own, whose allocator returns memory at once."""
    small, folder = root / "small", root / "toy"
    demo.make_model(small, hidden=64, layers=1)
    demo.make_model(folder, hidden=128 if short else 512, layers=2 if short else 4, vocab=2048 if short else 16384)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    print("| MiB | " + " | ".join(f"{name} | planned" for name in COLUMNS) + " |")
    print("|---|" + "--:|" * 2 * len(COLUMNS))
    for case in list(CASES)[: 1 if short else None]:
        command = [sys.executable, __file__, "--child", str(small), str(folder), case]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        result = json.loads(done.stdout.splitlines()[-1])
        cells = [f"{result['counted'][name] or '-':{'.0f' * (result['counted'][name] > 0)}} | "
                 f"{result['planned'][name]:.0f}" for name in COLUMNS]  # fmt: skip
        error = result["planned"]["total"] / result["counted"]["total"] - 1
        print(f"| {case} | {' | '.join(cells)} ({error:+.0%}) |", flush=True)
    print()


COLUMNS = ("weights", "optimizer", "gradients", "activations", "total")


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        root, some = Path(name), 1 if args.short else None
        if args.only in ("all", "published"):
            print_published(root, PUBLISHED[:some])
        if args.only in ("all", "peaks"):
            print_peaks(root, some)
        if args.only in ("all", "layouts"):
            print_layouts(root, some)
        if args.only in ("all", "cpu"):
            print_cpu(root, args.short)


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", choices=("all", "published", "peaks", "layouts", "cpu"), default="all",
                   help="a single table")
    p.add_argument("--short", action="store_true", help="a row of each table, a smaller toy")
    p.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = p.parse_args()
    if arguments.child:
        small, folder, case = arguments.child
        measure_on_cpu(small, case)  # so that the start includes what libraries allocate once
        print(json.dumps(measure_on_cpu(folder, case)), flush=True)
        os._exit(0)
    main(arguments)
