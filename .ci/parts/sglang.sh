# SGLang's storage classes on a daemon of this commit, on the CPU: its factory, host pool and the
# controller's calls. Its engine does not run there. torch is a download of 3 GB.
# guards: clients/python/src clients/python/tests_sglang proto crates/kvd/src/transport crates/kvd/src/service
# limit: 1800
set -euo pipefail
source .ci/lib.sh
linted cargo build --workspace --quiet --bin kvd
export KVD_BINARY=$PWD/target/debug/kvd
venv=$PWD/target/python-sglang
python=$venv/bin/python
install_sglang() {
    python3 -m venv "$venv" && "$python" -m pip install --quiet uv || return
    local pip=("$venv/bin/uv" pip install --quiet --python "$python")
    "${pip[@]}" torch==2.13.0 torchvision && "${pip[@]}" --no-deps sglang==0.5.23 || return
    # Of what it requires, that which its storage classes import; most of the rest drives GPUs.
    "$python" -c '
import re
from importlib.metadata import requires
needed = """aiohttp apache-tvm-ffi compressed-tensors einops fastapi gguf IPython msgspec numba numpy
    orjson packaging pillow prometheus-client psutil pybase64 pydantic pyzmq requests scipy
    sentencepiece setproctitle tqdm transformers uvicorn uvloop xxhash zstandard""".split()
for line in requires("sglang"):
    if "extra ==" not in line and re.match("[A-Za-z0-9_-]+", line)[0] in needed:
        print(line)
' >"$venv/requires.txt"
    "${pip[@]}" -r "$venv/requires.txt" dill pytest pytest-timeout
}
loads='import pytest, pytest_timeout, sglang.srt.managers.cache_controller'
if ! "$python" -c "$loads" 2>/dev/null; then
    install_sglang && "$python" -W ignore -c "$loads" ||
        { lacking sglang: SGLang cannot be installed; exit; }
fi
"$python" -m pip install --quiet --no-deps --force-reinstall clients/python
# What was tested is what the page names.
"$venv/bin/uv" pip list --quiet --python "$python" | grep -E "^(torch|sglang) "
pytested clients/python/tests_sglang
