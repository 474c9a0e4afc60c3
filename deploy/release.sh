#!/usr/bin/env bash
# Packs what users install: deploy/release.sh [--arch x86_64|aarch64] OUT [PROGRAM]
#
# PROGRAM must have the features below: the list of crates is of those. Without it the program is built,
# against glibc 2.28 by `cargo zigbuild` (`pip install ziglang cargo-zigbuild`). A program of another
# architecture than this machine's runs under qemu, to write its own manual (Debian: `qemu-user`, and
# for aarch64 `gcc-aarch64-linux-gnu`). OUT gets kvd-VERSION-linux-ARCH.tar.gz, where there is
# dpkg-deb a Debian package, a list of all crates inside (CycloneDX, by
# `cargo install cargo-cyclonedx`), and SHA256SUMS. All are the same, byte by byte, for the same
# program and commit.
set -euo pipefail
cd "$(dirname "$0")/.."
arch=$(uname -m)
if [ "${1:-}" = --arch ]; then
    arch=${2:?--arch x86_64 or --arch aarch64}
    shift 2
fi
case $arch in
    x86_64) debian=amd64 ;;
    aarch64) debian=arm64 ;;
    *) echo "no release is made for $arch" >&2; exit 2 ;;
esac
out=${1:?deploy/release.sh [--arch ARCH] OUT [PROGRAM]}
program=${2:-}
runner=() tools=
if [ "$arch" != "$(uname -m)" ]; then
    runner=("qemu-$arch" -L "/usr/$arch-linux-gnu") tools=$arch-linux-gnu-
fi
# With the demo and its model: whoever unpacks the archive can try it.
features=(--no-default-features --features eval,remote)
cargo cyclonedx --version >/dev/null 2>&1 || {
    echo "the list of crates is made by cargo-cyclonedx: cargo install cargo-cyclonedx" >&2
    exit 1
}
if [ -z "$program" ]; then
    target=$arch-unknown-linux-gnu
    cargo zigbuild --profile dist -p kvd "${features[@]}" --target "$target.2.28"
    program=target/$target/dist/kvd
fi

run() { "${runner[@]}" "$program" "$@"; }
run demo --help >/dev/null || { echo "$program has no demo: build it with ${features[*]}" >&2; exit 1; }
for url in redis://host s3://bucket file:///folder; do
    env -u KVD_CONFIG "${runner[@]}" "$program" config --set "cache.remote.url=$url" >/dev/null || {
        echo "$program cannot be released: build it with ${features[*]}" >&2
        exit 1
    }
done
# A program that needs a later glibc than it says does not start on older systems.
needs=$("${tools}objdump" -T "$program" | grep -o 'GLIBC_2\.[0-9]*' | sort -uV | tail -1)
version=$(run --version | cut -d' ' -f2)
name=kvd-$version-linux-$arch
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/$name
mkdir -p "$root"/{bin,share/man/man1,share/doc/kvd,share/kvd}
install -m 755 "$program" "$root/bin/kvd"
"${tools}strip" "$root/bin/kvd"
run man-pages "$root/share/man/man1" >/dev/null
for shell in bash zsh fish; do
    run completions "$shell" >"$root/share/kvd/completions.$shell"
