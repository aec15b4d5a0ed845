"""--compile, and the weights that a single shard keeps gathered.   pytest tests/test_compile.py"""

import copy

import pytest
import torch
import torch.distributed as dist
from parity_worker import make_prompts, make_rollouts
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

import train
from engines.self_test import with_rounding_noise
from errors import UserError
from layers.attention import compile_blocks
from layers.lora import LoraConfig, add_lora, find_lora_layers
from model import Policy, load_hf
from packing import Packer
from parallel.sharding import ParallelConfig, apply_fsdp, reshard
from utils import setup_distributed


def micro_of(n: int, processor, max_tokens: int = 10**6):
    """Return the micro-batch of n prompts with images, with 3 responses each."""
    rollouts = make_rollouts(make_prompts([f"p{i}" for i in range(n)], processor), 3)
    [micro] = Packer(max_tokens, processor.image_token_id).pack(rollouts)
    return micro


def blocks_of(hf):
    return hf.get_submodule(f"{hf.family.language}.{hf.family.blocks}")


@pytest.mark.slow
@pytest.mark.parametrize("family,lora", [("qwen2_5_vl", False), ("qwen2_5_vl", True), ("qwen3_vl_moe", False),
                                         ("qwen3_5", False)])
def test_compiled_blocks_give_the_same_values_with_one_graph_for_all_lengths(family, lora, toys, loaded):
    processor, results, graphs = loaded[family][1], [], []
    plain = load_hf(str(toys[family]))
    if lora:
        add_lora(plain, LoraConfig(4, 8.0))
        for name, parameter in plain.named_parameters():
            if "lora_B" in name or "lora_b" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    compiled = copy.deepcopy(plain)
    compile_blocks(blocks_of(compiled))
    torch._dynamo.reset()
    counters.clear()
    for hf in (plain, compiled):
        policy, values = Policy(hf, processor).train(), []
        for n in (3, 2, 4, 1):
            micro = micro_of(n, processor)
            out = policy(micro)
            (out.logp_K.mean() + out.entropy_K.mean()).backward()
            with torch.no_grad():
                values += [out.logp_K.detach(), out.entropy_K.detach(), policy(micro).logp_K]
            graphs.append(counters["stats"]["unique_graphs"])
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        results.append((torch.cat(values), gradient))
    (want, want_gradient), (got, got_gradient) = results
    assert (got - want).abs().max() < 1e-5 and (got_gradient - want_gradient).norm() < 1e-5 * want_gradient.norm()
    assert graphs[3] == 0 < graphs[4], "the plain model was compiled, or the other was not"
    # with and without gradients, and for the first block again if its input has none; not for each block or length
    assert graphs[7] == graphs[4] <= 12


def test_compile_is_refused_with_code_that_differs_from_block_to_block(toys):
    def check(family: str, *flags: str, world: int = 2) -> None:
        base = ["--model", str(toys[family]), "--data", "-", "--out", "-", "--steps", "1", "--compile"]
        train.check_config(train.parse_args([*base, *flags]), world)

    check("qwen3_vl_moe")
    with pytest.raises(UserError, match="--tp 2 --compile: each block would be compiled separately"):
        check("qwen3_vl_moe", "--tp", "2")
    with pytest.raises(UserError, match="--replay-experts --compile: each block would be compiled separately"):
        check("qwen3_vl_moe", "--replay-experts", "--rollout", "hf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a CPU")
def test_compile_on_a_cpu_needs_a_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="--compile: there is no C.. compiler"):
        ParallelConfig().check(1, None, compiled=True)
    ParallelConfig().check(1, None)


def test_the_self_test_does_not_use_compiled_blocks_for_its_rounding_noise(toys, loaded):
    """A compiled block does not call hooks that its layers got after it was compiled."""
    processor = loaded["qwen2_5_vl"][1]
    policy = Policy(add_lora(load_hf(str(toys["qwen2_5_vl"])), LoraConfig(4, 8.0)), processor)
    compiled = [lambda *_, **__: pytest.fail("a compiled block was called") for _ in blocks_of(policy.hf)]
    for block, forward in zip(blocks_of(policy.hf), compiled, strict=True):
        block.forward = forward
    called = []
    with torch.no_grad(), with_rounding_noise(policy):
        for layer in find_lora_layers(policy.hf).values():
            layer.register_forward_hook(lambda *_: called.append(1))
        policy(micro_of(1, processor))
    assert len(called) == len(find_lora_layers(policy.hf))
    assert [block.forward for block in blocks_of(policy.hf)] == compiled


@pytest.mark.parametrize("saved_by", ["", "checkpointing", "LoRA", "frozen"])
def test_a_single_shard_stays_gathered_until_its_backward(saved_by, toys, loaded):
    created = not dist.is_initialized()
    ctx = setup_distributed()
    hf, processor = load_hf(str(toys["qwen2_5_vl"])), loaded["qwen2_5_vl"][1]
    policy = Policy(add_lora(hf, LoraConfig(4, 8.0)) if saved_by == "LoRA" else hf, processor)
    if saved_by == "checkpointing":
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    apply_fsdp(policy.train(), ctx.device, torch.float32, frozen=saved_by == "frozen")

    def n_gathered() -> int:
        return sum(not isinstance(p, DTensor) for block in blocks_of(hf) for p in block.parameters())

    micro = micro_of(2, processor)
    assert n_gathered() == 0
    out = policy(micro)
    assert (n_gathered() > 0) == (saved_by == "")
    if saved_by != "frozen":
        out.logp_K.sum().backward()
    assert n_gathered() == 0, "an optimizer step would change shards that the next forward does not see"
    with torch.no_grad():
        policy(micro)
    reshard(policy)
    assert n_gathered() == 0
    if created:
        dist.destroy_process_group()
