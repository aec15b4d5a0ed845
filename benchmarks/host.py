"""CPU time of a training step on the host, without sampling and without waiting for a GPU.

    OMP_NUM_THREADS=1 python benchmarks/host.py                # 512 prompts x 8 responses, on 8 ranks and on 1
    OMP_NUM_THREADS=1 python benchmarks/host.py --short        # 16 prompts x 4 responses, on 2 ranks

Every rank is a separate process; the ranks communicate over gloo. Each prompt has an image of 600 tokens, stored as
JPEG at another size; a response has --tokens tokens on average, and its text contains formulas. The functions are those
of train.py, with the configuration of a toy model; nothing is sampled and no model runs. Each figure is the CPU time in
seconds of the slowest rank, summed over the threads of its process. Wall time would mean little, because there may be
more ranks than cores.

prompts    decode, resize and tokenize the rank's images and prompts (rollout.make_prompts)
balance    compute each group's FLOPs, send groups to their ranks, pack, build the token columns (train.pack_batch)
patches    cut the images of each micro-batch into patches, each image once
columns    compute the metrics of rollouts, and advantages
report     send records of samples to rank 0, write the page and curves

"rank 0 waits" is the wall time that rank 0 spends on the report before its next step.
"""

import argparse
import io
import random
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

import demo  # noqa: E402
import train  # noqa: E402
from model import Processor, load_config  # noqa: E402
from packing import Packer, flop_costs  # noqa: E402
from prepare_data import Example  # noqa: E402
from report.log import RunLog  # noqa: E402
from report.metrics import rollout_metrics  # noqa: E402
from rollout import GroupPool, Prompt, Rollout, make_prompts  # noqa: E402
from utils import DistContext, Meter, run_script, setup_distributed  # noqa: E402

TEXT = "so the angle $\\frac{180 - 2x}{3}$ equals \\(x^2\\) and then by Pythagoras **side** is $\\sqrt{3}$ cm\n"


def make_examples(n: int) -> list[Example]:
    """Return examples whose images must be decoded and resized: 16 JPEG images, as files that differ in every row."""
    rng = np.random.default_rng(0)
    files = []
    for _ in range(16):
        small = Image.fromarray(rng.integers(0, 255, (27, 40, 3), dtype=np.uint8))
        out = io.BytesIO()
        small.resize((850, 565), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
        files.append(out.getvalue())
    messages = [{"role": "user", "content": "<image>Find x. " + "The figure is not to scale. " * 10}]
    rows = []
    for i in range(n):  # decoders ignore bytes after a JPEG's end; they make each row's file distinct
        file = files[i % 16] + i.to_bytes(4)
        rows.append(Example(f"geo-{i}", "shapes", messages, [file], "7", {"split": "train", "index": i}))
    return rows


def make_rollouts(prompts: list[Prompt], group: int, n_tokens: int) -> list[Rollout]:
    rollouts = []
    for prompt in prompts:
        rng = random.Random(prompt.uid)
        for sample in range(group):
            n = rng.randint(n_tokens // 2, n_tokens * 3 // 2)
            response = [rng.randrange(250) for _ in range(n)]
            text = " ".join(rng.choices(TEXT.split(" "), k=n * 3 // 4))
            right = float(rng.random() < 0.5)
            rollouts.append(Rollout(prompt, sample, response, [True] * n, [-1.0] * n, "stop", text,
                                    {"accuracy": right, "reward": right}, versions=[0] * n, ended_by="response"))
    return rollouts


class Timer:
    """A timer of CPU seconds. Each call records, under a name, the slowest rank's CPU time since the previous call."""

    def __init__(self, ctx: DistContext):
        self.ctx, self.since, self.seconds = ctx, time.process_time(), {}

    def __call__(self, name: str) -> None:
        elapsed = time.process_time() - self.since
        self.seconds[name] = max(self.ctx.gather(elapsed))
        self.since = time.process_time()


def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    ctx = setup_distributed()
    flags = f"--model {args.model} --data - --out {args.out} --steps 1000 --micro-tokens 32768"
    flags += f" --prompts-per-step {args.prompts} --group-size {args.group}"
    cfg = train.parse_args(flags.split())
    processor = Processor(args.model, 4 * 28 * 28, 600 * 28 * 28)
    examples = make_examples(args.prompts)
    packer = Packer(cfg.optim.micro_tokens, processor.image_token_id, flop_costs(load_config(args.model)))
    log = RunLog(cfg, ctx, None, 0)
    pool = GroupPool(cfg.algo, cfg.rollout, 0, ctx)
    timer = Timer(ctx)
    prompts = make_prompts([examples[i] for i in range(ctx.rank, pool.target_groups, ctx.world)], processor)
    timer("prompts")
    assert prompts[0].images[0].n_tokens == 600
    rollouts = make_rollouts(prompts, args.group, args.tokens)
    pool.add(rollouts, [r.rewards for r in rollouts])
    timer("(made up)")
    meter = Meter()
    batch = train.pack_batch(pool, cfg, packer, ctx, meter)
    timer("balance")
    for micro in chain.from_iterable(batch.minibatches):
        for image in {image.key: image for image in micro.images}.values():
            image.pixel_values("cpu")
    timer("patches")
    metrics = rollout_metrics(pool, {}) | meter.reduce(ctx)
    train.set_advantages(batch, cfg.algo, 0.0, ctx, meter)
    timer("columns")
    start = time.perf_counter()
    log.log_step(1, metrics)
    log.report(1, batch, metrics)
    wait_s = time.perf_counter() - start
    log.close()
    timer("report")
    if ctx.is_main:
        timer.seconds.pop("(made up)")
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in timer.seconds.items())
        print(f"{ctx.world} rank(s), {args.prompts} prompts x {args.group} x {args.tokens} tokens: {shown}; "
              f"rank 0 waits {wait_s:.2f} s for the report")  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompts", type=int, default=512, help="prompts per step, over all ranks")
    p.add_argument("--group", type=int, default=8, help="responses per prompt")
    p.add_argument("--tokens", type=int, default=1000, help="mean tokens per response")
    p.add_argument("--ranks", type=int, nargs="+", default=[8, 1], help="numbers of ranks to measure")
    p.add_argument("--short", action="store_true", help="16 prompts x 4 x 50 tokens, on 2 ranks")
    p.add_argument("--model", help=argparse.SUPPRESS)  # only passed to the processes of ranks
    p.add_argument("--out", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.short:
        args.prompts, args.group, args.tokens, args.ranks, args.short = 16, 4, 50, [2], False
    if args.model:
        run_script(measure, lambda: args)  # it ends the process without waiting for gloo's threads, which may abort it
    with tempfile.TemporaryDirectory() as folder:
        demo.make_model(Path(folder) / "toy")
        for ranks in args.ranks:
            sizes = ["--prompts", args.prompts, "--group", args.group, "--tokens", args.tokens]
            rank_flags = ["--model", Path(folder) / "toy", "--out", Path(folder) / f"run{ranks}"]
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, __file__]
            command = [sys.executable, *map(str, launch + sizes + rank_flags)]
            result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            print(next(line for line in result.stdout.splitlines() if "rank(s)" in line), flush=True)


if __name__ == "__main__":
    main()
