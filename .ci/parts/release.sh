# What is released: packed twice from one program, the same bytes. Unpacked, and from nothing else, links
# between its pages lead somewhere and the demo runs, as it does in an image of the archive. The list of
# crates holds every crate that cargo compiles into a released program.
# guards: deploy/release.sh deploy/Dockerfile.release deploy/systemd Cargo.lock crates/*/Cargo.toml crates/kvd-eval/src/demo
# guards: crates/kvd/src/cli/demo.rs crates/kvd-engine/src/assets.rs
# limit: 1800
set -euo pipefail
source .ci/lib.sh
export PATH=$PWD/target/cyclonedx/bin:$PATH
if ! cargo cyclonedx --version >/dev/null 2>&1; then
    # A debug build: it runs for seconds, and would be compiled for minutes.
    cargo install --quiet --locked --debug --root target/cyclonedx cargo-cyclonedx@0.5.9 ||
        { lacking release: cargo-cyclonedx cannot be installed; exit; }
fi
linted cargo build --workspace --quiet --bin kvd --features kvd/remote-s3
out=$PWD/target/released
rm -rf "$out"
for packed in first second; do
    deploy/release.sh "$out/$packed" target/debug/kvd
done
diff "$out/first/SHA256SUMS" "$out/second/SHA256SUMS"
(cd "$out/first" && sha256sum --check --quiet SHA256SUMS)
# In an empty folder and without an environment, as on a machine that has nothing of ours.
mkdir "$out/empty"
tar -xzf "$out"/first/kvd-*.tar.gz -C "$out/empty"
(
    cd "$out"/empty/kvd-*/share/doc/kvd
    grep -oh '\](\([^)]*\))' ./*.md | sed 's/^](//; s/)$//; s/#.*//' | sort -u | while read -r target; do
        case $target in "" | http*) continue ;; esac
        [ -e "$target" ] || { echo "a page in the archive links to $target, which it lacks"; exit 1; }
    done
    grep -q '](operating.md' README.md
)
(
    cd "$out/empty"
    env -i kvd-*/bin/kvd --version
    env -i kvd-*/bin/kvd demo --codec kivi-4 --passages 1 --tokens 8 >demo
    grep -q '^ *kivi-4 ' demo || { cat demo; exit 1; }
)
[ ! -f "$out"/first/kvd_*.deb ] || dpkg-deb --info "$out"/first/kvd_*.deb >/dev/null
arch=$(uname -m)
features=$(sed -n 's/^features=(\(.*\))$/\1/p' deploy/release.sh)
# shellcheck disable=SC2086 # one word a flag
cargo tree --package kvd $features --target "$arch-unknown-linux-gnu" \
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
assert any(crate.startswith("candle-core ") for crate in crates), "no engine of the demo"
unlicensed = [one["name"] for one in components if not one.get("licenses")]
assert not unlicensed, f"crates without a license: {unlicensed}"
print(f"{len(components)} components, {len(crates)} compiled in")
CHECK
# The image, by a builder without a daemon, on the libraries that the program asks for and nothing else.
has buildah buildah || { lacking "release: buildah (Debian's package) cannot be installed"; exit; }
images=$(mktemp -d)
builder=(buildah --root "$images/stored" --runroot "$images/run" --storage-driver vfs)
trap '"${builder[@]}" rm --all >/dev/null 2>&1 || true; rm -rf "$images"' EXIT
base=$("${builder[@]}" from scratch)
root=$("${builder[@]}" mount "$base")
ldd target/debug/kvd | grep -o '/[^ ]*' | while read -r library; do
    install -D "$library" "$root$library"
done
mkdir --mode 1777 "$root/tmp"
"${builder[@]}" umount "$base" >/dev/null
"${builder[@]}" commit --quiet "$base" localhost/base >/dev/null
"${builder[@]}" build --quiet --format docker --build-arg BASE=localhost/base --build-arg "ARCH=$arch" \
    --file deploy/Dockerfile.release --tag localhost/kvd "$out/first" >/dev/null
image=$("${builder[@]}" from localhost/kvd)
"${builder[@]}" run --isolation chroot "$image" -- \
    /usr/local/bin/kvd demo --codec kivi-4 --passages 1 --tokens 8 >"$out/demo"
grep -q '^ *kivi-4 ' "$out/demo" || { cat "$out/demo"; exit 1; }
