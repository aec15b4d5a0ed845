"""Silent failures of RL for vision-language models: break the code as the bugs of other frameworks do, start a real run
on a toy model, and print what notices each bug and after how many seconds. docs/silent_failures.md has both tables.

    OMP_NUM_THREADS=1 python benchmarks/silent_failures.py                    # everything: minutes on two cores
    OMP_NUM_THREADS=1 python benchmarks/silent_failures.py --dtype bfloat16   # the same in the dtype of GPU runs
    OMP_NUM_THREADS=1 python benchmarks/silent_failures.py --short            # three bugs
    OMP_NUM_THREADS=1 python benchmarks/silent_failures.py --only stale_tensor lora_tower

Each case is a fork of this process, which breaks one part of the code and then calls train.py's main function. "Caught
by" is the first of these:

self-test          the comparison of engine and trainer before the first step refuses to train
error at start     another error before the first step
error in step N    an error in a step
warning in step N  a warning that a run without the bug does not print
metric in step N   no error and no warning, but mismatch/kl is above MISMATCH, which a run without the bug never is
not caught         nothing of the above; "message" says what the output shows to someone who compares it with a run
                   without the bug: the number of trained parameters, and the metrics by number of images

Seconds are counted from the start of the run, without imports, on the machine of this process.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from PIL import Image  # noqa: E402

import demo  # noqa: E402
import engines.hf  # noqa: E402
import envs._episodes  # noqa: E402
import layers.attention  # noqa: E402
import layers.lora  # noqa: E402
import layers.recurrent  # noqa: E402
import model  # noqa: E402
import parallel.models  # noqa: E402
import report.log  # noqa: E402
import rollout  # noqa: E402
import train  # noqa: E402
from engines.hf import HFEngine  # noqa: E402
from errors import UserError  # noqa: E402
from model import ImageInput, Processor  # noqa: E402
from parallel.sharding import FullParameters  # noqa: E402
from report.run_files import read_rows  # noqa: E402
from tasks.shapes import shapes_rows  # noqa: E402

MISMATCH = 1e-3  # nats; a run without a bug has about 1e-13 in fp32, and 1e-5 in bfloat16
TIMEOUT = 300.0  # seconds per case
REWARD = "def score(response, example):\n    return (len(response) * 7919 % 5) / 4\n"
# Each response is answered with an image; after the third one the episode ends
ENVIRONMENT = """
from PIL import Image
from envs import Environment, Observation
class Zoom(Environment):
    turns = 0
    def step(self, response):
        self.turns += 1
        images = [Image.linear_gradient("L").rotate(90 * self.turns).resize((96, 64)).convert("RGB")]
        return Observation("<image>Look again.", images{dropped}, done=self.turns == 3)
"""


def noop() -> None:
    """Break nothing: the run with which the others are compared."""


# ----------------------------------------------------------------------------------------------------------------------
# The bugs. Each function changes this process, which then trains


def embed_text_only(hf: Any, ids: torch.Tensor, features: Any, image_token: int) -> torch.Tensor:
    """Replace model.embed_inputs: image tokens get the embedding of the placeholder, whatever the image shows."""
    return hf.get_input_embeddings()(ids)


def trainer_drops_pixels() -> None:
    model.embed_inputs = embed_text_only


def engine_drops_pixels() -> None:
    engines.hf.embed_inputs = embed_text_only


def both_drop_pixels() -> None:
    trainer_drops_pixels()
    engine_drops_pixels()


def rollouts_lose_images() -> None:
    generate = HFEngine.generate

    def without_images(self, *args):
        rollouts = generate(self, *args)
        for r in rollouts:
            r.prompt = replace(r.prompt, images=[])
        return rollouts

    HFEngine.generate = without_images


def engine_gets_text() -> None:
    """The engine tokenizes the prompt's text itself, in which <image> is just a word."""
    generate = HFEngine.generate

    def from_text(self, prompts, *args):
        originals = {}
        for prompt in prompts:
            messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in prompt.example.messages]
            originals[replace(prompt, token_ids=self.processor.tokenize_messages(messages), images=[])] = prompt
        rollouts = generate(self, list(originals), *args)
        for r in rollouts:
            r.prompt = originals[r.prompt]
        return rollouts

    HFEngine.generate = from_text


