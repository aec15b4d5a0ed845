"""Tests of episodes: tokens, positions, images and rewards of turns, through engines, packing and the update."""

import asyncio
import collections
import copy
import itertools
import math
import random
import re
import threading
import time
from unittest.mock import patch

import pytest
import torch
from conftest import wait_until
from PIL import Image

import envs._episodes
import envs._threads
import grpo
import model as M
import rollout
from engines.hf import HFEngine
from envs import Environment, Observation
from envs._episodes import EpisodeEngine
from envs._factory import EnvFactory
from errors import UserError
from packing import Packer, make_token_batch, training_sequences
from prepare_data import Example
from reward import RewardConfig
from rewards.grade import Grader
from rollout import (
    Engine,
    EnvConfig,
    Prompt,
    Rollout,
    SamplingParams,
    TurnSequence,
    add_response,
    assign_rewards,
    make_env_factory,
    make_prompts,
)
from tasks.shapes import encode_png

CPU = torch.device("cpu")
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


def make_factory(kind, **settings):
    """Return the factory of an environment class of this file."""
    with patch("envs._factory.load_class", return_value=kind):
        return EnvFactory(EnvConfig(env="here", **settings))


class Scripted(Environment):
    """An environment with as many turns as the row's ground truth says, and random images in any of them."""

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


def make_examples(turns, n_images=1):
    rng = random.Random(0)
    examples = []
    for i, n in enumerate(turns):
        images = [noise(rng, 56, 84) for _ in range(n_images)]
        fields = {"data_source": "shapes", "ground_truth": str(n), "extra": {}}
        messages = [{"role": "user", "content": "<image>" * n_images + f"What is it? {i}"}]
        examples.append(Example(f"u{i}", messages=messages, images=[encode_png(image) for image in images], **fields))
    return examples


def add_end_tokens(processor):
    """Return a copy of the processor with so many end tokens that a random toy model ends its responses."""
    processor = copy.copy(processor)
    processor.eos_ids = sorted({*processor.eos_ids, *range(0, 256, 6)})
    return processor


def play(loaded, family, turns, n=2, tokens=400, kind=Scripted, n_images=1, engine=None, **settings):
    hf, processor = loaded[family]
    processor = add_end_tokens(processor)
    envs = make_factory(kind, **{"max_turns": 5, **settings})
    prompts = make_prompts(make_examples(turns, n_images), processor, reset_fn=envs.reset_example)
    engine = engine or HFEngine(hf, processor, CPU)
    engine.processor = processor
    return EpisodeEngine(engine, envs, processor).generate(prompts, n, SamplingParams(tokens, seed=1)), processor


