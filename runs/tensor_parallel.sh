#!/usr/bin/env bash
# Compare losses and gradients of --tp 2 on 2 and 4 processes with those of one process, for toy models of all families
# in five settings each. Takes about five minutes on a CPU with 2 cores.
#
#   runs/tensor_parallel.sh [--short] [float64] [FLAG ...]
#
# --short compares one family in one setting on 1 and 2 processes; float64 computes in double precision instead of fp32;
# other flags are passed to every setting.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-out/tensor_parallel}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
short="" processes="1 2 4"
if [ "${1:-}" = --short ]; then
    short=yes processes="1 2" FAMILIES=${FAMILIES:-qwen2_5_vl}
    shift
fi
COMMON="--micro-tokens 130 --tp 2 $*"
CASES="$COMMON --train-vision all / $COMMON --lora-rank 4 --train-vision tower --gradient-checkpointing
    / $COMMON --algo gspo --kl-coef 0.1 --entropy-coef 0.01
    / $COMMON --algo ppo --algo-args critic=separate --kl-coef 0.1 --train-vision merger
    / $COMMON --algo ppo --algo-args tis_cap=1.5 ratio_mask=0.5,2"
[ -z "$short" ] || CASES="$COMMON --train-vision all"
for family in ${FAMILIES:-qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe}; do
    $PYTHON - "$OUT/$family" "$family" <<'PY'
import sys
from pathlib import Path

from demo import make_model

make_model(Path(sys.argv[1]), sys.argv[2], hidden=64, layers=2, vocab=448)
PY
    for n in $processes; do
        # shellcheck disable=SC2086
        $PYTHON -m torch.distributed.run --standalone --nproc-per-node $n tests/parity_worker.py \
            "$OUT/$family" "$OUT/$family-$n.pt" $CASES
    done
    $PYTHON - "$OUT/$family" $processes <<'PY'
import sys
from itertools import chain

import torch

single, *others = (torch.load(f"{sys.argv[1]}-{n}.pt") for n in sys.argv[2:])
worst = {}
for a, b in chain.from_iterable(zip(single, other, strict=True) for other in others):
    largest = max(g.norm() for g in a["gradients"].values())
    worst["loss"] = max(worst.get("loss", 0.0), abs(a["metrics"]["loss/policy"] - b["metrics"]["loss/policy"]))
    for name, g in a["gradients"].items():
        kind = "decay rates" if any(x in name for x in ("A_log", "dt_bias", "in_proj_a.")) else "gradients"
        kind = "A of the tower" if "visual" in name and "lora_A" in name else kind
        error = (g - b["gradients"][name]).norm() / g.norm().clamp(min=1e-4 * largest)
        worst[kind] = max(worst.get(kind, 0.0), error.item())
print(sys.argv[1].split("/")[-1], ", ".join(f"{kind} {value:.1e}" for kind, value in worst.items()))
PY
done
