"""FP16 attention of PyTorch (each SDPA backend) and of FlashInfer, where they are installed: what the kernels are
compared with, in the same process. As many calls as a graph of the kernels has launches are a graph too where they
can be captured, else a loop; two events time them. Query heads that share a KV head are rows of one product, which is the fastest that they have.
"""

SDPA = ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"]
# Bytes of FlashInfer's workspace, and tokens of its pages.
WORKSPACE, PAGE_TOKENS = 128 << 20, 64


def captured(torch, call, launches):
    """So many calls as one graph, in which the host takes no part, or None where they cannot be captured."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(launches):
                call()
        return graph.replay
    # Whatever a program of others does that a graph cannot hold.
    except Exception:
        torch.cuda.synchronize()
        return None


def timed(torch, call, launches, rounds):
    """Seconds of one call, median and best, or why there are none."""
    try:
        warm = torch.cuda.Stream()
        with torch.cuda.stream(warm):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        replay = captured(torch, call, launches)

        def loop():
            for _ in range(launches):
                call()

        work, seconds = replay or loop, []
        work()
        torch.cuda.synchronize()
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3 / launches)
    # Whatever a program of others says of a shape.
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return f"refused: {lines[0]}"
    seconds.sort()
    return {"median": seconds[len(seconds) // 2], "best": seconds[0], "graph": replay is not None}


def sdpa(torch, name, shape):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    tokens, batch, heads, group, dim = shape
    make = lambda rows: torch.randn(batch, heads, rows, dim, device="cuda", dtype=torch.float16)
    query, key, value = make(group), make(tokens), make(tokens)

    def call():
        with sdpa_kernel(getattr(SDPBackend, name)):
            torch.nn.functional.scaled_dot_product_attention(query, key, value)

    return call


def flashinfer_decode(torch, flashinfer, tensor_cores, shape):
    tokens, batch, heads, group, dim = shape
    pages = tokens // PAGE_TOKENS
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=tensor_cores)
    whole = lambda *values: torch.tensor(values, dtype=torch.int32, device="cuda")
    ends = whole(*(pages * at for at in range(batch + 1)))
    indices = torch.arange(pages * batch, dtype=torch.int32, device="cuda")
    last = whole(*[PAGE_TOKENS] * batch)
    wrapper.plan(ends, indices, last, group * heads, heads, dim, PAGE_TOKENS,
                 q_data_type=torch.float16, kv_data_type=torch.float16)
    query = torch.randn(batch, group * heads, dim, device="cuda", dtype=torch.float16)
    cache = torch.randn(pages * batch, 2, PAGE_TOKENS, heads, dim, device="cuda",
                        dtype=torch.float16)
    return lambda: wrapper.run(query, cache)


def measure(workload, group, dim, launches, rounds):
    """A dictionary of `{median, best}` or reasons by name; or why there is none."""
    try:
        import torch
    except ImportError as error:
        return f"skipped because {error}"
    if not torch.cuda.is_available():
        return "skipped because PyTorch sees no GPU"
    shape = workload["tokens"], workload["batch"], workload["heads"], group, dim
    prepared = {f"PyTorch {torch.__version__} {name.lower()}":
                lambda name=name: sdpa(torch, name, shape) for name in SDPA}
    try:
        import flashinfer
        version = getattr(flashinfer, "__version__", "?")
        for cores, what in [(True, "tensor cores"), (False, "CUDA cores")]:
            prepared[f"FlashInfer {version}, {what}"] = (
                lambda cores=cores: flashinfer_decode(torch, flashinfer, cores, shape))
        answer = {}
    # Not only that it is not there: it may not load.
    except Exception as error:
        answer = {"FlashInfer": f"skipped because {error}"}
    for name, prepare in prepared.items():
        try:
            call = prepare()
        except Exception as error:
            answer[name] = f"refused: {(str(error).splitlines() or [type(error).__name__])[0]}"
            continue
        answer[name] = timed(torch, call, launches, rounds)
        del call
        torch.cuda.empty_cache()
    return answer
