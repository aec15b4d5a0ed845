"""Compile and launch the policy head's Triton kernels at the shapes of 3B, 7B and 30B-A3B; print as JSON how many bytes
of shared memory each compiled kernel takes."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton

import kernels

SHAPES = {"3B": (2048, 151936), "7B": (3584, 152064), "30B-A3B": (2048, 151936)}


class Loss:
    """The sum of log-probabilities and entropies."""

    per_token = True

    def __call__(self, logp_R, entropy_R, tokens_R):
        return (logp_R + entropy_R,)


for hidden, vocab in SHAPES.values():
    hidden_KH = torch.zeros(5000, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_VH = torch.zeros(vocab, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets_K = torch.zeros(5000, dtype=torch.long, device="cuda")
    banned = torch.tensor([1, 2], device="cuda")
    with torch.no_grad():
        kernels.linear_logprob(hidden_KH, weight_VH, targets_K, 1.0, banned, "triton")
    kernels.linear_logprob(hidden_KH, weight_VH, targets_K, 1.0, banned, "triton")[0].sum().backward()
    total, *_ = kernels.fused_policy_loss(
        hidden_KH, weight_VH, targets_K, Loss(), torch.zeros(5000, 1, device="cuda"), 1.0, banned, "triton"
    )
    total.backward()
compiled = {}
for name, function in vars(kernels).items():
    if name.endswith("_kernel") and isinstance(function, triton.JITFunction):
        [cache] = function.device_caches.values()
        compiled[name] = [kernel.metadata.shared for kernel in cache[0].values()]
print(json.dumps(compiled))
sys.stdout.flush()
os._exit(0)  # some threads of the compiler do not end with the interpreter
