"""The CUDA driver's C functions, as bench.py and worker.py call them. Needs libcuda.so.1 and Python alone.

Functions are declared with the types of their arguments: without them ctypes passes a Python integer as 32 bits.
Kernels, handles and arguments are made once, so that a launch costs one call; what is timed is a graph of
launches between two events, in which the host takes no part.
"""

import ctypes
import pathlib
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

THREADS = 128

# Attributes of functions: bytes of dynamic shared memory at most, percent of the L1 that is shared memory.
SHARED_BYTES_MAX, SHARED_PERCENT = 8, 9
REGISTERS = 4
# Of the device.
MULTIPROCESSORS, L2_BYTES = 16, 38
# cuStreamCreate, cuStreamBeginCapture.
NON_BLOCKING, THREAD_LOCAL = 1, 1

SIGNATURES = {
    "cuInit": [c_uint],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuFuncGetAttribute": [POINTER(c_int), c_int, c_void_p],
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": [POINTER(c_int), c_void_p, c_int, c_size_t],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemcpyHtoD_v2": [c_uint64, c_char_p, c_size_t],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuMemcpyDtoDAsync_v2": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemsetD32_v2": [c_uint64, c_uint, c_size_t],
    "cuStreamCreate": [POINTER(c_void_p), c_uint],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamBeginCapture_v2": [c_void_p, c_int],
    "cuStreamEndCapture": [c_void_p, POINTER(c_void_p)],
    "cuGraphInstantiateWithFlags": [POINTER(c_void_p), c_void_p, c_uint64],
    "cuGraphLaunch": [c_void_p, c_void_p],
    "cuGraphDestroy": [c_void_p],
    "cuGraphExecDestroy": [c_void_p],
    "cuLaunchKernel": [c_void_p] + [c_uint] * 7 + [c_void_p, POINTER(c_void_p), c_void_p],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventElapsedTime": [POINTER(c_float), c_void_p, c_void_p],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuCtxSynchronize": [],
}


class Arguments:
    """The one parameter of a kernel, kept for as long as it is launched."""

    def __init__(self, parameters):
        self.bytes = ctypes.create_string_buffer(parameters, len(parameters))
        self.pointers = (c_void_p * 1)(ctypes.addressof(self.bytes))


