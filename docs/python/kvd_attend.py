"""Stores K and V in kvd and asks for attention, with nothing but the .proto file.

Needs numpy, grpcio and grpcio-tools, and a daemon (`kvd serve`). See README.md beside this file.
"""

import argparse
import importlib
import math
import pathlib
import re
import sys
import tempfile

import grpc
import numpy as np
from grpc_tools import protoc

LAYERS, KV_HEADS, Q_HEADS, HEAD_DIM, BLOCK_TOKENS = 2, 2, 4, 64, 64
TOKENS, CHUNK = 300, 100


def compile_proto(root):
    """Generates the client from kvd.proto into a temporary folder and imports it."""
    out = tempfile.mkdtemp(prefix="kvd-proto-")
    source = root / "kvd" / "v1" / "kvd.proto"
    arguments = ["protoc", f"-I{root}", f"--python_out={out}", f"--grpc_python_out={out}", str(source)]
    if protoc.main(arguments) != 0:
        sys.exit(f"{source} does not compile")
    # Packages, or an installed one named kvd would be found before this folder.
    for folder in ("kvd", "kvd/v1"):
        (pathlib.Path(out) / folder / "__init__.py").touch()
    sys.path.insert(0, out)
    return importlib.import_module("kvd.v1.kvd_pb2"), importlib.import_module("kvd.v1.kvd_pb2_grpc")


