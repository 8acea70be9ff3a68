"""The command line: parse, then call one function. Every option is a field of a class in `config`."""

from __future__ import annotations

import contextlib
import functools
import os
import pkgutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hvd_cifar import __version__, config
from hvd_cifar.errors import TrainingError, UserError, cause_of
from hvd_cifar.fields import Settings, options_of, read_file
from hvd_cifar.files import complain
from hvd_cifar.launch.settings import launcher_option
from hvd_cifar.reporting import terminal
from hvd_cifar.reporting.quiet import quiet_start
from hvd_cifar.runtime.environment import launched_local_rank, launched_rank
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
        assert error.ctx, "a group asks for a command"
        return _complain_once(f"give a command (see {error.ctx.command_path} --help)", USER_ERROR)
    except click.ClickException as error:
        name = launcher_option(error.option_name) if isinstance(error, click.NoSuchOption) else None
        if name:
            where = f"it goes before the command: ./run.sh {name} ... {argv[0]}"
            return _complain_once(f"{name} is an option of the launcher; {where}", USER_ERROR)
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


# Name, settings, and the function that runs with them. The docstring of the settings is the command's help. A function
# that needs TensorFlow is imported in silence: TensorFlow logs notes while it is imported.
COMMANDS: tuple[tuple[str, type[Settings], str], ...] = (
    ("train", config.TrainSettings, "training.train:train"),
    ("evaluate", config.EvaluateSettings, "training.trained:evaluate_run"),
    ("export", tools.ExportSettings, "tools.export:export"),
    ("predict", tools.PredictSettings, "tools.predict:predict"),
    ("report", tools.ReportSettings, "tools.report.command:report"),
    ("benchmark step", tools.BenchmarkStepSettings, "tools.benchmark.step:benchmark_step"),
    ("benchmark allreduce", tools.BenchmarkAllreduceSettings, "tools.benchmark.allreduce:benchmark_allreduce"),
    ("doctor", tools.DoctorSettings, "tools.doctor.command:examine"),
    ("validate", config.ValidateSettings, "extensions.remote_evaluation:validate_run"),
    ("doctor-job", tools.DoctorJobSettings, "tools.doctor.job:run_rank"),
)
# The options of `train` that most people need, as its help shows them; --help-all shows all.
HELP_OF_TRAIN = {
    "Data and net": ("dataset", "data_dir", "model", "callbacks"),
    "Training": ("epochs", "max_steps", "batch_size", "global_batch_size", "learning_rate", "set", "precision", "seed"),
    "Ranks": ("sync_batch_norm", "virtual_shards"),
    "Evaluation": ("eval_every", "hold_out", "early_stopping"),
    "Run": ("run_dir", "resume", "config"),
    "Help": ("help", "help_all"),
}
WITHOUT_TENSORFLOW = ("report", "doctor")
HIDDEN = ("validate", "doctor-job")  # for this program's own use


def _commands() -> click.Group:
    @click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
    @click.version_option(__version__)
    def commands() -> None:
        """Train image classifiers with TensorFlow and Horovod: one process (rank) per GPU or core."""

    @commands.group()
    def benchmark() -> None:
        """Measure the training step and the all-reduce on this machine or cluster."""

    for name, kind, place in COMMANDS:
        group, _, word = name.rpartition(" ")
        (benchmark if group else commands).add_command(_command(word, kind, functools.partial(_call, name, place)))
    return commands


def _command(name: str, kind: type[Settings], function: Callable[[Settings], None]) -> click.Command:
    """A command whose options are the fields of `kind`. Parsing returns the call to make, with checked settings."""

    def parse(**given: Any) -> functools.partial[None]:
        file = given.pop("config", None)
        chosen = {field: value for field, value in given.items() if value not in (None, ())}
        try:
            left_out = config.BATCH if chosen.keys() & config.BATCH else ()
            values = {} if file is None else read_file(Path(file), left_out)
            settings = config.make(kind, {**values, **chosen})
        except UserError as error:
            error.of_one_rank = file is not None  # another host may have another file
            raise
        return functools.partial(function, settings)

    file_help = "JSON file of settings, such as a run's config.json; options take precedence over it."
    params = [*options_of(kind), click.Option(["--config"], metavar="FILE", help=file_help)]
    made = _GroupedHelp if name == "train" else click.Command
    if name == "train":
        flag: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
        params.append(click.Option(["--help-all"], help="Show all options.", callback=_show_all, **flag))
    return made(name, params=params, callback=parse, help=kind.__doc__, hidden=name in HIDDEN)


class _GroupedHelp(click.Command):
    """A command whose --help shows `HELP_OF_TRAIN`, and whose --help-all shows all options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {parameter.name: parameter.get_help_record(ctx) for parameter in self.get_params(ctx)}
        for title, names in ({"Options": records} if "all" in ctx.meta else HELP_OF_TRAIN).items():
            with formatter.section(title):
                formatter.write_dl([record for name in names if (record := records.get(name))])


def _show_all(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        context.meta["all"] = True
        click.echo(context.get_help())
        context.exit()


def _call(name: str, place: str, settings: Settings) -> None:
    """Run a command. An image that `predict` cannot read ends the process with exit code 2."""
    with resumable() if name == "train" else contextlib.nullcontext():
        with contextlib.nullcontext() if name in WITHOUT_TENSORFLOW else quiet_start():
            run = pkgutil.resolve_name(f"{__package__}.{place}")
        has_failed = run(settings)
    if name == "predict" and has_failed:
        sys.exit(USER_ERROR)
