#!/usr/bin/env bash
# One training over several machines, and rollout servers on nodes of their own. What follows the first word goes to
# train.py; `--resume auto` makes it the command for every start. docs/scale.md: which layout for what. DRY=1 only
# prints. Tested on one machine; not yet on a cluster.
#   sbatch -N 4 --gpus-per-node 8 --signal B:USR1@300 runs/multinode.sh slurm --model M --data F --out O --resume auto
#   NODES="a b c d" SERVERS=2 runs/multinode.sh ssh --model M ...     from a machine that may log in to all of them
#   NODES="a b c d" SERVERS=2 runs/multinode.sh hand --model M ...    prints what to type on each
# NODES     host names by which the nodes reach each other; the last SERVERS of them run servers, the others train
# GPUS      of a node; on servers' nodes TP of them make a server, so that there are GPUS / TP
# PORT      of the rendezvous, on the first node; SERVER_PORT of a node's first server, the others count on from there
# RESTARTS  of dead processes, by torchrun; GRACE: seconds to save in; READY: seconds for servers to come up
# DIR, PYTHON, SERVE  repository, interpreter and server's command, the same on every node. Variables whose names begin
# with HF_, NCCL_, GLOO_, OMP_, VLLM_ are passed on, tokens and keys excepted.
set -euo pipefail
how=${1:-}
shift || true
if [ "$how" = --short ]; then # what it would start on two nodes
    how=hand NODES=${NODES:-a b} SERVERS=${SERVERS:-1}
    set -- --model M --data F --out O --steps 1 "$@"
fi
case $how in slurm | ssh | hand) ;; -h | --help)
    sed -n '2,/^set/{/^#/p}' "$0"
    exit ;; *)
    echo "error: the first word is ${how:-missing}; give slurm, ssh or hand" >&2
    exit 1 ;;
esac
if [ "$how" = slurm ]; then
    DIR=${DIR:-${SLURM_SUBMIT_DIR:-$PWD}} NODES=${NODES:-$(scontrol show hostnames "$SLURM_JOB_NODELIST")}
fi
DIR=${DIR:-$(cd "$(dirname "$0")/.." && pwd)} PYTHON=${PYTHON:-python}
SERVERS=${SERVERS:-0} GPUS=${GPUS:-8} TP=${TP:-1} PORT=${PORT:-29500} SERVER_PORT=${SERVER_PORT:-8000}
RESTARTS=${RESTARTS:-3} GRACE=${GRACE:-60} READY=${READY:-1800} SERVE=${SERVE:-$PYTHON -m engines.serve}
if [ -z "${NODES:-}" ]; then
    echo "error: NODES is missing; give host names, with spaces between" >&2
    exit 1
fi
read -ra nodes <<< "$(tr '\n' ' ' <<< "$NODES")"
if [ "$SERVERS" -ge ${#nodes[@]} ]; then
    echo "error: SERVERS=$SERVERS of ${#nodes[@]} nodes leave none to train; lower it" >&2
    exit 1
fi
trainers=("${nodes[@]::${#nodes[@]}-SERVERS}")
servers=("${nodes[@]:${#nodes[@]}-SERVERS}")
hosts=() urls=() # of each server
for node in "${servers[@]}"; do
    for ((i = 0; i < GPUS / TP; i++)); do
        hosts+=("$node")
        urls+=("http://$node:$((SERVER_PORT + i))")
    done
done
# What servers and train.py have to agree on; --vllm is of servers alone, where there are any
AGREED=" --model --family-paths --dtype --data --eval-data --prompt-key --image-key --answer-key --data-source --instruction
    --bad-rows --max-prompt-tokens --max-new-tokens --min-pixels --max-pixels --lora-rank --sync --env --env-settings
    --max-turns "
flags=() agreed=() vllm=() flag=""
for word in "$@"; do
    case $word in
        --*=*) both=("${word%%=*}" "${word#*=}") flag=${word%%=*} ;;
        --*) both=("$word") flag=$word ;;
        *) both=("$word") ;;
    esac
    [[ ! " ${AGREED//$'\n'/ } " == *" $flag "* ]] || agreed+=("${both[@]}")
    if [ "$flag" = --vllm ] && [ "$SERVERS" != 0 ]; then
        vllm+=("${both[@]}")
    else
        flags+=("${both[@]}")
    fi
done
if [[ "${vllm[*]}" == *tensor_parallel_size* ]]; then
    echo "error: --vllm tensor_parallel_size: give TP to this script instead" >&2
    exit 1
