#!/usr/bin/env bash
# Runs the programs in simulate/programs over the simulated CUDA and reports which of them failed.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: simulate/check.sh [--torch VERSION]... [PATTERN]

Runs every program of simulate/programs (those whose line matches PATTERN) over the simulated CUDA, for the default
PyTorch of scripts/venv or the versions named, and `mlp` for the version whose figures an H200 gave. The last line is
`N passed, M failed`; the exit status is 1 if any failed. Installs what is missing.
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
sim=$here/../scripts/sim
versions=()
pattern=
while [ $# -gt 0 ]; do
    case $1 in
        --torch) versions+=("${2:?--torch needs a version}"); shift 2 ;;
        --help | -h) usage; exit 0 ;;
        -*) usage >&2; exit 2 ;;
        *) pattern=$1; shift ;;
    esac
done
[ ${#versions[@]} -gt 0 ] || versions=("$(sed -n 's/^default_torch=//p' "$here/../scripts/venv")")

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
count=0
readonly JOBS=${JOBS:-$(nproc)}
unset LD_PRELOAD PYTORCH_CUDA_ALLOC_CONF CUDA_VISIBLE_DEVICES
for name in $(compgen -e SIMCUDA_ || true); do unset "$name"; done

# check [NAME=VALUE]... PROGRAM [ARGUMENT]...: starts it as soon as fewer than JOBS others run.
check() {
    [[ "torch $SIM_TORCH: $*" == *$pattern* ]] || return 0
    count=$((count + 1))
    while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n; done
    run "$scratch/result.$count" "$@" &
}

# run RESULT [NAME=VALUE]... PROGRAM [ARGUMENT]...: writes a line about it, and why it failed.
run() {
    local result=$1 settings=() start=$EPOCHREALTIME output verdict=ok
    shift
    local line="torch $SIM_TORCH: $*"
    while [[ $1 == *=* ]]; do settings+=("$1"); shift; done
    local program=$1
    shift
    output=$(env "${settings[@]}" timeout 300 "$sim" python3 "$here/programs/$program.py" "$@" 2>&1) || verdict=FAIL
    {
        printf '%-5s %s  (%d ms)\n' $verdict "$line" $(((${EPOCHREALTIME/./} - ${start/./}) / 1000))
        [ $verdict = ok ] || tail -15 <<<"$output" | sed 's/^/      | /'
    } >"$result"
    cat "$result"
}

SIM_TORCH=none
export SIM_TORCH
for major in 12 13; do
    check SIM_LD_PATH=1 SIMCUDA_LEDGER="$scratch/api.%p" api "$major"
done

for SIM_TORCH in "${versions[@]}"; do
    check basics
    check mlp
    check oom
    check oom_training
    backends=("" expandable_segments:True backend:cudaMallocAsync max_split_size_mb:64,garbage_collection_threshold:0.8)
    for backend in "${backends[@]}"; do
        for time in 0 100; do
            check PYTORCH_CUDA_ALLOC_CONF="$backend" SIMCUDA_KERNEL_US=$time SIMCUDA_DEVICES=2 allocator
        done
        check PYTORCH_CUDA_ALLOC_CONF="$backend" SIMCUDA_LEDGER="$scratch/torch.%p" ledger
    done
    # `selection` comes first, `linear_algebra` alone: fresh memory is zero, and both depend on values.
    check CUDNN=1 modules selection convolutions recurrent encoder autocast attention embedding fourier
    check modules linear_algebra
    check CUDNN=1 SIMCUDA_CUDNN_WORKSPACE=32M modules convolutions
    check CUDNN=0 modules convolutions recurrent
    check CUDNN=0 SIMCUDA_SM=80 modules attention
    check graph
    check loader
    check profiler
    check SIMCUDA_DEVICES=2 ddp
    check SIMCUDA_KERNEL_US=1000 sync
    check SIMCUDA_MEMORY=80G big
    check SIMCUDA_MEMORY=140G workspaces
    check SIMCUDA_MEMORY=80G PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True many_handles
    check recorder
    check sharing
    for backend in "" expandable_segments:True; do
        check PYTORCH_CUDA_ALLOC_CONF="$backend" SIMCUDA_DEVICES=2 SIMCUDA_SHARED="$(mktemp -d -p "$scratch")" capacity
    done
    check killed
    # SIMCUDA_SHARED: another process sees the same usage.
    for mode in LAZY EAGER; do
        check CUDA_MODULE_LOADING=$mode SIMCUDA_LIBRARY_MEMORY=1 SIMCUDA_CONTEXT=500M SIMCUDA_RESERVED=600M \
            SIMCUDA_PROCESSES=4242:/usr/bin/other:1G SIMCUDA_SHARED="$(mktemp -d -p "$scratch")" library_memory
    done
    check SIMCUDA_FAIL=cuMemAlloc_v2:3,cudaHostAlloc:1 faults
    if cc -shared -fPIC -o "$scratch/tracer.so" "$here/programs/tracer.c" -ldl; then
        check traced "$scratch/tracer.so"
    else
        count=$((count + 1))
        echo "FAIL  tracer.c does not compile" | tee "$scratch/result.$count"
    fi
done
# `mlp` has an H200's figures of this version.
[[ " ${versions[*]} " == *" 2.11.0 "* ]] || SIM_TORCH=2.11.0 check mlp
wait
passed=$(cat "$scratch"/result.* 2>/dev/null | grep -c '^ok ')
printf '%d passed, %d failed\n' "$passed" $((count - passed))
[ "$passed" = "$count" ]
