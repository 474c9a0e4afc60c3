"""Tokens and TLS: who is known, who is refused, and that no token is told."""

import hashlib
import shutil
import subprocess

import numpy as np
import pytest
from conftest import SETTINGS

import kvd

TOKEN = "kvd_a-secret-of-this-test"


def make_certificates(folder):
    """An authority, and certificates of it for localhost and for a client."""
    openssl = shutil.which("openssl") or pytest.skip("SKIP tls: no openssl")

    def run(*arguments):
        subprocess.run([openssl, *arguments], check=True, capture_output=True, cwd=folder)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    run(
        "req", "-x509", *key, "-subj", "/CN=ca", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem"
    )
    for name in ("localhost", "client"):
        (folder / f"{name}.ext").write_text(f"subjectAltName=DNS:{name}\n")
        run("req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    pytest.importorskip("grpc")
    folder = tmp_path_factory.mktemp("doors")
    make_certificates(folder)
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    (folder / "principals.toml").write_text(
        '[[principals]]\nname = "token"\nnamespaces = ["default"]\nroles = ["use"]\n'
        f'tokens = ["sha256:{digest}"]\n'
        '[[principals]]\nname = "certificate"\nnamespaces = ["default"]\nroles = ["use"]\n'
        'certificates = ["dns:client"]\n'
    )
    settings = {
        **SETTINGS,
        "access.principals": str(folder / "principals.toml"),
        "server.tls_certificate": str(folder / "localhost.pem"),
        "server.tls_key": str(folder / "localhost.key"),
        "server.tls_client_ca": str(folder / "ca.pem"),
        "server.tls_client_required": "false",
    }
    with kvd.serve(pool="64 MiB", settings=settings) as running:
        port = running.address.rpartition(":")[2]
        yield running, f"https://localhost:{port}", folder


def use(client):
    """A call that needs the role, and one through a stream."""
    with client:
        model = client.model("m", kvd.Geometry(1, 1, 64), dtype="f32", codec="raw")
        with model.open() as sequence:
            rows = np.ones((3, 1, 64), "f4")
            sequence.store(0, rows, rows)
            assert sequence.load(0)[0].shape == (3, 1, 64)


def test_a_token_or_a_certificate_lets_a_client_in(guarded):
    _, target, folder = guarded
    ca = folder / "ca.pem"
    use(kvd.connect(target, ca=ca, token=TOKEN))
    use(kvd.connect(target, ca=str(ca), cert=folder / "client.pem", key=folder / "client.key"))


def test_others_are_refused_and_no_token_is_told(guarded):
    running, target, folder = guarded
    ca, stranger = folder / "ca.pem", "kvd_of-nobody"
    for options, error in [
        ({"ca": ca}, kvd.Unauthenticated),
        ({"ca": ca, "token": stranger}, kvd.Unauthenticated),
        ({"ca": ca, "token": TOKEN, "namespace": "other"}, kvd.NamespaceDenied),
        # The daemon's certificate is of an authority that the system does not know.
        ({"token": TOKEN, "timeout": 5}, kvd.Disconnected),
        ({"ca": ca, "cert": folder / "client.pem"}, kvd.InvalidArgument),
        ({"ca": ca, "token": "two\nlines"}, kvd.InvalidArgument),
        ({"ca": ca, "token": ""}, kvd.InvalidArgument),
    ]:
        with pytest.raises(error) as raised:
            kvd.connect(target, **options)
        told = str(raised.value)
        assert TOKEN not in told and stranger not in told and "lines" not in told
    with pytest.raises(kvd.InvalidArgument, match="https://"):
        kvd.connect(running.unix, ca=ca)
    with pytest.raises(kvd.InvalidArgument, match="known by its user"):
        kvd.connect(running.region, token=TOKEN)
    # By the Unix socket a token does as well.
    use(kvd.connect(running.unix, token=TOKEN))
    connected = kvd.connect(running.unix, token=TOKEN)
    assert TOKEN not in repr(connected.options)
    connected.close()


def test_a_quota_is_an_error_of_its_own():
    with (
        kvd.serve(
            pool="64 MiB",
            settings={**SETTINGS, "namespaces.quotas": '["default: sequences=1, models=1"]'},
        ) as running,
        running.connect() as client,
    ):
        model = client.model("m", kvd.Geometry(1, 1, 64), dtype="f32", codec="raw")
        with model.open(), pytest.raises(kvd.QuotaExceeded, match="has 1 of the 1") as raised:
            model.open()
        assert raised.value.retryable and raised.value.retry_after > 0
        with pytest.raises(kvd.QuotaExceeded, match="models") as raised:
            client.model("n", kvd.Geometry(1, 1, 64), dtype="f32", codec="raw")
        assert not raised.value.retryable and raised.value.retry_after is None
