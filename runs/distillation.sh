#!/usr/bin/env bash
# On-policy distillation against GRPO on a toy: responses and seconds of training until the greedy accuracy on unseen
# images is 0.9. The teacher is the demo's model after RL; the student is the demo's warm start. Other settings are equal.
#   make demo && runs/distillation.sh          # seeds 0 1 2, about 3 minutes on two cores
#   OUT=out/x runs/distillation.sh --short      # two steps, one seed, with the demo in out/x/demo
set -euo pipefail
cd "$(dirname "$0")/.."
demo=demo steps=45 warmup=5 seeds="0 1 2" out=${OUT:-out/distillation}
if [ "${1:-}" = --short ]; then demo=$out/demo steps=2 warmup=1 seeds=0; fi
for seed in $seeds; do
    for arm in grpo opd mixed; do
        case $arm in
            grpo) flags=(--algo grpo) ;;
            opd) flags=(--algo opd --teacher "$demo/final") ;;
            mixed) flags=(--algo grpo --teacher "$demo/final") ;;
        esac
        ${PYTHON:-.venv/bin/python} train.py --model "$demo/start" --data "$demo/train.parquet" \
            --eval-data "$demo/test.parquet" --out "$out/$arm/seed$seed" --steps $steps --eval-every 1 --seed "$seed" \
            --prompts-per-step 32 --max-new-tokens 24 --lr 2e-4 --warmup-steps $warmup --train-vision all "${flags[@]}" \
            > /dev/null
    done
done
${PYTHON:-.venv/bin/python} - "$out" <<'PY'
import json, sys
from pathlib import Path

print(f"{'arm':8} {'seed':8} {'steps':>5} {'responses':>9} {'seconds':>8}   (to accuracy 0.9; seconds exclude evaluations) final accuracy")
for file in sorted(Path(sys.argv[1]).glob("[gmo]*/seed*/metrics.jsonl")):
    responses = seconds = 0.0
    reached = None
    for row in map(json.loads, file.read_text().splitlines()):
        responses += row.get("rollout/responses") or 0
        seconds += sum(row.get(f"time/{part}") or 0 for part in ("rollout", "reward", "pack", "logprobs", "update", "sync"))
        if reached is None and row.get("eval/accuracy", 0) >= 0.9:
            reached = row["step"], responses, seconds
    step, n, spent = reached or ("-", "-", "-")
    spent = f"{spent:.1f}" if reached else "-"
    print(f"{file.parts[-3]:8} {file.parts[-2]:8} {step!s:>5} {n!s:>9} {spent:>8}   {row['eval/accuracy']:.3f}")
PY
