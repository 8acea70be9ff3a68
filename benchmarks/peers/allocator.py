"""glibc's allocator as PyTorch is fastest with it on a CPU."""

from __future__ import annotations

import os
import sys

# PyTorch asks for and returns its large buffers in every step; by default glibc hands them back to the kernel, which
# clears them page by page the next time. Here they are kept, and lie in huge pages where the kernel gives them.
VARIABLES = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**35),
    "MALLOC_TOP_PAD_": str(2**27),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def keep_memory() -> None:
    """Start this program again with these variables, which are read only at a start; what the user has set stays."""
    missing = {name: value for name, value in VARIABLES.items() if name not in os.environ}
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})
