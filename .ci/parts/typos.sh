# Misspelt words in code and prose; _typos.toml lists the words that are meant.
# guards: .
set -euo pipefail
source .ci/lib.sh
typos=target/typos/bin/typos
if ! [ -x "$typos" ]; then
    { python3 -m venv target/typos && target/typos/bin/pip install --quiet typos==1.52.0; } ||
        { lacking typos: the package typos cannot be installed; exit; }
fi
"$typos"