class Cuda:
    """The first GPU, in the context that PyTorch uses too."""

    def __init__(self, fatbins, library="libcuda.so.1"):
        self.library = ctypes.CDLL(str(library))
        self.call("cuInit", 0)
        device = c_int()
        self.call("cuDeviceGet", device, 0)
        self.device = device.value
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", context, self.device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", name, 128, self.device)
        self.name = name.value.decode()
        self.modules = []
        for path in sorted(pathlib.Path(fatbins).glob("*.fatbin")):
            module = c_void_p()
            self.call("cuModuleLoadData", module, path.read_bytes())
            self.modules.append(module)
        self.stream = c_void_p()
        self.call("cuStreamCreate", self.stream, NON_BLOCKING)
        self.kept = []
        self.functions = {}

    def code(self, name, *arguments):
        function = getattr(self.library, name)
        # Callers of what is not listed name the types.
        function.argtypes = SIGNATURES.get(name)
        return function(*arguments)

    def call(self, name, *arguments):
        code = self.code(name, *arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def attribute(self, attribute):
        value = c_int()
        self.call("cuDeviceGetAttribute", value, attribute, self.device)
        return value.value

    def memory(self, size):
        """The address of new memory; its bytes are what they are."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", address, max(size, 1))
        self.kept.append(address.value)
        return address.value

    def placed(self, data):
        address = self.memory(len(data))
        self.write(address, data)
        return address

    def write(self, address, data):
        """They are there when it returns: what copies from pageable memory is ordered with no stream but one
        that is not used here."""
        if data:
            self.call("cuMemcpyHtoD_v2", address, bytes(data), len(data))
            self.call("cuCtxSynchronize")

    def fill(self, address, word, words):
        self.call("cuMemsetD32_v2", address, word, words)
        self.call("cuCtxSynchronize")

    def copy(self, to, source, size):
        """Within the device, behind what the stream has."""
        self.call("cuMemcpyDtoDAsync_v2", to, source, size, self.stream)

    def read(self, address, size):
        self.call("cuCtxSynchronize")
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, address, size)
        return data.raw

    def synchronize(self):
        self.call("cuStreamSynchronize", self.stream)

    def free_all(self):
        self.call("cuCtxSynchronize")
        for address in self.kept:
            self.call("cuMemFree_v2", address)
        self.kept.clear()

    def function(self, kernel):
        if kernel not in self.functions:
            function = c_void_p()
            found = (not self.code("cuModuleGetFunction", function, module, kernel.encode())
                     for module in self.modules)
            if not any(found):
                raise RuntimeError(f"no kernel {kernel} in the fat binaries")
            self.functions[kernel] = function
        return self.functions[kernel]

    def prepare(self, kernel, shared):
        """Lets a kernel have its shared memory, as the daemon does; gives the registers of a thread, and the
        thread blocks that a multiprocessor holds."""
        function = self.function(kernel)
        self.call("cuFuncSetAttribute", function, SHARED_BYTES_MAX, shared)
        self.call("cuFuncSetAttribute", function, SHARED_PERCENT, 100)
        registers, blocks = c_int(), c_int()
        self.call("cuFuncGetAttribute", registers, REGISTERS, function)
        self.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", blocks, function, THREADS, shared)
        return {"registers": registers.value, "blocks_per_sm": blocks.value}

    def launch(self, kernel, blocks, shared, arguments):
        self.call("cuLaunchKernel", self.function(kernel), blocks, 1, 1, THREADS, 1, 1, shared,
                  self.stream, arguments.pointers, None)

    def captured(self, work, launches):
        """So many turns of `work` as a graph. A refused launch ends the capture with it: nothing else can be asked
        of the context while a stream is captured."""
        graph, is_whole = c_void_p(), False
        self.call("cuStreamBeginCapture_v2", self.stream, THREAD_LOCAL)
        try:
            for turn in range(launches):
                work(turn)
            is_whole = True
        finally:
            # After an error the driver may answer one here too, and give no graph.
            code = self.code("cuStreamEndCapture", self.stream, graph)
            if graph.value and (code or not is_whole):
                self.code("cuGraphDestroy", graph)
        if code:
            raise RuntimeError(f"cuStreamEndCapture: CUDA error {code}")
        return graph

    def time(self, work, launches, rounds):
        """Seconds of one `work(turn)`, median and best: so many turns are one graph, which is launched once to
        warm up and then between two events, round by round. Nothing of it is left, whatever fails."""
        self.synchronize()
        graph, executable = self.captured(work, launches), c_void_p()
        events = []
        try:
            self.call("cuGraphInstantiateWithFlags", executable, graph, 0)
            self.call("cuGraphLaunch", executable, self.stream)
            self.synchronize()
            for _ in range(2):
                event = c_void_p()
                self.call("cuEventCreate", event, 0)
                events.append(event)
            seconds = [self.round(executable, *events) / launches for _ in range(rounds)]
        finally:
            for event in events:
                self.code("cuEventDestroy_v2", event)
            if executable.value:
                self.code("cuGraphExecDestroy", executable)
            self.code("cuGraphDestroy", graph)
        seconds.sort()
        return {"median": seconds[len(seconds) // 2], "best": seconds[0]}

    def round(self, executable, start, end):
        """Seconds of a graph."""
        self.call("cuEventRecord", start, self.stream)
        self.call("cuGraphLaunch", executable, self.stream)
        self.call("cuEventRecord", end, self.stream)
        self.call("cuEventSynchronize", end)
        elapsed = c_float()
        self.call("cuEventElapsedTime", elapsed, start, end)
        return elapsed.value / 1e3