def turn_by_turn_logps(hf, processor, r, temperature=1.0):
    """Return the log-probabilities of the sampled tokens from transformers' own forwards: one per turn, with its own
    positions and masks, over everything before it."""
    banned = processor.banned_token_ids(hf.config.text_config.vocab_size)
    out, start = [], len(r.prompt.token_ids)
    whole = r.prompt.token_ids + r.response
    images = r.prompt.images + r.images
    stretches = [(is_sampled, len(list(run))) for is_sampled, run in itertools.groupby(r.response_mask)]
    for is_sampled, length in stretches:
        end = start + length
        if is_sampled:
            ids = torch.tensor([whole[:end]])
            visible, n_image_tokens = [], int((ids == processor.image_token_id).sum())
            for image in images:
                if sum(i.n_tokens for i in visible) < n_image_tokens:
                    visible.append(image)
            inputs = {"mm_token_type_ids": (ids == processor.image_token_id).int()}
            if visible:
                inputs["pixel_values"] = torch.cat([image.pixel_values() for image in visible])
                inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in visible])
            hf.model.rope_deltas = None
            hidden = hf.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs)[0][0]
            logits = hidden[start - 1 : end - 1] @ hf.get_output_embeddings().weight.t() / temperature
            logits = logits.index_fill(1, banned, -torch.inf)
            out.append(logits.log_softmax(-1).gather(1, ids[0, start:end, None])[:, 0])
        start = end
    return torch.cat(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_episodes_equal_turn_by_turn_forwards(family, loaded):
    """Episodes of 1 to 5 turns, with images in any turn, are packed together. Log-probabilities (also the engine's) and
    gradients equal those of one forward per turn."""
    compare_with_turn_by_turn(loaded, family)


def compare_with_turn_by_turn(loaded, family, engine=None, tolerance=1e-5):
    hf, _ = loaded[family]
    rollouts, processor = play(loaded, family, [1, 2, 3, 4, 5, 5], engine=engine)
    assert sorted({r.n_turns for r in rollouts}) == [1, 2, 3, 4, 5] and {r.ended_by for r in rollouts} == {"done"}
    assert sum(len(r.images) for r in rollouts) > 10 and any(0 < len(r.images) < r.n_turns for r in rollouts)
    policy = M.Policy(hf, processor, train_vision="all")
    micros = Packer(100_000, processor.image_token_id).pack(rollouts)
    tokens = make_token_batch(rollouts)
    weights = torch.randn(len(tokens), generator=torch.Generator().manual_seed(0))
    logp_N = torch.zeros(len(tokens))
    policy.zero_grad()
    for micro in micros:
        out = policy(micro)
        logp_N[micro.token_index_K] = out.logp_K.detach()
        (out.logp_K * weights[micro.token_index_K]).sum().backward()
    packed = {name: p.grad.clone() for name, p in hf.named_parameters() if p.grad is not None}
    policy.zero_grad()
    separate = torch.cat([turn_by_turn_logps(hf, processor, r) for r in rollouts])
    (separate * weights).sum().backward()
    gap = (logp_N - separate).detach().abs()
    # packing cuts a recurrence into chunks at other tokens, which rounds differently
    assert gap.mean() < 1e-6 and gap.max() < (1e-5 if family == "qwen3_5" else 2e-6)
    assert (tokens.rollout_logps - separate).abs().max() < tolerance
    norm = math.sqrt(sum((g.double() ** 2).sum() for g in packed.values()))
    for name, p in hf.named_parameters():
        if p.grad is not None:
            assert (p.grad - packed[name]).norm() < 1e-5 * norm, name
    policy.zero_grad(set_to_none=True)


def test_an_episode_is_the_sampled_tokens_and_the_templates_text_between_them(loaded):
    """If text and tokens agree, the whole episode is what the template makes of the conversation."""
    rollouts, processor = play(loaded, "qwen2_5_vl", [2, 3, 4])
    for r in rollouts:
        responses = [m["content"] for m in r.messages if m["role"] == "assistant"]
        assert len(responses) == r.n_turns and responses[-1] == r.text and len(r.messages) == 2 * r.n_turns
        r.messages.pop()  # the last response is in messages only for readers
        written, ids = [], iter(r.response)
        for is_sampled, run in itertools.groupby(r.response_mask):
            stretch = list(itertools.islice(ids, len(list(run))))
            written += ["SAID\n"] if is_sampled else [processor.tokenizer.decode(stretch)]
        expected = processor.apply_chat_template([*r.prompt.example.messages, *replace_responses(r.messages, "SAID\n")])
        expected = expected.split("<|im_start|>assistant\n", 1)[1].replace("SAID\n<|im_end|>", "SAID\n")
        pads = iter([image.n_tokens for image in r.images])
        expected = re.sub(r"<\|image_pad\|>", lambda _, pads=pads: "<|image_pad|>" * next(pads), expected)
        assert "".join(written) == expected.removesuffix("\n<|im_start|>assistant\n")
        assert r.logprobs and len(r.logprobs) == sum(r.response_mask) and len(r.response) == len(r.response_mask)


def replace_responses(messages, text):
    return [m | {"content": text} if m["role"] == "assistant" else m for m in messages]


# --- chat templates that rewrite earlier turns ---

DROPS_THOUGHTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last == false %}{% for part in message['content'] %}"
    "{{ part['text'].split('</think>')[-1].lstrip('\n') }}{% endfor %}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_a_template_that_drops_thoughts_makes_each_turn_a_separate_sequence(loaded):
    hf, plain = loaded["qwen2_5_vl"]
    assert not plain.template_rewrites_history()
    processor = add_end_tokens(plain)
    processor.tokenizer = copy.deepcopy(plain.tokenizer)
    processor.tokenizer.chat_template = DROPS_THOUGHTS
    assert processor.template_rewrites_history()
    envs = make_factory(Scripted, max_turns=5)
    prompts = make_prompts(make_examples([1, 3, 4]), processor, reset_fn=envs.reset_example)
    rollouts = EpisodeEngine(HFEngine(hf, processor, CPU), envs, processor).generate(
        prompts, 2, SamplingParams(400, seed=1)
    )
    assert {r.ended_by for r in rollouts} == {"done"}
    policy = M.Policy(hf, processor)
    tokens = make_token_batch(rollouts)
    logp_N = torch.zeros(len(tokens))
    for micro in Packer(100_000, processor.image_token_id).pack(rollouts):
        logp_N[micro.token_index_K] = policy(micro).logp_K.detach()
    separate = []
    for r in rollouts:
        whole = TurnSequence(r.prompt.token_ids + r.response, len(r.response), len(r.prompt.images))
        turns = r.separate_turns or [whole]  # a single turn has no history
        assert len(turns) == r.n_turns == int(r.prompt.example.ground_truth)
        assert sum(turn.n_sampled for turn in turns) == sum(r.response_mask)
        sampled = [token for token, is_sampled in zip(r.response, r.response_mask, strict=True) if is_sampled]
        for k, turn in enumerate(turns):
            before = [*r.prompt.example.messages, *r.messages[: 2 * k]]
            for i, message in enumerate(before):  # special tokens in responses are text there
                for token in processor.special_tokens_in([message]) if message["role"] == "assistant" else []:
                    before[i] = before[i] | {"content": before[i]["content"].replace(token, f"< {token[1:]}")}
            ids, pads = [], iter((r.prompt.images + r.images)[: turn.n_images])
            for token in processor.tokenize_messages(before):
                ids += [token] * (next(pads).n_tokens if token == processor.image_token_id else 1)
            assert turn.ids == ids + sampled[: turn.n_sampled]
            sampled = sampled[turn.n_sampled :]
            alone = Rollout(r.prompt, 0, turn.ids[len(ids) :], [True] * turn.n_sampled, [], "", "")
            alone.prompt = Prompt("x", ids, (r.prompt.images + r.images)[: turn.n_images], None, [])
            separate.append(turn_by_turn_logps(hf, processor, alone).detach())
    assert (logp_N - torch.cat(separate)).abs().max() < 2e-6
    assert (tokens.rollout_logps - torch.cat(separate)).abs().max() < 1e-5


