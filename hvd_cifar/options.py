"""Fields of settings as options of a command line, and the launcher's options, which stand before its command."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from hvd_cifar.config import NO_CHANGES
from hvd_cifar.errors import UserError
from hvd_cifar.fields import make, option_name
from hvd_cifar.launch.settings import LaunchSettings

# The options of `train` that most people need, as its help shows them; --help-all shows all.
HELP_OF_TRAIN = {
    "Data and net": ("dataset", "data_dir", "model", "callbacks"),
    "Training": ("epochs", "max_steps", "batch_size", "global_batch_size", "learning_rate", "set", "precision", "seed"),
    "Ranks": ("sync_batch_norm", "virtual_shards"),
    "Evaluation": ("eval_every", "hold_out", "early_stopping"),
    "Run": ("run_dir", "resume", "config"),
}


class GroupedCommand(click.Command):
    """A command whose --help shows some options in groups, and whose --help-all shows all."""

    def __init__(self, name: str, groups: Mapping[str, Sequence[str]], **named: Any) -> None:
        super().__init__(name, **named)
        self._groups = groups
        whole = click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, help="Show all options.")
        whole.callback = self._show_all
        self.params.append(whole)

    def _show_all(self, context: click.Context, _: click.Parameter, asked: bool) -> None:
        if asked:
            self._groups = {}
            click.echo(self.get_help(context))
            context.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups; without groups, all options."""
        if not self._groups:
            return super().format_options(ctx, formatter)
        records = {parameter.name: parameter.get_help_record(ctx) for parameter in self.get_params(ctx)}
        for title, names in {**self._groups, "Help": ("help", "help_all")}.items():
            with formatter.section(title):
                formatter.write_dl([record for name in names if (record := records.get(name))])
        return None


def option(field: str, info: Any) -> click.Parameter:
    """The option, or the argument, of a field of settings."""
    name, extra = option_name(field), info.json_schema_extra or {}
    if metavar := extra.get("argument"):
        is_list = typing.get_origin(info.annotation) is tuple
        return click.Argument([field], metavar=metavar, nargs=-1 if is_list else 1, required=True)
    if flags := _flags_of(info):
        is_flag = info.annotation is bool
        metavar = None if is_flag else _metavar(info.annotation)
        return click.Option([*flags, field], default=None, is_flag=is_flag, metavar=metavar, help=_help(info))
    if info.annotation in (bool, bool | None):
        # Both --x and --no-x, so that an option can override either value in a file.
        return click.Option([f"{name}/--no-{name.removeprefix('--')}"], default=None, help=_help(info))
    metavar = extra.get("metavar") or _metavar(info.annotation)
    hidden, several = "hidden" in extra, "multiple" in extra
    return click.Option([name, field], default=None, metavar=metavar, help=_help(info), hidden=hidden, multiple=several)


def _flags_of(info: Any) -> list[str]:
    """The names of a field's option, where they are not that of the field."""
    extra = info.json_schema_extra or {}
    return list(extra.get("flags", []))


def _help(info: Any) -> str:
    text = str(info.description)
    shown = info.default not in (None, (), NO_CHANGES) and info.default is not False
    shown = shown and not info.is_required()
    default = ",".join(map(str, info.default)) if isinstance(info.default, tuple) else info.default
    return f"{text} [default: {default}]" if shown else text


def _metavar(annotation: Any) -> str:
    """How the help shows an option's value: its choices, or N, X, PATH or TEXT by its type."""
    members = [m for m in typing.get_args(annotation) if m is not types.NoneType]
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(members)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return _metavar(members[0])
    if typing.get_origin(annotation) is typing.Annotated:
        return _metavar(members[0])
    if typing.get_origin(annotation) is tuple:
        return "{0},{0},...".format(_metavar(members[0]))
    return {int: "N", float: "X", Path: "PATH"}.get(annotation, "TEXT")


def launcher_options(argv: list[str]) -> tuple[LaunchSettings, tuple[str, ...]]:
    """The launcher's options at the start of a command line, and the command after them, which may follow "--".

    Raises UserError.
    """
    options = [option(field, info) for field, info in LaunchSettings.model_fields.items()]
    words = click.Argument(["command"], nargs=-1, type=click.UNPROCESSED)
    rule = {"allow_interspersed_args": False}
    parser = click.Command("./run.sh", params=[*options, words], add_help_option=False, context_settings=rule)
    try:
        given = parser.make_context("./run.sh", list(argv)).params
    except click.ClickException as error:
        raise UserError(
            f"{error.format_message().rstrip('.')}: options of the launcher stand before the command, and those of "
            "the command after it (./run.sh --help-all)"
        ) from None
    command = given.pop("command")
    chosen = {name: value for name, value in given.items() if value is not None}
    return make(LaunchSettings, chosen), command


def launcher_option(name: str) -> str | None:
    """The launcher's option that a command's parser does not know; None: the launcher does not know it either."""
    for field, info in LaunchSettings.model_fields.items():
        flags = _flags_of(info) or [option_name(field)]
        if name in flags:
            return flags[0]
    return None
