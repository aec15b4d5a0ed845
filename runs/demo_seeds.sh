#!/usr/bin/env bash
# The demo on three seeds: does RL lift a half-competent toy to one that looks, whatever the seed?
# CPU, 2 cores, about five minutes a seed. Further flags go to each run, e.g. --family qwen3_vl; what has a
# summary.json is not run again. --short as the first argument: one seed, with demo.py's --short.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-out} seeds="0 1 2"
[ "${1:-}" != --short ] || seeds=0
for seed in $seeds; do
    [ -f "$out/demo_seed$seed/summary.json" ] || python demo.py run --out "$out/demo_seed$seed" --seed "$seed" "$@"
done
python - "$out" $seeds <<'PY'
import json, sys
for seed in sys.argv[2:]:
    s = json.load(open(f"{sys.argv[1]}/demo_seed{seed}/summary.json"))
    print(f"seed {seed}: {s['accuracy_before']:.3f} -> {s['accuracy_after']:.3f}, "
          f"blank images {s['blank_image_accuracy']:.3f}, {s['n_test']} images, {s['steps']} steps, "
          f"{s['train_seconds']} s")
PY
