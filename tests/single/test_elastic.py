"""Elastic jobs: sizes, cool-downs, discovery, and the two slots of a state copy."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from hvd_cifar.config import TrainSettings, make
from hvd_cifar.errors import RESUME, UserError
from hvd_cifar.launch import elastic
from hvd_cifar.launch import job as launch_job
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.launch.cluster.network import Unreachable
from hvd_cifar.launch.command import first_slots, parse
from hvd_cifar.launch.elastic import ElasticRun, Roster
from hvd_cifar.launch.job import Job
from hvd_cifar.launch.output import Lost
from hvd_cifar.runtime import shared_memory
from hvd_cifar.runtime.shared_memory import TwoVersions, own_folder, versions_in

HOSTS = (Host("a", 2), Host("b", 4))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(([f"--elastic={wrong}"], f"^--elastic {wrong}: write MIN:MAX") for wrong in ("2", "8:2", "0:3", "a:b", "2:")),
        (["-np", "9", "--elastic", "2:8"], "-np 9 is not within --elastic 2:8"),
        (["--elastic-timeout", "9"], "goes with --elastic MIN:MAX"),
        (["--cool-down", "3:9"], "goes with --elastic MIN:MAX"),
        (["--elastic", "1:2", "--max-restarts", "2"], "leave --max-restarts out"),
        (["--elastic", "1:2", "--validation-ranks", "1"], "exclude each other"),
        (["--elastic", "1:2", "--cool-down", "9:3"], "--cool-down 9:3: write FIRST:LONGEST seconds"),
    ],
)
def test_options_that_are_wrong_or_contradict_each_other(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse([*words, "train"])


def test_hosts_are_filled_in_their_order() -> None:
    assert first_slots(HOSTS, 1) == (Host("a", 1),)
    assert first_slots(HOSTS, 3) == (Host("a", 2), Host("b", 1))
    assert first_slots(HOSTS, 0) == ()


def test_a_lost_rank_costs_one_slot_and_a_lost_host_all_of_them_for_a_time_that_doubles(monkeypatch: Any) -> None:
    roster = Roster(10, 30)

    def at(now: float) -> Roster:
        monkeypatch.setattr(time, "monotonic", lambda: now)
        return roster

    assert at(0).usable(HOSTS) == HOSTS
    assert at(0).lose("b", whole=False) == 10
    assert at(9.9).usable(HOSTS) == (Host("a", 2), Host("b", 3)) and at(10).usable(HOSTS) == HOSTS
    assert [at(100).lose("b", whole=True) for _ in range(3)] == [20, 30, 30]
    assert at(129).usable(HOSTS) == (Host("a", 2),) and at(130).usable(HOSTS) == HOSTS
    assert [at(200).lose("a", whole=False) for _ in range(2)] == [10, 20]  # each host for itself
    assert at(201).usable(HOSTS) == (Host("b", 4),)


def test_a_rank_that_hangs_is_the_lost_one() -> None:
    job = Job(can_stop=True)
    job._errors.lost = [Lost("b", 3)]
    assert job.lost == [Lost("b", 3)]
    job.tail = b"hvd_cifar: rank 2 on c hangs at step 120 (step): its process is stopped\n"
    assert job.lost == [Lost("c", 2)]


def _bytes(value: int, size: int = 6) -> np.ndarray:
    return np.full(size, value, np.uint8)


def test_the_older_version_is_replaced(tmp_path: Path) -> None:
    copies = TwoVersions(tmp_path, 10)
    assert versions_in(tmp_path) == versions_in(tmp_path / "none") == []
    for step in (4, 5, 6):
        copies.write(step, np.concatenate([_bytes(step), _bytes(step + 100, 4)]))
    again = TwoVersions(tmp_path, 10)  # a later process
    assert sorted(versions_in(tmp_path)) == [5, 6]
    assert again.read(5).tolist() == [5] * 6 + [105] * 4
    again.write(7, _bytes(7, 10))
    assert sorted(versions_in(tmp_path)) == [6, 7] and len(list(tmp_path.iterdir())) == 2


def test_no_room_and_a_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no room for .* bytes .*--shm-size"):
        TwoVersions(tmp_path, 2**50)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    assert own_folder("job").stat().st_mode & 0o777 == 0o700 and own_folder("job").parent == tmp_path
    (tmp_path / "other").symlink_to("nowhere")
    with pytest.raises(UserError, match=f"--elastic: cannot make {tmp_path}/other: File exists"):
        own_folder("other")
    monkeypatch.setattr(os, "getuid", lambda: 7)
    with pytest.raises(UserError, match="is not yours"):
        own_folder("job")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(elastic, "SECONDS_BEFORE_RESIZE", 0.3)
    monkeypatch.setattr(launch_job, "SECONDS_BETWEEN_ASKS", 0.05)


class Fake(ElasticRun):
    """A job whose hosts and starts a test makes up: `starts` holds the exit code, or an error, of each start."""

    def __init__(
        self, *starts: int | Exception, hosts: Any = HOSTS, words: Sequence[str] = ("--elastic", "1:8")
    ) -> None:
        self.hosts = hosts if isinstance(hosts, Iterator) else itertools.repeat(hosts)
        self.starts, self.started, self.asked = iter(starts), list[tuple[Host, ...]](), list[str]()
        super().__init__(parse([*words, "train"]), make(TrainSettings, {}))
        self.way: Any = SimpleNamespace(words=self.words, FAILED=255)

    def discover(self) -> tuple[Host, ...]:
        if isinstance(found := next(self.hosts), Exception):
            raise found
        return tuple(found)

    def start(self, hosts: tuple[Host, ...]) -> int:
        self.started.append(hosts)
        if isinstance(code := next(self.starts), Exception):
            raise code
        return code

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        """What runs a command on a host."""
        self.asked.append(host)
        return ["echo", "{}"]

    def _watch(self, hosts: tuple[Host, ...], ended: Any) -> None:
        """Look for no hosts while ranks run."""


@pytest.mark.usefixtures("quick")
def test_a_discovery_that_fails_while_no_host_is_there_does_not_end_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    """Nor does the job then start on no host, which mpirun takes for this one."""
    failures = [UserError("no answer"), UserError("no answer"), UserError("other")]
    run = Fake(1, 0, hosts=iter([HOSTS, HOSTS, (), *failures, HOSTS]), words=["--elastic", "2:8"])
    assert run.run() == 0 and run.started == [HOSTS, HOSTS]
    said = capfd.readouterr().err
    assert said.count("no answer; the hosts known so far stay") == 1 and said.count("other;") == 1
    assert "elastic: exit code 1; all start again" in said


def test_a_job_does_not_go_on_from_copies_that_differ(capfd: pytest.CaptureFixture[str]) -> None:
    run = Fake(1)
    run.job.tail = b"hvd_cifar: ranks are out of sync after step 20: dense/kernel\n"
    assert run.run() == 1 and run.started == [HOSTS] and "elastic" not in capfd.readouterr().err


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("returns", [True, False])
def test_a_job_that_needs_a_lost_host_waits_for_it(
    returns: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The host answers its third question, or none."""
    hosts, asked = (Host("localhost", 1), Host("nosuch.invalid", 1)), tmp_path / "asked"
    words = ["--elastic", "2:2", "--cool-down", "0:0", "--elastic-timeout", "60" if returns else "1"]
    run = Fake(Unreachable("ssh nosuch.invalid: no answer", ["nosuch.invalid"]), 0, hosts=hosts, words=words)
    answer = f"echo >> {asked}; {f'test $(wc -l < {asked}) -gt 2 && echo {{}}' if returns else 'exit 1'}"
    run.way.words = lambda host, command: ["sh", "-c", answer]
    assert run.run() == (0 if returns else RESUME)
    assert run.started == [hosts] * (1 + returns)
    said = capfd.readouterr().err
    assert "elastic: nosuch.invalid is lost" in said and "elastic: nosuch.invalid does not answer; it rests" in said
    assert returns or said.endswith("elastic: no 2 ranks within 1 s (exit code 75)\n")


