#!/usr/bin/env bash
# Builds the wheel into dist/, with the binary $KVD_BINARY or, where there is none, a release build.
# Needs the Python package `build`. The wheel runs where glibc is as new as that of this machine.
set -euo pipefail
cd "$(dirname "$0")"
if [ -z "${KVD_BINARY:-}" ]; then
    cargo build --release --package kvd --bin kvd
    KVD_BINARY=$(cargo metadata --format-version 1 --no-deps |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')/release/kvd
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install -m 755 "$KVD_BINARY" "$work/kvd"
strip "$work/kvd"
KVD_BINARY=$work/kvd "${PYTHON:-python3}" -m build --wheel --outdir "${1:-dist}"
