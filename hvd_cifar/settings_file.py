"""Files of settings: YAML or JSON that a user writes (--config), and a run's config.json."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from hvd_cifar.config import BATCH, RECORDED_SECTIONS
from hvd_cifar.errors import UserError
from hvd_cifar.fields import Settings, shown
from hvd_cifar.files import MOST_JSON_BYTES, replace_text

# Limit of a file that is not JSON. It is lower than that of JSON, since YAML parses slowly.
MOST_YAML_BYTES = 1 << 18
REMEDY = "give a YAML or JSON file of settings"


class _Reader(yaml.SafeLoader):
    """YAML without duplicate keys, and without aliases: a few lines of them can expand to gigabytes.

    A plain value is text, as on the command line, and the field's type converts it. YAML 1.1 would make `off` False,
    `10:20` 620 and `010` 8. Only null (`null`, `~` or nothing), which stands for the recipe's value, is no text.
    """

    yaml_implicit_resolvers = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _Refused("it has an alias (*name); write the value itself")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key.value, str)]
        _refuse_duplicates(names)
        return super().construct_mapping(node, deep)


_Reader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])


class _Refused(Exception):
    """Why a file of settings is not read, and what to do."""


def _refuse_duplicates(names: list[str]) -> None:
    names = [name.replace("-", "_") for name in names]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise _Refused(f"{shown(twice)} is there twice; leave one out")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_duplicates([name for name, _ in pairs])
    return dict(pairs)


def _parse(data: bytes) -> Any:
    """The content of a file of settings. Raises _Refused and what `read_file` lists."""
    text = data.decode()
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError:
        if len(data) > MOST_YAML_BYTES:
            raise _Refused(f"it has more than {MOST_YAML_BYTES:,} bytes; give a file of settings") from None
    return yaml.load(text, _Reader)  # a SafeLoader


def read_file(path: Path, has_batch: bool = False) -> dict[str, Any]:
    """Settings of a YAML or JSON file, such as a run's config.json, as field name -> value.

    Args:
        has_batch: whether an option gives the batch. The file's batch is then left out.

    Raises:
        UserError: where the file is not readable, too large or holds no mapping.
    """
    one_a_line = "write one 'name: value' a line"
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # reading a FIFO would block for ever
            raise _Refused(f"it is no regular file; {REMEDY}")
        with path.open("rb") as file:
            data = file.read(MOST_JSON_BYTES + 1)
        if len(data) > MOST_JSON_BYTES:
            raise _Refused(f"it has more than {MOST_JSON_BYTES:,} bytes; {REMEDY}")
        content = _parse(data)
    except OSError as failure:
        why = f"{failure.strerror}; {REMEDY}"
    except UnicodeDecodeError:
        why = f"is not text; {REMEDY}"
    except _Refused as refused:
        why = str(refused)
    except yaml.YAMLError as failure:
        mark = getattr(failure, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        why = f"is neither YAML nor JSON{where}; {one_a_line}"
    except RecursionError:
        why = f"its lists are nested too deeply; {one_a_line}"
    except (ValueError, TypeError, AttributeError, LookupError) as failure:  # a malformed key, or value of a tag
        why = f"holds a value that cannot be read ({shown(' '.join(str(failure).split()))}); correct it"
    else:
        if isinstance(content, dict) and all(isinstance(key, str) for key in content):
            left_out = {*RECORDED_SECTIONS, *(BATCH if has_batch else ())}
            return {name: value for key, value in content.items() if (name := key.replace("-", "_")) not in left_out}
        why = f"holds no settings; {one_a_line}"
    raise UserError(f"--config {path}: {why}")


def write_file(path: Path, settings: Settings, run: dict[str, Any]) -> None:
    """Write settings as config.json, and under "run" the facts of the run, such as versions and ranks."""
    content = {**settings.model_dump(mode="json"), "run": run}
    replace_text(path, json.dumps(content, indent=2) + "\n")
