# The Python client: lints, types, packaging, and its conformance with a daemon of this commit.
# guards: clients/python clients/python-server proto crates/kvd/src/transport crates/kvd/src/service
# limit: 900
set -euo pipefail
source .ci/lib.sh
linted cargo build --workspace --quiet --bin kvd
export KVD_BINARY=$PWD/target/debug/kvd
venv=$PWD/target/python-client
python=$venv/bin/python
if ! "$python" -c "import numpy, grpc, pytest, pytest_timeout, hatchling, mypy, ruff" 2>/dev/null; then
    { python3 -m venv "$venv" && "$python" -m pip install --quiet numpy grpcio pytest pytest-timeout \
        hatchling build ruff==0.17.6 mypy==2.4.1; } ||
        { lacking python: its packages cannot be installed; exit; }
fi
(cd clients/python && "$venv/bin/ruff" check . ../python-server && "$venv/bin/ruff" format --check . \
    ../python-server && "$venv/bin/mypy")
# Users install wheels, so the tests run on them: of the client alone and with the daemon's.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m build --no-isolation --wheel --outdir "$work" clients/python >/dev/null
"$python" -m pip install --quiet --no-deps --no-index --force-reinstall "$work"/kvd_client-*.whl
pytested clients/python/tests
PYTHON=$python clients/python-server/build.sh "$work" >/dev/null
"$python" -m pip install --quiet --no-deps --no-index --target "$work/site" "$work"/kvd_server-*.whl
[[ "$(PYTHONPATH=$work/site "$work/site/bin/kvd" --version)" == kvd\ * ]]
env -u KVD_BINARY PYTHONPATH="$work/site" "$python" -c '
import kvd
with kvd.serve(pool="64 MiB") as server:
    assert "site/kvd_server/bin" in server.binary, server.binary
'
