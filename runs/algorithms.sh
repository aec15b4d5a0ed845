#!/usr/bin/env bash
# Train the demo's toy model by RL with every algorithm on three seeds: do all of them improve the same warm starts?
# Each seed has one warm start, which all algorithms share. Writes out/algorithms/table.md. CPU, one process, about half
# a minute per run after the warm starts. Further flags are passed to each run.
#   ALGOS="ppo dapo" SEEDS="0 1" runs/algorithms.sh
# --short as the first argument: one algorithm and one tiny step, only to check that everything runs.
#
# All use the demo's lr of 2e-4 and its other settings, with these additions:
#   gspo, cispo, sapo   4 minibatches per step: in a single update every ratio is 1, and their losses would equal GRPO's
#   ppo                 a critic lr of 1e-3: the default of 1e-5 suits large models and hardly changes a toy in 60 steps
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
out=${OUT:-out/algorithms} steps=60 n_train=2000 n_test=400 warm=()
if [ "${1:-}" = --short ]; then
    ALGOS=${ALGOS:-ppo} SEEDS=${SEEDS:-0} steps=1 n_train=16 n_test=4 warm=(--see-steps 1 --habit-steps 1)
    set -- --warmup-steps 0 --prompts-per-step 4 --group-size 2 "${@:2}"
fi
ALGOS=${ALGOS:-grpo dr_grpo dapo gspo cispo sapo rloo reinforce++ ppo}
SEEDS=${SEEDS:-0 1 2}
for seed in $SEEDS; do
    d=$out/seed$seed
    if [ ! -d "$d/start" ]; then
        python prepare_data.py shapes --toy --n "$n_train" --split train --seed "$seed" --out "$d/train.parquet"
        python prepare_data.py shapes --toy --n "$n_test" --split test --seed "$seed" --out "$d/test.parquet"
        python demo.py model --out "$d/base" --seed "$seed"
        python -m torch.distributed.run --standalone --nproc-per-node 2 demo.py warm --model "$d/base" \
            --out "$d/start" --seed "$seed" "${warm[@]}"
    fi
    for algo in $ALGOS; do
        extra=""
        case $algo in
            gspo | cispo | sapo) extra="--minibatches 4" ;;
            ppo) extra="--algo-args critic_lr=1e-3" ;;
        esac
        [ -f "$d/$algo/checkpoints/step_$(printf %06d "$steps")/trainer.json" ] && continue
        # shellcheck disable=SC2086
        python train.py --model "$d/start" --data "$d/train.parquet" --eval-data "$d/test.parquet" --out "$d/$algo" \
            --algo "$algo" --steps "$steps" --prompts-per-step 32 --group-size 8 --max-new-tokens 12 --lr 2e-4 \
            --warmup-steps 5 --schedule cosine --micro-tokens 2048 --save-every "$steps" \
            --seed "$seed" --resume auto $extra "$@"
    done
done
python - "$out" $ALGOS <<'PY' | tee "$out/table.md"
import json, math, statistics, sys
from itertools import chain
from pathlib import Path


def mean(values):
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


print("| algorithm | before RL | after | each seed | steps to reward 0.9 | steps | samples per step | s per run |")
print("|---|--:|--:|---|--:|--:|--:|--:|")
for algo in sys.argv[2:]:
    paths = sorted(Path(sys.argv[1]).glob(f"seed*/{algo}/metrics.jsonl"))
    runs = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    before = [rows[0]["eval/accuracy"] for rows in runs]
    after = [rows[-1]["eval/accuracy"] for rows in runs]
    reached = [next((str(row["step"]) for row in rows if row.get("reward/mean", 0.0) >= 0.9), "-") for rows in runs]
    seconds = statistics.fmean(sum(row.get("time/step", 0.0) for row in rows) for rows in runs)
    batches = statistics.fmean(row.get("sampling/batches", 1.0) for row in chain.from_iterable(rows[1:] for rows in runs))
    each = ", ".join(f"{x:.3f}" for x in after)
    print(f"| {algo} | {mean(before)} | **{mean(after)}** | {each} | {', '.join(reached)} | {runs[0][-1]['step']} | "
          f"{256 * batches:.0f} | {seconds:.0f} |")
PY
