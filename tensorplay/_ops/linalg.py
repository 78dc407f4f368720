"""Matrix products."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from .._dtypes import from_numpy_dtype
from .._tensor import Tensor, wrap_dim
from .precision import dot_precision
from .primitive import primitive
from .promotion import promoted, strong

_C_NAMES = {
    "float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16",
    "int64": "long long", "int32": "int", "int16": "short", "int8": "signed char",
    "uint8": "unsigned char", "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}  # fmt: skip


def _same_dtype(a: Any, b: Any) -> None:
    if a.dtype != b.dtype:
        names = [from_numpy_dtype(x.dtype).name for x in (a, b)]
        raise RuntimeError(
            "expected m1 and m2 to have the same dtype, but got: "
            f"{_C_NAMES.get(names[0], names[0])} != {_C_NAMES.get(names[1], names[1])}"
        )


def _check_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    inner = b[-2] if len(b) > 1 else b[0]
    if a[-1] == inner:
        return
    if len(a) == len(b) == 1:
        raise RuntimeError(
            f"inconsistent tensor size, expected tensor [{a[0]}] and src [{b[0]}] to have the same "
            f"number of elements, but got {a[0]} and {b[0]} elements respectively"
        )
    if len(b) == 1 and len(a) == 2:
        raise RuntimeError(f"size mismatch, got input ({a[0]}), mat ({a[0]}x{a[1]}), vec ({b[0]})")
    if len(a) > 2 and len(b) > 2:
        batch = math.prod(b[:-2])
        raise RuntimeError(
            f"Expected size for first two dimensions of batch2 tensor to be: [{batch}, {a[-1]}] "
            f"but got: [{batch}, {b[-2]}]."
        )
    rows = math.prod(a[:-1])
    columns = b[-1] if len(b) > 1 else 1
    raise RuntimeError(
        f"mat1 and mat2 shapes cannot be multiplied ({rows}x{a[-1]} and {inner}x{columns})"
    )


@primitive("matmul")
def _matmul(a, b):
    _same_dtype(a, b)
    _check_matmul(a.shape, b.shape)
    return jnp.matmul(a, b, precision=dot_precision(a, b))


@primitive("outer")
def outer(a, b):
    """Products of all pairs of entries of two 1-D tensors."""
    if a.ndim != 1 or b.ndim != 1:
        wrong = a if a.ndim != 1 else b
        raise RuntimeError(f"outer: Expected 1-D argument self, but got {wrong.ndim}-D")
    return jnp.outer(*promoted(a, b))


ger = outer


@primitive("addmm")
def _addmm(bias, a, b, beta, alpha):
    _same_dtype(a, b)
    _check_matmul(a.shape, b.shape)
    product = jnp.matmul(a, b, precision=dot_precision(a, b))
    return strong(beta, a.dtype) * bias + strong(alpha, a.dtype) * product


@primitive("einsum")
def _einsum(*operands, equation):
    return jnp.einsum(equation, *operands, precision=dot_precision(*operands))


@primitive("tensordot")
def _tensordot(a, b, *, dims):
    return jnp.tensordot(a, b, dims, precision=dot_precision(a, b))


@primitive("kron")
def kron(a, b):
    """The Kronecker product."""
    return jnp.kron(*promoted(a, b))


@primitive("cross")
def _cross(a, b, *, dim):
    a, b = promoted(a, b)
    return jnp.cross(a, b, axis=dim)


@primitive("trace")
def trace(x):
    """The sum of the diagonal of a matrix."""
    return jnp.trace(x, dtype=x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int64)


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Matrix product with batch dims, as ``torch.matmul``."""
    for x in (input, other):
        if not isinstance(x, Tensor):
            raise TypeError(f"matmul(): expected a Tensor or a Python number, got {type(x)}")
    if input.dim() == 0 or other.dim() == 0:
        raise RuntimeError(
            "both arguments to matmul need to be at least 1D, but they are "
            f"{input.dim()}D and {other.dim()}D"
        )
    return _matmul(input, other)


def mm(input: Tensor, mat2: Tensor) -> Tensor:
    """Product of two matrices."""
    for name, x in (("self", input), ("mat2", mat2)):
        if x.dim() != 2:
            raise RuntimeError(f"{name} must be a matrix")
    return _matmul(input, mat2)


def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """Products of two batches of matrices."""
    for name, x in (("batch1", input), ("batch2", mat2)):
        if x.dim() != 3:
            raise RuntimeError(f"{name} must be a 3D tensor")
    if input.shape[0] != mat2.shape[0]:
        raise RuntimeError(
            "Expected size for first two dimensions of batch2 tensor to be: "
            f"[{input.shape[0]}, {input.shape[2]}] but got: [{mat2.shape[0]}, {mat2.shape[1]}]."
        )
    return _matmul(input, mat2)


def mv(input: Tensor, vec: Tensor) -> Tensor:
    """Product of a matrix and a vector."""
    if input.dim() != 2 or vec.dim() != 1:
        raise RuntimeError(f"vector + matrix @ vector expected, got 1, {input.dim()}, {vec.dim()}")
    return _matmul(input, vec)


def dot(input: Tensor, tensor: Tensor) -> Tensor:
    """Product of two vectors."""
    if input.dim() != 1 or tensor.dim() != 1:
        raise RuntimeError(
            f"1D tensors expected, but got {input.dim()}D and {tensor.dim()}D tensors"
        )
    return _matmul(input, tensor)


def vdot(input: Tensor, other: Tensor) -> Tensor:
    """Product of two vectors, the first conjugated."""
    return dot(input.conj() if input.is_complex() else input, other)


def inner(input: Tensor, other: Tensor) -> Tensor:
    """Sums of products over the last dims."""
    if input.dim() == 0 or other.dim() == 0:
        return input * other
    return tensordot(input, other, ([-1], [-1]))


def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """``beta * input + alpha * mat1 @ mat2``."""
    return _addmm(input, mat1, mat2, beta, alpha)


def addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * input + alpha * mat @ vec``."""
    return _addmm(input, mat, vec, beta, alpha)


def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """``beta * input + alpha * batch1 @ batch2``, over batches of matrices."""
    return _addmm(input, batch1, batch2, beta, alpha)


def einsum(equation: str, *operands: Any) -> Tensor:
    """Einstein summation, as ``torch.einsum``."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    return _einsum(*operands, equation=equation)


def tensordot(a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    """Products summed over ``dims``: a number of dims, or a pair of lists of dims."""
    if not isinstance(dims, int):
        dims = tuple(tuple(d) if isinstance(d, (list, tuple)) else (d,) for d in dims)
    return _tensordot(a, b, dims=dims)


def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    """The cross product of 3-vectors along ``dim`` (the first of size 3 if None)."""
    if dim is None:
        if 3 not in input.shape:
            raise RuntimeError("no dimension of size 3 in input")
        dim = tuple(input.shape).index(3)
    d = wrap_dim(dim, input.dim())
    if input.shape[d] != 3 or other.shape[d - input.dim()] != 3:
        raise RuntimeError(
            f"linalg.cross: inputs dimension {dim} must have length 3. Got {input.shape[d]} and "
            f"{other.shape[d - input.dim()]}"
        )
    return _cross(input, other, dim=d - input.dim())


def matrix_power(input: Tensor, n: int) -> Tensor:
    """The product of ``n`` copies of a matrix (of its inverse where ``n`` is negative)."""
    return _matrix_power(input, n=n)


@primitive("matrix_power")
def _matrix_power(x, *, n):
    return jnp.linalg.matrix_power(x, n)
