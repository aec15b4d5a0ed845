"""Load a model into shards, measure the memory this takes, and compare the weights with those that transformers loads.
Run by test_loading.py under torchrun:

    python -m torch.distributed.run --standalone --nproc-per-node N tests/load_worker.py MODEL OUT.json SMALL [TP]

SMALL, another model, is loaded first, so that the memory of code imported during loading is not counted.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from layers.lora import LoraConfig, add_lora  # noqa: E402
from model import Policy, Processor, load_hf  # noqa: E402
from parallel.loading import build_meta_model, load_sharded  # noqa: E402
from parallel.sharding import ParallelConfig, apply_fsdp, gather_full  # noqa: E402
from utils import run_script, setup_distributed  # noqa: E402


def status(key: str) -> int:
    """Return the value of a line of /proc/self/status, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


def main(_) -> None:
    torch.set_num_threads(1)
    model, out, small = sys.argv[1:4]
    tp = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    ctx, processor = setup_distributed(), Processor(model)
    policy = Policy(build_meta_model(small), processor)
    apply_fsdp(policy, ctx.device, torch.float32, ParallelConfig(tp=tp))
    load_sharded(policy, small)
    del policy
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise the model would reuse freed memory, which would not be counted
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    policy = Policy(build_meta_model(model), processor)
    apply_fsdp(policy, ctx.device, torch.float32, ParallelConfig(tp=tp))
    load_sharded(policy, model)
    peak = status("VmHWM") - before
    want, whole = load_hf(model), sum(p.nbytes for p in policy.parameters())
    equal = all(
        torch.equal(gather_full(p), dict(want.named_parameters())[n.removeprefix("hf.")])
        for n, p in policy.named_parameters()
    )
    buffers = dict(want.named_buffers())
    equal_buffers = all(
        torch.equal(b, buffers[n.removeprefix("hf.")]) for n, b in policy.named_buffers() if n != "banned"
    )
    lora = Policy(add_lora(build_meta_model(model), LoraConfig(2, 4.0)), processor)
    apply_fsdp(lora, ctx.device, torch.float32, ParallelConfig(tp=tp))
    load_sharded(lora, model)
    equal_lora = torch.equal(gather_full(lora.hf.lm_head.weight), want.lm_head.weight) and not any(
        p.is_meta for p in lora.parameters()
    )
    tied = lora.hf.lm_head.weight is lora.hf.get_input_embeddings().weight
    parts = [None] * ctx.world
    dist.all_gather_object(
        parts, {"peak": peak, "whole": whole, "equal": [equal, equal_buffers, equal_lora], "tied": tied}
    )
    if ctx.is_main:
        Path(out).write_text(json.dumps(parts))


if __name__ == "__main__":
    run_script(main, lambda: None)
