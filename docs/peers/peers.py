"""kvd beside peers, in turns, on one core: attention, encoding, scores of keys, Huffman codes.

    python3 -m venv venv && venv/bin/pip install numpy torch onnx onnxruntime faiss-cpu
    cargo build --release
    venv/bin/python docs/peers/peers.py --kvd target/release/kvd

Attention: decoding with the heads of Llama-3.1-8B (32 query and 8 KV heads of 128 channels), one
sequence, one query token; nanoseconds of processor time per token and KV head, four query heads
included. Keys and values rotate over `--buffer` bytes. Every peer in its
best form known to us: torch with the query heads of a KV head folded into rows, onnxruntime with
past and present in one buffer, ggml and ik_llama.cpp with a cache by head. Encoding: nanoseconds
per value. Scores: keys of 2 bits against four queries; faiss keeps the best of a million keys, 32 MB,
kvd all of them, over keys that are half of `--buffer`. Codes: nanoseconds per Huffman code.

A peer that is not installed is named and left out; README.md says how to build those that do not
install as packages. Only ratios within one run mean anything.
"""

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

KV_HEADS, GROUP, DIM = 8, 4, 128
ATTEND = (
    "raw fp8 kivi-4 kivi-2 innerq-2 polar-4+4 turbo-4 vecinfer-2 vecinfer-2-reg "
    "kvd-2-fast kvcomp kvd-4 kvd-2"
).split()
# Two bytes of queries and weights, and one as the peers' kernels of quantized rows.
PRECISIONS = ("fast", "int8")
# Codecs whose values are coded as a quantizer of faiss does, and its sub-vectors and bits.
ENCODE = {"k=raw; v=vq(d=4,b=8)": (32, 8), "k=raw; v=vq(d=2,b=4)": (64, 4)}
# Keys of as many bits as faiss's 64 codes of 4 bits; values are not read.
SCORES = "k=vq(d=2,b=4); v=vq(d=2,b=4)"
SCAN_ROWS = 1_000_000
# Normal values at about 2.2 and 2.9 bits of entropy; pages of 64 tokens are 8192 codes.
CODES = [f"k=uniform(rel={step},axis=block)/huffman; v=raw" for step in (0.134, 0.082)]
# What keeps torch to AVX2; onnxruntime has no such setting and is left out then.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


class Rows:
    """Figures by name, in the order in which names came."""

    def __init__(self):
        self.runs, self.best = {}, {}

    def add(self, name, runs):
        self.runs.setdefault(name, []).extend(runs)
        self.best[name] = min(self.best.get(name, runs[0]), *runs)

    def add_figure(self, name, figure):
        """A median of several calls, and the best of them."""
        self.add(name, [figure["median"]])
        self.best[name] = min(self.best[name], figure["best"])

    def markdown(self, unit, peers):
        """A table; one more column for each peer says how many times faster a row is."""
        of = {name: statistics.median(runs) for name, runs in self.runs.items()}
        print(f"| {unit} | median | best |" + "".join(f" {peer} / this |" for peer in peers))
        print("|---|---:|---:|" + "---:|" * len(peers))
        for name in self.runs:
            ratios = "".join(f" {of[peer] / of[name]:.2f} |" for peer in peers)
            print(f"| {name} | {of[name]:.2f} | {self.best[name]:.2f} |{ratios}")


