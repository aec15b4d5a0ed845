"""Videos with vLLM itself on a CPU, compared with HFEngine and the trainer.   make test-vllm"""

import pytest
import torch
from test_servers import Servers
from test_video import assert_trainer_agrees, play_with_videos, row
from test_video import clip as clip
from test_video import examples as examples
from test_vllm import CPU, ENGINES, FAMILIES, RECURRENT, SETTINGS, gaps, named
from test_vllm import experts_first as experts_first
from test_vllm import toys as toys

import model as M
from engines.launch import size_limits
from engines.vllm import VLLMEngine
from errors import UserError
from rollout import ExampleList, SamplingParams, make_prompts

pytestmark = pytest.mark.vllm


def start_for(folder, examples, dtype=torch.float32):
    processor = M.Processor(str(folder))
    lengths = [len(prompt.token_ids) for prompt in make_prompts(examples, processor)]
    sizes = size_limits([ExampleList(examples, lengths)], processor, 16)
    ENGINES.append(VLLMEngine(str(folder), processor, CPU, dtype, **sizes | SETTINGS))
    return ENGINES[-1], processor


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_vl", *RECURRENT])
def test_sampled_logprobs_equal_the_trainers_with_videos(family, toys, examples):  # noqa: F811
    dtype = torch.bfloat16 if family in RECURRENT else torch.float32
    engine, processor = start_for(toys[family], examples, dtype)
    hf = M.load_hf(str(toys[family])).eval()
    engine.load_weights([(name, p.to(dtype)) for name, p in named(hf)])
    prompts = make_prompts(examples, processor)
    for _ in range(2):  # the second time from caches
        rollouts = engine.generate(prompts, 3, SamplingParams(8, temperature=0.8, seed=3))
        worst = max(map(torch.max, gaps(rollouts, hf, processor, 0.8)))
        assert worst <= (1e-2 if family in RECURRENT else 1e-5)
    assert len({tuple(r.response) for r in rollouts}) > 5


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_and_prompt_ids_are_vllms(family, toys, clip, monkeypatch):
    """vLLM's own positions and token ids, also at frame rates at which rounding decides a position."""
    rates = [0.3, 1.0, 7.0, 29.97, 1.1, 0.7, 12.5] if family == "qwen2_5_vl" else [0.3, 29.97]
    rows = [row(f"{fps:g}", "a <video> b <video> c", [clip(9, fps), clip(4, fps)]) for fps in rates]
    engine, processor = start_for(toys[family], rows)
    engine.load_weights(named(M.load_hf(str(toys[family]))))
    model, seen = engine.executor.driver_worker.model_runner.model, []
    original = type(model).get_mrope_input_positions

    def record(self, tokens, features):
        positions, delta = original(self, tokens, features)
        seen.append((positions, delta))
        return positions, delta

    monkeypatch.setattr(type(model), "get_mrope_input_positions", record)
    prompts = make_prompts(rows, processor)
    for prompt in prompts:
        engine.generate([prompt], 1, SamplingParams(2))  # also compares token ids
        got = M.mrope_positions(prompt.token_ids, prompt.images, processor.image_token_id, processor.merge_size)
        [(positions, delta)] = seen
        seen.clear()
        assert torch.equal(got, positions.to(got)) and int(got.max()) + 1 - len(prompt.token_ids) == delta


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_server_sees_every_frame_at_its_time(family, toys, clip, picture, tmp_path):
    """A server gets frames as files, and their rate when it starts: 40 frames, more than vLLM reads by default."""
    rows = [row("long", "<video>?", [clip(40, 0.5, (56, 28))]), row("image", "<image>", [], [picture(84, 84)]),
            row("two", "<video><image><video>", [clip(5, 0.5), clip(2, 0.5)], [picture(84, 84, 1)])]  # fmt: skip
    processor, hf = M.Processor(str(toys[family])), M.load_hf(str(toys[family])).eval()
    prompts = make_prompts(rows, processor)
    sizes = size_limits([ExampleList(rows, [len(p.token_ids) for p in prompts])], processor, 16)
    servers = Servers(toys[family], tmp_path, **sizes).begin(1)
    try:
        servers.wait()
        engine = servers.engine(max_model_len=sizes["max_model_len"])
        engine.load_weights(named(hf))
        for _ in range(2):  # the second time by the names of images and videos in the server's cache
            rollouts = engine.generate(prompts, 3, SamplingParams(8, temperature=0.8, seed=3))
            assert max(map(torch.max, gaps(rollouts, hf, processor, 0.8))) <= 1e-5
        other = make_prompts([row("other", "<video>", [clip(5, 2.0)])], processor)  # not the server's rate
        if family == "qwen3_vl":
            with pytest.raises(UserError, match="'other'.*they differ from token"):  # in the timestamps
                engine.generate(other, 1, SamplingParams(8))
        else:  # in positions, which the self-test notices
            others = engine.generate(other, 1, SamplingParams(8))
            assert max(map(torch.max, gaps(others, hf, processor))) > 1e-4
    finally:
        servers.local.stop()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_observations_may_have_videos(family, toys, clip, picture):  # noqa: F811
    """Each with a frame rate of its own. vLLM expands their placeholders; token ids are compared."""
    hf = M.load_hf(str(toys[family])).eval()

    def start_engine(processor, sizes):
        ENGINES.append(VLLMEngine(str(toys[family]), processor, CPU, torch.float32, **sizes | SETTINGS))
        ENGINES[-1].load_weights(named(hf))
        return ENGINES[-1]

    loaded = {family: (hf, M.Processor(str(toys[family])))}
    rollouts, _, processor = play_with_videos(loaded, family, clip, picture, engine=start_engine)
    assert_trainer_agrees(rollouts, hf, processor)
