"""The model: processor, loading, freezing, adapters, and the packed forward. How it is spread over processes: sharding.py.

Everything that differs between model families is in FAMILIES. The modelling code is transformers'; what is ours is how
a forest of tokens (grpo.Micro) goes through it.

Axes: T packed tokens, K scored tokens, H hidden size, V vocabulary, I image tokens.
"""

import functools
import importlib.util
import inspect
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from errors import UserError
from grpo import Micro
from kernels import fused_policy_loss, linear_logprob
from utils import derive_seed

IMAGE_MARK = "<image>"


ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
RECURRENT_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "out_proj")  # of gated delta nets


@dataclass(frozen=True)
class Family:
    """Where the parts of a family live: dotted paths below the loaded model, below its tower and below its language model."""

    model_class: str  # in transformers
    vision: str = "model.visual"
    language: str = "model.language_model"
    mergers: tuple[str, ...] = ("merger",)  # below vision: what turns the tower's patches into the language model's tokens
    vision_blocks: str = "blocks"  # below vision
    blocks: str = "layers"  # below language
    lora_targets: tuple[str, ...] = ATTENTION_PROJECTIONS + MLP_PROJECTIONS  # last names of linear layers of the blocks
    placeholders: tuple[str, ...] = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")  # in config


FAMILIES = {  # by config.model_type
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration"),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", mergers=("merger", "deepstack_merger_list")),
    # experts are one tensor of all of them, not linear layers: LoRA adapts attention, and the MLPs that every token passes
    "qwen3_vl_moe": Family("Qwen3VLMoeForConditionalGeneration", mergers=("merger", "deepstack_merger_list")),
    "qwen3_5": Family(
        "Qwen3_5ForConditionalGeneration", lora_targets=ATTENTION_PROJECTIONS + MLP_PROJECTIONS + RECURRENT_PROJECTIONS),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForConditionalGeneration", lora_targets=ATTENTION_PROJECTIONS + MLP_PROJECTIONS + RECURRENT_PROJECTIONS),
}
Attrs = tuple[str | None, str | None] | None  # (--vision-attr, --language-attr) of a family that is not in the table
# Tokens with a meaning for the processor. A policy that samples one of them gets features that do not exist.
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


def load_config(path: str, attrs: Attrs = None) -> transformers.PreTrainedConfig:
    """The model's config; a ValueError for a path or family that we cannot load, before anything large is read."""
    if os.path.sep in path and not os.path.isdir(path) and path.count("/") != 1:
        raise UserError(f"--model {path!r}: no such folder; give a model folder or a hub id such as Qwen/Qwen2.5-VL-3B-Instruct")
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise UserError(f"--model {path!r}: {_why(e, 'no loadable config.json there, nor on the hub')}") from e
    find_family(config, path, attrs)
    refuse_unpackable(config, path)
    return config


def refuse_unpackable(config: transformers.PreTrainedConfig, path: str) -> None:
    """UserError for what a config asks of attention and we do not do: windows, and rotary frequencies that depend on the
    longest sequence of a batch, which would differ from one micro-batch to another."""
    text = config.get_text_config()
    sliding = [kind for kind in getattr(text, "layer_types", None) or () if "sliding" in kind or "chunked" in kind]
    if sliding:
        raise UserError(f"--model {path!r}: {len(sliding)} layers have {sliding[0]} (a window of {getattr(text, 'sliding_window', None)} "
                        f"tokens), which is not computed here; if no sequence is longer, set use_sliding_window to false in config.json")
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise UserError(f"--model {path!r}: rotary embeddings of type {rope!r} depend on the longest sequence of a batch; set another "
                        f"rope_type, such as 'yarn', in its config.json")


def _why(error: Exception, what: str) -> str:
    """What to tell of a folder that transformers does not open. Left to itself it asks on the terminal whether to run code."""
    if "trust_remote_code" in str(error):
        return ("its files name Python code of their own to be run (auto_map), and no code of a model folder is run here; use a folder "
                "whose type transformers knows itself")
    return f"{what} ({(str(error).strip() or type(error).__name__).splitlines()[0]})"


@functools.cache
def _family_of_paths(config_class: type, config_json: str, path: str, vision: str, language: str) -> Family:
    config = config_class(**json.loads(config_json))
    auto = transformers.AutoModelForImageTextToText
    if type(config) not in auto._model_mapping:
        raise UserError(f"--model {path!r} is of type {config.model_type!r}, for which transformers has no model of pictures and text")
    with torch.device("meta"):  # its shape without its weights
        hf = auto.from_config(config)
    for flag, dotted in (("--vision-attr", vision), ("--language-attr", language)):
        at = hf
        for i, name in enumerate(dotted.split(".")):
            children = dict(at.named_children())
            if name not in children:
                where = ".".join(dotted.split(".")[:i]) or type(hf).__name__
                raise UserError(f"{flag} {dotted!r}: {where} has no child {name!r}; its children are {', '.join(children) or 'none'}")
            at = children[name]
    tower, text = hf.get_submodule(vision), hf.get_submodule(language)
    lists = [[n for n, m in part.named_children() if isinstance(m, nn.ModuleList) and len(m)] for part in (tower, text)]
    for flag, dotted, part, found in (("--vision-attr", vision, tower, lists[0]), ("--language-attr", language, text, lists[1])):
        if not found:
            children = ", ".join(n for n, _ in part.named_children())
            raise UserError(f"{flag} {dotted!r} has no list of blocks; its children are {children or 'none'}")
    if not callable(getattr(hf.model, "get_image_features", None)):
        raise UserError(f"--model {path!r}: {type(hf.model).__name__} has no get_image_features, by which pictures enter the model")
    mergers = tuple(n for n, _ in tower.named_children() if "merger" in n)
    linear = {n.rsplit(".", 1)[-1] for n, m in getattr(text, lists[1][0]).named_modules() if isinstance(m, nn.Linear)}
    return Family(type(hf).__name__, vision, language, mergers, lists[0][0], lists[1][0], tuple(sorted(linear)))


