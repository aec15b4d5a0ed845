"""First checks on a new GPU: does README's command run, are the results right, how fast is it? No network is used.

    python benchmarks/gpu.py                                  # all parts in 14 minutes, on one GPU
    python benchmarks/gpu.py --only start,correct             # or in two calls: these parts first,
    python benchmarks/gpu.py --only head,update,memory,sync,waits  # then the others
    python benchmarks/gpu.py --short                          # tiny shapes; works on a CPU too, in a few minutes

The results file (--json) keeps the parts of earlier calls if the machine, the packages and the code are the same.

Parts, the most important first:

1  start    README's commands on a random model with the width, heads and vocabulary of Qwen2.5-VL-3B but 4 layers:
            prepare_data.py, train.py for 2 steps and resumed for a third, eval.py, merge_lora.py
2  correct  tests marked gpu, tests/test_kernels.py, and train.py on toy models for 3 steps: every --attn and --kernel,
            LoRA, PPO, gradient checkpointing, a trained vision tower, a reference, and others
3  head     the policy head at 16384 tokens x 3584 x 152064, against other implementations that are installed
4  update   the update of Qwen2.5-VL-3B, and of 7B with LoRA, on 32 prompts x 8 responses of geo3k-like lengths: packed
            with shared prefixes; the same with --compile; packed without shared prefixes, with --compile
5  memory   the peak memory of updates, against the table of docs/hardware.md
6  sync     the weight sync, from the trainer to an engine in the same process
7  waits    how often a micro-batch of train.update_policy makes the host wait for the GPU

A part runs in child processes. If one crashes, hangs or runs out of memory, its row holds the error and the other parts
still run. Each part has a number of seconds reserved for it, which earlier parts cannot use. If --minutes is too short
for all parts, each gets a proportional share. A part also gets the time that earlier parts left unused. Results are
written to --json after each row, and printed at the end as rows for RESULTS.md. The exit code is 1 if anything failed
or ran out of time. Without a GPU nothing starts, except with --short.

Needs torch >= 2.11, triton >= 3.6, transformers >= 5.17 (5.17 also needs torchvision), safetensors, numpy, pillow,
pyarrow, tqdm and pytest; missing packages are listed. vllm, trl and liger-kernel are used if installed.

Tokens/s are response tokens trained on. MFU is the model's FLOPs by packing.flop_costs, divided by the time and the
datasheet's dense bf16 rate. The FLOPs are one forward pass, two more for the backward pass (one with LoRA, whose base
weights are frozen), the forward pass of the frozen tower, and attention over visible pairs; recomputation is not
counted. Copies of a prompt count if the update computes them; the column "MFU, prompts once" counts each prompt once.
Image features are not cached between updates. An update is timed as a whole, optimizer step included, after a warm-up
on its largest and its smallest micro-batch. The time of the policy head is the minimum over its runs.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

NEEDED = "torch triton transformers safetensors numpy pillow pyarrow tqdm pytest".split()
OPTIONAL = "torchvision trl liger-kernel math-verify vllm flash-attn".split()
PATIENCE = 180  # a child without a new row for this many seconds counts as hung; compiling a 7B takes 77 s
HIDDEN = ("tail", "failures", "flags", "skipped tests", "self-test", "first s", "graphs")  # not in tables
Row = dict[str, Any]


def parse_args() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    p.add_argument("--only", default="", help="comma-separated names or numbers of parts (default: all)")
    p.add_argument("--json", type=Path, default=Path("out/gpu.json"), help="results file, written row by row")
    p.add_argument("--short", "--toy", dest="toy", action="store_true", help="tiny shapes, on a GPU or a CPU")
    p.add_argument("--minutes", type=float, default=14, help="total time limit (default: 14)")
    p.add_argument("--profile", type=Path, help="folder for tables of the slowest operations of each update")
    # For the tests: "correct:crash,waits:hang" makes the children of one part crash and those of another hang
    p.add_argument("--break", dest="broken", default="", help=argparse.SUPPRESS)
    for flag, kind, default in (("child", str, None), ("cases", str, ""), ("rows", Path, None), ("level", int, 0)):
        p.add_argument(f"--{flag}", type=kind, default=default, help=argparse.SUPPRESS)
    return p.parse_args()


# ----------------------------------------------------------------------------------------------------------------------
# The parent: imports nothing that could fail, and never touches the GPU


class Report:
    """The results so far, in a JSON file that is replaced after each row and so is never half written."""

    def __init__(self, path: Path, toy: bool, machine: Row):
        self.path, command = path, f"python {shlex.join(sys.argv)}"
        self.data = {"command": command, "date": time.strftime("%Y-%m-%d"), "toy": toy, "code": hash_code(),
                     "machine": machine, "parts": []}

    def keep_earlier(self, chosen: list["Part"]) -> None:
        """Keep the parts of an existing file that are not run again. Rename the file instead if its machine, packages,
        code or --short differ."""
        if not self.path.exists():
            return
        old = json.loads(self.path.read_text())
        same = all(old.get(key) == self.data[key] for key in ("toy", "code"))
        same &= all(old["machine"].get(key) == self.data["machine"].get(key) for key in ("device", "versions"))
        other_parts = [part for part in old["parts"] if part["name"] not in [part.name for part in chosen]]
        if not same:
            renamed = self.path.rename(f"{self.path}.old")
            print(f"{self.path} differs in machine, packages, code or --short; renamed to {renamed}", flush=True)
        elif other_parts:
            self.data |= {"parts": other_parts, "command": f"{old['command']}; {self.data['command']}"}

    def begin(self, part: "Part") -> Row:
        number = PARTS.index(part) + 1
        self.record = {"part": number, "name": part.name, "title": part.title, "status": "stopped", "seconds": 0.0,
                       "rows": []}
        self.data["parts"] = sorted([*self.data["parts"], self.record], key=lambda record: record["part"])
        self.save()
        return self.record

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(f"{self.path}.tmp")
        temporary.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n")
        temporary.replace(self.path)

    def add(self, row: Row) -> None:
        """Add a row to the current part, and print it."""
        nonfinite = [k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]  # JSON has no NaN
        row |= dict.fromkeys(nonfinite)
        self.record["rows"].append(row)
        self.save()
        values = (f"{k} {cell(v)}" for k, v in row.items() if k not in ("case", *HIDDEN) and v is not None)
        print(f"  {row['case']}: {(row.get('error') or ', '.join(values))[:300]}", flush=True)


def hash_code() -> str:
    """Return a hash of all Python files. A commit id is not enough: there may be no git, or uncommitted changes."""
    files = sorted([*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")])
    return hashlib.sha1(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


class Parent:
    """The process that starts the parts' children, and kills those that hang or run out of time."""

    def __init__(self, args: argparse.Namespace, scratch: Path):
        self.args, self.scratch, self.part, self.children, self.stopped = args, scratch, "", 0, False
        self.broken = dict(item.split(":") for item in args.broken.split(",") if item)
        self.gpu = False
        self.report: Report
        paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1",
                                 "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}

    def use_cpu(self) -> None:
        self.env |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "GPU_TESTS_ON_CPU": "1",
                     "CUDA_VISIBLE_DEVICES": ""}

    def run(self, command: list, until: float, watch: Path | None = None, **env: str) -> tuple[str, str]:
        """Run a child; return what went wrong, or "", and the end of its output. The child and its descendants are
        killed at the time `until`, or if the file `watch`, to which it adds rows, does not grow for PATIENCE s."""
        if time.monotonic() > until:
            return CUT, ""
        patience, command = PATIENCE, list(map(str, command))
        if kind := self.broken.get(self.part):
            patience, watch = 2, Path("-")
            code = {"crash": "os.abort()", "hang": "time.sleep(99)"}[kind]
            command = [sys.executable, "-c", f"import os, time; {code}"]
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(command, cwd=ROOT, env=self.env | env, stdout=output, stderr=subprocess.STDOUT,
                                     start_new_session=True)
            last_growth, size, problem = time.monotonic(), 0, ""
            try:
                while child.poll() is None and not problem:
                    time.sleep(0.1)
                    now, new_size = time.monotonic(), watch.stat().st_size if watch and watch.exists() else 0
                    last_growth, size = (now, new_size) if new_size > size else (last_growth, size)
                    if now > until or self.stopped:
                        problem = "stopped: no time left"
                    elif watch and now - last_growth > patience:
                        problem = f"hung: stopped after {patience} s without a result"
            finally:  # also if a signal stops this process
                kill(child)
            code = child.wait()
            output.seek(max(0, output.seek(0, os.SEEK_END) - 8000))
            tail = output.read().decode(errors="replace")
        if not problem and code:
            problem = f"exit code {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "") + last_error(tail)
        return problem, tail

    def run_case(self, case: str, command: list, until: float, **env: str) -> Row:
        """Run a Python command in a child; return a row with the seconds it took and, if it failed, the error."""
        began = time.monotonic()
        error, tail = self.run([sys.executable, *command], until, **env)
        row = {"case": case, "seconds": time.monotonic() - began} | ({"error": error, "tail": tail} if error else {})
        passed = re.findall(r"^self-test: (.*(?:\n  .*)*)", tail, re.M)
        return row | ({"self-test": " ".join(passed[-1].split())} if passed else {})

    def run_cases(self, cases: list[str], until: float) -> None:
        """Run cases one after another in a child. If a case kills the child, a new child continues with the next case.
        If an update runs out of memory, a new child repeats it at the next of LEVELS, which later cases keep."""
        left, level = list(cases), 0
        while left and time.monotonic() < until:
            self.children += 1
            file = self.scratch / f"rows_{self.children}.jsonl"
            child = [sys.executable, __file__, "--child", self.part, "--cases", ";".join(left), "--rows", file]
            child += ["--profile", self.args.profile] if self.args.profile else []
            error, tail = self.run([*child, "--level", level, *["--toy"] * self.args.toy], until, file)
            rows = read_rows(file)
            for row in rows:
                if "case" in row:
                    self.report.add(row)
            left = [case for case in left if case not in {row.get("case") for row in rows}]
            if left and rows and "oom" in rows[-1] and self.part == "update" and rows[-1]["level"] + 1 < len(LEVELS):
                level = rows[-1]["level"] + 1
            elif left:
                self.report.add({"case": left.pop(0), "error": error or "the child wrote no result", "tail": tail})
        for case in left:
            self.report.add({"case": case, "error": CUT})

    def train(self, case: str, commands: list[list], out: Path, steps: int, until: float, **env: str) -> Row:
        """Run commands that train into the folder `out`, and return a row of what they logged."""
        seconds, n_earlier = 0.0, len(read_rows(out / "metrics.jsonl"))
        for command in commands:
            row = self.run_case(case, command, until, **env)
            row["seconds"] = seconds = seconds + row["seconds"]
            if "error" in row:
                return row
        logged = [r for r in read_rows(out / "metrics.jsonl")[n_earlier:] if "policy/grad_norm" in r]
        norms = [r["policy/grad_norm"] for r in logged]
        if len(logged) != steps or not all(n is not None and math.isfinite(n) and n > 0 for n in norms):
            return row | {"error": f"{len(logged)} of {steps} steps, gradient norms {norms}"}
        row |= {"s a step": logged[-1]["time/step"], "grad norm": norms[-1]}
        row |= {"largest dlogp": max(r["mismatch/max_abs_logprob_diff"] for r in logged)}
        row |= {"peak GiB": logged[-1]["memory/peak_gib"]} if "memory/peak_gib" in logged[-1] else {}
        return row


