#!/bin/sh
# Waits until the hosts of a hostfile can be reached, then becomes the command that follows. For launchers that start at
# the same time as their hosts, whose names do not resolve yet, and whose sshd is not there yet (Kubernetes).
#
#   wait-for-hosts.sh [-t SECONDS] HOSTFILE COMMAND [ARGUMENTS]
#
# -t: how long to wait for all of them together; default: 600. Exit code 2 when it gives up.
set -eu

seconds=600
if [ "${1:-}" = -t ]; then
    seconds=$2
    shift 2
fi
if [ $# -lt 2 ] || ! [ -r "$1" ]; then
    echo "hvd_cifar: no hostfile ${1:-}; use: wait-for-hosts.sh [-t SECONDS] HOSTFILE COMMAND [ARGUMENTS]" >&2
    exit 2
fi
hostfile=$1
shift

# What is wrong with a host, or nothing. This machine has no need of an sshd of its own.
fault() {
    getent hosts "$1" >/dev/null || {
        echo "its name does not resolve"
        return
    }
    [ "${1%%.*}" = "$(hostname)" ] || {
        said=$(ssh -n -o BatchMode=yes -o ConnectTimeout=5 "$1" true 2>&1) || echo "$said" | tr -d '\r' | tail -n 1
    }
}

began=$(date +%s)
told=
# shellcheck disable=SC2013 # names have no spaces
for host in $(sed 's/#.*//; s/[[:space:]:].*//' "$hostfile"); do
    while what=$(fault "$host") && [ -n "$what" ]; do
        if [ $(($(date +%s) - began)) -ge "$seconds" ]; then
            echo "hvd_cifar: $host cannot be reached after $seconds s: $what; is it running, and its name in DNS?" >&2
            exit 2
        fi
        [ "$told" = "$host" ] || echo "waiting for $host: $what" >&2
        told=$host
        sleep 1
    done
done
exec "$@"
