"""The choice of a rank's device and threads: pure functions, which tests call with made-up machines."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from hvd_cifar.errors import UserError

# Linux's names for instructions that multiply bfloat16: two of x86, one of ARM.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
# Beginnings of its names for vector instructions, on x86 and ARM.
VECTOR_FLAGS = ("avx", "amx", "fma", "asimd", "sve", "sme", "bf16")


def choose_gpu(views: Sequence[Sequence[str]], local_rank: int) -> int | None:
    """The index of this rank's GPU among the GPUs that its process sees; None where no rank of this host sees one.

    `views`: for each local rank, the names (UUIDs) of the GPUs that its process sees, in CUDA's order. Raises UserError
    where there are more local ranks than GPUs, or only some ranks see one.
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
    """UUIDs of the GPUs that CUDA shows to a process, in CUDA's order. `listing`: the output of `nvidia-smi -L`.

    CUDA_VISIBLE_DEVICES holds indices or prefixes of UUIDs; CUDA stops at the first that does not exist.
    """
    uuids: list[str] = re.findall(r"^GPU \d+:.*\(UUID: ([^)]+)\)", listing, re.MULTILINE)
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is None:
        return uuids
    visible: list[str] = []
    for name in map(str.strip, chosen.split(",")):
        meant = uuids[int(name) :][:1] if name.isdecimal() else [u for u in uuids if name and u.startswith(name)][:1]
        if not meant:
            break
        visible += meant
    return visible


def hides_all(chosen: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES (None: not set) hides the GPUs of any host: empty, or -1, as TensorFlow has it."""
    return chosen is not None and (not chosen.strip() or chosen.strip().startswith("-"))


def list_gpus() -> str:
    """The output of `nvidia-smi -L`, or "" where it cannot run."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def threads_per_rank(masks: Sequence[frozenset[int]], local_rank: int, quota: float | None) -> int:
    """Threads for this rank: its share of the cores that its host's ranks may use, at least 1.

    `masks`: for each local rank, the CPUs that its process may run on. `quota`: as of `cpu_quota`.
    """
    mine = masks[local_rank]
    cores = len(mine) / sum(1 for mask in masks if mask & mine)
    return max(1, int(cores if quota is None else min(cores, quota / len(masks))))


def usable_cores(cores: int, quota: float | None) -> int:
    """Cores that ranks may use: `cores` of the CPU mask, but no more than the container's quota; at least 1."""
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The limit in cores of this process's control group and those around it; None: no limit."""
    quotas = []
    for folder in _group_folders(root):
        version_2, quota, period = (_read(folder / f"cpu.{name}") for name in ("max", "cfs_quota_us", "cfs_period_us"))
        words = (version_2 or f"{quota} {period}").split()
        if len(words) == 2 and all(word.isdecimal() for word in words):  # else "max", or -1 in version 1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _group_folders(root: Path) -> Iterator[Path]:
    """The folders of this process's CPU control group and those around it, of versions 1 and 2; some may be missing.

    A container sees its own group as the outermost. systemd and Slurm limit groups further in.
    """
    for line in ["::/", ":cpu:/", *_read(root / "proc" / "self" / "cgroup").splitlines()]:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers or "cpu" in controllers.split(","):
            base = root / "sys" / "fs" / "cgroup" / ("cpu" if controllers else "")
            inner = PurePosixPath(path.lstrip("/"))
            yield from (base / part for part in (inner, *inner.parents))


def multiplies_bfloat16(cpuinfo: Path) -> bool:
    """Whether the CPU that a /proc/cpuinfo describes multiplies bfloat16; False where the file is missing."""
    return not BFLOAT16_FLAGS.isdisjoint(_read(cpuinfo).split())


def processor(cpuinfo: Path) -> tuple[str, str]:
    """Of the CPU that a /proc/cpuinfo describes: its name, and what else decides how libraries divide sums on it, its
    cache and its vector instructions.
    """
    first, _, _ = _read(cpuinfo).partition("\n\n")
    lines = (line.partition(":") for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    part = " ".join(facts[name] for name in ("CPU implementer", "CPU part") if name in facts)  # of ARM
    flags = sorted(set(f"{facts.get('flags', '')} {facts.get('Features', '')}".split()))
    details = [facts.get("cache size", ""), *(flag for flag in flags if flag.startswith(VECTOR_FLAGS))]
    return facts.get("model name") or part or "an unknown CPU", " ".join(filter(None, details))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