def test_thoughts_that_the_template_drops_count_towards_the_limit(loaded):
    """The token limit, the length penalty and the constant of --loss-agg const measure a response in the same way."""
    hf, plain = loaded["qwen2_5_vl"]
    processor = add_end_tokens(plain)
    processor.tokenizer = copy.deepcopy(plain.tokenizer)
    processor.tokenizer.chat_template = DROPS_THOUGHTS
    envs = make_factory(Scripted, max_turns=5)
    prompts = make_prompts(make_examples([5, 5, 5]), processor, reset_fn=envs.reset_example)
    ends = collections.Counter()
    for limit in range(40, 120, 16):
        rollouts = EpisodeEngine(HFEngine(hf, processor, CPU), envs, processor).generate(
            prompts, 2, SamplingParams(limit, seed=1)
        )
        assign_rewards(rollouts, [{"reward": 1.0}] * 6, grpo.Algorithm(truncated="penalise"), limit)
        for r in rollouts:
            ends[r.ended_by] += 1
            assert len(r.response) <= limit and r.response_mask[-1]
            assert (r.finish_reason == "length") == (r.ended_by in ("room", "length"))
            assert all(len(turn.ids) <= len(r.prompt.token_ids) + limit for turn in r.separate_turns)
            assert r.rewards["overlong"] > -1 or len(r.response) == limit
            assert len(r.response) == limit or r.ended_by != "length"
    assert min(ends["room"], ends["length"]) > 3


class Replies(Engine):
    """An engine that gives each row its own fixed replies in turn, each with an end token."""

    def __init__(self, processor, replies):
        super().__init__()
        self.processor, self.replies = processor, {uid: list(texts) for uid, texts in replies.items()}

    def sample(self, responses, sampling):
        while not responses.closed:
            for r in responses.poll(0.05):
                text = self.replies[r.prompt.example.uid].pop(0)
                ids = [*self.processor.tokenizer.encode(text), self.processor.eos_ids[0]]
                add_response(r, ids, [-1.0] * len(ids), self.processor, [0] * len(ids))
                responses.mark_sampled(r)


