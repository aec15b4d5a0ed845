"""The methods of algorithms/ against plain separate forwards written from the papers.   pytest tests/test_methods.py"""

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FAMILIES
from PIL import Image
from test_model import separate_logprobs
from test_train import ROOT, TORCHRUN, rows, run, write_parquet
from test_update import make_policy, parse

import demo
import grpo
import train
from algorithms._views import blank_view, masked_view, noise_levels, noisy_view, view_micro_batch
from algorithms.distill import check_teacher
from algorithms.noisy import noise_level
from errors import UserError
from layers.video import frames_to_patches
from layers.vision import VisionCache, vision_features
from model import Policy, Processor
from packing import FlopCosts, Packer, make_token_batch
from parallel.models import Models
from prepare_data import Example
from report.log import SkippedUpdates
from report.metrics import rollout_metrics
from rollout import GroupPool, Rollout, make_prompts, start_rollouts
from sources.images import encode_png
from tasks.shapes import shapes_rows
from utils import Meter

SEED, STEP = 0, 7  # --seed by default


def example(uid, sizes, picture, seed=0):
    """Return an example with noisy images of these sizes."""
    images = [encode_png(picture(*size, seed=seed + k)) for k, size in enumerate(sizes)]
    return Example(uid, "mine", [{"role": "user", "content": "<image>" * len(sizes) + "What?"}], images, "", {})


@pytest.fixture
def groups(loaded, picture):
    """groups(family) -> rollouts of three prompts with one, two and no images, four of each, with made-up tokens."""

    def make(family="qwen2_5_vl"):
        processor, rng, rollouts = loaded[family][1], random.Random(1), []
        sizes = {"a": [(84, 84)], "b": [(56, 84), (84, 56)], "c": []}
        examples = [example(uid, size, picture, seed=10 * i) for i, (uid, size) in enumerate(sizes.items())]
        for prompt, rewards in zip(make_prompts(examples, processor), [[0, 1, 0.5, 0], [1, 0, 0, 0], [0, 0.2, 1, 1]],
                                   strict=True):  # fmt: skip
            for i, reward in enumerate(rewards):
                response = [rng.randrange(20, 200) for _ in range(rng.randint(1, 9))]
                scored = {"reward": float(reward)}
                rollouts.append(Rollout(prompt, i, response, [True] * len(response), [-6.0] * len(response), "stop",
                                        "", scored))  # fmt: skip
        return rollouts

    return make


