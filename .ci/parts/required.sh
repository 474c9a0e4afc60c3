# Format, lints, house rules, generated code and the README's test command, of one build.
# limit: 2400
set -euo pipefail
source .ci/lib.sh
rustup component add rustfmt clippy >/dev/null 2>&1 || true
step() { echo "-- $((SECONDS)) s: $*"; }

step format
cargo fmt --all --check
step build and lints
tested --no-run
step house rules and generated code
xtask tidy
xtask gen --check
step tests and doc tests
# The kernels run on the CPU here, or this fails.
KVD_REQUIRE_EMU=1 tested
