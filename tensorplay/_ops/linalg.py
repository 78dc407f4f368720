"""Matrix products."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .._tensor import Tensor
from .primitive import primitive
from .promotion import strong


def _same_dtype(a: Any, b: Any) -> None:
    if a.dtype != b.dtype:
        raise RuntimeError(
            f"expected m1 and m2 to have the same dtype, but got: {a.dtype} != {b.dtype}"
        )


@primitive("matmul")
def _matmul(a, b):  # type: ignore[no-untyped-def]
    _same_dtype(a, b)
    return jnp.matmul(a, b)


@primitive("outer")
def outer(a, b):  # type: ignore[no-untyped-def]
    return jnp.outer(a, b)


@primitive("addmm")
def _addmm(bias, a, b, beta, alpha):  # type: ignore[no-untyped-def]
    _same_dtype(a, b)
    return strong(beta, a.dtype) * bias + strong(alpha, a.dtype) * jnp.matmul(a, b)


@primitive("einsum")
def _einsum(*operands, equation):  # type: ignore[no-untyped-def]
    return jnp.einsum(equation, *operands)


def matmul(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    """Matrix product with batch dims, as ``torch.matmul``."""
    if input.dim() == 0 or other.dim() == 0:
        raise RuntimeError(
            "both arguments to matmul need to be at least 1D, but they are "
            f"{input.dim()}D and {other.dim()}D"
        )
    return _matmul(input, other)


def mm(input: Tensor, mat2: Tensor) -> Tensor:  # noqa: A002
    """Product of two matrices."""
    if input.dim() != 2 or mat2.dim() != 2:
        raise RuntimeError("mat1 and mat2 must be matrices (2-D tensors)")
    return _matmul(input, mat2)


def bmm(input: Tensor, mat2: Tensor) -> Tensor:  # noqa: A002
    """Products of two batches of matrices."""
    if input.dim() != 3 or mat2.dim() != 3:
        raise RuntimeError("batch1 and batch2 must be 3D tensors")
    return _matmul(input, mat2)


def mv(input: Tensor, vec: Tensor) -> Tensor:  # noqa: A002
    """Product of a matrix and a vector."""
    return _matmul(input, vec)


def dot(input: Tensor, tensor: Tensor) -> Tensor:  # noqa: A002
    """Product of two vectors."""
    if input.dim() != 1 or tensor.dim() != 1:
        raise RuntimeError("1D tensors expected")
    return _matmul(input, tensor)


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:  # noqa: A002, E501
    """``beta * input + alpha * mat1 @ mat2``."""
    return _addmm(input, mat1, mat2, beta, alpha)


def einsum(equation: str, *operands: Any) -> Tensor:
    """Einstein summation, as ``torch.einsum``."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    return _einsum(*operands, equation=equation)
