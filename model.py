"""The model: processor, loading, freezing, and the forward pass of packed micro-batches. parallel/ distributes it over
processes.

Everything that differs between model families is in FAMILIES. The modelling code is transformers'; this module only
defines how a packed micro-batch (packing.MicroBatch) passes through it.

Axes: T packed tokens, K trained tokens, H hidden size, V vocabulary, I image tokens.
"""

import copy
import json
import math
import operator
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import torch
import transformers
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText as AutoModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.utils import cached_file

from errors import UserError, as_user_error, nearest_path, need
from kernels import KERNELS, fused_policy_loss, linear_logprob, resolve_kernel
from layers.attention import ATTENTION_BACKENDS, PackedAttention, register_attention, resolve_attention
from layers.lora import LoraConfig, find_lora_layers
from layers.recurrent import patch_recurrent_layers
from layers.video import video_text
from layers.vision import ImageInput, Patcher, VisionCache, vision_features
from packing import MicroBatch
from settings import REQUIRED, PixelConfig, flag_field
from sources.content import IMAGE_PLACEHOLDER, MARK_PATTERN, VIDEO_PLACEHOLDER
from sources.hub import offline_remedy
from utils import copy_together, print0

# Linear layers of attention, MLPs and gated delta nets. Experts are not listed: they are one tensor, not linear layers
PROJECTIONS = tuple("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj in_proj_qkv in_proj_z out_proj".split())
# Tokens that stand for images and videos. The policy must not sample one of them: it would have no features.
VISION_TOKEN_ID_KEYS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")  # in config
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")



@dataclass(frozen=True)
class Family:
    """The dotted module paths of a model family's parts, relative to the loaded model, to its vision tower or to its
    language model."""

    vision: str = "model.visual"
    language: str = "model.language_model"
    vision_blocks: str = "blocks"  # below vision
    blocks: str = "layers"  # below language
    timestamps: bool = False  # whether the slices of a video are separate, each after its time in the prompt's text
    lora_targets: tuple[str, ...] = PROJECTIONS  # last names of linear layers in the language blocks; empty: all


FAMILIES = {  # by config.model_type
    "qwen2_vl": Family(),
    "qwen2_5_vl": Family(),
    "qwen3_vl": Family(timestamps=True),
    "qwen3_vl_moe": Family(timestamps=True),
    "qwen3_5": Family(timestamps=True),
    "qwen3_5_moe": Family(timestamps=True),
}
SUPPORTED_MODELS = ("supported are models that process images as Qwen-VL does (Qwen2VLImageProcessor, "
                    f"get_image_features with image_grid_thw, M-RoPE), such as {', '.join(FAMILIES)}")
TRAIN_VISION = ("none", "merger", "tower", "all")


@dataclass(frozen=True)
class ModelConfig(PixelConfig):
    """Model"""

    model: str = flag_field(REQUIRED, "model folder or Hugging Face hub id")
    family_paths: tuple[str, ...] = flag_field((), "module paths of the vision tower and the language model, such as "
                                               "model.visual model.language_model, for families not in model.FAMILIES",
                                               metavar="PATH")
    train_vision: str = flag_field("none", "vision weights to train: none, merger (projector), tower (all but the "
                                   "merger), all; with LoRA, only none or tower", choices=TRAIN_VISION)
    dtype: str = flag_field("auto", "compute dtype; auto: bfloat16 on a GPU, float32 on a CPU",
                            choices=("auto", "float32", "bfloat16"))
    master_dtype: str = flag_field("fp32", "dtype of weights and optimizer state; bf16 halves memory but loses small "
                                   "updates (harmless with LoRA)", choices=("fp32", "bf16"))
    attn: str = flag_field("auto", "attention in training: sdpa (any device), flex (GPU only), flash (GPU only, does "
                           "not share prompts); auto: flex on a GPU, else sdpa", choices=("auto", *ATTENTION_BACKENDS))
    kernel: str = flag_field("auto", "implementation of the fused LM head and loss: triton (GPU) or plain torch; auto: "
                             "triton on a GPU if it is installed", choices=KERNELS)
    vision_cache_gb: float = flag_field(2.0, "GiB for cached image features of a frozen vision tower; 0: no cache",
                                        least=0)
    gradient_checkpointing: bool = flag_field(False, "recompute activations in the backward pass (less memory, more "
                                              "compute)")
    compile: bool = flag_field(False, "compile the language blocks with torch.compile (faster updates, slower start)")
    lora_rank: int = flag_field(0, "LoRA rank; 0: full fine-tuning. LoRA needs a larger --lr, about 3e-5", least=0)
    lora_alpha: float = flag_field(32.0, "LoRA alpha: adapter outputs are scaled by alpha / rank", above=0)
    lora_targets: tuple[str, ...] = flag_field((), "names of the linear layers to adapt (default: all in the language "
                                               "blocks)")

    @property
    def vision_frozen(self) -> bool:
        return self.train_vision == "none"

    def lora(self, seed: int) -> LoraConfig | None:
        """Return the settings of the adapters, or None without adapters."""
        if not self.lora_rank:
            return None
        return LoraConfig(self.lora_rank, self.lora_alpha, self.lora_targets, self.train_vision == "tower", seed)

    def resolve(self, device: torch.device) -> "ModelConfig":
        """Return the settings with --attn and --kernel resolved for this device."""
        attn, kernel = resolve_attention(self.attn, device), resolve_kernel(self.kernel, device)
        return replace(self, attn=attn, kernel=kernel)

    def check(self, ref_every: int) -> None:
        """Raise UserError for LoRA flags without LoRA, and for flags that do not work with it."""
        if not self.lora_rank:
            targets = " ".join(self.lora_targets)
            need(not targets, f"--lora-targets {targets}: there are no adapters without --lora-rank above 0; set it")
            return
        with_lora = f"with --lora-rank {self.lora_rank}"
        need(not ref_every, f"--algo-args ref_every={ref_every}: {with_lora} the reference is the policy without its "
             "adapters; use 0")
        need(self.train_vision in ("none", "tower"), f"--train-vision {self.train_vision}: {with_lora} all weights are "
             "frozen; use none, or use tower to adapt the tower's blocks")


