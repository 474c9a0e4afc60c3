# A real Prometheus with the shipped rules scrapes a daemon under load, and every query of the
# dashboard has an answer that load moves. Every alert fires in its scenario, and clears.
# guards: deploy/prometheus deploy/grafana tests/prometheus tests/python crates/kvd/src/metrics
# guards: crates/kvd/src/dashboard
# guards: crates/kvd/src/service/stats.rs crates/kvd/src/admin
set -euo pipefail
source .ci/lib.sh
{ has prometheus prometheus && has promtool prometheus; } ||
    { lacking "prometheus: Debian's package cannot be installed"; exit; }
python=target/python/bin/python
if ! "$python" -c "import numpy" 2>/dev/null; then
    { python3 -m venv target/python && "$python" -m pip install --quiet numpy; } ||
        { lacking prometheus: numpy cannot be installed; exit; }
fi
linted cargo build --workspace --quiet --bin kvd
"$python" tests/prometheus/check.py target/debug/kvd "$(command -v prometheus)" "$(command -v promtool)"
"$python" tests/prometheus/alerts.py target/debug/kvd "$(command -v prometheus)"
