"""Which device a rank takes, and how many threads: pure functions, so that made-up machines can test them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_cifar.errors import UserError

# Where a control group states its CPU limit: in one file of version 2, or in two of version 1.
QUOTA_FILES = tuple(
    Path("/sys/fs/cgroup", name) for name in ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
)
# Linux's names for instructions that multiply bfloat16: two of x86, one of ARM.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def choose_gpu(views: Sequence[Sequence[str]], local_rank: int) -> int | None:
    """The index, among the GPUs that this process sees, of the one that it takes.

    Args:
        views: for each local rank of this host, the names (UUIDs) of the GPUs that its process sees, in its order.
        local_rank: this process's.

    Returns:
        None where this process sees no GPU: it computes on the CPU.

    Raises:
        UserError: where there are more local ranks than GPUs, or only some ranks see one.
    """
    mine = list(views[local_rank])
    if not any(views):
        return None
    blind = [rank for rank, view in enumerate(views) if not view]
    if blind:
        raise UserError(
            f"local rank {blind[0]} sees no GPU while others on its host do: give every process a GPU, or none"
            " (CUDA_VISIBLE_DEVICES=)"
        )
    if len(views) > 1 and len({gpu for view in views for gpu in view}) == sum(len(view) for view in views):
        return 0  # the scheduler shows each process GPUs of its own
    if len(mine) < len(views):
        raise UserError(
            f"{len(views)} ranks on this host share {len(mine)} GPU{'s' if len(mine) > 1 else ''}: "
            f"start at most {len(mine)} here (-np), or train on the CPU (CUDA_VISIBLE_DEVICES=)"
        )
    return local_rank


def visible_gpus(listing: str, environment: Mapping[str, str]) -> list[str]:
    """UUIDs of the GPUs that CUDA shows a process, in its order.

    Args:
        listing: what `nvidia-smi -L` prints: all GPUs of the host, or of the process's control group.
        environment: of the process; CUDA_VISIBLE_DEVICES names indices or beginnings of UUIDs, up to the first bad one.
    """
    uuids: list[str] = re.findall(r"^GPU \d+:.*\(UUID: ([^)]+)\)", listing, re.MULTILINE)
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return uuids
    visible = []
    for name in (part.strip() for part in chosen.split(",")):
        if name.isdecimal() and int(name) < len(uuids):
            visible.append(uuids[int(name)])
        elif name and not name.isdecimal() and any(uuid.startswith(name) for uuid in uuids):
            visible.append(next(uuid for uuid in uuids if uuid.startswith(name)))
        else:
            break
    return visible


def list_gpus() -> str:
    """What `nvidia-smi -L` prints, or nothing where it cannot run."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def threads_per_rank(masks: Sequence[frozenset[int]], local_rank: int, quota: float | None) -> int:
    """Threads for this rank: its share of the cores that the ranks of its host may use, at least 1.

    Args:
        masks: for each local rank, the CPUs that its process may run on. A launcher that binds ranks gives them
            disjoint ones; a launcher that does not gives them all the same.
        local_rank: this process's.
        quota: the container's limit on the sum of all processes, in cores; None: no limit.
    """
    mine = masks[local_rank]
    sharing = sum(1 for mask in masks if mask & mine)
    cores = len(mine) / sharing
    if quota is not None:
        cores = min(cores, quota / len(masks))
    return max(1, int(cores))


def usable_cores(cores: int, quota: float | None) -> int:
    """Cores for ranks: those on which a process may run, within the container's limit; at least 1."""
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota(files: Sequence[Path] = QUOTA_FILES) -> float | None:
    """This process's control group's limit in cores, or None where there is none."""
    return quota_of([_read(path) for path in files])


def quota_of(texts: Sequence[str]) -> float | None:
    """The limit in cores that the texts of QUOTA_FILES state ("" for a file that is missing); None: no limit."""
    version_2, quota, period = texts
    words = version_2.split() or [quota.strip(), period.strip()]
    if not all(word.isdecimal() for word in words):  # "max", or -1 in version 1
        return None
    return int(words[0]) / int(words[1])


def multiplies_bfloat16(cpuinfo: Path) -> bool:
    """Whether the CPU that a /proc/cpuinfo describes multiplies bfloat16; False where the file is missing."""
    return not BFLOAT16_FLAGS.isdisjoint(_read(cpuinfo).split())


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
