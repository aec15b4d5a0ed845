"""Videos from a row to log-probabilities: tokens, patches, positions, packing, engines.   pytest tests/test_video.py"""

import base64
import copy
import dataclasses
import io
import math
import re
import sys
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FAMILIES, written
from PIL import Image, ImageSequence

import engines.self_test as S
import model as M
from engines.client import media_data_uri
from engines.common import build_request
from engines.hf import HFEngine
from engines.launch import check_videos, size_limits
from engines.vllm import multi_modal_data
from envs import Observation
from errors import UserError
from layers.video import encode_prompt
from layers.vision import VisionCache
from packing import FlopCosts, Packer, make_token_batch, rollouts_flops
from prepare_data import Example
from report.evaluation import make_record, make_sample_record
from report.page.page import write_pages
from report.writer import ReportPage
from rollout import ExampleList, Rollout, SamplingParams, filter_prompts, make_prompts
from sources.images import decode_image, encode_png
from sources.videos import Video

CPU = torch.device("cpu")
TIMED = [family for family in FAMILIES if family.startswith("qwen3")]
BLOCK = [family for family in FAMILIES if family.startswith("qwen2")]


def row(uid, content, videos=(), images=()):
    """Return a stand-in of an Example with these videos (Video) and images (PIL)."""
    return SimpleNamespace(
        uid=uid, messages=[{"role": "user", "content": content}], images=[encode_png(i) for i in images],
        image_sizes=[i.size for i in images], videos=videos, ground_truth="x", extra={}, data_source="shapes",
        video_sizes=[(len(v.frames), v.fps, decode_image(v.frames[0]).size) for v in videos],
    )  # fmt: skip


@pytest.fixture
def clip(picture):
    """clip(n, fps, size, seed) -> a Video of n noisy frames."""

    def make(n=5, fps=2.0, size=(64, 112), seed=0):
        return Video(tuple(encode_png(picture(*size, seed=100 * seed + i)) for i in range(n)), fps)

    return make


@pytest.fixture
def examples(clip, picture):
    """Rows with a video of an odd number of frames, two videos with an image between them, and none."""
    return [
        row("one", "<video>What happens?", [clip(5, 2.0)]),
        row("mixed", "<image>Then <video> or <image><video>?", [clip(2, 0.5, seed=1), clip(7, 1.5, (112, 64), 2)],
            [picture(84, 84, 1), picture(60, 97, 2)]),
        row("none", "Tell me something long and odd, would you please?"),
    ]  # fmt: skip


def parts(prompt):
    """Return the inputs of the vision tower."""
    return [part for image in prompt.images for part in image.parts]


def true_ids(processor, prompt):
    """Return the token ids as engines have them: with <|video_pad|> for videos."""
    ids, start = list(prompt.token_ids), 0
    for image in parts(prompt):
        start = ids.index(processor.image_token_id, start)
        token = processor.video_token_id if image.fps else processor.image_token_id
        ids[start : start + image.n_tokens] = [token] * image.n_tokens
        start += image.n_tokens
    return ids


def reference_patches(processor, frames):
    """Return the patches of consecutive pairs of frames, made from the image processor's values of single frames."""
    options = {"return_tensors": "pt", "do_resize": False}
    values = [processor.image_processor(images=[frame], **options)["pixel_values"] for frame in frames]
    single = [v.view(len(v), 3, 2, -1)[:, :, 0] for v in values]
    single += single[-1:] * (len(single) % 2)
    return torch.cat([torch.stack(pair, 2).flatten(1) for pair in zip(single[::2], single[1::2], strict=True)])


def video_frames(prompt):
    """Return for each video (its frames as PIL images, its frames per second)."""
    return [(list(map(Image.fromarray, image.frames)), image.fps) for image in prompt.images if image.fps]


