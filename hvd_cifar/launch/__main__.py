"""`python -m hvd_cifar.launch`: what run.sh hands over to once the environment is set up."""

import sys

from hvd_cifar import cli
from hvd_cifar.launch import launcher

sys.exit(launcher.main(sys.argv[1:], cli.check))
