#!/usr/bin/env bash
# Geometry3K with Qwen2.5-VL-7B on 8 GPUs, with the batch, lengths and learning rate of verl's recipe. Not yet measured.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p out
for split in train test; do
    data=out/geo3k_$split.parquet
    [ -f $data ] || python prepare_data.py geo3k --input hiyouga/geometry3k --split $split --out $data
done
torchrun --nproc-per-node 8 train.py --model Qwen/Qwen2.5-VL-7B-Instruct \
    --data out/geo3k_train.parquet --eval-data out/geo3k_test.parquet --out out/geo3k_7b \
    --prompts-per-step 512 --group-size 5 --minibatches 4 --steps 60 --lr 1e-6 \
    --max-prompt-tokens 1024 --max-new-tokens 2048 --micro-tokens 8192 --grad-checkpointing \
    --eval-every 5 --save-every 20 --resume auto "$@"
