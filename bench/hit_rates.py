"""Draws what a cache finds of a trace at equal bytes, by codec: `docs/hit-rates.svg` and its data.

    python3 bench/hit_rates.py --kvd target/release/kvd --trace conversation_trace.jsonl

Each codec has the same bytes and so holds the more blocks the fewer bits its values take; `kvd
cache simulate` plays the trace against the daemon's index. Mooncake's trace (Apache-2.0,
kvcache-ai/Mooncake, FAST25-release) is not in this repository.
"""

import argparse
import datetime
import json
import math
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA, PICTURE = ROOT / "bench/results/cache-hit-rates-by-bytes.json", ROOT / "docs/hit-rates.svg"

# Bits per value of full pages, as `kvd codecs` says them: of the grid codecs as measured on the
# fixture.
CODECS = {"raw": 16.03, "kivi-4": 5.03, "kvd-4": 3.78, "kvd-2": 2.03}
COLORS = {"raw": "#888888", "kivi-4": "#c98500", "kvd-4": "#2a78c2", "kvd-2": "#14803c"}
# Pools, as shares of the bytes that all distinct blocks take in f16.
SHARES = [512, 256, 128, 64, 32, 16, 8]
# K and V of a model of 32 layers, 8 KV heads and 128 channels: values of a trace's block.
BLOCK_VALUES = 512 * 32 * 8 * 128 * 2


def simulate(kvd, trace, sizes):
    command = [kvd, "cache", "simulate", "--trace", trace, "--json"]
    if sizes:
        command += ["--blocks", ",".join(str(size) for size in sizes)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def rates_of(found, policy):
    return next(of["hit_rates"] for of in found["policies"] if of["policy"] == policy)


def measure(kvd, trace):
    """Percent of blocks found, by codec and policy, at each share."""
    distinct = simulate(kvd, trace, [1])["distinct_blocks"]
    rows = {}
    for codec, bits in CODECS.items():
        sizes = [min(distinct, max(1, int(distinct / share * 16 / bits))) for share in SHARES]
        found = simulate(kvd, trace, sizes)
        for policy in ("s3-fifo", "lru"):
            rows[codec, policy] = [100 * rate for rate in rates_of(found, policy)]
    return distinct, rows


def write_data(distinct, rows, commit):
    gigabytes = [round(distinct * BLOCK_VALUES * 2 / share / 1e9) for share in SHARES]
    text = [
        [codec, policy, " ".join(f"{rate:.1f}" for rate in rates)]
        for (codec, policy), rates in rows.items()
    ]
    DATA.write_text(
        json.dumps(
            {
                "title": "Hit rates at equal bytes by codec",
                "page": False,
                "machine": None,
                "commit": commit,
                "date": datetime.date.today().isoformat(),
                "command": "python3 bench/hit_rates.py --kvd target/release/kvd"
                " --trace conversation_trace.jsonl",
                "unit": "% of blocks found with "
                + ", ".join(f"1/{share}" for share in SHARES)
                + " of the bytes that all blocks take in f16",
                "notes": [
                    "Mooncake's FAST'25 conversation trace (Apache-2.0)",
                    f"for 32 layers, 8 KV heads and 128 channels these are {gigabytes} GB",
                    "bits per value: " + ", ".join(f"{of} {bits}" for of, bits in CODECS.items()),
                    "rows of the sink, which kvd-* keep beside a first block, are not counted",
                ],
                "columns": ["codec", "policy", "conversation"],
                "rows": text,
            },
            indent=2,
            ensure_ascii=False,
        )
        + "\n"
    )


def draw(distinct, rows):
    """A line for each codec under the daemon's own policy; log of bytes against percent."""
    width, height, left, right, top, bottom = 640, 300, 46, 84, 20, 44
    bytes_of = [distinct * BLOCK_VALUES * 2 / share for share in SHARES]
    low, high = math.log2(bytes_of[0]), math.log2(bytes_of[-1])
    x = lambda size: left + (math.log2(size) - low) / (high - low) * (width - left - right)
    y = lambda rate: height - bottom - rate / 40 * (height - top - bottom)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" role="img" aria-label="Share of blocks that a '
        'cache finds, against its bytes, by codec">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for rate in range(0, 41, 10):
        out.append(
            f'<path d="M{left} {y(rate):.1f}H{width - right}" stroke="#dddddd"/>'
            f'<text x="{left - 6}" y="{y(rate) + 4:.1f}" text-anchor="end" fill="#333333">'
            f"{rate} %</text>"
        )
    for size in bytes_of:
        label = f"{size / 1e9:.0f} GB" if size < 1e12 else f"{size / 1e12:.1f} TB"
        out.append(
            f'<text x="{x(size):.1f}" y="{height - bottom + 18}" text-anchor="middle" '
            f'fill="#333333">{label}</text>'
        )
    out.append(
        f'<text x="{left}" y="{height - 8}" fill="#333333">bytes of the cache (32 layers, 8 KV '
        "heads of 128); blocks of the conversation trace that are found</text>"
    )
    # Labels of lines that end close together stand apart.
    ends = sorted(CODECS, key=lambda codec: -rows[codec, "s3-fifo"][-1])
    last = -math.inf
    for codec in ends:
        rates = rows[codec, "s3-fifo"]
        points = " ".join(
            f"{x(size):.1f},{y(rate):.1f}" for size, rate in zip(bytes_of, rates, strict=True)
        )
        last = max(y(rates[-1]) + 4, last + 15)
        color = COLORS[codec]
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        out.append(f'<text x="{width - right + 6}" y="{last:.1f}" fill="{color}">{codec}</text>')
    out.append("</svg>")
    PICTURE.write_text("\n".join(out) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvd", required=True)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--commit", help="of the binary")
    given = parser.parse_args()
    distinct, rows = measure(given.kvd, given.trace)
    write_data(distinct, rows, given.commit)
    draw(distinct, rows)
    for (codec, policy), rates in rows.items():
        print(f"{codec:8}{policy:9}", " ".join(f"{rate:5.1f}" for rate in rates))


if __name__ == "__main__":
    main()
