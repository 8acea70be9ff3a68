"""Images per second of this project and of its peers, side by side: the tables of docs/benchmarks.md.

    python -m benchmarks.peers --data-dir D

All sides are started once and warmed up. Then they take turns: in each repeat, in an order drawn anew, one side runs
for --seconds while the others are stopped where they are. So a machine that grows slower or faster does so for all. A
side is timed by the lines of its metrics.jsonl, from the first one after it was woken to the last one of its turn.

With --hosts the ranks run on namespaces of this machine, each with a network card and its share of the cores. In its
turn a side runs for --seconds without a limit and on each --link, in an order drawn anew.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import keras

from benchmarks import jobs, nets, setting
from benchmarks.peers import network, sides
from benchmarks.peers.rates import spread, table
from benchmarks.peers.turns import Job, Turn
from hvd_cifar.errors import UserError
from hvd_cifar.models.recipe import momentum_sgd
from hvd_cifar.runtime.environment import prepare_tensorflow

BY_MODEL = "[default: float32; mixed_bfloat16 for fast]"
# Share of the cores that other programs may take. With more, sides whose ranks wait for each other lose most.
DISTURBED = 0.1
TORCH = "2.13.0"  # what docs/benchmarks.md names; builds differ in what follows a "+"
REQUIREMENTS = (f"torch=={TORCH}", "numpy>=2,<3")
ASK = "import json, numpy, torch; print(json.dumps({'torch': torch.__version__, 'numpy': numpy.__version__}))"
LOG_EVERY = {"resnet20": 5, "resnet32": 3, "resnet56": 2, "tutorial": 10, "fast": 1}  # steps, which take some seconds


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, default=Path("~/.cache/hvd_cifar/data"), help="Folder with binary CIFAR-10.")
@click.option("--model", type=click.Choice(list(LOG_EVERY)), default="resnet20")
@click.option("--precision", type=click.Choice(["float32", "mixed_bfloat16"]), help=BY_MODEL)
@click.option("--ranks", type=click.IntRange(1), default=2)
@click.option("--batch-size", type=click.IntRange(1), default=128, help="Of a rank; fast: 1,024 over all ranks.")
@click.option("--hosts", type=click.IntRange(1), default=1, help="More than one: namespaces of this machine, as root.")
@click.option(
    "--link",
    "links",
    multiple=True,
    help="Limit of each host's network, such as 100mbit; may be repeated; sides start with the last.",
)
@click.option("--repeats", type=click.IntRange(1), default=7)
@click.option("--seconds", type=click.FloatRange(1), default=8.0, help="Seconds of a side's turn.")
@click.option("--only", multiple=True, type=click.Choice(list(sides.SIDES)), help="Only these sides.")
@click.option("--base", type=click.Choice(list(sides.SIDES)), help="Reference of ratios. [default: the PyTorch side]")
@click.option("--environment", "peers", type=Path, default=Path("~/.cache/hvd_cifar/peers"), help="For PyTorch.")
@click.option("--keep", type=Path, help="Folder for the sides' output; without it it is removed.")
@click.option("--output", type=Path, help="JSON file for every single rate.")
@setting.one_line_for_users()
def main(**given: Any) -> None:
    """Measure, then print a table in Markdown."""
    jobs.end_on_signals()
    measure(SimpleNamespace(**given))


def chosen_of(options: Any) -> tuple[list[str], str]:
    """The sides to measure, and the reference. UserError where they do not fit the model or the batch."""
    able = sides.sides_of(options.model, options.hosts > 1)
    if unfit := [name for name in options.only if name not in able]:
        where = f"{options.model} over hosts" if options.hosts > 1 else options.model
        raise UserError(f"--only {unfit[0]}: it does not train {where}; give some of {', '.join(able)}")
    chosen = [name for name in able if not options.only or name in options.only]
    base = options.base or able[1]
    if base not in chosen:
        raise UserError(f"--base {base}: it is not among the sides that are measured; also name it in --only")
    recipe = nets.recipe_of(options.model).for_batch(options.ranks * options.batch_size)
    if options.model != "fast" and recipe.optimizer not in (keras.optimizers.SGD, momentum_sgd):
        raise UserError(
            f"{options.ranks} ranks of {options.batch_size} examples: {options.model} trains this batch with another "
            "optimizer than its peers; give fewer examples"
        )
    return chosen, base


def python_with_torch(folder: Path) -> Path:
    """The Python of an environment with this version of PyTorch, never this project's; made if there is none.

    pip's own settings say where packages come from, such as an index of builds without GPU support. UserError where it
    cannot be made.
    """
    if folder.resolve() == Path(sys.prefix).resolve():
        raise UserError(f"--environment {folder}: it is this project's own; give another folder")
    python = folder / "bin" / "python"
    if python.exists() and versions(python).get("torch", "").split("+")[0] == TORCH:
        return python
    click.echo(f"making an environment with {', '.join(REQUIREMENTS)} in {folder}", err=True)
    for words in ([sys.executable, "-m", "venv", str(folder)], [str(python), "-m", "pip", "install", *REQUIREMENTS]):
        if subprocess.run(words, stdout=sys.stderr).returncode:
            raise UserError(f"{' '.join(words)} failed: see above; or give another folder: --environment")
    return python


def versions(python: Path) -> dict[str, str]:
    """What an environment has, by name; nothing where it lacks PyTorch or NumPy."""
    found = subprocess.run([str(python), "-c", ASK], capture_output=True, text=True)
    return dict(json.loads(found.stdout)) if found.returncode == 0 else {}


def work_of(options: Any, data_dir: Path, python: Path | None, folder: Path) -> sides.Work:
    """What every side does. `python`: of the peers' environment, where a side needs it."""
    return sides.Work(
        model=options.model,
        precision=options.precision or ("mixed_bfloat16" if options.model == "fast" else "float32"),
        ranks=options.ranks,
        per_rank=sides.FAST_BATCH // options.ranks if options.model == "fast" else options.batch_size,
        threads=sides.threads_of(options.ranks),
        log_every=LOG_EVERY[options.model],
        data_dir=data_dir,
        peers_python=python or Path(sys.executable),
        folder=folder,
    )


