#!/usr/bin/env bash
# The demo on three seeds: does RL lift a half-competent toy to one that looks, whatever the seed?
# CPU, 2 cores, about five minutes a seed. Further flags go to each run, e.g. --family qwen3_vl.
set -euo pipefail
cd "$(dirname "$0")/.."
for seed in 0 1 2; do
    python demo.py run --out "out/demo_seed$seed" --seed "$seed" "$@"
done
python - <<'PY'
import json
for seed in range(3):
    s = json.load(open(f"out/demo_seed{seed}/summary.json"))
    print(f"seed {seed}: {s['accuracy_before']:.3f} -> {s['accuracy_after']:.3f}, "
          f"blank images {s['blank_image_accuracy']:.3f}, {s['n_test']} images, {s['steps']} steps, "
          f"{s['train_seconds']} s")
PY
