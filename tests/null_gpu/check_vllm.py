"""Start vLLM's engine on the null GPU, sample, sync weights, sleep and wake; print measurements as JSON.

python tests/null_gpu/check_vllm.py MODEL    # a toy of Qwen2.5-VL; environment and PYTHONPATH: see ../test_vllm_cuda.py
"""

import json
import sys
from io import BytesIO

import torch
from null_gpu_values import garbage
from PIL import Image
from test_rollout import example, trainer_logprobs

import model as M
from engines.launch import size_limits
from engines.vllm import VLLMEngine
from engines.vllm_ban import BannedTokensProcessor
from rollout import ExampleList, Rollout, SamplingParams, make_prompts
from tasks.shapes import shapes_rows

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def used_bytes() -> int:
    """Return the bytes in use on the GPU, by any process."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def named_cuda_tensors(hf: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach().to("cuda")) for name, p in hf.named_parameters()]


def find_changed(live: torch.nn.Module, hf: torch.nn.Module) -> list[str]:
    """Return the names of vLLM's parameters that are not equal, bit for bit, to those of transformers' model."""
    expected, wrong = dict(hf.named_parameters()), []
    for name, p in live.named_parameters():
        source = name.replace("language_model.model.", "model.language_model.").replace("visual.", "model.visual.", 1)
        source = source.replace("language_model.lm_head", "lm_head")
        layer, _, kind = source.rpartition(".")
        layer, _, module = layer.rpartition(".")
        sources = [f"{layer}.{part}.{kind}" for part in FUSED[module]] if module in FUSED else [source]
        if not torch.equal(p.cpu(), torch.cat([expected[s].detach() for s in sources])):
            wrong.append(name)
    return wrong


def load_with_noise(path: str, seed: int) -> torch.nn.Module:
    """Return a toy with noise on every parameter, in bfloat16."""
    hf, noise = M.load_hf(path).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in hf.parameters():
            p += 0.02 * torch.randn(p.shape, generator=noise)
    return hf.bfloat16()


def main(path: str) -> None:
    results, processor = {}, M.Processor(path)
    encoded = [image["bytes"] for row in shapes_rows(3, "train", 0) for image in row["images"]]
    images = [Image.open(BytesIO(image)) for image in encoded]
    examples = [example("one", "<image>?", images[:1]), example("none", "Tell me something long and odd.", [])]
    examples.append(example("two", "Compare <image> with <image>.", images[1:3]))
    prompts = make_prompts(examples, processor)
    limits = size_limits([ExampleList(examples, [256])], processor, 128)
    settings = {"enforce_eager": True, "max_num_batched_tokens": 128, "max_num_seqs": 8}
    engine = VLLMEngine(path, processor, torch.device("cuda"), torch.bfloat16, **limits, **settings)
    runner = engine.executor.driver_worker.model_runner
    results["v2"] = [runner.vllm_config.use_v2_model_runner, type(runner).__module__]
    results["device"] = [str(runner.device), torch.cuda.device_count()]
    [ban] = [p for p in runner.sampler.logits_processors if isinstance(p, BannedTokensProcessor)]
    calls, apply = [], ban.apply
    ban.apply = lambda logits, ctx=None: calls.append(logits.shape) or apply(logits, ctx)

    def sample(hf: torch.nn.Module) -> list[Rollout]:
        """Sample twice from each prompt; record the largest difference from the trainer's log-probabilities."""
        rollouts = engine.generate(prompts, 2, SamplingParams(8, seed=1))
        policy = M.Policy(M.load_hf(path).eval(), processor)
        policy.hf.load_state_dict(hf.float().state_dict())
        gaps = [(trainer_logprobs(policy, r) - torch.tensor(r.logprobs)).abs().max().item() for r in rollouts]
        results.setdefault("gaps", []).append(max(gaps))
        hf.bfloat16()
        return [(r.prompt.uid, r.response, len(r.logprobs), r.finish_reason) for r in rollouts]

    first, second = (load_with_noise(path, seed) for seed in (1, 2))
    results["sync"] = engine.load_weights(named_cuda_tensors(first))
    results["differing"] = [len(find_changed(runner.model, first)), len(find_changed(runner.model, second))]
    results["rollouts"] = sample(first)
    results["banned"] = sum(
        len(set(r[1]) & set(processor.banned_token_ids(runner.vocab_size).tolist())) for r in results["rollouts"]
    )
    results["bans"] = len(calls)

    awake = used_bytes()
    engine.sleep()
    results["level 1"] = {"awake": awake, "asleep": used_bytes(), "asleep_bytes": engine.asleep_bytes()}
    results["again"] = sample(first)  # wakes
    results["level 1"] |= {"woken": used_bytes(), "asleep_bytes woken": engine.asleep_bytes()}
    engine.sleep()
    engine.load_weights(named_cuda_tensors(second))
    results["level 1"] |= {"synced": used_bytes(), "differing": len(find_changed(runner.model, second))}
    sample(second)

    engine.sleep_level = 2
    engine.sleep()
    results["level 2"] = {"asleep": used_bytes(), "asleep_bytes": engine.asleep_bytes()}
    engine.wake(["weights"])
    results["level 2"] |= {"lost": len(find_changed(runner.model, second)), "of": len(list(runner.model.parameters()))}
    try:
        engine.load_weights(named_cuda_tensors(first)[1:])
    except ValueError as error:
        results["level 2"]["refused"] = str(error)
    engine.load_weights(named_cuda_tensors(first))
    results["level 2"] |= {"synced": used_bytes(), "differing": len(find_changed(runner.model, first))}
    results["level 2"]["rollouts"] = sample(first)
    results["level 2"]["woken"] = used_bytes()
    results["garbage"] = sorted(garbage)
    print(json.dumps(results))


main(sys.argv[1])
