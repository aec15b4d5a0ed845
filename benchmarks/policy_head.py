"""Comparison of the policy head with other implementations: time, extra memory and error.

    OMP_NUM_THREADS=1 python benchmarks/policy_head.py              # a CPU: 512 tokens, H 256, V 32768, fp32
    python benchmarks/policy_head.py                                # a GPU: 16384 tokens, H 3584, V 152064, bf16
    python benchmarks/policy_head.py --shape 512,896,151936 --repeats 3

score    log-probabilities (and entropy, if the implementation returns it) without gradients
frozen   loss and the gradient of the hidden states: LoRA, or a head that is not trained
full     loss and the gradients of hidden states and weight
All use the same weighted sum of log-probabilities as loss, except torch's own op, which supports only the mean cross
entropy. Times are the minimum of interleaved runs. Extra memory is the increase of peak memory in one full pass,
including the two gradients: of the resident set, in a separate process (CPU), or of the allocator (GPU). Errors are
relative to float64: the largest difference of logp and entropy, and for gradients the norm of the difference over the
norm. Implementations that are not installed or cannot run here are listed with the reason. requirements-dev.txt
installs Liger; for the others: pip install cut-cross-entropy; pip install ray tensordict hydra-core codetiming
torchdata peft pybind11 pylatexenc wandb; and, without its pins, pip install --no-deps verl.
"""

import argparse
import importlib
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import kernels  # noqa: E402
from grpo import Algorithm, PolicyLoss  # noqa: E402
from packing import TokenBatch  # noqa: E402

GPU = torch.cuda.is_available()


SHORT = "--shape 64,64,2048 --repeats 1 --only naive"


def parse_args() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    shape = "16384,3584,152064" if GPU else "512,256,32768"
    p.add_argument("--shape", default=shape, help="tokens, hidden size, vocabulary")
    dtype = "bfloat16" if GPU else "float32"
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default=dtype, help="dtype of the inputs")
    p.add_argument("--repeats", type=int, default=10 if GPU else 6, help="interleaved runs; the minimum is reported")
    p.add_argument("--only", help="comma-separated names of implementations (default: all)")
    p.add_argument("--block-rows", help="GPU: also time our head with these numbers of rows per block, e.g. 1024,4096")
    p.add_argument("--short", action="store_true", help=f"only check that it runs; same as {SHORT}")
    args = p.parse_args()
    return p.parse_args([*SHORT.split(), *sys.argv[1:]]) if args.short else args


# --- Implementations: (hidden, weight, targets, coefficients) -> (loss, logp or None, entropy or None) ----------------


def ours_fused(kernel: str) -> Callable:
    def run(hidden, weight, targets, coefficients):
        ones = torch.ones_like(coefficients)
        tokens = TokenBatch(torch.zeros_like(targets), ones, ones, weights=ones, advantages=-coefficients)
        loss = PolicyLoss(Algorithm())
        return kernels.fused_policy_loss(hidden, weight, targets, loss, tokens, kernel=kernel)

    return run


def ours_recompute(kernel: str) -> Callable:
    def run(hidden, weight, targets, coefficients):
        logp, entropy = kernels.linear_logprob(hidden, weight, targets, kernel=kernel)
        return (coefficients * logp).sum(), logp, entropy

    return run


def naive(hidden, weight, targets, coefficients):
    logp_NV = (hidden @ weight.t()).float().log_softmax(-1)
    logp = logp_NV.gather(1, targets[:, None])[:, 0]
    return (coefficients * logp).sum(), logp, -(logp_NV.exp() * logp_NV).sum(-1)


def naive_16bit(hidden, weight, targets, coefficients):
    """Compute logits and softmax in the inputs' dtype, to show how much accuracy bf16 logits cost."""
    logp_NV = (hidden @ weight.t()).log_softmax(-1)
    logp = logp_NV.gather(1, targets[:, None])[:, 0]
    return (coefficients * logp.float()).sum(), logp, -(logp_NV.exp() * logp_NV).sum(-1)


def torch_native() -> Callable:
    # The default chunk size is good on a GPU, but on a CPU it is 20 times as slow as 256 rows, the best size there.
    options = torch.nn.LinearCrossEntropyOptions(**({} if GPU else {"batch_chunk_size": 256}))

    def run(hidden, weight, targets, coefficients):
        return F.linear_cross_entropy(hidden, weight, targets, options=options), None, None

    return run


