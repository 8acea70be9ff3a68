"""`python -m hvd_cifar`."""

from hvd_cifar.cli import main

main()
