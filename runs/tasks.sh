#!/usr/bin/env bash
# Run the demo of every task on three seeds: does RL improve each toy model, and does the model use the image? Writes
# out/tasks/table.md. CPU, one process per run, JOBS runs in parallel, three to seven minutes per run. Runs that have a
# summary.json are skipped.
#   TASKS="vqa digits" SEEDS="0 1" JOBS=1 runs/tasks.sh
# --short as the first argument: one task, one seed, with demo.py's --short.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export out=${OUT:-out/tasks} short=""
[ "${1:-}" != --short ] || TASKS=${TASKS:-shapes} SEEDS=${SEEDS:-0} short=--short
TASKS=${TASKS:-shapes geo3k vqa digits caption geospot nlvr2}
SEEDS=${SEEDS:-0 1 2}
mkdir -p "$out"
run_demo() {
    d=$out/$1/seed$2
    [ -f "$d/summary.json" ] && return
    echo "$1, seed $2: see $d.log"
    mkdir -p "$out/$1"
    python demo.py run --task "$1" --seed "$2" --processes 1 --out "$d" $short > "$d.log" 2>&1 || { tail -n 3 "$d.log"; exit 1; }
}
export -f run_demo
failed=0
for seed in $SEEDS; do for task in $TASKS; do echo "$task $seed"; done; done |
    xargs -P "${JOBS:-2}" -L 1 bash -c 'run_demo "$0" "$1"' || failed=1
python - "$out" $TASKS <<'PY' | tee "$out/table.md"
import json, math, statistics, sys
from pathlib import Path


def mean(values):
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


print("| task | metric | before RL | after | each seed | blank images | RL steps | RL, s | whole demo, s |")
print("|---|---|--:|--:|---|--:|--:|--:|--:|")
for task in sys.argv[2:]:
    runs = [json.loads(path.read_text()) for path in sorted(Path(sys.argv[1], task).glob("seed*/summary.json"))]
    if not runs:
        continue
    before, after, blank = (
        mean([run[name] for run in runs]) for name in ("accuracy_before", "accuracy_after", "blank_image_accuracy")
    )
    each = ", ".join(f"{run['accuracy_before']:.3f} → {run['accuracy_after']:.3f}" for run in runs)
    training = statistics.fmean(run["train_seconds"] for run in runs)
    whole = statistics.fmean(sum(run["stage_seconds"].values()) for run in runs)
    print(f"| {task} | {runs[0]['metric']} | {before} | **{after}** | {each} | {blank} | {runs[0]['steps']} | "
          f"{training:.0f} | {whole:.0f} |")
PY
exit "$failed"
