#!/usr/bin/env bash
# Run the demo on three seeds: does RL teach the toy model to use the image on every seed?
# CPU, 2 cores, about three minutes per seed. Prints for each seed how often training warned that the policy learns to
# answer without looking; this task should give no such warning. Further flags are passed to each run, e.g. --task digits.
# SEEDS="0 1" chooses seeds; those that have a summary.json are skipped. --short as the first argument: one seed, with
# demo.py's --short.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-out} seeds=${SEEDS:-0 1 2}
[ "${1:-}" != --short ] || seeds=0
for seed in $seeds; do
    [ -f "$out/demo_seed$seed/summary.json" ] || python demo.py run --out "$out/demo_seed$seed" --seed "$seed" "$@"
done
python - "$out" $seeds <<'PY'
import json, sys
for seed in sys.argv[2:]:
    folder = f"{sys.argv[1]}/demo_seed{seed}"
    s = json.load(open(f"{folder}/summary.json"))
    rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    tests = [row["eval/shortcut"] > 0 for row in rows if "eval/shortcut" in row]
    print(f"seed {seed}: {s['accuracy_before']:.3f} -> {s['accuracy_after']:.3f}, "
          f"blank images {s['blank_image_accuracy']:.3f}, {s['n_test']} images, {s['steps']} steps, "
          f"{s['train_seconds']} s, {sum(tests)} warnings in {len(tests)} tests")
PY
