"""kvd beside peers, in turns, on one core: attention, encoding, scores of keys, Huffman codes.

    python3 -m venv venv && venv/bin/pip install numpy torch onnx onnxruntime faiss-cpu
    cargo build --release
    venv/bin/python docs/peers/peers.py --kvd target/release/kvd

Attention: decoding with the heads of Llama-3.1-8B (32 query and 8 KV heads of 128 channels), one
sequence, one query token; nanoseconds of processor time per token and KV head, four query heads
included. Keys and values rotate over `--buffer` bytes. Every peer in its best form known to us: torch with the query heads of a KV head folded into rows, onnxruntime with
past and present in one buffer, ggml and ik_llama.cpp with a cache by head. Encoding: nanoseconds
per value. Scores: keys of 2 bits against four queries; faiss keeps the best of a million keys, 32 MB,
kvd all of them, over keys that are half of `--buffer`. Codes: nanoseconds per Huffman code. Scaling
of kvd alone: one thread and two, and contexts from 4096 to 131072 tokens.

Goals by table: attention has C1, C2, C4 and C5, scores C3, codes C6 and C7, encoding C8 (uniform codes of f16
rows, and of rows that are f32 already), scaling C11.

What is compared is named with its version first. A peer that is not installed is named and left out;
README.md says how to build those that do not install as packages. Only ratios within one run mean
anything.
"""

import functools
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time

from options import parsed

KV_HEADS, GROUP, DIM = 8, 4, 128
ATTEND = (
    "raw fp8 kivi-4 kivi-2 innerq-2 polar-4+4 turbo-4 vecinfer-2 vecinfer-2-reg "
    "kvd-2-fast kvcomp kvd-4 kvd-2"
).split()
# kvcomp with steps for 2.24 and 2.90 bits a value of normal rows; the preset takes 3.37.
ATTEND += [
    f"k=uniform(rel={k},axis=block)/huffman; v=uniform(rel={v},axis=token)/huffman"
    for k, v in ((0.175, 0.24), (0.097, 0.15))
]
# Two bytes of queries and weights, and one as the peers' kernels of quantized rows.
PRECISIONS = ("fast", "int8")
# Codecs whose values are coded as a quantizer of faiss does, and its sub-vectors and bits.
ENCODE = {"k=raw; v=vq(d=4,b=8)": (32, 8), "k=raw; v=vq(d=2,b=4)": (64, 4)}
# Uniform codes have no quantizer of faiss beside them; their goal is in bytes.
UNIFORM = ["kivi-4", "kivi-2"]
# Keys of as many bits as faiss's 64 codes of 4 bits; values are not read.
SCORES = "k=vq(d=2,b=4); v=vq(d=2,b=4)"
SCAN_ROWS = 1_000_000
# Normal values at about 2.2 and 2.9 bits of entropy; pages of 64 tokens are 8192 codes.
CODES = [f"k=uniform(rel={step},axis=block)/huffman; v=raw" for step in (0.134, 0.082)]
# Two threads and long contexts: codecs with few bytes and many, of tables, bf16, codes and floats.
SCALING = ["vecinfer-2-reg", "kvd-2-fast", "kivi-4", "kvd-2", "raw"]
CONTEXTS = (4096, 8192, 32768, 131072)
# What keeps torch and faiss to AVX2. faiss chooses its own level elsewhere, and so do its wheels
# that do not know this name; which one it took is printed. onnxruntime has no such setting and is
# left out.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "FAISS_SIMD_LEVEL": "AVX2"}
# Packages under the names of their distributions, and of the modules.
PACKAGES = {name: name for name in ("numpy", "torch", "onnx", "onnxruntime")} | {"faiss-cpu": "faiss"}


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

    def markdown(self, unit, peers=()):
        """A table; one more column for each peer says how many times faster a row is."""
        if not self.runs:
            return
        of = {name: statistics.median(runs) for name, runs in self.runs.items()}
        print(f"| {unit} | median | best |" + "".join(f" {peer} / this |" for peer in peers))
        print("|---|---:|---:|" + "---:|" * len(peers))
        for name in self.runs:
            ratios = "".join(f" {of[peer] / of[name]:.2f} |" for peer in peers)
            print(f"| {name} | {of[name]:.2f} | {self.best[name]:.2f} |{ratios}")
        print()


