"""A worker that shares GPU memory: a process of its own beside crates/kvd-cuda/tests/gpu.rs.

Takes 256 bytes of the GPU, fills them with 0..255, prints the 64 bytes of their IPC handle as hex, waits
for a line, and ends with 0 when the other process has written 255..0 there in the meantime.
"""

import ctypes
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import bench  # noqa: E402

BYTES = 256


def main():
    device = bench.Cuda(pathlib.Path(__file__).parent / "no-kernels")
    address = device.memory(BYTES)
    device.write(address, bytes(range(BYTES)))
    handle = ctypes.create_string_buffer(64)
    device.call("cuIpcGetMemHandle", handle, ctypes.c_uint64(address))
    print(handle.raw.hex(), flush=True)
    sys.stdin.readline()
    sys.exit(0 if device.read(address, BYTES) == bytes(reversed(range(BYTES))) else 1)


if __name__ == "__main__":
    main()
