"""Measures the kernels on a GPU, in one process with PyTorch's FP16 attention.

    bench.py FOLDER [--fatbins FOLDER] [--tokens N] [--heads N] [--emu LIBRARY]

FOLDER holds what crates/kvd-emu/tests/fixtures.rs writes: a few pages of each codec, their tables and
units, and what the kernels answered on the CPU. Pages are copied, so that each is read from memory of its
own, until there are `--tokens` tokens of `--heads` KV heads. A sequence of copies has the log-sum-exp of
the few pages plus the logarithm of how many copies it has: what does not is an error. Prints one JSON
object. `--emu` launches the CPU lane instead and measures nothing. Needs the driver's libcuda.so.1 and
Python alone; PyTorch where it is installed.
"""

import argparse
import ctypes
import json
import math
import pathlib
import struct
import sys

THREADS = 128
ROUNDS = 20
PAGE = struct.Struct("<QQ8I")  # PageEntry of page.cuh
SIDES_BYTES = 2 * 136  # SideShape twice, at the start of Unit
UNIT_TAIL = struct.Struct("<10I")
ATTEND = struct.Struct("<8Q4If5I")
MERGE = struct.Struct("<6Q2I")


class Emu:
    """The CPU lane: memory is the process's."""

    name = "cpu emulation"

    def __init__(self, library):
        self.library = ctypes.CDLL(library)
        self.kept = []

    def memory(self, size):
        buffer = ctypes.create_string_buffer(size + 256)
        self.kept.append(buffer)
        address = ctypes.addressof(buffer)
        return address + -address % 256

    def write(self, address, data):
        ctypes.memmove(address, data, len(data))

    def copy(self, to, source, size):
        ctypes.memmove(to, source, size)

    def read(self, address, size):
        return ctypes.string_at(address, size)

    def free_all(self):
        self.kept.clear()

    def blocks(self, kernel, shared):
        return {}

    def multiprocessors(self):
        return 1

    def launch(self, kernel, blocks, shared, parameters):
        error = ctypes.create_string_buffer(512)
        arguments = ctypes.create_string_buffer(parameters, len(parameters))
        failed = self.library.kvd_emu_launch(
            kernel.encode(), blocks, ctypes.c_size_t(shared), arguments,
            ctypes.c_size_t(len(parameters)), ctypes.c_uint64(0), error, ctypes.c_size_t(512))
        if failed:
            raise RuntimeError(error.value.decode())

    def time(self, work):
        work()
        return None