def run_phases(cfg, ctx, models, rollouts, processor, update=True):
    """Run phases 3 to 6 of a step; return the batch and the metrics."""
    meter = Meter()
    rollout = replace(cfg.rollout, prompts_per_step=len(rollouts) // cfg.algo.group_size)
    pool = GroupPool(replace(cfg.algo, truncated="keep"), rollout, 0, ctx)
    pool.add(rollouts, [r.rewards for r in rollouts])
    costs = FlopCosts(1.0, 0.1, 1.0, 1.0, 0.0, 0.0, 0)
    batch = train.pack_batch(pool, cfg, Packer(cfg.optim.micro_tokens, processor.image_token_id, costs), ctx, meter)
    train.compute_logprobs_and_values(batch, models, cfg, STEP)
    train.set_advantages(batch, cfg.algo, 0.0, ctx, meter, SEED, STEP)
    if update:
        models.policy.zero_grad()
        train.update_policy(models, batch, cfg, train.TrainState(step=STEP), ctx, meter, SkippedUpdates(Path("-"), ctx))
    return batch, meter.reduce(ctx)


def make_models(path, cfg, **extra):
    policy = make_policy(path, cfg)
    return Models(policy, torch.optim.SGD([{"params": policy.parameters(), "peak": 0.0}], lr=0.0), **extra)


def separate_logps(policy, rollout, images):
    """Return the response's log-probabilities given these images, by transformers' own forward."""
    policy.hf.model.rope_deltas = None  # transformers would reuse those of the previous sequence
    return policy.unpacked_logprobs(replace(rollout.prompt, images=images), rollout.response, 1.0)


def split(batch, column):
    return column.split([sum(r.response_mask) for r in batch.rollouts])


def views_of(rollout, share):
    return [masked_view(image, share, SEED, STEP) for image in rollout.prompt.images]


# --- views ------------------------------------------------------------------------------------------------------------


def test_masked_patches_are_exactly_the_patches_of_the_tower(loaded, picture):
    """A masked patch is the patch of a black image, every other patch is unchanged, and the share is right."""
    for family in ("qwen2_5_vl", "qwen3_vl"):
        processor = loaded[family][1]
        image = processor.image_to_patches("x", picture(320, 256))
        black = processor.image_to_patches("black", Image.new("RGB", image.image.size))
        view = masked_view(image, 0.6, 1, 2)
        is_black = (view.pixel_values() == black.pixel_values()).all(dim=1)
        is_own = (view.pixel_values() == image.pixel_values()).all(dim=1)
        assert (is_black ^ is_own).all() and abs(is_black.double().mean() - 0.6) < 0.1
        assert view.grid_thw == image.grid_thw and view.n_tokens == image.n_tokens
        assert (black.pixel_values() != 0).all()  # zeros would be the mean colour
        assert torch.equal(masked_view(image, 0.0, 1, 2).pixel_values(), image.pixel_values())
        assert torch.equal(masked_view(image, 1.0, 1, 2).pixel_values(), black.pixel_values())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_masked_patches_of_a_video_are_those_of_the_tower_too(family, loaded, picture):
    """They have their place in two frames; if these were masked one by one, only 0.36 of the patches would be black."""
    processor = loaded[family][1]
    frames = [processor.image_to_patches("x", picture(320, 256, seed=i)) for i in range(5)]
    video = frames_to_patches(processor, frames, 2.0)
    black = replace(video, image=Image.new("RGB", video.image.size))
    for own, nothing in ((video, black), *zip(video.slices, black.slices, strict=True)):
        view = masked_view(own, 0.6, 1, 2)
        is_black = (view.pixel_values() == nothing.pixel_values()).all(dim=1)
        is_own = (view.pixel_values() == own.pixel_values()).all(dim=1)
        assert (is_black ^ is_own).all() and abs(is_black.double().mean() - 0.6) < 0.1


def test_a_view_depends_on_its_seed_and_its_image_alone(loaded, picture):
    processor = loaded["qwen2_5_vl"][1]
    image, other = (processor.image_to_patches(key, picture(84, 84)) for key in "ab")
    for make in (lambda x, *seed: masked_view(x, 0.5, *seed), lambda x, *seed: noisy_view(x, 400, *seed)):
        same, again = make(image, 1, 2), make(image, 1, 2)
        assert same.image.tobytes() == again.image.tobytes() and same.key == again.key
        assert len({x.key for x in (image, same, make(image, 1, 3), make(image, 2, 2), make(other, 1, 2))}) == 5
        assert make(image, 1, 3).image.tobytes() != same.image.tobytes() != make(other, 1, 2).image.tobytes()


def test_noise_has_the_strength_of_the_diffusion_step(loaded):
    """Grey pixels far from the ends are not clipped, so mean and standard deviation are those of the formula."""
    processor = loaded["qwen2_5_vl"][1]
    grey = processor.image_to_patches("grey", Image.new("RGB", (336, 336), (128,) * 3))
    remaining = 1.0
    for k in range(300):
        x = -6 + 12 * k / 999
        remaining *= 1 - (1 / (1 + math.exp(-x)) * (0.005 - 1e-5) + 1e-5)
    pixels = np.asarray(noisy_view(grey, 299, 0).image, dtype=np.float64) / 255
    assert noise_levels()[299] == pytest.approx(remaining)
    assert pixels.mean() == pytest.approx(math.sqrt(remaining) * 128 / 255, abs=2e-3)
    assert pixels.std() == pytest.approx(math.sqrt(1 - remaining), rel=2e-2)
    assert noisy_view(grey, 0, 0) is grey and blank_view(grey).image.getcolors() == [(336 * 336, (255, 255, 255))]


def test_a_cache_neither_answers_for_a_view_nor_keeps_it(loaded, picture):
    hf, processor = loaded["qwen2_5_vl"]
    image = processor.image_to_patches("x", picture(84, 84))
    view, cache = masked_view(image, 0.6, 0), VisionCache(1e9)
    with torch.no_grad():
        own, seen = (vision_features(hf, [x], cache)[0] for x in (image, view))
        assert list(cache.entries) == ["x"] and not torch.allclose(own, seen, atol=1e-3)
        torch.testing.assert_close(seen, vision_features(hf, [view])[0])


def test_views_do_not_depend_on_the_micro_batch(groups, loaded):
    processor, rollouts = loaded["qwen2_5_vl"][1], groups()
    pixels = {}
    for budget in (1000, 60):
        micros = Packer(budget, processor.image_token_id).pack(rollouts)
        seen = [view_micro_batch(m, "masked", 0.6, (SEED, STEP)).images for m in micros]
        pixels[budget] = {image.key: image.image.tobytes() for images in seen for image in images}
        assert len(micros) > 1 or budget == 1000
    assert pixels[1000] == pixels[60] and len(pixels[60]) == 3


# --- PAPO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("train_vision", ["none", "all"])
@pytest.mark.parametrize("micro_tokens", [1000, 60])
def test_papo_equals_separate_forwards(kind, train_vision, micro_tokens, groups, toys, ctx):
    """Values and gradients: equation 2 of the paper, from one forward per response with each set of images."""
    cfg = parse(f"--algo papo --entropy-coef 0 --max-gen-batches 1 --micro-tokens {micro_tokens} --train-vision "
                f"{train_vision} --algo-args perception_coef=0.3 perception_kl={kind} --loss-agg seq")
    models = make_models(toys["qwen2_5_vl"], cfg)
    policy, rollouts = models.policy, groups()
    if train_vision == "all":
        policy = models.policy = Policy(policy.hf, Processor(str(toys["qwen2_5_vl"])), "all").train()
        models.optimizer = torch.optim.SGD([{"params": policy.parameters(), "peak": 0.0}], lr=0.0)
    cfg = replace(cfg, optim=replace(cfg.optim, max_grad_norm=1e9))
    batch, m = run_phases(cfg, ctx, models, rollouts, Processor(str(toys["qwen2_5_vl"])))
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    advantages = grpo.group_advantages(torch.tensor([r.rewards["reward"] for r in rollouts]).view(3, 4)).flatten()
    total, differences = 0.0, []
    for r, advantage, views in zip(rollouts, advantages.tolist(), split(batch, batch.tokens.view_logps), strict=True):
        with torch.no_grad():
            masked = separate_logps(policy, r, views_of(r, 0.6))
        torch.testing.assert_close(views, masked, rtol=0, atol=3e-6)
        logps = separate_logps(policy, r, r.prompt.images)
        d = (logps - masked) if r.prompt.images else torch.zeros_like(logps)
        differences += d.tolist() if r.prompt.images else []
        perception = d**2 / 2 if kind == "k2" else torch.exp(-d) - 1 + d
        loss = (-advantage * (logps - logps.detach()).exp() - 0.3 * perception).mean() / len(rollouts)
        loss.backward()
        total += loss.item()
    assert m["loss/policy"] == pytest.approx(total, abs=1e-7)  # the advantages cancel, so a relative error says nothing
    assert m["vision/kl"] == pytest.approx(sum(differences) / len(differences), rel=1e-4)
    compared = 0
    for name, p in policy.named_parameters():
        if p.grad is not None and p.grad.norm() > 1e-6:
            compared += 1
            assert (p.grad - found[name]).norm() <= 1e-4 * p.grad.norm(), name
    assert compared > 20


def test_papo_without_a_mask_or_an_image_adds_nothing(groups, toys, ctx):
    """A mask share of 0 gives a KL and a gradient of 0; rows without images never get the term."""
    processor = Processor(str(toys["qwen2_5_vl"]))
    gradients = []
    for flags in ("", "--algo-args perception_coef=0.5"):
        cfg = parse(f"--micro-tokens 1000 {flags}")
        cfg = replace(cfg, algo=replace(cfg.algo, view_share=0.0))  # a flag has to be above 0
        models = make_models(toys["qwen2_5_vl"], cfg)
        _, m = run_phases(cfg, ctx, models, groups(), processor)
        gradients.append({n: p.grad for n, p in models.policy.named_parameters() if p.grad is not None})
        # the view's pass has no gradients, and may run other kernels
        assert not flags or abs(m["vision/kl"]) < 1e-6 and abs(m["vision/k3"]) < 1e-6
    for name, plain in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], plain, rtol=1e-4, atol=1e-7)
    algo = parse("--algo papo").algo
    tokens = SimpleNamespace(view_logps=torch.tensor([-1.0, -1.0]), n_images=torch.tensor([0.0, 1.0]))
    logps = torch.tensor([-2.0, -2.0], requires_grad=True)
    [method] = algo.methods
    loss = method.token_loss(logps, tokens, algo)
    loss.sum().backward()
    assert loss[0] == 0 and loss[1] == -0.01 * 0.5 and logps.grad.tolist() == [0.0, pytest.approx(0.01)]


