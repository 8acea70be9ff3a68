"""What the launcher makes of a command line, and of its launchers' output: tables and properties, nothing started."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cifar import cli
from hvd_cifar.config import option_name
from hvd_cifar.errors import UserError
from hvd_cifar.launch import command as of_ranks
from hvd_cifar.launch import jobs, launcher
from hvd_cifar.launch.cluster import ssh
from hvd_cifar.launch.cluster.hosts import Host, ranks_by_default, read_hostfile
from hvd_cifar.launch.cluster.network import Card, Network, Participants, find_network
from hvd_cifar.launch.command import command, parse, with_allocation
from hvd_cifar.launch.output import Errors, Lost
from hvd_cifar.launch.settings import LaunchSettings
from tests.ranks import CHECKOUT

OWN_OPTIONS = [name for name in LaunchSettings.model_fields if name not in ("ranks", "hosts")]
BIN = Path(sys.executable).parent
MPIRUN = str(BIN / "mpirun")
FLAGS = ["--tag-output"] + ["--allow-run-as-root"] * (os.geteuid() == 0)
FLAGS += ["-bind-to", "none", "-map-by", "slot", "-mca", "pml", "ob1", "-mca", "btl", "^openib"]


@pytest.mark.parametrize(
    ("argv", "ranks", "hosts", "command"),
    [
        ([], None, (), ("train",)),
        (["evaluate", "-np", "3"], None, (), ("evaluate", "-np", "3")),
        (["-n", "1", "train", "--seed", "1"], 1, (), ("train", "--seed", "1")),
        (["-np", "5", "-H", "a:4,b,a:2", "train"], 5, (Host("a", 6), Host("b", 1)), ("train",)),
        (["--allreduce=auto"], None, (), ("train",)),
        (["-np", "2", "--", "train", "--seed", "1"], 2, (), ("train", "--seed", "1")),
        (["-np", "2", "--"], 2, (), ("train",)),
        (["python3", "a.py", "b"], None, (), ("python", "a.py", "b")),
        (["./a.py", "b"], None, (), ("python", "./a.py", "b")),
    ],
)
def test_parse(argv: list[str], ranks: int | None, hosts: tuple[Host, ...], command: tuple[str, ...]) -> None:
    found = parse(argv)
    assert (found.ranks, found.hosts, found.command) == (ranks, hosts, command)


def test_an_option_of_the_launcher_after_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    for option in ("-np", "-n", "-H", *map(option_name, OWN_OPTIONS)):
        with pytest.raises(SystemExit, match="2"):
            launcher.main(["train", option, "1"], cli.check)
        known = "-np" if option == "-n" else option
        (line,) = capfd.readouterr().err.splitlines()
        assert f"{known} is an option of the launcher; it goes before the command: ./run.sh {known} " in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-np", "0", "train"], "-np 0: input should be greater than 0"),
        (["-np"], "Option '-np' requires an argument"),
        (["-np", "3", "-H", "a:2"], "more than the 2 slots"),
        (["-H", "a:2", "--hostfile", "f"], "exclude each other"),
        (["-H", "a:2,,b:2"], "'' is not NAME:SLOTS"),
        (["-H", "a:x"], "slots of a"),
        (["--allreduce", "tree"], "--allreduce tree: input should be 'auto' or 'ring'"),
        (["--dry-run=yes"], "Option '--dry-run' does not take a value"),
        (["-H", "a;reboot:1"], "is not NAME:SLOTS"),
        (["--epochs", "3"], "--epochs.* those of the command after it"),
        (["--hostfile", "/proc/no/such/file"], "No such file"),
    ],
)
def test_parse_refuses(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse(argv)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "hosts", "last", "before", "after"),
    [
        (["-np", "4"], (), Host("localhost", 1), 3, 1),
        (["-np", "4", "-H", "a:2,b:4"], (Host("a", 2), Host("b", 1)), Host("b", 1), 1, 1),
        (["-np", "3", "-H", "a:2,b:1"], (Host("a", 2),), Host("b", 1), 0, 0),
    ],
)
def test_validation_ranks_have_the_last_slots(
    argv: list[str], hosts: tuple[Host, ...], last: Host, before: int, after: int
) -> None:
    training, second = jobs.split(parse([*argv, "--validation-ranks", "1", "train"]))
    assert second and (training.ranks, training.hosts, second.hosts) == (int(argv[1]) - 1, hosts, (last,))
    assert training.variables == {"HVD_CIFAR_BESIDE": f"[0, {after}]"}
    assert second.variables == {"HVD_CIFAR_BESIDE": f"[{before}, 0]"}


NODES = (Host("n1", 4), Host("n2", 2))


def test_the_nodes_of_a_slurm_job_are_the_hosts() -> None:
    environ = {"SLURM_JOB_ID": "1"}
    given = replace(with_allocation(parse(["-np", "6"]), NODES), in_slurm=True)  # where there is srun
    assert given.hosts == NODES and "^slurm" not in command(given, MPIRUN, environ)
    named = parse(["-np", "2", "-H", "localhost:2"])
    assert not named.in_slurm and "^slurm" not in command(named, MPIRUN, {})
    words = command(named, MPIRUN, environ)  # not looked for among the job's nodes
    assert words[words.index("plm") - 1 :][:6] == ["-mca", "plm", "^slurm", "-mca", "ras", "^slurm"]
    with pytest.raises(UserError, match="-np 7 is more than the 6 tasks of this Slurm job; lower it, .*--ntasks=7$"):
        with_allocation(parse(["-np", "7"]), NODES)
    with pytest.raises(UserError, match="more than the 1 task of .*--ntasks=4, or -H localhost:4$"):
        with_allocation(parse(["-np", "4"]), (Host(socket.gethostname(), 1),))


def test_named_hosts_need_no_list_of_slurms(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """In a step on one of two nodes, where Slurm's variables name no tasks of the other one."""
    for name, value in (("JOB_ID", "7"), ("JOB_NODELIST", "n[1-2]"), ("TASKS_PER_NODE", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert launcher.main(["-np", "2", "--dry-run", "train"], cli.check) == 2
    assert "name hosts with -H" in capfd.readouterr().err
    assert launcher.main(["-np", "2", "-H", "localhost:2", "--dry-run", "train"], cli.check) == 0
    assert "-H localhost:2 " in capfd.readouterr().out


def test_started_several_times(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    for of_mpirun, of_step in (("2", "1"), ("1", "2")):
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", of_mpirun)
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", of_step)
        assert launcher.main(["train", "--max-steps", "1"], cli.check) == 2
        assert "it starts the ranks itself: call it once" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("# two machines\n\na slots=4\nb.example   slots = 2  # the old one\n", (Host("a", 4), Host("b.example", 2))),
        ("a\na\nb\nc slots=2\n", (Host("a", 2), Host("b", 1), Host("c", 2))),  # PBS: a name for each slot
        ("a:2\nb:3\n", (Host("a", 2), Host("b", 3))),  # MPICH and Intel MPI
        ("a slots=2 max_slots=4\n", (Host("a", 2),)),
        ("\ufeffa slots=2\r\nb slots=1\r\n", (Host("a", 2), Host("b", 1))),
    ],
)
def test_hostfiles_of_other_programs(text: str, hosts: tuple[Host, ...], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    assert read_hostfile(tmp_path / "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots\n", "line 1: 'a slots' is not NAME slots=N, NAME:N or NAME; correct it"),
        ("a slots=x\n", "whole number"),
        ("a:2 slots=2\n", "is not NAME"),
        ("a\nme@b slots=2\n", "line 2: 'me@b slots=2' is not .*; its user's name goes into ~/.ssh/config"),
        ("# none\n", "no host"),
    ],
)
def test_hostfiles_that_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UserError, match=message):
        read_hostfile(tmp_path / "hosts")