CUT = "cut: no time left"


def kill(child: subprocess.Popen) -> None:
    """Kill a child and its descendants. SIGABRT comes first, as Python then prints its stack (PYTHONFAULTHANDLER)."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        if child.poll() is None:
            os.killpg(child.pid, number)
            time.sleep(0.5)


def last_error(output: str) -> str:
    """Return ": " and the last line that names an error, or the last line if none does; "" for no output."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and "ChildFailedError" not in line]
    error_lines = [line for line in lines if "Error" in line or "No module" in line or line.startswith("error:")]
    return "".join(f": {line[:200]}" for line in (error_lines or lines)[-1:])


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a JSON Lines file, without an incomplete last line."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


# ----------------------------------------------------------------------------------------------------------------------
# Parts


def readme_flags() -> list[str]:
    """Return the flags of the train.py command in README.md."""
    command = re.search(r"^torchrun .*?train\.py ((?:.*\\\n)*.*)", (ROOT / "README.md").read_text(), re.M)
    return shlex.split(command[1].replace("\\\n", " "))


# These override README's values, for a few short steps
START = "--steps 2 --prompts-per-step 8 --max-new-tokens 128 --save-every 2 --min-pixels 250000"
SHORT_START = "--steps 2 --prompts-per-step 4 --max-new-tokens 4 --save-every 2 --micro-tokens 400"


