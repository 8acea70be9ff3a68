# The image: the environment as `./run.sh setup` makes it, the code, and an sshd for other nodes; deploy/containers.md.
#
#   docker build -t hvd-cifar .
#   docker build -t hvd-cifar:gpu --build-arg GPU=1 .
#
# BASE: Debian or Ubuntu, whose Python the image takes (3.10 to 3.13). CUDA and NCCL come with TensorFlow.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends binutils g++ make python3 python3-venv
# The same path as in the image: scripts of an environment contain it.
WORKDIR /opt/hvd_cifar
# What set-up reads, and no more: another line of code elsewhere does not build Horovod anew.
COPY run.sh setup.cfg pyproject.toml LICENSE NOTICE ./
COPY hvd_cifar/__init__.py hvd_cifar/errors.py hvd_cifar/import_path.py hvd_cifar/
COPY hvd_cifar/distributed hvd_cifar/distributed
COPY hvd_cifar/launch/__init__.py hvd_cifar/launch/
COPY hvd_cifar/launch/cluster/__init__.py hvd_cifar/launch/cluster/hosts.py hvd_cifar/launch/cluster/ssh.py hvd_cifar/launch/cluster/
COPY hvd_cifar/runtime/check_build.py hvd_cifar/runtime/
COPY hvd_cifar/launch/install hvd_cifar/launch/install
COPY hvd_cifar/kernels/native hvd_cifar/kernels/native
COPY deploy/slim.sh deploy/
ARG GPU=
RUN ./run.sh setup ${GPU:+--gpu} && deploy/slim.sh .venv \
    && .venv/bin/python hvd_cifar/runtime/check_build.py ${GPU:+--gpu}

FROM ${BASE}
# Ubuntu already has a user 1000. Host keys in an image would be the same for everybody.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
        openssh-client openssh-server procps python3 tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log /etc/ssh/ssh_host_* \
    && (! getent passwd 1000 >/dev/null || userdel --remove "$(getent passwd 1000 | cut -d: -f1)") \
    && useradd --uid 1000 --create-home --shell /bin/bash --password '*' hvd \
    && install -d -o hvd -g hvd -m 700 /home/hvd/.ssh \
    && install -d -o hvd -g hvd /home/hvd/.cache /home/hvd/.cache/hvd_cifar /home/hvd/runs
COPY --from=build /opt/hvd_cifar/.venv /opt/hvd_cifar/.venv
COPY . /opt/hvd_cifar
COPY deploy/ssh.conf /etc/ssh/ssh_config.d/hvd_cifar.conf
# A checkout made with umask 077 is for its owner alone; the image runs as another user.
RUN find /opt/hvd_cifar -path /opt/hvd_cifar/.venv -prune -o -exec chmod go+rX {} + \
    && chmod 644 /etc/ssh/ssh_config.d/hvd_cifar.conf \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/hvd_cifar/hvd_cifar
# No cross-memory attach between ranks: where a container may not use it, MPI complains of "Read -1, expected ...".
ENV PATH=/opt/hvd_cifar/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 \
    OMPI_MCA_btl_vader_single_copy_mechanism=none
USER hvd
WORKDIR /home/hvd
EXPOSE 2222
HEALTHCHECK --interval=30s --timeout=20s --start-period=10s --retries=3 CMD ["/opt/hvd_cifar/deploy/healthcheck.sh"]
# tini passes signals on and reaps ended processes, as Python and a shell do not; -s: also where it is not process 1.
ENTRYPOINT ["/usr/bin/tini", "-s", "--", "/opt/hvd_cifar/deploy/entry.sh"]
CMD ["train"]
