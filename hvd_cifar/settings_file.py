"""Files of settings: YAML or JSON that a user writes (--config), and a run's config.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from hvd_cifar.config import BATCH, RECORDED_SECTIONS
from hvd_cifar.errors import UserError
from hvd_cifar.fields import Settings, shown
from hvd_cifar.files import MOST_JSON_BYTES, replace_text

REMEDY = "give a YAML or JSON file of settings, with one 'name: value' a line"
NOTHING = ("", "~", "null", "Null", "NULL")  # YAML's words for the recipe's value


def read_file(path: Path, has_batch: bool = False) -> dict[str, Any]:
    """Settings of a YAML or JSON file, such as a run's config.json, as field name -> value.

    Args:
        has_batch: whether an option gives the batch. The file's batch is then left out.

    Raises:
        UserError: where the file is not readable, too large or holds no mapping.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # reading a FIFO would block for ever
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            data = file.read(MOST_JSON_BYTES + 1)
        if len(data) > MOST_JSON_BYTES:
            raise ValueError(f"it has more than {MOST_JSON_BYTES:,} bytes")
        content = _parse(data.decode())
    except OSError as failure:
        raise UserError(f"--config {path}: {failure.strerror}; {REMEDY}") from None
    except UnicodeDecodeError:
        raise UserError(f"--config {path}: it is no text; {REMEDY}") from None
    except yaml.YAMLError as failure:
        mark = getattr(failure, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise UserError(f"--config {path}: it is neither YAML nor JSON{where}; {REMEDY}") from None
    except (ValueError, TypeError, RecursionError) as failure:
        raise UserError(f"--config {path}: {shown(' '.join(str(failure).split()))}; {REMEDY}") from None
    left_out = {*RECORDED_SECTIONS, *(BATCH if has_batch else ())}
    return {name: value for key, value in content.items() if (name := key.replace("-", "_")) not in left_out}


def _parse(text: str) -> dict[str, Any]:
    """The mapping in a text. ValueError where it holds something else.

    A plain value of YAML is text, as on the command line, and the field's type converts it: YAML's own types would make
    `off` False, `10:20` 620 and `010` 8.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        content = yaml.load(text, yaml.BaseLoader)
        if isinstance(content, dict):
            content = {key: None if value in NOTHING else value for key, value in content.items()}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError("it holds no settings")
    return content


def write_file(path: Path, settings: Settings, run: dict[str, Any]) -> None:
    """Write settings as config.json, and under "run" the facts of the run, such as versions and ranks."""
    content = {**settings.model_dump(mode="json"), "run": run}
    replace_text(path, json.dumps(content, indent=2) + "\n")
