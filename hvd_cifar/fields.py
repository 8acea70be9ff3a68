"""Types of settings; `Settings`, the base of all classes of them; their options and files. Imports nothing heavy."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import click
from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from hvd_cifar.errors import UserError, shown
from hvd_cifar.files import read_json

MODELS = ("fast", "tutorial", "resnet20", "resnet32", "resnet56")
DEFAULT_PER_RANK_BATCH_SIZE = 128
BUILT_IN_DATASETS = ("auto", "cifar10", "cifar100", "synthetic")
OBJECT_DATASET = "object:"  # prefix, in a run's record, of the name of a Dataset object that a program passed
FOLDER_DATASET = "folder:"  # prefix of the path of a folder of images

# Largest counts. A larger number is a typing error, and would overflow the integers of NumPy and TensorFlow.
MOST_STEPS = 10**12
MOST_EXAMPLES = 10**9
MOST_PIXELS = 4096  # of a side of an image
LARGEST_RATE = 1e37  # the largest float32 is 3.4e38


def not_empty(path: Any) -> Any:
    """`path`, unchanged; ValueError where it is empty."""
    if path == "":  # an unset shell variable; pathlib would take "" as the current folder
        raise ValueError("the path is empty")
    return path


def absolute(path: Path) -> Path:
    """The absolute path, so that ranks and a later `evaluate` agree on it.

    ValueError for an unknown ~user, a NUL, and a name that is not UTF-8, which TensorFlow does not take.
    """
    if "\0" in str(path):
        raise ValueError("a path holds no NUL character")
    if any("\ud800" <= character <= "\udfff" for character in str(path)):
        raise ValueError("the name is not UTF-8; rename it")
    try:
        return path.expanduser().absolute()
    except RuntimeError as failure:
        raise ValueError(str(failure)) from None


def is_user_code(spec: str) -> bool:
    """Whether a text is FILE.py:NAME or package.module:NAME, which names an object of the user's code."""
    place, _, name = spec.rpartition(":")
    return name.isidentifier() and (place.endswith(".py") or all(map(str.isidentifier, place.split("."))))


def _named(given: str, names: Sequence[str] = ()) -> str:
    """One of these names, package.module:NAME, or FILE.py:NAME with the file's absolute path."""
    place, _, name = given.rpartition(":")
    if given in names or (is_user_code(given) and not place.endswith(".py")):
        return given
    if not is_user_code(given):
        raise ValueError(f"give {', '.join([*names, 'FILE.py:NAME'])} or package.module:NAME")
    return f"{absolute(Path(place))}:{name}"


def _dataset(given: str) -> str:
    """The name of a data set, with absolute paths."""
    if given.startswith(OBJECT_DATASET):
        raise ValueError("this run's data set was a Python object; give it to hvd_cifar.train or evaluate again")
    if given.startswith(FOLDER_DATASET) and given != FOLDER_DATASET:
        return FOLDER_DATASET + str(absolute(Path(given.removeprefix(FOLDER_DATASET))))
    return _named(given, (*BUILT_IN_DATASETS, "folder:PATH"))


def _place(given: str) -> str:
    """auto as it is; any other text as an absolute path."""
    return given if given == "auto" else str(absolute(Path(given)))


def _image_size(given: Any) -> tuple[int, int]:
    """Text such as 224 or 224x160 as (224, 160)."""
    text = "x".join(map(str, given)) if isinstance(given, tuple | list) else str(given)
    match = re.fullmatch("([0-9]{1,5})(?:x([0-9]{1,5}))?", text)
    if not match or not 1 <= min(size := (int(match[1]), int(match[2] or match[1]))) <= max(size) <= MOST_PIXELS:
        raise ValueError(f"write a height and a width in pixels, such as 224 or 160x224, each at most {MOST_PIXELS}")
    return size


def _words(given: Any) -> Any:
    """Text such as a,b as ("a", "b")."""
    return tuple(word.strip() for word in given.split(",")) if isinstance(given, str) else given


def _pair(least: int, what: str) -> BeforeValidator:
    """Text such as 2:8 as (2, 8): whole numbers of at least `least`, the second at least the first."""

    def pair(given: Any) -> tuple[int, int]:
        text = ":".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
        match = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
        if not match or not least <= int(match[1]) <= int(match[2]):
            raise ValueError(f"write {what}, the first not more than the second")
        return int(match[1]), int(match[2])

    return BeforeValidator(pair)


