"""Checkpoints on disk. Each is a folder, written atomically, and verified before any value of it is used.

`step-N/` holds the variables of step N, by the names of `TrainState.named`: `state.npz`, an archive of NumPy's with a
CRC-32 of each. The folders' names are the only list of the checkpoints. A folder whose name begins with a dot is being
written or removed; a killed run may leave one behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.errors import DIVERGED, TrainingError, UserError, reason_of
from hvd_cifar.files import complain, sync
from hvd_cifar.training.state import TrainState

KEPT = 5  # checkpoints of a run
VALUES = "state.npz"
GONE = "state/rollbacks/0"  # in older checkpoints; nothing reads it
_STEP = re.compile(r"step-([0-9]{1,18})")


def write(folder: Path, step: int, values: Mapping[str, NDArray[Any]]) -> Path:
    """Write a checkpoint, values by name, into a folder of checkpoints, whole or not at all. Raises OSError.

    A checkpoint of the same step is replaced: a run writes a step again only if it found the first one damaged. After
    an error no part of it is left.
    """
    path = folder / f"step-{step}"
    part = path.with_name(f".{path.name}.part")
    try:
        part.mkdir()
        np.savez(part / VALUES, **values)  # type: ignore[arg-type]
        sync(part / VALUES)
        sync(part)
        if path.exists():
            remove(path)
        os.replace(part, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # a part of a checkpoint would keep a full disk full
        raise
    return path


def remove(path: Path) -> None:
    """Remove a checkpoint, unless it cannot be renamed.

    It is renamed first, so that a partly removed one is never taken for a whole one.
    """
    gone = path.with_name(f".{path.name}.old")
    with contextlib.suppress(OSError):
        os.replace(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def clear(folder: Path) -> None:
    """Remove checkpoints that a killed run was writing or removing."""
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None where its values are those that were written."""
    try:
        with (path / VALUES).open("rb") as file:
            is_whole = _has_its_checksums(file)
    except OSError as failure:
        return f"{VALUES}: {reason_of(failure)}"
    return None if is_whole else f"{VALUES} is not what was written"


def _has_its_checksums(file: BinaryIO) -> bool:
    try:
        archive = zipfile.ZipFile(file)
        file.seek(-12, os.SEEK_END)  # there it says how many values it has: a damaged list may leave some out
        count = int.from_bytes(file.read(2), "little")
        return len(archive.namelist()) == count and archive.testzip() is None
    except Exception:  # of many kinds, where an archive is damaged
        return False


def listed(place: Path) -> list[Path]:
    """The checkpoint at a path, or all in a folder of checkpoints or a run directory, the newest first; not checked."""
    folders = [folder for folder in (place, place / "checkpoints") if folder.is_dir()]
    is_named = folders == [place] and _STEP.fullmatch(place.name)  # a run directory may have such a name
    if (place / VALUES).exists() or is_named:
        return [place]
    for folder in folders:
        found = {int(match[1]): path for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))}
        if found:
            return [found[step] for step in sorted(found, reverse=True)]
    return []


def listed_for_user(place: Path) -> list[Path]:
    """`listed`, for a path that the user has given: UserError also where it cannot be read."""
    try:
        return listed(place)
    except OSError as failure:
        raise UserError(f"cannot read {place}: {failure.strerror}; give a path that can be read") from None


def find(place: Path) -> Path | None:
    """The checkpoint at a path, or the newest whole one in a folder of checkpoints or a run directory; None: no one.

    A warning on standard error names each newer one that is damaged. UserError where all are, or cannot be read.
    """
    wrong: list[str] = []
    for path in listed_for_user(place):
        found = damage(path)
        if found is None:
            for line in wrong:
                complain(f"warning: damaged checkpoint {line}; {path.name} is taken instead")
            return path
        wrong.append(f"{path} ({found})")
    if wrong:
        raise UserError(f"damaged checkpoint {wrong[0]}, and no whole one in {place}; give another --run-dir or path")
    return None


