# Releases for aarch64, made on x86-64: the same archive, package and list of crates. Their program
# starts under qemu, serves, and needs no later glibc than 2.28.
# guards: deploy/release.sh
# limit: 2400
set -euo pipefail
source .ci/lib.sh
[ "$(uname -m)" = x86_64 ] || { skipped "release-aarch64: cross-compiles from x86-64"; exit; }
{ has qemu-aarch64 qemu-user && has aarch64-linux-gnu-objdump binutils-aarch64-linux-gnu &&
    { [ -e /usr/aarch64-linux-gnu/lib/libgcc_s.so.1 ] || apt-get install --yes --quiet libgcc-s1-arm64-cross >/dev/null; } &&
    rustup target add aarch64-unknown-linux-gnu; } ||
    { lacking "release-aarch64: qemu, binutils or a target for aarch64 cannot be installed"; exit; }
zig=$PWD/target/zig
if ! "$zig/bin/cargo-zigbuild" --version >/dev/null 2>&1; then
    { python3 -m venv "$zig" && "$zig/bin/python" -m pip install --quiet ziglang cargo-zigbuild; } ||
        { lacking "release-aarch64: ziglang and cargo-zigbuild cannot be installed"; exit; }
fi
export PATH=$zig/bin:$PWD/target/cyclonedx/bin:$PATH
cargo cyclonedx --version >/dev/null 2>&1 ||
    cargo install --quiet --locked --debug --root target/cyclonedx cargo-cyclonedx@0.5.9 ||
    { lacking release-aarch64: cargo-cyclonedx cannot be installed; exit; }
features=$(sed -n 's/^features=(\(.*\))$/\1/p' deploy/release.sh)
# shellcheck disable=SC2086 # one word a flag
CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 cargo zigbuild --quiet --package kvd --bin kvd $features \
    --target aarch64-unknown-linux-gnu.2.28
out=$PWD/target/released-aarch64
rm -rf "$out"
deploy/release.sh --arch aarch64 "$out" target/aarch64-unknown-linux-gnu/debug/kvd
(cd "$out" && sha256sum --check --quiet SHA256SUMS)
mkdir "$out/unpacked"
tar -xzf "$out"/kvd-*-linux-aarch64.tar.gz -C "$out/unpacked"
program=$(echo "$out"/unpacked/kvd-*/bin/kvd)
readelf -h "$program" | grep -q 'Machine: *AArch64'
needs=$(readelf -V "$program" | grep -o 'GLIBC_2\.[0-9]*' | sort -uV | tail -1)
[ "$(printf '%s\n' "$needs" GLIBC_2.28 | sort -V | tail -1)" = GLIBC_2.28 ] || { echo "needs $needs"; exit 1; }
[ ! -f "$out"/kvd_*.deb ] || [ "$(dpkg-deb --field "$out"/kvd_*.deb Architecture)" = arm64 ]
emulated=(env -i "$(command -v qemu-aarch64)" -L /usr/aarch64-linux-gnu "$program")
"${emulated[@]}" --version
# On a socket of its own, whose name is short enough.
place=$(mktemp -d)
"${emulated[@]}" serve --unix "$place/kvd.sock" --set server.listen_tcp= --set admin.listen= --pool "64 MiB" \
    >"$out/log" 2>&1 &
daemon=$!
trap 'kill "$daemon" 2>/dev/null || true; rm -rf "$place"' EXIT
for _ in $(seq 120); do
    "${emulated[@]}" health --endpoint "unix:$place/kvd.sock" >/dev/null 2>&1 && break
    kill -0 "$daemon" 2>/dev/null || { cat "$out/log"; exit 1; }
    sleep 1
done
"${emulated[@]}" health --endpoint "unix:$place/kvd.sock" || { cat "$out/log"; exit 1; }
