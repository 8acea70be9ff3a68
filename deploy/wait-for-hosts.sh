#!/bin/sh
# Waits until the hosts of a hostfile can be reached, then runs the command that follows. For launchers that start at
# the same time as their hosts (Kubernetes), before names resolve and before an sshd runs.
#
#   wait-for-hosts.sh [-t SECONDS] HOSTFILE COMMAND [ARGUMENTS]
#
# -t: how long to wait for all hosts together; default: 600. The exit code is 2 when the time is up.
set -eu

wrong() {
    echo "hvd_cifar: $1; use: wait-for-hosts.sh [-t SECONDS] HOSTFILE COMMAND [ARGUMENTS]" >&2
    exit 2
}

seconds=600
if [ "${1:-}" = -t ]; then
    seconds=${2:-}
    case $seconds in
        '' | *[!0-9]*) wrong "-t $seconds: give a number of seconds" ;;
    esac
    shift 2
fi
[ $# -ge 2 ] && [ -r "$1" ] || wrong "no hostfile ${1:-}"
hosts=$(sed 's/#.*//; s/[[:space:]:].*//' "$1")
[ -n "$hosts" ] || wrong "$1 names no host"
shift

# Prints what is wrong with a host, if anything. This machine itself needs no sshd.
fault() {
    getent hosts "$1" >/dev/null || {
        echo "its name does not resolve"
        return
    }
    [ "${1%%.*}" = "$(hostname)" ] || {
        # timeout: an sshd may accept the connection and then hang.
        said=$(timeout 20 ssh -n -o BatchMode=yes -o ConnectTimeout=5 "$1" true 2>&1) ||
            echo "${said:-no answer}" | tr -d '\r' | tail -n 1
    }
}

began=$(date +%s)
told=
for host in $hosts; do
    while what=$(fault "$host") && [ -n "$what" ]; do
        [ "$told" = "$host" ] || echo "waiting for $host: $what" >&2
        told=$host
        # -gt, since the clock has whole seconds: a difference of 1 may be an instant.
        if [ $(($(date +%s) - began)) -gt "$seconds" ]; then
            echo "hvd_cifar: $host cannot be reached after $seconds s: $what; is it running, and its name in DNS?" >&2
            exit 2
        fi
        sleep 1
    done
done
exec "$@"
