"""Whether Horovod, TensorFlow, mpi4py and MPI of an environment work together: a program that set-up runs there.

    python hvd_cifar/runtime/check_build.py [--gpu]

It ends with one line and code 1 where they do not. It imports nothing of this package, so that it can be run by path.
"""

from __future__ import annotations

import sys

import mpi4py


def main() -> None:
    """Import TensorFlow and Horovod, and check Horovod's build; `--gpu` requires NCCL."""
    # mpi4py would start MPI when it is imported; here only the library's version is needed.
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    import horovod.runner.launch  # noqa: F401 - what horovodrun starts with
    import horovod.tensorflow as hvd
    from mpi4py import MPI

    library = MPI.Get_library_version()
    print(library)
    wanted = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built()}
    if "--gpu" in sys.argv:
        wanted["NCCL"] = hvd.nccl_built()
    missing = [name for name, built in wanted.items() if not built]
    if missing:
        sys.exit("error: Horovod was built without " + ", ".join(missing))
    if "Open MPI v4" not in library:
        sys.exit("error: mpi4py loads another MPI: " + library)


if __name__ == "__main__":
    main()
