"""Export a run, checkpoint or PEFT adapter as one Hugging Face folder, and verify that it computes the
same.

    python merge_lora.py out/geo3k --out out/geo3k-hf
    python merge_lora.py out/geo3k/checkpoints/step_000100 --out out/geo3k-hf-100
    python merge_lora.py out/geo3k-lora --adapter --out out/geo3k-adapter  # to PEFT's format
    python merge_lora.py out/geo3k-adapter --out out/geo3k-hf  # a PEFT adapter -> one folder
"""

import startup  # noqa: F401

import copy
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import nn
from transformers.utils import cached_file

from errors import nearest_path, need
from layers.lora import find_lora_layers, merge_lora, write_adapter
from model import Policy, Processor, load_hf
from parallel.checkpoint import load_model_or_checkpoint, resolve_model
from parallel.loading import atomic_folder, check_output_is_new, save_hf
from rollout import Prompt
from settings import REQUIRED, FlagParser, add_flags, build_config, flag_field
from utils import run_script

# Files, other than weights, that a folder needs in order to be loaded elsewhere; copied from the base model
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
                   "chat_template.json", "chat_template.jinja")  # fmt: skip
LOGPROB_TOLERANCE = 1e-4  # max log-probability error, relative to 1 + the largest absolute log-probability


@dataclass(frozen=True)
class MergeConfig:
    """Merging"""

    run: str = flag_field(REQUIRED, "run (its newest intact checkpoint), checkpoint or PEFT adapter", positional=True)
    out: str = flag_field(REQUIRED, "folder to write; must be new or empty", metavar="DIR")
    dtype: str = flag_field("float32", "dtype of the written weights", choices=("float32", "bfloat16"))
    adapter: bool = flag_field(False, "write only the adapter, not merged, in PEFT's format")


def parse_args(argv: list[str] | None = None) -> MergeConfig:
    """Return the settings of a command line."""
    parser = FlagParser(__doc__)
    add_flags(parser, MergeConfig)
    return build_config(MergeConfig, vars(parser.parse_args(argv)))


def main(cfg: MergeConfig) -> None:
    """Write the folder --out."""
    need(Path(cfg.run).exists(), f"RUN {cfg.run!r} does not exist{nearest_path(cfg.run)}")
    need(any(Path(cfg.run, name).is_file() for name in ("run.json", "trainer.json", "adapter_config.json")),
         f"{cfg.run!r} is neither a run directory nor a complete checkpoint nor a PEFT adapter: it does not contain "
         "run.json, trainer.json or adapter_config.json")
    base, _, run = resolve_model(cfg.run, "RUN")
    out = Path(cfg.out)
    check_output_is_new(out)
    need(not cfg.adapter or not run or run.get("lora_rank"),
         f"--adapter: {cfg.run} was trained without --lora-rank, so it has no adapter; leave the flag out")
    processor = Processor(base, run.get("min_pixels"), run.get("max_pixels"))
    hf = load_model_or_checkpoint(cfg.run)
    with atomic_folder(out) as folder:
        if cfg.adapter:
            write_adapter(hf, base, folder)
        else:
            write_merged(hf, folder, base, processor, run, cfg)
    print(f"wrote {'the adapter ' if cfg.adapter else ''}{out} from {hf.loaded_from} (base {base})")


def write_merged(hf: nn.Module, folder: Path, base: str, processor: Processor, run: dict, cfg: MergeConfig) -> None:
    """Merge the adapters, write the folder, and verify it: each merged layer against the layer with its adapter, each
    tensor that is read back against the one in memory, and the log-probabilities of the whole folder."""
    dtype = getattr(torch, cfg.dtype)
    original = compute_probe_logprobs(hf, processor)
    merge_and_verify(hf)
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype).float()
    rounded = compute_probe_logprobs(hf, processor)
    save_hf(hf.to(dtype), folder)
    save_processor(base, processor, folder)
    drop_prediction_layers(folder)
    written = load_hf(str(folder), paths=run.get("family_paths", ()))
    verify_written_weights(written, hf)
    reader = Processor(str(folder))
    if reader.image_processor.size != processor.image_processor.size:
        raise RuntimeError(f"the written folder resizes images to {reader.image_processor.size}, the run to "
                           f"{processor.image_processor.size}; the folder was not kept")
    logprobs = compute_probe_logprobs(written, reader)
    gap = (logprobs - rounded).abs().max().item()
    allowed = LOGPROB_TOLERANCE * (1 + rounded.abs().max().item())
    if not gap <= allowed:
        raise RuntimeError("the written folder's log-probabilities differ from those of its weights in memory by "
                           f"{gap:.2e}, more than {allowed:.1e}; the folder was not kept")
    moved = (logprobs - original).abs().max().item()
    print(f"the folder's log-probabilities differ from the run's by at most {moved:.1e} (rounding to {cfg.dtype})")


