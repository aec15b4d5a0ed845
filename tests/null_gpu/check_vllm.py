"""Start vLLM's engine on the null GPU, sample, replace its weights, let it sleep; print what happened as JSON.

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
from rollout import ExampleList, Rollout, SamplingParams, make_prompts
from tasks.shapes import shapes_rows

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def used() -> int:
    """Return the bytes in use on the GPU, by any process."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def named(hf: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach().to("cuda")) for name, p in hf.named_parameters()]


def differing(live: torch.nn.Module, hf: torch.nn.Module) -> list[str]:
    """Return the names of vLLM's parameters that are not equal, bit for bit, to those of transformers' model."""
    theirs, wrong = dict(hf.named_parameters()), []
    for name, p in live.named_parameters():
        source = name.replace("language_model.model.", "model.language_model.").replace("visual.", "model.visual.", 1)
        source = source.replace("language_model.lm_head", "lm_head")
        layer, _, kind = source.rpartition(".")
        layer, _, module = layer.rpartition(".")
        sources = [f"{layer}.{part}.{kind}" for part in FUSED[module]] if module in FUSED else [source]
        if not torch.equal(p.cpu(), torch.cat([theirs[s].detach() for s in sources])):
            wrong.append(name)
    return wrong


def perturbed(path: str, seed: int) -> torch.nn.Module:
    """Return a toy with noise on every parameter, in bfloat16."""
    hf, noise = M.load_hf(path).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in hf.parameters():
            p += 0.02 * torch.randn(p.shape, generator=noise)
    return hf.bfloat16()


def main(path: str) -> None:
    found, processor = {}, M.Processor(path)
    encoded = [image["bytes"] for row in shapes_rows(3, "train", 0) for image in row["images"]]
    images = [Image.open(BytesIO(image)) for image in encoded]
    examples = [example("one", "<image>?", images[:1]), example("none", "Tell me something long and odd.", [])]
    examples.append(example("two", "Compare <image> with <image>.", images[1:3]))
    prompts = make_prompts(examples, processor)
    limits = size_limits([ExampleList(examples, [256])], processor, 128)
    settings = {"enforce_eager": True, "max_num_batched_tokens": 128, "max_num_seqs": 8}
    engine = VLLMEngine(path, processor, torch.device("cuda"), torch.bfloat16, **limits, **settings)
    runner = engine.executor.driver_worker.model_runner
    found["v2"] = [runner.vllm_config.use_v2_model_runner, type(runner).__module__]
    found["device"] = [str(runner.device), torch.cuda.device_count()]
    [ban] = [p for p in runner.sampler.logits_processors if type(p).__name__ == "Ban"]
    calls, apply = [], ban.apply
    ban.apply = lambda logits, ctx=None: calls.append(logits.shape) or apply(logits, ctx)

    def sample(hf: torch.nn.Module) -> list[Rollout]:
        """Sample twice from each prompt; record the largest difference from the trainer's log-probabilities."""
        rollouts = engine.generate(prompts, 2, SamplingParams(8, seed=1))
        policy = M.Policy(M.load_hf(path).eval(), processor)
        policy.hf.load_state_dict(hf.float().state_dict())
        gaps = [(trainer_logprobs(policy, r) - torch.tensor(r.logprobs)).abs().max().item() for r in rollouts]
        found.setdefault("gaps", []).append(max(gaps))
        hf.bfloat16()
        return [(r.prompt.uid, r.response, len(r.logprobs), r.finish_reason) for r in rollouts]

    first, second = (perturbed(path, seed) for seed in (1, 2))
    found["sync"] = engine.load_weights(named(first))
    found["differing"] = [len(differing(runner.model, first)), len(differing(runner.model, second))]
    found["rollouts"] = sample(first)
    found["banned"] = sum(
        len(set(r[1]) & set(processor.banned_token_ids(runner.vocab_size).tolist())) for r in found["rollouts"]
    )
    found["bans"] = len(calls)

    awake = used()
    engine.sleep()
    found["level 1"] = {"awake": awake, "asleep": used(), "asleep_bytes": engine.asleep_bytes()}
    found["again"] = sample(first)  # wakes
    found["level 1"] |= {"woken": used(), "asleep_bytes woken": engine.asleep_bytes()}
    engine.sleep()
    engine.load_weights(named(second))
    found["level 1"] |= {"synced": used(), "differing": len(differing(runner.model, second))}
    sample(second)

    engine.sleep_level = 2
    engine.sleep()
    found["level 2"] = {"asleep": used(), "asleep_bytes": engine.asleep_bytes()}
    engine.wake(["weights"])
    found["level 2"] |= {"lost": len(differing(runner.model, second)), "of": len(list(runner.model.parameters()))}
    try:
        engine.load_weights(named(first)[1:])
    except ValueError as error:
        found["level 2"]["refused"] = str(error)
    engine.load_weights(named(first))
    found["level 2"] |= {"synced": used(), "differing": len(differing(runner.model, first))}
    found["level 2"]["rollouts"] = sample(first)
    found["level 2"]["woken"] = used()
    found["garbage"] = sorted(garbage)
    print(json.dumps(found))


main(sys.argv[1])
