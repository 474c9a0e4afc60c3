#!/usr/bin/env python3
"""Lints the chart, renders it with sets of values by Helm itself, and holds what comes out against the
schemas of five versions of Kubernetes and, with a program of kvd, against its settings.

    python3 deploy/helm/check.py [KVD [OPERATORS.json]]

Packages: helm-python-sdk, kubernetes-validate, pyyaml. What is for operators of the cluster is written to
the second file, for operators.mjs.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import tomllib

import helm_python
import kubernetes_validate
import yaml

CHART = pathlib.Path(__file__).parent / "kvd"
KUBERNETES = ["1.33", "1.34", "1.35", "1.36", "1.37"]
# Kinds of operators, which are no part of Kubernetes: (group, fields that they must have).
OPERATORS = {
    "PodMonitor": ("monitoring.coreos.com/v1", {"selector", "podMetricsEndpoints"}),
    "Certificate": ("cert-manager.io/v1", {"secretName", "issuerRef", "dnsNames"}),
}
TLS = {
    "enabled": True,
    "clientCA": True,
    "admin": True,
    "certManager": {"enabled": True, "issuerRef": {"name": "corp"}, "dnsNames": ["kvd.corp"]},
}
# Each set, and the kinds that it renders beside ConfigMap, Service, NetworkPolicy and the workload.
GOOD = {
    "open": ({"insecure": True}, set()),
    "guarded": (
        {
            "access": {"principalsSecret": "kvd-principals", "metrics": "role"},
            "tls": TLS,
            "podMonitor": {"enabled": True, "tokenSecret": {"name": "scraper", "key": "token"}},
            "networkPolicy": {"metrics": [{"namespaceSelector": {}}]},
        },
        {"PodMonitor", "Certificate"},
    ),
    "node-disk": (
        {
            "insecure": True,
            "disk": {"enabled": True, "hostPath": "/srv/kvd", "sizeGiB": 400},
            "sockets": {"hostPath": "/run/kvd"},
            "config": {"server": {"grace_period_ms": 5000}, "cache.disk": {"sync_ms": 50}},
        },
        set(),
    ),
    "stateful": (
        {
            "kind": "StatefulSet",
            "replicas": 3,
            "tls": TLS | {"admin": False},
            "disk": {"enabled": True, "storageClassName": "fast"},
            "podDisruptionBudget": {"enabled": True},
            "remote": {
                "url": "redis://kvd@redis:6379",
                "macKeySecret": "kvd-mac",
                "passwordSecret": "kvd-redis",
            },
            "memory": {"poolGiB": 64, "inflightGiB": 2, "overheadGiB": 3},
            "namespaces": {"allowed": ["team-a"], "quotas": ["team-a: pool_bytes=2 GiB"]},
        },
        {"PodDisruptionBudget", "Certificate"},
    ),
    "gpu": (
        {
            "insecure": True,
            "gpu": {"enabled": True, "shareWithEngines": True},
            "sockets": {"hostPath": "/run/kvd"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "cpu": {"limit": "8"},
        },
        set(),
    ),
}
# Each set, and a part of the reason why it is refused.
BAD = [
    ({}, "nobody is asked who comes in"),
    ({"insecure": True, "podDisruptionBudget": {"enabled": True}}, "StatefulSet"),
    ({"insecure": True, "config": {"device": {"pool_bytes": "1 GiB"}}}, "config.device.pool_bytes"),
    ({"insecure": True, "access": {"metrics": "role"}}, "access.principalsSecret"),
    ({"insecure": True, "tls": {"admin": True}}, "tls.enabled"),
    ({"insecure": True, "tls": {"enabled": True, "certManager": {"enabled": True}}}, "issuerRef"),
    ({"insecure": True, "memory": {"poolGiB": "16"}}, "poolGiB"),
    ({"insecure": True, "kind": "Deployment"}, "kind"),
]


def render(values: dict) -> list[dict]:
    """Manifests of a release, as the API server would get them."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="kvd", namespace="serving")
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    return [part for text in texts for part in yaml.safe_load_all(text) if part]


