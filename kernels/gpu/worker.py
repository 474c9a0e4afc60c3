"""A worker that shares GPU memory: a process of its own beside crates/kvd-cuda/tests/gpu.rs.

    worker.py ipc [BYTES]
    worker.py fd SOCKET

Takes memory of the GPU, 128 KiB or BYTES, fills its first 256 bytes with 0..255 and offers it: as a legacy IPC handle, or
as a POSIX descriptor that it sends over the Unix socket. Then it prints one line, how many bytes it has
and the 64 bytes of the handle (for a descriptor `-`) as hex, and waits for a line. A line "event HEX" is
the handle of an event: it waits for that, prints the bytes that are there by then as hex, and waits for
the next line. "write OFFSET HEX" writes to the memory and prints "written", "read OFFSET BYTES" prints what is
there as hex. Any other line ends it, with 0 when the other process has written 255..0 there in the
meantime.
"""

import ctypes
import pathlib
import socket
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import driver  # noqa: E402

BYTES = 256
MEMORY = 128 << 10

PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
POSIX_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM


class IpcEventHandle(ctypes.Structure):
    """Passed by value."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp; the flags at its end are compression, RDMA, usage and room, all 0."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


def by_handle(device, size):
    """Memory behind an IPC handle: address, bytes, what is printed of it."""
    address = device.memory(size)
    handle = ctypes.create_string_buffer(64)
    device.call("cuIpcGetMemHandle", handle, ctypes.c_uint64(address))
    return address, size, handle.raw.hex()


def by_descriptor(device, path):
    """The same behind a descriptor, which is sent: whole granules of virtual memory management."""
    location = Location(DEVICE, device.device)
    properties = Properties(PINNED, POSIX_DESCRIPTOR, location)
    granule = ctypes.c_size_t()
    device.call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(properties),
                ctypes.c_int(MINIMUM))
    size = -(-MEMORY // granule.value) * granule.value
    allocation, address = ctypes.c_uint64(), ctypes.c_uint64()
    device.call("cuMemCreate", ctypes.byref(allocation), ctypes.c_size_t(size), ctypes.byref(properties),
                ctypes.c_uint64(0))
    device.call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0),
                ctypes.c_uint64(0), ctypes.c_uint64(0))
    device.call("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), allocation, ctypes.c_uint64(0))
    access = Access(location, READ_AND_WRITE)
    device.call("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))
    descriptor = ctypes.c_int()
    device.call("cuMemExportToShareableHandle", ctypes.byref(descriptor), allocation,
                ctypes.c_int(POSIX_DESCRIPTOR), ctypes.c_uint64(0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.connect(path)
        socket.send_fds(stream, [b"m"], [descriptor.value])
    return address.value, size, "-"


def main():
    device = driver.Cuda(pathlib.Path(__file__).parent / "no-kernels")
    if sys.argv[1] == "ipc":
        address, size, handle = by_handle(device, int(sys.argv[2]) if len(sys.argv) > 2 else MEMORY)
    else:
        address, size, handle = by_descriptor(device, sys.argv[2])
    device.write(address, bytes(range(BYTES)))
    print(size, handle, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["event", handle]:
                shared = IpcEventHandle.from_buffer_copy(bytes.fromhex(handle))
                event = ctypes.c_void_p()
                device.call("cuIpcOpenEventHandle", ctypes.byref(event), shared)
                device.call("cuEventSynchronize", event)
                print(device.read(address, MEMORY).hex(), flush=True)
            case ["write", offset, digits]:
                device.write(address + int(offset), bytes.fromhex(digits))
                print("written", flush=True)
            case ["read", offset, count]:
                print(device.read(address + int(offset), int(count)).hex(), flush=True)
            case _:
                break
    sys.exit(0 if device.read(address, BYTES) == bytes(reversed(range(BYTES))) else 1)


if __name__ == "__main__":
    main()