# ----------------------------------------------------------------------------------------------------------------------
# The config of a model, and its family


def load_config(path: str, paths: tuple[str, ...] = ()) -> transformers.PreTrainedConfig:
    """Return the model's config, before anything large is read. Raise UserError for a path or family that cannot be
    loaded."""
    files = {*os.listdir(path)} if os.path.isdir(path) else set()
    need("config.json" in files or files.isdisjoint(("run.json", "trainer.json", "adapter_config.json")), f"--model "
         f"{path!r} is a run, checkpoint or adapter; export it: python merge_lora.py {path} --out DIR")
    models = " or ".join(str(file.parent) for file in sorted(Path(path).glob("*/config.json"))[:3])
    remedy = (f"{nearest_path(path)}; give a model folder{models and f' inside it ({models})'} or hub id such as "
              "Qwen/Qwen2.5-VL-3B-Instruct")
    need(os.path.isdir(path) or path.count("/") <= 1, f"--model {path!r}: no such folder{remedy}")
    with _config_errors(path, f"neither a folder with a config.json nor loadable from the Hugging Face hub{remedy}"):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    find_family(config, path, paths)
    check_packable(config, path)
    return config


@contextmanager
def _config_errors(path: str, problem: str, flag: str = "--model") -> Iterator[None]:
    """Raise a UserError in place of the errors of transformers' from_pretrained. All its calls have
    trust_remote_code=False, because by default it asks on the terminal whether to run a model's code."""
    remedy = offline_remedy(path)
    try:
        yield
    except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:  # the last two: a damaged file
        message = f"{problem} ({remedy or (str(error).strip() or type(error).__name__).splitlines()[0]})"
        if "trust_remote_code" in str(error):
            message = "this model needs custom code (auto_map), which is not supported; use a model without it"
        raise UserError(f"{flag} {path!r}: {message}") from error


def check_packable(config: transformers.PreTrainedConfig, path: str) -> None:
    """Raise UserError for quantized weights, and for attention that is not supported: windows, and rotary frequencies
    that depend on the longest sequence of a batch, which would differ from one micro-batch to another."""
    need(not getattr(config, "quantization_config", None),
         f"--model {path!r} has quantized weights, which cannot be trained; use its checkpoint in bfloat16")
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ())
    windows = ", ".join(sorted(name for name in layer_types if "sliding" in name or "chunked" in name))
    need(not windows, f"--model {path!r} has {windows} layers with a window of {getattr(text, 'sliding_window', None)} "
         "tokens, which are not supported; if no sequence is longer, set use_sliding_window to false in config.json")
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    need(rope not in ("dynamic", "longrope"), f"--model {path!r}: rotary embeddings of type {rope!r} depend on the "
         "longest sequence of a batch; set another rope_type, such as 'yarn', in its config.json")


def find_family(config: transformers.PreTrainedConfig, path: str, paths: Sequence[str]) -> Family:
    """Return the model type's row of FAMILIES or, if --family-paths are given, a Family made from them and checked on a
    model without weights."""
    if paths:
        need(len(paths) == 2, f"--family-paths {' '.join(paths)}: give two, of the vision tower and the language model")
        return _family_from_paths(config, path, *paths)
    need(config.model_type in FAMILIES, f"--model {path!r} is of type {config.model_type!r}; supported: "
         f"{', '.join(FAMILIES)}; in train.py, use --family-paths for others that process images as these do")
    return FAMILIES[config.model_type]


