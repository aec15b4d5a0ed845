#!/usr/bin/env bash
# Does RL learn to use a tool? Run the demo of look_closer on three seeds, and compute the accuracy of the best policy
# that does not use the tool. Writes out/look_closer/table.md and curve.png. Takes two to three minutes per seed on a
# CPU, with two processes.
# With --short as the first argument: one seed, with demo.py's --short.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
out=${OUT:-out/look_closer}
mkdir -p "$out"
seeds="0 1 2" short=()
[ "${1:-}" != --short ] || seeds=0 short=(--short)
for seed in $seeds; do
    [ -f "$out/seed$seed/summary.json" ] && continue
    echo "seed $seed: see $out/seed$seed.log"
    python demo.py run --task look_closer --seed "$seed" --out "$out/seed$seed" "${short[@]}" > "$out/seed$seed.log" 2>&1
done
python - "$out" $seeds <<'PY' | tee "$out/table.md"
import json, sys
from collections import Counter
from itertools import islice
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from envs.look_closer import scenes

out = Path(sys.argv[1])
# The first image has the same bytes whatever the answer is, so the best policy that never looks gives one fixed answer
truths = Counter(questions[0][3] for _, questions in islice(scenes("test", 0), 400))
blind = truths.most_common(1)[0][1] / 400
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
print("| seed | accuracy before RL, greedy | after | sampled, first step → last | episodes that look | tokens per episode |")
print("|---|--:|--:|--:|--:|--:|")
for seed in sys.argv[2:]:
    summary = json.loads((out / f"seed{seed}" / "summary.json").read_text())
    rows = [json.loads(line) for line in (out / f"seed{seed}" / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward/accuracy" in row]
    steps = [row["step"] for row in rows]
    accuracy, looks = ([row[name] - less for row in rows] for name, less in (("reward/accuracy", 0), ("episode/turns", 1)))
    axes[0].plot(steps, accuracy, label=f"seed {seed}")
    axes[1].plot(steps, looks)
    tokens = [row["response/tokens"] for row in (rows[0], rows[-1])]
    print(f"| {seed} | {summary['accuracy_before']:.4f} | **{summary['accuracy_after']:.3f}** | {accuracy[0]:.3f} → "
          f"{accuracy[-1]:.3f} | {looks[0]:.2f} → {looks[-1]:.2f} | {tokens[0]:.1f} → {tokens[1]:.1f} |")
print(f"\naccuracy of the best policy that never looks: {blind:.4f}")
axes[0].axhline(blind, color="grey", linestyle="--", label="best without looking")
for axis, title in zip(axes, ("accuracy of sampled episodes", "fraction of episodes that look"), strict=True):
    axis.set(title=title, xlabel="RL step", ylim=(-0.02, 1.02))
    axis.grid(alpha=0.3)
axes[0].legend(frameon=False)
figure.tight_layout()
figure.savefig(out / "curve.png", dpi=110)
PY