fi
[ "$SERVERS" = 0 ] || flags+=(--rollout server --servers "${urls[@]}")

# --- the command of each process ---

quote() { [ $# = 0 ] || printf '%q ' "$@"; }
passed() {
    local name
    for name in $(compgen -e | grep -E '^(HF|NCCL|GLOO|OMP|VLLM)_' | grep -vE 'TOKEN|KEY'); do quote "$name=${!name}"; done
}
serve() { # number of the server
    local port=${urls[$1]##*:}
    local first=$(((port - SERVER_PORT) * TP))
    echo "cd $(quote "$DIR")&& exec env $(passed)CUDA_VISIBLE_DEVICES=$(seq -s, $first $((first + TP - 1))) $SERVE" \
        "$(quote "${agreed[@]}")--host 0.0.0.0 --port $port --gpus $TP $(quote "${vllm[@]}")"
}
train() { # node. is_host and --local-addr, because torchrun guesses both by the machine's name: wrongly with two networks
    local is_host=0
    [ "$1" != "${trainers[0]}" ] || is_host=1
    echo "cd $(quote "$DIR")&& exec env $(passed)TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 $PYTHON -m torch.distributed.run" \
        "--nnodes ${#trainers[@]} --nproc-per-node $GPUS --rdzv-backend c10d --rdzv-endpoint ${trainers[0]}:$PORT" \
        "--rdzv-id ${SLURM_JOB_ID:-run} --rdzv-conf is_host=$is_host --local-addr $1 --max-restarts $RESTARTS" \
        "--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1 --shutdown-timeout $GRACE train.py $(quote "${flags[@]}")"
}

# --- run there, and ended ---

on() { # node, command. In place of this shell; what runs there ends with it
    local there=(srun --overlap --nodes 1 --ntasks 1 --cpu-bind none --nodelist "$1" bash -c)
    # with a terminal: when it is cut, what runs there gets SIGHUP
    [ "$how" != ssh ] || there=(ssh -tt -o BatchMode=yes -o ServerAliveInterval=15 "$1")
    if [ "$how" = hand ]; then
        echo "$1: $2"
    elif [ -n "${DRY:-}" ]; then
        echo "${there[*]} ${2@Q}"
    else
        exec "${there[@]}" "$2" < /dev/null
    fi
}
if [ "$how" = hand ] || [ -n "${DRY:-}" ]; then
    for i in "${!urls[@]}"; do on "${hosts[i]}" "$(serve "$i")"; done
    for url in "${urls[@]}"; do echo "# until it answers: curl -f $url/health"; done
    for node in "${trainers[@]}"; do on "$node" "$(train "$node")"; done
    [ "$how" != hand ] || [ "$SERVERS" = 0 ] || echo "# servers go on until you end them: Ctrl-C"
    exit
fi
serving=() training=() asked=""
ended() { ! kill -0 "$1" 2> /dev/null; }
# shellcheck disable=SC2329  # the traps call it
ask() { # the trainers to save and end; ssh passes no signals on, but ends
    asked=yes
    for pid in "${training[@]}"; do kill -"$([ "$how" = ssh ] && echo TERM || echo USR1)" "$pid" 2> /dev/null || true; done
    [ ${#training[@]} -gt 0 ] || exit 1
}
# shellcheck disable=SC2329
end() {
    for pid in "${training[@]}" "${serving[@]}"; do kill -TERM "$pid" 2> /dev/null || true; done
    wait
}
trap end EXIT
trap ask TERM INT HUP USR1

for i in "${!urls[@]}"; do
    (on "${hosts[i]}" "$(serve "$i")") &
    serving+=($!)
done
for i in "${!urls[@]}"; do
    until curl --noproxy '*' -fso /dev/null --max-time 5 "${urls[i]}/health"; do
        told=""
        ! ended "${serving[i]}" || told="has ended; its own lines above say why"
        [ $SECONDS -lt "$READY" ] || told="does not answer after READY=$READY seconds"
        [ -z "$told" ] || { echo "error: the server ${urls[i]} $told" >&2; exit 1; }
        sleep 2
    done
done
for node in "${trainers[@]}"; do
    (on "$node" "$(train "$node")") &
    training+=($!)
done
code=0
for pid in "${training[@]}"; do
    status=0
    until wait "$pid" && status=0 || { status=$?; ended "$pid"; }; do :; done # a signal ends a wait, not what it waits for
    [ "$status" = 0 ] || code=$status
done
[ -z "$asked" ] || echo "asked to end; the same command with --resume auto goes on" >&2
exit "$code"
