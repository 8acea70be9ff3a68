"""Whether Horovod, TensorFlow, mpi4py and MPI of an environment work together: a program that set-up runs there.

    python hvd_cifar/runtime/check_build.py [--gpu]

It ends with one line and code 1 where they do not. It imports nothing of this package, so that it can be run by path.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

import mpi4py

# What TensorFlow opens before it uses a GPU, by TensorFlow's names.
CUDA_LIBRARIES = ("CudaRuntime", "Cublas", "CublasLt", "Cufft", "Cusolver", "Cusparse", "Cudnn")
OK = 1  # the bits of an absl::Status without an error


def main() -> None:
    """Import TensorFlow and Horovod, and check Horovod's build; `--gpu` requires NCCL and CUDA's libraries."""
    # mpi4py would start MPI when it is imported; here only the library's version is needed.
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    import horovod.runner.launch  # noqa: F401 - what horovodrun starts with
    import horovod.tensorflow as hvd
    from mpi4py import MPI

    print(library := MPI.Get_library_version())
    if "Open MPI v4" not in library:
        sys.exit("error: mpi4py loads another MPI: " + library)
    if not (hvd.mpi_built() and hvd.gloo_built() and (hvd.nccl_built() or "--gpu" not in sys.argv)):
        sys.exit("error: Horovod was built without MPI, Gloo or NCCL")
    if "--gpu" in sys.argv and platform.machine() == "x86_64":  # `opens` calls as this processor's compilers do
        check_cuda()


def check_cuda() -> None:
    """Check that TensorFlow opens CUDA's libraries, without which it uses no GPU. Needs neither a driver nor a GPU."""
    import tensorflow as tf

    library = ctypes.CDLL(str(Path(tf.__file__).parent / "libtensorflow_framework.so.2"))
    if unopened := [name for name in CUDA_LIBRARIES if not opens(name, library)]:
        sys.exit("error: TensorFlow cannot open these libraries, and would use no GPU: " + ", ".join(unopened))
    print("TensorFlow opens all of CUDA's libraries")


def opens(name: str, library: ctypes.CDLL) -> bool:
    """Whether TensorFlow opens one of CUDA's libraries.

    It calls `absl::StatusOr<void*> tsl::internal::DsoLoader::Get{name}DsoHandle()` of TensorFlow 2.21.
    """
    function = f"Get{name}DsoHandle"
    get_handle = library[f"_ZN3tsl8internal9DsoLoader{len(function)}{function}Ev"]
    get_handle.argtypes, get_handle.restype = [ctypes.c_void_p], None  # the result is written to the first argument
    status_and_handle = (ctypes.c_uint64 * 2)()
    get_handle(status_and_handle)
    return status_and_handle[0] == OK


if __name__ == "__main__":
    main()