def reference_positions(hf, processor, ids, prompt):
    """Return M-RoPE positions by the engines' rule, written again: the text after a video starts after the largest
    position so far."""
    step = getattr(hf.config.vision_config, "tokens_per_second", None)
    position, columns, i, images = 0, [], 0, iter(parts(prompt))
    while i < len(ids):
        if ids[i] not in (processor.image_token_id, processor.video_token_id):
            columns.append((position,) * 3)
            position, i = position + 1, i + 1
            continue
        image = next(images)
        t, h, w = image.grid_thw
        factor = 1.0 if step is None or not image.fps else float(torch.tensor(2 / image.fps)) * step
        block = [(position + math.floor(a * factor), position + b, position + c)
                 for a in range(t) for b in range(h // 2) for c in range(w // 2)]
        columns, i, position = columns + block, i + len(block), max(map(max, block)) + 1
    return torch.tensor(columns).t()


def reference_logprobs(hf, processor, rollout, banned, own_positions=False):
    """Return the log-probabilities of the tokens after a prompt by transformers' unpacked forward, with its own video
    features, and for Qwen3 its own positions too."""
    start = len(rollout.prompt.token_ids)
    prompt = SimpleNamespace(token_ids=rollout.prompt.token_ids + rollout.response,
                             images=rollout.prompt.images + rollout.images)  # fmt: skip
    ids = torch.tensor([true_ids(processor, prompt)])
    types = (ids == processor.image_token_id).int() + 2 * (ids == processor.video_token_id).int()
    inputs = {"mm_token_type_ids": types}
    if stills := [image for image in prompt.images if not image.fps]:
        inputs["pixel_values"] = torch.cat([image.pixel_values() for image in stills])
        inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in stills])
    if videos := video_frames(prompt):
        patch = processor.patcher.patch
        inputs["pixel_values_videos"] = torch.cat([reference_patches(processor, frames) for frames, _ in videos])
        inputs["video_grid_thw"] = torch.tensor(
            [(-(-len(frames) // 2), frames[0].height // patch, frames[0].width // patch) for frames, _ in videos])
        if processor.tokens_per_second:
            inputs["second_per_grid_ts"] = torch.tensor([2 / fps for _, fps in videos])
        if not processor.family.timestamps and not own_positions:
            inputs["position_ids"] = reference_positions(hf, processor, ids[0].tolist(), prompt)[:, None]
    hf.model.rope_deltas = None
    logits = hf(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0].clone()
    logits[:, banned] = -torch.inf
    return logits[start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]


def make_rollouts(prompts):
    """Return three responses of each prompt; two begin with the same tokens."""
    rollouts = []
    for i, prompt in enumerate(prompts):
        for response in ([5 + i, 6, 7, 8], [5 + i, 6, 9], [40, 41 + i]):
            rollout = written(prompt.uid, prompt.token_ids, response, prompt.images)
            rollout.prompt = prompt
            rollouts.append(rollout)
    return rollouts


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_forward_equals_separate_forwards_with_videos(family, loaded, examples):
    hf, processor = loaded[family]
    policy = M.Policy(hf, processor, cache=VisionCache(2**30))
    rollouts = make_rollouts(make_prompts(examples, processor))
    n_tokens = sum(len(r.prompt.token_ids) for r in rollouts[::3])
    [micro] = Packer(10_000, processor.image_token_id).pack(rollouts)
    assert micro.n_tokens < n_tokens + 27  # each prompt once
    tokens = make_token_batch(rollouts)
    for _ in range(2):  # the second time from the cache
        with torch.no_grad():
            logp_K = policy(micro).logp_K
        for i, rollout in enumerate(rollouts):
            with torch.no_grad():
                want = reference_logprobs(hf, processor, rollout, policy.banned)
            got = logp_K[tokens[micro.token_index_K].rollout == i]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


# --- tokens, patches and positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_token_ids_are_those_of_the_text_that_transformers_writes(family, loaded, clip):
    """The text rule of transformers' processors: Qwen3 writes the mean time of the frames of each slice, of which the
    last may repeat a frame; others one block of <|video_pad|>."""
    _, processor = loaded[family]
    rows = [row("a", "See <video>!", [clip(5, 30.0 / 60)]), row("b", "<video>", [clip(1, 4.0)])]
    prompts = make_prompts(rows, processor)
    pads = "<|video_pad|>" * parts(prompts[0])[0].n_tokens
    times = ["<1.0 seconds>", "<5.0 seconds>", "<8.0 seconds>"]
    text = "".join(f"{time}<|vision_start|>{pads}<|vision_end|>" for time in times) if family in TIMED else pads
    chat = "<|im_start|>user\nSee <|vision_start|>{}<|vision_end|>!<|im_end|>\n<|im_start|>assistant\n"
    assert true_ids(processor, prompts[0]) == processor.tokenizer.encode(chat.format(text))
    assert prompts[0].unexpanded_ids == processor.tokenizer.encode(chat.format("<|video_pad|>"))
    assert processor.merge_placeholders(true_ids(processor, prompts[0])) == prompts[0].token_ids
    assert [len(parts(prompt)) for prompt in prompts] == ([3, 1] if family in TIMED else [1, 1])
    assert ("<0.0 seconds>" in processor.tokenizer.decode(prompts[1].token_ids)) == (family in TIMED)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_prompt_lengths_are_counted_without_pixels(family, loaded, clip, examples, monkeypatch):
    _, processor = loaded[family]
    rows = [*examples, *(row(f"{n} {fps}", "<video><video>", [clip(n, fps, (100, 70)), clip(3, fps)])
                         for n in (1, 2, 12) for fps in (0.1, 1 / 3, 24.0))]  # fmt: skip
    prompts = make_prompts(rows, processor)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    monkeypatch.setattr(processor, "image_to_patches", None)
    assert filter_prompts(rows, [processor], max(lengths))[2] == lengths
    kept, dropped, _ = filter_prompts(rows, [processor], max(lengths) - 1)
    assert len(kept) < len(rows) and str(max(lengths)) in dropped[0]
    patches = processor.count_patches(rows[1].image_sizes, rows[1].video_sizes)
    assert sum(patches) == sum(math.prod(image.grid_thw) for image in prompts[1].images)
    assert len(patches) == 2 + 1 + 4  # images and slices


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_equal_the_image_processors(family, loaded, clip, picture):
    _, processor = loaded[family]
    still = picture(100, 70, 9)
    [prompt, twice] = make_prompts([row("a", "<video>", [clip(5, 2.0, (100, 70))]),
                                    row("b", "<video>", [Video((encode_png(still),) * 2, 1.0)])], processor)
    frames = [processor.image_to_patches("", decode_image(f)).image for f in clip(5, 2.0, (100, 70)).frames]
    got = torch.cat([part.pixel_values() for part in parts(prompt)])
    # the values of a pixel are computed alone, but in tensors of other shapes
    torch.testing.assert_close(got, reference_patches(processor, frames), rtol=0, atol=1e-6)
    once = processor.image_to_patches("", still).pixel_values()
    torch.testing.assert_close(twice.images[0].pixel_values(), once, rtol=0, atol=1e-6)
    assert np.array_equal(prompt.images[0].frames, np.stack(frames))


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_follow_the_engines_rule(family, loaded, examples, clip):
    hf, processor = loaded[family]
    rows = [*examples[:2], *(row(f"{fps}", "a <video> b <video> c", [clip(9, fps), clip(4, fps)])
                             for fps in (0.3, 1.0, 7.0, 29.97))]  # fmt: skip
    for prompt in make_prompts(rows, processor):
        got = M.mrope_positions(prompt.token_ids, prompt.images, processor.image_token_id, processor.merge_size)
        assert torch.equal(got, reference_positions(hf, processor, true_ids(processor, prompt), prompt))
        [micro] = Packer(10_000, processor.image_token_id).pack([written("u", prompt.token_ids, [5, 6], prompt.images)])
        packed = M.micro_batch_positions(micro, processor.image_token_id, processor.merge_size)
        assert torch.equal(packed[:, :-1], got) and int(packed[0, -1]) == int(got.max()) + 1


def rope_index(hf, processor, prompt):
    """Return transformers' positions of a prompt with videos, (3, tokens), and its offset of later tokens."""
    ids = torch.tensor([true_ids(processor, prompt)])
    types = (ids == processor.image_token_id).int() + 2 * (ids == processor.video_token_id).int()
    stills = [image.grid_thw for image in prompt.images if not image.fps]
    grids = [image.grid_thw for image in prompt.images if image.fps]
    inputs = {"image_grid_thw": torch.tensor(stills)} if stills else {}
    if processor.tokens_per_second:
        inputs["second_per_grid_ts"] = [2 / image.fps for image in prompt.images if image.fps]
    positions, delta = hf.model.get_rope_index(
        ids, mm_token_type_ids=types, video_grid_thw=torch.tensor(grids), attention_mask=torch.ones_like(ids), **inputs)
    return positions[:, 0], int(delta)


@pytest.mark.parametrize("family", TIMED)
def test_positions_of_timestamped_slices_equal_transformers(family, loaded, examples):
    hf, processor = loaded[family]
    for prompt in make_prompts(examples[:2], processor):
        got = M.mrope_positions(prompt.token_ids, prompt.images, processor.image_token_id, processor.merge_size)
        assert torch.equal(got, rope_index(hf, processor, prompt)[0])


@pytest.mark.parametrize("family", BLOCK)
def test_transformers_places_text_after_a_long_video_too_early(family, loaded, clip):
    """A bug of transformers 5.19 (docs/silent_failures.md): it ignores the temporal positions of the video. Its own
    generation, whose next token comes after the largest position, and all engines continue from there. If this fails
    because a later version agrees with the engines, remove the exceptions in Policy.unpacked_logprobs and self_test."""
    hf, processor = loaded[family]
    [prompt] = make_prompts([row("a", "Look: <video>and then?", [clip(61, 0.5)])], processor)
    ours = M.mrope_positions(prompt.token_ids, prompt.images, processor.image_token_id, processor.merge_size)
    theirs, delta = rope_index(hf, processor, prompt)
    start = prompt.token_ids.index(processor.image_token_id)
    end = start + prompt.images[0].n_tokens
    assert torch.equal(ours[:, :end], theirs[:, :end])  # up to the end of the video they agree
    span = 31 if family == "qwen2_vl" else 30 * 4 * 4 + 1  # 31 slices, 4 s apart, with 4 positions per second
    assert ours[:, end].tolist() == [start + span] * 3  # after the largest position
    assert theirs[:, end].tolist() == [start + 4] * 3  # after the largest spatial position: 4 rows of tokens
    assert int(theirs[:, -1].max()) < int(theirs[0, end - 1]) == int(theirs.max())  # all the text is inside the video
    assert delta + len(prompt.token_ids) == int(theirs.max()) + 1  # its next token continues from the largest position
    rollout = Rollout(prompt, 0, [7, 8, 9], [True] * 3)
    banned = processor.banned_token_ids(448)
    with torch.no_grad():
        right, wrong = (reference_logprobs(hf, processor, rollout, banned, own) for own in (False, True))
    assert (right - wrong).abs().max() > 1e-3


def test_marks_and_videos_must_match(loaded, clip, picture):
    _, processor = loaded["qwen3_vl"]
    image, video = make_prompts([row("a", "<image><video>", [clip(4)], [picture(64, 64)])], processor)[0].images
    encode = lambda text, images: encode_prompt(processor, [{"role": "user", "content": text}], images)  # noqa: E731
    for text, images in [("<image>?", [video]), ("<video>", [image]), ("<video><video>", [video]), ("?", [video]),
                         ("<video>", [video, video]), ("<video><image>", [video])]:  # fmt: skip
        with pytest.raises(UserError, match="mark"):
            encode(text, images)
    assert encode("<video><image>", [image, video])[1] == [video, image]  # only the order within each kind matters
    with pytest.raises(UserError, match="without a video"):
        processor.expand_image_tokens(processor.tokenize_observation([{"role": "user", "content": "<video>"}]), [])


def test_other_families_are_refused(loaded, clip, monkeypatch):
    _, processor = loaded["qwen3_vl"]
    monkeypatch.setattr(processor, "family", None)
    example = row("a", "<video>", [clip(4)])
    with pytest.raises(UserError, match="videos, which are only supported with models whose type is in"):
        filter_prompts([example], [processor], 100)


# --- packing, cache, FLOPs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_trained_tower_equal_those_of_separate_forwards(family, loaded, toys, examples, monkeypatch):
    hf, processor = loaded[family]
    if "3_5" in family:  # see test_model.py
        hf = M.load_hf(str(toys[family])).double().eval()
        if "moe" in family:
            hf.set_experts_implementation("eager")
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    policy = M.Policy(hf, processor, "all")
    rollouts = make_rollouts(make_prompts(examples[:2], processor))
    [micro] = Packer(10_000, processor.image_token_id).pack(rollouts)
    policy.zero_grad()
    (policy(micro).logp_K * torch.sin(micro.target_K.float())).sum().backward()
    gradients = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    for rollout in rollouts:
        want = reference_logprobs(hf, processor, rollout, policy.banned)
        (want * torch.sin(torch.tensor(rollout.response).float())).sum().backward()
    assert sum(n.startswith("hf.model.visual") for n in gradients) > 10
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            error = (parameter.grad - gradients[name]).norm() / parameter.grad.norm().clamp(min=1e-8)
            assert error < 1e-5, f"{name}: relative gradient error {error:.1e}"


def test_equal_slices_are_computed_once(loaded, clip, monkeypatch):
    hf, processor = loaded["qwen3_vl"]
    frames = clip(4).frames
    again = Video(frames[2:] * 2 + frames[:2], 2.0)  # its slices are among those of the first
    prompts = make_prompts([row("a", "<video>", [Video(frames, 2.0)]), row("b", "<video>", [again])], processor)
    batches, original = [], hf.model.get_image_features
    monkeypatch.setattr(hf.model, "get_image_features",
                        lambda p, g, **k: (batches.append(g.tolist()), original(p, g, **k))[1])
    cache = VisionCache(2**30)
    with torch.no_grad():
        for prompt in prompts:
            M.vision_features(hf, prompt.images, cache)
    assert len(batches) == 2 and len(cache.entries) == 2  # two slices in five


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_flops_count_each_slice_as_an_image(family, loaded, clip, picture):
    _, processor = loaded[family]
    rows = [row("a", "<video>", [clip(7)]), row("b", "<image>", [], [picture(64, 112)])]
    [video, image] = make_prompts(rows, processor)
    costs = FlopCosts(0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 16)
    flops = [rollouts_flops([Rollout(prompt, 0, [1, 2], [True] * 2)], costs) for prompt in (video, image)]
    assert flops[0] == 4 * flops[1]
    mixed = make_prompts([row("c", "<image><video><video>", [clip(7), clip(3)], [picture(64, 112)])], processor)[0]
    assert make_token_batch([written("c", mixed.token_ids, [1], mixed.images)]).n_images.tolist() == [3.0]


# --- what engines get -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_requests_have_every_frame_and_its_time(family, loaded, clip, picture):
    _, processor = loaded[family]
    videos, image = [clip(5, 1.5, (100, 70)), clip(2, 4.0)], picture(84, 84, 1)
    [prompt] = make_prompts([row("a", "<video>then <image>, <video>", videos, [image])], processor)
    *_, ids, images, _ = build_request(Rollout(prompt, 0), 4, processor, 10_000)
    assert ids == prompt.unexpanded_ids and [bool(i.fps) for i in images] == [True, False, True]
    data = multi_modal_data(images)
    assert data["image"] == [prompt.images[1].image]
    for video, (frames, times), wanted in zip(videos, data["video"], [images[0], images[2]], strict=True):
        resized = [processor.image_to_patches("", decode_image(frame)).image for frame in video.frames]
        assert np.array_equal(frames, np.stack(resized)) and times["fps"] == video.fps
        assert times["frames_indices"] == list(range(len(resized)))
        kind, _, content = media_data_uri(wanted).partition(";base64,")
        assert kind == "data:video/jpeg"
        sent = [Image.open(io.BytesIO(base64.b64decode(part))) for part in content.split(",")]
        assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(sent, resized, strict=True))
    assert media_data_uri(images[1]).startswith("data:image/png;base64,")
    rows = [row("b", "<video>", [video]) for video in (videos[0], videos[0]._replace(fps=2.0), videos[1])]
    others = make_prompts(rows, processor)
    keys = [build_request(Rollout(other, 0), 4, processor, 10_000)[-2][0].key for other in others]
    assert keys[0] == images[0].key and len(set(keys)) == 3


def test_blank_prompts_have_white_frames(loaded, examples):
    for family in ("qwen2_5_vl", "qwen3_vl"):
        _, processor = loaded[family]
        for real, blank in zip(*(make_prompts(examples, processor, blank=b) for b in (False, True)), strict=True):
            assert blank.blank and blank.token_ids == real.token_ids and blank.unexpanded_ids == real.unexpanded_ids
            assert all(np.asarray(part.image).min() == 255 for part in parts(blank))
            assert [part.grid_thw for part in parts(blank)] == [part.grid_thw for part in parts(real)]
            assert not {part.key for part in parts(blank)} & {part.key for part in parts(real)}


def test_noised_frames_reach_engine_and_tower(loaded, examples):
    noisy = pytest.importorskip("algorithms.noisy")
    _, processor = loaded["qwen3_vl"]
    algo = SimpleNamespace(noise_level=500.0, noise_samples=0.5, group_size=4, noise_slope=30.0, noise_midpoint=2 / 3)
    [prompt] = noisy.add_noised_prompts(make_prompts(examples[:1], processor), algo, seed=0, step=0, steps=10)
    images = build_request(Rollout(prompt.noised, 0), 4, processor, 10_000)[-2]
    [video], seen = prompt.images, parts(prompt.noised)
    assert np.array_equal(images[0].frames, np.concatenate([part.frames for part in seen]))
    assert not np.array_equal(images[0].frames, video.frames) and images[0].fps == video.fps
    assert not {part.key for part in seen} & {part.key for part in video.parts} and not any(p.keep for p in seen)


def test_limits_of_vllm_cover_videos(loaded, clip, examples):
    _, processor = loaded["qwen3_vl"]
    limits = size_limits([ExampleList(examples[:1], [50])], processor, 10)
    size = {"width": 64, "height": 128}
    assert limits == {
        "max_model_len": 60, "limit_mm_per_prompt": {"image": 0, "video": {"count": 1, "num_frames": 5} | size},
        "media_io_kwargs": {"video": {"num_frames": -1, "fps": 2.0}},
    }  # fmt: skip
    both = [ExampleList(examples, [50, 90, 20])]
    assert size_limits(both, processor, 10)["limit_mm_per_prompt"]["video"] == {
        "count": 2, "num_frames": 7, "width": 96, "height": 96}  # of an image, which is larger
    def episode_limits():  # at most 4 images, none at the start, and 3 videos of at most 9 frames
        return 4, (0, 0), 3, 9

    sizes = size_limits(both, processor, 10, episode_limits)
    assert sizes["limit_mm_per_prompt"]["video"] == {"count": 5, "num_frames": 9, "width": 96, "height": 96}
    plain = [ExampleList(examples[2:], [20])]
    assert size_limits(plain, processor, 10, episode_limits)["limit_mm_per_prompt"]["video"]["count"] == 3
    assert size_limits(plain, processor, 10, lambda: (4, (0, 0), 0, 9))["limit_mm_per_prompt"]["video"] == 0
    one = [ExampleList([row("a", "<video>", [clip(4, 3.0)]), row("b", "<video>", [clip(2, 3.0)])], [50, 30])]
    media = size_limits(one, processor, 10)["media_io_kwargs"]
    assert media == {"video": {"num_frames": -1, "fps": 3.0}}


@pytest.mark.parametrize("server, rows, per_turn, message", [
    ("", [0, 1, 2], 2, None),
    ("vllm", [0, 2], 0, None),
    ("vllm", [0, 1], 0, "3 frame rates, such as .*2.0: 'one', 0.5: 'mixed'.*prepare them at one rate"),
    ("vllm", [2], 1, "servers can only show videos of prompts, but --env has videos_per_turn above 0"),
    ("sglang", [2], 0, None),
    ("sglang", [2, 0], 0, r"the data has videos \(frame rates with a row: {2.0: 'one'}\), but SGLang servers choose"),
    ("sglang", [2], 1, "servers can only show videos of prompts"),
])  # fmt: skip
def test_servers_that_would_show_other_frames_are_refused(server, rows, per_turn, message, examples):
    sets = [ExampleList([examples[i] for i in rows], [50] * len(rows)), ExampleList()]
    env = SimpleNamespace(limits={"videos_per_turn": per_turn})
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_videos(server, sets, env)


# --- engines and the self-test ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_logprobs_equal_the_trainers_with_videos(family, loaded, examples):
    hf, processor = loaded[family]
    policy = M.Policy(hf, processor)
    engine = HFEngine(hf, processor, CPU)
    rollouts = engine.generate(make_prompts(examples, processor), 2, SamplingParams(6, temperature=0.8, seed=3))
    for r in rollouts:
        with torch.no_grad():
            [micro] = Packer(10_000, processor.image_token_id).pack([r])
            trainer = policy(micro, 0.8).logp_K
            plain = policy.unpacked_logprobs(r.prompt, r.response, 0.8)
        torch.testing.assert_close(torch.tensor(r.logprobs), trainer, rtol=0, atol=1e-5)
        torch.testing.assert_close(plain, trainer, rtol=0, atol=1e-5)
    assert len({tuple(r.response) for r in rollouts}) > 3


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_self_test_covers_videos(family, loaded, toys, examples, monkeypatch, ctx):
    processor, load = loaded[family][1], lambda: M.load_hf(str(toys[family])).eval()
    policy, engine = M.Policy(load(), processor), HFEngine(load(), processor, CPU)
    lengths = [len(prompt.token_ids) for prompt in make_prompts(examples, processor)]
    rows, packer = ExampleList(examples, lengths), Packer(2000, processor.image_token_id)
    check = lambda: S.self_test(policy, engine, rows, processor, packer, SamplingParams(16))  # noqa: E731
    assert "self-test: 3 prompts (2 with images or videos) tokenized the same" in check()
    monkeypatch.setattr(engine, "_hidden", swap_frames(engine._hidden))
    with pytest.raises(UserError, match="of engine .* and trainer differ"):
        check()


def swap_frames(hidden):
    """Return an engine's forward pass that sees the frames of each video in reverse."""

    def changed(ids, positions, images, **kwargs):
        swapped = [dataclasses.replace(i, key=f"{i.key} swapped", image=Image.fromarray(np.concatenate(i.frames[::-1])))
                   if i.fps else i for i in images]  # fmt: skip
        return hidden(ids, positions, swapped, **kwargs)

    return changed


# --- episodes and runs ------------------------------------------------------------------------------------------------


def clip_environment(episodes, clip):
    """Return an environment whose observations have up to two images and up to two videos."""

    class Clips(episodes.Scripted):
        videos_per_turn, frames_per_video = 2, 5

        def step(self, response):
            obs = super().step(response)
            videos = [clip(self.rng.randint(1, 5), self.rng.choice([0.7, 2.0, 29.97]), (56, 84), self.rng.randrange(99))
                      for _ in range(self.rng.choice([0, 1, 2]))]  # fmt: skip
            # frames may be PIL images, and videos may come before, between and after images
            videos = [video._replace(frames=list(map(decode_image, video.frames))) for video in videos]
            obs.messages, obs.videos = "<video>".join([obs.messages, "b", "c"][: len(videos) + 1]), videos
            return obs

    return Clips


def play_with_videos(loaded, family, clip, picture, rewrites=False, shown=True, engine=None):
    """Return (episodes of a prompt with two videos and an image, hf, processor). `shown`: in observations too."""
    episodes = pytest.importorskip("test_episodes")
    hf, plain = loaded[family]
    processor = episodes.add_end_tokens(plain)
    if rewrites:
        processor.tokenizer = copy.deepcopy(plain.tokenizer)
        old, new = "part['type'] == 'image' %}<|vision_start|><|image_pad|>", (
            "part['type'] != 'text' %}<|vision_start|><|{{ part['type'] }}_pad|>")
        processor.tokenizer.chat_template = episodes.DROPS_THOUGHTS.replace(old, new)
    fields = {"data_source": "shapes", "ground_truth": "4", "extra": {}, "images": [encode_png(picture(84, 84))]}
    content = {"role": "user", "content": "a<video>b<image>c<video>d"}
    examples = [Example("u2", messages=[content], videos=(clip(5, 2.0), clip(4, 0.7, seed=1)), **fields)]
    factory = episodes.make_factory(clip_environment(episodes, clip) if shown else episodes.Scripted, max_turns=5)
    prompts = make_prompts(examples, processor, reset_fn=factory.reset_example)
    if engine is None:
        engine = HFEngine(hf, processor, CPU)
    else:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        sizes = size_limits([ExampleList(examples, lengths)], processor, 500, factory.episode_limits)
        engine = engine(processor, sizes)
    rollouts = episodes.EpisodeEngine(engine, factory, processor).generate(prompts, 3, SamplingParams(500, seed=1))
    assert {r.ended_by for r in rollouts} == {"done"}, [(r.ended_by, r.failure_line) for r in rollouts]
    assert max(r.n_turns for r in rollouts) > 1
    kinds = {image.kind for r in rollouts for image in r.images}
    assert kinds == ({"image", "video"} if shown else {"image"})
    return rollouts, hf, processor


def assert_trainer_agrees(rollouts, hf, processor, atol=1e-5):
    policy, tokens = M.Policy(hf, processor), make_token_batch(rollouts)
    for micro in Packer(100_000, processor.image_token_id).pack(rollouts):
        with torch.no_grad():
            logp_K = policy(micro).logp_K
        torch.testing.assert_close(logp_K, tokens.rollout_logps[micro.token_index_K], rtol=0, atol=atol)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("rewrites", [False, True])
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in ("qwen2_5_vl", "qwen3_vl") else pytest.mark.slow) for f in FAMILIES])
def test_episodes_with_videos(family, rewrites, shown, loaded, clip, picture):
    """Also in observations, and if the chat template rewrites earlier turns: then each turn is a prompt of its own."""
    rollouts, hf, processor = play_with_videos(loaded, family, clip, picture, rewrites, shown)
    assert any(r.separate_turns for r in rollouts) == rewrites
    assert_trainer_agrees(rollouts, hf, processor)
    if rewrites:
        return
    banned = processor.banned_token_ids(hf.config.text_config.vocab_size)
    for r in rollouts:  # one by one, from all token ids and pixels, with M-RoPE written again
        with torch.no_grad():
            logps = reference_logprobs(hf, processor, r, banned)[torch.tensor(r.response_mask)]
        torch.testing.assert_close(torch.tensor(r.logprobs), logps, rtol=0, atol=1e-5)
        # an engine that expands the placeholders itself gets the same tokens
        *_, ids, images, _ = build_request(r, 1, processor, 10_000)
        text, videos = processor.tokenizer.decode(ids), [image for image in images if image.fps]
        assert text.count("<|video_pad|>") == len(videos) >= 2
        for video in videos:
            text = text.replace("<|video_pad|>", M.video_text(processor, video.patcher.n_frames, video.fps), 1)
        sizes = [part.n_tokens for image in images for part in image.parts]
        pieces = text.split("<|image_pad|>")
        filled = "".join(a + "<|image_pad|>" * n for a, n in zip(pieces, [*sizes, 0], strict=True))
        assert filled == processor.tokenizer.decode(r.prompt.token_ids + r.response)


