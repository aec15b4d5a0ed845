"""Run by test_checkpoint.py under torchrun: give an engine the weights that eval.py loads, and measure the memory.

    python -m torch.distributed.run --standalone --nproc-per-node N tests/eval_worker.py SMALL OUT.json RUN...

SMALL is loaded before each RUN, so that the memory of imported code does not count. The engine keeps only checksums.
"""

import gc
import json
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
from load_worker import status  # noqa: E402

import eval as E  # noqa: E402
from layers.lora import merge_lora  # noqa: E402
from parallel.checkpoint import load_model_or_checkpoint  # noqa: E402
from rollout import Engine, ExampleList  # noqa: E402
from utils import DistContext, run_script, setup_distributed  # noqa: E402


def checksum(tensor):
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


class Sink(Engine):
    """An engine that keeps only the checksums of its weights."""

    has_all_weights = True

    def load_weights(self, named_tensors):
        self.sums = {name: (tensor.dtype, checksum(tensor)) for name, tensor in named_tensors}
        return {}


def load_checksums(path: str, ctx: DistContext) -> dict[str, tuple]:
    cfg = E.parse_args([path, "--data", "-", "--out", "-", "--dtype", "bfloat16", "--rollout", "vllm"])
    engine = Sink()
    E.load_engine(cfg, path, None, ExampleList([], [0]), None, ctx, engine)
    return engine.sums


def main(_) -> None:
    torch.set_num_threads(1)
    small, out, *paths = sys.argv[1:]
    ctx, results = setup_distributed(), []
    for path in paths:
        load_checksums(small, ctx)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = status("VmRSS")
        sums = load_checksums(path, ctx)
        peak = status("VmHWM") - before
        hf = merge_lora(load_model_or_checkpoint(path))
        expected = {name: (torch.bfloat16, checksum(p.bfloat16())) for name, p in hf.named_parameters()}
        whole, largest = (4 * f(p.numel() for p in hf.parameters()) for f in (sum, max))
        results.append({"peak": peak, "whole": whole, "largest": largest, "equal": sums == expected})
        del hf
    everyone = ctx.gather(results)
    if ctx.is_main:
        Path(out).write_text(json.dumps(everyone))


if __name__ == "__main__":
    run_script(main, lambda: None)
