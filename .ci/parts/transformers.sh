# Stock transformers on a daemon of this commit: tokens equal to stock, codecs by KL, daemons that
# end. torch is a download of 3 GB.
# guards: clients/python/src clients/python/tests_transformers proto crates/kvd/src/transport
# limit: 1800
set -euo pipefail
source .ci/lib.sh
linted cargo build --workspace --quiet --bin kvd
export KVD_BINARY=$PWD/target/debug/kvd
venv=$PWD/target/python-transformers
python=$venv/bin/python
if ! "$python" -c "import torch, transformers, pytest, pytest_timeout" 2>/dev/null; then
    { python3 -m venv "$venv" && "$python" -m pip install --quiet uv &&
        "$venv/bin/uv" pip install --quiet --python "$python" \
            numpy grpcio pytest pytest-timeout torch transformers; } ||
        { lacking transformers: torch and transformers cannot be installed; exit; }
fi
"$python" -m pip install --quiet --no-deps clients/python
# What was tested is what the page names.
"$venv/bin/uv" pip list --quiet --python "$python" | grep -E "^(torch|transformers) "
pytested clients/python/tests_transformers