def template_keeps_marks() -> None:
    """The chat template gets <image> as text, in engine and trainer."""
    apply = Processor.apply_chat_template

    def as_text(self, messages):
        parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
        return apply(self, parts)

    Processor.apply_chat_template = as_text


def template_keeps_marks_and_loses_images() -> None:
    """As before, and the images are dropped too, so that their number is that of the placeholders: none."""
    template_keeps_marks()
    encode = rollout.encode_prompt
    rollout.encode_prompt = lambda processor, messages, images: encode(processor, messages, [])


def with_engine_images(change: Callable[[Any, ImageInput, Image.Image], ImageInput]) -> None:
    """Let the engine see changed images: change(engine's model, our image, original). They have their own keys, as in
    the cache of an engine in another process."""
    features, prepare = engines.hf.vision_features, Processor.image_to_patches
    originals: dict[str, Image.Image] = {}

    def keep_original(self, key, image):
        originals.setdefault(key, image.convert("RGB"))
        return prepare(self, key, image)

    def changed(hf, images, cache):
        new = [replace(change(hf, image, originals[image.key]), key=f"engine-{image.key}") for image in images]
        return features(hf, new, cache)

    Processor.image_to_patches, engines.hf.vision_features = keep_original, changed


def engine_resizes_again() -> None:
    """The engine scales the image to half its size first, and then back."""
    with_engine_images(lambda hf, ours, original: replace(
        ours, image=ours.image.resize((ours.image.width // 2, ours.image.height // 2)).resize(ours.image.size)))


def engine_resizes_with_other_filter() -> None:
    """The engine resizes the original image to the same size with a bilinear filter; ours is bicubic."""
    with_engine_images(lambda hf, ours, original: replace(
        ours, image=original.resize(ours.image.size, Image.Resampling.BILINEAR)))


def engine_ignores_max_pixels() -> None:
    """The engine encodes the original image without --max-pixels, so it has more features than image tokens."""
    prepare = Processor.image_to_patches
    with_engine_images(lambda hf, ours, original: prepare(Processor(hf.config._name_or_path), ours.key, original))


def text_positions(ids: Sequence[int], grids: Any, image_token: int, merge: int) -> torch.Tensor:
    """Replace model.mrope_positions: number image tokens as if they were text."""
    return torch.arange(len(ids)).expand(3, -1)


def trainer_counts_positions() -> None:
    model.mrope_positions = text_positions


def both_count_positions() -> None:
    model.mrope_positions = engines.hf.mrope_positions = text_positions


def recurrent_state_leaks() -> None:
    """A recurrent layer runs over all packed samples as one sequence."""

    def run_through(plan, layer, hidden, width):
        return layer(hidden, cache_params=layers.recurrent.RecurrentState(width))

    layers.recurrent.run_segments = run_through


def convolution_leaks() -> None:
    """A sample's first convolution inputs are the last ones of the sample packed before it; its matrix is its own."""
    run_segments = layers.recurrent.run_segments

    def leaky(plan, layer, hidden, width):
        last: list[torch.Tensor] = []

        def with_old_inputs(piece, cache_params):
            if last:
                cache_params.conv = last[0]
            out = layer(piece, cache_params=cache_params)
            last[:] = [cache_params.conv]
            return out

        return run_segments(plan, with_old_inputs, hidden, width)

    layers.recurrent.run_segments = leaky


def attention_leaks() -> None:
    """Responses also attend to the first prompt of their micro-batch."""
    build = layers.attention.PackedAttention.__init__

    def leaky(self, backend, micro):
        build(self, backend, micro)
        first = self.prefixes[0][0]
        self.prefixes[3:] = [(first + prefix, own) for prefix, own in self.prefixes[3:]]

    layers.attention.PackedAttention.__init__ = leaky


def on_load(change: Callable[[HFEngine, Iterable], Iterable]) -> None:
    """Change the tensors that a weight sync delivers."""
    load = HFEngine.load_weights
    HFEngine.load_weights = lambda self, named: load(self, change(self, named))


def stale_tensor() -> None:
    """One of the language model's tensors is sent under a name that the engine ignores."""
    on_load(lambda engine, named: (x for x in named if not x[0].endswith("layers.1.mlp.down_proj.weight")))


def stale_engine() -> None:
    """No weight sync changes anything."""
    on_load(lambda engine, named: [x for x in named][:0])


def wake_restores_old_weights() -> None:
    """Waking restores the weights from before the sleep, after the sync wrote the new ones."""
    saved: list[dict] = []
    sample = HFEngine.sample

    def sleep(self):
        saved[:] = [{name: p.clone() for name, p in self.hf.named_parameters()}]

    def wake_and_sample(self, *args):
        with torch.no_grad():
            for name, p in self.hf.named_parameters() if saved else ():
                p.copy_(saved[0][name])
        saved.clear()
        return sample(self, *args)

    HFEngine.sleep, HFEngine.sample = sleep, wake_and_sample


def sync_stops_after_step_1() -> None:
    """Weight syncs after the first step's deliver nothing, while the self-test's still worked."""
    log_step, steps = report.log.RunLog.log_step, []
    report.log.RunLog.log_step = lambda self, step, row: (steps.append(step), log_step(self, step, row))[1]
    on_load(lambda engine, named: [x for x in named if not steps])


def adapters_not_merged() -> None:
    """A weight sync sends the adapted layers without their adapters."""
    FullParameters.__iter__ = lambda self: ((name, self.whole(name, self.dtype)) for name in self.chosen)


def padding_banned_only(self: Processor, vocab_size: int) -> torch.Tensor:
    """Replace Processor.banned_token_ids: placeholders of images may be sampled."""
    return torch.arange(len(self.tokenizer), vocab_size)


def placeholder_not_banned() -> None:
    Processor.banned_token_ids = padding_banned_only


def placeholder_not_banned_in_engine() -> None:
    build, banned_token_ids = HFEngine.__init__, Processor.banned_token_ids

    def without_ban(self, *args):
        Processor.banned_token_ids = padding_banned_only
        build(self, *args)
        Processor.banned_token_ids = banned_token_ids

    HFEngine.__init__ = without_ban


def short_turns() -> None:
    """Give the toy many end tokens, so that a random model ends its turns. This is no bug."""
    build = Processor.__init__

    def many_ends(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.eos_ids = sorted({*self.eos_ids, *range(0, 256, 6)})

    Processor.__init__ = many_ends


def template_drops_later_images() -> None:
    """The chat template writes images of the first message only."""
    short_turns()
    tokenize = Processor.tokenize_observation
    Processor.tokenize_observation = lambda self, messages: [
        token for token in tokenize(self, messages) if token != self.image_token_id
    ]


def engine_ignores_later_images() -> None:
    """The engine encodes the prompt's images, but not those of observations."""
    short_turns()
    hidden = HFEngine._hidden

    def blind(self, ids, positions, images, **attention):
        return hidden(self, ids, positions, () if "plan" in attention else images, **attention)

    HFEngine._hidden = blind


def rollout_loses_later_images() -> None:
    """Rollouts hold the image tokens of observations, but not their images."""
    short_turns()
    generate = envs._episodes.EpisodeEngine.generate

    def without_images(self, *args, **kwargs):
        rollouts = generate(self, *args, **kwargs)
        for r in rollouts:
            r.images = []
        return rollouts

    envs._episodes.EpisodeEngine.generate = without_images


def prompt_is_truncated() -> None:
    """Prompts are cut to their last 16 tokens; their images are kept."""
    expand = Processor.expand_image_tokens
    Processor.expand_image_tokens = lambda self, ids, images: expand(self, ids, images)[-16:]


def prompt_and_images_are_truncated() -> None:
    """Prompts are cut to the tokens after their last image, and their images are dropped, in engine and trainer."""
    encode = rollout.encode_prompt

    def cut(processor, messages, images):
        ids, _, unexpanded_ids = encode(processor, messages, images)
        last = max((i for i, token in enumerate(ids) if token == processor.image_token_id), default=-1)
        return ids[last + 1 :], [], unexpanded_ids

    rollout.encode_prompt = cut


def lora_by_name() -> None:
    """Adapters are added to every linear layer with a target's name, those of the vision tower included."""
    add_lora = layers.lora.add_lora

    def everywhere(hf, lora):
        add_lora(hf, lora)
        for name, layer in layers.lora.find_linear_layers(hf.get_submodule(hf.family.vision)).items():
            if name.rpartition(".")[2] in hf.family.lora_targets:
                a = torch.full((lora.rank, layer.in_features), layer.in_features**-0.5)
                layers.lora.add_adapter(layer, lora.alpha / lora.rank, a, torch.zeros(layer.out_features, lora.rank))
        return hf

    parallel.models.add_lora = everywhere


def tower_stays_frozen() -> None:
    """--train-vision is read, but the tower's weights are not trained."""
    set_trainable = model.set_trainable
    model.set_trainable = lambda hf, train_vision: set_trainable(hf, "none")


# ----------------------------------------------------------------------------------------------------------------------
# The cases


@dataclass(frozen=True)
class Case:
    """A bug: how to cause it, and the run that meets it. `steps`: the most steps that the run takes."""

    failure: str  # the row of docs/silent_failures.md
    bug: str
    cause: Callable[[], None] = noop
    flags: tuple[str, ...] = ()
    family: str = "qwen3_vl"
    steps: int = 3


LORA = ("--lora-rank", "4")
PIXELS, TEXT, RESIZED = "pixels dropped", "`<image>` sent as text", "image resized differently"
POSITIONS, PACKING, STALE = "wrong M-RoPE positions", "state leaks between samples", "stale weights after a sync"
ADAPTERS, SAMPLED, TOOL = "adapters not synced", "image placeholder sampled", "a tool's image dropped"
TRUNCATED, TOWER_LORA, FROZEN = "image tokens truncated", "LoRA on the vision tower", "vision tower frozen by mistake"

CASES = {
    "trainer_drops_pixels": Case(PIXELS, "by the trainer", trainer_drops_pixels, family="qwen2_5_vl"),
    "engine_drops_pixels": Case(PIXELS, "by the engine", engine_drops_pixels, family="qwen2_5_vl"),
    "both_drop_pixels": Case(PIXELS, "by both engine and trainer", both_drop_pixels, family="qwen2_5_vl"),
    "rollouts_lose_images": Case(PIXELS, "from the rollouts", rollouts_lose_images),
    "engine_gets_text": Case(TEXT, "to the engine", engine_gets_text),
    "template_keeps_marks": Case(TEXT, "to engine and trainer", template_keeps_marks),
    "marks_without_images": Case(TEXT, "to both, which get no images", template_keeps_marks_and_loses_images),
    "no_image_key": Case(TEXT, "the image column is not named", flags=("--image-key", "")),
    "engine_resizes_again": Case(RESIZED, "halved and doubled by the engine", engine_resizes_again),
    "other_filter": Case(RESIZED, "bilinear in the engine, not bicubic", engine_resizes_with_other_filter),
    "engine_ignores_max_pixels": Case(RESIZED, "--max-pixels is ignored by the engine", engine_ignores_max_pixels,
                                      ("--max-pixels", "4096"), "qwen2_5_vl"),
    "trainer_counts_positions": Case(POSITIONS, "in the trainer", trainer_counts_positions),
    "both_count_positions": Case(POSITIONS, "in both engine and trainer", both_count_positions),
    "recurrent_state_leaks": Case(PACKING, "recurrent state, Qwen3.5", recurrent_state_leaks, family="qwen3_5"),
    "convolution_leaks": Case(PACKING, "convolution, Qwen3.5", convolution_leaks, family="qwen3_5"),
    "attention_leaks": Case(PACKING, "attention", attention_leaks),
    "stale_tensor": Case(STALE, "one tensor is never sent", stale_tensor),
    "stale_engine": Case(STALE, "nothing is ever sent", stale_engine),
    "wake_restores": Case(STALE, "waking restores the old weights", wake_restores_old_weights),
    "sync_stops": Case(STALE, "syncs stop working after step 1", sync_stops_after_step_1, steps=20),
    "adapters_not_merged": Case(ADAPTERS, "layers are sent without them", adapters_not_merged, LORA),
    "placeholder": Case(SAMPLED, "no ban", placeholder_not_banned, steps=40),
    "placeholder_in_engine": Case(SAMPLED, "no ban in the engine", placeholder_not_banned_in_engine, steps=40),
    "environment_drops_image": Case(TOOL, "by the environment", short_turns, ("--env", "dropped.py:Zoom")),
    "template_drops_image": Case(TOOL, "by the chat template", template_drops_later_images, ("--env", "zoom.py:Zoom")),
    "engine_drops_image": Case(TOOL, "by the engine", engine_ignores_later_images, ("--env", "zoom.py:Zoom"), steps=12),
    "rollout_drops_image": Case(TOOL, "from the rollouts", rollout_loses_later_images, ("--env", "zoom.py:Zoom")),
    "truncated": Case(TRUNCATED, "the images are kept", prompt_is_truncated, family="qwen2_5_vl"),
    "truncated_with_images": Case(TRUNCATED, "with the images", prompt_and_images_are_truncated),
    "lora_tower": Case(TOWER_LORA, "by name", lora_by_name, LORA, family="qwen2_5_vl"),
    "lora_tower_uncached": Case(TOWER_LORA, "by name, --vision-cache-gb 0", lora_by_name,
                                (*LORA, "--vision-cache-gb", "0"), family="qwen2_5_vl"),
    "tower_stays_frozen": Case(FROZEN, "--train-vision all has no effect", tower_stays_frozen,
                               ("--train-vision", "all")),
    "tower_lr_frozen": Case(FROZEN, "--vision-lr without --train-vision", flags=("--vision-lr", "1e-5")),
    "tower_lora_frozen": Case(FROZEN, "--lora-rank with --train-vision all", flags=(*LORA, "--train-vision", "all")),
}
SHORT = ("trainer_drops_pixels", "stale_tensor", "template_keeps_marks")
SOUND = "sound"  # names the runs without a bug
NOT_CAUGHT = "not caught"


# ----------------------------------------------------------------------------------------------------------------------
# Running them


def sound_case(case: Case) -> Case:
    """Return the run with which a case is compared: the same settings without the bug."""
    flags = tuple(flag.replace("dropped.py", "zoom.py") for flag in case.flags)
    return Case(SOUND, "", short_turns if "--env" in flags else noop, flags, case.family, case.steps)


def train_flags(case: Case, folder: Path, out: Path, dtype: str) -> list[str]:
    flags = ["--model", folder / case.family, "--data", folder / "train.parquet", "--out", out, "--steps", case.steps]
    flags += ["--reward", f"{folder / 'reward.py'}:score", "--reward-workers", 0, "--save-every", 1000, "--lr", 3e-3]
    flags += ["--prompts-per-step", 4, "--group-size", 4, "--micro-tokens", 1024, "--dtype", dtype]
    flags += ["--max-new-tokens", 64 if "--env" in case.flags else 16]
    return [str(flag) for flag in flags] + [f"{folder}/{flag}" if ".py:" in flag else flag for flag in case.flags]


def train_in_fork(case: Case, folder: Path, out: Path, dtype: str) -> dict[str, Any]:
    """Train in a fork of this process. Return the error's type, its message and whether it came before the first step;
    the seconds until the end of each step, with the warnings so far, and the seconds until the end of the run."""
    result, log = out.with_suffix(".json"), out.with_suffix(".log")
    if pid := os.fork():
        end = time.monotonic() + TIMEOUT
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.05)
        assert result.exists(), f"{out.name} ended without a result: {log.read_text()[-3000:]}"
        names = set().union(*read_rows(out / "metrics.jsonl"))
        by_images = " ".join(sorted(name for name in names if name.startswith("accuracy/images=")))
        return json.loads(result.read_text()) | {"log": log.read_text(), "images": by_images}
    code = 1
    try:
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        began, steps, caught = time.monotonic(), [], {}
        log_step = report.log.RunLog.log_step

        def log_and_record(*args):
            log_step(*args)
            sys.stdout.flush()
            steps.append([time.monotonic() - began, find_warnings(log.read_text())])

        report.log.RunLog.log_step = log_and_record
        set_up, started = train.set_up, []
        train.set_up = lambda cfg: (set_up(cfg), started.append(True))[0]
        case.cause()
        sys.argv = ["train.py", *train_flags(case, folder, out, dtype)]
        try:
            train.run_training(train.parse_args(sys.argv[1:]))
        except (UserError, ValueError, RuntimeError, AssertionError) as error:
            traceback.print_exc()
            caught = {"error": type(error).__name__, "message": str(error), "before": not started}
        result.write_text(json.dumps(caught | {"steps": steps, "seconds": time.monotonic() - began}))
        code = 0
    finally:  # not sys.exit: the fork must not run the parent's cleanup
        sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
        os._exit(code)


def find_warnings(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("warning: ")]


def trained_parameters(log: str) -> str:
    return re.search(r"[\d.]+ M trainable", log)[0]


def describe_catch(run: dict[str, Any], out: Path, sound: dict[str, Any]) -> tuple[str, str, float]:
    """Return what caught a bug, its message, and the seconds until then."""
    if "error" in run:
        by = "self-test" if run["message"].startswith("self-test") else "error at start"
        by = by if run["before"] else f"error in step {len(run['steps']) + 1}"
        message = run["message"].partition("skips it): ")[2] or run["message"]
        return by, message if run["error"] == "UserError" else f"{run['error']}: {message}", run["seconds"]
    for i, (seconds, warnings) in enumerate(run["steps"], 1):
        if new := [line for line in warnings if line not in find_warnings(sound["log"])]:
            return f"warning in step {i}", new[0], seconds
    for row, (seconds, _) in zip(read_rows(out / "metrics.jsonl"), run["steps"], strict=True):
        if row.get("mismatch/kl", 0.0) > MISMATCH:
            return f"metric in step {row['step']}", f"mismatch/kl {row['mismatch/kl']:.2g} nats", seconds
    pairs = [(trained_parameters(run["log"]), trained_parameters(sound["log"])), (run["images"], sound["images"])]
    traces = [f"the output has {ours}, without the bug {expected}" for ours, expected in pairs if ours != expected]
    return NOT_CAUGHT, "; ".join(traces), run["seconds"]


def run_case(name: str, case: Case, folder: Path, dtype: str, sound_runs: dict[Case, dict]) -> tuple[str, str, float]:
    """Run a case, and compare it with a run without its bug if it ends without an error."""
    out = folder / name
    run = train_in_fork(case, folder, out, dtype)
    reference = sound_case(case)
    if "error" not in run and reference not in sound_runs:
        sound_out = folder / f"{SOUND}{len(sound_runs)}"
        sound_runs[reference] = train_in_fork(reference, folder, sound_out, dtype)
        worst = max(row.get("mismatch/kl", 0.0) for row in read_rows(sound_out / "metrics.jsonl"))
        assert "error" not in sound_runs[reference] and worst < MISMATCH, (worst, sound_runs[reference]["log"][-2000:])
    return describe_catch(run, out, sound_runs.get(reference, {}))


def format_range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def make_inputs(folder: Path, families: set[str]) -> None:
    for family in sorted(families):
        demo.make_model(folder / family, family, hidden=64, layers=2, vocab=448)
    pq.write_table(pa.Table.from_pylist(list(shapes_rows(24, "train", 0))), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    (folder / "zoom.py").write_text(ENVIRONMENT.replace("{dropped}", ""))
    (folder / "dropped.py").write_text(ENVIRONMENT.replace("{dropped}", "[:0]"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--short", action="store_true", help=f"only {', '.join(SHORT)}")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--keep", type=Path, help="keep the runs and their output in this new folder")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    names = args.only or (SHORT if args.short else list(CASES))
    folder = args.keep or Path(tempfile.mkdtemp(prefix="silent-failures-"))
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["| failure | bug | caught by | message | seconds |", "|---|---|---|---|--:|"]
    sound_runs: dict[Case, dict] = {}
    caught: dict[str, dict[str, list[float]]] = {}  # failure -> what caught a bug -> seconds
    try:
        make_inputs(folder, {CASES[name].family for name in names})
        print("\n".join(lines), flush=True)
        for name in names:
            case = CASES[name]
            by, message, seconds = run_case(name, case, folder, args.dtype, sound_runs)
            message = " ".join(message.replace(f"{folder}/", "").split())[:100].replace("|", "\\|")
            message = f"`{message}`" if message else "–"
            after = "–" if by == NOT_CAUGHT else f"{seconds:.1f}"
            print(f"| {case.failure} | {case.bug} | {by} | {message} | {after} |", flush=True)
            caught.setdefault(case.failure, {}).setdefault(by.partition(" in step")[0], []).append(seconds)
            assert not args.short or by in ("self-test", "error at start"), f"{name}: {by}"
    finally:
        if not args.keep:
            shutil.rmtree(folder)
    print("\n| failure | caught by, after seconds |\n|---|---|")
    for failure, kinds in caught.items():
        texts = [by if by == NOT_CAUGHT else f"{by} {format_range(seconds)}" for by, seconds in kinds.items()]
        print(f"| {failure} | {'; '.join(texts)} |")


if __name__ == "__main__":
    main()
