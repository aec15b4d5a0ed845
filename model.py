"""The model: processor, loading, freezing, the packed forward, FSDP2 and checkpoints.

Everything that differs between model families is in FAMILIES. The modelling code is transformers'; what is ours is how
a forest of tokens (grpo.Micro) goes through it.

Axes: T packed tokens, N forest nodes, K scored tokens, H hidden size, V vocabulary, I image tokens.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from PIL import Image
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from grpo import Micro
from kernels import linear_logprob

IMAGE_MARK = "<image>"


@dataclass(frozen=True)
class Family:
    """Where the parts of a family live, as dotted paths below the loaded model."""

    model_class: str  # in transformers
    vision: str = "model.visual"
    language: str = "model.language_model"
    deepstack: bool = False  # features of inner vision layers are added to the first language layers


FAMILIES = {  # by config.model_type
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration"),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", deepstack=True),
}
# Tokens with a meaning for the processor. A policy that samples one of them gets features that do not exist.
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


def load_config(path: str) -> transformers.PreTrainedConfig:
    """The model's config; a ValueError for a path or family that we cannot load, before anything large is read."""
    if os.path.sep in path and not os.path.isdir(path) and path.count("/") != 1:
        raise ValueError(f"--model {path!r}: no such folder; give a model folder or a hub id such as Qwen/Qwen2.5-VL-3B-Instruct")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as e:
        raise ValueError(f"--model {path!r}: no loadable config.json there, nor on the hub ({str(e).splitlines()[0]})") from e
    if config.model_type not in FAMILIES:
        raise ValueError(f"--model {path!r} is of type {config.model_type!r}; supported: {', '.join(FAMILIES)}")
    return config


# ----------------------------------------------------------------------------------------------------------------------
# Processor: messages and pictures to token ids and patches


@dataclass(eq=False)
class ImageInput:
    """One picture, ready for the vision tower. `key` identifies its content."""

    key: str
    pixel_values: torch.Tensor  # (patches, patch dim)
    grid_thw: tuple[int, int, int]  # in patches

    def n_tokens(self, merge_size: int) -> int:
        t, h, w = self.grid_thw
        return t * h * w // merge_size**2


