# Miri, an interpreter that sees undefined behaviour, runs the tests with unsafe code that it can.
# In: kvd-shm, the memory that a hostile worker shares: mappings, words, records, rings. A mapping
# has no file there, and what needs one, or descriptors sent over a socket, is left out by its test.
# Out: kvd-cuda, kvd-emu (a driver, kernels in C++), kvd-c (most calls need a daemon and sockets),
# kvd-compute (instruction sets, which its tests hold to portable code). The other crates forbid
# unsafe code.
# guards: crates/kvd-shm
set -euo pipefail
source .ci/lib.sh
nightly=nightly
cargo "+$nightly" miri --version >/dev/null 2>&1 ||
    rustup toolchain install --profile minimal --component miri,rust-src "$nightly" ||
    { lacking miri: a nightly compiler with miri cannot be installed; exit; }
# Rings look at the clock. A region's bytes are read as words and as bytes, on which Miri's model of
# weak memory panics; `ring_model` holds orders to that of C11. Stacked borrows, the default, notes
# every reference to each byte of a region and is many times slower.
export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-disable-weak-memory-emulation -Zmiri-tree-borrows"
cargo "+$nightly" miri test --package kvd-shm --lib --test region --test ring
