"""Run by test_checkpoint.py under torchrun on two processes: both report the errors of one of them.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/checkpoint_worker.py MODEL FOLDER
"""

import errno
import json
import math
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.checkpoint import HuggingFaceStorageWriter  # noqa: E402

import parallel.checkpoint as C  # noqa: E402
import train  # noqa: E402
from errors import UserError  # noqa: E402
from model import Policy, Processor  # noqa: E402
from parallel.loading import build_meta_model, load_sharded  # noqa: E402
from parallel.resume import find_resume_checkpoint  # noqa: E402
from parallel.sharding import apply_fsdp, make_optimizer  # noqa: E402
from utils import run_script, setup_distributed  # noqa: E402

WEIGHT = "model.language_model.layers.0.mlp.up_proj.weight"


def main(_) -> None:
    torch.set_num_threads(1)
    model, folder = sys.argv[1], Path(sys.argv[2])
    out, ctx, processor, messages = folder / "run", setup_distributed(), Processor(sys.argv[1]), []

    def build(path: str) -> Policy:
        policy = Policy(build_meta_model(path), processor)
        apply_fsdp(policy, ctx.device, torch.float32)
        load_sharded(policy, path)
        return policy

    def record_message(function, *args) -> None:
        try:
            messages.append(str(function(*args)))
        except UserError as error:
            messages.append(str(error))

    policy = build(model)
    models = {"policy": (policy, make_optimizer(policy, 1e-3, 0.0))}
    for step in (2, 4):
        C.save_checkpoint(out, step, models, 2)
    weight = dict(policy.hf.named_parameters())[WEIGHT].to_local().detach()
    if ctx.rank == 1:
        weight[0, 0] = math.nan
    record_message(C.save_checkpoint, out, 6, models, 2)
    weight.nan_to_num_()

    def fail_disk_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    real = HuggingFaceStorageWriter.write_data
    HuggingFaceStorageWriter.write_data = fail_disk_full if ctx.rank == 1 else real
    record_message(C.save_checkpoint, out, 6, models, 2)
    HuggingFaceStorageWriter.write_data = real
    C.fsync_path = fail_disk_full  # as if rank 0 could not write trainer.json
    record_message(C.save_checkpoint, out, 6, models, 2)

    if ctx.is_main:
        file = out / "checkpoints" / "step_000004" / "shard-00002-model-00001-of-00001.safetensors"
        content = bytearray(file.read_bytes())
        content[999] ^= 1
        file.write_bytes(content)
        shutil.copytree(model, folder / "bad")
        tensors = load_file(folder / "bad" / "model.safetensors")
        next(tensors[name] for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))[-1, -1] = (
            math.nan
        )  # in the shard of rank 1
        save_file(tensors, folder / "bad" / "model.safetensors", metadata={"format": "pt"})
    torch.distributed.barrier()
    record_message(C.find_damage, out / "checkpoints" / "step_000004")
    record_message(
        find_resume_checkpoint,
        out,
        "auto",
        train.parse_args(["--model", model, "--data", "d", "--out", str(out), "--steps", "9"]).to_flags(),
        [],
        "16 rows",
    )
    record_message(build, str(folder / "bad"))
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(messages))


if __name__ == "__main__":
    run_script(main, lambda: None)
