#!/usr/bin/env python3
"""A real Prometheus with the shipped configuration and rules scrapes a daemon under load.

    python3 tests/prometheus/check.py KVD PROMETHEUS PROMTOOL      # package: numpy

The page passes `promtool check metrics`; every rule evaluates and none fires while all is well; every query
of `kvd dashboard` is answered without an error, and with a number where the load makes one; a full pool
then fires its alert.
"""

import contextlib
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "clients/python/src"), str(ROOT / "tests/python")]
import kvd  # noqa: E402
from daemon_log import await_admin  # noqa: E402
from prometheus_server import Prometheus, get_text, prometheus, running  # noqa: E402

# Some scrapes of the shipped 5 s, and two evaluations of rules of its 15 s.
LOAD_SECONDS = 34
# What Grafana puts there for scrapes of 5 s: four of them.
RATE_INTERVAL = "20s"
# Codecs with windows and an error that is sampled, with a declared bound, with Huffman tables, and none.
CODECS = ["kivi-4", "k=fp8; v=fp8; k.bound=0.5; v.bound=0.5; recent=0", "kvcomp", "raw"]
GEOMETRY = kvd.Geometry(layers=2, kv_heads=2, head_dim_k=64)
TOKENS, BLOCK = 512, 16
POOL = "48 MiB"
SETTINGS = [
    "device.threads=1",
    "log.format=json",
    "namespaces.quotas=[\"default: sequences=1000\"]",
    "cache.disk.bytes=192 MiB",
    "cache.disk.segment_bytes=32 MiB",
    "cache.disk.reserve_free_bytes=1 MiB",
]
# What stays at 0 while all is well and nobody watches, pins, or has a GPU, and levels of a moment.
QUIET = """
kvd_requests_total kvd_open_streams kvd_transport_refusals_total kvd_inflight_bytes kvd_session_ends_total
kvd_session_sequences_closed_total kvd_queue_depth kvd_queued_stream_messages kvd_abandoned_jobs_total
kvd_merged_attends_total kvd_saved_block_passes_total kvd_gpu_launches_total kvd_gpu_graph_changes_total
kvd_pack_deferred_total kvd_fallback_pages_total kvd_over_bound_pages_total kvd_pinned_bytes kvd_leases
kvd_evict_blocked_total kvd_events_total kvd_event_resets_total kvd_tier_state kvd_reinserted_bytes_total
kvd_tier_write_drops_total kvd_tier_errors_total kvd_import_refused_total kvd_corrupt_records_total
kvd_recovered_blocks_total kvd_remote_state kvd_remote_found_blocks_total kvd_access_refusals_total
kvd_file_reloads_total kvd_insecure kvd_quota_refusals_total kvd_tier_queue_bytes kvd_durable_lag_seconds
""".split()