def find_family(config: transformers.PreTrainedConfig, path: str, attrs: Attrs = None) -> Family:
    """The row of the table; or, for other types, one made from (--vision-attr, --language-attr), checked on a model without
    weights."""
    if attrs and all(attrs):
        return _family_of_paths(type(config), config.to_json_string(use_diff=False), path, *attrs)
    if attrs and any(attrs):
        raise UserError(f"--vision-attr {attrs[0]!r} and --language-attr {attrs[1]!r}: give both or neither")
    if config.model_type not in FAMILIES:
        raise UserError(f"--model {path!r} is of type {config.model_type!r}; supported: {', '.join(FAMILIES)}; any other "
                         f"that sees pictures as they do by --vision-attr and --language-attr, where its tower and language model live")
    return FAMILIES[config.model_type]


# ----------------------------------------------------------------------------------------------------------------------
# Processor: messages and pictures to token ids and patches


@dataclass(eq=False)
class ImageInput:
    """One picture, ready for the vision tower. `key` identifies its content."""

    key: str
    pixel_values: torch.Tensor  # (patches, patch dim)
    grid_thw: tuple[int, int, int]  # in patches
    n_tokens: int  # image tokens of the language model


class Processor:
    """Tokenizer and image processor. transformers' AutoProcessor would also build a video processor, which needs
    torchvision; expanding <|image_pad|> is all that it would add here."""

    def __init__(self, path: str, min_pixels: int | None = None, max_pixels: int | None = None):
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            self.image_processor = transformers.AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError, ImportError) as e:
            raise UserError(f"--model {path!r}: {_why(e, 'cannot load its tokenizer and image processor')}") from e
        size = dict(self.image_processor.size)
        if min_pixels is not None:
            size["shortest_edge"] = min_pixels
        if max_pixels is not None:
            size["longest_edge"] = max_pixels
        if size["shortest_edge"] < 1 or size["longest_edge"] < 1:
            raise UserError(f"--min-pixels {min_pixels} and --max-pixels {max_pixels} must be at least 1")
        if size["shortest_edge"] > size["longest_edge"]:
            raise UserError(
                f"--min-pixels {size['shortest_edge']} is over --max-pixels {size['longest_edge']}; a picture cannot meet both"
            )
        self.image_processor.size = size
        self.merge_size = self.image_processor.merge_size
        if self.tokenizer.chat_template is None:
            raise UserError(f"--model {path!r}: its tokenizer has no chat template; use an instruction-tuned checkpoint")
        ids = self.tokenizer.convert_tokens_to_ids
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        placeholders = [getattr(config, name, None) for name in FAMILIES.get(config.model_type, Family("")).placeholders]
        self.image_token_id = placeholders[0]
        if self.image_token_id is None:
            raise UserError(f"--model {path!r}: its config names no image_token_id, the token that a picture's features replace")
        eos = generation_eos(path) or self.tokenizer.eos_token_id
        self.eos_ids = sorted(eos) if isinstance(eos, list) else [eos]
        self.special_tokens = {str(t): i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special}
        self.banned_ids = sorted({i for i in [*placeholders, *map(ids, VISION_TOKENS)] if i is not None})

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

    def special_tokens_in(self, messages: Sequence[dict]) -> list[str]:
        """The tokenizer's special tokens that `render` would read from the messages' own text."""
        texts = [text for message in messages for text in message["content"].split(IMAGE_MARK)]
        ids = {i for text in texts for i in self.tokenizer.encode(text, add_special_tokens=False)}
        ids.discard(self.tokenizer.unk_token_id)  # of any text that the vocabulary lacks
        return [token for token, i in self.special_tokens.items() if i in ids or any(token in text for text in texts)]

    def count_tokens(self, messages: Sequence[dict], sizes: Sequence[tuple[int, int]]) -> int:
        """Prompt tokens, image tokens included, for pictures of these (width, height), without touching pixels."""
        patches = (self.image_processor.get_number_of_image_patches(h, w, {}) for w, h in sizes)
        return len(self.render(messages)) - len(sizes) + sum(n // self.merge_size**2 for n in patches)

    def final_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) at which the model sees a picture."""
        size = self.image_processor.size
        factor = self.image_processor.patch_size * self.merge_size
        height, width = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
        return width, height

    def resize(self, picture: Image.Image) -> Image.Image:
        """The picture at the size the model sees it. Done here, once, so that trainer and rollout engine see the same pixels
        whichever of transformers' image processors each of them uses: they find nothing left to resize."""
        size = self.final_size(*picture.size)
        return picture if picture.size == size else picture.resize(size, Image.Resampling(self.image_processor.resample))

    def image(self, key: str, picture: Image.Image) -> ImageInput:
        """Patches of a picture, resized here if it was not yet."""
        out = self.image_processor(images=[self.resize(picture)], return_tensors="pt", do_resize=False)
        t, h, w = out["image_grid_thw"][0].tolist()
        return ImageInput(key, out["pixel_values"], (t, h, w), t * h * w // self.merge_size**2)

    def encode(self, messages: Sequence[dict], images: Sequence[ImageInput]) -> list[int]:
        """Token ids of the prompt, each placeholder expanded to its picture's number of image tokens."""
        ids, left = [], list(images)
        for token in self.render(messages):
            if token != self.image_token_id:
                ids.append(token)
            elif not left:
                raise UserError(f"prompt has more {IMAGE_MARK} marks or <|image_pad|> tokens than its {len(images)} images")
            else:
                ids.extend([token] * left.pop(0).n_tokens)
        if left:
            raise UserError(f"prompt has fewer {IMAGE_MARK} marks than its {len(images)} images")
        return ids


def generation_eos(path: str) -> int | list[int] | None:
    """The end tokens that generation_config.json lists; what vLLM stops at, so what we stop at."""
    try:
        return transformers.GenerationConfig.from_pretrained(path, trust_remote_code=False).eos_token_id
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
    """Positions of a forest, (3, T): those of a run continue from the token before it, wherever that stands."""
    ids = micro.ids_T.tolist()
    images = iter(micro.images)
    positions = torch.empty(3, len(ids), dtype=torch.long)
    highest = torch.empty(len(ids), dtype=torch.long)  # position so far on the way from the root
    stops = [start for start, _ in micro.runs[1:]] + [len(ids)]
    for (start, before), stop in zip(micro.runs, stops, strict=True):
        run, grids = ids[start:stop], []
        left = run.count(image_token)
        while left > 0:
            image = next(images)
            grids.append(image.grid_thw)
            left -= image.n_tokens
        first = int(highest[before]) + 1 if before >= 0 else 0
        positions[:, start:stop] = mrope_positions(run, grids, image_token, merge) + first
        highest[start:stop] = positions[:, start:stop].amax(dim=0).cummax(dim=0).values
    return positions


class VisionCache:
    """Features of pictures by content, least recently used out first. Only valid while the tower does not change."""

    def __init__(self, max_bytes: float):
        self.max_bytes, self.bytes = max_bytes, 0
        self.entries: OrderedDict[str, tuple[torch.Tensor, ...]] = OrderedDict()
        self.hits = self.misses = 0

    def get(self, key: str) -> tuple[torch.Tensor, ...] | None:
        found = self.entries.get(key)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self.entries.move_to_end(key)
        return found

    def put(self, key: str, layers: tuple[torch.Tensor, ...]) -> None:
        layers = tuple(layer.clone() for layer in layers)  # slices would keep the whole batch alive
        self.entries[key] = layers
        self.bytes += sum(layer.nbytes for layer in layers)
        while self.bytes > self.max_bytes:
            self.bytes -= sum(layer.nbytes for layer in self.entries.popitem(last=False)[1])


def vision_features(
    hf: nn.Module, images: Sequence[ImageInput], cache: VisionCache | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Features of the pictures, each unique one computed once: (I, H), and the deepstack layers' (I, H) each."""
    layers_of: dict[str, tuple[torch.Tensor, ...]] = {}
    missing: dict[str, ImageInput] = {}
    for key, image in {image.key: image for image in images}.items():
        found = cache.get(key) if cache else None
        if found is None:
            missing[key] = image
        else:
            layers_of[key] = found
    if missing:
        device = hf.get_input_embeddings().weight.device
        # Rounding depends on what is computed together. Cached features must not depend on when they were computed, or
        # a resumed run, whose cache is empty, would differ from an uninterrupted one: then each picture goes alone.
        batches = [[image] for image in missing.values()] if cache else [list(missing.values())]
        for batch in batches:
            pixels = torch.cat([image.pixel_values for image in batch]).to(device)
            grids = torch.tensor([image.grid_thw for image in batch], device=device)
            out = hf.model.get_image_features(pixels, grids, return_dict=True)
            layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
            for i, image in enumerate(batch):
                layers_of[image.key] = tuple(layer[i] for layer in layers)
                if cache:
                    cache.put(image.key, layers_of[image.key])
    pooled, *deep = (torch.cat(parts) for parts in zip(*(layers_of[image.key] for image in images), strict=True))
    return pooled, deep


def embed(hf: nn.Module, ids: torch.Tensor, features: torch.Tensor | None, image_token: int) -> torch.Tensor:
    """Token embeddings with the pictures' features at their tokens. ids (B, T) -> (B, T, H)."""
    embeds = hf.get_input_embeddings()(ids)
    if features is None:
        return embeds
    mask = ids == image_token
    assert int(mask.sum()) == features.shape[0], f"{int(mask.sum())} image tokens, {features.shape[0]} features"
    return embeds.masked_scatter(mask[..., None], features.to(embeds.dtype))


def language_hidden(hf, embeds, positions, mask=None, deep=(), image_mask=None, cache=None, plan=None) -> torch.Tensor:
    """Last hidden states. embeds (B, T, H), positions (3, B, T); what attends to what is given by a mask (B or 1, 1, T,
    keys) bool or by a plan, called in each layer as plan(layer, query, key, value, scale); -> (B, T, H)."""
    text_model = hf.get_submodule(hf.family.language)
    # Given as a finished mask per layer type, so that transformers derives nothing from positions or padding. The
    # families that do not know the mapping take the 4-D mask itself.
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=embeds.device) if plan is not None else mask  # not looked at
    types = set(getattr(text_model.config, "layer_types", None) or ())
    # Recurrent layers want to know which tokens are no padding; the last one sees all of those.
    masks = {t: mask[:, 0, -1] if t == "linear_attention" and plan is None else mask for t in types}
    extra = {"deepstack_visual_embeds": list(deep), "visual_pos_masks": image_mask} if len(deep) else {}
    out = text_model(
        inputs_embeds=embeds,
        position_ids=positions,
        attention_mask=masks or mask,
        past_key_values=cache,
        use_cache=cache is not None,
        **extra,
        **({"plan": plan} if plan is not None else {}),
    )
    return out.last_hidden_state


# ----------------------------------------------------------------------------------------------------------------------
# Attention over a forest

ATTENTION = ("sdpa", "flex", "flash")


def resolve_attention(choice: str, device: torch.device) -> str:
    """Turn --attn auto|sdpa|flex|flash into the back end of the run; called once, at start-up."""
    if choice == "auto":
        return "flex" if device.type == "cuda" else "sdpa"
    if choice not in ATTENTION:
        raise UserError(f"--attn {choice!r}: known are auto, {', '.join(ATTENTION)}")
    if choice != "sdpa" and device.type != "cuda":
        raise UserError(f"--attn {choice} trains on CUDA only, and there is no CUDA device; use --attn sdpa")
    return choice


class ForestAttention:
    """How the tokens of one Micro attend, prepared once for all layers: each sees itself and its ancestors.

    sdpa   torch's own, run by run against the keys on the way from the root: no masked pair is computed. For the CPU.
    flex   torch's flex_attention with a block mask: blocks without a visible pair are skipped. Compiled on a GPU.
    flash  variable-length flash attention over root-to-leaf sequences; only for forests whose trees do not branch.
    """

    def __init__(self, backend: str, micro: Micro):
        self.backend, end_T = backend, micro.end_T
        n = len(end_T)
        # Cut wherever a run starts or another leaves it; the way to a run is then a list of whole pieces.
        starts = [start for start, _ in micro.runs]
        bounds = sorted({0, n, *starts, *(before + 1 for _, before in micro.runs)})
        self.pieces = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        piece = {a: i for i, a in enumerate(bounds)}
        way: dict[int, list[int]] = {-1: []}  # last position of a piece -> pieces from the root to it
        self.ways: list[tuple[list[int], int]] = []  # per run: pieces from the root through it, and how many are its own
        for start, stop, before in zip(starts, [*starts[1:], n], (before for _, before in micro.runs), strict=True):
            own = list(range(piece[start], piece[stop]))
            for i, p in enumerate(own):
                way[bounds[p + 1] - 1] = way[before] + own[: i + 1]
            self.ways.append((way[before] + own, len(own)))
        if backend == "sdpa":
            self.causal: dict[tuple[int, int], torch.Tensor] = {}
        elif backend == "flex":
            from torch.nn.attention.flex_attention import create_block_mask

            self.padded = -(-n // 128) * 128  # whole blocks; padding sees itself only
            ends = torch.cat([end_T, torch.arange(n + 1, self.padded + 1, device=end_T.device)])
            self.mask = create_block_mask(
                lambda b, h, q, k: (k <= q) & (q < ends[k]), None, None, self.padded, self.padded, device=end_T.device
            )
        elif backend == "flash":
            assert all(before < 0 for _, before in micro.runs), "a forest that branches needs --attn flex or sdpa"
            bounds = torch.tensor([*starts, n], dtype=torch.int32)
            self.longest = int(bounds.diff().max())
            self.cu_seqlens = bounds.to(end_T.device)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """query (1, heads, T, d), key and value (1, key heads, T, d) -> (1, heads, T, d)."""
        if self.backend == "sdpa":
            # split and cat rather than slices, whose backward would fill a tensor of all T tokens for each
            q, k, v = (x.split(self.pieces, dim=2) for x in (query, key, value))
            out = []
            for way, own in self.ways:
                mine = torch.cat([q[i] for i in way[-own:]], dim=2)
                keys, values = (repeat_kv(torch.cat([x[i] for i in way], dim=2), query.shape[1] // key.shape[1]) for x in (k, v))
                rows, columns = mine.shape[2], keys.shape[2]
                mask = None
                if rows < columns:  # below a trunk: all of it, and the run up to each token
                    mask = self.causal.get((rows, columns))
                    if mask is None:
                        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril_(columns - rows)
                        self.causal[rows, columns] = mask
                out.append(F.scaled_dot_product_attention(mine, keys, values, mask, is_causal=mask is None, scale=scale))
            return torch.cat(out, dim=2)
        if self.backend == "flex":
            n, pad = query.shape[2], (0, 0, 0, self.padded - query.shape[2])
            query, key, value = (F.pad(x, pad) for x in (query, key, value))
            return _flex(query.device.type)(query, key, value, block_mask=self.mask, scale=scale, enable_gqa=True)[:, :, :n]
        rows = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]  # (T, heads, d)
        return _varlen(*rows, self.cu_seqlens, self.longest, scale).transpose(0, 1)[None]

    def recur(self, layer: Callable, hidden: torch.Tensor, width: int) -> torch.Tensor:
        """A recurrent layer over the forest, (1, T, H) -> (1, T, H): each piece goes on from the state after the piece that it
        hangs below, so a trunk is computed once here too. The pieces' number, not their length, is what costs time."""
        parent = {b: a for way, _ in self.ways for a, b in zip([-1, *way], way, strict=False)}
        states, out = {-1: RecurrentState(width)}, []
        for i, piece in enumerate(hidden.split(self.pieces, dim=1)):  # depth first: what a piece hangs below comes before it
            states[i] = states[parent[i]].copy()
            out.append(layer(piece, cache_params=states[i]))
        return torch.cat(out, dim=1)


class RecurrentState:
    """What a linear-attention layer keeps of the tokens before: inputs that its convolution still sees, (B, channels, width - 1),
    and its matrix, (B, heads, key dim, value dim). For transformers' layer it stands for the cache, and unlike that one nothing
    is written in place: several runs go on from one state, and gradients go back through it."""

    record_past = True  # asks transformers to join the kept inputs to the new ones, which has a gradient, also for one token

    def __init__(self, width: int, conv: torch.Tensor | None = None, matrix: torch.Tensor | None = None):
        self.width, self.conv, self.matrix = width, conv, matrix

    def copy(self) -> "RecurrentState":
        return RecurrentState(self.width, self.conv, self.matrix)

    def take(self, rows: torch.Tensor) -> "RecurrentState":
        return RecurrentState(self.width, self.conv[rows], self.matrix[rows])

    # What transformers' Cache has: layers by number, and states by number within a layer
    layers = property(lambda self: self)
    conv_states = property(lambda self: [self.conv])
    recurrent_states = property(lambda self: [self.matrix])

    def __getitem__(self, layer: int) -> "RecurrentState":
        return self

    def has_previous_state(self, *_, **__) -> bool:
        return self.matrix is not None

    def update_conv_state(self, new: torch.Tensor, *_, **__) -> torch.Tensor:
        # a root begins with zeros, so that all states are of one size
        before = new.new_zeros(*new.shape[:2], self.width - 1) if self.conv is None else self.conv
        joined = torch.cat([before, new], dim=2)
        self.conv = joined[:, :, joined.shape[2] - self.width + 1 :]
        return joined

    def update_recurrent_state(self, matrix: torch.Tensor, *_, **__) -> torch.Tensor:
        self.matrix = matrix
        return matrix


def _recurrence(module, forward, hidden_states, cache_params=None, attention_mask=None, plan=None, **kwargs) -> torch.Tensor:
    """Stands before the forward of transformers' gated delta net: over a forest by the plan, in HFEngine by the engine's own
    states, and in any other forward as it was."""
    if isinstance(plan, ForestAttention):
        return plan.recur(forward, hidden_states, module.conv_kernel_size)
    if hasattr(cache_params, "recurrent"):  # rollout.KVCache
        state = cache_params.recurrent.setdefault(module.layer_idx, RecurrentState(module.conv_kernel_size))
        return forward(hidden_states, cache_params=state, attention_mask=attention_mask if plan is None else None)
    return forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)


@functools.cache
def _flex(device_type: str):
    from torch.nn.attention.flex_attention import flex_attention

    # On the CPU it has no backward; uncompiled it still lets the tests compare values.
    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention


def _varlen(query, key, value, cu_seqlens, longest, scale):
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(query, key, value, cu_seqlens, cu_seqlens, longest, longest, softmax_scale=scale, causal=True)
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters  # torch 2.11 says is_causal, 2.13 a window and grouped heads
    causal = {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}
    if "enable_gqa" in parameters:
        causal["enable_gqa"] = True
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, scale=scale, **causal)


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, plan=None, **kwargs):
    """What transformers calls in each layer, by the name "planned": the forward's plan, or else transformers' own sdpa."""
    if plan is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    return plan(module.layer_idx, query, key, value, scaling).transpose(1, 2).contiguous(), None


