"""Episodes: tokens, positions, images and rewards of turns, over engines, packing and the update."""

import copy
import itertools
import math
import random

import pytest
import torch
from PIL import Image

import model as M
from engines.hf import HFEngine
from envs._play import Environments, Episodes
from packing import Packer, token_batch
from prepare_data import Example
from rollout import EnvConfig, Environment, Observation, Sampling, make_prompts
from tasks.shapes import png

CPU = torch.device("cpu")
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")


def environments(kind, **settings):
    """Environments of a class of this file."""
    made = object.__new__(Environments)
    cfg = EnvConfig(env="here", **settings)
    most = kind.images_per_turn
    vars(made).update(cfg=cfg, told="--env here", make=kind, images_per_turn=most, quick=True, told_kinds=set())
    return made


class Scripted(Environment):
    """By the first character of a row's truth: how many turns; images in any of them."""

    images_per_turn = 2

    def reset(self, example):
        self.turns, self.rng, self.turn = int(example.ground_truth), random.Random(example.uid), 0
        return example.messages, example.images

    def step(self, response):
        self.turn += 1
        n_images = self.rng.choice([0, 1, 2])
        images = [noise(self.rng, 28 * self.rng.randint(1, 3), 28 * self.rng.randint(1, 3)) for _ in range(n_images)]
        text = "<image>".join(["see"] + [f"this {self.rng.randint(0, 99)}"] * n_images)
        return Observation(text, images, reward=self.turn / 8, done=self.turn == self.turns)


def noise(rng, width, height):
    return Image.frombytes("RGB", (width, height), bytes(rng.randrange(256) for _ in range(3 * width * height)))


def examples_of(turns, n_images=1):
    rng = random.Random(0)
    made = []
    for i, n in enumerate(turns):
        images = [noise(rng, 56, 84) for _ in range(n_images)]
        fields = {"data_source": "shapes", "ground_truth": str(n), "extra": {}}
        messages = [{"role": "user", "content": "<image>" * n_images + f"What is it? {i}"}]
        made.append(Example(f"u{i}", messages=messages, images=[png(image) for image in images], **fields))
    return made


def often(processor):
    """A processor with so many end tokens that a random toy ends its responses."""
    processor = copy.copy(processor)
    processor.eos_ids = sorted({*processor.eos_ids, *range(0, 256, 6)})
    return processor


def play(loaded, family, turns, n=2, tokens=400, kind=Scripted, n_images=1, **settings):
    hf, processor = loaded[family]
    processor = often(processor)
    envs = environments(kind, **{"max_turns": 5, **settings})
    prompts = make_prompts(examples_of(turns, n_images), processor, opened=envs.opened)
    engine = HFEngine(hf, processor, CPU)
    return Episodes(engine, envs, processor).generate(prompts, n, Sampling(tokens, seed=1)), processor


def turn_by_turn(hf, processor, r, temperature=1.0):
    """Log-probabilities of what the policy produced by transformers' own forwards, one for each turn, with its own
    positions and masks, over all that came before."""
    banned = processor.banned(hf.config.text_config.vocab_size)
    out, start = [], len(r.prompt.token_ids)
    whole = r.prompt.token_ids + r.response
    images = r.prompt.images + r.images
    stretches = [(produced, len(list(of))) for produced, of in itertools.groupby(r.response_mask)]
    for produced, length in stretches:
        end = start + length
        if produced:
            ids = torch.tensor([whole[:end]])
            taken, n_image_tokens = [], int((ids == processor.image_token_id).sum())
            for image in images:
                if sum(i.n_tokens for i in taken) < n_image_tokens:
                    taken.append(image)
            more = {"mm_token_type_ids": (ids == processor.image_token_id).int()}
            if taken:
                more["pixel_values"] = torch.cat([image.pixel_values for image in taken])
                more["image_grid_thw"] = torch.tensor([image.grid_thw for image in taken])
            hf.model.rope_deltas = None
            hidden = hf.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more)[0][0]
            logits = hidden[start - 1 : end - 1] @ hf.get_output_embeddings().weight.t() / temperature
            logits = logits.index_fill(1, banned, -torch.inf)
            out.append(logits.log_softmax(-1).gather(1, ids[0, start:end, None])[:, 0])
        start = end
    return torch.cat(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_episodes_are_turn_by_turn_forwards(family, loaded):
    """Of 1 to 5 turns with images in any of them, packed together; values, the engine's values, and gradients."""
    hf, _ = loaded[family]
    rollouts, processor = play(loaded, family, [1, 2, 3, 4, 5, 5])
    assert sorted({r.turns for r in rollouts}) == [1, 2, 3, 4, 5] and {r.ended_by for r in rollouts} == {"done"}
    assert sum(len(r.images) for r in rollouts) > 10 and any(0 < len(r.images) < r.turns for r in rollouts)
    policy = M.Policy(hf, processor, train_vision="all")
    micros = Packer(100_000, processor.image_token_id).pack(rollouts)
    tokens = token_batch(rollouts)
    weights = torch.randn(len(tokens), generator=torch.Generator().manual_seed(0))
    logp_N = torch.zeros(len(tokens))
    policy.zero_grad()
    for micro in micros:
        out = policy(micro)
        logp_N[micro.token_index_K] = out.logp_K.detach()
        (out.logp_K * weights[micro.token_index_K]).sum().backward()
    packed = {name: p.grad.clone() for name, p in hf.named_parameters() if p.grad is not None}
    policy.zero_grad()
    separate = torch.cat([turn_by_turn(hf, processor, r) for r in rollouts])
    (separate * weights).sum().backward()
    print("MAX", family, (logp_N - separate).abs().max(), (logp_N - separate).abs().mean(), (tokens.rollout_logps - separate).abs().max())
    assert (logp_N - separate).abs().max() < 2e-6 * 5
    assert (tokens.rollout_logps - separate).abs().max() < 1e-5
    norm = math.sqrt(sum((g.double() ** 2).sum() for g in packed.values()))
    for name, p in hf.named_parameters():
        if p.grad is not None:
            assert (p.grad - packed[name]).norm() < 1e-5 * norm, name
    policy.zero_grad(set_to_none=True)
