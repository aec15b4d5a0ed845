"""First contact with a GPU: does everything run there, is it right, how fast is it? One command, no network, under 9
minutes.

    python benchmarks/gpu.py                   # one GPU; --only 1,3 for some parts, --json FILE for the results
    python benchmarks/gpu.py --short           # on a CPU, a minute or two: tiny shapes, Triton's interpreter

1  tests marked gpu: policy head against float64, flex and flash against the dense mask, bf16 ratios; then
   tests/test_kernels.py
2  train.py for three steps on toys in bf16: every --attn and --kernel, LoRA, PPO, recomputation, trained tower,
   reference, resume
3  the policy head at 16384 tokens x 3584 x 152064 against the peers that are installed
4  the update on randomly initialised Qwen2.5-VL of 3B, and of 7B with LoRA, 32 prompts x 8 responses of geo3k-like
   lengths:
   shared prefix, packed, padded
5  host synchronisations in the micro-batch loop of train.update_policy

Every part runs in children that are killed when they are late; one that crashes, hangs or runs out of memory is noted
and the rest goes on. Results are written to --json after each row, and printed at the end as rows for RESULTS.md. A
part gets the time that those before it left; what was cut is said. The exit code is 1 if anything failed, was cut or
could not be tried.

Needs torch >= 2.11, triton >= 3.6, transformers >= 5.17 (5.17 wants torchvision), safetensors, numpy, pillow, pyarrow,
tqdm and pytest, and says which are missing; pytest-xdist, trl and liger-kernel are used where installed. vllm,
flash-attn and math-verify are not needed: the toys' answers are graded without. To train on geo3k there, bring three
small wheels, which any machine can run: math-verify 0.9.0, latex2sympy2-extended 1.11.0 and antlr4-python3-runtime
4.13.2.

What is counted. Tokens/s are response tokens trained on, whatever else a way computes. MFU is the model's FLOPs by
packing.flop_rates over time over the datasheet's dense bf16 rate: a forward and two for the backward, one where weights
are frozen (LoRA), the frozen tower's forward; attention pairs that are seen; no recomputation, no padding. Copies of a
prompt count where a way makes them; the last column counts each prompt once, so it compares the ways. Images are not
cached between ways. Times are of one whole update, optimizer included, after a warm-up of the fullest micro-batches.
Policy head: minimum of the runs.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

TITLES = {1: "Tests", 2: "train.py on toys", 3: "The policy head", 4: "The update", 5: "Host synchronisations"}
LIMITS = {1: 110, 2: 125, 3: 70, 4: 185, 5: 35}  # seconds that a part gets at least; 525 together
NEEDED = "torch triton transformers safetensors numpy pillow pyarrow tqdm pytest".split()
OPTIONAL = "torchvision pytest-xdist trl liger-kernel math-verify vllm flash-attn".split()
PATIENCE = 100  # seconds without a result, after which a child counts as hung
PEAK_TFLOPS = {
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "B200": 2250,
}  # dense bf16, datasheets
SIZES = {
    4: {
        "3B": ("3B shared prefix", "3B packed", "3B padded"),
        "7B": ("7B LoRA shared prefix", "7B LoRA packed", "7B LoRA padded"),
    }
}


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--only", help="comma-separated numbers of parts; default: all")
    p.add_argument("--json", type=Path, default=Path("out/gpu.json"), help="where results go, row by row")
    p.add_argument("--short", "--toy", dest="toy", action="store_true", help="tiny shapes, on a CPU")
    p.add_argument("--minutes", type=float, default=8.8, help="stop after so long")
    hidden = {"help": argparse.SUPPRESS}
    p.add_argument(
        "--break", dest="broken", default="", **hidden
    )  # 1:crash,3:hang for the tests: children of these parts do that
    p.add_argument("--child", type=int, **hidden)
    p.add_argument("--cases", default="", **hidden)
    p.add_argument("--rows", type=Path, **hidden)
    p.add_argument("--level", type=int, default=0, **hidden)
    return p.parse_args()


# ----------------------------------------------------------------------------------------------------------------------
# The parent: imports nothing that could fail, and never touches the GPU


class Report:
    """What is known so far, in a file that is whole at any time."""

    def __init__(self, path: Path, toy: bool):
        self.path = path
        command = "python " + shlex.join([str(Path(sys.argv[0])), *sys.argv[1:]])
        self.data = {"command": command, "date": time.strftime("%Y-%m-%d"), "toy": toy, "machine": {}, "parts": []}

    def save(self) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n")
        os.replace(temporary, self.path)

    def add(self, row: dict) -> None:
        row = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }  # JSON knows no NaN
        self.data["parts"][-1]["rows"].append(row)
        self.save()
        shown = row.get("error") or ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "case"
        )
        print(f"  {row['case']}: {shown[:300]}", flush=True)


class Parent:
    def __init__(self, args: argparse.Namespace, report: Report, scratch: Path):
        self.args, self.report, self.scratch, self.part, self.children = args, report, scratch, 0, 0
        self.stopped = False
        self.broken = dict(item.split(":") for item in args.broken.split(",") if item)
        paths = [
            str(ROOT),
            str(ROOT / "benchmarks"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]  # wheels may live there
        self.env = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        if args.toy:
            self.env |= {
                "OMP_NUM_THREADS": "1",
                "TRITON_INTERPRET": "1",
                "GPU_TESTS_ON_CPU": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }

    def run(self, command: list, until: float, watch: Path | None = None, **env: str) -> tuple[str, str]:
        """-> ("" or what went wrong, end of the output). A child ends with its whole family, at the latest at `until`,
        or when the file that it writes rows into has not grown for too long."""
        kind, patience = self.broken.get(str(self.part)), PATIENCE
        if kind:
            patience = 2
            command = [
                sys.executable,
                "-c",
                "import os, time; " + ("os.abort()" if kind == "crash" else "time.sleep(3600)"),
            ]
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(
                list(map(str, command)),
                cwd=ROOT,
                env=self.env | env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            moved, size, why = time.monotonic(), 0, ""
            try:
                while child.poll() is None and not why:
                    time.sleep(0.1)
                    now, grown = time.monotonic(), watch.stat().st_size if watch and watch.exists() else 0
                    moved, size = (now, grown) if grown > size else (moved, size)
                    if now > until or self.stopped:
                        why = "stopped: no time left"
                    elif now - moved > patience:
                        why = f"hung: stopped after {patience} s without a result"
            finally:  # also when this process is told to stop
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
            output.seek(max(0, output.seek(0, os.SEEK_END) - 4000))
            tail = output.read().decode(errors="replace")
        if not why and code:
            why = f"exit code {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "") + last_words(tail)
        return why, tail

    def run_cases(self, cases: list[str], until: float) -> None:
        """Cases one after another in a child. Behind one that ends it, a fresh child goes on; after too little memory
        at the next level of savings, which the following cases then share."""
        left, level = list(cases), 0
        while left and time.monotonic() < until:
            self.children += 1
            file = self.scratch / f"rows_{self.children}.jsonl"
            child = [
                sys.executable,
                __file__,
                "--child",
                self.part,
                "--cases",
                ";".join(left),
                "--rows",
                file,
                "--level",
                level,
            ]
            why, tail = self.run(child + ["--toy"] * self.args.toy, until, file)
            rows = read_rows(file)
            for row in rows:
                if "case" in row:
                    self.report.add(row)
            left = [case for case in left if case not in {row.get("case") for row in rows}]
            if left and rows and "oom" in rows[-1] and self.part == 4 and rows[-1]["level"] + 1 < len(LEVELS):
                level = rows[-1]["level"] + 1
            elif left and why:
                self.report.add({"case": left.pop(0), "error": why, "tail": tail})
            elif left:
                self.report.add({"case": left.pop(0), "error": "the child ended without a word", "tail": tail})
        for case in left:
            self.report.add({"case": case, "error": "cut: no time left"})


def last_words(output: str) -> str:
    """ ": " and the last line that names an error, else the last line; of a child that said nothing, nothing."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "No module" in line]
    return "".join(f": {line[:200]}" for line in (named or lines)[-1:])