class Cuda:
    """A GPU through the driver's C functions, in the context that PyTorch uses too."""

    SHARED_BYTES_MAX = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS
    MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

    def __init__(self, fatbins):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", name, 128, self.device)
        self.name = name.value.decode()
        self.modules = []
        for path in sorted(pathlib.Path(fatbins).glob("*.fatbin")):
            module = ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), path.read_bytes())
            self.modules.append(module)
        self.kept = []

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def memory(self, size):
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.kept.append(address)
        return address.value

    def write(self, address, data):
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def copy(self, to, source, size):
        self.call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(source),
                  ctypes.c_size_t(size), None)

    def read(self, address, size):
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw

    def free_all(self):
        for address in self.kept:
            self.call("cuMemFree_v2", address)
        self.kept.clear()

    def function(self, kernel):
        function = ctypes.c_void_p()
        for module in self.modules:
            if not self.library.cuModuleGetFunction(
                    ctypes.byref(function), module, kernel.encode()):
                return function
        raise RuntimeError(f"no kernel {kernel} in the fat binaries")

    def blocks(self, kernel, shared):
        """Registers of a thread, and thread blocks that a multiprocessor holds."""
        function = self.function(kernel)
        self.call("cuFuncSetAttribute", function, self.SHARED_BYTES_MAX, shared)
        registers, blocks = ctypes.c_int(), ctypes.c_int()
        self.call("cuFuncGetAttribute", ctypes.byref(registers), self.REGISTERS, function)
        self.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), function,
                  THREADS, ctypes.c_size_t(shared))
        return {"registers": registers.value, "blocks_per_sm": blocks.value}

    def multiprocessors(self):
        count = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(count), self.MULTIPROCESSORS, self.device)
        return count.value

    def launch(self, kernel, blocks, shared, parameters):
        argument = ctypes.create_string_buffer(parameters, len(parameters))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        self.call("cuLaunchKernel", self.function(kernel), blocks, 1, 1, THREADS, 1, 1, shared,
                  None, arguments, None)

    def time(self, work):
        """Seconds of one call, median and best of some, by events."""
        work()
        events = []
        for _ in range(ROUNDS):
            pair = [ctypes.c_void_p(), ctypes.c_void_p()]
            for event in pair:
                self.call("cuEventCreate", ctypes.byref(event), 0)
            self.call("cuEventRecord", pair[0], None)
            work()
            self.call("cuEventRecord", pair[1], None)
            events.append(pair)
        self.call("cuCtxSynchronize")
        seconds = []
        for start, end in events:
            elapsed = ctypes.c_float()
            self.call("cuEventElapsedTime", ctypes.byref(elapsed), start, end)
            seconds.append(elapsed.value / 1e3)
        seconds.sort()
        return {"median": seconds[len(seconds) // 2], "best": seconds[0]}


class Fixture:
    """What fixtures.rs wrote of one codec."""

    def __init__(self, path):
        self.facts = json.loads(path.read_text())
        self.bytes = path.with_suffix(".bin").read_bytes()

    def __getitem__(self, name):
        fact = self.facts[name]
        if isinstance(fact, list):
            return self.bytes[fact[0]:fact[0] + fact[1]]
        return fact

    def units(self):
        size = SIDES_BYTES + UNIT_TAIL.size
        raw = self["units"]
        return [raw[at:at + size] for at in range(0, len(raw), size)]


def placed(device, data):
    address = device.memory(len(data))
    device.write(address, data)
    return address


def measure(device, fixture, tokens, heads):
    """One decode step over `tokens` tokens of `heads` KV heads."""
    group, dim, length = fixture["group"], fixture["dim"], len(fixture["arena"])
    copies = tokens // fixture["tokens"]
    pairs = -(-heads // fixture["heads"])
    arena = device.memory(length * copies * pairs)
    device.write(arena, fixture["arena"])
    for copy in range(1, copies * pairs):
        device.copy(arena + copy * length, arena, length)
    facts = device.blocks(fixture["kernel"], fixture["shared_bytes"])
    resident = device.multiprocessors() * facts.get("blocks_per_sm", 1)
    splits = max(1, resident // heads)
    units, pages, partials, base_units = [], [], [], fixture.units()
    base_pages = list(PAGE.iter_unpack(fixture["pages"]))
    rows = 0
    for head in range(heads):
        unit = base_units[head % fixture["heads"]]
        tail = list(UNIT_TAIL.unpack(unit[SIDES_BYTES:]))
        entries = []
        for copy in range(copies):
            at = (head // fixture["heads"] * copies + copy) * length
            for entry in base_pages[tail[0]:tail[0] + tail[1]]:
                first = entry[5] + copy * fixture["tokens"]
                entries.append(PAGE.pack(entry[0] + at, entry[1] + at, *entry[2:5], first,
                                         *entry[6:]))
        per_unit = -(-len(entries) // splits)
        mine = []
        for start in range(0, len(entries), per_unit):
            count = min(per_unit, len(entries) - start)
            # Pages, the query's position, and where the partial results go.
            tail[0:2], tail[6], tail[8] = [len(pages) + start, count], tokens - 1, rows
            units.append(unit[:SIDES_BYTES] + UNIT_TAIL.pack(*tail))
            mine.append(rows)
            rows += group
        pages += entries
        partials += [[first + row for first in mine] for row in range(group)]
    ends, order = [], []
    for row in partials:
        order += row
        ends.append(len(order))
    out, stats = device.memory(4 * rows * dim), device.memory(8 * rows)
    sums, results = device.memory(8 * len(ends) * dim), device.memory(12 * len(ends))
    tables = placed(device, fixture["tables"])
    attend = ATTEND.pack(
        arena, tables, placed(device, b"".join(pages)), placed(device, b"".join(units)),
        placed(device, fixture["queries"]), placed(device, fixture["offsets"]), out, stats,
        fixture["key_stage"], fixture["value_stage"], fixture["key_table"],
        fixture["value_table"], 0.0, fixture["chunks"], fixture["key_chunk"],
        fixture["value_chunk"], fixture["buffers"], 0)
    merge = MERGE.pack(out, stats, placed(device, struct.pack(f"<{len(ends)}I", *ends)),
                       placed(device, struct.pack(f"<{len(order)}I", *order)), sums, results,
                       dim, 0)

    def work():
        device.launch(fixture["kernel"], len(units), fixture["shared_bytes"], attend)
        device.launch("kvd_merge", len(ends), 0, merge)

    seconds = device.time(work)
    got = struct.unpack(f"<{3 * len(ends)}f", device.read(results, 12 * len(ends)))[::3]
    wanted = struct.unpack(f"<{len(fixture['lse']) // 4}f", fixture["lse"])
    off = max(abs(lse - wanted[row % len(wanted)] - math.log(copies))
              for row, lse in enumerate(got))
    device.free_all()
    if not off < 1e-4:
        raise RuntimeError(f"{fixture['codec']}: the log-sum-exp is off by {off}")
    payload = fixture["payload_bytes"] * copies * heads / fixture["heads"]
    return {"codec": fixture["codec"], "kernel": fixture["kernel"], "seconds": seconds,
            "page_bytes": payload, "thread_blocks": len(units), "lse_error": off,
            "shared_bytes": fixture["shared_bytes"], **facts}


def copy_bandwidth(device):
    """Bytes per second read, and as many written, by the driver's copy."""
    size = 1 << 30
    source, to = device.memory(size), device.memory(size)
    seconds = device.time(lambda: device.copy(to, source, size))
    device.free_all()
    return 2 * size / seconds["median"]


def torch_attention(tokens, heads, group, dim):
    """FP16 attention of PyTorch by backend; query heads that share a KV head are rows."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError as error:
        return f"skipped because {error}"
    if not torch.cuda.is_available():
        return "skipped because PyTorch sees no GPU"
    make = lambda rows: torch.randn(1, heads, rows, dim, device="cuda", dtype=torch.float16)
    query, key, value = make(group), make(tokens), make(tokens)
    answer = {"version": torch.__version__}
    for name in ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"]:
        seconds = []
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                for turn in range(ROUNDS + 1):
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    torch.nn.functional.scaled_dot_product_attention(query, key, value)
                    end.record()
                    end.synchronize()
                    # The first warms up.
                    seconds += [start.elapsed_time(end) / 1e3] if turn else []
        except (RuntimeError, AttributeError) as error:
            answer[name.lower()] = f"refused: {str(error).splitlines()[0]}"
            continue
        seconds.sort()
        answer[name.lower()] = {"median": seconds[len(seconds) // 2], "best": seconds[0]}
    return answer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--fatbins", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--emu")
    arguments = parser.parse_args()
    tokens, heads = arguments.tokens, arguments.heads
    fixtures = [Fixture(path) for path in sorted(arguments.folder.glob("*.json"))]
    if not fixtures:
        sys.exit(f"no fixtures in {arguments.folder}")
    group, dim = fixtures[0]["group"], fixtures[0]["dim"]
    if arguments.emu:
        device, torch, bandwidth = Emu(arguments.emu), "skipped because nothing is measured", None
    else:
        # Before the driver, so that both have one context.
        torch = torch_attention(tokens, heads, group, dim)
        device = Cuda(arguments.fatbins or arguments.folder)
        bandwidth = copy_bandwidth(device)
    rows = [measure(device, fixture, tokens, heads) for fixture in fixtures]
    print(json.dumps({"device": device.name, "tokens": tokens, "heads": heads, "group": group,
                      "dim": dim, "copy_bytes_per_second": bandwidth, "torch": torch,
                      "codecs": rows}, indent=1))


if __name__ == "__main__":
    main()