def test_only_the_episodes_that_a_template_rewrites_are_split(loaded):
    """The template leaves two episodes unchanged, one of them with images, and drops a thought of the other after its
    second turn. All are compared with the template's own text of the conversation."""
    _, plain = loaded["qwen2_5_vl"]
    processor = copy.copy(plain)
    processor.tokenizer = copy.deepcopy(plain.tokenizer)
    processor.tokenizer.chat_template = DROPS_THOUGHTS.replace("<think>\n{% endif %}", "{% endif %}")
    envs = make_factory(Scripted, max_turns=5)
    prompts = make_prompts(make_examples([3, 3, 2]), processor, reset_fn=envs.reset_example)
    replies = {"u0": ["one", "two", "three"], "u1": ["one", "<think>\nwhy\n</think>two", "three"], "u2": ["a", "b"]}
    rollouts = EpisodeEngine(Replies(processor, replies), envs, processor).generate(prompts, 1, SamplingParams(400))
    decode = processor.tokenizer.decode
    assert [len(r.separate_turns) for r in rollouts] == [0, 3, 0] and any(r.images for r in rollouts)
    for r in rollouts:
        history = [*r.prompt.example.messages, *r.messages[: 2 * r.n_turns - 2]]
        context = processor.expand_image_tokens(processor.tokenize_messages(history), r.prompt.images + r.images)
        last = processor.tokenizer.encode(replies_of(r)[-1]) + [processor.eos_ids[0]]
        if r.separate_turns:
            whole = r.prompt.token_ids + r.response
            assert r.separate_turns[2].ids == context + last and "why" not in decode(r.separate_turns[2].ids)
            assert [whole[: len(turn.ids)] == turn.ids for turn in r.separate_turns] == [True, True, False]
            assert [turn.n_sampled for turn in r.separate_turns] == [
                len(processor.tokenizer.encode(text)) + 1 for text in replies_of(r)]
        else:
            assert decode(r.prompt.token_ids + r.response) == decode(context + last)
        assert sum(len(turn.trained) for turn in training_sequences(r)) == sum(r.response_mask) == len(r.logprobs)


def replies_of(r):
    return [m["content"] for m in r.messages if m["role"] == "assistant"]


# --- content parts, as in rows of data ---


RED, BLUE = (Image.new("RGB", (56, 56), colour) for colour in ("red", "blue"))


class Parts(Scripted):
    """An environment whose image parts hold their own image or stand for the next image of the list."""

    def reset(self, example):
        self.turn = 0
        return [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Look: "},
                    {"type": "image", "image": RED},
                    {"type": "text", "text": " and? "},
                    {"type": "image"},
                ],
            }
        ], [encode_png(BLUE)]

    def step(self, response):
        self.turn += 1
        return Observation([{"role": "user", "content": [{"type": "image", "image": encode_png(BLUE)},
                                                         {"type": "text", "text": f"turn {self.turn}"}]},
                            {"role": "user", "content": "<image>"}], [RED], done=self.turn == 2)


class Marks(Parts):
    def reset(self, example):
        self.turn = 0
        return "Look: <image> and? <image>", [RED, BLUE]

    def step(self, response):
        self.turn += 1
        messages = [{"role": "user", "content": f"<image>turn {self.turn}"}, {"role": "user", "content": "<image>"}]
        return Observation(messages, [BLUE, RED], done=self.turn == 2)


def test_image_parts_equal_image_marks(loaded):
    (a,), _ = play(loaded, "qwen2_5_vl", [2], n=1, kind=Parts)
    (b,), _ = play(loaded, "qwen2_5_vl", [2], n=1, kind=Marks)
    assert a.ended_by == b.ended_by == "done" and a.n_turns == 2 and len(a.images) == 2
    assert a.prompt.token_ids == b.prompt.token_ids and a.response == b.response and a.messages == b.messages
    both = zip(a.prompt.images + a.images, b.prompt.images + b.images, strict=True)
    assert all(torch.equal(x.pixel_values(), y.pixel_values()) for x, y in both)

    class Path(Parts):
        def step(self, response):
            return Observation([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])

    (r,), _ = play(loaded, "qwen2_5_vl", [2], n=1, kind=Path)
    assert r.ended_by == "error" and "an image is str; expected the bytes of a file, or a PIL Image" in r.failure_line


# --- limits ---