def drop_prediction_layers(folder: Path) -> None:
    """Set the number of layers for multi-token prediction to 0 in a folder's config.json, because their tensors in the
    base are neither trained nor written."""
    config = json.loads((folder / "config.json").read_text())
    for section in (config, config.get("text_config") or {}):
        for key in [key for key in section if re.search("mtp_.*layers|nextn_.*layers", key) and section[key]]:
            print(f"config.json has {key} 0 instead of {section[key]}: these layers of the base are not exported")
            section[key] = 0
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_processor(base: str, processor: Processor, folder: Path) -> None:
    """Write the base model's tokenizer and processor files, with the pixel limits that the run was trained with."""
    processor.tokenizer.save_pretrained(folder)
    may_lack = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    for name in PROCESSOR_FILES:
        if file := cached_file(base, name, **may_lack):
            shutil.copyfile(file, folder / name)  # without its mode: files of a cache may be private
    # The limits are in preprocessor_config.json or inside processor_config.json, which has priority; both may exist
    for name, key in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        config = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        if settings := config.get(key) if key else config:
            settings.pop("min_pixels", None)
            settings.pop("max_pixels", None)
            settings["size"] = dict(processor.image_processor.size)
            (folder / name).write_text(json.dumps(config, indent=2) + "\n")


# ----------------------------------------------------------------------------------------------------------------------
# Checks


@torch.no_grad()
def compute_probe_logprobs(hf: nn.Module, processor: Processor) -> torch.Tensor:
    """Return the log-probabilities of a fixed text after a fixed image, computed by tower, language model and head."""
    image = Image.new("RGB", (112, 84), "white")
    ImageDraw.Draw(image).ellipse((20, 10, 80, 70), fill="red")
    images = [processor.image_to_patches("probe", image)]
    ids = processor.tokenize_prompt([{"role": "user", "content": "<image>What is this?"}], images)
    text = processor.tokenizer.encode("A red circle on white.", add_special_tokens=False)
    return Policy(hf.eval(), processor).unpacked_logprobs(Prompt("probe", ids, images, None, []), text, temperature=1.0)


@torch.no_grad()
def merge_and_verify(hf: nn.Module) -> None:
    """Merge the adapters in place. Raise RuntimeError if a layer's outputs on random inputs, in float64, differ by more
    than the rounding of a merge in fp32: each weight W + scale B A is rounded once, the sum of products in it at most
    rank + 3 times (Higham 2002, section 3.1)."""
    probes = {}
    for name, layer in find_lora_layers(hf).items():
        exact = copy.deepcopy(layer).double()
        x = torch.randn(8, layer.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        products = abs(layer.scale) * exact.lora_B.abs() @ exact.lora_A.abs()
        sums = x.abs() @ (exact.weight.abs() + (len(layer.lora_A) + 4) * products).T
        probes[name] = x, exact(x), sums * (torch.finfo(torch.float32).eps / 2)
    merge_lora(hf)
    for name, (x, y, bound) in probes.items():
        gap = (copy.deepcopy(hf.get_submodule(name)).double()(x) - y).abs()
        if not (gap <= bound).all():
            raise RuntimeError(f"{name}: merged, its outputs differ from those with its adapter by {gap.max():.1e}, "
                               f"but rounding explains at most {bound.max():.1e}; nothing was written")


def verify_written_weights(written: nn.Module, hf: nn.Module) -> None:
    """Raise RuntimeError unless a folder's weights, as transformers reads them, are bit for bit those in memory."""
    read, expected = written.state_dict(), hf.state_dict()
    wrong = sorted(read.keys() ^ expected.keys())
    wrong = wrong or [name for name in expected if not torch.equal(read[name], expected[name].float())]
    if wrong:
        raise RuntimeError(f"{len(wrong)} tensors of the written folder are not the run's: {', '.join(wrong[:3])}; the "
                           "folder was not kept")


if __name__ == "__main__":
    run_script(main, parse_args)