# A text in `Annotated` is how the help shows the value.
Precision = Literal["float32", "float64", "mixed_bfloat16", "mixed_float16"]
Sizes = Annotated[tuple[int, int], _pair(1, "MIN:MAX ranks, such as 2:8")]
Rests = Annotated[tuple[int, int], _pair(0, "FIRST:LONGEST seconds, such as 10:300")]
ImageSize = Annotated[tuple[int, int], BeforeValidator(_image_size), "HxW"]
UserCode = Annotated[str, AfterValidator(_named)]
ModelSpec = Annotated[str, AfterValidator(partial(_named, names=MODELS))]
DatasetName = Annotated[str, AfterValidator(_dataset)]
Callbacks = Annotated[tuple[UserCode, ...], BeforeValidator(_words)]
LocalPath = Annotated[Path, BeforeValidator(not_empty), AfterValidator(absolute)]
PathOrWord = Annotated[str, Field(min_length=1), AfterValidator(_place)]
StepCount = Annotated[int, Field(gt=0, le=MOST_STEPS)]
Interval = Annotated[int, Field(ge=0, le=MOST_STEPS)]  # steps between two of something; 0: never
ExampleCount = Annotated[int, Field(gt=0, le=MOST_EXAMPLES)]
ThreadCount = Annotated[int, Field(gt=0, le=4096)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Rate = Annotated[Finite, Field(gt=0, le=LARGEST_RATE)]
Norm = Annotated[Finite, Field(ge=1e-6, le=LARGEST_RATE)]  # smaller gradients do not change float32 weights
Fraction = Annotated[Finite, Field(ge=0, lt=1)]
Span = Annotated[Finite, Field(ge=0, le=1_000_000)]  # of epochs, minutes or seconds
Scales = Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], BeforeValidator(_words)]


class Settings(BaseModel):
    """Settings whose fields are options; None often stands for another default. A field's docstring is its help.

    `json_schema_extra` of a field has "flags", the names of its option, or "argument", its name where it is none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


S = TypeVar("S", bound=Settings)


def option_name(field: str) -> str:
    """`global_batch_size` -> `--global-batch-size`."""
    return "--" + field.replace("_", "-")


def flags_of(kind: type[Settings], field: str) -> list[str]:
    """What the command line calls a field: the names of its option, or its argument."""
    extra: Any = getattr(kind.model_fields.get(field), "json_schema_extra", None) or {}
    return extra.get("flags") or [extra.get("argument") or option_name(field)]


def make(kind: type[S], values: dict[str, Any]) -> S:
    """Validate `values` (field name -> value, text is converted) into settings.

    UserError with one line that names the first wrong option, its value and what it must be.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as failure:
        first = failure.errors()[0]
        if not first["loc"]:  # a check of several fields writes the whole message
            raise UserError(str(first["ctx"]["error"]) if "ctx" in first else first["msg"]) from None
        option = flags_of(kind, str(first["loc"][0]))[0]
        if len(first["loc"]) > 1 and isinstance(first["loc"][1], str):  # one of --set
            option += f" {first['loc'][1]}"
        if first["type"] == "missing":
            raise UserError(f"{option} is required") from None
        if first["type"] == "extra_forbidden":
            raise UserError(f"{option} is no setting of this command (see --help)") from None
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{option} {shown(first['input'])}: {message[0].lower()}{message[1:]}") from None


def options_of(kind: type[Settings]) -> list[click.Parameter]:
    """The option, or the argument, of each field of settings."""
    return [_option(kind, field, info) for field, info in kind.model_fields.items()]


def _option(kind: type[Settings], field: str, info: Any) -> click.Parameter:
    names, extra, is_flag = flags_of(kind, field), info.json_schema_extra or {}, info.annotation in (bool, bool | None)
    if metavar := extra.get("argument"):
        is_list = typing.get_origin(info.annotation) is tuple
        return click.Argument([field], metavar=metavar, nargs=-1 if is_list else 1, required=True)
    named: dict[str, Any] = {"default": None, "help": _help(info)}
    if is_flag and "flags" not in extra:
        # Both --x and --no-x, so that an option can override either value in a file.
        return click.Option([f"{names[0]}/--no-{names[0].removeprefix('--')}"], **named)
    if not is_flag:
        named |= {"metavar": _metavar(info.annotation, info.metadata), "multiple": "multiple" in extra}
    return click.Option([*names, field], is_flag=is_flag, **named)


def _help(info: Any) -> str:
    text = " ".join(str(info.description).split())
    if info.is_required() or info.default in (None, ()) or info.default is False or isinstance(info.default, Settings):
        return text
    return f"{text} [default: {info.default}]"


def _metavar(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """How the help shows an option's value: its choices, the type's own text, or N, X, PATH or TEXT by its type."""
    if own := next((one for one in metadata if isinstance(one, str)), None):
        return own
    members = [member for member in typing.get_args(annotation) if member is not types.NoneType]
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return "|".join(members)
    if origin in (types.UnionType, typing.Union, typing.Annotated):
        return _metavar(members[0], members[1:])
    if origin is tuple:
        return "{0},{0},...".format(_metavar(members[0]))
    return {int: "N", ByteSize: "N", float: "X", Path: "PATH"}.get(annotation, "TEXT")


def read_file(path: Path, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Settings of a JSON file, such as a run's config.json, by field, without those of `left_out`.

    UserError where the file is not readable, too large or holds no object.
    """
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it holds no settings")
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or " ".join(str(failure).split())
        raise UserError(f"--config {path}: {reason}; give a JSON file, such as a run's config.json") from None
    content.pop("run", None)  # facts about the run in its config.json, no settings
    return {name: value for key, value in content.items() if (name := key.replace("-", "_")) not in left_out}