def test_the_token_limit_never_cuts_an_observation(loaded):
    ended = collections.Counter()
    for tokens in range(12, 60, 3):
        rollouts, processor = play(loaded, "qwen2_5_vl", [5, 5, 5], tokens=tokens)
        for r in rollouts:
            ended[r.ended_by] += 1
            assert len(r.response) <= tokens and r.response_mask[-1]
            assert r.finish_reason == ("length" if r.ended_by in ("room", "length") else "stop")
            n_pads = (r.prompt.token_ids + r.response).count(processor.image_token_id)
            assert n_pads == sum(image.n_tokens for image in r.prompt.images + r.images)
            if r.ended_by == "length":
                assert len(r.response) == tokens
        Packer(10_000, processor.image_token_id).pack(rollouts)
    assert ended.keys() == {"room", "length"} and min(ended.values()) > 5
    rollouts, _ = play(loaded, "qwen2_5_vl", [5, 1], max_turns=3)
    assert [(r.n_turns, r.ended_by) for r in rollouts[::2]] == [(3, "max_turns"), (1, "done")]
    assert rollouts[0].turn_rewards == [1 / 8, 2 / 8, 3 / 8]  # the last turn is rewarded too


def test_rewards_of_turns_are_discounted(loaded):
    rollouts, _ = play(loaded, "qwen2_5_vl", [3], n=1, turn_gamma=0.5)
    [r] = rollouts
    assert (
        r.turn_rewards == [1 / 8, 0.5 * 2 / 8, 0.25 * 3 / 8]
        and r.discount == 0.25
        and r.env_rewards == {"reward": 6 / 8}
    )
    fields = {"reward_workers": 0, "reward_errors": "stop"}
    grader = Grader(RewardConfig(**fields), has_environment=True)
    r.prompt.example.extra["answer_type"] = "count"
    r.text = r"\boxed{3}"  # shapes' own reward of this is 1
    [result] = grader.collect([r])
    assert result["reward"] == pytest.approx(0.25 + 1 / 8 + 1 / 8 + 3 / 32)
    assert result["environment"] == pytest.approx(1 / 8 + 1 / 8 + 3 / 32) and result["accuracy"] == 1


def test_gae_skips_observations_and_rewards_each_turn_at_its_end(loaded):
    """The advantages equal those of a loop over single tokens."""
    rollouts, _ = play(loaded, "qwen2_5_vl", [1, 3, 4], turn_gamma=0.9)
    tokens = make_token_batch(rollouts)
    generator = torch.Generator().manual_seed(0)
    tokens.values = torch.randn(len(tokens), generator=generator)
    totals = torch.randn(len(rollouts), generator=generator).double()
    algo = grpo.Algorithm(adv="gae", gamma=0.97, lam=0.8, norm_std="none", critic="head", group_size=2)
    counted = torch.ones(len(rollouts), dtype=torch.bool)
    advantages, returns = grpo.compute_advantages(totals.view(-1, 2), totals.view(-1, 2), tokens, counted, algo, 0.0)
    row = 0
    for r, total in zip(rollouts, totals.tolist(), strict=True):
        rewards, turn = [], 0
        for i, produced in enumerate(r.response_mask):
            if produced:
                ends = i + 1 == len(r.response_mask) or not r.response_mask[i + 1]
                rewards.append(r.turn_rewards[turn] if ends else 0.0)
                turn += ends
        assert turn == len(r.turn_rewards) == r.n_turns
        rewards[-1] += total - sum(r.turn_rewards)
        advantage = 0.0
        for t in reversed(range(len(rewards))):
            value = tokens.values[row + t].item()
            following = tokens.values[row + t + 1].item() if t + 1 < len(rewards) else 0.0
            advantage = rewards[t] + 0.97 * following - value + 0.97 * 0.8 * advantage
            assert advantages[row + t].item() == pytest.approx(advantage, abs=1e-6)
            assert returns[row + t].item() == pytest.approx(advantage + value, abs=1e-6)
        row += len(rewards)
    assert row == len(tokens)


# --- environments that are slow or fail ---


class Slow(Scripted):
    def is_slow(self):
        """Return whether the episode of row u0 must wait."""
        return False

    def step(self, response):
        while self.example.uid == "u0" and self.is_slow():
            time.sleep(0.01)
        return super().step(response)

    def reset(self, example):
        self.example = example
        return super().reset(example)


