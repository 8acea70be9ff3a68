"""`python -m hvd_cifar.launch`: run.sh starts it in the environment that is set up."""

import sys

from hvd_cifar import cli
from hvd_cifar.launch import launcher
from hvd_cifar.reporting import terminal

terminal.open_streams()
sys.exit(launcher.main(sys.argv[1:], cli.check))