def animation(n):
    """Return an opened GIF of n frames."""
    first, *others = [Image.new("L", (28, 28), 80 * i) for i in range(n)]
    first.save(file := io.BytesIO(), "GIF", save_all=True, append_images=others)
    return Image.open(file)


@pytest.mark.parametrize("change, message", [
    (lambda clip: {"videos": [clip(2)] * 3}, "step returned 3 videos, more than videos_per_turn = 2"),
    (lambda clip: {"messages": "no <video> but two <video>", "videos": [clip(2)]}, "videos: 1; <video> marks: 2"),
    (lambda clip: {"messages": "<video>"}, "videos: 0; <video> marks: 1"),
    (lambda clip: {"videos": [[encode_png(Image.new("RGB", (28, 28)))]]}, "a video is list; expected an envs.Video"),
    (lambda clip: {"videos": clip(2)}, "videos are Video; expected a list of videos"),
    (lambda clip: {"videos": [Video((), 2.0)]}, "a video has 0 frames; expected 1 to frames_per_video = 5"),
    (lambda clip: {"videos": [clip(6)]}, "a video has 6 frames"),
    (lambda clip: {"videos": [clip(2, 0.0)]}, "fps is 0.0, expected the number of frames per second"),
    (lambda clip: {"videos": [Video(clip(1).frames + clip(1, size=(56, 56)).frames, 1.0)]}, "different sizes"),
    (lambda clip: {"videos": [Video([b"no image"], 1.0)]}, "an image cannot be read"),
    (lambda clip: {"videos": [Video(clip(1).frames[0], 1.0)]}, "the frames of a video are bytes; expected a list"),
    (lambda clip: {"videos": [Video(iter(clip(1).frames), 1.0)]}, "the frames of a video are"),
    (lambda clip: {"videos": [Video(set(clip(2).frames), 1.0)]}, "the frames of a video are set"),
    # by PIL's iterator all frames of an animation are one object, which shows the last one
    (lambda clip: {"videos": [Video(list(ImageSequence.Iterator(animation(3))), 1.0)]}, "an image: 3 frames or pages"),
    (lambda clip: {"videos": [Video([Image.new("1", (30_000, 30_000))], 1.0)]}, "an image: 30000x30000 pixels, but"),
    (lambda clip: {"videos": [Video([Image.new("RGB", (0, 28))], 1.0)]}, "an image: 0x28 pixels: one side"),
])  # fmt: skip
def test_an_invalid_video_in_an_observation_fails_the_episode(change, message, loaded, clip):
    episodes = pytest.importorskip("test_episodes")

    class Wrong(episodes.Scripted):
        videos_per_turn, frames_per_video = 2, 5

        def step(self, response):
            return Observation(**{"messages": "and now?"} | change(clip))

    rollouts, _ = episodes.play(loaded, "qwen2_5_vl", [3], n=1, kind=Wrong)
    assert rollouts[0].ended_by == "error" and message in rollouts[0].failure_line, rollouts[0].failure_line