class SlowAsync(Slow):
    async def step(self, response):
        while self.example.uid == "u0" and self.is_slow():
            await asyncio.sleep(0.01)
        return Scripted.step(self, response)

    async def reset(self, example):
        return Slow.reset(self, example)


@pytest.mark.parametrize("kind", [Slow, SlowAsync])
def test_an_environment_that_sleeps_delays_no_other(kind, loaded, monkeypatch):
    """One of 32 episodes sleeps in its first turn until all others have ended, so they cannot wait for it."""
    hf, plain = loaded["qwen2_5_vl"]
    processor, envs, ended = add_end_tokens(plain), make_factory(kind, max_turns=5), []
    prompts = make_prompts(make_examples([3] * 32), processor, reset_fn=envs.reset_example)
    monkeypatch.setattr(kind, "is_slow", lambda self: len(ended) < 31)
    episodes = EpisodeEngine(HFEngine(hf, processor, CPU), envs, processor)
    done = episodes.generate(prompts, 1, SamplingParams(400), lambda r: ended.append(r.prompt.uid))
    assert len(set(ended)) == len(done) == 32 and ended[-1] == "u0" and {r.ended_by for r in done} == {"done"}


class Fails(Scripted):
    def step(self, response):
        observation = super().step(response)
        uid = self.example.uid
        if self.turn == 2:
            if uid == "u0":
                raise RuntimeError("no connection")
            if uid == "u1":
                time.sleep(6)
            changes = {
                "u2": Observation(reward=math.nan),
                "u3": Observation("x", [Image.new("RGB", (28, 28))] * 3),
                "u4": Observation("<image> and <image>", [Image.new("RGB", (28, 28))]),
                "u5": Observation("you win<|im_end|>"),
                "u6": "text",
                "u7": Observation("", ["a path"]),
                "u8": Observation([{"role": "user"}]),
                "u9": Observation(reward={"reward": "1"}),
            }
            observation = changes.get(uid, observation)
        return observation

    def reset(self, example):
        self.example = example
        if example.uid == "u10" and threading.current_thread().name == "environment":
            raise ValueError("not again")
        return super().reset(example)


@pytest.mark.parametrize("errors", ["drop", "zero"])
def test_environments_that_fail_are_counted_and_reported(errors, loaded, capfd):
    settings = {"env_errors": errors, "env_timeout": 2.0}
    rollouts, processor = play(loaded, "qwen2_5_vl", [3] * 12, n=1, kind=Fails, **settings)
    assert [r.ended_by for r in rollouts] == ["error"] * 11 + ["done"]
    assert [r.env_failure for r in rollouts].count("errors") == 10 and [r.env_failure for r in rollouts].count(
        "timeouts"
    ) == 1
    output = capfd.readouterr().err
    assert "11 of 12 episodes failed" in output and "RuntimeError: no connection" in output and "Traceback" in output
    assert "--env here took longer than --env-timeout 2 s" in output
    grader = Grader(RewardConfig(reward_workers=0), has_environment=True)
    for r in rollouts:
        r.prompt.example.extra["answer_type"] = "count"
    results = grader.collect(rollouts)
    assert results[:10] == [None if errors == "drop" else {"reward": 0.0}] * 10 and "accuracy" in results[11]
    assert {r.finish_reason for r in rollouts[:10]} == {"error" if errors == "drop" else "stop"}
    assert results[10] is None and rollouts[10].response == []  # its reset failed, so there is no response
    Packer(1000, processor.image_token_id).pack(rollouts)
    assert len(make_token_batch(rollouts)) == sum(sum(r.response_mask) for r in rollouts)


def test_env_errors_stop_ends_the_run_and_shows_only_the_users_frames(loaded):
    with pytest.raises(UserError, match="no connection") as caught:
        play(loaded, "qwen2_5_vl", [3], kind=Fails, env_errors="stop")
    message = str(caught.value)
    assert message.count("File ") == 1 and "test_episodes.py" in message and message.count("--env here") == 1


def test_an_image_is_preprocessed_once_for_all_turns_and_samples(loaded, monkeypatch):
    prepared = []
    original = M.Processor.image_to_patches

    def record_key(self, key, image):
        prepared.append(key)
        return original(self, key, image)

    monkeypatch.setattr(M.Processor, "image_to_patches", record_key)
    rollouts, _ = play(loaded, "qwen2_5_vl", [3, 4], n=6)
    shown = [image.key for r in rollouts for image in r.images]
    assert len(shown) > 20 and sorted(prepared) == sorted({*shown, *(r.prompt.images[0].key for r in rollouts)})


