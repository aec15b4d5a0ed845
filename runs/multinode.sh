#!/usr/bin/env bash
# Train on several machines, optionally with rollout servers on separate nodes. Everything after the first word is
# passed to train.py; with `--resume auto` the same command starts and resumes a run. docs/scale.md compares layouts.
# DRY=1 only prints the commands. Tested on one machine; not yet on a cluster.
#   sbatch -N 4 --gpus-per-node 8 --signal B:USR1@300 runs/multinode.sh slurm --model M --data F --out O --resume auto
#   NODES="a b c d" SERVERS=2 runs/multinode.sh ssh --model M ...     from a machine that can log in to all of them
#   NODES="a b c d" SERVERS=2 runs/multinode.sh hand --model M ...    prints the command for each node
# NODES     host names by which the nodes reach each other; the last SERVERS (0) of them run servers, the others train
# GPUS      GPUs per node (8); a server uses TP (1) of them, so a server node runs GPUS / TP servers
# PORT      port of the rendezvous on the first node (29500); SERVER_PORT (8000): of a node's first server, the others
#           follow. Numbers in parentheses are defaults
# RESTARTS  restarts of dead processes by torchrun (3); GRACE (60): seconds to save; READY (1800): seconds for servers
#           to start
# DIR, PYTHON, SERVE  repository, interpreter and server command, the same on every node. Variables whose names begin
# with HF_, NCCL_, GLOO_, OMP_, VLLM_ are passed on, except tokens and keys.
set -euo pipefail
how=${1:-}
shift || true
if [ "$how" = --short ]; then # print the commands for two nodes
    how=hand NODES=${NODES:-a b} SERVERS=${SERVERS:-1}
    set -- --model M --data F --out O --steps 1 "$@"
fi
case $how in slurm | ssh | hand) ;; -h | --help)
    sed -n '2,/^set/{/^#/p}' "$0"
    exit ;; *)
    echo "error: the first argument is ${how:-missing}; use slurm, ssh or hand" >&2
    exit 1 ;;
esac
if [ "$how" = slurm ]; then
    DIR=${DIR:-${SLURM_SUBMIT_DIR:-$PWD}} NODES=${NODES:-$(scontrol show hostnames "$SLURM_JOB_NODELIST")}
fi
DIR=${DIR:-$(cd "$(dirname "$0")/.." && pwd)} PYTHON=${PYTHON:-python}
SERVERS=${SERVERS:-0} GPUS=${GPUS:-8} TP=${TP:-1} PORT=${PORT:-29500} SERVER_PORT=${SERVER_PORT:-8000}
RESTARTS=${RESTARTS:-3} GRACE=${GRACE:-60} READY=${READY:-1800} SERVE=${SERVE:-$PYTHON -m engines.serve}
if [ -z "${NODES:-}" ]; then
    echo "error: NODES is missing; set it to host names separated by spaces" >&2
    exit 1
fi
read -ra nodes <<< "$(tr '\n' ' ' <<< "$NODES")"
if [ "$SERVERS" -ge ${#nodes[@]} ]; then
    echo "error: SERVERS=$SERVERS of ${#nodes[@]} nodes leaves none for training; lower it" >&2
    exit 1
fi
trainers=("${nodes[@]::${#nodes[@]}-SERVERS}")
servers=("${nodes[@]:${#nodes[@]}-SERVERS}")
hosts=() urls=() # one item per server
for node in "${servers[@]}"; do
    for ((i = 0; i < GPUS / TP; i++)); do
        hosts+=("$node")
        urls+=("http://$node:$((SERVER_PORT + i))")
    done
done
# The flags on which servers and train.py must agree; --vllm goes only to the servers, if there are any
AGREED=" --model --family-paths --dtype --data --eval-data --prompt-key --image-key --answer-key --data-source --instruction
    --bad-rows --max-prompt-tokens --max-new-tokens --min-pixels --max-pixels --lora-rank --sync --env --env-settings
    --max-turns "
train_flags=() server_flags=() vllm_flags=() flag=""
for word in "$@"; do
    case $word in
        --*=*) words=("${word%%=*}" "${word#*=}") flag=${word%%=*} ;;
        --*) words=("$word") flag=$word ;;
        *) words=("$word") ;;
    esac
    [[ ! " ${AGREED//$'\n'/ } " == *" $flag "* ]] || server_flags+=("${words[@]}")
    if [ "$flag" = --vllm ] && [ "$SERVERS" != 0 ]; then
        vllm_flags+=("${words[@]}")
    else
        train_flags+=("${words[@]}")
    fi
done
if [[ "${vllm_flags[*]}" == *tensor_parallel_size* ]]; then
    echo "error: --vllm tensor_parallel_size: set the variable TP of this script instead" >&2
    exit 1
