"""Clients that send a Unix socket's path as `:authority`."""

import pytest

import kvd


@pytest.mark.parametrize("options", [[], [("grpc.default_authority", "/run/kvd/kvd.sock")]])
def test_a_path_as_authority_is_served(options):
    """grpcio with its own settings, which sends `%2F…`, and a client that sends the path."""
    grpc = pytest.importorskip("grpc")
    with (
        kvd.serve(pool="64 MiB") as server,
        grpc.insecure_channel(server.unix, options=options) as channel,
    ):
        call = channel.unary_unary("/kvd.v1.Kvd/GetServerInfo")
        # The second request refers to the headers of the first.
        answers = [call(b"", timeout=20) for _ in range(3)]
        with server.connect() as client:
            assert all(client.boot_id.encode() in answer for answer in answers)