def measure(options: Any) -> None:
    """See the module.

    Raises:
        UserError: where data or an environment is missing, or a side ends.
    """
    data_dir = setting.real_data(options.data_dir)
    if options.output and not options.output.absolute().parent.is_dir():
        raise UserError(f"--output {options.output}: no such folder; give a file in one that is there")
    prepare_tensorflow(os.environ)  # all sides inherit it
    network.check(options.hosts, options.ranks, options.links)
    links = tuple(dict.fromkeys([network.NO_LIMIT, *options.links]))
    chosen, base = chosen_of(options)
    python = python_with_torch(options.peers.expanduser().absolute()) if sides.DDP in chosen else None
    with ExitStack() as stack:
        folder = options.keep.absolute() if options.keep else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work = work_of(options, data_dir, python, folder)
        running = {name: _warm(name, work, options, links[-1], stack) for name in chosen}
        turns = _in_turns(running, links, options.repeats, options.seconds, random.Random(0))
    names = {name: job.side.name for name, job in running.items()}
    rates = {
        names[name]: {link: [turn.rate for turn in of_link] for link, of_link in of_side.items()}
        for name, of_side in turns.items()
    }
    others = spread([turn.others for of_side in turns.values() for of_link in of_side.values() for turn in of_link])
    bases = dict.fromkeys([base, sides.LIMIT] if sides.LIMIT in running and options.hosts == 1 else [base])
    print(table(rates, *(names[name] for name in bases)))
    if others.middle > DISTURBED:
        print(f"\nTHIS TABLE SAYS LITTLE: {others.middle:.0%} of the cores went to others")
    about = {
        "model": options.model,
        "precision": work.precision,
        "ranks": options.ranks,
        "hosts": options.hosts,
        "examples a rank and step": work.per_rank,
        "about": setting.about(**(versions(python) if python else {})),
        "share of the cores that went to others": str(others),
        "command": shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
    }
    print("\n" + "; ".join(f"{name}: {value}" for name, value in about.items()))
    if options.output:
        options.output.write_text(json.dumps({**about, "images_per_second": rates}, indent=2) + "\n")


def _warm(name: str, work: sides.Work, options: Any, link: str, stack: ExitStack) -> Job:
    """A side that has made its first steps and is stopped; `stack` ends it."""
    place = work.folder / name
    if place.exists():
        raise UserError(f"--keep {work.folder}: it holds an earlier measurement; give another folder")
    place.mkdir(parents=True)
    hosts = None
    if options.hosts > 1:
        hosts = stack.enter_context(network.pinned_hosts(options.hosts, place / "hosts"))
        network.limit(hosts, link)  # what a side measures at its start, such as buckets, holds for this link
    side = sides.SIDES[name](replace(work, hosts=tuple(hosts or ())))
    job = stack.enter_context(Job(side, place, jobs.CHECKOUT, hosts))
    job.take_turn(options.seconds)
    job.pause()
    click.echo(f"{side.name}: warm", err=True)
    return job


def _in_turns(
    running: dict[str, Job], links: tuple[str, ...], repeats: int, seconds: float, draw: random.Random
) -> dict[str, dict[str, list[Turn]]]:
    """The turns of each job on each link, one in each repeat."""
    turns: dict[str, dict[str, list[Turn]]] = {name: {link: [] for link in links} for name in running}
    for repeat in range(repeats):
        for name in draw.sample(list(running), len(running)):
            job = running[name]
            for link in draw.sample(links, len(links)):
                if job.hosts:
                    network.limit(job.hosts, link)
                job.wake()
                turns[name][link].append(job.take_turn(seconds))
                job.pause()
        last = {name: [f"{turns[-1].rate:.0f}" for turns in of_link.values()] for name, of_link in turns.items()}
        told = ", ".join(f"{name} {' '.join(rates)}" for name, rates in last.items())
        click.echo(f"repeat {repeat + 1} of {repeats}: {told} images/s", err=True)
    return turns


if __name__ == "__main__":
    main()
