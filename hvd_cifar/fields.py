"""Types and limits of settings, and `Settings`, the base of all classes of them. They import nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

MODELS = ("fast", "tutorial", "resnet20", "resnet32", "resnet56")
DataSource = Literal["auto", "local", "rank0"]
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


def _rank_counts(given: Any) -> Any:
    """Text such as 1,2,4 as (1, 2, 4): ascending, each once."""
    words = given.split(",") if isinstance(given, str) else given if isinstance(given, (list, tuple)) else [given]
    texts = [str(word).strip() for word in words]
    if not all(re.fullmatch("[0-9]{1,6}", text) and int(text) > 0 for text in texts):
        raise ValueError("write numbers of ranks, each at most 999999, with commas between them, such as 1,2,4")
    return tuple(sorted({int(text) for text in texts}))


# Units, with their values in bytes.
_SIZES = {"": 1, "B": 1, "K": 2**10, "KiB": 2**10, "M": 2**20, "MiB": 2**20, "G": 2**30, "GiB": 2**30}


def _steps(given: Any) -> Any:
    """Text such as 100:110 as (100, 110)."""
    if isinstance(given, str):
        match = re.fullmatch("([0-9]{1,12}):([0-9]{1,12})", given)
        if match is None:
            raise ValueError("write the first and the last step, such as 100:110")
        given = (int(match[1]), int(match[2]))
    return tuple(given) if isinstance(given, list) else given


def _in_order(steps: tuple[int, int]) -> tuple[int, int]:
    if not 1 <= steps[0] <= steps[1]:
        raise ValueError("the first step must be at least 1, and at most the last; write such as 100:110")
    if steps[1] - steps[0] >= MOST_PROFILED_STEPS:
        raise ValueError(f"a profile holds at most {MOST_PROFILED_STEPS} steps; give fewer")
    return steps


def _quantity(units: dict[str, float], example: str) -> BeforeValidator:
    def read(given: Any) -> Any:
        match = re.fullmatch(r"([0-9.]+) ?([A-Za-z/]*)", given.strip()) if isinstance(given, str) else None
        if match is None and not isinstance(given, (int, float)):
            raise ValueError(f"write a number and a unit, such as {example}")
        number, unit = (match[1], match[2]) if match else (str(given), "")
        if unit not in units or not re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", number):
            raise ValueError(f"write a number and one of {', '.join(filter(None, units))}, such as {example}")
        return float(number) * units[unit]

    return BeforeValidator(read)


def address(given: str) -> str:
    """`given`, unchanged; ValueError where it is no address on the web, or holds a password."""
    if not re.match(r"https?://[^/?#\s]+", given):
        raise ValueError("give an address that begins with http:// or https:// and the name of a host")
    if re.match(r"[a-zA-Z][\w+.-]*://[^/?#]*@", given):
        raise ValueError("a user's name or password would be recorded in config.json; put it into ~/.netrc")
    return given


def numbers(given: Any) -> Any:
    """Text such as 0.75,1 as ("0.75", "1")."""
    words = given.split(",") if isinstance(given, str) else given
    return tuple(words) if isinstance(words, list) else words


def words(given: Any) -> Any:
    """Text such as a,b as ("a", "b")."""
    return tuple(given.split(",")) if isinstance(given, str) else given


def _pair(least: int, what: str) -> BeforeValidator:
    """Text such as 2:8 as (2, 8): whole numbers of at least `least`, the second at least the first."""

    def pair(given: Any) -> tuple[int, int]:
        match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", str(given))
        if not match or not least <= int(match[1]) <= int(match[2]):
            raise ValueError(f"write {what}, the first not more than the second")
        return int(match[1]), int(match[2])

    return BeforeValidator(pair)


RankCounts = Annotated[tuple[int, ...], BeforeValidator(_rank_counts)]
Steps = Annotated[tuple[int, int], BeforeValidator(_steps), AfterValidator(_in_order)]
Bytes = Annotated[int, _quantity(_SIZES, "4, 64K or 256MiB")]
ModelSpec = Annotated[str, AfterValidator(_model)]
Callbacks = Annotated[tuple[str, ...], BeforeValidator(_callbacks)]
LocalPath = Annotated[Path, BeforeValidator(not_empty), AfterValidator(absolute)]
DatasetName = Annotated[str, AfterValidator(_dataset)]
Sizes = Annotated[tuple[int, int], _pair(1, "MIN:MAX ranks, such as 2:8")]
Rests = Annotated[tuple[int, int], _pair(0, "FIRST:LONGEST seconds, such as 10:300")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Scale = Annotated[float, Field(gt=0, le=1)]


def _has_numbers(annotation: Any) -> bool:
    return annotation in (int, float) or any(map(_has_numbers, get_args(annotation)))


class Settings(BaseModel):
    """Settings whose fields are options; None often stands for another default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _a_truth_value_is_no_number(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse True, which pydantic takes for 1."""
        words = given if isinstance(given, list | tuple) else [given]
        is_bool = any(type(word).__name__ == "bool" for word in words)  # also NumPy's
        if is_bool and _has_numbers(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError("a truth value is not a number")
        return given
