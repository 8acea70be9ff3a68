"""Types and limits of settings, and `Settings`, the base of all classes of them. They import nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from hvd_cifar.errors import UserError, printable

MOST_SHOWN = 80  # characters of a wrong value in an error message

MODELS = ("fast", "tutorial", "resnet20", "resnet32", "resnet56")
Compression = Literal["none", "fp16"]
Overlap = Literal["auto", "on", "off"]
Precision = Literal["float32", "float64", "mixed_bfloat16", "mixed_float16"]

DEFAULT_PER_RANK_BATCH_SIZE = 128
BUILT_IN_DATASETS = ("auto", "cifar10", "cifar100", "synthetic")
OBJECT_DATASET = "object:"  # prefix, in a run's record, of the name of a Dataset object that a program passed
FOLDER_DATASET = "folder:"  # prefix of the path of a folder of images

# Largest counts. A larger number is a typing error, and would overflow the integers of NumPy and TensorFlow.
MOST_STEPS = 10**12
MOST_EXAMPLES = 10**9
MOST_THREADS = 4096
MOST_PIXELS = 4096  # of a side of an image
MOST_PROFILED_STEPS = 100  # each has thousands of events, which a rank holds in memory
LARGEST_RATE = 1e37  # the largest float32 is 3.4e38
SMALLEST_NORM = 1e-6  # smaller gradients do not change float32 weights
FEWEST_EPOCHS = 1e-6


def not_empty(path: Any) -> Any:
    """`path`, unchanged; ValueError where it is empty."""
    if path == "":  # an unset shell variable; pathlib would take "" as the current folder
        raise ValueError("the path is empty")
    return path


def absolute(path: Path) -> Path:
    """The absolute path, so that ranks and a later `evaluate` agree on it.

    Raises:
        ValueError: for an unknown ~user, a NUL, and a name that is not UTF-8, which TensorFlow does not take.
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


def absolute_user_code(spec: str) -> str:
    """FILE.py:NAME with the file's absolute path; package.module:NAME as it is."""
    place, _, name = spec.rpartition(":")
    return f"{absolute(Path(place))}:{name}" if place.endswith(".py") else spec


def _model(spec: str) -> str:
    if spec in MODELS:
        return spec
    if not is_user_code(spec):
        raise ValueError(f"give {', '.join(MODELS)}, or a function of yours: FILE.py:NAME or package.module:NAME")
    return absolute_user_code(spec)


def _callbacks(given: Any) -> Any:
    """Text such as a.py:A,b.py:B as ("a.py:A", "b.py:B"), with absolute paths."""
    words = given.split(",") if isinstance(given, str) else given
    if not isinstance(words, list | tuple) or not all(
        isinstance(word, str) and is_user_code(word.strip()) for word in words
    ):
        raise ValueError("write FILE.py:NAME or package.module:NAME, with commas between them")
    return tuple(absolute_user_code(word.strip()) for word in words)


def absolute_unless_word(place: str) -> str:
    """auto and never as they are; any other text as an absolute path."""
    return place if place in ("auto", "never") else str(absolute(Path(place)))


def _dataset(given: str) -> str:
    """The name of a data set, with absolute paths."""
    if given in BUILT_IN_DATASETS:
        return given
    if given.startswith(OBJECT_DATASET):
        raise ValueError("this run's data set was a Python object; give it to hvd_cifar.train or evaluate again")
    if given.startswith(FOLDER_DATASET):
        path = given.removeprefix(FOLDER_DATASET)
        if not path:
            raise ValueError("the path is empty; give folder:PATH")
        return FOLDER_DATASET + str(absolute(Path(path)))
    if not is_user_code(given):
        raise ValueError(
            f"no data set has this name; give {', '.join(BUILT_IN_DATASETS)}, folder:PATH, FILE.py:NAME or "
            "package.module:NAME"
        )
    return absolute_user_code(given)


# Units, with their values in bytes.
_SIZES = {"": 1, "B": 1, "K": 2**10, "KiB": 2**10, "M": 2**20, "MiB": 2**20, "G": 2**30, "GiB": 2**30}


def _few(steps: tuple[int, int]) -> tuple[int, int]:
    if steps[1] - steps[0] >= MOST_PROFILED_STEPS:
        raise ValueError(f"a profile holds at most {MOST_PROFILED_STEPS} steps; give fewer")
    return steps


