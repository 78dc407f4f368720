"""What several functions refuse, in torch's words."""

from __future__ import annotations

from collections.abc import Sequence

from ..._dtypes import dtype as Dtype
from ..._tensor import Tensor

_SCALAR_TYPES = {
    "bool": "Bool", "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int",
    "int64": "Long", "float16": "Half", "bfloat16": "BFloat16", "float32": "Float",
    "float64": "Double", "complex64": "ComplexFloat", "complex128": "ComplexDouble",
}  # fmt: skip
_C_TYPES = {
    "bool": "bool", "uint8": "unsigned char", "int8": "signed char", "int16": "short int",
    "int32": "int", "int64": "long int", "float16": "c10::Half", "bfloat16": "c10::BFloat16",
    "float32": "float", "float64": "double", "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}  # fmt: skip


def scalar_type(d: Dtype) -> str:
    """How torch's messages call a dtype, such as ``Long``."""
    return _SCALAR_TYPES[d.name]


def c_type(d: Dtype) -> str:
    """How torch's messages on matrix products call a dtype, such as ``long int``."""
    return _C_TYPES[d.name]


def require_floating(input: Tensor, kernel: str) -> None:
    """NotImplementedError where ``input`` is not floating; ``kernel`` is torch's name."""
    if not input.is_floating_point():
        raise NotImplementedError(f"\"{kernel}\" not implemented for '{scalar_type(input.dtype)}'")


def broadcast_shape(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """The common shape of ``a`` and ``b``.

    Raises:
        RuntimeError: they do not broadcast.
    """
    ndim = max(len(a), len(b))
    full_a, full_b = (1,) * (ndim - len(a)) + tuple(a), (1,) * (ndim - len(b)) + tuple(b)
    for dim, (m, n) in enumerate(zip(full_a, full_b, strict=True)):
        if m != n and 1 not in (m, n):
            raise RuntimeError(
                f"The size of tensor a ({m}) must match the size of tensor b ({n}) at "
                f"non-singleton dimension {dim}"
            )
    return tuple(n if m == 1 else m for m, n in zip(full_a, full_b, strict=True))
