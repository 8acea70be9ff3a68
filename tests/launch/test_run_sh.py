"""run.sh itself, and the same program under bare launchers: real runs of one and two ranks."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar import cli
from hvd_cifar.errors import RESUME
from hvd_cifar.fields import option_name
from hvd_cifar.launch.command import parse
from hvd_cifar.launch.install import installer
from hvd_cifar.launch.settings import LaunchSettings, launcher_option
from tests.options import PACE, SMALL
from tests.ranks import CHECKOUT, processes_of, wait_for

RUN_SH = str(CHECKOUT / "run.sh")
MODULE = ["python", "-m", "hvd_cifar"]
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []
SHORT = ["--max-steps", "4", "--batch-size", "16", "--eval-every", "0"]
LONG = ["--max-steps", "1000000", "--batch-size", "16", "--eval-every", "0", "--checkpoint-every", "1000000"]
LONG += ["--callbacks", PACE]


def _environment(bin_folder: Path = installer.VENV / "bin") -> dict[str, str]:
    """A user's variables with an activated environment, and nothing else that helps."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "HOROVOD_", "OPAL_"))}
    return env | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}


def _run(
    words: list[str], cwd: Path = CHECKOUT, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    env = env or _environment()
    nothing = subprocess.DEVNULL
    return subprocess.run(words, cwd=cwd, env=env, timeout=timeout, stdin=nothing, capture_output=True, text=True)


def _train(data: Path, run_dir: Path) -> list[str]:
    return ["train", *SMALL, str(data), "--run-dir", str(run_dir)]


@pytest.fixture(scope="module")
def trained(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Train for a few steps by the launcher of a name; the summary. Each launcher runs once."""
    launchers = {
        "run.sh": [RUN_SH, "-H", "localhost:2"],
        "horovodrun": ["horovodrun", "-np", "2", "hvd_cifar"],
        "horovodrun --gloo": ["horovodrun", "--gloo", "-np", "2", *MODULE],
    }

    @cache
    def train(name: str) -> dict[str, Any]:
        run_dir = tmp_path_factory.mktemp("run") / "r"
        done = _run([*launchers[name], *_train(embedded, run_dir), *SHORT], cwd=run_dir.parent)
        assert done.returncode == 0, done.stdout + done.stderr
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
        return summary

    return train


@pytest.mark.parametrize("launcher", ["horovodrun", pytest.param("horovodrun --gloo", marks=pytest.mark.slow)])
def test_two_ranks_end_alike_whoever_starts_them(launcher: str, trained: Any) -> None:
    """Under mpirun: `test_examples`."""
    summary, expected = trained(launcher), trained("run.sh")
    assert summary["world_size"] == 2
    assert summary["weights_sha256"] == expected["weights_sha256"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([RUN_SH, "--frob"], "No such option '--frob': options of the launcher stand before"),
        ([RUN_SH, "frob"], "frob"),
        ([RUN_SH, "-np", "2", "train", "--max-steps", "ten"], "--max-steps"),
        (["mpirun", *AS_ROOT, "-np", "2", "--oversubscribe", *MODULE, "train", "--max-steps", "ten"], "--max-steps"),
    ],
)
def test_a_user_error_is_told_once(words: list[str], message: str) -> None:
    done = _run(words)
    assert (done.returncode, done.stdout, done.stderr.count("hvd_cifar:")) == (2, "", 1)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1 or words[0] == "mpirun"


def test_an_error_found_by_the_ranks_keeps_its_code(embedded: Path, tmp_path: Path) -> None:
    done = _run([RUN_SH, "-np", "2", *_train(embedded, tmp_path / "run"), *SHORT, "--model", "no_such_module:f"])
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(RUN_SH)
    short, whole, train = (
        _run(["./link", *words], cwd=tmp_path).stdout for words in (["--help"], ["--help-all"], ["train", "--help"])
    )
    assert "--global-batch-size" in train
    examples = [re.split(r"   +", line.strip())[0] for line in short.splitlines() if line.startswith("  ./run.sh")]
    assert len(examples) == 10 and "--max-restarts" not in short and "--max-restarts" in whole
    assert all((launcher_option(option_name(field)) or f"-{field}") in whole for field in LaunchSettings.model_fields)
    for example in examples:  # the launcher takes each
        words = example.replace("my-hosts", str(CHECKOUT / "hostfiles" / "cluster-example")).split()[1:]
        if words and words[0] in ("setup", "test"):
            continue
        request = parse(words)
        if not request.is_program:
            cli.check([*request.command])


def test_kill_leaves_no_rank_behind(embedded: Path, tmp_path: Path) -> None:
    """Neither do MPI's files stay, nor its shared memory: mpirun is signalled once."""
    words, output = [RUN_SH, "-np", "2", *_train(embedded, tmp_path / "run"), *LONG], tmp_path / "output"
    with tempfile.TemporaryDirectory() as sessions, output.open("wb") as log:  # a short path, as MPI's sockets need
        env = _environment() | {"TMPDIR": sessions, "OMPI_MCA_btl_vader_backing_directory": sessions}
        process = subprocess.Popen(words, stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            wait_for(lambda: b"step 10," in output.read_bytes(), "step 10", job=process)
            assert len(processes_of(tmp_path / "run")) >= 3  # two ranks and what started them
            files = [*Path(sessions).glob("ompi.*/pid.*"), *Path(sessions).glob("vader_segment.*")]
            assert len(files) == 3
            process.kill()
            process.wait()
            wait_for(lambda: not processes_of(tmp_path / "run"), "the end of all", 30)
            wait_for(lambda: not any(map(Path.exists, files)), "MPI to tidy up", 30)
        finally:
            process.kill()


def test_ctrl_c_in_a_terminal(embedded: Path, tmp_path: Path) -> None:
    """Once, it ends everything after a checkpoint."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(RUN_SH, [RUN_SH, "-np", "2", *_train(embedded, tmp_path / "run"), *LONG], _environment())
    seen = b""

    def read() -> bool:
        nonlocal seen
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the terminal's other side is closed
            data = b""
        seen += data
        return bool(data)

    while b"step 20," not in seen:
        assert read(), seen
    os.write(terminal, b"\x03")
    while read():
        pass
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == RESUME, seen.decode()[-3000:]
    wait_for(lambda: not processes_of(tmp_path / "run"), "the end of all", 30)
    assert b"stopped after step" in seen and len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    assert b"Traceback" not in seen


def test_set_up_is_not_repeated(tmp_path: Path) -> None:
    """Nor begun where a tool is missing: neither the environment that is there nor its record is touched."""
    log = CHECKOUT / ".venv" / "set-up.log"  # written anew by every set-up that does something
    before = log.stat().st_mtime_ns, installer.read_record()
    done = _run([RUN_SH, "setup"])
    assert done.returncode == 0 and "Nothing to do" in done.stderr
    assert f"({installer.recorded_options(before[1])})" in done.stderr
    for name in ("bash", "dirname", "readlink"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    other = "--cpu" if installer.recorded_options(before[1]).gpu else "--gpu"
    for variables, compilers in (({}, "c++, g++, clang++"), ({"CXX": "icpx"}, "icpx")):
        done = _run([RUN_SH, "setup", other], env={"PATH": str(tmp_path), "HOME": str(tmp_path), **variables})
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"a C++ compiler ({compilers}) and make not found, needed to build Horovod" in done.stderr
    assert (log.stat().st_mtime_ns, installer.read_record()) == before


@pytest.mark.slow  # `./run.sh test` has set up already
@pytest.mark.timeout(900)
def test_a_second_checkout_with_spaces_in_its_path(embedded: Path, tmp_path: Path) -> None:
    """A copy sets up from the cached wheel, also after a first try was killed; then it trains."""
    checkout = tmp_path / "second check out"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=CHECKOUT, text=True).split("\0"):
        if name and (CHECKOUT / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / name, checkout / name)
    run_sh, venv = str(checkout / "run.sh"), checkout / ".venv"
    options = installer.recorded_options(installer.read_record())
    env = _environment()

    first = subprocess.Popen(
        [run_sh, "setup", *["--gpu"] * options.gpu], env=env, stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_for((venv / "bin" / "pip").exists, "pip", job=first)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert installer.read_record(venv)["complete"] is False

    # The options are those of the set-up that was killed.
    done = _run([run_sh, "setup"], env=env, timeout=800)
    assert done.returncode == 0, done.stderr
    assert "built before" in done.stderr, done.stderr
    assert installer.read_record(venv)["complete"] is True

    # What set-up depends on changes while there is no network: it fails, and can be repeated.
    with (checkout / "setup.cfg").open("a") as config:
        config.write("# changed\n")
    env = _environment(venv / "bin")
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    done = _run([run_sh, "train", "--max-steps", "1"], env=env | offline)
    assert done.returncode == 1
    assert "set-up failed" in done.stderr and "No matching distribution" in done.stderr
    assert installer.read_record(venv)["complete"] is True

    done = _run([run_sh, "-np", "2", *_train(embedded, Path("my run")), *SHORT], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "Setting up" in done.stderr and "environment (" not in done.stderr
    assert json.loads((tmp_path / "my run" / "summary.json").read_text())["world_size"] == 2