def read_rows(file: Path) -> list[dict]:
    """Of a file of JSON lines, the last of which may be half written."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def part_1(p: Parent, until: float) -> None:
    xdist = ["-n", "4"] if importlib.util.find_spec("xdist") and not p.args.toy else []
    files = {
        "tests/test_gpu.py": ["-m", "gpu"],
        "tests/test_kernels.py": ["-k", "no_tokens or finite" if p.args.toy else "not compile"],
    }
    for name, chosen in files.items():
        if time.monotonic() > until:
            p.report.add({"case": name, "error": "cut: no time left"})
            continue
        rows = p.scratch / f"{Path(name).stem}.jsonl"
        began = time.monotonic()
        # this file is the plugin that writes a row for each test as it ends
        why, tail = p.run(
            [sys.executable, "-m", "pytest", "-p", "gpu", "-p", "no:cacheprovider", *xdist, *chosen, name],
            until,
            rows,
            GPU_BENCH_ROWS=str(rows),
        )
        outcomes = read_rows(rows)
        count = Counter(row["outcome"] for row in outcomes)
        row = {
            "case": name,
            **{kind: count[kind] for kind in ("passed", "failed", "skipped")},
            "seconds": time.monotonic() - began,
        }
        skipped = Counter(row["test"].split("[")[0] for row in outcomes if row["outcome"] == "skipped")
        row |= {"skipped tests": dict(skipped)} if skipped else {}
        bad = [row["test"] for row in outcomes if row["outcome"] == "failed"]
        if why or bad or not count["passed"]:
            row |= {
                "error": f"{count['passed']} passed, {count['failed']} failed"
                + (f" ({', '.join(bad[:5])})" if bad else "")
                + (f"; {why}" if why else ""),
                "failures": bad,
                "tail": tail,
            }
        p.report.add(row)


def pytest_runtest_logreport(report) -> None:
    """A pytest hook, see part_1."""
    ended = report.when == "call" or (report.when == "setup" and report.outcome != "passed")
    if ended and "GPU_BENCH_ROWS" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["GPU_BENCH_ROWS"], "a") as file:
            file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome}) + "\n")


BASE = (
    "--steps 3 --prompts-per-step 8 --group-size 4 --max-new-tokens 16 --max-prompt-tokens 100 --micro-tokens 400 --lr "
    "1e-4 "
    "--rollout hf --dtype bfloat16 --weight-decay 0 "
)
RUNS = {  # name -> flags; a "/" begins a second run into the same folder
    "flex, triton": "--attn flex --kernel triton",
    "flash, triton": "--attn flash --kernel triton",
    "LoRA with KL": "--attn flex --lora-rank 8 --kl-coef 0.05",
    "resumed": "--attn flex --steps 2 --save-every 1 / --attn flex --resume auto",
    "flex, torch": "--attn flex --kernel torch",
    "flash, torch": "--attn flash --kernel torch",
    "PPO, value head": "--attn flex --algo ppo --epochs 2",
    "PPO, separate critic": "--attn flex --algo ppo --epochs 2 --critic separate",
    "recomputed activations": "--attn flex --grad-checkpointing",
    "tower trained": "--attn flex --train-vision all",
    "reference, KL": "--attn flex --kl-coef 0.05",
    "GSPO, 2 minibatches": "--attn flex --algo gspo --minibatches 2",
    "sdpa, triton": "--attn sdpa --kernel triton",
    "offloaded to the CPU": "--attn flex --offload all",
    "bf16 weights": "--attn flex --master-dtype bf16 --tis-cap 2",
    "Qwen3-VL": "--attn flex --family qwen3_vl",
    "Qwen3.5": "--attn flex --family qwen3_5",
}
TOY_RUNS = ("resumed", "LoRA with KL")


def part_2(p: Parent, until: float) -> None:
    runs = {name: RUNS[name] for name in TOY_RUNS} if p.args.toy else RUNS
    families = {
        flags.split("--family ")[1].split()[0] if "--family" in flags else "qwen2_5_vl" for flags in runs.values()
    }
    folder = p.scratch / "toys"
    why, tail = p.run([sys.executable, __file__, "--child", 2, "--rows", folder, "--cases", ";".join(families)], until)
    if why:
        p.report.add({"case": "toy models and data", "error": why, "tail": tail})
        return
    with ThreadPoolExecutor(2 if p.args.toy else 6) as pool:  # so times are those of a shared machine
        for row in as_completed([pool.submit(one_run, p, folder, until, *item) for item in runs.items()]):
            p.report.add(row.result())


def one_run(p: Parent, folder: Path, until: float, name: str, flags: str) -> dict:
    if time.monotonic() > until:
        return {"case": name, "error": "cut: no time left"}
    out, began = folder / "runs" / name.replace(" ", "_").replace(",", ""), time.monotonic()
    words, family = flags.split(), "qwen2_5_vl"
    if "--family" in words:
        at = words.index("--family")
        family = words[at + 1]
        del words[at : at + 2]
    if p.args.toy:  # what a CPU can do
        words = ["sdpa" if w in ("flex", "flash") else "torch" if w == "triton" else w for w in words]
    for part in " ".join(words).split(" / "):
        command = [
            sys.executable,
            "train.py",
            "--model",
            folder / family,
            "--data",
            folder / "train.parquet",
            "--out",
            out,
            "--reward",
            f"{folder / 'reward.py'}:score",
            *BASE.split(),
            *part.split(),
        ]
        why, tail = p.run(command, until)
        if why:
            return {"case": name, "error": why, "flags": flags, "tail": tail, "seconds": time.monotonic() - began}
    steps = [row for row in read_rows(out / "metrics.jsonl") if "policy/grad_norm" in row]
    norms = [row["policy/grad_norm"] for row in steps]
    dlogp = max((row["rollout/max_abs_dlogp"] for row in steps), default=math.nan)
    row = {
        "case": name,
        "flags": flags,
        "s a step": steps[-1]["time/step"] if steps else math.nan,
        "seconds": time.monotonic() - began,
        "largest dlogp": dlogp,
        "grad norm": norms[-1] if norms else math.nan,
    }
    if len(steps) != 3 or not all(n is not None and math.isfinite(n) and n > 0 for n in norms):
        row |= {"error": f"{len(steps)} of 3 steps, gradient norms {norms}", "tail": tail}
    return row


def part_3(p: Parent, until: float) -> None:
    names = [
        "ours fused loss",
        "ours any loss",
        "ours cuBLAS tiles",
        "torch linear_cross_entropy",
        "Liger scaled CE",
        "TRL chunked",
        "naive",
        "naive 16-bit logits",
        "verl FusedLinearForPPO",
        "Apple CCE",
        "ours plain torch",
    ]
    p.run_cases(["ours fused loss", "naive", "Apple CCE"] if p.args.toy else names, until)


def part_4(p: Parent, until: float) -> None:
    sizes = list(SIZES[4].values())
    for i, cases in enumerate(sizes):
        now = time.monotonic()
        p.run_cases(list(cases), now + (until - now) / (len(sizes) - i))


def part_5(p: Parent, until: float) -> None:
    p.run_cases(["sdpa"] if p.args.toy else ["flex", "flash", "flex, gspo, KL"], until)


PARTS = {1: part_1, 2: part_2, 3: part_3, 4: part_4, 5: part_5}


def main(args: argparse.Namespace) -> None:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    began, report = time.monotonic(), Report(args.json, args.toy)
    end = began + 60 * args.minutes
    chosen = sorted(part for part in TITLES if str(part) in args.only.split(",")) if args.only else list(TITLES)
    if args.only and len(chosen) < len(args.only.split(",")):
        sys.exit(f"error: --only {args.only}: the parts are {', '.join(map(str, TITLES))}")
    report.save()
    with tempfile.TemporaryDirectory() as scratch:
        p = Parent(args, report, Path(scratch))

        def stop(number: int, _) -> None:
            p.stopped = True  # for the threads of part 2
            sys.exit(128 + number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        try:
            report.data["machine"] = machine(p)
            for part in chosen:
                later = 0 if args.toy else sum(LIMITS[other] for other in chosen if other > part)
                run_part(p, part, end - time.monotonic() - later)
        finally:
            report.data["seconds"] = time.monotonic() - began
            report.save()
            print("\n" + markdown(report.data), flush=True)
    bad = [
        f"part {part['part']} ({part['status']})"
        for part in report.data["parts"]
        if part["status"] not in ("ok", "no CUDA")
    ]
    if bad:
        sys.exit(f"error: {', '.join(bad)}")


def run_part(p: Parent, part: int, seconds: float) -> None:
    record = {"part": part, "title": TITLES[part], "status": "stopped", "seconds": 0.0, "rows": []}
    p.part, start = part, time.monotonic()
    p.report.data["parts"].append(record)
    p.report.save()
    print(f"part {part}, {TITLES[part]}: {max(0.0, seconds):.0f} s", flush=True)
    # a toy part 3 is plain torch; the other parts' children say themselves what they miss
    needs = {1: ("pytest", "triton"), 3: () if p.args.toy else ("triton",)}.get(part, ())
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        remedy = "pip install -c requirements.txt -r requirements-dev.txt, or bring the wheels"
        p.report.add({"case": "not started", "error": f"{' and '.join(missing)} missing: {remedy}"})
    elif seconds > 5:
        PARTS[part](p, start + seconds)
    errors = [row["error"] for row in record["rows"] if "error" in row]
    record["status"] = (
        "cut" if not record["rows"] else f"{len(errors)} of {len(record['rows'])} failed" if errors else "ok"
    )
    if part == 5 and record["rows"] and all("no CUDA" in row for row in record["rows"]):
        record["status"] = "no CUDA"
    record["seconds"] = time.monotonic() - start
    p.report.save()


def machine(p: Parent) -> dict:
    """Hardware and versions, asked of a child."""
    versions, missing = {"python": platform.python_version()}, []
    for name in (*NEEDED, *OPTIONAL):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    needed = [*NEEDED, *["torchvision"] * versions.get("transformers", "").startswith("5.17")]
    lacking = [name for name in needed if name in missing]
    if lacking:
        print(f"missing, bring their wheels: {', '.join(lacking)}", flush=True)
    file = p.scratch / "machine.jsonl"
    why, tail = p.run([sys.executable, __file__, "--child", 0, "--rows", file], time.monotonic() + 60)
    found = read_rows(file)
    return {"versions": versions, "missing": missing, **(found[0] if found else {"error": why, "tail": tail})}


def markdown(data: dict) -> str:
    """Rows for RESULTS.md."""
    m, versions = data["machine"], data["machine"].get("versions", {})
    lines = ["Tiny shapes on a CPU: only whether all runs.", ""] if data["toy"] else []
    lines += [
        f"`{data['command']}`, {data['date']}: {m.get('device', 'unknown device')}, "
        + (f"{m['memory_gib']:.0f} GiB, " if m.get("memory_gib") else "")
        + ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "transformers") if name in versions)
        + (
            f"; bf16 product of 8192 x 8192 x 8192 at {m['matmul_tflops']:.0f} TFLOP/s (datasheet "
            f"{m.get('peak_tflops') or 'unknown'})"
            if "matmul_tflops" in m
            else ""
        )
        + f"; {data['seconds']:.0f} s"
    ]
    for part in data["parts"]:
        lines += ["", f"{part['part']}. {part['title']}: {part['status']}, {part['seconds']:.0f} s", ""]
        good = [row for row in part["rows"] if "error" not in row]
        columns = [key for key in dict.fromkeys(chain.from_iterable(good)) if key not in HIDDEN]
        if good:
            lines += [
                "| " + " | ".join("" if c == "case" else c for c in columns) + " |",
                "|---|" + "--:|" * (len(columns) - 1),
            ]
            lines += ["| " + " | ".join(cell(row.get(c, "")) for c in columns) + " |" for row in good]
        lines += [f"- {row['case']}: {row['error']}" for row in part["rows"] if "error" in row]
        lines += [
            f"- {row['case']}, skipped: "
            + ", ".join(f"{t.split('::')[-1]} x {n}" for t, n in row["skipped tests"].items())
            for row in part["rows"]
            if "skipped tests" in row
        ]
    return "\n".join(lines)


HIDDEN = ("tail", "failures", "flags", "skipped tests", "first s", "graphs")


def cell(x) -> str:
    if x is None:
        return ""
    return f"{x:.3g}" if isinstance(x, float) and abs(x) < 100 else f"{x:.0f}" if isinstance(x, float) else str(x)


# ----------------------------------------------------------------------------------------------------------------------
# The children


def child(args: argparse.Namespace) -> None:
    cases = args.cases.split(";")
    if args.child == 2:
        make_toys(args.rows, cases)
        return
    rows = {0: child_machine, 3: child_head, 4: child_update, 5: child_syncs}[args.child]

    def write(row: dict) -> None:
        with open(args.rows, "a") as file:
            file.write(json.dumps(row) + "\n")

    import torch

    try:
        for row in rows(cases, args):
            write(row)
    except torch.OutOfMemoryError as error:  # with what it left behind nothing can be measured in this process
        write({"oom": str(error).splitlines()[0], "level": args.level})
        raise


def child_machine(cases: list[str], args: argparse.Namespace) -> Iterator[dict]:
    import torch

    if not torch.cuda.is_available():
        yield {"device": f"no CUDA: {platform.machine()}, {os.cpu_count()} cores", "memory_gib": 0.0}
        return
    name, x = torch.cuda.get_device_name(), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(10):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        x @ x
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    peak = next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
    yield {
        "device": name,
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / 2**30,
        "cuda": torch.version.cuda,
        "matmul_tflops": 2 * 8192**3 / sorted(times)[5] / 1e9,
        "peak_tflops": peak,
    }


def make_toys(folder: Path, families: list[str]) -> None:
    """Random toy models, images and a reward that has something to say about random answers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import demo
    from tasks.shapes import shapes_rows

    for family in families:
        demo.make_model(folder / family, family, vocab=640)
    pq.write_table(pa.Table.from_pylist(list(shapes_rows(24, "train", 0))), folder / "train.parquet")
    (folder / "reward.py").write_text(
        "def score(response, example):\n    return {'reward': (len(response) * 7919 % 5) / 4}\n"
    )


