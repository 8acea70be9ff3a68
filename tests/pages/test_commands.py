"""Every command of every page, as far as a machine without GPU, Slurm, Docker and other hosts can take it.

A command that starts ranks here goes through the launcher with --dry-run, which checks its settings and makes the
command of the ranks. One for other hosts is parsed, and its settings are checked. A benchmark's options are parsed by
the benchmark. tests/parallel/test_examples.py runs the examples.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest

from hvd_cifar import cli
from hvd_cifar.errors import UserError
from hvd_cifar.launch import launcher
from hvd_cifar.launch.cluster.hosts import is_local
from hvd_cifar.launch.command import PYTHON, parse
from hvd_cifar.launch.install import installer
from tests.ranks import CHECKOUT

NAME = "names an option"
# What a test cannot run, by the words that it begins with, and why.
EXCEPTIONS = {
    "git clone": "the address is the reader's",
    "docker build": "needs Docker",
    "docker compose": "needs Docker; tests/single/test_containers.py reads the file",
    "docker run ... hvd-cifar": "an outline; options of Docker are left out",
    "BUILDAH_ISOLATION": "needs buildah, and takes minutes",
    "mkdir -p runs && sudo": "gives a folder to another user",
    "sed": "needs a Kubernetes cluster; tests/launch/test_kubernetes.py checks the job",
    "kubectl": "needs a Kubernetes cluster",
    "srun --": "an option of Slurm's; tests/launch/test_slurm.py runs srun",
    "nvidia-smi": "needs an NVIDIA driver",
    "pip install --find-links": "needs a package index; tests/launch/test_wheel.py runs it",
    "source": "of the shell that the user types in",
    "PEERS/bin/python": "needs PyTorch; tests/single/test_peers.py runs it where it is",
    "./run.sh --hostfile": NAME,
}
# A page's placeholders, each a whole word, and what stands for it here.
PLACEHOLDERS = {
    "COMMAND": "train",
    "D": "data",
    "R": "run",
    "N": "2",
    "FILE": "my-hosts",
    "M": "tutorial",
    "P": "float32",
    "B": "64",
    "PROGRAM.py": "examples/fit.py",
    "train.py": "examples/fit.py",
}
HIDDEN = re.compile(r"^```.*?^```", re.M | re.S)
GONE = re.compile(r"^Gone, .*?^$", re.M | re.S)  # of the changelog: what is named there is no command


def pages() -> list[str]:
    """Every page."""
    found = subprocess.run(["git", "ls-files", "*.md"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    return found.stdout.split()


def commands(text: str) -> Iterator[str]:
    """Commands of a page: lines of its blocks without a language, and code within its sentences."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        lines = block.replace("\\\n", " ").splitlines()
        if not language and (lines[0].split()[0] in (*RUN, "pip") or is_exception(lines[0])):
            yield from (line for line in lines if line.strip())
    for code in re.findall(r"`([^`]+)`", HIDDEN.sub("", text)):
        code = " ".join(code.split())
        if re.sub(r"^(\w+=\S+ )+", "", code).startswith(
            ("./run.sh ", "hvd_cifar ", "python -m ", "mpirun -", "horovodrun -", "sbatch ", "docker ", "srun --")
        ):
            yield code


def is_exception(command: str) -> bool:
    """Whether no test can run a command."""
    return any(command == words if why == NAME else command.startswith(words) for words, why in EXCEPTIONS.items())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a checkout's, to run commands in."""
    for name in ("examples", "hostfiles", "deploy", "docs", "tests", "run.sh"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    for name in ("my-hosts", "my-cluster", "hosts"):
        (tmp_path / name).write_text("node1 slots=8\nnode2 slots=8\n")
    for name in ("data", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "config.json").write_text('{"epochs": 2}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", pages())
def test_commands_of_a_page(page: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = {}
    for command in commands(GONE.sub("", (CHECKOUT / page).read_text())):
        if is_exception(command):
            continue
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command.replace("[", "").replace("]", ""), True)]
        words = words[next(i for i, word in enumerate(words) if "=" not in word) :]  # after variables
        try:
            RUN[words[0]](words[1:])
        except (UserError, click.ClickException, AssertionError, SystemExit, LookupError) as failure:
            if not (isinstance(failure, SystemExit) and failure.code == 0):  # help
                wrong[command] = f"{failure!r} {capfd.readouterr().err}"
    assert not wrong


def _run_sh(words: list[str]) -> None:
    if not words or words[0] in ("--help", "--help-all"):
        return
    if words[0] in ("setup", "wheel"):
        installer._parser().parse_args(words)
    elif words[0] == "test":
        assert all(word.startswith("-") or Path(word).exists() for word in words[1:]), words
    else:
        _launch(words)


def _launch(words: list[str]) -> None:
    request = parse(words)
    if request.command[0] != PYTHON:
        cli.check(list(request.command))
    else:
        launcher._check_program(request)
    if all(is_local(host.name) for host in request.hosts):
        assert launcher.main(["--dry-run", *words], cli.check) == 0, words


def _python(words: list[str]) -> None:
    if words[0] == "-c" or not words[0].startswith("-"):
        assert Path(words[0]).exists(), words
        return
    assert words[0] == "-m", words
    name, rest = words[1], words[2:]
    if name == "hvd_cifar":
        cli.check(rest)
    elif name.startswith("benchmarks."):
        package = importlib.util.find_spec(name)
        assert package, name
        main = import_module(f"{name}.__main__" if package.submodule_search_locations else name).main
        if isinstance(main, click.Group) and rest:
            main, rest = main.commands[rest[0]], rest[1:]
        if rest:  # without options it is named, not called
            main.make_context(name, rest)
    else:
        assert importlib.util.find_spec(name), name


def _wrapped(words: list[str]) -> None:
    """What starts a program: its options, then the program, Slurm's script of `train`, or the image of Docker."""
    for i, word in enumerate(words):
        program = "python" if word.endswith("/python") else Path(word).name if word.endswith("/hvd_cifar") else word
        if program in ("python", "hvd_cifar", "./run.sh"):
            return RUN[program](words[i + 1 :])
        if word.endswith(".sbatch") and Path(word).exists():
            return cli.check(["train", *words[i + 1 :]])
        if word.startswith("hvd-cifar"):
            return _launch(words[i + 1 :])
    raise LookupError("no program")


def _copy(words: list[str]) -> None:
    subprocess.run(["cp", *words], check=True)


RUN: dict[str, Callable[[list[str]], None]] = {
    "./run.sh": _run_sh,
    "hvd_cifar": _launch,
    "python": _python,
    "cp": _copy,
    **dict.fromkeys(("mpirun", "horovodrun", "sbatch", "salloc", "srun", "docker"), _wrapped),
}
