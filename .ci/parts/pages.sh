# The alerts, what docs/python shows, a page of metrics as Prometheus' own tool sees them, and the web
# page in a browser.
# guards: deploy/prometheus docs/python tests/python tests/page proto crates/kvd/src
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
[ "$page" = 0 ] || exit "$page"
if has chromium chromium; then
    target/python/bin/python tests/page/check.py target/debug/kvd "$(command -v chromium)"
else
    lacking "web page: chromium cannot be installed"
fi