def test_horovodrun_reads_the_hostfiles_alike(tmp_path: Path) -> None:
    """As set-up has patched it; comments and empty lines were not for it."""
    from horovod.runner.common.util.hosts import parse_host_files

    more = tmp_path / "hosts"
    more.write_text("# when\n\na slots=4  # fast\n  \nb.example slots=2\n")
    files = [path for path in (Path(launcher.__file__).parents[2] / "hostfiles").iterdir() if not path.suffix]
    assert len(files) >= 3
    assert all(path.read_text().startswith("# ") for path in files)  # when to use it
    for path in [*files, more]:
        hosts = ",".join(f"{host.name}:{host.slots}" for host in read_hostfile(path))
        assert parse_host_files(str(path)) == hosts


def test_ranks_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(0, 1, 1), (0, 2, 2), (0, 64, 8), (1, 64, 1), (4, 2, 4), (16, 64, 8)]
    assert [ranks_by_default(gpus, cores) for gpus, cores, _ in cases] == [ranks for *_, ranks in cases]
    monkeypatch.setattr(of_ranks, "is_for_gpus", lambda: True)
    monkeypatch.setattr(of_ranks, "gpus_here", lambda: 3)
    assert (of_ranks.ranks_of(()), of_ranks.ranks_of(NODES)) == (3, 6)