class Load:
    """Stores, attends, loads, publishes and finds again, by a client of a region."""

    def __init__(self, client: kvd.Client) -> None:
        self.client = client
        self.random = np.random.default_rng(5)
        models = enumerate(CODECS)
        self.models = [
            client.model(f"org/m{at}", GEOMETRY, dtype="f16", codec=codec, weights=b"w")
            for at, codec in models
        ]
        self.kept = [model.open() for model in self.models]
        self.rounds = 0

    def draw_rows(self) -> np.ndarray:
        return self.random.standard_normal((2, TOKENS, 2, 64)).astype(np.float16)

    def keys_of(self, number: int) -> kvd.Keys:
        return kvd.Keys.of([f"{number:06}-{at:06}".encode() for at in range(TOKENS // BLOCK)], BLOCK)

    def run_round(self) -> None:
        for model, kept in zip(self.models, self.kept, strict=True):
            rows = self.draw_rows()
            with model.open() as sequence:
                sequence.store_layers(rows, rows)
                sequence.publish(0, self.keys_of(self.rounds))
                query = self.random.standard_normal((1, 4, 64)).astype(np.float16)
                for layer in range(GEOMETRY.layers):
                    model.attend(layer, [sequence], query)
                    sequence.load(layer)
            if kept.length < 4 * TOKENS:
                kept.store_layers(rows, rows)
            # What was published a while ago comes back from the pool or from disk.
            keys = self.keys_of(max(0, self.rounds - 40))
            lease = model.match([keys], lease=30).lease_id
            with model.open(keys, lease_id=lease):
                pass
        self.rounds += 1

    def fill_pool(self) -> None:
        """Stores until there is no more room, and is refused for it."""
        model, rows = self.models[-1], self.draw_rows()
        held = []
        try:
            for _ in range(1000):
                held.append(model.open())
                held[-1].store_layers(rows, rows)
        except kvd.PoolFull:
            return
        finally:
            for sequence in held:
                sequence.close()
        raise AssertionError("a thousand sequences found room in the pool")


def fill_variables(expression: str) -> str:
    for name in ("job", "instance", "namespace", "model"):
        expression = expression.replace(f'"${name}"', '".*"')
    expression = expression.replace("$__rate_interval", RATE_INTERVAL)
    assert "$" not in expression, expression
    return expression


def check_panels(program: str, server: Prometheus) -> int:
    """Asks what the dashboard asks; how many queries that was."""
    text = subprocess.run([program, "dashboard"], check=True, capture_output=True, text=True).stdout
    panels = [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]
    silent, zero, asked = [], [], 0
    for panel in panels:
        for target in panel["targets"]:
            expression = fill_variables(target["expr"])
            numbers = [number for number in server.read_numbers(expression) if math.isfinite(number)]
            asked += 1
            if not numbers:
                silent.append(f"{panel['title']}: {expression}")
            elif not any(numbers) and not any(f"{name}{{" in expression for name in QUIET):
                zero.append(f"{panel['title']}: {expression}")
    assert not silent, "queries without a number under load:\n" + "\n".join(silent)
    assert not zero, "queries that load does not move:\n" + "\n".join(zero)
    return asked


def check_rules(server: Prometheus) -> int:
    """All shipped rules are loaded and evaluate, and nothing fires; how many there are."""
    groups = server.get_data("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    shipped = (ROOT / "deploy/prometheus/alerts.yml").read_text().count("- alert: ")
    assert len(rules) == shipped > 10, f"{len(rules)} of {shipped} rules are loaded"
    wrong = [(rule["name"], rule["health"]) for rule in rules if rule["health"] != "ok"]
    assert not wrong, f"rules that do not evaluate: {wrong}"
    assert not server.list_firing(), f"firing while all is well: {server.list_firing()}"
    return len(rules)


def await_alert(server: Prometheus, name: str) -> None:
    for _ in range(300):
        if any(name == alert for alert, _ in server.list_firing()):
            return
        time.sleep(0.2)
    raise TimeoutError(f"{name} does not fire: {server.get_data('alerts')}")


def main() -> None:
    program, server_program, promtool = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        (folder / "shared").mkdir()
        region = f"{folder}/region.sock"
        settings = [f"server.listen_region={region}", f"cache.disk.path={folder}/cache"]
        settings += [f"cache.remote.url=file://{folder}/shared", *SETTINGS]
        command = [program, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--pool", POOL]
        command += [part for setting in settings for part in ("--set", setting)]
        daemon = stack.enter_context(running(command, folder / "log"))
        admin = await_admin(daemon, folder / "log")
        server = stack.enter_context(prometheus(server_program, folder, [admin]))
        load = Load(stack.enter_context(kvd.connect(region)))
        began = time.monotonic()
        while time.monotonic() - began < LOAD_SECONDS:
            load.run_round()
        page = get_text(f"http://{admin}/metrics")
        subprocess.run([promtool, "check", "metrics"], input=page, text=True, check=True)
        queries, rules = check_panels(program, server), check_rules(server)
        load.fill_pool()
        await_alert(server, "KvdPoolFull")
    print(f"{load.rounds} rounds: {queries} queries of panels answered, {rules} rules, an alert fired")


main()
