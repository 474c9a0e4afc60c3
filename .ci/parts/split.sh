# The fixture's bits go where errors cost most, and lose less there on text that no fit saw: a minute
# of the model's work, too long for the required part.
# guards: crates/kvd-codec crates/kvd-fit crates/kvd-eval crates/kvd-engine
set -euo pipefail
source .ci/lib.sh
tested --test split -- --ignored
