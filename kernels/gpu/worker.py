"""A worker that shares GPU memory: a process of its own beside crates/kvd-cuda/tests/gpu.rs.

Takes memory of the GPU, fills its first 256 bytes with 0..255, prints the 64 bytes of its IPC handle as
hex, and waits for a line. A line "event HEX" is the handle of an event: it waits for that, prints the
bytes that are there by then as hex, and waits for the next line. Any other line ends it, with 0 when
the other process has written 255..0 there in the meantime.
"""

import ctypes
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import driver  # noqa: E402

BYTES = 256
MEMORY = 64 << 10


class IpcEventHandle(ctypes.Structure):
    """Passed by value."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


def main():
    device = driver.Cuda(pathlib.Path(__file__).parent / "no-kernels")
    address = device.memory(MEMORY)
    device.write(address, bytes(range(BYTES)))
    handle = ctypes.create_string_buffer(64)
    device.call("cuIpcGetMemHandle", handle, ctypes.c_uint64(address))
    print(handle.raw.hex(), flush=True)
    line = sys.stdin.readline()
    while line.startswith("event "):
        shared = IpcEventHandle.from_buffer_copy(bytes.fromhex(line.split()[1]))
        event = ctypes.c_void_p()
        device.call("cuIpcOpenEventHandle", ctypes.byref(event), shared)
        device.call("cuEventSynchronize", event)
        print(device.read(address, MEMORY).hex(), flush=True)
        line = sys.stdin.readline()
    sys.exit(0 if device.read(address, BYTES) == bytes(reversed(range(BYTES))) else 1)


if __name__ == "__main__":
    main()
