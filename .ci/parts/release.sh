# What is released: packed twice from one program, the same bytes; unpacked, its program starts and
# its list of crates holds every crate that cargo compiles into a released program.
# guards: deploy/release.sh deploy/systemd Cargo.lock crates/*/Cargo.toml
set -euo pipefail
source .ci/lib.sh
export PATH=$PWD/target/cyclonedx/bin:$PATH
if ! cargo cyclonedx --version >/dev/null 2>&1; then
    # A debug build: it runs for seconds, and would be compiled for minutes.
    cargo install --quiet --locked --debug --root target/cyclonedx cargo-cyclonedx@0.5.9 ||
        { lacking release: cargo-cyclonedx cannot be installed; exit; }
fi
linted cargo build --workspace --quiet --bin kvd
out=$PWD/target/released
rm -rf "$out"
for packed in first second; do
    deploy/release.sh "$out/$packed" target/debug/kvd
done
diff "$out/first/SHA256SUMS" "$out/second/SHA256SUMS"
(cd "$out/first" && sha256sum --check --quiet SHA256SUMS)
tar -xzf "$out"/first/kvd-*.tar.gz -C "$out"
"$out"/kvd-*/bin/kvd --version
[ ! -f "$out"/first/kvd_*.deb ] || dpkg-deb --info "$out"/first/kvd_*.deb >/dev/null
arch=$(uname -m)
cargo tree --package kvd --no-default-features --features remote --target "$arch-unknown-linux-gnu" \
    --edges normal,build --prefix none --format '{p}' | sed 's/ (.*//' | sort -u >"$out/compiled"
python3 - "$out/compiled" "$out"/first/kvd-*.cdx.json <<'CHECK'
import json, sys

with open(sys.argv[1]) as compiled, open(sys.argv[2]) as listed:
    crates = set(compiled.read().splitlines())
    bom = json.load(listed)
components = bom["components"] + [bom["metadata"]["component"]]
lacking = crates - {f"{one['name']} v{one['version']}" for one in components}
assert not lacking, f"crates that the list lacks: {sorted(lacking)}"
assert len(crates) > 100, crates
unlicensed = [one["name"] for one in components if not one.get("licenses")]
assert not unlicensed, f"crates without a license: {unlicensed}"
print(f"{len(components)} components, {len(crates)} compiled in")
CHECK