@pytest.mark.parametrize(
    "env,settings,message",
    [
        ("nowhere", [], "--env nowhere: no such environment; give one of .*, or FILE.py:CLASS"),
        ("{file}:Nobody", [], "no class Nobody in .*; it has Zoom"),
        ("{file}:Zoom", ["size=3", "colour=red"], "--env-settings: .*colour.*; its settings: size"),
        ("{file}:Zoom", ["size"], "--env-settings size: give KEY=VALUE"),
        ("{file}:step", [], "no class step"),
        (None, ["size=3"], "--env-settings needs --env"),
    ],
)
def test_wrong_env_flags_are_reported_before_a_model_loads(env, settings, message, tmp_path):
    file = tmp_path / "zoom.py"
    file.write_text("class Zoom:\n    def __init__(self, size=1):\n        self.size = size\n"
                    "    def reset(self, example):\n        return example.messages, []\n"
                    "    def step(self, response):\n        return None\n")  # fmt: skip
    with pytest.raises(UserError, match=message):
        make_env_factory(EnvConfig(env=env and env.format(file=file), env_settings=tuple(settings)))


class ReturnsNone(Scripted):
    def step(self, response):
        return None


class Raises(Scripted):
    def step(self, response):
        return self.deeper()

    def deeper(self):
        raise KeyError("\x1b[2J")


class RaisesAsync(Raises):
    async def step(self, response):
        return self.deeper()


@pytest.mark.parametrize("kind", [Raises, RaisesAsync])
def test_a_failure_shows_only_the_users_frames(kind, loaded, capfd):
    """This also holds if every response failed, which ends the run with a one-line error."""
    rollouts, _ = play(loaded, "qwen2_5_vl", [3], kind=kind)
    with pytest.raises(UserError, match=r"all responses of .*: --env here raised KeyError: .*x1b\[2J'; fix this"):
        grade_first_batch(rollouts)
    output = capfd.readouterr().err
    assert output.count("Traceback") == 1 and output.count("  File ") == output.count("test_episodes.py") == 2
    assert "in deeper" in output and "\x1b" not in output


def grade_first_batch(rollouts, *others, grader=None):
    """Grade the first batch of this process as train.py does, with `others` gathered from other processes."""
    grader = grader or Grader(RewardConfig(reward_workers=0), has_environment=True)
    grader.collect(rollouts)
    grader.check_worked(rollouts, lambda mine: [mine, *others])
    return grader


def test_an_environment_that_never_worked_ends_the_run_unless_it_worked_in_another_process(loaded):
    rollouts, _ = play(loaded, "qwen2_5_vl", [3], kind=ReturnsNone)
    never = "such as row 'u0': --env here step returned None; return an envs.Observation; fix this"
    for others in ([], [["theirs"]], [[]]):  # [[]]: an evaluation with fewer rows than processes
        with pytest.raises(UserError, match=never):
            grade_first_batch(rollouts, *others)
    grader = grade_first_batch(rollouts, None)
    assert grader.worked
    grade_first_batch(rollouts, grader=grader)  # later batches may fail


@pytest.mark.parametrize(
    "returned,message",
    [
        (None, r"row 'u0': reset: returned None; expected \(messages, images\)"),
        ("<image>Go.", "returned '<image>Go.'; expected"),
        (("<image>Go.", Image.new("RGB", (28, 28))), "images are Image; expected a list"),
        (("<image>Go.", ["a.png"]), "row 'u0': reset: an image is str"),
        (("Go.", [Image.new("RGB", (28, 28))]), "images: 1; <image> marks: 0; give one mark per image"),
        (([{"role": "user"}], []), "messages are .*; expected text"),
    ],
)
def test_an_invalid_reset_is_reported_with_its_row(returned, message):
    class BadReset(Scripted):
        def reset(self, example):
            return returned

    with pytest.raises(UserError, match=message):
        make_factory(BadReset).reset_example(make_examples([1])[0])


def test_every_environment_is_closed(loaded):
    opened, closed = [], []

    class Tracked(Scripted):
        def __init__(self):
            opened.append(self)

        async def close(self):
            closed.append(self)

    play(loaded, "qwen2_5_vl", [1, 3], kind=Tracked)
    wait_until(lambda: len(closed) == len(opened))
    assert len(opened) == 2 + 4 and {id(env) for env in closed} == {id(env) for env in opened}