class Checkpoints:
    """The newest checkpoints of a run directory. Only rank 0 has one."""

    def __init__(self, folder: Path, state: TrainState) -> None:
        self.folder = folder
        self.state = state
        # Such as a mask of an attention layer: minus infinity is its value, not the mark of a diverged run.
        constants = [v for v in state.model.non_trainable_variables if not np.isfinite(v.numpy()).all()]
        self._infinite = set(map(id, constants))
        clear(folder)

    def save(self) -> Path:
        """Write the current state. Keep the newest 5 checkpoints up to this step, and those that have a link.

        A link in the run directory, such as `best`, keeps its checkpoint. Later checkpoints are removed: they must be
        damaged, since a run resumes from its newest whole one. TrainingError where a value is not finite: a step with a
        finite loss may still spoil the weights. UserError where it cannot be written. Earlier checkpoints are kept.
        """
        step, values = int(self.state.step.numpy()), values_of(self.state)
        for name, variable in self.state.named().items():
            if id(variable) not in self._infinite and not np.isfinite(values[name]).all():
                raise TrainingError(
                    f"{DIVERGED}: {variable.path} is not finite after step {step}; it was not saved; "
                    "lower --learning-rate or give --clip-norm"
                )
        try:
            path = write(self.folder, step, values)
        except OSError as failure:
            kept = "earlier checkpoints are kept" if listed(self.folder) else "nothing is saved"
            raise UserError(
                f"cannot write the checkpoint of step {step} in {self.folder}: {reason_of(failure)}; "
                f"{kept}; make room or give another --run-dir"
            ) from None
        newest_first = listed(self.folder)
        own = newest_first.index(path)
        linked = [os.path.realpath(link) for link in self.folder.parent.iterdir() if link.is_symlink()]
        older = [other for other in newest_first[own + KEPT :] if os.path.realpath(other) not in linked]
        for other in (*newest_first[:own], *older):
            remove(other)
        return path


def values_of(state: TrainState) -> dict[str, NDArray[Any]]:
    """What a checkpoint of a state holds."""
    return {name: np.asarray(v.numpy()) for name, v in state.named().items()}


def read(path: Path) -> dict[str, NDArray[Any]]:
    """The values of a checkpoint, by their names. NumPy gives those of bfloat16 as raw bytes."""
    with np.load(path / VALUES) as saved:
        return dict(saved)


def restore(state: TrainState, path: Path, partial: bool = False) -> None:
    """Read a checkpoint that `find` has checked. UserError where it is of another model; no variable has changed.

    Variables that callbacks have added keep their initial values where the checkpoint lacks them.
    `partial`: the checkpoint may hold more than this state, which is for evaluation.
    """
    try:
        saved, variables, wrong = read(path), state.named(), []
    except (OSError, ValueError, LookupError, zipfile.BadZipFile) as failure:
        raise _unfit(path, reason_of(failure)) from None
    for name, variable in variables.items():
        if name.startswith("state/") and (why := _misfit(variable, saved.get(name))):
            wrong.append(why)
    if not partial:
        more = [name for name in saved if name.startswith("state/") and name not in (*variables, GONE)]
        wrong += [f"it holds {name}, which this run has not" for name in more]
    if wrong:
        raise _unfit(path, wrong[0])
    for name, variable in variables.items():
        if not _misfit(variable, saved.get(name)):
            variable.assign(saved[name].view(_type_of(variable)))


def _type_of(variable: Any) -> Any:
    return tf.as_dtype(variable.dtype).as_numpy_dtype


def _misfit(variable: Any, value: NDArray[Any] | None) -> str:
    """Why a value is not of a variable, in words; "": it may be."""
    if value is None:
        return f"it lacks {variable.path}"
    if value.shape != tuple(variable.shape):
        return f"{variable.path} is {value.shape} there and {tuple(variable.shape)} in this net"
    wanted = np.dtype(_type_of(variable))
    if value.dtype != wanted and not (value.dtype.kind == "V" and value.dtype.itemsize == wanted.itemsize):
        return f"{variable.path} is {value.dtype} there and {wanted} in this net"
    return ""


def _unfit(path: Path, why: str) -> UserError:
    return UserError(f"cannot read the checkpoint {path}: {why}; give another one, or the settings it was made with")
