"""The step of one net, its input pipeline and PyTorch's steps, in turns on the same device."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import jobs
from benchmarks.gpu.serve import LOCK, SILENCE, Side
from benchmarks.peers.rates import paired, spread
from hvd_cifar.files import replace_text

PRODUCT, PIPELINE, TORCH = "hvd_cifar", "input pipeline", "PyTorch, "
# In the order in which they are built: where the time ends, the last ones wait for the next call.
OF_TORCH = tuple(TORCH + form for form in ("eager", "compile", "CUDA graph", "compile and CUDA graph"))
ROUNDS = 3  # turns of each form
LEAST_SECONDS = 0.12  # of a turn
SHARE_TO_BUILD = 0.55  # of the time; what is not built then waits for the next call
SHARE_OF_FORM = 0.3  # of the time, to build one form beside others


@dataclass
class Found:
    """What is known of a case, as in its file. rounds: of each, seconds of a step by form."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def seconds(self, form: str) -> list[float]:
        """Of a form's steps, by turn."""
        return [each[form] for each in self.rounds if form in each]


@dataclass(frozen=True)
class Case:
    """A net, its precision, and the images of a step."""

    model: str
    precision: str
    examples: int
    forms: Sequence[str] = (PIPELINE,)
    of_torch: Sequence[str] = OF_TORCH

    @property
    def name(self) -> str:
        """Of its file."""
        return f"steps-{self.model}-{self.precision}-{self.examples}"

    def read(self, folder: Path) -> Found:
        """What earlier calls have measured."""
        path = folder / f"{self.name}.json"
        return Found(**json.loads(path.read_text())) if path.exists() else Found()

    def write(self, folder: Path, found: Found) -> None:
        """Write all that is known."""
        replace_text(folder / f"{self.name}.json", json.dumps(vars(found), indent=1) + "\n")

    def missing(self, found: Found, has_torch: bool) -> list[str]:
        """The forms that have not had all their turns."""
        every = [PRODUCT, *self.forms, *(self.of_torch if has_torch else ())]
        failed = {form for form, error in found.errors.items() if not error.startswith(SILENCE)}
        return [form for form in every if form not in failed and len(found.seconds(form)) < ROUNDS]

    def table(self, found: Found) -> str:
        """In Markdown."""
        lines = [f"{self.model}, {self.precision}, {self.examples} images", ""]
        lines += ["| form | ms a step: median (quartiles) | of hvd_cifar's | MiB | n |", "|---|---|---|---|---|"]
        for form in (PRODUCT, *self.forms, *self.of_torch):
            seconds = found.seconds(form)
            if not seconds:
                lines.append(f"| {form} | {found.errors.get(form, 'not measured yet')} | | | 0 |")
                continue
            both = [(each[form], each[PRODUCT]) for each in found.rounds if {form, PRODUCT} <= each.keys()]
            ratio = spread(paired(*zip(*both, strict=True))) if both else "-"
            cells = [str(spread([1e3 * s for s in seconds])), str(ratio), f"{found.bytes.get(form, 0) / 2**20:.0f}"]
            lines.append(f"| {form} | {' | '.join(cells)} | {len(seconds)} |")
        return "\n".join(lines)


@dataclass
class _Running:
    """A case while it is measured: the processes of its forms, and the steps of a turn by form."""

    case: Case
    found: Found
    sides: dict[str, Side]
    seconds: float  # for the answer to a question
    steps: dict[str, int] = field(default_factory=dict)

    def ask(self, form: str, steps: int) -> float | None:
        """Seconds of a step; None where the form fails here, which is noted."""
        answer: dict[str, Any] = self.sides[form].ask(form, steps, self.seconds)
        if "error" in answer:
            self.found.errors[form] = answer["error"]
            self.steps.pop(form, None)
            return None
        self.found.errors.pop(form, None)
        if "bytes" in answer:
            self.found.bytes[form] = answer["bytes"]
        return float(answer["seconds"])

    def build(self, side: Side, until: float) -> None:
        """Build a process's forms, one after the other; the last one begins before `until`."""
        for form in [form for form, of in self.sides.items() if of is side]:
            if time.monotonic() < until and (seconds := self.ask(form, 4)) is not None:
                self.steps[form] = max(4, int(LEAST_SECONDS / seconds))

    def take_turns(self, until: float, draw: random.Random, folder: Path) -> None:
        """Measure the forms that are built, each once a round, in an order drawn anew."""
        for _ in range(ROUNDS):
            if time.monotonic() > until or PRODUCT not in self.steps:
                return
            order = draw.sample(list(self.steps), len(self.steps))
            taken = {form: self.ask(form, self.steps[form]) for form in order}
            self.found.rounds.append({form: seconds for form, seconds in taken.items() if seconds is not None})
            self.case.write(folder, self.found)


def measure(cases: Sequence[Case], folder: Path, torch: Path | None, seconds: float, seed: int = 0) -> None:
    """Measure what is missing of all cases, in about `seconds`, and write each case's file.

    First all forms are built, as many processes at a time as there are cores; a build is not timed. Then nothing else
    runs, and one case after the other takes its turns.

    Args:
        torch: a Python that has PyTorch, or None.
    """
    now, environment = time.monotonic(), {**jobs.environment(), LOCK: str(folder / "lock")}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, ExitStack() as stack:
        running: list[_Running] = []
        for case in cases:
            found = case.read(folder)
            if not (missing := case.missing(found, torch is not None)):
                continue
            words = ["--model", case.model, "--precision", case.precision, "--batch-size", str(case.examples)]
            programs: list[tuple[Any, str, Sequence[str]]] = [(sys.executable, "tensorflow_side", case.forms)]
            programs += [(torch, "torch_side", case.of_torch)] if torch else []
            sides: dict[str, Side] = {}
            for python, module, forms in programs:
                command, log = [str(python), "-m", f"benchmarks.gpu.{module}", *words], f"{case.name}-{module}.log"
                of = stack.enter_context(Side(command, folder / log, jobs.CHECKOUT, environment))
                own = [] if sides else [PRODUCT]
                sides |= {form: of for form in (*own, *forms) if form in (*own, *missing)}
            running.append(_Running(case, found, sides, SHARE_OF_FORM * seconds))
        built = now + SHARE_TO_BUILD * seconds
        jobs_of = [pool.submit(one.build, of, built) for one in running for of in dict.fromkeys(one.sides.values())]
        for job in jobs_of:
            job.result()
        for one in running:
            one.take_turns(now + seconds, random.Random(seed), folder)
            one.case.write(folder, one.found)