def child_head(cases: list[str], args: argparse.Namespace) -> Iterator[dict]:
    import policy_head as bench
    import torch

    shape, dtype, repeats = (
        ((16384, 3584, 152064), torch.bfloat16, 7) if bench.GPU else ((64, 32, 1000), torch.float32, 1)
    )
    inputs = bench.problem(shape, dtype)
    small = bench.problem((min(shape[0], 512), shape[1], min(shape[2], 32768)), dtype)
    exact = bench.run_once(
        bench.naive_64, tuple(x.cpu() if x.dtype == torch.long else x.double().cpu() for x in small), "full"
    )
    for name in cases:
        found, missing = bench.contenders([name])
        if not found:
            yield {"case": name, "not here": " ".join(missing) or "needs a GPU"}
            continue
        row = {"case": name}
        try:
            for mode in ("score", "frozen", "full"):
                runs = [bench.seconds(found[name], inputs, mode) for _ in range(repeats + 1)]
                row[f"{mode}, ms"] = 1e3 * min(runs[1:])
            if bench.GPU:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                bench.run_once(found[name], inputs, "full")
                row["extra MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            row |= zip(
                ("logp", "entropy", "d hidden", "d weight"), bench.errors(found[name], small, exact), strict=True
            )
        except RuntimeError as error:  # a peer's; ours must not
            if name.startswith("ours"):
                raise
            row["not here"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        yield row


# (tokens of a micro-batch, recompute activations?): the next one where memory does not suffice
LEVELS = [(8192, False), (8192, True), (4096, True), (2048, True)]
TEXT = {
    "3B": dict(
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        intermediate_size=11008,
        vocab_size=151936,
    ),
    "7B": dict(
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=152064,
    ),
    "8B": dict(
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=12288,
        vocab_size=151936,
    ),
    "32B": dict(
        hidden_size=5120,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        intermediate_size=27648,
        vocab_size=152064,
    ),
    "30B-A3B": dict(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
    ),
    "toy": dict(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        vocab_size=640,
    ),
}
VISION = dict(
    depth=32,
    hidden_size=1280,
    num_heads=16,
    intermediate_size=3420,
    window_size=112,
    fullatt_block_indexes=[7, 15, 23, 31],
    patch_size=14,
)
QWEN3_VISION = dict(
    depth=27,
    hidden_size=1152,
    num_heads=16,
    intermediate_size=4304,
    patch_size=16,
    num_position_embeddings=2304,
    deepstack_visual_indexes=[8, 16, 24],
)
TOY_VISION = VISION | dict(depth=2, hidden_size=64, num_heads=4, intermediate_size=96, fullatt_block_indexes=[1])
PAD, IMAGE, BEGIN, END, EOS = range(5)  # token ids, the same for all sizes


def config_of(size: str):
    """Return the configuration of Qwen2.5-VL 3B, 7B or 32B, Qwen3-VL 8B or 30B-A3B, or a toy, as on the hub."""
    import transformers

    text = dict(TEXT[size])
    half = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"]) // 2
    section = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
    kind, vision = {"8B": ("Qwen3VL", QWEN3_VISION), "30B-A3B": ("Qwen3VLMoe", QWEN3_VISION)}.get(
        size, ("Qwen2_5_VL", TOY_VISION if size == "toy" else VISION)
    )
    vision = vision | {"out_hidden_size": text["hidden_size"]} | ({"intermediate_size": 3456} if size == "32B" else {})
    text |= {"rope_parameters": rope, "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": EOS}
    return getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=size == "3B",
        image_token_id=IMAGE,
        video_token_id=PAD,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )


def build(size: str, ctx, lora, recompute: bool, parallel=None, master=None):
    """A sharded policy with random weights, as train.py makes it, made on the device: nothing is written or read but a
    config. Its masters are fp32, or bf16 with LoRA, unless `master` is a dtype."""
    import torch

    from layers.lora import add_lora
    from model import Policy
    from parallel import loading
    from parallel.sharding import PLAIN, shard

    class Either(Policy):
        """Forwards a micro-batch as ever; and a list of rollouts as a padded batch, by transformers' own forward, to
        their loss. It has to be this module's forward, because the gathering of weights hangs on that."""

        def forward(self, micro, *rest):
            return padded_loss(self, micro) if isinstance(micro, list) else super().forward(micro, *rest)

    master = master or (torch.bfloat16 if lora else torch.float32)
    processor = SimpleNamespace(
        merge_size=2, image_token_id=IMAGE, eos_ids=[EOS], banned=lambda v: torch.tensor([*range(EOS), v - 1])
    )
    with tempfile.TemporaryDirectory() as folder:
        config_of(size).save_pretrained(folder)
        hf = loading.meta_hf(folder, master)
    policy = Either(add_lora(hf, lora) if lora else hf, processor)
    if recompute:
        policy.hf.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    shard(policy, ctx.device, torch.bfloat16, parallel or PLAIN)
    loading.find_stored = lambda *_: {}  # no file holds any of it
    loading.find_bad = lambda *_: None  # what is there before the weights are drawn may be anything
    loading.load_sharded(policy, "")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.hf.named_parameters():
            local = parameter.to_local()
            if parameter.ndim > 1 and ".lora_" not in name:
                local.normal_(0, 0.02)
            elif parameter.ndim == 1:
                local.fill_(0.0 if name.endswith("bias") else 1.0)
    return policy, processor


