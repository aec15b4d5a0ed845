"""A run, one of its checkpoints or a PEFT adapter -> one Hugging Face folder, checked for parity.

    python merge_lora.py out/geo3k --out out/geo3k-hf
    python merge_lora.py out/geo3k/checkpoints/step_000100 --out out/geo3k-hf-100
    python merge_lora.py out/geo3k-lora --adapter --out out/geo3k-adapter     # a LoRA run -> PEFT's adapter format
    python merge_lora.py out/geo3k-adapter --out out/geo3k-hf                 # a PEFT adapter -> one folder
"""

import argparse
import copy
import json
import math
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from transformers.utils import cached_file

from errors import UserError
from grpo import Sample, plant
from model import Policy, Processor, load_hf, lora_layers, merge_lora, write_adapter
from parallel.checkpoint import load_trained, locate
from sharding import attrs_of, check_new_folder, pixel_limits, save_hf, whole_folder
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
    p.add_argument("--tolerance", type=float,
                   help="how far log-probabilities of the written folder may be from those of the same weights in memory, nats "
                        "(default: what fp32 rounds off, by width, depth and their size)")
    return p.parse_args(argv)


def save_processor(base: str, processor: Processor, folder: Path) -> None:
    """Tokenizer and processor files: the base's own, with the pixel limits that the run trained with."""
    processor.tokenizer.save_pretrained(folder)
    for name in COMPANIONS:
        found = cached_file(base, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
        if found:
            shutil.copyfile(found, folder / name)  # not its mode: a cache's files may be their owner's alone
    held = False  # in a file of its own, or as a part of another, which wins; both may be there
    for name, part in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        whole = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        settings = whole.get(part) if part else whole
        if settings:
            for old in ("min_pixels", "max_pixels"):
                settings.pop(old, None)
            settings["size"] = dict(processor.image_processor.size)
            (folder / name).write_text(json.dumps(whole, indent=2) + "\n")
            held = True
    if not held:
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


@torch.no_grad()
def probe_layers(hf: torch.nn.Module) -> dict[str, tuple[torch.Tensor, ...]]:
    """Of each layer with an adapter: random inputs, its outputs, in float64, and how far from these a merge in fp32 may be. That
    rounds each weight W + scale B A once, and the sum of products in it rank + 3 times at most.       Higham 2002, section 3.1"""
    probes = {}
    for name, layer in lora_layers(hf).items():
        exact = copy.deepcopy(layer).double()
        x = torch.randn(8, layer.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        products = abs(layer.scale) * exact.lora_B.abs() @ exact.lora_A.abs()
        bound = x.abs() @ (exact.weight.abs() + (len(layer.lora_A) + 4) * products).T * (torch.finfo(torch.float32).eps / 2)
        probes[name] = x, exact(x), bound
    return probes


@torch.no_grad()
def check_layers(hf: torch.nn.Module, probes: dict[str, tuple[torch.Tensor, ...]]) -> None:
    """Do the merged layers what they did with their adapters?"""
    for name, (x, y, bound) in probes.items():
        layer = hf.get_submodule(name)
        gap = (F.linear(x, layer.weight.double(), None if layer.bias is None else layer.bias.double()) - y).abs()
        if not (gap <= bound).all():
            raise RuntimeError(f"{name}: merged, its outputs differ from those with its adapter by {gap.max():.1e}, where rounding gives "
                               f"{bound.max():.1e} at most; nothing was written")


def check_weights(written: torch.nn.Module, hf: torch.nn.Module) -> None:
    """Are the weights of a folder, as transformers reads them, those in memory, bit for bit?"""
    theirs, ours = written.state_dict(), hf.state_dict()
    wrong = sorted(theirs.keys() ^ ours.keys()) or [name for name in ours if not torch.equal(theirs[name], ours[name].float())]
    if wrong:
        raise RuntimeError(f"{len(wrong)} tensors of the written folder are not the run's: {', '.join(wrong[:3])}; it was not kept")


def rounding(hf: torch.nn.Module, logprobs: torch.Tensor) -> float:
    """What fp32 may round off log-probabilities: an error for each addend of a sum and each layer, in random directions."""
    text = hf.config.get_text_config()
    return torch.finfo(torch.float32).eps * math.sqrt(text.hidden_size * text.num_hidden_layers) * (1 + logprobs.abs().max().item())


def main(args: argparse.Namespace) -> None:
    base, found, run = locate(args.run) if Path(args.run).is_dir() else (args.run, None, {})
    if found is None:
        raise UserError(f"{args.run!r} is neither a run directory (run.json) nor a complete checkpoint (trainer.json) nor a PEFT adapter "
                         f"(adapter_config.json)")
    out = Path(args.out)
    check_new_folder(out)
    if args.adapter and run and not run.get("lora_rank"):
        raise UserError(f"--adapter: {args.run} was trained without --lora-rank, so it has none; leave the flag out")
    open_repository(args.push)
    processor, dtype = Processor(base, **pixel_limits(run)), getattr(torch, args.dtype)
    hf = load_trained(args.run, merge=False)
    with whole_folder(out) as folder:
        if args.adapter:
            write_adapter(hf, base, folder)
        else:
            moved = write_merged(hf, folder, base, processor, dtype, run, args)
    push(args.push, out)
    if args.adapter:
        return print(f"wrote the adapter {out} from {hf.loaded_from} (base {base})")
    print(f"wrote {out} from {hf.loaded_from} (base {base}); largest log-probability difference from the run {moved:.1e}, by rounding to "
          f"{args.dtype}")


def write_merged(
    hf: torch.nn.Module, folder: Path, base: str, processor: Processor, dtype: torch.dtype, run: dict, args: argparse.Namespace
) -> float:
    """Merge, write, and check: each merged layer against itself with its adapter, each tensor read back against what was to be
    written, and what the folder as a whole says about a picture. -> the largest difference from the run, which is rounding alone."""
    trained, probes = probe_logprobs(hf, processor), probe_layers(hf)
    check_layers(merge_lora(hf), probes)
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype).float()
    rounded = probe_logprobs(hf, processor)
    save_hf(hf.to(dtype), folder)
    save_processor(base, processor, folder)
    written, reader = load_hf(str(folder), attrs=attrs_of(run)), Processor(str(folder))
    check_weights(written, hf)
    if reader.image_processor.size != processor.image_processor.size:
        raise RuntimeError(f"the written folder sees pictures at {reader.image_processor.size}, the run at "
                           f"{processor.image_processor.size}; it was not kept")
    logprobs = probe_logprobs(written, reader)
    gap, allowed = (logprobs - rounded).abs().max().item(), rounding(hf, rounded) if args.tolerance is None else args.tolerance
    if not gap <= allowed:
        raise UserError(f"--out {args.out}: the written folder's log-probabilities differ from those of its weights in memory by "
                        f"{gap:.2e}, over {allowed:.1e} (--tolerance); it was not kept. Raise --tolerance only if you know why")
    return (logprobs - trained).abs().max().item()


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