@pytest.mark.parametrize("content, message", [
    ("no mark", "messages have 0 <video> marks and 0 videos, but a prompt shows exactly the videos of its row"),
    ("<video>", "messages have 1 <video> marks and 0 videos"),
    ([{"type": "video", "video": Video([b"x"], 1.0)}] * 2, "messages have 2 <video> marks and 2 videos"),
])  # fmt: skip
def test_a_prompt_shows_the_videos_of_its_row(content, message, clip):
    episodes = pytest.importorskip("test_episodes")

    class Reset(episodes.Scripted):
        def reset(self, example):
            return [{"role": "user", "content": content}], []

    example = Example("u", "mine", [{"role": "user", "content": "<video><video>"}], [], "1", {}, (clip(2), clip(3)))
    with pytest.raises(UserError, match=message):
        episodes.make_factory(Reset).reset_example(example)


@pytest.mark.parametrize("fps", [2, np.int64(2), np.float32(2)])
def test_a_rate_may_be_any_number(fps, loaded, clip):
    episodes = pytest.importorskip("test_episodes")

    class Shown(episodes.Scripted):
        videos_per_turn = 1

        def step(self, response):
            return Observation("and now?", videos=[clip(2, fps)])

    rollouts, _ = episodes.play(loaded, "qwen2_5_vl", [3], n=1, kind=Shown, max_turns=2)
    assert rollouts[0].ended_by == "max_turns", rollouts[0].failure_line
    assert type(rollouts[0].images[0].fps) is float  # engines write it as JSON


