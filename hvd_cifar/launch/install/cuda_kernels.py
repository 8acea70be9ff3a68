"""Compile Horovod's CUDA kernels to PTX with NVRTC, which comes with TensorFlow: a program that Horovod's build runs.

    python cuda_kernels.py SITE_PACKAGES FOLDER

FOLDER has Horovod's cuda_kernels.cu; cuda_kernels_ptx.h is written into it. No toolkit, driver or GPU is needed. It
imports nothing of this package, so that it can be run by path.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

# Every GPU since Pascal takes code for it: the driver compiles PTX for the GPU that there is.
ARCHITECTURE = "compute_60"
# NVRTC writes its own version, which drivers of its age or newer take. The kernels need nothing newer than Pascal; this
# is the version of CUDA 12.0 and driver 525.
PTX_VERSION = "8.0"
INTEGERS = ("uint8_t", "int8_t", "int32_t", "int64_t")
# Type of the values, and of the factor.
SCALED = {**dict.fromkeys(INTEGERS, "double"), "__half": "__half", "float": "float", "double": "double"}
# The name that cuda_kernels.cc launches it by, and the C++ expression.
KERNELS = {
    "batched_memcpy": "batched_memcpy_k<8>",
    "scale_buffer_half2": "scale_buffer_half2_k",
    **{f"scale_buffer {of}": f"scale_buffer_k<{of}, {factor}>" for of, factor in SCALED.items()},
    **{f"batched_scaled_memcpy {of}": f"batched_scaled_memcpy_k<{of}, 8, {factor}>" for of, factor in SCALED.items()},
}
HEADERS = (
    "nvidia/cuda_runtime/include",
    "nvidia/cuda_nvcc/include",
    "tensorflow/include/external/cuda_cccl/libcudacxx/include",
)


class Nvrtc:
    """NVRTC's functions, by ctypes. Each raises RuntimeError where NVRTC reports an error."""

    def __init__(self, packages: Path) -> None:
        """Load the library of the package nvidia-cuda-nvrtc-cu12."""
        self._library = ctypes.CDLL(str(packages / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> None:
        """Call a function."""
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self._library.nvrtcGetErrorString(code).decode()}")

    def text(self, what: str, program: ctypes.c_void_p) -> str:
        """What the program has: its `PTX` or its `ProgramLog`."""
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, text)
        return text.value.decode()


def compile_kernels(packages: Path, source: Path) -> tuple[str, dict[str, str]]:
    """The PTX of cuda_kernels.cu, and the name in it of each of KERNELS."""
    nvrtc, program = Nvrtc(packages), ctypes.c_void_p()
    nvrtc.call("nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    expressions = {name: f"horovod::common::{expression}".encode() for name, expression in KERNELS.items()}
    for expression in expressions.values():
        nvrtc.call("nvrtcAddNameExpression", program, expression)
    folders = [source.parent, *(packages / folder for folder in HEADERS)]
    words = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", *(f"--include-path={folder}" for folder in folders)]
    options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    try:
        nvrtc.call("nvrtcCompileProgram", program, len(words), options)
    finally:
        print(nvrtc.text("ProgramLog", program))
    entries = {}
    for name, expression in expressions.items():
        lowered = ctypes.c_char_p()
        nvrtc.call("nvrtcGetLoweredName", program, expression, ctypes.byref(lowered))
        entries[name] = (lowered.value or b"").decode()
    ptx, count = re.subn(r"(?m)^\.version .*$", f".version {PTX_VERSION}", nvrtc.text("PTX", program))
    if count != 1:
        raise RuntimeError(f"the PTX has {count} lines .version")
    return ptx, entries


def header(ptx: str, entries: dict[str, str]) -> str:
    """The C++ header that cuda_kernels.cc includes."""
    pairs = "".join(f'    {{"{name}", "{entry}"}},\n' for name, entry in entries.items())
    return (
        f'static const char CUDA_KERNELS_PTX[] = R"PTX({ptx})PTX";\n'
        f"static const std::unordered_map<std::string, const char*> CUDA_KERNELS_ENTRIES = {{\n{pairs}}};\n"
    )


def main() -> None:
    """Write the header."""
    packages, folder = map(Path, sys.argv[1:])
    (folder / "cuda_kernels_ptx.h").write_text(header(*compile_kernels(packages, folder / "cuda_kernels.cu")))


if __name__ == "__main__":
    main()
