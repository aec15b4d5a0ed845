"""Ten short runs of one or two checkouts on toy models, whose metrics show that a change of the code changes no result.

    python benchmarks/golden.py                     # this checkout, twice: are its runs deterministic?
    python benchmarks/golden.py ../before .         # two checkouts on the same machine
    python benchmarks/golden.py --short             # one run

All metrics except times and speeds must agree within --tolerance (relative to 1 or more). Of the asynchronous run, in
which the time of a weight sync decides what is sampled, only the prompts, counts and staleness are compared. The first
checkout makes models and data. The exit code is 1 if anything differs.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = ("--prompts-per-step 4 --group-size 4 --max-new-tokens 12 --max-prompt-tokens 400 --micro-tokens 800 "
          "--lr 1e-3 --steps 3 --seed 1")  # fmt: skip
# a random toy earns nothing by its task's reward, so rewards depend on the length too
REWARD = """
from tasks.geospot import geospot
def score(response, example, stage):
    named = geospot(response, example, stage=stage) if example.data_source == "geospot" else {"reward": 0.0}
    length = len(response) * 7919 % 5 / 4 + stage.options.get("tolerance_km", 0) / 1000
    return named | {"reward": named["reward"] + length, "length": len(response)}
"""
RUNS = {  # name -> (toy task, flags)
    "grpo": ("shapes", "--train-vision all"),
    "dynamic sampling": ("shapes", "--algo dapo --max-gen-batches 3"),
    "ppo": ("shapes", "--algo ppo --algo-args critic=separate"),
    "gspo": ("shapes", "--algo gspo --minibatches 2"),
    "lora": ("shapes", "--lora-rank 4"),
    "episodes": ("look_closer", "--env look_closer --max-new-tokens 24"),
    "geospot": ("geospot", "--curriculum stages.json --steps 4"),
    "async": ("shapes", "--rollout server --servers http://stand-in:1 --async-steps 2 --steps 4"),
    "two ranks": ("shapes", "--minibatches 2"),
    "kl": ("shapes", "--kl-coef 0.05 --minibatches 2"),
}
TIMES = ("time/", "perf/", "sync/")
ASYNC = ("update/steps", "async/staleness_max", "async/dropped_groups", "progress/epoch", "lr", "step")


def call(command: list, cwd: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{cwd}:{cwd}/tests"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def make_inputs(checkout: Path, folder: Path, tasks: set[str]) -> None:
    call([sys.executable, "demo.py", "model", "--out", folder / "model"], checkout)
    for task in tasks:
        file = folder / f"{task}.parquet"
        call([sys.executable, "prepare_data.py", task, "--toy", "--n", 24, "--out", file], checkout)
    (folder / "reward.py").write_text(REWARD)
    stages = "import json; from tasks.geospot import CURRICULUM as c; print(json.dumps({'stages': " \
             "[s | {'from': i} for i, s in enumerate(c[:4])]}))"
    printed = subprocess.run([sys.executable, "-c", stages], cwd=checkout, capture_output=True, text=True, check=True)
    (folder / "stages.json").write_text(printed.stdout)


def train(checkout: Path, inputs: Path, out: Path, name: str) -> list[dict]:
    """Make one of RUNS and return its metrics by step."""
    task, flags = RUNS[name]
    script = "tests/async_worker.py" if name == "async" else "train.py"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2] if name == "two ranks" else []
    reward = ["--reward", f"{inputs / 'reward.py'}:score"]
    flags = [str(inputs / part) if part.endswith(".json") else part for part in flags.split()]
    data = ["--model", inputs / "model", "--data", inputs / f"{task}.parquet", "--out", out]
    call([sys.executable, *launch, script, *data, *reward, *COMMON.split(), *flags], checkout)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def differences(name: str, before: list[dict], after: list[dict], tolerance: float) -> list[str]:
    """Return a line for each metric that differs, or that only one of the runs has."""
    lines = [] if len(before) == len(after) else [f"{len(before)} rows and {len(after)} rows"]
    for a, b in zip(before, after, strict=False):
        keys = ASYNC if name == "async" else [key for key in {**a, **b} if not key.startswith(TIMES)]
        for key in keys:
            x, y = a.get(key), b.get(key)
            same = x == y or (isinstance(x, int | float) and isinstance(y, int | float)
                              and (math.isclose(x, y, rel_tol=tolerance, abs_tol=tolerance) or x != x and y != y))
            lines += [] if same else [f"step {a.get('step')} {key}: {x} and {y}"]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="one or two checkouts (default: this one)")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="largest difference")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS), help="runs to make (default: all)")
    parser.add_argument("--short", action="store_true", help="make only the first run")
    args = parser.parse_args()
    checkouts = [path.resolve() for path in args.checkouts] or [ROOT]
    names, failed = args.only[: 1 if args.short else None], 0
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder)
        make_inputs(checkouts[0], inputs, {RUNS[name][0] for name in names} | {"shapes"})
        for name in names:
            before, after = (train(checkout, inputs, inputs / f"{name} {i}", name)
                             for i, checkout in enumerate((checkouts[0], checkouts[-1])))
            lines = differences(name, before, after, args.tolerance)
            failed += bool(lines)
            print(f"{name}: {len(before)} rows, {'equal' if not lines else f'{len(lines)} differences'}", flush=True)
            print("".join(f"    {line}\n" for line in lines[:5]), end="")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