def softmax_attention(q, k, v, scale, first_position, float_type=np.float64, rounded=lambda x: x):
    """Textbook attention. q [n_q, q_heads, d], k and v [tokens, kv_heads, d]; returns out and lse.

    Sums are of `float_type`; `rounded` is what queries and weights are rounded by.
    """
    q, k, v = (x.astype(float_type) for x in (rounded(q), k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = float_type(scale) * np.einsum("ihd,jhd->ihj", q, k)
    position = first_position + np.arange(q.shape[0])[:, None, None]
    scores = np.where(np.arange(k.shape[0])[None, None, :] <= position, scores, -np.inf)
    top = scores.max(axis=2, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=2)
    out = np.einsum("ihj,jhd->ihd", rounded(weights).astype(float_type), v) / total[:, :, None]
    return out, np.log(total) + top[:, :, 0]


def to_bytes(x):
    """Seven bits and a sign of the largest value of each row."""
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    step = np.where(step > 0, step, 1)
    return np.rint(x / step) * step


# What the precisions that a daemon may state round queries and weights by, and the error of one
# such rounding (docs/adr/0008-kernel-error-budget.md).
ROUNDED = {
    "single": (lambda x: x, 0.0),
    "fast": (lambda x: x.astype(np.float16), 2.0**-11),
    "int8": (to_bytes, 2.0**-8),
}


class Budget:
    """How far an answer may be from attention in f64 over the same rows.

    Four times what plain attention of the daemon's precision errs, and at least one rounding of the
    largest value that takes part.
    """

    def __init__(self, precision, q, k, v, scale, first_position):
        question = (q, k, v, scale, first_position)
        self.out, self.lse = softmax_attention(*question)
        epsilon = float(np.finfo(np.float32).eps)
        largest_v = np.abs(v.astype(np.float64)).max()
        largest_term, largest_part = largest_products(*question, self.lse)
        # f32 is part of every precision.
        out, lse = epsilon * largest_v, epsilon * max(1.0, np.abs(self.lse).max())
        rounded, one = ROUNDED[precision]
        out, lse = max(out, one * largest_part), max(lse, one * largest_term)
        for by in (lambda x: x, rounded):
            near = softmax_attention(*question, float_type=np.float32, rounded=by)
            out = max(out, largest_difference(near[0], self.out))
            lse = max(lse, largest_difference(near[1], self.lse))
        self.out_bound, self.lse_bound = 4 * out, 4 * lse


def largest_products(q, k, v, scale, first_position, lse):
    """Of a query's and a key's channel, and of a softmax weight and a value."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    term, part = 0.0, 0.0
    for i, row in enumerate(q):
        seen = first_position + i + 1
        terms = scale * row * k[:seen]
        weights = np.exp(terms.sum(axis=2) - lse[i])
        term = max(term, float(np.abs(terms).max()))
        part = max(part, float(np.abs(weights[:, :, None] * v[:seen]).max()))
    return term, part


def largest_difference(got, wanted):
    return float(np.abs(got - wanted).max())


def merge(a, b):
    """Combines attention over two disjoint sets of tokens."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = np.logaddexp(lse_a, lse_b)
    weigh = lambda out, part: out * np.exp(part - lse)[:, :, None]
    return weigh(out_a, lse_a) + weigh(out_b, lse_b), lse


def relative(got, wanted):
    """Root-mean-square difference over the root mean square of what was wanted."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


class Client:
    """The few calls this script needs."""

    def __init__(self, address, root):
        # What the daemon says of itself is known once it was asked: `ask_server`.
        self.precision = None
        self.pb, grpc_module = compile_proto(root)
        options = [("grpc.max_receive_message_length", 64 << 20)]
        if address.startswith("unix:"):
            # grpcio would send the socket's path as :authority, which the daemon's HTTP/2 refuses.
            options.append(("grpc.default_authority", "localhost"))
        self.channel = grpc.insecure_channel(address, options=options)
        self.stub = grpc_module.KvdStub(self.channel)
        # The tenant; the same as leaving it out.
        self.metadata = [("kvd-namespace", "default")]

    def call(self, name, message):
        return getattr(self.stub, name)(message, metadata=self.metadata, timeout=30)

    def ask_server(self):
        info = self.call("GetServerInfo", self.pb.GetServerInfoRequest())
        if info.precision not in ROUNDED:
            sys.exit(f"the daemon's precision is {info.precision!r}, not one of {list(ROUNDED)}")
        self.precision = info.precision
        return info

    def payload(self, array):
        return self.pb.Payload(inline=np.ascontiguousarray(array).tobytes())

    def register(self, codec):
        geometry = self.pb.Geometry(
            layers=LAYERS, kv_heads=KV_HEADS, head_dim_k=HEAD_DIM, head_dim_v=HEAD_DIM,
            block_tokens=BLOCK_TOKENS, dtype=self.pb.DTYPE_F16,
        )
        # A spec has characters that a name may not have.
        name = re.sub("[^A-Za-z0-9._-]+", "-", f"python-{codec}")[:64]
        request = self.pb.RegisterModelRequest(name=name, geometry=geometry, codec=codec)
        return self.call("RegisterModel", request)

    def open(self, model):
        return self.call("OpenSequence", self.pb.OpenSequenceRequest(model_id=model)).sequence_id

    def close(self, sequence):
        self.call("CloseSequence", self.pb.CloseSequenceRequest(sequence_id=sequence))

    def store(self, sequence, layer, start, k, v):
        """One range, cut into chunks; each is answered once it can be read."""
        chunks = (
            self.pb.StoreBlocksRequest(
                sequence_id=sequence, layer=layer, start=start + at,
                tokens=len(k[at:at + CHUNK]),
                k=self.payload(k[at:at + CHUNK]), v=self.payload(v[at:at + CHUNK]),
            )
            for at in range(0, len(k), CHUNK)
        )
        return list(self.call("StoreBlocks", chunks))

    def attend(self, model, layer, sequence, q, **query):
        query = self.pb.Query(sequence_id=sequence, n_q=len(q), **query)
        reply = self.call("Attend", self.pb.AttendRequest(
            model_id=model, layer=layer, q_heads=Q_HEADS, dtype=self.pb.DTYPE_F32,
            queries=[query], q=self.payload(q.astype("<f4")),
        ))
        out = np.frombuffer(reply.out.inline, "<f4").reshape(len(q), Q_HEADS, HEAD_DIM)
        lse = np.frombuffer(reply.lse.inline, "<f4").reshape(len(q), Q_HEADS)
        return out.astype(np.float64), lse.astype(np.float64)

    def load(self, sequence, layer, end):
        request = self.pb.LoadBlocksRequest(
            sequence_id=sequence, layer=layer, start=0, end=end, dtype=self.pb.DTYPE_F32)
        pieces = list(self.call("LoadBlocks", request))
        rows = lambda data: np.frombuffer(data, "<f4").reshape(-1, KV_HEADS, HEAD_DIM)
        return (np.concatenate([rows(piece.k.inline) for piece in pieces]),
                np.concatenate([rows(piece.v.inline) for piece in pieces]))


def make_kv(random, tokens):
    """K with a few loud channels, as models have them; V without."""
    loud = np.where(np.arange(HEAD_DIM) % 16 == 3, 4.0, 0.5)
    k = random.standard_normal((tokens, KV_HEADS, HEAD_DIM)) * loud + loud
    v = random.standard_normal((tokens, KV_HEADS, HEAD_DIM))
    return k.astype("<f2"), v.astype("<f2")


class Checks:
    """Prints each result beside its bound and remembers whether one was missed."""

    failed = False

    def measured(self, what, value):
        print(f"  {what:<52} {value:9.2e}")

    def below(self, what, value, bound):
        verdict = "ok" if value <= bound else "TOO LARGE"
        self.failed |= value > bound
        print(f"  {what:<52} {value:9.2e}  (bound {bound:.1e}) {verdict}")

    def true(self, what, holds):
        self.failed |= not holds
        print(f"  {what:<52} {'yes' if holds else 'NO'}")


def run(client, codec, checks):
    random = np.random.default_rng(7)
    model = client.register(codec)
    print(f"{codec}: model {model.model_id}, codec {model.codec_spec}")
    sequence = client.open(model.model_id)
    kv = [make_kv(random, TOKENS) for _ in range(LAYERS)]
    for layer, (k, v) in enumerate(kv):
        replies = client.store(sequence, layer, 0, k, v)
        packed = sum(reply.packed_blocks for reply in replies)
        print(f"  layer {layer}: {replies[-1].length} tokens stored, {packed} blocks packed")
    again = client.store(sequence, 0, 0, kv[0][0][:CHUNK], kv[0][1][:CHUNK])
    checks.true("a range sent again is a replay", again[0].replayed)

    scale = 1 / math.sqrt(HEAD_DIM)
    q = random.standard_normal((3, Q_HEADS, HEAD_DIM)).astype("<f4") * 0.5
    for layer, (k, v) in enumerate(kv):
        got, lse = client.attend(model.model_id, layer, sequence, q)
        # Kernel error: against attention on what the daemon decodes. Codec error: on the original.
        held = client.load(sequence, layer, TOKENS)
        budget = Budget(client.precision, q, *held, scale, TOKENS - len(q))
        original, _ = softmax_attention(q, k, v, scale, TOKENS - len(q))
        checks.below(f"layer {layer}: kernel error of out",
                     largest_difference(got, budget.out), budget.out_bound)
        checks.below(f"layer {layer}: kernel error of lse",
                     largest_difference(lse, budget.lse), budget.lse_bound)
        checks.measured(f"layer {layer}: codec error of out", relative(budget.out, original))

    k, v = kv[0]
    ranges(client, model.model_id, sequence, q, checks)
    nothing, lse = client.attend(model.model_id, 0, sequence, q, start=150, end=150)
    checks.true("an empty range is out = 0, lse = -inf", not nothing.any() and np.isneginf(lse).all())
    fork(client, model.model_id, sequence, q, checks)
    refuse(client, sequence, k, v)
    report(client, model.model_id)
    client.close(sequence)
    client.call("UnregisterModel", client.pb.UnregisterModelRequest(model_id=model.model_id))


def ranges(client, model, sequence, q, checks):
    """Two ranges of tokens, merged by their log-sum-exp, are the whole."""
    held_k, held_v = client.load(sequence, 0, TOKENS)
    half, scale, position = TOKENS // 2, 1 / math.sqrt(HEAD_DIM), TOKENS - len(q)
    whole = Budget(client.precision, q, held_k, held_v, scale, position)
    first = Budget(client.precision, q, held_k[:half], held_v[:half], scale, position)
    last = Budget(client.precision, q, held_k[half:], held_v[half:], scale, position - half)
    merged = merge(client.attend(model, 0, sequence, q, end=half),
                   client.attend(model, 0, sequence, q, start=half))
    # Outputs are averaged; what log-sum-exps err moves weight from one range to the other.
    bound = max(first.out_bound, last.out_bound) + (
        first.lse_bound + last.lse_bound) * largest_difference(first.out, last.out)
    checks.below(f"[0, {half}) and [{half}, {TOKENS}) merged by lse",
                 largest_difference(merged[0], whole.out), bound)


def fork(client, model, sequence, q, checks):
    """A fork shares the first 200 tokens and then goes its own way."""
    before = client.attend(model, 0, sequence, q)
    child = client.call(
        "ForkSequence", client.pb.ForkSequenceRequest(sequence_id=sequence, length=200))
    tail_k, tail_v = make_kv(np.random.default_rng(8), 50)
    for layer in range(LAYERS):
        client.store(child.sequence_id, layer, child.length, tail_k, tail_v)
    held_k, held_v = client.load(child.sequence_id, 0, 250)
    checks.true("its own tail is exact: it lies in an open block",
                np.array_equal(held_k[200:], tail_k) and np.array_equal(held_v[200:], tail_v))
    budget = Budget(client.precision, q, held_k, held_v, 1 / math.sqrt(HEAD_DIM), 250 - len(q))
    got, _ = client.attend(model, 0, child.sequence_id, q)
    checks.below("kernel error of a fork with its own tail",
                 largest_difference(got, budget.out), budget.out_bound)
    after = client.attend(model, 0, sequence, q)
    checks.true("its parent is untouched", np.array_equal(before[0], after[0]))
    client.close(child.sequence_id)


def refuse(client, sequence, k, v):
    """What a mistake is answered with."""
    bad = k.copy()
    bad[0, 0, 0] = np.nan
    for what, start, keys in [
        ("a gap", TOKENS + 1, k), ("an overlap", 50, k), ("a NaN", TOKENS, bad),
        ("a wrong shape", TOKENS, k[:, :, :32]),
    ]:
        try:
            client.store(sequence, 0, start, keys[:10], v[:10])
            sys.exit(f"{what} was accepted")
        except grpc.RpcError as error:
            print(f"  {what}: {error.code().name}: {error.details()}")


def report(client, model):
    reply = client.call("DescribeModel", client.pb.DescribeModelRequest(model_id=model))
    stored = reply.model.stored
    print(f"  held: {stored.packed_values} values packed in {stored.packed_bytes} bytes"
          f" ({8 * stored.packed_bytes / max(1, stored.packed_values):.2f} bits each),"
          f" {stored.raw_values} values raw in {stored.raw_bytes} bytes")
    print(f"  sampled codec error: k {reply.model.sampled_error_k:.4f},"
          f" v {reply.model.sampled_error_v:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="127.0.0.1:7070", help="or unix:/path/to/socket")
    default = pathlib.Path(__file__).resolve().parents[2] / "proto"
    parser.add_argument("--proto", type=pathlib.Path, default=default, help="folder of kvd/v1")
    parser.add_argument("--codec", action="append", help="preset or spec; raw and kvcomp if absent")
    arguments = parser.parse_args()
    client = Client(arguments.address, arguments.proto)
    try:
        info = client.ask_server()
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        sys.exit(f"no daemon at {arguments.address}: start `kvd serve`, or give --address")
    print(f"kvd {info.version} on {info.device}, precision {info.precision}")
    checks = Checks()
    for codec in arguments.codec or ["raw", "kvcomp"]:
        run(client, codec, checks)
    sys.exit(1 if checks.failed else 0)


if __name__ == "__main__":
    main()
