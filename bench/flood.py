"""How long one namespace waits beside the flood of another; `--machine` keeps the figures.

    python3 bench/flood.py --kvd target/release/kvd --turns 7

A victim asks again and again, with a pause of 10 ms; in turns alone, beside a flood against a
second daemon, and beside the same flood against its own. The second costs the machine as much, so
that what the third takes beyond it is the daemon's.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "bench/results/flood.json"
WAYS = ["alone", "beside a flood elsewhere", "beside its flood"]
CONFIG = """
[server]
listen_tcp = ""
listen_unix = "{folder}/{name}.sock"
[admin]
listen = "127.0.0.1:0"
[device]
pool_bytes = "1 GiB"
threads = {threads}
[namespaces]
allowed = ["victim", "flood"]
"""


class Daemon:
    """A daemon with its socket, until the end of the block."""

    def __init__(self, args, folder, name):
        self.kvd, self.socket = args.kvd, Path(folder, f"{name}.sock")
        config = Path(folder, f"{name}.toml")
        config.write_text(CONFIG.format(folder=folder, name=name, threads=args.threads))
        command = [args.daemon or args.kvd, "serve", "--config", config]
        command += [word for setting in args.set for word in ("--set", setting)]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
        until = time.monotonic() + 30
        while not self.socket.exists():
            assert self.process.poll() is None and time.monotonic() < until, "the daemon is not up"
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def load(self, namespace, *more):
        command = [self.kvd, "bench", "mixed", "--endpoint", f"unix:{self.socket}", "--json"]
        command += ["--namespace", namespace, "--clients", "1", *map(str, more)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def rows_of(load):
    text, _ = load.communicate()
    assert load.returncode == 0, text
    return json.loads(text)


def measure(args, victim, flood, tokens):
    """The victim's line, and calls of the flood in a second."""
    context = ("--context", args.context)
    beside = None
    if flood is not None:
        seconds = args.seconds + 4
        calls = ("--think-ms", 1000, "--flood", args.flood, "--seconds", seconds)
        beside = flood.load("flood", *context, *calls)
        time.sleep(2.5)
    pause = ("--think-ms", args.think_ms, "--tokens", tokens, "--seconds", args.seconds)
    row = rows_of(victim.load("victim", *context, *pause))[0]
    if beside is None:
        return row, 0
    return row, next(of["calls"] for of in rows_of(beside) if of["kind"] == "flood") / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvd", default="kvd")
    parser.add_argument("--daemon", help="another binary for the daemons")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=int, default=8, help="of one measurement")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens", default="1,8192", help="tokens that the victim asks for")
    parser.add_argument("--flood", type=int, default=16, help="calls under way")
    parser.add_argument("--think-ms", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of a daemon")
    parser.add_argument("--set", action="append", default=[], help="a setting of the daemons")
    parser.add_argument("--machine", help="writes bench/results/flood.json for it")
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        with Daemon(args, folder, "own") as own, Daemon(args, folder, "other") as other:
            for tokens in map(int, args.tokens.split(",")):
                seen = {way: [] for way in WAYS}
                for _ in range(args.turns):
                    for way, flood in zip(WAYS, [None, other, own]):
                        seen[way].append(measure(args, own, flood, tokens))
                        row, calls = seen[way][-1]
                        print(tokens, way, row["p50_ms"], row["p99_ms"], calls, flush=True)
                for way, runs in seen.items():
                    middle = lambda key: statistics.median(row[key] for row, _ in runs)
                    calls = statistics.median(calls for _, calls in runs)
                    times = [f"{middle('p50_ms'):.2f}", f"{middle('p99_ms'):.2f}"]
                    lines.append([f"{tokens}", way, *times, f"{calls:.0f}"])
                    print(*lines[-1], sep="\t", flush=True)
    if args.machine:
        write_data(args, lines)


def write_data(args, lines):
    version = subprocess.run([args.kvd, "--version"], check=True, capture_output=True, text=True)
    text = {
        "title": "A namespace beside the flood of another",
        "page": False,
        "machine": args.machine,
        "commit": None,
        "date": datetime.date.today().isoformat(),
        "command": f"bench/flood.py --turns {args.turns} --threads {args.threads}",
        "unit": "milliseconds, medians of the turns",
        "notes": [version.stdout.strip(), f"flood of {args.flood} calls, {args.context} tokens"],
        "columns": ["victim's tokens", "way", "p50", "p99", "flood's calls/s"],
        "rows": lines,
    }
    DATA.write_text(json.dumps(text, indent=2) + "\n")


if __name__ == "__main__":
    main()
