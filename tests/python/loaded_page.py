"""Prints the metrics of a daemon that has work of every kind behind it, its models still open.

    python loaded_page.py GRPC_ADDRESS ADMIN_ADDRESS
"""

import gzip
import math
import pathlib
import sys
import urllib.request

import grpc
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "python"))
from kvd_attend import LAYERS, Q_HEADS, HEAD_DIM, Client, make_kv  # noqa: E402

# What a codec of each family exports: none, bounds, Huffman tables.
CODECS = ["raw", "k=fp8; v=fp8; k.bound=0.5; v.bound=0.5", "kvcomp", "kivi-2; sink=0; recent=0"]


def load(client):
    random = np.random.default_rng(7)
    for codec in CODECS:
        model = client.register(codec).model_id
        sequence = client.open(model)
        for layer in range(LAYERS):
            client.store(sequence, layer, 0, *make_kv(random, 512))
            q = random.standard_normal((3, Q_HEADS, HEAD_DIM)).astype("<f4") / math.sqrt(HEAD_DIM)
            client.attend(model, layer, sequence, q)
            client.load(sequence, layer, 512)
    try:
        client.close(1 << 60)
    except grpc.RpcError:
        return
    sys.exit("a sequence that nobody opened was closed")


def main():
    address, admin = sys.argv[1:]
    client = Client(address, ROOT / "proto")
    client.ask_server()
    load(client)
    request = urllib.request.Request(
        f"http://{admin}/metrics", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        if answer.headers["Content-Encoding"] != "gzip":
            sys.exit("the page is not compressed, which was accepted")
        sys.stdout.buffer.write(gzip.decompress(answer.read()))


main()
