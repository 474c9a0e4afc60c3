# Unit tests of crates without I/O under Miri, which finds undefined behaviour. Searches over whole
# number ranges are left out or cut short there.
# guards: crates/kvd-core crates/kvd-store crates/kvd-codec
set -euo pipefail
source .ci/lib.sh
nightly=nightly
rustup toolchain install --profile minimal --component miri,rust-src "$nightly" >/dev/null 2>&1 ||
    { lacking miri: a nightly compiler with it cannot be installed; exit; }
export MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=2
cargo "+$nightly" miri test -p kvd-core -p kvd-store --lib
