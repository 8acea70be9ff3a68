"""All that a GPU should measure, in one command of at most 8 minutes.

    python -m benchmarks.gpu --data-dir D --output FOLDER            # again: goes on with what is missing
    python -m benchmarks.gpu --data-dir D --output FOLDER --small    # on a CPU, in a minute: whether it would run

Each part has a time limit, which is longer where fewer parts are missing, and writes its file in FOLDER at once;
FOLDER/table.md has all of them; a file that is removed is measured again. Parts: the tests of
`tests/launch/test_on_gpu.py`; `fast` to its end, beside airbench94; the kernels of one step; and for three nets, two
batches and two precisions the step of `train` and PyTorch's, in turns on the same GPU, with their memory, and the input
pipeline alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click

from benchmarks import jobs, setting
from benchmarks.gpu import steps
from benchmarks.gpu.steps import OF_TORCH, PRODUCT, Case
from hvd_cifar.errors import UserError
from hvd_cifar.files import replace_text
from hvd_cifar.runtime.devices import list_gpus

SECONDS = 480.0  # of a call
SECONDS_FOR_STEPS = 250.0  # of these at least


@dataclass(frozen=True)
class Command:
    """A program that is run to its end.

    words: {data}, {folder}, {torch} and {python} in them are filled in. file: with its result, JSON or text; "": the
    last line that it prints. keys: of the JSON file, what is shown.
    """

    name: str
    words: Sequence[str]
    seconds: float
    file: str = ""
    keys: Sequence[str] = ()

    def run(self, places: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Its exit code and its result."""
        folder: Path = places["folder"]
        log = folder / f"{self.name}.log"
        job = jobs.start([word.format(**places) for word in self.words], log)
        try:
            code: int | str = job.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"no end within {seconds:.0f} s"
        finally:
            jobs.kill(job)
        path = folder / self.file if self.file else log
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        said: Any = "\n".join(lines) if self.file else "".join(lines[-1:])
        if self.keys and code == 0:
            values = json.loads(said)
            said = ", ".join(f"{key} {values[key]}" for key in self.keys)
        return {"code": code, "result": said if code == 0 or not self.file else ""}


def commands(small: bool, has_torch: bool) -> list[Command]:
    """All programs, in their order."""
    net = ("resnet8", "float32", "4") if small else ("resnet20", "float32", "128")
    words = ["{python}", "-m", "benchmarks.gpu.tensorflow_side"]
    words += [word for pair in zip(("--model", "--precision", "--batch-size"), net, strict=True) for word in pair]
    words += ["--profile", PRODUCT, "--output", "{folder}/kernels.md"]
    kernels = Command("kernels", words, 30, "kernels.md")
    if small:
        return [kernels]
    tests = ("{python}", "-m", "pytest", "-q", "-n", "6", "-p", "no:cacheprovider", "tests/launch/test_on_gpu.py")
    train = ["{python}", "-m", "hvd_cifar", "train", "--model", "fast", "--dataset", "cifar10"]
    train += ["--data-dir", "{data}", "--run-dir", "{folder}/fast", "--quiet"]
    keys = ("test_accuracy", "test_accuracy_of_one_view", "training_seconds")
    airbench = ("{torch}", "-m", "benchmarks.peers.airbench", "--data-dir", "{data}", "--device", "cuda")
    found = [Command("tests", tests, 100), Command("fast", train, 60, "fast/summary.json", keys)]
    return [*found, *[Command("airbench94", airbench, 40)] * has_torch, kernels]


def cases(small: bool) -> list[Case]:
    """The steps that are measured, in their order."""
    if small:
        return [Case("resnet8", "float32", 4, of_torch=OF_TORCH[:1])]
    every = product((128, 1024), ("float32", "mixed_bfloat16"), ("resnet20", "tutorial", "fast"))
    return [Case(model, precision, examples) for examples, precision, model in every]


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, required=True, help="Folder with binary CIFAR-10.")
@click.option("--output", type=Path, required=True, help="Folder for the results.")
@click.option("--torch", type=Path, default=Path("~/.cache/hvd_cifar/peers/bin/python"), help="Python with PyTorch.")
@click.option("--small", is_flag=True, help="A small form, also on a CPU.")
@setting.one_line_for_users()
def main(data_dir: Path, output: Path, torch: Path, small: bool) -> None:
    """Measure what is missing, and print the tables."""
    until = time.monotonic() + SECONDS
    jobs.end_on_signals()
    gpu = re.search(r"GPU 0: (.*?) \(UUID", list_gpus())
    if not small and not gpu:
        raise UserError("nvidia-smi lists no GPU here; --small tries the command on a CPU")
    data = data_dir.absolute() if small else setting.real_data(data_dir)
    output.mkdir(parents=True, exist_ok=True)
    folder, torch = output.absolute(), torch.expanduser().absolute()
    if not (has_torch := torch.exists()):
        click.echo(f"--torch {torch}: there is none, so PyTorch is left out", err=True)
    every, of_steps = commands(small, has_torch), cases(small)

    def known(command: Command) -> dict[str, Any]:
        path = folder / f"{command.name}.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def write_table() -> None:
        texts = [f"{gpu[1] if gpu else 'no GPU'}; {setting.about()}"]
        texts += [f"{c.name}, exit code {(k := known(c)).get('code', '-')}: {k.get('result', '')}" for c in every]
        texts += [case.table(case.read(folder)) for case in of_steps]
        replace_text(folder / "table.md", "\n\n".join(texts) + "\n")

    is_missing = any(case.missing(case.read(folder), has_torch) for case in of_steps)
    missing = [command for command in every if known(command).get("code") != 0]
    while missing:
        command, *missing = missing
        later = sum(other.seconds for other in missing) + SECONDS_FOR_STEPS * is_missing
        places = {"data": data, "folder": folder, "torch": torch, "python": sys.executable}
        found = command.run(places, max(command.seconds, until - time.monotonic() - later))
        replace_text(folder / f"{command.name}.json", json.dumps(found, indent=1) + "\n")
        click.echo(f"{command.name}: {found['code']}; {until - time.monotonic():.0f} s are left", err=True)
        write_table()
    if is_missing:
        steps.measure(of_steps, folder, torch if has_torch else None, until - time.monotonic())
    write_table()
    click.echo((folder / "table.md").read_text())
    left = [case.name for case in of_steps if case.missing(case.read(folder), has_torch)]
    left += [command.name for command in every if known(command).get("code") != 0]
    if left:
        click.echo(f"not whole yet: {', '.join(left)}; the same command goes on with them", err=True)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
