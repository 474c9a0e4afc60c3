# Functions of .ci/run and its parts. Sourced, from the repository's root.

# Deep parts, cheapest first.
deep_parts() { echo typos licenses release chart pages prometheus python remote split fuzz kernels transformers candle sglang lmcache vllm nvrtc release-aarch64 miri cross sanitizers; }

# The paths that a part guards: the line "# guards: ..." at the head of its file.
guards_of() { sed -n 's/^# guards: //p' ".ci/parts/$1.sh"; }

# The seconds after which a part is ended.
limit_of() {
    local limit
    limit=$(sed -n 's/^# limit: //p' ".ci/parts/$1.sh")
    echo "${limit:-900}"
}

# The commit at which a part was last green; nothing where none is known.
green_of() { awk -v part="$1" '$1 == part { print $2 }' .ci/green; }

# Why a part is due; nothing where it is not.
why_due() {
    local commit changed
    commit=$(green_of "$1")
    if [ -z "$commit" ]; then
        echo "no green run is known"
    elif ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
        echo "its last green commit $commit is not in this clone"
    else
        # shellcheck disable=SC2046 # one word a path
        changed=$(git diff --name-only "$commit" -- $(guards_of "$1") ".ci/parts/$1.sh")
        [ -z "$changed" ] || echo "$(wc -l <<<"$changed") files changed since $commit, $(head -1 <<<"$changed") first"
    fi
}

# On a runner with a network a step that cannot be done is a failure.
is_strict() { [ -n "${KVD_REQUIRE_KERNELS:-}" ] || { [ -n "${CI:-}" ] && [ "${KVD_CI_OFFLINE:-0}" != 1 ]; }; }

# A step is not done, and says so at the end: `skipped NAME: REASON`.
skipped() { echo "SKIP $*" | tee -a "${CI_SKIPS:-/dev/null}"; }

# The same for want of a download that a runner with a network has to reach.
lacking() {
    if is_strict; then echo "FAILED $*"; return 1; fi
    skipped "$@"
}

# Makes sure of a program from a Debian package: `has PROGRAM PACKAGE...`.
has() {
    local program=$1
    shift
    command -v "$program" >/dev/null && return
    { apt-get update --quiet && apt-get install --yes --quiet "$@"; } >/dev/null 2>&1 || return 1
    command -v "$program" >/dev/null
}

# What is compiled is linted: clippy's driver is the compiler of the workspace's members, so that
# nothing is compiled once for lints and once more to be run. Warnings are errors. A clean clone has
# nothing to be incremental with, and a panic names its line without debug information.
linted() {
    CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 RUSTC_WORKSPACE_WRAPPER=$(rustup which clippy-driver) \
        CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__ "$@"
}

# The README's test command, or some tests by name. By name and not by package: all is built with
# the features that the required part has built it with.
tested() { linted cargo test --no-fail-fast --workspace "$@"; }

# The repository's chores, as `tested` has built them.
xtask() { linted cargo build --workspace --quiet --bin xtask && target/debug/xtask "$@"; }

# Tests of the Python client by $python; their totals as cargo says its own, for the count at the end.
pytested() {
    local log status=0
    log=$(mktemp)
    "$python" -m pytest --quiet --disable-warnings "$@" 2>&1 | tee "$log" || status=$?
    tr -d , <"$log" | awk '/^[0-9]+ (passed|failed|skipped|errors?) / {
            for (i = 1; i < NF; i++) count[$(i + 1)] += $i
        }
        END {
            failed = count["failed"] + count["error"] + count["errors"]
            print "test result:", "pytest", count["passed"] + 0, "passed;", failed + 0, "failed;",
                count["skipped"] + 0, "ignored"
        }'
    rm -f "$log"
    return "$status"
}
