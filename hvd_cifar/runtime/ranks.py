"""What each rank of a job is: its host, its device, its processor and how it computes, gathered once at the start."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tensorflow as tf

from hvd_cifar.distributed import collectives
from hvd_cifar.kernels import compiled
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.watch import Peer, Watch

if TYPE_CHECKING:
    from hvd_cifar.runtime.world import World

MOST_NAMED = 4  # hosts in a list
Precision = Literal["float32", "mixed_bfloat16"]


@dataclass(frozen=True)
class RankFacts:
    """A rank, as all ranks know it."""

    host: str
    first: int  # rank of its host; cloned hosts may share a name
    threads: int  # of TensorFlow's pool; 0 on a GPU
    processor: str  # the name of its GPU or CPU
    rounding: str  # what else decides how libraries divide sums on it: a CPU's cache and vector instructions
    kind: str  # GPU, x86_64, ...: ranks of one kind compute the same bits value by value
    kernels: str  # of its convolutions, in words
    precision: Precision  # the faster one: bfloat16 on GPUs since Ampere and CPUs with its instructions
    peer: Peer  # where its watchdog answers

    @property
    def hardware(self) -> str:
        """In words: its processor, and on a CPU its threads."""
        if self.kind == "GPU":
            return self.processor
        return f"{self.threads} thread{'s' * (self.threads > 1)} of {self.processor}"


def _facts_of(world: World, peer: Peer) -> RankFacts:
    if "GPU" in world.device:
        details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
        processor, rounding, kind, kernels = str(details.get("device_name", "a GPU")), "", "GPU", "TensorFlow's"
        is_fast = details.get("compute_capability", (0, 0)) >= (8, 0)
    else:
        processor, rounding = devices.processor(Path("/proc/cpuinfo"))
        kind, kernels = platform.machine(), compiled.about()
        is_fast = devices.multiplies_bfloat16(Path("/proc/cpuinfo"))
    precision: Precision = "mixed_bfloat16" if is_fast else "float32"
    return RankFacts(world.host, world.first, world.threads, processor, rounding, kind, kernels, precision, peer)


def gather(world: World, watch: Watch) -> tuple[RankFacts, ...]:
    """The facts of all ranks, by rank. After it their watchdogs know each other. A collective, of one message."""
    peer = watch.listen(world.rank, one_host=world.size == world.local_size)
    found: list[RankFacts] = collectives.all_gather_object(_facts_of(world, peer))
    watch.peers = [facts.peer for facts in found]
    return tuple(found)


def differences(found: Iterable[tuple[str, str]]) -> str:
    """Which hosts have which value, in words, such as "x on a, b; y on c"; empty where all have the same.

    `found`: host and value, in the order of ranks.
    """
    by_value: dict[str, dict[str, None]] = {}
    for host, value in found:
        by_value.setdefault(value, {})[host] = None
    listed = {value: ", ".join([*hosts][:MOST_NAMED]) for value, hosts in by_value.items()}
    more = {value: len(hosts) - MOST_NAMED for value, hosts in by_value.items()}
    parts = [f"{value} on {hosts}" + f" and {more[value]} more" * (more[value] > 0) for value, hosts in listed.items()]
    return "; ".join(parts) if len(parts) > 1 else ""


def unlike_hardware(ranks: Sequence[RankFacts]) -> str:
    """Which hosts have which hardware, in words; empty where all ranks round alike."""
    if len({(facts.hardware, facts.rounding, facts.kind) for facts in ranks}) == 1:
        return ""
    return differences((facts.host, facts.hardware) for facts in ranks) or "processors of the same name differ"