def draw_rollouts(config, n_prompts: int, group: int, toy: bool) -> list:
    """Lengths as benchmarks/balance.py has them, kept within 109 to 700 tokens of prompt and 200 to 1000 of
    response."""
    import numpy as np
    import torch

    from model import ImageInput
    from rollout import Prompt, Rollout

    rng = np.random.default_rng(0)
    noise = torch.Generator().manual_seed(0)
    shrink = 0.1 if toy else 1.0
    v = config.vision_config
    rollouts = []
    for p in range(n_prompts):
        n = int(shrink * np.clip(np.exp(rng.normal(np.log(361), 0.5)), 109, 700))
        side = max(1, round(math.sqrt(n * rng.uniform(0.2, 0.9))) - 1)
        pixels = torch.randn(4 * side * side, v.in_channels * v.temporal_patch_size * v.patch_size**2, generator=noise)
        image = ImageInput(str(p), pixels, (1, 2 * side, 2 * side), side * side)
        text = rng.integers(5, 600, max(1, n - side * side - 2)).tolist()
        ids = [BEGIN, *[IMAGE] * side * side, END, *text]
        prompt = Prompt(f"p{p:03}", ids, [image], None, [], [])
        for g in range(group):
            length = int(shrink * np.clip(np.exp(rng.normal(np.log(326), 0.75)), 200, 1000))
            response = rng.integers(5, config.text_config.vocab_size - 1, length).tolist()
            rewards = {"reward": float(rng.integers(0, 2) if g else p % 2)}
            rollouts.append(Rollout(prompt, g, response, [True] * length, [-12.0] * length, "stop", "", rewards))
    return rollouts


