"""All-reduces between hosts: sums, bytes on the wire, and buckets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cluster.hosts import INTERFACE, Cluster
from tests.cluster.jobs import launcher, training, variables

SIZE, ROUNDS = 2**22, 8  # bytes of a message, and messages
PROGRAM = f"""
from hvd_cifar.reporting.quiet import quiet_start
with quiet_start():
    import tensorflow as tf
import numpy as np
from hvd_cifar.distributed.reduction import Reduction
from hvd_cifar.runtime.world import session
import horovod.tensorflow as hvd

def sent():
    (card,) = [line.split() for line in open("/proc/net/dev") if line.split()[0] == "{INTERFACE}:"]
    return int(card[9])  # bytes, without those of the job's start and end

with session(1) as world:
    print(world.algorithm)
    reduction = Reduction(average=False)
    reduce = tf.function(lambda values: reduction.reduce([values])[0], autograph=False)
    ranks = world.size * (world.size + 1) / 2
    for count in (1, 2, 3, 4097, 100_003):  # shorter than the ranks, and no multiple of a segment
        values = np.arange(count, dtype=np.float32) % 13 + 1
        assert (reduce(tf.constant(values * (world.rank + 1))).numpy() == values * ranks).all(), count
    # Rank r sends (r + 1) i times 20,011 numbers to rank i, some of them in several segments.
    splits = [(world.rank + 1) * i * 20_011 for i in range(world.size)]
    numbers = np.arange(sum(splits), dtype=np.int32) + 10_000_000 * world.rank
    received, counts = hvd.alltoall(tf.constant(numbers), splits=tf.constant(splits, tf.int32))
    wanted = []
    for r in range(world.size):
        begin = (r + 1) * 20_011 * sum(range(world.rank)) + 10_000_000 * r
        wanted.append(np.arange(begin, begin + (r + 1) * world.rank * 20_011))
    assert counts.numpy().tolist() == [len(part) for part in wanted]
    assert (received.numpy() == np.concatenate(wanted)).all()
    half = tf.constant(np.full(70_001, world.rank + 1, np.float16))
    assert (hvd.allreduce(half, op=hvd.Sum).numpy() == ranks).all()
    values = np.arange({SIZE // 4}, dtype=np.float32) % 13 + 1
    before = sent()
    reduce(tf.constant([0.0]))  # none of this host's ranks goes on before all have counted
    for _ in range({ROUNDS}):
        assert (reduce(tf.constant(values * (world.rank + 1))).numpy() == values * ranks).all()
    reduce(tf.constant([0.0]))  # all of them are done
    own = [sent() - before] if world.local_rank == 0 else []  # one count a host
    print("sent", *hvd.allgather(tf.constant(own, tf.int64)).numpy())
"""


@pytest.mark.parametrize("slots", [(2, 2), (2, 1)])
def test_bytes_cross_a_host_s_link_once(slots: tuple[int, int], two_hosts: Cluster, tmp_path: Path) -> None:
    """The least that a host can send is 2 (H - 1) / H of the message; a single ring over 4 ranks sends 50% more."""
    said = _reduce(two_hosts, slots, tmp_path / "program.py", PROGRAM)
    (counts,) = re.findall(r"^sent ([\d ]+)$", said, re.MULTILINE)
    sent = [int(count) for count in counts.split()]
    same_on_each = len(set(slots)) == 1
    ring = len(slots) if same_on_each else sum(slots)  # hosts, or ranks, in the ring between hosts
    least = 2 * (ring - 1) / ring * SIZE * ROUNDS
    assert said.splitlines()[0].endswith("ring in two levels" if same_on_each else "ring")
    assert len(sent) == len(slots), said
    assert all(least < count < 1.06 * least for count in sent), [count / least for count in sent]


def _reduce(hosts: Cluster, slots: tuple[int, int], program: Path, text: str) -> str:
    program.write_text(text)
    words: list[str | Path] = [*launcher(), "--hostfile", hosts.hostfile(*slots), "python", program]
    done = hosts[0].run(words, env=variables(hosts[0]), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_rank_that_must_not_sleep_keeps_all_awake(two_hosts: Cluster, tmp_path: Path) -> None:
    """As where one host has GPUs: ranks that wait in different ways would wait for each other for ever."""
    own = "import os, socket\nos.environ['HOROVOD_SHARES_CORE'] = str(int(socket.gethostname() == 'node1'))\n"
    _reduce(two_hosts, (1, 1), tmp_path / "program.py", own + PROGRAM)


def test_virtual_shards_on_two_hosts_end_with_one_rank_s_bits(two_hosts: Cluster, embedded: Path) -> None:
    found = {}
    for name, slots, options in (
        ("two", (1, 1), ["--overlap", "on", "--bucket-bytes", "20001"]),
        ("one", (1,), []),
    ):
        words: list[str | Path] = [*launcher(), "--hostfile", two_hosts.hostfile(*slots)]
        words += training(embedded, two_hosts.own / f"bits-{name}", "--virtual-shards", "4", *options)
        done = two_hosts[0].run(words, env=variables(two_hosts[0]), timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("all-reduce over mpi (all-to-all and all-gather; TCP" in done.stdout) == (len(slots) > 1), done.stdout
        summary = json.loads((two_hosts[0].files / f"bits-{name}" / "summary.json").read_text())
        found[name] = summary["weights_sha256"]
    assert found["two"] == found["one"]
