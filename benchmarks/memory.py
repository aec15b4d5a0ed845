"""Peak GPU memory of the update, as torch's allocator counts it, for real models on any number of GPUs; needs only one.

    python benchmarks/memory.py --null-gpu                          # the tables of docs/hardware.md; no GPU is needed
    python benchmarks/memory.py --rows "7B 8 GPUs" --tokens 8192    # one row, on a real GPU
    python benchmarks/memory.py --short                             # a toy model, in seconds

Each figure comes from a separate process. It builds the policy of rank 0 with random weights, sharded as if the other
ranks existed (torch's fake process group, whose collectives return at once). Then it runs train.update_policy on two
full micro-batches, because gradients are in memory only from the second micro-batch of an update on. A micro-batch
holds prompts of 512 tokens, about 300 of them image tokens, each with 8 responses of about 960 tokens; with --single it
is one sequence.

    at rest         weights and optimizer, between updates
    with gradients  the same after the update, before its gradients are freed
    peak            largest memory that tensors had at once in the update
    reserved        largest memory that torch's allocator held for them, including gaps between tensors
    longest         the largest multiple of 1,024 tokens, up to 131,072, that fits in 80 GB (79.1 GiB) with 5 GiB left
                    for a sleeping engine and CUDA itself. As memory grows linearly, it is extrapolated from the peaks
                    of the two --tokens and then measured

It needs torch for CUDA and one device. Only sizes matter, so any device will do, even one that does not compute.
--null-gpu uses a simulated device (`make test-cuda-paths` builds it, in .venv-cuda) and about 3 GB of host memory.
The figures do not include CUDA's own context, NCCL's buffers, and cached features of other images (--vision-cache-gb).
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
GPU_GIB, FREE_GIB = 79.1, 5.0
LONGEST = 131072
# The null GPU computes operations of up to 4 MiB. Indices of LONGEST tokens are smaller; they must have real values,
# because the sizes of other tensors depend on them
VALUES_MIB = "4"


@dataclass(frozen=True)
class Row:
    """A model on a number of GPUs, with the settings of train.py that decide its memory."""

    name: str
    size: str  # model size, for gpu.config_of
    gpus: int
    replicate: int = 1
    lora_rank: int = 0
    master_dtype: str = "float32"


ROWS = (
    Row("3B 1 GPU", "3B", 1),
    Row("3B 1 GPU, bf16 masters", "3B", 1, master_dtype="bfloat16"),
    Row("3B 1 GPU, LoRA 64, bf16 masters", "3B", 1, lora_rank=64, master_dtype="bfloat16"),
    Row("3B 8 GPUs", "3B", 8),
    Row("7B 1 GPU, LoRA 64, bf16 masters", "7B", 1, lora_rank=64, master_dtype="bfloat16"),
    Row("7B 4 GPUs", "7B", 4),
    Row("7B 8 GPUs", "7B", 8),
    Row("7B 2 x 8 GPUs, HSDP", "7B", 16, replicate=2),
    Row("7B 8 GPUs, LoRA 64, bf16 masters", "7B", 8, lora_rank=64, master_dtype="bfloat16"),
    Row("32B 8 GPUs", "32B", 8),
    Row("32B 16 GPUs", "32B", 16),
    Row("32B 32 GPUs", "32B", 32),
    Row("Qwen3-VL-8B 8 GPUs", "8B", 8),
    Row("Qwen3-VL-30B-A3B 8 GPUs", "30B-A3B", 8),
    Row("Qwen3-VL-30B-A3B 8 GPUs, bf16 masters", "30B-A3B", 8, master_dtype="bfloat16"),
    Row("Qwen3-VL-30B-A3B 16 GPUs", "30B-A3B", 16),
    Row("Qwen3-VL-30B-A3B 8 GPUs, LoRA 64, bf16 masters", "30B-A3B", 8, lora_rank=64, master_dtype="bfloat16"),
)
TOY = Row("toy 2 GPUs", "toy", 2)


def draw_rollouts(config, tokens: int, single: bool) -> list:
    """Return groups of 8 rollouts of random tokens, which fill two micro-batches of `tokens` tokens. With `single` each
    rollout is one sequence of that length, so there are 16 micro-batches."""
    import torch
    from gpu import BEGIN, END, IMAGE, noisy_image

    from rollout import Prompt, Rollout

    side = 2 if tokens < 2048 else 17  # 17 x 17 image tokens and 2 vision tokens around them: about 300
    groups = 1 if single else max(1, round(tokens / 8192))
    prompt_tokens = 512 if tokens >= 2048 else 20
    length = tokens - prompt_tokens if single else (tokens // groups - prompt_tokens) // 8
    text = torch.randint(5, 600, (prompt_tokens - side * side - 2,)).tolist()
    rollouts = []
    for p in range(2 * groups):
        image = noisy_image(str(p), side, config)
        prompt = Prompt(f"p{p:03}", [BEGIN, *[IMAGE] * side * side, END, *text], [image], None, [])
        for g in range(8):
            response = torch.randint(5, config.text_config.vocab_size - 1, (length,)).tolist()
            rewards = {"reward": float(g % 2)}
            rollouts.append(Rollout(prompt, g, response, [True] * length, [0.0] * length, "stop", "", rewards))
    return rollouts


def measure(row: Row, tokens: int, recompute: bool, single: bool) -> dict[str, float]:
    """Run an update of rank 0. Return the tokens of its larger micro-batch, and GiB of memory by column name."""
    import gpu
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import train
    from layers.lora import LoraConfig
    from parallel.models import Models
    from parallel.sharding import ParallelConfig, make_optimizer
    from report.log import SkippedUpdates
    from utils import ALLOC_CONF, DistContext, Meter

    os.environ.setdefault("PYTORCH_ALLOC_CONF", ALLOC_CONF)  # as setup_distributed does
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=row.gpus)
    ctx = DistContext(0, 1, device)  # sums over ranks include only this rank
    lora = LoraConfig(row.lora_rank, 32.0) if row.lora_rank else None
    parallel, master = ParallelConfig(replicate=row.replicate), getattr(torch, row.master_dtype)
    policy, _ = gpu.build(row.size, ctx, lora, recompute, parallel, master)
    policy.attention = "flex" if cuda else "sdpa"
    optimizer = make_optimizer(policy, 0.0, 0.0)
    flags = f"--model - --data - --out - --steps 1 --group-size 8 --max-new-tokens 1024 --micro-tokens {tokens}"
    cfg = train.parse_args(flags.split())
    rollouts = draw_rollouts(policy.hf.config, tokens, single)
    batch = gpu.make_batch(rollouts, cfg, policy.hf.config, ctx, tokens, share=True)
    batch.minibatches = [batch.minibatches[0][:2]]
    stats_gib = {"allocated": 0.0, "peak": 0.0, "reserved": 0.0, "in use": 0.0}

    def memory() -> dict[str, float]:
        if cuda:
            stats = torch.cuda.memory_stats()
            stats_gib["allocated"] = stats["allocated_bytes.all.current"] / 2**30
            stats_gib["peak"] = stats["allocated_bytes.all.peak"] / 2**30
            stats_gib["reserved"] = stats["reserved_bytes.all.peak"] / 2**30
            free, total = torch.cuda.mem_get_info()
            stats_gib["in use"] = (total - free) / 2**30  # on the whole GPU, including CUDA itself and other processes
        return dict(stats_gib)

    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rest = memory()["allocated"]
    models = Models(policy, optimizer)
    train.update_policy(models, batch, cfg, train.TrainState(), ctx, Meter(), SkippedUpdates(Path("."), ctx))
    after = memory()
    n_tokens = max(micro.n_tokens for micro in batch.minibatches[0])
    return {"tokens": n_tokens, "at rest": rest, "with gradients": after["allocated"],
            "peak": after["peak"], "reserved": after["reserved"], "in use": after["in use"]}


def null_gpu(gib: float) -> dict[str, str]:
    """Return the environment variables that give a process a null GPU with `gib` GiB of memory."""
    sys.path.append(str(ROOT / "tests"))
    from null_gpu.build import HERE, environment

    variables = environment()
    if not variables["LD_PRELOAD"]:
        sys.exit("error: --null-gpu is not built yet; run python tests/null_gpu/build.py with the same Python")
    return variables | {"PYTHONPATH": str(HERE / "site"), "NULL_GPU_VALUES_MIB": VALUES_MIB, "NULL_GPU_GIB": str(gib)}


def run(row: Row, tokens: int, args: argparse.Namespace, recompute: bool) -> dict[str, float] | None:
    """Measure in a separate process. Return the figures, or None if the GPU runs out of memory."""
    command = [sys.executable, __file__, "--child", row.name, "--tokens", str(tokens)] + ["--recompute"] * recompute
    command += ["--single"] * args.single
    environment = os.environ | (null_gpu(args.gib) if args.null_gpu else {})
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode and "OutOfMemoryError" not in done.stderr:
        sys.exit(f"error: {row.name}, {tokens} tokens: exit status {done.returncode}: {done.stderr[-3000:]}")
    return json.loads(lines[-1]) if lines and not done.returncode else None


def find_longest(row: Row, args: argparse.Namespace, recompute: bool, measured: dict[int, dict[str, float]]) -> int:
    """Return the largest multiple of 1,024 tokens whose peak leaves FREE_GIB free: extrapolate from two measured token
    counts, then try downwards."""
    (a, low), (b, high) = sorted(measured.items())
    slope = (high["peak"] - low["peak"]) / (b - a)
    guess = min(LONGEST, int((GPU_GIB - FREE_GIB - low["peak"]) / slope + a) // 1024 * 1024)
    while guess > 0:
        figures = run(row, guess, args, recompute)
        if figures and figures["peak"] <= GPU_GIB - FREE_GIB:
            return guess
        guess -= 1024
    return 0


def has_gpu() -> bool:
    """Return whether this Python has torch and a CUDA device."""
    done = subprocess.run([sys.executable, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"])
    return done.returncode == 0


def format_cell(x: float | None) -> str:
    return "too much" if x is None else f"{x:,.0f}" if x > 1000 else f"{x:.1f}"


def main(args: argparse.Namespace) -> None:
    chosen = [TOY] if args.short else [row for row in ROWS if not args.rows or row.name in args.rows]
    if len(chosen) < len(args.rows):
        known = "".join(f"\n  {row.name!r}" for row in ROWS)
        sys.exit(f"error: --rows {' '.join(map(repr, args.rows))}: unknown row; choose from{known}")
    if not (args.null_gpu or args.short or has_gpu()):
        sys.exit("error: there is no CUDA device; pass --null-gpu to use a simulated one")
    sizes = [300] if args.short else args.tokens or [8192, 16384]
    print("| GiB a GPU | recomputed | tokens | at rest | with gradients | peak | reserved | longest |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for row in chosen:
        for recompute in (True, False)[: 1 if args.only_recomputed else 2]:
            measured = {}
            for tokens in sizes:
                figures = run(row, tokens, args, recompute)
                measured |= {tokens: figures} if figures else {}
                last = len(measured) > 1 and tokens == sizes[-1]
                max_tokens = find_longest(row, args, recompute, measured) if last and not args.no_longest else ""
                keys = ("at rest", "with gradients", "peak", "reserved")
                cells = [format_cell(figures and figures[key]) for key in keys]
                recomputed = "yes" if recompute else "no"
                print(f"| {row.name} | {recomputed} | {tokens} | {' | '.join(cells)} | {max_tokens} |", flush=True)


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", nargs="*", default=[], help="names of rows (default: all)")
    p.add_argument("--tokens", nargs="*", type=int, help="tokens of a micro-batch (default: 8192 16384)")
    p.add_argument("--no-longest", action="store_true", help="do not search for the longest micro-batch")
    p.add_argument(
        "--only-recomputed", action="store_true", help="measure only with --gradient-checkpointing, not without"
    )
    p.add_argument("--null-gpu", action="store_true", help="use a simulated GPU that computes nothing (tests/null_gpu)")
    p.add_argument("--gib", type=float, default=400, help="memory of the simulated GPU in GiB (default: 400)")
    p.add_argument("--single", action="store_true", help="micro-batches of one sequence each")
    p.add_argument("--short", action="store_true", help="a toy model; on a CPU it runs, but measures nothing")
    p.add_argument("--child", help=argparse.SUPPRESS)
    p.add_argument("--recompute", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        [row] = [row for row in (*ROWS, TOY) if row.name == args.child]
        print(json.dumps(measure(row, args.tokens[0], args.recompute, args.single)), flush=True)
        os._exit(0)
    main(args)
