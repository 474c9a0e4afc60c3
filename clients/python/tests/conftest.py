"""One daemon for all tests that do not end it: $KVD_BINARY, that of kvd-server, or kvd of PATH."""

import numpy as np
import pytest

import kvd

SETTINGS = {"device.threads": 1, "log.filter": "warn,kvd::daemon=info"}


@pytest.fixture(scope="session")
def server():
    with kvd.serve(pool="256 MiB", settings=SETTINGS) as running:
        yield running


@pytest.fixture(params=["region", "grpc"])
def client(server, request):
    if request.param == "region":
        with server.connect() as connected:
            yield connected
    else:
        pytest.importorskip("grpc")
        with kvd.connect(server.unix) as connected:
            yield connected


@pytest.fixture
def region_client(server):
    with server.connect() as connected:
        yield connected


@pytest.fixture
def rng(request):
    seed = abs(hash(request.node.name)) % 2**32
    print(f"seed {seed}")
    return np.random.default_rng(seed)
