#!/bin/sh
# The container's entry point. `sshd` waits for ranks of another container; other arguments are those of ./run.sh.
set -eu

if [ "${1:-}" != sshd ]; then
    exec python -I -m hvd_cifar.launch "$@"
fi

# The cluster's key is also the host key, so that it proves membership of the cluster in both directions (ssh.conf).
for key in "$HOME"/.ssh/id_ed25519 "$HOME"/.ssh/id_ecdsa "$HOME"/.ssh/id_rsa; do
    if [ -r "$key" ] && [ -r "$key.pub" ]; then
        exec /usr/sbin/sshd -D -e -f /opt/hvd_cifar/deploy/sshd.conf -h "$key"
    fi
done
echo "hvd_cifar: no key that user $(id -un) can read in $HOME/.ssh; mount a folder with id_ed25519 and" \
    "id_ed25519.pub there (deploy/containers.md)" >&2
exit 2
