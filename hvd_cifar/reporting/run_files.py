"""A run as its files describe it, read without TensorFlow by other programs, also while the run writes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from hvd_cifar.errors import UserError
from hvd_cifar.fields import MOST_STEPS
from hvd_cifar.files import read_json
from hvd_cifar.reporting import sessions

# Until a run without an end counts as cut off: during evaluations and checkpoints it gives no sign of life.
SECONDS_OF_SILENCE = 600.0
Count = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]  # what a chart can show
Seconds = Annotated[float, Field(ge=0, le=1e30)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class Train(_Part):
    """A log line: loss of one step, over its global batch, and speed since the line before."""

    event: Literal["train"]
    step: Count
    epoch: Number
    loss: Number
    learning_rate: Number
    images_per_second: Number


class Evaluated(_Part):
    """An evaluation on the test set, or on examples that are held out."""

    event: Literal["eval", "validation"]
    step: Count
    epoch: Number
    accuracy: Fraction = Field(validation_alias=AliasChoices("test_accuracy", "validation_accuracy"))
    loss: Number = Field(validation_alias=AliasChoices("test_loss", "validation_loss"))

    @property
    def part(self) -> str:
        """Of the data set."""
        return "test" if self.event == "eval" else "validation"


class Ranks(_Part):
    """Seconds of a step since the last such event, by rank."""

    event: Literal["ranks"]
    step: Count
    hosts: list[str] = Field(min_length=1)
    compute_seconds: list[Seconds]
    wait_seconds: list[Seconds]

    @model_validator(mode="after")
    def _each_rank_has_a_value(self) -> Ranks:
        if not len(self.hosts) == len(self.compute_seconds) == len(self.wait_seconds):
            raise ValueError("one value a rank")
        return self


Event = Train | Evaluated | Ranks
EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


class Facts(_Part):
    """How the newest session of a run was started: the section "run" of config.json."""

    dataset: str
    world_size: int = Field(gt=0)
    hosts: list[str] = Field(min_length=1)  # by rank
    device: str
    processors: list[str] = []  # by rank; the record of an older run lacks them
    threads: int
    controller: str
    command: str
    hvd_cifar: str
    git_commit: str | None
    versions: dict[str, str]


class Config(_Part):
    """The part of config.json that readers use."""

    model: str
    precision: str | None
    seed: int
    global_batch_size: int = Field(gt=0)
    run: Facts


class Summary(_Part):
    """The part of summary.json that readers use. Only a finished run has the file."""

    test_accuracy: Fraction
    test_loss: Number
    images_per_second: Number | None


class Mistake(_Part):
    """A test image that the net takes for another class."""

    index: Count
    label: Count
    predicted: Count
    probabilities: list[Fraction]
    image: str = Field(pattern=r"^data:image/png;base64,[A-Za-z0-9+/=]+$")  # nothing that a browser would fetch


class Confusion(_Part):
    """What confusion.json says."""

    dataset: str
    step: Count
    split: str
    class_names: list[str] = Field(min_length=1)
    matrix: list[list[Count]]  # by true class, then by predicted class
    mistakes: list[Mistake]

    @model_validator(mode="after")
    def _all_are_of_these_classes(self) -> Confusion:
        classes = len(self.class_names)
        lengths = {len(self.matrix), *map(len, self.matrix), *(len(m.probabilities) for m in self.mistakes)}
        if lengths != {classes} or any(max(m.label, m.predicted) >= classes for m in self.mistakes):
            raise ValueError(f"not all of it is of {classes} classes")
        return self


@dataclass(frozen=True)
class RunFiles:
    """A run, read at one moment.

    settings: all of config.json; config: the part of it that readers use.
    events, damaged: of metrics.jsonl, in their order; number of its lines that are none.
    marks: of sessions.jsonl, and one at the last sign of life of a session without an end: "lost" where that is long
        ago, else "seen".
    standing: a word and a sentence (`sessions.standing`).
    summary: None until the run is complete. confusion: None before the first evaluation.
    """

    run_dir: Path
    settings: dict[str, Any]
    config: Config
    events: list[Event]
    damaged: int
    marks: list[sessions.Mark]
    standing: tuple[str, str]
    summary: Summary | None
    confusion: Confusion | None

    def of_kind(self, kind: type[E]) -> list[E]:
        """The events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]


E = TypeVar("E", Train, Evaluated, Ranks)
P = TypeVar("P", bound=_Part)


def read_run(run_dir: Path) -> RunFiles:
    """Read all files of a run. UserError where there is no run, or a file of it is damaged."""
    config = _read(Config, run_dir / "config.json", "give the folder of another run")
    if config is None:
        raise UserError(f"{run_dir}: there is no run (no config.json); give the folder of a run")
    events, damaged = as_events(_lines(run_dir / "metrics.jsonl"))
    marks = sessions.read("\n".join(_lines(run_dir / sessions.SESSIONS)))
    step = max((event.step for event in events), default=0)
    if not sessions.has_ended(marks):
        # Rank 0 writes, or sets the time of sessions.jsonl (`Reporter.beat`), while it lives.
        seen = max((run_dir / name).stat().st_mtime for name in ("config.json", sessions.SESSIONS))
        is_silent = time.time() > seen + SECONDS_OF_SILENCE
        marks.append({"mark": "lost" if is_silent else "seen", "time": max(seen, marks[-1]["time"]), "step": step})
    summary = _read(Summary, run_dir / "summary.json", "train the run to its end again, or remove the file")
    confusion = _read(Confusion, run_dir / "confusion.json", "remove it; an evaluation writes it again")
    settings, standing = read_json(run_dir / "config.json"), sessions.standing(marks, step)
    return RunFiles(run_dir, settings, config, events, damaged, marks, standing, summary, confusion)


def _read(kind: type[P], path: Path, remedy: str) -> P | None:
    """A JSON file of a kind; None where there is none. Raises UserError where it is damaged."""
    try:
        return kind.model_validate(read_json(path))
    except FileNotFoundError:
        return None
    except ValidationError as failure:
        first = failure.errors()[0]
        place = " ".join(".".join(map(str, first["loc"])).split())[:80]
        raise UserError(f"{path} is damaged ({place}{': ' * bool(place)}{first['msg']}); {remedy}") from None
    except (OSError, ValueError) as failure:
        raise UserError(f"{path} is damaged ({getattr(failure, 'strerror', None) or failure}); {remedy}") from None


def as_events(lines: Iterable[str]) -> tuple[list[Event], int]:
    """The events of lines that readers use, and how many lines are damaged."""
    events, damaged = [], 0
    for line in lines:
        try:
            events.append(EVENT.validate_json(line))
        except ValidationError as failure:
            # An event of another kind is for other readers.
            damaged += failure.errors()[0]["type"] != "union_tag_invalid"
    return events, damaged


def _lines(path: Path) -> list[str]:
    """The whole lines of a file that another process appends to, if it is there. UserError where it cannot be read."""
    try:
        whole = path.read_bytes().rpartition(b"\n")[0]
    except FileNotFoundError:
        return []
    except OSError as failure:
        raise UserError(f"cannot read {path}: {failure.strerror}; give the folder of a run") from None
    return whole.decode(errors="replace").split("\n") if whole else []
