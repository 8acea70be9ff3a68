"""`python -m hvd_cifar.launch`, which run.sh starts with the environment's Python."""

import sys

from hvd_cifar import cli
from hvd_cifar.launch import launcher
from hvd_cifar.reporting import terminal

terminal.open_streams()
sys.exit(launcher.main(sys.argv[1:], cli.check))
