"""Arrays of callers: numpy, torch, and whatever speaks the buffer protocol or DLPack.

numpy has no bfloat16, so such values travel as their bits, in uint16. torch is never imported here:
a tensor can only come from a caller who has.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import InvalidArgument, ShapeMismatch

Array = npt.NDArray[Any]


class DType(enum.IntEnum):
    """Precision of K, V, queries and outputs, as the wire numbers them."""

    F32 = 1
    F16 = 2
    BF16 = 3

    @property
    def numpy(self) -> np.dtype[Any]:
        """What holds its values, or for BF16 their bits."""
        return _NUMPY[self]

    @classmethod
    def of(cls, value: DType | str) -> DType:
        """A dtype by its name: "f32", "float16", "bf16", "torch.bfloat16", …"""
        name = str(value).rpartition(".")[2].lower()
        try:
            return value if isinstance(value, DType) else _NAMES[name]
        except KeyError:
            raise InvalidArgument(f"dtype {value!r} is not f32, f16 or bf16") from None


_NUMPY: dict[int, np.dtype[Any]] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(np.uint16),
}
_BY_NUMPY = {_NUMPY[DType.F32]: DType.F32, _NUMPY[DType.F16]: DType.F16}
# Filled with what tensors came as.
_BY_TORCH: dict[Any, DType] = {}
_NAMES = {
    "f32": DType.F32,
    "float32": DType.F32,
    "f16": DType.F16,
    "float16": DType.F16,
    "half": DType.F16,
    "bf16": DType.BF16,
    "bfloat16": DType.BF16,
}


@dataclass
class Rows:
    """Values of a caller, as numpy sees them without a copy."""

    values: Array
    dtype: DType
    is_torch: bool = False

    def like(self, values: Array) -> Any:
        """New values of the same precision, as the kind of array that these came as."""
        if not self.is_torch:
            return values
        torch = sys.modules["torch"]
        if self.dtype is DType.BF16:
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)


def read_rows(array: Any, bits_are: DType | None = None) -> Rows:
    """Looks at an array, which is not copied.

    `bits_are` says what uint16 values are: BF16, or nothing.

    Raises `InvalidArgument` for arrays of another precision and for those outside host memory.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _read_tensor(torch, array)
    if not isinstance(array, np.ndarray):
        array = _to_numpy(array)
    known = _BY_NUMPY.get(array.dtype)
    if known is not None:
        return Rows(array, known)
    name = array.dtype.name
    if name == "uint16" and bits_are is DType.BF16:
        return Rows(array, DType.BF16)
    dtype = DType.BF16 if name == "bfloat16" else None
    if dtype is None or not array.dtype.isnative:
        hint = ' (bf16 as bits: pass dtype="bf16")' if name == "uint16" else ""
        raise InvalidArgument(f"an array of {array.dtype} is not f32, f16 or bf16{hint}")
    return Rows(array.view(np.uint16), dtype)


def _read_tensor(torch: Any, tensor: Any) -> Rows:
    kind = tensor.dtype
    dtype = _BY_TORCH.get(kind) or _NAMES.get(str(kind)[6:])
    if dtype is None:
        raise InvalidArgument(f"a tensor of {tensor.dtype} is not f32, f16 or bf16")
    if tensor.device.type != "cpu":
        raise InvalidArgument(f"a tensor is on {tensor.device}: kvd takes host memory, use .cpu()")
    _BY_TORCH[kind] = dtype
    tensor = tensor.detach()
    if dtype is DType.BF16:
        return Rows(tensor.view(torch.int16).numpy().view(np.uint16), dtype, True)
    return Rows(tensor.numpy(), dtype, True)


def _to_numpy(array: Any) -> Array:
    try:
        if hasattr(array, "__dlpack__") and not hasattr(array, "__array__"):
            return np.from_dlpack(array)
        return np.asarray(array)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise InvalidArgument(
            f"{type(array).__name__} is no array in host memory: {error}"
        ) from error


def check_shape(name: str, rows: Rows, shape: tuple[int | None, ...]) -> None:
    """Refuses values of another shape; None stands for any length."""
    given = rows.values.shape
    if len(given) != len(shape) or any(
        want is not None and got != want for got, want in zip(given, shape, strict=True)
    ):
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        raise ShapeMismatch(f"{name} has shape {list(given)}, not [{wanted}]")


def check_dtype(name: str, rows: Rows, dtype: DType) -> None:
    """Refuses values of another precision: a silent conversion would lose some."""
    if rows.dtype is not dtype:
        given, wanted = rows.dtype.name.lower(), dtype.name.lower()
        raise ShapeMismatch(f"{name} is {given}, the model's dtype is {wanted}: convert it first")


def bf16_to_f32(bits: Array) -> npt.NDArray[np.float32]:
    """The values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: Array) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16 values, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