def trl() -> Callable:
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction

    def run(hidden, weight, targets, coefficients):
        logp, entropy, *_ = function.apply(hidden, weight, None, targets, 1.0, 32768, None, 1.0, ("entropy",))
        return (coefficients * logp).sum(), logp, entropy

    return run


def liger() -> Callable:
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    function = module.LigerFusedLinearScaledCrossEntropyFunction

    def run(hidden, weight, targets, coefficients):
        nll, entropy = function.apply(hidden, weight, targets, 1.0, -100, 1, True)
        return -(coefficients * nll).sum(), -nll, entropy

    return run


def apple() -> Callable:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    if not GPU:
        raise RuntimeError("its kernels require a GPU")

    def run(hidden, weight, targets, coefficients):
        nll = function(hidden, weight, targets, reduction="none", filter_eps=None)
        return -(coefficients * nll).sum(), -nll, None

    return run


def verl() -> Callable:
    module = importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO()

    def run(hidden, weight, targets, coefficients):
        logp, entropy = module(hidden[None], weight, targets[None])
        return (coefficients * logp[0]).sum(), logp[0], entropy[0]

    return run


def load_implementations(names: list[str] | None) -> tuple[dict[str, Callable], list[str]]:
    """Return the implementations that can run here, and a line with the reason for each that cannot."""
    kernel = "triton" if GPU else "torch"
    makers = {
        "ours fused loss": lambda: ours_fused(kernel),
        "ours any loss": lambda: ours_recompute(kernel),
        **({"ours plain torch": lambda: ours_fused("torch")} if GPU else {}),
        "naive": lambda: naive, "naive 16-bit logits": lambda: naive_16bit, "torch linear_cross_entropy": torch_native,
        "TRL chunked": trl, "Liger scaled CE": liger, "Apple CCE": apple, "verl FusedLinearForPPO": verl,
    }
    available, missing = {}, []
    for name, make in makers.items():
        if names and name not in names:
            continue
        try:
            available[name] = make()
        except (ImportError, AttributeError, RuntimeError) as error:
            missing.append(f"{name}: {error}")
    return available, missing


# --- Measurement ------------------------------------------------------------------------------------------------------


