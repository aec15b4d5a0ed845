#!/usr/bin/env bash
# Train and evaluate a real model on a published data set: download and convert the data, train, evaluate. The page
# docs/recipes.md has the memory and the published accuracy of each recipe. None of them was run on GPUs yet.
#   runs/recipe.sh NAME [flags]            flags of train.py, which replace those of the recipe: --seed 1
#   DRY=1 runs/recipe.sh NAME              only print the commands
#   STEPS="data eval" runs/recipe.sh NAME  only some of data, train, eval
#   HOST=a STEPS=train runs/recipe.sh geo3k-30b-a3b    run on both nodes; a is the name of one of them, and both see
#                                          the folder OUT
#   runs/recipe.sh --short [NAME ...]      run these recipes (default: all) on toy models, in OUT/short, with 32 rows in
#                                          each data set's layout and two steps on a CPU; JOBS (default 2) at a time
#   STEPS=plan runs/recipe.sh NAME [--gpu a100 --gpu-hour-usd 2]    memory, time and price by train.py --plan
#                                          (default: H100 at 3 USD an hour); runs on any machine
set -euo pipefail
cd "$(dirname "$0")/.."
NAMES="geo3k-3b geo3k-3b-lora geo3k-7b geo3k-qwen3-8b geo3k-30b-a3b clevr-3b geoqa-3b virl39k-7b geospot-7b"
fail() { echo "error: $*" >&2 && exit 1; }
short="" name=${1:-} out=${OUT:-out}
[ "$name" != --short ] || short=1 out=$out/short # so that a real recipe never finds toy data
[ "${DRY:-0}" != 0 ] || DRY=""
raw=$out/downloads R1V=https://github.com/Deep-Agent/R1-V/raw/main/src/eval/prompts
run() { # print a command, and run it unless DRY=1
    printf '+' && printf ' %q' "$@" && echo
    [ -n "${DRY:-}" ] || "$@"
}
# Each skips what exists already; interrupted steps start over
hub() {
    [ -e "$raw/$2" ] || { run hf download --repo-type dataset "$1" --local-dir "$raw/$2.part" "${@:3}" &&
        run mv "$raw/$2.part" "$raw/$2"; }
}
unpack() {
    [ -e "$raw/$1/images" ] || { run python -m zipfile -e "$raw/$1/images.zip" "$raw/$1/part" &&
        run mv "$raw/$1/part/images" "$raw/$1/images"; }
}
fetch() { # the file of a URL; an interrupted download never has the final name
    [ -e "$raw/$1" ] || { run curl -fLo "$raw/$1.part" "$2" && run mv "$raw/$1.part" "$raw/$1"; }
}
convert() { [ -f "$out/$1.parquet" ] || run python prepare_data.py "${@:2}" --out "$out/$1.parquet"; }

# --- data sets ---

geo3k() {
    hub hiyouga/geometry3k geometry3k
    for split in train test; do convert geo3k_$split geo3k --input "$raw/geometry3k" --split $split; done
}
clevr() { # trained on CLEVR, evaluated on the 200 questions of Super-CLEVR that R1-V published
    hub leonardPKU/clevr_cogen_a_train clevr
    hub tobiaslee/Super_clevr200 superclevr
    [ -e "$raw/superclevr/images" ] || { run mkdir -p "$raw/superclevr/part" &&
        run tar -xf "$raw/superclevr/subsplit.tgz" -C "$raw/superclevr/part" &&
        run mv "$raw/superclevr/part/images" "$raw/superclevr/images"; }
    fetch superclevr/test.jsonl "$R1V/superclevr_test200_counting_problems.jsonl"
    convert clevr_train vqa --input "$raw/clevr" --prompt-key problem --image-key image --answer-key solution
    convert clevr_test vqa --input "$raw/superclevr/test.jsonl" --split test --image-root "$raw/superclevr" \
        --image-key image_path --answer-key ground_truth
}
geoqa() { # the test questions name their images ./Geo170K/images/test/NUMBER.png
    hub leonardPKU/GEOQA_R1V_Train_8K geoqa
    hub Luckyjhg/Geo170K Geo170K --include images.zip
    unpack Geo170K
    fetch geoqa_test.jsonl "$R1V/geoqa_test_prompts.jsonl"
    convert geoqa_train geo3k --input "$raw/geoqa" --image-key image --answer-key solution --bad-rows skip
    convert geoqa_test jsonl --input "$raw/geoqa_test.jsonl" --split test --image-root "$raw" --data-source geo3k \
        --prompt-key question --image-key image_path --answer-key ground_truth --instruction geo3k \
        --bad-rows skip
}
virl39k() { # evaluated on MathVista's testmini split
    hub TIGER-Lab/ViRL39K virl39k
    unpack virl39k
    hub AI4Math/MathVista mathvista --include 'data/testmini*'
    convert virl39k_train geo3k --input "$raw/virl39k/39Krelease.parquet" --prompt-key question --image-key image \
        --bad-rows skip
    convert virl39k_test vqa --input "$raw/mathvista/data/testmini*" --split test --image-key decoded_image \
        --bad-rows skip
}
geospot() {
    [ -e "$raw/osv5m" ] || [ -n "${DRY:-}" ] ||
        fail "$raw/osv5m is missing; download OSV-5M (osv5m/osv5m on the hub) there and unpack its images"
    for split in train test; do
        convert geospot_$split geospot --input "$raw/osv5m/$split.csv" --image-root "$raw/osv5m/images/$split" \
            --split $split --limit $([ $split = train ] && echo 80000 || echo 2000)
    done
}