class Processor:
    """Tokenizer and image processor. transformers' AutoProcessor would also build a video processor, which needs
    torchvision; expanding <|image_pad|> is all that it would add here."""

    def __init__(self, path: str, min_pixels: int | None = None, max_pixels: int | None = None):
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            self.image_processor = transformers.AutoImageProcessor.from_pretrained(path)
        except (OSError, ValueError) as e:
            raise ValueError(f"--model {path!r}: cannot load its tokenizer and image processor ({str(e).splitlines()[0]})") from e
        size = dict(self.image_processor.size)
        if min_pixels is not None:
            size["shortest_edge"] = min_pixels
        if max_pixels is not None:
            size["longest_edge"] = max_pixels
        if size["shortest_edge"] > size["longest_edge"]:
            raise ValueError(
                f"--min-pixels {size['shortest_edge']} is over --max-pixels {size['longest_edge']}; a picture cannot meet both"
            )
        self.image_processor.size = size
        self.merge_size = self.image_processor.merge_size
        if self.tokenizer.chat_template is None:
            raise ValueError(f"--model {path!r}: its tokenizer has no chat template; use an instruction-tuned checkpoint")
        ids = self.tokenizer.convert_tokens_to_ids
        self.image_token_id = ids("<|image_pad|>")
        eos = generation_eos(path) or self.tokenizer.eos_token_id
        self.eos_ids = sorted(eos) if isinstance(eos, list) else [eos]
        self.banned_ids = sorted({i for i in map(ids, VISION_TOKENS) if i is not None})

    def banned(self, vocab_size: int) -> torch.Tensor:
        """Ids that must never be sampled: vision placeholders and the padding rows of the vocabulary."""
        return torch.tensor(self.banned_ids + list(range(len(self.tokenizer), vocab_size)), dtype=torch.long)

    def render(self, messages: Sequence[dict]) -> list[int]:
        """Chat-templated token ids with one <|image_pad|> per <image> mark."""
        parts = []
        for message in messages:
            content = []
            for i, text in enumerate(message["content"].split(IMAGE_MARK)):
                content += [{"type": "image"}] if i else []
                content += [{"type": "text", "text": text}] if text else []
            parts.append({"role": message["role"], "content": content})
        text = self.tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def count_tokens(self, messages: Sequence[dict], sizes: Sequence[tuple[int, int]]) -> int:
        """Prompt tokens, image tokens included, for pictures of these (width, height), without touching pixels."""
        patches = (self.image_processor.get_number_of_image_patches(h, w, {}) for w, h in sizes)
        return len(self.render(messages)) - len(sizes) + sum(n // self.merge_size**2 for n in patches)

    def image(self, key: str, picture: Image.Image) -> ImageInput:
        out = self.image_processor(images=[picture], return_tensors="pt")
        return ImageInput(key, out["pixel_values"], tuple(out["image_grid_thw"][0].tolist()))

    def encode(self, messages: Sequence[dict], images: Sequence[ImageInput]) -> list[int]:
        """Token ids of the prompt, each placeholder expanded to its picture's number of image tokens."""
        ids, left = [], list(images)
        for token in self.render(messages):
            if token != self.image_token_id:
                ids.append(token)
            elif not left:
                raise ValueError(f"prompt has more {IMAGE_MARK} marks or <|image_pad|> tokens than its {len(images)} images")
            else:
                ids.extend([token] * left.pop(0).n_tokens(self.merge_size))
        if left:
            raise ValueError(f"prompt has fewer {IMAGE_MARK} marks than its {len(images)} images")
        return ids


def generation_eos(path: str) -> int | list[int] | None:
    """The end tokens that generation_config.json lists; what vLLM stops at, so what we stop at."""
    try:
        return transformers.GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the file is optional
        return None


def load_processor(path: str, min_pixels: int | None = None, max_pixels: int | None = None) -> Processor:
    return Processor(path, min_pixels, max_pixels)


# ----------------------------------------------------------------------------------------------------------------------
# Positions and embeddings


def mrope_positions(ids: Sequence[int], grids: Sequence[tuple[int, int, int]], image_token: int, merge: int) -> torch.Tensor:
    """M-RoPE positions (temporal, height, width) of tokens that start at position 0; (3, len(ids)) int64.

    Text advances all three rows by one per token. A picture spans its merged grid and advances them by the larger of
    its merged height and width.                                                       Qwen2-VL, arXiv:2409.12191
    """
    columns, position, i, grids = [], 0, 0, list(grids)
    while i < len(ids):
        if ids[i] != image_token:
            end = i
            while end < len(ids) and ids[end] != image_token:
                end += 1
            columns.append(torch.arange(position, position + end - i).expand(3, -1))
            position += end - i
        else:
            assert grids, "more image tokens than images"
            t, h, w = grids.pop(0)
            h, w = h // merge, w // merge
            grid = torch.stack(torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij"))
            columns.append(grid.reshape(3, -1) + position)
            position += max(h, w)
            end = i + t * h * w
        i = end
    assert not grids, "fewer image tokens than images"
    return torch.cat(columns, dim=1) if columns else torch.zeros(3, 0, dtype=torch.long)


def micro_positions(micro: Micro, image_token: int, merge: int) -> torch.Tensor:
    """Positions of a forest, (3, T): those of a node continue from the end of its parent."""
    ids, sizes = micro.ids_T.tolist(), torch.bincount(micro.node_T, minlength=len(micro.parent_N)).tolist()
    grids = iter(image.grid_thw for image in micro.images)
    columns, ends, start = [], [], 0
    for parent, size in zip(micro.parent_N, sizes, strict=True):
        node, left, node_grids = ids[start : start + size], 0, []
        left = node.count(image_token)
        while left > 0:
            grid = next(grids)
            node_grids.append(grid)
            left -= grid[0] * grid[1] * grid[2] // merge**2
        local = mrope_positions(node, node_grids, image_token, merge) + (ends[parent] if parent >= 0 else 0)
        columns.append(local)
        ends.append(int(local.max()) + 1)
        start += size
    return torch.cat(columns, dim=1)


def vision_features(hf: nn.Module, images: Sequence[ImageInput]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Features of the pictures, each unique one computed once: (I, H), and the deepstack layers' (I, H) each."""
    unique = {image.key: image for image in images}
    device = hf.get_input_embeddings().weight.device
    pixels = torch.cat([image.pixel_values for image in unique.values()]).to(device)
    grids = torch.tensor([image.grid_thw for image in unique.values()], device=device)
    out = hf.model.get_image_features(pixels, grids, return_dict=True)
    row = {key: i for i, key in enumerate(unique)}
    order = [row[image.key] for image in images]
    layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
    pooled, *deep = [torch.cat([layer[i] for i in order]) for layer in layers]
    return pooled, deep


def embed(hf: nn.Module, ids: torch.Tensor, features: torch.Tensor | None, image_token: int) -> torch.Tensor:
    """Token embeddings with the pictures' features at their tokens. ids (B, T) -> (B, T, H)."""
    embeds = hf.get_input_embeddings()(ids)
    if features is None:
        return embeds
    mask = ids == image_token
    assert int(mask.sum()) == features.shape[0], f"{int(mask.sum())} image tokens, {features.shape[0]} features"
    return embeds.masked_scatter(mask[..., None], features.to(embeds.dtype))


def language_hidden(hf, embeds, positions, mask, deep=(), image_mask=None, cache=None) -> torch.Tensor:
    """Last hidden states. embeds (B, T, H), positions (3, B, T), mask (B or 1, 1, T, keys) bool; -> (B, T, H)."""
    text_model = hf.model.language_model
    # Given as a finished mask per layer type, so that transformers derives nothing from positions or padding. The
    # families that do not know the mapping take the 4-D mask itself.
    types = set(getattr(text_model.config, "layer_types", None) or ())
    extra = {"deepstack_visual_embeds": list(deep), "visual_pos_masks": image_mask} if len(deep) else {}
    out = text_model(
        inputs_embeds=embeds,
        position_ids=positions,
        attention_mask={t: mask for t in types} if types else mask,
        past_key_values=cache,
        use_cache=cache is not None,
        **extra,
    )
    return out.last_hidden_state


# ----------------------------------------------------------------------------------------------------------------------
# The policy


class Policy(nn.Module):
    """A vision-language model as the update sees it: a micro-batch in, log-probabilities of its scored tokens out."""

    def __init__(self, hf: nn.Module, processor: Processor, freeze_vision: bool = True):
        super().__init__()
        self.hf = hf
        self.merge_size = processor.merge_size
        self.image_token_id = processor.image_token_id
        self.freeze_vision = freeze_vision
        self.register_buffer("banned", processor.banned(hf.config.text_config.vocab_size), persistent=False)
        family = FAMILIES[hf.config.model_type]
        self.visual = [hf.get_submodule(family.vision)]  # in a list: not a second registration
        hf.get_submodule(family.vision).requires_grad_(not freeze_vision)

    def forward(self, micro: Micro, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """-> logp_K (nats, at the sampling temperature) and entropy_K, fp32."""
        positions = micro_positions(micro, self.image_token_id, self.merge_size)
        micro = micro.to(self.banned.device)
        features, deep, image_mask, unused = None, [], None, 0.0
        if micro.images:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_vision):
                features, deep = vision_features(self.hf, micro.images)
            image_mask = (micro.ids_T == self.image_token_id)[None]
        elif not self.freeze_vision:
            # Every rank must reduce the same gradients: a micro-batch without pictures gives the tower zeros.
            unused = sum(p.sum() for p in self.visual[0].parameters()) * 0.0
        embeds = embed(self.hf, micro.ids_T[None], features, self.image_token_id)
        hidden = language_hidden(
            self.hf, embeds, positions[:, None].to(embeds.device), micro.mask_TT()[None, None], deep, image_mask
        )[0]
        head = self.hf.get_output_embeddings().weight
        logp, entropy = linear_logprob(hidden[micro.src_K], head, micro.target_K, temperature, self.banned)
        return logp + unused, entropy


def load_hf(path: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The bare transformers model of a folder or hub id."""
    config = load_config(path)
    transformers.utils.logging.disable_progress_bar()  # one per rank and load would bury the run's own lines
    model_class = getattr(transformers, FAMILIES[config.model_type].model_class)
    return model_class.from_pretrained(path, config=config, dtype=dtype, attn_implementation="sdpa")


# ----------------------------------------------------------------------------------------------------------------------
# FSDP2


def shard(policy: Policy, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Shard in place over all ranks; always, also on one, so that there is a single code path.

    Each language block is a unit of its own. Everything else - embeddings, head, norms, vision tower - is one unit that
    stays gathered between forward and backward: tied weights stay tied, and a micro-batch without pictures skips no
    collective.
    """
    policy.to(device)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    master = next(policy.parameters()).dtype
    mixed = MixedPrecisionPolicy() if compute_dtype == master else MixedPrecisionPolicy(compute_dtype, torch.float32)
    blocks = policy.hf.model.language_model.layers
    if len(blocks) == 0:
        raise ValueError("shard: the language model has no blocks")
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    fully_shard(policy, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    # The loss is already divided by its global normaliser, so gradients are summed over ranks, not averaged. On gloo
    # both calls are needed, on every unit: the second alone leaves the averaging to a reduce op that gloo lacks.
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def full_parameters(policy: Policy, trainable_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) of each parameter, gathered one at a time. All ranks must consume it together."""
    for name, parameter in policy.named_parameters():
        if trainable_only and not parameter.requires_grad:
            continue
        tensor = parameter.detach()
        yield name.removeprefix("hf."), tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints: OUT/checkpoints/step_000100/{trainer.json, *.distcp}


def complete_checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run, oldest first. A name that was never completed does not match: it starts with a dot."""
    return sorted(p for p in (out / "checkpoints").glob("step_*") if (p / "trainer.json").is_file())


def save_checkpoint(out: Path, step: int, policy: Policy, optimizer: torch.optim.Optimizer, keep: int) -> None:
    """Model, optimizer and position, sharded. Written under a temporary name and renamed when complete, so that a
    killed run never leaves half a checkpoint behind under a good name; then all but the newest `keep` are removed.

    Random state is not stored because there is none: every draw is seeded from (seed, purpose, step, ...).
    """
    final = out / "checkpoints" / f"step_{step:06d}"
    temporary = final.with_name("." + final.name)
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=temporary)
    if dist.get_rank() == 0:
        (temporary / "trainer.json").write_text(json.dumps({"step": step, "world": dist.get_world_size()}) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        for old in complete_checkpoints(out)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def load_checkpoint(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Restore model and optimizer in place, on any number of ranks; returns the step."""
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(policy, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return json.loads((path / "trainer.json").read_text())["step"]


def find_checkpoint(path: str) -> tuple[Path, dict] | None:
    """For a run directory or one of its checkpoints: (checkpoint, the run's arguments). None for anything else."""
    given = Path(path)
    if (given / "trainer.json").is_file():
        checkpoint = given
    elif (given / "run.json").is_file():
        complete = complete_checkpoints(given)
        if not complete:
            raise ValueError(f"{path!r} is a run without a complete checkpoint; train past --save-every first")
        checkpoint = complete[-1]
    else:
        return None
    return checkpoint, json.loads((checkpoint.parent.parent / "run.json").read_text())["args"]


def load_trained(path: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Processor, str]:
    """(Hugging Face model, processor, base model path) of a model folder, hub id, run directory or checkpoint."""
    found = find_checkpoint(path)
    args = found[1] if found else {}
    base = args.get("model", path)
    processor = Processor(base, args.get("min_pixels"), args.get("max_pixels"))
    hf = load_hf(base, dtype)
    if found:
        state = {f"hf.{name}": tensor for name, tensor in hf.state_dict().items()}
        dcp.load({"model": state}, checkpoint_id=found[0], no_dist=True)  # into the tensors themselves
    return hf, processor, base