def optional(name):
    """A package, or None with a word about it."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        print(f"{name} is left out: {error}", file=sys.stderr)
        return None
    print(f"{name} {module.__version__}", file=sys.stderr)
    return module


def turn(calls, per_call):
    """Nanoseconds of processor time of each call, by `per_call`."""
    runs = []
    for call in calls:
        start = time.process_time_ns()
        call()
        runs.append((time.process_time_ns() - start) / per_call)
    return runs


def copies(context, bytes_per_value, buffer):
    """How many caches make up `buffer` bytes."""
    return max(2, int(buffer / (2 * KV_HEADS * context * DIM * bytes_per_value)))


def torch_peers(torch, context, buffer):
    """Calls of `scaled_dot_product_attention`, by name."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    attend = torch.nn.functional.scaled_dot_product_attention
    peers = {}
    for name, dtype in [("f32", torch.float32), ("bf16", torch.bfloat16)]:
        count = copies(context, dtype.itemsize, buffer)
        cache = lambda: torch.randn(1, KV_HEADS, context, DIM).to(dtype)
        caches = [(cache(), cache()) for _ in range(count)]
        query = torch.randn(1, KV_HEADS, GROUP, DIM).to(dtype)
        calls = [lambda kv=kv, q=query: attend(q, *kv) for kv in caches]
        peers[f"torch {name}, heads folded"] = calls
    return peers


def gqa_session(onnxruntime, onnx, context, kind):
    """A model of one GroupQueryAttention whose cache is f32, or int8 or int4 by channel."""
    from onnx import helper

    element = {"f32": "FLOAT", "int8": "INT8", "int4": "UINT8"}[kind]
    element = getattr(onnx.TensorProto, element)
    width = DIM // 2 if kind == "int4" else DIM
    tensor = lambda name, type_, shape: helper.make_tensor_value_info(name, type_, shape)
    single, whole = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
    row, cache = [1, 1, KV_HEADS * DIM], [1, KV_HEADS, context, width]
    inputs = [
        tensor("q", single, [1, 1, KV_HEADS * GROUP * DIM]),
        tensor("k", single, row),
        tensor("v", single, row),
        tensor("past_k", element, cache),
        tensor("past_v", element, cache),
        tensor("lengths", whole, [1]),
        tensor("total", whole, []),
    ]
    names = [value.name for value in inputs]
    options = {"num_heads": KV_HEADS * GROUP, "kv_num_heads": KV_HEADS}
    if kind != "f32":
        scales = [tensor(name, single, [1, KV_HEADS, 1, DIM]) for name in ("k_scale", "v_scale")]
        # Rotary tables, position ids, bias and sink lie between, and are not given.
        names += [""] * 5 + [value.name for value in scales]
        inputs += scales
        options["kv_cache_bit_width"] = 8 if kind == "int8" else 4
        options |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
    outputs = [
        tensor("out", single, [1, 1, KV_HEADS * GROUP * DIM]),
        tensor("present_k", element, cache),
        tensor("present_v", element, cache),
    ]
    domain = "com.microsoft"
    node = helper.make_node(
        "GroupQueryAttention", names, [o.name for o in outputs], domain=domain, **options
    )
    graph = helper.make_graph([node], "decode", inputs, outputs)
    versions = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    model = helper.make_model(graph, opset_imports=versions)
    model.ir_version = 9
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers)