# --- recipes: model, nodes, processes per node, family of the toy, row of the table in docs/hardware.md, and the mean
# tokens of a response that --plan assumes (docs/recipes.md has their sources) ---

GEO3K="--prompts-per-step 512 --group-size 5 --minibatches 4 --steps 60 --lr 1e-6 --max-prompt-tokens 1024
    --max-new-tokens 2048"
LORA="--lora-rank 64 --lora-alpha 32 --lr 3e-5 --master-dtype bf16"
recipe() {
    nodes=1 processes=8 family=qwen2_5_vl vllm="" eval_vllm="" grader="" data=${1%%-*} answer=()
    [ "$data" != geo3k ] || grader="--grader ours easyr1 verl" answer=(--response-tokens 285)
    case $1 in
        geo3k-3b) model=Qwen/Qwen2.5-VL-3B-Instruct processes=1 flags=$GEO3K memory="3B on 1 GPU"
            vllm="--vllm gpu_memory_utilization=0.47" ;;
        geo3k-3b-lora) model=Qwen/Qwen2.5-VL-3B-Instruct processes=1 flags="$GEO3K $LORA"
            memory='3B on 1, `--lora-rank 64 --master-dtype bf16`' ;;
        geo3k-7b) model=Qwen/Qwen2.5-VL-7B-Instruct flags=$GEO3K memory="7B on 8" ;;
        geo3k-qwen3-8b) model=Qwen/Qwen3-VL-8B-Instruct family=qwen3_vl flags=$GEO3K memory="Qwen3-VL-8B on 8"
            answer=(--response-tokens 764) ;;
        geo3k-30b-a3b) model=Qwen/Qwen3-VL-30B-A3B-Instruct family=qwen3_vl_moe nodes=2 flags=$GEO3K
            memory='Qwen3-VL-30B-A3B on 8, `--master-dtype bf16`, or on 16'
            answer=(--response-tokens 764)
            vllm="--vllm tensor_parallel_size=4" eval_vllm="--vllm gpu_memory_utilization=0.9" ;;
        clevr-3b) model=Qwen/Qwen2.5-VL-3B-Instruct memory="3B on 8" answer=(--response-tokens 80)
            flags="--prompts-per-step 16 --group-size 16 --steps 500 --lr 1e-6 --max-new-tokens 1024" ;;
        geoqa-3b) model=Qwen/Qwen2.5-VL-3B-Instruct memory="3B on 8" answer=(--response-tokens 250)
            flags="--prompts-per-step 64 --group-size 8 --steps 125 --lr 1e-6 --max-new-tokens 1024" ;;
        virl39k-7b) model=Qwen/Qwen2.5-VL-7B-Instruct memory="7B on 8"
            flags="--prompts-per-step 384 --group-size 8 --minibatches 3 --steps 202 --lr 1e-6 --max-new-tokens 2048
                --max-pixels 1003520" ;;
        geospot-7b) model=Qwen/Qwen2.5-VL-7B-Instruct memory="7B on 8"
            flags="--prompts-per-step 64 --group-size 8 --steps 1250 --lr 1e-6 --max-new-tokens 1024
                --max-pixels 401408" ;;
        "") fail "no recipe given; use one of: $NAMES" ;;
        *) fail "unknown recipe $1; use one of: $NAMES" ;;
    esac
}

