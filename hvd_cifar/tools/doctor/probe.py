"""The program that the doctor sends to each host over ssh, to write the host's facts.

It reads a line of JSON with questions, and writes a line for each group of facts as soon as the group is complete, so
the doctor sees which group hangs. It ends when its input is closed. It imports nothing of this package, of which the
host may have another version.
"""

import glob
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import Any

import psutil

PROGRAM_SECONDS = 10.0
TRIAL_BYTES = 1 << 20

Asked = dict[str, Any]


def versions(asked: Asked) -> Any:
    """Python, packages, MPI, and a digest of this project's code."""
    packages = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and name not in packages:  # the first one on the path is imported
            packages[name] = distribution.version
    return {
        "python": platform.python_version(),
        "packages": packages,
        "mpi": _first_line(["mpirun", "--version"]),
        "code": _code(asked["package"]),
    }


def _code(package: str) -> str:
    """A digest of the package's files; "" without files."""
    state = hashlib.sha256()
    files = sorted(glob.glob(os.path.join(glob.escape(package), "**", "*.py"), recursive=True))
    for path in files:
        with open(path, "rb") as file:
            state.update(os.path.relpath(path, package).encode() + b"\0" + file.read())
    return state.hexdigest() if files else ""


def cpu(asked: Asked) -> Any:
    """Cores that a process may use; the doctor parses the texts of the control groups' limits."""
    quota = [[_read(os.path.join(group, name)) for name in asked["quota_files"]] for group in _groups("cpu")]
    return {"cores": len(os.sched_getaffinity(0)), "quota": quota}


def gpus(asked: Asked) -> Any:
    """The GPUs as `nvidia-smi -L` lists them, and their driver."""
    driver = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return {"listing": _output(["nvidia-smi", "-L"]), "driver": driver}


def memory(asked: Asked) -> Any:
    """Free memory and shared memory in bytes, and the soft limit of open files (-1: none)."""
    available = psutil.virtual_memory().available
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for group, pair in itertools.product(_groups("memory"), names):
        limit, used = (_read(os.path.join(group, name)).strip() for name in pair)
        if limit.isdecimal() and used.isdecimal():
            known = _read(os.path.join(group, "memory.stat"))
            # Files that are kept in memory count as used, and give way to programs.
            # Version 1 counts the files of groups within this one in totals alone.
            totals = "total_" if "total_active_file" in known else ""
            files = re.findall(rf"^(?:{totals}(?:in)?active_file|slab_reclaimable) (\d+)$", known, re.MULTILINE)
            available = min(available, max(0, int(limit) - int(used) + sum(map(int, files))))
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "available": available,
        "shm_free": shm.f_bavail * shm.f_frsize if shm else 0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def _groups(controller: str) -> list[str]:
    """The folders that `devices.group_folders` gives: of this process's control group and those around it."""
    base = "/sys/fs/cgroup"
    folders = [base, os.path.join(base, controller)]
    for line in _read("/proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers or controller in controllers.split(","):
            folder = os.path.join(base, controller) if controllers else base
            for part in path.strip("/").split("/"):
                folder = os.path.join(folder, part)
                folders.append(folder)
    return folders


def disk(asked: Asked) -> Any:
    """Whether the run's folder and the folder for temporary files are writable, and the free space of the first."""
    folder = asked["run_dir"]
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    temporary = tempfile.gettempdir()
    return {
        "folder": folder,
        "free": shutil.disk_usage(folder).free,
        "error": _write_error(folder),
        "temporary": temporary,
        "temporary_error": _write_error(temporary),
    }


def _write_error(folder: str) -> str:
    """Why a file of 1 MiB cannot be written to the folder; "": it can."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            left = TRIAL_BYTES
            while left:
                left -= file.write(bytes(left))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _output(words: "list[str]") -> str:
    # Programs of the environment come first. Without OPAL_PREFIX its MPI looks for files where the package was built.
    folder = os.path.dirname(sys.executable)
    path = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
    program = shutil.which(words[0], path=path)
    environment = {**os.environ, "PATH": path}
    if program and os.path.dirname(program) == folder:
        environment["OPAL_PREFIX"] = os.path.dirname(folder)
    try:
        done = subprocess.run(
            [program or words[0], *words[1:]],
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _first_line(words: "list[str]") -> str:
    return _output(words).partition("\n")[0].strip()


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


# Quick groups first; those that may hang on a bad disk last.
GROUPS = {group.__name__: group for group in (cpu, memory, versions, gpus, disk)}


def main() -> None:
    """See the module."""
    asked = json.loads(sys.stdin.readline())

    def end_with_input() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_input, daemon=True).start()
    for name, group in GROUPS.items():
        try:
            answer = {"group": name, "facts": group(asked)}
        except Exception as error:  # the other groups are still useful
            answer = {"group": name, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
