#!/bin/sh
# hosts.sh COMMAND...: runs COMMAND on two simulated hosts at once. Each has its own network namespace and host name
# (host-a at 10.77.0.1, host-b at 10.77.0.2), and {host} in an argument is its name. Needs root and iproute2.
#
# Exit status: 77 if this machine does not permit it, with the reason on stderr; else that of the first host that fails.
set -u
command -v ip >/dev/null || { echo "SKIPPED: ip is missing (Debian: apt-get install iproute2)" >&2; exit 77; }
a="mt$$a" b="mt$$b"
end() { ip netns del "$a" 2>/dev/null; ip netns del "$b" 2>/dev/null; }
trap end EXIT
trap 'exit 130' INT TERM
set_up() {
    ip netns add "$a" && ip netns add "$b" && ip link add "$a" netns "$a" type veth peer name "$b" netns "$b" &&
        ip -n "$a" addr add 10.77.0.1/24 dev "$a" && ip -n "$b" addr add 10.77.0.2/24 dev "$b" &&
        ip -n "$a" link set lo up && ip -n "$b" link set lo up && ip -n "$a" link set "$a" up && ip -n "$b" link set "$b" up &&
        unshare --uts true
}
reason=$(set_up 2>&1) || { echo "SKIPPED: network namespaces are not permitted: $reason" >&2; exit 77; }
on() {
    namespace=$1 host=$2 interface=$3
    shift 3
    # A name for the address of each host, as a resolver has. Only this mount namespace sees it.
    exec ip netns exec "$namespace" unshare --uts --mount sh -c '
        host=$1 interface=$2; shift 2
        hostname "$host" || exit 77
        hosts=$(mktemp) && printf "127.0.0.1 localhost\n10.77.0.1 host-a\n10.77.0.2 host-b\n" >"$hosts" && mount --bind "$hosts" /etc/hosts
        export GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="$interface"
        for word do shift; set -- "$@" "$(printf %s "$word" | sed "s/{host}/$host/g")"; done
        exec "$@"' sh "$host" "$interface" "$@"
}
(on "$a" host-a "$a" "$@") &
first=$!
(on "$b" host-b "$b" "$@") &
second=$!
wait "$first"; one=$?
wait "$second"; two=$?
[ "$one" -ne 0 ] && exit "$one"
exit "$two"