def make_batch(rollouts: list, cfg, config, ctx, tokens: int, share: bool):
    """What train.py packs of them in a step, with their advantages."""
    import grpo
    import train
    from packing import Batch, Packer, flop_rates, token_batch
    from utils import Meter

    algo = cfg.algo
    n_tokens = [len(r.response) for r in rollouts]
    weights = grpo.token_weights(n_tokens, [True] * len(rollouts), algo.loss_agg, cfg.rollout.max_new_tokens)
    trains = grpo.may_train(train.per_group([r.reward for r in rollouts], algo), ["stop"] * len(rollouts), algo)
    packer = Packer(tokens, IMAGE, flop_rates(config), share)
    micros = packer.pack(rollouts, [i for i, t in enumerate(trains) if t])
    batch = Batch(rollouts, token_batch(rollouts, weights), [micros])
    train.set_advantages(batch, algo, 0.0, ctx, Meter())
    return batch


def padded_loss(policy, part: list):
    """transformers' forward of whole right-padded sequences, logits from the first trained one on. `part` are rollouts
    with the weight and the advantage of their tokens."""
    import torch

    hf, device = policy.hf, policy.banned.device
    sequences = [r.prompt.token_ids + r.response for r, _ in part]
    length = max(map(len, sequences))
    first = min(len(r.prompt.token_ids) for r, _ in part) - 1
    ids, valid = torch.zeros(2, len(part), length, dtype=torch.long)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = torch.tensor(sequence)
        valid[i, : len(sequence)] = 1
    images = list(chain.from_iterable(r.prompt.images for r, _ in part))
    hf.model.rope_deltas = None
    ids, valid = ids.to(device), valid.to(device)
    logits = hf(
        input_ids=ids,
        attention_mask=valid,
        pixel_values=torch.cat([i.pixel_values for i in images]).to(device),
        image_grid_thw=torch.tensor([i.grid_thw for i in images], device=device),
        mm_token_type_ids=((ids == IMAGE) & valid.bool()).int(),
        logits_to_keep=length - first,
        use_cache=False,
    ).logits
    loss = 0.0
    for i, (r, factor) in enumerate(part):
        n, begin = len(r.response), len(r.prompt.token_ids)
        z = logits[i, begin - 1 - first : begin - 1 - first + n].float().index_fill(1, policy.banned, -torch.inf)
        logp = z.log_softmax(-1).gather(1, ids[i, begin : begin + n, None])[:, 0]
        loss = loss - (factor * (logp - logp.detach()).exp()).sum()
    return loss


