"""What each rank of a job is: its host, its device, its processor and how it computes, gathered once at the start."""

from __future__ import annotations

import io
import pickle
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_cifar.kernels import compiled
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.stalls import PATIENCE
from hvd_cifar.runtime.watch import Peer, Watch, complain

Precision = Literal["float32", "mixed_bfloat16"]


@dataclass(frozen=True)
class RankFacts:
    """A rank, as all ranks know it.

    Attributes:
        host, local_rank, local_size: its place; cloned hosts may share a name.
        device: TensorFlow's name of the one device that it sees.
        threads: of TensorFlow's pool; 0 on a GPU.
        processor: the name of its GPU or CPU.
        rounding: what else decides how libraries divide sums on it: a CPU's cache and vector instructions.
        kind: GPU, x86_64, ...: ranks of one kind compute the same bits value by value.
        kernels: of its convolutions, in words.
        precision: the faster one: bfloat16 on GPUs since Ampere and CPUs with its instructions.
        peer: where its watchdog answers.
    """

    host: str
    local_rank: int
    local_size: int
    device: str
    threads: int
    processor: str
    rounding: str
    kind: str
    kernels: str
    precision: Precision
    peer: Peer

    @property
    def hardware(self) -> str:
        """In words: its processor, and on a CPU its threads."""
        if self.kind == "GPU":
            return self.processor
        return f"{self.threads} thread{'s' * (self.threads > 1)} of {self.processor}"


def facts_of(host: str, device: str, threads: int, peer: Peer) -> RankFacts:
    """This rank's."""
    if "GPU" in device:
        details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
        processor, rounding, kind, kernels = str(details.get("device_name", "a GPU")), "", "GPU", "TensorFlow's"
        is_fast = details.get("compute_capability", (0, 0)) >= (8, 0)
    else:
        processor, rounding = devices.processor(Path("/proc/cpuinfo"))
        kind, kernels = platform.machine(), compiled.about()
        is_fast = devices.multiplies_bfloat16(Path("/proc/cpuinfo"))
    precision: Precision = "mixed_bfloat16" if is_fast else "float32"
    place = (host, hvd.local_rank(), hvd.local_size())
    return RankFacts(*place, device, threads, processor, rounding, kind, kernels, precision, peer)


def gather(host: str, device: str, threads: int, watch: Watch) -> tuple[RankFacts, ...]:
    """The facts of all ranks, by rank. After it their watchdogs know each other. A collective, of one message."""
    peer = watch.listen(hvd.rank(), hvd.size() == hvd.local_size())
    mine = np.frombuffer(pickle.dumps(facts_of(host, device, threads, peer)), np.uint8)
    with tf.device("/CPU:0"):
        stream = io.BytesIO(hvd.allgather(tf.constant(mine), name="facts_of_ranks").numpy().tobytes())
    found: list[RankFacts] = [pickle.load(stream) for _ in range(hvd.size())]  # each pickle says where it ends
    reaches = watch.join([facts.peer for facts in found])
    if watch.is_on and not hvd.allreduce(tf.constant(float(reaches)), op=hvd.Min, name="watchdogs_reach").numpy():
        watch.is_alone = True
        if hvd.rank() == 0:
            complain(
                "warning: the ranks' watchdogs do not reach each other, so a rank that hangs is not named, and the run "
                f"ends after {PATIENCE:g} time-outs; let TCP connections between the hosts through"
            )
    return tuple(found)


def hosts_of(ranks: Sequence[RankFacts]) -> list[int]:
    """For each rank, the rank that acts for its host: the one whose local rank is 0.

    Hosts may share a name. Launchers fill such hosts one after the other, or round-robin. In both cases a rank belongs
    to the first of them that lacks its local rank.
    """
    found: list[int] = []
    for rank, facts in enumerate(ranks):
        if facts.local_rank == 0:
            found.append(rank)
            continue
        place = (facts.host, 0, facts.local_size)
        alike = [s for s in dict.fromkeys(found) if (ranks[s].host, ranks[s].local_rank, ranks[s].local_size) == place]
        found.append(next(s for s in alike if found.count(s) == facts.local_rank))
    return found


def host_names(ranks: Sequence[RankFacts]) -> list[str]:
    """The name of each rank's host, by rank; where hosts share one, with the rank that acts for the host."""
    firsts = hosts_of(ranks)
    names = [ranks[first].host for first in dict.fromkeys(firsts)]
    return [ranks[s].host + f" (rank {s})" * (names.count(ranks[s].host) > 1) for s in firsts]


def differences(ranks: Sequence[RankFacts], value: Callable[[RankFacts], str]) -> str:
    """Which hosts have which value, in words, such as "x on a, b; y on c"; empty where all ranks have the same."""
    by_value: dict[str, dict[str, None]] = {}
    for host, facts in zip(host_names(ranks), ranks, strict=True):
        by_value.setdefault(value(facts), {})[host] = None
    if len(by_value) == 1:
        return ""
    return "; ".join(f"{found} on {_listed(list(hosts))}" for found, hosts in by_value.items())


def _listed(hosts: Sequence[str], most: int = 4) -> str:
    return ", ".join(hosts[:most]) + f" and {len(hosts) - most} more" * (len(hosts) > most)


def unlike_hardware(ranks: Sequence[RankFacts]) -> str:
    """Which hosts have which hardware, in words; empty where all ranks round alike."""
    if len({(facts.hardware, facts.rounding, facts.kind) for facts in ranks}) == 1:
        return ""
    return differences(ranks, lambda facts: facts.hardware) or "processors of the same name differ"
