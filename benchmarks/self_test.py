"""Error rates of the self-test: how often it refuses a correct run, and how often it misses a fault of the weight sync.

    OMP_NUM_THREADS=1 python benchmarks/self_test.py                        # random toys of all families, bf16 and fp32
    OMP_NUM_THREADS=1 python benchmarks/self_test.py demo/start demo/final  # trained models
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/self_test.py --lora-rank 8
    OMP_NUM_THREADS=1 python benchmarks/self_test.py --short                # seconds

Policy and engine are built as in train.py. Each seed draws different samples and different faults:
sound     nothing is wrong
tensor    one trained tensor, chosen at random, is not sent
tower     one trained tensor of the vision tower is not sent
experts   two experts of a layer are swapped
A cell is the number of wrong decisions in --seeds self-tests: refused correct runs, or missed faults. In brackets is
the difference between engine and trainer under new weights that was closest to a wrong decision, divided by the limit.
"""

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402

import demo  # noqa: E402
import train  # noqa: E402
from engines.launch import make_training_engine  # noqa: E402
from engines.self_test import self_test  # noqa: E402
from errors import UserError  # noqa: E402
from model import FAMILIES, Processor  # noqa: E402
from packing import Packer  # noqa: E402
from parallel.models import build_models  # noqa: E402
from parallel.sharding import FullParameters  # noqa: E402
from rollout import Engine, ExampleList, SamplingParams, make_prompts, never_stop  # noqa: E402
from utils import NamedTensors, derive_seed, setup_distributed  # noqa: E402

FAULTS = ("sound", "tensor", "tower", "experts")
RATIO = re.compile(r"under new weights(?:: | differ by )([0-9.e+-]+)(?: \(limit | nats.*?average is )([0-9.e+-]+)")
LIVE_ENGINES: list[Engine] = []  # garbage-collecting one engine would end vLLM's process groups


def corrupt(named: NamedTensors, dropped: str, layer: str) -> Iterator:
    """Yield the tensors of a sync without the tensor `dropped`, and with the first two experts of `layer` swapped."""
    for name, tensor in named:
        if layer and name.startswith(f"{layer}.experts."):
            tensor = tensor[[1, 0, *range(2, len(tensor))]]
        if name != dropped:
            yield name, tensor


def measure(folder: str, dtype: str, args: argparse.Namespace, out: Path, ctx) -> dict[str, list[float]]:
    """Return, per fault and seed, the difference under new weights divided by the limit."""
    flags = ["--model", folder, "--data", "-", "--out", str(out), "--steps", "1", "--dtype", dtype]
    flags += ["--rollout", args.rollout, "--max-new-tokens", "16", "--lora-rank", str(args.lora_rank)]
    flags += ["--train-vision", args.train_vision or ("tower" if args.lora_rank else "all")]
    flags += ["--vllm", *args.vllm] if args.vllm else []
    cfg = train.resolve_auto_settings(train.parse_args(flags), ctx.device)
    processor = Processor(folder)
    scenes = demo.find_demo_tasks()[args.task].scenes("test", 0)
    examples = [example for example, _ in zip(demo.scenes_to_examples(args.task, scenes), range(60), strict=False)]
    examples = ExampleList(examples, [len(prompt.token_ids) for prompt in make_prompts(examples, processor)])
    models = build_models(cfg, processor, ctx)
    packer = Packer(2048, processor.image_token_id)
    callbacks = {"should_stop": never_stop, "request_stop": print}
    engine = make_training_engine(cfg, models, processor, [examples], ctx, **callbacks)
    LIVE_ENGINES.append(engine)
    weights = FullParameters(models.policy, True)
    names, tower = [name for name, *_ in weights.shapes()], models.policy.hf.family.vision
    layers = sorted({name.partition(".experts.")[0] for name in names if ".experts." in name})
    load = engine.load_weights
    ratios: dict[str, list[float]] = {}
    for fault in FAULTS:
        pool = {"tower": [name for name in names if name.startswith(tower)], "experts": layers}.get(fault, names)
        for seed in range(args.seeds) if pool else ():
            chosen = random.Random(derive_seed(seed, fault)).choice(pool)
            dropped, layer = chosen if fault in ("tensor", "tower") else "", chosen if fault == "experts" else ""
            engine.load_weights = lambda named, dropped=dropped, layer=layer: load(corrupt(named, dropped, layer))
            try:
                line = self_test(models.policy, engine, examples, processor, packer, SamplingParams(16, seed=seed))
            except UserError as error:
                line = str(error)
                if "under new weights differ" not in line:  # an error that has nothing to do with the sync
                    raise
            new, limit = map(float, RATIO.search(line).groups())
            ratios.setdefault(fault, []).append(new / limit)
            if (new > limit) == (fault == "sound") and ctx.is_main:
                print(f"wrong, seed {seed}: {fault} {dropped or layer}: {line}", flush=True)
            engine.load_weights = load
            engine.sync(partial(FullParameters, models.policy, dtype=engine.dtype))
    return ratios


def format_cell(fault: str, ratios: Iterable[float]) -> str:
    values = list(ratios)
    if not values:
        return "–"
    wrong = sum(value > 1 if fault == "sound" else value <= 1 for value in values)
    return f"{wrong} of {len(values)} ({max(values) if fault == 'sound' else min(values):.2f})"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="model folders (default: a random toy of each family)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rollout", default="hf", choices=("hf", "vllm"))
    parser.add_argument("--vllm", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--task", default="shapes", help="task whose toy images and questions are the prompts")
    parser.add_argument("--train-vision", choices=("none", "merger", "tower", "all"))
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of random toys (qwen3_5, vLLM, CPU: 256)")
    parser.add_argument("--families", nargs="+", default=sorted(FAMILIES, reverse=True), choices=tuple(FAMILIES))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--short", action="store_true", help="one family, two seeds")
    args = parser.parse_args()
    if args.short:
        args.families, args.seeds, args.hidden = ["qwen3_vl_moe"], 2, 64
    return args


def main() -> None:
    args = parse_args()
    transformers.utils.logging.set_verbosity_error()
    ctx = setup_distributed()
    root = [tempfile.mkdtemp() if ctx.is_main else ""]
    dist.broadcast_object_list(root)
    scratch = Path(root[0])
    folders = args.models
    if not folders:
        folders = [str(scratch / family) for family in args.families]
        for folder in folders if ctx.is_main else ():
            demo.make_model(Path(folder), Path(folder).name, hidden=args.hidden, layers=2, vocab=448)
    dist.barrier()
    lines = ["| model | dtype | false refusals | missed: tensor | tower | experts |", "|---|---|--:|--:|--:|--:|"]
    for folder in folders:
        for dtype in args.dtype:
            ratios = measure(folder, dtype, args, scratch / "out", ctx)
            cells = [format_cell(fault, ratios.get(fault, ())) for fault in FAULTS]
            lines.append(f"| {'/'.join(Path(folder).parts[-2:])} | {dtype} | {' | '.join(cells)} |")
            if ctx.is_main:
                print(lines[-1], flush=True)
    if ctx.is_main:
        print("\n" + "\n".join(lines))
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