# ----------------------------------------------------------------------------------------------------------------------
# LoRA (arXiv:2106.09685): beside a frozen matrix W learns a product of two small ones, W + alpha / rank * B A


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()  # last names of linear layers of the language model's blocks (empty: the family's)
    vision: bool = False  # also the linear layers of the tower's blocks
    seed: int = 0


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Its own weight keeps its name, so checkpoints and engines need not know."""

    def adapt(self, rank: int, scale: float, dropout: float = 0.0, seed: int = 0) -> None:
        self.scale, self.dropout, self.off = scale, dropout, False
        device = "cpu" if self.weight.is_meta else self.weight.device
        a = (torch.rand(rank, self.in_features, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * self.in_features**-0.5
        self.lora_A = nn.Parameter(a.to(device))  # fp32 whatever W is in; every rank draws the same
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, device=device))  # so the adapter starts as nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.off:
            return out
        x = F.dropout(x, self.dropout, self.training and torch.is_grad_enabled())  # log-probabilities are scored without
        return out + self.scale * F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))


def lora_layers(module: nn.Module) -> dict[str, LoraLinear]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


def add_lora(hf: nn.Module, lora: Lora) -> nn.Module:
    """Adapters for the chosen layers, in place."""
    family = hf.family
    text, tower = f"{family.language}.{family.blocks}.", f"{family.vision}.{family.vision_blocks}."
    linear = {name: layer for name, layer in hf.named_modules() if isinstance(layer, nn.Linear)}
    known = {name.rsplit(".", 1)[-1] for name in linear if name.startswith(text)}
    missing = set(lora.targets) - known
    if missing:
        raise UserError(f"--lora-targets {' '.join(sorted(missing))}: no such linear layers; the language model's blocks have "
                         f"{', '.join(sorted(known))}")
    targets = set(lora.targets or family.lora_targets)
    for name, layer in linear.items():
        if (name.startswith(text) and name.rsplit(".", 1)[-1] in targets) or (lora.vision and name.startswith(tower)):
            layer.__class__ = LoraLinear
            layer.adapt(lora.rank, lora.alpha / lora.rank, lora.dropout, derive_seed(lora.seed, "lora", name))
    return hf


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    layers = lora_layers(module).values()
    for layer in layers:
        layer.off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.off = False


class AdaptersOff:
    """The policy as it was before its adapters learnt: a reference without weights of its own."""

    def __init__(self, policy: nn.Module):
        self.policy = policy

    def __call__(self, *args):
        with without_adapters(self.policy):
            return self.policy(*args)


@torch.no_grad()
def merge_lora(hf: nn.Module) -> nn.Module:
    """Adapters added into the weights they stand beside, in place; in fp32."""
    for layer in lora_layers(hf).values():
        layer.weight.copy_(layer.weight.float() + layer.scale * layer.lora_B.float() @ layer.lora_A.float())
        layer.__class__ = nn.Linear
        del layer.lora_A, layer.lora_B
    return hf


def write_adapter(hf: nn.Module, base: str, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors, as PEFT writes them. `base` is the model's folder or hub id."""
    layers = lora_layers(hf)
    first = next(iter(layers.values()))
    rank = first.lora_A.shape[0]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": first.scale * rank,
              "lora_dropout": first.dropout, "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "use_rslora": False,
              "target_modules": list(layers)}  # in full: the tower's MLPs may be called like the language model's
    tensors = {f"base_model.model.{name}.{ab}.weight": getattr(layer, ab).detach().float().contiguous()
               for name, layer in layers.items() for ab in ("lora_A", "lora_B")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def read_adapter(hf: nn.Module, folder: Path, base: str) -> nn.Module:
    """A PEFT adapter put beside the layers of its base, in place; ValueError where it is another base's, or no plain LoRA."""
    config = json.loads((folder / "adapter_config.json").read_text())
    recorded = config.get("base_model_name_or_path") or ""
    if os.path.basename(recorded.rstrip("/")) != os.path.basename(base.rstrip("/")):  # folders move, names stay
        raise UserError(f"{folder}: the adapter was made for {recorded!r}, not for {base!r}")
    unread = [k for k in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "lora_bias") if config.get(k)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or unread:
        raise UserError(f"{folder}: peft_type {config.get('peft_type')!r}, bias {config.get('bias')!r}"
                         f"{''.join(f', {k} {config[k]!r}' for k in unread)}: only plain LoRA is read; merge the adapter with peft")
    tensors = read_safetensors(folder / "adapter_model.safetensors")
    linear = {name: layer for name, layer in hf.named_modules() if isinstance(layer, nn.Linear)}
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    names = {key.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for key in tensors}
    wanted = {f"base_model.model.{name}.{ab}.weight" for name in names for ab in ("lora_A", "lora_B")}
    if wanted != set(tensors) or not names <= linear.keys():
        odd = sorted([*(wanted ^ set(tensors)), *(names - linear.keys())])
        raise UserError(f"{folder}: the adapter does not fit {base!r}: no such linear layer, or half an adapter: {', '.join(odd[:3])}")
    for name in sorted(names):
        layer = linear[name]
        a, b = (tensors[f"base_model.model.{name}.{ab}.weight"] for ab in ("lora_A", "lora_B"))
        want = (config["r"], layer.in_features), (layer.out_features, config["r"])
        if (tuple(a.shape), tuple(b.shape)) != want:
            raise UserError(f"{folder}: the adapter does not fit {base!r}: {name} has A {tuple(a.shape)} and B {tuple(b.shape)}, where "
                             f"the base needs {want[0]} and {want[1]}")
        layer.__class__ = LoraLinear
        layer.adapt(config["r"], scale, config.get("lora_dropout", 0.0))
        layer.lora_A.data.copy_(a)
        layer.lora_B.data.copy_(b)
    return hf


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file; a ValueError that names it where it is missing, cut short or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as e:
        raise UserError(f"{path}: missing, truncated or no safetensors file ({e})") from e


# ----------------------------------------------------------------------------------------------------------------------
# The policy


class _OwnRows(torch.autograd.Function):
    """Some rows of a tensor that all peers (see sharding.shard) hold alike. Gradients come back whole, and the same on all."""

    @staticmethod
    def forward(ctx, x_KH: torch.Tensor, rows: slice, peers: dist.ProcessGroup) -> torch.Tensor:
        ctx.shape, ctx.rows, ctx.peers = x_KH.shape, rows, peers
        return x_KH[rows]

    @staticmethod
    def backward(ctx, grad_RH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_KH = grad_RH.new_zeros(ctx.shape)
        torch.div(grad_RH, dist.get_world_size(ctx.peers), out=grad_KH[ctx.rows])  # what _AllRows multiplied by
        dist.all_reduce(grad_KH, group=ctx.peers)
        return grad_KH, None, None


class _AllRows(torch.autograd.Function):
    """Each peer's rows put together again, out of n; rows that several have are summed. The gradients of own rows are multiplied
    by the number of peers, by which those of parameters that they hold alike are divided, see sharding.shard."""

    @staticmethod
    def forward(ctx, x_R: torch.Tensor, rows: slice, n: int, peers: dist.ProcessGroup) -> torch.Tensor:
        ctx.rows, ctx.peers = rows, peers
        x_K = x_R.new_zeros(n)
        x_K[rows] = x_R
        dist.all_reduce(x_K, group=peers)
        return x_K

    @staticmethod
    def backward(ctx, grad_K: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad_K[ctx.rows] * dist.get_world_size(ctx.peers), None, None, None


class Policy(nn.Module):
    """A vision-language model as the update sees it: a micro-batch in, log-probabilities of its scored tokens out; with a
    value head also the expected return before each of them. The head starts at 0, and so do the values."""

    def __init__(
        self, hf: nn.Module, processor: Processor, freeze_vision: bool = True, attention: str = "sdpa",
        cache: VisionCache | None = None, kernel: str = "auto", value_head: bool = False, freeze_merger: bool | None = None,
    ):
        super().__init__()
        self.hf, self.attention, self.cache, self.kernel = hf, attention, cache, kernel
        self.peers: dist.ProcessGroup | None = None  # processes that divide the language blocks among them, see sharding.shard
        self.merge_size = processor.merge_size
        self.image_token_id = processor.image_token_id
        self.register_buffer("banned", processor.banned(hf.config.text_config.vocab_size), persistent=False)
        self.visual = [hf.get_submodule(hf.family.vision)]  # in a list: not a second registration
        hf.requires_grad_(True)
        self.visual[0].requires_grad_(not freeze_vision)
        for name in hf.family.mergers if freeze_merger is not None else ():  # else with the tower
            self.visual[0].get_submodule(name).requires_grad_(not freeze_merger)
        if lora_layers(hf):
            for name, parameter in hf.named_parameters():
                parameter.requires_grad_(".lora_" in name)
        self.vision_frozen = not any(p.requires_grad for p in self.visual[0].parameters())
        assert cache is None or self.vision_frozen, "features of a tower that trains go stale"
        # The smallest picture, for micro-batches without one: see hidden()
        v, m = hf.config.vision_config, self.merge_size
        self.blank = ImageInput("blank", torch.zeros(m * m, v.in_channels * v.temporal_patch_size * v.patch_size**2), (1, m, m), 1)
        if value_head:
            self.value_head = nn.Linear(hf.config.text_config.hidden_size, 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def hidden(self, micro: Micro) -> torch.Tensor:
        """The states that the scored tokens are predicted from, (K, H)."""
        positions = micro_positions(micro, self.image_token_id, self.merge_size)
        micro = micro.to(self.banned.device)
        features, deep, image_mask, nothing = None, [], None, None
        if micro.images:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.vision_frozen):
                features, deep = vision_features(self.hf, micro.images, self.cache)
            image_mask = (micro.ids_T == self.image_token_id)[None]
        elif not self.vision_frozen:
            # Every rank must gather and reduce the tower's blocks alike, forward and backward: a micro-batch without pictures
            # looks at a blank one, and gives the tower zeros. Through the embeddings, as pictures do: in a loss apart, the first
            # language block of a model with adapters would have an input without gradient, and reduce out of turn.
            pooled, layers = vision_features(self.hf, [self.blank])
            nothing = sum(layer.sum() for layer in (pooled, *layers)) * 0.0
        embeds = embed(self.hf, micro.ids_T[None], features, self.image_token_id)
        embeds = embeds if nothing is None else embeds + nothing.to(embeds.dtype)
        hidden = language_hidden(
            self.hf, embeds, positions[:, None].to(embeds.device), deep=deep, image_mask=image_mask,
            plan=ForestAttention(self.attention, micro),
        )[0]
        return hidden[micro.src_K]

    def values(self, hidden_KH: torch.Tensor) -> torch.Tensor:
        """(K,) in fp32, whatever the trunk computes in: returns are regressed, and bfloat16 has three digits."""
        return hidden_KH.float() @ self.value_head.weight[0].float() + self.value_head.bias.float()

    def forward(self, micro: Micro, temperature: float = 1.0, loss: Callable | None = None) -> tuple[torch.Tensor, ...]:
        """-> logp_K (nats, at the sampling temperature) and entropy_K, fp32, both differentiable.

        With a loss (a grpo.PolicyLoss) -> the loss of the micro-batch, and logp_K and entropy_K without gradient: the
        cheaper way to train, see kernels.fused_policy_loss. With a value head -> also value_K, last, differentiable.
        """
        hidden_KH = self.hidden(micro)
        micro = micro.to(self.banned.device)
        values = (self.values(hidden_KH),) if hasattr(self, "value_head") else ()
        if self.peers is None:
            return *self.score(hidden_KH, micro.target_K, micro.values, temperature, loss), *values
        n, rows = len(micro.target_K), self.own_rows(micro, loss)
        hidden_RH, columns = _OwnRows.apply(hidden_KH, rows, self.peers), {name: column[rows] for name, column in micro.values.items()}
        *total, logp_R, entropy_R = self.score(hidden_RH, micro.target_K[rows], columns, temperature, loss)
        total = [_AllRows.apply(x[None], slice(0, 1), 1, self.peers).sum() for x in total]
        return *total, *(_AllRows.apply(x_R, rows, n, self.peers) for x_R in (logp_R, entropy_R)), *values

    def score(
        self, hidden_KH: torch.Tensor, target_K: torch.Tensor, values: dict[str, torch.Tensor], temperature: float, loss: Callable | None
    ) -> tuple[torch.Tensor, ...]:
        """The policy head: what forward returns, but for the values."""
        scored = (hidden_KH, self.hf.get_output_embeddings().weight, target_K)
        if loss is None:
            return linear_logprob(*scored, temperature, self.banned, self.kernel)
        return fused_policy_loss(*scored, loss, values, temperature, self.banned, self.kernel)

    def plain_logprobs(self, ids: Sequence[int], images: Sequence[ImageInput], n_prompt: int, temperature: float) -> torch.Tensor:
        """Log-probabilities of ids[n_prompt:], by transformers' own forward with its own positions and masks: none of what we
        do to pack, place and embed. What the self-test compares with; sharding.shard makes it a forward for FSDP."""
        device = self.banned.device
        ids_1T = torch.tensor([ids], device=device)
        # transformers expects no picture in a response, so the marks of prompts alone
        inputs = {"mm_token_type_ids": (ids_1T == self.image_token_id).int()}
        if images:
            inputs["pixel_values"] = torch.cat([image.pixel_values for image in images]).to(device)
            inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in images], device=device)
        hidden_TH = self.hf.model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False, **inputs)[0][0]
        logits = hidden_TH[n_prompt - 1 : -1].float() @ self.hf.get_output_embeddings().weight.float().t() / temperature
        logits[:, self.banned] = -torch.inf
        return logits.log_softmax(-1).gather(1, ids_1T[0, n_prompt:, None])[:, 0]

    def own_rows(self, micro: Micro, loss: Callable | None) -> slice:
        """The scored tokens that this one of the peers scores; whole sequences where the loss couples their tokens."""
        n, me, peers = len(micro.target_K), dist.get_rank(self.peers), dist.get_world_size(self.peers)
        cuts = torch.arange(n + 1)
        if loss is not None and not loss.per_token:
            ends = (micro.values["sequence"].diff() != 0).nonzero()[:, 0] + 1
            cuts = torch.tensor([0, *ends.tolist(), n])
        start, stop = cuts[torch.searchsorted(cuts, torch.tensor([n * me // peers, n * (me + 1) // peers]))].tolist()
        return slice(start, stop)


class Critic(Policy):
    """A copy of the model that only predicts returns: a micro-batch in, value_K out."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, value_head=True)
        head = self.hf.get_output_embeddings().weight
        if head is not self.hf.get_input_embeddings().weight:
            head.requires_grad_(False)  # never used

    def forward(self, micro: Micro) -> torch.Tensor:
        return self.values(self.hidden(micro))


def default_dtype(device: torch.device) -> torch.dtype:
    """Of computation: CPUs are several times slower in bfloat16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_hf(path: str, dtype: torch.dtype = torch.float32, attrs: Attrs = None) -> nn.Module:
    """The bare transformers model of a folder or hub id; its row of the family table is hf.family."""
    config = load_config(path, attrs)
    family = find_family(config, path, attrs)
    transformers.utils.logging.disable_progress_bar()  # one per rank and load would bury the run's own lines
    register_attention()
    model_class = getattr(transformers, family.model_class)
    plain = {"attn_implementation": "planned", "trust_remote_code": False}
    return prepare(model_class.from_pretrained(path, config=config, dtype=dtype, **plain), family)


def register_attention() -> None:
    transformers.AttentionInterface.register("planned", _attention)
    transformers.AttentionMaskInterface.register("planned", sdpa_mask)  # for forwards without a plan


def prepare(hf: nn.Module, family: Family) -> nn.Module:
    """Notes the family and lets plans reach the recurrent layers; attention layers have "planned" for that."""
    hf.family = family
    for module in hf.get_submodule(family.language).modules():
        if hasattr(module, "conv_kernel_size") and hasattr(module, "layer_idx"):
            module.forward = functools.partial(_recurrence, module, module.forward)
    return hf
