"""Elastic jobs: sizes, cool-downs, discovery, and the two slots of a state copy."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from hvd_cifar.errors import RESUME, UserError
from hvd_cifar.launch import elastic
from hvd_cifar.launch import job as launch_job
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.launch.cluster.network import Unreachable
from hvd_cifar.launch.cluster.remarks import Lost, ended_by_signal, lost_in
from hvd_cifar.launch.elastic import ElasticRun
from hvd_cifar.launch.job import Job, Starter
from hvd_cifar.launch.request import parse
from hvd_cifar.launch.roster import Roster, Sizes, first_slots
from hvd_cifar.runtime import shared_memory, stalls
from hvd_cifar.runtime.environment import ElasticJob, elastic_job
from hvd_cifar.runtime.shared_memory import NONE, TwoSlots, newest_version, own_folder

LAYOUT = bytes(range(32))
HOSTS = (Host("a", 2), Host("b", 4))


@pytest.mark.parametrize(
    ("slots", "shards", "size"), [(1, None, 1), (5, None, 5), (9, None, 8), (7, 8, 4), (8, 8, 8), (3, 8, 2), (0, 8, 0)]
)
def test_the_largest_size_that_fits(slots: int, shards: int | None, size: int) -> None:
    assert Sizes(1, 8, shards).fitting(slots) == size


def test_sizes_from_the_command_line() -> None:
    assert parse(["--elastic", "2:8"]).settings.elastic == (2, 8)
    for wrong in ("2", "8:2", "0:3", "a:b", "2:"):
        with pytest.raises(UserError, match=f"^--elastic {wrong}: write MIN:MAX ranks, such as 2:8"):
            parse(["--elastic", wrong])


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "9", "--elastic", "2:8"],
        ["--elastic-timeout", "9"],
        ["--cool-down", "3:9"],
        ["--hostfile", "/dev/stdin", "--elastic", "1:2"],
        ["--elastic", "1:2", "--max-restarts", "2"],
        ["--elastic", "1:2", "--validation-ranks", "1"],
        ["--elastic", "1:2", "--cool-down", "9"],
        ["--elastic", "1:2", "--cool-down", "9:3"],
    ],
)
def test_options_that_contradict_each_other(words: list[str]) -> None:
    with pytest.raises(UserError):
        parse([*words, "train"])


def test_hosts_are_filled_in_their_order() -> None:
    assert first_slots(HOSTS, 1) == (Host("a", 1),)
    assert first_slots(HOSTS, 3) == (Host("a", 2), Host("b", 1))
    assert first_slots(HOSTS, 0) == ()


def test_a_lost_rank_costs_one_slot_and_a_lost_host_all_of_them_for_a_time_that_doubles() -> None:
    roster = Roster(10, 30)
    assert roster.usable(HOSTS, 0) == HOSTS
    assert roster.lose("b", whole=False, now=0) == 10
    assert roster.usable(HOSTS, 9.9) == (Host("a", 2), Host("b", 3))
    assert roster.usable(HOSTS, 10) == HOSTS
    assert [roster.lose("b", whole=True, now=100) for _ in range(3)] == [20, 30, 30]
    assert roster.usable(HOSTS, 129) == (Host("a", 2),)
    assert roster.usable(HOSTS, 130) == HOSTS
    assert roster.lose("a", whole=False, now=200) == 10  # each host for itself
    roster.lose("a", whole=False, now=200)
    assert roster.usable(HOSTS, 201) == (Host("b", 4),)


def test_what_was_lost_is_read_from_what_the_launcher_said() -> None:
    said = ended_by_signal(3, "b", 9, "Killed") + "hvd_cifar: c is lost, and its ranks with it: is it on?\nother\n"
    assert lost_in(said.encode()) == [Lost("b", 3), Lost("c")]
    assert lost_in(b"hvd_cifar: rank 1 ended first, with exit code 7\n") == [Lost("", 1)]
    hangs = stalls.Lost(2, "c", 120, "step", "its process is stopped")
    assert lost_in(f"{said}hvd_cifar: {hangs}\n".encode()) == [Lost("c", 2)]
    assert lost_in(b"hvd_cifar: rank 0 lost another rank, which ended first\n") == []


def test_an_elastic_job_travels_in_a_variable() -> None:
    job = ElasticJob("name", 4)
    assert elastic_job({"HVD_CIFAR_ELASTIC": json.dumps(job)}) == job
    assert elastic_job({}) is None


def _bytes(value: int, size: int = 6) -> np.ndarray:
    return np.full(size, value, np.uint8)


def test_the_older_version_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state"
    assert newest_version(path) == NONE
    slots = TwoSlots(path, LAYOUT, 10)
    assert newest_version(path) == NONE
    for step in (4, 5, 6):
        slots.write(step, [_bytes(step), _bytes(step + 100, 4)])
    again = TwoSlots(path, LAYOUT, 10)  # a later process
    assert sorted(again.versions) == [5, 6] and newest_version(path) == 6
    assert again.read(5).tolist() == [5] * 6 + [105] * 4
    assert sorted(TwoSlots(path, LAYOUT[::-1], 10).versions) == [NONE, NONE]  # other variables
    assert sorted(TwoSlots(path, LAYOUT[::-1], 11).versions) == [NONE, NONE]


def test_a_writer_that_is_killed_leaves_a_whole_version(tmp_path: Path) -> None:
    """Four writers are killed in the midst of writing 8 MiB over and over; what is marked as whole is whole."""
    program = (
        "import sys, itertools, numpy as np; from pathlib import Path\n"
        "from hvd_cifar.runtime.shared_memory import TwoSlots\n"
        "slots = TwoSlots(Path(sys.argv[1]), bytes(32), 2**23)\n"
        "for step in itertools.count(max(slots.versions) + 1):\n"
        "    slots.write(step, [np.full(2**22, step % 251, np.uint8)] * 2)\n"
        "    print(step, flush=True)\n"
    )
    path = tmp_path / "state"
    last = -1
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE)
        assert process.stdout
        for _ in range(3):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        slots = TwoSlots(path, bytes(32), 2**23)
        assert max(slots.versions) >= last
        for step in slots.versions:
            if step != NONE:
                assert set(np.unique(slots.read(step))) == {step % 251}


def test_no_room_and_a_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no room for .* bytes .*--shm-size"):
        TwoSlots(tmp_path / "state", LAYOUT, 2**50)
    assert not (tmp_path / "state").exists()
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    assert own_folder("job").stat().st_mode & 0o777 == 0o700
    (tmp_path / f"hvd_cifar-{os.getuid()}" / "job").chmod(0o755)
    with pytest.raises(UserError, match="is not a folder of yours alone"):
        own_folder("job")
    place = tmp_path / "other" / f"hvd_cifar-{os.getuid()}"
    place.parent.mkdir()
    place.symlink_to("nowhere")
    monkeypatch.setattr(shared_memory, "ROOT", place.parent)
    with pytest.raises(UserError, match=f"--elastic: cannot make {place}: File exists"):
        own_folder("job")


@pytest.mark.usefixtures("quick")
def test_a_discovery_that_fails_while_no_host_is_there_does_not_end_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does the job then start on no host, which mpirun takes for this one."""
    failures = [UserError("no answer"), UserError("no answer"), UserError("other")]
    answers: Iterator[tuple[Host, ...] | UserError] = iter([HOSTS, (), *failures, HOSTS])
    started: list[tuple[Host, ...]] = []

    def discover() -> tuple[Host, ...]:
        answer = next(answers, HOSTS)
        if isinstance(answer, UserError):
            raise answer
        return answer

    def start(hosts: tuple[Host, ...], _: dict[str, str]) -> int:
        started.append(hosts)
        return int(len(started) == 1)

    run = ElasticRun(Sizes(2, 8), discover, start, Job(can_stop=True), tmp_path)
    run._watch = lambda hosts, ended: None  # type: ignore[method-assign]  # which looks for hosts also
    assert run.run() == 0
    run.clean_up()
    assert started == [HOSTS, HOSTS]
    said = capfd.readouterr().err
    assert said.count("no answer; the hosts known so far stay") == 1 and said.count("other;") == 1