done
run config --print-default >"$root/share/kvd/kvd.toml"
run dashboard >"$root/share/kvd/grafana-dashboard.json"
cp deploy/prometheus/alerts.yml deploy/systemd/kvd.service deploy/systemd/kvd.sysusers.conf "$root/share/kvd/"
docs=(README.md CHANGELOG.md docs/operating.md docs/contract.md docs/threat-model.md)
cp LICENSE* "${docs[@]}" "$root/share/doc/kvd/"
# Links to what lies beside them in one folder, and plain words where that is not packed.
for file in "${docs[@]##*/}"; do
    perl -0pi -e '
        s{\]\((?:docs/)?((?:README|CHANGELOG|operating|contract|threat-model)\.md(?:#[^)]*)?)\)}{](\1)}g;
        s{!?\[([^][]*)\]\((?!https?:|#|(?:README|CHANGELOG|operating|contract|threat-model)\.md)[^)]*\)}{$1}g;
    ' "$root/share/doc/kvd/$file"
done

# One time and one owner for all files, names in order.
mkdir -p "$out"
rm -f "$out"/SHA256SUMS
date=$(git log -1 --format=%ct)
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$date" -C "$work" -cf - "$name" |
    gzip -9n >"$out/$name.tar.gz"
made=("$name.tar.gz")

if command -v dpkg-deb >/dev/null; then
    deb=$work/deb
    mkdir -p "$deb"/{DEBIAN,etc/kvd,usr/bin,usr/lib/systemd/system,usr/lib/sysusers.d}
    mkdir -p "$deb"/usr/share/{bash-completion/completions,fish/vendor_completions.d}
    mkdir -p "$deb"/usr/share/zsh/vendor-completions
    cp "$root/bin/kvd" "$deb/usr/bin/"
    cp -r "$root"/share/{man,doc} "$deb/usr/share/"
    gzip -9n "$deb"/usr/share/man/man1/*.1
    sed 's|/usr/local/|/usr/|g' "$root/share/kvd/kvd.service" >"$deb/usr/lib/systemd/system/kvd.service"
    cp "$root/share/kvd/kvd.sysusers.conf" "$deb/usr/lib/sysusers.d/kvd.conf"
    cp "$root/share/kvd/kvd.toml" "$deb/etc/kvd/kvd.toml"
    cp "$root/share/kvd/completions.bash" "$deb/usr/share/bash-completion/completions/kvd"
    cp "$root/share/kvd/completions.fish" "$deb/usr/share/fish/vendor_completions.d/kvd.fish"
    cp "$root/share/kvd/completions.zsh" "$deb/usr/share/zsh/vendor-completions/_kvd"
    echo /etc/kvd/kvd.toml >"$deb/DEBIAN/conffiles"
    cat >"$deb/DEBIAN/control" <<EOF
Package: kvd
Version: $version
Architecture: $debian
Maintainer: the kvd developers <kvd@localhost>
Section: net
Priority: optional
Depends: libc6 (>= ${needs#GLIBC_}), libgcc-s1, systemd
Description: KV-cache memory daemon
 Keeps the KV caches of language models compressed and computes attention over them.
EOF
    # The unit is not started: it serves as soon as its operator says so.
    printf '#!/bin/sh\nset -e\n%s\n%s\n' 'systemd-sysusers kvd.conf' \
        'if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi' >"$deb/DEBIAN/postinst"
    find "$deb" -type d -exec chmod 755 {} + -o -type f -exec chmod 644 {} +
    chmod 755 "$deb/DEBIAN/postinst" "$deb/usr/bin/kvd"
    SOURCE_DATE_EPOCH=$date dpkg-deb --root-owner-group -Zxz --build "$deb" \
        "$out/kvd_${version}_$debian.deb" >/dev/null
    made+=("kvd_${version}_$debian.deb")
fi
# Of the commit and not of the folder: it is written beside each crate, with that folder's path.
mkdir "$work/source"
git archive HEAD Cargo.toml Cargo.lock crates xtask tests kernels proto | tar -x -C "$work/source"
(
    cd "$work/source"
    SOURCE_DATE_EPOCH=$date cargo cyclonedx --quiet --manifest-path crates/kvd/Cargo.toml --format json \
        --spec-version 1.5 "${features[@]}" --target "$arch-unknown-linux-gnu" --override-filename kvd.cdx
)
sed "s|file://$work/source|file://.|g" "$work/source/crates/kvd/kvd.cdx.json" >"$out/$name.cdx.json"
made+=("$name.cdx.json")
(cd "$out" && sha256sum "${made[@]}" >SHA256SUMS)
echo "$out: ${made[*]}; needs ${needs:-no glibc}"