def test_pages_show_videos_of_observations_as_film_strips(loaded, clip, picture, tmp_path):
    rollouts, *_ = play_with_videos(loaded, "qwen2_5_vl", clip, picture)
    for r in rollouts:
        shown = make_sample_record(r, r.rewards)["images"]
        wanted = [(58 * image.patcher.n_frames - 2, 84) if image.fps else image.image.size for image in r.images]
        assert [decode_image(image).size for image in shown] == wanted
    assert sum(m["content"].count("<video>") for r in rollouts for m in r.messages)
    example = rollouts[0].prompt.initial_example
    graded = [(r, {"reward": 0.0}) for r in rollouts]
    page = ReportPage("T", [make_record(0, example, graded, ())], {example.uid: example}, {"n": 1, "reward": 0.0})
    write_pages(tmp_path / "report.html", page)
    html = (tmp_path / "report.html").read_text()
    shown = chain(rollouts[0].prompt.images, *(r.images for r in rollouts))
    videos = [image for image in shown if image.fps]
    for name in {f"video: {video.patcher.n_frames} frames, {video.fps:g} per second" for video in videos}:
        assert f"<span class=note>{name}</span>" in html
    assert html.count("<span class=note>video: ") == len(videos)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_a_run_trains_and_evaluates_on_videos(family, toys, clip, picture, tmp_path):
    def rows(n, seed):
        for i in range(n):
            video = clip(3 + i % 3, 2.0, seed=seed + i)
            yield {
                "data_source": "mine", "prompt": [{"role": "user", "content": f"<image>What of <video>? {i}"}],
                "images": [{"bytes": encode_png(picture(56, 56, seed + i))}],
                "videos": [{"frames": list(video.frames), "fps": video.fps}],
                "reward_model": {"ground_truth": "1"}, "extra_info": {"index": i},
            }  # fmt: skip

    train = pytest.importorskip("test_train")
    data, test = (train.write_parquet(tmp_path / name, rows(n, seed))
                  for name, n, seed in (("train.parquet", 8, 1), ("test.parquet", 4, 100)))  # fmt: skip
    extra = ["--eval-data", test, "--eval-every", 2, "--eval-ablate", "blank", "--steps", 2, "--train-vision", "all",
             "--max-prompt-tokens", 128, "--micro-tokens", 600]  # fmt: skip
    done = train.run([sys.executable, "train.py", *train.flags(toys[family], data, tmp_path / "run", *extra)])
    tokenized = r"self-test: [2-5] prompts \([2-5] with images or videos\) tokenized the same"
    assert re.search(tokenized, done.stdout), done.stdout
    gaps = [row["mismatch/max_abs_logprob_diff/images=2"] for row in train.rows(tmp_path / "run")
            if "mismatch/max_abs_logprob_diff/images=2" in row]  # fmt: skip
    assert len(gaps) == 2 and max(gaps) < 1e-4
