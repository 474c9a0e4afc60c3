"""Arrays that callers bring, and bf16 as bits."""

import array
import subprocess
import sys

import numpy as np
import pytest

import kvd
from kvd.arrays import read_rows


def test_bf16_bits_round_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, -3.4e38, 0.0, np.inf], "f4")
    bits = kvd.f32_to_bf16(values)
    assert bits.tolist() == [0x3F80, 0x3F80, 0x3F82, 0xFF80, 0, 0x7F80]
    assert np.isnan(kvd.bf16_to_f32(kvd.f32_to_bf16(np.array([np.nan], "f4"))))[0]
    exact = kvd.bf16_to_f32(np.arange(0x4000, 0x4100, dtype=np.uint16))
    assert np.array_equal(kvd.f32_to_bf16(exact), np.arange(0x4000, 0x4100))


def test_bits_need_their_name():
    bits = np.zeros((1, 2, 4), np.uint16)
    assert read_rows(bits, kvd.DType.BF16).dtype is kvd.DType.BF16
    with pytest.raises(kvd.InvalidArgument, match="bf16"):
        read_rows(bits)


def test_buffers_and_dlpack_are_arrays():
    assert read_rows(memoryview(array.array("f", [1, 2]))).values.tolist() == [1, 2]

    class Producer:
        def __init__(self, values):
            self.values = values

        def __dlpack__(self, **options):
            return self.values.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.values.__dlpack_device__()

    assert read_rows(Producer(np.ones(3, "f2"))).dtype is kvd.DType.F16
    for wrong in (np.ones(3), np.ones(3, ">f4"), [object()], None, "text"):
        with pytest.raises(kvd.InvalidArgument):
            read_rows(wrong)


def test_strided_rows_are_stored_as_they_are(region_client, rng):
    model = region_client.model("strided", kvd.Geometry(1, 2, 64), dtype="f32", codec="raw")
    heads_first = rng.standard_normal((2, 30, 64)).astype("f4")
    with model.open() as sequence:
        sequence.store(0, heads_first.transpose(1, 0, 2), heads_first[:, ::-1].transpose(1, 0, 2))
        k, v = sequence.load(0)
    np.testing.assert_array_equal(k, heads_first.transpose(1, 0, 2))
    np.testing.assert_array_equal(v, heads_first[:, ::-1].transpose(1, 0, 2))


def test_import_needs_neither_torch_nor_protobuf_nor_grpc():
    program = "import kvd, sys; print([m for m in ('torch', 'google', 'grpc') if m in sys.modules])"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert said.stdout == "[]\n"
