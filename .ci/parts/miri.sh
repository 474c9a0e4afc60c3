# Unit tests of kvd-core and kvd-store under Miri, which finds undefined behaviour. Those of kvd-codec
# take too long for every run: `cargo +nightly miri test -p kvd-codec --lib`, with these variables.
# guards: crates/kvd-core crates/kvd-store
set -euo pipefail
source .ci/lib.sh
nightly=nightly
cargo "+$nightly" miri --version >/dev/null 2>&1 ||
    rustup toolchain install --profile minimal --component miri,rust-src "$nightly" ||
    { lacking miri: a nightly compiler with it cannot be installed; exit; }
# Searches over whole number ranges are cut short.
export MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=2
cargo "+$nightly" miri test -p kvd-core -p kvd-store --lib