def optional(name):
    """A package, or None with a word about it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"{name} is left out: {error}", file=sys.stderr)
        return None


def versions(arguments, torch, faiss):
    """What is compared, a line each, as far as it says who it is."""
    lines = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package}: not installed as a package")
        if package == "torch" and torch:
            lines[-1] += f" ({torch.backends.cpu.get_cpu_capability()})"
        if package == "faiss-cpu" and faiss and hasattr(faiss, "SIMDConfig"):
            lines[-1] += f" ({faiss.SIMDConfig.get_level_name()})"
    told = dict(given.split("=", 1) for given in arguments.version_of or [])
    names = [given.split("=", 1)[0] for given in arguments.ggml or []]
    for name in [*names, *(["huff0"] if arguments.huff0 else [])]:
        lines.append(f"{name} {told.pop(name, 'of an unknown version (--version-of)')}")
    lines += [f"{name} {text}" for name, text in told.items()]
    own = subprocess.run([arguments.kvd, "--version"], check=True, stdout=subprocess.PIPE)
    return [*lines, own.stdout.decode().strip()]


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


def held(arguments):
    """What keeps a benchmark of kvd to the instruction set asked for."""
    if not arguments.avx2:
        return []
    return ["--instruction-set", arguments.instruction_set or "avx2"]


def kvd(binary, what, codecs, *more):
    """Rows of `kvd bench`, one thread, pinned by itself."""
    command = [binary, "bench", what, "--json", "--rounds", "3", *more]
    for codec in codecs:
        command += ["--codec", codec]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def forms(arguments):
    """How kvd attends: options and what a row's name says of them."""
    for tokens, precision in itertools.product(arguments.block_tokens or [64], PRECISIONS):
        of_blocks = f", {tokens} tokens a block" if tokens != 64 else ""
        yield ["--precision", precision, "--block-tokens", str(tokens)], precision, of_blocks


def size(arguments, contexts):
    """The caches of kvd."""
    contexts = ",".join(map(str, contexts))
    return ["--context", contexts, "--buffer", str(int(arguments.buffer))]


class Own:
    """kvd's rows of all tables."""

    def __init__(self, arguments):
        self.arguments, self.machine, self.sets, self.errors = arguments, None, set(), {}

    def rows(self, what, codecs, *more):
        answer = kvd(self.arguments.kvd, what, codecs, *more, *held(self.arguments))
        self.machine = answer["machine"]
        self.sets |= {row["instruction_set"] for row in answer["rows"]}
        return answer["rows"]

    def attend(self, table):
        sizes = size(self.arguments, [self.arguments.context])
        for more, precision, of_blocks in forms(self.arguments):
            for row in self.rows("attend", self.arguments.codec or ATTEND, *sizes, *more):
                name = f"kvd {row['codec']}" + (f" {precision}" if precision != "fast" else "")
                table.add_figure(name + of_blocks, row["cpu_ns"])
                self.errors[name + of_blocks] = row["kernel_error"]

    def encode(self, table, uniform):
        for row in self.rows("codec", ENCODE):
            if row["side"] == "v":
                table.add_figure(f"kvd v={row['side_spec']}", row["encode_ns"])
        for row in self.rows("codec", UNIFORM):
            name = f"kvd {row['side']}={row['side_spec']}"
            uniform.add_figure(f"{name}, f16 rows", row["encode_f16_ns"])
            uniform.add_figure(f"{name}, rows that are f32 already", row["encode_ns"])

    def scores(self, table):
        sizes = size(self.arguments, [self.arguments.context])
        for more, precision, of_blocks in forms(self.arguments):
            for row in self.rows("scores", [SCORES], *sizes, *more):
                error = f"error {row['kernel_error']:.1e}"
                name = f"kvd {row['codec']} {precision}{of_blocks}, {error}"
                table.add_figure(name, row["cpu_ns"])

    def codes(self, table):
        for row in self.rows("codec", CODES):
            if row["codes_ns"]:
                words = row["huffman"]
                over = words["bits_per_code"] / words["entropy"] - 1
                name = f"{row['side_spec']}, {row['bits_per_value']:.2f} stored"
                name += f", words {100 * over:.1f} % over the entropy of single codes"
                table.add_figure(f"kvd decode {name}", row["codes_ns"])
                table.add_figure(f"kvd encode {name}", row["coding_ns"])

    def scaling(self, cores):
        """One thread and two over 32768 tokens, and contexts; int8, once, after all turns."""
        more = ["--precision", "int8"]
        if cores > 1:
            sizes = size(self.arguments, [32768])
            rows = self.rows("attend", SCALING, *sizes, *more, "--threads", "1,2")
            print("| codec, 32768 tokens | one thread, ns | two, ns | of one |\n|---|---:|---:|---:|")
            for one, two in itertools.product(rows, rows):
                if (one["codec"], one["threads"], two["threads"]) == (two["codec"], 1, 2):
                    [first, second] = [row["wall_ns"]["median"] for row in (one, two)]
                    cells = f"{first:.2f} | {second:.2f} | {first / second:.2f}"
                    print(f"| {one['codec']} | {cells} |")
            print()
        else:
            print("two threads are left out: there is one core", file=sys.stderr)
        rows = self.rows("attend", SCALING, *size(self.arguments, CONTEXTS), *more)
        heads = "".join(f" {context} |" for context in CONTEXTS)
        print(f"| codec, ns by context |{heads}\n|---|{'---:|' * len(CONTEXTS)}")
        for codec in SCALING:
            of = [row["cpu_ns"]["median"] for row in rows if row["codec"] == codec]
            print(f"| {codec} |" + "".join(f" {figure:.2f} |" for figure in of))
        print()


