# Licenses, sources, bans and known faults of all dependencies (deny.toml).
# guards: deny.toml Cargo.lock Cargo.toml crates/*/Cargo.toml
set -euo pipefail
source .ci/lib.sh
if ! cargo deny --version >/dev/null 2>&1; then
    # A debug build: it runs for seconds, and would be compiled for minutes.
    cargo install --quiet --locked --debug cargo-deny ||
        { lacking licenses: cargo-deny cannot be installed; exit; }
fi
cargo deny check licenses bans sources
# The list of known faults is a repository and no package: runners that reach registries alone
# cannot have it, and skip it aloud.
if cargo deny fetch db 2>/dev/null; then
    cargo deny check advisories
else
    skipped advisories: their database cannot be downloaded
fi
