#!/bin/sh
# Take out of an environment what building needed and running does not: slim.sh VENV.
# It leaves everything that can be imported, except build tools and the tests of packages.
set -eu

packages=$(echo "$1"/lib/python3*/site-packages)
"$1"/bin/python -m pip uninstall --yes --quiet cmake cffi pycparser wheel
rm -rf "$1"/set-up.log "$1"/wheels "$1"/include "$1"/share/man

# Headers: Horovod has been built with them. libclang: TensorFlow asks for it and never loads it. The data server:
# TensorBoard reads event files without it, only slower.
rm -rf "$packages"/tensorflow/include "$packages"/clang/native "$packages"/tensorboard_data_server/bin
# Compilers' wrappers of MPI.
rm -f "$1"/bin/mpicc "$1"/bin/mpicxx "$1"/bin/mpic++ "$1"/bin/mpiCC "$1"/bin/mpif* "$1"/bin/opal_wrapper
# Tests of packages that do not import them themselves (numpy.testing is no test).
for package in h5py matplotlib mpl_toolkits numpy opt_einsum; do
    find "$packages/$package" -type d -name tests -prune -exec rm -rf {} +
done

# Names that only a debugger reads, a fifth of TensorFlow. Other packages have little of them, and libraries that were
# put together with patchelf do not load any more after strip.
find "$packages/tensorflow" "$packages/horovod" -type f \( -name '*.so' -o -name '*.so.*' \) \
    -exec strip --strip-unneeded {} +

# Nothing is installed into an image.
"$1"/bin/python -m pip uninstall --yes --quiet pip
# Bytecode that is taken as it is: layers of images round files' times, by which Python would otherwise take half of it
# for old, and compile that again whenever a rank starts, since the image's user cannot write it down.
"$1"/bin/python -m compileall -q -f -j 0 --invalidation-mode unchecked-hash "$packages" || true
