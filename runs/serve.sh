#!/usr/bin/env bash
# Rollout servers on this machine, one for each GPU (or TP of them), on ports from PORT on; they end with this script.
#   N=8 PORT=8000 runs/serve.sh --model Qwen/Qwen2.5-VL-7B-Instruct --data geo3k.parquet --max-new-tokens 2048
# PYTHON is that of an environment with vLLM. The flags are train.py's, as far as servers have to agree with it; then train with
#   --rollout server --servers http://127.0.0.1:8000 ... http://127.0.0.1:8007
# HOST=0.0.0.0 lets other machines in, and with them whoever reaches the port: docs/scale.md. DRY=1 only prints, as does --short
# in place of flags, of two servers of a model M.
set -euo pipefail
cd "$(dirname "$0")/.."
N=${N:-1} TP=${TP:-1} PORT=${PORT:-8000} HOST=${HOST:-127.0.0.1} PYTHON=${PYTHON:-python}
[ "${1:-}" != --short ] || DRY=1 N=2
[ "${1:-}" != --short ] || set -- --model M --data F "${@:2}"
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
