"""Dtypes: torch's names over numpy dtypes, the default dtype, and torch's promotion rules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._state import state


class dtype:
    """A tensor's element type, as ``torch.dtype``: printed ``tensorplay.float32``.

    Attributes: ``itemsize`` in bytes, ``is_floating_point``, ``is_complex``, ``is_signed``,
    ``numpy``, the ``numpy.dtype`` that holds such elements, and ``tensor_type``, torch's name of
    such tensors (``FloatTensor``).
    """

    __slots__ = (
        "is_complex",
        "is_floating_point",
        "is_signed",
        "itemsize",
        "name",
        "numpy",
        "tensor_type",
    )

    def __init__(self, name: str, scalar_type: Any, tensor_type: str) -> None:
        self.name, self.tensor_type = name, tensor_type
        self.numpy = np.dtype(scalar_type)
        self.itemsize = self.numpy.itemsize
        self.is_floating_point = bool(jnp.issubdtype(self.numpy, np.floating))
        self.is_complex = bool(jnp.issubdtype(self.numpy, np.complexfloating))
        self.is_signed = bool(name != "bool" and not jnp.issubdtype(self.numpy, np.unsignedinteger))

    def __repr__(self) -> str:
        return f"tensorplay.{self.name}"

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (_dtype_named, (self.name,))


bool_ = dtype("bool", np.bool_, "BoolTensor")
uint8 = dtype("uint8", np.uint8, "ByteTensor")
int8 = dtype("int8", np.int8, "CharTensor")
int16 = dtype("int16", np.int16, "ShortTensor")
int32 = dtype("int32", np.int32, "IntTensor")
int64 = dtype("int64", np.int64, "LongTensor")
float16 = dtype("float16", np.float16, "HalfTensor")
bfloat16 = dtype("bfloat16", jnp.bfloat16, "BFloat16Tensor")
float32 = dtype("float32", np.float32, "FloatTensor")
float64 = dtype("float64", np.float64, "DoubleTensor")
complex64 = dtype("complex64", np.complex64, "ComplexFloatTensor")
complex128 = dtype("complex128", np.complex128, "ComplexDoubleTensor")

ALL = (
    bool_, uint8, int8, int16, int32, int64,
    float16, bfloat16, float32, float64, complex64, complex128,
)  # fmt: skip
_BY_NUMPY = {d.numpy: d for d in ALL}
_BY_NAME = {d.name: d for d in ALL}
_CATEGORY = {
    d.numpy: 3 if d.is_complex else 2 if d.is_floating_point else 0 if d is bool_ else 1
    for d in ALL
}


def _dtype_named(name: str) -> dtype:
    return _BY_NAME[name]


def from_numpy_dtype(numpy_dtype: Any) -> dtype:
    """The dtype that a numpy (or jax) dtype stands for; TypeError where torch has none."""
    found = _BY_NUMPY.get(np.dtype(numpy_dtype))
    if found is None:
        raise TypeError(
            f"can't convert {np.dtype(numpy_dtype)} to a tensor dtype; the supported dtypes are "
            f"{', '.join(_BY_NAME)}"
        )
    return found


def scalar_name(d: dtype) -> str:
    """torch's name of the dtype's elements in messages: ``Float``, ``Long``."""
    return d.tensor_type.removesuffix("Tensor")


def get_default_dtype() -> dtype:
    """The floating dtype of new tensors in this thread (float32 unless set)."""
    return state.default_dtype or float32


def set_default_dtype(d: dtype) -> None:
    """Sets the floating dtype of new tensors in this thread.

    Raises:
        TypeError: ``d`` is not a floating dtype.
    """
    if not isinstance(d, dtype) or not d.is_floating_point:
        raise TypeError(f"only floating-point types are supported as the default type, got {d}")
    state.default_dtype = None if d is float32 else d


def category(numpy_dtype: Any) -> int:
    """0 for bool, 1 for integers, 2 for floating, 3 for complex: torch's promotion categories."""
    return _CATEGORY[np.dtype(numpy_dtype)]


def promote_types(type1: dtype, type2: dtype) -> dtype:
    """The smallest dtype to which both can be cast, as ``torch.promote_types``."""
    return _BY_NUMPY[np.dtype(_promote(type1.numpy, type2.numpy))]


def _promote(a: Any, b: Any) -> Any:
    if a == b:
        return a
    with jax.enable_x64(True):
        return np.dtype(jnp.promote_types(a, b))


def result_dtype(operands: Any) -> Any:
    """numpy dtype of an operation on ``operands``, as ``torch.result_type`` extends to n operands.

    Operands have ``.dtype`` and ``.ndim``; Python numbers arrive weakly typed (``weak_type``).
    Tensors with dims come before 0-d tensors, and those before Python numbers: a later kind
    changes the result only where its category is higher.
    """
    kinds: list[Any] = [None, None, None]
    for x in operands:
        kind = 2 if getattr(x, "weak_type", False) else 0 if x.ndim else 1
        found = _weak_dtype(x.dtype) if kind == 2 else np.dtype(x.dtype)
        kinds[kind] = found if kinds[kind] is None else _promote(kinds[kind], found)
    result = None
    for found in kinds:
        if found is None:
            continue
        if result is None:
            result = found
        elif category(found) > category(result):
            result = found if category(result) < 2 else _complex_of(result)
    return result


def _complex_of(floating: Any) -> Any:
    return np.dtype(np.complex128 if floating == np.float64 else np.complex64)


def _weak_dtype(numpy_dtype: Any) -> Any:
    if category(numpy_dtype) == 2:
        return get_default_dtype().numpy
    if category(numpy_dtype) == 3:
        return _complex_of(get_default_dtype().numpy)
    return np.dtype(numpy_dtype)


class finfo:
    """Limits of a floating dtype, as ``torch.finfo``: bits, eps, max, min, tiny, resolution."""

    def __init__(self, type: dtype | None = None) -> None:
        info = jnp.finfo((type or get_default_dtype()).numpy)
        self.bits, self.eps = int(info.bits), float(info.eps)
        self.max, self.min, self.tiny = float(info.max), float(info.min), float(info.tiny)
        self.smallest_normal, self.resolution = self.tiny, float(info.resolution)
        self.dtype = (type or get_default_dtype()).name


class iinfo:
    """Limits of an integer dtype, as ``torch.iinfo``: bits, max, min."""

    def __init__(self, type: dtype) -> None:
        info = np.iinfo(type.numpy)
        self.bits, self.max, self.min = info.bits, int(info.max), int(info.min)
        self.dtype = type.name
