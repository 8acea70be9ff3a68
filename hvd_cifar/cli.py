"""The command line: parse, then call one function. Every option is a field of a class in `config`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hvd_cifar import __version__, config
from hvd_cifar.errors import TrainingError, UserError, cause_of
from hvd_cifar.options import HELP_OF_TRAIN, GroupedCommand, launcher_option, option
from hvd_cifar.reporting import terminal
from hvd_cifar.reporting.quiet import quiet_start
from hvd_cifar.runtime.endings import no_early_success
from hvd_cifar.runtime.environment import launched_local_rank, launched_rank
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
    code = _run(argv, lambda work: checked.extend(work.args))
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
        terminal.complain(f"hvd_cifar: {line}")
        return code
    time.sleep(GRACE_SECONDS)
    if of_one_rank:
        if launched_local_rank():  # all ranks of this host may have it: the first one's exit ends the others
            time.sleep(GRACE_SECONDS)
        terminal.complain(f"hvd_cifar: rank {rank}: {line}")
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # Horovod's end in this process would end rank 0 first, and the job with rank 0's exit code
    return code


def _commands() -> click.Group:
    @click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
    @click.version_option(__version__)
    def commands() -> None:
        """Train image classifiers with TensorFlow and Horovod: one process (rank) per GPU or core."""

    _add(commands, "train", config.TrainSettings, _train, "Train a model; rank 0 writes the run directory.")
    _add(commands, "evaluate", config.EvaluateSettings, _evaluate, "Evaluate a checkpoint on the whole test set.")
    export_help = "Write a trained net as a SavedModel and a .keras file, which TensorFlow loads without this package."
    _add(commands, "export", config.ExportSettings, _export, export_help)
    classify_help = "Classify image files and folders of them with a trained net; exit code 2 if one cannot be read."
    _add(commands, "predict", config.PredictSettings, _predict, classify_help)

    report_help = "Write a page (HTML) about runs: what ran, curves, where the time went, what happened, mistakes."
    _add(commands, "report", config.ReportSettings, _report, report_help)
    _add(commands, "watch", config.WatchSettings, _watch, "Show a run that somebody else started, until it ends.")

    @commands.group()
    def benchmark() -> None:
        """Measure the training step and the all-reduce on this machine or cluster."""

    step_help = "Measure the training step on 1 to N ranks: speed, parts of its time, scaling efficiency."
    _add(benchmark, "step", config.BenchmarkStepSettings, _benchmark_step, step_help)
    allreduce_help = "Measure all-reduces of many sizes, through Horovod and through MPI: time and bandwidth."
    _add(benchmark, "allreduce", config.BenchmarkAllreduceSettings, _benchmark_allreduce, allreduce_help)

    doctor_help = "Check all hosts at once for the usual faults, and run a small job; exit code 1 if a run would fail."
    _add(commands, "doctor", config.DoctorSettings, _doctor, doctor_help)
    _add(commands, "validate", config.ValidateSettings, _validate, "Evaluate beside a run.", hidden=True)
    _add(commands, "doctor-job", config.DoctorJobSettings, _doctor_job, "The doctor's small job.", hidden=True)
    return commands


def _add(
    group: click.Group,
    name: str,
    kind: type[config.S],
    function: Callable[[config.S], None],
    help_text: str,
    hidden: bool = False,
) -> None:
    """Add a command whose options are the fields of `kind`. Parsing returns the call to make, with checked settings."""

    def parse(**given: Any) -> functools.partial[None]:
        file = given.pop("config", None)
        if file == "":  # an unset variable of a shell
            raise UserError("--config: the path is empty; give a file, or leave the option out")
        chosen = {field: value for field, value in given.items() if value not in (None, ())}
        try:
            values = config.read_file(Path(file), has_batch=not chosen.keys().isdisjoint(config.BATCH)) if file else {}
            settings = config.make(kind, {**values, **chosen})
        except UserError as error:
            error.of_one_rank = bool(file)  # another host may have another file
            raise
        return functools.partial(function, settings)

    options: list[click.Parameter] = [option(field, info) for field, info in kind.model_fields.items()]
    file_help = "YAML or JSON file of settings; options take precedence over it."
    options.append(click.Option(["--config"], metavar="FILE", help=file_help))
    if kind is config.TrainSettings:
        group.add_command(GroupedCommand(name, HELP_OF_TRAIN, params=options, callback=parse, help=help_text))
    else:
        group.add_command(click.Command(name, params=options, callback=parse, help=help_text, hidden=hidden))


def _train(settings: config.TrainSettings) -> None:
    with resumable(), no_early_success(launched_rank() or 0):
        with quiet_start():
            from hvd_cifar.training.train import train
        train(settings)


def _evaluate(settings: config.EvaluateSettings) -> None:
    with quiet_start():
        from hvd_cifar.training.evaluate_command import evaluate_run
    evaluate_run(settings)


def _export(settings: config.ExportSettings) -> None:
    with quiet_start():
        from hvd_cifar.tools.export import export
    export(settings)


def _predict(settings: config.PredictSettings) -> None:
    with quiet_start():
        from hvd_cifar.tools.predict import predict
    if predict(settings):
        sys.exit(USER_ERROR)


def _report(settings: config.ReportSettings) -> None:
    from hvd_cifar.tools.report.command import report

    report(settings)


def _watch(settings: config.WatchSettings) -> None:
    from hvd_cifar.tools.watch import watch

    watch(settings)


def _validate(settings: config.ValidateSettings) -> None:
    with quiet_start():
        from hvd_cifar.training.validate_command import validate_run
    validate_run(settings)


def _benchmark_step(settings: config.BenchmarkStepSettings) -> None:
    with quiet_start():
        from hvd_cifar.tools.benchmark.commands import benchmark_step
    benchmark_step(settings)


def _benchmark_allreduce(settings: config.BenchmarkAllreduceSettings) -> None:
    with quiet_start():
        from hvd_cifar.tools.benchmark.commands import benchmark_allreduce
    benchmark_allreduce(settings)


def _doctor(settings: config.DoctorSettings) -> None:
    from hvd_cifar.tools.doctor.command import examine

    examine(settings)


def _doctor_job(settings: config.DoctorJobSettings) -> None:
    with quiet_start():
        from hvd_cifar.tools.doctor.ranks import run
    run(settings)
