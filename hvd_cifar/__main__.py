"""`python -m hvd_cifar`, and the program `hvd_cifar` that pip installs."""

import sys

from hvd_cifar.import_path import set_import_path

PACKAGES = ("horovod", "keras", "mpi4py", "tensorflow")


def main() -> None:
    """Run a command as one rank; with the launcher's options before it, as `-np 2`, start its ranks."""
    set_import_path()
    word = next(iter(sys.argv[1:]), "")
    try:
        if word == "python" or (word.startswith("-") and word not in ("-h", "--help", "--version")):
            from hvd_cifar.launch.__main__ import main as command
        else:
            from hvd_cifar.cli import main as command
        command()
    except ModuleNotFoundError as missing:
        package = str(missing.name).partition(".")[0]
        if package not in PACKAGES:
            raise
        line = f"hvd_cifar: this environment has no {package}: install hvd_cifar[cpu] or hvd_cifar[gpu]"
        print(line, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
