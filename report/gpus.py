"""Peak FLOP/s, bandwidth and memory of GPUs, from a table, and FLOP/s of a CPU, measured."""

import functools
import re
import time
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """A GPU: its name, memory in GB as it is sold, dense bf16 TFLOP/s (fp32 accumulation), memory bandwidth in GB/s,
    and memory in GiB."""

    name: str
    gb: float
    tflops: float
    bandwidth: float
    gib: float


# Value of --gpu, part of torch's device name, GB, TFLOP/s, GB/s, GiB. TFLOP/s and bandwidth: NVIDIA's datasheets
# (GeForce cards and RTX A6000: whitepapers of the GA102, Ada and Blackwell architectures, in which bf16 with fp32
# accumulation has twice the FLOP/s of fp32; H800, H20 and L20, which are sold in China only: their vendors' sheets).
# GiB: torch's total_memory (of A10, L4, T4, V100, A100 40 GB, A6000 and GeForce cards about the lowest that messages of
# users show), which is less than the datasheet's GB; of H100 NVL, GH200, H20 and B200 98% of the GB. T4 and V100 have
# no bf16: their TFLOP/s are of fp16.
DATASHEETS = """
h100-pcie, H100 PCIe, 80, 756, 2000, 79.1
h100-nvl, H100 NVL, 94, 835, 3900, 92.1
h100, H100, 80, 989, 3350, 79.1
gh200, GH200, 96, 989, 4000, 94.0
h200, H200, 141, 989, 4800, 139.8
h800, H800, 80, 989, 3350, 79.1
h20, H20, 96, 148, 4000, 94.0
b200, B200, 180, 2250, 7700, 176.0
a100, A100, 80, 312, 2039, 79.1
a100-40gb, A100, 40, 312, 1555, 39.4
a800, A800, 80, 312, 2039, 79.1
a10, A10, 24, 125, 600, 22.0
a6000, RTX A6000, 48, 154.8, 768, 47.4
l40s, L40S, 48, 362, 864, 44.4
l40, L40, 48, 181, 864, 44.4
l20, L20, 48, 119.5, 864, 44.4
4090, RTX 4090, 24, 165, 1008, 23.6
5090, RTX 5090, 32, 209.5, 1792, 31.3
3090, RTX 3090, 24, 71, 936, 23.5
4080, RTX 4080, 16, 97.5, 717, 15.6
4060ti-16gb, RTX 4060 Ti, 16, 44, 288, 15.6
3060, RTX 3060, 12, 25.5, 360, 11.6
l4, L4, 24, 121, 300, 22.0
t4, T4, 16, 65, 320, 14.5
v100-16gb, V100, 16, 125, 900, 15.7
v100-32gb, V100, 32, 125, 900, 31.7
"""
GPU_ROWS = (line.split(", ") for line in DATASHEETS.strip().splitlines())
GPU_CHOICES = {flag: Gpu(name, *map(float, numbers)) for flag, name, *numbers in GPU_ROWS}
WITHOUT_BF16 = ("T4", "V100")


def peak_flops(device: str | None) -> float | None:
    """Return the peak FLOP/s of a GPU, given torch's name of it, or None if it is unknown; for None, the measured
    FLOP/s of this CPU. The first row whose name occurs in torch's name is used, as whole words, and without a suffix
    that makes it another GPU."""
    if device is None:
        return measure_cpu_flops()
    matches = (gpu for gpu in GPU_CHOICES.values() if re.search(rf"\b{gpu.name}\b(?! (Ti|SUPER|D|Laptop)\b)", device))
    return next((1e12 * gpu.tflops for gpu in matches), None)


@functools.cache
def measure_cpu_flops(n: int = 768) -> float:
    """Measure the FLOP/s of this process in fp32 products of n x n matrices: the best of eight, after a warm-up. Takes
    about 0.1 s."""
    a, seconds = torch.randn(n, n), []
    for _ in range(9):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds[1:])