def part_start(p: Parent, until: float) -> None:
    folder, size = p.scratch / "start", "toy" if p.args.toy else "3B, 4 layers"
    model, data, out = folder / "model", folder / "train.parquet", folder / "run"
    task = "geo3k" if importlib.util.find_spec("math_verify") else "vqa"  # vqa's answers need no math-verify
    setup = {
        "random model": [__file__, "--child", "model", "--rows", model, "--cases", size],
        "prepare_data.py": ["prepare_data.py", task, "--toy", "--n", 32, "--out", data],
    }
    with ThreadPoolExecutor() as pool:
        for row in list(pool.map(lambda item: p.run_case(*item, until), setup.items())):
            p.report.add(row)
    reward = ["--reward", f"{model / 'reward.py'}:score"]  # a reward that differs between random answers
    flags = [*readme_flags(), "--model", model, "--data", data, "--eval-data", data, "--out", out, *reward]
    flags += (SHORT_START if p.args.toy else START).split()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1, "train.py"]
    row = p.train("train.py", [[*torchrun, *flags]], out, 2, until)
    p.report.add(row | {"flags": shlex.join(map(str, flags))})
    if "error" in row:
        return
    resume = ["train.py", "--out", out, "--resume", "auto", *reward, "--steps", 3]
    p.report.add(p.train("resumed", [resume], out, 1, until))
    after = {
        "eval.py": ["eval.py", out, "--data", data, "--baseline", model, *reward, "--out", out / "eval"],
        "merge_lora.py": ["merge_lora.py", out, "--out", folder / "merged"],
    }
    for case, command in after.items() if p.gpu or not p.args.toy else ():  # on a CPU, other tests cover these
        p.report.add(p.run_case(case, command, until))
    shutil.rmtree(folder)  # checkpoints are large


TESTS = {  # case -> (file, expression for pytest's -k)
    "tests: head": ("tests/test_gpu.py", "float64 or nothing_to_learn"),
    "tests: attention": ("tests/test_gpu.py", "dense_mask"),
    "tests: models": ("tests/test_gpu.py", "run_by_run"),
    "tests: bf16 ratios": ("tests/test_gpu.py", "ratios"),
    "tests: kernels": ("tests/test_kernels.py", "not compile"),
}
BASE = (
    "--steps 3 --prompts-per-step 8 --group-size 4 --max-new-tokens 16 --max-prompt-tokens 100 --micro-tokens 400 "
    "--lr 1e-4 --rollout hf --dtype bfloat16 --weight-decay 0 "
)
RUNS = {  # name -> flags; a "/" begins a second run into the same folder
    "flex, triton": "--attn flex --kernel triton",
    "flash, triton": "--attn flash --kernel triton",
    "LoRA with KL": "--attn flex --lora-rank 8 --kl-coef 0.05",
    "resumed": "--attn flex --steps 2 --save-every 1 / --attn flex --resume auto",
    "flex, torch": "--attn flex --kernel torch",
    "flash, torch": "--attn flash --kernel torch",
    "PPO, value head": "--attn flex --algo ppo --update-epochs 2",
    "PPO, separate critic": "--attn flex --algo ppo --update-epochs 2 --algo-args critic=separate",
    "recomputed activations": "--attn flex --gradient-checkpointing",
    "tower trained": "--attn flex --train-vision all",
    "reference, KL": "--attn flex --kl-coef 0.05",
    "GSPO, 2 minibatches": "--attn flex --algo gspo --minibatches 2",
    "sdpa, triton": "--attn sdpa --kernel triton",
    "offloaded to the CPU": "--attn flex --offload all",
    "compiled blocks": "--attn flex --compile --update-epochs 2",
    "bf16 weights": "--attn flex --master-dtype bf16 --algo-args tis_cap=2",
    "Qwen3-VL": "--attn flex --family qwen3_vl",
    "Qwen3.5": "--attn flex --family qwen3_5",
}
SHORT_RUNS = ("LoRA with KL",)
# Number of children of part_correct that run at once, as they mostly wait for compilers; so their times are not those
# of a machine of their own
AT_ONCE = 12


def part_correct(p: Parent, until: float) -> None:
    tests, runs = TESTS, {name: split_family(flags) for name, flags in RUNS.items()}
    if p.args.toy:
        chosen = "nothing_to_learn or sdpa" if p.gpu else "test"  # all: on a CPU their cases are small
        tests, runs = {"tests": ("tests/test_gpu.py", chosen)}, {name: runs[name] for name in SHORT_RUNS}
    folder, at_once = p.scratch / "toys", 2 if p.args.toy else AT_ONCE
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once))}
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(run_tests, p, case, *args, until, **threads) for case, args in tests.items()]
        families = ";".join(sorted({family for family, _ in runs.values()}))
        make = [__file__, "--child", "toys", "--rows", folder, "--cases", families]
        p.report.add(p.run_case("toy models and data", make, until))
        futures += [pool.submit(run_toy, p, folder, name, *args, until, **threads) for name, args in runs.items()]
        for row in as_completed(futures):
            p.report.add(row.result())


def split_family(flags: str) -> tuple[str, str]:
    """Return the model family of a run of RUNS, and its flags without --family."""
    family = re.search(r"--family (\S+)", flags)
    return family[1] if family else "qwen2_5_vl", re.sub(r"--family \S+", "", flags)


def run_toy(p: Parent, folder: Path, name: str, family: str, flags: str, until: float, **env: str) -> Row:
    if not p.gpu:  # keep to what a CPU can run
        flags = re.sub("flex|flash", "sdpa", flags).replace("triton", "torch")
    out = folder / "runs" / re.sub(r"\W+", "_", name)
    base = ["train.py", *toy_data(folder, family), "--out", out, *BASE.split()]
    commands = [[*base, *part.split()] for part in flags.split(" / ")]
    return p.train(name, commands, out, 3, until, **env) | {"flags": flags}


def toy_data(folder: Path, family: str) -> list:
    """Return the flags with which train.py uses the files of make_toys."""
    reward = f"{folder / 'reward.py'}:score"
    return ["--model", folder / family, "--data", folder / "train.parquet", "--reward", reward]


