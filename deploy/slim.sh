#!/bin/sh
# slim.sh VENV: removes from an environment what only building needs.
# Everything stays importable, except build tools and the tests of packages.
set -eu

packages=$(echo "$1"/lib/python3*/site-packages)
"$1"/bin/python -m pip uninstall --yes --quiet cmake cffi patch-ng pycparser wheel
rm -rf "$1"/set-up.log "$1"/wheels "$1"/include "$1"/share/man

# Headers: only the build of Horovod needs them. libclang: TensorFlow requires the package and never loads the library.
# The data server: TensorBoard reads event files without it, but more slowly.
rm -rf "$packages"/tensorflow/include "$packages"/clang/native "$packages"/tensorboard_data_server/bin
# MPI's compiler wrappers.
rm -f "$1"/bin/mpicc "$1"/bin/mpicxx "$1"/bin/mpic++ "$1"/bin/mpiCC "$1"/bin/mpif* "$1"/bin/opal_wrapper
# Tests that their own packages do not import (numpy.testing stays, since others import it).
for package in h5py matplotlib mpl_toolkits numpy opt_einsum; do
    find "$packages/$package" -type d -name tests -prune -exec rm -rf {} +
done

# Symbols that only a debugger reads, a fifth of TensorFlow. Other packages have few, and libraries that patchelf has
# changed do not load after strip.
find "$packages/tensorflow" "$packages/horovod" -type f \( -name '*.so' -o -name '*.so.*' \) \
    -exec sh -c 'for file; do strip --strip-unneeded -o "$file.slim" "$file" && mv "$file.slim" "$file"; done' _ {} +

# pip itself: nothing is installed into a finished image.
"$1"/bin/python -m pip uninstall --yes --quiet pip
# Compile bytecode that Python does not compare with its source's time (unchecked-hash). Image layers round these times.
# Python would take half of the bytecode for stale, and compile it again at each start of a rank, since the image's user
# cannot save it.
"$1"/bin/python -m compileall -q -f -j 0 --invalidation-mode unchecked-hash "$packages" || true
