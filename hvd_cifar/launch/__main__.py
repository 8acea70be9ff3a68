"""`python -m hvd_cifar.launch`, which run.sh starts with the environment's Python."""

import sys

from hvd_cifar.import_path import set_import_path


def main() -> None:
    """Start what the command line asks for, and end the process with the job's exit code."""
    set_import_path()
    try:
        from hvd_cifar import cli
        from hvd_cifar.launch import launcher
        from hvd_cifar.reporting import terminal
    except KeyboardInterrupt:  # they take some tenths of a second
        sys.exit(130)
    terminal.open_streams()
    sys.exit(launcher.main(sys.argv[1:], cli.check))


if __name__ == "__main__":
    main()