def _command(
    ranks: int, hosts: tuple[Host, ...] = (), network: Network | None = None, mpirun: str = MPIRUN, **more: str
) -> list[str]:
    environ = {"PATH": "/p", "HOROVOD_CYCLE_TIME": "5", "HOME": "/h", "HVD_CIFAR_VECTORS": "0", "SECRET_TF_KEY": "s"}
    asked = replace(parse(["-np", str(ranks), "train", "--run-dir", "a b"]), hosts=hosts)
    return command(asked, mpirun, environ | more, network)


PROGRAM = [sys.executable, "-I", "-m", "hvd_cifar", "train", "--run-dir", "a b"]


@pytest.mark.parametrize("words", ["doctor --hostfile f --json", "report a b --output c", "evaluate --run-dir a"])
def test_what_needs_no_ranks_needs_no_launcher(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert launcher.main(["-np", "1", "--dry-run", *words.split()], cli.check) == 0
    assert capfd.readouterr().out.endswith(f"{sys.executable} -I -m hvd_cifar {words}\n")


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("-np 2 train", 8),  # all slots; -np is what the first start waits for
        ("train --global-batch-size 12 --gradient-accumulation 2", 6),
        ("-np 3 train --batch-size 2 --gradient-accumulation 2", 6),
        ("train --global-batch-size 4 --virtual-shards 4", 4),
    ],
)
def test_an_elastic_job_starts_on_as_many_ranks_as_its_batch_allows(
    words: str, ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launcher.main(["--elastic", "2:8", "--dry-run", *words.split(), "--dataset", "synthetic"], cli.check) == 0
    assert f" -np {ranks} " in capfd.readouterr().out


def test_a_program_of_the_users_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    program = tmp_path / "my program.py"
    program.touch()
    words = ["-np", "2", "python", str(program), "--epochs", "3"]
    assert launcher.main(["--dry-run", *words], cli.check) == 0
    out, err = capfd.readouterr()
    assert out.endswith(f" {sys.executable} '{program}' --epochs 3\n") and err == ""
    assert "TF_ENABLE_ONEDNN_OPTS=1 " in out  # the program itself may import TensorFlow first
    assert launcher.main(["--dry-run", "-np", "2", "python", "-m", "pkg.fit"], cli.check) == 0
    assert capfd.readouterr().out.endswith(f" {sys.executable} -m pkg.fit\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["python"], "name a program"),
        (["python", "/proc/no/such/program.py"], "python /proc/no/such/program.py: no such file"),
        (["program.py"], "python program.py: no such file"),
        (["--validation-ranks", "2", "train"], "of 2 ranks none is left to train; give -np 3 or more"),
        (["--validation-ranks", "1", "evaluate", "--run-dir", "r"], "--validation-ranks goes with train"),
        (["--max-restarts", "1", "evaluate", "--run-dir", "r"], "--max-restarts goes with train"),
        (["doctor"], "doctor runs in one process here: give options of its own after its name"),
        (["-H", "localhost:2", "--elastic", "2:4", "--cool-down", "1:1", "train", "--virtual-shards", "1"], "divide"),
    ],
)
def test_what_cannot_start_is_told_once(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert launcher.main(["-np", "2", *words], cli.check) == 2
    err = capfd.readouterr().err
    assert message in err and err.count("\n") == 1


def test_command_here() -> None:
    assert _command(2) == [MPIRUN, "-np", "2", "-H", "localhost:2", *FLAGS, *PROGRAM]
    assert "-x" not in _command(2, hosts=(Host(socket.gethostname(), 4),))
    words = command(parse(["-np", "2", "--allreduce", "ring"]), MPIRUN, {"OMPI_MCA_pml": "ucx"})
    assert "pml" not in words and words[words.index("btl") + 1] == "^openib"  # the user's transport takes precedence
    assert words[words.index("coll_tuned_allreduce_algorithm") + 1] == "4"


def test_command_on_other_hosts() -> None:
    hosts = (Host("localhost", 1), Host("other", 1))
    cards = {"localhost": Card("eth0", "10.0.0.1", "10.0.0.0/24"), "other": Card("ens3", "10.0.0.2", "10.0.0.0/24")}
    network = Network("10.0.0.0/24", cards)
    words = _command(2, hosts, network)
    assert words[:5] == [MPIRUN, "-np", "2", "-H", f"{socket.gethostname()}:1,other:1"]
    exported = [after for word, after in zip(words, words[1:], strict=False) if word == "-x"]
    inherited = ["HOROVOD_CYCLE_TIME", "HVD_CIFAR_VECTORS", "PATH"]
    assert exported == [*inherited, "NCCL_SOCKET_IFNAME==ens3,eth0", "OPAL_PREFIX"]
    assert words[words.index("--prefix") + 1] == str(BIN.parent)
    for parameter in ("btl_tcp_if_include", "oob_tcp_if_include"):
        assert words[words.index(parameter) + 1] == "10.0.0.0/24"
    assert words[-len(PROGRAM) :] == PROGRAM
    assert "--prefix" not in _command(2, hosts, network, mpirun="/usr/bin/mpirun")
    for gpus, is_exported in (("", True), ("-1", True), ("0,1", False)):  # "none" holds on every host
        assert ("CUDA_VISIBLE_DEVICES" in _command(2, hosts, network, CUDA_VISIBLE_DEVICES=gpus)) == is_exported
    assert _command(1, (Host("other", 1),), network)[0] == MPIRUN


@pytest.mark.parametrize("shell", ["sh", "bash", "tcsh"])
def test_any_login_shell_runs_programs_of_several_lines(shell: str) -> None:
    """csh ends a quoted word at the end of the line, and takes ! for an event of its history."""
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    program = "import sys\nprint('a!b\\n', 1 != 2, \"it's\", r'\\c %s \\0041', sys.stdin.read())\n"
    command = [sys.executable, "-c", program]
    directly = subprocess.run(command, input="in", capture_output=True, text=True)
    done = subprocess.run([shell, "-c", ssh.words("host", command)[-1]], input="in", capture_output=True, text=True)
    assert directly.returncode == 0 and "True it's" in directly.stdout
    assert (done.returncode, done.stdout, done.stderr) == (0, directly.stdout, "")
    plain = ["rm", "-rf", "/a b"]
    assert ssh.words("host", plain)[-1] == shlex.join(plain)  # what `ps` shows stays readable


def test_no_ssh_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timeout").symlink_to(shutil.which("timeout") or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no ssh here: apt-get install openssh-client"):
        find_network(Participants(["localhost", "nosuch.invalid"], "localhost"))


