"""What a report says: numbers, names, order; whatever a file holds stays text. `tests/parallel` looks at its page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar.config import make
from hvd_cifar.errors import UserError
from hvd_cifar.reporting.run_files import Confusion, read_run
from hvd_cifar.tools.report import command as content
from hvd_cifar.tools.report.command import report
from hvd_cifar.tools.settings import ReportSettings
from tests.run_dirs import CONFIG, CONFUSION, MARKS, write_run

HOSTILE = '<img src=x onerror="alert(1)">&{{ 7 * 6 }}$\\frac$'


class Elements(HTMLParser):
    """Names of all elements of a page, their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def written(*run_dirs: Path, **settings: Any) -> str:
    report(make(ReportSettings, {"run_dirs": run_dirs, **settings}))
    return (settings.get("output") or run_dirs[0] / "report.html").read_text()


def test_a_report_holds_all_sections_and_fetches_nothing(tmp_path: Path) -> None:
    text = written(write_run(tmp_path / "first"))
    page = Elements(text)
    assert not {"script", "iframe", "object", "embed", "base", "form"} & page.names
    links = [value or "" for name, value in page.attributes if name in ("src", "href", "xlink:href", "action")]
    assert links and all(link.startswith(("data:", "#")) for link in links)
    assert not re.search(r"url\((?!#)", text) and "@import" not in text
    said = " ".join(" ".join(page.words).split())
    for words in (
        "The run stops at a request, after step 60.",
        "Test accuracy 50.00%",
        "useful steps 80.0% 80.0 s",
        "the run starts on 2 ranks",
        "rank 1 is slow",
        "Rank 0 on a is the slowest",
        "right on 75.00% of the test images of birds.",
        "dog for cat 3 37.5%",
        "dog 90.0%",
        "python -m hvd_cifar train",
    ):
        assert words in said, words
    assert text == written(tmp_path / "first")  # the same from the same files


def test_a_report_names_the_processors_that_a_record_has(tmp_path: Path) -> None:
    older = {**CONFIG, "run": {name: value for name, value in CONFIG["run"].items() if name != "processors"}}
    said = [
        " ".join(Elements(written(write_run(tmp_path / name, config))).words)
        for name, config in (("now", CONFIG), ("older", older))
    ]
    assert "(AMD EPYC), 1 thread a rank" in said[0] and "AMD EPYC" not in said[1] and "1 thread a rank" in said[1]


def test_whatever_a_file_holds_stays_text(tmp_path: Path) -> None:
    hostile = {"dataset": HOSTILE, "hosts": [HOSTILE, "b"], "command": HOSTILE, "versions": {HOSTILE: ""}}
    config = {**CONFIG, "model": HOSTILE, "run": {**CONFIG["run"], **hostile}}
    confusion = {**CONFUSION, "class_names": [HOSTILE, "dog"], "split": HOSTILE}
    run_dir = write_run(tmp_path / HOSTILE.replace("/", ""), config, confusion)
    with (run_dir / "sessions.jsonl").open("a") as file:
        for mark in ({**MARKS[3], "text": HOSTILE}, {**MARKS[4], "how": "failed", "why": HOSTILE}):
            file.write(json.dumps(mark) + "\n")
    plain = Elements(written(write_run(tmp_path / "plain"), write_run(tmp_path / "second")))
    page = Elements(written(run_dir, tmp_path / "second", output=tmp_path / "out.html"))
    assert page.names == plain.names and "img" in page.names
    assert {name for name, _ in page.attributes} == {name for name, _ in plain.attributes}
    assert not any(value == "x" for name, value in page.attributes if name == "src")
    assert " ".join(page.words).count(HOSTILE) >= 8


def test_several_runs_are_compared_by_name_and_by_what_differs(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a" / "run")
    other = write_run(tmp_path / "b" / "run", {**CONFIG, "seed": 7, "run": {**CONFIG["run"], "world_size": 4}}, None)
    said = " ".join(" ".join(Elements(written(one, other, one)).words).split())
    assert "2 runs" in said and "a/run" in said and "b/run" in said  # the third is the first
    assert "seed 0 7 ranks 2 4" in said


def test_times_of_ranks_are_means_over_steps_of_the_newest_set(tmp_path: Path) -> None:
    rows, slowest = content.times_of_ranks(read_run(write_run(tmp_path / "run")))
    means = {row["rank"]: row["compute"] for row in rows}  # 20 steps, then 40
    assert means == pytest.approx({0: (20 * 0.1 + 40 * 0.2) / 60, 1: (20 * 0.2 + 40 * 0.1) / 60})
    assert slowest == "Rank 0 on a is the slowest: its own part of a step takes 166.7 ms, 25.0% behind the median."


def test_a_large_confusion_matrix_is_told_by_its_pairs() -> None:
    def found(matrix: list[list[int]]) -> content.Classes:
        named = [f"c{i}" for i in range(len(matrix))]
        made = Confusion(dataset="d", step=1, split="test", class_names=named, matrix=matrix, mistakes=[])
        return content.classes(made)

    many = found([[5 if i == j else int(j == i + 1) * (i + 1) for j in range(25)] for i in range(25)])
    assert not many.cells and many.pairs[0] == ("c23", "c24", 24, 24 / 29)
    few = found([[0, 0], [1, 3]])
    assert [[part for _, part in row] for row in few.cells] == [[None, None], [25, 75]] and few.accuracy == 0.75


def test_time_between_two_launchers_is_none(tmp_path: Path) -> None:
    again = [{**MARKS[0], "time": 2e9 + 1, "began": 2e9}, {**MARKS[4], "time": 2e9 + 80}]
    run_dir = write_run(tmp_path / "run", marks=[*MARKS, *again])
    assert content.results(read_run(run_dir))["seconds"] == 180
    assert ">minutes<" in written(run_dir)  # not the years between
    (run_dir / "sessions.jsonl").unlink()
    assert "Where the time went" not in written(run_dir)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "no log line is on record yet; wait for the first one"),
        (lambda run: (run / "metrics.jsonl").write_text('{"event": "tr'), "no log line is on record yet"),
        (lambda run: (run / "report.html").mkdir(), "cannot write .*report.html: "),
    ],
)
def test_a_report_that_cannot_be_made_is_a_user_s_error(tmp_path: Path, spoil: Any, message: str) -> None:
    run_dir = write_run(tmp_path / "run")
    spoil(run_dir)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message) as failure:
        report(make(ReportSettings, {"run_dirs": [run_dir]}))
    assert len(str(failure.value).splitlines()) == 1 and sorted(tmp_path.rglob("*")) == before


def test_a_page_takes_the_place_of_no_file_of_a_run(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    with pytest.raises(UserError, match="--output .*config.json: is no name of a page"):
        written(run_dir, output=run_dir / "config.json")
