# LMCache's own engine on a daemon of this commit, on the CPU: chunks bit by bit, restarts, damage,
# daemons that end. torch is a download of 3 GB.
# guards: clients/python/src clients/python/tests_lmcache proto crates/kvd/src/transport crates/kvd/src/service
# limit: 1800
set -euo pipefail
source .ci/lib.sh
linted cargo build --workspace --quiet --bin kvd
export KVD_BINARY=$PWD/target/debug/kvd
venv=$PWD/target/python-lmcache
python=$venv/bin/python
install_lmcache() {
    python3 -m venv "$venv" && "$python" -m pip install --quiet uv || return
    local pip=("$venv/bin/uv" pip install --quiet --python "$python")
    # Without what drives GPUs and stores of clouds, which the plug-in and its tests never load.
    "${pip[@]}" torch==2.13.0 && "${pip[@]}" --no-deps lmcache==0.5.6 || return
    "$python" -c '
import re
from importlib.metadata import requires
for line in requires("lmcache"):
    if "extra ==" not in line and not re.match("torch|cu|nvtx|awscrt|google|pytest|redis", line):
        print(line)
' >"$venv/requires.txt"
    "${pip[@]}" -r "$venv/requires.txt" pytest pytest-timeout
}
if ! "$python" -c "import torch, lmcache.v1.cache_engine, pytest, pytest_timeout" 2>/dev/null; then
    install_lmcache || { lacking lmcache: LMCache cannot be installed; exit; }
fi
"$python" -m pip install --quiet --no-deps --force-reinstall clients/python
# What was tested is what the page names.
"$venv/bin/uv" pip list --quiet --python "$python" | grep -E "^(torch|lmcache) "
pytested clients/python/tests_lmcache
