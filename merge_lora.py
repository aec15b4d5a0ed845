"""A run, one of its checkpoints or a PEFT adapter -> one Hugging Face folder, checked for parity.

    python merge_lora.py out/geo3k --out out/geo3k-hf
    python merge_lora.py out/geo3k/checkpoints/step_000100 --out out/geo3k-hf-100
    python merge_lora.py out/geo3k-lora --adapter --out out/geo3k-adapter     # a LoRA run -> PEFT's adapter format
    python merge_lora.py out/geo3k-adapter --out out/geo3k-hf                 # a PEFT adapter -> one folder
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers.utils import cached_file

from errors import UserError
from grpo import Sample, plant
from model import Policy, Processor, load_hf, lora_layers, merge_lora, write_adapter
from parallel.checkpoint import load_trained, locate
from sharding import attrs_of, pixel_limits, save_hf
from utils import run_script

# Files beside the weights that a folder needs to be opened elsewhere, as the base model's author wrote them.
COMPANIONS = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json", "chat_template.jinja",
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("run", help="run directory (its newest intact checkpoint), a checkpoint, or a PEFT adapter folder")
    p.add_argument("--out", required=True, help="folder to write; must not exist or be empty")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the written weights")
    p.add_argument("--adapter", action="store_true", help="write the adapter alone, as PEFT does, not merged")
    p.add_argument("--push", metavar="REPO", help="also upload the folder to this repository of the hub (needs huggingface_hub, a login)")
    p.add_argument("--tolerance", type=float, default=1e-5, help="largest difference of log-probabilities allowed, nats")
    return p.parse_args(argv)


def save_processor(base: str, processor: Processor, folder: Path) -> None:
    """Tokenizer and processor files: the base's own, with the pixel limits that the run trained with."""
    processor.tokenizer.save_pretrained(folder)
    for name in COMPANIONS:
        found = cached_file(base, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
        if found:
            shutil.copy(found, folder / name)
    settings = folder / "preprocessor_config.json"
    if settings.is_file():
        kept = {k: v for k, v in json.loads(settings.read_text()).items() if k not in ("size", "min_pixels", "max_pixels")}
        settings.write_text(json.dumps(kept | {"size": dict(processor.image_processor.size)}, indent=2) + "\n")
    else:
        processor.image_processor.save_pretrained(folder)


@torch.no_grad()
def probe_logprobs(hf: torch.nn.Module, processor: Processor) -> torch.Tensor:
    """Log-probabilities of a fixed text under a fixed picture, through vision tower, language model and head."""
    picture = Image.new("RGB", (112, 84), "white")
    ImageDraw.Draw(picture).ellipse((20, 10, 80, 70), fill="red")
    image = processor.image("probe", picture)
    prompt = processor.encode([{"role": "user", "content": "<image>What is this?"}], [image])
    answer = processor.tokenizer.encode("A red circle on white.", add_special_tokens=False)
    scored = [False] * len(prompt) + [True] * len(answer)
    micro = plant([Sample("probe", prompt + answer, scored, {}, [image])], processor.image_token_id)
    return Policy(hf.eval(), processor)(micro)[0]


def main(args: argparse.Namespace) -> None:
    base, found, run = locate(args.run) if Path(args.run).is_dir() else (args.run, None, {})
    if found is None:
        raise UserError(f"{args.run!r} is neither a run directory (run.json) nor a complete checkpoint (trainer.json) nor a PEFT adapter "
                         f"(adapter_config.json)")
    out = Path(args.out)
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise UserError(f"--out {args.out} is a file, or is not empty; choose another folder or remove it")
    if args.adapter and run and not run.get("lora_rank"):
        raise UserError(f"--adapter: {args.run} was trained without --lora-rank, so it has none; leave the flag out")
    open_repository(args.push)
    processor, dtype = Processor(base, **pixel_limits(run)), getattr(torch, args.dtype)
    hf = load_trained(args.run, merge=False)
    if args.adapter:
        write_adapter(hf, base, out)
        push(args.push, out)
        return print(f"wrote the adapter {out} from {hf.loaded_from} (base {base})")
    adapted = bool(lora_layers(hf))
    wrapped = probe_logprobs(hf, processor)
    merge_lora(hf)
    for parameter in hf.parameters():  # rounded before the comparison, which so allows for nothing but writing and reading
        parameter.data = parameter.data.to(dtype).float()
    # in fp32 what is written must do as the adapters did; a rounded merge is compared with its own rounded weights
    expected = wrapped if adapted and dtype == torch.float32 else probe_logprobs(hf, processor)
    hf.to(dtype)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".merge-") as temporary:
        folder = Path(temporary) / "model"
        save_hf(hf, folder)
        save_processor(base, processor, folder)
        gap = (probe_logprobs(load_hf(str(folder), attrs=attrs_of(run)), Processor(str(folder))) - expected).abs().max().item()
        if not gap <= args.tolerance:
            raise UserError(
                f"--out {args.out}: the written folder's log-probabilities differ from the run's by {gap:.2e}, over --tolerance "
                f"{args.tolerance:.0e}; it was not kept. Raise --tolerance only if you know why"
            )
        if out.exists():
            out.rmdir()
        folder.rename(out)
    push(args.push, out)
    print(f"wrote {out} from {hf.loaded_from} (base {base}); largest log-probability difference {gap:.1e}")


def open_repository(name: str | None) -> None:
    """Make sure, before any work, that --push can be done; a private repository is made if there is none."""
    if name is None:
        return
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise UserError(f"--push {name}: not logged in to the hub; run `hf auth login` or set HF_TOKEN, or leave the flag out")
    try:
        HfApi().create_repo(name, private=True, exist_ok=True)
    except OSError as e:  # what the hub refuses is one
        raise UserError(f"--push {name}: the hub gives no such repository to write to ({str(e).strip().splitlines()[0]})") from e


def push(name: str | None, folder: Path) -> None:
    """Upload a folder to a repository of the hub."""
    if name is not None:
        from huggingface_hub import HfApi

        try:
            HfApi().upload_folder(repo_id=name, folder_path=folder)
        except OSError as e:
            raise UserError(f"--push {name}: the hub refused ({str(e).strip().splitlines()[0]}); {folder} is complete, and stays") from e
        print(f"uploaded {folder} to {name}")


if __name__ == "__main__":
    run_script(main, parse_args)