def run_tests(p: Parent, case: str, file: str, chosen: str, until: float, **env: str) -> Row:
    """Run tests in a child; return a row with their outcomes. This file is a pytest plugin there, and writes a row as
    each test ends."""
    rows, began = p.scratch / (re.sub(r"\W+", "_", case) + ".jsonl"), time.monotonic()
    command = [sys.executable, "-m", "pytest", "-p", "gpu", "-p", "no:cacheprovider", "-k", chosen, file]
    problem, tail = p.run(command, until, rows, GPU_BENCH_ROWS=str(rows), **env)
    results = read_rows(rows)
    count = Counter(row["outcome"] for row in results)
    row = {"case": case, **{kind: count[kind] for kind in ("passed", "failed", "skipped")}}
    row |= {"seconds": time.monotonic() - began}
    skipped = Counter(test["test"].split("[")[0] for test in results if test["outcome"] == "skipped")
    row |= {"skipped tests": dict(skipped)} if skipped else {}
    failed = [test["test"] for test in results if test["outcome"] == "failed"]
    if problem or failed or not count["passed"]:
        names = f" ({', '.join(failed[:5])})" if failed else ""
        error = f"{count['passed']} passed, {count['failed']} failed{names}" + (f"; {problem}" if problem else "")
        row |= {"error": error, "failures": failed, "tail": tail}
    return row


def pytest_runtest_logreport(report) -> None:
    """Write a row if a test has ended. pytest calls this hook, see run_tests."""
    has_ended = report.when == "call" or (report.when == "setup" and report.outcome != "passed")
    if has_ended and "GPU_BENCH_ROWS" in os.environ:
        with open(os.environ["GPU_BENCH_ROWS"], "a") as file:
            file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome}) + "\n")


HEADS = (
    "ours fused loss", "ours any loss", "torch linear_cross_entropy", "Liger scaled CE",
    "TRL chunked", "naive", "naive 16-bit logits", "verl FusedLinearForPPO", "Apple CCE", "ours plain torch",
)


def part_head(p: Parent, until: float) -> None:
    p.run_cases(["ours fused loss", "naive", "Apple CCE"] if p.args.toy else list(HEADS), until)


UPDATES = (  # each line runs in one process, which builds its model once
    ("3B shared prefix", "3B shared prefix, compiled", "3B packed, compiled"),
    ("7B LoRA shared prefix", "7B LoRA shared prefix, compiled", "7B LoRA packed, compiled"),
)


def part_update(p: Parent, until: float) -> None:
    updates = UPDATES[-1:] if p.args.toy else UPDATES
    for i, cases in enumerate(updates):
        now = time.monotonic()
        p.run_cases(list(cases), now + (until - now) / (len(updates) - i))


MEMORY = {  # row of benchmarks/memory.py -> row of the table in docs/hardware.md
    "3B 1 GPU": "3B on 1 GPU",
    "7B 1 GPU, LoRA 64, bf16 masters": "7B on 1, `--lora-rank 64 --master-dtype bf16`",
    "7B 8 GPUs": "7B on 8",
    "3B 8 GPUs": "3B on 8",
}
TOY_MEMORY = "toy 2 GPUs"


def computed_memory(name: str) -> dict[str, float]:
    """Return the GiB at rest, at the peak and reserved of docs/hardware.md, for micro-batches of 8,192 tokens."""
    lines = (ROOT / "docs/hardware.md").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"| {MEMORY[name]} |")]
    return dict(zip(("at rest", "peak", "reserved"), map(float, line.split("|")[2:5]), strict=True))


def part_memory(p: Parent, until: float) -> None:
    if not p.gpu:
        p.report.add({"case": TOY_MEMORY, "no CUDA": "nothing to measure"})
        return
    for name in [TOY_MEMORY] if p.args.toy else MEMORY:
        tokens = 300 if p.args.toy else 8192
        child = [sys.executable, "benchmarks/memory.py", "--child", name, "--tokens", tokens, "--recompute"]
        problem, tail = p.run(child, until)
        result_lines = [line for line in tail.splitlines() if line.startswith("{")]
        if problem or not result_lines:
            p.report.add({"case": name, "error": problem or "no result", "tail": tail})
            continue
        measured, computed = json.loads(result_lines[-1]), {} if p.args.toy else computed_memory(name)
        row = {"case": name, "tokens": measured["tokens"]}
        for key in ("at rest", "peak", "reserved"):
            row |= {f"{key}, GiB": measured[key]} | ({f"{key}, table": computed[key]} if computed else {})
        p.report.add(row | {"outside of torch, GiB": measured["in use"] - measured["reserved"]})


def part_sync(p: Parent, until: float) -> None:
    p.run_cases(["toy, hf", "toy, vllm"] if p.args.toy else ["3B, hf", "7B LoRA, hf", "3B, vllm"], until)


def part_waits(p: Parent, until: float) -> None:
    p.run_cases(["flex", "flash", "flex, gspo, KL"] if p.gpu else ["sdpa"], until)


class Part(NamedTuple):
    name: str
    title: str
    seconds: int  # reserved for it: earlier parts cannot use them
    run: Callable[[Parent, float], None]
    needs: tuple[str, ...] = ()  # packages to look for first; in other parts the children report what is missing


PARTS = (
    Part("start", "README's commands", 170, part_start),
    Part("correct", "Tests, and train.py on toys", 155, part_correct, ("pytest", "triton")),
    Part("head", "The policy head", 60, part_head),
    Part("update", "The update", 300, part_update),
    Part("memory", "Memory of the update", 90, part_memory),
    Part("sync", "The weight sync", 25, part_sync),
    Part("waits", "Host synchronisations", 30, part_waits),
)


def choose(only: str) -> list[Part]:
    """Return the parts that --only names, in their order."""
    known = {key: part for i, part in enumerate(PARTS, 1) for key in (str(i), part.name)}
    requested = only.split(",") if only else list(known)
    if unknown := [key for key in requested if key not in known]:
        names = ", ".join(f"{i} {part.name}" for i, part in enumerate(PARTS, 1))
        sys.exit(f"error: --only {unknown[0]}: no such part; choose from {names}")
    return [part for part in PARTS if part in [known[key] for key in requested]]