def test_papo_trains_groups_with_equal_rewards(groups, toys, ctx):
    rollouts = groups()
    for r in rollouts:
        r.rewards = {"reward": 1.0}
    cfg = parse("--algo-args perception_coef=0.5 --micro-tokens 1000")
    batch, m = run_phases(cfg, ctx, make_models(toys["qwen2_5_vl"], cfg), rollouts, Processor(str(toys["qwen2_5_vl"])))
    assert len(batch.rows(0)) == len(batch.tokens) and m["policy/grad_norm"] > 0


@pytest.mark.parametrize("kind, direction", [("k2", "own"), ("k3", "masked")])
def test_papos_gradient_is_that_of_a_kl_of_distributions(kind, direction):
    """Summed over a vocabulary of 5 tokens with the policy's probabilities, as on policy: k2 has the gradient of
    KL(own || masked), k3 that of KL(masked || own)."""
    generator = torch.Generator().manual_seed(0)
    scores, masked = torch.randn(2, 5, dtype=torch.float64, generator=generator)
    scores.requires_grad_()
    log_q = masked.log_softmax(0)
    log_p = scores.log_softmax(0)
    [sampled] = torch.autograd.grad((log_p.exp().detach() * grpo.kl(log_p, log_q, kind)).sum(), scores)
    log_p = scores.log_softmax(0)
    kl = (log_p.exp() * (log_p - log_q)).sum() if direction == "own" else (log_q.exp() * (log_q - log_p)).sum()
    [exact] = torch.autograd.grad(kl, scores)
    torch.testing.assert_close(sampled, exact)