fi
[ "$SERVERS" = 0 ] || train_flags+=(--rollout server --servers "${urls[@]}")

# --- the command of each process ---

quote() { [ $# = 0 ] || printf '%q ' "$@"; }
exports() {
    local name
    for name in $(compgen -e | grep -E '^(HF|NCCL|GLOO|OMP|VLLM)_' | grep -vE 'TOKEN|KEY'); do quote "$name=${!name}"; done
}
serve() { # argument: index of the server
    local port=${urls[$1]##*:}
    local first=$(((port - SERVER_PORT) * TP))
    echo "cd $(quote "$DIR")&& exec env $(exports)CUDA_VISIBLE_DEVICES=$(seq -s, $first $((first + TP - 1))) $SERVE" \
        "$(quote "${server_flags[@]}")--host 0.0.0.0 --port $port --gpus $TP $(quote "${vllm_flags[@]}")"
}
train() { # argument: node. With two networks torchrun's guesses of is_host and --local-addr by host name are wrong
    local is_host=0
    [ "$1" != "${trainers[0]}" ] || is_host=1
    echo "cd $(quote "$DIR")&& exec env $(exports)TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 $PYTHON -m torch.distributed.run" \
        "--nnodes ${#trainers[@]} --nproc-per-node $GPUS --rdzv-backend c10d --rdzv-endpoint ${trainers[0]}:$PORT" \
        "--rdzv-id ${SLURM_JOB_ID:-run} --rdzv-conf is_host=$is_host --local-addr $1 --max-restarts $RESTARTS" \
        "--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1 --shutdown-timeout $GRACE" \
        "train.py $(quote "${train_flags[@]}")"
}

# --- running and ending the commands on their nodes ---

run_on() { # arguments: node, command. Replaces this shell; the remote process ends with it
    local launcher=(srun --overlap --nodes 1 --ntasks 1 --cpu-bind none --nodelist "$1" bash -c)
    # with a terminal, so that the remote process gets SIGHUP when the connection is lost
    [ "$how" != ssh ] || launcher=(ssh -tt -o BatchMode=yes -o ServerAliveInterval=15 "$1")
    if [ "$how" = hand ]; then
        echo "$1: $2"
    elif [ -n "${DRY:-}" ]; then
        echo "${launcher[*]} ${2@Q}"
    else
        exec "${launcher[@]}" "$2" < /dev/null
    fi
}
if [ "$how" = hand ] || [ -n "${DRY:-}" ]; then
    for i in "${!urls[@]}"; do run_on "${hosts[i]}" "$(serve "$i")"; done
    for url in "${urls[@]}"; do echo "# wait until this succeeds: curl -f $url/health"; done
    for node in "${trainers[@]}"; do run_on "$node" "$(train "$node")"; done
    [ "$how" != hand ] || [ "$SERVERS" = 0 ] || echo "# servers keep running until you stop them with Ctrl-C"
    exit
fi
serving=() training=() stopping=""
has_ended() { ! kill -0 "$1" 2> /dev/null; }
# shellcheck disable=SC2329  # called by the traps
ask_to_stop() { # ask the trainers to save and end. ssh does not forward signals; it ends, which ends the remote process
    stopping=yes
    for pid in "${training[@]}"; do kill -"$([ "$how" = ssh ] && echo TERM || echo USR1)" "$pid" 2> /dev/null || true; done
    [ ${#training[@]} -gt 0 ] || exit 1
}
# shellcheck disable=SC2329
end_all() {
    for pid in "${training[@]}" "${serving[@]}"; do kill -TERM "$pid" 2> /dev/null || true; done
    wait
}
trap end_all EXIT
trap ask_to_stop TERM INT HUP USR1

for i in "${!urls[@]}"; do
    (run_on "${hosts[i]}" "$(serve "$i")") &
    serving+=($!)
done
for i in "${!urls[@]}"; do
    until curl --noproxy '*' -fso /dev/null --max-time 5 "${urls[i]}/health"; do
        problem=""
        ! has_ended "${serving[i]}" || problem="has ended; see its output above"
        [ $SECONDS -lt "$READY" ] || problem="does not answer after READY=$READY seconds"
        [ -z "$problem" ] || { echo "error: the server ${urls[i]} $problem" >&2; exit 1; }
        sleep 2
    done
done
for node in "${trainers[@]}"; do
    (run_on "$node" "$(train "$node")") &
    training+=($!)
done
code=0
for pid in "${training[@]}"; do
    status=0
    until wait "$pid" && status=0 || { status=$?; has_ended "$pid"; }; do :; done # a signal ends only the wait
    [ "$status" = 0 ] || code=$status
done
[ -z "$stopping" ] || echo "stopped by a signal; run the same command with --resume auto to continue" >&2
exit "$code"
