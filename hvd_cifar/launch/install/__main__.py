"""`python3 -m hvd_cifar.launch.install`, or this file by its path from anywhere."""

import sys
from pathlib import Path

OLDEST, NEWEST = (3, 10), (3, 13)  # for which there is TensorFlow 2.21


def main() -> int:
    """Refuse an unsupported Python, in syntax that older ones can parse; then set up."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        this = "%d.%d" % sys.version_info[:2]  # noqa: UP031
        sys.stderr.write(
            "hvd_cifar: Python %s (%s) has no TensorFlow 2.21, which needs 3.10 to 3.13; name another: "  # noqa: UP031
            "PYTHON=python3.12 ./run.sh\n" % (this, sys.executable)
        )
        return 2
    # Python puts this file's folder first when the file is run by its path; imports need the checkout.
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    from hvd_cifar.launch.install.installer import main as install

    return install(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
