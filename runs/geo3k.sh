#!/usr/bin/env bash
# Train Qwen2.5-VL-7B on Geometry3K on 8 GPUs, with the batch, lengths and learning rate of verl's recipe. Not yet
# measured. --short as the first argument: one step of a toy model on one process, only to check that everything runs.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-out} model=Qwen/Qwen2.5-VL-7B-Instruct processes=8 source=(--input hiyouga/geometry3k)
mkdir -p "$out"
if [ "${1:-}" = --short ]; then
    model=$out/toy processes=1 source=(--toy --n 8)
    set -- --steps 1 --prompts-per-step 8 --group-size 2 --max-new-tokens 8 --micro-tokens 2048 "${@:2}"
    python demo.py model --task geo3k --out "$model"
fi
for split in train test; do
    data=$out/geo3k_$split.parquet
    [ -f "$data" ] || python prepare_data.py geo3k "${source[@]}" --split $split --out "$data"
done
torchrun --nproc-per-node $processes train.py --model "$model" \
    --data "$out/geo3k_train.parquet" --eval-data "$out/geo3k_test.parquet" --out "$out/geo3k_7b" \
    --prompts-per-step 512 --group-size 5 --minibatches 4 --steps 60 --lr 1e-6 \
    --max-prompt-tokens 1024 --max-new-tokens 2048 --micro-tokens 8192 --gradient-checkpointing \
    --eval-every 5 --save-every 20 --resume auto "$@"