def check_operator_kind(manifest: dict) -> None:
    version, fields = OPERATORS[manifest["kind"]]
    assert manifest["apiVersion"] == version, manifest
    assert fields <= manifest["spec"].keys(), manifest


def check_memory(values: dict, container: dict) -> None:
    """The limit is the pool in memory and the limits beside it."""
    memory = {"poolGiB": 16, "inflightGiB": 1, "overheadGiB": 1} | values.get("memory", {})
    if values.get("gpu", {}).get("enabled"):
        memory["poolGiB"] = 0
    expected = f"{sum(memory.values())}Gi"
    found = container["resources"]["limits"]["memory"]
    assert found == expected == container["resources"]["requests"]["memory"], (found, expected)


def check_mounts(pod: dict, settings: dict) -> None:
    """Every file that the settings name is below a mount, and every mount has its volume."""
    mounts = pod["containers"][0]["volumeMounts"]
    paths = [mount["mountPath"] for mount in mounts]
    for file in filter(lambda text: text.startswith("/"), flat(settings)):
        assert any(file.startswith(path + "/") for path in paths), (file, paths)


def flat(settings: dict) -> list[str]:
    """All texts of settings."""
    texts = []
    for value in settings.values():
        if isinstance(value, dict):
            texts += flat(value)
        elif isinstance(value, str):
            texts.append(value)
    return texts


def check_settings(text: str, kvd: str | None) -> dict:
    """The configuration as the daemon reads it."""
    settings = tomllib.loads(text)
    if kvd:
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(text)
            file.flush()
            read = subprocess.run([kvd, "config", "--config", file.name], capture_output=True, text=True)
        assert read.returncode == 0, f"kvd refuses the settings: {read.stderr}\n{text}"
    return settings


def check_set(name: str, values: dict, further: set[str], kvd: str | None) -> list[dict]:
    """Checks what a set renders; its manifests for operators."""
    manifests = render(values)
    workload = values.get("kind", "DaemonSet")
    kinds = {manifest["kind"] for manifest in manifests}
    assert kinds == {"ConfigMap", "Service", "NetworkPolicy", workload} | further, (name, kinds)
    assert len(kinds) == len(manifests), name
    for manifest in manifests:
        if manifest["kind"] in OPERATORS:
            check_operator_kind(manifest)
            continue
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)
    by_kind = {manifest["kind"]: manifest for manifest in manifests}
    spec = by_kind[workload]["spec"]
    pod = spec["template"]["spec"]
    settings = check_settings(by_kind["ConfigMap"]["data"]["kvd.toml"], kvd)
    check_memory(values, pod["containers"][0])
    check_mounts(pod, settings)
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    claimed = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
    assert mounted == claimed | {volume["name"] for volume in pod["volumes"]}, (name, mounted)
    labels = spec["template"]["metadata"]["labels"].items()
    assert spec["selector"]["matchLabels"].items() <= labels, name
    assert by_kind["Service"]["spec"]["selector"].items() <= labels, name
    return [manifest for manifest in manifests if manifest["kind"] in OPERATORS]


def main() -> None:
    kvd, operators = (sys.argv[1:] + [None, None])[:2]
    report = helm_python.lint(CHART, {"insecure": True}, strict=True)
    found = [message for message in report["messages"] if message["severity"] >= 2]
    assert not found, found
    of_operators = []
    for name, (values, further) in GOOD.items():
        of_operators += check_set(name, values, further, kvd)
        print(f"chart {name}: valid for Kubernetes {', '.join(KUBERNETES)}")
    for values, part in BAD:
        try:
            render(values)
        except helm_python.HelmError as error:
            assert part in str(error), (values, error)
        else:
            raise AssertionError(f"rendered: {values}")
    print(f"chart: {len(BAD)} wrong sets of values refused")
    if operators:
        pathlib.Path(operators).write_text(json.dumps(of_operators))
    if not kvd:
        print("chart: no program of kvd was given, so that its settings were not read by it")


main()