# --- VPPO and choices of tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_tokens", [1000, 60])
def test_vppo_equals_its_formulas(micro_tokens, groups, toys, ctx):
    flags = f"--algo vppo --entropy-coef 0 --max-gen-batches 1 --micro-tokens {micro_tokens}"
    cfg = parse(flags)
    models, rollouts = make_models(toys["qwen2_5_vl"], cfg), groups()
    batch, _ = run_phases(cfg, ctx, models, rollouts, Processor(str(toys["qwen2_5_vl"])), update=False)
    advantages = grpo.group_advantages(torch.tensor([r.rewards["reward"] for r in rollouts]).view(3, 4)).flatten()
    scores = []
    for r in rollouts:
        if not r.prompt.images:
            scores.append(None)
            continue
        with torch.no_grad():
            own = separate_logps(models.policy, r, r.prompt.images).double().numpy()
            masked = separate_logps(models.policy, r, views_of(r, 0.5)).double().numpy()
        s = np.minimum(np.exp(masked - own) - (masked - own) - 1, 10)
        scores.append(np.where(s < 1e-6, 0, s))
    means = np.array([s.mean() for s in scores if s is not None])
    alphas = []
    for r, advantage, s, found in zip(rollouts, advantages.tolist(), scores, split(batch, batch.tokens.advantages),
                                      strict=True):  # fmt: skip
        if s is None:
            assert found.tolist() == pytest.approx([advantage] * len(r.response))
            continue
        normalised = (means - means.min()) / (means.max() - means.min())
        alpha = 0.9 + 0.1 * (s.mean() - means.min()) / (means.max() - means.min()) / normalised.mean()
        alphas.append(alpha)
        best = sorted(range(len(s)), key=lambda t: (-s[t], t))[: math.ceil(0.4 * len(s))]
        wanted = [alpha * advantage if t in best else 0.0 for t in range(len(s))]
        assert found.tolist() == pytest.approx(wanted, rel=2e-3, abs=1e-6)
    assert sum(alphas) == pytest.approx(len(alphas), rel=1e-5)


