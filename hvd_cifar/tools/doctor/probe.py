"""The program that the doctor sends to each host over ssh, to write the host's facts.

First it writes a line that says that it runs. Then it reads a line of JSON with questions, and answers at once with its
clock. It writes a line for each group of facts as soon as the group is complete, so the doctor sees which group hangs.
It ends when its input is closed. It imports nothing of this package, of which the host may have another version.
"""

import contextlib
import ctypes
import glob
import hashlib
import importlib.metadata
import itertools
import json
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import psutil

# Symbols in Horovod's library that show with which all-reduces it was built.
BUILT = {"MPI": b"12MPIAllreduceE", "Gloo": b"13GlooAllreduceE", "NCCL": b"13NCCLAllreduceE"}
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, -1  # of Linux's prctl
PROGRAM_SECONDS = 10.0
BLOCK_BYTES = 4 << 20
TRIAL_BYTES = 1 << 20

Asked = dict[str, Any]


def versions(asked: Asked) -> Any:
    """Python, packages, MPI, Horovod's build, and a digest of this project's code."""
    packages = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and name not in packages:  # the first one on the path is imported
            packages[name] = distribution.version
    return {
        "python": platform.python_version(),
        "packages": packages,
        "mpi": _first_line(["mpirun", "--version"]),
        "horovod": _horovod(),
        "code": _code(asked["package"]),
    }


def _horovod() -> Any:
    for folder in sys.path:
        for library in glob.glob(os.path.join(folder, "horovod", "tensorflow", "mpi_lib*.so")):
            with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                features = [name for name, mark in BUILT.items() if content.find(mark) >= 0]
            built_for = ""
            with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "horovod", "metadata.json")) as f:
                built_for = str(json.load(f).get("tensorflow", ""))
            return {"tensorflow": built_for, "features": features}
    return None


def _code(package: str) -> str:
    """A digest of the package's files; "" without files."""
    state = hashlib.sha256()
    files = sorted(glob.glob(os.path.join(glob.escape(package), "**", "*.py"), recursive=True))
    for path in files:
        with open(path, "rb") as file:
            state.update(os.path.relpath(path, package).encode() + b"\0" + file.read())
    return state.hexdigest() if files else ""


def cpu(asked: Asked) -> Any:
    """Cores that a process may use, their load, and the processor."""
    about = _read("/proc/cpuinfo").splitlines()

    def field(*names: str) -> str:
        lines = (line.partition(":") for line in about)
        return next((value.strip() for name, _, value in lines if name.strip() in names), "")

    return {
        "cores": len(os.sched_getaffinity(0)),
        # The doctor parses them.
        "quota": [[_read(os.path.join(group, name)) for name in asked["quota_files"]] for group in _groups("cpu")],
        "load": os.getloadavg()[0],
        "model": field("model name") or platform.machine(),
        "flags": field("flags", "Features").split(),
    }


def gpus(asked: Asked) -> Any:
    """Name and driver of each GPU."""
    said = _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    rows = [line.rpartition(",") for line in said.splitlines() if "," in line]
    return [{"name": name.strip(), "driver": driver.strip()} for name, _, driver in rows]


def memory(asked: Asked) -> Any:
    """Free memory and shared memory in bytes, whether processes can read each other's memory, the open-files limit."""
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
        "shm_total": shm.f_blocks * shm.f_frsize if shm else 0,
        "shm_free": shm.f_bavail * shm.f_frsize if shm else 0,
        "attach_error": _attach_error(),
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


class _Part(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _attach_error() -> str:
    """Why this process cannot read the memory of another process of the same user; "": it can.

    MPI's ranks on a host send large messages this way. The other process is a child that, as MPI's ranks do, lets all
    processes read its memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    mine, wanted = ctypes.create_string_buffer(8), ctypes.create_string_buffer(b"doctor!")
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        here.close()
        libc.prctl(PR_SET_PTRACER, ctypes.c_long(PR_SET_PTRACER_ANY), 0, 0, 0)
        there.send(b"1")
        there.recv(1)  # ends with the parent
        os._exit(0)
    there.close()
    try:
        here.recv(1)
        local, remote = (_Part(ctypes.addressof(buffer), len(buffer)) for buffer in (mine, wanted))
        libc.process_vm_readv.restype = ctypes.c_ssize_t
        read = libc.process_vm_readv(child, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        return "" if read == len(mine) and mine.value == wanted.value else os.strerror(ctypes.get_errno())
    finally:
        here.close()
        os.waitpid(child, 0)


def network(asked: Asked) -> Any:
    """This host's name, its cards, also those that are down, and how it resolves the names of all hosts."""
    states = psutil.net_if_stats()
    cards = []
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                state = states.get(name)
                cards.append(
                    {
                        "name": name,
                        "address": entry.address,
                        "netmask": entry.netmask or "255.255.255.255",
                        "up": bool(state and state.isup),
                        "speed": max(0, state.speed) if state else 0,
                    }
                )
    own = socket.gethostname()
    forward = {name: _addresses(name) for name in {*asked["hosts"], own}}
    back = {address: _name(address) for addresses in forward.values() for address in addresses}
    return {"hostname": own, "cards": cards, "addresses": forward, "names": back}


def _addresses(name: str) -> "list[str]":
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        return []


def _name(address: str) -> str:
    try:
        return socket.gethostbyaddr(address)[0]
    except OSError:
        return ""


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


def data(asked: Asked) -> Any:
    """The data set: for each existing file its size, its SHA-256 and the first record with an invalid label."""
    folders = [folder for folder in asked["data_folders"] if _has_any(folder, asked["data_files"])]
    if not folders:
        return None
    files = {}
    for name in asked["data_files"]:
        path = os.path.join(folders[0], name)
        with contextlib.suppress(OSError):
            files[name] = _look_at(path, asked["record_bytes"], asked["label_bytes"], asked["classes"])
    return {"folder": folders[0], "files": files}


def _has_any(folder: str, names: "list[str]") -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for name in names)


def _look_at(path: str, record_bytes: int, label_bytes: int, classes: int) -> Any:
    state = hashlib.sha256()
    wrong, size = -1, 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES // record_bytes * record_bytes):
            state.update(block)
            if wrong < 0 and max(labels := block[label_bytes - 1 :: record_bytes]) >= classes:
                place = next(place for place, label in enumerate(labels) if label >= classes)
                wrong = size // record_bytes + place
            size += len(block)
    return {"bytes": size, "sha256": state.hexdigest(), "wrong_label_at": wrong}


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
GROUPS = {group.__name__: group for group in (network, cpu, memory, versions, gpus, disk, data)}


def main() -> None:
    """See the module."""
    print(json.dumps({"group": "ready"}), flush=True)
    asked = json.loads(sys.stdin.readline())
    print(json.dumps({"group": "clock", "facts": time.time()}), flush=True)

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