def test_a_start_is_told_of_where_no_lost_rank_is_known(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    codes = iter([1, 0])
    run = ElasticRun(Sizes(1, 8), lambda: HOSTS, lambda *_: next(codes), Job(can_stop=True), tmp_path)
    assert run.run() == 0
    run.clean_up()
    assert capfd.readouterr().err == "hvd_cifar: elastic: exit code 1; all start again\n"


def _rank(job: Job, program: str) -> int:
    return job.run(Starter([sys.executable, "-c", program], os.environ))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(elastic, "SECONDS_BEFORE_RESIZE", 0.3)
    monkeypatch.setattr(launch_job, "SECONDS_BETWEEN_ASKS", 0.05)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("returns", "cool_down"), [(True, (0, 0)), (False, (0.3, 60))])
def test_a_job_that_needs_a_lost_host_waits_for_it(
    returns: bool, cool_down: tuple[float, float], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The host answers its sixth question, or none."""
    away, here = Host("nosuch.invalid", 1), Host("localhost", 1)
    asked, starts = tmp_path / "asked", []

    def start(hosts: tuple[Host, ...], _: dict[str, str]) -> int:
        starts.append(hosts)
        if not asked.exists():
            raise Unreachable("ssh nosuch.invalid: no answer", [away.name])
        return 0

    answer = f"echo >> {asked}; {f'test $(wc -l < {asked}) -gt 5' if returns else 'exit 1'}"
    run = ElasticRun(
        Sizes(2, 2), lambda: (here, away), start, Job(True), tmp_path, None, 60 if returns else 1, cool_down
    )
    run.words = lambda host, command: ["sh", "-c", answer]
    code = run.run()
    run.used.clear()  # there is nothing to remove from another host
    run.clean_up()
    assert starts == [(here, away)] * (1 + returns)
    assert code == (0 if returns else RESUME)
    said = capfd.readouterr().err
    assert said.count("1 ranks are there, and 2 needed") == 1
    assert returns or said.endswith("elastic: no 2 ranks within 1 s (exit code 75)\n")


@pytest.mark.usefixtures("quick")
def test_steps_that_only_another_host_sees_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four starts make a step each, and fail; those after them make none. This host has an old copy and no records."""
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    starts = itertools.count(1)
    there = TwoSlots(tmp_path / "there", LAYOUT, 4)

    def start(*_: object) -> int:
        if (number := next(starts)) <= 4:
            there.write(10 + number, [_bytes(0, 4)])
        return 1

    run = ElasticRun(Sizes(1, 1), lambda: (Host("nosuch.invalid", 1),), start, Job(True), tmp_path)
    TwoSlots(own_folder(run.name) / "state", LAYOUT, 4).write(9, [_bytes(0, 4)])
    script = ["sh", "-c", 'echo welcome; exec "$@"', "sh"]
    run.words = lambda host, command: [*script, *command[:-1], str(tmp_path / "there")]
    assert run.run() == 1
    run.used.clear()
    run.clean_up()
    assert next(starts) == 8 and "3 starts made no step" in capfd.readouterr().err


def test_clean_up_says_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic, "ANSWER_SECONDS", 0.3)
    asked: list[str] = []
    before = set(psutil.Process().children())
    run = ElasticRun(Sizes(1, 8), lambda: HOSTS, lambda *_: 0, Job(can_stop=True), tmp_path)

    def words(host: str, command: Sequence[str]) -> list[str]:
        asked.append(host)
        return ["sh", "-c", "echo welcome; exec sleep 600"]

    run.words = words
    run.used = {"nosuch.invalid"}
    run.clean_up()
    assert asked == ["nosuch.invalid"] and set(psutil.Process().children()) <= before
    assert capfd.readouterr() == ("", "")


