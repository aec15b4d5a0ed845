#!/usr/bin/env bash
# Does RL learn equally well with vLLM's rollouts as with transformers'? Train the demo's toy model by RL on three
# seeds, with each engine from the same warm start. CPU, 2 cores, about five minutes per seed; needs the environment of
# `make test-vllm`. Further flags are passed to each train.py. --short as the first argument: one tiny step on one seed,
# both times with transformers' engine, so that vLLM is not needed.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv-vllm/bin/python}
seeds="0 1 2" steps=60 n_train=2000 n_test=400 warm=() vllm=vllm
if [ "${1:-}" = --short ]; then
    seeds=0 steps=1 n_train=16 n_test=4 warm=(--see-steps 1 --habit-steps 1) vllm=hf
    set -- --warmup-steps 0 --prompts-per-step 4 --group-size 2 --eval-every 1 "${@:2}"
fi
OUT=${OUT:-out/vllm_vs_hf}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TORCHDYNAMO_DISABLE=1
export PYTHONPATH="$PWD/tests/vllm_env"
for seed in $seeds; do
    D=$OUT/seed$seed
    mkdir -p "$D"
    $PYTHON prepare_data.py shapes --toy --n "$n_train" --split train --seed "$seed" --out "$D/train.parquet"
    $PYTHON prepare_data.py shapes --toy --n "$n_test" --split test --seed "$seed" --out "$D/test.parquet"
    $PYTHON demo.py model --out "$D/base" --seed "$seed"
    $PYTHON -m torch.distributed.run --standalone --nproc-per-node 2 demo.py warm --model "$D/base" --out "$D/start" \
        --seed "$seed" "${warm[@]}"
    for engine in hf vllm; do
        $PYTHON train.py --model "$D/start" --data "$D/train.parquet" --eval-data "$D/test.parquet" --out "$D/$engine" \
            --rollout "${engine/vllm/$vllm}" --steps "$steps" --prompts-per-step 32 --group-size 8 --max-new-tokens 12 --lr 2e-4 \
            --warmup-steps 5 --schedule cosine --micro-tokens 2048 --eval-every 10 --save-every "$steps" --seed "$seed" "$@"
    done
done
$PYTHON - "$OUT" $seeds <<'PY'
import json, sys
from itertools import combinations
from statistics import mean

runs, seeds = {}, sys.argv[2:]
for engine in ("hf", "vllm"):
    for seed in seeds:
        rows = [json.loads(line) for line in open(f"{sys.argv[1]}/seed{seed}/{engine}/metrics.jsonl")]
        steps = [r for r in rows if "reward/mean" in r]
        runs[engine, seed] = accuracy = {r["step"]: r["eval/accuracy"] for r in rows if "eval/accuracy" in r}
        names = ("reward/mean", "time/rollout", "time/update", "time/sync")
        means = {name: mean(r[name] for r in steps) for name in names}
        print(f"{engine:<4} seed {seed}: accuracy {' '.join(f'{a:.3f}' for a in accuracy.values())}; "
              f"mean reward {means['reward/mean']:.3f}; rollout {means['time/rollout']:.2f} s, "
              f"update {means['time/update']:.2f} s, sync {means['time/sync']:.3f} s; "
              f"max |dlogp| {max(r.get('mismatch/max_abs_logprob_diff', 0.0) for r in steps):.1e}")
print("by step: largest difference in accuracy between engines on one seed, and between seeds with one engine")
for step in runs["hf", seeds[0]]:
    engines = max(abs(runs["hf", s][step] - runs["vllm", s][step]) for s in seeds)
    pairs = [pair for pair in combinations(runs, 2) if pair[0][0] == pair[1][0]]
    between = max(abs(runs[a][step] - runs[b][step]) for a, b in pairs) if pairs else 0.0
    print(f"  {step:>3}: {engines:.3f}  {between:.3f}")
PY
