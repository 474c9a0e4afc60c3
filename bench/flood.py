"""How long one namespace waits beside the flood of another; `--machine` keeps the figures.

    python3 bench/flood.py --kvd target/release/kvd --turns 7
    python3 bench/flood.py --kvd target/release/kvd --before OLD --writers 4 --shape 2x4x128

The flood asks, or stores 1024 tokens a call (`--writers`). A victim asks again and again, with a
pause of 10 ms; in turns alone, beside a flood against a second daemon, and beside the same flood
against its own. The second costs the machine as much, so
that what the third takes beyond it is the daemon's.
"""

import argparse
import contextlib
import datetime
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
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

    def __init__(self, args, folder, name, before=False):
        self.kvd, self.socket = args.kvd, Path(folder, f"{name}.sock")
        config = Path(folder, f"{name}.toml")
        config.write_text(CONFIG.format(folder=folder, name=name, threads=args.threads))
        binary = args.before if before else args.daemon or args.kvd
        command = [binary, "serve", "--config", config]
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
    context = ("--context", args.context, "--shape", args.shape)
    beside, kind = None, "store" if args.writers else "flood"
    if flood is not None:
        seconds = args.seconds + 4
        many = ("--writers", args.writers) if args.writers else ("--flood", args.flood)
        beside = flood.load("flood", *context, "--think-ms", 1000, *many, "--seconds", seconds)
        time.sleep(2.5)
    pause = ("--think-ms", args.think_ms, "--tokens", tokens, "--seconds", args.seconds)
    row = rows_of(victim.load("victim", *context, *pause))[0]
    if beside is None:
        return row, 0
    return row, next(of["calls"] for of in rows_of(beside) if of["kind"] == kind) / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvd", default="kvd")
    parser.add_argument("--daemon", help="another binary for the daemons")
    parser.add_argument("--before", help="an older binary, whose daemon is flooded in turns too")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=int, default=8, help="of one measurement")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens", default="1,8192", help="tokens that the victim asks for")
    parser.add_argument("--flood", type=int, default=16, help="calls under way")
    parser.add_argument("--writers", type=int, default=0, help="clients that store instead")
    parser.add_argument("--shape", default="llama-3.1-8b", help="heads of the model")
    parser.add_argument("--think-ms", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of a daemon")
    parser.add_argument("--set", action="append", default=[], help="a setting of the daemons")
    parser.add_argument("--machine", help="writes the figures to bench/results for it")
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        start = lambda *more: stack.enter_context(Daemon(args, folder, *more))
        own, other = start("own"), start("other")
        ways = dict(zip(WAYS, [(own, None), (own, other), (own, own)]))
        if args.before:
            old = start("old", True)
            ways[f"{WAYS[-1]}, before"] = (old, old)
        for tokens in map(int, args.tokens.split(",")):
            seen = {way: [] for way in ways}
            for _ in range(args.turns):
                for way, (victim, flood) in ways.items():
                    seen[way].append(measure(args, victim, flood, tokens))
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
    command = [args.daemon or args.kvd, "--version"]
    version = subprocess.run(command, check=True, capture_output=True, text=True)
    options = f"--turns {args.turns} --threads {args.threads}"
    flood, title = f"flood of {args.flood} calls", "A namespace beside the flood of another"
    if args.writers:
        options += f" --writers {args.writers} --shape {args.shape} --before OLD"
        flood, title = f"{args.writers} clients that store", "A namespace beside another's stores"
    text = {
        "title": title,
        "page": False,
        "machine": args.machine,
        "commit": None,
        "date": datetime.date.today().isoformat(),
        "command": f"bench/flood.py {options}",
        "unit": "milliseconds, medians of the turns",
        "notes": [version.stdout.strip(), f"{flood}, {args.context} tokens"],
        "columns": ["victim's tokens", "way", "p50", "p99", "flood's calls/s"],
        "rows": lines,
    }
    name = "flood-stores.json" if args.writers else "flood.json"
    (RESULTS / name).write_text(json.dumps(text, indent=2) + "\n")


if __name__ == "__main__":
    main()
