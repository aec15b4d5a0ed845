#!/usr/bin/env bash
# Start rollout servers on this machine, one per GPU (or per TP GPUs), on ports PORT, PORT + 1... They end with it.
#   N=8 PORT=8000 runs/serve.sh --model Qwen/Qwen2.5-VL-7B-Instruct --data geo3k.parquet --max-new-tokens 2048
# PYTHON must be from an environment with vLLM. Pass the flags of train.py on which servers must agree, then train with
#   --rollout server --servers http://127.0.0.1:8000 ... http://127.0.0.1:8007
# HOST=0.0.0.0 accepts other machines, and so anyone who can reach the port: see docs/scale.md. DRY=1 only prints the
# commands. --short as the first argument builds a toy model and prints the commands of two servers.
set -euo pipefail
cd "$(dirname "$0")/.."
N=${N:-1} TP=${TP:-1} PORT=${PORT:-8000} HOST=${HOST:-127.0.0.1} PYTHON=${PYTHON:-python}
if [ "${1:-}" = --short ]; then
    DRY=1 N=2 toy=${OUT:-out/serve}
    [ -d "$toy/toy" ] || "$PYTHON" demo.py model --out "$toy/toy"
    "$PYTHON" prepare_data.py shapes --toy --n 4 --out "$toy/train.parquet"
    set -- --model "$toy/toy" --data "$toy/train.parquet" --max-new-tokens 8 "${@:2}"
fi
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
trap 'exit 130' INT TERM HUP
for ((i = 0; i < N; i++)); do
    command=("$PYTHON" -m engines.serve "$@" --gpus "$TP" --host "$HOST" --port $((PORT + i)))
    if [ -n "${DRY:-}" ]; then
        "${command[@]}" --print
    else
        CUDA_VISIBLE_DEVICES=$(seq -s, $((i * TP)) $((i * TP + TP - 1))) "${command[@]}" < /dev/null &
    fi
done
wait