def gqa_calls(onnxruntime, np, session, context, kind, buffer):
    """One call for each cache, everything bound beforehand."""
    random = np.random.default_rng(1)
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    shape = (1, KV_HEADS, context, DIM // 2 if kind == "int4" else DIM)

    def cache():
        if kind == "f32":
            return value(random.standard_normal(shape, dtype=np.float32))
        low, dtype = (-127, np.int8) if kind == "int8" else (0, np.uint8)
        return value(random.integers(low, 127 if low else 255, shape, dtype=dtype))

    normal = lambda *shape: value(random.standard_normal(shape, dtype=np.float32))
    inputs = {"q": normal(1, 1, KV_HEADS * GROUP * DIM), "k": normal(1, 1, KV_HEADS * DIM)}
    inputs |= {"v": inputs["k"], "lengths": value(np.array([context - 1], np.int32))}
    inputs["total"] = value(np.array(context, np.int32))
    if kind != "f32":
        scale = value(np.full((1, KV_HEADS, 1, DIM), 0.02, np.float32))
        inputs |= {"k_scale": scale, "v_scale": scale}
    calls = []
    for _ in range(copies(context, {"f32": 4, "int8": 1, "int4": 0.5}[kind], buffer)):
        binding = session.io_binding()
        for name, tensor in inputs.items():
            binding.bind_ortvalue_input(name, tensor)
        for side in "kv":
            tensor = cache()
            binding.bind_ortvalue_input(f"past_{side}", tensor)
            binding.bind_ortvalue_output(f"present_{side}", tensor)
        binding.bind_output("out")
        calls.append(lambda binding=binding: session.run_with_iobinding(binding))
    return calls


def gqa_peers(onnxruntime, onnx, np, context, buffer):
    """Calls of onnxruntime, by name; kinds that this version has not are named."""
    peers = {}
    for kind in ("f32", "int8", "int4"):
        try:
            session = gqa_session(onnxruntime, onnx, context, kind)
            calls = gqa_calls(onnxruntime, np, session, context, kind, buffer)
            calls[0]()
        except Exception as error:  # its own types are not public
            print(f"onnxruntime {kind} is left out: {str(error)[:200]}", file=sys.stderr)
            continue
        peers[f"onnxruntime {kind}"] = calls
    return peers


def faiss_peers(faiss, np):
    """Calls that encode 4096 rows, by name, and what they share."""
    faiss.omp_set_num_threads(1)
    rows = np.random.default_rng(2).standard_normal((20000, DIM), dtype=np.float32)
    peers = {}
    for parts, bits in ENCODE.values():
        quantizer = faiss.ProductQuantizer(DIM, parts, bits)
        quantizer.train(rows)
        calls = [lambda q=quantizer: q.compute_codes(rows[:4096])] * 3
        peers[f"faiss ProductQuantizer({DIM}, {parts}, {bits})"] = calls
    return peers


def scan_peers(faiss, np):
    """A call that scores every row against four queries and keeps the best one."""
    random = np.random.default_rng(3)
    index = faiss.IndexPQFastScan(DIM, 64, 4, faiss.METRIC_INNER_PRODUCT)
    index.train(random.standard_normal((20000, DIM), dtype=np.float32))
    for _ in range(10):
        index.add(random.standard_normal((SCAN_ROWS // 10, DIM), dtype=np.float32))
    queries = random.standard_normal((GROUP, DIM), dtype=np.float32)
    return {"faiss IndexPQFastScan(128, 64, 4)": [lambda: index.search(queries, 1)] * 3}


def program(command):
    """Rows of a peer that prints them as JSON."""
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def ggml_peers(arguments):
    """Commands by name, of libraries given as NAME=PROGRAM."""
    peers = {}
    for given in arguments.ggml or []:
        name, path = given.split("=", 1)
        size = [str(arguments.context), str(int(arguments.buffer))]
        peers[name] = [path, name, *size, "1"]
    return peers


def kvd(binary, what, codecs, *more):
    """Rows of `kvd bench`, one thread, pinned by itself."""
    command = [binary, "bench", what, "--json", "--rounds", "3", *more]
    for codec in codecs:
        command += ["--codec", codec]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvd", default="target/release/kvd", help="a release build")
    parser.add_argument("--context", type=int, default=8192, help="cached tokens")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--buffer", type=float, default=128e6, help="bytes of caches")
    parser.add_argument("--codec", action="append", help="a preset or spec; may be repeated")
    parser.add_argument("--block-tokens", type=int, action="append", help="of kvd; may be repeated [64]")
    parser.add_argument("--ggml", action="append", help="NAME=PROGRAM of ggml.cpp; may be repeated")
    parser.add_argument("--huff0", help="the program of huff0.c")
    parser.add_argument("--avx2", action="store_true", help="attention alone, without wider vectors; ggml built so")
    parser.add_argument("--instruction-set", help="that of kvd with --avx2 [avx2]")
    arguments = parser.parse_args()
    if arguments.instruction_set and not arguments.avx2:
        parser.error("--instruction-set is for --avx2")
    if arguments.avx2:
        os.environ |= AVX2

    # Threads of kvd's benchmark choose the last core; so do the peers.
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(everywhere)})
    np, torch, onnx, onnxruntime, faiss = map(
        optional, ("numpy", "torch", "onnx", "onnxruntime", "faiss")
    )
    peers = {}
    if torch:
        peers |= torch_peers(torch, arguments.context, arguments.buffer)
    if np and onnx and onnxruntime and not arguments.avx2:
        peers |= gqa_peers(onnxruntime, onnx, np, arguments.context, arguments.buffer)
    others = faiss and np and not arguments.avx2
    encoders = faiss_peers(faiss, np) if others else {}
    scans = scan_peers(faiss, np) if others else {}
    for calls in [*peers.values(), *encoders.values(), *scans.values()]:
        turn(calls, 1)

    attend, encode, scores, codes = Rows(), Rows(), Rows(), Rows()
    errors, machine = {}, None
    for _ in range(arguments.turns):
        for name, calls in peers.items():
            attend.add(name, turn(calls, arguments.context * KV_HEADS))
        for command in ggml_peers(arguments).values():
            for row in program(command):
                attend.add(row["name"], row["ns"])
                errors[row["name"]] = row["error"]
        for name, calls in encoders.items():
            encode.add(name, turn(calls, 4096 * DIM))
        for name, calls in scans.items():
            scores.add(name, turn(calls, SCAN_ROWS))
        for row in program([arguments.huff0, "3"]) if arguments.huff0 else []:
            codes.add(f"{row['name']}, {row['bits']:.2f} stored", row["ns"])
        os.sched_setaffinity(0, everywhere)
        size = ["--context", str(arguments.context), "--buffer", str(int(arguments.buffer))]
        forms = list(itertools.product(arguments.block_tokens or [64], PRECISIONS))
        for tokens, precision in forms:
            more = [*size, "--precision", precision, "--block-tokens", str(tokens)]
            more += ["--instruction-set", arguments.instruction_set or "avx2"] if arguments.avx2 else []
            of_blocks = f", {tokens} tokens a block" if tokens != 64 else ""
            answer = kvd(arguments.kvd, "attend", arguments.codec or ATTEND, *more)
            machine = answer["machine"]
            for row in answer["rows"]:
                name = f"kvd {row['codec']}" + (f" {precision}" if precision != "fast" else "")
                name += of_blocks
                attend.add_figure(name, row["cpu_ns"])
                errors[name] = row["kernel_error"]
        if arguments.avx2:
            os.sched_setaffinity(0, {max(everywhere)})
            continue
        for row in kvd(arguments.kvd, "codec", ENCODE)["rows"]:
            if row["side"] == "v":
                encode.add_figure(f"kvd v={row['side_spec']}", row["encode_ns"])
        for tokens, precision in forms:
            more = [*size, "--precision", precision, "--block-tokens", str(tokens)]
            of_blocks = f", {tokens} tokens a block" if tokens != 64 else ""
            for row in kvd(arguments.kvd, "scores", [SCORES], *more)["rows"]:
                name = f"kvd {row['codec']} {precision}{of_blocks}, error {row['kernel_error']:.1e}"
                scores.add_figure(name, row["cpu_ns"])
        for row in kvd(arguments.kvd, "codec", CODES)["rows"]:
            if row["codes_ns"]:
                name = f"{row['side_spec']}, {row['bits_per_value']:.2f} stored"
                codes.add_figure(f"kvd decode {name}", row["codes_ns"])
                codes.add_figure(f"kvd encode {name}", row["coding_ns"])
        os.sched_setaffinity(0, {max(everywhere)})

    print(f"{machine}\n")
    peers = [name for name in attend.runs if not name.startswith("kvd ")]
    attend.markdown(f"ns per token and KV head at {arguments.context}", peers)
    print("\nkernel errors:", ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    print()
    encode.markdown("encoding, ns per value", list(encoders))
    print()
    scores.markdown("scores, ns per key", list(scans))
    print()
    codes.markdown("Huffman, ns per code", [])


if __name__ == "__main__":
    main()