@pytest.mark.usefixtures("quick")
def test_starts_count_that_make_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four starts make a step each, and fail; the next two make none. Two of the steps are in metrics.jsonl alone."""
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    run = Fake(*[1] * 9, hosts=(Host("nosuch.invalid", 1),))
    run.request = replace(run.request, run_dir=tmp_path)
    copies, start = TwoVersions(own_folder(run.folder.name), 4), run.start

    def make_step(hosts: tuple[Host, ...]) -> int:
        step = len(run.started) + 1
        if step in (1, 2):
            copies.write(step, _bytes(0, 4))
        elif step in (3, 4):
            (tmp_path / "metrics.jsonl").write_text(f'{{"event": "train", "step": {step}}}\n')
        return start(hosts)

    monkeypatch.setattr(run, "start", make_step)
    assert run.run() == 1
    assert len(run.started) == 6 and "3 starts in a row ended after the same step" in capfd.readouterr().err


def test_an_end_leaves_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where a host does not answer, and where there is no ssh."""
    monkeypatch.setattr(elastic, "ANSWER_SECONDS", 0.3)
    before = set(psutil.Process().children())
    for words in (["sh", "-c", "echo welcome; exec sleep 600"], ["/proc/no ssh"]):
        run = Fake(0, hosts=(Host("nosuch.invalid", 1),))
        run.way.words = lambda host, command, words=words: words
        assert run.run() == 0 and run.used == {"nosuch.invalid"}
        assert run._rest_silent({"nosuch.invalid"})
        assert capfd.readouterr().err == "hvd_cifar: elastic: nosuch.invalid does not answer; it rests for 10 s\n"
    assert set(psutil.Process().children()) <= before
