"""Settings of the commands that use a trained run: evaluate, validate, export, predict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from hvd_cifar.fields import MOST_EXAMPLES, DatasetName, LocalPath, ModelSpec, Settings, not_empty


class RunSettings(Settings):
    """A trained run, and the settings of its net that a command may override."""

    run_dir: LocalPath = Field(description="Folder of the run.")
    model: ModelSpec | None = Field(
        None, description="The function of the run's net, if it has moved. [default: as recorded]"
    )
    checkpoint: LocalPath | None = Field(None, description="Checkpoint to use. [default: the run's newest]")
    test_time_augmentation: bool | None = Field(
        None,
        description="Average the logits of six views of each image. [default: the run's]",
    )


class EvaluateSettings(RunSettings):
    """One evaluation of a run's checkpoint on the test set."""

    dataset: DatasetName | None = Field(None, description="Data set to evaluate on. [default: the run's]")
    data_dir: LocalPath | None = Field(None, description="Folder of the data set. [default: the run's]")
    batch_size: int | None = Field(
        None,
        gt=0,
        le=MOST_EXAMPLES,
        description="Examples a rank evaluates at a time. [default: 500 of 32 x 32 pixels, fewer of larger images]",
    )
    output: LocalPath | None = Field(None, description="JSON file to write the result to.")


class ValidateSettings(Settings):
    """The command of validation ranks, as the launcher starts them."""

    run_dir: LocalPath = Field(description="Folder of the run.")


class _UseSettings(RunSettings):
    run_dir: LocalPath = Field(description="Folder of the run.", json_schema_extra={"argument": "RUN_DIR"})


class ExportSettings(_UseSettings):
    """A trained net as files that TensorFlow loads without this package."""

    to: LocalPath = Field(description="Folder to write; it must not exist, or be empty.")


class PredictSettings(_UseSettings):
    """Images for a trained net to classify."""

    images: tuple[Annotated[Path, BeforeValidator(not_empty)], ...] = Field(
        min_length=1, description="Image files, and folders of them.", json_schema_extra={"argument": "IMAGE..."}
    )
    as_json: bool = Field(
        False,
        description="Print one JSON object a line, with the probabilities of all classes.",
        json_schema_extra={"flags": ["--json"]},
    )