def test_blanked_episodes_show_blank_images_in_every_turn(loaded):
    hf, plain = loaded["qwen2_5_vl"]
    processor, envs = add_end_tokens(plain), make_factory(Scripted, max_turns=5)
    prompts = make_prompts(make_examples([4, 4]), processor, blank=True, reset_fn=envs.reset_example)
    rollouts = EpisodeEngine(HFEngine(hf, processor, CPU), envs, processor).generate(prompts, 2, SamplingParams(400))
    images = [image for r in rollouts for image in r.images]
    assert len(images) > 4 and all(image.pixel_values().std() < 1e-6 for image in images)


class Sleeps(Scripted):
    def step(self, response):
        time.sleep(1.0)
        return super().step(response)


def test_hanging_environments_time_out_even_if_they_outnumber_the_threads(loaded, monkeypatch):
    monkeypatch.setattr(envs._episodes, "ENV_POOL", envs._threads.ThreadPool(3))
    monkeypatch.setattr(Sleeps, "step", lambda self, response: time.sleep(30))
    rollouts, _ = play(loaded, "qwen2_5_vl", [3] * 5, kind=Sleeps, env_timeout=0.3)
    with pytest.raises(UserError, match="all responses of the first batch failed, such as .* longer than --env-time"):
        grade_first_batch(rollouts)


def test_an_exit_in_an_async_environment_fails_only_its_episode(loaded):
    class Exits(SlowAsync):
        async def step(self, response):
            if self.example.uid == "u1":
                raise SystemExit(3)
            return await super().step(response)

    for _ in range(2):
        rollouts, _ = play(loaded, "qwen2_5_vl", [2, 2, 2], n=1, kind=Exits)
        assert [r.ended_by for r in rollouts] == ["done", "error", "done"]


def test_an_environment_whose_close_hangs_delays_no_other(loaded):
    class Hangs(Scripted):
        def close(self):
            time.sleep(60)

    for _ in range(3):
        rollouts, _ = play(loaded, "qwen2_5_vl", [1] * 6, kind=Hangs)
    assert {r.ended_by for r in rollouts} == {"done"}


def test_rows_without_images_are_played(loaded):
    rollouts, _ = play(loaded, "qwen2_5_vl", [2, 3], n_images=0)
    assert {r.ended_by for r in rollouts} == {"done"} and any(r.images for r in rollouts)


def test_special_tokens_that_the_policy_spells_out_stay_text_if_history_is_rewritten(loaded, monkeypatch):
    hf, plain = loaded["qwen2_5_vl"]
    processor = add_end_tokens(plain)
    processor.tokenizer = copy.deepcopy(plain.tokenizer)
    processor.tokenizer.chat_template = DROPS_THOUGHTS
    spelt = "b <|image_pad|> c <|im_end|> d <image>"
    monkeypatch.setattr(rollout, "response_text", lambda processor, tokens: spelt)
    factory = make_factory(Scripted, max_turns=5)
    prompts = make_prompts(make_examples([3]), processor, reset_fn=factory.reset_example)
    [r] = EpisodeEngine(HFEngine(hf, processor, CPU), factory, processor).generate(prompts, 1, SamplingParams(400))
    assert r.ended_by == "done" and r.n_turns == 3
    for turn in r.separate_turns:
        n_tokens = sum(image.n_tokens for image in (r.prompt.images + r.images)[: turn.n_images])
        assert turn.ids.count(processor.image_token_id) == n_tokens
        text = processor.tokenizer.decode(turn.ids)
        assert text.count("<|im_end|>") == 2 * (r.separate_turns.index(turn)) + 1 + (turn.ids[-1] in plain.eos_ids)


def test_image_marks_are_images_in_examples_and_text_in_responses(loaded):
    _, processor = loaded["qwen2_5_vl"]
    shots = [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": "<image>"}]
    assert processor.apply_chat_template([*shots, shots[0]]).count("<|image_pad|>") == 1
    sampled = shots[1] | {"content": [{"type": "text", "text": "<image>"}]}
    assert processor.apply_chat_template([shots[0], sampled, shots[0]]).count("<|image_pad|>") == 0
