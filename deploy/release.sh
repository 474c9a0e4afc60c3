#!/usr/bin/env bash
# Packs what users install: deploy/release.sh OUT [PROGRAM]
#
# Without PROGRAM the program is built first, against glibc 2.28 by `cargo zigbuild`
# (`pip install ziglang cargo-zigbuild`). OUT gets kvd-VERSION-linux-ARCH.tar.gz and SHA256SUMS.
# The archive is the same, byte by byte, for the same program and commit.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?deploy/release.sh OUT [PROGRAM]}
program=${2:-}
arch=$(uname -m)
if [ -z "$program" ]; then
    target=$arch-unknown-linux-gnu
    cargo zigbuild --profile dist -p kvd --no-default-features --target "$target.2.28"
    program=target/$target/dist/kvd
fi

# A program that needs a later glibc than it says does not start on older systems.
needs=$(objdump -T "$program" | grep -o 'GLIBC_2\.[0-9]*' | sort -uV | tail -1)
version=$("$program" --version | cut -d' ' -f2)
name=kvd-$version-linux-$arch
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/$name
mkdir -p "$root"/{bin,share/man/man1,share/doc/kvd,share/kvd}
install -m 755 "$program" "$root/bin/kvd"
strip "$root/bin/kvd"
"$program" man-pages "$root/share/man/man1" >/dev/null
for shell in bash zsh fish; do
    "$program" completions "$shell" >"$root/share/kvd/completions.$shell"
done
"$program" config --print-default >"$root/share/kvd/kvd.toml"
"$program" dashboard >"$root/share/kvd/grafana-dashboard.json"
cp deploy/prometheus/alerts.yml deploy/systemd/kvd.service deploy/systemd/kvd.sysusers.conf "$root/share/kvd/"
cp README.md CHANGELOG.md LICENSE* docs/operating.md docs/contract.md docs/threat-model.md "$root/share/doc/kvd/"

# One time and one owner for all files, names in order.
mkdir -p "$out"
date=$(git log -1 --format=%ct)
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$date" -C "$work" -cf - "$name" |
    gzip -9n >"$out/$name.tar.gz"
(cd "$out" && sha256sum "$name.tar.gz" >SHA256SUMS)
echo "$out/$name.tar.gz: needs ${needs:-no glibc}"