def make_inputs(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    n, h, v = shape
    g = torch.Generator().manual_seed(0)
    device = "cuda" if GPU else "cpu"
    hidden = torch.randn(n, h, generator=g).to(device, dtype)
    weight = (torch.randn(v, h, generator=g) * (4.0 / h**0.5)).to(device, dtype)  # logits have standard deviation 4
    targets = torch.randint(0, v, (n,), generator=g)
    coefficients = torch.randn(n, generator=g) / n
    return hidden, weight, targets.to(device), coefficients.to(device)


def run_once(function: Callable, inputs: tuple[torch.Tensor, ...], mode: str) -> tuple:
    hidden, weight, targets, coefficients = inputs
    if mode == "score":
        with torch.no_grad():
            return function(hidden, weight, targets, coefficients)
    hidden = hidden.detach().requires_grad_()
    weight = weight.detach().requires_grad_(mode == "full")
    loss, logp, entropy = function(hidden, weight, targets, coefficients)
    loss.backward()
    return logp, entropy, hidden.grad, weight.grad


def time_once(function: Callable, inputs: tuple[torch.Tensor, ...], mode: str) -> float:
    if GPU:
        torch.cuda.synchronize()
    start_time = time.perf_counter()
    run_once(function, inputs, mode)
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start_time


def peak_mib(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Return the increase of peak memory in one full pass, in MiB."""
    function = load_implementations([name])[0][name]
    inputs = make_inputs(shape, dtype)
    run_once(function, make_inputs((4, shape[1], 64), dtype), "full")  # load libraries and start threads first
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_once(function, inputs, "full")
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    torch.set_num_threads(1)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here (Linux)
    run_once(function, inputs, "full")
    return (resident("VmHWM") - before) / 2**10


def resident(field: str) -> int:
    """Return the resident memory of this process in KiB: now (VmRSS), or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def errors(function: Callable, inputs: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]) -> list[float | None]:
    """Return the errors against float64: the largest absolute errors of logp and entropy, and the relative errors of
    the gradients of the hidden states and the weight."""
    logp, entropy, *gradients = run_once(function, inputs, "full")
    out = []
    for value, expected in zip((logp, entropy), exact[:2], strict=True):
        out.append(None if value is None else (value.double().cpu() - expected).abs().max().item())
    for value, expected in zip(gradients, exact[2:], strict=True):
        out.append(None if logp is None else ((value.double().cpu() - expected).norm() / expected.norm()).item())
    return out


def main() -> None:
    args = parse_args()
    if not GPU:
        torch.set_num_threads(1)
    shape = tuple(int(x) for x in args.shape.split(","))
    dtype = getattr(torch, args.dtype)
    available, missing = load_implementations(args.only.split(",") if args.only else None)
    if dtype == torch.float32:
        available.pop("naive 16-bit logits", None)
    inputs = make_inputs(shape, dtype)
    device = torch.cuda.get_device_name() if GPU else "CPU, one thread"
    print(f"{shape[0]} tokens, H {shape[1]}, V {shape[2]}, {args.dtype}, {device}, torch {torch.__version__}")

    modes = ("score", "frozen", "full")
    best: dict[tuple[str, str], float] = {}
    for repeat in range(args.repeats + 1):
        for mode in modes:
            for name in list(available):
                try:
                    elapsed = time_once(available[name], inputs, mode)
                except RuntimeError as error:  # other implementations may fail (no memory, no kernel): list them below
                    if name.startswith("ours"):
                        raise
                    missing.append(f"{name}: {mode} failed: {str(error).splitlines()[0]}")
                    del available[name]
                    continue
                if repeat:  # the first repeat is a warmup
                    best[name, mode] = min(elapsed, best.get((name, mode), elapsed))

    # compare with float64 on a smaller problem if this one is too large for it
    small_shape = (min(shape[0], 512), shape[1], shape[2] if shape[0] * shape[2] <= 1 << 27 else 32768)
    small = make_inputs(small_shape, dtype)
    exact = run_once(naive_64, tuple(x.cpu() if x.dtype == torch.long else x.double().cpu() for x in small), "full")
    context = multiprocessing.get_context("spawn")
    unit, in_unit, digits = ("ms", 1e3, 2) if GPU else ("s", 1.0, 3)
    head = "".join(f"{mode + ', ' + unit:>12}" for mode in modes) + f"{'extra MiB':>12}"
    print(f"{'':28}{head}{'logp':>10}{'entropy':>10}{'d hidden':>10}{'d weight':>10}")
    for name, function in available.items():
        with context.Pool(1) as pool:
            peak = pool.apply(peak_mib, (name, shape, dtype))
        times = "".join(f"{best[name, mode] * in_unit:>12.{digits}f}" for mode in modes)
        error_cells = "".join(f"{'-':>10}" if e is None else f"{e:>10.1e}" for e in errors(function, small, exact))
        print(f"{name:28}{times}{peak:>12.0f}{error_cells}")
    for line in missing:
        print(f"not run: {line}")
    ours = best.get(("ours fused loss", "full"))
    for name in ("TRL chunked", "torch linear_cross_entropy", "verl FusedLinearForPPO"):
        if ours and (name, "full") in best:
            print(f"full pass, ours / {name}: {ours / best[name, 'full']:.2f}")
    for rows in args.block_rows.split(",") if GPU and args.block_rows else ():
        kernels.GPU_BLOCK_ROWS = int(rows)
        for mode in ("frozen", "full"):
            elapsed = min(time_once(ours_fused("triton"), inputs, mode) for _ in range(args.repeats))
            print(f"ours, {rows} rows per block, {mode}: {elapsed * 1e3:.2f} ms")


def naive_64(hidden, weight, targets, coefficients):
    logp_NV = (hidden @ weight.t()).log_softmax(-1)
    logp = logp_NV.gather(1, targets[:, None])[:, 0]
    return (coefficients * logp).sum(), logp.detach(), -(logp_NV.exp() * logp_NV).sum(-1).detach()


if __name__ == "__main__":
    main()