def choose(flags, scores, n_images=1.0, gather=None, step=STEP):
    """Return the advantages, all 1 before, of responses with these scores as entropies."""
    algo = parse(f"--algo-args {flags}").algo
    rollouts = [SimpleNamespace(response_mask=[True] * len(s), prompt=SimpleNamespace(uid="u"), sample_index=i)
                for i, s in enumerate(scores)]  # fmt: skip
    entropies = torch.tensor([x for s in scores for x in s])
    index = torch.arange(len(scores)).repeat_interleave(torch.tensor([len(s) for s in scores]))

    class Tokens(SimpleNamespace):
        def __len__(self):
            return len(self.rollout)

    tokens = Tokens(entropies=entropies, rollout=index, n_images=torch.full_like(entropies, n_images))
    info = grpo.StepInfo(SEED, step, gather or (lambda item: [item]))
    batch = SimpleNamespace(rollouts=rollouts, tokens=tokens)
    return grpo.change_advantages(torch.ones(len(entropies), dtype=torch.float64), batch, algo, info)


def test_high_entropy_tokens_are_those_of_all_ranks():
    """arXiv:2506.01939: the fifth of the step's tokens with the highest entropy, here also of another rank."""
    scores = [[0.1, 0.9, 0.3], [0.8, 0.2, math.nan, math.nan]]
    flags = "token_score=entropy token_scope=step token_share=0.2"
    assert choose(flags, scores).tolist()[:5] == [0, 1, 0, 0, 0]
    other = torch.tensor([5.0, 6.0, 7.0, 0.85, 0.5], dtype=torch.float64)

    def gather(item):  # sums are lists of numbers, scores are tensors
        return [item, other] if torch.is_tensor(item) else [item, [5.0]]

    found = choose(flags.replace("0.2", "0.5"), scores, gather=gather)
    assert found.tolist()[:5] == [0, 1, 0, 0, 0]  # 5 of 10: 5, 6, 7, 0.9, 0.85
    assert choose(flags.replace("step", "response"), scores[:1]).tolist() == [0, 1, 0]


def test_random_tokens_are_a_share_of_each_response_and_repeatable():
    scores = [[0.0] * 50, [0.0] * 10]
    flags = "token_score=random token_share=0.4"
    first, second = choose(flags, scores), choose(flags, scores)
    assert first[:50].sum() == 20 and first[50:].sum() == 4 and torch.equal(first, second)
    assert not torch.equal(first, choose(flags, scores, step=STEP + 1))


# --- NoisyRollout -----------------------------------------------------------------------------------------------------


def test_the_noise_falls_as_in_the_paper():
    """Levels computed from the authors' schedule for 60 steps: a switch, not a slow decay."""
    algo = parse("--algo noisy").algo
    levels = {t: noise_level(algo, t - 1, 60) for t in (1, 30, 40, 45, 50)}
    assert levels == {1: 499, 30: 496, 40: 250, 45: 37, 50: 3}


def test_noised_samples_are_trained_with_the_images_themselves(loaded, picture, ctx):
    cfg = parse("--algo noisy --rollout hf")
    prompts = make_prompts([example("a", [(84, 84)], picture), example("b", [], picture)], loaded["qwen2_5_vl"][1])
    changed = grpo.change_prompts(prompts, cfg.algo, SEED, 0, 60)
    rollouts = start_rollouts(changed, 4)
    assert [bool(r.prompt.view_of) for r in rollouts] == [False, False, True, True] + [False] * 4
    [own], [noised] = rollouts[0].prompt.images, rollouts[3].prompt.images
    assert own is prompts[0].images[0] and noised.key != own.key and noised.image.size == own.image.size
    assert rollouts[2].prompt is rollouts[3].prompt and rollouts[2].prompt.token_ids == prompts[0].token_ids
    for r in rollouts:
        r.response, r.response_mask, r.logprobs = [30, 31], [True, True], [-1.0, -2.0]
        r.rewards = {"reward": float(r.sample_index == 0), "accuracy": float(r.sample_index < 3)}
    pool = GroupPool(cfg.algo, replace(cfg.rollout, prompts_per_step=2), 0, ctx)
    pool.add(rollouts, [r.rewards for r in rollouts])
    assert [r.noised for r in rollouts] == [False, False, True, True] + [False] * 4
    assert all(r.prompt.images == [own] for r in rollouts[:4])
    assert all(map(math.isnan, rollouts[2].logprobs)) and rollouts[1].logprobs == [-1.0, -2.0]
    assert len({id(r.prompt) for r in rollouts[:4]}) == 1 and rollouts[0].prompt.noised is None
    m = rollout_metrics(pool, {})
    assert m["noisy/accuracy_own"] == 1.0 and m["noisy/accuracy_noised"] == 0.5
    assert pool.mean_accuracy["a"] == 1.0  # of the samples that saw the image


