"""All that a GPU should measure, in one command of at most 8 minutes.

    python -m benchmarks.gpu --data-dir D --output FOLDER            # again: goes on with the parts that are missing
    python -m benchmarks.gpu --data-dir D --output FOLDER --small    # on a CPU, in a minute: whether it would run

Each part has a time limit and writes its file in FOLDER at once; FOLDER/table.md has all of them. Parts: the tests of
`tests/launch/test_on_gpu.py`; the step of `train`, its other forms (`benchmarks.gpu.variants`) and PyTorch's, in turns
on the same GPU, with their memory; the kernels of one step; the input pipeline; `fast` to its end, beside airbench94.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks import jobs, setting
from benchmarks.gpu.serve import Side
from benchmarks.peers.rates import paired, spread
from hvd_cifar.errors import UserError
from hvd_cifar.files import replace_text
from hvd_cifar.runtime.devices import list_gpus

PRODUCT, TORCH = "hvd_cifar", "PyTorch, "
# In the order in which they are measured first: where the time ends, the last ones are missing.
FORMS: tuple[str, ...] = ("all", "xla", "one buffer", "NHWC throughout", "flat update", "4 steps a call")
FORMS += ("no layout optimizer", "NHWC batch norm", "constant rate", "one square", "no switch")
OF_TORCH = tuple(TORCH + form for form in ("eager", "compile", "CUDA graph", "compile and CUDA graph"))
LEAST_SECONDS = 0.3  # of a turn


@dataclass(frozen=True)
class Options:
    """Those of the command. torch: a Python that has PyTorch, or None."""

    data_dir: Path
    output: Path
    torch: Path | None
    small: bool
    seed: int = 0


@dataclass(frozen=True)
class Steps:
    """Forms of the step of one net, in turns."""

    model: str
    precision: str
    examples: int
    seconds: float
    forms: Sequence[str] = FORMS
    of_torch: Sequence[str] = OF_TORCH

    @property
    def name(self) -> str:
        """Of the part's file."""
        return f"steps-{self.model}-{self.precision}-{self.examples}"

    def run(self, options: Options) -> dict[str, Any]:
        """Seconds of a step by form and repeat, the peak memory of each, and what failed."""
        words = ["--model", self.model, "--precision", self.precision, "--batch-size", str(self.examples)]
        until = time.monotonic() + self.seconds
        found: dict[str, list[float]] = {}
        told: dict[str, dict[str, Any]] = {}
        with ExitStack() as stack:

            def side(python: Path | str, module: str) -> Side:
                log = options.output / f"{self.name}-{module}.log"
                command = [str(python), "-m", f"benchmarks.gpu.{module}", *words]
                return stack.enter_context(Side(command, log, jobs.CHECKOUT, jobs.environment()))

            sides = dict.fromkeys([PRODUCT, *self.forms], side(sys.executable, "tensorflow_side"))
            if options.torch:
                sides |= dict.fromkeys(self.of_torch, side(options.torch, "torch_side"))
            order = sorted(sides, key=lambda name: name not in (PRODUCT, OF_TORCH[0]))  # these two come first
            draw, rounds, steps = random.Random(options.seed), 0, dict.fromkeys(sides, 4)
            while order and time.monotonic() < until and rounds < (3 if options.small else 9):
                for name in order:
                    answer = sides[name].ask(name, steps[name], until - time.monotonic())
                    if "seconds" in answer and rounds:
                        found.setdefault(name, []).append(answer["seconds"])
                    told[name] = {
                        **told.get(name, {}),
                        **(answer or {"error": "no answer in time, or its log says why"}),
                    }
                    if "seconds" in answer and not options.small:
                        steps[name] = 4 * max(1, int(LEAST_SECONDS / answer["seconds"] / 4))  # whole calls of 4 steps
                order = draw.sample(kept := [name for name in order if "error" not in told[name]], len(kept))
                rounds += 1
        return {"seconds": found, "answers": told, "complete": PRODUCT in found}

    def table(self, result: dict[str, Any]) -> str:
        """In Markdown."""
        lines = [f"{self.model}, {self.precision}, {self.examples} images", ""]
        lines += ["| form | ms a step: median (quartiles) | of hvd_cifar's | MiB | n |", "|---|---|---|---|---|"]
        base = result["seconds"].get(PRODUCT, [])
        for name, answer in result["answers"].items():
            seconds = result["seconds"].get(name)
            if not seconds:
                lines.append(f"| {name} | {answer.get('error', 'not reached in time')} | | | 0 |")
                continue
            many = min(len(seconds), len(base))
            ratio = spread(paired(seconds[:many], base[:many])) if many else "-"
            peak = answer.get("peak_bytes", 0) / 2**20
            lines.append(f"| {name} | {spread([1e3 * s for s in seconds])} | {ratio} | {peak:.0f} | {len(seconds)} |")
        return "\n".join(lines)


