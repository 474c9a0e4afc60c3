#!/usr/bin/env bash
# Runs the scripts of docs/python as its README says to, against a daemon with defaults. The binary
# is $KVD, else target/debug/kvd; the packages are installed into target/python once.
# Exit code 75: the packages cannot be installed here.
set -euo pipefail
cd "$(dirname "$0")/../.."
kvd=${KVD:-target/debug/kvd}
python=target/python/bin/python
packages=(numpy grpcio grpcio-tools grpcio-reflection gguf safetensors tokenizers)
has_packages() {
    "$python" -c "import numpy, grpc, grpc_tools, grpc_reflection, gguf, safetensors, tokenizers" 2>/dev/null
}
if ! has_packages; then
    { python3 -m venv target/python && "$python" -m pip install --quiet "${packages[@]}"; } || exit 75
fi

work=$(mktemp -d)
daemon=
stop() {
    if [ -n "$daemon" ]; then kill "$daemon" 2>/dev/null || true; wait "$daemon" 2>/dev/null || true; fi
    rm -rf "$work"
}
trap stop EXIT
# Ports that the system chooses are said in the log.
"$kvd" serve --listen 127.0.0.1:0 --admin 127.0.0.1:0 --unix "$work/kvd.sock" --set log.format=json \
    >"$work/log" 2>&1 &
daemon=$!
address=
for _ in $(seq 200); do
    address=$(grep -o '"tcp":"[^"]*' "$work/log" | grep -o '127\.0\.0\.1:[0-9]*' || true)
    [ -n "$address" ] && break
    kill -0 "$daemon" || { cat "$work/log"; exit 1; }
    sleep 0.1
done
[ -n "$address" ] || { echo "the daemon does not say where it listens:"; cat "$work/log"; exit 1; }

run() { echo "-- $*" >&2; "$python" "$@"; }
run docs/python/kvd_attend.py --address "$address"
run docs/python/kvd_attend.py --address "unix:$work/kvd.sock" --codec fp8
run docs/python/reflect.py --address "$address" | tee "$work/reflected"
grep -qE '^out: \[([^] ]+ *){4}\] expected: \[([^] ]+ *){4}\]' "$work/reflected"
for script in kvd_attend reflect; do # without a daemon: a line, no traceback
    ! "$python" "docs/python/$script.py" --address 127.0.0.1:1 2>"$work/said" || exit 1
    [[ "$(cat "$work/said")" == "no daemon at 127.0.0.1:1: "* ]] || { cat "$work/said"; exit 1; }
done
run docs/python/table_drift.py --help >/dev/null
KVD=$(realpath "$kvd") run docs/python/test_gguf_model.py
# A page of metrics that has everything on it, as Prometheus' own tool sees it.
if command -v promtool >/dev/null; then
    admin=$(grep -o '"admin":"[^"]*' "$work/log" | grep -o '127\.0\.0\.1:[0-9]*')
    run tests/python/loaded_page.py "$address" "$admin" >"$work/page"
    grep -q '^kvd_compression_ratio{' "$work/page"
    promtool check metrics <"$work/page"
fi