def padded_size(part: list) -> int:
    return len(part) * max(len(r.prompt.token_ids) + len(r.response) for r, _ in part)


def flops_of(micros: list, config, lora: bool) -> float:
    """Of an update by these micro-batches, see this file's first words."""
    import torch

    from packing import flop_rates

    rates = flop_rates(config)
    products = sum(rates.token * m.n_tokens + rates.trained_token * len(m.target_K) for m in micros)
    pairs = rates.pair * sum(int((m.end_T - torch.arange(m.n_tokens)).sum()) for m in micros)
    patches = [math.prod(image.grid_thw) for image in chain.from_iterable(m.images for m in micros)]
    tower = sum(n * (rates.patch + rates.image_pair * n + rates.window_pair * min(n, rates.window)) for n in patches)
    return (2 if lora else 3) * products + 3 * pairs + tower


def child_update(cases: list[str], args: argparse.Namespace) -> Iterator[dict]:
    import torch

    import grpo
    import train
    from layers.lora import Lora
    from parallel.models import Models
    from parallel.sharding import make_optimizer
    from report.log import Skipped
    from utils import Meter, dist_setup

    ctx, cuda = dist_setup(), torch.cuda.is_available()
    size, lora = "toy" if args.toy else cases[0].split()[0], Lora(64, 32.0) if "LoRA" in cases[0] else None
    if cuda and args.level == 0 and torch.cuda.get_device_properties(0).total_memory < 100 * 2**30:
        args.level = 1  # known beforehand
    tokens, recompute = LEVELS[args.level]
    tokens = 300 if args.toy else tokens
    config = config_of(size)
    policy, processor = build(size, ctx, lora, recompute)
    optimizer = make_optimizer(policy, 0.0, 0.0)  # a rate of 0: each way starts from the same weights
    name = torch.cuda.get_device_name() if cuda else "CPU"
    peak = next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
    flags = f"--model - --data - --out - --steps 1 --group-size 8 --max-new-tokens 1024 --micro-tokens {tokens}"
    cfg = train.parse_args(flags.split())
    packed = {}
    for attn in ("flex", "flash"):  # how it is packed; a CPU attends by sdpa
        rollouts = draw_rollouts(config, 4 if args.toy else 32, 8, args.toy)
        packed[attn] = make_batch(rollouts, cfg, config, ctx, tokens, share=attn == "flex")
    [shared] = packed["flex"].minibatches
    trained = sum(len(m.target_K) for m in shared)
    once = flops_of(shared, config, bool(lora))

    def sync() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    for case in cases:
        attn = "flex" if "shared" in case else "flash"
        batch = packed[attn]
        [micros] = batch.minibatches
        policy.attention = attn if cuda else "sdpa"
        flops, computed = flops_of(micros, config, bool(lora)), sum(m.n_tokens for m in micros)
        if "padded" in case:
            columns = batch.tokens.to(ctx.device)
            factors = (columns.weights * columns.advantages).split([len(r.response) for r in batch.rollouts])
            pulled = [(r, f) for r, f in zip(batch.rollouts, factors, strict=True) if f.any()]
            rows = max(1, tokens // max(len(r.prompt.token_ids) + len(r.response) for r, _ in pulled))
            micros = [pulled[i : i + rows] for i in range(0, len(pulled), rows)]
            computed = sum(map(padded_size, micros))

        def backward(some: list, batch=batch, case: str = case) -> float:
            total = 0.0
            for micro in some:
                if "padded" in case:
                    loss = policy(micro)
                else:
                    rows = batch.tokens[micro.token_index_K].to(ctx.device)
                    loss = policy(micro, 1.0, grpo.PolicyLoss(cfg.algo), rows).loss
                loss.backward()
                total += loss.item()
            return total

        began = sync()
        weigh = padded_size if "padded" in case else (lambda m: m.n_tokens)
        backward([max(micros, key=weigh), min(micros, key=weigh), micros[-1]])
        optimizer.zero_grad(set_to_none=True)
        first = sync() - began
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        began = sync()
        if "padded" in case:
            loss = backward(micros)
            norm, _ = train.clipped_step(policy, optimizer, cfg.optim.max_grad_norm)
        else:
            meter = Meter()
            models = Models(policy, optimizer)
            train.update_policy(models, batch, cfg, train.State(), ctx, meter, Skipped(Path("."), ctx))
            metrics = meter.reduce(ctx)
            loss, norm = metrics["loss/policy"], metrics["policy/grad_norm"]
        seconds = sync() - began
        optimizer.zero_grad(set_to_none=True)
        rate = (lambda f, s=seconds: f / s / 1e12 / peak) if peak else (lambda f: math.nan)
        graphs = importlib.import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"] if cuda else 0
        yield {
            "case": case,
            "s": seconds,
            "tokens/s": trained / seconds,
            "computed tokens": computed,
            "micro-batches": len(micros),
            "TFLOP/s": flops / seconds / 1e12,
            "MFU": rate(flops),
            "MFU, prompts once": rate(once),
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
            "grad norm": norm,
            "loss": loss,
            "micro-tokens": tokens,
            "recomputed": "yes" if recompute else "no",
            "first s": first,
            "graphs": graphs,
        }


def child_syncs(cases: list[str], args: argparse.Namespace) -> Iterator[dict]:
    """Warnings of CUDA's synchronisation debug mode in an update of 8 micro-batches less those in one of 4, by 4."""
    from dataclasses import replace

    import torch

    import train
    from model import VisionCache
    from parallel.models import Models
    from parallel.sharding import make_optimizer
    from report.log import Skipped
    from utils import Meter, dist_setup

    ctx, cuda = dist_setup(), torch.cuda.is_available()
    policy, processor = build("toy", ctx, None, False)
    policy.cache = VisionCache(2**30)  # as in training with a frozen tower
    optimizer = make_optimizer(policy, 0.0, 0.0)
    for case in cases:
        policy.attention = case.split(",")[0]
        more = "--algo gspo --kl-coef 0.1 --epochs 2" if "gspo" in case else ""
        cfg = train.parse_args(f"--model - --data - --out - --steps 1 --group-size 8 {more}".split())
        rollouts = draw_rollouts(policy.hf.config, 8, 8, toy=True)
        batch = make_batch(rollouts, cfg, policy.hf.config, ctx, 300, share=policy.attention != "flash")
        models = Models(policy, optimizer, reference=policy if more else None)
        train.compute_before_update(batch, models, cfg)
        if more:  # that was for its columns; what is counted is one pass of updates
            cfg = replace(cfg, algo=replace(cfg.algo, epochs=1))
        [micros] = batch.minibatches

        def count(n: int, batch=batch, micros=micros, models=models, cfg=cfg) -> Counter:
            part = replace(batch, minibatches=[micros[:n]])
            state = train.State(kl_coef=cfg.algo.kl_coef)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if cuda:
                    torch.cuda.set_sync_debug_mode("warn")
                train.update_policy(models, part, cfg, state, ctx, Meter(), Skipped(Path("."), ctx))
                if cuda:
                    torch.cuda.set_sync_debug_mode("default")
            found = [w for w in caught if "called a synchronizing" in str(w.message)]
            return Counter("/".join(Path(w.filename).parts[-2:]) + f":{w.lineno}" for w in found)

        assert len(micros) >= 8, "the toy has too few micro-batches"
        count(8)  # compiles, fills caches
        few, many = count(4), count(8)
        a_micro = {line: n / 4 for line, n in (many - few).most_common()}
        each = sum(a_micro.values())
        most = ", ".join(f"{line} {n:.3g}" for line, n in list(a_micro.items())[:8])
        row = {
            "case": case,
            "a micro-batch": each,
            "an update besides": few.total() - 4 * each,
            "most often": most or "-",
        }
        yield row if cuda else row | {"no CUDA": "nothing to count"}


if __name__ == "__main__":
    given = parse_args()
    if given.child is None:
        main(given)
    else:
        try:
            child(given)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)  # see utils.run_script