# --- start ---

[[ $name != --help && $name != -h ]] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit; }
steps=${STEPS:-data train eval}
for step in $steps; do
    [[ " data train eval plan " == *" $step "* ]] || fail "STEPS: unknown step $step; use some of: data train eval plan"
done
does() { [[ " $steps " == *" $1 "* ]]; }
if [ -n "$short" ]; then
    export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
    name=${2:-} names=${*:2}
    if [ -z "${TOYS:-}" ]; then # make toy models and data for all recipes, then run each recipe with them
        export TOYS=$out/toys out
        for name in ${names:=$NAMES}; do
            recipe "$name"
            run rm -rf "${out:?}/$name" # of an earlier check
            run python tests/published_layouts.py "$raw" "$data"
            [ -e "$TOYS/$family" ] || run python demo.py model --task geo3k --family $family --out "$TOYS/$family"
            STEPS=data bash runs/recipe.sh --short "$name"
        done
        if [ -n "${DRY:-}" ]; then
            for name in $names; do STEPS="train eval" bash runs/recipe.sh --short "$name"; done
            exit
        fi
        check() {
            if STEPS="train eval" bash runs/recipe.sh --short "$1" > "$out/$1.log" 2>&1 &&
                grep -q '"update/steps": [1-9]' "$out/$1/metrics.jsonl"; then
                echo "$1: ok: 2 steps, 1 evaluation; accuracy says nothing, as the toy is random; log: $out/$1.log"
            else
                tail -n 5 "$out/$1.log"
                echo "error: $1 failed or made no update; log: $out/$1.log" >&2
                return 1
            fi
        }
        export -f check
        printf '%s\n' $names | xargs -P "${JOBS:-2}" -I @ bash -c 'check @'
        exit
    fi
fi
recipe "$name"
for flag in "${@:2}"; do
    case ${flag%%=*} in
        --model | --eval-data | --out)
            fail "${flag%%=*}: the recipe sets it; use OUT=FOLDER, or copy the commands that DRY=1 prints" ;;
    esac
done
more=("${@:2}") eval_more=() start=(python)
[ "$processes" = 1 ] || start=(torchrun --nproc-per-node "$processes")
[ "$nodes" = 1 ] || start=(env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes "$nodes" --nproc-per-node
    "$processes" --rdzv-backend c10d --rdzv-endpoint "${HOST:-HOST}:29500" --max-restarts 3)
if [ -n "$short" ]; then
    model=$TOYS/$family start=(python) vllm="" eval_vllm=""
    # an entropy bonus has a gradient although the rewards of a random model are all 0
    more=(--entropy-coef 0.01 --steps 2 --prompts-per-step 8 --group-size 2 --minibatches 1 --max-new-tokens 8
        --micro-tokens 2048 --eval-every 0 --reward-workers 0)
    eval_more=(--limit 8 --max-new-tokens 8 --reward-workers 0)
fi
[ -n "${DRY:-}" ] || mkdir -p "$raw"
train=$out/${data}_train.parquet test=$out/${data}_test.parquet
settings=(--model "$model" $flags --micro-tokens 8192 --gradient-checkpointing $vllm)
if does plan; then
    [ ! -f "$train" ] || settings+=(--data "$train") # otherwise train.py assumes prompt lengths
    run python train.py --plan --gpu h100 --gpus $((nodes * processes)) "${answer[@]}" "${settings[@]}" "${more[@]}"
fi
if does data; then "$data"; fi
if does train; then
    echo "# computed peak memory, from docs/hardware.md:"
    grep -F -e "| GiB a GPU" -e "| $memory |" docs/hardware.md
    run "${start[@]}" train.py "${settings[@]}" --data "$train" --eval-data "$test" --out "$out/$name" \
        --eval-every 20 --save-every 20 --resume auto "${more[@]}"
fi
if does eval; then # of the newest checkpoint, so that a run that is continued is evaluated again
    newest=$({ ls "$out/$name/checkpoints" 2> /dev/null || true; } | sed -n '/^step_[0-9]*$/p' | tail -n 1)
    run python eval.py "$out/$name" --data "$test" --out "$out/$name/eval_${newest:-step_N}" --baseline "$model" \
        $grader $eval_vllm "${eval_more[@]}"
fi