def _family_from_paths(config: transformers.PreTrainedConfig, path: str, vision: str, language: str) -> Family:
    need(type(config) in AutoModel._model_mapping,
         f"--model {path!r}: transformers has no image-text model of type {config.model_type!r}")
    with torch.device("meta"):  # the modules without their weights
        # name the attention, because a config may name a kernel from the hub, which is code
        hf = AutoModel.from_config(copy.deepcopy(config), attn_implementation="eager")
    features = getattr(hf.model, "get_image_features", None)
    need(features and hasattr(hf.model, "get_rope_index") and "image_grid_thw" in signature(features).parameters,
         f"--model {path!r} ({config.model_type}): {SUPPORTED_MODELS}")
    lists = [name for name, module in hf.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    parents = [name.rpartition(".")[0] for name in lists]
    examples = ", ".join([*dict.fromkeys(parents)][:4])
    vision_blocks = next((name for name in lists if name.startswith(f"{vision}.")), "")
    need(vision_blocks, f"--family-paths {vision!r} has no list of blocks; use a path that has one: {examples}")
    need(language in parents, f"--family-paths {language!r} has no list of blocks; use a path that has one: {examples}")
    tower = ".".join(vision.split(".")[:2])  # the whole tower, even if the path names a part of it
    blocks = lists[parents.index(language)].removeprefix(f"{language}.")
    return Family(tower, language, vision_blocks.removeprefix(f"{tower}."), blocks, lora_targets=())


# ----------------------------------------------------------------------------------------------------------------------
# The processor: from messages and images to token ids and patches


def read_older_template(path: str) -> str | None:
    """Return the chat template that an older transformers saved with the processor of a folder or hub id, or None."""
    for name in ("chat_template.json", "processor_config.json"):
        may_lack = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        file = cached_file(path, name, **may_lack)
        if template := json.loads(Path(file).read_text()).get("chat_template") if file else None:
            return template
    return None


class Processor:
    """A model's tokenizer and image processor. transformers' AutoProcessor would also build a video processor, which
    needs torchvision; apart from that it would only expand placeholders, which `expand_image_tokens` and
    layers/video.py do.

    The model replaces <|image_pad|> and <|video_pad|> by features in the same way, so expanded token ids have
    <|image_pad|> for videos too."""

    def __init__(self, path: str, min_pixels: int | None = None, max_pixels: int | None = None, flag: str = "--model"):
        with _config_errors(path, "cannot load its tokenizer and image processor; give a model folder or hub id", flag):
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            self.image_processor = transformers.AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
            self.tokenizer.chat_template = self.tokenizer.chat_template or read_older_template(path)
        name = type(self.image_processor).__name__
        need(name.startswith("Qwen2VL"), f"{flag} {path!r}: its image processor is {name}; {SUPPORTED_MODELS}")
        limits = {"shortest_edge": (min_pixels, "min_pixels"), "longest_edge": (max_pixels, "max_pixels")}
        given = {key: n for key, n in dict(self.image_processor.size or {}).items() if n is not None}
        known = {} if given.keys() - limits.keys() - {"min_pixels", "max_pixels"} else given
        size = {key: n if n is not None else known.get(key, known.get(older)) for key, (n, older) in limits.items()}
        need(all(isinstance(n, int) and n > 0 for n in size.values()),
             f"{flag} {path!r}: its preprocessor_config.json or processor_config.json has the size {given}; write "
             "shortest_edge and longest_edge, the least and the most pixels of an image, or pass --min-pixels and "
             "--max-pixels")
        low, high = size["shortest_edge"], size["longest_edge"]
        notes = [" (the model's default)" if n is None else "" for n in (min_pixels, max_pixels)]
        need(low <= high, f"--min-pixels {low}{notes[0]} is above --max-pixels {high}{notes[1]}; change one of them")
        self.image_processor.size = size
        self.merge_size = self.image_processor.merge_size
        self.patcher = self._make_patcher(f"{flag} {path!r}")
        need(self.tokenizer.chat_template is not None,
             f"{flag} {path!r}: no chat template in its tokenizer, chat_template.json or processor_config.json; use an "
             "instruction-tuned checkpoint")
        placeholders = [getattr(config, name, None) for name in VISION_TOKEN_ID_KEYS]
        self.image_token_id, self.video_token_id = placeholders[:2]
        self.family = FAMILIES.get(config.model_type)
        self.tokens_per_second = getattr(config.vision_config, "tokens_per_second", None)
        need(self.image_token_id is not None, f"{flag} {path!r}: its config has no image_token_id; use another model")
        self.special_tokens = {str(t): i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special}
        self.opening, ends = self._try_template(f"{flag} {path!r}")
        ends.add(self.tokenizer.eos_token_id)  # a response ends at any of these
        with _config_errors(path, "damaged generation_config.json", flag), suppress(OSError):  # the file is optional
            listed = transformers.GenerationConfig.from_pretrained(path, trust_remote_code=False).eos_token_id
            ends |= {*map(operator.index, listed if isinstance(listed, list) else [listed] * (listed is not None))}
        self.eos_ids = sorted(ends - {None})
        banned = [*placeholders, *map(self.tokenizer.convert_tokens_to_ids, VISION_TOKENS)]
        self.banned_ids = sorted({i for i in banned if i is not None})

    def _try_template(self, label: str) -> tuple[str, set[int]]:
        """Return the text that the chat template puts at the start of a response, such as `<think>` and a line break,
        or "" (also if it closes the thought at once); and the special token, if any, that it puts after a response.
        Raise UserError if the template does not write one image for an <image> mark."""
        question, marker = {"role": "user", "content": f"{IMAGE_PLACEHOLDER}question"}, "RESPONSE"
        errors = jinja2.TemplateError, TypeError, ValueError, ArithmeticError
        with as_user_error(errors, f"{label}: its chat template cannot write a prompt with an image; use the template "
                           "of its vision-language model"):
            prompt, ids = self.apply_chat_template([question]), self.tokenize_messages([question])
            history = self.apply_chat_template([question, {"role": "assistant", "content": marker}, question])
        count = ids.count(self.image_token_id)
        need(count == 1, f"{label}: its chat template writes {count} image tokens for a prompt with one image; use the "
             "template of its vision-language model")
        before, _, after = history.partition(marker)
        # a template that writes empty thoughts into the history has other text there; then the opening is the last tag
        opening = prompt.removeprefix(before)
        opening = opening if opening != prompt else re.search(r"(<[^<>|/]+>)?\s*$", prompt)[0]
        ends = {*self.tokenizer.encode(after, add_special_tokens=False)[:1]} & {*self.special_tokens.values()}
        return "" if opening.isspace() or "</" in opening else opening, ends

    def _make_patcher(self, label: str) -> Patcher:
        """Return a Patcher that gives the image processor's values. Raise UserError if the image processor does more
        than map each byte to a value."""
        processor, merge = self.image_processor, self.merge_size
        side = processor.patch_size * merge
        noise = np.random.default_rng(0).integers(0, 256, (6 * side, 8 * side, 3), dtype=np.uint8)
        images = [*(Image.new("RGB", (side, side), (byte,) * 3) for byte in range(256)), Image.fromarray(noise)]
        patches = processor(images=images, return_tensors="pt", do_resize=False)["pixel_values"]
        uniform, expected = patches.split([256 * merge**2, len(patches) - 256 * merge**2])
        table_CB = uniform[:: merge**2].unflatten(1, (3, -1))[..., 0].t().contiguous()
        patcher = Patcher(table_CB, processor.patch_size, merge, processor.temporal_patch_size)
        need(torch.equal(patcher(images[-1]), expected),
             f"{label}: its image processor does more than scale and normalize pixels; {SUPPORTED_MODELS}")
        return patcher

    def banned_token_ids(self, vocab_size: int) -> Tensor:
        """Return the ids that must never be sampled: vision placeholders and the vocabulary's padding rows."""
        return torch.tensor(self.banned_ids + list(range(len(self.tokenizer), vocab_size)), dtype=torch.long)

    def apply_chat_template(self, messages: Sequence[dict]) -> str:
        """Return the chat-templated text, up to the next response, with one <|image_pad|> per <image> mark and one
        <|video_pad|> per <video> mark. A content that is a list, not a text, is kept unchanged: the policy's own text
        has no marks."""
        templated = []
        for message in messages:
            content, text = [], message["content"]
            if isinstance(text, list):
                templated.append(message)
                continue
            for piece in MARK_PATTERN.split(text):
                if piece in (IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER):
                    content.append({"type": piece.strip("<>")})
                elif piece:
                    content.append({"type": "text", "text": piece})
            templated.append({"role": message["role"], "content": content})
        return self.tokenizer.apply_chat_template(templated, tokenize=False, add_generation_prompt=True)

    def tokenize_messages(self, messages: Sequence[dict], videos: Sequence[tuple] = ()) -> list[int]:
        """Return the token ids of the chat-templated text, in which the placeholders of these videos, (frames, fps,
        ...), are replaced by one <|image_pad|> for each of ImageInput.parts."""
        return self._encode(self.apply_chat_template(messages), videos)

    def _encode(self, text: str, videos: Sequence[tuple]) -> list[int]:
        for n_frames, fps, *_ in videos:
            text = text.replace("<|video_pad|>", video_text(self, n_frames, fps), 1)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def tokenize_observation(self, messages: Sequence[dict], videos: Sequence[tuple] = ()) -> list[int]:
        """Return the token ids that the template puts between two responses, the first of which ended with its end
        token, when these messages come between them; placeholders and videos are as in tokenize_messages."""
        marker = "RESPONSE"
        history = [{"role": "user", "content": ""}, {"role": "assistant", "content": marker}]
        text = self.apply_chat_template([*history, *messages]).split(marker, 1)[1]
        ids = self._encode(text, videos)
        return ids[1:] if ids and ids[0] in self.eos_ids else ids

    def template_rewrites_history(self) -> bool:
        """Return whether the template changes earlier responses, for example by removing their thoughts."""
        question = {"role": "user", "content": "question"}
        prompt = self.apply_chat_template([question])
        response = f"{self.opening or '<think>'}thought\n</think>\n\nanswer"
        history = self.apply_chat_template([question, {"role": "assistant", "content": response}, question])
        return not history.startswith(prompt + response.removeprefix(self.opening))

    def special_tokens_in(self, messages: Sequence[dict]) -> list[str]:
        """Return the tokenizer's special tokens that `tokenize_messages` would read from the messages' own text."""
        texts = list(chain.from_iterable(message["content"].split(IMAGE_PLACEHOLDER) for message in messages))
        ids = set(chain.from_iterable(self.tokenizer.encode(text, add_special_tokens=False) for text in texts))
        ids.discard(self.tokenizer.unk_token_id)  # it stands for any text that the vocabulary lacks
        return [token for token, i in self.special_tokens.items() if i in ids or any(token in text for text in texts)]

    def count_tokens(
        self, messages: Sequence[dict], sizes: Sequence[tuple[int, int]], videos: Sequence[tuple] = ()
    ) -> int:
        """Return the number of prompt tokens, with those of images of these (width, height) and of videos of these
        (frames, fps, (width, height)), without their pixels."""
        ids = self.tokenize_messages(messages, videos)
        return len(ids) - ids.count(self.image_token_id) + sum(self.count_patches(sizes, videos)) // self.merge_size**2

    def count_patches(self, sizes: Sequence[tuple[int, int]], videos: Sequence[tuple] = ()) -> list[int]:
        """Return the number of patches of each image and of each slice of the videos, given as in count_tokens."""
        slices = (size for n_frames, _, size in videos for _ in range(0, n_frames, self.patcher.slice_frames))
        return [math.prod(self.resized_size(*size)) // self.patcher.patch**2 for size in (*sizes, *slices)]

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) at which the model sees an image."""
        low, high = (self.image_processor.size[name] for name in ("shortest_edge", "longest_edge"))
        return smart_resize(height, width, self.patcher.patch * self.merge_size, low, high)[::-1]

    def image_to_patches(self, key: str, image: Image.Image) -> ImageInput:
        """Return an image as the model sees it. It is resized here, once, so that trainer and rollout engine see the
        same pixels whichever of transformers' image processors each of them uses: neither has to resize it again."""
        image, size = image.convert("RGB"), self.resized_size(*image.size)
        if image.size != size:
            image = image.resize(size, Image.Resampling(self.image_processor.resample))
        w, h = (n // self.patcher.patch for n in size)
        return ImageInput(key, image, (1, h, w), h * w // self.merge_size**2, self.patcher)

    def tokenize_prompt(self, messages: Sequence[dict], images: Sequence[ImageInput]) -> list[int]:
        """Return the token ids of the prompt, with each placeholder expanded to the image tokens of its image."""
        return self.expand_image_tokens(self.tokenize_messages(messages), images)

    def expand_image_tokens(self, unexpanded_ids: Sequence[int], images: Sequence[ImageInput]) -> list[int]:
        """Return the token ids with each placeholder expanded to the image tokens of its image. Raise UserError if the
        numbers of placeholders and images differ."""
        n_marks = unexpanded_ids.count(self.image_token_id)
        need(n_marks == len(images), f"prompt has {n_marks} {IMAGE_PLACEHOLDER} marks or <|image_pad|> tokens but "
             f"{len(images)} images; write one mark per image or video")
        need(self.video_token_id not in unexpanded_ids, f"there is a {VIDEO_PLACEHOLDER} mark or <|video_pad|> token "
             "without a video; remove it")
        ids, remaining_images = [], iter(images)
        for token in unexpanded_ids:
            ids += [token] * (next(remaining_images).n_tokens if token == self.image_token_id else 1)
        return ids

    def merge_placeholders(self, ids: Sequence[int]) -> list[int]:
        """Return an engine's token ids as they are in a Prompt: with <|image_pad|> for videos too."""
        return [self.image_token_id if token == self.video_token_id else token for token in ids]


# ----------------------------------------------------------------------------------------------------------------------
# Positions and embeddings


def mrope_positions(ids: Sequence[int], images: Iterable[ImageInput], image_token: int, merge: int) -> Tensor:
    """Return M-RoPE positions (temporal, height, width) of tokens that start at position 0, (3, len(ids)) int64. An
    iterator of images is advanced by one for each image among the tokens.

    Text advances all three rows by one per token. An image spans its merged grid, and the text after it continues from
    its largest position: a spatial one or, after a long video, a temporal one.        Qwen2-VL, arXiv:2409.12191
    """
    images = (part for image in images for part in image.parts)
    columns, position, index = [], 0, 0
    while image_token in ids[index:]:
        n_text = ids.index(image_token, index) - index
        columns.append(torch.arange(position, position + n_text).expand(3, -1))
        position += n_text
        image = next(images)
        t, h, w = image.grid_thw
        times = (torch.arange(t, dtype=torch.float64) * image.interval).long()
        spatial = torch.arange(h // merge), torch.arange(w // merge)
        columns.append(torch.cartesian_prod(times, *spatial).t() + position)
        position = int(columns[-1].max()) + 1
        index += n_text + image.n_tokens
    columns.append(torch.arange(position, position + len(ids) - index).expand(3, -1))
    return torch.cat(columns, dim=1)


def micro_batch_positions(micro: MicroBatch, image_token: int, merge: int) -> Tensor:
    """Return the positions of a micro-batch, (3, T). Those of a segment continue from the token before it in its
    sequence, which may be anywhere earlier in the micro-batch."""
    ids, images = micro.ids_T.tolist(), iter(micro.images)
    positions = torch.empty(3, len(ids), dtype=torch.long)
    highest = torch.empty(len(ids), dtype=torch.long)  # largest position of each token and its prefix
    for start, stop, previous in micro.segments:
        first = int(highest[previous]) + 1 if previous >= 0 else 0
        positions[:, start:stop] = mrope_positions(ids[start:stop], images, image_token, merge) + first
        highest[start:stop] = positions[:, start:stop].amax(dim=0).cummax(dim=0).values
    return positions


def embed_inputs(hf: nn.Module, ids: Tensor, features: Tensor | None, image_token: int) -> Tensor:
    """Return token embeddings with the images' features at the image tokens. ids (B, T) -> (B, T, H)."""
    embeds = hf.get_input_embeddings()(ids)
    if features is None:
        return embeds
    return embeds.masked_scatter((ids == image_token)[..., None], features.to(embeds.dtype))


def run_language_model(hf, embeds, positions, mask=None, deep=(), image_mask=None, cache=None, plan=None) -> Tensor:
    """Return the last hidden states, (B, T, H), of embeds (B, T, H) at positions (3, B, T). Attention is defined by a
    bool mask, (B or 1, 1, T, keys), or by a plan, which each layer calls as plan(layer, query, key, value, scale)."""
    text_model = hf.get_submodule(hf.family.language)
    # A finished mask per layer type, so that transformers derives nothing from positions or padding. Families without
    # layer types accept the 4-D mask itself. With a plan, the mask is not read.
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=embeds.device) if plan is not None else mask
    types = set(getattr(text_model.config, "layer_types", None) or ())
    # Recurrent layers need a mask of the tokens that are not padding: exactly those that the last token sees
    masks = {t: mask[:, 0, -1] if t == "linear_attention" and plan is None else mask for t in types}
    inputs = {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": masks or mask, "plan": plan}
    if len(deep):
        inputs |= {"deepstack_visual_embeds": list(deep), "visual_pos_masks": image_mask}
    return text_model(**inputs, past_key_values=cache, use_cache=cache is not None).last_hidden_state


# ----------------------------------------------------------------------------------------------------------------------
# The policy


class PolicyOutput(NamedTuple):
    """The results for the K trained tokens of a micro-batch, in fp32. With a loss, log-probabilities and entropies have
    no gradient."""

    logp_K: Tensor  # log-probability of the sampled token at the sampling temperature, in nats
    entropy_K: Tensor
    loss: Tensor | None = None  # loss of the micro-batch, differentiable
    value_K: Tensor | None = None  # expected return before each token, differentiable


class Policy(nn.Module):
    """A vision-language model for the update: it returns the log-probabilities of a micro-batch's trained tokens and,
    with a value head, the expected return before each of them. The value head is initialized to 0, so its first values
    are 0. `attention` and `kernel` are the resolved --attn and --kernel."""

    def __init__(self, hf, processor, train_vision="none", attention="sdpa", cache: VisionCache | None = None,
                 kernel="auto", value_head=False):
        super().__init__()
        self.hf = hf
        self.attention, self.cache, self.kernel = attention, cache, kernel
        self.tp_group = None  # process group that splits the language blocks, see parallel/tensor_parallel.py
        self.merge_size = processor.merge_size
        self.image_token_id = processor.image_token_id
        self.patcher = processor.patcher
        self.register_buffer("banned", processor.banned_token_ids(hf.config.text_config.vocab_size), persistent=False)
        self.visual = [hf.get_submodule(hf.family.vision)]  # in a list, because hf has registered it already
        set_trainable(hf, train_vision)
        self.vision_frozen = not any(p.requires_grad for p in self.visual[0].parameters())
        assert cache is None or self.vision_frozen, "cached features become stale when the vision tower is trained"
        if value_head:
            self.value_head = nn.Linear(hf.config.text_config.hidden_size, 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(self, micro: MicroBatch, temperature: float = 1.0, loss=None, tokens=None) -> PolicyOutput:
        """Return the results for the trained tokens. A loss (a grpo.PolicyLoss, which reads `tokens`, the micro-batch's
        rows of the TokenBatch) is the cheaper way to train: see kernels.fused_policy_loss."""
        hidden_KH = self.hidden_states(micro)
        value_K = self.predict_values(hidden_KH) if hasattr(self, "value_head") else None
        [target_K] = copy_together([micro.target_K], hidden_KH.device)
        out = self.apply_head(hidden_KH, target_K, temperature, loss, tokens)
        return out._replace(value_K=value_K)

    def apply_head(self, hidden_KH, target_K, temperature, loss, tokens) -> PolicyOutput:
        """Apply the policy head. With tensor parallelism each process computes some of the rows, see
        parallel.tensor_parallel."""
        inputs = (hidden_KH, self.hf.get_output_embeddings().weight, target_K)
        if loss is None:
            return PolicyOutput(*linear_logprob(*inputs, temperature, self.banned, self.kernel))
        total, logp_K, entropy_K = fused_policy_loss(*inputs, loss, tokens, temperature, self.banned, self.kernel)
        return PolicyOutput(logp_K, entropy_K, total)

    def hidden_states(self, micro: MicroBatch) -> Tensor:
        """Return the hidden states that predict the trained tokens, (K, H)."""
        positions = micro_batch_positions(micro, self.image_token_id, self.merge_size)
        micro = micro.to(self.banned.device)
        features, deep = None, []
        if micro.images:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.vision_frozen):
                features, deep = vision_features(self.hf, micro.images, self.cache)
        image_mask = (micro.ids_T == self.image_token_id)[None]
        embeds = embed_inputs(self.hf, micro.ids_T[None], features, self.image_token_id)
        if not micro.images and not self.vision_frozen:
            embeds = embeds + self._zero_vision_loss().to(embeds.dtype)
        plan = PackedAttention(self.attention, micro)
        [positions] = copy_together([positions[:, None]], embeds.device)
        hidden = run_language_model(self.hf, embeds, positions, deep=deep, image_mask=image_mask, plan=plan)
        return hidden[0, micro.hidden_index_K]

    def _zero_vision_loss(self) -> Tensor:
        """Return a zero that depends on the trained vision tower. Every rank must gather and reduce the tower's blocks,
        forward and backward, so for a micro-batch without images the tower gets a blank image and zero gradients. The
        zero is added to the embeddings, where images' features are too: with a separate loss, the first language block
        of a model with adapters would have an input without gradient, and reduce out of order."""
        smallest = Image.new("RGB", [self.merge_size * self.patcher.patch] * 2)
        grid = (1, self.merge_size, self.merge_size)
        pooled, layers = vision_features(self.hf, [ImageInput("blank", smallest, grid, 1, self.patcher)])
        return sum(layer.sum() for layer in (pooled, *layers)) * 0.0

    def predict_values(self, hidden_KH: Tensor) -> Tensor:
        """Return the values, (K,), in fp32 whatever the compute dtype: they are fitted to returns by regression, and
        bfloat16 has three digits."""
        return hidden_KH.float() @ self.value_head.weight[0].float() + self.value_head.bias.float()

    def unpacked_logprobs(self, prompt: Any, response: Sequence[int], temperature: float) -> Tensor:
        """Return the log-probabilities of a response to a rollout.Prompt by transformers' own forward, with its own
        positions and masks, and the plain-torch head: without our packing, positions and embeddings. The self-test
        compares with them."""
        device = self.banned.device
        ids_1T = torch.tensor([[*prompt.token_ids, *response]], device=device)
        # the marks of image tokens; transformers expects none in a response
        inputs = {"mm_token_type_ids": (ids_1T == self.image_token_id).int()}
        if images := [part for image in prompt.images for part in image.parts]:
            inputs["pixel_values"] = torch.cat([image.pixel_values(device) for image in images])
            inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in images], device=device)
        if any(image.grid_thw[0] > 1 for image in images):  # a bug in transformers, docs/silent_failures.md
            positions = mrope_positions(ids_1T[0].tolist(), prompt.images, self.image_token_id, self.merge_size)
            inputs["position_ids"] = positions[:, None].to(device)
        mask = torch.ones_like(ids_1T)
        hidden_TH = self.hf.model(input_ids=ids_1T, attention_mask=mask, use_cache=False, **inputs)[0][0]
        start, weight_VH = len(prompt.token_ids), self.hf.get_output_embeddings().weight
        head_inputs = hidden_TH[start - 1 : -1], weight_VH, ids_1T[0, start:]
        return linear_logprob(*head_inputs, temperature, self.banned, "torch")[0]


def set_trainable(hf: nn.Module, train_vision: str) -> None:
    """Make the language model and the --train-vision part of the vision tower trainable; in a model with adapters, only
    the adapters."""
    if find_lora_layers(hf):
        for name, parameter in hf.named_parameters():
            parameter.requires_grad_(".lora_" in name)
        return
    hf.requires_grad_(True)
    tower = hf.get_submodule(hf.family.vision)
    tower.requires_grad_(train_vision in ("tower", "all"))
    for name, module in tower.named_children():
        if "merger" in name:  # the merger turns patches into the language model's tokens
            module.requires_grad_(train_vision in ("merger", "all"))


class Critic(Policy):
    """A copy of the model that only predicts returns: it returns value_K of a micro-batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, value_head=True)
        head = self.hf.get_output_embeddings().weight
        if head is not self.hf.get_input_embeddings().weight:
            head.requires_grad_(False)  # never used

    def forward(self, micro: MicroBatch) -> Tensor:
        return self.predict_values(self.hidden_states(micro))


def resolve_dtype(choice: str, device: torch.device) -> torch.dtype:
    """Return the compute dtype that --dtype chooses; auto is float32 on a CPU, where bfloat16 is several times
    slower."""
    return getattr(torch, choice if choice != "auto" else "bfloat16" if device.type == "cuda" else "float32")


def weight_files(path: str) -> list[Path]:
    """Return the safetensors files of a model folder or hub id. Raise UserError if one of them is missing, or if the
    index lists one outside the folder. Files of other formats, such as pickles, are never read."""
    cached = partial(cached_file, path, _raise_exceptions_for_missing_entries=False)
    index, names = cached("model.safetensors.index.json"), ["model.safetensors"]
    if index:
        with as_user_error((ValueError, LookupError, TypeError, AttributeError), f"--model {path!r}: damaged {index}"):
            names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
            outside = [name for name in names if Path(name).name != name]
        need(not outside, f"--model {path!r}: {index} lists files outside its folder: {outside[:3]}; correct it")
    files = [cached(name) for name in names]
    missing = [name for name, file in zip(names, files, strict=True) if file is None]
    need(not missing, f"--model {path!r}: {len(missing)} of {len(names)} weight files are missing: {missing[:3]}"
         f" {offline_remedy(path)}")
    return [Path(file) for file in files]


def check_head(path: str, tied: bool) -> None:
    """Raise UserError if weight files are missing, or if the config ties the head to the embedding although the files
    hold another head."""
    stored = {}
    for file in weight_files(path) * tied:
        with suppress(SafetensorError), safe_open(file, "pt") as tensors:  # damage is reported later
            stored |= {name[1]: (file, key) for key in tensors.keys()  # noqa: SIM118  not a dict
                       if (name := re.fullmatch(r"(?:model\.|language_model\.)*(lm_head|embed_tokens)\.weight", key))}
    if len(stored) == 2:
        head, embedding = (safe_open(file, "pt").get_tensor(key) for file, key in stored.values())
        need(torch.equal(head, embedding), f"--model {path!r}: config.json ties the head to the embedding "
             "(tie_word_embeddings) although the files hold both, with other values; set it to false")


def load_hf(path: str, dtype: torch.dtype = torch.float32, paths: tuple[str, ...] = ()) -> nn.Module:
    """Return the bare transformers model of a folder or hub id, with its row of the family table in hf.family."""
    config = load_config(path, paths)
    family = find_family(config, path, paths)
    check_head(path, config.tie_word_embeddings)
    transformers.utils.logging.disable_progress_bar()  # a bar per rank and load would hide the run's own output
    register_attention()
    options = {"attn_implementation": "planned", "trust_remote_code": False, "use_safetensors": True}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    hf, info = AutoModel.from_pretrained(path, config=config, dtype=dtype, **options)
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    need(not missing, f"--model {path!r}: {len(missing)} tensors are missing: {missing[:3]}; download it again")
    other = sorted(name for name, *_ in info["mismatched_keys"])
    need(not other, f"--model {path!r}: {len(other)} tensors do not have the shapes of its config.json: {other[:3]}; "
         "download it again")
    if unused:
        print0(f"{path}: ignored {len(unused)} tensors that are not part of the model: {', '.join(unused[:3])}")
    return attach_family(hf, family)


def attach_family(hf: nn.Module, family: Family) -> nn.Module:
    """Set hf.family and the tower's attention, and let attention plans reach the recurrent layers."""
    hf.family = family
    if family in FAMILIES.values():  # their towers pass the bounds of images, or of windows, to attention
        hf.get_submodule(family.vision).config._attn_implementation = "planned_flash"
    patch_recurrent_layers(hf.get_submodule(family.language))
    return hf