def test_noised_samples_run_through_a_step(groups, toys, ctx):
    """The mismatch is that of the other samples, and gradients do not depend on the noise."""
    cfg, processor = parse("--algo noisy --micro-tokens 1000"), Processor(str(toys["qwen2_5_vl"]))
    results = []
    for noised in (False, True):
        rollouts = groups()
        if noised:
            changed = grpo.change_prompts([r.prompt for r in rollouts[::4]], cfg.algo, SEED, 0, 60)
            for r, planned in zip(rollouts, start_rollouts(changed, 4), strict=True):
                r.prompt = planned.prompt
        models = make_models(toys["qwen2_5_vl"], cfg)
        _, m = run_phases(cfg, ctx, models, rollouts, processor)
        results.append(({n: p.grad for n, p in models.policy.named_parameters() if p.grad is not None}, m))
    (own, own_m), (noised, noised_m) = results
    assert all(torch.equal(own[name], noised[name]) for name in own)
    assert math.isfinite(noised_m["mismatch/kl"]) and noised_m["mismatch/kl"] != own_m["mismatch/kl"]


# --- on-policy distillation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adv", ["none", "grpo"])
def test_distillation_equals_separate_forwards(adv, groups, toys, ctx, tmp_path):
    cfg = parse(f"--algo opd --adv {adv} --teacher t --micro-tokens 60 --algo-args distill_coef=0.7")
    processor = Processor(str(toys["qwen2_5_vl"]))
    teacher = make_policy(toys["qwen2_5_vl"], cfg).requires_grad_(False)
    with torch.no_grad():
        for p in teacher.parameters():
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    models, rollouts = make_models(toys["qwen2_5_vl"], cfg, teacher=teacher), groups()
    batch, m = run_phases(cfg, ctx, models, rollouts, processor)
    task = grpo.group_advantages(torch.tensor([r.rewards["reward"] for r in rollouts]).view(3, 4)).flatten()
    for r, advantage, found in zip(rollouts, task.tolist(), split(batch, batch.tokens.advantages), strict=True):
        with torch.no_grad():
            ratio = separate_logps(teacher, r, r.prompt.images) - separate_logps(models.policy, r, r.prompt.images)
        wanted = 0.7 * ratio + (advantage if adv == "grpo" else 0.0)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    log_ratios = batch.tokens.old_logps - batch.tokens.teacher_logps
    trained = batch.tokens.weights.gt(0) & ~log_ratios.isnan()
    assert m["policy/kl_teacher"] == pytest.approx(log_ratios[trained].mean().item(), rel=1e-5)
    assert m["policy/grad_norm"] > 0


def test_a_teacher_equal_to_the_student_teaches_nothing(groups, toys, ctx):
    cfg = parse("--algo opd --teacher t --micro-tokens 1000")
    models = make_models(toys["qwen2_5_vl"], cfg)
    models.teacher = models.policy
    batch, _ = run_phases(cfg, ctx, models, groups(), Processor(str(toys["qwen2_5_vl"])))
    assert (batch.tokens.advantages == 0).all()


def test_a_teacher_with_other_tokens_or_patches_is_refused(toys):
    processor = Processor(str(toys["qwen2_5_vl"]))
    check_teacher("t", "m", processor, Processor(str(toys["qwen2_5_vl"])))
    with pytest.raises(UserError, match="--teacher t: differs from --model m in its patches, positions in videos; "):
        check_teacher("t", "m", processor, Processor(str(toys["qwen3_vl"])))
    other = Processor(str(toys["qwen2_5_vl"]))
    other.tokenizer.chat_template = "x"
    with pytest.raises(UserError, match="chat template"):
        check_teacher("t", "m", processor, other)


@pytest.mark.parametrize("flags", ["--algo opd --teacher t", "--algo vppo --max-gen-batches 1",
                                   "--algo papo --max-gen-batches 1",
                                   "--algo-args token_share=0.2 token_score=entropy token_scope=step"])  # fmt: skip