@pytest.mark.parametrize(
    ("for_gpus", "gpus", "visible", "note"),
    [
        (False, 2, "1,0", "2 GPUs stay unused; to use them: ./run.sh setup --gpu"),
        (False, 0, "", ""),
        (True, 2, "0,1", ""),
        (True, 0, "-1", ""),
        (True, 0, "0", "nvidia-smi lists no GPU here; is the driver loaded?"),
    ],
)
def test_gpus_that_are_unused_or_missing_are_told(
    for_gpus: bool, gpus: int, visible: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_ranks, "is_for_gpus", lambda: for_gpus)
    monkeypatch.setattr(of_ranks, "gpus_here", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    told = "".join(of_ranks.notes(None))
    assert note in told and bool(note) == bool(told)
    assert not list(of_ranks.notes(None, [Host("another.example", 8)]))  # typed on a login node


RULE = "-" * 74 + "\n"
FAILED = (
    RULE
    + "Primary job  terminated normally, but 1 process returned\n"
    + "a non-zero exit code. Per user-direction, the job has been aborted.\n"
    + RULE
    + RULE
    + "mpirun detected that one or more processes exited with non-zero status, thus causing\n"
    + "the job to be terminated. The first process to do so was:\n\n"
    + "  Process name: [[31706,1],1]\n  Exit code:    {code}\n"
    + RULE
)
KILLED = RULE + "mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).\n" + RULE
EARLY = (
    RULE
    + "mpirun has exited due to process rank 1 with PID 0 on\nnode vm exiting improperly. There are three reasons this "
    + 'could occur:\n\n1. this process did not call "init" before exiting, but others in\nthe job did.\n\n'
    + "You can avoid this message by specifying -quiet on the mpirun command line.\n"
    + RULE
)
LOST = (
    RULE
    + "ORTE has lost communication with a remote daemon.\n\n"
    + "  HNP daemon   : [[19433,0],0] on node node1\n  Remote daemon: [[19433,0],2] on node node3\n\n"
    + "This is usually due to either a failure of the TCP network\n"
    + RULE
)
UNKNOWN = RULE + "There are not enough slots available in the system.\n" + RULE


ABSENT = RULE + "  Value:      10.0.1.0/24\n  Message:    Did not find interface matching this subnet\n" + RULE
MORE = '[a:1] Set MCA parameter "orte_base_help_aggregate" to 0 to see all help / error messages\n'
OF_RANK_1 = "[1,1]<stderr>:"


@pytest.mark.parametrize(
    ("said", "shown", "lost"),
    [
        (FAILED.format(code=2), "", []),
        (f"{OF_RANK_1}error: no\n" + FAILED.format(code=2), "error: no\n", []),
        (FAILED.format(code=3), "hvd_cifar: rank 1 ended first, with exit code 3\n", [Lost("", 1)]),
        (f"{OF_RANK_1}hvd_cifar: too slow\n\n" + FAILED.format(code=1), "hvd_cifar: too slow\n\n", []),
        (
            f"{OF_RANK_1}KeyError: 1\n[1,0]<stderr>:hvd_cifar: note: threads differ\n" + FAILED.format(code=1),
            "KeyError: 1\nhvd_cifar: note: threads differ\nhvd_cifar: rank 1 ended first, with exit code 1\n",
            [Lost("", 1)],
        ),
        (
            KILLED,
            "hvd_cifar: rank 1 on vm was ended by signal 9 (Killed); perhaps the machine ran out of memory\n",
            [Lost("vm", 1)],
        ),
        (EARLY, "hvd_cifar: rank 1 ended first, with exit code 0, before the job was over\n", [Lost("", 1)]),
        (LOST, "hvd_cifar: node3 is lost, and its ranks with it: is it on, and its network up?\n", [Lost("node3")]),
        (ABSENT + MORE, "", []),  # of hosts on different subnets
        (UNKNOWN, UNKNOWN, []),
        ("table\n-----\n" + RULE + "a\n" * 60, "table\n-----\n" + RULE + "a\n" * 60, []),
        ("[a:1] plm:rsh: Warning: setpgid(4,4) failed in parent with errno=Permission denied(13)\nx\n", "x\n", []),
        ("no newline at the end", "no newline at the end", []),
        (RULE + "cut", RULE + "cut", []),
    ],
)
def test_banners(said: str, shown: str, lost: list[Lost]) -> None:
    errors = Errors(())
    assert b"".join(errors.shown([said.encode()])).decode() == shown and errors.lost == lost


@given(
    st.lists(
        st.sampled_from(
            [FAILED.format(code=1), FAILED.format(code=3), f"{OF_RANK_1}hvd_cifar: no\n", "[1,0]<stderr>:bar\r"]
            + [f"{OF_RANK_1}half [1,0]<stderr>:whole [1,x]<std\n"]
            + [KILLED, UNKNOWN, "a line\n", "-\n", "[1,", "--", RULE]
        )
    ),
    st.lists(st.integers(0, 500)),
)
def test_banners_do_not_depend_on_how_output_is_cut(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts).encode()
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert b"".join(Errors(()).shown(pieces)) == b"".join(Errors(()).shown([text]))


def test_an_incomplete_line_of_a_rank_passes_at_once() -> None:
    seen: list[bytes] = []

    def source() -> Iterator[bytes]:
        yield b"[1,0]<stderr>:\rstep 1"
        assert seen == [b"\rstep 1"]
        yield b"[1,0]<stderr>:\rstep 2\n"

    seen += Errors(()).shown(source())
    assert b"".join(seen) == b"\rstep 1\rstep 2\n"


def test_what_the_launcher_refuses_imports_no_tensorflow(tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "hvd_cifar.launch", "-np", "3", "train", "--virtual-shards", "4"]
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=env)
    said = done.stderr.splitlines()
    assert done.returncode == 2 and not any(line.endswith((" tensorflow", " keras")) for line in said)
    assert said[-1] == "hvd_cifar: --virtual-shards 4: 3 ranks do not divide them; start 1, 2, 4 ranks"


def test_launchers_of_one_second_name_run_directories_of_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert launcher.main(["--dry-run", "-np", "2", "--max-restarts", "1", "train"], cli.check) == 0
    place = capfd.readouterr().out.split("--run-dir ")[1].split()[0]
    assert place.startswith(f"{Path.cwd()}/runs/fast-") and place.endswith(f"-{os.getpid()}")