@dataclass(frozen=True)
class Command:
    """A program that is run to its end; {data}, {folder} and {torch} in its words are filled in."""

    name: str
    words: Sequence[str]
    seconds: float
    file: str = ""  # with its result, JSON or text; "": the last line that it prints
    keys: Sequence[str] = ()

    def run(self, options: Options) -> dict[str, Any]:
        """Its exit code and its result."""
        filled = {"data": options.data_dir, "folder": options.output, "torch": options.torch, "python": sys.executable}
        words = [word.format(**filled) for word in self.words]
        log = options.output / f"{self.name}.log"
        job = jobs.start(words, log)
        try:
            code: int | str = job.wait(self.seconds)
        except subprocess.TimeoutExpired:
            code = f"no end within {self.seconds:.0f} s"
        finally:
            jobs.kill(job)
        path = options.output / self.file.format(**filled) if self.file else log
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        said: Any = "\n".join(lines) if self.file else "".join(lines[-1:])
        if self.keys and code == 0:
            values = json.loads(said)
            said = ", ".join(f"{key} {values[key]}" for key in self.keys)
        return {"code": code, "result": said if code == 0 or not self.file else "", "complete": code == 0}

    def table(self, result: dict[str, Any]) -> str:
        """In words."""
        return f"{self.name}, exit code {result['code']}: {result['result']}"


def parts(options: Options) -> list[Steps | Command]:
    """All parts in their order; their limits come to less than 8 minutes."""
    side = ("{python}", "-m", "benchmarks.gpu.tensorflow_side")

    def kernels(model: str, precision: str, examples: int, form: str, seconds: float) -> Command:
        file = f"kernels-{model}-{form.replace(' ', '-')}.md"
        words = [*side, "--model", model, "--precision", precision, "--batch-size", str(examples)]
        words += ["--profile", form, "--output", f"{{folder}}/{file}"]
        return Command(file.removesuffix(".md"), words, seconds, file)

    if options.small:
        small = Steps("resnet8", "float32", 4, 300, ("all", "one buffer"), OF_TORCH[:1])
        return [small, kernels("resnet8", "float32", 4, PRODUCT, 120)]
    full = [("resnet20", "float32", 128, 70), ("fast", "mixed_bfloat16", 1024, 50), ("tutorial", "float32", 128, 40)]
    found: list[Steps | Command] = [Steps(*each) for each in full]
    tests = ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/launch/test_on_gpu.py")
    found.insert(1, Command("tests", tests, 75))
    train = ["{python}", "-m", "hvd_cifar", "train", "--model", "fast", "--dataset", "cifar10"]
    train += ["--data-dir", "{data}", "--run-dir", "{folder}/fast", "--resume", "never", "--quiet"]
    keys = ("test_accuracy", "test_accuracy_of_one_view", "training_seconds")
    found.append(Command("fast", train, 45, "fast/summary.json", keys))
    airbench = ("{torch}", "-m", "benchmarks.peers.airbench", "--data-dir", "{data}", "--device", "cuda")
    found += [Command("airbench94", airbench, 30)] * bool(options.torch)
    found.append(kernels("resnet20", "float32", 128, PRODUCT, 20))
    step = ["mpirun", "-q", "-np", "1", "{python}", "-m", "hvd_cifar", "benchmark", "step", "--model", "resnet20"]
    step += ["--dataset", "cifar10", "--data-dir", "{data}", "--repeats", "3", "--json", "{folder}/step.json"]
    found.append(Command("input", step, 30))
    short = Steps("", "", 0, 13, FORMS[:2], (OF_TORCH[0], OF_TORCH[3]))
    for examples in (128, 1024):
        for precision in ("float32", "mixed_bfloat16"):
            for model in ("resnet20", "tutorial", "fast"):
                if (model, precision, examples) not in [each[:3] for each in full]:
                    found.append(replace(short, model=model, precision=precision, examples=examples))
    return found


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, required=True, help="Folder with binary CIFAR-10.")
@click.option("--output", type=Path, required=True, help="Folder for the results.")
@click.option("--torch", type=Path, default=Path("~/.cache/hvd_cifar/peers/bin/python"), help="Python with PyTorch.")
@click.option("--small", is_flag=True, help="A small form, also on a CPU.")
@click.option("--only", default="", help="Only parts whose name contains this.")
@setting.one_line_for_users()
def main(data_dir: Path, output: Path, torch: Path, small: bool, only: str) -> None:
    """Measure what is missing, and print the tables."""
    jobs.end_on_signals()
    if not small and not list_gpus():
        raise UserError("nvidia-smi lists no GPU here; --small tries the command on a CPU")
    data = data_dir.absolute() if small else setting.real_data(data_dir)
    torch = torch.expanduser().absolute()
    output.mkdir(parents=True, exist_ok=True)
    options = Options(data, output.absolute(), torch if torch.exists() else None, small)
    if options.torch is None:
        click.echo(f"--torch {torch}: there is none, so PyTorch is left out", err=True)
    texts, began = [], time.monotonic()
    for part in parts(options):
        path = output / f"{part.name}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        if not known.get("complete") and only in part.name:
            known = part.run(options)
            replace_text(path, json.dumps(known, indent=1) + "\n")
            click.echo(f"{part.name}: {time.monotonic() - began:.0f} s", err=True)
        texts.append(part.table(known) if known else f"{part.name}: not measured")
        gpu = re.search(r"GPU 0: (.*?) \(UUID", list_gpus())
        about = f"{gpu[1] if gpu else 'no GPU'}; {setting.about()}"
        replace_text(output / "table.md", "\n\n".join([about, *texts]) + "\n")
    click.echo((output / "table.md").read_text())


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
