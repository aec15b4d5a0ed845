#!/usr/bin/env bash
# Run the demo on three seeds: does RL teach the toy model to use the image on every seed?
# CPU, 2 cores, about five minutes per seed. Further flags are passed to each run, e.g. --family qwen3_vl. Seeds that
# have a summary.json are skipped. --short as the first argument: one seed, with demo.py's --short.
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
