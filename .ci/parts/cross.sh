# The daemon compiles for aarch64; the crates of formats and codecs, and attention's products of
# integers, pass there, under qemu.
# guards: crates/kvd-core crates/kvd-codec crates/kvd-fit crates/kvd-compute Cargo.lock
# limit: 1800
set -euo pipefail
source .ci/lib.sh
if has qemu-aarch64 qemu-user && has aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross &&
    rustup target add aarch64-unknown-linux-gnu; then
    xtask cross --quick
else
    lacking "cross: qemu, a compiler or a target for aarch64 cannot be installed"
fi