def _bytes(given: Any) -> float:
    """Text such as 64K as a number."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?([A-Za-z]*)", str(given).strip())
    if not match or match[2] not in _SIZES:
        raise ValueError(f"write a number and one of {', '.join(filter(None, _SIZES))}, such as 4, 64K or 256MiB")
    return float(match[1]) * _SIZES[match[2]]


def _image_size(given: Any) -> tuple[int, int]:
    """Text such as 224 or 224x160 as (224, 160)."""
    match = re.fullmatch(
        "([0-9]{1,5})(?:x([0-9]{1,5}))?", "x".join(map(str, given)) if isinstance(given, tuple | list) else str(given)
    )
    if not match or not 1 <= min(size := (int(match[1]), int(match[2] or match[1]))) <= max(size) <= MOST_PIXELS:
        raise ValueError(f"write a height and a width in pixels, such as 224 or 160x224, each at most {MOST_PIXELS}")
    return size


def address(given: str) -> str:
    """`given`, unchanged; ValueError where it is no address on the web, or holds a password."""
    if not re.match(r"https?://[^/?#\s]+", given):
        raise ValueError("give an address that begins with http:// or https:// and the name of a host")
    if re.match(r"[a-zA-Z][\w+.-]*://[^/?#]*@", given):
        raise ValueError("a user's name or password would be recorded in config.json; put it into ~/.netrc")
    return given


def words(given: Any) -> Any:
    """Text such as a,b as ("a", "b")."""
    return tuple(given.split(",")) if isinstance(given, str) else given


def _pair(least: int, what: str) -> BeforeValidator:
    """Text such as 2:8 as (2, 8): whole numbers of at least `least`, the second at least the first."""

    def pair(given: Any) -> tuple[int, int]:
        text = given if isinstance(given, str) else ":".join(map(str, given)) if isinstance(given, list | tuple) else ""
        match = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
        if not match or not least <= int(match[1]) <= int(match[2]):
            raise ValueError(f"write {what}, the first not more than the second")
        return int(match[1]), int(match[2])

    return BeforeValidator(pair)


Steps = Annotated[tuple[int, int], _pair(1, "FIRST:LAST steps, such as 100:110"), AfterValidator(_few)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
ModelSpec = Annotated[str, AfterValidator(_model)]
Callbacks = Annotated[tuple[str, ...], BeforeValidator(_callbacks)]
LocalPath = Annotated[Path, BeforeValidator(not_empty), AfterValidator(absolute)]
DatasetName = Annotated[str, AfterValidator(_dataset)]
Sizes = Annotated[tuple[int, int], _pair(1, "MIN:MAX ranks, such as 2:8")]
Rests = Annotated[tuple[int, int], _pair(0, "FIRST:LONGEST seconds, such as 10:300")]
ImageSize = Annotated[tuple[int, int], BeforeValidator(_image_size)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Scale = Annotated[float, Field(gt=0, le=1)]


class Settings(BaseModel):
    """Settings whose fields are options; None often stands for another default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


S = TypeVar("S", bound=Settings)


def option_name(field: str) -> str:
    """`global_batch_size` -> `--global-batch-size`, `json_file` -> `--json`."""
    return "--" + field.removesuffix("_file").replace("_", "-")


def _told_name(kind: type[S], field: str) -> str:
    """What the command line calls a field: its option, or its argument."""
    info = kind.model_fields.get(field)
    extra = info.json_schema_extra if info else None
    if not isinstance(extra, dict):
        return option_name(field)
    flags = extra.get("flags")
    return (
        str(extra["argument"])
        if "argument" in extra
        else str(flags[0])
        if isinstance(flags, list)
        else option_name(field)
    )


def make(kind: type[S], values: dict[str, Any]) -> S:
    """Validate `values` (field name -> value, text is converted) into settings.

    Raises:
        UserError: with one line that names the first wrong option, its value and what it must be.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as failure:
        first = failure.errors()[0]
        if not first["loc"]:  # a check of several fields writes the whole message
            raise UserError(str(first["ctx"]["error"]) if "ctx" in first else first["msg"]) from None
        option = _told_name(kind, str(first["loc"][0]))
        if len(first["loc"]) > 1 and isinstance(first["loc"][1], str):  # one of --set
            option += f" {first['loc'][1]}"
        if first["type"] == "missing":
            raise UserError(f"{option} is required") from None
        if first["type"] == "extra_forbidden":
            raise UserError(f"{option} is no setting of this command (see --help)") from None
        message = first["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        raise UserError(f"{option} {shown(first['input'])}: {message}") from None


def shown(value: Any) -> str:
    """A wrong value as an error message shows it: on one line, at most `MOST_SHOWN` characters."""
    text = re.sub("//[^/]*@", "//...@", printable(str(value)))  # a password
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
