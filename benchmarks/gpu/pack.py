"""What `python -m benchmarks.gpu` needs on a machine without network: one archive of at most 64 MiB, and its wheels.

    python -m benchmarks.gpu.pack --output FOLDER [--data-dir D]

Run it in an environment that `./run.sh setup --gpu --test` made, on the same Python and system. FOLDER then has

- `hvd_cifar-gpu.tar.gz`: this checkout, Horovod's built wheel with the libraries that set-up compiled, and
  `install.sh`. The images are left out, since they would not fit; they travel beside it.
- `wheels.txt`: every other package with its version. `pip download -r wheels.txt -d wheels` fetches them where there is
  a network; PyTorch is `torch==VERSION` of benchmarks/peers/environment.py, in an environment of its own.

There, `sh install.sh WHEELS FOLDER` makes the environment in FOLDER/.venv from the folder of wheels alone.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import click

from benchmarks import jobs, setting
from hvd_cifar.errors import UserError
from hvd_cifar.files import replace_text
from hvd_cifar.kernels.compiled import LIBRARY

MOST_BYTES = 64 * 2**20
OURS = ("hvd_cifar", "horovod")  # built here
INSTALL = """#!/bin/sh
# sh install.sh WHEELS FOLDER: an environment in FOLDER/.venv, of a folder of wheels and this archive.
set -eu
here=$(cd "$(dirname "$0")" && pwd) wheels=$(cd "$1" && pwd) folder=$2
mkdir -p "$folder" && cp -r "$here/checkout/." "$folder"
cd "$folder" && python3 -m venv .venv
.venv/bin/pip install --no-index --no-deps --find-links "$wheels" -r "$here/wheels.txt"
tar -xf "$here/built.tar" -C .venv
site=$(.venv/bin/python -c "import site; print(site.getsitepackages()[0])")
echo "$PWD" >"$site/hvd_cifar.pth"
if [ -d "$site/nvidia/cusolver" ]; then ln -sf ../../cusolver/lib/libcusolver.so.11 "$site/nvidia/cusparse/lib/"; fi
correct="from pathlib import Path; from hvd_cifar.launch.install import open_mpi; open_mpi.correct(Path('.venv'))"
.venv/bin/python -c "$correct"
.venv/bin/python -m hvd_cifar.runtime.check_build
"""


def built_files() -> list[Path]:
    """Files below the environment that set-up has built: Horovod, and the libraries that this project compiles."""
    found = [
        Path(os.path.normpath(str(file.locate())))
        for file in metadata.files("horovod") or []
        if "__pycache__" not in str(file)
    ]
    library = Path(sys.prefix) / LIBRARY
    return [path for path in [*found, library] if path.exists()]


def wheels() -> list[str]:
    """Every installed package that is not built here, with its version."""
    names = {str(each.metadata["Name"]): each.version for each in metadata.distributions()}
    return sorted(f"{name}=={version}" for name, version in names.items() if name not in OURS)


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--output", type=Path, required=True, help="Folder for the archive and the list.")
@setting.one_line_for_users()
def main(output: Path) -> None:
    """Pack, and say what travels."""
    output.mkdir(parents=True, exist_ok=True)
    listed = "\n".join(wheels()) + "\n"
    replace_text(output / "wheels.txt", listed)
    names = subprocess.run(["git", "ls-files"], cwd=jobs.CHECKOUT, capture_output=True, text=True, check=True)
    built = io.BytesIO()
    with tarfile.open(fileobj=built, mode="w") as inner:
        for path in built_files():
            inner.add(path, path.relative_to(sys.prefix))
    archive = output / "hvd_cifar-gpu.tar.gz"
    with tarfile.open(archive, "w:gz") as outer:
        for name in names.stdout.splitlines():
            outer.add(jobs.CHECKOUT / name, Path("checkout", name))
        for name, content in (
            ("built.tar", built.getvalue()),
            ("wheels.txt", listed.encode()),
            ("install.sh", INSTALL.encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            outer.addfile(entry, io.BytesIO(content))
    size = archive.stat().st_size
    if size > MOST_BYTES:
        raise UserError(f"{archive} has {size / 2**20:.0f} MiB, more than {MOST_BYTES / 2**20:.0f}")
    print(f"{archive}: {size / 2**20:.1f} MiB; {output / 'wheels.txt'}: {len(listed.splitlines())} packages")


if __name__ == "__main__":
    main()
