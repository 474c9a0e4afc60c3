"""What is refused, by name, and whether LMCache's interface is the one that was tested."""

import inspect

import pytest
import torch
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

import kvd.lmcache


@pytest.mark.parametrize(
    ("options", "config", "said"),
    [
        ({"codek": "raw"}, {}, "codek"),
        ({"timeout_s": "5"}, {}, "timeout_s"),
        ({"region_mib": 0}, {}, "region_mib"),
        ({"region_mib": 1}, {}, "a chunk of this model needs 4 MiB"),
        ({"codec": "kivi-5"}, {}, "kivi-5"),
        ({"codec": "kvd-2"}, {}, "calibration"),
        ({"calibration": "/nowhere"}, {}, "/nowhere"),
        ({}, {"chunk_size": 100}, "multiple of 64"),
        ({}, {"use_layerwise": True}, "use_layerwise"),
        ({}, {"remote_serde": "cachegen"}, "remote_serde"),
        ({}, {"use_mla": True}, "MLA"),
        ({}, {"dtype": torch.uint8}, "uint8"),
    ],
)
def test_refused_by_name(engine, caplog, options, config, said):
    assert_refused(engine(options=options, **config), caplog, said)


def test_region_must_be_a_path(engine, caplog):
    assert_refused(engine(region="127.0.0.1:7070"), caplog, "listen_region")


def assert_refused(one, caplog, said):
    """LMCache logs why, and goes on without the store."""
    kinds = {type(backend).__name__ for backend in one.backends}
    assert "RemoteBackend" not in kinds
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any(said in message and "plugin kvd" in message for message in errors)


def test_overridden_methods_are_those_of_this_release():
    ours = kvd.lmcache.KvdConnector
    for name, method in vars(ours).items():
        if name.startswith("_") or not callable(method):
            continue
        theirs = getattr(RemoteConnector, name, None)
        assert theirs is not None, f"LMCache calls no {name}"
        assert list(inspect.signature(method).parameters) == list(
            inspect.signature(theirs).parameters
        ), name
        assert inspect.iscoroutinefunction(method) == inspect.iscoroutinefunction(theirs), name


def test_every_method_of_theirs_answers():
    ours, left = vars(kvd.lmcache.KvdConnector), []
    for name, method in vars(RemoteConnector).items():
        if callable(method) and not name.startswith("_") and name not in ours:
            left.append(name)
    # What LMCache asks `support_…` for first, what says nothing, and a helper of other connectors.
    assert sorted(left) == [
        "ping",
        "post_init",
        "reshape_partial_chunk",
        "support_batched_async_contains",
        "support_batched_get_non_blocking",
        "support_ping",
    ]
