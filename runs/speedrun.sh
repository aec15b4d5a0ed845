#!/usr/bin/env bash
# How fast does a change to training learn? Time and samples until the greedy accuracy on 400 unseen images of `digits`
# is 0.6, with two CPU cores, from five warm starts that can see but answer without looking (about 0.3). Prints a row for
# docs/leaderboard.md, which has the rules, and a paired test.
#   runs/speedrun.sh                                    # this copy: 8 minutes for the warm starts, which are kept, then 4
#   NAME=mine BASE=a1b2c3d runs/speedrun.sh --lr 4e-4   # with other flags of train.py, compared with the runs of a name
#   REPO=../fork runs/speedrun.sh                       # train.py of another copy of the repository
# NAME names the runs in OUT (default: the commit). Without BASE they are compared with the first row of the page.
# --short as the first argument: one seed, three tiny steps, only to check that everything runs.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python=$(command -v "${PYTHON:-.venv/bin/python}") out=$(realpath -m "${OUT:-out/speedrun}") repo=$(realpath "${REPO:-.}")
commit=$(git -C "$repo" rev-parse --short HEAD 2> /dev/null || echo here)
name=${NAME:-$commit} seeds=${SEEDS:-0 1 2 3 4}
[[ $python = /* ]] || python=$PWD/$python
n_train=2000 n_test=400 see=400 habit=200 short=() level=0.6
if [ "${1:-}" = --short ]; then
    out=$out/short seeds=0 n_train=24 n_test=8 see=2 habit=1 level=0
    short=(--steps 3 --prompts-per-step 4 --group-size 2 --warmup-steps 0) && shift
fi
code="$commit, changes $(git -C "$repo" diff HEAD 2> /dev/null | sha1sum | cut -c -8), flags: $*"

calibrate() { # append the seconds of 1,000 products of two 512 x 512 float32 matrices on each of two cores at a time
    for core in 1 2; do "$python" - >> "$1" & done <<'PY'
import timeit, torch
torch.set_num_threads(1)
a, b = torch.ones(2, 512, 512)
print(min(timeit.repeat(lambda: a @ b, number=1000, repeat=5)))
PY
    wait
}

for seed in $seeds; do
    d=$out/seed$seed
    mkdir -p "$d"
    for split in train test; do
        size=n_$split
        [ -f "$d/$split.parquet" ] || "$python" prepare_data.py digits --toy --n "${!size}" --split $split \
            --seed "$seed" --out "$d/$split.parquet"
    done
    [ -d "$d/base" ] || "$python" demo.py model --task digits --seed "$seed" --out "$d/base"
    [ -d "$d/start" ] || "$python" -m torch.distributed.run --standalone --nproc-per-node 2 demo.py warm --task digits \
        --model "$d/base" --seed "$seed" --see-steps $see --habit-steps $habit --out "$d/start"
    if [ -f "$d/$name.done" ]; then
        [ "$(cat "$d/$name.done")" = "$code" ] && continue
        echo "error: NAME=$name has runs of other code or flags ($(cat "$d/$name.done")), not of $code; choose another NAME"
        exit 1
    fi
    rm -rf "${d:?}/$name" "$d/$name.calibration"
    calibrate "$d/$name.calibration"
    (cd "$repo" && "$python" -m torch.distributed.run --standalone --nproc-per-node "${PROCESSES:-2}" train.py \
        --model "$d/start" --data "$d/train.parquet" --eval-data "$d/test.parquet" --out "$d/$name" --seed "$seed" \
        --steps 20 --eval-every 1 --save-every 1000 --prompts-per-step 32 --group-size 8 --max-new-tokens 24 \
        --lr 2e-4 --warmup-steps 5 --schedule cosine --micro-tokens 2048 "${short[@]}" "$@" > "$d/$name.log" 2>&1) ||
        { tail -20 "$d/$name.log"; exit 1; }
    calibrate "$d/$name.calibration"
    echo "$code" > "$d/$name.done"
done

"$python" - "$out" "$name" "${BASE:-}" "$level" $seeds <<'PY'
import json, math, re, sys
from datetime import date
from pathlib import Path
from statistics import fmean

import numpy as np

sys.path[:0] = [".", "benchmarks"]
from learning import first_reach, paired

out, name, base, level, *seeds = sys.argv[1:]
# other load can only lengthen the calibration loop, so the least of all its runs on this machine counts
unit = min(float(x) for file in Path(out).glob("seed*/*.calibration") for x in file.read_text().split())


def read_runs(name: str, report: bool) -> tuple[list[float], list[float]]:
    """Return the samples and the relative time until the accuracy is reached, for each seed."""
    samples, relative = [], []
    for folder in (Path(out, f"seed{seed}", name) for seed in seeds):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        args = json.loads((folder / "run.json").read_text())["args"]
        batch = args["prompts_per_step"] * args["group_size"]
        curve, n, seconds = [{"accuracy": -1.0, "samples": 0, "seconds": 0.0}], 0, 0.0
        for row in rows:
            if "reward/mean" in row:  # not the row before the first step
                n += batch * row.get("sampling/batches", 1)
                seconds += row["time/step"] - row.get("time/eval", 0) - row.get("time/report", 0)
            if "eval/accuracy" in row:
                curve.append({"accuracy": row["eval/accuracy"], "samples": n, "seconds": seconds})
        samples.append(first_reach(curve, float(level), "samples"))
        relative.append(first_reach(curve, float(level), "seconds") / unit)
        if report:
            last = f"{curve[-1]['accuracy']:.3f} after {n:.0f} samples"
            print(f"{folder.parent.name}: {curve[1]['accuracy']:.3f} at first, {last}; {level} after {samples[-1]:.0f} "
                  f"samples and {relative[-1] * unit:.1f} s, {relative[-1]:.2f} times the calibration loop")
    return samples, relative


samples, relative = read_runs(name, report=True)
each = ", ".join(f"{x:.2f}" for x in relative)
print(f"\n| {date.today()} | `{name}` | CHANGE | {fmean(samples):,.0f} | **{fmean(relative):.2f}** | {each} |")
page = Path("docs/leaderboard.md").read_text()
record = re.search(r"^\|[^|]*\|[^|]*\|[^|]*\|[^|]*\| \*\*[^|]*\| ([\d., ]+) \|$", page, re.M)  # the first row
theirs = read_runs(base, report=False)[1] if base else [float(x) for x in record[1].split(", ")]
label = base or "the record of docs/leaderboard.md, measured on another machine"
if len(seeds) == len(theirs) > 1 and not any(map(math.isnan, [*relative, *theirs])):
    difference = paired(np.log(relative), np.log(theirs))
    mean, low, high = np.exp(difference[:3])
    verdict = "faster" if high < 1 else "slower" if low > 1 else "no significant difference"
    print(f"time relative to {label}: {mean:.2f} (95% interval {low:.2f} to {high:.2f}), p {difference.p:.2g}: {verdict}")
PY
