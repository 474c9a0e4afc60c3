# The example of an engine on candle, on a daemon of this commit: tokens equal to those of stock
# transformers. torch is a download of 3 GB.
# guards: examples/candle crates/kvd-client/src proto crates/kvd/src/transport
# limit: 1800
set -euo pipefail
source .ci/lib.sh
linted cargo build --workspace --quiet --bin kvd
export KVD_BINARY=$PWD/target/debug/kvd
venv=$PWD/target/python-transformers
python=$venv/bin/python
if ! "$python" -c "import torch, transformers, numpy" 2>/dev/null; then
    { python3 -m venv "$venv" && "$python" -m pip install --quiet uv &&
        "$venv/bin/uv" pip install --quiet --python "$python" numpy torch transformers; } ||
        { lacking candle: torch and transformers cannot be installed; exit; }
fi
"$python" -m pip install --quiet --no-deps clients/python
cargo fmt --check --manifest-path examples/candle/Cargo.toml
export CARGO_TARGET_DIR=$PWD/target
linted cargo build --quiet --locked --manifest-path examples/candle/Cargo.toml
"$python" examples/candle/compare.py target/debug/kvd-candle
