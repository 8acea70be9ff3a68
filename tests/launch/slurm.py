"""A real Slurm on one machine: a controller and a daemon on each of a few hosts, which are namespaces.

    with slurm(2, 2, tmp_path) as site:
        job = site.submit(["--wrap", "srun hostname"])
        site.wait_for(job, "COMPLETED")

Hosts have names, networks, processes and shared memory of their own (tests/cluster/hosts.py) and share the disk, as
the nodes of a site do. Munge, Slurm's configuration and its state lie in the test's folder; all ends with the block.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import hosts as namespaces
from tests.cluster.hosts import Cluster, Host
from tests.ranks import wait_for

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
# Two partitions of the same nodes: a job in `urgent` takes the nodes from one in `normal`, which goes back in the queue
# after a grace time in which it is told, as it is before its time limit. A job waits after a requeue for as long as
# its credential might still be used (cred_expire), at most sites for two minutes.
CONF = """\
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={munge},cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={own}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
KillWait=5
ReturnToService=2
PropagateResourceLimits=NONE
"""


def reason_to_skip() -> str | None:
    """Why there can be no Slurm here; None: there can."""
    if reason := namespaces.reason_to_skip():
        return reason
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), namespaces.SBIN])
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=path)]
    return (
        f"Slurm needs {', '.join(missing)} (Debian: apt-get install slurm-wlm munge libpmix-dev)" if missing else None
    )


@dataclass
class Slurm:
    """A site whose first host has the controller and takes the commands of its users."""

    cluster: Cluster
    folder: Path

    @property
    def front(self) -> Host:
        """The host on which users type."""
        return self.cluster[0]

    def variables(self) -> dict[str, str]:
        """A user's variables on the front host."""
        others = {k: v for k, v in self.front.environment().items() if not k.startswith(("SLURM_", "SBATCH_", "PMI"))}
        return others | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(
        self, words: Sequence[str | Path], variables: dict[str, str] | None = None, timeout: float = 200
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the front host, with `variables` added to the user's."""
        return self.front.run(words, env=self.variables() | (variables or {}), timeout=timeout)

    def must(self, *words: str | Path, variables: dict[str, str] | None = None) -> str:
        """The output of a command that must succeed."""
        done = self.run(words, variables)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def submit(self, words: Sequence[str | Path], variables: dict[str, str] | None = None) -> str:
        """Hand a job in with sbatch; its number."""
        return self.must("sbatch", "--parsable", *words, variables=variables).strip()

    def job(self, number: str) -> dict[str, str]:
        """What the controller says of a job: JobState, Restarts, NodeList and so on."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.must("scontrol", "show", "job", number)))

    def wait_for(self, number: str, state: str, seconds: float = 400) -> dict[str, str]:
        """Wait until a job is in a state; what the controller then says of it. Fails where it ends in another."""
        end = time.monotonic() + seconds
        while (found := self.job(number))["JobState"] != state:
            done = found["JobState"] in ("FAILED", "CANCELLED", "TIMEOUT", "COMPLETED", "NODE_FAIL", "BOOT_FAIL")
            assert not done and time.monotonic() < end, f"job {number} is {found}, not {state}\n{self.logs()}"
            time.sleep(0.5)  # each look is a process
        return found

    def logs(self) -> str:
        """The ends of all daemons' logs, for a test that fails."""
        texts = [f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(texts)


@contextlib.contextmanager
def slurm(nodes: int, cpus: int, folder: Path) -> Iterator[Slurm]:
    """A site of `nodes` hosts, node1 and so on, with as many `cpus` each as are said, whatever is there."""
    with namespaces.cluster(nodes, folder / "cluster") as cluster:
        site = Slurm(cluster, folder / "slurm")
        site.folder.mkdir()
        (site.folder / "state").mkdir()
        front = cluster[0]
        munge = _start_munge(front)
        lines = CONF.format(first=front.name, address=front.address, munge=munge, folder=site.folder, own=cluster.own)
        names = []
        for host in cluster:
            (site.folder / f"spool-{host.name}").mkdir()
            lines += f"NodeName={host.name} NodeAddr={host.address} CPUs={cpus} State=UNKNOWN\n"
            names.append(host.name)
        for partition in ("normal PriorityTier=1 GraceTime=60 Default=YES", "urgent PriorityTier=2"):
            lines += f"PartitionName={partition} Nodes={','.join(names)} MaxTime=INFINITE State=UP\n"
        (site.folder / "slurm.conf").write_text(lines)

        front.start(["slurmctld", "-D"], env=site.variables(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for host in cluster:
            words = ["slurmd", "-D", "-N", host.name]
            host.start(words, env=site.variables(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        states = ["sinfo", "--noheader", "--Node", "--partition", "normal", "--format", "%T"]
        wait_for(lambda: site.run(states).stdout.split() == ["idle"] * nodes, f"idle nodes; see {site.folder}/*.log")
        yield site


def _start_munge(host: Host) -> Path:
    """Start the daemon that signs requests; its socket, which all hosts reach through the disk they share."""
    # Munge trusts no socket below a folder that others may write to, such as /tmp, without this option.
    folder = host.files.parent / "munge"
    folder.mkdir(mode=0o755)
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    socket = folder / "socket"
    files = [f"--{name}-file={folder / name}" for name in ("log", "pid", "seed")]
    words = ["munged", "--foreground", "--force", f"--socket={socket}", f"--key-file={key}", *files]
    host.start(words, stdout=subprocess.DEVNULL, stderr=(folder / "stderr").open("wb"))
    wait_for(socket.exists, f"munge's socket; see {folder}/stderr")
    return socket
