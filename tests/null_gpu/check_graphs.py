"""Print as JSON how many graphs flex_attention compiles for micro-batches of changing lengths, and its peak memory."""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch._dynamo.utils import counters

from layers.attention import PackedAttention


def attend(n_tokens: int, grads: tuple[bool, bool, bool], heads: int = 16, key_heads: int = 2) -> None:
    """Run one layer over a micro-batch: a prompt, and responses that see it. `grads`: do query, key and value
    need gradients?"""
    prompt, runs = max(1, n_tokens // 3), []
    end_T = torch.full((n_tokens,), n_tokens, device="cuda")
    for start in range(prompt, n_tokens, max(1, n_tokens // 4)):
        stop = min(n_tokens, start + max(1, n_tokens // 4))
        runs.append((start, stop, prompt - 1))
        end_T[start:stop] = stop
    plan = PackedAttention("flex", SimpleNamespace(segments=[(0, prompt, -1), *runs], subtree_end_T=end_T))
    shapes = [(1, n, n_tokens, 128) for n in (heads, key_heads, key_heads)]
    inputs = [
        torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=g) for s, g in zip(shapes, grads, strict=True)
    ]
    with torch.set_grad_enabled(any(grads)):
        out = plan(0, *inputs, 128**-0.5)
        if any(grads):
            out.sum().backward()


lengths = random.Random(0)
graphs = []
for _ in range(30):
    n_tokens = lengths.choice([1, 127, 128, 129, 256, 512, 8192, 16384, lengths.randrange(1, 20000)])
    attend(n_tokens, (True, True, True))
    attend(n_tokens, (False, False, False))
    graphs.append(counters["stats"]["unique_graphs"])
attend(3000, (True, False, True))  # the first layer with --lora-targets q_proj v_proj
after_lora = counters["stats"]["unique_graphs"]
torch.cuda.reset_peak_memory_stats()
attend(65536, (True, True, True))
print(json.dumps({"graphs": graphs, "with LoRA": after_lora, "GiB": torch.cuda.max_memory_allocated() / 2**30}))
