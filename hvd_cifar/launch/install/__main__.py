"""`python3 -m hvd_cifar.launch.install`, or `python3 PATH/__main__.py` from any folder."""

import sys
from pathlib import Path

OLDEST, NEWEST = (3, 10), (3, 13)  # versions of Python that have TensorFlow 2.21


def main() -> int:
    """Refuse an unsupported Python, in syntax that older versions can parse. Then set up."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        this = "%d.%d" % sys.version_info[:2]  # noqa: UP031
        sys.stderr.write(
            "hvd_cifar: Python %s (%s) has no TensorFlow 2.21, which needs 3.10 to 3.13; name another: "  # noqa: UP031
            "PYTHON=python3.12 ./run.sh\n" % (this, sys.executable)
        )
        return 2
    if not sys.flags.isolated:  # Python puts the folder of a file that is run by path first
        del sys.path[0]
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from hvd_cifar.launch.install.installer import main as install

    return install(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