def test_a_step_in_which_nothing_is_packed_makes_an_empty_update(flags, groups, toys, ctx):
    cfg, rollouts = parse(f"{flags} --truncated mask --micro-tokens 1000"), groups()
    for r in rollouts:
        r.finish_reason = "length"
    models = make_models(toys["qwen2_5_vl"], cfg, teacher=make_policy(toys["qwen2_5_vl"], cfg))
    batch, m = run_phases(cfg, ctx, models, rollouts, Processor(str(toys["qwen2_5_vl"])))
    assert not len(batch.rows(0)) and not m.get("policy/grad_norm")


def test_methods_that_replace_advantages_come_before_those_that_add_to_them(groups, toys, ctx):
    found, policies = {}, [make_policy(toys["qwen2_5_vl"], parse("")) for _ in range(2)]
    with torch.no_grad():
        for p in policies[1].parameters():
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    for more in ("", "--teacher t", "token_score=entropy token_scope=step token_share=0.3"):
        cfg = parse(f"--micro-tokens 1000 --algo-args reward_weights=reward=1 {more}")
        models = make_models(toys["qwen2_5_vl"], cfg, teacher=policies[1])
        batch, _ = run_phases(cfg, ctx, models, groups(), Processor(str(toys["qwen2_5_vl"])))
        found[more] = batch
    plain, taught, clipped = (batch.tokens.advantages for batch in found.values())
    tokens = found["--teacher t"].tokens
    torch.testing.assert_close(taught - plain, tokens.teacher_logps - tokens.old_logps, rtol=1e-4, atol=1e-5)
    assert (clipped == 0).sum() > (plain == 0).sum() and (clipped != 0).any()
    assert ((clipped == plain) | (clipped == 0)).all()


def test_a_teacher_whose_log_probabilities_are_not_finite_is_an_error(groups, toys, ctx):
    cfg = parse("--algo opd --teacher t --micro-tokens 1000")
    teacher = make_policy(toys["qwen2_5_vl"], cfg).requires_grad_(False)
    with torch.no_grad():
        teacher.hf.lm_head.weight[7] = torch.nan
    models = make_models(toys["qwen2_5_vl"], cfg, teacher=teacher)
    with pytest.raises(UserError, match="--teacher t: its log-probabilities are not finite"):
        run_phases(cfg, ctx, models, groups(), Processor(str(toys["qwen2_5_vl"])))


def test_papos_k3_has_a_finite_gradient_far_from_the_view():
    algo = parse("--algo papo --algo-args perception_kl=k3").algo
    logps = torch.tensor([-1.0, -200.0], requires_grad=True)
    tokens = SimpleNamespace(view_logps=torch.tensor([-1.5, -1.0]), n_images=torch.ones(2))
    algo.methods[0].token_loss(logps, tokens, algo).sum().backward()
    assert logps.grad[1] == 0 and logps.grad[0] != 0 and logps.grad.isfinite().all()


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, message", [
    ("--algo noisy --algo-args tis_cap=2", "noise_level=500.0 cannot be combined with tis_cap"),
    ("--algo noisy --algo-args old_policy=rollout", "tis_cap, ratio_mask or old_policy=rollout"),
    ("--algo noisy --algo-args noise_samples=0.1", "rounds to 0 noised samples; raise it"),
    ("--algo vppo --loss gspo --clip-high 3e-4", "--loss gspo couples them"),
    ("--algo vppo --algo-args old_policy=rollout", "use old_policy=trainer"),
    ("--algo papo --algo-args old_policy=rollout", "use old_policy=trainer"),
    ("--algo opd --teacher t --kl-coef 5 --algo-args kl_in=reward", "--adv none ignores rewards; use kl_in=loss"),
    ("--algo noisy --algo-args noise_level=0.5", "noise_level=0.5 counts diffusion steps, of 1000; use 500"),
    ("--algo-args perception_coef=0.02 view_share=0", "view_share=0.0: must be above 0"),
    ("--algo gspo --teacher t", "--teacher t: each token gets an advantage of its own, but --loss gspo couples"),
    ("--algo opd", "--adv none, which --algo opd sets, gives no training signal by itself; add --teacher MODEL"),
    ("--teacher t --algo-args old_policy=rollout", "use --algo-args old_policy=trainer"),
    ("--algo-args vision_kl=yes", "vision_kl=None: must be of type bool"),
])  # fmt: skip
def test_combinations_that_undo_a_method_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        parse(flags).algo.check()


