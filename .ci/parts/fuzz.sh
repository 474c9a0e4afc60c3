# Each fuzz target for some seconds, from its corpus, with AddressSanitizer. What `cargo fuzz run`
# does, without having to compile cargo-fuzz first. Targets that need the daemon's crate, which
# takes minutes to build, run with KVD_FUZZ_DAEMON=1.
# guards: crates/kvd-core crates/kvd-codec crates/kvd-tier crates/kvd-testkit crates/kvd-proto crates/kvd-shm/src/ring
# guards: fuzz
set -euo pipefail
source .ci/lib.sh
nightly=nightly
cargo "+$nightly" --version >/dev/null 2>&1 || rustup toolchain install --profile minimal "$nightly" ||
    { lacking fuzz: a nightly compiler cannot be installed; exit; }
export RUSTFLAGS="--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
export ASAN_OPTIONS=detect_leaks=0
target=x86_64-unknown-linux-gnu
binaries=(page_decode spec_parse calibration_read record_read ring_record request_read)
features=()
if [ "${KVD_FUZZ_DAEMON:-0}" = 1 ]; then
    binaries+=(config_read admin_read)
    features=(--features daemon)
fi
cargo "+$nightly" build --manifest-path fuzz/Cargo.toml --target "$target" --release --bins \
    "${features[@]}"
for binary in "${binaries[@]}"; do
    # New inputs go beside the corpus, which is committed.
    found=$(mktemp -d)
    if ! "fuzz/target/$target/release/$binary" -max_total_time="${KVD_FUZZ_SECONDS:-20}" \
        -artifact_prefix=fuzz/ -print_final_stats=1 "$found" "fuzz/corpus/$binary" >"$found.log" 2>&1; then
        tail -60 "$found.log"
        exit 1
    fi
    echo "$binary: $(sed -n 's/^stat::number_of_executed_units: *//p' "$found.log") inputs"
    rm -rf "$found" "$found.log"
done