def main(args: argparse.Namespace) -> None:
    chosen, deadline = choose(args.only), time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as scratch:
        p = Parent(args, Path(scratch))

        def stop(number: int, _) -> None:
            p.stopped = True  # makes the threads of parts end their children
            sys.exit(128 + number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        hardware = machine(p)
        p.gpu = "memory_gib" in hardware
        if not p.gpu and not args.toy:
            sys.exit(f"error: there is no GPU to measure ({hardware['device']}); --short runs tiny shapes on a CPU")
        if not p.gpu:
            p.use_cpu()
        p.report = Report(args.json, args.toy, hardware)
        p.report.keep_earlier(chosen)
        try:
            for i, part in enumerate(chosen):
                left, wanted = deadline - time.monotonic(), [other.seconds for other in chosen[i:]]
                reserved = 0 if args.toy else sum(wanted[1:]) * min(1.0, left / sum(wanted))
                run_part(p, part, left - reserved)
        finally:
            p.report.save()
            print("\n" + markdown(p.report.data), flush=True)
    records = [record for record in p.report.data["parts"] if record["name"] in [part.name for part in chosen]]
    bad = [f"{record['name']} ({record['status']})" for record in records if record["status"] not in ("ok", "no CUDA")]
    if bad:
        sys.exit(f"error: {', '.join(bad)}")


def run_part(p: Parent, part: Part, seconds: float) -> None:
    p.part, start = part.name, time.monotonic()
    record = p.report.begin(part)
    print(f"part {record['part']}, {part.name}: up to {max(0.0, seconds):.0f} s", flush=True)
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        remedy = "pip install -c requirements.txt -r requirements-dev.txt, or bring the wheels"
        p.report.add({"case": "not started", "error": f"{' and '.join(missing)} missing: {remedy}"})
    elif seconds > 5:
        part.run(p, start + seconds)
    rows = record["rows"]
    failed = sum("error" in row for row in rows)
    record["status"] = f"{failed} of {len(rows)} failed" if failed else "ok" if rows else "cut"
    if rows and all("no CUDA" in row for row in rows):
        record["status"] = "no CUDA"
    record["seconds"] = time.monotonic() - start
    p.report.save()


def machine(p: Parent) -> Row:
    """Return the hardware, as a child finds it, and package versions. Print which packages are missing."""
    versions, missing = {"python": platform.python_version()}, []
    for name in (*NEEDED, *OPTIONAL):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    needed = [*NEEDED, *["torchvision"] * versions.get("transformers", "").startswith("5.17")]
    if needed_missing := [name for name in needed if name in missing]:
        print(f"missing packages, install them or bring their wheels: {', '.join(needed_missing)}", flush=True)
    file = p.scratch / "machine.jsonl"
    child = [sys.executable, __file__, "--child", "machine", "--rows", file, *["--toy"] * p.args.toy]
    problem, tail = p.run(child, time.monotonic() + 120)  # the first import of torch may take a minute
    rows = read_rows(file)
    if not rows:
        sys.exit(f"{tail}\nerror: could not look for a GPU: {problem}")
    return {"versions": versions, "missing": missing, **rows[0]}


def markdown(data: Row) -> str:
    """Return rows for RESULTS.md."""
    m, versions = data["machine"], data["machine"]["versions"]
    facts = [f"`{data['command']}`, {data['date']}: {m['device']}"]
    facts += [f"{m['memory_gib']:.0f} GiB"] if "memory_gib" in m else []
    facts += [f"{name} {versions[name]}" for name in ("torch", "triton", "transformers") if name in versions]
    if "matmul_tflops" in m:
        peak = m["peak_tflops"] or "unknown"
        facts += [f"bf16 product of 8192 x 8192 x 8192 at {m['matmul_tflops']:.0f} TFLOP/s (datasheet {peak})"]
    lines = ["Tiny shapes: shows only that everything runs.", ""] if data["toy"] else []
    lines += [", ".join([*facts, f"{sum(record['seconds'] for record in data['parts']):.0f} s"])]
    for record in data["parts"]:
        lines += ["", f"{record['part']}. {record['title']}: {record['status']}, {record['seconds']:.0f} s", ""]
        good = [row for row in record["rows"] if "error" not in row]
        if good:
            columns = [key for key in dict.fromkeys(chain.from_iterable(good)) if key not in HIDDEN]
            lines += ["| " + " | ".join("" if c == "case" else c for c in columns) + " |"]
            lines += ["|---|" + "--:|" * (len(columns) - 1)]
            lines += ["| " + " | ".join(cell(row.get(c)) for c in columns) + " |" for row in good]
        for row in record["rows"]:
            skipped = ", ".join(f"{t.split('::')[-1]} x {n}" for t, n in row.get("skipped tests", {}).items())
            lines += [f"- {row['case']}, skipped: {skipped}"] if skipped else []
            lines += [f"- {row['case']}, {key}: {row[key]}" for key in ("error", "self-test") if key in row]
    return "\n".join(lines)


def cell(x: Any) -> str:
    if isinstance(x, float):
        return f"{x:.3g}" if abs(x) < 100 else f"{x:.0f}"
    return "" if x is None else str(x)


# ----------------------------------------------------------------------------------------------------------------------
# The children


def child(args: argparse.Namespace) -> None:
    cases = args.cases.split(";") if args.cases else []
    if args.child in ("model", "toys"):
        {"model": make_model, "toys": make_toys}[args.child](args.rows, *cases)
        return
    children = {"machine": child_machine, "head": child_head, "update": child_update, "sync": child_sync,
                "waits": child_waits}

    def write(row: Row) -> None:
        with open(args.rows, "a") as file:
            file.write(json.dumps(row) + "\n")

    import torch

    try:
        for row in children[args.child](cases, args):
            write(row)
    except torch.OutOfMemoryError as error:  # what it leaves allocated would spoil later figures of this process
        write({"oom": str(error).splitlines()[0], "level": args.level})
        raise


def child_machine(cases: list[str], args: argparse.Namespace) -> Iterator[Row]:
    import torch

    if not torch.cuda.is_available():
        yield {"device": f"no CUDA device, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"}
        return
    n = 256 if args.toy else 8192
    name, x, times = torch.cuda.get_device_name(), torch.randn(n, n, device="cuda", dtype=torch.bfloat16), []
    for _ in range(10):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        x @ x
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    row = {"device": name, "memory_gib": memory, "cuda": torch.version.cuda, "peak_tflops": peak_tflops(name)}
    median = sorted(times)[5]
    yield row | ({"matmul_tflops": 2 * n**3 / median / 1e9} if median and not args.toy else {})


def peak_tflops(device: str) -> float | None:
    from report.gpus import peak_flops

    peak = peak_flops(device)
    return peak and peak / 1e12


def make_toys(folder: Path, *families: str) -> None:
    """Write random toy models, images, and a reward that differs between random answers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import demo
    from tasks.shapes import shapes_rows

    for family in families:
        demo.make_model(folder / family, family, vocab=640)
    pq.write_table(pa.Table.from_pylist(list(shapes_rows(24, "train", 0))), folder / "train.parquet")
    write_reward(folder)


def write_reward(folder: Path) -> None:
    score = "def score(response, example):\n    return {'reward': (len(response) * 7919 % 5) / 4}\n"
    (folder / "reward.py").write_text(score)


def make_model(folder: Path, size: str) -> None:
    """Write a model of one of the sizes in TEXT: random weights, a toy's tokenizer and processor; and a reward."""
    import torch
    import transformers

    import demo
    from parallel.loading import save_hf

    demo.make_model(folder, vocab=640)
    toy, config = transformers.AutoConfig.from_pretrained(folder), config_of(size)
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(config, name, getattr(toy, name))
    for name in ("eos_token_id", "pad_token_id"):
        setattr(config.text_config, name, getattr(toy.text_config, name))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        hf = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    hf.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    save_hf(hf, folder)
    write_reward(folder)


def child_head(cases: list[str], args: argparse.Namespace) -> Iterator[Row]:
    import policy_head as bench
    import torch

    shape, dtype, repeats = (16384, 3584, 152064), torch.bfloat16, 7
    if args.toy:
        shape, dtype, repeats = (64, 32, 1000), dtype if bench.GPU else torch.float32, 1
    inputs = bench.make_inputs(shape, dtype)
    small = bench.make_inputs((min(shape[0], 512), shape[1], min(shape[2], 32768)), dtype)
    doubles = tuple(x.cpu() if x.dtype == torch.long else x.double().cpu() for x in small)
    exact = bench.run_once(bench.naive_64, doubles, "full")
    for name in cases:
        implementations, missing = bench.load_implementations([name])
        if not implementations:
            yield {"case": name, "not here": " ".join(missing) or "needs a GPU"}
            continue
        row = {"case": name}
        try:
            for mode in ("score", "frozen", "full"):
                runs = [bench.time_once(implementations[name], inputs, mode) for _ in range(repeats + 1)]
                row[f"{mode}, ms"] = 1e3 * min(runs[1:])
            if bench.GPU:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                bench.run_once(implementations[name], inputs, "full")
                row["extra MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            errors = bench.errors(implementations[name], small, exact)
            row |= zip(("logp", "entropy", "d hidden", "d weight"), errors, strict=True)
        except (RuntimeError, ImportError) as error:  # other implementations may fail, ours must not
            if name.startswith("ours"):
                raise
            row["not here"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        yield row


# (tokens of a micro-batch, recompute activations?); an update that runs out of memory is repeated at the next level
LEVELS = [(8192, False), (8192, True), (4096, True), (2048, True)]
SHAPE = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size".split()
TEXT = {
    "3B": (2048, 36, 16, 2, 11008, 151936),
    "3B, 4 layers": (2048, 4, 16, 2, 11008, 151936),
    "7B": (3584, 28, 28, 4, 18944, 152064),
    "8B": (4096, 36, 32, 8, 12288, 151936),
    "32B": (5120, 64, 40, 8, 27648, 152064),
    "30B-A3B": (2048, 48, 32, 4, 6144, 151936),
    "toy": (128, 2, 4, 2, 256, 640),
}
EXPERTS = dict(head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)
VISION = dict(depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, window_size=112,
              fullatt_block_indexes=[7, 15, 23, 31], patch_size=14)
QWEN3_VISION = dict(depth=27, hidden_size=1152, num_heads=16, intermediate_size=4304, patch_size=16,
                    num_position_embeddings=2304, deepstack_visual_indexes=[8, 16, 24])
OTHER_VISION = {  # sizes whose tower is not VISION
    "8B": QWEN3_VISION,
    "30B-A3B": QWEN3_VISION,
    "32B": VISION | dict(intermediate_size=3456),
    "3B, 4 layers": VISION | dict(depth=8, fullatt_block_indexes=[7]),
    "toy": VISION | dict(depth=2, hidden_size=64, num_heads=4, intermediate_size=96, fullatt_block_indexes=[1]),
}
PAD, IMAGE, BEGIN, END, EOS = range(5)  # token ids, the same for all sizes


def config_of(size: str):
    """Return the configuration of Qwen2.5-VL 3B, 7B or 32B or Qwen3-VL 8B or 30B-A3B, or of a smaller model."""
    import transformers

    text = dict(zip(SHAPE, TEXT[size], strict=True)) | (EXPERTS if size == "30B-A3B" else {})
    half = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"]) // 2
    section = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
    vision = OTHER_VISION.get(size, VISION) | {"out_hidden_size": text["hidden_size"]}
    text |= {"rope_parameters": rope, "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": EOS}
    ids = dict(image_token_id=IMAGE, video_token_id=PAD, vision_start_token_id=BEGIN, vision_end_token_id=END)
    kind = {"8B": "Qwen3VL", "30B-A3B": "Qwen3VLMoe"}.get(size, "Qwen2_5_VL")
    config_class = getattr(transformers, f"{kind}Config")
    return config_class(text_config=text, vision_config=vision, tie_word_embeddings=size.startswith("3B"), **ids)


def build(size: str, ctx, lora, recompute: bool, parallel=None, master=None):
    """Return a policy with random weights, sharded as in train.py, and a processor. Weights are created on the device;
    the only file is a config. `master` is the dtype of the master weights (default: fp32, with LoRA bf16)."""
    import torch

    from layers.lora import add_lora
    from model import Policy
    from parallel import loading
    from parallel.sharding import DEFAULT_PARALLEL, apply_fsdp

    master = master or (torch.bfloat16 if lora else torch.float32)
    banned = lambda v: torch.tensor([*range(EOS), v - 1])  # noqa: E731
    config = config_of(size)
    settings = {"banned_token_ids": banned, "patcher": patcher_of(config)}
    processor = SimpleNamespace(merge_size=2, image_token_id=IMAGE, eos_ids=[EOS], **settings)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        hf = loading.build_meta_model(folder, master)
    policy = Policy(add_lora(hf, lora) if lora else hf, processor)
    if recompute:
        policy.hf.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    apply_fsdp(policy, ctx.device, torch.bfloat16, parallel or DEFAULT_PARALLEL)
    loading.match_parameters = lambda *_: {}  # no file has weights
    loading.find_nonfinite = lambda *_: None  # the memory is uninitialized until the weights are drawn below
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


def patcher_of(config):
    """Return the patcher of images for a model of this configuration."""
    import torch

    from model import Patcher

    vision = config.vision_config
    return Patcher(torch.linspace(-2, 2, 256).repeat(3, 1), vision.patch_size, 2, vision.temporal_patch_size)


def noisy_image(key: str, side: int, config):
    """Return an image of noise with side x side image tokens."""
    import numpy as np
    from PIL import Image

    from model import ImageInput

    patcher, rng = patcher_of(config), np.random.default_rng(side)
    width = 2 * side * patcher.patch
    pixels = Image.fromarray(rng.integers(0, 256, (width, width, 3), dtype=np.uint8))
    return ImageInput(key, pixels, (1, 2 * side, 2 * side), side * side, patcher)


def draw_rollouts(config, n_prompts: int, group: int, toy: bool) -> list:
    """Return rollouts with lengths as in benchmarks/balance.py, kept within 109 to 700 tokens of prompt and 200 to 1000
    of response."""
    import numpy as np

    from rollout import Prompt, Rollout

    rng, shrink, rollouts = np.random.default_rng(0), 0.1 if toy else 1.0, []
    for p in range(n_prompts):
        n = int(shrink * np.clip(np.exp(rng.normal(np.log(361), 0.5)), 109, 700))
        side = max(1, round(math.sqrt(n * rng.uniform(0.2, 0.9))) - 1)
        image = noisy_image(str(p), side, config)
        text = rng.integers(5, 600, max(1, n - side * side - 2)).tolist()
        ids = [BEGIN, *[IMAGE] * side * side, END, *text]
        prompt = Prompt(f"p{p:03}", ids, [image], None, [])
        for g in range(group):
            length = int(shrink * np.clip(np.exp(rng.normal(np.log(326), 0.75)), 200, 1000))
            response = rng.integers(5, config.text_config.vocab_size - 1, length).tolist()
            rewards = {"reward": float(rng.integers(0, 2) if g else p % 2)}
            rollouts.append(Rollout(prompt, g, response, [True] * length, [-12.0] * length, "stop", "", rewards))
    return rollouts


def make_batch(rollouts: list, cfg, config, ctx, tokens: int, share: bool):
    """Return the batch that train.py would pack from these rollouts, with their advantages."""
    import grpo
    import train
    from packing import Packer, TrainBatch, flop_costs, make_token_batch
    from utils import Meter

    algo = cfg.algo
    n_tokens = [len(r.response) for r in rollouts]
    weights = grpo.token_weights(n_tokens, [True] * len(rollouts), algo.loss_agg, cfg.rollout.max_new_tokens)
    trains = grpo.has_gradient(
        train.reshape_to_groups([r.reward for r in rollouts], algo), ["stop"] * len(rollouts), algo
    )
    packer = Packer(tokens, IMAGE, flop_costs(config), share)
    micros = packer.pack(rollouts, [i for i, t in enumerate(trains) if t])
    batch = TrainBatch(rollouts, make_token_batch(rollouts, weights), [micros])
    train.set_advantages(batch, algo, 0.0, ctx, Meter())
    return batch


def flops_of(micros: list, config, lora: bool) -> float:
    """Return the FLOPs of an update by these micro-batches, counted as the top of this file says."""
    import torch

    from packing import flop_costs

    costs = flop_costs(config)
    products = sum(costs.token * m.n_tokens + costs.trained_token * len(m.target_K) for m in micros)
    pairs = costs.pair * sum(int((m.subtree_end_T - torch.arange(m.n_tokens)).sum()) for m in micros)
    patches = [math.prod(image.grid_thw) for image in chain.from_iterable(m.images for m in micros)]
    tower = sum(n * (costs.patch + costs.image_pair * n + costs.window_pair * min(n, costs.window)) for n in patches)
    return (2 if lora else 3) * products + 3 * pairs + tower


def synchronize() -> float:
    """Wait for the GPU, and return the time in seconds."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def child_update(cases: list[str], args: argparse.Namespace) -> Iterator[Row]:
    import torch

    import train
    from layers.attention import compile_blocks
    from layers.lora import LoraConfig
    from packing import TrainBatch
    from parallel.models import Models
    from parallel.sharding import make_optimizer
    from report.log import SkippedUpdates
    from utils import Meter, setup_distributed

    ctx, cuda = setup_distributed(), torch.cuda.is_available()
    size, lora = "toy" if args.toy else cases[0].split()[0], LoraConfig(64, 32.0) if "LoRA" in cases[0] else None
    if cuda and args.level == 0 and torch.cuda.get_device_properties(0).total_memory < 100 * 2**30:
        args.level = 1  # level 0 is known not to fit
    tokens, recompute = LEVELS[args.level]
    tokens = 300 if args.toy else tokens
    config = config_of(size)
    policy, processor = build(size, ctx, lora, recompute)
    optimizer = make_optimizer(policy, 0.0, 0.0)  # a learning rate of 0: each case starts from the same weights
    peak = peak_tflops(torch.cuda.get_device_name()) if cuda else None
    flags = f"--model - --data - --out - --steps 1 --group-size 8 --max-new-tokens 1024 --micro-tokens {tokens}"
    cfg = train.parse_args(flags.split())
    packed = {}
    for attn in ("flex", "flash"):  # it decides how rollouts are packed; on a CPU, attention itself is sdpa
        rollouts = draw_rollouts(config, 4 if args.toy else 32, 8, args.toy)
        packed[attn] = make_batch(rollouts, cfg, config, ctx, tokens, share=attn == "flex")
    [shared] = packed["flex"].minibatches
    trained = sum(len(m.target_K) for m in shared)

    for case in cases:
        attn = "flex" if "shared" in case else "flash"
        batch, models = packed[attn], Models(policy, optimizer)
        [micros] = batch.minibatches
        policy.attention = attn if cuda else "sdpa"
        blocks = policy.hf.get_submodule(f"{policy.hf.family.language}.{policy.hf.family.blocks}")
        if cuda and "compiled" in case and "forward" not in vars(blocks[0]):  # on a CPU it would take minutes
            compile_blocks(blocks)

        def update(batch: TrainBatch, models=models) -> dict[str, float]:
            meter = Meter()
            train.update_policy(models, batch, cfg, train.TrainState(), ctx, meter, SkippedUpdates(Path("."), ctx))
            models.zero_grad()
            return meter.reduce(ctx)

        began = synchronize()
        fullest, emptiest = max(micros, key=lambda m: m.n_tokens), min(micros, key=lambda m: m.n_tokens)
        update(replace(batch, minibatches=[[fullest, emptiest]]))
        first = synchronize() - began
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        began = synchronize()
        metrics = update(batch)
        seconds = synchronize() - began
        flops = flops_of(micros, config, bool(lora))
        rates = {"MFU": flops, "MFU, prompts once": flops_of(shared, config, bool(lora))} if peak else {}
        graphs = importlib.import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"] if cuda else 0
        row = {"case": case, "s": seconds, "tokens/s": trained / seconds}
        row |= {"computed tokens": sum(m.n_tokens for m in micros)}
        row |= {"micro-batches": len(micros), "TFLOP/s": flops / seconds / 1e12}
        row |= {name: n / seconds / 1e12 / peak for name, n in rates.items()}
        row |= {"peak GiB": torch.cuda.max_memory_allocated() / 2**30} if cuda else {}
        row |= {"grad norm": metrics["policy/grad_norm"], "loss": metrics["loss/policy"]}
        row |= {"micro-tokens": tokens, "recomputed": "yes" if recompute else "no"}
        yield row | {"first s": first, "graphs": graphs}
        if args.profile:
            two = replace(batch, minibatches=[[fullest, emptiest]])
            write_profile(args.profile / f"{case.replace(' ', '_')}.txt", lambda two=two, update=update: update(two))


def write_profile(file: Path, run: Callable[[], Any]) -> None:
    """Call run() twice, and write its time, the total time of its GPU kernels, and its slowest operations to a file.

    The first call is timed without the profiler. The second one gives the kernel time and two tables: the operations
    with the most GPU time, and those with the most CPU time.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    began = synchronize()
    run()
    seconds = synchronize() - began
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        synchronize()
    events = profiler.key_averages()
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    busy = sum(event.self_device_time_total for event in on_gpu) / 1e6
    tables = [
        events.table(sort_by=key, row_limit=40, max_name_column_width=90)
        for key in ("self_device_time_total", "self_cpu_time_total")
    ]
    title = f"the largest and the smallest micro-batch in {seconds:.3f} s, of which kernels run {busy:.3f} s"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([title, *tables]))


def child_sync(cases: list[str], args: argparse.Namespace) -> Iterator[Row]:
    """Time weight syncs to a sleeping engine, as in a training step. The first sync sends frozen weights too."""
    from functools import partial

    import torch
    import transformers

    from engines.hf import HFEngine
    from engines.launch import make_engine, size_limits
    from layers.lora import LoraConfig
    from model import Processor
    from parallel.sharding import FullParameters
    from rollout import ExampleList
    from utils import setup_distributed

    ctx = setup_distributed()
    for case in cases:
        model, kind = case.split(", ")
        if kind == "vllm" and importlib.util.find_spec("vllm") is None:
            yield {"case": case, "not here": "vLLM is not installed"}
            continue
        size = model.split()[0]
        policy, processor = build(size, ctx, LoraConfig(64, 32.0) if "LoRA" in model else None, True)
        settings, folder = ["load_format=dummy", "gpu_memory_utilization=0.3"], Path(tempfile.mkdtemp())
        if kind == "hf":
            with ctx.device:
                hf = transformers.AutoModelForImageTextToText.from_config(config_of(size), dtype=torch.bfloat16)
            engine = HFEngine(hf, processor, ctx.device)
        else:
            make_model(folder / "model", size)
            processor = Processor(str(folder / "model"))
            # makes vLLM keep the vision tower
            image = SimpleNamespace(images=[None], image_sizes=[(448, 448)], video_sizes=[])
            engine = make_engine("vllm", str(folder / "model"), processor, ctx, torch.bfloat16,
                                 size_limits([ExampleList([image], [768])], processor, 256), settings)
        times = []
        for _ in range(6):
            engine.sleep()
            began = synchronize()
            sent = engine.sync(partial(FullParameters, policy, dtype=engine.dtype))
            times.append(synchronize() - began)
            engine.wake()
        gib, best = sent["sync/bytes"] / 2**30, min(times[1:])
        row = {"case": case, "s": best, "slowest, s": max(times[1:]), "first, s": times[0]}
        yield row | {"GiB": gib, "GiB/s": gib / best}
        shutil.rmtree(folder)
        del policy, engine


def child_waits(cases: list[str], args: argparse.Namespace) -> Iterator[Row]:
    """Count the warnings of CUDA's synchronisation debug mode. Those per micro-batch are the warnings in an update of
    8 micro-batches minus those in an update of 4, divided by 4."""
    import torch

    import train
    from model import VisionCache
    from parallel.models import Models
    from parallel.sharding import make_optimizer
    from report.log import SkippedUpdates
    from utils import Meter, setup_distributed

    ctx, cuda = setup_distributed(), torch.cuda.is_available()
    policy, processor = build("toy", ctx, None, False)
    policy.cache = VisionCache(2**30)  # as in training with a frozen tower
    optimizer = make_optimizer(policy, 0.0, 0.0)
    for case in cases:
        policy.attention = case.split(",")[0]
        extra_flags = "--algo gspo --kl-coef 0.1 --update-epochs 2" if "gspo" in case else ""
        cfg = train.parse_args(f"--model - --data - --out - --steps 1 --group-size 8 {extra_flags}".split())
        rollouts = draw_rollouts(policy.hf.config, 8, 8, toy=True)
        batch = make_batch(rollouts, cfg, policy.hf.config, ctx, 300, share=policy.attention != "flash")
        models = Models(policy, optimizer, reference=policy if extra_flags else None)
        train.compute_logprobs_and_values(batch, models, cfg)
        if extra_flags:  # the columns above needed two epochs; count the waits of one
            cfg = replace(cfg, algo=replace(cfg.algo, update_epochs=1))
        [micros] = batch.minibatches

        def count(n: int, batch=batch, micros=micros, models=models, cfg=cfg) -> Counter:
            part = replace(batch, minibatches=[micros[:n]])
            state = train.TrainState(kl_coef=cfg.algo.kl_coef)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if cuda:
                    torch.cuda.set_sync_debug_mode("warn")
                train.update_policy(models, part, cfg, state, ctx, Meter(), SkippedUpdates(Path("."), ctx))
                if cuda:
                    torch.cuda.set_sync_debug_mode("default")
            waits = [w for w in caught if "called a synchronizing" in str(w.message)]
            return Counter("/".join(Path(w.filename).parts[-2:]) + f":{w.lineno}" for w in waits)

        assert len(micros) >= 8, "the toy has too few micro-batches"
        count(8)  # compiles, fills caches
        few, many = count(4), count(8)
        per_micro = {line: n / 4 for line, n in (many - few).most_common()}
        total = sum(per_micro.values())
        places = ", ".join(f"{line} {n:.3g}" for line, n in list(per_micro.items())[:8])
        row = {"case": case, "a micro-batch": total, "rest of an update": few.total() - 4 * total}
        yield row | {"most often": places or "-"} | ({} if cuda else {"no CUDA": "nothing to count"})


if __name__ == "__main__":
    cli_args = parse_args()
    if cli_args.child is None:
        main(cli_args)
    else:
        try:
            child(cli_args)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)  # see utils.run_script