def test_without_ssh_no_host_is_reached(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ElasticRun(Sizes(1, 8), lambda: HOSTS, lambda *_: 0, Job(can_stop=True), tmp_path)
    run.words = lambda host, command: [str(tmp_path / "no ssh"), host, *command]
    assert run._lose_silent({"nosuch.invalid"})
    run.used = {"nosuch.invalid"}
    run.clean_up()
    assert capfd.readouterr().err == "hvd_cifar: elastic: nosuch.invalid does not answer; it rests for 10 s\n"


@pytest.mark.usefixtures("quick")
def test_slots_that_come_while_hosts_are_asked_are_taken(tmp_path: Path) -> None:
    """The ranks of the first start run 60 s, unless they are asked to stop."""
    started: list[tuple[Host, ...]] = []
    ours = Job(can_stop=True)

    def start(hosts: tuple[Host, ...], _: dict[str, str]) -> int:
        started.append(hosts)
        if len(started) > 1:
            return 0
        time.sleep(0.5)  # longer than SECONDS_BEFORE_RESIZE
        return _rank(ours, "import time; time.sleep(60)")

    few, more = (Host("localhost", 1),), (Host("localhost", 2),)
    run = ElasticRun(Sizes(1, 8), lambda: more if started else few, start, ours, tmp_path, ranks=1)
    began = time.monotonic()
    assert run.run() == 0
    run.clean_up()
    assert started == [few, more] and time.monotonic() - began < 30
