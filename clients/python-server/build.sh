#!/usr/bin/env bash
# Builds the wheel into dist/, with the binary $KVD_BINARY or, where there is none, a release build.
# Needs the Python package `build`. The wheel runs where glibc is as new as that of this machine.
set -euo pipefail
cd "$(dirname "$0")"
if [ -z "${KVD_BINARY:-}" ]; then
    cargo build --release --package kvd --bin kvd --features remote-s3
    KVD_BINARY=$(cargo metadata --format-version 1 --no-deps |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')/release/kvd
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install -m 755 "$KVD_BINARY" "$work/kvd"
strip "$work/kvd"
python=${PYTHON:-python3} isolation=()
! "$python" -c "import hatchling" 2>/dev/null || isolation=(--no-isolation)
KVD_BINARY=$work/kvd "$python" -m build --wheel "${isolation[@]}" --outdir "${1:-dist}"
