"""What an import of the client brings with it."""

import subprocess
import sys


def test_kvd_imports_no_engine():
    program = (
        "import sys, kvd, kvd.vllm; kvd.vllm.transfer_settings('/r');"
        "found = {'torch', 'vllm', 'grpc', 'transformers', 'prometheus_client'} & set(sys.modules);"
        "sys.exit(repr(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
