"""How much longer codes get under a Huffman table that was made for other blocks.

    pip install numpy
    kvd calibrate --text a.txt --tokens 12288 --dump a.safetensors     # one per text
    python table_drift.py a.safetensors b.safetensors ...

Keys under `uniform(rel=0.05,axis=block)` (preset kvcomp), tables per layer, counted as the daemon
counts: one block of 64 tokens in 8, eight of these. Prints, for each pair of files, the median and
the largest excess in per cent over a table made for the blocks themselves.
"""

import argparse
import heapq
import json
import pathlib
import struct

import numpy as np

LEVELS = 21
BLOCK = 64


def layers(path):
    """Keys of each layer, `[tokens, heads, dim]`."""
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    layer = 0
    while f"layer.{layer}.k" in header:
        entry = header[f"layer.{layer}.k"]
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        rows = np.frombuffer(data[start:end], dtype=np.float16)
        yield rows.reshape(entry["shape"]).astype(np.float32)
        layer += 1


def counts(keys):
    """How often each code is met, in groups of eight counted blocks."""
    blocks = []
    for first in range(0, len(keys) - BLOCK + 1, BLOCK):
        page = keys[first : first + BLOCK]
        low, high = page.min((0, 2), keepdims=True), page.max((0, 2), keepdims=True)
        codes = np.rint((page - low) / (high - low) * (LEVELS - 1)).astype(int)
        blocks.append(np.bincount(codes.ravel(), minlength=LEVELS))
    blocks = np.array(blocks)
    return [blocks[i : i + 64][7::8].sum(0) for i in range(0, len(blocks) - 63, 64)]


def lengths(count):
    """Code lengths of Huffman's code; every symbol counts at least once."""
    heap = [(max(int(n), 1), symbol, [symbol]) for symbol, n in enumerate(count)]
    heapq.heapify(heap)
    bits = np.zeros(len(count), int)
    for order in range(len(count), 2 * len(count) - 1):
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        symbols = first[2] + second[2]
        bits[symbols] += 1
        heapq.heappush(heap, (first[0] + second[0], order, symbols))
    return bits


def excess(made_for, met):
    """Of every group of `met` under a table of every other group, in per cent."""
    for table_of in made_for:
        table = lengths(table_of)
        for group in met:
            if group is not table_of:
                yield 100 * ((group * table).sum() / (group * lengths(group)).sum() - 1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+", type=pathlib.Path, metavar="FILE",
                        help="what `kvd calibrate --dump` wrote, one file per text")
    paths = parser.parse_args().dumps
    for path in paths:
        if not path.is_file():
            parser.error(f"{path} is not a file; `kvd calibrate --dump` writes such")
    texts = [[counts(keys) for keys in layers(path)] for path in paths]
    for path, made_for in zip(paths, texts):
        print("tables of", path)
        for other, met in zip(paths, texts):
            found = [e for a, b in zip(made_for, met) for e in excess(a, b)]
            if not found:
                parser.error(f"{path} or {other} has too few tokens: 8,192 make two tables")
            print(f"  {other}: median {np.median(found):.2f}, most {max(found):.2f}")


if __name__ == "__main__":
    main()
