"""The layer of Python over Horovod's compiled wheel: its interface to Keras 3. A change of it compiles nothing.

The wheel gets a copy of the library `hvd_cifar.distributed`, its `keras3/entry.py` as `horovod/keras3.py`, and the
patch that leads Horovod's names there.
"""

import base64
import hashlib
import os
import tempfile
import zipfile
from pathlib import Path

from hvd_cifar.launch.install.patch import apply_patch

HERE = Path(__file__).resolve().parent
PATCH = HERE / "horovod-0.28.1-keras3.patch"
LIBRARY = HERE.parents[1] / "distributed"
ENTRY = LIBRARY / "keras3" / "entry.py"


def files() -> dict[str, str]:
    """The layer's files: text by path in the wheel."""
    library = {f"horovod/_distributed/{path.relative_to(LIBRARY)}": path for path in sorted(LIBRARY.rglob("*.py"))}
    return {name: path.read_text() for name, path in {"horovod/keras3.py": ENTRY, **library}.items()}


def lay_over(wheel: Path) -> Path:
    """The wheel with the layer, in a folder beside it that has the layer's hash; made if it is not there."""
    texts, patch = files(), PATCH.read_text()
    key = hashlib.sha256(repr((sorted(texts.items()), patch)).encode()).hexdigest()[:20]
    made = wheel.parent / f"layer-{key}" / wheel.name
    if made.exists():
        return made
    made.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as work:
        folder = Path(work, "content")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        apply_patch(patch, folder)
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        _pack(folder, Path(work, wheel.name))
        os.replace(Path(work, wheel.name), made)  # at once: another set-up may read it
    return made


def _pack(folder: Path, wheel: Path) -> None:
    """Write a folder as a wheel, with the hash and the size of each file in RECORD."""
    (record,) = folder.glob("*.dist-info/RECORD")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path != record)
    lines = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            content = (folder / name).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}")
            archive.writestr(_entry(name, executable=os.access(folder / name, os.X_OK)), content)
        own = str(record.relative_to(folder))
        archive.writestr(_entry(own, executable=False), "\n".join([*lines, f"{own},,"]) + "\n")


def _entry(name: str, executable: bool) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)  # of 1980: the same files give the same wheel
    entry.external_attr = (0o100755 if executable else 0o100644) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry
