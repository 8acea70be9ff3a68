"""What this machine has for ranks: cores and GPUs that the environment can use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version

from hvd_cifar.launch.cluster.hosts import Host, ranks_by_default
from hvd_cifar.launch.job import complain
from hvd_cifar.runtime import devices


def ranks_of(hosts: tuple[Host, ...]) -> int:
    """All slots of the named hosts. Without hosts, one rank per GPU that the environment can use, else one per core."""
    if hosts:
        return sum(host.slots for host in hosts)
    return ranks_by_default(gpus_here() if is_for_gpus() else 0, cores_here())


def cores_here() -> int:
    """The cores that ranks may use."""
    return devices.usable_cores(len(os.sched_getaffinity(0)), devices.cpu_quota())


def gpus_here() -> int:
    """The GPUs that ranks see."""
    return len(devices.visible_gpus(devices.list_gpus(), os.environ))


def is_for_gpus() -> bool:
    """Whether the environment is for GPUs: its Horovod is (launch/install/horovod.py)."""
    return "+gpu." in version("horovod")


def note_gpus(gpus: Mapping[str, int], all_here: bool) -> None:
    """Print a note if GPUs stay unused, or a host of a GPU environment has none. `gpus`: number on each host."""
    for_gpus = is_for_gpus()
    if for_gpus and devices.hides_all(os.environ.get("CUDA_VISIBLE_DEVICES")):
        return  # the user's choice
    told = [host if for_gpus else f"{count} on {host}" for host, count in gpus.items() if bool(count) != for_gpus]
    if not told:
        return
    hosts = ", ".join(told)
    if for_gpus:
        complain(f"note: ranks compute on the CPU: nvidia-smi lists no GPU on {hosts}; is the driver loaded?")
    else:
        set_up = f"./run.sh setup --gpu{' --hostfile FILE' * (not all_here)}"
        complain(
            f"note: ranks compute on the CPU, and GPUs stay unused ({hosts}): "
            f"the environment is for the CPU; to use them: {set_up}"
        )
