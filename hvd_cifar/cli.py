"""The command line: parse, then call one function. Every option is a field of a class in `config`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from hvd_cifar import __version__, config, use_settings
from hvd_cifar.errors import TrainingError, UserError, cause_of
from hvd_cifar.fields import Settings
from hvd_cifar.files import complain
from hvd_cifar.options import HELP_OF_TRAIN, GroupedCommand, launcher_option, option
from hvd_cifar.reporting import terminal
from hvd_cifar.reporting.quiet import quiet_start
from hvd_cifar.runtime.environment import launched_local_rank, launched_rank
from hvd_cifar.settings_file import read_file
from hvd_cifar.tools import settings as tools
from hvd_cifar.training.preemption import resumable

USER_ERROR = 2
GRACE_SECONDS = 5.0  # the launcher ends rank 0 when another rank exits: time for rank 0 to print the error


def main(argv: list[str] | None = None) -> None:
    """Run a command and end the process. Exit codes: docs/reliability.md."""
    terminal.open_streams()
    sys.exit(_run(sys.argv[1:] if argv is None else argv, lambda work: work()))


def check(argv: list[str]) -> Any:
    """Parse a command line without running it, and return its settings. An error ends the process with code 2.

    The launcher calls it before it starts any rank. Where help is asked for, it prints help and exits with code 0.
    """
    checked: list[Any] = []
    code = _run(argv, lambda work: checked.append(work.args[-1]))
    return checked[0] if checked else sys.exit(code)


def _run(argv: list[str], use: Callable[[functools.partial[None]], Any]) -> int:
    """Parse a command line, pass the call that it asks for to `use`, and return the exit code."""
    try:
        work = _commands().main(argv, prog_name="hvd_cifar", standalone_mode=False)
        if not callable(work):  # click has printed help or the version, and returns its exit code
            return int(work or 0)
        use(work)
        return 0
    except click.exceptions.NoArgsIsHelpError as error:
        return _complain_once(f"give a command: {_choices_of(error)} (see --help)", USER_ERROR)
    except click.NoSuchOption as error:
        if name := launcher_option(error.option_name):
            where = f"it goes before the command: ./run.sh {name} ... {argv[0]}"
            return _complain_once(f"{name} is an option of the launcher; {where}", USER_ERROR)
        return _complain_once(f"{error.format_message().rstrip('.')} (see --help)", USER_ERROR)
    except click.ClickException as error:
        return _complain_once(f"{error.format_message().rstrip('.')} (see --help)", USER_ERROR)
    except UserError as error:
        return _complain_once(str(error), USER_ERROR, error.of_one_rank)
    except TrainingError as error:
        return _complain_once(str(error), error.code, error.of_one_rank)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except SystemExit as left:
        if left.code:
            raise
        return _complain_once(f"the command did not come to its end: {cause_of(left)}", TrainingError.code)


def _choices_of(error: click.exceptions.NoArgsIsHelpError) -> str:
    """The commands to choose from where none is given, as typed."""
    group = error.ctx.command if error.ctx else None
    assert error.ctx and isinstance(group, click.Group), "only a group asks for a command"
    path = error.ctx.command_path.split()[1:]
    names = [name for name in group.list_commands(error.ctx) if not group.commands[name].hidden]
    *others, last = (" ".join([*path, name]) for name in names)
    return f"{', '.join(others)} or {last}"


def _complain_once(message: str, code: int, of_one_rank: bool = False) -> int:
    """Print the error once: on rank 0, or on this rank if it is perhaps the only one that has it.

    Other ranks wait first, since the launcher ends rank 0 when one of them exits. When rank 0 exits, it ends them.
    """
    rank, line = launched_rank(), " ".join(message.split())
    if not rank:
        complain(line)
        return code
    time.sleep(GRACE_SECONDS)
    if of_one_rank:
        if launched_local_rank():  # all ranks of this host may have it: the first one's exit ends the others
            time.sleep(GRACE_SECONDS)
        complain(f"rank {rank}: {line}")
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # Horovod's end in this process would end rank 0 first, and the job with rank 0's exit code
    return code


# Name, settings, the function that runs with them, and help. Commands without help are for this program's own use.
# A function that needs TensorFlow is imported in silence: TensorFlow logs notes while it is imported.
COMMANDS: tuple[tuple[str, type[Settings], str, str], ...] = (
    ("train", config.TrainSettings, "training.train:train", "Train a model; rank 0 writes the run directory."),
    (
        "evaluate",
        use_settings.EvaluateSettings,
        "training.evaluate_command:evaluate_run",
        "Evaluate a checkpoint on the whole test set.",
    ),
    (
        "export",
        use_settings.ExportSettings,
        "tools.export:export",
        "Write a trained net as a SavedModel and a .keras file, which TensorFlow loads without this package.",
    ),
    (
        "predict",
        use_settings.PredictSettings,
        "tools.predict:predict",
        "Classify image files and folders of them with a trained net; exit code 2 if one cannot be read.",
    ),
    (
        "report",
        tools.ReportSettings,
        "tools.report.command:report",
        "Write a page (HTML) about runs: what ran, curves, where the time went, what happened, mistakes.",
    ),
    (
        "benchmark step",
        tools.BenchmarkStepSettings,
        "tools.benchmark.step:benchmark_step",
        "Measure the training step: speed, parts of its time, scaling efficiency.",
    ),
    (
        "benchmark allreduce",
        tools.BenchmarkAllreduceSettings,
        "tools.benchmark.allreduce:benchmark_allreduce",
        "Measure Horovod's all-reduces of many sizes: time, bandwidth, right sums.",
    ),
    (
        "doctor",
        tools.DoctorSettings,
        "tools.doctor.command:examine",
        "Check all hosts at once for the usual faults, and run a small job; exit code 1 if a run would fail.",
    ),
    ("validate", use_settings.ValidateSettings, "training.validate_command:validate_run", ""),
    ("doctor-job", tools.DoctorJobSettings, "tools.doctor.job:run_rank", ""),
)
WITHOUT_TENSORFLOW = ("report", "doctor")


def _commands() -> click.Group:
    @click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
    @click.version_option(__version__)
    def commands() -> None:
        """Train image classifiers with TensorFlow and Horovod: one process (rank) per GPU or core."""

    @commands.group()
    def benchmark() -> None:
        """Measure the training step and the all-reduce on this machine or cluster."""

    for name, kind, place, help_text in COMMANDS:
        group, word = (benchmark, name.split()[1]) if " " in name else (commands, name)
        group.add_command(_command(word, kind, functools.partial(_call, name, place), help_text))
    return commands


def _command(name: str, kind: type[Settings], function: Callable[[Settings], None], help_text: str) -> click.Command:
    """A command whose options are the fields of `kind`. Parsing returns the call to make, with checked settings."""

    def parse(**given: Any) -> functools.partial[None]:
        file = given.pop("config", None)
        if file == "":  # an unset variable of a shell
            raise UserError("--config: the path is empty; give a file, or leave the option out")
        chosen = {field: value for field, value in given.items() if value not in (None, ())}
        try:
            values = read_file(Path(file), has_batch=not chosen.keys().isdisjoint(config.BATCH)) if file else {}
            settings = config.make(kind, {**values, **chosen})
        except UserError as error:
            error.of_one_rank = bool(file)  # another host may have another file
            raise
        return functools.partial(function, settings)

    options: list[click.Parameter] = [option(field, info) for field, info in kind.model_fields.items()]
    file_help = "YAML or JSON file of settings; options take precedence over it."
    options.append(click.Option(["--config"], metavar="FILE", help=file_help))
    if kind is config.TrainSettings:
        return GroupedCommand(name, HELP_OF_TRAIN, params=options, callback=parse, help=help_text)
    return click.Command(name, params=options, callback=parse, help=help_text, hidden=not help_text)


def _call(name: str, place: str, settings: Settings) -> None:
    """Run a command. An image that `predict` cannot read ends the process with exit code 2."""
    module, _, function = place.partition(":")
    with resumable() if name == "train" else contextlib.nullcontext():
        with contextlib.nullcontext() if name in WITHOUT_TENSORFLOW else quiet_start():
            run = getattr(import_module(f"{__package__}.{module}"), function)
        has_failed = run(settings)
    if name == "predict" and has_failed:
        sys.exit(USER_ERROR)
