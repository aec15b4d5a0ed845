#!/usr/bin/env bash
# Train on GeoSpot's five curriculum stages (first steps divided by 50) with the toy model of runs/tasks.sh: one run
# without interruption, and one that is killed in stage 3 and resumed. Their metrics and weights must be the same. CPU,
# a few minutes. --short as the first argument: an untrained toy model and tiny steps, only to check that it runs.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
toy=${TOY:-out/tasks/geospot/seed0} # a folder with start/ and train.parquet
out=${OUT:-out/geospot_stages}
rm -rf "$out" && mkdir -p "$out"
last=17
if [ "${1:-}" = --short ]; then
    toy=$out/toy last=13
    set -- --prompts-per-step 4 --group-size 2 --max-new-tokens 8 "${@:2}"
    python prepare_data.py geospot --toy --n 40 --out "$toy/train.parquet"
    python demo.py model --task geospot --out "$toy/start"
fi
flags=("$@")
python - "$out/stages.json" <<'PY'
import json, sys
from tasks.geospot import CURRICULUM

stages = [stage | {"from": stage["from"] // 50} for stage in CURRICULUM]
json.dump({"stages": stages}, open(sys.argv[1], "w"), indent=1)
PY
run() { # call it in a subshell, because exec replaces the process
    exec python train.py --model "$toy/start" --data "$toy/train.parquet" --out "$out/$1" --curriculum "$out/stages.json" \
        --steps 24 --prompts-per-step 16 --group-size 8 --max-new-tokens 48 --lr 2e-4 --warmup-steps 5 \
        --micro-tokens 2048 --save-every 3 "${flags[@]}" "${@:2}"
}
(run whole > "$out/whole.log")
run cut > "$out/cut.log" 2>&1 &
until grep -q "\"step\": $last," "$out/cut/metrics.jsonl" 2> /dev/null; do sleep 0.05; done
kill -9 $!
wait $! || true
[ ! -d "$out/cut/checkpoints/step_000024" ]
echo "killed after $(tail -n 1 "$out/cut/metrics.jsonl" | cut -d, -f1)}, in stage 3 (steps 12 to 19, counted from 0)"
(run cut --resume auto > "$out/resumed.log")
grep -h "curriculum: after\|resumed from" "$out/resumed.log"
for name in whole cut; do python merge_lora.py "$out/$name" --out "$out/$name-hf" > /dev/null; done
cmp "$out/whole-hf/model.safetensors" "$out/cut-hf/model.safetensors" && echo "weights: identical, byte for byte"
python - "$out" <<'PY'
import json, sys
from pathlib import Path


def rows(name):
    lines = Path(sys.argv[1], name, "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k[:5] not in ("time/", "perf/")} for line in lines]


whole, cut = rows("whole"), rows("cut")
assert whole == cut, "the metrics differ"
print(f"metrics: {len(whole)} rows of {len(whole[0])} or more numbers, all identical")
print("\n| stage | steps | reward | country | region | city | coordinates |\n|--:|---|--:|--:|--:|--:|--:|")
for stage in range(5):
    rows_of_stage = [row for row in whole if row.get("curriculum/stage") == stage]
    parts = ("reward", "country", "region", "city", "coordinates")
    means = [sum(row[f"reward/geospot/{part}"] for row in rows_of_stage) / len(rows_of_stage) for part in parts]
    print(f"| {stage} | {rows_of_stage[0]['step']} to {rows_of_stage[-1]['step']} | "
          + " | ".join(f"{mean:.2f}" for mean in means) + " |")
PY
