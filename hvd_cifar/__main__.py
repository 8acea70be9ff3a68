"""`python -m hvd_cifar`."""

from hvd_cifar.import_path import set_import_path

set_import_path()

from hvd_cifar.cli import main  # noqa: E402 - only now the import path is right

main()
