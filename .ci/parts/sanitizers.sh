# Overruns and races of kernels, planted ones too, show under sanitizers alone. kernels/README.md
# says what runs under which.
# guards: kernels crates/kvd-emu crates/kvd-cuda crates/kvd-testkit
# limit: 1800
set -euo pipefail
source .ci/lib.sh
export KVD_REQUIRE_EMU=1 ASAN_OPTIONS=detect_leaks=0
all=()
for file in crates/kvd-emu/tests/*.rs; do all+=("$(basename "$file" .rs)"); done

# `under SANITIZER TEST... [-- ARGUMENT...]`
under() {
    local sanitizer=$1 names=()
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do names+=(--test "$1"); shift; done
    echo "-- $((SECONDS)) s: $sanitizer"
    KVD_EMU_SANITIZE=$sanitizer tested "${names[@]}" "$@"
}
under address,undefined "${all[@]}"
under thread planted store huffman exact late books bitalloc attend presets
under thread region -- --skip graphs::
under blocks planted region store
