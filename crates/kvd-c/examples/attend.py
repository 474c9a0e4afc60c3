"""As attend.c, by ctypes alone: python3 attend.py LIBRARY REGION_SOCKET"""

import ctypes
import sys
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int32, c_uint32, c_uint64, c_void_p

TOKENS, KV_HEADS, Q_HEADS, DIM = 100, 2, 4, 64
ABSENT = 2**32 - 1


class Error(ctypes.Structure):
    _fields_ = [("code", c_int32), ("retry_after_ms", c_uint32), ("message", c_char * 504)]


class Options(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("ring_entries", c_uint32), ("region_path", c_char_p),
        ("name_space", c_char_p), ("session", c_char_p), ("memory_bytes", c_uint64),
        ("timeout_us", c_uint64), ("queries_max", c_uint32), ("spin_us", c_uint32),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("layers", c_uint32), ("kv_heads", c_uint32),
        ("head_dim_k", c_uint32), ("head_dim_v", c_uint32), ("block_tokens", c_uint32),
        ("dtype", c_uint32), ("rope", c_uint32), ("name", c_char_p), ("codec", c_char_p),
        ("calibration", c_void_p), ("calibration_bytes", c_uint64),
    ]


class StoreRows(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("layer", c_uint32), ("sequence", c_uint64),
        ("start", c_uint32), ("tokens", c_uint32), ("k", c_uint64), ("k_bytes", c_uint64),
        ("v", c_uint64), ("v_bytes", c_uint64),
    ]


class Rows(ctypes.Structure):
    _fields_ = [("offset", c_uint64), ("token_stride", c_uint64), ("head_stride", c_uint64)]


class Query(ctypes.Structure):
    _fields_ = [
        ("sequence", c_uint64), ("n_q", c_uint32), ("kv_length", c_uint32),
        ("position", c_uint32), ("start", c_uint32), ("end", c_uint32),
        ("sliding_window", c_uint32),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("layer", c_uint32), ("model", c_uint64),
        ("q_heads", c_uint32), ("dtype", c_uint32), ("scale", c_float), ("soft_cap", c_float),
        ("queries", POINTER(Query)), ("query_count", c_uint64), ("q", Rows), ("out", Rows),
        ("lse", c_uint64),
    ]


why = Error()


def check(code, step):
    if code != 0:
        sys.exit(f"{step}: code {code}: {why.message.decode()}")


def sized(kind, **fields):
    return kind(struct_bytes=ctypes.sizeof(kind), **fields)


def numbers(count, seed):
    return [((i * 7 + seed) % 61 - 30) / 16 for i in range(count)]


def main(library, socket):
    kvd = ctypes.CDLL(library)
    kvd.kvd_memory.restype = c_void_p
    kvd.kvd_memory.argtypes = [c_void_p, POINTER(c_uint64)]
    connection, size = c_void_p(), c_uint64()
    options = sized(Options, region_path=socket.encode(), timeout_us=60_000_000)
    check(kvd.kvd_connect(byref(options), byref(connection), byref(why)), "connect")
    memory = kvd.kvd_memory(connection, byref(size))

    def floats(offset, count):
        return (c_float * count).from_address(memory + offset)

    model = sized(
        Model, layers=1, kv_heads=KV_HEADS, head_dim_k=DIM, head_dim_v=DIM, dtype=1, rope=1,
        name=b"attend-c", codec=b"kivi-4; recent=0",
    )
    model_id, sequence = c_uint64(), c_uint64()
    check(kvd.kvd_register_model(connection, byref(model), byref(model_id), byref(why)), "register")
    check(kvd.kvd_open_sequence(connection, model_id, byref(sequence), byref(why)), "open")

    values = TOKENS * KV_HEADS * DIM
    floats(0, values)[:] = numbers(values, 1)
    floats(4 * values, values)[:] = numbers(values, 2)
    rows = sized(
        StoreRows, sequence=sequence.value, tokens=TOKENS, k=0, k_bytes=4 * values, v=4 * values,
        v_bytes=4 * values,
    )
    check(kvd.kvd_store(connection, byref(rows), None, byref(why)), "store")

    query = Query(sequence.value, 1, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT)
    for head in range(Q_HEADS):
        floats((1 << 20) + 4 * head * DIM, DIM)[:] = numbers(DIM, 3 + head)
    batch = sized(
        Batch, model=model_id.value, q_heads=Q_HEADS, dtype=1, queries=ctypes.pointer(query),
        query_count=1, q=Rows(1 << 20), out=Rows(2 << 20), lse=3 << 20,
    )
    check(kvd.kvd_attend(connection, byref(batch), byref(why)), "attend")
    for value in [*floats(2 << 20, Q_HEADS * DIM), *floats(3 << 20, Q_HEADS)]:
        print(f"{value:.9g}")
    kvd.kvd_disconnect(connection)


main(*sys.argv[1:])
