"""`python -m hvd_cifar.launch`, which run.sh starts with the environment's Python."""

import sys

try:
    from hvd_cifar.import_path import set_import_path

    set_import_path()

    from hvd_cifar import cli
    from hvd_cifar.launch import launcher
    from hvd_cifar.reporting import terminal
except KeyboardInterrupt:  # they take some tenths of a second
    sys.exit(130)

terminal.open_streams()
sys.exit(launcher.main(sys.argv[1:], cli.check))