def main():
    arguments = parsed(__doc__.split("\n")[0])
    if arguments.avx2:
        os.environ |= AVX2

    # Threads of kvd's benchmark choose the last core; so do the peers.
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(everywhere)})
    np, torch, onnx, onnxruntime, faiss = map(optional, PACKAGES.values())
    print("\n".join(f"- {line}" for line in versions(arguments, torch, faiss)), flush=True)
    peers = {}
    if torch:
        peers |= torch_peers(torch, arguments.context, arguments.buffer)
    if np and onnx and onnxruntime and not arguments.avx2:
        peers |= gqa_peers(onnxruntime, onnx, np, arguments.context, arguments.buffer)
    encoders = faiss_peers(faiss, np) if faiss and np else {}
    scans = scan_peers(faiss, np) if faiss and np else {}
    for calls in [*peers.values(), *encoders.values(), *scans.values()]:
        turn(calls, 1)

    attend, encode, uniform, scores, codes = Rows(), Rows(), Rows(), Rows(), Rows()
    own = Own(arguments)
    for _ in range(arguments.turns):
        for name, calls in peers.items():
            attend.add(name, turn(calls, arguments.context * KV_HEADS))
        for command in ggml_peers(arguments).values():
            for row in program(command):
                attend.add(row["name"], row["ns"])
                own.errors[row["name"]] = row["error"]
        for name, calls in encoders.items():
            encode.add(name, turn(calls, 4096 * DIM))
        for name, calls in scans.items():
            scores.add(name, turn(calls, SCAN_ROWS))
        for row in program([arguments.huff0, "3"]) if arguments.huff0 else []:
            codes.add(f"{row['name']}, {row['bits']:.2f} stored", row["ns"])
        os.sched_setaffinity(0, everywhere)
        own.attend(attend)
        own.encode(encode, uniform)
        own.scores(scores)
        own.codes(codes)
        os.sched_setaffinity(0, {max(everywhere)})

    print(f"- kvd's instruction set: {', '.join(sorted(own.sets))}")
    print(f"- kvd's machine: {json.dumps(own.machine)}\n")
    peers = [name for name in attend.runs if not name.startswith("kvd ")]
    attend.markdown(f"ns per token and KV head at {arguments.context}", peers)
    errors = [f"{name} {error:.1e}" for name, error in own.errors.items()]
    print("kernel errors:", ", ".join(errors), "\n")
    encode.markdown("encoding, ns per value", list(encoders))
    uniform.markdown("encoding, ns per value; 0.5 are 4 GB/s of f16")
    scores.markdown("scores, ns per key", list(scans))
    codes.markdown("Huffman, ns per code")
    if not arguments.no_scaling:
        os.sched_setaffinity(0, everywhere)
        own.scaling(len(everywhere))


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        # What it has to say it has said.
        sys.exit(f"{' '.join(map(str, error.cmd))}: exit code {error.returncode}")