def test_without_methods_the_algorithm_needs_no_further_pass():
    algo = parse("").algo
    assert algo.methods == [] and not algo.needs_forward and not algo.needs_old_logps
    assert [len(parse(f"--algo {name}").algo.methods) for name in ("papo", "vppo", "noisy")] == [1, 1, 1]
    assert parse("--algo-args vision_kl=true").algo.reads("view_logps")


# --- all families, episodes, several processes ------------------------------------------------------------------------


def column_of_view(policy, processor, rollouts, budget, share=0.6):
    """Return the log-probabilities given masked images of each rollout, from packed micro-batches."""
    tokens = make_token_batch(rollouts)
    with torch.no_grad():
        for micro in Packer(budget, processor.image_token_id).pack(rollouts):
            view = view_micro_batch(micro, "masked", share, (SEED, STEP))
            tokens.fill(micro.token_index_K, view_logps=policy(view).logp_K)
    return tokens.view_logps.split([sum(r.response_mask) for r in rollouts])


@pytest.mark.parametrize("family", FAMILIES)
def test_views_in_all_families_and_in_later_turns(family, loaded, groups, picture):
    """Images of observations get their view too, and each family's deep features are those of the view."""
    hf, processor = loaded[family]
    policy, rollouts = Policy(hf, processor), groups(family)
    later = processor.image_to_patches("later", picture(84, 56, seed=99))
    for r in rollouts[:2]:  # an observation with an image, then a second response
        seen = processor.expand_image_tokens(processor.tokenize_observation([{"role": "user", "content": "<image>"}]),
                                             [later])  # fmt: skip
        r.response, r.images = r.response + seen + [40, 41], [later]
        r.response_mask += [False] * len(seen) + [True, True]
    for r, found in zip(rollouts, column_of_view(policy, processor, rollouts, 300), strict=True):
        images = [masked_view(image, 0.6, SEED, STEP) for image in r.prompt.images + r.images]
        prompt = SimpleNamespace(token_ids=r.prompt.token_ids, images=images)
        stand_in = SimpleNamespace(prompt=prompt, response=r.response, response_mask=r.response_mask)
        with torch.no_grad():
            want = separate_logprobs(hf, processor, stand_in, policy.banned)
        torch.testing.assert_close(found, want, rtol=0, atol=4e-6)


@pytest.mark.slow
@pytest.mark.parametrize("algo", [
    "papo --max-gen-batches 1", "vppo --max-gen-batches 1", "noisy", "opd --teacher {teacher}",
    "grpo --algo-args reward_weights=accuracy=1,format=0.5",
    "vppo --max-gen-batches 1 --algo-args token_score=entropy token_scope=step",
    "papo --max-gen-batches 1 --lora-rank 4",
])  # fmt: skip
def test_two_processes_train_as_one(algo, toys, tmp_path):
    """A step has the same loss and gradient on one and on two processes, and with other micro-batches."""
    demo.make_model(tmp_path / "teacher", "qwen2_5_vl", seed=5, hidden=64, layers=2, vocab=448)
    data, results = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0)), []
    for processes, micro_tokens in ((1, 1000), (1, 90), (2, 1000)):
        out = tmp_path / f"{processes}_{micro_tokens}"
        command = [*TORCHRUN, processes, "train.py", "--model", toys["qwen2_5_vl"], "--data", data, "--out", out,
                   "--steps", 2, "--prompts-per-step", 4, "--group-size", 4, "--max-new-tokens", 6, "--lr", 1e-3,
                   "--no-self-test",
                   "--micro-tokens", micro_tokens, "--reward", f"{ROOT}/tests/length_reward.py:score", "--algo",
                   *algo.format(teacher=tmp_path / "teacher").split()]  # fmt: skip
        run(command)
        results.append([row for row in rows(out) if row["step"] > 0])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert one["policy/grad_norm"] > 0
            for name in ("policy/grad_norm", "reward/mean", "policy/entropy"):
                assert two[name] == pytest.approx(one[name], rel=2e-4), name
            assert two["loss/policy"] == pytest.approx(one["loss/policy"], abs=2e-5)
