#!/bin/sh
# ray_node.sh HOST MEMTRACE FOLDER: one host of a Ray cluster, as docs/how-to/many-hosts.md starts it. Both end
# when host-a has trained. Each host has one GPU, so Ray Train uses both.
set -eu
host=$1 memtrace=$2 folder=$3
programs=${0%/*}
export RAY_TMPDIR="$RAY_TMPDIR/$host" RAY_raylet_start_wait_time_s=120
mkdir -p "$RAY_TMPDIR"
resources='--num-cpus 2 --num-gpus 1 --disable-usage-stats'
if [ "$host" = host-a ]; then
    "$memtrace" --job gpt --runs "$folder/runs" -- ray start --head --block --port 6379 --node-ip-address 10.77.0.1 --include-dashboard false $resources \
        >"$folder/$host.log" 2>&1 &
else
    # Only the head's port says that it has begun.
    until python -c 'import socket; socket.create_connection(("host-a", 6379), 1)' 2>/dev/null; do sleep 0.2; done
    "$memtrace" --job gpt --runs "$folder/runs" -- ray start --address host-a:6379 --block --node-ip-address 10.77.0.2 $resources >"$folder/$host.log" 2>&1 &
fi
node=$!
# `ray stop` would leave `ray start --block` running. It ends with 1 at SIGTERM, without memtrace too.
stop() { kill -TERM "$node"; wait "$node" || true; }
status=0
if [ "$host" = host-a ]; then
    timeout 300 python "$programs/ray_train.py" "$folder" || status=$?
    touch "$folder/trained"
    # A node whose head has gone takes 30 seconds to end.
    until [ -e "$folder/stopped" ]; do sleep 0.2; done
    stop
else
    until [ -e "$folder/trained" ]; do sleep 0.2; done
    stop
    touch "$folder/stopped"
fi
[ "$status" = 0 ] || cat "$folder/$host.log" >&2
exit "$status"
