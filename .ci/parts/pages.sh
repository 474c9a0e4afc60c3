# The alerts, what docs/python shows, and a page of metrics as Prometheus' own tool sees them.
# guards: deploy/prometheus docs/python tests/python proto crates/kvd/src
set -euo pipefail
source .ci/lib.sh
if has promtool prometheus; then
    promtool check rules deploy/prometheus/alerts.yml
    promtool test rules deploy/prometheus/alerts.test.yml
else
    lacking "alerts: promtool (Debian's package prometheus) cannot be installed"
fi
linted cargo build --workspace --quiet --bin kvd
page=0
tests/python/run.sh || page=$?
[ "$page" != 75 ] || { lacking Python pages: numpy and grpcio cannot be installed; exit; }
exit "$page"
